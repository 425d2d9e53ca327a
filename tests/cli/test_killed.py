"""A few runs that are ended at a random moment and resumed; `tests/cli/killed.py` makes more."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.cli import killed


@pytest.mark.slow
def test_nothing_is_lost_by_a_kill() -> None:
    seed = random.SystemRandom().getrandbits(32)
    ends, failed = killed.run(5, seed)
    assert not failed, f"seed {seed}: {failed}"
    assert sum(ends.values()) == 5


def test_the_trials_find_a_step_that_is_lost(tmp_path: Path) -> None:
    place = killed.Place(tmp_path).prepare()
    with killed.planted(place):
        lost = killed.StepOutcome(id="lost", title="t", level=3, verdict="tie", reason="r")
        run = tmp_path / "run0"
        with pytest.raises(AssertionError, match="the step lost is lost"):
            killed._finish(place, run, place.arguments(run, "-o", str(run)), False, tmp_path / "log", [lost])


def test_the_trials_find_a_process_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = killed.Place(tmp_path).prepare()

    left = tmp_path / "left"

    def leaves() -> int:
        if os.fork() == 0:
            left.touch()
            time.sleep(60)
            os._exit(0)
        return 0

    class Afterwards(random.Random):
        """Ends the run once it has left a process behind, however slow the machine is."""

        def uniform(self, a: float, b: float) -> float:
            while not left.exists():
                time.sleep(0.01)
            return 0.0

    monkeypatch.setattr(killed.program, "main", leaves)
    monkeypatch.setattr(killed, "PATIENCE", 1.0)
    with killed.planted(place), pytest.raises(AssertionError, match="left running after"):
        killed.trial(place, 0, Afterwards(0), {False: 0.5})
