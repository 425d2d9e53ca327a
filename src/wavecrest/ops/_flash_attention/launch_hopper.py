"""The launch of the kernel for sm_90 (`hopper_kernel.py`), and the calls and configurations that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import Operands
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.kernel_hopper import _hopper_attention_kernel
from wavecrest.ops._flash_attention.launch import LEAST_BLOCK, empty_results

DESCRIPTORS = 4
# groups that multiply, each with rows of its own
GROUPS = 2
# of the L2 cache of 50 MiB, what k and v of the heads that go together may take
SECTION_BYTES = 16 << 20


def refusal(given: Operands, access: str) -> str | None:
    """Why a call that the portable kernel takes is none for this one."""
    reason = _hopper.refusal()
    if reason is not None:
        return reason
    if given.q.dtype not in (torch.float16, torch.bfloat16) or given.quantized:
        return "takes float16 and bfloat16"
    for name, asked in (
        ("packed sequences", given.packed),
        ("the left edge of a window", given.left >= 0),
        ("bias", given.bias is not None),
        ("ALiBi slopes", given.alibi_slopes is not None),
        ("softcap", given.capped > 0),
        ("dropout", given.dropout),
        ("columns of v that are not as many as of q", given.v_columns != given.columns),
        ("calls without keys", given.keys == 0),
    ):
        if asked:
            return f"does not know {name}"
    if access != "columns 16":
        return "copies tiles with contiguous columns, every other stride a multiple of 16 bytes and not 0"
    return None


def default(shape: Shape) -> Config:
    """128 queries, 64 of a group: sums and scores of 128 keys are 128 registers of 240. Two stages."""
    if shape.columns > 128:
        return _made(128, 64, 2, 1)
    return _made(128, 128, 2, 1)


def _made(rows: int, keys: int, stages: int, turns: int) -> Config:
    # of the group that the launch counts; the kernel adds the others, and its stages are its own
    return Config(BLOCK_M=rows, BLOCK_N=keys, STAGES=stages, TURNS=turns, num_warps=4, num_stages=1)


# queries, keys, stages, whether the groups take turns
_TILES = (
    (128, 128, 2, 1), (128, 128, 2, 0), (128, 64, 2, 1), (128, 64, 2, 0), (128, 64, 4, 1), (128, 128, 3, 1),
    (256, 64, 3, 1), (256, 64, 3, 0),
)  # fmt: skip


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = default(shape)
    yield first
    width = max(LEAST_BLOCK, _layout.power_of_two(shape.columns))
    for tile in _TILES:
        rows, keys, stages, _ = tile
        made = _made(*tile)
        # q; k and v of each stage; barriers
        needed = 2 * width * (rows + 2 * stages * keys) + 1024
        # sums, scores and weights of a thread
        held = rows // GROUPS * (width + keys + keys // 2) // 128
        if made != first and needed <= arch.lds_kib << 10 and held <= 200:
            yield made


def launch(given: Operands, o: Tensor, lse: Tensor | None, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against and that has queries."""
    tiles = _layout.ceil_div(given.queries, config["BLOCK_M"])
    total = given.heads * given.batch
    section = total
    if given.right >= 0:
        kept = 2 * given.keys * given.columns * given.k.element_size()
        section = min(total, given.group * max(1, SECTION_BYTES // kept))
    units = 132 if arch is None else arch.compute_units
    return _launcher.Launch(
        _hopper_attention_kernel,
        (min(tiles * total, units),),
        (
            *_descriptors(given, o, config), *_tensors(given, lse),
            given.scale, given.queries, given.keys, given.heads, given.group, section, tiles, total,
            min(given.right, given.queries + given.keys), 0 if given.sinks is None else given.sinks.stride(0),
        ),
        {
            "RIGHT": given.right >= 0,
            "SINKS": given.sinks is not None,
            "LSE": given.return_lse,
            "BLOCK_D": max(LEAST_BLOCK, _layout.power_of_two(given.columns)),
        },
        config,
    )  # fmt: skip


def _descriptors(given: Operands, o: Tensor, config: Config) -> tuple[Any, ...]:
    rows, keys = config["BLOCK_M"] // GROUPS, config["BLOCK_N"]
    width = max(LEAST_BLOCK, _layout.power_of_two(given.columns))
    return tuple(
        _triton.described_tiles(given.bhsd(one), [1, 1, count, width])
        for one, count in ((given.q, rows), (given.k, keys), (given.v, keys), (o, rows))
    )


def _tensors(given: Operands, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the kernel reads and writes without descriptors; q, which it does not, where there is none."""
    return (given.q if lse is None else lse, given.q if given.sinks is None else given.sinks)


def bind(given: Operands, config: Config, portable: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all calls with arguments like these.

    `portable`: the other kernel's, for a call whose tensors do not begin at multiples of 16 bytes, as descriptors must.
    """
    device, arch = given.q.device, _target.arch()
    start: Callable[..., None] | None = None
    sizes: tuple[Any, ...] = ()

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal start, sizes
        now = Operands(*args, **kwargs)
        if not _hopper.aligned("flash_attention", now.q.data_ptr() | now.k.data_ptr() | now.v.data_ptr()):
            return portable(*args, **kwargs)
        o, lse = empty_results(now)
        if now.batch * now.queries * now.q.numel() > 0:
            if start is None:
                made = launch(now, o, lse, config, arch)
                start, sizes = _launcher.starter(made, device, described=DESCRIPTORS), made.args[DESCRIPTORS + 2 :]
            start(*_descriptors(now, o, config), *_tensors(now, lse), *sizes)
        return (o, lse) if now.return_lse else o

    return call
