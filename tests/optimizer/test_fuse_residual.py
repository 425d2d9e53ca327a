"""Residual additions in the GEMMs before them: which layers, by what proof, and what stays as it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.test_replace_rotary import context, workload
from wavecrest import records
from wavecrest.errors import StepRefused, Unsupported
from wavecrest.nn import linear as linears
from wavecrest.nn import residual_layer
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id

STEP = step_by_id("fuse_residual")


def fused(work: Any, *before: str) -> nn.Module:
    steps = AppliedSteps()
    for step_id in (*before, "fuse_residual"):
        step = step_by_id(step_id)
        found = step.find(context(work, build(work.model, steps)))
        assert found.sites, found.note
        steps = steps.plus(step, found.params)
    return build(work.model, steps)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of `ops.linear` has a residual."""
    seen: list[bool] = []
    real = linears.linear

    def linear(*args: Any, residual: Any = None, **kwargs: Any) -> Any:
        seen.append(residual is not None)
        return real(*args, residual=residual, **kwargs)

    monkeypatch.setattr(linears, "linear", linear)
    return seen


@pytest.mark.parametrize(
    ("name", "additions"), [("Llama", 4), ("Qwen2", 4), ("Qwen3", 4), ("Mistral", 4), ("Mixtral", 2)]
)
def test_a_models_layers_add_in_their_gemms(name: str, additions: int, added: list[bool]) -> None:
    work = workload(name)
    made = fused(work)
    added.clear()
    assert not failures(Gate.prepare(work, seed=0).check(made))
    added.clear()
    answer = work.run("default", made).logits
    assert torch.allclose(answer, work.run("default").logits, atol=1e-5)
    assert sum(added) == additions
    # the model's own layers stay, with the same names of classes and of parameters
    assert type(made.model.layers[0]) is not type(work.model.model.layers[0])
    assert type(made.model.layers[0]).__name__ == type(work.model.model.layers[0]).__name__
    assert made.state_dict().keys() == work.model.state_dict().keys()


def test_it_works_behind_other_steps(added: list[bool]) -> None:
    work = workload("Llama")
    made = fused(work, "fuse_qkv", "fuse_gate_up", "replace_norm", "replace_activation", "replace_rotary")
    added.clear()
    assert torch.allclose(work.run("default", made).logits, work.run("default").logits, atol=1e-5)
    assert sum(added) == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma2", "Gemma2DecoderLayer is no attention and MLP"),
        ("Granite", "GraniteDecoderLayer computes something else: hidden_states = residual + hidden_states *"),
        ("Cohere", "CohereDecoderLayer is no attention and MLP"),
        ("GPTNeoX", "no layer of attention and MLP"),
    ],
)
def test_other_layers_are_left_with_the_reason(name: str, reason: str) -> None:
    found = STEP.find(context(workload(name)))
    assert not found.sites and reason in found.note


def test_a_layer_with_a_hook_is_left() -> None:
    work = workload("Llama")
    work.model.model.layers[0].register_forward_hook(lambda *_: None)
    found = STEP.find(context(work))
    assert found.sites == ("model.layers.1",) and "it has hooks" in found.note
    with pytest.raises(StepRefused, match="it has hooks"):
        residual_layer.adopt(work.model.model.layers[0])


def test_a_result_that_a_hook_changes_is_an_error() -> None:
    work = workload("Llama")
    made = fused(work)
    made.model.layers[1].self_attn.o_proj.register_forward_hook(lambda _module, _args, result: 2 * result)
    with pytest.raises(Unsupported, match="leave the step fuse_residual out"):
        work.run("default", made)


def test_the_residual_of_another_dtype_is_added_behind(added: list[bool]) -> None:
    work = workload("Llama")
    layer = fused(work).model.layers[0].double()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    held = residual_layer._added(layer.mlp.down_proj, x.float(), lambda: layer.mlp(x))
    assert torch.equal(held, x.float() + layer.mlp(x)) and not any(added)


def test_arguments_by_place_are_passed_by_name() -> None:
    work = workload("Llama")
    layer, made = work.model.model.layers[0], fused(work).model.layers[0]
    x, positions = torch.randn(2, 7, 32), torch.arange(7)[None]
    tables = work.model.model.rotary_emb(x, positions)
    mask = torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    assert torch.allclose(
        made(x, mask, position_embeddings=tables), layer(x, mask, position_embeddings=tables), atol=1e-6
    )
    with pytest.raises(TypeError, match="too many positional arguments"):
        made(x, mask, None, None, False, tables, None)


def test_threads_keep_their_residuals_apart() -> None:
    work = workload("Llama")
    made = fused(work)
    tokens = [torch.randint(1, 64, (1, 9)) for _ in range(4)]
    with torch.no_grad():
        wanted = [made(one).logits for one in tokens]
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(made(tokens[number]).logits, wanted[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_a_compiler_gets_one_graph() -> None:
    work = workload("Llama")
    made = fused(work)
    with torch.no_grad():
        compiled = torch.compile(made.model.layers[0].mlp, backend="eager", fullgraph=True)
        x = torch.randn(2, 3, 32)
        assert torch.allclose(compiled(x), made.model.layers[0].mlp(x), atol=1e-6)
        whole, tokens = torch.compile(made, backend="eager"), torch.ones(1, 4, dtype=torch.long)
        assert torch.allclose(whole(tokens).logits, made(tokens).logits, atol=1e-5)


def test_the_prediction_counts_additions_of_equal_shapes() -> None:
    work = workload("Llama")
    bucket = records.BucketProfile.model_construct(
        bucket="default", wall_ms=1.0, kernel_ms=1.0, idle_ms=0.0, launches=40, categories=[],
        ops=[
            records.OpTime.model_construct(name="aten::add", shapes="1x7x32, 1x7x32 bfloat16", share=0.2, calls=4),
            records.OpTime.model_construct(name="aten::add", shapes="1x7x1, scalar float32", share=0.3, calls=4),
        ],
    )  # fmt: skip
    one = context(work)
    one.profile = [bucket]
    found = STEP.find(one)
    predicted = STEP.predict(found, one)
    assert predicted.ratio == pytest.approx(1 / (1 - 0.18)) and "20.0% of the time" in predicted.basis
