"""`overwrite_residual`: the result in the residual's memory where PyTorch's product can make it, and only there."""

from __future__ import annotations

from collections.abc import Callable
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
    assert_result,
    copies,
    random,
    refuses,
    scales,
)
from tests.ops.op_harness import name
from wavecrest import nn, ops
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


def product(*lead: int, N: int = 10, K: int = 24, dtype: torch.dtype = BF16, device: str = "cpu", **more: Any) -> Any:
    """a [*lead, K] times b [K, N], and a residual that may be overwritten."""
    options = {"residual": random(*lead, N, dtype=dtype, device=device, seed=2), "overwrite_residual": True} | more
    b = random(N, K, dtype=dtype, device=device, seed=1).mT
    return GemmCall(random(*lead, K, dtype=dtype, device=device), b, **options)


def run(call: GemmCall, backend: str = "torch") -> Tensor:
    return gemm.run(backend, call)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=name)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (1,), ()])
def test_the_result_is_the_residual(lead: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    call = product(*lead, dtype=dtype, device=device)
    wanted = call._replace(residual=call.residual.clone())
    result = run(call)
    assert result is call.residual
    assert_result("torch", result, wanted)


WAYS: dict[str, Callable[[GemmCall], Tensor]] = {
    "gemm": lambda call: ops.gemm(
        call.a, call.b, residual=call.residual, overwrite_residual=call.overwrite_residual
    ),
    "linear": lambda call: ops.linear(
        call.a, call.b.mT, residual=call.residual, overwrite_residual=call.overwrite_residual
    ),
    "Linear": lambda call: nn.Linear.from_weight(call.b.mT)(
        call.a, call.residual, overwrite_residual=call.overwrite_residual
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_call_it(way: str, asked: bool, device: str) -> None:
    call = product(6, device=device, overwrite_residual=asked)
    wanted = call._replace(residual=call.residual.clone())
    result = WAYS[way](call)
    assert (result is call.residual) == asked
    assert_result("torch", result, wanted)


def test_rows_that_are_strided_or_normalised(device: str) -> None:
    call = product(6, device=device)
    apart = random(24, 6, device=device).mT
    gain = random(24, dtype=BF16, device=device, seed=3)
    for more in ({"a": apart}, {"norm_weight": gain}):
        call = call._replace(residual=call.residual.clone(), **more)
        wanted = call._replace(residual=call.residual.clone())
        result = run(call)
        assert result is call.residual
        assert_result("torch", result, wanted)


def _inside(call: GemmCall, other: str) -> GemmCall:
    """The residual in the memory of another operand, which this call reads too."""
    shared = random(8, 8, dtype=BF16, device=str(call.a.device))
    square = {"a": random(8, 8, device=str(call.a.device)), "b": random(8, 8, device=str(call.a.device)).mT}
    return call._replace(**(square | {other: shared if other == "a" else shared.mT, "residual": shared}))


KEPT: dict[str, Callable[[str], GemmCall]] = {
    "a bias": lambda device: product(6, device=device, bias=random(10, dtype=BF16, device=device)),
    "an activation": lambda device: product(6, device=device, activation="silu"),
    "a factor": lambda device: product(6, device=device, alpha=0.5),
    "a narrower result": lambda device: product(6, dtype=F32, device=device, out_dtype=BF16),
    "a wider residual": lambda device: product(6, device=device, residual=random(6, 10, dtype=F32, device=device)),
    "its own strides": lambda device: product(6, device=device, residual=random(10, 6, device=device).mT),
    "one row for all": lambda device: product(6, device=device, residual=random(1, 10, device=device).expand(6, 10)),
    "memory of a": lambda device: _inside(product(6, device=device), "a"),
    "memory of b": lambda device: _inside(product(6, device=device), "b"),
    "a batch of b": lambda device: product(
        6, device=device, residual=random(2, 6, 10, device=device)
    )._replace(b=random(2, 24, 10, device=device)),
    "gradients of a": lambda device: product(6, device=device)._replace(
        a=random(6, 24, device=device).requires_grad_()
    ),
    "gradients of b": lambda device: product(6, device=device)._replace(
        b=random(24, 10, device=device).requires_grad_()
    ),
    "gradients": lambda device: product(6, device=device, residual=random(6, 10, device=device).requires_grad_()),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_stays(case: str, device: str) -> None:
    """Beside what the library cannot do at all: the result is right, and elsewhere."""
    call = KEPT[case](device)
    before = copies(call)
    result = run(call)
    assert result.data_ptr() != call.residual.data_ptr()
    assert torch.equal(call.residual, before[GemmCall._fields.index("residual")])
    if not case.startswith("gradients"):
        assert_result("torch", result, call)


def test_a_frozen_product_under_grad_is_overwritten(device: str) -> None:
    with torch.enable_grad():
        call = product(6, device=device)
        assert run(call) is call.residual


@pytest.mark.parametrize("backend", KERNELS)
def test_our_kernels_leave_it(backend: str, device: str) -> None:
    call = product(3, device=device)
    if refuses(backend, call) is not None:
        pytest.skip("a call of the others")
    before = call.residual.clone()
    assert_result(backend, run(call, backend), call)
    assert torch.equal(call.residual, before)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_packed_weights_leave_it(format: str, device: str) -> None:
    packed = ops.pack(random(16, 64, device=device), format)
    x, residual = random(3, 64, device=device, seed=1), random(3, 16, device=device, seed=2)
    before = residual.clone()
    result = ops.linear(x, packed, residual=residual, overwrite_residual=True)
    assert torch.equal(residual, before)
    assert torch.equal(result, ops.linear(x, packed, residual=residual))


def test_a_graph_keeps_it(device: str) -> None:
    """Under torch.compile nothing is overwritten: a graph's tensors are its own."""
    call = product(6, device=device)
    before = call.residual.clone()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, r: ops.gemm(a, call.b, residual=r, overwrite_residual=True), fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        assert_result("torch", compiled(call.a, call.residual), call)
    assert torch.equal(call.residual, before)


@pytest.mark.parametrize("dtype", [I8, E4M3], ids=name)
def test_8_bit_products_leave_it(dtype: torch.dtype, device: str) -> None:
    a, b = (random(32, 32, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    residual = random(32, 32, dtype=BF16, device=device, seed=2)
    call = GemmCall(
        a, b.mT, scale_a=scales(device=device), scale_b=scales(device=device), residual=residual,
        overwrite_residual=True,
    )  # fmt: skip
    if refuses("torch", call) is not None:
        pytest.skip("PyTorch has no product of these on this device")
    before = residual.clone()
    assert_result("torch", run(call), call)
    assert torch.equal(residual, before)


def test_the_decision_is_that_of_any_residual(device: str) -> None:
    """It is no part of the key: rows are measured for both."""
    call = product(6, device=device)
    assert gemm.key(call) == gemm.key(call._replace(overwrite_residual=False))
