from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F

from tests.ops.gemm_harness import moved
from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    assert_few_calls,
    assert_grad_falls_back,
    assert_never_copies,
    assert_refuses,
    name,
    random,
    run,
    specialised,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.lookup import UNLISTED
from wavecrest.dispatch.tuned import Config, Database, Row, database
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._conv2d import config as configs
from wavecrest.ops._conv2d import launch as launches
from wavecrest.ops._conv2d.backend import op as conv2d_op
from wavecrest.ops._conv2d.call import Conv2dCall

OP = "conv2d"
BY_COPY = "torch_channels_last"
LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
# half a unit in the last place
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
ACTIVATIONS = (None, "relu", "leaky_relu", "silu", "gelu", "gelu_tanh")


@pytest.fixture(autouse=True)
def _products_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default cuDNN rounds float32 to the 10 mantissa bits of tf32 before it multiplies."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random_filters(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    return random(shape, dtype, device, seed)


def arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Conv2dCall:
    return Conv2dCall(x, weight, bias, stride, padding, dilation, groups, activation, residual)


def pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def exact(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    activation: Any,
    residual: Tensor | None = None,
    early: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(the result, how far float32 sums may be from it), in float64: columns of the image times the filters.

    `early`: half units in the last place of x's dtype that are lost before the bias, and again after it.
    """
    taps, (dil_h, dil_w) = weight.shape[2:], pair(dilation)
    image = x.double()
    if padding == "same":
        down, across = dil_h * (taps[0] - 1), dil_w * (taps[1] - 1)
        image = F.pad(image, (across // 2, across - across // 2, down // 2, down - down // 2))
    elif padding != "valid":
        pad_h, pad_w = pair(padding)
        image = F.pad(image, (pad_w, pad_w, pad_h, pad_h))
    size = [
        (side - dil * (tap - 1) - 1) // step + 1
        for side, dil, tap, step in zip(image.shape[2:], pair(dilation), taps, pair(stride), strict=True)
    ]
    batch, outputs = x.shape[0], weight.shape[0]
    columns = F.unfold(image, tuple(taps), dilation=pair(dilation), stride=pair(stride)).mT
    columns = columns.reshape(batch, size[0] * size[1], groups, -1).transpose(1, 2)
    filters = weight.double().reshape(groups, outputs // groups, -1).mT
    y, bound = columns @ filters, numerics.product_bound(columns, filters.expand(batch, *filters.shape))
    y, bound = (one.permute(0, 1, 3, 2).reshape(batch, outputs, *size) for one in (y, bound))
    bound = bound + early * ROUNDING[x.dtype] * y.abs()
    if bias is not None:
        y = y + bias.double().reshape(-1, 1, 1)
        bound = bound + 2.0**-24 * y.abs()
    bound = bound + early * ROUNDING[x.dtype] * y.abs()
    if residual is not None:
        y = y + residual.double()
        bound = bound + (2.0**-24 + early * ROUNDING[x.dtype]) * y.abs()
    if activation is not None:
        y = {
            "relu": F.relu,
            "leaky_relu": F.leaky_relu,
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda value: F.gelu(value, approximate="tanh"),
        }[activation](y)
        # slopes are below 1.2; the kernels' exp and erf are good to a few units of float32
        bound = 1.2 * bound + 1e-6 * y.abs() + 1e-6
    return y, bound


def assert_within(got: Tensor, want: Tensor, bound: Tensor, roundings: float) -> None:
    assert got.shape == want.shape
    allowed = bound + roundings * ROUNDING[got.dtype] * want.abs() + 1e-7
    if got.dtype == torch.float64:
        allowed = 1e-12 * (1 + want.abs())
    worse = (got.double() - want).abs() - allowed
    assert not worse.isnan().any(), "an element was not written, or what is outside was read"
    assert (worse <= 0).all(), f"{int((worse > 0).sum())} of {worse.numel()} elements are off, by up to {worse.max()}"


def assert_convolves(backend: str, *args: Any, config: Config | None = None) -> Tensor:
    """A backend's result against float64, element by element; its format; arguments as they were."""
    call = arguments(*args)
    before = [value.clone() if isinstance(value, Tensor) else value for value in call]
    got = conv2d_op.run(backend, call, config=config)
    assert got.dtype == call.x.dtype and got.device == call.x.device
    # PyTorch rounds to its dtype before the bias and the activation too
    early = 1.0 if backend in ("torch", BY_COPY) else 0.0
    assert_within(got, *exact(*call, early), 1.001)
    last = channels_last_by_torch(call.x) or channels_last_by_torch(call.weight)
    assert got.is_contiguous(memory_format=LAST if last else CONTIGUOUS)
    for value, kept in zip(call, before, strict=True):
        if isinstance(value, Tensor):
            assert torch.equal(value.nan_to_num(7.0), kept.nan_to_num(7.0)), "an argument was written to"
    return got


def channels_last_by_torch(x: Tensor) -> bool:
    """Whether PyTorch takes a tensor's strides for channels_last."""
    return torch._prims_common.suggest_memory_format(x) == LAST and 0 not in x.shape


def formatted(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=LAST if last else CONTIGUOUS)


# name -> (B, C, H, W), (O, C / groups, R, S), options
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 16, 6, 7), (20, 16, 3, 3), {"padding": 1}),
    "3x3 odd": ((1, 13, 7, 5), (19, 13, 3, 3), {"padding": 1}),
    "no padding": ((2, 9, 5, 6), (3, 9, 3, 3), {}),
    "1x1": ((2, 40, 5, 7), (33, 40, 1, 1), {}),
    "1x1 stride padding": ((1, 8, 6, 5), (16, 8, 1, 1), {"stride": (2, 3), "padding": (1, 2)}),
    "stem": ((1, 3, 15, 13), (8, 3, 7, 7), {"stride": 2, "padding": 3}),
    "by axis": ((2, 8, 9, 11), (7, 8, 3, 2), {"stride": (1, 2), "padding": (3, 1), "dilation": (2, 3)}),
    "other axis": ((1, 10, 11, 6), (5, 10, 2, 3), {"stride": (3, 1), "padding": (0, 2), "dilation": (1, 2)}),
    "one line": ((1, 8, 1, 9), (4, 8, 3, 3), {"padding": 1}),
    "kernel over the side": ((2, 8, 2, 3), (4, 8, 5, 5), {"padding": 2}),
    "all padding": ((1, 8, 3, 2), (4, 8, 2, 2), {"padding": 4, "stride": 2}),
    "one pixel": ((3, 5, 1, 1), (6, 5, 1, 1), {}),
    "one everything": ((1, 1, 1, 1), (1, 1, 1, 1), {}),
    "one result": ((2, 6, 4, 5), (3, 6, 4, 5), {}),
    "groups": ((2, 24, 6, 5), (40, 12, 3, 3), {"groups": 2, "padding": 1}),
    "groups of few": ((1, 12, 5, 6), (8, 3, 3, 3), {"groups": 4, "padding": (0, 1), "stride": (2, 1)}),
    "depthwise": ((2, 6, 6, 7), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
    "depthwise by two": ((1, 5, 7, 6), (10, 1, 3, 5), {"groups": 5, "padding": (1, 2), "dilation": (2, 1)}),
    "strips": ((1, 64, 12, 9), (64, 4, 5, 1), {"groups": 16, "dilation": (2, 1)}),
    "same": ((1, 8, 6, 7), (5, 8, 2, 4), {"padding": "same", "dilation": (3, 1)}),
    "same below alone": ((2, 8, 3, 2), (4, 8, 2, 1), {"padding": "same"}),
    "valid": ((1, 8, 6, 7), (5, 8, 2, 4), {"padding": "valid", "stride": 2}),
}


