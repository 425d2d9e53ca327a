"""Text from files and other people's code, in every command that prints: it drives no terminal and is no markup."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from rich.text import Text
from torch import nn

from wavecrest import hardware, records
from wavecrest.cli import (
    _bench_ops,
    _shared,
    _tune_workload,
    bench,
    compare,
    db,
    doctor,
    explain,
    isa_diff,
    isa_run,
    optimize,
    profile,
    tune,
    verify,
)
from wavecrest.cli.main import COMMANDS, main
from wavecrest.doctor.report import DoctorReport, Finding
from wavecrest.isa.compare import Change, IsaDiffRecord, KernelDiff, Side
from wavecrest.isa.emulate.record import EmulationRecord
from wavecrest.measure import timing
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.plan import Plan
from wavecrest.records import StepOutcome, provenance

EVIDENCE = Path(__file__).parents[2] / "evidence"
# a title, a cleared screen, a rubbed-out letter, a bell, a CSI of one byte, text turned around, a fake line, and markup
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x08\x9b31m\u202e\rb[red]c[/]d[/x]e"
ACTIVE = "\x1b\x07\x08\x9b\u202e\r"
SEEN = "a\\x1b]0;owned\\x07\\x1b[2J\\x08\\x9b31m\\u202e\\rb[red]c[/]d[/x]e"
INTERVAL = timing.Interval(1.0, 1.2)


def _places(value: Any, path: tuple[str, ...], found: dict[tuple[str, ...], list[tuple[Any, Any]]]) -> None:
    """Texts and names of a document by where they are, "*" for a place in a list or a name in a dict of any names."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in list(items):
        here = (*path, "*" if isinstance(value, list) else str(name))
        if isinstance(part, str) and name not in ("kind", "format_version"):
            found.setdefault(here, []).append((value, name))
        _places(part, here, found)


def poisoned(record: pydantic.BaseModel) -> tuple[Any, int]:
    """A record with every text that may be any text made hostile, and the number of such places."""
    document = json.loads(record.model_dump_json())
    places: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}
    _places(document, (), places)
    count = 0
    for held in places.values():
        before = [within[name] for within, name in held]
        for within, name in held:
            within[name] = HOSTILE
        try:
            type(record).model_validate(document)
            count += 1
        except pydantic.ValidationError:
            for (within, name), text in zip(held, before, strict=True):
                within[name] = text
    return type(record).model_validate(document), count


def evidence(name: str) -> records.Record:
    return records.load(EVIDENCE / name)


def bench_record() -> records.BenchRecord:
    measured = timing.Measurement((1.0, 1.1), (1.0, 1.1), 2.0, "host wall", INTERVAL)
    bucket = records.BucketBench(bucket="b", measurement=measured, shapes={"x": "2x4"}, peak_memory_bytes=7)
    return records.BenchRecord(
        header=provenance.header(hardware.cpu()), workload="w", dtype="float32", parameters=1, buckets=[bucket]
    )


def profile_record() -> records.ProfileRecord:
    op = records.OpTime(
        name="addmm", category="gemm", shapes="2x4", calls=1, ms=1.0, share=0.5, roofline_percent=3.0, bound="memory"
    )
    bucket = records.BucketProfile(
        bucket="b", wall_ms=2.0, kernel_ms=1.0, idle_ms=0.5, launches=2, ops=[op], uncategorized=["x"],
        categories=[records.CategoryTime(category="gemm", ms=1.0, share=1.0, calls=1)],
    )  # fmt: skip
    ends = [records.GraphBreak(kind=kind, file="f.py", line=1, reason="r") for kind in ("break", "recompile")]
    ceilings = records.Ceilings(source="s", bandwidth=1.0, peak={"float32": 1.0})
    return records.ProfileRecord(
        header=provenance.header(hardware.cpu()), workload="w", buckets=[bucket], graphs=2, breaks=ends,
        breaks_note="n", ceilings=ceilings,
    )  # fmt: skip


def bundle_record() -> records.BundleRecord:
    rows = [records.Check(what="w", passed=passed, detail="d") for passed in (True, False, None)]
    verified = evidence("nvidia-h200/2026-11-20_verify_llama_decode.jsonl.gz")
    assert isinstance(verified, records.VerifyRecord)
    return records.BundleRecord(
        header=provenance.header(hardware.cpu()), bundle="b.zip", content="c", workload="w", claim="c",
        outcome="confirmed", reason="r", checks=rows, verified=verified,
    )  # fmt: skip


