"""The launch of the kernel for sm_90 (`hopper_kernel.py`), and the calls and configurations that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import wavecrest.ops._hopper as _hopper
import wavecrest.ops._rows as _rows
import wavecrest.ops._triton as _triton
import wavecrest.ops.mlstm_chunkwise.config as _config
import wavecrest.ops.mlstm_chunkwise.launch as _launch
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mlstm_norm import or_else, side_by_side, strides
from wavecrest.ops._mlstm_operands import Operands
from wavecrest.ops.mlstm_chunkwise.config import Shape
from wavecrest.ops.mlstm_chunkwise.hopper_kernel import _mlstm_hopper_kernel
from wavecrest.ops.mlstm_chunkwise.states_kernel import BEFORE
from wavecrest.tuned import Config

# columns of q and k that tiles have; v has as many or twice as many
COLUMNS = (64, 128, 256)
# what configurations of states have
STATES = ("STATE_T", "STATE_K", "STATE_V", "STATE_WARPS", "STATE_STAGES")
# groups that multiply, and the tokens of each
GROUPS, ROWS = 2, 64
DESCRIPTORS, TENSORS = 5, 10
# descriptors walk strides of multiples of 16 bytes
UNIT = 8
# bytes beside tiles: barriers, sums on their way from one layout to another, what Triton hands from group to group
BESIDE_TILES = 1024


def refusal(given: Operands) -> str | None:
    """Why a call that the kernels take is none for this one."""
    return _hopper.refusal() or unfit(given)


def unfit(given: Operands) -> str | None:
    """Why a call is none for the kernel wherever it runs."""
    if given.q.dtype != torch.bfloat16:
        return "takes bfloat16: float16's states have units of their own"
    if given.dk not in COLUMNS or given.dv not in (given.dk, 2 * given.dk):
        return f"takes {', '.join(map(str, COLUMNS))} columns of q and k, and as many or twice as many of v"
    if given.form != "whole" or given.resets is not None:
        return "takes whole rows, without resets"
    if given.batch_invariant:
        return "takes whole rows alone, and batch_invariant calls are one kernel's in any form"
    if (given.chunk_size or 0) % (GROUPS * ROWS) != 0:
        return f"takes chunks of multiples of {GROUPS * ROWS} tokens"
    if given.norm_weight is not None and not side_by_side(given.norm_weight):
        return "takes a norm_weight whose elements lie side by side"
    if not _walks(given):
        return (
            "copies tiles of rows whose columns lie side by side, every other stride a multiple of 16 bytes and not 0"
        )
    return None


def _walks(given: Operands) -> bool:
    """True if descriptors can stand for q, k, v and h, and loads of 16 bytes for the gate, but for their addresses."""
    gate = given.output_gate
    if not side_by_side(given.q, given.k, given.v, gate):
        return False
    walked = [strides(one, 3) for one in (given.q, given.k, given.v, torch.empty_like(given.v, device="meta"))]
    sizes = (given.batch, given.heads, given.tokens)
    return all(
        stride % UNIT == 0 and stride != 0
        for one in walked
        for stride, size in zip(one, sizes, strict=True)
        if size > 1
    ) and all(stride % UNIT == 0 for stride in strides(gate, 3))


def default(shape: Shape, arch: Arch | None) -> Config:
    """Tiles of 64 tokens: beside queries and half of h of 512 columns shared memory has room for 3 of 256 columns."""
    return _made(shape, arch, 64, 3 if shape.dk == COLUMNS[-1] else 6)


def _made(shape: Shape, arch: Arch | None, tokens: int, stages: int, **changes: int) -> Config:
    portable = _config.default(shape, arch)
    made = {name: portable[name] for name in (*STATES, "KEYS_WARPS")}
    # of the group that the launch counts; the kernel adds the others, and its stages are its own
    made |= {"CHUNK": shape.chunk or 256, "BLOCK_S": tokens, "STAGES": stages, "num_warps": 4, "num_stages": 1}
    return Config(**(made | changes))


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: tokens of a tile, and the two fastest of states.

    One H200, 2026-11-23, 8 heads of 256 × 512: states in tiles of 64 × 64 in steps of 128 tokens for one row, of 64 ×
    128 in steps of 64 for four (`tune_xlstm_prompts.json`).
    """
    stages = default(shape, arch)["STAGES"]
    for tokens, deep in ((64, stages), (32, 2 * stages)):
        for changes in ({}, {"STATE_T": 64, "STATE_V": min(128, shape.dv), "STATE_STAGES": 4}):
            made = _made(shape, arch, tokens, deep, **changes)
            if shared_bytes(made, shape) <= arch.lds_kib << 10:
                yield made


