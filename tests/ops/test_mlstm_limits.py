"""The mLSTM ops at the ends of their ranges: closed gates, many chunks and sequences, far elements, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, assert_right, case, exact, moved, run
from tests.ops.op_harness import same_bits
from tests.ops.test_mlstm_chunkwise import CASES, SMALL, config
from wavecrest import ops
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.ops.mlstm.chunkwise import launch as launches

OP = "mlstm_chunkwise"
INF = float("inf")
# of every op that runs sequences
PATHS = ((OP, "triton"), (OP, "torch"), (OP, "reference"), ("mlstm_sequence", "triton"))


def on(path: tuple[str, str], call: MlstmCall) -> Any:
    op, backend = path
    return run(op, call, SMALL if path == PATHS[0] else None, backend)


def by_steps(call: MlstmCall) -> tuple[Tensor, ...]:
    """h and the last states by one step of the kernel after another."""
    state, found = call.initial, []
    for t in range(call.tokens):
        now: Any = [one[:, :, t] for one in call[:5]]
        h, *state = run("mlstm_step", MlstmStepCall(*now, *state))
        found.append(h)
    return torch.stack(found, 2), *state


def assert_same_function(call: MlstmCall, *results: Any) -> None:
    """Near the definition in float64: within a few roundings of float32, or of what matrix units take."""
    wide = call._replace(**{name: getattr(call, name).double() for name in "qkvif"})
    want = run(OP, wide, backend="reference")
    rtol, atol = {F32: (1e-4, 1e-5), F16: (4e-3, 2e-3), BF16: (3e-2, 3e-2)}[call.q.dtype]
    for got in results:
        for one, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_infinite_forget_gates_and_closed_input_gates(dtype: torch.dtype) -> None:
    """f = −∞ forgets everything, i = −∞ takes nothing, even a whole chunk long: no NaN, on every path."""
    call = case(tokens=40, dtype=dtype, gate_dtype=F32, first=True, return_last_states=True)
    call.i[:, :, 32:] = -INF
    call.f[:, :, 9], call.i[:, :, 9], call.i[:, :, 12] = -INF, -INF, -INF
    assert_same_function(call, *(on(path, call) for path in PATHS), by_steps(call))


# in the interpreter the kernel takes minutes
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_a_hundred_thousand_tokens_lose_nothing(backend: str) -> None:
    """With q = k = 1 h is a mean of v, whose weights have a closed form for all tokens at once."""
    tokens, generator = 100_000, torch.Generator().manual_seed(0)
    i, f = (torch.randn(1, 3, tokens, generator=generator) for _ in "if")
    # forgets at once, after some tokens, and hardly in all of them
    f += torch.tensor([-2.0, 3.0, 12.0])[:, None]
    v = torch.rand(1, 3, tokens, 4, generator=generator) + 0.1
    one = torch.ones(1, 3, tokens, 1, device=DEVICE)
    call = MlstmCall(
        one, one, v.to(DEVICE), i.to(DEVICE), f.to(DEVICE), return_last_states=True, eps=0.0, chunk_size=64
    )
    # threads that wait for each other at every operation would take most of the time on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        h, _, n, m = run(OP, call, None, backend)
    finally:
        torch.set_num_threads(threads)
    total = torch.nn.functional.logsigmoid(f.double()).cumsum(2)
    # logarithms of what is summed with no number for e^m
    top = torch.logcumsumexp(i.double() - total, 2) + total
    sums = torch.logcumsumexp((i.double() - total)[..., None] + v.double().log(), 2) + total[..., None]
    want = torch.exp(sums - top.clamp(min=0.0)[..., None])
    torch.testing.assert_close(h.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((m[..., 0] + n[..., 0].log()).cpu().double(), top[:, :, -1], rtol=1e-5, atol=1e-4)


# tokens, whose input gates are closed, which forget gates are set, and to what
CLOSED: dict[str, tuple[int, slice, slice, float]] = {
    # m falls by ln 2 a token: below −128 ln 2 it is a power that float32 has no number for
    "half of it each": (170, slice(0, 160), slice(0, 160), 0.0),
    "all of it by one token": (70, slice(32, 64), slice(40, 41), -INF),
    "nothing": (70, slice(0, 64), slice(0, 70), INF),
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", CLOSED)
def test_whole_chunks_of_closed_input_gates(name: str, dtype: torch.dtype) -> None:
    """They take nothing, and forget what they should, before tokens that do take."""
    tokens, closed, forgetting, f = CLOSED[name]
    call = case(batch=1, tokens=tokens, dk=8, dv=8, dtype=dtype, gate_dtype=F32, first=True, return_last_states=True)
    call.i[:, :, closed], call.f[:, :, forgetting] = -INF, f
    assert_same_function(call, *(on(path, call) for path in PATHS))


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("f", [2.0, INF, -INF])
def test_all_pairs_where_the_first_input_gates_are_closed(f: float, input_gate: str) -> None:
    call = case(tokens=20, input_gate=input_gate, eps=0.0)
    call.i[:, :, :5], call.f[:, :, ::2] = -INF, f
    leaves = [one.requires_grad_() for one in call[:5]]
    got = ops.mlstm_parallel(*leaves, eps=0.0, input_gate=input_gate)
    assert not bool(got[:, :, :5].any())
    torch.testing.assert_close(got, run(OP, call, backend="reference"), rtol=1e-4, atol=1e-5)
    assert all(bool(one.isfinite().all()) for one in torch.autograd.grad(got.square().sum(), leaves))


def test_an_old_state_far_above_what_a_chunk_adds() -> None:
    """By 2^144: float16's weights, relative to the largest of a chunk's own, are not infinite for the state."""
    call = case(batch=1, tokens=64, dtype=F16, gate_dtype=F32, gates=(0.0, 15.0, 0.1), return_last_states=True)
    call.i[:, :, :32] += 40.0
    call.i[:, :, 32:] -= 60.0
    assert_right(call, run(OP, call, SMALL))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("resets", [0.0, 0.02])
def test_more_chunks_than_are_looked_at_at_a_time(resets: float, dtype: torch.dtype) -> None:
    """600 tokens in chunks of 16: m of a chunk follows from 37 others."""
    call = case(
        batch=1, tokens=600, dk=8, dv=8, dtype=dtype, gate_dtype=F32, gates=(-3.0, 3.0, 1.5), resets=resets, first=True,
        return_last_states=True,
    )  # fmt: skip
    assert_right(call, run(OP, call, config(16, 16, 32, 16, 16)))


def test_more_sequences_than_are_looked_at_at_a_time() -> None:
    """151 packed sequences, some of them empty: each kernel finds that of its chunk among them."""
    borders = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1)).sort().values.tolist()
    call = case(batch=1, tokens=300, dk=8, dv=8, packed=[0, *borders, 300], first=True, return_last_states=True)
    assert_right(call, run(OP, call, config(16, 16, 32, 16, 16)))


@pytest.mark.parametrize("name", ["states", "packed", "24x48", "keys in parts"])
def test_rows_far_from_each_other_are_counted_in_64_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers by the code for it, columns side by side and not."""
    call = case(dtype=F16, gate_dtype=F32, **CASES[name])
    apart = call._replace(**{one: moved(getattr(call, one), "step") for one in ("q", "k", "v")})
    narrow = [run(OP, one, SMALL) for one in (call, apart)]
    monkeypatch.setattr(launches, "_wide", lambda _rows, *_tensors: True)
    for one, wanted in zip((call, apart), narrow, strict=True):
        assert all(map(same_bits, run(OP, one, SMALL), wanted))


