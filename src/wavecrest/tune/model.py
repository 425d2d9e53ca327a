"""Tune the calls that a workload makes, and keep the rows only if they make the workload faster.

An op is timed alone with cold caches; in a model the same kernel runs among others. So the workload itself is timed
with the new rows and without them, in turn, and decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from wavecrest import ops, records
from wavecrest.bench import suites
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Decision, Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Cell, Entry, Overlay, Row
from wavecrest.errors import InvalidArgument, Unsupported, WavecrestError, WorkloadError
from wavecrest.hardware import Device
from wavecrest.measure import timing
from wavecrest.measure.timing import Clock
from wavecrest.measure.workload import Call, Workload
from wavecrest.records import CalledKey, TunedKey, WorkloadTuneRecord, provenance
from wavecrest.tune import admission, session, untuned_calls, workers

# seconds of timing per bucket, and the least number of blocks (two calls of each side)
SECONDS, BLOCKS = 5.0, 10
# sources of decisions that tuning would not change
SETTLED = {"exact": "has a measured row", "forced": "is forced or pinned"}


@dataclass(frozen=True, slots=True)
class Called:
    """A key of a workload's calls: how often one pass over the buckets calls it, and the decision that runs it."""

    op: AnyOp
    key: Key
    decision: Decision
    calls: int

    @property
    def name(self) -> str:
        """Its parts in words."""
        return " ".join(f"{name}={value}" for name, value in untuned_calls.parts_of(self.op, self.key).items())


def called(workload: Workload) -> list[Called]:
    """The keys that one pass over the buckets calls, the most frequent first.

    Raises:
        WorkloadError: the model raised.
    """
    registry.forget()
    with registry.coverage() as seen:
        for bucket in workload.buckets:
            try:
                workload.run(bucket)
            except WavecrestError:
                raise
            except Exception as error:
                first = (str(error).strip().splitlines() or ["(no message)"])[0]
                raise WorkloadError(f"bucket {bucket}: the model raised {type(error).__name__}: {first}") from error
    found = [Called(ops.get(one.op), one.key, one, calls) for one, calls in seen]
    return sorted(found, key=lambda one: -one.calls)


def _reason(one: Called, device: str) -> str:
    """The reason why a key is not tuned; "" if it is."""
    if one.decision.source in SETTLED:
        return SETTLED[one.decision.source]
    if lookup.columns(one.op, one.key) is None:
        return "rows are for calls on a GPU without gradients"
    try:
        # made without memory: the key says whether the op can make it
        untuned_calls.call(one.op, untuned_calls.parts_of(one.op, one.key), "meta")
    except (InvalidArgument, Unsupported) as error:
        return str(error)
    return ""


def tune(
    workload: Workload,
    device: Device,
    settings: session.Settings,
    *,
    overlay: Overlay | None = None,
    starts: Sequence[workers.Start] | None = None,
    record_name: str = session.NO_RECORD,
    seconds: float = SECONDS,
    on_record: Callable[[WorkloadTuneRecord], None] = lambda _record: None,
    on_step: session.OnStep | None = None,
    now: Clock = time.perf_counter,
) -> WorkloadTuneRecord:
    """Tune the keys that a workload calls, then time it with what was found and without.

    Args:
        workload: the model; one pass over its buckets counts the calls of each key.
        device: where it is.
        settings: see `session.Settings`; the budget is that of all keys together, the most frequent first.
        overlay: the user's database, which gets the rows if they make the workload faster; None: rows are dropped.
        starts: as for `session.tune`.
        record_name: how rows name the record.
        seconds: of timing each bucket.
        on_record: called with the record whenever something was added.
        on_step, now: as for `session.tune`; by `now` calls of a workload on the CPU are timed, too.

    Raises:
        InvalidArgument: the workload calls no op, or no op that can be tuned; the message says why.
        OutputError: the rows cannot be written; admission.DeviceLost, EnvironmentProblem: as for `session.tune`.
    """
    begin = now()
    if overlay is not None:
        overlay.prepare()
    record = WorkloadTuneRecord(header=provenance.header(device, rows=False), workload=workload.spec or workload.name)
    by_op = _listed(workload, device, record)
    try:
        for name, wanted in by_op.items():
            rest = max(1e-3, settings.budget - (now() - begin))
            # keys that differ in what rows have no column for are one case
            cases = {
                one.name: suites.Case(
                    one.name,
                    partial(untuned_calls.call, one.op, untuned_calls.parts_of(one.op, one.key), device.torch_name),
                )
                for one in wanted
            }
            mine = replace(settings, suite="workload", budget=rest)
            made = session.tune(name, device, mine, cases=list(cases.values()), starts=starts, on_step=on_step, now=now)
            record.tunes.append(made)
            on_record(record)
        rows = _found(record, record_name)
        _judge(workload, record, rows, seconds, now)
        if record.kept and overlay is not None:
            arch = record.header.device["arch"]
            entries = []
            for name, own in rows.items():
                fields = lookup.fields_of(ops.get(name))
                entries += [Entry(arch, name, fields, row) for row in own.values()]
            overlay.write(entries)
            registry.reread()
            record.written = True
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        record.problem = "interrupted" if interrupted else f"{type(error).__name__}: {admission.first_line(error)}"
        raise
    finally:
        record.seconds = round(now() - begin, 3)
        on_record(record)
    return record


