"""The result of `optimize` as its user meets it: in one line, as a summary, in a notebook, and the progress told."""

from __future__ import annotations

import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import wavecrest
from tests.clock import SimulatedClock
from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import FastButWrong, Nothing, TakePauseOut, slow
from wavecrest.errors import OutputWarning
from wavecrest.measure.workload import from_example
from wavecrest.optimizer import api, measurer
from wavecrest.optimizer.plan import EnvironmentSetting
from wavecrest.optimizer.progress import Lines
from wavecrest.records import StepOutcome


class Told:
    """A progress display that keeps everything."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.updates: list[tuple[int, int]] = []
        self.outcomes: list[tuple[str, str]] = []
        self.left: list[float] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def update(self, done: int, planned: int) -> None:
        self.updates.append((done, planned))

    def outcome(self, step: StepOutcome) -> None:
        self.outcomes.append((step.id, step.verdict))

    def remaining(self, seconds: float) -> None:
        self.left.append(seconds)


class Texts(HTMLParser):
    """The tags and the text of a piece of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_summary_of_a_gain(run: Run) -> None:
    result = run(TakePauseOut(), Nothing())
    assert result.record.result is not None
    (row,) = result.record.result.speed
    lines = result.summary().splitlines()
    assert re.match(r"Slow: \S+ ms → \S+ ms, faster by (7\.0|6\.9)", lines[0])
    # phases of one process have no interval
    assert f"default: {row.base_ms:.3f} ms → {row.new_ms:.3f} ms, {row.ratio:.3f}×" in lines
    assert lines[-1] == "in force: gain"


def test_the_summary_without_a_gain(run: Run) -> None:
    result = run(FastButWrong())
    lines = result.summary().splitlines()
    assert re.fullmatch(r"Slow: \S+ ms, undecided", lines[0])
    assert lines[-1] == "in force: nothing" and " ms → " not in result.summary()


def test_the_summary_names_the_variables_to_set(run: Run) -> None:
    result = run(TakePauseOut())
    result.plan.environment.append(EnvironmentSetting(name="OMP_WAIT_POLICY", value="active", ratio=1.1))
    assert result.summary().splitlines()[-1] == "environment: OMP_WAIT_POLICY=active"


def test_the_repr_is_one_short_line(run: Run, tmp_path: Path) -> None:
    result = run(TakePauseOut())
    assert repr(result).startswith("OptimizeResult('Faster by ") and repr(result).endswith("×')")
    kept = run(TakePauseOut(), out=tmp_path)
    assert f"folder={str(tmp_path)!r}" in repr(kept) and "\n" not in repr(kept) and len(repr(kept)) < 300


def test_a_notebook_shows_the_result_and_the_plan_as_text(run: Run) -> None:
    result = run(TakePauseOut())
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>&"
    for step in result.record.steps:
        step.title = hostile
    parser = Texts()
    parser.feed(result._repr_html_())
    assert set(parser.tags) <= {"div", "b", "br", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    assert parser.text.startswith(result.summary().splitlines()[0]) and hostile in parser.text
    plan = Texts()
    result.plan.steps[0].reason = hostile
    plan.feed(result.plan._repr_html_())
    assert plan.text.startswith("Plan for Slow") and set(plan.tags) <= set(parser.tags) | {"table", "tbody"}
    assert hostile in plan.text


def test_a_progress_display_is_told_everything(run: Run) -> None:
    told = Told()
    run(TakePauseOut(), Nothing(), progress=told)
    assert told.outcomes == [("gain", "kept"), ("noise", told.outcomes[1][1])]
    assert told.phases[0] == "baseline" and "final check of answers" in told.phases
    assert told.phases.index("gain") < told.phases.index("noise")
    assert told.updates and all(done > 0 and planned > 0 for done, planned in told.updates)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(measurer, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: {"noise": Nothing()})


def test_progress_true_writes_lines(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    wavecrest.optimize(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4), budget=40, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[0:00] baseline" and any(" noise" in line and " left] " in line for line in lines)
    assert all(len(line) < 120 for line in lines)


def test_lines_fit_a_narrow_terminal_and_send_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    clock, stream = SimulatedClock(), io.StringIO()
    lines = Lines(stream, clock)
    lines.remaining(600.0)
    clock.advance(100.0)
    lines.phase("a piece of work whose name is longer than the terminal is wide")
    lines.phase("a piece of work whose name is longer than the terminal is wide: its second part")
    lines.outcome(StepOutcome(id="i", title="a\x1b[2Jb", level=3, verdict="kept", reason="", ratio=1.5))
    first, second = stream.getvalue().splitlines()
    assert first == "[1:40, about 8 min left] a piece of wo…" and len(first) == 39
    assert second.startswith("[1:40, about 8 min left] kept a\\x1b[")


def test_the_time_to_come_is_within_the_budget(run: Run) -> None:
    told = Told()
    run(TakePauseOut(), Nothing(), budget=60.0, progress=told)
    # before each step and after the last
    assert len(told.left) == 3 and told.left == sorted(told.left, reverse=True)
    assert all(0 < seconds <= 60 for seconds in told.left)


def test_progress_is_silent_unless_asked_or_looked_at(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    wavecrest.optimize(model, x, budget=5)
    wavecrest.optimize(model, x, budget=5, progress=told)
    assert told.phases and [name for name, _ in told.outcomes] == ["noise"]
    captured = capsys.readouterr()
    assert not captured.out and not captured.err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    wavecrest.optimize(model, x, budget=5)
    assert capsys.readouterr().err.startswith("[0:00] baseline")


def test_a_file_that_is_missing_is_a_warning(quick: None, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.warns(OutputWarning, match=r"report\.html"):
        result = wavecrest.optimize(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4), budget=5, out=tmp_path)
    assert result.unwritten and (tmp_path / "plan.json").exists()


def test_the_models_of_a_result(run: Run) -> None:
    """The user's own where nothing is kept, another one where something is."""
    model, x = slow()
    assert run(FastButWrong(), workload=from_example(model, x)).model is model
    found = run(TakePauseOut(), workload=from_example(model, x)).model
    assert found is not model and found.pause == 0 and model.pause > 0


def test_runs_of_threads_take_turns(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve at once ended the process in torch's profiler, and each was timed while the others ran."""
    running, most = 0, 0
    real = api._run

    def counted(*arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            time.sleep(0.05)
            return real(*arguments)
        finally:
            running -= 1

    monkeypatch.setattr(api, "_run", counted)
    monkeypatch.setattr(api, "Analysis", NoAnalysis)

    def one(seed: int) -> bool:
        torch.manual_seed(seed)
        model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
        expected = model(x)
        return torch.equal(wavecrest.optimize(model, x, budget=5).model(x), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))
    assert most == 1
