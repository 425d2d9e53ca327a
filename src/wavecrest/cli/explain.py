"""`wavecrest explain OP`: which backend would run a call, with which configuration, and why not the others.

With `--arch` the same for a GPU that need not be here, with the cost model's ranking of configurations.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wavecrest.dispatch.call import AnyCall
    from wavecrest.dispatch.decision import Cost, Decision
    from wavecrest.dispatch.op import AnyOp
    from wavecrest.hardware import Arch

# number of configurations of a ranking that are shown
SHOWN = 10


class ExplainRecord(pydantic.BaseModel):
    """A decision with the call and the device it was made for."""

    kind: Literal["explain"] = "explain"
    op: str
    device: str
    arch: str
    key: dict[str, Any]
    # what the parts of the key mean
    parts: str = ""
    backend: str
    # the kernels that are launched, or the function of the backend
    function: str = ""
    config: dict[str, int]
    source: str
    reason: str
    refused: dict[str, str]
    flops: int
    bytes: int
    note: str = ""
    # the backends of measured rows by the first size of the key, "rows 1: triton_gemv; 4 to 16: triton; 64: torch"
    measured: str = ""


class Ranked(pydantic.BaseModel):
    """A configuration by the cost model: its predicted time in µs, and each term's share of it."""

    backend: str
    config: dict[str, int]
    default: bool
    us: float
    shares: dict[str, float]


class RankingRecord(pydantic.BaseModel):
    """The cost model's ranking for a call on an architecture, the fastest configuration first: not a measurement.

    `fitted`: the model's constants were fitted to times that others published for this part. `decision`: the decision
    there; None with the reason in `note`, which also says why a ranking is missing.
    """

    kind: Literal["explain-model"] = "explain-model"
    evidence: Literal["model"] = "model"
    op: str
    arch: str
    part: str
    fitted: bool = False
    key: dict[str, Any]
    ranking: list[Ranked]
    decision: ExplainRecord | None = None
    note: str = ""


def _call(op: AnyOp, settings: list[str], arch: Arch | None, device: str) -> AnyCall:
    """The call that the settings describe."""
    from wavecrest.bench import sizes

    settings, options = sizes.apart(op, settings)
    numbers, dtype = sizes.one(op, settings, arch.fp8 if arch is not None else None)
    try:
        return sizes.call(op, numbers, dtype, device, options)
    except RuntimeError as error:
        shown = " ".join(f"{name}={size}" for name, size in zip(op.study.sizes, numbers, strict=True))
        # a tensor without memory fits everywhere
        problem = "makes no tensor" if device == "meta" else f"does not fit on {device}"
        raise InvalidArgument(f"{shown} {problem}: {str(error).splitlines()[0]}") from error


def rank(op: str, arch: str, settings: list[str] | None = None) -> RankingRecord:
    """Decide an example call on an architecture, here or not, and rank its configurations by the cost model.

    Args:
        op, settings: as for `run`.
        arch: a name of `hardware.ARCHS`.

    Raises:
        InvalidArgument: no such op, architecture or setting.
        TableError: measured rows are damaged.
    """
    from wavecrest import hardware, ops
    from wavecrest.dispatch.tuned import cost_model

    found = ops.get(op)
    target = hardware.ARCHS.get(arch)
    if target is None:
        raise InvalidArgument(f"unknown architecture {arch!r}: known are {', '.join(hardware.ARCHS)}")
    key = dict(zip(found.key_fields, _key(found, settings or [], target), strict=True))
    if "device" in key:
        key["device"] = "cuda"
    decision, notes = _decision_on(target, found, settings or [])
    ranking = cost_model.rank(found.study.kernels, tuple(key.values()), target)
    if not ranking:
        described = any(kernel.work is not None for kernel in found.study.kernels.values())
        why = "no configuration of it fits" if described else "no backend of it describes its work to the cost model"
        notes = [*notes, f"no ranking by the cost model: {why}"]
    rows = [
        Ranked(
            backend=one.backend, config=one.config.kwargs, default=one.default, us=one.prediction.us,
            shares=one.prediction.shares,
        )
        for one in ranking
    ]  # fmt: skip
    return RankingRecord(
        op=op, arch=arch, part=target.part, fitted=arch in cost_model.FITTED, key=key, ranking=rows,
        decision=decision, note="; ".join(notes),
    )  # fmt: skip


