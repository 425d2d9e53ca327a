from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.lookup import UNLISTED
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import LAUNCH_OPTIONS, Config, Database, Row, database
from wavecrest.errors import InvalidArgument, OutputError, TableError
from wavecrest.isa import survey

FIELDS = ("rows", "columns", "dtype", "bias", "packed")
RECORDS = Path(__file__).parents[2] / "evidence"
TILES = Config(num_warps=4, BLOCK_M=64)
HEADER = "rows,columns,dtype,bias,packed,backend,config,us,native_us,record\n"
EVIDENCE = ",default_us,error,device,units,versions,date,commit,origin,detail"
# a file from before rows had evidence
LINE = "16,4096,bfloat16,,true,triton,BLOCK_M=64 num_warps=4,12.3,15.0,h200/a.json\n"


def row(*key: Any, backend: str = "triton", config: Config | None = TILES, us: float = 12.3, **changes: Any) -> Row:
    made = Row(key or (16, 4096, "bfloat16", None, True), backend, config, us, 15.0, "h200/a.json")
    return replace(made, **changes)


def written(path: Path, *rows: Row) -> str:
    database.write(path, FIELDS, rows)
    return path.read_bytes().decode()


def test_the_format(tmp_path: Path) -> None:
    text = HEADER.replace("\n", f"{EVIDENCE}\n") + LINE.replace("\n", ",,,,,,,,,\n")
    assert written(tmp_path / "a.csv", row()) == text
    assert database.read(tmp_path / "a.csv", FIELDS) == {(16, 4096, "bfloat16", None, True): row()}


def test_files_from_before_rows_had_evidence_are_read_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + LINE)
    rows = database.read(path, FIELDS)
    assert rows == {(16, 4096, "bfloat16", None, True): row()}
    assert written(path, *rows.values()).splitlines()[0].endswith(EVIDENCE)
    assert database.read(path, FIELDS) == rows


def test_what_is_written_is_read_with_its_types(tmp_path: Path) -> None:
    keys = [
        (0, -1, "a", None, False), (1, 2**40, "a,b", "x", True), (True, 2, 'say "a"', None, False),
        (None, 10, "two\nlines", "1\r\n2", 1), (3, 9, "007", "True", 0), (3, 8, " space ", None, 0),
        (3, 9, "µ", "-0", 0),
    ]  # fmt: skip
    rows = [row(*key, us=0.001 + index) for index, key in enumerate(keys)]
    rows[1:3] = [replace(rows[1], native_us=None), replace(rows[2], config=None, backend="torch")]
    written(tmp_path / "a.csv", *rows)
    again = database.read(tmp_path / "a.csv", FIELDS)
    assert again == {row.key: row for row in rows}
    types = {row.key: [type(part) for part in row.key] for row in rows}
    assert {key: [type(part) for part in key] for key in again} == types


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.tuples(*[st.one_of(st.none(), st.booleans(), st.integers(), st.text('01-aeu ,"\r\n\t\0é', max_size=5))] * 5),
    record=st.text('a/,"\r\n', max_size=4),
)
def test_a_row_is_read_as_it_is_or_not_written(tmp_path: Path, key: tuple[Any, ...], record: str) -> None:
    path = tmp_path / "a.csv"
    try:
        database.write(path, FIELDS, [row(*key, record=record)])
    except InvalidArgument:
        assert not record or "\r" in record or any(isinstance(part, str) for part in key)
        return
    (again,) = database.read(path, FIELDS).values()
    assert (again.key, again.record) == (key, record)
    assert [type(part) for part in again.key] == [type(part) for part in key]


def test_rows_are_sorted_and_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [
        row(m, n, dtype, bias, False) for m in (128, 16, 2) for n in (5, 40) for dtype in "ba" for bias in (None, "x")
    ]
    first = written(tmp_path / "a.csv", *rows)
    assert written(tmp_path / "a.csv", *reversed(rows)) == first
    assert [line.split(",")[0] for line in first.splitlines()[1:]] == ["2"] * 8 + ["16"] * 8 + ["128"] * 8
    assert written(tmp_path / "b.csv", *database.read(tmp_path / "a.csv", FIELDS).values()) == first
    # another measurement of one key changes one line
    changed = written(tmp_path / "a.csv", *[replace(one, us=1.5) if one is rows[3] else one for one in rows])
    pairs = zip(first.splitlines(), changed.splitlines(), strict=True)
    assert sum(before != after for before, after in pairs) == 1


def test_times_are_kept_to_the_nanosecond(tmp_path: Path) -> None:
    assert ",0.123,1234567.891," in written(tmp_path / "a.csv", row(us=0.12345, native_us=1234567.8911))


