"""wavecrest: point it at a PyTorch model and get back a faster model, with proof.

Importing this package touches no GPU and imports neither torch nor Triton; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch is no dependency of the package: which build is right depends on the GPU
INSTALL_TORCH = "pip install torch (builds for ROCm and CUDA: https://pytorch.org/get-started)"

# public name -> module that defines it; a module's own name maps to that module
_LAZY = {
    "Buckets": "wavecrest.measure.workload",
    "Plan": "wavecrest.optimizer.plan",
    "Workload": "wavecrest.measure.workload",
    "add_layer_norm": "wavecrest.nn.functional",
    "add_rms_norm": "wavecrest.nn.functional",
    "attention": "wavecrest.nn.functional",
    "check_kernel": "wavecrest.backends.user",
    "conv2d": "wavecrest.nn.functional",
    "coverage": "wavecrest.dispatch.registry",
    "dynamic_conv2d": "wavecrest.compat.aiter",
    "enable_dynamic_shapes": "wavecrest.compat.aiter",
    "enable_fusion": "wavecrest.compat.aiter",
    "enable_tensor_cores": "wavecrest.compat.aiter",
    "env": "wavecrest.env",
    "errors": "wavecrest.errors",
    "hardware": "wavecrest.hardware",
    "layer_norm": "wavecrest.nn.functional",
    "linear": "wavecrest.nn.functional",
    "load_quantized": "wavecrest.quantizer.api",
    "matmul": "wavecrest.nn.functional",
    "nn": "wavecrest.nn",
    "ops": "wavecrest.ops",
    "optimize": "wavecrest.optimizer.api",
    "post_layer_norm": "wavecrest.nn.functional",
    "quantize": "wavecrest.quantizer.api",
    "register_kernel": "wavecrest.backends.user",
    "registry": "wavecrest.dispatch.registry",
    "rms_norm": "wavecrest.nn.functional",
    "route": "wavecrest.optimizer.routed",
    "set_cache_size": "wavecrest.compat.aiter",
    "set_default_precision": "wavecrest.compat.aiter",
    "set_log_level": "wavecrest.compat.aiter",
    "settings": "wavecrest.settings",
    "softmax": "wavecrest.nn.functional",
}

__all__ = [
    "Buckets",
    "Plan",
    "Workload",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "check_kernel",
    "conv2d",
    "coverage",
    "dynamic_conv2d",
    "enable_dynamic_shapes",
    "enable_fusion",
    "enable_tensor_cores",
    "env",
    "errors",
    "hardware",
    "layer_norm",
    "linear",
    "load_quantized",
    "matmul",
    "nn",
    "ops",
    "optimize",
    "post_layer_norm",
    "quantize",
    "register_kernel",
    "registry",
    "rms_norm",
    "route",
    "set_cache_size",
    "set_default_precision",
    "set_log_level",
    "settings",
    "softmax",
]

if TYPE_CHECKING:
    from wavecrest import env, errors, hardware, nn, ops, settings
    from wavecrest.backends.user import check_kernel, register_kernel
    from wavecrest.compat.aiter import (
        dynamic_conv2d,
        enable_dynamic_shapes,
        enable_fusion,
        enable_tensor_cores,
        set_cache_size,
        set_default_precision,
        set_log_level,
    )
    from wavecrest.dispatch import registry
    from wavecrest.dispatch.registry import coverage
    from wavecrest.measure.workload import Buckets, Workload
    from wavecrest.nn.functional import (
        add_layer_norm,
        add_rms_norm,
        attention,
        conv2d,
        layer_norm,
        linear,
        matmul,
        post_layer_norm,
        rms_norm,
        softmax,
    )
    from wavecrest.optimizer.api import optimize
    from wavecrest.optimizer.plan import Plan
    from wavecrest.optimizer.routed import route
    from wavecrest.quantizer.api import load_quantized, quantize


def __getattr__(name: str) -> Any:
    try:
        module_name = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'wavecrest' has no attribute {name!r}") from None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from wavecrest.errors import MissingDependency

        raise MissingDependency("torch", f"wavecrest.{name}", INSTALL_TORCH) from None
    value = module if module_name.rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
