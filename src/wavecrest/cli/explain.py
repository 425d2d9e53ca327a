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
    from wavecrest.dispatch.call import AnyCall
    from wavecrest.dispatch.decision import Cost, Decision
    from wavecrest.dispatch.op import AnyOp
    from wavecrest.hardware import Arch

# number of configurations of a ranking that are shown
SHOWN = 10

# default sizes by name; other sizes get one that keeps a tensor of four dimensions small
DEFAULTS = {"M": 16, "N": 4096, "K": 4096}
OTHER_SIZE = 64
# of a size: more is no tensor
MOST_DIGITS = 12
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class ExplainRecord(pydantic.BaseModel):
    """A decision with the call and the device it was made for."""

    kind: Literal["explain"] = "explain"
    op: str
    device: str
    arch: str
    key: dict[str, Any]
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

    `decision`: the decision there; None with the reason in `note`, which also says why a ranking is missing.
    """

    kind: Literal["explain-model"] = "explain-model"
    evidence: Literal["model"] = "model"
    op: str
    arch: str
    part: str
    key: dict[str, Any]
    ranking: list[Ranked]
    decision: ExplainRecord | None = None
    note: str = ""


def _settings(op: AnyOp, items: list[str], fp8: str | None) -> tuple[list[int], str]:
    """The sizes in the order of `Study.sizes`, and the dtype's name; `fp8`: the 8-bit float of the device."""
    defaults = _defaults(op)
    given: dict[str, str] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            name, value = _place(op, item, given), item
        if name not in defaults:
            raise InvalidArgument(f"{item!r} is no size or dtype that {op.name} takes: give {_example(defaults)}")
        if name in given:
            raise InvalidArgument(f"{item!r}: {name} is already {given[name]}; give {_example(defaults)}")
        given[name] = value
    for name in op.study.sizes:
        # Python converts no number of some thousand digits
        text = given.get(name, "1")
        if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < 1:
            raise InvalidArgument(f"{name}={text[:40]}: must be a whole number from 1 to {10**MOST_DIGITS - 1:,}")
    values = defaults | given
    dtype = _spelled(op, fp8).get(values["dtype"])
    if dtype is None:
        raise InvalidArgument(f"dtype={values['dtype']}: {op.name} takes {', '.join(op.study.example_dtypes)}")
    return [int(values[name]) for name in op.study.sizes], dtype


def _defaults(op: AnyOp) -> dict[str, str]:
    dtypes = op.study.example_dtypes
    sizes = {name: str(DEFAULTS.get(name, OTHER_SIZE)) for name in op.study.sizes}
    return {**sizes, "dtype": "bfloat16" if "bfloat16" in dtypes else dtypes[0]}


def _example(values: dict[str, str]) -> str:
    return f"'{' '.join(values.values())}' or '{' '.join(f'{name}={value}' for name, value in values.items())}'"


def _place(op: AnyOp, word: str, given: dict[str, str]) -> str:
    """The setting that a bare word gives: the first size not given yet, the dtype, or "" if it fits neither."""
    if word[:1].isdecimal():
        return next((name for name in op.study.sizes if name not in given), "")
    return "dtype" if word.isidentifier() and word not in op.study.sizes else ""


def _spelled(op: AnyOp, fp8: str | None) -> dict[str, str]:
    """The dtypes of an op by every accepted name."""
    found = {name: name for name in op.study.example_dtypes}
    found |= {short: name for short, name in SHORT.items() if name in found}
    eight = [name for name in op.study.example_dtypes if name.startswith("float8")]
    if eight:
        found["fp8"] = next((name for name in eight if name == f"float8_{fp8}"), eight[0])
    return found


def _usage(op: AnyOp) -> str:
    example = [str(DEFAULTS.get(name, DEFAULTS["N"])) for name in op.study.sizes]
    named = " ".join(f"{name}={value}" for name, value in zip(op.study.sizes, example, strict=True))
    return f"give sizes and dtype as in '{' '.join(example)} bf16' or '{named} dtype=bfloat16'"


