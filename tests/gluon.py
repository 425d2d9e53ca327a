"""Kernels in Gluon on a CPU: groups of warps are threads, tiles are tensors, products are made when waited for.

Triton interprets no Gluon. What is held here is what such a kernel does with tiles and barriers: which are copied where
and when, what is waited for, what may be written over. Layouts and the order in which hardware does things are not: a
product reads its operands when it is waited for, the latest that may be, and a copy is done at once, the earliest.
"""

from __future__ import annotations

import ast
import builtins
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wavecrest.ops.common import hopper as _hopper

# what the files of kernels import of each other
SHARED = Path(_hopper.__file__)
# seconds after which a barrier counts as one that nobody passes
PATIENCE = 20.0


class Barrier:
    """A barrier in shared memory: `count` arrivals and all announced bytes end a phase."""

    def __init__(self) -> None:
        self._changed, self._phases, self._count, self._missing, self._bytes = threading.Condition(), 0, 0, 0, 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, count: int = 1, announced: int = 0) -> None:
        with self._changed:
            assert self._missing >= count, "more arrivals than the barrier counts"
            self._missing -= count
            self._bytes += announced
            self._check()

    def landed(self, size: int) -> None:
        with self._changed:
            self._bytes -= size
            self._check()

    def _check(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._phases += 1
            self._missing = self._count
            self._changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._phases % 2 != int(parity), PATIENCE):
                raise TimeoutError("a barrier that nobody passes")


class Barriers:
    def __init__(self, number: int) -> None:
        self._all = [Barrier() for _ in range(number)]

    def index(self, place: Any) -> Barrier:
        return self._all[int(place)]


class Tile:
    """A tile in shared memory, NaN before something is copied or stored there."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, place: Any) -> Tile:
        return Tile(self.data[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        return Tile(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Tile:
        return Tile(self.data.permute(*order))

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.data.view(shape))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()


class Pointer:
    """Where a tensor begins, and what is `at` elements behind that."""

    def __init__(self, x: Tensor, at: Any = 0) -> None:
        self._x, self._at = x, at

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self._x.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        """The same address, of elements of another type."""
        begin = self._x.storage_offset() * self._x.itemsize
        words = torch.empty(0, dtype=dtype).set_(self._x.untyped_storage(), begin // dtype.itemsize, (1,), (1,))
        return Pointer(words, self._at)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self._x, self._at + offset)

    def _memory(self) -> Tensor:
        return self._x.as_strided((self._x.untyped_storage().nbytes() // self._x.itemsize,), (1,), 0)

    def load(self, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
        memory, at = self._memory(), torch.as_tensor(self._at + self._x.storage_offset())
        if mask is None:
            return memory[at]
        return torch.where(mask, memory[torch.where(mask, at, 0)], torch.tensor(other, dtype=memory.dtype))

    def store(self, value: Tensor, mask: Tensor) -> None:
        self._memory()[(self._at + self._x.storage_offset())[mask]] = value[mask]


class Descriptor:
    """A tensor that blocks are copied from and to; what is outside is 0, or not written."""

    def __init__(self, x: Tensor, block: list[int]) -> None:
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        size = x.itemsize
        for length in block:
            size *= length
        self.block_type = SimpleNamespace(nbytes=size, shape=block)

    def inside(self, coordinates: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor at coordinates, and where it is in the block."""
        starts = [int(one) for one in coordinates]
        lengths = [
            max(0, min(block, size - start))
            for start, block, size in zip(starts, self.block, self.x.shape, strict=True)
        ]
        there = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        return there, tuple(slice(0, length) for length in lengths)


def _load_tile(source: Descriptor, coordinates: Any, bar: Barrier, tile: Tile, pred: Any = True) -> None:
    if not pred:
        return
    there, here = source.inside(coordinates)
    block = torch.zeros(source.block, dtype=source.dtype)
    block[here] = source.x[there]
    tile.data.copy_(block.view(tile.data.shape))
    bar.landed(source.block_type.nbytes)


