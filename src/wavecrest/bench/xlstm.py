"""`wavecrest bench xlstm`: the kernels of the mLSTM and the sLSTM by every name, beside each other at each size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from wavecrest import hardware, records
from wavecrest.bench import peers, sizes, suites
from wavecrest.bench.ops import (
    OnCase,
    OnOp,
    OnRow,
    Planned,
    Settings,
    bench_work,
    dtype_of_call,
    forced,
    limits_of,
)
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument
from wavecrest.measure import timing
from wavecrest.measure.clock import Clock
from wavecrest.models.xlstm.kernels import AUTO, KERNELS
from wavecrest.ops import mlstm_parallel

MLSTM, SLSTM = ("mlstm_chunkwise", "mlstm_sequence", "mlstm_step"), ("slstm_sequence", "slstm_step")
FAMILIES: dict[str, tuple[str, ...]] = {"xlstm": (*MLSTM, *SLSTM), "mlstm": MLSTM, "slstm": SLSTM}
# sizes where none are given: batch, heads, tokens, head dimension of q and k; v has twice that
CPU_SIZES: dict[str, tuple[str, ...]] = {"B": ("1", "4"), "H": ("4",), "S": ("8", "256"), "D": ("32", "64")}
GPU_SIZES: dict[str, tuple[str, ...]] = {"B": ("1", "16"), "H": ("4",), "S": ("8", "512", "2048"), "D": ("64", "128")}
# seconds after which no case is begun, and seconds of a case, on any device
BUDGET, CASE_SECONDS = 600.0, 60.0
# the case of a call whose input gates are sigmoids, which kernels of other names compute
SIGMOID = " sigmoid gates"
PARALLEL = "mlstm_parallel"
# the function that a row of a table shows: an op's backend, or the PyTorch code of mlstm_parallel
_Way = tuple[str, str]


def bench(
    family: str,
    device: hardware.Device,
    settings: Settings,
    *,
    command: str | None = None,
    on_case: OnCase | None = None,
    on_row: OnRow | None = None,
    on_op: OnOp | None = None,
    now: Clock = timing.HOST_CLOCK,
) -> records.OpBenchRecord:
    """Measure all kernels of a family, each held against the op's reference first.

    The record is that of `bench_ops`, with the family as its suite: in each case the first implementation is the one
    that dispatch chooses, named by all kernel names that run it.

    Args:
        family: "xlstm", "mlstm" or "slstm".
        device: where to run.
        settings: `words` give sizes ("B=1,16", "S=2048", "H=4", "D=64", "dtype=bf16"); what they leave out is of
            `CPU_SIZES` or `GPU_SIZES`. `dtype`, `matching`, `seconds`, `budget` and `case_seconds` as of `bench_ops`.
        command, on_case, on_row, on_op, now: as of `bench_ops`.

    Raises:
        InvalidArgument: an unknown size or dtype, or no case has `matching` in its name.
    """
    work = [(op, cases(op, device, settings)) for op in map(registry.get, FAMILIES[family])]
    if not any(found for _, found in work):
        raise InvalidArgument(f"no case of {family} has {settings.matching!r} in its name")
    return bench_work(
        work, _planned, device, replace(settings, suite=family, words=(), shapes=None), versions={}, missing={},
        command=command, on_case=on_case, on_row=on_row, on_op=on_op, now=now,
    )  # fmt: skip


def cases(op: AnyOp, device: hardware.Device, settings: Settings) -> list[suites.Case]:
    """The cases of an op: sizes, and for `mlstm_chunkwise` each with sigmoid gates too.

    Raises:
        InvalidArgument: a word names no size, or has a wrong value.
    """
    target = device.torch_name
    found = [suites.sized(op, shape, target) for shape in sizes.several(op, _words(op, device, settings))]
    if op.name == "mlstm_chunkwise":
        found += [replace(one, name=one.name + SIGMOID, make=partial(_sigmoid, one.make)) for one in found]
    return [case for case in found if settings.matching in case.name]


def _words(op: AnyOp, device: hardware.Device, settings: Settings) -> list[str]:
    """The words that give an op its sizes: the user's, and defaults for the others. A step has no length S."""
    defaults = CPU_SIZES if device.kind == "cpu" else GPU_SIZES
    given = {name: ",".join(values) for name, values in defaults.items()}
    given["dtype"] = settings.dtype or ("float32" if device.kind == "cpu" else "bfloat16")
    for word in settings.words:
        name, _, value = word.partition("=")
        if name not in given or not value:
            raise InvalidArgument(f"{word!r} is no size of these kernels: give {' '.join(f'{n}=…' for n in given)}")
        given[name] = value
    return [f"{name}={value}" for name, value in given.items() if name in (*op.study.sizes, "dtype")]


def _sigmoid(make: Callable[[], Any]) -> AnyCall:
    call: AnyCall = make()._replace(input_gate="sigmoid")
    return call


def _planned(op: AnyOp, call: AnyCall) -> list[Planned]:
    """One row for each function that kernel names stand for, the one that dispatch chooses first."""
    chosen = op.decide(call).backend
    limits = limits_of(op, dtype_of_call(call))
    rows = sorted(_names(op, call).items(), key=lambda row: row[0] != (op.name, chosen))
    return [(", ".join(names), partial(_prepared, op, way, call), limits) for way, names in rows]


def _names(op: AnyOp, call: AnyCall) -> dict[_Way, list[str]]:
    """The kernel names of each function that computes a call; "auto" is what dispatch chooses."""
    kind = op.name.removeprefix("mlstm_")
    found: dict[_Way, list[str]] = {(op.name, op.decide(call).backend): [AUTO]}
    if op.name in SLSTM:
        # the official package has no names for them: "vanilla" and "cuda" are settings of a layer
        for backend in op.backends:
            if backend != "reference":
                found.setdefault((op.name, backend), []).append(backend)
        return found
    gate = getattr(call, "input_gate", "exp")
    for name, kernel in KERNELS[kind].items():
        if name == AUTO or kernel.input_gate != gate:
            continue
        way = (PARALLEL, "torch") if kernel.op == PARALLEL else (op.name, kernel.backend or "torch")
        found.setdefault(way, []).append(name)
    return found


def _prepared(op: AnyOp, way: _Way, call: Any) -> peers.Prepared:
    name, backend = way
    if name == PARALLEL:
        q, k, v, i, f = call[:5]
        return peers.Prepared(partial(mlstm_parallel, q, k, v, i, f, input_gate=call.input_gate))
    return forced(op, backend, call)
