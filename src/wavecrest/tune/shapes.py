"""A file of shapes as cases of a tuning run: a CSV with one row per call, with the op's sizes and dtype as columns."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from wavecrest import ops
from wavecrest.bench import suites
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
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


def call(op: AnyOp, sizes: Sequence[int], dtype: str, device: str) -> AnyCall:
    """A call with sizes, as `Study.inputs` makes it."""
    return op.study.inputs(*sizes, suites.dtype_of(dtype), device)


def read(path: Path, device: str) -> dict[str, Shapes]:
    """The shapes of a file, by op, each once.

    Args:
        path: CSV with a header: `op`, the op's sizes by name (gemm: M, N, K; others `Study.sizes`), and, if wanted,
            `dtype` (bfloat16 where it is empty). Sizes of other ops are left empty.
        device: where the cases' tensors are to be.

    Raises:
        TableError: it cannot be read, or has invalid rows; the message names the lines.
    """
    text = decode.read_text(path, what="file of shapes", error=TableError, mark=True)
    # a cell may be as long as the file, which has its own limit
    csv.field_size_limit(decode.MOST_BYTES)
    lines = csv.reader(text.splitlines())
    header = [name.strip() for name in next(lines, [])]
    if "op" not in header or len(set(header)) != len(header):
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
            op, sizes, dtype = _shape(row)
        except InvalidArgument as error:
            bad.append(f"line {lines.line_num}: {error}")
            continue
        name = f"{'x'.join(map(str, sizes))} {suites.SHORT_DTYPES.get(dtype, dtype)}"
        own = found.setdefault(op.name, Shapes())
        if name not in own.sources:
            own.cases.append(suites.Case(name, partial(call, op, sizes, dtype, device)))
            own.sources[name] = {"sizes": list(sizes), "dtype": dtype}
    if bad:
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise TableError(f"{path} is not a file of shapes: {'; '.join(bad[:SHOWN])}{more}: correct or delete the lines")
    return found


def _shape(row: dict[str, str]) -> tuple[AnyOp, tuple[int, ...], str]:
    """The op, sizes and dtype of a row.

    Raises:
        InvalidArgument: a part is missing or not understood.
    """
    if "op" not in row:
        raise InvalidArgument("names no op")
    op = ops.get(row.pop("op"))
    text = row.pop("dtype", DTYPE)
    try:
        dtype = str(suites.dtype_of(text)).removeprefix("torch.")
    except InvalidArgument:
        raise InvalidArgument(f"dtype is {text!r}, and must be one of {', '.join(suites.SHORT_DTYPES)}") from None
    if set(row) != set(op.study.sizes):
        raise InvalidArgument(f"{op.name} has the sizes {', '.join(op.study.sizes)}, not {', '.join(row) or 'none'}")
    sizes = []
    for name in op.study.sizes:
        if not row[name].isdecimal() or int(row[name]) < 1:
            raise InvalidArgument(f"{name} is {row[name]!r}, and must be a whole number above zero")
        sizes.append(int(row[name]))
    return op, tuple(sizes), dtype
