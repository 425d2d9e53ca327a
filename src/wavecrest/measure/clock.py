"""Where time comes from, and the stopwatch that times one call on a device.

Steps and models share the process with the clock. So the clock's functions are those that `time` had when this module
was imported, a second clock must agree with the first, and a device must be idle once the timed call is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wavecrest.errors import ClockError

# seconds from an arbitrary zero, never going back. time.perf_counter wherever work is timed; tests of logic pass a
# simulated one, so that they say the same on an idle and on a busy machine
Clock = Callable[[], float]
# the work under test: a call without arguments
Work = Callable[[], Any]

# the functions that tell the time, as they were when this module was imported
_TIME = {
    name: getattr(time, name)
    for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")
}
HOST_CLOCK: Clock = time.perf_counter
SECOND_CLOCK: Clock = time.monotonic

# twice the largest last-level cache there is (256 MiB on MI300X, MI355X), and long enough to hide the host behind it
FLUSH_BYTES = 512 << 20

# two clocks may differ by this share of a measurement, and by this many seconds beside it
CLOCK_SHARE, CLOCK_SLACK = 0.01, 0.005
# a device may take this share of a call, and this many ms beside it, to be idle after the call's stream is
IDLE_SHARE, IDLE_SLACK = 0.10, 0.05


def restore_clocks() -> None:
    """Check that `time`'s functions are those of the import of this module; put them back if they are not.

    Raises:
        ClockError: one had been replaced.
    """
    replaced = [name for name, function in _TIME.items() if getattr(time, name) is not function]
    for name in replaced:
        setattr(time, name, _TIME[name])
    if replaced:
        raise ClockError(
            f"time.{replaced[0]} was replaced while something was timed; it is put back, and the times do not count"
        )


@dataclass(slots=True)
class Stopwatch:
    """Times single calls on one device: events on a GPU, the host clock on the CPU.

    Args:
        device: a torch device name, "cpu" or "cuda:N".
        cold_cache: before each timed call read a buffer larger than any last-level cache (GPU only).
        now: where host time comes from.
        second: another clock that must agree with `now` (`watched`); None: `time.monotonic` where `now` is the host's
            clock, and none beside a simulated one.
    """

    device: str
    cold_cache: bool = False
    now: Clock = HOST_CLOCK
    second: Clock | None = None
    _flush: Any = field(default=None, repr=False)
    # per call on a GPU: ms from the end of its stream to an idle device, and its own ms
    _tails: list[tuple[float, float]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.second is None and self.now is HOST_CLOCK:
            self.second = SECOND_CLOCK

    @property
    def clock(self) -> str:
        """The clock that samples are taken with: "device events" or "host wall"."""
        return "host wall" if self.device == "cpu" else "device events"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hold the clocks to each other over a measurement.

        Raises:
            ClockError: at the end: a clock was replaced, two clocks disagree, or work goes on after the call.
        """
        restore_clocks()
        self._tails.clear()
        begin = self._read_both()
        yield
        restore_clocks()
        end = self._read_both()
        if begin is not None and end is not None:
            first = end[1] - begin[1]
            least, most = end[0] - begin[2], end[2] - begin[0]
            slack = CLOCK_SHARE * max(first, most) + CLOCK_SLACK
            if not least - slack <= first <= most + slack:
                raise ClockError(f"two clocks disagree: {first:.3f} s by one, {most:.3f} s by the other")
        self._check_tails()

    def _read_both(self) -> tuple[float, float, float] | None:
        """The second clock, the first, and the second again: on a busy machine other work may run between readings."""
        if self.second is None:
            return None
        return self.second(), self.now(), self.second()

    def _check_tails(self) -> None:
        late = [tail for tail, sample in self._tails if tail > IDLE_SLACK + IDLE_SHARE * sample]
        if 4 * len(late) > len(self._tails):
            raise ClockError(
                f"the device is busy for another {statistics.median(late):.3f} ms after the call's own stream has "
                "ended: work runs on a stream that the result does not wait for"
            )

    def flush(self) -> None:
        """Enqueue a read of FLUSH_BYTES, which replaces everything in a GPU's caches.

        Not a write: it would leave them full of lines that go back to memory while the timed call runs. Behind one,
        reading 64 MiB reached 61 % of the bandwidth of reading 1 GiB (H200,
        evidence/nvidia-h200/2026-11-20_bench_memcpy.jsonl.gz).
        """
        import torch

        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        self._flush.sum()

    def time(self, work: Work) -> tuple[float, float]:
        """Run once; returns (sample, wall) in ms, both ended by a synchronize of the whole device.

        A work with a `prepare` method has it called first, outside the timed region.
        """
        sample, wall, _ = self.run(work)
        return sample, wall

    def run(self, work: Work) -> tuple[float, float, Any]:
        """`time`, with what the work returned.

        Raises:
            ClockError: a GPU's events span more time than the host's clock saw go by.
        """
        prepare = getattr(work, "prepare", None)
        if prepare is not None:
            prepare()
        if self.device == "cpu":
            start = self.now()
            output = work()
            wall = (self.now() - start) * 1e3
            return wall, wall, output
        import torch

        if self.cold_cache:
            self.flush()
        stream = torch.cuda.current_stream(self.device)
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start = self.now()
        begin.record(stream)
        output = work()
        end.record(stream)
        end.synchronize()
        ended = self.now()
        torch.cuda.synchronize(self.device)
        wall = (self.now() - start) * 1e3
        sample: float = begin.elapsed_time(end)
        self._tails.append((wall - (ended - start) * 1e3, sample))
        if sample > wall * (1 + CLOCK_SHARE) + CLOCK_SLACK * 1e3:
            raise ClockError(f"the device's events span {sample:.3f} ms where the host's clock saw {wall:.3f} ms go by")
        return sample, wall, output
