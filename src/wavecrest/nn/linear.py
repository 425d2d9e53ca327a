"""The linear layer over `wavecrest.ops.linear`: plain or packed weights, activation and residual in the same kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.dispatch.decision import Decision
from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.ops import PackedWeight, linear, pack
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GATED, linear_call
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.packed import refuse_other_formats


class Linear(nn.Module):
    """y = act(x @ weightᵀ + bias) + residual, x [..., in_features] to [..., out_features].

    A gated activation (silu_and_mul, …) halves the features: the weight is a packed [gate | up]. With a tail there are
    more features after the weight's.
    """

    bias: nn.Parameter | None
    tail: nn.Parameter | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, tail: Tensor | None = None
    ) -> None:
        """Take a weight [N, K], plain or a `PackedWeight`, a bias [N], and a tail [T, K] as of `wavecrest.ops.linear`.

        Raises:
            InvalidArgument: the weight is not a matrix, or the activation is unknown.
        """
        super().__init__()
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise InvalidArgument(
                f"Linear: weight must be [N, K], got {getattr(weight, 'shape', type(weight).__name__)}"
            )
        if activation is not None and activation not in (*ACTIVATIONS, *GATED):
            raise InvalidArgument(f"Linear: activation takes {', '.join((*ACTIVATIONS, *GATED))}, not {activation!r}")
        learns = weight.requires_grad and not isinstance(weight, PackedWeight)
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=learns)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.register_parameter("bias", bias)
        if tail is not None and not isinstance(tail, nn.Parameter):
            tail = nn.Parameter(tail, requires_grad=tail.requires_grad)
        self.register_parameter("tail", tail)
        self.activation = activation
        # with assign=True torch would put weights of another format in place without asking
        self.register_load_state_dict_pre_hook(refuse_other_formats)  # type: ignore[no-untyped-call]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N, half of the weight's rows where the activation is gated; and the tail's."""
        more = 0 if self.tail is None else self.tail.shape[0]
        return self.weight.shape[0] // (2 if self.activation in GATED else 1) + more

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        overwrite_residual: bool = False,
    ) -> Tensor:
        """x [..., K] to [..., N]; `residual` [..., N] is added after the activation.

        With `norm_weight` [K] it is RMSNorm(x) that is multiplied, with `overwrite_residual` the result may be made in
        the residual's memory: see `wavecrest.ops.gemm`.
        """
        return linear(
            x, self.weight, self.bias, residual=residual, activation=self.activation, norm_weight=norm_weight,
            norm_eps=norm_eps, tail=self.tail, overwrite_residual=overwrite_residual,
        )  # fmt: skip

    def decision(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Decision:
        """Which backend `forward` would run for these arguments, and what that rests on."""
        return op.decide(
            linear_call(
                x, self.weight, self.bias, tail=self.tail, residual=residual, activation=self.activation,
                norm_weight=norm_weight, norm_eps=norm_eps,
            )
        )  # fmt: skip

    def extra_repr(self) -> str:
        stored = f", {self.weight.format}" if isinstance(self.weight, PackedWeight) else ""
        act = f", {self.activation}" if self.activation else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{act}{stored}"

    @classmethod
    def from_module(
        cls, module: nn.Module, format: str = "plain", activation: str | None = None, **options: Any
    ) -> Linear:
        """Ours from an `nn.Linear`: shares its parameters, or with another format than "plain" packs its weight.

        Args:
            module: an `nn.Linear`, not of a class derived from it, without hooks.
            format, options: as for `wavecrest.ops.pack`.
            activation: applied after it.

        Raises:
            StepRefused: it is something else.
            InvalidArgument: it cannot be packed so; the message says why.
        """
        if type(module) is not nn.Linear:
            raise StepRefused(f"{type(module).__name__} is not an nn.Linear")
        if module._forward_hooks or module._forward_pre_hooks:
            raise StepRefused("it has hooks, which would not run any more")
        weight: Tensor = module.weight
        if format != "plain":
            with torch.no_grad():
                weight = pack(weight.detach(), format, **options)
        return cls(weight, module.bias, activation)
