"""sm_90's kernel of block scales: values on such a GPU; what it does with tiles, scales and barriers anywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.gemm_harness import BF16, E4M3, E5M2, F16, F32, Watch, assert_right, moved, random, scales, watched
from tests.ops.hopper_harness import activate_on_cpu, gemm_on_sm_90
from tests.ops.op_harness import name, same_bits, shape_id
from wavecrest import hardware
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm import kernel_hopper, kernel_hopper_blocks
from wavecrest.ops._gemm import launch_hopper_blocks as launch_blocks
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops._gemm.reference import values_of_a, values_of_b
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common import launcher as _launcher
from wavecrest.ops.common import triton as _triton
from wavecrest.ops.common.activation import ACTIVATIONS

BLOCKS = launch_blocks.NAME
SM_90 = ARCHS["sm_90"]


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.fixture
def hopper() -> AnyOp:
    return gemm_on_sm_90()


def blocked(M: int, N: int, K: int, device: str = "cuda", **more: Any) -> GemmCall:
    """a [M, K] and a weight [N, K] with scales up to eight times apart: products of about 1."""
    a = random(M, K, dtype=E4M3, device=device)
    b = random(N, K, dtype=E4M3, device=device, seed=1)
    k, n = -(-K // 128), -(-N // 128)
    scale_b = scales(n, k, device=device, seed=1, size=max(1, K) ** -0.5).mT
    return GemmCall(a, b.mT, scale_a=scales(M, k, device=device), scale_b=scale_b, **more)


def shaped(M: int, N: int, K: int, **more: Any) -> GemmCall:
    """As `blocked`, without memory."""
    a, b = (torch.empty(rows, K, dtype=E4M3, device="meta") for rows in (M, N))
    k, n = -(-K // 128), -(-N // 128)
    scale_a, scale_b = torch.empty(M, k, device="meta"), torch.empty(n, k, device="meta").mT
    return GemmCall(a, b.mT, scale_a=scale_a, scale_b=scale_b, **more)


def calls(M: int, N: int, K: int, device: str) -> list[GemmCall]:
    """Each kind of end, and scales of other strides."""
    bias = random(2 * N, dtype=F16, device=device, seed=2)[::2]
    found = [
        blocked(M, N, K, device),
        blocked(M, N, K, device, bias=bias, activation="gelu", out_dtype=F16),
        blocked(M, N, K, device, out_dtype=F32, activation="leaky_relu", slope=0.25),
    ]
    if N % 128 == 0:
        both = random(2 * N, device=device, seed=3)
        found += [blocked(M, 2 * N, K, device, activation="silu_and_mul", bias=both)]
    call = found[0]
    assert call.scale_a is not None and call.scale_b is not None
    across = moved(call.scale_a.mT.contiguous().mT, device), moved(call.scale_b.contiguous(), device)
    return [*found, call._replace(scale_a=across[0], scale_b=across[1])]


# less than a tile, with K that fills no second block; edges; more tiles than programs; whole blocks of columns, and
# many of K
SHAPES = ((1, 8, 144), (5, 40, 192), (129, 136, 272), (1000, 384, 528), (4100, 1032, 1040), (300, 2304, 4096))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_values(shape: tuple[int, ...], hopper: AnyOp) -> None:
    for call in calls(*shape, "cuda"):
        assert_right(BLOCKS, call)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 256, 2064), (100, 256, 4096), (1000, 768, 528)], ids=shape_id)
@pytest.mark.parametrize("out", [BF16, F32], ids=name)
def test_configurations(out: torch.dtype, shape: tuple[int, ...], hopper: AnyOp) -> None:
    for activation in (None, "silu_and_mul"):
        call = blocked(*shape, activation=activation, out_dtype=out)
        tried = list(space.blocks_space(hopper.key(call), SM_90))
        by_parts: dict[int, list[Tensor]] = {}
        for one in tried:
            by_parts.setdefault(one["SPLIT_K"], []).append(assert_right(BLOCKS, call, one))
        # a result's products are added in one order for one number of parts
        assert all(same_bits(one, same[0]) for same in by_parts.values() for one in same)


@pytest.mark.gpu
def test_the_same_bits_each_time_and_in_a_graph(hopper: AnyOp) -> None:
    for call in (blocked(1500, 1032, 528), blocked(16, 1024, 4096)):
        hopper.force(BLOCKS)
        try:
            first = hopper(call)
            assert all(torch.equal(hopper(call), first) for _ in range(5))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = hopper(call)
            for seed in (5, 6):
                call.a.copy_(random(*call.a.shape, dtype=E4M3, device="cuda", seed=seed))
                result.fill_(math.nan)
                graph.replay()
                assert torch.equal(result, hopper(call))
        finally:
            hopper.force(None)


@pytest.mark.gpu
def test_in_a_compiled_function(hopper: AnyOp) -> None:
    """As one operation, which finds the pinned kernel when it runs."""
    call = blocked(300, 256, 528)
    hopper.pin(hopper.key(call), BLOCKS, None, "user", "for this test")
    try:
        wanted = 2 * hopper.run(BLOCKS, call)
        with torch.no_grad():
            layer = torch.compile(lambda a: 2 * hopper(call._replace(a=a)), fullgraph=True)
            assert same_bits(layer(call.a), wanted)
    finally:
        hopper.unpin()


def stand_in(call: GemmCall, config: Config, programs: int, monkeypatch: pytest.MonkeyPatch, **planted: str) -> Tensor:
    """A call with the kernel's own text on a CPU; `planted`: what it says, and what it says instead."""
    y = torch.full(call.shape, math.nan, dtype=call.dtype)
    parts = launch_blocks.parts(call, config)
    sums = y if parts is None else torch.full(parts, math.nan)
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "tile_descriptor", gluon.Descriptor)
        first, *second = launch_blocks.launches(call, y, sums, config, SM_90)
    kernels = gluon.Kernels(
        Path(kernel_hopper_blocks.__file__),
        planted,
        beside=Path(kernel_hopper.__file__),
        activate=activate_on_cpu,
        NONE=0,
    )
    constants = {name: value for name, value in config.kwargs.items() if not name.startswith("num_")}
    args = [gluon.Pointer(one) if isinstance(one, Tensor) else one for one in first.args]
    kernels.run("_hopper_blocks_kernel", min(programs, *first.grid), *args, **first.constants, **constants)
    for added in second:
        _launcher.starter(added, call.a.device)(*(one for one in added.args if isinstance(one, Tensor)))
    return y


