"""The tuner's checks of the mLSTM ops: bounds that every kernel keeps and no planted error passes, calls from keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import test_mlstm_chunkwise as chunkwise
from tests.ops import test_mlstm_step as steps
from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, F64, case, exact, run
from wavecrest import records
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.ops.mlstm.study.cases import example
from wavecrest.tune import admission, untuned_calls
from wavecrest.tune.candidates import Candidate

OPS = ("mlstm_chunkwise", "mlstm_sequence")
# with every option of the ops in one of them, each dtype in many
SAMPLE = {
    ("states", BF16), ("closed input gate", F32), ("closed input gate", BF16), ("gates at 15", F16),
    ("gates at -15", BF16), ("capped", F32), ("capped", F16), ("sigmoid", BF16), ("no normaliser", F16),
    ("padded", BF16), ("left padded", F32), ("packed", BF16), ("packed sigmoid", F16), ("resets", F32),
    ("norm", BF16), ("24x48", F16), ("one column", BF16), ("one token", F32),
}  # fmt: skip


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def shares(op: str, call: MlstmCall | MlstmStepCall, got: Any) -> list[float]:
    """The largest error of each result as a share of its bound."""
    known = registry.get(op)
    want = _tuple(known.reference(call))
    bounds = known.study.bound(call) if known.study.bound is not None else None
    assert isinstance(bounds, tuple) and [one.shape for one in bounds] == [one.shape for one in want]
    assert {one.dtype for one in bounds} == {F64}
    found = []
    for one, wanted, bound in zip(_tuple(got), want, bounds, strict=True):
        assert bool((bound >= 0).all()), "a bound is negative or NaN"
        off = (one.double() - wanted.double()).abs()
        assert not bool(off.isnan().any())
        found.append(float((off / bound).where(off > 0, 0.0).max()))
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("name", "dtype"), sorted(SAMPLE, key=str))
def test_kernels_keep_the_bounds(op: str, name: str, dtype: torch.dtype) -> None:
    call = case(dtype=dtype, gate_dtype=F32, **chunkwise.CASES[name])
    got = run(op, call, chunkwise.SMALL if op == "mlstm_chunkwise" else None)
    assert max(shares(op, call, got)) <= 1
    # so does PyTorch's form, and the definition in float64, rounded once
    assert max(shares(op, call, run(op, call, backend="torch"))) <= 1
    want = exact(call)
    states = [one.to(like.dtype) for one, like in zip(want.states, _tuple(got)[1:], strict=False)]
    assert max(shares(op, call, (want.h.to(DEVICE, dtype), *(one.to(DEVICE) for one in states)))) <= 1


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", ["plain", "closed input gate", "gates at -15", "capped", "sigmoid", "norm and gate"])
def test_a_step_keeps_the_bounds(name: str, dtype: torch.dtype) -> None:
    call = steps.step(**(steps.CASES[name] | {"dtype": dtype}))
    assert max(shares("mlstm_step", call, run("mlstm_step", call))) <= 1
    half = call._replace(state_dtype=F16)
    assert max(shares("mlstm_step", half, run("mlstm_step", half))) <= 1


@pytest.mark.parametrize("op", OPS)
def test_the_bounds_are_no_wider_than_what_is_known_of_the_roundings(op: str) -> None:
    """Beside the bounds of the other tests' oracle: reference and kernel together have no more than a few of them."""
    for dtype, times in ((F32, 20.0), (F16, 4.0), (BF16, 4.0)):
        call = case(dtype=dtype, gate_dtype=F32, tokens=70, batch=1, gates=(-10.0, 4.0, 1.0), return_last_states=True)
        known = registry.get(op)
        bounds = known.study.bound(call) if known.study.bound is not None else None
        assert isinstance(bounds, tuple)
        want = exact(call, rounded=op == "mlstm_chunkwise")
        for one, other in zip(bounds, (want.h_bound, *want.state_bounds), strict=True):
            assert float((one.cpu() / other).median()) < times, (op, dtype)


