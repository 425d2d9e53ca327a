"""Workloads whose calls and trials take simulated time: a decode step, an encoder and a CNN, shaped as on one GPU.

A model is a table of milliseconds by part. Steps change the table as the real ones change the model, and predict with
the real steps' own `predict` from the profile that the table gives. A compilation takes seconds at the first call of
what has changed, fewer where another compilation went before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.optimizer.conftest import NoAnalysis
from tests.optimizer.planted import CLOCK
from wavecrest import hardware, records
from wavecrest import nn as wnn
from wavecrest.errors import StepRefused
from wavecrest.graphs.inductor import PRESETS
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.costs import SEARCH_FACTOR
from wavecrest.optimizer.steps import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.attention import PackGQA
from wavecrest.optimizer.steps.capture import CaptureGraph
from wavecrest.optimizer.steps.channels_last import ChannelsLast
from wavecrest.optimizer.steps.compile import Compile
from wavecrest.optimizer.steps.fold_batch_norm import FoldBatchNorm
from wavecrest.optimizer.steps.replace_activation import ReplaceActivation
from wavecrest.optimizer.steps.replace_attention import ReplaceAttention
from wavecrest.optimizer.steps.replace_norm import ReplaceNorm

# part of the device's work by category; "idle": the device waits for the host
Parts = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """A workload: ms by part, seconds of a first and of a later compilation, and the share of a part that steps leave.

    `steps`: step id → part → share that is left of it. `capturable`: a graph can be captured of it as it is; else of
    compiled code alone, or with `never` of no code at all. `layer_norms`: its norms are layer norms.
    """

    parts: Parts
    first: float
    later: float
    steps: dict[str, Parts]
    capturable: bool = True
    never: bool = False
    layer_norms: bool = False


# made up after one H200: an 8 B Llama at batch 16 whose attention copies K and V, a BERT at 512 tokens, a ResNet-50, a
# ConvNeXt-T
SHAPES = {
    "decode": Shape(
        {"gemm": 4.6, "memory": 6.5, "attention": 2.0, "elementwise": 0.8, "normalisation": 0.3, "idle": 19.4},
        30.0,
        10.0,
        {
            "compile:default": {"elementwise": 0.4, "normalisation": 0.5, "idle": 0.3},
            "compile:reduce-overhead": {"elementwise": 0.4, "normalisation": 0.5, "idle": 0.05},
            "compile:max-autotune": {"elementwise": 0.4, "normalisation": 0.5, "idle": 0.3, "gemm": 0.97},
            "capture": {"idle": 0.02},
            "attention:pack_gqa": {"memory": 0.35, "attention": 0.9},
            "replace_attention": {"memory": 0.05, "attention": 0.5},
            "replace_norm": {"normalisation": 0.9},
            "replace_activation": {"elementwise": 0.95},
        },
    ),
    "encoder": Shape(
        {"gemm": 4.2, "attention": 0.84, "elementwise": 1.5, "normalisation": 0.7, "memory": 0.2, "idle": 0.2},
        22.0,
        8.0,
        {
            "compile:default": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.5},
            "compile:reduce-overhead": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.1},
            "compile:max-autotune": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.5, "gemm": 0.98},
            "capture": {"idle": 0.05},
            "replace_norm": {"normalisation": 0.8},
        },
    ),
    # after a DeBERTa: every call makes constants on the host
    "uncapturable": Shape(
        {"gemm": 3.9, "attention": 0.9, "elementwise": 3.2, "normalisation": 0.5, "idle": 16.0},
        48.0,
        15.0,
        {
            "compile:default": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.25},
            "compile:reduce-overhead": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.05},
            "compile:max-autotune": {"elementwise": 0.2, "normalisation": 0.5, "idle": 0.25, "gemm": 0.98},
            "capture": {"idle": 0.02},
            "replace_norm": {"normalisation": 0.8},
        },
        capturable=False,
    ),
    "CNN with layer norms": Shape(
        {"gemm": 2.6, "convolution": 1.0, "elementwise": 1.15, "normalisation": 0.85, "memory": 0.25, "idle": 3.6},
        19.0,
        9.0,
        {
            "compile:default": {"elementwise": 0.1, "normalisation": 0.15, "memory": 0.2, "idle": 0.3},
            "compile:max-autotune": {"elementwise": 0.1, "normalisation": 0.15, "memory": 0.2, "idle": 0.3},
            "capture": {"idle": 0.05},
            "channels_last": {"convolution": 0.99},
            "replace_norm": {"normalisation": 0.15},
            "replace_activation": {"elementwise": 0.95},
        },
        layer_norms=True,
    ),
    "CNN": Shape(
        {"convolution": 3.0, "normalisation": 1.2, "elementwise": 0.9, "memory": 0.7, "idle": 0.3},
        25.0,
        9.0,
        {
            "compile:default": {"elementwise": 0.3, "normalisation": 0.3, "idle": 0.4},
            "compile:reduce-overhead": {"elementwise": 0.3, "normalisation": 0.3, "idle": 0.1},
            "compile:epilogues": {"elementwise": 0.1, "normalisation": 0.05, "memory": 0.2, "idle": 0.4},
            "compile:max-autotune": {"elementwise": 0.3, "normalisation": 0.3, "idle": 0.4, "convolution": 0.98},
            "capture": {"idle": 0.05},
            "channels_last": {"convolution": 0.8, "memory": 0.3},
            "fold_batch_norm": {"normalisation": 0.1},
        },
    ),
}
# the real steps, in the order of the ladder
REAL: tuple[Step, ...] = (
    *(Compile(PRESETS[name]) for name in ("default", "reduce-overhead", "epilogues")),
    CaptureGraph(),
    ChannelsLast(),
    FoldBatchNorm(),
    PackGQA(),
    ReplaceAttention(),
    ReplaceNorm(),
    ReplaceActivation(),
    Compile(PRESETS["max-autotune"]),
)
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
# the compilations of the run so far: the cache of its process
MADE: list[tuple[str, ...]] = []


class Model(nn.Module):
    """Takes the time of its parts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shape = shape
        self.left: dict[str, Parts] = {}
        # what a compilation depends on: the preset and the surgery before it
        self.compiled: tuple[str, ...] | None = None

    def parts(self) -> Parts:
        """The ms of each part with the steps in force."""
        found = dict(self.shape.parts)
        for left in self.left.values():
            for name, share in left.items():
                if name in found:
                    found[name] *= share
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled is not None and self.compiled not in MADE:
            seconds = self.shape.later if MADE else self.shape.first
            CLOCK.advance(seconds * (SEARCH_FACTOR if "max-autotune" in self.compiled[0] else 1))
            MADE.append(self.compiled)
        CLOCK.advance(sum(self.parts().values()) / 1e3)
        return self.layer(x)


