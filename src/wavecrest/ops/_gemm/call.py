"""The arguments of a product: what they may be, and what follows from their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.layout as _layout
from wavecrest.errors import InvalidArgument
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.common.quantized import LARGEST

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT8 = tuple(dtype for dtype in LARGEST if dtype.is_floating_point)
FORMATS = ("plain", "shuffled", "int4")
PRECISIONS = ("ieee", "tf32")
# activations of the first half of the columns, times the second half
GATED = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
# rows or columns of a block that shares a scale
SCALE_BLOCK = 128
GROUPS = (32, 64, 128)
# columns of K that a 4-bit weight is padded to (see `wavecrest.ops.packed`)
INT4_UNIT = 64


def _broadcast(a: Tensor, b: Tensor) -> torch.Size:
    size: torch.Size = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return size


class Operands(NamedTuple):
    """act(alpha · (scale_a · a) @ (scale_b · b) + bias) + residual, in the order that the op's backends get them.

    a [..., M, K]; b [K, N] or [..., K, N], or a weight's stored form transposed (`form`, see FORMATS); `group`: rows of
    b that share a scale, 0 where they do not. With `norm_weight` [K] it is RMSNorm(a) in place of a. `tail` [K, T]:
    more columns, behind those of a weight b in 8 bits, in a's dtype.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    out_scale: Tensor | None = None
    alpha: float = 1.0
    slope: float = 0.01
    bias_along: str = "n"
    precision: str = "ieee"
    form: str = "plain"
    group: int = 0
    zero: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    tail: Tensor | None = None
    # the result may be made in the residual's memory
    overwrite_residual: bool = False

    @property
    def K(self) -> int:
        """Products a sum has."""
        return self.a.shape[-1]

    @property
    def columns(self) -> int:
        """Columns of b and of the tail: N, or 2 · N where an activation is gated."""
        return self.b.shape[-1] + self.tails

    @property
    def tails(self) -> int:
        """Columns of the tail."""
        return 0 if self.tail is None else self.tail.shape[-1]

    @property
    def N(self) -> int:
        """Columns of the result."""
        return self.columns // 2 if self.activation in GATED else self.columns

    @property
    def flat(self) -> bool:
        """True if b is one matrix: all rows of a are rows of one product."""
        return self.b.ndim == 2

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading sizes of a batch of products; () where b is one matrix."""
        if self.flat:
            return ()
        return tuple(_broadcast(self.a, self.b))

    @property
    def batches(self) -> int:
        """Products in the batch."""
        count = 1
        for size in self.batch:
            count = count * size
        return count

    @property
    def M(self) -> int:
        """Rows of a product."""
        if not self.flat:
            return self.a.shape[-2]
        return _layout.row_count(self.a)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        lead = self.a.shape[:-1] if self.flat else (*self.batch, self.a.shape[-2])
        return (*lead, self.N)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        if self.out_dtype is not None:
            return self.out_dtype
        if self.a.dtype.is_floating_point and self.a.dtype.itemsize > 1:
            return self.a.dtype
        return torch.int32 if self.integers and not self.finished else torch.bfloat16

    @property
    def integers(self) -> bool:
        """True if products are summed as integers."""
        return self.a.dtype == torch.int8

    @property
    def finished(self) -> bool:
        """True if anything is done to the sums."""
        given = (self.bias, self.scale_a, self.scale_b, self.residual, self.activation, self.out_scale)
        return self.alpha != 1.0 or any(value is not None for value in given)

    @property
    def weight_only(self) -> bool:
        """True if b alone is stored in fewer bits, and made a's type on the way."""
        return self.a.dtype.itemsize > 1 and (self.form == "int4" or self.b.dtype.itemsize == 1)


def scale_kind(scale: Tensor | None, rows: int, K: int, *, of_b: bool, group: int = 0) -> str | None:
    """What shares a scale: "none", "tensor", "vector", "block" or "group"; None where the shape is none of theirs.

    `rows`: M for a, N (the columns) for b.
    """
    if scale is None:
        return "none"
    shape = tuple(scale.shape)
    blocks = _layout.ceil_div(K, SCALE_BLOCK)
    if group:
        return "group" if shape == (_layout.ceil_div(K, group), rows) else None
    if scale.numel() == 1 and len(shape) <= 2:
        return "tensor"
    if shape == (rows,) or shape == ((1, rows) if of_b else (rows, 1)):
        return "vector"
    if shape == ((blocks, _layout.ceil_div(rows, SCALE_BLOCK)) if of_b else (rows, blocks)):
        return "block"
    return None


