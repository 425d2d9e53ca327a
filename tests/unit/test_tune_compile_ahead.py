"""Kernels compiled before anything is timed: which are the same, who compiles them, and that a real call finds them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.clock import SimulatedClock
from tests.toy import OneCall
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EnvironmentProblem, Unsupported
from wavecrest.hardware import ARCHS, Arch
from wavecrest.isa import Launch, compiler
from wavecrest.ops.common import triton as _triton
from wavecrest.tune import compile_ahead, compile_worker
from wavecrest.tune.candidates import Candidate

BF16 = torch.bfloat16


# --- what goes to a child


def test_arguments_arrive_as_they_are_compiled_for() -> None:
    x = torch.randn(4, 6).mT
    args = (x, None, True, 3, 0.5, "silu", torch.float8_e4m3fn, (torch.ones(2, dtype=torch.int8), [1, 2.5]))
    again = compile_worker.arguments(json.loads(json.dumps(compile_worker.described(args))))
    assert again[1:7] == args[1:7] and [type(value) for value in again[1:7]] == [type(value) for value in args[1:7]]
    for made, given in ((again[0], x), (again[7][0], args[7][0])):
        assert made.device.type == "meta" and made.dtype == given.dtype
        assert (made.shape, made.stride()) == (given.shape, given.stride())
    assert again[7][1] == (1, 2.5)


def test_an_argument_that_json_has_no_word_for() -> None:
    with pytest.raises(Unsupported, match="an argument of type object is compiled for when it is called"):
        compile_worker.described((object(),))


# --- which kernels are the same


def kernel(*names: str, kept: tuple[str, ...] = ()) -> Any:
    params = [SimpleNamespace(name=name, do_not_specialize=name in kept) for name in names]
    return SimpleNamespace(__module__="m", __name__="k", params=params)


def launch(*args: Any, own: Any = None, constants: dict[str, Any] | None = None, **config: int) -> Launch:
    own = own or kernel("x", "size", kept=("size",))
    return Launch(own, (1,), args, constants or {"EVEN": True}, Config(**(config or {"BLOCK": 16})))


def test_what_tells_kernels_apart() -> None:
    x = torch.empty(64, dtype=BF16)
    plain = compile_ahead.identity(launch(x, 5))
    same = [
        launch(torch.empty(9, dtype=BF16), 5),
        launch(x, 1),
        launch(x, 4096),
        launch(x, 5, own=kernel("x", "size", kept=("size",))),
    ]
    assert all(compile_ahead.identity(other) == plain for other in same)
    named = kernel("x", "size", kept=("size",))
    named.__name__ = "other"
    apart = [
        launch(x.float(), 5), launch(x[1:], 5), launch(x, 2**31), launch(x, 5.0), launch(x, None),
        launch(x, 5, own=named), launch(x, 5, constants={"EVEN": False}), launch(x, 5, BLOCK=32),
        launch(SimpleNamespace(block_shape=[64, 64], base=x), 5),
    ]  # fmt: skip
    identities = [compile_ahead.identity(other) for other in apart]
    assert plain not in identities and len(set(identities)) == len(identities)
    described = [launch(SimpleNamespace(block_shape=shape, base=x), 5) for shape in ([64, 64], [64, 32], [64, 64])]
    first, second, third = map(compile_ahead.identity, described)
    assert first == third != second
    # an integer that a kernel is made anew for
    made = kernel("x", "size")
    kinds = [compile_ahead.identity(launch(x, size, own=made)) for size in (5, 7, 1, 16, 4096)]
    assert kinds[0] == kinds[1] and kinds[3] == kinds[4] and len(set(kinds)) == 3


def launches(call: OneCall, config: Config, _arch: Arch) -> list[Launch]:
    """Two kernels a configuration, one of which is the same for all."""
    if config["BLOCK"] == 99:
        raise Unsupported("too large")
    return [launch(call.x, 1, BLOCK=config["BLOCK"]), launch(call.x, 2, BLOCK=1)]


FAKE: Any = SimpleNamespace(
    name="fake",
    study=Study(inputs=OneCall, cost=lambda _call: None, kernels={"kernel": KernelStudy(launches=launches)}),
)  # type: ignore[arg-type, return-value]


def wanted(*blocks: int, cases: int = 1) -> compile_ahead.Kernels:
    kernels = compile_ahead.Kernels("sm_90")
    found = [Candidate("torch"), *(Candidate("kernel", Config(BLOCK=block)) for block in blocks)]
    for case in range(cases):
        kernels.add(FAKE, f"case {case}", OneCall(torch.empty(case + 1, 16, dtype=BF16)), found, ARCHS["sm_90"])
    return kernels


def test_a_kernel_is_compiled_once_for_all_cases() -> None:
    kernels = wanted(16, 32, 99, cases=3)
    jobs = list(kernels.jobs.values())
    assert [(job["config"]["BLOCK"], job["index"]) for job in jobs] == [(16, 0), (16, 1), (32, 0)]
    assert all(job["op"] == "fake" and job["backend"] == "kernel" and job["arch"] == "sm_90" for job in jobs)
    assert jobs[0]["args"] == [{"shape": [1, 16], "stride": [16, 1], "dtype": "bfloat16"}]
    shared, own = list(kernels.jobs)[1], list(kernels.jobs)[2]
    sixteen, thirty_two = Candidate("kernel", Config(BLOCK=16)), Candidate("kernel", Config(BLOCK=32))
    kernels.errors[own] = "no"
    assert kernels.error("case 2", thirty_two) == "no" and kernels.error("case 2", sixteen) is None
    kernels.errors[shared] = "neither"
    assert kernels.error("case 0", sixteen) == "neither"
    assert kernels.error("case 0", Candidate("torch")) is None


def test_what_spills_more_than_the_default_is_refused() -> None:
    """By the worst of a candidate's kernels; what is not known refuses nobody."""
    kernels = wanted(16, 32, 64, cases=2)
    blocks = [
        Candidate("kernel", Config(BLOCK=block), role)
        for block, role in ((16, "default"), (32, "tried"), (64, "tried"))
    ]  # type: ignore[arg-type]
    field = [Candidate("torch", role="native"), *blocks]
    for case in range(2):
        kernels.add(FAKE, f"case {case}", OneCall(torch.empty(1, 16, dtype=BF16)), field, ARCHS["sm_90"])
    first, shared, second, third = kernels.jobs
    assert kernels.spills_more("case 0", field) == {}
    kernels.scratch = {first: 0, shared: 8, second: 8, third: 24}
    reason = "spills: 24 bytes of scratch memory a lane, the default 8"
    assert kernels.spills_more("case 0", field) == kernels.spills_more("case 1", field) == {3: reason}
    # the default spills as much, or nobody knows
    for changed in ({first: 24}, {third: 8}):
        other = dict(kernels.scratch) | changed
        plain, kernels.scratch = kernels.scratch, other
        assert kernels.spills_more("case 0", field) == {}
        kernels.scratch = plain
    for unknown in (first, third):
        plain, kernels.scratch = kernels.scratch, {name: n for name, n in kernels.scratch.items() if name != unknown}
        assert kernels.spills_more("case 0", field) == {}
        kernels.scratch = plain
    assert kernels.spills_more("case 0", field[2:]) == {} and kernels.spilled("case 0", field[0]) is None


