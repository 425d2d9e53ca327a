"""A quantized model with its report, and the way back."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from wavecrest.errors import InvalidArgument
from wavecrest.quantizer import saved
from wavecrest.quantizer.changes import Changes
from wavecrest.quantizer.report import QuantizeReport, megabytes

if TYPE_CHECKING:
    from torch import nn


class Quantized:
    """A model whose linear layers are quantized; `restore()`, or the end of a `with` block, takes it back.

    Attributes:
        model: the model, changed in place.
        formats: the format of each quantized layer, by path; a shared layer has several.
        report: each layer's format, bytes and error, and the model beside the original.
    """

    def __init__(self, model: nn.Module, formats: dict[str, str], report: QuantizeReport, changes: Changes) -> None:
        self.model, self.formats, self.report = model, formats, report
        self._changes: Changes | None = changes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The quantized model's answer."""
        return self.model(*args, **kwargs)

    def restore(self) -> None:
        """Put the model's own layers and parameters back, the same objects; a second time does nothing.

        They are on the device and in the dtype that they had: moves of the quantized model are not repeated.

        Raises:
            InvalidArgument: `forget` was called.
        """
        if self._changes is None:
            raise InvalidArgument("restore: the original weights were given up (forget)")
        self._changes.undo()

    def forget(self) -> None:
        """Give the original weights up, so that their memory is free: until then a model takes that of both forms."""
        if self._changes is not None:
            self._changes.forget()
        self._changes = None

    def save(self, path: str | Path) -> None:
        """Write the model's weights, quantized ones as they are, to one safetensors file; see `load_quantized`.

        Raises:
            InvalidArgument: the model was restored.
            OutputError: the file cannot be written.
            MissingDependency: safetensors is not installed.
            Unsupported: the model has state that is no tensor.
        """
        if self._changes is not None and not len(self._changes):
            raise InvalidArgument("save: the model was restored; quantize it again")
        saved.write(Path(path), self.model, self.formats, self.report)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        """One line: how many layers have each format, and the bytes."""
        counts = {name: list(self.formats.values()).count(name) for name in dict.fromkeys(self.formats.values())}
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        sizes = f"{megabytes(self.report.bytes_before)} → {megabytes(self.report.bytes_after)} MB"
        return f"Quantized({self.report.model}: {found}, {sizes})"

    def _repr_html_(self) -> str:
        """The report for a notebook."""
        return self.report._repr_html_()
