"""Verdicts on two sides of the same kernels, with made-up facts."""

from __future__ import annotations

from typing import Any

import pytest

from wavecrest.errors import InvalidArgument
from wavecrest.hardware import cpu
from wavecrest.isa import compare
from wavecrest.isa.facts import IsaRecord, KernelFacts, Row
from wavecrest.records import provenance

LOOP: dict[str, Any] = {
    "instructions": 200, "matrix": {"v_mfma": 16}, "loads": {16: 8}, "stores": {}, "lds_loads": {16: 16},
    "lds_stores": {16: 4}, "scratch": 0, "barriers": 2, "waits": 8, "drains": 1,
}  # fmt: skip


def facts(loop: dict[str, Any] | None = LOOP, **changes: Any) -> KernelFacts:
    values: dict[str, Any] = {
        "warps": 4, "vgpr": 128, "agpr": 64, "sgpr": 30, "spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 32768,
        "waves": 2, "most_waves": 8, "limit": "vgpr", "register_waves": 2, "llvm_waves": 2, "code_bytes": 4000,
        "code_hash": "0", "kernel": LOOP | {"instructions": 900}, "loops": 1, "loop_scratch": 0, "hot": loop,
    }  # fmt: skip
    return KernelFacts.model_validate(values | changes)


def row(facts: KernelFacts | None = None, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "target": "op", "case": "N=64", "arch": "gfx942", "config": {"num_warps": 4}, "chosen": "shipped",
        "kernel": "_kernel",
    }  # fmt: skip
    return Row(**(values | changes), facts=facts)


def record(*rows: Row) -> IsaRecord:
    return IsaRecord(header=provenance.header(cpu(), evidence="compiled"), target="op", rows=list(rows))


def diff(base: KernelFacts, new: KernelFacts) -> compare.KernelDiff:
    return compare.compare(row(base), row(new))


@pytest.mark.parametrize(
    ("new", "verdict", "words"),
    [
        # spills
        ({"scratch": 24, "loop_scratch": 24, "spills": 6}, "regression",
         "spills in a loop appeared: 0 → 24 accesses of scratch memory"),
        ({"scratch": 24, "spills": 6}, "watch",
         "spills appeared outside of the loops: 0 → 24 bytes of scratch memory a lane"),
        ({"scratch": 24, "loops": 0, "loop_scratch": 0, "loop": None}, "regression",
         "spills appeared: 0 → 24 bytes of scratch memory a lane"),
        ({"scratch": 24, "loop_scratch": None}, "regression", "spills appeared: 0 → 24 bytes"),
        # occupancy
        ({"waves": 1, "vgpr": 256}, "regression", "occupancy 2 → 1 waves per SIMD, limited by vgpr"),
        ({"waves": 0, "limit": "lds"}, "regression", "cannot be launched: occupancy 2 → 0 waves per SIMD"),
        ({"waves": 1.75}, "watch", "occupancy 2 → 1.75 waves per SIMD, limited by vgpr"),
        ({"waves": 1.5}, "regression", "occupancy 2 → 1.5 waves per SIMD, limited by vgpr"),
        ({"waves": 4}, "better", "occupancy 2 → 4 waves per SIMD"),
        # a wider machine: a quarter of its waves is as before
        ({"waves": 4, "most_waves": 16}, "changed", "no change that matters"),
        ({"waves": 2, "most_waves": 16}, "regression", "occupancy 2 of 8 → 2 of 16 waves per SIMD"),
        # matrix instructions
        ({"loop": LOOP | {"matrix": {}}}, "regression", "the hot loop has no matrix instructions any more"),
        ({"loop": LOOP | {"matrix": {"v_mfma_16": 16}}}, "changed", "no change that matters"),
        # widths
        ({"loop": LOOP | {"loads": {4: 32}}}, "regression",
         "global loads in the hot loop narrowed from 128 to 32 bits"),
        ({"loop": LOOP | {"loads": {16: 8, 2: 60}}}, "watch", "global loads in the hot loop narrowed on average"),
        ({"loop": LOOP | {"lds_loads": {8: 32}}}, "watch", "LDS loads in the hot loop narrowed from 128 to 64 bits"),
        ({"loop": None, "kernel": LOOP | {"instructions": 900, "lds_loads": {4: 64}}}, "changed",
         "no change that matters"),
        # what is left are scales: the tile goes from memory into LDS by another way
        ({"loop": LOOP | {"lds_stores": {1: 4}}}, "changed", "no change that matters"),
        ({"loop": LOOP | {"loads": {0: 8}}}, "changed", "no change that matters"),
        ({"loop": None, "kernel": LOOP | {"instructions": 900, "loads": {8: 16}}}, "regression",
         "global loads narrowed from 128 to 64 bits"),
        # waits and size
        ({"loop": LOOP | {"drains": 4}}, "watch", "the hot loop waits for every load under way: 1 → 4 times a pass"),
        ({"loop": LOOP | {"drains": 0}}, "better", "the hot loop does not wait for every load under way any more"),
        ({"loop": LOOP | {"instructions": 900}}, "watch", "the hot loop has 200 → 900 instructions, 4.5 times as many"),
        # unrolled: twice the instructions do twice the work
        ({"loop": LOOP | {"instructions": 400, "matrix": {"v_mfma": 32}, "loads": {16: 16}}}, "changed",
         "no change that matters"),
        ({"code_bytes": 20000}, "watch", "4,000 → 20,000 bytes of code"),
        ({"code_bytes": 12000}, "changed", "no change that matters"),
        # figures that say nothing alone
        ({"vgpr": 120, "sgpr": 40, "lds": 16384}, "changed", "no change that matters"),
        ({"code_hash": "1"}, "same", "no change"),
    ],
)  # fmt: skip
def test_verdicts(new: dict[str, Any], verdict: str, words: str) -> None:
    found = diff(facts(), facts(**new))
    assert found.verdict == verdict and found.words[0].startswith(words), found
    assert all((change.severity == "note") == (not change.text) for change in found.changes)
    # turned around, what became worse became better, or is not judged
    back = diff(facts(**new), facts())
    assert (back.verdict == "regression") <= (verdict == "better"), back


