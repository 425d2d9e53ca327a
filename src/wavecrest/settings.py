"""Settings of this process: log level, precision of float32 calls, strictness, determinism, place and size of caches.

Each has an environment variable that is read when `wavecrest.ops` is imported; `docs/settings.md` has the effects.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import platformdirs
import torch

from wavecrest import env
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import STATE as _DISPATCH
from wavecrest.dispatch.op import Strict
from wavecrest.dispatch.tuned import Database
from wavecrest.errors import InvalidArgument, OutputError

__all__ = ["Settings", "current", "update", "using"]

LogLevel = Literal["debug", "info", "warning", "error"]
Precision = Literal["ieee", "tf32", "tf32x3", "bf16", "fp16"]

LEVELS: dict[str, int] = {name: getattr(logging, name.upper()) for name in get_args(LogLevel)}
PRECISIONS: tuple[str, ...] = get_args(Precision)
VARIABLES = {
    "log_level": "WAVECREST_LOG_LEVEL",
    "precision": "WAVECREST_PRECISION",
    "deterministic": "WAVECREST_DETERMINISTIC",
    "cache_dir": "WAVECREST_CACHE_DIR",
    "cache_size": "WAVECREST_CACHE_SIZE",
}
# variables that say where compiled kernels are kept, and their folders below ours
FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# seconds: another process may be writing, or about to read, a kernel that is younger
IN_USE = 60.0

logger = logging.getLogger("wavecrest")
# a library is silent unless its user asks
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of this process; `update` says what each does."""

    log_level: LogLevel
    precision: Precision
    strict: Strict
    deterministic: bool
    cache_dir: Path | None
    cache_size: int | None


@dataclass(slots=True)
class _Before:
    """State that deterministic mode replaced, to be put back."""

    algorithms: bool
    warn_only: bool
    benchmark: bool
    database: Database


@dataclass(slots=True)
class _State:
    log_level: LogLevel = "warning"
    precision: Precision = "ieee"
    cache_dir: Path | None = None
    cache_size: int | None = None
    before: _Before | None = None
    handler: logging.Handler | None = None


STATE = _State()


def current() -> Settings:
    """The settings that hold now."""
    return Settings(
        STATE.log_level, STATE.precision, _DISPATCH.strict, STATE.before is not None, STATE.cache_dir, STATE.cache_size
    )


def update(
    *,
    log_level: LogLevel | None = None,
    precision: Precision | None = None,
    strict: Strict | None = None,
    deterministic: bool | None = None,
    cache_dir: Path | str | None = None,
    cache_size: int | None = None,
) -> None:
    """Change settings of this process; None leaves one as it is. All are checked before any is changed.

    Args:
        log_level: of the logger "wavecrest": "info" logs each dispatch decision when it is made and each fallback,
            "debug" also why other backends were not chosen. Goes to standard error where logging has no handler.
        precision: of float32 tensors in `wavecrest.matmul`, `linear`, `conv2d` and `attention`, and in `wavecrest.nn`'s
            Linear, Conv2d, Attention and MultiheadAttention. "ieee": float32. "tf32": GEMMs may round their arguments
            to 10 bits of mantissa. "tf32x3": they may make a product of three of those. "bf16", "fp16": arguments are
            rounded to 16 bits at each call; sums and the result of GEMMs are float32, the result of conv2d and
            attention is rounded to 16 bits and returned as float32. `wavecrest.ops` and other dtypes are as they were.
        strict: "off", "warn" or "error" at a call without a measured row of its own (`registry.strict`).
        deterministic: PyTorch runs deterministic algorithms only, cuDNN picks none by timing, and the user's database
            of measured rows does not decide: processes on GPUs of one architecture choose the same kernels. (One call
            gives the same bits twice with or without it.)
        cache_dir: a folder for the kernels that Triton ("triton") and Inductor ("inductor") compile from now on, in
            this process and those that it starts.
        cache_size: MiB of Triton's kernels to keep there: above it the least recently used are deleted, now and when
            the process ends. Without a `cache_dir`, in the platform's folder for caches.

    Raises:
        InvalidArgument: a setting does not take a value.
        OutputError: the folder cannot be made or written.
    """
    _check(log_level, precision, strict, deterministic, cache_size)
    if cache_size is not None and cache_dir is None and STATE.cache_dir is None:
        cache_dir = platformdirs.user_cache_path("wavecrest") / "kernels"
    if cache_dir is not None:
        _keep_kernels_in(Path(cache_dir))
    if log_level is not None:
        _log_at(log_level)
    if precision is not None:
        STATE.precision = precision
    if strict is not None:
        registry.strict(strict)
    if deterministic is not None and deterministic != (STATE.before is not None):
        _determine() if deterministic else _release()
    if cache_size is not None:
        if STATE.cache_size is None:
            atexit.register(trim)
        STATE.cache_size = cache_size
        trim()


