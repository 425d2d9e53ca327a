"""Roofline: arithmetic intensity against achieved FLOP/s of every operation whose cost is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from wavecrest.records import BucketProfile, OpTime, OptimizeRecord
from wavecrest.records.schema import MOST_PERCENT
from wavecrest.report import breakdown, numbers, svg

HEIGHT = 300
# operations beyond these take no visible time
MOST_OPS = 40
UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))


@dataclass(frozen=True, slots=True)
class RooflinePanel:
    """The scatter plot of one bucket; where `plot` is None, `missing` says why."""

    bucket: str
    missing: str
    plot: Markup | None = None
    y_axis: Markup | None = None
    x_axis: Markup | None = None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class LegendRow:
    """A category's mark in the scatters."""

    category: str
    colour: int
    shape: str


@dataclass(frozen=True, slots=True)
class _Point:
    op: OpTime
    phase: str
    intensity: float
    achieved: float


def panels(record: OptimizeRecord) -> list[RooflinePanel]:
    """One panel a profiled bucket."""
    before = {profile.bucket: profile for profile in record.profile_before}
    after = {profile.bucket: profile for profile in record.profile_after}
    palette = breakdown.colours(record)
    return [_panel(bucket, before.get(bucket), after.get(bucket), palette) for bucket in {**before, **after}]


def legend(record: OptimizeRecord) -> list[LegendRow]:
    """Shape and colour of the categories that a scatter shows."""
    shown = {
        point.op.category
        for profile in [*record.profile_before, *record.profile_after]
        for point in _points("", profile)
    }
    palette = breakdown.colours(record)
    return [
        LegendRow(category, colour, svg.SHAPES[colour % len(svg.SHAPES)])
        for category, colour in palette.items()
        if category in shown
    ]


def _points(phase: str, profile: BucketProfile | None) -> list[_Point]:
    """`flops` and `bytes` of an OpTime are those of one call, `ms` is the time of all its calls."""
    ops = sorted(profile.ops, key=lambda op: -op.ms) if profile else []
    return [
        _Point(op, phase, op.flops / op.bytes, op.flops * op.calls / (op.ms * 1e-3))
        for op in ops
        if op.flops and op.bytes and op.ms > 0
    ][:MOST_OPS]


def _panel(
    bucket: str, before: BucketProfile | None, after: BucketProfile | None, palette: dict[str, int]
) -> RooflinePanel:
    points = _points("before", before) + _points("after", after)
    ops = [op for profile in (before, after) if profile for op in profile.ops]
    if not points:
        why = "the profile holds no operations" if not ops else "no operation of the profile has a known cost"
        return RooflinePanel(bucket, f"No roofline for {bucket}: {why} (FLOPs and bytes).")
    memory, compute = _roofs(points)
    x = svg.log_scale([point.intensity for point in points])
    y = svg.log_scale([point.achieved for point in points] + compute[-1:])
    size, unit = next(((s, u) for s, u in UNITS if y.high >= s), UNITS[-1])
    parts = [*_grid(x, y), *_roof_lines(x, y, memory, compute)]
    largest = max(point.op.ms for point in points)
    parts += [_mark(point, x, y, palette, largest, size, unit) for point in reversed(points)]
    label = f"roofline of {bucket}: {len(points)} operations"
    unknown = sum(1 for op in ops if not (op.flops and op.bytes))
    notes = [f"{unknown} of {len(ops)} rows have no known cost or no FLOPs and are left out." if unknown else ""]
    beyond = sum(1 for op in ops if not op.below_ceiling)
    if beyond:
        notes.append(
            f"The ceiling is not valid: {beyond} of {len(ops)} rows are above {MOST_PERCENT:.0f} % of it. Measure "
            "it again while nothing else runs."
        )
    if not memory and not compute:
        notes.append("No roof is drawn: the peaks of this device are not known.")
    y_ticks = [
        svg.tag("text", _power(tick / size), x="100%", y=_down(y, tick) + 4, dx=-8, class_="tick end")
        for tick in y.ticks(5)
    ]
    x_ticks = [svg.tag("text", _power(tick), x=x.at(tick), y=16, class_="tick mid") for tick in x.ticks(5)]
    return RooflinePanel(
        bucket,
        "",
        svg.drawing(*parts, height=HEIGHT, label=label, class_="framed"),
        svg.drawing(*y_ticks, height=HEIGHT, label=f"axis in {unit}", class_="axis"),
        svg.drawing(*x_ticks, height=22, label="axis in FLOP/byte", class_="axis"),
        unit,
        " ".join(note for note in notes if note),
    )


