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
    "coverage": "wavecrest.dispatch.registry",
    "env": "wavecrest.env",
    "errors": "wavecrest.errors",
    "hardware": "wavecrest.hardware",
    "nn": "wavecrest.nn",
    "ops": "wavecrest.ops",
    "optimize": "wavecrest.optimizer.api",
    "registry": "wavecrest.dispatch.registry",
}

__all__ = [
    "Buckets",
    "Plan",
    "Workload",
    "__version__",
    "coverage",
    "env",
    "errors",
    "hardware",
    "nn",
    "ops",
    "optimize",
    "registry",
]

if TYPE_CHECKING:
    from wavecrest import env, errors, hardware, nn, ops
    from wavecrest.dispatch import registry
    from wavecrest.dispatch.registry import coverage
    from wavecrest.measure.workload import Buckets, Workload
    from wavecrest.optimizer.api import optimize
    from wavecrest.optimizer.plan import Plan


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