def kinds(given: Operands) -> tuple[str, str]:
    """The kinds of scale_a and scale_b of arguments that were checked; "norm" for an a that is normalised."""
    b = scale_kind(given.scale_b, given.b.shape[-1], given.K, of_b=True, group=given.group)
    if given.norm_weight is not None:
        return "norm", b or "none"
    a = scale_kind(given.scale_a, given.M, given.K, of_b=False)
    return a or "none", b or "none"


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def check(op: str, given: Operands) -> None:
    """Raise InvalidArgument unless the arguments are a product, naming what is wrong."""
    _check_options(op, given)
    a, b = given.a, given.b
    for name, value in (("a", a), ("b", b)):
        least = 1 if name == "a" else 2
        if not isinstance(value, Tensor) or value.ndim < least:
            raise InvalidArgument(
                f"{op}: {name} must be a tensor of at least {least} dimensions, got {_describe(value)}"
            )
        if value.dtype not in (*FLOATS, *LARGEST) and not (name == "b" and given.form == "int4"):
            raise InvalidArgument(
                f"{op}: {name} must be floating-point, int8 or 8-bit floating-point, got {value.dtype}"
            )
    _check_forms(op, given)
    _check_types(op, given)
    if a.device != b.device:
        raise InvalidArgument(f"{op}: a is on {a.device}, b on {b.device}")
    if not given.flat:
        if a.ndim < 2:
            raise InvalidArgument(f"{op}: a batch of b {list(b.shape)} needs an a [..., M, K], got {list(a.shape)}")
        try:
            _broadcast(a, b)
        except RuntimeError:
            raise InvalidArgument(f"{op}: the batches of a {list(a.shape)} and b {list(b.shape)} do not fit") from None
    _check_scales(op, given)
    _check_norm(op, given)
    _check_tail(op, given)
    _check_finish(op, given)


def _check_options(op: str, given: Operands) -> None:
    """Those that the properties of the operands ask for, whatever they are."""
    activation, known = given.activation, (*ACTIVATIONS, *GATED)
    if activation is not None and activation not in known:
        raise InvalidArgument(f"{op}: activation takes {', '.join(known)}, not {activation!r}")
    for name, value in (("alpha", given.alpha), ("slope", given.slope)):
        if type(value) not in (float, int):
            raise InvalidArgument(f"{op}: {name} must be a number, got {value!r}")
    if type(given.overwrite_residual) is not bool:
        raise InvalidArgument(f"{op}: overwrite_residual is True or False, not {given.overwrite_residual!r}")
    if given.overwrite_residual and given.residual is None:
        raise InvalidArgument(f"{op}: there is no residual to overwrite")


def _check_forms(op: str, given: Operands) -> None:
    a, b = given.a, given.b
    if given.form not in FORMATS:
        raise InvalidArgument(f"{op}: form takes {', '.join(FORMATS)}, not {given.form!r}")
    K = given.K
    rows = b.shape[-2]
    if given.form == "int4":
        padded = _layout.ceil_div(K, INT4_UNIT) * INT4_UNIT
        if b.dtype != torch.uint8 or b.ndim != 2 or rows != padded // 2:
            raise InvalidArgument(f"{op}: 4-bit codes for K = {K} are uint8 [{padded // 2}, N], got {_describe(b)}")
        if given.group not in GROUPS:
            raise InvalidArgument(f"{op}: 4-bit codes have groups of {', '.join(map(str, GROUPS))}, not {given.group}")
        return
    if rows != K:
        raise InvalidArgument(f"{op}: a {list(a.shape)} and b {list(b.shape)} do not fit: K is {K} and {rows}")
    if given.form == "shuffled" and (b.ndim != 2 or b.shape[-1] % 16 != 0 or K % 32 != 0 or not b.mT.is_contiguous()):
        raise InvalidArgument(
            f"{op}: a shuffled weight is contiguous [N, K] with N % 16 = K % 32 = 0, got {_describe(b.mT)}"
        )
    if given.group and given.group not in GROUPS:
        raise InvalidArgument(f"{op}: groups have {', '.join(map(str, GROUPS))} rows of b, not {given.group}")
    if given.group and not given.weight_only:
        raise InvalidArgument(f"{op}: groups are for 8-bit and 4-bit weights with a 16-bit or wider a")


def _check_types(op: str, given: Operands) -> None:
    a, b = given.a, given.b
    same = a.dtype == b.dtype
    both_float8 = a.dtype in FLOAT8 and b.dtype in FLOAT8
    if not (same or both_float8 or given.weight_only):
        raise InvalidArgument(
            f"{op}: no product of {a.dtype} and {b.dtype}; give both one dtype, or b as an 8-bit weight"
        )
    if given.zero is not None and given.form != "int4":
        raise InvalidArgument(f"{op}: zero points are for 4-bit weights")
    if given.zero is not None and (given.scale_b is None or given.zero.shape != given.scale_b.shape):
        raise InvalidArgument(f"{op}: zero must have scale_b's shape, got {_describe(given.zero)}")
    if given.precision not in PRECISIONS:
        raise InvalidArgument(f"{op}: precision takes {', '.join(PRECISIONS)}, not {given.precision!r}")


