"""Where a result comes from: the machine, the versions and commit, and the exact command."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from wavecrest import __version__, env, hardware
from wavecrest.errors import EnvironmentProblem, InvalidArgument
from wavecrest.records.files import HASH_DIGITS, Model

Evidence = Literal["measured", "compiled", "emulated", "model"]

PACKAGE = Path(__file__).resolve().parents[1]
# suffix of the commit of a tree that has changes
CHANGES = "+changes"
# in the package, the measured rows that ship with it: data that `wavecrest tune` writes
TABLES = "dispatch/tuned/data"
# the oldest transformers that wavecrest is tested with; pyproject.toml has it too
LEAST_TRANSFORMERS = "5.14"

_COMPILED = (".pyc", ".so", ".o")
_STAMP = re.compile(rf"(?P<commit>[0-9a-f]{{7,40}})@(?P<source>[0-9a-f]{{{HASH_DIGITS}}})")


class Versions(Model):
    """Versions of the packages that ran; None where a package is not installed."""

    wavecrest: str
    python: str
    torch: str | None
    triton: str | None
    transformers: str | None
    numpy: str
    platform: str


class Header(Model):
    """Where a result comes from.

    `commit` ends with "+changes" where files of wavecrest were not as they are there; None if it is not known. `source`
    is the hash of the files that ran (`source_hash`, without measured rows); None in records from before 2026-11-24.
    """

    created: str
    command: str
    commit: str | None
    source: str | None = None
    evidence: Evidence
    device: dict[str, Any]
    versions: Versions
    environment: dict[str, str]

    @property
    def reproducible(self) -> bool:
        """True if a commit has all source files that ran, and the measured rows of all commands but `wavecrest tune`.

        A copy without git is known by its source files alone.
        """
        return self.commit is not None and not self.commit.endswith(CHANGES)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def versions() -> Versions:
    """The versions of this process."""
    import torch

    return Versions(
        wavecrest=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton") or _version("pytorch-triton-rocm"),
        transformers=_version("transformers"),
        numpy=_version("numpy") or "unknown",
        platform=platform.platform(terse=True),
    )


@cache
def _commit(rows: bool = True) -> str | None:
    """The commit of this package, "+changes" after it where files are not as they are there; None if unknown."""
    here, given = commit_of(PACKAGE, rows), _given_commit()
    if here is None or given is None or given.endswith(CHANGES):
        return here or given
    # a repository made for a copy does not have the commit of the stamp; one that has it knows more than the stamp
    return given if source_of(PACKAGE, given) is None else here


def commit_of(package: Path, rows: bool = True) -> str | None:
    """The commit that a package folder is checked out from.

    None where it is in no git checkout of wavecrest itself: installed, copied, or copied into a repository of
    something else, whose commit says nothing about these files.

    Args:
        package: the folder `wavecrest` with the modules.
        rows: changed tables of measured rows count as changes; not for `wavecrest tune`, which writes them.
    """
    checkout = package.parents[1]
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != checkout.resolve() or _project(checkout) != "wavecrest":
        return None
    inside = package.relative_to(checkout).as_posix()
    if _git(checkout, "ls-files", "--error-unmatch", "--", f"{inside}/__init__.py") is None:
        return None
    head = _git(checkout, "rev-parse", "--short", "HEAD")
    # files that git does not know yet run, too
    paths = [inside, "benchmarks", ":(exclude)benchmarks/results"] + ([] if rows else [f":(exclude){inside}/{TABLES}"])
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=normal", "--", *paths)
    if head is None or changes is None:
        return None
    # git's status passes over files that it ignores or is told to take for unchanged
    same = not changes and source_of(package, head) == source_in(package)
    return head if same else f"{head}{CHANGES}"


def source_of(package: Path, commit: str) -> str | None:
    """The hash of a package's files at a commit (`source_hash`); None if the commit is not in the history here."""
    checkout = package.parents[1]
    inside = package.relative_to(checkout).as_posix()
    command = ["git", "-C", str(checkout), "archive", "--format=tar", commit, inside]
    try:
        made = subprocess.run(command, capture_output=True, timeout=30, env=_git_environment())
    except (OSError, subprocess.TimeoutExpired):
        return None
    if made.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as tar:
        held = [(one.name.removeprefix(f"{inside}/"), tar.extractfile(one)) for one in tar if one.isfile()]
        return source_hash((name, file.read()) for name, file in held if file)


