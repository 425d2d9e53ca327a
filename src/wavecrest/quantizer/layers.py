"""The linear layers of a model that can be quantized, the formats, and the layer that takes a layer's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.nn import Linear, QuantizedLinear
from wavecrest.nn.hooks import plain
from wavecrest.nn.linear import LinearOn, is_conv1d
from wavecrest.nn.quantized_linear import pack_native
from wavecrest.ops import PackedWeight
from wavecrest.ops.common.quantized import LARGEST
from wavecrest.ops.packed.formats import DTYPES

# layers that keep their precision unless a pattern with "!" says otherwise: logits, embeddings, scores of experts
KEEP = ("*lm_head", "*embed*", "*router*", "*gate")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format of a layer: of its weight, and whether activations are in 8 bits too.

    Attributes:
        weight: a format of `wavecrest.ops.pack`.
        activations: rounded to 8 bits at the call.
        max_error: largest relative error of a layer's output, where the caller names no other.
    """

    weight: str
    activations: bool
    max_error: float


# limits are about three times the error of normally distributed weights and activations: scale / √12 for integers with
# a peak of 4 (row) or 2.7 (128 columns) standard deviations, 2⁻⁴ / √12 of the value for e4m3, √2 for two factors
SCHEMES: dict[str, Scheme] = {
    "int8": Scheme("int8", False, 0.03),
    "fp8": Scheme("fp8", False, 0.08),
    "int4": Scheme("int4", False, 0.3),
    "mxfp4": Scheme("mxfp4", False, 0.35),
    "w8a8-int8": Scheme("int8", True, 0.04),
    "w8a8-fp8": Scheme("fp8", True, 0.11),
}


def schemes(format: str | Sequence[str]) -> tuple[str, ...]:
    """The names of formats, in order of preference.

    Raises:
        InvalidArgument: one is unknown or there twice, or there is no name.
    """
    names = (format,) if isinstance(format, str) else tuple(format)
    for name in names:
        if name not in SCHEMES:
            raise InvalidArgument(f"quantize: format is {', '.join(SCHEMES)}, or several of them, not {name!r}")
    if not names or len(set(names)) != len(names):
        raise InvalidArgument(f"quantize: format names each format once, at least one, not {list(names)}")
    return names