@contextlib.contextmanager
def using(
    *,
    log_level: LogLevel | None = None,
    precision: Precision | None = None,
    strict: Strict | None = None,
    deterministic: bool | None = None,
) -> Iterator[Settings]:
    """Settings inside a `with` block, as of `update`; those from before hold after it.

    Functions that torch.compile has compiled are compiled again where the precision differs.
    """
    before = current()
    update(log_level=log_level, precision=precision, strict=strict, deterministic=deterministic)
    try:
        yield current()
    finally:
        given = {"log_level": log_level, "precision": precision, "strict": strict, "deterministic": deterministic}
        earlier: dict[str, Any] = asdict(before)
        update(**{name: earlier[name] for name, value in given.items() if value is not None})


def _check(log_level: Any, precision: Any, strict: Any, deterministic: Any, cache_size: Any) -> None:
    for name, value, known in (
        ("log_level", log_level, tuple(LEVELS)),
        ("precision", precision, PRECISIONS),
        ("strict", strict, get_args(Strict)),
    ):
        if value is not None and value not in known:
            raise InvalidArgument(f"settings: {name} takes {', '.join(known)}, not {value!r}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise InvalidArgument(f"settings: deterministic takes True or False, not {deterministic!r}")
    whole = isinstance(cache_size, int) and not isinstance(cache_size, bool)
    if cache_size is not None and not (whole and cache_size >= 1):
        raise InvalidArgument(f"settings: cache_size takes a whole number of MiB, at least 1, not {cache_size!r}")


def _log_at(level: LogLevel) -> None:
    STATE.log_level = level
    logger.setLevel(LEVELS[level])
    # the handler is only for programs that have set up no logging
    others = [one for one in logger.handlers if one is not STATE.handler and not isinstance(one, logging.NullHandler)]
    if STATE.handler is None and not others and not logging.getLogger().handlers:
        STATE.handler = logging.StreamHandler()
        STATE.handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(STATE.handler)


def _determine() -> None:
    backends = torch.backends.cudnn
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    STATE.before = _Before(
        torch.are_deterministic_algorithms_enabled(), warn_only, backends.benchmark, _DISPATCH.database
    )
    # cuBLAS sums in one order only with a workspace of its own, and PyTorch raises without
    env.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    backends.benchmark = False
    _DISPATCH.database = _DISPATCH.database.without_overlay()
    registry.forget()


def _release() -> None:
    before = STATE.before
    assert before is not None
    torch.use_deterministic_algorithms(before.algorithms, warn_only=before.warn_only)
    torch.backends.cudnn.benchmark = before.benchmark
    _DISPATCH.database = before.database
    registry.forget()
    STATE.before = None


def _keep_kernels_in(folder: Path) -> None:
    folder = folder.expanduser().absolute()
    try:
        for variable, name in FOLDERS.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            env.set_value(variable, str(folder / name))
    except OSError as error:
        raise OutputError(
            f"cannot keep kernels in {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    STATE.cache_dir = folder


def trim() -> None:
    """Delete the least recently used of Triton's kernels above `cache_size`; a setting of none deletes none."""
    if STATE.cache_dir is None or STATE.cache_size is None:
        return
    entries = []
    for entry in (STATE.cache_dir / FOLDERS["TRITON_CACHE_DIR"]).iterdir():
        # another process may delete them too
        with contextlib.suppress(FileNotFoundError):
            facts = [one.stat() for one in (entry, *entry.rglob("*"))]
            used = max(max(fact.st_mtime, fact.st_atime) for fact in facts[1:] or facts)
            entries.append((used, sum(fact.st_size for fact in facts[1:]), entry))
    left = sum(size for _, size, _ in entries)
    for used, size, entry in sorted(entries):
        if left <= STATE.cache_size * 2**20:
            return
        if time.time() - used > IN_USE:
            shutil.rmtree(entry, ignore_errors=True)
            left -= size
            logger.debug("deleted %s from the cache of kernels, %d bytes", entry.name, size)


def _of_environment() -> dict[str, Any]:
    """The values that variables give, as arguments of `update`; those that are not set are left out."""
    found: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        text = env.get(variable)
        if not text:
            continue
        if name == "deterministic":
            if text not in ("0", "1"):
                raise InvalidArgument(f"{variable} takes 0 or 1, not {text!r}")
            found[name] = text == "1"
        elif name == "cache_size":
            if not text.isdecimal() or len(text) > 9:
                raise InvalidArgument(f"{variable} takes a whole number of MiB, not {text[:40]!r}")
            found[name] = int(text)
        else:
            found[name] = text if name == "cache_dir" else text.lower()
    return found


@cache
def read_environment() -> None:
    """Apply the variables that are set, at the first call in a process.

    Raises:
        InvalidArgument: a setting does not take a value; the message names the variable.
        OutputError: the folder of the cache cannot be made.
    """
    found = _of_environment()
    for name in ("log_level", "precision"):
        known = LEVELS if name == "log_level" else PRECISIONS
        if name in found and found[name] not in known:
            raise InvalidArgument(f"{VARIABLES[name]} takes {', '.join(known)}, not {found[name]!r}")
    update(**found)


read_environment()
