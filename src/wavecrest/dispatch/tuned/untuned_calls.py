"""Untuned calls, whose key has no measured row: one JSON object per line, for `wavecrest tune FILE`.

Processes append to one file at once: a line is written by one call, to a file that is opened for appending.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecrest.dispatch.tuned.row import Cell
from wavecrest.errors import OutputError, TableError
from wavecrest.records import decode


@dataclass(frozen=True, slots=True)
class UntunedCall:
    """A key without a row: the op, the architecture, the key's parts by name, and the backend that ran instead."""

    op: str
    arch: str
    key: Mapping[str, Cell]
    backend: str
    source: str


class Recorder:
    """Appends untuned calls to a file.

    Raises:
        OutputError: the file cannot be written; found when it is made, not at a call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._append(b"")

    def add(self, untuned: UntunedCall) -> None:
        """Write one untuned call.

        Raises:
            OutputError: the file cannot be written any more.
        """
        values = {"op": untuned.op, "arch": untuned.arch, "key": dict(untuned.key), "backend": untuned.backend}
        line = json.dumps({**values, "source": untuned.source}, ensure_ascii=False)
        self._append(f"{line}\n".encode())

    def _append(self, data: bytes) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(f"cannot write misses to {self.path}: {error.strerror or error}") from error


def read(path: Path) -> list[UntunedCall]:
    """The untuned calls of a file, each op and key once, in the order of their first line.

    Raises:
        TableError: the file cannot be read, or has lines that are not untuned calls; the message names all of them.
    """
    text = decode.read_text(path, what="file of misses", error=TableError)
    found: dict[tuple[Any, ...], UntunedCall] = {}
    bad = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            untuned = _untuned_call(decode.json_of(line))
        except ValueError as problem:
            bad.append(f"line {number}: {problem}")
            continue
        found.setdefault((untuned.op, untuned.arch, *untuned.key.items()), untuned)
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise TableError(f"{path} is no file of misses: {'; '.join(bad[:5])}{more}: correct or delete the lines")
    return list(found.values())


def _untuned_call(value: Any) -> UntunedCall:
    if not isinstance(value, dict):
        raise ValueError("is no object")
    texts = [text for name in ("op", "arch", "backend", "source") if isinstance(text := value.get(name), str)]
    key = value.get("key")
    if len(texts) != 4 or not isinstance(key, dict):
        raise ValueError("lacks op, arch, key, backend or source")
    if not all(part is None or isinstance(part, int | str) for part in key.values()):
        raise ValueError("its key has a part that is no whole number, text, true, false or null")
    op, arch, backend, source = texts
    return UntunedCall(op, arch, key, backend, source)
