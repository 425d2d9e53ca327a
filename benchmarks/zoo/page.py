"""docs/zoo.md, from the zoo's records: a table a machine, the seeds' four models, and what became of every step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.parts import Row
from benchmarks.zoo.measure import WAVECREST, summary
from benchmarks.zoo.peers import PEERS
from benchmarks.zoo.registry import Entry, Size, entries

from wavecrest.records import files

EVIDENCE = Path(__file__).resolve().parents[2] / "evidence"
# the four models whose throughput the project was first asked for
# seconds of budget that are small, and large
SMALL, LARGE = 150, 250
SEEDS = ("resnet-50", "resnet-152", "bert-base", "bert-large")
INTRODUCTION = (
    "Real architectures, built from their libraries' code with random weights, beside what a user has without "
    "wavecrest. All run interleaved in one process, in blocks of ABBA, by the timer that judges steps; wavecrest runs "
    "first, with its default settings and the budget of the record's command. A peer whose answer is wrong has no "
    "time. *× best* is the fastest peer's time over wavecrest's, with its 95 % interval: above 1, wavecrest is faster. "
    "*% of roofline* is the least time of the model's products at the peak, or of reading its weights and inputs once "
    "at the bandwidth, both measured just before, over wavecrest's time. *By hand* is channels_last with cuDNN's "
    "search and `reduce-overhead` for networks of images, a CUDA graph for others; on a CPU Inductor's frozen weights. "
    "Where a model ran with a small budget and with a large one, a table has both times; the two may be of different "
    "commits."
)
HOW = (
    "`PYTHONPATH=src python -m benchmarks.zoo --out FILE` measures all models, `--models mlp,vit-b16 --budget 90s` "
    "some of them, and a second call goes on where the first ended. A model is a workload too: `wavecrest optimize "
    "benchmarks.zoo.workloads:bert_base`. The runs of 2026-11-27 on H200s went two or four at a time, each on a GPU "
    "and 16 cores of its own (`CUDA_VISIBLE_DEVICES`, `taskset`). No part of a model is without effect "
    "(`benchmarks/zoo/weights.py`)."
)


class Run(NamedTuple):
    """The newest run of a model on a machine."""

    part: str
    ended: str
    header: Row | None
    rows: dict[str, Row]
    path: Path

    @property
    def figures(self) -> Row:
        """`summary` of the run; empty where it has no times."""
        return summary(list(self.rows.values()))


def runs(evidence: Path = EVIDENCE) -> dict[str, dict[str, Run]]:
    """By machine and model, the newest run; one that was done goes before one that has not all of its cases.

    Raises:
        RecordError: a record is damaged.
    """
    found: dict[str, dict[str, Run]] = {}
    for run in _all_runs(evidence):
        machine = found.setdefault(run.path.parent.name, {})
        before = machine.get(run.part)
        whole = run.ended == "done" or (before is not None and run.rows.keys() >= before.rows.keys())
        if before is None or whole or before.ended != "done":
            machine[run.part] = run
    return found


def _all_runs(evidence: Path) -> Iterator[Run]:
    """All runs, the oldest first."""
    paths = sorted(evidence.glob(f"*/*_zoo_*{files.LINES}"), key=lambda path: path.name)
    every = [(path, one) for path in paths for one in files.read_json(path, what="record")["runs"]]
    # names of one day say nothing of the order
    for path, one in sorted(every, key=lambda item: _began(*item)):
        yield Run(one["part"], one["ended"], one["header"], {row["case"]: row for row in one["rows"]}, path)


def budgets(machine: str, evidence: Path = EVIDENCE) -> list[tuple[Run, Run]]:
    """By model, the newest whole runs with a small budget and with a large one (`SMALL`, `LARGE`)."""
    newest: dict[tuple[str, bool], Run] = {}
    for run in _all_runs(evidence):
        budget = run.rows.get(WAVECREST, {}).get("budget", math.nan)
        if run.path.parent.name == machine and run.figures and (budget <= SMALL or budget >= LARGE):
            newest[run.part, budget >= LARGE] = run
    return [(newest[part, False], run) for (part, large), run in newest.items() if large and (part, False) in newest]


def _began(path: Path, one: Row) -> str:
    """The time of a run's header; the day in the file's name, for one that has not begun."""
    return path.name[:10] if one["header"] is None else str(one["header"]["created"])


def page(note: str, evidence: Path = EVIDENCE) -> str:
    """The page; `note` says that it is generated."""
    parts = ["# The zoo", note, INTRODUCTION, HOW]
    machines = runs(evidence)
    for machine, measured in machines.items():
        parts += _machine(machine, measured, evidence)
    parts += ["## The models", *_models(list(entries().values()))]
    for machine, measured in machines.items():
        parts += [f"## Steps on {machine}", *_steps(measured)]
    for machine, measured in machines.items():
        parts += [f"## Records on {machine}", *_records(measured)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _size(size: Size | None) -> str:
    return "–" if size is None else f"{size.batch} × {size.length:,} {size.dtype}"


def _models(known: list[Entry]) -> Iterator[str]:
    yield (
        "Batch × length (pixels of a side, tokens, samples of sound, features) and dtype of one call on a GPU and on a "
        "CPU; models too large for a CPU have no size there."
    )
    lines = ["| model | | library | GPU | CPU |", "|---|---|---|---|---|"]
    for entry in known:
        cells = (f"`{entry.name}`", entry.about, entry.library, _size(entry.gpu), _size(entry.cpu))
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)


def _machine(machine: str, measured: dict[str, Run], evidence: Path) -> Iterator[str]:
    first = next((run.header for run in measured.values() if run.header is not None), None)
    device = first["device"]["name"] if first is not None else machine
    yield f"## {device}"
    headers = _headers(measured)
    if headers:
        dates = sorted({header["created"][:10] for header in headers.values()})
        said = sorted({_versions(header) for header in headers.values()})
        yield (
            f"**Measured** {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {'; '.join(said)}. A row links to its "
            f"record; [Records on {machine}](#records-on-{machine}) has their commits and commands."
        )
    names = _peers(measured)
    timed = [run for run in measured.values() if run.figures]
    # those that search for minutes ran for some models only, which a sentence says
    slow = {peer.name for peer in PEERS if peer.slow}
    quick = [name for name in names if name not in slow]
    # the best of some peers may not be the best of all, and eager alone is no rival
    counted = [
        run
        for run in timed
        if run.rows.keys() >= set(quick) and any("ms" in run.rows[name] for name in quick if name != "eager")
    ]
    ratios = [run.figures["ratio"] for run in counted]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        rest = len(timed) - len(ratios)
        yield (
            f"Geometric mean over {len(ratios)} {'models' if len(ratios) > 1 else 'model'}: {mean:.2f}× the best peer "
            f"({min(ratios):.2f}–{max(ratios):.2f}); {sum(ratio < 0.98 for ratio in ratios)} below 0.98."
            + (f" {rest} not counted, as time ran out or no peer but eager has a time." if rest else "")
            + "".join(
                f" {name} ran for {count} of them."
                for name in names
                if name in slow and (count := sum("ms" in run.rows.get(name, {}) for run in counted))
            )
        )
    yield "\n".join(_table(measured))
    pairs = budgets(machine, evidence)
    if pairs:
        yield "\n".join(_budgets(pairs))
    seeds = [measured[name] for name in SEEDS if name in measured and measured[name].figures]
    if seeds:
        yield "\n".join(_seeds(seeds))


def _headers(measured: dict[str, Run]) -> dict[Path, Row]:
    """A header of each record, in the order of their names."""
    found = {run.path: run.header for run in measured.values() if run.header is not None}
    return dict(sorted(found.items()))


def _versions(header: Row) -> str:
    return ", ".join(f"{name} {header['versions'][name]}" for name in ("torch", "triton", "transformers"))


def _link(path: Path, shown: str) -> str:
    return f"[{shown}](../evidence/{path.parent.name}/{path.name})"


def _records(measured: dict[str, Run]) -> Iterator[str]:
    lines = ["| record | commit | command |", "|---|---|---|"]
    for path, header in _headers(measured).items():
        name = path.name.removesuffix(files.LINES)
        lines.append(f"| {_link(path, f'`{name}`')} | {header['commit']} | `{_cell(header['command'])}` |")
    yield "\n".join(lines)


def _peers(measured: dict[str, Run]) -> list[str]:
    return [peer.name for peer in PEERS if any(peer.name in run.rows for run in measured.values())]


def _table(measured: dict[str, Run]) -> Iterator[str]:
    names = _peers(measured)
    heads = ["model", *(f"{name}, ms" for name in names), "wavecrest, ms", "rate", "× best", "% of roofline", "seconds"]
    heads.append("record")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for run in measured.values():
        figures = run.figures
        if not figures:
            said = run.rows.get(WAVECREST, {}).get("problem") or (run.ended if run.ended != "done" else "no times")
            yield f"| `{run.part}` | {_cell(said)} |" + " |" * (len(heads) - 2)
            continue
        times = [run.rows.get(name, {}).get("ms") for name in names]
        shown = ["–" if time is None else f"{time:.3f}" for time in times]
        low, high = figures["ratio_ci"]
        cells = [
            f"`{run.part}`", *shown, f"{figures['ms']:.3f}", f"{figures['rate']:,.0f} {run.rows['model']['unit']}/s",
            f"{figures['ratio']:.2f}× [{low:.2f}, {high:.2f}] {figures['best']}",
            f"{figures['bound_percent']:.0f}" if "bound_percent" in figures else "–",
            f"{run.rows[WAVECREST]['seconds']:.0f}", _link(run.path, run.path.name[5:10]),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _budgets(pairs: list[tuple[Run, Run]]) -> Iterator[str]:
    yield "| the same model with | a small budget | | a large one | | speed with the small one |"
    yield "|---|---|---|---|---|---|"
    for small, large in pairs:
        cells = [f"`{small.part}`"]
        for run in (small, large):
            header = run.header or {}
            cells += [
                f"{run.figures['ms']:.3f} ms",
                f"{run.rows[WAVECREST]['budget']:.0f} s, {header.get('commit', '')}",
            ]
        yield f"| {' | '.join(cells)} | {large.figures['ms'] / small.figures['ms']:.0%} |"


def _seeds(measured: list[Run]) -> Iterator[str]:
    yield "| throughput | batch | eager | best peer | wavecrest | × eager |"
    yield "|---|---|---|---|---|---|"
    for run in measured:
        figures, sizes = run.figures, run.rows["model"]

        def rate(ms: float, count: int = sizes["count"], unit: str = sizes["unit"]) -> str:
            return f"{count / ms * 1e3:,.0f} {unit}/s"

        eager = run.rows.get("eager", {}).get("ms")
        cells = (
            run.part, str(sizes["batch"]), "–" if eager is None else rate(eager),
            f"{rate(figures['best_ms'])} ({figures['best']})", rate(figures["ms"]),
            f"{figures['eager_ratio']:.2f}×" if "eager_ratio" in figures else "–",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _steps(measured: dict[str, Run]) -> Iterator[str]:
    yield "What was kept of each model, why not more, and the causes of what was lost."
    for run in measured.values():
        row: dict[str, Any] | None = run.rows.get(WAVECREST)
        yield f"### {run.part}"
        if row is None or "problem" in row:
            yield _cell(f"No result: {run.ended if row is None else row['problem']}.")
            continue
        settings = [f"{name}={value}" for name, value in row["environment"].items()]
        kept = ", ".join([*row["kept"], *settings]) or "nothing"
        yield _cell(f"{row['verdict'].capitalize()}; in force: {kept}. {row['reason']}")
        lines = [f"- {_step(step)}" for step in row["steps"] if step["verdict"] != "skipped"]
        left = [step["title"] for step in row["steps"] if step["verdict"] == "skipped"]
        problems = [f"- {name}: {_cell(one['problem'])}" for name, one in run.rows.items() if "problem" in one]
        lines += [f"- no time for: {', '.join(left)}"] if left else []
        yield "\n".join([*lines, *problems])


def _step(step: dict[str, Any]) -> str:
    ratio = "" if step["ratio"] is None else f" {step['ratio']:.3f}×"
    again = " (again)" if step["attempt"] > 1 else ""
    # records of before 2026-11-26 have no predictions
    if ratio and step.get("predicted"):
        ratio += f" ({step['predicted']:.2f}× predicted)"
    # the reason ends with the first cause
    causes = "; ".join(step["causes"][1:])
    text = f"{step['verdict']} {step['title']}{again}{ratio}: {step['reason']}" + (f"; {causes}" if causes else "")
    return _cell(text)
