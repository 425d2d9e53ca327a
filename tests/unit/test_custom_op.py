"""A call as one operation of a graph: its schema is that of the call's fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from wavecrest.dispatch.custom_op import custom_op_of, schema_of
from wavecrest.dispatch.op import STATE, Op
from wavecrest.errors import InvalidArgument


class ScaledCall(NamedTuple):
    x: Tensor
    y: Tensor | None = None
    factor: float = 1.0
    times: int = 1
    mode: str = "plain"
    dtype: torch.dtype | None = None
    in_place: bool = False


class PairCall(NamedTuple):
    x: Tensor
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] | str = 0


class ListCall(NamedTuple):
    x: list[Tensor]


seen: list[ScaledCall] = []


def scaled(call: ScaledCall) -> Tensor:
    seen.append(call)
    y = call.x * call.factor * call.times
    y = y if call.y is None else y + call.y
    return y if call.dtype is None else y.to(call.dtype)


def empty(call: ScaledCall) -> Tensor:
    return torch.empty(call.x.shape, dtype=call.dtype or call.x.dtype, device=call.x.device)


@pytest.fixture(scope="module")
def op() -> Iterator[Op[ScaledCall, Tensor]]:
    made: Op[ScaledCall, Tensor] = Op(
        "scaled_for_a_graph",
        ScaledCall,
        reference=scaled,
        check=lambda _call: None,
        key=lambda call: (call.x.device.type, call.mode),
        study_module="",
    )
    yield made
    del STATE.ops[made.name]


@pytest.fixture(scope="module")
def in_graph(op: Op[ScaledCall, Tensor]) -> Any:
    return custom_op_of(op, ScaledCall, empty, without=("in_place",))


def test_the_schema_is_made_of_the_fields() -> None:
    assert schema_of(ScaledCall) == (
        "(Tensor x, Tensor? y, float factor, SymInt times, str mode, ScalarType? dtype, bool in_place) -> Tensor"
    )


def test_a_pair_is_two_numbers_and_a_field_may_be_narrower_in_a_graph() -> None:
    with pytest.raises(InvalidArgument, match=r"a field of type int \| tuple\[int, int\] \| str has no torch schema"):
        schema_of(PairCall)
    narrowed = {"padding": int | tuple[int, int] | None}
    assert schema_of(PairCall, narrowed) == "(Tensor x, SymInt[2] stride, SymInt[2]? padding) -> Tensor"


def test_a_type_that_no_schema_has_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match=r"list\[torch.Tensor\] has no torch schema; use one of Tensor"):
        schema_of(ListCall)


def test_it_is_the_op(in_graph: Any) -> None:
    seen.clear()
    call = ScaledCall(torch.ones(3), torch.ones(3), 2.0, 3, "other", torch.float64, in_place=True)
    result = in_graph(call)
    assert result.tolist() == [7.0] * 3 and result.dtype == torch.float64
    # a graph's tensors are the graph's
    assert seen[-1]._replace(x=call.x, y=call.y) == call._replace(in_place=False)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_graph_has_one_operation_for_it(in_graph: Any, dtype: torch.dtype | None) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def function(x: Tensor) -> Tensor:
        made: Tensor = in_graph(ScaledCall(x, factor=0.5, dtype=dtype))
        return made

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    result = compiled(torch.ones(4))
    assert result.tolist() == [0.5] * 4 and result.dtype == (dtype or torch.float32)
    assert len(graphs) == 1 and "wavecrest.scaled_for_a_graph" in graphs[0]


def test_torch_finds_nothing_wrong_with_it(in_graph: Any) -> None:
    operation = torch.ops.wavecrest.scaled_for_a_graph
    for call in (ScaledCall(torch.ones(3)), ScaledCall(torch.ones(2, 2), torch.ones(2, 2), dtype=torch.bfloat16)):
        torch.library.opcheck(operation, tuple(call), test_utils=("test_schema", "test_faketensor"))
