"""Masks of transformers models under tracing: those that eager does without are not written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.graphs import masks
from wavecrest.graphs.capture import CapturedModule
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure.workload import Buckets, from_example
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id

transformers = pytest.importorskip("transformers")
B, S = 2, 24
SIZES: dict[str, int] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def encoder(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES, **options)).eval()


def decoder(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).eval()


def tokens() -> Tensor:
    return torch.arange(B * S).reshape(B, S) % 64


def padding(hidden: int) -> Tensor:
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, S - hidden :] = 0
    return mask


def traced_masks(model: nn.Module, **kwargs: Any) -> list[tuple[int, ...] | None]:
    """The shape of the mask of each SDPA call in the graphs that Dynamo makes of one call."""
    seen: list[tuple[int, ...] | None] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is torch._C._nn.scaled_dot_product_attention:
                mask = node.kwargs.get("attn_mask")
                seen.append(None if mask is None else tuple(mask.meta["example_value"].shape))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda: model(**kwargs), backend=backend, dynamic=False)()
    assert seen
    return seen


@pytest.mark.parametrize("make", [encoder, decoder])
def test_no_mask_is_traced_without_padding(make: Callable[[], Any]) -> None:
    model = make()
    masks.use(model, [""])
    assert traced_masks(model, input_ids=tokens()) == [None]


def test_padding_of_an_encoder_is_traced_as_one_row() -> None:
    model = encoder()
    assert traced_masks(model, input_ids=tokens(), attention_mask=padding(5)) == [(B, 1, S, S)]
    masks.use(model, [""])
    assert traced_masks(model, input_ids=tokens(), attention_mask=padding(5)) == [(B, 1, 1, S)]


def test_other_masks_are_those_of_transformers() -> None:
    padded, window = (
        decoder(),
        transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    )
    for model in (padded, window.eval()):
        masks.use(model, [""])
        given = padding(5) if model is padded else None
        assert traced_masks(model, input_ids=tokens(), attention_mask=given)[0] not in (None, (B, 1, 1, S))


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("make", [encoder, decoder])
def test_answers_stay(make: Callable[[], Any], hidden: int) -> None:
    original, changed = make(), make()
    masks.use(changed, masks.owners(changed))
    with torch.no_grad():
        for mask in (None, padding(hidden)):
            expected = original(tokens(), attention_mask=mask)[0]
            compiled = torch.compile(changed, backend="aot_eager", dynamic=False)
            torch.testing.assert_close(compiled(tokens(), attention_mask=mask)[0], expected, rtol=1e-5, atol=1e-5)


def test_owners_are_the_outermost_models_on_sdpa() -> None:
    assert masks.owners(encoder()) == [""]
    assert masks.owners(nn.Sequential(encoder(), nn.Linear(2, 2))) == ["0"]
    assert masks.owners(encoder(attn_implementation="eager")) == []
    assert masks.owners(nn.Linear(2, 2)) == []


def test_an_implementation_set_since_stays() -> None:
    model = encoder(attn_implementation="eager")
    masks.use(model, [""])
    assert model.config._attn_implementation == "eager"


PADDING = masks.Padding("attention_mask", 1)


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    ids, full = tokens(), padding(0)
    assert masks.without_full_mask((ids, full, 3), {}, PADDING) == ((ids, None, 3), {})
    assert masks.without_full_mask((ids,), {"attention_mask": full.bool()}, PADDING) == (
        (ids,),
        {"attention_mask": None},
    )


@pytest.mark.parametrize(
    "mask", [padding(1), None, torch.ones(B, 1, S, S, dtype=torch.bool), torch.zeros(B, S), 3], ids=str
)
def test_other_arguments_stay(mask: Any) -> None:
    _args, kwargs = masks.without_full_mask((tokens(),), {"attention_mask": mask}, PADDING)
    assert kwargs["attention_mask"] is mask


def test_the_place_of_the_padding_mask() -> None:
    assert masks.padding_argument(encoder()) == PADDING
    assert masks.padding_argument(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("hidden", [0, 5])
def test_the_compile_step_carries_it(hidden: int) -> None:
    example = {"input_ids": tokens(), "attention_mask": padding(0)}
    workload = from_example(encoder(), Buckets(b2=example))
    step = step_by_id("compile:default")
    found = step.find(StepContext(workload, hardware.cpu()))
    assert found.params == {"preset": "default", "masks": [""], "padding": "attention_mask"}
    assert step.check_params(found.params) == [""]
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    assert type(made) is type(workload.model) and made.config._attn_implementation == masks.NAME
    assert workload.model.config._attn_implementation == masks.SDPA
    with strict_compilation(graphs=8), torch.no_grad():
        expected = workload.model(tokens(), attention_mask=padding(hidden))[0]
        torch.testing.assert_close(made(tokens(), attention_mask=padding(hidden))[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_encoder_has_a_graph_with_and_one_without_padding() -> None:
    model = encoder().half().cuda()
    masks.use(model, [""])
    captured = CapturedModule(model, padding=masks.padding_argument(model))
    ids = tokens().cuda()
    with torch.no_grad():
        for hidden in (0, 5, 0):
            mask = padding(hidden).cuda()
            expected = model(ids, attention_mask=mask)[0]
            torch.testing.assert_close(captured(ids, attention_mask=mask)[0], expected, rtol=1e-2, atol=1e-2)
    assert len(captured._graphs) == 2 and captured.eager_calls == 0


class Stack(nn.Module):
    """A part of a transformers model with a configuration of its own."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": masks.SDPA})()
        self.fixed = fixed

    def set_attn_implementation(self, name: str) -> None:
        if not self.fixed:
            self.config._attn_implementation = name


