"""8-bit q, k and v of flash_attention; `test_flash_attention.py` has what all its calls share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.attention_harness import (
    CASES,
    HEADS,
    ROUNDING,
    assert_lse,
    assert_within,
    option,
    packed,
    tensors,
    wide,
)
from tests.ops.op_harness import E4M3, E5M2, INT8, LARGEST, random
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import config as configs
from wavecrest.ops._flash_attention import launch as launches
from wavecrest.ops._flash_attention import launch_hopper as hopper_launch
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.study.space import space_of

OURS = ("triton", "reference")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# 8-bit products take 32 keys on NVIDIA; several tiles of small calls
SMALL = Config(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
TALL = Config(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)
LONG = Config(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1)
# of an 8-bit float: half a unit in the last place, against the value, and half the smallest number
HALF_UNITS = {
    E4M3: (2.0**-4, 2.0**-10),
    E5M2: (2.0**-3, 2.0**-17),
    torch.float8_e4m3fnuz: (2.0**-4, 2.0**-11),
    torch.float8_e5m2fnuz: (2.0**-3, 2.0**-18),
}


class Mode(NamedTuple):
    """The dtypes of q and of k and v, whether weights are 8-bit too, and the result's dtype if it is chosen."""

    q: torch.dtype
    kv: torch.dtype
    p: bool = False
    out: torch.dtype | None = None


MODES = {
    "int8": Mode(INT8, INT8),
    "int8 float16": Mode(INT8, INT8, out=F16),
    "int8 float32": Mode(INT8, INT8, out=F32),
    "int8 p": Mode(INT8, INT8, p=True),
    "int8 p float32": Mode(INT8, INT8, p=True, out=F32),
    "e4m3fn": Mode(E4M3, E4M3),
    "e4m3fn p float32": Mode(E4M3, E4M3, p=True, out=F32),
    "e5m2 float32": Mode(E5M2, E5M2, out=F32),
    "e5m2 p": Mode(E5M2, E5M2, p=True),
    "float32 kv int8": Mode(F32, INT8),
    "float16 kv int8": Mode(F16, INT8),
    "bfloat16 kv int8 float32": Mode(BF16, INT8, out=F32),
    "bfloat16 kv e4m3fn": Mode(BF16, E4M3),
    "float16 kv e5m2 bfloat16": Mode(F16, E5M2, out=BF16),
    "float32 kv e4m3fn": Mode(F32, E4M3),
}


