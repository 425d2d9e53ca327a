"""The launches of the chunkwise mLSTM: gates, keys, states, chunks, and a norm where no program has all of DV."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.chunkwise.config import KEYS_K, KEYS_T, keys_width
from wavecrest.ops.mlstm.chunkwise.kernel import _mlstm_chunks_kernel
from wavecrest.ops.mlstm.chunkwise.kernel_states import (
    LINKS,
    PLANES,
    _mlstm_gates_kernel,
    _mlstm_keys_kernel,
    _mlstm_states_kernel,
)
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

# tokens of gates in one step
GATES = 256

# tensors that the kernels write: h; gates of tokens; weighted keys, their sums by tiles, each chunk's change of a
# state; the states before chunks, for float16 the units of their tiles, and n; h before a norm that is its own launch;
# last states
MEMORY = ("h", "planes", "keys", "parts", "links", "states", "scales", "vectors", "scratch", "c", "n", "m")
# by name, what kernels get of a call and its memory
FIELDS = MlstmCall._fields + MEMORY
SEQUENCES = ("cu_seqlens", "seq_starts", "seq_lens")
GATE_TENSORS = ("i", "f", *SEQUENCES, "resets", "planes")
KEY_TENSORS = ("k", "m_initial", *SEQUENCES, "planes", "keys", "parts", "links")
STATE_TENSORS = (
    "keys", "v", "c_initial", "n_initial", "m_initial", *SEQUENCES, "planes", "parts", "links", "states", "scales",
    "vectors", "c", "n", "m",
)  # fmt: skip
CHUNK_TENSORS = (
    "q", "k", "v", "states", "scales", "vectors", "links", "planes", *SEQUENCES, "norm_weight", "output_gate", "h",
)  # fmt: skip
# where the norm is a separate launch
CHUNK_TENSORS_APART = (*CHUNK_TENSORS[:-1], "scratch")


class Sizes(NamedTuple):
    """The division of a call over programs.

    `slots`: chunks of all sequences; `tiles`: of a state, over DK and DV; `parts`: tiles of the keys of a chunk;
    `apart`: the norm is a separate launch.
    """

    slots: int
    tiles: tuple[int, int]
    parts: int
    apart: bool


def sizes_of(call: MlstmCall, config: Config) -> Sizes:
    """The division of a call over programs."""
    chunk = config["CHUNK"]
    if call.cu_seqlens is not None:
        # one more than whole chunks for each sequence, wherever it begins
        slots = call.tokens // chunk + call.sequences
    else:
        slots = call.batch * _layout.ceil_div(call.tokens, chunk)
    tiles = (_layout.ceil_div(call.dk, config["STATE_K"]), _layout.ceil_div(call.dv, config["STATE_V"]))
    apart = call.norm_weight is not None and call.dv > config["BLOCK_V"]
    return Sizes(slots, tiles, chunk // _keys_tile(chunk), apart)


def _keys_tile(chunk: int) -> int:
    """Tokens of keys of a program: a power of two that divides a chunk."""
    return min(KEYS_T, chunk & -chunk)


def buffers_of(call: MlstmCall, sizes: Sizes, chunk: int) -> tuple[Buffer, ...]:
    """The memory that a call needs beside h, in the order of MEMORY."""
    single, dtype, heads, slots = torch.float32, call.q.dtype, call.heads, sizes.slots
    scales = ((slots, heads, *sizes.tiles), single) if dtype == torch.float16 else None
    scratch = c = n = m = None
    if sizes.apart:
        # h of closed input gates may be as small as what float16 has no digits for; the norm makes it large
        kept = single if dtype == torch.float16 else dtype
        scratch = ((call.batch, call.tokens, heads, call.dv), kept)
    if call.return_last_states:
        shape = (call.sequences, heads)
        c, n = ((*shape, call.dk, call.dv), call.c_dtype), ((*shape, call.dk), single)
        m = ((*shape, 1), single) if call.exponential else None
    return (
        ((slots, heads, PLANES.value, chunk), single),
        ((call.batch, heads, call.tokens, call.dk), dtype),
        ((slots, heads, sizes.parts, call.dk), single),
        ((LINKS, slots, heads), single),
        ((slots, heads, call.dk, call.dv), dtype),
        scales,
        ((slots, heads, call.dk), single),
        scratch,
        c,
        n,
        m,
    )


def _gates(call: MlstmCall, tensors: tuple[Tensor, ...], sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    numbers = (
        float(call.gate_soft_cap), call.tokens, call.heads, chunks, call.sequences,
        *strides(call.i, 3), *strides(call.f, 3), *strides(call.resets, 2), *sequence_strides(call),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(call), "RESETS": call.resets is not None, "CAP": call.capped,
        "EXPONENTIAL": call.exponential, "CHUNK": config["CHUNK"],
        "BLOCK_T": min(GATES, _layout.power_of_two(config["CHUNK"])),
    }  # fmt: skip
    grid = (sizes.slots * call.heads,)
    # two tokens a lane of a warp of 32. One H200, 2026-11-22 (the log was not kept): 256 tokens: 6.8 µs, 8.8 with one
    # warp; 128 tokens: 8.5 µs, 10.2 with twice the warps
    made = Config(num_warps=max(1, constants["BLOCK_T"] // 64))
    return _launcher.Launch(_mlstm_gates_kernel, grid, (*tensors, *numbers), constants, made)


def _wide(rows: int, *tensors: Tensor | None) -> bool:
    """True if a tile of that many rows of a tensor reaches beyond 2³¹ elements."""
    far = 0
    for tensor in tensors:
        if tensor is not None:
            far = max(far, rows * abs(tensor.stride(2)) + tensor.shape[3] * abs(tensor.stride(3)))
    return far >= 1 << 31


def _walked(*tensors: tuple[int, ...], align: int) -> tuple[int, ...]:
    """Strides of rows, heads and tokens in units of `align`, and of the last dimension."""
    return tuple(part for one in tensors for part in (*(stride // align for stride in one[:3]), one[3]))


def _keys(call: MlstmCall, tensors: tuple[Tensor, ...], sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    k_strides, contiguous = strides(call.k, 4), unit_stride(call.k)
    align = _layout.alignment(0, k_strides[:3]) if contiguous else 1
    rows, block_k = _keys_tile(config["CHUNK"]), keys_width(call.dk)
    numbers = (
        call.tokens, call.heads, chunks, call.sequences, sizes.slots, *_walked(k_strides, align=align),
        *strides(call.m_initial, 2), *sequence_strides(call),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(call), "RESETS": call.resets is not None, "EXPONENTIAL": call.exponential,
        "INITIAL": call.c_initial is not None, "CONTIGUOUS": contiguous, "ALIGN": align, "WIDE": _wide(rows, call.k),
        "DK": call.dk, "CHUNK": config["CHUNK"], "BLOCK_T": rows, "BLOCK_K": block_k,
        "HALF": call.q.dtype == torch.float16,
    }  # fmt: skip
    grid = (sizes.slots * call.heads * sizes.parts,)
    made = Config(num_warps=config["KEYS_WARPS"])
    return _launcher.Launch(_mlstm_keys_kernel, grid, (*tensors, *numbers), constants, made)


def _states(
    call: MlstmCall, tensors: tuple[Tensor, ...], sizes: Sizes, config: Config, arch: Arch | None, chunks: int
) -> _launcher.Launch:
    v_strides = strides(call.v, 4)
    contiguous, c_contiguous = unit_stride(call.v), unit_stride(call.c_initial)
    align = _layout.alignment(0, v_strides[:3]) if contiguous else 1
    c_strides = strides(call.c_initial, 4)
    c_align = _layout.alignment(0, c_strides[:3]) if c_contiguous else 1
    numbers = (
        call.tokens, call.heads, chunks, call.sequences, sizes.slots, *_walked(v_strides, align=align),
        *_walked(c_strides, align=c_align), *strides(call.n_initial, 3), *strides(call.m_initial, 2),
        *sequence_strides(call),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(call), "RESETS": call.resets is not None, "EXPONENTIAL": call.exponential,
        "INITIAL": call.c_initial is not None, "LAST": call.return_last_states, "CONTIGUOUS": contiguous,
        "ALIGN": align, "WIDE": _wide(config["STATE_T"], call.v), "C_CONTIGUOUS": c_contiguous, "C_ALIGN": c_align,
        "DK": call.dk, "DV": call.dv, "CHUNK": config["CHUNK"], "BLOCK_T": config["STATE_T"],
        "BLOCK_K": config["STATE_K"], "BLOCK_V": config["STATE_V"], "PARTS": sizes.parts,
        "BLOCK_P": _layout.power_of_two(sizes.parts), "BLOCK_N": min(KEYS_K, _layout.power_of_two(call.dk)),
        "HALF": call.q.dtype == torch.float16, "PRECISION": _target.products(call.q.dtype, arch),
    }  # fmt: skip
    # tiles of states, and n of every sequence and head
    grid = (call.sequences * call.heads * (sizes.tiles[0] * sizes.tiles[1] + 1),)
    made = Config(**(_options(config) | {"num_warps": config["STATE_WARPS"], "num_stages": config["STATE_STAGES"]}))
    return _launcher.Launch(_mlstm_states_kernel, grid, (*tensors, *numbers), constants, made)


def _chunks(
    call: MlstmCall,
    tensors: tuple[Tensor, ...],
    h: Tensor,
    sizes: Sizes,
    config: Config,
    arch: Arch | None,
    chunks: int,
) -> _launcher.Launch:
    fused, rows = call.norm_weight is not None and not sizes.apart, max(config["BLOCK_T"], config["BLOCK_S"])
    gate = call.output_gate if fused else None
    h_strides = (*before_norm(call), 1) if sizes.apart else strides(h, 4)
    walked = [*(strides(one, 4) for one in (call.q, call.k, call.v)), h_strides, strides(gate, 4)]
    contiguous = unit_stride(call.q, call.k, call.v, gate, None if sizes.apart else h)
    align = _layout.alignment(0, *(one[:3] for one in walked)) if contiguous else 1
    numbers = (
        float(call.eps), float(call.norm_eps), -0.5 * math.log2(call.dk), call.tokens, call.heads, chunks,
        call.sequences, sizes.slots, *_walked(*walked, align=align), *strides(call.norm_weight, 1),
        *sequence_strides(call),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(call), "RESETS": call.resets is not None, "EXPONENTIAL": call.exponential,
        "NORMALIZE": call.normalize, "NORM": fused, "GATE": gate is not None, "INITIAL": call.c_initial is not None,
        "CONTIGUOUS": contiguous, "ALIGN": align, "WIDE": _wide(rows, call.q, call.k, call.v, gate, h),
        "DK": call.dk, "DV": call.dv, "HALF": call.q.dtype == torch.float16,
        "PRECISION": _target.products(call.q.dtype, arch), **{name: config[name] for name in CHUNK_SIZES},
    }  # fmt: skip
    tiles = config["CHUNK"] // config["BLOCK_T"] * _layout.ceil_div(call.dv, config["BLOCK_V"])
    grid = (sizes.slots * call.heads * tiles,)
    made = Config(**_options(config))
    return _launcher.Launch(_mlstm_chunks_kernel, grid, (*tensors, *numbers), constants, made)


# parameters of a configuration that are constants of the chunks kernel
CHUNK_SIZES = ("CHUNK", "BLOCK_T", "BLOCK_S", "BLOCK_K", "BLOCK_C", "BLOCK_V", "STATE_K", "STATE_V")


def _options(config: Config) -> dict[str, int]:
    """The compiler's options of a configuration."""
    return {name: value for name, value in config.kwargs.items() if name.islower()}


