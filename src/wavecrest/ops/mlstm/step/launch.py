"""The launches of mlstm_step: the kernel of a step, and where programs are not counted a second launch after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmStepCall
from wavecrest.ops.mlstm.launch_norm import (
    STEP,
    Buffer,
    allocated,
    before_norm,
    norm_launch,
    picker,
    strides,
    unit_stride,
)
from wavecrest.ops.mlstm.step.kernel import _mlstm_step_kernel

# tensors that the kernels write beside the caller's memory: h, h before the norm, new states
MEMORY = ("h", "scratch", "c_new", "n_new", "m_new")
# by name, what kernels get of a call and its memory
FIELDS = MlstmStepCall._fields + MEMORY


class Split(NamedTuple):
    """The division of a head: programs over DV, and the work that is left after all of them.

    `apart`: the norm is left, which needs all of DV. `copies`: in place, n and m are left to be copied to the caller's
    memory, which all programs of a head read. `counted`: the last program of a head to finish does this work, else a
    second launch does.
    """

    tiles: int
    apart: bool
    copies: bool
    counted: bool

    @property
    def last(self) -> bool:
        """True if programs are counted, and the last of a head has something to do."""
        return self.counted and (self.apart or self.copies)

    @property
    def second(self) -> bool:
        """True if there is a second launch."""
        return not self.counted and (self.apart or self.copies)


def split_of(call: MlstmStepCall, config: Config) -> Split:
    """The division of a call's heads over programs."""
    tiles = _layout.ceil_div(call.dv, config["BLOCK_V"])
    apart, copies = call.norm_weight is not None and tiles > 1, call.in_place and tiles > 1
    return Split(tiles, apart, copies, call.arrivals is not None)


def buffers_of(call: MlstmStepCall, split: Split) -> tuple[Buffer, ...]:
    """The memory that a call needs beside h and the caller's, in the order of MEMORY."""
    single, shape = torch.float32, (call.batch, call.heads)
    scratch = ((*shape, call.dv), single) if split.apart else None
    c = n = m = None
    if not call.in_place:
        c = ((*shape, call.dk, call.dv), call.c_dtype)
    if not call.in_place or (split.copies and split.second):
        n = ((*shape, call.dk), single)
        m = ((*shape, 1), single) if call.input_gate == "exp" else None
    return scratch, c, n, m


def written_of(call: MlstmStepCall, split: Split) -> tuple[str, str, str]:
    """The fields that the step kernel writes c, n and m to."""
    if not call.in_place:
        return "c_new", "n_new", "m_new"
    # a second launch copies n and m to the caller's: all programs of a head read those
    return ("c", "n_new", "m_new") if split.copies and split.second else ("c", "n", "m")


def tensors_of(call: MlstmStepCall, split: Split) -> tuple[str | None, ...]:
    """The fields of the step kernel's tensors; None where it gets nothing."""
    states: tuple[str | None, ...] = ("c", "n", "m")
    if call.in_place:
        states = (None, "n", "m") if split.copies and split.second else (None, None, None)
    h = "scratch" if split.apart and split.second else "h"
    arrivals = "arrivals" if split.last else None
    return (
        "q", "k", "v", "i", "f", *states, "norm_weight", "output_gate", h, *written_of(call, split), "scratch",
        arrivals,
    )  # fmt: skip


def norm_tensors_of(split: Split) -> tuple[str | None, ...]:
    """The fields of the second launch's tensors; None where it gets nothing."""
    made, kept = (("n_new", "m_new"), ("n", "m")) if split.copies else ((None, None), (None, None))
    return ("scratch", "norm_weight", "output_gate", None, None, None, *made, "h", *kept)


