"""Dispatch's choices on a model in one call, and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import wavecrest
from wavecrest.errors import WorkloadError
from wavecrest.ops._flash_attention.backend import op as flash_attention
from wavecrest.ops._gemm.backend import op as gemm


class Norm(nn.Module):
    """RMSNorm as models write it, with a class of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OwnRMSNorm(Norm):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = OwnRMSNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.a(self.norm(x)).view(2, 5, 2, 8).transpose(1, 2)
        return self.b(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 5, 16))


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """Dispatch chooses something else than PyTorch's kernels, as measured rows make it do on a GPU."""
    gemm.force("onednn")
    yield
    gemm.force(None)
    flash_attention.force(None)


X = torch.linspace(-1, 1, 160).reshape(2, 5, 16)


def modules(model: nn.Module) -> list[tuple[str, int, type]]:
    return [(name, id(one), type(one)) for name, one in model.named_modules()]


def test_in_place_and_back() -> None:
    model = Model().eval()
    before, keys = modules(model), list(model.state_dict())
    with torch.no_grad():
        expected = model(X)
        with wavecrest.route(model, X) as routed:
            assert routed is model and type(model.a) is wavecrest.nn.Linear and type(model.norm) is wavecrest.nn.RMSNorm
            assert list(model.state_dict()) == keys
            torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-6)
        assert modules(model) == before
        assert torch.equal(model(X), expected)


def test_what_was_changed_and_why_not() -> None:
    model = Model().eval()
    made = wavecrest.route(model, X)
    assert made.sites == {"route_linear": ["a", "b"], "replace_norm": ["norm"]}
    assert repr(made) == "Routed(Model: route_linear 2, replace_norm 1)"
    assert "no other kernel than PyTorch's" in made.notes["replace_sdpa"]
    # weights that change meanwhile are both's
    with torch.no_grad():
        model.b.weight.zero_()
    made.undo()
    made.undo()
    assert type(model.b) is nn.Linear and not model.b.weight.any()


def test_attention_goes_back_too() -> None:
    flash_attention.force("reference")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    model = transformers.BertModel(config).eval()
    before = modules(model)
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        expected = model(ids)[0]
        with wavecrest.route(model, {"input_ids": ids}):
            torch.testing.assert_close(model(ids)[0], expected, rtol=1e-4, atol=1e-5)
        assert modules(model) == before and model.config._attn_implementation == "sdpa"


def test_a_model_that_cannot_be_called_is_as_it_was() -> None:
    model = Model().eval()
    before = modules(model)
    with pytest.raises((WorkloadError, RuntimeError)):
        wavecrest.route(model, torch.randn(2, 5, 3))
    assert modules(model) == before
