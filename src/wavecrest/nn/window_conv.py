"""1-D convolutions of speech encoders as GEMMs over windows of their input.

Two forms. Strided ones without padding, which shorten the sound, read the input where it lies. Grouped ones with a long
kernel, which tell positions, copy their windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

# GEMMs that a strided convolution may be: each after the first reads and writes the result again
MOST_PRODUCTS = 2
# numbers of a row of a GEMM at least: the first convolution of a speech encoder has 5
LEAST_COLUMNS = 16
# taps of a kernel that is long, for which windows are copied, and bytes of windows that are copied at a time
LONG, MOST_BYTES = 32, 1 << 30


def window_refusal(conv: nn.Conv1d) -> str:
    """Why a convolution cannot run as GEMMs over windows, or should not; empty if it can."""
    (kernel,), (stride,) = conv.kernel_size, conv.stride
    if kernel == 1:
        return "its kernel is 1"
    if conv.dilation != (1,):
        return "it has a dilation"
    if _is_long(conv):
        columns = kernel * conv.in_channels // conv.groups
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return f"its padding is {conv.padding!r} by {conv.padding_mode}"
    else:
        columns = min(kernel, stride) * conv.in_channels
        if conv.groups != 1 or conv.padding not in ((0,), "valid"):
            return f"it has groups or padding, and a kernel below {LONG}"
        if kernel > MOST_PRODUCTS * stride:
            return f"it would be {-(-kernel // stride)} GEMMs (kernel {kernel}, stride {stride})"
    return f"a GEMM of it would have {columns} columns" if columns < LEAST_COLUMNS else ""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is PyTorch's Conv1d, with a parametrized weight or without."""
    if type(module) is nn.Conv1d:
        return True
    return parametrize.is_parametrized(module) and type(module).__mro__[1] is nn.Conv1d


def _is_long(conv: nn.Conv1d) -> bool:
    return conv.kernel_size[0] >= LONG * conv.stride[0]


class _Windows(nn.Conv1d):
    """Forward of a convolution as GEMMs."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, L] or [C, L]; numbers behind the last window are not read."""
        if x.dim() == 2:
            return self.forward(x[None])[0]
        (kernel,), (stride,) = self.kernel_size, self.stride
        length, padding = x.shape[2], 0 if isinstance(self.padding, str) else self.padding[0]
        count = (length + 2 * padding - kernel) // stride + 1
        if count < 1 or x.shape[1] != self.in_channels:
            # for its error
            return super().forward(x)
        # [B, L, C]: no copy of what a convolution of this kind has made
        rows = x.transpose(1, 2)
        y = self._copied(rows, count, padding) if _is_long(self) else self._in_place(rows, count)
        return y.transpose(1, 2)

    def _in_place(self, x: Tensor, count: int) -> Tensor:
        """A product for each stretch of `stride` taps: the stretches of all windows are a matrix where they lie."""
        (kernel,), (stride,) = self.kernel_size, self.stride
        batch, length, channels = x.shape
        rows, taps = x.reshape(batch, length * channels), self.weight.permute(2, 1, 0)
        y: Tensor | None = None
        for first in range(0, kernel, stride):
            some = taps[first : first + stride].flatten(0, 1)
            columns = some.shape[0]
            windows = rows[:, first * channels :].unfold(1, columns, stride * channels)[:, :count]
            factor = some.expand(batch, *some.shape)
            if y is not None and y.dtype == windows.dtype == factor.dtype:
                y = y.baddbmm_(windows, factor)
            elif y is not None:
                # autocast, which casts no call that writes in place
                y = y.baddbmm(windows, factor)
            elif self.bias is None:
                y = windows.bmm(factor)
            else:
                y = self.bias.baddbmm(windows, factor)
        assert y is not None
        return y

    def _copied(self, x: Tensor, count: int, padding: int) -> Tensor:
        """A product for each group, of windows that are copied."""
        (kernel,), (stride,) = self.kernel_size, self.stride
        each = self.in_channels // self.groups
        # [G, K * C / G, O / G]
        factor = torch.unflatten(self.weight, 0, (self.groups, -1)).permute(0, 3, 2, 1).flatten(1, 2)
        padded = torch.unflatten(F.pad(x, (0, 0, padding, padding)), 2, (self.groups, each)).transpose(1, 2)
        windows = padded.flatten(2).unfold(2, kernel * each, stride * each)[:, :, :count]
        bytes_each = self.groups * count * kernel * each * x.element_size()
        parts = torch.split(windows, max(1, MOST_BYTES // bytes_each))
        made = [(part @ factor).transpose(1, 2).flatten(2) for part in parts]
        y = made[0] if len(made) == 1 else torch.cat(made)
        return y if self.bias is None else y + self.bias


class WindowConv1d(_Windows):
    """A Conv1d whose windows are rows of GEMMs; parameters and state_dict are those of Conv1d.

    The result [B, O, L'] lies in memory as [B, L', O], so that the next convolution of this kind copies nothing. A sum
    of two products is rounded to the dtype once more than a convolution's.
    """

    @classmethod
    def adopt(cls, conv: nn.Conv1d) -> None:
        """Turn `conv` into this class, in place; the caller has checked it by `is_conv1d` and `window_refusal`.

        A parametrized weight stays one: like PyTorch's class for it, that of the module is its own, and the module
        cannot be pickled.
        """
        if type(conv) is nn.Conv1d:
            conv.__class__ = cls
        else:
            kind: Any = type(conv)
            conv.__class__ = type(kind.__name__, (kind, _Windows), {"forward": _Windows.forward})
