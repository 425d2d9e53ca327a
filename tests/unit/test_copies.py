"""Copies of models in memory for child processes: what they hold, who may read them, and what cannot be copied."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import hardware
from wavecrest.errors import WorkloadError
from wavecrest.measure import copies
from wavecrest.measure.workload import Buckets, Workload, from_example
from wavecrest.optimizer import api
from wavecrest.optimizer.children import Job, Jobs, Task, run_child
from wavecrest.optimizer.side import LEAST_SAMPLES
from wavecrest.optimizer.steps import StepContext
from wavecrest.optimizer.steps.environment import try_variable


def reset(_bucket: str) -> None:
    """Nothing: it is found by its name."""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def made() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    workload = from_example(model, Buckets(a=torch.randn(2, 8), b=torch.randn(5, 8)))
    workload.reset = reset
    return workload


def test_a_copy_is_the_workload() -> None:
    workload = made()
    source = copies.source(workload)
    assert source.copied and copies.source(workload) == source
    loaded = copies.load(Path(source.spec), "cpu")
    assert loaded.reset is reset and list(loaded.buckets) == ["a", "b"]
    with torch.no_grad():
        for bucket in workload.buckets:
            assert torch.equal(loaded.run(bucket), workload.run(bucket))
    copies.discard(workload)
    assert workload.copied is None and not Path(source.spec).exists()


def test_a_workload_with_a_spec_needs_no_copy(tmp_path: Path) -> None:
    workload = from_example(nn.ReLU(), torch.ones(2), spec="serve.py:make")
    assert copies.source(workload) == ("serve.py:make", False) and not list(tmp_path.iterdir())


def test_only_its_owner_can_read_it() -> None:
    folder = Path(copies.source(made()).spec)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600, 0o600]


@pytest.mark.parametrize("damage", ["folder", "file", "link"])
def test_a_copy_that_others_can_write_is_not_read(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(copies.source(made()).spec)
    if damage == "folder":
        folder.chmod(0o770)
    elif damage == "file":
        (folder / copies.MODEL).chmod(0o620)
    else:
        (folder / copies.MODEL).rename(folder / "moved")
        (folder / copies.MODEL).symlink_to(folder / "moved")
    monkeypatch.setattr(torch, "load", lambda *_a, **_k: pytest.fail("it was read"))
    with pytest.raises(WorkloadError, match="not private"):
        copies.load(folder, "cpu")


def test_a_file_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(copies.source(made()).spec)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(WorkloadError, match="not private"):
        copies.load(folder, "cpu")


class Locked(nn.ReLU):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Here(nn.ReLU):
    pass


def in_main() -> nn.Module:
    return type("Mine", (nn.ReLU,), {"__module__": "__main__", "__qualname__": "Mine"})()


def local() -> nn.Module:
    class Inner(nn.ReLU):
        pass

    return Inner()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Locked(), "cannot be written for another process .*lock"),
        (in_main(), "Mine is defined in the program that runs"),
        (local(), r"local.<locals>.Inner is defined inside of a function"),
    ],
)
def test_what_cannot_be_copied_says_why_and_leaves_nothing(model: nn.Module, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=reason):
        copies.source(from_example(model, torch.ones(2)))
    assert not list(tmp_path.iterdir())


def test_a_reset_that_no_process_finds_is_named() -> None:
    workload = from_example(nn.ReLU(), torch.ones(2))
    workload.reset = lambda _bucket: None
    assert "<lambda> is defined inside of a function" in copies.problem(workload)


def test_large_models_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_BYTES", 4 * (8 * 8 + 8))
    workload = from_example(nn.Linear(8, 8), torch.ones(1, 8))
    assert "GiB are copied" in copies.problem(workload)


def test_copies_of_dead_processes_are_swept_away(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    dead, alive = tmp_path / f"{copies.PREFIX}{done.pid}-x", tmp_path / f"{copies.PREFIX}{os.getpid()}-x"
    other = tmp_path / f"{copies.PREFIX}notes-x"
    for folder in (dead, alive, other):
        folder.mkdir()
    copies.source(made())
    assert not dead.exists() and alive.exists() and other.exists()


def test_a_child_times_a_copy() -> None:
    """In a real process, with a class of a module that it finds where this one does."""
    workload = from_example(Here().eval(), torch.randn(4))
    source = copies.source(workload)
    found = run_child(Job(Task(source.spec, "cpu", 0.05, copied=True), {}, "it"))
    assert list(found.times) == ["default"] and len(found.times["default"]) >= LEAST_SAMPLES


def test_variables_are_tried_on_a_model_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []

    def some(pairs: Sequence[Jobs], _first: int, **_options: Any) -> Any:
        seen.extend(pairs[0].values())
        raise WorkloadError("seen")

    monkeypatch.setattr("wavecrest.optimizer.steps.environment.run_pairs", some)
    with pytest.raises(Exception, match="seen"):
        try_variable(StepContext(made(), hardware.cpu()), "OMP_WAIT_POLICY", "active")
    assert all(job.task.copied for job in seen)
    assert [job.changes for job in seen] == [{"OMP_WAIT_POLICY": None}, {"OMP_WAIT_POLICY": "active"}]


def test_a_run_removes_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, seen = made(), []

    def ladder(state: Any) -> None:
        seen.append(Path(copies.source(state.workload).spec))
        assert seen[0].exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run_ladder", ladder)
    with pytest.raises(api.OptimizeInterrupted):
        api.run(workload, api.Options(budget=5))
    assert not seen[0].exists() and workload.copied is None
