from __future__ import annotations

import wavecrest.ops._rows as _rows
from wavecrest.ops import _work
from wavecrest.ops.conv2d.op import KEY_FIELDS, _shape_of
from wavecrest.tuned.cost_model import Work


def of_key(backend, key, config, arch):
    part = dict(zip(KEY_FIELDS, key, strict=True))
    shape = _shape_of(key)
    m, n, k, warps, stages = (config[x] for x in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"))
    size = shape.bits / 8
    if config["FLAT"]:
        steps = _rows.ceil_div(shape.channels * shape.taps, k)
    else:
        steps = _rows.ceil_div(shape.channels, k) * shape.taps
    rows = max(1, shape.rows)
    programs = _rows.ceil_div(rows, m) * _rows.ceil_div(shape.outputs, n) * shape.groups
    wide = arch.name in _work.WIDE_UNIT and m >= 64 and warps % 4 == 0 and size <= 2
    dtype = part["dtype"]
    product = _work.product(m, n, k, shape.bits, warps, arch, wide, dtype)
    a, b = m * k * size, n * k * size
    # elements of an access: where channels do not lie side by side, one at a time
    x_wide = 16 / size if part["x"] == "channels" and not config["FLAT"] and shape.channels % 8 == 0 else 1
    w_wide = 16 / size if part["weight"] == "channels" and shape.channels % 8 == 0 else 1
    vector = m * k / x_wide * 12 + n * k / w_wide * 12
    lanes = warps * arch.wave_size
    alone = x_wide == 1 or w_wide == 1
    held = ((m * k if x_wide == 1 else 0) + (n * k if w_wide == 1 else 0)) * 2 / lanes
    return [Work(
        programs=programs, warps=warps, steps=steps, loaded=a + b,
        fresh=(rows * shape.channels + shape.outputs * shape.channels * shape.taps) * shape.groups * size,
        depth=_work.depth(stages, wide, arch), shared=int((stages if wide else stages - 1) * (a + b)),
        registers=m * n / lanes + product.registers + held, stored=min(m, rows) * min(n, shape.outputs) * size,
        matrix=product.flops, dtype=dtype, rate=product.rate, vector=vector, lds=product.lds + 2 * (a + b),
        chain=product.chain,
    )]