def test_scratch_is_kept_of_what_says_so() -> None:
    kernels = wanted(16, 32)
    compiled(kernels, lambda job: {"scratch": 4 * job["config"]["BLOCK"]} if job["index"] == 0 else {"seconds": 0.1})
    assert list(kernels.scratch.values()) == [64, 128] and not kernels.errors


# answers of a worker for a step of the mLSTM, whose strip of a state fits into the registers of eight warps
STEPS = """
import json, sys, torch
from wavecrest import registry
from wavecrest.tune import compile_worker
op = registry.get("mlstm_step")
args = op.study.inputs(4, 8, 256, torch.bfloat16, "meta")
found = {}
for arch, columns in (("gfx942", 128), ("sm_90", 32)):
    for warps in (1, 8):
        config = {"BLOCK_K": 256, "BLOCK_V": columns, "num_warps": warps}
        job = {"op": op.name, "backend": "triton", "args": compile_worker.described(args), "index": 0, "arch": arch}
        found[f"{arch} {warps}"] = compile_worker.answer(job | {"config": config})
sys.stdout.write(json.dumps(found))
"""


@pytest.mark.slow
def test_scratch_is_read_in_compiled_code() -> None:
    names = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, env=names)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if any(answer.get("fatal") for answer in found.values()):
        pytest.skip("no compiler here")
    for arch in ("gfx942", "sm_90"):
        assert found[f"{arch} 1"]["scratch"] > 0 and found[f"{arch} 8"]["scratch"] == 0, found
    with pytest.raises(EnvironmentProblem, match="does not give its scratch"):
        compiler.scratch(SimpleNamespace(asm={"amdgcn": "nothing"}), "gfx942")


