"""torch.export of optimized models: the same answers from PyTorch's operations alone, and what cannot be exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wavecrest
from wavecrest import hardware
from wavecrest.errors import Unsupported
from wavecrest.graphs.capture import CapturedModule
from wavecrest.graphs.inductor import PRESETS, compile_module
from wavecrest.integrations import export as integration
from wavecrest.measure.workload import from_example
from wavecrest.nn import Linear, RMSNorm
from wavecrest.ops._flash_attention.backend import op as flash_attention
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id

X = torch.linspace(-1, 1, 160).reshape(2, 5, 16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).view(2, -1, 2, 8).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return F.gelu(self.out(y))


def optimized(*names: str) -> tuple[nn.Module, nn.Module]:
    """A model, and what some steps make of it."""
    model = Model().eval()
    context = StepContext(from_example(model, X), hardware.cpu(), model=model)
    applied = AppliedSteps()
    for name in names:
        step = step_by_id(name)
        found = step.find(context)
        assert found.sites, f"{name}: {found.note}"
        applied = applied.plus(step, found.params)
        context.model = build(model, applied)
    return model, build(model, applied)


def test_an_optimized_model_gives_the_same_answers() -> None:
    gemm.force("onednn")
    flash_attention.force("triton")
    model, made = optimized("fuse_parallel", "route_linear", "replace_sdpa")
    program = integration.export(made, X)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X), model(X), rtol=1e-5, atol=1e-6)
    # three layers of one input are one
    linears = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(linears) == 2
    # what was forced before is forced still
    assert (gemm._forced, flash_attention._forced) == ("onednn", "triton")


def test_compilation_and_capture_are_taken_off() -> None:
    model = Model().eval()
    made = Model().eval()
    compile_module(made, PRESETS["graph"])
    for one in (made, CapturedModule(made)):
        program = integration.export(one, X)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(X), model(X), rtol=1e-5, atol=1e-6)
    assert made._compiled_call_impl is not None


class Ours(nn.Module):
    """Modules of wavecrest.nn."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = RMSNorm(16), Linear(16, 16, activation="gelu") if linear else nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return wavecrest.softmax(self.linear(self.norm(x)))


SIZES = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}


@pytest.mark.parametrize("strict", [False, True])
def test_free_sizes(strict: bool) -> None:
    model = Ours(linear=False).eval()
    program = integration.export(model, X, dynamic_shapes=SIZES, strict=strict)
    with torch.no_grad():
        for x in (X, X[:1], X.repeat(3, 1, 1)):
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-6)


def test_our_linear_layers_have_fixed_rows() -> None:
    model = Ours(linear=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(integration.export(model, X).module()(X), model(X), rtol=1e-5, atol=1e-6)
    with pytest.raises(Unsupported, match="Ours cannot be exported"):
        integration.export(model, X, dynamic_shapes=SIZES)


class Named(nn.Module):
    """An operation of wavecrest that a compile step puts into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return torch.ops.wavecrest.linear_on(x, self.linear.weight, self.linear.bias, None, "torch")


class Reads(Model):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_what_cannot_be_exported_says_why() -> None:
    import wavecrest.graphs.activations

    with pytest.raises(Unsupported, match=r"with wavecrest[.]linear_on"):
        integration.export(Named().eval(), X)
    with pytest.raises(Unsupported, match="Reads cannot be exported"):
        integration.export(Reads().eval(), X)
    with pytest.raises(Unsupported, match="2 buckets"):
        integration.export(Model().eval(), wavecrest.Buckets(a=X, b=X[:1]))
    assert gemm._forced is None
