"""The accuracy gate itself: what it lets through and what it stops."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.optimizer.gate import Gate, call_outputs, failures, holding, variation


class Net(nn.Module):
    def __init__(self, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64, dtype=dtype)
        self.factor = factor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.linear(x) * self.factor, "count": torch.tensor([x.shape[0]])}


def test_the_original_passes() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    rows = Gate.prepare(workload).check(workload.model)
    assert {row.output for row in rows} == {"hidden", "count"} and not failures(rows)
    assert all(row.own > 0 for row in rows if row.output == "hidden")


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.0001), ("bfloat16", 1.05)], ids=["fp32", "bf16"])
def test_small_systematic_errors_are_stopped(dtype: str, factor: float) -> None:
    kind = getattr(torch, dtype)
    workload = from_example(Net(dtype=kind), torch.randn(8, 64, dtype=kind))
    assert "hidden" in failures(Gate.prepare(workload).check(Net(factor, kind)))


def test_rounding_of_the_same_size_passes() -> None:
    """Another order of summation is as good as the original's."""
    workload = from_example(Net(), torch.randn(8, 64))

    def reordered(x: Tensor) -> dict[str, Tensor]:
        order = torch.arange(63, -1, -1)
        linear = workload.model.linear
        return {
            "hidden": nn.functional.linear(x[:, order], linear.weight[:, order], linear.bias),
            "count": torch.tensor([8]),
        }

    assert not failures(Gate.prepare(workload).check(reordered))


def test_an_error_that_only_other_inputs_show_is_stopped() -> None:
    """A candidate that returns what it saw first would pass a check on the example alone."""
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    with torch.no_grad():
        remembered = workload.model(workload.buckets["default"].args[0])
    assert failures(gate.check(lambda x: remembered))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda out: {**out, "hidden": out["hidden"][:4]}, "shape"),
        (lambda out: {**out, "hidden": out["hidden"].index_fill(0, torch.tensor([1]), float("nan"))}, "NaN"),
        (lambda out: {**out, "count": out["count"] + 1}, "count"),
    ],
    ids=["shape", "nan", "integer"],
)
def test_structure_of_the_failure_is_named(change: object, word: str) -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    rows = Gate.prepare(workload).check(lambda x: change(workload.model(x)))  # type: ignore[operator]
    assert word in failures(rows)


def test_missing_output_is_refused() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    with pytest.raises(StepRefused, match="its outputs are"):
        gate.check(lambda x: {"hidden": x})
    with pytest.raises(StepRefused, match="raised ZeroDivisionError"):
        gate.check(lambda x: 1 / 0)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flip = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # the two best tokens are a hair apart: a tiny error swaps them
        values = x.clone()
        values[..., 1] = values[..., 0] - 1e-6
        if self.flip:
            values[..., 1] = values[..., 0] + 1e-6
        return {"logits": values}


def test_swapped_tokens_are_stopped_though_the_error_is_tiny() -> None:
    x = torch.rand(16, 8)
    x[..., 0] = 5
    model = Logits()
    gate = Gate.prepare(from_example(model, x))
    other = Logits()
    other.flip = True
    rows = {row.output: row for row in gate.check(other)}
    assert rows["logits"].passed and not rows["logits top-1"].passed


@dataclass
class Cache:
    """State that a call changes in place."""

    keys: Tensor
    position: Tensor


class Stateful(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        cache.keys.index_copy_(0, cache.position.view(1), x)
        cache.position.add_(1)
        return cache.keys.sum(0), cache


def test_state_in_the_inputs_is_restored_and_not_compared() -> None:
    cache = Cache(torch.zeros(4, 8), torch.tensor(1))
    workload = Workload(Stateful(), {"one": Inputs((torch.randn(1, 8), cache))})
    gate = Gate.prepare(workload)
    rows = gate.check(workload.model)
    assert [row.output for row in rows] == ["[0]"] and not failures(rows)
    assert int(cache.position) == 1 and not cache.keys.any()


def test_variations_keep_what_must_stay() -> None:
    ids = torch.arange(20).view(2, 10)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = Inputs((torch.randn(4, 4),), {"ids": ids, "mask": mask, "bias": torch.full((2, 2), float("-inf"))})
    example, varied = variation(inputs, 0), variation(inputs, 1)
    assert torch.equal(example[0], inputs.args[0])
    assert not torch.allclose(varied[0], inputs.args[0])
    assert not torch.equal(varied[1], ids) and torch.equal(varied[1].flatten().sort().values, ids.flatten())
    assert torch.equal(varied[2], mask) and torch.equal(varied[3], inputs.kwargs["bias"])
    again = variation(inputs, 1)
    assert all(torch.equal(a, b) for a, b in zip(varied, again, strict=True))


def test_holding_restores_after_an_error() -> None:
    inputs = Inputs((torch.ones(3),))
    with pytest.raises(ValueError), holding(inputs, [torch.zeros(3)]):
        assert not inputs.args[0].any()
        raise ValueError
    assert bool(inputs.args[0].all())
    assert torch.equal(call_outputs(lambda x: x * 2, inputs)["output"], torch.full((3,), 2.0))
