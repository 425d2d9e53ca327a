"""Shared by the tests of gemm and linear: a float64 oracle with its bound, a watch over memory, operands, layouts.

Not a test file: see `tests/ops/test_gemm.py` and `tests/ops/test_linear.py`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.op_harness import LARGEST, nearest_distance
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
I8, I32, E4M3, E5M2 = torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2
KERNELS = ("triton", "triton_stream_k", "triton_gemv")
BACKENDS = (*KERNELS, "torch", "reference")
SPLIT, PERSISTENT = {"SPLIT_K": 3}, {"PERSISTENT": 1}

# significant bits and smallest normal exponent of the floating-point results
_FLOATS = {F32: (24, -126), F16: (11, -14), BF16: (8, -126), F64: (53, -1022)}


# --- configurations


def tile(m: int = 16, n: int = 16, k: int = 32, **more: int) -> Config:
    """A configuration of the kernel over tiles: small tiles, not split."""
    values = {"GROUP_M": 2, "SPLIT_K": 1, "PERSISTENT": 0, "TMA": 0, "num_warps": 4, "num_stages": 2}
    return Config(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, **(values | more))


def stream(m: int = 16, n: int = 16, k: int = 32, group: int = 2, programs: int = 1) -> Config:
    """A configuration of stream-K: `programs` a compute unit."""
    return Config(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, PROGRAMS=programs, TMA=0, num_warps=4, num_stages=2)


def multiply(n: int = 16, k: int = 64, split: int = 1) -> Config:
    """A configuration of the kernel without matrix instructions."""
    return Config(BLOCK_N=n, BLOCK_K=k, SPLIT_K=split, num_warps=4, num_stages=2)


def fitted(config: Config | None, call: GemmCall) -> Config | None:
    """The configuration for a call: matrix instructions take 32 columns of an 8-bit a at least, of others 16."""
    if config is None or "BLOCK_M" not in config.kwargs or call.a.dtype.itemsize > 1:
        return config
    return Config(**(config.kwargs | {"BLOCK_K": max(32, config["BLOCK_K"])}))


def machine(monkeypatch: pytest.MonkeyPatch, units: int, xcds: int = 1) -> None:
    """Launches as for a GPU with `units` compute units and `xcds` dies."""
    arch = replace(ARCHS["gfx942"], compute_units=units, xcds=xcds)
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: arch)


# --- memory


class Watch:
    """Watch kernels in Triton's interpreter: they touch elements of their arguments alone; stores are counted.

    On a GPU nothing is watched: there `scripts/sanitize` does it.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, str]] = []
        self.stored: Counter[str] = Counter()
        # arguments that kernels may write to
        self.outputs: tuple[str, ...] = ("c_ptr", "part_ptr", "out_ptr", "digits_ptr")
        self.active = False

    def _enter(self, names: list[str], args: list[Any]) -> None:
        self.spans = []
        for name, arg in zip(names, args, strict=False):
            tensor = getattr(arg, "base", arg)
            if isinstance(tensor, Tensor) and tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                self.spans.append((start, start + (last + 1) * tensor.itemsize, name))

    def _spans_of(self, pointers: Any, mask: Any, size: int) -> list[str]:
        data = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        touched = data[np.broadcast_to(mask.data, data.shape).astype(bool)]
        if touched.size == 0:
            return []
        low, high = int(touched.min()), int(touched.max()) + size
        names = [name for start, end, name in self.spans if start <= low and high <= end]
        assert names, f"memory outside the arguments: {[(name, low - s, e - high) for s, e, name in self.spans]}"
        return names

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on."""
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is None or torch.cuda.is_available():
            return
        self.active = True
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

        def entered(this: Any, args: Any, kwargs: Any) -> Any:
            made = arguments(this, args, kwargs)
            self._enter(this.arg_names, made[0])
            return made

        def loaded(this: Any, pointers: Any, mask: Any, other: Any, *more: Any, **options: Any) -> Any:
            self._spans_of(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
            return load(this, pointers, mask, other, *more, **options)

        def kept(this: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            names = self._spans_of(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
            outputs = [name for name in names if name in self.outputs]
            assert outputs or not names, f"{names[0]} was written to"
            if outputs:
                self.stored[outputs[0]] += int(np.broadcast_to(mask.data, pointers.data.shape).sum())
            return store(this, pointers, value, mask, *more)

        monkeypatch.setattr(executor, "_init_args_hst", entered)
        monkeypatch.setattr(builder, "create_masked_load", loaded)
        monkeypatch.setattr(builder, "create_masked_store", kept)


def quicken(monkeypatch: pytest.MonkeyPatch, *, overflows: bool = False) -> None:
    """Let the interpreter (3.6) take less than half its time: it patches the language anew for each device function.

    `overflows`: go on to check each sum and product of integers for them, the other half.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or torch.cuda.is_available():
        return
    launch = interpreter.GridExecutor.__call__
    # the modules whose functions a launch has called already
    patched: set[int] = set()

    def launched(this: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(this, *args, **options)

    def called(this: Any, *args: Any, **options: Any) -> Any:
        module = id(this.fn.__globals__)
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(this.fn)
        return this.rewrite()(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=overflows))


