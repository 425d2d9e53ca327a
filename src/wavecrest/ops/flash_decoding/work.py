from __future__ import annotations

import wavecrest.ops._rows as _rows
from wavecrest.ops import _work
from wavecrest.ops.flash_decoding.key import KEY_FIELDS, shape_of
from wavecrest.tuned.cost_model import Work


def of_key(backend, key, config, arch):
    part = dict(zip(KEY_FIELDS, key, strict=True))
    shape = shape_of(key)
    m, n, chunk, warps, stages = (config[x] for x in ("BLOCK_M", "BLOCK_N", "CHUNK", "num_warps", "num_stages"))
    d, dv = (max(16, _rows.power_of_two(part[x])) for x in ("d", "dv"))
    pairs = max(1, shape.pairs)
    splits = max(1, _rows.ceil_div(shape.capacity, chunk))
    blocks = _rows.ceil_div(shape.rows, m)
    steps = min(chunk, shape.capacity) / n
    bytes_ = shape.kv_bits / 8
    loaded = n * (d + dv) * bytes_
    if part["scales"] not in ("none", "heads"):
        loaded += n * 2 * 4 * max(1, shape.groups)
    dtype = part["dtype"]
    scores = _work.product(m, n, d, shape.q_bits, warps, arch, False, dtype)
    values = _work.product(m, dv, n, shape.q_bits, warps, arch, False, dtype, True)
    vector = m * n * (_work.softmax(arch) + 4 * shape.more) + m * dv
    if shape.kv_bits < shape.q_bits:
        vector += n * (d + dv) * (2 if shape.kv_bits == 8 else 2.5)
    lanes = warps * arch.wave_size
    staged = loaded / 4 / lanes if stages == 1 else 0
    size = shape.q_bits / 8
    rows = min(m, shape.rows)
    depth = _work.depth(stages, False, arch)
    wait = 0
    if part["page"] > 0:
        # the number of a page is read before its keys are
        depth = max(0, depth - 1)
    works = [Work(
        programs=pairs * splits * blocks, warps=warps, steps=steps, loaded=loaded,
        fresh=pairs * shape.capacity * (d + dv) * bytes_, depth=depth,
        shared=int(stages * loaded) if arch.vendor == "nvidia" else int(max(0, stages - 1) * loaded),
        registers=m * (dv + n) / lanes + m * d * size / 4 / lanes + n * (d + dv) / 2 * bytes_ / 4 / lanes + staged,
        stored=rows * dv * (4 if splits > 1 else size), matrix=scores.flops + values.flops, dtype=dtype,
        rate=scores.rate, vector=vector, lds=scores.lds + values.lds + 2 * loaded,
        chain=scores.chain + values.chain + _work.REDUCE + (_work.EXCHANGE if warps > 1 else 0) + wait,
    )]
    if splits > 1:
        works.append(Work(
            programs=pairs * shape.rows, warps=4, steps=max(1, splits / 16), loaded=min(16, splits) * dv * 4, ends=1000, fresh=0, depth=0, shared=0,
            registers=20, stored=dv * size, vector=min(16, splits) * dv * 2,
        ))
    return works
