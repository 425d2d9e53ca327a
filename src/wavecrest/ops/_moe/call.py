"""A call of the mixture-of-experts layer: its arguments, their checks, and the sizes that follow from their shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# of weights that are stored in fewer bits
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# of weights in 4 bits, two a byte: int4 with float32 scales, mxfp4 with bytes
FOUR_BITS = torch.uint8
# rows and columns that share a scale of 8-bit weights, columns that share one of int4 and of mxfp4
BLOCK, GROUPS, MX_GROUP = 128, (32, 64, 128), 32
# columns of a weight in 4 bits are padded to a multiple of this (see `wavecrest.ops.packed`)
UNIT = 64
INDICES = (torch.int32, torch.int64)
# gate · sigmoid(alpha · gate) · (up + 1), both clamped
SWIGLUOAI = "swigluoai"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", SWIGLUOAI)


class MoeCall(NamedTuple):
    """Tokens through the gated MLPs of their experts; see `wavecrest.ops.moe` for the arguments.

    Properties are of a checked call. A pair is a token and one of its k experts.
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    activation: str = "silu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w1_zero: Tensor | None = None
    w2_zero: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        """Columns of a token."""
        return self.x.shape[1]

    @property
    def experts(self) -> int:
        """Experts whose weights are here."""
        return self.w1.shape[0]

    @property
    def intermediate(self) -> int:
        """Columns between an expert's two GEMMs."""
        return self.w1.shape[1] // 2

    @property
    def in_4_bits(self) -> bool:
        """True if weights are two values a byte."""
        return self.w1.dtype == FOUR_BITS

    @property
    def k(self) -> int:
        """Experts of a token."""
        return self.topk_ids.shape[1]

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and an expert."""
        return self.x.shape[0] * self.topk_ids.shape[1]

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.x, self.w1, self.w2, self.topk_weights, self.b1, self.b2)


def halves(rows: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The rows of gate and of up, dimension 1 of w1 or b1, as views."""
    if interleaved:
        return rows[:, ::2], rows[:, 1::2]
    middle = rows.shape[1] // 2
    return rows[:, :middle], rows[:, middle:]


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check(call: MoeCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    x = call.x
    if not isinstance(x, Tensor) or x.ndim != 2 or x.dtype not in FLOATS:
        raise InvalidArgument(
            f"moe: x must be float32, float16, bfloat16 or float64 [tokens, hidden], got {_describe(x)}"
        )
    for name, weight, form in (
        ("w1", call.w1, "[experts, 2 · intermediate, hidden]"), ("w2", call.w2, "[experts, hidden, intermediate]")
    ):  # fmt: skip
        kinds = (x.dtype, *EIGHT_BITS, FOUR_BITS)
        if not isinstance(weight, Tensor) or weight.ndim != 3 or weight.dtype not in kinds or weight.device != x.device:
            raise InvalidArgument(
                f"moe: {name} must be {x.dtype} {form} on {x.device} as x is, or int8, float8_e4m3fn, "
                f"float8_e4m3fnuz, or uint8 with two values a byte, got {_describe(weight)}"
            )
    _check_sizes(call)
    _check_scales(call)
    _check_routing(call)
    for name, bias, columns in (("b1", call.b1, call.w1.shape[1]), ("b2", call.b2, x.shape[1])):
        if bias is not None and not _fits(bias, (call.experts, columns), FLOATS, x.device):
            raise InvalidArgument(
                f"moe: {name} must be floating-point [{call.experts}, {columns}] on {x.device}, got {_describe(bias)}"
            )
    if call.activation not in ACTIVATIONS:
        raise InvalidArgument(f"moe: activation takes {', '.join(ACTIVATIONS)}, not {call.activation!r}")
    if not isinstance(call.interleaved, bool):
        raise InvalidArgument(f"moe: interleaved must be True or False, got {call.interleaved!r}")
    if not _is_number(call.alpha) or not math.isfinite(call.alpha):
        raise InvalidArgument(f"moe: alpha must be a finite number, got {call.alpha!r}")
    if not _is_number(call.limit) or not call.limit > 0:
        raise InvalidArgument(f"moe: limit must be a number above 0, got {call.limit!r}")


def _fits(value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> bool:
    return (
        isinstance(value, Tensor)
        and value.ndim == len(shape)
        and tuple(value.shape) == shape
        and value.dtype in dtypes
        and value.device == device
    )


def _check_sizes(call: MoeCall) -> None:
    x, w1, w2 = call.x, call.w1, call.w2
    if 0 in x.shape[1:] or 0 in w1.shape or 0 in w2.shape:
        raise InvalidArgument(
            f"moe: there may be no token, no other size is 0, got x {list(x.shape)}, w1 {list(w1.shape)} and w2 "
            f"{list(w2.shape)}"
        )
    if w1.dtype == w2.dtype == FOUR_BITS:
        wanted = [_bytes(x.shape[1]), x.shape[1], _bytes(w1.shape[1] // 2)]
        if [w1.shape[2], *w2.shape[1:]] != wanted or w2.shape[0] != w1.shape[0] or w1.shape[1] % 2:
            raise InvalidArgument(
                f"moe: weights in 4 bits beside x {list(x.shape)} are w1 [experts, 2 · intermediate, {wanted[0]}] and "
                f"w2 [experts, {wanted[1]}, {UNIT // 2} · ceil(intermediate / {UNIT})], got {list(w1.shape)} and "
                f"{list(w2.shape)}"
            )
        return
    if w1.shape[2] != x.shape[1] or w2.shape[1] != x.shape[1]:
        raise InvalidArgument(
            f"moe: x {list(x.shape)}, w1 {list(w1.shape)} and w2 {list(w2.shape)} must have one hidden size: "
            "[tokens, hidden], [experts, 2 · intermediate, hidden] and [experts, hidden, intermediate]; transposed "
            "weights are passed as w.mT"
        )
    if w2.shape[0] != w1.shape[0] or w1.shape[1] != 2 * w2.shape[2]:
        raise InvalidArgument(
            f"moe: w1 {list(w1.shape)} and w2 {list(w2.shape)} must have the same number of experts, and w1 twice "
            "the intermediate size of w2"
        )


def _bytes(columns: int) -> int:
    """Bytes of a row of a weight in 4 bits."""
    return -(-columns // UNIT) * UNIT // 2


def scale_kind(call: MoeCall, second: bool) -> tuple[str, int]:
    """The kind of the scales of w1, or of w2, and columns that share one, 0 for all; ("", 0) where no shape fits.

    "none", "expert", "row", "block" (128 × 128), "group" (of int4) or "e8m0" (of mxfp4).
    """
    weight, scale, columns = call.w1, call.w1_scale, call.hidden
    if second:
        weight, scale, columns = call.w2, call.w2_scale, call.intermediate
    if scale is None:
        return "none", 0
    shape, (experts, rows) = tuple(scale.shape), weight.shape[:2]
    if call.in_4_bits:
        if scale.dtype == torch.uint8:
            return ("e8m0", MX_GROUP) if shape == (experts, rows, -(-columns // MX_GROUP)) else ("", 0)
        # groups of more columns than there are say the same
        sizes = [size for size in GROUPS if shape == (experts, rows, -(-columns // size))]
        return ("group", sizes[-1]) if sizes else ("", 0)
    if shape == (experts, -(-rows // BLOCK), -(-columns // BLOCK)):
        return "block", BLOCK
    return {(experts,): ("expert", 0), (experts, rows): ("row", 0)}.get(shape, ("", 0))


def _check_scales(call: MoeCall) -> None:
    w1, w2, quantized = call.w1, call.w2, call.w1.dtype in (*EIGHT_BITS, FOUR_BITS)
    if w1.dtype != w2.dtype:
        raise InvalidArgument(f"moe: w1 and w2 must have one dtype, got {w1.dtype} and {w2.dtype}")
    dtypes = (torch.float32, torch.uint8) if call.in_4_bits else (torch.float32,)
    for name, scale, rows in (("w1_scale", call.w1_scale, w1.shape[1]), ("w2_scale", call.w2_scale, w2.shape[1])):
        if (scale is not None) != quantized:
            raise InvalidArgument(
                f"moe: weights of {w1.dtype} take {'a' if quantized else 'no'} {name}, got {_describe(scale)}"
            )
        if scale is None:
            continue
        fits = isinstance(scale, Tensor) and scale.dtype in dtypes and scale.device == call.x.device
        if not fits or not scale_kind(call, name == "w2_scale")[0]:
            rest = f"[{call.experts}, {rows}] or [{call.experts}, {-(-rows // BLOCK)}, ceil(columns / {BLOCK})]"
            shapes = f"float32 [{call.experts}], {rest}"
            if call.in_4_bits:
                both = f"[{call.experts}, {rows}, ceil(columns / "
                shapes = f"float32 {both}32, 64 or 128)], or uint8 {both}{MX_GROUP})],"
            raise InvalidArgument(f"moe: {name} must be {shapes} on {call.x.device}, got {_describe(scale)}")
    if call.in_4_bits and scale_kind(call, False)[0] != scale_kind(call, True)[0]:
        raise InvalidArgument("moe: w1_scale and w2_scale must both be float32 (int4), or both uint8 (mxfp4)")
    _check_zeros(call)


def _check_zeros(call: MoeCall) -> None:
    if call.w1_zero is None and call.w2_zero is None:
        return
    if not call.in_4_bits or scale_kind(call, False)[0] != "group":
        raise InvalidArgument("moe: w1_zero and w2_zero are of weights in int4, with float32 scales of groups")
    for name, zero, scale in (("w1_zero", call.w1_zero, call.w1_scale), ("w2_zero", call.w2_zero, call.w2_scale)):
        assert scale is not None
        if not _fits(zero, tuple(scale.shape), (torch.uint8,), call.x.device):
            raise InvalidArgument(
                f"moe: {name} must be uint8 {list(scale.shape)} on {call.x.device} as the scales, of w1 and w2 alike, "
                f"got {_describe(zero)}"
            )


def rows_of(scale: Tensor, rows: int) -> Tensor:
    """A scale of experts, or of their rows, as a view [experts, rows]."""
    return scale if scale.ndim == 2 else scale[:, None].expand(-1, rows)


def _check_routing(call: MoeCall) -> None:
    x, ids, weights = call.x, call.topk_ids, call.topk_weights
    if not isinstance(ids, Tensor) or ids.dtype not in INDICES or ids.ndim != 2 or ids.device != x.device:
        raise InvalidArgument(f"moe: topk_ids must be int32 or int64 [tokens, k] on {x.device}, got {_describe(ids)}")
    if ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        raise InvalidArgument(
            f"moe: topk_ids must be [{x.shape[0]}, k] with k of at least 1, got {list(ids.shape)}; x is {list(x.shape)}"
        )
    if not _fits(weights, tuple(ids.shape), FLOATS, x.device):
        raise InvalidArgument(
            f"moe: topk_weights must be floating-point {list(ids.shape)} on {x.device} as topk_ids, "
            f"got {_describe(weights)}"
        )
