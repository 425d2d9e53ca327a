"""The user's own measured rows: an SQLite database that many processes write and read at once.

It is in WAL mode: readers see whole transactions and never wait, writers take turns, and a process that is killed
leaves what was committed before. A row carries a checksum, because SQLite has none. A key has one row for each
device, set of versions and origin; the newest one stays. The file holds only data: whole numbers, times and text.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs

from wavecrest import env
from wavecrest.dispatch.tuned.row import Row, RowKey
from wavecrest.dispatch.tuned.table import COLUMNS, EVIDENCE, Malformed, as_written, cells_of, row_of
from wavecrest.errors import InvalidArgument, OutputError, TableError
from wavecrest.records import decode

# "wave", so that another program's database is told from an empty one
APPLICATION = 0x77617665
# columns that find a row, beside those of a table
PLACE = ("arch", "op", "fields", "key")
_ALL = (*PLACE, *COLUMNS, *EVIDENCE)
_UNIQUE = (*PLACE, "device", "units", "versions", "origin")
# seconds that a writer waits for others
PATIENCE = 60.0
NO_FILE = "it is no regular file; set WAVECREST_DATABASE to a file of its own"
# by which the clocks of two machines may differ
TOLERANCE = timedelta(hours=1)
# wavecrest writes no longer keys and cells, so a row that has one is damaged
MOST_TEXT = 1 << 16


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _create(connection: sqlite3.Connection) -> None:
    columns = ", ".join(f'"{name}" TEXT NOT NULL' for name in _ALL)
    connection.execute(f"CREATE TABLE rows ({columns}, crc INTEGER NOT NULL, PRIMARY KEY ({_quoted(_UNIQUE)}))")


# migrations: number n turns schema n into n + 1; the file's user_version says how many were made
STEPS: tuple[Callable[[sqlite3.Connection], None], ...] = (_create,)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row with the architecture, the op, and the names of the parts of its key."""

    arch: str
    op: str
    fields: tuple[str, ...]
    row: Row


