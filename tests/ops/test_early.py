"""Kernels that start while the one before them runs: nothing before the wait but a fetch of what they will read.

In Triton's interpreter, which has no inline assembly, the three instructions are noted instead, in the order in which a
program comes to them; `tests/compile/test_dependent_launch.py` reads that order in machine code. On a GPU results are
compared, behind kernels that leave no time in between.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
from tests.ops.gemm_harness import BF16, E4M3, I8, multiply, random, scales, tile
from tests.ops.mlstm_harness import DEVICE, case
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS
from wavecrest.ops import pack
from wavecrest.ops._gemm import kernel as gemm_kernel
from wavecrest.ops._gemm import kernel_gemv, launch_gemv
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops.common import device as _lib
from wavecrest.ops.mlstm import kernel_norm as _mlstm_norm
from wavecrest.ops.mlstm.call import MlstmStepCall
from wavecrest.ops.mlstm.step import kernel as _mlstm_step
from wavecrest.ops.rows import kernel as _row_kernel
from wavecrest.ops.rows.call import RowCall

SECTOR = _lib.SECTOR.value if hasattr(_lib.SECTOR, "value") else _lib.SECTOR
INTERPRETED = not torch.cuda.is_available()
interpreted = pytest.mark.skipif(not INTERPRETED, reason="notes what Triton's interpreter runs")
Call = tuple[str, str, Config, AnyCall]


def with_early(config: Config, early: int) -> Config:
    return Config(**config.kwargs, EARLY=early)


# --- what is called


def product(M: int, N: int, K: int, weight: torch.dtype = BF16, **more: Any) -> GemmCall:
    """x @ weightᵀ; a weight of 8 bits has a scale for each column."""
    b = random(N, K, dtype=weight, device=DEVICE, seed=1).mT
    scale = scales(N, device=DEVICE, size=0.02) if weight.itemsize == 1 else None
    return GemmCall(random(M, K, device=DEVICE), b, scale_b=scale, **more)


def int4(M: int, N: int, K: int) -> GemmCall:
    """The same with 4-bit values in groups of 64."""
    packed = pack(random(N, K, device=DEVICE, seed=2), "int4", group=64)
    assert packed.scale is not None
    return GemmCall(random(M, K, device=DEVICE), packed.stored.mT, scale_b=packed.scale.mT, form="int4", group=64)


def batches(M: int, N: int, K: int) -> GemmCall:
    return GemmCall(random(3, M, K, device=DEVICE), random(3, N, K, device=DEVICE, seed=3).mT)


GATE: dict[str, Any] = {"activation": "silu_and_mul"}
# rows and columns that are no whole tiles, steps that are not full, one program and several for a column
MULTIPLIED: dict[str, tuple[Callable[[], GemmCall], Config]] = {
    "one row": (lambda: product(1, 21, 200), multiply(8, 64)),
    "split": (lambda: product(3, 21, 400), multiply(8, 32, split=3)),
    "gated int8": (lambda: product(2, 26, 200, I8, **GATE), multiply(8, 64)),
    "gated fp8, split": (lambda: product(1, 26, 200, E4M3, **GATE), multiply(4, 64, split=2)),
    "batches": (lambda: batches(2, 9, 96), multiply(8, 32)),
    "narrow steps": (lambda: product(1, 6, 31), multiply(2, 8)),
}
TILED: dict[str, tuple[Callable[[], GemmCall], Config]] = {
    "plain": (lambda: product(5, 40, 200), tile(k=64)),
    "rows of tiles": (lambda: product(50, 40, 96), tile(k=32)),
    "split": (lambda: product(5, 40, 200), tile(k=32, SPLIT_K=3)),
    "gated int8": (lambda: product(3, 72, 200, I8, **GATE), tile(k=64)),
    "gated, split": (lambda: product(20, 72, 200, **GATE), tile(k=32, SPLIT_K=2)),
    "batches": (lambda: batches(5, 20, 64), tile()),
}
# of these nothing is fetched: rows of b lie side by side, or 16 × 16 blocks
UNFETCHED: dict[str, tuple[Callable[[], GemmCall], Config]] = {
    "b by rows": (lambda: GemmCall(random(3, 64, device=DEVICE), random(64, 40, device=DEVICE)), tile()),
    "shuffled": (
        lambda: GemmCall(
            random(3, 64, device=DEVICE), pack(random(32, 64, device=DEVICE), "shuffled").stored.mT, form="shuffled"
        ),
        tile(),
    ),
}
WORDS = (lambda: int4(2, 13, 256), Config(BLOCK_N=4, BLOCK_K=64, SPLIT_K=1, num_warps=1, num_stages=1))
CODES = (lambda: int4(3, 40, 256), tile(k=64))


def rows(op: str, columns: int, config: Config) -> Call:
    args = registry.get(op).study.inputs(3, columns, BF16, DEVICE)
    return op, "triton", config, args


ROW = Config(BLOCK_M=1, BLOCK_N=512, PACKED=0, num_warps=4)
PART = Config(BLOCK_M=1, BLOCK_N=128, PACKED=0, num_warps=4)
ROWS: dict[str, Callable[[], Call]] = {
    "rms_norm": lambda: rows("rms_norm", 300, ROW),
    "add_rms_norm": lambda: rows("add_rms_norm", 512, ROW),
    "several rows a program": lambda: rows("add_rms_norm", 33, Config(BLOCK_M=2, BLOCK_N=64, PACKED=1, num_warps=4)),
    "split rows": lambda: rows("add_layer_norm", 300, PART),
    "softmax": lambda: rows("softmax", 100, ROW),
    "quantized": lambda: rows("rms_norm_quantize", 300, ROW),
}


def step(config: Config, half: bool = False, in_place: bool = True, counted: bool = False, **more: Any) -> Call:
    call = case(batch=2, heads=3, tokens=1, dk=24, dv=40, first=True, **more)
    state = call.c_initial
    assert state is not None and call.n_initial is not None
    gate = None if call.output_gate is None else call.output_gate[:, :, 0]
    args = MlstmStepCall(
        *(one[:, :, 0] for one in (call.q, call.k, call.v)), call.i[:, :, 0], call.f[:, :, 0],
        state.half() if half else state, call.n_initial, call.m_initial, norm_weight=call.norm_weight,
        output_gate=gate, in_place=in_place,
        arrivals=torch.zeros(2, 3, dtype=torch.int32, device=DEVICE) if counted else None,
    )  # fmt: skip
    return "mlstm_step", "triton", config, args


def steps(k: int, v: int) -> Config:
    return Config(BLOCK_K=k, BLOCK_V=v, num_warps=1)


STEPS: dict[str, Callable[[], Call]] = {
    "in place": lambda: step(steps(32, 16)),
    "parts": lambda: step(steps(8, 16), epilogue="gate"),
    "half": lambda: step(steps(16, 32), half=True),
    "new": lambda: step(steps(16, 64), in_place=False, epilogue="norm"),
    "narrow": lambda: step(steps(32, 4), epilogue="norm"),
    "counted": lambda: step(steps(8, 16), epilogue="gate", counted=True),
}


def gemm_call(backend: str, made: tuple[Callable[[], GemmCall], Config]) -> Callable[[], Call]:
    return lambda: ("gemm", backend, made[1], made[0]())


CALLS: dict[str, Callable[[], Call]] = {
    **{f"multiply {name}": gemm_call("triton_gemv", made) for name, made in MULTIPLIED.items()},
    **{f"tiles {name}": gemm_call("triton", made) for name, made in (TILED | UNFETCHED).items()},
    "words": gemm_call("triton_gemv", WORDS),
    "codes": gemm_call("triton", CODES),
    **{f"rows {name}": made for name, made in ROWS.items()},
    **{f"step {name}": made for name, made in STEPS.items()},
}


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of their own, for calls that write over them."""
    made = [
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).copy_(one)
        if isinstance(one, Tensor)
        else one
        for one in args
    ]
    return type(args)(*made) if hasattr(args, "_fields") else tuple(made)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [one for one in result if one is not None]