def case(key: str, dtype: torch.dtype, device: str, last: bool = False) -> Conv2dCall:
    x_shape, w_shape, options = CASES[key]
    x, weight = random(x_shape, dtype, device), random_filters(w_shape, dtype, device)
    return arguments(formatted(x, last), formatted(weight, last), **options)


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("key", CASES)
def test_triton(key: str, last: bool, device: str) -> None:
    turn = list(CASES).index(key) + last
    dtypes = DTYPES if device == "cuda" else (DTYPES[turn % 3],)
    for dtype in dtypes:
        args = case(key, dtype, device, last)
        got = assert_convolves("triton", *args)
        conv2d_op.force("triton")
        # the bound call, which on a GPU skips Triton's look-up from the second time on
        for _ in range(3 if device == "cuda" else 1):
            again = ops.conv2d(*args)
            assert torch.equal(again, got) and again.stride() == got.stride()
        conv2d_op.force(None)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("key", CASES)
def test_other_backends(key: str, backend: str, device: str) -> None:
    # each dtype in one of the formats, by turns
    for turn, dtype in enumerate((*DTYPES, torch.float64), list(CASES).index(key)):
        assert_convolves(backend, *case(key, dtype, device, turn % 2 == 1))


@pytest.mark.parametrize("key", CASES)
def test_torch_channels_last(key: str, device: str) -> None:
    for dtype in (*DTYPES, torch.float64):
        assert_convolves(BY_COPY, *case(key, dtype, device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_channels_last_bias_and_activation(activation: str | None, device: str) -> None:
    for dtype in DTYPES:
        for key, outputs in (("3x3", 20), ("groups", 40)):
            x, weight, _, stride, padding, dilation, groups, *_ = case(key, dtype, device)
            bias = random((outputs,), dtype, device, 4)
            got = assert_convolves(BY_COPY, x, weight, bias, stride, padding, dilation, groups, activation)
            assert (got > 0.1).any() and (activation == "relu") == bool((got >= 0).all())


def test_torch_channels_last_runs_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gets image and weight in that layout, as copies; its result is copied back where it is in it too."""
    native, seen = F.conv2d, []

    def convolve(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
        # also where the library makes contiguous results alone
        y = formatted(native(x, weight, *options), True)
        seen.append((x, weight, y))
        return y

    monkeypatch.setattr(F, "conv2d", convolve)
    args = case("3x3", torch.float32, device)
    strides = [value.stride() for value in args[:2]]
    got = assert_convolves(BY_COPY, *args)
    ((x, weight, y),) = seen
    for given, copied in zip(args[:2], (x, weight), strict=True):
        assert copied.is_contiguous(memory_format=LAST) and torch.equal(copied, given)
        assert copied.data_ptr() != given.data_ptr()
    assert [value.stride() for value in args[:2]] == strides
    assert y.is_contiguous(memory_format=LAST) and not got.is_contiguous(memory_format=LAST)


def test_torch_channels_last_where_the_library_is_contiguous(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MIOpen."""
    native = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: native(*args).contiguous())
    assert_convolves(BY_COPY, *case("3x3", torch.float32, device))


def test_torch_channels_last_takes_any_strides(device: str) -> None:
    """Arguments that are not all channels_last are copied, whatever their strides; a channels_last call is refused."""
    weight = random_filters((12, 8, 3, 2), torch.float16, device)
    taken = set()
    for layout, make in X_LAYOUTS.items():
        x = make(device)
        if channels_last_by_torch(x):
            with pytest.raises(Unsupported, match="in that layout already"):
                conv2d_op.run(BY_COPY, arguments(x, weight, None, (1, 2), (1, 2)))
            continue
        taken.add(layout)
        assert_convolves(BY_COPY, x, weight, None, (1, 2), (1, 2))
    assert {"cropped", "every second pixel", "reversed dims", "one image for all", "one line for all"} <= taken
    assert not {"cropped last", "channel slice last"} & taken


@pytest.mark.parametrize("which", ["x", "weight", "both"])
def test_torch_channels_last_refuses_what_is_there(which: str, device: str) -> None:
    x, weight, *rest = case("3x3", torch.float16, device)
    given = arguments(formatted(x, which != "weight"), formatted(weight, which != "x"), *rest)
    with pytest.raises(Unsupported, match="torch_channels_last refuses: has the image, or the weight, in that layout"):
        conv2d_op.run(BY_COPY, given)
    conv2d_op.force(BY_COPY)
    decision = conv2d_op.decide(given)
    assert decision.backend == "torch" and "torch_channels_last, forced, refuses it" in decision.reason
    assert "in that layout already" in {refusal.backend: refusal.reason for refusal in decision.refused}[BY_COPY]
    assert conv2d_op.decide(arguments(x, weight, *rest)).backend == BY_COPY


def test_torch_channels_last_refuses_what_pytorch_does(device: str) -> None:
    x, weight, *_ = case("3x3 odd", torch.float16, device)
    with pytest.raises(Unsupported, match="bias of x's dtype"):
        conv2d_op.run(BY_COPY, arguments(x, weight, random((19,), torch.float32, device, 5), 1, 1))


def test_torch_channels_last_is_not_the_default(device: str) -> None:
    for dtype in (*DTYPES, torch.float64):
        decision = conv2d_op.decide(case("3x3", dtype, device))
        assert decision.backend == "torch" and decision.source == "default"
        assert "where a measured row names it" in {one.backend: one.reason for one in decision.refused}[BY_COPY]


def test_torch_channels_last_runs_where_a_pin_names_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = case("3x3", torch.float32, device)
    conv2d_op.pin(conv2d_op.key(args), BY_COPY, None, "exact", "measured")
    native, layouts = F.conv2d, []

    def convolve(x: Tensor, *others: Any) -> Tensor:
        layouts.append(x.is_contiguous(memory_format=LAST))
        return native(x, *others)

    monkeypatch.setattr(F, "conv2d", convolve)
    # the call that is bound, and one after it
    for seed in (7, 8):
        x = random(tuple(args[0].shape), torch.float32, device, seed)
        got = ops.conv2d(x, *args[1:])
        assert got.is_contiguous()
        assert_within(got, *exact(x, *args[1:], 1.0), 1.001)
    assert layouts == [True, True]


def test_torch_channels_last_runs_where_a_measured_row_names_it(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row decides calls on a GPU of its key alone; the other layout and calls with gradients stay with PyTorch."""
    args, last = (case("3x3", torch.float16, device, value) for value in (False, True))
    # rows are for calls on a GPU: to the dispatcher these are
    monkeypatch.setattr(Tensor, "device", property(lambda _self: torch.device("cuda")))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True))
    assert conv2d_op.decide(args).backend == "torch"
    fields = tuple(field for field in conv2d_op.key_fields if field not in UNLISTED)
    key = dict(zip(conv2d_op.key_fields, conv2d_op.key(args), strict=True))
    assert key["device"] == "cuda"
    rows = Database(tmp_path, "sm_00")
    row = Row(tuple(key[field] for field in fields), BY_COPY, None, 12.3, 15.0, "h200/tune.json")
    database.write(rows.path(OP), fields, [row])
    with registry.measured_in(rows):
        decision = conv2d_op.decide(args)
        assert (decision.backend, decision.config, decision.source) == (BY_COPY, None, "exact")
        assert BY_COPY not in {refusal.backend for refusal in decision.refused}
        assert conv2d_op.decide(last).backend == "torch"
        assert conv2d_op.decide(args._replace(x=args.x.clone().requires_grad_())).backend == "torch"
    assert conv2d_op.decide(args).backend == "torch"


@pytest.mark.parametrize("key", ["3x3", "groups", "by axis", "same"])
def test_torch_channels_last_gradients(key: str, device: str) -> None:
    """A copy has gradients as PyTorch's convolution has: forced, it keeps a call that needs them."""
    x, weight, _, *rest = case(key, torch.float32, device)
    args = arguments(x, weight / 8, random((weight.shape[0],), torch.float32, device, 3), *rest[:-2], "silu")
    conv2d_op.force(BY_COPY)
    leaves = mapped(args, lambda tensor: tensor.clone().requires_grad_())
    assert conv2d_op.decide(leaves).backend == BY_COPY
    ops.conv2d(*leaves).square().sum().backward()
    wide = mapped(args, lambda tensor: tensor.double().requires_grad_())
    conv2d_op.reference(wide).square().sum().backward()
    for leaf, want in zip(leaves[:3], wide[:3], strict=True):
        assert leaf.grad is not None and leaf.grad.abs().max() > 0.1
        torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def test_torch_channels_last_has_no_images(device: str) -> None:
    x, weight = random((0, 8, 6, 5), torch.float16, device), random_filters((4, 8, 3, 3), torch.float16, device)
    got = conv2d_op.run(BY_COPY, arguments(x, weight, None, 2, 1))
    assert got.shape == (0, 4, 3, 3) and got.dtype == torch.float16


def test_torch_channels_last_compiles(device: str) -> None:
    """One graph, which a measured row may put it into."""
    torch._dynamo.reset()
    args = case("groups", torch.float32, device)
    conv2d_op.force(BY_COPY)
    compiled = torch.compile(ops.conv2d, fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(*args)
    assert_within(got, *exact(*args, 1.0), 1.001)
    assert got.is_contiguous() and not got.is_contiguous(memory_format=LAST)
    assert BY_COPY in {decision.backend for decision, _ in conv2d_op.decisions()}


def test_numbers_anybody_can_check(device: str) -> None:
    x = torch.arange(1.0, 10.0, device=device).reshape(1, 1, 3, 3)
    weight = torch.tensor([[1.0, 10.0], [100.0, 1000.0]], device=device).reshape(1, 1, 2, 2)
    for backend in BACKENDS:
        # the kernel is not turned round: the tap at (0, 1) meets the pixel on the right
        assert conv2d_op.run(backend, arguments(x, weight)).flatten().tolist() == [5421.0, 6532.0, 8754.0, 9865.0]
        padded = conv2d_op.run(backend, arguments(x, weight, None, (2, 1), (0, 1)))
        assert padded.shape == (1, 1, 1, 4) and padded.flatten().tolist() == [4010.0, 5421.0, 6532.0, 603.0]


def test_the_bound_can_fail(device: str) -> None:
    """The tolerance of the tests is below the error of one product left out."""
    args = case("3x3", torch.float32, device)
    want, bound = exact(*args)
    short = args[1].clone()
    short[:, 5, 1, 2] = 0
    with pytest.raises(AssertionError, match="are off"):
        assert_within(exact(args[0], short, *args[2:])[0].float(), want, bound, 1.0)


# mixes of formats: PyTorch makes a channels_last result if either is
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", ["x last", "weight last"])
@pytest.mark.parametrize("key", ["3x3 odd", "stem", "1x1", "groups of few", "depthwise"])
def test_mixed_formats(key: str, mix: str, backend: str, device: str) -> None:
    x, weight, *rest = case(key, torch.float16, device)
    x, weight = formatted(x, mix == "x last"), formatted(weight, mix == "weight last")
    assert_convolves(backend, x, weight, *rest)


@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 1, 5, 6), (2, 8, 1, 1), (1, 8, 1, 6), (1, 1, 1, 1), (2, 8, 6, 1)])
def test_format_is_pytorchs(shape: tuple[int, ...], device: str) -> None:
    """Also where sizes of 1 leave it open, and for views; as on the CPU, whose library takes both formats."""
    weight = random_filters((4, shape[1], 1, 1), torch.float32, "cpu")
    views = [random(shape, torch.float32, "cpu"), random((*shape[:3], 2 * shape[3]), torch.float32, "cpu")[..., ::2]]
    views += [formatted(random((2 * shape[0], *shape[1:]), torch.float32, "cpu"), True)[::2]]
    views += [formatted(random((shape[0], 2 * shape[1], *shape[2:]), torch.float32, "cpu"), True)[:, : shape[1]]]
    for view, last in itertools.product([*views, formatted(views[0], True)], (False, True)):
        filters = formatted(weight, last)
        want = F.conv2d(view, filters)
        for backend in BACKENDS:
            got = conv2d_op.run(backend, arguments(moved(view, device), moved(filters, device)))
            assert got.is_contiguous(memory_format=LAST) == want.is_contiguous(memory_format=LAST)
            assert got.is_contiguous() == want.is_contiguous()


