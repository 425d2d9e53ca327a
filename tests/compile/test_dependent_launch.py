"""Kernels that start while the one before them runs wait before they read or write anything: machine code of sm_90.

A product split over K, attention split over keys or a step of the mLSTM is two launches, the second of which starts so;
the first ones of a decode step may, where their configuration says it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.conftest import answer
from tests.compile.dependent import ACCESSES, ALLOWS, FETCHES, LEAVES, WAITS

QUESTIONS = (("dependent.py",),)

FIRST = (
    "triton _tile_kernel", "triton_stream_k _stream_k_kernel", "triton_gemv _multiply_kernel",
    "triton _decoding_kernel", "triton _mla_kernel", "triton _mlstm_step_kernel", "triton _moe_align_kernel",
)  # fmt: skip
SECOND = (
    "triton _sum_kernel", "triton_stream_k _join_kernel", "triton_gemv _sum_kernel", "triton _joining_kernel",
    "triton _mla_join_kernel", "triton _mlstm_norm_kernel", "triton _moe_gate_up_kernel", "triton _moe_down_kernel",
    "triton _moe_combine_kernel",
)  # fmt: skip
EARLY = (
    "rows _multiply_kernel", "gated rows _multiply_kernel", "normed rows _multiply_kernel", "tiles _tile_kernel",
    "gated tiles _tile_kernel", "descriptors _tile_kernel", "words _words_kernel", "normed words _words_kernel",
    "digits _digits_kernel", "step _mlstm_step_kernel", "norm _row_kernel",
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return answer("dependent.py")  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", FIRST)
def test_the_first_lets_the_second_start(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[f"sm_90 {kernel}"]
    assert ALLOWS.search(found["code"]) and not WAITS.search(found["code"])
    # it waits for what is before it, as any kernel
    assert not found["option"]


@pytest.mark.parametrize("kernel", SECOND)
def test_the_second_touches_nothing_before_it_has_waited(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[f"sm_90 {kernel}"]
    assert found["option"]
    waits_first(found["code"])


@pytest.mark.parametrize("kernel", EARLY)
def test_those_that_are_told_to_start_early_wait_first(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[f"early {kernel}"]
    assert found["option"] and ALLOWS.search(found["code"])
    waits = waits_first(found["code"])
    # tiles by descriptors have nothing to fetch by address
    assert bool(FETCHES.search(found["code"], 0, waits)) == (kernel != "descriptors _tile_kernel")
    assert not FETCHES.search(found["code"], waits)


def waits_first(code: str) -> int:
    """Where a kernel waits: every program, once, before it touches memory or may end."""
    found = list(WAITS.finditer(code))
    assert len(found) == 1
    start = found[0].start()
    before, line = code[:start], code[code.rindex("\n", 0, start) : start]
    assert "@" not in line and not ACCESSES.search(before) and not LEAVES.search(before)
    assert ACCESSES.search(code, start)
    return start


def test_so_does_the_append_by_default_which_fetches_nothing(kernels: dict[str, Any]) -> None:
    found = kernels["early append _append_kernel"]
    assert found["option"] and ALLOWS.search(found["code"]) and not FETCHES.search(found["code"])
    waits_first(found["code"])


@pytest.mark.parametrize("kernel", FIRST + SECOND)
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_others_have_no_such_launches(kernels: dict[str, Any], arch: str, kernel: str) -> None:
    # which their assembler would not take
    found = kernels[f"{arch} {kernel}"]
    assert not found["option"] and not ALLOWS.search(found["code"]) and not WAITS.search(found["code"])
    assert found["lines"] > 100
