"""Norms as modules, and ours from a model's own: proven on a probe, never assumed from a class name."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from types import FunctionType, NoneType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm

# probe scales: at 1 the weight decides, at 1e-3 eps does, at 100 a clamp of the input shows
PROBE_SCALES = (1.0, 1e-3, 100.0)
# rows of a probe in two dimensions, and its numbers at most: PyTorch runs more than that on all cores. On 16 cores
# a process that proved the norms of a Gemma 2 2B, beside three others that did and four that loaded, was not done after
# 87 s (2026-11-27, evidence/nvidia-h200/2026-11-27_zoo_eighth_gpu_0.jsonl.gz)
PROBE_ROWS, PROBE_NUMBERS = (3, 5), 32_768
# largest error on a float32 probe, over the largest value
PROBE_LIMIT = 1e-5


# values by which modules and classes can be compared
PLAIN, CALLED = (bool, int, float, str, NoneType), (FunctionType, property, staticmethod, classmethod)
# by class and settings, what a proof found
_PROVEN: WeakKeyDictionary[type[nn.Module], dict[tuple[object, ...] | None, str]] = WeakKeyDictionary()


def default_eps(x: Tensor) -> float:
    """torch.nn.RMSNorm's eps=None: the epsilon of the type it computes in."""
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


class _Norm(nn.Module):
    """A norm over the last dimension with an optional weight."""

    weight: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float | None,
        elementwise_affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class RMSNorm(_Norm):
    """`wavecrest.ops.rms_norm` with a weight [size]; eps=None means what torch.nn.RMSNorm means by it."""

    def __init__(
        self,
        size: int,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to the same."""
        return rms_norm(x, self.weight, default_eps(x) if self.eps is None else self.eps)

    @classmethod
    def from_module(cls, module: nn.Module) -> RMSNorm:
        """Ours from torch.nn.RMSNorm or a transformers-like RMSNorm; shares its weight.

        Raises:
            StepRefused: the module computes something else (Gemma's (1 + weight), for one), or has hooks.
        """
        size = _size(module)
        made = cls(size, _eps(module), elementwise_affine=False)
        _adopt(made, module, "weight")
        _prove(module, made, size)
        return made


class GemmaRMSNorm(_Norm):
    """`wavecrest.ops.rms_norm` with 1 + weight [size] in float32, as the norms of Gemma and Qwen3-Next have it."""

    one: Tensor

    def __init__(
        self,
        size: int,
        eps: float | None = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, False, device, dtype)
        self.weight = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        self.register_buffer("one", torch.ones(size, device=device, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to the same."""
        weight = cast(Tensor, self.weight)
        # of two tensors the wider type wins, in one kernel; the buffer goes with the module to a narrow type
        scale = self.one + weight if self.one.dtype == torch.float32 else 1 + weight.float()
        return rms_norm(x, scale, default_eps(x) if self.eps is None else self.eps)

    @classmethod
    def from_module(cls, module: nn.Module) -> GemmaRMSNorm:
        """Ours from transformers' GemmaRMSNorm or a norm like it; shares its weight.

        Raises:
            StepRefused: the module computes something else, or has hooks.
        """
        size, weight = _size(module), getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise StepRefused(f"{type(module).__name__} has no weight")
        made = cls(size, _eps(module), device=weight.device)
        _adopt(made, module, "weight")
        _prove(module, made, size)
        return made


class AddRMSNorm(RMSNorm):
    """`wavecrest.ops.add_rms_norm` with a weight [size]."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x and residual [..., size] to (rms_norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, default_eps(x) if self.eps is None else self.eps)

    @classmethod
    def from_module(cls, module: nn.Module) -> AddRMSNorm:
        """Ours from an RMSNorm that follows a residual addition; shares its weight.

        Raises:
            StepRefused: as for `RMSNorm.from_module`.
        """
        norm = RMSNorm.from_module(module)
        made = cls(norm.size, norm.eps, elementwise_affine=False)
        _adopt(made, norm, "weight")
        return made


class ResidualNorm(nn.Module):
    """RMSNorm of a residual stream with a weight [size]: x / sqrt(mean(x²) + eps) · weight + bias, if there is one."""

    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, bias: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size, device=device)) if bias else None)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + delta, x + delta), both [..., size]; without a delta of x, and x itself."""
        if delta is None:
            normed = rms_norm(x, self.weight, self.eps)
        else:
            normed, x = add_rms_norm(delta, x, self.weight, self.eps)
        return (normed if self.bias is None else normed + self.bias), x


class LayerNorm(_Norm):
    """`wavecrest.ops.layer_norm` with a weight and a bias [size]."""

    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, elementwise_affine, device, dtype)
        shift = nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) if elementwise_affine and bias else None
        self.register_parameter("bias", shift)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to the same."""
        return layer_norm(x, self.weight, self.bias, cast(float, self.eps))

    @classmethod
    def from_module(cls, module: nn.Module) -> LayerNorm:
        """Ours from torch.nn.LayerNorm or a module like it; shares its weight and bias.

        Raises:
            StepRefused: the module computes something else, normalises more than one dimension, or has hooks.
        """
        size = _size(module)
        eps = _eps(module)
        if eps is None:
            raise StepRefused(f"{type(module).__name__} has no eps")
        made = cls(size, eps, elementwise_affine=False)
        _adopt(made, module, "weight")
        _adopt(made, module, "bias")
        _prove(module, made, size)
        return made


class AddLayerNorm(LayerNorm):
    """`wavecrest.ops.add_layer_norm` with a weight and a bias [size]."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x and residual [..., size] to (layer_norm(x + residual), x + residual)."""
        return add_layer_norm(x, residual, self.weight, self.bias, cast(float, self.eps))

    @classmethod
    def from_module(cls, module: nn.Module) -> AddLayerNorm:
        """Ours from a LayerNorm that follows a residual addition; shares its weight and bias.

        Raises:
            StepRefused: as for `LayerNorm.from_module`.
        """
        norm = LayerNorm.from_module(module)
        made = cls(norm.size, cast(float, norm.eps), elementwise_affine=False)
        _adopt(made, norm, "weight")
        _adopt(made, norm, "bias")
        return made


