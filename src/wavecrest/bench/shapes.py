"""A file of shapes as cases: a CSV with one row per call, with the op's sizes and dtype as columns."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavecrest import ops
from wavecrest.bench import sizes, suites
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Cell
from wavecrest.errors import InvalidArgument, TableError
from wavecrest.records import decode

# dtype of a row that names no dtype
DTYPE = "bfloat16"
# number of errors in a file that a message shows
SHOWN = 5


@dataclass(slots=True)
class Shapes:
    """The cases of one op in a file, and how a child makes each (`trial.Trial.source`)."""

    cases: list[suites.Case] = field(default_factory=list)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)


def read(path: Path, device: str, *, known: Sequence[str] = (), fp8: str | None = None) -> dict[str, Shapes]:
    """The shapes of a file, by op, each once.

    Args:
        path: CSV with a header: `op`, the op's sizes by name (gemm: M, N, K; others `Study.sizes`) or by the names of
            its key, and, if wanted, `dtype` (bfloat16 where it is empty) and other parts of the key (`sizes.options`;
            gemm: activation, bias, residual and others). Cells that an op has no part for are left empty.
        device: where the cases' tensors are to be.
        known: the only ops that rows may name. Where it is one, there need not be a column `op`.
        fp8: the 8-bit float of the device, which "fp8" means.

    Raises:
        TableError: it cannot be read, or has invalid rows; the message names the lines.
    """
    text = decode.read_text(path, what="file of shapes", error=TableError, mark=True)
    # a cell may be as long as the file, which has its own limit
    csv.field_size_limit(decode.MOST_BYTES)
    lines = csv.reader(text.splitlines())
    header = [name.strip() for name in next(lines, [])]
    if ("op" not in header and len(known) != 1) or not any(header) or len(set(header)) != len(header):
        raise TableError(f"{path} is not a file of shapes: its first line names the columns, each once: op,M,N,K,dtype")
    found: dict[str, Shapes] = {}
    bad: list[str] = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        try:
            if len(cells) != len(header):
                raise InvalidArgument(f"has {len(cells)} cells for {len(header)} columns")
            row = {name: cell.strip() for name, cell in zip(header, cells, strict=True) if cell.strip()}
            op, shape, options = _shape(row, known, fp8)
        except InvalidArgument as error:
            bad.append(f"line {lines.line_num}: {error}")
            continue
        case = suites.sized(op, shape, device, options)
        own = found.setdefault(op.name, Shapes())
        if case.name not in own.sources:
            own.cases.append(case)
            own.sources[case.name] = {"sizes": list(shape[0]), "dtype": shape[1]}
            if options:
                own.sources[case.name]["options"] = options
    if bad:
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise TableError(f"{path} is not a file of shapes: {'; '.join(bad[:SHOWN])}{more}: correct or delete the lines")
    return found


def _shape(row: dict[str, str], known: Sequence[str], fp8: str | None) -> tuple[AnyOp, sizes.Shape, dict[str, Cell]]:
    """The op, sizes and dtype of a row, and other parts of its key.

    Raises:
        InvalidArgument: a part is missing or not understood.
    """
    if "op" not in row and len(known) != 1:
        raise InvalidArgument("names no op")
    op = ops.get(row.pop("op", *known[:1]))
    if known and op.name not in known:
        raise InvalidArgument(f"is of {op.name}, and asked for are {', '.join(known)}")
    options = {name: sizes.option(row.pop(name)) for name in sizes.options(op) if name in row}
    text = {"dtype": DTYPE, **row}
    given = [sizes.named(op, name) for name in text if name != "dtype"]
    if sorted(given) != sorted(op.study.sizes):
        raise InvalidArgument(f"{op.name} has the sizes {', '.join(op.study.sizes)}, not {', '.join(given) or 'none'}")
    shape = sizes.one(op, [f"{name}={value}" for name, value in text.items()], fp8)
    if options:
        # made without memory: whether the op makes such a call
        sizes.call(op, *shape, "meta", options)
    return op, shape, options