def _store_tile(target: Descriptor, coordinates: Any, tile: Tile) -> None:
    there, here = target.inside(coordinates)
    target.x[there] = tile.data.view(target.block)[here]


class _Sums:
    """An accumulator that products are added to when they are waited for."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.missing = value, 0

    def add(self, a: Tile | Tensor, b: Tile) -> None:
        self.value = self.value + a.data.float() @ b.data.float()
        self.missing -= 1


_OURS = threading.local()


def _multiply(a: Tile | Tensor, b: Tile, acc: Any, use_acc: bool = True, is_async: bool = False) -> _Sums:
    assert is_async
    made = acc if isinstance(acc, _Sums) else _Sums(acc)
    if not use_acc:
        made = _Sums(torch.zeros_like(made.value))
    made.missing += 1
    _OURS.waiting = [*getattr(_OURS, "waiting", []), lambda: made.add(a, b)]
    return made


def _multiplied(outstanding: int, deps: list[Any]) -> Any:
    while len(_OURS.waiting) > outstanding:
        _OURS.waiting.pop(0)()
    found = [one.value if isinstance(one, _Sums) and one.missing == 0 else one for one in deps]
    return found[0] if len(found) == 1 else found


def _allocate(dtype: torch.dtype, shape: list[int], _layout: Any) -> Any:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Tile(torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype))


def _bits(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Pointer):
        return x.to(dtype, True)
    # places have 64 bits here, and 32 there
    return (x.int() if x.dtype == torch.int64 and dtype == torch.float32 else x).view(dtype)


def _reduced(values: tuple[Tensor, ...], axis: int, combine: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One value of each dimension that is a power of two, in pairs."""
    while values[0].shape[axis] > 1:
        low, high = zip(*(x.chunk(2, axis) for x in values), strict=True)
        values = combine(*low, *high)
    return tuple(x.squeeze(axis) for x in values)


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], _warps: Any, _registers: Any) -> None:
    problems: list[BaseException] = []

    def run(work: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        except BaseException as error:  # of whatever kind, it is the test's to see
            problems.append(error)

    threads = [threading.Thread(target=run, args=one) for one in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        # the others wait for what stopped
        raise min(problems, key=lambda one: isinstance(one, TimeoutError))


class _Functional(ast.NodeTransformer):
    """x += y makes a new x there, and would change a tensor here; x.split() is of a last dimension of two, and
    x.to(type, bitcast=True) of the bits of x.

    No tensor has a layout here.
    """

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        assert isinstance(node.target, ast.Name)
        both = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, self.visit(node.value))
        return ast.copy_location(ast.Assign([node.target], both), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.copy_location(ast.Constant(None), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "split" and not node.args:
            return ast.copy_location(ast.Call(ast.Name("_halves", ast.Load()), [node.func.value], []), node)
        if isinstance(node.func, ast.Attribute) and [word.arg for word in node.keywords] == ["bitcast"]:
            return ast.copy_location(ast.Call(ast.Name("_bits", ast.Load()), [node.func.value, *node.args], []), node)
        return node


class Kernels:
    """The functions of a file of kernels, as this module runs them.

    `functions`: what it imports, in PyTorch. `planted`: of its text, what is replaced by what, for tests of tests.
    `beside`: another file of kernels, whose functions it has.
    """

    def __init__(
        self, path: Path, planted: Mapping[str, str] | None = None, *, beside: Path | None = None, **functions: Any
    ) -> None:
        self._place = SimpleNamespace(program=0, programs=1)
        self._names = self._language() | functions
        text = path.read_text(encoding="utf-8")
        for said, instead in (planted or {}).items():
            # no AssertionError, which tests of planted errors wait for
            if said not in text:
                raise ValueError(f"{path.name} does not say {said!r}")
            text = text.replace(said, instead)
        others = [SHARED] if beside is None else [SHARED, beside]
        for one, source in (*((other, other.read_text(encoding="utf-8")) for other in others), (path, text)):
            # what is imported is here already
            source = re.sub(r"^(from|import) wavecrest[^(\n]*(\([^)]*\))?\n", "", source, flags=re.MULTILINE)
            tree = ast.fix_missing_locations(_Functional().visit(ast.parse(source)))
            exec(compile(tree, str(one), "exec"), self._names)

    def run(self, kernel: str, programs: int, *args: Any, **constants: Any) -> None:
        """One program after the other."""
        self._place.programs = programs
        # what a kernel that failed was waiting for
        _OURS.waiting = []
        for self._place.program in range(programs):
            self._names[kernel](*args, **constants)

    def _language(self) -> dict[str, Any]:
        def number(x: Any) -> Tensor:
            return torch.as_tensor(x)

        def numbers(*ends: Any) -> Iterator[Tensor]:
            return map(number, builtins.range(*map(int, ends)))

        def layout(*_args: Any) -> None:
            return None

        barrier = SimpleNamespace(
            MBarrierLayout=layout, init=Barrier.init, arrive=Barrier.arrive, wait=Barrier.wait,
            expect=lambda bar, size, pred=True: bar.arrive(1, size) if pred else None,
        )  # fmt: skip
        gl = SimpleNamespace(
            constexpr=lambda x: x, static_range=builtins.range, int64=torch.int64, float32=torch.float32,
            NVMMADistributedLayout=layout, allocate_shared_memory=_allocate,
            program_id=lambda _axis: number(self._place.program),
            num_programs=lambda _axis: number(self._place.programs),
            minimum=lambda a, b: torch.minimum(number(a), number(b)),
            maximum=lambda a, b: torch.maximum(number(a), number(b)),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype), int8=torch.int8,
            convert_layout=lambda x, _layout, **_how: x, warp_specialize=_specialize, SliceLayout=layout,
            arange=lambda begin, end, layout=None: torch.arange(begin, end), load=Pointer.load, store=Pointer.store,
            expand_dims=Tensor.unsqueeze, DotOperandLayout=layout, DistributedLinearLayout=layout, int32=torch.int32,
            float16=torch.float16, bfloat16=torch.bfloat16, pointer_type=lambda dtype: dtype,
            join=lambda a, b: torch.stack((a, b), -1), reshape=Tensor.reshape, permute=Tensor.permute,
            SwizzledSharedLayout=layout, exp2=torch.exp2, max=lambda x, axis: x.amax(axis), rsqrt=torch.rsqrt,
            abs=torch.abs, BlockedLayout=layout, cdiv=lambda a, b: -(-a // b), log2=torch.log2, reduce=_reduced,
            sum=lambda x, axis: x.sum(axis),
            where=lambda *given: torch.where(given[0], *map(number, given[1:])),
            inline_asm_elementwise=lambda text, _constraints, args, _types, **_how: text(*args),
        )  # fmt: skip
        hopper = SimpleNamespace(
            mbarrier=barrier, fence_async_shared=layout, warpgroup_mma=_multiply, warpgroup_mma_wait=_multiplied,
            tma=SimpleNamespace(store_wait=layout),
        )  # fmt: skip
        gluon = SimpleNamespace(jit=lambda run=None, **_options: run if run is not None else lambda given: given)
        return {
            "gl": gl, "gluon": gluon, "hopper": hopper, "load_tile": _load_tile, "store_tile": _store_tile,
            "range": numbers, "_halves": lambda x: x.unbind(-1),
            "_bits": _bits, "thread_barrier": layout,
            "in_order": lambda tiles, _layout: tiles,
            "in_units": lambda tiles, *shape_and_layout: Tile(tiles.data.view(shape_and_layout[:-1])),
        }  # fmt: skip
