"""The waterfall: milliseconds by step, one column a bucket, with 95 % whiskers and the verdict as colour and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from wavecrest.records import BucketBench, BucketSpeed, OptimizeRecord, StepOutcome
from wavecrest.report import numbers, svg

ROW = 28
BAR = (7, 21)
# a step that made things worse than this many times the original runs off the scale, with its number at the edge
OFF_SCALE = 1.6
COLUMNS = 3
# more skipped steps than these would be a column of empty rows
MOST_SKIPPED = 3

T = TypeVar("T", BucketSpeed, BucketBench)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the waterfall: a step or one of the two ends; `cells` are (bucket, drawing)."""

    label: str
    kind: str
    attempt: int
    note: str
    cells: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Up to `COLUMNS` buckets side by side, one axis drawing a bucket; `left_out` counts skipped steps not drawn."""

    buckets: tuple[str, ...]
    rows: tuple[Row, ...]
    axes: tuple[Markup, ...]
    left_out: int


def panels(record: OptimizeRecord) -> list[Panel]:
    """The waterfall of a record, in panels of a few buckets; empty if no bucket was measured."""
    buckets = bucket_names(record)
    return [_panel(record, buckets[first : first + COLUMNS]) for first in range(0, len(buckets), COLUMNS)]


def bucket_names(record: OptimizeRecord) -> list[str]:
    """Every bucket with a time, in the order of the baseline."""
    names = [bench.bucket for bench in record.baseline]
    for speeds in [*(step.speed for step in record.steps), record.result.speed if record.result else []]:
        names += [speed.bucket for speed in speeds if speed.bucket not in names]
    return names


def _panel(record: OptimizeRecord, buckets: Sequence[str]) -> Panel:
    columns = [_Column(record, bucket) for bucket in buckets]
    rows = [Row("original", "end", 1, "", tuple((column.bucket, column.original()) for column in columns))]
    skipped = sum(step.verdict == "skipped" for step in record.steps)
    left_out = skipped if skipped > MOST_SKIPPED else 0
    for step in record.steps:
        if left_out and step.verdict == "skipped":
            continue
        cells = tuple((column.bucket, column.step(step)) for column in columns)
        rows.append(Row(step.title, step.verdict, step.attempt, step.reason, cells))
    if record.result is not None and record.result.speed:
        cells = tuple((column.bucket, column.result()) for column in columns)
        rows.append(Row("final, measured again", "end", 1, "", cells))
    return Panel(tuple(buckets), tuple(rows), tuple(column.axis() for column in columns), left_out)


class _Column:
    """Draws one bucket's cells from top to bottom, keeping the time of the steps kept so far."""

    def __init__(self, record: OptimizeRecord, bucket: str) -> None:
        self.bucket = bucket
        self.bench = _of(record.baseline, bucket)
        self.final = _of(record.result.speed, bucket) if record.result else None
        measured = [speed for step in record.steps if (speed := _of(step.speed, bucket)) is not None]
        start = [self.bench.measurement.median] if self.bench else [speed.base_ms for speed in measured[:1]]
        self.level: float | None = next(iter(start), None)
        whisker = [self.bench.measurement.ci.high] if self.bench else []
        times = [*start, *whisker, *(time for speed in measured for time in (speed.base_ms, speed.new_ms))]
        if self.final:
            times += [self.final.base_ms, self.final.new_ms]
        top = max(times, default=1.0) or 1.0
        limit = OFF_SCALE * start[0] if start and start[0] > 0 else top
        self.scale = svg.Scale(0.0, min(top, limit) * 1.04)

    def axis(self) -> Markup:
        """Ticks in ms."""
        labels = [
            svg.tag("text", f"{tick:g}", x=self.scale.at(tick), y=14, class_="tick mid") for tick in self.scale.ticks(5)
        ]
        return svg.drawing(*labels, height=20, label=f"axis of {self.bucket} in ms", class_="axis")

    def original(self) -> Markup:
        """The baseline bar; hatched where the measurement is unstable."""
        if self.bench is None:
            return self._row([], f"{self.bucket}: no baseline")
        measurement = self.bench.measurement
        text = f"original, {self.bucket}: {measurement.describe()}, {measurement.clock}, {measurement.n} samples"
        bar = self._bar(0, measurement.median, "bar-unstable" if measurement.unstable else "bar-original", text)
        whisker = self._whisker(measurement.ci.low, measurement.ci.high)
        number = "unstable" if measurement.unstable else numbers.ms(measurement.median)
        mark = self._number(number, 0, max(measurement.median, measurement.ci.high), outlined=measurement.unstable)
        return self._row([bar, *whisker, mark], text, below=measurement.median)

    def step(self, step: StepOutcome) -> Markup:
        """The step's bar from the time before to the time with it; a mark at the level where nothing was measured."""
        speed = _of(step.speed, self.bucket)
        above = self.level
        if speed is None:
            # the environment step is timed in processes of its own, which the reason lists
            why = "not timed" if step.ratio is None else f"{numbers.ratio(step.ratio)} in fresh processes"
            mark = [svg.tag("text", why, x="0%", dx=4, y=18, class_="quiet")]
            return self._row(mark, f"{step.title}, {self.bucket}: {step.verdict}, {why}", above, above)
        text = (
            f"{step.title}, {self.bucket}: {numbers.ms(speed.base_ms)} → {numbers.ms(speed.new_ms)} ms, "
            f"{numbers.ratio(speed.ratio)} {numbers.interval(speed.ci)}, {speed.blocks} blocks, {step.verdict}"
        )
        if step.verdict == "kept":
            self.level = speed.new_ms
        low, high = _times(speed)
        bar = self._bar(speed.base_ms, speed.new_ms, f"bar-{step.verdict}", text)
        left, right = min(low, speed.base_ms, speed.new_ms), max(high, speed.base_ms, speed.new_ms)
        number = self._number(numbers.ms(speed.new_ms), left, right)
        return self._row([bar, *self._whisker(low, high), number], text, above, self.level)

    def result(self) -> Markup:
        """The final bar, with the original's time of the same measurement as an outline."""
        if self.final is None:
            return self._row([], f"{self.bucket}: not in the final measurement")
        low, high = _times(self.final)
        text = (
            f"final, {self.bucket}: {numbers.ms(self.final.base_ms)} → {numbers.ms(self.final.new_ms)} ms, "
            f"{numbers.ratio(self.final.ratio)} {numbers.interval(self.final.ci)}, {self.final.blocks} blocks"
        )
        parts = [
            self._bar(0, self.final.base_ms, "bar-outline", text),
            self._bar(0, self.final.new_ms, "bar-final", text),
            *self._whisker(low, high),
            self._number(numbers.ms(self.final.new_ms), 0, max(high, self.final.new_ms, self.final.base_ms)),
        ]
        return self._row(parts, text, above=self.level, until=BAR[0])

    def _row(
        self,
        parts: Sequence[Markup],
        label: str,
        above: float | None = None,
        below: float | None = None,
        *,
        until: int = 14,
    ) -> Markup:
        grid = [self._line(tick, 0, ROW, "grid") for tick in self.scale.ticks(5)]
        links = [] if above is None else [self._line(above, 0, until, "link")]
        if below is not None:
            links.append(self._line(below, 14, ROW, "link"))
        return svg.drawing(*grid, *links, *parts, height=ROW, label=label)

    def _line(self, value: float, top: float, bottom: float, class_: str) -> Markup:
        x = self.scale.at(value)
        return svg.tag("line", x1=x, x2=x, y1=top, y2=bottom, class_=class_)

    def _bar(self, begin: float, end: float, class_: str, text: str) -> Markup:
        x, width = self.scale.at(min(begin, end)), self.scale.width(begin, end)
        return svg.tag("rect", svg.title(text), x=x, width=width, y=BAR[0], height=BAR[1] - BAR[0], class_=class_)

    def _whisker(self, low: float, high: float) -> list[Markup]:
        ends = [self._line(value, 10, 18, "whisker") for value in (low, high)]
        middle = svg.tag("line", x1=self.scale.at(low), x2=self.scale.at(high), y1=14, y2=14, class_="whisker")
        return [middle, *ends]

    def _number(self, text: str, left: float, right: float, *, outlined: bool = False) -> Markup:
        """A number beside the bar: on the left where there is room, else on the right, else inside at the edge."""
        if right > self.scale.high:
            return svg.tag("text", f"{text} ›", x="100%", dx=-4, y=18, class_="number end boxed")
        if self.scale.share(left) > 0.18:
            return svg.tag("text", text, x=self.scale.at(left), dx=-7, y=18, class_="number end")
        if self.scale.share(right) < 0.82:
            return svg.tag("text", text, x=self.scale.at(right), dx=7, y=18, class_="number")
        return svg.tag("text", text, x="0%", dx=7, y=18, class_="number" if outlined else "number inside")


def _times(speed: BucketSpeed) -> tuple[float, float]:
    """The interval of the speed-up as times of the new version, at the median of the base."""
    if speed.ci.low <= 0:
        return speed.new_ms, speed.new_ms
    return speed.base_ms / speed.ci.high, speed.base_ms / speed.ci.low


def _of(rows: Sequence[T], bucket: str) -> T | None:
    return next((row for row in rows if row.bucket == bucket), None)
