"""From measured pairs to a verdict, and to what records store of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import torch

from wavecrest import records
from wavecrest.measure import timing
from wavecrest.records import BucketSpeed, QualityResult

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.alternate import Claim
    from wavecrest.records import OptimizeRecord

# how the reason of a tie begins that a quieter measurement might turn into a verdict
UNDECIDED = "undecided"
# share that the original may change by from its first to its last measurement before an undecided result says so
DRIFTED = 0.05
QUIETER = "run again on a quieter machine, or with more --budget"


def judge(
    pairs: dict[str, timing.Paired], min_gain: float, resolution: float = 0.0
) -> tuple[records.Verdict, str, float, timing.Interval]:
    """The verdict of a measured step: kept, reverted or tie, with its reason, the joint speed-up and its interval.

    Kept only if the lower end of the joint interval (geometric mean over buckets) is above 1 + min_gain, the speed-up
    is one that this machine resolves, and no bucket is proven slower; a tie keeps the simpler model.

    Args:
        pairs: by bucket.
        min_gain: the gain to prove (0.02: two percent).
        resolution: the share below which the model before the step differs from itself here.
    """
    ratio, ci = timing.block_speedup([(pair.base, pair.new) for pair in pairs.values()])
    slower = [
        f"{bucket} {pair.ratio:.3f}× {pair.ci}"
        for bucket, pair in pairs.items()
        if pair.ci.high < 1 and pair.ratio * (1 + resolution) < 1
    ]
    open_end = timing.keeps(timing.Interval(ci.high, ci.high), min_gain)
    if 1 / (1 + resolution) < ratio < 1 + resolution and not slower:
        reason = f"no difference that is resolved here (the model before it against itself: {resolution:.1%})"
        return "tie", f"{UNDECIDED}: {reason}" if open_end else reason, ratio, ci
    if timing.keeps(ci, min_gain) and not slower:
        return "kept", f"faster by at least {min_gain:.0%} (95 %)", ratio, ci
    if ci.high < 1:
        return "reverted", "slower", ratio, ci
    if slower:
        return "reverted", f"slower on a bucket: {', '.join(slower)}", ratio, ci
    if open_end:
        reason = f"{UNDECIDED}: the interval holds a gain of {min_gain:.0%}; the simpler model stays"
        return "tie", reason, ratio, ci
    return "tie", f"no gain of {min_gain:.0%}; the simpler model stays", ratio, ci


def is_hidden_by_resolution(pairs: dict[str, timing.Paired], min_gain: float, resolution: float) -> bool:
    """True where the intervals decide and `resolution` alone makes a tie of it: worth measuring it again."""
    return judge(pairs, min_gain)[0] != "tie" and judge(pairs, min_gain, resolution)[0] == "tie"


def speeds(pairs: dict[str, timing.Paired]) -> list[BucketSpeed]:
    """The pairs as they are stored in records."""
    return [BucketSpeed.of(bucket, pair) for bucket, pair in pairs.items()]


def result_verdict(claim: Claim, min_gain: float) -> tuple[Literal["faster", "slower", "undecided"], str]:
    """The verdict of original against result, and the reason.

    Faster only if the lower end of the interval is above 1 + min_gain; slower if the whole interval is below 1.
    """
    found = claim.describe()
    if claim.ci is None:
        return "undecided", f"{found}; take at least two"
    if timing.keeps(claim.ci, min_gain):
        return "faster", found
    if claim.ci.high < 1:
        return "slower", found
    if claim.ci.high < 1 + min_gain:
        return "undecided", (
            f"{found}: less than the {min_gain:.0%} that were to be proven. Each step was proven by itself and stays "
            "in the plan; leave steps out with --skip where a simpler model is worth more"
        )
    busy = "" if abs(claim.drift) < DRIFTED else f", and the original itself changed by {claim.drift:+.0%} meanwhile"
    return "undecided", (
        f"{found}: the {claim.unit} differ by more than the gain{busy}. Each step was proven by itself and stays in "
        "the plan; run `wavecrest verify` when the machine is quiet, or give more --budget"
    )


def no_gain_verdict(record: OptimizeRecord, out_of_budget: str) -> tuple[Literal["already optimal", "undecided"], str]:
    """The verdict of a run that kept nothing, and the reason.

    Optimal only if every step that applies was tried, on stable times, with an interval that excludes the gain.

    Args:
        record: the run.
        out_of_budget: how the reason of a step begins that had no time left.
    """
    unstable = [row.bucket for row in record.baseline if row.measurement.unstable]
    noisy = f"the original's own times are unstable ({', '.join(unstable)})" if unstable else ""
    last = {row.id: row for row in record.steps}
    tried = [row for row in last.values() if row.verdict != "skipped"]
    late = [row.title for row in last.values() if row.verdict == "skipped" and row.reason.startswith(out_of_budget)]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        reason = f"no time was left for {', '.join(late[:3])}{more}"
        return "undecided", f"{reason}, and {noisy}; {QUIETER}" if noisy else f"{reason}; give more --budget"
    if (compiled := last.get("compile:default")) is not None and compiled.verdict == "refused":
        return "undecided", f"torch.compile is refused here: {compiled.reason}"
    refused = [row.reason for row in tried if row.verdict == "refused"]
    if refused and len(refused) == len(tried):
        reason, count = Counter(refused).most_common(1)[0]
        why = reason if count == len(refused) else f"{count} of them because {reason}"
        return "undecided", f"every step was refused ({len(refused)}): {why}"
    if noisy:
        return "undecided", f"{noisy}; {QUIETER}"
    open_ones = [row.title for row in tried if row.verdict == "tie" and row.reason.startswith(UNDECIDED)]
    if open_ones:
        return "undecided", f"too noisy to decide on {', '.join(open_ones)}; {QUIETER}"
    floor = max(record.resolution.values(), default=0.0)
    if tried and floor > record.min_gain:
        return "undecided", f"differences below {floor:.1%} are not resolved here; {QUIETER}"
    if not tried:
        return "already optimal", "no step applies to this model here"
    more = f"; {len(refused)} refused, the table says why" if refused else ""
    return "already optimal", f"{len(tried)} steps tried, none with a proven gain of {record.min_gain:.0%}{more}"


def check_quality(workload: Workload, model: nn.Module) -> list[QualityResult]:
    """The workload's own end-to-end check of a model against the original, if it has one."""
    if workload.quality is None:
        return []
    with torch.no_grad():
        rows = workload.quality(workload.model, model)
    return [
        QualityResult(name=row.name, value=row.value, limit=row.limit, passed=row.passed, detail=row.detail)
        for row in rows
    ]
