"""Study of the row ops, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

import math
from functools import partial

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.ops.common.quantized import scale_shape
from wavecrest.ops.rows.backend import SPECS, shape_of
from wavecrest.ops.rows.call import RowCall, Spec
from wavecrest.ops.rows.config import configured
from wavecrest.ops.rows.study.cases import compile_cases, emulate_cases, inputs
from wavecrest.ops.rows.study.work import work

_FLOPS = {"identity": 3, "scaled": 1, "rms": 4, "layer": 7, "softmax": 5}


def studies() -> dict[str, Study[RowCall]]:
    """By the op's name."""
    return {name: _study(spec) for name, spec in SPECS.items()}


def _study(spec: Spec) -> Study[RowCall]:
    kernel: KernelStudy[RowCall] = KernelStudy(
        # one configuration, the architecture's
        space=lambda key, arch: (configured(key[0], key[1], shape_of(spec, key), arch),),
        work=lambda key, config, arch: work(
            shape_of(spec, key), key[0], key[1], config, arch, keeps_sum=spec.keeps_sum
        ),
    )
    return Study(
        inputs=partial(inputs, spec),
        cost=_cost,
        compile_cases=partial(compile_cases, spec),
        emulate_cases=partial(emulate_cases, spec),
        kernels={"triton": kernel},
    )


def _cost(call: RowCall) -> Cost:
    x, how = call.x, call.quantization
    vectors = sum(vector.nbytes for vector in (call.weight, call.bias) if vector is not None)
    # x in; the residual in and the sum out
    moved = x.nbytes * (1 if call.residual is None else 3 if call.keeps_sum else 2)
    if how is None:
        written = x.nbytes
    else:
        written = x.numel() * how.dtype.itemsize + 4 * math.prod(scale_shape(x.shape, how.granularity))
    flops = _FLOPS[call.kind] + (0 if call.residual is None else 1)
    return Cost(flops=flops * x.numel(), bytes=moved + written + vectors)
