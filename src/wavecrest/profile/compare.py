"""Compare the profiles of an original and a candidate, and name what made the candidate slower.

Everything is read from two `BucketProfile`s, so a cause names what the profiler saw: categories whose time grew, the
ops and kernels that came or went, a wider dtype, copies to the host, and time in which the device had no work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from wavecrest.profile.categories import CATEGORIES
from wavecrest.profile.causes import (
    LEAST,
    is_float64,
    is_layout,
    masked_calls,
    reads,
    reads_host,
    replayed,
    sdpa_backends,
    total,
)
from wavecrest.profile.trace import COMPILED, OUTSIDE
from wavecrest.records import BucketProfile, Cause, CauseKind, OpTime

# a kernel below this share of its category's growth (that went: of its category's time before) is not named
NAMED = 0.1
WIDE = ("float64", "float32")


def causes(base: BucketProfile, new: BucketProfile) -> list[Cause]:
    """Name what grew from `base` to `new` by 2 % of a call or more, the largest cost first.

    On the CPU the time of compiled code has no ops of its own; it is one entry, against everything that it replaced.
    """
    least = LEAST * base.wall_ms
    found = [*_written_out(base, new), *_categories(base, new, least), *_idle(base, new), *_waits(base, new)]
    return sorted((cause for cause in found if _cost(cause) >= least), key=lambda cause: -_cost(cause))


def _cost(cause: Cause) -> float:
    return cause.ms or 0.0


def _written_out(base: BucketProfile, new: BucketProfile) -> Iterator[Cause]:
    """Calls of a fused kernel that a compiler has written out as products and a softmax."""
    before, after = sdpa_backends(base), sdpa_backends(new)
    fused = before.total() - before["math"]

    def took(profile: BucketProfile, category: str) -> float:
        return total(profile.ops, lambda op: op.category == category)

    # a replayed graph has no calls: its kernels say whether attention is still one
    if not fused or after.total() or took(new, "attention") > took(base, "attention") / 2:
        return
    grown = {name: took(new, name) - took(base, name) for name in ("gemm", "normalisation", "attention")}
    yield Cause(
        kind="math_attention",
        text=f"{fused} calls of SDPA are written out: products take {_ms(grown['gemm'])} ms more, "
        f"softmax and norms {_ms(grown['normalisation'])} ms more",
        ms=sum(grown.values()),
    )


def _categories(base: BucketProfile, new: BucketProfile, least: float) -> Iterator[Cause]:
    compiled = total(new.ops, lambda op: op.name == COMPILED)
    replaced = 0.0
    for category in CATEGORIES:
        before = total(base.ops, lambda op, category=category: _is(op, category))  # type: ignore[misc]
        after = total(new.ops, lambda op, category=category: _is(op, category))  # type: ignore[misc]
        if compiled and after < before:
            replaced += before - after
        elif after - before >= least:
            text = f"{category} {_ms(before)} → {_ms(after)} ms"
            kind, why = _kind(base, new, category, after - before)
            changes = "; ".join(filter(None, (why, _changes(base, new, category, after - before))))
            yield Cause(kind=kind, text=f"{text}: {changes}" if changes else text, ms=after - before)
    if compiled > replaced:
        text = f"compiled code takes {_ms(compiled)} ms, what it replaced took {_ms(replaced)} ms"
        yield Cause(kind="compiled_code", text=text, ms=compiled - replaced)


def _kind(base: BucketProfile, new: BucketProfile, category: str, grown: float) -> tuple[CauseKind, str]:
    """The kind of a category's growth, and what stands behind it in words."""

    def came(wanted: Callable[[OpTime], bool]) -> bool:
        def mine(op: OpTime) -> bool:
            return _is(op, category) and wanted(op)

        return total(new.ops, mine) - total(base.ops, mine) >= grown / 2

    if category == "attention":
        math = sdpa_backends(new)["math"] > sdpa_backends(base)["math"]
        path = "SDPA took the math path" if math else ""
        if masked_calls(new) > masked_calls(base):
            return "dense_mask", f"{path}, a mask that is written out appeared".removeprefix(", ")
        if math:
            return "math_attention", path
    if came(is_float64):
        return "float64", ""
    if category == "memory" and came(is_layout):
        return "layout", "copies between memory layouts"
    return ("norms" if category == "normalisation" else "kernels"), ""


def _is(op: OpTime, category: str) -> bool:
    return op.category == category and op.name not in (COMPILED, OUTSIDE)


def _changes(base: BucketProfile, new: BucketProfile, category: str, grown: float) -> str:
    """The ops of a category that came, went or grew, with the dtype that they computed in."""
    wider = set(WIDE) - {_dtype(op) for op in base.ops}
    before, after = _by_name(base.ops, category, wider), _by_name(new.ops, category, wider)
    parts = []
    came = {name: ms for name, ms in after.items() if name not in before and ms >= NAMED * grown}
    went = {name: ms for name, ms in before.items() if name not in after and ms >= NAMED * sum(before.values())}
    if came:
        parts.append(f"{_list(came)} came")
    if went:
        parts.append(f"{_list(went)} went")
    slower = {
        name: ms - before[name] for name, ms in after.items() if name in before and ms - before[name] >= NAMED * grown
    }
    parts += [
        f"{name} {_ms(before[name])} → {_ms(after[name])}"
        for name in sorted(slower, key=lambda name: -slower[name])[:2]
    ]
    return ", ".join(parts)


def _by_name(ops: Sequence[OpTime], category: str, wider: set[str]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for op in ops:
        if _is(op, category):
            totals[_label(op, wider)] += op.ms
    return totals


def _label(op: OpTime, wider: set[str]) -> str:
    """The longest kernel if any, as the op's name can hide a change of backend; with a dtype that is new."""
    name = op.kernels[0] if op.kernels else op.name.removeprefix("aten::")
    dtype = _dtype(op)
    return f"{name} ({dtype})" if dtype in wider else name


def _dtype(op: OpTime) -> str:
    return op.shapes.rsplit(" ", 1)[-1]


def _idle(base: BucketProfile, new: BucketProfile) -> Iterator[Cause]:
    if base.idle_ms is None or new.idle_ms is None:
        return
    share = new.idle_ms / new.wall_ms if new.wall_ms else 0.0
    before = base.idle_ms / base.wall_ms if base.wall_ms else 0.0
    text = f"the device waits for the host {share:.0%} of the time ({before:.0%} before), "
    text += f"{new.launches} launches a call ({base.launches} before)"
    if kernels := replayed(new):
        text = f"the device has no work {share:.0%} of the time ({before:.0%} before), between {kernels} kernels of a "
        text += "replayed graph"
    yield Cause(kind="launch_gaps", text=text, ms=new.idle_ms - base.idle_ms)


def _waits(base: BucketProfile, new: BucketProfile) -> Iterator[Cause]:
    """Reads by the host: they cost the launches that could have been queued, at least the whole idle time that came."""
    before, after = reads(base), reads(new)
    if after > before:
        idle = (new.idle_ms or 0.0) - (base.idle_ms or 0.0)
        own = total(new.ops, reads_host) - total(base.ops, reads_host)
        text = f"the host reads from the device {after} times a call ({before} before) and waits"
        yield Cause(kind="host_sync", text=text, ms=max(idle, own))


def _list(times: dict[str, float]) -> str:
    names = sorted(times, key=lambda name: -times[name])
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ms(value: float) -> str:
    return f"{value:.3g}"
