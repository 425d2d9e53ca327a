"""The model of the order of attention's programs: what it takes from the kernel, and small cases by hand."""

from __future__ import annotations

import pytest
from benchmarks import causal_order
from benchmarks.causal_order import Filled, Program, Shape

import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS

HEAD_AFTER_HEAD = Config(BLOCK_M=128, BLOCK_N=32, num_warps=4, num_stages=2)


def test_programs_places_and_reads_by_hand() -> None:
    """Three programs in two places: the third begins when the shorter one ends; a cache of two tiles."""
    programs = [Program(3, 40.0, 0), Program(1, 20.0, 1), Program(2, 30.0, 0)]
    assert [begin for begin, _ in causal_order.spans(programs, 2)] == [0.0, 0.0, 20.0]
    # 0: head 0 tile 0, head 1 tile 0; 10 and 20: head 0 tiles 1 and 2; 20 and 30: its tiles 0 and 1, forgotten
    assert causal_order.filled(programs, 2, 10.0, 2) == Filled(50.0, 6, 2)
    assert causal_order.filled(programs, 2, 10.0, 9) == Filled(50.0, 4, 2)


def test_a_long_tile_of_queries_goes_with_a_short_one() -> None:
    programs = [Program(steps, steps * 2.0 + 1, head) for head in (0, 1) for steps in (6, 4, 2)]
    assert causal_order.paired(programs, 2.0, 1.0) == [
        Program(8, 18.0, 0), Program(4, 9.0, 0), Program(8, 18.0, 1), Program(4, 9.0, 1)
    ]  # fmt: skip


@pytest.mark.skipif(not _triton.interpreted, reason="the model runs in Triton's interpreter")
@pytest.mark.parametrize("shape", [Shape(9, 3, (300,)), Shape(4, 2, (300, 70))], ids=str)
def test_every_program_of_the_launch_is_in_the_model(shape: Shape) -> None:
    """In the kernel's order with sections and without: each tile of queries of each head, with the keys it sees."""
    tiles = {300: [2, 4, 5], 70: [2]}
    want = sorted(
        (steps, (at * shape.heads + head) * shape.kv_heads // shape.heads)
        for at, tokens in enumerate(shape.tokens)
        for head in range(shape.heads)
        for steps in tiles[tokens]
    )
    for mib in (0, 1):
        config = Config(**(HEAD_AFTER_HEAD.kwargs | {"SECTION_MIB": mib}))
        dies, section = causal_order.dies(shape, config, ARCHS["gfx942"], 1.0, 5.0)
        programs = [program for one in dies for program in one]
        assert len(dies) == 8 and (section > 1) == (mib > 0)
        assert sorted((program.steps, program.kv_head) for program in programs) == want
        assert all(program.length == program.steps + 5.0 for program in programs)


@pytest.mark.skipif(not _triton.interpreted, reason="the model runs in Triton's interpreter")
def test_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The default order is nearer to the bound, and an architecture can be named."""
    monkeypatch.setattr(causal_order, "SHAPES", (Shape(16, 16, (1024,)),))
    monkeypatch.setattr(causal_order, "RESIDENT", 1)
    for name in ("gfx942", "gfx950"):
        causal_order.main(568, 2519, name)
        text = capsys.readouterr().out
        assert f"*model*, {name}: 8 dies" in text
        row = text.splitlines()[-1].split()
        assert row[:3] == ["16", "16", "1024"] and len(row) == 15
        assert 0 < float(row[3]) <= float(row[7]) <= float(row[14]) <= 1


def test_without_the_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", False)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1"):
        causal_order.main(1.0, 1.0)
