from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import nn as wnn
from wavecrest.errors import StepRefused


class GemmaNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)).type_as(x)


class EpsOutside(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Clamped(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-10, 10))


class IgnoresWeight(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (24,), None, self.eps)


class Gated(nn.RMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-6)
        self.gate = nn.Parameter(torch.ones(size))


class Failing(nn.RMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * gate


def randomise(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.RMSNorm(24, eps=1e-5), id="torch-rms"),
        pytest.param(nn.RMSNorm(24), id="torch-rms-eps-none"),
        pytest.param(nn.RMSNorm(24, eps=1e-5, elementwise_affine=False), id="torch-rms-plain"),
        pytest.param(nn.LayerNorm(24), id="torch-layer"),
        pytest.param(nn.LayerNorm(24, bias=False), id="torch-layer-no-bias"),
        pytest.param(nn.LayerNorm(24, elementwise_affine=False), id="torch-layer-plain"),
        pytest.param(nn.LayerNorm((24,), eps=1e-3), id="torch-layer-tuple"),
    ],
)
def test_from_module_computes_the_same_and_shares_parameters(module: nn.Module) -> None:
    randomise(module)
    made = wnn.norm_from_module(module)
    assert type(made) is (wnn.LayerNorm if isinstance(module, nn.LayerNorm) else wnn.RMSNorm)
    for name, parameter in module.named_parameters():
        assert made.get_parameter(name) is parameter
    for scale in (1.0, 1e-4):
        x = scale * torch.randn(3, 5, 24)
        torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)
    half = 1e-3 * torch.randn(3, 24)
    torch.testing.assert_close(made.half()(half.half()), module.half()(half.half()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm", "Qwen2RMSNorm", "MistralRMSNorm"])
def test_from_transformers(name: str) -> None:
    module = randomise(_transformers_norm(name))
    made = wnn.norm_from_module(module)
    assert type(made) is wnn.RMSNorm
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)


def _transformers_norm(name: str) -> nn.Module:
    import importlib

    pytest.importorskip("transformers")
    folder = {"LlamaRMSNorm": "llama", "T5LayerNorm": "t5", "Qwen2RMSNorm": "qwen2", "MistralRMSNorm": "mistral",
              "GemmaRMSNorm": "gemma", "Gemma3RMSNorm": "gemma3", "Qwen3NextRMSNorm": "qwen3_next"}[name]  # fmt: skip
    module: nn.Module = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)(24)
    return module


@pytest.mark.parametrize("weight", [0.0, 1.0, None], ids=["zeros", "ones", "random"])
def test_gemma_scales_by_one_more_whatever_its_weight(weight: float | None) -> None:
    for module in (GemmaNorm(24), *map(_transformers_norm, ("GemmaRMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm"))):
        parameter = module.get_parameter("weight")
        with torch.no_grad():
            parameter.normal_() if weight is None else parameter.fill_(weight)
        with pytest.raises(StepRefused, match=r"\(1 \+ weight\)"):
            wnn.RMSNorm.from_module(module)
        made = wnn.norm_from_module(module)
        assert type(made) is wnn.GemmaRMSNorm and made.weight is parameter
        assert made.state_dict().keys() == {"weight"}
        x = torch.randn(2, 3, 24)
        torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)
        # a weight that changes later counts
        with torch.no_grad():
            parameter.add_(0.5)
        torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemma_adds_the_one_in_float32(dtype: torch.dtype) -> None:
    """1 + weight rounded to bfloat16 would be off by 2^-9: as far as a value of the result may be."""
    module = randomise(_transformers_norm("GemmaRMSNorm"))
    # made before or after the model takes its dtype
    first = wnn.norm_from_module(module)
    later = wnn.norm_from_module(module.to(dtype))
    x = torch.randn(64, 24).to(dtype)
    for made in (first.to(dtype), later):
        assert made.weight is not None and made.weight.dtype == dtype
        assert torch.equal(made(x), module(x))


class Patched(nn.RMSNorm):
    """Its result depends on an attribute."""

    gain: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def test_a_proof_holds_for_the_same_settings_alone() -> None:
    """One proof for the 105 norms of a Gemma, and none for a norm that differs in anything."""
    for _ in range(2):
        wnn.norm_from_module(Patched(24, eps=1e-6))
    with pytest.raises(StepRefused, match="something else"):
        other = Patched(24, eps=1e-6)
        other.gain = 2.0
        wnn.norm_from_module(other)
    with pytest.raises(StepRefused, match="something else"):
        other = Patched(24, eps=1e-6)
        other.gain = torch.tensor(2.0)
        wnn.norm_from_module(other)
    with pytest.raises(StepRefused, match="something else"):
        other = Patched(24, eps=1e-6)
        other.forward = lambda x: 2 * x  # type: ignore[method-assign]
        wnn.norm_from_module(other)
    assert wnn.norm_from_module(Patched(24, eps=1e-3)).eps == 1e-3


