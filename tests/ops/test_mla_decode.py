"""mla_decode against a definition in float64 that decompresses: caches, splits, lengths, weights, each option."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.mla_harness import BF16, CONFIGS, F16, F32, NAN, assert_right, case, config, exact, run
from tests.ops.op_harness import assert_few_calls, same_bits, specialised
from wavecrest import hardware, ops
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._mla_decode import config as configs
from wavecrest.ops._mla_decode import launch as launches
from wavecrest.ops._mla_decode import launch_hopper as hopper_launch
from wavecrest.ops._mla_decode.backend import op
from wavecrest.ops._mla_decode.call import MlaDecodeCall
from wavecrest.ops._mla_decode.key import key_of, shape_of
from wavecrest.ops._mla_decode.reference import reference
from wavecrest.ops._mla_decode.study import cases as cases_of_tools
from wavecrest.ops._mla_decode.study.space import space_hopper, space_of
from wavecrest.ops.common import launcher as _launcher
from wavecrest.ops.common.launcher import Launch

OP = "mla_decode"

CASES: dict[str, dict[str, Any]] = {
    "plain": {"lens": [96, 70]},
    "one key": {"lens": [1, 2], "capacity": 16},
    "empty": {"lens": [0, 40, 0], "return_lse": True},
    "fewer keys than queries": {"lens": [2, 5], "tokens": 4, "return_lse": True},
    "one head": {"lens": [40], "heads": 1},
    "many heads": {"lens": [50, 33], "heads": 70, "return_lse": True},
    "several queries": {"lens": [96, 34], "tokens": 5, "heads": 3, "return_lse": True},
    "sixteen queries": {"lens": [50], "tokens": 16, "heads": 2},
    # the last split has keys of the last queries alone: rows of the first tile see none of them
    "a split inside the last queries": {"lens": [36, 70], "tokens": 16, "heads": 4, "return_lse": True},
    "pages of 16": {"lens": [96, 17, 0], "page": 16, "tokens": 2},
    "pages of 6": {"lens": [50, 3], "page": 6},
    "pages of 1": {"lens": [33, 96], "page": 1},
    "pages of 32": {"lens": [96, 31], "page": 32, "heads": 20},
    "cap": {"lens": [70, 9], "logit_cap": 0.5, "softmax_scale": 1.0, "return_lse": True},
    "scale": {"lens": [40], "softmax_scale": 0.7},
    "no scale": {"lens": [40], "softmax_scale": 0.0},
    "neox": {"lens": [40, 0, 7], "tables": "neox"},
    "gptj": {"lens": [40, 7], "tokens": 3, "tables": "gptj", "return_lse": True},
    "neox queries without keys": {"lens": [2], "tokens": 4, "tables": "neox", "return_lse": True},
    "positions": {"lens": [40, 7], "tokens": 2, "tables": "gptj", "places": torch.int32},
    "long positions": {"lens": [40, 7], "tables": "neox", "places": torch.int64},
    "w_uk": {"lens": [60, 33], "nope": 24},
    "w_uv": {"lens": [60, 33], "values": 20},
    "weights": {"lens": [60, 1], "nope": 20, "values": 40, "tokens": 2, "heads": 6, "return_lse": True},
    "odd columns": {"lens": [30, 45], "latent": 37, "rotary": 6, "nope": 5, "values": 3},
    "one column": {"lens": [30], "latent": 1, "rotary": 1},
    "wide": {"lens": [40], "latent": 300, "rotary": 100, "tables": "neox"},
    "everything": {
        "lens": [95, 2], "tokens": 3, "heads": 6, "latent": 40, "rotary": 24, "nope": 16, "values": 24, "page": 16,
        "logit_cap": 3.0, "tables": "gptj", "places": torch.int64, "return_lse": True, "batch_invariant": True,
    },
}  # fmt: skip


def named(values: dict[str, Any], device: str, **options: Any) -> MlaDecodeCall:
    return case(**(values | options), device=device)


@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, how: str, device: str) -> None:
    call = named(CASES[name], device)
    assert_right(call, run(OP, call, CONFIGS[how]))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", CASES)
def test_cases_in_16_bits(name: str, dtype: torch.dtype, device: str) -> None:
    call = named(CASES[name], device, dtype=dtype)
    assert_right(call, run(OP, call))


@pytest.mark.parametrize("name", CASES)
def test_definitions(name: str, device: str) -> None:
    """Decompressed, absorbed and plain loops are one function, to the last digits of float64."""
    call = named(CASES[name], device, dtype=torch.float64)
    want = exact(call)
    for backend in ("reference", "torch"):
        got = run(OP, call, None, backend)
        y, lse = got if isinstance(got, tuple) else (got, None)
        # tables are float32, as the kernel's are; the turned part is rounded to the queries' float64
        torch.testing.assert_close(y.cpu(), want.y, rtol=1e-11, atol=1e-11)
        if lse is not None:
            assert torch.equal(lse.cpu().isneginf(), want.lse.isneginf())
            torch.testing.assert_close(lse.cpu().nan_to_num(), want.lse.nan_to_num(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64])
def test_other_backends(dtype: torch.dtype, backend: str, device: str) -> None:
    for name in ("plain", "pages of 6", "everything", "empty"):
        call = named(CASES[name], device, dtype=dtype)
        assert_right(call, run(OP, call, None, backend))


def test_an_unwritten_or_wrong_element_is_found(device: str) -> None:
    """The bound can fail: it is far below what one key, head, column or place off would make."""
    call = named(CASES["weights"], device, tables="neox")
    want, right = exact(call), reference(call)
    assert_right(call, right, want)
    y, lse = right
    for wrong in (y * 1.0001, y.roll(1, 2), y.roll(1, 3), torch.where(y == y[0, 0, 0, 0], NAN, y)):
        with pytest.raises(AssertionError):
            assert_right(call, (wrong, lse), want)
    with pytest.raises(AssertionError):
        assert_right(call, (y, lse * 1.001), want)
    changes = {"seq_lens": call.seq_lens + 1, "logit_cap": 9.0, "rope_style": "gptj", "softmax_scale": 0.167}
    filled = call._replace(latent_cache=call.latent_cache.nan_to_num(0.5))
    for change in changes.items():
        with pytest.raises(AssertionError):
            assert_right(call, reference(filled._replace(**dict([change]))), want)


# what is hidden


@pytest.mark.parametrize("beyond", [NAN, float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("page", [0, 4, 16, 32])
def test_what_lies_beyond_the_keys_never_takes_part(page: int, beyond: float, device: str) -> None:
    """The same bits whatever the rest of the cache, other pages and the rest of the table hold."""
    for name in ("triton", "reference", "torch"):
        made = [case([50, 0, 31], page=page, device=device, beyond=one, return_lse=True) for one in (0.0, beyond)]
        clean, dirty = (run(OP, one, backend=name) for one in made)
        assert_right(made[1], dirty)
        assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True)), name


def test_a_seen_key_that_is_nan_is_not_lost(device: str) -> None:
    """It makes its own sequence's results NaN, in the queries that see it, and no other's."""
    call = case([40, 30], tokens=3, heads=16, device=device)
    # the last key, which the last query alone sees; with 16 heads a tile has one query
    call.latent_cache[0, 39] = NAN
    clean = case([40, 30], tokens=3, heads=16, device=device)
    for backend in ("triton", "reference"):
        y, want = run(OP, call, backend=backend), run(OP, clean, backend=backend)
        assert bool(y[0, 2].isnan().all())
        assert same_bits(y[1], want[1]) and same_bits(y[0, :2], want[0, :2])


def test_places_that_are_in_no_table(device: str) -> None:
    """NaN in their query, as of rope, and in no other."""
    call = case([40, 30], tokens=2, tables="neox", places=torch.int32, heads=16, device=device)
    assert call.positions is not None and call.cos is not None
    want = run(OP, call)
    call.positions[0, 1], call.positions[1, 0] = call.cos.shape[0], -1
    for backend in ("triton", "reference"):
        y = run(OP, call, backend=backend)
        assert torch.equal(y.isnan().all(-1).all(-1).cpu(), torch.tensor([[False, True], [True, False]]))
        assert not bool(y[0, 0].isnan().any() or y[1, 1].isnan().any())
    assert same_bits(run(OP, call)[0, 0], want[0, 0])


def test_large_scores_do_not_overflow(device: str) -> None:
    call = case([60, 20], device=device, softmax_scale=300.0, return_lse=True)
    y, lse = run(OP, call)
    assert bool(y.isfinite().all() and lse.isfinite().all())
    torch.testing.assert_close(y.double(), reference(call)[0].double(), rtol=1e-2, atol=1e-2)
    # so large that one key has all the weight
    first = call._replace(q_nope=call.q_nope.abs() * 100, q_rope=call.q_rope * 0)
    cache = first.latent_cache.nan_to_num(0.0).abs()
    cache[:, 5, : call.latent_dim] += 5
    got, _ = run(OP, first._replace(latent_cache=cache))
    torch.testing.assert_close(got, cache[:, None, None, 5, : call.latent_dim].expand(got.shape))


# strides


def _apart(x: Tensor, how: str, device: str) -> Tensor:
    """The same values in another layout, NaN between them."""
    if how == "permuted":
        order = list(range(x.ndim - 1))
        back = [order[-1], *order[:-1], x.ndim - 1]
        return x.permute(*order[1:], order[0], x.ndim - 1).contiguous().permute(back)
    if how == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), NAN, dtype=x.dtype, device=device)
        wide[..., 3:-2] = x
        return wide[..., 3:-2]
    wide = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), NAN, dtype=x.dtype, device=device)
    wide[:, 1::2] = x
    return wide[:, 1::2]


@cache
def _in_order(page: int, device: str) -> tuple[MlaDecodeCall, Any]:
    """A call whose tensors are contiguous, and its result, which is right."""
    call = case([90, 33], tokens=2, nope=16, values=24, page=page, dtype=F16, device=device)
    found = run(OP, call)
    assert_right(call, found)
    return call, found


@pytest.mark.parametrize("which", ["q_nope", "q_rope", "latent_cache", "w_uk", "w_uv", "all"])
@pytest.mark.parametrize("how", ["permuted", "sliced", "step"])
@pytest.mark.parametrize("page", [0, 16])
def test_strides(page: int, how: str, which: str, device: str) -> None:
    call, found = _in_order(page, device)
    names = ["q_nope", "q_rope", "latent_cache", "w_uk", "w_uv"] if which == "all" else [which]
    moved = call._replace(**{name: _apart(getattr(call, name), how, device) for name in names})
    assert same_bits(run(OP, moved), found)


@pytest.mark.parametrize("name", ["w_uk", "w_uv"])
def test_transposed_weights(name: str, device: str) -> None:
    call = case([50], nope=16, values=24, device=device)
    moved = call._replace(**{name: getattr(call, name).mT.contiguous().mT})
    assert getattr(moved, name).stride() != getattr(call, name).stride()
    assert same_bits(run(OP, moved), run(OP, call))


def test_kv_b_proj_is_taken_as_it_is(device: str) -> None:
    """Both weights are views of one matrix, and are not copied."""
    call = case([50, 20], heads=3, nope=16, values=24, device=device)
    assert call.w_uk is not None and call.w_uv is not None
    whole = torch.cat((call.w_uk, call.w_uv), 1).reshape(3 * 40, 32)
    uk, uv = whole.view(3, 40, 32).split((16, 24), 1)
    assert same_bits(run(OP, call._replace(w_uk=uk, w_uv=uv)), run(OP, call))


def test_nothing_is_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("an argument was copied")

    call = case([90, 33], tokens=2, nope=16, values=24, page=16, tables="neox", device=device)
    call = call._replace(q_nope=_apart(call.q_nope, "sliced", device))
    with monkeypatch.context() as patch:
        for method in ("reshape", "clone", "copy_", "flatten", "contiguous", "to"):
            patch.setattr(torch.Tensor, method, refuse)
        patch.setattr("wavecrest.ops.common.launcher.starter", lambda *_args: lambda *_args, **_options: None)
        op.backends["triton"].run(call, config(part=32))


def test_arguments_are_not_written_to(device: str) -> None:
    call = named(CASES["everything"], device)
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    run(OP, call)
    for one, kept in zip(call, before, strict=True):
        assert not isinstance(one, Tensor) or same_bits(one, kept)


@pytest.mark.parametrize("how", ["default", "three splits", "queries in parts"])
@pytest.mark.parametrize("name", ["many heads", "several queries", "weights", "everything", "odd columns", "empty"])
def test_nothing_is_written_around_results(name: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of a tile that do not exist are not written: what lies before and after a buffer is kept."""
    around, real, kept = 1 << 14, launches.allocator, []

    def allocator(call: MlaDecodeCall, where: torch.device, partial_shape: Any) -> Callable[..., launches.Buffers]:
        allocate = real(call, where, partial_shape)

        def surrounded(call: MlaDecodeCall) -> launches.Buffers:
            # the queries stand in for buffers that are not needed
            views = {id(call.q_nope): call.q_nope}
            buffers = allocate(call)
            for one in buffers:
                if id(one) not in views:
                    whole = torch.full((one.numel() + 2 * around,), 7.0, dtype=one.dtype, device=device)
                    kept.append(whole)
                    views[id(one)] = whole[around:-around].view(one.shape)
            return launches.Buffers(*(views[id(one)] for one in buffers))

        return allocate if where.type == "meta" else surrounded

    monkeypatch.setattr(launches, "allocator", allocator)
    call = named(CASES[name], device)
    assert_right(call, run(OP, call, CONFIGS[how]))
    assert kept and all(bool((one[:around] == 7).all() and (one[-around:] == 7).all()) for one in kept)


