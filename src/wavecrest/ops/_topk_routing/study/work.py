"""Work of the router's kernel, for the cost model."""

from __future__ import annotations

from dataclasses import replace

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch

# vector operations of a score, and of a score each time the largest is taken
_SCORE_OPERATIONS, _TAKEN_OPERATIONS = 12.0, 6.0


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """Work of the kernel; empty where the number of tokens is not known."""
    tokens, experts, k, dtype, *_ = key
    if tokens == 0:
        return ()
    rows, size = config["BLOCK_T"], 4 if dtype == "float32" else 2
    held = rows * _layout.power_of_two(experts)
    made = _work.moved(
        config, _layout.ceil_div(tokens, rows), min(rows, tokens) * experts * size, min(rows, tokens) * k * 8,
        registers=4 * held / (config["num_warps"] * arch.wave_size),
        operations=held * (_SCORE_OPERATIONS + k * _TAKEN_OPERATIONS),
    )  # fmt: skip
    return (replace(made, chain=3.0 * k * _work.REDUCED_CYCLES),)
