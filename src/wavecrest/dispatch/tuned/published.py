"""Choices that others have published, for keys without a measured row of wavecrest.

Such a *prior* says which implementation was the fastest elsewhere. It has no time and no configuration, and the kernels
were not wavecrest's. A file `prior/<arch>/<op>.csv` has a column for each part of the key that the publication names,
then `COLUMNS`; parts that have no column may be anything. A key's measured row and near rows win over a prior.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wavecrest.dispatch.tuned.row import Cell, Proposal, RowKey
from wavecrest.dispatch.tuned.table import Malformed, cell_of
from wavecrest.errors import TableError
from wavecrest.records import decode

# the priors that come with the package
PRIOR = Path(__file__).with_name("prior")
# the columns after those of the key: our backend; what was published of the key, in its words; by whom
COLUMNS = ("backend", "published", "source")


@dataclass(frozen=True, slots=True)
class Prior:
    """A published choice for some keys: `parts` by name, the backend it is mapped to, its words, its source."""

    parts: Mapping[str, Cell]
    backend: str
    published: str
    source: str

    def proposal(self) -> Proposal:
        """The proposal that dispatch gets."""
        reason = f"prior data, published by others and not measured here: {self.published} ({self.source})"
        return Proposal(self.backend, None, "prior", reason)


class Priors:
    """The priors of one op on one architecture."""

    def __init__(self, fields: tuple[str, ...], rows: Mapping[RowKey, Prior]) -> None:
        """`fields`: the parts of a key that the rows name."""
        self.fields = fields
        self.rows = rows

    def look_up(self, fields: tuple[str, ...], key: RowKey) -> Proposal | None:
        """The published choice for a key, or None; `fields` names the parts of the key."""
        if not self.rows:
            return None
        parts = dict(zip(fields, key, strict=True))
        found = self.rows.get(tuple([parts[name] for name in self.fields]))
        return None if found is None else found.proposal()


def read(path: Path, fields: tuple[str, ...]) -> Priors:
    """The priors of a file; none where there is no such file.

    Args:
        path: `<arch>/<op>.csv` in a folder of priors.
        fields: the parts of the op's key that measured rows have columns for.

    Raises:
        TableError: the file cannot be read or is malformed; the message names the line.
    """
    if not os.path.lexists(path):
        return Priors((), {})
    text = decode.read_text(path, what="table", error=TableError)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: dict[RowKey, Prior] = {}
    try:
        header = tuple(next(reader, ()))
        named = header[: -len(COLUMNS)]
        unknown = [name for name in named if name not in fields]
        if header[-len(COLUMNS) :] != COLUMNS or not named or unknown or len(set(named)) != len(named):
            raise Malformed(
                f"the columns are {','.join(header)!r}: some of {','.join(fields)}, each once, then {','.join(COLUMNS)}"
            )
        for cells in reader:
            if len(cells) != len(header):
                raise Malformed(f"{len(cells)} cells for {len(header)} columns: correct or delete the line")
            *values, backend, published, source = cells
            if not (backend and published and source):
                raise Malformed("needs a backend, what was published, and by whom: fill them in or delete the line")
            key = tuple(map(cell_of, values))
            if key in rows:
                raise Malformed("the key is that of a line before: keep one of them")
            rows[key] = Prior(dict(zip(named, key, strict=True)), backend, published, source)
    except csv.Error as error:
        raise TableError(f"{path}, line {reader.line_num}: {error}: correct or delete the line") from None
    except Malformed as problem:
        raise TableError(f"{path}, line {max(1, reader.line_num)}: {problem}") from None
    return Priors(named, rows)
