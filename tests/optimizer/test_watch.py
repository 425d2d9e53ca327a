"""Answers of the calls that are timed: what is compared, what may differ, and what is not watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clock import Disturbed
from tests.optimizer.cheats import Counts, Net
from wavecrest.measure import timing
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.optimizer.gate import Gate, RuleBroken
from wavecrest.optimizer.gate.watch import OutputWatch

pytestmark = pytest.mark.usefixtures("one_thread")


def watch_of(model: nn.Module, *args: Tensor, dtype: str | None = None) -> OutputWatch:
    return Gate.prepare(Workload(model, {"b": Inputs(args)}), dtype=dtype).watch("b")


def watched(watch: OutputWatch, base: Any, new: Any, times: int = 1) -> int:
    for _ in range(times):
        watch.on_output("base", base, 1)
        watch.on_output("new", new, 1)
    return watch.check()


def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(6, 16)


def test_right_answers_are_counted_and_wrong_ones_refused() -> None:
    y = Net().eval()(x())
    assert watched(watch_of(Net(), x()), y, y * (1 + 1e-7), times=3) == 3
    with pytest.raises(RuleBroken, match=r"while it was timed: .*differs from the base's.*\(rule: timing\)"):
        watched(watch_of(Net(), x()), y, y * 1.01)
    with pytest.raises(RuleBroken, match="while it was timed"):
        watched(watch_of(Net(), x()), y, y[:3])
    with pytest.raises(RuleBroken, match="while it was timed"):
        watched(watch_of(Net(), x()), y, [y])


def test_only_answers_to_the_same_inputs_are_compared() -> None:
    y = Net().eval()(x())
    watch = watch_of(Net(), x())
    watch.on_output("new", y, 1)
    watch.on_output("base", y * 2, 2)
    watch.on_output("base", y, 1)
    assert watch.check() == 1


def test_an_answer_is_copied_at_once() -> None:
    """The answer of a captured model is overwritten by its next call."""
    y = Net().eval()(x()).detach()
    watch, buffer = watch_of(Net(), x()), y.clone()
    watch.on_output("base", buffer, 1)
    buffer.zero_()
    watch.on_output("new", y, 1)
    assert watch.check() == 1


def test_a_precision_that_was_asked_for_has_its_own_limits() -> None:
    y = Net().eval()(x())
    assert watched(watch_of(Net(), x(), dtype="bfloat16"), y, y.bfloat16().float()) == 1
    with pytest.raises(RuleBroken):
        watched(watch_of(Net(), x()), y, y.bfloat16().float())


def test_what_is_replaced_while_it_is_timed_is_put_back_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the gate's own calls, where the next candidate's check would find it and blame that one."""
    y, watch, real = Net().eval()(x()), watch_of(Net(), x()), Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, x: real(self, x))
    with pytest.raises(RuleBroken, match=r"while it was timed: it replaced Net.forward \(rule: process\)"):
        watched(watch, y, y)
    assert Net.forward is real
    assert watched(watch, y, y) == 2


class Best(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_whole_numbers_may_differ_once() -> None:
    right = Best()(x())
    other = right.clone()
    other[2] += 1
    watch = watch_of(Best(), x())
    assert watched(watch, right, other) == 1
    with pytest.raises(RuleBroken):
        watched(watch, right, other)


def test_a_model_that_counts_its_calls_is_not_watched() -> None:
    """Base and candidate are called in turn, so each starts from the state that the other has left."""
    watch = watch_of(Counts().eval(), torch.randn(4, 8))
    assert watched(watch, torch.zeros(4, 8), torch.ones(4, 8)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_timed_pair_shows_some_answers(seed: int) -> None:
    """Slow work has the fewest blocks: one of them shows its answers, at a place that a candidate cannot know."""
    clock = Disturbed(seed, lambda _clock, _call: 10.0)
    seen: list[tuple[str, int]] = []
    pair = timing.measure_pair(
        clock.work(),
        clock.work(),
        device="cpu",
        seconds=1.0,
        seed=seed,
        on_output=lambda side, _output, number: seen.append((side, number)),
        now=clock,
    )
    assert pair.n == timing.LEAST_BLOCKS
    assert set(seen) == {("base", 1), ("base", 2), ("new", 1), ("new", 2)} and len(seen) % 4 == 0
