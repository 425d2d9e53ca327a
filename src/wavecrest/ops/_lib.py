"""Device functions that several kernels share."""

from __future__ import annotations

from wavecrest.ops._triton import tl, triton


@triton.jit
def row_offsets(rows, stride0, stride1, stride2, size1, size2, LEADING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element offsets of flat row indices (int64) in a tensor with one, or up to three, leading dimensions."""
    if LEADING == 1:
        offsets = rows * stride0
    else:
        # two divisions, as size1 * size2 can pass 2³¹
        outer = rows // size2
        offsets = (outer // size1) * stride0 + (outer % size1) * stride1 + (rows % size2) * stride2
    return offsets


@triton.jit
def column_offsets(cols, stride):  # type: ignore[no-untyped-def]
    """Element offsets of column indices; 64 bits, as a transposed tensor has a column stride of its row count."""
    return cols.to(tl.int64) * stride


@triton.jit
def load_row_vector(ptr, cols, stride, mask):  # type: ignore[no-untyped-def]
    """A weight or bias over the columns, as a float32 row [1, BLOCK_N]."""
    return tl.load(ptr + column_offsets(cols, stride), mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def row_mask(rows, M, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of a program's rows exist, [BLOCK_M, 1]; a constant where there is one row a program."""
    if BLOCK_M == 1:
        mask = tl.full([1, 1], True, dtype=tl.int1)
    else:
        mask = (rows < M)[:, None]
    return mask


@triton.jit
def column_mask(cols, N, BLOCK_N: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which columns exist, [BLOCK_N]; a constant where blocks fill the row, so that no access is predicated."""
    if EVEN:
        mask = tl.full([BLOCK_N], True, dtype=tl.int1)
    else:
        mask = cols < N
    return mask
