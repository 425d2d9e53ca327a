"""Bootstrap statistics of times that were taken in rounds or alone, and the rule that keeps a step.

"Mean of ten, keep if better" accepts noise: 46 % of null changes at 5 % noise (simulated in tests/unit/test_timing.py).
The rule here is: keep only if the lower end of the 95 % interval of the speed-up is above 1 + min_gain. Speed-ups of
the paired timer and of processes are in `speedup`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavecrest.errors import InvalidArgument

BOOTSTRAP_ROUNDS = 2000
# lower and upper quantile of the bootstrap rounds: a 95 % interval
QUANTILES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


def trimmed_spread(samples: Sequence[float]) -> float:
    """std / mean after dropping the smallest and the largest 5 % of the samples."""
    if len(samples) < 3:
        return 0.0
    ordered = sorted(samples)
    cut = int(len(ordered) * 0.05)
    kept = ordered[cut : len(ordered) - cut]
    mean = statistics.fmean(kept)
    return statistics.stdev(kept) / mean if mean > 0 and len(kept) > 1 else 0.0


def bootstrap_median(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """95 % percentile bootstrap interval of the median."""
    values = as_times(samples)
    picks = np.random.default_rng(seed).integers(0, values.size, (BOOTSTRAP_ROUNDS, values.size))
    low, high = np.quantile(_medians(values, picks), QUANTILES)
    return Interval(float(low), float(high))


def _medians(values: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """The median of the values that each row picks; as np.median's, which partitions rows several times as slowly."""
    rows = values[picks]
    rows.sort(axis=1)
    count = rows.shape[1]
    medians: np.ndarray = (rows[:, (count - 1) // 2] + rows[:, count // 2]) / 2
    return medians


def keeps(ci: Interval, min_gain: float) -> bool:
    """The keep rule: the lower end of the speed-up's interval is above 1 + min_gain (0.02 is two percent)."""
    return ci.low > 1 + min_gain


def bootstrap_unpaired(base: Sequence[float], new: Sequence[float], *, seed: int = 0) -> tuple[float, Interval]:
    """Speed-up and its 95 % interval from two independent runs: median(base) / median(new), each side resampled alone.

    The interval covers the noise inside both runs, not what differs between them (another process, machine or clock).
    """
    a, b = as_times(base), as_times(new)
    rng = np.random.default_rng(seed)
    rounds = _medians(a, rng.integers(0, a.size, (BOOTSTRAP_ROUNDS, a.size)))
    rounds /= _medians(b, rng.integers(0, b.size, (BOOTSTRAP_ROUNDS, b.size)))
    low, high = np.quantile(rounds, QUANTILES)
    return float(np.median(a) / np.median(b)), Interval(float(low), float(high))


def as_times(samples: Sequence[float]) -> np.ndarray:
    """Times as an array.

    Raises:
        InvalidArgument: there is no time, or one that is not finite or not above zero.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not (values > 0).all() or not np.isfinite(values).all():
        raise InvalidArgument("statistics need at least one time, and every time finite and above zero")
    return values


def bootstrap_speedup(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0
) -> tuple[float, Interval]:
    """Speed-up and its 95 % interval over one or more buckets.

    Args:
        pairs: per bucket, (base, candidate) times by round; element i of both comes from the same round. A bucket's
            speed-up is the ratio of medians; several buckets combine as a geometric mean.

    Returns:
        (speed-up, interval); rounds are resampled together, so what hit both sides of a round stays paired.
    """
    if not pairs or any(len(base) != len(new) or not base for base, new in pairs):
        raise InvalidArgument("bootstrap_speedup needs pairs of equal, non-zero length")
    rng = np.random.default_rng(seed)
    log_rounds = np.zeros(BOOTSTRAP_ROUNDS)
    log_point = 0.0
    for base, new in pairs:
        a, b = as_times(base), as_times(new)
        picks = rng.integers(0, a.size, (BOOTSTRAP_ROUNDS, a.size))
        log_rounds += np.log(_medians(a, picks) / _medians(b, picks))
        log_point += math.log(float(np.median(a)) / float(np.median(b)))
    low, high = np.quantile(log_rounds / len(pairs), QUANTILES)
    return math.exp(log_point / len(pairs)), Interval(math.exp(float(low)), math.exp(float(high)))
