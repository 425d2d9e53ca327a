from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.attention_harness import (
    CASES,
    HEADS,
    LONG,
    OP,
    SMALL,
    TALL,
    Accesses,
    assert_attends,
    assert_lse,
    assert_within,
    by_reference,
    exact,
    option,
    packed,
    tensors,
    wide,
)
from tests.ops.op_harness import BACKENDS, DTYPES, assert_never_copies, assert_short, name, random, specialised
from wavecrest import hardware, ops
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import config as configs
from wavecrest.ops._flash_attention import launch as launches
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.study import visible_pairs
from wavecrest.ops._flash_attention.study.space import space_of

OURS = ("triton", "reference")
# queries and keys: none and one of either, a tile and one more or less, several tiles, more of the one or the other
LENGTHS = (
    (0, 5), (5, 0), (1, 1), (1, 17), (17, 1), (3, 64), (16, 16), (17, 33), (33, 17), (64, 64), (1, 129), (64, 129),
    (129, 64), (15, 49),
)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_lengths(queries: int, keys: int, causal: bool, device: str) -> None:
    call = FlashAttentionCall(*tensors(2, queries, keys, device=device), causal=causal)
    want = by_reference(call)
    for config in (SMALL, LONG):
        assert_attends("triton", call, config, want)
    assert_attends("reference", call, None, want)
    if not call.blind:
        assert_attends("torch", call, None, want)
    op.force("triton")
    # the bound call with the default configuration, which on a GPU skips Triton's look-up from the second time on
    for _ in range(3 if device == "cuda" else 1):
        assert torch.equal(op(call), op.run("triton", call))
    op.force(None)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (-1, 3)}, {"window": (5, -1)}, {"window": (6, 2)}], ids=str
)
def test_every_residue_of_the_lengths(options: dict[str, Any], device: str) -> None:
    """Where a mask's edge lies in a tile of keys: at its first key, its last one, and at each between."""
    for seqlen_k in range(33, 33 + 2 * SMALL["BLOCK_N"]):
        call = FlashAttentionCall(*tensors(1, 33, seqlen_k, 1, device=device), **options)
        assert_attends("triton", call, SMALL)


@pytest.mark.parametrize("bias", [False, True])
def test_pytorchs_mask_hides_a_single_pair(bias: bool, device: str) -> None:
    """Windows that leave all but one pair of a query and a key in sight, and all."""
    options = {"bias": random((9, 13), torch.float32, device, 5)} if bias else {}
    for window in ((-1, 7), (-1, 8), (11, -1), (12, -1), (11, 7), (12, 8)):
        assert_attends("torch", FlashAttentionCall(*tensors(1, 9, 13, device=device), window=window, **options))


