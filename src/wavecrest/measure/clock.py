"""Where time comes from, and the stopwatch that times one call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# seconds from an arbitrary zero, never going back. time.perf_counter wherever work is timed; tests of logic pass a
# simulated one, so that they say the same on an idle and on a busy machine
Clock = Callable[[], float]
# the work under test: a call without arguments
Work = Callable[[], Any]

# twice the largest last-level cache there is (256 MiB on MI300X, MI355X), and long enough to hide the host behind it
FLUSH_BYTES = 512 << 20


@dataclass(slots=True)
class Stopwatch:
    """Times single calls on one device: events on a GPU, the host clock on the CPU.

    Args:
        device: a torch device name, "cpu" or "cuda:N".
        cold_cache: before each timed call read a buffer larger than any last-level cache (GPU only).
        now: where host time comes from.
    """

    device: str
    cold_cache: bool = False
    now: Clock = time.perf_counter
    _flush: Any = field(default=None, repr=False)

    @property
    def clock(self) -> str:
        """The clock that samples are taken with: "device events" or "host wall"."""
        return "host wall" if self.device == "cpu" else "device events"

    def flush(self) -> None:
        """Enqueue a read of FLUSH_BYTES, which leaves nothing of what ran before in a GPU's caches.

        Not a write: it would leave them full of lines that go back to memory while the timed call runs. Behind one,
        reading 64 MiB reached 61 % of the bandwidth of reading 1 GiB (H200,
        evidence/nvidia-h200/2026-11-20_bench_memcpy.jsonl.gz).
        """
        import torch

        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        self._flush.sum()

    def time(self, work: Work) -> tuple[float, float]:
        """Run once; returns (sample, wall) in ms, both ended by a synchronize.

        A work with a `prepare` method has it called first, outside the timed region.
        """
        prepare = getattr(work, "prepare", None)
        if prepare is not None:
            prepare()
        if self.device == "cpu":
            start = self.now()
            work()
            wall = (self.now() - start) * 1e3
            return wall, wall
        import torch

        if self.cold_cache:
            self.flush()
        stream = torch.cuda.current_stream(self.device)
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        stream.synchronize()
        start = self.now()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        wall = (self.now() - start) * 1e3
        return begin.elapsed_time(end), wall
