"""Result files of PyTorch's TunableOp: which solution of rocBLAS or hipBLASLt was the fastest for a GEMM.

Lines are `Validator,NAME,VALUE`, or an operator with its types and transpositions, its sizes, the solution and the mean
time in ms (torch/cuda/tunable.py, torch 2.13). Sizes are column-major: M of a file is N of `gemm`, and N is M.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wavecrest.dispatch.tuned.aiter_csv import SHOWN
from wavecrest.errors import TableError
from wavecrest.records import decode

DTYPES = {"float": "float32", "Half": "float16", "BFloat16": "bfloat16", "double": "float64"}
ARCH = "GCN_ARCH_NAME"
_OPERATOR = re.compile(r"(\w*TunableOp)_(\w+)_([NT])([NT])", re.ASCII)
_SIZES = re.compile(r"([nt]{2})_(\d{1,12})_(\d{1,12})_(\d{1,12})(?:_ld_(\d{1,12})_(\d{1,12})_(\d{1,12}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """One GEMM that was tuned.

    Args:
        operator, sizes, solution: as the file has them.
        kind: "GemmTunableOp", "GemmAndBiasTunableOp", …
        dtype: of the operands, without "torch.", or the file's own word where torch has none.
        transposed: of the file's first and second operand, "tn".
        M, N, K: of `gemm`: the second, the first and the third of the file's sizes.
        strided: whether an operand is part of a larger matrix.
        us: its time in µs; None where the file has none.
        line: in the file.
    """

    operator: str
    sizes: str
    solution: str
    kind: str
    dtype: str
    transposed: str
    M: int
    N: int
    K: int
    strided: bool
    us: float | None
    line: int


@dataclass(frozen=True, slots=True)
class Results:
    """A file: its validators in their order, and its rows."""

    validators: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]

    @property
    def arch(self) -> str | None:
        """The architecture, "gfx942"; None where the file does not say."""
        found = dict(self.validators).get(ARCH)
        return None if found is None else found.partition(":")[0]


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        TableError: the file cannot be read, or has lines that TunableOp did not write; the message names them.
    """
    return parse(decode.read_text(path, what="file of TunableOp's", error=TableError), path.name)


def parse(text: str, file: str) -> Results:
    """The results in a text; `file` is its name, for people.

    Raises:
        TableError: the text has lines that TunableOp did not write; the message names them.
    """
    validators: list[tuple[str, str]] = []
    rows: list[Row] = []
    bad: list[str] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            if not cells:
                continue
            try:
                if cells[0] == "Validator":
                    _, name, value = cells
                    validators.append((name, value))
                else:
                    rows.append(_row(cells, reader.line_num))
            except ValueError as error:
                bad.append(f"line {reader.line_num}: {error}")
    except csv.Error as error:
        bad.append(f"line {reader.line_num}: {error}")
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise TableError(f"{file}, {'; '.join(bad[:SHOWN])}{more}")
    return Results(tuple(validators), tuple(rows))


def _row(cells: list[str], line: int) -> Row:
    if not 3 <= len(cells) <= 4:
        raise ValueError(f"{len(cells)} cells, not an operator, sizes, a solution and a time")
    operator, sizes, solution, *time = cells
    match, size = _OPERATOR.fullmatch(operator), _SIZES.match(sizes)
    if match is None or size is None or match[3] + match[4] != size[1].upper():
        raise ValueError(f"{operator},{sizes} is no operator with its sizes")
    first, second, depth = (int(size[place]) for place in (2, 3, 4))
    if min(first, second, depth) < 1:
        raise ValueError(f"{sizes} has a size of 0")
    # leading dimensions of matrices that are not strided; batched operators have more fields after these
    whole = (depth if size[1][0] == "t" else first, second if size[1][1] == "t" else depth, first)
    given = tuple(int(size[place]) for place in (5, 6, 7)) if size[5] else whole
    return Row(
        operator, sizes, solution, match[1], DTYPES.get(match[2], match[2]), size[1], second, first, depth,
        given != whole or size.end() != len(sizes), _us(time[0]) if time else None, line,
    )  # fmt: skip


def _us(text: str) -> float | None:
    value = float(text) * 1e3
    if math.isnan(value) or math.isinf(value):
        raise ValueError(f"{text!r} is no time in ms")
    return value if value > 0 else None


def written(validators: Mapping[str, str], rows: Iterable[tuple[str, str, str, float]]) -> str:
    """The text of a file: its validators, then operator, sizes, solution and the time in µs of each row."""
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    lines += [f"{operator},{sizes},{solution},{us / 1e3:.6g}" for operator, sizes, solution, us in rows]
    return "\n".join(lines) + "\n"
