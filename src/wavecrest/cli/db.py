"""`wavecrest db`: the measured rows that dispatch reads, the user's own and the package's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, TableError

if TYPE_CHECKING:
    from wavecrest.dispatch.tuned import Entry, Overlay, Row
    from wavecrest.tune.evaluate_near_rows import Summary
    from wavecrest.tune.shared import Sharing

app = typer.Typer(
    help="The measured rows that dispatch reads: the user's own database, and the package's tables.",
    no_args_is_help=True,
)

# number of unused lines that are shown
SHOWN = 5

ArchOption = Annotated[str | None, typer.Option(metavar="ARCH", help="Only rows of this architecture, such as gfx942.")]
OpArgument = Annotated[str | None, typer.Argument(metavar="OP", help="Only rows of this op.")]


class DbRow(pydantic.BaseModel):
    """One measured row with its evidence; `place` is "user" or "package"."""

    place: str
    arch: str
    op: str
    key: dict[str, int | bool | str | None]
    backend: str
    config: dict[str, int]
    us: float
    native_us: float | None
    default_us: float | None
    error: float | None
    record: str
    device: str
    units: int | None
    versions: str
    date: str
    commit: str
    origin: str


class DbRecord(pydantic.BaseModel):
    """`wavecrest db show`: the rows, and the user's database."""

    kind: str = "db"
    database: str | None
    rows: list[DbRow]


def user() -> Overlay:
    """The user's database.

    Raises:
        InvalidArgument: WAVECREST_DATABASE is off.
    """
    from wavecrest.dispatch.tuned import Overlay

    found = Overlay.of_user()
    if found is None:
        raise InvalidArgument("there is no user database: WAVECREST_DATABASE is off; set it to a file, or unset it")
    return found


def packaged(arch: str | None = None, op: str | None = None) -> list[Entry]:
    """The rows shipped with the package.

    Raises:
        TableError: a table is malformed.
        InvalidArgument: a table's op is unknown.
    """
    from wavecrest import ops
    from wavecrest.dispatch import lookup
    from wavecrest.dispatch.tuned import Entry, database

    found = []
    for path in sorted(database.DATA.glob("*/*.csv")):
        if (arch is None or path.parent.name == arch) and (op is None or path.stem == op):
            fields = lookup.fields_of(ops.get(path.stem))
            rows = database.read(path, fields).values()
            found += [Entry(path.parent.name, path.stem, fields, row) for row in rows]
    return found


def run_show(op: str | None = None, arch: str | None = None) -> DbRecord:
    """The rows of both, filtered by op and architecture if given.

    Raises:
        InvalidArgument: the op is unknown.
        TableError: a table, or the user's database, is damaged.
    """
    from wavecrest import ops
    from wavecrest.dispatch.tuned import Overlay

    if op is not None:
        ops.get(op)
    overlay = Overlay.of_user()
    mine = [] if overlay is None else overlay.entries(arch, op)
    rows = [_shown(entry, "user") for entry in mine]
    rows += [_shown(entry, "package") for entry in packaged(arch, op)]
    return DbRecord(database=None if overlay is None else str(overlay.path), rows=rows)


def _shown(entry: Entry, place: str) -> DbRow:
    row, evidence = entry.row, entry.row.evidence
    return DbRow(
        place=place, arch=entry.arch, op=entry.op, key=dict(zip(entry.fields, row.key, strict=True)),
        backend=row.backend, config=dict(row.config or {}), us=row.us, native_us=row.native_us,
        default_us=evidence.default_us, error=evidence.error, record=row.record, device=evidence.device,
        units=evidence.units, versions=evidence.versions, date=evidence.date, commit=evidence.commit,
        origin=evidence.origin,
    )  # fmt: skip


