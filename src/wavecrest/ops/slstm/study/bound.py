"""How far elements of a kernel's h and states may be from the reference's, for `wavecrest tune`.

The definition is run once more in float64, and beside it what float32 makes of it: states carry the largest error that
they can have, to first order, from the errors of pre-activations, exponents, and of each product and sum. Both the
reference and the kernel have that error; the kernel rounds h to the inputs' dtype before it is multiplied, too. c and n
are held as c e^m and n e^m, in which m cancels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.slstm.reference as _reference
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall

# half a unit in the last place; everything is computed in float32
_HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_STEP = _HALF_UNIT[torch.float32]
# h as an operand: of float32 three terms of tf32, whose products lack the smallest
_OPERAND = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# the least number that a rounding to a type is off by: half of its least subnormal number
_LEAST = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
# units of float32 that functions are off by
_UNITS = 8


class _Carried(NamedTuple):
    """States [B, NH, D] in float64, the sum of absolute terms of c, and how far float32 may be off."""

    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor
    c_abs: Tensor
    h_off: Tensor
    c_off: Tensor
    n_off: Tensor
    m_off: Tensor


def _first(call: SlstmCall) -> _Carried:
    h, c, n, m = _reference.first_state(call)
    none = torch.zeros_like(h)
    return _Carried(h, c, n, m, c.abs(), none, none, none, none)


def _where(rows: Tensor, state: _Carried, other: _Carried | None) -> _Carried:
    """A state where `rows` [B], another or zeros elsewhere."""
    shown = rows[:, None, None]
    chosen = [
        one.where(shown, torch.zeros_like(one) if other is None else other[index]) for index, one in enumerate(state)
    ]
    return _Carried(*chosen)


def _step(call: SlstmCall, state: _Carried, x: Tensor, r: Tensor, unit: float) -> _Carried:
    """One token: x [B, 4, NH, D] with the bias."""
    added, size = _reference.recurrent(state.h, r), _reference.recurrent(state.h.abs(), r.abs())
    a = x + added
    # the operand's rounding, sums in any order, and the additions of x and bias
    off = _reference.recurrent(state.h_off, r.abs()) + (unit + 2 * (call.head_dim + 4) * _STEP) * size
    off = off + 4 * _STEP * (x.abs() + a.abs())
    i, f, z, o = a.unbind(1)
    i_off, f_off, z_off, o_off = off.unbind(1)
    h, c, n, m = _reference.cell(a, (state.h, state.c, state.n, state.m), call.forget_gate)
    lf, lf_off = f, f_off
    if call.forget_gate == "sigmoid":
        lf = torch.nn.functional.logsigmoid(f)
        # log σ moves by 1 − σ times what its argument is off by
        lf_off = (1 - torch.exp(lf)) * f_off + _UNITS * _STEP * lf.abs()
    empty = state.n == 0
    before = lf + state.m
    m_off = torch.maximum((state.m_off + lf_off + 2 * _STEP * before.abs()).masked_fill(empty, 0.0), i_off)
    rounded = 2 * _STEP * (m.abs() + before.abs() + _UNITS)
    forget = torch.exp(before - m).masked_fill(empty, 0.0)
    take = torch.exp(i - m)
    forget_off, take_off = lf_off + rounded, i_off + 2 * _STEP * (m.abs() + i.abs() + _UNITS)
    # no exponential of a number below 0 is off by more than 1
    forget_off, take_off = forget_off.clamp(max=1.0), take_off.clamp(max=1.0)
    tanh = torch.tanh(z)
    tanh_off = (1 - tanh.square()) * z_off + 2 * _UNITS * _STEP * tanh.abs()
    c_abs = forget * state.c_abs + take * tanh.abs()
    c_off = forget * (state.c_off + forget_off * state.c_abs) + take * (tanh_off + take_off * tanh.abs())
    n_off = forget * (state.n_off + forget_off * state.n) + take * take_off
    c_off, n_off = c_off + 4 * _STEP * c_abs, n_off + 4 * _STEP * n
    gate = torch.sigmoid(o)
    gate_off = gate * (1 - gate) * o_off + 2 * _UNITS * _STEP * gate
    left = (n - n_off).clamp(min=1e-300)
    h_off = gate_off * (c / n).abs() + gate * (c_off + (c / n).abs() * n_off) / left + 4 * _STEP * h.abs()
    # c / n is a mean of values of tanh and of the first state's: where errors have grown beyond it, the first order
    # says nothing more, and would end in infinities
    h_off = torch.minimum(h_off, 2 * (1 + c_abs / n))
    return _Carried(h, c, n, m, c_abs, h_off, c_off, n_off, m_off)


def _stored(y: Tensor, off: Tensor, dtype: torch.dtype) -> Tensor:
    """With the rounding of both to a type."""
    return off + 2 * (1.01 * _HALF_UNIT[dtype] * (y.abs() + off) + _LEAST[dtype])


def bound(call: SlstmCall) -> tuple[Tensor, ...] | None:
    """Most that elements of a kernel's results may differ from the reference's: h, then the last states if asked for.

    Returns:
        float64 tensors of the results' shapes; None for float64, which no kernel takes.
    """
    if call.x.dtype == torch.float64:
        return None
    exact = call._replace(x=call.x.double(), r=call.r.double())
    x, inside, state = _reference.inputs_of(exact), _reference.inside_of(exact), _first(exact)
    unit = _OPERAND[call.x.dtype]
    y = x.new_zeros((call.batch, call.tokens, call.heads, call.head_dim))
    off = torch.zeros_like(y)
    for t in range(call.tokens):
        before = state
        if call.resets is not None:
            state = _where(~call.resets[:, t], state, None)
        state = _step(exact, state, x[:, t], exact.r, unit)
        y[:, t], off[:, t] = state.h, state.h_off
        if inside is not None:
            # other places leave states as they are, to the last bit
            state = _where(inside[:, t], state, before)
    off = _stored(y, off, call.x.dtype)
    if inside is not None:
        off = off.masked_fill(~inside[:, :, None, None], 0.0)
    if not call.return_last_states:
        return (off,)
    # as they are stored, c and n are e^−m of what is carried
    shifted = 2 * state.m_off
    found = (
        (state.h, state.h_off), (state.c, state.c_off + shifted * state.c_abs),
        (state.n, state.n_off + shifted * state.n), (state.m, shifted),
    )  # fmt: skip
    return off, *(_stored(one, its, torch.float32) for one, its in found)


def step_bound(call: SlstmStepCall) -> tuple[Tensor, ...] | None:
    """The same of one token: h [B, NH, D] in x's dtype, then h, c, n and m."""
    found = bound(call.sequence())
    return None if found is None else (found[0][:, 0], *found[1:])
