"""aiter's tuned tables of GEMMs: the kernels that AMD's library measured as its fastest, and would run.

Tables of 16-bit GEMMs have 18 columns that begin with `gfx`; the older form has 17 without it. Tables of 8-bit GEMMs
with a scale for each row and column ("a8w8") have 13, or 12 without `gfx` (aiter/configs/a8w8_tuned_gemm.csv). A row is
found by its exact key, which contains the architecture and the number of CUs (ROCm/aiter, aiter/tuned_gemm.py and
aiter/jit/core.py, read 2026-08-22). aiter took the times beside other libraries, not beside PyTorch, and its accuracy
gate lets up to 5 % of the elements be off. So a row says which kernel is worth trying here, not which is fastest.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wavecrest.errors import TableError
from wavecrest.records import decode

# columns that find a row; the older form lacks the first
KEY = ("gfx", "cu_num", "M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
# a file without these columns is not such a table
NEEDED = ("cu_num", "M", "N", "K", "dtype")
# of 8-bit tables; a table that names a library is for preshuffled weights
NEEDED_8 = ("cu_num", "M", "N", "K", "q_dtype_w", "kernelId", "us")
# columns that are written: the newer forms
COLUMNS = (*KEY, "libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")
COLUMNS_8 = (
    "gfx", "cu_num", "M", "N", "K", "q_dtype_w", "kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio",
)  # fmt: skip
# number of bad lines that a message names
SHOWN = 20
# tables that come with aiter, in its folder
SHIPPED = ("configs/bf16_tuned_gemm.csv", "configs/model_configs/*bf16_tuned_gemm*.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One GEMM that aiter has tuned: [M, K] times [N, K]ᵀ.

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
        solution: its solidx, or kernelId; `split_k`: its splitK.
        error: the share of elements that its tuner found off; None where the table has none.
        line: in the file.
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
    solution: int = field(default=0, compare=False)
    split_k: int = field(default=0, compare=False)
    error: float | None = field(default=None, compare=False)
    line: int = field(default=0, compare=False)

    @property
    def eight(self) -> bool:
        """True for an 8-bit GEMM with scales of rows and columns."""
        return self.dtype == "int8" or self.dtype.startswith("float8")


def cells(text: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The columns of a table, and its rows as they are written."""
    rows = list(csv.DictReader(text.splitlines()))
    return (tuple(rows[0]) if rows else tuple(text.strip().split(","))), rows