@dataclass(slots=True)
class Site:
    """A linear layer that can be quantized.

    Attributes:
        paths: all places of the module in the model.
        module: the layer.
        smoothed: float32 [K], powers of two by which the weight's columns are multiplied, or None.
        made: the quantized layers, by format.
    """

    paths: tuple[str, ...]
    module: nn.Module
    smoothed: Tensor | None = None
    made: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The first place."""
        return self.paths[0]

    @property
    def input_dim(self) -> int:
        """The dimension of the stored weight that is summed over: 0 in transformers' Conv1D."""
        return 0 if is_conv1d(self.module) else 1

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored."""
        return self.module.get_parameter("weight")

    def stored(self) -> Tensor:
        """The weight as it is stored, its columns multiplied."""
        weight = self.parameter.detach()
        if self.smoothed is None:
            return weight
        factors = self.smoothed.to(weight.dtype)
        return weight * (factors if self.input_dim else factors[:, None])

    def weight(self) -> Tensor:
        """The weight [N, K], its columns multiplied."""
        stored = self.stored()
        return stored if self.input_dim else stored.mT

    @property
    def bytes_(self) -> int:
        """Bytes of the weight."""
        return self.parameter.numel() * self.parameter.element_size()

    def packed(self, name: str, group: int | None) -> PackedWeight:
        """The weight in a format; `group` is for the formats that have groups.

        Raises:
            InvalidArgument: it cannot be packed; the message names the layer.
        """
        scheme = SCHEMES[name]
        takes_group = not scheme.activations and scheme.weight in ("int8", "int4")
        try:
            return pack_native(self.weight(), scheme.weight, group if takes_group else None)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.path}: {error}; to leave the layer as it is: keep=[{self.path!r}]") from error

    def make(self, name: str, weight: PackedWeight, peak: float | None = None) -> nn.Module:
        """The layer in a format, with the bias of this one.

        Args:
            name: of the format.
            weight: packed in it; a parameter is shared.
            peak: largest magnitude of x in calibration, for a fixed scale of the activations; None: one a row.
        """
        module: Any = self.module
        activation = getattr(module, "activation", None)
        made: nn.Module
        if not SCHEMES[name].activations:
            made = Linear.from_weight(weight, module.bias, activation)
        else:
            scale = None if peak is None else self.fixed_scale(weight, peak)
            made = QuantizedLinear(weight, module.bias, activation, scale)
        return made.train(module.training)

    @staticmethod
    def fixed_scale(weight: PackedWeight, peak: float) -> Tensor:
        """The scale of activations whose largest magnitude is `peak`, in the type of the weight: float32 []."""
        scale = max(peak / LARGEST[weight.stored.dtype], 2.0**-126) if peak else 1.0
        return torch.tensor(scale, dtype=torch.float32, device=weight.device)


@dataclass(slots=True)
class Found:
    """The linear layers of a model: those that can be quantized, and why each of the others is kept, by path."""

    sites: list[Site]
    kept: dict[str, str]

    def leave(self, readers: dict[str, str]) -> None:
        """Leave out layers whose weight is also read by an operation outside of them, as that takes no packed weight.

        Raises:
            InvalidArgument: no layer is left.
        """
        for path, name in readers.items():
            self.kept[path] = f"{name} reads its weight outside of the layer"
        self.sites[:] = [site for site in self.sites if site.path not in readers]
        self.check()

    def check(self) -> None:
        """Raise InvalidArgument if there is no layer to quantize."""
        if not self.sites:
            why = "; ".join(f"{path}: {reason}" for path, reason in list(self.kept.items())[:5])
            raise InvalidArgument(
                f"quantize: the model has no linear layer to quantize ({why or 'it has no linear layer'})"
            )


def find(model: nn.Module, keep: Iterable[str]) -> Found:
    """Look for linear layers; a shared module is one site.

    Raises:
        InvalidArgument: a pattern of `keep` is of no layer, or there is no layer to quantize.
    """
    places: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    fast_paths: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.TransformerEncoderLayer):
            fast_paths |= {id(child) for child in module.modules()}
        if isinstance(module, nn.Linear | Linear | QuantizedLinear) or is_conv1d(module):
            places.setdefault(id(module), []).append(path)
            modules[id(module)] = module
    if id(model) in modules:
        raise InvalidArgument(
            "quantize takes a model with layers in it; of one layer take wavecrest.nn.Linear.from_module(layer, format)"
        )
    tied = _tied_to_embeddings(model)
    patterns = _Patterns(keep)
    found = Found([], {})
    for key, paths in places.items():
        module = modules[key]
        reason = patterns.reason(paths) or _refuse(module)
        if reason is None and key in fast_paths:
            reason = "torch's TransformerEncoderLayer reads its weight itself"
        if reason is None and id(module.get_parameter("weight")) in tied and not patterns.asked(paths):
            reason = f"its weight is that of {tied[id(module.get_parameter('weight'))]} too"
        if reason is None:
            found.sites.append(Site(tuple(paths), module))
        else:
            found.kept[paths[0]] = reason
    patterns.check()
    found.check()
    return found


class _Patterns:
    """The patterns of `keep`: those of KEEP first, then the caller's; the last that fits a layer decides."""

    def __init__(self, keep: Iterable[str]) -> None:
        given = [keep] if isinstance(keep, str) else list(keep)
        self._unused = set(given)
        self._all = [*((one, False) for one in KEEP), *((one, True) for one in given)]

    def _last(self, paths: Sequence[str]) -> tuple[str, bool] | None:
        last = None
        for pattern, own in self._all:
            wanted = pattern.removeprefix("!")
            if any(fnmatchcase(path, wanted) or fnmatchcase(path.rpartition(".")[2], wanted) for path in paths):
                self._unused.discard(pattern)
                last = (pattern, own)
        return last

    def reason(self, paths: Sequence[str]) -> str | None:
        last = self._last(paths)
        if last is None or last[0].startswith("!"):
            return None
        pattern, own = last
        return f"keep={pattern!r}" if own else f'kept by default ({pattern}); keep=["!{pattern}"] quantizes it'

    def asked(self, paths: Sequence[str]) -> bool:
        """Whether a pattern with "!" names the layer."""
        last = self._last(paths)
        return last is not None and last[0].startswith("!")

    def check(self) -> None:
        if self._unused:
            raise InvalidArgument(
                f"quantize: keep has {', '.join(map(repr, sorted(self._unused)))}, which fits no linear layer"
            )


def _tied_to_embeddings(model: nn.Module) -> dict[int, str]:
    """Paths of embeddings by the ids of their weights."""
    found = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) and weight is not None:
            found[id(weight)] = path
    return found


def _refuse(module: Any) -> str | None:
    """Why a linear layer is left as it is, or None."""
    kinds = (nn.Linear, LinearOn, Linear)
    if isinstance(module, QuantizedLinear):
        return "it is quantized already"
    if type(module) not in kinds and not is_conv1d(module):
        return f"its class {type(module).__name__} may do more than a linear layer"
    if not is_conv1d(module) and not plain(module, type(module)):
        return "it has hooks or a forward of its own, which would not run any more"
    weight = module._parameters.get("weight")
    if isinstance(weight, PackedWeight):
        return f"its weight is {weight.format} already"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, no plain parameter"
    if weight.dtype not in DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.numel() == 0:
        return "it is empty"
    if getattr(module, "tail", None) is not None:
        return "it has a tail, which goes with a weight that is packed already"
    return None
