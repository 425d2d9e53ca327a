"""Tune one key: admit, time and judge its candidates, all in one process and on one device.

Before each step that a candidate may not survive, `tell` announces it, so that a parent process knows which candidate
to blame for a crash or a hang.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from wavecrest import records
from wavecrest.bench import suites
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.hardware import Device
from wavecrest.measure.interleaved import Interleaved
from wavecrest.tune import admission, candidates, captured_calls, race

# calls of a candidate that runs alone, and seconds after which it has had enough
ALONE_CALLS = 60
ALONE_SECONDS = 3.0

# make: arguments and oracle; first: a candidate's first call and its check; alone: many calls of one candidate; round:
# interleaved calls of several; again: the winner's last check
Phase = Literal["make", "first", "alone", "round", "again"]


@dataclass(frozen=True, slots=True)
class Step:
    """A step about to begin: the candidates by their index in the field, and its estimated seconds."""

    phase: Phase
    who: tuple[int, ...] = ()
    seconds: float = 0.0


Tell = Callable[[Step], None]


def untold(_step: Step) -> None:
    """Announce nothing: for a process without a parent that watches."""


@dataclass(slots=True)
class Trial:
    """A key and its candidates.

    Attributes:
        case: makes the arguments.
        key, field: of `Op.key` and `candidates.field`.
        refused: candidates, by their index, whose kernels cannot be compiled, with the reasons.
        ended: candidates that crashed or hung a process, with the reasons; they are not run again.
        alone: run every candidate for a while by itself before it is timed among others, to find the one that ends
            the process.
        source: how another process makes the case: {"suite": its suite}, {"sizes": …, "dtype": …},
            maybe with "options" (`bench.sizes.call`), or nothing, which is from the key (`untuned_calls.call`).
    """

    case: suites.Case
    key: Key
    field: candidates.Field
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    alone: bool = False
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def empty(op: AnyOp, trial: Trial) -> records.TunedKey:
    """A key without a result yet, with the backends that refuse it."""
    fields = op.key_fields or tuple(f"part {index}" for index in range(len(trial.key)))
    tuned = records.TunedKey(case=trial.case.name, key=dict(zip(fields, trial.key, strict=True)))
    tuned.candidates = [
        records.TuneCandidate(backend=name, status="refused", reason=reason) for name, reason in trial.field.refused
    ]
    return tuned


def row_of(trial: Trial, index: int) -> records.TuneCandidate:
    """The record's row of a candidate; its status is already set if it is known to be refused or failed."""
    candidate = trial.field.candidates[index]
    row = records.TuneCandidate(
        backend=candidate.backend,
        config={} if candidate.config is None else dict(candidate.config.kwargs),
        role=candidate.role,
    )
    if index in trial.refused:
        row.status, row.reason = "refused", trial.refused[index]
    elif index in trial.ended:
        row.status, row.reason = "failed", trial.ended[index]
    return row


def unsolved(op: AnyOp, trial: Trial, problem: str) -> records.TunedKey:
    """A key that could not be tuned, with the known facts about its candidates."""
    tuned = empty(op, trial)
    known = [index for index in range(len(trial.field.candidates)) if index in trial.refused or index in trial.ended]
    tuned.candidates += [row_of(trial, index) for index in known]
    tuned.problem = problem
    return tuned


def tune_key(
    op: AnyOp,
    trial: Trial,
    device: Device,
    *,
    seconds: float,
    timer: race.Timer,
    in_a_row: int = 1,
    tell: Tell = untold,
) -> records.TunedKey:
    """The result of a key; its `problem` says why it has no winner.

    Args:
        op, trial: the key to tune.
        device: where the arguments are.
        seconds: of the final round.
        timer: times the calls (`race.timer_of`, with the same `in_a_row`).
        in_a_row: calls in a graph that stand for one (`captured_calls`); 1: a call alone, without a graph.
        tell: called before each step.

    Raises:
        admission.DeviceLost: a kernel made the device unusable.
    """
    begin = time.perf_counter()
    tuned = empty(op, trial)
    try:
        _race(op, trial, device, seconds, timer, in_a_row, tell, tuned)
    except torch.OutOfMemoryError as error:
        tuned.problem = f"out of memory: {admission.first_line(error)}"
    except RuntimeError as error:
        # raised while several candidates were timed: no single candidate is to blame; fatal if the device is gone
        tuned.problem = f"raised {type(error).__name__}: {admission.first_line(error)}"
        admission.require(torch.device(device.torch_name), f"timing {trial.case.name}")
    if device.kind != "cpu":
        # the next case's tensors have other sizes
        torch.cuda.empty_cache()
    tuned.seconds = round(time.perf_counter() - begin, 3)
    return tuned