def shared_bytes(config: Config, shape: Shape) -> int:
    """Shared memory of a program: queries, the first half of h, and tiles on their way."""
    own = GROUPS * ROWS * (2 if shape.dv > shape.dk else 1)
    return 2 * shape.dk * (own + config["STAGES"] * config["BLOCK_S"]) + BESIDE_TILES


def _tensors(given: Operands, memory: _launch.Memory, config: Config) -> tuple[Any, ...]:
    block, tiles = [1, 1, config["BLOCK_S"], given.dk], [1, 1, ROWS, given.dk]
    return (
        _triton.described_tiles(given.q, tiles),
        _triton.described_tiles(given.k, block),
        _triton.described_tiles(given.v, block),
        _triton.described_tiles(memory.states, block),
        _triton.described_tiles(memory.h, tiles),
        memory.vectors, memory.links[BEFORE.value], memory.planes,
        *or_else(given.q, given.norm_weight, given.output_gate),
    )  # fmt: skip


def _constants(given: Operands, config: Config) -> dict[str, Any]:
    """What the kernel is made for."""
    return {
        "LOG_SCALE": -0.5 * math.log2(given.dk), "INITIAL": given.c_initial is not None,
        "EXPONENTIAL": given.exponential, "NORMALIZE": given.normalize, "NORM": given.norm_weight is not None,
        "GATE": given.output_gate is not None, "DK": given.dk, "HALVES": given.dv // given.dk,
        "CHUNK": config["CHUNK"], "BLOCK": config["BLOCK_S"], "STAGES": config["STAGES"], "ALIGN": UNIT,
    }  # fmt: skip


def _chunks(
    given: Operands, memory: _launch.Memory, sizes: _launch.Sizes, config: Config, arch: Arch | None
) -> _rows.Launch:
    if sizes.chunk % (GROUPS * ROWS) != 0 or ROWS % config["BLOCK_S"] != 0:
        asked = f"not CHUNK={sizes.chunk} and BLOCK_S={config['BLOCK_S']}"
        raise InvalidArgument(
            f"mlstm_chunkwise: triton_hopper has chunks of {GROUPS * ROWS} tokens or multiples of them, in tiles of "
            f"{ROWS} or a part of that, {asked}"
        )
    items = sizes.slots * given.heads * (sizes.chunk // (GROUPS * ROWS))
    numbers = (
        float(given.eps), float(given.norm_eps), given.tokens, given.heads, _rows.ceil_div(given.tokens, sizes.chunk),
        items, *(stride // UNIT for stride in strides(given.output_gate, 3)),
    )  # fmt: skip
    units = 132 if arch is None else arch.compute_units
    return _rows.Launch(
        _mlstm_hopper_kernel, (min(items, units),), (*_tensors(given, memory, config), *numbers),
        _constants(given, config), Config(num_warps=config["num_warps"], num_stages=config["num_stages"]),
    )  # fmt: skip


LAST = _launch.Last(_chunks, _tensors, TENSORS, described=DESCRIPTORS)


def bind(given: Operands, config: Config, portable: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all calls with arguments like these.

    `portable`: the other kernel's, for a call whose tensors do not begin at multiples of 16 bytes, as descriptors must,
    or have a stride of 0, neither of which is in a key.
    """
    if unfit(given) is not None:
        return portable
    bound = _launch.bind(given, config, LAST)

    def call(*args: Any, **kwargs: Any) -> Any:
        now = Operands(*args, **kwargs)
        if (now.q.data_ptr() | now.k.data_ptr() | now.v.data_ptr()) % 16 != 0:
            return portable(*args, **kwargs)
        return bound(*args, **kwargs)

    return call
