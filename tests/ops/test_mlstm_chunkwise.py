"""mlstm_chunkwise against a recurrence in float64: chunks, states, padding, packed rows, resets, gates, each option."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, F64, NAN, assert_near, assert_right, case, exact, moved, run
from tests.ops.op_harness import same_bits
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.mlstm import kernel_norm
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.chunkwise import config as configs
from wavecrest.ops.mlstm.chunkwise import kernel as kernels
from wavecrest.ops.mlstm.chunkwise import launch as launches
from wavecrest.ops.mlstm.chunkwise.study.space import space

OP = "mlstm_chunkwise"


def config(chunk: int = 32, rows: int = 16, columns: int = 32, part: int = 16, state: int = 32) -> Config:
    return Config(
        CHUNK=chunk, BLOCK_T=rows, BLOCK_S=16, BLOCK_K=part, BLOCK_C=16, BLOCK_V=columns, STATE_T=16,
        STATE_K=max(16, part), STATE_V=state, STATE_WARPS=4, STATE_STAGES=1, KEYS_WARPS=4,
        num_warps=4, num_stages=1,
    )  # fmt: skip


SMALL = config()
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"heads": 2, "first": True, "return_last_states": True},
    "one token": {"tokens": 1, "first": True, "return_last_states": True},
    "whole chunks": {"tokens": 64, "return_last_states": True},
    "one less": {"tokens": 31, "return_last_states": True},
    "closed input gate": {"gates": (-10.0, 4.0, 1.0), "tokens": 70, "batch": 1, "return_last_states": True},
    "gates at 15": {"gates": (15.0, -15.0, 2.0), "tokens": 70, "batch": 1, "return_last_states": True},
    "gates at -15": {"gates": (-15.0, 15.0, 2.0), "tokens": 70, "batch": 1, "return_last_states": True},
    "capped": {"gate_soft_cap": 15.0, "gates": (0.0, 0.0, 20.0), "return_last_states": True},
    "sigmoid": {"input_gate": "sigmoid", "first": True, "return_last_states": True},
    "no normaliser": {"input_gate": "sigmoid", "normalize": False, "return_last_states": True},
    "padded": {"starts": [5, 0, 39], "lens": [20, 0, 9], "batch": 3, "first": True, "return_last_states": True},
    "left padded": {"starts": [11, 2], "epilogue": "gate", "return_last_states": True},
    "right padded": {"lens": [33, 40], "resets": 0.1, "return_last_states": True},
    "packed": {
        "batch": 1, "heads": 2, "tokens": 100, "packed": [3, 20, 20, 53, 98], "first": True, "return_last_states": True,
        "epilogue": "gate",
    },
    "packed behind chunks of nothing": {"batch": 1, "tokens": 160, "packed": [141, 141, 150]},
    "packed sigmoid": {"batch": 1, "packed": [0, 7, 40], "input_gate": "sigmoid", "resets": 0.1, "gate_soft_cap": 9.0},
    "resets": {"resets": 0.1, "first": True, "return_last_states": True, "tokens": 70, "batch": 1},
    "a reset each": {"resets": 1.1, "first": True, "return_last_states": True, "tokens": 20},
    "norm": {"epilogue": "norm", "gates": (-10.0, 4.0, 1.0), "tokens": 70, "batch": 1},
    "24x48": {"dk": 24, "dv": 48, "epilogue": "gate", "return_last_states": True},
    "96x192": {"dk": 96, "dv": 192, "batch": 1, "heads": 1, "return_last_states": True},
    "one column": {"dk": 1, "dv": 1, "heads": 3, "return_last_states": True},
    "keys in parts": {"dk": 272, "dv": 16, "batch": 1, "heads": 1, "tokens": 20, "return_last_states": True},
    "odd": {"dk": 37, "dv": 5, "heads": 1, "order": "bhsd", "return_last_states": True},
}  # fmt: skip

# with the shipped configuration too
WITH_DEFAULTS = ("states", "packed", "resets", "96x192", "one token")


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    call = case(**CASES[name])
    want = exact(call)
    assert_right(call, run(OP, call, SMALL), want)
    if name in WITH_DEFAULTS:
        assert_right(call, run(OP, call), want)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    "name", ["closed input gate", "gates at 15", "gates at -15", "sigmoid", "packed", "resets", "norm"]
)
def test_cases_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Gates in float32 beside q, k and v of 16 bits, as models that keep them apart have."""
    call = case(dtype=dtype, gate_dtype=F32, **CASES[name])
    assert_right(call, run(OP, call, SMALL))