def _key(op: AnyOp, settings: list[str], target: Arch) -> tuple[Any, ...]:
    """The key of the call that the settings describe, from tensors without memory unless it needs their values."""
    import torch

    def made(device: str) -> tuple[Any, ...]:
        call = _call(op, settings, target, device)
        op.check(call)
        with torch.no_grad():
            return op.key(call)

    try:
        return made("meta")
    except RuntimeError:
        return made("cpu")


def _decision_on(target: Arch, op: AnyOp, settings: list[str]) -> tuple[ExplainRecord | None, list[str]]:
    """The decision for a call on an architecture that need not be here, or None with the reason.

    Arguments are tensors without memory that claim to be on a GPU. Software that a backend needs is looked for on this
    machine.
    """
    from wavecrest.ops.common import elsewhere

    made = _call(op, settings, target, "meta")
    call = elsewhere.claimed(made)
    try:
        with elsewhere.assumed(target):
            op.check(call)
            decision = op.decide_as(op.key(call), call)
            # lengths are read where there is memory
            cost, measured = op.study.cost(made), _measured(op, decision.key)
            function = _function(op, decision, call, target)
    # without CUDA in PyTorch some operations on such tensors have no kernel
    except (RuntimeError, NotImplementedError) as error:
        return None, [f"the decision is made where the GPU is: {str(error).splitlines()[0]}"]
    note = f"decided for {target.part} with the software of this machine"
    return _explained(op, decision, cost, target.part, target.name, note, measured, function), []


def _function(op: AnyOp, decision: Decision, call: AnyCall, target: Arch | None) -> str:
    """The kernels of a decision's calls, if they are known without launching them, else the Python function."""
    backend = op.backends[decision.backend]
    launches = op.study.kernel(decision.backend).launches
    if launches is not None and target is not None and decision.config is not None:
        launched = [one.kernel for one in launches(call, decision.config, target)]
        plain = [getattr(kernel, "fn", kernel) for kernel in launched]
        return ", ".join(dict.fromkeys(f"{one.__module__}.{one.__name__}" for one in plain))
    run: Any = backend.bind or backend.run
    while isinstance(run, partial):
        run = run.func
    name: str = run.__qualname__
    # the name of a nested function says nothing
    return f"a function of {run.__module__}" if "<locals>" in name else f"{run.__module__}.{name}"


def run(op: str, settings: list[str] | None = None, device: str | None = None) -> ExplainRecord:
    """The decision for `op` on an example call, without running it.

    Args:
        op: an op's name, see `wavecrest.dispatch.registry.names()`.
        settings: the op's sizes (`Study.sizes`) and dtype by name in any order, "M=16", "N=4096", "K=4096",
            "dtype=bfloat16" (these are the defaults), or bare: numbers give the sizes not named yet in their order,
            a word the dtype, also as bf16, fp16, fp32, fp64, or fp8.
        device: as for `wavecrest.hardware.detect`.

    Raises:
        InvalidArgument: no such op, setting or device name.
        EnvironmentProblem: the device is not here.
    """
    import torch

    from wavecrest import hardware, ops

    found = ops.get(op)
    target = hardware.detect(device)
    call = _call(found, settings or [], target.known, target.torch_name)
    with torch.no_grad():
        decision = found.decide(call)
        function = _function(found, decision, call, target.known)
    note = "" if target.kind == "cuda" else "decided for the CPU: no GPU was asked for or none is here"
    measured = _measured(found, decision.key)
    return _explained(found, decision, found.study.cost(call), target.name, target.arch, note, measured, function)


def _explained(
    op: AnyOp, decision: Decision, cost: Cost, device: str, arch: str, note: str, measured: str, function: str
) -> ExplainRecord:
    return ExplainRecord(
        op=op.name,
        device=device,
        arch=arch,
        key=dict(zip(op.key_fields, decision.key, strict=True)),
        parts=_parts(op),
        backend=decision.backend,
        function=function,
        config=dict(decision.config or {}),
        source=decision.source,
        reason=decision.reason,
        refused={refusal.backend: refusal.reason for refusal in decision.refused},
        flops=cost.flops,
        bytes=cost.bytes,
        note=note,
        measured=measured,
    )


def _measured(op: AnyOp, key: tuple[Any, ...]) -> str:
    """The backend at each measured value of the first size, if several differ: where one overtakes another."""
    from wavecrest.dispatch import registry

    runs: list[tuple[int, int, str]] = []
    for size, row in registry.measured_along(op, key):
        if runs and runs[-1][2] == row.backend:
            runs[-1] = (runs[-1][0], size, row.backend)
        else:
            runs.append((size, size, row.backend))
    if not runs or runs[0][0] == runs[-1][1]:
        return ""
    spans = [f"{first}: {name}" if first == last else f"{first} to {last}: {name}" for first, last, name in runs]
    return f"{op.key_sizes[0]} {'; '.join(spans)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _key_text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in key.items())


