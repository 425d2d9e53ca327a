"""The statistics rule on simulated clocks, and the timer itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wavecrest.errors import InvalidArgument
from wavecrest.measure import timing


class Clock:
    """A simulated machine: every call takes `ms` times a factor per side, plus noise and drift; time passes with it."""

    def __init__(
        self,
        seed: int,
        *,
        noise: float = 0.0,
        gain: float = 1.0,
        drift: float = 0.0,
        ms: float = 50.0,
        first: float = 0.0,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.noise, self.gain, self.drift, self.ms, self.first = noise, gain, drift, ms, first
        self.now = 0.0
        self.calls: list[Any] = []

    def perf_counter(self) -> float:
        return self.now

    def time(self, work: Any) -> tuple[float, float]:
        ms = self.ms * (1 + self.drift * self.now) * max(0.05, 1 + self.random.normal(0, self.noise))
        if work == "new":
            ms /= self.gain
        if not self.calls:
            ms += self.first
        self.calls.append(work)
        self.now += ms / 1e3
        return ms, ms


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def install(seed: int = 0, **facts: float) -> Clock:
        clock = Clock(seed, **facts)
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(timing.Stopwatch, "time", lambda self, work: clock.time(work))
        return clock

    return install


def _pair(simulate: Callable[..., Clock], seed: int, *, seconds: float = 10.0, **facts: float) -> timing.Paired:
    simulate(seed, **facts)
    return timing.measure_pair("base", "new", device="cpu", seconds=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1.0, 10.0], ids=["fewest-blocks", "many-blocks"])
def test_null_changes_are_not_kept(simulate: Callable[..., Clock], seconds: float) -> None:
    intervals = [_pair(simulate, seed, noise=0.05, seconds=seconds).ci for seed in range(300)]
    assert sum(timing.keeps(ci, 0.0) for ci in intervals) <= 0.05 * len(intervals)
    assert sum(timing.keeps(ci, 0.02) for ci in intervals) <= 0.005 * len(intervals)
    # the other way round too: null changes are not called slower either
    assert sum(ci.high < 1 for ci in intervals) <= 0.05 * len(intervals)
    # and the intervals are no wider than they need be: most of them hold 1 closely
    assert np.median([ci.high - ci.low for ci in intervals]) < 0.10


@pytest.mark.parametrize("seconds", [1.0, 10.0], ids=["fewest-blocks", "many-blocks"])
def test_real_gains_are_kept(simulate: Callable[..., Clock], seconds: float) -> None:
    pairs = [_pair(simulate, seed, noise=0.05, gain=1.10, seconds=seconds) for seed in range(100)]
    assert sum(timing.keeps(pair.ci, 0.02) for pair in pairs) >= 95
    assert np.median([pair.ratio for pair in pairs]) == pytest.approx(1.10, abs=0.01)


def test_real_losses_are_never_kept(simulate: Callable[..., Clock]) -> None:
    pairs = [_pair(simulate, seed, noise=0.05, gain=0.95, seconds=2.0) for seed in range(50)]
    assert not any(timing.keeps(pair.ci, 0.0) for pair in pairs)


@pytest.mark.parametrize("drift", [0.05, -0.05, 0.2], ids=["slower", "faster", "much-slower"])
def test_drift_of_both_sides_is_no_gain(simulate: Callable[..., Clock], drift: float) -> None:
    pairs = [_pair(simulate, seed, noise=0.02, drift=drift, seconds=4.0) for seed in range(60)]
    assert sum(timing.keeps(pair.ci, 0.0) for pair in pairs) <= 3
    assert sum(pair.ci.high < 1 for pair in pairs) <= 3
    assert np.median([pair.ratio for pair in pairs]) == pytest.approx(1.0, abs=0.01)


def test_blocks_run_abba_and_settle_after_each_change_of_side(simulate: Callable[..., Clock]) -> None:
    clock = simulate(ms=50.0)
    pair = timing.measure_pair("base", "new", device="cpu", seconds=0.1)  # type: ignore[arg-type]
    # the second and the fifth call of a block are not timed
    measured = clock.calls[-6 * pair.n :]
    assert measured == ["base", "new", "new", "new", "base", "base"] * pair.n
    warm = clock.calls[: -6 * pair.n]
    assert warm.count("base") >= 3 and warm.count("new") >= 3


def test_long_calls_are_all_timed(simulate: Callable[..., Clock]) -> None:
    clock = simulate(ms=2 * timing.SETTLED_MS)
    pair = timing.measure_pair("base", "new", device="cpu", seconds=0.1)  # type: ignore[arg-type]
    assert clock.calls[-4 * (pair.n - 1) :] == ["base", "new", "new", "base"] * (pair.n - 1)


def test_a_block_is_the_mean_of_its_two_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "warm_up", lambda *_args, **_kwargs: 0.0)
    # 99: calls right after a change of side, which must not count
    block = [(1.0, 1.0), (99.0, 99.0), (10.0, 10.0), (30.0, 30.0), (99.0, 99.0), (3.0, 3.0)]
    queue = iter(block * 15)
    monkeypatch.setattr(timing.Stopwatch, "time", lambda self, work: next(queue))
    pair = timing.measure_pair("base", "new", device="cpu", seconds=0.0)  # type: ignore[arg-type]
    assert pair.base == (2.0,) * 15 and pair.new == (20.0,) * 15
    assert pair.ratio == pytest.approx(0.1)


def test_cold_start_is_kept_apart(simulate: Callable[..., Clock]) -> None:
    simulate(ms=2.0, first=5_000.0)
    measured = timing.measure("base", device="cpu")  # type: ignore[arg-type]
    assert measured.cold_start == pytest.approx(5_002.0)
    assert max(measured.samples) == pytest.approx(2.0)


def test_slow_work_still_gets_thirty_samples(simulate: Callable[..., Clock]) -> None:
    clock = simulate(noise=0.05, ms=20_000.0)
    measured = timing.measure("base", device="cpu", seconds=1.0)  # type: ignore[arg-type]
    assert measured.n == timing.MIN_SAMPLES
    # the cold start, two warm-up calls and the one that sets the stride
    assert len(clock.calls) == timing.MIN_SAMPLES + 4


def test_fast_work_is_bounded_and_spread_over_time(simulate: Callable[..., Clock]) -> None:
    clock = simulate(noise=0.3, ms=0.01)
    begin = clock.now
    measured = timing.measure("base", device="cpu", seconds=60.0)  # type: ignore[arg-type]
    assert measured.n <= timing.MAX_SAMPLES
    assert clock.now - begin >= timing.MIN_SECONDS
    simulate(noise=0.3, ms=0.01)
    assert timing.measure_pair("base", "new", device="cpu", seconds=60.0).n <= timing.MAX_SAMPLES  # type: ignore[arg-type]


def test_sampling_stops_when_the_interval_is_narrow(simulate: Callable[..., Clock]) -> None:
    clock = simulate(noise=0.001, ms=50.0)
    measured = timing.measure("base", device="cpu", seconds=1e6)  # type: ignore[arg-type]
    assert measured.n == timing.MIN_SAMPLES
    assert clock.now < 10


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


def test_the_median_interval_covers_the_median() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        ci = timing.bootstrap_median(random.normal(10, 1, 30))  # type: ignore[arg-type]
        hits += ci.low <= 10 <= ci.high
    assert 0.90 <= hits / 300 <= 0.99


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


def test_blocks_stay_paired_when_resampled() -> None:
    # noise that hits both sides of a block alike cancels, however large
    shared = np.random.default_rng(3).uniform(1, 10, 40)
    ratio, ci = timing.bootstrap_speedup([((shared * 2).tolist(), shared.tolist())])
    assert ratio == pytest.approx(2.0)
    assert ci.low == pytest.approx(2.0) and ci.high == pytest.approx(2.0)


def test_buckets_combine_as_geometric_mean() -> None:
    ratio, ci = timing.bootstrap_speedup([([4.0] * 20, [1.0] * 20), ([1.0] * 20, [1.0] * 20)])
    assert ratio == pytest.approx(2.0)
    assert ci.low == pytest.approx(2.0)


@pytest.mark.parametrize(
    "samples", [[], [0.0, 1.0], [-1.0], [math.nan], [math.inf]], ids=["none", "zero", "negative", "nan", "inf"]
)
def test_impossible_times_are_refused(samples: list[float]) -> None:
    for call in (
        lambda: timing.bootstrap_median(samples),
        lambda: timing.bootstrap_speedup([(samples, samples)]),
        lambda: timing.bootstrap_unpaired([1.0], samples),
        lambda: timing.bootstrap_unpaired(samples, [1.0]),
    ):
        with pytest.raises(InvalidArgument):
            call()


def test_pairs_of_unequal_length_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="equal"):
        timing.bootstrap_speedup([([1.0, 2.0], [1.0])])


def test_the_real_clock_measures_real_work() -> None:
    import time

    measured = timing.measure(lambda: time.sleep(0.004), device="cpu", seconds=0.1)
    assert measured.clock == "host wall"
    assert 4.0 <= measured.median < 20.0
    assert measured.n >= timing.MIN_SAMPLES


@pytest.mark.gpu
def test_device_events_measure_the_device() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")
    measured = timing.measure(lambda: a @ a, device="cuda:0", seconds=0.5)
    assert measured.clock == "device events"
    # a launch returns in microseconds; only an event or a synchronize sees the product itself
    assert measured.median > 0.1
    assert measured.median <= np.median(measured.wall)
