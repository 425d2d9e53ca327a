"""Scales moved from norms into the layers behind them: exact, where nothing else reads the norm, and of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wavecrest
from tests.unit.quantized_models import DEVICE, SIZE, causal, same_state, state_of, tokens
from wavecrest.nn import Linear
from wavecrest.quantizer import calibrate, layers, smooth
from wavecrest.quantizer.changes import Changes, install

OUTLIERS = {f"blocks.{at}.norm{which}" for at in range(2) for which in (1, 2)}


def groups_of(model: nn.Module, *inputs: torch.Tensor) -> tuple[Any, list[smooth.Group], dict[str, str]]:
    found = layers.find(model, ())
    workload = calibrate.workload_of(model, [(one,) for one in inputs], "calibration")
    observed = calibrate.observe(workload, found.sites, flow=True)
    return (found, *smooth.groups(model, observed, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moved_scales_change_no_bit(dtype: torch.dtype) -> None:
    model = causal(dtype, outlier=True)
    ids = tokens()
    before = state_of(model)
    found, groups, _ = groups_of(model, ids, tokens(3, 5))
    same_state(model, before)
    assert {group.path for group in groups} == OUTLIERS
    assert [site.path for site in groups[0].sites] == ["blocks.0.q", "blocks.0.k"]
    for group in groups:
        # powers of two, and a large one for the column that sticks out
        assert torch.equal(group.factors.log2(), group.factors.log2().round()) and int(group.factors.argmax()) == 3
        assert float(group.factors[3] / group.factors.median()) >= 8
        smooth.apply(group)
    with torch.no_grad():
        answer = model(ids)
        changes = Changes()
        choice = dict.fromkeys((site.path for site in found.sites), None)
        install(changes, model, found.sites, groups, choice, all_groups=True)
        assert model.blocks[0].norm1.weight[3] < 60 and model.blocks[0].norm1.bias is not None
        assert torch.equal(model(ids), answer)
    changes.undo()
    same_state(model, before)


@pytest.mark.parametrize("format", ["w8a8-int8", "w8a8-fp8"])
def test_the_error_of_layers_with_outliers_is_smaller(format: str) -> None:
    model = causal(outlier=True)
    ids = tokens()
    before = state_of(model)
    options: dict[str, Any] = {"calibration": (ids,), "max_error": 1.0}
    plain = wavecrest.quantize(model, format, smooth=None, **options)
    errors = {one.path: one.error for one in plain.report.layers}
    assert plain.report.smoothed == () and plain.report.quality is not None
    plain.restore()
    moved = wavecrest.quantize(model, format, **options)
    behind = [f"blocks.{at}.{name}" for at in range(2) for name in ("q", "k", "up")]
    after = {one.path: one.error for one in moved.report.layers}
    quality = moved.report.quality
    assert quality is not None and len(moved.formats) == len(plain.formats) == 8
    if format == "w8a8-int8":
        assert set(moved.report.smoothed) == OUTLIERS and quality.relative < plain.report.quality.relative / 4
        assert all((after[path] or 1) < (errors[path] or 0) / 8 for path in behind)
    else:
        # 8-bit floats have an exponent each, so that a power of two helps subnormal ones alone
        assert set(moved.report.smoothed) | set(moved.report.not_smoothed) == OUTLIERS
        for path in moved.report.smoothed:
            layers_of = [one for one in behind if one.startswith(path[:8]) and (path[-1] == "2") == one.endswith("up")]
            assert sum((after[one] or 1) ** 2 for one in layers_of) < sum((errors[one] or 0) ** 2 for one in layers_of)
    assert all(after[path] == errors[path] for path in ("blocks.0.down", "blocks.1.down"))
    moved.restore()
    same_state(model, before)


def test_layers_that_keep_their_precision_get_the_columns_too() -> None:
    model = causal(outlier=True)
    ids = tokens()
    before = state_of(model)
    # k and q of a block have one norm; k gives way, whatever its error
    found = wavecrest.quantize(model, "w8a8-int8", calibration=(ids,), max_error=0.04)
    found.restore()
    site = {one.path: one.error for one in found.report.layers}
    limit = (site["blocks.0.q"] + site["blocks.0.k"]) / 2
    low, high = sorted(("blocks.0.q", "blocks.0.k"), key=lambda path: site[path])
    found = wavecrest.quantize(model, "w8a8-int8", calibration=(ids,), max_error=limit)
    assert low in found.formats and high not in found.formats and "blocks.0.norm1" in found.report.smoothed
    kept: Any = model.get_submodule(high)
    ratio = kept.weight.detach() / before["values"][f"{high}.weight"]
    assert type(kept) is nn.Linear and float(ratio[:, 3].mean()) >= 8
    assert found.report.quality is not None and found.report.quality.relative < 0.05
    found.restore()
    same_state(model, before)


class Post(nn.Module):
    """Norms that have other readers than linear layers, or do not scale with their weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = Gemma() if kind == "gemma" else nn.LayerNorm(SIZE)
        self.second = nn.LayerNorm(SIZE)
        self.layer = nn.Linear(SIZE, SIZE)
        with torch.no_grad():
            self.norm.weight[3] += 50
        if kind == "added":
            self.first: nn.Module = Linear.from_module(nn.Linear(SIZE, SIZE))
        if kind == "shared":
            self.second.weight = self.norm.weight

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(x)
        if self.kind == "residual":
            return self.layer(normed) + normed
        if self.kind == "in place":
            return self.layer(normed.add_(1.0))
        if self.kind == "returned":
            return {"out": self.layer(normed), "hidden": normed[:, :1]}
        if self.kind == "part":
            return self.layer(normed[:, 1:])
        if self.kind == "norm":
            return self.layer(self.second(normed))
        if self.kind == "two norms":
            return self.layer(normed) + self.second(normed)
        if self.kind == "added":
            return self.first(self.layer(normed), normed)
        if self.kind == "mixed":
            return self.layer(normed) + self.layer(x)
        if self.kind == "view":
            return self.layer(normed.view(-1, SIZE)).view(x.shape)
        if self.kind == "shared":
            return self.layer(normed) + self.second(x)
        return self.layer(normed)


