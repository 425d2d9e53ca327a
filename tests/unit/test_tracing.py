"""The mark by which Dynamo knows a function whose result it keeps."""

from __future__ import annotations

import torch

from wavecrest.dispatch.tracing import constant_in_graphs


def test_the_mark_is_that_of_torch() -> None:
    assert vars(constant_in_graphs(lambda: 1)) == vars(torch.compiler.assume_constant_result(lambda: 1)) != {}


def test_a_graph_holds_the_result() -> None:
    calls: list[int] = []

    @constant_in_graphs
    def counted() -> int:
        calls.append(1)
        return len(calls)

    compiled = torch.compile(lambda x: x + counted(), backend="eager", fullgraph=True)
    assert [int(compiled(torch.zeros(1))) for _ in range(3)] == [1, 1, 1]
