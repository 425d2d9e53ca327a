"""The gates' weights behind those of the other projections: one product of few rows, and never a stale one."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.models.xlstm_harness import DEVICE, build, close
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import Op
from wavecrest.models.xlstm import xLSTMLarge
from wavecrest.models.xlstm.layers import MLSTMLayer, fused_projections
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.nn import Linear
from wavecrest.nn.fused_projection import MOST_ROWS, FusedProjection
from wavecrest.nn.norm import ResidualNorm
from wavecrest.ops import pack


def layers(bias: tuple[bool, bool] = (False, True), **more: Any) -> tuple[Linear, Linear]:
    torch.manual_seed(0)
    wide, narrow = (
        Linear.from_weight(torch.randn(n, 24, **more), torch.randn(n, **more) if has else None)
        for n, has in zip((40, 6), bias, strict=True)
    )
    return wide, narrow


@pytest.mark.parametrize("bias", [(False, False), (False, True), (True, False), (True, True)])
def test_one_product_is_both(bias: tuple[bool, bool]) -> None:
    wide, narrow = layers(bias)
    x, kept = torch.randn(3, 24), [one.clone() for layer in (wide, narrow) for one in layer.parameters()]
    with torch.no_grad():
        want = torch.cat([wide(x), narrow(x)], -1)
        joined = FusedProjection(wide, narrow)
        both = joined.for_rows(x)
        assert both is not None
        torch.testing.assert_close(both(x), want)
        # they are still the layers that they were
        torch.testing.assert_close(torch.cat([wide(x), narrow(x)], -1), want)
    for one, before in zip([one for layer in (wide, narrow) for one in layer.parameters()], kept, strict=True):
        assert torch.equal(one, before)


def test_what_is_written_to_the_parameters_is_seen() -> None:
    wide, narrow = layers()
    joined, x = FusedProjection(wide, narrow), torch.randn(2, 24)
    with torch.no_grad():
        for one in (wide.weight, narrow.weight, narrow.bias):
            assert one is not None
            one.mul_(2.0)
            both = joined.for_rows(x)
            assert both is not None
            torch.testing.assert_close(both(x), torch.cat([wide(x), narrow(x)], -1))


MOVED: dict[str, Callable[[Linear, Linear], Any]] = {
    "the weight's data": lambda wide, narrow: setattr(wide.weight, "data", wide.weight.data.clone()),
    "the gates' data": lambda wide, narrow: setattr(narrow.weight, "data", narrow.weight.data.clone()),
    "another parameter": lambda wide, narrow: setattr(narrow, "weight", nn.Parameter(narrow.weight.data.clone())),
    "another bias": lambda wide, narrow: setattr(narrow, "bias", nn.Parameter(torch.zeros(6))),
    "a bias that was not there": lambda wide, narrow: setattr(wide, "bias", nn.Parameter(torch.zeros(40))),
    "loaded in place": lambda wide, narrow: narrow.load_state_dict(
        {name: one.clone() for name, one in narrow.state_dict().items()}, assign=True
    ),
    "packed": lambda wide, narrow: setattr(
        wide, "weight", Linear.from_module(nn.Linear(24, 40, bias=False), "int8").weight
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_by_itself_is_two_layers_again(name: str) -> None:
    wide, narrow = layers()
    joined, x = FusedProjection(wide, narrow), torch.randn(2, 24)
    with torch.no_grad():
        assert joined.for_rows(x) is not None
        MOVED[name](wide, narrow)
        assert joined.for_rows(x) is None and joined._both is None


def test_when_there_is_none() -> None:
    x = torch.randn(2, 24)
    with torch.no_grad():
        assert FusedProjection(*layers()).for_rows(torch.randn(MOST_ROWS + 1, 24)) is None
        assert FusedProjection(*layers(device="meta")).for_rows(x) is None
        wide, narrow = layers()
        narrow.to(torch.float64)
        assert FusedProjection(wide, narrow).for_rows(x) is None
    assert FusedProjection(*layers()).for_rows(x) is None, "gradients go to the parameters"


def _joined(model: xLSTMLarge) -> list[bool]:
    with torch.no_grad():
        return [one.for_rows(model.embedding.weight[:1].unsqueeze(0)) is not None for one in fused_projections(model)]


def test_a_model_is_joined_however_it_came_to_be(tmp_path: Path) -> None:
    model = build(weight_mode="fused")
    tokens = torch.arange(2, device=DEVICE).view(2, 1)
    with torch.no_grad():
        want = model(tokens, return_last_states=False)
    assert all(_joined(model)) and all(_joined(model.to(torch.float64))) and all(_joined(model.float()))
    other = copy.deepcopy(model)
    assert all(_joined(other)) and all(_joined(other.float().double().float()))
    assert not {one.data_ptr() for one in other.parameters()} & {one.data_ptr() for one in model.parameters()}
    model.save_pretrained(tmp_path / "saved")
    loaded = xLSTMLarge.from_pretrained(tmp_path / "saved", device=DEVICE)
    assert all(_joined(loaded))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    # what is joined is written once
    assert (tmp_path / "state.pt").stat().st_size < 1.2 * sum(one.nbytes for one in model.state_dict().values()) + 2**16
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for one in (loaded, other):
        with torch.no_grad():
            close(one(tokens, return_last_states=False), want)
    assert not [one for one in build(weight_mode="single").modules() if isinstance(one, MLSTMLayer) and one.fused]


def test_quantizing_gives_the_memory_back() -> None:
    model = build(weight_mode="fused", use_bias=True)
    held = [both.weight for both in (one._both for one in fused_projections(model)) if both is not None]
    gates = [one.ifgate_preact for one in model.modules() if isinstance(one, MLSTMLayer)]
    before = [one.weight.data_ptr() for one in gates]
    quantize(model, "int8")
    assert not any(_joined(model))
    # elsewhere than in what is still held here
    assert len(held) == len(gates) and not {one.weight.data_ptr() for one in gates} & set(before)


def _hook_of_all(register: Any, part: nn.Module, hook: Callable[..., Any]) -> Any:
    return register(lambda one, *args: hook(one, *args) if one is part else None)


@contextlib.contextmanager
def _forward_of_its_own(part: nn.Module) -> Iterator[None]:
    forward = part.forward
    part.forward = lambda *args: forward(*args) / 2  # type: ignore[method-assign]
    yield
    del part.forward


# how the results of a layer without a bias are halved from outside
HALVED: dict[str, Callable[[nn.Module], Any]] = {
    "a hook": lambda part: part.register_forward_hook(lambda _part, _args, made: made / 2),
    "a hook before it": lambda part: part.register_forward_pre_hook(lambda _part, args: (args[0] / 2, *args[1:])),
    "a hook of all": lambda part: _hook_of_all(register_module_forward_hook, part, lambda _, _args, made: made / 2),
    "a hook before all": lambda part: _hook_of_all(
        register_module_forward_pre_hook, part, lambda _, args: (args[0] / 2, *args[1:])
    ),
    "a forward of its own": _forward_of_its_own,
}


@pytest.mark.parametrize("how", HALVED)
def test_what_runs_around_a_layer_has_its_effect(how: str) -> None:
    model, x = build(weight_mode="fused"), torch.randn(2, 3, 36, device=DEVICE)
    layer = model.backbone.blocks[0].mlstm_layer
    nn.init.zeros_(layer.ifgate_preact.bias)
    with torch.no_grad():
        plain = [one.clone() for one in layer._projections(x, None)]
        for part, halves in ((layer.qkv_opreact, plain[:4]), (layer.ifgate_preact, plain[4:])):
            with HALVED[how](part):
                found = layer._projections(x, None)
            for one, old in zip(found, plain, strict=True):
                close(one, old / 2 if any(old is half for half in halves) else old)
    assert all(_joined(model)), "what ran around them is gone"


@pytest.mark.parametrize("name", ["qkv_opreact", "ifgate_preact"])
def test_a_module_in_a_layer_s_place_runs(name: str) -> None:
    model, rows = build(weight_mode="fused"), torch.arange(6, device=DEVICE).view(2, 3)
    wanted = model(rows)[0]
    part = model.get_submodule(f"backbone.blocks.0.mlstm_layer.{name}")
    other = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, device=DEVICE)
    model.set_submodule(f"backbone.blocks.0.mlstm_layer.{name}", other)
    with torch.no_grad():
        changed = model(rows)[0]
        assert float((changed - wanted).abs().max()) > 0.01
        other.load_state_dict(part.state_dict())
        close(model(rows)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_whole_storages(dtype: torch.dtype, tmp_path: Path) -> None:
    """By which safetensors, huggingface_hub and accelerate find parameters that share memory."""
    from safetensors.torch import load_model, save_model

    model = build(weight_mode="fused", use_bias=True, dtype=dtype)
    assert all(_joined(model))
    for one in model.parameters():
        storage = one.untyped_storage()
        assert (storage.data_ptr(), storage.nbytes()) == (one.data_ptr(), one.nbytes)
    save_model(model, str(tmp_path / "model.safetensors"))
    other = build(1, weight_mode="fused", use_bias=True, dtype=dtype)
    load_model(other, str(tmp_path / "model.safetensors"))
    assert all(_joined(other))
    for one, kept in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, kept)


def test_a_pickled_model_is_written_once_and_joined() -> None:
    model, rows = build(weight_mode="fused"), torch.arange(6, device=DEVICE).view(2, 3)
    written = pickle.dumps(model)
    assert len(written) < 1.1 * sum(one.nbytes for one in model.parameters()) + 2**15
    other = pickle.loads(written)
    assert all(_joined(other)) and torch.equal(other(rows)[0], model(rows)[0])


@pytest.mark.skipif(DEVICE != "cpu", reason="parameters of a GPU are shared as they are")
def test_shared_memory_stays_shared() -> None:
    model, rows = build(weight_mode="fused", use_bias=True), torch.arange(6).view(2, 3)
    wanted = model(rows)[0]
    model.share_memory()
    assert all(one.is_shared() for one in model.parameters())
    assert not any(_joined(model))
    close(model(rows)[0], wanted)
    assert all(one.is_shared() for one in model.float().parameters()), "moved to where they are"
    assert all(_joined(model.double()))


# --- behind a weight in 8 bits


@pytest.fixture
def kernel() -> Iterator[Op]:
    """Products, all by the kernel that takes a tail."""
    found = registry.get("gemm")
    found.force("triton_gemv")
    yield found
    found.force(None)


def packed_layers(format: str = "int8", bias: tuple[bool, bool] = (False, True)) -> tuple[Linear, Linear]:
    wide, narrow = (one.to(DEVICE) for one in layers(bias))
    wide.weight = nn.Parameter(pack(wide.weight.data, format), requires_grad=False)
    return wide, narrow


@pytest.mark.parametrize("bias", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_one_product_is_both_of_a_packed_weight(format: str, bias: tuple[bool, bool], kernel: Op) -> None:
    wide, narrow = packed_layers(format, bias)
    joined, x, norm = (
        FusedProjection(wide, narrow),
        torch.randn(3, 24, device=DEVICE),
        ResidualNorm(24, 1e-6, False, DEVICE),
    )
    with torch.no_grad():
        for given in ((x,), (x, None, norm.weight, norm.eps)):
            both = joined.for_rows(x, None if len(given) == 1 else norm)
            assert both is not None and both.weight is wide.weight and both.tail is narrow.weight
            torch.testing.assert_close(both(*given), torch.cat([wide(*given), narrow(*given)], -1))
        # what is written to the parameters is seen
        narrow.weight.mul_(2.0)
        torch.testing.assert_close(both(x), torch.cat([wide(x), narrow(x)], -1))
        assert joined.for_rows(torch.randn(9, 24, device=DEVICE)) is None, "more rows than the kernel takes"
        kernel.force(None)
        assert joined.for_rows(x) is None, "no row names the kernel"
        kernel.force("triton_gemv")
        assert joined.for_rows(x) is not None


@pytest.mark.parametrize(("format", "group"), [("int4", None), ("fp8_block", None), ("int8", 32)])
def test_formats_without_a_tail(format: str, group: int | None, kernel: Op) -> None:
    wide, narrow = Linear.from_weight(torch.randn(48, 64)), Linear.from_weight(torch.randn(6, 64))
    wide.weight = nn.Parameter(pack(wide.weight.data, format, group=group), requires_grad=False)
    with torch.no_grad():
        assert FusedProjection(wide, narrow).for_rows(torch.randn(2, 64)) is None


@pytest.mark.parametrize("name", ["another parameter", "another bias", "a bias that was not there", "loaded in place"])
def test_what_is_moved_from_behind_a_packed_weight_is_two_layers_again(name: str, kernel: Op) -> None:
    wide, narrow = packed_layers()
    joined, x = FusedProjection(wide, narrow), torch.randn(2, 24, device=DEVICE)
    with torch.no_grad():
        assert joined.for_rows(x) is not None
        MOVED[name](wide, narrow)
        assert joined.for_rows(x) is None and joined._both is None


def test_a_quantized_model_is_joined_however_it_came_to_be(kernel: Op, tmp_path: Path) -> None:
    plain = build(weight_mode="fused")
    plain.save_pretrained(tmp_path / "saved")
    loaded = xLSTMLarge.from_pretrained(tmp_path / "saved", device=DEVICE, quantize="int8")
    model = quantize(plain, "int8")
    tokens = torch.arange(2, device=DEVICE).view(2, 1)
    with torch.no_grad():
        kernel.force(None)
        want = model(tokens, return_last_states=False)
        kernel.force("triton_gemv")
        for one in (model, loaded, copy.deepcopy(model).to(torch.float32)):
            assert all(_joined(one))
            close(one(tokens, return_last_states=False), want)


def test_a_norm_of_others_before_a_packed_weight(kernel: Op) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x = x if delta is None else x + delta
            return x / 2, x

    model = quantize(build(weight_mode="fused"), "int8")
    token = torch.tensor([3, 4], device=DEVICE)
    model.backbone.blocks[0].norm_mlstm = Other()
    with torch.no_grad():
        found = model.decode(token, model.empty_state(2))
        kernel.force(None)
        close(found, model(token[:, None])[0][:, 0])


def test_a_step_is_what_two_products_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(weight_mode="fused")
    token = torch.tensor([3, 4], device=DEVICE)
    with torch.no_grad():
        state = model.empty_state(2)
        together = [model.decode(token, state).clone() for _ in range(3)]
        monkeypatch.setattr(FusedProjection, "for_rows", lambda *_parts: None)
        state = model.empty_state(2)
        apart = [model.decode(token, state).clone() for _ in range(3)]
    for one, other in zip(together, apart, strict=True):
        close(one, other)