def codes(like: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Random values of like's shape: all of int8, about ±a quarter of what an 8-bit float has, with its largest."""
    if dtype not in LARGEST:
        return random(tuple(like.shape), dtype, like.device.type, seed)
    if dtype == INT8:
        return random(tuple(like.shape), dtype, like.device.type, seed)
    x = random(tuple(like.shape), F32, like.device.type, seed) * LARGEST[dtype] / 4
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def descale(dtype: torch.dtype, shape: tuple[int, ...], device: str, seed: int) -> Tensor | None:
    """Descales that give the quantized values a deviation of about 1, different by head and sequence."""
    if dtype not in LARGEST:
        return None
    made = 0.7 + 0.6 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (made * (2.0 if dtype == INT8 else 4.0) / LARGEST[dtype]).to(device)


def scales(mode: Mode, heads: int, kv_heads: int, batch: int, shape: str, device: str, seed: int = 5) -> dict[str, Any]:
    """The descales of a mode: of one number, [1], a head, or a sequence and head."""

    def made(count: int) -> tuple[int, ...]:
        return {"number": (), "one": (1,), "head": (count,), "sequence": (batch, count)}[shape]

    found: dict[str, Any] = {
        "q_descale": descale(mode.q, made(heads), device, seed),
        "k_descale": descale(mode.kv, made(kv_heads), device, seed + 1),
        "v_descale": descale(mode.kv, made(kv_heads), device, seed + 2),
    }
    if mode.p:
        found["p_descale"] = 1 / LARGEST[mode.kv]
    if mode.out is not None:
        found["out_dtype"] = mode.out
    return found


def quantized(
    mode: Mode, qkv: tuple[Tensor, Tensor, Tensor], shape: str = "sequence", seed: int = 0, **options: Any
) -> FlashAttentionCall:
    """A call with codes in the place of q, k and v."""
    q, k, v = qkv
    layout = options.get("layout", "bshd")
    axis = 2 if layout == "bshd" else 1
    batch = options["cu_seqlens_q"].shape[0] - 1 if layout == "thd" else q.shape[0]
    made = (codes(q, mode.q, seed), codes(k, mode.kv, seed + 1), codes(v, mode.kv, seed + 2))
    found = scales(mode, q.shape[axis], k.shape[axis], batch, shape, q.device.type)
    return FlashAttentionCall(*made, **found, **options)


class Exact(NamedTuple):
    """In float64: the result, its logarithms, Σ p |v| and Σ |v| of seen values, over the weights' sum like them.

    The last with weights counted from the largest score, of which each is at most 1.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor
    counted: Tensor


def _value(scale: Tensor | None, sequence: int, head: int) -> float:
    if scale is None:
        return 1.0
    return float(scale) if scale.numel() == 1 else float(scale[head] if scale.ndim == 1 else scale[sequence, head])


def _head(call: FlashAttentionCall, q: Tensor, k: Tensor, v: Tensor, b: int, h: int) -> tuple[Tensor, ...]:
    """One head of one sequence from codes [S, D]: attention written out, with no code of the package."""
    kv = h // (call.heads // call.kv_heads)
    q = q.double() * _value(call.q_descale, b, h)
    k, v = k.double() * _value(call.k_descale, b, kv), v.double() * _value(call.v_descale, b, kv)
    scale = q.shape[1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    s = scale * q @ k.mT
    if call.softcap > 0:
        s = call.softcap * torch.tanh(s / call.softcap)
    own = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0], device=q.device)[None, :]
    if call.bias is not None:
        full = call.bias.double().broadcast_to(call.batch, call.heads, call.seqlen_q, call.seqlen_k)
        s = s + full[b, h, : q.shape[0], : k.shape[0]]
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.double()
        s = s - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * (own - j).abs()
    left, right = call.window
    right = 0 if call.causal else right
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if left >= 0:
        hidden |= j < own - left
    if right >= 0:
        hidden |= j > own + right
    s = s.masked_fill(hidden, -math.inf)
    sink = s.new_full((s.shape[0], 1), -math.inf)
    if call.sinks is not None:
        sink += math.inf
        sink = torch.full_like(sink, float(call.sinks[h]))
    top = torch.cat((s, sink), 1).amax(1, keepdim=True)
    base = top.masked_fill(top == -math.inf, 0.0)
    p, rest = torch.exp(s - base), torch.exp(sink - base)
    total = (p.sum(1, keepdim=True) + rest).clamp(min=1e-300)
    seen = (s > -math.inf).double()
    lse = torch.where(top == -math.inf, -math.inf, base + total.log()).squeeze(1)
    return p @ v / total, lse, p @ v.abs() / total, seen @ v.abs() / total


def exact(call: FlashAttentionCall) -> Exact:
    """The dequantised call, head by head; weights are not rounded."""
    axis = {"bshd": 2, "bhsd": 1, "thd": 1}[call.layout]
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    out, mass, counted = (torch.zeros(shape, dtype=torch.float64, device=call.q.device) for _ in range(3))
    lse = torch.full(call.lse_shape, -math.inf, dtype=torch.float64, device=call.q.device)
    for b in range(call.batch):
        rows = cols = slice(None)
        if call.layout == "thd":
            assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
            rows = slice(int(call.cu_seqlens_q[b]), int(call.cu_seqlens_q[b + 1]))
            cols = slice(int(call.cu_seqlens_k[b]), int(call.cu_seqlens_k[b + 1]))
        for h in range(call.heads):
            kv = h // (call.heads // call.kv_heads)
            if call.layout == "thd":
                parts = _head(call, call.q[rows, h], call.k[cols, kv], call.v[cols, kv], b, h)
                lse[h, rows] = parts[1]
                places = [one[rows, h] for one in (out, mass, counted)]
            else:
                q, k, v = call.q[b].select(axis - 1, h), call.k[b].select(axis - 1, kv), call.v[b].select(axis - 1, kv)
                parts = _head(call, q, k, v, b, h)
                lse[b, h] = parts[1]
                places = [one[b].select(axis - 1, h) for one in (out, mass, counted)]
            for place, part in zip(places, (parts[0], parts[2], parts[3]), strict=True):
                place.copy_(part)
    return Exact(out, lse, mass, counted)


def assert_attends(
    backend: str, call: FlashAttentionCall, config: Config | None = SMALL, want: Exact | None = None
) -> Tensor:
    """A backend's result and logarithms against attention of the dequantised tensors, in float64.

    What rounding of weights may do: a weight is counted from the largest score so far, which is at most 1, and is
    rounded once, before it shrinks as that score grows. As code of int8 it is off by half a unit, p_descale / 2, as
    one of an 8-bit float by half a unit in its last place, or by half the smallest number times p_descale. The result
    is the sum of values over the weights' sum, which has them as they were: so each element is off by no more than the
    sum over seen keys of |v| times that, over the weights' sum, counted from the largest score of all.
    """
    call = call._replace(return_lse=True)
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    chosen = {"config": config} if backend == "triton" else {}
    got, lse = op.run(backend, call, **chosen)
    want = want or exact(call)
    on_gpu = got.is_cuda and backend == "triton"
    result = call.out_dtype or (BF16 if call.q.dtype in LARGEST else call.q.dtype)
    assert got.dtype == result and got.is_contiguous() and lse.is_contiguous()
    scores = _score_error(call, want) if on_gpu else 0.0
    assert_lse(lse, want.lse, F32, scores)
    inner: float | Tensor = 1.5e-5 + scores
    more: float | Tensor = 0.0
    if backend == "triton" and call.p_descale is not None:
        near, least = HALF_UNITS.get(call.k.dtype, (0.0, 0.5))
        # the result is rounded after it, by up to 2⁻⁸ of itself
        inner += 1.01 * near
        more = 1.01 * least * call.p_descale * want.counted
    elif backend == "triton":
        factor = call.q.dtype if call.q.dtype not in LARGEST else BF16 if result == BF16 else F16
        inner += 1.01 * ROUNDING[factor]
        if factor == F16:
            # weights under 2⁻¹⁴
            more = 2.0**-25 * want.counted
    assert_within(got, want.out, want.mass, inner, more)
    for one, kept in zip(call, before, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(_bits(one), _bits(kept)), "an argument was written to"
    return got  # type: ignore[no-any-return]


def _bits(x: Tensor) -> Tensor:
    # elements of some types cannot be compared
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _score_error(call: FlashAttentionCall, want: Exact) -> float:
    """How far scores may be off on a GPU: as in `attention_harness.score_error`; sm_90 keeps 14 bits of sums of fp8."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return 0.0
    largest = 1.0
    for one, scale in ((call.q, call.q_descale), (call.k, call.k_descale)):
        largest *= one.double().norm(dim=-1).max().item() * (1.0 if scale is None else scale.max().item())
    unit = 2.0**-13 if call.q.dtype in HALF_UNITS else 2.0**-23
    finite = want.lse[want.lse.isfinite()]
    return unit * call.scale * largest + 2.0**-22 * (finite.abs().max().item() if finite.numel() else 0.0)


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_definition(mode: str, key: str, device: str) -> None:
    """The reference to the last digits of float64, with every option."""
    q, k, v = tensors(2, 7, 11, HEADS, 2, 5, 3, device=device)
    call = quantized(MODES[mode], (q, k, v), **option(key, 7, 11, device))
    want = exact(call)
    doubled = wide(call)
    # codes of int8 are no floats, which `wide` would widen; their descales are
    out, lse = op.reference(doubled._replace(q=doubled.q.double(), k=doubled.k.double(), v=doubled.v.double(),
                                                 out_dtype=None))  # fmt: skip
    torch.testing.assert_close(out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.nan_to_num(), want.lse.nan_to_num(), rtol=1e-12, atol=1e-12)
    assert_attends("reference", call, None, want)


@pytest.mark.parametrize(("queries", "keys"), [(37, 90), (90, 37)])
@pytest.mark.parametrize("key", CASES)
def test_options(key: str, queries: int, keys: int, device: str) -> None:
    """Several tiles of each, for heads that share keys, in one mode after the other."""
    names = list(MODES)
    start = 5 * CASES.index(key) + queries
    for step in range(len(names) if device == "cuda" else 2):
        mode = MODES[names[(start + 4 * step) % len(names)]]
        qkv = tensors(1, queries, keys, HEADS, 2, device=device)
        call = quantized(mode, qkv, **option(key, queries, keys, device, 1))
        assert_attends("triton", call, (SMALL, TALL, LONG)[step % 3])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, causal: bool, device: str) -> None:
    """Each mode over lengths that fill no tile, columns that no matrix unit takes, and both layouts."""
    for queries, keys, d, dv, layout in ((33, 75, 20, 33, "bshd"), (1, 40, 1, 1, "bhsd"), (40, 17, 32, 16, "bhsd")):
        qkv = tensors(2, queries, keys, 3, 1, d, dv, device=device, layout=layout)
        for shape in ("number", "sequence"):
            call = quantized(MODES[mode], qkv, shape, layout=layout, causal=causal)
            assert_attends("triton", call)


