"""slstm_step against weighted sums in float64, and against the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mlstm_harness import moved
from tests.ops.op_harness import same_bits
from tests.ops.slstm_harness import BF16, C_CODE, DEVICE, F16, F32, F64, LIMITS, NAN, assert_right, case, exact, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.slstm.call import SlstmStepCall
from wavecrest.ops.slstm.step.config import default
from wavecrest.ops.slstm.step.study.space import space
from wavecrest.ops.slstm.study.bound import step_bound

OP = "slstm_step"
CONFIGS = {"default": None, "several programs": Config(BLOCK_B=16, BLOCK_N=16, BLOCK_K=16, STAGES=2, num_warps=1)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "exponential forget gate": {"forget_gate": "exp"},
    "without bias": {"bias": False},
    "40 columns": {"dim": 40},
    "one column": {"dim": 1, "heads": 3},
    "300 columns": {"dim": 300, "heads": 1},
    "17 rows": {"batch": 17},
    "gates at ±10⁴": {"gates": 1e4},
}


def step(**options: Any) -> SlstmStepCall:
    """A step with states that a sequence of tokens could have left, and an element without history."""
    call = case(**{**options, "tokens": 1, "first": True})
    return SlstmStepCall(call.x[:, 0], call.r, *call.initial, call.bias, call.forget_gate)  # type: ignore[arg-type]


def assert_step(call: SlstmStepCall, got: Any) -> None:
    sequence = call.sequence()
    y, states = exact(sequence)
    assert got[0].shape == call.h.shape
    assert_right(sequence, (got[0][:, None].contiguous(), *got[1:]), (y, states))


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    call = step(**CASES[name])
    for config in CONFIGS.values():
        assert_step(call, run(OP, call, config))
    for backend in (*C_CODE, "torch"):
        assert_step(call, run(OP, call, backend=backend))


def test_cases_in_other_dtypes() -> None:
    for dtype in (F16, BF16):
        call = step(dtype=dtype, dim=40)
        for config in CONFIGS.values():
            assert_step(call, run(OP, call, config))
        for backend in C_CODE:
            assert_step(call, run(OP, call, backend=backend))
    for dtype in (F64, F16):
        assert_step(step(dtype=dtype), run(OP, step(dtype=dtype), backend="torch"))


def test_steps_are_the_sequence() -> None:
    call = case(tokens=5, heads=1, dim=24)
    registry.get(OP).force("triton")
    state: tuple[Tensor, ...] = tuple(torch.zeros(2, 1, 24, device=DEVICE) for _ in range(4))
    found = []
    for t in range(5):
        h, state = ops.slstm_step(call.x[:, t], call.r, *state, call.bias)
        found.append(h)
    got = (torch.stack(found, 1), *state)
    assert_right(call, got)
    for one, want in zip(got, run("slstm_sequence", call), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-5, atol=LIMITS[F32])
    # where a sequence is a launch for each token it is the same kernel
    if DEVICE == "cpu":
        launched = run("slstm_sequence", call, backend="triton_steps")
        assert all(same_bits(one, want) for one, want in zip(got, launched, strict=True))
    for backend in C_CODE:
        registry.get(OP).force(backend)
        state = tuple(torch.zeros(2, 1, 24, device=DEVICE) for _ in range(4))
        for t in range(5):
            found[t], state = ops.slstm_step(call.x[:, t], call.r, *state, call.bias)
        whole = run("slstm_sequence", call, backend=backend)
        assert all(same_bits(one, want) for one, want in zip((torch.stack(found, 1), *state), whole, strict=True))


@pytest.mark.usefixtures("sums_by_row")
def test_a_row_has_the_same_bits_in_any_batch_and_a_nan_stays_in_its_row_and_head() -> None:
    call = step(batch=18, dtype=F16, dim=40)
    for backend, config in (*(("triton", one) for one in CONFIGS.values()), *((one, None) for one in C_CODE)):
        whole = run(OP, call, config, backend)
        for row in (0, 15, 17):
            part = {name: getattr(call, name)[row : row + 1] for name in ("x", "h", "c", "n", "m")}
            got = run(OP, call._replace(**part), config, backend)
            assert all(same_bits(mine, want[row : row + 1]) for mine, want in zip(got, whole, strict=True))
        h = call.h.clone()
        h[3, 1, 7] = NAN
        for one in run(OP, call._replace(h=h), config, backend):
            lost = one.isnan()
            assert bool(lost[3, 1].all()) and int(lost.sum()) == 40


@pytest.mark.parametrize("how", ["sliced", "permuted"])
def test_strides(how: str) -> None:
    call = step(dtype=F16)
    names = ("x", "r", "h", "c", "n", "m", "bias")
    other = call._replace(**{name: moved(getattr(call, name), how) for name in names})
    for backend in ("triton", *C_CODE):
        got = run(OP, other, backend=backend)
        assert_step(call, got)
        # on a GPU other strides are other code, which may join other products and sums
        if DEVICE == "cpu":
            assert all(same_bits(one, want) for one, want in zip(got, run(OP, call, backend=backend), strict=True))


def test_what_is_refused() -> None:
    call = step()
    with pytest.raises(Unsupported, match="float64"):
        run(OP, step(dtype=F64))
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"n": call.n.half()}, "n must be float32"),
        ({"c": call.c[:1]}, "c must be"),
        ({"x": call.x[0]}, r"x must be .*\[B, 4, NH, D\]"),
        ({"forget_gate": None}, "forget_gate is sigmoid or exp"),
    )
    for changed, words in wrong:
        with pytest.raises(InvalidArgument, match=words):
            registry.get(OP)(call._replace(**changed))


def test_configurations_and_the_bound() -> None:
    found = list(space(256, ARCHS["gfx942"]))
    assert found[0] == default(256, ARCHS["gfx942"]) and len(found) == len(set(map(str, found)))
    call = step(dtype=F16, scale=0.3)
    bounds, want = step_bound(call), run(OP, call, backend="reference")
    assert bounds is not None and step_bound(step(dtype=F64)) is None
    right, wrong = run(OP, call), run(OP, call._replace(r=call.r.mT))
    assert all(
        bool(((a.double() - b.double()).abs() <= off).all()) for a, b, off in zip(right, want, bounds, strict=True)
    )
    assert not bool(((wrong[0].double() - want[0].double()).abs() <= bounds[0]).all())
