"""The identity of a plan's machine and model, and the effects of applying a plan besides building its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import PAUSE, SlightlyWrong, TakeHalfOut, TakePauseOut, slow
from wavecrest import hardware, ops
from wavecrest.errors import PlanError, PlanMismatch
from wavecrest.hardware import Device
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.plan import Fingerprint, ModelIdentity, Plan, PlanWarning
from wavecrest.records import DecisionRow, StepOutcome, provenance

GPU = Device("cuda", 0, "gfx942", "AMD Instinct MI300X", 304, 192 << 30, "hip 7.1")


class Net(nn.Module):
    """A parameter and two buffers, one of them whole numbers."""

    def __init__(self, *, size: int = 4, dtype: torch.dtype = torch.float32, counts: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, dtype=dtype)
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("counts", torch.zeros(3, dtype=counts))


def structure(model: nn.Module) -> str:
    return ModelIdentity.of(model, "float32").structure


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"arch": "gfx950"}, "arch"),
        ({"name": "AMD Instinct MI325X"}, "device"),
        ({"compute_units": 228}, "compute_units"),
        ({"driver": "hip 7.2"}, "driver"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_fingerprint_holds_every_fact_of_the_device(change: dict[str, Any], name: str) -> None:
    before, after = Fingerprint.of(GPU), Fingerprint.of(replace(GPU, **change))
    (value,) = change.values()
    (difference,) = before.differences(after)
    assert difference == f"{name} {getattr(before, name)} → {value}"


def test_the_fingerprint_holds_the_versions_of_this_process() -> None:
    found, versions = Fingerprint.of(GPU), provenance.versions()
    assert found.torch == torch.__version__ == versions.torch and found.wavecrest == versions.wavecrest
    assert (found.triton, found.transformers) == (versions.triton, versions.transformers)
    assert found.differences(found.model_copy(update={"triton": "0.1"})) == [f"triton {versions.triton} → 0.1"]


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "size of a parameter": lambda: Net(size=5),
    "dtype of a parameter": lambda: Net(dtype=torch.bfloat16),
    "dtype of a buffer": lambda: Net(counts=torch.int32),
    "shape of a buffer": lambda: _with(Net(), lambda net: net.register_buffer("counts", torch.zeros(4).long())),
    "another buffer": lambda: _with(Net(), lambda net: net.register_buffer("more", torch.zeros(1))),
    "another name": lambda: _with(Net(), lambda net: setattr(net, "other", nn.Linear(4, 4))),
    "another class": lambda: _with(Net(), lambda net: setattr(net, "act", nn.GELU())),
    "a class instead of another": lambda: _with(Net(), lambda net: setattr(net, "linear", _Linear(4, 4))),
}


class _Linear(nn.Linear):
    pass


def _with(model: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(model)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_the_structure_changes_with(change: str) -> None:
    assert structure(CHANGES[change]()) != structure(Net())


def test_the_structure_does_not_depend_on_values() -> None:
    model = Net()
    before = structure(model)
    with torch.no_grad():
        model.linear.weight.mul_(3)
        model.counts.add_(1)
    assert structure(model) == before == structure(Net())


@pytest.fixture
def workload() -> Workload:
    return from_example(*slow())


def test_another_driver_is_another_machine(workload: Workload) -> None:
    plan = Plan.start(workload, hardware.cpu(), {"default": {}})
    assert plan.match(workload, hardware.cpu()) == []
    plan.fingerprint.driver = "0.0.1"
    assert plan.match(workload, hardware.cpu()) == [f"driver 0.0.1 → {hardware.cpu().driver}"]


def test_another_architecture_or_model_is_refused(workload: Workload) -> None:
    plan = Plan.start(workload, hardware.cpu(), {"default": {}})
    with pytest.raises(PlanMismatch, match=r"measured on cpu-.*this is gfx942 \(AMD Instinct MI300X\)"):
        plan.match(workload, GPU)
    half = workload.model.to(torch.bfloat16)
    with pytest.raises(PlanMismatch, match=r"1,072 parameters, float32\), this is Slow \(1,072 parameters, bfloat16"):
        plan.match(from_example(half, torch.randn(4, 16, dtype=torch.bfloat16)), hardware.cpu())


def test_applying_pins_the_backends_of_the_plan(run: Run) -> None:
    x, weight = torch.randn(4, 16), torch.ones(16)
    op = ops.get("rms_norm")
    ops.rms_norm(x, weight)
    ((decision, _),) = op.decisions()
    other = next(name for name in ("reference", "torch", "native") if name in op.backends and name != decision.backend)
    plan = run(TakePauseOut()).plan
    row = DecisionRow(
        op="rms_norm", key=json.dumps(list(decision.key)), backend=other, config={}, source="", reason="", calls=1
    )
    absent = row.model_copy(update={"backend": "none of this name"})
    plan.dispatch = [row]
    plan.apply(slow()[0])
    ops.rms_norm(x, weight)
    ((pinned, _),) = op.decisions()
    assert (pinned.backend, pinned.source, pinned.reason) == (other, "exact", "plan")
    op.unpin()
    # a backend that is not here is left out, not an error
    plan.dispatch = [absent]
    plan.apply(slow()[0])
    ops.rms_norm(x, weight)
    assert op.decisions()[0][0].backend == decision.backend


def test_a_variable_that_is_not_set_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run(TakePauseOut()).plan
    plan = Plan.model_validate(
        {**plan.model_dump(), "environment": [{"name": "OMP_WAIT_POLICY", "value": "active", "ratio": 1.1}]}
    )
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with pytest.warns(PlanWarning, match="measured with OMP_WAIT_POLICY=active set before import"):
        assert plan.apply(slow()[0]).pause == 0
    with pytest.raises(PlanMismatch, match="OMP_WAIT_POLICY=active"):
        plan.apply(slow()[0], strict=True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert plan.apply(slow()[0], strict=True).pause == 0


def test_other_versions_are_held_to_the_limits_of_the_plans_dtype(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 2e-4 is wrong in float32, and would be right in bfloat16."""
    plan = run(TakePauseOut()).plan
    plan.fingerprint.torch = "2.0.0"
    monkeypatch.setattr(TakePauseOut, "apply", SlightlyWrong.apply)
    with pytest.warns(PlanWarning, match="step gain no longer verifies"):
        made = plan.apply(*slow())
    assert made.pause == PAUSE