def test_why_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = ARCHS["sm_90"]
    assert compile_ahead.kernels(True, arch).note == "the CPU runs no compiled kernels"
    assert compile_ahead.kernels(False, None).note.startswith("wavecrest has no record of the architecture")

    def none() -> None:
        raise EnvironmentProblem("no compiler")

    monkeypatch.setattr(compiler, "require_compiler", none)
    assert compile_ahead.kernels(False, arch).note == "no compiler"
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    assert compile_ahead.kernels(False, arch) == compile_ahead.Kernels("sm_90")
    done = compile_ahead.compile_all(compile_ahead.Kernels("", note="none here"), 4, deadline=0.0, start=lambda: 1 / 0)  # type: ignore[arg-type]
    assert done.note == "none here" and done.kernels == 0


# --- who compiles them


class Child:
    """Stands for a child process."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.answer, self.closed = answer, False
        self.asked: list[dict[str, Any]] = []

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert timeout == compile_ahead.TIMEOUT
        self.asked.append(job)
        return self.answer(job)

    def close(self) -> None:
        self.closed = True


def compiled(
    kernels: compile_ahead.Kernels, answer: Callable[[dict[str, Any]], dict[str, Any]], workers: int = 2, **options: Any
) -> tuple[Any, list[Child]]:
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(answer))
        return children[-1]

    options = {"deadline": math.inf} | options
    return compile_ahead.compile_all(kernels, workers, start=start, **options), children


def test_all_are_compiled_and_errors_kept() -> None:
    kernels, shown = wanted(*range(1, 20)), []

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return {"error": "spills"} if job["config"]["BLOCK"] == 7 else {"seconds": 0.1}

    done, children = compiled(
        kernels, answer, workers=3, on_kernel=lambda count, planned: shown.append((count, planned))
    )
    assert done.kernels == 19 and done.left == 0 and done.workers == 3 and len(children) == 3
    asked = [job["config"]["BLOCK"] for child in children for job in child.asked]
    assert sorted(asked) == list(range(1, 20)), "each once"
    assert list(kernels.errors.values()) == ["spills"] and list(done.failed.values()) == ["spills"]
    assert next(iter(done.failed)).startswith("kernel BLOCK=7")
    assert all(child.closed for child in children) and shown[-1] == (19, 19)


def test_no_more_children_than_kernels_and_one_at_least() -> None:
    assert len(compiled(wanted(1, 2), lambda job: {}, workers=8)[1]) == 2
    assert len(compiled(wanted(1, 2, 3), lambda job: {}, workers=0)[1]) == 1


def test_no_kernel_is_begun_after_the_deadline() -> None:
    kernels, now = wanted(*range(1, 9)), SimulatedClock()
    done, _ = compiled(kernels, lambda job: now.advance(0.1) or {}, workers=1, deadline=0.25, now=now)
    assert done.kernels == 3 and done.left == len(kernels.jobs) - 3 and done.seconds == pytest.approx(0.3)
    # not compiled is not refused
    assert not kernels.errors


def test_children_without_a_compiler_end_the_run() -> None:
    with pytest.raises(EnvironmentProblem, match="nothing can be compiled: no triton"):
        compiled(wanted(*range(1, 9)), lambda job: {"error": "no triton", "fatal": True})


def test_an_interruption_closes_the_children() -> None:
    release = threading.Event()
    children: list[Child] = []
    waited: list[bool] = []

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["config"]["BLOCK"] > 2:
            waited.append(release.wait(60))
        return {}

    def start() -> Child:
        children.append(Child(answer))
        return children[-1]

    def interrupt(done: int, planned: int) -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            compile_ahead.compile_all(wanted(*range(1, 9)), 2, deadline=math.inf, on_kernel=interrupt, start=start)
        assert len(children) == 2 and all(child.closed for child in children)
        assert not waited, "waited for a kernel"
    finally:
        release.set()


# --- the child process itself


def scripted(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> compile_ahead.CompileWorker:
    """A worker whose children run these scripts, one after another."""
    started = iter(scripts)

    def start(self: compile_ahead.CompileWorker) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", next(started)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    monkeypatch.setattr(compile_ahead.CompileWorker, "_start", start)
    return compile_ahead.CompileWorker()


ECHO = "import sys\nfor line in sys.stdin:\n    print(line.strip(), flush=True)\n"
DIES = """
import sys, os
sys.stdin.readline()
sys.stderr.write("note\\nLLVM ERROR: cannot select\\n\\n")
sys.stderr.flush()
os._exit(6)
"""
HANGS = "import time\ntime.sleep(3600)"


def test_a_child_that_dies_costs_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    own = scripted(monkeypatch, ECHO, DIES, ECHO)
    assert own.ask({"a": 1}, 20) == {"a": 1} and own.ask({"a": 2}, 20) == {"a": 2}
    own._stop()
    assert own.ask({"a": 3}, 20) == {"error": "the compiler ended with code 6: LLVM ERROR: cannot select"}
    assert own.ask({"a": 4}, 20) == {"a": 4}
    own.close()
    assert own.ask({"a": 5}, 20) == {"error": "was not compiled: the run ended"}


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own = scripted(monkeypatch, HANGS, ECHO)
    # it never answers, so that the answer is the end of its time
    assert own.ask({}, 0.3) == {"error": "was not compiled within 0 s"}
    assert own.ask({"a": 1}, 60) == {"a": 1}
    own.close()


def test_closing_ends_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked, real = scripted(monkeypatch, HANGS), threading.Event(), compile_ahead.select.select

    def select(*given: Any) -> Any:
        # the question was sent
        asked.set()
        return real(*given)

    monkeypatch.setattr(compile_ahead, "select", SimpleNamespace(select=select))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(own.ask({}, 600)))
    thread.start()
    assert asked.wait(60)
    own.close()
    thread.join(60)
    assert answers == [{"error": "was not compiled: the run ended"}]


def without_interpreter(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"TRITON_CACHE_DIR": str(folder)}


def test_what_a_compiler_prints_is_no_answer() -> None:
    noisy = """
