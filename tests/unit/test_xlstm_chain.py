"""The search for configurations in the captured step: what it tries, takes and refuses, and the rows that it writes."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

# the benchmark stands beside the package in the source tree
from benchmarks import xlstm_chain

from tests.unit.test_tune_session import Clock, clock, op
from wavecrest import records
from wavecrest.dispatch.decision import Decision
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config, database
from wavecrest.dispatch.tuned.row import Evidence, Row
from wavecrest.errors import InvalidArgument
from wavecrest.records import provenance
from wavecrest.tune import compile_ahead, session, untuned_calls

__all__ = ["clock", "op"]

KEY = (64, 8, "float32", None, "cpu", False)


class Step:
    """A step that takes what `times` has for the configuration in use, ms."""

    def __init__(self, op: Op, times: dict[int, float]) -> None:
        self.times, self.used = times, Config(BLOCK=1)
        self.op = lambda made: op

    def use(self, made: Decision, config: Config) -> None:
        self.used = config

    def ms(self) -> float:
        if self.used["BLOCK"] not in self.times:
            raise InvalidArgument("BLOCK is too large")
        return self.times[self.used["BLOCK"]]


def searched(op: Op, times: dict[int, float], tried: list[Config]) -> tuple[Step, dict[str, Any]]:
    step: Any = Step(op, times)
    made = Decision("double", KEY, "kernel", Config(BLOCK=1), "exact", "a row", ())
    none = compile_ahead.kernels(True, None)
    found = xlstm_chain.searched(step, made, Config(BLOCK=1), tried, none, 2.0)
    return step, found


def test_stages_starts_and_sizes() -> None:
    config = Config(BLOCK_N=4, BLOCK_K=512, num_warps=1, num_stages=3)
    some = list(xlstm_chain.starts(config))
    assert some[0] == config, "EARLY=0 is not written"
    assert {(one["num_stages"], one.kwargs.get("EARLY", 0)) for one in some} == {
        (stages, early) for stages in (2, 3, 5) for early in (0, 1, 2)
    }, "one stage is no pipeline"
    others = list(xlstm_chain.sizes(config))
    # 10 kinds less two with half a warp, each with two numbers of stages
    assert len(set(others)) == len(others) == 16
    for one in others:
        assert one["EARLY"] == 1 and one["num_stages"] in (3, 5) and one["num_warps"] >= 1, one
        work = one["BLOCK_N"] * one["BLOCK_K"] / one["num_warps"]
        assert work in (1024, 2048, 4096) and one.kwargs | {"num_stages": 3, "EARLY": 0} != config.kwargs | {"EARLY": 0}


def test_of_the_mlstm_no_more_than_the_start_is_tried() -> None:
    config = Config(BLOCK_K=32, BLOCK_V=64, num_warps=4)
    found = xlstm_chain.tries("mlstm_step", config)
    assert found[0] == config and len(found) > 3
    assert {changed["EARLY"] for changed in found[1:]} == set(range(1, len(found)))
    assert all({**one.kwargs, "EARLY": 0} == {**config.kwargs, "EARLY": 0} for one in found)


def test_the_last_word_comes_last(tmp_path: Path) -> None:
    out = tmp_path / "chain.json"
    assert xlstm_chain.words(out) == {}
    rows = [{"key": {"M": m}, "best": f"BLOCK={n}"} for n, m in enumerate((1, 2, 1))]
    runs = [{"rows": rows[:2]}, {"rows": [{"case": "step"}, rows[2], {**rows[0], "op": "mlstm_step"}]}]
    out.write_text(json.dumps({"runs": runs}))
    found = xlstm_chain.words(out)
    assert [(name, row["best"]) for name, row in found.items()] == [
        (("gemm", 2), "BLOCK=1"), (("gemm", 1), "BLOCK=2"), (("mlstm_step", 1), "BLOCK=0"),
    ]  # fmt: skip


def test_what_is_alike_is_tried() -> None:
    key = {"rows": 1, "columns": 8, "k": 16, "a": "bfloat16", "b": "int8", "form": "plain tail 2"}
    rows = {
        "same": key | {"columns": 6, "form": "plain"}, "rows": key | {"rows": 2}, "k": key | {"k": 8},
        "b": key | {"b": "bfloat16"}, "bits": key | {"b": "float8_e4m3fn"},
        "form": key | {"b": "uint8", "form": "int4"},
    }  # fmt: skip
    earlier: dict[Any, Any] = {
        (name,): {"key": row, "best": f"BLOCK={place}"} for place, (name, row) in enumerate(rows.items(), 1)
    }
    earlier["mlstm_step",] = {"key": {"B": 1}, "best": "BLOCK=9", "op": "mlstm_step"}
    assert list(xlstm_chain.alike(key, earlier)) == [Config(BLOCK=1), Config(BLOCK=5)]
    assert list(xlstm_chain.alike({"B": 1}, earlier)) == []


def test_the_fastest_is_kept_and_what_fails_says_why(op: Op) -> None:
    tried = [Config(BLOCK=2), Config(BLOCK=4), Config(BLOCK=8), Config(WIDTH=1)]
    step, found = searched(op, {2: 1.5, 4: 1.2}, tried)
    assert step.used == Config(BLOCK=4) and (found["best"], found["ms"]) == ("BLOCK=4", 1.2)
    assert found["before"] == "BLOCK=1" and found["ms_before"] == 2.0
    assert found["tried"] == {
        "BLOCK=2": 1.5, "BLOCK=4": 1.2, "BLOCK=8": "BLOCK is too large", "WIDTH=1": "which does not know WIDTH=1",
    }  # fmt: skip


def test_a_tie_changes_nothing(op: Op) -> None:
    step, found = searched(op, {2: 2.0 * (1 - xlstm_chain.LEAST / 2)}, [Config(BLOCK=2)])
    assert step.used == Config(BLOCK=1) and found["best"] == found["before"]


class Rows:
    """A report that keeps its rows."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def header(self, values: Any) -> None:
        assert values["evidence"]

    def row(self, case: str, **values: Any) -> None:
        self.found[case] = values