def _show(record: ExplainRecord) -> None:
    title = escape(f"{record.op} on {record.device} ({record.arch})")
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("call", escape(_key_text(record.key)))
    table.add_row("runs", f"[green]{escape(record.backend)}[/green]")
    table.add_row("function", escape(record.function))
    if record.config:
        table.add_row("config", escape(", ".join(f"{name}={value}" for name, value in record.config.items())))
    table.add_row("why", escape(f"{record.reason} (source: {record.source})"))
    if record.measured:
        table.add_row("measured", escape(record.measured))
    for backend, reason in record.refused.items():
        table.add_row(escape(f"not {backend}"), escape(reason))
    table.add_row("least work", f"{record.flops:,} operations, {record.bytes:,} bytes")
    _shared.print_table(table)
    if record.parts:
        _shared.out.print(f"[dim]call: {escape(record.parts)}[/dim]")
    if record.note:
        _shared.out.print(escape(record.note))


def _parts(op: AnyOp) -> str:
    """The meaning of the parts of a key, from the op's description of it."""
    from wavecrest.dispatch.lookup import UNLISTED

    differs = f" may differ from it in {', '.join(op.key_sizes)}, and" if op.key_sizes else ""
    apart = ", ".join(name for name in op.key_fields if name in UNLISTED)
    return (
        "the parts of its key, on which the choice may depend; calls that agree in all of them run the same. "
        "Counts of rows, tokens or sequences may be buckets: exact up to 8, then the next power of two, 0 for any. "
        f"A measured row{differs} says nothing of {apart}"
    )


def _show_ranking(record: RankingRecord) -> None:
    if record.decision is not None:
        _show(record.decision)
    if record.note:
        _shared.out.print(escape(record.note))
    if not record.ranking:
        return
    where = escape(f"{record.op} on {record.arch} ({record.part})")
    fitted = f" (constants fitted to GEMM times that AMD published for {record.part})" if record.fitted else ""
    _shared.out.print(f"{where}: [bold]model[/bold], not measured{fitted}", soft_wrap=True)
    if record.decision is None:
        _shared.out.print(escape(f"call: {_key_text(record.key)}"), soft_wrap=True)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right")
    table.add_column("configuration", overflow="fold")
    table.add_column("model", justify="right", no_wrap=True)
    table.add_column("share of it", overflow="fold")
    for place, one in enumerate(record.ranking, 1):
        if place > SHOWN and not one.default:
            continue
        config = " ".join(f"{name}={value}" for name, value in one.config.items())
        shares = sorted(one.shares.items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        backend = f"{one.backend} (default)" if one.default else one.backend
        runs = f"{escape(backend)}\n[dim]{escape(config)}[/dim]"
        table.add_row(str(place), runs, _shared.format_time(one.us / 1e3), escape(words))
    _shared.print_table(table)
    hidden = len(record.ranking) - SHOWN
    if hidden > 0:
        _shared.out.print(f"of {len(record.ranking)} configurations; --json has all")


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's name, such as rms_norm.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="M N [K] DTYPE",
            help="Sizes (K for ops that have one) and dtype of the call, such as 16 4096 bf16, in part or by name: "
            "M=16 N=4096 K=4096 dtype=bfloat16, the defaults. By name also other parts of the key, such as "
            "activation=silu_and_mul or residual=true of gemm.",
        ),
    ] = None,
    device: _shared.DeviceOption = None,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="ARCH",
            help="Show the decision on an architecture that need not be here, such as gfx942, and the cost model's "
            "ranking of its configurations.",
        ),
    ] = None,
    kernels: _shared.KernelsOption = None,
    as_json: _shared.JsonOption = False,
) -> None:
    """Show which backend runs an op's call, and why."""
    if arch is not None:
        if device is not None:
            raise InvalidArgument("--arch is for an architecture that need not be here; leave --device out")
        ranking = rank(op, arch, settings)
        if as_json:
            _shared.print_json(ranking)
        else:
            _show_ranking(ranking)
        return
    record = run(op, settings, device)
    if as_json:
        _shared.print_json(record)
    else:
        _show(record)
