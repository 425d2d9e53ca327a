"""Experts of transformers' sparse models over the op: the same answers, sites and refusals, replay, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import Experts
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy

transformers = pytest.importorskip("transformers")

STEP = step_by_id("replace_moe")
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
# name of the model, and the options of its configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", LOCAL),
    "qwen2_moe": ("Qwen2Moe", SPARSE | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", SPARSE | {"norm_topk_prob": True}),
    "qwen3_moe gelu": ("Qwen3Moe", SPARSE | {"hidden_act": "gelu_pytorch_tanh"}),
    "gpt_oss": ("GptOss", LOCAL | {"layer_types": ["full_attention"] * 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        },
    ),
}  # fmt: skip


def model_of(kind: str, implementation: str = "grouped_mm") -> nn.Module:
    name, options = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**(SIZES | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation(implementation)
    for parameter in model.parameters():
        # no expert is like another, and no bias is zero
        nn.init.normal_(parameter, std=0.2)
    made: nn.Module = model
    return made


IDS = torch.arange(14).view(2, 7) % 61


def workload_of(model: nn.Module) -> Workload:
    return from_example(model, {"input_ids": IDS})


def find(model: nn.Module, device: Any = GPU) -> Found:
    return STEP.find(StepContext(workload_of(model), device, model=structural_copy(model)))


def applied(model: nn.Module, found: Found) -> nn.Module:
    return build(model, AppliedSteps().plus(STEP, found.params))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(IDS).logits
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_published_models_give_the_same_answers(kind: str) -> None:
    model = model_of(kind, "eager" if kind == "mixtral" else "grouped_mm")
    expected, kept = logits(model), model.state_dict().keys()
    found = find(model)
    # DeepSeek's first layer is dense
    assert len(found.sites) == (1 if kind == "deepseek_v3" else 2) and not found.note
    made = applied(model, found)
    ours = [one for one in made.modules() if isinstance(one, Experts)]
    assert len(ours) == len(found.sites) and not any(isinstance(one, Experts) for one in model.modules())
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-4)
    assert made.state_dict().keys() == kept
    assert all(one.gate_up_proj is model.get_submodule(site).gate_up_proj
               for one, site in zip(ours, found.sites, strict=True))  # fmt: skip


def test_compiled_it_is_one_graph() -> None:
    model = model_of("qwen3_moe")
    made = applied(model, find(model))
    block = made.model.layers[0].mlp  # type: ignore[union-attr]
    x = torch.randn(2, 5, 32)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="eager")  # type: ignore[call-overload]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)  # type: ignore[operator]


def test_gradients_flow() -> None:
    model = model_of("gpt_oss")
    made = applied(model, find(model))
    made(IDS).logits.square().mean().backward()
    experts = made.model.layers[0].mlp.experts  # type: ignore[union-attr]
    for name, parameter in experts.named_parameters():  # type: ignore[union-attr, operator]
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_on_a_cpu_nothing_changes() -> None:
    found = find(model_of("mixtral"), hardware.cpu())
    assert not found.sites and "on the CPU" in found.note


def test_a_dense_model_has_no_sites() -> None:
    found = find(nn.Sequential(nn.Linear(4, 4)))
    assert not found.sites and found.note == "no experts with stacked weights in the model"


def test_experts_of_ours_stay() -> None:
    model = model_of("gpt_oss")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.experts = Experts.from_module(layer.mlp.experts)  # type: ignore[union-attr, arg-type]
    found = find(model)
    assert not found.sites and found.note == "its experts are wavecrest's already"


def _experts(model: nn.Module) -> Any:
    return model.model.layers[0].mlp.experts  # type: ignore[union-attr]


def _scaled(experts: Any) -> None:
    class Doubled(type(experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Tensor:
            made: Tensor = 2 * super().forward(*args)
            return made

    experts.__class__ = Doubled


def _raising(experts: Any) -> None:
    class Raising(type(experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Tensor:
            raise ValueError("no such probe")

    experts.__class__ = Raising


REFUSALS = {
    "twice the sum": (_scaled, "computes something else than weighted sums of gated MLPs"),
    "raises": (_raising, "raised on a probe: ValueError: no such probe"),
    "a hook": (lambda experts: experts.register_forward_hook(lambda *_: None), "has hooks or a forward of its own"),
    "an activation": (lambda experts: setattr(experts, "act_fn", nn.Tanh()), "the activation Tanh is not silu"),
    "a norm": (lambda experts: setattr(experts, "norm", nn.LayerNorm(4)), "beside weights and biases: norm.bias"),
    "a share": (lambda experts: setattr(experts, "_is_expert_parallel", True), "one device's share of experts"),
    "float64": (lambda experts: experts.double(), "has weights of float64"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_other_experts_are_left_with_a_reason(why: str) -> None:
    change, reason = REFUSALS[why]
    model = model_of("mixtral")
    change(_experts(model))
    found = find(model)
    assert found.sites == ("model.layers.1.mlp.experts",)
    assert found.note.startswith("left out: model.layers.0.mlp.experts: ") and reason in found.note, found.note
    with pytest.raises(StepRefused, match=reason.split(":")[0]):
        Experts.from_module(_experts(model))


def test_a_wrong_limit_shows_on_the_probe() -> None:
    """gpt-oss' limit of 7 is reached by few values: the probe must reach it."""
    experts = _experts(model_of("gpt_oss"))
    assert Experts.from_module(experts).limit == 7.0

    class Unlimited(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    experts.__class__ = Unlimited
    with pytest.raises(StepRefused, match="computes something else"):
        Experts.from_module(experts)


def test_the_prediction_grows_with_what_falls_away() -> None:
    found = Found(("a",), {"sites": ["a"]})

    class Shares:
        def share(self, *names: str) -> float:
            return {"gemm": 0.5, "elementwise": 0.3}[names[0]]

    predicted = STEP.predict(found, Shares())  # type: ignore[arg-type]
    assert predicted.ratio == pytest.approx(1 / (1 - 0.1 * 0.5 - 0.4 * 0.3))


def test_it_prints_its_sizes() -> None:
    assert repr(Experts.from_module(_experts(model_of("gpt_oss")))) == (
        "Experts([6, 32, 48], swigluoai, interleaved, transposed)"
    )
