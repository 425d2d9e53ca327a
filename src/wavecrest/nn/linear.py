"""The linear layer over `wavecrest.ops.linear`: plain or packed weights, activation and residual in the same kernel."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.dispatch.custom_op import named_operation_of
from wavecrest.dispatch.decision import Decision
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.errors import InvalidArgument, StepRefused, Unsupported
from wavecrest.nn.hooks import plain
from wavecrest.nn.precision import by_autocast, in_16_bits, in_autocast, of_gemm, rounded
from wavecrest.ops import PackedWeight, linear, pack, rms_norm
from wavecrest.ops._gemm.backend import fake, is_one_operation, op
from wavecrest.ops._gemm.call import GATED, GemmCall, linear_call
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.packed import refuse_other_formats
from wavecrest.settings import STATE

_logger = logging.getLogger("wavecrest.linear")
# reasons that were told already
_warned: set[str] = set()


class LinearFallback(UserWarning):
    """A linear layer runs on dispatch's choice, as the backend that was chosen for it refuses the call."""


def linear_on(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str, precision: str = "ieee"
) -> Tensor:
    """act(x @ weightᵀ + bias) by a backend of gemm, in its `precision`, [..., K] to [..., N].

    By dispatch's choice where that refuses, with a `LinearFallback` for each reason, once.
    """
    x, weight, bias = by_autocast(x, weight, bias)
    return _run_on(linear_call(x, weight, bias, activation=activation, precision=precision), backend)


def _run_on(call: GemmCall, backend: str) -> Tensor:
    """As `linear_on`."""
    if torch.compiler.is_compiling():
        # asked first: Dynamo does not trace how Unsupported is made
        refusal = op.backends[backend].refuse(call)
        if refusal is None:
            return _on_in_graph(call, backend) if is_one_operation(backend, call) else op.call_on(backend, call)
        reason = f"{op.name}: backend {backend} refuses: {refusal}"
    else:
        try:
            return op.call_on(backend, call)
        except Unsupported as error:
            reason = error.reason
    # calls that need gradients run PyTorch on purpose
    if not call.needs_grad:
        _tell(reason)
    return op(call)


_on_in_graph = named_operation_of("gemm_on", GemmCall, _run_on, fake, without=("overwrite_residual",))


# Dynamo runs this while it traces, so that a warning is no break of the graph
@constant_in_graphs
def _tell(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        _logger.info("linear runs on dispatch's choice: %s", reason)
        warnings.warn(f"linear runs on dispatch's choice: {reason}", LinearFallback, stacklevel=4)


def _by(layer: LinearOn | Linear) -> str:
    """The backend that was chosen for a layer, and the precision of its products, as its name has them."""
    products = f" in {layer.precision}" if layer.precision != "ieee" else ""
    return f" by {layer.backend}{products}" if layer.backend else ""


class LinearOn(nn.Linear):
    """An nn.Linear, with an activation after it or none, on the backend of gemm that its maker names.

    Parameters and state_dict are those of nn.Linear.
    """

    activation: str | None
    backend: str
    precision = "ieee"

    @classmethod
    def adopt(cls, module: nn.Linear, activation: str | None, backend: str, precision: str = "ieee") -> None:
        """Turn an `nn.Linear` into this class, in place."""
        adopted: Any = module
        adopted.__class__ = cls
        adopted.activation, adopted.backend, adopted.precision = activation, backend, precision

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features]."""
        return linear_on(x, self.weight, self.bias, self.activation, self.backend, self.precision)

    def extra_repr(self) -> str:
        act = f", {self.activation}" if self.activation else ""
        return f"{super().extra_repr()}{act}{_by(self)}"


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D (of GPT-2), a linear layer whose weight is [K, N]."""
    kind = type(module)
    # without an import of transformers
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" and plain(module, kind)


def linear_of_conv1d(module: nn.Module) -> nn.Linear:
    """An `nn.Linear` that computes what transformers' Conv1D does: the weight is a copy [N, K], the bias is shared."""
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    made = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    made.weight = nn.Parameter(weight.detach().mT.contiguous(), weight.requires_grad)
    made.bias = bias
    return made.train(module.training)


