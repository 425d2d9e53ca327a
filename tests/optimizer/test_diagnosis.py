"""A step that was measured and not kept carries the cause: from two profiles, and from Dynamo's graph breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import CLOCK, AddPause, Nothing, TakePauseOut, slow
from tests.unit.test_profile_compare import FUSED, GEMM, gpu
from tests.unit.test_profile_compare import row as gpu_row
from wavecrest import hardware, records
from wavecrest.hardware import clocks
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer import diagnosis, trial
from wavecrest.optimizer.ledger import Ledger
from wavecrest.optimizer.measurer import Measurer
from wavecrest.optimizer.options import Options
from wavecrest.optimizer.progress import Silent
from wavecrest.optimizer.state import RunState
from wavecrest.optimizer.steps import AppliedSteps, step_by_id


def row(name: str, ms: float) -> records.OpTime:
    return records.OpTime(name=name, category="attention", shapes="8x8 float16", calls=1, ms=ms, share=1.0, kernels=[])


class Pauses(NoAnalysis):
    """The pause of a model as time in attention."""

    calls: list[float]

    def profile(self, model: nn.Module, ceilings: records.Ceilings | None) -> tuple[list[records.BucketProfile], str]:
        pause: Any = model.pause
        self.calls.append(pause)
        return [
            records.BucketProfile(
                bucket="default",
                wall_ms=1 + pause * 1e3,
                kernel_ms=1 + pause * 1e3,
                idle_ms=None,
                launches=1,
                categories=[],
                ops=[row("math" if pause > 0.006 else "flash", pause * 1e3)],
                uncategorized=[],
            )
        ], ""


def pauses(workload: Workload) -> Pauses:
    made = Pauses(workload)
    object.__setattr__(made, "calls", [])
    return made


def test_the_cause_of_a_loss_stands_in_its_row(run: Run) -> None:
    workload = from_example(*slow())
    step = run(AddPause(), workload=workload, analysis=pauses(workload)).record.steps[0]
    assert step.verdict == "reverted"
    assert (
        len(step.causes) == 1
        and step.causes[0].text.startswith("attention 6 → ")
        and "math came" in step.causes[0].text
    )
    assert step.reason.endswith(step.causes[0].text)


def test_a_tie_without_a_cost_says_so(run: Run) -> None:
    workload = from_example(*slow())
    step = run(Nothing(), workload=workload, analysis=pauses(workload)).record.steps[0]
    assert step.verdict == "tie"
    assert [cause.text for cause in step.causes] == ["no category of kernels takes 2 % of a call more than before"]


def test_the_base_is_the_model_as_optimized_so_far(run: Run) -> None:
    workload = from_example(*slow())
    analysis = pauses(workload)
    steps = run(TakePauseOut(), AddPause(), workload=workload, analysis=analysis).record.steps
    assert [step.verdict for step in steps[:2]] == ["kept", "reverted"]
    # a kept step has none, and the loss is counted from what it left
    assert steps[0].causes == [] and steps[1].causes[0].text.startswith("attention 0 → ")


def test_nothing_is_profiled_that_the_budget_does_not_hold(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 calls of 13 ms against 60 s
    monkeypatch.setattr(diagnosis, "PROFILE_SHARE", 0.26 / 60)
    workload = from_example(*slow())
    analysis = pauses(workload)
    step = run(AddPause(), workload=workload, analysis=analysis).record.steps[0]
    assert step.verdict == "reverted" and step.causes[0].text.startswith(
        "no time to profile why: it takes about 1 s, and "
    )


def test_graph_breaks_that_came_are_named() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break("planted")
        return x * 2

    before = diagnosis.Traced.so_far()
    assert not before.causes_since(before)
    torch.compile(broken, backend="eager")(torch.ones(2))
    found = before.causes_since(diagnosis.Traced.so_far())
    assert [cause.kind for cause in found] == ["graph_breaks"] and "graph_break" in found[0].text


def test_recompiles_are_named_while_timed_and_not_in_the_gate() -> None:
    """The gate calls other shapes on purpose, each of which compiles."""

    def plain(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(plain, backend="eager", dynamic=False)
    begun = diagnosis.Traced.so_far()
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    timed = diagnosis.Traced.so_far()
    assert not begun.causes_since(timed)
    # nothing is Inductor's here
    assert begun.seconds_since()[0] == begun.seconds_since()[1] > 0 and timed.seconds_since() == (0.0, 0.0)
    compiled(torch.ones(4))
    (cause,) = begun.causes_since(timed)
    assert (
        cause.kind == "recompiles"
        and "plain compiled again" in cause.text
        and __file__.rpartition("/")[2] in cause.text
    )


def sdpa(ms: float, kernel: str, shapes: str = "8x12x512x64, 8x12x512x64, 8x12x512x64 float16") -> records.OpTime:
    return gpu_row("aten::scaled_dot_product_attention", "attention", ms, kernel=kernel, shapes=shapes)


MASKED = "8x12x512x64, 8x12x512x64, 8x12x512x64, 8x1x512x512 float16"
WIDE = gpu_row("aten::mul", "elementwise", 1.1, kernel="vectorized_elementwise", shapes="8x512x768 float64")
READ = gpu_row("Memcpy DtoH (Device -> Pageable)", "memory", 0.01, calls=1)
BREAK = records.Cause(kind="graph_breaks", text="graph break: Tensor.item()")
# the candidate's profile, what Dynamo did, and the cause that stands first
SLOWER: dict[str, tuple[records.BucketProfile, list[records.Cause], str, str]] = {
    "a dense mask": (gpu(GEMM, sdpa(2.1, "fmha_cutlassF_f16", MASKED)), [], "dense_mask", "a mask that is written out"),
    "a forced math SDPA": (gpu(GEMM, sdpa(9.0, "softmax_warp_forward")), [], "math_attention", "took the math path"),
    "a float64 constant": (gpu(GEMM, FUSED, WIDE), [], "float64", "elementwise 0 → 1.1 ms"),
    "a host sync": (gpu(GEMM, FUSED, READ, idle=0.9), [], "host_sync", "the host reads from the device 1 times a call"),
    "a graph break": (gpu(GEMM, FUSED, idle=0.8, launches=140), [BREAK], "graph_breaks", "graph break: Tensor.item()"),
}


@pytest.mark.parametrize("planted", SLOWER)
def test_planted_slow_downs_are_named_by_the_diagnosis(planted: str) -> None:
    candidate, traced, kind, text = SLOWER[planted]
    found = diagnosis.diagnose(a_run(gpu(GEMM, FUSED), candidate), nn.Identity(), [a_speed()], traced)
    assert kind in {cause.kind for cause in found[:2]} and any(text in cause.text for cause in found[:2]), found
    others = {cause.kind for cause in found} - {kind}
    # a GPU that waits shows idle time too
    assert others <= ({"launch_gaps"} if planted in ("a host sync", "a graph break") else set())


def test_a_clock_that_is_held_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    low = clocks.Clocks(1305, 1980, ("its power limit",))
    monkeypatch.setattr(clocks, "reader", lambda device: lambda: low)
    found = diagnosis.diagnose(a_run(gpu(GEMM, FUSED), gpu(GEMM, FUSED)), nn.Identity(), [a_speed()], [])
    assert [cause.kind for cause in found] == ["unknown", "clocks"]
    assert found[1].text == "the GPU runs at 1,305 of 1,980 MHz, held down by its power limit while it was profiled"


def a_run(base: records.BucketProfile, new: records.BucketProfile) -> Any:
    """The part of a run that the diagnosis reads: these are the profiles of the model so far, and of the candidate."""
    return SimpleNamespace(
        seconds_left=100.0,
        progress=SimpleNamespace(phase=lambda text: None),
        current_profile=lambda: [base],
        profile=lambda model: [new],
        device=hardware.cpu(),
    )


def a_speed() -> Any:
    return SimpleNamespace(new_ms=1.0)


@pytest.mark.parametrize(("seconds", "anew"), [(1.0, True), (6.0, False)])
def test_ops_behind_a_graph_are_profiled_where_that_takes_little(
    seconds: float, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they are those of the last profile; times are those of the graph in both."""
    before, plain = gpu(GEMM, FUSED, launches=90), gpu(GEMM, launches=50)
    replayed = gpu(launches=1).model_copy(update={"kernel_ms": 2.5})
    applied = AppliedSteps().plus(step_by_id("replace_norm"), {"sites": []})
    applied = applied.plus(step_by_id("capture"), {"buckets": ["b1"], "compile": ""})
    run: Any = SimpleNamespace(
        ledger=SimpleNamespace(applied=applied, record=SimpleNamespace(profile_before=[])),
        workload=SimpleNamespace(model=nn.Identity()),
        context=SimpleNamespace(profile=[before]),
        longest_profile=seconds,
        seconds_left=100.0,
        profile=lambda model: [plain],
    )
    monkeypatch.setattr(trial, "build", lambda model, steps: model)
    (found,) = trial._with_ops(run, [replayed])
    expected = plain if anew else before
    assert (found.ops, found.launches) == (expected.ops, expected.launches) and found.kernel_ms == 2.5


def test_the_longest_profile_is_known() -> None:
    takes = iter([1.0, 3.0, 2.0])

    class Slow(NoAnalysis):
        def profile(self, model: nn.Module, ceilings: Any) -> tuple[list[records.BucketProfile], str]:
            CLOCK.advance(next(takes))
            return [], ""

    workload, options = from_example(*slow()), Options()
    measurer = Measurer(workload, 60.0, Silent(), CLOCK)
    ledger = Ledger(workload, hardware.cpu(), options, folder=None)
    state = RunState(workload, options, Silent(), hardware.cpu(), ledger, measurer, Slow(workload), CLOCK)
    seen = []
    for _ in range(3):
        state.profile(workload.model)
        seen.append(state.longest_profile)
    assert seen == pytest.approx([1.0, 3.0, 3.0])