def planted(op: str, call: MlstmCall | MlstmStepCall, change: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tuner's verdict on a kernel whose results are changed before it sees them."""
    known = registry.get(op)
    kernel = known.backends["triton"]
    config = chunkwise.SMALL if op == "mlstm_chunkwise" else known.config_of("triton", known.key(call))

    def lying(call: Any, config: Config) -> Any:
        found = [one.clone() for one in _tuple(kernel.run(call, config))]
        change(found)
        return tuple(found) if len(found) > 1 else found[0]

    monkeypatch.setitem(known.backends, "triton", replace(kernel, run=lying, bind=None))
    row = records.TuneCandidate(backend="triton")
    admitted = admission.admit(known, Candidate("triton", config), call, admission.oracle(known, call), row)
    assert (admitted is None) == (row.status == "wrong"), row.reason
    return row


def _scaled(index: int, by: float) -> Any:
    """One element of a result, the last that is not tiny, times a number."""

    def change(found: list[Tensor]) -> None:
        one = found[index].view(-1)
        place = int((one.abs() > one.abs().median()).nonzero()[-1])
        one[place] *= by

    return change


def _rounded(index: int) -> Any:
    """A state as if it had been kept in bfloat16."""

    def change(found: list[Tensor]) -> None:
        found[index] = found[index].to(BF16).to(found[index].dtype)

    return change


WRONG: dict[str, Any] = {
    "nothing": lambda found: None,
    "an element of h": _scaled(0, 1.5),
    "an element of c": _scaled(1, 1.1),
    "an element of n": _scaled(2, 1.001),
    "m": lambda found: found[3].add_(1e-3),
    "n in bfloat16": _rounded(2),
    "m in bfloat16": _rounded(3),
    "the last token": lambda found: found[0][..., -1:, :].zero_(),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("op", [*OPS, "mlstm_step"])
def test_a_tuner_finds_what_is_wrong(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a call of bfloat16, whose tolerance alone lets most of them pass."""
    gates = (-10.0, 4.0, 1.0)
    if op == "mlstm_step":
        call: Any = steps.step(**(steps.CASES["closed input gate"] | {"dtype": BF16}))
    else:
        call = case(dtype=BF16, gate_dtype=F32, gates=gates, first=True, return_last_states=True)
    row = planted(op, call, WRONG[name], monkeypatch)
    if name == "nothing":
        kernel = run(op, call, chunkwise.SMALL if op == "mlstm_chunkwise" else None)
        assert row.of_bound == max(shares(op, call, kernel))
        assert row.status == "timed" and row.of_bound is not None and row.of_bound <= 1
    else:
        assert row.status == "wrong", row.reason
        if "element" in name or "bfloat16" in name:
            assert "beyond the bound" in row.reason or "result" in row.reason


def test_a_state_in_bfloat16_is_wrong_where_no_matrix_unit_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """c of a step and of a sequence is float32; that of chunks has the rounding of their weighted keys."""
    for op in ("mlstm_sequence", "mlstm_step"):
        call: Any = steps.step(dtype=BF16) if op == "mlstm_step" else case(dtype=BF16, return_last_states=True)
        with pytest.MonkeyPatch.context() as patched:
            row = planted(op, call, _rounded(1), patched)
            assert row.status == "wrong" and row.reason.startswith("result 1: ") and "beyond the bound" in row.reason


@pytest.mark.parametrize("op", OPS)
def test_bounds_begin_anew_with_a_document_and_pass_by_padding(op: str) -> None:
    """Tokens behind a reset, or beside padding, are judged as if they stood alone."""
    bound = registry.get(op).study.bound
    assert bound is not None
    call = case(tokens=40, batch=1, return_last_states=True, epilogue="gate", dtype=BF16)
    part = {name: getattr(call, name)[:, :, 25:] for name in ("q", "k", "v", "i", "f", "output_gate")}
    alone = bound(call._replace(**part))
    resets = torch.zeros(1, 40, dtype=torch.bool, device=DEVICE)
    resets[0, 25] = True
    starts = torch.tensor([25], dtype=torch.int32, device=DEVICE)
    for more in ({"resets": resets}, {"seq_starts": starts}):
        h, *states = bound(call._replace(**more))
        for one, want in zip((h[:, :, 25:], *states), alone, strict=True):
            torch.testing.assert_close(one, want, rtol=1e-9, atol=0.0)
    part = {name: getattr(call, name)[:, :, :15] for name in part}
    lens = torch.tensor([15], dtype=torch.int32, device=DEVICE)
    h, *states = bound(call._replace(seq_lens=lens))
    for one, want in zip((h[:, :, :15], *states), bound(call._replace(**part)), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-9, atol=0.0)
    assert not bool(h[:, :, 15:].any())
    # and the state of the document before is not: it would be another bound
    h, *states = bound(call)
    assert not any(torch.allclose(one, want, rtol=1e-3, atol=0.0) for one, want in zip(states, alone[1:], strict=True))


def test_no_bound_for_float64() -> None:
    for op, call in ((OPS[0], case(dtype=F64)), (OPS[1], case(dtype=F64)), ("mlstm_step", steps.step(dtype=F64))):
        known = registry.get(op)
        assert known.study.bound is not None and known.study.bound(call) is None


def test_gates_that_are_closed_or_forget_everything_have_finite_bounds() -> None:
    call = case(tokens=12, return_last_states=True)
    call.i[:, :, 3] = float("-inf")
    call.f[:, :, 7] = float("-inf")
    for op in OPS:
        got = run(op, call, chunkwise.SMALL if op == OPS[0] else None)
        assert max(shares(op, call, got)) <= 1


KEYS: dict[str, dict[str, Any]] = {
    "model": {"return_last_states": True, "epilogue": True, "gate_soft_cap": 15.0},
    "norm alone": {"epilogue": "norm"},
    "states": {"first": True, "return_last_states": True, "state_dtype": F16, "chunk_size": 64},
    "sigmoid": {"input_gate": "sigmoid", "normalize": False, "first": True},
    "invariant": {"batch_invariant": True, "return_last_states": True},
    "packed": {"packed": 3, "resets": True},
    "padded": {"padded": True, "batch_invariant": True},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", KEYS)
def test_calls_are_made_from_keys(op: str, name: str) -> None:
    options = dict(KEYS[name])
    packed, alone = options.pop("packed", 0), options.get("epilogue") == "norm"
    if packed:
        options["cu_seqlens"] = torch.empty(packed + 1, dtype=torch.int32, device="meta")
    if options.pop("padded", False):
        options["seq_lens"] = torch.empty(3, dtype=torch.int32, device="meta")
    rows = 1 if packed else 3
    if options.pop("resets", False):
        options["resets"] = torch.empty(rows, 40, dtype=torch.bool, device="meta")
    given = example((rows, 2, 40, 16, 24), BF16, "meta", **options)
    given = given._replace(output_gate=None) if alone else given
    known = registry.get(op)
    parts = untuned_calls.parts_of(known, known.key(given))
    # `call` itself holds the key of what it made against the parts
    made = untuned_calls.call(known, parts, "cpu")
    assert made.tokens >= given.tokens and set(parts) == set(lookup.fields_of(known))
    if packed:
        lens = made.cu_seqlens.diff().tolist() if made.cu_seqlens is not None else []
        assert len(lens) == packed and sum(lens) == made.tokens and max(lens) - min(lens) <= 1


def test_calls_of_steps_are_made_from_keys() -> None:
    known = registry.get("mlstm_step")
    for call in (
        steps.step(dtype=BF16, gate_soft_cap=15.0, epilogue="gate"), steps.step(epilogue="norm"),
        steps.step(input_gate="sigmoid", normalize=False), steps.step(dtype=F16)._replace(state_dtype=F16),
    ):  # fmt: skip
        untuned_calls.call(known, untuned_calls.parts_of(known, known.key(call)), "cpu")


def test_calls_inside_torch_compile_are_none() -> None:
    known = registry.get(OPS[0])
    parts = untuned_calls.parts_of(known, known.key(case())) | {"tokens": 0, "batch": 0}
    with pytest.raises(registry.InvalidArgument, match="makes no call from this key"):
        untuned_calls.call(known, parts, "cpu")
