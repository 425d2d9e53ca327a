"""The report of a quantized model: each layer's format, bytes and error, and the model beside the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from wavecrest.measure.bootstrap import Interval
from wavecrest.quantizer.quality import Quality
from wavecrest.report import notebook, numbers

# an error is of the layer's own inputs in calibration, or of made-up ones
CALIBRATION, RANDOM = "calibration", "random"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A linear layer.

    Attributes:
        path: its place in the model.
        format: it was given, or None: it keeps its precision.
        reason: why it keeps its precision, or was not given the first format asked for; or an empty string.
        bytes_before, bytes_after: of its weight, scales included.
        error: relative error of its output in the format, or in the one that was refused; None where none was tried.
        inputs: what the error is of: "calibration" or "random"; or an empty string.
        speedup: its time over that of the quantized layer, where that was measured.
        ci: 95 % interval of it.
    """

    path: str
    format: str | None
    reason: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    inputs: str = ""
    speedup: float | None = None
    ci: Interval | None = None


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A key-value cache.

    Attributes:
        format: "fp8", "int8" or "int4".
        sequences, tokens: of the input with the largest cache; 0 without inputs.
        bytes_before, bytes_after: of that cache in the model's dtype and in the format, scales included.
        quality: of the model in its own precision with this cache, beside it without; None: there were no inputs.
    """

    format: str
    sequences: int = 0
    tokens: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    quality: Quality | None = None


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """A quantized model.

    Attributes:
        model: name of its class.
        layers: its linear layers.
        bytes_before, bytes_after: of all parameters and buffers of the model.
        smoothed: norms whose scales were moved into the layers that they feed.
        not_smoothed: why the scales of other norms stay, by their path.
        quality: beside the original on the given inputs, or None: there were no inputs.
        limits: that the model meets, by name.
        inputs: where the quality was measured: "evaluation", or "calibration", from which formats were chosen too.
        kv_cache: the key-value cache that was asked for, through which `quality` is measured then; or None.
    """

    model: str
    layers: tuple[LayerRow, ...]
    bytes_before: int
    bytes_after: int
    smoothed: tuple[str, ...] = ()
    not_smoothed: dict[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    limits: dict[str, float] = field(default_factory=dict)
    inputs: str = ""
    kv_cache: CacheRow | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """A summary, and a line for each layer."""
        if not self.layers:
            return "\n".join(self._summary())
        lines = [*self._summary(), ""]
        rows = [("layer", "format", "MB", "error", "speed-up", "why"), *self._rows()]
        widths = [max(len(row[at]) for row in rows) for at in range(5)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        lines += [f"{path}: scales stay: {reason}" for path, reason in self.not_smoothed.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The report for a notebook."""
        head = ("layer", "format", "MB", "error", "speed-up", "why")
        title, *lines = self._summary()
        more = notebook.folded(f"{len(self.layers)} linear layers", notebook.table(head, self._rows()))
        return str(notebook.card(title, lines, more=more))

    def _summary(self) -> Iterator[str]:
        changed = [row for row in self.layers if row.format]
        formats = sorted({row.format for row in changed if row.format})
        if self.layers or self.kv_cache is None:
            yield (
                f"{self.model}: {len(changed)} of {len(self.layers)} linear layers in "
                f"{', '.join(formats) or 'no format'}, {megabytes(self.bytes_before)} → "
                f"{megabytes(self.bytes_after)} MB"
            )
        else:
            yield f"{self.model}: no layer quantized, {megabytes(self.bytes_before)} MB"
        yield from self._cache()
        if any(row.inputs == RANDOM for row in changed):
            yield "errors of layers marked random are of random inputs: calibration inputs say more"
        if self.smoothed:
            yield f"scales moved from {len(self.smoothed)} norms into the layers behind them"
        quality = self.quality
        if quality is None:
            yield "the model's answers were not compared: there were no inputs"
            return
        yield f"against the original, on the {self.inputs} inputs:"
        yield from _lines(quality)
        if self.limits:
            kept = ", ".join(f"{name} {numbers.significant(limit)}" for name, limit in self.limits.items())
            yield f"  within the limits: {kept}"

    def _cache(self) -> Iterator[str]:
        row = self.kv_cache
        if row is None:
            return
        if row.quality is None:
            yield f"key-value cache in {row.format}"
            return
        sizes = f"{megabytes(row.bytes_before)} → {megabytes(row.bytes_after)} MB"
        line = f"key-value cache in {row.format}, {row.sequences} × {row.tokens} tokens: {sizes}"
        # of a cache alone the model's quality is its own
        yield line if not self.layers else f"{line}; by itself:"
        yield from _lines(row.quality) if self.layers else ()

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for row in self.layers:
            error = numbers.significant(row.error) + (f" ({RANDOM})" if row.inputs == RANDOM else "")
            speed = numbers.DASH if row.ci is None else f"{numbers.ratio(row.speedup)} {row.ci}"
            size = (
                f"{megabytes(row.bytes_before)} → {megabytes(row.bytes_after)}"
                if row.format
                else megabytes(row.bytes_before)
            )
            rows.append((row.path, row.format or "kept", size, error, speed, row.reason))
        return rows


def _lines(quality: Quality) -> Iterator[str]:
    """How far a model is off, as lines of text."""
    if quality.kl is not None and quality.top1 is not None:
        yield (
            f"  logits at {quality.positions} positions: KL {numbers.significant(quality.kl)} nats, same most "
            f"likely entry {quality.top1:.2%}"
        )
    if quality.perplexity is not None:
        yield (
            f"  perplexity of {quality.tokens} tokens: {numbers.significant(quality.original_perplexity, 5)} → "
            f"{numbers.significant(quality.perplexity, 5)}"
        )
    relative, worst = numbers.significant(quality.relative), numbers.significant(quality.worst)
    yield f"  relative error {relative}, largest error {worst}"


def megabytes(count: int) -> str:
    """Bytes in MB."""
    return numbers.significant(count / 1e6)
