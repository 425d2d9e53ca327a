"""The plot of a `wavecrest bench OP` record: percent of measured copy bandwidth by case, wavecrest beside its peers."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import records
from wavecrest.bench.ops import OURS, percent
from wavecrest.errors import InvalidArgument, MissingDependency, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
# wavecrest, then the peers in the order of the record; colours differ in grey and for colour-blind readers (Okabe
# and Ito, 2008)
COLOURS = ("#0072b2", "#bdbdbd", "#e69f00", "#009e73", "#cc79a7")
# keeps a number readable where a line runs through it
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
WIDTH, HEIGHT = 11.0, 3.7
# cases beside each other in one panel
PANEL_CASES = 14


def check(path: Path) -> None:
    """Raise unless a plot can be written to `path`; called before anything is measured.

    Raises:
        InvalidArgument: the file's ending is neither .svg nor .png.
        MissingDependency: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise InvalidArgument(f"a plot is written to a file ending in {' or '.join(FORMATS)}, not {path.name}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependency("matplotlib", "a plot", "pip install matplotlib") from None


def draw(record: records.OpBenchRecord, path: Path, *, source: str = "") -> None:
    """Draw a record, one panel an op, to an SVG or PNG file (whole or not at all).

    Args:
        record: the measurements.
        path: ends in .svg or .png.
        source: the record's own file, for the caption.

    Raises:
        InvalidArgument, MissingDependency: as `check`; also where the record has no time to draw.
        OutputError: the file cannot be written.
    """
    check(path)
    benches = [bench for bench in record.ops if any(impl.ms for case in bench.cases for impl in case.impls)]
    if not benches:
        raise InvalidArgument("nothing was timed, so there is nothing to draw")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # text stays text (small files, searchable), and the same record gives the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wavecrest", "font.size": 9}):
        caption = _caption(record, source)
        foot = 0.17 * (caption.count("\n") + 1) + 0.1
        panels = [(bench, cases) for bench in benches for cases in _chunks(bench)]
        height = HEIGHT * len(panels) + foot
        engine = ConstrainedLayoutEngine(rect=(0, foot / height, 1, 1 - foot / height))
        figure = Figure(figsize=(WIDTH, height), layout=engine, facecolor="white")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for (bench, cases), panel in zip(panels, axes, strict=True):
            _panel(panel, bench, cases)
        figure.text(0.008, 0.06 / height, caption, ha="left", va="bottom", fontsize=7.5, color="#404040")
        # the layout solver's last digits differ between runs, and the file would differ with them
        figure.draw_without_rendering()
        places = [[round(float(side), 6) for side in panel.get_position().bounds] for panel in axes]
        figure.set_layout_engine("none")
        for panel, (left, bottom, width, tall) in zip(axes, places, strict=True):
            panel.set_position((left, bottom, width, tall))
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        _save(figure, path, metadata)


def _chunks(bench: records.OpBench) -> list[list[records.OpCase]]:
    cases = [case for case in bench.cases if any(impl.ms for impl in case.impls)]
    rows = math.ceil(len(cases) / PANEL_CASES)
    size = math.ceil(len(cases) / rows)
    return [cases[start : start + size] for start in range(0, len(cases), size)]


def _label(case: str) -> str:
    """A case's name on several short lines."""
    return re.sub(r"(?<=\d)x(?=\d)", "\n× ", case.replace(" ", "\n"))


def _panel(axes: Axes, bench: records.OpBench, cases: list[records.OpCase]) -> None:
    names = list(dict.fromkeys(impl.name for case in cases for impl in case.impls))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places: list[float] = []
        heights: list[float] = []
        for place, case in enumerate(cases):
            impl = next((impl for impl in case.impls if impl.name == name), None)
            share = None if impl is None else percent(bench, case, impl)
            if share is not None:
                places.append(place + (index - (len(names) - 1) / 2) * width)
                heights.append(share)
        axes.bar(places, heights, width, label=name, color=COLOURS[index % len(COLOURS)])
        if name == OURS:
            for at, height in zip(places, heights, strict=True):
                axes.annotate(
                    f"{height:.0f}",
                    (at, height),
                    (0, 1.5),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    bbox=LABEL_BOX,
                )
    copies = [(place, case) for place, case in enumerate(cases) if case.copy_ms]
    axes.hlines(
        [100.0 * case.bytes / (case.copy_ms or math.inf) / 1e6 / bench.copy_gbps for _, case in copies],
        [place - 0.42 for place, _ in copies],
        [place + 0.42 for place, _ in copies],
        colors="black",
        linewidth=1.2,
        label="copy of as many bytes",
    )
    axes.axhline(100, color="#808080", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(cases)), [_label(case.case) for case in cases], fontsize=7.5)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_ylabel("% of copy bandwidth")
    axes.set_title(_title(bench), loc="left", fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e8e8e8")
    handles, labels = axes.get_legend_handles_labels()
    # bars first, the line last
    order = sorted(range(len(labels)), key=lambda index: labels[index] not in names)
    axes.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
    )


def _title(bench: records.OpBench) -> str:
    gain = f" · {bench.geomean:.2f}× the best peer (geometric mean)" if bench.geomean is not None else ""
    return f"{bench.op}{gain} · 100 % is {bench.copy_gbps:,.0f} GB/s"


def _caption(record: records.OpBenchRecord, source: str) -> str:
    """The evidence: where, when, with what, by which command, and the file with the samples."""
    header = record.header
    peers = ", ".join(dict.fromkeys(version for version in record.peers.values() if not version.startswith("torch ")))
    versions = f"wavecrest {header.versions.wavecrest} ({header.commit or 'no commit'}), torch {header.versions.torch}"
    triton = f", triton {header.versions.triton}" if header.versions.triton else ""
    lines = [
        f"Measured on {header.device['name']} ({header.device['arch']}), {header.created[:10]}, "
        f"{versions}{triton}{f', {peers}' if peers else ''}",
        f"{header.command}{f'  →  {source}' if source else ''}",
    ]
    return "\n".join(lines)


def _save(figure: Any, path: Path, metadata: dict[str, Any]) -> None:
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            figure.savefig(file, format=path.suffix[1:], dpi=130, metadata=metadata)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