@app.command("show")
def show(op: OpArgument = None, arch: ArchOption = None, json: _shared.JsonOption = False) -> None:
    """Show the measured rows with their evidence: times, error, device, versions, date, commit, record."""
    record = run_show(op, arch)
    if json:
        _shared.print_json(record)
        return
    _shared.out.print(f"user database: {escape(record.database or 'off')}", soft_wrap=True)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("row", overflow="fold", min_width=16)
    table.add_column("runs", overflow="fold", min_width=12)
    for title in ("time", "PyTorch"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("evidence", overflow="fold", min_width=16)
    for row in record.rows:
        table.add_row(*_cells(row))
    if record.rows:
        _shared.print_table(table)
    mine = sum(row.place == "user" for row in record.rows)
    _shared.out.print(f"{mine} rows of the user's, {len(record.rows) - mine} of the package's")


def _cells(row: DbRow) -> list[str]:
    key = " ".join(f"{name}={_text(value)}" for name, value in row.key.items() if value not in (None, False, "none"))
    config = " ".join(f"{name}={value}" for name, value in row.config.items())
    error = "" if row.error is None else f"error {row.error:.1e}"
    facts = (row.origin, error, row.device, row.versions, row.date[:10], row.commit, row.record)
    return [
        f"{escape(f'{row.op} {row.arch}')} [dim]{escape(row.place)}\n{escape(key)}[/dim]",
        f"{escape(row.backend)}\n[dim]{escape(config)}[/dim]" if config else escape(row.backend),
        _shared.format_time(row.us / 1e3),
        "–" if row.native_us is None else _shared.format_time(row.native_us / 1e3),
        escape(", ".join(fact for fact in facts if fact)),
    ]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_export(path: Path, form: str = "csv", op: str | None = None, arch: str | None = None) -> tuple[int, list[str]]:
    """Write the user's rows to files; returns the number of rows, and the rows that the form cannot express.

    Args:
        path: a folder for `csv`, which gets `<arch>/<op>.csv`; else a file.
        form: "csv", or one of `wavecrest.tune.exchange.FORMATS`, which need `arch`.
        op, arch: only these rows.

    Raises:
        InvalidArgument: an unknown form, or a missing architecture.
        OutputError: a file cannot be written.
        TableError: the user's database is damaged.
    """
    from wavecrest.dispatch.tuned import database
    from wavecrest.records import files
    from wavecrest.tune import exchange

    entries = user().entries(arch, op)
    if form != "csv":
        if arch is None:
            raise InvalidArgument("a file of another program is for one architecture: give --arch")
        made = exchange.written(entries, form, arch)
        files.prepare_folder(path.parent)
        files.write_text(path, made.text)
        return made.rows, list(made.left)
    tables: dict[tuple[str, str, tuple[str, ...]], dict[Any, Row]] = {}
    for entry in sorted(entries, key=lambda entry: (not entry.row.evidence.origin, entry.row.evidence.date)):
        # per key the last one stays: wavecrest's own measurements, the newest of them
        tables.setdefault((entry.arch, entry.op, entry.fields), {})[entry.row.key] = entry.row
    for (name, of, fields), rows in tables.items():
        database.write(path / name / f"{of}.csv", fields, rows.values())
    count = sum(map(len, tables.values()))
    others = len(entries) - count
    return count, [f"{others} older rows of the same keys: a table has one a key"] if others else []


def run_share(path: Path, op: str | None = None, arch: str | None = None) -> Sharing:
    """Write the user's rows to a file that holds nothing of the user; returns what is in it, and what is not.

    Args:
        path: the file, JSON.
        op, arch: only these rows.

    Raises:
        InvalidArgument: there is no row to share.
        OutputError: the file cannot be written.
        TableError: the user's database is damaged.
    """
    from wavecrest.records import files
    from wavecrest.tune import shared

    made = shared.rows_of(user().entries(arch, op))
    if not made.document.rows:
        raise InvalidArgument(
            f"the database has no row to share ({len(made.left)} are left out): run `wavecrest tune` on a GPU first"
        )
    files.prepare_folder(path.parent)
    files.write_text(path, made.document.model_dump_json(indent=1) + "\n")
    return made


@app.command("export")
def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder for csv, else a file.")],
    form: Annotated[
        str, typer.Option("--format", help="csv (as the package's tables), aiter-bf16, aiter-a8w8 or tunableop.")
    ] = "csv",
    share: Annotated[
        bool, typer.Option("--share", help="One JSON file to send to others, without names of hosts, users and paths.")
    ] = False,
    op: Annotated[str | None, typer.Option(help="Only rows of this op.")] = None,
    arch: ArchOption = None,
) -> None:
    """Write the rows of the user's database to files."""
    if share:
        if form != "csv":
            raise InvalidArgument(f"--share writes a form of its own, not {form}: leave --format out")
        made = run_share(path, op, arch)
        ops = Counter(row.op for row in made.document.rows)
        rows = ", ".join(f"{count} of {name}" for name, count in sorted(ops.items()))
        _shared.out.print(f"rows written to {escape(str(path))}: {rows}", soft_wrap=True)
        _shared.out.print("beside keys, configurations and times the file says:")
        for name, texts in made.document.facts().items():
            _shared.out.print(f"  {name}: {escape('; '.join(texts))}", soft_wrap=True, highlight=False)
        _list(list(made.left))
        return
    count, left = run_export(path, form, op, arch)
    _shared.out.print(f"{count} rows written to {escape(str(path))}", soft_wrap=True)
    _list(left)


