"""Errors of one output against its limits.

**The norm and the largest element.** ‖candidate − reference‖ / ‖reference‖ may be twice the original's own, or the
floor of the dtype; the largest error of one element likewise.

**Elements far off.** Small elements hardly count in a norm: the tail of a softmax can be zero without notice. So the
share of elements that are off by more than a half (a sixteenth) of their own value is limited too. Sums that cancel are
far off in any precision, and an honest change of order puts other elements there. An error of relative norm ε, spread
over a normally distributed tensor, leaves 2·φ(0)·E|z|·ε/r ≈ 0.64·ε/r of the elements off by more than the share r of
their own value. The limit is therefore ε/r with the ε that the norm was allowed, or twice the original's own share if
that is larger (distributions that are dense near zero, in which the original shows it), and three standard deviations
of counting. A model that is run in a lower precision by name is compared with the original in that precision.

**Whole numbers** are right where they are the original's, or the reference's: where the two differ the original itself
decided between two values closer than its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wavecrest import records
from wavecrest.measure import numerics

# a candidate's error may be this many times the original's own
OWN_ERROR_FACTOR = 2.0
# on values at the edge a few elements decide the norm, so errors of equal quality scatter more
EDGE_FACTOR = 8.0
# and never this much, which an answer that is missing would be within
MOST_LOST = 0.5
# share of positions whose top-1 token may differ from the reference, beyond the original's own share
TOP1_SLACK = 0.01
# shares of their own value that elements are counted as far off beyond
FAR = (0.5, 0.0625)
# elements that are looked at for that
FAR_SAMPLE = 1 << 22


@dataclass(slots=True)
class Expected:
    """One tensor of the right answer, and how far the original is from it.

    Attributes:
        reference: in higher precision; of large tensors rounded to float32.
        original: of whole numbers, the original's own; else None.
        own: error of the original.
        far: how many elements of the original are off by more than each share of FAR, and how many there are.
        own_top1: for logits, share of positions where the original's most likely token is another.
        edge: the values are at the edge of what the original can do.
    """

    reference: Tensor
    original: Tensor | None
    own: numerics.Comparison
    far: list[int]
    own_top1: float = 0.0
    edge: bool = False
    # by dtype: error and `far` of the original run in that precision
    lowered: dict[str, tuple[numerics.Comparison, list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, original: Tensor, reference: Tensor, *, edge: bool, hold: int) -> Expected:
        """Compare the original with the reference.

        Args:
            name: path of the output.
            original: the model's own answer.
            reference: the answer in higher precision.
            edge: see above.
            hold: bytes above which the reference is rounded to float32.
        """
        if not is_float(original):
            own = numerics.Comparison(0.0, 0.0, True, True, original.numel())
            return cls(reference.clone(), original.clone(), own, [0] * (len(FAR) + 1), edge=edge)
        own = numerics.compare(original, reference)
        if not own.nonfinite_match:
            # it overflows where higher precision does not: its own answer is what users have
            reference = original
            own = numerics.compare(original, reference)
        far = far_off(original, reference)
        top1 = disagreement(original, reference) if is_logits(name) else 0.0
        if reference.dtype == torch.float64 and reference.nbytes > hold:
            # a rounding of 2^-24 is far below the floor
            reference = reference.float()
        return cls(reference.clone(), None, own, far, top1, edge)


def far_off(out: Tensor, reference: Tensor) -> list[int]:
    """How many of the (sampled) elements are off by more than each share of FAR, and how many were looked at.

    Zeros and subnormal numbers of the reference are left out.
    """
    out, reference = _sample(out), _sample(reference)
    return numerics.far_counts(out, reference, FAR, torch.finfo(_real(out.dtype)).tiny)


def judge(
    bucket: str, name: str, out: Tensor, expected: Expected, dtype: str, model_dtype: str, rules: frozenset[str]
) -> Iterator[records.BucketError]:
    """The rows of one output: its error, its elements far off if they are too many, and of logits the tokens.

    Args:
        bucket: of the call.
        name: path of the output.
        out: the candidate's.
        expected: the right answer.
        dtype: whose floor applies.
        model_dtype: the model's own; another than `dtype` where a lower precision was asked for by name.
        rules: the rules in force.
    """
    reference = expected.reference
    if "accuracy" in rules:
        yield (
            _exact(bucket, name, out, expected)
            if expected.original is not None
            else _error(bucket, name, out, expected, dtype)
        )
    if out.shape != reference.shape or expected.original is not None:
        return
    if "elements" in rules and not expected.edge:
        far: list[int] | None = expected.far
        if dtype != model_dtype:
            far = expected.lowered[dtype][1] if dtype in expected.lowered else None
        if far is not None:
            yield from _elements(bucket, name, out, expected, far, dtype)
    if is_logits(name) and "top-1" in rules:
        share, allowed = disagreement(out, reference), expected.own_top1 + TOP1_SLACK
        yield records.BucketError(
            bucket=bucket,
            output=f"{name} top-1",
            error=share,
            own=expected.own_top1,
            limit=allowed,
            passed=share <= allowed,
            note="share of positions with another most likely token",
            rule="top-1",
        )


def _limits(expected: Expected, dtype: str) -> numerics.Tolerance:
    floor = numerics.tolerance("model", dtype)
    if expected.edge and dtype in expected.lowered:
        # at the edge the precision asked for may lose more than its floor, for the original too
        lost = min(MOST_LOST, EDGE_FACTOR * expected.lowered[dtype][0].relative)
        floor = numerics.Tolerance(max(floor.relative, lost), floor.worst)
    factor = EDGE_FACTOR if expected.edge else OWN_ERROR_FACTOR
    worst = float("inf") if expected.edge else max(factor * expected.own.worst, floor.worst)
    return numerics.Tolerance(max(factor * expected.own.relative, floor.relative), worst)


def _error(bucket: str, name: str, out: Tensor, expected: Expected, dtype: str) -> records.BucketError:
    limits, found = _limits(expected, dtype), numerics.compare(out, expected.reference)
    passed = found.within(limits)
    note = ""
    if not found.shape_match:
        note = f"shape {tuple(out.shape)} instead of {tuple(expected.reference.shape)}"
    elif not found.nonfinite_match:
        note = "NaN or infinity where the reference has none, or the other way round"
    elif not passed and found.worst > limits.worst:
        note = f"largest element error {found.worst:.2e}, allowed {limits.worst:.2e}"
    return records.BucketError(
        bucket=bucket,
        output=name,
        error=found.relative,
        own=expected.own.relative,
        limit=limits.relative,
        passed=passed,
        note=note,
        rule="accuracy",
    )


def _exact(bucket: str, name: str, out: Tensor, expected: Expected) -> records.BucketError:
    original, reference = expected.original, expected.reference
    assert original is not None
    if out.shape != original.shape:
        wrong, note = 1.0, f"shape {tuple(out.shape)} instead of {tuple(original.shape)}"
    else:
        out = out.to(original.device)
        differs = (out != original) & (out != reference.to(original.device))
        wrong, note = (float(differs.double().mean()), "share of elements that differ") if out.numel() else (0.0, "")
    return records.BucketError(
        bucket=bucket,
        output=name,
        error=wrong,
        own=0.0,
        limit=0.0,
        passed=wrong == 0,
        note=note if wrong else "",
        rule="accuracy",
    )


def _elements(
    bucket: str, name: str, out: Tensor, expected: Expected, far: list[int], dtype: str
) -> Iterator[records.BucketError]:
    *off, count = far_off(out, expected.reference)
    for share, found, own in zip(FAR, off, far, strict=False):
        explained = max(_limits(expected, dtype).relative / share * count, 2.0 * own)
        allowed = explained + 3 * (explained + 1) ** 0.5 + 2
        if found > allowed:
            yield records.BucketError(
                bucket=bucket,
                output=f"{name} elements",
                error=found / count,
                own=own / count,
                limit=allowed / count,
                passed=False,
                note=f"share of elements that are off by more than {share:g} of their own value",
                rule="elements",
            )
            return


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor has errors and limits: floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_logits(name: str) -> bool:
    """Whether an output by its path holds scores of tokens."""
    return name.rsplit(".", 1)[-1] == "logits"


def disagreement(out: Tensor, reference: Tensor) -> float:
    """Share of positions with another largest value in the last dimension."""
    if out.ndim == 0 or out.shape[-1] < 2:
        return 0.0
    return float((out.argmax(-1) != reference.to(out.device).argmax(-1)).float().mean())


def _sample(tensor: Tensor) -> Tensor:
    """Every n-th element of a large tensor, the same ones each time."""
    flat = tensor.to_dense() if tensor.layout != torch.strided else tensor
    flat = flat.reshape(-1)
    return flat[:: max(1, flat.numel() // FAR_SAMPLE)]


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