def _listed(workload: Workload, device: Device, record: WorkloadTuneRecord) -> dict[str, list[Called]]:
    """The keys of a workload that can be tuned, by op; the record lists all keys.

    Raises:
        InvalidArgument: no key can be tuned.
    """
    keys = called(workload)
    if not keys:
        raise InvalidArgument(
            f"{workload.name} calls no op of wavecrest: there is nothing to tune. `wavecrest optimize` puts them into "
            "a model; let the function give what Plan.apply makes of it"
        )
    by_op: dict[str, list[Called]] = {}
    for one in keys:
        reason = _reason(one, device.torch_name)
        parts = untuned_calls.parts_of(one.op, one.key)
        config = dict(one.decision.config.kwargs) if one.decision.config is not None else {}
        record.keys.append(CalledKey(
            op=one.op.name, case=one.name, key=parts, calls=one.calls, backend=one.decision.backend, config=config,
            source=one.decision.source, left=reason,
        ))  # fmt: skip
        if not reason:
            by_op.setdefault(one.op.name, []).append(one)
    if not by_op:
        why = "; ".join(dict.fromkeys(f"{one.op} {one.left}" for one in record.keys))
        raise InvalidArgument(f"{workload.name} calls nothing that can be tuned here: {why}")
    return by_op


def _found(record: WorkloadTuneRecord, name: str) -> dict[str, dict[tuple[Cell, ...], Row]]:
    """The rows of the keys that have a winner, by op and key; notes the outcome at each key.

    `name`: of the record, for the rows.
    """
    rows: dict[str, dict[tuple[Cell, ...], Row]] = {}
    for made in record.tunes:
        fields = lookup.fields_of(ops.get(made.op))
        tuned = {one.case: one for one in made.keys}
        for one in record.keys:
            if one.op != made.op or one.left:
                continue
            found = tuned.get(one.case)
            if found is None or found.backend is None:
                one.left = made.left.get(one.case, "") if found is None else found.problem
                continue
            one.winner, one.winner_config, one.us = found.backend, found.config, found.us
            one.before_us = _before(one, found)
            row = session.row_of(found, fields, name, made.header)
            rows.setdefault(made.op, {})[row.key] = row
    return rows


def _before(one: CalledKey, found: TunedKey) -> float | None:
    """The time in µs of the backend and configuration that ran before, if it was in the final."""
    for row in found.candidates:
        if (row.backend, row.config) == (one.backend, one.config) and row.ms is not None:
            return row.ms * 1e3
    return None


class _Side:
    """Calls of a bucket by the rows of one database, as the timer takes them."""

    def __init__(self, call: Call, choose: Callable[[], None]) -> None:
        self._call, self._choose = call, choose

    def prepare(self) -> None:
        """Before each call, and not timed."""
        self._choose()
        self._call.prepare()

    def __call__(self) -> Any:
        return self._call()


def _judge(
    workload: Workload,
    record: WorkloadTuneRecord,
    rows: dict[str, dict[tuple[Cell, ...], Row]],
    seconds: float,
    now: Clock,
) -> None:
    """Time the workload with the rows and without them, if they change anything, and decide whether to keep them."""
    changed = [
        one for one in record.keys if one.winner and (one.winner, one.winner_config) != (one.backend, one.config)
    ]
    if not changed:
        record.verdict = "nothing"
        record.reason = "what ran before is the fastest of each key: there is no row to keep"
        return
    before = registry.database()
    after = before.trying({name: list(own.values()) for name, own in rows.items()})
    pairs: dict[str, timing.Paired] = {}
    with registry.in_turn(before, after) as (old, new):
        for bucket in workload.buckets:
            call = Call(workload, bucket)
            pairs[bucket] = timing.measure_pair(
                _Side(call, old),
                _Side(call, new),
                device=workload.device,
                min_blocks=BLOCKS,
                seconds=seconds,
                now=now,
            )
        new()
        used = {(one.op, one.key): one for one, calls in registry.coverage() if calls}
    _check_used(record, changed, used)
    record.buckets = [
        records.BucketSpeed(
            bucket=bucket, base_ms=pair.base_ms, new_ms=pair.new_ms, ratio=pair.ratio, ci=pair.ci, blocks=pair.n,
            clock=pair.clock,
        )
        for bucket, pair in pairs.items()
    ]  # fmt: skip
    record.ratio, record.ci = timing.block_speedup([(pair.base, pair.new) for pair in pairs.values()])
    record.verdict, record.reason = _verdict(record, pairs)
    record.kept = record.verdict == "kept"


def _verdict(record: WorkloadTuneRecord, pairs: dict[str, timing.Paired]) -> tuple[Any, str]:
    assert record.ci is not None
    slower = [f"{bucket} {pair.ratio:.3f}× {pair.ci}" for bucket, pair in pairs.items() if pair.ci.high < 1]
    if record.ci.high < 1 or slower:
        return "slower", f"the workload is slower: {', '.join(slower) or f'{record.ratio:.3f}× {record.ci}'}"
    if timing.keeps(record.ci, 0.0):
        return "kept", "the workload is faster (95 %), and no bucket is proven slower"
    return "tie", "no gain of the workload is proven: what ran before stays"


def _check_used(record: WorkloadTuneRecord, changed: list[CalledKey], used: dict[tuple[str, Key], Decision]) -> None:
    """Note at a key if its row did not decide in the second timing."""
    decided = {
        (op, tuple(untuned_calls.parts_of(ops.get(op), key).values())): decision for (op, key), decision in used.items()
    }
    for one in changed:
        decision = decided.get((one.op, tuple(one.key.values())))
        if decision is None:
            one.note = "no eager call of it while the workload was timed: a compiled or captured call keeps its choice"
        elif decision.source != "exact":
            one.note = f"its row was not used: {decision.reason}"
