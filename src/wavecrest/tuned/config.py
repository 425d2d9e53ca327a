"""One kernel configuration: tile sizes and launch options, immutable and hashable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Config(Mapping[str, int]):
    """Keyword arguments of a Triton launch (`BLOCK_N`, `num_warps`, `num_stages`, …), usable as `kernel[grid](**config)`.

    Immutable and hashable, so that a decision that carries it can be cached and compared.
    """

    __slots__ = ("_values",)

    def __init__(self, **values: int) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v}' for k, v in self._values.items())})"
