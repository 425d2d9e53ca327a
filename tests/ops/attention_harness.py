"""Shared by the attention tests: an oracle of plain loops, bounds, calls of every layout and comparison.

Not a test file: `tests/ops/test_flash_attention.py` has the cases.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.op_harness import random
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

OP = "flash_attention"
# half a unit in the last place
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
# several tiles of small calls, which neither queries nor keys fill
SMALL = Config(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
LONG = Config(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
TALL = Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1)
HEADS = 4


def tensors(
    batch: int,
    queries: int,
    keys: int,
    heads: int = 2,
    kv_heads: int | None = None,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "bshd",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with scores that differ enough for a wrong one to show."""
    kv_heads, dv = kv_heads or heads, dv or d

    def made(tokens: int, count: int, columns: int, at: int) -> Tensor:
        x = random((batch, tokens, count, columns), dtype, device, seed + at)
        return x.transpose(1, 2).contiguous() if layout == "bhsd" else x

    return made(queries, heads, d, 0), made(keys, kv_heads, d, 1), made(keys, kv_heads, dv, 2)


def option(key: str, queries: int, keys: int, device: str, batch: int = 2, heads: int = HEADS) -> dict[str, Any]:
    """Options by the name of a case."""

    def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 9) -> Tensor:
        return random(shape, dtype, device, seed)

    return {
        "plain": dict,
        "causal": lambda: {"causal": True},
        "left": lambda: {"window": (5, -1)},
        "right": lambda: {"window": (-1, 4)},
        "window": lambda: {"window": (11, 6)},
        "own key alone": lambda: {"window": (0, 0)},
        "wide window": lambda: {"window": (1 << 40, 1 << 40)},
        "causal window": lambda: {"causal": True, "window": (19, 7)},
        "scale": lambda: {"softmax_scale": 0.7},
        "no scale": lambda: {"softmax_scale": 0.0},
        "softcap": lambda: {"softcap": 1.5},
        "alibi": lambda: {"alibi_slopes": made(heads).abs() / 4},
        "alibi a sequence": lambda: {"alibi_slopes": made(batch, heads).abs() / 4},
        "bias": lambda: {"bias": made(batch, heads, queries, keys)},
        "bias a head": lambda: {"bias": made(heads, queries, keys, dtype=torch.float16)},
        "bias a key": lambda: {"bias": made(batch, 1, 1, keys, dtype=torch.bfloat16)},
        "bias a query": lambda: {"bias": made(queries, 1)},
        "bias transposed": lambda: {"bias": made(batch, 1, keys, queries).mT},
        "sinks": lambda: {"sinks": 2 * made(heads)},
        "sinks softcap bias": lambda: {"sinks": made(heads), "softcap": 2.0, "bias": 2 * made(queries, keys)},
        "everything": lambda: {
            "causal": True, "window": (21, -1), "softmax_scale": 0.4, "softcap": 3.0, "sinks": made(heads),
            "alibi_slopes": made(heads).abs() / 4, "bias": made(1, heads, queries, keys),
        },
    }[key]()  # fmt: skip


CASES = (
    "plain", "causal", "left", "right", "window", "own key alone", "wide window", "causal window", "scale", "no scale",
    "softcap", "alibi", "alibi a sequence", "bias", "bias a head", "bias a key", "bias a query", "bias transposed",
    "sinks", "sinks softcap bias", "everything",
)  # fmt: skip


