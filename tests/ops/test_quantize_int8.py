from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_refuses, random, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config

OP = "quantize_int8"
INF, NAN = float("inf"), float("nan")
GRANULARITIES = ("tensor", "token", "group")
ONES = {"tensor": (), "token": (2, 1), "group": (2, 2)}


def quantize(backend: str, *args: object, config: Config | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = run(OP, backend, *args, config=config)
    return q, scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_ties_go_to_even_and_both_ends_are_reached(static: bool, granularity: str, backend: str, device: str) -> None:
    x = torch.zeros(2, 140, device=device)
    x[:, :9] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5], device=device)
    # the largest is 127 in each row and each group, so that the scale is 1
    x[0, 9], x[1, 9], x[0, 139], x[1, 139] = 127.0, -127.0, 127.0, -127.0
    q, scale = quantize(backend, x, torch.ones(ONES[granularity], device=device) if static else None, granularity)
    assert torch.equal(scale, torch.ones(ONES[granularity], device=device))
    want = torch.zeros(2, 140, dtype=torch.int8, device=device)
    want[:, :9] = torch.tensor([0, 2, 2, 0, -2, -2, 126, 126, -126], dtype=torch.int8, device=device)
    want[0, 9], want[1, 9], want[0, 139], want[1, 139] = 127, -127, 127, -127
    assert torch.equal(q, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_saturates_where_a_given_scale_is_too_small(granularity: str, backend: str, device: str) -> None:
    x = torch.full((2, 140), 1000.0, device=device)
    x[1] = -1000.0
    x[:, 3], x[0, 4], x[1, 4], x[:, 5] = NAN, INF, -INF, 1.0
    scale = torch.full(ONES[granularity], 0.5, device=device)
    q, _ = quantize(backend, x, scale, granularity)
    want = torch.full((2, 140), 127, dtype=torch.int8, device=device)
    want[1] = -127
    want[:, 3], want[:, 5] = 0, 2
    assert torch.equal(q, want), "within ±127, never -128; NaN is 0"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [None, Config(BLOCK_M=1, BLOCK_N=64, PACKED=0, num_warps=1)], ids=["whole", "split"])
