"""Compile products with each combination of options, with small tiles: their kernels as JSON, `python gemm_paths.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tests.ops.gemm_harness as h
from tests.compile.known import Known
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.isa.compiler import compile_launch
from wavecrest.ops._gemm import launch as L
from wavecrest.ops._gemm import launch_gemv as few
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops.common.launcher import Launch


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls() -> dict[str, GemmCall]:
    """The combinations by name."""
    made: dict[str, GemmCall] = {}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for blocks_a, blocks_b in itertools.product((0, 1), repeat=2):
            made[f"{dtype} {blocks_a}{blocks_b}"] = GemmCall(
                empty(5, 300, dtype=dtype),
                empty(20, 300, dtype=dtype).mT,
                out_dtype=torch.float32,
                scale_a=empty(5, 3) if blocks_a else empty(5),
                scale_b=empty(3, 1) if blocks_b else empty(20),
            )
    bf16 = torch.bfloat16
    int4 = empty(20, 160, dtype=torch.uint8).mT
    zero = empty(3, 20, dtype=torch.uint8)
    made["int4"] = GemmCall(empty(5, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, zero=zero)
    made["weight groups"] = GemmCall(
        empty(5, 300, dtype=bf16), empty(20, 300, dtype=torch.int8).mT, scale_b=empty(10, 20), group=32
    )
    made["shuffled"] = GemmCall(empty(5, 320, dtype=bf16), empty(32, 320, dtype=bf16).mT, form="shuffled")
    far = torch.empty_strided((5, 320), (2**31 + 16, 1), dtype=bf16, device="meta")
    made["far rows"] = GemmCall(far, empty(32, 320, dtype=bf16).mT)
    far = torch.empty_strided((3, 20), (2**31 + 16, 1), dtype=bf16, device="meta")
    made["far columns"] = GemmCall(empty(5, 3, dtype=bf16), far)
    three = empty(2, 3, 4, 320, dtype=bf16).permute(2, 1, 0, 3)
    made["three strides"] = GemmCall(three, empty(32, 320, dtype=bf16).mT)
    made["steps"] = GemmCall(empty(10, 600, dtype=bf16)[::2, ::2], empty(300, 60, dtype=bf16)[:, ::3])
    made["columns"] = GemmCall(empty(300, 5, dtype=bf16).t(), empty(300, 20, dtype=bf16))
    made["gated int8 out"] = GemmCall(
        empty(5, 300),
        empty(40, 300).mT,
        empty(40),
        activation="gelu_and_mul",
        residual=empty(5, 20),
        out_dtype=torch.int8,
        out_scale=empty(),
    )
    made["batch"] = GemmCall(empty(3, 5, 300), empty(3, 300, 20), empty(5), bias_along="m", activation="leaky_relu")
    made["int32"] = GemmCall(empty(5, 300, dtype=torch.int8), empty(20, 300, dtype=torch.int8).mT)
    normed: dict[str, Any] = {"norm_weight": empty(300, dtype=bf16)}
    made["normed"] = GemmCall(empty(8, 300, dtype=bf16), empty(20, 300, dtype=bf16).mT, **normed)
    made["normed gated"] = GemmCall(
        empty(3, 300, dtype=torch.float16),
        empty(40, 300, dtype=torch.float8_e5m2).mT,
        empty(40),
        None,
        empty(40),
        empty(3, 20),
        activation="silu_and_mul",
        **normed,
    )
    made["normed tiles"] = GemmCall(
        empty(40, 300, dtype=bf16),
        empty(40, 300, dtype=torch.int8).mT,
        empty(40),
        None,
        empty(40),
        empty(40, 20),
        activation="silu_and_mul",
        **normed,
    )
    made["normed fp32"] = GemmCall(empty(5, 300), empty(300, 20), **normed)
    made["normed int4"] = GemmCall(
        empty(2, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, **normed
    )
    return made


def kernel(launch: Launch, arch: str) -> list[str]:
    """The name of a kernel that compiles."""
    return [compile_launch(launch, arch).kernel]


def main() -> None:
    plans = [
        (L.tiles, h.tile(k=64, num_warps=1)),
        (L.stream, h.stream(k=64)),
        (few.gemv, h.multiply(split=2)),
        (L.tiles, h.tile(k=64, num_warps=1, SPLIT_K=2, PERSISTENT=1)),
    ]
    known, compiled = Known(__file__), list[str]()
    for turn, (name, call) in enumerate(calls().items()):
        planner, config = plans[turn % 4]
        if (planner is L.stream and call.activation in h.GATED) or (planner is few.gemv and few.refusal(call)):
            planner, config = plans[3]
        if call.norm_weight is not None:
            planner, config = L.tiles, h.tile(k=64, num_warps=1)
            if L.cannot_normalise(call) or name == "normed":
                planner, config = few.gemv, h.multiply(k=128)
        if call.group == 32:
            config = Config(**(config.kwargs | {"BLOCK_K": 32}))
        arch = ARCHS["gfx942" if turn % 3 else "sm_90"]
        plan = planner(call, empty(0, dtype=call.dtype), empty(0, dtype=L.partial_dtype(call)), config, arch, False)
        for launch in (plan.first, plan.second):
            if launch is not None:
                compiled += known.answer(launch, arch.name, functools.partial(kernel, launch, arch.name))
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main()
