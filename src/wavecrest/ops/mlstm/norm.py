"""The norm and the output gate of the mLSTM where no program of the kernel before has all of a head's columns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.common.device import SECTOR, pdl_launch_dependents, pdl_wait, prefetch_l2
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.call import Operands
from wavecrest.ops.mlstm.device import PACKED, PADDED, columns, layer_norm, sigmoid

FORMS = {"whole": 0, "padded": 1, "packed": 2}
# elements of a program and of one of its lanes. Of a sequence a program is a warp, whose sums wait for no barrier:
# behind the chunks of 4 × 2,048 tokens of 8 heads of 512 columns it takes 49 µs, as its bytes do, and 60 with the tile
# of a step. A step has few rows and waits for each of them: of eight in a row one of xLSTM 7B took 3,634 µs with the
# tile of a sequence, 3,617 with its own (H200, 2026-11-23)
SEQUENCE, STEP = (1024, 32), (4096, 16)
# rows that 32 bits count: the last program may have some behind the last one
MOST_NARROW = 2**31 - max(SEQUENCE[0], STEP[0])

_SIZES = [
    "norm_eps", "tokens", "heads", "rows", "sequences",
    "stride_xb", "stride_xh", "stride_xs", "stride_yb", "stride_yh", "stride_ys", "stride_yd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_w", "stride_cu", "stride_starts", "stride_lens",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, gate_ptr, cu_ptr, starts_ptr, lens_ptr, n_ptr, m_ptr, y_ptr, n_new_ptr, m_new_ptr,
    norm_eps, tokens, heads, rows, sequences,
    stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_yd, stride_gb, stride_gh, stride_gs,
    stride_gd, stride_w, stride_cu, stride_starts, stride_lens, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    STATES: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr, COLUMNS: tl.constexpr, W_COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (b, s, h), h fastest: y = σ(gate) · LayerNorm(x) · weight; with STATES n and m to where they belong.

    Strides of x, y and the gate come in units of ALIGN but for those of columns. STATES: of one token, n [B, NH, DK]
    and m [B, NH] contiguous. NORM off: the states alone.
    """
    # divided in 32 bits where rows fit: in 64 a division is a hundred instructions
    first = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    offs_m = first * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    head = (offs_m % heads).to(tl.int64)
    token = ((offs_m // heads) % tokens).to(tl.int64)
    row = (offs_m // heads // tokens).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = (offs_v < DV)[None, :]
    if PDL:
        if NORM:
            # of all that is read this alone comes from far
            each: tl.constexpr = SECTOR // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            offs_s = tl.arange(0, BLOCK_V // each if each <= BLOCK_V else 1) * each
            w_at = (head * DV)[:, None] + offs_s[None, :]
            # rows beyond the last one have heads too
            prefetch_l2(weight_ptr + columns(w_at, stride_w, W_COLUMNS), (offs_s < DV)[None, :])
        pdl_wait(PDL)
        # not before: what waits beside programs that wait would crowd where the launch before both runs dry
        pdl_launch_dependents(PDL)
    # all loads first: none waits for a sum
    if STATES:
        offs_k = tl.arange(0, BLOCK_K)
        mask_n = mask_m[:, None] & (offs_k < DK)[None, :]
        n = tl.load(n_ptr + ((row * heads + head) * DK)[:, None] + offs_k[None, :], mask=mask_n)
        if M:
            m = tl.load(m_ptr + row * heads + head, mask=mask_m)
    inside = mask_m
    if FORM == PACKED:
        begin = tl.load(cu_ptr).to(tl.int64)
        end = tl.load(cu_ptr + sequences * stride_cu).to(tl.int64)
        inside = mask_m & (token >= begin) & (token < end)
    elif FORM == PADDED:
        begin = token * 0
        end = begin + tokens
        if STARTS:
            begin = tl.load(starts_ptr + row * stride_starts, mask=mask_m, other=0).to(tl.int64)
        if LENS:
            end = begin + tl.load(lens_ptr + row * stride_lens, mask=mask_m, other=0).to(tl.int64)
        inside = mask_m & (token >= begin) & (token < end)
    if NORM:
        # what is not a token's is not read: y is 0 there already
        mask = inside[:, None] & mask_v
        x_at = ALIGN * (row * stride_xb + head * stride_xh + token * stride_xs)
        y_at = ALIGN * (row * stride_yb + head * stride_yh + token * stride_ys)
        x = tl.load(x_ptr + x_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
        w_at = (head * DV)[:, None] + offs_v[None, :]
        w = tl.load(weight_ptr + columns(w_at, stride_w, W_COLUMNS), mask=mask, other=0.0)
        if GATE:
            g_at = ALIGN * (row * stride_gb + head * stride_gh + token * stride_gs)
            g_at = g_at[:, None] + columns(offs_v, stride_gd, COLUMNS)[None, :]
            gate = tl.load(gate_ptr + g_at, mask=mask, other=0.0)
        x = layer_norm(x, mask, DV, tl.cast(norm_eps, tl.float32))
        x = x * w.to(tl.float32)
        if GATE:
            x = x * sigmoid(gate.to(tl.float32))
        y_at = y_at[:, None] + columns(offs_v, stride_yd, COLUMNS)[None, :]
        tl.store(y_ptr + y_at, x.to(y_ptr.dtype.element_ty), mask=mask)
    if STATES:
        n_at = (row * stride_nb + head * stride_nh)[:, None] + offs_k.to(tl.int64)[None, :] * stride_nk
        tl.store(n_new_ptr + n_at, n, mask=mask_n)
        if M:
            tl.store(m_new_ptr + row * stride_mb + head * stride_mh, m, mask=mask_m)


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of a tensor, 0 for dimensions of one element and where there is none."""
    if tensor is None:
        return (0,) * dims
    found = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple(found[:dims]) + (0,) * (dims - len(found))


def side_by_side(*tensors: Tensor | None) -> bool:
    """True if the columns of all of them lie next to each other."""
    return all(one is None or one.shape[-1] <= 1 or one.stride(-1) == 1 for one in tensors)


def norm_launch(
    given: Operands,
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
        given: the call.
        tensors: what the kernel gets for its pointers.
        y: the result [B, NH, S, DV], for its strides.
        scratch: the strides of rows, heads and tokens of h before the norm, whose columns lie side by side.
        states: n and m of the caller's, for their strides, where the kernel writes them.
        arch: what it is made for.
        early: it starts while the launch before it runs, which has allowed that, and waits for its end.
        tile: SEQUENCE or STEP.
    """
    gate = given.output_gate
    close = side_by_side(y, gate)
    y_strides, gate_strides = strides(y, 4), strides(gate, 4)
    align = _layout.alignment(0, scratch, y_strides[:3], gate_strides[:3]) if close else 1
    block_v = _layout.power_of_two(given.dv)
    block_k = _layout.power_of_two(given.dk) if states is not None else 1
    elements, lane = tile
    block_m = max(1, elements // max(block_v, block_k))
    rows = given.batch * given.heads * given.tokens
    wave = 32 if arch is None else arch.wave_size
    constants: dict[str, Any] = {
        **sequence_constants(given), "NORM": given.norm_weight is not None, "GATE": gate is not None,
        "STATES": states is not None, "M": states is not None and states[1] is not None, "PDL": early,
        "COLUMNS": close, "W_COLUMNS": side_by_side(given.norm_weight), "ALIGN": align, "WIDE": rows > MOST_NARROW,
        "DK": given.dk, "DV": given.dv, "BLOCK_K": block_k, "BLOCK_V": block_v, "BLOCK_M": block_m,
    }  # fmt: skip
    n_strides = strides(None if states is None else states[0], 3)
    m_strides = strides(None if states is None else states[1], 2)
    sizes = (
        float(given.norm_eps), given.tokens, given.heads, rows, given.sequences,
        *(one // align for one in scratch), *(one // align for one in y_strides[:3]), y_strides[3],
        *(one // align for one in gate_strides[:3]), gate_strides[3], *strides(given.norm_weight, 1),
        *sequence_strides(given), *n_strides, *m_strides,
    )  # fmt: skip
    warps = max(1, min(8, block_m * block_v // (lane * wave)))
    grid = (_layout.ceil_div(rows, block_m),)
    config = Config(num_warps=warps, **({"launch_pdl": 1} if early else {}))
    return _launcher.Launch(_mlstm_norm_kernel, grid, (*tensors, *sizes), constants, config)


def sequence_constants(given: Operands) -> dict[str, Any]:
    """What kernels are made for of where sequences lie."""
    starts, lens = given.seq_starts is not None, given.seq_lens is not None
    return {"FORM": FORMS[given.form], "STARTS": starts, "LENS": lens}


def sequence_strides(given: Operands) -> tuple[int, ...]:
    """The strides of cu_seqlens, seq_starts and seq_lens."""
    return (*strides(given.cu_seqlens, 1), *strides(given.seq_starts, 1), *strides(given.seq_lens, 1))


def or_else(stand_in: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors, with an input for those that are not there: kernels do not read or write it."""
    return tuple(stand_in if one is None else one for one in tensors)


def before_norm(given: Operands) -> tuple[int, int, int]:
    """The strides of rows, heads and tokens of h before the norm: [B, S, NH, DV], as models lay it out."""
    heads, tokens, dv = given.heads, given.tokens, given.dv
    return tokens * heads * dv, dv, heads * dv
