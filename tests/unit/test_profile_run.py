"""A real torch.profiler run of small models on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wavecrest import profile, records
from wavecrest.errors import InvalidArgument, WorkloadError
from wavecrest.measure.workload import Buckets, Workload, from_example

CEILINGS = records.Ceilings(source="made up for the test", bandwidth=100.0, peak={"float32": 1.0})


class Tiny(nn.Module):
    """A linear layer, attention, a layer norm, GELU and a softmax; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(64, 96), nn.LayerNorm(32)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.proj(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return torch.softmax(F.gelu(self.norm(mixed)), -1)


@pytest.fixture(scope="module")
def workload() -> Workload:
    torch.manual_seed(0)
    return from_example(Tiny(), Buckets(small=torch.randn(2, 8, 64), big=torch.randn(4, 32, 64)), name="tiny")


@pytest.fixture(scope="module")
def buckets(workload: Workload) -> list[records.BucketProfile]:
    return profile.profile_workload(workload, calls=3, ceilings=CEILINGS)


def test_every_bucket_is_profiled_with_its_own_shapes(buckets: list[records.BucketProfile]) -> None:
    assert [bucket.bucket for bucket in buckets] == ["small", "big"]
    for bucket, rows in zip(buckets, (16, 128), strict=True):
        products = [op for op in bucket.ops if op.category == "gemm" and op.flops is not None]
        assert len(products) == 1
        assert products[0].flops == 2 * rows * 64 * 96
        assert f"{rows}x64" in products[0].shapes
        # one call of the product in each call of the model, whatever was traced
        assert products[0].calls == 1


def test_the_categories_of_the_model_are_found(buckets: list[records.BucketProfile]) -> None:
    for bucket in buckets:
        found = {entry.category for entry in bucket.categories}
        assert {"gemm", "attention", "normalisation", "elementwise", "memory", "other"} == found
        assert sum(entry.share for entry in bucket.categories) == pytest.approx(1.0)
        assert sum(op.ms for op in bucket.ops) == pytest.approx(sum(entry.ms for entry in bucket.categories))
        assert sum(op.ms for op in bucket.ops) == pytest.approx(bucket.kernel_ms, rel=1e-3)
        # on the CPU only the time between the ops is unnamed
        assert bucket.uncategorized == ["(outside any op)"]


def test_cpu_has_no_idle_time_and_no_launches(buckets: list[records.BucketProfile]) -> None:
    for bucket in buckets:
        assert bucket.idle_ms is None and bucket.launches == 0
        assert bucket.wall_ms > 0


def test_attention_work_counts_once_although_two_ops_know_it(buckets: list[records.BucketProfile]) -> None:
    known = [op for op in buckets[0].ops if op.category == "attention" and op.flops]
    assert [op.flops for op in known] == [2 * 2 * 2 * 8 * 8 * 32]
    assert known[0].roofline_percent is not None and known[0].roofline_percent > 0


def test_percentages_follow_the_ceilings_given(workload: Workload, buckets: list[records.BucketProfile]) -> None:
    product = next(op for op in buckets[1].ops if op.category == "gemm" and op.flops is not None)
    assert product.flops is not None and product.bytes is not None
    least_ms = max(product.flops / 1e12, product.bytes / 100e9) * 1e3
    assert product.roofline_percent == pytest.approx(100 * least_ms / product.ms, rel=1e-6)
    without = profile.profile_workload(workload, calls=1)
    assert all(op.roofline_percent is None for bucket in without for op in bucket.ops)


def test_a_function_is_profiled_instead_of_the_model(workload: Workload) -> None:
    model = workload.model
    assert isinstance(model, Tiny)
    before = model.calls
    found = profile.profile_workload(workload, function=lambda x: x @ x.mT, calls=1)
    assert model.calls == before
    assert {op.category for op in found[0].ops} <= {"gemm", "memory", "other"}
    assert any(op.name == "aten::bmm" for op in found[0].ops)


def test_traces_are_kept_one_a_bucket(tmp_path: Path) -> None:
    named = from_example(nn.Linear(4, 4), Buckets(**{"B=1 S=8/x": torch.randn(1, 4)}))
    profile.profile_workload(named, calls=1, traces=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace_B-1-S-8-x.json"]
    assert json.loads(next(tmp_path.iterdir()).read_text())["traceEvents"]


def test_record_survives_a_round_trip(tmp_path: Path, workload: Workload, buckets: list[records.BucketProfile]) -> None:
    found = records.GraphBreak(kind="break", file="m.py", line=3, reason="print")
    made = profile.record(workload, buckets, ceilings=CEILINGS, graphs=2, breaks=[found], breaks_note="why")
    records.save(made, tmp_path / "profile.json")
    assert records.load_as(tmp_path / "profile.json", records.ProfileRecord) == made
    assert (made.workload, made.graphs, made.breaks, made.breaks_note) == ("tiny", 2, [found], "why")
    assert made.ceilings == CEILINGS


def test_a_model_that_raises_is_named_with_its_bucket() -> None:
    broken = from_example(nn.Linear(4, 4), Buckets(good=torch.randn(1, 4), bad=torch.randn(1, 5)))
    with pytest.raises(WorkloadError, match=r"bucket bad.*RuntimeError"):
        profile.profile_workload(broken, calls=1)


@pytest.mark.parametrize(
    ("device", "wall", "calls", "traced"),
    [("cuda:0", 9.0, None, 5), ("cuda:0", 11.0, None, 2), ("cpu", 11.0, None, 5), ("cuda:0", 11.0, 4, 4)],
)
def test_of_a_long_call_on_a_gpu_fewer_are_traced(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, device: str, wall: float, calls: int | None, traced: int
) -> None:
    """The events of five calls of an xLSTM in eager took 10 s to read."""
    seen: list[int] = []
    monkeypatch.setattr(profile, "_wall", lambda work, where, count: wall)
    monkeypatch.setattr(profile, "_export", lambda work, where, count, path: seen.append(count))
    monkeypatch.setattr(profile.trace, "load", lambda path, own: [])
    monkeypatch.setattr(profile.trace, "summarize", lambda events, ceilings: None)
    monkeypatch.setattr(profile, "_profile", lambda *_: None)
    other: Any = SimpleNamespace(device=device, buckets=workload.buckets)
    monkeypatch.setattr(profile, "Call", lambda *_: None)
    profile.profile_workload(other, calls=calls, ceilings=CEILINGS)
    assert seen == [traced, traced]


def test_at_least_one_call_is_needed(workload: Workload) -> None:
    with pytest.raises(InvalidArgument, match="at least one call"):
        profile.profile_workload(workload, calls=0)
