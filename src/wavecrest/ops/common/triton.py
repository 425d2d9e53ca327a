"""Triton, or a stand-in where it is not installed: the one place that knows the difference.

With the stand-in a kernel can be defined but not launched; `unavailable` is the reason every Triton backend gives.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, overload

from wavecrest import env
from wavecrest.errors import Unsupported

# why no kernel can be launched, or None
unavailable: str | None = None
# read when the kernels are defined, as Triton itself does
interpreted = env.get("TRITON_INTERPRET") == "1"
# the architecture whose machine code CPU tensors run as (set and unset by wavecrest.isa.emulate), or None
emulated: str | None = None
# workgroups that the emulator runs at a time
resident = 0

# why no kernel in Gluon can be launched, or None
no_gluon: str | None = None

if TYPE_CHECKING:
    import triton.language as tl
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    class triton:
        """Typed stub of the module triton: the part that the ops use."""

        __version__: str

        @overload
        @staticmethod
        def jit(function: Callable[..., Any], /) -> Any: ...
        @overload
        @staticmethod
        def jit(*, do_not_specialize: list[str]) -> Callable[[Callable[..., Any]], Any]: ...
        @staticmethod
        def jit(*_args: Any, **_options: Any) -> Any:
            """triton.jit"""

    # functions of it are decorated in the same way
    gluon = triton
else:

    class _Kernel:
        """Result of `@triton.jit` without Triton: it can be named, not launched."""

        def __getitem__(self, _grid: Any) -> NoReturn:
            raise Unsupported(str(unavailable or no_gluon))

    class _Module:
        """Stands for the modules triton and triton.language, and for those of Gluon."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            """A compile-time constant."""
            return value

        @staticmethod
        def jit(function: Any = None, **_options: Any) -> Any:
            """The decorator, with and without arguments."""
            return _Kernel() if function is not None else lambda _function: _Kernel()

    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        unavailable = f"triton is not importable ({error})"
        triton = tl = _Module()

    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
    except ImportError as error:
        no_gluon = unavailable or f"this Triton has no Gluon ({error})"
        gluon = gl = hopper = _Module()

if interpreted or unavailable is not None:

    @triton.jit
    def reciprocal(x):  # type: ignore[no-untyped-def]
        """1 / x, in the interpreter, which has no device libraries."""
        return 1.0 / x
else:
    from triton.language.extra import libdevice

    @triton.jit
    def reciprocal(x):  # type: ignore[no-untyped-def]
        """1 / x to about 1 unit in the last place of float32, 0 above 2^126.

        A division takes 5 instructions on sm_90 and 14 on gfx942, this 2 and 1 (triton 3.6).
        """
        return libdevice.fast_dividef(1.0, x)


# copies of tiles by descriptors, and a barrier: triton 3.6's names, or those of 3.9
load_tile: Any = None
store_tile: Any = None
# all warps of a group come to one place
thread_barrier: Any = None
# a product on matrix instructions of a warp
mma: Any = None
if no_gluon is None:
    from triton.experimental.gluon.language.nvidia import ampere

    mma = ampere.mma_v2
    load_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    store_tile = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
    thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

if no_gluon is None and hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def laid_out(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """A tile in shared memory as it lies there, by triton 3.9's name for it."""
        return tile.reinterpret(tile.dtype, [ROWS, COLUMNS], LAYOUT)

    @gluon.jit
    def in_units(tiles, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """Tiles in shared memory as more tiles of fewer rows, by triton 3.9's name for it."""
        return tiles.reinterpret(tiles.dtype, [NUMBER, ROWS, COLUMNS], LAYOUT)

    @gluon.jit
    def in_order(tiles, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """Tiles in shared memory, stored as one tensor, as tiles of a layout of their own."""
        return tiles.reinterpret(tiles.dtype, tiles.shape, LAYOUT)
else:

    @gluon.jit
    def laid_out(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """A tile in shared memory as it lies there."""
        return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], LAYOUT)

    @gluon.jit
    def in_units(tiles, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """Tiles in shared memory as more tiles of fewer rows."""
        return tiles._reinterpret(tiles.dtype, [NUMBER, ROWS, COLUMNS], LAYOUT)

    @gluon.jit
    def in_order(tiles, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
        """Tiles in shared memory, stored as one tensor, as tiles of a layout of their own."""
        return tiles._reinterpret(tiles.dtype, tiles.shape, LAYOUT)


# whether AMD's compiler takes attributes of LLVM's for a kernel: triton 3.8 and later
takes_attributes = False
if unavailable is None:
    try:
        from triton.backends.amd.compiler import HIPOptions
    except ImportError:
        # a build for another vendor
        pass
    else:
        takes_attributes = "llvm_fn_attrs" in HIPOptions.__dataclass_fields__


def without_accumulators() -> tuple[tuple[str, str], ...]:
    """The compiler's option by which a kernel for CDNA has vector registers alone, where it has one and needs it.

    LLVM of triton 3.8 and 3.9 shares the 256 registers of a wave out in halves, and kernels that multiply from all of
    them spill: gemm's for gfx950 169 and 112 registers, 2 without accumulation registers (2026-11-27, no record).
    """
    return (("llvm_fn_attrs", "amdgpu-agpr-alloc=0"),) if takes_attributes else ()


@contextmanager
def interpreted_launches() -> Iterator[list[None]]:
    """While it is open: an entry for each kernel, of anybody's, that runs in Triton's interpreter."""
    launches: list[None] = []
    if not interpreted:
        yield launches
        return
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        launches.append(None)
        return run(self, *args, **options)

    GridExecutor.__call__ = counted
    try:
        yield launches
    finally:
        GridExecutor.__call__ = run


def compiles_beside() -> Any:
    """Triton's class of a mode in which `warmup` of a kernel leaves compiling to threads; None where it has none."""
    return None if interpreted else getattr(triton, "AsyncCompileMode", None)


@functools.cache
def parse_in_turn() -> None:
    """Have Triton parse one kernel at a time, where Python's own parser fails in threads.

    Before Python 3.11.8 and 3.12.2 `ast.parse` in two threads may raise SystemError, "AST constructor recursion depth
    mismatch" (CPython issue 106905; seen with kernels compiled ahead under load, Python 3.11.7, 2026-11-25).
    """
    if sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12):
        return
    from triton.runtime import jit

    # before triton 3.5 one class
    kind = getattr(jit, "JITCallable", jit.JITFunction)
    parse, one_at_a_time = kind.parse, threading.Lock()

    def parsed(kernel: Any) -> Any:
        with one_at_a_time:
            return parse(kernel)

    kind.parse = parsed


def direct(compiled: Any, grid: tuple[int, ...], device: int | None) -> Callable[..., None]:
    """The function that launches a compiled kernel as `compiled[grid]` does, with addresses in place of tensors.

    It takes all of the kernel's parameters, constants too. Triton's launcher asks a tensor for its address and the
    driver whether the address is one of the device; it takes a number as it is. Unless a profiler has set hooks, the
    record made for them is left out.
    """
    from triton import knobs
    from triton.runtime import driver

    x, y, z = (*grid, 1, 1)[:3]
    with_hooks = compiled[x, y, z]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, hooks = driver.active.get_current_stream, knobs.runtime

    def start(*args: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # chains of functions; before triton 3.5 one function, or None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            with_hooks(*args)
        else:
            run(x, y, z, stream_of(device), function, metadata, None, None, None, *args)

    return start


def tile_descriptor(x: Any, block: list[int]) -> Any:
    """A tensor descriptor over x, which kernels in Gluon load blocks of `block` elements from, last one contiguous.

    The stride of a dimension of one element is never used, and any multiple of 16 bytes will do.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, _layout(tuple(block), x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: Any) -> Any:
    """The layout of a tile in shared memory; finding it takes more than half of the time to make a descriptor."""
    names = {"torch.float16": "float16", "torch.bfloat16": "bfloat16", "torch.float8_e4m3fn": "float8e4nv"}
    element = getattr(gl, names[str(dtype)])
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def descriptor(x: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A tensor descriptor over the memory of x, which kernels load blocks of `block` elements from."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, shape, strides, block)


__all__ = [
    "compiles_beside",
    "descriptor",
    "emulated",
    "gl",
    "gluon",
    "hopper",
    "interpreted",
    "interpreted_launches",
    "load_tile",
    "no_gluon",
    "parse_in_turn",
    "reciprocal",
    "resident",
    "store_tile",
    "thread_barrier",
    "tile_descriptor",
    "tl",
    "triton",
    "unavailable",
]
