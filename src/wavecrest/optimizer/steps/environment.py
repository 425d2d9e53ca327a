"""Environment variables, tried in fresh child processes: they act before import, so this process cannot try them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import env
from wavecrest.errors import StepRefused
from wavecrest.measure.timing import Interval, keeps, process_speedup
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext

if TYPE_CHECKING:
    from torch import nn

CHILD_TIMEOUT = 600.0
# seconds of a child process beside loading the workload: imports, and sampling a bucket
CHILD_START = 4.0
CHILD_SAMPLING = 2.5
# range of the process medians of one side, over the smallest, above which a trial says nothing
UNSTABLE_RANGE = 0.15


@dataclass(frozen=True, slots=True)
class EnvironmentTrial:
    """One variable tried in child processes: per bucket, samples of each process without and with it, in ms."""

    name: str
    value: str
    base: dict[str, list[list[float]]]
    new: dict[str, list[list[float]]]
    ratio: float
    ci: Interval

    @property
    def unstable(self) -> str:
        """Why no verdict can be given, or an empty string: process medians of one side that lie far apart."""
        for side, buckets in (("without", self.base), ("with", self.new)):
            for bucket, runs in buckets.items():
                medians = [statistics.median(run) for run in runs]
                if max(medians) > (1 + UNSTABLE_RANGE) * min(medians):
                    return (
                        f"unstable: bucket {bucket} takes {min(medians):.3f} to {max(medians):.3f} ms in processes "
                        f"{side} it"
                    )
        return ""


class EnvironmentStep(Step):
    """Variables of the table that may help on this device and change no numerics (`try_values`)."""

    id = "environment"
    title = "environment"
    level = 1
    phase = "environment"

    def find(self, context: StepContext) -> Found:
        """The table's candidates for this vendor that are not set already."""
        candidates = [
            (row.name, value)
            for row in env.table()
            for value in row.try_values
            if context.device.vendor in row.platforms and env.get(row.name) != value
        ]
        if not candidates:
            return Found((), note=f"the table has nothing to try on {context.device.vendor}")
        if context.workload.spec is None:
            raise StepRefused(
                "a variable acts before import, so it is tried in child processes, and a model in memory cannot be "
                "rebuilt there; run `wavecrest optimize file.py:function` to include this step"
            )
        return Found(tuple(f"{name}={value}" for name, value in candidates), {"candidates": candidates})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Wins and losses are both reported for every one of them."""
        return Prediction(None, "measured in child processes, not modelled")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Nothing in this process; the plan carries the variables to be set before import."""
        return model


@dataclass(slots=True)
class Trials:
    """Results of the candidates: those that ran, those that help, and a line for each."""

    done: list[EnvironmentTrial] = field(default_factory=list)
    kept: list[EnvironmentTrial] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def try_candidates(
    context: StepContext,
    candidates: Sequence[tuple[str, str]],
    *,
    min_gain: float,
    allowance: float,
    say: Callable[[str], None],
) -> Trials:
    """Try (name, value) pairs one by one while the next fits into `allowance` seconds; `say` is told what runs."""
    trials = Trials()
    begin = context.now()
    for name, value in candidates:
        text = f"{name}={value}"
        spent = context.now() - begin
        count = len(trials.done)
        needed = spent / count if count else 2 * context.processes * _child_seconds(context)
        if spent + needed > allowance:
            trials.lines.append(
                f"{text} not tried: {context.processes} fresh processes a side take about {needed:.0f} s, "
                f"{max(0.0, allowance - spent):.0f} s of the budget are left for such trials"
            )
            continue
        say(f"environment: {text} in fresh processes")
        try:
            trial = try_variable(context, name, value)
        except StepRefused as error:
            trials.lines.append(f"{text}: {error}")
            continue
        trials.done.append(trial)
        if trial.unstable:
            trials.lines.append(f"{text} {trial.unstable}")
            continue
        wins = keeps(trial.ci, min_gain)
        word = "helps" if wins else "hurts" if trial.ci.high < 1 else "makes no proven difference"
        trials.lines.append(f"{text} {word}: {trial.ratio:.3f}× {trial.ci} over {context.processes} processes")
        if wins:
            trials.kept.append(trial)
    return trials


def _child_seconds(context: StepContext) -> float:
    """Expected seconds of a child process before the first has run: interpreter and imports, loading, sampling."""
    return CHILD_START + context.workload.load_seconds + CHILD_SAMPLING * len(context.workload.buckets)


def try_variable(context: StepContext, name: str, value: str, *, seconds: float = 2.0) -> EnvironmentTrial:
    """A/B of one variable over `context.processes` fresh processes a side, interleaved ABBA.

    Raises:
        StepRefused: a child fails; the message carries its last line.
    """
    sides: dict[str, list[dict[str, list[float]]]] = {"base": [], "new": []}
    for index in range(context.processes):
        order = ("base", "new") if index % 2 == 0 else ("new", "base")
        for side in order:
            changes = {name: value if side == "new" else None}
            sides[side].append(_child(context, changes, seconds))
    buckets = list(context.workload.buckets)
    base = {bucket: [run[bucket] for run in sides["base"]] for bucket in buckets}
    new = {bucket: [run[bucket] for run in sides["new"]] for bucket in buckets}
    ratio, ci = process_speedup([(_medians(base[bucket]), _medians(new[bucket])) for bucket in buckets])
    return EnvironmentTrial(name, value, base, new, ratio, ci)


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(run) for run in runs]


def _child(context: StepContext, changes: dict[str, str | None], seconds: float) -> dict[str, list[float]]:
    assert context.workload.spec is not None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "samples.json"
        command = [
            sys.executable, "-m", "wavecrest.optimizer.steps.environment_child",
            context.workload.spec, context.device.torch_name, str(seconds), str(target),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                env=env.python_child(changes),
                capture_output=True,
                text=True,
                timeout=CHILD_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise StepRefused(f"a child process took more than {CHILD_TIMEOUT:.0f} s") from None
        if done.returncode != 0 or not target.exists():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise StepRefused(f"a child process failed: {last}")
        samples: dict[str, list[float]] = json.loads(target.read_text())
        return samples
