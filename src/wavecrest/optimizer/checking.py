"""The accuracy gate for a model with applied steps: the limits of its precision, and the rules that its steps can meet.

A run, `verify` and the replay of a plan all check here, so that a plan passes later what it passed when it was made.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.steps.precision import gate_dtype
from wavecrest.optimizer.steps.quantize import ID, quantized

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.steps import AppliedSteps
    from wavecrest.records import BucketError


def gate_for(gate: Gate, applied: AppliedSteps) -> Gate:
    """The gate that holds a model with these steps: the given one, or one of the quantized model.

    The quantized model is held to the original by the quality that the step's parameters name. What other steps make of
    it is then held to its answers.

    Raises:
        StepRefused: the quantized model is not within that quality.
    """
    params = next((item.params for item in applied.steps if item.step_id == ID), None)
    if params is None:
        return gate
    key = json.dumps(params, sort_keys=True)
    if key not in gate.behind:
        model, quality = quantized(gate.workload, params)
        found = Gate.prepare(
            replace(gate.workload, model=model, spec=None), seed=gate.seed, rules=gate.rules, now=gate.now
        )
        gate.summary.add(found.summary)
        far = ", ".join(f"{name} {value:.3g}" for name, value in quality.values().items() if value is not None)
        gate.summary.notes.append(
            f"answers are held to those of the quantized model, which is within the quality of {params['quality']:.2%} "
            f"that was asked for: {far}"
        )
        # one account of all calls and rules
        found.summary = gate.summary
        gate.behind[key] = found
    return gate.behind[key]


def check_applied(
    gate: Gate, model: nn.Module, applied: AppliedSteps, *, final: bool, recompiled: bool = True
) -> list[BucketError]:
    """Hold a model to the gate, with the limits of a lower precision only where that precision is applied.

    Args:
        gate: of the original; `gate_for` says when another is used.
        model: with `applied`.
        applied: its steps.
        final: it is a result: all calls are made, however long they take, and a compiled model is called with another
            shape of each bucket and by keyword too, which compiles it again.
        recompiled: False: no time is left to compile a result again. It is held to the shapes and the way of calling of
            the examples; its steps without compilation are held to the others.

    Raises:
        RuleBroken: a rule that has no error to show; a StepRefused.
    """
    gate = gate_for(gate, applied)
    gate.dtype = gate_dtype(item.step_id for item in applied.steps) or gate.workload.dtype
    skip = {}
    compiled = bool(applied.only("compile", "capture").steps)
    if compiled:
        skip["gradients"] = "compiled models are served without gradients, and with them they are compiled again"
        skip["concurrent"] = "compiled and captured models serve one thread at a time"
        trial = "of compiled models tried on the result alone, as it compiles them again"
        if final and not recompiled:
            trial = (
                "no time left to compile the result again; its other steps are held to it without compilation, and "
                "`wavecrest verify` holds the result to it"
            )
        if not (final and recompiled):
            skip |= {"keyword": trial, "shapes": trial}
    graphs = bool(applied.only("capture").steps) or any("compile:" in item.step_id for item in applied.steps)
    return gate.check(model, thorough=final, skip=skip, graphs=graphs, recompiles=compiled)
