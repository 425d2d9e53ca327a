"""Example calls of the mLSTM over sequences, and the least work of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Cell
from wavecrest.ops.mlstm.call import MlstmCall


def inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> MlstmCall:
    """B rows of S tokens of H heads, with DK = D and DV = 2 D as in xLSTM."""
    return example((B, H, S, D, 2 * D), dtype, device)


def cost_of(call: MlstmCall) -> Cost:
    """The least work: four operations for each element of a state and token, and every operand once."""
    states = call.sequences * call.heads * call.dk * (call.dv + 1) + call.sequences * call.heads
    bytes_read = sum(one.nbytes for one in call if isinstance(one, Tensor))
    written = call.v.nbytes + (states * call.c_dtype.itemsize if call.return_last_states else 0)
    flops = 4 * call.batch * call.heads * call.tokens * call.dk * (call.dv + 1)
    return Cost(flops=flops, bytes=bytes_read + written)


def example(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, **options: Any) -> MlstmCall:
    """A call of B, NH, S, DK, DV: tensors [B, S, NH, D] seen as [B, NH, S, D], gates as models have.

    Input gates near −10 and forget gates from 3 to 6, as xLSTM initialises their biases. `epilogue`: norm and output
    gate; `first`: with first states; `closed`: the number of first
    tokens with both gates at −∞.
    """
    b, nh, s, dk, dv = shape

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device)

    q, k, v = (made(b, s, nh, size).transpose(1, 2) for size in (dk, dk, dv))
    bias = torch.linspace(3.0, 6.0, nh, device=device)[:, None]
    i = (torch.randn(b, nh, s, device=device) - 10.0).to(dtype)
    f = (torch.randn(b, nh, s, device=device) + bias).to(dtype)
    closed = options.pop("closed", 0)
    i[..., :closed] = f[..., :closed] = -math.inf
    if options.pop("epilogue", False):
        options |= {"norm_weight": made(nh * dv), "output_gate": made(b, s, nh, dv).transpose(1, 2)}
    if options.pop("first", False):
        rows = b if options.get("cu_seqlens") is None else options["cu_seqlens"].shape[0] - 1
        options["c_initial"] = torch.randn(rows, nh, dk, dv, device=device)
        options["n_initial"] = torch.randn(rows, nh, dk, device=device)
        if options.get("input_gate", "exp") == "exp":
            options["m_initial"] = torch.randn(rows, nh, 1, device=device)
    return MlstmCall(q, k, v, i, f, **options)


def call_of_key(parts: Mapping[str, Cell], device: str) -> MlstmCall | None:
    """A call with this key; see `Study`.

    Sequences of equal length; with `batch_invariant`, whose key does not say how many, 4 of 2,048 tokens.
    """
    batch, tokens, form = int(parts["batch"] or 0), int(parts["tokens"] or 0), parts["form"]
    dtype, state = (getattr(torch, str(parts[name]), None) for name in ("dtype", "state"))
    if parts["invariant"]:
        batch, tokens, form = 4, 2048, "whole"
    if not isinstance(dtype, torch.dtype) or batch < 1 or tokens < 1:
        return None
    options: dict[str, Any] = {
        "return_last_states": bool(parts["last"]), "first": bool(parts["initial"]), "epilogue": bool(parts["norm"]),
        "chunk_size": parts["chunk"] or None, "input_gate": parts["input_gate"], "normalize": bool(parts["normalize"]),
        "gate_soft_cap": 15.0 if parts["capped"] else 0.0, "batch_invariant": bool(parts["invariant"]),
    }  # fmt: skip
    if dtype != torch.float64:
        options["state_dtype"] = state
    rows = batch
    if form == "packed":
        rows = 1
        options["cu_seqlens"] = (torch.arange(batch + 1, device=device) * tokens // batch).int()
    elif form == "padded":
        options["seq_lens"] = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    if parts["resets"]:
        # documents of 64 tokens
        options["resets"] = (torch.arange(tokens, device=device) % 64 == 0).expand(rows, -1).contiguous()
    heads, dk, dv = (int(parts[name] or 0) for name in ("heads", "dk", "dv"))
    call = example((rows, heads, tokens, dk, dv), dtype, device, **options)
    return call if parts["output_gate"] else call._replace(output_gate=None)


def emulated() -> dict[str, tuple[tuple[int, int, int, int, int], torch.dtype, dict[str, Any]]]:
    """The calls over sequences that are emulated: shape, dtype, options."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    padded = {"seq_starts": numbers(5, 0), "seq_lens": numbers(20, 31)}
    resets = torch.zeros(2, 37, dtype=torch.bool)
    resets[0, [7, 19]] = resets[1, 16] = True
    return {
        "odd columns": ((1, 3, 37, 24, 40), torch.bfloat16, {}),
        "padded resets": ((2, 2, 37, 16, 32), torch.bfloat16, {**padded, "resets": resets, "first": True}),
        "packed": (
            (1, 2, 50, 16, 32), torch.float16,
            {"cu_seqlens": numbers(0, 17, 17, 45), "first": True, "gate_soft_cap": 15.0},
        ),
        "sigmoid": ((1, 2, 40, 48, 96), torch.bfloat16, {"input_gate": "sigmoid", "normalize": False}),
        "norm and gate": ((1, 2, 40, 32, 64), torch.bfloat16, {"epilogue": True, "first": True}),
        "wide norm": ((1, 1, 20, 256, 300), torch.bfloat16, {"epilogue": True}),
        "closed gates": ((1, 2, 40, 16, 32), torch.float16, {"closed": 32}),
        "states float32": ((1, 2, 40, 16, 32), torch.float32, {"first": True, "return_last_states": True}),
    }  # fmt: skip
