"""Shared by the op tests: layouts, float64 oracles, comparison and the checks that hold for every op.

Not a test file: `tests/ops/test_row_kernel.py` has the cases that the ops of one kernel share, and
`tests/ops/test_<op>.py` those of its op.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import wavecrest
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.measure import numerics

BACKENDS = ("triton", "torch", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# rows, columns: one element, one row, below and above a power of two, several rows a program with a ragged end, and
# leading shapes of other ranks
SHAPES = ((1, 1), (1, 1000), (3, 127), (37, 64), (70, 33), (5, 1025), (7,), (2, 3, 40), (2, 1, 3, 96), (1, 2, 2, 2, 8))
WIDE = 65600


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    # the same shapes are asked for over and over: drawing takes longer than copying
    return (_drawn if math.prod(shape) <= 2**18 else _drawn.__wrapped__)(shape, dtype, device, seed).clone()


@functools.lru_cache(256)
def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator, dtype=dtype).to(device)
    # an offset, so that a mean that is left out shows
    return (torch.randn(shape, generator=generator) + 0.25).to(device=device, dtype=dtype)


def _transposed(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((n, 9), dtype, device, seed).t()


def _row_sliced(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((12, n + 5), dtype, device, seed)[2:11, 3 : n + 3]


def _column_step(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((9, 2 * n), dtype, device, seed)[:, ::2]


def _row_step(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((18, n), dtype, device, seed)[::2]


def _permuted_3d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, 4, n), dtype, device, seed).permute(1, 0, 2)


def _permuted_3d_last(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, n, 5), dtype, device, seed).permute(0, 2, 1)


def _permuted_4d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((2, 3, 4, n), dtype, device, seed).permute(2, 1, 0, 3)


def _sliced_4d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((4, 3, 5, n + 8), dtype, device, seed)[1:3, :, 1:5, :n]


def _expanded_rows(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((1, n), dtype, device, seed).expand(9, n)


def _expanded_middle(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, 1, n), dtype, device, seed).expand(3, 4, n)


def _expanded_columns(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((9, 1), dtype, device, seed).expand(9, n)


# id -> (dtype, device, seed, columns) giving a tensor whose last dimension has that many columns
LAYOUTS: dict[str, Callable[[torch.dtype, str, int, int], Tensor]] = {
    "transposed": _transposed,
    "row-sliced": _row_sliced,
    "column-step": _column_step,
    "row-step": _row_step,
    "permuted-3d": _permuted_3d,
    "permuted-3d-last": _permuted_3d_last,
    "permuted-4d": _permuted_4d,
    "sliced-4d": _sliced_4d,
    "expanded-rows": _expanded_rows,
    "expanded-middle": _expanded_middle,
    "expanded-columns": _expanded_columns,
}


def layout(key: str, dtype: torch.dtype, device: str, seed: int = 0, n: int = 72) -> Tensor:
    made = LAYOUTS[key](dtype, device, seed, n)
    assert made.shape[-1] == n
    assert not made.is_contiguous()
    return made


def _same_shape_pairs() -> list[tuple[str, str]]:
    shapes = {key: tuple(layout(key, torch.float32, "cpu").shape) for key in LAYOUTS}
    pairs = [(a, b) for a in LAYOUTS for b in LAYOUTS if shapes[a] == shapes[b]]
    return [(key, "contiguous") for key in LAYOUTS] + pairs


def second_layout(key: str, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` with the layout of a pair's second name."""
    if key == "contiguous":
        return random(tuple(like.shape), like.dtype, like.device.type, 1)
    return layout(key, like.dtype, like.device.type, 1)


def five_dims(dtype: torch.dtype, device: str, n: int = 24) -> Tensor:
    """Four leading dimensions without a common stride: more than the kernels take."""
    return random((2, 3, 2, 3, n), dtype, device).permute(3, 2, 1, 0, 4)


# (layout, layout of the second operand) for ops with two tensors of one shape
PAIRS = _same_shape_pairs()


def call_of(op: str, *args: Any, **kwargs: Any) -> Any:
    """The call that an op's public function makes of its arguments, unchecked."""
    public = getattr(ops, op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[public.__module__], "_run", registry.get(op).call_type)
        return public(*args, **kwargs)