class Overlay:
    """The database at a path; it is made when it is first written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def of_user() -> Overlay | None:
        """The user's: at WAVECREST_DATABASE, or in the platform's folder for data; None where that is "off"."""
        named = env.get("WAVECREST_DATABASE")
        if named == "off":
            return None
        return Overlay(Path(named) if named else platformdirs.user_data_path("wavecrest") / "tuned.sqlite")

    def read(self, arch: str, op: str, fields: tuple[str, ...]) -> list[Row]:
        """The rows of an op whose keys have these parts; none where there is no file.

        Raises:
            TableError: the file is damaged, foreign, or newer than this version.
        """
        return [entry.row for entry in self.entries(arch, op) if entry.fields == fields]

    def entries(self, arch: str | None = None, op: str | None = None) -> list[Entry]:
        """All rows, or those of an architecture and an op, in the order of their keys.

        Raises:
            TableError: the file is damaged, foreign, or newer than this version.
        """
        if not self._there():
            return []
        given = {"arch": arch, "op": op}
        wanted = {name: value for name, value in given.items() if value is not None}
        where = " AND ".join(f'"{name}" = ?' for name in wanted) or "1"
        query = f"SELECT {_quoted(_ALL)}, crc FROM rows WHERE {where} ORDER BY {_quoted(_UNIQUE)}"
        with self._reading(), closing(self._open(writing=False)) as connection:
            if self._schema(connection) == 0:
                return []
            # a damaged page may end a table early, and its rows would be missing without a word
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise TableError(f"the user database {self.path} is damaged: {_line(found)}; move it away")
            return [self._entry(values) for values in connection.execute(query, tuple(wanted.values()))]

    def write(self, entries: Iterable[Entry]) -> int:
        """Add rows, all or none; of rows for one key, device, set of versions and origin the newest stays.

        Returns:
            How many of them are there now, as others were newer.

        Raises:
            InvalidArgument: a row that could not be read back as it is.
            OutputError: the file cannot be written.
            TableError: the file is damaged, foreign, or newer than this version.
        """
        made = [self._values(_dated(entry)) for entry in entries]
        marks = ", ".join("?" * (len(_ALL) + 1))
        others = ", ".join(f'"{name}" = excluded."{name}"' for name in (*_ALL, "crc") if name not in _UNIQUE)
        insert = (
            f"INSERT INTO rows ({_quoted((*_ALL, 'crc'))}) VALUES ({marks}) ON CONFLICT ({_quoted(_UNIQUE)}) "
            # a date that has not come yet is of a clock that was wrong, and must not outlive what is measured since
            f'DO UPDATE SET {others} WHERE excluded."date" >= rows."date" OR rows."date" > ?'
        )
        with self._writing() as connection:
            now = (datetime.now(UTC) + TOLERANCE).isoformat(timespec="seconds")
            return sum(connection.execute(insert, (*values, now)).rowcount for values in made)

    def prepare(self) -> None:
        """Make the file, or bring it to this version's schema; to find out, before a long run, that it can be written.

        Raises:
            OutputError: it cannot be written.
            TableError: it is damaged, foreign, or newer than this version.
        """
        with self._writing():
            pass

    def check(self) -> list[str]:
        """Problems of the file as a whole; a damaged row raises when it is read.

        Raises:
            TableError: the file cannot be read at all.
        """
        if not self._there():
            return []
        with self._reading(), closing(self._open(writing=False)) as connection:
            if self._schema(connection) == 0:
                return []
            found = [text for (text,) in connection.execute("PRAGMA integrity_check(10)")]
        return [] if found == ["ok"] else [f"{self.path}: {text}" for text in found]

    def _there(self) -> bool:
        """Whether there is a file to read.

        Raises:
            TableError: there is something else, such as a FIFO, whose other end SQLite would wait for.
        """
        # False, too, where a folder above may not be looked into
        if not os.path.exists(self.path):
            return False
        if not self.path.is_file():
            raise TableError(f"cannot read the user database {decode.shown(self.path)}: {NO_FILE}")
        return True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        # a message of SQLite's may hold bytes of a damaged file, which are no text
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise TableError(
                f"cannot read the user database {self.path}: {_line(error)}; move it away, or set WAVECREST_DATABASE"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is committed at the end, and undone by whatever is raised inside."""
        if self.path.exists() and not self.path.is_file():
            # SQLite would wait for the other end of a FIFO
            raise OutputError(f"cannot write the user database {decode.shown(self.path)}: {NO_FILE}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open(writing=True)) as connection:
                self._migrate(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"cannot write the user database {self.path}: {_line(error)}; set WAVECREST_DATABASE to a file on a "
                "local disk"
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise TableError(f"the user database {self.path} is damaged: {_line(error)}; move it away") from error

    def _open(self, *, writing: bool) -> sqlite3.Connection:
        mode = "rwc" if writing else "ro"
        if not writing and not self._has_log() and not _writable(self.path.parent):
            # a database in WAL mode makes files beside it even for reading, unless nothing can change
            mode = "ro&immutable=1"
        elif not writing and os.path.exists(f"{self.path}-journal"):
            # a process was killed while it made the file: the next reader must roll that back, and so needs to write
            mode = "rw"
        name = f"file:{quote(str(self.path.absolute()))}?mode={mode}"
        # no transactions by itself
        return sqlite3.connect(name, uri=True, timeout=PATIENCE, isolation_level=None)

    def _has_log(self) -> bool:
        return os.path.exists(f"{self.path}-wal")

    def _schema(self, connection: sqlite3.Connection) -> int:
        """The file's schema; 0 where it holds nothing yet."""
        # one statement, so that another process cannot make the file between two of its answers
        ((application, version, tables),) = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        )
        if application != APPLICATION and (tables or application or version):
            raise TableError(f"{self.path} is another program's database: set WAVECREST_DATABASE to a file of its own")
        if version > len(STEPS):
            raise TableError(
                f"{self.path} has schema {version}, this wavecrest reads up to {len(STEPS)}: upgrade wavecrest"
            )
        return int(version)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            self._enter_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")
        if self._schema(connection) == len(STEPS):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            # another process may have been faster
            for step in STEPS[self._schema(connection) :]:
                step(connection)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {len(STEPS)}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _enter_wal(self, connection: sqlite3.Connection) -> None:
        # the change of mode does not wait for others by itself; a transaction does
        for _ in range(100):
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("database is locked")

    def _values(self, entry: Entry) -> tuple[Any, ...]:
        """A row's cells with its checksum."""
        row = entry.row
        texts = (entry.arch, entry.op, _json(entry.fields), _json(row.key), *cells_of(row))
        values = (*texts, _crc(texts))
        try:
            again = self._entry(values)
        except TableError as error:
            raise InvalidArgument(f"{row} makes no row: {error}") from None
        kinds = [type(part) for part in again.row.key] == [type(part) for part in row.key]
        if not kinds or replace(again, row=as_written(again.row)) != replace(entry, row=as_written(row)):
            raise InvalidArgument(f"{row} would be read back as {again.row}: a cell holds what cannot be kept")
        return values

    def _entry(self, values: tuple[Any, ...]) -> Entry:
        """A row as it was written.

        Raises:
            TableError: it is not as it was written.
        """
        *texts, crc = values
        try:
            if not all(isinstance(text, str) and len(text) <= MOST_TEXT for text in texts):
                raise Malformed("a cell is not text that wavecrest writes")
            decode.check(texts)
            if crc != _crc(texts):
                raise Malformed("its checksum is another")
            arch, op, fields, key, *cells = texts
            names, parts = tuple(decode.json_of(fields)), tuple(decode.json_of(key))
            if len(names) != len(parts):
                raise Malformed(f"its key has {len(parts)} parts for {len(names)} names")
            if not all(part is None or isinstance(part, int | str) for part in parts):
                raise Malformed("a part of its key is no whole number, text, true, false or nothing")
            return Entry(arch, op, names, row_of(parts, cells))
        except (Malformed, ValueError, TypeError) as problem:
            place = " ".join(str(text)[:200] for text in texts[:2]) + f" {str(texts[3])[:200]}"
            raise TableError(f"{self.path}: the row of {place} is damaged: {problem}; move the file away") from None


def _dated(entry: Entry) -> Entry:
    """The entry with a date of now where its own has not come yet."""
    now = datetime.now(UTC)
    evidence = entry.row.evidence
    if evidence.date <= (now + TOLERANCE).isoformat(timespec="seconds"):
        return entry
    evidence = replace(evidence, date=now.isoformat(timespec="seconds"))
    return replace(entry, row=replace(entry.row, evidence=evidence))


def _crc(texts: Iterable[str]) -> int:
    return zlib.crc32(json.dumps(list(texts)).encode())


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _json(parts: RowKey) -> str:
    return json.dumps(list(parts), ensure_ascii=False, separators=(",", ":"))


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)
