"""The product on every backend against an oracle in float64: no element beyond the bound."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.gemm_harness import (
    ACTIVATIONS,
    BACKENDS,
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    GATED,
    I8,
    I32,
    KERNELS,
    PERSISTENT,
    SPLIT,
    Watch,
    assert_near,
    assert_result,
    assert_right,
    bound_of,
    fitted,
    machine,
    moved,
    multiply,
    oracle,
    quicken,
    random,
    refuses,
    scales,
    stream,
    takes,
    tile,
    watched,
    whole,
    wide,
)
from tests.ops.op_harness import LARGEST, assert_call_never_copies, name, same_bits, shape_id
from wavecrest import ops
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.measure import numerics
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.ops._gemm.kernel import remap_xcd, share_of, swizzle_tile
from wavecrest.ops._gemm.launch import has_descriptors
from wavecrest.ops._gemm.launch import stream as launch_stream
from wavecrest.ops._gemm.launch import tiles as launch_tiles
from wavecrest.ops.common.triton import tl, triton

FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


def configs(backend: str) -> tuple[Config | None, ...]:
    """A backend's own configuration, and those that take each of its paths."""
    own = (None,) if torch.cuda.is_available() else ()
    return {
        "triton": (*own, tile(16, 32, 32, **SPLIT)),
        "triton_stream_k": (stream(),),
        "triton_multiply": (multiply(), multiply(split=3)),
    }.get(backend, (None,))


def product(
    M: int, N: int, K: int, a: torch.dtype = BF16, b: torch.dtype | None = None, device: str = "cpu", **more: Any
) -> GemmCall:
    """a [M, K], and b the transpose of a weight [N, K]."""
    return GemmCall(random(M, K, dtype=a, device=device), random(N, K, dtype=b or a, device=device, seed=1).mT, **more)


def scaled(given: GemmCall, size: float = 0.1) -> GemmCall:
    """With one scale for a and one for b, of the size that is right for integers or floats."""
    device = given.a.device.type
    return given._replace(
        scale_a=scales(device=device, size=wide(size, given.a.dtype)),
        scale_b=scales(device=device, seed=1, size=wide(size, given.b.dtype)),
    )


# --- types


def _quantized(device: str) -> dict[str, Any]:
    return {"out_scale": torch.tensor(0.02, device=device)}


# id -> M, device, N, K -> a call
TYPES: dict[str, Callable[..., GemmCall]] = {
    "fp32": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d),
    "tf32": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d, precision="tf32"),
    "fp16": lambda m, d, n=37, k=75: product(m, n, k, F16, device=d),
    "bf16": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d),
    "bf16-fp32": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d, out_dtype=F32),
    "fp32-bf16": lambda m, d, n=37, k=75: product(m, n, k, F32, device=d, out_dtype=BF16),
    "fp16-e4m3": lambda m, d, n=37, k=75: product(m, n, k, F16, device=d, out_dtype=E4M3, **_quantized(d)),
    "bf16-int8": lambda m, d, n=37, k=75: product(m, n, k, BF16, device=d, out_dtype=I8, **_quantized(d)),
    "fp64": lambda m, d, n=37, k=75: product(m, n, k, F64, device=d),
    "int8-int32": lambda m, d, n=37, k=75: product(m, n, k, I8, device=d),
    "int8-fp32-unscaled": lambda m, d, n=37, k=75: product(m, n, k, I8, device=d, out_dtype=F32),
    "int8": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d)),
    "int8-fp16": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=F16)),
    "int8-fp32": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=F32)),
    "int8-int8": lambda m, d, n=37, k=75: scaled(product(m, n, k, I8, device=d, out_dtype=I8, **_quantized(d))),
    "e4m3": lambda m, d, n=37, k=75: scaled(product(m, n, k, E4M3, device=d)),
    "e4m3-unscaled": lambda m, d, n=37, k=75: product(m, n, k, E4M3, device=d, out_dtype=F32),
    "e5m2": lambda m, d, n=37, k=75: scaled(product(m, n, k, E5M2, device=d, out_dtype=F32)),
    "e4m3-e5m2": lambda m, d, n=37, k=75: scaled(product(m, n, k, E4M3, E5M2, device=d, out_dtype=F16)),
    "e5m2-e4m3": lambda m, d, n=37, k=75: scaled(
        product(m, n, k, E5M2, E4M3, device=d, out_dtype=E5M2, **_quantized(d))
    ),
    "bf16-weight-int8": lambda m, d, n=37, k=75: product(m, n, k, BF16, I8, device=d),
    "fp16-weight-e5m2": lambda m, d, n=37, k=75: product(m, n, k, F16, E5M2, device=d),
    "fp32-weight-e4m3": lambda m, d, n=37, k=75: product(m, n, k, F32, E4M3, device=d),
}
# type -> backends that do not have it, with a word of their reason
DECLINED = {
    "fp64": dict.fromkeys(KERNELS, "not float64"),
    **{key: {"triton_multiply": "no int8 a"} for key in TYPES if key.startswith("int8")},
    **{key: {"torch": "stored in fewer bits"} for key in TYPES if "weight" in key},
    "bf16-fp32": {"torch": "rounds the result"},
}


def _declined(kind: str, backend: str, device: str, odd: bool) -> str | None:
    """A word of the reason why a backend does not take a type; None: it takes it. `odd`: sizes of no whole units."""
    if backend == "torch" and kind.startswith("e"):
        if device == "cpu":
            return "on a GPU"
        return "multiples of 16" if odd else {"e5m2": "float8_e5m2 by float8_e5m2"}.get(kind)
    if backend == "torch" and kind.startswith("int8") and device == "cuda" and odd:
        return "multiples of 8"
    return DECLINED.get(kind, {}).get(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str, backend: str, watch: Watch, device: str) -> None:
    # the second is for PyTorch's products of 8 bits on a GPU
    for n, k in ((37, 75), (48, 80)) if backend == "torch" else ((37, 75),):
        call = TYPES[kind](7 if backend == "triton_multiply" else 19, device, n, k)
        word = _declined(kind, backend, device, n % 16 != 0)
        if word is not None:
            assert word in str(refuses(backend, call))
            with pytest.raises(Unsupported, match="refuses"):
                gemm.run(backend, call)
            continue
        for config in configs(backend):
            assert_right(backend, call, config, watch)


@pytest.mark.parametrize("dtype", FNUZ, ids=name)
def test_types_that_the_interpreter_does_not_have(dtype: torch.dtype, device: str) -> None:
    for call in (
        scaled(product(5, 18, 40, dtype, device=device)),
        product(5, 18, 40, BF16, dtype, device=device),
        product(5, 18, 40, device=device, out_dtype=dtype, out_scale=torch.tensor(0.05, device=device)),
    ):
        for backend in KERNELS:
            assert f"has no {name(dtype)}" in str(refuses(backend, call))
        assert_right("reference", call)


def test_integers_are_exact_where_floats_are_not(watch: Watch, device: str) -> None:
    # sums past 2^24, which float32 rounds, and a last product that it would lose
    a = torch.full((17, 2056), 127, dtype=I8, device=device)
    b = torch.full((24, 2056), 127, dtype=I8, device=device).mT
    a[1, -1], b[-1, 3] = 126, -127
    call = GemmCall(a, b)
    for backend, config in (
        ("triton", tile(k=256)),
        ("triton", tile(k=256, **SPLIT)),
        ("triton_stream_k", stream(k=512)),
    ):
        got = assert_right(backend, call, config, watch)
        assert int(got[1, 0]) == 2056 * 127 * 127 - 127
    assert_right("torch", call)
    assert_right("reference", call)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name)
def test_each_byte_of_a_weight_is_the_number_that_it_is(dtype: torch.dtype, watch: Watch, device: str) -> None:
    """Which kernels on NVIDIA put together from bits: each number at some places, and zeros around it."""
    numbers = torch.arange(-128, 128, device=device)
    for place in (0, 1, 2, 3, 21, 63):
        b = torch.zeros(256, 64, dtype=I8, device=device)
        b[:, place] = numbers.to(I8)
        call = GemmCall(torch.ones(2, 64, dtype=dtype, device=device), b.mT, out_dtype=F32)
        for backend, config in (("triton", tile(k=64)), ("triton_multiply", multiply(k=64))):
            got = assert_right(backend, call, config, watch)
            assert torch.equal(got, numbers.float().expand(2, 256))


def test_sums_of_16_bit_products_are_float32(watch: Watch, device: str) -> None:
    # 1 is less than half a unit of what is there already, in 16 bits
    a = torch.ones(2, 513, dtype=BF16, device=device)
    a[:, 0] = 4096.0
    call = GemmCall(a, torch.ones(16, 513, dtype=BF16, device=device).mT, out_dtype=F32)
    for backend in KERNELS:
        for config in configs(backend):
            got = assert_right(backend, call, config, watch)
            assert set(got.flatten().tolist()) == {4608.0}


# --- tiles and parts

# one tile; tiles and steps that are full; tails in M, N and K; one row; more rows of tiles than a group has
TILED = ((32, 32, 64), (17, 33, 65), (1, 50, 31), (65, 20, 40), (50, 34, 97))


