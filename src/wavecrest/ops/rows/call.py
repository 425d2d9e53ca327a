"""A call of a row op: its arguments, their checks, and its shape key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.quantized as _quantized
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, name_of, needs_grad
from wavecrest.errors import InvalidArgument
from wavecrest.ops.common.quantized import Quantization


class RowCall(NamedTuple):
    """An op over the last dimension of x [..., N]; which one, `kind` says (see `kernel.KINDS`).

    With `dtype` the result is quantized to that 8-bit type; of kind "scaled" it is the dtype that 8-bit x is
    dequantized to. `scale`: given, or None: worked out from the values. `keeps_sum`: x + residual is a result too.
    """

    kind: str
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    dtype: torch.dtype | None = None
    granularity: str = "token"
    scale: Tensor | None = None
    keeps_sum: bool = True

    @property
    def quantization(self) -> Quantization | None:
        """The quantization of the result, or of x; None for neither."""
        if self.dtype is None:
            return None
        if self.kind == "scaled":
            return Quantization(self.dtype, _quantized.granularity_of(self.x, self.scale), self.scale)
        return Quantization(self.dtype, self.granularity, self.scale)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.x, self.residual, self.weight, self.bias, self.scale)

    @property
    def leading(self) -> int:
        """Leading dimensions that remain after merging those with one common stride."""
        return _layout.leading(self.x) if self.residual is None else _layout.leading(self.x, self.residual)

    @property
    def strided(self) -> bool:
        """True if the columns of an operand do not lie next to each other."""
        operands = (self.x,) if self.residual is None else (self.x, self.residual)
        return any(operand.shape[-1] > 1 and operand.stride(-1) != 1 for operand in operands)


class Spec(NamedTuple):
    """Properties by which the row ops differ.

    `dtypes`: the 8-bit types that a quantizing op makes; `keeps_sum`: x + residual is a result too.
    """

    name: str
    kind: str
    residual: bool = False
    quantized: bool = False
    dtypes: tuple[torch.dtype, ...] = tuple(_quantized.LARGEST)
    keeps_sum: bool = True


def check(spec: Spec, call: RowCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    op, x = spec.name, call.x
    if spec.kind == "scaled":
        _quantized.check_dequantize(op, x, call.quantization)
        return
    _checks.check_rows(op, x)
    if spec.residual:
        _checks.check_same(op, "residual", call.residual, x)
    if call.weight is not None:
        _checks.check_vector(op, "weight", call.weight, x)
    if call.bias is not None:
        _checks.check_vector(op, "bias", call.bias, x)
    _checks.check_eps(op, call.eps)
    if spec.quantized:
        _quantized.check(op, x, call.quantization, spec.dtypes)
        if call.granularity == "tensor" and call.scale is None and spec.kind != "identity":
            raise InvalidArgument(
                f"{op}: a scale for the whole tensor cannot be worked out in one pass; give it, or use token"
            )


KEY_FIELDS = ("rows", "columns", "dtype", "weight", "bias", "device", "leading", "grad", "strided")
QUANTIZED_FIELDS = ("to", "granularity", "static")


def key_of(call: RowCall) -> Key:
    """The shape key of a call: KEY_FIELDS, and QUANTIZED_FIELDS where 8-bit values take part."""
    x, weight, bias, how = call.x, call.weight, call.bias, call.quantization
    key: Key = (
        m_bucket(_layout.row_count(x)),
        x.shape[-1],
        dtype_name(x),
        None if weight is None else dtype_name(weight),
        None if bias is None else dtype_name(bias),
        x.device.type,
        call.leading,
        call.needs_grad,
        call.strided,
    )
    if how is None:
        return key
    return (*key, name_of(how.dtype), how.granularity, how.scale is not None)