def doctor_record() -> DoctorReport:
    findings = [
        Finding(check="c", level=level, what="w", why="y", action="a", source="s") for level in ("problem", "ok")
    ]
    return DoctorReport(
        created="now", device=hardware.cpu().to_dict(), versions=provenance.versions(), platform_release="p",
        kernel_driver="k", compiler="c", threads=1, environment={"A": "b"}, findings=findings,
        smoke=[records.SmokeRow(op="o", backend="b", dtype="d", outcome="wrong", picked=True, reason="r")],
    )  # fmt: skip


def compare_record() -> compare.CompareRecord:
    change = compare.BucketChange(
        bucket="b", a_ms=1.0, b_ms=1.0, ratio=1.0, low=0.9, high=1.1, verdict="tie", regression=False
    )
    return compare.CompareRecord(
        a="a", b="b", workload="w", fail_over=None, buckets=[change], warnings=["x"], outcome="ok", reason="r"
    )


def explain_record() -> explain.ExplainRecord:
    return explain.ExplainRecord(
        op="o", device="d", arch="a", key={"rows": "x"}, backend="b", function="f", config={"A": 1}, source="s",
        reason="r", refused={"x": "y"}, flops=1, bytes=1, note="n", measured="m",
    )  # fmt: skip


def ranking_record() -> explain.RankingRecord:
    row = explain.Ranked(backend="b", config={"A": 1}, default=True, us=1.0, shares={"dram": 1.0})
    return explain.RankingRecord(
        op="o", arch="a", part="p", key={"rows": "x"}, ranking=[row], decision=explain_record(), note="n"
    )


def workload_tune() -> records.WorkloadTuneRecord:
    key = records.CalledKey(
        op="o", case="c", key={"rows": 1}, calls=1, backend="b", source="s", winner="w", before_us=2.0, us=1.0, note="n"
    )
    left = key.model_copy(update={"left": "l", "winner": ""})
    speed = records.BucketSpeed(bucket="b", base_ms=1.0, new_ms=1.0, ratio=1.0, ci=INTERVAL, blocks=9, clock="c")
    return records.WorkloadTuneRecord(
        header=provenance.header(hardware.cpu()), workload="w", keys=[key, left], buckets=[speed], ratio=1.0,
        ci=INTERVAL, verdict="tie", reason="r", problem="p",
    )  # fmt: skip


def step_outcome() -> StepOutcome:
    return StepOutcome(id="i", title="t", level=3, verdict="tie", reason="r", ratio=1.0, ci=INTERVAL)


def show_outcome(row: StepOutcome) -> None:
    with optimize.Display() as display:
        display.phase(HOSTILE)
        display.outcome(row)


def emulation() -> EmulationRecord:
    from wavecrest.isa.emulate import record

    return record.load(max(EVIDENCE.glob("emulated/*_isa-run_gfx950.jsonl.gz")))


def isa_diff_record() -> IsaDiffRecord:
    header = provenance.header(hardware.cpu())
    side = Side(source="s", triton="t", config="c", variables={"A": "b"}, llvm=["l"], header=header)
    changes = [Change(fact="f", base="b", new="n", severity="watch", text="t"), Change(fact="f", base=1, new="n")]
    kernel = KernelDiff(
        target="t", case="c", kernel="k", arch="a", new_arch="b", verdict="watch", same_code=False, changes=changes
    )
    return IsaDiffRecord(
        header=header, target="t", base=side, new=side, kernels=[kernel], only_base=["b"], only_new=["n"]
    )


