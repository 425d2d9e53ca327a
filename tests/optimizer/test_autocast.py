"""Optimized models in autocast: what is computed in 16 bits, as PyTorch does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wavecrest
from tests.optimizer.test_copied import ATTEND, CASES, Case, answer, language, optimized, tokens
from wavecrest.nn import Linear, functional
from wavecrest.nn import attention as ours
from wavecrest.nn.linear import linear_on

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.bfloat16, torch.float16)
# transformers' static cache takes no keys and values of two dtypes, as autocast makes them
CACHED = {"attention:pack_gqa", "fuse_append", "together"}
ALL = {name: case for name, case in CASES.items() if not name.startswith("compile") and name not in {*CACHED, "masks"}}
ALL["attention and autocast"] = Case(
    language("Llama"), tokens, [ATTEND, ("precision:bf16", {"precision": "bf16"})]
)  # fmt: skip


EPS = 2.0**-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_an_optimized_model_is_as_near_as_the_model(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, name, ALL[name])
    made, model, inputs = optimized(name, monkeypatch)
    exact = answer(model, inputs)
    with torch.autocast("cpu", dtype):
        theirs = answer(model, inputs)
    # its own: weights that were cast for one are kept for others, of another dtype too
    with torch.autocast("cpu", dtype):
        mine = answer(made, inputs)
    # PyTorch has one operation for an encoder layer, which rounds more than its parts; the last three give float32
    if name not in {"replace_encoder", "precision:bf16", "precision:fp16", "attention and autocast"}:
        assert mine.dtype == theirs.dtype
    # padded rows are zeros
    shown = inputs["attention_mask"].bool() if name == "unpad" else ...
    error, limit = (float((one[shown].float() - exact[shown]).abs().max()) for one in (mine, theirs))
    assert error <= 2 * limit + EPS * float(exact.abs().max())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and bool((mine - theirs).abs().max() <= 2 * EPS * theirs.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [None, "added", "bool"])
def test_attention_is_pytorchs(masked: str | None, dtype: torch.dtype) -> None:
    q, k, v = drawn(2, 4, 5, 8), drawn(2, 4, 6, 8), drawn(2, 4, 6, 8, dtype=dtype)
    bias = drawn(5, 6)
    mask = {"added": bias, "bool": bias > -1}.get(masked or "")
    with torch.autocast("cpu", dtype):
        theirs = F.scaled_dot_product_attention(q, k, v, mask)
        assert theirs.dtype == dtype
        for function in (ours.sdpa, functional.attention, wavecrest.attention):
            assert same(function(q, k, v, mask), theirs)
        added = None if mask is None else (ours.as_bias(mask, torch.float32) if masked == "bool" else bias)
        found, _ = ours.attend(
            nn.Identity(), q, k, v, None if added is None else added.expand(2, 1, 5, 6), is_causal=False
        )
        assert same(found.transpose(1, 2), theirs)
        compact = ours.compact_mask(torch.arange(6).expand(2, 6) == 1, 4, 6, "cpu")
        i, j = torch.arange(5)[:, None] + 1, torch.arange(6)
        wanted = F.scaled_dot_product_attention(q, k, v, (j <= i) & (j > i - 4) & (j != 1))
        assert same(ours.attend(nn.Identity(), q, k, v, compact)[0].transpose(1, 2), wanted)
        # it casts no float64
        wide = [one.double() for one in (q, k, v)]
        assert ours.sdpa(*wide).dtype == F.scaled_dot_product_attention(*wide).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemms_are_pytorchs(dtype: torch.dtype) -> None:
    layer, residual = nn.Linear(8, 6), drawn(3, 6)
    made = Linear.from_module(layer)
    for x in (drawn(3, 8), drawn(3, 8, dtype=dtype)):
        with torch.autocast("cpu", dtype), torch.no_grad():
            theirs = layer(x)
            assert same(made(x), theirs)
            assert same(functional.linear(x, layer.weight, layer.bias), theirs)
            assert same(linear_on(x, layer.weight, layer.bias, None, "torch"), theirs)
            assert same(functional.matmul(x, layer.weight.mT), torch.matmul(x, layer.weight.mT))
            assert same(made(x, residual), theirs + residual)
            norm = F.rms_norm(x.float(), (8,), layer.weight[0], 1e-6).to(x.dtype)
            assert same(made(x, norm_weight=layer.weight[0].to(x.dtype)), layer(norm))
    image, kernel = drawn(1, 3, 5, 5), drawn(4, 3, 2, 2)
    with torch.autocast("cpu", dtype):
        assert same(functional.conv2d(image, kernel), F.conv2d(image, kernel))


def test_gradients_and_compilation() -> None:
    layer = nn.Linear(8, 6)
    made, x = Linear.from_module(layer), drawn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made(x).sum().backward()
        mine = layer.weight.grad
        layer.weight.grad = None
        layer(x).sum().backward()
        assert mine is not None and layer.weight.grad is not None and same(mine, layer.weight.grad)
        compiled = torch.compile(made, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert same(compiled(x), layer(x))
        q = drawn(1, 2, 4, 8)
        attended = torch.compile(ours.sdpa, backend="eager", fullgraph=True)
        assert same(attended(q, q, q), F.scaled_dot_product_attention(q, q, q))
