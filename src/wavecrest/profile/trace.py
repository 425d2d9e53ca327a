"""Read an exported torch.profiler trace: device intervals or CPU self times, by category and by op with its shapes.

The events used are those of the Chrome trace: `kernel`, `gpu_memcpy` and `gpu_memset` on the device, `cuda_runtime`
and `cuda_driver` launches (ROCm uses the same words), `cpu_op` with its input shapes, and one `user_annotation` named
`MARK` around each profiled call. Times in the trace are microseconds; everything returned is per call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from wavecrest.errors import RecordError
from wavecrest.profile import roofline
from wavecrest.profile.categories import CATEGORIES, Category, category
from wavecrest.records import CategoryTime, Ceilings, OpTime, decode

MARK = "wavecrest.call"
# bytes of a trace: a call of a large model leaves some 100 MB
MOST_BYTES = 2 << 30
# time of a call on the CPU in which no op was running
OUTSIDE = "(outside any op)"
# Inductor's C++ kernels leave no events of their own; this is the time of the graph that calls them
COMPILED = "(fused CPU code)"

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime"}
_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperative|GraphLaunch|Memcpy|Memset")
_NOT_TENSORS = {"", "Scalar", "ScalarList", "GenericList", "TensorList", "OptionalTensorList"}
# ops inside an op of these categories count as that category: the GEMMs and the softmax of a composite attention are
# attention, the im2col and the GEMM of a convolution are convolution
_INHERITED: tuple[Category, ...] = ("attention", "convolution")
# ops of PyTorch that are a layer with attention and products in it: what runs inside counts by its own name
_LAYERS = ("aten::_transformer_encoder_layer", "aten::_native_multi_head_attention")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the time of one call goes, in ms.

    `kernel_ms` is the union of device intervals, or on the CPU the traced length of the call; `launches` counts launch
    calls of the host (0 on the CPU); category times are sums, which exceed the union where streams overlap.
    """

    kernel_ms: float
    launches: int
    categories: list[CategoryTime]
    ops: list[OpTime]
    uncategorized: list[str]
    on_device: bool


@dataclass(eq=False)
class _Op:
    """A `cpu_op` event in the tree of its thread."""

    name: str
    args: Mapping[str, Any]
    start: float
    end: float
    parent: _Op | None = None
    children: list[_Op] = field(default_factory=list)

    @property
    def self_us(self) -> float:
        return max(0.0, self.end - self.start - sum(child.end - child.start for child in self.children))

    @cached_property
    def arguments(self) -> list[roofline.Argument]:
        return list(_arguments(self.args))

    @cached_property
    def work(self) -> roofline.Work | None:
        return roofline.work(self.name, self.arguments)

    def outward(self) -> Iterator[_Op]:
        """This op, then the ones around it."""
        node: _Op | None = self
        while node is not None:
            yield node
            node = node.parent

    def inside(self) -> Iterator[_Op]:
        """All ops below this one."""
        for child in self.children:
            yield child
            yield from child.inside()


