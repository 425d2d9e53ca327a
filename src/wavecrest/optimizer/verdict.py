"""From measured pairs to a verdict, and to what records store of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wavecrest import records
from wavecrest.measure import timing
from wavecrest.records import BucketSpeed, QualityResult

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload


def judge(pairs: dict[str, timing.Paired], min_gain: float) -> tuple[records.Verdict, str, float, timing.Interval]:
    """The verdict of a measured step: kept, reverted or tie, with its reason, the joint speed-up and its interval.

    Kept only if the lower end of the joint interval (geometric mean over buckets) is above 1 + min_gain and no bucket
    is proven slower; a tie keeps the simpler model.
    """
    ratio, ci = timing.block_speedup([(pair.base, pair.new) for pair in pairs.values()])
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


@dataclass(frozen=True, slots=True)
class Claim:
    """The speed-up to report of a final comparison: per bucket, and over all buckets."""

    speed: list[BucketSpeed]
    ratio: float
    ci: timing.Interval


def claim(pairs: dict[str, timing.Paired], alone: dict[str, timing.Measurement]) -> Claim:
    """The speed-up against the faster of two measurements of the original.

    A process that has compiled and captured, and a host whose cores other tenants share, slow a host-bound eager model
    down and leave a captured one alone: an original that took 11.9 ms by itself took 23.2 ms interleaved with the
    result (one H200 host; evidence/nvidia-h200/2026-11-20_optimize_llama_prefill.jsonl.gz). So where the original was
    faster when it was measured alone, before anything was compiled, that is what the result is compared with.

    Args:
        pairs: original against result, interleaved.
        alone: the original by itself, at the start.
    """
    rows = speeds(pairs)
    replaced = False
    for index, row in enumerate(rows):
        first = alone.get(row.bucket)
        if first is None:
            continue
        ratio, ci = timing.bootstrap_unpaired(first.samples, pairs[row.bucket].new)
        if ratio < row.ratio:
            replaced = True
            note = f"original measured alone at the start; interleaved with the result it took {row.base_ms:.3f} ms"
            rows[index] = row.model_copy(update={"base_ms": first.median, "ratio": ratio, "ci": ci, "note": note})
    if not replaced:
        ratio, ci = timing.block_speedup([(pair.base, pair.new) for pair in pairs.values()])
        return Claim(rows, ratio, ci)

    def mean(values: list[float]) -> float:
        return math.exp(sum(math.log(value) for value in values) / len(values))

    # the ends of all intervals together: wider than a joint bootstrap would be, and right for any dependence
    joint = timing.Interval(mean([row.ci.low for row in rows]), mean([row.ci.high for row in rows]))
    return Claim(rows, mean([row.ratio for row in rows]), joint)


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
