"""Study of mlstm_chunkwise, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.chunkwise.backend import shape_of
from wavecrest.ops.mlstm.chunkwise.launch import planned
from wavecrest.ops.mlstm.chunkwise.study.cases import bench_cases, compile_cases, emulate_cases
from wavecrest.ops.mlstm.chunkwise.study.space import space
from wavecrest.ops.mlstm.study.bound import bound
from wavecrest.ops.mlstm.study.cases import call_of_key, cost_of, inputs


def studies() -> dict[str, Study[MlstmCall]]:
    """By the op's name."""
    kernel: KernelStudy[MlstmCall] = KernelStudy(space=_space, launches=planned)
    study = Study(
        inputs=inputs,
        sizes=("B", "H", "S", "D"),
        cost=cost_of,
        compile_cases=compile_cases,
        bench_cases=bench_cases,
        emulate_cases=emulate_cases,
        bound=partial(bound, chunks=True),
        call_of_key=call_of_key,
        kernels={"triton": kernel},
    )
    return {"mlstm_chunkwise": study}


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return space(shape_of(key), arch)
