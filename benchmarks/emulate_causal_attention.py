"""Causal attention as machine code on a CPU, against float64: what it takes, by `wavecrest isa run`.

wavecrest isa run benchmarks/emulate_causal_attention.py --arch gfx942 --check -- 2048 128 32 4 2 2 32
wavecrest isa run benchmarks/emulate_causal_attention.py --arch gfx950 --check -- triton_cdna 2048
wavecrest isa run benchmarks/emulate_causal_attention.py --arch gfx942 --check -- 512 heads=16 units=2 PERSISTENT=1

The backend (the portable kernel where it is not named) and tokens, then of the portable kernel BLOCK_M, BLOCK_N,
num_warps, num_stages, waves_per_eu and matrix_instr_nonkdim, or nothing for its default; bfloat16, or float16 with a
last argument fp16. With `heads`, of one head otherwise; with `D`, of 128 otherwise; other names are parts of the
configuration, of which PERSISTENT has `units` compute units for its programs, so that these have more than one tile.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch.nn import functional
from triton.runtime import driver

from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_attention.backend import cdna_config, default_config, op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops.common import target

NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")


def main(
    dtype: torch.dtype, backend: str, tokens: int, *chosen: int, heads: int = 1, D: int = 128, **more: int
) -> None:
    """Run the call, compare it, and count."""
    torch.manual_seed(0)
    call = FlashAttentionCall(*(torch.randn(1, heads, tokens, D).to(dtype) for _ in range(3)), "bhsd", causal=True)
    key = op.key(call)
    default = cdna_config if backend == "triton_cdna" else default_config
    config = Config(**dict(zip(NAMES, chosen, strict=True))) if chosen else default(key)
    config = Config(**(config.kwargs | more))
    op.pin(key, backend, config, "user", "a call to look at")
    got = op(call)
    assert isinstance(got, torch.Tensor)
    want = functional.scaled_dot_product_attention(call.q.double(), call.k.double(), call.v.double(), is_causal=True)
    worst = float((got.double() - want).abs().max())
    stats = driver.active.runs[-1].stats
    # two GEMMs of the pairs of a query and a key that it sees
    useful = heads * 4 * D * tokens * (tokens + 1) // 2
    sys.stderr.write(
        f"{config}: largest error {worst:.1e}; {useful / stats.instructions:,.0f} useful operations an instruction\n"
    )
    assert worst < 2e-2, worst


def _with_units(units: int) -> None:
    """Have the architecture as many compute units."""
    arch = target.arch()
    assert arch is not None
    target.arch = lambda: replace(arch, compute_units=units)


if __name__ == "__main__":
    half = sys.argv[-1] == "fp16"
    given = sys.argv[1 : -1 if half else None]
    named = {word: int(number) for word, _, number in (one.partition("=") for one in given if "=" in one)}
    given = [one for one in given if "=" not in one]
    name = "triton" if given[0].isdigit() else given.pop(0)
    if "units" in named:
        _with_units(named.pop("units"))
    main(torch.float16 if half else torch.bfloat16, name, *map(int, given), **named)
