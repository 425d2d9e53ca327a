"""aiter's tuned tables for 16-bit matrix products: can a row match this GPU, and would aiter rewrite the files?

Today's aiter cannot read the older of their two forms alone (KeyError: 'gfx').
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

from wavecrest.dispatch.tuned import aiter_csv
from wavecrest.doctor.report import Finding, Level

_SOURCE = "aiter/jit/core.py and aiter/tuned_gemm.py in ROCm/aiter"


def check_tables(value: str, arch: str, compute_units: int, read: Callable[[str], str | None]) -> Iterator[Finding]:
    """Findings on the tables that AITER_CONFIG_GEMM_BF16 lists.

    Args:
        value: paths joined by `os.pathsep`.
        arch: this GPU's architecture, "gfx942".
        compute_units: this GPU's number of CUs, in its present partition mode.
        read: the text of a file, or None.
    """
    keys: Counter[tuple[str, ...]] = Counter()
    matching = total = tables = 0
    for path in filter(None, value.split(os.pathsep)):
        text = read(path)
        if text is None:
            yield _finding("warn", f"the table {path} cannot be read", "aiter runs without it", "correct the path")
            continue
        columns, rows = aiter_csv.cells(text)
        absent = [name for name in aiter_csv.NEEDED if name not in columns]
        if absent:
            yield _finding(
                "warn",
                f"{path} is no table of 16-bit matrix products: no column {', '.join(absent)}",
                "aiter cannot read it",
                "correct the path",
            )
            continue
        tables += 1
        yield from _form(path, columns, rows)
        for row in rows:
            total += 1
            keys[tuple((row.get(name) or "").strip() for name in aiter_csv.KEY)] += 1
            if row.get("cu_num") == str(compute_units) and row.get("gfx", arch) == arch:
                matching += 1
    if tables and matching == 0:
        yield _finding(
            "warn",
            f"none of the {total} tuned rows is for {arch} with {compute_units} CUs",
            "rows of another GPU never match, so every matrix product takes aiter's fallback, without an error",
            "tune on this GPU, or unset the variable",
        )
    elif tables:
        yield _finding("ok", f"{matching} of {total} tuned rows are for {arch} with {compute_units} CUs", "", "")
    doubled = sum(count > 1 for count in keys.values())
    if doubled:
        yield _finding(
            "warn",
            f"{doubled} keys occur more than once in the tuned tables",
            "aiter keeps the fastest row, rewrites your files, and raises 'please re-run'",
            "keep one row of each key before starting",
        )


def _form(path: str, columns: tuple[str, ...], rows: list[dict[str, str]]) -> Iterator[Finding]:
    if "gfx" not in columns:
        yield _finding(
            "warn",
            f"{path} has the older form without the column gfx",
            "today's aiter raises KeyError: 'gfx' on such a table alone, and its rows carry no architecture",
            "add the column gfx in front, or tune again",
        )
    plain = sorted({row["dtype"] for row in rows if not row["dtype"].startswith("torch.")})
    if plain:
        yield _finding(
            "warn",
            f"{path} writes the dtype as {', '.join(plain)}",
            "aiter looks rows up by torch's name, so these can never match",
            "write torch.bfloat16 or torch.float16",
        )


def _finding(level: Level, what: str, why: str, action: str) -> Finding:
    return Finding(
        check="aiter_config",
        level=level,
        what=f"AITER_CONFIG_GEMM_BF16: {what}",
        why=why or "aiter finds a row by architecture, number of CUs and exact shape",
        action=action or "nothing to do",
        source=_SOURCE,
    )
