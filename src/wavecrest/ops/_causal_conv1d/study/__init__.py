"""Study of the op causal_conv1d, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall
from wavecrest.ops._causal_conv1d.launch import launch
from wavecrest.ops._causal_conv1d.study.cases import bench_cases, call_of_key, compile_cases, emulate_cases, inputs
from wavecrest.ops._causal_conv1d.study.space import space
from wavecrest.ops.common.launcher import Launch


def studies() -> dict[str, Study[CausalConv1dCall]]:
    """By the op's name."""
    study = Study(
        inputs=inputs,
        sizes=("B", "S", "C"),
        cost=_cost,
        compile_cases=compile_cases,
        bench_cases=bench_cases,
        emulate_cases=emulate_cases,
        call_of_key=call_of_key,
        kernels={"triton": KernelStudy(space=space, launches=_launches)},
    )
    return {"causal_conv1d": study}


def _launches(call: CausalConv1dCall, config: Config, arch: Arch) -> list[Launch]:
    return [launch(call, torch.empty_like(call.x, device="meta"), config)] if call.x.numel() > 0 else []


def _cost(call: CausalConv1dCall) -> Cost:
    read = sum(one.nbytes for one in call if isinstance(one, Tensor))
    return Cost(flops=2 * call.taps * call.x.numel(), bytes=read + call.x.nbytes)
