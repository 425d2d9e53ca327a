"""The bandwidth kernel: programs copy, read or write tiles of 32-bit words."""

from __future__ import annotations

from wavecrest.ops.common.device import column_mask
from wavecrest.ops.common.triton import tl, triton


@triton.jit
def _move_tile(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, tile, N, value, READS: tl.constexpr, WRITES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile; its words, 0 past the end where they were read."""
    # int64: words pass 2³¹ at 8 GiB
    offs = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column_mask(offs, N, BLOCK, EVEN)
    words = tl.load(x_ptr + offs, mask=mask, other=0) if READS else tl.full([BLOCK], 0, tl.int32) + value
    if WRITES:
        tl.store(y_ptr + offs, words, mask=mask)
    return words


@triton.jit(do_not_specialize=["units", "tiles", "programs", "value"])
def _memcpy_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    units,
    tiles,
    programs,
    value,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    LOOP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the size comes in units of 16 bytes, which tells the compiler that a masked access is still 16 bytes wide
    N = tl.cast(units, tl.int64) * 4
    program = tl.program_id(0)
    words = tl.full([BLOCK], 0, tl.int64)
    if LOOP:
        for tile in range(program, tiles, programs):
            words += _move_tile(x_ptr, y_ptr, tile, N, value, READS, WRITES, EVEN, BLOCK).to(tl.int64)
    else:
        words += _move_tile(x_ptr, y_ptr, program, N, value, READS, WRITES, EVEN, BLOCK).to(tl.int64)
    if not WRITES:
        # integers: the sum is the same in whatever order the programs come
        tl.atomic_add(y_ptr, tl.sum(words, axis=0), sem="relaxed")
