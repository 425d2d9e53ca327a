"""Honest candidates pass the gate: other orders of summation, fusions, wrappers, and models of every kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.optimizer.cheats import Cache, Counts, Decode, InPlace, Masked, Net, Plain, Slots, Softmax, Wrapped, masked
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.optimizer.gate import Gate, failures

pytestmark = pytest.mark.usefixtures("one_thread")


class Honest(NamedTuple):
    name: str
    model: nn.Module
    inputs: Inputs
    candidate: Callable[..., Any]


HONEST: list[Callable[[], Honest]] = []


def honest(make: Callable[[], tuple[nn.Module, Inputs, Callable[..., Any]]]) -> None:
    """Put a model and a candidate on the list."""
    HONEST.append(lambda: Honest(make.__name__, *make()))


def rows(count: int = 6, dtype: torch.dtype = torch.float32) -> Inputs:
    torch.manual_seed(1)
    return Inputs((torch.randn(count, 16, dtype=dtype),))


def itself(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs, nn.Module]:
    return model.eval(), inputs, model


@honest
def the_model_itself() -> Any:
    return itself(Net(), rows())


@honest
def in_training_mode_before() -> Any:
    return itself(nn.Sequential(Net().train(), nn.Dropout(0.5)), rows())


@honest
def a_copy() -> Any:
    model = Net().eval()
    return model, rows(), copy.deepcopy(model)


@honest
def sums_in_another_order() -> Any:
    model = Net().eval()

    class Reordered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order = torch.arange(15, -1, -1)
            hidden = F.linear(x[:, order], model.first.weight[:, order], model.first.bias).relu()
            order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
            return F.linear(hidden[:, order], model.second.weight[:, order], model.second.bias)

    return model, rows(), Reordered()


@honest
def sums_in_double() -> Any:
    model = Net().eval()
    double = copy.deepcopy(model).double()
    return model, rows(), lambda x: double(x.double()).float()


@honest
def bfloat16_with_sums_in_float32() -> Any:
    model = Net(torch.bfloat16).eval()
    wide = copy.deepcopy(model).float()
    return model, rows(64, torch.bfloat16), lambda x: wide(x.float()).bfloat16()


@honest
def bfloat16_softmax_in_float32() -> Any:
    model = Softmax().eval()
    wide = copy.deepcopy(model).float()
    return model, rows(16, torch.bfloat16), lambda x: wide(x.float()).bfloat16()


@honest
def float16_with_sums_in_float32() -> Any:
    model = Net(torch.float16).eval()
    wide = copy.deepcopy(model).float()
    return model, rows(64, torch.float16), lambda x: wide(x.float()).half()


@honest
def fused_projections() -> Any:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(part(x) for part in self.parts)

    class Fused(nn.Module):
        def __init__(self, model: Three) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in model.parts]))
            self.bias = nn.Parameter(torch.cat([part.bias.detach() for part in model.parts]))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return F.linear(x, self.weight, self.bias).split(8, -1)

    model = Three().eval()
    return model, rows(), Fused(model)


@honest
def compiled_by_dynamo() -> Any:
    model = Net().eval()
    return model, rows(), torch.compile(copy.deepcopy(model), backend="eager")


@honest
def key_value_cache() -> Any:
    return itself(Decode(), Inputs((torch.randn(1, 8), Cache(torch.zeros(6, 8), torch.tensor(2)))))


@honest
def cache_that_grows() -> Any:
    @dataclass
    class Growing:
        keys: list[Tensor]

    class Grows(nn.Module):
        def forward(self, x: Tensor, cache: Growing) -> Tensor:
            cache.keys.append(x * 2)
            return torch.cat(cache.keys).sum(0)

    return itself(Grows(), Inputs((torch.randn(1, 8), Growing([torch.randn(3, 8)]))))


@honest
def counter_in_a_buffer() -> Any:
    model = Counts().eval()
    return model, Inputs((torch.randn(4, 8),)), copy.deepcopy(model)


@honest
def in_place() -> Any:
    return itself(InPlace(), Inputs((torch.randn(4, 8),)))


@honest
def batch_norm_that_stays_in_training() -> Any:
    class Always(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1)

    return itself(Always(16), rows(32))


@honest
def padded_batch() -> Any:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return itself(Masked(), masked(mask))


@honest
def one_token() -> Any:
    return itself(nn.Embedding(64, 8), Inputs((torch.tensor([[5]]),)))


@honest
def whole_numbers() -> Any:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    return itself(Best(), rows())


@honest
def answers_of_every_kind() -> Any:
    def many(y: Tensor) -> dict[str, Any]:
        return {
            "plain": Plain(y), "slots": Slots(y * 2), "number": float(y.detach().sum()), "count": y.numel(),
            "array": y.detach().numpy().copy(), "scalar": np.float32(y.detach().mean()), "text": ["a", None, True],
            "complex": torch.complex(y, y), "nested": ((y + 1,), {"deep": [y - 1]}), "dtype": y.dtype,
        }  # fmt: skip

    model = Net().eval()
    return Wrapped(model, many), rows(), Wrapped(copy.deepcopy(model), many)


@honest
def views_as_the_original_has() -> Any:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x.t(), x[:, :1].expand(-1, 3)

    return itself(Views(), rows())


@honest
def channels_last() -> Any:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).eval()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    return model, Inputs((torch.randn(2, 3, 9, 9),)), other


@honest
def tied_weights() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.embed(ids))}

    return itself(Tied(), Inputs((torch.randint(0, 32, (2, 6)),)))


@honest
def recurrent() -> Any:
    torch.manual_seed(0)
    return itself(nn.LSTM(8, 8, batch_first=True), Inputs((torch.randn(2, 5, 8),)))


@honest
def nan_and_infinity_as_the_original_has() -> Any:
    model = Net().eval()
    return Wrapped(model, torch.log), rows(), Wrapped(copy.deepcopy(model), torch.log)


@honest
def expanded_input() -> Any:
    return itself(Net(), Inputs((torch.randn(1, 16).expand(4, 16),)))


@honest
def inputs_of_zeros() -> Any:
    return itself(nn.Conv2d(3, 4, 3), Inputs((torch.zeros(1, 3, 9, 9),)))


@pytest.mark.parametrize("make", HONEST, ids=lambda make: make().name)
def test_an_honest_candidate_passes(make: Callable[[], Honest]) -> None:
    case = make()
    before = [tensor.clone() for _, tensor in case.inputs.tensors()]
    gate = Gate.prepare(Workload(case.model, {"one": case.inputs}))
    rows = gate.check(case.candidate, thorough=True)
    assert rows and not failures(rows)
    assert all(
        torch.equal(a, b.detach()) for a, (_, b) in zip(before, case.inputs.tensors(), strict=True)
    ), "the example inputs are not as they were"  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(5))
def test_a_precision_asked_for_by_name_passes(dtype: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1)).eval()

    def lowered(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            y: Tensor = model(x)
        return y.float()

    gate = Gate.prepare(Workload(model, {"one": Inputs((torch.randn(8, 64),))}), dtype=dtype)
    assert not failures(gate.check(lowered))


def test_a_gate_for_any_pair_of_functions() -> None:
    gate = Gate.pair(lambda a, b: a @ b, (torch.randn(8, 8), torch.randn(8, 8)), (torch.randn(4, 8), torch.randn(8, 2)))
    assert not failures(gate.check(lambda a, b: (b.t() @ a.t()).t()))
    assert failures(gate.check(lambda a, b: a @ b + 1e-2))


def test_a_transformers_model_with_its_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 6))
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    buckets = {
        "prefill": Inputs((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
        "decode": Inputs((), {"input_ids": ids[:, :1].clone(), "past_key_values": cache}),
    }
    gate = Gate.prepare(Workload(model, buckets))
    rows = gate.check(copy.deepcopy(model))
    assert not failures(rows) and cache.get_seq_length() == 6
    assert {row.output.split(" ")[0] for row in rows if row.bucket == "prefill"} >= {"logits"}
    assert any("after the call" in row.output for row in rows if row.bucket == "decode")


def test_a_head_of_zeros_is_named_where_nothing_can_be_verified() -> None:
    """torchvision's ViT is made so: its answers say nothing until trained weights are loaded."""
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 2))
    nn.init.zeros_(model.head.weight)
    gate = Gate.prepare(from_example(model.eval(), torch.randn(2, 4)))
    assert gate.problem is not None and gate.problem.rule == "dependence"
    assert "its last linear layer, head, are all zero: load trained ones" in str(gate.problem)
    nn.init.ones_(model.head.weight)
    assert Gate.prepare(from_example(model, torch.randn(2, 4))).problem is None
