from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    SHAPES,
    WIDE,
    assert_compiles,
    assert_grad_falls_back,
    assert_matches,
    assert_never_copies,
    five_dims,
    layout,
    name,
    random,
    shape_id,
)
from wavecrest import ops, registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.tuned import Config

OP = "layer_norm"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str) -> None:
    w, b = random(shape[-1:], dtype, device, 1), random(shape[-1:], dtype, device, 2)
    assert_matches(OP, backend, random(shape, dtype, device), w, b, 1e-5)


@pytest.mark.parametrize("key", LAYOUTS)
def test_strides(key: str, device: str) -> None:
    w, b = random((72,), torch.float32, device, 1), random((72,), torch.float32, device, 2)
    # a constant row has nothing but rounding left after centring: eps decides, so it must not be tiny
    assert_matches(OP, "triton", layout(key, torch.float32, device), w, b, 1e-2)


@pytest.mark.parametrize("key", LAYOUTS)
def test_no_copy(key: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_never_copies(OP, monkeypatch, layout(key, torch.float32, device), None, None, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("affine", ["weight", "bias", "neither"])
def test_optional_parameters(affine: str, backend: str, device: str) -> None:
    w = random((40,), torch.float32, device, 1) if affine == "weight" else None
    b = random((40,), torch.float32, device, 2) if affine == "bias" else None
    assert_matches(OP, backend, random((5, 40), torch.float32, device), w, b, 1e-5)


def test_parameter_layouts_and_dtypes(device: str) -> None:
    x = random((5, 40), torch.bfloat16, device)
    w, b = random((80,), torch.float32, device, 1)[::2], random((1,), torch.float16, device, 2).expand(40)
    assert_matches(OP, "triton", x, w, b, 1e-5)
    assert_matches(OP, "reference", x, w, b, 1e-5)
    with pytest.raises(Unsupported, match="weight of x's dtype"):
        registry.get(OP).run("torch", x, w, b)
    with pytest.raises(Unsupported, match="bias of x's dtype"):
        registry.get(OP).run("torch", x, None, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    assert_matches(OP, backend, 1e-3 * random((4, 64), torch.float32, device), None, None, eps)


@pytest.mark.parametrize("config", [None, Config(BLOCK_M=2, BLOCK_N=16, num_warps=1)], ids=["one-pass", "looped"])
def test_large_mean_does_not_cancel(config: Config | None, device: str) -> None:
    # E[x²] − E[x]² in float32 would leave nothing of a variance of 1 beside a mean of 4,096
    noise = random((4, 72), torch.float32, device)
    got = registry.get(OP).run("triton", noise + 4096.0, None, None, 1e-5, config=config)
    want = registry.get(OP).reference((noise + 4096.0).double())
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("block", [16, 64])
def test_looped_rows(block: int, device: str) -> None:
    x = layout("permuted-4d", torch.float32, device, n=72)
    w, b = random((72,), torch.float32, device, 1), random((72,), torch.float32, device, 2)
    config = Config(BLOCK_M=2, BLOCK_N=block, num_warps=1)
    got = registry.get(OP).run("triton", x, w, b, 1e-6, config=config)
    want = registry.get(OP).reference(x.double(), w.double(), b.double(), 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


def test_wide_rows(device: str) -> None:
    w, b = random((WIDE,), torch.float32, device, 1), random((WIDE,), torch.float32, device, 2)
    # a trend along the row: the blocks of columns have different means
    x = random((1, WIDE), torch.float32, device) + torch.linspace(-3, 3, WIDE, device=device)
    assert_matches(OP, "triton", x, w, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
def test_special_values_stay_in_their_row(value: float, backend: str, device: str) -> None:
    x = random((4, 70), torch.float32, device)
    x[1, 69] = value
    x[2] = value
    assert_matches(OP, backend, x, None, None, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=shape_id)
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = random(shape, torch.float32, device)
    assert registry.get(OP).run(backend, x).shape == shape


def test_float64_stays_float64(device: str) -> None:
    x = random((5, 40), torch.float64, device)
    centered = x - x.mean(-1, keepdim=True)
    want = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(ops.layer_norm(x), want, rtol=1e-12, atol=1e-12)


def test_more_leading_dims_than_the_kernel_takes(device: str) -> None:
    x = five_dims(torch.float32, device)
    registry.get(OP).force("triton")
    assert "leading dimensions" in registry.get(OP).decide(x).refused[0].reason
    torch.testing.assert_close(ops.layer_norm(x).double(), registry.get(OP).reference(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("x",), "takes a tensor", id="text"),
        pytest.param((torch.tensor(1.0),), r"\[..., N\]", id="scalar"),
        pytest.param((torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), None, torch.ones(5)), "bias must be", id="bias-long"),
        pytest.param((torch.ones(2, 4), None, torch.ones(4, device="meta")), "bias is on meta", id="bias-elsewhere"),
        pytest.param((torch.ones(2, 4), None, None, -1.0), "eps", id="eps-negative"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.layer_norm(*args)  # type: ignore[arg-type]
        else:
            registry.get(OP).run(backend, *args)


def test_gradients(device: str) -> None:
    w, b = random((40,), torch.float32, device, 1), random((40,), torch.float32, device, 2)
    assert_grad_falls_back(OP, random((3, 40), torch.float32, device), w, b, 1e-5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 48)
