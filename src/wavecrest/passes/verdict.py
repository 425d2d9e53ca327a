"""From measured pairs to a verdict, and to what records store of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavecrest import records, timing
from wavecrest.records import BucketSpeed, QualityResult

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.workload import Workload


def judge(pairs: dict[str, timing.Paired], min_gain: float) -> tuple[records.Verdict, str, float, timing.Interval]:
    """The verdict of a measured step: kept, reverted or tie, with its reason, the joint speed-up and its interval.

    Kept only if the lower end of the joint interval (geometric mean over buckets) is above 1 + min_gain and no bucket
    is proven slower; a tie keeps the simpler model.
    """
    ratio, ci = timing.bootstrap_speedup([(pair.base, pair.new) for pair in pairs.values()])
    slower = [f"{bucket} {pair.ratio:.3f}× {pair.ci}" for bucket, pair in pairs.items() if pair.ci.high < 1]
    if timing.keeps(ci, min_gain) and not slower:
        return "kept", f"faster by at least {min_gain:.0%} (95 %)", ratio, ci
    if ci.high < 1:
        return "reverted", "slower", ratio, ci
    if slower:
        return "reverted", f"slower on a bucket: {', '.join(slower)}", ratio, ci
    return "tie", f"no gain of at least {min_gain:.0%} is proven; the simpler model stays", ratio, ci


def speeds(pairs: dict[str, timing.Paired]) -> list[BucketSpeed]:
    """The pairs as they are stored in records."""
    return [
        BucketSpeed(
            bucket=bucket,
            base_ms=pair.base_ms,
            new_ms=pair.new_ms,
            ratio=pair.ratio,
            ci=pair.ci,
            blocks=pair.n,
            clock=pair.clock,
        )
        for bucket, pair in pairs.items()
    ]


def check_quality(workload: Workload, model: nn.Module) -> list[QualityResult]:
    """The workload's own end-to-end check of a model against the original, if it has one."""
    import torch

    if workload.quality is None:
        return []
    with torch.no_grad():
        rows = workload.quality(workload.model, model)
    return [
        QualityResult(name=row.name, value=row.value, limit=row.limit, passed=row.passed, detail=row.detail)
        for row in rows
    ]
