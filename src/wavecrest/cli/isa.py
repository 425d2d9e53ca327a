"""`wavecrest isa OP`: registers, spills, waves and access widths of an op's compiled kernels; needs no GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument

if TYPE_CHECKING:
    from wavecrest.isa.facts import IsaRecord, KernelFacts, Row, Stretch
    from wavecrest.isa.survey import OnProgress

# characters of the terminal that a column of a table needs
_LABEL_WIDTH, _COLUMN_WIDTH = 16, 12


def run(
    target: str,
    *,
    archs: Sequence[str] | None = None,
    configs: Sequence[str] = (),
    case: str | None = None,
    code: bool = False,
    mca: bool = False,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> IsaRecord:
    """Compile a target's cases and read their machine code.

    Args:
        target: an op's name, "all", or file.py:function returning launches, see `isa.survey.cases_of`.
        archs: names of `hardware.ARCHS`; None for every AMD architecture there.
        configs: changes to the shipped configurations such as "num_warps=8"; empty for the shipped ones.
        case: only the case of this name.
        code: keep the hot loop's code.
        mca: add llvm-mca's model of the hot loop.
        workers: processes; None for one a core.
        on_progress: called after each kernel.

    Raises:
        InvalidArgument: no such op, architecture, case or configuration key.
        WorkloadError: the file or function cannot be loaded, or raised.
        MissingDependency: triton or, with `mca`, llvm-mca is not installed.
        EnvironmentProblem: TRITON_INTERPRET=1 is set.
    """
    from wavecrest import hardware
    from wavecrest.isa import compiler, survey
    from wavecrest.isa import mca as mca_module

    compiler.require_compiler()
    names = (
        list(archs) if archs is not None else [arch.name for arch in hardware.ARCHS.values() if arch.vendor == "amd"]
    )
    overrides = [survey.parse_override(text) for text in configs] or [{}]
    for what, given in (("--arch", names), ("--config", [survey.describe(override) for override in overrides])):
        if len(set(given)) != len(given):
            raise InvalidArgument(f"{what} names the same twice: {', '.join(given)}")
    tool = mca_module.find() if mca else None
    return survey.record(
        target, names, overrides, case, workers=workers, code=code, mca_tool=tool, on_progress=on_progress
    )


def _widths(accesses: dict[int, int]) -> str:
    return " ".join(f"{number}×{width or '?'}" for width, number in accesses.items()) or "0"


def _optional(value: int | None) -> str:
    return "–" if value is None else str(value)


def _spills(facts: KernelFacts) -> str:
    return f"{facts.spills}+{facts.sgpr_spills}s" if facts.sgpr_spills else str(facts.spills)


def _matrix(part: Stretch) -> str:
    return f"{part.matrix_count} ({part.matrix_share:.0%})" if part.matrix_count else "0"


def _waits(part: Stretch) -> str:
    return "–" if part.waits is None else f"{part.waits} ({part.drains})"


def _model(facts: KernelFacts) -> str:
    if facts.mca is None:
        return "–"
    return f"{facts.mca.matrix_cycles:.0f}/{facts.mca.cycles:.0f} {facts.mca.matrix_cycles / facts.mca.cycles:.0%}"


def _in_loop(show: Callable[[Stretch], str]) -> Callable[[KernelFacts], str]:
    return lambda facts: show(facts.hot) if facts.hot is not None else "–"


# label and the value it shows; a line is left out if every column has "–" (optional lines: or 0)
_LINES: tuple[tuple[str, Callable[[Any], str], bool], ...] = (
    ("VGPR", lambda facts: str(facts.vgpr), False),
    ("AGPR", lambda facts: _optional(facts.agpr), True),
    ("SGPR", lambda facts: _optional(facts.sgpr), False),
    ("spills", _spills, False),
    ("scratch B", lambda facts: str(facts.scratch), False),
    ("LDS B", lambda facts: str(facts.lds), False),
    ("waves per SIMD", lambda facts: f"{facts.waves:g} of {facts.most_waves}", False),
    ("  limited by", lambda facts: facts.limit or "–", False),
    ("loads n×B", lambda facts: _widths(facts.kernel.loads), False),
    ("stores n×B", lambda facts: _widths(facts.kernel.stores), False),
    ("matrix", lambda facts: _matrix(facts.kernel), True),
    ("code B", lambda facts: str(facts.code_bytes), False),
    ("hot loop", _in_loop(lambda part: str(part.instructions)), False),
    ("  matrix", _in_loop(_matrix), True),
    ("  loads n×B", _in_loop(lambda part: _widths(part.loads)), False),
    ("  stores n×B", _in_loop(lambda part: _widths(part.stores)), False),
    ("  LDS loads n×B", _in_loop(lambda part: _widths(part.lds_loads or {})), True),
    ("  LDS stores n×B", _in_loop(lambda part: _widths(part.lds_stores or {})), True),
    ("  scratch", _in_loop(lambda part: _optional(part.scratch)), True),
    ("  waits (full)", _in_loop(_waits), False),
    ("  barriers", _in_loop(lambda part: str(part.barriers)), True),
    ("  model", _model, False),
)


def _cells(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The lines of a table, a cell for each row that compiled."""
    compiled = [row for row in rows if row.facts is not None]
    lines = []
    keys = list(dict.fromkeys(key for row in compiled for key in row.config))
    for key in keys:
        values = [str(row.config.get(key, "–")) for row in compiled]
        if len(set(values)) > 1:
            lines.append((key, values))
    for label, show, optional in _LINES:
        values = [show(row.facts) for row in compiled]
        if not set(values) <= ({"–", "0"} if optional else {"–"}):
            lines.append((label, values))
    return lines


