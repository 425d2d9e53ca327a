"""Where split kernels let the next one start and wait for the one before, as JSON: `python dependent.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from wavecrest import hardware, registry
from wavecrest.isa import compiler
from wavecrest.tuned import Config

TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "triton": TILE | {"SPLIT_K": 4, "PERSISTENT": 0, "TMA": 0},
    "triton_stream_k": TILE | {"PROGRAMS": 1, "TMA": 0},
    "triton_multiply": {"BLOCK_N": 8, "BLOCK_K": 256, "SPLIT_K": 2, "num_warps": 2, "num_stages": 3},
}


def main() -> None:
    op, found = registry.get("gemm"), {}
    args = op.inputs(4, 4096, 4096, torch.bfloat16, "meta")
    for arch in ("sm_90", "sm_80", "gfx942"):
        for backend, config in CONFIGS.items():
            launches = op.backends[backend].launches
            assert launches is not None
            for launch in launches(*args, config=Config(**config), arch=hardware.ARCHS[arch]):
                compiled: Any = compiler.build(launch, arch)
                found[f"{arch} {backend} {launch.kernel.__name__}"] = {
                    "option": bool(getattr(compiled.metadata, "launch_pdl", False)),
                    "code": compiler.compile_launch(launch, arch).listing,
                }
        decode = registry.get("mla_decode")
        launches = decode.backends["triton"].launches
        assert launches is not None
        config = decode.config_of("triton", decode.key(*decode.inputs(1, 128, 8192, torch.bfloat16, "meta")))
        for launch in launches(
            *decode.inputs(1, 128, 8192, torch.bfloat16, "meta"),
            config=Config(**(config.kwargs | {"SPLITS": 8, "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4})),
            arch=hardware.ARCHS[arch],
        ):
            compiled = compiler.build(launch, arch)
            found[f"{arch} mla_decode {launch.kernel.__name__}"] = {
                "option": bool(getattr(compiled.metadata, "launch_pdl", False)),
                "code": compiler.compile_launch(launch, arch).listing,
            }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
