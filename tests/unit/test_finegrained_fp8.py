"""transformers' FP8Linear, read value by value and put back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.integrations import finegrained_fp8
from wavecrest.nn import QuantizedLinear

theirs = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is not installed")

K, N = 272, 160


def layer(k: int, n: int, *, block: tuple[int, int] | None = (128, 128), bias: bool = False, **more: Any) -> Any:
    """One with values."""
    torch.manual_seed(k + n)
    made = theirs.FP8Linear(k, n, block, has_bias=bias, **more)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k))
        if made.weight_scale_inv.dtype == torch.float32:
            made.weight_scale_inv.copy_(torch.rand(made.weight_scale_inv.shape) + 0.5)
        if bias:
            made.bias.copy_(torch.randn(n))
    return made.eval()


def scaled(made: Any, *shape: int) -> Any:
    """The layer with scales of another shape."""
    made.weight_scale_inv = nn.Parameter(torch.ones(*shape))
    return made


class Small(nn.Module):
    """Three layers, one of them at two places, and a head that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layer(K, N, bias=True), layer(N, K)
        self.narrow, self.again = layer(96, N), self.up
        self.head = nn.Linear(K, 8, dtype=torch.bfloat16)


def values(one: Any) -> torch.Tensor:
    """The weight that a layer stands for."""
    n, k = one.weight.shape
    scale = one.weight_scale_inv.detach().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    found: torch.Tensor = one.weight.detach().double() * scale[:n, :k]
    return found


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """x as FP8Linear rounds it: to e4m3fn by the largest of each 128 columns."""
    parts = [part / (part.abs().amax(-1, keepdim=True) / 448) for part in x.double().split(128, -1)]
    scales = [part.abs().amax(-1, keepdim=True).double() / 448 for part in x.split(128, -1)]
    found = [part.float().to(torch.float8_e4m3fn).double() * scale for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(found, -1)


@torch.no_grad()
def test_layers_are_replaced_value_by_value_and_put_back() -> None:
    model = Small()
    before = dict(model.named_modules(remove_duplicate=False))
    result = finegrained_fp8.convert(model)
    assert result.formats == dict.fromkeys(("up", "down", "narrow", "again"), "w8a8-fp8")
    assert model.up is model.again and model.head is before["head"]
    forms = {"up": "fp8_block", "down": "fp8_block", "narrow": "fp8"}
    for name, form in forms.items():
        new, old = model.get_submodule(name), before[name]
        assert isinstance(new, QuantizedLinear) and new.weight.format == form and not new.training
        assert new.weight.dtype == torch.bfloat16
        torch.testing.assert_close(new.weight.unpack().double(), values(old), rtol=2**-8, atol=0)
        x = torch.randn(5, old.in_features)
        wanted = in_groups(x) @ values(old).mT + (0 if old.bias is None else old.bias.double())
        torch.testing.assert_close(new(x).double(), wanted, rtol=1e-4, atol=1e-3)
    result.restore()
    assert all(model.get_submodule(name) is one for name, one in before.items())


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: layer(K, N, block=(64, 128)), "blocks of 64 × 128"),
        (lambda: layer(K, N, block=None), "a scale for all of it"),
        (lambda: layer(K, N, activation_scheme="static"), "a fixed scale of activations"),
        (lambda: layer(K, N, scale_fmt="ue8m0"), "float8_e8m0fnu"),
        # a row of scales for each row would fit the format of a single block
        (lambda: scaled(layer(K, N), N, 1), r"scales \[160, 1\], not \[2, 3\]"),
        (lambda: scaled(layer(96, N), 5, 1), r"scales \[5, 1\], not \[2, 1\]"),
    ],
)
def test_other_layers_stay_and_say_why(made: Any, reason: str) -> None:
    model = Small()
    model.down = left = made()
    with pytest.raises(Unsupported, match=reason):
        finegrained_fp8.packed(left)
    result = finegrained_fp8.convert(model)
    assert model.down is left and "down" not in result.formats
    assert re.search(reason, next(row.reason for row in result.report.layers if row.path == "down"))


def test_models_without_such_layers_are_refused() -> None:
    for model in (nn.Sequential(nn.Linear(4, 4)), layer(K, N)):
        with pytest.raises(InvalidArgument, match=r"finegrained_fp8\.convert"):
            finegrained_fp8.convert(model)
    with pytest.raises(InvalidArgument, match="no FP8Linear of transformers"):
        finegrained_fp8.packed(nn.Linear(4, 4))
