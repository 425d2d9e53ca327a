"""The GitHub Action `isa-diff`: it calls a command that there is, with options that it has."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from wavecrest.cli.main import app

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "isa-diff" / "action.yml"
PAGE = ROOT / "docs" / "triton_versions.md"


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="reading the action needs PyYAML")
    found: dict[str, Any] = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    return found


def scripts(action: dict[str, Any]) -> list[str]:
    return [step["run"] for step in action["runs"]["steps"]]


def test_the_command_and_its_options_are_there(action: dict[str, Any]) -> None:
    (line,) = [line for line in "\n".join(scripts(action)).splitlines() if "-m wavecrest" in line]
    words = shlex.split(line)
    command: Any = typer.main.get_command(app)
    for name in words[3:5]:
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    asked = {word for word in words if word.startswith("--")}
    assert words[:5] == ["python", "-m", "wavecrest", "isa", "diff"] and asked == {"--arch", "--base"} <= options


def test_every_input_is_used_and_described(action: dict[str, Any]) -> None:
    used = {name for step in action["runs"]["steps"] for name in re.findall(r"inputs\.([a-z]+)", str(step["env"]))}
    assert action["runs"]["using"] == "composite" and used == set(action["inputs"])
    # an input in a script would be run as part of it
    assert not [text for text in scripts(action) if "${{" in text]
    table = set(re.findall(r"^\| `([a-z]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert table >= set(action["inputs"]) and all(one["description"] for one in action["inputs"].values())


@pytest.mark.parametrize(
    ("base", "installed", "side"),
    [
        ("3.6.0", "install --quiet --no-deps --target T/triton-3.6.0 triton==3.6.0\n", "T/triton-3.6.0"),
        ("a.json", "", "a.json"),
    ],
)
def test_a_version_is_installed_and_a_record_is_not(
    action: dict[str, Any], base: str, installed: str, side: str, tmp_path: Path
) -> None:
    """The last step as a runner would run it, with a python that says what it was asked."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nshift 2\necho "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "RUNNER_TEMP": "T", "SCRIPT": "k.py:cases", "ARCH": "gfx942", "BASE": base,
        "FLAGS": "--strict --config waves_per_eu=2",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-e", "-c", scripts(action)[-1]], env=environment, capture_output=True, text=True, check=True
    )
    wanted = f"isa diff k.py:cases --arch gfx942 --base {side} --strict --config waves_per_eu=2\n"
    assert done.stdout == installed + wanted
