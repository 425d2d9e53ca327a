"""Dropout of flash_attention; `test_flash_attention.py` has what all its calls share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.attention_harness import (
    CASES,
    HEADS,
    LONG,
    ROUNDING,
    SMALL,
    TALL,
    assert_within,
    option,
    packed,
    tensors,
    wide,
)
from tests.ops.op_harness import DTYPES, name
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import launch as launches
from wavecrest.ops._flash_attention import launch_hopper as hopper_launch
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops.common.philox import philox
from wavecrest.ops.common.triton import interpreted, tl, triton

OURS = ("triton", "reference")
WORD = 2**32 - 1
SEED = (0x0123 << 48) + (0xFEDCBA98 << 16) + 0x4321


def word(seed: int, i: int, j: int, head: int, sequence: int) -> int:
    """The word of one pair, in Python's integers: Philox-4x32-10 as its authors write it."""
    c, k = [j // 4, i, head, sequence], [seed & WORD, seed >> 32]
    for _ in range(10):
        first, third = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(third >> 32) ^ c[1] ^ k[0], third & WORD, (first >> 32) ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c[j % 4]


def mask(call: FlashAttentionCall, sequence: int, head: int, queries: int, keys: int) -> Tensor:
    """The dropout mask of one head of one sequence, [queries, keys]: True where kept."""
    assert call.seed is not None
    least = math.floor(call.dropout_p * 2**32)
    rows = [[word(call.seed, i, j, head, sequence) >= least for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


def weights(call: FlashAttentionCall) -> FlashAttentionCall:
    """The call without dropout in float64 with values that are unit vectors: its result is the weights."""
    keys = call.k.shape[0] if call.layout == "thd" else call.seqlen_k
    assert keys <= 256
    eye = torch.eye(keys, dtype=torch.float64, device=call.k.device)
    heads = call.kv_heads
    v = eye[:, None].expand(keys, heads, keys) if call.layout == "thd" else eye[None, :, None].expand(
        call.q.shape[0], keys, heads, keys
    )  # fmt: skip
    if call.layout == "bhsd":
        v = v.transpose(1, 2)
    plain = wide(call)
    return plain._replace(v=v, dropout_p=0.0, seed=None, return_lse=False)


def dropped(call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
    """(the result, Σ p |v| of what is kept) in float64: weights of the definition, masked here, times v."""
    p = op.reference(weights(call))
    v = call.v.double()
    kept = torch.zeros_like(p)
    for b in range(call.batch):
        for h in range(call.heads):
            if call.layout == "thd":
                assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
                rows = slice(int(call.cu_seqlens_q[b]), int(call.cu_seqlens_q[b + 1]))
                cols = slice(int(call.cu_seqlens_k[b]), int(call.cu_seqlens_k[b + 1]))
                one = mask(call, b, h, rows.stop - rows.start, cols.stop - cols.start)
                kept[rows, h, cols] = one.to(kept)
            else:
                place = kept[b, h] if call.layout == "bhsd" else kept[b, :, h]
                place.copy_(mask(call, b, h, call.seqlen_q, call.seqlen_k))
    p = p * kept / (1 - call.dropout_p)
    group = call.heads // call.kv_heads
    axis = 1 if call.layout != "bshd" else 2
    v = v.repeat_interleave(group, axis)
    if call.layout == "bhsd":
        return p @ v, p @ v.abs()
    ahead = (p.transpose(-2, -3), v.transpose(-2, -3))
    return (ahead[0] @ ahead[1]).transpose(-2, -3), (ahead[0] @ ahead[1].abs()).transpose(-2, -3)


def assert_drops(
    backend: str, call: FlashAttentionCall, config: Config | None = SMALL, want: tuple[Tensor, Tensor] | None = None
) -> None:
    """A backend's result against the oracle; the logarithms are those without dropout, bit for bit."""
    call = call._replace(return_lse=True)
    chosen = {"config": config} if backend == "triton" else {}
    got, lse = op.run(backend, call, **chosen)
    plain = op.run(backend, call._replace(dropout_p=0.0), **chosen)
    assert torch.equal(lse, plain[1])
    want = want or dropped(call)
    inner = 1.01 * ROUNDING[got.dtype] + 1.5e-5
    assert_within(got, want[0], want[1], inner)


def dropping(
    queries: int, keys: int, *, dtype: torch.dtype = torch.float32, layout: str = "bshd", batch: int = 2,
    device: str = "cpu", d: int = 16, dv: int = 8, **options: Any,
) -> FlashAttentionCall:  # fmt: skip
    qkv = tensors(batch, queries, keys, HEADS, 2, d, dv, dtype, device, layout)
    return FlashAttentionCall(*qkv, **{"layout": layout, "dropout_p": 0.4, "seed": SEED, **options})


# of Random123's file of known answers: key, counter, words
KNOWN = (
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (WORD, WORD, WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x299F31D0 << 32) + 0xA4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("seed", "counter", "words"), KNOWN)
def test_philox_has_the_known_answers(seed: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    found = philox(seed, tuple(torch.tensor(one) for one in counter))  # type: ignore[arg-type]
    assert tuple(int(one) for one in found) == words
    # of shapes that broadcast, and as the tests have it
    a, b = torch.tensor([[counter[0]], [5]]), torch.tensor([7, counter[1], 2**31])
    spread = philox(seed, (a, b, torch.tensor(counter[2]), torch.tensor(counter[3])))
    assert tuple(int(one[0, 1]) for one in spread) == words
    assert [int(one[1, 2]) for one in spread] == [
        word(seed, 2**31, 20 + which, counter[2], counter[3]) for which in range(4)
    ]


@triton.jit
def _words(out, seed, base, N: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, N)
    a, b, c, d = tl.philox(seed, base + offs, offs * 3, base, base + 1)
    tl.store(out + offs, a.to(tl.int64))
    tl.store(out + N + offs, b.to(tl.int64))
    tl.store(out + 2 * N + offs, c.to(tl.int64))
    tl.store(out + 3 * N + offs, d.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, SEED])
def test_philox_is_that_of_triton(seed: int, device: str) -> None:
    if not interpreted and device == "cpu":
        pytest.skip("Triton's interpreter is off")
    out = torch.zeros(4, 64, dtype=torch.int64, device=device)
    _words[(1,)](out, seed, 1000, N=64)
    offs = torch.arange(64, device=device)
    want = philox(seed, (1000 + offs, offs * 3, torch.full_like(offs, 1000), torch.full_like(offs, 1001)))
    assert torch.equal(out, torch.stack(want))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("key", CASES)
def test_options(key: str, backend: str, device: str) -> None:
    """Several tiles, heads that share keys, with every option."""
    for queries, keys in ((19, 40), (40, 19)):
        call = dropping(queries, keys, device=device, **option(key, queries, keys, device))
        assert_drops(backend, call)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_dtypes_and_layouts(dtype: torch.dtype, layout: str, device: str) -> None:
    call = dropping(19, 37, dtype=dtype, layout=layout, causal=True, device=device)
    want = dropped(call)
    for backend in OURS:
        assert_drops(backend, call, want=want)


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 1 - 2.0**-40])
@pytest.mark.parametrize("seed", [0, 1, WORD, 2**32, 2**64 - 1])
def test_shares_and_seeds(share: float, seed: int, device: str) -> None:
    call = dropping(17, 33, batch=1, dropout_p=share, seed=seed, device=device)
    want = dropped(call)
    for backend in OURS:
        assert_drops(backend, call, want=want)


@pytest.mark.parametrize("backend", OURS)
def test_a_word_that_is_the_least_is_kept(backend: str, device: str) -> None:
    """A share whose bound is the very word of a pair: kept, and with the next bound dropped."""
    config = {"config": SMALL} if backend == "triton" else {}
    eye = torch.eye(6, device=device)[None, :, None].expand(1, 6, HEADS, 6)
    q, k = torch.zeros(1, 3, HEADS, 16, device=device), torch.zeros(1, 6, HEADS, 16, device=device)
    for j in range(6):
        own = word(SEED, 2, j, 1, 0)
        for bound, kept in ((own, True), (own + 1, False)):
            call = FlashAttentionCall(q, k, eye, dropout_p=bound / 2**32, seed=SEED)
            got = op.run(backend, call, **config)
            assert bool(got[0, 2, 1, j] > 0) == kept


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("key", ["plain", "causal", "everything"])
def test_packed(key: str, backend: str, device: str) -> None:
    """Queries and keys are counted inside their sequence: the first has the kernel's bits that it has alone."""
    queries, keys = [5, 0, 17, 9], [20, 9, 17, 33]
    qkv, starts = packed(queries, keys, HEADS, 2, 16, torch.float32, device)
    options = option(key, max(queries), max(keys), device, len(queries))
    call = FlashAttentionCall(*qkv, dropout_p=0.4, seed=SEED, **starts, **options)
    assert_drops(backend, call)
    if key != "causal" or backend == "reference":
        return
    run, config = op.run, {"config": SMALL}
    alone = FlashAttentionCall(
        *(x[: queries[0] if which == 0 else keys[0]][None] for which, x in enumerate(qkv)),
        causal=True, dropout_p=0.4, seed=SEED,
    )  # fmt: skip
    assert torch.equal(run(backend, alone, **config)[0], run(backend, call, **config)[: queries[0]])


def test_the_mask_does_not_know_tiles_and_layouts(device: str) -> None:
    """Read off a call whose weights are alike and whose values are unit vectors."""
    run, keys = op.run, 64
    q, k = torch.zeros(2, 70, HEADS, 16, device=device), torch.zeros(2, keys, HEADS, 16, device=device)
    v = torch.eye(keys, device=device)[None, :, None].expand(2, keys, HEADS, keys)
    call = FlashAttentionCall(q, k, v, dropout_p=0.3, seed=SEED)
    want = run("reference", call) > 0
    for config in (SMALL, LONG, TALL, Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1)):
        assert torch.equal(run("triton", call, config=config) > 0, want)
    across = call._replace(q=q.transpose(1, 2), k=k.transpose(1, 2), v=v.transpose(1, 2), layout="bhsd")
    assert torch.equal(run("triton", across, config=LONG).transpose(1, 2) > 0, want)
    # another one for each seed, head and sequence; a share like the one asked for, within 5 deviations
    deviation = math.sqrt(0.3 * 0.7 / want.numel())
    assert abs((~want).double().mean().item() - 0.3) < 5 * deviation
    apart = [run("reference", call._replace(seed=seed)) > 0 for seed in (SEED + 1, SEED + 2**32)]
    parts = [*apart, want.flip(0), want.roll(1, 2), want.roll(1, 1), want.roll(1, 3), want.roll(4, 3)]
    for other in parts:
        # of two masks that know nothing of each other 0.42 of all pairs differ
        assert abs((want ^ other).double().mean().item() - 0.42) < 0.02
    for axis in range(4):
        shares = (~want).double().mean(dim=[one for one in range(4) if one != axis])
        count = want.numel() / shares.numel()
        assert (shares - 0.3).abs().max() < 5.5 * math.sqrt(0.3 * 0.7 / count)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=name)