@pytest.mark.parametrize("mode", ["int8 p", "e4m3fn p float32", "int8 float32", "float16 kv int8"])
@pytest.mark.parametrize(("d", "dv"), [(3, 7), (40, 24), (80, 80), (128, 64), (192, 128), (256, 256)])
def test_columns(mode: str, d: int, dv: int, device: str) -> None:
    assert_attends("triton", quantized(MODES[mode], tensors(1, 19, 37, 2, 1, d, dv, device=device), causal=True))


@pytest.mark.parametrize("mode", ["int8 p", "e5m2 p", "int8 float32", "bfloat16 kv e4m3fn", "float32 kv int8"])
@pytest.mark.parametrize("key", ["plain", "causal", "window", "alibi a sequence", "bias", "sinks", "everything"])
def test_packed(mode: str, key: str, device: str) -> None:
    """Sequences of several lengths, empty ones too, with descales of their own."""
    queries, keys = [5, 0, 17, 33, 7], [40, 9, 0, 17, 33]
    qkv, starts = packed(queries, keys, HEADS, 2, 16, F32, device)
    options = option(key, max(queries), max(keys), device, len(queries))
    for shape in ("head", "sequence"):
        call = quantized(MODES[mode], qkv, shape, **starts, **options)
        want = exact(call)
        for backend in OURS:
            assert_attends(backend, call, want=want)


@pytest.mark.parametrize("mode", MODES)
def test_v_may_be_transposed(mode: str, device: str) -> None:
    """[B, H, Dv, S] in memory, and views into one projection, with other codes between."""
    q, k, v = tensors(1, 33, 70, HEADS, 2, 20, device=device, layout="bhsd")
    call = quantized(MODES[mode], (q, k, v), layout="bhsd", causal=True)
    want = op.run("triton", call, config=SMALL)
    stored = call.v.mT.contiguous()
    assert torch.equal(op.run("triton", call._replace(v=stored.mT), config=SMALL), want)
    sea = codes(torch.empty(1, 2, 3, 75, 41, device=device), call.k.dtype, 9)
    inside = sea[:, :, 1, 3:73, 1::2]
    inside.copy_(call.v)
    assert_attends("triton", call._replace(v=inside))
    assert torch.equal(op.run("triton", call._replace(v=inside), config=SMALL), want)


