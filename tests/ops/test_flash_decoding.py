"""flash_decoding against a definition in loops: caches with and without pages, splits, ragged lengths, each option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.op_harness import same_bits
from wavecrest import ops, registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.flash_decoding.operands import Operands
from wavecrest.tuned import Config

OP = "flash_decoding"
F32, F16, BF16, I8, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
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
    beyond: float = float("nan"), **options: Any,
) -> Operands:  # fmt: skip
    """A call whose caches hold `beyond` where no sequence has a key (an 8-bit one a large number)."""
    generator = torch.Generator().manual_seed(len(lens) + heads + keys)
    batch, pages = len(lens), keys // page if page else 0
    table = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].view(batch, -1) if page else None

    def stored(columns: int) -> Tensor:
        dense = torch.randn(batch, keys, kv_heads, columns, generator=generator)
        dense = dense.to(dtype) if cache is None else (dense * 30).clamp(-100, 100).to(cache)
        for sequence, length in enumerate(lens):
            dense[sequence, length:] = beyond if cache is None else 127
        if table is None:
            return dense.to(device)
        paged = torch.full((batch * pages + 3, page, kv_heads, columns), 127.0).to(dense.dtype)
        paged[table.flatten()] = dense.view(batch * pages, page, kv_heads, columns)
        return paged.to(device)

    q = torch.randn(batch, tokens, heads, d, generator=generator).to(dtype).to(device)
    k, v = stored(d), stored(dv or d)
    if cache is not None:
        options["k_scale"] = torch.rand(kv_heads, generator=generator).to(device) / 30
        options["v_scale"] = torch.tensor(0.03, device=device)
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is True:
            options[name] = torch.randn(heads, generator=generator).abs().to(device)
    place = None if table is None else table.to(torch.int32).to(device)
    return Operands(q, k, v, torch.tensor(lens, dtype=torch.int32, device=device), place, **options)


def definition(call: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """(result, logarithms, how large its terms are) in float64, one query and head at a time."""
    y = torch.zeros(call.shape, dtype=torch.float64)
    lse = torch.full((call.batch, call.heads, call.tokens), -math.inf, dtype=torch.float64)
    size = torch.zeros_like(y)
    for b, length in enumerate(call.seq_lens.tolist()):
        rows = []
        for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)):
            if call.block_table is None:
                one = cache[b, :length]
            else:
                table = call.block_table[b].tolist()
                found = [cache[table[j // call.page], j % call.page] for j in range(length)]
                one = torch.stack(found) if found else cache[:0, 0]
            one = one.cpu().double()
            rows.append(one if scale is None else one * scale.cpu().double().reshape(-1, 1))
        k, v = rows
        for t in range(call.tokens):
            own = length - call.tokens + t
            first = 0 if call.window < 0 else max(0, own - call.window)
            seen = list(range(first, own + 1))
            for h in range(call.heads):
                head = h // call.group
                scores = [float(call.q[b, t, h].cpu().double() @ k[j, head]) * call.scale for j in seen]
                if call.softcap > 0:
                    scores = [call.softcap * math.tanh(s / call.softcap) for s in scores]
                if call.alibi_slopes is not None:
                    slope = float(call.alibi_slopes.expand(call.batch, call.heads)[b, h])
                    scores = [s - slope * (own - j) for s, j in zip(scores, seen, strict=True)]
                sink = [] if call.sinks is None else [float(call.sinks[h])]
                if not scores + sink:
                    continue
                top = max(scores + sink)
                total = sum(math.exp(s - top) for s in scores + sink)
                lse[b, h, t] = top + math.log(total)
                for s, j in zip(scores, seen, strict=True):
                    y[b, t, h] += math.exp(s - top) / total * v[j, head]
                    size[b, t, h] += math.exp(s - top) / total * v[j, head].abs()
    return y, lse, size


def assert_right(call: Operands, got: Any) -> None:
    """Within what rounds off scores, weights and sums of the kernel's types."""
    y, lse, size = definition(call)
    result, logarithms = got if call.return_lse else (got, None)
    assert result.dtype == call.q.dtype and result.shape == call.shape and result.is_contiguous()
    unit = ROUNDING[call.q.dtype]
    # weights are rounded to q's type, the result once more; scores are sums of D products in float32
    scores = 2.0**-24 * 4 * call.columns**0.5 * 8
    bound = size * (3 * unit + scores) + y.abs() * unit + 1e-12
    off = (result.cpu().double() - y).abs()
    assert bool((off <= bound).all()), f"{float((off - bound).max()):.2e} beyond the bound"
    if logarithms is not None:
        assert logarithms.dtype == (torch.float64 if call.q.dtype == torch.float64 else F32)
        assert torch.equal(logarithms.cpu().isneginf(), lse.isneginf())
        seen = ~lse.isneginf()
        torch.testing.assert_close(logarithms.cpu().double()[seen], lse[seen], rtol=1e-5, atol=1e-4)


