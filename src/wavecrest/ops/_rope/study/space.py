"""The rotary kernel's configurations that `wavecrest tune rope` tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._rope.config import configured

# bytes of x of a thread
_THREAD_BYTES = (16, 32, 64, 128)
# tokens and heads of a program
_TOKENS, _HEADS = (1, 2, 4), (4, 8, 16, 32, 64)


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = configured(key[0], key[1], key[2], key[3], key[4], arch.wave_size)
    yield first
    row = _layout.power_of_two(key[2]) * (4 if key[4] == "float32" else 2)
    # the rotated columns, or the others, of two rows a thread at least, and no more than registers hold
    for tokens, heads, each in itertools.product(_TOKENS, _HEADS, _THREAD_BYTES):
        warps = tokens * heads * row // (each * arch.wave_size)
        if heads > _layout.power_of_two(key[1]) or not 1 <= warps <= 16 or not 1024 <= tokens * heads * row <= 32768:
            continue
        made = Config(BLOCK_T=tokens, BLOCK_H=heads, num_warps=warps)
        if made != first:
            yield made
