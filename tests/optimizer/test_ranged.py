"""Models that serve declared ranges of shapes pass the accuracy gate as they serve, or are not returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import CLOCK, PAUSE, WORK, Planted
from tests.unit.test_ranges import Encoder, example
from wavecrest import Buckets, hardware, records
from wavecrest.errors import ClockError, PlanMismatch, PlanWarning
from wavecrest.graphs.bucketed import Bucketed
from wavecrest.measure import timing
from wavecrest.measure.ranges import Span, shape_of
from wavecrest.measure.workload import from_example
from wavecrest.optimizer import ranged
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.ledger import Ledger
from wavecrest.optimizer.measurer import Measurer
from wavecrest.optimizer.options import Options, Silent
from wavecrest.optimizer.ranged import FIXED, drawn, seconds_to_serve, serving
from wavecrest.optimizer.state import RunState
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id
from wavecrest.records import OptimizeRecord, Result

# what a cheat does to an answer, from the mask that the model sees
Change = Callable[[Tensor, Tensor], Tensor]
PADDING_FASTER, DYNAMIC_FASTER = 1.25, 0.8


class Changed(Encoder):
    """An encoder whose pooled answer a cheat changes."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        answer = super().forward(input_ids, attention_mask)
        return {**answer, "pooled": self.change(answer["pooled"], attention_mask)}


def made(
    *, budget: float = 900.0, compiled: bool = True, leaks: bool = False, batch: Span = (1, 4), length: Span = (1, 48)
) -> RunState:
    """A run at its end, with a compile step in force."""
    spans = Buckets(example=example(), batch=batch, length=length)
    workload = from_example(Encoder(leaks=leaks).eval(), spans)
    device, options = hardware.detect("cpu"), Options(budget=budget)
    ledger = Ledger(workload, device, options, folder=None)
    measurer = Measurer(workload, budget, Silent(), timing.HOST_CLOCK)
    run = RunState(
        workload, options, Silent(), device, ledger, measurer, NoAnalysis(workload), timing.HOST_CLOCK
    )  # fmt: skip
    run.gate = Gate.prepare(workload)
    ledger.record.gate = run.gate.summary
    if compiled:
        ledger.applied = AppliedSteps().plus(step_by_id("compile:default"), {"preset": "default"})
    ledger.record.result = Result(
        verdict="faster", ratio=2.0, ci=timing.Interval(1.9, 2.1), speed=[], numerics=[], quality=[]
    )
    return run


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """Serves a run whose two ways are given models, at a given ratio of times."""

    def with_ways(run: RunState, padded: nn.Module, dynamic: nn.Module, ratio: float) -> nn.Module:
        pair = timing.Paired((12.0,), (12.0 / ratio,), ratio, timing.Interval(ratio, ratio), "made up")
        monkeypatch.setattr(ranged, "_timed", lambda *_arguments: pair)
        monkeypatch.setattr(ranged, "_dynamic", lambda _model: dynamic.eval())
        run.current = padded.eval()
        return serving(run)

    return with_ways


def rows_of(run: RunState) -> list[records.BucketError]:
    assert run.ledger.record.result is not None
    return run.ledger.record.result.numerics


@pytest.mark.parametrize(("ratio", "kind"), [(PADDING_FASTER, Bucketed), (DYNAMIC_FASTER, Encoder)])
def test_the_faster_way_serves_once_it_has_passed_the_gate(ratio: float, kind: type, serve: Any) -> None:
    run = made()
    checks = run.gate.summary.checks
    assert type(serve(run, Encoder(), Encoder(), ratio)) is kind
    timed, passed = run.ledger.record.notes
    assert f"padding to 3 × 4 sizes takes {12.0 / ratio:.3f} ms for 12 calls, one dynamic graph 12.000 ms" in timed
    name = "padding" if kind is Bucketed else "one dynamic graph"
    assert f"{name} passed the accuracy gate at 1 × 1, 1 × " in passed and passed.endswith(
        ", 4 × 48 tokens, and serves"
    )
    buckets = {row.bucket for row in rows_of(run)}
    assert len(buckets) >= 3 and {"served b1s1", "served b4s48"} < buckets
    assert all(row.passed for row in rows_of(run)) and run.gate.summary.checks == checks + 1


def unseen(pooled: Tensor, mask: Tensor) -> Tensor:
    """Wrong where the ladder's own gate, at its fixed buckets, never looks."""
    return pooled if shape_of({"attention_mask": mask}) in [(1, 16), (2, 32), (4, 48)] else pooled * 1.01


def leaking(pooled: Tensor, mask: Tensor) -> Tensor:
    """Padding of whole columns counts, as only `Bucketed` adds it."""
    return pooled + 0.01 * (mask.sum(0) == 0).sum()


def one_row(pooled: Tensor, mask: Tensor) -> Tensor:
    """Wrong at batch 1, which a graph for all sizes compiles by itself."""
    return pooled * 1.01 if mask.shape[0] == 1 else pooled


@pytest.mark.parametrize("cheat", [unseen, leaking, one_row])
def test_padding_that_the_gate_refuses_leaves_the_dynamic_graph(cheat: Change, serve: Any) -> None:
    run, dynamic = made(), Encoder()
    assert serve(run, Changed(cheat), dynamic, PADDING_FASTER) is dynamic
    refused, passed = run.ledger.record.notes[1:]
    assert "the accuracy gate refuses padding: pooled " in refused and "of bucket served b" in refused
    assert "(rule: accuracy" in refused and "one dynamic graph passed" in passed
    assert all(row.passed for row in rows_of(run)) and len({row.bucket for row in rows_of(run)}) >= 3


