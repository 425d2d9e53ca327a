"""Two layers of one input whose parameters lie one behind the other, so that few rows go through one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wavecrest.nn import Linear
from wavecrest.ops import PackedWeight

# more rows than these have work enough in each product
MOST_ROWS = 64


class Joined:
    """The wider of two layers, and a narrow one behind it, as one layer wherever their parameters allow it.

    They stay the layers and parameters that they are: `lay_out` moves what those hold into one piece of memory, and
    what is given other memory afterwards (quantized, loaded with assign=True, moved by itself) is two layers again.
    """

    def __init__(self, wide: Linear, narrow: Linear) -> None:
        self._wide, self._narrow = wide, narrow
        self._both: Linear | None = None
        self.lay_out()

    @torch.no_grad()
    def lay_out(self) -> None:
        """Move the parameters; not where their dtypes or devices differ, or one is packed, or has no memory yet."""
        self._both = None
        wide, narrow = self._wide.weight, self._narrow.weight
        biases = [one.bias for one in (self._wide, self._narrow) if one.bias is not None]
        plain = all(type(one) is nn.Parameter for one in (wide, narrow, *biases))
        if not plain or wide.is_meta or len({(one.dtype, one.device) for one in (wide, narrow, *biases)}) > 1:
            return
        weight = torch.cat([wide.data, narrow.data])
        wide.data, narrow.data = torch.split(weight, [len(wide), len(narrow)])
        bias = None
        if biases:
            # zeros of a bias that is not there
            bias = weight.new_zeros(len(weight))
            for part, layer in zip(
                torch.split(bias, [len(wide), len(narrow)]), (self._wide, self._narrow), strict=True
            ):
                if layer.bias is not None:
                    part.copy_(layer.bias.data)
                    layer.bias.data = part
        self._both = Linear(weight, bias)

    def part(self) -> None:
        """Give the narrow layer's parameters memory of their own, where the wide one's are to be given back."""
        self._both = None
        for one in (self._narrow.weight, self._narrow.bias):
            if one is not None and not isinstance(one, PackedWeight) and one.untyped_storage().nbytes() > one.nbytes:
                one.data = one.data.clone()

    def of(self, x: Tensor) -> Linear | None:
        """One layer for x [..., K], whose results lie side by side; None where there is none, or x has many rows."""
        # which torch.compile cannot trace: it looks at addresses
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        both = self._both
        if both is None or x.numel() > MOST_ROWS * x.shape[-1]:
            return None
        if not (_inside(both.weight, self._wide.weight, self._narrow.weight) and self._biased(both)):
            # not to hold memory that nobody else does
            self._both = None
        return self._both

    def _biased(self, both: Linear) -> bool:
        """True if the biases are those of both layers."""
        if both.bias is None:
            return self._wide.bias is None and self._narrow.bias is None
        parts = torch.split(both.bias, [len(self._wide.weight), len(self._narrow.weight)])
        # zeros where there was none when they were laid out
        return all(
            layer.bias is None or layer.bias.data_ptr() == part.data_ptr()
            for layer, part in zip((self._wide, self._narrow), parts, strict=True)
        )


def _inside(whole: Tensor, *parts: Tensor) -> bool:
    """True if the parts, one behind the other, are the memory of the whole."""
    at = whole.data_ptr()
    for part in parts:
        if type(part) is not nn.Parameter or part.data_ptr() != at or part.dtype != whole.dtype:
            return False
        at += part.nbytes
    return at == whole.data_ptr() + whole.nbytes
