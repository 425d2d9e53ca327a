"""The mLSTM token by token, states in registers: the kernel of mlstm_sequence, its launches and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.call import Operands
from wavecrest.ops.mlstm.device import (
    PACKED,
    columns,
    denominator,
    half_range,
    layer_norm,
    log_forget,
    log_input,
    sigmoid,
    within,
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

TENSORS, NORM_TENSORS = 18, 11
# elements of a state that a program keeps: 32 KiB in registers
TILE = 8192

_SIZES = [
    "eps", "cap", "norm_eps", "scale", "tokens", "heads", "tiles",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_hb", "stride_hh", "stride_hs", "stride_hd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_ib", "stride_ih", "stride_is",
    "stride_fb", "stride_fh", "stride_fs", "stride_cb", "stride_ch", "stride_ck", "stride_cd",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_xb", "stride_xh", "stride_xk", "stride_xd",
    "stride_yb", "stride_yh", "stride_yk", "stride_zb", "stride_zh", "stride_rb", "stride_rs", "stride_w",
    "stride_cu", "stride_starts", "stride_lens",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_recurrent_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, resets_ptr, weight_ptr,
    gate_ptr, h_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    eps, cap, norm_eps, scale, tokens, heads, tiles,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_hb, stride_hh, stride_hs, stride_hd,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_ib, stride_ih, stride_is, stride_fb, stride_fh, stride_fs,
    stride_cb, stride_ch, stride_ck, stride_cd, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    stride_xb, stride_xh, stride_xk, stride_xd, stride_yb, stride_yh, stride_yk, stride_zb, stride_zh,
    stride_rb, stride_rs, stride_w, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, CAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr, NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    INITIAL: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, C_COLUMNS: tl.constexpr,
    C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """All tokens of one sequence and head, BLOCK_V columns of the state c [DK, DV] with all of its rows.

    Strides of q, k, v, h and the gate come in units of ALIGN, those of the states c (`c_new`: x) in units of C_ALIGN,
    but for strides of columns. Every program of a head works out n and m, the first writes them (`n_new`: y, `m_new`:
    z). NORM: the program has all columns.
    """
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    sequence = (tl.program_id(0) // tiles // heads).to(tl.int64)
    row = sequence
    begin = tl.cast(0, tl.int64)
    end = tl.cast(tokens, tl.int64)
    if FORM == PACKED:
        row = sequence * 0
        begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
    eps = tl.cast(eps, tl.float32)
    cap = tl.cast(cap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < DK
    mask_v = offs_v < DV
    mask_c = mask_k[:, None] & mask_v[None, :]
    wide_k = offs_k.to(tl.int64)
    c = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    m = tl.cast(0.0, tl.float32)
    if INITIAL:
        c_at = C_ALIGN * (sequence * stride_cb + head * stride_ch + wide_k * stride_ck)
        c_at = c_at[:, None] + columns(offs_v, stride_cd, C_COLUMNS)[None, :]
        c = tl.load(c_ptr + c_at, mask=mask_c, other=0.0).to(tl.float32)
        n = tl.load(n_ptr + sequence * stride_nb + head * stride_nh + wide_k * stride_nk, mask=mask_k, other=0.0)
        if EXPONENTIAL:
            m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh)
    q_at = q_ptr + ALIGN * (row * stride_qb + head * stride_qh) + columns(offs_k, stride_qd, COLUMNS)
    k_at = k_ptr + ALIGN * (row * stride_kb + head * stride_kh) + columns(offs_k, stride_kd, COLUMNS)
    v_at = v_ptr + ALIGN * (row * stride_vb + head * stride_vh) + columns(offs_v, stride_vd, COLUMNS)
    h_at = h_ptr + ALIGN * (row * stride_hb + head * stride_hh) + columns(offs_v, stride_hd, COLUMNS)
    i_ptr += row * stride_ib + head * stride_ih
    f_ptr += row * stride_fb + head * stride_fh
    for token in range(begin, end):
        at = tl.cast(token, tl.int64)
        q = tl.load(q_at + ALIGN * at * stride_qs, mask=mask_k, other=0.0).to(tl.float32) * scale
        k = tl.load(k_at + ALIGN * at * stride_ks, mask=mask_k, other=0.0).to(tl.float32)
        v = tl.load(v_at + ALIGN * at * stride_vs, mask=mask_v, other=0.0).to(tl.float32)
        i = log_input(tl.load(i_ptr + at * stride_is), cap, CAP, EXPONENTIAL)
        lf = log_forget(tl.load(f_ptr + at * stride_fs), cap, CAP)
        if RESETS:
            # chosen, not multiplied: what came before may be NaN
            fresh = tl.load(resets_ptr + row * stride_rb + at * stride_rs)
            c = tl.where(fresh, 0.0, c)
            n = tl.where(fresh, 0.0, n)
            m = tl.where(fresh, 0.0, m)
        if EXPONENTIAL:
            m_new = tl.maximum(lf + m, i)
            forget = exp(lf + m - m_new)
            take = exp(i - m_new)
            m = m_new
        else:
            forget = exp(lf)
            take = exp(i)
        take_k = take * k
        c = forget * c + take_k[:, None] * v[None, :]
        n = forget * n + take_k
        # + 0: a product alone is merged into the first addition across lanes, which then have sums of different bits
        # (racecheck, H200, 2026-11-22)
        h = tl.sum(q[:, None] * c + 0.0, 0)
        if NORMALIZE:
            h = h / denominator(tl.sum(q * n + 0.0, 0), m, eps, EXPONENTIAL)
        if NORM:
            y = layer_norm(h[None, :], mask_v[None, :], DV, tl.cast(norm_eps, tl.float32))
            w_at = (head * DV + offs_v)[None, :] * stride_w
            y = y * tl.load(weight_ptr + w_at, mask=mask_v[None, :], other=0.0).to(tl.float32)
            if GATE:
                g_at = ALIGN * (row * stride_gb + head * stride_gh + at * stride_gs)
                g_at = g_at + columns(offs_v, stride_gd, COLUMNS)[None, :]
                y = y * sigmoid(tl.load(gate_ptr + g_at, mask=mask_v[None, :], other=0.0).to(tl.float32))
            h = tl.sum(y, 0)
        tl.store(h_at + ALIGN * at * stride_hs, h.to(h_ptr.dtype.element_ty), mask=mask_v)
    if LAST:
        x_at = C_ALIGN * (sequence * stride_xb + head * stride_xh + wide_k * stride_xk)
        x_at = x_at[:, None] + columns(offs_v, stride_xd, C_COLUMNS)[None, :]
        c = half_range(c, c_new_ptr.dtype.element_ty)
        tl.store(c_new_ptr + x_at, c.to(c_new_ptr.dtype.element_ty), mask=mask_c)
        if tile == 0:
            tl.store(n_new_ptr + sequence * stride_yb + head * stride_yh + wide_k * stride_yk, n, mask=mask_k)
            if EXPONENTIAL:
                tl.store(m_new_ptr + sequence * stride_zb + head * stride_zh, m)


class Memory(NamedTuple):
    """What a call writes: h, the last states, and h before the norm; None where it is not needed."""

    h: Tensor
    c: Tensor | None
    n: Tensor | None
    m: Tensor | None
    scratch: Tensor | None


class Split(NamedTuple):
    """How a head is taken apart: programs over its columns; `apart`: the norm is a second launch."""

    tiles: int
    apart: bool


def default(dk: int, dv: int, arch: Arch | None) -> Config:
    """Columns of the state so that a program has 8,192 elements of it.

    Reasoned, not measured: 32 registers a lane of 8 warps or 4 waves, all of them loaded at once, and of a state of 256
    rows 128 bytes of each, a full line of every cache. The batch has no say, so that a row has the same bits in any.
    """
    block_k = _layout.power_of_two(dk)
    block_v = max(4, min(_layout.power_of_two(dv), TILE // block_k))
    wave = 32 if arch is None else arch.wave_size
    return Config(BLOCK_V=block_v, num_warps=max(1, min(8, block_k * block_v // (32 * wave))))


def space(dk: int, dv: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other widths and numbers of warps."""
    first = default(dk, dv, arch)
    yield first
    block_k = _layout.power_of_two(dk)
    for block_v in (8, 16, 32, 64, 128, 256):
        for warps in (1, 2, 4, 8):
            # from 8 elements of a state a lane to the registers that there are
            each = block_k * block_v // (warps * arch.wave_size)
            made = Config(BLOCK_V=block_v, num_warps=warps)
            if 8 <= each <= 128 and block_v <= _layout.power_of_two(dv) and made != first:
                yield made


