"""Programs of one row that wait for each other, or count each other, in machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compile.conftest import answer

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
QUESTIONS = (("waiting.py", *ARCHS, "sm_90"),)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer(*QUESTIONS[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_waiting_loop_loads(found: dict[str, Any], arch: str) -> None:
    """It looks again in every turn of its loop, past its own caches."""
    # a word of 64 bits, with the bits that make the load coherent with other compute units
    words = re.compile(r"_load_(?:dwordx2|b64) .*(?:sc0 sc1|glc|scope:SCOPE_(?:DEV|SYS))")
    loops = found[arch]["loads"]
    assert any(words.search(text) for loop in loops for text in loop), loops


@pytest.mark.parametrize("arch", ARCHS)
def test_each_wave_waits_for_what_it_exchanged_before_it_is_counted(found: dict[str, Any], arch: str) -> None:
    """A barrier alone does not wait for stores: one of another wave could come behind the count."""
    code = found[arch]["counted"]
    swap, count = (re.search(rf"global_atomic_{name}", code) for name in ("swap", "add"))
    assert swap and count and swap.start() < count.start()
    barrier = re.compile(r"\bs_barrier\b|\bs_barrier_signal\b").search(code, swap.start())
    assert barrier and barrier.start() < count.start()
    between = code[swap.start() : barrier.start()]
    assert re.search(r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0", between), between
    # the count releases what this compute unit has written, and sees what others have
    after = code[count.start() :]
    assert re.search(r"buffer_inv|buffer_wbinvl1|buffer_gl0_inv|global_inv", after), "nothing is looked at anew"
    if arch in ("gfx942", "gfx950"):
        assert "buffer_wbl2 sc1" in code[barrier.start() : count.start()]


def test_on_nvidia_the_count_is_behind_a_barrier_and_orders_both_sides(found: dict[str, Any]) -> None:
    code = found["sm_90"]["counted"]
    count = re.search(r"\bATOMG?\.\S*ADD\S*STRONG\.GPU", code)
    assert count
    stores = [one.start() for one in re.finditer(r"\bSTG\b", code[: count.start()])]
    between = code[stores[-1] : count.start()]
    assert re.search(r"\bBAR\.SYNC", between) and re.search(r"\bMEMBAR\S*GPU", between), between
    assert re.search(r"\bCCTL\.IVALL", code[count.start() :]), "a first-level cache keeps what it had"


@pytest.mark.parametrize("arch", [*(arch for arch in ARCHS if arch.startswith("gfx9")), "sm_90"])
def test_words_are_exchanged_where_all_programs_see_them_without_a_fence(found: dict[str, Any], arch: str) -> None:
    look, publish = {
        "gfx90a": (r"global_load_dword(?:x2)? .*\bglc$", r"global_atomic_swap(?:_x2)? "),
        "sm_90": (r"LDG\.E\.128\.STRONG\.SYS ", r"ATOMG\.E\.EXCH\.(?:64\.)?STRONG\.GPU "),
    }.get(arch, (r"buffer_load_dwordx4 .*\bsc0 sc1$", r"buffer_store_dword(?:x2)? .*\bsc0 sc1$"))
    assert len(found[arch]["exchanged"]) == 2
    for one in found[arch]["exchanged"]:
        assert one["waits"] and all(re.search(look, text) for text in one["waits"]), one["waits"]
        # those of its loop once more: the first look
        assert sum(bool(re.search(look, text)) for text in one["all"]) == 2 * len(one["waits"])
        assert any(re.search(publish, text) for text in one["all"])
        fences = re.compile(r"_inv|_wb|MEMBAR|CCTL|FENCE|ERRBAR")
        assert not any(fences.search(text) for text in one["all"]), one["all"]
