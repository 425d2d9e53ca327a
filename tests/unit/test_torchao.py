"""Weights that torchao quantized, read value by value; a stand-in of its classes' attributes where it is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.integrations import torchao as integration
from wavecrest.nn import Linear

REAL = importlib.util.find_spec("torchao") is not None
INT4 = getattr(torch, "int4", None)


class Standin(torch.Tensor):
    """The attributes of torchao 0.18.0's weight classes that are read; dequantized by the definition."""

    __module__ = "torchao.quantization"

    @classmethod
    def of(cls, name: str, scale: torch.Tensor, block: tuple[int, int], values: torch.Tensor, **rest: Any) -> Any:
        kind = type(name, (cls,), {"__module__": cls.__module__})
        made = torch.zeros(values.shape, dtype=torch.bfloat16).as_subclass(kind)
        vars(made).update(qdata=values, scale=scale, block_size=block, **rest)
        return made

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        rows, columns = self.block_size
        parts = []
        for one in (self.scale, getattr(self, "zero_point", None)):
            if one is not None:
                wide = one.float().reshape(-(-self.qdata.shape[0] // rows), -1)
                one = wide.repeat_interleave(rows, 0)[: len(self.qdata)].repeat_interleave(columns, 1)
                one = one[:, : self.qdata.shape[1]]
            parts.append(one)
        zero = 0.0 if parts[1] is None else parts[1]
        return ((self.qdata.float() - zero) * parts[0]).to(torch.bfloat16)


def integers(name: str, bits: int, block: tuple[int, int], *, zero: bool = False, n: int = 48, k: int = 128) -> Any:
    half = 2 ** (bits - 1)
    values = torch.randint(-half, half, (n, k), dtype=torch.int8)
    shape = (n // block[0], k // block[1])
    points = torch.randint(-half, half, shape, dtype=torch.int8) if zero else torch.zeros(shape, dtype=torch.int8)
    target = {8: torch.int8, 4: INT4, 2: getattr(torch, "int2", "int2")}[bits]
    return Standin.of(name, torch.rand(shape) + 0.1, block, values, zero_point=points, target_dtype=target)


def floats(block: tuple[int, int], n: int = 48, k: int = 128) -> Any:
    values = torch.randn(n, k).to(torch.float8_e4m3fn)
    return Standin.of("Float8Tensor", torch.rand(-(-n // block[0]), -(-k // block[1])) + 0.1, block, values)


@pytest.mark.parametrize(
    ("weight", "form"),
    [
        (lambda: integers("Int8Tensor", 8, (1, 128)), "int8"),
        (lambda: integers("Int8Tensor", 8, (48, 128)), "int8"),
        (lambda: integers("IntxUnpackedToInt8Tensor", 8, (1, 32)), "int8"),
        (lambda: integers("IntxUnpackedToInt8Tensor", 4, (1, 32)), "int4"),
        (lambda: integers("IntxUnpackedToInt8Tensor", 4, (1, 32), zero=True), "int4"),
        # columns that end in the middle of a unit of 64
        (lambda: integers("IntxUnpackedToInt8Tensor", 4, (1, 32), zero=True, k=160), "int4"),
        (lambda: floats((1, 128)), "fp8"),
        (lambda: floats((48, 128)), "fp8"),
        (lambda: floats((128, 128), 256, 384), "fp8_block"),
    ],
)
def test_every_value_is_the_same(weight: Any, form: str) -> None:
    torch.manual_seed(0)
    given = weight()
    found = integration.packed(given)
    assert found.format == form and found.dtype == torch.bfloat16 and found.shape == given.shape
    assert torch.equal(found.unpack(), given.dequantize())


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: integers("Int8Tensor", 8, (1, 128), zero=True), "has zero points"),
        (lambda: integers("Int8Tensor", 8, (1, 16)), "groups of 16 columns"),
        (lambda: integers("Int8Tensor", 8, (2, 128)), "blocks of 2 × 128"),
        (lambda: integers("IntxUnpackedToInt8Tensor", 4, (1, 128), k=256, n=4), ""),
        (lambda: integers("IntxUnpackedToInt8Tensor", 2, (1, 32)), "8 and 4 bits can be read"),
        (lambda: floats((1, 64)), "blocks of 1 × 64"),
    ],
)
def test_what_no_format_has_is_refused(weight: Any, reason: str) -> None:
    if not reason:
        integration.packed(weight())
        return
    with pytest.raises(Unsupported, match=reason):
        integration.packed(weight())


def test_quantized_activations_and_other_tensors_are_refused() -> None:
    weight = integers("Int8Tensor", 8, (1, 128))
    weight.act_quant_kwargs = object()
    with pytest.raises(Unsupported, match="quantizes activations too"):
        integration.packed(weight)
    with pytest.raises(InvalidArgument, match="a Tensor is no quantized weight"):
        integration.packed(torch.ones(4, 4))
    with pytest.raises(InvalidArgument, match="no linear layer has a weight"):
        integration.convert(nn.Sequential(nn.Linear(4, 4)))


def test_a_model_is_converted_and_what_is_left_says_why() -> None:
    model = nn.Sequential(nn.Linear(128, 48), nn.ReLU(), nn.Linear(48, 8), nn.Linear(128, 48, bias=False)).bfloat16()
    for at, columns in ((0, 128), (3, 16)):
        # a parameter would lose the stand-in's attributes
        del model[at].weight
        model[at].weight = integers("Int8Tensor", 8, (1, columns))
    plain, bias = model[0].weight.dequantize(), model[0].bias
    left = integration.convert(model)
    assert list(left) == ["3"] and "groups of 16 columns" in left["3"]
    assert isinstance(model[0], Linear) and type(model[2]) is nn.Linear
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    wanted = nn.functional.linear(x.float(), plain.float(), bias.float())
    assert (model[0](x).float() - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.skipif(not REAL, reason="needs the package torchao")
@pytest.mark.parametrize("name", ["int8", "int8 groups", "int4 groups", "fp8"])
def test_a_model_of_torchao_gives_the_same_answers(name: str) -> None:
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup

    config = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int8 groups": lambda: ao.IntxWeightOnlyConfig(torch.int8, PerGroup(64)),
        "int4 groups": lambda: ao.IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "fp8": lambda: ao.Float8WeightOnlyConfig(),
    }[name]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    ao.quantize_(model, config)
    weights = [model[0].weight.dequantize(), model[2].weight.dequantize()]
    x = torch.randn(7, 256, dtype=torch.bfloat16)
    wanted = model(x)
    assert integration.convert(model) == {}
    assert all(torch.equal(model[at].weight.unpack(), one) for at, one in zip((0, 2), weights, strict=True))
    torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=5e-2)
