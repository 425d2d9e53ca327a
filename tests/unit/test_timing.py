"""The statistics rule on simulated clocks, and the timer itself."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.clock import SimulatedClock
from wavecrest.errors import InvalidArgument
from wavecrest.measure import bootstrap, interleaved, speedup, timing


class Machine(SimulatedClock):
    """Two works, `base` and `new`, whose calls take `ms` with noise and drift; `new` is `gain` times as fast."""

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.0,
        gain: float = 1.0,
        drift: float = 0.0,
        ms: float = 50.0,
        first: float = 0.0,
    ) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.noise, self.gain, self.drift, self.ms, self.first = noise, gain, drift, ms, first
        self.calls: list[str] = []

    def base(self) -> None:
        self._call("base", self.ms)

    def new(self) -> None:
        self._call("new", self.ms / self.gain)

    def _call(self, name: str, ms: float) -> None:
        ms *= (1 + self.drift * self.seconds) * max(0.05, 1 + self.random.normal(0, self.noise))
        if not self.calls:
            ms += self.first
        self.calls.append(name)
        self.advance(ms / 1e3)

    def measure(self, **options: Any) -> timing.Measurement:
        return timing.measure(self.base, device="cpu", now=self, **options)

    def pair(self, *, seconds: float = 10.0, seed: int = 0, **options: Any) -> timing.Paired:
        return timing.measure_pair(self.base, self.new, device="cpu", seconds=seconds, seed=seed, now=self, **options)


@pytest.mark.parametrize("seconds", [1.0, 10.0], ids=["fewest-blocks", "many-blocks"])
def test_null_changes_are_not_kept(seconds: float) -> None:
    intervals = [Machine(seed, noise=0.05).pair(seconds=seconds, seed=seed).ci for seed in range(300)]
    assert sum(timing.keeps(ci, 0.0) for ci in intervals) <= 0.05 * len(intervals)
    assert sum(timing.keeps(ci, 0.02) for ci in intervals) <= 0.005 * len(intervals)
    # the other way round too: null changes are not called slower either
    assert sum(ci.high < 1 for ci in intervals) <= 0.05 * len(intervals)
    # and the intervals are no wider than they need be: most of them hold 1 closely
    assert np.median([ci.high - ci.low for ci in intervals]) < 0.10


@pytest.mark.parametrize("seconds", [1.0, 10.0], ids=["fewest-blocks", "many-blocks"])
def test_real_gains_are_kept(seconds: float) -> None:
    pairs = [Machine(seed, noise=0.05, gain=1.10).pair(seconds=seconds, seed=seed) for seed in range(100)]
    assert sum(timing.keeps(pair.ci, 0.02) for pair in pairs) >= 95
    assert np.median([pair.ratio for pair in pairs]) == pytest.approx(1.10, abs=0.01)


def test_real_losses_are_never_kept() -> None:
    pairs = [Machine(seed, noise=0.05, gain=0.95).pair(seconds=2.0, seed=seed) for seed in range(50)]
    assert not any(timing.keeps(pair.ci, 0.0) for pair in pairs)


@pytest.mark.parametrize("drift", [0.05, -0.05, 0.2], ids=["slower", "faster", "much-slower"])
def test_drift_of_both_sides_is_no_gain(drift: float) -> None:
    pairs = [Machine(seed, noise=0.02, drift=drift).pair(seconds=4.0, seed=seed) for seed in range(200)]
    # 2.5 % and three standard errors
    assert sum(timing.keeps(pair.ci, 0.0) for pair in pairs) <= 11
    assert sum(pair.ci.high < 1 for pair in pairs) <= 11
    assert np.median([pair.ratio for pair in pairs]) == pytest.approx(1.0, abs=0.01)


# calls of a block: (is timed, side)
ABBA = [(0, "base"), (1, "base"), (0, "new"), (1, "new"), (1, "new"), (0, "base"), (1, "base")]
BAAB = [(timed, "new" if side == "base" else "base") for timed, side in ABBA]


@pytest.fixture
def unshifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks one right after the other, so that they can be told apart in a list of calls."""
    monkeypatch.setattr(timing, "MOST_SHIFT", 0)


