"""Study of mlstm_step, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmStepCall
from wavecrest.ops.mlstm.key import STEP_KEY_FIELDS, head_dims
from wavecrest.ops.mlstm.step.launch import planned
from wavecrest.ops.mlstm.step.study.cases import (
    bench_cases,
    call_of_key,
    compile_cases,
    cost_of,
    emulate_cases,
    inputs,
)
from wavecrest.ops.mlstm.step.study.space import space
from wavecrest.ops.mlstm.study.bound import step_bound


def studies() -> dict[str, Study[MlstmStepCall]]:
    """By the op's name."""
    kernel: KernelStudy[MlstmStepCall] = KernelStudy(space=_space, launches=planned)
    study = Study(
        inputs=inputs,
        sizes=("B", "H", "D"),
        cost=cost_of,
        compile_cases=compile_cases,
        bench_cases=bench_cases,
        emulate_cases=emulate_cases,
        bound=step_bound,
        call_of_key=call_of_key,
        kernels={"triton": kernel},
    )
    return {"mlstm_step": study}


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return space(*head_dims(STEP_KEY_FIELDS, key), arch)
