"""Gains too small to be kept one by one are tried together, and are one step of the plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import CLOCK, AddPause, Planted, slow
from wavecrest.errors import PlanError
from wavecrest.graphs.inductor import PRESETS
from wavecrest.optimizer.api import OptimizeResult
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import Found, Prediction, StepContext
from wavecrest.optimizer.steps.compile import Compile
from wavecrest.optimizer.steps.join_ties import JoinTies
from wavecrest.optimizer.steps.ladder import step_by_id


class Saves(Planted):
    """Takes a share of the pause out, once."""

    def __init__(self, name: str, share: float, group: str | None = None) -> None:
        self.id = self.title = name
        self.share, self.group = share, group

    def find(self, context: StepContext) -> Found:
        assert context.model is not None
        done = self.id in getattr(context.model, "done", ())
        return Found((), note="done") if done else Found(("model",), {"share": self.share})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(1 + self.share, "planted")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = model.pause * (1 - params["share"])
        model.done = (*getattr(model, "done", ()), self.id)
        return model


def rows(result: OptimizeResult) -> dict[str, str]:
    return {row.id: row.verdict for row in result.record.steps}


def test_small_gains_are_kept_together(run: Run) -> None:
    steps = Saves("a", 0.013), Saves("b", 0.016), Saves("c", 0.012), AddPause()
    result = run(*steps, JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    assert rows(result) == {"a": "tie", "b": "tie", "c": "tie", "slow": "reverted", "join_ties": "kept"}
    joined = next(row for row in result.record.steps if row.id == "join_ties")
    measured = {row.id: row.ratio for row in result.record.steps}
    # in the order of what they gained
    order = sorted("abc", key=lambda name: -(measured[name] or 0))
    shares = {"a": 0.013, "b": 0.016, "c": 0.012}
    assert joined.sites == [f"{name} × 1" for name in order]
    assert joined.params == {"steps": [{"id": name, "params": {"share": shares[name]}} for name in order]}
    assert joined.predicted == pytest.approx(math.prod(measured[name] or 0 for name in order))
    assert joined.prediction.startswith("measured one by one: 1.0")
    assert joined.ratio == pytest.approx(1 / math.prod(1 - share for share in shares.values()), rel=0.01)
    assert [row.id for row in result.plan.kept()] == ["join_ties"]
    # the plan does the same again
    model = Plan.model_validate_json(result.plan.model_dump_json()).apply(slow()[0])
    assert model.done == result.model.done == tuple(order) and model.pause == pytest.approx(result.model.pause)


def test_what_is_in_force_with_others_is_not_tried_again(run: Run) -> None:
    """Also where a step would not see that its sites are gone."""

    class Blind(Saves):
        def find(self, context: StepContext) -> Found:
            return Found(("model",), {"share": self.share})

    result = run(Blind("a", 0.024), Blind("b", 0.025), JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    assert [(row.id, row.attempt, row.verdict) for row in result.record.steps][-1] == ("join_ties", 1, "kept")
    assert len(result.record.steps) == 3


def test_a_step_is_joined_behind_those_that_make_its_sites(run: Run) -> None:
    """The larger gain is of a step that is tried after the other one."""

    class Behind(Saves):
        tried_after = ("a",)

    result = run(Saves("a", 0.024), Behind("b", 0.03), JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    joined = next(row for row in result.record.steps if row.id == "join_ties")
    assert joined.verdict == "kept" and joined.sites == ["a × 1", "b × 1"]


def test_ties_are_joined_before_each_is_tried_again(run: Run) -> None:
    """A step that is kept behind them gives each a second trial; together they take one."""

    class Late(Saves):
        tried_after = ("a", "b")

    result = run(
        Saves("a", 0.02), Saves("b", 0.024), Late("large", 0.4), JoinTies(step_by_id), budget=600.0, min_gain=0.03
    )
    assert [(row.id, row.attempt, row.verdict) for row in result.record.steps] == [
        ("b", 1, "tie"), ("a", 1, "tie"), ("large", 1, "kept"), ("join_ties", 1, "kept")
    ]  # fmt: skip


class Captures(Saves):
    """Gains by itself as much as surgery that ties."""

    phase, group = "capture", "capture"

    def __init__(self, share: float) -> None:
        super().__init__("capture", share, "capture")

    def find(self, context: StepContext) -> Found:
        return Found(("default",), {"share": self.share, "buckets": ["default"]})


def test_a_capture_that_ties_is_kept_with_surgery_that_does(run: Run, tmp_path: Path) -> None:
    """The gated MLP of an 8 B Llama gained 1.023, its capture 1.015: neither was kept (a prompt, H200, 2026-11-28)."""
    steps = Saves("a", 0.026), Captures(0.024), JoinTies(step_by_id)
    result = run(*steps, budget=300.0, min_gain=0.03, out=tmp_path)
    joined, captured = result.record.steps[-2:]
    assert rows(result) == {"a": "tie", "capture": "kept", "join_ties": "kept"}
    assert joined.sites == ["a × 1", "capture"]
    assert joined.params == {"steps": [{"id": "a", "params": {"share": 0.026}}], "captured": True}
    measured = [row.ratio or 0 for row in result.record.steps[:2]]
    assert joined.predicted == pytest.approx(math.prod(measured)) and joined.ratio == pytest.approx(1.05, abs=0.01)
    assert (captured.id, captured.attempt, captured.ratio) == ("capture", 2, None)
    assert "tried together with the step before it, small gains together" in captured.reason
    # both are in force, the capture last, in the plan on disk too
    kept = [row.id for row in result.plan.kept()]
    assert kept == ["join_ties", "capture"] == [row.id for row in Plan.load(tmp_path / "plan.json").kept()]
    assert result.record.result is not None and result.record.result.ratio == pytest.approx(1.05, abs=0.01)


def test_a_capture_that_ties_alone_is_not_joined(run: Run) -> None:
    """Nor one with surgery that gains nothing."""
    result = run(Saves("a", 0.0), Captures(0.018), JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    assert rows(result)["join_ties"] == "skipped" and rows(result)["capture"] == "tie"


def test_a_capture_is_not_joined_behind_a_compilation(run: Run) -> None:
    ties = Saves("a", 0.022), Captures(0.018), JoinTies(step_by_id)
    result = run(*ties, Compiles(2.0, share=0.3), budget=300.0, min_gain=0.03)
    assert rows(result)["compile:default"] == "kept" and rows(result)["join_ties"] == "skipped"


class Compiles(Planted):
    """Promises little, and takes `seconds` at the first call of each process that compiles."""

    id, title, phase = "compile:default", "compile default", "compile"

    def __init__(self, promised: float = 1.02, share: float = 0.0, seconds: float = 0.0) -> None:
        self.promised, self.share, self.seconds = promised, share, seconds

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(self.promised, "planted")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        CLOCK.advance(self.seconds)
        model.pause = model.pause * (1 - self.share)
        return model


def test_ties_are_joined_before_a_compilation_that_promises_less_a_second(run: Run) -> None:
    """A compilation and its proof took the time of the joined trial (300 s, an 8 B decode on one H200, 2026-11-28)."""
    ties = Saves("a", 0.02), Saves("b", 0.024), JoinTies(step_by_id)
    order = [row.id for row in run(*ties, Compiles(), budget=300.0, min_gain=0.03).record.steps]
    assert order[:4] == ["b", "a", "join_ties", "compile:default"]
    order = [row.id for row in run(*ties, Compiles(2.0), budget=300.0, min_gain=0.03).record.steps]
    assert order[0] == "compile:default" and order[3] == "join_ties"


class Needs(Saves):
    """Has its sites behind "first" alone."""

    needs = tried_after = ("first",)

    def find(self, context: StepContext) -> Found:
        done = getattr(context.model, "done", ())
        return super().find(context) if "first" in done else Found((), note="nothing is ready for it")


@pytest.mark.parametrize(
    ("loss", "verdict", "joined"),
    [(-0.01, "tie", True), (0.012, "tie", True), (0.028, "reverted", True), (0.06, "reverted", False)],
)
def test_what_lost_by_a_little_is_tried_with_the_step_that_needs_it(
    run: Run, loss: float, verdict: str, joined: bool
) -> None:
    """Attention alone was 0.99 times as fast, and what gains from it was never tried (H200, 2026-11-28)."""
    result = run(Saves("first", -loss), Needs("second", 0.1), JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    assert rows(result)["first"] == verdict
    assert rows(result)["join_ties"] == ("kept" if joined else "skipped")
    if joined:
        row = next(row for row in result.record.steps if row.id == "join_ties")
        measured = next(row.ratio for row in result.record.steps if row.id == "first")
        assert measured is not None and row.sites == ["first × 1", "second × 1"]
        assert row.predicted == pytest.approx(measured * 1.1)
        assert row.prediction == f"measured one by one: {measured:.3f}; 1.100 by prediction: planted"
        assert [row.id for row in result.plan.kept()] == ["join_ties"]


def test_what_lost_is_not_joined_for_a_step_that_finds_nothing(run: Run) -> None:
    class Never(Needs):
        def find(self, context: StepContext) -> Found:
            return Found((), note="no sites at all")

    steps = Saves("first", -0.012), Never("second", 0.1), Saves("a", 0.02), Saves("b", 0.024)
    result = run(*steps, JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    row = next(row for row in result.record.steps if row.id == "join_ties")
    assert row.verdict == "kept" and sorted(row.sites) == ["a × 1", "b × 1"]


def test_one_small_gain_and_losses_are_not_joined(run: Run) -> None:
    result = run(
        Saves("a", 0.013), Saves("worse", -0.012), AddPause(), JoinTies(step_by_id), budget=300.0, min_gain=0.03
    )
    assert rows(result)["join_ties"] == "skipped"
    reason = result.record.steps[-1].reason
    assert reason == "no two steps of this run have gained less than what is kept"


def test_rivals_and_what_is_kept_are_not_joined(run: Run) -> None:
    """One step of a group is joined, and none of a group whose other step is in force."""
    steps = (
        Saves("a", 0.02, "x"), Saves("b", 0.024, "x"), Saves("c", 0.022),
        Saves("large", 0.4, "y"), Saves("d", 0.02, "y"),
    )  # fmt: skip
    result = run(*steps, JoinTies(step_by_id), budget=600.0, min_gain=0.03)
    assert {row.id for row in result.record.steps if row.verdict == "kept"} == {"large", "join_ties"}
    joined = next(row for row in result.record.steps if row.id == "join_ties")
    assert {row["id"] for row in joined.params["steps"]} == {"b", "c"}


@pytest.mark.parametrize(
    ("inner", "match"),
    [
        ([], "at least 1 item"),
        ([{"id": "a", "params": {}}], "at least 2 steps, a graph capture among them"),
        ([{"id": "a", "params": {}}, {"id": "not there", "params": {}}], "no step 'not there' in this wavecrest"),
        ([{"id": "a", "params": {}}, {"id": "join_ties", "params": {}}], "join_ties is no surgery on modules"),
        ([{"id": "a", "params": {}}, {"id": "compile:default", "params": {}}], "compile:default is no surgery on mod"),
        ([{"id": "a", "params": {}, "path": ""}] * 2, "path"),
    ],
)
def test_a_plan_joins_surgery_alone(inner: list[dict[str, Any]], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Saves("a", 0.1), JoinTies(step_by_id), Compile(PRESETS["default"])]
    monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: {step.id: step for step in steps})
    with pytest.raises(PlanError, match=match):
        JoinTies(step_by_id).check_params({"steps": inner})


def test_each_step_is_looked_for_behind_the_ones_before(run: Run) -> None:
    """Two steps that want the same layer: the second finds nothing left to change."""
    first, second = Saves("a", 0.013), Saves("b", 0.016)
    # both have the same mark
    first.apply = second.apply  # type: ignore[method-assign]
    first.find = second.find  # type: ignore[method-assign]
    result = run(first, second, JoinTies(step_by_id), budget=300.0, min_gain=0.03)
    assert rows(result) == {"a": "tie", "b": "tie", "join_ties": "skipped"}
