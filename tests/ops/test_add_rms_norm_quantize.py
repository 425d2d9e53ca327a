from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_refuses, assert_rounds_once, random
from wavecrest import ops, registry
from wavecrest.tuned import Config

OP = "add_rms_norm_quantize"
X = torch.ones(2, 4)


@pytest.mark.parametrize(
    "config",
    [None, Config(BLOCK_M=2, BLOCK_N=256, PACKED=1, num_warps=1), Config(BLOCK_M=1, BLOCK_N=64, PACKED=1, num_warps=1)],
    ids=["default", "packed", "split"],
)
def test_rounds_once(config: Config | None, device: str) -> None:
    assert_rounds_once(OP, config, device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_is_rounded_first(dtype: torch.dtype, backend: str, device: str) -> None:
    x, r = random((3, 140), dtype, device), random((3, 140), dtype, device, 1)
    q, scale, h = registry.get(OP).run(backend, x, r)
    assert torch.equal(h, x + r)
    assert len({t.data_ptr() for t in (x, r, h)}) == 3
    # the norm of the rounded sum has another scale than that of the sum in float32
    y = registry.get("rms_norm").reference(h.double())
    torch.testing.assert_close(scale.double(), y.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0.0)
    other = registry.get("rms_norm").reference(x.double() + r.double())
    assert ((other.abs().amax(-1, keepdim=True) / 127 / scale - 1).abs() > 1e-5).any()
    assert q.dtype == torch.int8


def test_public_function(device: str) -> None:
    registry.get(OP).force("triton")
    x, r = random((3, 140), torch.float32, device), random((3, 140), torch.float32, device, 1)
    for got, want in zip(
        ops.add_rms_norm_quantize(x, r, granularity="group"),
        registry.get(OP).run("triton", x, r, granularity="group"),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_given_scale_is_used_and_saturates(backend: str, device: str) -> None:
    x, r = random((3, 140), torch.float32, device), random((3, 140), torch.float32, device, 1)
    for granularity, shape in (("tensor", ()), ("token", (3, 1)), ("group", (3, 2))):
        scale = torch.full(shape, 2.0**-8, device=device)
        results = registry.get(OP).run(backend, x, r, None, 1e-5, torch.int8, granularity, scale)
        q = results[0]
        assert results[1] is scale or torch.equal(results[1], scale)
        assert q.max() == 127 and q.min() == -127
        y = registry.get("rms_norm").reference((x + r).double(), None, 1e-5) * 256
        inside = y.abs() < 126
        assert ((q.double() - y).abs()[inside] <= 0.5 + 1e-3).all() and inside.any()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            (
                3.0,
                X,
            ),
            "takes a tensor",
            id="number",
        ),
        pytest.param((X, None), "residual must be", id="residual-none"),
        pytest.param((X, torch.ones(2, 5)), "residual must be", id="residual-shape"),
        pytest.param((X, torch.ones(2, 4).half()), "residual must be", id="residual-dtype"),
        pytest.param((X, X, torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((X, X, None, -1.0), "eps", id="eps-negative"),
        pytest.param((X, X, None, 1e-5, torch.int16), "dtype takes int8, float8_e4m3fn, .*int16", id="dtype"),
        pytest.param((X, X, None, 1e-5, torch.int8, "row"), "granularity takes", id="granularity"),
        pytest.param(
            (X, X, None, 1e-5, torch.int8, "tensor"),
            "cannot be worked out in one pass; give it, or use token",
            id="tensor-dynamic",
        ),
        pytest.param((X, X, None, 1e-5, torch.int8, "tensor", torch.ones(1)), "tensor scale must be", id="scale-shape"),
        pytest.param(
            (X, X, None, 1e-5, torch.int8, "token", torch.ones(2, 1).half()), "torch.float32", id="scale-dtype"
        ),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    assert_refuses(OP, backend, args, message)
