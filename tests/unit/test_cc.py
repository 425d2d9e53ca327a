"""C code of the package: compiled once into the cache folder, whole or not at all, and every failure has its reason."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from wavecrest import cc
from wavecrest.errors import EnvironmentProblem, MissingDependency

CODE = "int answer(void) { return 42; }\n"
NATIVE = (("-march=native",), ())


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _name: tmp_path / "cache")


def made(text: str = CODE, flags: tuple[tuple[str, ...], ...] = NATIVE) -> Path:
    return cc.library(text, "part", "name", "the test", flags)


def files(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


@pytest.fixture
def real() -> str:
    """A compiler of this machine."""
    try:
        return cc.compiler("the test")
    except MissingDependency as error:
        pytest.skip(str(error))


def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """A compiler of its own for CC; each run leaves a line in the file `runs` beside it."""
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    return path


def test_a_library_is_made_once_and_kept_whole(real: str) -> None:
    path = made()
    assert ctypes.CDLL(str(path)).answer() == 42 and files(path) == [path.name]
    stamp = path.stat().st_mtime_ns
    assert made() == path and path.stat().st_mtime_ns == stamp
    # another program and other flags are other files
    assert len({path, made(CODE + "\n"), made(flags=(("-DX",),))}) == 3


def test_a_flag_that_the_compiler_refuses_is_left_out(real: str) -> None:
    path = made(flags=(("-march=no-such-processor",), ("-DTAKEN",), ()))
    assert path == made(flags=(("-DTAKEN",),)) != made(flags=((),))
    with pytest.raises(EnvironmentProblem, match="does not work"):
        made(flags=(("-march=no-such-processor",),))


def test_code_that_does_not_compile_leaves_nothing(real: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="the test: C code does not compile with"):
        made("not C")
    assert list((tmp_path / "cache/part").iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MissingDependency, match="the test needs the package gcc or clang"):
        made()


def test_a_compiler_that_fails_or_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = fake(monkeypatch, tmp_path, 'case "$*" in *-dM*) exit 0;; esac; echo out of memory >&2; exit 1')
    with pytest.raises(EnvironmentProblem, match="out of memory"):
        made()
    path.write_text("#!/no/such/interpreter\n")
    with pytest.raises(EnvironmentProblem, match="does not work"):
        made()
    assert list((tmp_path / "cache/part").iterdir()) == []


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: str) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    with pytest.raises(EnvironmentProblem, match="cannot keep its compiled C code"):
        made()


def test_those_who_ask_at_the_same_time_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # the library is what the compiler was told to write; it answers once both have asked
    both = threading.Barrier(2, timeout=300)
    monkeypatch.setattr(cc, "_accepted", lambda command, _flags, _for: (both.wait(), (command, ""))[1])
    fake(monkeypatch, tmp_path, 'while [ "$1" != -o ]; do shift; done; echo whole > "$2"')
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(made())) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    assert len(found) == 2 and found[0] == found[1] and files(found[0]) == [found[0].name]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert os.stat(found[0]).st_size == len("whole\n")
