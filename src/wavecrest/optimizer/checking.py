"""The accuracy gate for a model with applied steps: the limits of its precision, and the rules that its steps can meet.

A run, `verify` and the replay of a plan all check here, so that a plan passes later what it passed when it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavecrest.optimizer.steps.precision import gate_dtype

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.gate import Gate
    from wavecrest.optimizer.steps import AppliedSteps
    from wavecrest.records import BucketError


def check_applied(gate: Gate, model: nn.Module, applied: AppliedSteps, *, final: bool) -> list[BucketError]:
    """Hold a model to the gate, with the limits of a lower precision only where that precision is applied.

    Args:
        gate: of the original.
        model: with `applied`.
        applied: its steps.
        final: it is a result: all calls are made, however long they take, and a compiled model is called with another
            shape of each bucket and by keyword too, which compiles it again.

    Raises:
        RuleBroken: a rule that has no error to show; a StepRefused.
    """
    gate.dtype = gate_dtype(item.step_id for item in applied.steps) or gate.workload.dtype
    skip = {}
    compiled = bool(applied.only("compile", "capture").steps)
    if compiled:
        skip["gradients"] = "compiled models are served without gradients, and with them they are compiled again"
        skip["concurrent"] = "compiled and captured models serve one thread at a time"
        if not final:
            trial = "of compiled models tried on the result alone, as it compiles them again"
            skip |= {"keyword": trial, "shapes": trial}
    graphs = bool(applied.only("capture").steps) or any("compile:" in item.step_id for item in applied.steps)
    return gate.check(model, thorough=final, skip=skip, graphs=graphs, recompiles=compiled)