def _power(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}"


def _down(y: svg.Scale, value: float) -> float:
    return (1 - y.share(value)) * HEIGHT


def _distinct(values: Iterable[float]) -> list[float]:
    """Values apart by more than 2 %, ascending: one roof for each peak (fp32 and bf16 operations have two)."""
    groups: list[list[float]] = []
    for value in sorted(values):
        if groups and value <= groups[-1][0] * 1.02:
            groups[-1].append(value)
        else:
            groups.append([value])
    return [statistics.median(group) for group in groups]


def _roofs(points: list[_Point]) -> tuple[list[float], list[float]]:
    """(bytes/s, FLOP/s) peaks, read back from the percent of the roofline that the profile gives each operation.

    percent = 100 · achieved / min(peak, intensity · bandwidth), so a compute-bound row gives the peak and a
    memory-bound row the bandwidth.
    """
    known = [point for point in points if point.op.roofline_percent and point.op.roofline_percent > 0]
    roofs = [(point, point.achieved / (point.op.roofline_percent or 1.0) * 100) for point in known]
    memory = _distinct(roof / point.intensity for point, roof in roofs if point.op.bound == "memory")
    return memory, _distinct(roof for point, roof in roofs if point.op.bound == "compute")


def _grid(x: svg.Scale, y: svg.Scale) -> list[Markup]:
    upright = [svg.tag("line", x1=x.at(t), x2=x.at(t), y1=0, y2=HEIGHT, class_="grid") for t in x.ticks(5)]
    level = [svg.tag("line", x1="0%", x2="100%", y1=_down(y, t), y2=_down(y, t), class_="grid") for t in y.ticks(5)]
    return upright + level


def _roof_lines(x: svg.Scale, y: svg.Scale, memory: list[float], compute: list[float]) -> list[Markup]:
    lines = []
    for bandwidth in memory:
        end = min(x.high, *(peak / bandwidth for peak in compute[-1:]), y.high / bandwidth)
        begin = max(x.low, y.low / bandwidth)
        if begin < end:
            text = f"memory roof {numbers.significant(bandwidth / 1e9)} GB/s"
            lines.append(_roof(x, y, (begin, begin * bandwidth), (end, end * bandwidth), text))
    for peak in compute:
        begin = max([x.low, *(peak / bandwidth for bandwidth in memory[-1:])])
        if begin < x.high:
            text = f"compute roof {numbers.significant(peak / 1e12)} TFLOP/s"
            lines.append(_roof(x, y, (begin, peak), (x.high, peak), text))
    return lines


def _roof(x: svg.Scale, y: svg.Scale, begin: tuple[float, float], end: tuple[float, float], text: str) -> Markup:
    return svg.tag(
        "line",
        svg.title(text),
        x1=x.at(begin[0]),
        y1=_down(y, begin[1]),
        x2=x.at(end[0]),
        y2=_down(y, end[1]),
        class_="roof",
    )


def _mark(
    point: _Point, x: svg.Scale, y: svg.Scale, palette: dict[str, int], largest: float, size: float, unit: str
) -> Markup:
    op = point.op
    text = (
        f"{op.name} {op.shapes}\n{point.phase}, {op.category}: {numbers.ms(op.ms)} ms in {op.calls:,} calls, "
        f"{numbers.percent(op.share)} of the time\n"
        f"{numbers.significant(point.achieved / size)} {unit} at {numbers.significant(point.intensity)} FLOP/byte"
    )
    if op.roofline_percent is not None:
        text += f"\n{op.roofline_percent:.0f} % of the roofline, {op.bound or 'unknown'} bound"
        text += "" if op.below_ceiling else ": the ceiling is not valid"
    colour = palette.get(op.category, breakdown.CATEGORY_COLOURS)
    area = math.sqrt(op.ms / largest)
    return svg.marker(
        colour,
        x.at(point.intensity),
        round(_down(y, point.achieved), 1),
        svg.title(text),
        scale=0.7 + area,
        class_=f"point {point.phase} cat-{colour}",
        tabindex=0,
    )