@dataclass
class Simulated(Step):
    """A real step's id, phase and prediction on a simulated model."""

    real: Step
    shape: Shape
    id: str = field(init=False)
    title: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("id", "title", "level", "phase", "group", "searches", "tried_after", "cures"):
            setattr(self, name, getattr(self.real, name))
        # the highest of the fixture
        self.level = min(self.level, 4)

    def find(self, context: StepContext) -> Found:
        if self.id in ("capture", "compile:default"):
            return self.real.find(replace(context, device=GPU))
        return Found(("model",) if self.id in self.shape.steps else ())

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return self.real.predict(found, context)

    def instead_of(self, context: StepContext) -> tuple[str, ...]:
        return self.real.instead_of(context)

    def excludes(self, other: Step) -> bool:
        return self.real.excludes(other.real if isinstance(other, Simulated) else other)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        assert isinstance(model, Model)
        if self.phase == "capture" and params["compile"] and model.compiled is None:
            model = steps_by_id(model.shape)["compile:default"].apply(model, {})
            assert isinstance(model, Model)
        if self.phase == "capture" and (self.shape.never or (model.compiled is None and not self.shape.capturable)):
            raise StepRefused("the model cannot be captured")
        model.left = {**model.left, self.id: self.shape.steps[self.id]}
        if self.id == "replace_norm" and self.shape.layer_norms:
            model.norm = wnn.LayerNorm(4)
        surgery = tuple(name for name in model.left if not name.startswith(("compile", "capture")))
        if self.phase == "compile":
            model.compiled = (self.id, *surgery)
        return model


class Profiles(NoAnalysis):
    """The parts of a model as a profile."""

    def profile(self, model: nn.Module, ceilings: records.Ceilings | None) -> tuple[list[records.BucketProfile], str]:
        assert isinstance(model, Model)
        parts = model.parts()
        idle = parts.pop("idle")
        busy = sum(parts.values())
        categories = [
            records.CategoryTime(category=name, ms=ms, share=ms / busy, calls=100) for name, ms in parts.items()
        ]
        row = records.OpTime(name="aten::mm", category="gemm", shapes="", calls=800, ms=busy, share=1.0)
        profile = records.BucketProfile(
            bucket="default", wall_ms=busy + idle, kernel_ms=busy, idle_ms=idle, launches=800, categories=categories,
            ops=[row], uncategorized=[],
        )  # fmt: skip
        return [profile], ""


def workload(name: str) -> Workload:
    """A simulated workload by its name."""
    torch.manual_seed(0)
    MADE.clear()
    return from_example(Model(SHAPES[name]).eval(), torch.randn(2, 4))


def steps_by_id(shape: Shape) -> dict[str, Step]:
    """The real steps on a simulated workload, by id."""
    return {real.id: Simulated(real, shape) for real in REAL}


def steps(name: str) -> list[Step]:
    """The real steps on a simulated workload."""
    return list(steps_by_id(SHAPES[name]).values())
