"""Shared by all commands: the consoles, the options that repeat, and the printing of JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import JSONHighlighter
from rich.markup import escape
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from wavecrest.errors import InvalidArgument, WorkloadError

if TYPE_CHECKING:
    from wavecrest.dispatch.decision import OpCoverage

# characters that a terminal acts on, or that change how the text around them reads: all control characters but the
# line feed and the tab, and those that turn the direction of text
_ACTIVE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def visible(text: str) -> str:
    """Text whose control characters are written out, as \\x1b, so that text from a file cannot drive a terminal."""
    return _ACTIVE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Console(Console):
    """A console that shows control characters of what is printed instead of sending them to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text with its markup, made visible."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces that go to the terminal: of text that is no markup, too, and without the console's own codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


# the least width of a column that is folded, and of one that is cut on purpose
FOLDED, CUT = 14, 8
_UNLIMITED = 10_000

# results go to stdout, everything about the work in progress to stderr
# no emoji: rich reads one in "M=4:a: …"
out = _Console(highlight=False, emoji=False)
err = _Console(stderr=True, highlight=False, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N (ROCm devices too). Default: the GPU if there is one."),
]
WorkloadArgument = Annotated[
    str | None,
    typer.Argument(metavar="W", help="file.py:function or package.module:function returning (model, inputs)."),
]
HfOption = Annotated[
    str | None, typer.Option("--hf", metavar="DIR", help="A local Hugging Face model folder, instead of W.")
]


def _use_kernels(specs: list[str] | None) -> list[str] | None:
    if specs:
        from wavecrest.backends import user_files

        user_files.use(specs)
    return specs


KernelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernels",
        metavar="FILE",
        callback=_use_kernels,
        help="Load this first, FILE.py or a module that registers kernels of your own (wavecrest.register_kernel); "
        "child processes load it too. Repeatable.",
    ),
]


class Interrupted(Exception):
    """A command that was interrupted has something to say about it; its program turns this into the line and 130."""


def print_error(text: str) -> None:
    """An error as one line on standard error; its text is not markup."""
    err.print(f"[red]error:[/red] {escape(text)}", soft_wrap=True)


def print_json(model: pydantic.BaseModel) -> None:
    """A record as JSON on standard output: characters that a terminal acts on as \\uNNNN, which is the same JSON."""
    text = _ACTIVE.sub(lambda match: f"\\u{ord(match[0]):04x}", model.model_dump_json(indent=2))
    shown = JSONHighlighter()(text)
    shown.no_wrap, shown.overflow = True, None
    out.print(shown, soft_wrap=True)


def spec_of(workload: str | None, hf: str | None, generate: str | None = None) -> str:
    """The workload spec of a command line.

    Raises:
        InvalidArgument: no workload was given, or more than one.
    """
    if sum(one is not None for one in (workload, hf, generate)) != 1:
        raise InvalidArgument("give one workload: file.py:function, package.module:function, or --hf DIR")
    if workload is not None:
        return workload
    return f"hf:{hf}" if generate is None else f"generate:{generate}"


def check_file(spec: str) -> None:
    """Look for the file of a workload, which takes no import of torch.

    Raises:
        WorkloadError: it is not there.
    """
    file = spec.removeprefix("generate:").rpartition(":")[0]
    # loading says what is wrong with a name that no file can have
    if file.endswith(".py") and "\0" not in file and not Path(file).exists():
        raise WorkloadError(f"no file {file}")


def parse_percent(text: str) -> float:
    """A share from "3%" or "0.03".

    Raises:
        InvalidArgument: it is neither, or negative; a plain number of 1 or more is refused, as "3" may mean 3%.
    """
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        raise InvalidArgument(f"a percentage is written like 3% or 0.03, not {text!r}") from None
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"a percentage must not be negative: {text!r}")
    if value >= 1 and not stripped.endswith("%"):
        raise InvalidArgument(f"{text} is ambiguous: write {text}% or {value / 100:g}")
    return value


