"""torch.nn.Conv2d over `wavecrest.ops.conv2d`, with an activation in the same call."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn.functional import conv2d
from wavecrest.nn.hooks import plain
from wavecrest.ops._conv2d.call import Pair
from wavecrest.ops.common.activation import ACTIVATIONS


class Conv2d(nn.Conv2d):
    """act(conv(x, weight) + bias): arguments, parameters and state_dict of `torch.nn.Conv2d`, and an activation.

    Dispatch picks the backend: PyTorch's convolution, unless a measured row names a faster one.
    """

    def __init__(self, *arguments: Any, activation: str | None = None, **options: Any) -> None:
        """Take the arguments of `torch.nn.Conv2d`.

        Args:
            arguments, options: `torch.nn.Conv2d`'s.
            activation: as for `wavecrest.ops.conv2d`, None for none.

        Raises:
            InvalidArgument: the activation is unknown.
            ValueError: PyTorch refuses the other arguments.
        """
        if activation is not None and activation not in ACTIVATIONS:
            raise InvalidArgument(f"Conv2d: activation takes {', '.join(ACTIVATIONS)}, not {activation!r}")
        super().__init__(*arguments, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, H, W] or [C, H, W]."""
        padding = cast("Pair | str", self.padding)
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = 0
        stride, dilation = cast("Pair", self.stride), cast("Pair", self.dilation)
        return conv2d(x, self.weight, self.bias, stride, padding, dilation, self.groups, activation=self.activation)

    def extra_repr(self) -> str:
        plain_options: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return plain_options + (f", activation={self.activation}" if self.activation else "")

    @classmethod
    def from_module(cls, module: nn.Module, activation: str | None = None) -> Conv2d:
        """Ours from an `nn.Conv2d`, whose parameters it shares.

        Args:
            module: an `nn.Conv2d`, not of a class with a forward of its own, without hooks.
            activation: applied after it.

        Raises:
            StepRefused: it is something else.
            InvalidArgument: the activation is unknown.
        """
        if not isinstance(module, nn.Conv2d) or not plain(module, nn.Conv2d):
            raise StepRefused(f"{type(module).__name__} is not an nn.Conv2d, or has hooks or a forward of its own")
        if type(module)._conv_forward is not nn.Conv2d._conv_forward:
            raise StepRefused(f"{type(module).__name__} convolves in a way of its own")
        made = cls(
            module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding, module.dilation,
            module.groups, module.bias is not None, module.padding_mode, "meta", activation=activation,
        )  # fmt: skip
        made.weight, made.bias = module.weight, module.bias
        return made.train(module.training)