def test_every_timed_run_of_a_side_follows_an_untimed_call_of_that_side(unshifted: None) -> None:
    """The first of a block too; whether base is the outer side is drawn at random, from a seed that is recorded."""
    machine = Machine(ms=50.0)
    pair = machine.pair(seconds=2.0, seed=3)
    blocks = [machine.calls[-7 * pair.n :][start : start + 7] for start in range(0, 7 * pair.n, 7)]
    abba, baab = ([side for _, side in block] for block in (ABBA, BAAB))
    assert all(block in (abba, baab) for block in blocks) and abba in blocks and baab in blocks
    warm = machine.calls[: -7 * pair.n]
    assert warm.count("base") >= 3 and warm.count("new") >= 3
    assert pair.seed == 3
    again, other = Machine(ms=50.0), Machine(ms=50.0)
    assert again.pair(seconds=2.0, seed=3) == pair and again.calls == machine.calls
    other.pair(seconds=2.0, seed=4)
    assert other.calls != machine.calls


def test_seeds_are_drawn_anew() -> None:
    assert len({Machine().pair(seconds=0.1, seed=None).seed for _ in range(4)}) == 4


def test_progress_is_told_between_blocks_alone(unshifted: None) -> None:
    machine = Machine(ms=50.0)
    told: list[tuple[int, int]] = []

    def progress(done: int, planned: int) -> None:
        told.append((done, planned))
        machine.calls.append("progress")

    pair = machine.pair(seconds=1.0, on_progress=progress)
    assert told == [(done, 15) for done in range(1, pair.n + 1)]
    blocks = " ".join(machine.calls).split("progress")
    assert all(block.split() in ([side for _, side in ABBA], [side for _, side in BAAB]) for block in blocks[1:-1])


def test_slow_work_has_fewer_blocks_rather_than_no_end() -> None:
    machine = Machine(ms=1000.0)
    assert machine.pair(seconds=1.0).n == timing.LEAST_BLOCKS
    # two warm-ups of three calls, and the blocks; the first finds out that the calls are long
    assert len(machine.calls) <= 6 + 4 * timing.LEAST_BLOCKS + 4
    assert Machine(ms=50.0).pair(seconds=4.0).n >= timing.MIN_SAMPLES // 2


def test_long_calls_are_all_timed() -> None:
    machine = Machine(ms=2 * timing.SETTLED_MS)
    pair = machine.pair(seconds=0.1)
    calls = machine.calls[-4 * (pair.n - 1) :]
    blocks = [calls[start : start + 4] for start in range(0, len(calls), 4)]
    assert all(block in (["base", "new", "new", "base"], ["new", "base", "base", "new"]) for block in blocks)


def test_up_to_two_untimed_calls_of_the_outer_side_shift_a_block() -> None:
    """At random, so that what disturbs every n-th call meets another place of the next block."""
    machine = Machine(ms=50.0, noise=0.1)
    pair = machine.pair(seconds=40.0, seed=3)
    calls = " ".join(machine.calls[-7 * pair.n :])
    for side in ("base", "new"):
        other = "new" if side == "base" else "base"
        found = {len(run.split()) for run in calls.split(other)[1:-1]}
        # the end of a block has two calls, and the next begins with up to four of the same side
        assert found - {0} <= {2, 3, 4, 5, 6} and {4, 5, 6} <= found


@pytest.mark.parametrize("base_outside", [True, False], ids=["ABBA", "BAAB"])
def test_a_block_is_the_mean_of_its_two_timed_calls_of_a_side(base_outside: bool, unshifted: None) -> None:
    """Calls that are not timed take 99 ms here, and none of that is in a result."""
    clock = SimulatedClock()
    times = iter([99.0, 1.0, 99.0, 10.0, 30.0, 99.0, 3.0])

    def work() -> None:
        clock.advance(next(times) / 1e3)

    pair = timing._Pair(timing.Stopwatch("cpu", now=clock), work, work, None, np.random.default_rng(0))
    outside_inside = pytest.approx((2.0, 20.0) if base_outside else (20.0, 2.0))
    assert pair._block(base_outside, None) == outside_inside


