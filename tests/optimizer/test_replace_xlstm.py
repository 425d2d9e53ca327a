"""transformers' xLSTM over wavecrest's layers: the same answers, sites and refusals, one graph, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.xlstm_harness import native, tokens
from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import from_example
from wavecrest.models.xlstm.transformers import is_patched, patch_transformers_xlstm
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy

STEP = step_by_id("replace_xlstm")
IDS = tokens(2, 37)
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")


def find(model: nn.Module) -> Found:
    context = StepContext(from_example(model, {"input_ids": IDS}), hardware.cpu(), model=structural_copy(model))
    return STEP.find(context)


def applied(model: nn.Module, found: Found) -> Any:
    return build(model, AppliedSteps().plus(STEP, found.params))


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(IDS, **options).logits
    return made


def test_the_answers_and_the_state_dict_stay() -> None:
    model = native()
    found = find(model)
    assert found.sites == ("backbone",)
    made = applied(model, found)
    torch.testing.assert_close(logits(made), logits(model), rtol=1e-4, atol=1e-4)
    assert made.state_dict().keys() == model.state_dict().keys()
    assert is_patched(made.backbone) and not is_patched(model.backbone)
    assert made.backbone.blocks[0].mlstm_layer.q.weight is model.backbone.blocks[0].mlstm_layer.q.weight


def test_a_backbone_alone_is_a_site() -> None:
    model = native().backbone
    found = find(model)
    assert found.sites == ("",)
    with torch.no_grad():
        wanted, got = model(IDS).last_hidden_state, applied(model, found)(IDS).last_hidden_state
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_it_is_one_graph() -> None:
    model = native()
    made = applied(model, find(model))
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, use_cache=False), logits(made, use_cache=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["class", "hook", "forward", "class inside"])
def test_parts_that_compute_something_else_are_refused(change: str) -> None:
    model = native()
    part = model.backbone.blocks[1].ffn
    if change == "class":

        class Doubled(type(part)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                made: Tensor = 2 * super().forward(x)
                return made

        part.__class__ = Doubled
    elif change == "forward":
        part.forward = lambda x: 2 * x
    elif change == "class inside":
        part.proj_up.__class__ = type("Odd", (nn.Linear,), {"__module__": "elsewhere"})
    else:
        part.register_forward_hook(lambda _module, _args, output: 2 * output)
    with pytest.raises(StepRefused, match=r"ffn(.proj_up)? in a block of backbone"):
        find(model)
    with pytest.raises(StepRefused, match=r"ffn(.proj_up)? in a block of backbone"):
        STEP.apply(structural_copy(model), {"sites": ["backbone"]})


@pytest.mark.parametrize("other", ["replace_norm", "fuse_parallel"])
def test_it_goes_before_steps_that_change_its_layers(other: str) -> None:
    """Behind them it is refused, and they take what it makes."""
    model = native()
    step, found = step_by_id(other), find(model)
    assert STEP.id in step.tried_after
    workload = from_example(model, {"input_ids": IDS, "use_cache": False})
    changed = step.find(StepContext(workload, GPU, model=structural_copy(model)))
    behind = build(model, AppliedSteps().plus(step, changed.params))
    with pytest.raises(StepRefused, match="is not transformers' own"):
        STEP.find(StepContext(workload, GPU, model=behind))
    made = build(model, AppliedSteps().plus(STEP, found.params))
    later = step.find(StepContext(workload, GPU, model=structural_copy(made)))
    if later.sites:
        both = build(model, AppliedSteps().plus(STEP, found.params).plus(step, later.params))
        torch.testing.assert_close(logits(both), logits(model), rtol=1e-4, atol=1e-4)


def test_other_models_have_no_sites() -> None:
    found = find(nn.Sequential(nn.Linear(4, 4)))
    assert not found.sites and found.note == "no xLSTM of transformers in the model"
    found = find(patch_transformers_xlstm(native()))
    assert not found.sites and found.note == "its xLSTM layers are wavecrest's already"


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(StepRefused, match="patch_transformers_xlstm takes transformers' xLSTMModel"):
        STEP.apply(nn.Sequential(nn.Linear(4, 4)), {"sites": ["0"]})
