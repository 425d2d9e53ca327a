"""GEMM without its bias: what the library is given, what is added afterwards, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.backends import split_bias
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "activation": {"activation": "gelu"},
    "gated": {"activation": "silu_and_mul"},
    "residual": {"residual": torch.full((2, 5, 32), 0.5, dtype=torch.float16)},
    "result": {"out_dtype": torch.bfloat16, "activation": "relu"},
    "eight bits": {"out_dtype": torch.int8, "out_scale": torch.tensor(0.25)},
    "normalised": {"norm_weight": torch.rand(24), "activation": "silu"},
}


def product(**more: Any) -> GemmCall:
    torch.manual_seed(0)
    a, weight = torch.randn(2, 5, 24).half(), torch.randn(32, 24).half()
    return GemmCall(a, weight.mT, bias=torch.randn(32).half() * 4, **more)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say they are on a GPU."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)


@pytest.mark.parametrize("name", CASES)
def test_the_library_multiplies_and_the_rest_is_done_after(
    name: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = product(**CASES[name])
    gemm.check(call)
    assert split_bias.refuse(call) is None

    def with_bias(*_: Any) -> Tensor:
        raise AssertionError("the library was given the bias")

    monkeypatch.setattr(torch, "addmm", with_bias)
    monkeypatch.setattr(torch.nn.functional, "linear", with_bias)
    got, want = split_bias.run(call), gemm.reference(call)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= max(1.0, 1e-2 * float(want.double().abs().max()))
    if name != "eight bits":
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=4e-2)


def test_it_runs_where_a_row_names_it(gpu: None) -> None:
    assert "measured row" in str(gemm.backends["torch_split_bias"].opt_in(product()))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: product()._replace(bias=None), "needs a bias"),
        (lambda: product()._replace(bias=torch.randn(32)), "does what torch does"),
        (lambda: product(alpha=0.5), "does what torch does"),
        (lambda: product()._replace(bias=torch.randn(10).half(), bias_along="m"), "does what torch does"),
        (lambda: product()._replace(b=torch.zeros(24, 32, dtype=torch.int8)), "fewer bits"),
    ],
    ids=["none", "dtype", "factor", "rows", "weight-only"],
)
def test_what_it_refuses(call: Any, reason: str, gpu: None) -> None:
    assert reason in str(split_bias.refuse(call()))


def test_not_on_a_cpu_nor_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_bias.refuse(product()) == "is for GPUs"
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "Inductor decides" in str(split_bias.refuse(product()))
