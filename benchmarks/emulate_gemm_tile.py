"""One tile of a large GEMM as machine code on a CPU, against float64: what its loop takes, by `wavecrest isa run`.

wavecrest isa run benchmarks/emulate_gemm_tile.py --arch gfx950 --check -- triton_cdna 32 1024

BACKEND, rows of a matrix instruction, and K; the portable kernel (`triton`) in the configuration of large GEMMs.
"""

from __future__ import annotations

import sys

import torch

from wavecrest.dispatch.tuned import Config
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops.common import target


def main(backend: str, matrix: int, K: int) -> None:
    """Run the call and compare it."""
    torch.manual_seed(0)
    a, weight = (torch.randn(256, K).to(torch.bfloat16) for _ in range(2))
    call = GemmCall(a, weight.mT)
    if backend == "triton":
        large = shape_of(key_of(call))._replace(rows=4096, columns=4096)
        config = Config(**(configs.tiled(large, target.arch()).kwargs | {"matrix_instr_nonkdim": matrix}))
    else:
        config = configs.cdna(matrix)
    op.pin(op.key(call), backend, config, "user", "a tile to look at")
    got, want = op(call).double(), a.double() @ weight.double().T
    worst = float((got - want).abs().max() / want.abs().max())
    sys.stderr.write(f"{backend} {config}: largest error {worst:.1e} of the largest result\n")
    assert worst < 8e-3, worst


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
