"""Find where Dynamo splits a model into several graphs, and why it compiles a function again.

`torch._dynamo.explain` sees the graphs of one call only; breaks before any op, and breaks in loops (which send the
whole function back to eager), are not in its answer. So the buckets run through torch.compile with a backend that
counts graphs, and Dynamo's own break reasons and compilation metrics are read afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wavecrest.records import GraphBreak
from wavecrest.records.provenance import shown_path

if TYPE_CHECKING:
    from wavecrest.measure.workload import Inputs

# Dynamo keeps 64 by default; a large model has more functions
_METRICS = 8192
_LOCATION = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Breaks(NamedTuple):
    """The graph breaks that tracing found.

    `graphs` is the number of graphs that one steady call runs through, the largest over the buckets (1 is ideal, 0
    where nothing compiled); `note` says why the search is incomplete, empty if it is not.
    """

    graphs: int
    breaks: list[GraphBreak]
    note: str


def find_breaks(function: Callable[..., Any], buckets: Mapping[str, Inputs]) -> Breaks:
    """Trace `function` with every bucket, twice; list graph breaks and recompiles with file, line and reason.

    Runs the model eagerly inside (no Inductor), without gradients, on copies of the inputs. Dynamo is reset before and
    after: code compiled earlier in this process compiles again at its next call. A function that Dynamo cannot trace
    gives a note, not an error.
    """
    import torch
    from torch._dynamo import utils

    counted = 0

    def backend(graph: Any, _example_inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal counted
            counted += 1
            return graph.forward(*args)

        return run

    graphs, note, current = 0, "", ""
    with _dynamo_as_found(), torch.no_grad():
        try:
            # it looks into the model, too: one of torch.jit, or one with attributes of any name, makes it raise
            compiled = torch.compile(function, backend=backend)
            for _ in range(2):
                graphs = 0
                for bucket, inputs in buckets.items():
                    counted, current = 0, bucket
                    inputs.clone().call(compiled)
                    graphs = max(graphs, counted)
        except Exception as error:
            place = f"bucket {current}: " if current else ""
            note = f"{place}Dynamo could not trace the model: {type(error).__name__}: {_headline(str(error))}"
        found = [_from_reason(reason) for reason in utils.graph_break_reasons if reason.graph_break]
        metrics = _named(utils.get_compilation_metrics())
        found += of_metrics(metrics)
        limited = dict.fromkeys(_place(entry) for entry in metrics if _hit_limit(entry))
    notes = [note, *(f"{place} passed Dynamo's recompile limit and runs without compilation" for place in limited)]
    return Breaks(graphs, _merge(found), "; ".join(filter(None, notes)))


def of_metrics(metrics: Sequence[Any]) -> list[GraphBreak]:
    """Functions that run in eager as a whole, then recompiles, by Dynamo's metrics of compilations."""
    found = [*map(_from_failure, metrics), *map(_from_recompile, metrics)]
    return [entry for entry in found if entry is not None]


@contextlib.contextmanager
def _dynamo_as_found() -> Iterator[None]:
    """Dynamo with empty state and default stance inside, and with its counters, metrics and logging as found after."""
    import torch._dynamo
    from torch._dynamo import utils

    metrics = utils.get_compilation_metrics()
    counters = copy.deepcopy(utils.counters)
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    torch._dynamo.reset()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(_METRICS)
    # its warnings are about the breaks that are collected here
    logger.setLevel(logging.ERROR)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        logger.setLevel(level)
        torch._dynamo.reset()
        utils.clear_compilation_metrics()
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)
        utils._compilation_metrics.extend(metrics)
        utils.counters.clear()
        utils.counters.update(counters)


def _headline(reason: str) -> str:
    """The first line and the explanation of Dynamo's text, which goes on with hints and links."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    explanation = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}: {explanation}" if explanation else lines[0]


def _from_reason(reason: Any) -> GraphBreak:
    # the innermost frame that is not torch's own
    frames = list(reason.user_stack)
    own = [frame for frame in frames if "torch/_dynamo" not in Path(frame.filename).as_posix()] or frames
    if not own:
        return GraphBreak(kind="break", file="unknown", line=0, reason=_headline(reason.reason))
    return GraphBreak(
        kind="break", file=shown_path(own[-1].filename), line=own[-1].lineno or 0, reason=_headline(reason.reason)
    )


def _from_failure(metrics: Any) -> GraphBreak | None:
    """A function that runs in eager as a whole, because it broke where Dynamo cannot resume."""
    if not metrics.fail_reason or _hit_limit(metrics):
        return None
    return GraphBreak(
        kind="break",
        file=shown_path(metrics.fail_user_frame_filename or metrics.co_filename or "unknown"),
        line=metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0,
        reason=f"{metrics.co_name} runs without compilation: {_headline(metrics.fail_reason)}",
    )


def _from_recompile(metrics: Any) -> GraphBreak | None:
    if not metrics.recompile_reason:
        return None
    # "0/0: s.k == 1     # s.k += 1  # file.py:29 in forward (HINT: …)", then the user's stack where Dynamo knows it
    first = metrics.recompile_reason.strip().splitlines()[0]
    guard = re.sub(r"^\d+/\d+: ", "", first).split("  #", 1)[0].split(" (HINT", 1)[0].strip()
    places = _LOCATION.findall(metrics.recompile_reason)
    file, line = places[-1] if places else (metrics.co_filename or "unknown", metrics.co_firstlineno or 0)
    reason = f"{metrics.co_name} compiled again, guard failed: {guard}"
    return GraphBreak(kind="recompile", file=shown_path(file), line=int(line), reason=reason)


def _hit_limit(metrics: Any) -> bool:
    return "recompile limit" in (metrics.fail_reason or "")


def _place(metrics: Any) -> str:
    return f"{metrics.co_name} ({shown_path(metrics.co_filename or 'unknown')}:{metrics.co_firstlineno})"


def _named(metrics: list[Any]) -> list[Any]:
    """Metrics with the function's name filled in: at the recompile limit Dynamo omits it; earlier metrics have it."""
    names = {entry.compile_id.split("/")[0]: entry for entry in metrics if entry.compile_id and entry.co_name}
    found = []
    for entry in metrics:
        source = names.get((entry.compile_id or "").split("/")[0])
        if entry.co_name is None and source is not None:
            place = {name: getattr(source, name) for name in ("co_name", "co_filename", "co_firstlineno")}
            entry = dataclasses.replace(entry, **place)
        found.append(entry)
    return found


def _merge(found: list[GraphBreak]) -> list[GraphBreak]:
    """One entry per place and reason; guards that differ only in numbers count as the same reason."""
    groups: dict[tuple[str, str, int, str], list[GraphBreak]] = {}
    for entry in found:
        groups.setdefault((entry.kind, entry.file, entry.line, re.sub(r"\d+(\.\d+)?", "#", entry.reason)), []).append(
            entry
        )
    merged = []
    for same in groups.values():
        # a place that is reached through several functions breaks once for each; only recompiles count one by one
        times = f" ({len(same)} times)" if len(same) > 1 and same[0].kind == "recompile" else ""
        merged.append(same[0].model_copy(update={"reason": same[0].reason + times}))
    return merged
