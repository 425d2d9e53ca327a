"""The launches of mlstm_sequence: the recurrent kernel, and a norm where no program has all of DV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.launch_norm import TENSORS as NORM_TENSORS
from wavecrest.ops.mlstm.launch_norm import (
    Buffer,
    allocated,
    before_norm,
    norm_launch,
    picker,
    sequence_constants,
    sequence_strides,
    strides,
    unit_stride,
)
from wavecrest.ops.mlstm.sequence.kernel import _mlstm_recurrent_kernel

# tensors that the kernels write: h, the last states, and h before a norm that is a launch of its own
MEMORY = ("h", "c", "n", "m", "scratch")
# by name, what kernels get of a call and its memory
FIELDS = MlstmCall._fields + MEMORY
_READ = (
    "q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "cu_seqlens", "seq_starts", "seq_lens", "resets",
    "norm_weight", "output_gate",
)  # fmt: skip
TENSORS = (*_READ, "h", "c", "n", "m")
# where the norm is a separate launch
TENSORS_APART = (*_READ, "scratch", "c", "n", "m")


class Split(NamedTuple):
    """The division of a head over programs. `tiles`: programs over DV; `apart`: the norm is a separate launch."""

    tiles: int
    apart: bool


def split_of(call: MlstmCall, config: Config) -> Split:
    """The division of a call's heads over programs."""
    tiles = _layout.ceil_div(call.dv, config["BLOCK_V"])
    return Split(tiles, call.norm_weight is not None and tiles > 1)


def buffers_of(call: MlstmCall, split: Split) -> tuple[Buffer, ...]:
    """The memory that a call needs beside h, in the order of MEMORY."""
    single, shape = torch.float32, (call.sequences, call.heads)
    c = n = m = scratch = None
    if call.return_last_states:
        c, n = ((*shape, call.dk, call.dv), call.c_dtype), ((*shape, call.dk), single)
        m = ((*shape, 1), single) if call.exponential else None
    if split.apart:
        scratch = ((call.batch, call.tokens, call.heads, call.dv), single)
    return c, n, m, scratch


def planned(call: MlstmCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, one or two, without memory for what they write."""
    device = call.q.device if torch.compiler.is_compiling() else torch.device("meta")
    split, normed = split_of(call, config), call.norm_weight is not None
    h = torch.empty_like(call.v, device=device)
    memory = allocated(buffers_of(call, split), device)
    values = (*call, h, *memory)
    c, n, m, _ = memory
    gate = call.output_gate if normed and not split.apart else None
    h_strides = (*before_norm(call), 1) if split.apart else strides(h, 4)
    contiguous = unit_stride(call.q, call.k, call.v, gate, None if split.apart else h)
    walked = [strides(one, 4) for one in (call.q, call.k, call.v)] + [h_strides, strides(gate, 4)]
    align = _layout.alignment(0, *(one[:3] for one in walked)) if contiguous else 1
    c_strides, x_strides = strides(call.c_initial, 4), strides(c, 4)
    c_contiguous = unit_stride(call.c_initial, c)
    c_align = _layout.alignment(0, c_strides[:3], x_strides[:3]) if c_contiguous else 1
    sizes = (
        float(call.eps), float(call.gate_soft_cap), float(call.norm_eps), float(call.dk**-0.5), call.tokens,
        call.heads, split.tiles, *(part for one in walked for part in (*(s // align for s in one[:3]), one[3])),
        *strides(call.i, 3), *strides(call.f, 3), *(s // c_align for s in c_strides[:3]), c_strides[3],
        *strides(call.n_initial, 3), *strides(call.m_initial, 2), *(s // c_align for s in x_strides[:3]),
        x_strides[3], *strides(n, 3), *strides(m, 2), *strides(call.resets, 2),
        *strides(call.norm_weight, 1), *sequence_strides(call),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(call), "RESETS": call.resets is not None, "CAP": call.capped,
        "EXPONENTIAL": call.exponential, "NORMALIZE": call.normalize, "NORM": normed and not split.apart,
        "GATE": gate is not None, "INITIAL": call.c_initial is not None, "LAST": call.return_last_states,
        "CONTIGUOUS": contiguous, "ALIGN": align, "C_CONTIGUOUS": c_contiguous, "C_ALIGN": c_align, "DK": call.dk,
        "DV": call.dv, "BLOCK_K": _layout.power_of_two(call.dk),
    }  # fmt: skip
    grid = (call.sequences * call.heads * split.tiles,)
    tensors = picker(FIELDS, values, TENSORS_APART if split.apart else TENSORS)(values)
    found = [_launcher.Launch(_mlstm_recurrent_kernel, grid, (*tensors, *sizes), constants, config)]
    if split.apart:
        tensors = picker(FIELDS, values, NORM_TENSORS)(values)
        found.append(norm_launch(call, tensors, h, before_norm(call), None, arch))
    return found


def bind(call: MlstmCall, config: Config) -> Callable[[MlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that launches the kernels for calls with the signature of this one."""
    device, split = call.q.device, split_of(call, config)
    buffers = buffers_of(call, split)
    # the part of padded and packed rows that no launch writes is 0
    like = torch.empty_like if call.form == "whole" else torch.zeros_like
    # placeholders with the None pattern of a real call: q stands for each buffer that exists
    values = (*call, call.q, *(None if one is None else call.q for one in buffers))
    made = planned(call, config, _target.arch())
    start, tensors_of = (
        _launcher.starter(made[0], device),
        picker(FIELDS, values, TENSORS_APART if split.apart else TENSORS),
    )
    norm, norm_of = None, tensors_of
    if split.apart:
        norm, norm_of = _launcher.starter(made[1], device), picker(FIELDS, values, NORM_TENSORS)
    some, written = call.sequences * call.heads > 0, call.batch * call.tokens > 0
    last = None
    if call.return_last_states:
        last = picker(FIELDS, values, ("h", "c", "n", "m") if call.exponential else ("h", "c", "n"))

    def run(call: MlstmCall) -> Tensor | tuple[Tensor, ...]:
        h = like(call.v)
        now: list[Any] = [*call, h]
        for one in buffers:
            now.append(None if one is None else torch.empty(one[0], dtype=one[1], device=device))
        every = tuple(now)
        if some:
            start(*tensors_of(every))
            if norm is not None and written:
                norm(*norm_of(every))
        return h if last is None else last(every)

    return run
