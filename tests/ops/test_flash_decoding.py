"""flash_decoding against a definition in loops: caches with and without pages, splits, ragged lengths, each option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.attention_harness import Accesses
from tests.ops.op_harness import assert_short, same_bits
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_decoding import launch as launches
from wavecrest.ops._flash_decoding.backend import op
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops.packed import quantize_cache

OP = "flash_decoding"
F32, F16, BF16, I8, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
I4 = torch.uint8
# half a unit in the last place
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, torch.float64: 2.0**-53}
CONFIGS = {
    "default": None,
    "chunks of 32": Config(BLOCK_M=16, BLOCK_N=16, CHUNK=32, num_warps=4, num_stages=2),
    "chunks of 64": Config(BLOCK_M=32, BLOCK_N=32, CHUNK=64, num_warps=4, num_stages=2),
    "one chunk": Config(BLOCK_M=16, BLOCK_N=16, CHUNK=1024, num_warps=4, num_stages=1),
}
SMALL = CONFIGS["chunks of 32"]


def case(
    lens: list[int], heads: int = 4, kv_heads: int = 2, tokens: int = 1, d: int = 32, dv: int | None = None,
    keys: int = 128, page: int = 0, dtype: torch.dtype = F32, device: str = "cpu", cache: torch.dtype | None = None,
    beyond: float = float("nan"), groups: int = 0, scales: torch.dtype = F16, starts: list[int] | None = None,
    **options: Any,
) -> FlashDecodingCall:  # fmt: skip
    """A call whose caches hold `beyond` where no sequence has a key (an 8-bit one a large number).

    `groups`: of a cache of 4 bits; of one of 8 bits 1 for scales of tokens. Scales and shifts are `beyond` there too.
    """
    firsts = [0] * len(lens) if starts is None else [max(0, start) for start in starts]
    generator = torch.Generator().manual_seed(len(lens) + heads + keys)
    batch, pages = len(lens), keys // page if page else 0
    table = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].view(batch, -1) if page else None

    def stored(columns: int) -> Tensor:
        dense = torch.randn(batch, keys, kv_heads, columns, generator=generator)
        dense = dense.to(dtype) if cache is None else (dense * 30).clamp(-100, 100).to(cache)
        for sequence, length in enumerate(lens):
            dense[sequence, length:] = beyond if cache is None else 127
            dense[sequence, : firsts[sequence]] = beyond if cache is None else 127
        if table is None:
            return dense.to(device)
        paged = torch.full((batch * pages + 3, page, kv_heads, columns), 127.0).to(dense.dtype)
        paged[table.flatten()] = dense.view(batch * pages, page, kv_heads, columns)
        return paged.to(device)

    def placed(dense: Tensor, filler: float) -> Tensor:
        """A cache with the tokens' values, and poison in unused slots and in pages of no sequence."""
        for sequence, length in enumerate(lens):
            dense[sequence, length:] = filler
            dense[sequence, : firsts[sequence]] = filler
        if table is None:
            return dense.to(device)
        paged = torch.full((batch * pages + 3, page, *dense.shape[2:]), filler).to(dense.dtype)
        paged[table.flatten()] = dense.view(batch * pages, page, *dense.shape[2:])
        return paged.to(device)

    q = torch.randn(batch, tokens, heads, d, generator=generator).to(dtype).to(device)
    if groups > 0:
        caches = []
        for name, columns in (("k", d), ("v", dv or d)):
            if cache == I4:
                # keys of very different size and middle, so that a neighbour's scale or shift would be seen
                size = torch.rand(batch, keys, kv_heads, groups, 1, generator=generator) * 1.5 + 0.1
                middle = torch.randn(batch, keys, kv_heads, groups, 1, generator=generator)
                dense = torch.randn(batch, keys, kv_heads, groups, columns // groups, generator=generator)
                codes, scale, shift = quantize_cache((dense * size + middle).flatten(-2), groups, dtype=scales)
                options[f"{name}_shift"] = placed(shift, beyond)
                caches.append(placed(codes, 0xF7))
            else:
                scale = (torch.rand(batch, keys, kv_heads, 1, generator=generator) / 30 + 0.001).to(scales)
                caches.append(stored(columns))
            options[f"{name}_scale"] = placed(scale, beyond)
        k, v = caches
    else:
        k, v = stored(d), stored(dv or d)
    if cache is not None and groups == 0:
        options["k_scale"] = torch.rand(kv_heads, generator=generator).to(device) / 30
        options["v_scale"] = torch.tensor(0.03, device=device)
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is True:
            options[name] = torch.randn(heads, generator=generator).abs().to(device)
    if starts is not None:
        options["seq_starts"] = torch.tensor(starts, dtype=torch.int32, device=device)
    place = None if table is None else table.to(torch.int32).to(device)
    return FlashDecodingCall(q, k, v, torch.tensor(lens, dtype=torch.int32, device=device), place, **options)


def in_order(call: FlashDecodingCall, stored: Tensor, b: int, length: int) -> Tensor:
    """The values of a sequence's tokens in a cache, in their order."""
    if call.block_table is None:
        return stored[b, :length].cpu()
    table = call.block_table[b].tolist()
    found = [stored[table[j // call.page], j % call.page] for j in range(length)]
    return (torch.stack(found) if found else stored[:0, 0]).cpu()


def values(call: FlashDecodingCall, which: str, b: int, length: int) -> tuple[Tensor, Tensor]:
    """(what a sequence's tokens hold in float64, how large what is added up to that is), one column at a time."""
    cache = call.k_cache if which == "k" else call.v_cache
    scale, shift = (call.k_scale, call.k_shift) if which == "k" else (call.v_scale, call.v_shift)
    one = in_order(call, cache, b, length)
    if scale is None:
        return one.double(), one.double().abs()
    if scale.ndim < 4:
        one = one.double() * scale.cpu().double().reshape(-1, 1)
        return one, one.abs()
    factors = in_order(call, scale, b, length).double()
    if shift is None:
        return one.double() * factors, (one.double() * factors).abs()
    shifts, groups = in_order(call, shift, b, length).double(), scale.shape[3]
    columns = 2 * one.shape[-1]
    rows = torch.empty(*one.shape[:-1], columns, dtype=torch.float64)
    size = torch.empty_like(rows)
    half = columns // groups // 2
    for c in range(columns):
        group, place = divmod(c, 2 * half)
        byte = one[..., group * half + place % half].int()
        code = (byte % 16 if place < half else byte // 16).double()
        rows[..., c] = code * factors[..., group] + shifts[..., group]
        # sums of codes less 8, and of the rest, are apart
        size[..., c] = (code - 8).abs() * factors[..., group] + (shifts + 8 * factors)[..., group].abs()
    return rows, size


def definition(call: FlashDecodingCall) -> tuple[Tensor, Tensor, Tensor]:
    """(result, logarithms, how large its terms are) in float64, one query and head at a time."""
    y = torch.zeros(call.shape, dtype=torch.float64)
    lse = torch.full((call.batch, call.heads, call.seqlen_q), -math.inf, dtype=torch.float64)
    size = torch.zeros_like(y)
    for b, length in enumerate(call.seq_lens.tolist()):
        k, _ = values(call, "k", b, length)
        v, v_size = values(call, "v", b, length)
        for t in range(call.seqlen_q):
            own = length - call.seqlen_q + t
            first = 0 if call.window < 0 else max(0, own - call.window)
            first = first if call.seq_starts is None else max(first, int(call.seq_starts[b]))
            seen = slice(first, max(first, own + 1))
            for h in range(call.heads):
                head = h // call.group
                scores = k[seen, head] @ call.q[b, t, h].cpu().double() * call.scale
                if call.softcap > 0:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                if call.alibi_slopes is not None:
                    slope = float(call.alibi_slopes.expand(call.batch, call.heads)[b, h])
                    scores = scores - slope * (own - torch.arange(seen.start, seen.stop))
                sink = [] if call.sinks is None else [float(call.sinks[h])]
                if not len(scores) + len(sink):
                    continue
                top = max(scores.tolist() + sink)
                total = sum(math.exp(s - top) for s in scores.tolist() + sink)
                lse[b, h, t] = top + math.log(total)
                weights = torch.exp(scores - top) / total
                y[b, t, h] = weights @ v[seen, head]
                size[b, t, h] = weights @ v_size[seen, head]
    return y, lse, size


def keys_rounded(call: FlashDecodingCall) -> float:
    """How far scores may be off because keys of several groups are rounded to q's type before they are multiplied."""
    if call.groups < 2:
        return 0.0
    off = 0.0
    for b, length in enumerate(call.seq_lens.tolist()):
        k, _ = values(call, "k", b, length)
        k = k if call.seq_starts is None else k[max(0, int(call.seq_starts[b])) :]
        if k.shape[0] > 0:
            largest = k.abs().amax(0).repeat_interleave(call.group, dim=0)
            off = max(off, float((call.q[b].cpu().double().abs() * largest).sum(-1).max()))
    return off * call.scale * ROUNDING[call.q.dtype]


def assert_right(call: FlashDecodingCall, got: Any, more: float = 0.0) -> None:
    """Within what rounds off scores, weights and sums of the kernel's types, and values of several groups.

    `more`: how far scores may be off besides.
    """
    y, lse, size = definition(call)
    result, logarithms = got if call.return_lse else (got, None)
    assert result.dtype == call.q.dtype and result.shape == call.shape and result.is_contiguous()
    unit = ROUNDING[call.q.dtype]
    # weights are rounded to q's type, the result once more; scores are sums of D products in float32
    scores = 2.0**-24 * 4 * call.head_dim**0.5 * 8
    keys = keys_rounded(call) + more
    bound = size * (3 * unit + scores + math.expm1(2 * keys)) + y.abs() * unit + 1e-12
    off = (result.cpu().double() - y).abs()
    assert bool((off <= bound).all()), f"{float((off - bound).max()):.2e} beyond the bound"
    if logarithms is not None:
        assert logarithms.dtype == (torch.float64 if call.q.dtype == torch.float64 else F32)
        assert torch.equal(logarithms.cpu().isneginf(), lse.isneginf())
        seen = ~lse.isneginf()
        torch.testing.assert_close(logarithms.cpu().double()[seen], lse[seen], rtol=1e-5, atol=1e-4 + keys)


def run(call: FlashDecodingCall, config: Config | None = SMALL, backend: str = "triton") -> Any:
    return op.run(backend, call, config=config) if backend == "triton" else op.run(backend, call)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lens": [128, 100]},
    "one key": {"lens": [1, 2], "keys": 16},
    "empty": {"lens": [0, 40, 0], "return_lse": True},
    "fewer keys than queries": {"lens": [2, 5], "tokens": 4, "return_lse": True},
    "pages of 16": {"lens": [128, 17, 0], "tokens": 2, "heads": 8, "page": 16, "dtype": F16},
    "pages of 7": {
        "lens": [50, 3], "tokens": 3, "kv_heads": 1, "d": 40, "dv": 24, "keys": 63, "page": 7, "dtype": BF16,
    },
    "pages of 1": {"lens": [33], "keys": 40, "page": 1},
    "pages of 64": {"lens": [100, 65], "page": 64},
    "window": {"lens": [120, 90], "tokens": 4, "heads": 6, "kv_heads": 3, "page": 64, "window": 33},
    "window of itself": {"lens": [120, 1], "window": 0},
    "softcap": {"lens": [70], "softcap": 2.0, "return_lse": True},
    "alibi": {"lens": [70, 40], "tokens": 2, "alibi_slopes": True},
    "sinks": {"lens": [70, 0], "sinks": True, "return_lse": True},
    "everything": {
        "lens": [127, 2], "tokens": 3, "heads": 6, "kv_heads": 3, "d": 24, "dv": 40, "page": 32, "window": 70,
        "softcap": 5.0, "alibi_slopes": True, "sinks": True, "return_lse": True,
    },
    "int8": {"lens": [128, 77], "heads": 8, "page": 32, "dtype": BF16, "cache": I8},
    "int8 dense": {"lens": [128, 77], "dtype": F16, "cache": I8},
    "fp8": {"lens": [100, 7], "dtype": F16, "cache": E4M3},
    "int8 by token": {"lens": [128, 77], "heads": 8, "page": 32, "dtype": BF16, "cache": I8, "groups": 1},
    "fp8 by token": {"lens": [100, 7], "tokens": 2, "dtype": F16, "cache": E4M3, "groups": 1, "page": 7, "keys": 105},
    "int8 by token float32": {"lens": [100, 7], "cache": I8, "groups": 1, "scales": F32, "window": 40},
    "int4": {"lens": [128, 77, 0], "heads": 8, "page": 32, "dtype": BF16, "cache": I4, "groups": 1},
    "int4 dense": {"lens": [128, 77], "dtype": F16, "cache": I4, "groups": 1, "return_lse": True},
    "int4 float32": {"lens": [100, 33], "tokens": 2, "cache": I4, "groups": 1, "scales": F32, "return_lse": True},
    "int4 2 groups": {
        "lens": [90, 5], "dtype": BF16, "cache": I4, "groups": 2, "d": 36, "dv": 20, "page": 9, "keys": 99,
        "scales": BF16, "return_lse": True,
    },
    "int4 4 groups": {"lens": [90, 5], "tokens": 3, "dtype": F16, "cache": I4, "groups": 4, "d": 24, "dv": 72},
    "int4 8 groups": {"lens": [90], "dtype": BF16, "cache": I4, "groups": 8, "d": 64, "dv": 16, "page": 64},
    "int4 pages of 1": {"lens": [33, 2], "keys": 40, "page": 1, "cache": I4, "groups": 4},
    "int4 few columns": {"lens": [40, 50], "dtype": BF16, "cache": I4, "groups": 1, "d": 2, "dv": 6},
    "int4 window": {
        "lens": [120, 90], "tokens": 4, "heads": 6, "kv_heads": 3, "page": 64, "window": 33, "dtype": BF16, "cache": I4,
        "groups": 1,
    },
    "int4 everything": {
        "lens": [127, 2], "tokens": 3, "heads": 6, "kv_heads": 3, "d": 24, "dv": 40, "page": 32, "window": 70,
        "softcap": 5.0, "alibi_slopes": True, "sinks": True, "return_lse": True, "cache": I4, "groups": 2,
    },
    "many rows": {"lens": [100], "tokens": 16, "heads": 8, "kv_heads": 1, "return_lse": True},
    "one head": {"lens": [40, 50], "heads": 1, "kv_heads": 1},
    "every head its own": {"lens": [40, 50], "heads": 3, "kv_heads": 3, "d": 1, "dv": 5},
    "scale of its own": {"lens": [40], "softmax_scale": 0.7},
    "starts": {"lens": [128, 100, 50, 7], "starts": [0, 37, 48, -3], "return_lse": True},
    "starts at the end and beyond": {
        "lens": [64, 60, 40, 33, 0], "starts": [64, 60, 2**31 - 1, 32, 5], "tokens": 2, "return_lse": True,
    },
    "starts between queries": {"lens": [90, 34, 16], "starts": [88, 32, 13], "tokens": 4, "return_lse": True},
    "starts and window": {
        "lens": [120, 90, 70], "starts": [110, 10, 68], "tokens": 4, "heads": 6, "kv_heads": 3, "page": 16,
        "window": 33, "return_lse": True,
    },
    "starts and sinks": {
        "lens": [70, 40], "starts": [70, 20], "sinks": True, "return_lse": True, "page": 7, "keys": 70,
    },
    "starts of int4": {
        "lens": [128, 77], "starts": [50, 77], "page": 32, "dtype": BF16, "cache": I4, "groups": 4, "return_lse": True,
    },
    "starts and everything": {
        "lens": [127, 60], "starts": [33, 58], "tokens": 3, "heads": 6, "kv_heads": 3, "d": 24, "dv": 40, "page": 32,
        "window": 70, "softcap": 5.0, "alibi_slopes": True, "sinks": True, "return_lse": True, "cache": I8, "groups": 1,
        "dtype": BF16,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, config: Config | None, device: str) -> None:
    call = case(**CASES[name], device=device)
    assert_right(call, run(call, config))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_other_backends(name: str, backend: str, device: str) -> None:
    # 0 · NaN is NaN in PyTorch's product of scores too: zeros beyond the keys, as a cache begins with
    call = case(**CASES[name], beyond=0.0, device=device)
    try:
        assert_right(call, run(call, backend=backend))
    except Unsupported as error:
        assert backend == "torch" and any(word in str(error) for word in ("has no", "would copy"))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64])
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    call = case([90, 33], tokens=2, dtype=dtype, return_lse=True, device=device)
    assert_right(call, op(call))
    if dtype != torch.float64:
        assert_right(call, run(call))


@pytest.mark.parametrize("layout", ["permuted", "sliced", "expanded", "step"])
def test_strides(layout: str, device: str) -> None:
    call = case([90, 33], tokens=2, heads=6, kv_heads=3, device=device)

    def placed(x: Tensor) -> Tensor:
        if layout == "permuted":
            return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        if layout == "sliced":
            wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype, device=device)
            wide[..., 3:-2] = x
            return wide[..., 3:-2]
        if layout == "expanded":
            return x[:1].expand(x.shape)
        wide = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), 7.0, dtype=x.dtype, device=device)
        wide[:, ::2] = x
        return wide[:, ::2]

    call = call._replace(q=placed(call.q), k_cache=placed(call.k_cache), v_cache=placed(call.v_cache))
    if layout == "expanded":
        call = call._replace(seq_lens=torch.tensor([33, 33], dtype=torch.int32, device=device))
        call = call._replace(k_cache=case([33, 33], heads=6, kv_heads=3, device=device).k_cache)
        call = call._replace(v_cache=call.k_cache[:1].expand(call.k_cache.shape))
    assert_right(call, run(call))


