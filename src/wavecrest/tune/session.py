"""A tuning run: tune the keys of an op's cases one after another, and write the results after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wavecrest import hardware, ops, records
from wavecrest.bench import suites
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config, Entry, Evidence, Overlay, Row, database
from wavecrest.dispatch.tuned.row import versions_text
from wavecrest.errors import InvalidArgument, OutputError, Unsupported
from wavecrest.measure.timing import Clock
from wavecrest.records import files, provenance
from wavecrest.tune import admission, candidates, child, compile_ahead, pool, race, trial, workers

# the record that a row names if no record is kept
NO_RECORD = "no record kept"
# the folder that holds the records of shipped rows
FOLDER = "evidence"

# (activity, done, total)
OnStep = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run: which cases and backends, and for how long.

    Args:
        suite, matching: the cases, as for `bench.suites.cases`.
        backends: backends to try beside PyTorch; None: all.
        budget: seconds after which no key is begun.
        seconds: of the final round of a key (`race.FINAL_ROUNDS` rounds are the least).
        workers: child processes that compile; None: one less than the number of cores.
        timeout: seconds of silence after which a candidate in a child is given up (`pool.Pool`).
        modules: Python modules that children import first, such as a user's ops.
        kernels: files and modules with a user's kernels, which children load first (`backends.user_files.load`).
        candidates: number of configurations per key, beside the default, that the cost model ranks first; None:
        all.
        in_a_row: calls in a graph, each on tensors of its own, whose time is that of one times their number; 1: a call
        alone, without a graph.
        configs: configurations to try in place of the default and the backends' spaces, each by the backends that it
        fits; a mapping gives them by case name; None: the default and the spaces.
    """

    suite: str = "shared"
    matching: str = ""
    backends: tuple[str, ...] | None = None
    budget: float = math.inf
    seconds: float = 0.4
    workers: int | None = None
    candidates: int | None = None
    timeout: float = 60.0
    modules: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    in_a_row: int = 1
    configs: tuple[Config, ...] | Mapping[str, tuple[Config, ...]] | None = None

    def configs_of(self, case: str) -> tuple[Config, ...] | None:
        """The configurations of a case."""
        return self.configs[case] if isinstance(self.configs, Mapping) else self.configs


@dataclass(frozen=True, slots=True)
class Targets:
    """Where results are written after each key; None: nowhere. `table` needs `record`, which its rows name."""

    record: Path | None = None
    table: Path | None = None
    overlay: Overlay | None = None

    def prepare(self, op: AnyOp, header: provenance.Header) -> None:
        """Check that both can be written, before anything is measured.

        Raises:
            InvalidArgument: the table belongs to another op or architecture, has no record, or is one of the package's
                own and no commit has what would be measured.
            OutputError: a file cannot be written.
            TableError: the table, or the user's database, is damaged.
        """
        if self.overlay is not None:
            self.overlay.prepare()
        for path in (self.record, self.table):
            if path is not None:
                if path.is_dir():
                    raise OutputError(f"{path} is a folder; give the name of a file in it")
                files.prepare_folder(path.parent)
        if self.table is None:
            return
        if self.record is None:
            raise InvalidArgument("a table's rows name the record they come from: give --out FILE too")
        if self.table.resolve().is_relative_to(database.DATA.resolve()) and not header.reproducible:
            here = "no commit is known" if header.commit is None else f"this is {header.commit}"
            raise InvalidArgument(
                f"{self.table} ships with the package, and its rows are measured with what a commit has; {here}: "
                "commit first, or give another --table"
            )
        arch = header.device["arch"]
        if self.table.parent.name in hardware.ARCHS and self.table.parent.name != arch:
            raise InvalidArgument(f"{self.table} is for {self.table.parent.name}, and this is {arch}")
        if self.table.stem in ops.names() and self.table.stem != op.name:
            raise InvalidArgument(f"{self.table} is for {self.table.stem}, and this is {op.name}")
        database.read(self.table, lookup.fields_of(op))

    def write(self, op: AnyOp, record: records.TuneRecord) -> None:
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
    """The name of a record in a table: its `place`, "@", and the hash of its content (`files.content_hash`).

    The hash says which version of the file a row rests on.

    Raises:
        OSError: the file cannot be read.
    """
    return f"{place(path)}@{files.content_hash(path)}"


def place(path: Path) -> str:
    """Where a record is: its path under a folder `evidence`, or its name."""
    parts = path.resolve().parts[:-1]
    folder = parts[len(parts) - parts[::-1].index(FOLDER) :] if FOLDER in parts else ()
    return "/".join((*folder, path.name))


def row_of(found: records.TunedKey, fields: tuple[str, ...], record: str, header: provenance.Header) -> Row:
    """The table row of a key that has a winner, with the evidence of its record."""
    assert found.backend is not None and found.us is not None
    config = Config(**found.config) if found.config else None
    key = tuple(found.key[name] for name in fields)
    return Row(key, found.backend, config, found.us, found.native_us, record, evidence_of(found, header))


