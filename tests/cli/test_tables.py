"""Tables in narrow terminals: no number is cut, and no line is longer than the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich import box
from rich.cells import cell_len
from rich.table import Table

from wavecrest import cli, records
from wavecrest.cli import _shared, profile

ROWS = [
    (
        "a bucket of a long name",
        "123.4 ms\n[dim]120.1 ms to 130.2 ms[/]",
        "1.234×",
        "attention_of_a_long_kernel 64x192",
    ),
    ("b", "96.20 µs\n[dim]96.11 µs to 96.31 µs[/]", "12.345×", "gemm 1,234,567"),
]


def table(title: str | None = None) -> Table:
    made = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title)
    made.add_column("bucket", overflow="fold", min_width=8)
    made.add_column("median\n95 % interval", justify="right", no_wrap=True)
    made.add_column("ratio", justify="right")
    made.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=40)
    for row in ROWS:
        made.add_row(*row)
    return made


@pytest.mark.parametrize("columns", [100, 80, 60, 54, 44, 30])
def test_numbers_stay_whole(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared.out, "_width", columns)
    _shared.print_table(table("a title"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    for number in ("123.4 ms", "120.1 ms to 130.2 ms", "96.20 µs", "96.11 µs to 96.31 µs", "1.234×", "12.345×"):
        # in a line, or in two where the list has it behind its title
        assert re.sub(r"\s+", " ", number) in re.sub(r"\s+", " ", " ".join(lines)), number
    assert any("a title" in line for line in lines)
    is_list = not any("bucket" in line and "ratio" in line for line in lines)
    assert is_list == (columns < 54) and ("  ratio: 1.234×" in lines) == is_list


def test_words_are_parted_only_where_they_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Table(box=None, pad_edge=False)
    for title in ("one", "two"):
        made.add_column(title, overflow="fold")
    made.add_row("matrix_instr_nonkdim=16 BLOCK_K=128", "words " * 20)
    monkeypatch.setattr(_shared.out, "_width", 40)
    _shared.print_table(made)
    assert "matrix_instr_nonkdim=16" in capsys.readouterr().out


def test_every_command_prints_its_tables_so() -> None:
    folder = Path(cli.__file__).parent
    sources = [path.read_text() for path in folder.glob("*.py") if path.name != "_shared.py"]
    assert sum("_shared.print_table(" in source for source in sources) >= 14
    assert not [line for source in sources for line in source.splitlines() if re.search(r"(?<!_)print\(table\)$", line)]


@pytest.mark.parametrize("columns", [80, 60, 44])
def test_a_profile_in_a_narrow_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared.out, "_width", columns)
    op = records.OpTime(
        name="aten::_transform_bias_rescale_qkv", category="gemm", shapes="1x32x2048x128, 64x19200 bfloat16",
        calls=1234, ms=1234.5, share=0.999, kernels=[], bound="compute", roofline_percent=9123.0,
    )  # fmt: skip
    category = records.CategoryTime(category="normalisation", ms=1234.5, share=1.0, calls=1234)
    bucket = records.BucketProfile(
        bucket="b", wall_ms=4.0, kernel_ms=3.0, idle_ms=1.0, launches=17, categories=[category], ops=[op],
        uncategorized=[],
    )  # fmt: skip
    profile._print_bucket(bucket)
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= columns
    for word in ("1x32x2048x128,", "64x19200", "bfloat16", "1234", "1234.5 ms", "99.9%", "9123% cmp !", "1234 calls"):
        assert word in text, word
    assert ("█" in text) == (columns >= 60)
