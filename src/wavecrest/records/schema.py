"""Records of models: what `bench`, `profile`, `optimize` and `verify` of a workload leave behind.

`schema_ops` has those of ops, `result_files` reads and writes both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from wavecrest.measure.timing import Interval, Measurement, Paired
from wavecrest.records.files import Model
from wavecrest.records.provenance import Header
from wavecrest.records.renamed import current_backend

FORMAT_VERSION = 1
# percent of a roofline: more is beyond what a cache explains, so the ceiling was measured wrong
MOST_PERCENT = 110.0

# records made before a backend got its name of today are read with that
BackendName = Annotated[str, pydantic.AfterValidator(current_backend)]


class BucketBench(Model):
    """Baseline of one bucket; `samples` and `tokens` are those of one call, None where it has no such thing."""

    bucket: str
    measurement: Measurement
    shapes: dict[str, str]
    peak_memory_bytes: int | None
    samples: int | None = None
    tokens: int | None = None


class BenchRecord(Model):
    """`wavecrest bench`."""

    kind: Literal["bench"] = "bench"
    format_version: int = FORMAT_VERSION
    header: Header
    workload: str
    dtype: str
    parameters: int
    buckets: list[BucketBench]
    # other forms of the model beside it: torch.compile of it, a plan applied to it
    sides: list[SideBench] = Field(default_factory=list)


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
    # what bounds it; "cache" where it took less time than its bytes take from memory, and a cache may have held them
    bound: Literal["compute", "memory", "cache"] | None = None
    # the device kernels that ran it, longest first; empty on the CPU
    kernels: list[str] = Field(default_factory=list)

    @property
    def below_ceiling(self) -> bool:
        """False where an op is faster than its ceiling by more than a cache explains: the ceiling is not valid."""
        return self.roofline_percent is None or self.bound == "cache" or self.roofline_percent <= MOST_PERCENT


class Ceilings(Model):
    """Upper limits of an op: `bandwidth` in GB/s, `peak` in TFLOP/s by torch dtype name, and the `source` of both.

    `cache` is the size of the last-level cache in bytes; 0 in records from before it was kept.
    """

    source: str
    bandwidth: float
    peak: dict[str, float]
    cache: int = 0


class GraphBreak(Model):
    """Where Dynamo split the graph, or compiled again."""

    kind: Literal["break", "recompile"]
    file: str
    line: int
    reason: str


# what makes a model slow, or a candidate slower than the model before it
CauseKind = Literal[
    "math_attention",  # SDPA took the math path
    "dense_mask",  # attention got a mask that is written out
    "graph_breaks",
    "recompiles",
    "eager",  # a function runs in eager, though it was to be compiled
    "norms",  # normalisation takes more, or is not fused
    "launch_gaps",  # the device waits for the host
    "host_sync",  # the host waits for a value from the device
    "layout",  # copies between memory layouts
    "float64",
    "kernels",  # other or slower kernels in a category
    "clocks",  # the device's clock is held down
    "compiled_code",  # fused code takes more than what it replaced
    "unknown",
]


class Cause(Model):
    """Something that costs time, in one sentence; `ms` of a call, None where that is not known."""

    kind: CauseKind
    text: str
    ms: float | None = None


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
    # what costs time in the model as it is, the buckets in their order
    causes: list[Cause] = Field(default_factory=list)


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

    @classmethod
    def of(cls, bucket: str, pair: Paired) -> BucketSpeed:
        """The row of a bucket's pair as the timer made it."""
        return cls(
            bucket=bucket, base_ms=pair.base_ms, new_ms=pair.new_ms, ratio=pair.ratio, ci=pair.ci, blocks=pair.n,
            clock=pair.clock, seed=pair.seed,
        )  # fmt: skip


