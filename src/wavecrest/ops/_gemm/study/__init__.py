"""Study of gemm, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from functools import partial

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_gemv as _gemv
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.study import bound, cases, space, work

# by backend: what plans its launches, and its default configuration
_PLANNED = {
    "triton": (_launch.tiles, _config.tiled),
    "triton_stream_k": (_launch.stream, _config.stream_k),
    "triton_gemv": (_gemv.gemv, _config.gemv),
}


def studies() -> dict[str, Study[GemmCall]]:
    """By the op's name."""
    kernels: dict[str, KernelStudy[GemmCall]] = {
        name: KernelStudy(
            partial(space.space, name, default), partial(space.launches, planner), partial(work.work, name)
        )
        for name, (planner, default) in _PLANNED.items()
    }
    kernels["triton_hopper"] = KernelStudy(
        space.hopper_space, space.hopper_launches, partial(work.work, "triton_hopper")
    )
    # it rounds as PyTorch does: measured rows may choose it, and no model of its work
    kernels["triton_hopper_epilogue"] = KernelStudy(space.epilogue_space, space.epilogue_launches)
    kernels["triton_hopper_blocks"] = KernelStudy(
        space.blocks_space, space.blocks_launches, partial(work.work, "triton_hopper_blocks")
    )
    # no model of its work yet: all of its few configurations are tried
    kernels["triton_hopper_words"] = KernelStudy(space.words_space, space.words_launches)
    kernels["triton_cdna"] = KernelStudy(space.cdna_space, space.cdna_launches, partial(work.work, "triton_cdna"))
    study = Study(
        inputs=cases.inputs,
        cost=cases.cost,
        sizes=("M", "N", "K"),
        example_dtypes=(
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "int8",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
        ),
        compile_cases=cases.compile_cases,
        bench_cases=cases.bench_cases,
        emulate_cases=cases.emulate_cases,
        unpacked=cases.unpacked,
        bound=bound.bound,
        call_of_key=cases.call_of_key,
        kernels=kernels,
    )
    return {"gemm": study}
