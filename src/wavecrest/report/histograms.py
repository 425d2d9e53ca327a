"""Sample histograms: block times of the base above the line, of the new version below it, on one scale."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from wavecrest.records import OptimizeRecord, Samples
from wavecrest.report import numbers, svg

# the name that optimize gives the samples of the final measurement
FINAL = "result"
HALF = 46
GAP = 4
BINS = 24
# samples further out than this many interquartile ranges are counted in the first and last bin
OUTLIER_RANGES = 4


@dataclass(frozen=True, slots=True)
class Histogram:
    """One step and bucket: base against new."""

    title: str
    bucket: str
    caption: str
    plot: Markup
    axis: Markup


def split(record: OptimizeRecord) -> tuple[list[Histogram], list[Histogram]]:
    """(kept steps and the final measurement, everything else that was timed), each in the order of the run."""
    steps = {(step.id, step.attempt): step for step in record.steps}
    main: list[Histogram] = []
    rest: list[Histogram] = []
    for samples in record.samples:
        if not samples.base or not samples.new:
            continue
        step = steps.get((samples.step, samples.attempt))
        if samples.step == FINAL:
            main.append(_histogram(samples, "Final measurement"))
        elif step is None:
            rest.append(_histogram(samples, samples.step))
        elif step.verdict == "kept":
            main.append(_histogram(samples, step.title))
        else:
            rest.append(_histogram(samples, f"{step.title} ({step.verdict})"))
    return main, rest


def _histogram(samples: Samples, title: str) -> Histogram:
    if samples.attempt > 1:
        title = f"{title}, attempt {samples.attempt}"
    values = [*samples.base, *samples.new]
    low, high = _range(values)
    scale = svg.Scale(low, high)
    outside = sum(not low <= value <= high for value in values)
    n = len(samples.base)
    caption = f"{n} samples a side" if n == len(samples.new) else f"{n} and {len(samples.new)} samples"
    if outside:
        caption += f", {outside} of {len(values)} times beyond the edges are counted in the outer bins"
    label = (
        f"{title}, {samples.bucket}: median {numbers.ms(statistics.median(samples.base))} ms before, "
        f"{numbers.ms(statistics.median(samples.new))} ms after"
    )
    counts = [_counts(side, scale) for side in (samples.base, samples.new)]
    top = max(max(side) for side in counts)
    parts = [*_half(counts[0], top, "hist-base", up=True), *_half(counts[1], top, "hist-new", up=False)]
    parts.append(svg.tag("line", x1="0%", x2="100%", y1=HALF + GAP / 2, y2=HALF + GAP / 2, class_="grid"))
    parts += [
        _median(samples.base, scale, "base", top=0, text_y=11),
        _median(samples.new, scale, "new", top=HALF + GAP, text_y=2 * HALF + GAP - 3),
    ]
    ticks = [svg.tag("text", f"{tick:g}", x=scale.at(tick), y=14, class_="tick mid") for tick in scale.ticks(5)]
    return Histogram(
        title,
        samples.bucket,
        caption,
        svg.drawing(*parts, height=2 * HALF + GAP, label=label),
        svg.drawing(*ticks, height=20, label="axis in ms", class_="axis"),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    spread = ordered[-1 - quarter] - ordered[quarter]
    low = max(ordered[0], ordered[quarter] - OUTLIER_RANGES * spread)
    high = min(ordered[-1], ordered[-1 - quarter] + OUTLIER_RANGES * spread)
    margin = (high - low) * 0.03 or abs(high) * 0.01 or 1.0
    return low - margin, high + margin


def _counts(values: Sequence[float], scale: svg.Scale) -> list[int]:
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int(scale.share(value) * BINS))] += 1
    return counts


def _half(counts: Sequence[int], top: int, class_: str, *, up: bool) -> list[Markup]:
    bars = []
    for index, count in enumerate(counts):
        if not count:
            continue
        height = count / top * (HALF - 14)
        y = HALF - height if up else float(HALF + GAP)
        bars.append(
            svg.tag("rect", x=f"{index / BINS:.2%}", width=f"{1 / BINS:.2%}", y=y, height=height, class_=class_)
        )
    return bars


def _median(values: Sequence[float], scale: svg.Scale, name: str, *, top: int, text_y: int) -> Markup:
    median = statistics.median(values)
    x = scale.at(median)
    right = scale.share(median) > 0.6
    line = svg.tag("line", x1=x, x2=x, y1=top, y2=top + HALF, class_=f"median median-{name}")
    text = svg.tag(
        "text",
        f"{name} {numbers.ms(median)}",
        x=x,
        y=text_y,
        dx=-5 if right else 5,
        class_="number small" + (" end" if right else ""),
    )
    return svg.tag("g", line, text)
