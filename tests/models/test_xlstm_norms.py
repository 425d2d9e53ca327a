"""Decoding steps whose products normalise the rows they read and add the residual: the same logits, no norm."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.xlstm_harness import build, close, oracle, tokens
from tests.ops.gemm_harness import quicken
from wavecrest.dispatch import registry
from wavecrest.measure import numerics
from wavecrest.models.xlstm import quantize, xLSTMLarge
from wavecrest.nn import norm as norms
from wavecrest.nn.fused_block import FusionChoice
from wavecrest.ops import PackedWeight

OWN = "triton_gemv"
STEPS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of the norms' ops; products run on the kernel of few rows."""
    quicken(monkeypatch)
    counted: Counter[str] = Counter()
    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(norms, name, _counting(counted, name, getattr(norms, name)))
    registry.get("gemm").force(OWN)
    yield counted
    registry.get("gemm").force(None)


def _counting(counted: Counter[str], name: str, run: Any) -> Any:
    def noted(*args: Any) -> Any:
        counted[name] += 1
        return run(*args)

    return noted


def decode(model: xLSTMLarge, rows: Tensor) -> tuple[Tensor, Any]:
    """Logits [B, STEPS, V] of steps over tokens [B, STEPS], and the state behind them."""
    state = model.empty_state(rows.shape[0])
    with torch.no_grad():
        found = [model.decode(token, state).double() for token in rows.unbind(1)]
    return torch.stack(found, 1), state


def old(monkeypatch: pytest.MonkeyPatch, model: xLSTMLarge, rows: Tensor) -> tuple[Tensor, Any]:
    """The same with every norm a call of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(FusionChoice, "of", lambda _self, _x, *asked: (False,) * len(asked))
        return decode(model, rows)


@pytest.mark.parametrize(
    ("mode", "batch", "changes"),
    [
        ("fused", 1, {}),
        # more rows are more of the same in the interpreter's time: of one block
        ("fused", 5, {"tie_word_embeddings": True, "num_blocks": 1}),
        ("single", 3, {"num_blocks": 1}),
        ("fused", 2, {"add_out_norm": False}),
        # eps that shows
        ("single", 1, {"norm_eps": 0.1}),
    ],
    ids=["fused", "five-rows", "single", "no-last-norm", "eps"],
)
def test_the_same_logits_and_no_norm(
    mode: str, batch: int, changes: Any, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(weight_mode=mode, **changes)
    rows = tokens(batch, STEPS)
    found, state = decode(model, rows)
    assert not calls
    plain, reached = old(monkeypatch, model, rows)
    last = int(changes.get("add_out_norm", True))
    # the first block's first norm adds nothing
    assert calls == {"rms_norm": STEPS, "add_rms_norm": STEPS * (2 * changes.get("num_blocks", 2) - 1 + last)}
    close(found, plain)
    for block, (c, n, m) in state.items():
        for one, other in zip((c, n, m), reached[block], strict=True):
            close(one, other)
    single = build(weight_mode="single", **changes)
    for row in range(min(batch, 2)):
        close(found[row], oracle(single, rows[row]))


def as_near(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """As near to the exact logits as the old form, by the rule of whole models: twice its error, or the limit."""
    mine, other = (numerics.compare(one.cpu(), exact.cpu()).relative for one in (found, plain))
    limit = numerics.tolerance("model", "bfloat16").relative
    assert mine <= max(limit, 2 * other), (mine, other)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_packed_weights(form: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in groups of 128 columns as far as the kernel has them: what it declines keeps its norm."""
    model = quantize(build(weight_mode="fused", dtype=torch.bfloat16), form, lm_head=True)
    rows = tokens(1, STEPS)
    found, _ = decode(model, rows)
    # 4-bit codes with a gated activation are no product of this kernel: the second norm of both blocks
    assert calls == ({"add_rms_norm": 2 * STEPS} if form == "int4" else {})
    plain, _ = old(monkeypatch, model, rows)
    exact = build(weight_mode="fused", dtype=torch.bfloat16)
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, PackedWeight):
            exact.get_parameter(name).copy_(weight.unpack())
    registry.get("gemm").force(None)
    wanted, _ = decode(exact.float(), rows)
    as_near(found, plain, wanted)


