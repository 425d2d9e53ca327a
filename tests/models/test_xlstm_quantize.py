"""Weights of xLSTM Large in 8 and 4 bits: what is packed, how far it is off, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.xlstm_harness import DEVICE, build, close, tokens
from wavecrest.errors import CheckpointError, InvalidArgument, OutputError
from wavecrest.models.xlstm import quantize, xLSTMLarge
from wavecrest.ops import PackedWeight

FORMATS = ("int8", "fp8", "int4")


def _packed(model: Any) -> dict[str, PackedWeight]:
    found = model.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if isinstance(value, PackedWeight)}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weight_mode", ["single", "fused"])
def test_a_packed_model_is_that_of_its_rounded_weights(format: str, weight_mode: str) -> None:
    model = quantize(build(weight_mode=weight_mode, use_bias=True), format)
    rounded = build(weight_mode=weight_mode, use_bias=True)
    plain = build(weight_mode=weight_mode, use_bias=True).state_dict()
    for name, weight in _packed(model).items():
        unpacked = weight.unpack()
        # half a scale for integers; a sixteenth of the weight for e4m3fn, 2^-10 of a scale where it is subnormal
        if format == "fp8":
            assert weight.scale is not None
            limit = plain[name].abs() / 16 + weight.scale * 2**-10
        else:
            groups = plain[name].abs().amax(1, keepdim=True)
            limit = groups / (127 if format == "int8" else 7) / 2
        assert bool(((unpacked - plain[name]).abs() <= limit * (1 + 1e-5)).all()) and not torch.equal(
            unpacked, plain[name]
        )
        rounded.get_parameter(name).copy_(unpacked)
    prompt = tokens(2, 19)
    found, state = model(prompt)
    wanted, last = rounded(prompt)
    close(found, wanted)
    close(state[1][0], last[1][0])
    assert torch.equal(model.generate(prompt, 5).tokens, rounded.generate(prompt, 5).tokens)


@pytest.mark.parametrize("lm_head", [False, True])
def test_what_is_packed(lm_head: bool) -> None:
    model = quantize(build(weight_mode="fused"), "int8", lm_head=lm_head)
    block = {"mlstm_layer.qkv_opreact", "mlstm_layer.out_proj", "ffn.proj_up_gate_z", "ffn.proj_down"}
    wanted = {f"backbone.blocks.{index}.{name}.weight" for index in range(2) for name in block}
    assert set(_packed(model)) == wanted | ({"lm_head.weight"} if lm_head else set())
    single = quantize(build(), "int8")
    assert len(_packed(single)) == 2 * 8 and not any("gate_preact" in n and "ogate" not in n for n in _packed(single))


def test_a_tied_embedding_keeps_its_values() -> None:
    model = quantize(build(tie_word_embeddings=True), "int8", lm_head=True)
    assert isinstance(model.lm_head.weight, PackedWeight)
    assert torch.equal(model.embedding.weight, build(tie_word_embeddings=True).embedding.weight)
    assert model.generate(tokens(1, 4), 3).tokens.shape == (1, 3)


def test_fewer_bits_are_further_off() -> None:
    prompt = tokens(4, 30)
    wanted = build()(prompt)[0]
    errors = []
    for format in FORMATS:
        found = quantize(build(), format)(prompt)[0]
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert 1e-4 < errors[0] < errors[1] < errors[2] < 1


def test_what_is_refused() -> None:
    model = build()
    with pytest.raises(InvalidArgument, match="quantize takes int8, fp8, int4 or None, not 'int2'"):
        quantize(model, "int2")
    with torch.no_grad():
        model.backbone.blocks[1].ffn.proj_down.weight[3, 3] = float("inf")
    with pytest.raises(InvalidArgument, match=r"blocks\.1\.ffn\.proj_down\.weight holds NaN or infinity"):
        quantize(model)
    assert not _packed(model)
    for other in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))):
        with pytest.raises(InvalidArgument, match="has no weights to pack"):
            quantize(other)
    model = quantize(build(), "int8")
    with pytest.raises(InvalidArgument, match="is int8 already"):
        quantize(model, "fp8")


def _bits(weight: Tensor) -> list[Tensor]:
    parts = [weight] if not isinstance(weight, PackedWeight) else [weight.stored, weight.scale, weight.zero]
    return [part.detach().contiguous().view(torch.uint8) for part in parts if part is not None]


@pytest.mark.parametrize(
    ("format", "lm_head", "changes", "shard"),
    [
        ("int8", False, {}, 5_000_000_000),
        ("int8", True, {"tie_word_embeddings": True, "weight_mode": "fused"}, 5_000_000_000),
        ("fp8", True, {"use_bias": True, "gate_soft_cap": None}, 20_000),
        ("int4", False, {"tie_word_embeddings": True, "weight_mode": "fused", "bos_token_id": 3}, 20_000),
    ],
)
def test_a_saved_model_has_the_same_bits(
    format: str, lm_head: bool, changes: dict[str, Any], shard: int, tmp_path: Path
) -> None:
    model = quantize(build(dtype=torch.bfloat16, **changes), format, lm_head=lm_head)
    model.save_quantized(tmp_path / "m", max_shard_bytes=shard)
    assert (len(list((tmp_path / "m").glob("*.safetensors"))) > 1) == (shard == 20_000)
    found = xLSTMLarge.from_quantized(tmp_path / "m", device=DEVICE)
    assert found.config == model.config and not found.training
    wanted = model.state_dict()
    assert found.state_dict().keys() == wanted.keys()
    for name, weight in found.state_dict().items():
        assert type(weight) is type(wanted[name]) and weight.dtype == wanted[name].dtype
        if isinstance(weight, PackedWeight):
            assert (weight.format, weight.group) == (wanted[name].format, wanted[name].group)
        assert all(torch.equal(own, part) for own, part in zip(_bits(weight), _bits(wanted[name]), strict=True))
    assert (found.lm_head.weight is found.embedding.weight) == (model.lm_head.weight is model.embedding.weight)
    prompt = tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(found(prompt)[0], model(prompt)[0])
    assert torch.equal(found.generate(prompt, 5).tokens, model.generate(prompt, 5).tokens)


def test_a_saved_model_takes_changes(tmp_path: Path) -> None:
    quantize(build()).save_quantized(tmp_path / "m")
    found = xLSTMLarge.from_quantized(tmp_path / "m", inference_state_dtype="float16")
    assert found.empty_state(1)[0][0].dtype == torch.float16
    for changes in ({"weight_mode": "fused"}, {"layers": 3}):
        with pytest.raises(InvalidArgument, match="no setting of a saved model that can change"):
            xLSTMLarge.from_quantized(tmp_path / "m", **changes)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no weight is packed"):
        build().save_quantized(tmp_path / "m")
    build().save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"has no packed\.json"):
        xLSTMLarge.from_quantized(tmp_path / "plain")
    folder = tmp_path / "m"
    quantize(build()).save_quantized(folder)
    with pytest.raises(OutputError, match="not empty"):
        quantize(build()).save_quantized(folder)
    with pytest.raises(CheckpointError, match="has a loader of its own: from_quantized"):
        xLSTMLarge.from_pretrained(folder)
    file = folder / "model.safetensors"
    whole, name = load_file(file), "backbone.blocks.1.ffn.proj_down.weight"
    for changed, reason in (
        ({f"{name}.scale": None}, "was saved as stored, scale; there is stored"),
        ({"lm_head.weight": None}, "missing: lm_head.weight"),
        ({"more": torch.zeros(1)}, "unexpected: more"),
        ({"backbone.out_norm.weight": torch.ones(3)}, r"backbone.out_norm.weight is \[3\], not \[36\]"),
    ):
        save_file({key: value for key, value in (whole | changed).items() if value is not None}, file)
        with pytest.raises(CheckpointError, match=reason):
            xLSTMLarge.from_quantized(folder)
    for text, reason in (
        ("{", "packed.json"),
        ("[]", "has no configuration"),
        (json.dumps({"version": 2, "config": {}}), "has version 2, this package reads 1"),
        (json.dumps({"version": 1, "config": {"layers": 3}}), "the configuration has no layers"),
        (json.dumps({"version": 1, "config": {"embedding_dim": 36}}), "missing"),
    ):
        (folder / "packed.json").write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            xLSTMLarge.from_quantized(folder)
