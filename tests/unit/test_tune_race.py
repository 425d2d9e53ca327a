"""Who is in the final, who wins it, and which times are not believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.clock import SimulatedClock
from wavecrest import records
from wavecrest.measure import interleaved
from wavecrest.measure.interleaved import Interleaved
from wavecrest.tune import race
from wavecrest.tune.race import Entrant


class Clock:
    """Gives each work a time in ms by its name, with a drift that hits all works of a round alike."""

    def __init__(self, times: dict[str, float], noise: dict[str, float] | None = None) -> None:
        self.times, self.noise = times, noise or {}
        self.calls: list[tuple[list[str], int, float]] = []

    def __call__(self, works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        names = [work() for work in works]
        self.calls.append((names, rounds, seconds))
        chance = random.Random(len(self.calls))
        drift = [1 + index / 1000 for index in range(rounds)]
        samples = tuple(
            tuple(
                self.times[name] * factor * (1 + self.noise.get(name, 0.0) * chance.uniform(-1, 1)) for factor in drift
            )
            for name in names
        )
        return Interleaved(samples, "made up")


def entrant(name: str, role: str = "tried") -> Entrant:
    row = records.TuneCandidate(backend=name, role=role)  # type: ignore[arg-type]
    return Entrant(row, lambda: name)


def field(*names: str) -> list[Entrant]:
    return [entrant(name, name if name in ("native", "default") else "tried") for name in names]


def quick(
    clock: Clock, *names: str, least_ms: float | None = None
) -> tuple[list[str], dict[str, records.TuneCandidate]]:
    entrants = field(*names)
    left = race.quick(entrants, clock, least_ms)
    return [one.row.backend for one in left], {one.row.backend: one.row for one in entrants}


def test_the_slow_are_dropped_early_and_three_others_are_left() -> None:
    times = {"native": 9.0, "default": 5.0, "a": 1.0, "b": 1.2, "c": 1.26, "d": 1.1, "e": 1.15, "f": 3.0}
    clock = Clock(times)
    left, rows = quick(clock, *times)
    # a quarter slower than the best is out; native and default stay whatever they take
    assert left == ["native", "default", "a", "d", "e"]
    assert [names for names, _, _ in clock.calls] == [[*times], *[["native", "default", "a", "b", "d", "e"]] * 2]
    assert [rounds for _, rounds, _ in clock.calls] == [4, 8, 16]
    assert rows["f"].status == rows["c"].status == rows["b"].status == "dropped"
    assert rows["f"].reason == "3.00 times the best in the quick round"
    assert rows["c"].reason == "1.26 times the best in the quick round"
    assert rows["b"].reason == "3 others were faster in the quick round"
    assert rows["f"].quick_ms == pytest.approx(3.0, rel=0.01) and rows["a"].quick_ms == pytest.approx(1.0, rel=0.01)


def test_a_drop_is_measured_against_the_best_of_all() -> None:
    left, _ = quick(Clock({"native": 1.0, "default": 8.0, "a": 1.3, "b": 1.2}), "native", "default", "a", "b")
    assert left == ["native", "default", "b"]


def test_equal_times_keep_the_order_of_trial() -> None:
    names = ["d", "b", "a", "c"]
    assert quick(Clock(dict.fromkeys(names, 1.0)), *names)[0] == ["d", "b", "a"]


def test_nothing_is_selected_among_native_and_default() -> None:
    clock = Clock({"native": 1.0, "default": 2.0})
    assert quick(clock, "native", "default")[0] == ["native", "default"] and not clock.calls


def test_an_impossible_time_is_no_best() -> None:
    times = {"native": 1.0, "default": 1.1, "liar": 0.01, "a": 1.05}
    left, rows = quick(Clock(times), *times, least_ms=0.5)
    assert left == ["native", "default", "a"] and rows["liar"].status == "impossible"
    assert rows["liar"].reason.startswith(
        "10.01 µs is below the 500.00 µs that memory and arithmetic take at their peaks"
    )
    # the same time is accepted where it is possible
    assert "liar" in quick(Clock(times), *times)[0]
    assert "liar" in quick(Clock(times), *times, least_ms=0.0099)[0]


def judged(clock: Clock, *names: str, least_ms: float | None = None) -> tuple[str | None, str, list[Entrant]]:
    entrants = field(*names)
    left, _ = race.final(entrants, clock, least_ms, seconds=0.5)
    verdict = race.judge(left)
    return None if verdict.winner is None else verdict.winner.row.backend, verdict.reason, entrants


def test_the_final_times_long_and_keeps_samples() -> None:
    clock = Clock({"native": 2.0, "default": 1.5, "a": 1.0})
    winner, reason, entrants = judged(clock, "native", "default", "a")
    assert clock.calls == [(["native", "default", "a"], race.FINAL_ROUNDS, 0.5)]
    assert winner == "a" and reason == "the fastest of 3 in the final"
    row = entrants[0].row
    assert row.status == "timed" and row.ms == pytest.approx(2.0, rel=0.05) and row.ci is not None
    assert row.ci.low <= row.ms <= row.ci.high
    assert row.samples == list(entrants[0].series) and len(row.samples) >= race.FINAL_ROUNDS
    assert race.against(entrants[0], entrants[2])[0] == pytest.approx(2.0)
    assert race.against(None, entrants[2]) == (None, None)


@pytest.mark.parametrize(
    ("times", "winner", "reason"),
    [
        ({"native": 2.0, "default": 1.5, "a": 1.0}, "a", "the fastest of 3"),
        # within one percent: an incumbent
        ({"native": 2.0, "default": 1.008, "a": 1.0}, "default", "a tie with the fastest (1.008× [1.008, 1.008])"),
        ({"native": 1.008, "default": 1.5, "a": 1.0}, "native", "goes to the native"),
        # both: the faster of them
        ({"native": 1.003, "default": 1.008, "a": 1.0}, "native", "goes to the native"),
        ({"native": 1.008, "default": 1.003, "a": 1.0}, "default", "goes to the default"),
        ({"native": 1.003, "default": 1.003, "a": 1.0}, "default", "goes to the default"),
        # a tie of default and native, far behind
        ({"native": 2.0, "default": 2.0, "a": 1.0}, "a", "the fastest"),
        ({"native": 1.0, "default": 1.2, "a": 1.1}, "native", "native, and the fastest of 3"),
        ({"native": 1.0, "default": 1.005, "a": 1.1}, "native", "native, and the fastest of 3"),
        ({"native": 1.2, "default": 1.0, "a": 1.1}, "default", "default, and the fastest of 3"),
        ({"native": 1.02, "default": 1.02, "a": 1.0}, "a", "the fastest"),
        ({"native": 1.0}, "native", "the fastest of 1"),
        ({"a": 1.0, "b": 1.0}, "a", "the fastest of 2"),
    ],
)
def test_who_wins(times: dict[str, float], winner: str, reason: str) -> None:
    found, said, _ = judged(Clock(times), *times)
    assert found == winner and reason in said


def test_noise_is_no_lead() -> None:
    equal = {"native": 1.3, "default": 1.0, "a": 1.0, "b": 1.0, "c": 1.0}
    won = []
    for seed in range(30):
        clock = Clock(equal, noise=dict.fromkeys(equal, 0.1))
        clock.calls = [([], 0, 0.0)] * (100 * seed)
        won.append(judged(clock, *equal)[0])
    # the fastest of three by chance is the fastest by median in most of them
    assert won.count("default") >= 26
    assert judged(Clock(equal | {"b": 0.9}, noise=dict.fromkeys(equal, 0.1)), *equal)[0] == "b"


def test_an_impossible_time_does_not_win_the_final() -> None:
    times = {"native": 2.0, "default": 1.5, "a": 0.1}
    winner, _, entrants = judged(Clock(times), *times, least_ms=0.5)
    assert winner == "default" and entrants[2].row.status == "impossible"
    assert judged(Clock(times), *times, least_ms=9.0)[:2] == (None, "no candidate was found right and could be timed")


def test_a_final_of_nobody() -> None:
    assert race.final([], Clock({}), None, seconds=1.0) == ([], None)


def test_the_timer_of_a_device_is_the_interleaved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measured(works: Any, **options: Any) -> Interleaved:
        asked.update(options, works=works)
        return Interleaved(((1.0,),), "made up")

    monkeypatch.setattr(interleaved, "measure", measured)
    works = [lambda: None]
    clock = SimulatedClock()
    race.timer_of("cuda:1", clock)(works, rounds=7, seconds=0.25)
    assert asked == {"works": works, "device": "cuda:1", "min_rounds": 7, "seconds": 0.25, "now": clock}
