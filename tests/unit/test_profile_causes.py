"""Planted slow-downs are named from one profile of the CPU and from rows as a GPU gives them, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.unit.test_profile_compare import FUSED, GEMM, gpu, row
from wavecrest import profile
from wavecrest.graphs.breaks import find_breaks
from wavecrest.measure.workload import Workload, from_example
from wavecrest.profile.causes import causes_of, masked_calls, sdpa_backends
from wavecrest.records import CauseKind, ProfileRecord


class Block(nn.Module):
    """Attention after a projection, with what a subclass plants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(256, 256)
        self.register_buffer("scale", torch.ones(256))
        self.register_buffer("mask", torch.ones(1, 1, 128, 128, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.before(self.proj(x)).unflatten(-1, (4, 64)).transpose(1, 2)
        return self.attention(heads).transpose(1, 2).flatten(-2)

    def before(self, x: Tensor) -> Tensor:
        return x

    def attention(self, heads: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(heads, heads, heads)


class DenseMask(Block):
    def attention(self, heads: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.mask)


class MathSDPA(Block):
    def attention(self, heads: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().attention(heads)


class Float64Constant(Block):
    def before(self, x: Tensor) -> Tensor:
        # float64 by type promotion, as a constant made from a NumPy array is
        return (x * self.scale.double()).sin().exp().float()


class HostSync(Block):
    def before(self, x: Tensor) -> Tensor:
        return x / 2 if x.abs().amax().item() > 1e6 else x


class GraphBreak(Block):
    def before(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


PLANTED: dict[str, tuple[type[Block], CauseKind, str]] = {
    "a dense mask": (DenseMask, "dense_mask", "attention gets a mask that is written out (1x1x128x128) in 1 call:"),
    "a forced math SDPA": (MathSDPA, "math_attention", "SDPA takes the math path in 1 of 1 call:"),
    "a float64 constant": (Float64Constant, "float64", "float64 in "),
    "a host sync": (HostSync, "host_sync", "a value is read into Python 1 time a call"),
    "a graph break": (GraphBreak, "graph_breaks", "graph break at "),
}


def workload(block: Block) -> Workload:
    return from_example(block.eval(), torch.randn(2, 128, 256))


def profiled(block: Block) -> ProfileRecord:
    made = workload(block)
    found = find_breaks(made.model, made.buckets)
    return profile.record(made, profile.profile_workload(made, calls=2), ceilings=None, breaks=found.breaks)


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_slow_downs_are_named(planted: str) -> None:
    block, kind, text = PLANTED[planted]
    causes = profiled(block()).causes
    assert any(cause.kind == kind and cause.text.startswith(text) for cause in causes), causes
    # a read of the host breaks the graph, too; nothing else is named
    assert {cause.kind for cause in causes} <= {kind, "graph_breaks"}


def test_nothing_is_named_in_a_plain_model() -> None:
    assert profiled(Block()).causes == []


def test_the_backends_of_sdpa_are_counted() -> None:
    backends = {block: profiled(block()).buckets[0] for block in (Block, MathSDPA, DenseMask)}
    assert [dict(sdpa_backends(bucket)) for bucket in backends.values()] == [{"flash": 1}, {"math": 1}, {"flash": 1}]
    assert [masked_calls(bucket) for bucket in backends.values()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("pytorch_flash::flash_fwd_kernel", "flash"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "efficient"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "cudnn"),
        ("softmax_warp_forward", "math"),
        ("attn_fwd", "flash"),
        ("something_else", "unknown"),
    ],
)
def test_backends_by_their_kernels(kernel: str, backend: str) -> None:
    call = row("aten::scaled_dot_product_attention", "attention", 1.0, kernel=kernel)
    assert dict(sdpa_backends(gpu(GEMM, call))) == {backend: 12}


def test_what_a_gpu_shows() -> None:
    nchw = row("aten::cudnn_convolution", "memory", 0.6, kernel="cudnn::ops::nchwToNhwcKernel")
    read = row("Memcpy DtoH (Device -> Pageable)", "memory", 0.01, calls=3)
    causes = causes_of(gpu(GEMM, FUSED, nchw, read, idle=2.0, launches=340))
    assert [cause.kind for cause in causes] == ["launch_gaps", "layout", "host_sync"]
    assert causes[0].text == "the device waits for the host 31% of the time, 340 launches a call"
    assert causes[0].ms == pytest.approx(2.0) and causes[1].text == "copies between memory layouts take 0.6 ms"
    (inside,) = causes_of(gpu(GEMM, FUSED, idle=2.0, launches=3))
    assert inside.text == "the device has no work 34% of the time, between 24 kernels of a replayed graph"
    assert "the host waits for the device" in causes[2].text and " 3 times" in causes[2].text
    assert causes_of(gpu(GEMM, FUSED)) == []