def definition(call: GemmCall) -> Tensor:
    """act((scale_a · a) @ (scale_b · b) + bias) in float64, its second half in place of act's where it is gated."""
    y = values_of_a(call).double() @ values_of_b(call).double()
    if call.bias is not None:
        y = y + call.bias.double()
    gate, up = y.chunk(2, -1) if call.activation in GATED else (y, 1.0)
    named = GATED.get(str(call.activation), call.activation)
    return activate_on_cpu(gate, call.slope, ACTIVATIONS[named] if named else 0) * up


def right(found: Tensor, call: GemmCall) -> bool:
    """Rounded once from sums in float32; by Triton's interpreter, which cuts bfloat16 off, to one unit."""
    want = definition(call)
    unit = {BF16: 2.0**-7, F16: 2.0**-11, F32: 2.0**-20}[call.dtype]
    return bool(((found.double() - want).abs() <= unit * want.abs() + 1e-4).all())


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU runs is held above")
# one of each number of groups and halves, of parts of K (one more than there are blocks, of three) and of columns
CONFIGS = (
    configs.hopper_blocks(2, 128, 2, 4, 2),
    configs.hopper_blocks(2, 64, 1, 2, 8),
    configs.hopper_blocks(1, 32, 1, 12, 1),
    configs.hopper_blocks(1, 128, 1, 3, 8, 2),
    configs.hopper_blocks(2, 64, 2, 2, 8, 4),
)


