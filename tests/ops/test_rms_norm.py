from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, DTYPES, assert_matches, name, random, reference, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument, Unsupported

OP = "rms_norm"


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("weight", DTYPES, ids=name)
def test_weight_dtypes(dtype: torch.dtype, weight: torch.dtype, device: str) -> None:
    x, w = random((5, 40), dtype, device), random((40,), weight, device, 1)
    assert_matches(OP, "triton", x, w, 1e-6)
    assert_matches(OP, "reference", x, w, 1e-6)
    if dtype != weight:
        with pytest.raises(Unsupported, match="weight of x's dtype"):
            run(OP, "torch", x, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    # values near sqrt(eps), where its place decides the result
    assert_matches(OP, backend, 1e-3 * random((4, 64), torch.float32, device), None, eps)


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
        want = reference(OP, x.double(), None, 0.1 * (seed + 1))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_float64_stays_float64(device: str) -> None:
    x, w = random((5, 40), torch.float64, device), random((40,), torch.float64, device, 1)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
    torch.testing.assert_close(ops.rms_norm(x, w), want, rtol=1e-13, atol=1e-13)


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
            run(OP, backend, *args)
