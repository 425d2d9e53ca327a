"""Triton's interpreter as tests use it: right where it differs from the hardware, and not slower than it has to be."""

from __future__ import annotations

import inspect
import operator
import sys
from typing import Any

import numpy as np
import pytest
import torch

# Triton's names of the types that its interpreter (3.6) does not convert as the hardware does: float32 → bfloat16 is
# truncated there, and 8-bit types lose the rounding beyond the first bit, subnormals and NaN
_SMALL_TYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_INTEGERS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the interpreter, if a test has it loaded, until the test ends."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    monkeypatch.setattr(interpreter, "_convert_float", _convert_as_torch_does(interpreter._convert_float))
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", _dot_of_floats(builder.create_dot))
    monkeypatch.setattr(interpreter.TritonSemantic, "binary_op_sanitize_overflow_impl", _no_overflow)
    monkeypatch.setattr(interpreter, "_patch_lang", _Patched(interpreter._patch_lang))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
    core = interpreter.tl.core
    monkeypatch.setattr(core, "_type_for_tuple_values", _of_sizes(core._type_for_tuple_values, core.constexpr))
    monkeypatch.setattr(core.block_type, "__init__", _of_blocks(core.block_type.__init__))


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


def _no_overflow(_semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Sums and products of integers that leave their type are errors.

    The interpreter (3.6, 3.9) works them out in its own tensors, a third of the time of attention's tests, and asserts
    nothing of them, as its `debug` is off.
    """
    a, b = lhs.handle.data, rhs.handle.data
    if a.dtype.kind not in "iu" or a.dtype.itemsize == 8:
        return
    wide = _INTEGERS[operation.__name__](a.astype(np.int64), b.astype(np.int64))
    limits = np.iinfo(a.dtype)
    assert limits.min <= wide.min() and wide.max() <= limits.max, f"{a.dtype} overflow in {operation.__name__}"


class _Patched:
    """What the interpreter makes of Triton's language for a kernel, once a launch.

    The interpreter (3.6, 3.9) does it again for every function that a kernel calls, a quarter of the time of
    attention's tests.
    """

    def __init__(self, patch: Any) -> None:
        self._patch, self._done, self._modules = patch, set[Any](), dict[Any, Any]()

    def __call__(self, function: Any) -> Any:
        if function not in self._modules:
            names = function.__globals__.values()
            self._modules[function] = frozenset(one.__name__ for one in names if inspect.ismodule(one))
        if self._modules[function] in self._done:
            # of a call within a kernel, which restores nothing
            return None
        scope = self._patch(function)
        self._done.add(self._modules[function])
        restore = scope.restore

        def restored() -> None:
            self._done.clear()
            restore()

        scope.restore = restored
        return scope


def _by_name(find: Any) -> Any:
    """numpy's types of Triton's, each looked for once: the interpreter (3.6, 3.9) makes a table of them a call."""
    known: dict[str, Any] = {}

    def wrapper(wanted: Any) -> Any:
        name = wanted.scalar.name
        if name not in known:
            known[name] = find(wanted)
        return known[name]

    return wrapper


def _of_sizes(make: Any, constexpr: type) -> Any:
    """Types of shapes, each made once: every tensor of the interpreter has two."""
    known: dict[tuple[int, ...], Any] = {}

    def wrapper(values: Any, fields: Any = None) -> Any:
        sizes = tuple([one.value if type(one) is constexpr else one for one in values])
        if fields is not None or not all(type(size) is int for size in sizes):
            return make(values, fields)
        if sizes not in known:
            known[sizes] = make(values)
        return known[sizes]

    return wrapper


def _of_blocks(init: Any) -> Any:
    """Types of blocks, each made once, by element and sizes."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def wrapper(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            init(self, element_ty, shape)
            known[key] = vars(self).copy()
        else:
            vars(self).update(known[key])

    return wrapper