def test_half_precision(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(weight_mode="fused", dtype=torch.bfloat16)
    rows = tokens(2, STEPS)
    found, _ = decode(model, rows)
    assert not calls
    plain, _ = old(monkeypatch, model, rows)
    exact = build(weight_mode="single", dtype=torch.bfloat16)
    as_near(found[0], plain[0], oracle(exact, rows[0]))


def test_where_it_does_not_apply(calls: Counter[str]) -> None:
    """More rows than the kernel has, a norm with a bias, a hook on a norm, prompts: norms of their own."""
    model = build(weight_mode="fused")
    every = {"rms_norm": 1, "add_rms_norm": 4}
    decode(model, tokens(9, 1))
    assert calls == every
    calls.clear()
    decode(build(weight_mode="fused", use_bias=True), tokens(1, 1))
    assert calls == every
    calls.clear()
    model(tokens(1, 1), model.empty_state(1))
    assert calls == every
    calls.clear()
    seen: list[Any] = []
    hook = model.backbone.blocks[1].norm_ffn.register_forward_hook(lambda *_args: seen.append(1))
    decode(model, tokens(1, 1))
    assert seen and calls == {"add_rms_norm": 1}
    hook.remove()
    calls.clear()
    decode(model, tokens(1, 1))
    assert not calls


def test_a_prompt_ends_as_a_step_does(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last mLSTM there are as few rows: the GEMM before it adds, the one behind normalises."""
    model, prompt = build(weight_mode="fused"), tokens(2, 9)
    found, _ = model(prompt, last_only=True)
    # both of the first block, whose products add where x lies, the first one of the second block, and the last
    assert calls == {"rms_norm": 4}
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(FusionChoice, "of", lambda _self, _x, *asked, judge=None: (False,) * len(asked))
        plain, _ = model(prompt, last_only=True)
    assert calls == {"rms_norm": 1, "add_rms_norm": 4}
    close(found, plain)
    close(found, model(prompt)[0][:, -1:])


def test_pytorch_s_composition_is_not_asked_for(calls: Counter[str]) -> None:
    model, every = build(weight_mode="fused"), {"rms_norm": 1, "add_rms_norm": 4}
    registry.get("gemm").force(None)
    decode(model, tokens(1, 1))
    assert calls == every
    # and a decision that changes is seen
    registry.get("gemm").force(OWN)
    calls.clear()
    decode(model, tokens(1, 1))
    assert not calls
    # as are weights of another form: 4-bit codes are not gated by this kernel
    quantize(model, "int4")
    decode(model, tokens(1, 1))
    assert calls == {"add_rms_norm": 2}


def test_by_measured_rows_alone_and_never_by_a_guess(calls: Counter[str]) -> None:
    """A pinned product with a norm is used; where the product alone is measured, a default with a norm is not."""
    gemm, model = registry.get("gemm"), build(weight_mode="fused")
    gemm.force(None)
    every = {"rms_norm": 1, "add_rms_norm": 4}
    ffn = model.backbone.blocks[0].ffn.proj_up_gate_z
    norm = model.backbone.blocks[0].norm_ffn
    out = model.backbone.blocks[0].mlstm_layer.out_proj
    x = torch.zeros(1, 1, 36, device=model.embedding.weight.device)
    try:
        with torch.no_grad():
            gemm.pin(ffn.decision(x, None, norm.weight, norm.eps).key, OWN, None, "exact", "a test")
            decode(model, tokens(1, 1))
            assert calls == every, "without the product that adds there is nothing to normalise yet"
            calls.clear()
            gemm.pin(out.decision(x, x).key, OWN, None, "exact", "a test")
            decode(model, tokens(1, 1))
            # both blocks' second norm
            assert calls == {"rms_norm": 1, "add_rms_norm": 2}
            calls.clear()
            gemm.pin(ffn.decision(x, None, norm.weight, norm.eps).key, OWN, None, "default", "a test")
            gemm.pin(ffn.decision(x).key, OWN, None, "exact", "a test")
            decode(model, tokens(1, 1))
            assert calls == every
    finally:
        gemm.unpin()


def test_strict_mode_asks_for_rows_of_what_runs(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(weight_mode="fused")
    choice = FusionChoice()
    norm, ffn = model.backbone.blocks[0].norm_ffn, model.backbone.blocks[0].ffn
    x = torch.zeros(1, 1, 36, device=model.embedding.weight.device)
    with torch.no_grad():
        assert choice.of(x, (ffn.inputs(), norm)) == (True,)
        registry.get("gemm").force(None)
        registry.strict("error")
        try:
            assert choice.of(x, (ffn.inputs(), norm)) == (False,)
        finally:
            registry.strict("off")


def test_other_modules_in_a_layer_s_place(calls: Counter[str]) -> None:
    model = build(weight_mode="fused")
    wanted, _ = decode(model, tokens(1, STEPS))
    for block in model.backbone.blocks:
        for owner, name in ((block.mlstm_layer, "out_proj"), (block.ffn, "proj_down")):
            ours = getattr(owner, name)
            other = torch.nn.Linear(ours.in_features, ours.out_features, bias=False)
            other.weight = ours.weight
            setattr(owner, name, other)
    found, _ = decode(model, tokens(1, STEPS))
    # what is not added yet: both second norms, and the second block's first
    assert calls == {"add_rms_norm": STEPS * 3}
    close(found, wanted)


BLOCK = "backbone.blocks.0."
# what halves its results, and the parameters that would be half as large for the same
HALVES = {
    BLOCK + "norm_mlstm": (BLOCK + "norm_mlstm.weight",),
    BLOCK + "mlstm_layer": (BLOCK + "mlstm_layer.out_proj.weight",),
    BLOCK + "mlstm_layer.qkv_opreact": (BLOCK + "mlstm_layer.qkv_opreact.weight",),
    BLOCK + "mlstm_layer.ifgate_preact": (
        BLOCK + "mlstm_layer.ifgate_preact.weight",
        BLOCK + "mlstm_layer.ifgate_preact.bias",
    ),
    BLOCK + "mlstm_layer.out_proj": (BLOCK + "mlstm_layer.out_proj.weight",),
    BLOCK + "norm_ffn": (BLOCK + "norm_ffn.weight",),
    BLOCK + "ffn": (BLOCK + "ffn.proj_down.weight",),
    BLOCK + "ffn.proj_up_gate_z": (BLOCK + "ffn.proj_down.weight",),
    BLOCK + "ffn.proj_down": (BLOCK + "ffn.proj_down.weight",),
    "backbone.out_norm": ("backbone.out_norm.weight",),
    "lm_head": ("lm_head.weight",),
    "embedding": ("embedding.weight",),
}


def _half(made: Any) -> Any:
    return (made[0] / 2, *made[1:]) if isinstance(made, tuple) else made / 2


class Halved(nn.Module):
    """Around another module, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, *args: Any, **options: Any) -> Any:
        return _half(self.inner(*args, **options))


@contextlib.contextmanager
def _replaced(model: nn.Module, name: str) -> Iterator[None]:
    part = model.get_submodule(name)
    model.set_submodule(name, Halved(part))
    yield
    model.set_submodule(name, part)


def _hooked(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name).register_forward_hook(lambda _part, _args, made: _half(made))


def _made(model: xLSTMLarge, kernel: str | None) -> tuple[Tensor, ...]:
    """Logits of a prompt, of a step behind it, and of the prompt's last token, whose products run on `kernel`."""
    rows = tokens(1, 3)
    registry.get("gemm").force(None)
    whole, state = model(rows[:, :2])
    registry.get("gemm").force(kernel)
    return whole, model.decode(rows[:, 2], state), model(rows[:, :2], last_only=True)[0]


@functools.cache
def _has_run(kernel: str | None) -> tuple[xLSTMLarge, tuple[Tensor, ...]]:
    """A model that every change is taken back from, and what it makes."""
    model = build(weight_mode="fused", num_blocks=1)
    return model, _made(model, kernel)


@pytest.mark.parametrize("kernel", [OWN, None])
@pytest.mark.parametrize("name", HALVES)
def test_what_others_put_in_a_module_s_place_or_around_it_runs(
    name: str, kernel: str | None, calls: Counter[str]
) -> None:
    """In steps and behind prompts, with wavecrest's GEMMs or PyTorch's, of a model that has run without it."""
    with torch.no_grad():
        model, before = _has_run(kernel)
        halved = copy.deepcopy(model)
        for parameter in HALVES[name]:
            halved.get_parameter(parameter).div_(2)
        wanted = _made(halved, None)
        for change in (_replaced, _hooked):
            with change(model, name):
                found = _made(model, kernel)
            for one, other, old in zip(found, wanted, before, strict=True):
                close(one, other)
                assert float((one - old).abs().max()) > 0.01


def test_a_model_that_has_decoded_is_copied_and_kept(calls: Counter[str]) -> None:
    model = build(weight_mode="fused")
    wanted, _ = decode(model, tokens(1, STEPS))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(decode(other, tokens(1, STEPS))[0], wanted)
    assert not calls
