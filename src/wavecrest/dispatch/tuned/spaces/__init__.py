"""Search spaces of `wavecrest tune` as data: one TOML file per op, read on request."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

# by table and name: rows of numbers, whose columns the file explains
Rows = tuple[tuple[int, ...], ...]


@cache
def rows(op: str) -> dict[str, dict[str, Rows]]:
    """The tables of an op's file."""
    text = resources.files(__name__).joinpath(f"{op}.toml").read_text(encoding="utf-8")
    return {
        table: {name: tuple([tuple(row) for row in values]) for name, values in named.items()}
        for table, named in tomllib.loads(text).items()
    }