@dataclass(slots=True)
class _Told:
    """A timer that announces which candidates are timed, and about how long it takes."""

    timer: race.Timer
    tell: Tell
    who: dict[int, tuple[int, records.TuneCandidate]]

    def __call__(self, works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        found = [self.who[id(work)] for work in works]
        # a first call includes work that a round does not, so this overestimates
        each = sum((row.quick_ms or row.first_ms or 0.0) / 1e3 for _, row in found)
        self.tell(Step("round", tuple(index for index, _ in found), round(seconds + rounds * each, 3)))
        return self.timer(works, rounds=rounds, seconds=seconds)


def _race(
    op: AnyOp,
    trial: Trial,
    device: Device,
    seconds: float,
    timer: race.Timer,
    in_a_row: int,
    tell: Tell,
    tuned: records.TunedKey,
) -> None:
    tell(Step("make"))
    call = trial.case.make()
    calls = [call, *captured_calls.copies(call, in_a_row - 1)]
    pool = None if in_a_row == 1 else torch.cuda.graph_pool_handle()
    right = admission.oracle(op, call)
    least_ms = admission.least_ms(op, call, right, device.known)
    tuned.least_us = None if least_ms is None else round(least_ms * 1e3, 3)
    entrants: list[race.Entrant] = []
    places: dict[int, int] = {}
    for index, candidate in enumerate(trial.field.candidates):
        row = row_of(trial, index)
        tuned.candidates.append(row)
        if index in trial.refused or index in trial.ended:
            continue
        tell(Step("first", (index,)))
        run = admission.admit(op, candidate, call, right, row)
        if run is not None and in_a_row > 1:
            with torch.cuda.device(device.torch_name):
                run = captured_calls.captured(op, candidate, calls, right, pool, row)
        if run is not None:
            entrants.append(race.Entrant(row, run))
            places[id(row)] = index
    if trial.alone:
        for entrant in entrants:
            tell(Step("alone", (places[id(entrant.row)],), ALONE_SECONDS))
            _alone(entrant.call, device)
    who = {id(entrant.call): (places[id(entrant.row)], entrant.row) for entrant in entrants}
    told = _Told(timer, tell, who)
    while True:
        finalists = race.quick(entrants, told, least_ms)
        finalists, taken = race.final(finalists, told, least_ms, seconds=seconds)
        verdict = race.judge(finalists)
        winner = verdict.winner
        if winner is None or taken is None:
            tuned.problem = verdict.reason
            return
        # once more after thousands of calls: an error that comes and goes is a race
        place = places[id(winner.row)]
        tell(Step("again", (place,)))
        if admission.admit(op, trial.field.candidates[place], call, right, winner.row) is not None:
            break
        winner.row.reason = f"after it was timed: {winner.row.reason}"
        # others were dropped because of its time
        entrants = [entrant for entrant in entrants if entrant.row.status in ("timed", "dropped")]
        for entrant in entrants:
            entrant.row.status, entrant.row.reason = "timed", ""
    tuned.rounds, tuned.clock = taken.rounds, taken.clock
    native = next((entrant for entrant in finalists if entrant.row.role == "native"), None)
    winner.row.status = "won"
    tuned.backend, tuned.config, tuned.reason = winner.row.backend, winner.row.config, verdict.reason
    assert winner.row.ms is not None
    tuned.us = winner.row.ms * 1e3
    if native is not None and native.row.ms is not None:
        tuned.native_us = native.row.ms * 1e3
        tuned.ratio, tuned.ci = race.against(native, winner)


def _alone(call: Callable[[], Any], device: Device) -> None:
    """Call one candidate as often as a timer does, and wait for the device each time."""
    end = time.perf_counter() + ALONE_SECONDS
    for _ in range(ALONE_CALLS):
        call()
        if device.kind != "cpu":
            torch.cuda.synchronize(device.torch_name)
        if time.perf_counter() > end:
            return
