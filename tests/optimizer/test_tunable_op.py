"""TunableOp's files in plans: which are data of a plan, where they apply, and how they are found in another process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_doctor import MI300X
from wavecrest import env, hardware
from wavecrest.errors import PlanError, StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer import tuning_side
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, tunable_op

STEP = step_by_id("tunable_op")
VALIDATORS = [
    ["PT_VERSION", "2.13.0"],
    ["ROCM_VERSION", "7.1.0.0-12969-1544e39"],
    ["HIPBLASLT_VERSION", "1.1.0-a9c5cc7"],
    ["GCN_ARCH_NAME", "gfx942:sramecc+:xnack-"],
    ["ROCBLAS_VERSION", "5.1.0-72e57364-dirty"],
]
ROWS = [
    ["GemmTunableOp_BFloat16_TN", "tn_32_4_16_ld_16_16_32", "Gemm_Hipblaslt_1219", "0.0196817"],
    ["GemmAndBiasTunableOp_float_TN", "tn_8_4_32", "Default", "0.01"],
    ["GemmStridedBatchedTunableOp_Half_NN", "nn_8_4_32_B_4_ld_8_32_8", "Gemm_Rocblas_-6212", "0.01"],
]
PARAMS: dict[str, Any] = {"validators": VALIDATORS, "rows": ROWS}


class Stand:
    """torch.cuda.tunable, which a CPU build refuses to switch; it keeps the order of what is asked of it."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled, self.tuning = enabled, True
        self.file: tuple[str, bool] | None = None
        self.checked: tuple[Any, ...] | None = None
        self.text = ""
        self.takes = True

    def is_enabled(self) -> bool:
        return self.enabled

    def tuning_is_enabled(self) -> bool:
        return self.tuning

    def enable(self, value: bool) -> None:
        self.enabled = value

    def tuning_enable(self, value: bool) -> None:
        self.tuning = value

    def set_filename(self, name: str, insert_device_ordinal: bool) -> None:
        self.file = name, insert_device_ordinal

    def set_rotating_buffer_size(self, _size: int) -> None:
        pass

    def set_numerical_check_tolerances(self, *given: Any) -> None:
        self.checked = given

    def get_validators(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, value) for name, value in VALIDATORS)

    def get_results(self) -> tuple[tuple[str, str, str, float], ...]:
        return tuple((a, b, c, float(d)) for a, b, c, d in ROWS)

    def read_file(self, name: str) -> bool:
        self.text = Path(name).read_text()
        return self.takes


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(tunable_op, "tunable", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.delenv("PYTORCH_TUNABLEOP_FILENAME", raising=False)
    return made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": []}, "rows: List should have at least 1"),
        ({"validators": []}, "validators: List should have at least 1"),
        ({"more": 1}, "more: Extra"),
        ({"rows": [ROWS[0][:3]]}, "rows.0: List should have at least 4"),
        ({"rows": [[*ROWS[0][:3], 0.01]]}, "valid string"),
        ({"rows": [[*ROWS[0][:2], "Gemm_Rocblas_1\nValidator,PT_VERSION,9", "1"]]}, "should match pattern"),
        ({"rows": [[*ROWS[0][:2], "a,b", "1"]]}, "should match pattern"),
        ({"rows": [[*ROWS[0][:2], "Gemm_Mine_1", "1"]]}, "Gemm_Mine_1 is not what TunableOp writes"),
        ({"rows": [["ScaledGemmTunableOp_float_TN", *ROWS[0][1:]]]}, "is not what TunableOp writes"),
        ({"rows": [["cmd", *ROWS[0][1:]]]}, "no operator with its sizes"),
        ({"rows": [[ROWS[0][0], "nt_32_4_16", *ROWS[0][2:]]]}, "no operator with its sizes"),
        ({"rows": [[ROWS[0][0], "tn_0_4_16", *ROWS[0][2:]]]}, "a size of 0"),
        ({"rows": [[*ROWS[0][:3], "inf"]]}, "no time in ms"),
        ({"rows": [ROWS[0], ROWS[0]]}, "is there twice"),
        ({"validators": [*VALIDATORS, VALIDATORS[0]]}, "is there twice"),
        ({"validators": [["a", "b, c"]]}, "should match pattern"),
    ],
    ids=range(16),
)
def test_a_plan_holds_nothing_but_a_file_of_tunable_op(change: dict[str, Any], reason: str) -> None:
    assert STEP.check_params(PARAMS) == []
    with pytest.raises(PlanError, match=f"parameters of step tunable_op: .*{reason}"):
        STEP.check_params(PARAMS | change)


