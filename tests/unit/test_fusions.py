"""Graphs are rewritten where it is safe: constants, activations, residual norms; the answers stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wavecrest.graphs import activations, constants, fusions, nodes
from wavecrest.graphs.root import traceable
from wavecrest.measure.workload import Inputs
from wavecrest.ops._gemm.backend import op as gemm


class Everything(dict[str, str]):
    """A choice of PyTorch's backend for every layer."""

    def get(self, name: str, default: Any = None) -> Any:
        return "torch"


def rewritten(graph: torch.fx.GraphModule, module: nn.Module, inductor: bool) -> fusions.Rewritten:
    return fusions.rewrite(
        graph, module, Everything(), inductor=inductor, norms=lambda _call: True, attentions=lambda _call: None
    )


def compiled(module: nn.Module, *, inductor: bool = False) -> tuple[Callable[..., Any], list[fusions.Rewritten]]:
    """A compiled call of a module with everything rewritten that can be, and what was."""
    found: list[fusions.Rewritten] = []

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        found.append(rewritten(graph, module, inductor))
        return found[-1].call(found[-1].graph.forward)

    torch._dynamo.reset()
    return torch.compile(traceable(module), backend=backend, dynamic=False), found


def counts(module: nn.Module, *args: Tensor, inductor: bool = False) -> fusions.Counts:
    """The rewritings in one call, whose answer must be the module's."""
    call, found = compiled(module, inductor=inductor)
    with torch.no_grad():
        expected = module(*[arg.clone() for arg in args])
        for _ in range(2):
            torch.testing.assert_close(call(*[arg.clone() for arg in args]), expected, rtol=1e-5, atol=1e-5)
    return sum((made.counts for made in found), fusions.Counts())


class Calls(nn.Module):
    """A module of one function of (module, x)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(32, 8)
        self.register_buffer("places", torch.arange(32))
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-2, 2, 3 * 5 * 8).reshape(3, 5, 8)


def written_out(y: Tensor) -> Tensor:
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


@pytest.mark.parametrize("inductor", [True, False])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m, x: F.gelu(m.linear(x)), "gelu"),
        (lambda m, x: F.gelu(m.other(x), approximate="tanh"), "gelu_tanh"),
        (lambda m, x: written_out(m.linear(x)), "gelu_tanh"),
        (lambda m, x: F.relu(m.linear(x), inplace=True), "relu"),
        (lambda m, x: m.linear(x).relu_(), "relu"),
        (lambda m, x: F.silu(m.linear(x)) * m.other(x), "silu"),
        (lambda m, x: F.dropout(F.gelu(m.linear(x)), 0.1, training=False) + x, "gelu"),
    ],
)
def test_activations_are_found_by_what_they_compute(function: Any, name: str, inductor: bool) -> None:
    module = Calls(function)
    assert counts(module, X, inductor=inductor).activations == 1
    (call,) = fusions.activation_calls(fusions.trace(module, Inputs((X,))))
    assert activations.name_of(call) == f"{name} 15x8x8 float32" + (" bias" if call.bias is not None else "")


def two_readers(module: Any, x: Tensor) -> Any:
    y = module.linear(x)
    return F.gelu(y), y


def read_inside(module: Any, x: Tensor) -> Any:
    y = module.linear(x)
    cube = torch.pow(y, 3.0)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * cube))), cube


@pytest.mark.parametrize(
    "function",
    [
        two_readers,
        read_inside,
        lambda m, x: torch.clamp(F.gelu(m.linear(x)) + 1, max=3),
        lambda m, x: m.linear(x) * torch.sigmoid(1.702 * m.linear(x)),
        lambda m, x: F.softmax(m.linear(x), -1),
        lambda m, x: F.leaky_relu(m.linear(x)),
    ],
)
def test_other_functions_are_left_alone(function: Any) -> None:
    module = Calls(function)
    made = counts(module, X)
    # the clamp comes after an activation that is whole
    assert made.activations == (1 if "clamp" in function.__code__.co_names else 0)


def test_a_layer_without_a_choice_stays() -> None:
    module = Calls(lambda m, x: F.gelu(m.linear(x)))
    assert (
        fusions.count(fusions.trace(module, Inputs((X,))), module, {}, inductor=True, attentions={}) == fusions.Counts()
    )


def test_gradients_keep_pytorchs_own() -> None:
    call, found = compiled(Calls(lambda m, x: m.norm(F.gelu(m.linear(x)) + x) + m.table(m.places[:5])))
    call(X).sum().backward()
    assert found[0].counts == fusions.Counts()


def pre_norm(module: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + module.linear(module.norm(x))
    return module.norm(x) + x


def rms(module: Any, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return module.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda m, x: m.norm(x + m.linear(x)), 1),
        (pre_norm, 2),
        (lambda m, x: rms(m, m.linear(x) + x), 1),
        (lambda m, x: F.rms_norm(torch.add(x, m.other(x)), (8,), m.weight, 1e-5), 1),
        (lambda m, x: F.layer_norm(x + m.linear(x), (8,)), 1),
    ],
)
def test_sums_and_their_norms_are_one_call(function: Any, number: int) -> None:
    assert counts(Calls(function), X).norms == number
    # Inductor fuses them by itself
    assert counts(Calls(function), X, inductor=True).norms == 0


def test_a_sum_that_only_its_norm_takes_is_not_written() -> None:
    for function, name in ((lambda m, x: m.norm(x + m.linear(x)), "post_layer_norm"), (pre_norm, "add_layer_norm")):
        call, found = compiled(Calls(function))
        with torch.no_grad():
            call(X)
        targets = [getattr(node.target, "__name__", "") for node in found[0].graph.graph.nodes]
        assert name in targets and ("add_layer_norm" in targets) == (name == "add_layer_norm")


def of_another(module: Any, x: Tensor) -> Tensor:
    y = torch.tanh(module.linear(x))
    root = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return module.weight * ((x + module.other(x)) * root).to(x.dtype)


def changed_later(module: Any, x: Tensor) -> Tensor:
    added = x + module.linear(x)
    first = module.norm(added)
    added += 1
    return first + added


@pytest.mark.parametrize(
    "function",
    [
        changed_later,
        of_another,
        lambda m, x: m.norm(x + 1.0),
        lambda m, x: m.norm(x + x[:1]),
        lambda m, x: m.norm(torch.add(x, m.linear(x), alpha=2)),
        lambda m, x: F.layer_norm(x + m.linear(x), (5, 8)),
        lambda m, x: F.layer_norm(x + m.linear(x), (8,), m.linear(x[0, 0])),
    ],
)
def test_sums_that_are_left_alone(function: Any) -> None:
    assert counts(Calls(function), X).norms == 0


def positions(module: Any, x: Tensor) -> Tensor:
    return x + module.table(module.places[: x.shape[1]])


def mask(module: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    hidden = torch.full((length, length), float("-inf"))
    hidden = torch.triu(hidden, diagonal=1)
    hidden += torch.arange(length) * 0.5
    return torch.softmax(x @ x.mT + hidden, -1)


def windows(module: Any, x: Tensor) -> Tensor:
    """As torchvision's Swin numbers the windows of an image."""
    numbers = x.new_zeros(x.shape[1])
    numbers[1:3] = 1
    numbers[3:] = module.weight[0]
    return torch.softmax(x @ x.mT + (numbers[:, None] - numbers).masked_fill(numbers > 0.5, -100.0), -1)