def test_rows_of_nothing_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "chain.json"
    with pytest.raises(InvalidArgument, match=r"chain\.json has no product .* batch-1"):
        xlstm_chain.rows(Rows(), argparse.Namespace(device="cpu", out=out))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("slower", [False, True], ids=["faster than PyTorch", "slower"])
def test_the_last_word_on_a_key_becomes_its_row(
    slower: bool, op: Op, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock.times["b4"] = 3.0 if slower else 0.9
    key = untuned_calls.parts_of(op, KEY)
    same = {"op": "double", "key": key, "backend": "kernel", "before": "BLOCK=1", "best": "BLOCK=4"}
    runs = [
        {"rows": [{**same, "best": "BLOCK=2"}, {"case": "step"}]},
        {"rows": [same, {**same, "key": {**key, "rows": 4}, "best": "BLOCK=1"},
                  {**same, "key": {**key, "rows": 1}, "best": "BLOCK=2"}, {**same, "op": "mlstm_step"},
                  {**same, "key": {**key, "rows": 8}, "best": "BLOCK=1"},
                  {**same, "key": {**key, "rows": 9}, "best": "BLOCK=1"}]},
    ]  # fmt: skip
    out = tmp_path / "chain.json"
    out.write_text(json.dumps({"runs": runs}))
    op.bench_cases, op.inputs = None, lambda rows, columns, dtype, device: (torch.ones(rows, columns),)
    monkeypatch.setattr(xlstm_chain.registry, "get", lambda name: op)
    real = session.tune
    monkeypatch.setattr(
        session, "tune", lambda *args, **options: real("double", *args[1:], **options, timer=clock)
    )  # fmt: skip
    seconds, header = itertools.count(10), provenance.header
    monkeypatch.setattr(
        session.provenance, "header",
        lambda *args, **more: header(*args, **more).model_copy(
            update={"created": f"2026-11-22T12:00:{next(seconds)}+00:00"}
        ),
    )  # fmt: skip
    table = tmp_path / "rows.csv"
    # of the record that is written anew, and of another: what nothing was faster than keeps its row in either
    fields = tuple(key)
    old = [
        Row((rows, *tuple(key.values())[1:]), "kernel", Config(BLOCK=8), 1.0, 2.0, record, Evidence())
        for rows, record in ((7, "chain_tune.json"), (8, "chain_tune.json"), (9, "other.json"))
    ]
    database.write(table, fields, old)
    monkeypatch.setattr(xlstm_chain, "table_of", lambda *_args: table)
    report = Rows()
    xlstm_chain.rows(report, argparse.Namespace(device="cpu", out=out))  # type: ignore[arg-type]
    (case, row), (other, _), (kept, _) = report.found.items()
    assert "rows=64" in case and row["config"] == "BLOCK=4" and row["written"] is not slower
    assert "rows=1 " in other and "rows=8 " in kept
    record = records.load_as(tmp_path / "chain_tune.json", records.TuneRecord)
    tried = {one.backend: one.config for one in record.keys[0].candidates if one.status != "refused"}
    assert tried == {"torch": {}, "kernel": {"BLOCK": 4}}
    rows = {one.key[0]: one for one in database.read(table, fields).values()}
    assert rows.pop(9).record == "other.json"
    assert {m: one.config for m, one in rows.items()} == {
        1: Config(BLOCK=2),
        8: Config(BLOCK=1),
        **({} if slower else {64: Config(BLOCK=4)}),
    }
    assert {one.evidence.date for one in rows.values()} == {record.header.created}
