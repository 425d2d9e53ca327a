"""Results as small pieces of HTML for a notebook's cell; nothing of them runs or loads anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from wavecrest.records import OptimizeRecord
from wavecrest.report import numbers, words

Row = Sequence[str]


def card(title: str, lines: Iterable[str] = (), head: Row = (), rows: Iterable[Row] = (), more: str = "") -> Markup:
    """A title, lines of text, and a table; `more` is HTML that follows. All text is escaped."""
    parts = [Markup("<b>{}</b>").format(title)]
    parts += [Markup("<br>{}").format(line) for line in lines if line]
    found = list(rows)
    if found:
        parts.append(table(head, found))
    return Markup("<div>{}{}</div>").format(Markup("").join(parts), Markup(more))


def table(head: Row, rows: Iterable[Row]) -> Markup:
    """A table of text."""
    cells = Markup('<td style="text-align:left">{}</td>')
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(cells.format(cell) for cell in row)) for row in rows
    )
    titles = Markup("").join(Markup('<th style="text-align:left">{}</th>').format(title) for title in head)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(titles, body)


def folded(title: str, content: Markup) -> Markup:
    """Content behind a line to click on."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, content)


def result(record: OptimizeRecord, notes: Iterable[str] = ()) -> str:
    """The first line of a run, its times before and after, and its steps, the ones that were not kept folded."""
    speed = record.result.speed if record.result and not words.failed_checks(record.result) else []
    phases = record.result is not None and record.result.unit == "phases"
    times = [
        (
            row.bucket, f"{numbers.ms(row.base_ms)} ms", f"{numbers.ms(row.new_ms)} ms", numbers.ratio(row.ratio),
            numbers.DASH if phases else numbers.interval(row.ci),
        )
        for row in speed
    ]  # fmt: skip
    kept = [step for step in record.steps if step.verdict == "kept"]
    rest = [(step.title, step.verdict, step.reason) for step in record.steps if step.verdict != "kept"]
    more = Markup("")
    if kept:
        shown = [(step.title, numbers.ratio(step.ratio), numbers.interval(step.ci)) for step in kept]
        more += table(("kept", "speed-up", "95 % CI"), shown)
    if rest:
        more += folded(f"{len(rest)} steps not kept, and why", table(("step", "verdict", "reason"), rest))
    lines = (words.headline(record).meaning, *notes)
    return str(card(words.first_line(record), lines, ("inputs", "before", "after", "speed-up", "95 % CI"), times, more))