def planned(call: MlstmCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, four or five, without memory for what they write.

    Raises:
        InvalidArgument: a chunk is not made of whole tiles, or a tile of a state of whole ones that are read.
    """
    for whole, part in (("STATE_K", "BLOCK_C"), *(("CHUNK", one) for one in ("BLOCK_T", "BLOCK_S", "STATE_T"))):
        if config[whole] % config[part] != 0:
            raise InvalidArgument(f"mlstm_chunkwise: {whole}={config[whole]} is no multiple of {part}={config[part]}")
    device = call.q.device if torch.compiler.is_compiling() else torch.device("meta")
    sizes = sizes_of(call, config)
    if call.resets is not None:
        # see `marked`
        call = call._replace(i=torch.empty(call.i.shape, dtype=call.i.dtype, device=device))
    h = torch.empty_like(call.v, device=device)
    values = (*call, h, *allocated(buffers_of(call, sizes, config["CHUNK"]), device))
    chunks = _layout.ceil_div(call.tokens, config["CHUNK"])
    gates, keys, states, outputs = (picker(FIELDS, values, names)(values) for names in _names(sizes))
    found = [
        _gates(call, gates, sizes, config, chunks),
        _keys(call, keys, sizes, config, chunks),
        _states(call, states, sizes, config, arch, chunks),
        _chunks(call, outputs, h, sizes, config, arch, chunks),
    ]
    if sizes.apart:
        tensors = picker(FIELDS, values, NORM_TENSORS)(values)
        found.append(norm_launch(call, tensors, h, before_norm(call), None, arch))
    return found


def marked(i: Tensor, v: Tensor) -> Tensor:
    """i, contiguous, NaN for tokens that have a value which is not finite: the kernels see them by their gates alone.

    Where a product has several documents, such a value would be NaN in all of them.
    """
    largest = torch.linalg.vector_norm(v, math.inf, dim=-1)
    return i.masked_fill(~largest.isfinite(), math.nan).contiguous()


def _names(sizes: Sizes) -> tuple[tuple[str, ...], ...]:
    """The tensors of the first four kernels, by their fields."""
    return GATE_TENSORS, KEY_TENSORS, STATE_TENSORS, CHUNK_TENSORS_APART if sizes.apart else CHUNK_TENSORS


def bind(call: MlstmCall, config: Config) -> Callable[[MlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that launches the kernels for calls with the signature of this one."""
    device, sizes = call.q.device, sizes_of(call, config)
    buffers = buffers_of(call, sizes, config["CHUNK"])
    # the part of padded and packed rows that no launch writes is 0
    like = torch.empty_like if call.form == "whole" else torch.zeros_like
    # placeholders with the None pattern of a real call: q stands for each buffer that exists
    values = (*call, call.q, *(None if one is None else call.q for one in buffers))
    names = (*_names(sizes), *([NORM_TENSORS] if sizes.apart else []))
    made = planned(call, config, _target.arch())
    starts = [
        (_launcher.starter(one, device), picker(FIELDS, values, some)) for one, some in zip(made, names, strict=True)
    ]
    (gates, gates_of), (keys, keys_of), (states, states_of), (chunks, chunks_of) = starts[:4]
    norm, norm_of = starts[4] if sizes.apart else (None, chunks_of)
    some, written = call.sequences * call.heads > 0, call.batch * call.tokens > 0
    resets = written and call.resets is not None
    last = None
    if call.return_last_states:
        last = picker(FIELDS, values, ("h", "c", "n", "m") if call.exponential else ("h", "c", "n"))

    def run(call: MlstmCall) -> Tensor | tuple[Tensor, ...]:
        if resets:
            call = call._replace(i=marked(call.i, call.v))
        h = like(call.v)
        now: list[Any] = [*call, h]
        for one in buffers:
            now.append(None if one is None else torch.empty(one[0], dtype=one[1], device=device))
        every = tuple(now)
        if some and written:
            gates(*gates_of(every))
            keys(*keys_of(every))
        if some:
            # the last states are written where there are no tokens too
            states(*states_of(every))
        if some and written:
            chunks(*chunks_of(every))
            if norm is not None:
                norm(*norm_of(every))
        return h if last is None else last(every)

    return run
