"""Study of the op memcpy, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from functools import partial

import torch

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.hardware import Arch
from wavecrest.ops._memcpy.call import WORD_BYTES, MemcpyCall, words_of
from wavecrest.ops._memcpy.launch import launch
from wavecrest.ops._memcpy.study.cases import bench_cases, compile_cases, emulate_cases, inputs
from wavecrest.ops._memcpy.study.space import space
from wavecrest.ops._memcpy.study.work import work
from wavecrest.ops.common.launcher import Launch


def studies() -> dict[str, Study[MemcpyCall]]:
    """By the op's name."""
    kernels = {"triton": KernelStudy(space=space, launches=_launches, work=work)}
    return {
        "memcpy": Study(
            inputs=inputs,
            cost=_cost,
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            model=partial(propose, kernels),
            kernels=kernels,
        )
    }


def _launches(call: MemcpyCall, config: Config, arch: Arch) -> list[Launch]:
    words = words_of(call.x)
    y = torch.empty((), dtype=torch.int64, device=words.device) if call.mode == "read" else words
    return [launch(call, words, y, config)] if words.numel() > 0 else []


def _cost(call: MemcpyCall) -> Cost:
    flops = call.nbytes // WORD_BYTES if call.mode == "read" else 0
    return Cost(flops=flops, bytes=call.nbytes * (2 if call.mode == "copy" else 1))
