"""One token of the mLSTM: a kernel that streams the states through registers, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.common.device import SECTOR, exp, pdl_launch_dependents, pdl_wait, prefetch_l2
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.call import Operands
from wavecrest.ops.mlstm.device import columns, denominator, half_range, layer_norm, log_forget, log_input, sigmoid
from wavecrest.ops.mlstm.norm import STEP, before_norm, norm_launch, or_else, side_by_side, strides

TENSORS, NORM_TENSORS = 16, 11
# elements of a state that a program has under way at a time: 32 KiB in registers
TILE = 8192

_SIZES = [
    "eps", "cap", "norm_eps", "scale", "heads", "tiles",
    "stride_qb", "stride_qh", "stride_qd", "stride_kb", "stride_kh", "stride_kd", "stride_vb", "stride_vh",
    "stride_vd", "stride_hb", "stride_hh", "stride_hd", "stride_gb", "stride_gh", "stride_gd", "stride_ib",
    "stride_ih", "stride_fb", "stride_fh", "stride_cb", "stride_ch", "stride_ck", "stride_cd", "stride_nb",
    "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_xb", "stride_xh", "stride_xk", "stride_xd",
    "stride_yb", "stride_yh", "stride_yk", "stride_zb", "stride_zh", "stride_w",
]  # fmt: skip


@triton.jit
def _vector(ptr, offs, stride, COLUMNS: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of q, k or v as float32, 0 beyond COUNT."""
    at = ptr + columns(offs, stride, COLUMNS)
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=offs < COUNT, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _strip(  # type: ignore[no-untyped-def]
    offs_k, offs_v, stride_k, stride_d, COLUMNS: tl.constexpr, ALIGN: tl.constexpr
):
    """Offsets of rows and columns of a state."""
    at = ALIGN * (offs_k.to(tl.int64) * stride_k)
    return at[:, None] + columns(offs_v, stride_d, COLUMNS)[None, :]


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    h, weight_ptr, gate_ptr, offs_v, mask_v, stride_w, stride_gd, norm_eps,
    GATE: tl.constexpr, COLUMNS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """σ(gate) · LayerNorm(h) · weight of all columns of a head [BLOCK], float32; pointers are to the head's first."""
    y = layer_norm(h[None, :], mask_v[None, :], DV, tl.cast(norm_eps, tl.float32))
    w_at = offs_v.to(tl.int64)[None, :] * stride_w
    y = y * tl.load(weight_ptr + w_at, mask=mask_v[None, :], other=0.0).to(tl.float32)
    if GATE:
        g_at = columns(offs_v, stride_gd, COLUMNS)[None, :]
        y = y * sigmoid(tl.load(gate_ptr + g_at, mask=mask_v[None, :], other=0.0).to(tl.float32))
    return tl.sum(y, 0)


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_step_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr, weight_ptr, gate_ptr, h_ptr, c_new_ptr, n_new_ptr,
    m_new_ptr, scratch_ptr, arrivals_ptr, eps, cap, norm_eps, scale, heads, tiles,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kd, stride_vb, stride_vh, stride_vd,
    stride_hb, stride_hh, stride_hd, stride_gb, stride_gh, stride_gd, stride_ib, stride_ih, stride_fb, stride_fh,
    stride_cb, stride_ch, stride_ck, stride_cd, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    stride_xb, stride_xh, stride_xk, stride_xd, stride_yb, stride_yh, stride_yk, stride_zb, stride_zh, stride_w,
    CAP: tl.constexpr, EXPONENTIAL: tl.constexpr, NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    IN_PLACE: tl.constexpr, COPIES: tl.constexpr, SECOND: tl.constexpr, LAST: tl.constexpr, DRAIN: tl.constexpr,
    BARRIER: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
    C_COLUMNS: tl.constexpr, C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state c [DK, DV] of one row and head, BLOCK_K rows of it at a time, the next ones ahead.

    Strides of q, k, v, h and the gate come in units of ALIGN, those of the states c (`c_new`: x) in units of C_ALIGN,
    but for strides of columns. Every program of a head works out n and m, the first writes them (`n_new`: y, `m_new`:
    z). IN_PLACE: c is c_new, and but with COPIES n and m are n_new and m_new. NORM: the program has all columns, or
    gets them. LAST: the last program of a head to come to its end, as `arrivals` [B, NH] count them, has h of the
    others from scratch [B, NH, DV], writes n and m, which the others have read by then, and leaves 0 in `arrivals`.
    DRAIN: a barrier does not wait for stores, as on AMD, where it is `s_barrier` alone (gfx942, triton 3.6).

    In place no barrier is between loads and stores of c: each element is loaded by one lane, and what is stored there
    is made of what was loaded. BARRIER: there are fewer elements than lanes, so that several lanes load one. SECOND: a
    second launch of the call follows.
    """
    # the norm, or what moves n and m
    pdl_launch_dependents(PDL and SECOND)
    EVEN_K: tl.constexpr = DK % BLOCK_K == 0
    EVEN_V: tl.constexpr = DV % BLOCK_V == 0
    EVEN_D: tl.constexpr = DK == BLOCK_D
    PARTS: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    row = (tl.program_id(0) // tiles // heads).to(tl.int64)
    eps = tl.cast(eps, tl.float32)
    cap = tl.cast(cap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    if IN_PLACE:
        c_ptr = c_new_ptr
        if not COPIES:
            n_ptr = n_new_ptr
            m_ptr = m_new_ptr
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < DV
    q_ptr += ALIGN * (row * stride_qb + head * stride_qh)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    h_ptr += ALIGN * (row * stride_hb + head * stride_hh)
    c_ptr += C_ALIGN * (row * stride_cb + head * stride_ch)
    c_new_ptr += C_ALIGN * (row * stride_xb + head * stride_xh)
    if EARLY:
        each: tl.constexpr = SECTOR // (c_ptr.dtype.element_ty.primitive_bitwidth // 8)
        offs_s = tile * BLOCK_V + tl.arange(0, BLOCK_V // each if each <= BLOCK_V else 1) * each
        for part in tl.static_range(PARTS if EARLY > PARTS else EARLY - 1):
            here = part * BLOCK_K + offs_k
            at = _strip(here, offs_s, stride_ck, stride_cd, C_COLUMNS, C_ALIGN)
            prefetch_l2(c_ptr + at, (here < DK)[:, None] & (offs_s < DV)[None, :])
        pdl_wait(True)
    # all loads first: what gates and sums need has come when the state has
    i = tl.load(i_ptr + row * stride_ib + head * stride_ih)
    f = tl.load(f_ptr + row * stride_fb + head * stride_fh)
    m = tl.cast(0.0, tl.float32)
    if EXPONENTIAL:
        m = tl.load(m_ptr + row * stride_mb + head * stride_mh)
    v = _vector(v_ptr, offs_v, stride_vd, COLUMNS, DV, EVEN_V)
    k = _vector(k_ptr, offs_k, stride_kd, COLUMNS, DK, EVEN_K)
    q = _vector(q_ptr, offs_k, stride_qd, COLUMNS, DK, EVEN_K)
    c_at = c_ptr + _strip(offs_k, offs_v, stride_ck, stride_cd, C_COLUMNS, C_ALIGN)
    if EVEN_K and EVEN_V:
        c = tl.load(c_at)
    else:
        c = tl.load(c_at, mask=(offs_k < DK)[:, None] & mask_v[None, :], other=0.0)
    n_at = n_ptr + row * stride_nb + head * stride_nh + offs_d.to(tl.int64) * stride_nk
    n = tl.load(n_at, mask=offs_d < DK, other=0.0)
    k_all = _vector(k_ptr, offs_d, stride_kd, COLUMNS, DK, EVEN_D)
    q_all = _vector(q_ptr, offs_d, stride_qd, COLUMNS, DK, EVEN_D)
    i = log_input(i, cap, CAP, EXPONENTIAL)
    lf = log_forget(f, cap, CAP)
    if EXPONENTIAL:
        m_new = tl.maximum(lf + m, i)
        forget = exp(lf + m - m_new)
        take = exp(i - m_new)
        m = m_new
    else:
        forget = exp(lf)
        take = exp(i)
    total = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for part in tl.static_range(PARTS):
        here = part * BLOCK_K + offs_k
        if part + 1 < PARTS:
            ahead = here + BLOCK_K
            next_k = _vector(k_ptr, ahead, stride_kd, COLUMNS, DK, EVEN_K)
            next_q = _vector(q_ptr, ahead, stride_qd, COLUMNS, DK, EVEN_K)
            next_at = c_ptr + _strip(ahead, offs_v, stride_ck, stride_cd, C_COLUMNS, C_ALIGN)
            if EVEN_K and EVEN_V:
                next_c = tl.load(next_at)
            else:
                next_c = tl.load(next_at, mask=(ahead < DK)[:, None] & mask_v[None, :], other=0.0)
        c = forget * c.to(tl.float32) + (take * k)[:, None] * v[None, :]
        total += (q * scale)[:, None] * c
        c = half_range(c, c_new_ptr.dtype.element_ty).to(c_new_ptr.dtype.element_ty)
        x_at = c_new_ptr + _strip(here, offs_v, stride_xk, stride_xd, C_COLUMNS, C_ALIGN)
        if BARRIER:
            tl.debug_barrier()
        if EVEN_K and EVEN_V:
            tl.store(x_at, c)
        else:
            tl.store(x_at, c, mask=(here < DK)[:, None] & mask_v[None, :])
        if part + 1 < PARTS:
            c = next_c
            k = next_k
            q = next_q
    pdl_launch_dependents(PDL and not SECOND)
    h = tl.sum(total, 0)
    n = forget * n + take * k_all
    if NORMALIZE:
        # + 0: as in the kernel of sequences
        h = h / denominator(tl.sum(q_all * scale * n + 0.0, 0), m, eps, EXPONENTIAL)
    slot = row * heads + head
    weight_ptr += head * DV * stride_w
    gate_ptr += ALIGN * (row * stride_gb + head * stride_gh)
    n_new_ptr += row * stride_yb + head * stride_yh
    m_new_ptr += row * stride_zb + head * stride_zh
    if LAST:
        if NORM and DRAIN:
            # acquire: each wave goes on when what it wrote has arrived
            words = scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * DV + offs_v
            tl.atomic_xchg(words, h.to(tl.int32, bitcast=True), mask=mask_v, sem="acquire")
        elif NORM:
            tl.store(scratch_ptr + slot * DV + offs_v, h, mask=mask_v)
        else:
            tl.store(h_ptr + columns(offs_v, stride_hd, COLUMNS), h.to(h_ptr.dtype.element_ty), mask=mask_v)
        # what every lane has stored comes before what one of them then says
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + slot, 1, sem="acq_rel") == tiles - 1:
            tl.store(arrivals_ptr + slot, 0)
            if NORM:
                offs_h = tl.arange(0, BLOCK_H)
                mask_h = offs_h < DV
                whole = tl.load(scratch_ptr + slot * DV + offs_h, mask=mask_h, other=0.0)
                whole = _normed(
                    whole, weight_ptr, gate_ptr, offs_h, mask_h, stride_w, stride_gd, norm_eps, GATE, COLUMNS, DV
                )
                tl.store(h_ptr + columns(offs_h, stride_hd, COLUMNS), whole.to(h_ptr.dtype.element_ty), mask=mask_h)
            tl.store(n_new_ptr + offs_d.to(tl.int64) * stride_yk, n, mask=offs_d < DK)
            if EXPONENTIAL:
                tl.store(m_new_ptr, m)
    else:
        if NORM:
            h = _normed(h, weight_ptr, gate_ptr, offs_v, mask_v, stride_w, stride_gd, norm_eps, GATE, COLUMNS, DV)
        tl.store(h_ptr + columns(offs_v, stride_hd, COLUMNS), h.to(h_ptr.dtype.element_ty), mask=mask_v)
        if tile == 0:
            if IN_PLACE and not COPIES:
                # several lanes have read the same of n and m
                tl.debug_barrier()
            tl.store(n_new_ptr + offs_d.to(tl.int64) * stride_yk, n, mask=offs_d < DK)
            if EXPONENTIAL:
                tl.store(m_new_ptr, m)


class Memory(NamedTuple):
    """What a call writes: h, the new states, h before the norm, and arrivals; None where it is not needed.

    `n_kept`, `m_kept`: where the caller has n and m, which a second launch writes.
    """

    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor | None
    scratch: Tensor | None
    arrivals: Tensor | None = None
    n_kept: Tensor | None = None
    m_kept: Tensor | None = None


class How(NamedTuple):
    """What a step is given that a sequence of one token is not: see `wavecrest.ops.mlstm_step`."""

    in_place: bool = False
    arrivals: Tensor | None = None


class Split(NamedTuple):
    """How a head is taken apart: programs over its columns, and what is left to do behind all of them.

    `apart`: the norm, which needs all columns. `copies`: in place, n and m go to where the caller has them, which all
    programs of a head read. `counted`: the last program of a head to come to its end does it, else a second launch.
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