@pytest.mark.parametrize("inductor", [True, False])
@pytest.mark.parametrize("function", [positions, mask, windows], ids=["positions", "mask", "windows"])
def test_constants_are_computed_once(function: Any, inductor: bool) -> None:
    module = Calls(function)
    assert counts(module, X, inductor=inductor).constants >= 2
    call, found = compiled(module)
    with torch.no_grad():
        call(X)
        # another length is another graph, with constants of its own
        longer = torch.randn(2, 9, 8)
        torch.testing.assert_close(call(longer), module(longer), rtol=1e-5, atol=1e-6)
    assert len(found) == 2 and all(len(made.parts.values) == 1 for made in found if made.parts)
    assert "embedding" not in found[0].graph.code and "triu" not in found[0].graph.code


def test_items_that_are_drawn_are_no_constants() -> None:
    def drawn(module: Any, x: Tensor) -> Tensor:
        numbers = x.new_zeros(x.shape[1])
        numbers[1:3] = torch.rand(2) * 0 + 1
        return torch.softmax(x @ x.mT + numbers, -1)

    assert counts(Calls(drawn), X).constants == 0


def test_a_changed_weight_changes_the_constants() -> None:
    """In place, by another tensor, and back; held to what each constant was made from."""
    module = Calls(positions)
    call, _ = compiled(module)
    with torch.no_grad():
        call(X)
        module.table.weight.mul_(3)
        torch.testing.assert_close(call(X), module(X))
        module.table.weight.zero_()
        torch.testing.assert_close(call(X), X)
        module.table.weight.normal_()
    module.load_state_dict(Calls(positions).state_dict())
    with torch.no_grad():
        torch.testing.assert_close(call(X), Calls(positions)(X))
        module.table.weight = nn.Parameter(torch.ones(32, 8))
        torch.testing.assert_close(call(X), X + 1)
    with torch.inference_mode():
        torch.testing.assert_close(call(X), X + 1)


def noise(_module: Any, x: Tensor) -> Tensor:
    return x * 0 + torch.rand(5, 8)


def uninitialised(_module: Any, x: Tensor) -> Tensor:
    return x + torch.empty(5, 8).fill_(2.0)


def returned(module: Any, x: Tensor) -> Any:
    table = module.table(module.places[:5]) * 2
    return x + table, table


