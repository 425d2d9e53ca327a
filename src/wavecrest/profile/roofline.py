"""Least work of an op from its shapes, and how near to the roofline it ran.

Work is counted once per operand: 2·M·N·K for a GEMM, each tensor read or written once. The ceiling is the lower of
peak matrix throughput and memory bandwidth at the op's arithmetic intensity (Williams, Waterman, Patterson 2009), taken
from a measurement on the device if one was made, else from the vendor's datasheet.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.records import Ceilings

# the profiler's names of element types: bytes, and torch's dtype name
ELEMENTS: dict[str, tuple[int, str]] = {
    "double": (8, "float64"),
    "float": (4, "float32"),
    "c10::Half": (2, "float16"),
    "c10::BFloat16": (2, "bfloat16"),
    "c10::Float8_e4m3fn": (1, "float8_e4m3fn"),
    "c10::Float8_e4m3fnuz": (1, "float8_e4m3fnuz"),
    "c10::Float8_e5m2": (1, "float8_e5m2"),
    "c10::Float8_e5m2fnuz": (1, "float8_e5m2fnuz"),
    "long int": (8, "int64"),
    "int": (4, "int32"),
    "short int": (2, "int16"),
    "signed char": (1, "int8"),
    "unsigned char": (1, "uint8"),
    "bool": (1, "bool"),
}

# bytes of the last-level cache where its size is not known (MI300X: 256 MiB)
UNKNOWN_CACHE = 256 << 20
# time to spend on ceilings, roughly, s: a CPU's clock settles slowly
GPU_SECONDS, CPU_SECONDS = 0.5, 2.0

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a traced op: a tensor (`shape`, `strides`, `dtype` set) or a value as the profiler prints it."""

    shape: Shape | None = None
    strides: Shape = ()
    dtype: str = ""
    value: str = ""

    @property
    def numel(self) -> int:
        """Elements of a tensor."""
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 0 for a type the table does not know."""
        return ELEMENTS.get(self.dtype, (0, ""))[0]

    @property
    def bytes(self) -> int:
        """Bytes behind a tensor: expanded dimensions (stride 0) are stored once."""
        if self.shape is None:
            return 0
        if len(self.strides) != len(self.shape):
            return self.numel * self.element_bytes
        stored = math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0)
        return stored * self.element_bytes if self.numel else 0

    def ints(self) -> Shape:
        """A list of integers such as "[1, 1]"; empty if the profiler printed no list."""
        inner = self.value.strip("[]")
        return tuple(int(part) for part in inner.split(",")) if inner else ()


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one call.

    `matrix` says that the matrix units can do the FLOPs; only then does peak throughput bound the op. Pointwise work
    and reductions run elsewhere and are held to memory bandwidth alone.
    """

    flops: float
    bytes: float
    dtype: str
    matrix: bool


def _dtype(argument: Argument) -> str:
    return ELEMENTS.get(argument.dtype, (0, argument.dtype))[1]


def _product(a: Argument, b: Argument, out: int, inner: int, bias: Argument | None = None) -> Work:
    moved = a.bytes + b.bytes + out * a.element_bytes + (bias.bytes if bias is not None else 0)
    return Work(2.0 * out * inner, moved, _dtype(a), matrix=True)


def _matmul(a: Argument, b: Argument, bias: Argument | None = None) -> Work | None:
    if not a.shape or not b.shape or a.shape[-1] != b.shape[-min(2, len(b.shape))]:
        return None
    columns = b.shape[-1] if len(b.shape) > 1 else 1
    return _product(a, b, math.prod(a.shape[:-1]) * columns, a.shape[-1], bias)


def _linear(x: Argument, weight: Argument, bias: Argument | None = None) -> Work | None:
    if x.shape is None or weight.shape is None or len(weight.shape) != 2 or not x.shape:
        return None
    rows, (columns, inner) = math.prod(x.shape[:-1]), weight.shape
    return _product(x, weight, rows * columns, inner, bias) if x.shape[-1] == inner else None


def _attention(arguments: Sequence[Argument], causal_at: int) -> Work | None:
    """q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; `is_causal` is aligned upper-left, as in PyTorch."""
    q, k, v = arguments[:3]
    if q.shape is None or k.shape is None or v.shape is None or not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        return None
    (batch, heads, rows, width), keys, value_width = q.shape, k.shape[2], v.shape[3]
    causal = len(arguments) > causal_at and arguments[causal_at].value == "True"
    full = min(rows, keys)
    pairs = full * (full + 1) // 2 + (rows - full) * keys if causal else rows * keys
    flops = 2.0 * batch * heads * pairs * (width + value_width)
    moved = q.bytes + k.bytes + v.bytes + batch * heads * rows * value_width * q.element_bytes
    return Work(flops, moved, _dtype(q), matrix=True)


