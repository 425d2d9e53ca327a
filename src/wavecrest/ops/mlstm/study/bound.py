"""How far elements of a kernel's h and states may be from the reference's, for `wavecrest tune`.

The definition is run once more in float64, and beside it what float32 makes of it: each state carries the largest error
that it can have, to first order, from the errors of its exponents and of each product and sum. Both the reference and
the kernel have that error. The kernel of chunks has more, from what matrix units take in 16 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.mlstm.reference as _reference
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall

# half a unit in the last place; everything is computed in float32
_HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_STEP = _HALF_UNIT[torch.float32]
# the least number that a rounding to a type is off by: half of its least subnormal number
_LEAST = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
# units of float32 that a gate's logarithm is off by, relative to its terms; and an exponential or a logistic function
_GATE_UNITS, _EXP_UNITS = 8, 4
# tokens of a tile, whose products are summed in any order
_TILE = 64
# matrix units cut sums off where float32 would round: up to four units of it
_CUT = 4


class _Carried(NamedTuple):
    """States of all sequences in float64, their sums of absolute products, and how far float32 may be off."""

    c: Tensor
    n: Tensor
    m: Tensor | None
    c_abs: Tensor
    n_abs: Tensor
    c_off: Tensor
    n_off: Tensor
    m_off: Tensor


def _first(call: MlstmCall) -> _Carried:
    c, n, m = _reference.first_state(call)
    return _Carried(c, n, m, c.abs(), n.abs(), torch.zeros_like(c), torch.zeros_like(n), n.new_zeros(n.shape[:2]))


def _where(rows: Tensor, state: _Carried, other: _Carried | None) -> _Carried:
    """A state where `rows` [N], another or zeros elsewhere."""

    def chosen(one: Any, otherwise: Any) -> Any:
        if one is None:
            return None
        shown = rows.view(-1, *[1] * (one.ndim - 1))
        return one.where(shown, torch.zeros_like(one) if otherwise is None else otherwise)

    return _Carried(*map(chosen, state, [None] * len(state) if other is None else other))


def _spread(x: Tensor, dims: int) -> Tensor:
    """x [N, NH] with `dims` more dimensions of size 1, to broadcast against states."""
    return x.view(*x.shape, *[1] * dims)


def _step(state: _Carried, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor], off: tuple[Tensor, Tensor]) -> _Carried:
    """One token: k [N, NH, DK], v [N, NH, DV], the logarithms of gates i and f, and their errors [N, NH]."""
    (i, lf), (i_off, lf_off) = gates, off
    m = state.m
    if m is None:
        forget, take, m_new, m_off = lf, i, None, state.m_off
        size = torch.zeros_like(i)
    else:
        m_new = torch.maximum(lf + m, i)
        forget, take = lf + m - m_new, i - m_new
        size = 2 * m.abs() + m_new.abs()
        # a maximum is off by no more than its arguments are
        m_off = torch.maximum(state.m_off + lf_off + _STEP * (lf.abs() + m.abs()), i_off)
    # the exponents' roundings, then the exponentials'
    forget_off = lf_off + _STEP * (lf.abs() + size + _EXP_UNITS)
    # a gate that is closed takes nothing, exactly
    take_off = i_off + _STEP * (i.abs().nan_to_num(0.0, 0.0, 0.0) + size + _EXP_UNITS)
    forget, take = torch.exp(forget), torch.exp(take)
    found = []
    for kept, kept_abs, kept_off, new in (
        (state.c, state.c_abs, state.c_off, k[..., :, None] * v[..., None, :]), (state.n, state.n_abs, state.n_off, k)
    ):  # fmt: skip
        more = new.ndim - 2
        a, b = _spread(forget, more), _spread(take, more)
        x, x_abs = a * kept + b * new, a * kept_abs + b * new.abs()
        # products and the sum are rounded, in whatever order
        x_off = a * (kept_off + _spread(forget_off, more) * kept_abs) + _spread(take_off, more) * b * new.abs()
        found.append((x, x_abs, x_off + 4 * _STEP * x_abs))
    (c, c_abs, c_off), (n, n_abs, n_off) = found
    return _Carried(c, n, m_new, c_abs, n_abs, c_off, n_off, m_off)


class _Rounded(NamedTuple):
    """Errors of roundings below float32: relative to a state c, to a weighted score in h, to h before a norm."""

    state: float
    product: float
    before_norm: float
    # relative to a row's largest sum of absolute products: float16 has tiles relative to their largest weight
    tile: float


def _rounded(call: MlstmCall, chunks: bool) -> _Rounded:
    if not chunks or call.q.dtype == torch.float32:
        return _Rounded(0.0, 0.0, 0.0, 0.0)
    unit = _HALF_UNIT[call.q.dtype]
    # weighted keys, and of states between chunks the second rounding; weighted scores once; 5 % for their products
    tile = _TILE * _LEAST[torch.float16] if call.q.dtype == torch.float16 else 0.0
    return _Rounded(1.05 * unit, 2.1 * unit, 1.01 * unit, tile)


def _output(call: MlstmCall, state: _Carried, q: Tensor, rounded: _Rounded, single: float) -> tuple[Tensor, Tensor]:
    """h of one token [N, NH, DV] and how far the kernel's and the reference's may be apart; q [N, NH, DK], scaled."""
    row, row_abs = q[..., None, :], q.abs()[..., None, :]
    num, num_abs = (row @ state.c)[..., 0, :], (row_abs @ state.c_abs)[..., 0, :]
    # a sum over DK and, in chunks, over tokens of a tile
    sums = (q.shape[-1] + _TILE + 4) * single
    num_off = 2 * (row_abs @ state.c_off)[..., 0, :] + (2 * sums + rounded.product) * num_abs
    num_off = num_off + rounded.tile * num_abs.amax(-1, keepdim=True)
    if not call.normalize:
        return num, num_off
    den = (q * state.n).sum(-1)
    den_off = 2 * (q.abs() * state.n_off).sum(-1) + 2 * sums * (q.abs() * state.n_abs).sum(-1)
    den = den.abs()
    if state.m is None:
        floor, floor_off = torch.ones_like(den), torch.zeros_like(den)
    else:
        floor = torch.exp(-state.m)
        floor_off = 2 * floor * (state.m_off + _STEP * (state.m.abs() + _EXP_UNITS))
    low = torch.maximum(den, floor)
    # only what may be the larger of them counts
    low_off = torch.maximum(
        den_off.where(den + den_off >= floor - floor_off, 0.0), floor_off.where(floor + floor_off >= den - den_off, 0.0)
    )
    low, low_off = low[..., None] + call.eps, low_off[..., None] + 2 * _STEP * low[..., None]
    y = num / low
    return y, (num_off + y.abs() * low_off) / (low - low_off).clamp(min=1e-300) + 4 * _STEP * y.abs()


def _epilogue(call: MlstmCall, y: Tensor, off: Tensor, rounded: _Rounded, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and the gate in float64, and what they make of errors; y, off [B, NH, S, DV]."""
    if call.norm_weight is None:
        return y, off
    off = off + rounded.before_norm * y.abs()
    mean = y.mean(-1, keepdim=True)
    deviation = ((y - mean).square().mean(-1, keepdim=True) + call.norm_eps).sqrt()
    # sums over a row's DV elements, by both
    sums = 2 * (call.dv + 8) * _STEP
    own = off + off.mean(-1, keepdim=True) + sums * y.abs().mean(-1, keepdim=True)
    # the deviation is a norm of the row: it moves by no more than the row does, and by its own sum
    moved = own.square().mean(-1, keepdim=True).sqrt() + sums * deviation
    left = (deviation - moved).clamp(min=1e-300)
    y = (y - mean) / deviation
    off = (own + y.abs() * moved) / left + 8 * _STEP * y.abs()
    weight = call.norm_weight.double().view(1, call.heads, 1, call.dv)
    y, off = y * weight, off * weight.abs()
    if call.output_gate is not None:
        gate = torch.sigmoid(call.output_gate.double())
        # σ moves by (1 - σ) times its argument's error
        off = gate * (off + 2 * _STEP * (call.output_gate.double().abs() + _EXP_UNITS + 4) * y.abs())
        y = gate * y
    return y.where(inside, 0.0), off.where(inside, 0.0)


