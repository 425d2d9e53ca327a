"""The accuracy gate: no step is measured for speed before it gives the right answers.

The reference is the original model in higher precision (float64 for float32 models, float32 for 16-bit ones). A
candidate passes if, for every output of every bucket and input set, its error against the reference is at most twice
the original model's own error, or below the floor of the tolerance table. Outputs named "logits" are also held to
top-1 agreement. Every call runs on the bucket's own tensors with other values written into them, so that what is
checked is what is timed (a captured graph included), and the tensors are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wavecrest import records
from wavecrest.errors import StepRefused
from wavecrest.measure import numerics
from wavecrest.measure.workload import Workload
from wavecrest.optimizer.reference import (
    Outputs,
    call_outputs,
    high_precision,
    holding,
    reference_model,
    variation,
)

# input sets per bucket: the example itself, and variations of it
INPUT_SETS = 3
# a candidate's error may be this many times the original's own
OWN_ERROR_FACTOR = 2.0
# share of positions whose top-1 token may differ from the reference, beyond the original's own share
TOP1_SLACK = 0.01


@dataclass(slots=True)
class _Case:
    bucket: str
    values: list[Tensor]
    reference: Outputs
    # name -> (error of the original against the reference)
    own: dict[str, numerics.Comparison]
    own_top1: dict[str, float]


@dataclass(slots=True)
class Gate:
    """Reference outputs of the original model on several input sets, and the comparison with a candidate.

    Attributes:
        dtype: whose tolerance floor applies (the model's, or the one the user asked for).
        note: why the reference is not in higher precision, if it is not.
    """

    workload: Workload
    dtype: str
    note: str = ""
    _cases: list[_Case] = field(default_factory=list)

    @classmethod
    def prepare(cls, workload: Workload, *, dtype: str | None = None) -> Gate:
        """Run the original and its high-precision copy on every bucket and input set."""
        gate = cls(workload, dtype or workload.dtype)
        reference, high, gate.note = reference_model(workload)
        for bucket, inputs in workload.buckets.items():
            for number in range(INPUT_SETS):
                values = variation(inputs, number)
                with holding(inputs, values):
                    original = call_outputs(workload.model, inputs)
                expected, note = original, ""
                if reference is not None and high is not None:
                    expected, note = high_precision(reference, high, inputs, values, original)
                gate.note = gate.note or note
                own = {name: numerics.compare(original[name], expected[name]) for name in original}
                own_top1 = {
                    name: _disagreement(original[name], expected[name]) for name in original if _is_logits(name)
                }
                gate._cases.append(_Case(bucket, values, expected, own, own_top1))
        return gate

    def check(self, candidate: Callable[..., Any]) -> list[records.BucketError]:
        """The worst error of each output of each bucket over the input sets, against what is allowed.

        Raises:
            StepRefused: the candidate raised, or its outputs have another structure.
        """
        rows: dict[tuple[str, str], records.BucketError] = {}
        for case in self._cases:
            inputs = self.workload.buckets[case.bucket]
            with holding(inputs, case.values):
                try:
                    outputs = call_outputs(candidate, inputs)
                except StepRefused:
                    raise
                except Exception as error:
                    first = (str(error).strip().splitlines() or ["(no message)"])[0]
                    raise StepRefused(f"it raised {type(error).__name__} on bucket {case.bucket}: {first}") from error
            if outputs.keys() != case.reference.keys():
                raise StepRefused(
                    f"its outputs are {sorted(outputs)} where the original's are {sorted(case.reference)}"
                )
            for row in self._rows(case, outputs):
                key = (row.bucket, row.output)
                if key not in rows or _badness(row) > _badness(rows[key]):
                    rows[key] = row
        return list(rows.values())

    def _rows(self, case: _Case, outputs: Outputs) -> Iterator[records.BucketError]:
        floor = numerics.tolerance("model", self.dtype)
        for name, out in outputs.items():
            reference, own = case.reference[name], case.own[name]
            found = numerics.compare(out, reference)
            limit = max(OWN_ERROR_FACTOR * own.relative, floor.relative)
            worst_limit = max(OWN_ERROR_FACTOR * own.worst, floor.worst)
            exact = not reference.is_floating_point()
            passed = found.within(numerics.Tolerance(0.0, 0.0) if exact else numerics.Tolerance(limit, worst_limit))
            note = ""
            if not found.shape_match:
                note = f"shape {tuple(out.shape)} instead of {tuple(reference.shape)}"
            elif not found.nonfinite_match:
                note = "NaN or infinity where the reference has none, or the other way round"
            elif not passed and found.worst > worst_limit:
                note = f"largest element error {found.worst:.2e}, allowed {worst_limit:.2e}"
            yield records.BucketError(
                bucket=case.bucket,
                output=name,
                error=found.relative,
                own=own.relative,
                limit=0.0 if exact else limit,
                passed=passed,
                note=note,
            )
            if _is_logits(name) and found.shape_match:
                share, own_share = _disagreement(out, reference), case.own_top1[name]
                allowed = own_share + TOP1_SLACK
                yield records.BucketError(
                    bucket=case.bucket,
                    output=f"{name} top-1",
                    error=share,
                    own=own_share,
                    limit=allowed,
                    passed=share <= allowed,
                    note="share of positions with another most likely token",
                )


def failures(rows: list[records.BucketError]) -> str:
    """The failed rows in one sentence, or an empty string."""
    failed = [row for row in rows if not row.passed]
    if not failed:
        return ""
    worst = max(failed, key=_badness)
    text = f"{worst.output} of bucket {worst.bucket}: error {worst.error:.2e}, allowed {worst.limit:.2e}"
    if worst.note:
        text += f" ({worst.note})"
    return text + (f"; {len(failed)} outputs fail" if len(failed) > 1 else "")


def _badness(row: records.BucketError) -> float:
    if not row.passed:
        # NaN compares as the worst
        return 1e9 + (row.error if row.error == row.error else float("inf"))
    return row.error / row.limit if row.limit else row.error


def _is_logits(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == "logits"


def _disagreement(out: Tensor, reference: Tensor) -> float:
    if out.ndim == 0 or out.shape[-1] < 2:
        return 0.0
    return float((out.argmax(-1) != reference.to(out.device).argmax(-1)).float().mean())
