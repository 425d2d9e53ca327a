"""Folders in the layouts of AMD Quark, written here by their definition, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.quantized_models import same_state, state_of
from tests.unit.test_compressed_tensors import K, N, Small, mxfp4
from wavecrest.errors import CheckpointError, Unsupported
from wavecrest.integrations import quark
from wavecrest.nn import Linear, QuantizedLinear

safetensors = pytest.importorskip("safetensors.torch")

# the column, or the row, whose value each nibble of a word holds, lowest first
REORDERED, IN_ORDER = [0, 2, 4, 6, 1, 3, 5, 7], list(range(8))


def words(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Values of 4 bits along the last dimension in int32 words; those that fill up the last one are 0."""
    found = []
    for line in values.reshape(-1, values.shape[-1]).tolist():
        line = [one & 15 for one in line] + [0] * (-len(line) % 8)
        parts = [sum(line[at + order[i]] << 4 * i for i in range(8)) for at in range(0, len(line), 8)]
        found.append([part - 2**32 if part >= 2**31 else part for part in parts])
    return torch.tensor(found, dtype=torch.int32).reshape(*values.shape[:-1], -1)


def int4(kind: str, by: str, order: list[int], *, zero: bool, n: int = N) -> tuple[dict[str, Any], torch.Tensor]:
    """Entries of 4 bits, and the weight that they stand for; of groups everything is transposed."""
    low = -8 if kind == "int4" else 0
    values, points = torch.randint(low, low + 16, (n, K)), torch.randint(low, low + 16, (n, K // 32))
    points = points if zero else torch.full_like(points, low + 8)
    scale = torch.rand(n, K // 32) + 0.5
    if by == "per_group":
        parts = {
            "weight": words(values.mT, order), "weight_scale": scale.mT.contiguous(),
            "weight_zero_point": words(points.mT, order),
        }  # fmt: skip
        wide = [one.double().repeat_interleave(32, 1) for one in (points, scale)]
        return parts, (values.double() - wide[0]) * wide[1]
    if by == "per_tensor":
        parts = {"weight": words(values, order), "weight_scale": scale[0, 0], "weight_zero_point": points[0, 0].int()}
        return parts, (values.double() - points[0, 0]) * scale[0, 0].double()
    parts = {
        "weight": words(values, order), "weight_scale": scale[:, 0].contiguous(),
        "weight_zero_point": words(points[:, 0], order),
    }  # fmt: skip
    return parts, (values.double() - points[:, :1]) * scale[:, :1].double()


def int8(by: str, kind: str = "int8") -> tuple[dict[str, Any], torch.Tensor]:
    values = torch.randint(-127, 128, (N, K))
    shape = {"per_tensor": (), "per_channel": (N,), "per_group": (N, K // 64)}[by]
    scale = torch.rand(shape) + 0.5
    middle = 128 if kind == "uint8" else 0
    stored, points = (values + middle).to(getattr(torch, kind)), torch.full(shape, middle, dtype=getattr(torch, kind))
    wide = scale.double()
    if by == "per_group":
        parts = {"weight": stored.mT, "weight_scale": scale.mT, "weight_zero_point": points.mT}
        parts = {name: one.contiguous() for name, one in parts.items()}
        return parts, values.double() * wide.repeat_interleave(64, 1)
    parts = {"weight": stored, "weight_scale": scale, "weight_zero_point": points}
    return parts, values.double() * (wide[:, None] if by == "per_channel" else wide)


def fp8(shape: tuple[int, ...], n: int = N, k: int = K) -> tuple[dict[str, Any], torch.Tensor]:
    values, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    wide = scale.double()
    if len(shape) == 2:
        wide = wide.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    elif shape == (n,):
        wide = wide[:, None]
    return {"weight": values, "weight_scale": scale}, values.double() * wide


def fp4(k: int = K) -> tuple[dict[str, Any], torch.Tensor]:
    parts, wanted = mxfp4(k=k)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, wanted


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    axis = {"per_channel": 0, "per_group": -1}.get(qscheme)
    group = {"fp4": 32, "int4": 32, "uint4": 32, "int8": 64}.get(dtype) if qscheme == "per_group" else None
    about = {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, "ch_axis": axis}
    return about | {"group_size": group, "scale_format": "e8m0" if dtype == "fp4" else None} | more


FP4 = spec("fp4", "per_group")
TOKEN = spec("fp8_e4m3", "per_channel", is_dynamic=True)
FIXED = spec("fp8_e4m3", "per_tensor")


def folder(
    path: Path, parts: dict[str, Any], weight: Any, inputs: Any = None, *, model: nn.Module | None = None, **more: Any
) -> Path:
    """A folder of a Small whose layer has these entries."""
    torch.manual_seed(1)
    held = (model or Small()).to(torch.bfloat16).state_dict()
    held = {name: value for name, value in held.items() if name != "layer.weight"}
    held |= {f"layer.{name}": value for name, value in parts.items()}
    safetensors.save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    scheme = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    about = {
        "quant_method": "quark", "global_quant_config": scheme, "layer_quant_config": {}, "exclude": ["head"],
        "layer_type_quant_config": {},
        "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({"quantization_config": about | more}))
    return path


ORDERED = {"export": {"pack_method": "order"}}


@pytest.mark.parametrize(
    ("made", "weight", "more", "form"),
    [
        (lambda: int8("per_tensor"), spec("int8", "per_tensor"), {}, "int8"),
        (lambda: int8("per_channel"), [spec("int8", "per_channel")], {}, "int8"),
        (lambda: int8("per_group"), spec("int8", "per_group"), {}, "int8"),
        (lambda: int8("per_channel", "uint8"), spec("uint8", "per_channel", symmetric=False), {}, "int8"),
        (lambda: int4("int4", "per_group", REORDERED, zero=False), spec("int4", "per_group"), {}, "int4"),
        (lambda: int4("uint4", "per_group", REORDERED, zero=True), spec("uint4", "per_group"), {}, "int4"),
        # rows that end inside of a word
        (lambda: int4("uint4", "per_group", IN_ORDER, zero=True, n=21), spec("uint4", "per_group"), ORDERED, "int4"),
        (lambda: int4("int4", "per_group", IN_ORDER, zero=True), spec("int4", "per_group"), ORDERED, "int4"),
        (lambda: int4("int4", "per_channel", REORDERED, zero=True), spec("int4", "per_channel"), {}, "int4"),
        (lambda: int4("uint4", "per_tensor", REORDERED, zero=True), spec("uint4", "per_tensor"), {}, "int4"),
        (lambda: fp8(()), spec("fp8_e4m3", "per_tensor"), {}, "fp8"),
        (lambda: fp8((1,)), spec("fp8_e4m3", "per_tensor"), {}, "fp8"),
        (lambda: fp8((N,)), spec("fp8_e4m3", "per_channel"), {}, "fp8"),
        (lambda: fp8((2, 3), 200, 300), spec("fp8_e4m3", "per_block", block_size=[128, 128]), {}, "fp8_block"),
        (lambda: fp8((2, 1), 200, 100), spec("fp8_e4m3", "per_block", block_size=[128, 128]), {}, "fp8"),
        (fp4, FP4, {}, "mxfp4"),
        (lambda: fp4(96), FP4, {}, "mxfp4"),
    ],
)
def test_every_value_is_the_same(tmp_path: Path, made: Any, weight: Any, more: dict[str, Any], form: str) -> None:
    torch.manual_seed(0)
    parts, wanted = made()
    n, k = wanted.shape
    path = folder(tmp_path, parts, weight, model=Small(n, k), **more)
    model = Small(n, k).to(torch.bfloat16)
    before = state_of(model)
    found = quark.load(model, path)
    layer: Any = model.layer
    assert type(layer) is Linear and layer.weight.format == form and found.formats == {"layer": form.partition("_")[0]}
    # the exact product, rounded once
    assert torch.equal(layer.weight.dequantize_float32(), wanted.float())
    held = safetensors.load_file(path / "model.safetensors")
    assert torch.equal(layer.bias, held["layer.bias"]) and torch.equal(model.head.weight, held["head.weight"])
    found.restore()
    same_state(model, before)


@pytest.mark.parametrize("inputs", [TOKEN, FIXED])
def test_activations_are_quantized_as_they_were(tmp_path: Path, inputs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parts, wanted = fp8((N,))
    fixed = inputs is FIXED
    if fixed:
        parts["input_scale"] = torch.tensor([0.01])
    # the first pattern that fits goes before the scheme of all layers
    own = {"weight": spec("fp8_e4m3", "per_channel"), "input_tensors": inputs}
    path = folder(tmp_path, parts, FP4, layer_quant_config={"*other": {}, "lay*": own, "*": {}})
    model = Small()
    found = quark.load(model, path)
    assert found.formats == {"layer": "w8a8-fp8"} and isinstance(model.layer, QuantizedLinear)
    x = torch.randn(5, K)
    scale = parts["input_scale"] if fixed else x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).double() * scale.double()
    out = (model.layer(x).double() - model.layer.bias.double()).detach()
    assert float((out - rounded @ wanted.mT).norm() / out.norm()) < 2e-3
    assert model.layer(x).dtype == torch.float32 == model.layer.weight.dtype


def test_weights_alone_where_activations_and_caches_are_quantized_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, wanted = fp4()
    parts |= {"output_scale": torch.ones(1), "input_scale": torch.ones(1)}
    path = folder(tmp_path, parts, FP4, spec("fp4", "per_group", is_dynamic=True))
    model = Small()
    with pytest.raises(Unsupported, match="layer: its outputs are quantized, as for a key-value cache; weights_only"):
        quark.load(model, path)
    found = quark.load(model, path, weights_only=True)
    assert found.formats == {"layer": "mxfp4"}
    assert torch.equal(model.layer.weight.dequantize_float32(), wanted.float())  # type: ignore[operator, union-attr]


CHANNEL = spec("fp8_e4m3", "per_channel")


@pytest.mark.parametrize(
    ("change", "weight", "inputs", "more", "reason"),
    [
        ({}, spec("fp6_e3m2", "per_group"), None, {}, "layer: weights of fp6_e3m2, per_group; int8, uint8, int4"),
        # nvfp4: groups of 16, whose scales are quantized too
        ({}, [spec("fp4", "per_group"), CHANNEL], None, {}, "layer: weight quantized in 2 stages"),
        ({}, spec("fp4", "per_group", group_size=16), None, {}, "weights of fp4, per_group; .* in groups of 32"),
        ({}, CHANNEL | {"ch_axis": 1}, None, {}, "a scale for each column"),
        ({}, spec("fp8_e4m3", "per_block", block_size=[64, 64]), None, {}, r"blocks of \[64, 64\]"),
        ({}, CHANNEL, spec("int8", "per_tensor"), {}, "activations of int8 beside .* weights_only=True leaves"),
        ({}, CHANNEL, spec("fp8_e4m3", "per_tensor", is_dynamic=True), {}, "dynamic scales of activations, per_tensor"),
        ({}, None, None, {}, "does not say how its weight is quantized"),
        ({"input_rotation": torch.eye(2)}, CHANNEL, None, {}, "layer: it rotates its input"),
        ({"bias_scale": torch.ones(1)}, CHANNEL, None, {}, "layer: its bias is quantized"),
        ({}, CHANNEL, None, {"export": {"weight_format": "fake_quantized"}}, "weight_format fake_quantized"),
    ],
)
def test_forms_without_a_layer_are_refused(
    tmp_path: Path, change: dict[str, Any], weight: Any, inputs: Any, more: dict[str, Any], reason: str
) -> None:
    parts, _ = fp8((N,))
    path = folder(tmp_path, parts | change, weight, inputs, **more)
    model = Small()
    before = state_of(model)
    with pytest.raises(Unsupported, match=reason):
        quark.load(model, path)
    same_state(model, before)


def test_integers_without_a_layer_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, _ = int8("per_channel")
    shifted = parts | {"weight_zero_point": torch.ones(N, dtype=torch.int8)}
    with pytest.raises(Unsupported, match="layer: 8-bit weights with zero points"):
        quark.load(Small(), folder(tmp_path, shifted, spec("int8", "per_channel")))
    parts, _ = int4("uint4", "per_group", REORDERED, zero=True)
    with pytest.raises(Unsupported, match="values packed as 'other'"):
        quark.load(Small(), folder(tmp_path, parts, spec("uint4", "per_group"), export={"pack_method": "other"}))
    del parts["weight_zero_point"]
    with pytest.raises(Unsupported, match="uint4 weights without zero points"):
        quark.load(Small(), folder(tmp_path, parts, spec("uint4", "per_group")))


@pytest.mark.parametrize(
    ("change", "weight", "more", "reason"),
    [
        ({"weight": None}, CHANNEL, {}, "layer: there is no weight"),
        ({"weight_scale": torch.ones(N - 1)}, CHANNEL, {}, r"its scales are \[23\], of per_channel"),
        ({"weight_scale": None}, CHANNEL, {}, "no quantized layer"),
        ({}, spec("int8", "per_channel"), {}, "values of 8 bits are int8 or uint8, not torch.float8_e4m3fn"),
        ({}, spec("int4", "per_channel"), {}, "values of 4 bits are int32 words"),
        ({}, FP4, {}, "pairs are uint8"),
        ({"extra": torch.ones(2)}, CHANNEL, {}, "unexpected: layer.extra"),
        ({}, CHANNEL, {"quant_method": "fp8"}, "no quantization_config of quark"),
        ({}, CHANNEL, {"layer_quant_config": [1]}, "layer_quant_config is a list"),
        ({}, 3, {}, "weight of its configuration is a int"),
    ],
)
def test_damaged_folders_change_nothing(
    tmp_path: Path, change: dict[str, Any], weight: Any, more: dict[str, Any], reason: str
) -> None:
    parts, _ = fp8((N,))
    parts = {name: value for name, value in (parts | change).items() if value is not None}
    path = folder(tmp_path, parts, weight, **more)
    model = Small()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=reason):
        quark.load(model, path)
    same_state(model, before)
