"""Work of the rotary kernel, for the cost model."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch

# operations for a rotated value: two multiplications, an addition, two conversions, and its addresses
_TURNED_OPERATIONS = 8.0


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """Work of the kernel, for the cost model; empty where the number of tokens is not known.

    A row of the tables is read by each program of its token.
    """
    tokens, heads, head_dim, rotary_dim, dtype, table, *_ = key
    if 0 in (tokens, heads):
        return ()
    size, table_size = (4 if name == "float32" else 2 for name in (dtype, table))
    block_t, block_h, width = config["BLOCK_T"], config["BLOCK_H"], _layout.power_of_two(head_dim)
    programs = _layout.ceil_div(tokens, block_t) * _layout.ceil_div(heads, block_h)
    values = min(block_t, tokens) * min(block_h, heads) * head_dim
    angles = min(block_t, tokens) * rotary_dim * table_size
    return (
        _work.moved(
            config, programs, values * size + angles, values * size,
            registers=2 * block_t * block_h * width / (config["num_warps"] * arch.wave_size),
            operations=block_t * block_h * width * _TURNED_OPERATIONS,
            fresh=tokens * (heads * head_dim * size + rotary_dim * table_size),
        ),
    )  # fmt: skip