def poison_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """conftest fills what is allocated with NaN; this fills int32 too, with a number that no sum here makes."""
    allocate = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        out = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("wavecrest"):
            out.fill_({I32: 0x5A5A5A5A, I8: -128}.get(out.dtype, float("nan")))
        return out

    monkeypatch.setattr(torch, "empty", empty)


def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """For a test: kernels in the interpreter touch their arguments alone; what is allocated holds no luck."""
    made = Watch()
    made.attach(monkeypatch)
    poison_integers(monkeypatch)
    quicken(monkeypatch)
    return made


# --- operands


def random(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu", seed: int = 0) -> Tensor:
    """Standard normal values, or integers of all sizes; the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    if dtype == I8:
        return torch.randint(-127, 128, shape, generator=generator, dtype=dtype).to(device)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).to(device)


def whole(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu", seed: int = 0) -> Tensor:
    """Small whole numbers, whose sums are exact whatever their order: for tests of where things are."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randint(-9, 10, shape, generator=generator).to(dtype).to(device)


def moved(x: Tensor, device: str) -> Tensor:
    """x on a device with the strides it has, which `Tensor.to` gives up where there are gaps between elements."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def scales(*shape: int, device: str = "cpu", seed: int = 0, size: float = 1.0) -> Tensor:
    """Positive float32 scales, up to eight times apart."""
    generator = torch.Generator().manual_seed(77 + seed)
    return (size * torch.exp2(torch.rand(shape, generator=generator) * 3 - 1.5)).to(device)


def wide(low: float, dtype: torch.dtype) -> float:
    """A size of scales that keeps products of 8-bit values near 1."""
    return low / 50 if dtype == I8 else low


# --- the oracle


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# from their papers' formulas, in float64
ACTIVATIONS: dict[str | None, Callable[[Tensor, float], Tensor]] = {
    None: lambda x, _slope: x,
    "relu": lambda x, _slope: torch.where(x.isnan(), x, x.clamp(min=0)),
    "leaky_relu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "silu": lambda x, _slope: x / (1 + torch.exp(-x)),
    "gelu": lambda x, _slope: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x, _slope: _gelu_tanh(x),
}
GATED = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
# no activation is steeper than this
STEEPEST = 1.2


def scaled_a(a: Tensor, scale: Tensor | None) -> Tensor:
    """a in float64, times its scale: for the tensor, a row of a, or 128 columns of it."""
    wide_a = a.double()
    if scale is None:
        return wide_a
    K, scale = a.shape[-1], scale.double()
    if scale.numel() == 1:
        return wide_a * scale.reshape(())
    rows = wide_a.reshape(math.prod(a.shape[:-1]), K)
    if scale.ndim == 1 or scale.shape[1] == 1:
        return (rows * scale.reshape(rows.shape[0], 1)).reshape(a.shape)
    return (rows * scale[:, torch.arange(K) // 128]).reshape(a.shape)


def normed_a(a: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a's rows in float64."""
    wide_a = a.double()
    return wide_a / torch.sqrt(wide_a.square().mean(-1, keepdim=True) + eps) * weight.double()


def scaled_b(b: Tensor, scale: Tensor | None, group: int = 0) -> Tensor:
    """b in float64, times its scale: for the tensor, a column, a block of 128 × 128, or `group` rows of a column."""
    if scale is None:
        return b.double()
    K, N = b.shape[-2:]
    scale = scale.double()
    if group:
        return b.double() * scale[torch.arange(K) // group]
    if scale.numel() == 1:
        return b.double() * scale.reshape(())
    if scale.ndim == 1 or scale.shape == (1, N):
        return b.double() * scale.reshape(1, N)
    return b.double() * scale[torch.arange(K) // 128][:, torch.arange(N) // 128]


def _cpu(call: GemmCall) -> GemmCall:
    return GemmCall(*(value.detach().cpu() if isinstance(value, Tensor) else value for value in call))


def oracle(
    call: GemmCall,
    b: Tensor | None = None,
    *,
    unit: float = 2.0**-24,
    sums: float = 2.0**-24,
    shrink: float = 0.0,
    step: float = 2.0**-24,
    norm: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The exact result of a call, and the error allowed before it is rounded; float64, on the CPU.

    `b` [..., K, N]: the values of a packed weight. `unit`, `sums` and `shrink`: see `numerics.product_bound`. `step`:
    half a unit in the last place of what each step after the product is rounded to. `norm`: half a unit of what rows
    are rounded to once they are normalised, which takes three roundings of float32 before: the mean square's root, and
    two products. That root rests on a sum of K squares, whose errors are one for the row: √K of half a unit, four times
    that as a limit, of which a root leaves half.
    """
    call = _cpu(call)
    normed = call.norm_weight is not None
    a = normed_a(call.a, call.norm_weight, call.norm_eps) if normed else scaled_a(call.a, call.scale_a)
    b = scaled_b(call.b, call.scale_b, call.group) if b is None else b.cpu()
    if call.tail is not None:
        b = torch.cat((b, call.tail.double()), dim=1)
    a = a[None] if call.a.ndim == 1 else a
    product = a @ b
    # and what float64 itself loses where products cancel
    slack = numerics.product_bound(a, b, unit=unit, sums=sums, shrink=shrink) + 2.0**-50 * (a.abs() @ b.abs())
    if normed and call.a.dtype != F64:
        slack = slack + 4 * (norm + 3 * 2.0**-24) * (a.square() @ b.square()).sqrt()
        slack = slack + (2 * a.shape[-1] ** 0.5 + 8) * 2.0**-24 * product.abs()
    slack = slack * abs(call.alpha)
    y = product * call.alpha
    size = y.abs()
    if call.bias is not None:
        bias = call.bias.double()
        along = bias if call.bias_along == "n" else bias.reshape(*(y.shape[:-1] if b.ndim == 2 else (-1,)), 1)
        y = y + along
        size = size + along.abs() + y.abs()
    slack = slack + 4 * step * size
    if call.activation in GATED:
        gate, up = y.chunk(2, -1)
        gate_slack, up_slack = slack.chunk(2, -1)
        gate = ACTIVATIONS[GATED[call.activation]](gate, call.slope)
        gate_slack = STEEPEST * gate_slack + 8 * step * (1 + gate.abs())
        y, slack = gate * up, gate_slack * (up.abs() + up_slack) + gate.abs() * up_slack
        slack = slack + 2 * step * y.abs()
    elif call.activation is not None:
        y = ACTIVATIONS[call.activation](y, call.slope)
        slack = STEEPEST * slack + 8 * step * (1 + y.abs())
    if call.residual is not None:
        residual = call.residual.double()
        y = y + (residual[None] if call.a.ndim == 1 else residual)
        slack = slack + 2 * step * y.abs()
    return (y[0], slack[0]) if call.a.ndim == 1 else (y, slack)


def half_unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of a type at values ≥ 0."""
    bits, smallest = _FLOATS[dtype]
    exponent = torch.frexp(value.nan_to_num(0.0, 0.0)).exponent.clamp(min=smallest + 1)
    return torch.ldexp(torch.ones_like(value), exponent - bits - 1)


def assert_near(got: Tensor, want: Tensor, slack: Tensor, out_scale: Tensor | None = None) -> None:
    """Not one element farther from the oracle than rounding once, beside `slack`; NaN and infinities where it has them.

    An 8-bit element is the nearest value, or one of the two nearest within `slack` of the middle between them.
    """
    got = got.detach().cpu()
    assert got.shape == want.shape, f"{list(got.shape)} for {list(want.shape)}"
    dtype = got.dtype
    if out_scale is not None:
        scale = out_scale.double().cpu().reshape(())
        want, slack = want / scale, slack / scale
        want = want.clamp(-LARGEST[dtype], LARGEST[dtype])
    values = got.float().double() if dtype.itemsize == 1 else got.double()
    if dtype == I8:
        assert not values[want.isnan()].any(), "a NaN is 0 in int8"
        values, want = values.masked_fill(want.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0)
    nan = want.isnan()
    assert torch.equal(values.isnan(), nan), "NaN elsewhere"
    infinite = want.isinf()
    assert torch.equal(values[infinite], want[infinite]), "infinities elsewhere"
    some = ~(nan | infinite)
    values, want, slack = values[some], want[some], slack[some].nan_to_num(0.0)
    if dtype.itemsize == 1:
        limit = nearest_distance(want, dtype) + 2 * slack + 1e-6 * want.abs()
    else:
        limit = half_unit(want.abs() + slack, dtype) + slack
    off = (values - want).abs()
    worst = int((off / limit).argmax()) if off.numel() else 0
    # a NaN is not below the limit
    assert bool((off <= limit).all()), (
        f"{int((~(off <= limit)).sum())} of {off.numel()} beyond the bound; {values[worst]} for {want[worst]}, "
        f"{off[worst] / limit[worst]:.3g} of it"
    )


def steps_of(backend: str, call: GemmCall) -> float:
    """Half a unit in the last place of a backend's values between its steps: float32's; PyTorch: of a's dtype."""
    if F64 in (call.a.dtype, call.b.dtype):
        return 2.0**-53
    if backend == "torch" and call.a.dtype in (E4M3, E5M2):
        return _step_after_float8(call)
    finished = call.alpha != 1.0 or out_dtype(call) != call.a.dtype
    finished |= any(value is not None for value in (*call[2:7], call.out_scale))
    if backend == "triton_hopper_epilogue" and finished:
        return float(2.0 ** -_FLOATS[call.a.dtype][0])
    if backend == "torch" and call.a.dtype in (F16, BF16) and (finished or call.a.is_cuda):
        return float(2.0 ** -_FLOATS[call.a.dtype][0])
    return 2.0**-24


def _step_after_float8(call: GemmCall) -> float:
    """PyTorch rounds its product to the result's dtype before what follows; to bfloat16 where it makes no other."""
    rows_and_columns = call.scale_a is not None and call.scale_a.numel() > 1
    inner = BF16 if rows_and_columns or out_dtype(call) not in _FLOATS else out_dtype(call)
    follows = call.alpha != 1.0 or inner != out_dtype(call)
    follows |= any(value is not None for value in (call.bias, call.residual, call.activation, call.out_scale))
    return float(2.0 ** -_FLOATS[inner][0]) if follows else 2.0**-24


def bound_of(backend: str, call: GemmCall) -> dict[str, float]:
    """How exact a backend is, for `oracle`."""
    step = steps_of(backend, call)
    if F64 in (call.a.dtype, call.b.dtype):
        return {"unit": 2.0**-52, "sums": 2.0**-52, "step": step}
    # sums of integers are exact, unless scales of blocks are part of them
    blocks = call.scale_a is not None and call.scale_a.ndim == 2 and call.scale_a.shape[1] > 1
    if call.scale_b is not None and call.scale_b.numel() > 1:
        blocks |= call.scale_b.shape not in ((call.b.shape[-1],), (1, call.b.shape[-1]))
    sums = unit = 0.0 if call.a.dtype == I8 and not blocks else 2.0**-24
    shrink = 0.0
    if call.a.dtype == F32:
        unit = numerics.PRODUCT_UNITS[call.precision]
    if call.a.is_cuda:
        # sm_90 keeps 14 bits of sums of 8-bit floats: of 128 products, unless more are asked for; PyTorch may add parts
        # of 16-bit products in their own type
        short, K = call.a.dtype in (E4M3, E5M2), call.a.shape[-1]
        alone = min(K, 128) if short and call.precision != "fast_accum" else K
        sums = 2.0**-13 * math.sqrt(alone / K) if short else max(sums, step)
        if call.a.dtype != I8 or blocks:
            bits = 8 if short else max(16, 8 * call.a.itemsize)
            shrink, _ = numerics.matrix_unit_shrink(alone, bits, call.precision)
    made = {"unit": unit, "sums": sums, "shrink": shrink, "step": step}
    if call.norm_weight is not None and backend in ("torch", "triton") and call.a.dtype != F32:
        # the row is rounded to a's dtype before it is multiplied
        made["norm"] = 2.0 ** -_FLOATS[call.a.dtype][0]
    return made


def copies(call: GemmCall) -> list[Any]:
    """The arguments' values, to see later that they were not written to."""
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in call]


def assert_unwritten(call: GemmCall, before: list[Any]) -> None:
    for name, value, kept in zip(GemmCall._fields, call, before, strict=True):
        if isinstance(value, Tensor):
            size = (
                torch.uint8 if value.itemsize == 1 else {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]
            )
            assert torch.equal(value.detach().contiguous().view(size), kept.contiguous().view(size)), f"{name} changed"


def out_dtype(call: GemmCall) -> torch.dtype:
    """The dtype that a call's result must have."""
    if call.out_dtype is not None:
        return call.out_dtype
    if call.a.dtype in _FLOATS:
        return call.a.dtype
    plain = call.alpha == 1.0 and all(value is None for value in (*call[2:7], call.out_scale))
    return I32 if call.a.dtype == I8 and plain else BF16


def out_shape(call: GemmCall) -> tuple[int, ...]:
    """The shape that a call's result must have."""
    N = call.b.shape[-1] // (2 if call.activation in GATED else 1)
    N += 0 if call.tail is None else call.tail.shape[-1]
    if call.b.ndim == 2:
        return (*call.a.shape[:-1], N)
    lead = torch.broadcast_shapes(call.a.shape[:-2], call.b.shape[:-2])  # type: ignore[no-untyped-call]
    return (*lead, call.a.shape[-2], N)


def assert_result(backend: str, got: Tensor, call: GemmCall, b: Tensor | None = None) -> None:
    """A result of a call: dtype, shape, layout and values."""
    assert got.dtype == out_dtype(call)
    assert tuple(got.shape) == out_shape(call)
    assert got.is_contiguous()
    if got.dtype == I32:
        flat = _cpu(call)
        assert torch.equal(got.cpu().long(), flat.a.long() @ flat.b.long())
        return
    want, slack = oracle(call, b, **bound_of(backend, call))
    assert_near(got, want, slack, call.out_scale)


def assert_right(
    backend: str, call: GemmCall, config: Config | None = None, watch: Watch | None = None, b: Tensor | None = None
) -> Tensor:
    """A backend's result for a call is right, each element written once, no argument written to."""
    before = copies(call)
    already = 0 if watch is None else watch.stored["c_ptr"]
    got = gemm.run(backend, call, config=fitted(config, call))
    if watch is not None and watch.active and backend in KERNELS:
        assert watch.stored["c_ptr"] - already == got.numel(), "elements written twice, or not at all"
    assert_result(backend, got, call, b)
    assert_unwritten(call, before)
    return got


def refuses(backend: str, call: GemmCall) -> str | None:
    """The reason why a backend refuses a call."""
    return gemm.backends[backend].refuse(call)


def takes(backend: str, call: GemmCall) -> bool:
    """Whether a backend takes a call that each takes on the CPU: on a GPU PyTorch's product of int8 has limits."""
    reason = refuses(backend, call)
    if reason is None:
        return True
    limited = call.M <= 16 or any(size == 0 or size % 8 != 0 for size in (call.K, call.columns))
    assert backend == "torch" and call.a.is_cuda and call.a.dtype == I8 and limited, reason
    return False


# --- calls

FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


INF, NAN = float("inf"), float("nan")


def configs(backend: str) -> tuple[Config | None, ...]:
    """A backend's own configuration, and those that take each of its paths."""
    own = (None,) if torch.cuda.is_available() else ()
    return {
        "triton": (*own, tile(16, 32, 32, **SPLIT)),
        "triton_stream_k": (stream(),),
        "triton_gemv": (multiply(), multiply(split=3)),
    }.get(backend, (None,))


def product(
    M: int, N: int, K: int, a: torch.dtype = BF16, b: torch.dtype | None = None, device: str = "cpu", **more: Any
) -> GemmCall:
    """a [M, K], and b the transpose of a weight [N, K]."""
    return GemmCall(random(M, K, dtype=a, device=device), random(N, K, dtype=b or a, device=device, seed=1).mT, **more)


def scaled(given: GemmCall, size: float = 0.1) -> GemmCall:
    """With one scale for a and one for b, of the size that is right for integers or floats."""
    device = given.a.device.type
    return given._replace(
        scale_a=scales(device=device, size=wide(size, given.a.dtype)),
        scale_b=scales(device=device, seed=1, size=wide(size, given.b.dtype)),
    )


def _out_scale(device: str) -> dict[str, Any]:
    return {"out_scale": torch.tensor(0.02, device=device)}


# id -> M, device, N, K -> a call
TYPES: dict[str, Callable[..., GemmCall]] = {
    "fp32": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d),
    "tf32": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d, precision="tf32"),
    "tf32x3": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d, precision="tf32x3"),
    "fp16": lambda m, d, n=37, k=75: product(m, n, k, F16, device=d),
    "bf16": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d),
    "bf16-fp32": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d, out_dtype=F32),
    "fp32-bf16": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d, out_dtype=BF16),
    "fp16-e4m3": lambda m, d, n=37, k=75: product(m, n, k, F16, device=d, out_dtype=E4M3, **_out_scale(d)),
    "bf16-int8": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d, out_dtype=I8, **_out_scale(d)),
    "fp64": lambda m, d, n=37, k=75: product(m, n, k, F64, device=d),
    "int8-int32": lambda m, d, n=37, k=75: product(m, n, k, I8, device=d),
    "int8-fp32-unscaled": lambda m, d, n=37, k=75: product(m, n, k, I8, device=d, out_dtype=F32),
    "int8": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d)),
    "int8-fp16": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=F16)),
    "int8-fp32": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=F32)),
    "int8-int8": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=I8, **_out_scale(d))),
    "e4m3": lambda m, d, n=37, k=75: scaled(product(m, n, k, E4M3, device=d)),
    "e4m3-unscaled": lambda m, d, n=37, k=75: product(m, n, k, E4M3, device=d, out_dtype=F32),
    "e5m2": lambda m, d, n=37, k=75: scaled(product(m, n, k, E5M2, device=d, out_dtype=F32)),
    "e4m3-e5m2": lambda m, d, n=37, k=75: scaled(product(m, n, k, E4M3, E5M2, device=d, out_dtype=F16)),
    "e5m2-e4m3": lambda m, d, n=37, k=75: scaled(
        product(m, n, k, E5M2, E4M3, device=d, out_dtype=E5M2, **_out_scale(d))
    ),
    "bf16-weight-int8": lambda m, d, n=37, k=75: product(m, n, k, BF16, I8, device=d),
    "fp16-weight-e5m2": lambda m, d, n=37, k=75: product(m, n, k, F16, E5M2, device=d),
    "fp32-weight-e4m3": lambda m, d, n=37, k=75: product(m, n, k, F32, E4M3, device=d),
}