def test_eight_bits(dtype: torch.dtype, device: str) -> None:
    """With weights that codes have: as exact as those that are not rounded."""
    q = torch.zeros(1, 33, HEADS, 16, device=device)
    q[:, torch.arange(33), :, torch.arange(33) % 16] = 1.0
    k = torch.randint(0, 4, (1, 70, 2, 16), generator=torch.Generator().manual_seed(3)).to(device)
    v = tensors(1, 33, 70, HEADS, 2, 16, 8, device=device)[2].mul(20).round().clamp(-100, 100)
    one = torch.ones((), device=device)
    floats = FlashAttentionCall(
        q, k.float(), v.to(dtype).float(), softmax_scale=math.log(2.0), dropout_p=0.4, seed=SEED
    )
    want = dropped(floats)
    for p_descale in (None, 2.0**-6):
        codes = FlashAttentionCall(*floats)._replace(
            q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), q_descale=one, k_descale=one, v_descale=one,
            p_descale=p_descale, out_dtype=torch.float32,
        )  # fmt: skip
        for backend in OURS:
            got = op.run(backend, codes, **({"config": LONG} if backend == "triton" else {}))
            assert_within(got, want[0], want[1], 4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_no_dropout_is_the_call_without(dtype: torch.dtype, device: str) -> None:
    """The same key, constants and bits, whatever the seed."""
    none = dropping(19, 40, dtype=dtype, causal=True, device=device, dropout_p=0.0, seed=None)
    for seed in (None, 0, SEED):
        other = none._replace(dropout_p=0, seed=seed)
        assert op.key(other) == op.key(none)
        assert torch.equal(op.run("triton", other, config=SMALL), op.run("triton", none, config=SMALL))
        made = [launches.launch(one, *launches.empty_results(one), SMALL, None) for one in (none, other)]
        assert made[0].constants == made[1].constants and not made[0].constants["DROPOUT"]
    with_it = op.key(none._replace(dropout_p=0.1, seed=1))
    at = op.key_fields.index("dtype")
    assert with_it[at] == f"{name(dtype)} dropout"
    assert with_it[:at] + with_it[at + 1 :] == op.key(none)[:at] + op.key(none)[at + 1 :]


def test_a_seed_does_not_compile_anew() -> None:
    made = []
    for seed, share in ((0, 0.1), (1, 0.7), (WORD, 0.5), (2**64 - 1, 0.999), (2**31, 0.25)):
        one = dropping(5, 7, seed=seed, dropout_p=share)
        made.append(launches.launch(one, *launches.empty_results(one), SMALL, None))
    words = [one.args[-4:] for one in made]
    assert all(-(2**31) <= number < 2**31 for four in words for number in four[:3])
    for one in made[1:]:
        assert one.constants == made[0].constants
        assert [type(value) for value in one.args] == [type(value) for value in made[0].args]


@pytest.mark.parametrize("backend", OURS)
def test_queries_that_see_nothing(backend: str, device: str) -> None:
    config = {"config": SMALL} if backend == "triton" else {}
    out, lse = op.run(backend, dropping(40, 23, causal=True, return_lse=True, device=device), **config)
    assert not out[:, :17].any() and (lse[:, :, :17] == -math.inf).all() and out[:, 30:].any()
    empty = dropping(4, 0, return_lse=True, device=device)
    out, lse = op.run(backend, empty, **config)
    assert not out.any() and (lse == -math.inf).all()


def test_gradients(device: str) -> None:
    """Through the definition, with the same mask."""
    call = dropping(9, 12, d=8, causal=True, device=device)
    leaves = [x.clone().requires_grad_() for x in call[:3]]
    op.force("triton")
    wanted = call._replace(q=leaves[0], k=leaves[1], v=leaves[2])
    decision = op.decide(wanted)
    assert decision.backend == "reference"
    assert "no backward" in {one.backend: one.reason for one in decision.refused}["triton"]
    op(wanted).square().sum().backward()
    doubled = [x.double().requires_grad_() for x in call[:3]]
    q, k, v = (x.transpose(1, 2) for x in doubled)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = q @ k.mT * call.scale
    s = s.masked_fill(torch.ones(9, 12, dtype=torch.bool, device=device).triu(4), -math.inf)
    kept = torch.stack([torch.stack([mask(call, b, h, 9, 12) for h in range(HEADS)]) for b in range(2)]).to(device)
    (s.softmax(-1) * kept / 0.6 @ v).square().sum().backward()
    for leaf, want in zip(leaves, doubled, strict=True):
        assert leaf.grad is not None and want.grad is not None and want.grad.abs().max() > 1e-3
        torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def test_dispatch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, aiter and the kernel for sm_90, which draw otherwise or not at all, decline with a reason."""
    from wavecrest.backends import aiter

    call = dropping(20, 20, d=64, dv=64, dtype=torch.bfloat16, device=device)
    decision = op.decide(call)
    assert decision.backend == ("reference" if device == "cpu" else "triton")
    refused = {one.backend: one.reason for one in decision.refused}
    assert "dropout" in refused["torch"] and {"torch_flash", "torch_math"} <= refused.keys()
    with pytest.raises(Unsupported, match="dropout"):
        op.run("torch", call)
    got = ops.flash_attention(*call[:3], dropout_p=0.4, seed=SEED)
    assert torch.equal(got, op(call))  # type: ignore[arg-type]
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
    assert hopper_launch.refusal(call, "columns 16") == "does not know dropout"
    monkeypatch.setattr(aiter, "_unavailable", lambda: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True))
    assert "dropout" in (aiter._attention_refuse(call) or "")
    assert aiter._attention_refuse(call._replace(dropout_p=0.0)) is None


def test_compile_fullgraph(device: str) -> None:
    """One graph without breaks, equal to eager; a seed that changes is a number that the graph is given."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def run(q: Tensor, k: Tensor, v: Tensor, seed: int) -> Tensor:
        return ops.flash_attention(q, k, v, causal=True, dropout_p=0.4, seed=seed)  # type: ignore[return-value]

    compiled = torch.compile(run, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    q, k, v = dropping(20, 24, device=device)[:3]
    with torch.no_grad():
        for seed in (3, 4, 2**31 + 7, 2**40, 2**62):
            torch.testing.assert_close(compiled(q, k, v, seed), run(q, k, v, seed), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


_Q = torch.ones(2, 5, 4, 8)


@pytest.mark.parametrize("backend", [None, "triton", "torch", "reference"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"dropout_p": 0.1}, "dropout_p above 0 needs a seed", id="no-seed"),
        pytest.param({"dropout_p": 1.0, "seed": 1}, "dropout_p must be a number from 0", id="one"),
        pytest.param({"dropout_p": -0.1, "seed": 1}, "dropout_p must be", id="negative"),
        pytest.param({"dropout_p": math.nan, "seed": 1}, "dropout_p must be", id="nan"),
        pytest.param({"dropout_p": None}, "dropout_p must be", id="none"),
        pytest.param({"dropout_p": True, "seed": 1}, "dropout_p must be", id="bool"),
        pytest.param({"dropout_p": 0.1, "seed": -1}, "seed must be a whole number", id="seed-negative"),
        pytest.param({"dropout_p": 0.1, "seed": 2**64}, "seed must be a whole number", id="seed-large"),
        pytest.param({"dropout_p": 0.1, "seed": 1.0}, "seed must be a whole number", id="seed-float"),
        pytest.param({"seed": "a"}, "seed must be a whole number", id="seed-word"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.flash_attention(_Q, _Q, _Q, **options)
        else:
            op.run(backend, FlashAttentionCall(_Q, _Q, _Q, **options))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    length, side = st.sampled_from((0, 1, 2, 15, 17, 33)), st.sampled_from((-1, -1, 0, 5, 16))
    return {
        "lengths": (draw(length), draw(length)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(("bshd", "bhsd"))),
        "share": draw(st.floats(0.01, 0.95)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "causal": draw(st.booleans()),
        "window": (draw(side), draw(side)),
        "softcap": draw(st.sampled_from((0.0, 2.0))),
        "config": draw(st.sampled_from((SMALL, LONG, TALL))),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_any_call(drawn: dict[str, Any]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {name: drawn[name] for name in ("causal", "window", "softcap", "layout", "dtype", "seed")}
    call = dropping(*drawn["lengths"], device=device, dropout_p=drawn["share"], **options)
    want = dropped(call)
    assert_drops("triton", call, drawn["config"], want)
    assert_drops("reference", call, None, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_the_mask_on_a_gpu(dtype: torch.dtype) -> None:
    """The default configuration and the reference drop the same weights, of alike ones of unit vectors."""
    for d in (64, 128):
        q, k = (torch.zeros(2, 300, HEADS, d, dtype=dtype, device="cuda") for _ in range(2))
        v = torch.eye(300, 256, dtype=dtype, device="cuda")[None, :, None].expand(2, 300, HEADS, 256)
        call = FlashAttentionCall(q, k, v, causal=True, dropout_p=0.3, seed=SEED)
        run = op.run
        assert torch.equal(run("triton", call) > 0, run("reference", call) > 0)