@pytest.mark.parametrize("key", ["plain", "window", "everything"])
def test_nothing_outside_of_the_arguments_is_touched(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles of views with gaps, and packed sequences of which the last one ends the memory."""
    accesses = Accesses(monkeypatch)
    wide = [torch.randn(2, length, 2 * heads, 24) for length, heads in ((19, HEADS), (37, 2), (37, 2))]
    q, k, v = (one[:, :, ::2, 3:20] for one in wide)
    op.run("triton", FlashAttentionCall(q, k, v, return_lse=True, **option(key, 19, 37, "cpu")), config=SMALL)
    (q, k, v), starts = packed([5, 0, 17], [20, 3, 33], HEADS, 2, 17, torch.float32, "cpu")
    options = option(key, 17, 33, "cpu", 3)
    op.run("triton", FlashAttentionCall(q, k, v, return_lse=True, **starts, **options), config=SMALL)
    assert accesses.counted > 10_000


@pytest.mark.parametrize("lengths", [(7, 11), (11, 7), (6, 6)], ids=["more keys", "more queries", "square"])
@pytest.mark.parametrize("key", CASES)
def test_definition(key: str, lengths: tuple[int, int], device: str) -> None:
    """Each option against plain loops: the reference to the last digits, the kernel to those of float32."""
    options = option(key, *lengths, device)
    q, k, v = tensors(2, *lengths, HEADS, 2, 5, 3, device=device)
    call = FlashAttentionCall(q, k, v, **options)
    want = exact(call)
    out, lse = op.reference(wide(call))
    torch.testing.assert_close(out, want[0].to(device), rtol=1e-12, atol=1e-12)
    assert torch.equal(lse.isfinite().cpu(), want[1].isfinite())
    torch.testing.assert_close(lse.nan_to_num(), want[1].nan_to_num().to(device), rtol=1e-12, atol=1e-12)
    assert_attends("triton", call, SMALL, want)


@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (37, 90), (90, 37)])
@pytest.mark.parametrize("key", CASES)
def test_options(key: str, queries: int, keys: int, device: str) -> None:
    """Several tiles of each, for heads that share keys."""
    call = FlashAttentionCall(*tensors(2, queries, keys, HEADS, 2, device=device), **option(key, queries, keys, device))
    want = by_reference(call)
    for config in (SMALL, TALL) if device == "cuda" else ((SMALL, TALL)[len(key) % 2],):
        assert_attends("triton", call, config, want)
    if op.backends["torch"].refuse(call) is None:
        assert_attends("torch", call, None, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name)
def test_dtypes(dtype: torch.dtype, layout: str, backend: str, device: str) -> None:
    if dtype == torch.float64 and backend == "triton":
        pytest.skip("declined")
    call = FlashAttentionCall(*tensors(2, 40, 50, 4, 2, 32, 24, dtype, device, layout), layout=layout, causal=True)
    got = assert_attends(backend, call, SMALL if backend == "triton" else None)
    assert got.shape == ((2, 40, 4, 24) if layout == "bshd" else (2, 4, 40, 24))


# columns of q and k, of v
@pytest.mark.parametrize(
    ("d", "dv"), [(1, 1), (1, 40), (40, 1), (16, 16), (17, 15), (64, 128), (80, 80), (96, 64), (192, 128), (256, 256)]
)
def test_columns(d: int, dv: int, device: str) -> None:
    dtype = DTYPES[(d + dv) % 3]
    bias = random((4, 19, 37), dtype, device, 5)
    call = FlashAttentionCall(*tensors(1, 19, 37, 4, 1, d, dv, dtype, device), causal=True, bias=bias)
    want = by_reference(call)
    for backend in BACKENDS:
        assert_attends(backend, call, SMALL if backend == "triton" else None, want)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_that_share_keys(layout: str, kv_heads: int, device: str) -> None:
    call = FlashAttentionCall(*tensors(2, 20, 33, 6, kv_heads, device=device, layout=layout), layout=layout)
    want = by_reference(call)
    for backend in BACKENDS:
        assert_attends(backend, call, SMALL if backend == "triton" else None, want)
    axis = 2 if layout == "bshd" else 1
    # the same with each head of k and v as often as it is read
    k, v = (one.repeat_interleave(call.group, axis) for one in (call.k, call.v))
    torch.testing.assert_close(exact(call._replace(k=k, v=v))[0], exact(call)[0])


def _surrounded(*shape: int, device: str) -> Tensor:
    """The storage of a view, NaN where the view has nothing."""
    return torch.full(shape, float("nan"), dtype=torch.float16, device=device)


def _filled(view: Tensor, seed: int) -> Tensor:
    return view.copy_(random(tuple(view.shape), view.dtype, view.device.type, seed))


# name -> a tensor [2, S, H, D] of that layout; what lies between its elements is NaN
STRIDES: dict[str, Callable[[int, int, int, str, int], Tensor]] = {
    "dense": lambda s, h, d, device, seed: _filled(_surrounded(2, s, h, d, device=device), seed),
    "heads first": lambda s, h, d, device, seed: _filled(
        _surrounded(2, h, s, d, device=device).transpose(1, 2), seed
    ),
    "a part of qkv": lambda s, h, d, device, seed: _filled(
        _surrounded(2, s, 3 * h, d, device=device)[:, :, h : 2 * h], seed
    ),
    "columns apart": lambda s, h, d, device, seed: _filled(
        _surrounded(2, s, h, 2 * d, device=device)[..., 1::2], seed
    ),
    "transposed": lambda s, h, d, device, seed: _filled(
        _surrounded(2, h, d, s, device=device).permute(0, 3, 1, 2), seed
    ),
    "transposed longer": lambda s, h, d, device, seed: _filled(
        _surrounded(2, h, d, s + 16, device=device).permute(0, 3, 1, 2)[:, 3 : s + 3], seed
    ),
    "sequence first": lambda s, h, d, device, seed: _filled(
        _surrounded(s, 2, h, d, device=device).transpose(0, 1), seed
    ),
    "reversed": lambda s, h, d, device, seed: _filled(
        _surrounded(d, h, s, 2, device=device).permute(3, 2, 1, 0), seed
    ),
    "one head for all": lambda s, h, d, device, seed: _filled(
        _surrounded(2, s, 1, d, device=device), seed
    ).expand(2, s, h, d),
    "one token for all": lambda s, h, d, device, seed: _filled(
        _surrounded(2, 1, h, d, device=device), seed
    ).expand(2, s, h, d),
    "odd rows": lambda s, h, d, device, seed: _filled(_surrounded(2, s, h, d + 3, device=device)[..., 2 : d + 2], seed),
}  # fmt: skip


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides: str, which: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"q": (17, 2, 16), "k": (33, 1, 16), "v": (33, 1, 32)}
    made = {
        one: STRIDES[strides if which in (one, "all") else "dense"](*size, device, seed)
        for seed, (one, size) in enumerate(sizes.items())
    }
    call = FlashAttentionCall(made["q"], made["k"], made["v"], causal=True)
    want = by_reference(call)
    for backend in BACKENDS if which == "all" else ("triton",):
        assert_attends(backend, call, SMALL if backend == "triton" else None, want)
    if which != "all":
        return
    # the same views with heads before tokens
    across = FlashAttentionCall(*(one.transpose(1, 2) for one in made.values()), layout="bhsd", causal=True)
    got = op.run("triton", across, config=SMALL)
    assert torch.equal(got.transpose(1, 2), op.run("triton", call, config=SMALL))
    assert_never_copies(OP, monkeypatch, *call[:3], causal=True)


@pytest.mark.parametrize("far", ["tokens", "heads", "columns", "batch"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_elements_past_two_to_the_31(which: str, far: str, device: str) -> None:
    step = (1 << 30) + (0 if which == "k" else 1)
    # of the storage only the pages that are used are ever made
    storage = torch.empty((1 << 31) + (1 << 13), dtype=torch.float16, device=device)
    sizes = {"q": (3, 3, 3, 3), "k": (3, 3, 3, 3), "v": (3, 3, 3, 3)}
    dense = {"batch": (step, 27, 9, 1), "tokens": (27, step, 9, 1), "heads": (27, 9, step, 1)}
    dense["columns"] = (27, 9, 3, step)
    made = {}
    for seed, (one, size) in enumerate(sizes.items()):
        strides = dense[far] if one == which else (27, 9, 3, 1)
        made[one] = _filled(storage[1024 * seed :].as_strided(size, strides), seed)
    assert_attends("triton", FlashAttentionCall(**made), SMALL)


def test_bias_past_two_to_the_31(device: str) -> None:
    storage = torch.empty((1 << 31) + (1 << 13), dtype=torch.float16, device=device)
    for strides in ((1 << 30, 9, 3, 1), (9, 1 << 30, 3, 1), (27, 9, 1 << 30, 1), (27, 9, 1, 1 << 30)):
        bias = _filled(storage.as_strided((3, 3, 3, 3), strides), 5)
        assert_attends("triton", FlashAttentionCall(*tensors(3, 3, 3, 3, device=device), bias=bias), SMALL)


PACKED = {
    "several": ([5, 17, 33], [20, 17, 9]),
    "empty ones": ([0, 20, 0, 7, 3, 0], [4, 0, 0, 40, 1, 0]),
    "one": ([19], [37]),
    "single tokens": ([1, 1, 1, 1], [1, 50, 16, 17]),
    "nothing": ([0, 0], [3, 0]),
}


@pytest.mark.parametrize("key", ["plain", "causal", "window", "alibi a sequence", "bias", "sinks", "everything"])
@pytest.mark.parametrize("lengths", PACKED)
def test_packed(lengths: str, key: str, device: str) -> None:
    """Sequences of several lengths: as each of them alone."""
    queries, keys = PACKED[lengths]
    (q, k, v), starts = packed(queries, keys, HEADS, 2, 16, torch.float32, device)
    options = option(key, max(queries), max(keys), device, len(queries))
    if lengths == "several":
        # at least the longest, not exactly it
        starts["max_seqlen_q"] += 20
        options = option(key, max(queries) + 20, max(keys), device, len(queries))
    call = FlashAttentionCall(q, k, v, **starts, **options)
    want = exact(call)
    for backend in OURS:
        assert_attends(backend, call, SMALL if backend == "triton" else None, want)


def test_packed_by_itself(device: str) -> None:
    """Every sequence has the bits that it has alone, whatever lies around it."""
    queries, keys = [5, 40, 17], [20, 33, 17]
    (q, k, v), starts = packed(queries, keys, HEADS, 2, 16, torch.bfloat16, device)
    run = op.run
    got, lse = run("triton", FlashAttentionCall(q, k, v, causal=True, return_lse=True, **starts), config=SMALL)
    at_q, at_k = starts["cu_seqlens_q"].tolist(), starts["cu_seqlens_k"].tolist()
    for b in range(3):
        rows, cols = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        one = FlashAttentionCall(q[rows][None], k[cols][None], v[cols][None], causal=True, return_lse=True)
        alone, alone_lse = run("triton", one, config=SMALL)
        assert torch.equal(alone[0], got[rows]) and torch.equal(alone_lse[0], lse[:, rows])


@pytest.mark.parametrize("how", [1, 2], ids=["every nth tile", "the next tile"])
@pytest.mark.parametrize("key", ["plain", "causal", "window", "everything"])
def test_programs_that_take_tile_after_tile(key: str, how: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with one tile a program, with fewer programs than tiles and more."""
    queries, keys = [5, 40, 0, 17], [20, 33, 3, 17]
    (q, k, v), starts = packed(queries, keys, HEADS, 2, 16, torch.bfloat16, device)
    empty = torch.empty
    # memory that no program has written shows
    monkeypatch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more).fill_(float("nan")))
    calls = [
        FlashAttentionCall(q, k, v, return_lse=True, **starts, **option(key, max(queries), max(keys), device, 4)),
        FlashAttentionCall(*tensors(2, 75, 75, HEADS, 2, device=device), **option(key, 75, 75, device, 2)),
    ]
    for call in calls:
        want = op.run("triton", call, config=SMALL)
        for more in ({"PER_UNIT": 1}, {"PER_UNIT": 3}, {"PER_UNIT": 500, "SECTION_MIB": 1}):
            got = op.run("triton", call, config=Config(**SMALL.kwargs, PERSISTENT=how, **more))
            for one, other in zip(
                got if call.return_lse else (got,), want if call.return_lse else (want,), strict=True
            ):
                assert torch.equal(one, other)