def test_format_does_not_depend_on_the_library(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with MIOpen, which makes contiguous results alone unless it is told otherwise."""
    native = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: native(*args).contiguous())
    args = case("3x3", torch.float32, device, True)
    assert_convolves("torch", *args)
    conv2d_op.force("torch")
    assert ops.conv2d(*args).is_contiguous(memory_format=LAST)


def _surrounded(shape: tuple[int, ...], device: str) -> Tensor:
    """The storage of a view, NaN where the view has nothing."""
    return torch.full(shape, float("nan"), dtype=torch.float16, device=device)


def _filled(view: Tensor, seed: int = 0) -> Tensor:
    return view.copy_(random(tuple(view.shape), view.dtype, view.device.type, seed))


# name -> x [2, 8, 6, 5] of that layout; what lies between the elements is NaN
X_LAYOUTS: dict[str, Callable[[str], Tensor]] = {
    "cropped": lambda device: _filled(_surrounded((2, 9, 10, 8), device)[:, 1:, 2:8, 2:7]),
    "cropped last": lambda device: _filled(
        formatted(_surrounded((2, 9, 10, 8), device), True)[:, :8, 3:9, 1:6],
    ),
    "channel slice last": lambda device: _filled(formatted(_surrounded((2, 24, 6, 5), device), True)[:, 8:16]),
    "every second pixel": lambda device: _filled(_surrounded((2, 8, 12, 10), device)[..., ::2, 1::2]),
    "every second channel": lambda device: _filled(_surrounded((2, 16, 6, 5), device)[:, ::2]),
    "every second channel last": lambda device: _filled(formatted(_surrounded((2, 16, 6, 5), device), True)[:, 1::2]),
    "sides swapped": lambda device: _filled(_surrounded((2, 8, 5, 6), device).transpose(2, 3)),
    "batch inside": lambda device: _filled(_surrounded((8, 6, 5, 2), device).permute(3, 0, 1, 2)),
    "reversed dims": lambda device: _filled(_surrounded((5, 6, 8, 2), device).permute(3, 2, 1, 0)),
    "odd images last": lambda device: _filled(
        _surrounded((2, 243), device).as_strided((2, 8, 6, 5), (243, 1, 40, 8)),
    ),
    "one image for all": lambda device: _filled(_surrounded((1, 8, 6, 5), device)).expand(2, 8, 6, 5),
    "one channel for all": lambda device: _filled(_surrounded((2, 1, 6, 5), device)).expand(2, 8, 6, 5),
    "one line for all": lambda device: _filled(_surrounded((2, 8, 1, 5), device)).expand(2, 8, 6, 5),
    "one pixel a line": lambda device: _filled(_surrounded((2, 8, 6, 1), device)).expand(2, 8, 6, 5),
}
# name -> weight [12, 8, 3, 2]
W_LAYOUTS: dict[str, Callable[[str], Tensor]] = {
    "outputs inside": lambda device: _filled(_surrounded((8, 3, 2, 12), device).permute(3, 0, 1, 2), 1),
    "taps swapped last": lambda device: _filled(
        formatted(_surrounded((12, 8, 2, 3), device), True).transpose(2, 3),
        1,
    ),
    "taps interleaved": lambda device: _filled(
        _surrounded((12, 60), device).as_strided((12, 8, 3, 2), (60, 6, 2, 3)),
        1,
    ),
    "taps swapped": lambda device: _filled(_surrounded((12, 8, 2, 3), device).transpose(2, 3), 1),
    "odd filters": lambda device: _filled(_surrounded((12, 51), device).as_strided((12, 8, 3, 2), (51, 6, 2, 1)), 1),
    "odd filters last": lambda device: _filled(
        _surrounded((12, 51), device).as_strided((12, 8, 3, 2), (51, 1, 16, 8)),
        1,
    ),
    "every second channel": lambda device: _filled(_surrounded((12, 16, 3, 2), device)[:, ::2], 1),
    "cropped": lambda device: _filled(_surrounded((13, 10, 5, 4), device)[1:, 2:, 1:4, :2], 1),
    "channel slice last": lambda device: _filled(formatted(_surrounded((12, 11, 3, 2), device), True)[:, 3:], 1),
    "one filter for all": lambda device: _filled(_surrounded((1, 8, 3, 2), device), 1).expand(12, 8, 3, 2),
    "one tap for all": lambda device: _filled(_surrounded((12, 8, 1, 1), device), 1).expand(12, 8, 3, 2),
}


def config_of(*args: Any, **changes: int) -> Config:
    return Config(**(conv2d_op.config_of("triton", conv2d_op.key(arguments(*args))).kwargs | changes))


@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_layouts_of_x(layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X_LAYOUTS[layout](device)
    assert x.shape == (2, 8, 6, 5)
    for last, flat in ((False, 0), (True, 1)) if device == "cpu" else itertools.product((False, True), (0, 1)):
        weight = formatted(random_filters((12, 8, 3, 2), torch.float16, device), last)
        args = arguments(x, weight, None, (1, 2), (1, 2))
        assert_convolves("triton", *args, config=config_of(*args, FLAT=flat))
    for backend in ("torch", "reference"):
        assert_convolves(backend, *args)
    assert_never_copies(OP, monkeypatch, *args)


@pytest.mark.parametrize("flat", [0, 1])
@pytest.mark.parametrize("layout", W_LAYOUTS)
def test_layouts_of_weight(layout: str, flat: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = W_LAYOUTS[layout](device)
    assert weight.shape == (12, 8, 3, 2)
    x = formatted(random((2, 8, 4, 5), torch.float16, device), flat == 1)
    args = arguments(x, weight, None, 1, (1, 0))
    assert_convolves("triton", *args, config=config_of(*args, FLAT=flat))
    assert_never_copies(OP, monkeypatch, *args)
    if flat:
        assert_convolves("torch", *args)
        assert_convolves("reference", *args)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name)
def test_bias_dtypes(dtype: torch.dtype, backend: str, device: str) -> None:
    x, weight, *_ = case("3x3 odd", torch.float16, device)
    # every second element of something longer, and values that float16 does not have
    bias = (random((38,), torch.float64, device, 5) * 1.0001).to(dtype)[::2]
    assert_convolves(backend, x, weight, bias, 1, 1)
    x, weight, *_ = case("groups of few", torch.float16, device)
    assert_convolves(backend, x, weight, bias[::2][:8], 1, 1, 1, 4)


def test_a_bias_of_another_dtype_is_not_pytorchs(device: str) -> None:
    x, weight, *_ = case("3x3 odd", torch.float16, device)
    bias = random((19,), torch.float32, device, 5)
    with pytest.raises(Unsupported, match="bias of x's dtype"):
        conv2d_op.run("torch", arguments(x, weight, bias, 1, 1))
    if device == "cpu":
        assert conv2d_op.decide(arguments(x, weight, bias, 1, 1)).backend == "reference"
    assert_within(ops.conv2d(x, weight, bias, 1, 1), *exact(*arguments(x, weight, bias, 1, 1)), 1.001)


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("backend", ["triton", "reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_a_bias_that_cancels_leaves_what_rounding_would_lose(
    dtype: torch.dtype, backend: str, last: bool, device: str
) -> None:
    """Each output's bias is the rest of its first pixel's sum, rounded: sums rounded before it would leave 0."""
    call = case("strips", dtype, device, last)
    sums, _ = exact(*call[:8])
    bias = -sums[0, :, 0, 0].to(dtype)
    got = conv2d_op.run(backend, call._replace(bias=bias))[0, :, 0, 0].double()
    first, unit = sums[0, :, 0, 0], ROUNDING[dtype]
    want = first + bias.double()
    assert float(want.abs().max()) > 0.75 * unit
    # PyTorch adds the bias to sums that it has rounded, on a GPU
    limit = unit * first.abs() if backend == "torch" and device == "cuda" else unit * want.abs() + 2e-5
    assert bool(((got - want).abs() <= 1.001 * limit).all()), (got, want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str | None, device: str) -> None:
    bias = random((20,), torch.float32, device, 4)
    for dtype, last in ((torch.float32, False), (torch.bfloat16, True)):
        x, weight, *_ = case("3x3", dtype, device, last)
        for backend in BACKENDS:
            given = bias.to(dtype) if backend == "torch" else bias
            got = assert_convolves(backend, x, weight, given, 1, 1, 1, 1, activation)
            # results that an activation changes, on both sides of 0
            assert (got > 0.1).any() and (activation == "relu") == bool((got >= 0).all())


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_a_residual_is_added_before_the_activation(last: bool, activation: str | None, device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        x, weight, *_ = case("3x3", dtype, device, last)
        bias = random((weight.shape[0],), dtype, device, 4)
        residual = formatted(random((x.shape[0], weight.shape[0], *x.shape[2:]), dtype, device, 5), not last)
        args = (x, weight, bias, 1, 1, 1, 1, activation, residual)
        for backend in ("reference", "torch"):
            assert_convolves(backend, *args)
        reasons = {refusal.backend: refusal.reason for refusal in conv2d_op.decide(arguments(*args)).refused}
        assert "residual" in reasons["triton"]
        assert_within(ops.conv2d(*args), *exact(*args, early=1.0), 1.001)


def test_a_residual_of_another_shape_or_dtype_is_an_error() -> None:
    x, weight = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)
    for residual in (torch.ones(1, 3, 5, 5), torch.ones(1, 3, 3, 3, dtype=torch.float64), 3):
        with pytest.raises(InvalidArgument, match="residual must be"):
            ops.conv2d(x, weight, residual=residual)


def test_a_residual_has_keys_of_its_own() -> None:
    x, weight, residual = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), torch.ones(1, 3, 3, 3)
    plain = conv2d_op.key(Conv2dCall(x, weight, activation="relu"))
    added = conv2d_op.key(Conv2dCall(x, weight, activation="relu", residual=residual))
    assert set(added) - set(plain) == {"add_relu"}
    assert "add" in conv2d_op.key(Conv2dCall(x, weight, residual=residual))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [(1, 1, 1), (2, 1, 1), (1, (2, 0), 1), (1, 2, 2)], ids=str)
def test_cudnn_relu(options: Any, dtype: torch.dtype, device: str) -> None:
    """Bias, residual and ReLU in cuDNN's kernel, eager and in a graph, against float64."""
    if torch.version.hip is not None:
        pytest.skip("cuDNN is NVIDIA's")
    stride, padding, dilation = options
    x, weight = (formatted(random(shape, dtype, device, 3), True) for shape in ((3, 16, 15, 14), (24, 16, 3, 3)))
    bias = random((24,), dtype, device, 4)
    shape = arguments(x, weight, bias, stride, padding, dilation).shape
    for residual in (None, formatted(random(shape, dtype, device, 5), True)):
        args = (x, weight, bias, stride, padding, dilation, 1, "relu", residual)
        got = conv2d_op.run("cudnn_relu", arguments(*args))
        assert_within(got, *exact(*args, early=1.0), 1.001)
        assert got.is_contiguous(memory_format=LAST) and (got > 0.1).any()
        decision = conv2d_op.decide(arguments(*args))
        reasons = {refusal.backend: refusal.reason for refusal in decision.refused}
        assert decision.backend == "torch" and "has no measured rows yet" in reasons["cudnn_relu"]
        conv2d_op.force("cudnn_relu")
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: ops.conv2d(*given), fullgraph=True, dynamic=False)
        assert torch.equal(compiled(*args), got)
        conv2d_op.force(None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_no_images(last: bool, backend: str, device: str) -> None:
    x = formatted(random((0, 8, 6, 5), torch.float16, device), last)
    weight = formatted(random_filters((4, 8, 3, 3), torch.float16, device), last)
    bias = random((4,), torch.float16, device)
    got = conv2d_op.run(backend, arguments(x, weight, bias, 2, 1, 1, 1, "relu"))
    assert got.shape == (0, 4, 3, 3) and got.dtype == torch.float16
    conv2d_op.force(backend)
    assert ops.conv2d(x, weight, bias, 2, 1, 1, 1, "relu").shape == (0, 4, 3, 3)


@pytest.mark.parametrize("flat", [0, 1])
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_special_values(last: bool, flat: int, device: str) -> None:
    """A NaN or an infinity reaches the pixels that see it and no others; padding sees nothing."""
    x, weight, *_ = case("3x3 odd", torch.float32, device, last)
    x[0, 3, 0, 0], x[0, 12, 6, 3], x[0, 5, 3, 4] = float("nan"), float("inf"), -float("inf")
    weight[7, 2, 1, 1] = float("nan")
    args = arguments(x, weight, None, (1, 2), (2, 1))
    want = conv2d_op.reference(mapped(args, lambda tensor: tensor.double()))
    got = conv2d_op.run("triton", args, config=config_of(*args, FLAT=flat))
    limits = numerics.tolerance("gemm", "float32")
    assert numerics.compare(got, want).within(limits)
    assert numerics.compare(conv2d_op.run("reference", args), want).within(limits)
    # a filter with a NaN is NaN where that tap is in the image and, as padding is a number, where it is not
    assert got[0, :7].isnan().sum() == got[0, 8].isnan().sum() * 7


@pytest.mark.parametrize("flat", [0, 1])
@pytest.mark.parametrize(
    ("blocks", "group_m"), [((16, 16, 16), 1), ((32, 16, 64), 3), ((64, 64, 32), 8), ((128, 32, 16), 2)]
)
def test_configurations(blocks: tuple[int, int, int], group_m: int, flat: int, device: str) -> None:
    """Blocks that pixels, outputs and channels do not fill, and several of each."""
    m, n, k = blocks
    options = {"FLAT": flat, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group_m}
    for last in (False, True):
        x = formatted(random((2, 21, 5, 6), torch.float16, device), last)
        weight = formatted(random_filters((37, 21, 3, 2), torch.float16, device), last)
        args = arguments(x, weight, None, 1, 1)
        assert_convolves("triton", *args, config=config_of(*args, **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the order of tiles is the GPU's own there")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_any_architectures_order_and_configuration(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 XCDs deal tiles and groups in another order, which must have each of them once."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    assert_convolves("triton", *case("3x3", torch.bfloat16, "cpu", True))
    if ARCHS[arch].xcds > 1:
        x, weight = random((2, 30, 9, 7), torch.float16, "cpu"), random_filters((60, 10, 3, 3), torch.float16, "cpu")
        args = arguments(x, weight, None, 1, 1, 1, 3)
        config = config_of(*args, BLOCK_M=16, BLOCK_N=16, GROUP_M=3)
        made = launches.launch(args, x, config, ARCHS[arch])
        assert made.constants["XCDS"] == 8 and made.grid[0] == 8 * 2 * 3
        assert_convolves("triton", *args, config=config)


# of each architecture some configurations to tune with: the widest and the longest tile, the longest step, the smallest
TUNED = {
    "sm_90": ((128, 128, 64, 8, 1), (256, 128, 32, 8, 8), (256, 32, 32, 4, 8), (32, 64, 64, 4, 8)),
    "gfx942": ((128, 128, 64, 8, 1), (128, 128, 32, 4, 8), (64, 128, 64, 4, 8), (32, 64, 64, 4, 8)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the order of tiles is the GPU's own there")
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("arch", TUNED)
def test_configurations_to_tune_with(arch: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that neither pixels, outputs nor channels fill."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    x = formatted(random((1, 40, 9, 9), torch.float16, "cpu"), last)
    weight = formatted(random_filters((72, 40, 3, 3), torch.float16, "cpu"), last)
    args = arguments(x, weight, None, 1, 1)
    space = conv2d_op.study.kernel("triton").space
    assert space is not None
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "GROUP_M")
    tried = {tuple(config[name] for name in names): config for config in space(conv2d_op.key(args), ARCHS[arch])}
    for sizes in TUNED[arch]:
        assert_convolves("triton", *args, config=tried[sizes])


def test_many_groups(device: str) -> None:
    x = random((1, 40, 3, 2), torch.float16, device)
    weight = random_filters((40, 1, 2, 2), torch.float16, device)
    assert_convolves("triton", x, weight, None, 1, 1, 1, 40)


@pytest.mark.parametrize("flat", [0, 1])
@pytest.mark.parametrize("far", ["batch", "channels", "lines", "columns", "filters", "taps"])
def test_elements_past_two_to_the_31(far: str, flat: int, device: str) -> None:
    step = 1 << 30
    # of the storage only the pages that are used are ever made
    storage = torch.empty((1 << 31) + (1 << 12), dtype=torch.float16, device=device)
    x_strides = {"batch": (step, 9, 3, 1), "channels": (9, step, 3, 1), "lines": (99, 9, step, 1)}
    w_strides = {"filters": (step, 27, 9, 1), "taps": (99, 9, 1, step)}
    x_strides["columns"] = (99, 9, 1, step)
    x = storage.as_strided((3, 3, 3, 3), x_strides.get(far, (27, 9, 3, 1)))
    weight = storage[2048:].as_strided((3, 3, 3, 3), w_strides.get(far, (27, 9, 3, 1)))
    _filled(x)
    _filled(weight, 1)
    args = arguments(x, weight, None, 1, 1)
    config = config_of(*args, FLAT=flat)
    assert launches.launch(args, x, config, None).constants["WIDE"]
    assert_convolves("triton", *args, config=config)


def test_results_past_two_to_the_31_are_counted_in_64_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 16, 1024, 1024, dtype=torch.float16, device="meta")

    def wide(outputs: int, **padding: Any) -> bool:
        weight = torch.empty(outputs, 16, 1, 1, dtype=torch.float16, device="meta")
        config = Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=16, FLAT=0)
        call = Conv2dCall(x, weight, **padding)
        return bool(launches.launch(call, x, config, None).constants["WIDE"])

    assert not wide(1000) and wide(1024)
    # the corner of the padding is where taps are counted from
    assert not wide(1, padding=(1000, 0)) and wide(1, padding=(1 << 20, 0), stride=1 << 20)
    assert not wide(1, padding=(0, 1000)) and wide(1, padding=(0, 1 << 30), stride=1 << 30)
    # the same numbers by the code for it
    monkeypatch.setattr(launches, "_wide", lambda _given: True)
    for key, last in itertools.product(("3x3 odd", "stem", "depthwise", "by axis"), (False, True)):
        assert_convolves("triton", *case(key, torch.float16, device, last))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="4 GiB of results")
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_results_past_two_to_the_31(last: bool) -> None:
    x = formatted(torch.randn(1, 8, 8192, 8192, dtype=torch.float16, device="cuda"), last)
    weight = formatted(random_filters((33, 8, 1, 1), torch.float16, "cuda"), last)
    got = conv2d_op.run("triton", arguments(x, weight))
    for corner in (slice(None, 5), slice(-5, None)):
        want = exact(*arguments(x[..., corner, corner], weight))
        assert_within(got[..., corner, corner], *want, 1.001)


def _made(side: int, batch: int = 2, channels: int = 64, last: bool = True, padding: int = 1, taps: int = 3) -> Any:
    layout = LAST if last else CONTIGUOUS
    x = torch.empty((batch, channels, side, side + 3), dtype=torch.float16, device="meta", memory_format=layout)
    weight = torch.empty((64, channels, taps, taps), dtype=torch.float16, device="meta", memory_format=layout)
    call = arguments(x, weight, None, 1, padding)
    flat = int(channels < 8)
    config = Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, FLAT=flat, num_warps=4)
    return launches.launch(call, x, config, None)


@pytest.mark.parametrize("channels", [3, 64, 13])
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_another_image_size_does_not_compile_anew(last: bool, channels: int) -> None:
    base = _made(20, channels=channels, last=last)
    for side, batch in ((21, 2), (32, 2), (37, 5), (224, 32), (7, 1)):
        other = _made(side, batch, channels, last)
        assert other.constants == base.constants
        assert [type(value) for value in other.args] == [type(value) for value in base.args]
        assert other.grid != base.grid
    # what padding is does not, whether there is any does; as many taps with other channels in a step do
    assert _made(20, channels=channels, last=last, padding=2).constants == base.constants
    assert _made(20, channels=channels, last=last, padding=0).constants == base.constants | {"PADDED": False}
    larger = _made(20, channels=channels, last=last, taps=5).constants
    assert channels == 3 or larger == base.constants


def test_specialised_arguments() -> None:
    """Triton compiles anew for types and alignments of tensors alone."""
    pytest.importorskip("triton", reason="asks Triton about a kernel's arguments")
    from wavecrest.ops._conv2d.kernel import _conv2d_kernel

    assert specialised(_conv2d_kernel) == ["x_ptr", "w_ptr", "bias_ptr", "y_ptr"]


def _child(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool, device: str) -> None:
    """One graph without breaks, equal to eager; with dynamic sizes one for all images of a bucket."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if device == "cpu" else "inductor")
    weight = random_filters((12, 8, 3, 3), torch.float32, device)
    bias = random((12,), torch.float32, device)

    def call(x: Tensor) -> Tensor:
        return ops.conv2d(x, weight, bias, [2, 1], (1, 0), 1, activation="gelu")

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    with torch.no_grad():
        # none of them as large as another size, which Dynamo would take for the same one
        for side in (13, 14, 11):
            for last in (False, True):
                x = formatted(random((2, 8, side, side + 2), torch.float32, device), last)
                got, want = compiled(x), call(x)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                assert got.stride() == want.stride()
    assert counter.frame_count == (2 if dynamic else 6)
    assert any(calls == 0 for _, calls in conv2d_op.decisions()), "the decision made while tracing is not kept"


@pytest.mark.slow
def test_the_kernel_is_traced_for_any_image() -> None:
    """With a kernel that Dynamo takes for one of a GPU: one graph that launches it, and no other for other sizes."""
    pytest.importorskip("triton", reason="traces a kernel")
    code = """
import torch, torch.utils._triton
# Dynamo asks for a driver before it wraps a kernel; nothing is launched here
torch.utils._triton.has_triton = lambda: True
import wavecrest.ops.common.triton as _triton
_triton.emulated = "gfx942"
from wavecrest import ops, registry
registry.get("conv2d").force("triton")
graphs = []

def capture(module, _inputs):
    graphs.append([str(node.target) for node in module.graph.nodes])
    return lambda *_args: (torch.zeros(1),)

weight, bias = torch.randn(64, 32, 3, 3), torch.randn(64)
call = lambda x: ops.conv2d(x, weight, bias, 1, 1, activation="silu")
compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=capture)
with torch.no_grad():
    for side in (20, 21, 19):
        compiled(torch.randn(2, 32, side, side + 3).to(memory_format=torch.channels_last))
