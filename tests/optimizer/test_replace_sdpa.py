"""Calls of PyTorch's attention in plain modules over to ours: PyTorch's meaning, and only the calls that are meant."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import attention as ours
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps import replace_attention as step_module
from wavecrest.optimizer.steps.attention import check_causal

OP = "flash_attention"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    """Heads of 8 columns, with a causal mask or one of a window."""

    def __init__(self, width: int = 32, window: int | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (one.view(b, s, w // 8, 8).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.window is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            i = torch.arange(s, device=x.device)
            mask = (i[:, None] >= i) & (i[:, None] - i < self.window)
            y = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, scale=0.5)
        return self.out(y.transpose(1, 2).reshape(b, s, w))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention(window=3)
        self.other = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.first(x))
        return x + self.other(x, x, x, need_weights=False)[0]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Everything is made there, where there is one."""
    with torch.device(DEVICE) if DEVICE != "cpu" else contextlib.nullcontext():
        yield


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def parts(queries: int = 6, keys: int = 6, heads: int = 4, kv_heads: int = 4, **more: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    shapes = (2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 12)
    return tuple(torch.randn(shape, **more) for shape in shapes)


def _visible() -> Tensor:
    # one query sees nothing
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1, :, 2] = False
    return mask


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "lengths": ({"queries": 3, "keys": 9}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal with more keys": ({"queries": 3, "keys": 9}, {"is_causal": True}),
    "causal with one query": ({"queries": 1, "keys": 9}, {"is_causal": True}),
    "bool": ({}, {"attn_mask": _visible()}),
    "added": ({}, {"attn_mask": torch.linspace(-2, 2, 36).view(6, 6)}),
    "scale": ({}, {"scale": 0.9}),
    "shared heads": ({"kv_heads": 2}, {"enable_gqa": True, "is_causal": True}),
}


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="runs the kernel")
        registry.get(OP).force("triton")
    return str(request.param)


@pytest.mark.parametrize("name", CALLS)
def test_pytorchs_meaning(name: str, backend: str) -> None:
    sizes, options = CALLS[name]
    options = {key: one.to(DEVICE) if isinstance(one, Tensor) else one for key, one in options.items()}
    q, k, v = parts(**sizes)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    with warnings.catch_warnings(), ours.watching() as calls, ours.RouteSDPA():
        warnings.simplefilter("error", ours.AttentionFallback)
        got = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got.transpose(1, 2).is_contiguous()
    (call,) = calls
    assert call.decision is not None and call.decision.backend == backend
    assert (call.queries, call.module) == (q.shape[2], "scaled_dot_product_attention")


LEFT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dropout": (parts, {"dropout_p": 1e-9}, "dropout without the seed"),
    "three dimensions": (lambda: tuple(one[:, 0] for one in parts()), {}, "not \\[B, H, S, D\\]"),
    "more queries than keys": (lambda: parts(9, 4), {"is_causal": True}, "upper left"),
    "one sequence for all": (lambda: (parts()[0], parts()[1][:1], parts()[2][:1]), {}, "broadcast"),
    "head_dim": (lambda: (torch.ones(1, 1, 2, 300),) * 3, {}, "head_dim of 300"),
    "negative scale": (parts, {"scale": -1.0}, "scale of -1.0"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_warned", set())
    make, options, reason = LEFT[name]
    given = make()
    with pytest.warns(ours.AttentionFallback, match=reason), ours.watching() as calls, ours.RouteSDPA():
        got = F.scaled_dot_product_attention(*given, **options)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*given, **options), rtol=1e-5, atol=1e-5)
    assert calls[0].decision is None and calls[0].reason
    with ours.RouteSDPA(), warnings.catch_warnings():
        # told once
        warnings.simplefilter("error", ours.AttentionFallback)
        F.scaled_dot_product_attention(*given, **options)


def test_errors_are_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_warned", set())
    q, k, v = parts()
    for options in ({"attn_mask": torch.ones(6, 6), "is_causal": True}, {"attn_mask": torch.ones(6, 6).half()}):
        for scope in (torch.no_grad(), ours.RouteSDPA()):
            with scope, warnings.catch_warnings(), pytest.raises(RuntimeError):
                warnings.simplefilter("ignore")
                F.scaled_dot_product_attention(q, k, v, **options)