def load(path: Path, *, own: bool = False) -> list[Event]:
    """The events of an exported trace (`.json` or `.json.gz`).

    Args:
        path: the file.
        own: this process has just written it: its values, which are millions, are not checked one by one.

    Raises:
        RecordError: the file is missing, damaged or not a Chrome trace.
    """
    text = decode.read_text(path, what="trace", most=MOST_BYTES)
    try:
        document = decode.own_json_of(text) if own else decode.json_of(text, finite=False)
    except ValueError as error:
        raise RecordError(f"cannot read the trace {decode.shown(path)}: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise RecordError(f"{path} is not a Chrome trace: it has no traceEvents")
    return events


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length covered by intervals that may overlap."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def short_name(kernel: str) -> str:
    """A kernel name without return type, template arguments and parameters."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = re.split(r"[<(\[]", name, maxsplit=1)[0].strip()
    return (cut or name)[:100]


def summarize(events: Sequence[Event], *, ceilings: Ceilings | None = None) -> Summary:
    """Totals of a trace.

    Args:
        events: the trace's events, with one `MARK` annotation around each profiled call.
        ceilings: peaks that percentages of the roofline refer to; None leaves percentages out.

    Raises:
        RecordError: there is no `MARK` in the trace, so nothing says what one call is.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [event for event in spans if event.get("cat") == "user_annotation" and event["name"] == MARK]
    if not marks:
        raise RecordError(f"the trace has no {MARK} annotation: profile with wavecrest, or mark each call by this name")
    ops = _tree(spans, marks)
    device = [event for event in spans if event.get("cat") in _DEVICE]
    table = _Table(calls=len(marks), ceilings=ceilings)
    if device:
        return _on_device(spans, device, ops, table)
    return _on_cpu(marks, ops, table)


def _arguments(args: Mapping[str, Any]) -> Iterator[roofline.Argument]:
    shapes, types = args.get("Input Dims", ()), args.get("Input type", ())
    strides, values = args.get("Input Strides", ()), args.get("Concrete Inputs", ())
    for index, shape in enumerate(shapes):
        kind = types[index] if index < len(types) else ""
        stride = strides[index] if index < len(strides) else ()
        if kind == "TensorList":
            for one in shape:
                yield roofline.Argument(tuple(one), (), "")
        elif kind in _NOT_TENSORS:
            yield roofline.Argument(value=str(values[index]) if index < len(values) else "")
        else:
            yield roofline.Argument(tuple(shape), tuple(stride), kind)


def _shapes(arguments: Sequence[roofline.Argument]) -> str:
    tensors = [argument for argument in arguments if argument.shape is not None]
    texts = ["x".join(str(size) for size in argument.shape or ()) or "scalar" for argument in tensors]
    shown = ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
    dtype = roofline.ELEMENTS.get(tensors[0].dtype, (0, tensors[0].dtype))[1] if tensors else ""
    return f"{shown} {dtype}".strip()


def _inside(event: Event, marks: Sequence[Event]) -> bool:
    return any(mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"] for mark in marks)


def _tree(spans: Sequence[Event], marks: Sequence[Event]) -> list[tuple[Event, _Op]]:
    """Ops inside the marked calls, with parents; outermost first in each thread."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in spans:
        graph = event.get("cat") == "user_annotation" and event["name"].startswith("## Call CompiledFxGraph")
        if (event.get("cat") == "cpu_op" or graph) and _inside(event, marks):
            threads[event.get("pid"), event.get("tid")].append(event)
    found = []
    for thread in threads.values():
        stack: list[_Op] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            name = event["name"] if event["cat"] == "cpu_op" else COMPILED
            op = _Op(name, event.get("args", {}), event["ts"], event["ts"] + event["dur"])
            while stack and stack[-1].end <= op.start:
                stack.pop()
            if stack:
                op.parent = stack[-1]
                stack[-1].children.append(op)
            stack.append(op)
            found.append((event, op))
    return found


@dataclass(slots=True)
class _Row:
    us: float = 0.0
    units: set[int] = field(default_factory=set)
    works: dict[int, roofline.Work] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class _Table:
    """Adds up rows keyed by (name, category, shapes); a unit is one call of an op, so that its work counts once."""

    calls: int
    ceilings: Ceilings | None
    rows: dict[tuple[str, Category, str], _Row] = field(default_factory=lambda: defaultdict(_Row))

    def add(
        self,
        name: str,
        kind: Category,
        shapes: str,
        us: float,
        unit: int,
        *,
        work: roofline.Work | None,
        kernel: str = "",
    ) -> None:
        row = self.rows[name, kind, shapes]
        row.us += us
        row.units.add(unit)
        if work is not None:
            row.works[unit] = work
        if kernel:
            row.kernels[kernel] += us

    def summary(self, kernel_us: float, launches: float, *, on_device: bool) -> Summary:
        total = sum(row.us for row in self.rows.values())
        ops = [self._op(key, row, total) for key, row in self.rows.items()]
        ops.sort(key=lambda op: -op.ms)
        categories = []
        for kind in CATEGORIES:
            mine = [op for op in ops if op.category == kind]
            ms, calls = sum(op.ms for op in mine), sum(op.calls for op in mine)
            if mine:
                share = ms * 1e3 * self.calls / total if total else 0.0
                categories.append(CategoryTime(category=kind, ms=ms, share=share, calls=calls))
        categories.sort(key=lambda entry: -entry.ms)
        other = list(dict.fromkeys(op.name for op in ops if op.category == "other"))
        return Summary(
            kernel_us / self.calls / 1e3, round(launches / self.calls), categories, ops, other, on_device=on_device
        )

    def _op(self, key: tuple[str, Category, str], row: _Row, total: float) -> OpTime:
        name, kind, shapes = key
        known = list(row.works.values())
        # a row's time covers all its calls; work known for only some of them would be compared with too much time
        known = known if len(known) == len(row.units) else []
        flops = sum(found.flops for found in known) / len(known) if known else None
        moved = sum(found.bytes for found in known) / len(known) if known else None
        place = None
        if known and flops is not None and moved is not None and self.ceilings is not None:
            mean = roofline.Work(flops, moved, known[0].dtype, known[0].matrix)
            place = roofline.placed(mean, row.us / len(known) / 1e3, self.ceilings)
        return OpTime(
            name=name,
            category=kind,
            shapes=shapes,
            calls=max(1, round(len(row.units) / self.calls)),
            ms=row.us / self.calls / 1e3,
            share=row.us / total if total else 0.0,
            flops=flops,
            bytes=moved,
            roofline_percent=place[0] if place else None,
            bound=place[1] if place else None,
            kernels=sorted(row.kernels, key=lambda kernel: -row.kernels[kernel])[:3],
        )


def _inherited(op: _Op | None) -> Category | None:
    for node in op.outward() if op is not None else ():
        kind = category(node.name)
        if kind in _INHERITED and not node.name.startswith(_LAYERS):
            return kind
    return None


def _on_device(
    spans: Sequence[Event], device: Sequence[Event], ops: Sequence[tuple[Event, _Op]], table: _Table
) -> Summary:
    launched_by = _Launches(spans, ops)
    for event in device:
        kernel, op = event["name"], launched_by.op(event)
        kind = _inherited(op) or category(kernel)
        if kind == "other" and op is not None:
            kind = category(op.name)
        # Triton kernels and compiled regions are annotated too, but only ops with a schema name the requested operation
        owner = op if op is not None and "::" in op.name else None
        if owner is not None:
            owner = next((node for node in owner.outward() if node.work is not None), owner)
        named = owner is not None and category(owner.name) == kind
        name = owner.name if owner is not None else short_name(kernel)
        shapes = _shapes((owner or op).arguments) if (owner or op) is not None else ""  # type: ignore[union-attr]
        table.add(
            name,
            kind,
            shapes,
            event["dur"],
            id(owner) if owner is not None else id(event),
            # the bias copy beside a GEMM must not count the GEMM's work again, nor a fill that of an attention whose
            # products are ops of their own
            work=_own_work(owner) if owner is not None and named else None,
            kernel=short_name(kernel) if owner is not None else "",
        )
    busy = union((event["ts"], event["ts"] + event["dur"]) for event in device)
    return table.summary(busy, launched_by.count or len(device), on_device=True)


class _Launches:
    """Find the op that launched a device event: by external id, else by the time of the correlated launch call."""

    def __init__(self, spans: Sequence[Event], ops: Sequence[tuple[Event, _Op]]) -> None:
        self._by_id = {event.get("args", {}).get("External id"): op for event, op in ops}
        self._by_id.pop(None, None)
        self._threads: dict[tuple[Any, Any], list[_Op]] = defaultdict(list)
        for event, op in ops:
            self._threads[event.get("pid"), event.get("tid")].append(op)
        runtime = [event for event in spans if event.get("cat") in _RUNTIME]
        self._runtime = {event.get("args", {}).get("correlation"): event for event in runtime}
        self._around: dict[Any, _Op | None] = {}
        self.count = sum(1 for event in runtime if _LAUNCH.search(event["name"]))

    def op(self, event: Event) -> _Op | None:
        args = event.get("args", {})
        found = self._by_id.get(args.get("External id"))
        if found is not None:
            return found
        launch = self._runtime.get(args.get("correlation")) if "correlation" in args else None
        if launch is None:
            return None
        # a graph replay launches all its kernels with one call
        correlation = args["correlation"]
        if correlation not in self._around:
            by_id = self._by_id.get(launch.get("args", {}).get("External id"))
            self._around[correlation] = by_id if by_id is not None else self._innermost(launch)
        return self._around[correlation]

    def _innermost(self, launch: Event) -> _Op | None:
        thread = self._threads.get((launch.get("pid"), launch.get("tid")), [])
        around = (op for op in thread if op.start <= launch["ts"] < op.end)
        return max(around, key=lambda op: op.start, default=None)


def _own_work(op: _Op) -> roofline.Work | None:
    """The op's work, unless ops inside it account for it: in a composite only the innermost op counts."""
    found = op.work
    if found is None:
        return None
    inner = [node.work for node in op.inside() if node.work is not None]
    # copies inside a GEMM do not account for its work; a GEMM inside it does
    return None if any(work.matrix or not found.matrix for work in inner) else found


def _on_cpu(marks: Sequence[Event], ops: Sequence[tuple[Event, _Op]], table: _Table) -> Summary:
    length = sum(mark["dur"] for mark in marks)
    threads = {(mark.get("pid"), mark.get("tid")) for mark in marks}
    inside = 0.0
    for event, op in ops:
        if op.parent is None and (event.get("pid"), event.get("tid")) in threads:
            inside += op.end - op.start
        kind = _inherited(op) or category(op.name)
        table.add(op.name, kind, _shapes(op.arguments), op.self_us, id(op), work=_own_work(op))
    outside = max(0.0, length - inside)
    for index in range(len(marks)):
        table.add(OUTSIDE, "other", "", outside / len(marks), -1 - index, work=None)
    return table.summary(length, 0, on_device=False)
