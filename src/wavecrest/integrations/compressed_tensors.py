"""Folders of models that llm-compressor quantized (compressed-tensors), value by value into wavecrest's layers.

The layouts are those that compressed-tensors writes for `pack-quantized` (integers of 8 and 4 bits in int32 words),
`mxfp4-pack-quantized`, `int-quantized`, `naive-quantized` and `float-quantized`; the package itself is not imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import CheckpointError, InvalidArgument, Unsupported
from wavecrest.integrations import _folders
from wavecrest.integrations._folders import INPUT, SCALE
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed import mxfp4_of_pairs
from wavecrest.ops.packed.formats import BLOCK
from wavecrest.quantizer.result import Quantized

METHOD = "compressed-tensors"
# entries of a quantized layer
PACKED, ZERO, SHAPE, ORDER = "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"
# the last says nothing where activations are symmetric; the bias is left out
ENTRIES = ("weight", PACKED, SCALE, ZERO, SHAPE, ORDER, INPUT, "input_zero_point")


def load(model: nn.Module, folder: str | Path, *, device: torch.device | str | None = None) -> Quantized:
    """Load a folder into a model of its architecture: quantized layers as they are stored, all other weights too.

    Weights of 8 and 4 bits with a scale a tensor, row or group of 32, 64 or 128 columns, fp8 also with one for
    128 × 128, and MXFP4; activations as they are, beside weights of 8 bits also in 8 bits with a scale a row (beside
    128 × 128: for 128 columns) worked out at the call, or with a fixed one.

    Args:
        model: not quantized, with the names of the folder's weights, maybe on the meta device.
        folder: with config.json and model.safetensors, or its parts and their index.
        device: where the weights go; None: where the model's are, the CPU for those on the meta device.

    Returns:
        The model with its layers' formats; `restore()` puts its own weights back.

    Raises:
        CheckpointError: the folder is incomplete, damaged or of another model, which is as it was.
        Unsupported: it has layers in a form that wavecrest has no layer for; the message names one.
        MissingDependency: safetensors is not installed.
    """
    path = Path(folder)
    groups = _config(path)
    tensors = _folders.tensors_of(path)

    def read(layer: str, parts: dict[str, Tensor], old: Tensor) -> tuple[PackedWeight, str]:
        return _layer(parts, _scheme(layer, groups), old)

    formats = _folders.pack(model, tensors, ENTRIES, path, read)
    return _folders.put(model, tensors, formats, path, device)


def _config(folder: Path) -> list[dict[str, Any]]:
    """The groups of layers that a folder's configuration has."""
    file, about = _folders.settings(folder, METHOD)
    try:
        sparsity = (about.get("sparsity_config") or {}).get("format", "dense")
        cache = about.get("kv_cache_scheme")
        groups = [dict(group) for group in about["config_groups"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if sparsity != "dense":
        raise Unsupported(f"{folder} has weights in the sparse form {sparsity}; dense ones are read")
    if cache is not None:
        raise Unsupported(f"{folder} has scales of a quantized key-value cache (kv_cache_scheme), which no layer takes")
    return groups


def _scheme(layer: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The group that a layer is of: by its name, else by its class.

    Raises:
        Unsupported: it is of none.
    """

    def fits(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target.removeprefix("re:"), layer) is not None
        return layer == target or layer.endswith(f".{target}")

    by_name = [group for group in groups if any(fits(str(target)) for target in group.get("targets") or ())]
    by_class = [group for group in groups if "Linear" in (group.get("targets") or ())]
    for group in (*by_name, *by_class):
        return group
    raise Unsupported("no group of the configuration has it as a target")


def _layer(parts: dict[str, Tensor], scheme: dict[str, Any], old: Tensor) -> tuple[PackedWeight, str]:
    """The packed weight of a layer, and its format's name."""
    about, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    if scheme.get("output_activations") is not None:
        raise Unsupported("its outputs are quantized")
    bits, kind = about.get("num_bits", 0), about.get("type", "int")
    if (bits, kind) not in ((8, "int"), (4, "int"), (8, "float"), (4, "float")):
        raise Unsupported(f"weights of {bits} bits ({kind}); int and float of 8 and 4 bits are read")
    if (bits, kind) == (4, "float"):
        weight = _mxfp4(parts, old)
    else:
        weight = _floats(parts, old) if kind == "float" else _integers(parts, int(bits), old)
    if inputs is None:
        return weight, {(8, "float"): "fp8", (4, "float"): "mxfp4"}.get((bits, kind), f"int{bits}")
    return weight, _with_activations(parts, weight, about, dict(inputs))


def _with_activations(
    parts: dict[str, Tensor], weight: PackedWeight, about: dict[str, Any], inputs: dict[str, Any]
) -> str:
    """The format of a layer whose activations are quantized too.

    Raises:
        Unsupported: they are in a form that `QuantizedLinear` does not have.
    """
    same = (inputs.get("num_bits"), inputs.get("type", "int")) == (about.get("num_bits"), about.get("type", "int"))
    if not same or inputs.get("num_bits") != 8 or not inputs.get("symmetric", True):
        raise Unsupported(f"activations of {inputs.get('num_bits')} bits beside these weights, or with zero points")
    strategy, dynamic = inputs.get("strategy") or "tensor", inputs.get("dynamic") is True
    if weight.format == "fp8_block" and dynamic and (strategy, inputs.get("group_size")) == ("group", BLOCK):
        return "w8a8-fp8"
    if weight.scale is None or weight.format not in ("int8", "fp8") or weight.scale.shape[1] != 1:
        raise Unsupported(
            "quantized activations with weights in groups or blocks; those with a scale a row are read, and fp8 in "
            f"blocks of {BLOCK} × {BLOCK} with activations in groups of {BLOCK}"
        )
    if not (dynamic and strategy == "token") and not (not dynamic and strategy == "tensor"):
        raise Unsupported(f"{'dynamic' if dynamic else 'fixed'} scales of activations by {strategy}")
    if not dynamic and (INPUT not in parts or parts[INPUT].numel() != 1):
        raise InvalidArgument(f"there is no {INPUT} of one value")
    return "w8a8-fp8" if weight.format == "fp8" else "w8a8-int8"


def _integers(parts: dict[str, Tensor], bits: int, old: Tensor) -> PackedWeight:
    if PACKED in parts:
        if SHAPE not in parts or parts[SHAPE].numel() != 2:
            raise InvalidArgument(f"there is no {SHAPE} of two values")
        n, k = (int(size) for size in parts[SHAPE].tolist())
        values = _unpacked(parts[PACKED], bits, n, k)
    else:
        values = parts["weight"] if "weight" in parts else torch.empty(0)
        if values.dtype != torch.int8 or values.ndim != 2 or bits != 8:
            raise InvalidArgument(f"its weight is {values.dtype} {list(values.shape)}, not int8 [N, K]")
        n, k = values.shape
        # as pack-quantized has them, from 0
        values = (values.to(torch.int16) + 128).to(torch.uint8)
    scale = parts[SCALE].float().reshape(-1, 1) if parts[SCALE].ndim < 2 else parts[SCALE].float()
    _check_order(parts, k, _folders.group_of(scale, k))
    return _folders.integers(values, bits, scale, _zero(parts, bits, n, scale.shape[1]), old.dtype)


def _unpacked(words: Tensor, bits: int, n: int, k: int) -> Tensor:
    """The values uint8 [N, K], from 0, of int32 words [N, ceil(K · bits / 32)]; the first value is in the low bits."""
    each = 32 // bits
    if words.dtype != torch.int32 or tuple(words.shape) != (n, -(-k // each)):
        raise InvalidArgument(f"{bits}-bit values of {[n, k]} are int32 {[n, -(-k // each)]}, not {list(words.shape)}")
    shifts = torch.arange(each, dtype=torch.int32) * bits
    values: Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).reshape(n, -1)[:, :k]


def _zero(parts: dict[str, Tensor], bits: int, n: int, groups: int) -> Tensor | None:
    """Zero points uint8 [N, groups], from 0; None: all are those of symmetric values."""
    given = parts.get(ZERO)
    if given is None:
        return None
    if given.dtype == torch.int32:
        # rows are packed, not columns
        values = _unpacked(given.mT.contiguous(), bits, groups, n).mT
    else:
        values = (given.reshape(-1, groups).expand(n, -1).to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    return None if bool((values == 2 ** (bits - 1)).all()) else values


def _check_order(parts: dict[str, Tensor], k: int, group: int) -> None:
    order = parts.get(ORDER)
    if order is not None and not torch.equal(order.long().cpu(), torch.arange(k) // group):
        raise Unsupported(f"columns in an order of their own ({ORDER}); in theirs they can be read")


def _mxfp4(parts: dict[str, Tensor], old: Tensor) -> PackedWeight:
    scale = parts[SCALE]
    if scale.dtype not in (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)):
        raise Unsupported(
            f"4-bit floats with scales of {scale.dtype}; MXFP4 has bytes, 2^(byte − 127), and can be read"
        )
    return mxfp4_of_pairs(parts[PACKED] if PACKED in parts else parts.get("weight", torch.empty(0)), scale, old.dtype)


def _floats(parts: dict[str, Tensor], old: Tensor) -> PackedWeight:
    weight, scale = parts.get("weight"), parts[SCALE].float()
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        found = "missing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise InvalidArgument(f"its weight is {found}, not float8_e4m3fn [N, K]")
    if ZERO in parts and bool(parts[ZERO].float().any()):
        raise Unsupported("8-bit floats with zero points")
    return _folders.floats(weight, scale, old.dtype)
