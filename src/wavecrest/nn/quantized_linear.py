"""The linear layer with weights and activations in 8 bits (W8A8), and weights packed in the form of this GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.ops import PackedWeight, linear, pack, quantize_fp8, quantize_int8, rms_norm_quantize
from wavecrest.ops._gemm.call import GATED
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.common.quantized import float8_of
from wavecrest.ops.packed import refuse_other_formats

# the format with a scale for 128 × 128 values
BLOCKS = "fp8_block"


def pack_native(weight: Tensor, format: str, group: int | None = None) -> PackedWeight:
    """`wavecrest.ops.pack` with fp8 in the form that the weight's GPU multiplies with: e4m3fnuz on gfx942.

    Raises:
        InvalidArgument: as `pack`.
    """
    dtype = None
    if format == "fp8":
        arch = hardware.ARCHS.get(hardware.detect().arch) if weight.is_cuda else None
        dtype = float8_of(arch)
    return pack(weight.detach(), format, group=group, dtype=dtype)


class QuantizedLinear(nn.Module):
    """y = act(x̂ @ ŵᵀ + bias) + residual, x̂ and ŵ in 8 bits: x [..., K] is rounded as it comes, to int8 or fp8.

    The scale of x is worked out for each row, or for 128 columns of it where the weight has scales of 128 × 128
    (fp8_block), or is one number from calibration (`input_scale`). Arguments of a call are those of
    `wavecrest.nn.Linear`. For inference: there are no gradients.
    """

    bias: nn.Parameter | None
    input_scale: Tensor | None

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None = None,
        activation: str | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        """A layer of a packed weight.

        Args:
            weight: [N, K], int8 or fp8 with one scale a row, or fp8_block with one for 128 × 128.
            bias: [N]; a parameter is shared.
            activation: as of `wavecrest.ops.linear`.
            input_scale: float32 [], the scale of x; None: of each row, worked out at the call. Not with fp8_block.

        Raises:
            InvalidArgument: an argument is outside this.
        """
        super().__init__()
        if not isinstance(weight, PackedWeight) or weight.format not in ("int8", "fp8", BLOCKS):
            found = weight.format if isinstance(weight, PackedWeight) else type(weight).__name__
            raise InvalidArgument(f"QuantizedLinear: takes a packed weight, int8, fp8 or {BLOCKS}, not {found}")
        if weight.format == BLOCKS and input_scale is not None:
            raise InvalidArgument(
                f"QuantizedLinear: {BLOCKS} goes with scales of x for 128 columns, not with one for all"
            )
        if weight.scale is None or (weight.format != BLOCKS and weight.scale.shape[1] != 1):
            raise InvalidArgument(
                f"QuantizedLinear: takes a weight with one scale a row, not one for {weight.group} columns"
            )
        if activation is not None and activation not in (*ACTIVATIONS, *GATED):
            known = ", ".join((*ACTIVATIONS, *GATED))
            raise InvalidArgument(f"QuantizedLinear: activation takes {known}, not {activation!r}")
        if input_scale is not None and (input_scale.dtype != torch.float32 or input_scale.ndim != 0):
            raise InvalidArgument(
                f"QuantizedLinear: input_scale is float32 [], got {input_scale.dtype} {list(input_scale.shape)}"
            )
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.register_parameter("bias", bias)
        self.register_buffer("input_scale", input_scale)
        self.activation = activation
        # with assign=True torch would put weights of another format in place without asking
        self.register_load_state_dict_pre_hook(refuse_other_formats)  # type: ignore[no-untyped-call]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N, half of the weight's rows where the activation is gated."""
        return self.weight.shape[0] // (2 if self.activation in GATED else 1)

    def quantized(self, x: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        """x, or RMSNorm(x), in 8 bits and its scale: float32 [..., 1], [..., ceil(K / 128)], or [] from calibration."""
        dtype = self._packed().stored.dtype
        scale = self.input_scale
        granularity = "group" if self._packed().format == BLOCKS else "token" if scale is None else "tensor"
        if norm_weight is not None:
            return rms_norm_quantize(x, norm_weight, norm_eps, dtype, granularity, scale)
        if dtype == torch.int8:
            return quantize_int8(x, scale, granularity)
        return quantize_fp8(x, scale, granularity, dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        overwrite_residual: bool = False,
    ) -> Tensor:
        """x [..., K] to [..., N] in x's dtype."""
        values, scale = self.quantized(x, norm_weight, norm_eps)
        return linear(
            values, self.weight, self.bias, scale_x=scale if scale.ndim == 0 else scale.reshape(-1, scale.shape[-1]),
            residual=residual, activation=self.activation, out_dtype=x.dtype, overwrite_residual=overwrite_residual,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes, activation, and what is in 8 bits."""
        act = f", {self.activation}" if self.activation else ""
        each = "a scale for 128 columns" if self._packed().format == BLOCKS else "a scale a row"
        scale = each if self.input_scale is None else "a scale from calibration"
        stored = f"{self._packed().format} weight and activations, {scale}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{act}, {stored}"

    def _packed(self) -> PackedWeight:
        assert isinstance(self.weight, PackedWeight)
        return self.weight

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        before = self.input_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.input_scale
        if before is not None and after is not None and after.dtype != torch.float32:
            # .half() and .to(dtype) are for what the layer computes with, and ops take a float32 scale
            self.input_scale = before.to(after.device)
        return self
