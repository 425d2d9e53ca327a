"""An archive of a few named members as one file: a zip, read with limits, written the same bytes for the same content.

What is read is held to the names that the reader expects, each there once and as a regular file, and to sizes: no
folder, link, path, encryption or other compression, and never more bytes in memory than the limit.
"""

from __future__ import annotations

import io
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from wavecrest.errors import BundleError
from wavecrest.records import decode
from wavecrest.records.files import write_bytes

# bytes of a member at most; the file as it lies has the same limit
MOST_BYTES = decode.MOST_BYTES
# the earliest date that a zip can hold: when it was packed is no part of the content
_DATE = (1980, 1, 1, 0, 0, 0)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# of a member's flags: encrypted, in either way, or made of the difference to another file
_FLAGS = 0x1 | 0x20 | 0x40


def write(path: Path, members: Mapping[str, bytes]) -> None:
    """Write an archive whole or not at all.

    Args:
        path: the file.
        members: content by name, at most MOST_BYTES each.

    Raises:
        OutputError: the file cannot be written.
        BundleError: a member is too large to be read again.
    """
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if len(content) > MOST_BYTES:
                raise BundleError(
                    f"{name} has {len(content):,} bytes; a bundle holds at most {MOST_BYTES:,} of each file"
                )
            row = zipfile.ZipInfo(name, _DATE)
            row.compress_type, row.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            archive.writestr(row, content)
    write_bytes(path, held.getvalue())


def read(path: Path, names: Iterable[str], *, what: str) -> dict[str, bytes]:
    """The members of an archive.

    Args:
        path: the file.
        names: of all its members.
        what: the file in messages, such as "proof bundle".

    Raises:
        BundleError: no such file, unreadable, damaged, or anything else in it than these members.
    """
    shown = decode.shown(path)
    try:
        packed = decode.content(path)
    except FileNotFoundError:
        raise BundleError(f"no {what} at {shown}") from None
    except decode.Undecodable as problem:
        raise BundleError(f"the {what} {shown} is damaged: {problem}") from None
    # a null byte in a path is a ValueError
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        raise BundleError(f"cannot read the {what} {shown}: {reason}") from None
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            rows = _rows(archive, list(names))
            return {row.filename: _content(archive, row) for row in rows}
    except decode.Undecodable as problem:
        raise BundleError(f"the {what} {shown} is damaged: {problem}") from None
    # of a directory that lies: offsets beyond the file, lengths that are not, names that cannot be decoded
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        OSError,
    ) as problem:
        raise BundleError(f"the {what} {shown} is damaged: {problem}") from None


def _rows(archive: zipfile.ZipFile, names: list[str]) -> list[zipfile.ZipInfo]:
    rows = archive.infolist()
    found = [row.filename for row in rows]
    other = [name for name in found if name not in names]
    if other:
        raise decode.Undecodable(f"it has a member {other[0][:80]!a}, and may have {', '.join(names)} alone")
    missing = [name for name in names if name not in found]
    if missing:
        raise decode.Undecodable(f"it has no member {missing[0]}")
    if len(found) != len(names):
        raise decode.Undecodable(f"it has {next(name for name in names if found.count(name) > 1)} twice")
    for row in rows:
        kind = stat.S_IFMT(row.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise decode.Undecodable(f"its member {row.filename} is no regular file")
        if row.flag_bits & _FLAGS:
            raise decode.Undecodable(f"its member {row.filename} is encrypted")
        if row.compress_type not in _METHODS:
            raise decode.Undecodable(f"its member {row.filename} is compressed in a way that bundles are not")
        if row.file_size > MOST_BYTES:
            raise decode.Undecodable(f"its member {row.filename} has more than {MOST_BYTES:,} bytes")
    return rows


def _content(archive: zipfile.ZipFile, row: zipfile.ZipInfo) -> bytes:
    """The bytes of a member; reading to the end compares its checksum."""
    with archive.open(row) as member:
        content = member.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES or member.read(1):
            raise decode.Undecodable(f"its member {row.filename} has more than {MOST_BYTES:,} bytes")
    if len(content) != row.file_size:
        raise decode.Undecodable(f"its member {row.filename} has {len(content):,} bytes, not {row.file_size:,}")
    return content