def test_gradients() -> None:
    leaves = [one.requires_grad_() for one in parts()]
    with ours.watching() as calls, ours.RouteSDPA():
        F.scaled_dot_product_attention(*leaves, is_causal=True).square().sum().backward()
    assert calls[0].decision is not None and calls[0].decision.backend == "torch"
    copies = [one.detach().requires_grad_() for one in leaves]
    F.scaled_dot_product_attention(*copies, is_causal=True).square().sum().backward()
    for leaf, want in zip(leaves, copies, strict=True):
        torch.testing.assert_close(leaf.grad, want.grad, rtol=1e-5, atol=1e-5)


# the step


def context(workload: Workload) -> StepContext:
    return StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))


def test_the_step_where_pytorch_is_the_choice() -> None:
    found = step_by_id("replace_sdpa").find(context(from_example(model(), torch.randn(2, 9, 32))))
    assert not found.sites and found.note.startswith("dispatch chooses no other kernel than PyTorch's: ")
    nothing = step_by_id("replace_sdpa").find(context(from_example(nn.Linear(4, 4), torch.randn(2, 4))))
    assert not nothing.sites and "no module outside of transformers models calls" in nothing.note


def test_the_step_replaces_what_dispatch_gives_to_a_kernel() -> None:
    pytest.importorskip("triton", reason="runs the kernel")
    workload = from_example(model(), torch.randn(2, 9, 32))
    registry.get(OP).force("triton")
    step = step_by_id("replace_sdpa")
    found = step.find(context(workload))
    # each module once, and not what nn.MultiheadAttention does by itself
    assert found.sites == ("first", "second") and found.params["sites"] == ["first", "second"]
    assert [(row["module"], row["backend"]) for row in found.params["routes"]] == [
        ("first", "triton"), ("second", "triton")
    ]  # fmt: skip
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    x = torch.randn(2, 9, 32)
    with torch.no_grad(), ours.watching() as calls:
        torch.testing.assert_close(made(x), workload.model(x), rtol=1e-5, atol=1e-5)
        # the original makes its own calls still
        assert len(calls) == 2
    gate = Gate.prepare(workload)
    assert not failures(gate.check(made)) and "one at a time" in gate.summary.not_run["concurrent"]
    check_causal(workload.model, made, list(workload.buckets.values()))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in workload.model.modules())


def test_one_kind_of_call_is_enough_for_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose calls all run PyTorch's kernel stays as it is."""
    workload, real = from_example(model(), torch.randn(2, 9, 32)), step_module._row
    monkeypatch.setattr(
        step_module, "_row", lambda call: real(call) | {"backend": "triton" if call.decision.key[12] else "torch"}
    )
    found = step_by_id("replace_sdpa").find(context(workload))
    # the one with a mask that is written out
    assert found.sites == ("second",)


def test_the_gate_sees_another_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = from_example(model(), torch.randn(2, 9, 32))
    gate = Gate.prepare(workload)
    wrong = build(workload.model, AppliedSteps().plus(step_by_id("replace_sdpa"), {"sites": ["first"]}))
    assert not failures(gate.check(wrong))
    real = ours._flash_attention
    monkeypatch.setattr(ours, "_flash_attention", lambda call: real(call._replace(causal=False)))
    assert failures(gate.check(wrong))


def test_transformers_models_have_a_step_of_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=16
    )
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    found = step_by_id("replace_sdpa").find(context(from_example(made, {"input_ids": torch.ones(1, 4).long()})))
    assert not found.sites and "no module outside of transformers models" in found.note


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    torch._dynamo.reset()
    base = model()
    base.other = nn.Identity()  # type: ignore[assignment]
    base.forward = lambda x: x + base.second(base.first(x))  # type: ignore[method-assign]
    routed = structural_copy(base)
    routed.forward = lambda x: x + routed.second(routed.first(x))  # type: ignore[method-assign]
    step_by_id("replace_sdpa").apply(routed, {"sites": ["first", "second"]})
    compiled = torch.compile(routed, fullgraph=True, dynamic=dynamic, backend="eager")
    registry.get(OP).forget()
    with torch.no_grad():
        for length in (9, 10):
            x = torch.randn(2, length, 32)
            torch.testing.assert_close(compiled(x), base(x), rtol=1e-5, atol=1e-5)
    # decided while tracing, so it was the op that was traced
    assert any(calls == 0 for _, calls in registry.get(OP).decisions())
