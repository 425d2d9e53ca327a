"""The launches of the chunkwise mLSTM: gates, keys, states, chunks, and a norm where no program has all columns."""

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
from wavecrest.ops.mlstm.call import Operands
from wavecrest.ops.mlstm.chunkwise.config import KEYS_K, KEYS_T, keys_width
from wavecrest.ops.mlstm.chunkwise.kernel import _mlstm_chunks_kernel
from wavecrest.ops.mlstm.chunkwise.kernel_states import (
    LINKS,
    PLANES,
    _mlstm_gates_kernel,
    _mlstm_keys_kernel,
    _mlstm_states_kernel,
)
from wavecrest.ops.mlstm.norm import (
    before_norm,
    norm_launch,
    or_else,
    sequence_constants,
    sequence_strides,
    side_by_side,
    strides,
)

GATE_TENSORS, KEY_TENSORS, STATE_TENSORS, CHUNK_TENSORS, NORM_TENSORS = 7, 9, 17, 14, 11
# tokens of gates in one step
GATES = 256


class Memory(NamedTuple):
    """What kernels write: what gates are for tokens; weighted keys, their sums by tiles, what chunks do to states;
    states before chunks, in float16 the units of their tiles, and n; h before the norm, h, the last states.
    """

    planes: Tensor
    keys: Tensor
    parts: Tensor
    links: Tensor
    states: Tensor
    scales: Tensor | None
    vectors: Tensor
    scratch: Tensor | None
    h: Tensor
    c: Tensor | None
    n: Tensor | None
    m: Tensor | None


class Sizes(NamedTuple):
    """What the memory of a call follows from. `slots`: chunks; `tiles`: of a state; `parts`: tiles of keys of a chunk;
    `apart`: the norm is its own launch; `zeroed`: no launch reaches all of h.
    """

    sequences: int
    slots: int
    batch: int
    tokens: int
    heads: int
    dk: int
    dv: int
    tiles: tuple[int, int]
    parts: int
    chunk: int
    apart: bool
    zeroed: bool
    last: bool
    exponential: bool
    c_dtype: torch.dtype


def sizes_of(given: Operands, config: Config) -> Sizes:
    """Those of a call."""
    chunk = config["CHUNK"]
    if given.cu_seqlens is not None:
        # one more than whole chunks for each sequence, wherever it begins
        slots = given.tokens // chunk + given.sequences
    else:
        slots = given.batch * _layout.ceil_div(given.tokens, chunk)
    apart = given.norm_weight is not None and given.dv > config["BLOCK_V"]
    tiles = (_layout.ceil_div(given.dk, config["STATE_K"]), _layout.ceil_div(given.dv, config["STATE_V"]))
    return Sizes(
        given.sequences, slots, given.batch, given.tokens, given.heads, given.dk, given.dv, tiles,
        chunk // _keys_tile(chunk), chunk, apart,
        given.form != "whole", given.return_last_states, given.exponential, given.c_dtype,
    )  # fmt: skip


def _keys_tile(chunk: int) -> int:
    """Tokens of keys of a program: a power of two that divides a chunk."""
    return min(KEYS_T, chunk & -chunk)


