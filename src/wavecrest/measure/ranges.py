"""Declared ranges of shapes: the sizes that a model is compiled for, and inputs cut and padded to a size.

A model of token ids with a padding mask [batch, length] can run any size up to one that it is compiled for: rows behind
the batch repeat the first, tokens behind the text are hidden by the mask.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavecrest.errors import WorkloadError

if TYPE_CHECKING:
    from torch import Tensor

BATCH, LENGTH = "batch", "length"
# the argument that marks padding: 1 for a token, 0 for padding
MASK = "attention_mask"
# the least length that is compiled for; below it, a call is all overhead
LEAST_LENGTH = 16

Span = tuple[int, int]
Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Batches and lengths that a model serves.

    Attributes:
        batch, length: the least and the most of each, both included.

    Raises:
        WorkloadError: a range is empty or begins below 1.
    """

    batch: Span
    length: Span

    def __post_init__(self) -> None:
        for name, (low, high) in ((BATCH, self.batch), (LENGTH, self.length)):
            if not 1 <= low <= high:
                raise WorkloadError(
                    f"the range {name}=({low}, {high}) is empty; give the least, 1 or more, and the most"
                )

    @property
    def batches(self) -> list[int]:
        """The batches to compile for: powers of two, and the most."""
        return _sizes(self.batch, 1, halves=False)

    @property
    def lengths(self) -> list[int]:
        """The lengths to compile for, a third apart at most: powers of two, those and a half, and the most."""
        return _sizes(self.length, LEAST_LENGTH, halves=True)

    def size(self, batch: int, length: int) -> Span | None:
        """The least size that holds a call; None beyond the ranges."""
        if not (self.batch[0] <= batch <= self.batch[1] and self.length[0] <= length <= self.length[1]):
            return None
        batches, lengths = self.batches, self.lengths
        return batches[bisect.bisect_left(batches, batch)], lengths[bisect.bisect_left(lengths, length)]

    @property
    def optimized(self) -> list[Span]:
        """The sizes that a run optimizes for: the ends and the middle."""
        batches, lengths = self.batches, self.lengths
        places = (0, 0), (len(batches) // 2, len(lengths) // 2), (-1, -1)
        return list(dict.fromkeys((batches[row], lengths[token]) for row, token in places))

    def examples(self, example: Mapping[str, Any]) -> dict[str, Kwargs]:
        """Inputs at the ends of the ranges and in their middle, by the bucket's name: what is optimized for.

        Raises:
            WorkloadError: the example has no padding mask [batch, length].
        """
        return {f"b{batch}s{length}": resized(example, batch, length) for batch, length in self.optimized}


def _sizes(span: Span, least: int, *, halves: bool) -> list[int]:
    low, high = span
    found, power = {high}, 1
    while power < high:
        found |= {power, 3 * power // 2} if halves and power > 1 else {power}
        power *= 2
    return sorted(size for size in found if max(low, min(least, high)) <= size <= high)


def shape_of(kwargs: Mapping[str, Any]) -> Span | None:
    """(batch, length) of a call's padding mask; None without one."""
    import torch

    value = kwargs.get(MASK)
    if isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point():
        return int(value.shape[0]), int(value.shape[1])
    return None


def resized(kwargs: Mapping[str, Any], batch: int, length: int, *, padded: bool = False) -> Kwargs:
    """The arguments of a call with every tensor [batch, length] at another size.

    Args:
        kwargs: with a padding mask, named as transformers names it.
        batch, length: the size; smaller ones cut.
        padded: new rows and tokens are padding. Without it they repeat the call's own, for examples.

    Raises:
        WorkloadError: there is no padding mask [batch, length].
    """
    import torch

    own = shape_of(kwargs)
    if own is None:
        raise WorkloadError(
            f"ranges of shapes need inputs by name with {MASK} [batch, length], 1 for a token and 0 for padding: "
            "shorter inputs are padded, and only a mask keeps padding out of the answers"
        )

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:2] != own:
            return value
        return _tokens(_rows(value, batch), length, padded)

    return {name: change(value) for name, value in kwargs.items()}


def _rows(value: Tensor, batch: int) -> Tensor:
    """Rows cut, or more of them: copies of the first, which every model can read."""
    import torch

    missing = batch - value.shape[0]
    return value[:batch] if missing <= 0 else torch.cat([value, value[:1].expand(missing, *value.shape[1:])])


def _tokens(value: Tensor, length: int, padded: bool) -> Tensor:
    """Tokens cut, or more of them: zeros, which in the mask hide all others; or the same again."""
    import torch

    missing = length - value.shape[1]
    if missing <= 0:
        return value[:, :length].contiguous()
    if padded:
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1)
    turns = -(-length // value.shape[1])
    return value.repeat(1, turns, *([1] * (value.ndim - 2)))[:, :length].contiguous()
