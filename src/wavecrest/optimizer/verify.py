"""A plan checked again in fresh processes: numerics, the workload's own quality check, and speed.

Fresh processes matter: on some ROCm versions about one process in five replays a captured graph wrongly
(ROCm/clr#279), which no check in the process that made the plan can see.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from wavecrest import env, hardware
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import timing, workload
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.replay import replay
from wavecrest.optimizer.steps.precision import gate_dtype
from wavecrest.optimizer.verdict import check_quality, claim
from wavecrest.records import VerifyProcess, VerifyRecord, provenance

CHILD_TIMEOUT = 1800.0


def run(
    spec: str,
    plan_path: Path,
    *,
    processes: int = 3,
    seconds: float = 5.0,
    device: str | None = None,
    on_process: Callable[[int, int], None] | None = None,
    command: str | None = None,
) -> VerifyRecord:
    """Apply the plan in fresh processes and compare with the original in each.

    Args:
        spec: the workload, as `wavecrest.measure.workload.load` takes it.
        plan_path: the plan file.
        processes: how many fresh processes.
        seconds: sampling time a bucket and process.
        device: torch device name; None takes the workload's own.
        on_process: is told (number of the process, processes) before each.
        command: the command line, for the record.

    Raises:
        PlanError, PlanMismatch, WorkloadError: the plan or the workload cannot be used here.
        EnvironmentProblem: a process died.
    """
    plan = Plan.load(plan_path)
    loaded = workload.load(spec, device=device)
    found = hardware.detect(loaded.device)
    plan.match(loaded, found)
    results = []
    for index in range(processes):
        if on_process is not None:
            on_process(index, processes)
        results.append(_child(spec, plan_path, loaded.device, seconds, index, plan))
    # the processes are the unit of the interval; medians of their blocks stand for them
    buckets = [
        (
            [row.base_ms for result in results for row in result.speed if row.bucket == bucket],
            [row.new_ms for result in results for row in result.speed if row.bucket == bucket],
        )
        for bucket in loaded.buckets
    ]
    ratio, ci = timing.process_speedup(buckets)
    passed, reason = verdict_of(results, ratio, ci, plan)
    return VerifyRecord(
        header=provenance.header(found, command=command),
        workload=loaded.name,
        plan=str(plan_path),
        processes=results,
        ratio=ratio,
        ci=ci,
        passed=passed,
        reason=reason,
    )


def verdict_of(results: list[VerifyProcess], ratio: float, ci: timing.Interval, plan: Plan) -> tuple[bool, str]:
    """Whether a plan passes, and the reason.

    It fails if any process gives wrong answers or fails the workload's quality check, or if the optimized model is
    proven slower. A plan without steps is the original model, so its speed is not judged.

    Args:
        results: one a process.
        ratio: speed-up over all processes and buckets.
        ci: its interval.
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
    if plan.stack and ci.high < 1:
        return False, f"the optimized model is slower than the original: {ratio:.3f}× {ci}"
    return True, f"numerics hold in {len(results)} processes; {ratio:.3f}× {ci}"


def _child(spec: str, plan_path: Path, device: str, seconds: float, index: int, plan: Plan) -> VerifyProcess:
    changes = {row.name: row.value for row in plan.environment}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "process.json"
        command = [
            sys.executable, "-m", "wavecrest.optimizer.verify",
            json.dumps([spec, str(plan_path), device, seconds, index, str(target)]),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=env.python_child(changes), capture_output=True, text=True, timeout=CHILD_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"process {index} took more than {CHILD_TIMEOUT:.0f} s") from None
        if done.returncode != 0 or not target.exists():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise EnvironmentProblem(f"process {index} failed: {last}")
        return VerifyProcess.model_validate_json(target.read_text())


def check_here(
    spec: str, plan_path: Path, device: str, seconds: float, index: int, *, now: timing.Clock = timing.HOST_CLOCK
) -> VerifyProcess:
    """Check a plan in this process: load, replay the plan, gate, quality, paired timing. Run in a fresh process.

    Args:
        spec: the workload.
        plan_path: the plan.
        device: torch device name.
        seconds: sampling time a bucket, for the original alone and again for the pair.
        index: number of this process.
        now: where time comes from.

    Raises:
        PlanError, PlanMismatch, WorkloadError: the plan or the workload cannot be used here.
    """
    plan = Plan.load(plan_path)
    loaded = workload.load(spec, device=device)
    differences = plan.match(loaded, hardware.detect(loaded.device))
    # before anything is compiled in this process
    alone = {
        bucket: timing.measure(workload.Call(loaded, bucket), device=loaded.device, seconds=seconds, now=now)
        for bucket in loaded.buckets
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        made = replay(plan.kept(), loaded, verify=bool(differences), because=differences, strict=False)
        texts = [str(row.message) for row in caught if row.category.__module__.startswith("wavecrest")]
    gate = Gate.prepare(loaded, dtype=gate_dtype(plan.stack))
    numerics = gate.check(made.model)
    quality = check_quality(loaded, made.model)
    pairs = {
        bucket: timing.measure_pair(
            workload.Call(loaded, bucket, loaded.model),
            workload.Call(loaded, bucket, made.model),
            device=loaded.device,
            seconds=seconds,
            now=now,
        )
        for bucket in loaded.buckets
    }
    return VerifyProcess(
        process=index, numerics=numerics, quality=quality, speed=claim(pairs, alone).speed, warnings=texts
    )


if __name__ == "__main__":
    _spec, _plan, _device, _seconds, _index, _target = json.loads(sys.argv[1])
    Path(_target).write_text(check_here(_spec, Path(_plan), _device, _seconds, _index).model_dump_json())
