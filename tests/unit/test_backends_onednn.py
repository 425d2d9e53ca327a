"""Linear layers by oneDNN: right against a float64 oracle, and each refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wavecrest.ops  # noqa: F401
from wavecrest.backends import onednn
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.ops._gemm.reference import reference

if not torch.backends.mkldnn.is_available():
    pytest.skip("this PyTorch has no oneDNN", allow_module_level=True)


def call(activation: str | None = None, *, shape: tuple[int, ...] = (5, 3, 33), out: int = 17, **more: Any) -> GemmCall:
    torch.manual_seed(0)
    bias = more.pop("bias", torch.randn(out))
    return linear_call(torch.randn(shape), torch.randn(out, shape[-1]), bias, activation=activation, **more)


def wide(one: GemmCall) -> torch.Tensor:
    values = [value.double() if isinstance(value, torch.Tensor) else value for value in one]
    return reference(GemmCall(*values))


@pytest.mark.parametrize("activation", list(onednn.ACTIVATIONS), ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 33), (7, 64), (1, 1, 1), (129, 8)], ids=str)
def test_right(activation: str | None, bias: bool, shape: tuple[int, ...]) -> None:
    one = call(activation, shape=shape) if bias else call(activation, shape=shape, bias=None)
    made = op.call_on("onednn", one)
    assert made.shape == (*shape[:-1], 17) and made.is_contiguous()
    torch.testing.assert_close(made.double(), wide(one), rtol=1e-5, atol=1e-5)


def test_any_strides() -> None:
    one = call("gelu")
    one = one._replace(a=one.a.transpose(0, 1), b=one.b.contiguous())
    torch.testing.assert_close(op.call_on("onednn", one).double(), wide(one), rtol=1e-5, atol=1e-5)


def in_bfloat16() -> GemmCall:
    one = call("gelu")
    return one._replace(a=one.a.bfloat16(), b=one.b.bfloat16(), bias=one.bias.bfloat16())


def test_a_cpu_without_bfloat16_is_refused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "HAS_BFLOAT16", False)
    assert onednn.refuse(call("gelu")) is None
    assert onednn.refuse(in_bfloat16()) == "has no bfloat16 on this CPU: on x86 it needs AVX-512"


@pytest.mark.skipif(not onednn.HAS_BFLOAT16, reason="oneDNN has no bfloat16 on this CPU")
def test_bfloat16() -> None:
    one = in_bfloat16()
    torch.testing.assert_close(op.call_on("onednn", one).double(), wide(one), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", list(onednn.ACTIVATIONS), ids=str)
def test_nan_and_infinities_stay_in_their_row(activation: str | None) -> None:
    one = call(activation, shape=(4, 16))
    one.a[1, 3], one.a[2, 5] = float("nan"), float("inf")
    made, right = op.call_on("onednn", one), reference(one)
    # of infinities gelu is NaN for PyTorch's own kernel too (∞ · 0), but never a number
    assert made[1].isnan().all() and not made[2].isfinite().any()
    torch.testing.assert_close(made[[0, 3]], right[[0, 3]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_one_operation_in_a_graph(activation: str | None) -> None:
    one = call(activation)

    def function(x: torch.Tensor) -> torch.Tensor:
        return op.call_on("onednn", one._replace(a=x))

    with torch.no_grad():
        made = torch.compile(function, fullgraph=True)(one.a)
        torch.testing.assert_close(made, function(one.a))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (lambda: call("relu"), "makes 0 of NaN"),
        (lambda: call(residual=torch.zeros(5, 3, 17)), "no scales, norm, factor or residual"),
        (lambda: call(shape=(0, 33)), "empty"),
        (lambda: call()._replace(bias=torch.zeros(17, dtype=torch.float64)), "of a's dtype"),
        (lambda: call()._replace(a=torch.randn(5, 3, 33, requires_grad=True)), "gradients"),
        (lambda: GemmCall(torch.randn(2, 3, 4), torch.randn(2, 4, 5)), "one plain matrix"),
        (lambda: GemmCall(torch.randn(3, 4).half(), torch.randn(4, 5).half()), "float32 and bfloat16"),
    ],
)
def test_refusals(one: Any, reason: str) -> None:
    assert reason in (onednn.refuse(one()) or "")


def test_it_runs_where_it_is_named_alone() -> None:
    assert op.decide(call("gelu")).backend == "torch"
