"""Attention steps: which calls they change, and that the answers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.attention import check_causal, register_pack_gqa, watch_sdpa

transformers = pytest.importorskip("transformers")

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}


def llama(kv_heads: int = 2, implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=kv_heads)
    config._attn_implementation = implementation
    return transformers.LlamaForCausalLM(config).eval()


def decode(model: nn.Module) -> Workload:
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 64, (2, 9)), past_key_values=cache)

    def rewind(_bucket: str) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(9)

    inputs = Inputs((), {"input_ids": torch.randint(0, 64, (2, 1)), "past_key_values": cache})
    return Workload(model, {"one token": inputs}, reset=rewind)


def context(workload: Workload) -> StepContext:
    return StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))


@pytest.mark.slow
def test_pack_gqa_gives_the_same_answers_without_touching_the_original() -> None:
    workload = decode(llama())
    step = step_by_id("attention:pack_gqa")
    found = step.find(context(workload))
    assert found.sites == ("",), found.note
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    gate = Gate.prepare(workload)
    assert not failures(gate.check(made))
    assert not failures(gate.check(torch.compile(made, fullgraph=True, backend="eager")))
    assert workload.model.config._attn_implementation == "sdpa"
    assert made.config._attn_implementation == "wavecrest_pack_gqa"


def test_pack_gqa_packs_the_right_heads() -> None:
    """Against the definition, with K/V heads that differ: a wrong order of heads shows at once."""
    register_pack_gqa()
    from transformers import AttentionInterface

    pack = AttentionInterface()["wavecrest_pack_gqa"]
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    mask = torch.zeros(2, 1, 1, 5).masked_fill(torch.rand(2, 1, 1, 5) < 0.4, float("-inf"))
    mask[..., 0] = 0
    wide_key, wide_value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ wide_key.transpose(-1, -2)) * 0.3 + mask
    expected = (scores.softmax(-1) @ wide_value).transpose(1, 2)
    got, _ = pack(nn.Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(got, expected)


def test_pack_gqa_leaves_prefill_and_plain_heads_alone() -> None:
    ids = {"input_ids": torch.randint(0, 64, (2, 9))}
    found = step_by_id("attention:pack_gqa").find(context(from_example(llama(), ids)))
    assert not found.sites and "one query token" in found.note
    found = step_by_id("attention:pack_gqa").find(context(decode(llama(kv_heads=8))))
    assert not found.sites and "head of its own" in found.note


def test_sdpa_replaces_written_out_attention_only() -> None:
    ids = {"input_ids": torch.randint(0, 64, (2, 9))}
    workload = from_example(llama(implementation="eager"), ids)
    step = step_by_id("attention:sdpa")
    found = step.find(context(workload))
    assert found.sites
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    assert not watch_sdpa(workload.model, list(workload.buckets.values()))
    assert watch_sdpa(made, list(workload.buckets.values()))
    assert "sdpa already" in step.find(context(from_example(llama(), ids))).note
    assert "not a transformers model" in step.find(context(from_example(nn.Linear(2, 2), torch.ones(1, 2)))).note


class Attend(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=self.is_causal)


@pytest.mark.parametrize(("q_len", "refused"), [(1, True), (3, True), (5, False)], ids=["decode", "chunk", "square"])
def test_causal_lint(q_len: int, refused: bool) -> None:
    inputs = [Inputs((torch.randn(1, 2, q_len, 8), torch.randn(1, 2, 5, 8)))]
    if refused:
        with pytest.raises(StepRefused, match="upper-left"):
            check_causal(Attend(False), Attend(True), inputs)
    else:
        check_causal(Attend(False), Attend(True), inputs)
    # what the original does already is its own business
    check_causal(Attend(True), Attend(True), inputs)


def test_pytorch_aligns_upper_left() -> None:
    """The fact behind the lint: one query over five keys under is_causal sees the first key alone."""
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])
