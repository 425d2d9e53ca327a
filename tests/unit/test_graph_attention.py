"""Attention that a model writes out becomes one call where that is safe, and the answers stay, of hidden rows too."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from wavecrest.graphs import attention, fusions
from wavecrest.graphs.nodes import tensors
from wavecrest.graphs.root import traceable
from wavecrest.nn.attention import AttentionFallback
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

INFINITE = float("-inf")
BATCH, HEADS, LENGTH, WIDTH = 3, 2, 6, 4


class Attention(nn.Module):
    """Projections of x [B, S, H · D] around a function of (module, q, k, v, mask), with a table of biases."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.table = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.register_buffer("none", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1))
        # of two kinds of windows, in the order of the batch
        self.register_buffer("windows", torch.where(torch.rand(3, LENGTH, LENGTH) < 0.3, -100.0, 0.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        result = self.function(self, q, k, v, mask)
        return result.transpose(1, 2).reshape(x.shape) if isinstance(result, Tensor) else result


X = torch.linspace(-2, 2, BATCH * LENGTH * HEADS * WIDTH).reshape(BATCH, LENGTH, -1).sin()
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)


def run(module: nn.Module, *args: Any, inductor: bool = False) -> tuple[int, Any, Any, list[FlashAttentionCall]]:
    """How much was replaced in a compiled call, its answer, the module's, and the calls of the op."""
    count, calls = 0, []

    def chosen(call: FlashAttentionCall) -> str:
        calls.append(call)
        return ""

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        nonlocal count
        made = fusions.rewrite(graph, module, {}, inductor=inductor, attentions=chosen)
        count += made.counts.attention
        return made.call(made.graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(traceable(module), backend=backend, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            made = compiled(*args)
        return count, made, module(*args), calls


def same(made: Any, expected: Any) -> None:
    torch.testing.assert_close(made, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def plain(scores: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1) @ v


def filled(m: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, number: float) -> Tensor:
    return plain((q @ k.mT / math.sqrt(WIDTH)).masked_fill(hidden, number), v)


def shifted(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
    """Swin: windows lie in the batch, and each has a mask of its own."""
    scores = (q * 0.5) @ k.transpose(-2, -1) + m.table.unsqueeze(0)
    scores = scores.view(-1, 3, HEADS, LENGTH, LENGTH) + m.windows.unsqueeze(1).unsqueeze(0)
    return F.dropout(scores.view(-1, HEADS, LENGTH, LENGTH).softmax(-1), 0.5, training=m.training) @ v


def in_three(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
    """DeBERTa: heads lie in the batch, but for the mask."""
    q, k, v = (one.reshape(-1, LENGTH, WIDTH) for one in (q, k, v))
    bias = torch.bmm(q, m.table.repeat(BATCH, 1, 1)[:, :WIDTH])
    scores = (torch.bmm(q, k.transpose(1, 2) / 2) + bias).view(BATCH, HEADS, LENGTH, LENGTH)
    weights = scores.masked_fill(~m.causal, torch.finfo(scores.dtype).min).softmax(dim=3)
    return torch.bmm(weights.view(-1, LENGTH, LENGTH), v).view(BATCH, HEADS, LENGTH, WIDTH)


def in_place(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores *= 0.5
    scores += m.table
    return torch.matmul(torch.softmax(scores.float(), -1).type_as(q), v)


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v, _mask: plain(q @ k.mT, v),
        lambda m, q, k, v, _mask: plain(0.3 * (q @ k.mT) / m.temperature / 2.0 + m.table, v),
        lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.causal, INFINITE),
        lambda m, q, k, v, _mask: plain(torch.where(m.causal, q @ k.mT, -1e9), v).clone(),
        shifted,
        in_three,
        in_place,
    ],
    ids=["plain", "scaled", "causal", "where", "windows", "three dimensions", "in place"],
)
def test_attention_is_one_call(function: Any, inductor: bool) -> None:
    count, made, expected, calls = run(Attention(function).eval(), X, inductor=inductor)
    assert count == len(calls) == 1
    same(made, expected)


def test_a_bias_is_neither_copied_for_each_sequence_nor_head() -> None:
    calls = run(Attention(shifted).eval(), torch.cat([X, X]))[3]
    # two images of three windows: a batch of 2, and windows beside heads
    assert calls[0].q.shape[:2] == (2, 3 * HEADS) and calls[0].bias.shape == (1, 3 * HEADS, LENGTH, LENGTH)
    calls = run(Attention(lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], INFINITE)), X, PADDING)[3]
    assert calls[0].q.shape[:2] == (BATCH, HEADS) and calls[0].bias.shape == (BATCH, 1, 1, LENGTH)


def extended(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    added = (1.0 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return plain(q @ k.mT + (m.table + added), v)


def added(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, INFINITE)
    return plain(q @ k.mT + m.table + hidden[:, None, None], v)


def both(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.where(m.causal, 0.0, INFINITE)
    return plain((q @ k.mT + hidden).masked_fill(~mask[:, None, None], -1e9), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], INFINITE),
        lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], torch.finfo(q.dtype).min),
        lambda m, q, k, v, mask: filled(m, q, k, v, ~(mask[:, None, None] & m.causal), -1e4),
        lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.none, INFINITE),
        lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.none, torch.finfo(q.dtype).min),
        extended,
        added,
    ],
    ids=["infinite", "least", "large", "constant infinite", "constant least", "extended", "added"],
)
def test_a_query_that_sees_no_key_keeps_its_answer(function: Any, dtype: torch.dtype) -> None:
    count, made, expected, _ = run(Attention(function).eval().to(dtype), X.to(dtype), PADDING)
    assert count == 1
    assert torch.isfinite(expected).all() != bool(torch.isnan(made).any())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_fill_after_a_mask_decides() -> None:
    count, made, expected, _ = run(Attention(both).eval(), X, PADDING)
    assert count == 1
    same(made, expected)