@interpreted
@pytest.mark.parametrize("shape", [(5, 40, 144), (130, 128, 272)], ids=shape_id)
def test_tiles_scales_and_barriers(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer programs than tiles."""
    for index, call in enumerate(calls(*shape, "cpu")):
        for config in CONFIGS[index % 2 :: 2]:
            if call.activation not in GATED or config["HALVES"] == 2:
                assert right(stand_in(call, config, 2, monkeypatch), call)


@interpreted
@pytest.mark.parametrize(
    ("say", "instead"),
    [
        # the scale of another block, row or half
        ("at_left += along_b", "at_left = at_left"),
        ("at_a += along_a", "at_a = at_a"),
        ("first // BLOCK * stride_bn", "0"),
        ("gl.load(at_left + between)", "gl.load(at_left)"),
        ("gl.minimum(rows, M - 1) * stride_am", "row * stride_am"),
        ("+ begin * along_a", ""),
        # sums that are added without their scales, or to those of the block before
        ("left + sums * gl.expand_dims(scale_a * scale_left, 1)", "left + sums"),
        ("use_acc=onto", "use_acc=True"),
        # a block left out, tiles written over too early, and a part of K in another's place
        ("gl.minimum(begin + steps, blocks)", "gl.minimum(begin + steps, blocks - 1)"),
        ("stop = blocks", "stop = blocks - 1"),
        ("sums = hopper.warpgroup_mma_wait(0, deps=[sums])\n                hopper", "hopper"),
        ("c + (index // tiles).to(gl.int64) * M * end", "c"),
        ("slice(me * ROWS, ROWS)", "slice(0, ROWS)"),
        ("rows < M", "rows < M + 1"),
        ("((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)"),
    ],
)  # fmt: skip
def test_planted_errors_are_seen(say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "PATIENCE", 1.0)
    call = blocked(70, 264, 528, "cpu")
    found = []
    for config in (configs.hopper_blocks(2, 128, 2, 2, 8), configs.hopper_blocks(2, 128, 1, 2, 8, 2)):
        try:
            found.append(right(stand_in(call, config, 2, monkeypatch, **{say: instead}), call))
        except (AssertionError, TimeoutError, IndexError, TypeError):
            found.append(False)
    assert not all(found)


@pytest.fixture
def as_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch's questions about the device answered as on an sm_90."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: SM_90)
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)


def test_what_it_does_not_take(as_sm_90: None) -> None:
    call = blocked(20, 256, 272, "cpu")
    assert launch_blocks.refusal(call) is None
    assert launch_blocks.refusal(call._replace(activation="silu_and_mul", out_dtype=F32)) is None
    one = torch.ones(())
    refusals = {
        "scales of blocks": call._replace(scale_a=one, scale_b=one),
        "of a and of b": call._replace(scale_a=None),
        "float8_e4m3fn": call._replace(b=call.b.to(E5M2)),
        "takes no residual": call._replace(residual=random(20, 256)),
        "takes no bias of a row": call._replace(bias=random(20), bias_along="m"),
        "takes no alpha": call._replace(alpha=2.0),
        "bfloat16, float16 and float32": call._replace(out_dtype=E4M3, out_scale=one),
        "whole blocks of 128 columns": blocked(20, 384, 272, "cpu", activation="silu_and_mul"),
        "along K": blocked(20, 256, 264, "cpu"),
        "multiple of 16 bytes": blocked(20, 252, 272, "cpu"),
    }
    for reason, refused in refusals.items():
        assert reason in str(launch_blocks.refusal(refused)), reason
    integers = call._replace(a=call.a.to(torch.int8), b=call.b.to(torch.int8))
    assert "float8_e4m3fn" in str(launch_blocks.refusal(integers))


def test_it_is_for_sm_90_and_for_more_than_16_rows(device: str) -> None:
    call = blocked(16, 128, 128, device)
    if hardware.detect().arch != "sm_90":
        with pytest.raises(Unsupported, match=r"sm_90|Gluon"):
            gemm.run(BLOCKS, call)
    assert gemm.backends[BLOCKS].opt_in(call) is not None
    assert gemm.decide(call).backend != BLOCKS
    more = gemm.backends[BLOCKS].opt_in(blocked(17, 128, 128, device))
    assert (more is None) == (device != "cpu")


def test_tiles_that_there_are_not_are_refused() -> None:
    call = shaped(300, 256, 528)
    y = torch.empty(call.shape, dtype=BF16, device="meta")
    known = configs.hopper_blocks()
    for wrong in ({"GROUPS": 3}, {"HALVES": 3}, {"BLOCK_N": 256}, {"SPLIT_K": 0}, {"STAGES": 0}):
        with pytest.raises(InvalidArgument, match="gemm: "):
            launch_blocks.launch(call, y, Config(**(known.kwargs | wrong)), SM_90)
    with pytest.raises(InvalidArgument, match="HALVES is 2"):
        launch_blocks.launch(call._replace(activation="silu_and_mul"), y, known, SM_90)


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        # the fastest on one H200 (2026-11-26, benchmarks/fp8_blocks.py)
        ((16, 4096, 4096), configs.hopper_blocks(1, 128, 1, 8, 8, 4)),
        ((32, 2048, 7168), configs.hopper_blocks(1, 128, 1, 8, 8, 8)),
        ((64, 4096, 4096), configs.hopper_blocks(1, 32, 1, 12, 8)),
        ((64, 4096, 14336), configs.hopper_blocks(1, 128, 1, 8, 8, 4)),
        ((128, 2048, 7168), configs.hopper_blocks(1, 64, 1, 10, 8, 2)),
        ((128, 14336, 4096), configs.hopper_blocks(2, 128, 1, 6, 8)),
        ((1024, 2048, 7168), configs.hopper_blocks(2, 128, 1, 6, 16)),
        ((4096, 4096, 14336), configs.hopper_blocks(2, 128, 2, 4, 16)),
    ],
)
def test_the_default_is_what_was_fastest(shape: tuple[int, ...], measured: Config) -> None:
    assert configs.hopper_blocks_of(shape_of(key_of(shaped(*shape))), SM_90) == measured


@pytest.mark.parametrize("rows", [1, 64, 128, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_configurations_fit(gated: bool, rows: int) -> None:
    for N, K in ((4096, 4096), (7168, 2048), (2048, 7168), (28672, 4096), (256, 128)):
        call = shaped(rows, N, K, activation="silu_and_mul" if gated else None)
        key = key_of(call)
        tried = list(space.blocks_space(key, SM_90))
        assert tried[0] == configs.hopper_blocks_of(shape_of(key), SM_90) and len(tried) == len(set(tried)) > 1
        for one in tried:
            assert space.blocks_shared_bytes(one) <= 227 << 10 and one["STAGES"] >= 2
            launches = space.blocks_launches(call, one, SM_90)
            assert len(launches) == 1 + (one["SPLIT_K"] > 1)
            # half of the units at least, where rows are few and there is as much to do
            if one is tried[0] and rows <= 128 and K >= 2048:
                assert launches[0].grid[0] >= 64
