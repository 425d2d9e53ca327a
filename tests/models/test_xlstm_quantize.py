"""Weights of xLSTM Large in 8 and 4 bits: what is packed, how far it is off, and what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.xlstm_harness import build, close, tokens
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import quantize
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
