"""Study of the op conv2d, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

import math
from functools import partial

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops._conv2d.launch import launch
from wavecrest.ops._conv2d.study.cases import bench_cases, compile_cases, emulate_cases, inputs
from wavecrest.ops._conv2d.study.space import space
from wavecrest.ops._conv2d.study.work import work
from wavecrest.ops.common.launcher import Launch


def studies() -> dict[str, Study[Conv2dCall]]:
    """By the op's name."""
    kernels = {"triton": KernelStudy(space=space, launches=_launches, work=work)}
    return {
        "conv2d": Study(
            inputs=inputs,
            cost=_cost,
            sizes=("B", "C", "H", "O"),
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            model=partial(propose, kernels),
            kernels=kernels,
        )
    }


def _launches(call: Conv2dCall, config: Config, arch: Arch) -> list[Launch]:
    return [launch(call, call.x, config, arch)] if math.prod(call.shape) > 0 else []


def _cost(call: Conv2dCall) -> Cost:
    """Image, weight and bias read once, the result written once."""
    results = math.prod(call.shape)
    moved = call.x.nbytes + call.weight.nbytes + results * call.x.element_size()
    return Cost(flops=2 * results * call.K, bytes=moved + (0 if call.bias is None else call.bias.nbytes))