import os
from wavecrest.tune import compile_worker
def answer(job):
    print("note", flush=True)
    os.write(1, b"another\\n")
    return {"again": job}
compile_worker.answer = answer
compile_worker.main()
"""
    command = [sys.executable, "-c", noisy]
    done = subprocess.run(command, input='{"a": 1}\n{"a": 2}\n', capture_output=True, text=True)
    assert list(map(json.loads, done.stdout.splitlines())) == [{"again": {"a": 1}}, {"again": {"a": 2}}]
    assert done.stderr.split() == ["note", "another"] * 2


TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 8, "SPLIT_K": 1, "PERSISTENT": 0, "TMA": 0,
        "num_warps": 2, "num_stages": 3}  # fmt: skip
JOB: dict[str, Any] = {
    "op": "gemm",
    "backend": "triton",
    "config": TILE,
    "args": [
        {"shape": [16, 256], "stride": [256, 1], "dtype": "bfloat16"},
        {"shape": [256, 64], "stride": [1, 256], "dtype": "bfloat16"},
        *[None, None, None, None, None, None, None, 1.0, 0.01, "n", "ieee", "plain", 0, None],
    ],
    "index": 0,
    "arch": "sm_90",
}


@pytest.mark.slow
def test_the_child_answers_and_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="compiling needs triton")
    jobs = [JOB, JOB | {"config": TILE | {"num_warps": 3}}, JOB | {"config": TILE | {"BLOCK_K": 128}}]
    command = [sys.executable, "-m", "wavecrest.tune.compile_worker"]
    lines = "\n".join(map(json.dumps, jobs)) + "\n"
    done = subprocess.run(command, input=lines, env=without_interpreter(tmp_path), capture_output=True, text=True)
    first, bad, last = map(json.loads, done.stdout.splitlines())
    # two stages of 16 × 64 and 32 × 64 values of two bytes
    assert first["shared"] == 2 * (16 + 32) * 64 * 2 and first["seconds"] > 0
    assert bad["error"].startswith("_tile_kernel does not compile for sm_90: ")
    assert last["shared"] == 2 * first["shared"]


@pytest.mark.skipif(not _triton.interpreted, reason="kernels of this process are not the interpreter's")
def test_kernels_of_the_interpreter_are_a_reason_for_all() -> None:
    assert compile_worker.answer(JOB)["fatal"]


@pytest.mark.slow
def test_a_real_call_finds_what_was_compiled(tmp_path: Path) -> None:
    """The whole way of a launch, up to the launch itself: types, constants, alignment and options must agree."""
    pytest.importorskip("triton", reason="compiling needs triton")
    script = Path(__file__).with_name("tune_cache.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=without_interpreter(tmp_path / "cache"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["failed"] == {} and found["kernels"] == found["jobs"] >= 14
    missed = {name: hits for name, hits in found["hits"].items() if not hits or not all(hits)}
    assert not missed and found["new"] == 0
    assert {name: len(hits) for name, hits in found["hits"].items()} | {"split": 2, "stream-K": 2, "whole": 1} == {
        name: len(hits) for name, hits in found["hits"].items()
    }
