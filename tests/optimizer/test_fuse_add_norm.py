"""Residual additions in the norms behind them: which forwards are rewritten, and that they answer as before."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.optimizer.test_replace_rotary import context
from wavecrest import hardware, records
from wavecrest import nn as ours
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import added_norm
from wavecrest.nn.added_norm import Sums
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy

STEP = step_by_id("fuse_add_norm")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def workload(kind: str) -> Workload:
    torch.manual_seed(0)
    tokens = {"input_ids": torch.randint(3, 50, (2, 9))}
    if kind == "bert":
        return from_example(BertModel(BertConfig(**SIZES, vocab_size=50), add_pooling_layer=False).eval(), tokens)
    if kind == "distilbert":
        sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50}
        return from_example(DistilBertModel(DistilBertConfig(**sizes)).eval(), tokens)
    if kind == "llama":
        return from_example(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=50)).eval(), tokens)
    config = CLIPVisionConfig(**SIZES, image_size=32, patch_size=16)
    return from_example(CLIPVisionModel(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)})


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that sums are normalised by."""
    seen: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(added_norm, name)

        def run(*args: Any) -> Any:
            seen.append(name)
            return real(*args)

        return run

    for name in ("post_layer_norm", "add_layer_norm", "add_rms_norm"):
        monkeypatch.setattr(added_norm, name, watched(name))
    return seen


def fused(work: Workload, *before: str) -> nn.Module:
    steps = AppliedSteps()
    for step_id in (*before, STEP.id):
        step = step_by_id(step_id)
        found = step.find(context(work, build(work.model, steps)))
        assert found.sites, found.note
        steps = steps.plus(step, found.params)
    return build(work.model, steps)


@pytest.mark.parametrize(
    ("kind", "before", "expected"),
    [
        # two a layer; positions, which the embeddings add before a norm, are broadcast
        ("bert", (), ["post_layer_norm"] * 4),
        ("bert", ("replace_norm",), ["post_layer_norm"] * 4),
        ("distilbert", (), ["post_layer_norm"] * 4),
        ("clip", (), ["add_layer_norm"] * 2),
        ("llama", ("replace_norm",), ["add_rms_norm"] * 2),
    ],
)
def test_sums_are_normalised_in_one_kernel(kind: str, before: tuple[str, ...], expected: list[str], norms: Any) -> None:
    work = workload(kind)
    made = fused(work, *before)
    assert not failures(Gate.prepare(work, seed=0).check(made))
    norms.clear()
    answer, want = work.run("default", made)[0], work.run("default")[0]
    assert norms == expected
    assert torch.equal(answer, want) if not before else torch.allclose(answer, want, atol=1e-5)
    assert made.state_dict().keys() == work.model.state_dict().keys()


def test_hooks_that_come_later_a_compiler_and_autocast_have_the_sum(norms: Any) -> None:
    work = workload("bert")
    made = fused(work)
    seen: list[Tensor] = []
    made.encoder.layer[0].output.LayerNorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    norms.clear()
    work.run("default", made)
    assert len(norms) == 3 and len(seen) == 1
    made.encoder.layer[0].output.LayerNorm._forward_pre_hooks.clear()
    norms.clear()
    with torch.autocast("cpu", torch.bfloat16):
        work.run("default", made)
    assert not norms
    with torch.no_grad():
        example = next(iter(work.buckets.values()))
        answer = example.call(torch.compile(made, backend="eager", fullgraph=True))[0]
    assert torch.equal(answer, work.run("default")[0]) and not norms