def test_the_worst_comes_first_and_nothing_is_lost() -> None:
    found = diff(facts(), facts(LOOP | {"drains": 3}, scratch=24, loop_scratch=9, vgpr=256, spills=6))
    assert [text.partition(":")[0] for text in found.words] == [
        "spills in a loop appeared", "spills appeared", "the hot loop waits for every load under way",
    ]  # fmt: skip
    assert {(change.fact, change.base, change.new) for change in found.changes} == {
        ("scratch accesses in loops", 0, 9), ("scratch", 0, 24), ("full waits in the hot loop", 1, 3),
        ("VGPR", 128, 256), ("spilled registers", 0, 6),
    }  # fmt: skip


def test_records_from_before_some_figures_are_compared_by_the_others() -> None:
    old = LOOP | {"lds_loads": None, "lds_stores": None, "scratch": None}
    found = diff(facts(old, loop_scratch=None), facts())
    assert found.verdict == "same" and found.same_code


def test_kernels_that_do_not_compile() -> None:
    good, bad = row(facts()), row(reason="does not compile: out of registers")
    broken = compare.compare(good, bad)
    assert broken.verdict == "regression" and broken.words == [
        "does not compile any more: does not compile: out of registers"
    ]
    assert compare.compare(bad, good).words == ["compiles now"]
    assert compare.compare(bad, bad).verdict == "same" and not compare.compare(bad, bad).same_code
    assert compare.compare(bad, row(reason="another")).verdict == "changed"


def test_kernels_are_matched_by_op_case_and_architecture() -> None:
    old = record(*(row(facts(), arch=arch, case=case) for arch in ("gfx942", "gfx950") for case in ("a", "b")))
    new = record(*(row(facts(), arch=arch, case=case) for arch in ("gfx950", "gfx90a") for case in ("b", "c")))
    shared, only_base, only_new = compare.kernels(old, new)
    assert [(one.case, one.arch) for one in shared] == [("b", "gfx950")]
    assert only_base == ["op a on gfx942", "op b on gfx942", "op a on gfx950"]
    assert only_new == ["op c on gfx950", "op b on gfx90a", "op c on gfx90a"]


def test_one_architecture_and_one_target_a_side_need_no_common_name() -> None:
    (one,), _, _ = compare.kernels(record(row(facts())), record(row(facts(waves=1), arch="gfx950", target="f.py:g")))
    assert (one.arch, one.new_arch, one.target, one.verdict) == ("gfx942", "gfx950", "f.py:g", "regression")


def test_what_cannot_be_matched() -> None:
    several = record(row(facts()), row(facts(), chosen="num_warps=8"))
    with pytest.raises(InvalidArgument, match=r"the new side has op N=64 .* \(shipped, num_warps=8\)"):
        compare.kernels(record(row(facts())), several)
    with pytest.raises(InvalidArgument, match="no kernel in common"):
        compare.kernels(record(row(facts())), record(row(facts(), case="N=65")))


def test_a_side_in_words() -> None:
    made = record(row(facts(), chosen="num_warps=8"))
    made = made.model_copy(update={"variables": {"A": "1"}, "llvm": ["x-y"]})
    words = compare.side(made, "…/other").words
    assert words.startswith("triton ") and words.endswith(", A=1, LLVM's x-y, num_warps=8, …/other")
    assert "shipped" not in compare.side(record(row(facts())), "here").words