@pytest.mark.parametrize("how", ["larger tiles", "a chunk a tile", "wide parts"])
@pytest.mark.parametrize("name", ["packed", "resets", "24x48"])
def test_other_tiles(name: str, how: str) -> None:
    made = {
        "larger tiles": config(64, 32, 16, 16, 16),
        "a chunk a tile": config(16, 16, 64, 16, 64),
        "wide parts": config(48, 16, 16, 32, 16),
    }
    call = case(dtype=BF16, **CASES[name])
    assert_right(call, run(OP, call, made[how]))


@pytest.mark.parametrize("name", CASES)
def test_definitions(name: str) -> None:
    """Token by token and in chunks are one function, to the last digits of float64, and the oracle's."""
    options = dict(CASES[name])
    call = case(dtype=F64, chunk_size=16, **options)
    want = exact(call)
    for backend in ("reference", "torch"):
        assert_right(call, run(OP, call, backend=backend), want)


def test_all_pairs_are_the_same_function() -> None:
    """But for ε, whose part depends on where the stabiliser begins."""
    for name in ("plain", "closed input gate", "sigmoid", "no normaliser", "capped"):
        options = {key: value for key, value in CASES[name].items() if key not in ("first", "return_last_states")}
        call = case(dtype=F64, eps=0.0, **options)
        got = ops.mlstm_parallel(
            *call[:5], eps=0.0, input_gate=call.input_gate, normalize=call.normalize, gate_soft_cap=call.gate_soft_cap
        )
        want = exact(call)
        assert_near("h", got, want.h, want.h_bound)


@pytest.mark.parametrize("size", [16, 48, 128])
def test_results_do_not_depend_on_the_chunk(size: int) -> None:
    call = case(batch=1, tokens=70, first=True, return_last_states=True, resets=0.05)
    want = exact(call)
    for backend in ("triton", "torch"):
        assert_right(call, run(OP, call._replace(chunk_size=size), backend=backend), want)
    assert registry.get(OP).config_of("triton", registry.get(OP).key(call._replace(chunk_size=size)))["CHUNK"] == size


@pytest.mark.parametrize("at", [1, 17, 32, 69])
def test_a_sequence_can_be_cut_anywhere(at: int) -> None:
    """The states behind the first part, handed to the second, give what the whole gives."""
    call = case(batch=1, tokens=70, first=True, return_last_states=True, gates=(-6.0, 4.0, 2.0))
    want = exact(call)
    tensors = call[:5]
    h, *states = run(OP, call._replace(**_cut(tensors, slice(0, at))), SMALL)
    rest = call._replace(**_cut(tensors, slice(at, 70)), c_initial=states[0], n_initial=states[1], m_initial=states[2])
    more, *states = run(OP, rest, SMALL)
    assert_right(call, (torch.cat((h, more), 2).transpose(1, 2).contiguous().transpose(1, 2), *states), want)


def _cut(tensors: tuple[Any, ...], part: slice) -> dict[str, Tensor]:
    return {name: one[:, :, part] for name, one in zip("qkvif", tensors, strict=True)}