@pytest.mark.parametrize("shape", TILED, ids=shape_id)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tile(64, 64, 128), id="one tile"),
        pytest.param(tile(GROUP_M=1), id="group of 1"),
        pytest.param(tile(GROUP_M=3), id="group of 3"),
        pytest.param(tile(32, 16, 64, **SPLIT), id="split"),
        pytest.param(tile(32, 32, 32, SPLIT_K=7), id="more parts than steps"),
        pytest.param(tile(**PERSISTENT), id="persistent"),
        pytest.param(tile(32, 16, 32, **PERSISTENT, **SPLIT), id="persistent split"),
        pytest.param(tile(16, 32, 32, CHAINS=2), id="two sums"),
        pytest.param(tile(16, 16, 64, CHAINS=4, **SPLIT), id="four sums, split"),
    ],
)
def test_tiles(
    config: Config, shape: tuple[int, ...], watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three programs and two dies where programs are persistent
    machine(monkeypatch, units=3, xcds=2 if config["PERSISTENT"] or config["GROUP_M"] == 3 else 1)
    assert_right("triton", product(*shape, device=device, out_dtype=F32), config, watch)


# type of a and of b; codes, blocks and groups have scales a step, and one sum
@pytest.mark.parametrize("kind", [(BF16, BF16), (F32, F32), (I8, I8), (BF16, I8), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("k", [256, 200, 31])
def test_sums_of_their_own_are_added(kind: tuple[torch.dtype, torch.dtype], k: int, watch: Watch, device: str) -> None:
    """The products of a step divided over two or four sums; K that ends in each of them; both halves of a gate."""
    for chains in (2, 4):
        call = product(5, 40, k, *kind, device=device)
        assert_right("triton", call, tile(16, 32, 32 * chains, CHAINS=chains), watch)
    if kind[0] == BF16:
        gated = product(5, 40, k, *kind, device=device, activation="silu_and_mul")
        assert_right("triton", gated, tile(16, 32, 64, CHAINS=2), watch)
        assert_right("triton", gated, tile(16, 32, 64), watch)


def _packed(format: str, device: str, **options: Any) -> tuple[GemmCall, Tensor]:
    """5 rows times a packed weight [64, 96], and that as a plain b."""
    weight = ops.pack(random(64, 96, device=device, seed=1), format, **options)
    return linear_call(random(5, 96, device=device), weight), weight.dequantize_float32().double().mT


# whether both halves of a gated product are sums of one loop: of all that have no scale a step
HALVES: dict[str, tuple[bool, Callable[[str], GemmCall | tuple[GemmCall, Tensor]]]] = {
    "bf16": (True, lambda device: product(5, 36, 100, device=device)),
    "40 rows": (True, lambda device: product(40, 36, 100, device=device)),
    "a batch": (True, lambda device: GemmCall(random(2, 5, 100, device=device), random(2, 100, 36, device=device))),
    "int8": (True, lambda device: product(5, 36, 100, BF16, I8, device=device, scale_b=scales(36, device=device))),
    "a norm": (True, lambda device: product(5, 36, 100, device=device, norm_weight=random(100, device=device))),
    "shuffled": (True, lambda device: _packed("shuffled", device)),
    "int4": (False, lambda device: _packed("int4", device, group=32)),
    "blocks": (False, lambda device: product(5, 256, 130, E4M3, device=device, scale_b=scales(2, 2, device=device))),
}


@pytest.mark.parametrize("case", HALVES)
def test_both_halves_of_a_gate_in_one_loop(
    case: str, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, make = HALVES[case]
    made = make(device)
    call, b = (made, None) if isinstance(made, GemmCall) else made
    call = call._replace(activation="silu_and_mul", out_dtype=F32)
    tried = [(tile(k=64), both), (tile(32, 32, 64), both)]
    if case != "a norm":
        # a step that is divided has sums of its own, a loop for each half
        tried += [(tile(k=64, SPLIT_K=2), both), (tile(k=64, PERSISTENT=1), both)]
        tried += [(tile(k=64, CHAINS=2), False)] if both else []
    for config, together in tried:
        assert_right("triton", call, config, watch, b)
        with monkeypatch.context() as patch:
            noted = _launches(patch)
            gemm.run("triton", call, config=config)
        assert noted[0].options()["BOTH"] == together


# tiles in M, tiles in N, steps a tile
SHARED = [(m, n, s) for m, n in ((1, 1), (2, 1), (1, 3), (5, 1)) for s in (1, 2, 3, 4, 7, 9)]
SHARED += [(m, n, s) for m, n in ((2, 4), (4, 3)) for s in (1, 2, 3, 5)]
PROGRAMS = (1, 2, 3, 5, 7, 13, 132)


@pytest.mark.parametrize("case", SHARED, ids=shape_id)
def test_stream_k(case: tuple[int, ...], watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that cut tiles in the middle, several inside one tile, tiles inside a share, more programs than steps."""
    tiles_m, tiles_n, steps = case
    # ragged in M, N and K wherever there is more than one step
    call = product(
        16 * tiles_m - 3, 16 * tiles_n - 5, 16 * steps - (9 if steps > 1 else 0), device=device, out_dtype=F32
    )
    turn = SHARED.index(case)
    # all on a GPU, some in the interpreter, which takes its time
    chosen = PROGRAMS if device == "cuda" else (PROGRAMS[turn % 7], PROGRAMS[(turn + 3) % 7])
    for programs in chosen:
        machine(monkeypatch, units=programs, xcds=(1, 2, 8)[turn % 3])
        assert_right("triton_stream_k", call, stream(k=16, group=1 + turn % 3), watch)


def test_stream_k_of_several_programs_a_unit(watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, units=2)
    noted = _launches(monkeypatch)
    call = product(40, 40, 64, device=device)
    gemm.run("triton_stream_k", call, config=stream(k=16, programs=3))
    assert [launch.grid for launch in noted] == [(6, 1), (5, 1)]
    # as many programs as steps, and not one more
    noted.clear()
    gemm.run("triton_stream_k", call, config=stream(k=64, programs=3, n=64))
    assert [launch.grid for launch in noted] == [(3, 1), (2, 1)]


@pytest.mark.parametrize("rows", range(1, 9))
def test_multiply(rows: int, watch: Watch, device: str) -> None:
    # more parts than steps; one step; columns and steps that are not full
    for shape, config in (
        ((37, 150), multiply(16, 64)),
        ((37, 150), multiply(16, 32, split=3)),
        ((16, 64), multiply(16, 64, split=2)),
        ((5, 7), multiply(2, 16)),
    ):
        assert_right("triton_multiply", product(rows, *shape, device=device, out_dtype=F32), config, watch)
    gated = product(rows, 36, 70, device=device, activation="silu_and_mul")
    assert_right("triton_multiply", gated, multiply(16, 32, split=rows % 3 + 1), watch)
    assert "up to 8 rows" in str(refuses("triton_multiply", product(9, 16, 32, device=device)))


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param("triton", tile(**SPLIT), id="split"),
        pytest.param("triton", tile(**SPLIT, **PERSISTENT), id="persistent"),
        pytest.param("triton_stream_k", stream(k=16), id="stream_k"),
        pytest.param("triton_multiply", multiply(16, 32, split=2), id="multiply"),
    ],
)
def test_the_same_bits_again(
    backend: str, config: Config, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched again and again, by a bound call, among launches of another shape and other data."""
    machine(monkeypatch, units=5, xcds=2)
    calls = [product(7, 28, 70, device=device, out_dtype=F32), product(6, 20, 50, device=device, out_dtype=F32)]
    first = [assert_right(backend, call, config, watch) for call in calls]
    for call in calls:
        gemm.pin(gemm.key(call), backend, config, "exact", "a test")
    for turn in range(5):
        for call, want in zip(calls, first, strict=True):
            assert same_bits(gemm(call), want), f"other bits in launch {turn + 2}"
    other = calls[0]._replace(a=calls[0].a * 3)
    assert_result(backend, gemm(other), other)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.gpu), "triton_multiply"])
def test_a_row_does_not_depend_on_the_rows_beside_it(backend: str, watch: Watch, device: str) -> None:
    # in the interpreter rows of a tile go through numpy's product, which looks at where they are
    call = product(8, 20, 70, device=device, out_dtype=F32)
    for config in configs(backend):
        whole = gemm.run(backend, call, config=config)
        for some in (slice(0, 1), slice(7, 8), slice(2, 7)):
            assert same_bits(assert_right(backend, call._replace(a=call.a[some]), config, watch), whole[some])


# --- the order of tiles


@triton.jit
def _spread_kernel(out_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr, XCDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    program = tl.arange(0, WIDTH)[None, :]
    programs = row + 1
    tl.store(out_ptr + row * WIDTH + program, remap_xcd(program, programs, XCDS) + programs * 0)


@pytest.mark.parametrize("xcds", [1, 2, 4, 8])
def test_spread_is_a_bijection(xcds: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every grid from 1 to 4,096 programs; neighbours on a die are neighbours in the order."""
    most, rows = 4096, 16
    places = torch.zeros(most, most, dtype=I32, device=device)
    monkeypatch.undo()
    quicken(monkeypatch)
    _spread_kernel[(most // rows,)](places, ROWS=rows, WIDTH=most, XCDS=xcds)
    program = torch.arange(most, dtype=I32, device=device)
    # row p: a grid of p + 1 programs
    there = program[None, :] <= program[:, None]
    assert int(places.min()) >= 0
    hits = torch.zeros(most * (most + 1), dtype=torch.bool, device=device)
    hits[torch.where(there, program[:, None] * most + places, most * most).flatten()] = True
    assert torch.equal(hits[: most * most].view(most, most), there)
    follows = places[:, xcds:] - places[:, :-xcds] == 1
    assert bool((follows | ~there[:, xcds:]).all())


@triton.jit
def _tile_at_kernel(m_ptr, n_ptr, MOST: tl.constexpr, WIDTH: tl.constexpr, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    grid, index = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    tile_m, tile_n = swizzle_tile(index, grid // MOST + 1, grid % MOST + 1, GROUP_M)
    tl.store(m_ptr + grid * WIDTH + index, tile_m)
    tl.store(n_ptr + grid * WIDTH + index, tile_n)


@pytest.mark.parametrize("group", range(1, 10))
def test_tile_at_is_the_grouped_order(group: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, width = 12, 256
    m, n = (torch.full((width, width), -1, dtype=I32, device=device) for _ in range(2))
    monkeypatch.undo()
    quicken(monkeypatch)
    _tile_at_kernel[(1,)](m, n, MOST=most, WIDTH=width, GROUP_M=group)
    for grid, (tiles_m, tiles_n) in enumerate(itertools.product(range(1, most + 1), repeat=2)):
        order = [
            (row, column)
            for first in range(0, tiles_m, group)
            for column in range(tiles_n)
            for row in range(first, min(first + group, tiles_m))
        ]
        assert list(zip(m[grid].tolist(), n[grid].tolist(), strict=True))[: len(order)] == order


@triton.jit
def _share_kernel(given_ptr, begin_ptr, end_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    program, programs, tiles, steps = (
        tl.load(given_ptr + at), tl.load(given_ptr + COUNT + at), tl.load(given_ptr + 2 * COUNT + at),
        tl.load(given_ptr + 3 * COUNT + at),
    )  # fmt: skip
    begin, end = share_of(program, programs, tiles, steps)
    tl.store(begin_ptr + at, begin)
    tl.store(end_ptr + at, end)


def test_shares_cover_all_work_once_and_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    quicken(monkeypatch)
    cases = [
        (programs, tiles, steps)
        for tiles in range(1, 13)
        for steps in range(1, 10)
        for programs in {1, 2, 3, 5, 7, 13, tiles * steps - 1, tiles * steps}
        if 0 < programs <= tiles * steps
    ]
    # 2^33 steps of work, and a grid that no power of two divides
    cases += [(264, 1 << 20, 1 << 13), (1216, (1 << 20) + 7, (1 << 12) + 1)]
    flat = [(p, programs, tiles, steps) for programs, tiles, steps in cases for p in range(programs)]
    count = 1 << (len(flat) - 1).bit_length()
    given = torch.tensor(flat + [(0, 1, 1, 1)] * (count - len(flat)), dtype=I32, device=device).t().contiguous()
    begin, end = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
    _share_kernel[(1,)](given, begin, end, COUNT=count)
    begins, ends, at = begin.tolist(), end.tolist(), 0
    for programs, tiles, steps in cases:
        shares = list(zip(begins[at : at + programs], ends[at : at + programs], strict=True))
        at += programs
        assert shares[0][0] == 0 and shares[-1][1] == tiles * steps
        assert all(left[1] == right[0] for left, right in itertools.pairwise(shares))
        sizes = {stop - start for start, stop in shares}
        assert max(sizes) - min(sizes) <= 1


# --- scales


def _scale_of_a(kind: str, M: int, K: int, dtype: torch.dtype, device: str) -> Tensor | None:
    shape = {"tensor": (), "one": (1, 1), "vector": (M,), "column": (M, 1), "block": (M, -(-K // 128))}.get(kind)
    return None if shape is None else scales(*shape, device=device, seed=2, size=wide(0.1, dtype))


def _scale_of_b(kind: str, N: int, K: int, dtype: torch.dtype, device: str) -> Tensor | None:
    blocks = (-(-K // 128), -(-N // 128))
    shape = {"tensor": (), "one": (1,), "vector": (N,), "row": (1, N), "block": blocks}.get(kind)
    return None if shape is None else scales(*shape, device=device, seed=3, size=wide(0.1, dtype))


SCALE_KINDS = ("none", "tensor", "vector", "block")


@pytest.mark.parametrize("dtype", [I8, E4M3], ids=name)
@pytest.mark.parametrize("b_kind", SCALE_KINDS)
@pytest.mark.parametrize("a_kind", SCALE_KINDS)
def test_scales(a_kind: str, b_kind: str, dtype: torch.dtype, watch: Watch, device: str) -> None:
    turn = SCALE_KINDS.index(a_kind) + SCALE_KINDS.index(b_kind) + (dtype == I8)
    # shapes that mean the same, by turns
    a_shape = {"tensor": "one", "vector": "column"}.get(a_kind, a_kind) if turn % 2 else a_kind
    b_shape = {"tensor": "one", "vector": "row"}.get(b_kind, b_kind) if turn // 2 % 2 else b_kind

    def made(M: int, N: int, K: int) -> GemmCall:
        return product(
            M, N, K, dtype, device=device, out_dtype=F32, scale_a=_scale_of_a(a_shape, M, K, dtype, device),
            scale_b=_scale_of_b(b_shape, N, K, dtype, device),
        )  # fmt: skip

    call = made(5, 130, 140)
    runs: list[tuple[str, Config | None]] = [
        ("triton", tile(16, 64, 64)),
        ("triton", tile(16, 128, 32, **SPLIT)),
        ("triton_stream_k", stream(16, 128, 64)),
        ("triton_multiply", multiply(64, 128, split=1 + turn % 2)),
    ]
    for backend, config in runs:
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
    assert_right("reference", call)
    # sizes that PyTorch's products of 8 bits have on a GPU too
    larger = made(24, 144, 144)
    if dtype == I8:
        taken = "block" not in (a_kind, b_kind)
    else:
        taken = device == "cuda" and a_kind == b_kind != "block"
    assert (refuses("torch", larger) is None) == taken
    if taken:
        assert_right("torch", larger)
    if taken and dtype == I8 and takes("torch", call):
        assert_right("torch", call)


def test_scales_have_strides_of_their_own(watch: Watch, device: str) -> None:
    call = product(19, 40, 300, E4M3, device=device, out_dtype=F32)
    every = scales(38, 6, device=device)
    columns = scales(40, 3, device=device, size=0.1)
    for scale_a, scale_b in (
        (every[::2, ::2], columns.new_full((3, 1), 0.3)),
        (every[:19, 1], columns[:, 1]),
        (every[:19, :1].expand(19, 3), columns.t()[1:2]),
        (every[0, 0].expand(19), columns[0, 0].expand(1, 40)),
    ):
        given_too = call._replace(scale_a=scale_a, scale_b=scale_b)
        assert_right("triton", given_too, tile(16, 32, 128), watch)
        assert_right("triton_stream_k", given_too, stream(16, 64, 128), watch)
        assert_right("reference", given_too)


def test_scales_of_the_rows_of_many_dimensions(watch: Watch, device: str) -> None:
    a = random(2, 3, 4, 40, dtype=I8, device=device)
    call = GemmCall(a, random(40, 24, dtype=I8, device=device), scale_a=scales(24, device=device, size=0.01))
    for backend in ("triton", "torch", "reference"):
        assert_right(backend, call, None, watch)
    one = GemmCall(a[0, 0, 0], call.b, scale_b=scales(24, device=device, size=0.01))
    for backend in ("triton", "torch", "reference"):
        if takes(backend, one):
            assert_right(backend, one, None, watch)


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 20)], ids=shape_id)
def test_scales_of_two_dimensions_add_none_to_a_vector(shape: tuple[int, int], backend: str, device: str) -> None:
    a, b = random(40, dtype=I8, device=device), random(40, 20, dtype=I8, device=device)
    call = GemmCall(a, b, scale_b=scales(*shape, device=device, size=0.01))
    if not takes(backend, call):
        pytest.skip(str(refuses(backend, call)))
    assert_right(backend, call)


# --- layouts

# id -> dtype, device -> a with K = 40 columns; PyTorch multiplies int8 on a GPU for more than 16 rows
A_LAYOUTS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "rows": lambda t, d: whole(21, 40, dtype=t, device=d),
    "columns": lambda t, d: whole(40, 21, dtype=t, device=d).t(),
    "columns-of-32": lambda t, d: whole(40, 32, dtype=t, device=d).t(),
    "steps": lambda t, d: whole(42, 80, dtype=t, device=d)[::2, ::2],
    "odd-slice": lambda t, d: whole(23, 47, dtype=t, device=d)[1:22, 3:43],
    "odd-slice-of-columns": lambda t, d: whole(43, 25, dtype=t, device=d)[3:, 1:22].t(),
    "expanded-rows": lambda t, d: whole(1, 40, dtype=t, device=d).expand(21, 40),
    "expanded-columns": lambda t, d: whole(21, 1, dtype=t, device=d).expand(21, 40),
    "vector": lambda t, d: whole(40, dtype=t, device=d),
    "vector-step": lambda t, d: whole(120, dtype=t, device=d)[1::3],
    "3d": lambda t, d: whole(2, 5, 40, dtype=t, device=d),
    "3d-permuted": lambda t, d: whole(5, 2, 40, dtype=t, device=d).transpose(0, 1),
    "3d-columns": lambda t, d: whole(40, 2, 5, dtype=t, device=d).permute(1, 2, 0),
    "3d-sliced": lambda t, d: whole(4, 7, 45, dtype=t, device=d)[1:3, 2:, 1:41],
    "3d-expanded": lambda t, d: whole(3, 1, 40, dtype=t, device=d).expand(3, 4, 40),
    "4d-permuted": lambda t, d: whole(2, 3, 4, 40, dtype=t, device=d).permute(2, 1, 0, 3),
    "4d-last": lambda t, d: whole(2, 40, 3, 4, dtype=t, device=d).permute(3, 2, 0, 1),
    "5d-merged": lambda t, d: whole(3, 2, 2, 2, 40, dtype=t, device=d).permute(1, 0, 2, 3, 4),
    "one-row-of-each": lambda t, d: whole(1, 3, 1, 90, dtype=t, device=d)[..., ::2][..., :40],
}
# b with K = 40 rows and N = 24 columns
B_LAYOUTS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "rows": lambda t, d: whole(40, 24, dtype=t, device=d, seed=1),
    "weight": lambda t, d: whole(24, 40, dtype=t, device=d, seed=1).mT,
    "steps": lambda t, d: whole(80, 72, dtype=t, device=d, seed=1)[::2, ::3],
    "odd-slice": lambda t, d: whole(43, 31, dtype=t, device=d, seed=1)[2:42, 5:29],
    "odd-slice-of-a-weight": lambda t, d: whole(29, 41, dtype=t, device=d, seed=1)[3:27, 1:].mT,
    "expanded-columns": lambda t, d: whole(40, 1, dtype=t, device=d, seed=1).expand(40, 24),
    "expanded-rows": lambda t, d: whole(1, 24, dtype=t, device=d, seed=1).expand(40, 24),
    "one-element": lambda t, d: whole(1, 1, dtype=t, device=d, seed=1).expand(40, 24),
}


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_layouts(a_layout: str, watch: Watch, device: str) -> None:
    for turn, b_layout in enumerate(B_LAYOUTS):
        dtype = (BF16, F16, F32, I8)[(turn + len(a_layout)) % 4]
        a, b = A_LAYOUTS[a_layout](dtype, device), B_LAYOUTS[b_layout](dtype, device)
        assert a.shape[-1] == 40 and b.shape == (40, 24)
        call = GemmCall(a, b, out_dtype=I32 if dtype == I8 else F32)
        assert_right("triton", call, tile(16, 32, 32), watch)
        if turn % 2 == len(a_layout) % 2 or device == "cuda":
            assert_right("triton_stream_k", call, stream(16, 32, 32), watch)
        assert_right("reference", call)
        # which rounds a product of 16 bits to those
        call = call if dtype in (F32, I8) else call._replace(out_dtype=None)
        if takes("torch", call):
            assert_right("torch", call)


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_layouts_of_few_rows(a_layout: str, watch: Watch, device: str) -> None:
    a = A_LAYOUTS[a_layout](F16, device)
    a = a[:5] if a.ndim == 2 else a[0] if a.ndim == 3 else a[0, 0] if a.ndim > 3 else a
    for b_layout in B_LAYOUTS:
        call = GemmCall(a, B_LAYOUTS[b_layout](F16, device))
        along_k = a.stride(-1) == 1 and call.b.stride(-2) == 1
        reason = refuses("triton_multiply", call)
        assert (reason is None) == along_k, reason
        if along_k:
            assert_right("triton_multiply", call, multiply(32, 32), watch)
        else:
            assert "contiguous" in str(reason)


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_no_copy(a_layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for b_layout in B_LAYOUTS:
        call = GemmCall(A_LAYOUTS[a_layout](F32, device), B_LAYOUTS[b_layout](F32, device))
        assert_call_never_copies(gemm, monkeypatch, call)


def test_more_leading_dimensions_than_the_kernels_take(device: str) -> None:
    a = random(2, 3, 2, 3, 40, device=device).permute(3, 2, 1, 0, 4)
    call = GemmCall(a, random(40, 20, device=device))
    for backend in KERNELS:
        assert "3 dimensions of rows without a common stride, not 4" in str(refuses(backend, call))
    gemm.force("triton")
    decision = gemm.decide(call)
    assert decision.backend == "torch"
    assert "without a common stride" in {one.backend: one.reason for one in decision.refused}["triton"]
    assert_result("torch", ops.gemm(call.a, call.b), call)


# a, b
BATCHES = (
    ((3, 5, 20), (3, 20, 18)),
    ((1, 5, 20), (3, 20, 18)),
    ((5, 20), (3, 20, 18)),
    ((3, 5, 20), (1, 20, 18)),
    ((2, 3, 5, 20), (2, 3, 20, 18)),
    ((2, 3, 5, 20), (1, 1, 20, 18)),
    ((1, 1, 5, 20), (2, 2, 20, 18)),
    ((1, 5, 20), (1, 20, 18)),
    ((1, 20), (2, 20, 18)),
)


def _batch_backends() -> tuple[tuple[str, Config | None], ...]:
    return (
        ("triton", tile(16, 32, 32)),
        ("triton", tile(16, 32, 16, SPLIT_K=2)),
        ("triton_stream_k", stream(16, 16, 16)),
        ("triton_multiply", multiply(32, 16, split=2)),
        ("torch", None),
        ("reference", None),
    )


@pytest.mark.parametrize("shapes", BATCHES, ids=lambda shapes: "-".join(map(shape_id, shapes)))
def test_batches(shapes: tuple[tuple[int, ...], tuple[int, ...]], watch: Watch, device: str) -> None:
    a_shape, b_shape = shapes
    a = random(*a_shape, device=device)
    weight = random(*b_shape[:-2], 18, 20, device=device, seed=1).mT
    for backend, config in _batch_backends():
        assert_right(backend, GemmCall(a, weight, out_dtype=F32 if backend != "torch" else None), config, watch)
    rows = random(*b_shape, device=device, seed=1)
    assert_right("triton", GemmCall(a, rows), tile(16, 32, 32), watch)
    assert "contiguous" in str(refuses("triton_multiply", GemmCall(a, rows)))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_batches_with_all_around(gated: bool, watch: Watch, device: str) -> None:
    a, b = random(2, 5, 20, device=device), random(2, 18, 20, device=device, seed=1).mT
    N = 9 if gated else 18
    call = GemmCall(
        a, b, random(18, dtype=F32, device=device, seed=2), activation="gelu_and_mul" if gated else "gelu", alpha=0.7,
        residual=random(5, 2, N, dtype=F16, device=device, seed=3).transpose(0, 1),
    )  # fmt: skip
    for given_too in (call, call._replace(bias=random(5, dtype=BF16, device=device), bias_along="m")):
        if gated and given_too.bias_along == "m":
            continue
        for backend, config in _batch_backends():
            if not (gated and backend == "triton_stream_k"):
                assert_right(backend, given_too, config, watch)
    integers = GemmCall(random(2, 5, 20, dtype=I8, device=device), random(2, 20, 18, dtype=I8, device=device))
    assert_right("triton", integers, tile(), watch)
    assert_right("triton", scaled(integers), tile(**SPLIT), watch)
    assert_right("reference", scaled(integers))
    assert "batch of int8" in str(refuses("torch", integers))


# id -> a call whose strides the kernels do not walk
UNWALKED: dict[str, Callable[[str], GemmCall]] = {
    "a": lambda d: GemmCall(random(2, 1, 5, 20, device=d), random(2, 3, 20, 18, device=d)),
    "a-permuted": lambda d: GemmCall(random(3, 2, 5, 20, device=d).transpose(0, 1), random(2, 3, 20, 18, device=d)),
    "b": lambda d: GemmCall(random(2, 3, 5, 20, device=d), random(1, 3, 20, 18, device=d)),
    "b-sliced": lambda d: GemmCall(random(2, 3, 5, 20, device=d), random(2, 4, 20, 18, device=d)[:, 1:]),
    "residual": lambda d: GemmCall(
        random(2, 3, 5, 20, device=d), random(2, 3, 20, 18, device=d),
        residual=random(3, 2, 5, 18, device=d).transpose(0, 1),
    ),
    "residual-of-rows": lambda d: GemmCall(
        random(2, 3, 20, device=d), random(20, 18, device=d), residual=random(3, 2, 18, device=d).transpose(0, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNWALKED)
def test_strides_that_do_not_merge_are_declined(case: str, device: str) -> None:
    call = UNWALKED[case](device)
    for backend in KERNELS:
        assert "one stride" in str(refuses(backend, call))
        with pytest.raises(Unsupported, match="one stride"):
            gemm.run(backend, call)
    gemm.force("triton")
    # a call of the same shapes that the kernel takes, and has taken
    walked = mapped(call, Tensor.contiguous)
    walked = walked._replace(
        a=walked.a.expand(2, 3, 5, 20).contiguous() if walked.a.ndim == 4 else walked.a,
        b=walked.b.expand(2, 3, 20, 18).contiguous() if walked.b.ndim == 4 else walked.b,
    )
    assert gemm.decide(walked).backend == "triton"
    assert_result("triton", gemm(walked), walked)
    assert gemm.decide(call).backend == "torch"
    assert_result("torch", gemm(call), call)


def test_more_products_in_a_batch_than_a_grid_has_programs(device: str) -> None:
    one = random(1, 1, 2, dtype=F32, device=device)
    for count in (65535, 65536):
        call = GemmCall(one.expand(count, 1, 2), one.mT)
        reasons = [refuses(backend, call) for backend in KERNELS]
        assert all(("65535 GEMMs" in str(reason)) == (count == 65536) for reason in reasons)
    gemm.force("triton")
    assert gemm.decide(call).backend == "torch"
    assert_result("torch", ops.gemm(call.a, call.b), call)


# --- sizes

SIZES = (0, 1, 2, 13, 15, 16, 17, 31, 32, 33, 61, 64, 65, 127)


def _some_sizes() -> list[tuple[int, int, int]]:
    """Each size in each place, and pairs of the degenerate ones."""
    count = len(SIZES)
    spread_out = [
        (SIZES[i], SIZES[(5 * i + j) % count], SIZES[(3 * i + 7 * j) % count]) for i in range(count) for j in (1, 4)
    ]
    few = list(itertools.product((0, 1, 17), repeat=3))
    # that PyTorch multiplies int8 of on a GPU: more than 16 rows, whole units of 8
    units = [(17, 16, 32), (65, 32, 64), (127, 64, 16)]
    return list(dict.fromkeys(spread_out + few + units))


@pytest.mark.parametrize("shape", _some_sizes(), ids=shape_id)
def test_sizes(shape: tuple[int, int, int], watch: Watch, device: str) -> None:
    M, N, K = shape
    for call in (
        product(M, N, K, BF16, device=device),
        product(
            M, N, K, F32, device=device, bias=random(N, dtype=F32, device=device), activation="silu",
            residual=random(M, N, dtype=F32, device=device, seed=4),
        ),
    ):  # fmt: skip
        for backend in ("triton", "torch", "reference"):
            assert_right(backend, call, None, watch)
    integers = product(M, N, K, I8, device=device)._replace(
        scale_a=scales(M, device=device), scale_b=scales(1, N, device=device)
    )
    assert_right("reference", integers)
    if takes("torch", integers):
        assert_right("torch", integers)
    if K == 0:
        assert "K is 0" in str(refuses("triton_stream_k", call))
    else:
        assert_right("triton_stream_k", call, stream(64, 64, 32), watch)
    if M <= 8:
        assert_right("triton_multiply", call, multiply(64, 64), watch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_sum_leaves_bias_and_residual(backend: str, device: str) -> None:
    bias, residual = random(6, dtype=F32, device=device), random(3, 6, dtype=F32, device=device)
    call = product(3, 6, 0, F32, device=device, bias=bias, residual=residual, activation="relu")
    if backend == "triton_stream_k":
        assert "K is 0" in str(refuses(backend, call))
        return
    got = gemm.run(backend, call)
    torch.testing.assert_close(got, bias.clamp(min=0) + residual, rtol=0, atol=1e-6)
    gated = call._replace(activation="silu_and_mul", residual=None)
    torch.testing.assert_close(gemm.run(backend, gated), (torch.nn.functional.silu(bias[:3]) * bias[3:]).expand(3, 3))
    for empty in (product(0, 6, 5, device=device), product(3, 0, 5, device=device)):
        assert gemm.run(backend, empty).shape == (empty.a.shape[0], empty.b.shape[1])


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 0, 7), (7, 5)),
        ((0, 3, 7), (7, 5)),
        ((2, 3, 0), (0, 5)),
        ((0,), (0, 5)),
        ((0, 4, 7), (0, 7, 5)),
        ((4, 7), (0, 7, 5)),
        ((3, 0, 7), (3, 7, 5)),
        ((3, 4, 0), (3, 0, 5)),
    ],
    ids=lambda shapes: "-".join(map(shape_id, shapes)),
)
def test_empty_of_other_ranks(shapes: tuple[tuple[int, ...], tuple[int, ...]], backend: str, device: str) -> None:
    call = GemmCall(random(*shapes[0], dtype=F32, device=device), random(*shapes[1], dtype=F32, device=device))
    assert_right(backend, call)
    assert_right(backend, call._replace(bias=random(5, dtype=F32, device=device), activation="gelu"))


# --- what is done to the sums

CLASSES: dict[str, dict[str, Any]] = {
    "bf16": {"a": BF16},
    "fp32": {"a": F32},
    "int8": {"a": I8, "out_dtype": BF16},
    "e4m3": {"a": E4M3, "out_dtype": F16},
}
# those that have a place in an epilogue's cases by turns
FINISHERS: tuple[tuple[str, Config | None], ...] = (
    ("triton", tile(16, 32, 32, SPLIT_K=2)),
    ("triton_stream_k", stream(16, 32, 16)),
    ("triton_multiply", multiply(32, 64)),
    ("triton", tile(16, 32, 32, **PERSISTENT)),
    ("triton_multiply", multiply(32, 32, split=2)),
)


def _residual(kind: str, M: int, N: int, device: str) -> Tensor | None:
    """Of another dtype than the result, rows of a larger tensor or every second column of one."""
    if kind == "none":
        return None
    if kind == "strided":
        return random(M, 2 * N + 3, dtype=F32, device=device, seed=5)[:, 3::2]
    if kind == "transposed":
        return random(N, M, dtype=F16, device=device, seed=5).t()
    return random(1, N, dtype=BF16, device=device, seed=5).expand(M, N)


def _epilogues() -> list[tuple[str, str | None, str, str]]:
    residuals = ("none", "strided", "transposed", "expanded")
    made = []
    for turn, (kind, activation, bias) in enumerate(itertools.product(CLASSES, ACTIVATIONS, ("none", "n", "m"))):
        made += [(kind, activation, bias, "none"), (kind, activation, bias, residuals[1 + turn % 3])]
    return made


@pytest.mark.parametrize(("kind", "activation", "bias", "residual"), _epilogues())
def test_epilogues(kind: str, activation: str | None, bias: str, residual: str, watch: Watch, device: str) -> None:
    M, N, K = 6, 18, 40
    turn = _epilogues().index((kind, activation, bias, residual))
    options = dict(CLASSES[kind])
    call = product(M, N, K, options.pop("a"), device=device, **options)
    call = scaled(call) if kind in ("int8", "e4m3") else call
    length, other = (N, F32) if bias == "n" else (M, F16)
    call = call._replace(
        activation=activation,
        bias=None if bias == "none" else random(2 * length, dtype=other, device=device, seed=6)[::2],
        bias_along="m" if bias == "m" else "n",
        residual=_residual(residual, M, N, device),
        alpha=(1.0, -0.6)[turn % 2],
        slope=(0.01, 0.3)[turn % 2],
    )
    assert_right("triton", call, tile(16, 32, 64), watch)
    for backend, config in FINISHERS if device == "cuda" else (FINISHERS[turn % 5],):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
    for other_backend in ("torch", "reference"):
        if refuses(other_backend, call) is None:
            assert_right(other_backend, call)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (2, 1, 3, 40)], ids=shape_id)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_bias_along_the_rows_of_many_dimensions(kind: str, shape: tuple[int, ...], watch: Watch, device: str) -> None:
    a, b = (
        random(*shape, dtype=CLASSES[kind]["a"], device=device),
        random(20, 40, dtype=CLASSES[kind]["a"], device=device),
    )
    rows = a.numel() // 40
    call = GemmCall(a, b.mT, 100 * random(rows, dtype=F32, device=device), bias_along="m", out_dtype=BF16, alpha=0.5)
    call = call._replace(residual=random(*shape[:-1], 20, dtype=F32, device=device))
    for backend, config in (*SPECIAL_RUNS[:2], *FINISHERS[1:3], ("torch", None), ("reference", None)):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("activation", GATED)
def test_gated(activation: str, kind: str, watch: Watch, device: str) -> None:
    # halves that tiles of columns do not fill, and the second half begins inside what a tile would have read
    options = dict(CLASSES[kind])
    call = product(6, 2 * 21, 70, options.pop("a"), device=device, activation=activation, **options)
    if kind in ("int8", "e4m3"):
        call = call._replace(
            scale_a=scales(6, device=device, size=wide(0.1, call.a.dtype)),
            scale_b=scales(42, device=device, size=wide(0.1, call.b.dtype)),
        )
    bias = random(42, dtype=F32, device=device, seed=6)
    calls = (call, call._replace(bias=bias, alpha=0.5, residual=_residual("strided", 6, 21, device)))
    assert "gated" in str(refuses("triton_stream_k", call))
    for each in calls:
        runs = [
            ("triton", tile(16, 16, 64)),
            ("triton", tile(16, 32, 32, SPLIT_K=2)),
            ("triton_multiply", multiply(16, 64, split=2)),
        ]
        for backend, config in (*runs, ("torch", None), ("reference", None)):
            if refuses(backend, each) is None:
                assert_right(backend, each, config, watch)


def test_gated_with_scales_of_blocks(watch: Watch, device: str) -> None:
    call = product(3, 2 * 140, 130, E4M3, device=device, activation="silu_and_mul", out_dtype=F32)
    call = call._replace(
        scale_a=_scale_of_a("block", 3, 130, E4M3, device), scale_b=_scale_of_b("block", 280, 130, E4M3, device)
    )
    for config in (tile(16, 64, 128), tile(16, 128, 64, **SPLIT)):
        assert_right("triton", call, config, watch)
    assert_right("reference", call)


def test_activations_of_numbers_anybody_can_check(device: str) -> None:
    x = torch.tensor([[-2.0, 0.0, 3.0, -1.0, 0.5, 2.0]], device=device)
    one = torch.eye(6, device=device)
    known = {
        "relu": [0.0, 0.0, 3.0, 0.0, 0.5, 2.0],
        "leaky_relu": [-0.5, 0.0, 3.0, -0.25, 0.5, 2.0],
        "silu": [-0.23840584, 0.0, 2.85772238, -0.26894142, 0.31122967, 1.76159416],
        "gelu": [-0.04550026, 0.0, 2.99595031, -0.15865525, 0.34573123, 1.95449974],
        "gelu_tanh": [-0.04540231, 0.0, 2.99636261, -0.15880801, 0.34571401, 1.95459769],
        # silu of the first half, times the second
        "silu_and_mul": [-0.23840584 * -1.0, 0.0, 2.85772238 * 2.0],
    }
    for activation, values in known.items():
        for backend in ("triton", "triton_multiply", "torch", "reference"):
            got = gemm.run(backend, GemmCall(x, one.mT, activation=activation, slope=0.25))
            torch.testing.assert_close(got.flatten().cpu(), torch.tensor(values), rtol=2e-6, atol=2e-7)


def test_the_residual_comes_after_the_activation_and_alpha_before_the_bias(device: str) -> None:
    a = torch.ones(1, 1, device=device)
    for backend in BACKENDS:
        got = gemm.run(
            backend,
            GemmCall(3 * a, 2 * a, -10 * torch.ones(1, device=device), residual=-5 * a, activation="relu", alpha=4.0),
        )
        # relu(4 · 6 − 10) − 5
        assert float(got) == 9.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [I8, E4M3, E5M2], ids=name)
def test_rounding_to_8_bits_saturates(dtype: torch.dtype, backend: str, device: str) -> None:
    largest = LARGEST[dtype]
    values = [largest * 1.5, -largest * 1.5, largest, -largest, 1e30, -1e30, INF, -INF, NAN, 1.0, -1.0, 0.0]
    a = torch.ones(1, 1, device=device)
    b = torch.tensor([values], device=device)
    call = GemmCall(a, b.as_strided((1, 12), (1, 1)), out_dtype=dtype, out_scale=torch.tensor(1.0, device=device))
    got = gemm.run(backend, call).float().flatten().tolist()
    assert got[:8] == [largest, -largest] * 4
    assert got[8] == 0.0 if dtype == I8 else got[8] != got[8]
    assert got[9:] == [1.0, -1.0, 0.0]
    # what is divided is the whole result
    half = call._replace(
        out_scale=torch.tensor([[0.5]], device=device), residual=torch.full((1, 12), 2.0, device=device)
    )
    assert gemm.run(backend, half).float().flatten().tolist()[9:] == [6.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [I8, E4M3, E5M2], ids=name)
def test_8_bit_results_are_the_nearest(dtype: torch.dtype, watch: Watch, device: str) -> None:
    call = product(
        6, 40, 70, F32, device=device, out_dtype=dtype, bias=random(40, dtype=F32, device=device), activation="gelu"
    )
    # most values in range, some beyond it
    call = call._replace(out_scale=torch.tensor([12.0 / LARGEST[dtype]], device=device))
    runs = (
        ("triton", tile()),
        ("triton", tile(**SPLIT)),
        ("triton_stream_k", stream()),
        ("triton_multiply", multiply()),
    )
    for backend, config in (*runs, ("torch", None), ("reference", None)):
        assert_right(backend, call, config, watch)


# --- what is not finite


SPECIAL_RUNS: tuple[tuple[str, Config | None], ...] = (
    ("triton", tile(16, 32, 32)),
    ("triton", tile(16, 32, 16, SPLIT_K=2)),
    ("triton_stream_k", stream(16, 32, 16)),
    ("triton_multiply", multiply(32, 32)),
    ("torch", None),
    ("reference", None),
)


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_stay_in_their_row_and_column(
    value: float, activation: str | None, watch: Watch, device: str
) -> None:
    if value == -INF and activation in ("silu", "gelu", "gelu_tanh"):
        pytest.skip("−∞ · 0: the definition has NaN there, PyTorch's activations a value")
    call = product(6, 20, 45, F16, device=device, activation=activation, bias=random(20, dtype=F16, device=device))
    a, b = call.a.clone(), call.b.clone()
    # the last element of K, at the edge of a mask; inf · 0 in a column of zeros; another column with one of its own
    a[4, 44], b[3, 13] = value, value
    b[:, 7] = 0.0
    for backend, config in SPECIAL_RUNS:
        got = assert_right(backend, call._replace(a=a, b=b), config, watch)
        others = [[i for i in range(size) if i != at] for size, at in zip(got.shape, (4, 13), strict=True)]
        assert bool(got[others[0]][:, others[1]].isfinite().all())
        # relu(−∞) is 0
        if value != -INF or activation is None:
            assert not bool(got[4].isfinite().all()) and not bool(got[:, 13].isfinite().all())
            assert bool(got[4, 7].isnan())


@pytest.mark.parametrize("place", ["bias", "residual", "scale_a", "scale_b", "out_scale"])
def test_special_values_of_what_is_around(place: str, watch: Watch, device: str) -> None:
    call = product(6, 20, 40, E5M2, device=device, out_dtype=F32)
    call = call._replace(
        bias=random(20, dtype=F32, device=device), residual=random(6, 20, dtype=F32, device=device, seed=3),
        scale_a=scales(6, device=device), scale_b=scales(20, device=device),
    )  # fmt: skip
    if place == "out_scale":
        call = call._replace(out_dtype=E4M3, out_scale=torch.tensor(NAN, device=device))
    else:
        values = getattr(call, place).clone()
        values[2] = NAN
        call = call._replace(**{place: values})
    for backend, config in SPECIAL_RUNS:
        if refuses(backend, call) is None:
            got = assert_right(backend, call, config, watch)
            assert int(got.float().isnan().sum()) == {"bias": 6, "scale_b": 6, "out_scale": 120}.get(place, 20)


def test_what_lies_beside_the_operands_has_no_part(watch: Watch, device: str) -> None:
    # NaN around a, b, bias, residual and scales: whatever is read past an edge shows
    def framed(values: Tensor) -> Tensor:
        shape = tuple(size + 6 for size in values.shape)
        around = torch.full(shape, NAN, device=device).to(values.dtype)
        if values.dtype == I8:
            around = torch.full(shape, 127, dtype=I8, device=device)
        inside = around[tuple(slice(3, size + 3) for size in values.shape)]
        return inside.copy_(values)

    call = product(6, 18, 70, F16, device=device, bias=random(18, dtype=F32, device=device), activation="relu")
    call = call._replace(residual=random(6, 18, dtype=F32, device=device))
    eight = product(6, 18, 70, I8, device=device, out_dtype=F32)
    eight = eight._replace(scale_a=scales(6, 1, device=device), scale_b=scales(18, device=device))
    for given_too in (call, eight):
        parts = {key: framed(value) for key, value in given_too._asdict().items() if isinstance(value, Tensor)}
        inner = given_too._replace(**(parts | {"b": framed(given_too.b.mT).mT}))
        for backend, config in SPECIAL_RUNS:
            if refuses(backend, inner) is None:
                got = assert_right(backend, inner, config, watch)
                around = gemm.run(backend, given_too, config=fitted(config, given_too))
                assert same_bits(got, around) or backend == "torch"


# --- strides past 2^31


@pytest.mark.parametrize("odd", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("far", ["rows of a", "K of a", "columns of b", "K of b", "batch of a", "batch of b"])
def test_elements_past_two_to_the_31(
    far: str, odd: int, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch, overflows=True)
    # of the storage only the pages that are used are ever made; in units of 16 an even step fits 32 bits
    step = (1 << 31) + 16 + odd
    storage = torch.empty(step + (1 << 12), dtype=F16, device=device)

    def placed(shape: tuple[int, ...], strides: tuple[int, ...], seed: int) -> Tensor:
        made = storage.as_strided(shape, strides)
        return made.copy_(random(*shape, dtype=F16, device=device, seed=seed))

    a, b = random(2, 32, dtype=F16, device=device), random(16, 32, dtype=F16, device=device, seed=1).mT
    if far == "rows of a":
        a = placed((2, 32), (step, 1), 0)
    elif far == "K of a":
        a = placed((3, 2), (1, step), 0)
        b = b[:2]
    elif far == "columns of b":
        b = placed((32, 2), (1, step), 1)
    elif far == "K of b":
        a, b = a[:, :2], placed((2, 16), (step, 1), 1)
    elif far == "batch of a":
        a = placed((2, 2, 32), (step, 32, 1), 0)
        b = b.expand(2, 32, 16)
    else:
        b = placed((2, 16, 32), (step, 32, 1), 1).mT
    call = GemmCall(a, b, out_dtype=F32)
    for backend, config in (("triton", tile()), ("triton_stream_k", stream(k=16)), ("triton_multiply", multiply())):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
        else:
            assert backend == "triton_multiply" and far.startswith("K of")


def test_rows_that_are_far_apart_together(watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, overflows=True)
    # no stride past 2^31, but eight of them
    step = 1 << 29
    storage = torch.empty(7 * step + 64, dtype=I8, device=device)
    a = storage.as_strided((8, 32), (step, 1)).copy_(random(8, 32, dtype=I8, device=device)).view(E5M2)
    a = a.copy_(random(8, 32, dtype=E5M2, device=device))
    call = GemmCall(a, random(18, 32, dtype=E5M2, device=device, seed=1).mT, out_dtype=F32)
    for backend, config in (("triton", tile()), ("triton_stream_k", stream(k=16)), ("triton_multiply", multiply())):
        assert_right(backend, call, config, watch)


# --- bound calls


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned-first", "misaligned-first"])
def test_addresses_of_one_signature_may_differ_in_alignment(first: int, backend: str, device: str) -> None:
    # 16-byte accesses at an address that is not a multiple of 16 are an error on a GPU
    gemm.force(backend)
    rows, weights = random(4 * 64 + 8, device=device), random(8 * 64 + 8, device=device, seed=1)
    for turn, offset in enumerate((first, 1 - first, first, 1 - first, 3)):
        call = GemmCall(rows[offset : offset + 256].view(4, 64), weights[offset : offset + 512].view(8, 64).mT)
        call = call._replace(bias=random(8, device=device, seed=turn))
        assert_result(backend, gemm(call), call)


@pytest.mark.parametrize("kind", ["bf16", "int8", "e4m3"])
def test_a_bound_call_takes_each_of_its_tensors_anew(kind: str, device: str) -> None:
    for backend in ("triton", "triton_stream_k"):
        gemm.force(backend)
        for seed in range(3):
            dtype = {"bf16": BF16, "int8": I8, "e4m3": E4M3}[kind]
            call = GemmCall(
                random(5, 40, dtype=dtype, device=device, seed=seed),
                random(40, 20, dtype=dtype, device=device, seed=seed + 9),
                random(20, dtype=F32, device=device, seed=seed),
                residual=random(5, 20, dtype=F32, device=device, seed=seed),
                out_dtype=F32,
            )
            if kind != "bf16":
                call = call._replace(
                    scale_a=scales(5, device=device, seed=seed, size=wide(0.1, dtype)),
                    scale_b=scales(20, device=device, seed=seed + 5, size=wide(0.1, dtype)),
                )
            assert_result(backend, gemm(call), call)
        assert len(gemm._bound) == 1


# --- what the choice depends on


def _refused(call: GemmCall) -> dict[str, str]:
    return {refusal.backend: refusal.reason for refusal in gemm.decide(call).refused}


def test_the_default_is_pytorch_and_others_say_why(device: str) -> None:
    call = product(5, 20, 40, device=device)
    decision = gemm.decide(call)
    assert decision.backend == "torch"
    assert set(_refused(call)) >= (set(KERNELS) if device == "cpu" else {"triton_stream_k", "triton_multiply"})
    assert all(_refused(call).values())
    if device == "cpu":
        assert gemm.decide(scaled(product(5, 20, 40, E4M3))).backend == "reference"
        assert gemm.decide(product(5, 20, 40, BF16, I8)).backend == "reference"


def test_key_has_all_the_choice_depends_on(device: str) -> None:
    base = product(5, 32, 64, device=device)
    eight = product(5, 32, 64, I8, device=device, out_dtype=BF16)
    calls = [
        base,
        product(6, 32, 64, device=device),
        product(5, 48, 64, device=device),
        product(5, 32, 80, device=device),
        product(5, 32, 64, F16, device=device),
        product(5, 32, 64, BF16, I8, device=device),
        base._replace(a=random(64, 5, device=device).t()),
        base._replace(a=random(5, 65, device=device)[:, 1:]),
        base._replace(a=random(5, 128, device=device)[:, ::2]),
        base._replace(b=random(64, 32, device=device)),
        base._replace(b=random(2, 64, 32, device=device)),
        base._replace(b=random(3, 64, 32, device=device)),
        base._replace(a=random(5, 2, 64, device=device).transpose(0, 1)),
        base._replace(bias=random(32, device=device)),
        base._replace(bias=random(5, device=device), bias_along="m"),
        base._replace(activation="relu"),
        base._replace(activation="silu_and_mul"),
        base._replace(residual=random(5, 32, device=device)),
        base._replace(out_dtype=F32),
        base._replace(out_dtype=I8, out_scale=torch.ones((), device=device)),
        base._replace(precision="tf32"),
        base._replace(a=base.a.clone().requires_grad_()),
        base._replace(norm_weight=random(64, device=device)),
        base._replace(norm_weight=random(128, device=device)[::2]),
        product(5, 32, 64, BF16, I8, device=device, norm_weight=random(64, device=device)),
        eight,
        eight._replace(scale_a=scales(device=device)),
        eight._replace(scale_a=scales(5, device=device)),
        eight._replace(scale_b=scales(device=device)),
        eight._replace(scale_b=scales(32, device=device)),
        *(UNWALKED[case](device) for case in ("a", "residual", "residual-of-rows")),
    ]
    keys = [gemm.key(call) for call in calls]
    for call in calls:
        gemm.check(call)
    same = [(i, j) for i, j in itertools.combinations(range(len(keys)), 2) if keys[i] == keys[j]]
    assert not same
    assert all(len(key) == len(gemm.key_fields) for key in keys)
    # sizes of a bucket share a key
    assert gemm.key(product(17, 32, 64)) == gemm.key(product(32, 32, 64)) != gemm.key(product(33, 32, 64))


@pytest.mark.parametrize("which", ["a", "b", "bias", "residual", "scale_a", "scale_b", "norm_weight"])
def test_gradients(which: str, device: str) -> None:
    """A call that needs gradients gets them, from no kernel, and the decision says why."""
    if which.startswith("scale"):
        # sizes that PyTorch takes on a GPU too
        call = product(20, 24, 40, I8, device=device, out_dtype=F32)
        call = call._replace(scale_a=scales(20, device=device), scale_b=scales(24, device=device))
    else:
        call = product(5, 18, 40, F32, device=device, bias=random(18, dtype=F32, device=device), activation="gelu")
        call = call._replace(residual=random(5, 18, dtype=F32, device=device))
    if which == "norm_weight":
        call = call._replace(norm_weight=random(40, dtype=F32, device=device))
    leaf = getattr(call, which).detach().clone().requires_grad_()
    call = call._replace(**{which: leaf})
    # stream-K normalises nothing
    for forced in KERNELS[:1] if which == "norm_weight" else KERNELS[:2]:
        gemm.force(forced)
        assert "gradients" in _refused(call)[forced]
        assert gemm.decide(call).backend == "torch"
        with torch.no_grad():
            assert gemm.decide(call).backend == forced
    gemm(call).square().sum().backward()
    assert leaf.grad is not None
    # by the definition, in float64
    parts = {
        key: value.detach().double().requires_grad_(key == which) if isinstance(value, Tensor) else value
        for key, value in call._asdict().items()
    }
    a, b = parts["a"], parts["b"]
    a = a if parts["scale_a"] is None else a * parts["scale_a"][:, None]
    b = b if parts["scale_b"] is None else b * parts["scale_b"]
    if parts["norm_weight"] is not None:
        a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * parts["norm_weight"]
    y = a @ b
    if parts["bias"] is not None:
        y = torch.nn.functional.gelu(y + parts["bias"]) + parts["residual"]
    y.square().sum().backward()
    torch.testing.assert_close(
        leaf.grad.double(), parts[which].grad, rtol=1e-4, atol=1e-4 * float(parts[which].grad.abs().max())
    )


def test_float8_scales_get_their_gradient(device: str) -> None:
    call = scaled(product(5, 32, 32, E4M3, device=device, out_dtype=F32))
    leaf = call.scale_b.clone().requires_grad_()  # type: ignore[union-attr]
    if device == "cuda":
        pytest.skip("_scaled_mm has no derivative")
    ops.gemm(call.a, call.b, scale_a=call.scale_a, scale_b=leaf, out_dtype=F32).sum().backward()  # type: ignore[no-untyped-call]
    want = (call.a.double() @ call.b.double()).sum() * float(call.scale_a)  # type: ignore[arg-type]
    torch.testing.assert_close(leaf.grad.double(), want, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_cost(device: str) -> None:
    cost = gemm.study.cost
    call = product(6, 20, 40, device=device, bias=random(20, dtype=F32, device=device))
    assert cost(call).flops == 2 * 6 * 20 * 40
    assert cost(call).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 20) + 4 * 20
    batch = GemmCall(random(3, 6, 40, device=device), random(3, 40, 20, device=device), out_dtype=F32)
    assert cost(batch).flops == 3 * 2 * 6 * 20 * 40
    assert cost(batch).bytes == 3 * (2 * (6 * 40 + 40 * 20) + 4 * 6 * 20)
    normed = product(6, 20, 40, device=device, norm_weight=random(40, dtype=F32, device=device))
    assert cost(normed).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 20) + 4 * 40
    gated = product(6, 20, 40, device=device, activation="silu_and_mul")
    assert cost(gated).flops == 2 * 6 * 20 * 40 and cost(gated).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 10)
    three = GemmCall(random(2, 3, 40, device=device), random(40, 20, device=device))
    assert cost(three).flops == 2 * 6 * 20 * 40


def test_bench_and_emulate_cases_are_calls(device: str) -> None:
    quick = gemm.study.bench_cases("quick", device)  # type: ignore[misc]
    assert len(quick) == 3
    for case in quick.values():
        gemm.check(case())
    assert len(gemm.study.bench_cases("shared", "meta")) > 80  # type: ignore[misc]
    for case in gemm.study.bench_cases("shared", "meta").values():  # type: ignore[misc]
        gemm.check(case())
    for label, case in gemm.study.emulate_cases("gfx942").items():  # type: ignore[misc]
        # they are made on the CPU
        call = mapped(case(), lambda value: moved(value, device))
        if call.a.dtype in FNUZ:
            assert device == "cuda" or "has no" in str(refuses("triton", call)), label
        elif call.form == "plain":
            assert_right("triton" if call.tail is None else "triton_multiply", call)
        else:
            assert numerics.compare(gemm.run("triton", call), gemm.reference(call)).within(
                numerics.tolerance("gemm", "bfloat16")
            ), label


# --- wrong arguments


def _t(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _bad(message: str, a: Any = None, b: Any = None, **more: Any) -> tuple[str, GemmCall]:
    return message, GemmCall(_t(3, 8) if a is None else a, _t(8, 6) if b is None else b, **more)


_A8, _B8 = _t(3, 8, dtype=I8), _t(8, 6, dtype=I8)
_ONE = torch.ones(())

BAD = {
    "a-number": _bad("a must be a tensor of at least 1 dim", 3.0),
    "a-scalar": _bad("a must be a tensor of at least 1 dim", _ONE),
    "b-text": _bad("b must be a tensor of at least 2 dim", b="b"),
    "b-vector": _bad("b must be a tensor of at least 2 dim", b=_t(8)),
    "a-int64": _bad("a must be floating-point, int8", _t(3, 8, dtype=torch.int64)),
    "a-complex": _bad("a must be floating-point", _t(3, 8, dtype=torch.complex64)),
    "b-uint8": _bad("b must be floating-point, int8", b=_t(8, 6, dtype=torch.uint8)),
    "b-bool": _bad("b must be floating-point", b=_t(8, 6, dtype=torch.bool)),
    "K": _bad("do not fit: K is 8 and 7", b=_t(7, 6)),
    "K-vector": _bad("do not fit: K is 7 and 8", _t(7)),
    "K-batch": _bad("do not fit: K is 8 and 7", b=_t(2, 7, 6)),
    "dtypes": _bad("cannot multiply torch.float32 by torch.float16", b=_t(8, 6, dtype=F16)),
    "int8-float": _bad("cannot multiply torch.int8 by torch.float32", _A8),
    "int8-float8": _bad("cannot multiply torch.int8 by torch.float8_e4m3fn", _A8, _B8.float().to(E4M3)),
    "devices": _bad("a is on cpu, b on meta", b=_t(8, 6).to("meta")),
    "batch-of-a-vector": _bad(r"needs an a \[..., M, K\]", _t(8), _t(2, 8, 6)),
    "batches": _bad("batches of a .* and b .* do not fit", _t(3, 4, 8), _t(2, 8, 6)),
    "scale_a-dtype": _bad("scale_a must be a float32 tensor", _A8, _B8, scale_a=_t(3, dtype=F16)),
    "scale_a-number": _bad("scale_a must be a float32 tensor", _A8, _B8, scale_a=0.5),
    "scale_b-device": _bad("scale_b must be a float32 tensor on cpu", _A8, _B8, scale_b=_t(6).to("meta")),
    "scale_a-shape": _bad(r"scale_a \[4\] is not one for the tensor", _A8, _B8, scale_a=_t(4)),
    "scale_a-row": _bad(r"scale_a \[1, 3\] is not", _A8, _B8, scale_a=_t(1, 3)),
    "scale_a-deep": _bad(r"scale_a \[1, 1, 1\] is not", _A8, _B8, scale_a=_t(1, 1, 1)),
    "scale_b-shape": _bad(r"scale_b \[3\] is not one for the tensor", _A8, _B8, scale_b=_t(3)),
    "scale_b-column": _bad(r"scale_b \[6, 1\] is not", _A8, _B8, scale_b=_t(6, 1)),
    "scale_b-blocks": _bad(r"scale_b \[2, 3\] is not", _t(3, 300, dtype=I8), _t(300, 200, dtype=I8), scale_b=_t(2, 3)),
    "scale-batch": _bad("scale_a is for the whole tensor", _t(2, 3, 8, dtype=I8), _t(2, 8, 6, dtype=I8), scale_a=_t(3)),
    "scale_b-batch": _bad(
        "scale_b is for the whole tensor", _t(2, 3, 8, dtype=I8), _t(2, 8, 6, dtype=I8), scale_b=_t(6)
    ),
    "scale_a-weight-only": _bad("scale_a is for an 8-bit a", b=_B8, scale_a=_ONE),
    "activation": _bad("activation takes relu, .*not 'tanh'", activation="tanh"),
    "activation-list": _bad("activation takes relu", activation=["relu"]),
    "gated-odd": _bad("even number of columns, got 7", b=_t(8, 7), activation="silu_and_mul"),
    "alpha-text": _bad("alpha must be a number", alpha="2"),
    "alpha-tensor": _bad("alpha must be a number", _A8, _B8, alpha=_t(2)),
    "alpha-bool": _bad("alpha must be a number", alpha=True),
    "slope-none": _bad("slope must be a number", slope=None),
    "overwrite-one": _bad("overwrite_residual is True or False, not 1", residual=_t(3, 6), overwrite_residual=1),
    "overwrite-nothing": _bad("there is no residual to overwrite", overwrite_residual=True),
    "bias_along": _bad("bias_along takes n or m, not 'k'", bias=_t(6), bias_along="k"),
    "bias_along-gated": _bad("takes a bias along n", bias=_t(3), bias_along="m", activation="gelu_and_mul"),
    "bias-shape": _bad(r"bias must be floating-point \[6\]", bias=_t(3)),
    "bias-m": _bad(r"bias must be floating-point \[3\]", bias=_t(6), bias_along="m"),
    "bias-rows": _bad(r"bias must be floating-point \[6\]", bias=_t(1, 6)),
    "bias-dtype": _bad("bias must be floating-point", bias=_t(6, dtype=I32)),
    "bias-device": _bad("bias must be floating-point", bias=_t(6).to("meta")),
    "bias-text": _bad("bias must be floating-point", bias="b"),
    "bias-half": _bad(r"bias must be floating-point \[6\]", bias=_t(3), activation="silu_and_mul"),
    "residual-shape": _bad(r"residual must be floating-point \[3, 6\]", residual=_t(6)),
    "residual-half": _bad(r"residual must be floating-point \[3, 3\]", residual=_t(3, 6), activation="silu_and_mul"),
    "residual-dtype": _bad("residual must be floating-point", residual=_t(3, 6, dtype=I8)),
    "residual-device": _bad("residual must be floating-point", residual=_t(3, 6).to("meta")),
    "residual-number": _bad("residual must be floating-point", residual=1.0),
    "out_dtype": _bad("out_dtype takes float32", out_dtype=torch.int64),
    "out_dtype-text": _bad("out_dtype takes float32", out_dtype="float16"),
    "int32-of-floats": _bad("int32 is the plain sum of int8", out_dtype=I32),
    "int32-scaled": _bad("int32 is the plain sum of int8", _A8, _B8, out_dtype=I32, scale_a=_ONE),
    "int32-bias": _bad("int32 is the plain sum of int8", _A8, _B8, out_dtype=I32, bias=_t(6)),
    "out_scale-missing": _bad("out_scale goes with an 8-bit out_dtype", out_dtype=I8),
    "out_scale-alone": _bad("out_scale goes with an 8-bit out_dtype", out_scale=_ONE),
    "out_scale-shape": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=_t(6)),
    "out_scale-dtype": _bad(r"out_scale must be float32 \[\]", out_dtype=E4M3, out_scale=_t(1, dtype=F16)),
    "out_scale-number": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=2.0),
    "out_scale-device": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=_t(1).to("meta")),
    "precision": _bad("precision takes ieee, tf32, not 'high'", precision="high"),
    "norm-length": _bad(r"norm_weight must be floating-point \[8\] on cpu", norm_weight=_t(6)),
    "norm-rows": _bad(r"norm_weight must be floating-point \[8\]", norm_weight=_t(1, 8)),
    "norm-dtype": _bad("norm_weight must be floating-point", norm_weight=_t(8, dtype=I8)),
    "norm-device": _bad("norm_weight must be floating-point", norm_weight=_t(8).to("meta")),
    "norm-text": _bad("norm_weight must be floating-point .*got str", norm_weight="w"),
    "norm-8-bits": _bad("floating-point a of 16 bits or more, not torch.int8", _A8, _B8, norm_weight=_t(8)),
    "norm-scale_a": _bad("norm_weight and scale_a exclude", scale_a=_ONE, norm_weight=_t(8)),
    "norm-batch": _bad("for one matrix b, not a batch", _t(2, 3, 8), _t(2, 8, 6), norm_weight=_t(8)),
    "norm-eps": _bad("norm_eps must be a number of at least 0, got -1", norm_weight=_t(8), norm_eps=-1.0),
    "norm-eps-nan": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps=NAN),
    "norm-eps-text": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps="0"),
    "norm-eps-tensor": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps=_ONE),
}
# what `gemm` takes by position, and what only the op behind the public functions takes
WITHIN = ("a", "b", "bias", "form", "group", "zero", "tail")
BAD_FORMS = {
    "form": _bad("form takes plain, shuffled, int4, not 'packed'", form="packed"),
    "shuffled-rows": _bad("N % 16 = K % 32 = 0", form="shuffled"),
    "shuffled-layout": _bad("contiguous", _t(3, 32), _t(32, 16), form="shuffled"),
    "group": _bad("groups have 32, 64, 128 rows of b, not 16", b=_B8, group=16, scale_b=_t(1, 6)),
    "group-types": _bad("groups are for 8-bit and 4-bit weights", group=32),
    "group-scale": _bad(r"scale_b \[2, 6\] is not", b=_B8, group=32, scale_b=_t(2, 6)),
    "int4-bytes": _bad(r"uint8 \[32, N\]", b=_t(4, 6, dtype=torch.uint8), form="int4", group=32),
    "int4-dtype": _bad(r"uint8 \[32, N\]", b=_t(32, 6, dtype=I8), form="int4", group=32),
    "int4-group": _bad("groups of 32, 64, 128, not 0", b=_t(32, 6, dtype=torch.uint8), form="int4"),
    "int4-int8": _bad("cannot multiply torch.int8", _A8, _t(32, 6, dtype=torch.uint8), form="int4", group=32),
    "zero-plain": _bad("zero points are for 4-bit", b=_B8, scale_b=_t(6), zero=_t(6)),
    "zero-shape": _bad(
        "zero must have scale_b's shape", b=_t(32, 6, dtype=torch.uint8), form="int4", group=32, scale_b=_t(1, 6),
        zero=_t(2, 6, dtype=torch.uint8),
    ),
    "tail-k": _bad(r"a tail is torch.float32 \[8, T\]", b=_B8, scale_b=_ONE, tail=_t(7, 2)),
    "tail-device": _bad("the tail must be on cpu", b=_B8, scale_b=_ONE, tail=_t(8, 2).to("meta")),
    "tail-plain": _bad("goes with a weight in 8 bits", tail=_t(8, 2)),
    "tail-gated": _bad("no gated activation", b=_B8, scale_b=_ONE, tail=_t(8, 2), activation="silu_and_mul"),
    "zero-alone": _bad(
        "zero must have scale_b's shape", b=_t(32, 6, dtype=torch.uint8), form="int4", group=32,
        zero=_t(1, 6, dtype=torch.uint8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *BAD_FORMS])
def test_wrong_arguments(case: str) -> None:
    """One clear error on every path, before any of them looks at its backend."""
    message, call = (BAD | BAD_FORMS)[case]
    for backend in BACKENDS:
        with pytest.raises(InvalidArgument, match=message):
            gemm.run(backend, call)
    with pytest.raises(InvalidArgument, match=message):
        gemm.decide(call)
    with pytest.raises(InvalidArgument, match=message):
        gemm(call)
    if case in BAD:
        options = {key: value for key, value in call._asdict().items() if key not in WITHIN}
        with pytest.raises(InvalidArgument, match=message):
            ops.gemm(call.a, call.b, call.bias, **options)


def test_every_message_of_the_checks_is_asked_for() -> None:
    """By the lines that raise: a check that is added here needs its case above."""
    source = Path(inspect.getfile(GemmCall))
    raising = {node.lineno for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Raise)}
    asked = set()
    for _, call in (BAD | BAD_FORMS).values():
        with pytest.raises(InvalidArgument) as error:
            gemm.check(call)
        asked.add(error.traceback[-1].lineno + 1)
    assert raising == asked


def test_configurations_that_do_not_fit(device: str) -> None:
    run = gemm.run
    for dtype, config, what in (
        (I8, {"k": 16}, "BLOCK_K of 16 .* take 32"),
        (E4M3, {"k": 16}, "BLOCK_K of 16 .* take 32"),
        (BF16, {"k": 8}, "BLOCK_K of 8 .* take 16"),
        (BF16, {"m": 8}, "BLOCK_M of 8 .* take 16"),
        (I8, {"n": 8}, "BLOCK_N of 8 .* take 16"),
    ):
        for backend, make in (("triton", tile), ("triton_stream_k", stream)):
            with pytest.raises(InvalidArgument, match=what):
                run(backend, product(3, 20, 64, dtype, device=device), config=make(**config))
    blocks = product(3, 130, 256, E4M3, device=device, scale_b=scales(2, 2, device=device))
    with pytest.raises(InvalidArgument, match="more than one block of scales"):
        run("triton", blocks, config=tile(k=256))
    with pytest.raises(InvalidArgument, match="more than one block of scales"):
        run("triton_stream_k", blocks, config=stream(k=256))
    groups = product(3, 20, 256, BF16, I8, device=device, scale_b=scales(4, 20, device=device), group=64)
    with pytest.raises(InvalidArgument, match="more than one group of 64"):
        run("triton", groups, config=tile(k=128))
    for chains, size in ((0, 64), (3, 64), (4, 32)):
        with pytest.raises(InvalidArgument, match=f"cannot be divided into {chains} CHAINS"):
            run("triton", product(3, 20, 64, device=device), config=tile(k=size, CHAINS=chains))
    stored = torch.zeros(20, 128, dtype=torch.uint8, device=device).mT
    int4 = GemmCall(random(3, 256, device=device), stored, scale_b=scales(8, 20, device=device), form="int4", group=32)
    for k in (32, 128):
        with pytest.raises(InvalidArgument, match="does not fit 4-bit values in groups of 32"):
            run("triton", int4, config=tile(k=k))


# --- compilation

UNITS = (16, 8, 4, 2, 1)


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the launches of calls from now on are noted instead of run."""
    noted: list[Any] = []

    def note(launch: Any, _device: Any, described: int = 0) -> Callable[..., None]:
        noted.append(launch)
        return lambda *_args: None

    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", note)
    return noted


def _unspecialized(kernel: Any) -> set[str]:
    """The parameters whose value Triton does not look at when it decides whether to compile."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs["do_not_specialize"])


def _divisor(number: int) -> int:
    return next(unit for unit in UNITS if number % unit == 0)


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param("triton", tile(), id="tiles"),
        pytest.param("triton", tile(**SPLIT), id="split"),
        pytest.param("triton_stream_k", stream(), id="stream_k"),
        pytest.param("triton_multiply", multiply(), id="multiply"),
    ],
)
def test_what_is_compiled_anew(backend: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes compile a kernel anew only by what divides N and K, and whether steps fill K; rows where there are few."""
    noted = _launches(monkeypatch)
    sizes = (1, 2, 3, 8, 16, 17, 24, 31, 32, 33, 48, 64, 80, 96, 100, 112, 160, 1000, 1001, 1024, 4096, 4128)
    few = backend == "triton_multiply"
    variants: dict[Any, set[Any]] = {}
    for i, K in enumerate(sizes):
        for j, N in enumerate(sizes):
            M = (1, 5, 8)[(i + j) % 3] if few else (1, 5, 16, 700, 4096)[(i + j) % 5]
            call = GemmCall(
                torch.empty(M, K, dtype=BF16, device="meta"), torch.empty(N, K, dtype=BF16, device="meta").mT
            )
            noted.clear()
            gemm.backends[backend].run(call, config=config)
            for launch in noted:
                options = launch.options()
                # one row has any stride; one column of K lies together with its neighbours
                bucket = (
                    launch.kernel, _divisor(N), _divisor(K), K % config["BLOCK_K"] == 0, M if few else M == 1,
                    K == 1, N == 1,
                )  # fmt: skip
                numbers = {
                    key: value
                    for key, value in zip(launch.kernel.arg_names, launch.args, strict=False)
                    if isinstance(value, (int, float)) and key not in _unspecialized(launch.kernel)
                }
                assert not numbers, f"specialised on {numbers}"
                variants.setdefault(bucket, set()).add(tuple(sorted(options.items(), key=str)))
    assert all(len(found) == 1 for found in variants.values())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "triton_stream_k"])
def test_new_sizes_do_not_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        noted = _launches(patch)
        gemm.run(backend, product(40, 96, 64, device="cuda"), config=configs(backend)[-1])
    kernels = [launch.kernel for launch in noted]

    def compiled_for(M: int, N: int, K: int) -> int:
        assert_right(backend, product(M, N, K, device="cuda"), configs(backend)[-1])
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    before = compiled_for(40, 96, 64)
    for shape in ((41, 96, 64), (2, 96, 64), (700, 112, 128), (64, 1008, 1024)):
        assert compiled_for(*shape) == before, f"{shape} compiled anew"
    # stated borders: another divisor of N, of K
    assert compiled_for(40, 97, 64) > before
    assert compiled_for(40, 96, 65) > before + 1


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [
        *((kind, True) for kind in ("fp32", "epilogue", "batch", "int8", "e4m3", "weight")),
        *((kind, False) for kind in ("fp32", "int8")),
    ],
    ids=lambda value: {True: "dynamic", False: "static"}.get(value, value),
)
def test_compile_fullgraph(kind: str, dynamic: bool, device: str) -> None:
    """One graph without breaks, equal to eager; with dynamic shapes rows of one bucket do not compile again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dtype = {"int8": I8, "e4m3": E4M3}.get(kind, F32)
    b = random(32, 48, dtype=I8 if kind == "weight" else dtype, device=device).mT
    options: dict[str, Any] = {"out_dtype": F32}
    if kind in ("int8", "e4m3"):
        options |= {"scale_a": scales(device=device, size=0.01), "scale_b": scales(32, device=device)}
    if kind == "epilogue":
        options |= {"bias": random(32, dtype=F32, device=device), "activation": "silu_and_mul", "alpha": 0.5}
    if kind == "batch":
        b = torch.stack((b, b + 1))

    def call(a: Tensor) -> Tensor:
        return ops.gemm(a, b, options.get("bias"), **{k: v for k, v in options.items() if k != "bias"})

    backend = "eager" if device == "cpu" else "inductor"
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch.no_grad():
        for rows in (20, 31):
            shape = (2, rows, 48) if kind == "batch" else (rows, 48)
            a = random(*shape, dtype=dtype, device=device)
            torch.testing.assert_close(compiled(a), call(a), rtol=1e-5, atol=1e-5)
    # not calls of the backend: Inductor has a graph traced again where it must take Python floats for constants
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 2)
    # the decision made while tracing is on record
    assert any(calls == 0 and decision.key[2] == 48 for decision, calls in gemm.decisions())


def test_compile_with_gradients(device: str) -> None:
    torch._dynamo.reset()
    a, b = random(6, 20, dtype=F32, device=device), random(20, 18, dtype=F32, device=device)
    leaf, other = a.clone().requires_grad_(), a.clone().requires_grad_()
    backend = "aot_eager" if device == "cpu" else "inductor"
    torch.compile(lambda x: ops.gemm(x, b, activation="gelu"), fullgraph=True, backend=backend)(leaf).sum().backward()
    torch.nn.functional.gelu(other @ b).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


_COMPILE = """
import itertools
import torch
from wavecrest.hardware import ARCHS
from wavecrest.isa.compiler import compile_launch
from wavecrest.ops._gemm import launch as L
from wavecrest.ops._gemm import launch_gemv as few
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
import tests.ops.test_gemm as t
import tests.ops.gemm_harness as h

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

calls = {}
for dtype in (torch.int8, torch.float8_e4m3fn):
    for blocks_a, blocks_b in itertools.product((0, 1), repeat=2):
        calls[f"{dtype} {blocks_a}{blocks_b}"] = GemmCall(
            empty(5, 300, dtype=dtype), empty(20, 300, dtype=dtype).mT, out_dtype=torch.float32,
            scale_a=empty(5, 3) if blocks_a else empty(5), scale_b=empty(3, 1) if blocks_b else empty(20))
bf16 = torch.bfloat16
int4 = empty(20, 160, dtype=torch.uint8).mT
zero = empty(3, 20, dtype=torch.uint8)
calls["int4"] = GemmCall(empty(5, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, zero=zero)
calls["weight groups"] = GemmCall(
    empty(5, 300, dtype=bf16), empty(20, 300, dtype=torch.int8).mT, scale_b=empty(10, 20), group=32)
calls["shuffled"] = GemmCall(empty(5, 320, dtype=bf16), empty(32, 320, dtype=bf16).mT, form="shuffled")
far = torch.empty_strided((5, 320), (2**31 + 16, 1), dtype=bf16, device="meta")
calls["far rows"] = GemmCall(far, empty(32, 320, dtype=bf16).mT)
far = torch.empty_strided((3, 20), (2**31 + 16, 1), dtype=bf16, device="meta")
calls["far columns"] = GemmCall(empty(5, 3, dtype=bf16), far)
three = empty(2, 3, 4, 320, dtype=bf16).permute(2, 1, 0, 3)
calls["three strides"] = GemmCall(three, empty(32, 320, dtype=bf16).mT)
calls["steps"] = GemmCall(empty(10, 600, dtype=bf16)[::2, ::2], empty(300, 60, dtype=bf16)[:, ::3])
calls["columns"] = GemmCall(empty(300, 5, dtype=bf16).t(), empty(300, 20, dtype=bf16))
calls["gated int8 out"] = GemmCall(
    empty(5, 300), empty(40, 300).mT, empty(40), activation="gelu_and_mul", residual=empty(5, 20), out_dtype=torch.int8,
    out_scale=empty())
calls["batch"] = GemmCall(empty(3, 5, 300), empty(3, 300, 20), empty(5), bias_along="m", activation="leaky_relu")
calls["int32"] = GemmCall(empty(5, 300, dtype=torch.int8), empty(20, 300, dtype=torch.int8).mT)
normed = {"norm_weight": empty(300, dtype=bf16)}
calls["normed"] = GemmCall(empty(8, 300, dtype=bf16), empty(20, 300, dtype=bf16).mT, **normed)
calls["normed gated"] = GemmCall(
    empty(3, 300, dtype=torch.float16), empty(40, 300, dtype=torch.float8_e5m2).mT, empty(40), None, empty(40),
    empty(3, 20), activation="silu_and_mul", **normed)
calls["normed tiles"] = GemmCall(
    empty(40, 300, dtype=bf16), empty(40, 300, dtype=torch.int8).mT, empty(40), None, empty(40), empty(40, 20),
    activation="silu_and_mul", **normed)
calls["normed fp32"] = GemmCall(empty(5, 300), empty(300, 20), **normed)
calls["normed int4"] = GemmCall(
    empty(2, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, **normed)
plans = [(L.tiles, h.tile(k=64, num_warps=1)), (L.stream, h.stream(k=64)), (few.gemv, h.multiply(split=2)),
         (L.tiles, h.tile(k=64, num_warps=1, SPLIT_K=2, PERSISTENT=1))]
count = 0
for turn, (name, call) in enumerate(calls.items()):
    planner, config = plans[turn % 4]
    if planner is L.stream and call.activation in h.GATED or planner is few.gemv and few.refusal(call):
        planner, config = plans[3]
    if call.norm_weight is not None:
        planner, config = L.tiles, h.tile(k=64, num_warps=1)
        if L.cannot_normalise(call) or name == "normed":
            planner, config = few.gemv, h.multiply(k=128)
    if call.group == 32:
        config = Config(**(config.kwargs | {"BLOCK_K": 32}))
    arch = ARCHS["gfx942" if turn % 3 else "sm_90"]
    plan = planner(call, empty(0, dtype=call.dtype), empty(0, dtype=L.partial_dtype(call)), config, arch, False)
    for launch in (plan.first, plan.second):
        if launch is not None:
            compile_launch(launch, arch.name)
            count += 1
print("compiled", count)
"""


def test_all_paths_pass_the_compiler() -> None:
    """The interpreter has no types that must agree: each combination of options is compiled, with small tiles."""
    pytest.importorskip("triton", reason="compiles kernels")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), os.getcwd()])
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 35


# --- tensor descriptors


@pytest.mark.parametrize("orders", ["k k", "k n", "m k", "m n"])
def test_tensor_descriptors(orders: str, watch: Watch, device: str) -> None:
    """The loop with tensor descriptors gives what the loop with pointers gives; in the interpreter too."""
    M, N, K = 40, 48, 72
    a = random(M, K, device=device) if orders[0] == "k" else random(K, M, device=device).t()
    b = random(K, N, device=device) if orders[2] == "n" else random(N, K, device=device).mT
    call = GemmCall(a, b, random(N, dtype=F32, device=device), activation="relu", out_dtype=F32)
    assert has_descriptors(call)
    for planner, config in (
        (launch_tiles, tile(32, 32, 32)),
        (launch_tiles, tile(32, 32, 32, **SPLIT)),
        (launch_stream, stream(32, 32, 32)),
    ):
        y = torch.full((M, N), NAN, device=device)
        shape = planner(call, y, y, config, None, True).parts
        parts = torch.full(shape or (1,), NAN, device=device)
        plan = planner(call, y, parts, config, None, True)
        for each in (plan.first, plan.second):
            if each is not None:
                each.kernel[each.grid](*each.args, **each.options())
        assert_near(y, *oracle(call, **bound_of("triton", call)))


def test_what_tensor_descriptors_stand_for() -> None:
    fine = product(40, 48, 64)
    assert has_descriptors(fine)
    for call in (
        product(40, 48, 68),
        fine._replace(a=random(64, 40).t(), b=random(64, 40)[:, 2:38]),
        fine._replace(a=random(40, 80)[:, 1:65][:, ::1], b=random(48, 65)[:, :64].mT),
        fine._replace(b=random(2, 64, 48)),
        fine._replace(b=random(48, 64, dtype=I8).mT),
        fine._replace(a=random(4, 5, 64).transpose(0, 1)),
        fine._replace(a=random(40, 128)[:, ::2]),
        product(40, 48, 0),
        fine._replace(a=random(1, 64).expand(40, 64)),
        fine._replace(b=random(1, 64).expand(48, 64).mT),
    ):
        assert not has_descriptors(call)


# --- any call


@st.composite
def calls(draw: st.DrawFn) -> tuple[GemmCall, str, Config | None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    M, N, K = (draw(st.integers(1, most)) for most in (24, 40, 90))
    activation = draw(st.sampled_from([None, *list(ACTIVATIONS)[1:], *GATED]))
    columns = 2 * N if activation in GATED else N
    dtype = draw(st.sampled_from((BF16, F16, F32, I8, E4M3, E5M2)))
    seed = draw(st.integers(0, 100))

    def laid_out(rows: int, cols: int, more: int) -> Tensor:
        order, down, across = (
            draw(st.booleans()),
            draw(st.sampled_from((0, 1, 1, 2))),
            draw(st.sampled_from((1, 1, 1, 2))),
        )
        start = draw(st.integers(0, 3))
        held = (1 if down == 0 else rows * down + start, cols * across + start)
        x = random(*(held if order else held[::-1]), dtype=dtype, device=device, seed=seed + more)
        x = x if order else x.t()
        x = x[:1, start::across] if down == 0 else x[start::down, start::across]
        return x[:rows, :cols].expand(rows, cols)

    a, b = laid_out(M, K, 0), laid_out(columns, K, 50).mT
    call = GemmCall(a, b, activation=activation, out_dtype=F32)
    if dtype in (I8, E4M3, E5M2):
        kinds = st.sampled_from(["none", "tensor", "vector", "block"])
        call = call._replace(
            scale_a=_scale_of_a(draw(kinds), M, K, dtype, device),
            scale_b=_scale_of_b(draw(kinds), columns, K, dtype, device),
        )
    if draw(st.booleans()):
        along = "n" if activation in GATED else draw(st.sampled_from("nm"))
        length = columns if along == "n" else M
        call = call._replace(bias=random(length, dtype=F16, device=device, seed=seed), bias_along=along)
    if draw(st.booleans()):
        call = call._replace(
            residual=_residual(draw(st.sampled_from(["strided", "transposed", "expanded"])), M, N, device)
        )
    call = call._replace(alpha=draw(st.sampled_from((1.0, 1, -0.5))))
    backend = draw(st.sampled_from(KERNELS))
    m, n, k = (draw(st.sampled_from((16, 32, 64))) for _ in range(3))
    group, split = draw(st.integers(1, 4)), draw(st.sampled_from((1, 1, 2, 5)))
    config = tile(m, n, k, GROUP_M=group, SPLIT_K=split, PERSISTENT=draw(st.integers(0, 1)))
    if backend == "triton_stream_k":
        config = stream(m, n, k, group)
    return call, backend, multiply(n, k, split) if backend == "triton_multiply" else config


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls(), st.integers(1, 9))
def test_any_call(made: tuple[GemmCall, str, Config | None], units: int) -> None:
    """Any shape, strides, type, scales, epilogue, algorithm and configuration."""
    call, backend, config = made
    if refuses(backend, call) is not None:
        backend, config = "triton", tile(16, 32, 32)
    with pytest.MonkeyPatch.context() as patch:
        machine(patch, units=units, xcds=1 + units % 3)
        assert_right(backend, call, config)


# --- on a GPU


def _far_rows(device: str, M: int, K: int) -> Tensor:
    """Zeros, but for some rows at both ends."""
    x = torch.zeros(M, K, dtype=BF16, device=device)
    ends = torch.tensor([0, 1, M // 2, M - 2, M - 1], device=device)
    x[ends] = random(5, K, device=device)
    return x


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "triton_stream_k"])
@pytest.mark.parametrize(
    "shape", [(65544, 32776, 16), ((1 << 31) // 4096 + 5, 16, 4096), (16, (1 << 31) // 4096 + 5, 4096)]
)
def test_tensors_past_2_to_the_31_elements(shape: tuple[int, int, int], backend: str) -> None:
    """The result; a; b."""
    M, N, K = shape
    a, weight = _far_rows("cuda", M, K), _far_rows("cuda", N, K)
    got = gemm.run(backend, a, weight.mT, GemmCall(a, a)[2:])
    rows, columns = (torch.tensor(sorted({0, 1, n // 2, n - 2, n - 1}), device="cuda") for n in (M, N))
    some = GemmCall(a[rows], weight[columns].mT)
    assert_result(backend, got[rows][:, columns].contiguous(), some)
    # the rest is zeros, written
    assert int(got.count_nonzero()) <= rows.numel() * columns.numel()
    assert not bool(got[M // 3].isnan().any())


@pytest.mark.gpu
@pytest.mark.slow
def test_batches_and_parts_past_2_to_the_31_elements() -> None:
    # the second matrix of b begins past 2^31; so do the partial sums of the second part
    b = torch.zeros(2, 32776, 65544, dtype=torch.float8_e5m2, device="cuda")
    b[1, :, -16:] = random(32776, 16, dtype=E5M2, device="cuda")
    a = random(2, 4, 32776, dtype=E5M2, device="cuda")
    got = gemm.run("triton", GemmCall(a, b))
    assert_result("triton", got[1:, :, -16:].contiguous(), GemmCall(a[1:], b[1:, :, -16:]))
    del b
    tall = product(65544, 16392, 64, device="cuda", out_dtype=F32)
    got = gemm.run("triton", tall, config=tile(128, 128, 32, SPLIT_K=2, num_warps=8))
    assert_result("triton", got[-3:].contiguous(), tall._replace(a=tall.a[-3:]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "int8", "e4m3", "bf16-weight-int8"])
@pytest.mark.parametrize("backend", KERNELS)
def test_replays_in_a_cuda_graph(backend: str, kind: str) -> None:
    call = TYPES[kind](7, "cuda")
    if refuses(backend, call) is not None:
        pytest.skip("a type of the others")
    gemm.pin(gemm.key(call), backend, configs(backend)[-1], "exact", "a test")
    gemm(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemm(call)
    for seed in (5, 6):
        for value, other in zip(call[:2], TYPES[kind](7, "cuda")[:2], strict=True):
            value.copy_(random(*other.shape, dtype=value.dtype, device="cuda", seed=seed))
        result.fill_(0)
        graph.replay()
        assert_result(backend, result, call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, I8], ids=name)
@pytest.mark.parametrize("shape", [(256, 512, 1024), (200, 304, 208), (1000, 1040, 4096)], ids=shape_id)
def test_with_tensor_descriptors_and_without(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    call = product(*shape, dtype, device="cuda", out_dtype=I32 if dtype == I8 else F32)
    gated = product(*shape, dtype, device="cuda", out_dtype=F32, activation="silu_and_mul")
    large = tile(128, 128, 64, num_warps=8)
    for backend, made, what in (
        ("triton", large, call), ("triton", large, gated), ("triton_stream_k", stream(128, 128, 64), call)
    ):  # fmt: skip
        for tma in (0, 1):
            config = Config(**(made.kwargs | {"TMA": tma, "num_stages": 3}))
            for _ in range(2):
                assert_right(backend, what, config)


def test_calls_with_descriptors_are_one_operation_of_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are not traced: the graph calls the op, which decides again. Here without real descriptors."""
    launch = sys.modules["wavecrest.ops._gemm.launch"]
    monkeypatch.setattr(launch, "with_descriptors", lambda _call, _config: torch.compiler.is_compiling())
    a, b, bias = random(20, 48, device=device), random(48, 40, device=device), random(40, dtype=F32, device=device)
    gemm.force("triton")
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.gemm(x, b, bias, activation="silu", out_dtype=F32), fullgraph=True, backend=backend
    )
    with torch.no_grad():
        assert_result("triton", compiled(a), GemmCall(a, b, bias, activation="silu", out_dtype=F32))
    assert len(graphs) == 1 and "wavecrest.gemm" in graphs[0], graphs


@pytest.mark.gpu
@pytest.mark.parametrize("orders", ["by k", "across"])
def test_descriptors_inside_compile(orders: str) -> None:
    a, b = random(304, 512, device="cuda"), random(512, 640, device="cuda")
    a, b = (a, b.mT.contiguous().mT) if orders == "by k" else (a.mT.contiguous().mT, b)
    call = GemmCall(a, b, bias=random(640, device="cuda"), activation="silu")
    config = tile(128, 128, 64, TMA=1, num_warps=8, num_stages=3)
    gemm.pin(gemm.key(call), "triton", config, "exact", "a test")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.gemm(x, b, call.bias, activation="silu"), fullgraph=True)
    with torch.no_grad():
        assert_result("triton", compiled(a), call)
        assert gemm.decide(call).backend == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("triton", tile(64, 64, 64, SPLIT_K=7)),
        ("triton_stream_k", stream(64, 64, 64)),
        ("triton_multiply", multiply(4, 256, split=5)),
    ],
)
def test_the_same_bits_whatever_memory_held(backend: str, config: Config) -> None:
    """Workspaces from fresh memory, from memory full of NaN, and from the cache: the same bits; none is kept."""
    call = product(8 if backend == "triton_multiply" else 300, 1000, 2056, device="cuda", out_dtype=F32)
    gemm.pin(gemm.key(call), backend, config, "exact", "a test")
    first = gemm(call)
    assert_result(backend, first, call)

    def held() -> int:
        # what was asked for: a block that is given may be up to 1 MiB larger
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    for turn in range(5):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = held()
        if turn % 2:
            torch.full((1 << 26,), NAN, device="cuda")
        again = gemm(call)
        assert torch.equal(again, first)
        assert held() - before == first.untyped_storage().nbytes()
        del again


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 4096, 14336), (300, 1000, 2056)], ids=shape_id)
@pytest.mark.parametrize("kind", ["bf16", "fp32", "tf32", "int8", "e4m3", "bf16-weight-int8"])
def test_own_configurations_on_layers(kind: str, shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    like = TYPES[kind](4, "cuda")
    call = product(M, N, K, like.a.dtype, like.b.dtype, device="cuda", precision=like.precision)
    call = scaled(call) if like.scale_a is not None else call
    for backend in BACKENDS:
        if refuses(backend, call) is None:
            assert_right(backend, call)
