"""Kernels in Gluon for AMD on a CPU: as `tests.gluon`, with copies to LDS that are done when they are waited for.

That is the latest that may be. What was in their place is gone when they begin, the earliest that may be. One group of
waves stands for all: barriers are not held here, but by `wavecrest isa run --check`. Loads to registers are done at
once: that the compiler waits for them is held there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import gluon
from tests.gluon import Tile


class Pointer:
    """An element of a tensor's memory."""

    def __init__(self, x: Tensor, at: Any = 0) -> None:
        self.x, self.at, self.dtype = x, at, SimpleNamespace(element_ty=x.dtype)
        self.memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.x, self.at + offset)

    def load(self, offsets: Tensor) -> Tensor:
        places = int(self.x.storage_offset()) + self.at + offsets
        assert places.min() >= 0 and places.max() < len(self.memory), "outside of the memory"
        return self.memory[places]


class LdsTile(Tile):
    """A tile in LDS, read by the layout that it is said to have."""

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, place: Any) -> LdsTile:
        return LdsTile(self.data[int(place)])

    def permute(self, order: tuple[int, ...]) -> LdsTile:
        return LdsTile(self.data.permute(*order))

    def laid_out(self, shape: list[int], swizzle: tuple[int, int, int]) -> LdsTile:
        vec, per_phase, phases = swizzle
        rows, columns = (torch.arange(size) for size in shape)
        phase = (rows // per_phase % phases)[:, None]
        place = ((columns // vec)[None, :] ^ phase) * vec + columns % vec
        return LdsTile(self.data[rows[:, None], place])


class Kernels(gluon.Kernels):
    """The functions of a file of kernels for gfx950; see `gluon.Kernels`."""

    def _language(self) -> dict[str, Any]:
        names = super()._language()
        # copies of each group: what is under way, and what is not closed
        under_way: list[list[Callable[[], None]]] = []
        begun: list[Callable[[], None]] = []

        def copy(tile: LdsTile, base: Pointer, offsets: Tensor, mask: Tensor | None = None) -> None:
            tile.data.copy_(torch.full(tile.data.shape, float("nan")))
            wanted = torch.ones_like(offsets, dtype=torch.bool) if mask is None else mask.expand(offsets.shape)

            def done() -> None:
                tile.data.copy_(torch.where(wanted, base.load(torch.where(wanted, offsets, 0)), 0))

            begun.append(done)

        def commit() -> None:
            under_way.append(list(begun))
            begun.clear()

        def wait(outstanding: int) -> None:
            while len(under_way) > outstanding:
                for done in under_way.pop(0):
                    done()

        def load(tile: LdsTile, _layout: Any) -> Tensor:
            return tile.data.clone()

        def fetch(base: Pointer, offsets: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None:
                return base.load(offsets)
            wanted = mask.expand(offsets.shape)
            return torch.where(wanted, base.load(torch.where(wanted, offsets, 0)).float(), 0.0).to(base.x.dtype)

        def layout(*_args: Any) -> None:
            return None

        def multiplied(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
            return acc + a.float() @ b.float()

        def scaled(
            a: Tensor, a_scale: None, a_format: str, b: Tensor, b_scale: None, b_format: str, acc: Tensor
        ) -> Tensor:  # fmt: skip
            assert a_scale is b_scale is None
            assert {a_format, b_format} == {"e4m3" if a.dtype == torch.float8_e4m3fn else "e5m2"}
            return multiplied(a, b, acc)

        async_copy = SimpleNamespace(
            buffer_load_to_shared=copy, commit_group=commit, wait_group=wait, load_shared_relaxed=load
        )
        vars(names["gl"]).update(
            amd=SimpleNamespace(
                AMDMFMALayout=layout, cdna3=SimpleNamespace(mfma=multiplied, buffer_load=fetch),
                cdna4=SimpleNamespace(async_copy=async_copy, mfma_scaled=scaled),
            ),
            BlockedLayout=layout, SliceLayout=layout, DotOperandLayout=layout,
            SwizzledSharedLayout=lambda vec, per_phase, phases, _order: (vec, per_phase, phases),
            allocate_shared_memory=lambda dtype, shape, _layout: LdsTile(torch.full(shape, float("nan")).to(dtype)),
            float8e4nv=torch.float8_e4m3fn,
            arange=lambda start, end, layout=None: torch.arange(start, end), cdiv=lambda a, b: -(-a // b),
            inline_asm_elementwise=lambda _asm, _constraints, args, *_more, **_options: args[0],
        )  # fmt: skip
        names["laid_out"] = lambda tile, rows, columns, swizzle: tile.laid_out([rows, columns], swizzle)
        return names
