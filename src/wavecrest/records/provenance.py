"""Where a result comes from: the machine, the versions and commit, and the exact command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from wavecrest import __version__, env, hardware
from wavecrest.records.files import Model

Evidence = Literal["measured", "compiled", "emulated", "model"]


class Versions(Model):
    """What ran; None where a package is not installed."""

    wavecrest: str
    python: str
    torch: str | None
    triton: str | None
    transformers: str | None
    numpy: str
    platform: str


class Header(Model):
    """Where a result comes from."""

    created: str
    command: str
    commit: str | None
    evidence: Evidence
    device: dict[str, Any]
    versions: Versions
    environment: dict[str, str]


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
def _commit() -> str | None:
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "."], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


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


def header(device: hardware.Device, *, evidence: Evidence = "measured", command: str | None = None) -> Header:
    """The header of a record made now on `device`."""
    return Header(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or command_line(),
        commit=_commit(),
        evidence=evidence,
        device=device.to_dict(),
        versions=versions(),
        environment=env.snapshot(),
    )
