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
# the type of sums, products and what is compared, by the operands' types
_RESULTS = {
    ("fp32", "fp32"): "fp32",
    ("int32", "int32"): "int32",
    ("int64", "int64"): "int64",
    ("int32", "int64"): "int64",
    ("int64", "int32"): "int64",
}
_COMPARISONS = {
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


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
    blocks, constants = _Blocks(core), _Constants(interpreter)
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (interpreter, "_convert_float", _convert_as_torch_does),
        (builder, "create_dot", _dot_of_floats),
        (builder, "create_splat", lambda splat: _of_its_type(interpreter, splat)),
        (semantic, "binary_op_sanitize_overflow_impl", lambda _: _no_overflow),
        (semantic, "broadcast_impl_value", lambda _: broadcast),
        (semantic, "binary_op_type_checking_impl", lambda check: _of_one_type(interpreter, check, broadcast)),
        (semantic, "add", lambda add: _of_numbers(interpreter, add, np.add, blocks, constants)),
        (semantic, "sub", lambda sub: _of_numbers(interpreter, sub, np.subtract, blocks, constants)),
        (semantic, "mul", lambda mul: _of_numbers(interpreter, mul, np.multiply, blocks, constants)),
        *[
            (semantic, name, functools.partial(_compared, interpreter, compare, blocks))
            for name, compare in _COMPARISONS.items()
        ],
        (semantic, "and_", lambda both: _of_bools(interpreter, both, np.bitwise_and, blocks)),
        (semantic, "or_", lambda either: _of_bools(interpreter, either, np.bitwise_or, blocks)),
        (semantic, "where", lambda where: _selected(interpreter, where, blocks, constants)),
        (semantic, "expand_dims", lambda expand: _expanded(interpreter, expand, blocks)),
        (semantic, "to_tensor", lambda make: _of_values(interpreter, make)),
        (semantic, "cast", lambda cast: _cast(interpreter, cast, blocks)),
        (interpreter.TensorHandle, "__init__", lambda init: _of_handles(init, core.pointer_type)),
        (interpreter, "_get_np_dtype", _by_name),
        (interpreter, "_patch_builtin", lambda patch: _builtins(core, patch)),
        (core, "_type_for_tuple_values", lambda make: types_of_sizes(make, core.constexpr)),
        (core.dtype, "__eq__", _of_itself),
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
    low, high = _limits(dtype)
    least, most = (wide.item(), wide.item()) if wide.size == 1 else (wide.min(), wide.max())
    assert low <= least and most <= high, f"{dtype} overflow in {operation}"


@functools.cache
def _limits(dtype: Any) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


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


def types_of_sizes(make: Any, constexpr: type) -> Any:
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


class _Blocks:
    """Types of blocks by element and sizes, each made once."""

    def __init__(self, core: Any) -> None:
        self._core, self._known = core, dict[tuple[str, tuple[int, ...]], Any]()

    def __call__(self, element: Any, sizes: tuple[int, ...]) -> Any:
        key = (element.name, sizes)
        if key not in self._known:
            self._known[key] = self._core.block_type(element, list(sizes))
        return self._known[key]


class _Constants:
    """Numbers as arrays of a tensor's type; None where Triton has more to say to it."""

    def __init__(self, interpreter: Any) -> None:
        core = interpreter.tl.core
        self._of = {kind.name: interpreter._get_np_dtype(kind) for kind in (core.float32, core.int32, core.int64)}
        self._known = dict[tuple[str, type, Any], Any]()

    def __call__(self, number: Any, of: str) -> Any:
        kind = type(number)
        if of not in self._of or (
            not (kind is int and -(2**31) <= number < 2**31) and not (kind is float and of == "fp32")
        ):
            return None
        key = (of, kind, number)
        if key not in self._known:
            # zeros lose their sign in the interpreter too
            self._known[key] = np.array([number or 0], dtype=self._of[of])
        return self._known[key]


def _spread(*tensors: Any) -> bool:
    """True if numpy spreads the operands over one shape as Triton does: blocks of as many axes, and scalars."""
    axes = {one.handle.data.ndim for one in tensors if one.type.is_block()}
    return len(axes) < 2


def _of_numbers(interpreter: Any, original: Any, operation: Any, blocks: _Blocks, constants: _Constants) -> Any:
    """Sums and products of float32 and of integers of 32 and 64 bits, as numpy works them out, and pointers that move.

    All else is as it was.
    """
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor, name, widths = core.tensor, original.__name__, dict[str, int]()
    results = {of: getattr(core, {"fp32": "float32"}.get(kind, kind)) for of, kind in _RESULTS.items()}

    def moved(pointer: Any, offset: Any) -> Any:
        """A pointer and an offset of 32 or 64 bits; None where it is another one."""
        if type(offset) is not tensor:
            y, block = constants(offset, "int32"), False
        else:
            y, block = offset.handle.data, offset.type.is_block()
            if offset.dtype.name not in ("int32", "int64") or not _spread(pointer, offset):
                return None
        if y is None:
            return None
        kind = pointer.dtype
        if kind.name not in widths:
            widths[kind.name] = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
        data = pointer.handle.data + widths[kind.name] * y.astype(np.uint64)
        made = blocks(kind, data.shape) if block or pointer.type.is_block() else pointer.type
        return tensor(handle(data, pointer.handle.dtype), made)

    @functools.wraps(original)
    def wrapper(self: Any, lhs: Any, rhs: Any, sanitize_overflow: bool) -> Any:
        like = lhs if type(lhs) is tensor else rhs
        left = lhs.dtype.name if type(lhs) is tensor else like.dtype.name
        right = rhs.dtype.name if type(rhs) is tensor else left
        dtype = results.get((left, right))
        if dtype is None:
            made = None
            if name == "add" and like is lhs and type(lhs.dtype) is core.pointer_type:
                made = moved(lhs, rhs)
            return original(self, lhs, rhs, sanitize_overflow) if made is None else made
        x = lhs.handle.data if like is lhs else constants(lhs, left)
        y = rhs.handle.data if type(rhs) is tensor else constants(rhs, left)
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
            kind = blocks(dtype, data.shape)
        return tensor(handle(data, dtype), kind)

    return wrapper


def _compared(interpreter: Any, operation: Any, blocks: _Blocks, original: Any) -> Any:
    """Comparisons of float32 and of integers of 32 and 64 bits, as numpy makes them."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor = core.tensor
    results = {of: getattr(core, {"fp32": "float32"}.get(kind, kind)) for of, kind in _RESULTS.items()}

    def wrapper(self: Any, lhs: Any, rhs: Any) -> Any:
        if type(lhs) is not tensor or type(rhs) is not tensor:
            return original(self, lhs, rhs)
        dtype = results.get((lhs.dtype.name, rhs.dtype.name))
        if dtype is None or not _spread(lhs, rhs):
            return original(self, lhs, rhs)
        data = operation(lhs.handle.data, rhs.handle.data)
        block = lhs.type.is_block() or rhs.type.is_block()
        # the handle has the type of what was compared, as the interpreter's has: see _of_its_type
        return tensor(handle(data, dtype), blocks(core.int1, data.shape) if block else core.int1)

    return wrapper


def _of_bools(interpreter: Any, original: Any, operation: Any, blocks: _Blocks) -> Any:
    """Masks joined, as numpy does it."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor = core.tensor

    def wrapper(self: Any, lhs: Any, rhs: Any) -> Any:
        if type(lhs) is not tensor or type(rhs) is not tensor:
            return original(self, lhs, rhs)
        x, y = lhs.handle.data, rhs.handle.data
        bools = lhs.dtype.name == rhs.dtype.name == "int1" and x.dtype == y.dtype == np.bool_
        if not bools or not _spread(lhs, rhs):
            return original(self, lhs, rhs)
        data = operation(x, y)
        block = lhs.type.is_block() or rhs.type.is_block()
        return tensor(handle(data, lhs.handle.dtype.scalar), blocks(core.int1, data.shape) if block else core.int1)

    return wrapper


def _selected(interpreter: Any, original: Any, blocks: _Blocks, constants: _Constants) -> Any:
    """A choice by a mask between two tensors of one type, or a tensor and a number."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor = core.tensor

    def wrapper(self: Any, condition: Any, x: Any, y: Any) -> Any:
        tensors = [one for one in (condition, x, y) if type(one) is tensor]
        like = x if type(x) is tensor else y
        if type(condition) is not tensor or type(like) is not tensor or type(like.dtype) is not core.dtype:
            return original(self, condition, x, y)
        dtype, mask = like.dtype, condition.handle.data
        one = x.handle.data if type(x) is tensor else constants(x, dtype.name)
        other = y.handle.data if type(y) is tensor else constants(y, dtype.name)
        of_one_type = all(tensor.dtype.name == dtype.name for tensor in tensors[1:])
        if not of_one_type or condition.dtype.name != "int1" or mask.dtype != np.bool_ or not _spread(*tensors):
            return original(self, condition, x, y)
        if one is None or other is None or one.dtype != other.dtype:
            return original(self, condition, x, y)
        data = np.where(mask, one, other)
        block = any(tensor.type.is_block() for tensor in tensors)
        kind = y.handle.dtype.scalar if type(y) is tensor else dtype
        return tensor(handle(data, kind), blocks(dtype, data.shape) if block else dtype)

    return wrapper


def _expanded(interpreter: Any, original: Any, blocks: _Blocks) -> Any:
    """A block with an axis of 1 more."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle

    def wrapper(self: Any, x: Any, axis: int) -> Any:
        if not x.type.is_block() or not 0 <= axis <= x.handle.data.ndim:
            return original(self, x, axis)
        data = x.handle.data[(slice(None),) * axis + (None,)]
        return core.tensor(handle(data, x.handle.dtype.scalar), blocks(x.dtype, data.shape))

    return wrapper


def _of_values(interpreter: Any, make: Any) -> Any:
    """A tensor is one already; of a number the array is made once."""
    tensor, handle = interpreter.tl.core.tensor, interpreter.TensorHandle
    known: dict[tuple[type, Any], tuple[Any, Any]] = {}

    def wrapper(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is tensor:
            return value
        if kind is not int and kind is not float:
            return make(self, value, check_type)
        if (kind, value) not in known:
            made = make(self, value, check_type)
            known[kind, value] = made.handle.data, made.dtype
        data, dtype = known[kind, value]
        return tensor(handle(data, dtype), dtype)

    return wrapper


def _cast(interpreter: Any, original: Any, blocks: _Blocks) -> Any:
    """To the type that a tensor has already, and from 32 to 64 bits."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle

    def wrapper(self: Any, x: Any, dtype: Any, rounding: Any = None) -> Any:
        source, target = x.dtype.name, dtype.scalar.name
        if source == target:
            return x
        if source != "int32" or target != "int64" or rounding is not None:
            return original(self, x, dtype, rounding)
        data = x.handle.data.astype(np.int64)
        kind = blocks(core.int64, data.shape) if x.type.is_block() else core.int64
        return core.tensor(handle(data, core.int64), kind)

    return wrapper


def _of_itself(equal: Any) -> Any:
    """A type is equal to itself, which most comparisons are of."""

    def wrapper(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    return wrapper
