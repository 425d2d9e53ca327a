"""Convolutions of patches (a stride as large as the kernel) as one GEMM."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def patch_refusal(conv: nn.Conv2d) -> str:
    """Why a convolution cannot run as a GEMM of its patches; empty if it can."""
    if conv.kernel_size != conv.stride or max(conv.kernel_size) == 1:
        return f"its patches overlap or leave gaps (kernel {conv.kernel_size}, stride {conv.stride})"
    if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding not in ((0, 0), "valid"):
        return "it has groups, dilation or padding"
    return ""


class PatchConv2d(nn.Conv2d):
    """A Conv2d whose kernel and stride are equal, without padding: each patch is a row of one GEMM.

    Parameters and state_dict are those of Conv2d. The result [B, O, H / R, W / S] is channels_last, as its columns are
    the outputs. cuDNN changes the layout before and after such a convolution.
    """

    @classmethod
    def adopt(cls, conv: nn.Conv2d) -> None:
        """Turn `conv` into this class, in place; the caller has checked it by `patch_refusal`."""
        conv.__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, H, W] or [C, H, W]; rows and columns that fill no patch are not read."""
        if x.dim() == 3:
            return self.forward(x[None])[0]
        batch, channels, height, width = x.shape
        (patch_h, patch_w), outputs = self.kernel_size, self.out_channels
        down, across = height // patch_h, width // patch_w
        if height % patch_h or width % patch_w:
            x = x[:, :, : down * patch_h, : across * patch_w]
        rows = x.reshape(batch, channels, down, patch_h, across, patch_w).permute(0, 2, 4, 1, 3, 5)
        rows = rows.reshape(batch * down * across, channels * patch_h * patch_w)
        y = F.linear(rows, self.weight.reshape(outputs, -1), self.bias)
        return y.reshape(batch, down, across, outputs).permute(0, 3, 1, 2)
