"""benchmarks/parts.py: what is left of parts that die, hang and raise; and the scripts made of them, on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import mlstm_peers, parts, xlstm_peers
from benchmarks.parts import Report

from tests.clock import SimulatedClock
from tests.unit import parts_trial
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.measure import interleaved
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.ops.mlstm.call import MlstmStepCall

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    # the parts' processes import this tree, from its root
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


def run(out: Path, *argv: str) -> int:
    return parts.main("", "tests.unit.parts_trial", parts_trial.PARTS, [*argv, "--out", str(out)])


def runs(out: Path) -> dict[str, Any]:
    return {one["part"]: one for one in json.loads(out.read_text())["runs"]}


def test_no_part_outlives_a_script_that_is_terminated(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    given = f"'', 'tests.unit.parts_trial', PARTS, ['tells', '--out', {str(out)!r}]"
    code = f"from tests.unit.parts_trial import PARTS, parts; raise SystemExit(parts.main({given}))"
    script = subprocess.Popen([sys.executable, "-c", code])
    told = out.with_suffix(".pid")
    while not (told.exists() and told.read_text()):
        assert script.poll() is None
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=300) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_every_end_is_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "new" / "found.json"
    assert run(out, "fine", "dies", "dead", "--small") == 1
    found = runs(out)
    fine = found["fine"]
    assert fine["ended"] == "done" and fine["summary"] == {"cases": 1} and fine["seconds"] > 0
    assert fine["rows"] == [{"case": "one", "ratio": 2.0, "samples": [1, 2, 3]}]
    assert fine["header"] == {"device": None, "small": True}
    died = {row["case"]: row for row in found["dies"]["rows"]}
    assert list(died) == ["a", "try b", "try c", "d"] and found["dies"]["ended"] == "done"
    assert "SIGABRT" in died["try b"]["problem"]
    assert died["try c"]["problem"] == "its process ended with exit code 1: ValueError: this one raises"
    # the part went on in new processes, and what was done was not done again
    assert died["a"]["pid"] != died["d"]["pid"]
    assert found["dead"]["ended"].startswith("its process ended with exit code 3") and found["dead"]["rows"] == []


def test_a_part_that_hangs_is_stopped_and_keeps_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    # it would sleep for an hour and then be done
    assert run(out, "hangs") == 1
    found = runs(out)["hangs"]
    assert found["ended"] == "stopped after 3 s, at the long one" and found["rows"] == [{"case": "before"}]


def test_parts_of_a_group_run_at_the_same_time(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert run(out, "meets-1", "meets-2") == 0
    assert [one["rows"] for one in runs(out).values()] == [[{"case": "met"}]] * 2


def test_a_later_run_keeps_the_earlier_ones(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert run(out, "fine") == 0
    assert run(out, "fine", "dies", "--budget", "0.1") == 1
    ended = [one["ended"] for one in json.loads(out.read_text())["runs"]]
    assert ended == ["done", *["not started: no time left of the budget"] * 2]


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3}'])
def test_another_file_is_not_overwritten(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    out.write_text(text)
    with pytest.raises(SystemExit):
        run(out, "fine")
    assert "no file of parts" in capsys.readouterr().err and out.read_text() == text


def test_an_unknown_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "found.json", "fien")
    assert "no part 'fien'; there are fine, dies" in capsys.readouterr().err


def test_a_signal_has_its_name() -> None:
    assert "SIGSEGV" in parts._reason(-signal.SIGSEGV, "")
    assert parts._reason(7, "last words") == "its process ended with exit code 7: last words"


class Told(Report):
    """A report that keeps what it is told."""

    def __init__(self, died: tuple[str, ...] = ()) -> None:
        super().__init__(-1, died)
        self.messages: list[dict[str, Any]] = []

    def _write(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def rows(self) -> dict[str, Any]:
        return {one["row"]["case"]: one["row"] for one in self.messages if "row" in one}


SMALL = argparse.Namespace(device="cpu", small=True, out=None)


def test_wrong_peers_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is right, one is off, one raises, one aborted an earlier process, one is not installed."""

    def absent() -> Callable[..., Any]:
        raise ImportError("no such package")

    def off(*given: torch.Tensor) -> torch.Tensor:
        return mlstm_peers.chunks(given) * 1.1

    clock = SimulatedClock()

    def taking(seconds: float) -> Callable[..., torch.Tensor]:
        def call(*given: torch.Tensor) -> torch.Tensor:
            clock.advance(seconds)
            return mlstm_peers.chunks(given)

        return call

    monkeypatch.setattr(interleaved, "measure", partial(interleaved.measure, now=clock))
    made = {
        "wavecrest": lambda: taking(0.001), "slow": lambda: taking(0.002),
        "off": lambda: off, "raises": lambda: lambda *given: 1 // 0, "aborts": lambda: off, "absent": absent,
    }  # fmt: skip
    case = next(iter(mlstm_peers.SMALL))
    monkeypatch.setattr(mlstm_peers, "implementations", lambda device: made)
    monkeypatch.setattr(mlstm_peers, "SMALL", {case: (1, 2, 32, 8, 16)})
    report = Told((f"aborts {case}",))
    mlstm_peers.chunkwise(report, SMALL)
    row = report.rows[case]
    timed = {name for name, one in row["rows"].items() if "ms" in one}
    assert timed == {"wavecrest", "slow"}
    problems = {name: one["problem"] for name, one in row["rows"].items() if name not in timed}
    assert "wrong: error 0.1" in problems["off"] and "ZeroDivisionError" in problems["raises"]
    assert "died" in problems["aborts"] and "no such package" in problems["absent"]
    assert row["best"] == "slow" and row["ratio"] == pytest.approx(2.0)
    assert mlstm_peers.geomean([{"ratio": 2.0}, {"ratio": 8.0}, {}]) == {"geomean": pytest.approx(4.0), "cases": 2}


