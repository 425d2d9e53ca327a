"""Result files: what every command leaves behind, as versioned JSON.

A record names its kind and format version, the machine, the versions and commit, and the exact command. A file of a
newer format, of another program, or cut short gets one clear error; older formats migrate step by step. A name that
ends with `.jsonl.gz` is written as compressed JSON lines, any other as JSON; both are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from wavecrest.errors import RecordError
from wavecrest.measure.timing import Interval, Measurement
from wavecrest.records import decode
from wavecrest.records.files import Model, first_problem, read_document, write_model
from wavecrest.records.provenance import Header
from wavecrest.records.renamed import current_backend

FORMAT_VERSION = 1
# percent of a roofline: more is beyond what a cache explains, so the ceiling was measured wrong
MOST_PERCENT = 110.0

# records made before a backend got its name of today are read with that
BackendName = Annotated[str, pydantic.AfterValidator(current_backend)]


class BucketBench(Model):
    """Baseline of one bucket."""

    bucket: str
    measurement: Measurement
    shapes: dict[str, str]
    peak_memory_bytes: int | None


class BenchRecord(Model):
    """`wavecrest bench`."""

    kind: Literal["bench"] = "bench"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    dtype: str
    parameters: int
    buckets: list[BucketBench]


class CategoryTime(Model):
    """Device (or CPU) self time of one category of operations."""

    category: str
    ms: float
    share: float
    calls: int


class OpTime(Model):
    """One operation with one set of shapes."""

    name: str
    category: str
    shapes: str
    calls: int
    ms: float
    share: float
    flops: float | None = None
    bytes: float | None = None
    # percent of the roofline at this arithmetic intensity; None where cost or peak is unknown
    roofline_percent: float | None = None
    bound: Literal["compute", "memory"] | None = None
    # the device kernels that ran it, longest first; empty on the CPU
    kernels: list[str] = Field(default_factory=list)

    @property
    def below_ceiling(self) -> bool:
        """False where an op is faster than its ceiling by more than a cache explains: the ceiling is not valid."""
        return self.roofline_percent is None or self.roofline_percent <= MOST_PERCENT


class Ceilings(Model):
    """Upper limits of an op: `bandwidth` in GB/s, `peak` in TFLOP/s by torch dtype name, and the `source` of both."""

    source: str
    bandwidth: float
    peak: dict[str, float]


class GraphBreak(Model):
    """Where Dynamo split the graph, or compiled again."""

    kind: Literal["break", "recompile"]
    file: str
    line: int
    reason: str


class BucketProfile(Model):
    """Where the time of one bucket goes."""

    bucket: str
    wall_ms: float
    kernel_ms: float
    # wall minus the union of kernel intervals; None on the CPU, where the two are the same thing
    idle_ms: float | None
    launches: int
    categories: list[CategoryTime]
    ops: list[OpTime]
    uncategorized: list[str]


class ProfileRecord(Model):
    """`wavecrest profile`."""

    kind: Literal["profile"] = "profile"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    buckets: list[BucketProfile]
    graphs: int
    breaks: list[GraphBreak]
    breaks_note: str = ""
    # ceilings that the percentages of the roofline refer to; None where they are not known
    ceilings: Ceilings | None = None


Verdict = Literal["kept", "reverted", "tie", "refused", "skipped"]


class ProcessSpeed(Model):
    """Original and result on one bucket, each in one process, which has no interval: times in ms.

    Records of before 2026-11-25 have the interval of blocks within the process.
    """

    bucket: str
    base_ms: float
    new_ms: float
    ratio: float
    ci: Interval | None = None
    blocks: int = 0
    clock: str
    note: str = ""


class BucketSpeed(ProcessSpeed):
    """A step's effect on one bucket: times in ms, ratio above 1 is faster.

    `blocks`: of the paired timer for a step, pairs of processes or phases for a result.
    """

    ci: Interval
    blocks: int
    # of the generator that drew the order of blocks
    seed: int | None = None


class BucketError(Model):
    """Error of one output of a bucket against the high-precision reference of the original model.

    `own` is the original model's error against that reference; `limit` is what was allowed; `rule` is the rule of the
    gate that was broken, or that the row belongs to.
    """

    bucket: str
    output: str
    error: float
    own: float
    limit: float
    passed: bool
    note: str = ""
    rule: str = ""


class GateBucket(Model):
    """The gate's inputs for one bucket: kinds of values, shapes beside the bucket's own, and what was left out."""

    bucket: str
    values: list[str]
    shapes: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class GateSummary(Model):
    """The work of the accuracy gate in a run.

    `seed` and the versions reproduce the values. `checks`, `calls` and `leaves` count over all candidates: models
    checked, calls made, values compared. `seconds` is what it all took, the reference outputs included.
    """

    seed: int
    rules: list[str]
    buckets: list[GateBucket]
    checks: int = 0
    calls: int = 0
    leaves: int = 0
    seconds: float = 0.0
    notes: list[str] = Field(default_factory=list)


class QualityResult(Model):
    """A workload's own end-to-end check."""

    name: str
    value: float
    limit: float
    passed: bool
    detail: str = ""


