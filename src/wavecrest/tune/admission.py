"""Admission of candidates to timing, and the limit below which a time cannot be true.

A candidate runs once over poisoned memory and is compared with the op's reference: within the limits that
`wavecrest bench` has for wavecrest's kernels, and without a single element beyond the op's own bound. PyTorch, and
backends that round where it does, are held to the wider limits that bench has for peers. A time below what the
hardware's peaks allow is an error of measurement, whatever its cause.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wavecrest import records
from wavecrest.bench import ops as bench
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import EnvironmentProblem
from wavecrest.hardware import Arch
from wavecrest.measure import numerics
from wavecrest.tune.candidates import Candidate

# clocks may stand above those of the datasheet's peaks (an H200's: 1,980 MHz above 1,830), and events tick
PEAK_SLACK = 0.85


class DeviceLost(EnvironmentProblem):
    """A kernel left the device in a state in which nothing runs any more."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """The expected results of a call: the reference's, and how far elements may be off.

    `bounds`: one per result that the op has a bound for; None if it has no bounds.
    """

    results: tuple[Tensor, ...]
    bounds: tuple[Tensor, ...] | None


def oracle(op: AnyOp, call: AnyCall) -> Oracle:
    """The oracle for a checked call."""
    bound = None if op.study.bound is None else op.study.bound(call)
    return Oracle(bench.results_of(op.reference(call)), None if bound is None else bench.results_of(bound))


def call_of(op: AnyOp, candidate: Candidate, call: AnyCall) -> Callable[[], Any]:
    """The bound call of a candidate, as dispatch makes it for a signature seen before."""
    backend = op.backends[candidate.backend]
    config = () if candidate.config is None else (candidate.config,)
    if backend.bind is not None:
        return partial(backend.bind(call, *config), call)
    return partial(backend.run, call, *config)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is allocated inside with NaN, or the largest integer.

    Without it, an element that a kernel forgets to write may hold the right value left by the candidate before.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # a module whose one attribute its class makes
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        # about operations that have no deterministic form
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(enabled, warn_only=only_warned)


def admit(
    op: AnyOp, candidate: Candidate, call: AnyCall, right: Oracle, row: records.TuneCandidate
) -> Callable[[], Any] | None:
    """Run a candidate once; its call if the results are right, else None with status and reason in `row`.

    Raises:
        DeviceLost: the device is unusable after it.
    """
    begin = time.perf_counter()
    device = right.results[0].device
    try:
        # PyTorch chooses other kernels where memory is filled for it, and writes its results whole
        with nullcontext() if candidate.role == "native" else poisoned():
            run = call_of(op, candidate, call)
            results = bench.results_of(run())
            _synchronize(device)
        row.first_ms = row.first_ms or round((time.perf_counter() - begin) * 1e3, 3)
        problem = wrong(op, candidate, call, results, right, row)
    # whatever a kernel or its compiler raises concerns this candidate alone, if the device survives
    except Exception as error:
        row.status, row.reason = "failed", f"raised {type(error).__name__}: {first_line(error)}"
        require(device, f"{candidate.backend} {candidate.config!r}")
        return None
    if problem:
        row.status, row.reason = "wrong", problem
        return None
    return run


def require(device: torch.device, what: str) -> None:
    """Raise unless the device still works after `what`.

    Raises:
        DeviceLost: it does not.
    """
    try:
        _synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{what} ended the device: {first_line(error)}") from error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wrong(
    op: AnyOp,
    candidate: Candidate,
    call: AnyCall,
    results: tuple[Tensor, ...],
    right: Oracle,
    row: records.TuneCandidate,
) -> str:
    """The fault of the results, or an empty string; the errors are in `row`."""
    first = next(value for value in call if isinstance(value, Tensor))
    limits = bench.limits_of(op, dtype_name(first))
    native = candidate.role == "native" or op.backends[candidate.backend].as_native
    if native:
        values = limits.values
        slack = numerics.Tolerance(bench.PEER_SLACK * values.relative, bench.PEER_SLACK * values.worst)
        limits = bench.Limits(slack, bench.PEER_CODE_SHARE)
    row.relative = row.worst = 0.0
    bounded = 0 if right.bounds is None else len(right.bounds)
    # elements with a bound of their own skip the overall limit, which means nothing where a sum cancels
    loose = bench.Limits(numerics.Tolerance(limits.values.relative, math.inf), limits.code_share)
    problem = ""
    for some, these in ((slice(bounded), loose), (slice(bounded, None), limits)):
        errors = records.ImplTiming(name=candidate.backend)
        problem = problem or bench.gate(errors, results[some], right.results[some], these)
        row.relative = max(row.relative, errors.relative or 0.0)
        row.worst = max(row.worst, errors.worst or 0.0)
    if problem or native or right.bounds is None:
        return problem.removeprefix("wrong: ")
    # not all results have a bound
    for index, (got, want, bound) in enumerate(zip(results, right.results, right.bounds, strict=False)):
        problem = _beyond(got, want, bound, row)
        if problem:
            return problem if len(results) == 1 else f"result {index}: {problem}"
    return ""


def _beyond(got: Tensor, want: Tensor, bound: Tensor, row: records.TuneCandidate) -> str:
    """The number of elements farther from the reference than the op allows, in words; empty if all are within."""
    finite = torch.isfinite(want)
    share = (got.double() - want.double()).abs() / bound
    # a bound of 0 means exact; values that are not finite were compared before
    share = torch.where(got == want, 0.0, share).masked_fill(~finite, 0.0)
    # NaN does not compare as below a limit
    share = share.nan_to_num(math.inf, math.inf)
    if share.numel() == 0:
        return ""
    worst = float(share.max())
    row.of_bound = max(worst, row.of_bound or 0.0)
    if worst <= 1:
        return ""
    count, where = int((share > 1).sum()), int(share.argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(where), share.shape)]
    return f"{count} of {share.numel()} elements are beyond the bound, {place} by {worst:.3g} times it"


def least_ms(op: AnyOp, call: AnyCall, right: Oracle, arch: Arch | None) -> float | None:
    """The time in ms below which no measurement of a call can be true; None if the hardware is unknown.

    The larger of bytes read over peak bandwidth and operations over the peak of their type. Bytes written do not count:
    they may still be in a cache when the call ends.
    """
    if arch is None:
        return None
    cost = op.study.cost(call)
    read = max(0, cost.bytes - sum(result.nbytes for result in right.results))
    first = next(value for value in call if isinstance(value, Tensor))
    seconds = max(read / (arch.bandwidth * 1e9), cost.flops / (peak(arch, first.dtype) * 1e12))
    return seconds * 1e3 * PEAK_SLACK


def peak(arch: Arch, dtype: torch.dtype) -> float:
    """Peak TFLOP/s of matrix instructions for a dtype: for 8 bits twice that of 16, for float32 half (tf32)."""
    if dtype.itemsize == 1:
        return max(arch.peak_fp8 or 0.0, 2 * arch.peak_16bit)
    if dtype.itemsize == 2:
        return arch.peak_16bit
    return max(arch.peak_fp32, arch.peak_16bit / 2)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"
