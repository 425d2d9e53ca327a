"""Folders of models that AMD Quark quantized and exported for transformers and vLLM, value by value.

The layouts are those of its safetensors export with `weight_format` "real_quantized"; the package is not imported.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import CheckpointError, InvalidArgument, Unsupported
from wavecrest.integrations import _folders
from wavecrest.integrations._folders import INPUT, SCALE
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed import mxfp4_of_pairs
from wavecrest.ops.packed.formats import BLOCK, MX_GROUP
from wavecrest.quantizer.result import Quantized

METHOD = "quark"
# entries of a quantized layer
WEIGHT, ZERO, INPUT_ZERO = "weight", "weight_zero_point", "input_zero_point"
# of a layer whose output is quantized, as keys and values of a cache are, and of one that rotates its input
OUTPUTS, ROTATION, BIAS = ("output_scale", "output_zero_point"), "input_rotation", "bias_scale"
# the columns whose values are in the nibbles of an int32 word, lowest first
ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}
# of Quark's name: bits, and where values begin
INTEGERS = {"int8": (8, -128), "uint8": (8, 0), "int4": (4, -8), "uint4": (4, 0)}
FLOAT8 = "fp8_e4m3"
READ = f"int8, uint8, int4, uint4, {FLOAT8} and MXFP4 (fp4 in groups of {MX_GROUP} with scales in e8m0) are read"


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    weights_only: bool = False,
) -> Quantized:
    """Load a folder into a model of its architecture: quantized layers as they are stored, all other weights too.

    Weights of 8 bits with a scale a tensor or row (int8, fp8), fp8 with one for 128 × 128, integers of 8 and 4 bits
    with one for 32, 64 or 128 columns, MXFP4; activations as they are, beside weights of 8 bits also in 8 bits with a
    scale a row worked out at the call, or with a fixed one.

    Args:
        model: not quantized, with the names of the folder's weights, maybe on the meta device.
        folder: with config.json and model.safetensors, or its parts and their index.
        device: where the weights go; None: where the model's are, the CPU for those on the meta device.
        weights_only: activations and key-value caches that the folder quantizes keep the model's dtype.

    Returns:
        The model with its layers' formats; `restore()` puts its own weights back.

    Raises:
        CheckpointError: the folder is incomplete, damaged or of another model, which is as it was.
        Unsupported: it has layers in a form that wavecrest has no layer for; the message names one.
        MissingDependency: safetensors is not installed.
    """
    path = Path(folder)
    about = _config(path)
    tensors = _folders.tensors_of(path)
    _check_beside(tensors, weights_only)

    def read(layer: str, parts: dict[str, Tensor], old: Tensor) -> tuple[PackedWeight, str]:
        scheme = _scheme(layer, about)
        weight, form = _weight(parts, scheme, about, old)
        return weight, form if weights_only else _with_activations(parts, weight, form, scheme)

    formats = _folders.pack(model, tensors, (WEIGHT, SCALE, ZERO, INPUT, INPUT_ZERO), path, read)
    return _folders.put(model, tensors, formats, path, device)


def _config(folder: Path) -> dict[str, Any]:
    """The schemes of a folder's configuration, by layer, by class and for all layers, and how it was exported."""
    file, about = _folders.settings(folder, METHOD)
    names = ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "export")
    for name in names:
        about[name] = about.get(name) or {}
        if not isinstance(about[name], dict):
            raise CheckpointError(f"{file} is damaged: {name} is a {type(about[name]).__name__}")
    form = about["export"].get("weight_format", "real_quantized")
    if form != "real_quantized":
        raise Unsupported(f"{folder} has weights that are not stored in fewer bits (weight_format {form})")
    return about


def _check_beside(tensors: dict[str, Tensor], weights_only: bool) -> None:
    """Refuse what no layer here does, or drop it."""
    for name in list(tensors):
        layer, _, kind = name.rpartition(".")
        if kind == ROTATION:
            raise Unsupported(f"{layer}: it rotates its input ({ROTATION})")
        if kind == BIAS:
            raise Unsupported(f"{layer}: its bias is quantized")
        if kind in OUTPUTS and weights_only:
            del tensors[name]
        elif kind in OUTPUTS:
            raise Unsupported(
                f"{layer}: its outputs are quantized, as for a key-value cache; weights_only=True leaves them alone"
            )


