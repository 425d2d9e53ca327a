"""The op gemm: its key, cost and backends, and its public functions gemm and linear."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_gemv as _multiply
import wavecrest.ops._gemm.launch_hopper as _hopper
import wavecrest.ops._gemm.study.space as _space
import wavecrest.ops._gemm.study.work as _work
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, Operands, check
from wavecrest.ops._gemm.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._gemm.reference import reference, unpacked
from wavecrest.ops._gemm.study.bound import bound
from wavecrest.ops._gemm.study.cases import bench_cases, call_of_key, compile_cases, emulate_cases
from wavecrest.ops.packed import PackedWeight


def _cost(*args: Any) -> Cost:
    given = Operands(*args)
    products = (
        given.M * given.columns * given.K * given.batches if not given.flat else given.M * given.columns * given.K
    )
    some = (
        given.a, given.b, given.bias, given.scale_a, given.scale_b, given.residual, given.zero, given.norm_weight,
        given.tail,
    )  # fmt: skip
    read = sum(tensor.nbytes for tensor in some if tensor is not None)
    written = given.dtype.itemsize
    for size in given.shape:
        written = written * size
    return Cost(flops=2 * products, bytes=read + written)


def _inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """a [M, K], and b [K, N] as the transpose of a weight [N, K]."""
    if dtype == torch.int8:
        a, weight = (torch.randint(-127, 128, (rows, K), dtype=dtype, device=device) for rows in (M, N))
    else:
        a, weight = (torch.randn(rows, K, device=device).to(dtype) for rows in (M, N))
    return a, weight.mT


def _refusal(*args: Any) -> str | None:
    given = Operands(*args)
    for name, dtype in (("a", given.a.dtype), ("b", given.b.dtype), ("the result", given.dtype)):
        if dtype in _quantized.LARGEST and dtype != torch.int8:
            reason: str | None = _quantized.kernel_refusal(dtype)
            if reason is not None:
                return f"{name}: {reason}"
    wide = "bfloat16" if given.a.dtype.itemsize == 1 else str(given.a.dtype).removeprefix("torch.")
    grad = needs_grad(
        given.a, given.b, given.bias, given.scale_a, given.scale_b, given.residual, given.out_scale, given.norm_weight,
        given.tail,
    )  # fmt: skip
    reason = _checks.kernel_refusal(wide, given.a.device.type, 1, grad)
    if reason is None and given.dtype == torch.float64:
        reason = "makes no float64"
    if reason is None and given.norm_weight is not None and given.K == 0:
        reason = "normalises no row without elements"
    return reason or _launch.cannot_walk(given)


# below PyTorch's: a library's product is the default until a measured row says otherwise
PRIORITY = 5
TAILED = "has one dtype for all columns of b"


def _tile_refusal(*args: Any) -> str | None:
    given = Operands(*args)
    return _refusal(*args) or _launch.cannot_normalise(given) or (TAILED if given.tail is not None else None)


def _stream_refusal(*args: Any) -> str | None:
    given = Operands(*args)
    reason = "does not make gated activations" if given.activation in GATED else None
    if given.tail is not None:
        reason = TAILED
    if given.norm_weight is not None:
        reason = "does not normalise the rows of a, which no program has all of K of"
    return _refusal(*args) or reason or ("has no steps to share out: K is 0" if given.K == 0 else None)


def _multiply_refusal(*args: Any) -> str | None:
    return _refusal(*args) or _multiply.multiplies(Operands(*args))


def _hopper_refusal(*args: Any) -> str | None:
    return _refusal(*args) or _hopper.refusal(Operands(*args))


def _default(make: Callable[[_config.Shape, Arch | None], Config], key: Key) -> Config:
    return make(shape_of(key), _target.arch())


# name, what plans the launches, what refuses, configurations, what keeps it for calls that ask for it by name
_BACKENDS = (
    ("triton", _launch.tiles, _tile_refusal, _config.tiled),
    ("triton_stream_k", _launch.stream, _stream_refusal, _config.stream_k),
    ("triton_multiply", _multiply.multiply, _multiply_refusal, _config.multiplied),
)


def _reserved(name: str, *args: Any) -> str | None:
    if args[0].device.type == "cpu":
        return "Triton's interpreter and the emulator are for tests: they run when forced or named"
    if name != "triton" and not (name == "triton_multiply" and Operands(*args).tail is not None):
        return "runs where a measured row names it"
    return None


def _attach(
    op: Op,
    name: str,
    planner: _launch.Planner,
    refusal: Callable[..., str | None],
    make: Callable[[_config.Shape, Arch | None], Config],
) -> None:
    def bind(*args: Any, config: Config) -> Callable[..., Tensor]:
        return _launch.bind(planner, Operands, args, config)

    def looks_at_addresses(given: Operands, config: Config) -> bool:
        """True if each call has to: for descriptors, and for words that a weight may start inside of."""
        words = planner is _multiply.multiply and _multiply.reads_words(given)
        return words or _launch.with_descriptors(given, config)

    def run(*args: Any, config: Config) -> Tensor:
        if torch.compiler.is_compiling() and looks_at_addresses(Operands(*args), config):
            result: Tensor = _untraced(*args)
            return result
        return bind(*args, config=config)(*args)

    op.attach(
        name,
        run,
        supports=refusal,
        reserved=partial(_reserved, name),
        priority=PRIORITY,
        takes_config=True,
        bind=bind,
        default_config=partial(_default, make),
        space=partial(_space.space, name, make),
        launches=partial(_space.launches, planner),
        work=partial(_work.work, name),
        optional={"triton": ("CHAINS", "EARLY"), "triton_multiply": ("EARLY",)}.get(name, ()),
    )


def _hopper_bind(*args: Any, config: Config) -> Callable[..., Tensor]:
    portable = _launch.bind(_launch.tiles, Operands, args, _default(_config.tiled, key_of(Operands(*args))))
    return _hopper.bind(Operands, args, config, portable)


def _hopper_run(*args: Any, config: Config) -> Tensor:
    return _hopper_bind(*args, config=config)(*args)


def _hopper_launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    given = Operands(*args)
    if math.prod(given.shape) == 0:
        return []
    return [_hopper.launch(given, torch.empty(given.shape, dtype=given.dtype, device="meta"), config, arch)]


_op = LegacyOp(
    "gemm",
    reference=lambda *args: reference(Operands(*args)),
    check=lambda *args: check("gemm", Operands(*args)),
    key=lambda *args: key_of(Operands(*args)),
    key_fields=KEY_FIELDS,
    key_sizes=("rows", "columns", "k"),
    inputs=_inputs,
    sizes=("M", "N", "K"),
    cost=_cost,
    default_config=partial(_default, _config.tiled),
    compile_cases=compile_cases,
    bench_cases=bench_cases,
    emulate_cases=emulate_cases,
    call_of_key=call_of_key,
    example_dtypes=("float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"),
    unpacked=lambda *args: tuple(unpacked(Operands(*args))),
    bound=lambda *args: bound(Operands(*args)),
    op_class="gemm",
)
for _backend in _BACKENDS:
    _attach(_op, *_backend)
_op.attach(
    "triton_hopper",
    _hopper_run,
    supports=_hopper_refusal,
    reserved=partial(_reserved, "triton_hopper"),
    priority=PRIORITY,
    takes_config=True,
    bind=_hopper_bind,
    default_config=lambda _key: _hopper.default(),
    space=lambda _key, arch: _hopper.space(arch),
    launches=_hopper_launches,
    work=partial(_work.work, "triton_hopper"),
)


# calls that look at addresses, which Dynamo does not trace: a compiled graph calls the op as it is
@torch.library.custom_op("wavecrest::gemm", mutates_args=())
def _untraced(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out_scale: Tensor | None,
    alpha: float,
    slope: float,
    bias_along: str,
    precision: str,
    form: str,
    group: int,
    zero: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    tail: Tensor | None,
    overwrite_residual: bool,
) -> Tensor:
    # what a graph has in its residual is the graph's: it stays
    result: Tensor = _op(
        a, b, bias, scale_a, scale_b, residual, activation, out_dtype, out_scale, alpha, slope, bias_along, precision,
        form, group, zero, norm_weight, norm_eps, tail,
    )  # fmt: skip
    return result


@_untraced.register_fake
def _(*args: Any) -> Tensor:
    given = Operands(*args)
    return torch.empty(given.shape, dtype=given.dtype, device=given.a.device)


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    alpha: float = 1.0,
    slope: float = 0.01,
    bias_along: str = "n",
    precision: str = "ieee",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    overwrite_residual: bool = False,
) -> Tensor:
    """act(alpha · (scale_a · a) @ (scale_b · b) + bias) + residual: summed in float32, rounded once.

    Args:
        a: [..., M, K], any strides: float32, float16, bfloat16, float64, int8 or an 8-bit float.
        b: [K, N], or [..., K, N] for a batch of products; a's dtype. An 8-bit a takes any 8-bit float; a wider a takes
            an int8 or 8-bit b, which is then a weight stored in fewer bits.
        bias: [N] of any floating dtype, [M] with `bias_along` "m"; for gated activations of both halves.
        scale_a: float32 for 8-bit a: [] for the tensor, [M] or [M, 1] a row, or [M, ceil(K / 128)].
        scale_b: float32 for 8-bit b: [] for the tensor, [N] or [1, N] a column, or [ceil(K / 128), ceil(N / 128)].
        residual: of the result's shape, any floating dtype; added after the activation.
        activation: relu, leaky_relu (`slope` below 0), silu, gelu, gelu_tanh; or silu_and_mul, gelu_and_mul,
            gelu_tanh_and_mul: of the first N / 2 columns, times the others.
        out_dtype: of the result. None: a's; bfloat16 for 8-bit a; int32 for int8 where nothing is done to the sums.
        out_scale: float32 [], with an 8-bit `out_dtype`: the result is divided by it and saturates.
        alpha: a factor of the product.
        precision: of float32 products: "ieee", or "tf32": inputs of 10 mantissa bits or better, whatever the
            device has.
        norm_weight: [K] of any floating dtype: a / sqrt(mean(a²) + norm_eps) · norm_weight, of each row in float32
            (RMSNorm; Zhang and Sennrich, 2019), takes a's place. For a of 16 bits or more without scale_a, and one
            matrix b. Kernels over tiles and PyTorch round to a's dtype once before they multiply.
        norm_eps: added to the mean square, inside the root; at least 0.
        overwrite_residual: the caller needs the residual no more, and the result may be made in its memory. PyTorch's
            product is where it can be, in one pass less: a contiguous residual of the product's dtype and memory of
            its own, no bias, activation or gradient. Not inside torch.compile.

    Returns:
        A contiguous tensor [..., M, N] (N / 2 columns where gated); the residual where that was overwritten.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result: Tensor = _op(
        a, b, bias, scale_a, scale_b, residual, activation, out_dtype, out_scale, alpha, slope, bias_along, precision,
        "plain", 0, None, norm_weight, norm_eps, None, overwrite_residual,
    )  # fmt: skip
    return result


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    precision: str = "ieee",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    tail: Tensor | None = None,
    overwrite_residual: bool = False,
) -> Tensor:
    """act(x @ weightᵀ + bias) + residual: `gemm` with the weight of `nn.Linear`, plain or packed.

    Args:
        x: [..., K], any strides.
        weight: [N, K], any strides; or a `PackedWeight` (see `wavecrest.ops.packed`), which brings its scales.
        bias: [N] of any floating dtype.
        scale_x: float32 for 8-bit x, as `gemm`'s scale_a.
        scale_weight: float32 for a plain 8-bit weight: [], [N], [N, 1] or [ceil(N / 128), ceil(K / 128)].
        residual, activation, out_dtype, out_scale, precision, norm_weight, norm_eps, overwrite_residual: as for
            `gemm`.
        tail: [T, K] of x's dtype, behind a weight in 8 bits that has one scale or one a row: a few rows that are too
            sensitive to be stored in fewer bits, in the same launch where rows of x are few (up to 8). The bias is of
            N + T then; no gated activation, residual or 8-bit result.

    Returns:
        A contiguous tensor [..., N + T], T without a tail 0 (N / 2 columns where the activation is gated).

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result: Tensor = _op(
        *linear_operands(
            x, weight, bias, scale_x, scale_weight, residual, activation, out_dtype, out_scale, precision, norm_weight,
            norm_eps, tail, overwrite_residual,
        )
    )  # fmt: skip
    return result


def linear_operands(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    precision: str = "ieee",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    tail: Tensor | None = None,
    overwrite_residual: bool = False,
) -> tuple[Any, ...]:
    """The op's arguments for a call of `linear`, in their order (see `Operands`); raises as `linear` does."""
    form, group, zero = "plain", 0, None
    if isinstance(weight, PackedWeight):
        if scale_weight is not None:
            raise InvalidArgument("linear: a packed weight has its own scales; leave scale_weight out")
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"linear: x {found} and weight {list(weight.shape)} do not fit")
        form = weight.format if weight.format in ("shuffled", "int4") else "plain"
        if weight.scale is not None:
            scale_weight = weight.scale
            # one scale a row of the weight is a vector, whatever the group is called
            in_groups = weight.format == "int4" or (weight.format != "fp8_block" and weight.scale.shape[1] != 1)
            group = weight.group if in_groups else 0
            zero = None if weight.zero is None else weight.zero.mT
        weight = weight.stored
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidArgument(f"linear: weight must be a tensor [N, K], got {found}")
    scale_b = scale_weight
    if isinstance(scale_b, Tensor) and scale_b.ndim == 2:
        scale_b = scale_b.mT
    if tail is not None and (not isinstance(tail, Tensor) or isinstance(tail, PackedWeight) or tail.ndim != 2):
        raise InvalidArgument("linear: a tail is a plain tensor [T, K]")
    return (
        x, weight.mT, bias, scale_x, scale_b, residual, activation, out_dtype, out_scale, 1.0, 0.01, "n", precision,
        form, group, zero, norm_weight, norm_eps, None if tail is None else tail.mT, overwrite_residual,
    )  # fmt: skip
