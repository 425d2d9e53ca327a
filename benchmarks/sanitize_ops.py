"""compute-sanitizer over every op with a Triton kernel: memcheck, racecheck and initcheck, each with a planted bug.

    scripts/sanitize [--out FILE] [--ops rms_norm,softmax] [--tools memcheck] [--jobs 4] [--budget 300]

Every op runs a few odd shapes, dtypes and strides, its results are compared with its reference, and nothing else runs
on the GPU: inputs are made on the CPU and copied, so that all that a tool reports is about our kernels (a filter by
kernel name would hide from initcheck what other kernels have written). torch's caching allocator is off, as it would
put tensors beside each other inside one allocation. Each tool must also find a bug that is planted for it; one that
does not is not trusted. An op is a process of its own, several run side by side, the tools one after the other. What
did not end in time has a second try, and is named if it does not end then either.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from wavecrest import env, hardware, records
from wavecrest.bench import ops as bench_ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import AnyCall, mapped, tensors_of
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import EnvironmentProblem, InvalidArgument, Unsupported, WavecrestError
from wavecrest.records import files, provenance

TOOLS = ("memcheck", "racecheck", "initcheck")
# the tools' summary lines: "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
# exit code of compute-sanitizer if it has found something
FOUND = 99
# for a process that was stopped; signals are negative too, but none is this
UNENDED = -1000
# ports by which a tool and what it runs speak to each other: each pair has its own, as with the default (the same ten
# for all) some of 15 side by side never ended (compute-sanitizer 2025.3, H200, 2026-11-22)
FIRST_PORT, PORTS = 50000, 16
MARK = "sanitize result: "
# the refusal of a kernel that is for another architecture
OTHER = re.compile(r"is for (sm_|gfx)\d")
# backends whose results are stored by the copy engine
COPIES_RESULTS = ("triton_hopper", "triton_hopper_epilogue", "triton_hopper_blocks", "triton_hopper_group")
# (M, N, dtype, layout): one program with a ragged row, several rows a program, exact blocks, rows walked in blocks
CASES = (
    (5, 33, torch.bfloat16, "contiguous"),
    (6, 33, torch.bfloat16, "sliced"),
    (6, 1025, torch.float32, "permuted"),
    (18, 4096, torch.bfloat16, "contiguous"),
    (18, 4096, torch.float16, "sliced"),
    (2, 33000, torch.bfloat16, "contiguous"),
    (2, 33000, torch.bfloat16, "sliced"),
)


@triton.jit
def _planted_memcheck(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # writes past the end: y has fewer than BLOCK elements
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _planted_initcheck(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # x was never written
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1.0)


@triton.jit
def _planted_racecheck_kernel(y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # every thread writes one cell of shared memory, and none waits before it reads
    offs = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "{ .shared .align 4 .b32 cell; st.shared.u32 [cell], $1; ld.shared.u32 $0, [cell]; }",
        "=r,r",
        [offs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(y_ptr + offs, value)


def plant(tool: str) -> None:
    """Run the kernel with the bug that a tool must find."""
    if tool == "memcheck":
        _planted_memcheck[(1,)](torch.randn(1024).cuda(), torch.empty(1000, device="cuda"), BLOCK=1024)
    elif tool == "initcheck":
        _planted_initcheck[(1,)](torch.empty(1024, device="cuda"), torch.empty(1024, device="cuda"), BLOCK=1024)
    else:
        _planted_racecheck_kernel[(1,)](torch.empty(128, dtype=torch.int32, device="cuda"), BLOCK=128, num_warps=4)
    torch.cuda.synchronize()


def place(tensor: torch.Tensor, rows: int, layout: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A CPU tensor as (the same values on the CPU, on `device`), with the strides of a layout if it has `rows` rows."""
    if tensor.ndim < 2 or tensor.shape[0] != rows or layout == "contiguous":
        return tensor, tensor.to(device)
    if layout == "permuted":
        wide = tensor.reshape(2, rows // 2, *tensor.shape[1:])
        order = (1, 0, *range(2, wide.ndim))
        return wide.permute(order), wide.to(device).permute(order)
    # an odd start and end, so that nothing is a multiple of 16 bytes
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype)
    wide[..., 3 : tensor.shape[-1] + 3] = tensor
    window = slice(3, tensor.shape[-1] + 3)
    return wide[..., window], wide.to(device)[..., window]