def run(op: str, backend: str, *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
    """One backend's results for the arguments of the public function."""
    return registry.get(op).run(backend, call_of(op, *args, **kwargs), config=config)


def reference(op: str, *args: Any, **kwargs: Any) -> Any:
    """The op's definition for the arguments of the public function."""
    return registry.get(op).reference(call_of(op, *args, **kwargs))


def parameters(op: str) -> list[str]:
    """The arguments of a row op."""
    return [name for name in inspect.signature(getattr(ops, op)).parameters if name != "dim"]


def example(op: str, M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """The arguments of the public function for the op's example call."""
    call = registry.get(op).study.inputs(M, N, dtype, device)
    return tuple(value for value in call if isinstance(value, Tensor))


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# the columns of a group, and the largest values, from the types' specifications, not from what is tested
GROUP = 128
LARGEST = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2

# every op of the row kernel, with the options that choose a path in it: id -> (op, options by name). A static scale is
# given as True, and made to fit.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms_norm": ("rms_norm", {}),
    "layer_norm": ("layer_norm", {}),
    "softmax": ("softmax", {}),
    "add_rms_norm": ("add_rms_norm", {}),
    "add_layer_norm": ("add_layer_norm", {}),
    "post_layer_norm": ("post_layer_norm", {}),
    "quantize_int8-token": ("quantize_int8", {}),
    "quantize_int8-group": ("quantize_int8", {"granularity": "group"}),
    "quantize_int8-tensor": ("quantize_int8", {"granularity": "tensor"}),
    "quantize_int8-token-static": ("quantize_int8", {"scale": True}),
    "quantize_int8-tensor-static": ("quantize_int8", {"granularity": "tensor", "scale": True}),
    "quantize_fp8-token-e5m2": ("quantize_fp8", {"dtype": E5M2}),
    "quantize_fp8-group-e4m3fn": ("quantize_fp8", {"granularity": "group", "dtype": E4M3}),
    "quantize_fp8-tensor-e4m3fn": ("quantize_fp8", {"granularity": "tensor", "dtype": E4M3}),
    "quantize_fp8-group-static-e4m3fn": ("quantize_fp8", {"granularity": "group", "scale": True, "dtype": E4M3}),
    "dequantize-tensor": ("dequantize", {"granularity": "tensor"}),
    "dequantize-token": ("dequantize", {"granularity": "token"}),
    "dequantize-group": ("dequantize", {"granularity": "group"}),
    "rms_norm_quantize-token": ("rms_norm_quantize", {}),
    "rms_norm_quantize-group-e4m3fn": ("rms_norm_quantize", {"granularity": "group", "dtype": E4M3}),
    "rms_norm_quantize-tensor-static": ("rms_norm_quantize", {"granularity": "tensor", "scale": True}),
    "layer_norm_quantize-token-e5m2": ("layer_norm_quantize", {"dtype": E5M2}),
    "layer_norm_quantize-group": ("layer_norm_quantize", {"granularity": "group"}),
    "add_rms_norm_quantize-token-e4m3fn": ("add_rms_norm_quantize", {"dtype": E4M3}),
    "add_rms_norm_quantize-group": ("add_rms_norm_quantize", {"granularity": "group"}),
    "add_layer_norm_quantize-token": ("add_layer_norm_quantize", {}),
    "add_layer_norm_quantize-group-e4m3fn": ("add_layer_norm_quantize", {"granularity": "group", "dtype": E4M3}),
    "add_layer_norm_quantize-token-static": ("add_layer_norm_quantize", {"scale": True}),
}
# one of each op, for what does not depend on the options
ROW_OPS = {op: next(key for key, value in VARIANTS.items() if value[0] == op) for op, _ in VARIANTS.values()}


def scale_shape(shape: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    return (*shape[:-1], 1 if granularity == "token" else -(-shape[-1] // GROUP))


def some_scale(shape: tuple[int, ...], granularity: str, largest: float, device: str) -> Tensor:
    """Scales that let part of normally distributed values saturate."""
    generator = torch.Generator().manual_seed(11)
    return ((1.0 + torch.rand(scale_shape(shape, granularity), generator=generator)) / largest).to(device)


def arguments(
    variant: str, make: Callable[[torch.dtype, int], Tensor], dtype: torch.dtype, /, **given: Any
) -> tuple[Any, ...]:
    """The positional arguments of a variant. `make(dtype, seed)` gives tensors of x's shape; `given` goes first."""
    op, options = VARIANTS[variant]
    names = parameters(op)
    options = {**options, **given}
    granularity = options.get("granularity", "token")
    if op == "dequantize":
        q = options["q"] if "q" in options else make(options.get("eight", torch.int8), 0)
        device = q.device.type
        values = {"q": q, "scale": some_scale(tuple(q.shape), granularity, 1.0, device), "dtype": dtype}
    else:
        x = options["x"] if "x" in options else make(dtype, 0)
        device = x.device.type
        # drawn from a standard normal distribution with an offset, as x is: a factor or term that is left out shows
        values = {
            "x": x,
            "residual": make(dtype, 1) if "residual" in names and "residual" not in options else None,
            "weight": random((x.shape[-1],), dtype, device, 2),
            "bias": random((x.shape[-1],), dtype, device, 3),
            "eps": 1e-5,
            "dtype": torch.int8,
            "granularity": granularity,
            "scale": None,
        }
        if options.get("scale") is True:
            largest = LARGEST[options.get("dtype", torch.int8)]
            options["scale"] = some_scale(tuple(x.shape), granularity, largest, device)
    values.update({key: value for key, value in options.items() if key in names})
    return tuple(values[key] for key in names)


def by_name(op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    bound = inspect.signature(getattr(ops, op)).bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    return dict(bound.arguments)


def unrounded(op: str, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(y in float64, before it is rounded to a type; h, the sum with the residual in x's dtype, or x)."""
    x = values["x"]
    h = x
    if "residual" in values:
        wide = (tensor.double() if x.dtype == torch.float64 else tensor.float() for tensor in (x, values["residual"]))
        h = sum(wide).to(x.dtype)  # type: ignore[union-attr]
    base = op.removeprefix("add_").removeprefix("post_").removesuffix("_quantize")
    if base.startswith("quantize"):
        return h.double(), h
    return reference(base, h.double(), *[_widen(values[key]) for key in parameters(base)[1:]]), h


def spread(scale: Tensor, shape: tuple[int, ...], granularity: str) -> Tensor:
    """A scale as a tensor of the shape of what it scales."""
    if granularity != "group":
        return scale.expand(shape)
    columns = torch.arange(shape[-1], device=scale.device)
    return scale[..., columns // GROUP]


def peaks(y: Tensor, granularity: str) -> Tensor:
    """The largest |y| of each group."""
    if granularity == "tensor":
        return y.abs().max()
    width = GROUP if granularity == "group" else y.shape[-1]
    return torch.cat([part.abs().amax(-1, keepdim=True) for part in y.split(width, -1)], -1)


def expected_scale(y: Tensor, granularity: str, largest: float) -> Tensor:
    """The definition, group by group, in float64."""
    if y.numel() == 0:
        return torch.ones(scale_shape(tuple(y.shape), granularity), dtype=torch.float64, device=y.device)
    peak = peaks(y, granularity)
    return torch.where(peak == 0, 1.0, torch.where(peak / largest < 2.0**-126, 2.0**-126, peak / largest))


def assert_rounded(
    q: Tensor,
    scale: Tensor,
    y: Tensor,
    dtype: torch.dtype,
    granularity: str,
    static: Tensor | None,
    centred: bool,
    off: Tensor | None = None,
) -> None:
    """q and scale against their definition, on values y in float64.

    q must be a value of the type that is nearest to y / scale, but for what float32 has lost by then. `centred`: y is
    a difference, so that the loss is relative to its largest, not to each value. `off`: what each y may have lost
    beside that.
    """
    assert q.dtype == dtype and q.shape == y.shape
    largest = LARGEST[dtype]
    assert scale.dtype == torch.float32
    assert tuple(scale.shape) == scale_shape(tuple(y.shape), granularity)
    if static is not None:
        assert torch.equal(scale, static)
    else:
        want = expected_scale(y, granularity, largest)
        if off is not None and y.numel():
            # as near as float32's y may be to this one
            lost = peaks(off, granularity) / largest
            want = torch.where((scale.double() - want).abs() <= lost, scale.double(), want)
        torch.testing.assert_close(scale.double(), want, rtol=2e-6, atol=2e-45, equal_nan=True)
    scaled = (y / spread(scale.double(), tuple(y.shape), granularity)).clamp(-largest, largest)
    got = q.cpu().float().double()
    nan = scaled.isnan().cpu()
    if dtype == torch.int8:
        assert not got[nan].any(), "a NaN is 0 in int8"
    else:
        assert torch.equal(got.isnan(), nan), "a NaN stays where it is"
    got, want = got[~nan], scaled.cpu()[~nan]
    assert (got.abs() <= largest).all(), "outside the range of the type"
    distance = nearest_distance(want, dtype)
    slack = 1e-6 * want.abs() + (2e-6 * largest if centred else 0.0)
    if off is not None:
        slack += (off / spread(scale.double(), tuple(y.shape), granularity)).cpu()[~nan]
    worse = (got - want).abs() - distance - slack
    assert (worse <= 0).all(), f"off the nearest {dtype} by {worse.max()} of {largest}"


def nearest_distance(values: Tensor, dtype: torch.dtype) -> Tensor:
    """How far each value (float64) is from the nearest one that the type has."""
    if dtype == torch.int8:
        return (values - values.round()).abs()
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().double()
    table = codes[codes.isfinite()].unique()
    above = torch.searchsorted(table, values.contiguous()).clamp(1, table.numel() - 1)
    return torch.minimum((values - table[above - 1]).abs(), (values - table[above]).abs())


def check_results(op: str, results: tuple[Tensor, ...], values: dict[str, Any], contiguous: bool = True) -> None:
    """Hold the results of a call to float64: dtypes, shapes, values.

    `values`: its arguments by name. Float results are held to the tolerance of their dtype, 8-bit results to the
    nearest value, a sum with a residual and what dequantize makes to the last bit.
    """
    found = registry.get(op)
    if op == "dequantize":
        q, scale = values["q"], values["scale"]
        granularity = next(one for one in ("tensor", "token", "group") if scale.shape == scale_shape(q.shape, one))
        want = (q.float() * spread(scale, tuple(q.shape), granularity)).to(values["dtype"])
        assert results[0].dtype == values["dtype"] and results[0].shape == q.shape
        assert torch.equal(results[0].nan_to_num(7.0), want.nan_to_num(7.0))
    else:
        y, h = unrounded(op, values)
        # a sum that is a result
        if op.startswith("add_"):
            results, sum_of_both = results[:-1], results[-1]
            assert sum_of_both.dtype == h.dtype
            assert torch.equal(sum_of_both.isnan(), h.isnan()) and torch.equal(sum_of_both.nan_to_num(), h.nan_to_num())
            assert not contiguous or sum_of_both.is_contiguous()
        if found.op_class == "quantized":
            dtype = {"quantize_int8": torch.int8}.get(op) or values["dtype"]
            centred, bias, off = "layer" in op, values.get("bias"), None
            if bias is not None:
                # a row and a bias that nearly cancel: each is rounded before they are added
                off = 2.0**-22 * ((y - bias.double()).abs() + bias.double().abs())
            assert_rounded(*results, y, dtype, values["granularity"], values["scale"], centred, off)
        else:
            limits = numerics.tolerance(found.op_class, name(values["x"].dtype))
            assert results[0].dtype == values["x"].dtype
            compared = numerics.compare(results[0], y)
            assert compared.within(limits), f"{op}: {compared} outside {limits}"
    if contiguous:
        assert all(result.is_contiguous() for result in results)


def assert_variant(
    variant: str,
    backend: str,
    make: Callable[[torch.dtype, int], Tensor],
    dtype: torch.dtype,
    config: Config | None = None,
    /,
    **given: Any,
) -> tuple[Tensor, ...]:
    """A backend's results for a variant, right and without a trace in the arguments."""
    op, args = VARIANTS[variant][0], arguments(variant, make, dtype, **given)
    before = [value.clone() if isinstance(value, Tensor) else value for value in args]
    results = _tuple(run(op, backend, *args, config=config))
    check_results(op, results, by_name(op, args), contiguous=backend == "triton")
    if backend == "triton" and config is None and (args[0].is_cuda or dtype == torch.float32):
        _assert_bound_calls_agree(op, results, args)
    _assert_unwritten(args, before)
    return results


def _assert_unwritten(args: tuple[Any, ...], before: list[Any]) -> None:
    for value, kept in zip(args, before, strict=True):
        if isinstance(value, Tensor):
            assert same_bits(value, kept), "an argument was written to"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, whichever NaN a NaN is."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.element_size() == 1:
        a, b = a.float(), b.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def assert_matches(op: str, backend: str, *args: Any, **kwargs: Any) -> None:
    """The backend's results against the op's reference in float64, with x's dtype, contiguous."""
    found = registry.get(op)
    first = next(value for value in args if isinstance(value, Tensor))
    limits = numerics.tolerance(found.op_class, name(first.dtype))
    before = [value.clone() if isinstance(value, Tensor) else value for value in args]
    results = _tuple(run(op, backend, *args, **kwargs))
    oracle = _tuple(
        reference(op, *[_widen(value) for value in args], **{k: v for k, v in kwargs.items() if k != "config"})
    )
    assert len(results) == len(oracle)
    for index, (got, want) in enumerate(zip(results, oracle, strict=True)):
        assert got.dtype == first.dtype
        compared = numerics.compare(got, want)
        assert compared.within(limits), f"{op} by {backend}, result {index}: {compared} outside {limits}"
        if backend == "triton":
            assert got.is_contiguous()
    if backend == "triton" and not kwargs:
        _assert_bound_calls_agree(op, results, args)
    _assert_unwritten(args, before)


def _assert_bound_calls_agree(op: str, results: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
    """The dispatched call, which on a GPU skips Triton's look-up from the second time on, gives the same bits."""
    found, call = registry.get(op), call_of(op, *args)
    found.force("triton")
    for _ in range(3 if args[0].is_cuda else 1):
        for again, once in zip(_tuple(found(call)), results, strict=True):
            assert again.is_contiguous() and same_bits(again, once)
    found.force(None)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def assert_never_copies(op: str, monkeypatch: Any, *args: Any, **kwargs: Any) -> None:
    """The kernel path makes no copy of an input, whatever its strides."""
    assert_call_never_copies(registry.get(op), monkeypatch, call_of(op, *args, **kwargs))


def assert_call_never_copies(found: AnyOp, monkeypatch: Any, call: Any) -> None:
    """As `assert_never_copies`, of a call that was made already."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the input was copied")

    def contiguous(value: Tensor) -> Tensor:
        assert value.is_contiguous(), "the input was copied"
        return value

    config = found.config_of("triton", found.key(call))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", contiguous)
        for method in ("reshape", "clone", "copy_", "flatten"):
            patch.setattr(torch.Tensor, method, refuse)
        # what is tested ends at the launch: the interpreter itself moves tensors about
        patch.setattr("wavecrest.ops.common.launcher.starter", lambda *_args: lambda *_args, **_options: None)
        found.backends["triton"].run(call, config)


# wavecrest's Python calls from the public function to the library or the launch, once a signature is bound
MOST_CALLS = 8
# those of a launch, which tests/unit/test_launcher.py counts
LAUNCH_CALLS = 2


def own_calls(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """Functions of wavecrest that the second call of a function enters, up to its launches; how many launches it makes.

    Those written for a signature are among them; the definition of the mLSTM in PyTorch's operations is not.
    """
    found: list[str] = []
    launched: list[int] = []
    inside = str(Path(wavecrest.__file__).parent)

    def starter(*_args: Any, **_options: Any) -> Callable[..., None]:
        return lambda *args, **_options: launched.append(len(args))

    def count(frame: Any, event: str, _argument: object) -> None:
        place = frame.f_code.co_filename
        ours = place.startswith((inside, "<signature")) and not place.endswith(("mlstm/reference.py", "mlstm/call.py"))
        if event == "call" and ours:
            found.append(frame.f_code.co_name)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("wavecrest.ops.common.launcher.starter", starter)
        function()
        launched.clear()
        sys.setprofile(count)
        try:
            function()
        finally:
            sys.setprofile(None)
    return found, len(launched)


def assert_short(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, others: int = 0) -> None:
    """A bound call reaches the library or its launch in at most MOST_CALLS; further launches have their own calls.

    `others`: calls that come before `function`.
    """
    found, launches = own_calls(function, monkeypatch)
    assert 0 < others + len(found) + LAUNCH_CALLS * min(launches, 1) <= MOST_CALLS, (found, launches)


def assert_few_calls(op: str, backend: str, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> None:
    """`assert_short`, of the public function with its op forced to a backend."""
    registry.get(op).force(backend)
    assert_short(lambda: getattr(ops, op)(*args, **kwargs), monkeypatch)


def assert_grad_falls_back(op: str, *args: Any) -> None:
    """A call that needs gradients gets them, not from the kernel, and the decision says why."""
    found = registry.get(op)
    found.force("triton")
    leaves = [value.clone().requires_grad_() if isinstance(value, Tensor) else value for value in args]
    decision = found.decide(call_of(op, *leaves))
    assert decision.backend == "torch"
    assert "gradients" in {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    assert found.decide(call_of(op, *args)).backend == "triton"
    with torch.no_grad():
        assert found.decide(call_of(op, *leaves)).backend == "triton"
    results = _tuple(getattr(ops, op)(*leaves))
    sum(result.float().square().sum() for result in results).backward()  # type: ignore[union-attr]
    wide = [value.detach().double().requires_grad_() if isinstance(value, Tensor) else value for value in args]
    sum(result.square().sum() for result in _tuple(reference(op, *wide))).backward()  # type: ignore[union-attr]
    for leaf, want in zip(leaves, wide, strict=True):
        if isinstance(leaf, Tensor):
            assert leaf.grad is not None and want.grad is not None
            torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def assert_refuses(op: str, backend: str | None, args: tuple[Any, ...], message: str) -> None:
    """Wrong arguments are one clear error on every path: the public function (backend None) and each backend."""
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            getattr(ops, op)(*args)
        else:
            run(op, backend, *args)


def assert_rounds_once(op: str, config: Config | None, device: str) -> None:
    """norm+quantize is quantize of the norm in float32; quantize of the norm in x's dtype would differ."""
    made = {"dtype": torch.int8, "granularity": "token", "scale": None}
    args = arguments(ROW_OPS[op], lambda dtype, seed: random((3, 140), dtype, device, seed), torch.bfloat16, **made)
    values = by_name(op, args)
    q, scale, *_ = run(op, "triton", *args, config=config)
    y, _ = unrounded(op, values)
    in_two = run("quantize_int8", "reference", y.float())
    assert (q.int() - in_two[0].int()).abs().max() <= 1
    assert (q != in_two[0]).float().mean() < 0.01
    torch.testing.assert_close(scale, in_two[1], rtol=1e-6, atol=0.0)
    twice = run("quantize_int8", "reference", y.bfloat16())
    assert (q != twice[0]).float().mean() > 0.02, "the case does not tell rounding once from rounding twice"


def specialised(kernel: Any) -> list[str]:
    """The parameters whose values, alignments or types Triton compiles a kernel anew for."""
    if not hasattr(kernel, "params"):
        # defined for the interpreter: the same with what Triton makes of it for a GPU
        from triton.runtime.jit import JITFunction

        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    return [one.name for one in kernel.params if not (one.is_constexpr or one.do_not_specialize)]


def assert_compiles(op: str, dynamic: bool, columns: int, extra: tuple[Any, ...] = ()) -> None:
    """One graph without breaks, equal to eager; with dynamic shapes the row count does not compile again."""
    found = registry.get(op)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    public = getattr(ops, op)

    def call(*args: Any) -> Any:
        return public(*args, *extra)

    backend = "eager" if device == "cpu" else "inductor"
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch.no_grad():
        for rows in (4, 5, 17):
            args = example(op, rows, columns, torch.float32, device)
            for got, want in zip(_tuple(compiled(*args)), _tuple(call(*args)), strict=True):
                torch.testing.assert_close(got.float(), want.float(), rtol=1e-5, atol=1e-5)
    # not calls of the backend: Inductor has a graph traced again where it must take Python floats for constants
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 3)
    # the decision made while tracing is on record
    assert any(decision.key[0] == 0 and calls == 0 for decision, calls in found.decisions())