class StepOutcome(Model):
    """One step of the ladder: what it wanted, what was measured, and the verdict with its reason."""

    id: str
    title: str
    level: int
    attempt: int = 1
    params: dict[str, Any] = Field(default_factory=dict)
    sites: list[str] = Field(default_factory=list)
    predicted: float | None = None
    prediction: str = ""
    verdict: Verdict
    reason: str
    ratio: float | None = None
    ci: Interval | None = None
    speed: list[BucketSpeed] = Field(default_factory=list)
    numerics: list[BucketError] = Field(default_factory=list)
    quality: list[QualityResult] = Field(default_factory=list)
    seconds: float = 0.0


class Samples(Model):
    """Raw block times of one step and bucket, in ms."""

    step: str
    attempt: int
    bucket: str
    base: list[float]
    new: list[float]


class Result(Model):
    """The end of a run: optimized against original, each as its user runs it.

    `verdict`: "undecided" where no gain is proven and none is excluded; steps that were proven one by one then stay.
    `ci`: of 95 %, over pairs of processes or phases. That of phases covers the time of one process, not what differs
    between processes, and is not shown as an interval.
    """

    verdict: Literal["faster", "already optimal", "undecided"]
    # why it is that verdict, and what to do where it is undecided
    reason: str = ""
    ratio: float
    ci: Interval
    # fresh processes that alternate, phases of one process, or (before 2026-11-25) blocks of one process
    unit: Literal["processes", "phases", "blocks"] = "blocks"
    # how much longer the last original took than the first, as a share
    drift: float | None = None
    speed: list[BucketSpeed]
    numerics: list[BucketError]
    quality: list[QualityResult]
    peak_memory_before: int | None = None
    peak_memory_after: int | None = None


class DecisionRow(Model):
    """One dispatch decision, for the coverage table."""

    op: str
    key: str
    backend: BackendName
    config: dict[str, int]
    source: str
    reason: str
    calls: int
    refused: dict[BackendName, str] = Field(default_factory=dict)


class OptimizeRecord(Model):
    """`wavecrest optimize`: everything the report shows; the plan file is the part that is replayed."""

    kind: Literal["optimize"] = "optimize"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    spec: str | None
    dtype: str
    parameters: int
    level: int
    min_gain: float
    budget_seconds: float
    baseline: list[BucketBench]
    # the original against itself, by bucket: differences below this share are not resolved here
    resolution: dict[str, float] = Field(default_factory=dict)
    ceilings: Ceilings | None = None
    profile_before: list[BucketProfile] = Field(default_factory=list)
    profile_after: list[BucketProfile] = Field(default_factory=list)
    breaks: list[GraphBreak] = Field(default_factory=list)
    steps: list[StepOutcome] = Field(default_factory=list)
    samples: list[Samples] = Field(default_factory=list)
    result: Result | None = None
    coverage: list[DecisionRow] = Field(default_factory=list)
    # None in records made before the gate kept one
    gate: GateSummary | None = None
    notes: list[str] = Field(default_factory=list)


class VerifyProcess(Model):
    """Result of one fresh process."""

    process: int
    numerics: list[BucketError]
    quality: list[QualityResult]
    speed: list[ProcessSpeed]
    warnings: list[str] = Field(default_factory=list)


class VerifyRecord(Model):
    """`wavecrest verify`."""

    kind: Literal["verify"] = "verify"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    plan: str
    processes: list[VerifyProcess]
    ratio: float
    # None for a single process, which has none
    ci: Interval | None
    drift: float | None = None
    passed: bool
    reason: str


SamplesKept = Literal["full", "thinned"]


class ImplTiming(Model):
    """One implementation of an op on one case; `problem` says why it has no time, `ms` and `ci` are None then.

    `relative` and `worst` are its error against the op's reference (`numerics.compare`, the larger of all results).
    `samples` (ms) are the rounds of the measurement, the same rounds for every implementation of the case: `ms` is
    their median, `ci` its `timing.bootstrap_median`. The record says if some are left out.
    """

    name: str
    ms: float | None = None
    ci: Interval | None = None
    # the first call, with everything that compiles in it
    first_ms: float | None = None
    relative: float | None = None
    worst: float | None = None
    samples: list[float] = Field(default_factory=list)
    problem: str = ""