def test_starts_of_sequences_may_have_gaps(device: str) -> None:
    (q, k, v), starts = packed([5, 17], [20, 9], 2, 2, 16, torch.float32, device)
    want = op.run("triton", FlashAttentionCall(q, k, v, **starts), config=SMALL)
    for which in ("cu_seqlens_q", "cu_seqlens_k"):
        starts[which] = torch.stack((starts[which], starts[which] + 99), -1)[:, 0]
    assert torch.equal(op.run("triton", FlashAttentionCall(q, k, v, **starts), config=SMALL), want)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("key", ["plain", "causal", "window", "left", "everything"])
def test_nothing_beyond_the_ends_is_used(key: str, backend: str, device: str) -> None:
    """NaN and infinities behind the last key, before the first, and in other sequences."""
    queries, keys = 19, 37
    q, k, v = tensors(1, queries, keys, HEADS, 2, device=device)
    options = option(key, queries, keys, device, 1)
    run, config = op.run, {"config": SMALL} if backend == "triton" else {}
    want = run(backend, FlashAttentionCall(q, k, v, **options), **config)
    for bad in (float("nan"), float("inf"), -float("inf")):
        long = [torch.full((1, keys + 27, 2, 16), bad, device=device) for _ in range(2)]
        for one, inside in zip(long, (k, v), strict=True):
            one[:, 11 : 11 + keys] = inside
        parts = [one[:, 11 : 11 + keys] for one in long]
        assert torch.equal(run(backend, FlashAttentionCall(q, *parts, **options), **config), want)
        # the same as one of three packed sequences
        starts = {
            "layout": "thd",
            "cu_seqlens_q": torch.tensor([0, 0, queries, queries], dtype=torch.int32, device=device),
            "cu_seqlens_k": torch.tensor([0, 11, 11 + keys, keys + 27], dtype=torch.int32, device=device),
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
        }
        got = run(backend, FlashAttentionCall(q[0], long[0][0], long[1][0], **starts, **options), **config)
        torch.testing.assert_close(got, want[0], rtol=1e-6, atol=1e-6)


