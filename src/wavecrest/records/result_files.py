"""Result files: what every command leaves behind, as versioned JSON.

A record names its kind and format version, the machine, the versions and commit, and the exact command. A file of a
newer format, of another program, or cut short gets one clear error; older formats migrate step by step. A name that
ends with `.jsonl.gz` is written as compressed JSON lines, any other as JSON; both are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field

from wavecrest.errors import RecordError
from wavecrest.records import decode
from wavecrest.records.files import document_of, first_problem, read_json, write_model
from wavecrest.records.schema import (
    FORMAT_VERSION,
    BenchRecord,
    BundleRecord,
    OptimizeRecord,
    ProfileRecord,
    VerifyRecord,
)
from wavecrest.records.schema_ops import OpBenchRecord, TuneRecord, WorkloadTuneRecord

Record = (
    BenchRecord
    | ProfileRecord
    | OptimizeRecord
    | VerifyRecord
    | BundleRecord
    | OpBenchRecord
    | TuneRecord
    | WorkloadTuneRecord
)
_ADAPTER: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_KINDS = ("bench", "profile", "optimize", "verify", "bundle", "bench-ops", "tune", "tune-workload")
# format version n -> function that turns a version-n document into n + 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

R = TypeVar(
    "R",
    BenchRecord,
    ProfileRecord,
    OptimizeRecord,
    VerifyRecord,
    BundleRecord,
    OpBenchRecord,
    TuneRecord,
    WorkloadTuneRecord,
)


def save(record: Record, path: Path) -> None:
    """Write a record: as compressed JSON lines if the name ends with `.jsonl.gz`, else as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    write_model(path, record)


def load(path: Path) -> Record:
    """Read a result file of any kind, in either form.

    Raises:
        RecordError: damaged, foreign or newer.
    """
    return of_value(read_json(path, what="result file"), decode.shown(path))


def of_value(value: Any, name: str) -> Record:
    """The record of a value read as JSON; `name` is its file's.

    Raises:
        RecordError: damaged, foreign or newer.
    """
    document = document_of(value, name, what="result file", current=FORMAT_VERSION)
    if document.get("kind") not in _KINDS:
        raise RecordError(f"{name} is not a wavecrest result file: kind {document.get('kind')!r}")
    while document["format_version"] < FORMAT_VERSION:
        if document["format_version"] not in MIGRATIONS:
            raise RecordError(f"{name} has format {document['format_version']}, which there never was")
        document = MIGRATIONS[document["format_version"]](document)
    try:
        return _ADAPTER.validate_python(document)
    except pydantic.ValidationError as problem:
        raise RecordError(f"the result file {name} is damaged: {first_problem(problem)}") from None


def load_as(path: Path, kind: type[R]) -> R:
    """Read a result file of one kind.

    Raises:
        RecordError: it is of another kind, damaged, foreign or newer.
    """
    record = load(path)
    if not isinstance(record, kind):
        raise RecordError(f"{path} is a result of {record.kind}, not of {kind.model_fields['kind'].default}")
    return record
