"""One tile of a large GEMM as machine code on a CPU, against float64: what its loop takes, by `wavecrest isa run`.

wavecrest isa run benchmarks/emulate_gemm_tile.py --arch gfx950 --check -- triton_cdna 32 1024
wavecrest isa run benchmarks/emulate_gemm_tile.py --arch gfx942 --check -- triton_cdna 32 1024 fp8

BACKEND, rows of a matrix instruction, K, and bf16 (the default) or fp8, the architecture's own with a scale for each
row and column; the portable kernel (`triton`) in the configuration of large GEMMs.
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


def main(backend: str, matrix: int, K: int, dtype: str) -> None:
    """Run the call and compare it."""
    torch.manual_seed(0)
    arch = target.arch()
    assert arch is not None
    a, weight = torch.randn(256, K), torch.randn(256, K)
    if dtype == "fp8":
        kind = torch.float8_e4m3fnuz if arch.fp8 == "e4m3fnuz" else torch.float8_e4m3fn
        call = GemmCall(a.to(kind), weight.to(kind).mT, scale_a=torch.rand(256), scale_b=torch.rand(256))
    else:
        call = GemmCall(a.bfloat16(), weight.bfloat16().mT)
    if backend == "triton":
        large = shape_of(key_of(call))._replace(rows=4096, columns=4096)
        config = Config(**(configs.tiled(large, arch).kwargs | {"matrix_instr_nonkdim": matrix}))
    else:
        config = configs.cdna(matrix, step=configs.cdna_step(8 * call.a.itemsize, arch))
    op.pin(op.key(call), backend, config, "user", "a tile to look at")
    got, want = op(call).double(), call.a.double() @ call.b.double()
    if call.scale_a is not None and call.scale_b is not None:
        want *= call.scale_a.double()[:, None] * call.scale_b.double()
    worst = float((got - want).abs().max() / want.abs().max())
    sys.stderr.write(f"{backend} {config}: largest error {worst:.1e} of the largest result\n")
    assert worst < 8e-3, worst


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "bf16")
