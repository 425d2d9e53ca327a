"""Layers of a model in formats that were chosen before, by path; and the module of its key-value caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.ops import PackedWeight
from wavecrest.quantizer import layers
from wavecrest.quantizer.changes import Changes


def place_formats(model: nn.Module, formats: Mapping[str, str], group: int | None = None) -> Changes:
    """Quantize the layers at the paths, in place; the same weights give the same bits each time.

    Args:
        model: not quantized.
        formats: the format of each layer by path; a shared layer at each of its paths, or at its first.
        group: as `wavecrest.quantize` takes it.

    Raises:
        InvalidArgument: a path is no linear layer that can be quantized, a format is unknown or does not fit a weight.
    """
    layers.schemes(tuple(dict.fromkeys(formats.values())))
    # those that are kept by default too, if they were asked for
    found = layers.find(model, ["!*"])
    sites = {path: site for site in found.sites for path in site.paths}
    for path in formats:
        if path not in sites:
            raise InvalidArgument(f"quantize: {path}: {found.kept.get(path, 'the model has no such linear layer')}")
    changes, shared = Changes(), dict[tuple[int, str], PackedWeight]()
    for site in found.sites:
        name = formats.get(site.path)
        if name is None:
            continue
        key = (id(site.parameter), name)
        if key not in shared:
            packed: Any = nn.Parameter(site.packed(name, group), requires_grad=False)
            shared[key] = packed
        made = site.make(name, shared[key])
        for path in site.paths:
            changes.module(model, path, made)
    return changes


def cache_module() -> Any:
    """`wavecrest.quantizer.kv_cache`, whose classes are derived from transformers' own.

    Raises:
        MissingDependency: transformers is not installed.
    """
    try:
        from wavecrest.quantizer import kv_cache
    except ImportError as error:
        raise MissingDependency("transformers", "a quantized key-value cache", "pip install transformers") from error
    return kv_cache
