"""Attention's kernel for short sequences: values, what it takes, when it runs, its configurations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.ops.attention_harness import (
    HEADS,
    ROUNDING,
    Accesses,
    assert_within,
    by_reference,
    exact,
    lost_to_subnormals,
    option,
    score_error,
    tensors,
)
from tests.ops.op_harness import name
from wavecrest import ops
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import rank
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import launch_short
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall, access
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.study.space import space_short_of
from wavecrest.ops.common import target

SHORT = "triton_short"
HALVES = (torch.float16, torch.bfloat16)
# one query, ends inside a tile, a whole tile, more queries than keys and fewer, several tiles of queries
LENGTHS = ((1, 1), (1, 17), (17, 33), (49, 49), (64, 64), (70, 40), (33, 70), (128, 128))
OPTIONS = (
    "plain", "causal", "right", "scale", "no scale", "bias", "bias a head", "bias a key", "bias a query",
    "bias transposed",
)  # fmt: skip


def config_of(rows: int = 16, per_unit: int = 4, stages: int = 1) -> Config:
    return launch_short.made_of(rows, 4, stages, per_unit, target.arch())


def assert_attends(call: FlashAttentionCall, config: Config | None = None) -> Tensor:
    """The kernel's result against float64; contiguous; arguments as they were."""
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    got = op.run(SHORT, call, config=config)
    want, lse, mass = by_reference(call)
    assert got.dtype == call.q.dtype and got.is_contiguous() and got.shape == call.shape
    inner: Any = 1.01 * ROUNDING[call.q.dtype] + 1.5e-5
    more: Any = 0.0
    if got.is_cuda:
        inner, more = inner + score_error(call, lse).to(got.device), lost_to_subnormals(call).to(got.device)
    assert_within(got, want, mass, inner, more)
    for one, kept in zip(call, before, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one.nan_to_num(7.0), kept.nan_to_num(7.0)), "an argument was written to"
    return got


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("key", OPTIONS)
def test_values(key: str, queries: int, keys: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = tensors(2, queries, keys, HEADS, 2, d=32, dtype=dtype, device=device)
    call = FlashAttentionCall(q, k, v, **option(key, queries, keys, device))
    for config in (config_of(), None):
        assert_attends(call, config)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 16), (64, 64), (16, 72), (128, 24)])
def test_columns(d: int, dv: int, layout: str, device: str) -> None:
    call = FlashAttentionCall(*tensors(3, 20, 50, 2, 1, d, dv, torch.float16, device, layout), layout)
    assert_attends(call)
    assert_attends(call._replace(causal=True), config_of(32))


def test_the_definition(device: str) -> None:
    q, k, v = tensors(2, 9, 13, 2, 1, dtype=torch.float16, device=device)
    for options in ({"causal": True}, {"bias": torch.linspace(-2, 3, 13, device=device)}):
        call = FlashAttentionCall(q, k, v, **options)
        want, _, mass = exact(call)
        got = op.run(SHORT, call)
        assert_within(got, want, mass, 1.01 * ROUNDING[torch.float16] + 1e-4)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5, 7])
def test_sequences_are_shared_out(batch: int, stages: int, device: str) -> None:
    """Any number of programs gives the same bits: each sequence is attended to once, and by itself."""
    q, k, v = tensors(batch, 20, 33, 3, dtype=torch.bfloat16, device=device)
    bias = option("bias", 20, 33, device, batch, 3)["bias"]
    for each in (None, bias[:1], bias):
        call = FlashAttentionCall(q, k, v, bias=each)
        want = assert_attends(call)
        for per_unit in (1, 3, 7, 12, 200):
            config = config_of(32, per_unit, stages)
            assert torch.equal(op.run(SHORT, call, config=config), want)
            parts = launch_short.parts_of(batch, 3, config, None)
            assert 1 <= parts <= batch
        for at in range(batch):
            one = [None if each is None else each[at : at + 1] if len(each) == batch else each]
            alone = call._replace(q=q[at : at + 1], k=k[at : at + 1], v=v[at : at + 1], bias=one[0])
            assert torch.equal(op.run(SHORT, alone)[0], want[at])


