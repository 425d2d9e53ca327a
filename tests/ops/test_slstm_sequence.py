"""slstm_sequence against weighted sums in float64: gates, states, padding, resets; and what the kernel promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.ops.mlstm_harness import moved
from tests.ops.op_harness import same_bits
from tests.ops.slstm_harness import (
    BF16,
    C_CODE,
    DEVICE,
    F16,
    F32,
    F64,
    LIMITS,
    NAN,
    assert_right,
    case,
    exact,
    part_of,
    row_of,
    run,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.common import elsewhere
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence.config import default
from wavecrest.ops.slstm.sequence.study.space import space
from wavecrest.ops.slstm.study.bound import bound
from wavecrest.ops.slstm.study.cases import example

OP = "slstm_sequence"
# the weights in registers, and read again by each token
CONFIGS = {"kept": None, "read again": Config(BLOCK_B=16, BLOCK_K=16, STAGES=2, num_warps=4)}
# several programs a head, in the place of one
PARTED = Config(BLOCK_B=16, BLOCK_N=16, BLOCK_K=16, STAGES=2, num_warps=1, num_stages=1)
# several programs a head that wait for each other
SHARED = Config(BLOCK_B=16, BLOCK_N=16, num_warps=1, num_stages=1)
STEPS, COOPERATIVE = "triton_steps", "triton_cooperative"
KERNELS = ["triton", STEPS, COOPERATIVE]
SEVERAL = {STEPS: PARTED, COOPERATIVE: SHARED}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"dim": 32},
    "exponential forget gate": {"forget_gate": "exp", "first": True},
    "without bias": {"bias": False, "return_last_states": True},
    "first states": {"first": True},
    "40 columns": {"dim": 40, "heads": 1, "tokens": 4},
    "one column": {"dim": 1, "heads": 3},
    "17 rows": {"batch": 17, "heads": 1, "tokens": 3},
    "one token": {"tokens": 1, "first": True},
    "padded": {"batch": 4, "tokens": 7, "starts": [2, 0, 9, -4], "lens": [3, 0, 2, 2**31 - 1], "first": True},
    "resets": {"resets": 0.4, "first": True, "tokens": 8},
    "padded resets": {"batch": 3, "tokens": 7, "lens": [3, 7, 0], "resets": 0.5},
    "strong weights": {"scale": 2.0, "gates": 3.0},
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    call = case(**CASES[name])
    want = exact(call)
    for config in CONFIGS.values():
        assert_right(call, run(OP, call, config), want)
    for config in (None, PARTED):
        assert_right(call, run(OP, call, config, STEPS), want)
    for config in (None, SHARED):
        assert_right(call, run(OP, call, config, COOPERATIVE), want)
    for backend in (*C_CODE, "torch", "reference"):
        assert_right(call, run(OP, call, backend=backend), want)


def test_heads_of_more_than_256() -> None:
    for dim, more in ((257, {"first": True}), (300, {"lens": [3, 1], "resets": 0.5})):
        call = case(dim=dim, heads=1, tokens=3, **more)
        for backend in (STEPS, COOPERATIVE):
            assert_right(call, run(OP, call, backend=backend))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cases_in_16_bits(dtype: torch.dtype) -> None:
    for name in ("first states", "padded resets"):
        call = case(dtype=dtype, **CASES[name])
        want = exact(call)
        for config in CONFIGS.values():
            assert_right(call, run(OP, call, config), want)
        for backend in (*C_CODE, "torch", STEPS, COOPERATIVE):
            assert_right(call, run(OP, call, backend=backend), want)


def test_float64_is_pytorchs() -> None:
    for name in ("first states", "padded resets", "exponential forget gate"):
        call = case(dtype=F64, **CASES[name])
        for backend in ("torch", "reference"):
            assert_right(call, run(OP, call, backend=backend))


@pytest.mark.parametrize("backend", [*KERNELS, *C_CODE, "torch", "reference"])
@pytest.mark.parametrize("gate", ["i", "f", "z", "o"])
def test_gates_at_their_extremes(gate: str, backend: str) -> None:
    """Pre-activations of ±10⁴ among ordinary ones: exact in float32 but for what 10⁴ itself is rounded by."""
    call = case(tokens=8, heads=1)
    place = "ifzo".index(gate)
    call.x[:, 1::3, place] = 1e4
    call.x[:, 2::3, place] = -1e4
    want = exact(call)
    y, *states = run(OP, call, backend=backend)
    assert all(bool(one.isfinite().all()) for one in (y, *states))
    # where weights are e^(10⁴ − m), h is off by what m is: 2⁻¹¹
    torch.testing.assert_close(y.cpu().double(), want[0], rtol=0, atol=2e-3 if gate in "if" else LIMITS[F32])


@pytest.mark.parametrize("backend", [*KERNELS, *C_CODE, "torch", "reference"])
def test_infinity_closes_a_gate(backend: str) -> None:
    """A token with i = −∞ and f = ∞ leaves c and n to the last bit; one with f = −∞ forgets them."""
    call = case(batch=1, tokens=3, heads=1, bias=False, scale=0.0, first=True)
    call.x[:, :, 0], call.x[:, :, 1] = float("-inf"), float("inf")
    assert call.c_initial is not None and call.n_initial is not None and call.n_initial[0, 0, 0] == 0
    _, _, c, n, _ = run(OP, call, backend=backend)
    assert same_bits(c[..., 1:], call.c_initial[..., 1:]) and same_bits(n[..., 1:], call.n_initial[..., 1:])
    # nothing was there: the first token is all that there is
    assert bool((n[..., 0] == 3).all())
    call.x[:, :, 0] = 0.0
    call.x[:, 2, 1] = float("-inf")
    _, h, c, n, _ = run(OP, call, backend=backend)
    assert bool((n == 1).all())
    torch.testing.assert_close(c, torch.tanh(call.x[:, 2, 2]))
    torch.testing.assert_close(h, torch.sigmoid(call.x[:, 2, 3]) * c)


@pytest.mark.parametrize("backend", [*KERNELS, *C_CODE, "torch"])
def test_a_sequence_divided_anywhere_is_the_whole(backend: str) -> None:
    call = case(tokens=6, heads=1, first=True, resets=0.2, dtype=F16)
    whole = run(OP, call, backend=backend)
    for cut in range(7):
        before = run(OP, part_of(call, 0, cut), backend=backend)
        after = run(OP, part_of(call, cut, 6, before[1:]), backend=backend)
        assert same_bits(torch.cat((before[0], after[0]), 1), whole[0])
        assert all(same_bits(one, want) for one, want in zip(after[1:], whole[1:], strict=True))


def test_pytorchs_loop_takes_any_number_of_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (CASES["first states"], CASES["padded resets"]):
        call = case(**options)
        want = run(OP, call, backend="torch")
        for tokens in (1, 2, 5):
            monkeypatch.setattr("wavecrest.backends.torch.slstm.CHUNK", tokens * call.x[:, 0].numel())
            got = run(OP, call, backend="torch")
            assert all(same_bits(one, other) for one, other in zip(got, want, strict=True))


def test_a_row_has_the_same_bits_in_any_batch_and_beside_padding() -> None:
    call = case(batch=18, heads=1, tokens=4, dim=32, first=True, dtype=BF16)
    for backend, config in (
        *(("triton", one) for one in CONFIGS.values()),
        *((backend, config) for backend, one in SEVERAL.items() for config in (None, one)),
        *((one, None) for one in C_CODE),
    ):
        whole = run(OP, call, config, backend)
        for row in (0, 17):
            one = row_of(call, row)
            got = run(OP, one, config, backend)
            assert all(same_bits(mine, want[row : row + 1]) for mine, want in zip(got, whole, strict=True))
            wide = torch.cat((torch.full_like(one.x[:, :3], NAN), one.x), 1)
            start = torch.tensor([3], dtype=torch.int32, device=DEVICE)
            padded = run(OP, one._replace(x=wide, seq_starts=start), config, backend)
            assert not bool(padded[0][:, :3].any())
            assert all(same_bits(a, b) for a, b in zip((padded[0][:, 3:], *padded[1:]), got, strict=True))


@pytest.mark.parametrize("backend", [*KERNELS, *C_CODE, "torch", "reference"])
def test_a_nan_stays_in_its_row_and_head_until_a_reset(backend: str) -> None:
    call = case(batch=3, heads=2, tokens=6, dim=32)
    fresh = torch.zeros(3, 6, dtype=torch.bool, device=DEVICE)
    fresh[1, 4] = True
    call = call._replace(resets=fresh)
    configs = (
        list(CONFIGS.values()) if backend == "triton" else [None, *([SEVERAL[backend]] if backend in SEVERAL else [])]
    )
    # each beside itself: on a GPU configurations round in other places
    wanted = [run(OP, call, config, backend) for config in configs]
    call.x[1, 2, 0, 1, 5] = NAN
    for config, want in zip(configs, wanted, strict=True):
        got = run(OP, call, config, backend)
        lost = got[0].isnan()
        assert bool(lost[1, 2, 1, 5]) and bool(lost[1, 3, 1].all()) and int(lost.sum()) == 33
        assert all(torch.allclose(one.nan_to_num(9.0), other) for one, other in zip(got[1:], want[1:], strict=True))


@pytest.mark.parametrize("how", ["sliced", "permuted"])
def test_strides(how: str) -> None:
    call = case(dtype=F16, tokens=4, first=True, resets=0.2)
    names = ("x", "r", "bias", "h_initial", "c_initial", "n_initial", "m_initial", "resets")
    other = call._replace(**{name: moved(getattr(call, name), how) for name in names})
    for backend in (*KERNELS, *C_CODE, "torch"):
        got = run(OP, other, None, backend)
        assert_right(call, got)
        # on a GPU other strides are other code, which may join other products and sums
        if DEVICE == "cpu":
            assert all(same_bits(one, want) for one, want in zip(got, run(OP, call, None, backend), strict=True))


def test_no_tokens_and_first_states_are_kept() -> None:
    call = case(tokens=4, first=True)
    none = part_of(call, 0, 0)
    empty = call._replace(seq_lens=torch.zeros(2, dtype=torch.int32, device=DEVICE))
    for given in (none, empty):
        for backend in (*KERNELS, *C_CODE, "torch", "reference"):
            y, *states = run(OP, given, None, backend)
            assert y.shape == (2, given.tokens, 2, 16) and not bool(y.any())
            for one, first in zip(states, call.initial, strict=True):
                assert first is not None and same_bits(one, first)
    assert ops.slstm_sequence(*row_of(call, 0)[:3]).shape == (1, 4, 2, 16)


@pytest.mark.slow
def test_a_hundred_thousand_tokens_lose_nothing() -> None:
    """Without recurrent weights h has a closed form for all tokens at once."""
    tokens = 100_000
    call = case(batch=1, tokens=tokens, heads=1, dim=4, scale=0.0, bias=False, gates=1.0)
    call.x[:, :, 1, :, 1] = -2.0
    call.x[:, :, 1, :, 2] = 12.0
    call.x[:, :, 2].abs_()
    # threads that wait for each other at every operation would take most of the time on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        y, *states = run(OP, call, backend="torch")
    finally:
        torch.set_num_threads(threads)
    i, f, z, o = call.x.cpu().double()[0].unbind(1)
    total = torch.nn.functional.logsigmoid(f).cumsum(0)
    # e^(i − Σ lf) summed, in logarithms
    n = torch.logcumsumexp(i - total, 0)
    c = torch.logcumsumexp(i - total + torch.log(torch.tanh(z)), 0)
    torch.testing.assert_close(y[0].cpu().double(), torch.sigmoid(o) * torch.exp(c - n), rtol=2e-5, atol=1e-6)
    assert bool((states[2] >= 1).all())


def test_torch_compile_has_one_operation_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(ops.slstm_sequence, fullgraph=True, backend=counter)
    for tokens in (4, 9, 12):
        call = case(tokens=tokens)
        with torch.no_grad():
            got = compiled(*call[:3], return_last_states=True)
            want = ops.slstm_sequence(*call[:3], return_last_states=True)
        torch.testing.assert_close(got, want)
    if DEVICE == "cpu":
        assert counter.frame_count <= 2 and counter.op_count <= 30, "the loop is written out in the graph"


def test_gradients_are_those_of_the_definition() -> None:
    call = case(batch=1, tokens=3, heads=1, dim=2, dtype=F64, first=True, resets=0.3)
    assert call.bias is not None
    assert call.n_initial is not None
    # h jumps where n is 0: there is no gradient in n
    call.n_initial.clamp_(min=0.5)
    call = call._replace(bias=call.bias.double())
    leaves = [one.requires_grad_() for one in call[:7] if one is not None]
    names = [name for name, one in zip(call._fields[:7], call[:7], strict=True) if one is not None]

    def function(*tensors: Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        return ops.slstm_sequence(**given, resets=call.resets)

    assert torch.autograd.gradcheck(function, leaves)
    assert registry.get(OP).decide(call._replace(return_last_states=False)).backend == "torch"


def test_autocast_rounds_nothing() -> None:
    call = case(tokens=4)
    for backend in ("torch", "reference"):
        want = run(OP, call, backend=backend)
        with torch.autocast(DEVICE, torch.bfloat16):
            got = run(OP, call, backend=backend)
        assert all(same_bits(one, other) for one, other in zip(got, want, strict=True))


def test_what_the_kernel_declines() -> None:
    with pytest.raises(Unsupported, match="float64"):
        run(OP, case(dtype=F64, tokens=2))
    with pytest.raises(Unsupported, match="float64"):
        run(OP, case(dtype=F64, tokens=2), backend=STEPS)
    with pytest.raises(Unsupported, match="head_dim up to 256"):
        run(OP, case(dim=257, heads=1, tokens=1))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "sm_90"])
def test_heads_that_do_not_fit_take_a_launch_for_each_token(arch: str) -> None:
    op = registry.get(OP)
    # programs that share a head are the default where they were measured
    large = COOPERATIVE if arch == "sm_90" else STEPS
    with elsewhere.assumed(ARCHS[arch]):
        for dim, backend in ((128, "triton"), (129, large), (256, large), (2048, STEPS)):
            call = elsewhere.claimed(example((2, 4, 2, dim), BF16, "meta"), "cuda:0")
            decision = op.decide_as(op.key(call), call)
            assert decision.backend == backend, decision
            assert set(decision.config or ()) == set(op.config_of(backend, op.key(call)))


def _states(call: SlstmCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in ("h_initial", "c_initial", "n_initial", "m_initial")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda call: {"r": call.r.half()}, "r must have x's dtype"),
        (lambda call: {"r": call.r[:3]}, "r must be"),
        (lambda call: {"bias": call.bias[0]}, "bias must be"),
        (lambda call: {"x": call.x[:, :, :3]}, "gates i, f, z and o"),
        (lambda call: {"forget_gate": "tanh"}, "forget_gate is sigmoid or exp, not 'tanh'"),
        (lambda call: {**_states(call), "m_initial": None}, "m_initial must be"),
        (lambda call: {**_states(call), "n_initial": call.n_initial.half()}, "n_initial must be float32"),
        (lambda call: {"seq_lens": torch.ones(2)}, "seq_lens must be int32"),
        (lambda call: {"resets": torch.ones(2, 6)}, "resets must be bool"),
        (lambda call: {"return_last_states": 1}, "return_last_states"),
    ],
)
def test_wrong_arguments(changed: Any, words: str) -> None:
    call = case(first=True)
    with pytest.raises(InvalidArgument, match=words):
        registry.get(OP)(call._replace(**changed(call)))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_configurations_to_try_are_those_that_may_run(arch: str) -> None:
    for dim, dtype in ((1, "float32"), (64, "bfloat16"), (256, "bfloat16"), (128, "float32")):
        found = list(space(dim, dtype, ARCHS[arch]))
        assert found[0] == default(dim, dtype, ARCHS[arch]) and len(found) == len(set(map(str, found)))
        assert all(one["BLOCK_K"] <= max(16, dim) for one in found)


def test_the_bound_stays_finite_where_errors_outgrow_the_states() -> None:
    """Strong recurrent weights: without a limit it ended in NaN, and right results were called wrong (H100)."""
    call = case(dim=32, tokens=30, dtype=BF16, scale=8.0, gates=3.0, return_last_states=True)
    bounds = bound(call)
    assert bounds is not None and all(bool(one.isfinite().all()) for one in bounds)
    # h is a mean of values of tanh
    assert float(bounds[0].max()) < 4.1


def test_the_bound_holds_and_can_fail() -> None:
    for dtype in (F32, F16):
        call = case(tokens=6, heads=1, dtype=dtype, scale=0.3)
        bounds, want = bound(call), run(OP, call, backend="reference")
        assert bounds is not None
        got = run(OP, call)
        for one, right, off in zip(got, want, bounds, strict=True):
            assert bool(((one.double() - right.double()).abs() <= off).all())
        # gates in another order, weights of another head of the matrix, a step too far
        for wrong in (
            call._replace(r=call.r.roll(1, 0)),
            call._replace(r=call.r.mT.contiguous()),
            call._replace(bias=None),
        ):
            bad = run(OP, wrong)[0]
            assert not bool(((bad.double() - want[0].double()).abs() <= bounds[0]).all())
    assert bound(case(dtype=F64, tokens=1)) is None
