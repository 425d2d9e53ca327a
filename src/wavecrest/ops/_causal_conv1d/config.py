"""The configuration of the causal convolution where nothing measured is known."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config

# tokens of a program: each input is read by as many of them as the convolution has taps beyond the first
TOKENS = 32
CHANNELS = 128


def default(tokens: int, channels: int, dtype: str, wave_size: int) -> Config:
    """Up to 32 tokens of 128 channels a program, of fewer tokens more; 16 bytes of a token a lane.

    Reasoned, not measured. `tokens` is 0 where it is not known.
    """
    lane = 4 if dtype == "float32" else 8
    block_s = TOKENS if tokens == 0 else min(TOKENS, _layout.power_of_two(tokens))
    # a warp has something to do for each of its lanes
    block_c = min(max(CHANNELS, lane * wave_size // block_s), _layout.power_of_two(channels))
    return Config(BLOCK_S=block_s, BLOCK_C=block_c, num_warps=max(1, min(4, block_s * block_c // (lane * wave_size))))
