"""Planted steps and models for the ladder's tests: slow, wrong, raising, interrupting, and a real gain."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.optimizer.steps import Found, Prediction, Step, StepContext

PAUSE = 0.006


class Slow(nn.Module):
    """A model with a pause that a step can take out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)
        self.register_buffer("scale", torch.ones(16))
        self.pause = PAUSE

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.second(self.first(x).relu()) * self.scale


def slow() -> tuple[Slow, Tensor]:
    torch.manual_seed(0)
    return Slow(), torch.randn(4, 16)


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


class FastButWrong(Planted):
    id = title = "wrong"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        model.second = nn.Linear(32, 16)
        return model


class SlightlyWrong(Planted):
    """Off by two hundredths of a percent: far beyond float32's rounding, invisible to a loose tolerance."""

    id = title = "slightly wrong"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0
        model.scale = model.scale * 1.0002
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
