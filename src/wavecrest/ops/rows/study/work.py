"""Work of the row kernel, for the cost model."""

from __future__ import annotations

from dataclasses import replace

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch
from wavecrest.ops.rows.config import Shape
from wavecrest.ops.rows.launch import parts_of

# operations a value: unpacked, reduced, mapped, packed; and more of an exponential, or of rounding to 8 bits
_OPERATIONS = {"identity": 4.0, "scaled": 6.0, "rms": 8.0, "layer": 12.0, "softmax": 18.0}
_ROUNDING_OPERATIONS = 8.0
# cycles until a split row's numbers are there: written to the L2, and read from it
_SPLIT_CYCLES = 1000.0


def work(shape: Shape, rows: int, columns: int, config: Config, arch: Arch, keeps_sum: bool = True) -> tuple[Work, ...]:
    """Work of the kernel, for the cost model; empty where the rows are not known.

    A program of a split row waits once for the others' numbers.
    """
    if rows == 0 or columns == 0:
        return ()
    size = 4 if shape.dtype == "float32" else 2
    # bytes of a value in and out: of both where there is a residual
    read, written = (1 if shape.kind == "scaled" else size), (1 if shape.rounding and shape.kind != "scaled" else size)
    if shape.residual:
        read, written = 2 * read, written + (size if keeps_sum else 0)
    parts, block = parts_of(columns, config), config["BLOCK_M"] * config["BLOCK_N"]
    programs = _layout.ceil_div(rows, config["BLOCK_M"]) * parts
    values = rows * columns / programs
    each = _OPERATIONS[shape.kind] + (_ROUNDING_OPERATIONS if shape.rounding and shape.kind != "scaled" else 0.0)
    registers = block / (config["num_warps"] * arch.wave_size) * (0.5 if config["PACKED"] else 1.0) * (read / size)
    made = _work.moved(
        config, programs, values * read, values * written, registers=registers, operations=block * each
    )  # fmt: skip
    waits = _work.REDUCED_CYCLES + (_work.EXCHANGED_CYCLES if config["num_warps"] > 1 else 0.0)
    return (replace(made, chain=0.0 if shape.tiled else waits + (_SPLIT_CYCLES if parts > 1 else 0.0)),)
