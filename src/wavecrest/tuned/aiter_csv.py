"""aiter's tuned tables of 16-bit matrix products: what AMD's library has measured of itself, and would run.

Two forms exist: 18 columns that begin with `gfx`, and the older 17 without it. A row is found by its exact key, of
which the architecture and the number of CUs are a part (ROCm/aiter, aiter/tuned_gemm.py and aiter/jit/core.py, read
2026-08-22). Its times were taken by aiter beside other libraries, not beside PyTorch, and behind a gate that lets up to
5 % of the elements be off: they say what is worth trying here, not what is fastest.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wavecrest.errors import TableError

# what a row is found by; without the first in the older form
KEY = ("gfx", "cu_num", "M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
# without these a file is no such table
NEEDED = ("cu_num", "M", "N", "K", "dtype")
# those that come with aiter, in its folder
SHIPPED = ("configs/bf16_tuned_gemm.csv", "configs/model_configs/*bf16_tuned_gemm*.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One product that aiter has tuned: [M, K] times [N, K]ᵀ.

    Args:
        gfx: the architecture; None in the older form.
        compute_units: CUs of the GPU, in its partition mode.
        M, N, K: the sizes.
        bias: whether one is added.
        dtype, out: of the operands and of the result, without "torch.".
        plain: neither scaled nor preshuffled.
        library: what ran it ("hipblaslt", "asm", "skinny", "triton", …).
        kernel: its name, as the table has it; "" for none.
        us: its time in µs; None where the table has a placeholder (0 or less).
        file: the name of the table.
    """

    gfx: str | None
    compute_units: int
    M: int
    N: int
    K: int
    bias: bool
    dtype: str
    out: str
    plain: bool
    library: str
    kernel: str
    us: float | None
    file: str


def cells(text: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The columns of a table, and its rows as they are written."""
    rows = list(csv.DictReader(text.splitlines()))
    return (tuple(rows[0]) if rows else tuple(text.strip().split(","))), rows


def parse(text: str, file: str) -> list[Row]:
    """The rows of a table; `file` is its name, for people.

    Raises:
        TableError: a column is missing, or a cell is not what its column holds; the message names the line.
    """
    columns, rows = cells(text)
    absent = [name for name in NEEDED if name not in columns]
    if absent:
        raise TableError(f"{file} is no table of 16-bit matrix products: no column {', '.join(absent)}")
    found = []
    for line, row in enumerate(rows, start=2):
        try:
            found.append(_row(row, file))
        except (TypeError, ValueError) as error:
            raise TableError(f"{file}, line {line}: {error}") from None
    return found


def _row(row: dict[str, str], file: str) -> Row:
    def said(name: str) -> bool:
        return (row.get(name) or "").strip().lower() in ("true", "1")

    us = float(row.get("us") or 0.0)
    return Row(
        gfx=row.get("gfx") or None,
        compute_units=int(row["cu_num"]),
        M=int(row["M"]),
        N=int(row["N"]),
        K=int(row["K"]),
        bias=said("bias"),
        dtype=row["dtype"].removeprefix("torch."),
        out=(row.get("outdtype") or row["dtype"]).removeprefix("torch."),
        plain=not said("scaleAB") and not said("bpreshuffle"),
        library=row.get("libtype") or "",
        kernel=row.get("kernelName") or "",
        us=us if us > 0 else None,
        file=file,
    )


def read(paths: Iterable[Path]) -> Iterator[Row]:
    """The rows of files.

    Raises:
        TableError: a file cannot be read, or is malformed.
    """
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"cannot read {path.name}: {error}") from error
        yield from parse(text, path.name)


def padded(M: int, N: int) -> tuple[int, ...]:
    """The numbers of rows that aiter looks for in turn: M, and what it is padded to, finely and coarsely."""
    step = 16 if M <= 256 else 32 if M <= 1024 else 64 if M <= 4096 else 128
    coarse = 8192 if M > 8192 and N > 4096 else 1 << max(0, M - 1).bit_length()
    return tuple(dict.fromkeys((M, -(-M // step) * step, coarse)))


def find(rows: Iterable[Row], arch: str, compute_units: int, M: int, N: int, K: int, dtype: str) -> Row | None:
    """The row that aiter would take for a plain product without a bias whose result has the operands' dtype."""
    fitting = [
        row
        for row in rows
        if row.gfx in (None, arch)
        and (row.compute_units, row.N, row.K, row.dtype, row.out) == (compute_units, N, K, dtype, dtype)
        and row.plain
        and not row.bias
    ]
    for rows_of_key in padded(M, N):
        found = [row for row in fitting if rows_of_key == row.M]
        if found:
            # of a key that is there twice it keeps the fastest
            return min(found, key=lambda row: math.inf if row.us is None else row.us)
    return None
