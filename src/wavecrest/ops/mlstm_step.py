"""One token of the mLSTM: states read once and written once, in the caller's memory where that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._mlstm_op as _shared
import wavecrest.ops._mlstm_reference as _reference_module
from wavecrest.ops._mlstm_operands import StepOperands, check_step
from wavecrest.registry import Cost, Key, Op, dtype_name, needs_grad
from wavecrest.tuned import Config

KEY_FIELDS = (
    "heads", "dk", "dv", "dtype", "state", "new_state", "input_gate", "normalize", "capped", "norm", "output_gate",
    "in_place", "device", "grad",
)  # fmt: skip


def _key(*args: Any, **kwargs: Any) -> Key:
    given = StepOperands(*args, **kwargs)
    # the batch is no part of it: no measured row can make a row's bits depend on it
    return (
        given.heads,
        given.dk,
        given.dv,
        dtype_name(given.q),
        dtype_name(given.c),
        str(given.c_dtype).removeprefix("torch."),
        given.input_gate,
        given.normalize,
        1 if given.gate_soft_cap > 0 else 0,
        given.norm_weight is not None,
        given.output_gate is not None,
        given.in_place,
        given.q.device.type,
        needs_grad(*given.floats),
    )


def _cost(*args: Any, **kwargs: Any) -> Cost:
    """Four operations for each element of a state; every operand once, states read and written."""
    given = StepOperands(*args, **kwargs)
    read = sum(one.nbytes for one in given if isinstance(one, Tensor))
    written = given.c.numel() * given.c_dtype.itemsize + given.n.nbytes + given.v.nbytes
    written += 0 if given.m is None else given.m.nbytes
    return Cost(flops=4 * (given.c.numel() + given.n.numel()), bytes=read + written)


def _check(*args: Any, **kwargs: Any) -> None:
    check_step("mlstm_step", StepOperands(*args, **kwargs))


def _reference(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _reference_module.step(StepOperands(*args, **kwargs))


def _example(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, ...]:
    """The arguments of a step of B, NH, DK, DV; `epilogue`: with norm and output gate; `half`: c in float16."""
    b, nh, dk, dv = shape
    half, epilogue = options.pop("half", False), options.pop("epilogue", False)
    made = _shared.example((b, nh, 1, dk, dv), dtype, device, first=True, epilogue=epilogue)
    q, k, v, i, f, c, n, m = made[:8]
    if options.get("input_gate", "exp") != "exp":
        m = None
    if epilogue:
        options |= {"norm_weight": made[18], "output_gate": made[20][:, :, 0]}
    c = c.half() if half else c
    return tuple(StepOperands(q[:, :, 0], k[:, :, 0], v[:, :, 0], i, f, c, n, m, **options))


def _inputs(B: int, NH: int, DK: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """B rows of NH heads, DV twice DK as in xLSTM."""
    return _example((B, NH, DK, 2 * DK), dtype, device)


_op = Op(
    "mlstm_step",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    inputs=_inputs,
    sizes=("B", "NH", "DK"),
    cost=_cost,
    default_config=lambda key: Config(num_warps=4),
    op_class="gemm",
)


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    *,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    output_gate: Tensor | None = None,
    in_place: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """One token of the mLSTM cell, by the formulas of `mlstm_chunkwise`.

    Args:
        q, k: [B, NH, DK], float32, float16, bfloat16 or float64, any strides.
        v: [B, NH, DV] in q's dtype.
        i, f: [B, NH, 1] or [B, NH], pre-activations of the gates in any float dtype.
        c: [B, NH, DK, DV], float32 or float16, any strides.
        n: [B, NH, DK] float32.
        m: [B, NH, 1] float32; None for sigmoid gates. For float64 q states may be float64.
        eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps: as for `mlstm_chunkwise`.
        output_gate: [B, NH, DV], any float dtype and strides, with norm_weight.
        in_place: write the new states over c, n and m, and return these.
        state_dtype: of the new c, float32 or float16 (clamped to ±65504); None: c's.

    Returns:
        (h, (c, n, m)), for sigmoid gates (h, (c, n)): h [B, NH, DV] in q's dtype and v's memory order.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this; or in_place with gradients, or with states
            whose elements share memory.
    """
    result = _op(
        q, k, v, i, f, c, n, m, eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps, output_gate,
        in_place, state_dtype,
    )  # fmt: skip
    return _shared.nested(result, True)