def packed(
    lengths_q: list[int], lengths_k: list[int], heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k and v of sequences behind one another, and the options that say so."""
    q = random((sum(lengths_q), heads, d), dtype, device, 0)
    k, v = (random((sum(lengths_k), kv_heads, d), dtype, device, seed) for seed in (1, 2))

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)

    options = {
        "layout": "thd",
        "cu_seqlens_q": starts(lengths_q),
        "cu_seqlens_k": starts(lengths_k),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return (q, k, v), options


def loops(
    q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall, sequence: int, head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One head of one sequence, query by query and key by key, in Python's floats: result, its logarithms, Σ p |v|.

    q [Sq, D], k [Sk, D], v [Sk, Dv]; no code in common with the reference.
    """
    Sq, Sk, Dv = q.shape[0], k.shape[0], v.shape[1]
    queries, keys, values = q.double().tolist(), k.double().tolist(), v.double().cpu()
    scale = q.shape[1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    bias, slopes = call.bias, call.alibi_slopes
    if bias is not None:
        bias = bias.double().broadcast_to(call.batch, call.heads, call.seqlen_q, call.seqlen_k)[sequence, head].cpu()
    if slopes is not None:
        slope = float((slopes if slopes.ndim == 1 else slopes[sequence])[head])
    out, lse = torch.zeros(Sq, Dv, dtype=torch.float64), torch.full((Sq,), -math.inf, dtype=torch.float64)
    mass = torch.zeros(Sq, Dv, dtype=torch.float64)
    for i in range(Sq):
        own = i + Sk - Sq
        scores, seen = [], []
        for j in range(Sk):
            if call.causal and j > own:
                continue
            if call.window[0] != -1 and j < own - call.window[0]:
                continue
            if call.window[1] != -1 and j > own + call.window[1]:
                continue
            s = scale * math.fsum(a * b for a, b in zip(queries[i], keys[j], strict=True))
            if call.softcap > 0:
                s = call.softcap * math.tanh(s / call.softcap)
            if bias is not None:
                s += float(bias[i, j])
            if slopes is not None:
                s -= slope * abs(own - j)
            scores.append(s)
            seen.append(j)
        every = [*scores, float(call.sinks[head])] if call.sinks is not None else scores
        top = max(every, default=-math.inf)
        if top == -math.inf:
            continue
        total = math.fsum(math.exp(s - top) for s in every)
        lse[i] = top + math.log(total)
        for s, j in zip(scores, seen, strict=True):
            if s > -math.inf:
                out[i] += math.exp(s - top) / total * values[j]
                mass[i] += math.exp(s - top) / total * values[j].abs()
    return out, lse, mass


def exact(call: FlashAttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(the result, its logarithms, Σ p |v|) in float64, by the loops; for few tokens."""
    if call.packed:
        assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
        q_at, k_at = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
        out = torch.zeros(call.shape, dtype=torch.float64)
        mass, lse = torch.zeros_like(out), torch.full(call.lse_shape, -math.inf, dtype=torch.float64)
        for b in range(call.batch):
            rows, cols = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
            for h in range(call.heads):
                kv = h // call.group
                parts = loops(call.q[rows, h], call.k[cols, kv], call.v[cols, kv], call, b, h)
                out[rows, h], lse[h, rows], mass[rows, h] = parts
        return out, lse, mass
    q, k, v = (one.transpose(1, 2) if call.layout == "bshd" else one for one in (call.q, call.k, call.v))
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    mass, lse = torch.zeros_like(out), torch.zeros(q.shape[:-1], dtype=torch.float64)
    for b in range(call.batch):
        for h in range(call.heads):
            out[b, h], lse[b, h], mass[b, h] = loops(q[b, h], k[b, h // call.group], v[b, h // call.group], call, b, h)
    if call.layout == "bshd":
        out, mass = out.transpose(1, 2), mass.transpose(1, 2)
    return out, lse, mass


def wide(call: FlashAttentionCall) -> FlashAttentionCall:
    """The same call in float64, with its logarithms."""
    doubled = [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in call]
    return FlashAttentionCall(*doubled)._replace(return_lse=True)


def by_reference(call: FlashAttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """As `exact`, by the op's reference in float64."""
    call = wide(call)
    out, lse = op.reference(call)
    mass = op.reference(call._replace(v=call.v.abs(), return_lse=False))
    return out, lse, mass


def score_error(call: FlashAttentionCall, lse: Tensor) -> Tensor:
    """How far a row's scores may be off in float32, [..., 1] beside the result: of the sums, and of the scores.

    A sum of products has partial sums as large as |q| |k| (Cauchy and Schwarz) and a rounding of each; scores that
    count are of the size of the logarithm, which slopes and bias may make large.
    """
    if call.q.numel() == 0 or call.k.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=lse.device)
    norms = [one.double().norm(dim=-1).max().item() for one in (call.q, call.k)]
    size = 2.0**-22 * lse.abs().nan_to_num(0.0, posinf=0.0)
    return 2.0**-23 * call.scale * norms[0] * norms[1] + _beside_result(size, call.layout)


def _beside_result(row: Tensor, layout: str) -> Tensor:
    return (row if layout == "bhsd" else row.transpose(-1, -2))[..., None]


def lost_to_subnormals(call: FlashAttentionCall) -> Tensor:
    """Error of weights under 2⁻¹⁴ in float16, against Σ |v|, [B, 1, Hq, Dv] beside the result."""
    if call.v.dtype != torch.float16:
        return torch.zeros((), dtype=torch.float64, device=call.v.device)
    tokens = 0 if call.packed else 2 if call.layout == "bhsd" else 1
    total = call.v.double().abs().sum(dim=tokens, keepdim=True)
    return 2.0**-25 * total.repeat_interleave(call.group, dim=1 if call.layout != "bshd" else 2)


def assert_within(got: Tensor, want: Tensor, mass: Tensor, inner: float | Tensor, more: float | Tensor = 0.0) -> None:
    """Each element: rounded once, and its weights to `inner`, against Σ p |v|; `more`: beside that."""
    assert got.shape == want.shape
    want, mass = want.to(got.device), mass.to(got.device)
    allowed = 1.001 * ROUNDING[got.dtype] * want.abs() + inner * mass + more + 1e-7
    worse = (got.double() - want).abs() - allowed
    assert not worse.isnan().any(), "an element was not written, or what is hidden was read"
    assert (worse <= 0).all(), f"{int((worse > 0).sum())} of {worse.numel()} elements are off, by up to {worse.max()}"


def assert_lse(got: Tensor, want: Tensor, dtype: torch.dtype, more: float = 0.0) -> None:
    """`more`: what scores may be off by, beside the rounding of the logarithm."""
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and got.shape == want.shape
    want = want.to(got.device)
    assert torch.equal(got == float("-inf"), want == float("-inf"))
    known = want.isfinite()
    torch.testing.assert_close(got[known].double(), want[known], rtol=2e-6, atol=6e-6 + more)


def assert_attends(
    backend: str,
    call: FlashAttentionCall,
    config: Config | None = None,
    want: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """A backend's result and logarithms against float64; contiguous; arguments as they were."""
    call = call._replace(return_lse=backend != "torch")
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    chosen = {"config": config} if op.backends[backend].takes_config else {}
    got = op.run(backend, call, **chosen)
    want = want or by_reference(call)
    if backend != "torch":
        got, lse = got
        more = 2 * score_error(call, torch.zeros_like(want[1])).max().item() if got.is_cuda else 0.0
        assert_lse(lse, want[1], call.q.dtype, more)
        assert lse.is_contiguous()
    assert got.dtype == call.q.dtype and got.is_contiguous() and got.shape == call.shape
    # weights are rounded to v's dtype before they are multiplied, PyTorch's scores too
    inner = 1.01 * ROUNDING[call.q.dtype] + 1.5e-5
    if backend == "torch":
        inner = 8 * ROUNDING[call.q.dtype] + 1.5e-5
    off = torch.tensor(inner, dtype=torch.float64)
    if got.is_cuda:
        # sums of products by matrix units and chains of fused multiply-adds, longer calls
        off = inner + score_error(call, want[1]).to(got.device)
    assert_within(got, want[0], want[2], off, lost_to_subnormals(call).to(got.device))
    for one, kept in zip(call, before, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one.nan_to_num(7.0), kept.nan_to_num(7.0)), "an argument was written to"
    return got  # type: ignore[no-any-return]


class Accesses:
    """Holds kernels in Triton's interpreter to the elements of their arguments, without the gaps between rows.

    On a GPU nothing is watched: there `scripts/sanitize` looks for accesses outside of allocations.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = 0
        self._begins = self._ends = np.empty(0, dtype=np.int64)
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is None or torch.cuda.is_available():
            pytest.skip("watches Triton's interpreter")
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        arguments, read, write = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

        def entered(this: Any, args: Any, kwargs: Any) -> Any:
            made = arguments(this, args, kwargs)
            self._enter([getattr(arg, "base", arg) for arg in made[0]])
            return made

        def loaded(this: Any, pointers: Any, mask: Any, *more: Any, **options: Any) -> Any:
            self._look(pointers, mask)
            return read(this, pointers, mask, *more, **options)

        def stored(this: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            self._look(pointers, mask)
            return write(this, pointers, value, mask, *more)

        monkeypatch.setattr(executor, "_init_args_hst", entered)
        monkeypatch.setattr(builder, "create_masked_load", loaded)
        monkeypatch.setattr(builder, "create_masked_store", stored)

    def _enter(self, args: list[Any]) -> None:
        spans: set[tuple[int, int]] = set()
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.numel() > 0:
                places = torch.zeros((), dtype=torch.int64)
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                    places = places[..., None] + torch.arange(size) * stride
                begins = tensor.data_ptr() + places.flatten().unique() * tensor.itemsize
                spans |= {(begin, begin + tensor.itemsize) for begin in begins.tolist()}
        joined: list[list[int]] = []
        for begin, end in sorted(spans):
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        self._begins, self._ends = np.array(joined, dtype=np.int64).T

    def _look(self, pointers: Any, mask: Any) -> None:
        data = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        touched = data[np.broadcast_to(mask.data, data.shape).astype(bool)].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        span = np.searchsorted(self._begins, touched, side="right") - 1
        outside = (span < 0) | (touched + size > self._ends[span])
        assert not outside.any(), f"{int(outside.sum())} of {touched.size} accesses are outside of the arguments"
        self.counted += touched.size