def evidence_of(found: records.TunedKey, header: provenance.Header) -> Evidence:
    """The evidence of a key's winner, from the record."""
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
class _Run:
    """The state of a run."""

    op: AnyOp
    device: hardware.Device
    settings: Settings
    targets: Targets
    record: records.TuneRecord
    timer: race.Timer
    on_step: OnStep
    now: Clock
    begin: float

    @property
    def deadline(self) -> float:
        """The deadline, in seconds of `now`."""
        return self.begin + self.settings.budget

    def save(self) -> None:
        """Write the results so far."""
        self.record.seconds = round(self.now() - self.begin, 3)
        self.targets.write(self.op, self.record)


def tune(
    name: str,
    device: hardware.Device,
    settings: Settings,
    targets: Targets | None = None,
    *,
    resume: bool = False,
    cases: Sequence[suites.Case] | None = None,
    sources: Mapping[str, Mapping[str, Any]] | None = None,
    left: Mapping[str, str] | None = None,
    command: str | None = None,
    starts: Sequence[workers.Start] | None = None,
    timer: race.Timer | None = None,
    on_step: OnStep | None = None,
    now: Clock = time.perf_counter,
) -> records.TuneRecord:
    """Find the fastest correct way to run the calls of each key of an op's cases.

    Args:
        name: the op.
        device: where to run.
        settings: see `Settings`.
        targets: where results go; they are written after each key, so that an interrupted run keeps what it found.
        resume: keep the keys that the record at its target has, if there is one.
        cases: cases to tune in place of the suite's.
        sources: how a child makes such a case, by its name (`trial.Trial.source`); a case without a source is made
        from its key.
        left: cases that cannot be tuned here, with the reasons, for the record.
        command: for the record's header; None takes this process's.
        starts: start the workers that the keys are spread over (`workers.local`, `integrations.ray.workers_of`);
            None: everything runs in this process, which a candidate that crashes or hangs takes with it.
        timer: what times the calls in this process; None: device events, or the host's clock on the CPU.
        on_step: called before each key, and while kernels are compiled.
        now: where the host's time comes from, for the budget and for calls on the CPU.

    Raises:
        InvalidArgument: an unknown op, suite or backend; calls in a row on a CPU, which has no graphs; no case has
        `matching` in its name; or the record to resume was measured on another device, by another version or for
        another suite.
        OutputError, TableError: results cannot be written where asked; found before anything is measured.
        admission.DeviceLost: a kernel made the device unusable; earlier results are written.
        EnvironmentProblem: no child process is left to tune in; earlier results are written.
    """
    op = ops.get(name)
    names = candidates.backends(op, settings.backends)
    if settings.in_a_row > 1 and device.kind == "cpu":
        raise InvalidArgument("calls in a row are one graph, which only a GPU has: tune a call alone on a CPU")
    if cases is None:
        found = suites.cases(op, settings.suite, device.torch_name, matching=settings.matching)
    else:
        found = [case for case in cases if settings.matching in case.name]
    if not found:
        raise InvalidArgument(f"no case of suite {settings.suite!r} has {settings.matching!r} in its name")
    targets = targets or Targets()
    header = provenance.header(device, command=command, rows=False)
    targets.prepare(op, header)
    record = records.TuneRecord(
        header=header,
        op=op.name,
        suite=settings.suite,
        budget_seconds=settings.budget,
        in_a_row=settings.in_a_row,
        samples="full",
    )
    run = _Run(
        op, device, settings, targets, record,
        timer=timer or race.timer_of(device.torch_name, now, settings.in_a_row),
        on_step=on_step or (lambda _what, _done, _planned: None),
        now=now, begin=now(),
    )  # fmt: skip
    if resume:
        record.keys, record.unfinished = _finished(targets, record)
        done = {tuned.case for tuned in record.keys}
        found = [case for case in found if case.name not in done]
    record.left = {**(left or {}), **{case.name: "the run ended before it" for case in found}}
    with torch.no_grad():
        try:
            planned, kernels = _plan(run, found, names)
            for one in planned:
                one.source = (sources or {}).get(one.case.name, {} if cases is not None else {"suite": settings.suite})
            _compile(run, kernels, planned)
            if starts is None:
                _here(run, planned)
            else:
                _spread(run, planned, starts)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            record.problem = "interrupted" if interrupted else f"{type(error).__name__}: {admission.first_line(error)}"
            raise
        finally:
            run.save()
            if targets.overlay is not None:
                registry.reread()
    return record


def _finished(targets: Targets, record: records.TuneRecord) -> tuple[list[records.TunedKey], dict[str, dict[str, str]]]:
    """The tuned keys of the record to resume, and the facts about keys that were begun."""
    if targets.record is None:
        raise InvalidArgument("there is nothing to resume without a record: give --out FILE")
    if not targets.record.exists():
        return [], {}
    before = records.load_as(targets.record, records.TuneRecord)
    for what, was, now in (
        ("op", before.op, record.op),
        ("suite", before.suite, record.suite),
        ("number of calls in a row", before.in_a_row, record.in_a_row),
        ("device", before.header.device["name"], record.header.device["name"]),
        ("versions", before.header.versions, record.header.versions),
        ("commit", before.header.commit, record.header.commit),
        ("form of samples", before.samples, record.samples),
    ):
        if was != now:
            raise InvalidArgument(f"{targets.record} has another {what} ({was}, and this is {now}): give another --out")
    return [tuned for tuned in before.keys if tuned.backend is not None], before.unfinished