def _stored(y: Tensor, off: Tensor, dtype: torch.dtype) -> Tensor:
    """With the rounding of both to a type."""
    return off + 2 * (1.01 * _HALF_UNIT[dtype] * (y.abs() + off) + _LEAST[dtype])


def bound(call: MlstmCall, *, chunks: bool) -> tuple[Tensor, ...] | None:
    """Most that elements of a kernel's results may differ from the reference's: h, then the last states if asked for.

    Args:
        call: checked.
        chunks: whether the kernel is that of chunks, whose matrix units take 16 bits.

    Returns:
        float64 tensors of the results' shapes; None for float64, which no kernel takes.
    """
    if call.q.dtype == torch.float64:
        return None
    exact = call._replace(**{name: getattr(call, name).double() for name in ("q", "k", "v")})
    rows, state = _reference.rows_of(exact), _first(exact)
    i_off, lf_off = _gates_off(exact, rows)
    rounded = _rounded(call, chunks)
    single = _STEP if call.q.dtype == torch.float32 else _CUT * _STEP
    scale = call.dk**-0.5
    y, off = torch.zeros_like(rows.v), torch.zeros_like(rows.v)
    for t in range(rows.q.shape[2]):
        if rows.resets is not None:
            state = _where(~rows.resets[:, t], state, None)
        gates, gates_off = (rows.i[:, :, t], rows.lf[:, :, t]), (i_off[:, :, t], lf_off[:, :, t])
        after = _step(state, rows.k[:, :, t], rows.v[:, :, t], gates, gates_off)
        if rows.inside is not None:
            # other places leave states as they are, to the last bit
            after = _where(rows.inside[:, t], after, state)
        state = after
        y[:, :, t], off[:, :, t] = _output(call, state, rows.q[:, :, t] * scale, rounded, single)
    return _results(call, exact, rows, state, (y, off), rounded)


