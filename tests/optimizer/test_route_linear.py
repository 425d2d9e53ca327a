"""Linear layers go where the table says, layer by layer and bucket by bucket, and the report says which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.toy import counting
from wavecrest import hardware
from wavecrest import nn as ours
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import Op
from wavecrest.measure.workload import Buckets, Workload, from_example
from wavecrest.nn.fused_weights import FusedSlice
from wavecrest.ops._gemm.call import linear_call
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.route_linear import ROUTED_GAIN
from wavecrest.records import BucketProfile, CategoryTime


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n) for n in (16, 8, 8))
        self.out = nn.Linear(32, 24, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))


@pytest.fixture
def op() -> Op:
    return registry.get("gemm")


@pytest.fixture(autouse=True)
def calls(op: Op) -> Iterator[list[tuple[int, ...]]]:
    """Calls that "planted" ran, a backend of gemm in place of wavecrest's kernel."""
    with counting(op, priority=1) as made:
        yield made


def _pin(op: Op, rows: int, layer: nn.Module) -> None:
    x = torch.randn(rows, layer.weight.shape[1])  # type: ignore[union-attr, index]
    with torch.no_grad():
        key = op.key(linear_call(x, layer.weight, layer.bias))  # type: ignore[arg-type]
    op.pin(key, "planted", None, "exact", "measured 1.0 µs, native 2.0 µs")


def _context(workload: Workload) -> StepContext:
    return StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))


def test_only_what_the_table_names_is_routed(op: Op, calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    workload = from_example(model, Buckets(few=torch.randn(4, 16), many=torch.randn(40, 16)))
    step = step_by_id("route_linear")
    nothing = step.find(_context(workload))
    assert not nothing.sites and "PyTorch's kernel is the choice for every layer" in nothing.note
    assert "few: 4×16×16 float32 torch (default)" in nothing.note and "unused" not in nothing.note

    _pin(op, 4, model.out)
    found = step.find(_context(workload))
    assert found.sites == ("out",)
    assert "1 × few: 4×24×32 float32 planted (exact)" in found.note and "1 × many: 64×24×32 float32 torch" in found.note
    (routed,) = [row for row in found.params["routes"] if row["backend"] == "planted"]
    assert (routed["bucket"], routed["layer"], routed["rows"]) == ("few", "out", 4)
    assert routed["reason"] == "measured 1.0 µs, native 2.0 µs" and routed["source"] == "exact"

    # of all products a small part goes elsewhere, and so much of a GEMM's gain is promised
    work = {"few": 4 * (16 * (16 + 8 + 8) + 24 * 32), "many": 64 * (16 * (16 + 8 + 8) + 24 * 32)}
    part = 4 * 24 * 32 / sum(work.values())
    context = _context(workload)
    row = CategoryTime(category="gemm", ms=1.0, share=1.0, calls=4)
    context.profile = [
        BucketProfile(
            bucket=name,
            wall_ms=1.0,
            kernel_ms=1.0,
            idle_ms=None,
            launches=4,
            categories=[row],
            ops=[],
            uncategorized=[],
        )
        for name in work
    ]
    predicted = step.predict(found, context)
    assert predicted.ratio == pytest.approx(1 / (1 - ROUTED_GAIN * part))
    assert predicted.basis == f"measured rows for 1 layers, {part:.0%} of the products; GEMM is 100% of the time"

    made = build(model, AppliedSteps().plus(step, found.params))
    assert isinstance(made.out, ours.Linear) and made.out.weight is model.out.weight
    assert type(made.q_proj) is nn.Linear and type(model.out) is nn.Linear
    assert not failures(Gate.prepare(workload).check(made))
    calls.clear()
    with torch.no_grad():
        for rows in (4, 40):
            x = torch.randn(rows, 16)
            assert torch.allclose(made(x), model(x), atol=1e-6)
    # the bucket that the table names, and no other
    assert calls == [(4, 32)]


def test_the_wide_product_of_fused_projections_is_routed(op: Op, calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    workload = from_example(model, torch.randn(4, 16))
    fuse = step_by_id("fuse_qkv")
    applied = AppliedSteps().plus(fuse, fuse.find(_context(workload)).params)
    fused = build(model, applied)
    assert isinstance(fused.q_proj, FusedSlice)
    _pin(op, 4, fused.q_proj.fused)
    step = step_by_id("route_linear")
    found = step.find(StepContext(workload, hardware.cpu(), model=fused))
    assert found.sites == ("q_proj",)
    made = build(model, applied.plus(step, found.params))
    calls.clear()
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert torch.allclose(made(x), model(x), atol=1e-6)
    assert calls == [(4, 16)]


def test_conv1d_is_a_linear_layer_with_its_weight_transposed(op: Op, calls: list[tuple[int, ...]]) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(conv1d(24, 16), nn.ReLU(), conv1d(8, 24)).eval()
    workload = from_example(model, torch.randn(4, 16))
    _pin(op, 4, nn.Linear(16, 24))
    step = step_by_id("route_linear")
    found = step.find(_context(workload))
    assert found.sites == ("0",)
    made = build(model, AppliedSteps().plus(step, found.params))
    assert type(made[0]) is ours.Linear and made[0].bias is model[0].bias and type(made[2]) is conv1d
    calls.clear()
    assert not failures(Gate.prepare(workload).check(made))
    assert calls


def test_no_linear_layer(op: Op) -> None:
    workload = from_example(nn.Sequential(nn.ReLU()), torch.randn(4, 16))
    assert step_by_id("route_linear").find(_context(workload)).note == (
        "no Linear layer is called that another step has not replaced"
    )
