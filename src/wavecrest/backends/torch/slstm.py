"""The sLSTM in PyTorch operations: few of them a token, over memory that is made once for many tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch.custom_op import configured_operation_of
from wavecrest.dispatch.keys import needs_grad
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.reference import LEAST_INPUT, inside_of, reference
from wavecrest.ops.slstm.sequence.backend import op as _sequence
from wavecrest.ops.slstm.step.backend import op as _step

# elements of the pre-activations that are laid out at a time: 4 MiB in float32
CHUNK = 1 << 20
# m of an element without history: its weight is 0 beside any other, and it differs from itself by 0, as −∞ does not
NOTHING = -1e30


def loop(call: SlstmCall) -> list[Tensor]:
    """(h, then the last states where they are asked for), for calls that need no gradient.

    A token is one batched GEMM over heads and 12 operations on its gates, in place; pre-activations and h are laid out
    by head, a chunk of tokens at a time.
    """
    device = call.x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _loop(call)
    return _loop(call)


def _loop(call: SlstmCall) -> list[Tensor]:
    batch, tokens, heads, dim = call.batch, call.tokens, call.heads, call.head_dim
    made = call.x.new_empty
    h, c, n, m = (
        made((heads, batch, dim), dtype=call.wide).zero_() if one is None else one.to(call.wide).transpose(0, 1).clone()
        for one in call.initial
    )
    first_m = m.clone()
    m.masked_fill_(n == 0, NOTHING)
    r = call.r.to(call.wide).permute(1, 2, 0, 3).reshape(heads, dim, 4 * dim)
    bias = None if call.bias is None else call.bias.to(call.wide).permute(1, 0, 2).unsqueeze(1)
    # [S, 1, B, 1]
    inside = inside_of(call)
    outside = None if inside is None else ~inside.t()[:, None, :, None]
    fresh = None if call.resets is None else call.resets.t()[:, None, :, None]
    if fresh is not None and outside is not None:
        fresh = fresh & ~outside
    y = made((batch, tokens, heads, dim))
    size = max(1, min(tokens, CHUNK // max(1, 4 * heads * batch * dim)))
    x_all, h_all = (made((size, heads, batch, *rest, dim), dtype=call.wide) for rest in ((4,), ()))
    a = made((heads, batch, 4, dim), dtype=call.wide)
    a_all, weights, (i, f, z, o), m_twice = a.view(heads, batch, 4 * dim), a[:, :, :2], a.unbind(2), m.unsqueeze(2)
    for begin in range(0, tokens, size):
        part = slice(begin, min(tokens, begin + size))
        length = part.stop - begin
        x = x_all[:length]
        x.copy_(call.x[:, part].permute(1, 3, 0, 2, 4))
        x[..., :2, :].clamp_(min=LEAST_INPUT)
        if bias is not None:
            x.add_(bias)
        if outside is not None:
            # a gate that takes nothing leaves states exact
            x.masked_fill_(outside[part].unsqueeze(3), 0.0)
            x[..., 0, :].masked_fill_(outside[part], float("-inf"))
        for t, (x_now, h_now) in enumerate(zip(x.flatten(3).unbind(0), h_all[:length].unbind(0), strict=True), begin):
            if fresh is not None:
                h = h.masked_fill(fresh[t], 0.0)
                c.masked_fill_(fresh[t], 0.0)
                n.masked_fill_(fresh[t], 0.0)
                m.masked_fill_(fresh[t], NOTHING)
            torch.baddbmm(x_now, h, r, out=a_all)
            lf = F.logsigmoid(f) if call.forget_gate == "sigmoid" else f
            if outside is not None:
                lf = lf.masked_fill(outside[t], 0.0)
            torch.add(lf, m, out=f)
            torch.maximum(i, f, out=m)
            weights.sub_(m_twice).exp_()
            c.mul_(f).addcmul_(i, z.tanh_())
            torch.addcmul(i, n, f, out=n)
            torch.div(c, n, out=h_now).mul_(o.sigmoid_())
            h = h_now if outside is None else torch.where(outside[t], h, h_now)
        if outside is not None:
            h_all[:length].masked_fill_(outside[part], 0.0)
        y[:, part].copy_(h_all[:length].permute(2, 0, 1, 3))
    if not call.return_last_states:
        return [y]
    # the caller's, where there was no token
    m = torch.where(n == 0, first_m, m)
    # h is a part of much memory, which it must not keep
    return [y, *(one.transpose(0, 1).contiguous() for one in (h.clone(), c, n, m))]


def _fake(call: SlstmCall) -> list[Tensor]:
    y = call.x.new_empty((call.batch, call.tokens, call.heads, call.head_dim))
    if not call.return_last_states:
        return [y]
    return [y, *(call.x.new_empty((call.batch, call.heads, call.head_dim), dtype=call.wide) for _ in range(4))]


# in a graph the loop is one operation: written out it would be tokens times as long
_in_graph = configured_operation_of("slstm_loop", SlstmCall, lambda call, _config: loop(call), _fake)


def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
    """The loop; the definition where a gradient is needed."""
    if needs_grad(*call.floats):
        return reference(call)
    found = _in_graph(call, []) if torch.compiler.is_compiling() else loop(call)
    return tuple(found) if call.return_last_states else found[0]


_sequence.attach("torch", run, priority=PRIORITY)
# one token of the definition is made of as few operations
_step.attach("torch", _step.reference, priority=PRIORITY)
