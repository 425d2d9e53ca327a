"""Files as everything is stored: written whole or not at all, JSON with a version, nothing foreign half-read.

A document is JSON, or, where its name ends with `.jsonl.gz`, JSON lines (`records.lines`) compressed by gzip.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import gzip
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pydantic

from wavecrest import __version__
from wavecrest.errors import OutputError, RecordError, UserError
from wavecrest.records import decode, lines

# the end of a name that asks for compressed JSON lines
LINES = ".jsonl.gz"
# digits of a content hash: two of a thousand records agree by chance once in 10^8 tries
HASH_DIGITS = 12
# permissions of a file that was not there before
NEW_FILE = 0o644
# in a run's folder while the run goes on
LOCK = "run.lock"


class Model(pydantic.BaseModel):
    """Base of all stored values: unknown fields are an error, so that a foreign file is not half-read."""

    # JSON has no NaN or infinity: strings, so that they come back as what they were
    model_config = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process: a second one gets an error. A process that dies lets go, however it dies.

    Raises:
        OutputError: another process holds it, or the lock file cannot be written.
    """
    path = folder / LOCK
    try:
        file = _lock(path)
    except BlockingIOError:
        owner = path.read_text(errors="replace").strip()[:20] or "another process"
        raise OutputError(
            f"the folder {decode.shown(folder)} is in use by process {owner}; wait for it, or give another folder"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write {decode.shown(path)}: {error.strerror or error}") from error
    try:
        yield
    finally:
        # in this order: whoever waits for the lock sees that its file is gone
        path.unlink(missing_ok=True)
        file.close()


def _lock(path: Path) -> IO[str]:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process before may have taken the file away after it was opened here
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
                return file
        except OSError:
            file.close()
            raise
        file.close()


def sweep(folder: Path, names: Iterable[str]) -> None:
    """Take away what a process that was killed while it wrote these files has left beside them.

    Only for a folder that is held (`locked`): another process may be writing elsewhere.
    """
    for name in names:
        for path in folder.glob(f".{glob.escape(_stem(name))}.*"):
            with suppress(OSError):
                path.unlink()


def _stem(name: str) -> str:
    """The begin of a temporary name; a name may be as long as the file system allows."""
    return name[:40]


def first_problem(error: pydantic.ValidationError) -> str:
    """The first problem of a value that fits no schema, as "steps.0.level: Input should be …"."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


def prepare_folder(folder: Path) -> Path:
    """Create a folder for results and prove that it can be written, before any work is done.

    Raises:
        OutputError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(f"cannot write to the output folder {decode.shown(folder)}: {reason}") from error
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """`prepare_folder`; what it created is gone again if the work in it raises and has left nothing there.

    Raises:
        OutputError: it cannot be created or written.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield prepare_folder(folder)
    except BaseException:
        for one in missing:
            # with something in it, it stays
            with suppress(OSError):
                one.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all (a temporary file beside it, then a rename).

    A symlink stays one: what it leads to is written. A device or a FIFO that somebody reads is written into.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        held = text.encode()
    except UnicodeEncodeError:
        raise OutputError(f"cannot write {decode.shown(path)}: its text has half of a surrogate pair") from None
    _write(path, held)


def write_bytes(path: Path, held: bytes) -> None:
    """`write_text` for bytes.

    Raises:
        OutputError: the file cannot be written.
    """
    _write(path, held)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON object in the form that the file's name asks for; the same object gives the same bytes.

    Raises:
        OutputError: the file cannot be written.
    """
    if path.name.endswith(LINES):
        text = "".join(f"{line}\n" for line in lines.split(document))
        _write(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))
    else:
        _write(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def write_model(path: Path, model: Model) -> None:
    """Write a stored value in the form that the file's name asks for.

    Raises:
        OutputError: the file cannot be written.
    """
    if path.name.endswith(LINES):
        # through text, as only that has infinities as strings
        write_document(path, decode.json_of(model.model_dump_json()))
    else:
        write_text(path, model.model_dump_json(indent=1) + "\n")


def _write(path: Path, held: bytes) -> None:
    temporary: Path | None = None
    try:
        mode = _mode(path)
        if not stat.S_ISREG(mode):
            return _write_into(path, mode, held)
        target = Path(os.path.realpath(path))
        prefix = f".{_stem(target.name)}."
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=prefix, delete=False) as file:
            temporary = Path(file.name)
            file.write(held)
        temporary.chmod(stat.S_IMODE(mode))
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        # a null byte in a path is a ValueError
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(f"cannot write {decode.shown(path)}: {reason}") from error


def _mode(path: Path) -> int:
    """Kind and permissions of a file, or of the one to make where it is missing.

    Raises:
        OSError: it cannot be found out, as in a loop of symlinks.
    """
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return stat.S_IFREG | NEW_FILE


def _write_into(path: Path, mode: int, held: bytes) -> None:
    """Write what is no regular file without replacing it: a character device, or a FIFO that is being read.

    Raises:
        OSError: it is something else, nobody reads it, or it takes no more.
    """
    if not stat.S_ISCHR(mode) and not stat.S_ISFIFO(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a block device or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}; give the name of a file")
    # without waiting for a reader: where it is missing, this raises
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb", buffering=0) as file:
        left = memoryview(held)
        while left:
            left = left[file.write(left) :]


def beside(path: Path, name: str) -> Path:
    """The path of `<stem>_<name>` with the same ending, which is one even where it has two dots."""
    ending = LINES if path.name.endswith(LINES) else path.suffix
    return path.with_name(f"{path.name.removesuffix(ending)}_{name}{ending}")


def content_hash(path: Path) -> str:
    """The first `HASH_DIGITS` of the SHA-256 of a file's uncompressed content.

    Raises:
        OSError, ValueError: as of `decode.content`.
    """
    return hashlib.sha256(decode.content(path)).hexdigest()[:HASH_DIGITS]


def read_json(path: Path, *, what: str, error: type[UserError] = RecordError) -> Any:
    """The JSON value of a file in either form.

    Raises:
        RecordError (or `error`): no such file, unreadable, damaged, or beyond the limits of `records.decode`.
    """
    text = decode.read_text(path, what=what, error=error)
    try:
        return lines.join(text.removesuffix("\n").split("\n")) if path.name.endswith(LINES) else decode.json_of(text)
    except ValueError as problem:
        raise error(f"the {what} {decode.shown(path)} is damaged: {problem}") from None


def read_document(path: Path, *, what: str, current: int, error: type[UserError] = RecordError) -> dict[str, Any]:
    """Read a JSON object, in either form, with a `format_version` of at most `current`.

    Raises:
        RecordError (or `error`): no such file, damaged, foreign, or newer than this version.
    """
    document = read_json(path, what=what, error=error)
    return document_of(document, decode.shown(path), what=what, current=current, error=error)


def document_of(
    document: Any, name: str, *, what: str, current: int, error: type[UserError] = RecordError
) -> dict[str, Any]:
    """A value read as JSON, if it is an object with a `format_version` of at most `current`; `name` is its file's.

    Raises:
        RecordError (or `error`): it is foreign, or newer than this version.
    """
    version = document.get("format_version") if isinstance(document, dict) else None
    # True is a whole number, too
    if type(version) is not int or version < 0:
        raise error(f"{name} is not a wavecrest {what}: it has no format_version")
    if version > current:
        raise error(
            f"the {what} {name} has format {version}, this wavecrest ({__version__}) reads up to "
            f"{current}; upgrade wavecrest"
        )
    found: dict[str, Any] = document
    return found
