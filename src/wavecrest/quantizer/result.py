"""A quantized model with its report, and the way back."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from wavecrest.errors import InvalidArgument
from wavecrest.quantizer import saved
from wavecrest.quantizer.changes import Changes
from wavecrest.quantizer.place import cache_module
from wavecrest.quantizer.report import QuantizeReport, megabytes

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.quantizer.kv_cache import QuantizedStaticCache


class Quantized:
    """A model whose linear layers are quantized; `restore()`, or the end of a `with` block, takes it back.

    Attributes:
        model: the model, changed in place.
        formats: the format of each quantized layer, by path; a shared layer has several.
        report: each layer's format, bytes and error, and the model beside the original.
        kv_cache: the format of the caches that `cache` makes, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        formats: dict[str, str],
        report: QuantizeReport,
        changes: Changes,
        kv_cache: str | None = None,
    ) -> None:
        self.model, self.formats, self.report, self.kv_cache = model, formats, report, kv_cache
        self._changes: Changes | None = changes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The quantized model's answer."""
        return self.model(*args, **kwargs)

    def cache(self, max_cache_len: int) -> QuantizedStaticCache:
        """An empty key-value cache in the format asked for, to call the model or its `generate` with.

        Args:
            max_cache_len: tokens of a sequence at most, prompt and new ones.

        Raises:
            InvalidArgument: no `kv_cache` was asked for.
            Unsupported: the model's attention is not wavecrest's any more.
        """
        if self.kv_cache is None:
            raise InvalidArgument("cache: quantize was called without kv_cache, such as kv_cache='fp8'")
        found: QuantizedStaticCache = cache_module().QuantizedStaticCache(self.model, max_cache_len, self.kv_cache)
        return found

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
        if self.formats and self._changes is not None and not len(self._changes):
            raise InvalidArgument("save: the model was restored; quantize it again")
        saved.write(Path(path), self.model, self.formats, self.report, self.kv_cache)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        """One line: how many layers have each format, and the bytes."""
        counts = {name: list(self.formats.values()).count(name) for name in dict.fromkeys(self.formats.values())}
        found = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no layer"
        found += "" if self.kv_cache is None else f", key-value cache {self.kv_cache}"
        sizes = f"{megabytes(self.report.bytes_before)} → {megabytes(self.report.bytes_after)} MB"
        return f"Quantized({self.report.model}: {found}, {sizes})"

    def _repr_html_(self) -> str:
        """The report for a notebook."""
        return self.report._repr_html_()