# by command: the record and the function that prints it
SHOWN: dict[str, tuple[Callable[[], pydantic.BaseModel], Callable[[Any], object]]] = {
    "doctor": (doctor_record, doctor.show),
    "bench": (bench_record, bench.show),
    "bench of ops": (lambda: evidence("nvidia-h200/2026-11-22_bench_memcpy.jsonl.gz"), _bench_ops.show),
    "profile": (profile_record, profile.print_record),
    "optimize": (
        lambda: evidence("nvidia-h200/2026-11-20_optimize_llama_prefill.jsonl.gz"),
        lambda record: optimize.print_summary(record, Path(HOSTILE)),
    ),
    "optimize, a verdict": (step_outcome, show_outcome),
    "verify": (lambda: evidence("nvidia-h200/2026-11-20_verify_llama_decode.jsonl.gz"), verify.print_plan),
    "verify of a bundle": (bundle_record, verify.print_bundle),
    "compare": (compare_record, compare.show),
    "explain": (explain_record, explain._show),
    "explain of another chip": (ranking_record, explain._show_ranking),
    "tune": (lambda: evidence("nvidia-h200/2026-11-23_tune_xlstm_prompts.jsonl.gz"), tune.show),
    "tune of a workload": (workload_tune, _tune_workload.show),
    "isa run": (emulation, isa_run.show),
    "isa diff": (isa_diff_record, isa_diff.show),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded, so that texts are found whole."""
    for console in (_shared.out, _shared.err):
        monkeypatch.setattr(console, "_width", 100_000)


def check(text: str) -> None:
    found = [ascii(mark) for mark in ACTIVE if mark in text]
    assert not found, f"{found} reach the terminal"
    assert SEEN in text, text[:2000]


@pytest.mark.parametrize("name", SHOWN)
def test_a_record_is_shown_as_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, show = SHOWN[name]
    record, count = poisoned(make())
    assert count >= 2
    show(record)
    captured = capsys.readouterr()
    check(captured.out + captured.err)


@pytest.mark.parametrize("name", SHOWN)
def test_a_record_as_json_is_the_record(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    record, _ = poisoned(SHOWN[name][0]())
    _shared.print_json(record)
    text = capsys.readouterr().out
    assert not [mark for mark in ACTIVE if mark in text]
    assert json.loads(text) == json.loads(record.model_dump_json())


def a_plan() -> Plan:
    made = Plan.start(from_example(nn.Linear(4, 4), torch.zeros(2, 4)), hardware.cpu(), {"default": {"args[0]": "2x4"}})
    made.steps, made.spec = [step_outcome()], "f.py:make"
    return made


@pytest.mark.parametrize("command", ["show", "diff", "check"])
def test_a_plan_is_shown_as_text(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    hostile, count = poisoned(a_plan())
    assert count > 10
    hostile.save(path)
    a_plan().save(tmp_path / "other.json")
    other = [str(tmp_path / "other.json")] if command == "diff" else []
    assert main(["plan", command, str(path), *other]) == (2 if command == "check" else 0)
    check(capsys.readouterr().out)


def test_a_report_says_its_headline_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile, _ = poisoned(evidence("nvidia-h200/2026-11-20_optimize_llama_prefill.jsonl.gz"))
    records.save(hostile, tmp_path / "run.json")
    assert main(["report", str(tmp_path)]) == 0
    check(capsys.readouterr().out)


def test_rows_of_a_database_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAVECREST_DATABASE", str(tmp_path / "user.db"))
    record = db.run_show("rope", "sm_90")
    hostile, count = poisoned(record.model_copy(update={"rows": record.rows[:2]}))
    assert count > 5
    monkeypatch.setattr(db, "run_show", lambda *_: hostile)
    assert main(["db", "show"]) == 0
    check(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimize", f"{HOSTILE}.py:make"], ["bench", f"{HOSTILE}:make"], ["profile", "--hf", HOSTILE],
        ["verify", "--plan", HOSTILE, "x.py:make"], ["verify", "--bundle", HOSTILE], ["plan", "show", HOSTILE],
        ["compare", HOSTILE, HOSTILE], ["explain", HOSTILE], ["tune", HOSTILE], ["db", "show", HOSTILE],
        ["isa", "show", HOSTILE], ["isa", "diff", HOSTILE, "--with", HOSTILE], ["report", HOSTILE],
        ["doctor", "--device", HOSTILE], [HOSTILE],
        ["new-op", HOSTILE], ["explain", "rope", "--kernels", f"{HOSTILE}.py"],
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "…"),
)  # fmt: skip
def test_an_error_names_what_was_given_as_text(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 3)
    text = capsys.readouterr().err
    assert not [mark for mark in ACTIVE if mark in text] and "Traceback" not in text
    assert "error: " in text


def test_text_that_is_no_markup_is_made_visible_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of machine code are printed as they are."""
    _shared.out.print(Text(HOSTILE))
    text = capsys.readouterr().out
    # rich itself takes out those that have no width
    assert not [mark for mark in ACTIVE if mark in text] and "\\x1b[2J" in text and "b[red]c[/]d[/x]e" in text


def test_every_command_is_covered() -> None:
    covered = {name.split()[0].rstrip(",") for name in SHOWN} | {"plan", "report", "db", "isa", "new-op"}
    assert covered == set(COMMANDS)
