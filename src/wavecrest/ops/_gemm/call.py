"""A call of gemm: its arguments, what follows from their shapes, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.common.quantized import LARGEST
from wavecrest.ops.packed import PackedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT8 = tuple(dtype for dtype in LARGEST if dtype.is_floating_point)
FORMATS = ("plain", "shuffled", "int4", "mxfp4")
# forms of b that hold two values in a byte
NIBBLES = ("int4", "mxfp4")
# for 8-bit floats: sums may be those of a matrix unit that keeps fewer bits than float32 (PyTorch: use_fast_accum)
FAST_ACCUM = "fast_accum"
PRECISIONS = ("ieee", "tf32", "tf32x3", FAST_ACCUM)
# activations of the first half of the columns, times the second half
GATED = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
# rows or columns of a block that shares a scale
SCALE_BLOCK = 128
GROUPS = (32, 64, 128)
# columns of K that share an e8m0 scale in mxfp4
MX_GROUP = 32
# K of a 4-bit weight is padded to a multiple of this (see `wavecrest.ops.packed`)
INT4_UNIT = 64


def _broadcast(a: Tensor, b: Tensor) -> torch.Size:
    size: torch.Size = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return size


class GemmCall(NamedTuple):
    """act(alpha · (scale_a · a) @ (scale_b · b) + bias) + residual.

    The options are those of `wavecrest.ops.gemm`. `linear` adds four:

    Attributes:
        form: how b is stored (see FORMATS): as it is, or as the transpose of a packed weight's values.
        group: the rows of b that share a scale; 0 where scales are not by group. In mxfp4 scale_b is uint8, e8m0.
        zero: uint8 of scale_b's shape: the zero points of 4-bit values; None: 8.
        tail: [K, T] of a's dtype: more columns after those of an 8-bit b.
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
        """The length of the sums: columns of a, rows of b."""
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
        """True if b is one matrix: all rows of a are rows of one GEMM."""
        return self.b.ndim == 2

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading sizes of a batch of GEMMs; () where b is one matrix."""
        if self.flat:
            return ()
        return tuple(_broadcast(self.a, self.b))

    @property
    def batches(self) -> int:
        """GEMMs in the batch."""
        count = 1
        for size in self.batch:
            count = count * size
        return count

    @property
    def M(self) -> int:
        """Rows of a GEMM."""
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
        return torch.int32 if self.integers and not self.has_epilogue else torch.bfloat16

    @property
    def keeps_float32(self) -> bool:
        """True if float32 may not be rounded before it is multiplied, as PyTorch does where that is set."""
        return self.a.dtype == torch.float32 and self.precision != "tf32"

    @property
    def integers(self) -> bool:
        """True if the sums are of integers."""
        return self.a.dtype == torch.int8

    @property
    def has_epilogue(self) -> bool:
        """True if anything is done to the sums before they are rounded."""
        options = (self.bias, self.scale_a, self.scale_b, self.residual, self.activation, self.out_scale)
        return self.alpha != 1.0 or any(value is not None for value in options)

    @property
    def weight_only(self) -> bool:
        """True if b alone is stored in fewer bits; kernels widen it to a's dtype."""
        return self.a.dtype.itemsize > 1 and (self.form in NIBBLES or self.b.dtype.itemsize == 1)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(
            self.a, self.b, self.bias, self.scale_a, self.scale_b, self.residual, self.out_scale, self.norm_weight,
            self.tail,
        )  # fmt: skip


# the fields of a GemmCall that the weight of `linear` brings, in this order: a tuple, as a call makes one
STORED = ("b", "scale_b", "form", "group", "zero", "tail")
StoredWeight = tuple[Tensor, Tensor | None, str, int, Tensor | None, Tensor | None]


