"""Folders of gpt-oss in its own format: experts in MXFP4, value by value into `wavecrest.nn.Experts`.

The layout is that of the published checkpoints, which transformers reads as its quantization method "mxfp4".
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from wavecrest.errors import CheckpointError, InvalidArgument
from wavecrest.integrations import _folders
from wavecrest.nn.experts import WEIGHTS, mxfp4_parts
from wavecrest.quantizer.result import Quantized

METHOD = "mxfp4"
# what is behind the name of a weight
BLOCKS, SCALES = "_blocks", "_scales"


def load(model: nn.Module, folder: str | Path, *, device: torch.device | str | None = None) -> Quantized:
    """Load a folder of gpt-oss into transformers' model: experts in 4 bits as they are stored, all other weights too.

    Args:
        model: not quantized, with the names of the folder's weights, maybe on the meta device.
        folder: with config.json and model.safetensors, or its parts and their index.
        device: where the weights go; None: where the model's are, the CPU for those on the meta device.

    Returns:
        The model, whose experts are `wavecrest.nn.Experts`; `restore()` puts its own back.

    Raises:
        CheckpointError: the folder is incomplete, damaged or of another model, which is as it was.
        Unsupported: the model's experts compute something else than gated MLPs; the message says what.
        MissingDependency: safetensors is not installed.
    """
    path = Path(folder)
    _folders.settings(path, METHOD)
    tensors = _folders.tensors_of(path)
    formats: dict[str, str] = {}
    ends = tuple(f".{weight}{BLOCKS}" for weight in WEIGHTS)
    for name in sorted(name.removesuffix(BLOCKS) for name in tensors if name.endswith(ends)):
        blocks, scales = tensors.pop(f"{name}{BLOCKS}"), tensors.pop(f"{name}{SCALES}", None)
        if scales is None:
            raise CheckpointError(f"{path} is damaged: there is no {name}{SCALES}")
        try:
            tensors[name], tensors[f"{name}_scale"] = mxfp4_parts(blocks, scales)
        except InvalidArgument as error:
            raise CheckpointError(f"{path} is damaged: {name}: {error}") from error
        formats[name.rpartition(".")[0]] = "mxfp4"
    if not formats:
        raise CheckpointError(f"{path} has no experts in MXFP4: no entry ends with {WEIGHTS[0]}{BLOCKS}")
    return _folders.put(model, tensors, formats, path, device)
