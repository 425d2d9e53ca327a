"""Cases of conv2d: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops._conv2d.config import default
from wavecrest.ops._conv2d.key import key_of, shape_of
from wavecrest.ops._conv2d.launch import launch
from wavecrest.ops.common.launcher import Launch


def _example(
    batch: int,
    channels: int,
    side: int,
    outputs: int,
    taps: int,
    dtype: torch.dtype,
    device: str,
    *,
    last: bool = False,
    groups: int = 1,
    **options: Any,
) -> Conv2dCall:
    """A call with square images and kernels; `last`: channels_last. Padding is (taps − 1) / 2 where not given."""
    layout = torch.channels_last if last else torch.contiguous_format

    def made(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype, device="meta") if device == "meta" else torch.randn(shape).to(dtype)
        return values.to(device).contiguous(memory_format=layout)

    named = {"bias": None, "stride": 1, "padding": taps // 2, "dilation": 1, "activation": None} | options
    if named["bias"] is True:
        named["bias"] = made(outputs, 1, 1, 1).flatten()
    x, weight = made(batch, channels, side, side), made(outputs, channels // groups, taps, taps)
    return Conv2dCall(x, weight, groups=groups, **named)


def inputs(B: int, C: int, H: int, O: int, dtype: torch.dtype, device: str) -> Conv2dCall:  # noqa: E741
    """Images H × H, a kernel of 3 × 3 with padding 1, contiguous."""
    return _example(B, C, H, O, 3, dtype, device)


# batch, channels, side, outputs of convolutions 3 × 3 with padding 1
_BENCHED = ((32, 3, 224, 64), (32, 64, 112, 128), (32, 128, 56, 256), (32, 256, 28, 512))
_QUICK = ((1, 3, 32, 16), (2, 32, 16, 32))


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], Conv2dCall]]:
    """3 × 3 with padding 1, in both layouts."""
    shapes, dtype = (_QUICK, torch.float32) if suite == "quick" else (_BENCHED, torch.float16)
    return {
        f"b{batch}c{channels}hw{side}o{outputs} {'nhwc' if last else 'nchw'}": partial(
            _example, batch, channels, side, outputs, 3, dtype, device, last=last
        )
        for batch, channels, side, outputs in shapes
        for last in (False, True)
    }


def emulate_cases(arch: str) -> dict[str, Callable[[], Conv2dCall]]:
    """Both orders of K in both layouts, groups, float32, strides, paddings and dilations."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    moves: dict[str, Any] = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "bias": True}
    return {
        "3x3 nchw": partial(_example, 2, 24, 7, 20, 3, half, "cpu", **moves, activation="relu"),
        "3x3 channels_last": partial(_example, 2, 24, 7, 20, 3, half, "cpu", last=True, **moves),
        "3x3 channels_last even": partial(_example, 1, 64, 5, 48, 3, brain, "cpu", last=True, activation="gelu"),
        "7x7 stride 2 C=3": partial(_example, 1, 3, 13, 20, 7, brain, "cpu", stride=2),
        "7x7 stride 2 C=3 channels_last": partial(_example, 1, 3, 13, 20, 7, half, "cpu", last=True, stride=2),
        "1x1": partial(_example, 2, 40, 5, 33, 1, brain, "cpu", activation="silu"),
        "1x1 channels_last": partial(_example, 2, 40, 5, 33, 1, half, "cpu", last=True, stride=2),
        "grouped channels_last": partial(_example, 1, 32, 6, 48, 3, half, "cpu", last=True, groups=2),
        "depthwise": partial(_example, 1, 6, 6, 12, 3, half, "cpu", groups=6),
        "float32": partial(_example, 1, 12, 6, 20, 3, single, "cpu", bias=True, activation="gelu_tanh"),
        "5x5 valid": partial(_example, 1, 16, 9, 16, 5, brain, "cpu", last=True, padding="valid"),
    }


# name -> batch, channels, side, outputs, taps, and other options: layers of ResNet-50 and ResNeXt-50, the 3 × 3 of the
# benchmark, a depthwise one; float32
_COMPILED: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "3x3 nchw": ((32, 64, 112, 128, 3), {}),
    "3x3 channels_last": ((32, 64, 112, 128, 3), {"last": True}),
    "3x3 channels_last deep": ((32, 256, 28, 512, 3), {"last": True, "dtype": torch.bfloat16}),
    "3x3 channels_last bias gelu": ((32, 64, 56, 64, 3), {"last": True, "bias": True, "activation": "gelu"}),
    "3x3 channels_last small": ((1, 128, 14, 128, 3), {"last": True}),
    "1x1 nchw": ((32, 256, 56, 64, 1), {"bias": True, "activation": "relu"}),
    "1x1 channels_last": ((32, 256, 56, 64, 1), {"last": True, "bias": True, "activation": "relu"}),
    "7x7 stride 2 C=3 nchw": ((32, 3, 224, 64, 7), {"stride": 2}),
    "7x7 stride 2 C=3 channels_last": ((32, 3, 224, 64, 7), {"last": True, "stride": 2}),
    "grouped nchw": ((32, 128, 56, 128, 3), {"groups": 32}),
    "grouped channels_last": ((32, 512, 14, 512, 3), {"last": True, "groups": 32}),
    "depthwise": ((32, 144, 56, 144, 3), {"groups": 144}),
    "float32": ((8, 64, 56, 64, 3), {"dtype": torch.float32, "last": True}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    for name, (sizes, options) in _COMPILED.items():
        options = {"dtype": torch.float16} | options
        call = _example(*sizes, options.pop("dtype"), "meta", **options)
        cases[name] = launch(call, call.x, config or default(shape_of(key_of(call)), arch), arch)
    return cases
