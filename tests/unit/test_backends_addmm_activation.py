"""Bias and activation in the epilogue of a vendor's library: what is asked for, and each refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wavecrest.ops  # noqa: F401
from wavecrest.backends import addmm_activation
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.ops._gemm.reference import reference


def call(activation: str, device: str = "cpu", rows: tuple[int, ...] = (5, 3, 32), **more: Any) -> GemmCall:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, device=device).half() for shape in (rows, (16, 32), (16,)))
    return linear_call(x, weight, more.pop("bias", bias), activation=activation, **more)


def test_relu_is_the_same_function_on_any_device() -> None:
    one = call("relu")
    torch.testing.assert_close(addmm_activation.run(one), reference(one), rtol=1e-2, atol=1e-2)


def in_float64(one: GemmCall, activation: str) -> Tensor:
    wide = {"a": one.a.double(), "b": one.b.double(), "bias": one.bias.double(), "activation": activation}  # type: ignore[union-attr]
    return reference(one._replace(**wide))


def way_to_exact(got: Tensor, one: GemmCall) -> float:
    """How far a gelu is from the tanh form (0) to the exact one (1): rounding errors average out, the forms do not."""
    tanh, exact = in_float64(one, "gelu_tanh"), in_float64(one, "gelu")
    apart = exact - tanh
    return float(((got.double() - tanh) * apart).sum() / (apart * apart).sum())


def test_the_forms_of_gelu_are_told_apart() -> None:
    one = call("gelu_tanh", rows=(512, 32))
    for name, where in (("gelu_tanh", 0.0), ("gelu", 1.0)):
        assert way_to_exact(in_float64(one, name).half(), one) == pytest.approx(where, abs=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", list(addmm_activation.ACTIVATIONS))
def test_right_on_a_gpu(activation: str) -> None:
    """Within rounding, and the tanh form of gelu, not the exact one, which differs by up to 5e-4."""
    one = call(activation, "cuda", rows=(512, 32))
    got = op.call_on("torch_addmm_act", one)
    torch.testing.assert_close(got.double(), in_float64(one, activation), rtol=2e-3, atol=2e-3)
    if activation == "gelu_tanh":
        assert way_to_exact(got, one) == pytest.approx(0.0, abs=0.25)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (lambda: call("gelu"), "ends in relu or gelu_tanh alone"),
        (lambda: call("relu", bias=None), "needs a bias"),
        (lambda: call("relu", residual=torch.zeros(5, 3, 16).half()), "no scales, norm, factor or residual"),
        (lambda: call("relu")._replace(a=torch.zeros(0, 32).half()), "empty"),
        (lambda: call("relu")._replace(a=torch.randn(2, 32), b=torch.randn(32, 16)), "float16 and bfloat16"),
        (lambda: call("relu")._replace(bias=torch.zeros(16).half().requires_grad_()), "gradients"),
    ],
)
def test_refusals(one: Any, reason: str) -> None:
    assert reason in (addmm_activation.refuse_shape(one()) or "")
    assert "is for GPUs" in (addmm_activation.refuse(one()) or "")
