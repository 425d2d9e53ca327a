"""Norms inside the GEMMs that read them: which norms, by what proof, and what stays as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.test_replace_rotary import context, workload
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import deferred_norm, gated_mlp
from wavecrest.nn.deferred_norm import DeferredNorm, InOne
from wavecrest.nn.fused_weights import FusedSlice
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id

STEP = step_by_id("fuse_norm")
BEFORE = ("replace_norm", "fuse_qkv", "fuse_gate_up", "replace_activation")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, bool]]:
    """(activation, with a norm) that dispatch was asked for; as if a kernel of wavecrest were the choice of each."""
    seen: list[tuple[str | None, bool]] = []

    def decide(_self: InOne, _x: Any, _weight: Any, _bias: Any, activation: str | None, norm: Any) -> bool:
        seen.append((activation, norm is not None))
        return True

    monkeypatch.setattr(InOne, "_decide", decide)
    return seen


@pytest.fixture
def normed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that norms of wavecrest compute by themselves."""
    seen: list[tuple[int, ...]] = []
    real = DeferredNorm.normed

    def forward(self: DeferredNorm, x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return real(self, x)

    monkeypatch.setattr(DeferredNorm, "normed", forward)
    return seen


def steps_of(work: Workload, *names: str) -> AppliedSteps:
    steps = AppliedSteps()
    for name in names:
        step = step_by_id(name)
        found = step.find(context(work, build(work.model, steps)))
        assert found.sites, (name, found.note)
        steps = steps.plus(step, found.params)
    return steps


def routed(work: Workload, steps: AppliedSteps) -> AppliedSteps:
    """And wide layers on wavecrest's GEMM, as where their weights are packed."""
    model = build(work.model, steps)
    wide = [path for path, one in model.named_modules() if isinstance(one, FusedSlice) and one.first]
    return steps.plus(step_by_id("route_linear"), {"sites": wide})


@pytest.mark.parametrize(("name", "norms"), [("Llama", 4), ("Qwen2", 4), ("Mistral", 4)])
def test_a_models_norms_run_in_their_gemms(name: str, norms: int, chosen: list[Any], normed: list[Any]) -> None:
    work = workload(name)
    steps = routed(work, steps_of(work, *BEFORE))
    found = STEP.find(context(work, build(work.model, steps)))
    assert len(found.sites) == norms and found.note == "1 norms are left as they are"
    made = build(work.model, steps.plus(STEP, found.params))
    assert sum(isinstance(one, DeferredNorm) for one in made.modules()) == norms
    assert not failures(Gate.prepare(work, seed=0).check(made))
    normed.clear()
    before = work.run("default").logits
    assert torch.allclose(work.run("default", made).logits, before, atol=1e-5)
    assert not normed and ("silu_and_mul", True) in chosen
    # parameters keep their names, and are the model's own
    with torch.no_grad():
        made.get_parameter("model.layers.0.input_layernorm.weight").mul_(2)
    after = work.run("default").logits
    assert torch.allclose(work.run("default", made).logits, after, atol=1e-5) and not torch.allclose(before, after)


def test_with_residuals_in_gemms(chosen: list[Any], normed: list[Any]) -> None:
    work = workload("Llama")
    steps = routed(work, steps_of(work, *BEFORE, "fuse_residual"))
    found = STEP.find(context(work, build(work.model, steps)))
    made = build(work.model, steps.plus(STEP, found.params))
    assert len(found.sites) == 4
    assert torch.allclose(work.run("default", made).logits, work.run("default").logits, atol=1e-5) and not normed


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_computes_the_same(how: Any, chosen: list[Any]) -> None:
    work = workload("Llama")
    steps = routed(work, steps_of(work, *BEFORE))
    found = STEP.find(context(work, build(work.model, steps)))
    made = build(work.model, steps.plus(STEP, found.params))
    copied = how(made)
    norm = copied.model.layers[0].input_layernorm
    assert copied.model.layers[0].self_attn.q_proj.fused.norm is norm
    assert torch.equal(work.run("default", copied).logits, work.run("default", made).logits)


def test_where_no_kernel_is_the_choice_the_layer_normalises_before_its_gemm(
    chosen: list[Any], normed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload("Llama")
    steps = routed(work, steps_of(work, *BEFORE))
    found = STEP.find(context(work, build(work.model, steps)))
    made = build(work.model, steps.plus(STEP, found.params))
    for asked in (lambda _activation, _norm: False, lambda activation, norm: activation is not None and norm is None):
        monkeypatch.setattr(
            InOne, "_decide", lambda _s, _x, _w, _b, activation, norm, asked=asked: asked(activation, norm)
        )
        for one in made.modules():
            if isinstance(one, gated_mlp.GatedMLP):
                one._gated, one._normed = InOne(), InOne()
            elif isinstance(one, FusedSlice):
                one.fused._with_norm = InOne()
        normed.clear()
        assert torch.allclose(work.run("default", made).logits, work.run("default").logits, atol=1e-5)
        assert normed == [(2, 7, 32)] * 4
    # nor inside torch.compile, nor where gradients are recorded
    normed.clear()
    compiled = torch.compile(made, backend="eager")
    assert torch.allclose(work.run("default", compiled).logits, work.run("default").logits, atol=1e-5)
    normed.clear()
    made(torch.ones(1, 3, dtype=torch.long))
    assert len(normed) == 4


class Block(nn.Module):
    """A norm, and what reads it."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.w1, self.w3 = nn.Linear(32, 64), nn.Linear(32, 64)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        y = torch.cat((q * k.sum(-1, keepdim=True), v), -1)
        if self.more == "skip":
            y = y + torch.cat((h, h[..., :16]), -1)
        elif self.more == "two layers":
            y = y + (self.w1(h) * self.w3(h))[..., :48]
        elif self.more == "shape":
            y = y * h.shape[-1]
        return y


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("nothing", ""), ("shape", ""),
        ("skip", "answers differ where all but the wide layers get NaN for the norms' results"),
        ("two layers", "no norm is read by one wide layer alone"),
    ],
)  # fmt: skip
def test_who_else_reads_the_norm(more: str, reason: str, chosen: list[Any]) -> None:
    torch.manual_seed(0)
    work = from_example(Block(more).eval(), (torch.randn(2, 5, 32),))
    before = ("replace_norm", "fuse_qkv", "fuse_gate_up") if more == "two layers" else ("replace_norm", "fuse_qkv")
    steps = routed(work, steps_of(work, *before))
    found = STEP.find(context(work, build(work.model, steps)))
    assert (found.note, len(found.sites)) == (reason, 0 if reason else 1)


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Keyword(nn.Module):
    """A norm whose reader gets it by name, or by place."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.named = nn.RMSNorm(32, eps=1e-6), Gated(), named

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.mlp(x=h) if self.named else self.mlp(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", [False, True])
def test_a_reader_that_is_called_by_keyword_is_none(named: bool, chosen: list[Any]) -> None:
    torch.manual_seed(0)
    work = from_example(Keyword(named).eval(), (torch.randn(2, 5, 32),))
    steps = routed(work, steps_of(work, "replace_norm", "fuse_gate_up", "replace_activation"))
    found = STEP.find(context(work, build(work.model, steps)))
    assert len(found.sites) == (0 if named else 1)
    assert found.note == ("no norm is read by one wide layer alone" if named else "")


def test_refusals(chosen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("Llama")
    steps = steps_of(work, "fuse_qkv", "fuse_gate_up")
    model = build(work.model, routed(work, steps))
    assert STEP.find(context(work, model)).note == "the model has no norms of wavecrest (step replace_norm)"
    steps = steps_of(work, *BEFORE)
    # PyTorch's own GEMM has no norm in it
    assert "no wide layers on wavecrest's GEMM" in STEP.find(context(work, build(work.model, steps))).note
    steps = routed(work, steps)
    compiled = context(work, build(work.model, steps))
    compiled.compiled = True
    assert "the compiler makes" in STEP.find(compiled).note
    monkeypatch.setattr(InOne, "_decide", lambda *_: False)
    assert STEP.find(context(work, build(work.model, steps))).note.startswith("no kernel that computes the norm")
    for pair in (["model.norm", "lm_head"], ["model.layers.0.mlp", "model.layers.0.self_attn.q_proj"]):
        with pytest.raises(StepRefused, match="are no RMSNorm of wavecrest and a wide layer"):
            STEP.apply(build(work.model, steps), {"pairs": [pair]})


def test_a_decision_is_kept_until_it_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def decide(call: Any) -> Any:
        asked.append(call)
        return type(
            "Found", (), {"own_kernel": True, "source": "tuned" if call.norm_weight is not None else "default"}
        )()

    monkeypatch.setattr(deferred_norm.op, "decide", decide)
    norm, weight, choice = DeferredNorm(16), torch.randn(8, 16), InOne()
    x = torch.randn(2, 16)
    with torch.no_grad():
        assert choice.of(x, weight, None, None, norm) and choice.of(x, weight, None, None, norm) and len(asked) == 1
        assert choice.of(torch.randn(3, 16), weight, None, None, norm) and len(asked) == 2
        # without a measured row the default of both is enough, but for an activation
        assert choice.of(x, weight, None) and not choice.of(x, weight, None, "silu_and_mul")
    assert not choice.of(x, weight, None, None, norm)
