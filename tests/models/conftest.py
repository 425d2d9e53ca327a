"""Small models: threads that wait for each other would take most of the time; and graphs of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, Graph
from wavecrest.models.xlstm import generation


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, on the CPU of a kind that shows what the decoder does with them."""
    if DEVICE == "cuda":
        return

    def record(work: Callable[[], Tensor], _pool: Any, _what: str) -> tuple[Graph, Tensor]:
        graph = Graph(work)
        return graph, graph.output

    monkeypatch.setattr(generation, "has_graphs", lambda _device: True)
    monkeypatch.setattr("wavecrest.measure.cuda_graph.warm_up", lambda work: [work() for _ in range(3)])
    monkeypatch.setattr("wavecrest.measure.cuda_graph.record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