def allocate(sizes: Sizes, v: Tensor, device: torch.device | str) -> Memory:
    """Memory for a call. What no launch reaches of padded and packed rows is 0."""
    single, shape = torch.float32, (sizes.sequences, sizes.heads)
    states = torch.empty((sizes.slots, sizes.heads, sizes.dk, sizes.dv), dtype=v.dtype, device=device)
    scales = None
    if v.dtype == torch.float16:
        scales = torch.empty((sizes.slots, sizes.heads, *sizes.tiles), dtype=single, device=device)
    vectors = torch.empty((sizes.slots, sizes.heads, sizes.dk), dtype=single, device=device)
    planes = torch.empty((sizes.slots, sizes.heads, PLANES.value, sizes.chunk), dtype=single, device=device)
    keys = torch.empty((sizes.batch, sizes.heads, sizes.tokens, sizes.dk), dtype=v.dtype, device=device)
    parts = torch.empty((sizes.slots, sizes.heads, sizes.parts, sizes.dk), dtype=single, device=device)
    links = torch.empty((LINKS, sizes.slots, sizes.heads), dtype=single, device=device)
    h = torch.zeros_like(v, device=device) if sizes.zeroed else torch.empty_like(v, device=device)
    scratch = c = n = m = None
    if sizes.apart:
        # h of closed input gates may be as small as what float16 has no digits for; the norm makes it large
        kept = single if v.dtype == torch.float16 else v.dtype
        scratch = torch.empty((sizes.batch, sizes.tokens, sizes.heads, sizes.dv), dtype=kept, device=device)
    if sizes.last:
        c = torch.empty((*shape, sizes.dk, sizes.dv), dtype=sizes.c_dtype, device=device)
        n = torch.empty((*shape, sizes.dk), dtype=single, device=device)
        m = torch.empty((*shape, 1), dtype=single, device=device) if sizes.exponential else None
    return Memory(planes, keys, parts, links, states, scales, vectors, scratch, h, c, n, m)