def _git_environment() -> dict[str, str]:
    # set inside git's own hooks, where they name the repository of whoever calls
    return env.child({name: None for name in env.matching("GIT_") if name.startswith("GIT_")})


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command; None if it fails."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=_git_environment())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _project(checkout: Path) -> str | None:
    """The name of the Python project in a folder."""
    try:
        named = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
        return str(named["project"]["name"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return None


def _given_commit() -> str | None:
    """The commit that WAVECREST_COMMIT names, for a copy without git: accepted if the files' hash matches."""
    given = env.get("WAVECREST_COMMIT")
    if not given:
        return None
    match = _STAMP.fullmatch(given)
    if match is None:
        raise InvalidArgument(f"WAVECREST_COMMIT takes COMMIT@HASH as scripts/provenance prints it, not {given!r}")
    return match["commit"] if match["source"] == source() else f"{match['commit']}{CHANGES}"


def stamp() -> str:
    """The value to give WAVECREST_COMMIT where a copy of this tree runs: "COMMIT@HASH".

    Raises:
        EnvironmentProblem: this is no checkout, or it has changes that no commit has.
    """
    commit = commit_of(PACKAGE)
    if commit is None:
        raise EnvironmentProblem("this is no git checkout of wavecrest: run it where the repository is")
    if commit.endswith(CHANGES):
        raise EnvironmentProblem(f"files are not as in commit {commit.removesuffix(CHANGES)}: commit them first")
    return f"{commit}@{source()}"


@cache
def source() -> str:
    """The hash of this package's source files (`source_hash`)."""
    return source_in(PACKAGE)


def source_in(package: Path) -> str:
    """The hash of the source files in a package's folder (`source_hash`)."""
    paths = (path for path in package.rglob("*") if path.is_file())
    return source_hash((path.relative_to(package).as_posix(), path.read_bytes()) for path in paths)


def source_hash(contents: Iterable[tuple[str, bytes]]) -> str:
    """The first `files.HASH_DIGITS` of a SHA-256 over a package's files, which is the same wherever they are.

    Args:
        contents: files by their path in the package, with "/"; what is hidden, compiled, or a table of measured rows
            is left out.
    """
    total = hashlib.sha256()
    for name, held in sorted(contents):
        parts = name.split("/")
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if not hidden and not name.endswith(_COMPILED) and not name.startswith(f"{TABLES}/"):
            total.update(f"{name}\0{len(held)}\0".encode())
            total.update(held)
    return total.hexdigest()[:HASH_DIGITS]


def shown_path(path: str) -> str:
    """A path as records show it: relative to site-packages or to the working folder if it is inside, else as it is."""
    if not os.path.isabs(path):
        return path
    _, installed, rest = path.rpartition("site-packages/")
    if installed:
        return rest
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def command_line() -> str:
    """How this process was started: the program by its name, absolute paths outside the working folder by theirs.

    Records are shared, and where somebody's home folder is says nothing about a result.
    """
    if not sys.argv or not sys.argv[0]:
        return "python"
    program = Path(sys.argv[0]).name
    arguments = [shown_path(argument) for argument in sys.argv[1:]]
    arguments = [f"…/{Path(argument).name}" if os.path.isabs(argument) else argument for argument in arguments]
    return shlex.join(["wavecrest" if program == "__main__.py" else program, *arguments])


def header(
    device: hardware.Device, *, evidence: Evidence = "measured", command: str | None = None, rows: bool = True
) -> Header:
    """The header of a record made now on `device`; `rows`: changed tables of measured rows count as changes.

    Raises:
        InvalidArgument: WAVECREST_COMMIT is not written as `stamp` gives it.
    """
    return Header(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or command_line(),
        commit=_commit(rows),
        source=source(),
        evidence=evidence,
        device=device.to_dict(),
        versions=versions(),
        environment=env.snapshot(),
    )
