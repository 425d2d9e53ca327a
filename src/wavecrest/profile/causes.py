"""Name what makes a model slow, from one profile: what somebody who knows the profiler would say of the model as it is.

`compare` names what made a candidate slower than its base; the kinds of causes are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from wavecrest.records import BucketProfile, Cause, GraphBreak, OpTime

# a cost below this share of a call is not worth a line
LEAST = 0.02
# a device that waits for a larger share of a call is held up by the host
HOST_BOUND = 0.1
# kernels a launch beyond which they are those of a graph
REPLAYED = 2
COPY_TO_HOST = "Memcpy DtoH"
# ops that wait until the device has caught up, as their result is a Python number
WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")
# kernels that copy between memory layouts around convolutions
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose|mkldnn_reorder|to_mkldnn", re.IGNORECASE)
# SDPA's backend by what the names of ops and kernels have in them; the first that fits
_BACKENDS = (
    ("math", r"attention_math"),
    ("cudnn", r"cudnn"),
    ("efficient", r"efficient_attention|fmha_cutlass|fmha_kernel|attention_kernel_batched"),
    ("flash", r"flash|attn_fwd|fmha_fwd|overrideable"),
    ("math", r"softmax|gemm|gemv|cutlass|nvjet|Cijk|bmm"),
)
_SDPA = "scaled_dot_product"
# ops of SDPA take q, k and v; a fourth tensor is the mask
_TENSORS = 3


def causes_of(profile: BucketProfile) -> list[Cause]:
    """Name what costs time in one bucket, the largest cost first; causes without a known cost come last.

    Args:
        profile: of the model as it is called.
    """
    least = LEAST * profile.wall_ms
    found = [*_attention(profile), *_float64(profile), *_host(profile), *_layout(profile)]
    told = [cause for cause in found if cause.ms is None or cause.ms >= least or cause.kind == "host_sync"]
    return sorted(told, key=lambda cause: -(cause.ms or 0.0))


def causes_of_buckets(profiles: Sequence[BucketProfile]) -> list[Cause]:
    """The causes of each bucket, which is named where there are several."""
    return [
        cause if len(profiles) == 1 else cause.model_copy(update={"text": f"{profile.bucket}: {cause.text}"})
        for profile in profiles
        for cause in causes_of(profile)
    ]


def causes_of_breaks(breaks: Sequence[GraphBreak]) -> list[Cause]:
    """Graph breaks and recompiles, each kind in one sentence with the first place."""
    found = []
    for kind, of, name in (("graph_breaks", "break", "graph break"), ("recompiles", "recompile", "recompile")):
        rows = [row for row in breaks if row.kind == of]
        if rows:
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            text = f"{name} at {rows[0].file}:{rows[0].line}{more}: {rows[0].reason}"
            found.append(Cause(kind=kind, text=text))  # type: ignore[arg-type]
    return found


def sdpa_backends(profile: BucketProfile) -> Counter[str]:
    """Calls of scaled_dot_product_attention in one call of the model, by the backend that ran them."""
    found: Counter[str] = Counter()
    for op in _outermost(profile):
        found[_backend(op, profile)] += op.calls
    # on a GPU the kernels of the math path belong to the ops inside: one softmax a call, in the category of the call
    softmax = sum(op.calls for op in profile.ops if op.name == "aten::_softmax" and op.category == "attention")
    if softmax > found["math"]:
        found["unknown"] -= softmax - found["math"]
        found["math"] = softmax
    return +found


def masked_calls(profile: BucketProfile) -> int:
    """Calls of scaled_dot_product_attention with a mask that is written out."""
    return sum(op.calls for op in _outermost(profile) if _mask(op))


def is_float64(op: OpTime) -> bool:
    """Whether an op computes in double precision; single numbers, such as the scale of attention, do not count."""
    return op.shapes.endswith(" float64") and not op.shapes.startswith("scalar")


def is_layout(op: OpTime) -> bool:
    """Whether an op copies between memory layouts."""
    return any(_LAYOUT.search(name) for name in (op.name, *op.kernels))


def reads_host(op: OpTime) -> bool:
    """Whether an op brings a value to the host."""
    return op.name in WAITS or any(kernel.startswith(COPY_TO_HOST) for kernel in (op.name, *op.kernels))


def reads(profile: BucketProfile) -> int:
    """Calls that bring a value to the host; of nested ops (item, _local_scalar_dense) only one counts."""
    by_name: Counter[str] = Counter()
    for op in profile.ops:
        if reads_host(op):
            by_name[op.name] += op.calls
    return max(by_name.values(), default=0)


def total(ops: Sequence[OpTime], wanted: Callable[[OpTime], bool]) -> float:
    """Milliseconds of the ops that are wanted."""
    return sum(op.ms for op in ops if wanted(op))


def _outermost(profile: BucketProfile) -> list[OpTime]:
    """The rows that are calls of SDPA: its public op if it is there, else the op inside that compiled code calls."""
    rows = [op for op in profile.ops if _SDPA in op.name]
    public = [op for op in rows if op.name == "aten::scaled_dot_product_attention"]
    if public:
        return public
    names = {op.name for op in rows}
    # of nested ops (the math path's, the fused one inside) the shortest name is the outer one
    outer = min(names, key=len, default="")
    return [op for op in rows if op.name == outer]


def _backend(op: OpTime, profile: BucketProfile) -> str:
    names = [op.name, *op.kernels]
    if op.name == "aten::scaled_dot_product_attention" and not op.kernels:
        # on the CPU the op inside has the name
        names = [row.name for row in profile.ops if _SDPA in row.name and row is not op] or names
    for backend, pattern in _BACKENDS:
        if any(re.search(pattern, name) for name in names):
            return backend
    return "unknown"


def _mask(op: OpTime) -> str:
    tensors = op.shapes.rpartition(" ")[0].split(", ")
    return tensors[_TENSORS] if len(tensors) > _TENSORS and tensors[_TENSORS].count("x") >= 1 else ""


def _attention(profile: BucketProfile) -> Iterator[Cause]:
    attention = total(profile.ops, lambda op: op.category == "attention")
    share = attention / profile.wall_ms if profile.wall_ms else 0.0
    math = sdpa_backends(profile)["math"]
    if math:
        calls = sum(op.calls for op in _outermost(profile))
        text = (
            f"SDPA takes the math path in {math} of {_calls(calls)}: attention takes {_ms(attention)} ms ({share:.0%})"
        )
        yield Cause(kind="math_attention", text=text, ms=attention)
    masked = [op for op in _outermost(profile) if _mask(op)]
    if masked:
        count = sum(op.calls for op in masked)
        text = f"attention gets a mask that is written out ({_mask(masked[0])}) in {_calls(count)}"
        yield Cause(kind="dense_mask", text=f"{text}: all of it is read, and no key that it hides is skipped")


def _float64(profile: BucketProfile) -> Iterator[Cause]:
    ops = [op for op in profile.ops if is_float64(op)]
    if ops:
        names = list(dict.fromkeys(op.name.removeprefix("aten::") for op in sorted(ops, key=lambda op: -op.ms)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        ms = sum(op.ms for op in ops)
        yield Cause(kind="float64", text=f"float64 in {', '.join(names[:3])}{more}: {_ms(ms)} ms", ms=ms)


def replayed(profile: BucketProfile) -> int:
    """The kernels of a call that replays graphs, in which nothing waits for the host; 0 where they are launched."""
    kernels = sum(op.calls for op in profile.ops)
    return kernels if profile.launches * REPLAYED < kernels else 0


def _host(profile: BucketProfile) -> Iterator[Cause]:
    idle = profile.idle_ms or 0.0
    share = idle / profile.wall_ms if profile.wall_ms else 0.0
    if share >= HOST_BOUND:
        text = f"the device waits for the host {share:.0%} of the time, {profile.launches} launches a call"
        if kernels := replayed(profile):
            text = f"the device has no work {share:.0%} of the time, between {kernels} kernels of a replayed graph"
        yield Cause(kind="launch_gaps", text=text, ms=idle)
    count = reads(profile)
    if count:
        own = total(profile.ops, reads_host)
        text = f"a value is read into Python {count} time{'s' * (count != 1)} a call"
        what = (
            "the host waits for the device, and the graph breaks there"
            if profile.idle_ms is not None
            else ("the graph breaks there, and on a GPU the host would wait")
        )
        yield Cause(kind="host_sync", text=f"{text}: {what}", ms=own)


def _layout(profile: BucketProfile) -> Iterator[Cause]:
    ms = total(profile.ops, is_layout)
    if ms:
        yield Cause(kind="layout", text=f"copies between memory layouts take {_ms(ms)} ms", ms=ms)


def _calls(number: int) -> str:
    return f"{number} call{'s' * (number != 1)}"


def _ms(value: float) -> str:
    return f"{value:.3g}"