@pytest.mark.parametrize("mode", ["int8 p", "int8 float32", "e4m3fn", "float32 kv int8"])
def test_what_a_descale_is_of(mode: str, device: str) -> None:
    """The same numbers in any shape and with any strides have the same bits."""
    run = op.run
    call = quantized(MODES[mode], tensors(2, 17, 33, HEADS, 2, device=device), "number")
    want = run("triton", call, config=SMALL)
    names = ["q_descale", "k_descale", "v_descale"] if call.q_descale is not None else ["k_descale", "v_descale"]
    for name in names:
        count = HEADS if name == "q_descale" else 2
        number = getattr(call, name)
        strided = torch.full((2, 2 * count + 1), math.nan, device=device)[:, 1::2]
        for same in (number[None], number.expand(count), number.expand(2, count), strided.copy_(number)):
            assert torch.equal(run("triton", call._replace(**{name: same}), config=SMALL), want)
        assert not torch.equal(run("triton", call._replace(**{name: 1.5 * number}), config=SMALL), want)
    # 8-bit floats have descales of 1 where none are given
    if MODES[mode].kv != INT8:
        ones = {name: torch.ones((), device=device) for name in names}
        none = dict.fromkeys(names)
        small = {"softmax_scale": 1e-5}
        got = run("triton", call._replace(**none, **small), config=SMALL)
        assert torch.equal(got, run("triton", call._replace(**ones, **small), config=SMALL))
        assert_attends("triton", call._replace(**none, **small))


@pytest.mark.parametrize("mode", ["int8 p float32", "e4m3fn p float32"])
def test_weights_that_codes_have_are_not_rounded(mode: str, device: str) -> None:
    """Scores of whole powers of two: weights are codes, and the result is as exact as float32."""
    how, unit = MODES[mode], 2.0**-6
    q = torch.zeros(1, 33, 2, 16, device=device)
    # one key's column each
    q[:, torch.arange(33), :, torch.arange(33) % 16] = 1.0
    k = torch.randint(0, 4, (1, 90, 2, 16), generator=torch.Generator().manual_seed(3)).to(device)
    v = codes(torch.empty(1, 90, 2, 24, device=device), how.kv, 4)
    found = {"q_descale": torch.ones((), device=device), "k_descale": torch.ones((), device=device)}
    found["v_descale"] = torch.full((2,), 2.0 / LARGEST[how.kv], device=device)
    for options in ({}, {"causal": True}, {"window": (20, 3), "sinks": torch.zeros(2, device=device)}):
        call = FlashAttentionCall(
            q.to(how.kv),
            k.to(how.kv),
            v,
            softmax_scale=math.log(2.0),
            p_descale=unit,
            out_dtype=F32,
            **found,
            **options,
        )
        want = exact(call)
        got = op.run("triton", call, config=SMALL)
        assert_within(got, want.out, want.mass, 4e-6)
        # in another unit weights are rounded, and it shows
        coarse = op.run("triton", call._replace(p_descale=0.3), config=SMALL)
        with pytest.raises(AssertionError, match="are off"):
            assert_within(coarse, want.out, want.mass, 4e-6)


@pytest.mark.parametrize("mode", ["int8 p float32", "e4m3fn p float32", "e5m2 p"])
def test_weights_above_the_largest_code(mode: str, device: str) -> None:
    """They are that code; the weights' sum has them as they are. One tile, where all are counted from one score."""
    q, k, v = tensors(1, 12, 30, 2, 2, device=device)
    call = quantized(MODES[mode], (q, k, v), "number")
    limit = 0.25
    call = call._replace(p_descale=limit / LARGEST[call.k.dtype], return_lse=True)
    got, lse = op.run("triton", call, config=SMALL)
    plain = call._replace(p_descale=None)
    assert torch.equal(lse, op.run("triton", plain, config=SMALL)[1])
    codes_q, codes_k, codes_v = (
        one.double()[0].transpose(0, 1) * float(scale)  # type: ignore[arg-type]
        for one, scale in ((call.q, call.q_descale), (call.k, call.k_descale), (call.v, call.v_descale))
    )
    s = codes_q @ codes_k.mT * call.scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    near, least = HALF_UNITS.get(call.k.dtype, (0.0, 0.5))
    off = near * p.clamp(max=limit) + least * call.p_descale
    want = (p.clamp(max=limit) @ codes_v / p.sum(-1, keepdim=True)).transpose(0, 1)[None]
    allowed = (off @ codes_v.abs() / p.sum(-1, keepdim=True)).transpose(0, 1)[None]
    assert (p > limit).sum() > 24
    assert_within(got, want, allowed, 1.01, 1e-5)
    # without the limit it would be beyond what is allowed
    free = (p @ codes_v / p.sum(-1, keepdim=True)).transpose(0, 1)[None]
    assert ((free - want).abs() > allowed + 2.0**-8 * want.abs()).double().mean() > 0.2


