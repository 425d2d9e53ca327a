"""Environment variables, tried in fresh child processes: they act before import, so this process cannot try them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wavecrest import env
from wavecrest.errors import StepRefused, WavecrestError
from wavecrest.measure import copies
from wavecrest.measure.speedup import TAIL
from wavecrest.measure.timing import Side, keeps
from wavecrest.optimizer.alternate import Claim, alternate
from wavecrest.optimizer.children import Job, Task, memory_of, pairs_together, run_pairs, timeout_of
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Candidates

if TYPE_CHECKING:
    from torch import nn

# seconds of a child process beside loading the workload: imports
CHILD_START = 4.0
# and of one that was forked, at least: opening the GPU
FORKED_START = 1.0
# seconds that a bucket takes beside those of its sampling: its warm-up, and waits for the other process. On a GPU 0.1
# to 0.4 s (16 models of the zoo on one H200, 2026-11-27); on a CPU the other process takes a part of the processors
CHILD_WAITS, CHILD_WAITS_CPU = 0.5, 1.5
# seconds for which a trial of a variable samples a bucket
TRIAL_SECONDS = 2.0
# range of the process medians of one side, over the smallest, above which a trial says nothing
UNSTABLE_RANGE = 0.15
# records of the zoo of 2026-11-26 and 27, 25 s a trial on average
NEVER_KEPT = "measured in child processes; on NVIDIA GPUs and CPUs none of 22 trials was kept"


@dataclass(frozen=True, slots=True)
class EnvironmentTrial:
    """One variable tried in fresh processes, without it and with it."""

    name: str
    value: str
    claim: Claim

    @property
    def unstable(self) -> str:
        """Why no verdict can be given, or an empty string: process medians of one side that lie far apart."""
        for side, runs in (("without", self.claim.base), ("with", self.claim.new)):
            for bucket in runs[0]:
                found = [statistics.median(run[bucket]) for run in runs]
                if max(found) > (1 + UNSTABLE_RANGE) * min(found):
                    span = f"{min(found):.3f} to {max(found):.3f} ms"
                    return f"unstable: bucket {bucket} takes {span} in processes {side} it"
        return ""


class EnvironmentStep(Step):
    """Variables of the table that may help on this device and change no numerics (`try_values`)."""

    id = "environment"
    title = "environment"
    level = 1
    phase = "environment"
    params_type = Candidates

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
        problem = copies.problem(context.workload)
        if problem:
            raise StepRefused(
                f"a variable acts before import, so it is tried in child processes, which cannot load this model: "
                f"{problem}; or run `wavecrest optimize file.py:function`"
            )
        return Found(tuple(f"{name}={value}" for name, value in candidates), {"candidates": candidates})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Wins and losses are both reported for AMD's variables; others go behind whatever is expected to win."""
        if context.device.vendor == "amd":
            return Prediction(None, "measured in child processes, not modelled")
        return Prediction(1.0, NEVER_KEPT)

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
        needed = spent / count if count else seconds_of_pairs(context, context.processes)
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
        ci = trial.claim.ci
        wins = ci is not None and keeps(ci, min_gain)
        word = "helps" if wins else "hurts" if ci is not None and ci.high < 1 else "makes no proven difference"
        trials.lines.append(f"{text} {word}: {trial.claim.describe()}")
        if wins:
            trials.kept.append(trial)
    return trials


def seconds_of_pairs(context: StepContext, pairs: int, saved: float = 0.0, seconds: float = TRIAL_SECONDS) -> float:
    """Expected seconds of pairs of child processes before the first has run.

    Of each: interpreter and imports, loading, sampling. Where several are loaded at the same time, and each has a
    processor for that, they share what comes before sampling.

    Args:
        context: of the run.
        pairs: of processes.
        saved: seconds of imports that each of them does not take (`Starter.saved_seconds`).
        seconds: for which each of them samples a bucket.
    """
    workload = context.workload
    begin = max(FORKED_START, CHILD_START + workload.load_seconds - saved)
    waits = CHILD_WAITS_CPU if context.device.kind == "cpu" else CHILD_WAITS
    sampling = (waits + seconds) * len(workload.buckets)
    return rounds_of_loading(context, pairs) * begin + 2 * pairs * sampling


def rounds_of_loading(context: StepContext, pairs: int) -> int:
    """How many times, one after the other, `pairs` of child processes wait for loading."""
    together = pairs_together(context.workload.device, 2 * memory_of(context.workload))
    if not together or context.device.compute_units <= 1:
        return 2 * pairs
    return math.ceil(pairs / together)


def try_variable(context: StepContext, name: str, value: str, *, seconds: float = TRIAL_SECONDS) -> EnvironmentTrial:
    """A/B of one variable over `context.processes` fresh processes a side, which alternate.

    All are new interpreters, with the run's first variables and this one: forked processes have their server's, and a
    server for each side would give all processes of a side one layout of memory, whose luck would be the variable's.

    Raises:
        StepRefused: a child fails; the message carries its last line.
    """
    try:
        source = copies.source(context.workload)
        task = Task(source.spec, context.device.torch_name, seconds, copied=source.copied)
        jobs: dict[Side, Job] = {
            "base": Job(task, {name: None}, f"a child process without {name}"),
            "new": Job(task, {name: value}, f"a child process with {name}={value}"),
        }
        memory = 2 * memory_of(context.workload)
        claim = alternate(
            lambda first, count: run_pairs(
                [jobs] * count,
                first,
                memory=memory,
                starter=context.starter,
                timeout=timeout_of(seconds_of_pairs(context, count, seconds=seconds)),
            ),
            unit="processes",
            looks={context.processes: TAIL},
            min_gain=0.0,
            seconds_left=lambda: math.inf,
        )
    except WavecrestError as error:
        raise StepRefused(str(error)) from error
    return EnvironmentTrial(name, value, claim)
