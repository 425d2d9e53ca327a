"""RMS norms inside the GEMM that reads them.

The norm gives its input on, and the layer behind it normalises: in its GEMM where a kernel of wavecrest runs both, and
by itself before the GEMM where none does, as inside `torch.compile` and in long prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.errors import Unsupported
from wavecrest.nn.norm import RMSNorm, default_eps
from wavecrest.nn.precision import by_autocast, in_autocast
from wavecrest.ops import PackedWeight
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import linear_call


class DeferredNorm(RMSNorm):
    """An RMSNorm whose reader normalises: called, it returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def normed(self, x: Tensor) -> Tensor:
        """RMSNorm of x [..., size]."""
        return super().forward(x)

    def eps_of(self, x: Tensor) -> float:
        """The eps for x."""
        return default_eps(x) if self.eps is None else self.eps


class InOne:
    """Whether dispatch runs a GEMM and what is around it in one kernel of wavecrest; kept until that may change."""

    def __init__(self) -> None:
        self._asked: tuple[object, ...] = ()
        self._found = False

    def of(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
        norm: DeferredNorm | None = None,
    ) -> bool:
        """True for act(norm(x) @ weightᵀ + bias), x [..., K], if a measured row names a kernel of wavecrest.

        Without an activation also if neither the GEMM with the norm nor the GEMM alone has a measured row, and such a
        kernel is the default of both. False inside torch.compile, where a decision would be a constant of the graph for
        any number of rows, and where gradients are recorded.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or (norm is not None and in_autocast(x)):
            return False
        memory = (weight.stored if isinstance(weight, PackedWeight) else weight).data_ptr()
        asked = (Op.epoch, in_autocast(x), x.shape, x.stride(), x.dtype, x.device, memory, activation, id(norm))
        if asked != self._asked:
            self._found = self._decide(x, weight, bias, activation, norm)
            self._asked = asked
        return self._found

    def _decide(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, norm: DeferredNorm | None
    ) -> bool:
        call = linear_call(*by_autocast(x, weight, bias), activation=activation)
        whole = call if norm is None else call._replace(norm_weight=norm.weight, norm_eps=norm.eps_of(x))
        try:
            found = op.decide(whole)
            if not found.own_kernel:
                return False
            return found.source != "default" or (activation is None and op.decide(call).source == "default")
        except Unsupported:
            # strict mode: a call without a measured row is an error, and this one need not be made
            return False
