"""Measured rows: which backend was the fastest for a shape key, with which configuration, and where that is recorded.

One CSV file an op and architecture, `data/<arch>/<op>.csv`: a column for each part of the key under its name, then
`COLUMNS`. A cell is a whole number, true, false, nothing (None), or else text; `config` is "BLOCK_M=64 num_warps=4".
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from wavecrest import hardware
from wavecrest.errors import InvalidArgument, OutputError, TableError
from wavecrest.tuned.config import Config

Cell = int | bool | str | None
RowKey = tuple[Cell, ...]

# the rows that come with the package
DATA = Path(__file__).with_name("data")
# the columns after those of the key
COLUMNS = ("backend", "config", "us", "native_us", "record")

# written in one way only, so that a cell that is read is written as it was; anything else is text
_WHOLE = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(0|-?[1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """The fastest way found to run the calls of one key.

    Args:
        key: the parts of the op's key that the table has columns for.
        backend: the backend's name.
        config: its configuration; None for a backend that takes none.
        us: its time on the device, in µs, kept to the nanosecond.
        native_us: PyTorch's in the same run; None where PyTorch does not run the call.
        record: the result file that says so, under benchmarks/results.
    """

    key: RowKey
    backend: str
    config: Config | None
    us: float
    native_us: float | None
    record: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the database says of a key; `reason` is for people."""

    backend: str
    config: Config | None
    source: Literal["exact", "near", "model"]
    reason: str


@cache
def _current_arch() -> str:
    return hardware.detect().arch


class Database:
    """The measured rows of one architecture, by op; each file is read when its op is first asked for.

    Args:
        folder: holds `<arch>/<op>.csv`; None: the rows that come with the package.
        arch: the architecture whose rows hold, such as "sm_90"; None: that of the current GPU.
    """

    def __init__(self, folder: Path | None = None, arch: str | None = None) -> None:
        self.folder = DATA if folder is None else folder
        self._arch = arch
        self._rows: dict[str, Mapping[RowKey, Row]] = {}

    @property
    def arch(self) -> str:
        """The architecture whose rows hold."""
        return _current_arch() if self._arch is None else self._arch

    def path(self, op: str) -> Path:
        """Where the rows of an op are, if it has any."""
        return self.folder / self.arch / f"{op}.csv"

    def rows(self, op: str, fields: tuple[str, ...]) -> Mapping[RowKey, Row]:
        """The rows of an op by key; none where there is no file.

        Args:
            op: the op's name.
            fields: the names of the key's parts that the table has columns for.

        Raises:
            TableError: the file is malformed.
        """
        rows = self._rows.get(op)
        if rows is None:
            rows = self._rows[op] = read(self.path(op), fields)
        return rows

    def look_up(self, op: str, fields: tuple[str, ...], key: RowKey) -> Proposal | None:
        """What was measured for this very key, or None.

        Args:
            op, fields: as for `rows`.
            key: the parts of the key that `fields` names.

        Raises:
            TableError: the file is malformed.
        """
        row = self.rows(op, fields).get(key)
        if row is None:
            return None
        native = "native PyTorch does not run it" if row.native_us is None else f"native {row.native_us:.1f} µs"
        return Proposal(row.backend, row.config, "exact", f"measured {row.us:.1f} µs, {native} ({row.record})")


def read(path: Path, fields: tuple[str, ...]) -> dict[RowKey, Row]:
    """The rows of a file by key; none where there is no such file.

    Raises:
        TableError: the file cannot be read or is malformed; the message names the line.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}; make it readable or delete it") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8 text ({error.reason}); write the table anew or delete it") from None
    return _parse(text, fields, path)


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
    writer.writerow((*fields, *COLUMNS))
    writer.writerows(_cells(row) for row in ordered)
    text = buffer.getvalue()
    try:
        parsed = _parse(text, fields, path)
    except TableError as error:
        raise InvalidArgument(f"these rows make no table: {error}") from None
    for row, again in zip(ordered, parsed.values(), strict=True):
        if _as_written(again) != _as_written(row):
            raise InvalidArgument(f"{row} would be read back as {again}: a cell holds what the format cannot say")
    _replace(path, text)


def _parse(text: str, fields: tuple[str, ...], path: Path) -> dict[RowKey, Row]:
    columns = (*fields, *COLUMNS)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: dict[RowKey, Row] = {}
    lines: dict[RowKey, int] = {}
    try:
        header = tuple(next(reader, ()))
        if header != columns:
            raise _Malformed(f"the columns are {','.join(header)!r}, not {','.join(columns)!r}: measure the table anew")
        for cells in reader:
            row = _row(cells, fields)
            if row.key in rows:
                raise _Malformed(f"the key is that of line {lines[row.key]}: keep one of them")
            rows[row.key], lines[row.key] = row, reader.line_num
    except csv.Error as error:
        raise TableError(f"{path}, line {reader.line_num}: {error}: correct or delete the line") from None
    except _Malformed as problem:
        raise TableError(f"{path}, line {max(1, reader.line_num)}: {problem}") from None
    return rows


class _Malformed(Exception):
    """What is wrong with a line, and what to do."""


def _row(cells: list[str], fields: tuple[str, ...]) -> Row:
    width = len(fields)
    if len(cells) != width + len(COLUMNS):
        raise _Malformed(f"{len(cells)} cells for {width + len(COLUMNS)} columns: correct or delete the line")
    backend, config, us, native, record = cells[width:]
    if not backend or not record:
        raise _Malformed(f"no {'record' if backend else 'backend'}: name it or delete the line")
    return Row(
        tuple(map(_cell, cells[:width])),
        backend,
        _config(config),
        _time("us", us),
        _time("native_us", native) if native else None,
        record,
    )


def _cell(text: str) -> Cell:
    if text == "":
        return None
    if text in ("true", "false"):
        return text == "true"
    return int(text) if _WHOLE.fullmatch(text) else text


def _config(text: str) -> Config | None:
    values: dict[str, int] = {}
    for word in text.split():
        match = _SETTING.fullmatch(word)
        if match is None or match[1] in values:
            problem = "is given twice" if match is not None else "is not NAME=NUMBER"
            raise _Malformed(f"{word!r} in config {problem}: write it as in 'BLOCK_M=64 num_warps=4'")
        values[match[1]] = int(match[2])
    return Config(**values) if values else None


def _time(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _Malformed(f"{column} is {text!r}: it must be a time in µs above 0")
    return value


def _cells(row: Row) -> tuple[str, ...]:
    config = "" if row.config is None else " ".join(f"{name}={value}" for name, value in row.config.items())
    native = "" if row.native_us is None else _microseconds(row.native_us)
    return (*map(_text, row.key), row.backend, config, _microseconds(row.us), native, row.record)


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _microseconds(value: float) -> str:
    return str(round(float(value), 3))


def _as_written(row: Row) -> Row:
    """The row with its times as the file has them."""
    native = None if row.native_us is None else float(_microseconds(row.native_us))
    return replace(row, us=float(_microseconds(row.us)), native_us=native)


def _rank(value: Cell) -> tuple[int, int, str]:
    """Orders cells of any type: None, then false and true, then numbers, then text."""
    if value is None:
        return 0, 0, ""
    if isinstance(value, bool):
        return 1, int(value), ""
    return (2, value, "") if isinstance(value, int) else (3, 0, str(value))


def _replace(path: Path, text: str) -> None:
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8", newline=""
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
