"""The child process of an alternating measurement: one side alone, as its user runs it.

Run as `python -m wavecrest.optimizer.side TASK OUT.json [FD]`, with a `Task` as JSON. FD is a socket to the parent,
which gives turns to this process and to that of the other side (`children`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from wavecrest import hardware
from wavecrest.bench.baseline import shapes
from wavecrest.errors import WavecrestError, WorkloadError
from wavecrest.measure import copies, timing, workload
from wavecrest.measure.rotation import Rotation
from wavecrest.optimizer.bundle import hash_sources
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.children import STACK_SIGNAL, Problem, SideReport, Task, Turns, problem_file
from wavecrest.optimizer.gate import Gate, RuleBroken
from wavecrest.optimizer.gate.site import first_line
from wavecrest.optimizer.gate.untouched import checksums
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.replay import pin_dispatch, replay
from wavecrest.optimizer.steps import AppliedSteps
from wavecrest.optimizer.verdict import check_quality
from wavecrest.records import decode

if TYPE_CHECKING:
    from torch import nn


# samples of a bucket at least: what differs between processes is more than what more samples of one would tell
LEAST_SAMPLES = 10


class Laps:
    """The seconds of a process by part, one after the other.

    Args:
        now: where time comes from.
    """

    def __init__(self, now: timing.Clock) -> None:
        self.spent: dict[str, float] = {}
        self._now, self._begin = now, now()

    def end(self, part: str) -> None:
        """Say that a part is over; the next one begins."""
        begin, self._begin = self._begin, self._now()
        self.spent[part] = self._begin - begin


def time_buckets(
    loaded: workload.Workload,
    model: nn.Module,
    seconds: float,
    now: timing.Clock = timing.HOST_CLOCK,
    turns: Turns | None = None,
    laps: Laps | None = None,
) -> dict[str, timing.Measurement]:
    """Every bucket of a model, alone, for `seconds` at most each; in turns with another process where there is one."""
    found = {}
    with contextlib.ExitStack() as strict:
        if turns is not None:
            # compilers run while the other side's do
            for bucket in loaded.buckets:
                _without_fall_back(strict)
                work = workload.Call(loaded, bucket, model)
                work.prepare()
                work()
            if laps is not None:
                laps.end("first calls")
        for place, (bucket, inputs) in enumerate(loaded.buckets.items()):
            _without_fall_back(strict)
            rotation = Rotation(inputs)
            if turns is not None:
                turns.begin(place)
            found[bucket] = timing.measure(
                workload.Call(loaded, bucket, model, rotation),
                device=loaded.device,
                min_samples=LEAST_SAMPLES,
                seconds=seconds,
                rotation=rotation,
                pause=turns.pause if turns is not None else None,
                now=now,
            )
    if turns is not None:
        turns.end()
    if laps is not None:
        laps.end("times and waits")
    return found


def _without_fall_back(strict: contextlib.ExitStack) -> None:
    """A fall-back to eager is an error from here on, not a slow result.

    Not before Dynamo is there: a process without it has compiled nothing, and importing it takes a second of every one.
    """
    if "torch._dynamo" in sys.modules:
        strict.enter_context(torch._dynamo.config.patch(fail_on_recompile_limit_hit=True))


def measure_side(task: Task, *, now: timing.Clock = timing.HOST_CLOCK, turns: Turns | None = None) -> SideReport:
    """Load the workload, apply the plan, time every bucket, and check the answers if asked to.

    Raises:
        PlanError, PlanMismatch, WorkloadError: the plan or the workload cannot be used here, or the model raises.
        RuleBroken: the answers break a rule of the gate that has no error to show, or the original was changed.
        ClockError: the times cannot be trusted.
    """
    laps, threads = Laps(now), torch.get_num_threads()
    if task.threads:
        torch.set_num_threads(min(threads, task.threads))
    if task.copied:
        loaded = copies.load(Path(task.spec), task.device)
    else:
        loaded = workload.load(task.spec, device=task.device)
    laps.end("load")
    # as they are now: a call may make a cache longer, and an edit is of a later process
    sizes = {bucket: shapes(inputs) for bucket, inputs in loaded.buckets.items()}
    sources: dict[str, str] = {}
    # a file that is too large to be hashed, or is gone, is not held to anything
    with contextlib.suppress(OSError, ValueError):
        sources = {} if task.copied else hash_sources(loaded.spec)
    model, texts, applied = loaded.model, [], AppliedSteps()
    before = checksums(loaded.model) if task.check else {}
    if task.plan is not None:
        plan = Plan.load(task.plan)
        differences = plan.match(loaded, hardware.detect(loaded.device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            # as Plan.apply does it
            pin_dispatch(plan.dispatch)
            made = replay(plan.kept(), loaded, verify=bool(differences), because=differences, strict=False)
        model, applied = made.model, made.applied
        texts = [str(row.message) for row in caught if row.category.__module__.startswith("wavecrest")]
        laps.end("steps")
    torch.set_num_threads(threads)
    try:
        measured = time_buckets(loaded, model, task.seconds, now, turns, laps)
    except WavecrestError:
        raise
    except Exception as error:
        whose = "the model" if task.plan is None else "the optimized model"
        raise WorkloadError(f"{whose} raised {first_line(error)}") from error
    numerics, quality = [], []
    if task.check:
        # the right answers come from it, and the result shares its weights
        changed = [name for name, digest in checksums(loaded.model).items() if before.get(name) != digest]
        gate = Gate.prepare(loaded)
        changed = [name for name in changed if not any(name in written for written in gate.writes.values())]
        if changed:
            raise RuleBroken("model", f"it changed {', '.join(changed[:5])} of the original")
        numerics, quality = check_applied(gate, model, applied, final=True), check_quality(loaded, model)
    return SideReport(
        clock=next(iter(measured.values())).clock,
        times={bucket: list(found.samples) for bucket, found in measured.items()},
        numerics=numerics,
        quality=quality,
        warnings=texts,
        shapes=sizes,
        sources=sources,
        spent=laps.spent,
    )


def main() -> NoReturn:
    """Run the task of the command line, and end with its exit code.

    At once, without exit functions: those of PyTorch's compiler wait for worker processes that no child has work for
    (7 s of a ResNet-50's; 16 cores beside an H200, 2026-11-26, torch 2.11, no record).
    """
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    task, target = Task(**decode.json_of(sys.argv[1])), Path(sys.argv[2])
    turns = Turns(socket.socket(fileno=int(sys.argv[3]))) if len(sys.argv) > 3 else None
    code = 0
    try:
        target.write_text(measure_side(task, turns=turns).model_dump_json())
    except WavecrestError as error:
        problem_file(target).write_text(Problem.of(error).model_dump_json())
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
