"""Verdicts on users' kernels, kept between processes beside the user's database of measured rows."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pydantic

import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Overlay
from wavecrest.errors import OutputError, RecordError
from wavecrest.records import files, provenance
from wavecrest.tune import contract

if TYPE_CHECKING:
    from wavecrest.backends.user import UserKernel

# of a key: as of the hashes that records name each other by
DIGITS = 32

_logger = logging.getLogger("wavecrest.kernels")


def key_of(kernel: UserKernel, place: str, form: contract.Form) -> str | None:
    """The name of a verdict: a hash of all that it rests on; None where the kernel's source cannot be read.

    That is the source of the kernel and of the modules beside it that it uses, its declaration, the op's reference and
    the rules, the versions, the architecture, and the form of the calls.
    """
    try:
        sources = [path.read_bytes() for path in (*files_of(kernel.function), *_own_files(kernel))]
        text = inspect.getsource(kernel.function)
    except (OSError, TypeError):
        return None
    found = provenance.versions()
    versions = (found.wavecrest, found.torch, found.triton, _triton.interpreted, _triton.emulated)
    declared = (kernel.op.name, kernel.name, kernel.takes, kernel.archs, kernel.dtypes, kernel.configs)
    digest = hashlib.sha256(repr((text, versions, declared, place, form)).encode())
    for source in sources:
        digest.update(hashlib.sha256(source).digest())
    return digest.hexdigest()[:DIGITS]


def files_of(function: Any) -> list[Path]:
    """The files of a function's module, and of those modules beside it, or in its package, that it uses; sorted."""
    home = sys.modules.get(function.__module__)
    if home is None or getattr(home, "__file__", None) is None:
        raise OSError(f"{function.__module__} has no file")
    seen: dict[str, Path] = {}
    waiting = [home]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if file is not None and file not in seen and _belongs(module, home):
            seen[file] = Path(file)
            waiting += _used(module)
    return [seen[name] for name in sorted(seen)]


def _belongs(module: ModuleType, home: ModuleType) -> bool:
    """True for modules of the same package, and for files of the same folder."""
    package = home.__name__.partition(".")[0]
    if module.__name__.partition(".")[0] == package:
        return True
    return Path(str(module.__file__)).parent == Path(str(home.__file__)).parent


def _used(module: ModuleType) -> Iterator[ModuleType]:
    """The modules that a module's names come from."""
    for value in list(vars(module).values()):
        # a kernel of Triton keeps its function as `fn`
        name = (
            value.__name__ if isinstance(value, ModuleType) else getattr(getattr(value, "fn", value), "__module__", "")
        )
        found = sys.modules.get(name) if isinstance(name, str) else None
        if found is not None:
            yield found


def _own_files(kernel: UserKernel) -> list[Path]:
    """Wavecrest's files that a verdict rests on: the rules, and the op's reference."""
    reference = sys.modules[kernel.op.reference.__module__].__file__ if _named(kernel.op.reference) else None
    return [Path(contract.__file__), *([Path(reference)] if reference else [])]


def _named(function: Any) -> bool:
    return getattr(function, "__module__", None) in sys.modules


def _path(key: str) -> Path | None:
    overlay = Overlay.of_user()
    return None if overlay is None else overlay.path.parent / "verdicts" / f"{key}.json"


def look_up(key: str | None) -> contract.Verdict | None:
    """The verdict of a key from an earlier process; None for a new key, or a damaged file."""
    path = None if key is None else _path(key)
    if path is None or not path.is_file():
        return None
    try:
        return contract.Verdict.model_validate(files.read_json(path, what="verdict"))
    except (RecordError, pydantic.ValidationError) as error:
        # the kernel is checked again, and the file written anew
        _logger.info("%s is not used: %s", path, error)
        return None


def keep(key: str | None, verdict: contract.Verdict) -> None:
    """Keep a verdict for later processes; without a place that can be written it holds in this one alone."""
    path = None if key is None else _path(key)
    if path is None:
        return
    try:
        files.prepare_folder(path.parent)
        files.write_model(path, verdict)
    except OutputError as error:
        _logger.info("the verdict is not kept: %s", error)
