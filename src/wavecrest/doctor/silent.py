"""AMD's silent failures: what is slow or wrong there without an error, as `silent.toml` lists it with its threads.

The checks look at what is installed and set; `model` looks at one model. None of them was run on an AMD GPU: this
project has none, and its tests make such machines up.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wavecrest.doctor.context import Context
from wavecrest.doctor.report import Finding, Level
from wavecrest.records import decode

# aiter's families of tuned tables, by the words in their file names; none of them is part of another
FAMILIES = {
    "bf16_tuned_gemm": "16-bit GEMM",
    "a8w8_tuned_gemm": "8-bit GEMM",
    "a8w8_bpreshuffle_tuned_gemm": "8-bit GEMM, preshuffled weights",
    "a8w8_blockscale_tuned_gemm": "8-bit GEMM with block scales",
    "a8w8_blockscale_bpreshuffle_tuned_gemm": "8-bit GEMM with block scales, preshuffled weights",
    "tuned_fmoe": "fused MoE",
}
# architectures that aiter has assembly and CK kernels for
AITER_ARCHS = ("gfx942", "gfx950", "gfx1250")
# Triton versions between which the listed kernels became slower
SLOWER_TRITON = re.compile(r"3\.[78]\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the list: its number and words, its threads, the check that looks for it, a measure of its cost."""

    number: int
    what: str
    threads: tuple[str, ...]
    check: str
    measure: str


@cache
def failures() -> dict[int, Failure]:
    """The twenty by number."""
    text = Path(__file__).with_name("silent.toml").read_text(encoding="utf-8")
    rows = decode.toml_of(text)["failure"]
    return {row["number"]: Failure(**{**row, "threads": tuple(row["threads"])}) for row in rows}


def finding(check: str, number: int, level: Level, what: str, why: str, action: str) -> Finding:
    """A finding about one of the twenty, with its threads and its measurement; `why` and `action` may be ""."""
    failure = failures()[number]
    return Finding(
        check=check, level=level, what=what, why=why or f"reported: {failure.what}", action=action or "nothing to do",
        source="; ".join(failure.threads), measure=failure.measure,
    )  # fmt: skip


def _is_amd(context: Context) -> bool:
    return context.device.vendor == "amd"


def family_of(name: str) -> str | None:
    """The family of a table of aiter's by its file name; None for other files and for lists of shapes to tune."""
    if "untuned" in name or "batched" in name:
        return None
    return next((words for words in FAMILIES if words in name), None)


def rows_for(text: str, arch: str, compute_units: int) -> tuple[int, int]:
    """(rows for this GPU, all rows) of a table of aiter's."""
    matching = total = 0
    for row in csv.DictReader(text.splitlines()):
        total += 1
        matching += row.get("cu_num") == str(compute_units) and (row.get("gfx") or arch) == arch
    return matching, total


def aiter_tables(context: Context) -> Iterator[Finding]:
    """The tuned tables of the installed aiter: families without a row for this GPU."""
    if not _is_amd(context) or "aiter" not in context.packages:
        return
    arch, units = context.device.arch, context.device.compute_units
    version = context.packages["aiter"]
    if arch not in AITER_ARCHS:
        yield finding(
            "aiter_tables", 18, "warn", f"aiter {version} is installed on {arch}",
            f"its assembly and CK kernels are for {', '.join(AITER_ARCHS)}: others get Triton's, or an error",
            "keep what imports aiter off (VLLM_ROCM_USE_AITER=0) unless it is measured to be faster",
        )  # fmt: skip
        return
    counts: dict[str, tuple[int, int]] = {}
    for path in context.aiter_tables:
        family, text = family_of(path.rsplit("/", 1)[-1]), context.read(path)
        if family is not None and text is not None:
            before, (matching, total) = counts.get(family, (0, 0)), rows_for(text, arch, units)
            counts[family] = before[0] + matching, before[1] + total
    empty = [family for family in FAMILIES if not counts.get(family, (0, 0))[0]]
    if empty:
        told = "; ".join(f"{FAMILIES[family]} (0 of {counts.get(family, (0, 0))[1]})" for family in empty)
        yield finding(
            "aiter_tables", 1, "warn", f"aiter {version} has no tuned row for {arch} with {units} CUs: {told}",
            "a shape without a row takes a default kernel, or PyTorch's; only the log says so",
            "`wavecrest doctor --model FILE.py:FUNCTION` counts hits and misses of a model's own shapes",
        )  # fmt: skip
    rows = "; ".join(f"{FAMILIES[name]} {count[0]}" for name, count in counts.items() if count[0])
    if rows:
        yield finding(
            "aiter_tables", 1, "ok", f"aiter {version} has tuned rows for {arch} with {units} CUs: {rows}", "", ""
        )


