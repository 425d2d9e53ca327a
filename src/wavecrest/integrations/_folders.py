"""Folders of quantized models: their configuration and tensors, and the model that gets these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import CheckpointError
from wavecrest.models.xlstm.loader import weight_files
from wavecrest.ops import PackedWeight
from wavecrest.quantizer import saved
from wavecrest.quantizer.api import bytes_of, loaded
from wavecrest.quantizer.result import Quantized
from wavecrest.records import decode


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
