"""Folders of gpt-oss in MXFP4, small and random, beside transformers' own experts with the dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wavecrest
from tests.unit.quantized_models import same_state, state_of
from wavecrest.errors import CheckpointError, Unsupported
from wavecrest.integrations import mxfp4
from wavecrest.nn import Experts

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 96
IDS = torch.arange(14).view(2, 7)


def gpt_oss(device: str = "cpu") -> Any:
    config = transformers.GptOssConfig(
        vocab_size=31, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2,
        max_position_embeddings=64, layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.GptOssForCausalLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, rows, columns] in float64: the even column is in the low half of a byte."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    return (torch.cat([sizes, -sizes])[codes] * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def write(path: Path, model: nn.Module, change: dict[str, Tensor | None] | None = None, **about: Any) -> nn.Module:
    """A folder with random experts in blocks and the other weights of a model, which gets the same experts, widened."""
    torch.manual_seed(1)
    held = {name: value.clone() for name, value in model.state_dict().items()}
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        columns, rows = held.pop(name).shape[1:]
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        # transformers stores [experts, in, out]
        model.get_parameter(name).data = widened(blocks, scales).mT.contiguous().float()
    held = {name: value for name, value in (held | (change or {})).items() if value is not None}
    safetensors.save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    config = {"quantization_config": {"quant_method": "mxfp4"} | about}
    (path / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits
    return out


@pytest.mark.parametrize("meta", [False, True])
def test_a_folder_of_gpt_oss_gives_the_model_that_it_stands_for(tmp_path: Path, meta: bool) -> None:
    wanted = logits(write(tmp_path, gpt_oss()))
    model = gpt_oss("meta" if meta else "cpu")
    if meta:
        # its table is in no file
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    before = None if meta else state_of(model)
    found = mxfp4.load(model, tmp_path)
    paths = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert found.formats == dict.fromkeys(paths, "mxfp4") and "mxfp4 2" in repr(found)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    rows = {row.path: row for row in found.report.layers if row.path in paths}
    elements = 3 * EXPERTS * HIDDEN * INTERMEDIATE
    # 96 columns are stored as 128
    stored = EXPERTS * (2 * INTERMEDIATE * (HIDDEN // 2 + 2) + HIDDEN * (64 + 3))
    assert [(row.bytes_before, row.bytes_after) for row in rows.values()] == [(4 * elements, stored)] * 2
    # a file that wavecrest writes
    answer = logits(model)
    found.save(tmp_path / "ours.safetensors")
    other = gpt_oss()
    again = wavecrest.load_quantized(other, tmp_path / "ours.safetensors")
    assert again.formats == found.formats and torch.equal(logits(other), answer)
    # into a model that has such experts already
    wavecrest.load_quantized(other, tmp_path / "ours.safetensors")
    assert torch.equal(logits(other), answer)
    if before is not None:
        found.restore()
        same_state(model, before)


GATE = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "about", "reason"),
    [
        ({f"{GATE}_scales": None}, {}, f"there is no {GATE}_scales"),
        ({f"{GATE}_scales": torch.zeros(EXPERTS, 2, 2)}, {}, "blocks are .experts, rows"),
        (
            {f"{GATE}_blocks": torch.zeros(EXPERTS, 2, 2, 16, dtype=torch.uint8),
             f"{GATE}_scales": torch.zeros(EXPERTS, 2, 2, dtype=torch.uint8)},
            {}, "of another shape or dtype: .*gate_up_proj .4, 2, 32. for .4, 192, 32.",
        ),
        ({f"{GATE}_bias": None}, {}, f"missing: {GATE}_bias"),
        ({}, {"quant_method": "gptq"}, "no quantization_config of mxfp4"),
    ],
)  # fmt: skip
def test_damaged_folders_change_nothing(
    tmp_path: Path, change: dict[str, Tensor | None], about: dict[str, Any], reason: str
) -> None:
    write(tmp_path, gpt_oss(), change, **about)
    model = gpt_oss()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=reason):
        mxfp4.load(model, tmp_path)
    same_state(model, before)


def test_a_folder_without_such_experts_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    write(tmp_path, model)
    with pytest.raises(CheckpointError, match="no experts in MXFP4"):
        mxfp4.load(model, tmp_path)


def test_experts_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    write(tmp_path, gpt_oss())
    model = gpt_oss()
    model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    before = state_of(model)
    with pytest.raises(Unsupported, match=r"layers.1.mlp.experts: GptOssExperts has hooks"):
        mxfp4.load(model, tmp_path)
    same_state(model, before)


def test_a_file_with_experts_in_another_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path, gpt_oss())
    model = gpt_oss()
    found = mxfp4.load(model, tmp_path)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.float())
    found.save(tmp_path / "ours.safetensors")
    with pytest.raises(CheckpointError, match=r"of another shape or dtype: model.layers.0.*gate_up_proj torch.float32"):
        wavecrest.load_quantized(gpt_oss(), tmp_path / "ours.safetensors")
