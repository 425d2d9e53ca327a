"""Code that the launches of the mLSTM kernels share: strides, places of the tensors, and the launch of the norm."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.kernel_norm import _mlstm_norm_kernel

FORMS = {"whole": 0, "padded": 1, "packed": 2}
# elements of a program and of one of its lanes. For a sequence a program is one warp, whose sums wait for no barrier:
# behind the chunks of 4 × 2,048 tokens of 8 heads of DV = 512 it takes 49 µs, as its bytes do, and 60 with the tile
# of a step. A step has few rows and waits for each of them: of eight in a row one of xLSTM 7B took 3,634 µs with the
# tile of a sequence, 3,617 with its own (H200, 2026-11-23)
SEQUENCE, STEP = (1024, 32), (4096, 16)
# rows that 32 bits count: the last program may have some behind the last one
MOST_NARROW = 2**31 - max(SEQUENCE[0], STEP[0])
# the tensors of its launch behind the kernel of sequences, by their fields; None: of a step alone
TENSORS = (
    "scratch", "norm_weight", "output_gate", "cu_seqlens", "seq_starts", "seq_lens", None, None, "h", None, None,
)  # fmt: skip


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of a tensor, 0 for dimensions of one element; zeros for None."""
    if tensor is None:
        return (0,) * dims
    found = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple(found[:dims]) + (0,) * (dims - len(found))


def unit_stride(*tensors: Tensor | None) -> bool:
    """True if elements of the last dimension lie next to each other in all of them."""
    return all(one is None or one.shape[-1] <= 1 or one.stride(-1) == 1 for one in tensors)


def norm_launch(
    call: MlstmCall,
    tensors: tuple[Tensor, ...],
    y: Tensor,
    scratch: tuple[int, int, int],
    states: tuple[Tensor | None, Tensor | None] | None,
    arch: Arch | None,
    early: bool = False,
    tile: tuple[int, int] = SEQUENCE,
) -> _launcher.Launch:
    """The launch that makes y of a call from h before the norm, or moves a step's n and m, or both.

    Args:
        call: the call.
        tensors: what the kernel gets for its pointers.
        y: the result [B, NH, S, DV], for its strides.
        scratch: the strides of rows, heads and tokens of h before the norm, whose last dimension is contiguous.
        states: the caller's n and m, for their strides, where the kernel writes them.
        arch: the architecture it is compiled for.
        early: it starts while the launch before it still runs, which allows that, and waits for its end.
        tile: SEQUENCE or STEP.
    """
    gate = call.output_gate
    contiguous = unit_stride(y, gate)
    y_strides, gate_strides = strides(y, 4), strides(gate, 4)
    align = _layout.alignment(0, scratch, y_strides[:3], gate_strides[:3]) if contiguous else 1
    block_v = _layout.power_of_two(call.dv)
    block_k = _layout.power_of_two(call.dk) if states is not None else 1
    elements, lane = tile
    block_m = max(1, elements // max(block_v, block_k))
    rows = call.batch * call.heads * call.tokens
    wave = 32 if arch is None else arch.wave_size
    constants: dict[str, Any] = {
        **sequence_constants(call), "NORM": call.norm_weight is not None, "GATE": gate is not None,
        "STATES": states is not None, "M": states is not None and states[1] is not None, "PDL": early,
        "CONTIGUOUS": contiguous, "W_CONTIGUOUS": unit_stride(call.norm_weight), "ALIGN": align,
        "WIDE": rows > MOST_NARROW,
        "DK": call.dk, "DV": call.dv, "BLOCK_K": block_k, "BLOCK_V": block_v, "BLOCK_M": block_m,
    }  # fmt: skip
    n_strides = strides(None if states is None else states[0], 3)
    m_strides = strides(None if states is None else states[1], 2)
    sizes = (
        float(call.norm_eps), call.tokens, call.heads, rows, call.sequences,
        *(one // align for one in scratch), *(one // align for one in y_strides[:3]), y_strides[3],
        *(one // align for one in gate_strides[:3]), gate_strides[3], *strides(call.norm_weight, 1),
        *sequence_strides(call), *n_strides, *m_strides,
    )  # fmt: skip
    warps = max(1, min(8, block_m * block_v // (lane * wave)))
    grid = (_layout.ceil_div(rows, block_m),)
    config = Config(num_warps=warps, **({"launch_pdl": 1} if early else {}))
    return _launcher.Launch(_mlstm_norm_kernel, grid, (*tensors, *sizes), constants, config)


def sequence_constants(call: MlstmCall) -> dict[str, Any]:
    """The constants that say where sequences lie."""
    starts, lens = call.seq_starts is not None, call.seq_lens is not None
    return {"FORM": FORMS[call.form], "STARTS": starts, "LENS": lens}


def sequence_strides(call: MlstmCall) -> tuple[int, ...]:
    """The strides of cu_seqlens, seq_starts and seq_lens."""
    return (*strides(call.cu_seqlens, 1), *strides(call.seq_starts, 1), *strides(call.seq_lens, 1))


# shape and dtype of memory that a call needs; None where it needs none
Buffer = tuple[tuple[int, ...], torch.dtype] | None


def allocated(buffers: tuple[Buffer, ...], device: torch.device | str) -> tuple[Tensor | None, ...]:
    """Memory for buffers, uninitialised."""
    return tuple(None if one is None else torch.empty(one[0], dtype=one[1], device=device) for one in buffers)


def picker(
    fields: tuple[str, ...], values: tuple[Any, ...], names: tuple[str | None, ...]
) -> Callable[[tuple[Any, ...]], tuple[Tensor, ...]]:
    """A function that picks a kernel's tensors from a tuple like `values` by field name.

    Fields that are None, or have no name, are passed as the first value and not accessed by the kernel. Which fields
    are None is fixed by a call's signature.
    """
    places = [0 if name is None else fields.index(name) for name in names]
    picked: Callable[[tuple[Any, ...]], tuple[Tensor, ...]] = itemgetter(
        *[0 if values[place] is None else place for place in places]
    )
    return picked


def before_norm(call: MlstmCall) -> tuple[int, int, int]:
    """The strides of rows, heads and tokens of h before the norm: [B, S, NH, DV], as models lay it out."""
    heads, tokens, dv = call.heads, call.tokens, call.dv
    return tokens * heads * dv, dv, heads * dv
