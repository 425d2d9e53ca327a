"""How tensors [..., N] are indexed as rows: strides, alignment, counts.

Nothing here copies: leading dimensions that have one common stride are merged, up to three that do not are passed to
the kernel with their strides, more than three are refused.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """How tensors of the same leading shape are indexed: `strides` holds three leading strides a tensor.

    `leading` is 1 (row i starts at i · strides[0]) or 3 (row i is split by size1 and size2).
    """

    rows: int
    leading: int
    size1: int
    size2: int
    strides: tuple[tuple[int, int, int], ...]


def _collapse(tensors: tuple[Tensor, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """The leading dimensions as (size, stride per tensor), those with one common stride merged."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(tensors[0].ndim - 1):
        size = tensors[0].shape[dim]
        if size == 1:
            continue
        strides = tuple(tensor.stride(dim) for tensor in tensors)
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims


def leading(*tensors: Tensor) -> int:
    """The number of leading dimensions after merging (1 also for none): a kernel takes up to 3."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            return max(1, len(_collapse(tensors)))
    return 1


def layout(*tensors: Tensor) -> Layout:
    """The common layout of tensors with the same leading shape, which `leading` has found to be at most 3."""
    rows = 1
    for size in tensors[0].shape[:-1]:
        rows = rows * size
    if leading(*tensors) == 1:
        strides = tuple((_row_stride(tensor), 0, 0) for tensor in tensors)
        return Layout(rows, 1, 1, 1, strides)
    dims = _collapse(tensors)
    if len(dims) < 3:
        dims = [(1, tuple(0 for _ in tensors))] * (3 - len(dims)) + dims
    by_tensor = tuple((dims[0][1][i], dims[1][1][i], dims[2][1][i]) for i in range(len(tensors)))
    return Layout(rows, 3, dims[1][0], dims[2][0], by_tensor)


def _row_stride(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.shape[-1]
    # the innermost dimension that has more than one row gives the stride of all of them
    for dim in range(tensor.ndim - 2, -1, -1):
        if tensor.shape[dim] != 1:
            return tensor.stride(dim)
    return 0


def alignment(columns: int, *strides: tuple[int, ...]) -> int:
    """The largest power of two up to 16 that divides a row's columns and the strides between rows.

    Kernels take both in units of it: it decides how wide their accesses may be, and Triton by itself sees only
    whether a number is a multiple of 16. It is one of the few things that a kernel is compiled anew for.
    """
    for unit in (16, 8, 4, 2):
        if columns % unit == 0 and all(stride % unit == 0 for tensor in strides for stride in tensor):
            return unit
    return 1


def ceil_div(total: int, size: int) -> int:
    """The number of pieces of `size` that hold `total`."""
    return (total + size - 1) // size


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << max(0, number - 1).bit_length()


def row_count(x: Tensor) -> int:
    """The product of the leading sizes."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows
