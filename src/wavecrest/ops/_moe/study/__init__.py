"""Study of the op moe, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

import torch

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.ops._moe.call import MoeCall
from wavecrest.ops._moe.launch import launches
from wavecrest.ops._moe.study.cases import bench_cases, call_of_key, compile_cases, emulate_cases, inputs
from wavecrest.ops._moe.study.space import space
from wavecrest.ops._moe.study.work import work


def studies() -> dict[str, Study[MoeCall]]:
    """By the op's name."""
    kernels = {"triton": KernelStudy(space=space, launches=launches, work=work)}
    return {
        "moe": Study(
            inputs=inputs,
            cost=cost_of,
            sizes=("M", "N", "K"),
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            call_of_key=call_of_key,
            kernels=kernels,
        )
    }


def cost_of(call: MoeCall) -> Cost:
    """The weights of the experts that are chosen read once, three GEMMs over their tokens."""
    ids, pairs, chosen = call.topk_ids, call.num_pairs, min(call.num_pairs, call.experts)
    if ids.device.type != "meta":
        here = ids[(ids >= 0) & (ids < call.experts)]
        pairs, chosen = here.numel(), int(torch.unique(here).numel())
    moved = chosen * sum(one.numel() // call.experts * one.element_size() for one in (call.w1, call.w2))
    moved += 2 * call.x.nbytes
    beside = (call.b1, call.b2, call.w1_scale, call.w2_scale, call.w1_zero, call.w2_zero)
    moved += sum(one.nbytes // call.experts * chosen for one in beside if one is not None)
    return Cost(
        flops=2 * pairs * 3 * call.hidden * call.intermediate,
        bytes=moved + ids.nbytes + call.topk_weights.nbytes,
    )
