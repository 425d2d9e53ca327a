from __future__ import annotations

import wavecrest.ops._rows as _rows
from wavecrest.ops import _work
from wavecrest.ops.mla_decode.key import KEY_FIELDS, shape_of
from wavecrest.tuned.cost_model import Work


def of_key(backend, key, config, arch):
    part = dict(zip(KEY_FIELDS, key, strict=True))
    shape = shape_of(key)
    m, n, warps, stages = (config[x] for x in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
    d = shape.width + max(16, _rows.power_of_two(part["rotary"]))
    size = shape.bits / 8
    batch = max(1, shape.batch)
    capacity = max(1, shape.capacity)
    splits = max(1, _rows.ceil_div(capacity, config["KEYS"]))
    if config["SPLITS"] > 0:
        splits = min(splits, config["SPLITS"])
    share = _rows.ceil_div(_rows.ceil_div(capacity, splits), config["KEYS"]) * config["KEYS"] if splits > 1 else capacity
    splits = _rows.ceil_div(capacity, share)
    blocks = _rows.ceil_div(shape.rows, m)
    steps = _rows.ceil_div(share, n)
    loaded = n * d * size
    wide = arch.name in _work.WIDE_UNIT and m >= 64 and warps % 4 == 0 and size <= 2
    dtype = part["dtype"]
    scores = _work.product(m, n, d, shape.bits, warps, arch, wide, dtype)
    values = _work.product(m, shape.width, n, shape.bits, warps, arch, wide, dtype, not wide)
    vector = m * n * (_work.softmax(arch) + 4 * shape.more) + m * shape.width
    lanes = warps * arch.wave_size
    staged = loaded / 4 / lanes if stages == 1 else 0
    rows = min(m, shape.rows)
    hopper = backend == "triton_hopper"
    works = [Work(
        programs=batch * splits * blocks, warps=12 if hopper else warps, steps=steps, loaded=loaded,
        fresh=batch * capacity * (part["latent"] + part["rotary"]) * size, depth=2 if hopper else _work.depth(stages, wide, arch),
        shared=int(((stages if arch.vendor == "nvidia" else max(0, stages - 1)) * n + (m if wide else 0)) * d * size),
        registers=m * (shape.width + n) / lanes + (0 if wide else m * d * size / 4 / lanes) + staged,
        stored=rows * shape.width * (4 if splits > 1 else size), matrix=scores.flops + values.flops, dtype=dtype,
        rate=scores.rate, vector=vector, lds=scores.lds + values.lds + 2 * loaded,
        chain=scores.chain + values.chain + _work.REDUCE + (_work.EXCHANGE if warps > 1 else 0),
    )]
    if splits > 1:
        works.append(Work(
            programs=batch * shape.rows, warps=4, steps=splits, loaded=shape.width * 4, ends=1000, fresh=0, depth=0,
            shared=0, registers=20, stored=shape.width * size, vector=shape.width * 2,
        ))
    return works
