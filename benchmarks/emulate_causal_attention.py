"""One head of causal attention as machine code on a CPU, against float64: what it takes, by `wavecrest isa run`.

wavecrest isa run benchmarks/emulate_causal_attention.py --arch gfx942 --check -- 2048 128 32 4 2 2 32

Tokens, then BLOCK_M, BLOCK_N, num_warps, num_stages, waves_per_eu and matrix_instr_nonkdim of the portable kernel, or
nothing for its default; bfloat16, or float16 with a last argument fp16; D = 128.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional
from triton.runtime import driver

from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_attention.backend import default_config, op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
D = 128


def main(dtype: torch.dtype, tokens: int, *chosen: int) -> None:
    """Run the call, compare it, and count."""
    torch.manual_seed(0)
    call = FlashAttentionCall(*(torch.randn(1, 1, tokens, D).to(dtype) for _ in range(3)), "bhsd", causal=True)
    key = op.key(call)
    config = Config(**dict(zip(NAMES, chosen, strict=True))) if chosen else default_config(key)
    op.pin(key, "triton", config, "user", "a head to look at")
    got = op(call)
    assert isinstance(got, torch.Tensor)
    want = functional.scaled_dot_product_attention(call.q.double(), call.k.double(), call.v.double(), is_causal=True)
    worst = float((got.double() - want).abs().max())
    stats = driver.active.runs[-1].stats
    # two GEMMs of the pairs of a query and a key that it sees
    useful = 4 * D * tokens * (tokens + 1) // 2
    sys.stderr.write(
        f"{config}: largest error {worst:.1e}; {useful / stats.instructions:,.0f} useful operations an instruction\n"
    )
    assert worst < 2e-2, worst


if __name__ == "__main__":
    half = sys.argv[-1] == "fp16"
    main(torch.float16 if half else torch.bfloat16, *map(int, sys.argv[1 : -1 if half else None]))