def _check_scales(op: str, given: Operands) -> None:
    for name, scale, rows, of_b in (
        ("scale_a", given.scale_a, given.M, False),
        ("scale_b", given.scale_b, given.b.shape[-1], True),
    ):
        if scale is None:
            continue
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.device != given.a.device:
            raise InvalidArgument(f"{op}: {name} must be a float32 tensor on {given.a.device}, got {_describe(scale)}")
        kind = scale_kind(scale, rows, given.K, of_b=of_b, group=given.group if of_b else 0)
        if kind is None:
            part, block = ("column", "128 × 128 block, nor one a group") if of_b else ("row", "1 × 128 block")
            raise InvalidArgument(
                f"{op}: {name} {list(scale.shape)} is not one for the tensor ([]), nor one a {part} ([{rows}]), nor "
                f"one a {block}"
            )
        if not given.flat and kind != "tensor":
            raise InvalidArgument(f"{op}: in a batch of matrices b, {name} is for the whole tensor")
    if given.scale_a is not None and given.weight_only:
        raise InvalidArgument(f"{op}: scale_a is for an 8-bit a, not {given.a.dtype}")


def _check_norm(op: str, given: Operands) -> None:
    a, weight = given.a, given.norm_weight
    if weight is None:
        return
    fits = isinstance(weight, Tensor) and weight.shape == (given.K,) and weight.dtype in FLOATS
    if not fits or weight.device != a.device:
        raise InvalidArgument(
            f"{op}: norm_weight must be floating-point [{given.K}] on {a.device}, got {_describe(weight)}"
        )
    if a.dtype not in FLOATS:
        raise InvalidArgument(f"{op}: norm_weight is for a floating-point a of 16 bits or more, not {a.dtype}")
    if given.scale_a is not None:
        raise InvalidArgument(f"{op}: norm_weight and scale_a exclude each other: a norm has a scale of its own")
    if not given.flat:
        raise InvalidArgument(f"{op}: norm_weight is for one matrix b, not a batch {list(given.b.shape)}")
    if type(given.norm_eps) not in (float, int) or not 0 <= given.norm_eps < float("inf"):
        raise InvalidArgument(f"{op}: norm_eps must be a number of at least 0, got {given.norm_eps!r}")


def _check_tail(op: str, given: Operands) -> None:
    a, tail = given.a, given.tail
    if tail is None:
        return
    if not isinstance(tail, Tensor) or tail.shape != (given.K, given.tails) or tail.dtype != a.dtype:
        raise InvalidArgument(f"{op}: a tail is {a.dtype} [{given.K}, T], as a is, got {_describe(tail)}")
    if tail.device != a.device:
        raise InvalidArgument(f"{op}: the tail must be on {a.device}, got {_describe(tail)}")
    if given.form != "plain" or not given.weight_only or not given.flat or kinds(given)[1] not in ("vector", "tensor"):
        raise InvalidArgument(f"{op}: a tail goes with a weight in 8 bits that has one scale, or one a column")
    if given.activation in GATED or given.residual is not None or given.bias_along != "n" or given.dtype in LARGEST:
        raise InvalidArgument(f"{op}: with a tail there is no gated activation, residual, bias along m or 8-bit result")


def _check_finish(op: str, given: Operands) -> None:
    activation, out = given.activation, given.dtype
    if activation in GATED and given.columns % 2 != 0:
        raise InvalidArgument(f"{op}: {activation} needs an even number of columns, got {given.columns}")
    if given.bias_along not in ("n", "m"):
        raise InvalidArgument(f"{op}: bias_along takes n or m, not {given.bias_along!r}")
    if given.bias_along == "m" and activation in GATED:
        raise InvalidArgument(f"{op}: {activation} takes a bias along n")
    if given.bias is not None:
        length = given.columns if given.bias_along == "n" else given.M
        fits = isinstance(given.bias, Tensor) and given.bias.shape == (length,) and given.bias.dtype in FLOATS
        if not fits or given.bias.device != given.a.device:
            raise InvalidArgument(
                f"{op}: bias must be floating-point [{length}] on {given.a.device}, got {_describe(given.bias)}"
            )
    if given.residual is not None:
        r = given.residual
        if (
            not isinstance(r, Tensor)
            or tuple(r.shape) != given.shape
            or r.dtype not in FLOATS
            or r.device != given.a.device
        ):
            raise InvalidArgument(
                f"{op}: residual must be floating-point {list(given.shape)} on {given.a.device}, got {_describe(r)}"
            )
    if out not in (*FLOATS, *LARGEST, torch.int32):
        raise InvalidArgument(
            f"{op}: out_dtype takes float32, float16, bfloat16, int8, int32 or an 8-bit float, not {out}"
        )
    if out == torch.int32 and (not given.integers or given.finished):
        raise InvalidArgument(f"{op}: int32 is the plain sum of int8 products: no scale, bias, activation or residual")
    eight_bits = out in LARGEST
    if eight_bits != (given.out_scale is not None):
        raise InvalidArgument(f"{op}: out_scale goes with an 8-bit out_dtype, and an 8-bit out_dtype with out_scale")
    if given.out_scale is not None:
        scale = given.out_scale
        if (
            not isinstance(scale, Tensor)
            or scale.dtype != torch.float32
            or scale.numel() != 1
            or scale.device != given.a.device
        ):
            raise InvalidArgument(f"{op}: out_scale must be float32 [] on {given.a.device}, got {_describe(scale)}")
