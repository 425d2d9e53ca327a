"""PyTorch's products under the settings a user may have: ieee is what is asked for, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.backends.torch import common
from wavecrest.backends.torch import gemm as native
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(params=["read", "read by name"])
def rounding(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The settings of products on the device, read with and without PyTorch's own reader; put back afterwards."""
    if request.param == "read by name":
        monkeypatch.setattr(common, "_precision_of", None)
    settings = common.settings_of(device)
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.fixture
def during(rounding: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The setting each product was made under."""
    seen: list[str] = []
    real = torch.matmul

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        seen.append(rounding.fp32_precision)
        if a.shape[0] == 13:
            raise torch.OutOfMemoryError("no memory left")
        return real(a, b)

    monkeypatch.setattr(torch, "matmul", matmul)
    return seen


def _call(rows: int, device: str, **options: Any) -> GemmCall:
    return GemmCall(torch.randn(rows, 64, device=device), torch.randn(64, 32, device=device), **options)


def test_ieee_is_not_rounded_by_a_later_setting(rounding: Any, during: list[str], device: str) -> None:
    gemm.force("torch")
    call = _call(8, device)
    rounding.fp32_precision = "ieee"
    gemm(call)
    rounding.fp32_precision = "tf32"
    gemm(call)
    assert during == ["ieee", "ieee"] and rounding.fp32_precision == "tf32"
    # three products of tf32 are as exact as float32; who asks for tf32 leaves it to the setting
    gemm(call._replace(precision="tf32x3"))
    gemm(call._replace(precision="tf32"))
    assert during[2:] == ["ieee", "tf32"]


def test_the_setting_is_put_back_after_an_error(rounding: Any, during: list[str], device: str) -> None:
    rounding.fp32_precision = "tf32"
    with pytest.raises(torch.OutOfMemoryError):
        native.run(_call(13, device))
    assert during == ["ieee"] and rounding.fp32_precision == "tf32"


def test_16_bits_have_no_such_setting(rounding: Any, during: list[str], device: str) -> None:
    rounding.fp32_precision = "tf32"
    call = _call(8, device)
    native.run(call._replace(a=call.a.bfloat16(), b=call.b.bfloat16()))
    assert during == ["tf32"]


@pytest.mark.gpu
def test_an_ieee_product_is_one_on_a_gpu(rounding: Any) -> None:
    call = _call(512, "cuda")
    exact = call.a.double() @ call.b.double()
    errors = {}
    for precision in ("ieee", "tf32"):
        rounding.fp32_precision = precision
        errors[precision] = float((native.run(call).double() - exact).abs().max())
    # no more than rounds off float32, with the setting too
    assert errors["tf32"] < 1e-4 and errors["ieee"] < 1e-4
    assert float((torch.matmul(call.a, call.b).double() - exact).abs().max()) > 1e-3
