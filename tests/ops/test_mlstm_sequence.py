"""mlstm_sequence against a recurrence in float64: short sequences, states, padding, each option; and the other ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, F64, NAN, assert_right, case, exact, moved, run
from tests.ops.op_harness import same_bits
from tests.ops.test_mlstm_chunkwise import CASES
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import Unsupported

OP = "mlstm_sequence"
CONFIGS = {"default": None, "several programs": Config(BLOCK_V=8, num_warps=4)}
# token by token in the interpreter: a few tokens, of cases that a chunk is nothing to
NAMES = ("states", "one token", "gates at 15", "no normaliser", "resets", "a reset each", "24x48", "one column")
SPANS: dict[str, dict[str, Any]] = {
    "padded": {"starts": [3, 0, 8], "lens": [5, 0, 1], "batch": 3, "first": True, "return_last_states": True},
    "packed": {"batch": 1, "packed": [1, 4, 4, 8], "first": True, "return_last_states": True, "epilogue": "gate"},
}
SHORT = SPANS | {name: CASES[name] | {"tokens": min(8, CASES[name].get("tokens", 8)), "heads": 1} for name in NAMES}


@pytest.mark.parametrize("name", SHORT)
def test_cases(name: str) -> None:
    call = case(**{"tokens": 9, **SHORT[name]})
    want = exact(call, rounded=False)
    for how in CONFIGS.values():
        assert_right(call, run(OP, call, how), want)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", ["states", "padded", "packed"])
def test_cases_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Held to one rounding of the result: nothing before it is rounded."""
    call = case(dtype=dtype, gate_dtype=F32, **{"tokens": 9, **SHORT[name]})
    assert_right(call, run(OP, call), exact(call, rounded=False))


def test_steps_chunks_and_all_pairs_are_one_function() -> None:
    call = case(
        batch=1, heads=2, tokens=20, gates=(-6.0, 4.0, 2.0), dk=24, dv=48, gate_soft_cap=15.0, return_last_states=True
    )
    want = exact(call, rounded=False)
    assert_right(call, run(OP, call), want)
    for backend in ("torch", "triton"):
        assert_right(call, run("mlstm_chunkwise", call, backend=backend), want)
    b, nh, dk, dv = 1, 2, 24, 48
    state: Any = tuple(torch.zeros(b, nh, *sizes, device=DEVICE) for sizes in ((dk, dv), (dk,), (1,)))
    registry.get("mlstm_step").force("triton")
    found = []
    for t in range(20):
        now = [one[:, :, t] for one in call[:5]]
        h, state = ops.mlstm_step(*now, *state, gate_soft_cap=15.0)
        found.append(h)
    h = torch.stack(found, 2).transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(call, (h, *state), want)


def test_a_row_has_the_same_bits_in_any_batch_and_beside_padding() -> None:
    call = case(batch=2, heads=1, tokens=6, dtype=BF16, first=True, return_last_states=True, epilogue="gate")
    for config in CONFIGS.values():
        whole = run(OP, call, config)
        for row in range(2):
            one = call._replace(**{
                name: part[row : row + 1]
                for name, part in call._asdict().items()
                if isinstance(part, Tensor) and part.ndim > 1
            })  # fmt: skip
            got = run(OP, one, config)
            for mine, want in zip(got, whole, strict=True):
                assert same_bits(mine, want[row : row + 1])
            wide = {
                name: torch.cat((torch.full_like(getattr(one, name)[:, :, :3], NAN), getattr(one, name)), 2)
                for name in ("q", "k", "v", "i", "f", "output_gate")
            }
            start = torch.tensor([3], dtype=torch.int32, device=DEVICE)
            padded = run(OP, one._replace(**wide, seq_starts=start), config)
            assert not bool(padded[0][:, :, :3].any())
            for mine, want in zip((padded[0][:, :, 3:], *padded[1:]), got, strict=True):
                assert same_bits(mine, want)


@pytest.mark.parametrize("how", ["sliced", "permuted"])
def test_strides(how: str) -> None:
    call = case(dtype=F16, heads=1, tokens=6, epilogue="gate", first=True, return_last_states=True, resets=0.2)
    names = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "output_gate", "resets")
    other = call._replace(**{name: moved(getattr(call, name), how) for name in names})
    for config in CONFIGS.values():
        for one, wanted in zip(run(OP, other, config), run(OP, call, config), strict=True):
            assert same_bits(one, wanted)


def test_no_tokens_and_first_states_are_kept() -> None:
    call = case(heads=2, tokens=4, first=True, return_last_states=True)
    none = call._replace(**{name: getattr(call, name)[:, :, :0] for name in "qkvif"})
    for backend in ("triton", "torch"):
        h, *states = run(OP, none, None, backend)
        assert h.shape == (2, 2, 0, 24)
        for state, first in zip(states, call.initial, strict=True):
            assert first is not None and same_bits(state, first)
    before = [one.clone() for one in call.initial if one is not None]
    run(OP, call)
    assert all(same_bits(one, kept) for one, kept in zip(call.initial, before, strict=True))  # type: ignore[arg-type]


def test_torch_compile_and_what_the_kernel_declines() -> None:
    torch._dynamo.reset()
    backend = "eager" if DEVICE == "cpu" else "inductor"
    compiled = torch.compile(ops.mlstm_sequence, fullgraph=True, backend=backend)
    call = case(tokens=3)
    torch.testing.assert_close(compiled(*call[:5]), ops.mlstm_sequence(*call[:5]))
    with pytest.raises(Unsupported, match="float64"):
        run(OP, case(dtype=F64, tokens=2))


def test_the_bound_can_fail() -> None:
    call = case(heads=1, tokens=12, gates=(-10.0, 4.0, 1.0))
    want, right = exact(call, rounded=False), run(OP, call)
    assert_right(call, right, want)
    for wrong in (right * 1.001, right.roll(1, 2), run(OP, call._replace(f=call.f + 0.01))):
        with pytest.raises(AssertionError):
            assert_right(call, wrong, want)
