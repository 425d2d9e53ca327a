"""Folders in the layouts of compressed-tensors, written here by their definition, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.quantized_models import same_state, state_of
from wavecrest.errors import CheckpointError, Unsupported
from wavecrest.integrations import compressed_tensors
from wavecrest.nn import Linear, QuantizedLinear

safetensors = pytest.importorskip("safetensors.torch")

N, K = 24, 128


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed values along the last dimension in int32 words, from 0 up, the first in the low bits."""
    each = 32 // bits
    found = []
    for line in (values.long() + 2 ** (bits - 1)).tolist():
        line += [0] * (-len(line) % each)
        parts = [sum(one << bits * at for at, one in enumerate(line[i : i + each])) for i in range(0, len(line), each)]
        found.append([part - 2**32 if part >= 2**31 else part for part in parts])
    return torch.tensor(found, dtype=torch.int32)


def integers(bits: int, group: int | None, *, zero: bool = False, k: int = K) -> tuple[dict[str, Any], torch.Tensor]:
    """Entries of pack-quantized, and the weight that they stand for."""
    half = 2 ** (bits - 1)
    values = torch.randint(-half, half, (N, k))
    count = 1 if group is None else k // group
    scale = (torch.rand(N, count) + 0.5).to(torch.bfloat16)
    points = torch.randint(-half, half, (N, count)) if zero else torch.zeros(N, count, dtype=torch.int64)
    wide = [one.double().repeat_interleave(k // count, 1) for one in (points, scale)]
    parts = {
        "weight_packed": words(values, bits), "weight_scale": scale, "weight_shape": torch.tensor([N, k]),
    }  # fmt: skip
    if zero:
        parts["weight_zero_point"] = words(points.mT, bits).mT.contiguous()
    return parts, (values.double() - wide[0]) * wide[1]


def int8(scale: tuple[int, ...]) -> tuple[dict[str, Any], torch.Tensor]:
    values, factor = torch.randint(-127, 128, (N, K)).to(torch.int8), torch.rand(scale) + 0.5
    return {"weight": values, "weight_scale": factor}, values.double() * factor.double()


def fp8(scale: tuple[int, ...], n: int = N, k: int = K) -> tuple[dict[str, Any], torch.Tensor]:
    values, factor = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(scale) + 0.5
    wide = factor.double()
    if len(scale) == 2 and scale[1] > 1:
        wide = wide.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": values, "weight_scale": factor}, values.double() * wide


def mxfp4(n: int = N, k: int = K) -> tuple[dict[str, Any], torch.Tensor]:
    """Entries of mxfp4-pack-quantized: the even column in the low half of a byte."""
    codes, scale = torch.randint(0, 16, (n, k)), torch.randint(110, 130, (n, k // 32))
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat([sizes, -sizes])[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    return {"weight_packed": packed.to(torch.uint8), "weight_scale": scale.to(torch.uint8)}, values


def scheme(
    bits: int, kind: str = "int", inputs: dict[str, Any] | None = None, target: str = "Linear"
) -> dict[str, Any]:
    """A group of the configuration."""
    return {"targets": [target], "weights": {"num_bits": bits, "type": kind}, "input_activations": inputs}


TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}


class Small(nn.Module):
    def __init__(self, n: int = N, k: int = K) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(k), nn.Linear(k, n)
        self.head = nn.Linear(n, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.norm(x))
        return out


def folder(
    path: Path, parts: dict[str, Any], *groups: dict[str, Any], model: nn.Module | None = None, **more: Any
) -> Path:
    """A folder of a Small whose layer has these entries."""
    torch.manual_seed(1)
    held = (model or Small()).to(torch.bfloat16).state_dict()
    held = {name: value for name, value in held.items() if name != "layer.weight"}
    held |= {f"layer.{name}": value for name, value in parts.items()}
    safetensors.save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    about = {
        "quant_method": "compressed-tensors", "format": "any", "ignore": ["head"],
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups)},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({"quantization_config": about | more}))
    return path


@pytest.mark.parametrize(
    ("made", "group", "form"),
    [
        (lambda: integers(4, 128), scheme(4), "int4"),
        (lambda: integers(4, 32, zero=True), scheme(4), "int4"),
        # columns that end inside of a word
        (lambda: integers(4, None, zero=True, k=100), scheme(4), "int4"),
        (lambda: integers(4, None, k=101), scheme(4), "int4"),
        (lambda: integers(8, None, k=101), scheme(8), "int8"),
        (lambda: integers(8, 64), scheme(8), "int8"),
        (lambda: int8((N, 1)), scheme(8), "int8"),
        (lambda: int8((1,)), scheme(8), "int8"),
        (lambda: fp8((N, 1)), scheme(8, "float"), "fp8"),
        (lambda: fp8((1,)), scheme(8, "float"), "fp8"),
        (lambda: fp8((2, 3), 200, 300), scheme(8, "float"), "fp8_block"),
        (mxfp4, scheme(4, "float"), "mxfp4"),
        # the last unit of 64 columns is half full
        (lambda: mxfp4(k=96), scheme(4, "float"), "mxfp4"),
    ],
)
def test_every_value_is_the_same(tmp_path: Path, made: Any, group: dict[str, Any], form: str) -> None:
    torch.manual_seed(0)
    parts, wanted = made()
    n, k = wanted.shape
    path = folder(tmp_path, parts, group, model=Small(n, k))
    model = Small(n, k).to(torch.bfloat16)
    before = state_of(model)
    found = compressed_tensors.load(model, path)
    layer: Any = model.layer
    assert type(layer) is Linear and layer.weight.format == form and found.formats == {"layer": form.partition("_")[0]}
    # the exact product, rounded once
    assert torch.equal(layer.weight.dequantize_float32(), wanted.float())
    held = safetensors.load_file(path / "model.safetensors")
    assert torch.equal(layer.bias, held["layer.bias"]) and torch.equal(model.head.weight, held["head.weight"])
    found.restore()
    same_state(model, before)


@pytest.mark.parametrize("fixed", [False, True])
def test_activations_are_quantized_as_they_were(tmp_path: Path, fixed: bool) -> None:
    torch.manual_seed(0)
    parts, wanted = int8((N, 1))
    inputs = TOKEN | ({"dynamic": False, "strategy": "tensor"} if fixed else {})
    if fixed:
        parts["input_scale"] = torch.tensor([0.03], dtype=torch.bfloat16)
    # a group by name goes before one by class
    path = folder(tmp_path, parts, scheme(4), scheme(8, "int", inputs, "re:.*layer$"))
    model = Small()
    found = compressed_tensors.load(model, path)
    assert found.formats == {"layer": "w8a8-int8"} and isinstance(model.layer, QuantizedLinear)
    x = torch.randn(5, K)
    scale = parts["input_scale"].double() if fixed else x.double().abs().amax(-1, keepdim=True) / 127
    rounded = (x.double() / scale).round().clamp(-127, 127) * scale
    out = (model.layer(x).double() - model.layer.bias.double()).detach()
    assert out.dtype == torch.float64 and float((out - rounded @ wanted.mT).norm() / out.norm()) < 1e-3
    # the dtype is the model's, not the file's
    assert model.layer(x).dtype == torch.float32 == model.layer.weight.dtype == model.norm.weight.dtype


def test_blocks_go_with_activations_in_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, wanted = fp8((2, 3), 200, 300)
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128}
    path = folder(tmp_path, parts, scheme(8, "float", inputs), model=Small(200, 300))
    model = Small(200, 300)
    found = compressed_tensors.load(model, path)
    assert found.formats == {"layer": "w8a8-fp8"} and isinstance(model.layer, QuantizedLinear)
    # values that 8 bits have, with a largest one in each group
    x = torch.randint(-8, 9, (5, 300)).float() / 8
    x[:, ::40] = 1.75
    out = model.layer(x).double() - model.layer.bias.double()
    assert float(((out - x.double() @ wanted.mT).norm() / out.norm()).detach()) < 1e-3
    with pytest.raises(Unsupported, match="with activations in groups of 128"):
        compressed_tensors.load(Small(200, 300), folder(
            tmp_path, parts, scheme(8, "float", inputs | {"group_size": 64}), model=Small(200, 300)
        ))  # fmt: skip


def test_tied_weights_are_in_the_file_once(tmp_path: Path) -> None:
    class Tied(Small):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, N)
            self.embed.weight = self.head.weight

    torch.manual_seed(0)
    parts, _ = integers(4, 32)
    path = folder(tmp_path, parts, scheme(4))
    model = Tied().to(torch.bfloat16)
    compressed_tensors.load(model, path)
    held = safetensors.load_file(path / "model.safetensors")["head.weight"]
    assert model.embed.weight is model.head.weight and torch.equal(model.embed.weight, held)


