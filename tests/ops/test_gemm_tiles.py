"""How the kernels share out the work of a GEMM: tiles, parts of K, stream-K, the order of tiles, descriptors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    F32,
    I8,
    I32,
    NAN,
    PERSISTENT,
    SPLIT,
    Watch,
    assert_near,
    assert_result,
    assert_right,
    bound_of,
    configs,
    machine,
    multiply,
    noted_launches,
    oracle,
    product,
    quicken,
    random,
    refuses,
    scales,
    stream,
    tile,
    watched,
)
from tests.ops.op_harness import same_bits, shape_id
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.ops._gemm.kernel import remap_xcd, share_of, swizzle_tile
from wavecrest.ops._gemm.launch import has_descriptors
from wavecrest.ops._gemm.launch import stream as launch_stream
from wavecrest.ops._gemm.launch import tiles as launch_tiles
from wavecrest.ops.common.triton import tl, triton


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


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
            noted = noted_launches(patch)
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
    noted = noted_launches(monkeypatch)
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
        assert_right("triton_gemv", product(rows, *shape, device=device, out_dtype=F32), config, watch)
    gated = product(rows, 36, 70, device=device, activation="silu_and_mul")
    assert_right("triton_gemv", gated, multiply(16, 32, split=rows % 3 + 1), watch)
    assert "up to 8 rows" in str(refuses("triton_gemv", product(9, 16, 32, device=device)))


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param("triton", tile(**SPLIT), id="split"),
        pytest.param("triton", tile(**SPLIT, **PERSISTENT), id="persistent"),
        pytest.param("triton_stream_k", stream(k=16), id="stream_k"),
        pytest.param("triton_gemv", multiply(16, 32, split=2), id="multiply"),
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


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.gpu), "triton_gemv"])
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
