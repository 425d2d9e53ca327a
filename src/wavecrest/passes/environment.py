"""Environment variables, tried in fresh child processes: they act before import, so this process cannot try them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import env
from wavecrest.errors import StepRefused
from wavecrest.passes.base import Found, Prediction, Step, StepContext
from wavecrest.timing import Interval, bootstrap_processes

if TYPE_CHECKING:
    from torch import nn

CHILD_TIMEOUT = 600.0
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
    ratio, ci = bootstrap_processes([(base[bucket], new[bucket]) for bucket in buckets])
    return EnvironmentTrial(name, value, base, new, ratio, ci)


def _child(context: StepContext, changes: dict[str, str | None], seconds: float) -> dict[str, list[float]]:
    assert context.workload.spec is not None
    source = str(Path(__file__).resolve().parents[2])
    path = [source, *filter(None, [env.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "samples.json"
        command = [
            sys.executable, "-m", "wavecrest.passes.environment_child",
            context.workload.spec, context.device.torch_name, str(seconds), str(target),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                env=env.child({**changes, "PYTHONPATH": ":".join(path)}),
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
