"""The launch of the kernel for sm_90 (`hopper_kernel.py`), and the calls and configurations that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, Operands, kinds
from wavecrest.ops._gemm.kernel_hopper import _hopper_gated_kernel
from wavecrest.ops.common.activation import ACTIVATIONS

DESCRIPTORS = 3
WALKS = "copies tiles along K, every other stride a multiple of 16 bytes and not 0"
# groups that multiply, each with rows of its own
GROUPS = 2
# bytes beside tiles: barriers, and what Triton hands from group to group
BESIDE_TILES = 1024


def refusal(given: Operands) -> str | None:
    """Why a call that kernels over tiles take is none for this one."""
    reason = _hopper.refusal()
    if reason is not None:
        return reason
    if given.activation not in GATED:
        return f"makes gated activations, {', '.join(GATED)}"
    if given.a.dtype not in (torch.float16, torch.bfloat16) or {given.b.dtype, given.dtype} != {given.a.dtype}:
        return "takes float16 and bfloat16, and gives what it takes"
    for name, asked in (
        ("bias", given.bias is not None),
        ("a residual", given.residual is not None),
        ("scales and norms", kinds(given) != ("none", "none")),
    ):
        if asked:
            return f"does not know {name}"
    return None if _walks(given) else WALKS


def _walks(given: Operands) -> bool:
    """True if descriptors can stand for a, b and the result, but for their addresses."""
    return _launch.described(given) and _launch.orders(given) == (1, 1) and given.N * given.a.itemsize % 16 == 0


def default() -> Config:
    """128 rows, 64 of a group: the sums of 128 columns of gate and up are 128 registers of 240. Four stages."""
    return _made(128, 4, 8, 2)


def _made(columns: int, stages: int, group: int, behind: int) -> Config:
    # of the group that the launch counts; the kernel adds the others, and its stages are its own
    return Config(
        BLOCK_M=128, BLOCK_N=columns, BLOCK_K=64, GROUP_M=group, STAGES=stages, BEHIND=behind, num_warps=4, num_stages=1
    )


# columns, stages, rows of tiles that go together, steps that the second group stays behind
_TILES = ((128, 4, 8, 2), (128, 4, 16, 2), (128, 4, 8, 1), (128, 4, 8, 0), (64, 6, 8, 2), (64, 6, 16, 1))  # fmt: skip


def space(arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    for tile in _TILES:
        made = _made(*tile)
        if shared_bytes(made) <= arch.lds_kib << 10:
            yield made


def shared_bytes(config: Config) -> int:
    """Shared memory of a program: tiles of each stage, and of the result."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    return 2 * (config["STAGES"] * (m + 2 * n) * k + m * n) + BESIDE_TILES


def launch(given: Operands, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against and that has a result.

    Raises:
        InvalidArgument: the second group would stay behind by more steps than there are stages, and wait for ever.
    """
    if not 0 <= config["BEHIND"] < config["STAGES"]:
        raise InvalidArgument(f"gemm: BEHIND is below STAGES, {config['STAGES']}, and not {config['BEHIND']}")
    tiles_m, tiles_n = _layout.ceil_div(given.M, config["BLOCK_M"]), _layout.ceil_div(given.N, config["BLOCK_N"])
    units = 132 if arch is None else arch.compute_units
    return _launcher.Launch(
        _hopper_gated_kernel,
        (min(tiles_m * tiles_n, units),),
        (
            *_descriptors(given, y, config), given.N, tiles_m, tiles_n, _layout.ceil_div(given.K, config["BLOCK_K"]),
            float(given.alpha),
        ),
        {"ACTIVATION": ACTIVATIONS[GATED[str(given.activation)]]},
        config,
    )  # fmt: skip


def _descriptors(given: Operands, y: Tensor, config: Config) -> tuple[Any, ...]:
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    a = given.a.as_strided((given.M, given.K), (_launch.row_stride(given), 1))
    return (
        _triton.described_tiles(a, [m, k]),
        _triton.described_tiles(given.b.mT, [n, k]),
        _triton.described_tiles(y.view(given.M, given.N), [m // GROUPS, n]),
    )


def bind(
    operands: Callable[..., Operands], args: tuple[Any, ...], config: Config, portable: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """The function for all calls with arguments like these.

    `portable`: the other kernel's, for a call whose tensors do not begin at multiples of 16 bytes, as descriptors must,
    or have a stride of 0.
    """
    given = operands(*args)
    if math.prod(given.shape) == 0:
        return portable
    if not _walks(given):
        _hopper.replaced("gemm", WALKS)
        return portable
    arch, shape, dtype, device = _target.arch(), given.shape, given.dtype, given.a.device
    start: Callable[..., None] | None = None
    sizes: tuple[Any, ...] = ()

    def call(*args: Any) -> Tensor:
        nonlocal start, sizes
        now = operands(*args)
        if not _hopper.aligned("gemm", now.a.data_ptr() | now.b.data_ptr()):
            return portable(*args)
        y = torch.empty(shape, dtype=dtype, device=device)
        if start is None:
            made = launch(now, y, config, arch)
            start, sizes = _launcher.starter(made, device, described=DESCRIPTORS), made.args[DESCRIPTORS:]
        start(*_descriptors(now, y, config), *sizes)
        return y

    return call
