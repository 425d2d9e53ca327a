"""Documents as JSON lines: a line for each case, key or candidate, so that a file can be read and compared by lines.

The first line is the document without its lists of objects, which are empty there. Each object of such a list is a line
of its own after it, `{"keys.candidates": {…}}`: the names of the lists that lead to it, joined by dots, and the object,
its own lists empty again. It belongs to the object of `keys` before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from wavecrest.records.decode import Undecodable, json_of

Document = dict[str, Any]


def split(document: Document) -> Iterator[str]:
    """The lines of a document, without their ends; `join` makes the same document of them."""
    yield _text(_bare(document))
    yield from _parts(document, "")


def join(lines: Iterable[str]) -> Document:
    """The document of lines that `split` made.

    Raises:
        ValueError: they are not such lines; the message names the first that is not.
    """
    # the object that was read last, by the names of the lists that lead to it; "" is the document
    last: dict[str, Document] = {}
    for number, line in enumerate(lines, 1):
        try:
            value = json_of(line)
        except Undecodable as problem:
            # the reader of one value calls it line 1
            raise ValueError(f"{str(problem).replace('at line 1', f'at line {number}')}") from None
        if not isinstance(value, dict):
            raise ValueError(f"line {number} is not an object")
        if number == 1:
            last[""] = value
            continue
        ((path, part),) = value.items() if len(value) == 1 else [("", None)]
        above, _, name = path.rpartition(".")
        into = last.get(above, {}).get(name)
        if not isinstance(part, dict) or not isinstance(into, list):
            raise ValueError(f"line {number} belongs to no list of the lines before it")
        into.append(part)
        last[path] = part
    if not last:
        raise ValueError("it is empty")
    return last[""]


def _listed(name: str, value: Any) -> bool:
    """Whether a field is written as lines: a list of objects whose name can stand in a path."""
    if not name or "." in name or not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, dict) for one in value)


def _bare(document: Document) -> Document:
    return {name: [] if _listed(name, value) else value for name, value in document.items()}


def _parts(document: Document, above: str) -> Iterator[str]:
    for name, value in document.items():
        if _listed(name, value):
            path = f"{above}.{name}" if above else name
            for one in value:
                yield _text({path: _bare(one)})
                yield from _parts(one, path)


def _text(value: Document) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