class Two(nn.Module):
    """A GEMM without bias and one with; `during` has TunableOp's state at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 8)
        self.during: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        state: Any = tunable_op.tunable
        self.during.append((state.is_enabled(), state.tuning_is_enabled()))
        if fails:
            raise torch.OutOfMemoryError("no memory")
        made: Tensor = self.second(self.first(x))
        return made


def test_it_is_enabled_for_the_call_and_tunes_nothing(stand: Stand) -> None:
    model, x = Two(), torch.randn(4, 16)
    made: Any = build(model, AppliedSteps().plus(STEP, PARAMS))
    assert torch.equal(made(x), model(x))
    assert made.during == [(True, False)] and model.during == [(False, False)] and not stand.enabled
    with pytest.raises(torch.OutOfMemoryError):
        made(x, fails=True)
    assert not stand.enabled
    # the file as TunableOp writes it, and none of the working directory's
    assert stand.text.splitlines() == [",".join(["Validator", *row]) for row in VALIDATORS] + [
        ",".join(row) for row in ROWS
    ]
    assert stand.file == (os.devnull, False)


def test_it_is_outside_of_compiled_code(stand: Stand) -> None:
    model = Two()
    steps = AppliedSteps().plus(STEP, PARAMS).plus(step_by_id("compile:default"), {"preset": "default"})
    assert [item.step_id for item in steps.ordered()] == ["compile:default", "tunable_op"]
    made: Any = build(model, steps)
    seen: list[bool] = []

    def compiled(*_: Any) -> str:
        seen.append(stand.enabled)
        return "compiled"

    # what was compiled is what runs inside
    inner = made._compiled_call_impl.__closure__
    assert any(cell.cell_contents.__class__.__name__ == "_FirstCall" for cell in inner)
    made._compiled_call_impl = tunable_op._enabled(compiled)
    assert made(1) == "compiled" and seen == [True] and not stand.enabled


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"validators": [["PT_VERSION", "2.12.0"], *VALIDATORS[1:]]}, "PT_VERSION 2.12.0 → 2.13.0"),
        ({"validators": VALIDATORS[:-1]}, "ROCBLAS_VERSION none → 5.1.0-72e57364-dirty"),
        ({"validators": [*VALIDATORS, ["CK_VERSION", "1"]]}, "CK_VERSION 1 → none"),
    ],
)
def test_other_versions_are_refused(change: dict[str, Any], reason: str, stand: Stand) -> None:
    with pytest.raises(StepRefused, match=reason):
        build(Two(), AppliedSteps().plus(STEP, PARAMS | change))
    assert not stand.text


def test_where_it_does_not_apply(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = AppliedSteps().plus(STEP, PARAMS)
    stand.takes = False
    with pytest.raises(StepRefused, match="does not take the file"):
        build(Two(), steps)
    stand.enabled = True
    with pytest.raises(StepRefused, match="enabled for all"):
        build(Two(), steps)
    with pytest.raises(StepRefused, match="enabled for all"):
        STEP.find(context())
    stand.enabled = False
    monkeypatch.setattr(torch.version, "hip", None)
    assert "own solution alone" in STEP.find(context()).note
    assert "for GPUs" in STEP.find(context(hardware.cpu())).note
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StepRefused, match="for GPUs"):
        build(Two(), steps)


def context(device: hardware.Device = MI300X, workload: Workload | None = None) -> StepContext:
    made = workload or from_example(Two(), torch.randn(4, 16))
    return StepContext(made, device, model=made.model, seconds_left=100.0)


def side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> Path:
    """A process in place of the one that tunes; its task is copied to the path."""
    script, kept = tmp_path / "side.py", tmp_path / "kept.json"
    script.write_text(f"import os, shutil, sys, time, json\nshutil.copy(sys.argv[1], {str(kept)!r})\n{code}\n")
    monkeypatch.setattr(env, "python_command", lambda _module: [sys.executable, str(script)])
    return kept


def test_the_models_gemms_are_tuned_in_another_process(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = side(monkeypatch, tmp_path, f"open(sys.argv[2], 'w').write({json.dumps(PARAMS)!r})")
    found = STEP.find(context())
    assert found.params == PARAMS and found.sites == (
        "GemmTunableOp_BFloat16_TN tn_32_4_16_ld_16_16_32",
        "GemmStridedBatchedTunableOp_Half_NN nn_8_4_32_B_4_ld_8_32_8",
    )
    assert "another solution than PyTorch's for 2 of 3" in found.note
    task = json.loads(kept.read_text())
    assert task["products"] == [
        ["mm", [["float32", [4, 16], [16, 1]], ["float32", [16, 32], [1, 16]]]],
        ["addmm", [["float32", [8], [1]], ["float32", [4, 32], [32, 1]], ["float32", [32, 8], [1, 32]]]],
    ]
    plain = json.dumps(PARAMS | {"rows": [[*row[:2], "Default", row[3]] for row in ROWS]})
    side(monkeypatch, tmp_path, f"open(sys.argv[2], 'w').write({plain!r})")
    assert not STEP.find(context()).sites


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"os.kill(os.getpid(), {int(signal.SIGSEGV)})", "ended with code -11"),
        ("sys.exit('Memory access fault by GPU node-1')", "Memory access fault by GPU"),
        ("pass", "ended with code 0"),
        ("open(sys.argv[2], 'w').write('{}')", "does not know: parameters of step tunable_op: validators"),
        ("open(sys.argv[2], 'w').write('[')", "does not know: not JSON"),
        ("time.sleep(60)", "took more than 1 s"),
    ],
    ids=["crash", "fault", "nothing", "other", "damaged", "endless"],
)
def test_a_tuner_that_fails_costs_the_step_alone(
    code: str, reason: str, stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tunable_op, "MOST_SECONDS", 1.0)
    side(monkeypatch, tmp_path, code)
    with pytest.raises(StepRefused, match=reason):
        STEP.find(context())


def test_the_side_runs_each_gemm_with_numbers_about_one(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning_side, "tunable", stand)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    seen: list[tuple[Any, ...]] = []

    def addmm(bias: Tensor, a: Tensor, b: Tensor) -> None:
        seen.append((stand.enabled, stand.tuning, stand.checked, b.stride(), float((a @ b).std())))

    monkeypatch.setitem(tuning_side._CALLS, "addmm", addmm)
    products = tunable_op.products_of(context())
    assert tuning_side.tune(json.loads(json.dumps(products)), "cpu", tmp_path) == PARAMS
    ((enabled, tuning, checked, stride, spread),) = seen
    assert enabled and tuning and checked == (True, 1e-2, 1e-2) and stride == (1, 32) and 0.5 < spread < 2
    assert stand.file == (str(tmp_path / "tuned.csv"), False) and not stand.enabled and not stand.tuning


@pytest.mark.gpu
def test_a_real_file_goes_there_and_back(tmp_path: Path) -> None:
    """On CUDA, where TunableOp has PyTorch's solution alone, the file and its switches are the same."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model, x = Two().cuda().half(), torch.randn(4, 16).cuda().half()
    made = from_example(model, x)
    params = tunable_op.tuned(tunable_op.products_of(context(hardware.detect(), made)), "cuda:0", 120.0)
    assert len(params["rows"]) == 2 and STEP.check_params(params) == []
    with torch.no_grad():
        changed = build(model, AppliedSteps().plus(STEP, params))
        torch.testing.assert_close(changed(x), model(x), rtol=1e-2, atol=1e-2)
    other = params | {"validators": [[name, f"{value}1"] for name, value in params["validators"]]}
    with pytest.raises(StepRefused, match="other versions"):
        build(model, AppliedSteps().plus(STEP, other))
