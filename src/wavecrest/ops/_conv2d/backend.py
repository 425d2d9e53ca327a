"""The op conv2d: its key, cost and backends, and its public function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._conv2d.config as _config
import wavecrest.ops._conv2d.launch as _launch
import wavecrest.ops._conv2d.study.work as _work
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.call import Operands, Pair, check
from wavecrest.ops._conv2d.reference import reference

KEY_FIELDS = (
    "pixels", "outputs", "channels", "r", "s", "groups", "stride", "dilation", "dtype", "x", "weight", "result",
    "bias", "activation", "device", "grad",
)  # fmt: skip
# below PyTorch's: a library's convolution is the default until a measured row says otherwise
PRIORITY = 5
_ORDERS = ("any", "channels", "lines")


def _key(*args: Any, **kwargs: Any) -> Key:
    given = Operands(*args, **kwargs)
    (stride_h, stride_w), (dil_h, dil_w) = given.strides, given.dilations
    taps_r, taps_s = given.kernel
    return (
        row_bucket(given.M),
        given.weight.shape[0],
        given.x.shape[1],
        taps_r,
        taps_s,
        given.groups,
        f"{stride_h}x{stride_w}",
        f"{dil_h}x{dil_w}",
        dtype_name(given.x),
        _ORDERS[_launch.x_order(given.x)],
        _ORDERS[_launch.weight_order(given.weight)],
        "channels_last" if given.channels_last else "contiguous",
        None if given.bias is None else dtype_name(given.bias),
        given.activation,
        given.x.device.type,
        needs_grad(given.x, given.weight, given.bias),
    )


def _cost(*args: Any, **kwargs: Any) -> Cost:
    given = Operands(*args, **kwargs)
    batch, outputs, height, width = given.shape
    results = batch * outputs * height * width
    moved = given.x.nbytes + given.weight.nbytes + results * given.x.element_size()
    return Cost(flops=2 * results * given.K, bytes=moved + (0 if given.bias is None else given.bias.nbytes))


def _declines(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    grad = needs_grad(given.x, given.weight, given.bias)
    return _checks.kernel_refusal(dtype_name(given.x), given.x.device.type, 1, grad)


def _reserved(*args: Any, **kwargs: Any) -> str | None:
    if args[0].device.type == "cpu":
        return "Triton's interpreter and the emulator are for tests: they run when forced or named"
    return None


def _shape(given: Operands, rows: int) -> _config.Shape:
    taps_r, taps_s = given.kernel
    bits = 8 * given.x.element_size()
    return _config.Shape(rows, given.N, given.channels, taps_r * taps_s, given.groups, bits)


def _shape_of(key: Key) -> _config.Shape:
    part = dict(zip(KEY_FIELDS, key, strict=True))
    groups, bits = part["groups"], 32 if part["dtype"] in ("float32", "float64") else 16
    return _config.Shape(
        part["pixels"], part["outputs"] // groups, part["channels"] // groups, part["r"] * part["s"], groups, bits
    )


def _default_config(key: Key) -> Config:
    return _config.default(_shape_of(key), _target.arch())


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _config.space(_shape_of(key), arch)


def _work_of(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    part = dict(zip(KEY_FIELDS, key, strict=True))
    return _work.work(_shape_of(key), part["dtype"], part["x"], part["weight"], config, arch)


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    given = Operands(*args)
    if math.prod(given.shape) == 0:
        return []
    return [_launch.launch(given, given.x, config, arch)]


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
) -> tuple[Any, ...]:
    """Arguments with square images and kernels; `last`: channels_last. Padding is (taps − 1) / 2 where not given."""
    layout = torch.channels_last if last else torch.contiguous_format

    def made(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype, device="meta") if device == "meta" else torch.randn(shape).to(dtype)
        return values.to(device).contiguous(memory_format=layout)

    named = {"bias": None, "stride": 1, "padding": taps // 2, "dilation": 1, "activation": None} | options
    if named["bias"] is True:
        named["bias"] = made(outputs, 1, 1, 1).flatten()
    x, weight = made(batch, channels, side, side), made(outputs, channels // groups, taps, taps)
    values = (named[name] for name in ("bias", "stride", "padding", "dilation"))
    return (x, weight, *values, groups, named["activation"])


def _inputs(B: int, C: int, H: int, O: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:  # noqa: E741
    """Images H × H, a kernel of 3 × 3 with padding 1, contiguous."""
    return _example(B, C, H, O, 3, dtype, device)


# batch, channels, side, outputs of convolutions 3 × 3 with padding 1
_BENCHED = ((32, 3, 224, 64), (32, 64, 112, 128), (32, 128, 56, 256), (32, 256, 28, 512))
_QUICK = ((1, 3, 32, 16), (2, 32, 16, 32))


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """3 × 3 with padding 1, in both layouts."""
    shapes, dtype = (_QUICK, torch.float32) if suite == "quick" else (_BENCHED, torch.float16)
    return {
        f"b{batch}c{channels}hw{side}o{outputs} {'nhwc' if last else 'nchw'}": partial(
            _example, batch, channels, side, outputs, 3, dtype, device, last=last
        )
        for batch, channels, side, outputs in shapes
        for last in (False, True)
    }


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Both walks over K in both layouts, groups, float32, and what moves the kernel over the image."""
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


