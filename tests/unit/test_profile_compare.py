"""Planted slow-downs are named from two profiles: real ones of the CPU, and rows as a GPU gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wavecrest import profile
from wavecrest.measure.workload import from_example
from wavecrest.profile.compare import causes
from wavecrest.profile.trace import OUTSIDE
from wavecrest.records import BucketProfile, OpTime


def row(
    name: str, category: str, ms: float, *, kernel: str = "", shapes: str = "64x64 float16", calls: int = 12
) -> OpTime:
    return OpTime(
        name=name, category=category, shapes=shapes, calls=calls, ms=ms, share=0.0, kernels=[kernel] if kernel else []
    )


def gpu(*ops: OpTime, idle: float = 0.1, launches: int = 100) -> BucketProfile:
    kernels = sum(op.ms for op in ops)
    return BucketProfile(
        bucket="b1",
        wall_ms=kernels + idle,
        kernel_ms=kernels,
        idle_ms=idle,
        launches=launches,
        categories=[],
        ops=list(ops),
        uncategorized=[],
    )


GEMM = row("aten::mm", "gemm", 3.0, kernel="nvjet_hsh_128x256")
FUSED = row("aten::scaled_dot_product_attention", "attention", 0.84, kernel="cudnn_generated_fort_native_sdpa")


def test_math_attention_is_named_with_its_dtype() -> None:
    math = [
        row(
            "aten::scaled_dot_product_attention",
            "attention",
            9.0,
            kernel="gemmSN_NN_kernel",
            shapes="192x512x64 float32",
        ),
        row(
            "aten::scaled_dot_product_attention",
            "attention",
            2.3,
            kernel="softmax_warp_forward",
            shapes="192x512 float32",
        ),
    ]
    (first,) = causes(gpu(GEMM, FUSED), gpu(GEMM, *math))
    assert first.kind == "math_attention"
    assert first.ms == pytest.approx(11.3 - 0.84)
    assert first.text == (
        "attention 0.84 → 11.3 ms: SDPA took the math path; gemmSN_NN_kernel (float32), softmax_warp_forward (float32) "
        "came, cudnn_generated_fort_native_sdpa went"
    )


def test_launch_gaps_are_named() -> None:
    (only,) = causes(gpu(GEMM, FUSED), gpu(GEMM, FUSED, idle=1.9, launches=340))
    assert only.text == "the device waits for the host 33% of the time (3% before), 340 launches a call (100 before)"
    assert only.ms == pytest.approx(1.8)


def test_gaps_inside_a_graph_are_nobody_s_wait_for_the_host() -> None:
    (only,) = causes(gpu(GEMM, FUSED, launches=3), gpu(GEMM, FUSED, idle=1.9, launches=3))
    assert only.kind == "launch_gaps"
    assert only.text == "the device has no work 33% of the time (3% before), between 24 kernels of a replayed graph"


def test_attention_that_a_compiler_has_written_out_is_named() -> None:
    products, softmax = row("aten::bmm", "gemm", 4.2), row("triton_per_fused__softmax_3", "normalisation", 1.1)
    first, *_ = causes(gpu(GEMM, FUSED), gpu(products, softmax))
    assert first.kind == "math_attention" and first.ms == pytest.approx(4.2 - 3.0 + 1.1 - 0.84)
    assert first.text == ("12 calls of SDPA are written out: products take 1.2 ms more, softmax and norms 1.1 ms more")


def test_attention_in_a_replayed_graph_is_not_written_out() -> None:
    """The graph has no calls of SDPA, and its kernels are those of before."""
    kernels = [row(OUTSIDE, "gemm", 3.4, kernel="nvjet_hsh_128x256"), row(OUTSIDE, "attention", 0.84)]
    found = causes(gpu(GEMM, FUSED), gpu(*kernels, launches=3))
    assert not any("written out" in cause.text for cause in found)


def test_copies_to_the_host_are_named() -> None:
    read = row("Memcpy DtoH (Device -> Pageable)", "memory", 0.01, calls=3)
    found = causes(gpu(GEMM, FUSED), gpu(GEMM, FUSED, read, idle=0.8))
    assert any("the host reads from the device 3 times a call (0 before)" in cause.text for cause in found)


def test_faster_and_equal_candidates_have_no_cause() -> None:
    base = gpu(GEMM, FUSED, idle=1.0)
    assert causes(base, base) == []
    assert causes(base, gpu(GEMM, FUSED, idle=0.1)) == []
    assert causes(base, gpu(row("aten::mm", "gemm", 2.0), FUSED, idle=1.0)) == []


def test_growth_below_the_floor_is_no_cause() -> None:
    assert causes(gpu(GEMM, FUSED), gpu(row("aten::mm", "gemm", 3.04, kernel="nvjet_hsh_128x256"), FUSED)) == []


class Block(nn.Module):
    def __init__(self, slow: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.slow = nn.Linear(256, 256), slow

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        heads = y.unflatten(-1, (4, 64)).transpose(1, 2)
        return self.slow(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2))


PLANTED = {
    "float64": (lambda x: (x.double() @ x.double().transpose(1, 2) @ x.double()).float(), "(float64)"),
    "copies": (lambda x: torch.cat([x] * 64, 1).clone()[:, : x.shape[1]], "memory "),
    "a slow norm": (lambda x: F.layer_norm(x.repeat(1, 16, 1), (256,))[:, : x.shape[1]], "native_layer_norm came"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_slow_downs_on_the_cpu(planted: str) -> None:
    slow, expected = PLANTED[planted]
    example = torch.randn(2, 128, 256)
    base, new = (profile.profile_workload(from_example(Block(f), example))[0] for f in (lambda x: x, slow))
    assert any(expected in cause.text for cause in causes(base, new)), causes(base, new)