def test_padding_and_packing_are_exact() -> None:
    """Chunks begin where a sequence does: alone, padded on either side or packed, it has the same bits."""
    lens, tokens = [36, 1, 17], 40
    alone = [
        case(
            batch=1,
            heads=2,
            tokens=length,
            first=True,
            return_last_states=True,
            epilogue="gate",
            dtype=BF16,
            seed=length,
        )
        for length in lens
    ]
    names = ("q", "k", "v", "i", "f", "output_gate")
    states = {
        name: torch.cat([getattr(one, name) for one in alone]) for name in ("c_initial", "n_initial", "m_initial")
    }
    # the weight is each call's own: one for all
    weight = alone[0].norm_weight
    want = [run(OP, one._replace(norm_weight=weight), SMALL) for one in alone]
    starts = [4, 39, 0]
    padded: dict[str, Tensor] = {}
    for name in names:
        like = getattr(alone[0], name)
        padded[name] = torch.full((3, 2, tokens, *like.shape[3:]), NAN, dtype=like.dtype, device=DEVICE)
        for row, (one, start, length) in enumerate(zip(alone, starts, lens, strict=True)):
            padded[name][row, :, start : start + length] = getattr(one, name)[0]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    base = alone[0]._replace(norm_weight=weight, **states)
    got = run(OP, base._replace(**padded, seq_starts=ints(starts), seq_lens=ints(lens)), SMALL)
    packed = {name: torch.cat([getattr(one, name) for one in alone], 2) for name in names}
    row = run(OP, base._replace(**packed, cu_seqlens=ints([0, 36, 37, 54])), SMALL)
    for index, (one, start, length) in enumerate(zip(want, starts, lens, strict=True)):
        assert same_bits(got[0][index, :, start : start + length], one[0][0])
        assert not bool(got[0][index, :, :start].any() or got[0][index, :, start + length :].any())
        begin = sum(lens[:index])
        assert same_bits(row[0][0, :, begin : begin + length], one[0][0])
        for both in (got, row):
            for state, wanted in zip(both[1:], one[1:], strict=True):
                assert same_bits(state[index], wanted[0])


def test_a_reset_begins_a_sequence() -> None:
    """Nothing before a document reaches it, not even NaN."""
    call = case(tokens=64, batch=1, return_last_states=True)
    second = call._replace(**_cut(call[:5], slice(32, 64)))
    want = run(OP, second, SMALL)
    resets = torch.zeros(1, 64, dtype=torch.bool, device=DEVICE)
    resets[0, 32] = True
    for name in "qkvif":
        getattr(call, name)[:, :, :32] = NAN
    for backend in ("triton", "torch", "reference"):
        got = run(OP, call._replace(resets=resets, chunk_size=32), SMALL if backend == "triton" else None, backend)
        for one, wanted in zip((got[0][:, :, 32:], *got[1:]), want, strict=True):
            if backend == "triton":
                assert same_bits(one, wanted)
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


@cache
def _documents(op: str, backend: str, dtype: torch.dtype, gates: str) -> tuple[MlstmCall, tuple[Tensor, ...]]:
    """Documents in tiles of 16 tokens and chunks of 32, and their right answer; neither is written to."""
    more = {} if gates == "exp" else {"input_gate": gates, "normalize": False}
    call = case(batch=1, heads=2, tokens=40, dtype=dtype, return_last_states=True, **more)
    resets = torch.zeros(1, 40, dtype=torch.bool, device=DEVICE)
    resets[0, [3, 11, 37]] = True
    call = call._replace(resets=resets, chunk_size=32 if backend == "torch" else None)
    return call, run(op, call, SMALL if (op, backend) == (OP, "triton") else None, backend)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("name", "qkvif")
@pytest.mark.parametrize(("op", "backend"), [
    (OP, "triton"), (OP, "torch"), (OP, "reference"), ("mlstm_sequence", "triton"), ("mlstm_sequence", "reference"),
])  # fmt: skip
def test_documents_of_one_tile_do_not_share_what_is_not_finite(op: str, backend: str, name: str, value: float) -> None:
    """Documents before and behind the one that has it keep every bit, and so do its own tokens before it."""
    for dtype in (F32, F16):
        for gates in ("exp", "sigmoid"):
            call, want = _documents(op, backend, dtype, gates)
            spoiled = getattr(call, name).clone()
            spoiled[0, 1, 6] = value
            how = SMALL if (op, backend) == (OP, "triton") else None
            got = run(op, call._replace(**{name: spoiled}), how, backend)
            for part in (slice(0, 6), slice(11, 40)):
                assert same_bits(got[0][:, :, part], want[0][:, :, part])
            assert same_bits(got[0][:, 0], want[0][:, 0]) and all(map(same_bits, got[1:], want[1:]))
            own = got[0][0, 1, 6:11]
            if value != value:
                # each column of them; q is its own token's alone
                assert bool(own[: 1 if name == "q" else 5].isnan().all())


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    call = case(batch=3, tokens=40, dtype=BF16, first=True, return_last_states=True, epilogue="gate")
    whole = run(OP, call, SMALL)
    for row in range(3):
        one = MlstmCall(*(
            part[row : row + 1] if isinstance(part, Tensor) and part.ndim > 1 else part for part in call
        ))  # fmt: skip
        for got, want in zip(run(OP, one, SMALL), whole, strict=True):
            assert same_bits(got, want[row : row + 1])
        # the batch may choose a configuration, unless it must not
        alone, among = (registry.get(OP).key(each._replace(batch_invariant=True)) for each in (one, call))
        assert alone == among