def _order(about: dict[str, Any]) -> tuple[int, ...]:
    method = about["export"].get("pack_method", "reorder")
    if method not in ORDERS:
        raise Unsupported(f"values packed as {method!r}; {' and '.join(ORDERS)} can be read")
    return ORDERS[method]


def _scheme(layer: str, about: dict[str, Any]) -> dict[str, Any]:
    """How a layer is quantized: by the first pattern that fits its name, by its class, or as all are."""
    fitting = [one for pattern, one in about["layer_quant_config"].items() if fnmatchcase(layer, pattern)]
    every = about["layer_type_quant_config"].get("Linear", about["global_quant_config"])
    scheme = fitting[0] if fitting else every
    if not isinstance(scheme, dict):
        raise InvalidArgument("the configuration of the layer is no table")
    return scheme


def _spec(scheme: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of a tensor of a layer, None if it is not quantized."""
    spec = scheme.get(name)
    if isinstance(spec, list):
        if len(spec) > 1:
            raise Unsupported(f"{name} quantized in {len(spec)} stages")
        spec = spec[0] if spec else None
    if spec is not None and not isinstance(spec, dict):
        raise InvalidArgument(f"{name} of its configuration is a {type(spec).__name__}")
    return spec


def _weight(
    parts: dict[str, Tensor], scheme: dict[str, Any], about: dict[str, Any], old: Tensor
) -> tuple[PackedWeight, str]:
    """The packed weight of a layer, and its format's name."""
    spec = _spec(scheme, "weight")
    if spec is None:
        raise Unsupported("the configuration does not say how its weight is quantized")
    if WEIGHT not in parts:
        raise InvalidArgument("there is no weight")
    kind, by = spec.get("dtype"), spec.get("qscheme")
    if kind == "fp4" and (by, spec.get("group_size"), spec.get("scale_format")) == ("per_group", MX_GROUP, "e8m0"):
        return mxfp4_of_pairs(parts[WEIGHT], parts[SCALE], old.dtype), "mxfp4"
    if kind == FLOAT8 and by in ("per_tensor", "per_channel", "per_block"):
        return _float(parts, spec, old), "fp8"
    if kind in INTEGERS and by in ("per_tensor", "per_channel", "per_group"):
        bits, first = INTEGERS[str(kind)]
        order = _order(about) if bits == 4 else ()
        return _integer(parts, spec, bits, first, order, old), f"int{bits}"
    raise Unsupported(f"weights of {kind}, {by}; {READ}")


def _float(parts: dict[str, Tensor], spec: dict[str, Any], old: Tensor) -> PackedWeight:
    weight, scale = parts[WEIGHT], parts[SCALE].float()
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        raise InvalidArgument(f"its weight is {weight.dtype} {list(weight.shape)}, not float8_e4m3fn [N, K]")
    by, (n, k) = spec["qscheme"], weight.shape
    if by == "per_block" and list(spec.get("block_size") or ()) != [BLOCK, BLOCK]:
        raise Unsupported(f"8-bit floats in blocks of {spec.get('block_size')}; those of {BLOCK} × {BLOCK} can be read")
    if by == "per_block" and parts[SCALE].dtype == torch.uint8:
        raise Unsupported("scales of blocks in e8m0; those in floating point can be read")
    _check_axis(spec, by)
    wanted = {"per_tensor": (1,), "per_channel": (n,), "per_block": (-(-n // BLOCK), -(-k // BLOCK))}[by]
    if by == "per_block" and k <= BLOCK:
        # as of rows, each block's scale for its own
        scale, wanted = scale.repeat_interleave(BLOCK, 0)[:n].reshape(-1), (n,)
    elif by != "per_block":
        scale = scale.reshape(-1)
    if tuple(scale.shape) != wanted:
        raise InvalidArgument(f"its scales are {list(parts[SCALE].shape)}, of {by} {[n, k]} they are {list(wanted)}")
    return _folders.floats(weight, scale, old.dtype)


def _check_axis(spec: dict[str, Any], by: str) -> None:
    # rows of a linear layer
    if by == "per_channel" and spec.get("ch_axis") not in (0, None):
        raise Unsupported(f"a scale for each column (ch_axis {spec['ch_axis']}); those of rows can be read")


def _integer(
    parts: dict[str, Tensor], spec: dict[str, Any], bits: int, first: int, order: tuple[int, ...], old: Tensor
) -> PackedWeight:
    """Integers; of groups the weight, its scales and its zero points are transposed, and words lie along rows."""
    by, scale = spec["qscheme"], parts[SCALE].float()
    _check_axis(spec, by)
    grouped = by == "per_group"
    if grouped and scale.ndim != 2:
        raise InvalidArgument(f"its scales are {list(scale.shape)}, of groups they are [groups, N]")
    # [groups, N]; otherwise one or N
    scale = scale.mT if grouped else scale.reshape(-1, 1)
    values = _values(parts[WEIGHT], bits, first, order)
    if values.ndim != 2:
        raise InvalidArgument(f"its weight is {list(parts[WEIGHT].shape)}, not of two dimensions")
    if grouped:
        # rows were padded to whole words
        values = values.mT[: scale.shape[0]]
    elif old.ndim == 2:
        values = values[:, : old.shape[1]]
    if scale.shape[0] not in (1, values.shape[0]):
        raise InvalidArgument(f"it has {scale.shape[0]} scales for {values.shape[0]} rows")
    zero = _zeros(parts.get(ZERO), bits, first, order, grouped, tuple(scale.shape))
    if zero is None and first == 0:
        raise Unsupported(f"{spec['dtype']} weights without zero points")
    middle = 2 ** (bits - 1)
    if zero is not None and bool((zero == middle).all()):
        zero = None
    return _folders.integers(
        values.contiguous(), bits, scale.contiguous(), None if zero is None else zero.expand(values.shape[0], -1),
        old.dtype,
    )  # fmt: skip


def _values(stored: Tensor, bits: int, first: int, order: tuple[int, ...]) -> Tensor:
    """Values uint8, from 0; of 4 bits from int32 words along the last dimension."""
    if bits == 8:
        if stored.dtype not in (torch.int8, torch.uint8):
            raise InvalidArgument(f"values of 8 bits are int8 or uint8, not {stored.dtype}")
        return (stored.to(torch.int16) - first).to(torch.uint8)
    if stored.dtype != torch.int32:
        raise InvalidArgument(f"values of 4 bits are int32 words, not {stored.dtype}")
    nibbles = (stored[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    # nibble i of a word is of column order[i]
    values = torch.empty_like(nibbles)
    values[..., list(order)] = nibbles
    # two's complement, less its least value
    return (values.flatten(-2) ^ -first).to(torch.uint8)


def _zeros(
    given: Tensor | None, bits: int, first: int, order: tuple[int, ...], grouped: bool, shape: tuple[int, ...]
) -> Tensor | None:
    """Zero points uint8 [N or 1, groups], from 0."""
    if given is None:
        return None
    if bits == 4 and given.ndim:
        values = _values(given, bits, first, order)
        # words were filled up
        values = values[..., : shape[0]]
    else:
        # of a tensor it is a number by itself
        values = (given.to(torch.int16) - first).to(torch.uint8)
    values = values.mT if grouped and values.ndim == 2 else values.reshape(-1, 1)
    if tuple(values.shape) != shape:
        raise InvalidArgument(f"its zero points are {list(given.shape)}, for scales {list(shape)}")
    return values


def _with_activations(parts: dict[str, Tensor], weight: PackedWeight, form: str, scheme: dict[str, Any]) -> str:
    """The format of a layer with its activations.

    Raises:
        Unsupported: they are in a form that `QuantizedLinear` does not have.
    """
    spec = _spec(scheme, "input_tensors")
    if spec is None:
        return form
    hint = "weights_only=True leaves activations as they are"
    same = {"int8": "int8", "fp8": FLOAT8}.get(form)
    if spec.get("dtype") != same or spec.get("symmetric") is False:
        raise Unsupported(f"activations of {spec.get('dtype')} beside weights in {form}, or with zero points; {hint}")
    if weight.format not in ("int8", "fp8") or weight.scale is None or weight.scale.shape[1] != 1:
        raise Unsupported(f"quantized activations with weights in groups or blocks; {hint}")
    dynamic, by = spec.get("is_dynamic") is True, spec.get("qscheme")
    # with scales worked out at the call, Quark's channels are tokens
    if (dynamic, by) not in ((True, "per_channel"), (False, "per_tensor")):
        raise Unsupported(f"{'dynamic' if dynamic else 'fixed'} scales of activations, {by}; {hint}")
    if not dynamic and (INPUT not in parts or parts[INPUT].numel() != 1):
        raise InvalidArgument(f"there is no {INPUT} of one value")
    if not dynamic and INPUT_ZERO in parts and bool(parts[INPUT_ZERO].any()):
        raise Unsupported(f"activations with zero points; {hint}")
    return f"w8a8-{form}"
