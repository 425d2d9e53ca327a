"""benchmarks/quantized.py: the bytes that a call reads, and steps by name."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from benchmarks.quantized import LOGITS, made, size_of
from benchmarks.zoo.registry import Site, entries
from torch import nn

from wavecrest import quantize
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import from_example


def options(steps: str) -> Namespace:
    return Namespace(steps=steps, no_original=True, budget=40.0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(100, 64), nn.Linear(64, 128, bias=False), nn.Linear(64, 100)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids) + self.up(self.table(ids))[..., :64])


def test_weights_count_once_packed_ones_as_stored_and_tables_where_they_are_multiplied() -> None:
    model, ids = Words(), torch.zeros(2, 3, dtype=torch.int64)
    head, up, given = 4 * (100 * 64 + 100), 4 * 128 * 64, 8 * 6
    assert size_of(from_example(model, ids)) == head + up + given
    quantize(model, "int8")
    # one byte a weight and a float32 scale a row; the tied layer keeps its precision
    assert size_of(from_example(model, ids)) == head + 128 * 64 + 4 * 128 + given
    model.head.weight = nn.Parameter(torch.zeros(100, 64))
    assert size_of(from_example(nn.Sequential(model.table), ids)) == given


def test_steps_by_name_change_a_quantized_model_and_a_step_without_sites_is_refused() -> None:
    entry = entries()["llama-8b-decode"]
    base, finish = entry.module(Site("cpu", entry.size("cpu", tiny=True), True))
    workload, model, row = made(base, finish, "int8", options(steps="fuse_qkv,fuse_gate_up"))
    (bucket,) = workload.buckets
    assert row["kept"] == ["fuse_qkv", "fuse_gate_up"] and not row["captured"] and row["layers"] > 0
    before, after = (sum(type(one).__name__ == "Linear" for one in each.modules()) for each in (workload.model, model))
    assert after < before
    torch.testing.assert_close(workload.run(bucket, model), workload.run(bucket))
    # joined once, there is nothing left to join
    with pytest.raises(StepRefused, match=r"^fuse_qkv: "):
        made(base, finish, "int8", options(steps="fuse_qkv,fuse_qkv"))


def test_logits_are_quantized_where_they_are_asked_for() -> None:
    entry = entries()["llama-8b-decode"]
    base, finish = entry.module(Site("cpu", entry.size("cpu", tiny=True), True))
    _, _, plain = made(base, finish, "int8", options(steps="fuse_qkv"))
    _, _, all_ = made(base, finish, "int8" + LOGITS, options(steps="fuse_qkv"))
    assert (plain["variant"], all_["variant"]) == ("int8", "int8 with logits")
    assert all_["layers"] == plain["layers"] + 1 and all_["bytes"] < plain["bytes"]
