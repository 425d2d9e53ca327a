"""The definition of the mLSTM in PyTorch: step by step, in chunks, and all pairs at once; float32, or float64 for it.

Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, section 2.3 (the cell); Beck et al., Tiled Flash Linear
Attention, 2025 (chunks, and the sigmoid input gate). With lf = log σ(f), s = DK^−½:

    m′ = max(lf + m, i)      c′ = e^(lf + m − m′) c + e^(i − m′) k vᵀ      n′ = e^(lf + m − m′) n + e^(i − m′) k
    h = s qᵀc′ / (max(|s q · n′|, e^−m′) + ε)

A sigmoid input gate has log σ(i) for i, no m, and 1 for e^−m′.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall

# a forget gate's logarithm is no less, so that sums of it stay finite, where f is −∞ too; e^ of it is 0
LEAST_LOG = -1e5
LARGEST_HALF = 65504.0
# tokens of a chunk where the caller leaves it open
CHUNK = 64

State = tuple[Tensor, Tensor, Tensor | None]
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Rows(NamedTuple):
    """A call as sequences of equal width: q, k [N, NH, W, DK], v [N, NH, W, DV], gates' logarithms i, lf [N, NH, W].

    `inside` [N, W]: whether a place is a token; others have k = v = 0, i = −∞ and lf = 0, which keeps states exact.
    `resets` [N, W]: whether the state is zeroed before a token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    lf: Tensor
    inside: Tensor | None
    resets: Tensor | None


