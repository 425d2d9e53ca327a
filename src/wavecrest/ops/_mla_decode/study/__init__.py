"""Study of the op mla_decode, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from functools import partial

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.ops._mla_decode import launch, launch_hopper
from wavecrest.ops._mla_decode.call import MlaDecodeCall
from wavecrest.ops._mla_decode.study.cases import bench_cases, compile_cases, emulate_cases, inputs
from wavecrest.ops._mla_decode.study.space import space, space_hopper
from wavecrest.ops._mla_decode.study.work import work


def studies() -> dict[str, Study[MlaDecodeCall]]:
    """By the op's name."""
    kernels = {
        "triton": KernelStudy(space=space, launches=launch.launches, work=partial(work, "triton")),
        "triton_hopper": KernelStudy(
            space=space_hopper, launches=launch_hopper.launches, work=partial(work, "triton_hopper")
        ),
    }
    return {
        "mla_decode": Study(
            inputs=inputs,
            cost=cost_of,
            sizes=("B", "H", "S"),
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            model=partial(propose, kernels),
            kernels=kernels,
        )
    }


def lengths_of(call: MlaDecodeCall) -> list[int]:
    """The keys of each sequence; all that fit where the call has no memory."""
    if call.seq_lens.device.type == "meta":
        return [call.max_seqlen_k] * call.batch
    lengths: list[int] = call.seq_lens.tolist()
    return lengths


def cost_of(call: MlaDecodeCall) -> Cost:
    """Each row of the cache read once, two GEMMs over it, and those of the weights."""
    lengths, t, h = lengths_of(call), call.seqlen_q, call.heads
    # query t of T sees the keys up to length − T + t
    pairs = sum(max(0, length - t + 1 + i) for length in lengths for i in range(t))
    flops = 2 * pairs * h * (2 * call.latent_dim + call.head_dim_rope)
    flops += 2 * call.batch * t * h * call.latent_dim * (call.head_dim_nope + call.head_dim_v)
    size = call.q_nope.element_size()
    moved = sum(lengths) * (call.latent_dim + call.head_dim_rope) * size + call.q_nope.nbytes + call.q_rope.nbytes
    moved += size * call.batch * t * h * (call.head_dim_v or call.latent_dim)
    moved += sum(one.nbytes for one in (call.w_uk, call.w_uv) if one is not None)
    return Cost(flops=flops, bytes=moved)
