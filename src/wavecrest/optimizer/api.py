"""`wavecrest.optimize`: a model and example inputs in, a faster model with a plan and a report out."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import hardware, report
from wavecrest.errors import InvalidArgument, OutputError, OutputWarning
from wavecrest.measure import copies
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.analysis import Analysis
from wavecrest.optimizer.bundle import write as write_bundle
from wavecrest.optimizer.engine import check_steps, run_ladder
from wavecrest.optimizer.ledger import Ledger
from wavecrest.optimizer.measurer import Measurer
from wavecrest.optimizer.options import MAX_LEVEL, Options, Progress, Silent
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.progress import receiver
from wavecrest.optimizer.state import RunState
from wavecrest.records import OptimizeRecord, files
from wavecrest.report import notebook

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.timing import Clock

__all__ = ["OptimizeInterrupted", "OptimizeResult", "Options", "Progress", "Report", "optimize", "run"]


class Report:
    """The run as one self-contained HTML page."""

    def __init__(self, record: OptimizeRecord) -> None:
        self.record = record

    def html(self) -> str:
        """The page."""
        return report.render(self.record)

    def save(self, path: str | Path) -> None:
        """Write the page."""
        report.write(self.record, Path(path))


_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, slots=True, repr=False)
class OptimizeResult:
    """Result of `optimize`: the optimized model, the plan to replay, the report and the whole record.

    `unwritten` says why `folder` does not hold all of it (a full disk, a report that cannot be made), or is empty.
    """

    model: nn.Module
    plan: Plan
    report: Report
    record: OptimizeRecord
    folder: Path | None
    unwritten: str = ""

    def __repr__(self) -> str:
        """One line: the verdict, and where the files are."""
        where = f", folder={str(self.folder)!r}" if self.folder else ""
        return f"OptimizeResult({report.headline(self.record).title!r}{where})"

    def summary(self) -> str:
        """The first line of the report, the time of each bucket before and after, and the steps in force."""
        head = report.headline(self.record)
        rows = self.record.result.speed if self.record.result else []
        lines = [report.first_line(self.record), head.meaning]
        for row in rows:
            # phases of one process have no interval
            ci = "" if self.record.result is None or self.record.result.unit == "phases" else f" {row.ci}"
            lines.append(f"{row.bucket}: {row.base_ms:.3f} ms → {row.new_ms:.3f} ms, {row.ratio:.3f}×{ci}")
        kept = [step.title for step in self.plan.kept()]
        lines += [f"in force: {', '.join(kept) or 'nothing'}"]
        lines += [f"environment: {row.name}={row.value}" for row in self.plan.environment]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The summary for a notebook, with every step folded; `report.html()` is the whole page."""
        notes = [f"set before import: {row.name}={row.value}" for row in self.plan.environment]
        return notebook.result(self.record, notes)


class OptimizeInterrupted(KeyboardInterrupt):
    """Ctrl-C during a run: the model is untouched; `record` and `plan` hold what was decided, `folder` resumes it."""

    def __init__(self, record: OptimizeRecord, plan: Plan, folder: Path | None) -> None:
        where = f"; resume with --resume {folder}" if folder else ""
        super().__init__(f"interrupted after {len(record.steps)} steps{where}")
        self.record, self.plan, self.folder = record, plan, folder


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    level: int = MAX_LEVEL,
    min_gain: float = 0.02,
    budget: float = 900.0,
    precision: str | None = None,
    quantize: str | Sequence[str] | None = None,
    quality: str | float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | bool | None = None,
    bundle: str | Path | None = None,
) -> OptimizeResult:
    """Make a model faster, one measured step at a time, and prove it.

    Args:
        model: a module in eval mode on the device it will serve on; it is not changed.
        example_inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or `Buckets` of these.
        level: highest level tried (1 environment, 2 compile, 3 surgery, 4 kernels, 5 graph capture).
        min_gain: proven gain below which a step is not kept (0.02: two percent).
        budget: seconds.
        precision: "tf32", "bf16" or "fp16" to have that tried; answers then change by that precision.
        quantize: formats of `wavecrest.quantize` to have tried, in order of preference ("int4,int8"); answers then
            change by `quality`, and the other steps are held to the quantized model's.
        quality: the most that perplexity may rise, or the relative error of a model without logits ("0.5%").
        out: folder for run.json, plan.json and report.html; None keeps everything in memory.
        resume: go on with the run in `out`.
        progress: receiver of what runs, what came of it and how long it takes; True writes lines to standard error,
            False nothing, None lines where that is a terminal or the code runs in a notebook.
        bundle: file for the proof bundle, which `wavecrest verify --bundle` checks.

    Returns:
        result.model, result.plan, result.report, result.record

    Raises:
        WorkloadError: the model or the inputs cannot be used.
        OptimizeInterrupted: Ctrl-C (a KeyboardInterrupt that carries what was decided).
    """
    options = Options(
        level=level, min_gain=min_gain, budget=budget, precision=precision,
        quantize=quantize if quantize is None or isinstance(quantize, str) else tuple(quantize), quality=quality,
    )  # fmt: skip
    result = run(
        from_example(model, example_inputs),
        options,
        out=Path(out) if out else None,
        resume=resume,
        progress=receiver(progress),
        bundle=Path(bundle) if bundle else None,
    )
    if result.unwritten:
        warnings.warn(result.unwritten, OutputWarning, stacklevel=2)
    return result