class Gemma(nn.Module):
    """x / rms · (1 + weight)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn.functional.rms_norm(x, (SIZE,)) * (1 + self.weight)
        return out


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("alone", None),
        ("view", None),
        ("residual", "aten.add reads its output too"),
        ("in place", "aten.add_ reads its output too"),
        ("returned", "the model returns its output"),
        ("part", ""),
        ("norm", ""),
        ("two norms", "another norm reads its output"),
        ("added", "first adds its output"),
        ("mixed", "layer also has other inputs"),
        ("gemma", "Gemma does not scale with its weight"),
        ("shared", "its weight, or that of one of its layers, is shared"),
    ],
)
def test_norms_with_other_readers_keep_their_scales(kind: str, reason: str | None) -> None:
    torch.manual_seed(0)
    model = Post(kind).eval()
    before = state_of(model)
    _, groups, left = groups_of(model, torch.randn(2, 6, SIZE), torch.randn(1, 3, SIZE))
    same_state(model, before)
    if reason is None:
        assert [group.path for group in groups] == ["norm"]
    elif not reason:
        # no layer has all of its output, so that there is nothing to say
        assert "norm" not in left and all(group.path == "second" for group in groups)
    else:
        assert groups == [] and left == {"norm": reason}


def test_a_migration_that_the_watch_misses_is_taken_back() -> None:
    class Stash(nn.Module):
        """A reader that no operation shows: numpy shares the memory."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
            with torch.no_grad():
                self.norm.weight[3] = 50.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x)
            out: torch.Tensor = self.layer(normed) + torch.tensor(normed.detach().numpy().copy())
            return out

    torch.manual_seed(0)
    model = Stash().eval()
    found = wavecrest.quantize(model, "w8a8-int8", calibration=torch.randn(4, SIZE))
    assert found.report.smoothed == () and "the model's answers move by" in found.report.not_smoothed["norm"]
    assert found.report.quality is not None and found.report.quality.relative < 0.05


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    with torch.no_grad():
        for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
            norm.weight[5] = 30.0
    inputs = {"input_ids": tokens(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.int64).to(DEVICE)}
    inputs["attention_mask"][0, 8:] = 0
    before = state_of(model)
    found = wavecrest.quantize(model, "w8a8-int8", calibration=inputs, quality="30%")
    assert len(found.formats) == 7 and "lm_head" not in found.formats
    assert set(found.report.smoothed) == {
        "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"
    }  # fmt: skip
    quality = found.report.quality
    assert quality is not None and quality.positions == 20 and quality.tokens == 18 and quality.perplexity is not None
    assert model.generate(inputs["input_ids"][1:], max_new_tokens=3, do_sample=False).shape == (1, 15)
    found.restore()
    same_state(model, before)