class SideBench(Model):
    """Another form of a workload's model beside the model as it is (`base_ms`), or the reason why there is no time.

    `first_s`: seconds until every bucket had its first answer, compilation among them. `error`: the largest relative
    difference of an answer from the model's.
    """

    name: str
    first_s: float | None = None
    error: float | None = None
    buckets: list[BucketSpeed] = Field(default_factory=list)
    problem: str = ""


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
    checked, calls made, values compared. `timed` are answers of calls that were being timed, compared with those of the
    model before. `not_run` has the rules that were left out, for some candidate at least, with the reason. `seconds` is
    what it all took, the reference outputs included, the timed calls and the first compilation of a candidate not.
    """

    seed: int
    rules: list[str]
    buckets: list[GateBucket]
    checks: int = 0
    calls: int = 0
    leaves: int = 0
    timed: int = 0
    not_run: dict[str, str] = Field(default_factory=dict)
    seconds: float = 0.0
    notes: list[str] = Field(default_factory=list)

    def add(self, other: GateSummary) -> None:
        """Count the work of a second gate of the same seed too; its buckets and rules are its own."""
        self.checks += other.checks
        self.calls += other.calls
        self.leaves += other.leaves
        self.seconds += other.seconds
        self.notes += [text for text in other.notes if text not in self.notes]


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
    # of a step that was measured and not kept: what it spends more on than the model before
    causes: list[Cause] = Field(default_factory=list)
    # why it was tried when it was, and how many seconds that was expected to take
    chosen: str = ""
    expected_seconds: float | None = None
    ratio: float | None = None
    ci: Interval | None = None
    # the share below which a model differed from itself when it was judged; None where it was not timed in pairs
    resolution: float | None = None
    speed: list[BucketSpeed] = Field(default_factory=list)
    numerics: list[BucketError] = Field(default_factory=list)
    quality: list[QualityResult] = Field(default_factory=list)
    seconds: float = 0.0
    # of these: in Dynamo and the compiler behind it; and of those, without Inductor's own
    compile_seconds: float = 0.0
    trace_seconds: float = 0.0


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
    # what the user allowed; a record of before 2026-11-26 does not say
    allowed: dict[str, str] | None = None
    baseline: list[BucketBench]
    # a model against itself, by bucket: differences below this share are not resolved here. The original; or, where it
    # was measured again, the model before the step that asked for it
    resolution: dict[str, float] = Field(default_factory=dict)
    ceilings: Ceilings | None = None
    profile_before: list[BucketProfile] = Field(default_factory=list)
    profile_after: list[BucketProfile] = Field(default_factory=list)
    breaks: list[GraphBreak] = Field(default_factory=list)
    steps: list[StepOutcome] = Field(default_factory=list)
    samples: list[Samples] = Field(default_factory=list)
    result: Result | None = None
    coverage: list[DecisionRow] = Field(default_factory=list)
    # of the whole run; None in records of before 2026-11-25 and of interrupted runs
    seconds: float | None = None
    # of these: the final check and measurement, and what was kept for them; None before 2026-11-26
    final_seconds: float | None = None
    final_expected: float | None = None
    # parts of it in seconds; what a process does is the mean of the result's fresh processes
    final_parts: dict[str, float] = Field(default_factory=dict)
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
    # None for a single process: the interval is over processes
    ci: Interval | None
    drift: float | None = None
    passed: bool
    reason: str


class Check(Model):
    """One part of a check: passed, failed, or (None) not done, with the reason."""

    what: str
    passed: bool | None
    detail: str


class BundleRecord(Model):
    """Record of `wavecrest verify --bundle`.

    `outcome`: "confirmed": everything that was checked holds; "not confirmed": a check failed or could not be decided;
    "other machine": all that does not depend on the machine holds, and the speed cannot be compared here.
    """

    kind: Literal["bundle"] = "bundle"
    format_version: int = FORMAT_VERSION
    header: Header
    bundle: str
    # the first digits of the SHA-256 of the file
    content: str
    workload: str
    claim: str
    outcome: Literal["confirmed", "not confirmed", "other machine"]
    reason: str
    checks: list[Check]
    # the speed measured again; None where that was not done
    verified: VerifyRecord | None = None
