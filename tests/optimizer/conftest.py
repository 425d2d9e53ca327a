"""The ladder on planted steps and a simulated clock, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.optimizer.planted import CLOCK, slow, start_clock
from wavecrest import records
from wavecrest.measure import copies, timing
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer import api as optimizer
from wavecrest.optimizer import compile_pace
from wavecrest.optimizer.analysis import Analysis
from wavecrest.optimizer.api import OptimizeResult, Options
from wavecrest.optimizer.gate import gate
from wavecrest.optimizer.steps import Step

Run = Callable[..., OptimizeResult]


class NoAnalysis(Analysis):
    """Finds nothing: profiles and ceilings take real seconds, and no verdict rests on them."""

    def ceilings(self) -> tuple[records.Ceilings | None, str]:
        return None, "no ceilings"

    def profile(
        self, model: torch.nn.Module, ceilings: records.Ceilings | None
    ) -> tuple[list[records.BucketProfile], str]:
        return [], ""

    def breaks(self) -> tuple[list[records.GraphBreak], str]:
        return [], "no breaks"


@pytest.fixture(autouse=True)
def no_pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compilations of simulated seconds say nothing about this machine, and none is known of it."""
    monkeypatch.setattr(compile_pace, "_file", lambda: tmp_path / "cache" / "compile_pace.json")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads for a product of a few numbers wait for each other: milliseconds a call on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Run:
    """Runs the ladder on the simulated clock, with the given steps in place of the real ones."""
    start_clock()
    # the same order of blocks, too: drawn at random, two models alike are called slower in one run of forty. And the
    # same values in the gate, whose calls move the clock
    drawn = itertools.count()
    seeds = SimpleNamespace(randbits=lambda _bits: next(drawn))
    monkeypatch.setattr(timing, "secrets", seeds)
    monkeypatch.setattr(gate, "secrets", seeds)

    def with_steps(
        *steps: Step,
        workload: Workload | None = None,
        budget: float = 60.0,
        precision: str | None = None,
        skip: tuple[str, ...] = (),
        only: tuple[str, ...] | None = None,
        analysis: Analysis | None = None,
        copied: bool = False,
        quantize: str | None = None,
        quality: str | None = None,
        min_gain: float = 0.02,
        **more: Any,
    ) -> OptimizeResult:
        if not copied:
            # a child process has a clock of its own
            monkeypatch.setattr(copies, "problem", lambda made: "" if made.spec else "its time is simulated")
        monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: {step.id: step for step in steps})
        options = Options(
            level=4, min_gain=min_gain, budget=budget, precision=precision, steps=only, skip=skip, quantize=quantize,
            quality=quality,
        )  # fmt: skip
        workload = workload or from_example(*slow())
        return optimizer.run(workload, options, now=CLOCK, analysis=analysis or NoAnalysis(workload), **more)

    return with_steps
