"""How a run of the ladder is asked for, and what a progress display is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wavecrest.errors import InvalidArgument

if TYPE_CHECKING:
    from wavecrest.records import StepOutcome

MAX_LEVEL = 5
PRECISIONS = ("tf32", "bf16", "fp16")
# of the step that quantizes
QUANTIZE_LEVEL = 3
# of the first steps that compile the model
COMPILE_LEVEL = 2


@dataclass(frozen=True, slots=True)
class Wish:
    """The quantization that a user asked for.

    Attributes:
        formats: of `wavecrest.quantize`, in order of preference.
        quality: the most that perplexity may rise, or the largest relative error of a model without logits.

    Raises:
        InvalidArgument: a format is unknown, or the quality is no share.
    """

    formats: tuple[str, ...]
    quality: float

    @classmethod
    def of(cls, formats: str | tuple[str, ...] | None, quality: str | float | None) -> Wish | None:
        """The wish of two options, "int4,int8" and "0.5%"; None without them."""
        if formats is None and quality is None:
            return None
        from wavecrest.quantizer import layers
        from wavecrest.quantizer.quality import limits

        if formats is None or quality is None:
            missing = "quality" if quality is None else "quantize"
            raise InvalidArgument(
                f'quantize and quality go together, and {missing} is missing: such as quantize="int8", quality="0.5%"'
            )
        names = tuple(name.strip() for name in formats.split(",")) if isinstance(formats, str) else tuple(formats)
        found = limits(quality)
        if found is None or found.share is None:
            raise InvalidArgument(f'quality is one share here, such as "0.5%" or 0.005, not {quality!r}')
        return cls(layers.schemes(names), found.share)

    @property
    def least_bits(self) -> int:
        """The fewest bits of a weight in these formats."""
        from wavecrest.ops._gemm.call import NIBBLES
        from wavecrest.quantizer.layers import SCHEMES

        return 4 if any(SCHEMES[name].weight in NIBBLES for name in self.formats) else 8

    @property
    def multiplies_in_8_bits(self) -> bool:
        """Whether a format has activations in 8 bits too, so that GEMMs run at another peak."""
        from wavecrest.quantizer.layers import SCHEMES

        return any(SCHEMES[name].activations for name in self.formats)


@dataclass(frozen=True, slots=True)
class Options:
    """How to run the ladder.

    Attributes:
        level: highest level tried: 1 environment, 2 compile, 3 surgery, 4 kernels, 5 graph capture.
        min_gain: a step is kept only if the lower end of its speed-up's 95 % interval is above 1 + min_gain.
        budget: seconds; steps that have not begun by then are skipped with that reason.
        precision: "tf32", "bf16" or "fp16" if the user wants that tried, else None.
        processes: fresh processes a side for environment variables.
        steps: restrict to these step ids (None: all of the level).
        skip: step ids that are not tried.
        quantize: formats of linear layers, in order of preference, if the user wants that tried ("int4,int8").
        quality: how far the quantized model may be from the original ("0.5%"), as `wavecrest.quantize` takes it.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    level: int = MAX_LEVEL
    min_gain: float = 0.02
    budget: float = 900.0
    precision: str | None = None
    processes: int = 3
    steps: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    quantize: str | tuple[str, ...] | None = None
    quality: str | float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.level <= MAX_LEVEL:
            raise InvalidArgument(f"level must be 1 to {MAX_LEVEL}, not {self.level}")
        if not 0 <= self.min_gain < 1:
            raise InvalidArgument(f"min_gain must be at least 0 and below 1 (2% is 0.02), not {self.min_gain}")
        if not 0 < self.budget < math.inf:
            raise InvalidArgument(f"the budget must be positive and finite, not {self.budget} s")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise InvalidArgument(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.processes < 1:
            raise InvalidArgument(f"processes must be at least 1, not {self.processes}")
        if self.wish is not None and self.level < QUANTIZE_LEVEL:
            raise InvalidArgument(f"quantize is of level {QUANTIZE_LEVEL}, and the level is {self.level}")

    @property
    def wish(self) -> Wish | None:
        """The formats and the quality that were asked for."""
        if self.quantize is None and self.quality is None:
            return None

        return Wish.of(self.quantize, self.quality)

    @property
    def allowed(self) -> dict[str, str]:
        """The options that verdicts rest on, by name; two runs with the same ones judge a step alike."""
        wish = self.wish
        return {
            "min_gain": f"{self.min_gain:g}",
            "precision": self.precision or "",
            "quantize": ",".join(wish.formats) if wish else "",
            "quality": f"{wish.quality:g}" if wish else "",
        }


class Progress(Protocol):
    """Receiver of progress messages: a display, or one that drops them."""

    def phase(self, text: str) -> None:
        """A new piece of work has begun."""

    def update(self, done: int, planned: int) -> None:
        """The current piece has done `done` of `planned` units."""

    def outcome(self, step: StepOutcome) -> None:
        """A step has its verdict."""

    def remaining(self, seconds: float) -> None:
        """The run takes about this long from now on, by what its steps took so far; at most the budget's rest."""


class Silent:
    """A progress display that shows nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def update(self, done: int, planned: int) -> None:
        """Nothing."""

    def outcome(self, step: StepOutcome) -> None:
        """Nothing."""

    def remaining(self, seconds: float) -> None:
        """Nothing."""


def minutes(seconds: float) -> str:
    """A time to wait in words: "40 s", "5 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
