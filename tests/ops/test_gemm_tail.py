"""`linear` with a tail: a few rows of x's dtype behind a weight in 8 bits, against an oracle in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    F16,
    F32,
    F64,
    I8,
    KERNELS,
    Watch,
    assert_right,
    multiply,
    random,
    refuses,
    scales,
    watched,
)
from tests.ops.op_harness import name, same_bits
from wavecrest import nn, ops
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall, linear_call

MULTIPLY = "triton_gemv"


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


def product(
    M: int, N: int, T: int, K: int, a: torch.dtype = BF16, b: torch.dtype = I8, device: str = "cpu", **more: Any
) -> GemmCall:
    """a [M, K] times a weight [N, K] in 8 bits, a scale a row, and T rows of a's dtype, larger than those."""
    scale = {"scale_b": scales(N, device=device, size=0.02)} | more
    tail = 3 * random(T, K, dtype=a, device=device, seed=2)
    weight = random(N, K, dtype=b, device=device, seed=1)
    return GemmCall(random(M, K, dtype=a, device=device), weight.mT, tail=tail.mT, **scale)


@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows(rows: int, watch: Watch, device: str) -> None:
    a, b = (F32, F16, BF16)[rows % 3], (I8, E4M3)[rows % 2]
    # columns and steps that are not full, full ones, one step, one column, fewer columns than the tail has
    for sizes, config in (
        ((21, 3, 150), multiply(16, 64)), ((16, 16, 128), multiply(8, 32)), ((5, 1, 7), multiply(2, 16)),
        ((1, 5, 70), multiply(4, 32)),
    ):  # fmt: skip
        call = product(rows, *sizes, a, b, device, out_dtype=F32)
        assert_right(MULTIPLY, call, config, watch)
        gain = random(sizes[2], dtype=F64, seed=5).to(a).to(device)
        assert_right(MULTIPLY, call._replace(norm_weight=gain), config, watch)


@pytest.mark.parametrize("bias", [BF16, F32, None])
@pytest.mark.parametrize("activation", [None, "silu", "leaky_relu"])
def test_all_that_comes_behind(activation: str | None, bias: torch.dtype | None, watch: Watch, device: str) -> None:
    vector = None if bias is None else random(2 * 27, dtype=bias, device=device, seed=4)[::2]
    for scale in (scales(24, device=device, size=0.02), scales(device=device, size=0.02)):
        call = product(
            4, 24, 3, 75, device=device, scale_b=scale, activation=activation, alpha=0.75, bias=vector, slope=0.2
        )  # fmt: skip
        assert_right(MULTIPLY, call, multiply(8, 32), watch)


def test_it_is_both_products(device: str) -> None:
    """Each column has the bits that it has without the other columns, and an infinite weight stays in its own."""
    run = gemm.run
    call = product(3, 20, 4, 128, device=device, out_dtype=F32)
    both = run(MULTIPLY, call, config=multiply(4, 64))
    alone = run(MULTIPLY, call._replace(tail=None), config=multiply(4, 64))
    narrow = GemmCall(call.a, call.tail, out_dtype=F32)  # type: ignore[arg-type]
    behind = run(MULTIPLY, narrow, config=multiply(1, 64))
    assert same_bits(both[:, :20].contiguous(), alone) and same_bits(both[:, 20:].contiguous(), behind)
    call.tail[0, 1] = float("inf")  # type: ignore[index]
    found = run(MULTIPLY, call, config=multiply(4, 64))
    assert found[:, 21].isinf().all() and int((~found.isfinite()).sum()) == 3


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name)
def test_without_a_kernel(dtype: torch.dtype, device: str) -> None:
    for rows in (1, 19):
        assert_right("reference", product(rows, 20, 3, 75, dtype, device=device))


def test_public_functions_are_the_op(device: str) -> None:
    x, weight = random(2, 3, 64, dtype=F32, device=device), random(20, 64, dtype=F32, device=device, seed=1)
    tail, bias = random(4, 64, dtype=F32, device=device, seed=2), random(24, dtype=F32, device=device, seed=3)
    packed = ops.pack(weight, "int8")
    want = torch.cat((x @ packed.unpack().mT, x @ tail.mT), -1) + bias
    torch.testing.assert_close(ops.linear(x, packed, bias, tail=tail), want)
    layer = nn.Linear.from_weight(packed, bias, tail=tail)
    torch.testing.assert_close(layer(x), want)
    assert layer.out_features == 24 and set(layer.state_dict()) >= {"bias", "tail"}
    assert "tail" not in nn.Linear.from_weight(weight).state_dict()
    call = linear_call(x, packed, bias, tail=tail)
    assert layer.decision(x).key == gemm.key(call)
    torch.testing.assert_close(torch.ops.wavecrest.gemm(*call), want)
    torch.library.opcheck(torch.ops.wavecrest.gemm, tuple(call), test_utils=("test_schema", "test_faketensor"))


