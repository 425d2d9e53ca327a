"""Where tests run: on the GPU if there is one, else on the CPU with the kernels in Triton's interpreter."""

from __future__ import annotations

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


def _round_to_bfloat16(convert: Any) -> Any:
    """Triton's interpreter (3.6) truncates float32 to bfloat16, where the hardware rounds to nearest even."""

    def wrapper(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) != "fp32" or str(target) != "bf16":
            return convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded).reshape(data.shape)

    return wrapper


@pytest.fixture(autouse=True)
def _interpreter_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(interpreter, "_convert_float", _round_to_bfloat16(interpreter._convert_float))


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
