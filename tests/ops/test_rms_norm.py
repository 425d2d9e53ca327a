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

OP = "rms_norm"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str) -> None:
    assert_matches(OP, backend, random(shape, dtype, device), random(shape[-1:], dtype, device, 1), 1e-5)


@pytest.mark.parametrize("key", LAYOUTS)
def test_strides(key: str, device: str) -> None:
    x = layout(key, torch.float32, device)
    assert_matches(OP, "triton", x, random((72,), torch.float32, device, 1), 1e-6)


@pytest.mark.parametrize("key", LAYOUTS)
def test_no_copy(key: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_never_copies(OP, monkeypatch, layout(key, torch.float32, device), None, 1e-6)


@pytest.mark.parametrize("weight", ["strided", "expanded", "none"])
def test_weight_layouts(weight: str, device: str) -> None:
    made = {
        "strided": random((80,), torch.float32, device, 1)[::2],
        "expanded": random((1,), torch.float32, device, 1).expand(40),
        "none": None,
    }[weight]
    assert_matches(OP, "triton", random((5, 40), torch.float32, device), made, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("weight", DTYPES, ids=name)
def test_weight_dtypes(dtype: torch.dtype, weight: torch.dtype, device: str) -> None:
    x, w = random((5, 40), dtype, device), random((40,), weight, device, 1)
    assert_matches(OP, "triton", x, w, 1e-6)
    assert_matches(OP, "reference", x, w, 1e-6)
    if dtype != weight:
        with pytest.raises(Unsupported, match="weight of x's dtype"):
            registry.get(OP).run("torch", x, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    # values near sqrt(eps), where its place decides the result
    assert_matches(OP, backend, 1e-3 * random((4, 64), torch.float32, device), None, eps)


@pytest.mark.parametrize("first", [0, 1], ids=["aligned-first", "misaligned-first"])
def test_addresses_of_one_signature_may_differ_in_alignment(first: int, device: str) -> None:
    # 16-byte accesses at an address that is not a multiple of 16 are an error on a GPU
    registry.get(OP).force("triton")
    buffer = random((4 * 64 + 8,), torch.bfloat16, device)
    weight = random((64 + 8,), torch.bfloat16, device, 1)
    for offset in (first, 1 - first, first, 1 - first, 3):
        x, w = buffer[offset : offset + 256].view(4, 64), weight[offset : offset + 64]
        want = registry.get(OP).reference(x.double(), w.double())
        torch.testing.assert_close(ops.rms_norm(x, w).double(), want, rtol=8e-3, atol=4e-3)


def test_two_streams_and_new_values(device: str) -> None:
    registry.get(OP).force("triton")
    for seed in range(3):
        x = random((4, 64), torch.float32, device, seed)
        if device == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = ops.rms_norm(x, None, 0.1 * (seed + 1))
            torch.cuda.current_stream().wait_stream(stream)
        else:
            got = ops.rms_norm(x, None, 0.1 * (seed + 1))
        want = registry.get(OP).reference(x.double(), None, 0.1 * (seed + 1))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph() -> None:
    registry.get(OP).force("triton")
    x = random((4, 64), torch.float32, "cuda")
    ops.rms_norm(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rms_norm(x)
    x.copy_(random((4, 64), torch.float32, "cuda", 5))
    graph.replay()
    torch.testing.assert_close(y.double(), registry.get(OP).reference(x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [16, 64])
def test_looped_rows(block: int, device: str) -> None:
    x, w = layout("permuted-4d", torch.float32, device, n=72), random((72,), torch.float32, device, 1)
    config = Config(BLOCK_M=2, BLOCK_N=block, num_warps=1)
    got = registry.get(OP).run("triton", x, w, 1e-6, config=config)
    want = registry.get(OP).reference(x.double(), w.double(), 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_wide_rows(device: str) -> None:
    assert_matches(OP, "triton", random((2, WIDE), torch.bfloat16, device), random((WIDE,), torch.bfloat16, device, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
def test_special_values_stay_in_their_row(value: float, backend: str, device: str) -> None:
    if backend == "torch" and device == "cuda" and value in (float("inf"), float("-inf")):
        pytest.skip("PyTorch's fused CUDA kernel gives other values in a row that holds an infinity")
    x = random((4, 70), torch.float32, device)
    x[1, 69] = value
    x[2] = value
    assert_matches(OP, backend, x, None, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=shape_id)
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = random(shape, torch.float32, device)
    assert registry.get(OP).run(backend, x, random(shape[-1:], torch.float32, device)).shape == shape


def test_float64_stays_float64(device: str) -> None:
    x, w = random((5, 40), torch.float64, device), random((40,), torch.float64, device, 1)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
    torch.testing.assert_close(ops.rms_norm(x, w), want, rtol=1e-13, atol=1e-13)
    with pytest.raises(Unsupported, match="float64"):
        registry.get(OP).run("triton", x, w)


def test_more_leading_dims_than_the_kernel_takes(device: str) -> None:
    x = five_dims(torch.float32, device)
    registry.get(OP).force("triton")
    decision = registry.get(OP).decide(x)
    assert decision.backend == "torch"
    assert "leading dimensions" in decision.refused[0].reason
    want = registry.get(OP).reference(x.double())
    torch.testing.assert_close(ops.rms_norm(x).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0,), "takes a tensor", id="number"),
        pytest.param((torch.tensor(1.0),), r"\[..., N\]", id="scalar"),
        pytest.param((torch.ones(2, 4, dtype=torch.int32),), "floating-point", id="integers"),
        pytest.param((torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), torch.ones(1, 4)), "weight must be", id="weight-2d"),
        pytest.param((torch.ones(2, 4), torch.ones(4, dtype=torch.int64)), "weight must be", id="weight-integers"),
        pytest.param((torch.ones(2, 4), torch.ones(4, device="meta")), "weight is on meta", id="weight-elsewhere"),
        pytest.param((torch.ones(2, 4), None, -1.0), "eps", id="eps-negative"),
        pytest.param((torch.ones(2, 4), None, float("nan")), "eps", id="eps-nan"),
        pytest.param((torch.ones(2, 4), None, "1"), "eps", id="eps-text"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.rms_norm(*args)  # type: ignore[arg-type]
        else:
            registry.get(OP).run(backend, *args)


def test_gradients(device: str) -> None:
    assert_grad_falls_back(OP, random((3, 40), torch.float32, device), random((40,), torch.float32, device, 1), 1e-6)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 48)