def test_tiles_that_reach_beyond_32_bits(device: str) -> None:
    # the 15th token of a tile is more than 2³¹ bytes from the first, in memory that is hardly touched
    step, call = 2**27 + 2**24, case([17], heads=2, kv_heads=1, d=16, keys=17, cache=I8, dtype=F16, device=device)
    memory = torch.empty(18 * step, dtype=I8, device=device)
    places = [memory[start:].as_strided(call.k_cache.shape, (17 * step, step, 16, 1)) for start in (0, 32)]
    for place, cache in zip(places, (call.k_cache, call.v_cache), strict=True):
        place.copy_(cache)
    call = call._replace(k_cache=places[0], v_cache=places[1])
    assert_right(call, run(call))


def test_rows_that_do_not_lie_together_are_refused(device: str) -> None:
    call = case([40], device=device)
    call = call._replace(k_cache=call.k_cache.mT.contiguous().mT)
    with pytest.raises(Unsupported, match="lie next to each other"):
        run(call)
    assert_right(call._replace(k_cache=call.k_cache.nan_to_num(0.0)), op(call._replace(
        k_cache=call.k_cache.nan_to_num(0.0), v_cache=call.v_cache.nan_to_num(0.0)
    )))  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(data: st.DataObject, device: str) -> None:
    draw = data.draw
    page, kv_heads = draw(st.sampled_from([0, 1, 5, 16, 32])), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 4)) * (page or draw(st.integers(1, 40)))
    options: dict[str, Any] = {"window": draw(st.sampled_from([-1, 0, 3, 40])), "return_lse": draw(st.booleans())}
    lens = draw(st.lists(st.integers(0, keys), min_size=1, max_size=3))
    if draw(st.booleans()):
        options["starts"] = [draw(st.integers(0, keys)) for _ in lens]
    for name in ("alibi_slopes", "sinks"):
        if draw(st.booleans()):
            options[name] = True
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 10.0]))
    dtype = draw(st.sampled_from([F32, F16, BF16]))
    cache = draw(st.sampled_from([None, I8, I4])) if dtype != F32 else draw(st.sampled_from([None, I4]))
    d, dv = draw(st.sampled_from([1, 8, 24, 33])), draw(st.sampled_from([1, 16, 20]))
    if cache == I8:
        options["groups"] = draw(st.sampled_from([0, 1]))
    elif cache == I4:
        options["groups"] = groups = draw(st.sampled_from([1, 2, 4, 8]))
        options["scales"] = draw(st.sampled_from([F16, BF16, F32]))
        d, dv = (2 * groups * draw(st.integers(1, 48 // groups)) for _ in range(2))
    call = case(
        lens, kv_heads * draw(st.integers(1, 5)), kv_heads,
        draw(st.integers(1, 5)), d, dv, keys, page, dtype, device, cache, **options,
    )  # fmt: skip
    assert_right(call, run(call, draw(st.sampled_from(list(CONFIGS.values())))))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("cache", [I8, E4M3, torch.float8_e5m2])
def test_every_number_of_8_bits(cache: torch.dtype, dtype: torch.dtype, device: str) -> None:
    # one key has all the weight: the result is its value, exactly
    codes = torch.arange(-128, 128, device=device).to(I8).view(cache).view(1, 1, 1, 256)
    numbers = codes.float().flatten()
    one, lens = torch.ones(1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    finite = codes.view(I8).where(numbers.isfinite(), 0).view(cache)
    keys = finite.float().flatten().view(16, 16)
    # 16 heads, each of which picks one column of the key
    columns = torch.eye(256, dtype=dtype, device=device).view(16, 1, 1, 16, 256)
    for q, wanted in zip(columns, keys, strict=True):
        call = FlashDecodingCall(q, finite, codes, lens, softmax_scale=1.0, k_scale=one, v_scale=one, return_lse=True)
        got, lse = run(call)
        assert torch.equal(got.float().nan_to_num(999.0), numbers.nan_to_num(999.0).expand(1, 1, 16, 256))
        torch.testing.assert_close(lse[0, :, 0], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_every_code_and_its_place(dtype: torch.dtype, device: str) -> None:
    # one key has all the weight: the result is its value, exactly; each byte's two codes differ by more than one place
    codes = torch.arange(256, device=device).to(I4).view(2, 1, 1, 128)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    for groups in (1, 2, 4, 8):
        # whole numbers that 16 bits hold, of each group its own
        scale = torch.arange(1, groups + 1, device=device).to(F16).expand(2, 1, 1, groups)
        shift = -8.0 * scale + torch.arange(groups, device=device).to(F16)
        q = torch.zeros(2, 1, 1, 256, dtype=dtype, device=device)
        call = FlashDecodingCall(q, codes, codes, lens, k_scale=scale, v_scale=scale, k_shift=shift, v_shift=shift)
        wanted = torch.empty(2, 256)
        half = 128 // groups
        for sequence in range(2):
            for byte in range(128):
                group, place = divmod(byte, half)
                for code, column in ((128 * sequence + byte) % 16, 0), ((128 * sequence + byte) // 16, half):
                    wanted[sequence, 2 * half * group + place + column] = code * (group + 1) - 8 * (group + 1) + group
        assert torch.equal(run(call).cpu().float().view(2, 256), wanted)


# what NVIDIA's kernel does with codes: values in pairs of columns, products of float16, scales a step ahead


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("cache", "groups"), [(I8, 0), (I8, 1), (E4M3, 0), (E4M3, 1), (I4, 1), (I4, 4)])
@pytest.mark.parametrize("nvidia", [False, True])
def test_codes_as_each_vendor_reads_them(
    nvidia: bool, cache: torch.dtype, groups: int, dtype: torch.dtype, page: int, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launches, "_is_nvidia", lambda _arch: nvidia)
    # with a sink in one split, and pages in several
    options: dict[str, Any] = {"lens": [90, 33, 0], "page": page} if page else {"lens": [30, 9, 0], "keys": 32}
    options |= {"sinks": None if page else True, "dtype": dtype, "cache": cache, "groups": groups}
    call = case(tokens=2, d=64, dv=40, device=device, **options)
    made = launches.launches(call, SMALL, None)[0].constants
    narrow = nvidia and groups < 2
    wanted = (narrow, narrow and dtype == BF16, nvidia and groups == 1)
    assert (made["PAIRS"], made["HALF"], made["AHEAD"]) == wanted
    assert_right(call, run(call))


@pytest.mark.parametrize("d", [16, 64, 80, 96, 128, 192])
@pytest.mark.parametrize("dv", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize(("cache", "groups"), [(I8, 0), (E4M3, 1), (torch.float8_e5m2, 0), (I4, 1)])
def test_products_from_shared_memory_come_in_pairs_from_64_columns_on(
    cache: torch.dtype, groups: int, d: int, dv: int
) -> None:
    """ptxas 12.8 compiled one of two products of 32 columns wrongly: see `tests/compile/test_uniform.py`."""
    call = case([5], d=d, dv=dv, keys=64, dtype=BF16, cache=cache, groups=groups)
    for arch in ("sm_80", "sm_90", "sm_100"):
        for rows, warps in ((16, 4), (32, 4), (64, 2), (64, 4), (128, 8)):
            config = Config(BLOCK_M=rows, BLOCK_N=64, CHUNK=64, num_warps=warps, num_stages=2)
            (first, *_) = launches.launches(call, config, ARCHS[arch])
            shared = arch == "sm_90" and rows >= 64 and warps % 4 == 0
            # columns of each of the two products; those of a cache of 4 bits are of bytes
            half = first.constants["BLOCK_DV"] // 2
            assert half >= dv // 2 // (2 if cache == I4 else 1)
            assert first.constants["PAIRS"] == (half >= (64 if shared else 16)), (arch, rows, warps)


@pytest.mark.parametrize("odd_first", [True, False])
@pytest.mark.parametrize(("cache", "groups"), [(I8, 0), (I4, 1)])
def test_values_that_begin_at_an_odd_byte(
    cache: torch.dtype, groups: int, odd_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be read as pairs; what was bound for other addresses notices."""
    even = case([70, 33], d=64, dtype=BF16, cache=cache, groups=groups, device=device, beyond=0.0)
    memory = torch.zeros(2, even.v_cache.numel() + 2, dtype=even.v_cache.dtype, device=device)
    odd = even._replace(v_cache=memory[0, 1:-1].view_as(even.v_cache).copy_(even.v_cache))
    # at two bytes, not four
    even = even._replace(v_cache=memory[1, :-2].view_as(even.v_cache).copy_(even.v_cache))
    assert odd.v_cache.data_ptr() % 2 == 1 and even.v_cache.data_ptr() % 4 == 2
    bind, again = launches.bind, []
    monkeypatch.setattr(launches, "bind", lambda *parts: again.append(parts[2]) or bind(*parts))
    bound = bind(odd if odd_first else even, SMALL)
    # in the interpreter an odd address is no fault: what was bound for one takes all
    expected: list[bool] = []
    for call in (odd, even, odd) if odd_first else (even, odd, even):
        assert_right(call, bound(call))
        if call is odd and not odd_first:
            expected = [False]
        assert again == expected


@pytest.mark.parametrize("cache", [I8, E4M3])
def test_many_weights_that_float16_has_not(cache: torch.dtype, device: str) -> None:
    """Beside a weight of 1 each is about 2⁻²⁷, and together they are the result."""
    call = case([1024], heads=1, kv_heads=1, d=16, keys=1024, dtype=BF16, cache=cache, device=device)
    one = torch.ones(1, device=device)
    q = torch.zeros_like(call.q)
    q[..., 0] = 27 * math.log(2) * 4
    k, v = torch.zeros_like(call.k_cache.float()), torch.full_like(call.v_cache.float(), 64.0)
    k[0, 5, 0, 0], v[0, 5] = 1.0, 0.0
    call = call._replace(q=q, k_cache=k.to(cache), v_cache=v.to(cache), k_scale=one, v_scale=one)
    weight = math.exp(-float(call.q[0, 0, 0, 0]) * call.scale)
    wanted = 64 * 1023 * weight / (1 + 1023 * weight)
    assert float(run(call).float().mean()) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("cache", [I8, E4M3, I4])
@pytest.mark.parametrize("size", [2.0**40, 2.0**-40, 0.0])
def test_queries_that_float16_has_not(size: float, cache: torch.dtype, device: str) -> None:
    """Rows of very different size, each beyond float16 or below it."""
    groups = 1 if cache == I4 else 0
    call = case([50, 30], tokens=2, d=64, dtype=BF16, cache=cache, groups=groups, scales=F32, device=device)
    rows = torch.tensor([size, 1.0], device=device)[None, :, None, None]
    call = call._replace(q=(call.q.float() * rows).to(BF16), softmax_scale=0.1 / max(size, 1.0))
    if size < 1.0:
        call = call._replace(softmax_scale=0.1 / (size or 1.0), q=call.q[:, :1])
    assert_right(call, run(call))
    # the second half of the columns, whose codes are the high ones of 4 bits, beyond what the first half is over
    q = call.q.clone()
    q[..., 32:] *= 2.0**20
    call = call._replace(q=q, softmax_scale=call.scale * 2.0**-20)
    assert_right(call, run(call))


@pytest.mark.parametrize(
    ("cache", "groups", "shift"), [(I8, 1, 0.0), (I4, 1, 0.0), (I4, 1, 5.0), (I4, 4, 0.0), (I4, 4, 5.0)]
)
def test_scales_that_float16_has_no_room_for(cache: torch.dtype, groups: int, shift: float, device: str) -> None:
    # beside the largest weight of 1, a product with such a scale would be less than float16 holds: 2⁻²⁴
    call = case([20, 16], dtype=F16, cache=cache, groups=groups, scales=F32, keys=32, device=device)
    assert call.v_scale is not None
    call = call._replace(v_scale=torch.full_like(call.v_scale, 2.0**-22))
    if call.v_shift is not None:
        call = call._replace(v_shift=torch.full_like(call.v_shift, shift * 2.0**-18))
    y, _, size = definition(call)
    # what float16 itself rounds values and results of this size to
    bound = size * 3 * ROUNDING[F16] + 2.0**-24
    assert bool(((run(call).cpu().double() - y).abs() <= bound).all()) and float(y.abs().max()) > 8 * 2.0**-24


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_values_of_groups_are_rounded_to_nearest(dtype: torch.dtype, device: str) -> None:
    # one key has all the weight; scales and shifts of 10 bits, so that values before they are rounded are exact
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (32, 1, 1, 64), generator=generator).to(I4)
    scale = (torch.randint(1, 1024, (32, 1, 1, 4), generator=generator) / 1024).to(F16)
    shift = (torch.randint(-1023, 1024, (32, 1, 1, 4), generator=generator) / 1024).to(F16)
    lens = torch.ones(32, dtype=torch.int32)
    q = torch.zeros(32, 1, 1, 128, dtype=dtype)
    tensors = [one.to(device) for one in (q, codes, lens, scale, shift)]
    call = FlashDecodingCall(
        tensors[0], tensors[1], tensors[1], tensors[2], k_scale=tensors[3], v_scale=tensors[3], k_shift=tensors[4],
        v_shift=tensors[4],
    )  # fmt: skip
    wanted = torch.stack([values(call, "v", b, 1)[0][0, 0] for b in range(32)])
    assert torch.equal(run(call).cpu().view(32, 128), wanted.to(dtype))


@pytest.mark.parametrize("which", ["k_scale", "v_scale", "k_shift", "v_shift"])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_scale_that_is_not_a_number_is_seen(groups: int, dtype: torch.dtype, which: str, device: str) -> None:
    call = case([20, 16], keys=32, dtype=dtype, cache=I4, groups=groups, device=device)
    numbers = getattr(call, which)
    # each bit of a NaN set, which rounding by integers could carry over
    numbers[0, 7, 1, groups - 1] = torch.tensor(0x7FFF, dtype=torch.int16).view(F16)
    got = run(call)
    reached = torch.zeros_like(got, dtype=torch.bool)
    # the heads that share this one; all columns if scores are reached, else those of the group
    reached[0, :, 2:, 0 if which.startswith("k") else 32 - 32 // groups :] = True
    assert torch.equal(got.isnan(), reached)


@pytest.mark.parametrize("groups", [1, 2])
def test_any_strides_of_scales(groups: int, device: str) -> None:
    call = case([90, 33], tokens=2, page=16, heads=6, kv_heads=3, groups=groups, cache=I4, dtype=BF16, device=device)
    wanted = run(call)

    def apart(one: Tensor | None, order: tuple[int, ...]) -> Tensor:
        assert one is not None
        lies = one.permute(order).contiguous()
        back = [order.index(dim) for dim in range(4)]
        wide = torch.full((*lies.shape[:2], 2 * lies.shape[2], lies.shape[3]), 7.0, dtype=one.dtype, device=device)
        wide[:, :, ::2] = lies
        return wide[:, :, ::2].permute(back)

    call = call._replace(
        k_scale=apart(call.k_scale, (0, 2, 1, 3)), k_shift=apart(call.k_shift, (1, 2, 0, 3)),
        v_scale=apart(call.v_scale, (2, 1, 0, 3)), v_shift=apart(call.v_shift, (1, 0, 2, 3)),
    )  # fmt: skip
    assert same_bits(run(call), wanted)
    # tokens next to each other
    call = call._replace(k_scale=apart(call.k_scale, (0, 2, 3, 1)))
    if groups == 1:
        assert same_bits(run(call), wanted)
    else:
        with pytest.raises(Unsupported, match="groups of scales, lie next to each other"):
            run(call)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64])
@pytest.mark.parametrize("scales", [F16, BF16, F32])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_quantize_cache(groups: int, scales: torch.dtype, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(3, 5, 2, 48, device=device) * 3 + 1).to(dtype)
    x[0, 0, 0] = 2.5
    codes, scale, shift = quantize_cache(x, groups, dtype=scales)
    assert codes.dtype == I4 and codes.shape == (3, 5, 2, 24) and codes.is_contiguous()
    for one in (scale, shift):
        assert one.dtype == scales and one.shape == (3, 5, 2, groups)
    lens = torch.full((3,), 5, dtype=torch.int32, device=device)
    call = FlashDecodingCall(x, codes, codes, lens, k_scale=scale, v_scale=scale, k_shift=shift, v_shift=shift)
    wide, unit = x.cpu().double(), ROUNDING[scales]
    for b in range(3):
        back, _ = values(call, "k", b, 5)
        step = in_order(call, scale, b, 5).double().repeat_interleave(48 // groups, dim=-1)
        least = in_order(call, shift, b, 5).double().repeat_interleave(48 // groups, dim=-1).abs()
        off = (back - wide[b]).abs()
        # half a scale, and what the ends lose as scale and shift are rounded
        assert bool((off <= step * (0.5 + 15 * unit + 1e-5) + least * unit + 1e-12).all())
        # which is nothing where a code can say it
        shifts = in_order(call, shift, b, 5).double().repeat_interleave(48 // groups, dim=-1)
        inside = (wide[b] >= shifts) & (wide[b] <= shifts + 15 * step)
        assert bool((off <= step * 0.5 + 1e-5)[inside].all())
        # no code is spared: the smallest of a group has 0, the largest 15, where it is not of one value
        grouped = torch.stack((codes[b] & 15, codes[b] >> 4)).reshape(2, 5, 2, groups, -1).cpu()
        spread = in_order(call, scale, b, 5) > 0
        assert bool((grouped.amax((0, -1)) == 15)[spread].all()) and bool((grouped.amin((0, -1)) == 0).all())
    assert bool((scale[0, 0, 0] == 0).all()) and bool((codes[0, 0, 0] == 0).all())
    assert bool((shift[0, 0, 0] == 2.5).all())


def test_quantize_cache_of_what_is_not_a_number(device: str) -> None:
    x = torch.randn(4, 16, device=device)
    x[1, 3], x[2, 9] = math.nan, math.inf
    codes, scale, shift = quantize_cache(x, 2)
    finite = (scale.isfinite() & shift.isfinite()).tolist()
    assert finite == [[True, True], [False, True], [True, False], [True, True]]
    clean, kept, moved = quantize_cache(x[3:], 2)
    assert torch.equal(codes[3:], clean) and torch.equal(scale[3:], kept) and torch.equal(shift[3:], moved)


@pytest.mark.parametrize(
    ("x", "groups", "dtype", "message"),
    [
        (torch.zeros(3, 12), 4, F16, "D must be a multiple of 2"),
        (torch.zeros(3, 12), 3, F16, "groups one of"),
        (torch.zeros(3, 0), 1, F16, "D must be a multiple"),
        (torch.zeros(3, 12, dtype=I8), 1, F16, "x must be a floating-point tensor"),
        (torch.zeros(3, 12), 1, torch.float64, "dtype must be one of"),
    ],
)
def test_quantize_cache_refuses(x: Tensor, groups: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        quantize_cache(x, groups, dtype=dtype)


@pytest.mark.parametrize("page", [16, 5])
def test_a_window_hides_what_is_not_a_number(page: int, device: str) -> None:
    # keys before the window may be anything, as may their pages
    call = case([100, 128], tokens=2, keys=160, page=page, window=20, beyond=0.0, device=device)
    wanted = run(call)
    assert call.block_table is not None
    for b, length in enumerate((100, 128)):
        first = length - 2 - 20
        for j in range(first):
            number = int(call.block_table[b, j // page])
            call.k_cache[number, j % page] = math.nan
            call.v_cache[number, j % page] = math.inf
        call.block_table[b, : first // page] = -(2**31)
    assert same_bits(run(call), wanted)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("starts", [None, [0, 37]])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_pytorch_takes_nothing_from_keys_that_no_query_sees(
    backend: str, dtype: torch.dtype, starts: list[int] | None, window: int, poison: float, device: str
) -> None:
    call = case([100, 128], tokens=2, keys=160, window=window, beyond=0.0, starts=starts, dtype=dtype, device=device)
    wanted = run(call, backend=backend)
    for b, length in enumerate((100, 128)):
        first = max(0 if window < 0 else length - 2 - window, 0 if starts is None else starts[b])
        for cache in (call.k_cache, call.v_cache):
            cache[b, :first], cache[b, length:] = poison, poison
    assert same_bits(run(call, backend=backend), wanted)


@pytest.mark.parametrize("entry", [-(2**31), 2**31 - 1, -1])
@pytest.mark.parametrize("window", [-1, 20])
def test_the_reference_reads_no_entry_of_a_page_that_no_query_sees(window: int, entry: int, device: str) -> None:
    call = case([100, 0], tokens=2, keys=160, page=16, window=window, starts=[37, 0], device=device)
    wanted = run(call, backend="reference")
    assert call.block_table is not None
    first = max(37, 0 if window < 0 else 100 - 2 - window)
    call.block_table[0, : first // 16] = entry
    call.block_table[0, -(-100 // 16) :] = entry
    call.block_table[1] = entry
    assert same_bits(run(call, backend="reference"), wanted)


@pytest.mark.parametrize(("cache", "groups"), [(I8, 1), (I4, 1), (I4, 4)])
def test_a_window_hides_scales_that_are_not_numbers(cache: torch.dtype, groups: int, device: str) -> None:
    call = case(
        [100, 128], tokens=2, keys=160, page=5, window=20, dtype=BF16, cache=cache, groups=groups, device=device
    )
    wanted = run(call)
    assert call.block_table is not None
    for b, length in enumerate((100, 128)):
        for j in range(length - 2 - 20):
            number = int(call.block_table[b, j // 5])
            for one in (call.k_scale, call.v_scale, call.k_shift, call.v_shift):
                if one is not None:
                    one[number, j % 5] = math.nan
    assert same_bits(run(call), wanted)


@pytest.mark.parametrize(("cache", "groups"), [(None, 0), (I8, 1), (I4, 1), (I4, 4)])
def test_same_bits_again_and_in_any_batch(cache: torch.dtype | None, groups: int, device: str) -> None:
    call = case(
        [90, 33, 128, 1], tokens=2, page=16, dtype=F32 if cache is None else BF16, cache=cache, groups=groups,
        batch_invariant=True, device=device,
    )  # fmt: skip
    op.force("triton")
    whole = op(call)
    assert same_bits(op(call), whole)
    for b in range(4):
        assert call.block_table is not None
        alone = call._replace(
            q=call.q[b : b + 1], seq_lens=call.seq_lens[b : b + 1], block_table=call.block_table[b : b + 1]
        )
        assert same_bits(op(alone), whole[b : b + 1])


@pytest.mark.parametrize("window", [-1, 50])
def test_same_bits_however_much_room_the_cache_has(window: int, device: str) -> None:
    # 4 splits, of which the last are empty, and 40: more than are put together at a time
    call = case([600, 33], keys=640, window=window, beyond=0.0, return_lse=True, device=device)
    config = Config(BLOCK_M=16, BLOCK_N=16, CHUNK=16, num_warps=4, num_stages=1)
    wanted = run(call, config)
    assert_right(call, wanted)
    wide = [torch.cat((x, torch.full_like(x, math.nan)), dim=1) for x in (call.k_cache, call.v_cache)]
    got = run(call._replace(k_cache=wide[0], v_cache=wide[1]), config)
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("config", ["chunks of 32", "chunks of 64"])
@pytest.mark.parametrize(
    "name",
    ["plain", "pages of 7", "pages of 1", "pages of 16", "window", "everything", "fp8 by token", "int4 2 groups",
     "int4 everything", "starts and sinks"],
)  # fmt: skip
def test_nothing_outside_of_the_arguments_is_touched(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beyond a row of the table of pages either, nor in gaps of the caches."""
    accesses = Accesses(monkeypatch)
    call = case(**CASES[name])
    if call.block_table is not None:
        table = torch.zeros(call.batch, 2 * call.block_table.shape[1], dtype=torch.int32)
        call = call._replace(block_table=table[:, : call.block_table.shape[1]].copy_(call.block_table))
    run(call, CONFIGS[config])
    assert accesses.counted > 1_000


def test_nothing_outside_of_the_arguments_is_touched_by_an_append(monkeypatch: pytest.MonkeyPatch) -> None:
    accesses = Accesses(monkeypatch)
    for name in ("pages", "int8 by token turned", "int4 turned"):
        run(appending(**APPENDS[name]))
    # neither a table's rows nor a cache has room for the last token
    call = appending(rotary="neox", lens=[17, 16], keys=16)
    assert call.cos is not None and call.sin is not None
    run(call._replace(cos=call.cos[:16], sin=call.sin[:16]))
    assert accesses.counted > 1_000


def test_splits_are_joined_in_the_same_order_whichever_keys_are_hidden(device: str) -> None:
    """Bits of a result do not depend on whether the first splits are hidden or have weights of 0."""
    config = Config(BLOCK_M=16, BLOCK_N=16, CHUNK=16, num_warps=4, num_stages=1)
    # 40 splits, of which the first 5 have no weight: more are left than are joined at a time
    call = case([640], heads=1, kv_heads=1, keys=640, beyond=0.0, starts=[0], return_lse=True, device=device)
    call.k_cache[:, :80] = -1000.0 * call.q
    whole = run(call, config)
    hidden = run(call._replace(seq_starts=torch.tensor([80], dtype=torch.int32, device=device)), config)
    assert all(same_bits(one, other) for one, other in zip(whole, hidden, strict=True))


def test_pages_before_the_first_key_are_not_looked_up(device: str) -> None:
    call = case([100, 128], tokens=2, keys=160, page=16, starts=[60, 95], device=device)
    wanted = run(call)
    assert_right(call, wanted)
    assert call.block_table is not None
    for b, start in enumerate((60, 95)):
        call.block_table[b, : start // 16] = -(2**31)
    assert same_bits(run(call), wanted)


def test_a_sequence_whose_keys_are_all_hidden(device: str) -> None:
    """Its only tile would begin at its end: no program writes a partial result, and none is read."""
    for length in (16, 32, 48):
        for config in CONFIGS.values():
            call = case([length], 1, 1, 1, 8, 8, 64, 0, F32, device, starts=[length], return_lse=True)
            assert_right(call, run(call, config))


def test_keys_of_calls_without_starts_are_as_they_were(device: str) -> None:
    from wavecrest.ops._flash_decoding.key import KEY_FIELDS, key_of, shape_of

    plain, begun = case([40, 50]), case([40, 50], starts=[3, 0])
    assert key_of(plain) == (
        2, 1, 4, 2, 32, 32, 128, 0, "float32", "float32", False, False, False, False, False, False, "columns", "cpu",
        False, "none",
    )  # fmt: skip
    differ = [name for name, a, b in zip(KEY_FIELDS, key_of(plain), key_of(begun), strict=True) if a != b]
    assert differ == ["access"] and key_of(begun)[16] == "columns starts"
    # masks take registers, as a window's do
    assert (shape_of(key_of(plain)).more, shape_of(key_of(begun)).more) == (0, 1)
    assert shape_of(key_of(begun._replace(window=3))).more == 1


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_an_invariant_call_is_split_the_same_in_any_batch(arch: str) -> None:
    from wavecrest.ops._flash_decoding.config import default
    from wavecrest.ops._flash_decoding.key import key_of, shape_of

    chunks: dict[bool, set[int]] = {False: set(), True: set()}
    keys: dict[bool, set[Any]] = {False: set(), True: set()}
    for batch in (1, 8, 64):
        for invariant in chunks:
            q = torch.empty(batch, 1, 32, 128, dtype=BF16, device="meta")
            k = torch.empty(batch, 8192, 8, 128, dtype=BF16, device="meta")
            lens = torch.empty(batch, dtype=torch.int32, device="meta")
            call = FlashDecodingCall(q, k, k, lens, batch_invariant=invariant)
            # one key, so that measured rows say the same for all too
            keys[invariant].add(key_of(call))
            chunks[invariant].add(default(shape_of(key_of(call)), ARCHS[arch])["CHUNK"])
    assert len(chunks[True]) == 1 and len(chunks[False]) > 1
    assert len(keys[True]) == 1 and len(keys[False]) == 3


@pytest.mark.parametrize(
    ("capacity", "chunk", "invariant", "keys"),
    [
        # a quarter each, as of 4,096
        (2176, 1024, False, 544), (4096, 1024, False, 1024), (4000, 1024, False, 1024), (2176, 1024, True, 1024),
        # hardly more than a split is one
        (2176, 2048, False, 2176), (2304, 2048, False, 2304), (2305, 2048, False, 1184), (2176, 2048, True, 2048),
        # splits of fewer keys than the least cost more to join
        (300, 256, False, 160), (130, 256, False, 160), (1, 256, False, 128), (0, 256, False, 128),
    ],
)  # fmt: skip
def test_a_cache_between_two_buckets_has_as_many_splits_as_the_larger(
    capacity: int, chunk: int, invariant: bool, keys: int
) -> None:
    from wavecrest.ops._flash_decoding.launch import chunk_of

    q, lens = torch.empty(16, 1, 32, 128, device="meta"), torch.empty(16, dtype=torch.int32, device="meta")
    k = torch.empty(16, capacity, 8, 128, device="meta")
    call = FlashDecodingCall(q, k, k, lens, batch_invariant=invariant)
    config = Config(BLOCK_M=16, BLOCK_N=32, CHUNK=chunk, num_warps=2, num_stages=1)
    assert chunk_of(call, config) == keys


def test_on_nvidia_few_programs_have_larger_tiles_and_one_is_split_no_further_than_that() -> None:
    from wavecrest.ops._flash_decoding.config import default
    from wavecrest.ops._flash_decoding.key import key_of, shape_of

    def chosen(batch: int, capacity: int, dtype: torch.dtype = BF16, heads: int = 32) -> Config:
        q = torch.empty(batch, 1, heads, 128, dtype=BF16, device="meta")
        k = torch.empty(batch, capacity, 8, 128, dtype=dtype, device="meta")
        scale = None if dtype == BF16 else torch.empty(8, device="meta")
        lens = torch.empty(batch, dtype=torch.int32, device="meta")
        call = FlashDecodingCall(q, k, k, lens, k_scale=scale, v_scale=scale)
        return default(shape_of(key_of(call)), ARCHS["sm_90"])

    wide = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    for batch, capacity, chunk in ((1, 2176, 256), (4, 2176, 1024), (16, 2176, 2048), (32, 1152, 2048)):
        assert chosen(batch, capacity) == Config(**wide, CHUNK=chunk)
    # many programs, other types, and more rows than one tile's
    narrow = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 2, "num_stages": 3}
    assert chosen(64, 8192) == Config(**narrow, CHUNK=2048)
    assert chosen(16, 2176, torch.int8)["num_warps"] == 2
    assert chosen(16, 2176, heads=256)["CHUNK"] == 1024


@pytest.mark.slow
def test_a_cache_of_any_length_is_traced_once() -> None:
    """With kernels that Dynamo takes for those of a GPU: one graph that launches them, for all lengths of a bucket."""
    pytest.importorskip("triton", reason="traces a kernel")
    from tests.ops.test_flash_attention import _child

    code = """
import torch, torch.utils._triton
# Dynamo asks for a driver before it wraps a kernel; nothing is launched here
torch.utils._triton.has_triton = lambda: True
import wavecrest.ops.common.triton as _triton
_triton.emulated = "gfx942"
from wavecrest import ops, registry
registry.get("flash_decoding").force("triton")
graphs = []

def capture(module, _inputs):
    graphs.append([str(node.target) for node in module.graph.nodes])
    return lambda *_args: (torch.zeros(1),)

compiled = torch.compile(lambda q, k, v, lens: ops.flash_decoding(q, k, v, seq_lens=lens), backend=capture)
with torch.no_grad():
    for keys in (2100, 2176, 3001):
        q, k, v = torch.randn(16, 1, 32, 64), torch.randn(16, keys, 8, 64), torch.randn(16, keys, 8, 64)
        for cache in (k, v):
            torch._dynamo.mark_dynamic(cache, 1)
        compiled(q, k, v, torch.full((16,), keys, dtype=torch.int32))
print(len(graphs), sum("triton_kernel" in target for target in graphs[0]))
"""
    assert _child(code).split() == ["1", "2"]


def test_splits_of_a_share_are_right(device: str) -> None:
    config = Config(BLOCK_M=16, BLOCK_N=32, CHUNK=256, num_warps=4, num_stages=1)
    # the last split has few keys, or none of a short sequence; ends of tiles and of splits
    for capacity, lens in ((300, [300, 1, 160]), (577, [577, 193, 192]), (330, [329, 161, 33])):
        call = case(lens, keys=capacity, device=device)
        assert_right(call, run(call, config))


# new keys and values, and columns that are turned


def appending(
    rotary: str = "", rotated: int = 0, table: torch.dtype = F32, new: bool = True, ends: list[int] | None = None,
    **options: Any,
) -> FlashDecodingCall:  # fmt: skip
    """A call with new keys and values, whose caches hold `beyond` at their places too; `ends`: append_lens."""
    call = case(**options)
    if ends is not None:
        call = call._replace(append_lens=torch.tensor(ends, dtype=torch.int32, device=call.q.device))
    generator = torch.Generator().manual_seed(7)
    device = str(call.q.device)
    if new:
        for name, columns in (("k", call.head_dim), ("v", call.head_dim_v)):
            # a middle of its own, so that a shift that is left out shows
            one = torch.randn(call.batch, call.seqlen_q, call.kv_heads, columns, generator=generator) * 1.5 + 0.5
            call = call._replace(**{name: one.to(call.q.dtype).to(device)})
        for _, _, page, at in places(call):
            for cache in (call.k_cache, call.v_cache):
                cache[page, at] = math.nan if cache.dtype.is_floating_point else 0x77
            for one in (call.k_scale, call.v_scale, call.k_shift, call.v_shift):
                if one is not None and one.ndim == 4:
                    one[page, at] = math.nan
    if rotary:
        angles = torch.rand(call.capacity, (rotated or call.head_dim) // 2, generator=generator).to(device) * 6
        cos, sin = angles.cos().to(table), angles.sin().to(table)
        call = call._replace(cos=cos, sin=sin, rotary_style=rotary)
    return call


def places(call: FlashDecodingCall) -> list[tuple[int, int, int, int]]:
    """(sequence, token, page, place in it) of each new token that has one."""
    found = []
    for b, length in enumerate(call.new_lens.tolist()):
        for t in range(call.seqlen_q):
            place = length - call.seqlen_q + t
            if place >= 0:
                page = b if call.block_table is None else int(call.block_table[b, place // call.page])
                found.append((b, t, page, place % call.page))
    return found


def turned(call: FlashDecodingCall, x: Tensor) -> Tensor:
    """x [B, T, H, D] in float64 with its columns turned, one pair at a time."""
    y = x.cpu().double().clone()
    if call.cos is None or call.sin is None:
        return y
    half = call.cos.shape[1]
    for b, length in enumerate(call.new_lens.tolist()):
        for t in range(call.seqlen_q):
            place = length - call.seqlen_q + t
            for i in range(half):
                one, two = (i, i + half) if call.rotary_style == "neox" else (2 * i, 2 * i + 1)
                known = 0 <= place < call.cos.shape[0]
                cos, sin = (float(table[place, i]) if known else math.nan for table in (call.cos, call.sin))
                first, second = x[b, t, :, one].cpu().double(), x[b, t, :, two].cpu().double()
                y[b, t, :, one], y[b, t, :, two] = first * cos - second * sin, second * cos + first * sin
    return y


WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "k_shift", "v_shift")


def assert_appended(call: FlashDecodingCall, run_it: Any) -> Any:
    """Run the call; its caches changed at the new places alone, and there as they should; and its result is right."""
    before = {name: one.clone() for name in WRITTEN if (one := getattr(call, name)) is not None}
    got = run_it(call)
    new = torch.zeros(call.k_cache.shape[:2], dtype=torch.bool)
    owned = {(b, t): (page, at) for b, t, page, at in places(call)} if call.k is not None else {}
    for page, at in owned.values():
        new[page, at] = True
    for name, old in before.items():
        now = getattr(call, name)
        kept = ~new.to(now.device) if now.ndim == 4 else ...
        assert same_bits(now[kept], old[kept]), f"{name} is changed elsewhere"
    unit, off = ROUNDING[call.q.dtype], 0.0
    for which, x in (("k", call.k), ("v", call.v)):
        if x is None:
            continue
        exact = turned(call, x) if which == "k" else x.cpu().double()
        turns = which == "k" and call.cos is not None
        cache, scale, shift = (getattr(call, f"{which}_{kind}") for kind in ("cache", "scale", "shift"))
        codes = steps = shifts = None
        if shift is not None:
            codes, steps, shifts = quantize_cache(x.cpu(), call.groups, dtype=scale.dtype)
        for (b, t), (page, at) in owned.items():
            one = call._replace(block_table=None, k_cache=call.k_cache[page : page + 1, at : at + 1],
                                v_cache=call.v_cache[page : page + 1, at : at + 1],
                                **{name: getattr(call, name)[page : page + 1, at : at + 1] for name in WRITTEN[2:]
                                   if getattr(call, name) is not None and getattr(call, name).ndim == 4})  # fmt: skip
            back = values(one, which, 0, 1)[0][0]
            wanted = exact[b, t]
            # a product of float32 and its rounding to the type, where columns are turned
            bound = wanted.abs() * unit * 2 + 1e-6 if turns else torch.zeros_like(wanted)
            if scale is not None and shift is None:
                if scale.ndim == 4:
                    peak = x[b, t].cpu().float().abs().amax(-1, keepdim=True)
                    if turns:
                        peak = wanted.abs().amax(-1, keepdim=True).float()
                    number = (peak / (127 if cache.dtype == I8 else 448)).to(scale.dtype).double()
                    found = scale[page, at].cpu().double()
                    torch.testing.assert_close(found, number, rtol=4 * unit if turns else 0, atol=0)
                else:
                    found = scale.cpu().double().reshape(-1, 1)
                ratio = wanted / found
                wanted = ratio.clamp(-127, 127) * found if cache.dtype == I8 else ratio.clamp(-448, 448) * found
                # half a step of whole numbers, or half a unit of three bits behind the first and of the least
                step = found * 0.5 if cache.dtype == I8 else wanted.abs() / 16 + found * 2.0**-10
                bound = bound + step * (1 + 1e-5)
            elif shift is not None:
                if not turns:
                    for now, want in ((cache, codes), (scale, steps), (shift, shifts)):
                        assert same_bits(now[page, at].cpu(), want[b, t]), f"{which}: not what quantize_cache gives"
                each = scale[page, at].cpu().double().repeat_interleave(wanted.shape[-1] // call.groups, -1)
                least = shift[page, at].cpu().double().abs().repeat_interleave(wanted.shape[-1] // call.groups, -1)
                # what the ends lose as scale and shift are rounded
                bound = bound + each * (0.5 + 15 * ROUNDING[scale.dtype] + 1e-5) + least * ROUNDING[scale.dtype]
                most = exact[b, t].unflatten(-1, (call.groups, -1))
                span = (most.amax(-1) - most.amin(-1)) / 15
                torch.testing.assert_close(
                    scale[page, at].cpu().double(),
                    span,
                    rtol=2 * ROUNDING[scale.dtype],
                    atol=(4 * unit if turns else 0),
                )
            else:
                bound = bound + (0 if turns else 1e-30)
            assert back.isnan().equal(wanted.isnan())
            assert bool(((back - wanted).abs() <= bound).logical_or(wanted.isnan()).all()), f"{which} {b} {t}"
    q = turned(call, call.q)
    if call.cos is not None:
        # rounding of q, twice where float32 meets a tie otherwise
        largest = call.q.cpu().double().abs().amax() * max(
            float(values(call, "k", b, n)[0].nan_to_num().abs().amax()) if n else 0.0
            for b, n in enumerate(call.seq_lens.tolist())
        )
        off = float(2 * unit * largest * call.head_dim**0.5 * call.scale)
    assert_right(call._replace(q=q.to(call.q.dtype).to(call.q.device)), got, off)
    return got


APPENDS: dict[str, dict[str, Any]] = {
    "plain": {"lens": [128, 100]},
    "turned": {"lens": [90, 17, 0], "tokens": 2, "heads": 6, "kv_heads": 3, "rotary": "neox", "return_lse": True},
    "gptj in part": {"lens": [90, 3], "tokens": 4, "d": 40, "dv": 24, "rotary": "gptj", "rotated": 26, "dtype": F16},
    "pages": {"lens": [100, 17, 0], "tokens": 3, "page": 7, "keys": 105, "rotary": "neox", "rotated": 8, "dtype": BF16},
    "tables of 16 bits": {"lens": [40, 9], "rotary": "neox", "table": BF16, "dtype": BF16, "page": 16},
    "q alone": {"lens": [70, 40], "tokens": 2, "rotary": "gptj", "new": False},
    "fewer keys than tokens": {"lens": [2, 0, 3], "tokens": 4, "page": 16, "rotary": "neox", "return_lse": True},
    "int8": {"lens": [100, 33], "tokens": 2, "page": 32, "cache": I8, "dtype": BF16},
    "int8 turned": {"lens": [100, 33], "cache": I8, "dtype": F16, "rotary": "neox"},
    "int8 by token": {"lens": [100, 33], "tokens": 2, "page": 32, "cache": I8, "groups": 1, "dtype": BF16},
    "int8 by token turned": {"lens": [100, 2], "tokens": 3, "cache": I8, "groups": 1, "rotary": "gptj", "scales": F32},
    "fp8": {"lens": [90, 7], "cache": E4M3, "dtype": F16, "page": 16},
    "fp8 by token": {"lens": [90, 7], "tokens": 2, "cache": E4M3, "groups": 1, "dtype": BF16, "rotary": "neox"},
    "int4": {"lens": [128, 77, 0], "page": 32, "cache": I4, "groups": 1, "dtype": BF16},
    "int4 4 groups": {"lens": [90, 5], "tokens": 3, "cache": I4, "groups": 4, "d": 24, "dv": 72, "dtype": F16},
    "int4 turned": {
        "lens": [90, 5], "page": 9, "keys": 99, "cache": I4, "groups": 2, "d": 36, "dv": 20, "scales": BF16,
        "rotary": "neox", "rotated": 20, "dtype": BF16,
    },
    "int4 few columns": {"lens": [40, 50], "cache": I4, "groups": 1, "d": 2, "dv": 6, "rotary": "gptj"},
    # before, behind and beyond the keys that are seen
    "other places": {
        "lens": [90, 40, 9], "ends": [60, 41, 64], "tokens": 2, "page": 32, "keys": 96, "rotary": "neox", "dtype": BF16,
    },
    "everything": {
        "lens": [127, 60], "starts": [33, 58], "tokens": 3, "heads": 6, "kv_heads": 3, "d": 24, "dv": 40, "page": 32,
        "window": 70, "softcap": 5.0, "alibi_slopes": True, "sinks": True, "return_lse": True, "rotary": "neox",
    },
}  # fmt: skip


@pytest.mark.parametrize("config", ["default", "chunks of 32", "one chunk"])
@pytest.mark.parametrize("name", APPENDS)
def test_append(name: str, config: str, device: str) -> None:
    assert_appended(appending(**APPENDS[name], device=device), lambda call: run(call, CONFIGS[config]))


ADVANCES: dict[str, dict[str, Any]] = {
    "one token": {"lens": [90, 40, 9], "dtype": BF16, "rotary": "neox"},
    "one number": {"lens": [90, 90, 90], "dtype": BF16, "rotary": "neox"},
    "more tokens": {"lens": [90, 40, 9], "tokens": 3, "page": 32, "keys": 96, "cache": I8, "groups": 1, "dtype": F16},
    "other places": {"lens": [90, 40, 9], "ends": [60, 41, 64], "tokens": 2, "page": 32, "keys": 96, "rotary": "gptj"},
    "no keys before": {"lens": [1, 2, 1], "rotary": "neox"},
    "no place left": {"lens": [64, 64], "ends": [65, 64], "keys": 64},
}


@pytest.mark.parametrize("way", ["default", "chunks of 32", "one chunk", "torch", "reference"])
@pytest.mark.parametrize("name", ADVANCES)
def test_tokens_before_are_moved_on(name: str, way: str, device: str) -> None:
    """As `append_lens` behind the new tokens, and these are added to them, once each."""
    one = appending(**ADVANCES[name], beyond=0.0, device=device)
    two = FlashDecodingCall(*(part.clone() if isinstance(part, Tensor) else part for part in one))
    ends = one.new_lens.clone()
    # others' numbers around them
    lens = torch.full((2 * len(ends),), 7, dtype=torch.int32, device=device)
    before = lens[:1].expand(len(ends)) if name == "one number" else lens[::2]
    lens[::2] = ends - one.seqlen_q
    two = two._replace(append_lens=before, advance=True)
    how = {"config": CONFIGS[way]} if way in CONFIGS else {"backend": way}
    try:
        expected = run(one, **how)
    except Unsupported:
        assert way == "torch"
        return
    assert same_bits(run(two, **how), expected)
    for field in WRITTEN:
        if getattr(one, field) is not None:
            assert same_bits(getattr(one, field), getattr(two, field)), field
    assert before.tolist() == ends.tolist() and set(lens[1::2].tolist()) == {7}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", APPENDS)
def test_append_of_other_backends(name: str, backend: str, device: str) -> None:
    call = appending(**APPENDS[name], beyond=0.0, device=device)
    try:
        assert_appended(call, lambda call: run(call, backend=backend))
    except Unsupported as error:
        assert backend == "torch" and any(word in str(error) for word in ("has no", "would copy"))


@pytest.mark.parametrize("name", APPENDS)
def test_kernel_and_definition_write_the_same(name: str, device: str) -> None:
    """Bit for bit where nothing is turned, which float32 may round otherwise."""
    one = appending(**APPENDS[name], beyond=0.0, device=device)
    two = FlashDecodingCall(*(part.clone() if isinstance(part, Tensor) else part for part in one))
    run(one)
    run(two, backend="reference")
    for field in WRITTEN if one.cos is None else ("v_cache", "v_scale", "v_shift"):
        if getattr(one, field) is not None:
            assert same_bits(getattr(one, field), getattr(two, field)), field


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(("cache", "groups"), [(None, 0), (I8, 0), (I8, 1), (I4, 2)])
def test_what_is_not_a_number_is_written_as_such(
    cache: torch.dtype | None, groups: int, backend: str, device: str
) -> None:
    call = appending(lens=[20, 16], keys=32, cache=cache, groups=groups, beyond=0.0, device=device)
    assert call.k is not None
    call.k[0, 0, 1, 3], call.k[1, 0, 0, 5] = math.nan, math.inf
    run(call, backend=backend)
    rows = torch.stack([values(call, "k", b, n)[0][n - 1] for b, n in ((0, 20), (1, 16))])
    finite = rows.isfinite()
    if groups == 0 and cache == I8:
        # a given scale has no place for it
        assert bool(finite.all()) and float(rows[0, 1, 3]) == 0.0
        assert call.k_scale is not None
        assert float(rows[1, 0, 5]) == pytest.approx(127 * float(call.k_scale[0]))
    else:
        assert not finite[0, 1, 3] and not finite[1, 0, 5]
    assert bool(finite[0, 0].all()) and bool(finite[1, 1].all())
    if cache is None:
        assert int((~finite).sum()) == 2


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(("cache", "groups"), [(I8, 1), (E4M3, 1), (I4, 1), (I4, 4)])
def test_rows_of_one_value(cache: torch.dtype, groups: int, backend: str, device: str) -> None:
    """Their scales are 0: nothing is divided by that."""
    call = appending(lens=[20, 16], keys=32, dtype=F16 if cache != I4 else F32, cache=cache, groups=groups,
                     device=device)  # fmt: skip
    value = 0.1 if cache == I4 else 0.0
    call = call._replace(k=torch.full_like(call.q[:, :, :2], value), v=torch.zeros_like(call.q[:, :, :2]))
    run(call, backend=backend)
    for b, length in ((0, 20), (1, 16)):
        for one in (call.k_cache, call.k_scale, call.v_cache, call.v_scale):
            assert one is not None and not bool(one[b, length - 1].float().any())
        if call.k_shift is not None:
            assert bool((call.k_shift[b, length - 1] == torch.tensor(value).to(F16).to(device)).all())


def test_a_place_without_angles_is_not_a_number(device: str) -> None:
    call = appending(rotary="neox", lens=[40, 16], device=device)
    assert call.cos is not None and call.sin is not None
    call = call._replace(cos=call.cos[:30], sin=call.sin[:30])
    for backend in ("triton", "reference"):
        got = run(call, backend=backend)
        assert bool(got[0].isnan().all()) and bool(got[1].isfinite().all())


def test_the_first_place_behind_the_angles_is_not_a_number(device: str) -> None:
    """Where there is memory behind the tables, whose numbers would turn a row as well."""
    call = appending(rotary="neox", lens=[31, 30], device=device)
    assert call.cos is not None and call.sin is not None
    call = call._replace(cos=call.cos[:30], sin=call.sin[:30])
    for backend in ("triton", "reference"):
        got = run(call, backend=backend)
        assert bool(got[0].isnan().all()) and bool(got[1].isfinite().all())


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("excess", [1, 2])
def test_a_place_beyond_the_cache_is_not_written(excess: int, backend: str, device: str) -> None:
    # lengths that a cache has no room for are the caller's mistake, and must not reach what lies behind it, or its end
    call = appending(lens=[16, 16], keys=16, beyond=0.0, device=device)
    wide = torch.zeros(2, 20, 2, 32, device=device)
    call = call._replace(k_cache=wide[:, :16], v_cache=wide[:, :16].clone(), seq_lens=call.seq_lens + excess)
    run(call, backend=backend)
    assert not bool(wide.any()) and not bool(call.v_cache.any())


@pytest.mark.parametrize("layout", ["permuted", "sliced"])
def test_strides_of_what_is_appended(layout: str, device: str) -> None:
    call = appending(lens=[90, 33], tokens=2, heads=6, kv_heads=3, rotary="neox", device=device)

    def placed(x: Tensor | None) -> Tensor:
        assert x is not None
        if layout == "permuted":
            order = (2, 0, 1, 3) if x.ndim == 4 else (0, 1)
            back = (1, 2, 0, 3) if x.ndim == 4 else (0, 1)
            return x.permute(order).contiguous().permute(back)
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype, device=device)
        wide[..., 3:-2] = x
        return wide[..., 3:-2]

    names = ("q", "k_cache", "v_cache", "k", "v", "cos", "sin")
    call = call._replace(**{name: placed(getattr(call, name)) for name in names})
    assert_appended(call, run)
    apart = call._replace(k=call.k.mT.contiguous().mT if call.k is not None else None)
    with pytest.raises(Unsupported, match="lie next to each other"):
        run(apart)


def test_appending_again_changes_nothing(device: str) -> None:
    # steps are repeated to be timed, and captured graphs replayed
    call = appending(**APPENDS["int4 turned"], device=device)
    first = run(call)
    kept = [getattr(call, name).clone() for name in WRITTEN]
    assert same_bits(run(call), first)
    assert all(same_bits(getattr(call, name), one) for name, one in zip(WRITTEN, kept, strict=True))


def test_keys_of_calls_that_append(device: str) -> None:
    from wavecrest.ops._flash_decoding.key import key_of, shape_of

    call = appending(rotary="gptj", lens=[40, 50], starts=[3, 0], table=F16)
    plain = call._replace(k=None, v=None, cos=None, sin=None, seq_starts=None)
    assert key_of(call)[16] == "columns starts append gptj:float16"
    assert key_of(call._replace(seq_starts=None))[16] == "columns append gptj:float16"
    assert key_of(plain)[16] == "columns"
    assert shape_of(key_of(call._replace(seq_starts=None))) == shape_of(key_of(plain))
    # where new tokens go chooses nothing
    assert key_of(call._replace(append_lens=call.seq_lens - 1)) == key_of(call)


@pytest.mark.parametrize("access", ["columns", "columns append", "columns starts append neox:bfloat16"])
def test_a_call_with_a_key_of_one_that_appends(access: str) -> None:
    """A file of shapes, and calls that had no row, can then be tuned."""
    from wavecrest.bench import sizes

    op = ops.get("flash_decoding")
    call = sizes.call(op, (1, 32, 2176, 128), "bfloat16", "meta", {"access": access})
    assert (call.k is not None, call.cos is not None) == ("append" in access, "neox" in access)
    assert call.cos is None or call.cos.dtype == BF16


# each backend and each kind of cache: all pairs take three times as long, nearly all of it a C++ compiler's
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("turned", "eager"),
        ("pages", "aot_eager"),
        ("int4 turned", "aot_eager"),
        ("turned", "inductor"),
        ("int8 by token turned", "inductor"),
    ],
)
def test_append_compiles_fullgraph(name: str, backend: str, device: str) -> None:
    """Writes to the cache are seen by later operations of a graph, and by the caller."""

    def decode(call: dict[str, Any]) -> Any:
        got = ops.flash_decoding(**call)
        return got, call["k_cache"].float().nan_to_num(0.0).sum((0, 2, 3))

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    options = APPENDS[name]
    for shrunk in (0, 1):
        lens = [max(0, length - shrunk) for length in options["lens"]]
        call = appending(**options | {"lens": lens}, beyond=0.0, device=device)
        torch._dynamo.utils.counters.clear()

        def both(call: FlashDecodingCall) -> Any:
            with torch.no_grad():
                got, total = compiled(call._asdict())
            want = call.k_cache.float().nan_to_num(0.0).sum((0, 2, 3))
            torch.testing.assert_close(total, want, rtol=1e-3, atol=1e-3)
            return got

        assert_appended(call, both)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if shrunk == 0 else 0)


@pytest.mark.parametrize("config", ["one chunk", "chunks of 32"])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"page": 16, "cache": I4, "groups": 1}], ids=str)
@pytest.mark.parametrize("appends", [False, True])
def test_a_bound_call_is_short(
    appends: bool, options: dict[str, Any], config: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the public function to the launches, of which an append and splits have one more each."""
    call = (
        appending("neox", lens=[90, 40], device=device, **options)
        if appends
        else case([90, 40], device=device, **options)
    )
    arguments = call._asdict()
    op.pin(op.key(call), "triton", CONFIGS[config], "exact", "measured")
    with torch.no_grad():
        assert_short(lambda: ops.flash_decoding(**arguments), monkeypatch)
    op.unpin()


def test_a_bound_call_of_pytorch_is_short(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = case([90, 40], window=20, beyond=0.0, device=device)._asdict()
    op.force("torch")
    assert_short(lambda: ops.flash_decoding(**call), monkeypatch)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "q dims": (r"q must be float32, float16, bfloat16 or float64 \[B, T, H, D\]", {"q": torch.zeros(2, 4, 32)}),
    "q dtype": ("q must be float32", {"q": torch.zeros(2, 1, 4, 32, dtype=I8)}),
    "tokens": ("takes 1 to 16 queries", {"q": torch.zeros(2, 17, 4, 32)}),
    "cache dtype": ("k_cache must be", {"k_cache": torch.zeros(2, 128, 2, 32, dtype=F16)}),
    "caches": ("may differ in head_dim alone", {"v_cache": torch.zeros(2, 64, 2, 32)}),
    "columns": ("the same for q and k", {"k_cache": torch.zeros(2, 128, 2, 16)}),
    "heads": (
        r"heads of q \(4\) must be a multiple of those of the cache \(3\)",
        dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 9, 3, 32)),
    ),
    "lens dtype": (r"seq_lens must be int32 \[2\]", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
    "starts dtype": (r"seq_starts must be int32 \[2\]", {"seq_starts": torch.zeros(2, dtype=torch.int64)}),
    "starts shape": (r"seq_starts must be int32 \[2\]", {"seq_starts": torch.zeros(1, dtype=torch.int32)}),
    "lens shape": (r"seq_lens must be int32 \[2\]", {"seq_lens": torch.zeros(3, dtype=torch.int32)}),
    "table": (r"block_table must be int32 \[2, …\]", {"block_table": torch.zeros(3, 4, dtype=torch.int32)}),
    "sequences": (
        "pages need a block_table", {"q": torch.zeros(3, 1, 4, 32), "seq_lens": torch.zeros(3, dtype=torch.int32)},
    ),
    "window": ("window must be the keys before", {"window": -2}),
    "window pair": ("window must be the keys before", {"window": (3, 0)}),
    "scale": ("softmax_scale must be a number", {"softmax_scale": -1.0}),
    "softcap": ("softcap must be a number", {"softcap": float("inf")}),
    "slopes": ("alibi_slopes must be float32", {"alibi_slopes": torch.zeros(3)}),
    "sinks": ("sinks must be floating-point", {"sinks": torch.zeros(4, dtype=torch.int32)}),
    "scale of 16 bits": ("k_scale belongs to a cache of 8 bits", {"k_scale": torch.ones(())}),
    "no scale": (
        "v_scale belongs to a cache of 8 bits",
        {
            "k_cache": torch.zeros(2, 128, 2, 32, dtype=I8), "v_cache": torch.zeros(2, 128, 2, 32, dtype=I8),
            "k_scale": torch.ones(()),
        },
    ),
    "flag": ("return_lse must be True or False", {"return_lse": 1}),
}  # fmt: skip


def _quantized(cache: torch.dtype, groups: int, **change: Any) -> dict[str, Any]:
    call = case([40, 50], cache=cache, groups=groups)
    names = ("k_cache", "v_cache", "k_scale", "v_scale", "k_shift", "v_shift")
    return {name: getattr(call, name) for name in names} | change


BAD |= {
    "int4 without shifts": ("k_shift belongs to a cache of 4 bits", _quantized(I4, 2, k_shift=None)),
    "int4 without scales": ("v_scale belongs to a cache of 8 bits or 4", _quantized(I4, 2, v_scale=None)),
    "int4 scale of all": ("k_scale must be floating-point of up to 32", _quantized(I4, 1, k_scale=torch.ones(2))),
    "int4 3 groups": (
        r"k_scale must be floating-point of up to 32 bits \[2, 128, 2\] and one of \[1, 2, 4, 8\]",
        _quantized(I4, 2, k_scale=torch.ones(2, 128, 2, 3)),
    ),
    "int4 other groups": ("must both be of tokens, and alike", _quantized(I4, 2, v_scale=torch.ones(2, 128, 2, 4))),
    "int4 scale in float64": (
        "v_scale must be floating-point", _quantized(I4, 2, v_scale=torch.ones(2, 128, 2, 2, dtype=torch.float64)),
    ),
    "int4 shift dtype": ("v_shift must be torch.float16", _quantized(I4, 2, v_shift=torch.ones(2, 128, 2, 2))),
    "int4 shift shape": (
        "k_shift must be torch.float16", _quantized(I4, 2, k_shift=torch.ones(2, 128, 2, 4, dtype=F16)),
    ),
    "int4 columns": (
        "the same for q and k; a byte of uint8 holds two elements",
        _quantized(I4, 1, k_cache=torch.zeros(2, 128, 2, 32, dtype=I4)),
    ),
    "int4 columns and groups": (
        "4 groups need a head_dim that is a multiple of 8, got 32 and 12",
        _quantized(I4, 4, v_cache=torch.zeros(2, 128, 2, 6, dtype=I4)),
    ),
    "int8 shift": ("k_shift belongs to a cache of 4 bits", _quantized(I8, 1, k_shift=torch.ones(2, 128, 2, 1))),
    "int8 groups": ("k_scale must be float32, one number", _quantized(I8, 1, k_scale=torch.ones(2, 128, 2, 2))),
    "int8 one by token": ("must both be of tokens, and alike", _quantized(I8, 1, v_scale=torch.ones(()))),
}  # fmt: skip


def _new(**change: Any) -> dict[str, Any]:
    call = appending(rotary="neox", lens=[40, 50])
    return {name: getattr(call, name) for name in ("k", "v", "cos", "sin")} | change


BAD |= {
    "places of nothing": ("pass these too", {"append_lens": torch.tensor([40, 50], dtype=torch.int32)}),
    "places of one": (r"append_lens must be int32 \[2\]", _new(append_lens=torch.tensor([40], dtype=torch.int32))),
    "places that nobody gave": ("pass them", _new(advance=True)),
    "a word": ("advance must be True or False", _new(advance="yes")),
    "k alone": ("k and v are written together", _new(v=None)),
    "k shape": (r"k must be torch.float32 \[2, 1, 2, 32\]", _new(k=torch.zeros(2, 2, 2, 32))),
    "v dtype": (r"v must be torch.float32 \[2, 1, 2, 32\]", _new(v=torch.zeros(2, 1, 2, 32, dtype=F16))),
    "cos alone": ("cos and sin go together", _new(sin=None)),
    "cos of too many columns": (r"cos must be floating-point \[positions", _new(cos=torch.zeros(128, 17))),
    "cos of every token": ("cos must be floating-point", _new(cos=torch.zeros(2, 1, 16))),
    "sin of fewer rows": ("must be as cos", _new(sin=torch.zeros(100, 16))),
    "style": ("rotary_style is neox or gptj, not 'llama'", _new(rotary_style="llama")),
    "expanded cache": (
        "v_cache is written to, and must not be expanded", _new(v_cache=torch.zeros(2, 1, 2, 32).expand(2, 128, 2, 32)),
    ),
    "k that needs gradients": (
        "written into caches without gradients", _new(k=torch.zeros(2, 1, 2, 32).requires_grad_()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    message, change = BAD[name]
    call = case([40, 50])._replace(**change)._asdict()
    arguments = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(InvalidArgument, match=message):
        ops.flash_decoding(*arguments, **call)


def test_wrong_configurations(device: str) -> None:
    with pytest.raises(InvalidArgument, match="a CHUNK of 40 keys is no multiple of a BLOCK_N of 16"):
        run(case([40], device=device), Config(BLOCK_M=16, BLOCK_N=16, CHUNK=40, num_warps=4, num_stages=1))


def test_gradients_are_the_references(device: str) -> None:
    call = case([40], beyond=0.0, device=device)
    call = call._replace(q=call.q.requires_grad_())
    with pytest.raises(Unsupported, match="no backward"):
        run(call)
    op(call).sum().backward()
    assert call.q.grad is not None and bool(call.q.grad.isfinite().all())


def test_no_sequences(device: str) -> None:
    call = case([40, 50], device=device)
    none = call._replace(q=call.q[:0], k_cache=call.k_cache[:0], v_cache=call.v_cache[:0], seq_lens=call.seq_lens[:0])
    assert run(none).shape == (0, 1, 4, 32)


@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("page", [0, 16])
def test_compile_fullgraph(page: int, groups: int, device: str) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor | None, scales: tuple[Any, ...]) -> Any:
        return ops.flash_decoding(
            q, k, v, seq_lens=lens, block_table=table, return_lse=True, k_scale=scales[0], v_scale=scales[1],
            k_shift=scales[2], v_shift=scales[3],
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    for lengths in ([90, 33], [128, 5]):
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        again = case(
            lengths, tokens=2, page=page, dtype=BF16, beyond=0.0, cache=I4 if groups else None, groups=groups,
            device=device,
        )  # fmt: skip
        scales = (again.k_scale, again.v_scale, again.k_shift, again.v_shift)
        with torch.no_grad():
            got = compiled(again.q, again.k_cache, again.v_cache, lens, again.block_table, scales)
        assert_right(again._replace(return_lse=True), got)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_as_sequences_grow() -> None:
    call = case([90, 33], page=16, dtype=BF16, device="cuda", beyond=0.0)
    op.force("triton")
    op(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    for lengths in ([90, 33], [128, 1], [0, 77]):
        call.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_right(call, result)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, I8, I4])
def test_appends_in_a_cuda_graph_at_the_lengths_of_each_replay(cache: torch.dtype | None) -> None:
    call = appending(
        "neox", lens=[90, 33], page=16, dtype=BF16, cache=cache, groups=0 if cache is None else 1, device="cuda",
        beyond=0.0,
    )  # fmt: skip
    op.force("triton")
    op(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)

    def replay(_call: FlashDecodingCall) -> Any:
        graph.replay()
        return result

    for lengths in ([90, 33], [128, 2]):
        # what was appended before is a key as any other
        call.seq_lens.copy_(torch.tensor(lengths))
        assert_appended(call, replay)
