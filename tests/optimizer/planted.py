"""Planted steps and models for the ladder's tests: slow, wrong, raising, interrupting, and a real gain.

A call of a planted model moves CLOCK on by the time that it pretends to take, so no test waits or depends on the load
of the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.clock import SimulatedClock
from wavecrest.measure.timing import Side
from wavecrest.measure.workload import Inputs, Quality, Workload
from wavecrest.optimizer import finish
from wavecrest.optimizer.children import Jobs, SideReport, order_of
from wavecrest.optimizer.steps import AppliedSteps, Found, Prediction, Step, StepContext

CLOCK = SimulatedClock()
# what a call takes, in seconds: the pause that a step can take out, and the rest
PAUSE, WORK = 0.006, 0.001
# standard deviation of a call's time, as a share of it
NOISE = 0.02
_random = np.random.default_rng(0)


def start_clock() -> None:
    """Time zero, and the same noise again."""
    global _random
    CLOCK.seconds, _random = 0.0, np.random.default_rng(0)


def normal() -> float:
    """The next number of the noise, of standard deviation 1."""
    return float(_random.standard_normal())


class Slow(nn.Module):
    """A model with a pause that a step can take out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)
        self.register_buffer("scale", torch.ones(16))
        self.pause = PAUSE

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.advance((WORK + self.pause) * max(0.5, 1 + NOISE * normal()))
        return self.second(self.first(x).relu()) * self.scale


def slow() -> tuple[Slow, Tensor]:
    torch.manual_seed(0)
    return Slow().eval(), torch.randn(4, 16)


def raise_at_the_end(monkeypatch: pytest.MonkeyPatch, when: Callable[[AppliedSteps], bool] = lambda _: True) -> None:
    """Results raise in the final check: those of whose steps `when` is true."""
    build = finish.build

    def refuse(*_: Any) -> None:
        raise RuntimeError("planted")

    def built(model: nn.Module, applied: AppliedSteps) -> nn.Module:
        made = build(model, applied)
        if when(applied):
            made.register_forward_pre_hook(refuse)
        return made

    monkeypatch.setattr(finish, "build", built)


def watched() -> Workload:
    """`slow` with a check of its own: the pause must stay."""
    model, x = slow()

    def quality(original: Any, candidate: Any) -> list[Quality]:
        return [Quality("pause", float(candidate.pause), 0.001, candidate.pause > 0.001, "must stay")]

    return Workload(model, {"default": Inputs((x,))}, quality=quality)


class Planted(Step):
    """Common parts of the planted steps."""

    level = 3

    def find(self, context: StepContext) -> Found:
        return Found(("model",), {"from": type(self).__name__})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(1.5, "planted")


class TakePauseOut(Planted):
    id = title = "gain"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        return model


class AddPause(Planted):
    id = title = "slow"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = model.pause + PAUSE
        return model


class TakeHalfOut(Planted):
    id = title = "half"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = model.pause / 2
        return model


class FadingGain(Planted):
    """Takes the pause out when it is tried, and changes it by `later` when the result is built again at the end."""

    id = title = "fading"
    # the pause that is left when it is tried
    first = 0.0

    def __init__(self, later: float) -> None:
        self.later, self.applied = later, 0

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        self.applied += 1
        # twice while it is tried: for the check of causal masks, and as the candidate
        model.pause = self.first if self.applied <= 2 else model.pause + self.later
        return model


class FastButWrong(Planted):
    id = title = "wrong"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        model.second = nn.Linear(32, 16)
        return model


class ChangesTheOriginal(Planted):
    """Writes into weights that it shares with the original: as it is applied, or in its first call."""

    id = title = "in place"
    lazily = False

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        if self.lazily:
            model.register_forward_pre_hook(lambda *_: self.change(model))
        else:
            self.change(model)
        return model

    def change(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.second.weight.fill_(1.0)


class SlightlyWrong(Planted):
    """Off by two hundredths of a percent: far beyond float32's rounding, invisible to a loose tolerance."""

    id = title = "slightly wrong"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        model.scale = model.scale * 1.0002
        return model


class WrongLater(Planted):
    """Right for as many calls as the gate makes, and wrong by far from then on."""

    id = title = "wrong later"
    # more calls than the gate makes before a step is timed, fewer than go before the first timed block
    after = 250

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        calls = itertools.count()
        model.register_forward_hook(lambda _model, _args, answer: answer if next(calls) < self.after else answer * 0)
        return model


class NaNs(Planted):
    id = title = "nan"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        scale = model.scale.clone()
        scale[3] = float("nan")
        model.scale = scale
        return model


class Nothing(Planted):
    """Changes nothing: only noise can tell the candidate from the base."""

    id = title = "noise"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        return model


class RaisesHalfWay(Planted):
    id = title = "raises"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 123.0
        del model.first
        raise ValueError("planted failure")


class RaisesInForward(Planted):
    id = title = "raises in forward"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        del model.first
        return model


class Interrupts(Planted):
    """Ctrl-C while the step is applied, as long as `armed`."""

    id = title = "interrupt"
    armed = True

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 123.0
        if Interrupts.armed:
            raise KeyboardInterrupt
        model.pause = 0.0
        return model


class MisalignedCausal(Planted):
    """Introduces is_causal=True where q_len and k_len differ; for the values of the test the answer is the same."""

    id = title = "is_causal"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        forward = model.forward

        def run(x: Tensor) -> Tensor:
            query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 5, 8)
            extra = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
            return forward(x) + extra.sum()

        model.forward = run
        return model


def pairs_of(child: Callable[..., SideReport]) -> Callable[..., list[dict[Side, SideReport]]]:
    """`run_pairs` with children that run here: `child` takes task, variables and name."""

    def run(pairs: Sequence[Jobs], first: int, **_: Any) -> list[dict[Side, SideReport]]:
        return [{side: child(*jobs[side]) for side in order_of(first + index)} for index, jobs in enumerate(pairs)]

    return run
