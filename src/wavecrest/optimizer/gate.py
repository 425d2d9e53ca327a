"""The accuracy gate: no step is measured for speed before it gives the right answers.

The reference is the original model in higher precision (float64 for float32 models, float32 for 16-bit ones). A
candidate passes if, for every output of every bucket and input set, its error against the reference is at most twice
the original model's own error, or below the floor of the tolerance table. Outputs named "logits" are also held to
top-1 agreement. Every call runs on the bucket's own tensors with other values written into them, so that what is
checked is what is timed (a captured graph included), and the tensors are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavecrest import records
from wavecrest.errors import StepRefused
from wavecrest.measure import numerics
from wavecrest.measure.workload import Inputs, Workload, iter_tensors

if TYPE_CHECKING:
    from torch import nn

# input sets per bucket: the example itself, and variations of it
INPUT_SETS = 3
# a candidate's error may be this many times the original's own
OWN_ERROR_FACTOR = 2.0
# float64 references are taken of models up to this many parameters; larger float32 models are their own reference
MAX_DOUBLE_PARAMETERS = 2_000_000_000
# share of positions whose top-1 token may differ from the reference, beyond the original's own share
TOP1_SLACK = 0.01

Outputs = dict[str, Tensor]


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
        reference, high, gate.note = _reference_model(workload)
        for bucket, inputs in workload.buckets.items():
            for number in range(INPUT_SETS):
                values = variation(inputs, number)
                with holding(inputs, values):
                    original = call_outputs(workload.model, inputs)
                expected, note = original, ""
                if reference is not None and high is not None:
                    expected, note = _high_precision(reference, high, inputs, values, original)
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


def call_outputs(function: Callable[..., Any], inputs: Inputs) -> Outputs:
    """Call without gradients; every tensor of the result by path, copied, so that a replay cannot change it."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        result = inputs.call(function)
    held = {tensor.data_ptr() for _, tensor in inputs.tensors()}
    return {
        path.lstrip(".") or "output": tensor.detach().clone()
        for path, tensor in iter_tensors("", result, set())
        # a cache that is handed in and returned is state, not an answer; the answers show what it holds
        if tensor.data_ptr() not in held
    }


@contextmanager
def holding(inputs: Inputs, values: list[Tensor]) -> Iterator[None]:
    """Other values in the inputs' own tensors for the time of the block."""
    before = inputs.snapshot()
    inputs.restore(values)
    try:
        yield
    finally:
        inputs.restore(before)


def variation(inputs: Inputs, number: int) -> list[Tensor]:
    """Values of the same shapes: number 0 is the example itself, others are derived from it, always the same way.

    Floating tensors get noise of their own scale and, in odd numbers, a few values ten times as large; two-dimensional
    integer tensors with more than two distinct values (token ids) are shuffled, which keeps every id valid; masks,
    positions and scalars stay.
    """
    values = inputs.snapshot()
    if number == 0:
        return values
    generator = torch.Generator().manual_seed(1000 + number)
    for value in values:
        if value.numel() < 2:
            continue
        if value.is_floating_point():
            if not bool(torch.isfinite(value).all()) or not bool((value != 0).any()):
                # additive masks carry infinities; an empty cache stays empty
                continue
            noise = torch.randn(value.shape, generator=generator, device="cpu").to(value.device, value.dtype)
            value += noise * value.float().std().to(value.dtype)
            if number % 2:
                flat = value.view(-1) if value.is_contiguous() else value.reshape(-1)
                flat[:: max(1, flat.numel() // 4)] *= 10
        elif value.ndim == 2 and value.dtype in (torch.int64, torch.int32) and int(value.max()) > 1:
            order = torch.randperm(value.numel(), generator=generator, device="cpu").to(value.device)
            value.copy_(value.reshape(-1)[order].reshape(value.shape))
    return values


def _reference_model(workload: Workload) -> tuple[nn.Module | None, torch.dtype | None, str]:
    import copy

    dtype = workload.dtype
    if dtype in ("bfloat16", "float16"):
        high = torch.float32
    elif dtype == "float32":
        high = torch.float64
    else:
        return None, None, f"a {dtype} model is its own reference"
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    if high is torch.float64 and count > MAX_DOUBLE_PARAMETERS:
        return None, None, f"{count / 1e9:.1f} billion parameters: no float64 copy, the original is the reference"
    try:
        return copy.deepcopy(workload.model).to(high), high, ""
    except Exception as error:
        return (
            None,
            None,
            f"no {high} copy of the model ({type(error).__name__}: {error}); the original is the reference",
        )


def _high_precision(
    reference: nn.Module, high: torch.dtype, inputs: Inputs, values: list[Tensor], original: Outputs
) -> tuple[Outputs, str]:
    raised = inputs.clone()
    raised.restore(values)
    try:
        outputs = call_outputs(reference, _raise_floats(raised, high))
    except Exception as error:
        first = (str(error).strip().splitlines() or ["(no message)"])[0]
        return original, f"the {high} copy raised {type(error).__name__}: {first}; the original is the reference"
    if outputs.keys() != original.keys():
        return original, f"the {high} copy has other outputs; the original is the reference"
    return outputs, ""


def _raise_floats(inputs: Inputs, high: torch.dtype) -> Inputs:
    """The same inputs with every floating tensor in `high`, also inside cache objects (which are changed in place)."""

    def convert(value: Any, seen: set[int]) -> Any:
        if isinstance(value, Tensor):
            return value.to(high) if value.is_floating_point() else value
        if id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, dict):
            for key in list(value):
                value[key] = convert(value[key], seen)
            return value
        if isinstance(value, list):
            value[:] = [convert(item, seen) for item in value]
            return value
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(convert(item, seen) for item in value)
        if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            for key, item in list(vars(value).items()):
                if isinstance(item, torch.dtype) and item.is_floating_point:
                    setattr(value, key, high)
                else:
                    setattr(value, key, convert(item, seen))
        return value

    seen: set[int] = set()
    args = tuple(convert(value, seen) for value in inputs.args)
    return Inputs(args, {key: convert(value, seen) for key, value in inputs.kwargs.items()})
