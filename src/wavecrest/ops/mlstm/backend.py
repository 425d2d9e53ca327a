"""What the mLSTM ops over sequences share: the shape key, the cost, example calls, the form of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.tuned import Cell
from wavecrest.ops.mlstm.call import Operands, StepOperands

KEY_FIELDS = (
    "batch", "tokens", "heads", "dk", "dv", "dtype", "state", "form", "input_gate", "normalize", "capped", "resets",
    "initial", "last", "norm", "output_gate", "chunk", "invariant", "device", "grad",
)  # fmt: skip
# those of them that are sizes, the one that rows are listed by first
KEY_SIZES = ("tokens", "batch")


def key_of(given: Operands) -> Key:
    """The shape key of a call, `batch` its sequences.

    With `batch_invariant` what a sequence may have around it is no part of it (`batch` and `tokens` 0, `form` "any"):
    no measured row can make its bits depend on that.
    """
    return (
        0 if given.batch_invariant else m_bucket(given.sequences),
        0 if given.batch_invariant else m_bucket(given.tokens),
        given.heads,
        given.dk,
        given.dv,
        dtype_name(given.q),
        str(given.c_dtype).removeprefix("torch."),
        "any" if given.batch_invariant else given.form,
        given.input_gate,
        given.normalize,
        given.capped,
        given.resets is not None,
        given.c_initial is not None,
        given.return_last_states,
        given.norm_weight is not None,
        given.output_gate is not None,
        given.chunk_size or 0,
        given.batch_invariant,
        given.q.device.type,
        needs_grad(*given.floats),
    )


def declines(given: Operands | StepOperands) -> str | None:
    """Why the kernels do not take a call."""
    return _checks.kernel_refusal(dtype_name(given.q), given.q.device.type, 1, needs_grad(*given.floats))


def columns_of(fields: tuple[str, ...], key: Key) -> tuple[int, int]:
    """DK and DV of a key."""
    return key[fields.index("dk")], key[fields.index("dv")]


def cost_of(given: Operands) -> Cost:
    """The least work: four operations for each element of a state and token, and every operand once."""
    states = given.sequences * given.heads * given.dk * (given.dv + 1) + given.sequences * given.heads
    bytes_read = sum(one.nbytes for one in given if isinstance(one, Tensor))
    written = given.v.nbytes + (states * given.c_dtype.itemsize if given.return_last_states else 0)
    flops = 4 * given.batch * given.heads * given.tokens * given.dk * (given.dv + 1)
    return Cost(flops=flops, bytes=bytes_read + written)


def example(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, ...]:
    """The arguments of a call of B, NH, S, DK, DV: tensors [B, S, NH, D] seen as [B, NH, S, D], gates as models have.

    Input gates near −10 and forget gates from 3 to 6, as xLSTM initialises their biases. `epilogue`: norm and output
    gate; `first`: with first states; `closed`: so many first tokens have both gates at −∞.
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
    return tuple(Operands(q, k, v, i, f, **options))


def call_of_key(parts: Mapping[str, Cell], device: str) -> tuple[Any, ...] | None:
    """A call with this key; see `Op`.

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
    given = Operands(*example((rows, heads, tokens, dk, dv), dtype, device, **options))
    return tuple(given if parts["output_gate"] else given._replace(output_gate=None))


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


def nested(result: Any, given_last: bool) -> Any:
    """h, or (h, (c, n, m)) as the public functions return it, from the tuple that an op returns."""
    if not given_last:
        return result
    h, *states = result
    return h, tuple(states)
