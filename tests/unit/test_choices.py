"""Choices that hold inside a `with`: what runs inside and outside, and what is left behind."""

from __future__ import annotations

import threading

import pytest
import torch

from wavecrest.dispatch import registry
from wavecrest.dispatch.choices import Choices
from wavecrest.dispatch.op import Op
from wavecrest.ops._gemm.call import GemmCall, linear_call

pytestmark = pytest.mark.usefixtures("unchosen")


@pytest.fixture
def op() -> Op:
    return registry.get("gemm")


def call(rows: int, columns: int = 8) -> GemmCall:
    return linear_call(torch.randn(rows, 16), torch.randn(columns, 16))


def test_they_hold_inside_and_not_outside(op: Op, unchosen: list[tuple[int, ...]]) -> None:
    chosen = Choices(op, {op.key(call(1)): ("planted", None)}, "found here")
    op(call(1))
    assert len(unchosen) == 0
    for times in (1, 2):
        with chosen:
            op(call(1))
            assert len(unchosen) == times
            decision = op.decide(call(1))
            assert (decision.backend, decision.source, decision.reason) == ("planted", "exact", "found here")
            # calls with another key run as outside
            op(call(1, 24))
            assert len(unchosen) == times
        op(call(1))
        assert len(unchosen) == times and op.decide(call(1)).backend != "planted"


def test_they_go_before_pins_which_are_back_afterwards(op: Op) -> None:
    op.pin(op.key(call(1)), "reference", None, "exact", "a plan's")
    with Choices(op, {op.key(call(1)): ("planted", None)}, "found here"):
        assert op.decide(call(1)).backend == "planted"
    assert (op.decide(call(1)).backend, op.decide(call(1)).reason) == ("reference", "a plan's")


def test_inner_ones_go_before_outer_ones(op: Op) -> None:
    keys = [op.key(call(1)), op.key(call(1, 24))]
    with Choices(op, dict.fromkeys(keys, ("planted", None)), "outer"):
        with Choices(op, {keys[0]: ("reference", None)}, "inner"):
            assert [op.decide(call(1, columns)).reason for columns in (8, 24)] == ["inner", "outer"]
        assert [op.decide(call(1, columns)).reason for columns in (8, 24)] == ["outer", "outer"]


def test_an_error_inside_leaves_nothing_behind(op: Op) -> None:
    with pytest.raises(ZeroDivisionError), Choices(op, {op.key(call(1)): ("planted", None)}, "found here"):
        raise ZeroDivisionError
    assert op.decide(call(1)).backend != "planted"


def test_what_was_decided_for_other_calls_is_told_outside(op: Op) -> None:
    op.forget()
    with Choices(op, {op.key(call(1)): ("planted", None)}, "found here"):
        op(call(1))
        op(call(1, 24))
    assert [decision.key for decision, _ in op.decisions()] == [op.key(call(1, 24))]


def test_decisions_inside_are_made_once(
    op: Op, monkeypatch: pytest.MonkeyPatch, unchosen: list[tuple[int, ...]]
) -> None:
    chosen = Choices(op, {op.key(call(1)): ("planted", None)}, "found here")
    made: list[object] = []
    decide = Op._decide
    monkeypatch.setattr(Op, "_decide", lambda self, key, call: made.append(key) or decide(self, key, call))
    for _ in range(3):
        with chosen:
            op(call(1))
    assert made == [op.key(call(1))]
    # until decisions are dropped, as by rows that were measured since
    op.forget()
    with chosen:
        op(call(1))
    assert len(made) == 2 and len(unchosen) == 4


def test_one_thread_at_a_time_has_them(op: Op) -> None:
    first, second = (Choices(op, {op.key(call(1)): ("planted", None)}, name) for name in ("first", "second"))
    seen: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with first:
            inside.set()
            leave.wait(20)
            seen.append(op.decide(call(1)).reason)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    threading.Timer(0.1, leave.set).start()
    with second:
        seen.append(op.decide(call(1)).reason)
    thread.join(20)
    assert seen == ["first", "second"] and op.decide(call(1)).backend != "planted"
