"""Graphs are rewritten where a convolution's result goes into a ReLU alone; the answers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wavecrest.graphs import epilogues
from wavecrest.graphs.inductor import PRESETS, compile_module, strict_compilation
from wavecrest.measure.workload import Inputs
from wavecrest.ops._conv2d.call import Conv2dCall, with_pairs

OP = torch.ops.wavecrest.conv2d_relu.default


class Block(nn.Module):
    """A residual block, with one ReLU for all."""

    def __init__(self, inplace: bool = True, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 6, 3, stride=stride, padding=1), nn.Conv2d(6, 4, 1, bias=False)
        self.down = nn.Conv2d(4, 4, 1, stride=stride) if stride > 1 else None
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.act(self.a(x)))
        y += x if self.down is None else self.down(x)
        return self.act(y)


def rewritten(
    function: Callable[..., Any], *args: Tensor, wanted: epilogues.Wanted = lambda _call: True
) -> tuple[int, Any]:
    """How many sites were replaced in the graphs of a call, and what they return."""
    total = 0

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        nonlocal total
        found = epilogues.rewrite(graph, wanted)
        assert [node.target for node in graph.graph.nodes].count(OP) == found
        total += found
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(function, backend=backend, dynamic=False)(*args)
    return total, made


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("inplace", [True, False])
def test_a_residual_block_is_two_kernels(inplace: bool, stride: int) -> None:
    block, x = Block(inplace, stride).eval(), torch.randn(2, 4, 8, 8)
    count, made = rewritten(nn.Sequential(block, block).forward, x) if stride == 1 else rewritten(block.forward, x)
    assert count == (4 if stride == 1 else 2)
    with torch.no_grad():
        expected = nn.Sequential(block, block)(x) if stride == 1 else block(x)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


W = torch.linspace(-1, 1, 4 * 4 * 9).reshape(4, 4, 3, 3)
X = torch.linspace(-2, 2, 2 * 4 * 36).reshape(2, 4, 6, 6)


def forms(x: Tensor) -> list[Tensor]:
    return [
        F.conv2d(x, W, None, 1, 1).relu(),
        torch.relu(F.conv2d(x, W, torch.ones(4), 2, "valid")),
        torch.conv2d(x, W, padding=[2, 0], dilation=2).relu_(),
        torch.add(x, F.conv2d(x, W, padding=1)).relu(),
        F.relu(F.conv2d(x, W, padding="same") + x),
    ]


def test_every_way_to_write_it() -> None:
    count, made = rewritten(forms, X)
    assert count == 5
    torch.testing.assert_close(made, forms(X), rtol=1e-5, atol=1e-5)


def two_readers(x: Tensor) -> Any:
    y = F.conv2d(x, W, None, 1, 1)
    return y.relu(), y


def sum_of_itself(x: Tensor) -> Tensor:
    y = F.conv2d(x, W, None, 1, 1)
    return (y + y).relu()


def read_before_the_relu(x: Tensor) -> Any:
    y = F.conv2d(x, W, None, 1, 1) + x
    return y.relu(), y.sum()


def written_into_another(x: Tensor) -> Any:
    shared = x * 2
    shared += F.conv2d(x, W, None, 1, 1)
    return shared.relu(), shared


def broadcast(x: Tensor) -> Tensor:
    return (F.conv2d(x, W, None, 1, 1) + x[:1]).relu()


def a_number(x: Tensor) -> Tensor:
    return (F.conv2d(x, W, None, 1, 1) + 1.0).relu()


def scaled(x: Tensor) -> Tensor:
    return torch.add(F.conv2d(x, W, None, 1, 1), x, alpha=2).relu()


def no_batch(x: Tensor) -> Tensor:
    return F.conv2d(x[0], W, None, 1, 1).relu()


def another_end(x: Tensor) -> Tensor:
    return F.relu6(F.conv2d(x, W, None, 1, 1))


@pytest.mark.parametrize(
    "function",
    [
        two_readers,
        sum_of_itself,
        read_before_the_relu,
        written_into_another,
        broadcast,
        a_number,
        scaled,
        no_batch,
        another_end,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_left_alone(function: Callable[..., Any]) -> None:
    count, made = rewritten(function, X)
    assert count == 0
    torch.testing.assert_close(made, function(X))


def test_the_operation_takes_the_fields_of_a_call() -> None:
    assert tuple(argument.name for argument in OP._schema.arguments) == Conv2dCall._fields
    call = with_pairs(Conv2dCall(X, W, torch.ones(4), 2, "valid", activation="relu"))
    assert (call.stride, call.padding, call.dilation) == ((2, 2), (0, 0), (1, 1))
    torch.library.opcheck(OP, tuple(call), test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(OP(*call), F.conv2d(X, W, torch.ones(4), 2).relu())


def test_the_backend_says_what_it_takes() -> None:
    """Nothing on the CPU, by default; the call has the sizes of the graph."""
    block, x = Block().eval(), torch.randn(2, 4, 8, 8)
    assert epilogues.count(block.forward, Inputs((x,))) == 0
    seen: list[Conv2dCall] = []

    def wanted(call: Conv2dCall) -> bool:
        seen.append(call)
        return call.residual is not None

    assert rewritten(block.forward, x, wanted=wanted)[0] == 1
    assert [(tuple(call.shape), call.activation) for call in seen] == [((2, 6, 8, 8), "relu"), ((2, 4, 8, 8), "relu")]


def test_calls_that_need_gradients_say_so() -> None:
    """No backend with one kernel takes them: it has no gradients."""
    seen: list[bool] = []

    def wanted(call: Conv2dCall) -> bool:
        seen.append(call.needs_grad)
        return False

    block = Block().eval()
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        epilogues.rewrite(graph, wanted)
        return graph.forward

    compiled = torch.compile(block.forward, backend=backend, dynamic=False)
    compiled(torch.randn(2, 4, 8, 8))
    with torch.no_grad():
        compiled(torch.randn(2, 4, 8, 8))
    assert seen == [True, True, False, False]


def test_an_image_in_another_layout_is_copied_once() -> None:
    """As PyTorch does where the weight is channels_last; what follows is in that layout by itself."""
    block = Block(stride=2).eval().to(memory_format=torch.channels_last)
    seen: list[bool] = []

    def wanted(call: Conv2dCall) -> bool:
        seen.append(call.x.is_contiguous(memory_format=torch.channels_last))
        return True

    x = torch.randn(2, 4, 8, 8)
    count, made = rewritten(block.forward, x, wanted=wanted)
    assert count == 2 and seen == [True, True]
    with torch.no_grad():
        torch.testing.assert_close(made, block(x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_compiled_block_runs_cudnns_kernels() -> None:
    if torch.version.hip is not None:
        pytest.skip("cuDNN is NVIDIA's")
    block = Block(stride=2).eval().half().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    assert epilogues.count(block.forward, Inputs((x,))) == 2
    with torch.no_grad(), strict_compilation(graphs=8):
        expected = block(x)
        compile_module(block, PRESETS["epilogues"])
        torch.testing.assert_close(block(x), expected, rtol=1e-2, atol=1e-2)