def _without_autocast(function: Callable[Concatenate[Rows, _P], _R]) -> Callable[Concatenate[Rows, _P], _R]:
    """A function of rows as it is outside of autocast, which would round its GEMMs to 16 bits."""

    @functools.wraps(function)
    def run(rows: Rows, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = rows.q.device.type
        # a graph without autocast has nothing of it; other devices have no autocast, and asking about them is an error
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return function(rows, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(rows, *args, **kwargs)

    return run


def log_gates(i: Tensor, f: Tensor, cap: float, exponential: bool) -> tuple[Tensor, Tensor]:
    """The logarithms of the input and the forget gate, from pre-activations."""
    if cap > 0:
        i, f = cap * torch.tanh(i / cap), cap * torch.tanh(f / cap)
    return (i if exponential else F.logsigmoid(i)), F.logsigmoid(f).clamp(min=LEAST_LOG)


def _packed(call: MlstmCall, width: int) -> tuple[Tensor, Tensor]:
    """The token of each place of each sequence, and whether there is one, [N, width]."""
    assert call.cu_seqlens is not None
    starts = call.cu_seqlens.long().clamp(0, call.tokens)
    begin = starts[:-1, None]
    length = (starts[1:, None] - begin).clamp(min=0)
    place = torch.arange(width, device=starts.device)
    inside = place < length
    return (begin + place).where(inside, 0), inside


def _width(call: MlstmCall) -> int:
    """Tokens of the longest sequence; of all where lengths on the device must not be read."""
    if call.cu_seqlens is None or torch.compiler.is_compiling() or call.cu_seqlens.device.type == "meta":
        return call.tokens
    if call.cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return call.tokens
    return min(call.tokens, max(0, int((call.cu_seqlens[1:] - call.cu_seqlens[:-1]).max())))


def rows_of(call: MlstmCall) -> Rows:
    """The sequences of a call, in `call.wide`."""
    wide, inside = call.wide, None
    tensors = [one.to(wide) for one in (call.q, call.k, call.v, call.i, call.f)]
    resets = call.resets
    if call.form == "packed":
        token, inside = _packed(call, _width(call))
        # [1, NH, T, …] → [N, NH, W, …]; a row of one token more, so that there is one to take
        tensors = [F.pad(one, (0, 0, 0, 1) if one.ndim == 4 else (0, 1)) for one in tensors]
        tensors = [one[0][:, token].transpose(0, 1) for one in tensors]
        resets = None if resets is None else F.pad(resets, (0, 1))[0][token]
    elif call.form == "padded":
        place = torch.arange(call.tokens, device=call.q.device)
        start = place.new_zeros(1) if call.seq_starts is None else call.seq_starts.long()
        # without a length, to the end
        end = place.new_full((1,), call.tokens) if call.seq_lens is None else start + call.seq_lens
        inside = ((place >= start[:, None]) & (place < end[:, None])).expand(call.batch, -1)
    q, k, v, i, f = tensors
    if inside is not None:
        outside = ~inside[:, None]
        q, k, v = (one.masked_fill(outside[..., None], 0.0) for one in (q, k, v))
        i, f = i.masked_fill(outside, 0.0), f.masked_fill(outside, 0.0)
    i, lf = log_gates(i, f, call.gate_soft_cap, call.exponential)
    if inside is not None:
        i, lf = i.masked_fill(outside, float("-inf")), lf.masked_fill(outside, 0.0)
        resets = None if resets is None else resets & inside
    return Rows(q, k, v, i, lf, inside, resets)


def first_state(call: MlstmCall) -> State:
    """The first states in `call.wide`, zeros where the call has none."""
    wide, shape = call.wide, (call.sequences, call.heads)
    if call.c_initial is None or call.n_initial is None:
        c = call.q.new_zeros((*shape, call.dk, call.dv), dtype=wide)
        n = call.q.new_zeros((*shape, call.dk), dtype=wide)
        return c, n, call.q.new_zeros(shape, dtype=wide) if call.exponential else None
    m = None if call.m_initial is None else call.m_initial.reshape(shape).to(wide)
    return call.c_initial.to(wide), call.n_initial.to(wide), m


def _denominator(den: Tensor, m: Tensor | None, eps: float) -> Tensor:
    return torch.maximum(den.abs(), torch.ones_like(den) if m is None else torch.exp(-m)) + eps


def _one(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, lf: Tensor, state: State, eps: float, normalize: bool
) -> tuple[Tensor, State]:
    """One token: q, k [N, NH, DK], v [N, NH, DV], i, lf [N, NH]."""
    c, n, m = state
    if m is None:
        forget, take, m_new = torch.exp(lf), torch.exp(i), None
    else:
        m_new = torch.maximum(lf + m, i)
        forget, take = torch.exp(lf + m - m_new), torch.exp(i - m_new)
    c = forget[..., None, None] * c + take[..., None, None] * (k[..., :, None] * v[..., None, :])
    n = forget[..., None] * n + take[..., None] * k
    q = q * q.shape[-1] ** -0.5
    h = (q[..., None, :] @ c)[..., 0, :]
    if normalize:
        h = h / _denominator((q * n).sum(-1), m_new, eps)[..., None]
    return h, (c, n, m_new)


def _zeroed(state: State, keep: Tensor) -> State:
    """States where `keep` [N], zeros elsewhere."""
    c, n, m = state
    keep = keep[:, None]
    return c.where(keep[..., None, None], 0.0), n.where(keep[..., None], 0.0), None if m is None else m.where(keep, 0.0)


@_without_autocast
def recurrence(rows: Rows, state: State, eps: float, normalize: bool) -> tuple[Tensor, State]:
    """h [N, NH, W, DV] and the last states, token by token: the definition."""
    found = []
    for t in range(rows.q.shape[2]):
        if rows.resets is not None:
            state = _zeroed(state, ~rows.resets[:, t])
        h, state = _one(
            rows.q[:, :, t], rows.k[:, :, t], rows.v[:, :, t], rows.i[:, :, t], rows.lf[:, :, t], state, eps, normalize
        )
        found.append(h)
    return (torch.stack(found, 2) if found else rows.v), state


def _decays(lf: Tensor) -> Tensor:
    """Sums of lf over j < s ≤ t, [..., t, j], 0 above the diagonal: no large sums are subtracted."""
    below = torch.ones(lf.shape[-1], lf.shape[-1], dtype=torch.bool, device=lf.device).tril(-1)
    return lf[..., :, None].expand(*lf.shape, lf.shape[-1]).masked_fill(~below, 0.0).cumsum(-2)


def _chunk(rows: Rows, state: State, eps: float, normalize: bool) -> tuple[Tensor, State]:
    """h of one chunk, and the states after it."""
    q, k, v, i, lf, _, resets = rows
    c, n, m = state
    length, scale = q.shape[2], q.shape[-1] ** -0.5
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    fresh = lost = None
    if resets is None:
        own = lf.cumsum(-1)
    else:
        # documents are numbered; tokens of one see each other, those of the chunk's first see the states before it
        document = resets.cumsum(-1)
        seen = seen & (document[:, :, None] == document[:, None, :])[:, None]
        own = lf[..., None, :].masked_fill(~seen, 0.0).sum(-1)
        fresh = (document > 0)[:, None]
        # a product with a token that is not finite is NaN in rows of other documents too
        spoiled = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
        lost = (seen & spoiled[..., None, :]).any(-1)[..., None]
        k, v = (one.masked_fill(spoiled[..., None], 0.0) for one in (k, v))
    d = (_decays(lf) + i[..., None, :]).masked_fill(~seen, float("-inf"))
    carry = own
    top = None
    if m is not None:
        before = m[..., None] if fresh is None else m[..., None].masked_fill(fresh, 0.0)
        carry = own + before
        top = torch.maximum(carry, d.amax(-1))
        d, carry = d - top[..., None], carry - top
    p = (q @ k.mT) * scale * torch.exp(d)
    kept = torch.exp(carry)[..., None] * scale
    old, old_n = kept * (q @ c), kept * (q @ n[..., None])
    if fresh is not None:
        old, old_n = (one.masked_fill(fresh[..., None], 0.0) for one in (old, old_n))
    h = old + p @ v
    if normalize:
        h = h / _denominator(old_n[..., 0] + p.sum(-1), top, eps)[..., None]
    # the last token's weights are those of the states after it
    take = torch.exp(d[..., -1, :])[..., None] * k
    forget = torch.exp(carry[..., -1])[..., None]
    if fresh is not None:
        c, n, _ = _zeroed((c, n, None), ~fresh[:, 0, -1])
    c, n = forget[..., None] * c + take.mT @ v, forget * n + take.sum(-2)
    if lost is not None:
        h = h.masked_fill(lost, float("nan"))
        c, n = c.masked_fill(lost[..., -1:, :], float("nan")), n.masked_fill(lost[..., -1, :], float("nan"))
    return h, (c, n, None if top is None else top[..., -1])


@_without_autocast
def chunks(rows: Rows, state: State, eps: float, normalize: bool, size: int) -> tuple[Tensor, State]:
    """h and the last states, `size` tokens at a time."""
    found = []
    # by count, so that torch.compile holds on to the number of chunks and not to the length
    for index in range((rows.q.shape[2] + size - 1) // size):
        part = slice(index * size, (index + 1) * size)
        inside, resets = (None if one is None else one[:, part] for one in (rows.inside, rows.resets))
        q, k, v, i, lf = (one[:, :, part] for one in rows[:5])
        some = Rows(q, k, v, i, lf, inside, resets)
        h, state = _chunk(some, state, eps, normalize)
        found.append(h)
    return (torch.cat(found, 2) if found else rows.v), state


def epilogue(h: Tensor, weight: Tensor | None, norm_eps: float, gate: Tensor | None) -> Tensor:
    """σ(gate) · LayerNorm(h) · weight, the norm over each head's DV elements; h [B, NH, S, DV]."""
    if weight is None:
        return h
    h = F.layer_norm(h, h.shape[-1:], None, None, norm_eps) * weight.to(h.dtype).view(1, h.shape[1], 1, h.shape[-1])
    return h if gate is None else torch.sigmoid(gate.to(h.dtype)) * h


def stored(c: Tensor, dtype: torch.dtype) -> Tensor:
    """A state c in the dtype it is kept in, float16 clamped to what it has."""
    return c.clamp(-LARGEST_HALF, LARGEST_HALF).to(dtype) if dtype == torch.float16 else c.to(dtype)


def result_like(h: Tensor, v: Tensor) -> Tensor:
    """h in v's dtype and memory order."""
    return torch.empty_like(v).copy_(h) if not v.is_contiguous() else h.to(v.dtype).contiguous()


def laid_out(call: MlstmCall, rows: Rows, h: Tensor) -> Tensor:
    """h of sequences as rows of the batch, [B, NH, S, DV], 0 outside of sequences."""
    if call.cu_seqlens is None:
        return h if rows.inside is None else h.masked_fill(~rows.inside[:, None, :, None], 0.0)
    token = torch.arange(call.tokens, device=h.device)
    starts = call.cu_seqlens.long().clamp(0, call.tokens)
    owner = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, call.sequences - 1)
    place = token - starts[owner]
    inside = (place >= 0) & (token < starts[owner + 1])
    # one more place, so that there is one to take
    found = F.pad(h, (0, 0, 0, 1))[owner, :, place.where(inside, 0)]
    return found.masked_fill(~inside[:, None, None], 0.0).transpose(0, 1)[None]


def _results(call: MlstmCall, rows: Rows, h: Tensor, state: State) -> Tensor | tuple[Tensor, ...]:
    h = epilogue(laid_out(call, rows, h), call.norm_weight, call.norm_eps, call.output_gate)
    if call.norm_weight is not None and rows.inside is not None:
        # a gate may be NaN where there is no token
        ones = rows.v.new_ones(*rows.v.shape[:3], 1)
        h = h.masked_fill(laid_out(call, rows, ones) == 0, 0.0)
    h = result_like(h, call.v)
    if not call.return_last_states:
        return h
    c, n, m = state
    c = stored(c, call.c_dtype)
    if rows.q.shape[2] == 0:
        # nothing was added: the caller's own are not handed back
        c, n, m = c.clone(), n.clone(), None if m is None else m.clone()
    return (h, c, n) if m is None else (h, c, n, m[..., None])


def reference(call: MlstmCall) -> Tensor | tuple[Tensor, ...]:
    """(h, then the last states where they are asked for), token by token."""
    rows = rows_of(call)
    return _results(call, rows, *recurrence(rows, first_state(call), call.eps, call.normalize))


def chunkwise(call: MlstmCall) -> Tensor | tuple[Tensor, ...]:
    """The same in chunks, whose tokens go through GEMMs."""
    rows = rows_of(call)
    return _results(call, rows, *chunks(rows, first_state(call), call.eps, call.normalize, call.chunk_size or CHUNK))


def step(call: MlstmStepCall) -> tuple[Tensor, ...]:
    """(h, c, n) and m where there is one, of one token; in_place: those of the caller, overwritten."""
    as_sequence = call.sequence()
    rows = rows_of(as_sequence)
    h, (c, n, m) = recurrence(rows, first_state(as_sequence), call.eps, call.normalize)
    h = epilogue(h, call.norm_weight, call.norm_eps, as_sequence.output_gate)[:, :, 0]
    c = stored(c, call.c_dtype)
    h = result_like(h, call.v)
    if not call.in_place:
        return (h, c, n) if m is None else (h, c, n, m[..., None])
    call.c.copy_(c)
    call.n.copy_(n)
    if m is None or call.m is None:
        return h, call.c, call.n
    call.m.copy_(m.view(call.m.shape))
    return h, call.c, call.n, call.m


@_without_autocast
def parallel(rows: Rows, eps: float, exponential: bool, normalize: bool) -> Tensor:
    """h from all pairs of tokens of whole rows, O(S²), without states.

    m is here the largest of a row's exponents, without the m = 0 that a recurrence begins with: ε apart, m cancels.
    """
    q, k, v, i, lf = rows[:5]
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    d = (_decays(lf) + i[..., None, :]).masked_fill(~seen, float("-inf"))
    top = None
    if exponential and d.numel():
        top = d.amax(-1)
        # for a row that sees closed input gates alone any number will do
        top = top.masked_fill(top == float("-inf"), 0.0)
    p = (q @ k.mT) * q.shape[-1] ** -0.5 * torch.exp(d if top is None else d - top[..., None])
    h: Tensor = p @ v
    return h / _denominator(p.sum(-1), top, eps)[..., None] if normalize else h