def _plan(
    run: _Run, found: list[suites.Case], names: tuple[str, ...]
) -> tuple[list[trial.Trial], compile_ahead.Kernels]:
    """The cases whose keys are new, with their candidates and kernels."""
    op, arch = run.op, run.device.known
    kernels = compile_ahead.kernels(run.device.kind == "cpu", arch)
    planned: list[trial.Trial] = []
    seen: dict[Key, str] = {tuple(tuned.key.values()): tuned.case for tuned in run.record.keys}
    for index, case in enumerate(found):
        run.on_step("cases", index, len(found))
        try:
            call = case.make()
            op.check(call)
            key = op.key(call)
            if key in seen:
                run.record.left[case.name] = f"has the key of {seen[key]}"
                continue
            settings = run.settings
            field = candidates.field(op, call, key, arch, names, settings.candidates, settings.configs_of(case.name))
            one = trial.Trial(case, key, field)
            if not one.field.candidates:
                reasons = "; ".join(f"{name} {reason}" for name, reason in one.field.refused)
                run.record.left[case.name] = f"no backend takes it: {reasons}"
                continue
            known = run.record.unfinished.get(case.name, {})
            named = {candidates.named(other): place for place, other in enumerate(one.field.candidates)}
            one.ended = {named[text]: reason for text, reason in known.items() if text in named}
            if not kernels.note and arch is not None:
                kernels.add(op, case.name, call, one.field.candidates, arch)
        except torch.OutOfMemoryError as error:
            run.record.left[case.name] = f"out of memory: {admission.first_line(error)}"
            continue
        except (InvalidArgument, Unsupported) as error:
            run.record.left[case.name] = f"the op refuses it: {admission.first_line(error)}"
            continue
        seen[key] = case.name
        planned.append(one)
    return planned, kernels


def _compile(run: _Run, kernels: compile_ahead.Kernels, planned: list[trial.Trial]) -> None:
    workers = run.settings.workers or max(1, hardware.cpu().compute_units - 1)
    run.record.compilation = compile_ahead.compile_all(
        kernels,
        workers,
        deadline=run.deadline,
        on_kernel=lambda done, planned: run.on_step("kernels", done, planned),
        now=run.now,
    )
    for one in planned:
        one.refused |= kernels.spills_more(one.case.name, one.field.candidates)
        for index, candidate in enumerate(one.field.candidates):
            error = kernels.error(one.case.name, candidate)
            if error is not None:
                one.refused[index] = error


def _here(run: _Run, planned: list[trial.Trial]) -> None:
    """Tune the keys in this process."""
    for index, one in enumerate(planned):
        if run.now() > run.deadline:
            _no_time(run, planned[index:])
            return
        run.on_step(one.case.name, index, len(planned))
        tuned = trial.tune_key(
            run.op, one, run.device, seconds=run.settings.seconds, timer=run.timer, in_a_row=run.settings.in_a_row
        )
        _keep(run, one, tuned)


def _spread(run: _Run, planned: list[trial.Trial], starts: Sequence[workers.Start]) -> None:
    """Tune the keys in children; the results are put in the order of the cases at the end."""
    if run.device.kind != "cpu":
        # free the memory of the cases' tensors for the children
        torch.cuda.empty_cache()
    settings, versions = run.settings, run.record.header.versions
    expected = {
        "name": run.device.name,
        "versions": {name: getattr(versions, name) for name in ("wavecrest", "torch", "triton")},
    }
    hello = child.greeting(run.device, settings.modules, settings.seconds, settings.kernels, settings.in_a_row)
    own = pool.Pool(run.op, hello, settings.timeout, run.deadline, expected, run.now)
    run.record.children = len(starts)
    done: set[int] = set()
    for event in own.run(planned, starts):
        one = planned[event.index]
        if isinstance(event, pool.Begun):
            run.on_step(one.case.name, len(done), len(planned))
        elif isinstance(event, pool.Found):
            done.add(event.index)
            run.record.unfinished.pop(one.case.name, None)
            _keep(run, one, event.key)
        else:
            run.record.endings.append(f"{one.case.name}: {event.reason}")
            known = run.record.unfinished.setdefault(one.case.name, {})
            known |= {candidates.named(one.field.candidates[index]): event.reason for index in event.candidates}
            run.save()
    order = {one.case.name: index for index, one in enumerate(planned)}
    run.record.keys.sort(key=lambda tuned: order.get(tuned.case, -1))
    _no_time(run, [one for index, one in enumerate(planned) if index not in done])


def _keep(run: _Run, one: trial.Trial, tuned: records.TunedKey) -> None:
    run.record.keys.append(tuned)
    del run.record.left[one.case.name]
    run.save()


def _no_time(run: _Run, planned: list[trial.Trial]) -> None:
    run.record.left |= {one.case.name: "no time left of the budget" for one in planned}
