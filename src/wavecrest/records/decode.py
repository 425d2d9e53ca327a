"""The one decoder of what comes from a file or another process: bytes, text, JSON, YAML and TOML, all with limits.

A value that it returns can be walked, compared, printed and written again: it is not nested deeply, has every name
once, no whole number beyond 64 bits, no NaN or infinity unless asked for, and only text that UTF-8 can hold.
`tests/layout` keeps every other reader out.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import stat
import tomllib
import zlib
from pathlib import Path
from typing import Any

from wavecrest.errors import RecordError, UserError

# bytes of a file as it lies and of its content: the largest record under evidence/ has 3 MB
MOST_BYTES = 64 << 20
# bytes of a YAML file: its parser is Python, and a configuration has a few lines
MOST_YAML_BYTES = 1 << 20
# containers inside each other: records have 8
MOST_DEPTH = 64
# the largest whole number, as that of a database and of most readers of JSON
MOST_WHOLE = (1 << 63) - 1


class Undecodable(ValueError):
    """Bytes or text that are no such value; the message is for people and names the reason."""


def content(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file, decompressed where its name ends in .gz.

    Args:
        path: the file; a FIFO or a device is refused, as reading it may never end.
        most: bytes that it may have, before and after decompression.

    Raises:
        OSError: it cannot be read, or is no regular file.
        Undecodable: it is too large, cut short, or damaged by gzip's own checksum.
    """
    # before it is opened, which waits for the other end of a FIFO
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind):
        other = "a folder" if stat.S_ISDIR(kind) else "a device, a FIFO or a socket"
        raise OSError(errno.EINVAL, f"it is no regular file, but {other}", str(path))
    with path.open("rb") as file:
        if path.suffix != ".gz":
            return _limited(file.read(most + 1), most)
        try:
            with gzip.open(file) as unpacked:
                return _limited(unpacked.read(most + 1), most)
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise Undecodable(str(problem)) from None


def _limited(held: bytes, most: int) -> bytes:
    if len(held) > most:
        raise Undecodable(f"it has more than {most:,} bytes")
    return held


def text_of(held: bytes, *, mark: bool = False) -> str:
    """Text from UTF-8; `mark`: a byte order mark in front is dropped, as spreadsheets write it.

    Raises:
        Undecodable: it is not UTF-8, or begins with another byte order mark.
    """
    if mark:
        held = held.removeprefix(b"\xef\xbb\xbf")
    if held.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise Undecodable("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        return held.decode()
    except UnicodeDecodeError as problem:
        raise Undecodable(f"not UTF-8 text: {problem.reason} at byte {problem.start}") from None


def read_text(
    path: Path, *, what: str, error: type[UserError] = RecordError, most: int = MOST_BYTES, mark: bool = False
) -> str:
    """The text of a file; `what` is the file in messages, such as "plan"; `mark` as for `text_of`.

    Raises:
        RecordError (or `error`): no such file, unreadable, too large, or not UTF-8.
    """
    try:
        return text_of(content(path, most=most), mark=mark)
    except FileNotFoundError:
        raise error(f"no {what} at {shown(path)}") from None
    except Undecodable as problem:
        raise error(f"the {what} {shown(path)} is damaged: {problem}") from None
    # a null byte in a path is a ValueError
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        raise error(f"cannot read the {what} {shown(path)}: {reason}") from None


def shown(path: Path) -> str:
    """A path as text that every terminal and file can hold: bytes that are no UTF-8 become \\xNN."""
    return os.fsencode(path).decode(errors="backslashreplace")


def json_of(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of JSON.

    Args:
        text: one JSON value; bytes are UTF-8.
        finite: NaN and infinity are refused, which JSON does not have and Python's reader takes.

    Raises:
        Undecodable: it is not JSON, or a value of it is beyond the limits (see the module).
    """
    if isinstance(text, bytes):
        text = text_of(text)
    try:
        value = json.loads(text, object_pairs_hook=_named_once, parse_constant=_refuse_constant if finite else None)
    except json.JSONDecodeError as problem:
        raise Undecodable(f"not JSON at line {problem.lineno}: {problem.msg}") from None
    except RecursionError:
        raise Undecodable(f"nested more than {MOST_DEPTH} deep") from None
    except Undecodable:
        raise
    except ValueError:
        # Python converts no number of some thousand digits
        raise Undecodable("it has a whole number beyond 64 bits") from None
    check(value, finite=finite)
    return value


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Undecodable(f"{_quoted(twice)} is there twice")
    return made


def _refuse_constant(name: str) -> None:
    raise Undecodable(f"{name} is no number of JSON")


def yaml_of(text: str, module: Any) -> Any:
    """The value of one YAML document with plain values: no anchors, no tags of Python's.

    Args:
        text: the document.
        module: PyYAML, which the caller imports, as it is optional.

    Raises:
        Undecodable: it is not such a document, or a value of it is beyond the limits (see the module).
    """
    if len(text) > MOST_YAML_BYTES:
        raise Undecodable(f"it has more than {MOST_YAML_BYTES:,} bytes")
    try:
        # a bomb of aliases is small as text and parsed quickly; to walk it never ends
        events = list(module.parse(text, Loader=module.SafeLoader))
        if any(isinstance(event, module.AliasEvent) for event in events):
            raise Undecodable("it has aliases, which a configuration has no use for")
        root = module.compose(text, Loader=module.SafeLoader)
        _check_names(root, module)
        value = module.safe_load(text)
    except RecursionError:
        raise Undecodable(f"nested more than {MOST_DEPTH} deep") from None
    except Undecodable:
        raise
    # a date that does not exist is a ValueError
    except (module.YAMLError, ValueError, TypeError) as problem:
        raise Undecodable(" ".join(str(problem).split())) from None
    check(value)
    return value


def _check_names(root: Any, module: Any) -> None:
    """Names are text, and every one is there once: PyYAML takes the last."""
    left = [root]
    while left:
        node = left.pop()
        if isinstance(node, module.MappingNode):
            names = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
            if len(names) != len(node.value):
                raise Undecodable("a name in it is not text")
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise Undecodable(f"{_quoted(twice)} is there twice")
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, module.SequenceNode):
            left += node.value


def own_json_of(text: str) -> Any:
    """The value of JSON that this process has just written: a trace has millions of values, which are not checked.

    Raises:
        Undecodable: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise Undecodable(f"not JSON at line {problem.lineno}: {problem.msg}") from None


def toml_of(text: str) -> dict[str, Any]:
    """The tables of TOML.

    Raises:
        Undecodable: it is not TOML, or a value of it is beyond the limits (see the module).
    """
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise Undecodable(f"nested more than {MOST_DEPTH} deep") from None
    except ValueError as problem:
        raise Undecodable(str(problem)) from None
    check(value)
    return value


def check(value: Any, *, finite: bool = True) -> None:
    """Refuse a value of JSON, YAML or TOML that is beyond the limits (see the module).

    Raises:
        Undecodable: it is; the message says how.
    """
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for one in level:
            if depth >= MOST_DEPTH and isinstance(one, dict | list | tuple):
                raise Undecodable(f"nested more than {MOST_DEPTH} deep")
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
            else:
                _check_plain(one, finite)
        level, depth = below, depth + 1


def _check_plain(value: Any, finite: bool) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Undecodable(f"{_quoted(value)} holds half of a surrogate pair, which is no character") from None
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise Undecodable("it has a number beyond the range of float64, or NaN")
    elif isinstance(value, int) and not -MOST_WHOLE <= value <= MOST_WHOLE:
        raise Undecodable("it has a whole number beyond 64 bits")


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:79]}…")
