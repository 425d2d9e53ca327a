"""Where kernels let the next one start and wait for the one before, as JSON: `python dependent.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import wavecrest.ops.common.launcher as _launcher
from tests.compile.known import Known
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.isa import compiler
from wavecrest.ops._gemm.call import GemmCall

TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "triton": TILE | {"SPLIT_K": 4, "PERSISTENT": 0, "TMA": 0},
    "triton_stream_k": TILE | {"PROGRAMS": 1, "TMA": 0},
    "triton_gemv": {"BLOCK_N": 8, "BLOCK_K": 256, "SPLIT_K": 2, "num_warps": 2, "num_stages": 3, "EARLY": 0},
}
DECODING = {"BLOCK_M": 16, "BLOCK_N": 64, "CHUNK": 512, "num_warps": 4, "num_stages": 3}
SPLIT = {"SPLITS": 8, "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4}


# as a decode step calls them; each fetches two steps first
EARLY = {"EARLY": 3}
SKINNY = {"BLOCK_N": 4, "BLOCK_K": 512, "SPLIT_K": 1, "num_warps": 2, "num_stages": 3}
Planned = list[tuple[str, _launcher.Launch]]


def product(M: int, N: int, K: int, weight: torch.dtype, form: str = "plain") -> GemmCall:
    """x @ weightᵀ with the scales of the weight, gated where it is of 8 bits."""
    a = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    if form == "int4":
        b, scale = a.new_empty(N, K // 2, dtype=weight).mT, a.new_empty(N, K // 128, dtype=torch.float32).mT
        return GemmCall(a, b, scale_b=scale, form=form, group=128)
    b = a.new_empty(N, K, dtype=weight).mT
    if weight.itemsize == 2:
        return GemmCall(a, b)
    return GemmCall(a, b, scale_b=a.new_empty(N, dtype=torch.float32), activation="silu_and_mul")


def normed(call: GemmCall) -> GemmCall:
    """The same with rows that are normalised on the way."""
    return call._replace(norm_weight=call.a.new_empty(call.K))


def first_launches(arch: str, more: dict[str, int]) -> Planned:
    """The launches of calls whose first one may start early, by name; `more`: of their configurations."""
    gemm, step, norm = (registry.get(name) for name in ("gemm", "mlstm_step", "add_rms_norm"))
    bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
    token = step.study.inputs(1, 8, 256, bf16, "meta")._replace(in_place=True)
    words = SKINNY | {"BLOCK_K": 1024, "num_stages": 1}
    streamed = {"BLOCK_N": 16, "AHEAD": 4, "num_warps": 4, "num_stages": 1}
    described = TILE | {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "SPLIT_K": 1, "PERSISTENT": 0, "TMA": 1}
    cases: list[tuple[str, Any, str, dict[str, int], Any]] = [
        ("rows", gemm, "triton_gemv", SKINNY, product(1, 4096, 4096, bf16)),
        ("gated rows", gemm, "triton_gemv", SKINNY, product(1, 4096, 4096, int8)),
        ("normed rows", gemm, "triton_gemv", SKINNY, normed(product(1, 4096, 4096, bf16))),
        ("normed words", gemm, "triton_gemv", words, normed(product(1, 4096, 4096, torch.uint8, "int4"))),
        ("tiles", gemm, "triton", CONFIGS["triton"], product(16, 4096, 4096, bf16)),
        ("gated tiles", gemm, "triton", TILE | {"SPLIT_K": 1, "PERSISTENT": 1, "TMA": 0}, product(16, 4096, 4096, fp8)),
        ("descriptors", gemm, "triton", described, product(1024, 4096, 4096, bf16)),
        ("words", gemm, "triton_gemv", words, product(1, 4096, 4096, torch.uint8, "int4")),
        ("digits", gemm, "triton_hopper_words", streamed, normed(product(1, 4096, 4096, torch.uint8, "int4"))),
        ("step", step, "triton", step.config_of("triton", step.key(token)).kwargs, token),
    ]
    found = []
    for name, op, backend, config, args in cases:
        launches = op.study.kernel(backend).launches(args, Config(**config, **more), hardware.ARCHS[arch])
        found += [(f"{name} {launch.kernel.__name__}", launch) for launch in launches]
    append = registry.get("flash_decoding").study.compile_cases(hardware.ARCHS[arch])["append"]
    found.append((f"append {append.kernel.__name__}", append))
    config = {"BLOCK_M": 1, "BLOCK_N": 4096, "PACKED": 0, "num_warps": 8}
    launch = norm.study.compile_cases(hardware.ARCHS[arch], Config(**config, **more))["N=4096"]
    return [*found, (f"norm {launch.kernel.__name__}", launch)]


# of sm_90: programs of the next kernel may start; wait for the kernel before
ALLOWS, WAITS = re.compile(r"\bPREEXIT\b"), re.compile(r"\bACQBULK\b")
# loads, stores, atomics, and copies by the bulk copy engine
ACCESSES = re.compile(r"\b(LDG|LDGSTS|STG|RED|REDG|ATOM|ATOMG|UTMALDG|UTMASTG|UBLKCP)\b")
FETCHES = re.compile(r"\bCCTL\.E\.PF2\b")
LEAVES = re.compile(r"\b(BRA|EXIT)\b")


def facts(launch: _launcher.Launch, arch: str) -> dict[str, Any]:
    """If it is launched to start early, and the lines of its code that tell how it starts; `lines` counts all."""
    built: Any = compiler.build(launch, arch)
    option = bool(getattr(built.metadata, "launch_pdl", False))
    lines = compiler.compile_launch(launch, arch).listing.splitlines()
    telling = [line for line in lines if any(one.search(line) for one in (ALLOWS, WAITS, ACCESSES, FETCHES, LEAVES))]
    # of the same kind in a row one tells as much
    kinds = [[bool(one.search(line)) for one in (ALLOWS, WAITS, ACCESSES, FETCHES, LEAVES)] for line in telling]
    kept = [
        line.strip() for index, line in enumerate(telling)
        if index == 0 or kinds[index] != kinds[index - 1] or kinds[index][1]
    ]  # fmt: skip
    return {"option": option, "lines": len(lines), "code": "\n".join(["", *kept, ""])}


def main() -> None:
    gemm, decoding, found = registry.get("gemm"), registry.get("flash_decoding"), {}
    known = Known(__file__)

    def told(launch: _launcher.Launch, arch: str) -> Any:
        return known.answer(launch, arch, functools.partial(facts, launch, arch))

    product = gemm.study.inputs(4, 4096, 4096, torch.bfloat16, "meta")
    calls = [(gemm, backend, config, product) for backend, config in CONFIGS.items()]
    calls.append((decoding, "triton", DECODING, decoding.study.inputs(1, 8, 4096, 128, torch.bfloat16, "meta")))
    latent = registry.get("mla_decode")
    cached = latent.study.inputs(1, 128, 8192, torch.bfloat16, "meta")
    calls.append((latent, "triton", latent.config_of("triton", latent.key(cached)).kwargs | SPLIT, cached))
    step = registry.get("mlstm_step")
    token = step.study.inputs(1, 8, 256, torch.bfloat16, "meta")._replace(in_place=True)
    calls.append((step, "triton", step.config_of("triton", step.key(token)).kwargs, token))
    sparse = registry.get("moe")
    routed = sparse.study.inputs(64, 512, 512, torch.bfloat16, "meta")
    calls.append((sparse, "triton", sparse.config_of("triton", sparse.key(routed)).kwargs, routed))
    for arch in ("sm_90", "sm_80", "gfx942"):
        for op, backend, config, args in calls:
            launches = op.study.kernel(backend).launches
            assert launches is not None
            for launch in launches(args, Config(**config), hardware.ARCHS[arch]):
                found[f"{arch} {backend} {launch.kernel.__name__}"] = told(launch, arch)
    found |= {f"early {name}": told(launch, "sm_90") for name, launch in first_launches("sm_90", EARLY)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
