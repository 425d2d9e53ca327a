from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_matches, random, reference, run
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported

OP = "layer_norm"


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
        run(OP, "torch", x, w, b)
    with pytest.raises(Unsupported, match="bias of x's dtype"):
        run(OP, "torch", x, None, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    assert_matches(OP, backend, 1e-3 * random((4, 64), torch.float32, device), None, None, eps)


@pytest.mark.parametrize("config", [None, Config(BLOCK_M=1, BLOCK_N=16, PACKED=0, num_warps=1)], ids=["whole", "split"])
def test_large_mean_does_not_cancel(config: Config | None, device: str) -> None:
    # E[x²] − E[x]² in float32 would leave nothing of a variance of 1 beside a mean of 4,096
    noise = random((4, 72), torch.float32, device)
    got = run(OP, "triton", noise + 4096.0, None, None, 1e-5, config=config)
    want = reference(OP, (noise + 4096.0).double())
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


def test_one_column_is_its_bias(device: str) -> None:
    # nothing is left of it, and 1 / sqrt(eps) is 316 where the difference is not exactly 0
    x, b = torch.tensor([[1000.3], [-0.1], [7.0]], device=device), random((1,), torch.float32, device, 2)
    got = run(OP, "triton", x, None, b, 1e-5)
    torch.testing.assert_close(got, b.expand(3, 1), rtol=1e-6, atol=1e-6)


def test_float64_stays_float64(device: str) -> None:
    x = random((5, 40), torch.float64, device)
    centered = x - x.mean(-1, keepdim=True)
    want = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(ops.layer_norm(x), want, rtol=1e-12, atol=1e-12)


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
            run(OP, backend, *args)
