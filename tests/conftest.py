"""Where tests run: on the GPU if there is one, else on the CPU with the kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Triton reads this when the kernels are defined, so it must be set before wavecrest.ops is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# nor may rows that somebody measured on this machine decide what tests run
os.environ["WAVECREST_DATABASE"] = "off"

# tests that share the cores (pytest -n) take one each
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# child processes of tests import the package from the source tree, installed or not
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an AMD or NVIDIA GPU; torch sees none"))


# Triton's names of the types that its interpreter (3.6) does not convert as the hardware does: float32 → bfloat16 is
# truncated there, and 8-bit types lose the rounding beyond the first bit, subnormals and NaN
_SMALL_TYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def _convert_as_torch_does(convert: Any) -> Any:
    def wrapper(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) == "fp32" and str(target) in _SMALL_TYPES:
            wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32).reshape(-1))
            narrow = wide.to(_SMALL_TYPES[str(target)])
            width = torch.int16 if narrow.element_size() == 2 else torch.uint8
            bits = narrow.view(width).numpy()
            return bits.view(np.uint16 if narrow.element_size() == 2 else np.uint8).reshape(data.shape)
        if str(target) == "fp32" and str(source) in _SMALL_TYPES and str(source) != "bf16":
            bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            return bits.view(_SMALL_TYPES[str(source)]).float().numpy().reshape(data.shape)
        return convert(data, source, target, rounding)

    return wrapper


def _dot_of_floats(create_dot: Any) -> Any:
    """tl.dot with 8- and 16-bit floats widened: the interpreter (3.6) multiplies the bits of bfloat16 as integers."""

    def values(tensor: Any) -> Any:
        small = _SMALL_TYPES.get(str(tensor.dtype.scalar))
        if small is None:
            return tensor.data
        width = torch.int16 if small.itemsize == 2 else torch.int8
        bits = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.int16 if small.itemsize == 2 else np.int8))
        return bits.view(width).view(small).float().numpy()

    def wrapper(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if str(a.dtype.scalar) not in _SMALL_TYPES and str(b.dtype.scalar) not in _SMALL_TYPES:
            return create_dot(self, a, b, d, *options)
        return type(d)(np.matmul(values(a), values(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    return wrapper


@pytest.fixture(autouse=True)
def _interpreter_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(interpreter, "_convert_float", _convert_as_torch_does(interpreter._convert_float))
        builder = interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, "create_dot", _dot_of_floats(builder.create_dot))


@pytest.fixture(scope="module")
def standins() -> Iterator[None]:
    """The op "planted" of tests/unit/tune_standins.py, here and for child processes, and no longer than needed."""
    name, before = "tests.unit.tune_standins", os.environ["PYTHONPATH"]
    importlib.import_module(name)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), before])
    yield
    os.environ["PYTHONPATH"] = before
    del sys.modules["wavecrest.registry"]._OPS["planted"], sys.modules[name]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _poisoned(allocate: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces through this: the check comes first, so that nothing below is part of a graph
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        out = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("wavecrest") and out.is_floating_point():
            out.fill_(float("nan"))
        elif caller.startswith("wavecrest") and out.dtype == torch.int8:
            # the one value that rounding to ±127 never makes
            out.fill_(-128)
        return out

    return wrapper


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output element that a kernel forgets to write is NaN, not by luck the right value of an earlier run."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _dispatch_as_found() -> Iterator[None]:
    """No test leaves a forced backend, a pin or strict mode behind."""
    yield
    registry = sys.modules.get("wavecrest.registry")
    if registry is not None:
        registry.strict("off")
        for op in list(registry._OPS.values()):
            op.force(None)
            op.unpin()
