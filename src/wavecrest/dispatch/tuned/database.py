"""The measured rows of an architecture: the user's own, and those that come with the package.

Rows say which backend was the fastest for a shape key, with which configuration, and where that is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wavecrest.dispatch.tuned import published
from wavecrest.dispatch.tuned.overlay import Overlay
from wavecrest.dispatch.tuned.row import Proposal, Row, RowKey, here, said
from wavecrest.dispatch.tuned.table import read, write

__all__ = ["DATA", "Database", "read", "write"]

# the rows that come with the package
DATA = Path(__file__).with_name("data")


class Database:
    """The measured rows of one architecture, by op; each file is read when its op is first asked for.

    Args:
        folder: holds `<arch>/<op>.csv`; None: the rows that come with the package.
        arch: the architecture whose rows hold, such as "sm_90"; None: that of the current GPU.
        overlay: the user's own rows, which win over those of the folder; None: no such rows.

    Published choices are read from the package, or from the folder "prior" of another `folder` (see `published`).
    """

    def __init__(self, folder: Path | None = None, arch: str | None = None, overlay: Overlay | None = None) -> None:
        self.folder = DATA if folder is None else folder
        self.overlay = overlay
        self._trial: Mapping[str, Sequence[Row]] = {}
        self._prior = published.PRIOR if folder is None else folder / "prior"
        self._arch = arch
        self._rows: dict[str, Mapping[RowKey, Row]] = {}
        # keys whose row is the user's
        self._users: dict[str, frozenset[RowKey]] = {}
        # proposals made before: a look-up that repeats makes nothing new
        self._exact: dict[str, dict[RowKey, Proposal]] = {}
        self._published: dict[str, published.Priors] = {}

    @property
    def arch(self) -> str:
        """The architecture whose rows hold."""
        return here().arch if self._arch is None else self._arch

    def trying(self, rows: Mapping[str, Sequence[Row]]) -> Database:
        """This one with rows by op that stand before all others, of a run that has not kept them yet."""
        made = Database(self.folder, self._arch, self.overlay)
        made._trial, made._prior = rows, self._prior
        return made

    def without_overlay(self) -> Database:
        """This one without the user's own rows, and without those of a run."""
        made = Database(self.folder, self._arch)
        made._prior = self._prior
        return made

    def path(self, op: str) -> Path:
        """Where the rows of an op are, if it has any."""
        return self.folder / self.arch / f"{op}.csv"

    def forget(self) -> None:
        """Read every file anew when it is asked for again."""
        for cache in (self._rows, self._users, self._exact, self._published):
            cache.clear()

    def rows(self, op: str, fields: tuple[str, ...]) -> Mapping[RowKey, Row]:
        """The rows of an op by key, the best where there are several; none where there is no file.

        Rows that `wavecrest tune` measured stand before those that were imported, the user's before the package's,
        those of this device and of these versions before others, new before old.

        Args:
            op: the op's name.
            fields: the names of the key's parts that the table has columns for.

        Raises:
            TableError: a file is malformed.
        """
        rows = self._rows.get(op)
        if rows is None:
            found = [(row, False) for row in read(self.path(op), fields).values()]
            if self.overlay is not None:
                found += [(row, True) for row in self.overlay.read(self.arch, op, fields)]
            # the last of a key stays
            best = {row.key: (row, user) for row, user in (sorted(found, key=_standing) if found else ())}
            best |= {row.key: (row, False) for row in self._trial.get(op, ())}
            rows = self._rows[op] = {key: row for key, (row, _user) in best.items()}
            self._users[op] = frozenset(key for key, (_row, user) in best.items() if user)
        return rows

    def look_up(self, op: str, fields: tuple[str, ...], key: RowKey) -> Proposal | None:
        """The proposal of the row that was measured for exactly this key, or None.

        Args:
            op, fields: as for `rows`.
            key: the parts of the key that `fields` names.

        Raises:
            TableError: a file is malformed.
        """
        made = self._exact.get(op)
        if made is None:
            made = self._exact[op] = {}
        proposal = made.get(key)
        if proposal is None:
            row = self.rows(op, fields).get(key)
            if row is not None:
                proposal = made[key] = Proposal(row.backend, row.config, "exact", self.said(op, row))
        return proposal

    def prior(self, op: str, fields: tuple[str, ...], key: RowKey) -> Proposal | None:
        """The published choice for a key, or None; arguments and errors are those of `look_up`."""
        known = self._published.get(op)
        if known is None:
            known = self._published[op] = published.read(self._prior / self.arch / f"{op}.csv", fields)
        return known.look_up(fields, key)

    def said(self, op: str, row: Row) -> str:
        """The times of a row of `rows` and their source, as text for people."""
        return said(row, user=row.key in self._users[op])


def _standing(found: tuple[Row, bool]) -> tuple[bool, bool, bool, bool, bool, str]:
    row, user = found
    evidence, now = row.evidence, here()
    return (
        not evidence.origin, user, evidence.device == now.device, evidence.units == now.units,
        evidence.versions == now.versions, evidence.date,
    )  # fmt: skip
