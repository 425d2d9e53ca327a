"""Study of the op rope, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from functools import partial

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.hardware import Arch
from wavecrest.ops._rope.call import RopeCall, result_like
from wavecrest.ops._rope.launch import launch
from wavecrest.ops._rope.study.cases import bench_cases, call_of_key, compile_cases, emulate_cases, inputs
from wavecrest.ops._rope.study.space import space
from wavecrest.ops._rope.study.work import work
from wavecrest.ops.common.launcher import Launch


def studies() -> dict[str, Study[RopeCall]]:
    """By the op's name."""
    kernels = {"triton": KernelStudy(space=space, launches=_launches, work=work)}
    return {
        "rope": Study(
            inputs=inputs,
            cost=_cost,
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            call_of_key=call_of_key,
            model=partial(propose, kernels),
            kernels=kernels,
        )
    }


def _launches(call: RopeCall, config: Config, arch: Arch) -> list[Launch]:
    return [launch(call, result_like(call.x), config)] if call.x.numel() > 0 else []


def _cost(call: RopeCall) -> Cost:
    x, cos, positions = call.x, call.cos, call.positions
    tokens, half = call.num_tokens, cos.shape[-1]
    if positions is not None:
        # as many rows as there are positions, and no more than the table has
        rows, read = min(positions.numel(), cos.shape[0]), positions.nbytes
    else:
        rows, read = (cos.numel() // half if cos.ndim > 2 else x.shape[-3]), 0
    tables = 2 * rows * half * cos.element_size() if tokens else 0
    return Cost(flops=6 * tokens * x.shape[-2] * half, bytes=2 * x.nbytes + tables + read)