@pytest.mark.gpu
def test_pages_past_two_to_the_31() -> None:
    call = case([60], page=4, latent=512, rotary=64, dtype=BF16, device="cuda", beyond=0.0)
    assert call.block_table is not None
    pages = (1 << 31) // (4 * 576) + 100
    far = torch.zeros(pages, 4, 576, dtype=BF16, device="cuda")
    far[pages - 24 :] = call.latent_cache[:24]
    order = call.block_table.clone()
    order[:, :15] = torch.arange(pages - 24, pages - 9, device="cuda")
    again = call._replace(latent_cache=far, block_table=order)
    assert_right(again, run(OP, again, None))


# any call


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    page = draw(st.sampled_from((0, 0, 1, 3, 16, 32)))
    capacity = draw(st.integers(1, 4)) * (page or draw(st.integers(1, 30)))
    rotary = draw(st.sampled_from((1, 2, 6, 16)))
    return {
        "lens": draw(st.lists(st.integers(0, capacity), min_size=1, max_size=3)),
        "heads": draw(st.sampled_from((1, 2, 5, 16, 20))),
        "tokens": draw(st.integers(1, 4)),
        "latent": draw(st.sampled_from((1, 8, 16, 24, 33))),
        "rotary": rotary,
        "nope": draw(st.sampled_from((0, 0, 1, 17))),
        "values": draw(st.sampled_from((0, 0, 1, 20))),
        "capacity": capacity,
        "page": page,
        "dtype": draw(st.sampled_from((F32, F32, F16, BF16))),
        "tables": draw(st.sampled_from((None, "neox", "gptj"))) if rotary > 1 else None,
        "places": draw(st.sampled_from((None, torch.int32, torch.int64))),
        "logit_cap": draw(st.sampled_from((0.0, 0.0, 0.5, 10.0))),
        "return_lse": draw(st.booleans()),
        "batch_invariant": draw(st.booleans()),
        "seed": draw(st.integers(0, 100)),
    }


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=calls(), how=st.sampled_from(sorted(CONFIGS)))
def test_any_call(values: dict[str, Any], how: str) -> None:
    """Any sizes, lengths, pages, dtype, weights, options and configuration."""
    call = case(**values, device="cuda" if torch.cuda.is_available() else "cpu")
    assert_right(call, run(OP, call, CONFIGS[how]))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=calls(), data=st.data())