def format_time(ms: float) -> str:
    """Milliseconds with four digits and a unit that fits: "96.20 µs", "12.34 ms", "1.234 s"."""
    value, unit = (ms * 1e3, "µs") if ms < 1 else (ms, "ms") if ms < 1000 else (ms / 1e3, "s")
    return f"{value:.{max(0, 3 - len(str(int(value))) + 1)}f} {unit}"


def format_bytes(count: int | None) -> str:
    """Bytes in binary units, or a dash if unknown."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def shapes_line(shapes: dict[str, str], limit: int = 4) -> str:
    """The first inputs of a bucket with their shapes, and the number of others (a cache has two per layer)."""
    shown = ", ".join(f"{path} {shape}" for path, shape in list(shapes.items())[:limit])
    return shown + (f" and {len(shapes) - limit} more" if len(shapes) > limit else "")


def print_table(table: Table) -> None:
    """Print a table whose cells are text; where it is wider than the terminal, each row as a list below its first cell.

    Columns with `overflow="fold"` wrap, those with a `max_width` are cut there. All others, the numbers, have the width
    that they need: rich would cut them as well.
    """
    widths = _widths(table)
    if widths is None:
        _print_rows(table)
        return
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    out.print(table)


def _widths(table: Table) -> list[int] | None:
    """The width of each column, so that all fit the terminal; None where they do not."""
    # words are parted only where they would not fit whole
    return _fitting(table, _UNLIMITED) or _fitting(table, FOLDED)


def _fitting(table: Table, longest: int) -> list[int] | None:
    least, widths = [], []
    for column in table.columns:
        lines = [line.plain for cell in (column.header, *column.cells) for line in _text(cell).split(allow_blank=True)]
        width = max((cell_len(line) for line in lines), default=0)
        word = max((cell_len(word) for line in lines for word in line.split()), default=0)
        width = width if column.max_width is None else min(width, column.max_width)
        cut = min(width, CUT) if column.max_width is not None else width
        least.append(max(column.min_width or 0, min(word, longest) if column.overflow == "fold" else cut))
        widths.append(max(width, least[-1]))
    for column, width in zip(table.columns, least, strict=True):
        column.width = width
    edges = table.__rich_measure__(out, out.options.update(max_width=_UNLIMITED)).minimum - sum(least)
    over = sum(widths) + edges - out.width
    while over > 0:
        # the widest of those that may give
        place = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
        if widths[place] == least[place]:
            return None
        widths[place] -= 1
        over -= 1
    return widths


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else out.render_str(str(cell))


def _print_rows(table: Table) -> None:
    first, *titles = [", ".join(_text(column.header).plain.split("\n")) for column in table.columns]
    if table.title:
        out.print(_text(table.title))
    for name, *rest in zip(*(column.cells for column in table.columns), strict=True):
        out.print(Text.assemble((f"{first} " if first else "", "dim"), _text(name)))
        for title, cell in zip(titles, rest, strict=True):
            value = Text(", ").join(_text(cell).split())
            if value.plain:
                out.print(Padding(Text.assemble(f"{title}: " if title else "", value), (0, 0, 0, 2), expand=False))


def print_coverage(rows: Sequence[OpCoverage]) -> None:
    """Print how a run's calls were decided: per op its calls, and its keys by source; nothing if no op ran."""
    from wavecrest.dispatch.decision import SOURCES

    if not rows:
        return
    # these two columns are rarely needed
    rare = [source for source in ("prior", "forced") if not any(source in row.keys for row in rows)]
    sources = [source for source in SOURCES if source not in rare]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title="keys by source", title_justify="left")
    table.add_column("op", overflow="fold", min_width=8)
    for title in ("calls", *sources):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        keys = [str(row.keys.get(source, "–")) for source in sources]
        table.add_row(escape(row.op), f"{sum(row.calls.values()):,}", *keys)
    print_table(table)
    out.print("[dim]calls inside torch.compile are decided and not counted; exact: a measured row of its own[/dim]")