def parse(text: str, file: str) -> list[Row]:
    """The rows of a table of 16-bit or 8-bit GEMMs; `file` is its name, for people.

    Raises:
        TableError: a column is missing, or a cell is not what its column holds; the message names every such line.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    found: list[Row] = []
    bad: list[str] = []
    try:
        columns = tuple(reader.fieldnames or ())
        make = _eight if "q_dtype_w" in columns else _row
        absent = [name for name in (NEEDED_8 if make is _eight else NEEDED) if name not in columns]
        if absent:
            raise TableError(f"{file} is no table of 16-bit matrix products: no column {', '.join(absent)}")
        if make is _eight and "libtype" in columns:
            raise TableError(f"{file} is a table of preshuffled weights, which are not imported")
        for row in reader:
            try:
                # a cell too few or too many: the line is cut, or another's
                if None in row or None in row.values():
                    raise ValueError(f"has not {len(columns)} cells")
                found.append(make(row, file, reader.line_num))
            except (TypeError, ValueError) as error:
                bad.append(f"line {reader.line_num}: {error}")
    except csv.Error as error:
        bad.append(f"line {reader.line_num}: {error}")
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise TableError(f"{file}, {'; '.join(bad[:SHOWN])}{more}")
    return found


def _whole(row: dict[str, str], name: str, least: int) -> int:
    value = int(row[name])
    if not least <= value < 1 << 40:
        raise ValueError(f"{name} is {value}")
    return value


def _number(text: str | None) -> float | None:
    if text is None or not text.strip():
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no time and no share")
    return value


def _eight(row: dict[str, str], file: str, line: int) -> Row:
    us = _number(row["us"])
    return Row(
        gfx=row.get("gfx") or None,
        compute_units=_whole(row, "cu_num", 1),
        M=_whole(row, "M", 1),
        N=_whole(row, "N", 1),
        K=_whole(row, "K", 1),
        bias=False,
        dtype=row["q_dtype_w"].removeprefix("torch."),
        out="bfloat16",
        plain=True,
        library="ck",
        kernel=row.get("kernelName") or "",
        us=us if us is not None and us > 0 else None,
        file=file,
        solution=int(row["kernelId"]),
        split_k=int(row.get("splitK") or 0),
        error=_number(row.get("errRatio")),
        line=line,
    )


def _row(row: dict[str, str], file: str, line: int) -> Row:
    def said(name: str) -> bool:
        return (row.get(name) or "").strip().lower() in ("true", "1")

    us = _number(row.get("us")) or 0.0
    return Row(
        gfx=row.get("gfx") or None,
        compute_units=_whole(row, "cu_num", 1),
        M=_whole(row, "M", 1),
        N=_whole(row, "N", 1),
        K=_whole(row, "K", 1),
        bias=said("bias"),
        dtype=row["dtype"].removeprefix("torch."),
        out=(row.get("outdtype") or row["dtype"]).removeprefix("torch."),
        plain=not said("scaleAB") and not said("bpreshuffle"),
        library=row.get("libtype") or "",
        kernel=row.get("kernelName") or "",
        us=us if us > 0 else None,
        file=file,
        solution=int(row.get("solidx") or 0),
        split_k=int(row.get("splitK") or 0),
        error=_number(row.get("err_ratio")),
        line=line,
    )


def written(rows: Iterable[Row], *, eight: bool) -> str:
    """The text of a table of 16-bit or 8-bit GEMMs in the newer form; rows have an architecture and a time."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS_8 if eight else COLUMNS)
    for row in rows:
        assert row.us is not None
        size = 1 if eight else 2
        tflops = round(2 * row.M * row.N * row.K / row.us / 1e6, 2)
        moved = round((size * (row.M * row.K + row.N * row.K) + 2 * row.M * row.N) / row.us / 1e3, 2)
        error = "" if row.error is None else row.error
        place = (row.gfx, row.compute_units, row.M, row.N, row.K)
        if eight:
            kernel = (row.solution, row.split_k, row.us, row.kernel)
            writer.writerow((*place, f"torch.{row.dtype}", *kernel, tflops, moved, error))
        else:
            types = (row.bias, f"torch.{row.dtype}", f"torch.{row.out}", False, False)
            kernel_16 = (row.library, row.solution, row.split_k, row.us, row.kernel)
            writer.writerow((*place, *types, *kernel_16, error, tflops, moved))
    return buffer.getvalue()


def read(paths: Iterable[Path]) -> Iterator[Row]:
    """The rows of files.

    Raises:
        TableError: a file cannot be read, or is malformed.
    """
    for path in paths:
        yield from parse(decode.read_text(path, what="file of aiter's", error=TableError), path.name)


def padded(M: int, N: int) -> tuple[int, ...]:
    """The numbers of rows that aiter looks for in turn: M, then M padded finely and coarsely."""
    step = 16 if M <= 256 else 32 if M <= 1024 else 64 if M <= 4096 else 128
    coarse = 8192 if M > 8192 and N > 4096 else 1 << max(0, M - 1).bit_length()
    return tuple(dict.fromkeys((M, -(-M // step) * step, coarse)))


def find(
    rows: Iterable[Row], arch: str, compute_units: int, M: int, N: int, K: int, dtype: str, bias: bool = False
) -> Row | None:
    """The row that aiter would take for a plain GEMM whose result has the operands' dtype."""
    fitting = [
        row
        for row in rows
        if row.gfx in (None, arch)
        and (row.compute_units, row.N, row.K, row.dtype, row.out) == (compute_units, N, K, dtype, dtype)
        and row.plain
        and row.bias == bias
    ]
    for rows_of_key in padded(M, N):
        found = [row for row in fitting if rows_of_key == row.M]
        if found:
            # aiter keeps the fastest of several rows of one key
            return min(found, key=lambda row: math.inf if row.us is None else row.us)
    return None