def test_what_is_far() -> None:
    """A tile is what counts, not a tensor: 16 rows, and 32 of keys."""

    def wide(**strides: int) -> list[bool]:
        call = case(batch=1, dk=16, dv=16)
        meta = {name: getattr(call, name).to("meta") for name in "qkvif"}
        meta |= {name: meta[name].as_strided((1, 1, 40, 16), (1, 1, step, 1)) for name, step in strides.items()}
        made = launches.planned(call._replace(**meta), SMALL, None)
        return [bool(launch.constants["WIDE"]) for launch in made[1:]]

    assert wide(q=1 << 26) == [False, False, False] and wide(q=1 << 27) == [False, False, True]
    assert wide(k=1 << 25) == [False, False, False] and wide(k=1 << 26) == [True, False, False]
    assert wide(v=1 << 26) == [False, False, False] and wide(v=1 << 27) == [False, True, True]


@pytest.mark.parametrize("path", [*PATHS, ("mlstm_sequence", "torch")])
def test_places_outside_of_a_row_are_none(path: tuple[str, str]) -> None:
    """Sequences that begin before the first token or end behind the last one are cut, by every backend alike."""
    inside = [0, 20, 20, 40, 40]
    call = case(batch=1, packed=inside, first=True, return_last_states=True, epilogue="gate")
    want = exact(call, rounded=False)
    outside = torch.tensor([-7, 20, 20, 60, 70], dtype=torch.int32, device=DEVICE)
    assert_right(call, on(path, call._replace(cu_seqlens=outside)), want)


def all_ops(call: MlstmCall) -> list[Tensor]:
    options: dict[str, Any] = {"gate_soft_cap": 15.0}
    states = dict(zip(("c_initial", "n_initial", "m_initial"), call.initial, strict=True))
    now: Any = [one[:, :, 0] for one in call[:3]] + [one[:, :, :1] for one in call[3:5]]
    return [
        ops.mlstm_chunkwise(*call[:5], **options),
        ops.mlstm_sequence(*call[:5], **states, **options),
        ops.mlstm_parallel(*call[:5], **options),
        ops.mlstm_step(*now, *call.initial, **options)[0],
    ]


def test_autocast_rounds_nothing() -> None:
    """float32 is float32 under autocast too, with gradients and in torch.compile."""
    # every token is a piece of the graph
    call = case(tokens=4, first=True)
    leaves = [one.requires_grad_() for one in call[:5]]
    want = all_ops(call)
    torch._dynamo.reset()
    with torch.autocast(DEVICE, dtype=BF16):
        got = all_ops(call)
        compiled = torch.compile(all_ops, fullgraph=True, backend="aot_eager")(call)
    for one, traced, wanted in zip(got, compiled, want, strict=True):
        assert same_bits(one, wanted)
        torch.testing.assert_close(traced, wanted)
        grads = [torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (one, wanted)]
        assert all(map(same_bits, *grads))
