"""What ops over rows share on the host: the layout of leading dimensions, checks, keys and configurations.

A tensor [..., N] is seen as M rows of N columns. Nothing here copies: leading dimensions that have one common stride
are seen as one, up to three that do not are passed to the kernel with their strides, more than three are declined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops._ahead as _ahead
import wavecrest.ops._triton as _triton
from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.registry import Key, Op
from wavecrest.tuned import Config, Work

# above PyTorch (10) and the reference (0)
KERNEL_PRIORITY = 20
KERNEL_DTYPES = ("float32", "float16", "bfloat16")


# NVIDIA's architectures without programmatic dependent launch
BEFORE_OVERLAP = ("sm_80",)
# how early kernels start whose configuration does not say: a decode step of xLSTM 7B was 11 % longer with it, timed one
# after the other (H200, 2026-11-22)
EARLY = 0
# steps fetched ahead at most: the code grows with each
MOST_AHEAD = 16


class Launch(NamedTuple):
    """One kernel launch: `kernel[grid](*args, **options())`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    config: Config

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {**self.constants, **self.config.kwargs}


def attach_kernel(
    op: Op,
    bind: Callable[..., Callable[..., Any]],
    declines: Callable[..., str | None],
    reserves: Callable[..., str | None] = lambda *_args, **_kwargs: None,
    space: Callable[[Key, hardware.Arch], Iterable[Config]] | None = None,
    launches: Callable[..., list[Any]] | None = None,
    work: Callable[[Key, Config, hardware.Arch], tuple[Work, ...]] | None = None,
    optional: tuple[str, ...] = (),
) -> None:
    """Attach a Triton kernel to its op, by the function that binds it (see `registry.Backend` for all of them)."""

    def run(*args: Any, config: Config, **kwargs: Any) -> Any:
        return bind(*args, **kwargs, config=config)(*args, **kwargs)

    def reserved(x: Tensor, *args: Any, **kwargs: Any) -> str | None:
        if x.device.type == "cpu":
            return "Triton's interpreter and the emulator are for tests: they run when forced or named"
        return reserves(x, *args, **kwargs)

    op.attach(
        "triton",
        run,
        supports=declines,
        reserved=reserved,
        priority=KERNEL_PRIORITY,
        takes_config=True,
        bind=bind,
        space=space,
        launches=launches,
        work=work,
        optional=optional,
    )


