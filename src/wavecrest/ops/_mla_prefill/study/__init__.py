"""Study of the op mla_prefill, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode import launch, launch_hopper
from wavecrest.ops._mla_decode.study import cost_of as cost_of_decoding
from wavecrest.ops._mla_decode.study import lengths_of
from wavecrest.ops._mla_decode.study.space import space, space_hopper
from wavecrest.ops._mla_prefill.backend import unsplit
from wavecrest.ops._mla_prefill.call import MlaPrefillCall
from wavecrest.ops._mla_prefill.launch import flops
from wavecrest.ops._mla_prefill.study.cases import bench_cases, compile_cases, emulate_cases, inputs


def studies() -> dict[str, Study[MlaPrefillCall]]:
    """By the op's name."""
    kernels: dict[str, KernelStudy[MlaPrefillCall]] = {
        "triton": KernelStudy(space=_space, launches=launch.launches),
        "triton_hopper": KernelStudy(space=_space_hopper, launches=launch_hopper.launches),
    }
    return {
        "mla_prefill": Study(
            inputs=inputs,
            cost=_cost,
            sizes=("B", "H", "T", "S"),
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            kernels=kernels,
        )
    }


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _unsplit(space(key, arch))


def _space_hopper(key: Key, arch: Arch) -> Iterator[Config]:
    return _unsplit(space_hopper(key, arch))


def _unsplit(configs: Iterable[Config]) -> Iterator[Config]:
    # each once: configurations that differ in splits alone may become the same
    return iter(dict.fromkeys(map(unsplit, configs)))


def _cost(call: MlaPrefillCall) -> Cost:
    """The cost of the form with fewer FLOPs, with the cache read once."""
    absorbed = cost_of_decoding(call)
    sizes = (call.latent_dim, call.head_dim_rope, call.head_dim_nope, call.head_dim_v)
    decompressed = sum(flops(call.seqlen_q, length, *sizes)[1] for length in lengths_of(call)) * call.heads
    return Cost(flops=min(absorbed.flops, decompressed), bytes=absorbed.bytes)
