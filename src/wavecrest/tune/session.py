"""A tuning run: the keys of an op's cases one after another, with what is found written after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wavecrest import hardware, lookup, records, registry
from wavecrest.bench import suites
from wavecrest.errors import InvalidArgument, OutputError, Unsupported
from wavecrest.registry import Key, Op
from wavecrest.tune import ahead, candidates, contest, trust
from wavecrest.tuned import Config, Entry, Evidence, Overlay, Row, database
from wavecrest.tuned.row import versions_text

# what a row names as its record where none is kept
NO_RECORD = "no record kept"

# what is going on, how many of it are done, and how many there are
OnStep = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to tune, and for how long.

    Args:
        suite, matching: the cases, as for `bench.suites.cases`.
        backends: those to try beside PyTorch; None: all.
        budget: seconds after which no key is begun.
        seconds: of the final round of a key (`contest.FINAL_ROUNDS` rounds are the least).
        workers: child processes that compile; None: one less than there are cores.
        candidates: of a key's configurations beside the default, only so many that the cost model ranks first; None:
            all.
    """

    suite: str = "shared"
    matching: str = ""
    backends: tuple[str, ...] | None = None
    budget: float = math.inf
    seconds: float = 0.4
    workers: int | None = None
    candidates: int | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """Where results go, after each key; None: nowhere. `table` needs `record`, which its rows name."""

    record: Path | None = None
    table: Path | None = None
    overlay: Overlay | None = None

    def prepare(self, op: Op, arch: str) -> None:
        """Find out, before anything is measured, whether both can be written.

        Raises:
            InvalidArgument: the table is one of another op or architecture, or has no record.
            OutputError: a file cannot be written.
            TableError: the table, or the user's database, is damaged.
        """
        if self.overlay is not None:
            self.overlay.prepare()
        for path in (self.record, self.table):
            if path is not None:
                if path.is_dir():
                    raise OutputError(f"{path} is a folder; give the name of a file in it")
                records.prepare_folder(path.parent)
        if self.table is None:
            return
        if self.record is None:
            raise InvalidArgument("a table's rows name the record they come from: give --out FILE too")
        if self.table.parent.name in hardware.ARCHS and self.table.parent.name != arch:
            raise InvalidArgument(f"{self.table} is for {self.table.parent.name}, and this is {arch}")
        if self.table.stem in registry.names() and self.table.stem != op.name:
            raise InvalidArgument(f"{self.table} is for {self.table.stem}, and this is {op.name}")
        database.read(self.table, lookup.fields_of(op))

    def write(self, op: Op, record: records.TuneRecord) -> None:
        """Write the record, and the rows of its keys into the tables, each file whole or not at all."""
        if self.record is not None:
            records.save(record, self.record)
        fields = lookup.fields_of(op)
        name = NO_RECORD if self.record is None else named(self.record)
        found = [row_of(key, fields, name, record.header) for key in record.keys if key.backend is not None]
        if self.table is not None and found:
            rows = dict(database.read(self.table, fields))
            rows |= {row.key: row for row in found}
            database.write(self.table, fields, rows.values())
        if self.overlay is not None and found:
            self.overlay.write([Entry(record.header.device["arch"], op.name, fields, row) for row in found])


def named(path: Path) -> str:
    """How a table names a record: by its place under benchmarks/results, or by its name."""
    parts = path.resolve().parts
    for index in range(len(parts) - 2, 0, -1):
        if parts[index - 1 : index + 1] == ("benchmarks", "results"):
            return "/".join(parts[index + 1 :])
    return path.name


def row_of(found: records.TunedKey, fields: tuple[str, ...], record: str, header: records.Header) -> Row:
    """The table row of a key that has a winner, with the evidence of its record."""
    assert found.backend is not None and found.us is not None
    config = Config(**found.config) if found.config else None
    key = tuple(found.key[name] for name in fields)
    return Row(key, found.backend, config, found.us, found.native_us, record, evidence_of(found, header))


def evidence_of(found: records.TunedKey, header: records.Header) -> Evidence:
    """What a record says of a key's winner beside its time."""
    won = next((one for one in found.candidates if one.status == "won"), None)
    default = next((one.ms for one in found.candidates if one.role == "default" and one.ms is not None), None)
    versions = versions_text(header.versions.torch, header.versions.triton, header.device["driver"])
    return Evidence(
        default_us=None if default is None else default * 1e3,
        error=None if won is None else won.relative,
        device=header.device["name"],
        units=header.device["compute_units"],
        versions=versions,
        date=header.created,
        commit=header.commit or "",
    )


