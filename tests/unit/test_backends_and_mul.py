"""PyTorch's product and our gated activation behind it: what it makes, what it refuses, where it is the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.gemm_harness import BF16, F16, F32, F64, assert_result
from tests.ops.mlstm_harness import DEVICE
from wavecrest.backends import gemm_then_act
from wavecrest.bench import ops as bench
from wavecrest.dispatch.call import mapped
from wavecrest.measure import numerics
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall


def product(M: int = 33, dtype: torch.dtype = BF16, activation: str | None = "silu_and_mul", **more: Any) -> GemmCall:
    a = torch.randn(M, 40, device=DEVICE).to(dtype)
    return GemmCall(a, torch.randn(48, 40, device=DEVICE).to(dtype).mT, activation=activation, **more)


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)


def run(call: GemmCall) -> Any:
    return gemm.run(gemm_then_act.NAME, call)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_it_is_right(dtype: torch.dtype, activation: str, bias: bool) -> None:
    call = product(dtype=dtype, activation=activation, alpha=0.5, bias=torch.randn(48, device=DEVICE) if bias else None)
    assert_result("torch", run(call), call)


def test_our_kernel_makes_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(name: str, activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run_op(both: torch.Tensor) -> torch.Tensor:
            seen.append((name, both.shape[1]))
            return activate(both)

        return run_op

    made = {name: noted(name, activate) for name, activate in gemm_then_act.OPS.items()}
    monkeypatch.setattr(gemm_then_act, "OPS", made)
    for activation in GATED:
        run(product(activation=activation))
    assert seen == [(name, 48) for name in GATED]


REFUSED = {
    "no activation": (product(activation=None), "gated"),
    "another activation": (product(activation="silu"), "gated"),
    "a residual": (product(residual=torch.zeros(33, 24, device=DEVICE)), "residual"),
    "int8": (product()._replace(a=_integers(33, 40), b=_integers(48, 40).mT), "int8"),
    "float64": (product(dtype=F64), "float32"),
    "gradients": (product(bias=torch.zeros(48, device=DEVICE, requires_grad=True)), "gradients"),
    "what PyTorch's GEMM refuses": (product(out_dtype=F32), "rounds the result"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, words = REFUSED[name]
    assert words in str(gemm.backends[gemm_then_act.NAME].refuse(call))


def test_it_is_the_choice_on_a_gpu_alone() -> None:
    """Above PyTorch's two operations; on a CPU those run, and the decision says why."""
    order = [one.name for one in gemm.by_priority()]
    assert order.index(gemm_then_act.NAME) < order.index("torch")
    found = gemm.decide(product())
    assert found.backend == (gemm_then_act.NAME if DEVICE == "cuda" else "torch")
    if DEVICE == "cpu":
        assert any(one.backend == gemm_then_act.NAME and "two operations" in one.reason for one in found.refused)
    meta = mapped(product(), lambda tensor: tensor.to("meta"))
    assert gemm.backends[gemm_then_act.NAME].opt_in(meta) is None


def test_it_is_judged_as_pytorch_is() -> None:
    """Its product is rounded before the activation, which the op's bound for single kernels does not allow."""
    torch.manual_seed(0)
    call = product(M=200)
    want, got = gemm.reference(call), run(call)
    bound = gemm.study.bound(call)
    assert bound is not None and bool(((got.double() - want.double()).abs() > bound).any())
    limits = bench.limits_of(gemm, "bfloat16").values
    slack = numerics.Tolerance(bench.PEER_SLACK * limits.relative, bench.PEER_SLACK * limits.worst)
    assert numerics.compare(got, want).within(slack)
    assert [one.name for one in gemm.backends.values() if one.as_native] == [
        "triton_hopper_epilogue",
        gemm_then_act.NAME,
    ]
