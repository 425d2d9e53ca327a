from __future__ import annotations

import math

import wavecrest.ops._rows as _rows
from wavecrest.ops import _work
from wavecrest.ops.flash_attention.key import KEY_FIELDS, shape_of
from wavecrest.tuned.cost_model import Work


def of_key(backend, key, config, arch):
    part = dict(zip(KEY_FIELDS, key, strict=True))
    shape = shape_of(key)
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config["num_warps"]
    d, dv = (max(16, _rows.power_of_two(part[x])) for x in ("d", "dv"))
    queries, keys = max(1, part["queries"]), max(1, part["keys"])
    tiles = _rows.ceil_div(queries, m)
    heads = max(1, part["batch"]) * part["heads"]
    # keys that a tile of queries sees: half of them beside the diagonal's tiles
    seen = keys
    if part["right"] >= 0:
        seen = min(keys, keys / 2 + m / 2 + n / 2)
    if part["left"] >= 0:
        seen = min(seen, part["left"] + m + n)
    steps = seen / n
    size = shape.bits / 8
    kv = 1 if shape.codes is not None else size
    dtype = part["dtype"].split()[0]
    fresh = heads * queries * d * size + max(1, part["batch"]) * part["kv_heads"] * keys * (d + dv) * kv
    hopper = backend == "triton_hopper"
    groups = 2 if hopper else 1
    many = 8 if hopper else warps
    wide = hopper or (arch.name in _work.WIDE_UNIT and m >= 64 and warps % 4 == 0 and size <= 2)
    scores = _work.product(m, n, d, shape.bits, many, arch, wide, dtype)
    if wide and not hopper and warps >= 8:
        groups = 1.5
    values = _work.product(m, dv, n, shape.bits, many, arch, wide, dtype, True)
    vector = m * n * (_work.softmax(arch) + 4 * shape.more + (1 if part["right"] >= 0 else 0)) + m * dv
    if shape.codes is not None:
        vector += n * (d + dv) * 2
    loaded = n * (d + dv) * kv
    lanes = many * arch.wave_size
    programs = tiles * heads
    stages = config.get("STAGES", config["num_stages"])
    if hopper:
        at_once = min(programs, arch.compute_units)
        steps = steps * max(programs / at_once, 1)
        if part["right"] < 0:
            steps = seen / n * math.ceil(programs / at_once)
        programs = at_once
    depth = _work.depth(stages, wide, arch)
    return [Work(
        programs=programs, warps=12 if hopper else warps, steps=steps, loaded=loaded, fresh=fresh, depth=depth,
        shared=int(m * d * size + (stages if arch.vendor == "nvidia" else max(1, stages - 1)) * n * (d + dv) * kv),
        registers=m * (dv + n * 1.5) / lanes + (0 if wide else m * d * size / 4 / lanes) + values.registers,
        stored=m * dv * size, matrix=scores.flops + values.flops, dtype=dtype, rate=scores.rate, vector=vector,
        lds=scores.lds + values.lds + loaded * (1 if hopper else 2),
        chain=scores.chain + values.chain + _work.REDUCE, groups=groups,
    )]
