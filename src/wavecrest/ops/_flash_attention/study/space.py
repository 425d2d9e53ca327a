"""The configurations that `wavecrest tune flash_attention` tries."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops._flash_attention.launch_cdna as _cdna
import wavecrest.ops._flash_attention.launch_hopper as _hopper
import wavecrest.ops._flash_attention.launch_hopper_group as _hopper_group
import wavecrest.ops._flash_attention.launch_short as _short
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import KEY_FIELDS
from wavecrest.ops._flash_attention.config import Shape, Tile, default, made_of, shape_of
from wavecrest.ops._flash_attention.launch import DYNAMIC, LEAST_BLOCK, PER_UNIT

# tiles of 16-bit types
_ON_NVIDIA = (
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3),
    (16, 32, 4, 3),
)  # fmt: skip
_ON_AMD = (
    (128, 64, 4, 2), (128, 64, 4, 1), (128, 32, 4, 2), (128, 128, 4, 1), (128, 128, 8, 2), (256, 64, 8, 2),
    (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1), (16, 64, 4, 2),
    (16, 128, 4, 2), (16, 32, 4, 1),
)  # fmt: skip
# those of them and others that are tried with matrix instructions of 32 rows, on gfx942 and gfx950
_WIDE_ON_AMD = (
    (128, 64, 4, 1), (128, 32, 4, 2), (128, 32, 4, 1), (256, 64, 8, 1), (256, 64, 8, 2), (256, 128, 8, 1),
    (64, 64, 2, 1), (64, 32, 2, 1),
)  # fmt: skip
# of float32
_SINGLE = ((32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of the portable kernel for a key."""
    return space_of(shape_of(key), arch)


def space_of(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
    first = default(shape, arch)
    yield first
    seen = {first}
    if "SECTION_MIB" in first:
        # head after head, and what half of the L2 cache holds, or a cache behind it
        for mib in (0, int(arch.l2_mib) // 2, 4 * int(arch.l2_mib)):
            made = Config(**(first.kwargs | {"SECTION_MIB": mib}))
            seen.add(made)
            yield made
    if shape.bits != 32 and arch.wave_size == 64:
        # programs that take tile after tile, every n-th or the next, as many as run at once
        for how in (1, DYNAMIC):
            yield Config(**(first.kwargs | {"PERSISTENT": how, "PER_UNIT": PER_UNIT}))
    tiles = _SINGLE if shape.bits == 32 else _ON_NVIDIA if arch.vendor == "nvidia" else _ON_AMD
    for tile in [one for one in tiles if _fits(one, shape, arch)]:
        one = made_of(shape, arch, tile)
        waves = (0, 2) if "waves_per_eu" in one else ()
        for made in [Config(**(one.kwargs | {"waves_per_eu": n})) for n in waves] or [one]:
            if made not in seen:
                seen.add(made)
                yield made
    if shape.bits != 32 and arch.name in ("gfx942", "gfx950"):
        for tile in [one for one in _WIDE_ON_AMD if _fits(one, shape, arch)]:
            wide = {"waves_per_eu": 2, "matrix_instr_nonkdim": 32}
            made = Config(**(made_of(shape, arch, tile).kwargs | wide))
            if made not in seen:
                seen.add(made)
                yield made


def _fits(tile: Tile, shape: Shape, arch: Arch) -> bool:
    """True if a tile has no more rows than there are queries, and room in LDS and registers."""
    rows, keys, warps, stages = tile
    width = max(16, _layout.power_of_two(shape.head_dim))
    kept = max(1, stages - 1) if arch.vendor == "amd" else stages
    # k and v of the stages, and q
    if width * (2 * kept * keys + rows) * shape.bits // 8 > arch.lds_kib << 10:
        return False
    # sums and scores, at most 160 registers a lane
    sums = rows * (width + keys) <= 160 * warps * arch.wave_size
    return sums and rows <= max(16, _layout.power_of_two(shape.seqlen_q))


# queries, keys, stages, whether the groups take turns
_HOPPER = (
    (128, 128, 2, 1), (128, 128, 2, 0), (128, 64, 2, 1), (128, 64, 2, 0), (128, 64, 4, 1), (128, 128, 3, 1),
    (256, 64, 3, 1), (256, 64, 3, 0),
)  # fmt: skip


def space_hopper(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of the kernel for sm_90 for a key."""
    return space_hopper_of(shape_of(key), arch)


def space_hopper_of(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = _hopper.default(shape)
    yield first
    width = max(LEAST_BLOCK, _layout.power_of_two(shape.head_dim))
    for tile in _HOPPER:
        rows, keys, stages, _ = tile
        made = _hopper.made_of(*tile)
        # q; k and v of each stage; barriers
        needed = 2 * width * (rows + 2 * stages * keys) + 1024
        # sums, scores and weights of a thread
        held = rows // _hopper.GROUPS * (width + keys + keys // 2) // 128
        if made != first and needed <= arch.lds_kib << 10 and held <= 200:
            yield made


def space_hopper_group(key: Key, _arch: Arch) -> Iterator[Config]:
    """The configurations of the kernel for sm_90 with one group of warps for a key."""
    return space_hopper_group_of(shape_of(key))


def space_hopper_group_of(shape: Shape) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = _hopper_group.default(shape)
    yield first
    # with wider heads 128 keys leave one program a multiprocessor
    for keys in (64, 128) if shape.head_dim <= 64 else (64,):
        made = _hopper_group.made_of(keys)
        if made != first:
            yield made


# waves, and keys of a step: with D = 128, and with 64
_CDNA = {128: ((4, 64), (8, 64), (4, 32), (8, 32), (2, 32)), 64: ((4, 128), (4, 64), (8, 128), (8, 64), (2, 64))}


def space_cdna(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of the kernel for gfx950 for a key."""
    return space_cdna_of(shape_of(key), arch)


def space_cdna_of(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first, which is tried with other heads together too."""
    for waves, keys in _CDNA[64 if shape.head_dim <= 64 else 128]:
        made = _cdna.made_of(waves, keys, shape, arch)
        yield made
        if made == _cdna.default(shape, arch) and "SECTION_MIB" in made:
            for mib in (0, int(arch.l2_mib) // 2, 4 * int(arch.l2_mib)):
                yield Config(**(made.kwargs | {"SECTION_MIB": mib}))


# rows, warps
_SHORT = ((64, 4), (32, 4), (32, 2), (16, 1), (128, 8))
# programs a compute unit
_SHORT_PROGRAMS = (2, 4, 8)


def space_short(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of the kernel for short sequences for a key."""
    return space_short_of(shape_of(key), dict(zip(KEY_FIELDS, key, strict=True))["keys"], arch)


def space_short_of(shape: Shape, keys: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = _short.default(shape, keys, arch)
    yield first
    width, tile = (max(LEAST_BLOCK, _layout.power_of_two(one)) for one in (shape.head_dim, keys))
    for rows, warps in _SHORT:
        # sums and scores, and what is added to them; no more rows than there are queries
        held = rows * (width + 2 * tile) / (warps * arch.wave_size)
        if held > 160 or rows > max(LEAST_BLOCK, _layout.power_of_two(shape.seqlen_q)):
            continue
        for stages in (1, 2, 3):
            # q, k and v of the sequences that are under way
            if 2 * stages * width * (rows + 2 * tile) > arch.lds_kib << 10:
                continue
            for programs in _SHORT_PROGRAMS:
                made = _short.made_of(rows, warps, stages, programs, arch)
                if made != first:
                    yield made