def test_hidden_keys_hold_anything(device: str) -> None:
    """k may hold NaN wherever a mask hides it; v wherever no query of a tile sees it; the reference ignores both."""
    q, k, v = tensors(1, 64, 64, device=device)
    call = FlashAttentionCall(q, k, v, causal=True, window=(20, 0))
    want = op.run("triton", call, config=SMALL)
    for at in (0, 17, 40, 63):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, at], bad_v[:, at] = float("nan"), float("nan")
        # queries at to at + 20 see the key
        seen = torch.arange(64).ge(at) & torch.arange(64).le(at + 20)
        got = op.run("triton", FlashAttentionCall(q, bad_k, v, causal=True, window=(20, 0)), config=SMALL)
        assert torch.equal(got[:, ~seen], want[:, ~seen]) and got[:, seen].isnan().all()
        got = op.run("triton", FlashAttentionCall(q, k, bad_v, causal=True, window=(20, 0)), config=SMALL)
        tile = torch.arange(64) // 16
        near = (tile >= at // 16) & (tile <= (at + 20) // 16)
        assert torch.equal(got[:, ~near], want[:, ~near]) and got[:, seen].isnan().all()
        for which in ((bad_k, v), (k, bad_v)):
            got = op.run("reference", FlashAttentionCall(q, *which, causal=True, window=(20, 0)))
            assert got[:, seen].isnan().all()
            torch.testing.assert_close(got[:, ~seen], want[:, ~seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
def test_queries_that_see_nothing(backend: str, device: str) -> None:
    q, k, v = tensors(2, 40, 23, device=device)
    run, config = op.run, {"config": SMALL} if backend == "triton" else {}
    sinks = torch.tensor([0.5, -3.0], device=device)
    for options, blind in (
        ({"causal": True}, 17),
        ({"window": (-1, 4)}, 13),
        ({"causal": True, "window": (5, -1), "softcap": 2.0}, 17),
    ):
        out, lse = run(backend, FlashAttentionCall(q, k, v, return_lse=True, **options), **config)
        assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()
        assert out[:, blind:].abs().sum(-1).min() > 0 and lse[:, :, blind:].isfinite().all()
        out, lse = run(backend, FlashAttentionCall(q, k, v, return_lse=True, sinks=sinks, **options), **config)
        assert not out[:, :blind].any()
        torch.testing.assert_close(lse[:, :, :blind], sinks[:, None].expand(2, 2, blind), rtol=1e-6, atol=1e-6)
    # without keys at all, and with a bias that hides all of them
    out, lse = run(backend, FlashAttentionCall(q, k[:, :0], v[:, :0], return_lse=True), **config)
    assert not out.any() and (lse == -math.inf).all()
    bias = torch.zeros(40, 23, device=device)
    bias[7] = -math.inf
    out, lse = run(backend, FlashAttentionCall(q, k, v, return_lse=True, bias=bias), **config)
    assert not out[:, 7].any() and (lse[:, :, 7] == -math.inf).all() and lse[:, :, 8].isfinite().all()


@pytest.mark.parametrize("backend", OURS)
def test_a_bias_of_minus_infinity_hides(backend: str, device: str) -> None:
    q, k, v = tensors(2, 20, 50, device=device)
    # the first tiles of keys for some queries, so that their first scores are all −inf
    hidden = (torch.arange(50) < 35)[None, :] & (torch.arange(20) % 3 == 0)[:, None]
    bias = torch.zeros(20, 50).masked_fill(hidden, -math.inf).to(device)
    want = exact(FlashAttentionCall(q, k, v, bias=bias))
    assert_attends(backend, FlashAttentionCall(q, k, v, bias=bias), SMALL if backend == "triton" else None, want)
    torch.testing.assert_close(want[0][:, 0], exact(FlashAttentionCall(q[:, :1], k[:, 35:], v[:, 35:]))[0][:, 0])


@pytest.mark.parametrize("backend", OURS)
def test_sinks_take_part_in_the_sum_alone(backend: str, device: str) -> None:
    q, k, v = tensors(1, 18, 20, HEADS, device=device)
    run, config = op.run, {"config": SMALL} if backend == "triton" else {}
    plain, lse = run(backend, FlashAttentionCall(q, k, v, return_lse=True), **config)
    sinks = torch.tensor([-math.inf, -1.0, 3.0, 300.0], device=device)
    out, with_sink = run(backend, FlashAttentionCall(q, k, v, sinks=sinks, return_lse=True), **config)
    share = torch.sigmoid(lse - sinks[:, None])
    torch.testing.assert_close(out, plain * share.transpose(1, 2)[..., None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(with_sink, torch.logaddexp(lse, sinks[:, None].expand_as(lse)), rtol=1e-6, atol=1e-6)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert_attends(backend, FlashAttentionCall(q, k, v, sinks=sinks[1:3].to(dtype).repeat(2)), config.get("config"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str, device: str) -> None:
    q, k, v = tensors(1, 20, 40, device=device)
    # rising along the keys, so that every tile moves the maximum
    k = k + torch.arange(40, device=device)[None, :, None, None] / 4
    call = FlashAttentionCall(40 * q.abs(), k, v)
    assert by_reference(call)[1].min() > 500
    want = by_reference(call)
    got = op.run(backend, call, **({"config": SMALL} if backend == "triton" else {}))
    torch.testing.assert_close(got.double(), want[0], rtol=2e-3, atol=2e-3)


def test_the_bound_can_fail(device: str) -> None:
    """The tolerance of the tests is below the error of one key left out, or of one head in place of another."""
    for dtype in (torch.float32, torch.float16):
        call = FlashAttentionCall(*tensors(1, 20, 40, 4, 2, dtype=dtype, device=device))
        want = by_reference(call)
        inner = 1.01 * 2.0**-11 + 1.5e-5
        for wrong in (call._replace(k=call.k[:, 1:], v=call.v[:, 1:]), call._replace(k=call.k.flip(2))):
            with pytest.raises(AssertionError, match="are off"):
                assert_within(by_reference(wrong)[0].to(dtype), want[0], want[2], inner)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_same_bits_every_time_and_in_any_batch(dtype: torch.dtype, device: str) -> None:
    q, k, v = tensors(3, 40, 50, HEADS, 2, dtype=dtype, device=device)
    run = op.backends["triton"].run
    whole = op.run("triton", FlashAttentionCall(q, k, v, causal=True))
    assert torch.equal(op.run("triton", FlashAttentionCall(q, k, v, causal=True)), whole)
    for b in range(3):
        one = FlashAttentionCall(*(x[b : b + 1] for x in (q, k, v)), causal=True)
        assert torch.equal(op.run("triton", one), whole[b : b + 1])
        # the default configuration does not know the batch, nor the heads
        assert op.config_of("triton", op.key(one)) == op.config_of(
            "triton", op.key(FlashAttentionCall(q, k, v, causal=True))
        )
    pair = FlashAttentionCall(q[:, :, :2], k[:, :, :1], v[:, :, :1], causal=True)
    assert torch.equal(run(pair, config=SMALL), run(FlashAttentionCall(q, k, v, causal=True), config=SMALL)[:, :, :2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the order of programs is the GPU's own there")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_any_architectures_order_and_configuration(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 XCDs deal the programs in another order, which must have each of them once."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    for causal in (False, True):
        call = FlashAttentionCall(*tensors(3, 45, 60, HEADS, 2, dtype=torch.bfloat16), causal=causal)
        assert_attends("triton", call)
        assert_attends("triton", call, SMALL)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_default_configurations(arch: str) -> None:
    """Tiles that matrix units take, no more rows than queries need, and k and v in LDS."""
    known = ARCHS[arch]
    for queries in (1, 8, 16, 64, 512, 131072):
        for columns in (1, 40, 64, 80, 128, 192, 256):
            for bits in (16, 32):
                for causal, more in ((False, 0), (True, 0), (True, 1), (True, 4)):
                    shape = configs.Shape(queries, columns, bits, causal, more)
                    made = configs.default(shape, known)
                    assert min(made["BLOCK_M"], made["BLOCK_N"]) >= 16 and made["BLOCK_M"] < 2 * max(queries, 9)
                    block = 1 << max(4, (columns - 1).bit_length())
                    kept = made["num_stages"] - (known.vendor == "amd")
                    assert 2 * max(1, kept) * block * made["BLOCK_N"] * bits // 8 <= known.lds_kib << 10
                    tried = list(space_of(shape, known))
                    assert tried[0] == made and len(tried) == len(set(tried)) > 1
                    assert all(one["num_warps"] * known.wave_size <= 1024 for one in tried)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_configurations_to_tune_with(arch: str, device: str) -> None:
    call = FlashAttentionCall(*tensors(1, 70, 90, 2, 1, 40, dtype=torch.float16, device=device), causal=True)
    want = by_reference(call)
    study = op.study.kernel("triton")
    assert study.space is not None and study.launches is not None
    tried = list(study.space(op.key(call), ARCHS[arch]))
    mine = device == "cpu" or hardware.detect().vendor == ARCHS[arch].vendor
    for config in tried if device == "cuda" else tried[1::5]:
        # another vendor's options are unknown to the compiler
        if mine:
            assert_attends("triton", call, config, want)
        (launch,) = study.launches(mapped(call, lambda one: one.to("meta")), config, ARCHS[arch])
        assert launch.options()["BLOCK_M"] == config["BLOCK_M"]
    assert study.launches(FlashAttentionCall(*tensors(1, 0, 9)), SMALL, ARCHS[arch]) == []


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("key", ["plain", "causal", "window", "bias", "bias a key"])
def test_a_bound_call_is_short(
    key: str, dtype: torch.dtype, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the public function to PyTorch or the launch; of PyTorch's float32 its precision is looked up each time."""
    qkv = tensors(2, 8, 8, HEADS, 2, dtype=dtype, device=device)
    options = option(key, 8, 8, device)
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    op.force(backend)
    with torch.no_grad():
        assert_short(lambda: ops.flash_attention(*qkv, **options), monkeypatch)


# gradients, torch.compile, dispatch


@pytest.mark.parametrize("key", ["plain", "causal", "window", "bias", "softcap", "sinks", "alibi", "everything"])
def test_gradients(key: str, device: str) -> None:
    """By PyTorch where it has the call, else through the definition; never by the kernel."""
    lengths = (12, 12)
    tensors_ = tensors(2, *lengths, HEADS, 2, device=device)
    options = option(key, *lengths, device)
    op.force("triton")
    leaves = [one.clone().requires_grad_() for one in tensors_]
    decision = op.decide(FlashAttentionCall(*leaves, **options))
    assert decision.backend == ("torch" if key in ("plain", "causal", "window", "bias") else "reference")
    assert "no backward" in {one.backend: one.reason for one in decision.refused}["triton"]
    with torch.no_grad():
        assert op.decide(FlashAttentionCall(*leaves, **options)).backend == "triton"
    for which in ("bias", "sinks"):
        if which in options:
            one = options[which].clone().requires_grad_()
            assert op.decide(FlashAttentionCall(*tensors_, **(options | {which: one}))).backend != "triton"
    ops.flash_attention(*leaves, **options).square().sum().backward()
    doubled = [one.double().requires_grad_() for one in tensors_]
    more = {one: x.double() if isinstance(x, Tensor) else x for one, x in options.items()}
    op.reference(FlashAttentionCall(*doubled, **more)).square().sum().backward()
    for leaf, want in zip(leaves, doubled, strict=True):
        assert leaf.grad is not None and want.grad is not None and leaf.grad.abs().max() > 1e-3
        torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_the_definition(device: str) -> None:
    """Gradients of all arguments, against finite differences, with queries that see no key."""
    q, k, v = (one.double().requires_grad_() for one in tensors(1, 5, 4, 2, 1, 3, 2, device=device))
    bias, sinks = (random(shape, torch.float64, device, 5).requires_grad_() for shape in ((2, 5, 4), (2,)))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out, lse = op.reference(
            FlashAttentionCall(q, k, v, causal=True, softcap=2.0, bias=bias, sinks=sinks, return_lse=True)
        )
        return out.sum() + (out * out).sum() + lse.square().sum()

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))
    leaf = q.detach().clone().requires_grad_()
    op.reference(FlashAttentionCall(leaf, k.detach(), v.detach(), causal=True)).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("key", ["plain", "causal", "window", "softcap", "sinks"])
def test_compile_fullgraph(key: str, dynamic: bool, device: str) -> None:
    """One graph without breaks, equal to eager; with dynamic lengths one for all of a bucket."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = option(key, 20, 20, device, 1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager" if device == "cpu" else "inductor")
    with torch.no_grad():
        for length in (20, 21, 25):
            qkv = tensors(3, length, length + 4, HEADS, 2, device=device)
            torch.testing.assert_close(compiled(*qkv), call(*qkv), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 3)
    assert any(calls == 0 for _, calls in op.decisions()), "the decision made while tracing is not kept"


def test_compile_packed(device: str) -> None:
    torch._dynamo.reset()
    (q, k, v), starts = packed([5, 17], [20, 9], 2, 1, 16, torch.float32, device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ops.flash_attention(q, k, v, causal=True, return_lse=True, **starts)  # type: ignore[return-value]

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
        for got, want in zip(compiled(q, k, v), call(q, k, v), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def _child(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_kernel_is_traced_for_any_length() -> None:
    """With a kernel that Dynamo takes for one of a GPU: one graph that launches it, and no other for other lengths."""
    pytest.importorskip("triton", reason="traces a kernel")
    code = """
import torch, torch.utils._triton
# Dynamo asks for a driver before it wraps a kernel; nothing is launched here
torch.utils._triton.has_triton = lambda: True
import wavecrest.ops.common.triton as _triton
_triton.emulated = "gfx942"
from wavecrest import ops, registry
registry.get("flash_attention").force("triton")
graphs = []

def capture(module, _inputs):
    graphs.append([str(node.target) for node in module.graph.nodes])
    return lambda *_args: (torch.zeros(1), torch.zeros(1))

sinks = torch.randn(4)
call = lambda q, k, v: ops.flash_attention(q, k, v, causal=True, softcap=20.0, sinks=sinks, return_lse=True)
compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=capture)
with torch.no_grad():
    for length in (300, 301, 400):
        q, (k, v) = torch.randn(3, length, 4, 64), torch.randn(2, 3, length + 50, 2, 64)
        compiled(q, k, v)
print(len(graphs), sum("triton_kernel" in target for target in graphs[0]))
"""
    assert _child(code).split() == ["1", "1"]


def test_specialised_arguments() -> None:
    """Triton compiles anew for types and alignments of tensors alone."""
    pytest.importorskip("triton", reason="asks Triton about a kernel's arguments")
    from wavecrest.ops._flash_attention.kernel import _flash_attention_kernel

    found = specialised(_flash_attention_kernel)
    assert all(name.endswith("_ptr") for name in found) and len(found) == 14


def _made(queries: int, keys: int, batch: int = 2, heads: int = 8, **options: Any) -> Any:
    shapes = ((batch, queries, heads, 64), (batch, keys, 2, 64), (batch, keys, 2, 64))
    q, k, v = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    operands = FlashAttentionCall(q, k, v, **options)
    config = Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    return launches.launch(operands, *launches.empty_results(operands), config, None)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 3)}], ids=str)
def test_another_length_does_not_compile_anew(options: dict[str, Any]) -> None:
    base = _made(100, 200, **options)
    for queries, keys, batch, heads in ((101, 200, 2, 8), (100, 1, 2, 8), (1, 77, 5, 2), (4097, 4097, 1, 32)):
        other = _made(queries, keys, batch, heads, **options)
        assert other.constants == base.constants
        assert [type(value) for value in other.args] == [type(value) for value in base.args]
        assert other.grid != base.grid or batch * heads == 16
    if "window" in options:
        assert _made(100, 200, window=(7, 30)).constants == base.constants


def test_what_the_kernel_declines(device: str) -> None:
    call = FlashAttentionCall(*tensors(1, 5, 6, dtype=torch.float64, device=device))
    with pytest.raises(Unsupported, match="not float64"):
        op.run("triton", call)
    assert op.decide(call).backend == "torch"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_lse": True}, "no logarithms"),
        ({"softcap": 1.0}, "no softcap"),
        ({"sinks": torch.ones(2)}, "no sinks"),
        ({"alibi_slopes": torch.ones(2)}, "no ALiBi"),
        ({"bias": torch.ones(9, 5).half()}, "a bias of x's dtype"),
        ({"causal": True}, "a query without keys"),
        ({"window": (3, 2)}, "a query without keys"),
    ],
)
def test_what_pytorch_declines(options: dict[str, Any], reason: str, device: str) -> None:
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    call = FlashAttentionCall(*tensors(1, 9, 5, device=device), **options)
    with pytest.raises(Unsupported, match=reason):
        op.run("torch", call)
    if device == "cpu":
        assert op.decide(call).backend == "reference"


def test_pytorchs_causal_mask_is_aligned_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for where there are as many queries as keys; elsewhere a mask is given, or none is needed."""
    native, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attend(*args: Any, **options: Any) -> Tensor:
        seen.append((options.get("is_causal", False), options.get("attn_mask") is not None))
        return native(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for lengths, options, how in (
        ((7, 7), {}, (False, False)),
        ((7, 7), {"causal": True}, (True, False)),
        ((7, 9), {"causal": True}, (False, True)),
        ((1, 9), {"causal": True}, (False, False)),
        ((7, 7), {"causal": True, "window": (3, -1)}, (False, True)),
        ((7, 7), {"causal": True, "bias": torch.zeros(7, 7, device=device)}, (False, True)),
        ((7, 9), {"window": (8, 6)}, (False, False)),
        ((7, 9), {"window": (7, 6)}, (False, True)),
        ((7, 9), {"window": (8, 5)}, (False, True)),
    ):
        assert_attends("torch", FlashAttentionCall(*tensors(1, *lengths, device=device), **options))
        assert seen.pop() == how and not seen


def test_a_mask_of_all_pairs_is_not_the_default_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls for which PyTorch needs a mask run the kernel, without gradients; the rest run PyTorch until measured."""
    seen = {}
    q, k, v = tensors(1, 7, 7, device=device)
    bias = torch.zeros(7, 7, device=device)
    cases = {
        "plain": FlashAttentionCall(q, k, v),
        "causal": FlashAttentionCall(q, k, v, causal=True),
        "bias": FlashAttentionCall(q, k, v, bias=bias),
        "one query": FlashAttentionCall(q[:, :1], k, v, causal=True),
        "more keys": FlashAttentionCall(q[:, :5], k, v, causal=True),
        "left": FlashAttentionCall(q, k, v, window=(3, -1)),
        "right": FlashAttentionCall(q, k, v, window=(-1, 1)),
        "causal bias": FlashAttentionCall(q, k, v, causal=True, bias=bias),
    }
    # to the dispatcher these are on a GPU
    monkeypatch.setattr(Tensor, "device", property(lambda _self: torch.device("cuda")))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True))
    for key, call in cases.items():
        seen[key] = op.decide(call).backend
        leaf = call[0].clone().requires_grad_()
        assert op.decide(call._replace(q=leaf)).backend == "torch"
    by_pytorch = {"plain", "causal", "bias", "one query"}
    assert seen == {key: "torch" if key in by_pytorch else "triton" for key in cases}


def test_dispatch_and_keywords(device: str) -> None:
    q, k, v = tensors(1, 20, 20, device=device)
    if device == "cpu":
        decision = op.decide(FlashAttentionCall(q, k, v))
        assert decision.backend == "torch"
        assert "are for tests" in {one.backend: one.reason for one in decision.refused}["triton"]
    op.pin(op.key(FlashAttentionCall(q, k, v)), "triton", SMALL, "exact", "measured")
    assert op.decide(FlashAttentionCall(q, k, v)).config == SMALL
    assert torch.equal(ops.flash_attention(q, k, v), op.run("triton", FlashAttentionCall(q, k, v), config=SMALL))
    windowed = ops.flash_attention(q, k, v, window=[3, 0])  # type: ignore[arg-type]
    assert torch.equal(windowed, ops.flash_attention(q, k, v, window=(3, 5), causal=True))
    out, lse = ops.flash_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 20) and lse.dtype == torch.float32
    with pytest.raises(TypeError):
        ops.flash_attention(q, k, v, "bhsd")  # type: ignore[misc]


_Q, _K = torch.ones(2, 5, 4, 8), torch.ones(2, 7, 2, 8)
_STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
_PACKED = {"layout": "thd", "cu_seqlens_q": _STARTS, "cu_seqlens_k": _STARTS, "max_seqlen_q": 3, "max_seqlen_k": 3}
_T = torch.ones(5, 2, 8)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        pytest.param((3.0, _K, _K), {}, r"q must be .* \[B, S, H, D\], got 3.0", id="number"),
        pytest.param((_Q[0], _K, _K), {}, "q must be", id="dims"),
        pytest.param((_Q.int(), _K, _K), {}, "q must be float32", id="integers"),
        pytest.param((_Q, _K.half(), _K), {}, "k must be torch.float32 on cpu as q is", id="dtype"),
        pytest.param((_Q, _K, _K.to("meta")), {}, "v must be torch.float32 on cpu", id="device"),
        pytest.param((_Q[..., :0], _K[..., :0], _K), {}, "q must have a head_dim of 1 to 256", id="no-columns"),
        pytest.param((_Q, _K, torch.ones(2, 7, 2, 257)), {}, "v must have a head_dim of 1 to 256", id="columns"),
        pytest.param((_Q, _K, _K[:, :6]), {}, "may differ in head_dim alone", id="keys"),
        pytest.param((_Q, _K[..., :7], _K), {}, "the same head_dim and batch", id="d"),
        pytest.param((_Q, _K[:1], _K[:1]), {}, "the same head_dim and batch", id="batch"),
        pytest.param((_Q[:, :, :3], _K, _K), {}, r"q \(3\) must be a multiple of those of k and v \(2\)", id="heads"),
        pytest.param((_Q, _K[:, :, :0], _K[:, :, :0]), {}, r"a multiple of those of k and v \(0\)", id="no-heads"),
        pytest.param((_Q, _K, _K), {"layout": "sbhd"}, "layout takes bshd, bhsd, thd, not 'sbhd'", id="layout"),
        pytest.param((_Q, _K, _K), {"causal": 1}, "causal must be True or False", id="causal"),
        pytest.param((_Q, _K, _K), {"return_lse": None}, "return_lse must be", id="lse"),
        pytest.param((_Q, _K, _K), {"window": 3}, "window must be two whole numbers", id="window"),
        pytest.param((_Q, _K, _K), {"window": (3, -2)}, "window must be", id="window-negative"),
        pytest.param((_Q, _K, _K), {"window": (1, 2, 3)}, "window must be", id="window-three"),
        pytest.param((_Q, _K, _K), {"window": (True, 2)}, "window must be", id="window-bool"),
        pytest.param((_Q, _K, _K), {"softmax_scale": -1.0}, "softmax_scale must be a finite", id="scale"),
        pytest.param((_Q, _K, _K), {"softmax_scale": math.inf}, "softmax_scale must be", id="scale-inf"),
        pytest.param((_Q, _K, _K), {"softcap": math.nan}, "softcap must be a finite", id="softcap"),
        pytest.param((_Q, _K, _K), {"softcap": None}, "softcap must be", id="softcap-none"),
        pytest.param((_Q, _K, _K), {"bias": torch.ones(2, 4, 5, 8)}, "bias must be .* broadcast", id="bias"),
        pytest.param((_Q, _K, _K), {"bias": torch.ones(5, 7).bool()}, "bias must be floating", id="bias-bool"),
        pytest.param((_Q, _K, _K), {"bias": torch.ones(1, 2, 4, 5, 7)}, "bias must be", id="bias-dims"),
        pytest.param((_Q, _K, _K), {"bias": torch.ones(5, 7, device="meta")}, "bias must be", id="bias-device"),
        pytest.param((_Q, _K, _K), {"alibi_slopes": torch.ones(3)}, r"float32 \[4\] or \[2, 4\]", id="alibi"),
        pytest.param((_Q, _K, _K), {"alibi_slopes": torch.ones(4).half()}, "alibi_slopes must", id="alibi-dtype"),
        pytest.param((_Q, _K, _K), {"sinks": torch.ones(2, 4)}, r"sinks must be floating-point \[4\]", id="sinks"),
        pytest.param((_Q, _K, _K), {"sinks": [1.0] * 4}, "sinks must be", id="sinks-list"),
        pytest.param((_Q, _K, _K), {"max_seqlen_q": 5}, "max_seqlen_q goes with layout thd", id="max-unpacked"),
        pytest.param((_Q, _K, _K), {"cu_seqlens_k": _STARTS}, "cu_seqlens_k goes with layout thd", id="unpacked"),
        pytest.param((_T, _T, _T), _PACKED | {"cu_seqlens_q": None}, "cu_seqlens_q must be int32", id="no-starts"),
        pytest.param((_T, _T, _T), _PACKED | {"cu_seqlens_k": _STARTS.long()}, "cu_seqlens_k must", id="int64"),
        pytest.param((_T, _T, _T), _PACKED | {"cu_seqlens_k": _STARTS[:0]}, "cu_seqlens_k must", id="no-start"),
        pytest.param((_T, _T, _T), _PACKED | {"cu_seqlens_k": _STARTS[:2]}, "of one size", id="starts"),
        pytest.param((_T, _T, _T), _PACKED | {"max_seqlen_k": None}, "max_seqlen_k must be a whole", id="no-max"),
        pytest.param((_T, _T, _T), _PACKED | {"max_seqlen_q": -1}, "max_seqlen_q must be a whole", id="max"),
        pytest.param((_T, _T, _T), _PACKED | {"max_seqlen_q": 1 << 30}, "sequences have up to", id="long"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], options: dict[str, Any], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.flash_attention(*args, **options)
        else:
            op.run(backend, FlashAttentionCall(*args, **options))


def test_key_has_all_the_choice_depends_on() -> None:

    def key(q: Tensor = _Q, k: Tensor = _K, v: Tensor = _K, **options: Any) -> tuple[Any, ...]:
        return op.key(FlashAttentionCall(q, k, v, **options))

    variants = [
        key(),
        key(_Q[:1], _K[:1], _K[:1]),
        key(_Q[:, :3]),
        key(_Q, _K[:, :6], _K[:, :6]),
        key(_Q, _K[:, :5], _K[:, :5]),
        key(_Q[:, :, :2]),
        key(_Q, _K[:, :, :1], _K[:, :, :1]),
        key(_Q[..., :4], _K[..., :4]),
        key(v=_K[..., :4]),
        key(_Q.half(), _K.half(), _K.half()),
        key(v=torch.ones(2, 2, 8, 7).permute(0, 3, 1, 2)),
        key(v=torch.ones(2, 7, 2, 9)[..., :8]),
        key(causal=True),
        key(window=(3, -1)),
        key(window=(4, -1)),
        key(window=(-1, 3)),
        key(bias=torch.ones(5, 7)),
        key(bias=torch.ones(5, 7).half()),
        key(alibi_slopes=torch.ones(4)),
        key(softcap=1.0),
        key(sinks=torch.ones(4)),
        key(return_lse=True),
        key(_Q.clone().requires_grad_()),
        key(sinks=torch.ones(4).requires_grad_()),
        op.key(FlashAttentionCall(_T, _T, _T, **_PACKED)),
    ]
    assert len(set(variants)) == len(variants)
    assert all(len(one) == len(op.key_fields) for one in variants)
    # made of what a table of measured rows can hold, and the same for lengths of one bucket and either layout
    assert all(part is None or type(part) in (int, str, bool) for one in variants for part in one)
    assert key(*tensors(2, 20, 40)) == key(*tensors(2, 30, 50))
    across = [one.transpose(1, 2) for one in (_Q, _K, _K)]
    assert key(*across, layout="bhsd") == key()
    # no query without a key here, and one there: PyTorch takes the one alone
    assert key(*tensors(2, 33, 32), causal=True) != key(*tensors(2, 32, 32), causal=True)


def test_cost() -> None:
    for queries, keys, left, right in (
        (5, 7, -1, -1),
        (5, 7, -1, 0),
        (7, 5, 2, 1),
        (6, 6, 3, -1),
        (4, 0, 1, 1),
        (0, 3, 1, 0),
    ):
        pairs = sum(
            (right < 0 or j <= i + keys - queries + right) and (left < 0 or j >= i + keys - queries - left)
            for i in range(queries)
            for j in range(keys)
        )
        assert visible_pairs(queries, keys, left, right) == pairs
    cost = op.study.cost
    q, k, v = tensors(2, 5, 7, 4, 2, 8, 3, torch.float16)
    counted = cost(FlashAttentionCall(q, k, v, causal=True, return_lse=True, sinks=torch.ones(4)))
    assert counted.flops == 2 * 2 * 4 * visible_pairs(5, 7, -1, 0) * (8 + 3)
    assert counted.bytes == q.nbytes + k.nbytes + v.nbytes + 2 * 5 * 4 * 3 * 2 + 4 * 4 + 4 * 2 * 5 * 4
    (q, k, v), starts = packed([5, 0, 3], [4, 2, 9], 2, 2, 8, torch.float32, "cpu")
    pairs = visible_pairs(5, 4, -1, 0) + visible_pairs(3, 9, -1, 0)
    assert cost(FlashAttentionCall(q, k, v, causal=True, **starts)).flops == 2 * 2 * pairs * 16


def test_the_cases_of_tools_are_calls(device: str) -> None:
    study = op.study
    assert study.bench_cases is not None and study.emulate_cases is not None
    quick = study.bench_cases("quick", device)
    assert len(quick) == 2 and len(study.bench_cases("shared", "meta")) == 12
    for label, make in study.bench_cases("shared", "meta").items():
        op.check(make())
        assert make().causal == label.endswith("c")
    for make in (*quick.values(), *study.emulate_cases("gfx942").values()):
        call = make()
        op.check(call)
        for starts, tokens in ((call.cu_seqlens_q, call[0]), (call.cu_seqlens_k, call[1])):
            assert starts is None or (starts[0] == 0 and starts[-1] == tokens.shape[0])
        want = by_reference(call)
        got = op(call)
        got, lse = got if isinstance(got, tuple) else (got, None)
        assert_within(got, want[0], want[2], 8 * 2.0**-8 + 1e-5)
        if lse is not None:
            assert_lse(lse, want[1], got.dtype)


# what any call may be


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    length = st.sampled_from((0, 1, 2, 7, 15, 16, 17, 31, 33, 50))
    kv_heads = draw(st.integers(1, 2))
    side = st.sampled_from((-1, -1, 0, 1, 5, 16, 40))
    return {
        "lengths": [(draw(length), draw(length)) for _ in range(draw(st.integers(1, 3)))],
        "packed": draw(st.booleans()),
        "heads": (kv_heads * draw(st.integers(1, 3)), kv_heads),
        "columns": (draw(st.sampled_from((1, 5, 16, 20))), draw(st.sampled_from((1, 8, 16, 33)))),
        "dtype": draw(st.sampled_from((torch.float32, torch.float32, torch.float16, torch.bfloat16))),
        "order": [draw(st.permutations(range(4))) for _ in range(3)],
        "steps": [tuple(draw(st.sampled_from((1, 1, 2))) for _ in range(4)) for _ in range(3)],
        "options": {
            "causal": draw(st.booleans()),
            "window": (draw(side), draw(side)),
            "softmax_scale": draw(st.sampled_from((None, 0.3, 1.0))),
            "softcap": draw(st.sampled_from((0.0, 0.0, 2.0))),
        },
        "bias": draw(st.sampled_from((None, None, torch.float32, torch.bfloat16))),
        "broadcast": tuple(draw(st.booleans()) for _ in range(4)),
        "alibi": draw(st.sampled_from((0, 0, 1, 2))),
        "sinks": draw(st.booleans()),
        "config": draw(st.sampled_from((SMALL, LONG, TALL))),
        "seed": draw(st.integers(0, 1000)),
    }


def _view(call: dict[str, Any], which: int, shape: tuple[int, ...], device: str) -> Tensor:
    """A tensor with its dimensions in any order of memory, and every n-th element of a larger one."""
    order, steps = [i for i in call["order"][which] if i < len(shape)], call["steps"][which][: len(shape)]
    stored = random(tuple(shape[i] * steps[i] for i in order), call["dtype"], device, call["seed"] + which)
    x = stored.permute([order.index(i) for i in range(len(shape))])
    return x[tuple(slice(None, None, step) for step in steps)]


# one key far below its sink: weights in float16 that are subnormal, rounded to multiples of 2⁻²⁴
FAR_BELOW = {
    "lengths": [(50, 1), (0, 0), (0, 1)],
    "packed": True,
    "heads": (4, 2),
    "columns": (5, 16),
    "dtype": torch.float16,
    "order": [range(4)] * 3,
    "steps": [(1, 1, 1, 1)] * 3,
    "options": {"causal": False, "window": (-1, -1), "softmax_scale": None, "softcap": 0.0},
    "bias": torch.float32,
    "broadcast": (False, False, True, False),
    "alibi": 1,
    "sinks": True,
    "config": SMALL,
    "seed": 97,
}


@example(FAR_BELOW)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_any_call(drawn: dict[str, Any]) -> None:
    """Any lengths, layout, strides, dtype, masks, additions and configuration."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (heads, kv_heads), (d, dv), options = drawn["heads"], drawn["columns"], dict(drawn["options"])
    lengths = drawn["lengths"] if drawn["packed"] else [drawn["lengths"][0]] * len(drawn["lengths"])
    queries, keys = [m for m, _ in lengths], [n for _, n in lengths]
    batch, longest = len(lengths), (max(queries), max(keys))
    if drawn["packed"]:
        shapes = ((sum(queries), heads, d), (sum(keys), kv_heads, d), (sum(keys), kv_heads, dv))
        options |= packed(queries, keys, 1, 1, 1, torch.float32, device)[1]
    else:
        shapes = ((batch, queries[0], heads, d), (batch, keys[0], kv_heads, d), (batch, keys[0], kv_heads, dv))
    if drawn["bias"] is not None:
        whole = (batch, heads, *longest)
        shape = tuple(1 if shared else size for size, shared in zip(whole, drawn["broadcast"], strict=True))
        options["bias"] = random(shape, drawn["bias"], device, drawn["seed"] + 5)
    if drawn["alibi"]:
        shape = (heads,) if drawn["alibi"] == 1 else (batch, heads)
        options["alibi_slopes"] = random(shape, torch.float32, device, drawn["seed"] + 6).abs() / 8
    if drawn["sinks"]:
        options["sinks"] = random((heads,), torch.float32, device, drawn["seed"] + 7)
    made = FlashAttentionCall(*(_view(drawn, i, shape, device) for i, shape in enumerate(shapes)), **options)
    assert_attends("triton", made, drawn["config"])


# on a GPU alone


@pytest.mark.gpu
@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_large_on_a_gpu(dtype: torch.dtype, key: str) -> None:
    """The default configuration, lengths that fill no tile."""
    for queries, keys, d in ((1000, 1500, 64), (1500, 1000, 128), (700, 700, 80), (1, 3000, 128), (300, 300, 256)):
        q, k, v = tensors(2, queries, keys, HEADS, 2, d, dtype=dtype, device="cuda")
        assert_attends("triton", FlashAttentionCall(q, k, v, **option(key, queries, keys, "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("key", ["plain", "causal", "everything"])
def test_replays_in_a_cuda_graph(key: str) -> None:
    op.force("triton")
    call = FlashAttentionCall(*tensors(2, 100, 130, HEADS, 2, 64, device="cuda"), **option(key, 100, 130, "cuda"))
    op(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    for seed in (5, 6):
        for one, other in zip(call[:3], tensors(2, 100, 130, HEADS, 2, 64, device="cuda", seed=seed), strict=True):
            one.copy_(other)
        result.fill_(0)
        graph.replay()
        want = by_reference(call)
        assert_within(result, want[0], want[2], 1.01 * 2.0**-24 + 1.5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 7)}], ids=str)
def test_new_lengths_do_not_compile(options: dict[str, Any]) -> None:
    from wavecrest.ops._flash_attention.kernel import _flash_attention_kernel

    def compiled_for(queries: int, keys: int, batch: int = 2) -> int:
        call = FlashAttentionCall(
            *tensors(batch, queries, keys, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda"), **options
        )
        assert_attends("triton", call)
        return len(_flash_attention_kernel.device_caches[torch.cuda.current_device()][0])

    before = compiled_for(1000, 1000)
    for sizes in ((1001, 1000), (1000, 1017), (4096, 4096), (333, 1, 7), (200, 5000, 1)):
        assert compiled_for(*sizes) == before, f"{sizes} compiled anew"


@pytest.mark.gpu
@pytest.mark.slow
def test_scores_past_two_to_the_31() -> None:
    """Queries times keys pass 2³¹, as does the bias; the last queries and keys count."""
    queries, keys = 40000, 60000
    q, k, v = tensors(1, queries, keys, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    bias = torch.zeros(queries, keys, dtype=torch.bfloat16, device="cuda")
    bias[-1, :-3] = -math.inf
    got = op.run("triton", FlashAttentionCall(q, k, v, bias=bias, causal=True))
    want = by_reference(FlashAttentionCall(q[:, -1:], k[:, -3:], v[:, -3:]))
    assert_within(got[:, -1:], want[0], want[2], 1.01 * 2.0**-8 + 1.5e-5)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_matrix_instructions_of_32_rows_where_they_were_counted(arch: str) -> None:
    """By default on two architectures, of plain 16-bit calls of D up to 128; `tune` tries those of 16 rows beside."""
    known, wide = ARCHS[arch], arch != "gfx90a"
    plain = configs.Shape(4096, 128, 16, True, 0)
    assert configs.default(plain, known)["matrix_instr_nonkdim"] == (32 if wide else 16)
    for other in (
        plain._replace(head_dim=64), plain._replace(head_dim=192), plain._replace(more=1), plain._replace(bits=32),
        plain._replace(kv_dtype="int8"), plain._replace(seqlen_q=64),
    ):  # fmt: skip
        assert configs.default(other, known)["matrix_instr_nonkdim"] == 16, other
    few = configs.default(plain._replace(seqlen_q=1), known)
    assert (few["BLOCK_N"], few["num_stages"]) == (64, 1)
    tried = list(space_of(plain, known))
    tiles = {(one["BLOCK_M"], one["BLOCK_N"], one["num_stages"], one["matrix_instr_nonkdim"]) for one in tried}
    assert {(128, 64, 1, 16), *([(128, 64, 1, 32), (128, 32, 2, 32)] if wide else [])} <= tiles
    assert wide == any(one["matrix_instr_nonkdim"] == 32 for one in tried) and len(tried) == len(set(tried))
