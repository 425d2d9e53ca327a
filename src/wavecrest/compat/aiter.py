"""The names of the "AITER Guide for AMD GPUs" over wavecrest: `import wavecrest.compat.aiter as aiter`.

They are the names of that guide, not of ROCm/aiter, whose kernels are backends of dispatch where it is installed. All
of them are at the top level of wavecrest too; there `quantize` and `register_kernel` do more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from wavecrest import __version__, settings
from wavecrest.errors import InvalidArgument, Refused, Unsupported
from wavecrest.nn import Linear
from wavecrest.nn.functional import attention as _attention
from wavecrest.nn.functional import conv2d, linear, matmul
from wavecrest.optimizer.steps.base import set_submodule, structural_copy

__all__ = [
    "__version__",
    "attention",
    "conv2d",
    "dynamic_conv2d",
    "enable_dynamic_shapes",
    "enable_fusion",
    "enable_tensor_cores",
    "linear",
    "matmul",
    "quantize",
    "register_kernel",
    "set_cache_size",
    "set_default_precision",
    "set_log_level",
]

F = TypeVar("F", bound=Callable[..., Any])

PRECISIONS: dict[str, settings.Precision] = {"FP32": "ieee", "TF32": "tf32", "BF16": "bf16", "FP16": "fp16"}
QUANTIZED = ("int8", "int4", "fp8")
_logger = logging.getLogger("wavecrest.compat")

dynamic_conv2d = conv2d
"""`wavecrest.conv2d`: sizes are free in each call."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`wavecrest.attention` of q, k and v [B, H, S, D] with a mask: bool (True takes part) or added to the scores."""
    return _attention(q, k, v, mask)


def set_log_level(level: str) -> None:
    """The setting `log_level`, in capitals or not.

    Raises:
        InvalidArgument: the level is unknown.
    """
    settings.update(log_level=level.lower())  # type: ignore[arg-type]


def set_cache_size(megabytes: int) -> None:
    """The setting `cache_size`, in MiB.

    Raises:
        InvalidArgument: it is no whole number of at least 1.
    """
    settings.update(cache_size=megabytes)


def set_default_precision(precision: str) -> None:
    """The setting `precision`: "FP32", "TF32", "BF16" or "FP16".

    Raises:
        InvalidArgument: it is another word.
    """
    if precision.upper() not in PRECISIONS:
        raise InvalidArgument(f"set_default_precision: takes {', '.join(PRECISIONS)}, not {precision!r}")
    settings.update(precision=PRECISIONS[precision.upper()])


def enable_tensor_cores(enabled: bool) -> None:
    """Let matrix cores work on float32: the precision "tf32" in place of "ieee"; False: "ieee".

    16 and 8 bits use them always, and a precision of 16 bits stays.
    """
    if not enabled:
        settings.update(precision="ieee")
    elif settings.current().precision == "ieee":
        settings.update(precision="tf32")


def enable_fusion(enabled: bool) -> None:
    """Confirm that calls are fused as their arguments say (bias, activation, residual), which they always are.

    Raises:
        Unsupported: it is to be switched off.
    """
    if not enabled:
        raise Unsupported("fusion is part of a call: leave out activation and residual for operations of their own")


class DynamicShapes:
    """Result of `enable_dynamic_shapes`: as a context it puts back, at its end, what held before the call."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        """Nothing is left to do: the call has set it."""

    def __exit__(self, *_: object) -> None:
        torch._dynamo.config.assume_static_by_default = self._before


def enable_dynamic_shapes(enabled: bool = True) -> DynamicShapes:
    """Have `torch.compile` compile functions for any size at once, not for the sizes of the first call.

    It holds from the call on, or as a context, `with enable_dynamic_shapes():`, for functions whose first call is
    inside. Ops take any size without it, and functions that were compiled before keep their code. Norms, softmax and
    PyTorch's operations then compile once. GEMMs, convolutions and attention compile again where a size leaves its
    bucket, as their backend is chosen by it.
    """
    before = torch._dynamo.config.assume_static_by_default
    torch._dynamo.config.assume_static_by_default = not enabled
    return DynamicShapes(before)


def register_kernel(function: F) -> F:
    """A function of tensors as one kernel, which Inductor compiles at its first call.

    Raises:
        InvalidArgument: it is no function.
    """
    if not callable(function):
        raise InvalidArgument(f"register_kernel: takes a function, got {type(function).__name__}")
    return cast(F, torch.compile(function))


def quantize(model: nn.Module, dtype: str = "int8") -> nn.Module:
    """A model whose linear layers have weights in 8 or 4 bits; all else is shared with the original, which stays.

    Weights alone are quantized, with a scale a row (int8, fp8) or a group (int4), without calibration: compare the
    answers. A layer that cannot be packed stays, with a line in the log (info).

    Args:
        model: its `nn.Linear` layers are replaced, not those of derived classes or with hooks.
        dtype: "int8", "int4" or "fp8".

    Raises:
        InvalidArgument: the dtype is another.
        Unsupported: no layer can be quantized; the message has the reason of the first.
    """
    if dtype not in QUANTIZED:
        raise InvalidArgument(f"quantize: dtype takes {', '.join(QUANTIZED)}, not {dtype!r}")
    made: dict[nn.Module, Linear] = {}
    refused: list[str] = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            try:
                made[module] = Linear.from_module(module, dtype)
            except (InvalidArgument, Refused) as error:
                refused.append(f"{name or 'the model'}: {error}")
                _logger.info("not quantized: %s", refused[-1])
    if not made:
        raise Unsupported(f"quantize: {refused[0] if refused else 'the model has no nn.Linear'}")
    if model in made:
        return made[model]
    copy = structural_copy(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and module in made:
            set_submodule(copy, path, made[module])
    return copy