def test_a_copy_and_a_pickled_one_answer_alike() -> None:
    work = workload("clip")
    made = fused(work)
    want = work.run("default")[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(work.run("default", other)[0], want)
    layer, before = made.encoder.layers[0], work.model.encoder.layers[0]
    assert type(layer).__name__ == type(before).__name__
    assert inspect.signature(layer.forward) == inspect.signature(before.forward)


class Sequences(nn.Module):
    """Sums before norms, and what looks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four, self.five = (nn.LayerNorm(8) for _ in range(5))
        self.unit = nn.RMSNorm(8)

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0, *, flag: bool = True) -> tuple[Tensor, ...]:
        if flag:
            x = x + y
            again = x
            x = self.one(x)
        else:
            again = x
        other = x * scale + y
        normed: Tensor = self.two(other)
        # a number, a product, a norm that is no layer norm, and a row between
        x = x + 1
        x = self.three(x)
        y = x * y
        y = self.four(y)
        y = y + x
        x = x - 1
        y = self.four(y)
        return self.five(self.unit(x + y) + self.one(y + again)), normed, other


def test_what_is_a_sum_before_a_norm() -> None:
    torch.manual_seed(0)
    module = Sequences()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    sums = added_norm.sums_of(module)
    assert isinstance(sums, Sums)
    assert (set(sums.alone), set(sums.kept)) == ({"three", "one", "five"}, {"one", "two"})
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    made = copy.deepcopy(module)
    added_norm.adopt(made)
    for given in ({}, {"flag": False}, {"scale": 0.5}):
        for got, want in zip(made(x, y, **given), module(x, y, **given), strict=True):
            assert torch.equal(got, want)
    # a sum that is broadcast is PyTorch's
    for got, want in zip(made(x, y[:1]), module(x, y[:1]), strict=True):
        assert torch.equal(got, want)
    assert inspect.signature(made.forward) == inspect.signature(module.forward)


def test_sums_of_other_norms_of_ours() -> None:
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for norm in (ours.RMSNorm(8, eps=None), ours.RMSNorm(8, elementwise_affine=False), ours.LayerNorm(8, bias=False)):
        assert torch.equal(added_norm.norm_of_sum(norm, x, y), norm(x + y))
        normed, total = added_norm.norm_and_sum(norm, x, y)
        assert torch.equal(normed, norm(x + y)) and torch.equal(total, x + y)
    # gradients flow as before
    x.requires_grad_()
    added_norm.norm_of_sum(nn.LayerNorm(8), x, y).square().sum().backward()
    assert x.grad is not None


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x)


def test_what_is_left_alone() -> None:
    assert added_norm.sums_of(nn.Linear(2, 2)) == added_norm.sums_of(nn.Sequential(nn.LayerNorm(8))) == ""
    assert "Decorated is decorated" in str(added_norm.sums_of(Decorated()))
    module = Sequences()
    module.register_forward_hook(lambda *_: None)
    assert "has hooks" in str(added_norm.sums_of(module))
    with pytest.raises(StepRefused, match="Linear normalises no sum"):
        added_norm.adopt(nn.Linear(2, 2))
    work = workload("bert")
    found = STEP.find(StepContext(work, hardware.cpu(), model=structural_copy(work.model)))
    assert not found.sites and "on the CPU" in found.note
    made = fused(work)
    assert "not at hand" in str(added_norm.sums_of(made.encoder.layer[0].output))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    found = STEP.find(context(from_example(encoder, torch.randn(2, 5, 32))))
    assert not found.sites and "TransformerEncoderLayer as one operation" in found.note


def test_the_prediction_counts_tensors_that_are_read_and_written() -> None:
    work = workload("bert")
    one = context(work)
    one.profile = [
        records.BucketProfile.model_construct(
            bucket="default", wall_ms=1.0, kernel_ms=1.0, idle_ms=0.0, launches=40, ops=[],
            categories=[
                records.CategoryTime.model_construct(category="elementwise", ms=0.2, share=0.2),
                records.CategoryTime.model_construct(category="normalisation", ms=0.1, share=0.1),
            ],
        )
    ]  # fmt: skip
    found = STEP.find(one)
    # all five norms: three tensors in place of five, where a norm alone is two
    assert STEP.predict(found, one).ratio == pytest.approx(1 / (1 - 0.1))
    one.profile[0].categories[0].share = 0.05
    assert STEP.predict(found, one).ratio == pytest.approx(1 / (1 - 0.05))