@pytest.mark.parametrize("mode", ["int8 p", "e4m3fn p float32", "e5m2 p"])
@pytest.mark.parametrize("key", ["plain", "causal", "everything"])
def test_logarithms_do_not_know_codes_of_weights(mode: str, key: str, device: str) -> None:
    qkv = tensors(2, 33, 70, HEADS, 2, device=device)
    call = quantized(MODES[mode], qkv, return_lse=True, **option(key, 33, 70, device))
    run = op.run
    with_codes, without = (
        run("triton", call, config=SMALL),
        run("triton", call._replace(p_descale=None), config=SMALL),
    )
    assert torch.equal(with_codes[1], without[1]) and not torch.equal(with_codes[0], without[0])


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("mode", ["int8", "int8 p", "e4m3fn p float32", "bfloat16 kv int8 float32"])
def test_queries_that_see_nothing(mode: str, backend: str, device: str) -> None:
    q, k, v = tensors(2, 40, 23, 2, device=device)
    sinks = torch.tensor([0.5, -3.0], device=device)
    config = {"config": SMALL} if backend == "triton" else {}
    run = op.run
    for options, blind in (({"causal": True}, 17), ({"window": (-1, 4)}, 13)):
        call = quantized(MODES[mode], (q, k, v), return_lse=True, **options)
        out, lse = run(backend, call, **config)
        assert not out[:, :blind].any() and (lse[:, :, :blind] == -math.inf).all()
        assert out[:, blind:].abs().sum(-1).min() > 0 and lse[:, :, blind:].isfinite().all()
        out, lse = run(backend, call._replace(sinks=sinks), **config)
        assert not out[:, :blind].any()
        torch.testing.assert_close(lse[:, :, :blind], sinks[:, None].expand(2, 2, blind), rtol=1e-6, atol=1e-6)
    call = quantized(MODES[mode], (q, k[:, :0], v[:, :0]), return_lse=True)
    out, lse = run(backend, call, **config)
    assert not out.any() and (lse == -math.inf).all()
    empty = quantized(MODES[mode], (q[:, :0], k, v))
    assert run(backend, empty, **config).shape == (2, 0, 2, 16)