class Linear(nn.Module):
    """y = act(x @ weightᵀ + bias) + residual, x [..., in_features] to [..., out_features].

    A gated activation (silu_and_mul, …) halves the features: the weight is a packed [gate | up]. With a tail there are
    more features after the weight's.
    """

    bias: nn.Parameter | None
    tail: nn.Parameter | None
    # the backend of gemm that a step has chosen, "": dispatch's choice; and the `precision` of its products
    backend = ""
    precision = "ieee"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Random parameters as those of `torch.nn.Linear`; `from_weight` and `from_module` take trained ones.

        Args:
            in_features: K.
            out_features: N; of a gated activation after it, so that the weight has twice the rows.
            bias: whether there is one.
            activation: applied after the bias; None for none.
            device, dtype: of the parameters.

        Raises:
            InvalidArgument: a number of features is less than 1, or the activation is unknown.
        """
        super().__init__()
        if isinstance(in_features, Tensor):
            raise InvalidArgument("Linear: takes in_features and out_features; Linear.from_weight takes a weight")
        if min(in_features, out_features) < 1:
            raise InvalidArgument(f"Linear: features must be at least 1, got {in_features} and {out_features}")
        rows = out_features * 2 if activation in GATED else out_features
        made = nn.Linear(in_features, rows, bias, device, dtype)
        self._take(made.weight, made.bias if bias else None, activation, None)

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, tail: Tensor | None = None
    ) -> Linear:
        """A layer of a weight [N, K], plain or a `PackedWeight`, a bias [N], and a tail [T, K] as of `ops.linear`.

        Raises:
            InvalidArgument: the weight is not a matrix, or the activation is unknown.
        """
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise InvalidArgument(
                f"Linear: weight must be [N, K], got {getattr(weight, 'shape', type(weight).__name__)}"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(weight, bias, activation, tail)
        return made

    def _take(self, weight: Tensor, bias: Tensor | None, activation: str | None, tail: Tensor | None) -> None:
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
        the residual's memory: see `wavecrest.ops.gemm`. In autocast the GEMM is in its dtype.
        """
        if in_autocast(x):
            return self._cast(x if norm_weight is None else rms_norm(x, norm_weight, norm_eps), residual)
        if STATE.precision != "ieee" and x.dtype == torch.float32:
            x, weight, tail, precision, out_dtype = self._by_policy(x)
            return linear(
                x, weight, self.bias, residual=residual, activation=self.activation, norm_weight=norm_weight,
                norm_eps=norm_eps, tail=tail, precision=precision, out_dtype=out_dtype,
            )  # fmt: skip
        if self.backend:
            call = linear_call(
                x, self.weight, self.bias, residual=residual, activation=self.activation, norm_weight=norm_weight,
                norm_eps=norm_eps, tail=self.tail, overwrite_residual=overwrite_residual, precision=self.precision,
            )  # fmt: skip
            return _run_on(call, self.backend)
        return linear(
            x, self.weight, self.bias, residual=residual, activation=self.activation, norm_weight=norm_weight,
            norm_eps=norm_eps, tail=self.tail, overwrite_residual=overwrite_residual,
        )  # fmt: skip

    def _cast(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The layer in autocast: the GEMM in its dtype, the residual in its own."""
        x, weight, bias, tail = by_autocast(x, self.weight, self.bias, self.tail)
        y = linear(x, weight, bias, activation=self.activation, tail=tail)
        return y if residual is None else residual + y

    def _by_policy(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, str, torch.dtype | None]:
        """x, weight and tail, precision and dtype of the result, as `wavecrest.settings` asks of float32."""
        dtype = rounded(x)
        if dtype is None:
            return x, self.weight, self.tail, of_gemm(x), None
        tail = None if self.tail is None else in_16_bits(self.tail, dtype)
        return in_16_bits(x, dtype), in_16_bits(self.weight, dtype), tail, "ieee", torch.float32

    def decision(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Decision:
        """Which backend dispatch would run for these arguments, and what that rests on; `backend` goes before it."""
        x, weight, tail, precision, out_dtype = self._by_policy(x)
        return op.decide(
            linear_call(
                x, weight, self.bias, tail=tail, residual=residual, activation=self.activation,
                norm_weight=norm_weight, norm_eps=norm_eps, precision=precision, out_dtype=out_dtype,
            )
        )  # fmt: skip

    def extra_repr(self) -> str:
        stored = f", {self.weight.format}" if isinstance(self.weight, PackedWeight) else ""
        act = f", {self.activation}" if self.activation else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{act}{stored}{_by(self)}"

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
        return cls.from_weight(weight, module.bias, activation)
