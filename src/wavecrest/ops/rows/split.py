"""Rows split over several programs."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument

# looks at what other programs of a row have published before a program works their share out by itself (a few ms);
# at least 1 where it is compiled, as triton 3.6 aborts on a loop that it knows not to run
PATIENCE = 1 << 14
# columns of a row whose programs exchange numbers. All of a row must run at once: those that wait for one that cannot
# start work out all shares themselves, one after the other. A row of 2²⁸ columns had no answer in 30 s (H200,
# 2026-11-25)
MOST_EXCHANGED = 1 << 20
# columns that 32 bits count, the last program's block among them
MOST_COUNTED = (1 << 31) - (1 << 16)


def refusal(columns: int, exchanges: bool) -> str | None:
    """The reason why the kernel takes no row of that width; `exchanges`: a result needs all of its row."""
    if exchanges and columns > MOST_EXCHANGED:
        return f"splits rows over programs that run at once: up to {MOST_EXCHANGED} columns, not {columns}"
    return f"counts columns in 32 bits, and there are {columns}" if columns > MOST_COUNTED else None


def patience() -> int:
    """PATIENCE; 0 in the interpreter, which runs one program after another."""
    return 0 if _triton.interpreted else PATIENCE


def parts(columns: int, config: Config) -> int:
    """Over how many programs a row is split.

    Raises:
        InvalidArgument: several rows a program, and a row wider than it.
    """
    count = max(1, (columns + config["BLOCK_N"] - 1) // config["BLOCK_N"])
    if count > 1 and config["BLOCK_M"] != 1:
        raise InvalidArgument(f"a row of {columns} columns can be split only with one row a program, not by {config!r}")
    return count


def slots_shape(x: Tensor, config: Config, exchanges: int) -> tuple[int, ...] | None:
    """The shape of the zeros that split rows exchange through; None where rows are not split."""
    count = parts(x.shape[-1], config)
    return None if count == 1 else (_layout.row_count(x), exchanges, count)
