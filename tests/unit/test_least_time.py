"""The least time of a call: what is counted, and what becomes of a time below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.measure.workload import from_example
from wavecrest.profile.least_time import LeastTimes, Work, beaten_ceiling, least_work
from wavecrest.profile.roofline import cache_bytes
from wavecrest.records import BucketProfile, Ceilings, OpTime

# 1 GB/s and 1 TFLOP/s
ONE = Ceilings(source="made up", bandwidth=1.0, peak={"float32": 1.0})


class Tokens(nn.Module):
    """An embedding, two linear layers over a buffer's product, and one weight read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(1000, 64), nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = self.down(self.up(x))
        scores: Tensor = x @ x.transpose(-1, -2)
        return scores


def test_weights_count_once_flops_each_time_and_embeddings_not() -> None:
    found = least_work(from_example(Tokens(), torch.randint(0, 1000, (2, 16))), "default")
    weights = 64 * 128 + 128 + 128 * 64
    assert found.bytes == 4 * (weights + 2 * 16 * 16)
    # the product of two activations may need half: causal attention does
    assert found.flops == {"float32": 2 * (2 * 32 * 64 * 128 + 2 * 32 * 128 * 64)}


def test_convolutions_count_their_weights_alone() -> None:
    found = least_work(from_example(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8)), "default")
    assert found.bytes == 4 * (8 * 3 * 9 + 8 + 8 * 36) and found.flops == {}


def test_an_answer_that_is_an_input_or_a_weight_costs_nothing() -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.weight

    assert least_work(from_example(Returns(4, 4), torch.randn(2, 4)), "default") == Work()


@pytest.mark.parametrize(
    ("work", "cache", "lower", "ms"),
    [
        (Work(2_000_000), 0, False, 2.0),
        (Work(2_000_000), 500_000, False, 1.5),
        (Work(2_000_000), 3_000_000, False, 0.0),
        (Work(2_000_000), 0, True, 1.0),
        (Work(2_000_000, {"float32": 5e9}), 0, False, 5.0),
        (Work(2_000_000, {"float32": 5e9}), 0, True, 1.0),
        (Work(0, {"bfloat16": 5e9}), 0, False, 0.0),
    ],
    ids=["bytes", "in part in the cache", "all in the cache", "16 bits", "flops", "flops of 16 bits", "unknown peak"],
)
def test_least_time(work: Work, cache: int, lower: bool, ms: float) -> None:
    assert work.least_ms(ONE, cache, lower_precision=lower) == pytest.approx(ms / 1.1)


def test_a_time_below_is_impossible_unless_the_ceiling_was_measured_too_low() -> None:
    asked: list[int] = []

    def again(factor: float) -> Ceilings:
        asked.append(1)
        return ONE.model_copy(update={"bandwidth": factor})

    def times(factor: float) -> LeastTimes:
        return LeastTimes({"a": Work(2_000_000)}, lambda: again(factor), ONE, 0)

    assert times(1.0).impossible({"a": 1.9}) == "" and not asked
    assert times(1.0).impossible({"a": 1.0}).startswith("faster than the hardware allows: bucket a took 1.0000 ms")
    found = times(4.0)
    assert found.impossible({"a": 1.0}) == "" and found.of("a") == pytest.approx(0.5 / 1.1) and len(asked) == 2
    assert times(1.0).impossible({"other": 1e-9}) == ""
    assert LeastTimes({"a": Work(2_000_000)}, lambda: None, None, 0).impossible({"a": 1e-9}) == ""


def profile(percent: float | None, bound: Any = "memory") -> list[BucketProfile]:
    op = OpTime(name="addmm", category="gemm", shapes="", calls=1, ms=1, share=1, roofline_percent=percent, bound=bound)
    return [
        BucketProfile(
            bucket="a", wall_ms=1, kernel_ms=1, idle_ms=None, launches=1, categories=[], ops=[op], uncategorized=[]
        )
    ]


def test_an_operation_beyond_its_ceiling_is_named() -> None:
    assert beaten_ceiling(profile(2049.0)) == "addmm reaches 2,049 % of it"
    assert beaten_ceiling(profile(300.0, "cache")) == ""
    assert beaten_ceiling(profile(109.0)) == beaten_ceiling(profile(None)) == beaten_ceiling([]) == ""


def test_the_cache_has_a_size() -> None:
    assert cache_bytes("cpu") >= 1 << 20
