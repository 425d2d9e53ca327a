from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ops.op_harness import BACKENDS, E4M3, E5M2, LARGEST, assert_refuses, call_of, name, random, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.errors import Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.common import quantized

OP = "quantize_fp8"
INF, NAN = float("inf"), float("nan")
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def finite_values(dtype: torch.dtype, device: str) -> torch.Tensor:
    """All positive values of a type, in order, the code of each being its place."""
    values = torch.arange(128, dtype=torch.uint8, device=device).view(dtype).float()
    return values[values.isfinite()]


def codes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8).int()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=name)
def test_each_value_of_the_type_comes_back(dtype: torch.dtype, backend: str, device: str) -> None:
    values = finite_values(dtype, device)
    x = torch.stack((values, -values))
    # the largest value is there: the scale worked out is 1
    for scale in (None, torch.ones(2, 1, device=device)):
        q, used = run(OP, backend, x, scale, "token", dtype)
        assert torch.equal(used, torch.ones(2, 1, device=device))
        assert torch.equal(codes(q)[0], torch.arange(values.numel(), device=device, dtype=torch.int32))
        assert torch.equal(q.float(), x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=name)
def test_ties_go_to_even(dtype: torch.dtype, backend: str, device: str) -> None:
    values = finite_values(dtype, device)
    middle = (values[:-1] + values[1:]) / 2
    below = torch.arange(values.numel() - 1, device=device, dtype=torch.int32)
    one = torch.ones((), device=device)
    q, _ = run(OP, backend, middle, one, "tensor", dtype)
    assert torch.equal(codes(q), below + below % 2)
    for factor, want in ((1 + 2.0**-20, below + 1), (1 - 2.0**-20, below)):
        q, _ = run(OP, backend, middle * factor, one, "tensor", dtype)
        assert torch.equal(codes(q), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=name)
def test_saturates_where_a_given_scale_is_too_small(dtype: torch.dtype, backend: str, device: str) -> None:
    largest = LARGEST[dtype]
    x = torch.tensor([[largest * 1.01, 1e30, INF, NAN, -largest * 1.01, -1e30, -INF, 1.0, -0.0]], device=device)
    for granularity, shape in (("tensor", ()), ("token", (1, 1)), ("group", (1, 1))):
        q, _ = run(OP, backend, x, torch.ones(shape, device=device), granularity, dtype)
        got = q.float()[0]
        assert got[3].isnan() and not got.isinf().any()
        want = torch.tensor([largest] * 3 + [-largest] * 3 + [1.0, 0.0], device=device)
        assert torch.equal(got[[0, 1, 2, 4, 5, 6, 7, 8]], want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
def test_what_is_not_finite_shows_in_the_scale(granularity: str, backend: str, device: str) -> None:
    x = random((2, 200), torch.float32, device)
    x[0, 3] = INF
    q, scale = run(OP, backend, x, None, granularity, E4M3)
    assert scale.flatten()[0] == INF
    # 0 · inf is NaN when it comes back, as is inf / inf
    assert q.float()[0, 3].isnan() and not q.float()[0, :3].any()
    x[0, 3] = NAN
    q, scale = run(OP, backend, x, None, granularity, E4M3)
    assert scale.flatten()[0].isnan() and q.float()[0, :128].isnan().all()
    if granularity != "tensor":
        assert q.float()[1].isfinite().all()


@pytest.mark.parametrize("dtype", FNUZ, ids=name)
def test_types_that_the_kernel_does_not_make(dtype: torch.dtype, device: str) -> None:
    found = registry.get(OP)
    values = finite_values(dtype, device)
    found.force("triton")
    decision = found.decide(call_of(OP, values, None, "token", dtype))
    assert decision.backend == "torch"
    reason = {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    assert f"has no {name(dtype)}" in reason
    with pytest.raises(Unsupported, match=f"has no {name(dtype)}"):
        run(OP, "triton", values, None, "token", dtype)
    # the definition has them: each value comes back
    q, scale = ops.quantize_fp8(values, dtype=dtype)
    assert float(scale) == 1.0 and q.dtype == dtype and torch.equal(q.float(), values)
    assert float(values.max()) == LARGEST[dtype]
    q, _ = ops.quantize_fp8(values * 2, torch.ones((), device=device), "tensor", dtype)
    assert float(q.float().max()) == LARGEST[dtype]


@pytest.mark.parametrize(("fp8", "wanted"), [("e4m3fnuz", torch.float8_e4m3fnuz), ("e4m3fn", E4M3)])
def test_the_type_is_that_of_the_gpu(fp8: str, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.get(OP).force("reference")
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: SimpleNamespace(fp8=fp8, name="gfx942"))
    assert ops.quantize_fp8(torch.ones(2, 8))[0].dtype == wanted
    assert ops.quantize_fp8(torch.ones(2, 8), dtype=E5M2)[0].dtype == E5M2


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_make_fnuz_types_where_the_gpu_has_them(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    native = ARCHS[arch].fp8 == "e4m3fnuz"
    for dtype in FNUZ:
        refusal = quantized.kernel_refusal(dtype)
        assert refusal is None if native else f"{arch} has no {name(dtype)}; gfx942 do" == refusal
    # and where it has 8-bit floats at all, the kernels make the OCP types
    for dtype in (E4M3, E5M2):
        assert (quantized.kernel_refusal(dtype) is None) == (ARCHS[arch].fp8 is not None)


def test_the_type_without_a_gpu_or_on_nvidia(device: str) -> None:
    if device == "cuda" and torch.version.hip is not None:
        pytest.skip("an AMD GPU chooses by its architecture")
    assert ops.quantize_fp8(torch.ones(2, 8, device=device))[0].dtype == E4M3


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("x", None, "token", E4M3), "takes a tensor", id="text"),
        pytest.param((torch.ones(2, 4, dtype=torch.int8), None, "token", E4M3), "floating-point", id="integers"),
        pytest.param((torch.ones(2, 4), None, "token", torch.int8), "dtype takes float8_e4m3fn, .*int8", id="int8"),
        pytest.param((torch.ones(2, 4), None, "token", "float8_e4m3fn"), "dtype takes", id="dtype-text"),
        pytest.param((torch.ones(2, 4), None, "rows", E4M3), "granularity takes", id="granularity"),
        pytest.param((torch.ones(2, 4), torch.ones(2), "token", E4M3), "token scale must be", id="scale-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 2), "group", E5M2), "group scale must be", id="scale-group"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    assert_refuses(OP, backend, args, message)
