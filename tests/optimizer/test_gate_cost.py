"""How many calls the gate makes, and where: few of slow ones, and never fewer than its rules need."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clock import SimulatedClock
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import ALL_RULES, Gate, failures
from wavecrest.optimizer.gate.gate import CALLS, CALLS_A_BUCKET, FEWEST_CALLS, SECONDS_A_TRIAL
from wavecrest.optimizer.gate.rules import RuleBroken
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id
from wavecrest.records import BucketError

pytestmark = pytest.mark.usefixtures("one_thread")


class Paced(nn.Module):
    """A row takes `seconds` on the simulated clock, in the original; calls are counted by their rows."""

    def __init__(self, clock: SimulatedClock, seconds: float, calls: Counter[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.clock, self.seconds, self.calls = nn.Linear(4, 4), clock, seconds, calls

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(self.seconds * len(x))
        if self.calls is not None:
            self.calls[len(x)] += 1
        return self.linear(x)


def calls_of(seconds: float, *, thorough: bool, buckets: tuple[int, ...] = (16, 1)) -> tuple[Counter[int], Gate]:
    """Calls of a candidate by rows, where a row takes `seconds`."""
    clock = SimulatedClock()
    torch.manual_seed(1)
    workload = Workload(Paced(clock, seconds), {f"b{rows}": Inputs((torch.randn(rows, 4),)) for rows in buckets})
    gate = Gate.prepare(workload, now=clock)
    calls: Counter[int] = Counter()
    assert not failures(gate.check(Paced(clock, seconds, calls), thorough=thorough))
    return calls, gate


def test_most_calls_are_made_where_they_take_least() -> None:
    calls, gate = calls_of(0.001, thorough=False)
    assert calls[16] + calls[1] >= CALLS and calls[1] > 2 * calls[16] >= 2 * CALLS_A_BUCKET
    # the way of calling that writes into an answer calls twice
    assert gate.summary.calls == calls.total() - 1


def test_a_trial_makes_fewer_calls_of_slow_models_and_the_result_all() -> None:
    slow, _ = calls_of(1.0, thorough=False)
    # the values of a slow bucket are its example and the noise
    cases = 2
    assert slow[16] == FEWEST_CALLS + cases and slow[1] < 3 * FEWEST_CALLS + 20
    thorough, _ = calls_of(1.0, thorough=True)
    assert thorough[16] == CALLS_A_BUCKET + cases and thorough[1] > CALLS - CALLS_A_BUCKET


def test_the_time_of_a_trial_is_bounded() -> None:
    """Beside the fewest calls of each bucket: one for each set of values, shape and way to call."""
    for seconds in (0.01, 0.1):
        calls, _ = calls_of(seconds, thorough=False, buckets=(8,))
        assert calls[8] * 8 * seconds <= SECONDS_A_TRIAL + (FEWEST_CALLS + 30) * 8 * seconds


def test_a_model_that_compiles_again_meets_one_other_shape_of_each_bucket() -> None:
    clock = SimulatedClock()
    torch.manual_seed(1)
    examples = {f"b{rows}": Inputs((torch.randn(rows, 4),)) for rows in (16, 4)}
    gate = Gate.prepare(Workload(Paced(clock, 0.001), examples), now=clock)
    for recompiles, others in ((True, {8, 2}), (False, {8, 17, 2, 5})):
        calls: Counter[int] = Counter()
        assert not failures(gate.check(Paced(clock, 0.001, calls), recompiles=recompiles))
        assert calls.keys() - {16, 4} == others


def test_one_other_shape_is_tried_however_slow_the_model_is() -> None:
    _, gate = calls_of(1.0, thorough=False)
    assert [len(row.shapes) for row in gate.summary.buckets] == [1, 1]
    _, gate = calls_of(0.001, thorough=False)
    assert [len(row.shapes) for row in gate.summary.buckets] == [2, 1]
    assert gate.summary.seconds > 0


def test_compilation_of_a_candidate_is_not_the_gates_time() -> None:
    clock = SimulatedClock()
    torch.manual_seed(1)
    gate = Gate.prepare(Workload(Paced(clock, 0.001), {"b4": Inputs((torch.randn(4, 4),))}), now=clock)
    spent = []
    for compiling in (0.0, 50.0):
        before, candidate = gate.summary.seconds, Paced(clock, 0.001)
        once = iter([compiling])
        candidate.register_forward_pre_hook(lambda *_, once=once: clock.advance(next(once, 0.0)))
        assert not failures(gate.check(candidate))
        spent.append(gate.summary.seconds - before)
    assert spent[0] == pytest.approx(spent[1]) and 0 < spent[0] < 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Compilations by rows; the compiler is Dynamo alone."""
    made: Counter[int] = Counter()

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> torch.fx.GraphModule:
        made[next(row.shape[0] for row in examples if row.ndim == 2 and row.shape != (8, 8))] += 1
        return graph

    def compiled(_module: object, call: Any, *_options: object) -> Any:
        return torch.compile(call, dynamic=False, backend=backend)

    monkeypatch.setattr("wavecrest.graphs.inductor._compile", compiled)
    torch._dynamo.reset()
    return made


def _compiled(
    final: bool, model: nn.Module | None = None, rules: frozenset[str] = ALL_RULES, recompiled: bool = True
) -> list[BucketError]:
    torch.manual_seed(1)
    examples = {f"b{rows}": Inputs((torch.randn(rows, 8),)) for rows in (4, 12)}
    workload = Workload(Net().eval(), examples)
    gate = Gate.prepare(workload, rules=rules)
    applied = AppliedSteps().plus(step_by_id("compile:default"), {"preset": "default"})
    candidate = build(workload.model, applied) if model is None else model
    found = check_applied(gate, candidate, applied, final=final, recompiled=recompiled)
    assert ("no time left" in gate.summary.not_run.get("shapes", "")) == (final and not recompiled)
    return found


def test_a_result_without_time_is_compiled_for_its_own_shapes(compilations: Counter[int]) -> None:
    assert not failures(_compiled(final=True, recompiled=False))
    assert compilations == {4: 1, 12: 1}


def test_a_trial_compiles_each_bucket_once(compilations: Counter[int]) -> None:
    assert not failures(_compiled(final=False))
    assert compilations == {4: 1, 12: 1}


def test_a_result_compiles_each_bucket_and_another_shape_of_it_once(compilations: Counter[int]) -> None:
    """The keywords are those of the other shape's call."""
    assert not failures(_compiled(final=True))
    assert compilations == {4: 1, 12: 1, 2: 1, 6: 1}


class ByPosition(Net):
    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*x) if x else super().forward(**named) + 1


class ForOwnShapes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (len(x) not in (4, 12))


class RaisesByName(Net):
    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y)


@pytest.mark.parametrize(
    ("kind", "rule"), [(ByPosition, "keyword"), (RaisesByName, "keyword"), (ForOwnShapes, "shapes")]
)
def test_the_call_of_two_rules_names_the_one_that_is_broken(kind: type[nn.Module], rule: str) -> None:
    def found(rules: frozenset[str]) -> str:
        try:
            rows = _compiled(final=True, model=kind().eval(), rules=rules)
        except RuleBroken as error:
            return error.rule
        return next((row.rule for row in rows if not row.passed), "")

    assert found(ALL_RULES) == rule
    # and without it nothing else refuses the model
    assert found(ALL_RULES - {rule}) == ""
