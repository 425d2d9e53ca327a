"""A call of the bandwidth test: its arguments, their checks, and its shape key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import m_bucket, needs_grad
from wavecrest.errors import InvalidArgument

MODES = ("copy", "read", "write")
# bytes that one thread moves at once: sizes are multiples of it
UNIT_BYTES = 16
WORD_BYTES = 4
# far more than any device runs at once; tile numbers, which go up in steps of it, stay below 2³¹
MAX_PROGRAMS = 1 << 20
KEY_FIELDS = ("blocks_4k", "mode", "programs", "device", "grad")


class MemcpyCall(NamedTuple):
    """Move the bytes of x; see `wavecrest.ops.memcpy` for the arguments."""

    x: Tensor
    mode: str = "copy"
    programs: int | None = None
    value: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of x."""
        # Dynamo does not trace `nbytes` of a tensor whose size it does not know
        return self.x.numel() * self.x.element_size()

    @property
    def signed_value(self) -> int:
        """The 32-bit pattern as a signed number."""
        return self.value - (1 << 32) if self.value >= 1 << 31 else self.value


def words_of(x: Tensor) -> Tensor:
    """The 32-bit words of a tensor, as a view.

    Raises:
        InvalidArgument: it starts inside a word.
    """
    # Dynamo does not trace the offset; there it is the view that refuses
    if not torch.compiler.is_compiling() and x.storage_offset() * x.element_size() % WORD_BYTES != 0:
        raise InvalidArgument(f"memcpy: x starts at element {x.storage_offset()} of its storage, inside a 32-bit word")
    return x.detach().view(-1).view(torch.int32)


def check(call: MemcpyCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    x, mode, programs, value = call
    if not isinstance(x, Tensor) or x.dtype.is_complex:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidArgument(f"memcpy: takes a dense tensor that is not complex, got {found}")
    if not x.is_contiguous():
        raise InvalidArgument(f"memcpy: takes a contiguous tensor, got strides {x.stride()} of {list(x.shape)}")
    if call.nbytes % UNIT_BYTES != 0:
        raise InvalidArgument(f"memcpy: takes multiples of {UNIT_BYTES} bytes, got {call.nbytes}")
    if mode not in MODES:
        raise InvalidArgument(f"memcpy: mode is copy, read or write, not {mode!r}")
    # True is an int too
    if programs is not None and (type(programs) is not int or not 1 <= programs <= MAX_PROGRAMS):
        raise InvalidArgument(f"memcpy: programs is None or a number from 1 to {MAX_PROGRAMS:,}, not {programs!r}")
    if type(value) is not int or not -(1 << 31) <= value < 1 << 32:
        raise InvalidArgument(f"memcpy: value is a 32-bit pattern, not {value!r}")
    if value != 0 and mode != "write":
        raise InvalidArgument(f"memcpy: value is what mode write fills with; mode {mode} has no use for it")


def key_of(call: MemcpyCall) -> Key:
    """The shape key of a call: KEY_FIELDS."""
    blocks = m_bucket((call.nbytes + 4095) // 4096)
    return (blocks, call.mode, call.programs, call.x.device.type, needs_grad(call.x))