def split_of(given: Operands, config: Config) -> Split:
    """How the heads of a call are taken apart."""
    tiles = _layout.ceil_div(given.dv, config["BLOCK_V"])
    return Split(tiles, given.norm_weight is not None and tiles > 1)


def tensors_of(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    """The kernel's pointers, an input for what it does not look at."""
    q = given.q
    read = or_else(
        q, q, given.k, given.v, given.i, given.f, *given.initial, given.cu_seqlens, given.seq_starts, given.seq_lens,
        given.resets, given.norm_weight, given.output_gate,
    )  # fmt: skip
    h = memory.h if memory.scratch is None else memory.scratch
    return (*read, h, *or_else(q, memory.c, memory.n, memory.m))


def norm_tensors_of(given: Operands, memory: Memory) -> tuple[Tensor, ...]:
    """The pointers of the second launch."""
    assert memory.scratch is not None
    read = or_else(
        given.q, memory.scratch, given.norm_weight, given.output_gate, given.cu_seqlens, given.seq_starts,
        given.seq_lens, None, None,
    )  # fmt: skip
    return (*read, memory.h, given.q, given.q)


def launches_of(given: Operands, memory: Memory, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, one or two."""
    split, normed = split_of(given, config), given.norm_weight is not None
    gate = given.output_gate if normed and not split.apart else None
    h_strides = (*before_norm(given), 1) if split.apart else strides(memory.h, 4)
    close = side_by_side(given.q, given.k, given.v, gate, None if split.apart else memory.h)
    walked = [strides(one, 4) for one in (given.q, given.k, given.v)] + [h_strides, strides(gate, 4)]
    align = _layout.alignment(0, *(one[:3] for one in walked)) if close else 1
    c_strides, x_strides = strides(given.c_initial, 4), strides(memory.c, 4)
    c_close = side_by_side(given.c_initial, memory.c)
    c_align = _layout.alignment(0, c_strides[:3], x_strides[:3]) if c_close else 1
    sizes = (
        float(given.eps), float(given.gate_soft_cap), float(given.norm_eps), float(given.dk**-0.5), given.tokens,
        given.heads, split.tiles, *(part for one in walked for part in (*(s // align for s in one[:3]), one[3])),
        *strides(given.i, 3), *strides(given.f, 3), *(s // c_align for s in c_strides[:3]), c_strides[3],
        *strides(given.n_initial, 3), *strides(given.m_initial, 2), *(s // c_align for s in x_strides[:3]),
        x_strides[3], *strides(memory.n, 3), *strides(memory.m, 2), *strides(given.resets, 2),
        *strides(given.norm_weight, 1), *sequence_strides(given),
    )  # fmt: skip
    constants: dict[str, Any] = {
        **sequence_constants(given), "RESETS": given.resets is not None, "CAP": given.capped,
        "EXPONENTIAL": given.exponential, "NORMALIZE": given.normalize, "NORM": normed and not split.apart,
        "GATE": gate is not None, "INITIAL": given.c_initial is not None, "LAST": given.return_last_states,
        "COLUMNS": close, "ALIGN": align, "C_COLUMNS": c_close, "C_ALIGN": c_align, "DK": given.dk,
        "DV": given.dv, "BLOCK_K": _layout.power_of_two(given.dk),
    }  # fmt: skip
    grid = (given.sequences * given.heads * split.tiles,)
    tensors = tensors_of(given, memory)
    found = [_launcher.Launch(_mlstm_recurrent_kernel, grid, (*tensors, *sizes), constants, config)]
    if split.apart:
        found.append(norm_launch(given, norm_tensors_of(given, memory), memory.h, before_norm(given), None, arch))
    return found


class Sizes(NamedTuple):
    """What the memory of a call follows from; `zeroed`: no launch reaches all of h."""

    sequences: int
    batch: int
    tokens: int
    heads: int
    dk: int
    dv: int
    zeroed: bool
    last: bool
    exponential: bool
    c_dtype: torch.dtype


def sizes_of(given: Operands) -> Sizes:
    """Those of a call."""
    return Sizes(
        given.sequences, given.batch, given.tokens, given.heads, given.dk, given.dv, given.form != "whole",
        given.return_last_states, given.exponential, given.c_dtype,
    )  # fmt: skip


def allocate(sizes: Sizes, now: Operands, split: Split, device: torch.device | str) -> Memory:
    """Memory for a call. What no launch reaches of padded and packed rows is 0."""
    single, shape = torch.float32, (sizes.sequences, sizes.heads)
    h = torch.zeros_like(now.v, device=device) if sizes.zeroed else torch.empty_like(now.v, device=device)
    scratch = None
    if split.apart:
        scratch = torch.empty((sizes.batch, sizes.tokens, sizes.heads, sizes.dv), dtype=single, device=device)
    c = n = m = None
    if sizes.last:
        n = torch.empty((*shape, sizes.dk), dtype=single, device=device)
        m = torch.empty((*shape, 1), dtype=single, device=device) if sizes.exponential else None
        c = torch.empty((*shape, sizes.dk, sizes.dv), dtype=sizes.c_dtype, device=device)
    return Memory(h, c, n, m, scratch)


def planned(given: Operands, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    device = given.q.device if torch.compiler.is_compiling() else torch.device("meta")
    memory = allocate(sizes_of(given), given, split_of(given, config), device)
    return launches_of(given, memory, config, arch)


def bind(given: Operands, config: Config) -> Callable[[Operands], Any]:
    """The function for all calls with arguments like these: it takes the tensors alone, nothing else is looked at."""
    device, split, sizes = given.q.device, split_of(given, config), sizes_of(given)
    made = planned(given, config, _target.arch())
    start, numbers = _launcher.starter(made[0], device), made[0].args[TENSORS:]
    finish, more = None, ()
    if split.apart:
        finish, more = _launcher.starter(made[1], device), made[1].args[NORM_TENSORS:]
    some, written = sizes.sequences * sizes.heads > 0, sizes.batch * sizes.tokens > 0

    def call(now: Operands) -> Any:
        memory = allocate(sizes, now, split, device)
        if some:
            start(*tensors_of(now, memory), *numbers)
            if finish is not None and written:
                finish(*norm_tensors_of(now, memory), *more)
        if not sizes.last:
            return memory.h
        return (memory.h, *(one for one in memory[1:4] if one is not None))

    return call