def stored_weight(
    x: Tensor, weight: Tensor | PackedWeight, scale_weight: Tensor | None, tail: Tensor | None
) -> StoredWeight:
    """The weight [N, K], plain or packed, and the tail [T, K] of `linear` as columns of a GEMM's b.

    Raises:
        InvalidArgument: the weight, its scales, x or the tail do not fit.
    """
    form, group = "plain", 0
    stored: Tensor = weight
    scale, zero = scale_weight, None
    if isinstance(weight, PackedWeight):
        if scale_weight is not None:
            raise InvalidArgument("linear: a packed weight has its own scales; leave scale_weight out")
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"linear: x {found} and weight {list(weight.shape)} do not fit")
        form = weight.format if weight.format in ("shuffled", *NIBBLES) else "plain"
        stored, scale = weight.stored, weight.scale
        if scale is not None:
            # one scale a row is a vector, whatever the group is called
            by_group = form in NIBBLES or (weight.format != "fp8_block" and scale.shape[1] != 1)
            group = weight.group if by_group else 0
            zero = None if weight.zero is None else weight.zero.mT
    elif scale is None and tail is None and isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.t(), None, form, group, None, None
    if not isinstance(stored, Tensor) or stored.ndim != 2:
        found = list(stored.shape) if isinstance(stored, Tensor) else type(stored).__name__
        raise InvalidArgument(f"linear: weight must be a tensor [N, K], got {found}")
    if isinstance(scale, Tensor) and scale.ndim == 2:
        scale = scale.mT
    if tail is not None:
        if not isinstance(tail, Tensor) or isinstance(tail, PackedWeight) or tail.ndim != 2:
            raise InvalidArgument("linear: a tail is a plain tensor [T, K]")
        tail = tail.mT
    return stored.t(), scale, form, group, zero, tail


def linear_call(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    tail: Tensor | None = None,
    **options: Any,
) -> GemmCall:
    """The call that `linear` makes of its arguments; `options`: those that `gemm` has too, by their names.

    Raises:
        InvalidArgument: the weight, its scales, x or the tail do not fit.
    """
    stored: dict[str, Any] = dict(zip(STORED, stored_weight(x, weight, scale_weight, tail), strict=True))
    return GemmCall(x, bias=bias, scale_a=scale_x, **stored, **options)