def _gate_tensors(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    read = or_else(given.q, given.cu_seqlens, given.seq_starts, given.seq_lens, given.resets)
    return (given.i, given.f, *read, memory.planes)


def _key_tensors(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    read = or_else(given.q, given.m_initial, given.cu_seqlens, given.seq_starts, given.seq_lens)
    return (given.k, *read, memory.planes, memory.keys, memory.parts, memory.links)


def _state_tensors(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    read = or_else(given.q, *given.initial, given.cu_seqlens, given.seq_starts, given.seq_lens)
    between = (memory.states, *or_else(given.q, memory.scales), memory.vectors)
    last = or_else(given.q, memory.c, memory.n, memory.m)
    return (memory.keys, given.v, *read, memory.planes, memory.parts, memory.links, *between, *last)


def _chunk_tensors(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    between = (memory.states, *or_else(given.q, memory.scales), memory.vectors, memory.links, memory.planes)
    read = or_else(given.q, given.cu_seqlens, given.seq_starts, given.seq_lens, given.norm_weight, given.output_gate)
    h = memory.h if memory.scratch is None else memory.scratch
    return (given.q, given.k, given.v, *between, *read, h)


def _norm_tensors(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    assert memory.scratch is not None
    read = or_else(
        given.q, memory.scratch, given.norm_weight, given.output_gate, given.cu_seqlens, given.seq_starts,
        given.seq_lens, None, None,
    )  # fmt: skip
    return (*read, memory.h, given.q, given.q)


def _gates(given: Operands, memory: Memory, sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    numbers = (
        float(given.gate_soft_cap), given.tokens, given.heads, chunks, sizes.sequences,
        *strides(given.i, 3), *strides(given.f, 3), *strides(given.resets, 2), *sequence_strides(given),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(given), "RESETS": given.resets is not None, "CAP": given.capped,
        "EXPONENTIAL": given.exponential, "CHUNK": config["CHUNK"],
        "BLOCK_T": min(GATES, _layout.power_of_two(config["CHUNK"])),
    }  # fmt: skip
    grid = (sizes.slots * given.heads,)
    # two tokens a lane of a warp of 32: on one H200, 2026-11-22, 256 tokens took 6.8 µs so, 8.8 in one warp; 128 tokens
    # 8.5, 10.2 in twice as many
    made = Config(num_warps=max(1, constants["BLOCK_T"] // 64))
    return _launcher.Launch(_mlstm_gates_kernel, grid, (*_gate_tensors(given, memory), *numbers), constants, made)


def _wide(rows: int, *tensors: Tensor | None) -> bool:
    """True if so many rows of a tensor do not lie within 2³¹ elements."""
    far = 0
    for tensor in tensors:
        if tensor is not None:
            far = max(far, rows * abs(tensor.stride(2)) + tensor.shape[3] * abs(tensor.stride(3)))
    return far >= 1 << 31


def _walked(*tensors: tuple[int, ...], align: int) -> tuple[int, ...]:
    """Strides of rows, heads and tokens in units of `align`, and of columns."""
    return tuple(part for one in tensors for part in (*(stride // align for stride in one[:3]), one[3]))


def _keys(given: Operands, memory: Memory, sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    k_strides, close = strides(given.k, 4), side_by_side(given.k)
    align = _layout.alignment(0, k_strides[:3]) if close else 1
    rows, block_k = _keys_tile(config["CHUNK"]), keys_width(given.dk)
    numbers = (
        given.tokens, given.heads, chunks, sizes.sequences, sizes.slots, *_walked(k_strides, align=align),
        *strides(given.m_initial, 2), *sequence_strides(given),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(given), "RESETS": given.resets is not None, "EXPONENTIAL": given.exponential,
        "INITIAL": given.c_initial is not None, "COLUMNS": close, "ALIGN": align, "WIDE": _wide(rows, given.k),
        "DK": given.dk, "CHUNK": config["CHUNK"], "BLOCK_T": rows, "BLOCK_K": block_k,
        "HALF": given.q.dtype == torch.float16,
    }  # fmt: skip
    grid = (sizes.slots * given.heads * sizes.parts,)
    made = Config(num_warps=config["KEYS_WARPS"])
    return _launcher.Launch(_mlstm_keys_kernel, grid, (*_key_tensors(given, memory), *numbers), constants, made)


def _states(given: Operands, memory: Memory, sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    v_strides = strides(given.v, 4)
    close, c_close = side_by_side(given.v), side_by_side(given.c_initial)
    align = _layout.alignment(0, v_strides[:3]) if close else 1
    c_strides = strides(given.c_initial, 4)
    c_align = _layout.alignment(0, c_strides[:3]) if c_close else 1
    numbers = (
        given.tokens, given.heads, chunks, sizes.sequences, sizes.slots, *_walked(v_strides, align=align),
        *_walked(c_strides, align=c_align), *strides(given.n_initial, 3), *strides(given.m_initial, 2),
        *sequence_strides(given),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(given), "RESETS": given.resets is not None, "EXPONENTIAL": given.exponential,
        "INITIAL": given.c_initial is not None, "LAST": given.return_last_states, "COLUMNS": close, "ALIGN": align,
        "WIDE": _wide(config["STATE_T"], given.v), "C_COLUMNS": c_close, "C_ALIGN": c_align, "DK": given.dk,
        "DV": given.dv, "CHUNK": config["CHUNK"], "BLOCK_T": config["STATE_T"], "BLOCK_K": config["STATE_K"],
        "BLOCK_V": config["STATE_V"], "PARTS": sizes.parts, "BLOCK_P": _layout.power_of_two(sizes.parts),
        "BLOCK_N": min(KEYS_K, _layout.power_of_two(given.dk)), "HALF": given.q.dtype == torch.float16,
    }  # fmt: skip
    # tiles of states, and n of every sequence and head
    grid = (sizes.sequences * given.heads * (sizes.tiles[0] * sizes.tiles[1] + 1),)
    made = Config(**(_options(config) | {"num_warps": config["STATE_WARPS"], "num_stages": config["STATE_STAGES"]}))
    return _launcher.Launch(_mlstm_states_kernel, grid, (*_state_tensors(given, memory), *numbers), constants, made)


def _chunks(given: Operands, memory: Memory, sizes: Sizes, config: Config, chunks: int) -> _launcher.Launch:
    fused, rows = given.norm_weight is not None and not sizes.apart, max(config["BLOCK_T"], config["BLOCK_S"])
    gate, h = given.output_gate if fused else None, memory.h
    h_strides = (*before_norm(given), 1) if sizes.apart else strides(h, 4)
    walked = [*(strides(one, 4) for one in (given.q, given.k, given.v)), h_strides, strides(gate, 4)]
    close = side_by_side(given.q, given.k, given.v, gate, None if sizes.apart else h)
    align = _layout.alignment(0, *(one[:3] for one in walked)) if close else 1
    numbers = (
        float(given.eps), float(given.norm_eps), -0.5 * math.log2(given.dk), given.tokens, given.heads, chunks,
        sizes.sequences, sizes.slots, *_walked(*walked, align=align), *strides(given.norm_weight, 1),
        *sequence_strides(given),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(given), "RESETS": given.resets is not None, "EXPONENTIAL": given.exponential,
        "NORMALIZE": given.normalize, "NORM": fused, "GATE": gate is not None, "INITIAL": given.c_initial is not None,
        "COLUMNS": close, "ALIGN": align, "WIDE": _wide(rows, given.q, given.k, given.v, gate, h),
        "DK": given.dk, "DV": given.dv, "HALF": given.q.dtype == torch.float16,
        **{name: config[name] for name in CHUNK_SIZES},
    }  # fmt: skip
    tiles = config["CHUNK"] // config["BLOCK_T"] * _layout.ceil_div(given.dv, config["BLOCK_V"])
    grid = (sizes.slots * given.heads * tiles,)
    made = Config(**_options(config))
    return _launcher.Launch(_mlstm_chunks_kernel, grid, (*_chunk_tensors(given, memory), *numbers), constants, made)


# of a configuration, what the kernel of chunks is made for
CHUNK_SIZES = ("CHUNK", "BLOCK_T", "BLOCK_S", "BLOCK_K", "BLOCK_C", "BLOCK_V", "STATE_K", "STATE_V")


def _options(config: Config) -> dict[str, int]:
    """What the compiler is told."""
    return {name: value for name, value in config.kwargs.items() if name.islower()}


def launches_of(
    given: Operands, memory: Memory, sizes: Sizes, config: Config, arch: Arch | None
) -> list[_launcher.Launch]:
    """The launches of a call, four or five.

    Raises:
        InvalidArgument: a chunk is not made of whole tiles, or a tile of a state of whole ones that are read.
    """
    for whole, part in (("STATE_K", "BLOCK_C"), *(("CHUNK", one) for one in ("BLOCK_T", "BLOCK_S", "STATE_T"))):
        if config[whole] % config[part] != 0:
            raise InvalidArgument(f"mlstm_chunkwise: {whole}={config[whole]} is no multiple of {part}={config[part]}")
    chunks = _layout.ceil_div(given.tokens, config["CHUNK"])
    found = [part(given, memory, sizes, config, chunks) for part in (_gates, _keys, _states, _chunks)]
    if sizes.apart:
        found.append(norm_launch(given, _norm_tensors(given, memory), memory.h, before_norm(given), None, arch))
    return found


def planned(given: Operands, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    device = given.q.device if torch.compiler.is_compiling() else torch.device("meta")
    sizes = sizes_of(given, config)
    return launches_of(given, allocate(sizes, given.v, device), sizes, config, arch)


def bind(given: Operands, config: Config) -> Callable[..., Any]:
    """The function for all calls with arguments like these."""
    device, sizes = given.q.device, sizes_of(given, config)
    made = planned(given, config, _target.arch())
    tensors = (GATE_TENSORS, KEY_TENSORS, STATE_TENSORS, CHUNK_TENSORS, NORM_TENSORS)
    starts = [(_launcher.starter(one, device), one.args[count:]) for one, count in zip(made, tensors, strict=False)]
    (gates, gate_sizes), (keys, key_sizes), (states, state_sizes), (chunks, chunk_sizes) = starts[:4]
    norm, norm_sizes = starts[4] if sizes.apart else (None, ())
    some, written = sizes.sequences * sizes.heads > 0, sizes.batch * sizes.tokens > 0

    def call(*args: Any, **kwargs: Any) -> Any:
        now = Operands(*args, **kwargs)
        memory = allocate(sizes, now.v, device)
        if some and written:
            gates(*_gate_tensors(now, memory), *gate_sizes)
            keys(*_key_tensors(now, memory), *key_sizes)
        if some:
            # the last states are written where there are no tokens too
            states(*_state_tensors(now, memory), *state_sizes)
        if some and written:
            chunks(*_chunk_tensors(now, memory), *chunk_sizes)
            if norm is not None:
                norm(*_norm_tensors(now, memory), *norm_sizes)
        if not sizes.last:
            return memory.h
        return tuple(one for one in (memory.h, memory.c, memory.n, memory.m) if one is not None)

    return call
