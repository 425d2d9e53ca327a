"""The stopwatch against whoever would change its time: replaced functions, clocks that disagree, work that runs on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.clock import SimulatedClock
from wavecrest.errors import ClockError
from wavecrest.measure import timing
from wavecrest.measure.clock import Stopwatch, restore_clocks


@pytest.fixture
def real_time() -> Iterator[None]:
    before = {name: getattr(time, name) for name in ("perf_counter", "monotonic", "time")}
    yield
    for name, function in before.items():
        setattr(time, name, function)


@pytest.mark.parametrize("name", ["perf_counter", "monotonic", "time"])
def test_a_replaced_clock_is_found_and_put_back(real_time: None, name: str) -> None:
    plain = getattr(time, name)

    def cheat() -> None:
        setattr(time, name, lambda: plain() / 2)

    with pytest.raises(ClockError, match=f"time.{name} was replaced"):
        timing.measure(cheat, device="cpu", seconds=0.01)
    assert getattr(time, name) is plain
    restore_clocks()


def test_a_clock_that_was_replaced_before_is_found_before_anything_runs(real_time: None) -> None:
    time.perf_counter = lambda: 0.0
    calls: list[int] = []
    with pytest.raises(ClockError, match=r"time\.perf_counter"):
        timing.measure_pair(lambda: calls.append(0), lambda: calls.append(1), device="cpu", seconds=0.01)
    assert not calls


def test_two_clocks_must_agree() -> None:
    first, second = SimulatedClock(), SimulatedClock()
    watch = Stopwatch("cpu", now=first, second=second)
    for share, agrees in ((1.0, True), (0.995, True), (0.5, False), (1.5, False)):
        try:
            with watch.watched():
                first.advance(10.0 * share)
                second.advance(10.0)
            assert agrees
        except ClockError as error:
            assert not agrees and "two clocks disagree" in str(error)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_other_work_between_two_readings_is_no_disagreement(place: int) -> None:
    """A process that waits for its core while it reads the clocks: 20 ms, at any of four places."""
    host = SimulatedClock()
    readings = iter([*range(6), *range(6)])

    def read(clock: SimulatedClock) -> float:
        # the first clock is read second and fifth, and the pause is before or after it
        if next(readings) == (1, 2, 4, 5)[place]:
            host.advance(0.02)
        return clock()

    watch = Stopwatch("cpu", now=lambda: read(host), second=lambda: read(host))
    with watch.watched():
        host.advance(0.3)


def test_the_host_clock_has_a_second_one_and_a_simulated_one_has_none() -> None:
    assert Stopwatch("cpu").second is time.monotonic
    assert Stopwatch("cpu", now=SimulatedClock()).second is None


class FakeDevice:
    """torch.cuda with a stream that is done after `stream` seconds and a device that is idle `more` seconds later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stream: float, more: float, shown: float) -> None:
        self.clock = SimulatedClock()
        device, busy = self, {"until": 0.0}

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, _stream: Any) -> None:
                pass

            def synchronize(self) -> None:
                device.clock.advance(stream)
                busy["until"] = device.clock.seconds + more

            def elapsed_time(self, _end: Any) -> float:
                return shown * 1e3

        def wait(_device: str) -> None:
            device.clock.advance(max(1e-6, busy["until"] - device.clock.seconds))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)

    def measure(self) -> timing.Measurement:
        return timing.measure(lambda: None, device="cuda:0", seconds=0.1, now=self.clock)


def test_work_on_a_stream_that_nobody_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClockError, match=r"busy for another 5\.000 ms after the call's own stream"):
        FakeDevice(monkeypatch, stream=0.001, more=0.005, shown=0.001).measure()
    found = FakeDevice(monkeypatch, stream=0.001, more=0.00001, shown=0.001).measure()
    assert found.median == pytest.approx(1.0) and found.wall[0] == pytest.approx(1.01)


def test_events_cannot_span_more_than_the_host_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClockError, match=r"events span 50\.000 ms where the host's clock saw"):
        FakeDevice(monkeypatch, stream=0.010, more=0.0, shown=0.050).measure()


@pytest.mark.gpu
def test_a_side_stream_is_found() -> None:
    a, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()

    def escapes() -> None:
        with torch.cuda.stream(side):
            for _ in range(10):
                torch.mm(a, a)

    with pytest.raises(ClockError, match="own stream"):
        timing.measure(escapes, device="cuda:0", seconds=0.2)