def scale_of_a(kind: str, M: int, K: int, dtype: torch.dtype, device: str) -> Tensor | None:
    shape = {"tensor": (), "one": (1, 1), "vector": (M,), "column": (M, 1), "block": (M, -(-K // 128))}.get(kind)
    return None if shape is None else scales(*shape, device=device, seed=2, size=wide(0.1, dtype))


def scale_of_b(kind: str, N: int, K: int, dtype: torch.dtype, device: str) -> Tensor | None:
    blocks = (-(-K // 128), -(-N // 128))
    shape = {"tensor": (), "one": (1,), "vector": (N,), "row": (1, N), "block": blocks}.get(kind)
    return None if shape is None else scales(*shape, device=device, seed=3, size=wide(0.1, dtype))


# id -> a call whose strides the kernels do not walk
UNWALKED: dict[str, Callable[[str], GemmCall]] = {
    "a": lambda d: GemmCall(random(2, 1, 5, 20, device=d), random(2, 3, 20, 18, device=d)),
    "a-permuted": lambda d: GemmCall(random(3, 2, 5, 20, device=d).transpose(0, 1), random(2, 3, 20, 18, device=d)),
    "b": lambda d: GemmCall(random(2, 3, 5, 20, device=d), random(1, 3, 20, 18, device=d)),
    "b-sliced": lambda d: GemmCall(random(2, 3, 5, 20, device=d), random(2, 4, 20, 18, device=d)[:, 1:]),
    "residual": lambda d: GemmCall(
        random(2, 3, 5, 20, device=d), random(2, 3, 20, 18, device=d),
        residual=random(3, 2, 5, 18, device=d).transpose(0, 1),
    ),
    "residual-of-rows": lambda d: GemmCall(
        random(2, 3, 20, device=d), random(20, 18, device=d), residual=random(3, 2, 18, device=d).transpose(0, 1)
    ),
}  # fmt: skip


CLASSES: dict[str, dict[str, Any]] = {
    "bf16": {"a": BF16},
    "fp32": {"a": F32},
    "int8": {"a": I8, "out_dtype": BF16},
    "e4m3": {"a": E4M3, "out_dtype": F16},
}


# those that have a place in an epilogue's cases by turns
FINISHERS: tuple[tuple[str, Config | None], ...] = (
    ("triton", tile(16, 32, 32, SPLIT_K=2)),
    ("triton_stream_k", stream(16, 32, 16)),
    ("triton_gemv", multiply(32, 64)),
    ("triton", tile(16, 32, 32, **PERSISTENT)),
    ("triton_gemv", multiply(32, 32, split=2)),
)


def residual_of(kind: str, M: int, N: int, device: str) -> Tensor | None:
    """A residual of another dtype than the result's: transposed, one row for all, or every second column."""
    if kind == "none":
        return None
    if kind == "strided":
        return random(M, 2 * N + 3, dtype=F32, device=device, seed=5)[:, 3::2]
    if kind == "transposed":
        return random(N, M, dtype=F16, device=device, seed=5).t()
    return random(1, N, dtype=BF16, device=device, seed=5).expand(M, N)


SPECIAL_RUNS: tuple[tuple[str, Config | None], ...] = (
    ("triton", tile(16, 32, 32)),
    ("triton", tile(16, 32, 16, SPLIT_K=2)),
    ("triton_stream_k", stream(16, 32, 16)),
    ("triton_gemv", multiply(32, 32)),
    ("torch", None),
    ("reference", None),
)


def noted_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the launches of calls from now on are noted instead of run."""
    noted: list[Any] = []

    def note(launch: Any, _device: Any, num_descriptors: int = 0) -> Callable[..., None]:
        noted.append(launch)
        return lambda *_args: None

    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", note)
    return noted
