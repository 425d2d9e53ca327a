"""Fill in the evidence of tables written before rows had it, only from the records that their rows name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from wavecrest import ops, records
from wavecrest.dispatch import lookup
from wavecrest.dispatch.tuned import Config, Evidence, Row, database
from wavecrest.errors import InvalidArgument, RecordError
from wavecrest.tune import session


@dataclass(frozen=True, slots=True)
class Filled:
    """The outcome for a table: how many rows gained evidence, and why the others did not."""

    filled: int
    left: tuple[str, ...]


def fill(table: Path, results: Path) -> Filled:
    """Write the evidence of a table's rows into it, from their records.

    Args:
        table: `<arch>/<op>.csv`.
        results: the folder that the rows name their records in, benchmarks/results.

    Returns:
        The outcome; rows whose record is missing or disagrees are left as they are.

    Raises:
        InvalidArgument: the table is not named after an op.
        TableError, RecordError: a file is damaged.
        OutputError: the table cannot be written.
    """
    op = ops.get(table.stem)
    fields = lookup.fields_of(op)
    if not table.is_file():
        raise InvalidArgument(f"no table at {table}")
    rows = database.read(table, fields)
    loaded: dict[str, records.TuneRecord | None] = {}
    left: list[str] = []
    filled = 0
    for key, row in rows.items():
        if row.evidence != Evidence():
            continue
        if row.record not in loaded:
            loaded[row.record] = _load(results / row.record)
        found = _evidence(row, loaded[row.record], fields)
        if isinstance(found, str):
            left.append(f"{' '.join(map(str, key))}: {found}")
        else:
            rows[key] = replace(row, evidence=found)
            filled += 1
    if filled:
        database.write(table, fields, rows.values())
    return Filled(filled, tuple(left))


def _load(path: Path) -> records.TuneRecord | None:
    if not path.is_file():
        return None
    found = records.load(path)
    if not isinstance(found, records.TuneRecord):
        raise RecordError(f"{path} is a {found.kind} result, not tune")
    return found


def _evidence(row: Row, record: records.TuneRecord | None, fields: tuple[str, ...]) -> Evidence | str:
    """The evidence of a row, or the reason why its record gives no evidence."""
    if record is None:
        return f"its record {row.record} is not there"
    keys = [key for key in record.keys if tuple(key.key.get(name) for name in fields) == row.key]
    if len(keys) != 1:
        return f"{row.record} has {len(keys)} keys like it"
    (key,) = keys
    config = Config(**key.config) if key.config else None
    if key.us is None or (key.backend, config) != (row.backend, row.config) or round(key.us, 3) != row.us:
        return f"{row.record} has another winner, or another time"
    return session.evidence_of(key, record.header)
