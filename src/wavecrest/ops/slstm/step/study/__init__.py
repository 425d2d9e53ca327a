"""Study of slstm_step, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.call import SlstmStepCall
from wavecrest.ops.slstm.key import STEP_KEY_FIELDS, head_dim_and_dtype
from wavecrest.ops.slstm.step.launch import planned
from wavecrest.ops.slstm.step.study.cases import (
    bench_cases,
    call_of_key,
    compile_cases,
    cost_of,
    emulate_cases,
    inputs,
)
from wavecrest.ops.slstm.step.study.space import space
from wavecrest.ops.slstm.study.bound import step_bound


def studies() -> dict[str, Study[SlstmStepCall]]:
    """By the op's name."""
    kernel: KernelStudy[SlstmStepCall] = KernelStudy(space=_space, launches=planned)
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
    return {"slstm_step": study}


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return space(head_dim_and_dtype(STEP_KEY_FIELDS, key)[0], arch)
