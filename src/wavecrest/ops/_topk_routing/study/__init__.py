"""Study of the op topk_routing, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.ops._topk_routing.call import TopkRoutingCall
from wavecrest.ops._topk_routing.launch import launches
from wavecrest.ops._topk_routing.study.cases import bench_cases, compile_cases, emulate_cases, inputs
from wavecrest.ops._topk_routing.study.space import space
from wavecrest.ops._topk_routing.study.work import work


def studies() -> dict[str, Study[TopkRoutingCall]]:
    """By the op's name."""
    kernels = {"triton": KernelStudy(space=space, launches=launches, work=work)}
    return {
        "topk_routing": Study(
            inputs=inputs,
            cost=_cost,
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            kernels=kernels,
        )
    }


def _cost(call: TopkRoutingCall) -> Cost:
    """Logits read once, weights and experts written once."""
    size, tokens = call.weights_dtype.itemsize, call.num_tokens
    bias = 0 if call.bias is None else call.bias.nbytes
    return Cost(
        flops=tokens * call.experts * (4 + call.k), bytes=call.logits.nbytes + tokens * call.k * (size + 4) + bias
    )
