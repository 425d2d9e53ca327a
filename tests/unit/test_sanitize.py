"""scripts/sanitize: what it feeds the kernels, and what it makes of a tool's words. The tools themselves need a GPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import tensors_of

ROOT = Path(__file__).parents[2]
MARK = "sanitize result: "
FINE = {"rms_norm": {"ran": 7, "declined": {}, "wrong": {}}}


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    spec = importlib.util.spec_from_file_location("sanitize_ops", ROOT / "benchmarks" / "sanitize_ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # triton.jit reads the source of the module it is in
    sys.modules["sanitize_ops"] = module
    spec.loader.exec_module(module)
    return module


def text(ran: Any = FINE, summary: str = "ERROR SUMMARY: 0 errors", more: str = "") -> str:
    return f"========= COMPUTE-SANITIZER\n{more}{MARK}{json.dumps(ran)}\n========= {summary}\n"


@pytest.mark.parametrize(
    ("code", "said", "errors", "verdict"),
    [
        (0, text(), 0, "clean"),
        (0, text(summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"), 0, "clean"),
        (99, text(summary="RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"), 3, "3 errors"),
        (99, text(summary="ERROR SUMMARY: 12 errors", more="========= Invalid __global__ write\n"), 12, "12 errors"),
        (99, text(summary="ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors"), 2, "2 errors"),
        (1, text(), 0, "exit code 1"),
        (0, text({"rms_norm": {"ran": 7, "declined": {}, "wrong": {"1x1": "off"}}}), 0, "wrong results: rms_norm"),
        (0, text({**FINE, "rope": {"ran": 0, "declined": {"1x1": "no"}, "wrong": {}}}), 0, "no case ran: rope"),
        (0, text({"rope": {**FINE["rms_norm"], "idle": ["triton_b"]}}), 0, "no case ran: rope triton_b"),
        (0, text({}), 0, "no case ran: no op"),
        (1, "Traceback\nImportError: no torch\n========= ERROR SUMMARY: 0 errors\n", 0, "did not finish"),
        (0, f"{MARK}{json.dumps(FINE)}\n========= Error: Device not supported\n", None, "did not finish"),
        (-1, "did not end within 300 s", None, "did not finish: did not end within 300 s"),
        (0, "", None, "did not finish: exit code 0"),
    ],
    ids=[
        "clean", "no-race", "races", "errors", "two-summaries", "exit-code", "wrong", "idle-op", "idle-kernel", "no-op",
        "crash", "refused", "timeout", "silent",
    ],
)  # fmt: skip
def test_verdict(sanitize: ModuleType, code: int, said: str, errors: int | None, verdict: str) -> None:
    result = sanitize.verdict(code, said)
    assert result["errors"] == errors and result["verdict"].startswith(verdict)
    assert (result["verdict"] == "clean") == (verdict == "clean")
    if verdict.startswith("wrong results"):
        assert result["lines"] == ["rms_norm 1x1: off"]
    if errors:
        assert all(line.startswith("=====") for line in result["lines"])


@pytest.mark.parametrize(("planted", "verdict"), [(1, "clean"), (0, "not trusted: it did not find the planted bug")])
def test_a_tool_must_find_a_planted_bug(sanitize: ModuleType, planted: int, verdict: str) -> None:
    commands = []

    def run(command: list[str]) -> tuple[int, str]:
        commands.append(command)
        return (99, f"========= ERROR SUMMARY: {planted} errors") if "--plant" in command else (0, text())

    result = sanitize.check(run, "memcheck", ["rms_norm", "rope"], 2)
    assert result["verdict"].startswith(verdict) and result["cases"] == 14
    assert result["planted_bug"] == ("found" if planted else "missed")
    assert [command[:2] for command in commands] == [["--tool", "memcheck"]] * 3
    ends = sorted(command[-2:] for command in commands)
    assert ends == [["--ops", "rms_norm"], ["--ops", "rope"], ["--plant", "memcheck"]]
    assert sum("--child" in command for command in commands) == 2


def test_what_did_not_end_has_a_second_try(sanitize: ModuleType) -> None:
    tries: dict[str, int] = {}

    def run(command: list[str]) -> tuple[int, str]:
        name = command[-1]
        tries[name] = tries.get(name, 0) + 1
        if name == "softmax" or (name == "rope" and tries[name] == 1):
            return sanitize.UNENDED, "did not end within 60 s"
        return (99, "========= ERROR SUMMARY: 1 errors") if "--plant" in command else (0, text())

    result = sanitize.check(run, "memcheck", ["rms_norm", "rope", "softmax"], 1)
    assert tries == {"memcheck": 1, "rms_norm": 1, "rope": 2, "softmax": 2}
    assert result["second_try"] == ["rope", "softmax"]
    assert result["verdict"] == "did not finish: did not end within 60 s (softmax)"


def test_a_process_that_does_not_end_is_killed_with_what_it_runs(sanitize: ModuleType, tmp_path: Path) -> None:
    started = tmp_path / "started"
    # a process of its own, which says which one it is
    script = f"sleep 3600 & echo $! > {started}; wait"
    code, said = sanitize._child(["bash", "-c", script], 3.0)
    assert code == sanitize.UNENDED and "did not end within" in said
    # killed with its group, so that it is gone, or waits to be asked for
    status = Path(f"/proc/{int(started.read_text())}/stat")
    for _ in range(600):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("what it ran lives on")
    assert sanitize._child([sys.executable, "-c", "print('fine')"], 60) == (0, "fine\n")


def test_one_bad_process_is_the_verdict_of_its_tool(sanitize: ModuleType) -> None:
    clean = sanitize.verdict(0, text())
    bad = sanitize.verdict(99, text(summary="ERROR SUMMARY: 3 errors"))
    lost = sanitize.verdict(-1, "did not end within 300 s")
    assert sanitize.merged({"a": clean, "b": clean}) == {"errors": 0, "cases": 14, "verdict": "clean"}
    both = sanitize.merged({"a": clean, "b": bad, "c": bad, "d": lost})
    assert both["verdict"] == "3 errors (b, c); did not finish: did not end within 300 s (d)"
    assert (both["errors"], both["cases"]) == (6, 21) and len(both["lines"]) > 2
    assert sanitize.merged({"a": lost})["errors"] is None


def test_the_budget_ends_it_with_what_is_known(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [0.0]

    def child(command: list[str], timeout: float) -> tuple[int, str]:
        assert 0 < timeout <= 60
        if "--version" in command:
            return 0, "version 2025.3"
        # rope alone takes all there is
        clock[0] += timeout if "rope" in command else 1.0
        if "--plant" in command:
            return 99, "========= ERROR SUMMARY: 1 errors"
        return 0, text({command[-1]: FINE["rms_norm"]})

    monkeypatch.setattr(sanitize, "find_tool", lambda: "/cs")
    monkeypatch.setattr(sanitize, "_child", child)
    monkeypatch.setattr(sanitize.time, "perf_counter", lambda: clock[0])
    target = tmp_path / "sanitize.json"
    options = ["--ops", "rms_norm,rope,softmax", "--tools", "memcheck", "--jobs", "1", "--budget", "64"]
    monkeypatch.setattr(sys, "argv", ["sanitize_ops.py", *options, "--timeout", "60", "--out", str(target)])
    assert sanitize.main() == 2
    written = json.loads(target.read_text())
    # an op was checked before the time was over
    verdict = "did not finish: no time left of the budget (rope, softmax)"
    assert written["tools"]["memcheck"] | {"lines": []} == {
        "errors": 0, "cases": 7, "verdict": verdict, "planted_bug": "found", "seconds": 2.0, "lines": [],
        "second_try": ["rope", "softmax"],
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "permuted"])
def test_layouts_hold_the_same_values(sanitize: ModuleType, layout: str) -> None:
    x = torch.randn(6, 33)
    here, there = sanitize.place(x, 6, layout, "cpu")
    assert torch.equal(here, there) and here.stride() == there.stride()
    if layout == "contiguous":
        assert there.is_contiguous()
    elif layout == "sliced":
        assert torch.equal(there, x) and there.stride() == (38, 1) and there.storage_offset() == 3
    else:
        assert torch.equal(there.permute(1, 0, 2).reshape(6, 33), x) and not there.is_contiguous()
    weight = torch.randn(33)
    assert sanitize.place(weight, 6, layout, "cpu")[1] is weight


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_every_case_runs_the_kernel_and_is_right(
    sanitize: ModuleType, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "CASES", [case for case in sanitize.CASES if case[1] < 30000])
    op = registry.get(name)
    layouts = set()
    run = op.run

    def note(backend: str, call: Any) -> Any:
        assert backend == "triton"
        first = tensors_of(call)[0]
        layouts.add((first.ndim, first.is_contiguous()))
        return run(backend, call)

    monkeypatch.setattr(op, "run", note)
    assert sanitize.run_op(op, device) == {"ran": 5, "declined": {}, "wrong": {}, "idle": []}
    assert layouts == {(2, True), (2, False), (3, False)}


@pytest.mark.parametrize("name", ["conv2d", "flash_attention", "flash_decoding", "mla_decode", "mla_prefill"])
def test_an_op_without_rows_runs_what_the_emulator_runs(sanitize: ModuleType, name: str, device: str) -> None:
    op = registry.get(name)
    assert op.study.emulate_cases is not None
    known = hardware.detect().known
    count = len(op.study.emulate_cases("sm_90" if known is None else known.name))
    assert count > (2 if name == "mla_prefill" else 5)
    found = sanitize.run_op(op, device)
    # a second portable kernel takes the cases that are made for it
    short = {"flash_attention": 3}.get(name, 0)
    assert (found["ran"], found["wrong"], found["idle"]) == (count + short, {}, [])
    # each kernel that is for another architecture says so
    others = [one for one in op.backends if one.startswith("triton_")]
    assert len(found["declined"]) == count * len(others) - short


def test_a_product_runs_rows_and_what_the_emulator_runs(
    sanitize: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = registry.get("gemm")
    cases = sanitize.calls(op, device)
    assert {"norm", "gated", "weight int4", "6x33 bfloat16 sliced"} <= set(cases)
    monkeypatch.setattr(sanitize, "calls", lambda *_args: {"norm": cases["norm"]})
    found = sanitize.run_op(op, device)
    # stream-K does not normalise, nor do the kernels of sm_90 and gfx950, and they say so
    assert (found["ran"], found["wrong"]) == (2, {})
    declined = ("stream_k", "hopper", "hopper_epilogue", "hopper_blocks", "hopper_words", "cdna")
    assert list(found["declined"]) == [f"norm triton_{name}" for name in declined]


def test_what_is_wrong_or_declined_is_named(sanitize: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("rms_norm")
    found: list[Callable[..., Any]] = [lambda backend, call: 2 * op.reference(call)]
    monkeypatch.setattr(op, "run", lambda *args: found[0](*args))
    result = sanitize.run_op(op, device)
    assert result["ran"] == 7 and len(result["wrong"]) == 7
    assert result["wrong"]["5x33 bfloat16 contiguous"].startswith("wrong: result 0 has error")

    def refuse(*_args: Any) -> Any:
        raise sanitize.Unsupported("not today")

    found[0] = refuse
    result = sanitize.run_op(op, device)
    assert result["ran"] == 0 and set(result["declined"].values()) == {"not today"} and result["idle"] == ["triton"]

    def refuse_elsewhere(_backend: str, call: Any) -> Any:
        raise sanitize.Unsupported("is for gfx950" if call.x.shape[0] == 5 else "not today")

    # it is for another architecture, which one call of several was told
    found[0] = refuse_elsewhere
    assert sanitize.run_op(op, device)["idle"] == []

    def crash(*_args: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    found[0] = crash
    result = sanitize.run_op(op, device)
    assert set(result["wrong"].values()) == {"raised RuntimeError: an illegal memory access"} and not result["ran"]
    assert result["idle"] == []


def test_every_op_with_a_kernel_is_taken(sanitize: ModuleType) -> None:
    names = [op.name for op in sanitize._with_kernels([])]
    assert names == [name for name in registry.names() if "triton" in registry.get(name).backends]
    assert [op.name for op in sanitize._with_kernels(["rms_norm"])] == ["rms_norm"]


@pytest.mark.parametrize(
    ("hip", "gpu", "tool", "message"),
    [
        ("6.4", True, "/x", "compute-sanitizer is NVIDIA's; this torch is a ROCm build"),
        (None, False, "/x", "torch sees no GPU"),
        (None, True, None, "compute-sanitizer is not on the PATH; it is part of the CUDA toolkit"),
    ],
    ids=["rocm", "no-gpu", "no-tool"],
)
def test_where_it_cannot_run_it_says_why(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    hip: str | None, gpu: bool, tool: str | None, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    monkeypatch.setattr(sys, "argv", ["sanitize_ops.py", "--out", str(tmp_path / "a.json")])
    assert sanitize.main() == 3
    assert capsys.readouterr().err.startswith(f"sanitize: {message}")
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize(("racecheck", "code"), [(text(), 0), (text(summary="ERROR SUMMARY: 1 errors"), 2)])
def test_one_file_with_a_verdict_a_tool(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    racecheck: str, code: int,
) -> None:  # fmt: skip
    def child(command: list[str], timeout: float) -> tuple[int, str]:
        if "--plant" in command:
            return 99, "========= ERROR SUMMARY: 1 errors"
        if command[0] != "/cs":
            return 0, MARK + json.dumps(FINE)
        return 0, "version 2025.3" if "--version" in command else racecheck if "racecheck" in command else text()

    monkeypatch.setattr(sanitize, "find_tool", lambda: "/cs")
    monkeypatch.setattr(sanitize, "_child", child)
    target = tmp_path / "new" / "sanitize.json"
    monkeypatch.setattr(sys, "argv", ["sanitize_ops.py", "--ops", "rms_norm", "--out", str(target)])
    assert sanitize.main() == code
    written = json.loads(target.read_text())
    assert list(written["tools"]) == ["memcheck", "racecheck", "initcheck"]
    assert written["tools"]["racecheck"]["verdict"] == ("1 errors (rms_norm)" if code else "clean")
    assert written["tools"]["initcheck"]["verdict"] == "clean"
    assert written["ops"] == FINE and written["sanitizer"] == ["version 2025.3"]
    assert written["header"]["versions"]["torch"] == torch.__version__
    assert capsys.readouterr().out.count("clean") == (2 if code else 3)