def test_sequences_do_not_see_each_other(values: dict[str, Any], data: st.DataObject) -> None:
    """The order of sequences is the order of results, bit for bit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # without products of rows of several sequences, whose place in a tile numpy's sums depend on
    call = case(**(values | {"nope": 0, "values": 0}), device=device)
    order = torch.tensor(data.draw(st.permutations(range(call.batch))), device=device)
    moved = call._replace(
        q_nope=call.q_nope[order], q_rope=call.q_rope[order], seq_lens=call.seq_lens[order],
        **{name: None if getattr(call, name) is None else getattr(call, name)[order]
           for name in ("block_table", "positions")},
        latent_cache=call.latent_cache if call.block_table is not None else call.latent_cache[order],
    )  # fmt: skip
    for got, want in zip(*((one if isinstance(one, tuple) else (one,)) for one in (
        run(OP, moved), run(OP, call))), strict=True):  # fmt: skip
        assert same_bits(got, want[order])


# bits


@pytest.mark.parametrize("name", ["plain", "several queries", "weights", "everything", "pages of 6"])
def test_same_bits_again(name: str, device: str) -> None:
    call = named(CASES[name], device)
    op.force("triton")
    first = op(call)
    for _ in range(3):
        again = op(call)
        for a, b in zip(*((one if isinstance(one, tuple) else (one,)) for one in (first, again)), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_invariant_calls_have_the_same_bits_in_any_batch_and_cache(
    dtype: torch.dtype, page: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence alone, in any batch, and with room for more keys, which is more splits."""
    monkeypatch.setattr(configs, "INVARIANT_KEYS", 64)
    lens = [90, 33, 192, 1, 64]
    options: dict[str, Any] = {"tokens": 2, "heads": 6, "tables": "neox", "capacity": 192, "return_lse": True}
    # numpy's sums in float32 depend on a row's place in a tile, which the batch changes where weights are multiplied
    weights = {"nope": 16, "values": 24} if dtype == BF16 or device == "cuda" else {}
    call = case(lens, page=page, dtype=dtype, device=device, batch_invariant=True, **options, **weights)
    op.force("triton")
    whole = op(call)
    assert_right(call, whole)
    for chosen in ([0], [3], [1, 2], [4, 0, 3]):
        pick = torch.tensor(chosen, device=device)
        some = call._replace(q_nope=call.q_nope[pick], q_rope=call.q_rope[pick], seq_lens=call.seq_lens[pick])
        if call.block_table is None:
            some = some._replace(latent_cache=call.latent_cache[pick])
        else:
            some = some._replace(block_table=call.block_table[pick])
        for got, want in zip(op(some), whole, strict=True):
            assert same_bits(got, want[pick])
    # another room for keys: of 192 of them there are 3 splits, of 400 are 7, of 64 there is one
    for room, chosen in ((192, [0, 1, 2, 4]), (400, [0, 1, 2, 4]), (64, [1, 3, 4])):
        pick = torch.tensor(chosen, device=device)
        some = call._replace(q_nope=call.q_nope[pick], q_rope=call.q_rope[pick], seq_lens=call.seq_lens[pick])
        if call.block_table is None:
            cache = torch.full(
                (len(chosen), room, call.latent_dim + call.head_dim_rope), NAN, dtype=dtype, device=device
            )
            kept = min(room, 192)
            cache[:, :kept] = call.latent_cache[pick][:, :kept]
            some = some._replace(latent_cache=cache)
        else:
            more = torch.zeros(len(chosen), max(0, room // 16 - 12), dtype=torch.int32, device=device)
            table = torch.cat((call.block_table[pick], more), 1)[:, : room // 16].contiguous()
            some = some._replace(block_table=table)
        for got, want in zip(op(some), whole, strict=True):
            assert same_bits(got, want[pick])


def test_without_it_splits_follow_the_batch_and_the_sums_stay_right(device: str) -> None:
    """The option is needed: with other splits sums are added in another order."""
    call = case([90, 80], device=device)
    made = [run(OP, call, config(splits=splits, share=16)) for splits in (1, 2, 3, 5)]
    for one in made:
        assert_right(call, one)
    assert not all(same_bits(one, made[0]) for one in made[1:])


@pytest.mark.parametrize("arch", list(ARCHS))
def test_an_invariant_call_has_one_configuration(arch: str) -> None:
    found: dict[bool, set[Config]] = {False: set(), True: set()}
    for batch, capacity, invariant in itertools.product((1, 4, 64), (4096, 131072), (False, True)):
        call = _meta(batch, capacity, 16, batch_invariant=invariant)
        found[invariant].add(configs.default(shape_of(key_of(call)), ARCHS[arch]))
    assert len(found[True]) == 1 and len(found[False]) > 2
    assert all(one["SPLITS"] == 0 for one in found[True])
    rows = {configs.gemm_config(count, bits, True) for count in (1, 16, 100) for bits in (16,)}
    assert len(rows) == 1 and len({configs.gemm_config(count, 16, False) for count in (1, 20, 100)}) == 3


def test_the_gemms_of_an_invariant_call_have_one_configuration() -> None:
    """Other tiles would add in another order: the GEMMs of both weights too must not follow the batch."""

    def gemms(batch: int, invariant: bool) -> tuple[Config, Config]:
        sizes = cases_of_tools.Sizes(batch, 1, 16, 4096, head_dim_nope=128, head_dim_v=128)
        call = cases_of_tools.example(sizes, BF16, "meta", batch_invariant=invariant)
        made = launches.plan(call, configs.default(shape_of(key_of(call)), ARCHS["sm_90"]), ARCHS["sm_90"])
        assert made.absorb is not None and made.expand is not None
        return made.absorb.config, made.expand.config

    assert gemms(1, True) == gemms(64, True) and gemms(1, False) != gemms(64, False)


# configurations


def _meta(batch: int, capacity: int, heads: int = 128, tokens: int = 1, page: int = 0, **options: Any) -> MlaDecodeCall:
    q, rope = (torch.empty(batch, tokens, heads, n, dtype=BF16, device="meta") for n in (512, 64))
    pages = (batch * (capacity // page), page) if page else (batch, capacity)
    cache = torch.empty(*pages, 576, dtype=BF16, device="meta")
    if page:
        options["block_table"] = torch.empty(batch, capacity // page, dtype=torch.int32, device="meta")
    lens = torch.empty(batch, dtype=torch.int32, device="meta")
    return MlaDecodeCall(q, rope, cache, lens, softmax_scale=0.1, **options)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_default_configurations(arch: str) -> None:
    """Tiles that matrix units take, no more rows than there are, and LDS and registers that are enough."""
    known = ARCHS[arch]
    for batch, rows, capacity, width, bits, page, more, rope_width in itertools.product(
        (0, 64), (1, 16, 128, 4096), (16, 131072), (16, 512), (16, 32), (0, 1), (0, 2), (16, 64, 128)
    ):
        shape = configs.Shape(batch, rows, capacity, width, bits, page, more, rope_width)
        tried = list(space_of(shape, known))
        made = tried[0]
        assert made == configs.default(shape, known) and len(tried) == len(set(tried)) > 1
        for one in tried:
            assert min(one["BLOCK_M"], one["BLOCK_N"], one["PART"]) >= 16 and width % one["PART"] == 0
            assert one["BLOCK_M"] < 2 * max(rows, 16) and one["KEYS"] % one["BLOCK_N"] == 0
            assert one["num_warps"] * known.wave_size <= 1024
            if batch == 0:
                assert one["SPLITS"] == 0 and one["KEYS"] == configs.INVARIANT_KEYS
        stages = made["num_stages"] if known.vendor == "nvidia" else max(1, made["num_stages"] - 1)
        held = made["BLOCK_N"] * stages + (made["BLOCK_M"] if arch in ("sm_90", "sm_100") else 0)
        assert held * (width + rope_width) * bits // 8 <= known.lds_kib << 10
        # sums, of the registers there are a lane
        assert made["BLOCK_M"] * width <= (256 if known.wave_size == 64 else 128) * made["num_warps"] * known.wave_size


def test_splits_fill_the_units() -> None:
    """132 units: 128 programs are not split, 2 are until all have work, and a wave more than is full is avoided."""
    assert configs.splits_for(128, 8192, 132) == 1
    assert configs.splits_for(2, 1 << 20, 132) > 32
    assert 1 < configs.splits_for(2, 2048, 132) <= 16 and configs.splits_for(2, 256, 132) == 1
    assert configs.splits_for(2, 1, 132) == 1
    assert configs.splits_for(128, 8192, 304) > 1
    for programs, keys in ((100, 8192), (140, 4096), (33, 65536)):
        chosen = configs.splits_for(programs, keys, 132)
        times = {
            splits: -(-programs * splits // 132) * (keys / splits + (splits > 1) * configs.PROGRAM_KEYS)
            for splits in range(1, 65)
            if splits == 1 or keys // splits >= configs.LEAST_KEYS
        }
        assert times[chosen] <= 1.05 * min(times.values())
        assert all(time > 1.05 * min(times.values()) for splits, time in times.items() if splits < chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the order of programs is the GPU's own there")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_any_architectures_order_and_configuration(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 XCDs deal the programs in another order, which must have each of them once."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    for name in ("many heads", "everything"):
        call = named(CASES[name], "cpu", dtype=BF16)
        assert_right(call, run(OP, call, None))
        assert_right(call, run(OP, call))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_configurations_to_tune_with(arch: str, device: str) -> None:
    call = named(CASES["weights"], device, dtype=F16)
    study = op.study.kernel("triton")
    assert study.space is not None and study.launches is not None
    tried = list(study.space(op.key(call), ARCHS[arch]))
    mine = device == "cpu" or hardware.detect().vendor == ARCHS[arch].vendor
    for one in tried if device == "cuda" else tried[1::9]:
        # another vendor's options are unknown to the compiler
        if mine:
            assert_right(call, run(OP, call, one))
        made = study.launches(mapped(call, lambda tensor: tensor.to("meta")), one, ARCHS[arch])
        kernels = [launch.kernel.__name__ for launch in made]
        assert kernels[0] == kernels[-1] == "_mla_product_kernel" and kernels[1] == "_mla_kernel"
        assert made[1].options()["BLOCK_N"] == one["BLOCK_N"] and "SPLITS" not in made[1].options()


def test_wrong_configurations(device: str) -> None:
    with pytest.raises(InvalidArgument, match="KEYS=40 of a split must be a multiple of BLOCK_N=16"):
        run(OP, case([40], device=device), config(share=40))


def _launches(call: MlaDecodeCall, splits: int = 4) -> list[Launch]:
    return launches.launches(call, config(rows=64, keys=64, part=512, splits=splits, share=128), ARCHS["sm_90"])


@pytest.mark.parametrize("page", [0, 64])
def test_another_length_does_not_compile_anew(page: int) -> None:
    """No kernel is compiled anew as keys, sequences and splits grow."""
    base = _launches(_meta(4, 4096, page=page))
    for batch, capacity, splits in ((4, 4160, 4), (7, 131072, 4), (64, 8192, 9), (2, 1024, 2)):
        other = _launches(_meta(batch, capacity, page=page), splits)
        assert [one.kernel for one in other] == [one.kernel for one in base]
        for one, first in zip(other, base, strict=True):
            assert one.constants == first.constants and one.config == first.config
            assert [type(value) for value in one.args] == [type(value) for value in first.args]


def test_specialised_arguments() -> None:
    """Triton compiles anew for types and alignments of tensors alone."""
    pytest.importorskip("triton", reason="asks Triton about a kernel's arguments")
    from wavecrest.ops._mla_decode import kernel

    found = [specialised(one) for one in (kernel._mla_kernel, kernel._mla_join_kernel, kernel._mla_product_kernel)]
    assert [len(names) for names in found] == [12, 5, 3]
    assert all(name.endswith("_ptr") for names in found for name in names)


# arguments, dispatch


_Q, _ROPE, _CACHE = torch.zeros(2, 1, 4, 32), torch.zeros(2, 1, 4, 16), torch.zeros(2, 9, 48)
_TABLE = torch.zeros(9, 8)

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "q dims": (r"q_nope must be float32, .* \[B, T, H, head_dim\]", {"q_nope": torch.zeros(2, 4, 32)}),
    "q dtype": ("q_nope must be float32", {"q_nope": torch.zeros(2, 1, 4, 32, dtype=torch.int8)}),
    "tokens": ("takes 1 to 16 queries", {"q_nope": torch.zeros(2, 17, 4, 32)}),
    "no heads": ("needs a head", {"q_nope": torch.zeros(2, 1, 0, 32)}),
    "rope dtype": ("q_rope must be torch.float32", {"q_rope": _ROPE.half()}),
    "rope shape": (r"must have one \[B, T, H\]", {"q_rope": torch.zeros(2, 1, 3, 16)}),
    "cache dtype": ("latent_cache must be torch.float32", {"latent_cache": _CACHE.half()}),
    "cache dims": ("latent_cache must be torch.float32", {"latent_cache": _CACHE[:, :, None]}),
    "latent": ("takes 1 to 512 columns of a latent", {"latent_cache": torch.zeros(2, 9, 16)}),
    "wide latent": ("takes 1 to 512 columns of a latent", {"latent_cache": torch.zeros(2, 9, 529)}),
    "columns": ("must have the 34 columns of a latent", {"latent_cache": torch.zeros(2, 9, 50)}),
    "w_uk": (r"w_uk must be \[4, 32, 32\]", {"w_uk": torch.zeros(4, 31, 32)}),
    "w_uk dims": ("w_uk must be torch.float32", {"w_uk": torch.zeros(4, 32)}),
    "w_uv": (r"w_uv must be \[4, Dv, 32\]", {"w_uv": torch.zeros(3, 20, 32)}),
    "w_uv empty": (r"w_uv must be \[4, Dv, 32\]", {"w_uv": torch.zeros(4, 0, 32)}),
    "w_uv dtype": ("w_uv must be torch.float32", {"w_uv": torch.zeros(4, 20, 32).half()}),
    "lens dtype": (r"seq_lens must be int32 \[2\]", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
    "lens shape": (r"seq_lens must be int32 \[2\]", {"seq_lens": torch.zeros(3, dtype=torch.int32)}),
    "table": (r"block_table must be int32 \[2, …\]", {"block_table": torch.zeros(3, 4, dtype=torch.int32)}),
    "sequences": ("pages need a block_table", {"latent_cache": torch.zeros(3, 9, 48)}),
    "length": (
        "sequences have up to 536870912 keys",
        {
            "latent_cache": torch.empty(2, 1 << 29, 48, device="meta"),
            "block_table": torch.zeros(2, 2, dtype=torch.int32),
        },
    ),
    "no scale": ("softmax_scale must be given with absorbed queries", {"softmax_scale": None}),
    "scale": ("softmax_scale must be a finite number", {"softmax_scale": -1.0}),
    "cap": ("logit_cap must be a finite number", {"logit_cap": float("inf")}),
    "flag": ("return_lse must be True or False", {"return_lse": 1}),
    "invariant": ("batch_invariant must be True or False", {"batch_invariant": None}),
    "style": ("rope_style is neox or gptj", {"rope_style": "llama"}),
    "cos alone": ("cos and sin go together", {"cos": _TABLE}),
    "positions alone": ("positions go with cos", {"positions": torch.zeros(2, 1, dtype=torch.int32)}),
    "table columns": ("half of q_rope's 16 columns", {"cos": _TABLE[:, :7], "sin": _TABLE[:, :7]}),
    "tables differ": ("cos and sin alike", {"cos": _TABLE, "sin": _TABLE[:5]}),
    "table dtypes": ("must be of one dtype", {"cos": _TABLE, "sin": _TABLE.half()}),
    "positions": (
        r"positions must be int32 or int64 \[2, 1\]",
        {"cos": _TABLE, "sin": _TABLE, "positions": torch.zeros(2, dtype=torch.int32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    message, change = BAD[name]
    good: dict[str, Any] = {
        "q_nope": _Q, "q_rope": _ROPE, "latent_cache": _CACHE, "seq_lens": torch.zeros(2, dtype=torch.int32),
        "softmax_scale": 1.0,
    }  # fmt: skip
    if name == "length":
        good = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in good.items()}
        change = {key: value.to("meta") for key, value in change.items()}
    call = good | change
    arguments = [call.pop(name) for name in ("q_nope", "q_rope", "latent_cache")]
    with pytest.raises(InvalidArgument, match=f"^mla_decode: .*{message}"):
        ops.mla_decode(*arguments, **call)
    with pytest.raises(InvalidArgument, match=message):
        op.run("triton", MlaDecodeCall(**(good | change)))


def test_what_the_kernel_refuses(device: str) -> None:
    call = case([40], nope=16, values=8, tables="neox", device=device, beyond=0.0)
    assert call.cos is not None and call.sin is not None and call.w_uk is not None
    apart = {
        "columns that lie next": call._replace(latent_cache=call.latent_cache.mT.contiguous().mT),
        "columns that lie next to": call._replace(q_rope=call.q_rope.repeat_interleave(2, -1)[..., ::2]),
        "weights whose": call._replace(w_uk=call.w_uk.repeat_interleave(2, -1)[..., ::2]),
        "takes tables of": call._replace(cos=call.cos.double(), sin=call.sin.double()),
        "not float64": case([40], dtype=torch.float64, device=device),
        "no backward": call._replace(q_nope=call.q_nope.clone().requires_grad_()),
    }
    for reason, one in apart.items():
        with pytest.raises(Unsupported, match=reason):
            run(OP, one)
        assert op.decide(one).backend == "torch"
        if reason not in ("no backward",):
            assert_right(one, op(one))


def test_gradients(device: str) -> None:
    call = case([40, 7], tokens=2, nope=16, values=8, beyond=0.0, device=device)
    names = ("q_nope", "q_rope", "latent_cache", "w_uk", "w_uv")

    def leaves(form: MlaDecodeCall, dtype: torch.dtype) -> MlaDecodeCall:
        return form._replace(**{name: getattr(form, name).to(dtype).clone().requires_grad_() for name in names})

    op.force("triton")
    narrow, wide = leaves(call, F32), leaves(call, torch.float64)
    op(narrow).square().sum().backward()
    op.reference(wide).square().sum().backward()
    for name in names:
        got, want = getattr(narrow, name).grad, getattr(wide, name).grad
        assert float(want.abs().max()) > 0
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_no_sequences(device: str) -> None:
    call = case([40, 50], device=device, nope=8, values=4)
    none = call._replace(
        q_nope=call.q_nope[:0], q_rope=call.q_rope[:0], latent_cache=call.latent_cache[:0], seq_lens=call.seq_lens[:0]
    )
    for backend in ("triton", "torch", "reference"):
        assert run(OP, none, backend=backend).shape == (0, 1, 4, 4)


def test_no_room_for_keys(device: str) -> None:
    call = case([0, 0], device=device, return_lse=True)
    none = call._replace(latent_cache=call.latent_cache[:, :0])
    for backend in ("triton", "torch", "reference"):
        y, lse = run(OP, none, backend=backend)
        assert bool((y == 0).all()) and bool(lse.isneginf().all())


def test_key_has_all_the_choice_depends_on(device: str) -> None:
    base: dict[str, Any] = {"lens": [40, 30], "nope": 16, "values": 8, "tables": "neox", "page": 16}
    changes: list[dict[str, Any]] = [
        {}, {"lens": [40]}, {"tokens": 2}, {"heads": 5}, {"latent": 40}, {"rotary": 8}, {"nope": 17}, {"values": 9},
        {"nope": 0}, {"values": 0}, {"capacity": 192}, {"page": 32}, {"page": 0}, {"dtype": F16}, {"tables": "gptj"},
        {"tables": None}, {"places": torch.int32}, {"places": torch.int64}, {"logit_cap": 1.0}, {"return_lse": True},
        {"batch_invariant": True},
    ]  # fmt: skip
    keys = [op.key(case(**(base | change), device=device)) for change in changes]
    call = case(**base, device=device)
    assert call.cos is not None and call.sin is not None and call.w_uk is not None
    keys += [
        op.key(call._replace(cos=call.cos.half(), sin=call.sin.half())),
        op.key(call._replace(latent_cache=call.latent_cache.mT.contiguous().mT)),
        op.key(call._replace(w_uk=call.w_uk.repeat_interleave(2, -1)[..., ::2])),
        op.key(call._replace(w_uk=call.w_uk.clone().requires_grad_())),
    ]
    assert len(set(keys)) == len(keys) and all(len(one) == len(op.key_fields) for one in keys)
    assert all(part is None or type(part) in (int, str, bool) for one in keys for part in one)
    again = case(**(base | {"lens": [3, 96], "capacity": 80}), device=device)
    assert op.key(again) == keys[0]


def test_cost() -> None:
    cost = op.study.cost
    call = case([9, 0, 2], heads=3, tokens=4, latent=8, rotary=2, nope=5, values=6, dtype=F16, capacity=10)
    pairs = (6 + 7 + 8 + 9) + 0 + (0 + 0 + 1 + 2)
    counted = cost(call)
    assert counted.flops == 2 * pairs * 3 * (8 + 8 + 2) + 2 * 3 * 4 * 3 * 8 * (5 + 6)
    assert counted.bytes == 2 * (11 * 10 + 3 * 4 * 3 * (5 + 2 + 6) + 3 * (5 + 6) * 8)
    # H200 at 64 sequences of 8192 keys and 128 heads: bytes and FLOPs bind about as much
    counted = cost(_meta(64, 8192))
    assert counted.flops == 2 * 64 * 8192 * 128 * 1088
    assert counted.bytes == 2 * (64 * 8192 * 576 + 64 * 128 * (512 + 64 + 512))


def test_the_cases_of_tools_are_calls(device: str) -> None:
    study = op.study
    assert study.bench_cases is not None and study.emulate_cases is not None
    quick = study.bench_cases("quick", device)
    assert len(quick) == 3
    shared = study.bench_cases("shared", "meta")
    assert {"b64h128t4096", "b64h128t8192", "b64h128t8192 pages=64"} <= set(shared)
    for make in shared.values():
        op.check(make())
    for make in (*quick.values(), *study.emulate_cases("gfx942").values()):
        call = make()
        op.check(call)
        assert_right(call, op(call))


def test_dispatch_and_keywords(device: str) -> None:
    call = named(CASES["everything"], device)
    options = call._asdict()
    positional = [options.pop(name) for name in ("q_nope", "q_rope", "latent_cache")]
    got = ops.mla_decode(*positional, **options)
    assert_right(call, got)
    decision = op.decide(call)
    assert decision.backend == ("triton" if device == "cuda" else "torch")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_bound_call_is_short(name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = named(CASES[name], device, beyond=0.0)._asdict()
    tensors = [options.pop(field) for field in ("q_nope", "q_rope", "latent_cache")]
    assert_few_calls(OP, backend, monkeypatch, *tensors, **options)


# torch.compile, graphs


@pytest.mark.parametrize("name", ["plain", "pages of 16", "weights", "everything"])
def test_compile_fullgraph(name: str, device: str) -> None:
    """One graph without breaks, for any lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if device == "cpu" else "inductor")
    call = named(CASES[name], device, beyond=0.0)
    options = call._asdict()
    moving = [options.pop(key) for key in ("q_nope", "q_rope", "latent_cache", "seq_lens")]

    def decode(q: Tensor, rope: Tensor, cache: Tensor, lens: Tensor) -> Any:
        return ops.mla_decode(q, rope, cache, seq_lens=lens, **options)

    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    with torch.no_grad():
        for less in (0, 1, 7):
            lens = (call.seq_lens - less).clamp(min=0)
            assert_right(call._replace(seq_lens=lens), compiled(*moving[:3], lens))
    assert counter.frame_count == 1
    assert any(count == 0 for _, count in op.decisions()), "the decision made while tracing is not kept"


@pytest.mark.slow
def test_the_kernels_are_traced_for_any_batch() -> None:
    """With kernels that Dynamo takes for those of a GPU: one graph that launches them, for other batches too."""
    pytest.importorskip("triton", reason="traces a kernel")
    from tests.ops.test_flash_attention import _child

    code = """
import torch, torch.utils._triton
# Dynamo asks for a driver before it wraps a kernel; nothing is launched here
torch.utils._triton.has_triton = lambda: True
import wavecrest.ops.common.triton as _triton
_triton.emulated = "gfx942"
from wavecrest import hardware, ops, registry
registry.get("mla_decode").force("triton")
graphs = []

def capture(module, _inputs):
    graphs.append([str(node.target) for node in module.graph.nodes])
    return lambda *_args: (torch.zeros(1), torch.zeros(1))

uk, uv, cos, sin = torch.randn(16, 24, 64), torch.randn(16, 40, 64), torch.randn(900, 8), torch.randn(900, 8)
call = lambda q, rope, cache, lens, table: ops.mla_decode(
    q, rope, cache, seq_lens=lens, block_table=table, w_uk=uk, w_uv=uv, cos=cos, sin=sin, logit_cap=9.0,
    return_lse=True,
)
compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=capture)
with torch.no_grad():
    for batch in (20, 21, 30):
        q, rope = torch.randn(batch, 1, 16, 24), torch.randn(batch, 1, 16, 16)
        cache = torch.randn(40 * batch, 64, 80)
        lens, table = torch.ones(batch, dtype=torch.int32), torch.zeros(batch, 40, dtype=torch.int32)
        compiled(q, rope, cache, lens, table)
print(len(graphs), sum("triton_kernel" in target for target in graphs[0]))
"""
    assert _child(code).split() == ["1", "4"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "pages of 16", "weights"])
def test_replays_in_a_cuda_graph_as_sequences_grow(name: str) -> None:
    call = named(CASES[name], "cuda", dtype=BF16, beyond=0.0)
    op.force("triton")
    op(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    for less in (0, 1, 9):
        call.seq_lens.copy_((call.seq_lens - less).clamp(min=0))
        graph.replay()
        assert_right(call, result)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_large_on_a_gpu(heads: int, dtype: torch.dtype) -> None:
    call = case(
        [3000, 1, 517], heads, latent=512, rotary=64, nope=128, values=128, capacity=3072, page=64, dtype=dtype,
        device="cuda", tables="gptj", return_lse=True,
    )  # fmt: skip
    assert_right(call, run(OP, call, None))


# sm_90's own kernel, which has no interpreter

HOPPER = "triton_hopper"
WHOLE: dict[str, Any] = {"latent": 512, "rotary": 64, "dtype": BF16}
TILES = [500, 64, 63, 65, 0, 1, 128, 129, 192, 33]
HOPPER_CASES: dict[str, dict[str, Any]] = {
    "tiles": {"lens": TILES, "capacity": 512, "return_lse": True},
    "one head": {"lens": [70, 200], "heads": 1, "capacity": 200},
    "rows beyond a tile": {"lens": [300, 5], "heads": 70, "capacity": 300, "return_lse": True},
    "several queries": {"lens": [130, 64, 2, 67], "tokens": 3, "heads": 3, "capacity": 192, "return_lse": True},
    "sixteen queries": {"lens": [133, 70], "tokens": 16, "heads": 5, "capacity": 136},
    "pages of 64": {"lens": TILES, "capacity": 512, "page": 64, "return_lse": True},
    "pages of 32": {"lens": [300, 0, 129], "capacity": 320, "page": 32, "tokens": 2},
    "pages of 128": {"lens": [300, 0, 129], "capacity": 384, "page": 128, "tokens": 2},
    "weights": {"lens": [300, 7], "capacity": 320, "nope": 40, "values": 24, "heads": 9},
    "scale": {"lens": [190], "capacity": 192, "softmax_scale": 0.7},
    "no scale": {"lens": [190], "capacity": 192, "softmax_scale": 0.0, "return_lse": True},
    "no batch": {"lens": [1500, 1024, 1023, 40], "capacity": 1536, "batch_invariant": True, "heads": 2},
}  # fmt: skip
# splits, keys of one, keys of a tile, stages
SPLITS = {
    "default": None, "one": (1, 128, 32, 4), "three": (3, 128, 64, 2), "as many as there are": (0, 64, 64, 2),
    "three of tiles of 32": (3, 128, 32, 4), "two stages": (0, 256, 32, 2),
}  # fmt: skip


@pytest.fixture
def hopper() -> None:
    if hardware.detect().arch != "sm_90":
        pytest.skip(f"is for sm_90; this is {hardware.detect().arch}")


def run_hopper(call: MlaDecodeCall, how: str = "default") -> Any:
    splits = SPLITS[how]
    if splits is None:
        return op.run(HOPPER, call)
    parts, least, keys, stages = splits
    config = Config(BLOCK_M=64, BLOCK_N=keys, STAGES=stages, SPLITS=parts, KEYS=least, num_warps=4, num_stages=1)
    return op.run(HOPPER, call, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper(name: str, how: str, hopper: None) -> None:
    """Keys that end anywhere in a tile, in any number of tiles and splits, with NaN behind them."""
    call = named(WHOLE | HOPPER_CASES[name], "cuda")
    splits = SPLITS[how]
    if call.block_table is not None and splits is not None and call.page_size % splits[2] != 0:
        with pytest.raises(InvalidArgument, match="must lie in one page"):
            run_hopper(call, how)
        return
    assert_right(call, run_hopper(call, how))


def test_hopper_tiles_lie_in_one_page() -> None:
    """Where a launch is described: without a GPU too."""
    call = cases_of_tools.compiled_for_hopper()["H=16 pages of 32"]
    config = configs.default_hopper(shape_of(key_of(call)), ARCHS["sm_90"])
    assert hopper_launch.launches(call, config, ARCHS["sm_90"])
    with pytest.raises(InvalidArgument, match="must lie in one page, of 32"):
        hopper_launch.launches(call, Config(**(config.kwargs | {"BLOCK_N": 64})), ARCHS["sm_90"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiles", "several queries", "pages of 64"])
def test_hopper_in_float16(name: str, hopper: None) -> None:
    call = named(WHOLE | HOPPER_CASES[name] | {"dtype": F16}, "cuda")
    assert_right(call, run_hopper(call))


@pytest.mark.gpu
def test_hopper_on_large_caches(hopper: None) -> None:
    """As many rows as a unit of several has, and more programs than run at a time."""
    call = case([5000, 1, 2517], 128, capacity=5056, page=64, device="cuda", return_lse=True, **WHOLE)
    assert_right(call, run_hopper(call))
    many = case([700] * 9, 128, tokens=2, capacity=704, device="cuda", **WHOLE)
    for batch in (1, 9):
        whole = many._replace(
            q_nope=many.q_nope.repeat(40, 1, 1, 1), q_rope=many.q_rope.repeat(40, 1, 1, 1),
            latent_cache=many.latent_cache.repeat(40, 1, 1), seq_lens=many.seq_lens.repeat(40),
        )  # fmt: skip
        got = run_hopper(whole, "one")
        assert all(same_bits(got[i], got[i % 9]) for i in range(0, 360, 37)), batch
    assert_right(many, run_hopper(many, "one"))


@pytest.mark.gpu
def test_hopper_strides(hopper: None) -> None:
    """Views with room around them; an odd address, which the portable kernel takes; a stride that nothing copies."""
    call = named(WHOLE | HOPPER_CASES["tiles"], "cuda")
    wide = torch.full((10, 512, 640), NAN, dtype=BF16, device="cuda")
    wide[:, :, 8:584] = call.latent_cache
    q = torch.full((10, 1, 4, 600), NAN, dtype=BF16, device="cuda")
    q[..., 3:515] = call.q_nope
    moved = call._replace(latent_cache=wide[:, :, 8:584], q_nope=q[..., 3:515])
    for got, want in zip(run_hopper(moved), run_hopper(call), strict=True):
        assert same_bits(got, want)
    odd = torch.empty(call.latent_cache.numel() + 1, dtype=BF16, device="cuda")[1:].view_as(call.latent_cache)
    odd.copy_(call.latent_cache)
    _launcher.replaced.cache_clear()
    with pytest.warns(PortableKernel, match="mla_decode: "):
        assert_right(call, run_hopper(call._replace(latent_cache=odd)))
    uneven = torch.empty(10, 512, 580, dtype=BF16, device="cuda")[:, :, :576]
    with pytest.raises(Unsupported, match="16 bytes"):
        run_hopper(call._replace(latent_cache=uneven))


@pytest.mark.gpu
def test_hopper_bits_and_graphs(hopper: None) -> None:
    """The same in every run, alone, and replayed as sequences grow; nothing is compiled for another length."""
    from wavecrest.ops._mla_decode.kernel_hopper import _hopper_mla_kernel

    call = named(WHOLE | HOPPER_CASES["tiles"] | {"batch_invariant": True, "beyond": 0.0}, "cuda")
    op.force(HOPPER)
    first = op(call)
    for _ in range(5):
        assert all(same_bits(a, b) for a, b in zip(op(call), first, strict=True))
    for one in (0, 4, 8):
        alone = call._replace(
            q_nope=call.q_nope[one : one + 1], q_rope=call.q_rope[one : one + 1],
            latent_cache=call.latent_cache[one : one + 1], seq_lens=call.seq_lens[one : one + 1],
        )  # fmt: skip
        assert all(same_bits(a, b[one : one + 1]) for a, b in zip(op(alone), first, strict=True))
    torch.cuda.synchronize()
    before = len(_hopper_mla_kernel.device_caches[torch.cuda.current_device()][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    for less in (0, 1, 70):
        call.seq_lens.copy_((call.seq_lens - less).clamp(min=0))
        graph.replay()
        assert_right(call, result)
    op(case([777, 3], 70, capacity=800, device="cuda", batch_invariant=True, **WHOLE))
    assert len(_hopper_mla_kernel.device_caches[torch.cuda.current_device()][0]) <= before + 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latent": 256}, "512 columns"), ({"rotary": 32}, "64 rotary"), ({"dtype": F32}, "float16"),
        ({"logit_cap": 5.0}, "logit_cap"), ({"tables": "neox"}, "turned"), ({"page": 16}, "one page"),
    ],
)  # fmt: skip
def test_hopper_says_what_it_does_not_take(change: dict[str, Any], reason: str, hopper: None) -> None:
    call = case([40, 9], 4, device="cuda", **(WHOLE | change))
    with pytest.raises(Unsupported, match=reason):
        run_hopper(call)


def test_hopper_is_for_sm_90(device: str) -> None:
    if device == "cuda":
        pytest.skip("without a GPU")
    reason = op.backends[HOPPER].refuse(case([40], 4, **WHOLE))
    assert reason is not None and "sm_90" in reason


@pytest.mark.parametrize("heads", [16, 128])
def test_hopper_configurations(heads: int) -> None:
    """A program a unit, of which each takes 64 rows; an invariant call has one."""
    arch = ARCHS["sm_90"]
    call = cases_of_tools.example(cases_of_tools.Sizes(8, 1, heads, 8192), BF16, "meta")
    tried = list(space_hopper(key_of(call), arch))
    assert len(tried) == len(set(tried)) == 2 and tried[0] == configs.default_hopper(shape_of(key_of(call)), arch)
    programs = 8 * max(1, heads // 64) * tried[0]["SPLITS"]
    assert arch.compute_units // 2 < programs <= arch.compute_units
    same = call._replace(batch_invariant=True)
    assert {one["SPLITS"] for one in space_hopper(key_of(same), arch)} == {0}