@pytest.mark.parametrize("key", ["plain", "causal", "bias", "bias a key"])
def test_nothing_outside_of_the_arguments_is_touched(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accesses = Accesses(monkeypatch)
    whole = torch.randn(3, 50, 3, 2, 24).half()
    q, k, v = whole[:, :19].unbind(2)[0], *whole[:, 5:42].unbind(2)[1:]
    call = FlashAttentionCall(q, k, v, **option(key, 19, 37, "cpu", 3, 2))
    want = by_reference(call)[0]
    torch.testing.assert_close(op.run(SHORT, call, config=config_of()).double(), want, rtol=4e-3, atol=4e-3)
    assert accesses.counted > 0


def test_nothing_beyond_the_ends_is_used(device: str) -> None:
    """NaN and infinities behind the last key and query, and before the first."""
    q, k, v = tensors(2, 19, 37, HEADS, 2, dtype=torch.float16, device=device)
    for options in ({}, {"causal": True}, option("bias a key", 19, 37, device)):
        want = op.run(SHORT, FlashAttentionCall(q, k, v, **options))
        for bad in (float("nan"), float("inf"), -float("inf")):
            around = []
            for one in (q, k, v):
                long = torch.full((2, one.shape[1] + 27, *one.shape[2:]), bad, dtype=one.dtype, device=device)
                long[:, 11 : 11 + one.shape[1]] = one
                around.append(long[:, 11 : 11 + one.shape[1]])
            assert torch.equal(op.run(SHORT, FlashAttentionCall(*around, **options)), want)


def test_hidden_keys_hold_anything(device: str) -> None:
    """k may hold NaN wherever a mask hides it; v wherever no query of a tile sees it."""
    q, k, v = tensors(2, 64, 64, dtype=torch.float16, device=device)
    call, config = FlashAttentionCall(q, k, v, causal=True), config_of()
    want = op.run(SHORT, call, config=config)
    for at in (1, 17, 40, 63):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, at], bad_v[:, at] = float("nan"), float("nan")
        got = op.run(SHORT, call._replace(k=bad_k), config=config)
        assert torch.equal(got[:, :at], want[:, :at]) and got[:, at:].isnan().all()
        got, first = op.run(SHORT, call._replace(v=bad_v), config=config), at // 16 * 16
        assert torch.equal(got[:, :first], want[:, :first]) and got[:, at:].isnan().all()


