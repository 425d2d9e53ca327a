"""`wavecrest doctor` as a user runs it."""

from __future__ import annotations

import builtins
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from wavecrest import doctor, ops
from wavecrest.cli import main
from wavecrest.cli.doctor import run
from wavecrest.doctor import Context, DoctorReport, Dump


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two child processes, which tests/unit/test_doctor.py covers."""
    monkeypatch.setattr("wavecrest.doctor.context.inductor_settings", lambda environment: Dump())
    monkeypatch.setenv("COLUMNS", "80")


def test_it_reports_and_returns_zero_with_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("AITER_ENABLE_FUSION", "[bold]1[/bold]")
    assert main.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "! TORCHDYNAMO_DISABLE=1" in text and "a compiled model runs eagerly" in text
    # values are shown as they are, not taken for markup
    assert "AITER_ENABLE_FUSION=[bold]1[/bold] (folklore" in text
    assert "Nothing was changed." in text
    assert text.index("TORCHDYNAMO_DISABLE") < text.index("AITER_ENABLE_FUSION"), "warnings come first"
    assert max(map(len, text.splitlines())) <= 80


def test_json_is_the_whole_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AMD_LOG_LEVEL", "4")
    monkeypatch.setenv("MY_SECRET_TOKEN", "hush")
    assert main.main(["doctor", "--device", "cpu", "--json"]) == 0
    text = capsys.readouterr().out
    report = DoctorReport.model_validate_json(text)
    assert report.device["kind"] == "cpu" and report.environment["AMD_LOG_LEVEL"] == "4"
    assert any(finding.what.startswith("AMD_LOG_LEVEL=4") for finding in report.findings)
    assert "hush" not in text


def test_run_is_callable_from_python() -> None:
    report = run("cpu")
    assert report.versions.torch is not None and report.threads >= 1
    assert report.platform_release is None or not report.platform_release.startswith("ROCm")


def test_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    before = dict(os.environ)
    run("cpu")
    assert dict(os.environ) == before


def test_without_torch_it_returns_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch" or name.startswith("torch."):
            raise ImportError("libamdhip64.so.7: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main.main(["doctor"]) == 3
    captured = capsys.readouterr()
    assert "torch cannot be imported (libamdhip64.so.7" in captured.err and not captured.out


def test_a_device_that_cannot_compute_returns_three(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(torch, "ones", refuse)
    assert main.main(["doctor", "--device", "cpu"]) == 3
    assert "invalid device function" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "code"), [("cuda:99", 3), ("toaster", 1)])
def test_bad_devices(device: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--device", device]) == code
    assert device in capsys.readouterr().err


def test_a_machine_with_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sick(device: Any) -> Context:
        return Context(device=device, environment={}, read={}.get, hip="7.2.26015", rocm="7.2.1", compiler="/bin/g++")

    monkeypatch.setattr(doctor, "collect", sick)
    assert main.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "✗ ROCm 7.2.1: replay of captured graphs may return garbage" in text and "ROCm/clr#279" in text
    assert "1 problem" in text
    assert json.dumps("ROCm 7.2.1") not in text


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ops for all."""
    monkeypatch.setattr("wavecrest.ops.names", lambda: ["add_rms_norm", "memcpy", "quantize_int8"])


def test_smoke_runs_ops_beside_their_oracles(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--device", "cpu", "--smoke", "--json"]) == 0
    rows = DoctorReport.model_validate_json(capsys.readouterr().out).smoke
    assert rows is not None and {row.outcome for row in rows} <= {"ok", "refused"}
    # one backend of each op is what dispatch runs, and it takes the call
    assert [(row.op, row.outcome) for row in rows if row.picked] == [
        ("add_rms_norm", "ok"), ("memcpy", "ok"), ("quantize_int8", "ok"),
    ]  # fmt: skip
    assert {row.backend for row in rows} >= {"torch", "triton"} and {row.dtype for row in rows} == {"float32"}
    assert all(bool(row.reason) == (row.outcome == "refused") for row in rows)


def test_smoke_finds_an_op_that_is_wrong_and_one_that_fails(
    few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(call: Any) -> Any:
        normed, total = ops.get("add_rms_norm").reference(call)
        return normed * 1.01, total

    def failing(call: Any) -> Any:
        raise RuntimeError("HIP error: [bold]invalid[/bold] device function")

    for name, run_it in (("add_rms_norm", wrong), ("memcpy", failing)):
        backends = ops.get(name).backends
        changed = dataclasses.replace(backends["torch"], run=run_it, bind=None)
        monkeypatch.setitem(backends, "torch", changed)
    assert main.main(["doctor", "--device", "cpu", "--smoke"]) == 2
    captured = capsys.readouterr()
    lines = {line.split()[0]: line for line in captured.out.splitlines() if " torch " in line}
    assert "wrong" in lines["add_rms_norm"] and "failed" in lines["memcpy"] and " ok " in lines["quantize_int8"]
    # the table folds its last column
    assert "1 wrong, 1 failed" in captured.out and "[bold]invalid" in captured.out
    assert "calls are not what the op defines: add_rms_norm on torch, memcpy on torch" in captured.err.replace(
        "\n", " "
    )


def test_a_model_runs_once_and_its_findings_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "calls = []\n"
        "class Attend(torch.nn.Module):\n"
        "    def forward(self, q):\n"
        "        open(__file__ + '.calls', 'a').write('x')\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "def workload():\n"
        "    return Attend(), torch.randn(1, 2, 8, 16)\n"
    )
    assert main.main(["doctor", "--device", "cpu", "--model", f"{tmp_path}/model.py:workload"]) == 0
    assert "✓ all 1 SDPA calls take a fast path (flash)" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "model.py.calls").read_text() == "x"
    assert main.main(["doctor", "--device", "cpu", "--model", f"{tmp_path}/gone.py:workload"]) == 1


def test_a_finding_says_how_to_measure_its_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sick(device: Any) -> Context:
        return Context(device=device, environment={}, read={}.get, compiler="/bin/g++", sdpa={"causal": "MATH"})

    monkeypatch.setattr(doctor, "collect", sick)
    assert main.main(["doctor", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "math path for: causal" in text and "measure wavecrest profile FILE.py:FUNCTION" in text
    assert "pytorch/pytorch#147460" in text
