"""`wavecrest.optimize`: a model and example inputs in, a faster model with a plan and a report out."""

from __future__ import annotations

import contextlib
import html
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import hardware, report
from wavecrest.errors import InvalidArgument, OutputWarning
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.analysis import Analysis
from wavecrest.optimizer.engine import run_ladder
from wavecrest.optimizer.ledger import Ledger
from wavecrest.optimizer.measurer import Measurer
from wavecrest.optimizer.options import MAX_LEVEL, Logged, Options, Progress, Silent
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.state import RunState
from wavecrest.records import OptimizeRecord, files

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
        """The verdict, the time of each bucket before and after, and the steps in force, as lines of text."""
        head = report.headline(self.record)
        rows = self.record.result.speed if self.record.result else []
        lines = [" ".join(filter(None, (head.title, head.interval))), head.meaning]
        for row in rows:
            lines.append(f"{row.bucket}: {row.base_ms:.3f} ms → {row.new_ms:.3f} ms, {row.ratio:.3f}× {row.ci}")
        kept = [step.title for step in self.plan.kept()]
        lines += [f"in force: {', '.join(kept) or 'nothing'}"]
        lines += [f"environment: {row.name}={row.value}" for row in self.plan.environment]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The summary for a notebook; `report.html()` is the whole page."""
        return f"<pre>{html.escape(self.summary())}</pre>"


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
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | bool = False,
) -> OptimizeResult:
    """Make a model faster, one measured step at a time, and prove it.

    Args:
        model: a module in eval mode on the device it will serve on; it is not changed.
        example_inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or `Buckets` of these.
        level: highest level tried (1 environment, 2 compile, 3 surgery, 4 kernels, 5 graph capture).
        min_gain: proven gain below which a step is not kept (0.02: two percent).
        budget: seconds.
        precision: "tf32", "bf16" or "fp16" to have that tried; answers then change by that precision.
        out: folder for run.json, plan.json and report.html; None keeps everything in memory.
        resume: go on with the run in `out`.
        progress: receiver of what runs and what came of it; True logs it to the logger "wavecrest" (level INFO).

    Returns:
        result.model, result.plan, result.report, result.record

    Raises:
        WorkloadError: the model or the inputs cannot be used.
        OptimizeInterrupted: Ctrl-C (a KeyboardInterrupt that carries what was decided).
    """
    options = Options(level=level, min_gain=min_gain, budget=budget, precision=precision)
    told = Logged() if progress is True else progress or None
    result = run(
        from_example(model, example_inputs), options, out=Path(out) if out else None, resume=resume, progress=told
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
        command: the command line, for the record.
        now: where time comes from.
        analysis: finds ceilings, profiles and graph breaks; None takes the device's own.
    """
    options, progress = options or Options(), progress or Silent()
    if out is None and resume:
        raise InvalidArgument("resume needs the folder of the interrupted run (out=)")
    with contextlib.nullcontext() if out is None else files.locked(files.prepare_folder(out)):
        return _run(workload, options, out, resume, progress, command, now, analysis)


def _run(
    workload: Workload,
    options: Options,
    out: Path | None,
    resume: bool,
    progress: Progress,
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
        run_ladder(state)
    except KeyboardInterrupt:
        raise OptimizeInterrupted(ledger.record, ledger.plan, out) from None
    return OptimizeResult(
        state.current, ledger.plan, Report(ledger.record), ledger.record, out, unwritten=ledger.unwritten
    )