def test_queries_that_see_nothing(device: str) -> None:
    q, k, v = tensors(2, 40, 23, dtype=torch.float16, device=device)
    for options, blind in (({"causal": True}, 17), ({"window": (-1, 4)}, 13)):
        out = op.run(SHORT, FlashAttentionCall(q, k, v, **options))
        assert not out[:, :blind].any() and out[:, blind:].abs().sum(-1).min() > 0
        # the first tile sees nothing, whatever there is
        bad = torch.full_like(v, float("nan"))
        first = min(16, blind // 16 * 16)
        out = op.run(SHORT, FlashAttentionCall(q, k, bad, **options), config=config_of())
        assert not out[:, :first].any() and out[:, blind:].isnan().all()
    bias = torch.zeros(2, 1, 40, 23, device=device)
    bias[1, 0, 7] = -math.inf
    for each in (bias, bias[1:]):
        out = op.run(SHORT, FlashAttentionCall(q, k, v, bias=each))
        assert not out[1, 7].any() and out[1, 8].any()
        assert_attends(FlashAttentionCall(q, k, v, bias=each))


def test_without_queries(device: str) -> None:
    q, k, v = tensors(2, 0, 5, dtype=torch.float16, device=device)
    assert op.run(SHORT, FlashAttentionCall(q, k, v)).shape == q.shape


def _ready(**options: Any) -> FlashAttentionCall:
    dtype = options.pop("dtype", torch.float16)
    sizes = {"batch": 2, "queries": 20, "keys": 30, "heads": 2} | {
        one: options.pop(one) for one in ("batch", "queries", "keys", "heads", "d", "dv") if one in options
    }
    return FlashAttentionCall(*tensors(**sizes, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"window": (5, 0)}, "left edge"),
        ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
        ({"softcap": 2.0}, "softcap"),
        ({"sinks": torch.ones(2)}, "sinks"),
        ({"return_lse": True}, "logarithms"),
        ({"dropout_p": 0.5, "seed": 1}, "dropout"),
        ({"keys": 0}, "without keys"),
        ({"keys": 129}, "at most 128 keys"),
        ({"keys": 65, "d": 128}, "at most 8192 elements"),
        ({"d": 12}, "16 bytes"),
        ({"q": torch.randn(2, 20, 2, 64).half()[..., ::2], "d": 32}, "contiguous columns"),
        # one query, whose strides say nothing
        ({"queries": 1, "keys": 1, "batch": 1, "heads": 1, "d": 12}, "multiple of 8"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_it_says_what_it_does_not_take(options: dict[str, Any], reason: str) -> None:
    q = options.get("q")
    call = _ready(**{one: value for one, value in options.items() if one != "q"})
    call = call if q is None else call._replace(q=q)
    found = launch_short.refusal(call, access(call))
    assert found is not None and reason in found
    with pytest.raises(Unsupported, match="triton_short refuses"):
        op.call_on(SHORT, call)


def test_offsets_beyond_32_bits_are_refused() -> None:
    far = torch.empty((1 << 31) + 64, dtype=torch.float16, device="meta")
    k = far.as_strided((1, 30, 1, 16), (0, 1 << 23, 16, 1))
    q = torch.empty(1, 20, 1, 16, dtype=torch.float16, device="meta")
    call = FlashAttentionCall(q, k, k)
    assert launch_short.refusal(call, access(call)) is None
    call = FlashAttentionCall(q, *[far.as_strided((1, 30, 1, 16), (0, 1 << 26, 16, 1))] * 2)
    assert "32 bits" in str(launch_short.refusal(call, access(call)))
    call = FlashAttentionCall(q, q, q, bias=far.as_strided((20, 20), (1 << 26, 1)))
    assert "32 bits" in str(launch_short.refusal(call, access(call)))


def test_strides_that_no_key_has_are_looked_at() -> None:
    """A call whose tokens are far apart runs in the portable kernel, and says so."""
    call = _ready(batch=1, queries=3, keys=40, heads=1, d=16)
    far = torch.empty((1 << 31) + (1 << 20), dtype=torch.float16)
    k = far.as_strided((1, 40, 1, 16), (0, 1 << 25, 16, 1)).copy_(call.k)
    away = call._replace(k=k)
    assert op.key(call) == op.key(away) and "32 bits" in str(launch_short.fault(away))
    op.pin(op.key(call), SHORT, config_of(), "user", "a test")
    try:
        want = op(call)
        with pytest.warns(PortableKernel, match="triton_short, which counts the elements"):
            got = op(away)
    finally:
        op.unpin()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_the_results_stride_counts_too() -> None:
    q = torch.empty(1, 64, (1 << 19) + 64, 64, dtype=torch.float16, device="meta").transpose(1, 2)
    k = torch.empty(1, 30, 8, 64, dtype=torch.float16, device="meta")
    assert "32 bits" in str(launch_short.fault(FlashAttentionCall(q, k, k)))
    # a stride says nothing where there is one token
    one = torch.empty(1 << 27, dtype=torch.float16, device="meta").as_strided((1, 1, 1, 16), (0, 1 << 26, 16, 1))
    few = torch.empty(1, 20, 1, 16, dtype=torch.float16, device="meta")
    assert launch_short.fault(FlashAttentionCall(few, one, one)) is None


@pytest.mark.parametrize("part", [{"PER_UNIT": 0}, {"BLOCK_M": 256}, {"BLOCK_M": 24}], ids=str)
def test_a_configuration_that_it_has_not_is_refused(part: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="triton_short has a BLOCK_M of 16, 32, 64, 128"):
        op.run(SHORT, _ready(), config=Config(**(config_of().kwargs | part)))


def test_it_runs_where_it_is_named(device: str) -> None:
    call = _ready(d=32)
    meta = call._replace(**{one: getattr(call, one).to("meta") for one in ("q", "k", "v")})
    assert op.backends["triton"].opt_in(meta) is None
    assert op.backends[SHORT].opt_in(meta) == "runs where a measured row names it"
    call = call._replace(**{one: getattr(call, one).to(device) for one in ("q", "k", "v")})
    key, config = op.key(call), config_of(32)
    op.pin(key, SHORT, config, "user", "a test")
    try:
        decision = op.decide(call)
        assert (decision.backend, decision.config) == (SHORT, config)
        assert torch.equal(op(call), op.run(SHORT, call, config=config))
    finally:
        op.unpin()


def test_one_graph_serves_the_lengths_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend is asked whether it takes a call while it is traced: none may make a length a constant."""
    # Dynamo does not trace Triton's interpreter
    monkeypatch.setattr(launch_short._launcher, "starter", lambda *_args: lambda *tensors: tensors[-1].zero_())
    for forced in (None, SHORT):
        torch._dynamo.reset()
        counter = CompileCounter()
        op.force(forced)
        try:
            compiled = torch.compile(ops.flash_attention, dynamic=True, fullgraph=True, backend=counter)
            with torch.no_grad():
                for length in (34, 40, 50, 60, 63):
                    one = torch.randn(9, length, 2, 32).half()
                    compiled(one, one, one)
        finally:
            op.force(None)
        assert counter.frame_count == 1, forced


@pytest.mark.parametrize("arch", list(ARCHS))
@pytest.mark.parametrize(("queries", "keys", "d"), [(49, 49, 32), (128, 128, 64), (1, 60, 128), (77, 77, 64)])
def test_configurations(queries: int, keys: int, d: int, arch: str) -> None:
    chip = ARCHS[arch]
    for causal, more in ((False, 0), (True, 0), (False, 1)):
        shape = Shape(queries, d, 16, causal, more)
        made = list(space_short_of(shape, keys, chip))
        assert made[0] == launch_short.default(shape, keys, chip) and len(set(made)) == len(made) > 3
        for one in made:
            assert one["BLOCK_M"] <= max(16, 1 << (queries - 1).bit_length()), "more rows than queries"


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_the_cost_model_ranks_it(arch: str) -> None:
    """Windows of an image are memory's work: not less time than their bytes take, and not ten times as much."""
    call = _ready(batch=4096, queries=49, keys=49, heads=3, d=32)
    key = op.key(call)
    choices = {one.backend: one for one in rank(op.study.kernels, key, ARCHS[arch])}
    chip = ARCHS[arch]
    floor = 4 * call.q.nbytes / (chip.bandwidth * 1e3)
    assert floor < choices[SHORT].prediction.us < 10 * floor


# Dynamo does not trace Triton's interpreter
@pytest.mark.gpu
def test_compile_fullgraph() -> None:
    q, k, v = (one.cuda() for one in _ready(d=32)[:3])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, causal=True)

    torch._dynamo.reset()
    op.force(SHORT)
    try:
        want = attend(q, k, v)
        with torch.no_grad():
            got = torch.compile(attend, fullgraph=True)(q, k, v)
    finally:
        op.force(None)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
