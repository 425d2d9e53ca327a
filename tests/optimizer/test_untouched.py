"""The user's model and inputs after a step that wrote to them: named, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.errors import EnvironmentProblem
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import Linear
from wavecrest.ops import pack
from wavecrest.optimizer.gate import untouched
from wavecrest.optimizer.gate.inputs import Variations
from wavecrest.optimizer.gate.site import Site
from wavecrest.optimizer.gate.snapshot import Snapshot
from wavecrest.optimizer.gate.untouched import ROW, Untouched, checksum, checksums


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2))
        self.names = ["a", "b"]

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def workload() -> Workload:
    torch.manual_seed(0)
    return from_example(Net(), torch.randn(2, 4))


def no_grad_write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor[0] += 1


# how somebody changes a workload, and what it is called
CHANGES: dict[str, tuple[Callable[[Workload], Any], str]] = {
    "a weight": (lambda w: no_grad_write(w.model.linear.weight), "parameter linear.weight"),
    "a weight's memory": (
        lambda w: setattr(w.model.linear.weight, "data", w.model.linear.weight.data.clone()), "parameter linear.weight"
    ),
    "a weight's dtype": (
        lambda w: setattr(w.model.linear.bias, "data", w.model.linear.bias.data.double()), "parameter linear.bias"
    ),
    "a flag of gradients": (lambda w: w.model.linear.bias.requires_grad_(False), "parameter linear.bias"),
    "a buffer": (lambda w: w.model.count.add_(1), "buffer count"),
    "an attribute": (lambda w: setattr(w.model.linear, "extra", 1), "attribute linear.extra"),
    "the mode": (lambda w: w.model.linear.eval(), "attribute linear.training"),
    "a list": (lambda w: w.model.names.append("c"), "attribute names"),
    "a hook": (lambda w: w.model.linear.register_forward_hook(print), "attribute linear._forward_hooks"),
    "a module": (lambda w: setattr(w.model, "linear", nn.Identity()), "attribute _modules"),
    "an input": (lambda w: w.buckets["default"].args[0].zero_(), "input args[0] of bucket default"),
}  # fmt: skip


def facts(workload: Workload) -> list[Any]:
    """All that CHANGES change."""
    model = workload.model.train()
    linear = model.linear
    return [
        *((one.detach().clone(), one.dtype, one.data_ptr(), one.requires_grad) for one in model.parameters()),
        model.count.clone(), workload.buckets["default"].args[0].clone(), list(model.names),
        sorted(vars(linear)), len(linear._forward_hooks), type(linear),
    ]  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_named_and_put_back(what: str) -> None:
    change, name = CHANGES[what]
    given = workload()
    given.model.train()
    before = facts(given)
    held = Untouched(given)
    assert held.put_back() == []
    change(given)
    assert name in held.put_back()
    assert held.put_back() == [] and given.model.linear.training
    for one, other in zip(before, facts(given), strict=True):
        if isinstance(one, tuple):
            assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
        else:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_originals_own_writes_are_put_back_and_nobody_is_blamed() -> None:
    given = workload()
    held = Untouched(given)
    given.model.count.add_(1)
    held.learn()
    assert held.own_writes == ["buffer count"] and not given.model.count.any()
    given.model.count.add_(1)
    assert held.put_back() == [] and not given.model.count.any()


def test_without_memory_for_a_copy_a_changed_weight_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched, "_free_memory", lambda _device: 0)
    given = workload()
    held = Untouched(given)
    # buffers are copied all the same
    given.model.count.add_(1)
    assert held.put_back() == ["buffer count"] and not given.model.count.any()
    no_grad_write(given.model.linear.weight)
    with pytest.raises(EnvironmentProblem, match=r"changed parameter linear\.weight .*load the model again"):
        held.put_back()


def test_a_checksum_sees_what_moves_within_a_tensor() -> None:
    """Rows and columns that change places leave the sums of one direction as they were."""
    tensor = torch.randint(0, 100, (3 * ROW + 5,), dtype=torch.int32)
    rows, columns, rest = tensor.clone(), tensor.clone(), tensor.clone()
    rows[:ROW], rows[ROW : 2 * ROW] = tensor[ROW : 2 * ROW], tensor[:ROW]
    whole = columns[: 3 * ROW].view(3, ROW)
    whole[:, [2, 3]] = whole[:, [3, 2]].clone()
    rest[-1] += 1
    found = [checksum(one) for one in (tensor, rows, columns, rest)]
    assert len(set(found)) == 4 and checksum(tensor.clone()) == found[0]


def test_checksums_of_a_model_leave_out_what_has_no_bits_to_read() -> None:
    """PyTorch ends the process where quantized memory is viewed as whole numbers."""
    model = nn.Linear(4, 4)
    others = {
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "sparse": torch.eye(4).to_sparse(),
        "meta": torch.empty(4, device="meta"), "number": torch.tensor(3), "none": torch.empty(0),
        "expanded": torch.ones(1, 4).expand(3, 4), "complex": torch.ones(3, dtype=torch.complex64),
    }  # fmt: skip
    for name, tensor in others.items():
        model.register_buffer(name, tensor)
    before = checksums(model)
    read = ["number", "none", "expanded", "complex"]
    assert list(before) == ["parameter weight", "parameter bias", *(f"buffer {name}" for name in read)]
    with torch.no_grad():
        model.bias[2] += 1
    model.number += 1
    changed = [name for name, digest in checksums(model).items() if digest != before[name]]
    assert changed == ["parameter bias", "buffer number"]


def test_packed_weights_are_put_back_by_their_parts() -> None:
    torch.manual_seed(0)
    weight = pack(torch.randn(4, 64), "int4", symmetric=False)
    model = nn.Sequential(Linear.from_weight(weight), nn.Linear(4, 2))
    work = from_example(model, torch.randn(2, 64))
    before = model(work.buckets["default"].args[0])
    held = Untouched(work)
    assert held.put_back() == []
    site = Site(model, "default", "default", work.buckets["default"], Variations(work.buckets["default"], 0))
    for part in ("stored", "scale", "zero"):
        no_grad_write(getattr(model[0].weight, part))
        assert held.put_back() == [f"parameter 0.weight.{part}"]
        no_grad_write(getattr(model[0].weight, part))
        site.put_back()
    assert held.put_back() == [] and torch.equal(model(work.buckets["default"].args[0]), before)


class Counter:
    """An object among the arguments, with a value of its own."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)


def test_attributes_that_a_call_adds_to_an_argument_are_taken_away() -> None:
    counter = Counter()
    kept = counter.value
    snapshot = Snapshot([("counter", counter)])
    counter.more, counter.value = torch.ones(1), torch.ones(2)  # type: ignore[attr-defined]
    snapshot.restore_containers()
    assert vars(counter) == {"value": kept}
