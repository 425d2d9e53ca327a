"""Study of slstm_sequence, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.key import KEY_FIELDS, head_dim_and_dtype
from wavecrest.ops.slstm.sequence.launch import planned
from wavecrest.ops.slstm.sequence.launch_cooperative import planned as planned_cooperative
from wavecrest.ops.slstm.sequence.launch_steps import planned as planned_steps
from wavecrest.ops.slstm.sequence.study.cases import bench_cases, compile_cases, emulate_cases
from wavecrest.ops.slstm.sequence.study.space import space, space_cooperative
from wavecrest.ops.slstm.step.study.space import space as space_of_step
from wavecrest.ops.slstm.study.bound import bound
from wavecrest.ops.slstm.study.cases import call_of_key, cost_of, inputs


def studies() -> dict[str, Study[SlstmCall]]:
    """By the op's name."""
    kernel: KernelStudy[SlstmCall] = KernelStudy(space=_space, launches=planned)
    steps: KernelStudy[SlstmCall] = KernelStudy(space=_space_of_steps, launches=planned_steps)
    cooperative: KernelStudy[SlstmCall] = KernelStudy(space=_space_cooperative, launches=planned_cooperative)
    study = Study(
        inputs=inputs,
        sizes=("B", "H", "S", "D"),
        cost=cost_of,
        compile_cases=compile_cases,
        bench_cases=bench_cases,
        emulate_cases=emulate_cases,
        bound=bound,
        call_of_key=call_of_key,
        kernels={"triton": kernel, "triton_steps": steps, "triton_cooperative": cooperative},
    )
    return {"slstm_sequence": study}


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return space(*head_dim_and_dtype(KEY_FIELDS, key), arch)


def _space_of_steps(key: Key, arch: Arch) -> Iterator[Config]:
    return space_of_step(head_dim_and_dtype(KEY_FIELDS, key)[0], arch)


def _space_cooperative(key: Key, arch: Arch) -> Iterator[Config]:
    heads: int = key[KEY_FIELDS.index("heads")]
    return space_cooperative(heads, *head_dim_and_dtype(KEY_FIELDS, key), arch)