@dataclass(slots=True)
class _Planned:
    """A case whose key is to be tuned."""

    case: suites.Case
    key: Key
    field: candidates.Field


@dataclass(slots=True)
class _Run:
    """The state of a run."""

    op: Op
    device: hardware.Device
    settings: Settings
    targets: Targets
    record: records.TuneRecord
    timer: contest.Timer
    on_step: OnStep
    begin: float

    @property
    def deadline(self) -> float:
        """Of `time.perf_counter`."""
        return self.begin + self.settings.budget

    def save(self) -> None:
        """Write what there is."""
        self.record.seconds = round(time.perf_counter() - self.begin, 3)
        self.targets.write(self.op, self.record)


def tune(
    name: str,
    device: hardware.Device,
    settings: Settings,
    targets: Targets | None = None,
    *,
    resume: bool = False,
    cases: Sequence[suites.Case] | None = None,
    left: Mapping[str, str] | None = None,
    command: str | None = None,
    timer: contest.Timer | None = None,
    on_step: OnStep | None = None,
) -> records.TuneRecord:
    """Find the fastest correct way to run the calls of each key of an op's cases.

    Args:
        name: the op.
        device: where to run.
        settings: see `Settings`.
        targets: where results go; they are written after each key, so that an interrupted run keeps what it found.
        resume: keep the keys that the record at its target has, if there is one.
        cases: what to tune, in place of the suite's.
        left: cases that are none here, with the reasons, for the record.
        command: for the record's header; None takes this process's.
        timer: what times the calls; None: device events, or the host's clock on the CPU.
        on_step: called before each key, and while kernels are compiled.

    Raises:
        InvalidArgument: an unknown op, suite or backend, no case has `matching` in its name, or there is something
            to resume that was measured on another device, by another version or for another suite.
        OutputError, TableError: results cannot be written where asked; found before anything is measured.
        trust.DeviceLost: a kernel ended the device; what was found before is written.
    """
    op = registry.get(name)
    names = candidates.backends(op, settings.backends)
    if cases is None:
        found = suites.cases(op, settings.suite, device.torch_name, matching=settings.matching)
    else:
        found = [case for case in cases if settings.matching in case.name]
    if not found:
        raise InvalidArgument(f"no case of suite {settings.suite!r} has {settings.matching!r} in its name")
    targets = targets or Targets()
    targets.prepare(op, device.arch)
    record = records.TuneRecord(
        header=records.header(device, command=command),
        op=op.name,
        suite=settings.suite,
        budget_seconds=settings.budget,
    )
    run = _Run(
        op, device, settings, targets, record,
        timer=timer or contest.timer_of(device.torch_name),
        on_step=on_step or (lambda _what, _done, _planned: None),
        begin=time.perf_counter(),
    )  # fmt: skip
    if resume:
        record.keys = _finished(targets, record)
        done = {tuned.case for tuned in record.keys}
        found = [case for case in found if case.name not in done]
    record.left = {**(left or {}), **{case.name: "the run ended before it" for case in found}}
    with torch.no_grad():
        try:
            planned, kernels = _plan(run, found, names)
            _compile(run, kernels)
            for index, one in enumerate(planned):
                if time.perf_counter() > run.deadline:
                    record.left |= {rest.case.name: "no time left of the budget" for rest in planned[index:]}
                    break
                run.on_step(one.case.name, index, len(planned))
                tuned = _tune_key(run, one, kernels)
                record.keys.append(tuned)
                del record.left[one.case.name]
                run.save()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            record.problem = "interrupted" if interrupted else f"{type(error).__name__}: {trust.first_line(error)}"
            raise
        finally:
            run.save()
            if targets.overlay is not None:
                registry.reread()
    return record


def _finished(targets: Targets, record: records.TuneRecord) -> list[records.TunedKey]:
    """The keys with a winner that the record at its target has."""
    if targets.record is None:
        raise InvalidArgument("there is nothing to resume without a record: give --out FILE")
    if not targets.record.exists():
        return []
    before = records.load_as(targets.record, records.TuneRecord)
    for what, was, now in (
        ("op", before.op, record.op),
        ("suite", before.suite, record.suite),
        ("device", before.header.device["name"], record.header.device["name"]),
        ("versions", before.header.versions, record.header.versions),
        ("commit", before.header.commit, record.header.commit),
    ):
        if was != now:
            raise InvalidArgument(f"{targets.record} has another {what} ({was}, and this is {now}): give another --out")
    return [tuned for tuned in before.keys if tuned.backend is not None]


