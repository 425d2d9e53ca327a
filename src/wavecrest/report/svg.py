"""The little SVG the plots need: escaped elements, axes and marker shapes.

Horizontal positions are percentages of the drawing's width and vertical ones pixels, so a plot fills a phone or a
wide screen without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

# shapes around the origin, 10 px wide; they tell categories apart without colour
SHAPES = (
    "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
    "M-4.4-4.4H4.4V4.4H-4.4Z",
    "M0-6L6 0L0 6L-6 0Z",
    "M0-5.5L5.5 4.5H-5.5Z",
    "M0 5.5L5.5-4.5H-5.5Z",
    "M-2-5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
)


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; children that are not Markup and all attribute values are escaped, None attributes left out.

    An underscore in an attribute's name becomes a hyphen, a trailing one is dropped (`class_`).
    """
    parts = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    ]
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(parts), inner)


def _value(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def drawing(*children: object, height: int, label: str, class_: str = "") -> Markup:
    """An SVG as wide as its box and `height` px high, with a label for those who cannot see it."""
    return tag("svg", *children, class_=f"plot {class_}".strip(), height=height, role="img", aria_label=label)


def title(text: str) -> Markup:
    """The hover text of the element it is put into."""
    return tag("title", text)


def marker(shape: int, x: str, y: float, *children: object, scale: float = 1.0, **attributes: object) -> Markup:
    """A shape of `SHAPES` at (x as a percentage, y in px)."""
    path = tag("path", *children, d=SHAPES[shape % len(SHAPES)], transform=f"scale({scale:.2f})", **attributes)
    # only a nested svg can sit at a percentage and hold a path
    return tag("svg", path, x=x, y=y, overflow="visible", width=1, height=1)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to 0..100 percent, linearly or by logarithm; values outside are clamped to the edge."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Position between 0 and 1."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def at(self, value: float) -> str:
        """Position as an SVG percentage."""
        return f"{self.share(value) * 100:.3f}%"

    def width(self, begin: float, end: float) -> str:
        """Distance as an SVG percentage."""
        return f"{abs(self.share(end) - self.share(begin)) * 100:.3f}%"

    def ticks(self, most: int = 6) -> list[float]:
        """Round positions inside the scale, at most `most` of them (1, 2, 5 steps; powers of ten on a log scale)."""
        return _log_ticks(self.low, self.high, most) if self.log else _linear_ticks(self.low, self.high, most)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    magnitude = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * magnitude for size in (1, 2, 5, 10, 20) if (high - low) / (size * magnitude) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    stride = max(1, math.ceil(len(powers) / most))
    return [10.0**power for power in powers][::stride]


def log_scale(values: Sequence[float]) -> Scale:
    """A log scale that holds all (positive) values with a margin, over a decade or more."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.1 * (high - low), (1 - (high - low)) / 2, 0.1)
    return Scale(10 ** (low - margin), 10 ** (high + margin), log=True)
