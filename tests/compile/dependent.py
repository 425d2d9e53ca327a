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
from wavecrest.ops._mlstm_operands import StepOperands
from wavecrest.tuned import Config

TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "triton": TILE | {"SPLIT_K": 4, "PERSISTENT": 0, "TMA": 0},
    "triton_stream_k": TILE | {"PROGRAMS": 1, "TMA": 0},
    "triton_multiply": {"BLOCK_N": 8, "BLOCK_K": 256, "SPLIT_K": 2, "num_warps": 2, "num_stages": 3},
}
DECODING = {"BLOCK_M": 16, "BLOCK_N": 64, "CHUNK": 512, "num_warps": 4, "num_stages": 3}
SPLIT = {"SPLITS": 8, "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4}


def main() -> None:
    gemm, decoding, found = registry.get("gemm"), registry.get("flash_decoding"), {}
    product = gemm.inputs(4, 4096, 4096, torch.bfloat16, "meta")
    calls = [(gemm, backend, config, product) for backend, config in CONFIGS.items()]
    calls.append((decoding, "triton", DECODING, decoding.inputs(1, 8, 4096, 128, torch.bfloat16, "meta")))
    latent = registry.get("mla_decode")
    cached = latent.inputs(1, 128, 8192, torch.bfloat16, "meta")
    calls.append((latent, "triton", latent.config_of("triton", latent.key(*cached)).kwargs | SPLIT, cached))
    step = registry.get("mlstm_step")
    token = StepOperands(*step.inputs(1, 8, 256, torch.bfloat16, "meta"))._replace(in_place=True)
    calls.append((step, "triton", step.config_of("triton", step.key(*token)).kwargs, token))
    for arch in ("sm_90", "sm_80", "gfx942"):
        for op, backend, config, args in calls:
            launches = op.backends[backend].launches
            assert launches is not None
            for launch in launches(*args, config=Config(**config), arch=hardware.ARCHS[arch]):
                compiled: Any = compiler.build(launch, arch)
                found[f"{arch} {backend} {launch.kernel.__name__}"] = {
                    "option": bool(getattr(compiled.metadata, "launch_pdl", False)),
                    "code": compiler.compile_launch(launch, arch).listing,
                }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