def _convolution(
    arguments: Sequence[Argument], stride_at: int, padding_at: int, transposed_at: int | None = None
) -> Work | None:
    """x [B, Cin, *spatial], weight [Cout, Cin / groups, *kernel]; a transposed convolution gives None."""
    x, weight = arguments[:2]
    dilation_at = max(stride_at, padding_at) + 1
    if x.shape is None or weight.shape is None or len(arguments) <= dilation_at or len(x.shape) != len(weight.shape):
        return None
    spatial, kernel = x.shape[2:], weight.shape[2:]
    if transposed_at is not None and arguments[transposed_at].value == "True":
        return None
    axes = zip(
        spatial,
        kernel,
        _axes(arguments[stride_at], len(kernel), 1),
        _axes(arguments[padding_at], len(kernel), 0),
        _axes(arguments[dilation_at], len(kernel), 1),
        strict=True,
    )
    out = [(size + 2 * pad - dilate * (taps - 1) - 1) // stride + 1 for size, taps, stride, pad, dilate in axes]
    written = x.shape[0] * weight.shape[0] * math.prod(out)
    return _product(x, weight, written, math.prod(weight.shape[1:]))


def _axes(argument: Argument, count: int, default: int) -> Shape:
    given = argument.ints()
    return given * count if len(given) == 1 else given if len(given) == count else (default,) * count


def _broadcast(tensors: Sequence[Argument]) -> int:
    shapes = [argument.shape for argument in tensors if argument.shape is not None]
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return math.prod(max(axis) for axis in zip(*padded, strict=True)) if padded else 0


def _rowwise(per_element: float) -> Callable[[Sequence[Argument]], Work | None]:
    """Reads its tensors and writes one like the first."""

    def rule(arguments: Sequence[Argument]) -> Work | None:
        x = arguments[0]
        if x.shape is None:
            return None
        moved = sum(a.bytes for a in arguments) + x.numel * x.element_bytes
        return Work(per_element * x.numel, moved, _dtype(x), matrix=False)

    return rule


def _tensors(arguments: Sequence[Argument]) -> list[Argument]:
    return [argument for argument in arguments if argument.shape is not None]


def _pointwise(arguments: Sequence[Argument]) -> Work | None:
    tensors = _tensors(arguments)
    if not tensors:
        return None
    written = _broadcast(tensors)
    # the result has the widest type, which for `where` and masks is not the first; a number, traced as a double without
    # dimensions, has no say
    sized = [argument for argument in tensors if argument.shape] or tensors
    widest = max(sized, key=lambda argument: argument.element_bytes)
    moved = sum(a.bytes for a in tensors) + written * widest.element_bytes
    return Work(written, moved, _dtype(widest), matrix=False)


def _copy(arguments: Sequence[Argument]) -> Work | None:
    out, source = arguments[:2]
    if out.shape is None or source.shape is None:
        return None
    return Work(0.0, out.bytes + source.bytes, _dtype(out), matrix=False)


def _moved_twice(arguments: Sequence[Argument]) -> Work | None:
    tensors = _tensors(arguments)
    if not tensors:
        return None
    return Work(0.0, 2.0 * sum(a.numel * a.element_bytes for a in tensors), _dtype(tensors[0]), matrix=False)


def _embedding(arguments: Sequence[Argument]) -> Work | None:
    table, indices = arguments[:2]
    if table.shape is None or indices.shape is None or len(table.shape) != 2:
        return None
    rows = indices.numel * table.shape[1] * table.element_bytes
    return Work(0.0, 2.0 * rows + indices.bytes, _dtype(table), matrix=False)


Rule = Callable[[Sequence[Argument]], Work | None]
_POINTWISE = (
    "add sub rsub mul div pow sqrt rsqrt exp log tanh sigmoid relu leaky_relu elu gelu silu mish softplus hardswish "
    "hardtanh clamp clamp_min clamp_max abs neg where masked_fill maximum minimum addcmul addcdiv lerp erf sin cos "
    "reciprocal square"
)
# per-element counts: layer norm 8 (mean 1, variance 3, normalise 2, affine 2), RMS norm 4, softmax 5
RULES: dict[str, Rule] = {
    **{f"aten::{name}{suffix}": _pointwise for name in _POINTWISE.split() for suffix in ("", "_")},
    "aten::mm": lambda a: _matmul(a[0], a[1]),
    "aten::mv": lambda a: _matmul(a[0], a[1]),
    "aten::bmm": lambda a: _matmul(a[0], a[1]),
    "aten::addmm": lambda a: _matmul(a[1], a[2], a[0]),
    "aten::addmv": lambda a: _matmul(a[1], a[2], a[0]),
    "aten::_addmm_activation": lambda a: _matmul(a[1], a[2], a[0]),
    "aten::baddbmm": lambda a: _matmul(a[1], a[2], a[0]),
    "aten::_int_mm": lambda a: _matmul(a[0], a[1]),
    "aten::_scaled_mm": lambda a: _matmul(a[0], a[1]),
    "aten::linear": lambda a: _linear(a[0], a[1], a[2] if len(a) > 2 else None),
    "aten::mkldnn_linear": lambda a: _linear(a[0], a[1], a[2] if len(a) > 2 else None),
    "mkldnn::_linear_pointwise": lambda a: _linear(a[0], a[1], a[2] if len(a) > 2 else None),
    # the second argument is packed; the third is the weight as it was
    "mkl::_mkl_linear": lambda a: _linear(a[0], a[2], a[3] if len(a) > 3 else None),
    "aten::scaled_dot_product_attention": lambda a: _attention(a, 5),
    "aten::_scaled_dot_product_flash_attention": lambda a: _attention(a, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda a: _attention(a, 4),
    "aten::_scaled_dot_product_efficient_attention": lambda a: _attention(a, 6),
    "aten::_scaled_dot_product_cudnn_attention": lambda a: _attention(a, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda a: _attention(a, 5),
    "aten::convolution": lambda a: _convolution(a, 3, 4, 6),
    "aten::_convolution": lambda a: _convolution(a, 3, 4, 6),
    "aten::mkldnn_convolution": lambda a: _convolution(a, 4, 3),
    "mkldnn::_convolution_pointwise": lambda a: _convolution(a, 4, 3),
    "aten::cudnn_convolution": lambda a: _convolution(a, 3, 2),
    "aten::miopen_convolution": lambda a: _convolution(a, 4, 3),
    "aten::native_layer_norm": _rowwise(8),
    "aten::native_group_norm": _rowwise(8),
    "aten::native_batch_norm": _rowwise(4),
    "aten::_native_batch_norm_legit_no_training": _rowwise(4),
    "aten::_fused_rms_norm": _rowwise(4),
    "aten::_softmax": _rowwise(5),
    "aten::_log_softmax": _rowwise(5),
    "aten::copy_": _copy,
    "aten::clone": _moved_twice,
    "aten::embedding": _embedding,
}


def work(op: str, arguments: Sequence[Argument]) -> Work | None:
    """The least work of a call, or None if the op, a shape or an element type is unknown.

    Args:
        op: the profiler's name of the op, such as "aten::addmm".
        arguments: as traced, in the order of the op's schema.
    """
    rule = RULES.get(op)
    if rule is None or any(a.shape is not None and a.dtype not in ELEMENTS for a in arguments):
        return None
    try:
        found = rule(arguments)
    except IndexError:
        # an op of another PyTorch version, with fewer arguments than the rule reads
        return None
    return found if found is not None and found.bytes > 0 else None


def placed(found: Work, ms: float, ceilings: Ceilings) -> tuple[float, Literal["compute", "memory", "cache"]] | None:
    """Percent of the roofline that one call of `ms` milliseconds reached, and which side bounds it.

    "cache" bounds a call that memory would, but that took less than its bytes take: the last-level cache may have held
    what it read, and may hold what it wrote. Returns None if the ceiling for the dtype is unknown.
    """
    if ms <= 0 or ceilings.bandwidth <= 0:
        return None
    memory_ms = found.bytes / (ceilings.bandwidth * 1e9) * 1e3
    compute_ms = 0.0
    if found.matrix:
        peak = ceilings.peak.get(found.dtype)
        if peak is None:
            return None
        compute_ms = found.flops / (peak * 1e12) * 1e3
    percent = 100.0 * max(compute_ms, memory_ms) / ms
    if compute_ms > memory_ms:
        return percent, "compute"
    least_ms = (found.bytes - 2 * ceilings.cache) / (ceilings.bandwidth * 1e9) * 1e3
    return percent, "cache" if least_ms < ms < memory_ms else "memory"


def cache_bytes(device: str) -> int:
    """The size of the last-level cache; the largest there is where it is not known."""
    import torch

    if device != "cpu":
        found = torch.cuda.get_device_properties(device)
        return UNKNOWN_CACHE if torch.version.hip else int(getattr(found, "L2_cache_size", UNKNOWN_CACHE))
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or UNKNOWN_CACHE
    except (ValueError, OSError):
        return UNKNOWN_CACHE


def datasheet(device: hardware.Device) -> Ceilings | None:
    """The vendor's figures for the device's architecture; None for the CPU and for architectures without a record."""
    arch = device.known
    if arch is None:
        return None
    dtypes = ["float32", "float16", "bfloat16"]
    if arch.fp8 is not None:
        dtypes.append(f"float8_{arch.fp8}")
    peak = {dtype: arch.peak(dtype) for dtype in dtypes}
    return Ceilings(source=f"{arch.source}, {arch.part}", bandwidth=arch.bandwidth, peak=peak, cache=UNKNOWN_CACHE)


def _best_seconds(call: Callable[[], Any], finish: Callable[[], None], budget: float) -> float:
    call()
    finish()
    best, spent = math.inf, 0.0
    while spent < budget or best == math.inf:
        begin = time.perf_counter()
        call()
        finish()
        taken = time.perf_counter() - begin
        best, spent = min(best, taken), spent + taken
    return best


def measure_ceilings(device: str, dtype: str = "float32", *, seconds: float | None = None) -> Ceilings:
    """Measure a large copy and a large square GEMM on this device: a ceiling that kernels can reach.

    Of float32 on NVIDIA, which has no matrix units for it, the ceiling is that of three products of tf32 for each.

    Args:
        device: a torch device name, "cpu" or "cuda:N".
        dtype: torch dtype name of the GEMM (float32 is measured too); random data, never zeros, since power draw
            and with it the clock depend on the data.
        seconds: time to spend, roughly; None takes GPU_SECONDS or CPU_SECONDS.

    Raises:
        InvalidArgument: `dtype` is not a floating dtype of torch that has a matrix product.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize < 2:
        raise InvalidArgument(f"measure_ceilings takes float16, bfloat16, float32 or float64, not {dtype!r}")
    on_gpu = torch.device(device).type != "cpu"

    def finish() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    dtypes = sorted({dtype, "float32"})
    share = (seconds or (GPU_SECONDS if on_gpu else CPU_SECONDS)) / (len(dtypes) + 1)
    with torch.no_grad():
        bandwidth = _best_copy(device, on_gpu, finish, share)
        peak = {name: _peak(device, getattr(torch, name), on_gpu, finish, share) for name in dtypes}
    return Ceilings(source="measured on this device", bandwidth=bandwidth, peak=peak, cache=cache_bytes(device))


def _best_copy(device: str, on_gpu: bool, finish: Callable[[], None], seconds: float) -> float:
    """GB/s, read and written bytes counted, of a copy larger than any last-level cache."""
    import torch

    # 256 MiB of MI300X, tens of MiB of a CPU
    source = torch.rand((512 if on_gpu else 96) * (1 << 20) // 4, device=device)
    target = torch.empty_like(source)
    taken = _best_seconds(lambda: target.copy_(source), finish, seconds)
    return 2 * source.numel() * source.element_size() / taken / 1e9


def _peak(device: str, dtype: Any, on_gpu: bool, finish: Callable[[], None], seconds: float) -> float:
    """TFLOP/s of products; of float32 on NVIDIA those of three products of tf32 for each, where that is more."""
    import torch

    if dtype != torch.float32 or not on_gpu or torch.version.hip is not None:
        return _best_product(device, dtype, on_gpu, finish, seconds)
    own = _best_product(device, dtype, on_gpu, finish, seconds / 2)
    # not torch.set_float32_matmul_precision: it raises where the user has set this one
    settings: Any = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        return max(own, _best_product(device, dtype, on_gpu, finish, seconds / 2) / 3)
    finally:
        settings.fp32_precision = before


def _best_product(device: str, dtype: Any, on_gpu: bool, finish: Callable[[], None], seconds: float) -> float:
    """TFLOP/s of the best square GEMM; grows the size while one call stays far below the time to spend."""
    import torch

    size, best = (2048 if on_gpu else 256), 0.0
    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        products = _products(a)
        taken = min(_best_seconds(product, finish, seconds / 4 / len(products)) for product in products)
        best = max(best, 2.0 * size**3 / taken / 1e12)
        # the next size takes eight times as long
        if taken * 8 > seconds / 4 or size >= 8192:
            return best
        size *= 2


def _products(a: Any) -> list[Callable[[], Any]]:
    """The ways to multiply a square matrix by one: PyTorch's, and on a CPU that of oneDNN, which a step may choose.

    On a CPU that MKL has no kernels of its own for, oneDNN reaches more: 0.46 against 0.21 TFLOP/s on two cores of an
    EPYC (2026-11-27, no record). By a ceiling of MKL's alone a gain that oneDNN gave was refused as impossible.
    """
    import torch

    found: list[Callable[[], Any]] = [lambda: a @ a]
    if a.device.type == "cpu" and hardware.onednn_multiplies(a.dtype):
        found.append(lambda: torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], ""))
    return found
