"""Commit subjects have at most 72 characters, so that `git log --oneline` can be read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# subjects are held to the limit since this commit; those before it stay as they are
SINCE = "92d4cfb518655b16292d8c3380acb6422fcd0999"
LIMIT = 72
# those over it: records name the second, the last and commits behind the others that follow, and history is not
# rewritten under them
KEPT = ("16c47dc", "498687f", "a8f2264", "380dbd8", "11ceccb", "490a37e", "892953f", "3a0b425", "600bc23")


def _git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)


def too_long(log: str) -> list[str]:
    """The lines "hash subject" whose subject is over the limit."""
    return [line for line in log.splitlines() if len(line.partition(" ")[2]) > LIMIT]


def test_subjects_fit_a_line() -> None:
    try:
        top = _git("rev-parse", "--show-toplevel")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if top.returncode != 0 or Path(top.stdout.strip()).resolve() != ROOT.resolve():
        pytest.skip("not a git checkout of its own")
    if _git("merge-base", "--is-ancestor", SINCE, "HEAD").returncode != 0:
        pytest.skip(f"the history does not reach {SINCE[:7]}: a shallow clone, or another history")
    log = _git("log", "--format=%h %s", f"{SINCE}..HEAD")
    assert log.returncode == 0, log.stderr
    found = [line for line in too_long(log.stdout) if not line.startswith(KEPT)]
    assert not found, "\n".join(found)


def test_a_long_subject_is_found() -> None:
    fits, over = f"abc1234 {'x' * 72}", f"abc1235 {'x' * 73}"
    assert too_long(f"{fits}\n{over}\n") == [over]
