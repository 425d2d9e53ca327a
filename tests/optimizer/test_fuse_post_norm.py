"""Residual additions of BERT and its kin in the GEMMs before them: which modules, which backend, what answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from tests.optimizer.test_replace_rotary import context
from wavecrest import hardware, records
from wavecrest.errors import StepRefused
from wavecrest.graphs.activations import name_of
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import linear as linears
from wavecrest.nn import residual_output
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, gemm_choices, step_by_id, structural_copy

STEP = step_by_id("fuse_post_norm")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50,
}  # fmt: skip


def bert(kind: str = "Bert") -> Workload:
    torch.manual_seed(0)
    config, model = {"Bert": (BertConfig, BertModel), "Roberta": (RobertaConfig, RobertaModel)}[kind]
    made = model(config(**SIZES), add_pooling_layer=False).eval()
    return from_example(made, {"input_ids": torch.randint(3, 50, (2, 9))})


@pytest.fixture(autouse=True)
def torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call with a residual is faster on one backend that a CPU has too."""

    def choices(calls: Any, _device: str) -> gemm_choices.Choices:
        taken = {name_of(call): "torch" for call in calls if call.residual is not None}
        return gemm_choices.Choices(taken, 0.2, {})

    monkeypatch.setattr("wavecrest.optimizer.steps.fuse_post_norm.choices", choices)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The backend of each call of gemm that names one, and whether it adds."""
    seen: list[tuple[str, bool]] = []
    real = linears._run_on

    def run_on(call: Any, backend: str) -> Tensor:
        seen.append((backend, call.residual is not None))
        return real(call, backend)

    monkeypatch.setattr(linears, "_run_on", run_on)
    return seen


def fused(work: Workload, *before: str) -> nn.Module:
    steps = AppliedSteps()
    for step_id in (*before, STEP.id):
        step = step_by_id(step_id)
        found = step.find(context(work, build(work.model, steps)))
        assert found.sites, found.note
        steps = steps.plus(step, found.params)
    return build(work.model, steps)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_each_output_adds_in_its_gemm(kind: str, backends: list[tuple[str, bool]]) -> None:
    work = bert(kind)
    made = fused(work)
    assert not failures(Gate.prepare(work, seed=0).check(made))
    backends.clear()
    answer = work.run("default", made).last_hidden_state
    assert torch.allclose(answer, work.run("default").last_hidden_state, atol=1e-5)
    # of attention and of the MLP of two layers
    assert backends == [("torch", True)] * 4
    output = made.encoder.layer[0].output
    assert type(output) is not type(work.model.encoder.layer[0].output)
    assert type(output).__name__ == type(work.model.encoder.layer[0].output).__name__
    assert made.state_dict().keys() == work.model.state_dict().keys()


def test_behind_norms(backends: list[tuple[str, bool]]) -> None:
    work = bert()
    made = fused(work, "replace_norm")
    backends.clear()
    assert torch.allclose(work.run("default", made).last_hidden_state, work.run("default").last_hidden_state, atol=1e-5)
    assert backends == [("torch", True)] * 4


def test_in_training_and_where_a_compiler_adds_the_models_own_code_runs(backends: list[tuple[str, bool]]) -> None:
    work = bert()
    made = fused(work)
    seen: list[Tensor] = []
    backends.clear()
    made.train()
    work.run("default", made)
    made.eval()
    for layer in made.encoder.layer:
        # dropout at inference, and a hook that came later, which sees the layer's own result
        layer.attention.output.dropout.train()
        layer.output.dense.register_forward_hook(lambda module, args, result: seen.append(result))
    work.run("default", made)
    assert len(seen) == 2
    for layer in made.encoder.layer:
        layer.attention.output.dropout.eval()
        layer.output.dense._forward_hooks.clear()
    with torch.autocast("cpu", torch.bfloat16):
        work.run("default", made)
    with torch.no_grad():
        example = next(iter(work.buckets.values()))
        example.call(torch.compile(made, backend="eager", fullgraph=True))
    assert not backends


class Other(nn.Module):
    """Like an output of BERT, but that it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states * input_tensor)
        return hidden_states


def test_what_is_left_alone() -> None:
    output = bert().model.encoder.layer[0].output
    assert residual_output.refusal(output) == ""
    assert residual_output.refusal(Other()) == "Other computes something else"
    output.dropout.register_forward_hook(lambda *_: None)
    assert "the dropout of BertOutput has hooks" in residual_output.refusal(output)
    output = bert().model.encoder.layer[0].output
    output.dense = nn.Sequential(output.dense)
    assert "is a Sequential" in residual_output.refusal(output)
    with pytest.raises(StepRefused, match="is a Sequential"):
        residual_output.adopt(output, "torch")
    work = bert()
    found = STEP.find(StepContext(work, hardware.cpu(), model=structural_copy(work.model)))
    assert not found.sites and "on the CPU" in found.note
    with pytest.raises(StepRefused, match="gemm has no backend nothing"):
        STEP.apply(work.model, {"outputs": [{"site": "encoder.layer.0.output", "backend": "nothing"}]})


def test_the_hope_is_that_elementwise_work_goes_and_the_prediction_what_calls_saved() -> None:
    work = bert()
    one = context(work)
    one.profile = [
        records.BucketProfile.model_construct(
            bucket="default", wall_ms=1.0, kernel_ms=1.0, idle_ms=0.0, launches=40, ops=[],
            categories=[
                records.CategoryTime.model_construct(category="elementwise", ms=0.2, share=0.2),
                records.CategoryTime.model_construct(category="gemm", ms=0.5, share=0.5),
            ],
        )
    ]  # fmt: skip
    assert STEP.looks_long(one.device) and not STEP.looks_long(hardware.cpu())
    assert STEP.hope(one).ratio == pytest.approx(1 / (1 - 0.18))
    found = STEP.find(one)
    predicted = STEP.predict(found, one)
    assert predicted.ratio == pytest.approx(1 / (1 - 0.2 * 0.5)) and "4 of 4 modules add on torch" in predicted.basis
