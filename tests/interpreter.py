"""Triton's interpreter as tests use it: right where it differs from the hardware, and not slower than it has to be.

Most of its time goes to types and shapes, not to numbers. The shortcuts below save that time; what they do not know
they leave to the interpreter.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
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
    for place, name, _, changed in _changes(interpreter):
        monkeypatch.setattr(place, name, changed)
    # per test, as it holds what is patched at the moment
    monkeypatch.setattr(interpreter, "_patch_lang", _Patched(interpreter._patch_lang))


def take_no_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave types and shapes to the interpreter itself, until the test ends."""
    interpreter: Any = sys.modules["triton.runtime.interpreter"]
    for place, name, original, _ in _changes(interpreter)[_MENDED:]:
        monkeypatch.setattr(place, name, original)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.patch)


# the first changes are of results; those after them save time alone
_MENDED = 4


@functools.cache
def _changes(interpreter: Any) -> list[tuple[Any, str, Any, Any]]:
    """Each change with its place, made once, so that its caches of types serve every test."""
    builder, semantic, core = interpreter.InterpreterBuilder, interpreter.TritonSemantic, interpreter.tl.core
    broadcast = _broadcast(interpreter, semantic.broadcast_impl_value)
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (interpreter, "_convert_float", _convert_as_torch_does),
        (builder, "create_dot", _dot_of_floats),
        (builder, "create_splat", lambda splat: _of_its_type(interpreter, splat)),
        (semantic, "binary_op_sanitize_overflow_impl", lambda _: _no_overflow),
        (semantic, "broadcast_impl_value", lambda _: broadcast),
        (semantic, "binary_op_type_checking_impl", lambda check: _of_one_type(interpreter, check, broadcast)),
        (semantic, "add", lambda add: _of_numbers(interpreter, add, np.add)),
        (semantic, "sub", lambda sub: _of_numbers(interpreter, sub, np.subtract)),
        (semantic, "mul", lambda mul: _of_numbers(interpreter, mul, np.multiply)),
        (interpreter.TensorHandle, "__init__", lambda init: _of_handles(init, core.pointer_type)),
        (interpreter, "_get_np_dtype", _by_name),
        (interpreter, "_patch_builtin", lambda patch: _builtins(core, patch)),
        (core, "_type_for_tuple_values", lambda make: _of_sizes(make, core.constexpr)),
        (core.block_type, "__init__", _of_blocks),
        (core.block_type, "to_ir", lambda convert: _as_it_is(convert, builder)),
        (core.tensor, "__init__", _of_tensors),
        (core, "_unwrap_if_constexpr", lambda unwrap: _of_plain_values(unwrap, core.tensor)),
    ]
    return [(place, name, getattr(place, name), change(getattr(place, name))) for place, name, change in changes]


def _convert_as_torch_does(convert: Any) -> Any:
    def wrapper(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) == "bf16" and str(target) == "fp32":
            return (data.astype(np.uint32) << 16).view(np.float32)
        if str(source) == "fp32" and str(target) in _SMALL_TYPES:
            wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32).reshape(-1))
            narrow = wide.to(_SMALL_TYPES[str(target)])
            width = torch.int16 if narrow.element_size() == 2 else torch.uint8
            bits = narrow.view(width).numpy()
            return bits.view(np.uint16 if narrow.element_size() == 2 else np.uint8).reshape(data.shape)
        if str(target) == "fp32" and str(source) in _SMALL_TYPES:
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


def _of_its_type(interpreter: Any, splat: Any) -> Any:
    """A scalar comparison spread over a block is of bools, as loads and stores of 3.9 ask of their masks.

    The interpreter (3.6, 3.9) makes it of the type of what was compared.
    """

    def wrapper(self: Any, kind: Any, scalar: Any) -> Any:
        if scalar.data.dtype != np.bool_:
            return splat(self, kind, scalar)
        return interpreter.TensorHandle(np.full(kind.shape, scalar.data), kind.element_ty)

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
    _check_limits(wide, a.dtype, operation.__name__)


def _check_limits(wide: Any, dtype: Any, operation: str) -> None:
    limits = np.iinfo(dtype)
    assert limits.min <= wide.min() and wide.max() <= limits.max, f"{dtype} overflow in {operation}"


