from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from wavecrest import nn as wnn
from wavecrest import ops
from wavecrest.errors import InvalidArgument


def test_tables_by_the_formula() -> None:
    cos, sin = wnn.rope_tables(50, 12, base=500.0)
    assert cos.shape == sin.shape == (50, 6) and cos.dtype == sin.dtype == torch.float32
    for p in (0, 1, 17, 49):
        for i in range(6):
            angle = p * 500.0 ** (-2 * i / 12)
            assert cos[p, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert sin[p, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4.0}, wnn.LinearScaling(4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            wnn.Llama3Scaling(8.0, 1.0, 4.0, 128),
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 8192,
            },
            wnn.Llama3Scaling(32.0, 2.0, 3.0),
        ),
    ],
    ids=["default", "linear", "llama3", "llama3-3.2"],
)
def test_agrees_with_transformers(parameters: dict[str, float], scaling: wnn.LinearScaling | None) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 9, 32, generator=generator) for heads in (4, 2))
    positions = torch.randint(0, 1024, (2, 9), generator=generator)
    cos, sin = theirs(q, positions)
    want = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = wnn.RotaryEmbedding(32, 1024, base=5000.0, scaling=scaling)
    for x, y in zip((q, k), want, strict=True):
        got = ours(x.transpose(1, 2), positions).transpose(1, 2)
        torch.testing.assert_close(got, y, rtol=1e-5, atol=2e-5)
        assert got.is_contiguous()
        # what a user of transformers holds, without the module
        half = ops.rope(x.transpose(1, 2), cos[..., :16], sin[..., :16]).transpose(1, 2)
        torch.testing.assert_close(half, y, rtol=1e-6, atol=1e-6)


def test_llama3_keeps_short_waves_and_divides_long_ones() -> None:
    scaling = wnn.Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0)
    # waves of 100 (short), 4,096 (half way: 8,192 / 4,096 is 2, a third of the ramp) and 100,000 positions (long)
    frequencies = 2 * math.pi / torch.tensor([100.0, 4096.0, 100000.0])
    ratio = scaling(frequencies) / frequencies
    torch.testing.assert_close(ratio, torch.tensor([1.0, (2 / 3) / 8 + 1 / 3, 1 / 8]))


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_forward(style: str) -> None:
    module = wnn.RotaryEmbedding(8, 16, style=style)
    x = torch.randn(2, 5, 3, 12, generator=torch.Generator().manual_seed(0))
    cos, sin = wnn.rope_tables(16, 8)
    positions = torch.tensor([3, 15, 0, 2, 9])
    assert torch.equal(module(x), ops.rope(x, cos, sin, None, style))
    assert torch.equal(module(x, positions), ops.rope(x, cos, sin, positions, style))


class Holder(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.rotary = wnn.RotaryEmbedding(8, 64, scaling=wnn.LinearScaling(2.0), device=device)


def test_tables_stay_exact_when_a_model_changes_dtype() -> None:
    want = wnn.rope_tables(64, 8, scaling=wnn.LinearScaling(2.0))
    for convert in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), copy.deepcopy):
        model = convert(Holder())
        for table, kept in zip((model.rotary.cos, model.rotary.sin), want, strict=True):
            assert table.dtype == torch.float32 and torch.equal(table, kept)
    assert Holder().half().linear.weight.dtype == torch.float16


def test_a_module_without_memory_gets_its_tables() -> None:
    model = Holder("meta")
    assert model.rotary.cos.is_meta and model.rotary.cos.dtype == torch.float32
    model.to_empty(device="cpu")
    want = wnn.rope_tables(64, 8, scaling=wnn.LinearScaling(2.0))
    assert torch.equal(model.rotary.cos, want[0]) and torch.equal(model.rotary.sin, want[1])


def test_tables_are_buffers_that_are_not_saved() -> None:
    model = Holder()
    assert not [name for name in model.state_dict() if "rotary" in name]
    assert {name for name, _ in model.named_buffers()} == {"rotary.cos", "rotary.sin"}
    assert "rope" not in repr(model) and "LinearScaling(factor=2.0)" in repr(model)


def test_the_default_device_is_kept_to() -> None:
    with torch.device("meta"):
        assert wnn.RotaryEmbedding(8, 16).cos.is_meta
        cos, _ = wnn.rope_tables(16, 8, device="cpu")
    assert torch.equal(cos, wnn.rope_tables(16, 8)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wnn.rope_tables(0, 8), "max_positions"),
        (lambda: wnn.rope_tables(2.5, 8), "max_positions"),  # type: ignore[arg-type]
        (lambda: wnn.rope_tables(4, 7), "rotary_dim"),
        (lambda: wnn.rope_tables(4, 0), "rotary_dim"),
        (lambda: wnn.rope_tables(4, 8, base=0.0), "base"),
        (lambda: wnn.rope_tables(4, 8, base=math.inf), "base"),
        (lambda: wnn.RotaryEmbedding(8, 4, style="llama"), "neox or gptj"),
        (lambda: wnn.LinearScaling(0.0), "factor"),
        (lambda: wnn.Llama3Scaling(factor=-1.0), "factor"),
        (lambda: wnn.Llama3Scaling(low_frequency_factor=4.0), "must be above"),
        (lambda: wnn.Llama3Scaling(original_max_positions=0), "original_max_positions"),
    ],
)
def test_wrong_arguments(make: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()  # type: ignore[operator]


def test_a_position_past_the_tables_is_nan() -> None:
    module = wnn.RotaryEmbedding(8, 4)
    got = module(torch.ones(2, 1, 8), torch.tensor([3, 4]))
    assert got[0].isfinite().all() and got[1].isnan().all()
