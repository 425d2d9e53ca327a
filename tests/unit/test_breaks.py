"""Planted graph breaks and recompiles are found at their line, and Dynamo is left as it was."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils

from wavecrest.graphs.breaks import find_breaks
from wavecrest.measure.workload import Inputs
from wavecrest.records import GraphBreak
from wavecrest.records.provenance import shown_path

HERE = Path(shown_path(__file__))


def _inputs(*batches: int) -> dict[str, Inputs]:
    return {f"b{batch}": Inputs((torch.randn(batch, 8),)) for batch in batches}


def _line(cls: type, text: str) -> int:
    lines, first = inspect.getsourcelines(cls)
    return first + next(index for index, line in enumerate(lines) if text in line)


def _at(found: list[GraphBreak], kind: str, line: int) -> list[GraphBreak]:
    return [entry for entry in found if entry.kind == kind and Path(entry.file) == HERE and entry.line == line]


class Clean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.proj(x))


class Item(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        if y.sum().item() > 1e9:
            y = y + 1
        return y * 2


class Printing(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # nothing is computed before: the first graph is empty
        print("shape", x.shape)  # noqa: T201
        return self.proj(x)


class Looping(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.proj(x)
            torch._dynamo.graph_break()
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Item(), Item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class SmallBatchBreaks(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        if x.shape[0] == 2:
            torch._dynamo.graph_break()
        return y * 2


class Counting(Clean):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.proj(x) * self.step


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this model refuses to be compiled")
        return x


def test_a_clean_model_is_one_graph() -> None:
    assert find_breaks(Clean().eval(), _inputs(2)) == (1, [], "")


def test_item_breaks_at_its_line_and_makes_two_graphs() -> None:
    graphs, found, note = find_breaks(Item().eval(), _inputs(2))
    assert graphs == 2 and note == ""
    assert len(found) == 1
    (entry,) = _at(found, "break", _line(Item, ".item()"))
    assert "Tensor.item()" in entry.reason


def test_a_break_before_any_op_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    graphs, found, _ = find_breaks(Printing().eval(), _inputs(2))
    assert graphs == 1
    (entry,) = _at(found, "break", _line(Printing, "print("))
    assert "print" in entry.reason
    assert "shape" in capsys.readouterr().out


def test_a_break_in_a_loop_sends_the_function_to_eager_and_says_so() -> None:
    _, found, _ = find_breaks(Looping().eval(), _inputs(2))
    (entry,) = _at(found, "break", _line(Looping, "graph_break()"))
    assert "forward runs without compilation" in entry.reason


def test_graphs_are_those_of_the_bucket_with_most() -> None:
    graphs, found, _ = find_breaks(SmallBatchBreaks().eval(), _inputs(2, 4))
    assert graphs == 2
    assert len(_at(found, "break", _line(SmallBatchBreaks, "graph_break()"))) == 1


def test_a_break_reached_twice_is_listed_once() -> None:
    graphs, found, _ = find_breaks(Nested().eval(), _inputs(2))
    assert graphs >= 2
    assert [entry for entry in found if entry.kind == "break"] == _at(found, "break", _line(Item, ".item()"))
    assert len(_at(found, "break", _line(Item, ".item()"))) == 1


def test_a_new_shape_is_a_recompile_of_the_function() -> None:
    graphs, found, _ = find_breaks(Clean().eval(), _inputs(2, 4))
    assert graphs == 1
    (entry,) = _at(found, "recompile", _line(Clean, "def forward"))
    assert "size mismatch at index 0. expected 2, actual 4" in entry.reason


def test_a_changing_attribute_is_a_recompile_at_its_use() -> None:
    _, found, _ = find_breaks(Counting().eval(), _inputs(2))
    (entry,) = _at(found, "recompile", _line(Counting, "self.step += 1"))
    assert "self.step ==" in entry.reason
    assert "HINT" not in entry.reason and "#" not in entry.reason


def test_guards_that_differ_in_numbers_only_are_one_entry_with_a_count() -> None:
    _, found, _ = find_breaks(Counting().eval(), {f"b{index}": Inputs((torch.randn(2, 8),)) for index in range(3)})
    (entry,) = _at(found, "recompile", _line(Counting, "self.step += 1"))
    assert "(5 times)" in entry.reason


def test_passing_the_recompile_limit_is_a_note() -> None:
    buckets = {f"b{index}": Inputs((torch.randn(2, 8),)) for index in range(8)}
    _, found, note = find_breaks(Counting().eval(), buckets)
    assert note.startswith("forward (") and f"{HERE.name}:{_line(Counting, 'def forward')})" in note
    assert "recompile limit" in note
    (entry,) = _at(found, "recompile", _line(Counting, "self.step += 1"))
    assert "(8 times)" in entry.reason and entry.reason.startswith("forward compiled again")
    assert {entry.kind for entry in found} == {"recompile"}


def test_a_model_that_refuses_tracing_runs_in_eager_and_says_so() -> None:
    graphs, found, note = find_breaks(Untraceable(), _inputs(2))
    assert graphs == 0 and note == ""
    (entry,) = _at(found, "break", _line(Untraceable, "raise"))
    assert "runs without compilation" in entry.reason


def test_an_error_while_tracing_gives_a_note_with_the_bucket() -> None:
    buckets = {"good": Inputs((torch.randn(2, 8),)), "bad": Inputs((torch.randn(2, 9),))}
    _, _, note = find_breaks(Clean().eval(), buckets)
    assert note.startswith("bucket bad: Dynamo could not trace the model")
    assert "RuntimeError" in note


def test_inputs_that_the_model_writes_into_stay_as_they_were() -> None:
    inputs = _inputs(2)
    before = inputs["b2"].args[0].clone()
    find_breaks(lambda x: x.add_(1), inputs)
    assert torch.equal(inputs["b2"].args[0], before)


def test_dynamo_is_left_as_found() -> None:
    import torch._dynamo.config as config

    logger = logging.getLogger("torch._dynamo")
    settings: dict[str, Any] = {name: getattr(config, name) for name in ("recompile_limit", "suppress_errors")}
    torch._dynamo.reset()
    utils.counters["frames"]["mine"] = 7
    torch.compile(Clean().eval(), backend="eager")(torch.randn(2, 8))
    metrics, level = utils.get_compilation_metrics(), logger.level
    counters = {key: dict(value) for key, value in utils.counters.items()}
    find_breaks(Item().eval(), _inputs(2, 4))
    assert {name: getattr(config, name) for name in settings} == settings
    assert logger.level == level
    assert utils.get_compilation_metrics() == metrics
    assert utils._compilation_metrics.maxlen == utils.DEFAULT_COMPILATION_METRICS_LIMIT
    assert {key: dict(value) for key, value in utils.counters.items()} == counters
    assert utils.graph_break_reasons == []
    del utils.counters["frames"]["mine"]


def test_dynamo_is_left_as_found_after_a_model_that_raises() -> None:
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    try:
        logger.setLevel(logging.INFO)
        find_breaks(Clean().eval(), {"bad": Inputs((torch.randn(2, 9),))})
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)
    # compiling goes on working
    assert torch.compile(Clean().eval(), backend="eager")(torch.randn(2, 8)).shape == (2, 8)


def test_a_stance_of_the_caller_does_not_hide_breaks_and_comes_back() -> None:
    with torch.compiler.set_stance("force_eager"):
        graphs, found, _ = find_breaks(Item().eval(), _inputs(2))
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert graphs == 2 and len(found) == 1