def run_import(paths: Iterable[Path], arch: str | None = None, op: str | None = None) -> tuple[int, list[str]]:
    """Add the rows of files to the user's database, all or none; returns their number, and the unused lines.

    Args:
        paths: tables of measured rows, records of `wavecrest tune`, files of `wavecrest db export --share`, tables of
            aiter's, result files of TunableOp's.
        arch: architecture of files that do not name one.
        op: op of a table whose file is not named after it.

    Raises:
        TableError, RecordError: a file is damaged; the message names the lines. No row is added then.
        InvalidArgument: an architecture or an op is missing or unknown.
        OutputError: the database cannot be written.
    """
    from wavecrest import hardware, ops
    from wavecrest.dispatch import lookup
    from wavecrest.dispatch.tuned import Entry, database
    from wavecrest.tune import exchange, shared

    overlay = user()
    entries: list[Entry] = []
    left: list[str] = []
    for path in paths:
        if path.suffix == ".json" and shared.is_shared(path):
            rows, unused = shared.read(path, arch)
            entries += rows
            left += [f"{path.name}, {line}" for line in unused]
            continue
        if _is_table(path):
            name = arch or path.parent.name
            if name not in hardware.ARCHS:
                raise InvalidArgument(f"{path} does not say which architecture it is for: give --arch")
            found = ops.get(op or path.stem)
            fields = lookup.fields_of(found)
            entries += [Entry(name, found.name, fields, row) for row in database.read(path, fields).values()]
            continue
        taken = exchange.read(path, arch)
        entries += taken.entries
        left += [f"{path.name}, {line}" for line in taken.left]
    count = overlay.write(entries)
    if count < len(entries):
        left.append(f"{len(entries) - count} rows: the database has newer ones")
    return count, left


def _is_table(path: Path) -> bool:
    """Whether a file is a table of measured rows; False if it cannot be read."""
    from wavecrest.dispatch.tuned.table import COLUMNS

    try:
        with path.open("rb") as file:
            head = file.readline(1 << 16)
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}") from error
    return ",".join(COLUMNS).encode() in head


@app.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Tables of measured rows (<arch>/<op>.csv), records of wavecrest tune, files of wavecrest db export "
            "--share, aiter's tuned tables of 16-bit and a8w8 products, TunableOp's result files.",
        ),
    ],
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Architecture of files that do not name one.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Op of a table that is not named after it.")] = None,
) -> None:
    """Add the rows of files to the user's database: all of them, or none if a line of a file is bad."""
    count, left = run_import(paths, arch, op)
    _shared.out.print(f"{count} rows added to {escape(str(user().path))}", soft_wrap=True)
    _list(left)


def _list(left: list[str]) -> None:
    """List the unused lines by reason: their number, and the first of them."""
    reasons: dict[str, list[str]] = {}
    for line in left:
        where, _, reason = line.partition(": ")
        reasons.setdefault(reason or where, []).append(where)
    for reason, places in reasons.items():
        few = "; ".join(places[:SHOWN]) + (f"; and {len(places) - SHOWN} more" if len(places) > SHOWN else "")
        _shared.err.print(f"[yellow]left out[/yellow]: {escape(reason)}: {escape(few)}", soft_wrap=True)


def run_merge(paths: Iterable[Path]) -> tuple[int, int]:
    """Add the rows of other databases to the user's, all or none; returns how many were newer, and the total.

    Raises:
        TableError: one of them is damaged or missing. No row is added then.
        OutputError: the user's cannot be written.
    """
    from wavecrest.dispatch.tuned import Overlay

    overlay = user()
    entries: list[Entry] = []
    for path in paths:
        if not path.is_file():
            raise TableError(f"no database at {path}")
        if path.suffix in (".json", ".csv"):
            raise TableError(f"{path.name} is no database: `wavecrest db import` takes files of rows")
        entries += Overlay(path).entries()
    return overlay.write(entries), len(entries)


