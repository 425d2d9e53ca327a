"""One kernel configuration: tile sizes and launch options, immutable and hashable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# launch options that a configuration may set although the default one leaves them alone
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "maxnreg")


class Config(Mapping[str, int]):
    """Keyword arguments of a Triton launch (`BLOCK_N`, `num_warps`, `num_stages`, …).

    Immutable and hashable, so that a decision that carries it can be cached and compared. A launch unpacks
    `**config.kwargs`, the plain dict inside: unpacking the mapping itself costs microseconds a call.
    """

    __slots__ = ("kwargs",)

    kwargs: dict[str, int]

    def __init__(self, **values: int) -> None:
        self.kwargs = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> int:
        return self.kwargs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kwargs)

    def __len__(self) -> int:
        return len(self.kwargs)

    def __hash__(self) -> int:
        return hash(tuple(self.kwargs.items()))

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v}' for k, v in self.kwargs.items())})"
