"""The program around its commands: pipes that close early, the shell's completion, help without a wide terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wavecrest import __version__
from wavecrest.cli.main import COMMANDS, main


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """`wavecrest … | head`: the pipe is closed before the program writes."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "wavecrest", "optimize", "--help"],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(writing)
    assert done.stderr == ""


def test_what_is_wrong_with_the_words_is_said_before_torch_is_loaded() -> None:
    code = """
import sys
from wavecrest.cli.main import main
print(main(["optimize", "nope.py:make"]), main(["optimize", "m:make", "--budget", "soon"]), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 1 False\n", done.stderr
    assert "no file nope.py" in done.stderr and "not 'soon'" in done.stderr


def test_the_shell_completes_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # the shell is that of the parent process, which a service that runs tests need not have
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    assert main(["--show-completion"]) == 0
    script = capsys.readouterr().out
    assert "_WAVECREST_COMPLETE=complete_bash" in script and script.rstrip().endswith("wavecrest")
    for name, value in {
        "_WAVECREST_COMPLETE": "complete_bash", "COMP_WORDS": "wavecrest op", "COMP_CWORD": "1"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["optimize"]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ([], ["optimize"], ["isa", "show"], ["plan"]):
        assert main([*words, "--help"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        if not words:
            assert all(f"\n  {name} " in out for name in COMMANDS)
        if not words and columns >= 80:
            # in their order, each with its whole line
            shown = [line.split(maxsplit=1) for line in out.partition("Commands:\n")[2].splitlines()]
            assert shown == [list(pair) for pair in COMMANDS.items()]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"wavecrest {__version__}\n"
