"""The least time a call can take on this device: a result below it is an error of the measurement, or a cheat.

Counted is only what no rearrangement saves: the weights that GEMMs and convolutions read in full, the tensors that the
call returns, and the FLOPs of GEMMs whose weight is a parameter. Embeddings are read in part, convolutions have
algorithms with fewer FLOPs, and causal attention needs half of its products, so these do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wavecrest.measure.tree import iter_tensors

if TYPE_CHECKING:
    from wavecrest.measure.workload import Workload
    from wavecrest.records import BucketProfile, Ceilings

# a ceiling may be beaten by this share: it was measured once, in some milliseconds
SLACK = 0.10

_GEMMS = (torch.ops.aten.mm, torch.ops.aten.addmm)
_READS_WEIGHTS = (*_GEMMS, torch.ops.aten.convolution)


@dataclass(slots=True)
class Work:
    """Bytes and FLOPs, by dtype name, that a call cannot do without."""

    bytes: int = 0
    flops: dict[str, float] = field(default_factory=dict)

    def least_ms(self, ceilings: Ceilings, cache: int, *, lower_precision: bool) -> float:
        """The least time in ms.

        Args:
            ceilings: of the device.
            cache: bytes that may lie in its last-level cache.
            lower_precision: the user asked for 16 bits or TF32: half of the bytes, and no bound by FLOPs.
        """
        moved = self.bytes / 2 if lower_precision else self.bytes
        times = [max(0.0, moved - cache) / (ceilings.bandwidth * 1e9)]
        if not lower_precision:
            times += [
                flops / (ceilings.peak[dtype] * 1e12) for dtype, flops in self.flops.items() if dtype in ceilings.peak
            ]
        return max(times) * 1e3 / (1 + SLACK)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the parameters that GEMMs and convolutions read, once each, and the FLOPs of those GEMMs."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters, self.seen, self.work = parameters, set[int](), Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, then run."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _READS_WEIGHTS:
            return out
        tensors = [value for value in args if isinstance(value, Tensor)]
        weights = [value for value in tensors if _address(value) in self.parameters]
        for weight in weights:
            if _address(weight) not in self.seen:
                self.seen.add(_address(weight))
                self.work.bytes += weight.numel() * weight.element_size()
        if func.overloadpacket in _GEMMS and any(weight.ndim == 2 for weight in weights):
            a, b = tensors[-2:]
            dtype = str(a.dtype).removeprefix("torch.")
            self.work.flops[dtype] = self.work.flops.get(dtype, 0.0) + 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return out


def least_work(workload: Workload, bucket: str) -> Work:
    """The work of one call of the workload's own model that any equal model does too."""
    state = [*workload.model.parameters(), *workload.model.buffers()]
    counter = _Counter({_address(tensor) for tensor in state})
    with counter:
        output = workload.run(bucket)
    held = {_address(tensor) for _, tensor in workload.buckets[bucket].tensors()} | counter.parameters
    for _, tensor in iter_tensors("", output, set()):
        if _address(tensor) not in held:
            counter.work.bytes += tensor.numel() * tensor.element_size()
    return counter.work


@dataclass(slots=True)
class LeastTimes:
    """The least time of each bucket in ms.

    Args:
        work: by bucket.
        measure: measures ceilings; asked again before anything is called impossible, since the machine may have been
            busy the first time.
        ceilings: the first measurement.
        cache: bytes of the last-level cache.
        lower_precision: see `Work.least_ms`.
    """

    work: dict[str, Work]
    measure: Callable[[], Ceilings | None]
    ceilings: Ceilings | None
    cache: int
    lower_precision: bool = False

    def of(self, bucket: str) -> float:
        """The least time of a bucket, 0 where none is known."""
        work = self.work.get(bucket)
        if work is None or self.ceilings is None:
            return 0.0
        return work.least_ms(self.ceilings, self.cache, lower_precision=self.lower_precision)

    def impossible(self, times: dict[str, float]) -> str:
        """Why these times, in ms by bucket, cannot be; or an empty string."""
        if not self._below(times):
            return ""
        again = self.measure()
        if again is not None and self.ceilings is not None:
            self.ceilings = _higher(self.ceilings, again)
        below = self._below(times)
        if not below:
            return ""
        taken, least = times[below[0]], self.of(below[0])
        return (
            f"faster than the hardware allows: bucket {below[0]} took {taken:.4f} ms, and reading the weights and "
            f"multiplying by them takes {least:.4f} ms at least"
        )

    def _below(self, times: dict[str, float]) -> list[str]:
        return [bucket for bucket, ms in times.items() if ms < self.of(bucket)]


def _higher(a: Ceilings, b: Ceilings) -> Ceilings:
    peak = {dtype: max(a.peak.get(dtype, 0.0), b.peak.get(dtype, 0.0)) for dtype in {*a.peak, *b.peak}}
    return a.model_copy(update={"bandwidth": max(a.bandwidth, b.bandwidth), "peak": peak})


def beaten_ceiling(profile: list[BucketProfile]) -> str:
    """The operation that lies furthest beyond its ceiling, in words; or an empty string.

    One that a cache may have served says nothing of the ceiling.
    """
    rows = [op for bucket in profile for op in bucket.ops if op.bound != "cache"]
    found = [(op.roofline_percent, op.name) for op in rows if op.roofline_percent]
    percent, name = max(found, default=(0.0, ""))
    return f"{name} reaches {percent:,.0f} % of it" if percent > 100 * (1 + SLACK) else ""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
