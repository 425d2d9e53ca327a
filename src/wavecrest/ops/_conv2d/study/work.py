"""Work of the convolution kernel, for the cost model: bytes, operations and steps by configuration."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.key import KEY_FIELDS, shape_of

# vector operations of an access: its address, its mask, and the load
_ACCESS_OPERATIONS = 12.0


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launch of a call; nothing where its pixels are not known."""
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if 0 in (shape.rows, shape.outputs, shape.channels):
        return ()
    m, n, k, warps, stages = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"))
    size, lanes, flat = shape.bits / 8, warps * arch.wave_size, config["FLAT"] == 1
    steps = _layout.ceil_div(shape.channels * (shape.taps if flat else 1), k) * (1 if flat else shape.taps)
    wide = _work.wide(arch, m, warps, shape.bits)
    product = _work.product(m, n, k, shape.bits, warps, arch)
    # elements of an access: one where channels do not lie side by side
    most = int(16 / size)
    whole = shape.channels % most == 0
    x_each = most if part["x"] == "channels" and not flat and whole else 1
    w_each = most if part["weight"] == "channels" and whole else 1
    accesses = m * k / x_each + n * k / w_each
    # an element that is loaded alone takes a register, and its address another
    alone = (m * k if x_each == 1 else 0) + (n * k if w_each == 1 else 0)
    loaded = (m + n) * k * size
    image = shape.rows * shape.channels + shape.outputs * shape.channels * shape.taps
    return (
        Work(
            programs=_layout.ceil_div(shape.rows, m) * _layout.ceil_div(shape.outputs, n) * shape.groups, warps=warps,
            steps=steps, loaded=loaded, fresh=image * shape.groups * size, depth=_work.depth(stages, wide, arch),
            shared=_work.kept(loaded, stages, wide, arch),
            registers=(m * n + 2.0 * alone) / lanes + product.registers + _work.staged(loaded, lanes, stages, arch),
            stored=min(m, shape.rows) * min(n, shape.outputs) * size, matrix=product.flops, dtype=part["dtype"],
            rate=product.rate, vector=accesses * _ACCESS_OPERATIONS,
            lds=product.lds + _work.COPIED_TWICE * loaded, chain=product.chain,
        ),
    )  # fmt: skip
