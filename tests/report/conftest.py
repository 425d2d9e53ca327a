# ruff: noqa: E501
"""Records as an optimize run leaves them. Every figure is made up: they test the page, they claim nothing."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest

from wavecrest import records
from wavecrest.measure.timing import Interval, Measurement, bootstrap_median, bootstrap_speedup
from wavecrest.records import (
    BucketBench,
    BucketError,
    BucketProfile,
    BucketSpeed,
    CategoryTime,
    DecisionRow,
    GraphBreak,
    OpTime,
    OptimizeRecord,
    QualityResult,
    Result,
    Samples,
    StepOutcome,
    Verdict,
)
from wavecrest.records.provenance import Header, Versions

HOSTILE = '<script>alert("x & y")</script>'
BUCKETS = {"prefill b1 s2048": 41.8, "decode b16": 7.42}


def times(median: float, seed: str, n: int = 40, noise: float = 0.012) -> list[float]:
    draw = random.Random(seed)
    return [median * (1 + abs(draw.gauss(0, noise))) for _ in range(n)]


def header(command: str = "wavecrest optimize llama.py:make --level 4 -o run/") -> Header:
    return Header(
        created="2026-03-02T09:41:07+00:00",
        command=command,
        commit="3f9c2ab",
        evidence="measured",
        device={
            "kind": "cuda",
            "index": 0,
            "arch": "gfx942",
            "name": "Sample Accelerator",
            "compute_units": 304,
            "memory_bytes": 205_520_896_000,
            "driver": "hip 7.2.1",
        },
        versions=Versions(
            wavecrest="0.1.0",
            python="3.11.7",
            torch="2.13.0+rocm7.2",
            triton="3.6.0",
            transformers="5.23.0",
            numpy="2.3.5",
            platform="Linux-6.8-x86_64-with-glibc2.35",
        ),
        environment={"TORCH_BLAS_PREFER_HIPBLASLT": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )


def bench(bucket: str, median: float, noise: float = 0.012) -> BucketBench:
    samples = times(median, bucket, noise=noise)
    measurement = Measurement(
        tuple(samples), tuple(value * 1.1 for value in samples), median * 60, "device events", bootstrap_median(samples)
    )
    return BucketBench(
        bucket=bucket,
        measurement=measurement,
        shapes={"input_ids": "int64[1, 2048]", "attention_mask": "int64[1, 2048]"},
        peak_memory_bytes=17_300_000_000,
    )


class Run:
    """Builds the steps of a run on those kept so far, with samples drawn around the wanted gain."""

    def __init__(self) -> None:
        self.level = dict(BUCKETS)
        self.steps: list[StepOutcome] = []
        self.samples: list[Samples] = []

    def speeds(
        self, step: str, attempt: int, gain: float, base: dict[str, float]
    ) -> tuple[list[BucketSpeed], float, Interval]:
        speeds, pairs = [], []
        for index, (bucket, level) in enumerate(base.items()):
            wanted = gain if index == 0 else 1 + (gain - 1) * 0.7
            old, new = times(level, f"{step}{bucket}a"), times(level / wanted, f"{step}{bucket}b")
            ratio, ci = bootstrap_speedup([(old, new)])
            middle = len(old) // 2
            speeds.append(
                BucketSpeed(
                    bucket=bucket,
                    base_ms=sorted(old)[middle],
                    new_ms=sorted(new)[middle],
                    ratio=ratio,
                    ci=ci,
                    blocks=len(old),
                    clock="device events",
                )
            )
            pairs.append((old, new))
            self.samples.append(Samples(step=step, attempt=attempt, bucket=bucket, base=old, new=new))
        ratio, ci = bootstrap_speedup(pairs)
        return speeds, ratio, ci

    def step(
        self,
        id: str,
        title: str,
        verdict: Verdict,
        reason: str,
        gain: float | None = None,
        attempt: int = 1,
        **more: object,
    ) -> None:
        measured: dict[str, object] = {}
        if gain is not None:
            speeds, ratio, ci = self.speeds(id, attempt, gain, self.level)
            measured = {"speed": speeds, "ratio": ratio, "ci": ci, "numerics": errors(1.0)}
            if verdict == "kept":
                self.level = {speed.bucket: speed.new_ms for speed in speeds}
        values: dict[str, object] = {"level": 3, "seconds": 41.2, **measured, **more}
        self.steps.append(
            StepOutcome(id=id, title=title, verdict=verdict, reason=reason, attempt=attempt, **values)  # type: ignore[arg-type]
        )


def errors(scale: float) -> list[BucketError]:
    return [
        BucketError(
            bucket=bucket,
            output=output,
            error=own * scale * factor,
            own=own,
            limit=2 * own,
            passed=True,
            note="top-1 agreement 99.8 %" if output == "logits" else "",
        )
        for bucket in BUCKETS
        for output, own, factor in (("logits", 3.1e-3, 1.04), ("past_key_values.0.key", 2.2e-3, 0.97))
    ]


def op(name: str, category: str, shapes: str, ms: float, share: float, calls: int = 32, **more: object) -> OpTime:
    return OpTime(name=name, category=category, shapes=shapes, calls=calls, ms=ms, share=share, **more)  # type: ignore[arg-type]


def profile(
    bucket: str, kernel_ms: float, idle: float | None, shares: dict[str, float], faster: float
) -> BucketProfile:
    bandwidth, peak = 5.3e12, 1307e12
    ops = []
    layers = {
        "GEMM": ("Cijk_Ailk_Bljk_BBS_BH_MT256x256x32", "4096×4096×14336 bf16", 620.0),
        "attention": (f"attn_fwd<128,{HOSTILE}>", "1×32×2048×128 bf16", 310.0),
        "norm": ("_rms_norm_kernel", "2048×4096 bf16", 1.1),
        "elementwise": ("triton_poi_fused_silu_mul_3", "2048×14336 bf16", 0.33),
    }
    for category, (name, shapes, intensity) in layers.items():
        for index, part in enumerate((0.6, 0.3, 0.1)):
            ms = kernel_ms * shares.get(category, 0.0) * part
            if not ms:
                continue
            at = intensity / (1 + index)
            roof = min(peak, at * bandwidth)
            percent = (38 + 17 * index) * faster
            flops = roof * percent / 100 * ms * 1e-3 / 32
            bound = "compute" if at * bandwidth > peak else "memory"
            ops.append(
                op(name, category, f"{shapes} #{index}", ms, ms / kernel_ms, flops=flops, bytes=flops / at,
                   roofline_percent=percent, bound=bound)
            )  # fmt: skip
    ops.append(op("Memcpy DtoD (Device -> Device)", "copy", "", kernel_ms * 0.01, 0.01))
    return BucketProfile(
        bucket=bucket,
        wall_ms=kernel_ms + (idle or 0.0),
        kernel_ms=kernel_ms,
        idle_ms=idle,
        launches=1284,
        categories=[
            CategoryTime(category=name, ms=kernel_ms * share, share=share, calls=64) for name, share in shares.items()
        ],
        ops=ops,
        uncategorized=["void at::native::index_elementwise_kernel<128, 4>", "__amd_rocclr_fillBufferAligned"],
    )


def full() -> OptimizeRecord:
    run = Run()
    run.step(
        "env", "environment variables", "skipped", "no variable of the table is worth a trial on this device", level=1,
        seconds=0.2,
    )  # fmt: skip
    run.step(
        "compile", "torch.compile, default mode", "kept", "1.24× with the lower end above 1.02", 1.28, level=2,
        predicted=1.35, prediction="elementwise and norm are 29 % of the time; fusing halves their bytes",
        params={"mode": "default", "fullgraph": False, "dynamic": None},
    )  # fmt: skip
    run.step(
        "gate_up", "fuse gate and up projections", "kept", "one GEMM instead of two for 32 layers", 1.035,
        predicted=1.04, sites=[f"model.layers.{index}.mlp" for index in range(32)], params={"layout": "packed"},
    )  # fmt: skip
    run.step(
        "attention", f"attention of {HOSTILE}", "reverted", "the library's attention is faster at head size 128 & up", 0.96,
        predicted=1.06, sites=[f"model.layers.{index}.self_attn" for index in range(32)], level=4,
    )  # fmt: skip
    run.step(
        "linear",
        "linear layers by table",
        "tie",
        "1.004× [0.998, 1.010] holds no gain of 2 %",
        1.004,
        predicted=1.08,
        level=4,
    )
    run.step(
        "int8", "int8 weights in the MLP", "refused", "output logits: error 7.3 times the original's own, allowed 2 times",
        level=5, predicted=1.2, sites=["model.layers.0.mlp.down_proj"],
        numerics=[
            BucketError(bucket="decode b16", output="logits", error=2.26e-2, own=3.1e-3, limit=6.2e-3, passed=False),
            BucketError(bucket="decode b16", output="hidden <b>", error=float("nan"), own=3e-3, limit=6e-3, passed=False),
        ],
        quality=[QualityResult(name="perplexity", value=9.81, limit=9.2, passed=False, detail="64 documents")],
    )  # fmt: skip
    run.step(
        "linear",
        "linear layers by table",
        "kept",
        "after compile: 41 of 44 shapes move, 3 stay on torch",
        1.06,
        attempt=2,
        predicted=1.08,
        level=4,
    )
    run.step(
        "capture",
        "graph capture",
        "refused",
        "2 of 5 fresh processes replayed other numbers than eager",
        level=5,
        predicted=1.1,
    )
    trial = [times(41.8, "trial a"), times(41.6, "trial b")]
    run.samples.insert(
        0, Samples(step="environment X=1", attempt=1, bucket="prefill b1 s2048", base=trial[0], new=trial[1])
    )
    speeds, ratio, ci = run.speeds("result", 1, 1.44, BUCKETS)
    return OptimizeRecord(
        header=header(),
        workload="LlamaForCausalLM",
        spec="llama.py:make",
        dtype="bfloat16",
        parameters=8_030_261_248,
        level=5,
        min_gain=0.02,
        budget_seconds=900,
        baseline=[bench(bucket, median) for bucket, median in BUCKETS.items()],
        profile_before=[
            profile("prefill b1 s2048", 36.1, 5.7, {"GEMM": 0.61, "attention": 0.19, "elementwise": 0.09, "norm": 0.06, "other": 0.05}, 1.0),
            profile("decode b16", 5.2, 2.2, {"GEMM": 0.7, "attention": 0.12, "norm": 0.08, "other": 0.1}, 0.9),
        ],
        profile_after=[
            profile("prefill b1 s2048", 26.6, 2.4, {"GEMM": 0.72, "attention": 0.2, "elementwise": 0.04, "other": 0.04}, 1.2),
            profile("decode b16", 4.6, 0.9, {"GEMM": 0.78, "attention": 0.13, "norm": 0.05, "other": 0.04}, 1.15),
        ],
        breaks=[
            GraphBreak(kind="break", file="transformers/models/llama/modeling_llama.py", line=417, reason="call to print & <module>"),
            GraphBreak(kind="recompile", file="llama.py", line=12, reason="size of input_ids changed from 2048 to 1"),
        ],
        steps=run.steps,
        samples=run.samples,
        result=Result(
            verdict="faster", ratio=ratio, ci=ci, speed=speeds, numerics=errors(1.1),
            quality=[QualityResult(name="perplexity", value=8.914, limit=9.2, passed=True, detail="64 documents of the workload")],
            peak_memory_before=17_300_000_000, peak_memory_after=16_900_000_000,
        ),
        coverage=[
            DecisionRow(op="rms_norm", key="m2048 n4096 bf16", backend="wavecrest", config={"BLOCK_N": 4096, "num_warps": 8}, source="exact", reason="tuned for this shape", calls=65),
            DecisionRow(op="gemm", key="m16 n4096 k14336 bf16", backend="torch", config={}, source="model", reason="the library is faster at 16 rows", calls=32, refused={"wavecrest": "k is not a multiple of 64 & <padded>"}),
        ],
        notes=["clock held at 2100 MHz", f"a note with {HOSTILE}"],
    )  # fmt: skip


def optimal() -> OptimizeRecord:
    record = full()
    run = Run()
    run.step(
        "compile", "torch.compile, default mode", "tie", "1.003× holds no gain of 2 %", 1.003, predicted=1.1, level=2
    )
    run.step("gate_up", "fuse gate and up projections", "reverted", "slower on both buckets", 0.5, predicted=1.02)
    record.steps, record.samples = run.steps, run.samples
    record.result = Result(
        verdict="already optimal", ratio=1.0, ci=Interval(1.0, 1.0), speed=[], numerics=[], quality=[]
    )
    record.profile_after, record.breaks, record.coverage, record.notes = [], [], [], []
    return record


def interrupted() -> OptimizeRecord:
    record = full()
    record.steps = record.steps[:4]
    record.result = None
    record.profile_after, record.coverage = [], []
    return record


def minimal() -> OptimizeRecord:
    cpu = header("wavecrest optimize")
    cpu.device = {"kind": "cpu", "name": "x86 host"}
    cpu.environment = {}
    cpu.commit = None
    return OptimizeRecord(
        header=cpu, workload="Linear", spec=None, dtype="float32", parameters=272, level=1, min_gain=0.02,
        budget_seconds=60, baseline=[bench("default", 0.0123, noise=0.5)],
    )  # fmt: skip


def many() -> OptimizeRecord:
    """Seven buckets with long names, one unstable, and a step without any break in its name."""
    record = full()
    names = [f"batch{2**index}_sequence_length_{128 * (index + 1)}" for index in range(7)]
    record.baseline = [
        bench(name, 3.0 * (index + 1), noise=0.3 if index == 1 else 0.01) for index, name in enumerate(names)
    ]
    assert record.result is not None
    template = record.result.speed[0]
    record.result.speed = [template.model_copy(update={"bucket": name}) for name in names]
    record.steps[1].title = "a" * 90
    record.steps[1].sites = ["model." + "encoder_layer_with_a_long_name" * 6]
    record.workload = "W" * 120
    return record


SAMPLES: dict[str, Callable[[], OptimizeRecord]] = {
    "full": full,
    "already optimal": optimal,
    "interrupted": interrupted,
    "minimal": minimal,
    "many buckets": many,
}


@functools.cache
def _built(name: str) -> OptimizeRecord:
    return SAMPLES[name]()


@pytest.fixture
def sample() -> Callable[[str], OptimizeRecord]:
    """A sample record by name."""
    return lambda name: _built(name).model_copy(deep=True)


@pytest.fixture(params=SAMPLES, ids=lambda name: name.replace(" ", "-"))
def record(request: pytest.FixtureRequest) -> records.OptimizeRecord:
    """Every sample record in turn."""
    return _built(request.param).model_copy(deep=True)
