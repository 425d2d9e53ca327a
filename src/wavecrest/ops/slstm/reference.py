"""The definition of the sLSTM in PyTorch, token by token; float32, or float64 for it.

Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, section 2.2 and appendix A. With the gates' pre-activations
a = x + h r + b of i, f, z and o, and lf = log σ(a_f), or a_f for an exponential forget gate:

    m′ = max(lf + m, a_i)      c′ = e^(lf + m − m′) c + e^(a_i − m′) tanh(a_z)
    h′ = σ(a_o) c′ / n′        n′ = e^(lf + m − m′) n + e^(a_i − m′)

An element with n = 0 has no history: m counts as −∞, so that its first token has the weight 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall

# inputs of the gates i and f are no less, so that −∞ closes a gate and no weight is 0 / 0
LEAST_INPUT = -1e5

State = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs_of(call: SlstmCall) -> Tensor:
    """x with the bias [B, S, 4, NH, D] in `call.wide`, the gates i and f not below LEAST_INPUT before it is added."""
    x = call.x.to(call.wide)
    x = torch.cat((x[:, :, :2].clamp(min=LEAST_INPUT), x[:, :, 2:]), 2)
    return x if call.bias is None else x + call.bias.to(call.wide)


def inside_of(call: SlstmCall) -> Tensor | None:
    """Whether a place is a token of its row's sequence, [B, S]; None where all are."""
    if call.form == "whole":
        return None
    place = torch.arange(call.tokens, device=call.x.device)
    start = place.new_zeros(1) if call.seq_starts is None else call.seq_starts.long().clamp(min=0)
    # without a length, to the end
    end = place.new_full((1,), call.tokens) if call.seq_lens is None else start + call.seq_lens.long()
    return ((place >= start[:, None]) & (place < end[:, None])).expand(call.batch, -1)


def first_state(call: SlstmCall) -> State:
    """The first states in `call.wide`, zeros where the call has none."""
    zeros = call.x.new_zeros((call.batch, call.heads, call.head_dim), dtype=call.wide)
    h, c, n, m = (zeros if one is None else one.to(call.wide) for one in call.initial)
    return h, c, n, m


def cell(a: Tensor, state: State, forget_gate: str) -> State:
    """The states after a token from its pre-activations a [B, 4, NH, D]."""
    _, c, n, m = state
    a_i, a_f, a_z, a_o = a.unbind(1)
    lf = F.logsigmoid(a_f) if forget_gate == "sigmoid" else a_f
    before = (lf + m).masked_fill(n == 0, float("-inf"))
    m = torch.maximum(before, a_i)
    forget, take = torch.exp(before - m), torch.exp(a_i - m)
    c, n = forget * c + take * torch.tanh(a_z), forget * n + take
    return torch.sigmoid(a_o) * c / n, c, n, m


def recurrent(h: Tensor, r: Tensor) -> Tensor:
    """The recurrent part of the pre-activations, [B, 4, NH, D], from h [B, NH, D]."""
    return (h.transpose(0, 1) @ r).permute(2, 0, 1, 3)


def _where(rows: Tensor, state: State, other: State | None) -> State:
    """A state where `rows` [B], another or zeros elsewhere."""
    shown = rows[:, None, None]
    h, c, n, m = (
        one.where(shown, torch.zeros_like(one) if other is None else other[index]) for index, one in enumerate(state)
    )
    return h, c, n, m


def _recurrence(call: SlstmCall) -> tuple[list[Tensor], State]:
    x, inside, state = inputs_of(call), inside_of(call), first_state(call)
    r, found = call.r.to(call.wide), []
    for t in range(call.tokens):
        before = state
        if call.resets is not None:
            state = _where(~call.resets[:, t], state, None)
        state = cell(x[:, t] + recurrent(state[0], r), state, call.forget_gate)
        found.append(state[0])
        if inside is not None:
            found[-1] = found[-1].where(inside[:, t, None, None], 0.0)
            state = _where(inside[:, t], state, before)
    return found, state


def recurrence(call: SlstmCall) -> tuple[list[Tensor], State]:
    """h [B, NH, D] of each token, 0 outside of sequences, and the last states; outside of autocast, which rounds."""
    device = call.x.device.type
    # other devices have no autocast, and asking about them is an error
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return _recurrence(call)
    with torch.autocast(device, enabled=False):
        return _recurrence(call)


def reference(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
    """(h, then the last states where they are asked for)."""
    found, state = recurrence(call)
    y = torch.stack(found, 1) if found else call.x.new_zeros((call.batch, 0, call.heads, call.head_dim))
    y = y.to(call.x.dtype)
    if not call.return_last_states:
        return y
    if call.tokens == 0:
        # nothing was added: the caller's own are not handed back
        return (y, *(one.clone() for one in state))
    return (y, *state)


def step(call: SlstmStepCall) -> tuple[Tensor, ...]:
    """(h in x's dtype, h, c, n, m) after one token."""
    y, *states = reference(call.sequence())
    return (y[:, 0], *states)
