"""slstm_sequence in one launch whose programs share a head and wait for each other at each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.custom_op import configured_operation_of
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.launch_norm import picker, strides, unit_stride
from wavecrest.ops.slstm.backend import refuse as _refuse
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence.config import (
    KEPT,
    KEPT_AT_ONCE,
    block_d,
    default_cooperative,
    kept_bytes,
    programs,
)
from wavecrest.ops.slstm.sequence.kernel_cooperative import _slstm_cooperative_kernel
from wavecrest.ops.slstm.sequence.launch_steps import (
    PLACES_ALIGN,
    fake,
    first_states,
    has_places,
    places_of,
    result_of,
)

# what a configuration holds, in the order in which a graph has its values
PARAMETERS = ("BLOCK_B", "BLOCK_N", "num_warps", "num_stages")
# by name, what the kernel gets
TENSORS = ("x", "r", "bias", "places", "y", "slots", "h", "c", "n", "m")
# looks at missing words, of about 1 µs each, after which a program gives up; at least 1 where it is compiled, as triton
# 3.6 aborts on a loop that it knows not to run. None in the interpreter, where nothing comes while a program waits
PATIENCE = 0 if _triton.interpreted else 1 << 24


def keeps_weights(arch: Arch) -> bool:
    """False for RDNA, where weights that are kept spill."""
    return arch.vendor != "amd" or arch.wave_size == 64


def refuse(call: SlstmCall) -> str | None:
    """The reason why the kernel cannot run a call on its device; None if it can."""
    reason = _refuse(call)
    if reason is not None:
        return reason
    arch, units, dtype = _target.arch(), _target.units(str(call.x.device)), dtype_name(call.x)
    if arch is not None and not keeps_weights(arch):
        return f"keeps weights in registers, which {arch.name} has too few of"
    columns = default_cooperative(call.heads, call.head_dim, dtype, arch, units)["BLOCK_N"]
    if kept_bytes(call.head_dim, columns, dtype, arch) > KEPT:
        return f"keeps up to {KEPT >> 10} KiB of a head's weights a program: {columns} columns of this head have more"
    needed = programs(call.heads, call.head_dim, columns)
    if needed > units:
        return f"needs {needed} programs that run at once, one a compute unit, and there are {units}"
    return None


def _parts(call: SlstmCall, config: Config) -> int:
    """Parts in which a program's weights are loaded and h is looked at."""
    # without the second terms of float32, which are made in registers
    return 1 if kept_bytes(call.head_dim, config["BLOCK_N"], dtype_name(call.x), None) <= KEPT_AT_ONCE else 2


def _misfit(call: SlstmCall, config: Config, units: int, arch: Arch | None) -> str | None:
    """The reason why a configuration cannot run a call on a device; None if it can."""
    needed = programs(call.heads, call.head_dim, config["BLOCK_N"])
    if needed > units:
        return f"{needed} programs would have to run at once, and {units} can"
    # copies of a word, which Triton has threads keep where there are more threads, would be loaded at other times
    threads = config["num_warps"] * (32 if arch is None else arch.wave_size)
    if threads > config["BLOCK_B"] * block_d(call.head_dim) // _parts(call, config):
        return f"its {threads} threads are more than the elements of h that they look at"
    return None