def _row_call(op: AnyOp, case: tuple[int, int, torch.dtype, str], device: str) -> tuple[AnyCall, AnyCall]:
    rows, columns, dtype, layout = case
    # an op with a third size gets at most 1000, to limit its time
    sizes = (rows, columns, min(columns, 1000))[: len(op.study.sizes)]
    call = op.study.inputs(*sizes, dtype, "cpu")
    return (
        mapped(call, lambda value: place(value, rows, layout, device)[0]),
        mapped(call, lambda value: place(value, rows, layout, device)[1]),
    )


def _made_call(make: Callable[[], AnyCall], device: str) -> tuple[AnyCall, AnyCall]:
    here = make()
    return here, mapped(here, lambda value: value.to(device))


def calls(op: AnyOp, device: str) -> dict[str, Callable[[], tuple[AnyCall, AnyCall]]]:
    """The cases of an op by name, each making the call on the CPU and the same on `device`.

    CASES, where an op is described by rows and columns, and what the emulator runs, where these do not say all of it.
    """
    study = op.study
    found: dict[str, Callable[[], tuple[AnyCall, AnyCall]]] = {}
    if study.sizes[:2] == ("M", "N"):
        for rows, columns, dtype, layout in CASES:
            name = f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {layout}"
            found[name] = partial(_row_call, op, (rows, columns, dtype, layout), device)
    if study.sizes != ("M", "N") and study.emulate_cases is not None:
        known = hardware.detect().known
        # 8-bit floats are the architecture's
        made = study.emulate_cases("sm_90" if known is None else known.name)
        found |= {name: partial(_made_call, make, device) for name, make in made.items()}
    return found


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Memory is filled with NaN when it is allocated.

    initcheck does not see what the copy engine stores (compute-sanitizer 2025.3, H200, 2026-11-22): a result that
    arrives that way counts as never written. Filled, an element that is not written is a wrong result instead.
    """
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_op(op: AnyOp, device: str) -> dict[str, Any]:
    """Run an op's kernels on all cases; {"ran": n, "declined": {case: reason}, "wrong": {case: what}, "idle": [...]}.

    Idle are backends that took no case, but those that are for another architecture.
    """
    declined, wrong = {}, {}
    ran: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    # the same values under every tool: one code of a small tensor may lie between two
    torch.manual_seed(0)
    own = [name for name in op.backends if name.startswith("triton")]
    for backend, (case, make) in ((backend, case) for backend in own for case in calls(op, device).items()):
        name = case if len(own) == 1 else f"{case} {backend}"
        try:
            here, there = make()
            with filled() if backend in COPIES_RESULTS else contextlib.nullcontext():
                results = bench_ops.results_of(op.run(backend, there))
        except (Unsupported, InvalidArgument) as error:
            declined[name] = str(error)
            reasons.setdefault(backend, []).append(str(error))
            continue
        except Exception as error:
            # the other ops are still worth checking
            wrong[name] = f"raised {type(error).__name__}: {error}"[:300]
            continue
        ran[backend] += 1
        oracle = bench_ops.results_of(op.reference(here))
        dtype = tensors_of(here)[0].dtype
        # any number of codes may be a step off: of 198 two lay between codes (quantize_fp8), and how many may is for
        # the tests to say, on enough of them
        values = bench_ops.limits_of(op, str(dtype).removeprefix("torch.")).values
        limits = bench_ops.Limits(values, code_share=1.0)
        row = records.ImplTiming(name=name)
        problem = bench_ops.gate(row, tuple(result.cpu() for result in results), oracle, limits)
        if problem:
            wrong[name] = problem
    # one reason is enough: a call may be refused for another one before the architecture is asked for
    elsewhere = [name for name in own if any(OTHER.search(reason) for reason in reasons.get(name, []))]
    idle = [name for name in own if not ran[name] and name not in elsewhere and not _raised(wrong, name, own)]
    return {"ran": ran.total(), "declined": declined, "wrong": wrong, "idle": idle}


def _raised(wrong: dict[str, str], backend: str, own: list[str]) -> bool:
    """True if a backend without a result has one that raised."""
    return any(len(own) == 1 or name.endswith(f" {backend}") for name in wrong)


def _with_kernels(wanted: list[str]) -> Iterator[AnyOp]:
    for name in wanted or registry.names():
        op = registry.get(name)
        if "triton" in op.backends:
            yield op


def run_ops(wanted: list[str], device: str) -> dict[str, dict[str, Any]]:
    """`run_op` for every op with a Triton kernel, by name."""
    with torch.no_grad():
        return {op.name: run_op(op, device) for op in _with_kernels(wanted)}


def find_tool() -> str:
    """The path of compute-sanitizer.

    Raises:
        EnvironmentProblem: it cannot run here; the message says why.
    """
    if torch.version.hip is not None:
        raise EnvironmentProblem("compute-sanitizer is NVIDIA's; this torch is a ROCm build")
    if not torch.cuda.is_available():
        raise EnvironmentProblem("torch sees no GPU, and compute-sanitizer checks what runs on one")
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        raise EnvironmentProblem("compute-sanitizer is not on the PATH; it is part of the CUDA toolkit")
    return found


def _child(command: list[str], timeout: float) -> tuple[int, str]:
    environment = env.child({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    # a group of its own: a tool that is killed leaves what it runs behind, on the GPU
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return UNENDED, f"did not end within {timeout:.0f} s"
    return running.returncode, said


def _ran(text: str) -> dict[str, dict[str, Any]] | None:
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    return None if line is None else json.loads(line.removeprefix(MARK))


def _found(text: str) -> int | None:
    """The number of errors in a tool's summaries, or None where it wrote no summary."""
    counts = [int(count) for count in SUMMARY.findall(text)]
    return sum(counts) if counts else None


