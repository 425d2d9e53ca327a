"""The configurations worth trying for the chunkwise kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.chunkwise.config import Shape, chunked, default, width


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first.

    Kernels are independent of each other: what chunks do is tried beside the default's states and keys, and the other
    way round, each with chunks half and twice as long too. Longer ones have larger GEMMs, shorter ones more states to
    move.
    """
    first = default(shape, arch)
    seen = set()
    lengths = (shape.chunk,) if shape.chunk else (first["CHUNK"], first["CHUNK"] // 2, 2 * first["CHUNK"])
    changes: list[dict[str, int]] = [{}, *_chunk_changes(shape, arch, first), *_state_changes(shape, arch)]
    changes += [{"KEYS_WARPS": warps} for warps in (1, 2, 4, 8) if first["KEYS_WARPS"] in (warps // 2, 2 * warps)]
    for change, length in itertools.product(changes, lengths):
        made = first.kwargs | change
        made["BLOCK_C"] = min(made["BLOCK_C"], made["STATE_K"])
        config = chunked(Config(**made), length)
        if config not in seen:
            seen.add(config)
            yield config


def _chunk_changes(shape: Shape, arch: Arch, first: Config) -> Iterator[dict[str, int]]:
    """Tiles of the kernel of chunks."""
    size = 4 if shape.dtype == "float32" else 2
    matrix = arch.vendor == "nvidia" and size == 2
    # NVIDIA's matrix units take 64 rows of 16 bits at a time
    rows_tried = (64, 128) if matrix else (first["BLOCK_T"], 64)
    columns_tried = (128, 256, 512) if matrix else (128, 256)
    stages = (2, 3) if arch.vendor == "nvidia" else (1, 2)
    for rows, keys, columns, warps, deep in itertools.product(rows_tried, (32, 64), columns_tried, (4, 8), stages):
        columns = width(shape.dv, columns)
        # sums of a tile of h and of one of scores, registers a lane: above 160 they spill, and few leave matrix units
        # to wait for shared memory (H200, 2026-11-22: 96 µs with 40, 47.5 with 144)
        sums = rows * (columns + keys) // (warps * arch.wave_size)
        # LDS that the GEMMs of a step take: queries, keys and values
        held = (rows * first["BLOCK_K"] + deep * keys * (first["BLOCK_K"] + columns) + rows * keys) * size
        if (64 if matrix else 8) <= sums <= 160 and held <= arch.lds_kib << 10:
            yield {"BLOCK_T": rows, "BLOCK_S": keys, "BLOCK_V": columns, "num_warps": warps, "num_stages": deep}


def _state_changes(shape: Shape, arch: Arch) -> Iterator[dict[str, int]]:
    """Tiles of the kernel of states: tokens, rows, columns, warps, stages."""
    if arch.vendor == "nvidia" and shape.dtype != "float32":
        tiles = [
            (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 4), (64, 64, 128, 8, 4), (64, 128, 64, 4, 4),
            (128, 64, 128, 4, 3), (64, 128, 128, 8, 3), (64, 128, 128, 8, 4), (64, 64, 128, 4, 3),
        ]  # fmt: skip
    else:
        tiles = [(32, 64, 64, 4, 1), (64, 64, 64, 4, 1), (64, 64, 64, 4, 2), (32, 32, 64, 4, 1)]
    for tokens, rows, columns, warps, deep in tiles:
        rows, columns = width(shape.dk, rows), width(shape.dv, columns)
        size = 4 if shape.dtype == "float32" else 2
        if deep * tokens * (rows + columns) * size <= arch.lds_kib << 10:
            yield {
                "STATE_T": tokens, "STATE_K": rows, "STATE_V": columns, "STATE_WARPS": warps, "STATE_STAGES": deep
            }  # fmt: skip