def scale_kind(scale: Tensor | None, rows: int, K: int, *, of_b: bool, group: int = 0) -> str | None:
    """Granularity of a scale: "none", "tensor", "vector", "block" or "group"; None where the shape fits no granularity.

    `rows`: M for a, the number of columns for b.
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


def kinds(call: GemmCall) -> tuple[str, str]:
    """The kinds of scale_a and scale_b of a checked call; "norm" for an a that is normalised."""
    b = scale_kind(call.scale_b, call.b.shape[-1], call.K, of_b=True, group=call.group)
    if call.norm_weight is not None:
        return "norm", b or "none"
    a = scale_kind(call.scale_a, call.M, call.K, of_b=False)
    return a or "none", b or "none"


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def check(call: GemmCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    _check_options(call)
    a, b = call.a, call.b
    for name, value in (("a", a), ("b", b)):
        least = 1 if name == "a" else 2
        if not isinstance(value, Tensor) or value.ndim < least:
            raise InvalidArgument(
                f"gemm: {name} must be a tensor of at least {least} dimensions, got {_describe(value)}"
            )
        if value.dtype not in (*FLOATS, *LARGEST) and not (name == "b" and call.form in NIBBLES):
            raise InvalidArgument(
                f"gemm: {name} must be floating-point, int8 or 8-bit floating-point, got {value.dtype}"
            )
    _check_forms(call)
    _check_types(call)
    if a.device != b.device:
        raise InvalidArgument(f"gemm: a is on {a.device}, b on {b.device}")
    if not call.flat:
        if a.ndim < 2:
            raise InvalidArgument(f"gemm: a batch of b {list(b.shape)} needs an a [..., M, K], got {list(a.shape)}")
        try:
            _broadcast(a, b)
        except RuntimeError:
            raise InvalidArgument(f"gemm: the batches of a {list(a.shape)} and b {list(b.shape)} do not fit") from None
    _check_scales(call)
    _check_norm(call)
    _check_tail(call)
    _check_epilogue(call)


def _check_options(call: GemmCall) -> None:
    """The options that the properties of a call read; before all other checks."""
    activation, known = call.activation, (*ACTIVATIONS, *GATED)
    if activation is not None and activation not in known:
        raise InvalidArgument(f"gemm: activation takes {', '.join(known)}, not {activation!r}")
    for name, value in (("alpha", call.alpha), ("slope", call.slope)):
        if type(value) not in (float, int):
            raise InvalidArgument(f"gemm: {name} must be a number, got {value!r}")
    if type(call.overwrite_residual) is not bool:
        raise InvalidArgument(f"gemm: overwrite_residual is True or False, not {call.overwrite_residual!r}")
    if call.overwrite_residual and call.residual is None:
        raise InvalidArgument("gemm: there is no residual to overwrite")


def _check_forms(call: GemmCall) -> None:
    a, b = call.a, call.b
    if call.form not in FORMATS:
        raise InvalidArgument(f"gemm: form takes {', '.join(FORMATS)}, not {call.form!r}")
    K = call.K
    rows = b.shape[-2]
    if call.form in NIBBLES:
        padded = _layout.ceil_div(K, INT4_UNIT) * INT4_UNIT
        if b.dtype != torch.uint8 or b.ndim != 2 or rows != padded // 2:
            raise InvalidArgument(f"gemm: 4-bit values for K = {K} are uint8 [{padded // 2}, N], got {_describe(b)}")
        groups = GROUPS if call.form == "int4" else (MX_GROUP,)
        if call.group not in groups:
            raise InvalidArgument(f"gemm: {call.form} has groups of {', '.join(map(str, groups))}, not {call.group}")
        if call.form == "mxfp4" and call.scale_b is None:
            raise InvalidArgument("gemm: mxfp4 has scales: scale_b is missing")
        return
    if rows != K:
        raise InvalidArgument(f"gemm: a {list(a.shape)} and b {list(b.shape)} do not fit: K is {K} and {rows}")
    if call.form == "shuffled" and (b.ndim != 2 or b.shape[-1] % 16 != 0 or K % 32 != 0 or not b.mT.is_contiguous()):
        raise InvalidArgument(
            f"gemm: a shuffled weight is contiguous [N, K] with N % 16 = K % 32 = 0, got {_describe(b.mT)}"
        )
    if call.group and call.group not in GROUPS:
        raise InvalidArgument(f"gemm: groups have {', '.join(map(str, GROUPS))} rows of b, not {call.group}")
    if call.group and not call.weight_only:
        raise InvalidArgument("gemm: groups are for 8-bit and 4-bit weights with a 16-bit or wider a")


def _check_types(call: GemmCall) -> None:
    a, b = call.a, call.b
    same = a.dtype == b.dtype
    both_float8 = a.dtype in FLOAT8 and b.dtype in FLOAT8
    if not (same or both_float8 or call.weight_only):
        raise InvalidArgument(
            f"gemm: cannot multiply {a.dtype} by {b.dtype}; give both one dtype, or b as an 8-bit weight"
        )
    if call.zero is not None and call.form != "int4":
        raise InvalidArgument("gemm: zero points are for 4-bit weights")
    if call.zero is not None and (call.scale_b is None or call.zero.shape != call.scale_b.shape):
        raise InvalidArgument(f"gemm: zero must have scale_b's shape, got {_describe(call.zero)}")
    if call.precision not in PRECISIONS:
        raise InvalidArgument(f"gemm: precision takes {', '.join(PRECISIONS)}, not {call.precision!r}")
    if call.precision == FAST_ACCUM and not both_float8:
        raise InvalidArgument(f"gemm: precision {FAST_ACCUM} is for 8-bit floats, not {a.dtype} and {b.dtype}")


def _check_scales(call: GemmCall) -> None:
    for name, scale, rows, of_b in (
        ("scale_a", call.scale_a, call.M, False),
        ("scale_b", call.scale_b, call.b.shape[-1], True),
    ):
        if scale is None:
            continue
        dtype, kind = (torch.uint8, "uint8") if of_b and call.form == "mxfp4" else (torch.float32, "float32")
        if not isinstance(scale, Tensor) or scale.dtype != dtype or scale.device != call.a.device:
            raise InvalidArgument(f"gemm: {name} must be a {kind} tensor on {call.a.device}, got {_describe(scale)}")
        found = scale_kind(scale, rows, call.K, of_b=of_b, group=call.group if of_b else 0)
        if found is None:
            part, block = ("column", "128 × 128 block, nor one a group") if of_b else ("row", "1 × 128 block")
            raise InvalidArgument(
                f"gemm: {name} {list(scale.shape)} is not one for the tensor ([]), nor one a {part} ([{rows}]), nor "
                f"one a {block}"
            )
        if not call.flat and found != "tensor":
            raise InvalidArgument(f"gemm: in a batch of matrices b, {name} is for the whole tensor")
    if call.scale_a is not None and call.weight_only:
        raise InvalidArgument(f"gemm: scale_a is for an 8-bit a, not {call.a.dtype}")


def _check_norm(call: GemmCall) -> None:
    a, weight = call.a, call.norm_weight
    if weight is None:
        return
    fits = isinstance(weight, Tensor) and weight.shape == (call.K,) and weight.dtype in FLOATS
    if not fits or weight.device != a.device:
        raise InvalidArgument(
            f"gemm: norm_weight must be floating-point [{call.K}] on {a.device}, got {_describe(weight)}"
        )
    if a.dtype not in FLOATS:
        raise InvalidArgument(f"gemm: norm_weight is for a floating-point a of 16 bits or more, not {a.dtype}")
    if call.scale_a is not None:
        raise InvalidArgument("gemm: norm_weight and scale_a exclude each other: a norm has a scale of its own")
    if not call.flat:
        raise InvalidArgument(f"gemm: norm_weight is for one matrix b, not a batch {list(call.b.shape)}")
    if type(call.norm_eps) not in (float, int) or not 0 <= call.norm_eps < float("inf"):
        raise InvalidArgument(f"gemm: norm_eps must be a number of at least 0, got {call.norm_eps!r}")


def _check_tail(call: GemmCall) -> None:
    a, tail = call.a, call.tail
    if tail is None:
        return
    if not isinstance(tail, Tensor) or tail.shape != (call.K, call.tails) or tail.dtype != a.dtype:
        raise InvalidArgument(f"gemm: a tail is {a.dtype} [{call.K}, T], as a is, got {_describe(tail)}")
    if tail.device != a.device:
        raise InvalidArgument(f"gemm: the tail must be on {a.device}, got {_describe(tail)}")
    if call.form != "plain" or not call.weight_only or not call.flat or kinds(call)[1] not in ("vector", "tensor"):
        raise InvalidArgument("gemm: a tail goes with a weight in 8 bits that has one scale, or one a column")
    if call.activation in GATED or call.residual is not None or call.bias_along != "n" or call.dtype in LARGEST:
        raise InvalidArgument("gemm: with a tail there is no gated activation, residual, bias along m or 8-bit result")


def _check_epilogue(call: GemmCall) -> None:
    activation, out = call.activation, call.dtype
    if activation in GATED and call.columns % 2 != 0:
        raise InvalidArgument(f"gemm: {activation} needs an even number of columns, got {call.columns}")
    if call.bias_along not in ("n", "m"):
        raise InvalidArgument(f"gemm: bias_along takes n or m, not {call.bias_along!r}")
    if call.bias_along == "m" and activation in GATED:
        raise InvalidArgument(f"gemm: {activation} takes a bias along n")
    if call.bias is not None:
        length = call.columns if call.bias_along == "n" else call.M
        fits = isinstance(call.bias, Tensor) and call.bias.shape == (length,) and call.bias.dtype in FLOATS
        if not fits or call.bias.device != call.a.device:
            raise InvalidArgument(
                f"gemm: bias must be floating-point [{length}] on {call.a.device}, got {_describe(call.bias)}"
            )
    if call.residual is not None:
        r = call.residual
        if (
            not isinstance(r, Tensor)
            or tuple(r.shape) != call.shape
            or r.dtype not in FLOATS
            or r.device != call.a.device
        ):
            raise InvalidArgument(
                f"gemm: residual must be floating-point {list(call.shape)} on {call.a.device}, got {_describe(r)}"
            )
    if out not in (*FLOATS, *LARGEST, torch.int32):
        raise InvalidArgument(
            f"gemm: out_dtype takes float32, float16, bfloat16, int8, int32 or an 8-bit float, not {out}"
        )
    if out == torch.int32 and (not call.integers or call.has_epilogue):
        raise InvalidArgument("gemm: int32 is the plain sum of int8 GEMMs: no scale, bias, activation or residual")
    eight_bits = out in LARGEST
    if eight_bits != (call.out_scale is not None):
        raise InvalidArgument("gemm: out_scale goes with an 8-bit out_dtype, and an 8-bit out_dtype with out_scale")
    if call.out_scale is not None:
        scale = call.out_scale
        if (
            not isinstance(scale, Tensor)
            or scale.dtype != torch.float32
            or scale.numel() != 1
            or scale.device != call.a.device
        ):
            raise InvalidArgument(f"gemm: out_scale must be float32 [] on {call.a.device}, got {_describe(scale)}")