def test_rows_are_not_put_right_where_no_mask_can_hide_one() -> None:
    def nodes(function: Any, *args: Any) -> str:
        module = Attention(function).eval()
        traced = fusions.trace(module, fusions.Inputs(args))
        with torch.no_grad():
            made = fusions.rewrite(traced.graphs[0], module, {}, inductor=False, attentions=lambda _call: "")
        return str(made.graph.graph)

    constant = nodes(lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.causal, INFINITE), X)
    assert "without_rows" not in constant and "attend" in constant
    assert "without_rows" in nodes(lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.none, INFINITE), X)
    assert "without_rows" in nodes(
        lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], INFINITE), X, PADDING
    )


def test_a_bias_that_changes_is_read_again() -> None:
    module = Attention(lambda m, q, k, v, _mask: plain(q @ k.mT + m.table.exp(), v)).eval()
    made = []

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        made.append(fusions.rewrite(graph, module, {}, inductor=False, attentions=lambda _call: ""))
        return made[0].call(made[0].graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(traceable(module), backend=backend, dynamic=False)
    with torch.no_grad():
        same(compiled(X), module(X))
        module.table.mul_(-1.5)
        same(compiled(X), module(X))
    assert made[0].counts.constants and made[0].counts.attention


def returned(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def stored(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Any:
    scores = q @ k.mT
    return plain(scores, v), scores.amax()


def changed(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    q.zero_()
    return weights @ v + q


def bias_changed(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
    bias = m.table * 2
    weights = (q @ k.mT + bias).softmax(-1)
    bias.zero_()
    return weights @ v + bias.sum()


@pytest.mark.parametrize(
    "function",
    [
        returned,
        stored,
        changed,
        bias_changed,
        lambda m, q, k, v, _mask: F.dropout((q @ k.mT).softmax(-1), 0.0001, training=True) @ v,
        lambda m, q, k, v, _mask: (q @ k.mT).softmax(-2) @ v,
        lambda m, q, k, v, _mask: v.mT @ (q @ k.mT).softmax(-1),
        lambda m, q, k, v, _mask: plain((q @ k.mT + m.table) * 0.5, v),
        lambda m, q, k, v, _mask: plain(-(q @ k.mT), v),
        lambda m, q, k, v, _mask: plain(q @ k.mT * -1.0, v),
        lambda m, q, k, v, _mask: plain(q @ k.mT * m.table, v),
        lambda m, q, k, v, _mask: plain((q @ k.mT).masked_fill(m.causal, 0.0), v),
        lambda m, q, k, v, _mask: plain((q @ k.mT).masked_fill(m.causal, -3.0), v),
        lambda m, q, k, v, _mask: plain((q @ k.mT).tanh(), v),
        lambda m, q, k, v, _mask: plain((q @ k[:, :1].mT), v),
        lambda m, q, k, v, _mask: plain((q[:1, :1] @ k[:1, :1].mT) + m.table, v),
        lambda m, q, k, v, _mask: plain((q @ k.mT).transpose(0, 1).contiguous(), v.transpose(0, 1)).transpose(0, 1),
        lambda m, q, k, v, _mask: plain((q @ k.mT).view(BATCH, HEADS, -1, 1).view(BATCH, HEADS, LENGTH, LENGTH), v),
        lambda m, q, k, v, _mask: (q.double() @ k.double().mT).softmax(-1).float() @ v,
        lambda m, q, k, v, _mask: (q @ k.mT).bfloat16().softmax(-1).float() @ v,
    ],
)
def test_what_is_left_alone(function: Any) -> None:
    count, made, expected, _ = run(Attention(function), X)
    assert count == 0
    same(made, expected)


@pytest.mark.parametrize(("place", "count"), [("before", 1), ("between", 0)])
def test_a_kernel_in_the_graph_writes_its_arguments_and_nothing_else(place: str, count: int) -> None:
    """wavecrest's norms are Triton kernels there: behind them no attention and no constant was found (2026-11-28)."""
    found: list[int] = []
    module = Attention(lambda m, q, k, v, _mask: plain(q @ k.mT + m.table.exp(), v))

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        nodes = list(graph.graph.nodes)
        product, weights = (next(i for i, one in enumerate(nodes) if one.target in wanted) for wanted in (
            attention.GEMMS, attention.SOFTMAXES
        ))  # fmt: skip
        (x,) = [one for one in nodes if one.op == "placeholder" and tensors(one)[0].shape == X.shape]
        # q, before or after the scores have read it
        written, behind = (x, x) if place == "before" else (nodes[product].args[0], nodes[weights])
        with graph.graph.inserting_after(behind):
            graph.graph.call_function(triton_kernel_wrapper_mutation, (), {
                "kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {},
                "kwargs": {"x_ptr": written},
            })  # fmt: skip
        made = fusions.rewrite(graph, module, {}, inductor=False, attentions=lambda _call: "")
        found.extend((made.counts.attention, made.counts.constants))
        # there is no such kernel to be called
        return lambda *_args: (torch.zeros_like(X),)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, dynamic=False)(X)
    assert found[0] == count and found[1] > 0


def test_gradients_keep_pytorchs_own() -> None:
    module = Attention(shifted).eval()
    found = []

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        found.append(fusions.rewrite(graph, module, {}, inductor=False, attentions=lambda _call: "").counts)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(traceable(module), backend=backend, dynamic=False)(X).sum().backward()
    assert found == [fusions.Counts()]


def test_on_a_cpu_nothing_is_replaced_by_default() -> None:
    call = FlashAttentionCall(*[torch.randn(1, 2, 3, 4)] * 3, "bhsd")
    assert attention.by_dispatch(call) is None
    long = FlashAttentionCall(*[torch.empty(1, 2, attention.SHORT, 4, device="meta")] * 3, "bhsd")
    assert attention.by_dispatch(long) == ""


def test_a_backend_that_refuses_leaves_the_call_to_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.nn.attention._warned", set())
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with pytest.warns(AttentionFallback, match="runs on dispatch's choice for flash_attention: backend aiter refuses"):
        made = attention.attend(q, k, v, None, 0.5, "aiter")
    torch.testing.assert_close(made, attention.attend(q, k, v, None, 0.5))


def test_short_attention_stays_written_out_but_for_measured_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    short = FlashAttentionCall(*[torch.empty(1, 2, attention.SHORT - 1, 4, device="meta")] * 3, "bhsd")
    for backend, chosen in (("torch", None), ("torch_cudnn", None), ("triton", "")):
        monkeypatch.setattr(type(op), "decide", lambda _op, _call, backend=backend: SimpleNamespace(backend=backend))
        assert attention.by_dispatch(short) == chosen


def test_a_bias_keeps_its_dtype() -> None:
    """Scores in float32 beside q of 16 bits: the bias is not rounded to 16 bits."""

    def wide(m: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return ((q @ k.mT).float() + m.table.float() * 100.03).softmax(-1).to(v.dtype) @ v

    count, made, expected, calls = run(Attention(wide).eval().bfloat16(), X.bfloat16())
    assert count == 1 and calls[0].bias.dtype == torch.float32
    torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cut", [False, True])
def test_the_kernel_takes_what_the_graph_gives(cut: bool) -> None:
    """The same bias through the Triton kernel: hidden rows, numbers that overflow beside a score, other strides."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 3, 16)[..., : 8 if cut else 16].transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 3, 5, 5).where(torch.rand(2, 1, 5, 5) < 0.5, torch.finfo(torch.float32).min)
    bias[0, :, 2] = torch.finfo(torch.float32).min
    top = attention._largest(bias)
    limit = torch.finfo(torch.float32).min / 2
    kept = attention._without_rows(q, top, limit), attention._shown(bias, top, limit)
    call = FlashAttentionCall(kept[0].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias=kept[1])
    made = op.run("triton", call).transpose(1, 2)
    expected = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["", "triton"])
@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "function",
    [
        shifted,
        in_three,
        lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], INFINITE),
        lambda m, q, k, v, mask: filled(m, q, k, v, ~mask[:, None, None], torch.finfo(q.dtype).min),
        lambda m, q, k, v, _mask: filled(m, q, k, v, ~m.none, INFINITE),
        lambda m, q, k, v, _mask: ((q @ k.mT).float() + m.table.float()).softmax(-1).to(v.dtype) @ v,
        extended,
    ],
    ids=["windows", "three dimensions", "infinite", "least", "constant", "wide", "extended"],
)
def test_on_a_gpu(function: Any, dtype: torch.dtype, inductor: bool, backend: str) -> None:
    module = Attention(function).eval().to("cuda", dtype)
    x, mask = X.to("cuda", dtype), PADDING.cuda()
    torch._dynamo.reset()
    with torch.no_grad():
        traced = fusions.trace(module, fusions.Inputs((x, mask)))
        # the two terms of a sum may both be scores; one call is made of them
        backends = {attention.name_of(call): backend for call in fusions.attention_calls(traced)}
        counts = fusions.count(traced, module, {}, inductor=inductor, attentions=backends)
        made_by = fusions.backend(module, {}, inductor=inductor, attentions=backends)
        compiled = torch.compile(traceable(module), backend=made_by, dynamic=False)
        made, expected = compiled(x, mask), module(x, mask)
    assert counts.attention == 1
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
