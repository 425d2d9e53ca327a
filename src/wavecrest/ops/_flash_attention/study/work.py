"""Work of attention's kernels, for the cost model: bytes, operations and steps by configuration."""

from __future__ import annotations

import math

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import Work
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import KEY_FIELDS
from wavecrest.ops._flash_attention.config import Shape, shape_of
from wavecrest.ops._flash_attention.launch import LEAST_BLOCK
from wavecrest.ops._flash_attention.launch_cdna import ARCH as CDNA
from wavecrest.ops._flash_attention.launch_hopper import GROUPS
from wavecrest.ops._flash_attention.launch_hopper_group import COLUMNS
from wavecrest.ops._flash_attention.launch_short import MOST_KEYS, parts_of

# groups of four warps of the portable kernel go on together from each load: half of one's softmax is beside products
_LOOSE = 1.5
# warps of a group of sm_90's kernel, and with those that copy
_GROUP_WARPS, _WARPS = 4, 12
# cycles until the queries of its next tile are there
_QUERY_CYCLES = 1000.0


def _seen(part: dict[str, int], rows: int, keys: int) -> float:
    """Keys that a tile of queries looks at, on average: under the diagonal half of them, and what tiles cross it."""
    seen: float = part["keys"]
    if part["right"] >= 0:
        seen = min(seen, seen / 2 + (rows + keys) / 2)
    return min(seen, part["left"] + rows + keys) if part["left"] >= 0 else seen


def _shared_out(part: dict[str, int], programs: int, steps: float, arch: Arch) -> tuple[int, float]:
    """Programs that take one tile after another, and their steps: of unequal tiles about equal shares."""
    at_once = min(programs, arch.compute_units)
    tiles = programs / at_once
    return at_once, steps * (tiles if part["right"] >= 0 else math.ceil(tiles))


def work(backend: str, key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launch of a call; none where its sequences are not known, or the kernel is not for the architecture."""
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if 0 in (part["batch"], part["queries"], part["keys"]):
        return ()
    hopper, cdna = backend == "triton_hopper", backend == "triton_cdna"
    # a group of warps alone in its program, which has two steps under way as well
    alone = backend == "triton_hopper_group"
    if ((hopper or alone) and arch.name != "sm_90") or (cdna and arch.name != CDNA):
        return ()
    if alone and part["d"] % COLUMNS != 0:
        return ()
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    warps = GROUPS * _GROUP_WARPS if hopper else config["num_warps"]
    stages = config["STAGES"] if hopper else 2 if cdna or alone else config["num_stages"]
    d, dv = (max(LEAST_BLOCK, _layout.power_of_two(part[name])) for name in ("d", "dv"))
    heads = part["batch"] * part["heads"]
    programs, steps = _layout.ceil_div(part["queries"], m) * heads, _seen(part, m, n) / n
    ends = programs / min(programs, arch.compute_units) * _QUERY_CYCLES if hopper else 0.0
    if hopper:
        programs, steps = _shared_out(part, programs, steps, arch)
    wide = _work.wide(arch, m, warps, shape.bits)
    groups = float(GROUPS) if hopper or alone else _LOOSE if wide and warps >= 2 * _GROUP_WARPS else 1.0
    scores = _work.product(m, n, d, shape.bits, warps, arch)
    values = _work.product(m, dv, n, shape.bits, warps, arch, held=True)
    size, kv = shape.bits / 8, 1 if shape.kv_dtype is not None else shape.bits / 8
    loaded, lanes = n * (d + dv) * kv, warps * arch.wave_size
    q_bytes = heads * part["queries"] * part["d"] * size
    return (
        Work(
            programs=programs, warps=_WARPS if hopper else warps, steps=steps, loaded=loaded,
            fresh=q_bytes + part["batch"] * part["kv_heads"] * part["keys"] * (part["d"] + part["dv"]) * kv,
            # the kernel of one group begins a copy when a step ends, for the step after the next
            depth=1.0 if alone else _work.depth(stages, wide, arch),
            # gfx950's kernel has queries in registers, and all of its stages in LDS
            shared=int(2 * loaded) if cdna else int(m * d * size) + _work.kept(loaded, stages, wide, arch),
            # sums, scores and weights; queries where the matrix unit does not read them from LDS. Warps of sm_90's
            # kernel hand theirs to each other
            registers=0.0
            if hopper
            # weights take the place of scores as they are made
            else m * (dv + 1.25 * n) / lanes
            if alone
            else m * (dv + 1.5 * n) / lanes
            + (0.0 if wide else m * d * size / 4 / lanes)
            + values.registers
            + (0.0 if cdna else _work.staged(loaded, lanes, stages, arch)),
            stored=m * part["dv"] * size, matrix=scores.flops + values.flops, dtype=str(part["dtype"]).split()[0],
            rate=scores.rate, vector=_vector(shape, part, m, n, d, dv, arch),
            lds=scores.lds + values.lds + loaded * (1.0 if hopper or alone or cdna else _work.COPIED_TWICE),
            chain=scores.chain + values.chain + _work.REDUCED_CYCLES, groups=groups,
            ends=ends,
        ),
    )  # fmt: skip


def _vector(shape: Shape, part: dict[str, int], m: int, n: int, d: int, dv: int, arch: Arch) -> float:
    """Operations of a step: of scores, with those that are done to them, of sums that shrink, of codes."""
    each = _work.SCORE_OPERATIONS[arch.vendor] + 4 * shape.more + (part["right"] >= 0)
    return m * n * each + m * dv + (0.0 if shape.kv_dtype is None else n * (d + dv) * _work.widened(8, 16))


def work_short(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launch of the kernel for short sequences, a step each; none where these are not known, or long."""
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if 0 in (part["batch"], part["queries"], part["keys"]) or part["keys"] > MOST_KEYS or shape.bits != 16:
        return ()
    rows, warps, stages = config["BLOCK_M"], config["num_warps"], config["num_stages"]
    tiles = _layout.ceil_div(part["queries"], rows)
    d, dv, n = (max(LEAST_BLOCK, _layout.power_of_two(part[name])) for name in ("d", "dv", "keys"))
    parts = parts_of(part["batch"], part["heads"] * tiles, config, arch)
    steps, lanes, size = part["batch"] / parts, warps * arch.wave_size, shape.bits / 8
    wide = _work.wide(arch, rows, warps, shape.bits)
    scores = _work.product(rows, n, d, shape.bits, warps, arch)
    values = _work.product(rows, dv, n, shape.bits, warps, arch, held=True)
    loaded = (rows * d + n * (d + dv)) * size
    # results too: all but a program's last are written while other sequences are read
    outer = part["batch"] * part["heads"] * part["queries"] * (part["d"] + part["dv"]) * size
    return (
        Work(
            programs=tiles * part["heads"] * parts, warps=warps, steps=steps, loaded=loaded,
            fresh=outer + part["batch"] * part["kv_heads"] * part["keys"] * (part["d"] + part["dv"]) * size,
            depth=_work.depth(stages, wide, arch), shared=_work.kept(loaded, stages, wide, arch),
            registers=rows * (dv + 1.5 * n) / lanes + values.registers + _work.staged(loaded, lanes, stages, arch),
            stored=rows * part["dv"] * size,
            matrix=scores.flops + values.flops, dtype=str(part["dtype"]).split()[0], rate=scores.rate,
            vector=_vector(shape, part, rows, n, d, dv, arch),
            lds=scores.lds + values.lds + loaded * _work.COPIED_TWICE,
            chain=scores.chain + values.chain + _work.REDUCED_CYCLES,
        ),
    )  # fmt: skip