@pytest.mark.parametrize("how", ["sliced", "step", "permuted"])
def test_strides(how: str) -> None:
    call = case(heads=2, tokens=20, dtype=F16, epilogue="gate", first=True, return_last_states=True, resets=0.1)
    names = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "output_gate", "norm_weight", "resets")
    other = call._replace(**{name: moved(getattr(call, name), how) for name in names})
    got, want = run(OP, other, SMALL), run(OP, call, SMALL)
    assert got[0].stride() == torch.empty_like(other.v).stride()
    if DEVICE == "cpu":
        assert all(map(same_bits, got, want))
    # a GPU's lanes have other elements where strides are others, and add them in another order
    assert_right(other, got)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("an argument was copied")

    call = case(epilogue="gate", first=True, return_last_states=True)
    call = call._replace(q=moved(call.q, "sliced"))
    with monkeypatch.context() as patch:
        for method in ("reshape", "clone", "copy_", "flatten", "contiguous", "to"):
            patch.setattr(torch.Tensor, method, refuse)
        patch.setattr("wavecrest.ops.common.launcher.starter", lambda *_args: lambda *_args, **_options: None)
        registry.get(OP).backends["triton"].run(call, SMALL)


def test_arguments_are_not_written_to() -> None:
    call = case(**(CASES["packed"] | {"resets": 0.1}))
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    for backend in ("triton", "torch", "reference"):
        run(OP, call, SMALL if backend == "triton" else None, backend)
    for one, kept in zip(call, before, strict=True):
        assert not isinstance(one, Tensor) or same_bits(one, kept)