def run(
    workload: Workload,
    options: Options | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    bundle: Path | None = None,
    command: str | None = None,
    now: Clock = time.perf_counter,
    analysis: Analysis | None = None,
) -> OptimizeResult:
    """Run the ladder on a workload; see `optimize`.

    Args:
        workload: what to make faster.
        options: how; None takes the defaults.
        out: folder for run.json, plan.json and report.html; None keeps everything in memory.
        resume: go on with the run in `out`.
        progress: is told what runs and what came of it.
        bundle: file for the proof bundle of the finished run.
        command: the command line, for the record.
        now: where time comes from.
        analysis: finds ceilings, profiles and graph breaks; None takes the device's own.

    Runs of other threads wait for this one: they would disturb its times, and a process has one profiler.
    """
    options, progress = options or Options(), progress or Silent()
    if out is None and resume:
        raise InvalidArgument("resume needs the folder of the interrupted run (out=)")
    check_steps(options)
    if bundle is not None:
        files.prepare_folder(bundle.parent)
        if bundle.is_dir():
            raise OutputError(f"cannot write the bundle {bundle}: it is a folder; give the name of a file")
    with _ONE_AT_A_TIME, contextlib.nullcontext() if out is None else files.locked(files.prepare_folder(out)):
        return _run(workload, options, out, resume, progress, bundle, command, now, analysis)


def _run(
    workload: Workload,
    options: Options,
    out: Path | None,
    resume: bool,
    progress: Progress,
    bundle: Path | None,
    command: str | None,
    now: Clock,
    analysis: Analysis | None,
) -> OptimizeResult:
    device = hardware.detect(workload.device)
    state = RunState(
        workload,
        options,
        progress,
        device,
        Ledger(workload, device, options, folder=out, command=command),
        Measurer(workload, options.budget, progress, now),
        analysis or Analysis(workload),
        now,
    )
    ledger = state.ledger
    if resume:
        ledger.resume(workload, device)
    # from here on a run that is killed can be resumed
    ledger.begin()
    try:
        with state.children:
            run_ladder(state)
    except KeyboardInterrupt:
        raise OptimizeInterrupted(ledger.record, ledger.plan, out) from None
    finally:
        copies.discard(workload)
    unwritten = ledger.unwritten
    if bundle is not None:
        progress.phase("proof bundle")
        unwritten = unwritten or _write_bundle(bundle, state)
    return OptimizeResult(state.current, ledger.plan, Report(ledger.record), ledger.record, out, unwritten=unwritten)


def _write_bundle(path: Path, state: RunState) -> str:
    """Write the proof bundle; why it was not written, or "": a finished run does not end for it."""
    try:
        write_bundle(path, state.ledger.record, state.ledger.plan, state.workload, state.gate)
    except Exception as error:
        return f"there is no proof bundle at {path}: {type(error).__name__}: {error}"
    return ""