def _call(op: AnyOp, settings: list[str], arch: Arch | None, device: str) -> AnyCall:
    """The call that the settings describe."""
    import torch

    sizes, dtype = _settings(op, settings, arch.fp8 if arch is not None else None)
    try:
        return op.study.inputs(*sizes, getattr(torch, dtype), device)
    except RuntimeError as error:
        shown = " ".join(f"{name}={size}" for name, size in zip(op.study.sizes, sizes, strict=True))
        raise InvalidArgument(f"{shown} does not fit on {device}: {str(error).splitlines()[0]}") from error


def rank(op: str, arch: str, settings: list[str] | None = None) -> RankingRecord:
    """Decide an example call on an architecture, here or not, and rank its configurations by the cost model.

    Args:
        op, settings: as for `run`.
        arch: a name of `hardware.ARCHS`.

    Raises:
        InvalidArgument: no such op, architecture or setting.
        TableError: measured rows are damaged.
    """
    import torch

    from wavecrest import hardware, ops
    from wavecrest.dispatch.tuned import cost_model

    found = ops.get(op)
    target = hardware.ARCHS.get(arch)
    if target is None:
        raise InvalidArgument(f"unknown architecture {arch!r}: known are {', '.join(hardware.ARCHS)}")
    call = _call(found, settings or [], target, "cpu")
    found.check(call)
    with torch.no_grad():
        key = dict(zip(found.key_fields, found.key(call), strict=True))
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
        op=op, arch=arch, part=target.part, key=key, ranking=rows, decision=decision, note="; ".join(notes)
    )


def _decision_on(target: Arch, op: AnyOp, settings: list[str]) -> tuple[ExplainRecord | None, list[str]]:
    """The decision for a call on an architecture that need not be here, or None with the reason.

    Arguments are tensors without memory that claim to be on a GPU. Software that a backend needs is looked for on this
    machine.
    """
    import torch
    from torch._subclasses import FakeTensor, FakeTensorMode

    import wavecrest.ops.common.target as _target
    from wavecrest.dispatch import registry
    from wavecrest.dispatch.call import mapped
    from wavecrest.dispatch.tuned import Database, Overlay

    mode, gpu = FakeTensorMode(), torch.device("cuda", 0)
    made = _call(op, settings, target, "meta")
    call = mapped(made, lambda tensor: FakeTensor(mode, tensor, gpu))
    rows = Database(arch=target.name, overlay=Overlay.of_user())
    try:
        with torch.no_grad(), _target.assumed(target), registry.measured_in(rows):
            op.check(call)
            decision = op.decide_as(op.key(call), call)
            cost, measured = op.study.cost(call), _measured(op, decision.key)
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


def _show(record: ExplainRecord) -> None:
    table = Table(title=f"{record.op} on {record.device} ({record.arch})", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("call", ", ".join(f"{name} {_text(value)}" for name, value in record.key.items()))
    table.add_row("runs", f"[green]{escape(record.backend)}[/green]")
    table.add_row("function", escape(record.function))
    if record.config:
        table.add_row("config", ", ".join(f"{name}={value}" for name, value in record.config.items()))
    table.add_row("why", f"{escape(record.reason)} (source: {record.source})")
    if record.measured:
        table.add_row("measured", escape(record.measured))
    for backend, reason in record.refused.items():
        table.add_row(f"not {backend}", escape(reason))
    table.add_row("least work", f"{record.flops:,} operations, {record.bytes:,} bytes")
    _shared.out.print(table)
    if record.note:
        _shared.out.print(escape(record.note))


def _show_ranking(record: RankingRecord) -> None:
    if record.decision is not None:
        _show(record.decision)
    if record.note:
        _shared.out.print(escape(record.note))
    if not record.ranking:
        return
    call = ", ".join(f"{name} {_text(value)}" for name, value in record.key.items())
    _shared.out.print(f"{record.op} on {record.arch} ({escape(record.part)}): [bold]model[/bold], not measured")
    _shared.out.print(escape(f"call: {call}"), soft_wrap=True)
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
        table.add_row(str(place), f"{backend}\n[dim]{config}[/dim]", _shared.format_time(one.us / 1e3), words)
    _shared.out.print(table)
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
            "M=16 N=4096 K=4096 dtype=bfloat16, the defaults.",
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