def overlaps(arch: hardware.Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended (sm_90 and later)."""
    if arch is None or arch.vendor != "nvidia" or arch.name in BEFORE_OVERLAP or _triton.interpreted:
        return False
    # Inductor (torch 2.11) does not know the option
    return not torch.compiler.is_compiling()


def start_of(config: Config, arch: hardware.Arch | None) -> tuple[int, Config]:
    """How early a launch starts, and what it is launched with: `config` without EARLY.

    EARLY of a configuration: 0: behind the end of the launch before; 1: while that runs (programmatic dependent
    launch), and waits inside; 1 + n: and before it waits, has its first n steps brought to the L2 cache. It is 0 where
    kernels do not overlap.

    Raises:
        InvalidArgument: EARLY is below 0, or has more steps than `MOST_AHEAD`.
    """
    early = config.kwargs.get("EARLY", EARLY)
    if not 0 <= early <= 1 + MOST_AHEAD:
        raise InvalidArgument(f"EARLY is 0, 1, or 1 and up to {MOST_AHEAD} steps to fetch ahead, not {early}")
    options = {name: value for name, value in config.kwargs.items() if name != "EARLY"}
    if not overlaps(arch):
        early = 0
    return early, Config(**options, **({"launch_pdl": 1} if early else {}))


def empty(x: Tensor, *_args: Any) -> Tensor:
    """The result for a tensor without elements."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def starter(launch: Launch, device: torch.device, described: int = 0) -> Callable[..., None]:
    """The function that takes the kernel's positional arguments, tensors first, and launches it.

    The first `described` of them are tensor descriptors, whose addresses the caller knows to be multiples of 16.

    It is for one signature: sizes, strides, dtypes and device are those of `launch`. What Triton then still has to
    find out on each call is whether the addresses are multiples of 16; where all are, the compiled kernel is called
    without Triton's own look-up, which is most of the cost of a launch.

    In a pass of `_ahead.rehearse` the kernel is compiled for the arguments, and not launched.
    """
    tensors = described + sum(isinstance(value, Tensor) for value in launch.args)
    # not the launch itself: what is bound is kept, and would keep the tensors of the first call
    kernel, grid = launch.kernel, launch.grid
    slow, options = kernel[grid], launch.options()
    if torch.compiler.is_compiling():
        return lambda *args: slow(*args, **options)
    fast: Callable[..., None] | None = None
    constants: list[Any] = []
    under_way, rehearsed = _ahead.under_way.get, False

    def start(*args: Any) -> None:
        nonlocal fast, constants, rehearsed
        addresses = 0
        for tensor in args[described:tensors]:
            addresses |= tensor.data_ptr()
        ahead = under_way()
        if ahead is not None:
            # once is enough for the blocks of a model, which come here one after the other
            if not rehearsed:
                ahead.compile(kernel, grid, args, options)
                rehearsed = addresses % 16 == 0
        elif addresses % 16 != 0:
            slow(*args, **options)
        elif fast is not None:
            fast(*args, *constants)
        else:
            compiled = slow(*args, **options)
            # None in Triton's interpreter
            if compiled is not None:
                constants = [options[parameter.name] for parameter in kernel.params[len(args) :]]
                fast = compiled[(*grid, 1, 1)]

    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return start

    def guarded(*args: Any) -> None:
        # Triton launches on the current device, which need not be the tensors'
        with torch.cuda.device(device):
            start(*args)

    return guarded


class Layout(NamedTuple):
    """How tensors of the same leading shape are walked: `strides` holds three leading strides a tensor.

    `leading` is 1 (row i starts at i · strides[0]) or 3 (row i is split by size1 and size2).
    """

    rows: int
    leading: int
    size1: int
    size2: int
    strides: tuple[tuple[int, int, int], ...]


def _collapse(tensors: tuple[Tensor, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """The leading dimensions as (size, stride per tensor), those with one common stride merged."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(tensors[0].ndim - 1):
        size = tensors[0].shape[dim]
        if size == 1:
            continue
        strides = tuple(tensor.stride(dim) for tensor in tensors)
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims


def leading(*tensors: Tensor) -> int:
    """How many leading dimensions remain after merging (1 also for none): a kernel takes up to 3."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            return max(1, len(_collapse(tensors)))
    return 1


def layout(*tensors: Tensor) -> Layout:
    """The common layout of tensors with the same leading shape, which `leading` has found to be at most 3."""
    rows = 1
    for size in tensors[0].shape[:-1]:
        rows = rows * size
    if leading(*tensors) == 1:
        strides = tuple((_row_stride(tensor), 0, 0) for tensor in tensors)
        return Layout(rows, 1, 1, 1, strides)
    dims = _collapse(tensors)
    if len(dims) < 3:
        dims = [(1, tuple(0 for _ in tensors))] * (3 - len(dims)) + dims
    by_tensor = tuple((dims[0][1][i], dims[1][1][i], dims[2][1][i]) for i in range(len(tensors)))
    return Layout(rows, 3, dims[1][0], dims[2][0], by_tensor)


def _row_stride(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.shape[-1]
    # the innermost dimension that has more than one row gives the stride of all of them
    for dim in range(tensor.ndim - 2, -1, -1):
        if tensor.shape[dim] != 1:
            return tensor.stride(dim)
    return 0


def alignment(columns: int, *strides: tuple[int, ...]) -> int:
    """The largest power of two up to 16 that divides a row's columns and the strides between rows.

    Kernels take both in units of it: it decides how wide their accesses may be, and Triton by itself sees only
    whether a number is a multiple of 16. It is one of the few things that a kernel is compiled anew for.
    """
    for unit in (16, 8, 4, 2):
        if columns % unit == 0 and all(stride % unit == 0 for tensor in strides for stride in tensor):
            return unit
    return 1


# looks at what other programs of a row have published before a program works their share out by itself (a few ms);
# at least 1 where it is compiled, as triton 3.6 aborts on a loop that it knows not to run
PATIENCE = 1 << 14


def patience() -> int:
    """PATIENCE; 0 in the interpreter, which runs one program after another."""
    return 0 if _triton.interpreted else PATIENCE


def parts(columns: int, config: Config) -> int:
    """Over how many programs a row is split.

    Raises:
        InvalidArgument: several rows a program, and a row wider than it.
    """
    count = max(1, (columns + config["BLOCK_N"] - 1) // config["BLOCK_N"])
    if count > 1 and config["BLOCK_M"] != 1:
        raise InvalidArgument(f"a row of {columns} columns can be split only with one row a program, not by {config!r}")
    return count


def slots_shape(x: Tensor, config: Config, exchanges: int) -> tuple[int, ...] | None:
    """The shape of the zeros that split rows exchange through; None where rows are not split."""
    count = parts(x.shape[-1], config)
    return None if count == 1 else (row_count(x), exchanges, count)


def ceil_div(total: int, size: int) -> int:
    """How many pieces of `size` hold `total`."""
    return (total + size - 1) // size


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << max(0, number - 1).bit_length()


def row_count(x: Tensor) -> int:
    """The product of the leading sizes."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def widen(x: Tensor) -> Tensor:
    """float32, or float64 where the tensor has it: the precision of every reference."""
    return x if x.dtype == torch.float64 else x.float()


def check_rows(op: str, x: Any) -> None:
    """Raise InvalidArgument unless `x` is a floating-point tensor with at least one dimension."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{op}: takes a tensor, got {type(x).__name__}")
    if x.ndim == 0 or not x.dtype.is_floating_point:
        raise InvalidArgument(f"{op}: takes a floating-point tensor [..., N], got {x.dtype} {list(x.shape)}")


def check_vector(op: str, name: str, vector: Any, x: Tensor) -> None:
    """Raise InvalidArgument unless a weight or bias is a floating-point tensor [N] beside `x`."""
    if not isinstance(vector, Tensor) or vector.shape != x.shape[-1:] or not vector.dtype.is_floating_point:
        found = f"{vector.dtype} {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
        raise InvalidArgument(f"{op}: {name} must be a floating-point tensor [{x.shape[-1]}], got {found}")
    if vector.device != x.device:
        raise InvalidArgument(f"{op}: {name} is on {vector.device}, x on {x.device}")


def check_same(op: str, name: str, other: Any, x: Tensor) -> None:
    """Raise InvalidArgument unless `other` has the shape, dtype and device of `x`."""
    if not isinstance(other, Tensor) or other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        found = (
            f"{other.dtype} {list(other.shape)} on {other.device}"
            if isinstance(other, Tensor)
            else type(other).__name__
        )
        raise InvalidArgument(f"{op}: {name} must be {x.dtype} {list(x.shape)} on {x.device}, got {found}")


def check_eps(op: str, eps: Any) -> None:
    """Raise InvalidArgument unless `eps` is a number ≥ 0."""
    if not isinstance(eps, (float, int)) or not eps >= 0:
        raise InvalidArgument(f"{op}: eps must be a number of at least 0, got {eps!r}")


def kernel_refusal(dtype: str, device: str, dims: int, grad: bool) -> str | None:
    """Why a Triton row kernel does not take a call, from the parts of its key."""
    if _triton.unavailable is not None:
        return _triton.unavailable
    if device != "cuda" and not (device == "cpu" and (_triton.interpreted or _triton.emulated is not None)):
        return f"runs on a GPU; these tensors are on {device}"
    if grad:
        return "has no backward; a call that needs gradients runs in PyTorch"
    if dtype not in KERNEL_DTYPES:
        return f"takes {', '.join(KERNEL_DTYPES)}, not {dtype}"
    if dims > 3:
        return f"takes up to 3 leading dimensions without a common stride, not {dims}"
    return None


@cache
def _detected() -> hardware.Arch | None:
    return hardware.detect().known


_assumed: hardware.Arch | None = None


@contextmanager
def assumed(known: hardware.Arch) -> Iterator[None]:
    """`arch` is another inside, for what is said of a device that is not here; nothing can be launched for it."""
    global _assumed
    before, _assumed = _assumed, known
    try:
        yield
    finally:
        _assumed = before


def arch() -> hardware.Arch | None:
    """The architecture that kernels are made for: the emulated one, or the current GPU's; None where there is none."""
    if _assumed is not None:
        return _assumed
    if _triton.emulated is not None:
        return hardware.ARCHS[_triton.emulated]
    return _detected()


def wave_size() -> int:
    """Threads a warp (NVIDIA) or wave (AMD) of `arch`; 32 where there is none."""
    known = arch()
    return known.wave_size if known is not None else 32
