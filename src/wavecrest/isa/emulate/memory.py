"""Guarded memory: copies of a launch's tensors, placed so that an access beside them is detected.

After each copy (and up to 15 bytes for alignment) comes an unmapped page: an access there stops the kernel at its
instruction. The bytes before a copy in its first page, and the alignment bytes, hold a pattern that reads as NaN; a
write there is found when the kernel has ended.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from wavecrest.errors import OutOfBounds
from wavecrest.isa.emulate import watch
from wavecrest.isa.emulate.uninitialised import Uninitialised, elements

# larger memory is used in place, and the launch says so
LIMIT = 256 << 20
_PATTERN = 0xFF
_PROT_NONE = 0


def _bytes(address: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@dataclass(slots=True)
class _Region:
    """Host memory from `start` to `end` that arguments lie in, and where its copy is."""

    start: int
    end: int
    arguments: list[tuple[str, Tensor]]
    shift: int = 0
    pages: mmap.mmap | None = field(default=None, repr=False)
    first: int = 0
    last: int = 0

    def copy(self) -> None:
        page, size = mmap.PAGESIZE, self.end - self.start
        count = -(-(size + 15) // page)
        self.pages = mmap.mmap(-1, (count + 2) * page)
        # one page on each side is not mapped
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self.pages)) + page
        self.last = self.first + count * page
        for side in (self.first - page, self.last):
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(side), ctypes.c_size_t(page), _PROT_NONE)
        at = self.last - size
        # kernels are compiled for the address modulo 16, so copies keep it
        at -= (at - self.start) % 16
        self.shift = at - self.start
        ctypes.memset(self.first, _PATTERN, self.last - self.first)
        ctypes.memmove(at, self.start, size)

    def states(self, uninitialised: Uninitialised | None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A state per byte from `first` to `last`: only elements of an argument may be accessed."""
        found = np.zeros(self.last - self.first, np.uint8)
        for _, tensor in self.arguments:
            part = found[self._offset(tensor) :][: tensor.untyped_storage().nbytes()]
            part |= elements(tensor) * np.uint8(watch.ADDRESSABLE)
            marks = None if uninitialised is None else uninitialised.written(tensor)
            part |= np.uint8(watch.WRITTEN) if marks is None else marks * np.uint8(watch.WRITTEN)
        return found

    def take_states(self, found: np.ndarray[tuple[int], np.dtype[np.uint8]], uninitialised: Uninitialised) -> None:
        """Tell which bytes have a value now."""
        for _, tensor in self.arguments:
            part = found[self._offset(tensor) :][: tensor.untyped_storage().nbytes()]
            uninitialised.set_written(tensor, (part & watch.WRITTEN != 0).astype(np.uint8))

    def _offset(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() + self.shift - self.first

    def written_outside(self) -> str | None:
        at = self.start + self.shift
        end = at + self.end - self.start
        before = np.flatnonzero(_bytes(self.first, at - self.first) != _PATTERN)
        if before.size:
            return f"up to {at - self.first - int(before[0])} bytes before the start"
        after = np.flatnonzero(_bytes(end, self.last - end) != _PATTERN)
        return f"up to {int(after[-1]) + 1} bytes past the end" if after.size else None

    def copy_back(self) -> None:
        size = self.end - self.start
        old, new = _bytes(self.start, size), _bytes(self.start + self.shift, size)
        # only changed bytes: memory that is only read may not be writable
        if not np.array_equal(old, new):
            old[:] = new


def _describe(name: str, tensor: Tensor) -> str:
    return f"argument {name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"


class Guard:
    """The memory of one launch.

    Args:
        arguments: name and CPU tensor of each pointer the kernel gets. Tensors whose memory overlaps share a copy, so
            that they go on overlapping.

    Attributes:
        unguarded: names of the arguments that are used in place, being larger than LIMIT.
    """

    def __init__(self, arguments: Iterable[tuple[str, Tensor]]) -> None:
        spans = []
        for name, tensor in arguments:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, tensor))
        self._regions: list[_Region] = []
        for start, end, name, tensor in sorted(spans, key=lambda span: span[:2]):
            if self._regions and start < self._regions[-1].end:
                region = self._regions[-1]
                region.end = max(region.end, end)
                region.arguments.append((name, tensor))
            else:
                self._regions.append(_Region(start, end, [(name, tensor)]))
        self.unguarded: list[str] = []
        self._states: list[tuple[_Region, np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []
        for region in self._regions:
            if region.end - region.start <= LIMIT:
                region.copy()
            else:
                self.unguarded += [name for name, _ in region.arguments]

    def pointer(self, tensor: Tensor) -> int:
        """The address that the kernel gets for a tensor."""
        address = tensor.data_ptr()
        for region in self._regions:
            if region.start <= address < region.end:
                return address + region.shift
        return address

    def describe(self, address: int) -> str:
        """The argument nearest to an address, and the distance, for the message of a fault."""
        best: tuple[int, str] | None = None
        for region in self._regions:
            start, end = region.start + region.shift, region.end + region.shift
            distance = start - address if address < start else max(0, address - end)
            side = "before the start" if address < start else "past the end"
            names = " and ".join(_describe(*argument) for argument in region.arguments)
            if start <= address < end:
                return f"{address:#x}, between the elements of {names}"
            if best is None or distance < best[0]:
                best = distance, f"{distance} bytes {side} of {names}"
        return f"{address:#x}, {best[1]}" if best is not None else f"{address:#x}"

    def watched(self, uninitialised: Uninitialised | None) -> list[watch.Region]:
        """The regions for the watch; those that are used in place are not among them.

        Args:
            uninitialised: knows which bytes have no value yet; None: all have one.
        """
        self._states = [(region, region.states(uninitialised)) for region in self._regions if region.pages is not None]
        return [watch.Region(region.first, region.last, found.ctypes.data) for region, found in self._states]

    def take_states(self, uninitialised: Uninitialised) -> None:
        """Tell which bytes the kernel wrote."""
        for region, found in self._states:
            region.take_states(found, uninitialised)

    def finish(self) -> None:
        """Check the bytes beside the tensors, and copy the kernel's writes back to the caller's tensors.

        Raises:
            OutOfBounds: the kernel wrote beside a tensor; nothing is copied then.
        """
        guarded = [region for region in self._regions if region.pages is not None]
        for region in guarded:
            where = region.written_outside()
            if where is not None:
                names = " and ".join(_describe(*argument) for argument in region.arguments)
                raise OutOfBounds(f"the kernel wrote {where} of {names} (found after it ended: no instruction to name)")
        for region in guarded:
            region.copy_back()
