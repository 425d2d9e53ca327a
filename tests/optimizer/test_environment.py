"""The environment step: verdicts per variable, allowance and failures with replaced children, and a real child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.optimizer.conftest import NoAnalysis
from tests.optimizer.planted import pairs_of
from wavecrest import hardware
from wavecrest.errors import EnvironmentProblem, StepRefused
from wavecrest.measure import timing
from wavecrest.measure.workload import from_example, load
from wavecrest.optimizer.children import SideReport, Task
from wavecrest.optimizer.ledger import Ledger
from wavecrest.optimizer.measurer import Measurer
from wavecrest.optimizer.options import Options, Silent
from wavecrest.optimizer.state import RunState
from wavecrest.optimizer.steps import StepContext, environment, step_by_id
from wavecrest.optimizer.steps.base import Found
from wavecrest.optimizer.steps.environment import rounds_of_loading, seconds_of_pairs, try_candidates, try_variable


def context(processes: int = 3) -> StepContext:
    workload = from_example(nn.Linear(4, 4), torch.randn(2, 4), spec="somewhere.py:make")
    return StepContext(workload, hardware.cpu(), processes=processes)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, str | None]]]:
    """Children that take `base` ms without and `new` ms with a variable; returns what was set, in order."""

    def planted(base: list[float], new: list[float]) -> list[dict[str, str | None]]:
        asked: list[dict[str, str | None]] = []
        series = {True: iter(new * 9), False: iter(base * 9)}

        def child(_task: Task, changes: dict[str, str | None], _name: str) -> SideReport:
            asked.append(changes)
            middle = next(series[next(iter(changes.values())) is not None])
            times = {"default": [middle * (1 + 0.001 * i) for i in range(30)]}
            return SideReport(clock="made up", times=times, numerics=[], quality=[], warnings=[])

        monkeypatch.setattr(environment, "run_pairs", pairs_of(child))
        return asked

    return planted


def run(candidates: list[tuple[str, str]], allowance: float = 1e6) -> environment.Trials:
    return try_candidates(context(), candidates, min_gain=0.02, allowance=allowance, say=lambda text: None)


def test_a_variable_that_helps_is_kept_and_sides_alternate(
    children: Callable[..., list[dict[str, str | None]]],
) -> None:
    asked = children([10.0, 10.1, 9.9], [8.0, 8.1, 7.9])
    trials = run([("GOOD", "1")])
    assert [row.name for row in trials.kept] == ["GOOD"] and "helps: 1.250×" in trials.lines[0]
    assert [row["GOOD"] for row in asked] == [None, "1", "1", None, None, "1"]


@pytest.mark.parametrize(
    ("base", "new", "word"),
    [
        ([10.0, 10.1, 9.9], [12.0, 12.1, 11.9], "hurts"),
        ([10.0, 10.3, 9.7], [9.9, 10.2, 9.8], "makes no proven difference"),
        (
            [10.0, 10.1, 14.0],
            [5.0, 5.1, 4.9],
            "unstable: bucket default takes 10.145 to 14.203 ms in processes without",
        ),
        ([10.0, 10.1, 9.9], [5.0, 9.0, 4.9], "in processes with it"),
    ],
    ids=["slower", "noise", "unstable base", "unstable candidate"],
)
def test_what_does_not_help_is_not_kept(
    children: Callable[..., list[dict[str, str | None]]], base: list[float], new: list[float], word: str
) -> None:
    children(base, new)
    trials = run([("X", "1")])
    assert not trials.kept and word in trials.lines[0]


def test_the_allowance_leaves_the_rest_untried(children: Callable[..., list[dict[str, str | None]]]) -> None:
    asked = children([10.0], [8.0])
    trials = run([("A", "1"), ("B", "1")], allowance=1.0)
    assert not asked and not trials.done
    assert all("not tried: 3 fresh processes a side" in line for line in trials.lines) and len(trials.lines) == 2


def test_pairs_that_are_loaded_together_wait_for_loading_once(monkeypatch: pytest.MonkeyPatch) -> None:
    where = context()
    where.workload.load_seconds = 10.0
    begin = environment.CHILD_START + 10.0
    sampling = 2 * (environment.CHILD_WAITS_CPU + environment.TRIAL_SECONDS)
    together = [1]
    monkeypatch.setattr(environment, "pairs_together", lambda device, memory: together[0])
    cores = replace(where.device, compute_units=2)
    where.device = cores
    assert seconds_of_pairs(where, 3) == 3 * begin + 3 * sampling
    assert seconds_of_pairs(where, 3, 4.0, seconds=1.0) == 3 * (begin - 4.0) + 3 * (sampling - 2.0)
    where.device = replace(cores, compute_units=1)
    assert seconds_of_pairs(where, 3) == 6 * begin + 3 * sampling
    where.device = cores
    together[0] = 2
    assert seconds_of_pairs(where, 3) == 2 * begin + 3 * sampling and rounds_of_loading(where, 4) == 2
    together[0] = 0
    assert seconds_of_pairs(where, 3) == 6 * begin + 3 * sampling


def test_a_failing_child_is_a_line_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(*_arguments: object) -> SideReport:
        raise EnvironmentProblem("a child process failed: Segmentation fault")

    monkeypatch.setattr(environment, "run_pairs", pairs_of(child))
    trials = run([("A", "1")])
    assert trials.lines == ["A=1: a child process failed: Segmentation fault"] and not trials.kept


def test_a_model_in_memory_is_tried_where_other_processes_can_load_it() -> None:
    workload = from_example(nn.Linear(4, 4), torch.randn(2, 4))
    assert step_by_id("environment").find(StepContext(workload, hardware.cpu())).sites

    class Mine(nn.Linear):
        pass

    workload = from_example(Mine(4, 4), torch.randn(2, 4))
    with pytest.raises(StepRefused, match=r"Mine is defined inside .*or run `wavecrest optimize file\.py:function`"):
        step_by_id("environment").find(StepContext(workload, hardware.cpu()))


def test_variables_of_amd_alone_are_expected_to_be_worth_their_seconds() -> None:
    """None of 22 trials on NVIDIA and CPUs was kept: there others go first."""
    workload = from_example(nn.Linear(4, 4).eval(), torch.randn(2, 4))

    def ratio(arch: str) -> float | None:
        device = hardware.Device("cuda", 0, arch, "pretended", 132, 1 << 30, "")
        return step_by_id("environment").predict(Found(("A=1",)), StepContext(workload, device)).ratio

    assert ratio("gfx942") is None and ratio("sm_90") == 1.0


def test_variables_that_are_set_already_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step_by_id("environment").find(context())
    assert found.sites
    for site in found.sites:
        name, _, value = site.partition("=")
        monkeypatch.setenv(name, value)
    assert not step_by_id("environment").find(context()).sites


@pytest.mark.slow
def test_what_a_run_has_set_reaches_neither_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's trials have the variables of its beginning, whatever its steps have set since."""
    file = tmp_path / "work.py"
    file.write_text(
        "import os, torch\n"
        f"log = open({str(tmp_path / 'log')!r}, 'a')\n"
        "log.write(f\"{os.environ.get('PLANTED')} {os.environ.get('SET_SINCE')}\\n\")\n"
        "log.close()\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
    )
    workload = load(f"{file}:make")
    (tmp_path / "log").unlink()
    options, device, clock = Options(processes=1), hardware.cpu(), timing.HOST_CLOCK
    ledger = Ledger(workload, device, options, folder=None)
    measurer = Measurer(workload, 60.0, Silent(), clock)
    state = RunState(workload, options, Silent(), device, ledger, measurer, NoAnalysis(workload), clock)
    with state.children:
        monkeypatch.setenv("SET_SINCE", "1")
        try_variable(state.context, "PLANTED", "1", seconds=0.05)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["1 None", "None None"]


@pytest.mark.slow
def test_real_children(tmp_path: Path) -> None:
    """The variable reaches the child before import, and a child that dies is named."""
    file = tmp_path / "work.py"
    file.write_text(
        "import os, time, torch\n"
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.001 if os.environ.get('PLANTED') else 0.01)\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    if os.environ.get('PLANTED') == 'die':\n"
        "        raise SystemExit('gone')\n"
        "    return Net(4, 4), torch.randn(2, 4)\n"
    )
    workload = load(f"{file}:make")
    trial = try_variable(StepContext(workload, hardware.cpu(), processes=2), "PLANTED", "1", seconds=0.2)
    assert trial.claim.ratio > 3 and trial.claim.pairs == 2
    with pytest.raises(StepRefused, match=r"child process with PLANTED=die: .* calls sys\.exit\('gone'\)"):
        try_variable(StepContext(workload, hardware.cpu(), processes=1), "PLANTED", "die", seconds=0.2)