@pytest.mark.parametrize("mode", ["int8 p", "e4m3fn", "float16 kv int8"])
def test_nothing_beyond_the_ends_is_used(mode: str, device: str) -> None:
    """The largest codes, or NaN, behind the last key, before the first and in other sequences."""
    q, k, v = tensors(1, 19, 37, HEADS, 2, device=device)
    run = op.run
    for key in ("plain", "causal", "window"):
        call = quantized(MODES[mode], (q, k, v), **option(key, 19, 37, device, 1))
        want = run("triton", call, config=SMALL)
        fill = 127 if call.k.dtype == INT8 else math.nan
        longer = [torch.full((1, 64, 2, 16), fill, device=device).to(call.k.dtype) for _ in range(2)]
        for one, inside in zip(longer, (call.k, call.v), strict=True):
            one[:, 11:48] = inside
        parts = [one[:, 11:48] for one in longer]
        assert torch.equal(run("triton", call._replace(k=parts[0], v=parts[1]), config=SMALL), want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what multiplies 8-bit values is the GPU's own there")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100", "sm_90"])
@pytest.mark.parametrize("dtype", [INT8, *HALF_UNITS], ids=str)
def test_any_architectures_arithmetic(dtype: torch.dtype, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, or widened where no matrix instruction takes them; what neither does is declined."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    fnuz = str(dtype).endswith("fnuz")
    native = dtype == INT8 or (ARCHS[arch].fp8 is not None and fnuz == (arch == "gfx942"))
    assert launches.multiplies(dtype, ARCHS[arch]) == native
    for mode in (Mode(dtype, dtype), Mode(dtype, dtype, True, F32), Mode(BF16, dtype, out=F32)):
        call = quantized(mode, tensors(2, 33, 70, HEADS, 2, 20, 40), causal=True)
        if arch == "sm_90" and fnuz:
            with pytest.raises(Unsupported, match="sm_90 has no float8"):
                op.run("triton", call)
            continue
        made = launches.launch(call, *launches.empty_results(call), SMALL, ARCHS[arch])
        assert made.constants["WIDEN"] == (mode.q == BF16 or not native)
        assert made.constants["ROUNDED"] == (0 if not mode.p else 2 if native else 1)
        if fnuz:
            # which the interpreter does not know
            continue
        assert_attends("triton", call)
        assert_attends("triton", call, op.config_of("triton", op.key(call)))


def test_8_bit_floats_that_have_no_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about the interpreter")
    call = quantized(Mode(torch.float8_e4m3fnuz, torch.float8_e4m3fnuz), tensors(1, 3, 4))
    with pytest.raises(Unsupported, match="interpreter has no float8_e4m3fnuz"):
        op.run("triton", call)
    assert_attends("reference", call)


@pytest.mark.parametrize("mode", MODES)
def test_dispatch(mode: str, device: str) -> None:
    """PyTorch, aiter and the kernel for sm_90 decline with a reason; the reference runs on the CPU."""
    call = quantized(MODES[mode], tensors(1, 20, 20, d=64, device=device))
    decision = op.decide(call)
    refused = {one.backend: one.reason for one in decision.refused}
    assert decision.backend == ("reference" if device == "cpu" else "triton")
    assert "8-bit" in refused["torch"] and {"torch_flash", "torch_math"} <= refused.keys()
    assert op.backends["triton_hopper"].refuse(call) is not None
    with pytest.raises(Unsupported, match="8-bit"):
        op.run("torch", call)
    named = call._asdict()
    q, k, v = (named.pop(name) for name in "qkv")
    assert torch.equal(ops.flash_attention(q, k, v, **named), op(call))


def test_what_other_kernels_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    from wavecrest.backends import aiter

    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
    call = quantized(Mode(BF16, INT8), tensors(1, 20, 20, d=64))
    assert hopper_launch.refusal(call, "columns 16") == "takes float16 and bfloat16"
    plain = call._replace(k=call.q, v=call.q, k_descale=None, v_descale=None)
    assert hopper_launch.refusal(plain, "columns 16") is None
    monkeypatch.setattr(aiter, "_unavailable", lambda: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True))
    assert "not int8" in (aiter._attention_refuse(call) or "")
    assert aiter._attention_refuse(plain) is None


def test_key() -> None:
    """Words in the dtype of 8-bit calls; of others it is q's dtype, as it was."""
    at = op.key_fields.index("dtype")
    qkv = tensors(1, 20, 20)
    words = {name: op.key(quantized(mode, qkv))[at] for name, mode in MODES.items()}
    assert words == {
        "int8": "int8",
        "int8 float16": "int8 to float16",
        "int8 float32": "int8 to float32",
        "int8 p": "int8 p",
        "int8 p float32": "int8 p to float32",
        "e4m3fn": "float8_e4m3fn",
        "e4m3fn p float32": "float8_e4m3fn p to float32",
        "e5m2 float32": "float8_e5m2 to float32",
        "e5m2 p": "float8_e5m2 p",
        "float32 kv int8": "float32 kv int8",
        "float16 kv int8": "float16 kv int8",
        "bfloat16 kv int8 float32": "bfloat16 kv int8 to float32",
        "bfloat16 kv e4m3fn": "bfloat16 kv float8_e4m3fn",
        "float16 kv e5m2 bfloat16": "float16 kv float8_e5m2 to bfloat16",
        "float32 kv e4m3fn": "float32 kv float8_e4m3fn",
    }
    # what the default is may also be said
    int8 = quantized(MODES["int8"], qkv)
    assert op.key(int8._replace(out_dtype=BF16)) == op.key(int8)
    for one in (F32, F16, BF16, torch.float64):
        call = FlashAttentionCall(*(x.to(one) for x in qkv))
        assert op.key(call)[at] == str(one).removeprefix("torch.")
        assert op.key(call._replace(out_dtype=one)) == op.key(call)
    # neither what descales are of, nor how weights are scaled
    keys = {op.key(quantized(MODES["int8 p"], qkv, shape)) for shape in ("number", "one", "head", "sequence")}
    keys.add(op.key(quantized(MODES["int8 p"], qkv)._replace(p_descale=0.5)))
    assert len(keys) == 1
    leaf = int8._replace(v_descale=int8.v_descale.clone().requires_grad_())  # type: ignore[union-attr]
    assert op.key(leaf) != op.key(int8)


def test_what_does_not_compile_anew() -> None:
    def made(queries: int, keys: int, batch: int, shape: str, p: float) -> Any:
        meta = tensors(batch, queries, keys, HEADS, 2, 64)
        call = quantized(MODES["int8 p"], meta, shape)._replace(p_descale=p)
        return launches.launch(call, *launches.empty_results(call), SMALL, None)

    base = made(100, 200, 2, "number", 0.01)
    for other in (made(101, 7, 3, "sequence", 0.3), made(1, 1, 2, "head", 1.0), made(100, 200, 1, "one", 2.0)):
        assert other.constants == base.constants
        assert [type(value) for value in other.args] == [type(value) for value in base.args]


def test_constants_of_floats_are_what_they_were() -> None:
    """On every architecture alike, so that no kernel is another one for what 8-bit calls need."""
    for dtype in (F32, F16, BF16):
        call = FlashAttentionCall(*tensors(1, 5, 6, dtype=dtype))
        for arch in (None, *ARCHS.values()):
            constants = launches.launch(call, *launches.empty_results(call), SMALL, arch).constants
            assert not any(constants[name] for name in ("QUANTIZED", "WIDEN", "ROUNDED", "LARGEST", "PTX", "FOREIGN"))
            assert not any(constants[name] for name in ("Q_DESCALE", "K_DESCALE", "V_DESCALE"))


def test_cost(device: str) -> None:
    call = quantized(MODES["int8 float32"], tensors(2, 5, 7, 4, 2, 8, 3, device=device), "head")
    counted = op.study.cost(call)
    assert counted.bytes == call.q.numel() + call.k.numel() + call.v.numel() + 4 * 2 * 5 * 4 * 3 + 4 * (4 + 2 + 2)
    assert op.study.cost(call._replace(out_dtype=None)).bytes == counted.bytes - 2 * 2 * 5 * 4 * 3


@pytest.mark.parametrize("arch", list(ARCHS))
def test_default_configurations(arch: str) -> None:
    """Tiles that 8-bit matrix instructions take, and k and v in LDS."""
    known = ARCHS[arch]
    for columns in (1, 40, 64, 80, 128, 192, 256):
        for bits, words in ((8, "int8"), (8, "float8_e4m3fn"), (16, "int8"), (32, "float8_e5m2")):
            for queries in (1, 64, 4096):
                for causal, more in ((False, 0), (True, 0), (True, 1), (True, 4)):
                    shape = configs.Shape(queries, columns, bits, causal, more, words)
                    made = configs.default(shape, known)
                    least = 32 if known.vendor == "nvidia" and bits == 8 else 16
                    assert made["BLOCK_N"] >= least and 16 <= made["BLOCK_M"] < 2 * max(queries, 9)
                    tried = list(space_of(shape, known))
                    assert tried[0] == made and len(tried) == len(set(tried)) > 1
                    assert all(one["BLOCK_N"] >= least for one in tried)
                    assert all(one["num_warps"] * known.wave_size <= 1024 for one in tried)


@pytest.mark.parametrize("mode", ["float32 kv int8", "float16 kv int8", "int8"])
def test_gradients(mode: str, device: str) -> None:
    """Gradients of q where it is a float, and of descales: they go through the reference."""
    how = MODES[mode]
    call = quantized(how, tensors(1, 9, 12, 2, d=8, device=device), causal=True)
    leaves = {"v_descale": call.v_descale, "k_descale": call.k_descale}
    if how.q not in LARGEST:
        leaves["q"] = call.q
    for name, value in leaves.items():
        leaves[name] = value.clone().requires_grad_()  # type: ignore[union-attr]
    wanted = call._replace(**leaves)
    op.force("triton")
    decision = op.decide(wanted)
    assert decision.backend == "reference"
    assert "no backward" in {one.backend: one.reason for one in decision.refused}["triton"]
    op(wanted).float().square().sum().backward()
    doubled = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}  # type: ignore[union-attr]
    more = {name: getattr(call, name).double() for name in ("q_descale",) if getattr(call, name) is not None}
    wider = call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double(), out_dtype=None, **more)._replace(
        **doubled
    )
    op.reference(wider).square().sum().backward()
    for name, leaf in leaves.items():
        want = doubled[name].grad
        assert leaf is not None and leaf.grad is not None and want is not None and want.abs().max() > 1e-3
        off = 1e-4 if how.q == F32 else 4e-2
        torch.testing.assert_close(leaf.grad.double(), want, rtol=off, atol=off * float(want.abs().max()))


