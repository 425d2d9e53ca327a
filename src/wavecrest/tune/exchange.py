"""Rows of other programs as measured rows of `gemm`, and back: aiter's tables, TunableOp's result files.

An imported row names no configuration of wavecrest, and its time was not taken beside PyTorch's. So it keeps its
origin, ranks below what `wavecrest tune` measured, and never serves as a near row. One bad line rejects the whole file;
valid lines that are of no use here are listed with the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wavecrest import hardware, ops, records
from wavecrest.dispatch import lookup
from wavecrest.dispatch.tuned import Cell, Entry, Evidence, Row, aiter_csv, tunable_op
from wavecrest.dispatch.tuned.row import RowKey
from wavecrest.errors import InvalidArgument, TableError
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.records import decode, files
from wavecrest.tune import admission, session

# aiter's tuner allows this share of elements to be off, and lists solutions beyond it
MOST_OFF = 0.05
AITER, TUNABLE = "aiter", "TunableOp"
FORMATS = ("aiter-bf16", "aiter-a8w8", "tunableop")
_SIXTEEN = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Imported:
    """The rows of a file, and the lines that give no row, with the reasons."""

    entries: tuple[Entry, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of a file, its number of rows, and the rows that it cannot express, with the reasons."""

    text: str
    rows: int
    left: tuple[str, ...]


def read(path: Path, arch: str | None) -> Imported:
    """The rows of a file of any form: aiter's, TunableOp's, or a record of `wavecrest tune`.

    Args:
        path: the file.
        arch: the architecture it is for, where the file itself does not say.

    Raises:
        TableError, RecordError: it is damaged or in an unknown form; the message names the lines.
        InvalidArgument: the architecture is missing, unknown, or another than the file's.
    """
    if arch is not None and arch not in hardware.ARCHS:
        raise InvalidArgument(f"--arch takes {', '.join(hardware.ARCHS)}, not {arch!r}")
    if path.suffix == ".json" or path.name.endswith(files.LINES):
        return _record(records.load_as(path, records.TuneRecord), session.named(path))
    head = decode.read_text(path, what="table", error=TableError).lstrip()
    if head.startswith("Validator,") or "TunableOp_" in head.partition("\n")[0]:
        return _tunable(tunable_op.read(path), path.name, arch)
    return _aiter(list(aiter_csv.read([path])), arch)


def _record(record: records.TuneRecord, name: str) -> Imported:
    op = ops.get(record.op)
    fields = lookup.fields_of(op)
    device = record.header.device
    if device["kind"] == "cpu":
        raise InvalidArgument(f"{name} was measured on a CPU: dispatch reads rows for calls on a GPU alone")
    won = [key for key in record.keys if key.backend is not None]
    rows = [session.row_of(key, fields, name, record.header) for key in won]
    left = [f"{key.case}: {key.problem}" for key in record.keys if key.backend is None]
    return Imported(tuple(Entry(device["arch"], record.op, fields, row) for row in rows), tuple(left))


def key_of(call: GemmCall) -> RowKey:
    """The key that measured rows of a GEMM have."""
    gemm.check(call)
    parts = dict(zip(gemm.key_fields, gemm.key(call), strict=True))
    return tuple(parts[name] for name in lookup.fields_of(gemm))


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _aiter(rows: list[aiter_csv.Row], arch: str | None) -> Imported:
    fields = lookup.fields_of(gemm)
    best: dict[tuple[Any, ...], tuple[aiter_csv.Row, Entry]] = {}
    left: list[str] = []
    bad: list[str] = []
    for row in rows:
        gfx = row.gfx or arch
        if gfx is None:
            raise InvalidArgument(f"{row.file} has no column gfx: give --arch")
        if arch is not None and gfx != arch:
            left.append(f"line {row.line}: is for {gfx}")
            continue
        dtype = _dtype(row.dtype)
        if dtype is None or not (row.eight or row.dtype in _SIXTEEN) or row.out not in (*_SIXTEEN, "float32"):
            # aiter looks rows up by torch's names
            bad.append(f"line {row.line}: {row.dtype} to {row.out} are not types that aiter multiplies")
            continue
        reason = _of_no_use(row, gfx, dtype)
        if reason:
            left.append(f"line {row.line}: {reason}")
            continue
        entry = Entry(gfx, "gemm", fields, _aiter_row(row, dtype))
        place = (gfx, row.compute_units, entry.row.key)
        before = best.get(place)
        if before is None or (row.M, -(row.us or 0.0)) > (before[0].M, -(before[0].us or 0.0)):
            best[place], row = (row, entry), before[0] if before is not None else row
        if before is not None:
            left.append(f"line {row.line}: another line stands for its numbers of rows")
    if bad:
        raise TableError(f"{rows[0].file}, {'; '.join(bad[: aiter_csv.SHOWN])}")
    return Imported(tuple(entry for _, entry in best.values()), tuple(left))


