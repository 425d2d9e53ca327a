from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    PAIRS,
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
    second_layout,
    shape_id,
)
from wavecrest import ops, registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.tuned import Config

OP = "add_rms_norm"


def rounded_sum_oracle(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """What a model computes that adds in its own dtype first, in float64 from there on."""
    h = x + r
    wide = h.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w.double(), h


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str) -> None:
    x, r = random(shape, dtype, device), random(shape, dtype, device, 1)
    w = random(shape[-1:], dtype, device, 2)
    y, h = registry.get(OP).run(backend, x, r, w, 1e-5)
    want_y, want_h = rounded_sum_oracle(x, r, w, 1e-5)
    # the sum is the same rounding of the same float32 value: equal bit for bit
    assert torch.equal(h, want_h)
    limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(y.double(), want_y, rtol=2 * limit, atol=limit)


LOOPED = Config(BLOCK_M=1, BLOCK_N=16, num_warps=1)


@pytest.mark.parametrize(
    ("backend", "config"),
    [*((backend, None) for backend in BACKENDS), ("triton", LOOPED)],
    ids=[*BACKENDS, "triton-looped"],
)
def test_the_norm_is_of_the_rounded_sum(backend: str, config: Config | None, device: str) -> None:
    # 1 + 2^-9 rounds to 1 in bfloat16; the norm of the unrounded sum would differ in many elements
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, ::2] = 3.0
    r = torch.full_like(x, 2.0**-8)
    w = torch.linspace(0.5, 200.0, 64, device=device).bfloat16()
    y, h = registry.get(OP).run(backend, x, r, w, 0.0, config=config)
    assert torch.equal(h, x)
    want = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True)) * w.float()
    assert torch.equal(y, want.bfloat16())
    unrounded = x.float() + r.float()
    other = unrounded * torch.rsqrt(unrounded.square().mean(-1, keepdim=True)) * w.float()
    assert not torch.equal(other.bfloat16(), want.bfloat16())


@pytest.mark.parametrize(("key", "other"), PAIRS)
def test_strides(key: str, other: str, device: str) -> None:
    x = layout(key, torch.float32, device)
    r = second_layout(other, x)
    assert_matches(OP, "triton", x, r, random((72,), torch.float32, device, 2), 1e-6)
    assert_matches(OP, "triton", r, x, random((72,), torch.float32, device, 2), 1e-6)


@pytest.mark.parametrize("key", LAYOUTS)
def test_no_copy(key: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = layout(key, torch.float32, device)
    assert_never_copies(OP, monkeypatch, x, x, None, 1e-6)


@pytest.mark.parametrize("block", [16, 64])
def test_looped_rows(block: int, device: str) -> None:
    x = layout("permuted-4d", torch.bfloat16, device, n=72)
    r, w = layout("permuted-4d", torch.bfloat16, device, 1, n=72), random((72,), torch.bfloat16, device, 2)
    config = Config(BLOCK_M=2, BLOCK_N=block, num_warps=1)
    y, h = registry.get(OP).run("triton", x, r, w, 1e-6, config=config)
    want_y, want_h = rounded_sum_oracle(x, r, w, 1e-6)
    assert torch.equal(h, want_h)
    torch.testing.assert_close(y.double(), want_y, rtol=8e-3, atol=4e-3)


def test_wide_rows(device: str) -> None:
    x, r = random((1, WIDE), torch.float32, device), random((1, WIDE), torch.float32, device, 1)
    assert_matches(OP, "triton", x, r, random((WIDE,), torch.float32, device, 2))


def test_weight_layouts_and_dtypes(device: str) -> None:
    x, r = random((5, 40), torch.bfloat16, device), random((5, 40), torch.bfloat16, device, 1)
    w = random((80,), torch.float32, device, 2)[::2]
    y, _ = registry.get(OP).run("triton", x, r, w, 1e-6)
    torch.testing.assert_close(y.double(), rounded_sum_oracle(x, r, w, 1e-6)[0], rtol=8e-3, atol=4e-3)
    with pytest.raises(Unsupported, match="weight of x's dtype"):
        registry.get(OP).run("torch", x, r, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    x, r = 1e-3 * random((4, 64), torch.float32, device), 1e-3 * random((4, 64), torch.float32, device, 1)
    assert_matches(OP, backend, x, r, None, eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
def test_special_values_stay_in_their_row(value: float, backend: str, device: str) -> None:
    if backend == "torch" and device == "cuda" and value in (float("inf"), float("-inf")):
        pytest.skip("PyTorch's fused CUDA kernel gives other values in a row that holds an infinity")
    x, r = random((5, 70), torch.float32, device), random((5, 70), torch.float32, device, 1)
    x[1, 69] = value
    r[2, 0] = value
    x[3], r[3] = value, -value
    assert_matches(OP, backend, x, r, None, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=shape_id)
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = random(shape, torch.float32, device)
    y, h = registry.get(OP).run(backend, x, x)
    assert y.shape == h.shape == shape


def test_float64_stays_float64(device: str) -> None:
    x, r = random((5, 40), torch.float64, device), random((5, 40), torch.float64, device, 1)
    y, h = ops.add_rms_norm(x, r)
    torch.testing.assert_close(h, x + r, rtol=0, atol=0)
    want = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(y, want, rtol=1e-13, atol=1e-13)


def test_results_do_not_alias_the_arguments(device: str) -> None:
    x, r = random((4, 8), torch.float32, device), torch.zeros(4, 8, device=device)
    for backend in BACKENDS:
        y, h = registry.get(OP).run(backend, x, r)
        assert len({t.data_ptr() for t in (x, r, y, h)}) == 4


def test_more_leading_dims_than_the_kernel_takes(device: str) -> None:
    x = five_dims(torch.float32, device)
    registry.get(OP).force("triton")
    assert "leading dimensions" in registry.get(OP).decide(x, x).refused[0].reason
    y, _ = ops.add_rms_norm(x, x)
    torch.testing.assert_close(y.double(), registry.get(OP).reference(x.double(), x.double())[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, torch.ones(2, 4)), "takes a tensor", id="number"),
        pytest.param((torch.ones(2, 4), 1.0), "residual must be", id="residual-number"),
        pytest.param((torch.ones(2, 4), torch.ones(4)), "residual must be", id="residual-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4).half()), "residual must be", id="residual-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4, device="meta")), "residual must be", id="residual-elsewhere"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), None, -1.0), "eps", id="eps-negative"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.add_rms_norm(*args)  # type: ignore[arg-type]
        else:
            registry.get(OP).run(backend, *args)


def test_gradients(device: str) -> None:
    x, r = random((3, 40), torch.float32, device), random((3, 40), torch.float32, device, 1)
    assert_grad_falls_back(OP, x, r, random((40,), torch.float32, device, 2), 1e-6)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 48)
