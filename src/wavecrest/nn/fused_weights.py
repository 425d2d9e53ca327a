"""Layers that read the same input as one wide layer, and the slices of it that stand in their places.

The model's own forward stays. The first of the fused layers computes the wide result and keeps it for the others. Those
return their slice if they are called with the same tensor object, and compute their own slice otherwise. So a forward
that calls them in another order, or with another input, is still right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.nn.deferred_norm import DeferredNorm, InOne
from wavecrest.nn.functional import linear
from wavecrest.nn.linear import Linear
from wavecrest.ops import PackedWeight
from wavecrest.ops import linear as linear_op

Layer = nn.Linear | nn.Conv2d | Linear


def can_join(module: nn.Module) -> bool:
    """True for a plain nn.Linear or Conv2d, and for wavecrest's Linear of a packed weight that names no backend."""
    if type(module) is Linear:
        alone = module.activation is None and module.tail is None and not module.backend
        return alone and isinstance(module.weight, PackedWeight)
    return type(module) in (nn.Linear, nn.Conv2d)


class FusedWeights(nn.Module):
    """The stacked weight of several layers, [sum of outputs, inputs, …], and its last result."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        first = layers[0]
        self.weight = nn.Parameter(
            torch.cat([layer.weight.detach() for layer in layers]), requires_grad=first.weight.requires_grad
        )
        if any(layer.bias is not None for layer in layers):
            # zeros of a bias that is not there
            dtype, device = first.weight.dtype, first.weight.device
            parts = [
                torch.zeros(len(layer.weight), dtype=dtype, device=device)
                if layer.bias is None
                else layer.bias.detach()
                for layer in layers
            ]
            learns = any(layer.bias is not None and layer.bias.requires_grad for layer in layers)
            self.bias = nn.Parameter(torch.cat(parts), requires_grad=learns)
        else:
            self.register_parameter("bias", None)
        # the function that computes the wide result: (x, weight, bias) -> [..., N], of a convolution [B, N, …]
        self.product_of: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
            linear if isinstance(first, Linear) else F.linear
        )
        if isinstance(first, nn.Conv2d):
            self.product_of = partial(
                F.conv2d, stride=first.stride, padding=first.padding, dilation=first.dilation, groups=first.groups
            )
        # the dimension of the outputs
        self.dim = -3 if isinstance(first, nn.Conv2d) else -1
        # the input of the last wide call, and its result, under one name as two threads may run; None between forwards
        self.made: tuple[Tensor, Tensor] | None = None
        # in a tuple, as the module is another's: a norm that leaves its work to this
        self._norms: tuple[DeferredNorm, ...] = ()
        self._with_norm = InOne()

    @property
    def norm(self) -> DeferredNorm | None:
        """The norm that is applied to the input, if its module leaves that to the layer."""
        return self._norms[0] if self._norms else None

    @property
    def dispatches(self) -> bool:
        """Whether wavecrest's dispatch chooses the kernel of the GEMM."""
        return self.product_of is linear

    def defer(self, norm: DeferredNorm) -> None:
        """Apply `norm` to the input from now on."""
        self._norms = (norm,)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result for rows of the weight, x [..., inputs] to [..., outputs]."""
        norm = self.norm
        if norm is None:
            return self.product_of(x, weight, bias)
        if self.dispatches and self._with_norm.of(x, weight, bias, None, norm):
            return linear_op(x, weight, bias, norm_weight=norm.weight, norm_eps=norm.eps_of(x))
        return self.product_of(norm.normed(x), weight, bias)


class FusedSlice(nn.Module):
    """Stands where one of the fused layers stood: rows [start, stop) of the stacked weight."""

    def __init__(self, fused: FusedWeights, start: int, stop: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.fused = fused
        self.start, self.stop = start, stop
        self.first, self.last = first, last
        self.in_features = fused.weight.shape[1]
        self.out_features = stop - start

    @property
    def is_linear(self) -> bool:
        """Whether it stands for a Linear layer."""
        return self.fused.dim == -1

    @property
    def is_packed(self) -> bool:
        """Whether its weight is packed, so that it is on wavecrest's GEMM already."""
        return isinstance(self.fused.weight, PackedWeight)

    @property
    def weight(self) -> Tensor:
        """This layer's rows, for code that reads them."""
        return self.fused.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """This layer's part of the bias, if there is one."""
        return None if self.fused.bias is None else self.fused.bias[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], a view of the wide result; of a convolution [B, C, H, W]."""
        fused = self.fused
        if self.first:
            fused.made = x, fused.product(x, fused.weight, fused.bias)
        made = fused.made
        if made is None or made[0] is not x:
            return fused.product(x, self.weight, self.bias)
        if self.last:
            # nothing outlives the forward
            fused.made = None
        return made[1].narrow(fused.dim, self.start, self.out_features)
