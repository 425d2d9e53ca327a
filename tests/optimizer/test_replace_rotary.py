"""Rotary embeddings of transformers models: which calls are taken over, by what proof, and what stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import hardware, records
from wavecrest.errors import PlanError, StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import rotary
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.replace_rotary import _style

transformers = pytest.importorskip("transformers")
GPU = hardware.Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip")
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


def workload(name: str, **options: Any) -> Workload:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return from_example(model, {"input_ids": torch.randint(1, 64, (2, 7))})


def context(work: Workload, model: nn.Module | None = None) -> StepContext:
    return StepContext(work, GPU, model=structural_copy(work.model) if model is None else model)


def replaced(work: Workload, *before: tuple[str, dict[str, Any]]) -> tuple[nn.Module, AppliedSteps]:
    steps = AppliedSteps()
    for step_id, params in before:
        steps = steps.plus(step_by_id(step_id), params)
    step = step_by_id("replace_rotary")
    found = step.find(context(work, build(work.model, steps)))
    assert found.sites, found.note
    steps = steps.plus(step, found.params)
    return build(work.model, steps), steps


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the calls of rope."""
    seen: list[tuple[int, ...]] = []
    real = rotary.rope

    def rope(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(rotary, "rope", rope)
    return seen


@pytest.mark.parametrize(
    ("name", "options", "style"),
    [
        ("Llama", {}, "neox"),
        ("Qwen3", {"head_dim": 8}, "neox"),
        # the first half of each head is rotated
        ("GPTNeoX", {"rotary_pct": 0.5}, "neox"),
        ("Cohere", {}, "gptj"),
    ],
)
def test_a_models_calls_are_taken_over(
    name: str, options: dict[str, Any], style: str, launches: list[tuple[int, ...]]
) -> None:
    work = workload(name, **options)
    made, steps = replaced(work)
    assert steps.steps[0].params["style"] == style and len(steps.steps[0].params["sites"]) == 2
    launches.clear()
    assert not failures(Gate.prepare(work, seed=0).check(made))
    assert launches
    # the model itself, and others of its file, keep their function
    launches.clear()
    work.run("default")
    copy.deepcopy(work.model)(torch.ones(1, 3, dtype=torch.long))
    assert not launches
    assert [type(module).__name__ for module in made.modules()] == [type(m).__name__ for m in work.model.modules()]


def test_q_and_k_of_a_fused_projection_are_rotated_by_one_launch(launches: list[tuple[int, ...]]) -> None:
    work = workload("Llama")
    fuse = step_by_id("fuse_qkv").find(context(work))
    made, _ = replaced(work, ("fuse_qkv", fuse.params))
    launches.clear()
    expected = work.run("default")
    assert torch.allclose(work.run("default", made).logits, expected.logits, atol=1e-5)
    assert launches == [(2, 7, 6, 8)] * 2
    plain, _ = replaced(work)
    launches.clear()
    work.run("default", plain)
    assert launches == [(2, 7, 4, 8), (2, 7, 2, 8)] * 2


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("gap", [0, 8])
def test_only_neighbours_in_one_memory_are_joined(heads_dim: int, gap: int, launches: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    packed = torch.randn(2, 5, 6 * 8 + gap)
    q = packed[..., : 4 * 8].view(2, 5, 4, 8)
    k = packed[..., 4 * 8 + gap :].view(2, 5, 2, 8)
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    if heads_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    mine = rotary.rotate_qk(q, k, angles.cos(), angles.sin(), heads_dim=heads_dim)
    assert len(launches) == (2 if gap else 1)
    apart = rotary.rotate_qk(q.clone(), k.clone(), angles.cos(), angles.sin(), heads_dim=heads_dim)
    llama = transformers.models.llama.modeling_llama
    right = llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=heads_dim)
    for one, other, expected in zip(mine, apart, right, strict=True):
        assert torch.equal(one, other) and torch.allclose(one, expected, atol=1e-6)
    # as many addresses of nothing
    meta = rotary.rotate_qk(*(one.to("meta") for one in (q, k, angles, angles)), heads_dim=heads_dim)
    assert [one.shape for one in meta] == [q.shape, k.shape]


def test_the_replaced_forward_compiles() -> None:
    work = workload("Llama", num_hidden_layers=1)
    made, _ = replaced(work)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.allclose(work.run("default", compiled).logits, work.run("default").logits, atol=1e-5)


def test_other_functions_are_left_alone_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    step, llama = step_by_id("replace_rotary"), transformers.models.llama.modeling_llama
    real = llama.apply_rotary_pos_emb

    def scaled(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        q, k = real(q, k, cos, sin, unsqueeze_dim)
        return q, k * 1.0001

    def named(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None) -> Any:
        return real(q, k, cos, sin)

    for function, reason in {scaled: "something else", named: "takes (q, k, cos, sin, position_ids)"}.items():
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", function)
        found = step.find(context(workload("Llama")))
        assert not found.sites
        assert reason in found.note
    monkeypatch.undo()
    q, tables = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16), torch.randn(1, 3, 2).repeat(1, 1, 2)
    with pytest.raises(StepRefused, match=r"of torch.bfloat16 with tables of torch.float32 answers in torch.float32"):
        _style(real, q, q, tables, tables, 1, result=real(q, q, tables, tables))
    mlp = from_example(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    assert "no module calls" in step.find(context(mlp)).note
    on_cpu = StepContext(workload("Llama"), hardware.cpu(), model=nn.Sequential())
    assert "on the CPU" in step.find(on_cpu).note


def test_a_plan_that_names_another_module_is_refused() -> None:
    work, step = workload("Llama"), step_by_id("replace_rotary")
    with pytest.raises(StepRefused, match="does not call"):
        build(work.model, AppliedSteps().plus(step, {"sites": ["model.norm"], "style": "neox"}))
    with pytest.raises(PlanError, match="style"):
        build(work.model, AppliedSteps().plus(step, {"sites": ["model.norm"], "style": "other"}))


def test_the_prediction_counts_negated_halves() -> None:
    row = records.OpTime(name="aten::neg", category="elementwise", shapes="1x4x1x4", calls=8, ms=0.02, share=0.02)
    profile = records.BucketProfile(
        bucket="default", wall_ms=2.0, kernel_ms=1.0, idle_ms=1.0, launches=160, categories=[], ops=[row],
        uncategorized=[],
    )  # fmt: skip
    work, step = workload("Llama"), step_by_id("replace_rotary")
    where = context(work)
    where.profile = [profile]
    # half of the time the device works, of which they are a tenth; a quarter of the launches, in the other half
    saved = (0.5 * 0.1 + 0.5 * 0.25) * 9 / 10
    assert step.predict(step.find(where), where).ratio == pytest.approx(1 / (1 - saved))
    where.profile = [profile.model_copy(update={"ops": []})]
    assert step.predict(step.find(where), where).ratio == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().to("cuda", dtype)
    work = from_example(model, {"input_ids": torch.randint(1, 64, (2, 7), device="cuda")})
    step = step_by_id("replace_rotary")
    found = step.find(StepContext(work, hardware.detect(), model=structural_copy(model)))
    assert len(found.sites) == 2, found.note
    made = build(model, AppliedSteps().plus(step, found.params))
    assert not failures(Gate.prepare(work, seed=0).check(made))
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True)
    assert not failures(Gate.prepare(work, seed=0).check(compiled))
