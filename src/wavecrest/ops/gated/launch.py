"""What the gated activations share on the host: act(gate) · up, from two tensors or one packed [gate | up]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch

# the parts of `key`
KEY_FIELDS = ("rows", "columns", "dtype", "packed", "device", "leading", "grad")
# most columns a program takes
BLOCK_COLUMNS = 1024
# rows that are too few to fill a GPU
FEW_ROWS = 64
# columns (narrow with several rows a program, odd, common) that compile tests take
COMPILE_COLUMNS = (64, 1000, 14336)


def check(op: str, gate: Any, up: Any) -> None:
    """Raise InvalidArgument unless gate and up match, or gate alone has an even last dimension."""
    _checks.check_rows(op, gate)
    if up is not None:
        _checks.check_same(op, "up", up, gate)
    elif gate.shape[-1] % 2 != 0:
        raise InvalidArgument(f"{op}: a packed [gate | up] needs an even last dimension, got {list(gate.shape)}")


def columns(gate: Tensor, up: Tensor | None) -> int:
    """N, the last dimension of the result."""
    return gate.shape[-1] if up is not None else gate.shape[-1] // 2


def dims(gate: Tensor, up: Tensor | None) -> int:
    """Leading dimensions that remain after merging."""
    return _layout.leading(gate) if up is None else _layout.leading(gate, up)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as two tensors (views of a packed one)."""
    if up is not None:
        return gate, up
    n = gate.shape[-1] // 2
    return gate[..., :n], gate[..., n:]


def key(gate: Tensor, up: Tensor | None) -> Key:
    """The shape key of a gated activation."""
    return (
        m_bucket(_layout.row_count(gate)),
        columns(gate, up),
        dtype_name(gate),
        up is None,
        gate.device.type,
        dims(gate, up),
        needs_grad(gate, up),
    )


def refusal(gate: Tensor, up: Tensor | None) -> str | None:
    """Why the Triton kernel does not take a call."""
    return _checks.kernel_refusal(dtype_name(gate), gate.device.type, dims(gate, up), needs_grad(gate, up))


def inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Gate and up [M, N]."""
    gate = torch.randn(M, N, dtype=dtype, device=device)
    return gate, torch.randn_like(gate)


def cost(gate: Tensor, up: Tensor | None, flops: int) -> Cost:
    """Gate and up read once, the result written once; `flops` an element."""
    read = gate.nbytes * (1 if up is None else 2)
    elements = gate.numel() if up is not None else gate.numel() // 2
    return Cost(flops=flops * elements, bytes=read + read // 2)


def config(rows: int, n: int, wave: int) -> Config:
    """A tile of 1,024 columns, or several narrow rows; 16 elements a thread: two 16-byte loads of 16-bit data each.

    Smaller tiles with more threads where rows are few (`rows` is a bucket, 0 for any number). Chosen by a sweep on one
    H200 in bfloat16, 2026-11-20.
    """
    block_n = min(_layout.power_of_two(n), BLOCK_COLUMNS)
    if 0 < rows <= FEW_ROWS:
        block_n = min(block_n, BLOCK_COLUMNS // 2)
        return Config(BLOCK_M=1, BLOCK_N=block_n, num_warps=max(1, block_n // (4 * wave)))
    block_m = 1 if block_n == BLOCK_COLUMNS else min(16, 2048 // block_n)
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=max(1, block_m * block_n // (16 * wave)))


def launch(
    kernel: Any, gate: Tensor, up: Tensor | None, y: Tensor, config: Config, constants: dict[str, Any]
) -> _launcher.Launch:
    """The launch both gated kernels share."""
    n = columns(gate, up)
    if up is None:
        rows, leading, size1, size2, (strides_g,) = _layout.layout(gate)
        up, strides_u, offset = gate, strides_g, n * gate.stride(-1)
    else:
        rows, leading, size1, size2, (strides_g, strides_u) = _layout.layout(gate, up)
        offset = 0
    blocks_m = (rows + config["BLOCK_M"] - 1) // config["BLOCK_M"]
    blocks_n = (n + config["BLOCK_N"] - 1) // config["BLOCK_N"]
    return _launcher.Launch(
        kernel,
        (blocks_m * blocks_n,),
        (
            gate,
            up,
            y,
            rows,
            n,
            blocks_n,
            size1,
            size2,
            *strides_g,
            gate.stride(-1),
            *strides_u,
            up.stride(-1),
            offset,
        ),
        {**constants, "LEADING": leading, "EVEN": n % config["BLOCK_N"] == 0},
        config,
    )


def bind(
    kernel: Any, gate: Tensor, up: Tensor | None, config: Config, constants: dict[str, Any]
) -> Callable[..., Tensor]:
    """The function for all calls with tensors like these; further arguments are part of `constants`."""
    made = launch(kernel, gate, up, gate, config, constants)
    start, sizes = _launcher.starter(made, gate.device), made.args[3:]
    shape = (*gate.shape[:-1], columns(gate, up))
    rows = gate.numel() > 0

    def call(gate: Tensor, up: Tensor | None = None, *_constants: Any) -> Tensor:
        y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
        if rows:
            start(gate, gate if up is None else up, y, *sizes)
        return y

    return call


def compile_cases(
    kernel: Any, arch: Arch, chosen: Config | None, constants: dict[str, Any], label: str = ""
) -> dict[str, _launcher.Launch]:
    """Separate and packed operands of the common widths; `chosen` instead of the default configuration."""
    cases = {}
    for n in COMPILE_COLUMNS:
        x = torch.empty(64, n, dtype=torch.bfloat16, device="meta")
        packed = torch.empty(64, 2 * n, dtype=torch.bfloat16, device="meta")
        made = chosen or config(0, n, arch.wave_size)
        cases[f"N={n}{label}"] = launch(kernel, x, x, x, made, constants)
        cases[f"N={n}{label} packed"] = launch(kernel, packed, None, x, made, constants)
    return cases