def _of_no_use(row: aiter_csv.Row, gfx: str, dtype: torch.dtype) -> str:
    arch = hardware.ARCHS.get(gfx)
    if arch is None:
        return f"is for {gfx}, which is unknown here"
    if row.us is None:
        return "has a placeholder for a time"
    if not row.plain:
        return "has scaled or preshuffled operands, which are not imported"
    if row.error is not None and row.error > MOST_OFF:
        return f"more than the {MOST_OFF:.0%} of the elements that aiter's tuner allows were off"
    least = 2 * row.M * row.N * row.K / (admission.peak(arch, dtype) * 1e6) * admission.PEAK_SLACK
    if row.us < least:
        return f"{row.us:g} µs is below the {least:.3g} µs that arithmetic takes at its peak: an error of measurement"
    return ""


def _aiter_row(row: aiter_csv.Row, dtype: torch.dtype) -> Row:
    a = torch.empty(row.M, row.K, dtype=dtype, device="meta")
    b = torch.empty(row.N, row.K, dtype=dtype, device="meta").mT
    out = _dtype(row.out)
    if row.eight:
        scale_a, scale_b = torch.empty(row.M, device="meta"), torch.empty(row.N, device="meta")
        call = GemmCall(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out)
    else:
        bias = torch.empty(row.N, dtype=dtype, device="meta") if row.bias else None
        call = GemmCall(a, b, bias, out_dtype=out)
    detail: dict[str, Any] = {
        "M": row.M, "libtype": row.library, "solution": row.solution, "splitK": row.split_k, "kernelName": row.kernel,
        "error": row.error,
    }  # fmt: skip
    assert row.us is not None
    return Row(
        key_of(call), "torch" if row.library == "torch" else "aiter", None, row.us, None, row.file,
        Evidence(units=row.compute_units, origin=AITER, detail=json.dumps(detail)),
    )  # fmt: skip


def _tunable(found: tunable_op.Results, file: str, arch: str | None) -> Imported:
    fields = lookup.fields_of(gemm)
    gfx = found.arch or arch
    if gfx is None or gfx not in hardware.ARCHS:
        raise InvalidArgument(f"{file} is for {gfx or 'an architecture that it does not name'}: give --arch")
    if arch is not None and gfx != arch:
        raise InvalidArgument(f"{file} is for {gfx}, not {arch}")
    validators = dict(found.validators)
    versions = "; ".join(
        f"torch {value}" if name == "PT_VERSION" else f"{name} {value}"
        for name, value in validators.items()
        if name != tunable_op.ARCH
    )
    best: dict[RowKey, tuple[int, Entry]] = {}
    left: list[str] = []
    for row in found.rows:
        dtype = _dtype(row.dtype)
        if row.kind not in ("GemmTunableOp", "GemmAndBiasTunableOp") or dtype is None or row.strided:
            left.append(f"line {row.line}: {row.operator} {row.sizes} is not a plain GEMM of two whole matrices")
            continue
        if row.us is None:
            left.append(f"line {row.line}: has no time")
            continue
        # column-major: the first operand is gemm's b, transposed if the weight is [N, K]
        a = (row.M, row.K) if row.transposed[1] == "n" else (row.K, row.M)
        b = (row.N, row.K) if row.transposed[0] == "t" else (row.K, row.N)
        first, second = torch.empty(a, dtype=dtype, device="meta"), torch.empty(b, dtype=dtype, device="meta")
        bias = torch.empty(row.N, dtype=dtype, device="meta") if row.kind.startswith("GemmAndBias") else None
        call = GemmCall(
            first if row.transposed[1] == "n" else first.mT, second.mT if row.transposed[0] == "t" else second, bias
        )
        detail = json.dumps(
            {"M": row.M, "operator": row.operator, "sizes": row.sizes, "solution": row.solution,
             "validators": validators}
        )  # fmt: skip
        backend = "torch" if row.solution == "Default" else "torch_tunable"
        evidence = Evidence(versions=versions, origin=TUNABLE, detail=detail)
        entry = Entry(gfx, "gemm", fields, Row(key_of(call), backend, None, row.us, None, file, evidence))
        before = best.get(entry.row.key)
        if before is not None and before[0] >= row.M:
            left.append(f"line {row.line}: another line stands for its numbers of rows")
            continue
        if before is not None:
            left.append(f"rows={before[0]}: another line stands for its numbers of rows")
        best[entry.row.key] = (row.M, entry)
    return Imported(tuple(entry for _, entry in best.values()), tuple(left))