def _title(rows: Sequence[Row]) -> str:
    """The case, its kernel, and the part of the configuration that all columns share."""
    first = rows[0]
    shared = [
        f"{key}={value}" for key, value in first.config.items() if all(row.config.get(key) == value for row in rows)
    ]
    return f"[bold]{escape(first.case)}[/bold] · {escape(first.kernel)} · {escape(' '.join(shared))}"


def _names(rows: Sequence[Row]) -> list[str]:
    """Names of a table's columns: architecture, configuration, or both, whichever differ."""
    several = len({row.chosen for row in rows}) > 1
    if not several:
        return [row.arch for row in rows]
    return [row.chosen.replace(",", "\n") + f"\n{row.arch}" for row in rows]


def _table(rows: Sequence[Row], *, diff: bool) -> Table | str:
    compiled = [row for row in rows if row.facts is not None]
    lines = _cells(compiled)
    if diff:
        lines = [(label, values) for label, values in lines if len(set(values)) > 1]
        if not lines:
            return "no difference"
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in _names(compiled):
        table.add_column(escape(name), justify="right")
    if diff:
        table.add_column("change", justify="right")
    for label, values in lines:
        table.add_row(escape(label), *map(escape, values), *([_change(*values)] if diff else []))
    return table


def _change(old: str, new: str) -> str:
    """The difference of the numbers that two cells begin with."""
    try:
        return f"{float(new.split()[0]) - float(old.split()[0]):+g}"
    except ValueError:
        return ""