print(len(graphs), sum("triton_kernel" in target for target in graphs[0]))
"""
    assert _child(code).split() == ["1", "1"]


@pytest.mark.parametrize("key", ["3x3", "groups", "by axis"])
def test_gradients(key: str, device: str) -> None:
    x, weight, _, *rest = case(key, torch.float32, device)
    bias = random((weight.shape[0],), torch.float32, device, 3)
    assert_grad_falls_back(OP, x, weight / 8, bias, *rest[:-2], "silu")


def test_what_the_kernel_refuses(device: str) -> None:
    args = case("3x3", torch.float64, device)
    with pytest.raises(Unsupported, match="not float64"):
        conv2d_op.run("triton", args)
    decision = conv2d_op.decide(args)
    assert decision.backend == "torch"
    assert_convolves("reference", *args)


def test_dispatch(device: str) -> None:
    """PyTorch by default; the kernel where a pin names it, with its configuration."""
    args = case("3x3", torch.float16, device)
    decision = conv2d_op.decide(args)
    assert decision.backend == "torch"
    assert 0 < conv2d_op.backends["triton"].priority < conv2d_op.backends["torch"].priority
    if device == "cpu":
        assert "are for tests" in {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    config = config_of(*args, BLOCK_M=16)
    conv2d_op.pin(conv2d_op.key(args), "triton", config, "exact", "measured")
    assert conv2d_op.decide(args).backend == "triton" and conv2d_op.decide(args).config == config
    assert torch.equal(ops.conv2d(*args), conv2d_op.run("triton", args, config=config))


@pytest.mark.parametrize("backend", ["torch", BY_COPY, "triton"])
def test_a_bound_call_is_short(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, *_ = case("3x3", torch.float32, device)
    bias = random((20,), torch.float32, device)
    assert_few_calls(OP, backend, monkeypatch, x, weight)
    assert_few_calls(OP, backend, monkeypatch, x, weight, bias, [1, 1], [1, 1], [1, 1], 1, "gelu")


def test_lists_and_keywords(device: str) -> None:
    x, weight, *_ = case("by axis", torch.float32, device)
    want = ops.conv2d(x, weight, None, (1, 2), (3, 1), (2, 3))
    assert torch.equal(ops.conv2d(x, weight, stride=[1, 2], padding=[3, 1], dilation=[2, 3]), want)
    for backend in BACKENDS:
        got = run(OP, backend, x, weight, stride=[1, 2], padding=(3, 1), dilation=[2, 3])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


_X = torch.ones(2, 4, 5, 6)
_W = torch.ones(8, 4, 3, 3)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, _W), r"x must be .* \[B, C, H, W\], got float", id="number"),
        pytest.param((_X[0], _W), r"x must be .*got torch.float32 \[4, 5, 6\]", id="no-batch"),
        pytest.param((_X.int(), _W.int()), "x must be float32", id="integers"),
        pytest.param((_X.to(torch.float8_e4m3fn), _W), "x must be float32", id="float8"),
        pytest.param((_X, "w"), "weight must be", id="weight-text"),
        pytest.param((_X, _W[0]), r"weight must be .* \[O, C / groups, R, S\]", id="weight-dims"),
        pytest.param((_X, _W.half()), "weight must be torch.float32 on cpu as x", id="weight-dtype"),
        pytest.param((_X, _W.to("meta")), "weight must be torch.float32 on cpu as x", id="weight-elsewhere"),
        pytest.param((_X[:, :, :0], _W), "only the batch may be of size 0", id="no-lines"),
        pytest.param((_X[:, :0], _W[:, :0]), "only the batch may be of size 0", id="no-channels"),
        pytest.param((_X, _W[:0]), "only the batch may be of size 0", id="no-outputs"),
        pytest.param((_X, _W[:, :, :0]), "only the batch may be of size 0", id="no-taps"),
        pytest.param((_X, _W[:, :3]), "takes 3 channels a group", id="channels"),
        pytest.param((_X, _W, None, 1, 1, 1, 2), "takes 4 channels a group, x .* in 2 groups has 2", id="group-size"),
        pytest.param((_X, _W, None, 1, 1, 1, 3), "3 groups do not divide 4 channels and 8 outputs", id="groups"),
        pytest.param((_X, _W[:7, :2], None, 1, 1, 1, 2), "2 groups do not divide 4 channels and 7", id="outputs"),
        pytest.param((_X, _W, None, 1, 1, 1, 0), "groups must be a whole number of at least 1, got 0", id="no-groups"),
        pytest.param((_X, _W, None, 1, 1, 1, True), "groups must be a whole number", id="groups-bool"),
        pytest.param((_X, _W, torch.ones(7)), r"bias must be floating-point \[8\]", id="bias-size"),
        pytest.param((_X, _W, torch.ones(8, 1)), r"bias must be floating-point \[8\]", id="bias-dims"),
        pytest.param((_X, _W, torch.ones(8).int()), "bias must be floating-point", id="bias-integers"),
        pytest.param((_X, _W, torch.ones(8, device="meta")), "bias must be .* on cpu", id="bias-elsewhere"),
        pytest.param((_X, _W, 1.0), "bias must be .* got float", id="bias-number"),
        pytest.param((_X, _W, None, 0), "stride must be a whole number of at least 1, or two, got 0", id="stride"),
        pytest.param((_X, _W, None, (1, 2, 3)), "stride must be", id="three-strides"),
        pytest.param((_X, _W, None, 1.0), "stride must be", id="stride-float"),
        pytest.param((_X, _W, None, True), "stride must be", id="stride-bool"),
        pytest.param((_X, _W, None, 1, -1), "padding must be a whole number of at least 0", id="padding"),
        pytest.param((_X, _W, None, 1, None), "padding must be", id="no-padding"),
        pytest.param((_X, _W, None, 1, "full"), "padding takes same, valid or numbers, not 'full'", id="padding-word"),
        pytest.param((_X, _W, None, (1, 2), "same"), "goes with a stride of 1", id="same-stride"),
        pytest.param((_X, _W, None, 1, 0, (1, 0)), "dilation must be a whole number of at least 1", id="dilation"),
        pytest.param((_X, _W, None, 1, 0, 1, 1, "tanh"), "activation takes relu, .*, not 'tanh'", id="activation"),
        pytest.param(
            (_X, _W, None, 1, (0, 1), 3), r"covers 7 × 7 pixels, more than the padded input has \(5 × 8\)", id="large"
        ),
        pytest.param((_X[..., :2], _W), r"3 × 3 pixels, more than the padded input has \(5 × 2\)", id="narrow"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], message: str, backend: str | None) -> None:
    assert_refuses(OP, backend, args, message)


def test_key_has_all_the_choice_depends_on() -> None:

    def key(*args: Any) -> Key:
        return conv2d_op.key(arguments(*args))

    bias = torch.ones(8)
    variants = [
        key(_X, _W),
        key(_X[:1], _W),
        key(_X[..., :3], _W),
        key(_X, _W[:4]),
        key(_X, _W[..., :1]),
        key(_X, _W[..., :1, :]),
        key(_X, _W, None, (1, 2)),
        key(_X, _W, None, (2, 1)),
        key(_X, _W, None, 1, 2, 2),
        key(_X, _W[:, :2], None, 1, 0, 1, 2),
        key(_X.half(), _W.half()),
        key(formatted(_X, True), _W),
        key(_X, formatted(_W, True)),
        key(formatted(_X, True), formatted(_W, True)),
        key(_X, _W, bias),
        key(_X, _W, bias.half()),
        key(_X, _W, bias, 1, 0, 1, 1, "relu"),
        key(_X, _W.clone().requires_grad_()),
    ]
    assert len(set(variants)) == len(variants)
    assert all(len(found) == len(conv2d_op.key_fields) for found in variants)
    # made of what a table of measured rows can hold, and the same for sizes of one bucket
    assert all(part is None or type(part) in (int, str, bool) for found in variants for part in found)
    assert key(torch.ones(2, 4, 9, 9), _W) == key(torch.ones(1, 4, 11, 13), _W)


def test_cost() -> None:
    x, weight = torch.empty(2, 8, 6, 5, dtype=torch.float16), torch.empty(12, 4, 3, 3, dtype=torch.float16)
    cost = conv2d_op.study.cost(arguments(x, weight, torch.ones(12), 1, 1, 1, 2))
    assert cost.flops == 2 * (2 * 6 * 5) * 12 * (4 * 9)
    assert cost.bytes == x.nbytes + weight.nbytes + 2 * (2 * 12 * 6 * 5) + 4 * 12


def test_the_cases_of_tools_are_calls(device: str) -> None:
    study = conv2d_op.study
    assert study.bench_cases is not None and study.emulate_cases is not None
    quick = study.bench_cases("quick", device)
    assert len(quick) == 4 and len(study.bench_cases("shared", device)) == 8
    for make in (*quick.values(), *study.emulate_cases("gfx942").values()):
        call = make()
        conv2d_op.check(call)
        assert_within(conv2d_op(call), *exact(*call, 1.0), 1.001)
    call = study.inputs(2, 8, 6, 12, torch.float16, device)
    assert call.x.shape == (2, 8, 6, 6) and call.weight.shape == (12, 8, 3, 3)
    assert conv2d_op(call).shape == (2, 12, 6, 6)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_default_configurations(arch: str) -> None:
    """Every bit of a tile of both operands fits into LDS, and a step is no longer than its channels without need."""
    for rows, outputs, channels, taps, groups, bits in itertools.product(
        (1, 512, 1 << 17), (1, 24, 512), (1, 3, 8, 24, 40, 64, 100, 512), (1, 9, 49), (1, 32), (16, 32)
    ):
        shape = configs.Shape(rows, outputs, channels, taps, groups, bits)
        made = configs.default(shape, ARCHS[arch])
        tile = (made["BLOCK_M"] + made["BLOCK_N"]) * made["BLOCK_K"] * bits // 8
        assert tile * (made["num_stages"] - (ARCHS[arch].vendor == "amd")) <= ARCHS[arch].lds_kib * 1024
        assert made["BLOCK_N"] < 2 * max(outputs, 9) and min(made["BLOCK_K"], made["BLOCK_M"]) >= 16
        along = channels * taps if made["FLAT"] else channels
        assert made["BLOCK_K"] < 2 * max(along, 9)
        assert made["FLAT"] == (channels < 8 and taps > 1)
