"""Compile every case of an op, or of a user's function, for several architectures and configurations."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, TextIO

from wavecrest import hardware, ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported, WavecrestError, WorkloadError
from wavecrest.isa import Launch, mca
from wavecrest.isa.compiler import arch_of, compile_launch, require_compiler
from wavecrest.isa.facts import IsaRecord, Row, read
from wavecrest.measure.workload import load_function
from wavecrest.records import provenance

# (done, planned, last compiled)
OnProgress = Callable[[int, int, str], None]
Cases = Callable[..., Mapping[str, Launch]]
Override = Mapping[str, int]
# launch options that a configuration may set although the shipped one leaves them alone
OPTIONS = ("num_warps", "num_stages", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "maxnreg")

# the reason of a kernel that took its compiler down
CRASHED = "the compiler crashed"


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile; `chosen` names its configuration, `reason` says why it is not compiled."""

    target: str
    case: str
    arch: str
    launch: Launch
    chosen: str
    reason: str = ""


def ops_with_kernels() -> list[str]:
    """The names of all ops that have a Triton kernel."""
    return [name for name in ops.names() if "triton" in ops.get(name).backends]


def cases_of(target: str) -> Cases:
    """The function that gives a target's launches, `cases(arch, config=None) -> dict[name, Launch]`.

    Args:
        target: an op's name, or file.py:function (package.module:function) for a user's kernels; that function may
        take (arch, config), (arch) or nothing.

    Raises:
        InvalidArgument: no such op, or it has no kernel.
        WorkloadError: the file or function cannot be loaded.
    """
    if ":" in target:
        return _user_cases(target, load_function(target))
    cases = ops.get(target).study.compile_cases
    if cases is None:
        raise InvalidArgument(f"{target} has no kernel of its own to compile")
    return cases


def _user_cases(target: str, function: Callable[..., Any]) -> Cases:
    """A user's function, which may take (arch, config), (arch) or nothing, as one that takes both."""
    takes = len(inspect.signature(function).parameters)

    def cases(arch: hardware.Arch, config: Config | None = None) -> Mapping[str, Launch]:
        try:
            launches = function(*(arch, config)[:takes])
        except WavecrestError:
            raise
        except Exception as error:
            raise WorkloadError(f"{target} raised {type(error).__name__}: {error}") from error
        if config is None or takes > 1:
            return launches  # type: ignore[no-any-return]
        return {name: launch._replace(config=config) for name, launch in launches.items()}

    return cases


def parse_override(text: str) -> dict[str, int]:
    """A change of configuration from "KEY=VALUE,KEY=VALUE"; "shipped" changes nothing.

    Raises:
        InvalidArgument: not of this form, or a value is not a whole number.
    """
    if text.strip() == "shipped":
        return {}
    values = {}
    for item in text.split(","):
        name, separator, value = item.strip().partition("=")
        if not separator or not name.isidentifier() or not value.strip().lstrip("-").isdecimal():
            raise InvalidArgument(f"--config takes KEY=NUMBER,KEY=NUMBER or shipped, not {text!r}")
        if name in values:
            raise InvalidArgument(f"--config {text}: {name} is given twice")
        values[name] = int(value)
    return values


def jobs(
    target: str, archs: Sequence[str], overrides: Sequence[Override] = ({},), case: str | None = None
) -> list[Job]:
    """The kernels to compile: every case, by case, then configuration, then architecture.

    Args:
        target: see `cases_of`.
        archs: names of `hardware.ARCHS`.
        overrides: values that replace those of each case's own configuration; an empty one leaves it as shipped.
        case: only the case of this name.

    Raises:
        InvalidArgument: no such architecture, case or configuration key.
    """
    cases = cases_of(target)
    records = {name: arch_of(name) for name in archs}
    shipped = {name: _launches(target, cases, record) for name, record in records.items()}
    names = list(dict.fromkeys(name for launches in shipped.values() for name in launches))
    if case is not None and case not in names:
        raise InvalidArgument(f"{target} has no case {case!r}; it has {', '.join(map(repr, names))}")
    found = []
    for name in names if case is None else [case]:
        for override in overrides:
            for arch, launches in shipped.items():
                if name not in launches:
                    continue
                job = Job(target, name, arch, launches[name], describe(override))
                found.append(_changed(job, cases, records[arch], override) if override else job)
    return found


def describe(override: Override) -> str:
    """A configuration change in words: "shipped" or "num_warps=8"."""
    return ",".join(f"{key}={value}" for key, value in override.items()) or "shipped"


def _launches(target: str, cases: Cases, arch: hardware.Arch) -> Mapping[str, Launch]:
    launches = cases(arch)
    if not isinstance(launches, Mapping) or not launches:
        raise InvalidArgument(f"{target} must return a dict of case name to wavecrest.isa.Launch, with at least one")
    for name, launch in launches.items():
        if not isinstance(launch, Launch):
            raise InvalidArgument(f"{target}: case {name!r} is a {type(launch).__name__}, not a wavecrest.isa.Launch")
    return launches


def _changed(job: Job, cases: Cases, arch: hardware.Arch, override: Override) -> Job:
    """The job with a changed configuration; with a reason if the target makes no such launch."""
    known = job.launch.config.kwargs
    unknown = [key for key in override if key not in known and key not in OPTIONS]
    if unknown:
        allowed = dict.fromkeys((*known, *OPTIONS))
        raise InvalidArgument(
            f"{job.target} {job.case}: no configuration key {unknown[0]}; there are {', '.join(allowed)}"
        )
    config = Config(**{**known, **override})
    changed = replace(job, launch=job.launch._replace(config=config))
    if all(key in OPTIONS for key in override):
        return changed
    # constants and grid follow from the block sizes, so the launch is made anew
    try:
        return replace(job, launch=cases(arch, config)[job.case])
    except Exception as error:
        return replace(changed, reason=f"no launch with {config!r}: {type(error).__name__}: {error}")