def written(entries: Iterable[Entry], form: str, arch: str) -> Exported:
    """Rows of `gemm` as another program's file; rows that it cannot express are listed.

    Args:
        entries: as `Overlay.entries` gives them; other ops and architectures are not for the file.
        form: one of `FORMATS`.
        arch: the architecture.

    Raises:
        InvalidArgument: no such form.
    """
    if form not in FORMATS:
        raise InvalidArgument(f"--format takes csv, {', '.join(FORMATS)}, not {form!r}")
    mine = [entry for entry in entries if entry.op == "gemm" and entry.arch == arch]
    if form == "tunableop":
        return _to_tunable(mine)
    eight = form == "aiter-a8w8"
    rows: list[aiter_csv.Row] = []
    left: list[str] = []
    for entry in mine:
        found = _to_aiter(entry, eight)
        if isinstance(found, str):
            left.append(f"{_named(entry)}: {found}")
        else:
            rows.append(found)
    return Exported(aiter_csv.written(rows, eight=eight), len(rows), tuple(left))


def _named(entry: Entry) -> str:
    return " ".join(str(part) for part in entry.row.key[:4]) + f" {entry.row.backend}"


def _detail(row: Row) -> dict[str, Any]:
    try:
        found = decode.json_of(row.evidence.detail or "{}")
    except ValueError as error:
        raise TableError(f"the detail of a row is damaged: {error}") from None
    return found if isinstance(found, dict) else {}


def _to_aiter(entry: Entry, eight: bool) -> aiter_csv.Row | str:
    row, part = entry.row, dict(zip(entry.fields, entry.row.key, strict=True))
    detail = _detail(row)
    if row.backend not in ("torch", "aiter") or (row.backend == "aiter" and "libtype" not in detail):
        return "names no kernel of aiter's"
    if row.evidence.units is None:
        return "has no number of compute units, which aiter looks for"
    problem = _plain(part, eight)
    if problem:
        return problem
    error = detail.get("error")
    return aiter_csv.Row(
        entry.arch, row.evidence.units, int(detail.get("M", part["rows"] or 0)), int(part["columns"] or 0),
        int(part["k"] or 0), part["bias"] == "n", str(part["a"]), str(part["out"]), True,
        str(detail.get("libtype", "torch")), str(detail.get("kernelName", "")), row.us, row.record,
        int(detail.get("solution", 0)), int(detail.get("splitK", 0)), None if error is None else float(error),
    )  # fmt: skip


def _plain(part: dict[str, Cell], eight: bool) -> str:
    """The part of a key that aiter's tables cannot express; "" if they can."""
    types = part["a"] == part["b"] and (
        (part["a"] == "int8" or str(part["a"]).startswith("float8")) if eight else part["a"] in _SIXTEEN
    )
    if not types:
        return f"multiplies {part['a']} and {part['b']}"
    # the scale of one row is that of the tensor, too
    scales = ("tensor vector" if part["rows"] == 1 else "vector vector") if eight else "none none"
    wanted: dict[str, Cell] = {"form": "plain", "scales": scales}
    wanted |= {"activation": None, "residual": False, "batch": 0, **({"bias": None} if eight else {})}
    other = [f"{name} {part[name]}" for name, value in wanted.items() if part[name] != value]
    if part["bias"] == "m" or not str(part["order"]).startswith("k k ") or part["rows"] == 0:
        other.append(f"order {part['order']}, bias along {part['bias']}, {part['rows']} rows")
    return f"has {', '.join(other)}, which the table has no column for" if other else ""


def _to_tunable(entries: list[Entry]) -> Exported:
    found = [(entry, _detail(entry.row)) for entry in entries]
    sets = Counter(json.dumps(detail.get("validators")) for _, detail in found if "operator" in detail)
    common = sets.most_common(1)[0][0] if sets else "{}"
    rows: list[tuple[str, str, str, float]] = []
    left: list[str] = []
    for entry, detail in found:
        if "operator" not in detail:
            left.append(f"{_named(entry)}: names no solution of TunableOp's")
        elif json.dumps(detail["validators"]) != common:
            left.append(f"{_named(entry)}: was tuned with other versions than most; TunableOp takes one set a file")
        else:
            rows.append((detail["operator"], detail["sizes"], detail["solution"], entry.row.us))
    return Exported(tunable_op.written(decode.json_of(common), rows), len(rows), tuple(left))
