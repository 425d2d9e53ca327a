"""Layers of models that transformers loaded in fp8 with scales of 128 × 128 (`quant_method` "fp8"), value by value.

These are `FP8Linear` of transformers 5.24. The class is known by its name, so that transformers is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.ops import PackedWeight
from wavecrest.ops.common.layout import ceil_div
from wavecrest.ops.packed.formats import BLOCK
from wavecrest.quantizer.api import bytes_of, loaded
from wavecrest.quantizer.changes import Changes
from wavecrest.quantizer.layers import Site
from wavecrest.quantizer.result import Quantized

NAME, MODULE = "FP8Linear", "transformers"
# activations are in 8 bits too, with a scale for 128 columns worked out at the call
FORMAT = "w8a8-fp8"


def packed(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """The packed weight of an `FP8Linear`: fp8_block, or fp8 with a scale a row where K is one block of 128.

    Args:
        layer: with weight [N, K] in float8_e4m3fn and weight_scale_inv [ceil(N / 128), ceil(K / 128)] in float32.
        dtype: what the weight stands for.

    Raises:
        InvalidArgument: this is no such layer.
        Unsupported: it is, but has scales of other parts, counts or types, or one fixed for its activations.
    """
    if not _is_ours(layer):
        raise InvalidArgument(f"a {type(layer).__name__} is no {NAME} of {MODULE}")
    parts: Any = layer
    weight, scale, block = parts.weight.detach(), parts.weight_scale_inv.detach(), parts.block_size
    if weight.dtype != torch.float8_e4m3fn:
        raise Unsupported(f"its weight is {weight.dtype}; float8_e4m3fn can be read")
    if block is None or tuple(block) != (BLOCK, BLOCK):
        what = "for all of it" if block is None else f"of blocks of {' × '.join(map(str, block))}"
        raise Unsupported(f"its weight has a scale {what}; one for {BLOCK} × {BLOCK} can be read")
    if scale.dtype != torch.float32:
        raise Unsupported(f"its scales are {scale.dtype}, and so would be those of activations; float32 can be read")
    if parts.activation_scale is not None:
        raise Unsupported("it has a fixed scale of activations; those worked out at the call can be read")
    wanted = [ceil_div(size, BLOCK) for size in weight.shape]
    if list(scale.shape) != wanted:
        raise Unsupported(f"its weight {list(weight.shape)} has scales {list(scale.shape)}, not {wanted}")
    if scale.shape[1] > 1:
        return PackedWeight.from_parts("fp8_block", weight, scale=scale, dtype=dtype)
    # a row of activations is one group then
    rows = scale.repeat_interleave(BLOCK, 0)[: len(weight)].contiguous()
    return PackedWeight.from_parts("fp8", weight, scale=rows, dtype=dtype)


def convert(model: nn.Module) -> Quantized:
    """Replace, in place, each `FP8Linear` by `wavecrest.nn.QuantizedLinear` with the same values.

    Layers that cannot be replaced stay, and `report.layers` says why. Experts (`FP8Experts`) are not looked at.

    Returns:
        The model with its layers' formats; `restore()` puts transformers' layers back.

    Raises:
        InvalidArgument: the model has no such layer, or is one.
    """
    if _is_ours(model):
        raise InvalidArgument(f"finegrained_fp8.convert takes a model with layers in it, not an {NAME} alone")
    found = [(path, one) for path, one in model.named_modules(remove_duplicate=False) if _is_ours(one)]
    if not found:
        raise InvalidArgument(f"finegrained_fp8.convert: the model has no {NAME} of {MODULE}")
    before, changes, formats = bytes_of(model), Changes(), {}
    left: dict[str, str] = {}
    made: dict[int, nn.Module] = {}
    # what layers compute with, as far as the model says
    wide = (one.dtype for one in model.parameters() if one.dtype in (torch.bfloat16, torch.float16))
    dtype = next(wide, torch.bfloat16)
    for path, layer in found:
        try:
            if id(layer) not in made:
                made[id(layer)] = Site((path,), layer).make(FORMAT, packed(layer, dtype))
        except (InvalidArgument, Unsupported) as error:
            left[path] = str(error)
            continue
        changes.module(model, path, made[id(layer)])
        formats[path] = FORMAT
    return loaded(model, formats, changes, before, left=left)


def _is_ours(layer: nn.Module) -> bool:
    kind = type(layer)
    return kind.__name__ == NAME and kind.__module__.partition(".")[0] == MODULE