class _Patched:
    """Put the interpreter's functions in the place of Triton's language for a kernel, once a launch.

    The interpreter (3.6, 3.9) does it again for every function that a kernel calls, a quarter of the time of
    attention's tests.
    """

    def __init__(self, patch: Any) -> None:
        self.patch, self._done, self._modules = patch, set[Any](), dict[Any, Any]()

    def __call__(self, function: Any) -> Any:
        if function not in self._modules:
            names = function.__globals__.values()
            self._modules[function] = frozenset(one.__name__ for one in names if inspect.ismodule(one))
        if self._modules[function] in self._done:
            # of a call within a kernel, which restores nothing
            return None
        scope = self.patch(function)
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
    """Types of blocks, each made once, by element and sizes; with their sizes as numbers, for `_sizes`."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def wrapper(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element_ty.name, sizes)
        if key not in known:
            init(self, element_ty, shape)
            self.sizes = sizes
            known[key] = vars(self).copy()
        else:
            vars(self).update(known[key])

    return wrapper


def _sizes(type: Any) -> tuple[int, ...]:
    """The sizes of a block's type, () of a number's; Triton's own tuple is slow to compare."""
    if not type.is_block():
        return ()
    return type.sizes if hasattr(type, "sizes") else tuple(type.shape)


def _of_tensors(init: Any) -> Any:
    """Properties of a tensor that follow from its type, computed once for each type."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def wrapper(self: Any, handle: Any, type: Any) -> None:
        sizes = _sizes(type)
        if sizes not in known:
            init(self, handle, type)
            known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return wrapper


def _of_handles(init: Any, pointer_type: type) -> Any:
    """Data that is of its type's size, or of a pointer, needs no further look."""
    widths: dict[str, int] = {}

    def wrapper(self: Any, data: Any, dtype: Any) -> None:
        if type(dtype) is not pointer_type:
            if dtype.name not in widths:
                widths[dtype.name] = max(1, dtype.primitive_bitwidth // 8)
            if data.itemsize > widths[dtype.name]:
                init(self, data, dtype)
        self.data, self.dtype, self.attr = data, dtype, {}

    return wrapper


def _of_plain_values(unwrap: Any, tensor: type) -> Any:
    """A value without constexpr is returned at once."""
    plain = {tensor, int, float, bool, str, type(None)}

    def wrapper(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    return wrapper


def _as_it_is(convert: Any, interpreted: type) -> Any:
    """The interpreter's own type of a block is the block's type."""

    def wrapper(self: Any, builder: Any) -> Any:
        if not isinstance(builder, interpreted):
            return convert(self, builder)
        self.element_ty.to_ir(builder)
        return self

    return wrapper


def _builtins(core: Any, patch: Any) -> Any:
    """Triton's functions with the interpreter's semantics: found once, not in every launch, and called directly."""
    names: dict[Any, list[str]] = {}
    bound: dict[tuple[Any, Any], Any] = {}
    checked = core.builtin(lambda: None).__code__

    def bind(member: Any, semantic: Any) -> Any:
        # of a builtin, what asks whether _semantic is given is passed by
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        return call

    def wrapper(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        semantic = sys.modules["triton.runtime.interpreter"].TritonSemantic(builder)  # type: ignore[attr-defined]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):
                if (member, builder) not in bound:
                    bound[member, builder] = bind(member, semantic)
                scope.set_attr(package, name, bound[member, builder])

    return wrapper


def _broadcast(interpreter: Any, broadcast: Any) -> Any:
    """Two tensors in one shape: those that have it already, a scalar and a block, and blocks with axes of 1."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle

    def filled(scalar: Any, block: Any) -> Any:
        # of the data's type, which for comparisons is not the handle's: see _of_its_type
        data = np.full(tuple(block.type.shape), scalar.handle.data)
        return core.tensor(handle(data, scalar.handle.dtype.scalar), core.block_type(scalar.dtype, block.type.shape))

    def spread(tensor: Any, shape: tuple[int, ...]) -> Any:
        data = np.broadcast_to(tensor.handle.data, shape)
        return core.tensor(handle(data, tensor.handle.dtype.scalar), core.block_type(tensor.dtype, list(shape)))

    def wrapper(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if not left or not right:
            if left:
                return lhs, filled(rhs, lhs)
            return (filled(lhs, rhs), rhs) if right else (lhs, rhs)
        a, b = tuple(lhs.type.shape), tuple(rhs.type.shape)
        if a == b:
            return lhs, rhs
        if len(a) != len(b) or any(1 not in (m, n) and m != n for m, n in zip(a, b, strict=True)):
            return broadcast(self, lhs, rhs)
        shape = tuple([n if m == 1 else m for m, n in zip(a, b, strict=True)])
        return lhs if a == shape else spread(lhs, shape), rhs if b == shape else spread(rhs, shape)

    return wrapper


def _of_one_type(interpreter: Any, check: Any, broadcast: Any) -> Any:
    """Operands that need no promotion: of one type, one of float32 or int32 and a number, a pointer and an integer."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle

    def constant(number: Any, tensor: Any) -> Any:
        """The number in the tensor's type, or as it is where more happens to it."""
        kind, name = type(number), tensor.dtype.name
        small = kind is int and -(2**31) <= number < 2**31
        if not (name == "fp32" and (small or kind is float)) and not (name == "int32" and small):
            return number
        # zeros lose their sign in the interpreter too
        data = np.array([number or 0], dtype=interpreter._get_np_dtype(tensor.dtype))
        return core.tensor(handle(data, tensor.dtype), tensor.dtype)

    def agree(a: Any, b: Any, pointers: tuple[bool, bool], divides: bool) -> bool:
        if type(a) is core.dtype and type(b) is core.dtype:
            return a.name == b.name and not (divides and a.name in ("fp16", "bf16"))
        if type(b) is core.dtype:
            return pointers[0] and type(a) is core.pointer_type and b.is_int()
        return pointers[1] and type(a) is core.dtype and type(b) is core.pointer_type and a.is_int()

    def wrapper(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        a, b = lhs, rhs
        if arithmetic_check and type(a) is not core.tensor and type(b) is core.tensor:
            a = constant(a, b)
        elif arithmetic_check and type(a) is core.tensor and type(b) is not core.tensor:
            b = constant(b, a)
        of_tensors = type(a) is core.tensor and type(b) is core.tensor
        if of_tensors and agree(a.dtype, b.dtype, (allow_lhs_ptr, allow_rhs_ptr), div_or_mod):
            return broadcast(self, a, b)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return wrapper


def _of_numbers(interpreter: Any, original: Any, operation: Any) -> Any:
    """Sums and products of float32 and of integers of 32 and 64 bits, as numpy works them out; all else as it was."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor, name = core.tensor, original.__name__
    # the type of the result, by the operands' types
    results = {
        ("fp32", "fp32"): core.float32,
        ("int32", "int32"): core.int32,
        ("int64", "int64"): core.int64,
        ("int32", "int64"): core.int64,
        ("int64", "int32"): core.int64,
    }
    numbers: dict[tuple[str, type, Any], Any] = {}

    def constant(number: Any, of: str) -> Any:
        """The number as an array of the tensor's type; None where Triton has more to say to it."""
        kind = type(number)
        if not (kind is int and -(2**31) <= number < 2**31) and not (kind is float and of == "fp32"):
            return None
        key = (of, kind, number)
        if key not in numbers:
            # zeros lose their sign in the interpreter too
            numbers[key] = np.array([number or 0], dtype=interpreter._get_np_dtype(results[of, of]))
        return numbers[key]

    @functools.wraps(original)
    def wrapper(self: Any, lhs: Any, rhs: Any, sanitize_overflow: bool) -> Any:
        like = lhs if type(lhs) is tensor else rhs
        left = lhs.dtype.name if type(lhs) is tensor else like.dtype.name
        right = rhs.dtype.name if type(rhs) is tensor else left
        dtype = results.get((left, right))
        if dtype is None:
            return original(self, lhs, rhs, sanitize_overflow)
        x = lhs.handle.data if like is lhs else constant(lhs, left)
        y = rhs.handle.data if type(rhs) is tensor else constant(rhs, left)
        if x is None or y is None:
            return original(self, lhs, rhs, sanitize_overflow)
        if like is lhs and type(rhs) is tensor and rhs.type.is_block():
            if lhs.type.is_block() and x.ndim != y.ndim:
                return original(self, lhs, rhs, sanitize_overflow)
            like = rhs if not lhs.type.is_block() or y.size > x.size else lhs
        if dtype is core.int32 and sanitize_overflow:
            data = operation(x, y, dtype=np.int64)
            _check_limits(data, x.dtype, name)
            data = data.astype(np.int32)
        else:
            data = operation(x, y)
        kind = like.type
        if not kind.is_block():
            kind = dtype
        elif _sizes(kind) != data.shape or kind.element_ty.name != dtype.name:
            kind = core.block_type(dtype, list(data.shape))
        return tensor(handle(data, dtype), kind)

    return wrapper