# name -> batch, channels, side, outputs, taps, and what else is not as usual: layers of ResNet-50 and ResNeXt-50, the
# 3 × 3 of the benchmark, a depthwise one; float32
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


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases = {}
    for name, (sizes, options) in _COMPILED.items():
        options = {"dtype": torch.float16} | options
        given = Operands(*_example(*sizes, options.pop("dtype"), "meta", **options))
        made = config or _config.default(_shape(given, row_bucket(given.M)), arch)
        cases[name] = _launch.launch(given, given.x, made, arch)
    return cases


def _reference(*args: Any, **kwargs: Any) -> Tensor:
    return reference(Operands(*args, **kwargs))


def _check(*args: Any, **kwargs: Any) -> None:
    check(Operands(*args, **kwargs))


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Tensor]:
    return _launch.bind(Operands(*args, **kwargs), config)


def _run(*args: Any, config: Config, **kwargs: Any) -> Tensor:
    return _bind(*args, config=config, **kwargs)(*args, **kwargs)


_op = LegacyOp(
    "conv2d",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("pixels", "outputs", "channels"),
    inputs=_inputs,
    sizes=("B", "C", "H", "O"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_bench_cases,
    emulate_cases=_emulate_cases,
    op_class="gemm",
)
_op.attach(
    "triton",
    _run,
    supports=_declines,
    reserved=_reserved,
    priority=PRIORITY,
    takes_config=True,
    bind=_bind,
    space=_space,
    launches=_launches,
    work=_work_of,
)
_op.modelled(propose)


def _hashable(value: Any) -> Any:
    """Lists as tuples: calls are looked up by their arguments."""
    return tuple(value) if isinstance(value, list) else value


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """act(conv(x, weight) + bias): sums in float32 (float64 for float64), rounded once.

    Args:
        x: [B, C, H, W], contiguous, channels_last or of any other strides, which are read in place; float32, float16,
            bfloat16 or float64. B may be 0.
        weight: [O, C / groups, R, S] of x's dtype, any strides.
        bias: [O] of any of these dtypes, or None.
        stride: input pixels from one result to the next, a number or (along H, along W).
        padding: zeros around each image, a number or (along H, along W); "valid" (none) or "same" (as many as keep H
            and W at a stride of 1, the odd one below and on the right).
        dilation: input pixels from one tap of the kernel to the next, a number or (along H, along W).
        groups: divides C and O; outputs of a group see the channels of their group alone.
        activation: None, "relu", "leaky_relu" (0.01 · x below 0), "silu", "gelu" or "gelu_tanh".

    Returns:
        [B, O, OH, OW] of x's dtype with OH = (H + padding · 2 − dilation · (R − 1) − 1) // stride + 1; channels_last
        where x or weight is, else contiguous.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this, or the kernel larger than the padded input.
    """
    pairs = (_hashable(value) for value in (stride, padding, dilation))
    result: Tensor = _op(x, weight, bias, *pairs, groups, activation)
    return result
