"""Two layers of one input whose parameters lie one after the other, so that up to 64 rows take one GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.dispatch.op import Op
from wavecrest.errors import Unsupported
from wavecrest.nn.hooks import plain
from wavecrest.nn.linear import Linear
from wavecrest.nn.norm import ResidualNorm
from wavecrest.ops import PackedWeight

# more rows than these have work enough in each GEMM
MOST_ROWS = 64


class FusedProjection:
    """The wider of two layers, and a narrow one behind it, as one layer wherever their parameters allow it.

    They stay the layers and parameters that they are: `lay_out` moves what those hold into one piece of memory, and
    what is given other memory afterwards (quantized, loaded with assign=True, moved by itself) is two layers again.
    Behind a wide weight in 8 bits the narrow one is its tail (see `wavecrest.ops.linear`).
    """

    def __init__(self, wide: Linear, narrow: Linear) -> None:
        self._wide, self._narrow = wide, narrow
        self._both: Linear | None = None
        self._key: tuple[Any, ...] = ()
        self._runs = False
        # the narrow layer's parameters may lie in memory with the wide one's
        self._lies_behind = False
        self.lay_out()

    def __reduce__(self) -> tuple[type[FusedProjection], tuple[Linear, Linear]]:
        """A copy fuses the copied layers anew: storages that lie in one memory are not copied as such."""
        return FusedProjection, (self._wide, self._narrow)

    @torch.no_grad()
    def lay_out(self) -> None:
        """Move the parameters; not where their dtypes or devices differ, or one has no memory yet.

        Nor where the narrow weight is packed, or the wide one is in a format that takes no tail; nor out of memory
        that is shared between processes.
        """
        self._both, self._key = None, ()
        wide, narrow = self._wide.weight, self._narrow.weight
        biases = [one.bias for one in (self._wide, self._narrow) if one.bias is not None]
        if wide.device.type == "cpu" and any(one.is_shared() for one in (wide, narrow, *biases)):  # type: ignore[no-untyped-call]
            return
        if isinstance(wide, PackedWeight):
            # not to keep the memory that the wide one has given back
            self._part()
        one_scale = isinstance(wide, PackedWeight) and wide.format in ("int8", "fp8") and wide.group == wide.shape[1]
        plain = all(type(one) is nn.Parameter for one in (narrow, *biases)) and type(wide) is nn.Parameter
        if isinstance(narrow, PackedWeight) or narrow.is_meta or not (plain or one_scale):
            return
        if len({(one.dtype, one.device) for one in (wide, narrow, *biases)}) > 1:
            return
        weight: Tensor = wide
        if not one_scale:
            weight = torch.cat([wide.data, narrow.data])
            wide.data, narrow.data = map(_own, torch.split(weight, [len(wide), len(narrow)]))
        bias = None
        if biases:
            # zeros of a bias that is not there
            bias = narrow.new_zeros(len(wide) + len(narrow))
            for part, layer in zip(
                torch.split(bias, [len(wide), len(narrow)]), (self._wide, self._narrow), strict=True
            ):
                if layer.bias is not None:
                    part.copy_(layer.bias.data)
                    layer.bias.data = _own(part)
        self._both = Linear.from_weight(weight, bias, tail=narrow if one_scale else None)
        self._lies_behind = True

    def _part(self) -> None:
        """Give the narrow layer's parameters memory of their own."""
        for one in (self._narrow.weight, self._narrow.bias):
            if self._lies_behind and one is not None and not isinstance(one, PackedWeight):
                one.data = one.data.clone()
        self._lies_behind = False

    def joins(self, wide: nn.Module, narrow: nn.Module) -> bool:
        """True if these are still the layers, and nothing but their forward runs when they are called."""
        return wide is self._wide and narrow is self._narrow and plain(wide, Linear) and plain(narrow, Linear)

    def for_rows(self, x: Tensor, norm: ResidualNorm | None = None) -> Linear | None:
        """The fused layer for x [..., K], whose results lie side by side; None if it cannot run, or x has many rows.

        `norm`: the norm that the layer would apply to x. A layer with a tail is returned only if the wide layer alone
        would run on the same kernel of wavecrest.
        """
        # torch.compile cannot trace this: it looks at addresses
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        both = self._both
        if both is None or x.numel() > MOST_ROWS * x.shape[-1]:
            return None
        if both.tail is None:
            whole = _inside(both.weight, self._wide.weight, self._narrow.weight)
        else:
            whole = both.weight is self._wide.weight and both.tail is self._narrow.weight
        if not (whole and self._biased(both)):
            # not to hold memory that nobody else does
            self._both = both = None
        return both if both is None or both.tail is None or self._runs_with_tail(both, x, norm) else None

    def _runs_with_tail(self, both: Linear, x: Tensor, norm: ResidualNorm | None) -> bool:
        """True if dispatch picks one wavecrest kernel for the wide layer and for both; kept until that may change."""
        key = (Op.epoch, x.shape, x.stride(), x.dtype, x.device, norm)
        if key != self._key:
            given = (x,) if norm is None else (x, None, norm.weight, norm.eps)
            try:
                alone, together = self._wide.decision(*given), both.decision(*given)
                self._runs = alone.own_kernel and together.own_kernel and alone.backend == together.backend
            except Unsupported:
                # strict mode: a call without a measured row is an error, and this one need not be made
                self._runs = False
            self._key = key
        return self._runs

    def _biased(self, both: Linear) -> bool:
        """True if the biases are those of both layers."""
        if both.bias is None:
            return self._wide.bias is None and self._narrow.bias is None
        parts = torch.split(both.bias, [len(self._wide.weight), len(self._narrow.weight)])
        # a layer that had no bias when they were laid out has zeros there
        return all(
            layer.bias is None or layer.bias.data_ptr() == part.data_ptr()
            for layer, part in zip((self._wide, self._narrow), parts, strict=True)
        )


def _own(part: Tensor) -> Tensor:
    """Rows of a tensor as the whole of a storage, by which files of weights are written; it keeps the rest alive.

    Not by DLPack, which exports from the current GPU alone.
    """
    start = part.storage_offset() * part.itemsize
    storage = part.untyped_storage()[start : start + part.nbytes]
    return part.new_empty(0).set_(storage, 0, part.shape, part.stride())


def _inside(whole: Tensor, *parts: Tensor) -> bool:
    """True if the parts, one behind the other, are the memory of the whole."""
    at = whole.data_ptr()
    for part in parts:
        if type(part) is not nn.Parameter or part.data_ptr() != at or part.dtype != whole.dtype:
            return False
        at += part.nbytes
    return at == whole.data_ptr() + whole.nbytes
