"""The remaining surgery steps: sites, answers, and an untouched original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware, ops, records
from wavecrest import nn as ours
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy

transformers = pytest.importorskip("transformers")
GPU = hardware.Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip")


def context(workload: Workload, device: hardware.Device | None = None, precision: str | None = None) -> StepContext:
    return StepContext(workload, device or hardware.cpu(), model=structural_copy(workload.model), precision=precision)


def applied(workload: Workload, step_id: str, where: StepContext) -> nn.Module:
    step = step_by_id(step_id)
    found = step.find(where)
    assert found.sites, found.note
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    return made


def llama(**options: Any) -> Workload:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **options
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return from_example(model, {"input_ids": torch.randint(0, 64, (2, 7))})


def test_channels_last_changes_layout_not_answers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    workload = from_example(model, torch.randn(2, 3, 9, 9))
    made = applied(workload, "channels_last", context(workload))
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous() and not model[0].weight.is_contiguous(memory_format=torch.channels_last)
    again = step_by_id("channels_last").find(context(from_example(made, torch.randn(2, 3, 9, 9))))
    assert not again.sites and "already" in again.note
    assert "no 2-D convolution" in step_by_id("channels_last").find(context(llama())).note


def test_norms_of_a_transformers_model_are_replaced_and_share_their_weights() -> None:
    workload = llama()
    made = applied(workload, "replace_norm", context(workload))
    norm = made.model.layers[0].input_layernorm
    assert isinstance(norm, ours.RMSNorm)
    assert norm.weight is workload.model.model.layers[0].input_layernorm.weight
    assert type(workload.model.model.norm).__name__ == "LlamaRMSNorm"


def test_norms_of_elementwise_operations_are_seen_in_the_profile() -> None:
    """Eight launches a norm, of which one is left; a power of another shape belongs to an activation."""

    def row(name: str, shapes: str, share: float) -> records.OpTime:
        return records.OpTime(name=name, category="elementwise", shapes=shapes, calls=10, ms=share, share=share)

    ops = [row(name, "1x64 float32", 0.04) for name in ("aten::pow", "aten::mean", "aten::rsqrt")]
    profile = records.BucketProfile(
        bucket="default", wall_ms=2.0, kernel_ms=1.0, idle_ms=1.0, launches=140, categories=[],
        ops=[*ops, row("aten::pow", "1x256 float32", 0.5)], uncategorized=[],
    )  # fmt: skip
    step, where = step_by_id("replace_norm"), context(llama())
    where.profile = [profile]
    # half of the time the device works, of which norms are 30 %; half of the launches go, in the other half
    saved = 0.3 * 0.5 * 7 / 8 + 0.5 * 0.5
    predicted = step.predict(step.find(where), where)
    assert predicted.ratio == pytest.approx(1 / (1 - saved)) and "about 15% of the time" in predicted.basis
    where.profile = [profile.model_copy(update={"ops": []})]
    assert step.predict(step.find(where), where).ratio == 1.0


def test_torch_norms_stay_on_the_cpu_and_go_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    workload = from_example(model, torch.randn(3, 8))
    found = step_by_id("replace_norm").find(context(workload))
    assert not found.sites and "PyTorch's own kernel" in found.note
    made = applied(workload, "replace_norm", context(workload, GPU))
    assert isinstance(made[1], ours.LayerNorm) and isinstance(model[1], nn.LayerNorm)


def test_a_norm_that_computes_something_else_is_left_out_with_the_reason() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (2 + self.weight)

    workload = from_example(nn.Sequential(nn.Linear(8, 16), OddRMSNorm()), torch.randn(3, 8))
    found = step_by_id("replace_norm").find(context(workload, GPU))
    assert not found.sites and "OddRMSNorm" in found.note


def test_gated_mlp_is_replaced_also_after_fusion() -> None:
    workload = llama()
    assert not step_by_id("replace_activation").find(context(workload)).sites
    made = applied(workload, "replace_activation", context(workload, GPU))
    assert isinstance(made.model.layers[0].mlp, ours.GatedMLP)
    fuse, swap = step_by_id("fuse_gate_up"), step_by_id("replace_activation")
    kept = AppliedSteps().plus(fuse, fuse.find(context(workload)).params)
    where = StepContext(workload, GPU, model=build(workload.model, kept))
    both = build(workload.model, kept.plus(swap, swap.find(where).params))
    assert not failures(Gate.prepare(workload).check(both))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_a_measured_kernel_makes_the_gated_product_in_the_gemm(
    activation: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wavecrest.nn import gated_mlp
    from wavecrest.ops.common import triton as _triton

    if kernel and not _triton.interpreted:
        pytest.skip("the kernel runs on a CPU in Triton's interpreter alone")
    workload = llama(hidden_act=activation)
    steps = AppliedSteps()
    for step_id in ("fuse_gate_up", "replace_activation"):
        step = step_by_id(step_id)
        found = step.find(StepContext(workload, GPU, model=build(workload.model, steps)))
        steps = steps.plus(step, found.params)
    made, seen = build(workload.model, steps), []
    real = gated_mlp.linear
    monkeypatch.setattr(gated_mlp, "linear", lambda *args, **kw: seen.append(kw["activation"]) or real(*args, **kw))
    ops.get("gemm").force("triton" if kernel else None)
    with torch.no_grad():
        answer = workload.run(next(iter(workload.buckets)), made).logits
        assert seen == (2 * [f"{made.model.layers[0].mlp.activation}_and_mul"] if kernel else [])
    ops.get("gemm").force(None)
    assert torch.allclose(answer, workload.run(next(iter(workload.buckets))).logits, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_mlp_knows_its_activations(activation: str) -> None:
    from transformers.activations import ACT2FN

    module = nn.Module()
    module.gate_proj, module.up_proj, module.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
    module.act_fn = ACT2FN[activation]
    module.forward = lambda x: module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    made = ours.GatedMLP.from_module(module)
    x = torch.randn(5, 8)
    torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)
    module.forward = lambda x: module.down_proj(module.act_fn(module.up_proj(x)) * module.gate_proj(x))
    with pytest.raises(StepRefused, match="something else"):
        ours.GatedMLP.from_module(module)
    module.act_fn = nn.Tanh()
    with pytest.raises(StepRefused, match="is not one of"):
        ours.GatedMLP.from_module(module)


def test_precision_only_when_asked_and_held_to_its_own_limits() -> None:
    torch.manual_seed(0)
    workload = from_example(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(8, 64))
    step = step_by_id("precision:bf16")
    assert "not asked for" in step.find(context(workload)).note
    found = step.find(context(workload, precision="bf16"))
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    # the float32 gate stops it, the gate of the precision that was asked for lets it pass
    assert failures(Gate.prepare(workload).check(made))
    assert not failures(Gate.prepare(workload, dtype="bfloat16").check(made))
    assert "GPUs only" in step_by_id("precision:tf32").find(context(workload, precision="tf32")).note


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    import threading

    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    with pytest.raises(StepRefused, match="cannot be copied"):
        structural_copy(model)


def test_a_structural_copy_shares_tensors_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.table = torch.arange(5)
    model.settings = {"depth": [1, 2]}
    copied = structural_copy(model)
    assert copied[0].weight is model[0].weight and copied[1].running_mean is model[1].running_mean
    assert copied.table is model.table
    copied.settings["depth"].append(3)
    copied[0] = nn.Identity()
    assert model.settings == {"depth": [1, 2]} and isinstance(model[0], nn.Linear)
