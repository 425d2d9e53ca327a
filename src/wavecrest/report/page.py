"""Puts the report together: the record, the sentences and the plots into one HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from wavecrest.records import DecisionRow, OptimizeRecord, StepOutcome, Verdict, files
from wavecrest.report import breakdown, histograms, numbers, proof, roofline, waterfall, words

FILTERS = {
    "count": numbers.count,
    "date": numbers.date,
    "error": numbers.error,
    "interval": numbers.interval,
    "large": numbers.large,
    "memory": numbers.memory,
    "ms": numbers.ms,
    "percent": numbers.percent,
    "prose": numbers.prose,
    "ratio": numbers.ratio,
    "seconds": numbers.seconds,
    "significant": numbers.significant,
}


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    # autoescape is on whatever the file is called: module names and reasons may hold HTML
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.globals.update(
        error_share=numbers.error_share,
        worst_error=proof.worst_error,
        details_line=details_line,
        final_claim=proof.final_claim,
        plain=plain,
        unchanged=words.unchanged,
    )
    return environment


def render(record: OptimizeRecord) -> str:
    """The report of a record, as one HTML document that needs no network and reads well without JavaScript."""
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    kept, rest = histograms.split(record)
    return (
        _environment()
        .get_template("template.html.j2")
        .render(
            record=record,
            header=record.header,
            device=record.header.device,
            headline=words.headline(record),
            summary=words.summary(record),
            times=words.times(record),
            tried=[step for step in record.steps if step.verdict != "skipped"],
            skipped=[step for step in record.steps if step.verdict == "skipped"],
            evidence=words.evidence(record),
            facts=facts(record),
            timer=proof.timer(record),
            gate=proof.gate(record),
            commands=words.commands(record),
            verdicts=words.VERDICTS,
            waterfalls=waterfall.panels(record),
            panels=breakdown.time_panels(record),
            rooflines=roofline.panels(record),
            roofline_legend=roofline.legend(record),
            histograms=kept,
            other_histograms=rest,
            dropped=dropped(record.steps),
            sources=sources(record.coverage),
            seconds_spent=sum(step.seconds for step in record.steps),
            document=_json(record),
            style=Markup(_asset("style.css")),
            script=Markup(script),
            script_hash=digest,
        )
    )


def write(record: OptimizeRecord, path: Path) -> None:
    """Write the report of a record to `path`, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    files.write_text(path, render(record))


def _json(record: OptimizeRecord) -> Markup:
    """The record as JSON that no text inside can end or leave the script element with."""
    text = record.model_dump_json()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def facts(record: OptimizeRecord) -> list[tuple[str, str]]:
    """(name, value) of where the result comes from; "unknown" rather than a gap."""
    header, device, versions = record.header, record.header.device, record.header.versions
    memory = device.get("memory_bytes")
    units = device.get("compute_units")
    unit_name = "cores" if device.get("kind") == "cpu" else "compute units"
    return [
        ("Device", str(device.get("name", "unknown"))),
        ("Architecture", str(device.get("arch", "unknown"))),
        ("Size", f"{units} {unit_name}, {numbers.memory(memory)}" if units and memory else "unknown"),
        ("Linux kernel" if device.get("kind") == "cpu" else "Driver", str(device.get("driver", "unknown"))),
        ("Platform", versions.platform),
        ("PyTorch", versions.torch or "not installed"),
        ("Triton", versions.triton or "not installed"),
        ("Transformers", versions.transformers or "not installed"),
        ("Python, NumPy", f"{versions.python}, {versions.numpy}"),
        ("wavecrest", f"{versions.wavecrest}, commit {header.commit or 'unknown'}"),
        ("Model", f"{numbers.large(record.parameters)} parameters, {record.dtype}"),
        ("Date", numbers.date(header.created)),
        ("Ladder", f"level {record.level}, budget {numbers.seconds(record.budget_seconds)}"),
        ("A step must gain", f"more than {numbers.percent(record.min_gain, 1)}"),
    ]


def sources(coverage: list[DecisionRow]) -> list[tuple[str, int]]:
    """(source, calls) of the dispatch decisions, most calls first."""
    calls: dict[str, int] = {}
    for row in coverage:
        calls[row.source] = calls.get(row.source, 0) + row.calls
    return sorted(calls.items(), key=lambda item: -item[1])


def dropped(steps: list[StepOutcome]) -> list[tuple[Verdict, str, int, str]]:
    """(verdict, title, attempt, reason) of what was tried and not kept."""
    rows: list[tuple[Verdict, str, int, str]] = []
    order: tuple[Verdict, ...] = ("reverted", "tie", "refused")
    for verdict in order:
        rows += [(verdict, step.title, step.attempt, step.reason) for step in steps if step.verdict == verdict]
    return rows


def details_line(step: StepOutcome) -> str:
    """Summary of the expandable part of a step: "32 sites · 2 buckets · 4 outputs · 41 s"."""
    counted = (
        (len(step.sites), "site", "sites"),
        (len(step.params), "parameter", "parameters"),
        (len(step.speed), "bucket timed", "buckets timed"),
        (len(step.numerics), "output checked", "outputs checked"),
        (len(step.quality), "quality check", "quality checks"),
    )
    parts = [f"{number} {one if number == 1 else many}" for number, one, many in counted if number]
    spent = numbers.seconds(step.seconds)
    if step.compile_seconds >= 0.1 * step.seconds > 0:
        spent += f", {numbers.seconds(step.compile_seconds)} of it compiling"
    return " · ".join([*parts, spent])


def plain(value: Any) -> str:
    """A parameter's value as JSON; text as it is."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