@app.command("merge")
def merge(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Other databases, such as of another machine.")],
) -> None:
    """Add the rows of other databases to the user's; of two rows for one key the newer stays."""
    taken, there = run_merge(paths)
    _shared.out.print(f"{taken} of {there} rows taken into {escape(str(user().path))}", soft_wrap=True)


def run_check(paths: Iterable[Path] = ()) -> tuple[int, list[str]]:
    """Check every row of the user's database (or of these), and of the package; returns their number and the faults.

    Raises:
        TableError: a file is damaged, or has rows that dispatch cannot use.
    """
    from wavecrest.dispatch.tuned import Overlay

    mine = Overlay.of_user()
    given = [Overlay(path) for path in paths]
    missing = next((overlay.path for overlay in given if not overlay.path.exists()), None)
    if missing is not None:
        raise TableError(f"no database at {missing}")
    overlays = given or ([] if mine is None else [mine])
    problems: list[str] = []
    notes: list[str] = []
    count = 0
    for overlay in overlays:
        problems += overlay.check()
        for entry in overlay.entries():
            count += 1
            bad, note = _unusable(entry)
            problems += [f"{overlay.path}: {bad}"] if bad else []
            notes += [note] if note else []
    for entry in packaged():
        count += 1
        bad, note = _unusable(entry)
        problems += [f"{entry.arch}/{entry.op}.csv: {bad}"] if bad else []
        notes += [note] if note else []
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise TableError(f"{'; '.join(problems[:SHOWN])}{more}")
    return count, notes


def _unusable(entry: Entry) -> tuple[str, str]:
    """The fault of a row, and the reason why a valid row is not read."""
    from wavecrest import ops
    from wavecrest.dispatch import lookup

    key = " ".join(map(_text, entry.row.key))
    if entry.op not in ops.names():
        return "", f"{entry.op} {key}: there is no such op here"
    op = ops.get(entry.op)
    if entry.fields != lookup.fields_of(op):
        return "", f"{entry.op} {key}: the op's keys have other parts now; tune it again"
    given = dict(zip(entry.fields, entry.row.key, strict=True)) | {"device": "cuda", "grad": False}
    whole = tuple(given[name] for name in op.key_fields)
    problem = lookup.unusable(op, whole, tuple(op.backends), entry.row.backend, entry.row.config)
    return (f"{entry.op} {key}: {entry.row.backend}, {problem}" if problem else ""), ""


@app.command("check")
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE…", help="Databases, instead of the user's.")
    ] = None,
) -> None:
    """Check the user's database and the package's tables: whole, readable, and of use to dispatch."""
    count, notes = run_check(paths or ())
    for note in notes:
        _shared.err.print(f"[yellow]not read[/yellow]: {escape(note)}", soft_wrap=True)
    _shared.out.print(f"{count} rows are well")


def run_evaluate_near_rows(paths: Iterable[Path]) -> list[Summary]:
    """Measure what near rows gain and lose on the keys of tuning records; see `wavecrest.tune.evaluate_near_rows`.

    Raises:
        RecordError: a file is not a record of `wavecrest tune`.
    """
    from wavecrest import records
    from wavecrest.tune import evaluate_near_rows

    found = [records.load_as(path, records.TuneRecord) for path in paths]
    return [evaluate_near_rows.summary(record.op, evaluate_near_rows.decide(record)) for record in found]


@app.command("leave-one-out")
def evaluate_near_rows(
    paths: Annotated[list[Path], typer.Argument(metavar="RECORD…", help="Records of wavecrest tune.")],
) -> None:
    """Decide each key of tuning records by the rows of the others, and compare with what was measured."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("op", "keys", "by a near row", "chosen", "default", "slower", "worst"):
        table.add_column(title, justify="left" if title == "op" else "right")
    for one in run_evaluate_near_rows(paths):
        times = [f"{value:.3f}×" for value in (one.chosen, one.default)]
        table.add_row(escape(one.op), str(one.keys), str(one.taken), *times, str(one.slower), f"{one.worst:.3f}×")
    _shared.print_table(table)
    _shared.out.print(
        "chosen, default: geometric mean of the time over the measured best; slower: keys that a near row made slower "
        "than the default by over 1 %; worst: the largest such ratio",
        soft_wrap=True,
    )