def test_the_two_references_agree() -> None:
    given = mlstm_peers.operands((2, 2, 70, 24, 40), "cpu")
    wanted, bound = mlstm_peers.recurrence(given), mlstm_peers.bound_of("mlstm_chunkwise", given)
    row = mlstm_peers.judge("wavecrest", mlstm_peers.chunks(given), wanted, bound)
    assert "problem" not in row and 0 < row["relative"] < 1e-13 and row["of_bound"] < 1e-3
    wrong = wanted.clone()
    wrong[1, 1, 69, 3] += 1.5 * bound[1, 1, 69, 3]
    row = mlstm_peers.judge("wavecrest", wrong, wanted, bound)
    assert row["problem"] == "wrong: 1 elements are beyond the op's bound" and row["of_bound"] == pytest.approx(1.5)
    # a peer's roundings are not known
    assert "problem" not in mlstm_peers.judge("official", wrong.bfloat16(), wanted, bound)
    shapes = {"_".join(map(str, shape)) for shape in mlstm_peers.SHAPES.values()}
    assert len(shapes) == 9 and all(shape[4] == 2 * shape[3] for shape in mlstm_peers.SHAPES.values())


def test_steps_in_place_are_timed_beside_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlstm_peers, "SMALL_BATCHES", (2,))
    monkeypatch.setattr(
        mlstm_peers,
        "official_step",
        lambda device: lambda *given: registry.get("mlstm_step").reference(MlstmStepCall(*given)),
    )
    report = Told()
    mlstm_peers.step(report, SMALL)
    rows = report.rows["b2"]["rows"]
    assert set(rows) == {"wavecrest", "wavecrest in place", "wavecrest counted", "official", "copy"}
    case = report.rows["b2"]
    for row in rows.values():
        of_copy = 100 * case["bytes"] / row["ms"] / 1e6 / case["copy_gbps"]
        assert row["ms"] > 0 and row["percent_of_copy"] == round(of_copy, 1)
    assert case["best"] == "official"


PLACE = xlstm_peers.Place("cpu", True)


def test_a_step_moves_weights_once_and_states_twice() -> None:
    model = xlstm_peers.ours(PLACE)
    d, heads, blocks, width, vocabulary = 64, 2, 2, 192, 211
    matrices = d * (2 * 32 + 2 * 64) + 2 * heads * d + d * d + 2 * width * d + width * d
    vectors = 3 * d + 2 * heads
    weights = 4 * (blocks * (matrices + vectors) + d + vocabulary * d)
    state = 4 * blocks * heads * (16 * 32 + 16 + 1)
    assert xlstm_peers.step_bytes(model, 3) == weights + 2 * 3 * state
    packed = xlstm_peers.step_bytes(quantize(model, "int8", lm_head=True), 3)
    # a byte for each weight but the gates', and a scale a row
    rows = blocks * (192 + d + 2 * width + d) + vocabulary
    bytes_packed = blocks * (matrices - 2 * heads * d) + vocabulary * d
    assert packed == weights + 2 * 3 * state - 3 * bytes_packed + 4 * rows


