"""Code that PyTorch's backends share: their priority, float32 precision, dtypes, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tracing import constant_in_graphs

C = TypeVar("C", bound=tuple[Any, ...])

PRIORITY = 10
# settings of fp32_precision that do not round float32 before it is multiplied; "none" is PyTorch's own default
UNROUNDED = ("ieee", "none")
ROUNDED = "is set to round float32 before it multiplies, and ieee is asked for"


def other_dtype(x: Tensor, **vectors: Tensor | None) -> str | None:
    """PyTorch's norms promote or refuse a weight of another dtype; wavecrest's keep its precision."""
    for name, vector in vectors.items():
        if vector is not None and vector.dtype != x.dtype:
            return f"takes a {name} of x's dtype ({dtype_name(x)}), not {dtype_name(vector)}"
    return None


def settings_of(device: str) -> Any:
    """PyTorch's settings of matrix products on a device; `fp32_precision` is one of them."""
    return torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def either(
    read: Callable[[], Any], put: Callable[[Any], Any], settings: tuple[Any, ...]
) -> tuple[Any, Callable[[Any], None]]:
    """An older setting of float32's precision, and what puts it back; where it raises, those that came after it.

    PyTorch (2.9 and later) raises a RuntimeError where the older one is read and the user has set another of `settings`
    by its `fp32_precision`.
    """

    def put_back(value: Any) -> None:
        if not isinstance(value, tuple):
            put(value)
            return
        for setting, one in zip(settings, value, strict=True):
            setting.fp32_precision = one

    try:
        return read(), put_back
    except RuntimeError:
        return tuple(setting.fp32_precision for setting in settings), put_back


def matmul_precision() -> tuple[Any, Callable[[Any], None]]:
    """PyTorch's precision of float32 products on all devices, and what puts it back."""
    settings = settings_of("cuda"), settings_of("cpu")
    return either(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, settings)


# Dynamo would trace a setting it knows as a guard on global state, which only repeats its own
@constant_in_graphs
def rounds(device: str) -> bool:
    """True if float32 is rounded (to tf32, to bfloat16) before it is multiplied."""
    return settings_of(device).fp32_precision not in UNROUNDED


# what `fp32_precision` reads: the name takes 0.4 µs a call more, as it is looked for among PyTorch's attributes first
_precision_of: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def unrounded(device: str, run: Callable[[C], Tensor]) -> Callable[[C], Tensor]:
    """`run`, with PyTorch not rounding the inputs of float32 GEMMs in it.

    PyTorch's settings are read on every call: a user may change them between two calls, while what runs calls is kept.
    Dynamo does not trace them: a backend's `refuse` looks while it compiles.
    """
    if torch.compiler.is_compiling():
        return run
    settings = settings_of(device)
    precision: Callable[[], str] = partial(getattr, settings, "fp32_precision")
    if _precision_of is not None:
        precision = partial(_precision_of, "cuda" if device == "cuda" else "mkldnn", "matmul")

    def unrounded_run(call: C) -> Tensor:
        before = precision()
        if before in UNROUNDED:
            return run(call)
        settings.fp32_precision = "ieee"
        try:
            return run(call)
        finally:
            settings.fp32_precision = before

    return unrounded_run


def activated(y: Tensor, name: str | None, slope: float) -> Tensor:
    """An activation by its name; `slope` is that of leaky_relu below 0."""
    if name == "relu":
        return F.relu(y)
    if name == "leaky_relu":
        return F.leaky_relu(y, slope)
    if name == "silu":
        return F.silu(y)
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(y, approximate="tanh" if name == "gelu_tanh" else "none")
    return y