def record(
    target: str,
    archs: Sequence[str],
    overrides: Sequence[Override] = ({},),
    case: str | None = None,
    *,
    workers: int | None = None,
    code: bool = False,
    mca_tool: mca.Tool | None = None,
    on_progress: OnProgress | None = None,
) -> IsaRecord:
    """Compile a target's cases, as a record that names the Triton which was imported.

    Args:
        target: see `cases_of`; "all" for every op that has a kernel.
        archs, overrides, case: as for `jobs`.
        workers, code, mca_tool, on_progress: as for `survey`.

    Raises: as of `jobs` and `survey`.
    """
    require_compiler()
    import triton

    names = ops_with_kernels() if target == "all" else [target]
    work = [job for name in names for job in jobs(name, archs, overrides, case)]
    rows = survey(work, workers=workers, code=code, mca_tool=mca_tool, on_progress=on_progress)
    header = provenance.header(hardware.cpu(), evidence="compiled")
    # a folder of modules may hold a Triton without its metadata
    versions = header.versions.model_copy(update={"triton": triton.__version__})
    return IsaRecord(header=header.model_copy(update={"versions": versions}), target=target, rows=rows)


def survey(
    work: Sequence[Job],
    *,
    workers: int | None = None,
    code: bool = False,
    mca_tool: mca.Tool | None = None,
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """Compile everything, in separate processes for each architecture, and read the facts, in the order of `work`.

    A kernel that does not compile, or that takes its compiler down, is a row with a reason.

    Args:
        work: from `jobs`.
        workers: processes; None for one a core this process may use.
        code: as for `facts.read`.
        mca_tool: as for `facts.read`.
        on_progress: called after each kernel.

    Raises:
        MissingDependency: triton is not installed.
        EnvironmentProblem: the kernels were defined for Triton's interpreter.
    """
    require_compiler()
    if not work:
        return []
    rows: dict[int, Row] = {}

    def note(index: int, row: Row) -> None:
        rows[index] = row
        if on_progress is not None:
            on_progress(len(rows), len(work), f"{row.target} {row.case} {row.arch}")

    count = min(workers or hardware.cpu().compute_units, len(work))
    _WORK.update(enumerate(work))
    waiting = list(range(len(work)))
    try:
        while waiting:
            # a process compiles for one architecture: triton 3.6 keeps the table of 8-bit conversions of the first one
            # and uses it for all (a kernel compiled for gfx942 alone, but not after gfx950)
            for arch in dict.fromkeys(work[index].arch for index in waiting):
                alike = [index for index in waiting if work[index].arch == arch]
                for index, row in _pooled(alike, count, code, mca_tool):
                    note(index, row)
            waiting = [index for index in waiting if index not in rows]
            # a compiler that dies takes the whole pool with it: the suspects are compiled one by one. A pool hands out
            # work in order; each worker has at most one kernel, and the pool a few more in its queue
            for index in waiting[: 3 * count]:
                done = dict(_pooled([index], 1, code, mca_tool))
                note(index, done.get(index) or _row(work[index], reason=CRASHED))
            waiting = waiting[3 * count :]
    finally:
        _WORK.clear()
    return [rows[index] for index in range(len(work))]


# launches cannot be sent to a process; the workers are forked and find them here
_WORK: dict[int, Job] = {}


def _pooled(indices: Sequence[int], workers: int, code: bool, mca_tool: mca.Tool | None) -> Iterator[tuple[int, Row]]:
    """The rows as they come; ends early if a worker dies."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
    try:
        futures: dict[Future[Row], int] = {pool.submit(_compile, index, code, mca_tool): index for index in indices}
        for future in as_completed(futures):
            try:
                row = future.result()
            except BrokenProcessPool:
                return
            yield futures[future], row
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_log: TextIO | None = None


def _begin(parent: int) -> None:
    """In a worker: send LLVM's and MLIR's standard error to a file, so that a failure can quote it."""
    global _log
    _log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    os.dup2(_log.fileno(), 2)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """End this worker with its parent: a pool's workers wait for work forever if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _compile(index: int, code: bool, mca_tool: mca.Tool | None) -> Row:
    job = _WORK[index]
    if job.reason:
        return _row(job, reason=job.reason)
    if _log is not None:
        _log.seek(0)
        _log.truncate()
    try:
        return _row(job, facts=read(compile_launch(job.launch, job.arch), code=code, mca_tool=mca_tool))
    except WavecrestError as error:
        return _row(job, reason=f"{error}{_diagnostic() if isinstance(error, Unsupported) else ''}")


def _diagnostic() -> str:
    """The first error that the compiler wrote, if any."""
    if _log is None:
        return ""
    _log.seek(0)
    errors = [line.strip() for line in _log if "error:" in line]
    return f" ({errors[0]})" if errors else ""


def _row(job: Job, **facts: Any) -> Row:
    return Row(
        target=job.target,
        case=job.case,
        arch=job.arch,
        config=dict(job.launch.config),
        chosen=job.chosen,
        kernel=job.launch.kernel.__name__,
        **facts,
    )
