"""Work of the kernels of attention over a latent cache, for the cost model; without the GEMMs of weights."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.config import Shape
from wavecrest.ops._mla_decode.key import KEY_FIELDS, shape_of
from wavecrest.ops._mla_decode.launch import LEAST_BLOCK

# cycles until a program knows how many keys its sequence has
_LENGTH_CYCLES = 1000.0
# warps of a program of sm_90's kernel, and those of them that multiply
_HOPPER_WARPS, _HOPPER_GROUPS = 12, 8


def _share(shape: Shape, config: Config) -> int:
    """Keys of a split: a multiple of KEYS, so that all splits together have all keys."""
    pieces = _layout.ceil_div(shape.max_seqlen_k, config["KEYS"])
    splits = min(pieces, config["SPLITS"]) if config["SPLITS"] > 0 else pieces
    return _layout.ceil_div(pieces, splits) * config["KEYS"] if splits > 1 else shape.max_seqlen_k


def work(backend: str, key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launches of a call whose sequences are as long as the cache.

    Nothing where the number of sequences must not choose anything, or the kernel is not for the architecture.
    """
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if 0 in (shape.batch, shape.max_seqlen_k, shape.rows):
        return ()
    hopper = backend == "triton_hopper"
    if hopper and arch.name != "sm_90":
        return ()
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    stages = config["STAGES"] if hopper else config["num_stages"]
    warps = _HOPPER_GROUPS if hopper else config["num_warps"]
    d, size = shape.width + max(LEAST_BLOCK, _layout.power_of_two(part["rotary"])), shape.bits / 8
    lanes = warps * arch.wave_size
    share = _share(shape, config)
    splits, loaded = _layout.ceil_div(shape.max_seqlen_k, share), n * d * size
    wide = _work.wide(arch, m, warps, shape.bits)
    scores = _work.product(m, n, d, shape.bits, warps, arch)
    values = _work.product(m, shape.width, n, shape.bits, warps, arch, held=not wide)
    queries = m * d * size
    first = Work(
        programs=shape.batch * splits * _layout.ceil_div(shape.rows, m), warps=_HOPPER_WARPS if hopper else warps,
        steps=_layout.ceil_div(share, n), loaded=loaded,
        fresh=shape.batch * shape.max_seqlen_k * (part["latent"] + part["rotary"]) * size,
        depth=stages - 1 if hopper else _work.depth(stages, wide, arch),
        shared=_work.kept(loaded, stages, wide, arch) + (int(queries) if wide else 0),
        # warps of sm_90's kernel hand theirs to each other
        registers=0.0
        if hopper
        else (m * (shape.width + n) + (0.0 if wide else queries / 4)) / lanes
        + _work.staged(loaded, lanes, stages, arch),
        stored=min(m, shape.rows) * part["latent"] * (4 if splits > 1 else size), matrix=scores.flops + values.flops,
        dtype=str(part["dtype"]), rate=scores.rate,
        vector=m * n * (_work.SCORE_OPERATIONS[arch.vendor] + 4 * shape.extras) + m * shape.width,
        lds=scores.lds + values.lds + loaded * (1.0 if hopper else _work.COPIED_TWICE),
        chain=scores.chain + values.chain + _work.REDUCED_CYCLES + _work.EXCHANGED_CYCLES,
    )  # fmt: skip
    if splits == 1:
        return (first,)
    # one split after another
    rows = shape.batch * shape.rows
    return first, _work.summed(rows, splits, 1, part["latent"], size, ends=_LENGTH_CYCLES)
