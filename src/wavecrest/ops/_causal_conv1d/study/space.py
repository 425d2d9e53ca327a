"""The configurations of the causal convolution that `wavecrest tune causal_conv1d` tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._causal_conv1d.config import default


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    tokens, channels, dtype = key[1], key[2], key[4]
    first = default(tokens, channels, dtype, arch.wave_size)
    yield first
    most_c, most_s = _layout.power_of_two(channels), _layout.power_of_two(tokens) if tokens else 64
    for block_s, block_c, warps in itertools.product((1, 4, 16, 32, 64), (32, 64, 128, 256), (1, 2, 4, 8)):
        made = Config(BLOCK_S=block_s, BLOCK_C=block_c, num_warps=warps)
        # 2 to 32 elements a lane
        each = block_s * block_c // (warps * arch.wave_size)
        if block_c <= most_c and block_s <= most_s and 2 <= each <= 32 and made != first:
            yield made