@pytest.mark.parametrize("mode", ["int8 p", "e4m3fn", "bfloat16 kv int8 float32"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(mode: str, dynamic: bool, device: str) -> None:
    """One graph without breaks, equal to eager; with dynamic lengths one for all of a bucket."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = MODES[mode]
    given_scales = scales(how, HEADS, 2, 1, "head", device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, causal=True, **given_scales)  # type: ignore[return-value]

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager" if device == "cpu" else "inductor")
    with torch.no_grad():
        for length in (20, 21, 25):
            qkv = quantized(how, tensors(1, length, length + 4, HEADS, 2, device=device))[:3]
            torch.testing.assert_close(compiled(*qkv), call(*qkv), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 3)


_Q, _K = torch.ones(2, 5, 4, 8, dtype=INT8), torch.ones(2, 7, 2, 8, dtype=INT8)
_ONE = torch.ones(())
_ALL = {"q_descale": _ONE, "k_descale": _ONE, "v_descale": _ONE}


@pytest.mark.parametrize("backend", [None, "triton", "torch", "reference"])
@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        pytest.param((_Q, _K.float(), _K), _ALL, "k must be torch.int8 on cpu as q is", id="float-k"),
        pytest.param((_Q, _K, _K.to(E4M3)), _ALL, "v must be torch.int8 on cpu as q is", id="fp8-v"),
        pytest.param((_Q.float(), _K, _K.to(E4M3)), {}, "v must be torch.int8 as k is", id="kv"),
        pytest.param((_Q.float(), _K, _K.float()), {}, "v must be torch.int8 as k is", id="float-v"),
        pytest.param((_Q.int(), _K.int(), _K.int()), {}, "q must be float32, .* int8 or an 8-bit float", id="int32"),
        pytest.param((_Q, _K, _K), _ALL | {"k_descale": None}, "k_descale of torch.int8 must be float32", id="none"),
        pytest.param((_Q.float(), _K, _K), _ALL, "q_descale goes with 8-bit q; leave it out", id="float-q"),
        pytest.param((_Q.float(), _K.float(), _K.float()), {"v_descale": _ONE}, "v_descale goes with", id="floats"),
        pytest.param((_Q, _K, _K), _ALL | {"q_descale": torch.ones(2)}, r"one number, \[4\] or \[2, 4\]", id="heads"),
        pytest.param((_Q, _K, _K), _ALL | {"k_descale": torch.ones(4)}, r"number, \[2\] or \[2, 2\]", id="kv-heads"),
        pytest.param((_Q, _K, _K), _ALL | {"v_descale": _ONE.half()}, "v_descale of torch.int8 must", id="half"),
        pytest.param((_Q, _K, _K), _ALL | {"v_descale": 0.5}, "v_descale .* got 0.5", id="number"),
        pytest.param((_Q, _K, _K), _ALL | {"v_descale": _ONE.to("meta")}, "v_descale .* on cpu", id="device"),
        pytest.param((_Q, _K, _K), _ALL | {"p_descale": 0.0}, "p_descale must be a finite number above 0", id="p-zero"),
        pytest.param((_Q, _K, _K), _ALL | {"p_descale": math.nan}, "p_descale must be", id="p-nan"),
        pytest.param((_Q, _K, _K), _ALL | {"p_descale": True}, "p_descale must be", id="p-bool"),
        pytest.param((_Q, _K, _K), _ALL | {"p_descale": _ONE}, "p_descale must be", id="p-tensor"),
        pytest.param(
            (_Q.float(), _K, _K), {"k_descale": _ONE, "v_descale": _ONE, "p_descale": 0.1},
            "p_descale goes with 8-bit q", id="p-float-q",
        ),
        pytest.param((_Q.float(), _K.float(), _K.float()), {"p_descale": 0.1}, "p_descale goes with", id="p-floats"),
        pytest.param((_Q, _K, _K), _ALL | {"out_dtype": INT8}, "out_dtype takes float32, float16 or", id="out"),
        pytest.param((_Q, _K, _K), _ALL | {"out_dtype": "half"}, "out_dtype takes", id="out-word"),
        pytest.param((_Q.float(), _K.float(), _K.float()), {"out_dtype": BF16}, "out_dtype goes with", id="out-float"),
    ],
)  # fmt: skip
def test_wrong_arguments(args: tuple[Any, ...], options: dict[str, Any], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.flash_attention(*args, **options)
        else:
            op.run(backend, FlashAttentionCall(*args, **options))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    length = st.sampled_from((0, 1, 2, 15, 16, 17, 31, 33, 50, 70))
    kv_heads = draw(st.integers(1, 2))
    side = st.sampled_from((-1, -1, 0, 1, 5, 16, 40))
    return {
        "mode": draw(st.sampled_from(sorted(MODES))),
        "lengths": [(draw(length), draw(length)) for _ in range(draw(st.integers(1, 3)))],
        "packed": draw(st.booleans()),
        "heads": (kv_heads * draw(st.integers(1, 3)), kv_heads),
        "columns": (draw(st.sampled_from((1, 5, 16, 20, 40))), draw(st.sampled_from((1, 8, 16, 33)))),
        "order": [draw(st.permutations(range(4))) for _ in range(3)],
        "steps": [tuple(draw(st.sampled_from((1, 1, 2))) for _ in range(4)) for _ in range(3)],
        "descales": draw(st.sampled_from(("number", "one", "head", "sequence"))),
        "options": {
            "causal": draw(st.booleans()),
            "window": (draw(side), draw(side)),
            "softmax_scale": draw(st.sampled_from((None, 0.3, 1.0))),
            "softcap": draw(st.sampled_from((0.0, 0.0, 2.0))),
        },
        "bias": draw(st.sampled_from((None, None, F32, BF16))),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "config": draw(st.sampled_from((SMALL, LONG, TALL))),
        "seed": draw(st.integers(0, 1000)),
    }


def _view(call: dict[str, Any], which: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Codes with their dimensions in any order of memory, and every n-th element of a larger tensor."""
    order, steps = [i for i in call["order"][which] if i < len(shape)], call["steps"][which][: len(shape)]
    like = torch.empty(tuple(shape[i] * steps[i] for i in order), device=device)
    x = codes(like, dtype, call["seed"] + which).permute([order.index(i) for i in range(len(shape))])
    return x[tuple(slice(None, None, step) for step in steps)]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_any_call(call: dict[str, Any]) -> None:
    """Any mode, lengths, layout, strides, masks, additions, descales and configuration."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mode, (heads, kv_heads), (d, dv) = MODES[call["mode"]], call["heads"], call["columns"]
    options = dict(call["options"])
    lengths = call["lengths"] if call["packed"] else [call["lengths"][0]] * len(call["lengths"])
    queries, keys, batch = [m for m, _ in lengths], [n for _, n in lengths], len(lengths)
    leading: tuple[tuple[int, ...], ...] = ((batch, queries[0]), (batch, keys[0]))
    if call["packed"]:
        leading = ((sum(queries),), (sum(keys),))
        options |= packed(queries, keys, 1, 1, 1, F32, device)[1]
    if call["bias"] is not None:
        options["bias"] = random((batch, 1, max(queries), max(keys)), call["bias"], device, call["seed"] + 5)
    if call["alibi"]:
        options["alibi_slopes"] = random((batch, heads), F32, device, call["seed"] + 6).abs() / 8
    if call["sinks"]:
        options["sinks"] = random((heads,), F32, device, call["seed"] + 7)
    shapes = ((*leading[0], heads, d), (*leading[1], kv_heads, d), (*leading[1], kv_heads, dv))
    dtypes = (mode.q, mode.kv, mode.kv)
    qkv = [_view(call, i, *of, device) for i, of in enumerate(zip(shapes, dtypes, strict=True))]
    found = scales(mode, heads, kv_heads, batch, call["descales"], device, call["seed"])
    made = FlashAttentionCall(qkv[0], qkv[1], qkv[2], **found, **options)
    want = exact(made)
    assert_attends("triton", made, call["config"], want)
    assert_attends("reference", made, None, want)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["plain", "causal", "window", "everything"])
def test_large_on_a_gpu(mode: str, key: str) -> None:
    """The default configuration, lengths that fill no tile."""
    for queries, keys, d in ((1000, 1500, 64), (700, 500, 128), (333, 333, 80), (1, 3000, 128), (300, 300, 256)):
        qkv = tensors(2, queries, keys, HEADS, 2, d, device="cuda")
        assert_attends("triton", quantized(MODES[mode], qkv, **option(key, queries, keys, "cuda")), None)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["int8 p", "e4m3fn p float32", "bfloat16 kv e4m3fn"])
def test_replays_in_a_cuda_graph(mode: str) -> None:
    call = quantized(MODES[mode], tensors(2, 100, 130, HEADS, 2, 64, device="cuda"), causal=True)
    op(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    for seed in (5, 6):
        other = quantized(MODES[mode], tensors(2, 100, 130, HEADS, 2, 64, device="cuda"), causal=True, seed=seed)
        for one, fresh in zip(call[:3], other[:3], strict=True):
            one.copy_(fresh)
        result.fill_(math.nan)
        graph.replay()
        assert torch.equal(result, op(call))
        assert_attends("triton", call, None)
