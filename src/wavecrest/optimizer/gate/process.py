"""State outside of the model that steps must not change: torch's functions, clocks, global settings, classes."""

from __future__ import annotations

import gc
import importlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wavecrest import env
from wavecrest.backends.torch.common import either, matmul_precision

if TYPE_CHECKING:
    from torch import nn

# functions that proofs rest on: those that compare, copy, make and time
_TORCH = (
    "abs", "allclose", "arange", "as_tensor", "cat", "compile", "empty", "empty_like", "enable_grad", "eq", "equal",
    "from_numpy", "full", "get_num_threads", "inference_mode", "is_grad_enabled", "isclose", "isfinite", "isinf",
    "isnan", "manual_seed", "max", "maximum", "ne", "no_grad", "nonzero", "ones", "rand", "randint", "randn",
    "randperm", "set_grad_enabled", "set_num_threads", "stack", "sum", "tensor", "where", "zeros", "zeros_like",
)  # fmt: skip
_TENSOR = (
    "__eq__", "__sub__", "abs", "all", "any", "argmax", "clone", "copy_", "cpu", "data_ptr", "detach", "double", "eq",
    "equal", "float", "isfinite", "isnan", "item", "max", "mean", "numpy", "reshape", "square", "sub", "sum", "to",
    "tolist", "untyped_storage", "view",
)  # fmt: skip
_CLOCKS = (
    "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep", "time", "time_ns"
)  # fmt: skip
_CUDA = ("CUDAGraph", "Event", "Stream", "current_stream", "synchronize")
_MODULE = (
    "__call__", "__getattr__", "__setattr__", "_call_impl", "_wrapped_call_impl", "buffers", "eval", "forward",
    "parameters", "train",
)  # fmt: skip
# methods of torch.cuda.Event, torch.cuda.Stream and torch.cuda.CUDAGraph
_ON_CUDA = ("elapsed_time", "query", "record", "replay", "synchronize", "wait", "wait_event", "wait_stream")
# functions that intervals and verdicts are computed with
_STATISTICS = ("fmean", "geometric_mean", "median", "stdev")
_MATH = ("exp", "isclose", "isfinite", "log", "prod", "sqrt")
_NUMPY = (
    "asarray", "concatenate", "cumsum", "interp", "isfinite", "log", "mean", "median", "quantile", "searchsorted",
    "sort", "triu_indices",
)  # fmt: skip
# modules of wavecrest whose own functions and classes are watched
_OWN = tuple(f"wavecrest.{room}" for room in ("optimizer", "measure", "records"))
_MISSING = object()


