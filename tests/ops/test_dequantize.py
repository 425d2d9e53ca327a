from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, E4M3, E5M2, assert_refuses, call_of, name, random, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.errors import Unsupported

OP = "dequantize"
EIGHT_BITS = (torch.int8, E4M3, E5M2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize("eight", EIGHT_BITS, ids=name)
def test_each_value_of_the_type(eight: torch.dtype, out: torch.dtype, backend: str, device: str) -> None:
    q = torch.arange(256, dtype=torch.uint8, device=device).view(eight).view(2, 128)
    # one factor that is a power of two, one that makes each product round
    scale = torch.tensor([[0.5], [1.1]], device=device)
    got = run(OP, backend, q, scale, out)
    want = (q.float() * scale).to(out)
    assert got.dtype == out
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0, 1e4, -1e4), want.nan_to_num(0.0, 1e4, -1e4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_large_for_float16_is_infinite(backend: str, device: str) -> None:
    q = torch.tensor([[127, -127, 0, 1]], dtype=torch.int8, device=device)
    got = run(OP, backend, q, torch.full((), 1000.0, device=device), torch.float16)
    assert got[0].tolist() == [float("inf"), -float("inf"), 0.0, 1000.0]


def test_float64_and_the_default_dtype(device: str) -> None:
    q, scale = random((3, 40), torch.int8, device), torch.rand(3, 1, device=device)
    assert ops.dequantize(q, scale).dtype == torch.bfloat16
    with pytest.raises(Unsupported, match="float64"):
        run(OP, "triton", q, scale, torch.float64)
    got = ops.dequantize(q, scale, torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, q.double() * scale.double(), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("eight", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=name)
def test_types_that_the_kernel_does_not_read(eight: torch.dtype, device: str) -> None:
    found = registry.get(OP)
    q, scale = torch.arange(128, dtype=torch.uint8, device=device).view(eight), torch.full((), 0.5, device=device)
    found.force("triton")
    assert f"has no {name(eight)}" in found.decide(call_of(OP, q, scale, torch.float32)).refused[0].reason
    assert torch.equal(ops.dequantize(q, scale, torch.float32), q.float() * 0.5)


@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("eight", EIGHT_BITS, ids=name)
def test_what_was_rounded_comes_back_within_half_a_step(eight: torch.dtype, granularity: str, device: str) -> None:
    x = random((5, 300), torch.float32, device) * 13.0
    if eight == torch.int8:
        q, scale = run("quantize_int8", "triton", x, None, granularity)
    else:
        q, scale = run("quantize_fp8", "triton", x, None, granularity, eight)
    back = run(OP, "triton", q, scale, torch.float32)
    spread = scale if granularity != "group" else scale.repeat_interleave(128, -1)[:, :300]
    # half a step: of the scale; of the value, by the bits of its mantissa, or of the smallest there is
    step = {
        torch.int8: spread.expand(x.shape) / 2,
        E4M3: torch.maximum(x.abs() * 2.0**-4, spread * 2.0**-10),
        E5M2: torch.maximum(x.abs() * 2.0**-3, spread * 2.0**-17),
    }[eight]
    assert ((back - x).abs() <= step * (1 + 1e-5)).all()


def test_the_shape_of_the_scale_decides(device: str) -> None:
    q = random((3, 3), torch.int8, device)
    by_row = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    registry.get(OP).force("triton")
    assert torch.equal(ops.dequantize(q, by_row, torch.float32), q.float() * by_row)
    vector = q[0]
    for scale in (torch.full((), 2.0, device=device), torch.full((1,), 2.0, device=device)):
        assert torch.equal(ops.dequantize(vector, scale, torch.float32), vector.float() * 2)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("q", torch.ones(())), "takes an int8 or 8-bit floating-point tensor .*got str", id="text"),
        pytest.param((torch.ones(2, 4), torch.ones(())), "takes an int8 .*got torch.float32", id="float32"),
        pytest.param((torch.tensor(1, dtype=torch.int8), torch.ones(())), r"\[..., N\]", id="scalar"),
        pytest.param((torch.ones(2, 4, dtype=torch.uint8), torch.ones(())), "takes an int8", id="uint8"),
        pytest.param(
            (torch.ones(2, 200, dtype=torch.int8), torch.ones(2)),
            r"one of the shapes \[\] \(tensor\), \[2, 1\] \(token\), \[2, 2\] \(group\), got \[2\]",
            id="scale-shape",
        ),
        pytest.param((torch.ones(2, 4, dtype=torch.int8), 0.5), "the scale of .*got float", id="scale-number"),
        pytest.param((torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1).half()), "torch.float32", id="scale-half"),
        pytest.param(
            (torch.ones(2, 4, dtype=torch.int8), torch.ones((), device="meta")), "scale is on meta", id="elsewhere"
        ),
        pytest.param((torch.ones(2, 4, dtype=torch.int8), torch.ones(()), torch.int32), "dtype takes", id="out-int32"),
        pytest.param((torch.ones(2, 4, dtype=torch.int8), torch.ones(()), E4M3), "dtype takes", id="out-float8"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    assert_refuses(OP, backend, args, message)