def _gates_off(call: MlstmCall, rows: _reference.Rows) -> tuple[Tensor, Tensor]:
    """How far the logarithms of the gates i and f may be off in float32, [N, NH, W].

    log σ(x) moves by 1 − σ(x) = 1 − e^(log σ(x)) times what x is off by, which is no more than |log σ(x)| and 1.
    """
    plain = call._replace(input_gate="exp", normalize=True)
    # capped pre-activations lie in the places of tokens as the gates do
    i = _reference.rows_of(plain).i
    f = _reference.rows_of(plain._replace(i=call.f)).i

    def logistic(x: Tensor, log: Tensor) -> Tensor:
        return _GATE_UNITS * _STEP * (log.abs() + x.abs() * log.abs().clamp(max=1.0))

    i_off = _GATE_UNITS * _STEP * i.abs() if call.exponential else logistic(i, rows.i)
    return i_off.nan_to_num(0.0, 0.0, 0.0), logistic(f, rows.lf).nan_to_num(0.0, 0.0, 0.0)


def _results(
    call: MlstmCall,
    exact: MlstmCall,
    rows: _reference.Rows,
    state: _Carried,
    outputs: tuple[Tensor, Tensor],
    rounded: _Rounded,
) -> tuple[Tensor, ...]:
    y, off = (_reference.laid_out(exact, rows, one) for one in outputs)
    inside = _reference.laid_out(exact, rows, torch.ones_like(rows.v[..., :1])) > 0
    y, off = _epilogue(call, y, off, rounded, inside)
    h_off = _stored(y, off, call.q.dtype).where(inside, 0.0)
    if not call.return_last_states:
        return (h_off,)
    c_off = 2 * state.c_off + (rounded.state + 2 * _TILE * _STEP) * state.c_abs
    c_off = _stored(state.c, c_off, call.c_dtype)
    n_off = _stored(state.n, 2 * state.n_off + 2 * _TILE * _STEP * state.n_abs, torch.float32)
    if state.m is None:
        return h_off, c_off, n_off
    return h_off, c_off, n_off, _stored(state.m, 2 * state.m_off, torch.float32)[..., None]


def step_bound(call: MlstmStepCall) -> tuple[Tensor, ...] | None:
    """The same of one token: h [B, NH, DV], c, n and m where there is one."""
    found = bound(call.sequence(), chunks=False)
    if found is None:
        return None
    h, *states = found
    if call.in_place and call.m is not None:
        # it is the caller's
        states[2] = states[2].view(call.m.shape)
    return h[:, :, 0], *states