@pytest.mark.parametrize(("name", "value"), [("forward", lambda self, x: 2 * x), ("gain", 2.0)])
def test_a_class_that_was_changed_is_proven_anew(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wnn.norm_from_module(Patched(24, eps=1e-6))
    monkeypatch.setattr(Patched, name, value)
    with pytest.raises(StepRefused, match="something else"):
        wnn.norm_from_module(Patched(24, eps=1e-6))


def test_a_part_of_a_norm_that_was_replaced_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _transformers_norm("Gemma3RMSNorm")
    wnn.norm_from_module(module)
    monkeypatch.setattr(type(module), "_norm", lambda self, x: 2 * x)
    with pytest.raises(StepRefused, match="something else"):
        wnn.norm_from_module(module)


def test_a_proof_of_a_large_norm_runs_on_one_core() -> None:
    """PyTorch shares work of more numbers out to all cores, which eight processes at a time wait for."""
    seen: list[int] = []

    class Large(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.numel())
            return super().forward(x)

    for size in (2048, 2304, 16_384, 50_000):
        seen.clear()
        wnn.norm_from_module(Large(size, eps=1e-6))
        assert seen and all(count <= max(32_768, size) for count in seen)


def test_a_norm_without_a_weight_that_computes_something_else_is_refused() -> None:
    for module in (Clamped(24, eps=1e-6, elementwise_affine=False), EpsOutside(24)):
        with pytest.raises(StepRefused, match="something else than RMSNorm"):
            wnn.norm_from_module(module)
    assert wnn.norm_from_module(nn.RMSNorm(24, eps=1e-6, elementwise_affine=False)).weight is None


def test_a_norm_that_none_of_ours_computes_is_refused_for_its_first_difference() -> None:
    with pytest.raises(StepRefused, match="something else than RMSNorm"):
        wnn.norm_from_module(EpsOutside(24))


def _hooked() -> nn.Module:
    module = nn.LayerNorm(24)
    module.register_forward_hook(lambda *_args: None)
    return module


def _no_eps() -> nn.Module:
    return nn.Linear(24, 24)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(EpsOutside(24), "something else", id="eps-outside-the-root"),
        # its fresh weight of ones hides it from a probe that keeps the weights
        pytest.param(IgnoresWeight(24, eps=1e-6), "something else", id="weight-ignored"),
        pytest.param(Clamped(24, eps=1e-6), "something else", id="clamped"),
        pytest.param(Gated(24), "parameters beside weight and bias: gate", id="extra-parameter"),
        pytest.param(Failing(24, eps=1e-6), "fails on a probe", id="other-arguments"),
        pytest.param(nn.LayerNorm((4, 6)), "normalises 2 dimensions", id="two-dimensions"),
        pytest.param(_hooked(), "hooks", id="hooks"),
        pytest.param(nn.Linear(24, 24), "2 dimensions|no variance_epsilon", id="linear"),
        pytest.param(nn.BatchNorm1d(24), "beside weight and bias", id="batch-norm"),
        pytest.param(nn.Identity(), "neither a weight", id="identity"),
    ],
)
def test_other_modules_are_refused(module: nn.Module, message: str) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(StepRefused, match=message):
        wnn.norm_from_module(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), "the module was changed by the probe"


def test_add_rms_norm_module() -> None:
    norm = nn.RMSNorm(24, eps=1e-5)
    randomise(norm)
    made = wnn.AddRMSNorm.from_module(norm)
    assert made.weight is norm.weight
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    y, h = made(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, norm(x + residual), rtol=1e-5, atol=1e-6)


def test_add_layer_norm_module() -> None:
    norm = nn.LayerNorm(24, eps=1e-4)
    randomise(norm)
    made = wnn.AddLayerNorm.from_module(norm)
    assert made.weight is norm.weight and made.bias is norm.bias
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    y, h = made(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, norm(x + residual), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax_module(dim: int) -> None:
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(wnn.Softmax(dim)(x), torch.softmax(x, dim))


@pytest.mark.parametrize("packed", [False, True])
def test_activation_modules(packed: bool) -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    args: tuple[Any, ...] = (torch.cat((gate, up), -1),) if packed else (gate, up)
    functional = nn.functional
    torch.testing.assert_close(wnn.SiluAndMul()(*args), functional.silu(gate) * up)
    torch.testing.assert_close(wnn.GeluAndMul()(*args), functional.gelu(gate) * up)
    torch.testing.assert_close(wnn.GeluAndMul("tanh")(*args), functional.gelu(gate, approximate="tanh") * up)


def test_modules_train() -> None:
    made = wnn.RMSNorm(8)
    made(torch.randn(3, 8)).sum().backward()
    assert made.weight is not None and made.weight.grad is not None


def test_state_dicts_are_those_of_torch() -> None:
    assert set(wnn.LayerNorm(8).state_dict()) == set(nn.LayerNorm(8).state_dict())
    assert set(wnn.RMSNorm(8).state_dict()) == set(nn.RMSNorm(8).state_dict())
