"""C code of the package as shared libraries: compiled by the user's compiler, once, into the user's cache folder.

Nothing is compiled when a module is imported: whoever needs a library builds it then.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from wavecrest import env
from wavecrest.errors import EnvironmentProblem, MissingDependency

# seconds after which a compiler does not answer any more
PATIENCE = 600.0
# flags of every library
SHARED = ("-shared", "-fPIC", "-O3", "-std=gnu11")


def compiler(needed_for: str) -> str:
    """The C compiler: CC, or cc, gcc or clang, whichever is found first.

    Raises:
        MissingDependency: no C compiler is installed.
    """
    for name in (env.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise MissingDependency("gcc or clang (a C compiler)", needed_for, "apt install clang")


def library(text: str, folder: str, name: str, needed_for: str, flags: Sequence[Sequence[str]]) -> Path:
    """A C program as a shared library, from the cache folder or made now.

    Args:
        text: the program.
        folder: below the user's cache folder.
        name: the library's file is NAME-KEY.so; the key is of the program, the flags, the compiler's version and what
            the processor can do, as a home folder may serve several machines.
        needed_for: who needs it, in words that an error begins with: "the emulator".
        flags: lists of flags for the processor; the first that the compiler takes is used.

    Raises:
        MissingDependency: no C compiler is installed.
        EnvironmentProblem: the program does not compile, or the folder cannot be written.
    """
    command, macros = _accepted(_command(needed_for), flags, needed_for)
    place = cache_folder(folder)
    path = place / f"{name}-{_key(text, command, macros)}.so"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with _alone(place):
                # another process may have made it meanwhile
                if not path.exists():
                    _compile([*command, "-x", "c", "-"], text, path, needed_for)
    except OSError as error:
        raise EnvironmentProblem(f"{needed_for} cannot keep its compiled C code in {place}: {error}") from error
    return path


def cache_folder(name: str) -> Path:
    """A folder of libraries below the user's cache folder, which need not exist."""
    return Path(platformdirs.user_cache_path("wavecrest")) / name


def key(text: str, needed_for: str, flags: Sequence[Sequence[str]]) -> str:
    """The part of a library's name that is of the program, the flags, the compiler and the processor.

    Args:
        text, needed_for, flags: as for `library`, which raises the same.
    """
    return _key(text, *_accepted(_command(needed_for), flags, needed_for))


def _key(text: str, command: Sequence[str], macros: str) -> str:
    return hashlib.sha256("\0".join([text, macros, *command]).encode()).hexdigest()[:16]


def _command(needed_for: str) -> list[str]:
    return [*compiler(needed_for).split(), *SHARED]


def _accepted(command: list[str], flags: Sequence[Sequence[str]], needed_for: str) -> tuple[list[str], str]:
    """The command with the first flags that the compiler takes, and its macros: versions and what the processor has."""
    problem = ""
    for one in flags:
        done = _run([*command, *one, "-x", "c", "-dM", "-E", os.devnull], "", needed_for)
        if done.returncode == 0:
            return [*command, *one], done.stdout
        problem = done.stderr
    raise EnvironmentProblem(f"{needed_for}: {command[0]} does not work: {problem[:2000]}")


def _run(command: list[str], text: str, needed_for: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"{needed_for}: {command[0]} does not work: {error}") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time compiles: others wait for what it makes. One that dies lets go."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(command: list[str], text: str, path: Path, needed_for: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        done = _run([*command, "-o", name, "-lm"], text, needed_for)
        if done.returncode != 0:
            raise EnvironmentProblem(f"{needed_for}: C code does not compile with {command[0]}: {done.stderr[:2000]}")
        # renamed into place, so that no process loads half a library
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