def test_its_kernel_needs_no_row_and_no_other_takes_it(device: str) -> None:
    call = product(2, 20, 3, 64, device=device)
    for backend in gemm.backends:
        reason = refuses(backend, call)
        assert (reason is None) == (backend in (MULTIPLY, "reference")), (backend, reason)
        if backend in KERNELS and reason is not None:
            assert "one dtype for all columns" in reason
    # on a CPU kernels run where they are asked for
    decision = gemm.decide(call)
    assert decision.backend == (MULTIPLY if device == "cuda" else "reference")
    strided = call._replace(tail=random(6, 64, device=device)[::2].mT)
    assert "that is contiguous" in str(refuses(MULTIPLY, strided))
    assert_right("reference", strided)
    assert "up to 8 rows" in str(refuses(MULTIPLY, product(9, 20, 3, 64, device=device)))


def test_the_key_names_it(device: str) -> None:
    call = product(3, 20, 4, 64, device=device, bias=random(24, device=device))
    parts = dict(zip(gemm.key_fields, gemm.key(call), strict=True))
    assert parts["form"] == "plain tail 4" and parts["columns"] == 24 and parts["scales"] == "none vector"
    again = gemm.study.call_of_key(parts, device)  # type: ignore[misc]
    assert again is not None and gemm.key(again) == gemm.key(call)
    plain = gemm.study.unpacked(call)  # type: ignore[misc]
    torch.testing.assert_close(gemm.reference(plain), gemm.reference(call), rtol=1e-2, atol=1e-1)
    limit = gemm.study.bound(call)  # type: ignore[misc]
    wrong = call._replace(tail=call.tail.roll(1, 1))  # type: ignore[union-attr]
    off = (gemm.reference(wrong).double() - gemm.reference(call).double()).abs() > limit
    assert off[:, 20:].double().mean() > 0.9 and not off[:, :20].any()


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_configurations_leave_k_whole(arch: str) -> None:
    kernels = gemm.study.kernel(MULTIPLY)
    meta = {"device": "meta"}
    call = GemmCall(
        torch.empty(2, 8192, dtype=BF16, **meta), torch.empty(64, 8192, dtype=I8, **meta).mT,
        scale_b=torch.empty(64, **meta), tail=torch.empty(16, 8192, dtype=BF16, **meta).mT,
    )  # fmt: skip
    assert kernels.space is not None and kernels.launches is not None and kernels.work is not None
    spaces = [list(kernels.space(gemm.key(one), ARCHS[arch])) for one in (call, call._replace(tail=None))]
    assert any(config["SPLIT_K"] > 1 for config in spaces[1])
    assert len(spaces[0]) > 5 and all(config["SPLIT_K"] == 1 for config in spaces[0])
    for config in spaces[0][::3]:
        launch, *second = kernels.launches(call, config, ARCHS[arch])
        assert not second and launch.grid[0] == 16 + -(-64 // config["BLOCK_N"])
        assert len(kernels.work(gemm.key(call), config, ARCHS[arch])) == 1
    with pytest.raises(InvalidArgument, match="tail have all of K in one program: SPLIT_K is 1"):
        kernels.launches(call, multiply(8, 32, split=2), ARCHS[arch])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"tail": torch.zeros(64, 3, dtype=F16)}, r"a tail is torch.bfloat16 \[64, T\]"),
    "k": ({"tail": torch.zeros(63, 3, dtype=BF16)}, r"a tail is torch.bfloat16 \[64, T\]"),
    "device": ({"tail": torch.zeros(64, 3, dtype=BF16, device="meta")}, "tail must be on cpu"),
    "a plain weight": ({"b": torch.zeros(64, 20, dtype=BF16), "scale_b": None}, "goes with a weight in 8 bits"),
    "no scale": ({"scale_b": None}, "has one scale, or one a column"),
    "groups": ({"scale_b": torch.ones(2, 20), "group": 32}, "has one scale, or one a column"),
    "gated": ({"activation": "silu_and_mul"}, "there is no gated activation, residual"),
    "residual": ({"residual": torch.zeros(2, 23, dtype=BF16)}, "there is no gated activation, residual"),
    "8 bits": ({"out_dtype": I8, "out_scale": torch.ones(())}, "there is no gated activation, residual"),
    "bias": ({"bias": torch.zeros(20)}, r"bias must be floating-point \[23\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_arguments(case: str) -> None:
    more, words = WRONG[case]
    call = product(2, 20, 3, 64)._replace(**more)
    with pytest.raises(InvalidArgument, match=words):
        gemm(call)


@pytest.mark.parametrize("tail", [torch.zeros(64), ops.pack(torch.randn(3, 64), "int8"), [1.0]], ids=str)
def test_what_is_no_tail(tail: Any) -> None:
    weight = ops.pack(torch.randn(20, 64), "int8")
    with pytest.raises(InvalidArgument, match=r"a tail is a plain tensor \[T, K\]"):
        ops.linear(torch.randn(2, 64), weight, tail=tail)


def test_gradients_of_x_pass(device: str) -> None:
    x: Tensor = random(2, 64, dtype=F32, device=device).requires_grad_()
    weight, tail = ops.pack(random(20, 64, dtype=F32, device=device), "int8"), random(3, 64, dtype=F32, device=device)
    ops.linear(x, weight, tail=tail).sum().backward()
    want = weight.unpack().sum(0) + tail.sum(0)
    torch.testing.assert_close(x.grad, want.expand(2, 64))
