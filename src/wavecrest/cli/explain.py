"""`wavecrest explain OP`: which backend would run a call, with which configuration, and why not the others."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
import typer
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument

DTYPES = ("float64", "float32", "float16", "bfloat16")


class ExplainRecord(pydantic.BaseModel):
    """A decision with the call and the device it was made for."""

    kind: Literal["explain"] = "explain"
    op: str
    device: str
    arch: str
    key: dict[str, Any]
    backend: str
    config: dict[str, int]
    source: str
    reason: str
    refused: dict[str, str]
    flops: int
    bytes: int
    note: str = ""


def _settings(items: list[str]) -> tuple[int, int, str]:
    values = {"M": "16", "N": "4096", "dtype": "bfloat16"}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or name not in values:
            raise InvalidArgument(f"{item!r}: give M=ROWS, N=COLUMNS or dtype={'|'.join(DTYPES)}")
        values[name] = value
    for name in ("M", "N"):
        if not values[name].isdecimal() or int(values[name]) < 1:
            raise InvalidArgument(f"{name}={values[name]}: must be a whole number of at least 1")
    if values["dtype"] not in DTYPES:
        raise InvalidArgument(f"dtype={values['dtype']}: use {', '.join(DTYPES)}")
    return int(values["M"]), int(values["N"]), values["dtype"]


def run(op: str, settings: list[str] | None = None, device: str | None = None) -> ExplainRecord:
    """The decision for `op` on an example call, without running it.

    Args:
        op: an op's name, see `wavecrest.registry.names()`.
        settings: "M=16", "N=4096", "dtype=bfloat16" in any order; these are the defaults.
        device: as for `wavecrest.hardware.detect`.

    Raises:
        InvalidArgument: no such op, setting or device name.
        EnvironmentProblem: the device is not here.
    """
    rows, columns, dtype = _settings(settings or [])
    import torch

    from wavecrest import hardware, registry

    found = registry.get(op)
    target = hardware.detect(device)
    try:
        args = found.inputs(rows, columns, getattr(torch, dtype), target.torch_name)
    except RuntimeError as error:
        raise InvalidArgument(f"M={rows} N={columns} does not fit on {target.torch_name}: {error}") from error
    with torch.no_grad():
        decision = found.decide(*args)
    cost = found.cost(*args)
    note = "" if target.kind == "cuda" else "decided for the CPU: no GPU was asked for or none is here"
    return ExplainRecord(
        op=op,
        device=target.name,
        arch=target.arch,
        key=dict(zip(found.key_fields, decision.key, strict=True)),
        backend=decision.backend,
        config=dict(decision.config or {}),
        source=decision.source,
        reason=decision.reason,
        refused={refusal.backend: refusal.reason for refusal in decision.refused},
        flops=cost.flops,
        bytes=cost.bytes,
        note=note,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _show(record: ExplainRecord) -> None:
    table = Table(title=f"{record.op} on {record.device} ({record.arch})", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("call", ", ".join(f"{name} {_text(value)}" for name, value in record.key.items()))
    table.add_row("runs", f"[green]{escape(record.backend)}[/green]")
    if record.config:
        table.add_row("config", ", ".join(f"{name}={value}" for name, value in record.config.items()))
    table.add_row("why", f"{escape(record.reason)} (source: {record.source})")
    for backend, reason in record.refused.items():
        table.add_row(f"not {backend}", escape(reason))
    table.add_row("least work", f"{record.flops:,} operations, {record.bytes:,} bytes")
    _shared.out.print(table)
    if record.note:
        _shared.out.print(escape(record.note))


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's name, such as rms_norm.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[M=16] [N=4096] [dtype=bfloat16]", help="Rows, columns and dtype of the call."),
    ] = None,
    device: _shared.DeviceOption = None,
    as_json: _shared.JsonOption = False,
) -> None:
    """Show which backend runs an op's call, and why."""
    record = run(op, settings, device)
    if as_json:
        _shared.print_json(record)
    else:
        _show(record)