@pytest.mark.parametrize("resets", [0.0, 0.1])
def test_gates_of_a_chunk_in_several_steps(resets: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of chunks that are longer than GATES: sums, maxima and the numbers of documents go on from step to step."""
    monkeypatch.setattr(launches, "GATES", 16)
    call = case(batch=1, heads=2, tokens=61, resets=resets, first=True, return_last_states=True)
    assert launches.planned(call, SMALL, None)[0].constants["BLOCK_T"] == SMALL["CHUNK"] // 2
    assert_right(call, run(OP, call, SMALL))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_values_before_a_reset_do_not_reach_what_is_behind_its_chunk(dtype: torch.dtype) -> None:
    """They may be NaN: their keys have no weight in the states behind the chunk, but a product of them has."""
    call = case(batch=1, heads=2, tokens=60, dtype=dtype, return_last_states=True)
    resets = torch.zeros(1, 60, dtype=torch.bool, device=DEVICE)
    resets[0, 20] = True
    call = call._replace(resets=resets)
    want = run(OP, call, SMALL)
    assert_right(call, want)
    spoiled = call.v.clone()
    spoiled[:, :, :20] = NAN
    got = run(OP, call._replace(v=spoiled), SMALL)
    assert SMALL["CHUNK"] == 32
    assert same_bits(got[0][:, :, 32:], want[0][:, :, 32:])
    assert all(map(same_bits, got[1:], want[1:]))


def change_memory(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tensor], Tensor],
    names: tuple[str, ...] = ("empty", "empty_like", "zeros_like"),
) -> None:
    """Change what the launches allocate; not what they plan with."""

    def changing(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **options: Any) -> Tensor:
            one = real(*args, **options)
            return one if one.is_meta else change(one)

        return allocate

    # the launches alone
    stand_in = types.SimpleNamespace(**vars(torch))
    for name in names:
        setattr(stand_in, name, changing(getattr(torch, name)))
    monkeypatch.setattr(launches, "torch", stand_in)


def test_a_part_of_a_chunk_that_begins_where_the_sequence_ends_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a chunk in two parts, the second of the last chunk without a token: nobody has written its sum."""
    monkeypatch.setattr(launches, "KEYS_T", 16)
    call = case(batch=1, heads=2, tokens=48, return_last_states=True)
    assert launches.planned(call, SMALL, None)[2].constants["PARTS"] == 2
    change_memory(monkeypatch, lambda one: one.fill_(NAN), ("empty",))
    assert_right(call, run(OP, call, SMALL))


@pytest.mark.parametrize("name", ["packed", "24x48", "odd", "padded"])
def test_nothing_is_written_around_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of tiles beyond the tensor touch no memory: the bytes before and after it are kept."""
    around, kept = 1 << 12, []

    def guarded(one: Tensor) -> Tensor:
        whole = torch.full((one.numel() + 2 * around,), 7.0, dtype=one.dtype, device=DEVICE)
        kept.append(whole)
        return whole[around:-around].as_strided(one.shape, one.stride(), around).copy_(one)

    change_memory(monkeypatch, guarded)
    call = case(**CASES[name])
    assert_right(call, run(OP, call, SMALL))
    assert len(kept) >= 9
    assert all(bool((one[:around] == 7).all() and (one[-around:] == 7).all()) for one in kept)


# a NaN that no arithmetic makes
UNWRITTEN = 0x7FBADBAD


@pytest.mark.skipif(DEVICE != "cpu", reason="notes what Triton's interpreter reads; on a GPU scripts/sanitize does")
@pytest.mark.parametrize("name", ["states", "padded", "packed", "resets", "norm", "odd"])
def test_nothing_is_read_that_was_not_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where no result depends on it: initcheck would report it, and what is real among its reports is lost."""
    builder = sys.modules["triton.runtime.interpreter"].InterpreterBuilder
    loaded, found = builder.create_masked_load, list[bool]()

    def marked(one: Tensor) -> Tensor:
        if one.dtype == F32:
            one.view(torch.int32).fill_(UNWRITTEN)
        return one

    def load(this: Any, pointers: Any, mask: Any, *args: Any, **options: Any) -> Any:
        result = loaded(this, pointers, mask, *args, **options)
        if result.data.dtype == np.float32:
            found.append(bool(((result.data.view(np.uint32) == UNWRITTEN) & mask.data).any()))
        return result

    change_memory(monkeypatch, marked, ("empty",))
    monkeypatch.setattr(builder, "create_masked_load", load)
    call = case(**CASES[name])
    assert_right(call, run(OP, call, SMALL))
    assert len(found) > 20 and not any(found)


def test_a_token_that_is_nan_is_not_lost() -> None:
    """It makes what comes after it NaN, and nothing of another row or head; an earlier one only within its tile."""
    for name in ("q", "v", "f"):
        call = case(heads=2, tokens=40, return_last_states=True)
        getattr(call, name)[0, 1, 20] = NAN
        clean = case(heads=2, tokens=40, return_last_states=True)
        for backend in ("triton", "torch"):
            how = SMALL if backend == "triton" else None
            got, want = (run(OP, one, how, backend)[0] for one in (call._replace(chunk_size=16), clean))
            broken = got[0, 1].isnan().all(-1)
            assert bool(broken[20]) and (name == "q" or bool(broken[20:].all())), (name, backend)
            assert not bool(got[0, 1, :16].isnan().any() or got[1].isnan().any() or got[0, 0].isnan().any())
            torch.testing.assert_close(got[0, 1, :16], want[0, 1, :16], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["mlstm_chunkwise", "mlstm_sequence"])
def test_an_open_forget_gate_forgets_what_it_should(op: str) -> None:
    """log σ(12) is −6e-6, of which 1 + e^−12 in float32 keeps two digits; where nothing is taken m is their sum."""
    for pre, cap in ((12.0, 0.0), (0.003, 0.0), (12.0, 15.0), (0.003, 15.0)):
        call = case(batch=1, tokens=40, first=True, return_last_states=True, gate_soft_cap=cap)
        call.f.fill_(pre)
        # tanh makes −∞ a number, that takes as little
        call.i.fill_(float("-inf"))
        assert call.m_initial is not None
        call.m_initial.fill_(0.0)
        m = run(op, call, SMALL if op == OP else None)[3]
        x = torch.tensor(pre, dtype=torch.float64)
        x = cap * torch.tanh(x / cap) if cap else x
        want = max(40 * float(torch.nn.functional.logsigmoid(x)), -cap if cap else float("-inf"))
        assert abs(float(m) / want - 1) < 2e-6


def test_large_float16_states_keep_their_digits() -> None:
    """States above 65,504, and weights that float16 has no digits for: tiles are stored relative to their largest."""
    for gates, size in (((0.0, 15.0, 0.1), 4000.0), ((-16.0, 15.0, 0.1), 1.0)):
        call = case(batch=1, heads=1, tokens=96, dtype=F16, gate_dtype=F32, gates=gates, return_last_states=True)
        call = call._replace(v=call.v * size, q=call.q / size**0.5)
        got, want = run(OP, call, SMALL), exact(call)
        assert size == 1.0 or float(want.states[0].abs().max()) > 65504
        assert_right(call, got, want)


def test_no_tokens() -> None:
    call = case(heads=2, tokens=40, first=True, return_last_states=True)
    for backend in ("triton", "torch", "reference"):
        none = call._replace(**_cut(call[:5], slice(0, 0)))
        h, *states = run(OP, none, None, backend)
        assert h.shape == (2, 2, 0, 24)
        for state, first in zip(states, call.initial, strict=True):
            assert first is not None and same_bits(state, first) and state.data_ptr() != first.data_ptr()
        fresh = run(OP, none._replace(c_initial=None, n_initial=None, m_initial=None), None, backend)
        assert not any(bool(one.any()) for one in fresh[1:])
        assert run(OP, call._replace(**{name: getattr(call, name)[:0] for name in "qkvif"}, c_initial=None,
                                     n_initial=None, m_initial=None), None, backend)[0].shape[0] == 0  # fmt: skip


def test_gradients_are_those_of_all_pairs() -> None:
    call = case(batch=1, tokens=5, dk=2, dv=2, dtype=F64, gates=(0.0, 1.0, 1.0))
    leaves = [one.detach().clone().requires_grad_() for one in call[:5]]
    assert torch.autograd.gradcheck(
        lambda *args: ops.mlstm_chunkwise(*args, chunk_size=16, eps=0.0, norm_weight=None), leaves, atol=1e-6
    )
    grads = [
        torch.autograd.grad(form(*leaves, eps=0.0).square().sum(), leaves)
        for form in (ops.mlstm_chunkwise, ops.mlstm_sequence, ops.mlstm_parallel)
    ]
    for other in grads[1:]:
        for one, wanted in zip(other, grads[0], strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-7, atol=1e-9)
    single = [one.detach().float().requires_grad_() for one in leaves]
    registry.get(OP).force("triton")
    decision = registry.get(OP).decide(MlstmCall(*single))
    assert decision.backend == "torch"
    assert "gradients" in {one.backend: one.reason for one in decision.refused}["triton"]


def test_nothing_is_compiled_again_for_other_lengths_and_batches() -> None:
    first = None
    for batch, heads, tokens in ((2, 3, 40), (1, 8, 17), (5, 16, 1000), (16, 1, 64)):
        call = case(batch=batch, heads=heads, tokens=tokens, epilogue="gate", first=True, return_last_states=True)
        made = launches.planned(call, config(columns=16), None)
        assert [launch.kernel.__name__ for launch in made] == [
            "_mlstm_gates_kernel", "_mlstm_keys_kernel", "_mlstm_states_kernel", "_mlstm_chunks_kernel",
            "_mlstm_norm_kernel",
        ]  # fmt: skip
        for launch in made:
            loose = {
                name
                for name, value in zip(launch.kernel.arg_names, launch.args, strict=False)
                if not isinstance(value, Tensor)
            }
            assert loose <= {*kernels.SIZES, *kernel_norm._SIZES}, "a number makes the kernel anew"
        constants = [launch.options() for launch in made]
        assert first is None or constants == first
        first = constants


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool) -> None:
    """One graph without breaks; with dynamic shapes another length does not compile again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    backend: Any = counter if DEVICE == "cpu" else "inductor"

    def cell(*args: Any, **options: Any) -> Any:
        return ops.mlstm_chunkwise(*args, chunk_size=64, return_last_states=True, gate_soft_cap=15.0, **options)

    compiled = torch.compile(cell, fullgraph=True, dynamic=dynamic, backend=backend)
    for tokens in (20, 21, 50) if dynamic else (20,):
        call = case(batch=2, tokens=tokens)
        got, want = compiled(*call[:5]), cell(*call[:5])
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
    if DEVICE == "cpu" and dynamic:
        assert counter.frame_count == 1


@pytest.mark.gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    call = case(**(CASES["padded"] | {"dtype": BF16}))
    found = registry.get(OP)
    found.force("triton")
    found(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = found(call)
    call.v.copy_(case(**(CASES["padded"] | {"dtype": BF16, "seed": 1})).v)
    assert call.seq_lens is not None
    call.seq_lens[0] = 7
    graph.replay()
    assert_right(call, got)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.integers(1, 50))
    form = draw(st.sampled_from(("whole", "padded", "packed")))
    batch = 1 if form == "packed" else draw(st.integers(1, 3))
    values: dict[str, Any] = {}
    if form == "packed":
        values["packed"] = sorted(draw(st.lists(st.integers(0, tokens), min_size=2, max_size=5)))
    elif form == "padded":
        values["starts"] = draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
        values["lens"] = [draw(st.integers(0, tokens - start)) for start in values["starts"]]
    gate = draw(st.sampled_from(("exp", "exp", "sigmoid")))
    return values | {
        "batch": batch,
        "heads": 1,
        "tokens": tokens,
        "dk": draw(st.sampled_from((1, 8, 16, 33))),
        "dv": draw(st.sampled_from((1, 8, 24, 40))),
        "dtype": draw(st.sampled_from((F32, F32, F16, BF16))),
        "gate_dtype": F32,
        "gates": draw(st.sampled_from(((-1.0, 2.0, 1.5), (-10.0, 4.0, 1.0), (0.0, -3.0, 4.0)))),
        "first": draw(st.booleans()),
        "return_last_states": draw(st.booleans()),
        "resets": draw(st.sampled_from((0.0, 0.0, 0.1))),
        "epilogue": draw(st.sampled_from(("", "norm", "gate"))),
        "input_gate": gate,
        "normalize": gate == "exp" or draw(st.booleans()),
        "gate_soft_cap": draw(st.sampled_from((0.0, 15.0))),
        "chunk_size": draw(st.sampled_from((None, 16, 48))),
        "order": draw(st.sampled_from(("bshd", "bhsd"))),
        "seed": draw(st.integers(0, 100)),
    }


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=calls())
# weights of float16 that are subnormal, beside a normaliser that is small
@example(
    values={
        "batch": 3,
        "heads": 1,
        "tokens": 32,
        "dk": 1,
        "dv": 40,
        "dtype": F16,
        "gate_dtype": F32,
        "gates": (0.0, -3.0, 4.0),
        "order": "bhsd",
        "seed": 14,
        "chunk_size": None,
    }
)
def test_any_call(values: dict[str, Any]) -> None:
    """Any sizes, form, dtype, gates, options: both kernels' ops, and PyTorch's chunks."""
    call = case(**values)
    assert_right(call, run(OP, call, configs.chunked(SMALL, call.chunk_size or 0)), cancels=True)
    exactly = exact(call, rounded=False)
    assert_right(call, run("mlstm_sequence", call), exactly, cancels=True)
    assert_right(call, run(OP, call, backend="torch"), exactly, cancels=True)


def test_space_and_defaults() -> None:
    for arch in ARCHS.values():
        for shape in (configs.Shape(256, 512, "bfloat16"), configs.Shape(24, 48, "float16", 48)):
            some = list(space(shape, arch))
            assert some[0] == configs.default(shape, arch) and len(some) == len(set(some))
            # each is compiled: what is tried of a key must be over within minutes
            assert shape.chunk or 4 < len(some) < 400
            # each kernel has something to be tried
            for names in (("KEYS_WARPS",), ("STATE_T",), ("BLOCK_S", "num_warps", "num_stages")):
                assert shape.chunk or len({tuple(one[name] for name in names) for one in some}) > 1
            for one in some:
                assert all(one["CHUNK"] % one[tile] == 0 for tile in ("BLOCK_T", "BLOCK_S", "STATE_T"))
                assert one["STATE_K"] % one["BLOCK_C"] == 0
    for wrong in (*({tile: 32, "CHUNK": 48} for tile in ("BLOCK_T", "BLOCK_S", "STATE_T")), {"BLOCK_C": 32}):
        with pytest.raises(InvalidArgument, match="no multiple"):
            run(OP, case(), Config(**(SMALL.kwargs | wrong)))


def test_every_key_of_models_and_peers_is_tuned() -> None:
    """Prompts as a model has them, and the cell alone as peers are called: five lengths, two shapes of heads."""
    op, kept = registry.get(OP), ("tokens", "heads", "dk", "dv", "norm", "last", "capped", "initial")
    made = op.study.bench_cases("shared", "meta")
    keys = {name: dict(zip(op.key_fields, op.key(build()), strict=True)) for name, build in made.items()}
    found = {tuple(int(key[field]) for field in kept) for key in keys.values()}
    prompts = {(s, 8, 256, 512, 1, 1, 1, 0) for s in (512, 2048, 16384)}
    assert found >= prompts | {(2048, 8, 64, 128, 1, 1, 1, 0), (2048, 32, 64, 128, 1, 1, 1, 0)}
    cells = {(s, 8, 256, 512, 0, 0, 0, 0) for s in (2048, 4096, 16384)}
    assert found >= cells | {(s, 32, 64, 128, 0, 0, 0, 0) for s in (2048, 4096)}
    assert sum(name.startswith("cell") for name in made) == 9


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "chunk_size": ({"chunk_size": 20}, "chunk_size must be"),
    "flag": ({"return_last_states": 1}, "True or False"),
    "invariant": ({"batch_invariant": None}, "batch_invariant must be True or False"),
    "state_dtype": ({"state_dtype": BF16}, "more than 100 %"),
    "some states": ({"c_initial": torch.zeros(2, 2, 16, 24, device=DEVICE)}, "n_initial must be"),
    "cu_seqlens of a batch": ({"cu_seqlens": _ints(0, 3)}, "B = 1"),
    "seq_lens' dtype": ({"seq_lens": _ints(3, 4).long()}, "seq_lens must be int32"),
    "seq_starts' size": ({"seq_starts": _ints(3)}, "seq_starts must be int32 \\[2\\]"),
    "resets": ({"resets": torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)}, "resets must be bool"),
    "output_gate": ({"output_gate": torch.zeros(2, 2, 40, 24, device=DEVICE)}, "pass norm_weight"),
    "normalize": ({"normalize": False}, "sigmoid"),
    "gates": ({"f": torch.zeros(2, 2, 39, device=DEVICE)}, "f must be"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("op", ["mlstm_chunkwise", "mlstm_sequence"])
def test_refuses(op: str, name: str) -> None:
    changes, message = REFUSED[name]
    call = case(heads=2)._replace(**changes)
    for backend in (None, "torch", "triton"):
        with pytest.raises(InvalidArgument, match=f"{op}: .*{message}"):
            registry.get(op)(call) if backend is None else run(op, call, backend=backend)


def test_both_ways_of_saying_where_sequences_lie_are_refused() -> None:
    call = case(batch=1)._replace(cu_seqlens=_ints(0, 40), seq_lens=_ints(3))
    with pytest.raises(InvalidArgument, match="leave out"):
        run(OP, call)
    with pytest.raises(Unsupported, match="float64"):
        run(OP, case(dtype=F64))


def test_the_bound_can_fail() -> None:
    """A wrong floor, forgotten ε, a key, decay or column off, 1 % of everything: each is beyond the bound."""
    call = case(dtype=BF16, gate_dtype=F32, **CASES["closed input gate"])
    want, right = exact(call), run(OP, call, SMALL)
    assert_right(call, right, want)
    changes: list[dict[str, Tensor]] = [
        {"f": call.f + 0.5}, {"i": call.i + 0.2}, {"k": call.k.roll(1, 2)}, {"q": call.q * 1.1}
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(AssertionError):
            assert_right(call, run(OP, call._replace(**change), SMALL), want)
    for h, c in ((right[0].roll(1, 2), right[1]), (right[0] * 1.01, right[1]), (right[0], right[1] * 1.01)):
        with pytest.raises(AssertionError):
            assert_right(call, (h, c, *right[2:]), want)