def serving(context: Context) -> Iterator[Finding]:
    """vLLM without its fast path, and packages that have no ROCm build."""
    if not _is_amd(context):
        return
    if "vllm" in context.packages:
        version, arch = context.packages["vllm"], context.device.arch
        switch = context.environment.get("VLLM_ROCM_USE_AITER", "")
        if switch.lower() not in ("1", "true") and arch in AITER_ARCHS:
            yield finding(
                "serving", 3, "warn",
                f"vLLM {version} runs without aiter: VLLM_ROCM_USE_AITER is {switch or 'not set'}",
                "reported: 1.7 times as long at short prompts, 3.7 times at 12,000 tokens",
                "VLLM_ROCM_USE_AITER=1, with aiter installed; compare accuracy and speed",
            )  # fmt: skip
        if switch.lower() in ("1", "true") and "aiter" not in context.packages:
            yield finding(
                "serving", 3, "warn", "VLLM_ROCM_USE_AITER is set, and aiter is not installed",
                "vLLM falls back to its other kernels", "install aiter for this ROCm, or unset the variable",
            )  # fmt: skip
        if arch == "gfx950" and not context.environment.get("VLLM_ATTENTION_BACKEND"):
            yield finding(
                "serving", 4, "info", f"vLLM {version} picks its attention backend by itself",
                "reported for MI355X: the choice was far from the fastest one",
                "try the backends that `vllm serve --help` lists for --attention-backend",
            )  # fmt: skip
    named = [name for name in ("flashinfer", "flashinfer-python") if name in context.packages]
    if named:
        yield finding(
            "serving", 20, "warn", f"{named[0]} {context.packages[named[0]]} is installed on an AMD GPU",
            "it has CUDA kernels alone, and its authors plan no ROCm build",
            "choose another attention and sampling backend in the server",
        )  # fmt: skip


def compilers(context: Context) -> Iterator[Finding]:
    """A Triton under which kernels were reported to be slower than under the one before."""
    version = context.packages.get("triton", context.packages.get("pytorch-triton-rocm", ""))
    if _is_amd(context) and SLOWER_TRITON.match(version):
        yield finding(
            "compilers", 5, "warn", f"Triton {version}",
            "reported for 3.7 and 3.8 on gfx942 and gfx950: registers spill to memory in the loop of a GEMM, which "
            "then takes up to twice the time",
            "compare the machine code of your kernels with that of the version before",
        )  # fmt: skip


def tunable(context: Context) -> Iterator[Finding]:
    """TunableOp that tunes while serving, and without looking at the numbers."""
    given = context.environment
    if not _is_amd(context) or given.get("PYTORCH_TUNABLEOP_ENABLED", "0") == "0":
        return
    if given.get("PYTORCH_TUNABLEOP_TUNING", "1") != "0":
        yield finding(
            "tunable", 15, "warn", "TunableOp is enabled and tunes: every new shape is tuned at its first call",
            "a call takes seconds then, and tuning was reported to fail or not to end",
            "tune offline, then serve with PYTORCH_TUNABLEOP_TUNING=0; or the step tunable_op of `wavecrest optimize`",
        )  # fmt: skip
        if given.get("PYTORCH_TUNABLEOP_NUMERICAL_CHECK", "0") == "0":
            yield finding(
                "tunable", 8, "warn",
                "TunableOp compares times and no numbers: PYTORCH_TUNABLEOP_NUMERICAL_CHECK is off",
                "a solution that is fast because it computes less wins",
                "PYTORCH_TUNABLEOP_NUMERICAL_CHECK=1 while tuning",
            )  # fmt: skip