@pytest.mark.parametrize(("early", "pinned"), [(None, []), (0, [0]), (3, [3])])
def test_steps_start_as_they_are_configured_to(
    early: int | None, pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(key=(1,), backend="kernel", config=Config(EARLY=1), source="exact", reason="a row")
    found = []
    op = SimpleNamespace(
        decisions=lambda: [(made, 1)], backends={"kernel": SimpleNamespace(optional=("EARLY",))},
        pin=lambda _key, _backend, config, *_why: found.append(config["EARLY"]), unpin=lambda: None,
    )  # fmt: skip
    decoder = SimpleNamespace(step=lambda *_args: None)
    monkeypatch.setattr(xlstm_peers, "our_decoder", lambda *_args: decoder)
    monkeypatch.setattr(xlstm_peers, "registry", SimpleNamespace(names=lambda: ["op"], get=lambda _name: op))
    with xlstm_peers.starting(early, xlstm_peers.ours(PLACE), torch.zeros(1, 1)):
        assert found == pinned


class Rounded(xlstm_peers.Place):
    """As on a GPU: what is timed is in 16 bits."""

    dtype = torch.bfloat16


def lost_mlstm(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.backbone.blocks[-1].mlstm_layer.out_proj.weight.zero_()


def lost_mlp(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.backbone.blocks[4].ffn.proj_down.weight.zero_()


def shifted_gates(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.backbone.blocks[0].mlstm_layer.ifgate_preact.bias += 1.0


def halved_states(model: Any, patch: pytest.MonkeyPatch) -> None:
    read = model._run

    def run(*args: Any) -> Any:
        logits, after = read(*args)
        return logits, {index: (c / 2, n / 2, m) for index, (c, n, m) in after.items()}

    patch.setattr(model, "_run", run)


def wrong_steps(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "decode", lambda token, _state: torch.zeros(len(token), 211))


def another_token(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The last but one, where the last one's logits are asked for."""
    last = model._last
    patch.setattr(model, "_last", lambda *args: last(*args) - 1)


FAULTS = [lost_mlstm, lost_mlp, shifted_gates, halved_states, wrong_steps, another_token]


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("form", [None, "int8"])
@torch.no_grad()
def test_a_wrong_model_is_told(form: str | None, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(xlstm_peers.SMALL, "num_blocks", 8)
    place = Rounded("cpu", True)
    model, sound = (xlstm_peers.ours(place) for _ in range(2))
    if fault is not None:
        fault(model, monkeypatch)
    if form is not None:
        for one in (model, sound):
            quantize(one, form)
    original = xlstm_peers.reference
    monkeypatch.setattr(xlstm_peers, "reference", lambda _model, *more: original(sound, *more))
    report = Told()
    assert xlstm_peers.judge(report, place, model, {}, [place.tokens(2, 40)]) == (fault is None), report.rows


@pytest.mark.parametrize("peer", ["official", "unpacked"])
@pytest.mark.parametrize("part", ["prompt", "steps"])
def test_the_error_of_others_allows_half_as_much_again(peer: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is the official package; without it, PyTorch's operations in the model's dtype."""
    model, other = xlstm_peers.ours(PLACE), object()
    errors = {id(model): {"prompt": 0.3, "steps": 0.3}, id(other): {"prompt": 0.3, "steps": 0.3}}

    def answers(one: Any, *_rest: Any) -> dict[str, torch.Tensor]:
        found = errors.get(id(one), {"prompt": 0.0, "steps": 0.0})
        return {name: torch.ones(3) * (1.0 + error) for name, error in found.items()}

    monkeypatch.setattr(xlstm_peers, "reference", lambda _model, _place, dtype=None: None if dtype is None else other)
    monkeypatch.setattr(xlstm_peers, "answers", answers)
    peers = {"official": other} if peer == "official" else {}
    errors[id(model)][part] = 0.44
    assert xlstm_peers.judge(Told(), PLACE, model, peers, [PLACE.tokens(1, 21)])
    errors[id(model)][part] = 0.46
    assert not xlstm_peers.judge(Told(), PLACE, model, peers, [PLACE.tokens(1, 21)])