def test_what_is_not_finite_shows_in_the_scale(config: Config | None, backend: str, device: str) -> None:
    x = random((5, 140), torch.float32, device)
    x[0, 139], x[1, 0], x[2, 70] = NAN, INF, -INF
    x[4, :64] = NAN
    q, scale = quantize(backend, x, None, "token", config=config)
    assert scale[[0, 4]].isnan().all() and torch.equal(scale[[1, 2], 0], torch.full((2,), INF, device=device))
    assert not q[[0, 1, 2, 4]].any() and scale[3].isfinite().all() and q[3].any()
    back = run("dequantize", backend, q, scale, torch.float32)
    assert not back[[0, 1, 2, 4]].isfinite().any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_any_nan_is_0(static: bool, granularity: str, device: str) -> None:
    # a NaN has 23 bits of its own, which must not be taken for a number
    x = torch.ones(2, 140, device=device)
    codes = [0x7FC00001, 0x7FC000FF, 0x7F800055, -1, 0x7FFFFFFF]
    x[0, :5] = torch.tensor(codes, dtype=torch.int32, device=device).view(torch.float32)
    q, _ = quantize("triton", x, torch.ones(ONES[granularity], device=device) if static else None, granularity)
    assert not q[0, :5].any()
    assert (q[1, 130:] == (1 if static else 0 if granularity == "tensor" else 127)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_not_finite_in_the_whole_tensor(backend: str, device: str) -> None:
    for value, wanted in ((NAN, "nan"), (-INF, "inf")):
        x = random((5, 140), torch.float32, device)
        x[4, 139] = value
        q, scale = quantize(backend, x, None, "tensor")
        assert str(float(scale)) == wanted and not q.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_and_numbers_near_them(granularity: str, backend: str, device: str) -> None:
    q, scale = quantize(backend, torch.zeros(2, 140, device=device), None, granularity)
    assert not q.any() and torch.equal(scale, torch.ones(ONES[granularity], device=device))
    smallest = 2.0**-126
    x = torch.zeros(2, 140, device=device)
    # below 127 of the smallest scale there is; a denormal; an ordinary scale beside it
    x[0, 0], x[0, 1], x[1, 3], x[0, 130], x[1, 130] = 100 * smallest, 1e-40, -1e-40, 2.0**-149, 63.5
    q, scale = quantize(backend, x, None, granularity)
    small = torch.tensor(smallest, device=device)
    if granularity == "tensor":
        assert scale == 0.5 and q[1, 130] == 127 and q.count_nonzero() == 1
    elif granularity == "token":
        assert scale[0] == small and scale[1] == 0.5
        assert q[0, 0] == 100 and q[1, 130] == 127 and q.count_nonzero() == 2
    else:
        assert torch.equal(scale, torch.tensor([[smallest, smallest], [smallest, 0.5]], device=device))
        assert q[0, 0] == 100 and q[1, 130] == 127 and q.count_nonzero() == 2


@pytest.mark.parametrize("position", [(0, 0), (65, 7), (64, 3)], ids=str)
def test_the_whole_tensor_has_one_largest(position: tuple[int, int], device: str) -> None:
    # more programs than there are words to gather the largest magnitude in
    x = random((66, 8), torch.float32, device).clamp(-3, 3)
    x[position] = -25.4
    for config in (None, Config(BLOCK_M=1, BLOCK_N=8, PACKED=0, num_warps=1)):
        q, scale = quantize("triton", x, None, "tensor", config=config)
        torch.testing.assert_close(float(scale), 25.4 / 127, rtol=1e-6, atol=0.0)
        assert q[position] == -127 and (q.abs() == 127).sum() == 1


def test_groups_do_not_see_each_other(device: str) -> None:
    x = random((3, 300), torch.float32, device)
    q, scale = quantize("triton", x, None, "group")
    other = x.clone()
    other[:, 128:256] *= 7.0
    q_other, scale_other = quantize("triton", other, None, "group")
    assert torch.equal(scale[:, [0, 2]], scale_other[:, [0, 2]]) and not torch.equal(scale[:, 1], scale_other[:, 1])
    kept = torch.tensor([*range(128), *range(256, 300)], device=device)
    assert torch.equal(q[:, kept], q_other[:, kept])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_of_each_scale_is_the_largest_of_the_type(granularity: str, device: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = random((4, 300), dtype, device) * 3.7
        q, _ = quantize("triton", x, None, granularity)
        pieces = {"tensor": [(q, x)], "token": list(zip(q, x, strict=True))}.get(granularity)
        if pieces is None:
            pieces = [(a, b) for g in range(3) for a, b in zip(q.split(128, 1)[g], x.split(128, 1)[g], strict=True)]
        for rounded, exact in pieces:
            largest = exact.abs().float() == exact.abs().float().max()
            assert (rounded[largest].abs() == 127).all()


def test_given_scales_of_any_strides(device: str) -> None:
    x = random((4, 300), torch.float32, device)
    apart = torch.linspace(0.01, 0.03, 24, device=device).view(4, 6)[:, ::2]
    for granularity, scale in (("group", apart), ("token", apart[:, 1:2]), ("token", apart[:1, :1].expand(4, 1))):
        q, returned = quantize("triton", x, scale, granularity)
        want, _ = quantize("reference", x.double(), scale, granularity)
        assert torch.equal(returned, scale)
        assert (q.int() - want.int()).abs().max() <= 1 and (q != want).sum() < 5


def test_public_function_gives_what_the_kernel_gives(device: str) -> None:
    registry.get(OP).force("triton")
    x = random((4, 300), torch.float32, device)
    for granularity in GRANULARITIES:
        for got, want in zip(
            ops.quantize_int8(x, granularity=granularity), quantize("triton", x, None, granularity), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0,), "takes a tensor", id="number"),
        pytest.param((torch.tensor(1.0),), r"\[..., N\]", id="scalar"),
        pytest.param((torch.ones(2, 4, dtype=torch.int32),), "floating-point", id="integers"),
        pytest.param((torch.ones(2, 4), None, "row"), "granularity takes tensor, token, group, not 'row'", id="row"),
        pytest.param((torch.ones(2, 4), None, ["token"]), "granularity takes", id="list"),
        pytest.param((torch.ones(2, 4), 0.1), "token scale must be torch.float32 .*got float", id="scale-number"),
        pytest.param((torch.ones(2, 4), torch.ones(2)), r"must be torch.float32 \[2, 1\], got", id="scale-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 1).half()), "got torch.float16", id="scale-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 1), "tensor"), "tensor scale must be", id="scale-not-tensor"),
        pytest.param((torch.ones(2, 129), torch.ones(2, 1), "group"), r"\[2, 2\], got", id="scale-not-group"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 1, device="meta")), "scale is on meta", id="scale-elsewhere"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    assert_refuses(OP, backend, args, message)