def run(call: Operands, config: Config | None = SMALL, backend: str = "triton") -> Any:
    found = registry.get(OP)
    return found.run(backend, *call, config=config) if backend == "triton" else found.run(backend, *call)


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
    "many rows": {"lens": [100], "tokens": 16, "heads": 8, "kv_heads": 1, "return_lse": True},
    "one head": {"lens": [40, 50], "heads": 1, "kv_heads": 1},
    "every head its own": {"lens": [40, 50], "heads": 3, "kv_heads": 3, "d": 1, "dv": 5},
    "scale of its own": {"lens": [40], "softmax_scale": 0.7},
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
    assert_right(call, registry.get(OP)(*call))
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
    memory = torch.zeros(18 * step, dtype=I8, device=device)
    places = [memory[start:].as_strided(call.k_cache.shape, (17 * step, step, 16, 1)) for start in (0, 32)]
    for place, cache in zip(places, (call.k_cache, call.v_cache), strict=True):
        place.copy_(cache)
    call = call._replace(k_cache=places[0], v_cache=places[1])
    assert_right(call, run(call))


def test_columns_that_do_not_lie_together_are_declined(device: str) -> None:
    call = case([40], device=device)
    call = call._replace(k_cache=call.k_cache.mT.contiguous().mT)
    with pytest.raises(Unsupported, match="next to each other"):
        run(call)
    assert_right(call._replace(k_cache=call.k_cache.nan_to_num(0.0)), registry.get(OP)(*call._replace(
        k_cache=call.k_cache.nan_to_num(0.0), v_cache=call.v_cache.nan_to_num(0.0)
    )))  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(data: st.DataObject, device: str) -> None:
    draw = data.draw
    page, kv_heads = draw(st.sampled_from([0, 1, 5, 16, 32])), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 4)) * (page or draw(st.integers(1, 40)))
    options: dict[str, Any] = {"window": draw(st.sampled_from([-1, 0, 3, 40])), "return_lse": draw(st.booleans())}
    for name in ("alibi_slopes", "sinks"):
        if draw(st.booleans()):
            options[name] = True
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 10.0]))
    dtype = draw(st.sampled_from([F32, F16, BF16]))
    call = case(
        draw(st.lists(st.integers(0, keys), min_size=1, max_size=3)), kv_heads * draw(st.integers(1, 5)), kv_heads,
        draw(st.integers(1, 5)), draw(st.sampled_from([1, 8, 24, 33])), draw(st.sampled_from([1, 16, 20])), keys, page,
        dtype, device, draw(st.sampled_from([None, I8])) if dtype != F32 else None, **options,
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
        call = Operands(q, finite, codes, lens, softmax_scale=1.0, k_scale=one, v_scale=one, return_lse=True)
        got, lse = run(call)
        assert torch.equal(got.float().nan_to_num(999.0), numbers.nan_to_num(999.0).expand(1, 1, 16, 256))
        torch.testing.assert_close(lse[0, :, 0], wanted, rtol=1e-6, atol=0)


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


def test_same_bits_again_and_in_any_batch(device: str) -> None:
    call = case([90, 33, 128, 1], tokens=2, page=16, batch_invariant=True, device=device)
    op = registry.get(OP)
    op.force("triton")
    whole = op(*call)
    assert same_bits(op(*call), whole)
    for b in range(4):
        assert call.block_table is not None
        alone = call._replace(
            q=call.q[b : b + 1], seq_lens=call.seq_lens[b : b + 1], block_table=call.block_table[b : b + 1]
        )
        assert same_bits(op(*alone), whole[b : b + 1])


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


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_an_invariant_call_is_split_the_same_in_any_batch(arch: str) -> None:
    from wavecrest.ops.flash_decoding.config import default
    from wavecrest.ops.flash_decoding.key import key_of, shape_of

    chunks: dict[bool, set[int]] = {False: set(), True: set()}
    keys: dict[bool, set[Any]] = {False: set(), True: set()}
    for batch in (1, 8, 64):
        for invariant in chunks:
            q = torch.empty(batch, 1, 32, 128, dtype=BF16, device="meta")
            k = torch.empty(batch, 8192, 8, 128, dtype=BF16, device="meta")
            lens = torch.empty(batch, dtype=torch.int32, device="meta")
            given_ = Operands(q, k, k, lens, batch_invariant=invariant)
            # one key, so that measured rows say the same for all too
            keys[invariant].add(key_of(given_))
            chunks[invariant].add(default(shape_of(key_of(given_)), ARCHS[arch])["CHUNK"])
    assert len(chunks[True]) == 1 and len(chunks[False]) == 3
    assert len(keys[True]) == 1 and len(keys[False]) == 3


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "q dims": (r"q must be float32, float16, bfloat16 or float64 \[B, T, H, D\]", {"q": torch.zeros(2, 4, 32)}),
    "q dtype": ("q must be float32", {"q": torch.zeros(2, 1, 4, 32, dtype=I8)}),
    "tokens": ("takes 1 to 16 queries", {"q": torch.zeros(2, 17, 4, 32)}),
    "cache dtype": ("k_cache must be", {"k_cache": torch.zeros(2, 128, 2, 32, dtype=F16)}),
    "caches": ("must agree in all but their columns", {"v_cache": torch.zeros(2, 64, 2, 32)}),
    "columns": ("q and k as many", {"k_cache": torch.zeros(2, 128, 2, 16)}),
    "heads": ("4 heads of q are no multiple of the 3", dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 9, 3, 32))),
    "lens dtype": (r"seq_lens must be int32 \[2\]", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
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
    registry.get(OP)(*call).sum().backward()
    assert call.q.grad is not None and bool(call.q.grad.isfinite().all())


def test_no_sequences(device: str) -> None:
    call = case([40, 50], device=device)
    none = call._replace(q=call.q[:0], k_cache=call.k_cache[:0], v_cache=call.v_cache[:0], seq_lens=call.seq_lens[:0])
    assert run(none).shape == (0, 1, 4, 32)


@pytest.mark.parametrize("page", [0, 16])
def test_compile_fullgraph(page: int, device: str) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor | None) -> Any:
        return ops.flash_decoding(q, k, v, seq_lens=lens, block_table=table, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    for lengths in ([90, 33], [128, 5]):
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        again = case(lengths, tokens=2, page=page, dtype=BF16, beyond=0.0, device=device)
        with torch.no_grad():
            got = compiled(again.q, again.k_cache, again.v_cache, lens, again.block_table)
        assert_right(again._replace(return_lse=True), got)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_as_sequences_grow() -> None:
    call = case([90, 33], page=16, dtype=BF16, device="cuda", beyond=0.0)
    op = registry.get(OP)
    op.force("triton")
    op(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*call)
    for lengths in ([90, 33], [128, 1], [0, 77]):
        call.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_right(call, result)
