"""The time of compilations on a machine is remembered from run to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import CLOCK, TakePauseOut
from wavecrest import hardware
from wavecrest.optimizer import compile_pace, engine
from wavecrest.optimizer.costs import Costs

GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")


def test_few_compilations_say_less_of_the_pace_than_many() -> None:
    assert compile_pace.known(GPU) == (1.0, 0)
    paces = []
    for ratio in (2.0, 2.0, 2.0):
        assert compile_pace.learn(GPU, ratio) == ""
        paces.append(compile_pace.known(GPU))
    assert paces == [(pytest.approx(2.0 ** (n / (n + 1))), n) for n in (1, 2, 3)]
    # another GPU, beside which the same host compiles
    assert compile_pace.known(hardware.Device("cuda", 0, "sm_90", "other", 132, 1 << 30, "cuda")) == (1.0, 0)
    for _ in range(compile_pace.KEPT):
        compile_pace.learn(GPU, 2.0)
    assert compile_pace.known(GPU) == (pytest.approx(2.0 ** (8 / 9)), compile_pace.KEPT)


@pytest.mark.parametrize(("ratio", "pace"), [(0.2, 1.0), (0.7, 1.0), (99.0, compile_pace.MOST)])
def test_caches_and_fast_hosts_promise_nothing(ratio: float, pace: float) -> None:
    compile_pace.learn(GPU, ratio)
    assert compile_pace.known(GPU) == (pace, int(ratio >= compile_pace.FROM_CACHE))


def test_on_a_cpu_nothing_is_remembered() -> None:
    assert compile_pace.learn(hardware.cpu(), 2.0) == "" and not compile_pace._file().exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "{", '{"' + "x" * 9 + '": ["a", -1, null]}'])
def test_a_damaged_file_is_none(text: str) -> None:
    compile_pace._file().parent.mkdir()
    compile_pace._file().write_text(text)
    assert compile_pace.known(GPU) == (1.0, 0)
    compile_pace.learn(GPU, 1.5)
    assert compile_pace.known(GPU) == (pytest.approx(1.5**0.5), 1)


def test_a_file_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    monkeypatch.setattr(compile_pace, "_file", lambda: tmp_path / "plain" / "compile_pace.json")
    assert compile_pace.learn(GPU, 2.0).startswith("how long compilations take on this machine was not remembered: ")


def test_a_first_compilation_is_expected_to_take_as_long_as_earlier_ones() -> None:
    assert Costs(ops=1200, pace=1.5).compilation == 1.5 * Costs(ops=1200).compilation
    costs = Costs(ops=1200, pace=1.5)
    costs.add("first", 20.0, compiling=12.0)
    assert costs.compilation == 12.0


def test_a_run_learns_and_the_next_one_says_what_it_expects(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiles(TakePauseOut):
        id, title, phase = "compile:default", "compile default", "compile"

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            CLOCK.advance(30.0)
            return super().apply(model, params)

    learned: list[float] = []
    monkeypatch.setattr(compile_pace, "learn", lambda _device, ratio: learned.append(ratio) or "")
    tried = engine.try_step

    def compiling(run: Any, one: Any) -> Any:
        outcome = tried(run, one)
        outcome.compile_seconds = 30.0
        return outcome

    monkeypatch.setattr(engine, "try_step", compiling)
    assert not any("on this machine" in note for note in run(Compiles(), budget=300.0).record.notes)
    assert learned == [pytest.approx(30.0 / Costs(ops=0).prior)]
    monkeypatch.setattr(compile_pace, "known", lambda _device: (2.5, 3))
    record = run(Compiles(), budget=300.0).record
    (note,) = [note for note in record.notes if "on this machine" in note]
    assert note.startswith("compilations are expected to take 2.5 times as long as by the number of ops, after 3 on")
    row = record.steps[0]
    assert row.expected_seconds is not None and row.expected_seconds > 2.5 * Costs(ops=0).prior