class Pairing(SimulatedClock):
    """Two works of equal length, and what the timer did, with a price on the first call after anything else."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price, self.last, self.ms = price, "", 1.0

    def work(self, name: str) -> Callable[[], None]:
        def call() -> None:
            # what ran before left its own code and data in the caches
            self.advance((self.ms * (1 + self.price) if self.last != name else self.ms) / 1e3)
            self.last = name

        return call

    def progress(self, _done: int, _planned: int) -> None:
        self.last = "progress"


def test_what_ran_before_a_side_costs_neither_side() -> None:
    """A display between blocks, and the other side: the untimed call pays for both."""
    clock = Pairing(price=0.5)
    pair = timing.measure_pair(
        clock.work("base"), clock.work("new"), device="cpu", seconds=0.1, on_progress=clock.progress, now=clock
    )
    assert pair.base == pytest.approx([1.0] * pair.n) and pair.new == pytest.approx([1.0] * pair.n)
    assert pair.ratio == pytest.approx(1.0) and pair.ci.high == pytest.approx(1.0)


def test_the_collector_leaves_older_objects_alone_while_something_is_timed() -> None:
    clock, older = SimulatedClock(), []

    def work() -> None:
        # those that the collector would walk over; counting what it leaves alone takes longer than all else here
        older.append(len(gc.get_objects(generation=2)))
        clock.advance(0.1)

    for measure in (
        lambda: timing.measure(work, device="cpu", seconds=0.1, now=clock),
        lambda: timing.measure_pair(work, work, device="cpu", seconds=0.1, now=clock),
        lambda: interleaved.measure([work], device="cpu", now=clock),
    ):
        older.clear()
        measure()
        assert gc.get_freeze_count() == 0
        assert older and 100 * max(older) < len(gc.get_objects(generation=2))


def test_cold_start_is_kept_apart() -> None:
    measured = Machine(ms=2.0, first=5_000.0).measure()
    assert measured.cold_start == pytest.approx(5_002.0)
    assert max(measured.samples) == pytest.approx(2.0)


def test_slow_work_still_gets_thirty_samples() -> None:
    machine = Machine(noise=0.05, ms=20_000.0)
    assert machine.measure(seconds=1.0).n == timing.MIN_SAMPLES
    # the cold start, two warm-up calls and the one that sets the stride
    assert len(machine.calls) == timing.MIN_SAMPLES + 4


def test_fast_work_is_bounded_and_spread_over_time() -> None:
    machine = Machine(noise=0.3, ms=0.01)
    assert machine.measure(seconds=60.0).n <= timing.MAX_SAMPLES
    assert machine.seconds >= timing.MIN_SECONDS
    assert Machine(noise=0.3, ms=0.01).pair(seconds=60.0).n <= timing.MAX_SAMPLES


def test_sampling_stops_when_the_interval_is_narrow() -> None:
    machine = Machine(noise=0.001, ms=50.0)
    assert machine.measure(seconds=1e6).n == timing.MIN_SAMPLES
    assert machine.seconds < 10


def test_sampling_goes_on_until_the_interval_is_one_percent_either_way() -> None:
    """At 5 % noise thirty samples give twice that."""
    measured = Machine(noise=0.05).measure(seconds=1e6)
    assert measured.n > 2 * timing.MIN_SAMPLES
    assert (measured.ci.high - measured.ci.low) / 2 <= 0.01 * measured.median
    pair = Machine(noise=0.1).pair(seconds=1e6)
    assert pair.n > timing.MIN_SAMPLES and (pair.ci.high - pair.ci.low) / 2 <= 0.01 * pair.ratio


def test_the_interval_is_looked_at_when_the_samples_have_grown_by_half() -> None:
    """Many looks at the same data would favour lucky intervals."""
    clock = SimulatedClock()
    stop = timing._Stop(30, 1e6, clock, clock())
    clock.advance(timing.MIN_SECONDS)
    assert [count for count in range(1, 200) if stop.due(count)] == [30, 45, 68, 102, 153]


def test_sampling_lasts_while_the_interval_is_wide_and_no_longer_than_allowed() -> None:
    machine = Machine(noise=0.3, ms=50.0)
    measured = machine.measure(seconds=6.0)
    assert measured.n > timing.MIN_SAMPLES and 6.0 < machine.seconds < 7.5


def _measurement(samples: list[float]) -> timing.Measurement:
    return timing.Measurement(tuple(samples), tuple(samples), 1.0, "host wall", timing.bootstrap_median(samples))


@pytest.mark.parametrize(
    ("noise", "unstable"), [(0.01, False), (0.05, False), (0.2, True), (0.5, True)], ids=["1%", "5%", "20%", "50%"]
)
def test_unstable_says_so_instead_of_a_number(noise: float, unstable: bool) -> None:
    samples = np.abs(np.random.default_rng(0).normal(10, 10 * noise, 200)).tolist()
    measured = _measurement(samples)
    assert measured.unstable is unstable
    assert measured.describe().startswith("unstable") is unstable
    assert (" ms" in measured.describe()) is not unstable


def test_one_interrupt_does_not_make_a_run_unstable() -> None:
    assert not _measurement([10.0] * 59 + [1_000.0]).unstable
    assert _measurement([10.0] * 30 + [20.0] * 30).unstable


def _paired(base: list[float], new: list[float]) -> timing.Interval:
    return timing.bootstrap_speedup([(base, new)])[1]


def _unpaired(base: list[float], new: list[float]) -> timing.Interval:
    return timing.bootstrap_unpaired(base, new)[1]


def _blocks(base: list[float], new: list[float]) -> timing.Interval:
    return timing.block_speedup([(base, new)])[1]


def _of_processes(base: list[float], new: list[float]) -> timing.Interval:
    return timing.process_speedup([(base, new)])[1]


def _of_the_median(base: list[float], _new: list[float]) -> timing.Interval:
    ci = timing.bootstrap_median(base)
    return timing.Interval(ci.low / 8, ci.high / 8)


@pytest.mark.parametrize(
    ("interval", "n", "least", "most"),
    [
        (_paired, 30, 0.94, 0.98),
        (_unpaired, 30, 0.94, 0.98),
        (_blocks, 6, 0.94, 0.99),
        (_blocks, 15, 0.93, 0.97),
        (_blocks, 60, 0.93, 0.97),
        (_of_processes, 3, 0.93, 0.97),
        (_of_processes, 10, 0.93, 0.97),
        # the median of few samples is covered less often than a ratio of two
        (_of_the_median, 30, 0.92, 0.97),
    ],
    ids=["rounds", "unpaired", "6 blocks", "15 blocks", "60 blocks", "3 processes", "10 processes", "median"],
)
def test_intervals_cover_the_truth_as_often_as_they_say(
    interval: Callable[[list[float], list[float]], timing.Interval], n: int, least: float, most: float
) -> None:
    """95 % of 600 intervals of 95 % must hold the true speed-up; those of 90 % hold it in 90 to 92 %, of 99 % in 99."""
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(600):
        base, new = random.normal(10, 0.5, n).tolist(), random.normal(8, 0.4, n).tolist()
        ci = interval(base, new)
        hits += ci.low <= 10 / 8 <= ci.high
    assert least <= hits / 600 <= most


def test_unpaired_runs_of_the_same_speed_do_not_differ() -> None:
    random = np.random.default_rng(2)
    runs = [
        timing.bootstrap_unpaired(random.normal(10, 0.5, 60).tolist(), random.normal(10, 0.5, 80).tolist())[1]
        for _ in range(300)
    ]
    assert sum(ci.low > 1 or ci.high < 1 for ci in runs) <= 0.10 * len(runs)
    ratio, ci = timing.bootstrap_unpaired([10.0, 10.1, 9.9] * 20, [5.0, 5.1, 4.9] * 30)
    assert ratio == pytest.approx(2.0)
    assert 1.95 < ci.low <= 2.0 <= ci.high < 2.05


@pytest.mark.parametrize("count", [1, 2, 7, 30, 101])
def test_medians_of_rounds_are_numpys(count: int) -> None:
    random = np.random.default_rng(count)
    values, picks = random.lognormal(size=count), random.integers(0, count, (50, count))
    assert np.array_equal(bootstrap._medians(values, picks), np.median(values[picks], axis=1))


def test_blocks_stay_paired_when_resampled() -> None:
    # noise that hits both sides of a block alike cancels, however large
    shared = np.random.default_rng(3).uniform(1, 10, 40)
    for statistic in (timing.bootstrap_speedup, timing.block_speedup):
        ratio, ci = statistic([((shared * 2).tolist(), shared.tolist())])
        assert ratio == pytest.approx(2.0)
        assert ci.low == pytest.approx(2.0) and ci.high == pytest.approx(2.0)


def test_buckets_combine_as_geometric_mean() -> None:
    for statistic in (timing.bootstrap_speedup, timing.block_speedup, timing.process_speedup):
        ratio, ci = statistic([([4.0] * 20, [1.0] * 20), ([1.0] * 20, [1.0] * 20)])
        assert ratio == pytest.approx(2.0)
        assert ci.low == pytest.approx(2.0)


@pytest.mark.parametrize(("statistic", "n"), [(timing.block_speedup, 20), (timing.process_speedup, 4)])
def test_intervals_over_several_buckets_cover_the_truth(statistic: Any, n: int) -> None:
    random = np.random.default_rng(6)
    hits = 0
    for _ in range(600):
        buckets = [(random.normal(10, 0.3, n), random.normal(new, 0.3, n)) for new in (8, 10, 12.5)]
        _, ci = statistic(buckets)
        hits += ci.low <= 1.0 <= ci.high
    # to first order the three gains cancel
    assert 0.92 <= hits / 600 <= 0.98


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.995, 2, 9.925), (0.975, 7, 2.365), (0.99, 30, 2.457)],
)
def test_quantiles_of_student(probability: float, freedom: int, quantile: float) -> None:
    """Values of the printed tables."""
    assert speedup.student_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(("count", "rank"), [(6, 0), (7, 2), (8, 3), (10, 8), (15, 25), (25, 89), (50, 434)])
def test_ranks_of_wilcoxon(count: int, rank: int) -> None:
    """Critical values of the signed-rank test at 2.5 % a side, as printed tables have them."""
    assert speedup._rank_cut(count) == rank


def test_too_few_for_an_interval_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="5 blocks give no 95 % interval; it takes at least 6"):
        timing.block_speedup([([1.0] * 5, [1.0] * 5)])
    with pytest.raises(InvalidArgument, match="at least two processes a side"):
        timing.process_speedup([([1.0], [1.0])])
    assert Machine(ms=50.0).pair(seconds=0.0, min_blocks=2).n == speedup.LEAST_BLOCKS


@pytest.mark.parametrize(
    "samples", [[], [0.0, 1.0], [-1.0], [math.nan], [math.inf]], ids=["none", "zero", "negative", "nan", "inf"]
)
def test_impossible_times_are_refused(samples: list[float]) -> None:
    for call in (
        lambda: timing.bootstrap_median(samples),
        lambda: timing.bootstrap_speedup([(samples, samples)]),
        lambda: timing.block_speedup([(samples * 6, [1.0] * len(samples) * 6)]),
        lambda: timing.process_speedup([(samples * 3, [1.0] * len(samples) * 3)]),
        lambda: timing.bootstrap_unpaired([1.0], samples),
        lambda: timing.bootstrap_unpaired(samples, [1.0]),
    ):
        with pytest.raises(InvalidArgument):
            call()


def test_pairs_of_unequal_length_are_refused() -> None:
    for statistic in (timing.bootstrap_speedup, timing.block_speedup):
        with pytest.raises(InvalidArgument, match="equal"):
            statistic([([1.0, 2.0], [1.0])])
    with pytest.raises(InvalidArgument, match="as many on each"):
        timing.process_speedup([([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])])


def test_the_real_clock_measures_real_work() -> None:
    """A sleep may last longer than asked, by the machine's load; it never lasts less."""
    measured = timing.measure(lambda: time.sleep(0.004), device="cpu", seconds=0.1)
    assert measured.clock == "host wall"
    assert min(measured.samples) >= 4.0 and measured.n >= timing.MIN_SAMPLES


@pytest.mark.gpu
def test_device_events_measure_the_device() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")
    measured = timing.measure(lambda: a @ a, device="cuda:0", seconds=0.5)
    assert measured.clock == "device events"
    # a launch returns in microseconds; only an event or a synchronize sees the product itself
    assert measured.median > 0.1
    assert measured.median <= np.median(measured.wall)
