"""The spaces of gemm's backends: within the limits of every architecture; nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from wavecrest.dispatch.tuned import LAUNCH_OPTIONS, Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._gemm import config as defaults
from wavecrest.ops._gemm import launch, launch_gemv
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops._gemm.study import space

BF16, F32, I8, F8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
PLANNERS = {"triton": launch.tiles, "triton_stream_k": launch.stream, "triton_gemv": launch_gemv.gemv}
MAKERS = {"triton": defaults.tiled, "triton_stream_k": defaults.stream_k, "triton_gemv": defaults.gemv}


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product(
    M: int, N: int, K: int, dtype: torch.dtype = BF16, weight: torch.dtype | None = None, **more: Any
) -> GemmCall:
    return GemmCall(meta(M, K, dtype=dtype), meta(N, K, dtype=weight or dtype).mT, **more)


def scale(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=F32)


def int4(M: int, N: int, K: int, group: int) -> GemmCall:
    padded = -(-K // 64) * 64
    codes = meta(N, padded // 2, dtype=torch.uint8).mT
    return GemmCall(meta(M, K), codes, scale_b=scale(-(-K // group), N), form="int4", group=group)


def products() -> Iterator[tuple[str, GemmCall]]:
    for M in (1, 3, 8, 16, 20, 64, 200, 256, 1000, 4096):
        for N, K in ((4096, 4096), (28672, 4096), (64, 14336), (24, 40), (1001, 1003)):
            yield f"bf16 {M}x{N}x{K}", product(M, N, K)
        yield f"int8 {M}", product(M, 4096, 4096, I8, scale_a=scale(M), scale_b=scale(4096))
        yield f"fp8 {M}", product(M, 4096, 4096, F8, scale_a=scale(), scale_b=scale())
        yield f"blocks {M}", product(M, 4096, 4096, F8, scale_a=scale(M, 32), scale_b=scale(32, 32))
        yield f"gated {M}", product(M, 8192, 4096, activation="silu_and_mul")
        yield f"fp32 {M}", product(M, 1024, 1024, F32)
        yield f"tf32 {M}", product(M, 1024, 1024, F32, precision="tf32")
        yield f"weight int8 {M}", product(M, 4096, 4096, BF16, I8, scale_b=scale(4096))
        yield f"weight int8 groups {M}", product(M, 4096, 4096, BF16, I8, scale_b=scale(64, 4096), group=64)
        for group in (32, 64, 128):
            yield f"int4 {group} {M}", int4(M, 4096, 4096, group)
        yield f"batch {M}", GemmCall(meta(6, M, 512), meta(6, 512, 256))


PRODUCTS = dict(products())


def spaces(arch: Arch, call: GemmCall) -> Iterator[tuple[str, Config, list[Config]]]:
    """(backend, default, what else is tried) of the backends that take a product."""
    for backend, make in MAKERS.items():
        if backend == "triton_gemv" and launch_gemv.refusal(call):
            continue
        if backend == "triton_stream_k" and call.activation == "silu_and_mul":
            continue
        key = key_of(call)
        first, *others = space.space(backend, make, key, arch)
        yield backend, first, others


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_every_configuration_is_within_the_limits_and_planned(arch: Arch) -> None:
    checked = 0
    for name, call in PRODUCTS.items():
        shape = shape_of(key_of(call))
        y, parts = call.a.new_empty(0, dtype=call.dtype), call.a.new_empty(0, dtype=torch.float32)
        for backend, first, others in spaces(arch, call):
            assert first == MAKERS[backend](shape, arch), (name, backend)
            assert len({first, *others}) == 1 + len(others), f"{name} {backend}: twice the same"
            for config in others:
                where = f"{name}, {backend}, {arch.name}: {config}"
                within_limits(where, config, call, arch)
                optional = {"CHAINS"} if backend == "triton" else set()
                different = (set(config) ^ set(first)) - {*LAUNCH_OPTIONS, *optional}
                assert not different, f"{where} has other parameters than the default: {different}"
                plan = PLANNERS[backend](call, y, parts, config, arch, bool(config.get("TMA")))
                assert all(size >= 1 for size in plan.first.grid), where
                checked += 1
    assert checked > 3000


def within_limits(where: str, config: Config, call: GemmCall, arch: Arch) -> None:
    n, k, warps = config["BLOCK_N"], config["BLOCK_K"], config["num_warps"]
    lanes = warps * arch.wave_size
    halves = 2 if call.activation == "silu_and_mul" else 1
    for value in (n, k, warps, config.get("SPLIT_K", 1), config.get("BLOCK_M", 1), config.get("GROUP_M", 1)):
        assert value >= 1 and value & (value - 1) == 0, f"{where}: {value} is no power of two"
    assert lanes <= 1024, where
    assert 1 <= config.get("SPLIT_K", 1) <= 16, where
    steps = math.ceil(call.K / k)
    assert config.get("SPLIT_K", 1) <= max(1, steps // 2), f"{where}: parts of less than two steps"
    if "BLOCK_M" not in config:
        if call.form == "int4":
            # the codes of a word are made one after another
            assert k % call.group == 0, f"{where}: part of a group"
            k //= 8
        assert n * k >= lanes and n * k * (call.M + 1) * halves / lanes <= 200, f"{where}: registers"
        return
    m = config["BLOCK_M"]
    assert m >= 16 and n >= 16 and k >= (32 if call.a.dtype.itemsize == 1 else 16), f"{where}: no matrix instruction"
    bits_b = 4 if call.form == "int4" else 8 * call.b.dtype.itemsize
    step = m * k * call.a.dtype.itemsize + n * k * bits_b // 8
    kept = max(1, config["num_stages"] - 1)
    if arch.name in ("sm_90", "sm_100") and m >= 64 and warps % 4 == 0:
        kept = config["num_stages"]
    assert kept * step <= arch.lds_kib * 1024, f"{where}: shared memory"
    blocks = call.group or (128 if call.scale_a is not None and call.scale_a.ndim == 2 else 0)
    of_a_unit = call.b.dtype == call.a.dtype == F8 and not blocks and arch.name == "sm_90"
    assert m * n * (halves * (2 if blocks else 1) + of_a_unit) / lanes <= 128, f"{where}: registers"
    if blocks and not (call.form == "int4" and k == 64):
        assert blocks % k == 0, f"{where}: columns of several scales in a step"
    if "CHAINS" in config:
        assert not blocks and not config["TMA"] and k // config["CHAINS"] >= 64, f"{where}: divided too far"
    if config.get("TMA"):
        assert arch.name in ("sm_90", "sm_100") and launch.has_descriptors(call), f"{where}: no descriptors"
    assert config.get("matrix_instr_nonkdim", 16) <= min(m, n), f"{where}: the instruction is larger than the tile"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_there_is_something_to_try_in_every_regime(arch: Arch) -> None:
    few = 8 if arch.wave_size == 32 and arch.vendor == "amd" else 11
    rows = [f"bf16 {M}x4096x4096" for M in (1, 16, 64, 256, 4096)]
    more = [f"int4 {group} {M}" for group in (32, 64, 128) for M in (16, 64)]
    for name in (
        *rows,
        "gated 64",
        "gated 4096",
        "int8 64",
        "fp8 4096",
        "blocks 4096",
        "weight int8 16",
        "weight int8 groups 16",
        *more,
    ):
        for backend, _, others in spaces(arch, PRODUCTS[name]):
            least = {"triton": few, "triton_stream_k": 3, "triton_gemv": 8}[backend]
            assert least <= len(others) <= 100, f"{name}, {backend}: {len(others)}"


def test_a_regime_has_what_matters_on_sm_90() -> None:
    def tried(name: str, backend: str = "triton") -> list[Config]:
        return next(others for found, _, others in spaces(ARCHS["sm_90"], PRODUCTS[name]) if found == backend)

    few = tried("bf16 16x4096x4096")
    assert {config["BLOCK_M"] for config in few} == {16}
    assert {config["SPLIT_K"] for config in few} >= {1, 2, 4, 8}
    assert {config["num_warps"] for config in few} >= {2, 4, 8} and {config["num_stages"] for config in few} >= {
        3,
        4,
        5,
        6,
    }
    programs = [
        math.ceil(4096 / config["BLOCK_N"]) * config["SPLIT_K"] / ARCHS["sm_90"].compute_units for config in few
    ]
    assert min(programs) >= 0.4 and max(programs) <= 6
    wide = tried("bf16 16x28672x4096")
    assert 1 in {config["SPLIT_K"] for config in wide}
    large = tried("bf16 4096x4096x4096")
    assert {(128, 256), (256, 128), (128, 128), (64, 256)} <= {(c["BLOCK_M"], c["BLOCK_N"]) for c in large}
    assert {c["TMA"] for c in large} == {0, 1} and {c["PERSISTENT"] for c in large} == {0, 1}
    assert {c["GROUP_M"] for c in large} == {4, 8, 16} and {c["SPLIT_K"] for c in large} == {1}
    assert {c["BLOCK_K"] for c in tried("fp8 4096")} >= {128} and all(c["BLOCK_K"] >= 128 for c in tried("fp8 4096"))
    assert all(c["BLOCK_K"] <= 128 for c in tried("blocks 4096"))
    assert all(c["TMA"] == 0 for c in tried("weight int8 4096"))
    assert {c["PROGRAMS"] for c in tried("bf16 16x4096x4096", "triton_stream_k")} >= {1, 2}


def test_amd_has_instructions_and_waves_to_choose_from() -> None:
    for name in ("gfx942", "gfx950", "gfx90a"):
        (_, _, large), *_ = spaces(ARCHS[name], PRODUCTS["bf16 4096x4096x4096"])
        assert {c["matrix_instr_nonkdim"] for c in large} == {16, 32} and {c["waves_per_eu"] for c in large} == {0, 2}
        assert {c["TMA"] for c in large} == {0}
    deep = [
        c["num_stages"] for _, _, others in spaces(ARCHS["gfx950"], PRODUCTS["bf16 4096x4096x4096"]) for c in others
    ]
    assert 3 in deep, "160 KiB of LDS hold two tiles"


def test_what_does_not_fit_is_named() -> None:
    arch, call = ARCHS["sm_90"], PRODUCTS["bf16 4096x4096x4096"]
    shape = shape_of(key_of(call))
    good = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "SPLIT_K": 1, "PERSISTENT": 0, "TMA": 1,
            "num_warps": 8, "num_stages": 4}  # fmt: skip

    def said(shape: defaults.Shape = shape, arch: Arch = arch, **changes: int) -> str | None:
        return space.problem(Config(**(good | changes)), shape, arch)

    assert said() is None
    assert said(num_stages=5) == f"takes {5 * (128 + 256) * 128 + 256} bytes of shared memory, of {227 * 1024}"
    # without descriptors there are no barriers beside the tiles; as many bytes as there are just fit
    exact = replace(arch, lds_kib=192)
    assert said(TMA=0, arch=exact) is None
    assert "bytes of shared memory" in (said(arch=exact) or "")
    assert said(num_warps=4) == "its sums take 256 registers a lane, of 128"
    assert "sums take 256" in (said(shape._replace(gated=True), num_stages=2) or "")
    # both halves of a gated product are in a step, and what is normalised goes back there once
    assert said(shape._replace(gated=True), BLOCK_N=128) is None
    twice = said(shape._replace(gated=True), BLOCK_N=128, num_stages=5)
    assert twice == f"takes {5 * (128 + 2 * 128) * 128 + 256} bytes of shared memory, of {227 * 1024}"
    few = {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 256, "TMA": 0, "num_stages": 4}
    normed = said(shape._replace(rows=16, normed=True, has_descriptors=False), **few)
    assert normed is None
    few["num_stages"] = 5
    normed = said(shape._replace(rows=16, normed=True, has_descriptors=False), **few)
    assert normed == f"takes {4 * (16 + 128) * 512 + 16 * 512} bytes of shared memory, of {227 * 1024}"
    assert "sums take 256" in (
        said(shape._replace(step=128, a_bits=8, b_bits=8), BLOCK_K=128, num_stages=2, TMA=0) or ""
    )
    assert "128 columns that share a scale" in (said(shape._replace(step=128), BLOCK_K=256) or "")
    assert "too small" in (said(shape._replace(a_bits=8, b_bits=8), BLOCK_K=16) or "")
    assert "too small" in (said(shape._replace(b_bits=4), BLOCK_K=32) or "")
    assert said(shape._replace(b_bits=4, step=32, has_descriptors=False), BLOCK_K=64, TMA=0, BLOCK_N=64) is None
    assert "wider than 100 columns" in (said(shape._replace(columns=100)) or "")
    assert said(shape._replace(columns=100), BLOCK_N=128) is None
    assert "no tensor descriptors" in (said(shape._replace(has_descriptors=False)) or "")
    assert "no tensor descriptors" in (said(arch=ARCHS["sm_80"]) or "")
    assert "instruction is larger" in (said(BLOCK_M=16, TMA=0, matrix_instr_nonkdim=32) or "")


def test_a_backend_says_its_space_through_the_op() -> None:
    arch = ARCHS["sm_90"]
    for backend in MAKERS:
        attached = gemm.study.kernel(backend).space
        key = key_of(PRODUCTS["bf16 1x4096x4096"])
        assert attached is not None
        assert list(attached(key, arch)) == list(space.space(backend, MAKERS[backend], key, arch))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_8_bit_floats_are_added_in_float32_on_sm_90_unless_named(arch: Arch) -> None:
    """For sums of 128 products at a time, which the matrix unit keeps in 14 bits."""

    def of(call: GemmCall, backend: str = "triton") -> tuple[int, str]:
        config = MAKERS[backend](shape_of(key_of(call)), arch)
        plan = PLANNERS[backend](call, call.a, call.a.new_empty(0, dtype=torch.float32), config, arch, False)
        constants = plan.first.options()
        return constants["UNIT_SUMS"], constants["PRECISION"]

    short = 128 if arch.name == "sm_90" else 0
    for M in (16, 64, 256, 4096):
        for activation in (None, "silu_and_mul"):
            call = product(M, 4096, 4096, F8, scale_a=scale(), scale_b=scale(), activation=activation)
            assert of(call) == (short, "ieee")
            assert of(call._replace(precision="fast_accum")) == (0, "ieee")
        call = product(M, 4096, 4096, F8, torch.float8_e5m2)
        assert of(call, "triton_stream_k") == (short, "ieee")
        assert of(product(M, 4096, 4096, BF16, F8)) == of(product(M, 4096, 4096)) == (0, "ieee")
        assert of(product(M, 4096, 4096, F32, precision="tf32")) == (0, "tf32")


def test_sums_of_8_bit_floats_leave_room_for_those_of_a_unit() -> None:
    shape = shape_of(key_of(product(4096, 4096, 4096, F8)))
    fast = shape_of(key_of(product(4096, 4096, 4096, F8, precision="fast_accum")))
    tile, large = (defaults.tiled(one, ARCHS["sm_90"]) for one in (shape, fast))
    assert (tile["BLOCK_M"] * tile["BLOCK_N"], tile["num_warps"]) == (64 * 128, 4)
    assert (large["BLOCK_M"] * large["BLOCK_N"], large["num_warps"]) == (128 * 256, 8)
    assert defaults.tiled(shape, ARCHS["gfx942"]) == defaults.tiled(fast, ARCHS["gfx942"])


def test_launches_refuse_what_the_planner_refuses_and_have_none_for_nothing() -> None:
    launches = gemm.study.kernel("triton").launches
    assert launches is not None
    config = Config(
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=256, GROUP_M=8, SPLIT_K=1, PERSISTENT=0, TMA=0, num_warps=4, num_stages=2
    )
    with pytest.raises(InvalidArgument, match="does not fit 4-bit values"):
        launches(PRODUCTS["int4 64 16"], config, ARCHS["sm_90"])
    assert launches(product(0, 64, 64), config, ARCHS["sm_90"]) == []
    split = Config(**(config.kwargs | {"SPLIT_K": 4}))
    first, second = launches(product(4, 64, 4096), split, ARCHS["sm_90"])
    assert first.args[3].dtype == F32 and second.kernel is not first.kernel
    (whole,) = launches(product(4, 64, 4096), config, ARCHS["sm_90"])
    # as a call passes it: the result where there are no partial sums
    assert whole.args[3].dtype == BF16
