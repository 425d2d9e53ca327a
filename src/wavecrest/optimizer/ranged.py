"""The result of a run for declared ranges of shapes: padding to compiled sizes, or dynamic graphs, whichever is faster.

Both are timed on the same calls, whose lengths are drawn once over the ranges, short ones as often as long ones by
their logarithm. What is returned has passed the accuracy gate as it serves: at the smallest and the largest size, and
at odd sizes between them that are drawn anew for each run. Where neither way passes, the result stays as the ladder
left it, for the shapes of its buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from wavecrest.errors import ClockError, StepRefused, WavecrestError
from wavecrest.graphs.bucketed import Bucketed
from wavecrest.graphs.inductor import compile_dynamic, strict_compilation
from wavecrest.measure import timing
from wavecrest.measure.ranges import Kwargs, Ranges, Span, resized
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import ALL_RULES, Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, build
from wavecrest.optimizer.steps.base import TREE

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.state import RunState
    from wavecrest.records import BucketError

# calls of the distribution that both ways are timed on
CALLS = 12
SECONDS = 2.0
# sizes at which the gate looks at what is served
GATED = 4
# compiled variants of one function that the gate allows
GRAPHS = 256
# the drawn sizes are themselves shapes that no bucket has; one more row would be beyond the ranges
RULES = ALL_RULES - {"shapes"}

PADDED, DYNAMIC = "padding", "one dynamic graph"
WITHIN = "within the declared ranges"
FIXED = "the result is for the shapes of its buckets: others compile anew, and their answers were not checked"


def drawn(ranges: Ranges, example: Kwargs, calls: int = CALLS) -> list[Kwargs]:
    """Inputs of batches and lengths drawn log-uniformly over the ranges, the same in every run."""
    random = np.random.default_rng(0)

    def one(low: int, high: int) -> int:
        return min(high, int(math.exp(random.uniform(math.log(low), math.log(high + 1)))))

    return [resized(example, one(*ranges.batch), one(*ranges.length)) for _ in range(calls)]


def gated(ranges: Ranges, seed: int) -> list[Span]:
    """The sizes (batch, length) that the gate tries: both ends, and odd ones between, drawn from the seed.

    Those between are padded, where there are such, to sizes that the run did not optimize for. One of them has the
    least batch: a graph for all sizes treats 1 as a case of its own.
    """
    random = np.random.default_rng(seed)
    (fewest, most), (shortest, longest) = ranges.batch, ranges.length
    rows, tokens = ({size[axis] for size in ranges.optimized} for axis in range(2))

    def batch() -> int:
        return _odd(ranges.batches, fewest, rows, random)

    def length() -> int:
        return _odd(ranges.lengths, shortest, tokens, random)

    return list(dict.fromkeys([(fewest, shortest), (fewest, length()), (batch(), length()), (most, longest)]))


def _odd(sizes: Sequence[int], least: int, known: Collection[int], random: np.random.Generator) -> int:
    """An odd number that is padded to a size that is not known; where that cannot be, to any size, or the last size."""
    groups = {size: range((below + 1) | 1, size + 1, 2) for below, size in itertools.pairwise([least - 1, *sizes])}
    odd = {size: group for size, group in groups.items() if group}
    chosen = [size for size in odd if size not in known] or list(odd)
    return int(random.choice(odd[random.choice(chosen)])) if chosen else sizes[-1]


def compilations(ranges: Ranges) -> int:
    """How many later compilations it takes, at most, to choose and to check what serves the ranges."""
    return min(CALLS, len(ranges.batches) * len(ranges.lengths)) + 1 + GATED


def seconds_to_serve(run: RunState) -> float:
    """Seconds that `serving` is expected to take; 0 where it has nothing to do."""
    if run.workload.ranges is None or not run.ledger.applied.only("compile", "capture").steps:
        return 0.0
    summary = run.gate.summary
    # a preparation and a check take about what those of the run took each
    checks = 2 * GATED * summary.seconds / ((summary.checks + 1) * len(run.workload.buckets))
    return SECONDS + checks + run.costs.serving


def serving(run: RunState) -> nn.Module:
    """The model to return: `run.current`, made fit for the declared ranges where it has graphs of fixed shapes.

    The rows of the gate that it passed join the result's. Where neither way passes, or the time left does not hold the
    check, it is `run.current`, and a note says so.
    """
    if run.workload.ranges is None or not run.ledger.applied.only("compile", "capture").steps:
        # eager code takes every shape
        return run.current
    run.progress.phase("shapes within the declared ranges")
    needed, left = seconds_to_serve(run), max(0.0, run.seconds_left)
    if needed > left:
        run.ledger.note(f"{WITHIN}: not tried: it takes about {needed:.0f} s, and {left:.0f} s are left; {FIXED}")
        return run.current
    try:
        ways = _ways(run, run.workload.ranges)
        gate = _prepared(run, run.workload.ranges)
    except WavecrestError as error:
        run.ledger.note(f"{WITHIN}: {error}; {FIXED}")
        return run.current
    try:
        for name, model in ways.items():
            try:
                rows = _checked(run, gate, model)
            except StepRefused as error:
                run.ledger.note(f"{WITHIN}: the accuracy gate refuses {name}: {error}")
                continue
            if run.ledger.record.result is not None:
                run.ledger.record.result.numerics += rows
            sizes = ", ".join(f"{batch} × {length}" for batch, length in gated(run.workload.ranges, gate.seed))
            run.ledger.note(f"{WITHIN}: {name} passed the accuracy gate at {sizes} tokens, and serves")
            return model
    finally:
        run.gate.summary.add(gate.summary)
    run.ledger.note(f"{WITHIN}: no way passed the accuracy gate; {FIXED}")
    return run.current


def _ways(run: RunState, ranges: Ranges) -> dict[str, nn.Module]:
    """The models that may serve, by name, the faster one first.

    Raises:
        StepRefused: the original does not run at sizes within the ranges.
    """
    example = dict(next(iter(run.workload.buckets.values())).kwargs)
    dynamic = _dynamic(build(run.workload.model, run.ledger.applied.only(*TREE, "setting")))
    # in eval mode still when the user's model is put back into training
    original = build(run.workload.model, AppliedSteps())
    try:
        padded = Bucketed(run.current, original, ranges, example)
    except StepRefused as error:
        run.ledger.note(f"{WITHIN}: no padding: {error}")
        return {DYNAMIC: dynamic}
    except WavecrestError:
        raise
    except Exception as error:
        raise _does_not_run(error) from error
    ways: dict[str, nn.Module] = {PADDED: padded, DYNAMIC: dynamic}
    try:
        pair = _timed(run, dynamic, padded, drawn(ranges, example))
    except (ClockError, RuntimeError) as error:
        run.ledger.note(f"{WITHIN}: {PADDED} and {DYNAMIC} have no times: {error}")
        return ways
    sizes = f"{len(ranges.batches)} × {len(ranges.lengths)} sizes"
    run.ledger.note(
        f"{WITHIN}: padding to {sizes} takes {pair.new_ms:.3f} ms for {CALLS} calls, {DYNAMIC} {pair.base_ms:.3f} ms"
    )
    return ways if pair.ratio >= 1 else dict(reversed(ways.items()))


def _prepared(run: RunState, ranges: Ranges) -> Gate:
    """The gate at sizes within the ranges, with values of the run's seed.

    Raises:
        StepRefused: the original does not run there.
    """
    example, seed = next(iter(run.workload.buckets.values())).kwargs, run.gate.seed
    buckets = {
        f"served b{batch}s{length}": Inputs((), resized(example, batch, length))
        for batch, length in gated(ranges, seed)
    }
    try:
        return Gate.prepare(Workload(run.workload.model, buckets), seed=seed, rules=RULES, now=run.now)
    except WavecrestError:
        raise
    except Exception as error:
        raise _does_not_run(error) from error


def _does_not_run(error: Exception) -> StepRefused:
    return StepRefused(f"the original model raised {type(error).__name__} at a size within them: {error}")


def _checked(run: RunState, gate: Gate, model: nn.Module) -> list[BucketError]:
    """The errors of what is served.

    Raises:
        StepRefused: the gate refuses it, by the rule that is named.
    """
    # a fall-back to eager raises; the ladder's own buckets have left variants of the model's code
    with strict_compilation(graphs=GRAPHS):
        rows = check_applied(gate, model, run.ledger.applied, final=True)
    wrong = failures(rows)
    if wrong:
        rules = sorted({row.rule for row in rows if not row.passed})
        raise StepRefused(f"{wrong} (rule: {', '.join(rules)})")
    return rows


def _dynamic(model: nn.Module) -> nn.Module:
    """`model`, compiled once for all sizes, in place."""
    compile_dynamic(model)
    return model


def _timed(run: RunState, dynamic: nn.Module, padded: nn.Module, calls: list[Kwargs]) -> timing.Paired:
    """All calls of both, in turn."""

    def all_calls(model: nn.Module) -> Callable[[], None]:
        def work() -> None:
            with torch.no_grad():
                for kwargs in calls:
                    model(**kwargs)

        return work

    sides = all_calls(dynamic), all_calls(padded)
    return timing.measure_pair(*sides, device=run.workload.device, seconds=SECONDS, now=run.now)