def planned(call: MlstmStepCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, one or two, without memory for what they write."""
    device = call.q.device if torch.compiler.is_compiling() else torch.device("meta")
    split, normed, overlaps = split_of(call, config), call.norm_weight is not None, _pdl.overlaps(arch)
    early, options = _pdl.start_of(config, arch)
    # for strides: a sequence of one token
    row = call.sequence()
    h = torch.empty_like(row.v, device=device)
    values: tuple[Any, ...] = (*call, h, *allocated(buffers_of(call, split), device))
    c, n, m = (values[FIELDS.index(name)] for name in written_of(call, split))
    # True: a second launch makes h of what this one leaves in scratch
    later = split.apart and split.second
    gate = row.output_gate if normed and not later else None
    h_strides = (*before_norm(row), 1) if later else strides(h, 4)
    contiguous = unit_stride(row.q, row.k, row.v, gate, None if later else h)
    walked = [strides(one, 4) for one in (row.q, row.k, row.v)] + [h_strides, strides(gate, 4)]
    align = _layout.alignment(0, *(one[:2] for one in walked)) if contiguous else 1
    c_strides, x_strides = strides(row.c_initial, 4), strides(c, 4)
    c_contiguous = unit_stride(row.c_initial, c)
    c_align = _layout.alignment(0, c_strides[:3], x_strides[:3]) if c_contiguous else 1
    sizes = (
        float(row.eps), float(row.gate_soft_cap), float(row.norm_eps), float(row.dk**-0.5), row.heads,
        split.tiles, *(part for one in walked for part in (one[0] // align, one[1] // align, one[3])),
        *strides(row.i, 2), *strides(row.f, 2), *(s // c_align for s in c_strides[:3]), c_strides[3],
        *strides(row.n_initial, 3), *strides(row.m_initial, 2), *(s // c_align for s in x_strides[:3]),
        x_strides[3], *strides(n, 3), *strides(m, 2), *strides(row.norm_weight, 1),
    )  # fmt: skip
    lanes = config["num_warps"] * (64 if arch is None else arch.wave_size)
    constants: dict[str, Any] = {
        "CAP": row.capped, "EXPONENTIAL": row.exponential, "NORMALIZE": row.normalize,
        "NORM": normed and not later, "GATE": gate is not None, "IN_PLACE": call.in_place,
        "COPIES": split.copies and split.second, "SECOND": split.second, "LAST": split.last,
        "DRAIN": arch is not None and arch.vendor == "amd",
        "BARRIER": call.in_place and config["BLOCK_K"] * config["BLOCK_V"] < lanes, "PDL": overlaps, "EARLY": early,
        "CONTIGUOUS": contiguous, "ALIGN": align, "C_CONTIGUOUS": c_contiguous, "C_ALIGN": c_align,
        "DK": row.dk, "DV": row.dv,
        "BLOCK_D": _layout.power_of_two(row.dk), "BLOCK_H": _layout.power_of_two(row.dv) if split.last else 1,
    }  # fmt: skip
    grid = (call.batch * call.heads * split.tiles,)
    tensors = picker(FIELDS, values, tensors_of(call, split))(values)
    found = [_launcher.Launch(_mlstm_step_kernel, grid, (*tensors, *sizes), constants, options)]
    if split.second:
        states = (call.n, call.m) if split.copies else None
        tensors = picker(FIELDS, values, norm_tensors_of(split))(values)
        found.append(norm_launch(row, tensors, h, before_norm(row), states, arch, overlaps, STEP))
    return found


def bind(call: MlstmStepCall, config: Config) -> Callable[[MlstmStepCall], tuple[Tensor, ...]]:
    """The function that launches the kernels for calls with the signature of this one."""
    device, split = call.q.device, split_of(call, config)
    buffers = buffers_of(call, split)
    # placeholders with the None pattern of a real call: q stands for each buffer that exists
    values = (*call, call.q, *(None if one is None else call.q for one in buffers))
    made = planned(call, config, _target.arch())
    names, norm_names = tensors_of(call, split), norm_tensors_of(split)
    start, step_of = _launcher.starter(made[0], device), picker(FIELDS, values, names)
    norm, norm_of = None, step_of
    if split.second:
        norm, norm_of = _launcher.starter(made[1], device), picker(FIELDS, values, norm_names)
    some = call.batch * call.heads > 0
    states = ("c", "n", "m") if call.in_place else ("c_new", "n_new", "m_new")
    results = picker(FIELDS, values, ("h", *states[: 3 if call.input_gate == "exp" else 2]))

    def run(call: MlstmStepCall) -> tuple[Tensor, ...]:
        now: list[Any] = [*call, torch.empty_like(call.v)]
        for one in buffers:
            now.append(None if one is None else torch.empty(one[0], dtype=one[1], device=device))
        every = tuple(now)
        if some:
            start(*step_of(every))
            if norm is not None:
                norm(*norm_of(every))
        return results(every)

    return run
