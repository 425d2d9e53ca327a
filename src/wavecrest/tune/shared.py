"""Measured rows as a file to send to others: what was measured, on which GPU, and nothing about whose it was.

Every text of the file is of one of the forms below, which have no place for a host, a user or a path. Rows that hold
anything else are left out, and so are rows of users' kernels and ops, whose names are the user's, and imported ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from wavecrest import hardware, ops
from wavecrest.dispatch import lookup
from wavecrest.dispatch.tuned import Config, Entry, Evidence, Row
from wavecrest.errors import TableError
from wavecrest.records import files

FORMAT_VERSION = 1
KIND = "shared-rows"
# in place of the name of the user's record; after it "@" and the hash of its content
RECORD = "shared"
MOST_ROWS = 100_000

_HASH = re.compile(r".*(@[0-9a-f]{12})", re.ASCII | re.DOTALL)
# as `provenance` writes it
_COMMIT = r"[0-9a-f]{7,40}(\+changes)?"
_VERSION = r"[0-9A-Za-z.+]{1,60}"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,60}$")]
Text = Annotated[str, Field(pattern=r"^[A-Za-z0-9_. +:-]{0,80}$")]
Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SharedRow(files.Model):
    """One measured row: its key, what ran, the times in µs, and the device, versions and day."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    arch: Name
    op: Name
    key: dict[Name, bool | int | Text | None]
    backend: Name
    config: dict[Name, int] = Field(default_factory=dict)
    us: Time
    native_us: Time | None = None
    default_us: Time | None = None
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    record: Annotated[str, Field(pattern=r"^shared(@[0-9a-f]{12})?$")] = RECORD
    device: Text = ""
    units: Annotated[int, Field(gt=0)] | None = None
    versions: Annotated[
        str, Field(pattern=rf"^(torch {_VERSION}(; triton {_VERSION})?(; (hip|cuda) {_VERSION})?)?$")
    ] = ""
    date: Annotated[str, Field(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")] = ""
    commit: Annotated[str, Field(pattern=rf"^({_COMMIT})?$")] = ""


class SharedRows(files.Model):
    """The file."""

    kind: Literal["shared-rows"] = "shared-rows"
    format_version: int = FORMAT_VERSION
    rows: Annotated[list[SharedRow], Field(max_length=MOST_ROWS)]

    def facts(self) -> dict[str, list[str]]:
        """All that the rows say of the machine, for people: each text once, with the number of its rows."""
        found = {}
        for name in ("device", "units", "versions", "date", "commit"):
            counts = Counter(str(getattr(row, name) or "not known") for row in self.rows)
            found[name] = [f"{text} ({count})" for text, count in sorted(counts.items())]
        return found


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rows to share, and those that are left out, with the reasons."""

    document: SharedRows
    left: tuple[str, ...]


def rows_of(entries: Iterable[Entry]) -> Sharing:
    """The rows of a database that may be shared."""
    rows: list[SharedRow] = []
    left: list[str] = []
    for entry in entries:
        reason = _private(entry)
        if not reason:
            try:
                rows.append(_shared(entry))
            except pydantic.ValidationError as problem:
                place = problem.errors()[0]["loc"]
                reason = f"holds text that may be anything ({'.'.join(map(str, place[:1]))})"
        if reason:
            left.append(f"{entry.op} {entry.arch}: {reason}")
    return Sharing(SharedRows(rows=rows), tuple(left))


def _private(entry: Entry) -> str:
    """Why a row is not shared, whatever its texts are; "" if it may be."""
    if entry.row.evidence.origin:
        return f"was not measured by wavecrest but imported from {entry.row.evidence.origin}"
    if entry.op not in ops.names() or not type(ops.get(entry.op).study).__module__.startswith("wavecrest."):
        return "is of no op of wavecrest's"
    backend = ops.get(entry.op).backends.get(entry.row.backend)
    if backend is None or backend.user:
        return "runs a kernel of a user's, or of another version"
    return ""


def _shared(entry: Entry) -> SharedRow:
    row, evidence = entry.row, entry.row.evidence
    found = _HASH.fullmatch(row.record)
    return SharedRow(
        arch=entry.arch, op=entry.op, key=dict(zip(entry.fields, row.key, strict=True)), backend=row.backend,
        config=dict(row.config or {}), us=row.us, native_us=row.native_us, default_us=evidence.default_us,
        error=evidence.error, record=RECORD + (found[1] if found else ""), device=evidence.device,
        units=evidence.units, versions=evidence.versions, date=evidence.date[:10],
        commit=evidence.commit if re.fullmatch(_COMMIT, evidence.commit) else "",
    )  # fmt: skip


def is_shared(path: Path) -> bool:
    """Whether a JSON file says that it is one; damage is for `read` to report."""
    try:
        value = files.read_json(path, what="file of shared rows", error=TableError)
    except TableError:
        return False
    return isinstance(value, dict) and value.get("kind") == KIND


def read(path: Path, arch: str | None = None) -> tuple[list[Entry], list[str]]:
    """The rows of a file that dispatch here can use, and the others, with the reasons.

    Args:
        path: the file.
        arch: only rows of this architecture; None: all.

    Raises:
        TableError: the file is damaged or newer than this version. Then none of its rows is to be used.
    """
    document = files.read_document(path, what="file of shared rows", current=FORMAT_VERSION, error=TableError)
    try:
        found = SharedRows.model_validate(document)
    except pydantic.ValidationError as problem:
        raise TableError(f"the file of shared rows {path.name} is damaged: {files.first_problem(problem)}") from None
    entries: list[Entry] = []
    left: list[str] = []
    for number, row in enumerate(found.rows, start=1):
        reason = _of_no_use(row, arch)
        if reason:
            left.append(f"row {number}: {reason}")
        else:
            entries.append(_entry(row))
    return entries, left


def _of_no_use(row: SharedRow, arch: str | None) -> str:
    if row.arch not in hardware.ARCHS:
        return f"is for {row.arch}, which is unknown here"
    if arch is not None and row.arch != arch:
        return f"is for {row.arch}"
    if row.op not in ops.names():
        return f"there is no op {row.op} here"
    op = ops.get(row.op)
    if tuple(row.key) != lookup.fields_of(op):
        return f"the keys of {row.op} have other parts here"
    given = row.key | {"device": "cuda", "grad": False}
    whole = tuple(given[name] for name in op.key_fields)
    problem = (
        f"which {row.op} does not have"
        if row.backend not in op.backends
        else lookup.unusable(op, whole, tuple(op.backends), row.backend, _config(row))
    )
    return f"{row.backend}, {problem}" if problem else ""


def _config(row: SharedRow) -> Config | None:
    return Config(**row.config) if row.config else None


def _entry(row: SharedRow) -> Entry:
    evidence = Evidence(
        default_us=row.default_us, error=row.error, device=row.device, units=row.units, versions=row.versions,
        date=row.date, commit=row.commit,
    )  # fmt: skip
    key: Sequence[bool | int | str | None] = tuple(row.key.values())
    made = Row(tuple(key), row.backend, _config(row), row.us, row.native_us, row.record, evidence)
    return Entry(row.arch, row.op, tuple(row.key), made)
