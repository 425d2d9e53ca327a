"""The libraries' own attention classes, and which steps find sites in each: a table to read and to extend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.graphs.attention import name_of
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure.workload import Workload, from_example
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, compile_fusions, step_by_id, structural_copy
from wavecrest.optimizer.steps.attention_choices import AttentionChoices

STEPS = ("fuse_qkv", "fuse_parallel", "attention:pack_heads", "attention:sdpa")
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.arange(14).reshape(2, 7)


class TwoCalls(nn.Module):
    """Self-attention and attention to another sequence, as in a decoder of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(32, 4, batch_first=True)
        self.other = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        return x + self.other(x, memory, memory, need_weights=False)[0]


def of(name: str, config: str, inputs: dict[str, Any], **options: Any) -> Callable[[], Workload]:
    def make() -> Workload:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        made = getattr(transformers, name)(getattr(transformers, config)(**options))
        return from_example(made.eval(), inputs)

    return make


def torch_encoder() -> Workload:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return from_example(nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 5, 32))


def torch_two_calls() -> Workload:
    torch.manual_seed(0)
    return from_example(TwoCalls().eval(), (torch.randn(2, 5, 32), torch.randn(2, 7, 32)))


IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
TABLE: dict[str, tuple[Callable[[], Workload], dict[str, int]]] = {
    "nn.TransformerEncoder": (torch_encoder, {"attention:pack_heads": 1}),
    "nn.MultiheadAttention": (torch_two_calls, {"attention:pack_heads": 2}),
    "BERT": (of("BertModel", "BertConfig", {"input_ids": IDS}, **SMALL), {"fuse_qkv": 1}),
    "ViT": (of("ViTModel", "ViTConfig", IMAGE, **SMALL, image_size=32, patch_size=8), {"fuse_qkv": 1}),
    "CLIP vision": (
        of("CLIPVisionModel", "CLIPVisionConfig", IMAGE, **SMALL, image_size=32, patch_size=8),
        {"fuse_qkv": 1},
    ),
    "T5 encoder": (
        of("T5EncoderModel", "T5Config", {"input_ids": IDS}, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        {"fuse_parallel": 1},
    ),
    "Whisper": (
        of(
            "WhisperModel",
            "WhisperConfig",
            {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": IDS[:1]},
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=20,
            vocab_size=64,
            pad_token_id=0,
            decoder_start_token_id=1,
            use_cache=False,
        ),
        # keys without a bias; those of the other sequence are no family of names
        {"fuse_qkv": 2, "fuse_parallel": 1},
    ),
    "written-out attention": (
        of("BertModel", "BertConfig", {"input_ids": IDS}, **SMALL, attn_implementation="eager"),
        {"fuse_qkv": 1, "attention:sdpa": 1},
    ),
}


def found(workload: Workload, name: str) -> Any:
    context = StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))
    try:
        return step_by_id(name).find(context)
    except StepRefused as error:
        return str(error)


@pytest.mark.parametrize("name", TABLE)
def test_sites_by_library(name: str) -> None:
    make, expected = TABLE[name]
    workload = make()
    results = {step: found(workload, step) for step in STEPS}
    assert {step: len(one.sites) for step, one in results.items() if getattr(one, "sites", ())} == expected
    gate = Gate.prepare(workload)
    for step in expected:
        made = build(workload.model, AppliedSteps().plus(step_by_id(step), results[step].params))
        assert not failures(gate.check(made)), step


def torchvision_swin() -> Workload:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    torch.manual_seed(0)
    model = swin.SwinTransformer([2, 2], 16, [2], [2], [4, 4], num_classes=5)
    return from_example(model.eval(), IMAGE["pixel_values"])


def timm_swin() -> Workload:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 64, "window_size": 4, "depths": (2,), "embed_dim": 32, "num_heads": (2,)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)
    return from_example(model.eval(), torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64))


GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
# padding at the right, and at the left, where a causal mask leaves queries without a key
RIGHT, LEFT = torch.ones_like(IDS), torch.ones_like(IDS)
RIGHT[1, 4:], LEFT[1, :3] = 0, 0
EAGER = {"attn_implementation": "eager"}
# models that write attention out, and how often
WRITTEN: dict[str, tuple[Callable[[], Workload], int]] = {
    "DeBERTa": (
        of(
            "DebertaV2Model",
            "DebertaV2Config",
            {"input_ids": IDS, "attention_mask": RIGHT},
            **SMALL,
            relative_attention=True,
            position_buckets=8,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
        ),
        1,
    ),
    "T5 encoder": (
        of(
            "T5EncoderModel",
            "T5Config",
            {"input_ids": IDS, "attention_mask": RIGHT},
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            **EAGER,
        ),
        2,
    ),
    "GPT-2": (
        of(
            "GPT2Model",
            "GPT2Config",
            {"input_ids": IDS, "attention_mask": LEFT, "use_cache": False},
            n_embd=32,
            n_layer=1,
            n_head=4,
            **EAGER,
        ),
        1,
    ),
    "Swin of torchvision": (torchvision_swin, 2),
    "Swin of timm": (timm_swin, 2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_that_is_written_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, number = WRITTEN[name]
    workload, step = make(), step_by_id("compile:graph")

    def chosen(calls: Iterable[FlashAttentionCall], _device: str) -> AttentionChoices:
        return AttentionChoices({name_of(call): "" for call in calls}, {}, {})

    monkeypatch.setattr(compile_fusions, "attention_choices", chosen)
    found = step.find(StepContext(workload, GPU, model=structural_copy(workload.model)))
    assert f"{number} calls of attention that are written out" in found.note and found.params["attentions"]
    assert step.check_params(found.params) == found.params.get("masks", [])
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    inputs = next(iter(workload.buckets.values()))
    with torch.no_grad(), strict_compilation(graphs=8):
        answers = [
            one if isinstance(one, Tensor) else one[0]
            for one in (inputs.clone().call(made), inputs.call(workload.model))
        ]
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