class OpCase(Model):
    """One op on one set of arguments: our implementation first, then the peers.

    `columns` is the last size of the first argument, 0 if it has no rows. `bytes` is the least that must move;
    `tensor_bytes` the size of the largest argument. `copy_ms` is a copy that reads and writes `bytes` in all, timed in
    the same rounds. `ratio` is the best peer's time over ours (above 1: ours is faster) with its paired interval; None
    where either has no time.
    """

    case: str
    dtype: str = ""
    columns: int = 0
    shapes: list[str] = Field(default_factory=list)
    bytes: int = 0
    flops: int = 0
    tensor_bytes: int = 0
    backend: BackendName = ""
    config: dict[str, int] = Field(default_factory=dict)
    rounds: int = 0
    copy_ms: float | None = None
    impls: list[ImplTiming] = Field(default_factory=list)
    best_peer: str | None = None
    ratio: float | None = None
    ci: Interval | None = None
    # why the whole case was not measured (out of memory, no time left)
    problem: str = ""


class OpBench(Model):
    """`wavecrest bench OP`: one op over a suite.

    `copy_gbps` is what percentages compare with: bytes read plus written, in GB/s, by a copy of a tensor of
    `copy_bytes` measured just before this op. `geomean` is over the ratios of all cases, with its paired interval.
    """

    op: str
    copy_gbps: float = 0.0
    copy_bytes: int
    clock: str = ""
    cases: list[OpCase] = Field(default_factory=list)
    geomean: float | None = None
    ci: Interval | None = None
    # why the measurement of this op ended early
    problem: str = ""


class OpBenchRecord(Model):
    """`wavecrest bench OP …`: several ops in one file, or one op a file; `peers` holds versions, `missing` reasons.

    `samples`: "thinned" where the file keeps every n-th round alone, as all did until 2026-11-24.
    """

    kind: Literal["bench-ops"] = "bench-ops"
    format_version: int = FORMAT_VERSION
    header: Header
    suite: str
    peers: dict[str, str]
    missing: dict[str, str]
    samples: SamplesKept = "thinned"
    ops: list[OpBench]


TuneStatus = Literal["refused", "failed", "wrong", "impossible", "dropped", "timed", "won"]


class TuneCandidate(Model):
    """One way to run the calls of a key, and what became of it.

    `status`: refused (the backend or the compiler declines it), failed (raised, ended its process, or did not come to
    an end), wrong, impossible (a time below what the hardware can do), dropped (correct, and slower than the best in
    the quick round), timed (in the final round), won; all but the last two with the reason. `role`: native is PyTorch,
    default what runs where nothing is measured.
    `quick_ms` is from the last quick round it was in; `samples` (ms) are the rounds of the final one, `ms` their median
    and `ci` its `timing.bootstrap_median`. The record says if some samples are left out.
    """

    backend: BackendName
    config: dict[str, int] = Field(default_factory=dict)
    role: Literal["native", "default", "tried"] = "tried"
    status: TuneStatus = "timed"
    reason: str = ""
    # the first call in this process: what was not compiled ahead is in it
    first_ms: float | None = None
    relative: float | None = None
    worst: float | None = None
    # the largest error as a share of what the op allows that element; None where the op says nothing
    of_bound: float | None = None
    quick_ms: float | None = None
    ms: float | None = None
    ci: Interval | None = None
    samples: list[float] = Field(default_factory=list)


class TunedKey(Model):
    """One shape key: its candidates and the winner among them.

    `us` and `native_us` are medians of the final round; `ratio` is native over winner with its paired interval. All are
    None where there is no such time; `least_us` is the floor below which a time is refused.
    """

    case: str
    key: dict[str, str | int | bool | None]
    backend: BackendName | None = None
    config: dict[str, int] = Field(default_factory=dict)
    reason: str = ""
    us: float | None = None
    native_us: float | None = None
    ratio: float | None = None
    ci: Interval | None = None
    least_us: float | None = None
    rounds: int = 0
    clock: str = ""
    seconds: float = 0.0
    candidates: list[TuneCandidate] = Field(default_factory=list)
    # why there is no winner
    problem: str = ""


class TuneCompilation(Model):
    """Compilation before anything was timed: distinct kernels, those that failed, and those not reached in time.

    `note` says why, where nothing was compiled.
    """

    kernels: int = 0
    failed: dict[str, str] = Field(default_factory=dict)
    left: int = 0
    workers: int = 0
    seconds: float = 0.0
    note: str = ""