def _groups(rows: Sequence[Row], width: int) -> list[list[Row]]:
    """Rows of one case in tables that fit the terminal, with an even number of columns each where possible."""
    most = max(2, (width - _LABEL_WIDTH) // _COLUMN_WIDTH)
    archs = len({row.arch for row in rows})
    # architectures of one configuration stay together if there is room
    step = most // archs * archs if archs <= most else most
    return [list(rows[start : start + step]) for start in range(0, len(rows), step)]


def _show_code(row: Row) -> None:
    assert row.facts is not None
    hot = row.facts.hot
    what = "hot loop" if hot is not None else "whole kernel (it has no loop)"
    _shared.out.print(f"[bold]{escape(f'{row.case} {row.arch} {row.chosen}')}[/bold] · {what}")
    for line in hot.code if hot is not None else row.facts.body:
        _shared.out.print(Text(line), soft_wrap=True)
    _shared.out.print()


def show(record: IsaRecord, *, diff: bool = False, code: bool = False) -> None:
    """Print a record for people."""
    out = _shared.out
    versions = record.header.versions
    out.print(f"{escape(record.target)} · compiled by triton {escape(str(versions.triton))}, nothing was run\n")
    for target, case in dict.fromkeys((row.target, row.case) for row in record.rows):
        rows = [row for row in record.rows if (row.target, row.case) == (target, case)]
        if target != record.target:
            out.print(f"[bold]{escape(target)}[/bold]", soft_wrap=True)
        for group in _groups(rows, out.width) if not diff else [rows]:
            out.print(_title(group), soft_wrap=True)
            if any(row.facts is not None for row in group) and not (diff and any(row.facts is None for row in group)):
                table = _table(group, diff=diff)
                out.print(table) if isinstance(table, str) else _shared.print_table(table)
            for row in group:
                if row.facts is None:
                    out.print(f"[red]{escape(f'{row.arch} {row.chosen}')}:[/red] {escape(row.reason)}", soft_wrap=True)
            for reason in dict.fromkeys(
                f"{row.arch}: no model: {row.facts.mca_reason}" for row in group if row.facts and row.facts.mca_reason
            ):
                out.print(f"[dim]{escape(reason)}[/dim]", soft_wrap=True)
            out.print()
        if code:
            for row in rows:
                if row.facts is not None:
                    _show_code(row)
    _legend(record)


def _legend(record: IsaRecord) -> None:
    facts = [row.facts for row in record.rows if row.facts is not None]
    if not facts:
        return
    lines = ["n×B: n accesses of B bytes a lane, counted in the listing"]
    if any(one.hot is not None for one in facts):
        lines.append("waits (full): waits for memory, and how many of them are for every load under way")
    tools = sorted({one.mca.tool for one in facts if one.mca is not None})
    if tools:
        lines.append(
            f"model: {', '.join(tools)}: matrix cycles of all cycles of one pass, one wave alone, no memory latency; "
            "a ranking of configurations, not a time"
        )
    for line in lines:
        _shared.out.print(f"[dim]{escape(line)}[/dim]")


def _pair(archs: Sequence[str] | None, configs: Sequence[str]) -> list[str]:
    """The configurations of a --diff, completed by the shipped one.

    Raises:
        InvalidArgument: it is not exactly two columns.
    """
    one_arch = archs is not None and len(archs) == 1
    if one_arch and len(configs) == 1:
        return ["shipped", *configs]
    if (one_arch and len(configs) == 2) or (archs is not None and len(archs) == 2 and len(configs) <= 1):
        return list(configs)
    raise InvalidArgument(
        "--diff compares two columns: give --arch A,B, or one --arch with two --config (one is compared with the "
        "shipped one)"
    )


class _Group(TyperGroup):
    """`wavecrest isa OP …` is `wavecrest isa show OP …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of arguments that name no command."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    help="Machine code of an op's kernels for AMD and NVIDIA, read or run without a GPU. "
    "`wavecrest isa OP` is short for `wavecrest isa show OP`.",
)


@app.command("show")
def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="An op's name, all, or file.py:function returning a dict of case name to wavecrest.isa.Launch.",
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Architectures, such as gfx942,gfx950,sm_90. Default: every AMD one known."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,…", help="Change the shipped configuration; repeat for more columns."),
    ] = None,
    case: Annotated[str | None, typer.Option(metavar="NAME", help="Only this case.")] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show only what differs between two architectures or two --config.")
    ] = False,
    asm: Annotated[bool, typer.Option("--asm", help="Show the hot loop's code (the kernel's if it has none).")] = False,
    mca: Annotated[
        bool, typer.Option("--mca", help="Add llvm-mca's model of the hot loop: a ranking, not a time.")
    ] = False,
    budget: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hold the result to a budget file; exit code 2 if it is over.")
    ] = None,
    write_budget: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a budget file that asks for the waves per SIMD that are reached now."),
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Compile a kernel for each architecture and read its machine code: registers, spills, waves, access widths."""
    archs = None if arch is None else [name.strip() for name in arch.split(",") if name.strip()]
    if archs is not None and not archs:
        raise InvalidArgument("--arch names no architecture")
    configs = _pair(archs, config or []) if diff else config or []
    if target == "all" and (budget is not None or write_budget is not None):
        raise InvalidArgument("a budget is of one op: --budget and --write-budget do not go with all")
    limits = _load_budget(budget)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("kernels"))
    # no thread of its own: the compilers are forked
    quiet = not _shared.err.is_terminal
    with Progress(*columns, console=_shared.err, transient=True, auto_refresh=False, disable=quiet) as progress:
        task = progress.add_task("compiling", total=None)

        def on_progress(done: int, planned: int, what: str) -> None:
            progress.update(task, description=escape(what), completed=done, total=planned, refresh=True)

        record = run(target, archs=archs, configs=configs, case=case, code=asm, mca=mca, on_progress=on_progress)
    if json:
        _shared.print_json(record)
    else:
        show(record, diff=diff, code=asm)
    if write_budget is not None:
        _write_budget(write_budget, target, record)
    over = limits(record) if limits is not None else []
    for line in over:
        _shared.err.print(f"[red]over budget:[/red] {escape(line)}", soft_wrap=True)
    if over or any(row.facts is None for row in record.rows):
        raise typer.Exit(2)


def _load_budget(path: Path | None) -> Callable[[IsaRecord], list[str]] | None:
    """A function that checks a record against a budget file; the file is read before anything is compiled."""
    if path is None:
        return None
    from wavecrest.isa import budget

    loaded = budget.load(path)
    return lambda record: budget.check(loaded, record.rows)


def _write_budget(path: Path, target: str, record: IsaRecord) -> None:
    """Write a budget of a record; of a file that is there, limits and exceptions stay."""
    from wavecrest.isa import budget
    from wavecrest.records import files

    old = budget.load(path) if path.exists() else None
    files.write_text(path, budget.written(target, record.rows, old))
    _shared.err.print(f"written to {escape(str(path))}", highlight=False, soft_wrap=True)


# comparing two sides and running machine code in an emulator are commands of their own modules
for _name in ("diff", "run"):
    if importlib.util.find_spec(f"wavecrest.cli.isa_{_name}") is not None:
        app.command(_name)(importlib.import_module(f"wavecrest.cli.isa_{_name}").command)
