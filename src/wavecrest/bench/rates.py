"""Rates of a case: bytes or operations a second, and their share of the peak in the device's datasheet."""

from __future__ import annotations

from typing import NamedTuple

from wavecrest import records
from wavecrest.hardware import Arch

# dtypes of arguments whose peak `Arch` has
PEAKS = ("float32", "float16", "bfloat16", "int8")
# ops that go through a sequence token by token: where its length is in the shape of the first argument; a step has one
RECURRENCES = {"mlstm_chunkwise": 2, "mlstm_sequence": 2, "slstm_sequence": 1, "mlstm_step": None, "slstm_step": None}


class Rate(NamedTuple):
    """A rate in GB/s or TFLOP/s, and its share of the peak; None where the peak is not known."""

    value: float
    unit: str
    share: float | None


def peak_tflops(arch: Arch | None, dtype: str) -> float | None:
    """The dense matrix peak for arguments of a dtype, in TFLOP/s (of integers Top/s); None where nothing is known."""
    known = arch is not None and (dtype in PEAKS or (dtype.startswith("float8") and arch.peak_fp8 is not None))
    return arch.peak(dtype) if arch is not None and known else None


def source(arch: Arch | None) -> str:
    """Where the peaks of an architecture are from, "" where it is not known."""
    return "" if arch is None else f"{arch.source}, {arch.part}"


def tokens(op: str, case: records.OpCase) -> int | None:
    """Tokens of a case's sequence, each of which waits for the one before; None where the op is no recurrence."""
    if op not in RECURRENCES or not case.shapes:
        return None
    place = RECURRENCES[op]
    return 1 if place is None else int(case.shapes[0].partition(" ")[0].split("x")[place])


def of_arithmetic(case: records.OpCase, ms: float, peak_gbps: float | None) -> Rate | None:
    """The rate of arithmetic where it is what limits a case; None where memory does, or a peak is not known."""
    found = rates(case, ms, peak_gbps)
    return found[0] if len(found) == 1 and found[0].unit == "TFLOP/s" else None


def rates(case: records.OpCase, ms: float, peak_gbps: float | None) -> list[Rate]:
    """The rates of an implementation that took `ms`, by the least that a case must move and compute.

    Where both peaks are known, one: of what takes longer at its peak, memory or arithmetic. Else both, as far as the
    case has operations.
    """
    moved = case.bytes / ms / 1e6
    memory = Rate(moved, "GB/s", None if peak_gbps is None else moved / peak_gbps)
    if not case.flops:
        return [memory]
    done = case.flops / ms / 1e9
    compute = Rate(done, "TFLOP/s", None if case.peak_tflops is None else done / case.peak_tflops)
    if memory.share is None or compute.share is None:
        return [memory, compute]
    return [max(memory, compute, key=lambda rate: rate.share or 0.0)]