class TuneRecord(Model):
    """`wavecrest tune OP`: `left` are the cases without a result and why; `problem` is why the run ended early.

    `children` are the processes that keys were spread over, 0 where all ran in one; `endings` say which of them ended
    in the middle of a key, and why; `unfinished` has, by case, the candidates that ended one and are not run again.
    `samples`: "thinned" where the file keeps every n-th round alone, as all did until 2026-11-24.
    """

    kind: Literal["tune"] = "tune"
    format_version: int = FORMAT_VERSION
    header: Header
    op: str
    suite: str
    budget_seconds: float
    seconds: float = 0.0
    compilation: TuneCompilation = Field(default_factory=TuneCompilation)
    samples: SamplesKept = "thinned"
    keys: list[TunedKey] = Field(default_factory=list)
    left: dict[str, str] = Field(default_factory=dict)
    children: int = 0
    endings: list[str] = Field(default_factory=list)
    unfinished: dict[str, dict[str, str]] = Field(default_factory=dict)
    problem: str = ""


class CalledKey(Model):
    """A key that a workload calls: `calls` in one pass over its buckets, what ran them before, and what was found.

    `left` says why it was not tuned or has no winner, `note` why its row decided nothing when the workload was timed.
    `before_us` and `us` are the op's own times, of what ran before (None where that was in no final) and of the winner.
    """

    op: str
    case: str
    key: dict[str, str | int | bool | None]
    calls: int
    backend: BackendName
    config: dict[str, int] = Field(default_factory=dict)
    source: str
    left: str = ""
    winner: BackendName = ""
    winner_config: dict[str, int] = Field(default_factory=dict)
    before_us: float | None = None
    us: float | None = None
    note: str = ""


class WorkloadTuneRecord(Model):
    """`wavecrest tune WORKLOAD`: the keys it calls, their tuning by op, and its own time before and after.

    `verdict`: kept (the workload is faster by the rows), tie, slower, nothing (no row changes what runs), or "" where
    the run ended before. `kept`: the rows are worth keeping; `written`: they are in the user's database.
    """

    kind: Literal["tune-workload"] = "tune-workload"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    seconds: float = 0.0
    keys: list[CalledKey] = Field(default_factory=list)
    tunes: list[TuneRecord] = Field(default_factory=list)
    buckets: list[BucketSpeed] = Field(default_factory=list)
    ratio: float | None = None
    ci: Interval | None = None
    verdict: Literal["", "kept", "tie", "slower", "nothing"] = ""
    reason: str = ""
    kept: bool = False
    written: bool = False
    problem: str = ""


Record = BenchRecord | ProfileRecord | OptimizeRecord | VerifyRecord | OpBenchRecord | TuneRecord | WorkloadTuneRecord
_ADAPTER: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_KINDS = ("bench", "profile", "optimize", "verify", "bench-ops", "tune", "tune-workload")
# format version n -> function that turns a version-n document into n + 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

R = TypeVar(
    "R", BenchRecord, ProfileRecord, OptimizeRecord, VerifyRecord, OpBenchRecord, TuneRecord, WorkloadTuneRecord
)


def save(record: Record, path: Path) -> None:
    """Write a record: as compressed JSON lines if the name ends with `.jsonl.gz`, else as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    write_model(path, record)


def load(path: Path) -> Record:
    """Read a result file of any kind, in either form.

    Raises:
        RecordError: damaged, foreign or newer.
    """
    document = read_document(path, what="result file", current=FORMAT_VERSION)
    if document.get("kind") not in _KINDS:
        raise RecordError(f"{decode.shown(path)} is not a wavecrest result file: kind {document.get('kind')!r}")
    while document["format_version"] < FORMAT_VERSION:
        if document["format_version"] not in MIGRATIONS:
            raise RecordError(f"{decode.shown(path)} has format {document['format_version']}, which there never was")
        document = MIGRATIONS[document["format_version"]](document)
    try:
        return _ADAPTER.validate_python(document)
    except pydantic.ValidationError as problem:
        raise RecordError(f"the result file {decode.shown(path)} is damaged: {first_problem(problem)}") from None


def load_as(path: Path, kind: type[R]) -> R:
    """Read a result file of one kind.

    Raises:
        RecordError: it is of another kind, damaged, foreign or newer.
    """
    record = load(path)
    if not isinstance(record, kind):
        raise RecordError(f"{path} is a {record.kind} result, not {kind.model_fields['kind'].default}")
    return record
