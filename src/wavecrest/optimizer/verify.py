"""A plan checked again in fresh processes: numerics, the workload's own quality check, and speed.

Fresh processes matter: on some ROCm versions about one process in five replays a captured graph wrongly
(ROCm/clr#279), which no check in the process that made the plan can see. Original and result each run alone in
processes that alternate, by the same code as the final measurement of a run (`alternate`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from wavecrest import hardware
from wavecrest.measure import timing, workload
from wavecrest.measure.speedup import TAIL
from wavecrest.optimizer.alternate import Claim, alternate, medians
from wavecrest.optimizer.children import Job, Jobs, SideReport, Starter, Task, memory_of, run_pairs
from wavecrest.optimizer.gate import failures
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.replay import check_plan
from wavecrest.records import ProcessSpeed, VerifyProcess, VerifyRecord, provenance

# a model is not proven faster than itself by more than this
MOST_LUCK = 0.05


def run(
    spec: str,
    plan_path: Path,
    *,
    processes: int = 3,
    looks: Mapping[int, float] | None = None,
    min_gain: float = 0.0,
    seconds: float = 5.0,
    device: str | None = None,
    on_process: Callable[[int, int], None] | None = None,
    command: str | None = None,
) -> VerifyRecord:
    """Apply the plan in fresh processes, and compare their speed with that of the original in others.

    Args:
        spec: the workload, as `wavecrest.measure.workload.load` takes it.
        plan_path: the plan file.
        processes: how many fresh processes a side; with `looks` the most.
        looks: as `alternate` takes them; None looks once, after all processes.
        min_gain: the gain to decide on (0.02: two percent).
        seconds: sampling time a bucket and process.
        device: torch device name; None takes the workload's own.
        on_process: is told (number of the process, processes) before each pair.
        command: the command line, for the record.

    Raises:
        PlanError, PlanMismatch, WorkloadError: the plan or the workload cannot be used here, or processes loaded
            different workloads.
        StepRefused: in a process the optimized model broke a rule of the gate that has no error to show.
        EnvironmentProblem: a process died.
    """
    plan = Plan.load(plan_path)
    loaded = workload.load(spec, device=device)
    found = hardware.detect(loaded.device)
    plan.match(loaded, found)
    # before any process is started
    check_plan(plan.kept(), plan.dispatch)
    variables: dict[str, str | None] = {row.name: row.value for row in plan.environment}
    reports: list[SideReport] = []

    def some(first: int, count: int) -> list[dict[timing.Side, SideReport]]:
        found = []
        for index in range(first, first + count):
            if on_process is not None:
                on_process(index, processes)
            original = Job(Task(spec, loaded.device, seconds), {}, f"process {index} of the original")
            result = Job(Task(spec, loaded.device, seconds, str(copy), check=True), variables, f"process {index}")
            pair: Jobs = {"base": original, "new": result}
            found += run_pairs([pair], index, memory=2 * memory_of(loaded), starter=starter)
        reports.extend(pair["new"] for pair in found)
        return found

    compiles = any(step_id.startswith("compile") for step_id in plan.stack)
    with tempfile.TemporaryDirectory() as folder, Starter(loaded.model, loaded.device, compiles=compiles) as starter:
        # what is at the path may be written anew meanwhile
        copy = Path(folder) / "plan.json"
        plan.save(copy)
        claim = alternate(
            some, unit="processes", looks=looks or {processes: TAIL}, min_gain=min_gain, seconds_left=lambda: math.inf
        )
    results = [_process(index, claim, report) for index, report in enumerate(reports)]
    passed, reason = verdict_of(results, claim, plan)
    return VerifyRecord(
        header=provenance.header(found, command=command),
        workload=loaded.name,
        plan=str(plan_path),
        processes=results,
        ratio=claim.ratio,
        ci=claim.ci,
        drift=claim.drift,
        passed=passed,
        reason=reason,
    )


def _process(index: int, claim: Claim, report: SideReport) -> VerifyProcess:
    """The record of a pair of processes."""
    before, after = medians(claim.base[index]), medians(claim.new[index])
    return VerifyProcess(
        process=index,
        numerics=report.numerics,
        quality=report.quality,
        speed=[
            ProcessSpeed(
                bucket=bucket,
                base_ms=before[bucket],
                new_ms=after[bucket],
                ratio=before[bucket] / after[bucket],
                clock=report.clock,
            )
            for bucket in before
        ],
        warnings=report.warnings,
    )


def verdict_of(results: list[VerifyProcess], claim: Claim, plan: Plan) -> tuple[bool, str]:
    """Whether a plan passes, and the reason.

    It fails if any process gives wrong answers or fails the workload's quality check, or if the optimized model is
    proven slower. A plan without steps is the original model: its speed is not judged, but where it is proven faster,
    which no model is than itself.

    Args:
        results: one a process of the optimized model.
        claim: original against optimized. A single pair has no interval, so its speed is not judged.
        plan: what was verified.
    """
    wrong = [(result.process, failures(result.numerics)) for result in results if failures(result.numerics)]
    if wrong:
        process, problem = wrong[0]
        return False, f"{len(wrong)} of {len(results)} processes give wrong answers; process {process}: {problem}"
    bad = [(result.process, row) for result in results for row in result.quality if not row.passed]
    if bad:
        process, row = bad[0]
        return False, f"process {process}: {row.name} is {row.value:g}, limit {row.limit:g}"
    same = not plan.stack and not plan.environment
    if same and claim.ci is not None and claim.ci.low > 1 + MOST_LUCK:
        return False, (
            f"the plan has no steps, and yet: {claim.describe()}; the workload runs otherwise in processes that have a "
            "plan, so nothing measured on it is a gain"
        )
    if plan.stack and claim.ci is not None and claim.ci.high < 1:
        return False, f"the optimized model is slower than the original: {claim.describe()}"
    count = len(results)
    return True, f"numerics hold in {count} process{'es' if count > 1 else ''}; {claim.describe()}"
