"""Launches that are tuned in the graph: the search on simulated times, what a plan holds, and what then runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import Planted, TakePauseOut
from tests.unit.test_doctor import MI300X
from wavecrest import hardware
from wavecrest import nn as ours
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import PlanError, StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.ops._gemm.call import linear_call
from wavecrest.optimizer.steps import AppliedSteps, Found, Prediction, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps import tune_launches as module
from wavecrest.optimizer.steps.tune_launches import Choice, search

STEP = step_by_id("tune_launches")
A, B = (1, "a"), (1, "b")
FAST, FASTER, SLOW, BROKEN = (("x", Config(BLOCK=size)) for size in (1, 2, 3, 4))

pytestmark = pytest.mark.usefixtures("unchosen")


class Replays:
    """Graphs whose ms are 100, less what their choices gain together."""

    def __init__(self, gains: Mapping[tuple[Key, Choice], float]) -> None:
        self.gains = gains
        self.recorded: list[Mapping[Key, Choice]] = []

    def record(self, chosen: Mapping[Key, Choice]) -> Mapping[Key, Choice]:
        if BROKEN in chosen.values():
            raise RuntimeError("out of resource: shared memory\nand more")
        self.recorded.append(chosen)
        return chosen

    def times(self, *recorded: Mapping[Key, Choice]) -> list[float]:
        return [100 - sum(self.gains.get(pair, 0.0) for pair in one.items()) for one in recorded]


def always() -> bool:
    return True


def test_each_gemm_gets_its_fastest_while_others_keep_theirs() -> None:
    graph = Replays({(A, FAST): 5, (A, FASTER): 9, (A, SLOW): -3, (B, FAST): 2})
    found = search({A: [FAST, SLOW, FASTER], B: [FAST, SLOW]}, graph, always)
    assert found.chosen == {A: FASTER, B: FAST}
    assert (found.before, found.after, found.tried, found.failed) == (100, 89, 5, [])
    assert graph.recorded == [{}, {A: FAST}, {A: SLOW}, {A: FASTER}, {A: FASTER, B: FAST}, {A: FASTER, B: SLOW}]


def test_less_than_the_least_gain_is_none() -> None:
    found = search({A: [FAST]}, Replays({(A, FAST): 100 * module.LEAST_GAIN / 2}), always)
    assert found.chosen == {} and found.tried == 1


def test_one_that_cannot_be_recorded_is_told_and_left_out() -> None:
    found = search({A: [BROKEN, FAST]}, Replays({(A, FAST): 5}), always)
    assert found.chosen == {A: FAST} and found.failed == ["x BLOCK=4: out of resource: shared memory"]


def test_it_ends_when_its_time_is_over() -> None:
    left = iter([True, True, False])
    found = search({A: [SLOW, FAST], B: [FAST]}, Replays({(A, FAST): 5, (B, FAST): 9}), lambda: next(left, False))
    assert found.chosen == {A: FAST} and found.tried == 2


def test_a_gain_that_is_gone_at_the_end_is_none() -> None:
    graph = Replays({(A, FAST): 5})
    asked = iter([[100.0, 95.0], [100.0, 101.0]])
    graph.times = lambda *_: next(asked)  # type: ignore[method-assign]
    assert search({A: [FAST]}, graph, always).chosen == {}


# ---- in a model


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ours.Linear(16, 24)
        self.down = ours.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.fixture
def op() -> Op:
    return registry.get("gemm")


def made() -> tuple[Workload, StepContext]:
    torch.manual_seed(0)
    workload = from_example(Two().eval(), torch.randn(4, 16))
    context = StepContext(workload, MI300X, model=structural_copy(workload.model))
    context.captured = True
    return workload, context


def key_of(op: Op, layer: ours.Linear, rows: int = 4) -> Key:
    with torch.no_grad():
        return op.key(linear_call(torch.randn(rows, layer.in_features), layer.weight, layer.bias))


def params(op: Op, workload: Workload, **more: Any) -> dict[str, Any]:
    return {"rows": [{"key": list(key_of(op, workload.model.up)), "backend": "planted", "config": {}} | more]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda context: dataclasses.replace(context, device=hardware.cpu()), "exist on GPUs only"),
        (lambda context: dataclasses.replace(context, captured=False), "no capture is in force"),
        (lambda context: dataclasses.replace(context, compiled=True), "the choices that it was compiled with"),
    ],
)
def test_where_it_finds_nothing_it_says_why(change: Callable[[StepContext], StepContext], why: str) -> None:
    _, context = made()
    found = STEP.find(change(context))
    assert not found.sites and why in found.note


def test_gemms_of_few_rows_are_looked_at_the_largest_first(op: Op) -> None:
    workload, context = made()
    up, down = key_of(op, workload.model.up), key_of(op, workload.model.down)
    assert module.keys_of(context) == [up, down]
    # the model's decisions here are not what it asks for
    assert not [decision for decision, _ in op.decisions() if decision.key == up]
    wide = from_example(workload.model, torch.randn(module.MOST_ROWS + 1, 16))
    assert module.keys_of(dataclasses.replace(context, workload=wide)) == []


def test_candidates_are_all_that_take_the_call_but_the_one_in_force(op: Op) -> None:
    workload, context = made()
    up = key_of(op, workload.model.up)
    names = [backend for backend, _ in module._field(context, up)]
    assert "planted" in names and not {"torch", "reference"} & set(names)
    op.pin(up, "planted", None, "exact", "a plan's")
    names = [backend for backend, _ in module._field(context, up)]
    assert "torch" in names and "planted" not in names
    # of a key that no call can be made from
    assert module._field(context, (*up[:5], "unknown", *up[6:])) == []


def test_what_it_finds_is_run_in_the_model_and_nowhere_else(
    op: Op, monkeypatch: pytest.MonkeyPatch, unchosen: list[tuple[int, ...]]
) -> None:
    workload, context = made()
    up = key_of(op, workload.model.up)
    fields = {up: [("planted", None)]}
    monkeypatch.setattr(module, "_field", lambda context, key: fields.get(key, []))
    monkeypatch.setattr(module, "_Graph", lambda context: Replays({(up, ("planted", None)): 20}))
    found = STEP.find(context)
    assert found.sites == ("4 × 24 × 16 float32",) and found.saved_ms == 20
    assert found.note == (
        "1 changed, of 1 candidates for 2 GEMMs in the graph; no call can be made of, or nothing else runs, "
        "4 × 16 × 24 float32: 100000 → 80000 µs"
    )
    assert found.params == params(op, workload)
    assert STEP.check_params(found.params) == []

    model = build(workload.model, AppliedSteps().plus(STEP, found.params))
    unchosen.clear()
    x = torch.randn(4, 16)
    with torch.no_grad():
        expected = workload.model(x)
        assert unchosen == []
        assert torch.allclose(model(x), expected, atol=1e-5)
        assert unchosen == [(4, 16)]
        # a copy, as of a result that is given away, does the same
        copied = copy.deepcopy(model)
        assert torch.allclose(copied(x), expected, atol=1e-5) and len(unchosen) == 2
        # calls with other keys run as they did
        model(torch.randn(70, 16))
        assert len(unchosen) == 2
        workload.model(x)
        assert len(unchosen) == 2


def test_nothing_faster_is_told_with_what_was_tried(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    _, context = made()
    monkeypatch.setattr(module, "_field", lambda context, key: [FAST, BROKEN])
    monkeypatch.setattr(module, "_compile", lambda fields, context: None)
    monkeypatch.setattr(module, "_Graph", lambda context: Replays({}))
    found = STEP.find(context)
    assert not found.sites
    assert found.note == (
        "dispatch's choices are the fastest of 4 candidates for 2 GEMMs in the graph; 2 failed (x BLOCK=4: out of "
        "resource: shared memory)"
    )


def test_candidates_without_time_are_told(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    _, context = made()
    monkeypatch.setattr(module, "_field", lambda context, key: [FAST, SLOW])
    monkeypatch.setattr(module, "_compile", lambda fields, context: None)
    monkeypatch.setattr(module, "_Graph", lambda context: Replays({}))
    context.seconds_left = 0.0
    assert STEP.find(context).note.endswith("of 0 candidates for 2 GEMMs in the graph; 4 had no time")


def test_compiled_code_is_left_as_it_is(op: Op) -> None:
    workload, _ = made()
    model = structural_copy(workload.model)
    model._compiled_call_impl = compiled = lambda *args: None
    STEP.apply(model, params(op, workload))
    assert model._compiled_call_impl is compiled and "forward" not in vars(model)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"key": [1, 2]}, "a key of gemm has 18 parts here, and 2 in the plan"),
        ({"backend": "nobody"}, "gemm has no backend nobody"),
        ({"backend": "triton", "config": {"BLOCK_Q": 3}}, "does not know BLOCK_Q=3"),
        ({"config": {"BLOCK_M": 16}}, "takes no configuration"),
    ],
)
def test_what_a_plan_holds_must_be_of_this_version(op: Op, more: dict[str, Any], why: str) -> None:
    workload, _ = made()
    with pytest.raises(StepRefused, match=why):
        STEP.apply(structural_copy(workload.model), params(op, workload, **more))


@pytest.mark.parametrize("config", [{"num_warps": -1}, {"num_warps": 1 << 20}, {"num_warps": "4"}])
def test_a_plan_with_other_settings_is_damaged(op: Op, config: dict[str, Any]) -> None:
    workload, _ = made()
    with pytest.raises(PlanError):
        STEP.check_params(params(op, workload, config=config))


def test_the_planner_looks_again_once_a_capture_is_in_force(run: Run) -> None:
    """Before it nothing is there to tune, and no module changes by a capture."""
    seen: list[bool] = []

    class Captures(Planted):
        id, title, phase = "capture", "capture", "capture"

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            model.pause = model.pause / 2
            return model

    class InGraphs(TakePauseOut):
        id = title = "inside"
        in_graphs = True

        def find(self, context: StepContext) -> Found:
            seen.append(context.captured)
            return super().find(context) if context.captured else Found((), note="no capture is in force")

        def predict(self, found: Found, context: StepContext) -> Prediction:
            return Prediction(9.0, "planted")

    rows = run(InGraphs(), Captures(), budget=300.0).record.steps
    assert [(row.id, row.verdict) for row in rows] == [("capture", "kept"), ("inside", "kept")]
    assert seen[0] is False and seen[-1] is True