def _plan(run: _Run, found: list[suites.Case], names: tuple[str, ...]) -> tuple[list[_Planned], ahead.Kernels]:
    """The cases whose keys are new, with their candidates and kernels."""
    op, arch = run.op, run.device.known
    kernels = ahead.kernels(run.device.kind == "cpu", arch)
    planned: list[_Planned] = []
    seen: dict[Key, str] = {tuple(tuned.key.values()): tuned.case for tuned in run.record.keys}
    for index, case in enumerate(found):
        run.on_step("cases", index, len(found))
        try:
            args = case.make()
            op.check(*args)
            key = op.key(*args)
            if key in seen:
                run.record.left[case.name] = f"has the key of {seen[key]}"
                continue
            one = _Planned(case, key, candidates.field(op, args, key, arch, names, run.settings.candidates))
            if not one.field.candidates:
                reasons = "; ".join(f"{name} {reason}" for name, reason in one.field.refused)
                run.record.left[case.name] = f"no backend takes it: {reasons}"
                continue
            if not kernels.note and arch is not None:
                kernels.add(op, case.name, args, one.field.candidates, arch)
        except torch.OutOfMemoryError as error:
            run.record.left[case.name] = f"out of memory: {trust.first_line(error)}"
            continue
        except (InvalidArgument, Unsupported) as error:
            run.record.left[case.name] = f"the op refuses it: {trust.first_line(error)}"
            continue
        seen[key] = case.name
        planned.append(one)
    return planned, kernels


def _compile(run: _Run, kernels: ahead.Kernels) -> None:
    workers = run.settings.workers or max(1, hardware.cpu().compute_units - 1)
    run.record.compilation = ahead.compile_all(
        kernels,
        workers,
        deadline=run.deadline,
        on_kernel=lambda done, planned: run.on_step("kernels", done, planned),
    )


def _tune_key(run: _Run, one: _Planned, kernels: ahead.Kernels) -> records.TunedKey:
    begin = time.perf_counter()
    fields = run.op.key_fields or tuple(f"part {index}" for index in range(len(one.key)))
    tuned = records.TunedKey(case=one.case.name, key=dict(zip(fields, one.key, strict=True)))
    tuned.candidates = [
        records.TuneCandidate(backend=name, status="refused", reason=reason) for name, reason in one.field.refused
    ]
    try:
        _contest(run, one, kernels, tuned)
    except torch.OutOfMemoryError as error:
        tuned.problem = f"out of memory: {trust.first_line(error)}"
    except RuntimeError as error:
        # raised while several candidates were timed: nobody's in particular, and the end if the device is gone
        tuned.problem = f"raised {type(error).__name__}: {trust.first_line(error)}"
        trust.require(torch.device(run.device.torch_name), f"timing {one.case.name}")
    if run.device.kind != "cpu":
        # the next case's tensors have other sizes
        torch.cuda.empty_cache()
    tuned.seconds = round(time.perf_counter() - begin, 3)
    return tuned


def _contest(run: _Run, one: _Planned, kernels: ahead.Kernels, tuned: records.TunedKey) -> None:
    op = run.op
    args = one.case.make()
    right = trust.oracle(op, args)
    least_ms = trust.least_ms(op, args, right, run.device.known)
    tuned.least_us = None if least_ms is None else round(least_ms * 1e3, 3)
    entrants: list[contest.Entrant] = []
    by_entrant: dict[int, candidates.Candidate] = {}
    for candidate in one.field.candidates:
        row = records.TuneCandidate(
            backend=candidate.backend,
            config={} if candidate.config is None else dict(candidate.config.kwargs),
            role=candidate.role,
        )
        tuned.candidates.append(row)
        error = kernels.error(one.case.name, candidate)
        if error is not None:
            row.status, row.reason = "refused", error
            continue
        call = trust.admit(op, candidate, args, right, row)
        if call is not None:
            entrants.append(contest.Entrant(row, call))
            by_entrant[id(row)] = candidate
    while True:
        finalists = contest.quick(entrants, run.timer, least_ms)
        finalists, taken = contest.final(finalists, run.timer, least_ms, seconds=run.settings.seconds)
        verdict = contest.judge(finalists)
        winner = verdict.winner
        if winner is None or taken is None:
            tuned.problem = verdict.reason
            return
        # once more after thousands of calls: an error that comes and goes is a race
        if trust.admit(op, by_entrant[id(winner.row)], args, right, winner.row) is not None:
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
        tuned.ratio, tuned.ci = contest.against(native, winner)
