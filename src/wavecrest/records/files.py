"""Files as everything is stored: written whole or not at all, JSON with a version, nothing foreign half-read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pydantic

from wavecrest import __version__
from wavecrest.errors import OutputError, RecordError, UserError


class Model(pydantic.BaseModel):
    """Base of all stored values: unknown fields are an error, so that a foreign file is not half-read."""

    # JSON has no NaN or infinity: strings, so that they come back as what they were
    model_config = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings")


def prepare_folder(folder: Path) -> Path:
    """Create a folder for results and prove that it can be written, before any work is done.

    Raises:
        OutputError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error
    return folder


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all (a temporary file in the same folder, then a rename)."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def read_document(path: Path, *, what: str, current: int, error: type[UserError] = RecordError) -> dict[str, Any]:
    """Read a JSON object with a `format_version` of at most `current`.

    Raises:
        RecordError (or `error`): no such file, damaged, foreign, or newer than this version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"no {what} at {path}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot read the {what} {path}: {problem}") from problem
    except json.JSONDecodeError as problem:
        raise error(f"the {what} {path} is damaged: not JSON at line {problem.lineno}: {problem.msg}") from None
    if not isinstance(document, dict) or not isinstance(document.get("format_version"), int):
        raise error(f"{path} is not a wavecrest {what}: it has no format_version")
    if document["format_version"] > current:
        raise error(
            f"the {what} {path} has format {document['format_version']}, this wavecrest ({__version__}) reads up to "
            f"{current}; upgrade wavecrest"
        )
    return document
