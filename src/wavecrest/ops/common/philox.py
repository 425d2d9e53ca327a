"""Philox-4x32-10 in torch's integers: the random words that kernels have from `tl.philox`, on any device.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words; by halves, as int64 is too narrow for it."""
    high, low = (factor >> 16) * x, (factor & 0xFFFF) * x
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD


def philox(seed: int, counter: Words) -> Words:
    """Four random words of 32 bits for each counter of four, under a key of 64 bits: its low word first.

    Args:
        seed: the key, from 0 below 2**64.
        counter: int64, each from 0 below 2**32, of shapes that broadcast.

    Returns:
        int64, each from 0 below 2**32, of shapes that broadcast to that of the counters.
    """
    a, b, c, d = counter
    keys = [seed % 2**32, seed // 2**32]
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(_MULTIPLIERS[0], a), _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ keys[0], low_c, high_a ^ d ^ keys[1], low_a
        keys = [(key + step) % 2**32 for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return a, b, c, d