def default(dk: int, dv: int, arch: Arch | None) -> Config:
    """Columns of the state so that a program has 8,192 elements of it, all rows at once; on NVIDIA 32 rows at a time.

    Reasoned, not measured: 32 registers a lane of 8 warps or 4 waves, all of them loaded at once, and of a state of 256
    rows 128 bytes of each, a full line of every cache. The batch has no say, so that a row has the same bits in any.
    """
    rows, width = _layout.power_of_two(dk), _layout.power_of_two(dv)
    if arch is not None and arch.vendor == "nvidia" and rows > 64 and width >= 64:
        # 256 x 512, 64 rows of a batch in place: 141 us, 177 with 256 rows and 32 columns at once (H200, 2026-11-22)
        return Config(BLOCK_K=32, BLOCK_V=64, num_warps=4, EARLY=1)
    block_v = max(4, min(width, TILE // rows))
    wave = 32 if arch is None else arch.wave_size
    return Config(BLOCK_K=rows, BLOCK_V=block_v, num_warps=max(1, min(8, rows * block_v // (32 * wave))))


def space(dk: int, dv: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: rows at a time, widths, numbers of warps."""
    first = default(dk, dv, arch)
    yield first
    rows, width = _layout.power_of_two(dk), _layout.power_of_two(dv)
    for block_k in sorted({rows, *(size for size in (16, 32, 64, 128) if size < rows)}):
        for block_v in (16, 32, 64, 128, 256, 512):
            for warps in (1, 2, 4, 8):
                # from two accesses of 16 bytes a lane to the registers that there are; at most 16 parts in turn
                each = block_k * block_v // (warps * arch.wave_size)
                made = Config(BLOCK_K=block_k, BLOCK_V=block_v, num_warps=warps)
                if 8 <= each <= 64 and block_v <= width and rows // block_k <= 16 and made != first:
                    yield made


def split_of(given: Operands, how: How, config: Config) -> Split:
    """How the heads of a call are taken apart."""
    tiles = _layout.ceil_div(given.dv, config["BLOCK_V"])
    apart, copies = given.norm_weight is not None and tiles > 1, how.in_place and tiles > 1
    return Split(tiles, apart, copies, how.arrivals is not None)


def tensors_of(given: Operands, memory: Memory, in_place: bool, split: Split) -> tuple[Tensor, ...]:
    """The kernel's pointers, an input for what it does not look at."""
    q, states = given.q, given.initial
    if in_place:
        states = (None, *states[1:]) if split.copies and split.second else (None, None, None)
    read = or_else(q, q, given.k, given.v, given.i, given.f, *states, given.norm_weight, given.output_gate)
    h = memory.scratch if split.apart and split.second else memory.h
    assert h is not None
    return (*read, h, *or_else(q, memory.c, memory.n, memory.m, memory.scratch, memory.arrivals))


def norm_tensors_of(given: Operands, memory: Memory, split: Split) -> tuple[Tensor, ...]:
    """The pointers of the second launch."""
    states = (memory.n, memory.m) if split.copies else (None, None)
    read = or_else(
        given.q, memory.scratch, given.norm_weight, given.output_gate, None, None, None, *states
    )  # fmt: skip
    return (*read, memory.h, *or_else(given.q, memory.n_kept, memory.m_kept))


def launches_of(given: Operands, memory: Memory, how: How, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, one or two; `given` is the step as a sequence of one token."""
    split, normed, overlaps = split_of(given, how, config), given.norm_weight is not None, _pdl.overlaps(arch)
    early, options = _pdl.start_of(config, arch)
    # True: a second launch makes h of what this one leaves in scratch
    later = split.apart and split.second
    gate = given.output_gate if normed and not later else None
    h_strides = (*before_norm(given), 1) if later else strides(memory.h, 4)
    close = side_by_side(given.q, given.k, given.v, gate, None if later else memory.h)
    walked = [strides(one, 4) for one in (given.q, given.k, given.v)] + [h_strides, strides(gate, 4)]
    align = _layout.alignment(0, *(one[:2] for one in walked)) if close else 1
    c_strides, x_strides = strides(given.c_initial, 4), strides(memory.c, 4)
    c_close = side_by_side(given.c_initial, memory.c)
    c_align = _layout.alignment(0, c_strides[:3], x_strides[:3]) if c_close else 1
    sizes = (
        float(given.eps), float(given.gate_soft_cap), float(given.norm_eps), float(given.dk**-0.5), given.heads,
        split.tiles, *(part for one in walked for part in (one[0] // align, one[1] // align, one[3])),
        *strides(given.i, 2), *strides(given.f, 2), *(s // c_align for s in c_strides[:3]), c_strides[3],
        *strides(given.n_initial, 3), *strides(given.m_initial, 2), *(s // c_align for s in x_strides[:3]),
        x_strides[3], *strides(memory.n, 3), *strides(memory.m, 2), *strides(given.norm_weight, 1),
    )  # fmt: skip
    lanes = config["num_warps"] * (64 if arch is None else arch.wave_size)
    constants: dict[str, Any] = {
        "CAP": given.capped, "EXPONENTIAL": given.exponential, "NORMALIZE": given.normalize,
        "NORM": normed and not later, "GATE": gate is not None, "IN_PLACE": how.in_place,
        "COPIES": split.copies and split.second, "SECOND": split.second, "LAST": split.last,
        "DRAIN": arch is not None and arch.vendor == "amd",
        "BARRIER": how.in_place and config["BLOCK_K"] * config["BLOCK_V"] < lanes, "PDL": overlaps, "EARLY": early,
        "COLUMNS": close, "ALIGN": align, "C_COLUMNS": c_close, "C_ALIGN": c_align, "DK": given.dk, "DV": given.dv,
        "BLOCK_D": _layout.power_of_two(given.dk), "BLOCK_H": _layout.power_of_two(given.dv) if split.last else 1,
    }  # fmt: skip
    grid = (given.batch * given.heads * split.tiles,)
    tensors = tensors_of(given, memory, how.in_place, split)
    found = [_launcher.Launch(_mlstm_step_kernel, grid, (*tensors, *sizes), constants, options)]
    if split.second:
        states = (memory.n_kept, memory.m_kept) if split.copies else None
        tensors = norm_tensors_of(given, memory, split)
        found.append(norm_launch(given, tensors, memory.h, before_norm(given), states, arch, overlaps, STEP))
    return found


class Sizes(NamedTuple):
    """What the memory of a call follows from."""

    batch: int
    heads: int
    dk: int
    dv: int
    exponential: bool
    c_dtype: torch.dtype


def sizes_of(given: Operands) -> Sizes:
    """Those of a call."""
    return Sizes(given.batch, given.heads, given.dk, given.dv, given.exponential, given.c_dtype)


def allocate(sizes: Sizes, now: Operands, how: How, split: Split, device: torch.device | str) -> Memory:
    """Memory for a call; in place the caller's."""
    single, shape = torch.float32, (sizes.batch, sizes.heads)
    h, scratch = torch.empty_like(now.v, device=device), None
    if split.apart:
        scratch = torch.empty((*shape, sizes.dv), dtype=single, device=device)
    arrivals = how.arrivals if split.last else None
    c, n, m = now.initial
    assert c is not None and n is not None
    if how.in_place and not (split.copies and split.second):
        return Memory(h, c, n, m, scratch, arrivals)
    new_n = torch.empty((*shape, sizes.dk), dtype=single, device=device)
    new_m = torch.empty((*shape, 1), dtype=single, device=device) if sizes.exponential else None
    if how.in_place:
        return Memory(h, c, new_n, new_m, scratch, None, n, m)
    c = torch.empty((*shape, sizes.dk, sizes.dv), dtype=sizes.c_dtype, device=device)
    return Memory(h, c, new_n, new_m, scratch, arrivals)


def planned(given: Operands, how: How, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    device = given.q.device if torch.compiler.is_compiling() else torch.device("meta")
    memory = allocate(sizes_of(given), given, how, split_of(given, how, config), device)
    return launches_of(given, memory, how, config, arch)


def bind(given: Operands, how: How, config: Config) -> Callable[[Operands, Tensor | None], tuple[Tensor, ...]]:
    """The function for all calls with arguments like these.

    It takes the tensors alone, without a dimension for tokens, and arrivals: nothing else is looked at again.
    """
    device, split, sizes, in_place = given.q.device, split_of(given, how, config), sizes_of(given), how.in_place
    made = planned(given, how, config, _target.arch())
    start, numbers = _launcher.starter(made[0], device), made[0].args[TENSORS:]
    finish, more = None, ()
    if split.second:
        finish, more = _launcher.starter(made[1], device), made[1].args[NORM_TENSORS:]
    some = sizes.batch * sizes.heads > 0

    def call(now: Operands, arrivals: Tensor | None) -> tuple[Tensor, ...]:
        memory = allocate(sizes, now, How(in_place, arrivals), split, device)
        if some:
            start(*tensors_of(now, memory, in_place, split), *numbers)
            if finish is not None:
                finish(*norm_tensors_of(now, memory, split), *more)
        states = now.initial if in_place else memory[1:4]
        return (memory.h, *(one for one in states if one is not None))

    return call
