"""Attention of windows as machine code on a CPU, against float64: instructions a window, by `wavecrest isa run`.

wavecrest isa run benchmarks/emulate_short_attention.py --arch gfx942 --check -- triton_short 64
wavecrest isa run benchmarks/emulate_short_attention.py --arch gfx942 --check -- triton 64 tokens=128 D=64 bias=0

The backend and the number of sequences; names are the rest: `heads` (2), `tokens` (49), `D` (32), whether there is a
`bias` that all sequences share, `units` of the device (2), and parts of the configuration, by default that of the
backend. float16.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch.nn import functional
from triton.runtime import driver

from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_attention.backend import default_config, op, short_config
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops.common import target


def main(
    backend: str, batch: int, heads: int = 2, tokens: int = 49, D: int = 32, bias: int = 1, units: int = 2, **more: int
) -> None:
    """Run the call, compare it, and count."""
    arch = target.arch()
    assert arch is not None
    few = replace(arch, compute_units=units)
    target.arch = lambda: few
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, D).half() for _ in range(3))
    added = torch.randn(1, heads, tokens, tokens).half() if bias else None
    call = FlashAttentionCall(q, k, v, bias=added)
    key = op.key(call)
    default = short_config if backend == "triton_short" else default_config
    config = Config(**(default(key).kwargs | more))
    op.pin(key, backend, config, "user", "a call to look at")
    got = op(call)
    assert isinstance(got, torch.Tensor)
    wide = (call.bhsd(one).double() for one in (q, k, v))
    want = functional.scaled_dot_product_attention(*wide, attn_mask=None if added is None else added.double())
    worst = float((call.bhsd(got).double() - want).abs().max())
    stats = driver.active.runs[-1].stats
    each = stats.instructions / (batch * heads)
    sys.stderr.write(f"{config}: largest error {worst:.1e}; {each:,.0f} instructions a head of a sequence\n")
    assert worst < 4e-3, worst


if __name__ == "__main__":
    words = [one for one in sys.argv[1:] if "=" not in one]
    named = {word: int(number) for word, _, number in (one.partition("=") for one in sys.argv[1:] if "=" in one)}
    main(words[0], int(words[1]), **named)
