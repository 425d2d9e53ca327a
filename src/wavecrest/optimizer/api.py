"""`wavecrest.optimize`: a model and example inputs in, a faster model with a plan and a report out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import report
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.engine import MAX_LEVEL, Engine, Options, Progress
from wavecrest.optimizer.plan import Plan
from wavecrest.records import OptimizeRecord, StepOutcome, files

if TYPE_CHECKING:
    from torch import nn

__all__ = ["OptimizeInterrupted", "OptimizeResult", "Options", "Progress", "Report", "optimize", "run"]


class _Silent:
    def phase(self, text: str) -> None:
        pass

    def update(self, done: int, planned: int) -> None:
        pass

    def outcome(self, step: StepOutcome) -> None:
        pass


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


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """What `optimize` returns: the optimized model, the plan to replay, the report and the whole record."""

    model: nn.Module
    plan: Plan
    report: Report
    record: OptimizeRecord
    folder: Path | None


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

    Returns:
        result.model, result.plan, result.report, result.record

    Raises:
        WorkloadError: the model or the inputs cannot be used.
        OptimizeInterrupted: Ctrl-C (a KeyboardInterrupt that carries what was decided).
    """
    options = Options(level=level, min_gain=min_gain, budget=budget, precision=precision)
    return run(from_example(model, example_inputs), options, out=Path(out) if out else None, resume=resume)


def run(
    workload: Workload,
    options: Options | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
) -> OptimizeResult:
    """Run the ladder on a workload; see `optimize`."""
    if out is not None:
        files.prepare_folder(out)
    engine = Engine(workload, options or Options(), out, progress or _Silent(), command)
    if resume:
        engine.resume()
    try:
        engine.run()
    except KeyboardInterrupt:
        raise OptimizeInterrupted(engine.record, engine.plan, out) from None
    return OptimizeResult(engine.current, engine.plan, Report(engine.record), engine.record, out)