def test_other_versions_are_held_to_the_limits_of_the_precision_that_was_asked_for(run: Run) -> None:
    class Coarse(TakePauseOut):
        id = "precision:bf16"

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            return SlightlyWrong().apply(model, params)

    plan = run(Coarse(), precision="bf16").plan
    assert plan.stack == ["precision:bf16"]
    plan.fingerprint.torch = "2.0.0"
    assert plan.apply(*slow(), strict=True).pause == 0


def test_a_step_that_no_longer_verifies_is_no_part_of_those_after_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run(TakeHalfOut(), TakePauseOut()).plan
    assert plan.stack == ["half", "gain"]
    plan.fingerprint.torch = "2.0.0"
    monkeypatch.setattr(TakeHalfOut, "apply", SlightlyWrong.apply)
    model, x = slow()
    with pytest.warns(PlanWarning, match="step half no longer verifies") as told:
        made = plan.apply(model, x)
    assert len(told) == 1 and made.pause == 0 and torch.equal(made(x), model(x))


def test_the_last_attempt_that_was_kept_is_replayed(run: Run) -> None:
    plan = run(TakeHalfOut()).plan
    first = plan.steps[0].model_copy(update={"verdict": "reverted", "params": {"from": "first"}})
    again = plan.steps[0].model_copy(update={"attempt": 2, "params": {"from": "second"}})
    for before in (first, first.model_copy(update={"verdict": "kept"})):
        plan.steps = [before, again]
        assert plan.kept() == [again]
    plan.steps = [first]
    with pytest.raises(PlanError, match="stack names 'half', which no kept step has"):
        plan.kept()


def test_a_step_of_another_version_is_named(workload: Workload, tmp_path: Path) -> None:
    plan = Plan.start(workload, hardware.cpu(), {"default": {}})
    plan.steps = [StepOutcome(id="of 2031", title="", level=3, verdict="kept", reason="")]
    plan.stack = ["of 2031"]
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="no step 'of 2031' in this wavecrest"):
        Plan.load(tmp_path / "plan.json").apply(workload.model)