def _settings() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Global settings by name: the value now, and what puts one back."""
    backends: Any = torch.backends

    def attribute(owner: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
        return getattr(owner, name), lambda value: setattr(owner, name, value)

    return {
        "the default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "the default device": (str(torch.get_default_device()), _set_default_device),
        "the number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "the float32 matmul precision": matmul_precision(),
        "deterministic algorithms": (
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "the processors of this thread": (_processors(), _set_processors),
        "whether gradients are on": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "autocast on the CPU": (
            torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)
        ),
        "autocast on the GPU": (
            torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)
        ),
        "cuDNN's TF32": either(
            lambda: backends.cudnn.allow_tf32, lambda value: setattr(backends.cudnn, "allow_tf32", value),
            (backends.cudnn.conv, backends.cudnn.rnn),
        ),
        "cuDNN's benchmark mode": attribute(backends.cudnn, "benchmark"),
        "cuDNN": attribute(backends.cudnn, "enabled"),
        "reduced precision sums in float16": attribute(
            backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
        ),
        "reduced precision sums in bfloat16": attribute(
            backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
        ),
        **{
            f"the {what} backend of attention": (
                getattr(backends.cuda, f"{name}_sdp_enabled")(), getattr(backends.cuda, f"enable_{name}_sdp")
            )
            for what, name in (
                ("math", "math"), ("flash", "flash"), ("memory-efficient", "mem_efficient"), ("cuDNN", "cudnn")
            )
        },
        "reduced precision sums in the math backend of attention": (
            backends.cuda.fp16_bf16_reduction_math_sdp_allowed(), backends.cuda.allow_fp16_bf16_reduction_math_sdp
        ),
        "oneDNN": attribute(backends.mkldnn, "enabled"),
        "subnormal numbers": (_has_subnormals(), lambda value: torch.set_flush_denormal(not value)),
        "the garbage collector": (gc.isenabled(), lambda value: gc.enable() if value else gc.disable()),
        "the interpreter's trace function": (sys.gettrace(), sys.settrace),
        "the interpreter's profile function": (sys.getprofile(), sys.setprofile),
        "torch function modes": (_modes(), lambda value: None),
    }  # fmt: skip


def _processors() -> list[int]:
    """The processors that this thread may run on; empty where a system does not say, or OpenMP binds threads itself."""
    bound = any(env.get(name) for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
    return [] if bound or not hasattr(os, "sched_getaffinity") else sorted(os.sched_getaffinity(0))


def _set_processors(numbers: list[int]) -> None:
    if numbers:
        os.sched_setaffinity(0, numbers)


def _set_default_device(name: str) -> None:
    torch.set_default_device(None if name == "cpu" else name)


def _has_subnormals() -> bool:
    return float(torch.tensor([1e-310], dtype=torch.float64) * torch.ones(1, dtype=torch.float64)) != 0.0


def _modes() -> int:
    depth = getattr(torch._C, "_len_torch_function_stack", None)
    return int(depth()) if depth is not None else 0


class ProcessState:
    """Functions, classes and settings of this process, as they are now.

    Args:
        model: its module classes are watched too.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        # Dynamo wraps functions of torch when it is imported, which is not a step's doing
        importlib.import_module("torch._dynamo")
        self._functions = list(_functions(model))
        self._settings = {name: value for name, (value, _) in _settings().items()}
        self._hooks = [(hooks, dict(hooks)) for hooks in _global_hooks()]

    def put_back(self) -> list[str]:
        """Undo what was changed since; one phrase a change, such as "it replaced torch.equal"."""
        found = []
        for owner, label, name, own in self._functions:
            if vars(owner).get(name, _MISSING) is not own:
                found.append(f"it replaced {label}.{name}")
                if own is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
        for name, (value, put) in _settings().items():
            if value != self._settings[name]:
                found.append(f"it changed {name} from {self._settings[name]} to {value}")
                put(self._settings[name])
        for hooks, before in self._hooks:
            if dict(hooks) != before:
                found.append("it left a hook on every module")
                hooks.clear()
                hooks.update(before)
        return found


def _functions(model: nn.Module | None) -> Iterable[tuple[Any, str, str, Any]]:
    watched: list[tuple[Any, str, Iterable[str]]] = [
        (torch, "torch", _TORCH),
        (torch.Tensor, "torch.Tensor", _TENSOR),
        (time, "time", _CLOCKS),
        (torch.cuda, "torch.cuda", _CUDA),
        *((getattr(torch.cuda, kind), f"torch.cuda.{kind}", _ON_CUDA) for kind in ("CUDAGraph", "Event", "Stream")),
        (statistics, "statistics", _STATISTICS),
        (math, "math", _MATH),
        (np, "numpy", _NUMPY),
        (torch.nn.Module, "torch.nn.Module", _MODULE),
        (torch.nn.functional, "torch.nn.functional", [n for n in vars(torch.nn.functional) if not n.startswith("_")]),
        (threading, "threading", ("Thread",)),
    ]
    for name, module in list(sys.modules.items()):
        if name.startswith(_OWN) and isinstance(module, ModuleType):
            watched.append((module, name, [n for n, v in vars(module).items() if callable(v)]))
            for label, kind in list(vars(module).items()):
                if isinstance(kind, type) and kind.__module__ == name:
                    watched.append((kind, f"{name}.{label}", [n for n, v in vars(kind).items() if callable(v)]))
    for kind in {type(module) for module in model.modules()} if model is not None else ():
        for base in kind.__mro__:
            if base is not object and base is not torch.nn.Module:
                names = [n for n, v in vars(base).items() if callable(v) and n not in ("__class_getitem__",)]
                watched.append((base, base.__qualname__, {*names, "forward", "__call__"}))
    for owner, label, wanted in watched:
        for name in wanted:
            # what the class inherits must not be hidden by an attribute of its own
            yield owner, label, name, vars(owner).get(name, _MISSING)


def _global_hooks() -> list[Any]:
    module = torch.nn.modules.module
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_module_registration_hooks")
    return [getattr(module, name) for name in names if hasattr(module, name)]