@pytest.mark.parametrize(
    ("change", "groups", "more", "reason"),
    [
        ({}, [scheme(3)], {}, "layer: weights of 3 bits"),
        ({}, [scheme(4, "int", None, "re:other")], {}, "layer: no group of the configuration"),
        ({}, [scheme(4, "int", TOKEN)], {}, "activations of 8 bits beside these weights"),
        ({}, [scheme(4) | {"output_activations": TOKEN}], {}, "its outputs are quantized"),
        ({"weight_scale": torch.ones(N, 8)}, [scheme(4)], {}, "8 scales for 128 columns"),
        # nvfp4
        (
            {"weight_scale": torch.ones(N, 8).to(torch.float8_e4m3fn)},
            [scheme(4, "float")],
            {},
            "4-bit floats with scales",
        ),
        ({"weight_g_idx": torch.arange(K).flip(0) // 32}, [scheme(4)], {}, "an order of their own"),
        ({}, [scheme(4)], {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({}, [scheme(4)], {"sparsity_config": {"format": "sparse-24"}}, "sparse form sparse-24"),
    ],
)
def test_forms_without_a_layer_are_refused(
    tmp_path: Path, change: dict[str, Any], groups: list[Any], more: dict[str, Any], reason: str
) -> None:
    torch.manual_seed(0)
    parts, _ = integers(4, 32)
    path = folder(tmp_path, parts | change, *groups, **more)
    model = Small()
    before = state_of(model)
    with pytest.raises(Unsupported, match=reason):
        compressed_tensors.load(model, path)
    same_state(model, before)


@pytest.mark.parametrize(
    ("change", "more", "reason"),
    [
        ({"weight_shape": None}, {}, "layer: there is no weight_shape"),
        ({"weight_shape": torch.tensor([N, K - 9])}, {}, "4-bit values of .* are int32"),
        ({"weight_scale": None}, {}, "no quantized layer"),
        ({"extra": torch.ones(2)}, {}, "unexpected: layer.extra"),
        ({}, {"quant_method": "gptq"}, "no quantization_config of compressed-tensors"),
        ({}, {"config_groups": 3}, "is damaged"),
    ],
)
def test_damaged_folders_change_nothing(
    tmp_path: Path, change: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    torch.manual_seed(0)
    parts, _ = integers(4, 32)
    parts = {name: value for name, value in (parts | change).items() if value is not None}
    path = folder(tmp_path, parts, scheme(4), **more)
    model = Small()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=reason):
        compressed_tensors.load(model, path)
    same_state(model, before)
    with pytest.raises(CheckpointError, match="no configuration at"):
        compressed_tensors.load(model, tmp_path / "none")
