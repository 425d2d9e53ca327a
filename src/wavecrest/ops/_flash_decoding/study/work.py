"""Work of decoding's kernels, for the cost model: bytes, operations and steps by configuration."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import Work
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.config import Shape
from wavecrest.ops._flash_decoding.key import KEY_FIELDS, shape_of
from wavecrest.ops._flash_decoding.launch import JOINED, LEAST_BLOCK

# bytes of a scale and a shift of a token, or of one of its groups
_SCALE_BYTES = 8
# cycles until a program knows how many keys its sequence has
_LENGTH_CYCLES = 1000.0


def _loaded(shape: Shape, scales: str, keys: int, head_dims: int) -> float:
    """Bytes of keys and values with their scales; `head_dims`: that of k and that of v."""
    scaled = 0 if scales in ("none", "heads") else max(1, shape.groups)
    return keys * (head_dims * shape.kv_bits / 8 + 2 * scaled * _SCALE_BYTES / 2)


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launches of a call, sequences as long as the cache; none where their number must not choose anything."""
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if 0 in (shape.pairs, shape.capacity, shape.rows):
        return ()
    m, n, warps, stages = (config[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
    d, dv = (max(LEAST_BLOCK, _layout.power_of_two(part[name])) for name in ("d", "dv"))
    splits = _layout.ceil_div(shape.capacity, config["CHUNK"])
    loaded, lanes = _loaded(shape, part["scales"], n, d + dv), warps * arch.wave_size
    scores = _work.product(m, n, d, shape.q_bits, warps, arch)
    values = _work.product(m, dv, n, shape.q_bits, warps, arch, held=True)
    wide = _work.wide(arch, m, warps, shape.q_bits)
    size = shape.q_bits / 8
    vector = m * n * (_work.SCORE_OPERATIONS[arch.vendor] + 4 * shape.more) + m * dv
    vector += n * (d + dv) * _work.widened(shape.kv_bits, shape.q_bits)
    # the number of a page is one step on its way before the page's keys are
    depth = max(0, _work.depth(stages, wide, arch) - (part["page"] > 0))
    first = Work(
        programs=shape.pairs * splits * _layout.ceil_div(shape.rows, m), warps=warps,
        steps=min(config["CHUNK"], shape.capacity) / n, loaded=loaded,
        fresh=shape.pairs * _loaded(shape, part["scales"], shape.capacity, part["d"] + part["dv"]), depth=depth,
        shared=_work.kept(loaded, stages, wide, arch),
        # sums and scores, queries, a half of what is loaded as it is widened
        registers=(m * (dv + n) + m * d * size / 4 + loaded / 8) / lanes + _work.staged(loaded, lanes, stages, arch),
        stored=min(m, shape.rows) * part["dv"] * (4 if splits > 1 else size), matrix=scores.flops + values.flops,
        dtype=str(part["dtype"]), rate=scores.rate, vector=vector,
        lds=scores.lds + values.lds + _work.COPIED_TWICE * loaded,
        chain=scores.chain + values.chain + _work.REDUCED_CYCLES + (_work.EXCHANGED_CYCLES if warps > 1 else 0.0),
    )  # fmt: skip
    if splits == 1:
        return (first,)
    rows = shape.pairs * shape.rows
    return first, _work.summed(rows, splits, JOINED, part["dv"], size, ends=_LENGTH_CYCLES)
