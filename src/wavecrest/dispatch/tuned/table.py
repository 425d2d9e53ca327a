"""Tables of measured rows as CSV files, `<arch>/<op>.csv`.

A column for each part of the op's key under its name, then `COLUMNS`, then `EVIDENCE` (older files end before them). A
cell is a whole number, true, false, nothing (None), or else text; `config` is "BLOCK_M=64 num_warps=4".
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path

from wavecrest.dispatch.tuned.config import Config
from wavecrest.dispatch.tuned.row import Cell, Evidence, Row, RowKey
from wavecrest.errors import InvalidArgument, OutputError, TableError
from wavecrest.records import decode, files
from wavecrest.records.renamed import current_backend

# the columns after those of the key
COLUMNS = ("backend", "config", "us", "native_us", "record")
# and after these; not in files written before rows had them
EVIDENCE = tuple(field.name for field in fields_of(Evidence))

# written in one way only, so that a cell that is read is written as it was; anything else is text
_WHOLE = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(0|-?[1-9][0-9]*)", re.ASCII)
# far beyond what a size or an option can be; Python does not convert numbers of some thousand digits
_MOST_DIGITS = 1000


def read(path: Path, fields: tuple[str, ...]) -> dict[RowKey, Row]:
    """The rows of a file by key; none where there is no such file.

    Raises:
        TableError: the file cannot be read or is malformed; the message names the line.
    """
    if not os.path.lexists(path):
        return {}
    return _parse(decode.read_text(path, what="table", error=TableError), fields, path)


def write(path: Path, fields: tuple[str, ...], rows: Iterable[Row]) -> None:
    """Write the rows of one op and architecture, sorted by key, whole or not at all; folders are made.

    The same rows give the same bytes, so that a new measurement changes the lines of its keys alone.

    Args:
        path: the file, `<arch>/<op>.csv` in a database's folder.
        fields: the names of the key's parts, in the order of each row's `key`.
        rows: at most one a key.

    Raises:
        InvalidArgument: a row that could not be read back as it is.
        OutputError: the file cannot be written.
    """
    ordered = sorted(rows, key=lambda row: tuple(map(_rank, row.key)))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow((*fields, *COLUMNS, *EVIDENCE))
    writer.writerows(_cells(row) for row in ordered)
    text = buffer.getvalue()
    try:
        parsed = _parse(text, fields, path)
    except TableError as error:
        raise InvalidArgument(f"these rows make no table: {error}") from None
    for row, again in zip(ordered, parsed.values(), strict=True):
        if as_written(again) != as_written(row):
            raise InvalidArgument(f"{row} would be read back as {again}: a cell holds what the format cannot say")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    files.write_text(path, text)


def _parse(text: str, fields: tuple[str, ...], path: Path) -> dict[RowKey, Row]:
    columns = (*fields, *COLUMNS)
    known = (columns, (*columns, *EVIDENCE))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: dict[RowKey, Row] = {}
    lines: dict[RowKey, int] = {}
    try:
        header = tuple(next(reader, ()))
        if header not in known:
            raise Malformed(f"the columns are {','.join(header)!r}, not {','.join(columns)!r}: measure the table anew")
        for cells in reader:
            row = _row(cells, len(fields), len(header))
            if row.key in rows:
                raise Malformed(f"the key is that of line {lines[row.key]}: keep one of them")
            rows[row.key], lines[row.key] = row, reader.line_num
    except csv.Error as error:
        raise TableError(f"{path}, line {reader.line_num}: {error}: correct or delete the line") from None
    except Malformed as problem:
        raise TableError(f"{path}, line {max(1, reader.line_num)}: {problem}") from None
    return rows


class Malformed(Exception):
    """A row is malformed; the message says what is wrong and what to do."""


def _row(cells: list[str], width: int, columns: int) -> Row:
    if len(cells) != columns:
        raise Malformed(f"{len(cells)} cells for {columns} columns: correct or delete the line")
    return row_of(tuple(map(cell_of, cells[:width])), cells[width:])


def row_of(key: RowKey, cells: list[str]) -> Row:
    """The row of a key from the cells of `COLUMNS`, and of `EVIDENCE` where they are there."""
    backend, config, us, native, record, *rest = cells
    if not backend or not record:
        raise Malformed(f"no {'record' if backend else 'backend'}: name it or delete the line")
    native_us = _time("native_us", native) if native else None
    return Row(key, current_backend(backend), parse_config(config), _time("us", us), native_us, record, _evidence(rest))


def _evidence(cells: list[str]) -> Evidence:
    if not cells:
        return Evidence()
    default, error, device, units, *rest = cells
    if units and (not _WHOLE.fullmatch(units) or units[0] in "0-"):
        raise Malformed(f"units is {units!r}: it must be a whole number above 0")
    return Evidence(
        _time("default_us", default) if default else None,
        _error(error) if error else None,
        device,
        _whole(units) if units else None,
        *rest,
    )


def _error(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise Malformed(f"error is {text!r}: it must be a number of 0 or more")
    return value


def cell_of(text: str) -> Cell:
    """The value of a cell of a key: None, a bool, an int or text."""
    if text == "":
        return None
    if text in ("true", "false"):
        return text == "true"
    return _whole(text) if _WHOLE.fullmatch(text) else text


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise Malformed(f"{text[:20]}… is no number that a key or a configuration has: correct the cell")
    return int(text)


def parse_config(text: str) -> Config | None:
    """A configuration from a cell such as 'BLOCK_M=64 num_warps=4'; None for an empty cell.

    Raises:
        Malformed: it is not written so.
    """
    values: dict[str, int] = {}
    for word in text.split():
        match = _SETTING.fullmatch(word)
        if match is None or match[1] in values:
            problem = "is given twice" if match is not None else "is not NAME=NUMBER"
            raise Malformed(f"{word!r} in config {problem}: write it as in 'BLOCK_M=64 num_warps=4'")
        values[match[1]] = _whole(match[2])
    return Config(**values) if values else None


def _time(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise Malformed(f"{column} is {text!r}: it must be a time in µs above 0")
    return value


def _cells(row: Row) -> tuple[str, ...]:
    return (*map(_text, row.key), *cells_of(row))


def cells_of(row: Row) -> tuple[str, ...]:
    """The cells of `COLUMNS` and `EVIDENCE`."""
    evidence = row.evidence
    config = "" if row.config is None else " ".join(f"{name}={value}" for name, value in row.config.items())
    return (
        row.backend, config, _microseconds(row.us), _optional(row.native_us), row.record,
        _optional(evidence.default_us), "" if evidence.error is None else repr(float(evidence.error)), evidence.device,
        _text(evidence.units), evidence.versions, evidence.date, evidence.commit, evidence.origin, evidence.detail,
    )  # fmt: skip


def _optional(us: float | None) -> str:
    return "" if us is None else _microseconds(us)


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _microseconds(value: float) -> str:
    return str(round(float(value), 3))


def as_written(row: Row) -> Row:
    """The row with its times as the file has them."""

    def kept(us: float | None) -> float | None:
        return None if us is None else float(_microseconds(us))

    evidence = replace(row.evidence, default_us=kept(row.evidence.default_us))
    return replace(row, us=float(_microseconds(row.us)), native_us=kept(row.native_us), evidence=evidence)


def _rank(value: Cell) -> tuple[int, int, str]:
    """Orders cells of any type: None, then false and true, then numbers, then text."""
    if value is None:
        return 0, 0, ""
    if isinstance(value, bool):
        return 1, int(value), ""
    return (2, value, "") if isinstance(value, int) else (3, 0, str(value))