def planned(call: SlstmCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write: as many rows at a time as the device can.

    In Triton's interpreter, which runs programs one after the other, also a launch for each token.

    Raises:
        InvalidArgument: the device cannot run the programs of this configuration at once.
    """
    if call.tokens == 0 or call.batch == 0:
        return []
    # a call on "meta" is of any device of its architecture
    units = arch.compute_units if call.x.is_meta and arch is not None else _target.units(str(call.x.device))
    reason = _misfit(call, config, units, arch)
    if reason is not None:
        raise InvalidArgument(f"slstm_sequence: {config!r} does not fit: {reason}")
    x, meta = call.x, torch.device("meta")
    shape = (call.batch, call.heads, call.head_dim)
    state = torch.empty(shape, dtype=torch.float32, device=meta)
    y = torch.empty((call.batch, call.tokens, *shape[1:]), dtype=x.dtype, device=meta)
    wide = x.dtype == torch.float32
    slots = torch.empty((2, *shape), dtype=torch.int64 if wide else torch.int32, device=meta)
    places = torch.empty((call.tokens, call.batch), dtype=torch.int32, device=meta) if has_places(call) else None
    values = (x, call.r, call.bias, places, y, slots, *[state] * 4)
    tensors = picker(TENSORS, values, TENSORS)(values)
    contiguous = unit_stride(x, call.r)
    x_strides, r_strides = strides(x, 5), strides(call.r, 4)
    align = _layout.alignment(0, x_strides[:4], r_strides[:3]) if contiguous else 1
    block_b, tiles = config["BLOCK_B"], _layout.ceil_div(call.head_dim, config["BLOCK_N"])
    constants: dict[str, Any] = {
        "PLACES": places is not None, "EXPONENTIAL": call.forget_gate == "exp", "BIAS": call.bias is not None,
        "CONTIGUOUS": contiguous, "ALIGN": align, "D": call.head_dim, "BLOCK_D": block_d(call.head_dim),
        "PARTS": _parts(call, config), "PRECISION": _target.products(call.x.dtype, arch), "WIDE": wide,
        "XCDS": 1 if arch is None else arch.xcds, "LOOK": _target.look(arch), "PATIENCE": PATIENCE,
        # the driver starts all of its programs, or says that they do not fit
        "launch_cooperative_grid": True,
    }  # fmt: skip
    at_once = units // (tiles * call.heads)
    found = []
    for begin, end in _spans(call):
        for first in range(0, call.batch, at_once * block_b):
            groups = min(at_once, _layout.ceil_div(call.batch - first, block_b))
            sizes = (
                0, begin, end, first, call.batch, call.tokens, call.heads, tiles,
                *(one // align for one in x_strides[:4]), x_strides[4], *(one // align for one in r_strides[:3]),
                r_strides[3], *strides(call.bias, 3), _layout.ceil_div(call.batch, PLACES_ALIGN) * PLACES_ALIGN,
            )  # fmt: skip
            grid = (tiles * call.heads * groups,)
            found.append(_launcher.Launch(_slstm_cooperative_kernel, grid, (*tensors, *sizes), constants, config))
    return found


def _spans(call: SlstmCall) -> Iterator[tuple[int, int]]:
    """(first token, token behind the last) of each launch of the same rows."""
    if _triton.interpreted:
        return ((token, token + 1) for token in range(call.tokens))
    return iter([(0, call.tokens)])


def slots_of(call: SlstmCall) -> Tensor:
    """Words for h before odd and before even tokens, [2, B, NH, D]; those before the first token are there."""
    # a value and its tag, 0 for the first token
    pairs = call.x.new_zeros((2, call.batch, call.heads, call.head_dim, 2))
    if call.h_initial is not None:
        pairs[1, ..., 0].copy_(call.h_initial)
    return pairs.view(torch.int64 if call.x.dtype == torch.float32 else torch.int32).squeeze(-1)


def bind(call: SlstmCall, config: Config) -> Callable[[SlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that launches the kernel for calls with the signature of this one."""
    if torch.compiler.is_compiling():
        # one operation: what it launches depends on the device
        values = [config.kwargs[name] for name in PARAMETERS]
        return lambda call: result_of(call, _in_graph(call, values))
    starts = [_launcher.starter(one, call.x.device) for one in planned(call, config, _target.arch())]
    padded, last = has_places(call), call.return_last_states
    # placeholders with the None pattern of a real call: x stands for each result
    given = (call.x, call.r, call.bias, call.x if padded else None, *[call.x] * 6)
    tensors_of = picker(TENSORS, given, TENSORS)

    def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
        y = call.x.new_empty((call.batch, call.tokens, call.heads, call.head_dim))
        states = first_states(call)
        if starts:
            places = places_of(call) if padded else None
            tensors = tensors_of((call.x, call.r, call.bias, places, y, slots_of(call), *states))
            for start in starts:
                start(*tensors)
        return (y, *states) if last else y

    return run


def _run(call: SlstmCall, values: list[int]) -> list[Tensor]:
    found = bind(call, Config(**dict(zip(PARAMETERS, values, strict=True))))(call)
    return list(found) if isinstance(found, tuple) else [found]


_in_graph = configured_operation_of("slstm_cooperative", SlstmCall, _run, fake)
