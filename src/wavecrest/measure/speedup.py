"""Speed-ups and their 95 % intervals: from blocks timed in random order, and from pairs of processes.

- **Blocks.** Each block of the paired timer draws at random which side is the outer one. If both sides are the same
  work, exchanging them changes the sign of the block's log ratio and nothing else, so the signs are tosses of a coin,
  whatever the noise: drift, bursts and periodic disturbances included. The interval is that of Wilcoxon's signed-rank
  test, which needs no more than this. A bootstrap of medians needs independent blocks.
- **Processes.** Memory layout differs from process to process and is fixed within one, so a process is one sample,
  however often it was timed. Pairs are few: Student's t. A percentile bootstrap of three processes calls 5 % of null
  changes faster where it says 2.5 %.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from wavecrest.errors import InvalidArgument
from wavecrest.measure.bootstrap import Interval, as_times

# probability beyond each end of a 95 % interval
TAIL = 0.025
# the fewest blocks whose signs can give a 95 % interval: 2^-6 is below 2.5 %
LEAST_BLOCKS = 6
# up to this many blocks the distribution of the signed-rank statistic is counted out, beyond it is normal
COUNTED_BLOCKS = 50


def block_speedup(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, Interval]:
    """Speed-up and its 95 % interval over one or more buckets, from blocks in random order.

    Args:
        pairs: per bucket, (base, candidate) times by block; element i of both comes from the same block.

    Returns:
        (speed-up, interval). A bucket's speed-up is the Hodges-Lehmann estimate of its blocks' ratios; several buckets
        combine as a geometric mean, and the ends of their intervals by the squares of their distances.

    Raises:
        InvalidArgument: there is no bucket, its sides differ in length, it has fewer than LEAST_BLOCKS blocks, or a
            time is not finite or not above zero.
    """
    if not pairs or any(len(base) != len(new) for base, new in pairs):
        raise InvalidArgument("block_speedup needs pairs of equal, non-zero length")
    found = [_signed_rank(np.log(as_times(base)) - np.log(as_times(new))) for base, new in pairs]
    return _joint(found)


def process_speedup(
    buckets: Sequence[tuple[Sequence[float], Sequence[float]]], *, tail: float = TAIL
) -> tuple[float, Interval]:
    """Speed-up and its interval where each side ran in several processes.

    Args:
        buckets: per bucket, (time of each process of the base, of the candidate), in ms; element i of both is one pair
            of processes that ran one after the other.
        tail: probability beyond each end of the interval.

    Returns:
        (speed-up, interval): geometric means over pairs and buckets.

    Raises:
        InvalidArgument: fewer than two pairs, sides of unequal length, or an impossible time.
    """
    pairs = len(buckets[0][0]) if buckets else 0
    if pairs < 2 or any(len(base) != pairs or len(new) != pairs for base, new in buckets):
        raise InvalidArgument("process_speedup needs at least two processes a side, as many on each")
    logs = np.mean([np.log(as_times(base)) - np.log(as_times(new)) for base, new in buckets], axis=0)
    center = float(logs.mean())
    reach = student_quantile(1 - tail, pairs - 1) * float(logs.std(ddof=1)) / math.sqrt(pairs)
    return math.exp(center), Interval(math.exp(center - reach), math.exp(center + reach))


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom stays below with `probability` (above one half)."""
    # with t = √freedom · tan(angle) the density is that of cos(angle)^(freedom - 1), which has no tails to cut off
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    weights = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((weights[1:] + weights[:-1]) / 2)])
    angle = float(np.interp(2 * probability - 1, below / below[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def _signed_rank(logs: np.ndarray) -> tuple[float, float, float]:
    """(estimate, low, high) of the centre of log ratios: the median and two order statistics of their Walsh averages.

    Raises:
        InvalidArgument: fewer than LEAST_BLOCKS.
    """
    count = logs.size
    if count < LEAST_BLOCKS:
        raise InvalidArgument(f"{count} blocks give no 95 % interval; it takes at least {LEAST_BLOCKS}")
    first, second = np.triu_indices(count)
    averages = (logs[first] + logs[second]) / 2
    cut, half = _rank_cut(count), averages.size // 2
    averages.partition((cut, (averages.size - 1) // 2, half, averages.size - 1 - cut))
    median = (averages[(averages.size - 1) // 2] + averages[half]) / 2
    return float(median), float(averages[cut]), float(averages[averages.size - 1 - cut])


@functools.cache
def _rank_cut(count: int) -> int:
    """How many Walsh averages lie beyond each end of the interval of `count` blocks."""
    if count > COUNTED_BLOCKS:
        mean, variance = count * (count + 1) / 4, count * (count + 1) * (2 * count + 1) / 24
        return math.floor(mean + statistics.NormalDist().inv_cdf(TAIL) * math.sqrt(variance) - 0.5)
    # probabilities of the sums of a random subset of the ranks
    chances = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(chances.size + rank)
        longer[: chances.size] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    # the largest sum that is not exceeded with a probability of at most TAIL
    return int(np.searchsorted(np.cumsum(chances), TAIL, side="right")) - 1


def _joint(found: Sequence[tuple[float, float, float]]) -> tuple[float, Interval]:
    """The mean of several (estimate, low, high) of logs, as a ratio."""
    count = len(found)
    center = sum(estimate for estimate, _, _ in found) / count
    below = math.sqrt(sum((estimate - low) ** 2 for estimate, low, _ in found)) / count
    above = math.sqrt(sum((high - estimate) ** 2 for estimate, _, high in found)) / count
    return math.exp(center), Interval(math.exp(center - below), math.exp(center + above))
