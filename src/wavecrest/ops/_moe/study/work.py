"""Work of the mixture-of-experts kernels, for the cost model; tokens are taken to choose experts evenly."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch
from wavecrest.ops._moe.config import Shape
from wavecrest.ops._moe.key import KEY_FIELDS, shape_of
from wavecrest.ops._moe.launch import SORTED_PAIRS, SUMMED_COLUMNS

# vector operations that the sort needs for a pair it looks at: its id, counted, compared and ranked
_SORTED_OPERATIONS = 16.0


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launches of a call; nothing where its tokens are not known."""
    part, shape = dict(zip(KEY_FIELDS, key, strict=True)), shape_of(key)
    if shape.pairs == 0:
        return ()
    dtype = str(part["dtype"])
    made = [] if config["DIRECT"] else [_sorted(shape, arch)]
    made += [
        _gemm(shape, config, arch, dtype, (shape.intermediate, shape.hidden, config["BLOCK_N"], config["BLOCK_K"]), 2),
        _gemm(shape, config, arch, dtype, (shape.hidden, shape.intermediate, config["DOWN_N"], config["DOWN_K"]), 1),
    ]
    columns = min(SUMMED_COLUMNS, _layout.power_of_two(shape.hidden))
    programs = shape.tokens * _layout.ceil_div(shape.hidden, columns)
    return (*made, _work.summed(programs, shape.topk, 1, columns * shape.bits / 32, shape.bits / 8))


def _sorted(shape: Shape, arch: Arch) -> Work:
    return Work(
        programs=shape.experts + 1, warps=4, steps=2 * _layout.ceil_div(shape.pairs, SORTED_PAIRS),
        loaded=min(SORTED_PAIRS, shape.pairs) * 8, fresh=shape.pairs * 8, registers=40.0,
        stored=shape.rows * 4, vector=SORTED_PAIRS * _SORTED_OPERATIONS,
        chain=_work.REDUCED_CYCLES + _work.EXCHANGED_CYCLES,
    )  # fmt: skip


def _gemm(shape: Shape, config: Config, arch: Arch, dtype: str, sizes: tuple[int, int, int, int], weights: int) -> Work:
    """A grouped GEMM of `weights` matrices beside each other, of these sizes: N, K, BLOCK_N, BLOCK_K."""
    n, k, block_n, block_k = sizes
    m, warps, stages, size = config["BLOCK_M"], config["num_warps"], config["num_stages"], shape.bits / 8
    chosen = min(shape.experts, shape.pairs)
    blocks = shape.pairs if config["DIRECT"] else chosen * _layout.ceil_div(shape.rows, m)
    lanes, wide = warps * arch.wave_size, _work.wide(arch, m, warps, shape.bits)
    product = _work.product(m, weights * block_n, block_k, shape.bits, warps, arch)
    loaded = (m + weights * block_n) * block_k * size
    return Work(
        programs=blocks * _layout.ceil_div(n, block_n), warps=warps, steps=_layout.ceil_div(k, block_k), loaded=loaded,
        fresh=(chosen * weights * n * k + shape.pairs * k) * size, depth=_work.depth(stages, wide, arch),
        shared=_work.kept(loaded, stages, wide, arch),
        registers=m * weights * block_n / lanes + product.registers + _work.staged(loaded, lanes, stages, arch),
        stored=min(m, shape.rows) * block_n * size, matrix=product.flops, dtype=dtype, rate=product.rate,
        lds=product.lds + _work.COPIED_TWICE * loaded, chain=product.chain,
    )  # fmt: skip
