"""What ops over rows share on the host: the layout of leading dimensions, checks, keys and configurations.

A tensor [..., N] is seen as M rows of N columns. Nothing here copies: leading dimensions that have one common stride
are seen as one, up to three that do not are passed to the kernel with their strides, more than three are declined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops._triton as _triton
from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.tuned import Config

KERNEL_DTYPES = ("float32", "float16", "bfloat16")
# widest row that one program keeps in registers
ONE_PASS_COLUMNS = 32768
# columns a program takes at a time where the row is wider than that
LOOP_COLUMNS = 16384


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


def empty(x: Tensor, *_args: Any) -> Tensor:
    """The result for a tensor without elements."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def starter(launch: Launch, device: torch.device) -> Callable[..., None]:
    """The function that takes the kernel's positional arguments, tensors first, and launches it.

    It is for one signature: sizes, strides, dtypes and device are those of `launch`. What Triton then still has to
    find out on each call is whether the addresses are multiples of 16; where all are, the compiled kernel is called
    without Triton's own look-up, which is most of the cost of a launch.
    """
    tensors = sum(isinstance(value, Tensor) for value in launch.args)
    slow, options = launch.kernel[launch.grid], launch.options()
    if torch.compiler.is_compiling():
        return lambda *args: slow(*args, **options)
    fast: Callable[..., None] | None = None
    constants: list[Any] = []

    def start(*args: Any) -> None:
        nonlocal fast, constants
        addresses = 0
        for tensor in args[:tensors]:
            addresses |= tensor.data_ptr()
        if addresses % 16 != 0:
            slow(*args, **options)
        elif fast is not None:
            fast(*args, *constants)
        else:
            compiled = slow(*args, **options)
            # None in Triton's interpreter
            if compiled is not None:
                constants = [options[parameter.name] for parameter in launch.kernel.params[len(args) :]]
                fast = compiled[(*launch.grid, 1, 1)]

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
    if device != "cuda" and not (device == "cpu" and _triton.interpreted):
        return f"runs on a GPU; these tensors are on {device}"
    if grad:
        return "has no backward; a call that needs gradients runs in PyTorch"
    if dtype not in KERNEL_DTYPES:
        return f"takes {', '.join(KERNEL_DTYPES)}, not {dtype}"
    if dims > 3:
        return f"takes up to 3 leading dimensions without a common stride, not {dims}"
    return None


def kernel_reserved(device: str) -> str | None:
    """Why a Triton kernel that could take a call is not the default choice for it."""
    if device == "cpu":
        return "Triton's interpreter is for tests: it runs when forced or named"
    return None


@cache
def wave_size() -> int:
    """Threads a warp (NVIDIA) or wave (AMD) of the current device; 32 where there is none."""
    known = hardware.detect().known
    return known.wave_size if known is not None else 32


def blocks(columns: int, config: Config) -> dict[str, bool]:
    """The constants of a row kernel that follow from its column block."""
    return {"ONE_PASS": columns <= config["BLOCK_N"], "EVEN": columns % config["BLOCK_N"] == 0}


def row_config(columns: int, wave: int) -> Config:
    """A program a row, or several where rows are narrow; the row in registers up to ONE_PASS_COLUMNS.

    A thread has 16 elements of a narrow row, 32 of a wider one, and more before a program has more than 256 threads
    (512 for the widest of one pass): fewer threads reduce faster, and more programs fit beside each other. Chosen by
    a sweep on one H200 in bfloat16; the same numbers of threads are used where a wave is 64 wide.
    """
    block_n = 1 << max(0, columns - 1).bit_length()
    if block_n > ONE_PASS_COLUMNS:
        return Config(BLOCK_M=1, BLOCK_N=LOOP_COLUMNS, num_warps=512 // wave)
    block_m = min(16, max(1, 2048 // block_n))
    if block_n <= 2048:
        threads = block_m * block_n // 16
    else:
        # of the columns there are, not of the block: 5,120 columns are best with half of what 8,192 take
        threads = min(1 << (columns // 32).bit_length() - 1, 256 if block_n <= 16384 else 512)
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=max(1, threads // wave))


# columns (narrow with several rows a program, odd, common, widest of one pass, looped) that compile tests take
COMPILE_COLUMNS = (64, 1000, 4096, 16384, 32768, 65536)