def norm_from_module(module: nn.Module) -> RMSNorm | GemmaRMSNorm | LayerNorm:
    """The wavecrest norm that computes what `module` does, sharing its parameters.

    Raises:
        StepRefused: none of them does, with the reason.
    """
    # some RMS norms are called LayerNorm (T5), and of one name some scale by 1 + weight: the probe decides
    kinds: list[type[RMSNorm | GemmaRMSNorm | LayerNorm]] = [RMSNorm, GemmaRMSNorm]
    if type(module).__name__.endswith("LayerNorm"):
        kinds.insert(0, LayerNorm)
    first = None
    for kind in kinds:
        try:
            return kind.from_module(module)
        except StepRefused as error:
            first = first or error
    assert first is not None
    raise first


def _size(module: nn.Module) -> int:
    shape = getattr(module, "normalized_shape", None)
    weight = getattr(module, "weight", None)
    if shape is None:
        if not isinstance(weight, Tensor):
            raise StepRefused(f"{type(module).__name__} has neither a weight nor a normalized_shape")
        shape = weight.shape
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(shape) != 1:
        raise StepRefused(f"{type(module).__name__} normalises {len(shape)} dimensions {list(shape)}; the op takes one")
    return int(shape[0])


def _eps(module: nn.Module) -> float | None:
    """The eps of a module; None only where the module itself says None."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if hasattr(module, name):
            value = getattr(module, name)
            if value is None or isinstance(value, (int, float)):
                return value
            raise StepRefused(f"{type(module).__name__}.{name} is {value!r}, not a number")
    raise StepRefused(f"{type(module).__name__} has no variance_epsilon, eps or epsilon")


def _adopt(made: nn.Module, module: nn.Module, name: str) -> None:
    """Share a parameter; `made` has it registered as None."""
    value = getattr(module, name, None)
    if value is not None and not isinstance(value, nn.Parameter):
        raise StepRefused(f"{type(module).__name__}.{name} is a {type(value).__name__}, not a parameter")
    setattr(made, name, value)
    made.train(module.training)


def _prove(module: nn.Module, made: nn.Module, size: int) -> None:
    """Raise StepRefused unless both compute the same on random inputs, with random parameters in place of the real.

    Random parameters, since fresh ones (a weight of ones, a bias of zeros) would hide that they are ignored. Works on
    float32 copies on the CPU; the modules are not touched. What was proven of a class holds for its modules with the
    same settings.
    """
    name = type(module).__name__
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks):
        raise StepRefused(f"{name} has hooks, which a replacement would lose")
    extra = set(dict(module.named_parameters())) - set(dict(made.named_parameters()))
    if extra:
        raise StepRefused(f"{name} has parameters beside weight and bias: {', '.join(sorted(extra))}")
    settings, proven = _settings(module, made), _PROVEN.setdefault(type(module), {})
    reason = proven.get(settings)
    if reason is None:
        reason = _disagreement(module, made, size)
        if settings is not None:
            proven[settings] = reason
    if reason:
        raise StepRefused(reason)


def _disagreement(module: nn.Module, made: nn.Module, size: int) -> str:
    """Why both do not compute the same; "" where they do."""
    name = type(module).__name__
    theirs, ours = _float_copy(module), _float_copy(made)
    generator = torch.Generator().manual_seed(0)
    few = math.prod(PROBE_ROWS) * size <= PROBE_NUMBERS
    rows = PROBE_ROWS if few else (1, max(1, PROBE_NUMBERS // size))
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))
            ours.get_parameter(path).copy_(parameter)
        for scale in PROBE_SCALES:
            probe = scale * (torch.randn(*rows, size, generator=generator, device="cpu") + 0.5)
            expected, got = _call(theirs, probe, name), ours(probe)
            if not isinstance(expected, Tensor) or expected.shape != got.shape:
                return f"{name} does not return one tensor of its input's shape"
            error = float((expected - got).abs().max() / got.abs().max().clamp_min(1e-30))
            if not error <= PROBE_LIMIT:
                return _difference(theirs, made, probe, expected, name, error)
    return ""


def _settings(module: nn.Module, made: nn.Module) -> tuple[object, ...] | None:
    """All that a norm's result depends on beside its input and parameters; None where that is not known.

    Known are plain values as attributes of the module and its classes, and the functions of these; not a module with
    buffers, submodules or a forward of its own.
    """
    if module._buffers or module._modules:
        return None
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if not all(isinstance(value, (*PLAIN, tuple)) for value in values.values()):
        return None
    shapes = {name: None if one is None else tuple(one.shape) for name, one in module._parameters.items()}
    kinds = itertools.takewhile(lambda kind: kind is not nn.Module, type(module).__mro__)
    shared = tuple(
        (name, value) for kind in kinds for name, value in vars(kind).items() if isinstance(value, (*PLAIN, *CALLED))
    )
    return type(made), shared, repr(sorted(values.items())), repr(sorted(shapes.items()))


def _float_copy(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # parametrized or shared modules warn on copying; the copy is thrown away
        warnings.simplefilter("ignore")
        return copy.deepcopy(module).to(device="cpu", dtype=torch.float32).eval()


def _call(module: nn.Module, probe: Tensor, name: str) -> Any:
    try:
        return module(probe)
    except Exception as error:
        raise StepRefused(f"{name} fails on a probe {list(probe.shape)}: {error}") from error


def _difference(theirs: nn.Module, made: nn.Module, probe: Tensor, expected: Tensor, name: str, error: float) -> str:
    """The refusal's text for a module that computes something else."""
    weight, eps = getattr(theirs, "weight", None), getattr(made, "eps", None)
    if isinstance(made, RMSNorm) and isinstance(weight, Tensor):
        shifted = rms_norm(probe, 1 + weight, default_eps(probe) if eps is None else eps)
        if torch.allclose(shifted, expected, rtol=1e-4, atol=1e-5):
            return f"{name} scales by (1 + weight), as Gemma's does; RMSNorm scales by the weight"
    return f"{name} computes something else than {type(made).__name__}: error {error:.1e} on a float32 probe"
