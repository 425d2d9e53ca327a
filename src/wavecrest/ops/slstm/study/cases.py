"""Example calls of the sLSTM over sequences, and the least work of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Cell
from wavecrest.ops.slstm.call import SlstmCall

Shape = tuple[int, int, int, int]


def inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> SlstmCall:
    """B rows of S tokens of H heads, with bias and the last states."""
    return example((B, S, H, D), dtype, device, return_last_states=True)


def cost_of(call: SlstmCall) -> Cost:
    """The least work: the recurrent product of each token, and every operand once."""
    states = call.batch * call.heads * call.head_dim
    written = states * call.tokens * call.x.element_size() + (4 * 4 * states if call.return_last_states else 0)
    read = sum(one.nbytes for one in call if isinstance(one, Tensor))
    return Cost(flops=8 * states * call.tokens * call.head_dim, bytes=read + written)


def example(shape: Shape, dtype: torch.dtype, device: str, **options: Any) -> SlstmCall:
    """A call of B, S, NH, D: forget gates' biases from 0 to 5, recurrent weights of norm 0.3, as after some training.

    `first`: with first states; `plain`: without a bias.
    """
    b, s, nh, d = shape
    x = torch.randn(b, s, 4, nh, d, device=device).to(dtype)
    r = (0.3 * d**-0.5 * torch.randn(4, nh, d, d, device=device)).to(dtype)
    if not options.pop("plain", False):
        bias = torch.zeros(4, nh, d, device=device)
        bias[1] = torch.linspace(5.0, 0.0, d, device=device)
        options["bias"] = bias
    if options.pop("first", False):
        h, c, m = (torch.randn(b, nh, d, device=device) for _ in range(3))
        n = torch.rand(b, nh, d, device=device) + 1.0
        options |= {"h_initial": h.tanh(), "c_initial": c.tanh() * n, "n_initial": n, "m_initial": m}
    return SlstmCall(x, r, **options)


def call_of_key(parts: Mapping[str, Cell], device: str) -> SlstmCall | None:
    """A call of 16 rows of 256 tokens with this key, which says neither; see `Study`."""
    dtype = getattr(torch, str(parts["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        return None
    batch, tokens = 16, 256
    options: dict[str, Any] = {
        "forget_gate": parts["forget_gate"], "plain": not parts["bias"], "first": bool(parts["initial"]),
        "return_last_states": bool(parts["last"]),
    }  # fmt: skip
    if parts["form"] == "padded":
        options["seq_lens"] = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    if parts["resets"]:
        # documents of 64 tokens
        options["resets"] = (torch.arange(tokens, device=device) % 64 == 0).expand(batch, -1).contiguous()
    return example((batch, tokens, int(parts["heads"] or 0), int(parts["head_dim"] or 0)), dtype, device, **options)
