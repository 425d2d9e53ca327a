"""A plan is data: what it may set, call and pin is listed, and anything else in the file is one named error."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import env, hardware, ops
from wavecrest.cli.main import main
from wavecrest.errors import PlanError, PlanMismatch, StepRefused
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.plan import Plan, PlanWarning
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id, steps_up_to
from wavecrest.records import DecisionRow, StepOutcome

MODEL = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"


def document(**changes: Any) -> dict[str, Any]:
    plan = Plan.start(from_example(MODEL, torch.zeros(2, 4)), hardware.cpu(), {"default": {"args[0]": "2x4"}})
    return {**json.loads(plan.model_dump_json()), **changes}


def step(step_id: str, **params: Any) -> dict[str, Any]:
    row = StepOutcome(id=step_id, title="t", level=3, verdict="kept", reason="r", params=params)
    return {"steps": [json.loads(row.model_dump_json())], "stack": [step_id]}


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(document(**changes)))
    return path


def variable(name: str, value: str, ratio: Any = 1.1) -> dict[str, Any]:
    return {"environment": [{"name": name, "value": value, "ratio": ratio}]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONWARNINGS", "all:0:antigravity.x:0:0"),
        ("BROWSER", "/bin/sh -c 'touch owned' %s"),
        ("LD_PRELOAD", "/tmp/x.so"),
        ("PYTHONSTARTUP", "x.py"),
        ("PATH", "/tmp"),
        ("A=1; touch owned; B", "1"),
        ("OMP_WAIT_POLICY", "active; touch owned"),
        ("OMP_WAIT_POLICY", ""),
        ("WAVECREST_DATABASE", "/tmp/rows"),
        ("", ""),
    ],
)
def test_a_plan_sets_only_variables_of_the_table(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not in this wavecrest's table of variables to try"):
        Plan.load(saved(tmp_path, **variable(name, value)))


def test_every_variable_that_a_run_may_try_can_be_in_a_plan(tmp_path: Path) -> None:
    tried = [(row.name, value) for row in env.table() for value in row.try_values]
    assert tried
    for name, value in tried:
        assert Plan.load(saved(tmp_path, **variable(name, value))).environment[0].name == name


def test_verify_starts_nothing_for_a_plan_with_another_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", start)
    path = saved(tmp_path, **variable("BROWSER", "/bin/sh -c 'touch owned' %s"))
    for command in (["verify", "a.py:f", "--plan"], ["plan", "show"], ["plan", "check"]):
        assert main([*command, str(path)]) == 1
        assert "BROWSER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (step("precision:bf16", precision="bf16"), "precision:bf16 is in force, and precision says nothing"),
        ({**step("precision:bf16", precision="bf16"), "precision": "fp16"}, "and precision says fp16"),
        ({"precision": "int3"}, "precision: Input should be"),
        ({"min_gain": "NaN"}, "min_gain"),
        ({"min_gain": -0.1}, "min_gain"),
        ({"min_gain": 1}, "min_gain"),
        ({"stack": ["a", "a"]}, "a step is there twice: a, a"),
        ({"environment": [variable("OMP_WAIT_POLICY", "active")["environment"][0]] * 2}, "a variable is there twice"),
        (variable("OMP_WAIT_POLICY", "active", "Infinity"), "ratio"),
        (variable("OMP_WAIT_POLICY", "active", 0), "ratio"),
        ({"stack": ["gone"]}, "stack names 'gone'"),
    ],
    ids=range(11),
)
def test_parts_that_contradict_each_other_or_are_out_of_range(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan.load(saved(tmp_path, **changes)).kept()


@pytest.mark.parametrize(
    ("step_id", "params", "reason"),
    [
        ("attention:sdpa", {"implementation": "evil-org/evil-kernel", "owners": [""]}, "implementation: Input should"),
        ("attention:pack_gqa", {"implementation": "sdpa", "owners": [""]}, "implementation: Input should"),
        ("attention:sdpa", {"implementation": "sdpa"}, "owners: Field required"),
        ("replace_norm", {}, "sites: Field required"),
        ("replace_norm", {"sites": []}, "sites: List should have at least 1"),
        ("replace_norm", {"sites": "1"}, "sites: Input should be a valid list"),
        ("replace_norm", {"sites": [1]}, "sites.0: Input should be a valid string"),
        ("replace_norm", {"sites": ["1"], "more": 1}, "more: Extra inputs are not permitted"),
        ("fuse_qkv", {"groups": [["0"]]}, "at least 2"),
        ("compile:default", {"preset": "max-autotune"}, "preset is 'max-autotune'"),
        ("compile:default", {"preset": 3}, "preset: Input should be a valid string"),
        ("sdpa:math", {"backend": "flash"}, "backend is 'flash'"),
        ("capture", {"buckets": ["b"], "compile": "reduce-overhead"}, "compile: Input should be"),
        ("capture", {"buckets": [], "compile": ""}, "at least 1"),
        ("environment", {"candidates": [], "run": "x"}, "run: Extra"),
    ],
    ids=range(15),
)
def test_a_step_takes_only_its_own_parameters(
    step_id: str, params: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, **step(step_id, **params))
    with pytest.raises(PlanError, match=f"parameters of step {step_id}.*{reason}"):
        Plan.load(path).apply(MODEL)
    assert main(["plan", "check", str(path)]) == 1
    assert "parameters of step" in capsys.readouterr().err


def test_every_step_of_the_ladder_has_a_schema() -> None:
    assert not [one.id for one in steps_up_to(5) if one.params_type is None]


@pytest.mark.parametrize(
    ("step_id", "params", "reason"),
    [
        ("replace_norm", {"sites": ["gone.norm"]}, "replace_norm names the module 'gone.norm', which the model does"),
        ("replace_norm", {"sites": ["0.weight"]}, "names the module '0.weight'"),
        ("channels_last", {"sites": ["0"]}, "0 is a Linear, not a Conv2d"),
        ("fuse_qkv", {"groups": [["0", "1"]]}, "1 is a LayerNorm, not a plain Linear"),
        ("attention:sdpa", {"implementation": "sdpa", "owners": ["0"]}, "do not fit this model: AttributeError"),
    ],
)
def test_modules_that_do_not_fit_are_named(step_id: str, params: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(StepRefused, match=reason):
        Plan.load(saved(tmp_path, **step(step_id, **params))).apply(MODEL)


def test_building_checks_again_what_is_in_memory() -> None:
    applied = AppliedSteps().plus(step_by_id("replace_norm"), {"sites": ["1"], "more": 1})
    with pytest.raises(PlanError, match="more: Extra"):
        build(MODEL, applied)


def row(key: str, config: dict[str, Any] | None = None, op: str = "rms_norm", backend: str = "torch") -> dict[str, Any]:
    made = DecisionRow(op=op, key=key, backend=backend, config={}, source="exact", reason="", calls=1)
    return {"dispatch": [{**json.loads(made.model_dump_json()), "config": config or {}}]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (row("not json"), "row of rms_norm is damaged: not JSON"),
        (row("[" * 5000), "deep"),
        (row("{}"), "its key is no list"),
        (row("[[1]]"), "its key is no list"),
        (row("[1.5]"), "its key is no list"),
        (row("[]", op="os.system"), "row of os.system is damaged: no op named"),
        (row("[]", {"num_warps": -1}), "its configuration has {'num_warps': -1}"),
        (row("[]", {"num_warps": 0}), "its configuration has"),
        (row("[]", {"BLOCK_N": 1 << 20}), "its configuration has"),
    ],
    ids=range(9),
)
def test_dispatch_rows_that_no_run_writes(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan.load(saved(tmp_path, **changes)).apply(MODEL)


def test_dispatch_rows_of_another_version_are_left_out_with_a_warning(tmp_path: Path) -> None:
    x, weight, op = torch.randn(4, 16), torch.ones(16), ops.get("rms_norm")
    ops.rms_norm(x, weight)
    key = json.dumps(list(op.decisions()[0][0].key))
    for changes, reason in (
        (row("[1, 2]"), "its key has 2 parts"),
        (row(key, {"zzz": 1}), "takes no configuration"),
        (row(key, {"zzz": 1}, backend="triton"), "does not know zzz=1"),
    ):
        plan = Plan.load(saved(tmp_path, **changes))
        with pytest.warns(PlanWarning, match=reason):
            plan.apply(MODEL)
        with pytest.raises(PlanMismatch, match=reason):
            plan.apply(MODEL, strict=True)


def test_show_counts_skipped_steps_and_lists_them_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = step("replace_norm")
    more = StepOutcome(id="fuse_qkv", title="not here", level=3, verdict="skipped", reason="no such module")
    path = str(saved(tmp_path, **{**rows, "steps": [*rows["steps"], json.loads(more.model_dump_json())]}))
    assert main(["plan", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "1 step skipped; --all lists them" in shown and "no such module" not in shown
    assert main(["plan", "show", "--all", path]) == 0
    shown = capsys.readouterr().out
    assert "no such module" in shown and "--all" not in shown


def test_show_prints_lines_that_a_shell_may_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "show", str(saved(tmp_path, **variable("OMP_WAIT_POLICY", "active")))]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("export")]
    assert shlex.split(line, comments=True) == ["export", "OMP_WAIT_POLICY=active"]


def test_text_of_a_file_drives_neither_the_terminal_nor_the_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = f"{ESCAPES}[/x][red]"
    changed = document(workload=hostile, spec=hostile, created=hostile, **step("replace_norm", sites=[hostile]))
    changed["fingerprint"] |= dict.fromkeys(("arch", "device", "driver", "torch", "wavecrest"), hostile)
    changed["model"] |= {"cls": hostile, "dtype": hostile}
    changed["buckets"] = [{"name": hostile, "shapes": {hostile: hostile}}]
    changed["steps"][0] |= {"title": hostile, "reason": hostile}
    other = saved(tmp_path).rename(tmp_path / "other.json")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed))
    for command in (["show", str(path)], ["diff", str(path), str(other)], ["check", str(path)]):
        assert main(["plan", *command]) in (0, 2)
        shown = capsys.readouterr().out
        assert "\\x1b]0;owned" in shown.replace("\n", "") and not {"\x1b", "\x07", "\u202e"} & set(shown)
        assert "[/x]" in shown.replace("\n", "")