def attention(context: Context) -> Iterator[Finding]:
    """The backend that PyTorch's attention takes here, for calls of common shapes."""
    slow = [case for case, backend in context.sdpa.items() if backend == "MATH"]
    if slow:
        experimental = context.environment.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "0")
        action = "change the dtype, head dimension or mask of such calls"
        if _is_amd(context) and context.device.arch not in ("gfx90a", "gfx942", "gfx950") and experimental == "0":
            action = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1, and check the answers"
        yield finding(
            "attention", 10, "warn" if _is_amd(context) else "info",
            f"scaled_dot_product_attention takes its math path for: {', '.join(slow)}",
            "it writes out the scores: reported 3.6 to 11.8 times as slow, 16 times the memory", action,
        )  # fmt: skip
    elif context.sdpa:
        used = ", ".join(f"{case}: {backend.lower()}" for case, backend in context.sdpa.items())
        yield finding("attention", 10, "ok", f"scaled_dot_product_attention takes a fast path ({used})", "", "")


def cold_start(context: Context) -> Iterator[Finding]:
    """Compiled modules that the next container has to compile again."""
    if _is_amd(context) and "aiter" in context.packages and not context.environment.get("AITER_JIT_DIR"):
        yield finding(
            "cold_start", 11, "info", "aiter compiles its modules into its own package: AITER_JIT_DIR is not set",
            "a module takes minutes (225 s reported for one norm), in every container that does not keep the folder",
            "set AITER_JIT_DIR to a folder that lasts, or build the modules into the image",
        )  # fmt: skip


def convolutions(context: Context) -> Iterator[Finding]:
    """MIOpen's search for the kernel of a new convolution, where it takes minutes or does not happen."""
    if not _is_amd(context):
        return
    mode = context.environment.get("MIOPEN_FIND_MODE", "")
    if mode.upper() in ("1", "NORMAL") or context.environment.get("MIOPEN_FIND_ENFORCE", "1").upper() not in (
        "1",
        "NONE",
    ):
        yield finding(
            "convolutions", 13, "warn", "MIOpen searches all kernels at the first call of every new convolution",
            "MIOPEN_FIND_MODE or MIOPEN_FIND_ENFORCE asks for it; a first run takes minutes",
            "unset both after one such run: its results are kept in MIOPEN_USER_DB_PATH",
        )  # fmt: skip
    elif mode.upper() in ("2", "FAST"):
        yield finding(
            "convolutions", 13, "info",
            f"MIOPEN_FIND_MODE={mode}: MIOpen takes what its database has, without a search",
            "a convolution without an entry runs a kernel that was never compared with others",
            "unset it, and time a model with convolutions both ways",
        )  # fmt: skip


def libraries(context: Context) -> Iterator[Finding]:
    """A BLAS library that is not the usual one of the chip."""
    if context.device.arch in ("gfx942", "gfx950") and context.blas == "Cublas":
        yield finding(
            "libraries", 12, "warn", f"matrix products run on rocBLAS on {context.device.arch}",
            "hipBLASLt is PyTorch's choice for this chip; something asked for the other, or hipBLASLt failed its check",
            "unset TORCH_BLAS_PREFER_HIPBLASLT and DISABLE_ADDMM_CUDA_LT, and see whether a warning names hipBLASLt",
        )  # fmt: skip


def numa(context: Context) -> Iterator[Finding]:
    """A process that may run on other memory nodes than its GPU's."""
    if context.device.vendor == "cpu" or context.gpu_node is None or not context.cpu_nodes:
        return
    if context.gpu_node not in context.cpu_nodes:
        level: Level = "warn"
        what = (
            f"this process runs on NUMA node {', '.join(map(str, context.cpu_nodes))}, its GPU is at {context.gpu_node}"
        )
    elif len(context.cpu_nodes) > 1:
        level = "info"
        what = f"this process may run on {len(context.cpu_nodes)} NUMA nodes, its GPU is at node {context.gpu_node}"
    else:
        return
    yield Finding(
        check="numa", level=level, what=what,
        why="launches and copies cross to the other node, and times differ from run to run",
        action=f"numactl --cpunodebind={context.gpu_node} --membind={context.gpu_node} COMMAND",
        source="https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html",
        measure="wavecrest bench FILE.py:FUNCTION with numactl and without",
    )  # fmt: skip


SILENT = (aiter_tables, serving, compilers, tunable, attention, cold_start, convolutions, libraries, numa)