@pytest.mark.parametrize(
    "wrong",
    [
        row(16, 4096, "bfloat16", None, "true"),
        row(16, 4096, "bfloat16", "", True),
        row(16, 4096, "12", None, True),
        row(16, 4096.0, "bfloat16", None, True),
        row(16, 4096, "bfloat16", None),
        row(backend=""),
        row(record=""),
        row(us=0.0004),
        row(us=-1.0),
        row(us=math.nan),
        row(native_us=math.inf),
        row(config=Config()),
        row(config=Config(BLOCK_M=64.0)),  # type: ignore[arg-type]
        row(config=Config(BLOCK_M=True)),
    ],
)
def test_rows_that_cannot_be_read_back_are_not_written(tmp_path: Path, wrong: Row) -> None:
    with pytest.raises(InvalidArgument):
        database.write(tmp_path / "a.csv", FIELDS, [row(1, 2, "a", None, True), wrong])
    assert not list(tmp_path.iterdir())


def test_one_row_a_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="line 3: the key is that of line 2"):
        database.write(tmp_path / "a.csv", FIELDS, [row(), row(backend="torch", config=None)])


def test_no_rows_are_a_table(tmp_path: Path) -> None:
    assert written(tmp_path / "a.csv") == HEADER.replace("\n", f"{EVIDENCE}\n")
    assert database.read(tmp_path / "a.csv", FIELDS) == {}


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "folders" / "a.csv"
    before = written(path, row())

    def fails(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OutputError, match=r"a\.csv: No space left"):
        database.write(path, FIELDS, [row(us=1.0)])
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        database.write(tmp_path / "file" / "a.csv", FIELDS, [row()])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the columns are '', not 'rows,columns,dtype"),
        (HEADER.replace("columns", "n"), 1, "measure the table anew"),
        (LINE, 1, "the columns are '16,4096"),
        (HEADER + LINE + "16,4096,bfloat16\n", 3, "3 cells for 10 columns: correct or delete the line"),
        (HEADER + "\n" + LINE, 2, "0 cells for 10 columns"),
        (HEADER + LINE.replace("\n", ",\n"), 2, "11 cells for 10 columns"),
        (HEADER + LINE.replace("16", "17") + LINE + LINE, 4, "the key is that of line 3: keep one of them"),
        (HEADER + LINE.replace("triton", ""), 2, "no backend: name it"),
        (HEADER + LINE.replace("h200/a.json", ""), 2, "no record: name it"),
        (HEADER + LINE.replace("BLOCK_M=64", "BLOCK_M"), 2, "'BLOCK_M' in config is not NAME=NUMBER: write it as in"),
        (HEADER + LINE.replace("BLOCK_M=64", "BLOCK_M=1.5"), 2, "'BLOCK_M=1.5' in config"),
        (HEADER + LINE.replace("BLOCK_M=64", "num_warps=8"), 2, "'num_warps=4' in config is given twice"),
        (HEADER + LINE.replace("4096", "9" * 5000), 2, "99999999999999999999… is no number that a key"),
        (HEADER + LINE.replace("=64", "=" + "9" * 5000), 2, "is no number that a key or a configuration has"),
        (HEADER + LINE.replace("12.3", "fast"), 2, "us is 'fast': it must be a time in µs above 0"),
        (HEADER + LINE.replace("12.3", ""), 2, "us is ''"),
        (HEADER + LINE.replace("12.3", "0"), 2, "us is '0'"),
        (HEADER + LINE.replace("15.0", "inf"), 2, "native_us is 'inf'"),
        (HEADER + LINE.replace("15.0", "nan"), 2, "native_us is 'nan'"),
        (HEADER + LINE.replace("h200/a.json", '"h200'), 2, "correct or delete the line"),
    ],
)
def test_malformed_files_are_named_with_line_and_remedy(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError) as caught:
        database.read(path, FIELDS)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(HEADER.encode() + b"\xff\n")
    with pytest.raises(TableError, match=r"a\.csv is damaged: not UTF-8"):
        database.read(tmp_path / "a.csv", FIELDS)
    with pytest.raises(TableError, match="cannot read"):
        database.read(tmp_path, FIELDS)
    assert database.read(tmp_path / "none.csv", FIELDS) == {}


def test_lines_as_a_spreadsheet_ends_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes((HEADER + LINE).replace("\n", "\r\n").encode())
    assert list(database.read(tmp_path / "a.csv", FIELDS).values()) == [row()]