def run(call: Call, early: int | None) -> list[Tensor]:
    op, backend, config, args = call
    made = config if early is None else with_early(config, early)
    return tensors(registry.get(op).run(backend, args, config=made))


# --- what programs do


@dataclass
class Program:
    """The events of one program, in order; the addresses that it prefetched."""

    kernel: str
    index: tuple[int, ...]
    events: list[str] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs of launches from here on, for an architecture whose kernels overlap."""
    interpreter = sys.modules["triton.runtime.interpreter"]
    programs: list[Program] = []
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    placed, launched = builder.set_grid_idx, executor.__call__
    running = [""]

    def launch(this: Any, *args: Any, **options: Any) -> Any:
        running[0] = this.fn.__name__
        return launched(this, *args, **options)

    def begin(this: Any, *index: int) -> None:
        programs.append(Program(running[0], index))
        placed(this, *index)

    def note(event: str, active: Any) -> Any:
        if active is not False and getattr(active, "value", active):
            programs[-1].events.append(event)

    def prefetch_l2(pointers: Any, wanted: Any) -> None:
        at, where = np.broadcast_arrays(pointers.handle.data, wanted.handle.data)
        programs[-1].events.append("fetch")
        programs[-1].fetched += [int(one) for one in at[where.astype(bool)].ravel()]

    def accessed(name: str, event: str) -> None:
        access = getattr(builder, name)

        def noting(this: Any, *args: Any, **options: Any) -> Any:
            programs[-1].events.append(event)
            return access(this, *args, **options)

        monkeypatch.setattr(builder, name, noting)

    for name, event in (
        ("create_load", "load"), ("create_masked_load", "load"), ("create_store", "store"),
        ("create_masked_store", "store"), ("create_atomic_rmw", "atomic"),
    ):  # fmt: skip
        accessed(name, event)
    monkeypatch.setattr(executor, "__call__", launch)
    monkeypatch.setattr(builder, "set_grid_idx", begin)
    for module in (gemm_kernel, kernel_gemv, _row_kernel, _mlstm_step, _mlstm_norm):
        for name, made in (
            ("prefetch_l2", prefetch_l2),
            ("pdl_launch_dependents", lambda active: note("allow", active)),
            ("pdl_wait", lambda active: note("wait", active)),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, made)
    monkeypatch.setattr(_pdl, "overlaps", lambda _arch: True)
    return programs


# a second launch, which starts early whenever it can, and fetches its weight alone
SECOND = "_mlstm_norm_kernel"


@interpreted
@pytest.mark.parametrize("early", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_every_program_waits_before_it_reads_or_writes(name: str, early: int, noted: list[Program]) -> None:
    call = CALLS[name]()
    run(call, early)
    assert noted
    for program in noted:
        before = program.events[: program.events.index("wait")]
        assert program.events.count("wait") == 1 and set(before) <= {"allow", "fetch"}, program
        # so that the next launch can start early too
        assert program.events.count("allow") == 1, program
        assert "store" in program.events, program
        assert early > 1 or "fetch" not in before or program.kernel == SECOND, program


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_the_next_launch_may_start_when_this_one_is_nearly_over(name: str, noted: list[Program]) -> None:
    run(CALLS[name](), 1)
    first, last = noted[0].kernel, noted[-1].kernel
    for program in noted:
        done = program.events[: program.events.index("allow")]
        if program.kernel == first != last:
            # the second launch of the call, which is small and would come too late
            assert done == [], program
        elif program.kernel in (SECOND, "_row_kernel"):
            # short, and small beside the products of a step
            assert done[-1] == "wait", program
        else:
            assert "load" in done, program


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_the_first_launch_starts_no_earlier_than_it_is_told(name: str, noted: list[Program]) -> None:
    call = CALLS[name]()
    run(call, 0)
    first = noted[0].kernel
    for program in noted:
        waits = program.events.count("wait")
        assert waits == (0 if program.kernel == first else 1), program
        weight = call[3].norm_weight if program.kernel == SECOND else None
        if weight is None:
            assert not program.fetched, program
        else:
            begin = weight.data_ptr()
            assert program.fetched and all(begin <= one < begin + weight.nbytes for one in program.fetched), program


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_when_it_starts(name: str, noted: list[Program]) -> None:
    call = CALLS[name]()
    found = [run((*call[:3], copied(call[3])), early) for early in (0, 1, 4)]
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


# --- what is fetched, from the definitions of the steps: addresses a sector apart from the first byte of each


def sectors(start: int, first: int, last: int, end: int) -> list[int]:
    """A byte of each sector from `start` + first to `start` + last; memory ends at `end`."""
    return list(range(start + first, start + min(last, end), SECTOR))


def columns_of(call: GemmCall, n: int, width: int) -> list[int]:
    """Columns of b of one tile, of both halves where gated."""
    inside = range(n * width, min((n + 1) * width, call.N))
    return [*inside, *(call.N + one for one in inside if call.activation is not None)]


def fetched_columns(call: GemmCall, batch: int, columns: list[int], first: int, steps: int, size: int) -> list[int]:
    """The sectors of `steps` steps of `size` elements of b as it is stored."""
    b, bits = call.b, call.b.itemsize
    batch_stride = b.stride(0) if b.ndim == 3 else 0
    found = []
    for column in columns:
        start = b.data_ptr() + (batch * batch_stride + column * b.stride(-1)) * bits
        for one in range(steps):
            found += sectors(start, (first + one) * size * bits, (first + one + 1) * size * bits, b.shape[-2] * bits)
    return found


@interpreted
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_multiply_fetches_its_first_steps(name: str, ahead: int, noted: list[Program]) -> None:
    make, config = MULTIPLIED[name]
    call = make()
    run(("gemm", "triton_gemv", config, call), 1 + ahead)
    steps = math.ceil(math.ceil(call.K / config["BLOCK_K"]) / config["SPLIT_K"])
    first = [program for program in noted if program.kernel == "_multiply_kernel"]
    assert len(first) > 1
    for program in first:
        n, batch, split = program.index
        columns = columns_of(call, n, config["BLOCK_N"])
        wanted = fetched_columns(call, batch, columns, split * steps, ahead, config["BLOCK_K"])
        assert sorted(program.fetched) == sorted(wanted), program


@interpreted
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", TILED)
def test_tiles_fetch_their_first_steps(name: str, ahead: int, noted: list[Program]) -> None:
    make, config = TILED[name]
    call = make()
    run(("gemm", "triton", config, call), 1 + ahead)
    m, n = math.ceil(call.M / config["BLOCK_M"]), math.ceil(call.N / config["BLOCK_N"])
    steps = math.ceil(math.ceil(call.K / config["BLOCK_K"]) / config["SPLIT_K"])
    # in groups of GROUP_M rows of tiles, column by column
    order = [
        column
        for group in range(0, m, config["GROUP_M"])
        for column in range(n)
        for _ in range(group, min(group + config["GROUP_M"], m))
    ]
    first = [program for program in noted if program.kernel == "_tile_kernel"]
    assert len(first) > 1
    for program in first:
        split, index = divmod(program.index[0], m * n)
        columns = columns_of(call, order[index], config["BLOCK_N"])
        wanted = fetched_columns(call, program.index[1], columns, split * steps, ahead, config["BLOCK_K"])
        assert sorted(program.fetched) == sorted(wanted), program


@interpreted
@pytest.mark.parametrize("name", UNFETCHED)
def test_nothing_is_fetched_of_weights_that_steps_are_no_rows_of(name: str, noted: list[Program]) -> None:
    make, config = UNFETCHED[name]
    run(("gemm", "triton", config, make()), 3)
    assert noted and not any(program.fetched for program in noted)


@interpreted
@pytest.mark.parametrize("backend", ["triton", "triton_gemv"])
def test_codes_are_fetched_two_a_byte(backend: str, noted: list[Program]) -> None:
    make, config = CODES if backend == "triton" else WORDS
    call = make()
    run(("gemm", backend, config, call), 3)
    for program in noted:
        columns = columns_of(call, program.index[0], config["BLOCK_N"])
        wanted = fetched_columns(call, 0, columns, 0, 2, config["BLOCK_K"] // 2)
        assert sorted(program.fetched) == sorted(wanted), program


@interpreted
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "several rows a program", "split rows"])
def test_norms_fetch_their_weight(name: str, noted: list[Program]) -> None:
    op, backend, config, args = ROWS[name]()
    weight = next(one for one in args if isinstance(one, Tensor) and one.ndim == 1)
    run((op, backend, config, args), 2)
    start, size = weight.data_ptr(), weight.itemsize
    for program in noted:
        part = program.index[0] % math.ceil(weight.numel() / config["BLOCK_N"])
        first, last = (min(one * config["BLOCK_N"], weight.numel()) for one in (part, part + 1))
        covered = {one // SECTOR for one in program.fetched}
        wanted = {one // SECTOR for one in range(start + first * size, start + last * size)}
        # the first and the last may be shared with a neighbour
        assert wanted - {(start + last * size - 1) // SECTOR} <= covered <= wanted, program


@interpreted
@pytest.mark.parametrize("ahead", [1, 2, 9])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_fetches_its_state(name: str, ahead: int, noted: list[Program]) -> None:
    op, backend, config, args = STEPS[name]()
    state, size = args.c, args.c.itemsize
    run((op, backend, config, args), 1 + ahead)
    heads, dk, dv = state.shape[1:]
    tiles = math.ceil(dv / config["BLOCK_V"])
    first = [program for program in noted if program.kernel == "_mlstm_step_kernel"]
    assert len(first) > 1
    for program in first:
        rest, tile_v = divmod(program.index[0], tiles)
        row, head = divmod(rest, heads)
        left, right = tile_v * config["BLOCK_V"], min((tile_v + 1) * config["BLOCK_V"], dv)
        wanted = []
        for k in range(min(ahead * config["BLOCK_K"], dk)):
            start = state.data_ptr() + size * (row * state.stride(0) + head * state.stride(1) + k * state.stride(2))
            wanted += sectors(start, left * size, right * size, dv * size)
        assert sorted(program.fetched) == sorted(wanted), program


# --- where it is off, and what is refused


def planned(config: Config, arch: str) -> list[_launcher.Launch]:
    call = GemmCall(*(torch.empty(shape, dtype=BF16, device="meta") for shape in ((1, 64), (64, 32))))
    call = call._replace(b=call.b.mT.contiguous().mT)
    plan = launch_gemv.gemv(call, call.a, call.a, config, ARCHS[arch], False)
    return [one for one in (plan.first, plan.second) if one is not None]


@pytest.mark.parametrize("arch", ["sm_80", "gfx942", "gfx1100"])
def test_kernels_that_do_not_overlap_take_no_notice(arch: str) -> None:
    for one in planned(with_early(multiply(16, 32, split=2), 3), arch):
        assert not one.constants.get("EARLY") and not one.constants["PDL"]
        assert not {"EARLY", "launch_pdl"} & set(one.config)


def test_nor_do_they_in_the_interpreter_and_inside_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_early(multiply(16, 32), 3)
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", True)
    assert _pdl.start_of(config, ARCHS["sm_90"]) == (0, multiply(16, 32))
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    assert _pdl.start_of(config, ARCHS["sm_90"]) == (3, Config(**multiply(16, 32).kwargs, launch_pdl=1))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert _pdl.start_of(config, ARCHS["sm_90"]) == (0, multiply(16, 32))


def test_gemv_and_row_ops_start_early_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    first, second = planned(multiply(16, 32, split=2), "sm_90")
    assert first.constants["EARLY"] == 1 and first.config["launch_pdl"] == 1
    assert _pdl.start_of(multiply(16, 32), ARCHS["sm_90"]) == (0, multiply(16, 32))
    named, _ = planned(with_early(multiply(16, 32, split=2), 0), "sm_90")
    assert named.constants["EARLY"] == 0 and "launch_pdl" not in named.config
    # the sum of parts is right behind what it waits for, and was measured so
    assert first.constants["PDL"] and second.config["launch_pdl"] == 1


@pytest.mark.parametrize("early", [-1, _pdl.MOST_AHEAD + 2])
def test_what_it_cannot_be(early: int) -> None:
    with pytest.raises(InvalidArgument, match=f"EARLY is 0, 1, .*, not {early}"):
        run(gemm_call("triton_gemv", MULTIPLIED["one row"])(), early)


@pytest.mark.parametrize("op", ["gemm", "add_rms_norm", "mlstm_step"])
def test_a_measured_row_may_say_it_and_need_not(op: str) -> None:
    assert "EARLY" in registry.get(op).backends["triton"].optional


# --- on a GPU


def chain(early: int) -> tuple[Callable[[], None], Tensor]:
    """Short launches that read what the one before wrote, and write where the one two before it has read."""
    generator = torch.Generator().manual_seed(5)
    weights = [(torch.randn(512, 512, generator=generator) / 23).to(DEVICE, BF16) for _ in range(4)]
    gamma = torch.ones(512, dtype=BF16, device=DEVICE)
    norm = registry.get("add_rms_norm")
    x = torch.randn(2, 512, generator=generator).to(DEVICE, BF16)
    found = torch.empty(2, 2, 512, dtype=BF16, device=DEVICE)
    configs = (
        ("triton_gemv", Config(BLOCK_N=4, BLOCK_K=512, SPLIT_K=1, num_warps=2, num_stages=3)),
        ("triton", tile(16, 16, 128, num_stages=3)),
        ("triton_gemv", Config(BLOCK_N=8, BLOCK_K=128, SPLIT_K=4, num_warps=2, num_stages=3)),
    )
    first = GemmCall(x, weights[0].mT)
    gemms = [gemm.backends[backend].bind(first, with_early(config, early)) for backend, config in configs]
    added = RowCall("rms", x, x, gamma, eps=1e-6)
    add = norm.backends["triton"].bind(added, with_early(norm.config_of("triton", norm.key(added)), early))

    def work() -> None:
        here, delta = x, x
        for index in range(24):
            # what both held is free at once: the allocator gives it to the launch after the next
            normed, here = add(added._replace(x=delta, residual=here))
            delta = gemms[index % 3](GemmCall(normed, weights[index % 4].mT))
            if index % 6 == 0:
                # a weight that a kernel has just written is what the next product reads
                weights[(index + 1) % 4].neg_()
        found[0].copy_(here)
        found[1].copy_(delta)

    return work, found


@pytest.mark.gpu
@pytest.mark.parametrize("early", [1, 3])
def test_chains_that_overlap_give_what_others_give(early: int) -> None:
    if not _pdl.overlaps(_target.arch()):
        pytest.skip("kernels do not overlap here")
    from wavecrest.measure import cuda_graph

    results = []
    for one in (0, early):
        work, found = chain(one)
        work()
        results.append(found.clone())
        # a run negates two weights twice: the next one finds them as it did
        cuda_graph.warm_up(work)
        graph, _ = cuda_graph.record(work, torch.cuda.graph_pool_handle(), "the chain")
        found.fill_(float("nan"))
        for _ in range(50):
            graph.replay()
        results.append(found.clone())
    assert torch.isfinite(results[0].float()).all()
    assert all(torch.equal(results[0], other) for other in results[1:])
