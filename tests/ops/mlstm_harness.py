"""Shared by the tests of the mLSTM: an oracle in float64, token by token in plain loops, bounds, calls with poison.

Not a test file: `tests/ops/test_mlstm_chunkwise.py`, `test_mlstm_sequence.py` and `test_mlstm_step.py` have the cases.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.ops.mlstm.chunkwise.backend import op as chunkwise
from wavecrest.ops.mlstm.sequence.backend import op as sequence
from wavecrest.ops.mlstm.step.backend import op as step

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# half a unit in the last place
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, F64: 2.0**-53}
# root mean square error of bfloat16 results beside their own: that of four roundings which do not depend on each other
# (weighted keys, states between chunks, weighted products, h), each of at most 2^−8 / √3 of what it rounds
TYPICAL = 4**0.5 * ROUNDING[BF16] / 3**0.5
NAN = float("nan")
OPS: dict[str, Op[Any, Any]] = {one.name: one for one in (chunkwise, sequence, step)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(
    batch: int = 2, heads: int = 1, tokens: int = 40, dk: int = 16, dv: int = 24, dtype: torch.dtype = F32,
    gates: tuple[float, float, float] = (-1.0, 2.0, 1.5), gate_dtype: torch.dtype | None = None, first: bool = False,
    epilogue: str = "", resets: float = 0.0, lens: list[int] | None = None, starts: list[int] | None = None,
    packed: list[int] | None = None, order: str = "bshd", seed: int = 0, **options: Any,
) -> MlstmCall:  # fmt: skip
    """A call on DEVICE.

    `gates`: the means of i and f, and their deviation. `first`: first states. `epilogue`: "norm" or "gate". `resets`:
    the share of tokens before which states are zeroed. What is of no sequence is NaN in every tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, mean: float = 0.25, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * size + mean

    def placed(x: Tensor) -> Tensor:
        x = x.to(DEVICE, dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else x

    i = made(batch, heads, tokens, mean=gates[0], size=gates[2])
    f = made(batch, heads, tokens, mean=gates[1], size=gates[2])
    q, k, v = (made(batch, heads, tokens, size) for size in (dk, dk, dv))
    if epilogue:
        options["norm_weight"] = made(heads * dv, mean=1.0, size=0.3).to(DEVICE, dtype)
    gate = made(batch, heads, tokens, dv) if epilogue == "gate" else None
    if lens is not None or starts is not None or packed is not None:
        inside = torch.zeros(batch, tokens, dtype=torch.bool)
        for row, begin, end in _spans(batch, tokens, lens, starts, packed):
            inside[row, begin:end] = True
        outside = ~inside[:, None]
        i, f = i.masked_fill(outside, NAN), f.masked_fill(outside, NAN)
        q, k, v = (one.masked_fill(outside[..., None], NAN) for one in (q, k, v))
        gate = None if gate is None else gate.masked_fill(outside[..., None], NAN)
    for name, values in (("seq_lens", lens), ("seq_starts", starts), ("cu_seqlens", packed)):
        if values is not None:
            options[name] = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    if resets:
        options["resets"] = (torch.rand(batch, tokens, generator=generator) < resets).to(DEVICE)
    if gate is not None:
        options["output_gate"] = placed(gate)
    if first:
        n = batch if packed is None else len(packed) - 1
        options["c_initial"] = made(n, heads, dk, dv).to(DEVICE)
        options["n_initial"] = made(n, heads, dk).to(DEVICE)
        if options.get("input_gate", "exp") == "exp":
            options["m_initial"] = made(n, heads, 1).to(DEVICE)
    kept = (dtype if gate_dtype is None else gate_dtype,)
    return MlstmCall(placed(q), placed(k), placed(v), i.to(DEVICE, *kept), f.to(DEVICE, *kept), **options)


def _spans(
    batch: int, tokens: int, lens: list[int] | None, starts: list[int] | None, packed: list[int] | None
) -> list[tuple[int, int, int]]:
    """(row, first token, token behind the last) of each sequence."""
    if packed is not None:
        return [(0, begin, end) for begin, end in itertools.pairwise(packed)]
    found = []
    for row in range(batch):
        begin = 0 if starts is None else starts[row]
        end = tokens if lens is None else min(tokens, begin + lens[row])
        found.append((row, begin, end))
    return found


def spans(call: MlstmCall) -> list[tuple[int, int, int]]:
    lists = [None if one is None else one.tolist() for one in (call.seq_lens, call.seq_starts, call.cu_seqlens)]
    return _spans(call.batch, call.tokens, *lists)


class Exact(NamedTuple):
    """In float64: h and the last states, and how far each may be off."""

    h: Tensor
    states: tuple[Tensor, ...]
    h_bound: Tensor
    state_bounds: tuple[Tensor, ...]


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.where(x < 0, x - torch.log1p(torch.exp(x)), -torch.log1p(torch.exp(-x.abs())))


def exact(call: MlstmCall, rounded: bool = True) -> Exact:
    """The recurrence with the true states C = c e^m, head by head, nothing of the ops in it; and bounds.

    What the chunks' kernel rounds of 16-bit inputs (`rounded`): the weighted keys and the weighted products that matrix
    units take, the states between chunks, h. In float32: exponents, relative to their size, and sums. A product is off
    by its unit, so that sums are off by that of absolute products, which the recurrence carries beside the states. A
    weight of float16 below 2⁻¹⁴ is off by up to 2⁻²⁵, which counts where the normaliser is small too (dk = 1).
    """
    unit = ROUNDING[call.q.dtype]
    single = ROUNDING[F64 if call.q.dtype == F64 else F32]
    heads, dk, dv, exponential = call.heads, call.dk, call.dv, call.exponential
    h = torch.zeros(call.batch, heads, call.tokens, dv, dtype=F64)
    bound = torch.zeros_like(h)
    whole = spans(call)
    shape = (len(whole), heads)
    c_out, n_out, m_out = (torch.zeros(*shape, *rest, dtype=F64) for rest in ((dk, dv), (dk,), ()))
    c_off, n_off, m_off = (torch.zeros_like(one) for one in (c_out, n_out, m_out))
    q, k, v, i, f = (one.detach().cpu().double() for one in call[:5])
    cap = call.gate_soft_cap
    if cap > 0:
        i, f = cap * torch.tanh(i / cap), cap * torch.tanh(f / cap)
    lf = _log_sigmoid(f).clamp(min=-1e5)
    i = i if exponential else _log_sigmoid(i)
    half = unit if rounded and call.q.dtype != F64 else 0.0
    # weights of 16 bits: the key or product, and of an older token the state between chunks
    each = (2.1 * half if call.q.dtype != F32 else 0.0) + 8 * single
    tiny = 2.0**-25 if rounded and call.q.dtype == F16 else 0.0
    for index, (row, begin, end) in enumerate(whole):
        for head in range(heads):
            c = torch.zeros(dk, dv, dtype=F64)
            n, m = torch.zeros(dk, dtype=F64), torch.zeros((), dtype=F64)
            if call.c_initial is not None and call.n_initial is not None:
                c = call.c_initial[index, head].detach().cpu().double()
                n = call.n_initial[index, head].detach().cpu().double()
                m = m if call.m_initial is None else call.m_initial.reshape(shape)[index, head].cpu().double()
            # absolute sums of the same weights; what exponents are off by, in units of float32, grows with tokens
            c_abs, n_abs, age = c.abs(), n.abs(), torch.zeros((), dtype=F64)
            # of each token since the last reset, what is left of its weight
            since, left = begin, torch.zeros(0, dtype=F64)
            for t in range(begin, end):
                at = (row, head, t)
                if call.resets is not None and bool(call.resets[row, t]):
                    c, n, m, c_abs, n_abs, age = (torch.zeros_like(one) for one in (c, n, m, c_abs, n_abs, age))
                    since, left = t, left[:0]
                top = torch.maximum(lf[at] + m, i[at]) if exponential else torch.zeros((), dtype=F64)
                forget = torch.exp(lf[at] + (m - top if exponential else 0.0))
                take = torch.exp(i[at] - top)
                c = forget * c + take * torch.outer(k[at], v[at])
                n = forget * n + take * k[at]
                c_abs = forget * c_abs + take * torch.outer(k[at].abs(), v[at].abs())
                n_abs = forget * n_abs + take * k[at].abs()
                m = top
                # an exponent is off by its own size and that of the gates it is a sum of
                age = age * forget + 8 + 6 * (lf[at].abs() + i[at].abs() * take + cap)
                off = each + single * (age + 4 * math.sqrt(t + 1 - begin) + 4 * math.sqrt(dk) + 4 * m.abs())
                s = dk**-0.5
                num, num_abs = s * q[at] @ c, s * q[at].abs() @ c_abs
                y, y_off = num, off * num_abs
                if tiny:
                    # of each token's product and of its key, and of the state between chunks: no more than it is
                    left = torch.cat([left * forget, take.view(1)])
                    past = (row, head, slice(since, t + 1))
                    keys, weight = left[:, None] * k[past].abs(), s * q[at].abs()
                    each_off = (keys @ weight).clamp(max=tiny) + keys.clamp(max=tiny) @ weight
                    y_off = y_off + each_off @ v[past].abs() + tiny * weight.sum()
                if call.normalize:
                    den = (s * q[at] @ n).abs()
                    # sums of weights in float32 alone
                    den_off = (off - each + 8 * single) * (s * q[at].abs() @ n_abs)
                    floor = torch.exp(-m) if exponential else torch.ones((), dtype=F64)
                    floor_off = (8 + 6 * m.abs() + age) * single * floor
                    low = torch.maximum(den, floor)
                    # which of them is larger may change within what they are off by
                    worst = torch.where(den + den_off < floor - floor_off, floor_off, torch.maximum(den_off, floor_off))
                    worst = torch.where(floor + floor_off < den - den_off, den_off, worst)
                    y = num / (low + call.eps)
                    y_off = (y_off + y.abs() * worst) / (low + call.eps - worst).clamp(min=1e-300)
                h[at], bound[at] = y, y_off
            c_out[index, head], n_out[index, head], m_out[index, head] = c, n, m
            slack = each + single * (age + 4 * math.sqrt(max(1, end - begin)))
            c_off[index, head] = slack * c_abs
            n_off[index, head] = (slack - each + 8 * single) * n_abs
            m_off[index, head] = single * (age + 4) * (1 + m.abs())
    h, bound = _finished(call, h, bound, rounded, whole)
    if call.c_dtype == F16:
        c_off = c_off + 1.01 * ROUNDING[F16] * c_out.abs() + 2.0**-25
        c_out = c_out.clamp(-65504.0, 65504.0)
    states = (c_out, n_out, m_out[..., None]) if exponential else (c_out, n_out)
    offs = (c_off, n_off, m_off[..., None]) if exponential else (c_off, n_off)
    # subnormal results of 16 bits, and zeros of float32
    least = 2.0**-25 if call.q.dtype == F16 else 1e-37
    return Exact(h, states, bound + least, tuple(one + 1e-37 for one in offs))


def _finished(
    call: MlstmCall, h: Tensor, bound: Tensor, rounded: bool, whole: list[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """The norm and the gate, and what they make of a bound; `rounded`: h in the dtype of q before."""
    unit, single = ROUNDING[call.q.dtype], ROUNDING[F64 if call.q.dtype == F64 else F32]
    if call.norm_weight is None:
        return h, bound + 1.01 * unit * h.abs()
    if rounded:
        bound = bound + 1.01 * unit * h.abs()
    mean = h.mean(-1, keepdim=True)
    deviation = ((h - mean).square().mean(-1, keepdim=True) + call.norm_eps).sqrt()
    weight = call.norm_weight.detach().cpu().double().view(1, call.heads, 1, call.dv)
    y = (h - mean) / deviation
    # a column's own error and the mean's, and that of the deviation, which is at most the root mean square of both
    own = bound + bound.mean(-1, keepdim=True)
    rms = own.square().mean(-1, keepdim=True).sqrt() / deviation
    off = own / deviation + y.abs() * rms + 16 * single * (y.abs() + mean.abs() / deviation + 1)
    y, off = y * weight, off * weight.abs()
    if call.output_gate is not None:
        gate = torch.sigmoid(call.output_gate.detach().cpu().double().nan_to_num())
        off = off * gate + 8 * single * (1 + call.output_gate.cpu().double().nan_to_num().abs()) * gate * y.abs()
        y = y * gate
    inside = torch.zeros(call.batch, 1, call.tokens, 1, dtype=torch.bool)
    for row, begin, end in whole:
        inside[row, :, begin:end] = True
    return y.where(inside, 0.0), (off + 1.01 * unit * y.abs()).where(inside, 0.0)


def assert_near(name: str, got: Tensor, want: Tensor, bound: Tensor, typical: bool = False) -> None:
    """Every element within its bound; `typical`: and the whole within what roundings are together."""
    off = (got.detach().cpu().double() - want).abs()
    assert not bool(off.isnan().any()), f"{name}: {int(off.isnan().sum())} elements are NaN, or were not written"
    over = off > bound
    assert not bool(over.any()), (
        f"{name}: {int(over.sum())} of {off.numel()} are off, by up to {float((off / bound).max()):.3g} times the bound"
    )
    if typical and want.numel():
        error, size = (float(one.square().mean().sqrt()) for one in (off, want))
        assert error <= TYPICAL * size, f"{name}: an error of {error / size:.2%} of its size, {TYPICAL:.2%} are right"


def assert_right(call: MlstmCall, got: Any, want: Exact | None = None, cancels: bool = False) -> None:
    """Every element of h, and of the states, within its bound; of bfloat16 h and c as a whole too.

    `cancels`: sums may come out so small that what they round is more than typical.
    """
    want, typical = want or exact(call), call.q.dtype == BF16 and not cancels
    h, *states = got if call.return_last_states else (got,)
    assert h.dtype == call.q.dtype and h.shape == call.v.shape
    if call.v.numel() and all(size > 1 for size in call.v.shape):
        assert h.stride() == torch.empty_like(call.v).stride(), "h is in v's memory order"
    assert_near("h", h, want.h, want.h_bound, typical)
    if call.return_last_states:
        single = F64 if call.q.dtype == F64 else F32
        assert [one.dtype for one in states] == [call.c_dtype, single, single][: len(want.states)]
        for name, one, wanted, bound in zip("cnm", states, want.states, want.state_bounds, strict=False):
            assert one.shape == wanted.shape
            assert_near(name, one, wanted, bound, typical and name == "c")


def run(op: str, call: MlstmCall | MlstmStepCall, config: Config | None = None, backend: str = "triton") -> Any:
    """One backend by name."""
    return OPS[op].run(backend, call, config=config)


def moved(x: Tensor, how: str) -> Tensor:
    """The same values in another layout, NaN between them."""
    if how == "permuted":
        return x.permute(*range(x.ndim - 1, -1, -1)).contiguous().permute(*range(x.ndim - 1, -1, -1))
    fill: Any = NAN if x.is_floating_point() else False
    if how == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), fill, dtype=x.dtype, device=x.device)
        wide[..., 3:-2] = x
        return wide[..., 3:-2]
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), fill, dtype=x.dtype, device=x.device)
    wide[..., 1::2] = x
    return wide[..., 1::2]