def test_look_up_is_exact_and_gives_its_reason(tmp_path: Path) -> None:
    found = Database(tmp_path, "sm_00")
    rows = [row(), row(17, 4096, "bfloat16", None, True, backend="torch", config=None, native_us=None, us=1234.56)]
    database.write(found.path("some_op"), FIELDS, rows)
    assert found.path("some_op") == tmp_path / "sm_00" / "some_op.csv"
    proposal = found.look_up("some_op", FIELDS, (16, 4096, "bfloat16", None, True))
    assert proposal is not None
    assert (proposal.backend, proposal.config, proposal.source) == ("triton", TILES, "exact")
    assert proposal.reason == "measured 12.3 µs, native 15.0 µs (h200/a.json)"
    proposal = found.look_up("some_op", FIELDS, (17, 4096, "bfloat16", None, True))
    assert proposal is not None and proposal.config is None
    assert proposal.reason == "measured 1234.6 µs, native PyTorch does not run it (h200/a.json)"
    assert found.look_up("some_op", FIELDS, (16, 4096, "bfloat16", "bfloat16", True)) is None
    assert found.look_up("other_op", FIELDS, (16, 4096, "bfloat16", None, True)) is None
    assert Database(tmp_path, "sm_01").look_up("some_op", FIELDS, (16, 4096, "bfloat16", None, True)) is None


def test_a_file_is_read_once_and_one_that_is_not_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def counted(path: Path, fields: tuple[str, ...]) -> Any:
        reads.append(path)
        return read(path, fields)

    read = database.read
    monkeypatch.setattr(database, "read", counted)
    found = Database(tmp_path, "sm_00")
    database.write(found.path("a"), FIELDS, [row()])
    assert reads == []
    for _ in range(3):
        found.look_up("a", FIELDS, (1, 2, "x", None, False))
        found.look_up("b", FIELDS, (1, 2, "x", None, False))
    assert reads == [found.path("a"), found.path("b")]


def test_the_package_rows_of_the_current_gpu_are_the_default() -> None:
    found = Database()
    assert found.folder == Path(database.__file__).parent / "data"
    assert found.arch == hardware.detect().arch


def test_launch_options_are_those_of_the_survey() -> None:
    assert LAUNCH_OPTIONS == survey.OPTIONS


def problems(folder: Path, results: Path) -> list[str]:
    """Faults of the tables in a folder, beyond their format."""
    found = []
    for path in sorted(folder.glob("*/*")):
        where = f"{path.parent.name}/{path.name}"
        if path.parent.name not in hardware.ARCHS or not path.parent.name.startswith("sm_"):
            found.append(f"{where}: no architecture that was measured on")
        elif path.suffix != ".csv" or path.stem not in registry.names():
            found.append(f"{where}: no op of that name")
        else:
            op = registry.get(path.stem)
            fields = tuple(field for field in op.key_fields if field not in UNLISTED)
            for one in database.read(path, fields).values():
                found += [f"{where}: {one.key}: {what}" for what in _wrong(one, op, results)]
    return found


def _wrong(one: Row, op: Op, results: Path) -> list[str]:
    return [
        what
        for wrong, what in (
            (one.backend not in op.backends, "no such backend"),
            (not (results / one.record.partition("@")[0]).is_file(), "no such record"),
            (one.native_us is not None and one.us > one.native_us, "slower than native PyTorch"),
        )
        if wrong
    ]


def test_the_shipped_tables_hold_together() -> None:
    assert problems(database.DATA, RECORDS) == []


def test_what_the_shipped_tables_are_held_to(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    fields = tuple(field for field in registry.get("silu_and_mul").key_fields if field not in UNLISTED)
    good = Row((16, 4096, "bfloat16", False, 1), "triton", TILES, 1.0, 1.0, "a.json")
    database.write(tmp_path / "sm_90" / "silu_and_mul.csv", fields, [good])
    assert problems(tmp_path, tmp_path) == []
    bad = [
        replace(good, key=(m, *good.key[1:]), **change)
        for m, change in enumerate(({"backend": "no"}, {"record": "b.json"}, {"us": 1.1}))
    ]
    database.write(tmp_path / "sm_90" / "silu_and_mul.csv", fields, bad)
    database.write(tmp_path / "gfx942" / "silu_and_mul.csv", fields, [])
    database.write(tmp_path / "sm_90" / "no_op.csv", fields, [])
    messages = [message.split(": ")[-1] for message in problems(tmp_path, tmp_path)]
    assert messages == [
        "no architecture that was measured on", "no op of that name", "no such backend", "no such record",
        "slower than native PyTorch",
    ]  # fmt: skip