def written_with_inputs(_module: Any, x: Tensor) -> Tensor:
    total = torch.zeros(3, 5, 8)
    total += x
    return total


def read_before_it_is_written(_module: Any, x: Tensor) -> Tensor:
    steps = torch.arange(8).float()
    first = x + steps
    steps += 1
    return first * steps


def own_state(module: Any, x: Tensor) -> Tensor:
    module.places.add_(1)
    return x + module.places[:8].float()


@pytest.mark.parametrize("function", [uninitialised, written_with_inputs, read_before_it_is_written])
def test_what_is_written_to_is_no_constant(function: Any) -> None:
    module = Calls(function)
    call, found = compiled(module)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(X), module(X))
    # of the last, the whole numbers that the written ones are made from
    assert found[0].parts is None or found[0].parts.values[0].dtype == torch.int64


def test_random_numbers_are_drawn_anew() -> None:
    call, found = compiled(Calls(noise))
    with torch.no_grad():
        assert not torch.equal(call(X), call(X))
    assert found[0].parts is None


def test_what_a_caller_gets_is_its_own() -> None:
    module = Calls(returned)
    call, _ = compiled(module)
    with torch.no_grad():
        call(X)[1].zero_()
        torch.testing.assert_close(call(X), module(X))


def test_state_that_a_call_writes_is_no_constant() -> None:
    module, other = Calls(own_state), Calls(own_state)
    call, found = compiled(module)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(X), other(X))
    assert found[0].parts is None


def test_constants_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MOST_BYTES", 100)
    assert counts(Calls(positions), X).constants == 0


@pytest.mark.parametrize("layers", [4, 16])
def test_a_graph_is_read_a_fixed_number_of_times(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gemma 2 of 26 layers took 47 s where each constant asked every node whether it writes (2 cores, no record)."""
    read: list[torch.fx.Node] = []
    own = nodes.written

    def written(node: torch.fx.Node) -> Any:
        read.append(node)
        return own(node)

    def function(module: Any, x: Tensor) -> Tensor:
        for _ in range(layers):
            x = x + (torch.arange(4.0) * 2).clamp(max=3) + torch.zeros(4).add_(1)
        return x

    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    traced = fusions.trace(module := Deep(), Inputs((torch.randn(2, 4),), {}))
    monkeypatch.setattr(nodes, "written", written)
    found = fusions.count(traced, module, {}, inductor=False, attentions={})
    size = sum(len(graph.graph.nodes) for graph in traced.graphs)
    assert found.constants >= 2 * layers and size > 7 * layers and len(read) <= 6 * size


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    return transformers.BertModel(config).eval(), {"input_ids": torch.randint(0, 64, (2, 7))}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)
    return transformers.T5EncoderModel(config).eval(), {"input_ids": torch.randint(0, 64, (2, 7))}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, use_cache=False
    )
    return transformers.LlamaModel(config).eval(), {"input_ids": torch.randint(0, 64, (2, 7))}


@pytest.mark.parametrize(("make", "least"), [(bert, (4, 2, 4, 0)), (t5, (20, 2, 4, 0)), (llama, (20, 2, 4, 0))])
def test_models_of_transformers(make: Any, least: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, given = make()
    call, found = compiled(module)
    with torch.no_grad():
        made, expected = call(**given)[0], module(**given)[0]
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    total = sum((one.counts for one in found), fusions.Counts())
    assert all(number >= wanted for number, wanted in zip(total, least, strict=True)), total


def test_inductor_compiles_what_is_left() -> None:
    module = Calls(lambda m, x: m.norm(F.gelu(m.linear(positions(m, x)))))
    backend = fusions.backend(module, Everything(), inductor=True, attentions={})
    call = torch.compile(traceable(module), backend=backend, dynamic=False)
    torch._dynamo.reset()
    with torch.no_grad():
        for x in (X, torch.randn(1, 9, 8)):
            torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-5)
        module.table.weight.mul_(2)
        torch.testing.assert_close(call(X), module(X), rtol=1e-4, atol=1e-5)


def test_a_backend_that_refuses_leaves_the_call_to_dispatch() -> None:
    from wavecrest.nn.linear import linear_on

    x, weight = torch.randn(0, 8), torch.randn(4, 8)
    assert "empty" in (gemm.backends["onednn"].refuse(activations.linear_call(x, weight, None)) or "")
    assert linear_on(x, weight, None, "gelu", "onednn").shape == (0, 4)


def test_a_conjunction_writes_nothing() -> None:
    """`operator.and_` ends in an underscore, as functions do that work in place."""

    def masked(module: Any, x: Tensor) -> Tensor:
        fixed = torch.ones(5, 8, dtype=torch.bool) & (module.places[:8] > 2)
        return torch.where(fixed & (x > 0), x, module.linear(x))

    assert counts(Calls(masked).eval(), X).constants > 0
