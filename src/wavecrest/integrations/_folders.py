"""Folders of quantized models: their configuration, tensors and packed weights, and the model that gets these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import CheckpointError, InvalidArgument, Unsupported
from wavecrest.models.xlstm.loader import weight_files
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed.formats import BLOCK, GROUPS, int4_bytes
from wavecrest.quantizer import saved
from wavecrest.quantizer.api import bytes_of, loaded
from wavecrest.quantizer.result import Quantized
from wavecrest.records import decode

# entries of a quantized layer in folders of several methods; every such layer has the first
SCALE, INPUT = "weight_scale", "input_scale"


def settings(folder: Path, method: str) -> tuple[Path, dict[str, Any]]:
    """The file config.json of a folder, and what it says of quantization.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it names another method.
    """
    file = folder / "config.json"
    text = decode.read_text(file, what="configuration", error=CheckpointError)
    try:
        config = decode.json_of(text)
        about = config.get("quantization_config") or config.get("compression_config")
        if about is None or about.get("quant_method", method) != method:
            raise CheckpointError(f"{file} has no quantization_config of {method}")
        return file, dict(about)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged.
        MissingDependency: safetensors is not installed.
    """
    module = saved.safetensors()
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with module.safe_open(path, framework="pt", device="cpu") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a handle, no mapping)
        except (OSError, module.SafetensorError) as error:
            raise CheckpointError(f"{decode.shown(path)} cannot be read: {error}") from error
    return found


def pack(
    model: nn.Module, tensors: dict[str, Tensor], entries: Sequence[str], folder: Path,
    read: Callable[[str, dict[str, Tensor], Tensor], tuple[PackedWeight, str]],
) -> dict[str, str]:  # fmt: skip
    """Replace the entries of each quantized layer by its packed weight, in place, and its fixed scale of activations.

    Args:
        model: not quantized, with the names of the folder's weights.
        tensors: the folder's.
        entries: those that a quantized layer may have, without the layer's name.
        folder: what errors name.
        read: from a layer's name, its entries and the model's weight to the packed weight and the format's name.

    Returns:
        The format of each quantized layer.

    Raises:
        CheckpointError: no layer is quantized, one is not the model's, or `read` found an `InvalidArgument`.
        Unsupported: of `read`, with the layer's name in front.
    """
    own = model.state_dict(keep_vars=True)
    formats: dict[str, str] = {}
    for layer in sorted(name.removesuffix(f".{SCALE}") for name in tensors if name.endswith(f".{SCALE}")):
        old = own.get(f"{layer}.weight")
        if old is None:
            raise CheckpointError(f"{folder} has a quantized layer {layer}, which the model has not")
        parts = {name: tensors.pop(f"{layer}.{name}") for name in entries if f"{layer}.{name}" in tensors}
        try:
            weight, form = read(layer, parts, old)
        except InvalidArgument as error:
            raise CheckpointError(f"{folder} is damaged: {layer}: {error}") from error
        except Unsupported as error:
            raise Unsupported(f"{layer}: {error}") from error
        tensors[f"{layer}.weight"], formats[layer] = weight, form
        if form.startswith("w8a8") and INPUT in parts:
            tensors[f"{layer}.{INPUT}"] = parts[INPUT].float().reshape(())
    if not formats:
        raise CheckpointError(f"{folder} has no quantized layer: no entry ends with {SCALE}")
    return formats


def integers(values: Tensor, bits: int, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """The packed weight of integers in 8 or 4 bits.

    Args:
        values: uint8 [N, K], from 0 to 255 or 15, around 128 or 8.
        bits: 8 or 4.
        scale: float32 [N or 1, groups].
        zero: uint8 [N, groups], zero points of `values`; None: 128 or 8.
        dtype: what the weight stands for.

    Raises:
        Unsupported: a group has a number of columns, or zero points, that no format has.
    """
    n, k = values.shape
    group = group_of(scale, k)
    scale = scale.expand(n, -1)
    if bits == 8:
        if zero is not None:
            raise Unsupported("8-bit weights with zero points; symmetric ones are read")
        signed = (values.to(torch.int16) - 128).to(torch.int8)
        return PackedWeight.from_parts("int8", signed, scale=scale.contiguous(), group=group, dtype=dtype)
    if group == k and k not in GROUPS:
        # a scale a row is that of each of its groups
        group = GROUPS[-1]
        wide = -(-k // group)
        scale, zero = scale.expand(n, wide), None if zero is None else zero.expand(n, wide)
    return PackedWeight.from_parts(
        "int4", int4_bytes(values, zero), scale=scale.contiguous(), zero=None if zero is None else zero.contiguous(),
        group=group, shape=(n, k), dtype=dtype,
    )  # fmt: skip


def group_of(scale: Tensor, k: int) -> int:
    """Columns that share a scale [N or 1, groups]: all of them, or a size that packed weights have."""
    if scale.shape[1] == 1:
        return k
    for group in GROUPS:
        if -(-k // group) == scale.shape[1] and k % group == 0:
            return group
    raise Unsupported(f"{scale.shape[1]} scales for {k} columns; groups of {', '.join(map(str, GROUPS))} can be read")


def floats(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    """The packed weight of 8-bit floats [N, K] with a scale a tensor, row or block of 128 × 128.

    Raises:
        Unsupported: scales are of other parts.
    """
    n, k = weight.shape
    if scale.ndim == 2 and tuple(scale.shape) == (-(-n // BLOCK), -(-k // BLOCK)) and scale.shape[1] > 1:
        return PackedWeight.from_parts("fp8_block", weight, scale=scale.contiguous(), dtype=dtype)
    if scale.numel() not in (1, n):
        raise Unsupported(
            f"scales {list(scale.shape)} of {[n, k]}; one a tensor, row or block of 128 × 128 can be read"
        )
    return PackedWeight.from_parts("fp8", weight, scale=scale.reshape(-1, 1).expand(n, 1).contiguous(), dtype=dtype)


def put(
    model: nn.Module, tensors: dict[str, Tensor], formats: dict[str, str], folder: Path,
    device: torch.device | str | None,
) -> Quantized:  # fmt: skip
    """A model with a folder's tensors, quantized layers and experts packed; other weights get the model's dtypes.

    Raises:
        CheckpointError: names or shapes are not the model's, which is as it was.
    """
    own = model.state_dict(keep_vars=True)
    for name, value in own.items():
        held = tensors.get(name)
        if held is not None and not isinstance(held, PackedWeight) and held.is_floating_point():
            tensors[name] = held.to(value.dtype)
    # tied weights are in a file once
    for name, value in own.items():
        other = next((one for one, held in own.items() if held is value and one in tensors), None)
        if name not in tensors and other is not None:
            tensors[name] = tensors[other]
    before = bytes_of(model)
    changes = saved.place(model, saved.Saved(tensors, formats), str(folder), device)
    return loaded(model, formats, changes, before)