@pytest.mark.parametrize("cheat", [unseen, one_row])
def test_a_dynamic_graph_that_the_gate_refuses_leaves_padding(cheat: Change, serve: Any) -> None:
    run = made()
    assert type(serve(run, Encoder(), Changed(cheat), DYNAMIC_FASTER)) is Bucketed
    refused, passed = run.ledger.record.notes[1:]
    assert "the accuracy gate refuses one dynamic graph" in refused and "(rule: accuracy)" in refused
    assert "padding passed" in passed


def test_where_the_gate_refuses_both_the_result_is_for_its_buckets(serve: Any) -> None:
    run, result = made(), Changed(unseen)
    assert serve(run, result, Changed(one_row), PADDING_FASTER) is result
    first, second, last = run.ledger.record.notes[1:]
    assert "refuses padding" in first and "refuses one dynamic graph" in second and "(rule: accuracy)" in second
    assert last == f"within the declared ranges: no way passed the accuracy gate; {FIXED}" and not rows_of(run)
    assert "others compile anew" in FIXED


def test_where_padding_would_change_answers_the_dynamic_graph_must_pass(serve: Any) -> None:
    run, dynamic = made(leaks=True), Encoder(leaks=True)
    assert serve(run, Encoder(leaks=True), dynamic, PADDING_FASTER) is dynamic
    assert "no padding: padding changes the answers" in run.ledger.record.notes[0]
    # a graph that heeds the mask is wrong for a model that does not
    wrong, result = made(leaks=True), Encoder(leaks=True)
    assert serve(wrong, result, Encoder(), PADDING_FASTER) is result
    assert "refuses one dynamic graph" in wrong.ledger.record.notes[1]
    assert "padding)" in wrong.ledger.record.notes[1] and FIXED in wrong.ledger.record.notes[2]


def test_without_times_padding_is_tried_first(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made()

    def no_time(*_arguments: Any) -> timing.Paired:
        raise ClockError("the clock stands still")

    serve(run, Encoder(), Encoder(), PADDING_FASTER)
    monkeypatch.setattr(ranged, "_timed", no_time)
    assert type(serving(run)) is Bucketed
    assert "padding and one dynamic graph have no times: the clock stands still" in run.ledger.record.notes[2]


def test_a_model_that_raises_within_the_ranges_keeps_its_result(serve: Any) -> None:
    run, result = made(), Encoder()

    def raises(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        if kwargs["input_ids"].shape[1] < 4:
            raise ValueError("too short")

    run.workload.model.register_forward_pre_hook(raises, with_kwargs=True)
    assert serve(run, result, Encoder(), PADDING_FASTER) is result
    (note,) = run.ledger.record.notes[-1:]
    assert "raised ValueError at a size within them: too short" in note and note.endswith(FIXED)


def test_what_the_time_left_does_not_hold_is_not_begun(serve: Any) -> None:
    run, result = made(budget=1.0), Encoder()
    run.costs.sizes = ranged.compilations(run.workload.ranges)
    assert seconds_to_serve(run) > run.costs.serving > 10
    assert serve(run, result, Encoder(), PADDING_FASTER) is result
    (note,) = run.ledger.record.notes
    assert "not tried: it takes about" in note and note.endswith(FIXED)


def test_eager_code_needs_neither() -> None:
    run = made(compiled=False)
    assert serving(run) is run.current and not run.ledger.record.notes and seconds_to_serve(run) == 0


class TimedEncoder(Encoder):
    """An encoder whose calls take simulated time."""

    pause = PAUSE

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        CLOCK.advance(WORK + self.pause)
        return super().forward(input_ids, attention_mask)


class Compiled(Planted):
    """Takes the pause out, as a compilation would."""

    id = title = "compiled"
    phase = "compile"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        return model


def test_the_files_hold_what_was_served_and_its_seconds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    real = ranged._checked

    def checked(*arguments: Any) -> Any:
        CLOCK.advance(7.0)
        spent.append(CLOCK.seconds)
        return real(*arguments)

    monkeypatch.setattr(ranged, "_dynamic", lambda model: model)
    monkeypatch.setattr(ranged, "_checked", checked)
    workload = from_example(TimedEncoder().eval(), Buckets(example=example(), batch=(1, 4), length=(1, 48)))
    result = run(Compiled(), workload=workload, out=tmp_path, budget=900.0)
    assert type(result.model) is Bucketed
    record = records.load_as(tmp_path / "run.json", OptimizeRecord)
    assert any("padding passed the accuracy gate" in note for note in record.notes)
    assert record.result is not None and "served b1s1" in {row.bucket for row in record.result.numerics}
    assert record.seconds is not None and len(spent) == 1 and record.seconds >= spent[0]
    assert "passed the accuracy gate" in (tmp_path / "report.html").read_text()


def test_a_plan_says_that_it_holds_no_ranges() -> None:
    run = made(compiled=False)
    declared = Buckets(example=example(), batch=(1, 4), length=(1, 48))
    with pytest.warns(PlanWarning, match="holds no ranges of shapes: its model is for fixed shapes"):
        run.ledger.plan.apply(run.workload.model, declared)
    with pytest.raises(PlanMismatch, match="holds no ranges"):
        run.ledger.plan.apply(run.workload.model, declared, strict=True)


@pytest.mark.slow
def test_both_ways_are_timed_and_answer_alike() -> None:
    torch._dynamo.reset()
    run = made(batch=(2, 2), length=(16, 24))
    run.current = build(run.workload.model, run.ledger.applied)
    served, ranges = serving(run), run.workload.ranges
    assert ranges is not None and served is not run.current
    with torch.no_grad():
        for call in drawn(ranges, example(), 4):
            assert torch.allclose(served(**call)["pooled"], run.workload.model(**call)["pooled"], atol=1e-5)
    assert "ms for 12 calls" in run.ledger.record.notes[0]
    torch._dynamo.reset()
