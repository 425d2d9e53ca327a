"""Prompts whose products add to the residual where it lies: the same logits and states; what a hook saw stays."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.xlstm_harness import VOCABULARY, build, close, tokens
from wavecrest.models.xlstm import quantize, xLSTMLarge
from wavecrest.nn import Linear, norm

PROMPTS = [(2, 21), (1, 40), (3, 5), (2, 1)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of the norms' ops: of an addition and a norm, or of a norm alone."""
    counted: Counter[str] = Counter()

    def counting(name: str, run: Any) -> Any:
        def noted(*args: Any) -> Any:
            counted[name] += 1
            return run(*args)

        return noted

    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(norm, name, counting(name, getattr(norm, name)))
    yield counted


def read(model: xLSTMLarge, rows: Tensor) -> tuple[Tensor, Any]:
    """Logits and states of a prompt."""
    with torch.no_grad():
        logits, state = model(rows, return_last_states=True)
    return logits, state


def apart(model: xLSTMLarge, rows: Tensor) -> tuple[Tensor, Any]:
    """The same by additions to tensors of their own, as where a hook may keep what it saw."""
    handle = model.backbone.blocks[0].register_forward_hook(lambda *_: None)
    try:
        return read(model, rows)
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["single", "fused"])
@pytest.mark.parametrize("shape", PROMPTS)
def test_the_same_in_place(shape: tuple[int, int], mode: str, dtype: torch.dtype, calls: Counter[str]) -> None:
    model, rows = build(dtype=dtype, weight_mode=mode), tokens(*shape)
    embedding = model.embedding.weight.clone()
    found = read(model, rows)
    # two norms a block, and the one behind the last; no addition is a call
    assert calls == {"rms_norm": 2 * 2 + 1}
    calls.clear()
    wanted = apart(model, rows)
    assert calls == {"rms_norm": 1, "add_rms_norm": 2 * 2}
    close(found[0], wanted[0])
    for index, parts in wanted[1].items():
        for own, part in zip(found[1][index], parts, strict=True):
            close(own, part)
    assert torch.equal(model.embedding.weight, embedding)


def test_what_a_hook_saw_stays() -> None:
    model, rows = build(weight_mode="fused"), tokens(2, 21)
    ends = ("norm_mlstm", "norm_ffn", "embedding", "ffn")
    watched = [module for name, module in model.named_modules() if name.endswith(ends)]
    assert len(watched) == 2 * 3 + 1
    for module in watched:
        seen: list[tuple[Tensor, Tensor]] = []

        def keep(_module: Any, given: tuple[Tensor, ...], made: Any, seen: list[tuple[Tensor, Tensor]] = seen) -> None:
            for one in (*given, *(made if isinstance(made, tuple) else (made,))):
                if isinstance(one, Tensor):
                    seen.append((one, one.clone()))

        handle = module.register_forward_hook(keep)
        read(model, rows)
        handle.remove()
        assert seen and all(torch.equal(one, before) for one, before in seen)


def test_a_hook_for_all_modules(calls: Counter[str]) -> None:
    model, rows = build(), tokens(2, 21)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        read(model, rows)
    finally:
        handle.remove()
    assert calls["add_rms_norm"] == 2 * 2


@pytest.mark.parametrize("how", ["a bias", "int8", "another backend"])
def test_what_is_added_apart(how: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's plain product is not what runs."""
    model, rows = build(use_bias=how == "a bias"), tokens(2, 21)
    if how == "int8":
        quantize(model, "int8")
    if how == "another backend":
        found = Linear.decision
        monkeypatch.setattr(
            Linear,
            "decision",
            lambda *args: dataclasses.replace(found(*args), backend="torch_blaslt"),
        )
    read(model, rows)
    assert calls["add_rms_norm"] == 2 * 2


@pytest.mark.parametrize("name", ["mlstm_layer.out_proj", "ffn.proj_down"])
def test_a_forward_of_its_own(name: str, calls: Counter[str]) -> None:
    """As accelerate sets it: it sees the product alone."""
    model, rows = build(), tokens(2, 21)
    read(model, rows)
    part = model.backbone.blocks[1].get_submodule(name)
    forward, weight = part.forward, part.get_parameter("weight")
    part.forward = lambda *args, **options: forward(*args, **options) / 2  # type: ignore[method-assign]
    calls.clear()
    found = read(model, rows)[0]
    # the second block's norm behind the mLSTM, and the last one
    assert calls["add_rms_norm"] == 2
    del part.forward
    weight.div_(2)
    close(found, read(model, rows)[0])


@pytest.mark.parametrize("last_only", [False, True])
def test_an_mlp_of_others_takes_x_alone(last_only: bool) -> None:
    model, rows = build(), tokens(2, 21)
    wanted = model(rows, last_only=last_only)[0]
    for block in model.backbone.blocks:
        block.ffn = nn.Sequential(block.ffn)
    close(model(rows, last_only=last_only)[0], wanted)


def test_gradients_are_those_of_additions_apart() -> None:
    rows, found = tokens(2, 21), []
    for hooked in (False, True):
        model = build(dtype=torch.float64).requires_grad_(True)
        if hooked:
            model.backbone.blocks[0].register_forward_hook(lambda *_: None)
        logits = model(rows, return_last_states=False)
        torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), rows.view(-1)).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert found[0] and len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        close(one, other)


@pytest.mark.parametrize("trained", ["norm_mlstm.weight", "norm_ffn.weight", "out_proj.weight", "embedding.weight"])
def test_one_parameter_that_is_trained(trained: str) -> None:
    """Tensors that autograd keeps for the backward pass are not written to."""
    rows, found = tokens(2, 21), []
    for hooked in (False, True):
        model = build(dtype=torch.float64)
        parameters = [parameter for name, parameter in model.named_parameters() if name.endswith(trained)]
        for parameter in parameters:
            parameter.requires_grad_(True)
        if hooked:
            model.backbone.blocks[0].register_forward_hook(lambda *_: None)
        model(rows, return_last_states=False).square().sum().backward()
        found.append([parameter.grad for parameter in parameters])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        close(one, other)
