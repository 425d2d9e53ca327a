"""Records of ops: what `bench OP` and `tune` leave behind, down to the samples of each candidate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wavecrest.measure.timing import Interval
from wavecrest.records.files import Model
from wavecrest.records.provenance import Header
from wavecrest.records.schema import FORMAT_VERSION, BackendName, BucketSpeed

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

    `sizes` are those asked for by name, empty for a case of a suite. `columns` is the last size of the first argument,
    0 if it has no rows. `flops` and `bytes` are the least that must be computed and moved; `peak_tflops` is what the
    datasheet has for arguments of this dtype, None where nothing is known;
    `tensor_bytes` the size of the largest argument. `copy_ms` is a copy that reads and writes `bytes` in all, timed in
    the same rounds. `ratio` is the best peer's time over ours (above 1: ours is faster) with its paired interval; None
    where either has no time.
    """

    case: str
    sizes: dict[str, int] = Field(default_factory=dict)
    dtype: str = ""
    columns: int = 0
    shapes: list[str] = Field(default_factory=list)
    bytes: int = 0
    flops: int = 0
    peak_tflops: float | None = None
    tensor_bytes: int = 0
    backend: BackendName = ""
    config: dict[str, int] = Field(default_factory=dict)
    rounds: int = 0
    # what the time limit of the case left out; empty: nothing
    cut: str = ""
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

    `peak_gbps` is the bandwidth of the datasheet that `peaks_from` names, None where the device is not known.
    `samples`: "thinned" where the file keeps every n-th round alone, as all did until 2026-11-24.
    """

    kind: Literal["bench-ops"] = "bench-ops"
    format_version: int = FORMAT_VERSION
    header: Header
    suite: str
    peers: dict[str, str]
    missing: dict[str, str]
    peak_gbps: float | None = None
    peaks_from: str = ""
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


class SmokeRow(Model):
    """One small call of an op on one backend, beside the oracle; `picked`: it is the one that dispatch runs here.

    "refused": the backend does not take the call. `reason` says why, and what is wrong of other outcomes than "ok".
    """

    op: str
    backend: str
    dtype: str
    outcome: Literal["ok", "wrong", "failed", "refused"]
    picked: bool = False
    reason: str = ""


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
    `in_a_row`: calls in a graph whose time was divided by their number; 1: a call alone.
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
    in_a_row: int = 1
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