def verdict(code: int, text: str) -> dict[str, Any]:
    """Verdict of one run of a tool over the ops: clean, or the problem in words, with the tool's own lines."""
    summary, ran = _found(text), _ran(text)
    result: dict[str, Any] = {"errors": summary}
    if summary is None or ran is None:
        last = (text.strip().splitlines() or [f"exit code {code}"])[-1]
        return {**result, "verdict": f"did not finish: {last}", "lines": text.strip().splitlines()[-20:]}
    result["cases"] = sum(row["ran"] for row in ran.values())
    idle = [name for name, row in ran.items() if row["ran"] == 0]
    idle += [f"{name} {one}" for name, row in ran.items() if row["ran"] for one in row.get("idle", ())]
    wrong = [name for name, row in ran.items() if row["wrong"]]
    if summary:
        # not the host's frames, which are most of it
        lines = [line for line in text.splitlines() if line.startswith("=====") and "Host Frame" not in line]
        return {**result, "verdict": f"{summary} errors", "lines": lines[:40]}
    if code != 0 or wrong or idle or not ran:
        reason = f"wrong results: {', '.join(wrong)}" if wrong else f"exit code {code}"
        reason = f"no case ran: {', '.join(idle) or 'no op'}" if idle or not ran else reason
        lines = [f"{name} {case}: {what}" for name in wrong for case, what in ran[name]["wrong"].items()]
        return {**result, "verdict": reason, **({"lines": lines} if lines else {})}
    return {**result, "verdict": "clean"}


def check(run: Callable[[list[str]], tuple[int, str]], tool: str, ops: list[str], jobs: int) -> dict[str, Any]:
    """One tool: the bug planted for it, and the ops, `jobs` processes at a time.

    `run` takes the command line after the tool's path.
    """
    # not the compiler's processes: they have summaries of their own
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    # only this project's kernels, by the end of their names: with PyTorch's too, racecheck does not come to an end
    options += ["--kernel-regex", "kns=_kernel"] if tool == "racecheck" else []
    begin = time.perf_counter()
    commands = [["--plant", tool], *(child(name) for name in ops)]

    def one(command: list[str]) -> tuple[int, str]:
        return run([*options, sys.executable, __file__, *command])

    with ThreadPoolExecutor(jobs) as pool:
        said = list(pool.map(one, commands))
        # some processes of the tools never end where several run, others each time (compute-sanitizer 2025.3, H200,
        # 2026-11-22): those that did not have a second try
        again = [i for i, (code, _) in enumerate(said) if code == UNENDED]
        for i, words in zip(again, pool.map(one, [commands[i] for i in again]), strict=True):
            said[i] = words
    (_, text), *said = said
    found = (_found(text) or 0) > 0
    result = merged({name: verdict(*words) for name, words in zip(ops, said, strict=True)})
    if again:
        result["second_try"] = ["the planted bug" if i == 0 else ops[i - 1] for i in again]
    if not found:
        last = (text.strip().splitlines() or ["no output"])[-1]
        result["verdict"] = f"not trusted: it did not find the planted bug ({last}); otherwise {result['verdict']}"
    return {**result, "planted_bug": "found" if found else "missed", "seconds": round(time.perf_counter() - begin, 1)}