def test_models_inside_are_set_too() -> None:
    """transformers 5.17 sets the outer model of a T5 and leaves its stacks: no step could be tried on one."""
    model = Stack()
    model.encoder, model.decoder = Stack(), Stack()
    masks.set_implementation(model, "other")
    assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {"other"}
    model.encoder.fixed = True
    with pytest.raises(StepRefused, match="attention implementation of Stack cannot be set"):
        masks.set_implementation(model, masks.NAME)


def test_a_position_bias_is_laid_out_as_fused_kernels_take_it() -> None:
    """T5's is permuted, so that its keys are H apart: SDPA then takes the math path."""
    seen: list[Tensor] = []
    layer = nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    bias = torch.randn(6, 6, 4).permute(2, 0, 1)[None]

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                seen.append(kwargs["attn_mask"])
            return func(*args, **(kwargs or {}))

    assert bias.stride(-1) == 4
    with Watch():
        got, _ = masks.attend(layer, q, k, v, None, position_bias=bias)
    want = torch.softmax(q @ k.mT / 8**0.5 + bias, -1) @ v
    assert seen[0].stride(-1) == 1 and torch.equal(seen[0], bias)
    torch.testing.assert_close(got.transpose(1, 2), want)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_without_a_cache_needs_no_mask(kind: str) -> None:
    """Sequences packed into one row show in the values of positions alone, which a traced model cannot read."""
    model = decoder()
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
        ).eval()
    assert traced_masks(model, input_ids=tokens(), use_cache=False) == [(B, 1, S, S)]
    masks.use(model, masks.owners(model))
    masks.use(model, masks.owners(model))
    assert traced_masks(model, input_ids=tokens(), use_cache=False) == [None]
    # positions that the caller gives may start anew
    packed = torch.cat([torch.arange(10), torch.arange(S - 10)])[None].expand(B, S)
    assert traced_masks(model, input_ids=tokens(), position_ids=packed, use_cache=False) == [(B, 1, S, S)]
    assert not masks._counted
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=tokens() + 64, use_cache=False)
    # other models of the process are left alone behind a call that raised
    assert not masks._counted
    own = copy.deepcopy(model)
    for part in own.modules():
        part._forward_pre_hooks.clear()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for given in ({}, {"position_ids": packed}, {}, {"attention_mask": padding(3)}):
            want = own(input_ids=tokens(), use_cache=False, **given).logits
            torch.testing.assert_close(compiled(input_ids=tokens(), use_cache=False, **given).logits, want)


def test_a_model_without_masks_imports_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fresh process of a proof compiles the model, and the import takes seconds."""
    monkeypatch.setattr(masks, "register", lambda: pytest.fail("imports transformers"))
    masks.use(torch.nn.Linear(4, 4), [])
