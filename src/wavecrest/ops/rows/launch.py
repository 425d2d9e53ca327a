"""The row kernel's arguments and launches, and rows split over several programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.rows.call import RowCall
from wavecrest.ops.rows.kernel import KINDS, PEAK, PEAKS, ROUNDINGS, WHOLE, _row_kernel

# looks at what other programs of a row have published before a program works their share out by itself (a few ms);
# at least 1 where it is compiled, as triton 3.6 aborts on a loop that it knows not to run
PATIENCE = 1 << 14
# columns of a row whose programs exchange numbers. All of a row must run at once: those that wait for one that cannot
# start work out all shares themselves, one after the other. A row of 2²⁸ columns had no answer in 30 s (H200,
# 2026-11-25)
MOST_EXCHANGED = 1 << 20
# columns that 32 bits count, the last program's block among them
MOST_COUNTED = (1 << 31) - (1 << 16)


def refuse_width(columns: int, exchanges: bool) -> str | None:
    """The reason why the kernel takes no row of that width; `exchanges`: a result needs all of its row."""
    if exchanges and columns > MOST_EXCHANGED:
        return f"splits rows over programs that run at once: up to {MOST_EXCHANGED} columns, not {columns}"
    return f"counts columns in 32 bits, and there are {columns}" if columns > MOST_COUNTED else None


def patience() -> int:
    """PATIENCE; 0 in the interpreter, which runs one program after another."""
    return 0 if _triton.interpreted else PATIENCE


def parts_of(columns: int, config: Config) -> int:
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
    count = parts_of(x.shape[-1], config)
    return None if count == 1 else (_layout.row_count(x), exchanges, count)


def launch(
    call: RowCall,
    y: Tensor,
    h: Tensor,
    scale: Tensor,
    slots: Tensor,
    config: Config,
    rounding: int,
    arch: Arch | None = None,
) -> _launcher.Launch:
    """The kernel's launch: y, h (the sum with the residual), scale and slots are memory for what it writes.

    `rounding`: one of ROUNDINGS, 0 or PEAK; `arch`: None for the current one.
    """
    x, residual, weight, bias, how = call.x, call.residual, call.weight, call.bias, call.quantization
    if rounding == ROUNDINGS["group", False] and config["BLOCK_N"] % _quantized.GROUP != 0:
        raise InvalidArgument(f"groups of {_quantized.GROUP} columns need a BLOCK_N that they fill, not {config!r}")
    arch = arch or _target.arch()
    operands = (x,) if residual is None else (x, residual)
    rows, leading, size1, size2, strides = _layout.layout(*operands)
    columns = x.shape[-1]
    align = _layout.alignment(columns, *strides)
    parts = parts_of(columns, config)
    early, options = _pdl.start_of(config, arch, _pdl.EARLY)
    return _launcher.Launch(
        _row_kernel,
        ((rows + config["BLOCK_M"] - 1) // config["BLOCK_M"] * parts,),
        (
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            h,
            scale,
            slots,
            rows,
            columns // align,
            parts,
            size1,
            size2,
            *(stride // align for stride in strides[0]),
            x.stride(-1),
            *(stride // align for stride in strides[-1]),
            operands[-1].stride(-1),
            0 if weight is None else weight.stride(0),
            0 if bias is None else bias.stride(0),
            0,
            call.eps,
        ),
        {
            "KIND": KINDS[call.kind],
            "RESIDUAL": residual is not None,
            "KEEPS_SUM": call.keeps_sum,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "ROUNDING": rounding,
            "LARGEST": 0.0 if how is None else _quantized.LARGEST.get(how.dtype, 0.0),
            "GROUP": _quantized.GROUP,
            "LEADING": leading,
            "ALIGN": align,
            "EVEN": columns % config["BLOCK_N"] == 0,
            "PARTS": _words(parts, config, arch),
            "FINITE": call.kind in ("rms", "layer") and (arch is None or arch.vendor == "nvidia"),
            "PATIENCE": patience(),
            "LOOK": _target.look(arch) if parts > 1 else 0,
            "PDL": _pdl.overlaps(arch),
            "EARLY": early,
        },
        options,
    )


def _words(parts: int, config: Config, arch: Arch | None) -> int:
    """Words that a program of a split row looks at: no fewer than it has threads.

    Triton keeps fewer elements than threads several times over. Copies that were loaded when the last part was just
    about to be published would differ, and with them what the program's warps do next.
    """
    if parts == 1:
        return 1
    return max(_layout.power_of_two(parts), config["num_warps"] * (32 if arch is None else arch.wave_size))


def rounding_of(how: Quantization | None) -> int:
    """How the kernel rounds the result: a value of `kernel.ROUNDINGS`, 0 without quantization."""
    return 0 if how is None else ROUNDINGS[how.granularity, how.scale is not None]


def bind_outputs(call: RowCall) -> Callable[[RowCall], tuple[Tensor, Tensor, Tensor]]:
    """A function that allocates the result, the sum with the residual, and the scale.

    For calls with the signature of this one. x takes the place of what a call does not have.
    """
    x, how = call.x, call.quantization
    # the keyword costs 0.2 µs a call
    keywords: dict[str, Any] = {} if x.is_contiguous() else {"memory_format": torch.contiguous_format}
    if how is None:
        if call.residual is None or not call.keeps_sum:
            return lambda call: (torch.empty_like(call.x, **keywords), call.x, call.x)
        return lambda call: (torch.empty_like(call.x, **keywords), torch.empty_like(call.x, **keywords), call.x)
    # not `how` itself, which has the scale of one call
    shape, dtype, device = _quantized.scale_shape(x.shape, how.granularity), how.dtype, x.device
    # a program writes the scales of its rows; without elements no program runs
    some = x.numel() > 0

    def outputs(call: RowCall) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = call.x, call.scale
        y = torch.empty_like(x, dtype=dtype, **keywords)
        h = torch.empty_like(x, **keywords) if call.residual is not None and call.keeps_sum else x
        if scale is None:
            scale = (torch.empty if some else torch.ones)(shape, dtype=torch.float32, device=device)
        return y, h, scale.contiguous()

    return outputs


def _bind_slots(x: Tensor, config: Config, rounding: int) -> Callable[[], Tensor] | None:
    """A function that allocates zeroed slots, through which programs exchange numbers; None if they exchange none."""
    shape, device = slots_shape(x, config, exchanges=2), x.device
    if rounding == WHOLE:
        return lambda: torch.zeros(PEAKS, dtype=torch.int32, device=device)
    if shape is None:
        return None
    return lambda: torch.zeros(shape, dtype=torch.int64, device=device)


def bind(call: RowCall, config: Config) -> Callable[[RowCall], Any]:
    """The function that launches the kernel for calls with the signature of this one."""
    x, how = call.x, call.quantization
    rounding = rounding_of(how)
    made = launch(call, x, x, x, x, config, rounding)
    start = _launcher.starter(made, x.device)
    look = None
    if rounding == WHOLE:
        look = _launcher.starter(launch(call, x, x, x, x, config, PEAK), x.device)
    make_slots = _bind_slots(x, config, rounding)
    outputs = bind_outputs(call)
    some, scaled = x.numel() > 0, how is not None and call.kind != "scaled"
    two = call.residual is not None and call.keeps_sum

    def run(call: RowCall) -> Any:
        x, residual, weight, bias = call.x, call.residual, call.weight, call.bias
        y, h, scale = outputs(call)
        if some:
            tensors = (
                x,
                x if residual is None else residual,
                x if weight is None else weight,
                x if bias is None else bias,
                y,
                h,
                scale,
                x if make_slots is None else make_slots(),
            )
            if look is not None:
                look(*tensors)
            start(*tensors)
        if not scaled:
            return (y, h) if two else y
        return (y, scale, h) if two else (y, scale)

    return run