def merged(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The verdicts of a tool on ops as one: clean only if all are."""
    counted = [part["errors"] for part in parts.values() if part["errors"] is not None]
    result: dict[str, Any] = {"errors": sum(counted) if counted else None}
    result["cases"] = sum(part.get("cases", 0) for part in parts.values())
    said: dict[str, list[str]] = {}
    for name, part in parts.items():
        if part["verdict"] != "clean":
            said.setdefault(part["verdict"], []).append(name)
    lines = [line for part in parts.values() for line in part.get("lines", [])]
    if lines:
        result["lines"] = lines[:80]
    words = "; ".join(f"{what} ({', '.join(names)})" for what, names in said.items())
    return {**result, "verdict": words or "clean"}


def child(op: str) -> list[str]:
    """The arguments with which this script runs an op in a process of its own."""
    return ["--child", "--ops", op]


def main() -> int:
    """Run all tools and write the result; exit code 0 if all are clean, 2 if not, 3 where they cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the verdicts to this JSON file")
    parser.add_argument("--ops", default="", help="names of ops, separated by commas; default: all with a kernel")
    parser.add_argument("--tools", default=",".join(TOOLS), help="some of memcheck, racecheck, initcheck")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one op under a tool")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plant", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [name for name in arguments.ops.split(",") if name]
    if arguments.plant:
        plant(arguments.plant)
        return 0
    if arguments.child:
        sys.stdout.write(MARK + json.dumps(run_ops(wanted, hardware.detect().torch_name)) + "\n")
        return 0
    try:
        sanitizer = find_tool()
        ops = [op.name for op in _with_kernels(wanted)]
        unknown = [tool for tool in arguments.tools.split(",") if tool not in TOOLS]
        if arguments.jobs < 1:
            raise InvalidArgument(f"--jobs takes a number of at least 1, not {arguments.jobs}")
        if unknown:
            raise InvalidArgument(f"no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    except WavecrestError as error:
        sys.stderr.write(f"sanitize: {error}\n")
        return error.exit_code
    deadline = time.perf_counter() + arguments.budget

    def within(command: list[str]) -> tuple[int, str]:
        left = deadline - time.perf_counter()
        return _child(command, min(arguments.timeout, left)) if left > 0 else (UNENDED, "no time left of the budget")

    names = arguments.tools.split(",")
    # without a tool first: it compiles every kernel into Triton's cache, and shows wrong results for what they are
    plain: dict[str, Any] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        alone = pool.map(lambda name: within([sys.executable, __file__, *child(name)]), ops)
        for name, (code, text) in zip(ops, alone, strict=True):
            did_not = [f"did not finish: exit code {code}", *text.splitlines()[-20:]]
            plain |= _ran(text) or {name: did_not}

    pairs = itertools.count()

    def run(options: list[str]) -> tuple[int, str]:
        port = FIRST_PORT + PORTS * next(pairs)
        return within([sanitizer, "--port", str(port), "--max-connections", str(PORTS), *options])

    def one(tool: str) -> dict[str, Any]:
        return check(run, tool, ops, arguments.jobs)

    tools = {name: one(name) for name in names}
    for tool, row in tools.items():
        sys.stdout.write(f"{tool}: {row['verdict']} ({row['cases']} cases, {row['seconds']} s)\n")
    result = {
        "header": provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(),
        "sanitizer": _child([sanitizer, "--version"], 60)[1].strip().splitlines()[-1:],
        "tools": tools,
        "ops": {name: plain[name] for name in ops},
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_document(arguments.out, result)
    return 0 if all(row["verdict"] == "clean" for row in tools.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
