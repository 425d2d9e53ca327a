"""Study of the gated ops, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from functools import partial

from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import Study
from wavecrest.ops.gated.call import GatedCall
from wavecrest.ops.gated.study.cases import compile_cases, inputs

# floating-point operations of an element
_FLOPS = {"silu": 5, "gelu": 12}


def studies() -> dict[str, Study[GatedCall]]:
    """By the op's name."""
    return {f"{activation}_and_mul": _study(activation) for activation in _FLOPS}


def _study(activation: str) -> Study[GatedCall]:
    return Study(inputs=partial(inputs, activation), cost=_cost, compile_cases=partial(compile_cases, activation))


def _cost(call: GatedCall) -> Cost:
    """Gate and up read once, the result written once."""
    read = call.gate.nbytes * (1 if call.up is None else 2)
    elements = call.gate.numel() // (2 if call.up is None else 1)
    return Cost(flops=_FLOPS[call.activation] * elements, bytes=read + read // 2)
