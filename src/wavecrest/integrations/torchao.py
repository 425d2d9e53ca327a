"""Weights that torchao quantized, as wavecrest's packed weights: the same values in the layout that kernels read.

Written against torchao 0.18.0. Classes are known by their names, so that torchao is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.nn import Linear
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed.formats import int4_bytes

# columns that share a scale, of formats with groups
GROUPS = (32, 64, 128)
# the zero point of symmetric int4, and what torchao's values from −8 to 7 are below wavecrest's
CENTRE = 8


def packed(weight: Tensor) -> PackedWeight:
    """The packed weight of a quantized weight [N, K] of torchao, value by value.

    Int8Tensor (`Int8WeightOnlyConfig`), IntxUnpackedToInt8Tensor of 8 and 4 bits (`IntxWeightOnlyConfig`) and
    Float8Tensor (`Float8WeightOnlyConfig`) are taken: one scale a row, a tensor, 32, 64 or 128 columns (integers), or
    a block of 128 × 128 (floats).

    Raises:
        InvalidArgument: this is no such tensor.
        Unsupported: it is, but quantizes activations too, or has scales or zero points that no format here has.
    """
    kind = type(weight).__name__
    reader = READERS.get(kind) if type(weight).__module__.partition(".")[0] == "torchao" else None
    if reader is None:
        raise InvalidArgument(f"a {kind} is no quantized weight of torchao that can be read; {', '.join(READERS)} can")
    if weight.ndim != 2:
        raise Unsupported(f"{kind} of {weight.ndim} dimensions; a weight has two")
    for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization"):
        if getattr(weight, name, None) is not None:
            raise Unsupported(f"{kind} quantizes activations too ({name}); only weights are read")
    return reader(weight)


def convert(model: nn.Module) -> dict[str, str]:
    """Replace, in place, the linear layers whose weights torchao quantized by `wavecrest.nn.Linear`.

    Returns:
        Why each layer that is left was left, by its path.

    Raises:
        InvalidArgument: no layer has such a weight.
    """
    left, made = {}, {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or type(module.weight).__module__.partition(".")[0] != "torchao":
            continue
        try:
            made[path] = Linear.from_weight(packed(module.weight), module.bias).train(module.training)
        except (InvalidArgument, Unsupported) as error:
            left[path] = str(error)
    if not made and not left:
        raise InvalidArgument("torchao.convert: no linear layer has a weight that torchao quantized")
    for path, layer in made.items():
        if not path:
            raise InvalidArgument("torchao.convert takes a model with layers in it; of one layer take packed(weight)")
        model.set_submodule(path, layer)
    return left


def _integers(weight: Any) -> PackedWeight:
    bits = {torch.int8: 8, getattr(torch, "int4", None): 4}.get(getattr(weight, "target_dtype", torch.int8))
    if bits is None:
        raise Unsupported(f"{type(weight).__name__} of {weight.target_dtype}; 8 and 4 bits can be read")
    group = _group(weight)
    zero = getattr(weight, "zero_point", None)
    if zero is not None and zero.dtype.is_floating_point and bool((zero != zero.round()).any()):
        raise Unsupported(f"{type(weight).__name__} has zero points that are no integers")
    centred = zero is None or not bool(zero.any())
    if bits == 8:
        if not centred:
            raise Unsupported(f"{type(weight).__name__} has zero points; int8 weights are symmetric here")
        scale = _by_group(weight.scale, weight)
        return PackedWeight.from_parts("int8", weight.qdata, scale=scale, group=group, dtype=weight.dtype)
    if group not in GROUPS:
        raise Unsupported(f"{type(weight).__name__} in 4 bits has groups of {group} columns; {GROUPS} can be read")
    zeros = None if centred or zero is None else (_by_group(zero, weight) + CENTRE).to(torch.uint8)
    stored = int4_bytes((weight.qdata.to(torch.int16) + CENTRE).to(torch.uint8), zeros)
    return PackedWeight.from_parts(
        "int4", stored, scale=_by_group(weight.scale, weight), zero=zeros, group=group, shape=tuple(weight.shape),
        dtype=weight.dtype,
    )  # fmt: skip


def _group(weight: Any) -> int:
    """Columns that share a scale; a scale of several rows or of the tensor stands for one of each row."""
    rows, columns = weight.block_size
    if rows not in (1, weight.shape[0]) or (rows != 1 and columns != weight.shape[1]):
        raise Unsupported(f"{type(weight).__name__} has scales of blocks of {rows} × {columns}")
    if columns not in (*GROUPS, weight.shape[1]):
        raise Unsupported(f"{type(weight).__name__} has groups of {columns} columns; {GROUPS}, or all, can be read")
    return int(columns)


def _by_group(parts: Tensor, weight: Any) -> Tensor:
    """Scales or zero points, float32 [N, groups]."""
    return parts.float().reshape(-1, weight.shape[1] // weight.block_size[1]).expand(weight.shape[0], -1).contiguous()


def _floats(weight: Any) -> PackedWeight:
    n, k = weight.shape
    rows, columns = weight.block_size or (n, k)
    if (rows, columns) == (128, 128):
        form, scale = "fp8_block", weight.scale.float()
    elif columns == k and rows in (1, n):
        form, scale = "fp8", weight.scale.float().reshape(-1, 1).expand(n, 1).contiguous()
    else:
        raise Unsupported(
            f"Float8Tensor has scales of blocks of {rows} × {columns}; rows, a tensor or 128 × 128 can be read"
        )
    return PackedWeight.from_parts(form, weight.qdata, scale=scale, dtype=weight.dtype)


# by the name of torchao's class
READERS: dict[str, Callable[[Any], PackedWeight]] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Float8Tensor": _floats,
}
