"""Proof bundles: honest ones are confirmed; forged ones are not, or are a named error; none runs anything."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.conftest import NoAnalysis
from tests.optimizer.planted import CLOCK, AddPause, FastButWrong, Nothing, TakePauseOut, pairs_of, start_clock
from wavecrest import ops
from wavecrest.cli.main import main
from wavecrest.errors import BundleError, OutputError, PlanMismatch
from wavecrest.measure import workload
from wavecrest.measure.timing import Interval
from wavecrest.optimizer import api, bundle, confirm, verify
from wavecrest.optimizer.alternate import LOOKS
from wavecrest.optimizer.children import SideReport, Task
from wavecrest.optimizer.gate.snapshot import same_bits
from wavecrest.optimizer.side import measure_side
from wavecrest.records import BundleRecord, archive

SLOW = "tests.optimizer.planted:slow"
FIRST, SECOND = list(LOOKS)[:2]
Documents = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted steps, for whoever replays the plan; tests on a GPU take the real ones."""
    if request.node.get_closest_marker("gpu") is not None:
        return
    found = {step.id: step for step in (TakePauseOut(), Nothing())}
    monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: found)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundle of a run that kept one step of two and found the result faster."""
    path = tmp_path_factory.mktemp("bundle") / "proof.zip"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        found = {step.id: step for step in (TakePauseOut(), Nothing())}
        patch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: found)
        start_clock()
        loaded = workload.load(SLOW, device="cpu")
        options = api.Options(level=4, budget=60)
        result = api.run(loaded, options, now=CLOCK, analysis=NoAnalysis(loaded), bundle=path)
    torch.set_num_threads(threads)
    assert not result.unwritten and result.record.result is not None and result.record.result.verdict == "faster"
    assert result.plan.stack == ["gain"]
    yield path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run in this process, on the simulated clock."""

    def child(task: Task, _changes: object, _name: str) -> SideReport:
        return measure_side(task, now=CLOCK)

    start_clock()
    monkeypatch.setattr(verify, "run_pairs", pairs_of(child))


def documents(path: Path) -> Documents:
    with zipfile.ZipFile(path) as held:
        return {name: json.loads(held.read(name)) for name in held.namelist()}


def pack(path: Path, held: Documents) -> Path:
    """The bundle of edited documents, its hashes those of the edited content."""
    texts = {name: json.dumps(held[name]).encode() for name in (bundle.RUN, bundle.PLAN)}
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    manifest = {**held[bundle.MANIFEST], "members": hashes}
    archive.write(path, {bundle.MANIFEST: json.dumps(manifest).encode(), **texts})
    return path


def parts(record: BundleRecord) -> dict[str, bool | None]:
    return {row.what: row.passed for row in record.checks}


def test_an_honest_bundle_is_confirmed_without_the_workload(honest: Path) -> None:
    record = confirm.run(honest)
    assert record.outcome == "confirmed" and record.reason.endswith(
        "not checked: workload, answers, speed, profile and memory"
    )
    assert parts(record) == {
        **dict.fromkeys(("manifest", "baseline", "resolution", "steps", "variables", "answers in the record"), True),
        **dict.fromkeys(("result", "plan"), True),
        **dict.fromkeys(("workload", "answers", "speed", "profile and memory")),
    }
    assert (
        record.claim.startswith(("faster: 6.9", "faster: 7.0"))
        and record.content == hashlib.sha256(honest.read_bytes()).hexdigest()[:12]
    )


def test_an_honest_bundle_is_confirmed_with_the_workload(honest: Path, here: None) -> None:
    told: list[str] = []
    record = confirm.run(honest, SLOW, seconds=0.1, on_phase=told.append)
    assert record.outcome == "confirmed" and record.reason.endswith("not checked: profile and memory"), record.reason
    assert all(passed for name, passed in parts(record).items() if name != "profile and memory")
    assert {"sources", "weights", "inputs", "answers", "speed"} <= set(parts(record))
    assert record.verified is not None and record.verified.passed and len(record.verified.processes) == 4
    assert len(told) == 4


def test_a_run_without_a_gain_is_confirmed_too(tmp_path: Path, one_thread: None) -> None:
    start_clock()
    loaded = workload.load(SLOW, device="cpu")
    options = api.Options(level=4, budget=60, steps=("noise",))
    api.run(loaded, options, now=CLOCK, analysis=NoAnalysis(loaded), bundle=tmp_path / "b.zip")
    record = confirm.run(tmp_path / "b.zip", SLOW)
    assert record.outcome == "confirmed" and parts(record)["speed"] is None
    assert "nothing is in force" in record.checks[-2].detail


def test_a_model_in_memory_has_a_bundle(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    result = api.optimize(model, x, level=1, budget=0.1, bundle=tmp_path / "b.zip")
    assert not result.unwritten
    held = bundle.read(tmp_path / "b.zip")
    assert held.manifest.sources == {} and held.manifest.weights == bundle.hash_weights(model)
    assert confirm.run(tmp_path / "b.zip").outcome == "confirmed"


# ---- forged content: every hash agrees, the claim does not


def result(held: Documents) -> dict[str, Any]:
    found: dict[str, Any] = held[bundle.RUN]["result"]
    return found


def both(held: Documents, **changes: Any) -> None:
    """Change the result in record and plan."""
    for name in (bundle.RUN, bundle.PLAN):
        held[name]["result"].update(copy.deepcopy(changes))


def samples(held: Documents, step: str) -> list[dict[str, Any]]:
    return [row for row in held[bundle.RUN]["samples"] if row["step"] == step]


def outcome_of(held: Documents, step: str, **changes: Any) -> None:
    for name in (bundle.RUN, bundle.PLAN):
        row = next(row for row in held[name]["steps"] if row["id"] == step)
        row.update(copy.deepcopy(changes))


def faster_samples(held: Documents) -> None:
    for row in samples(held, "result"):
        row["new"] = [ms / 2 for ms in row["new"]]


def one_sample(held: Documents) -> None:
    row = samples(held, "gain")[0]
    row["new"] = [ms * 0.99 for ms in row["new"]]


def drop_pair(held: Documents) -> None:
    held[bundle.RUN]["samples"] = [
        row for row in held[bundle.RUN]["samples"] if (row["step"], row["attempt"]) != ("result", FIRST)
    ]


def drop_first_pair(held: Documents) -> None:
    held[bundle.RUN]["samples"] = [
        row for row in held[bundle.RUN]["samples"] if (row["step"], row["attempt"]) != ("result", 1)
    ]


def more_pairs(held: Documents) -> None:
    for attempt in range(FIRST + 1, SECOND + 1):
        held[bundle.RUN]["samples"].append({**samples(held, "result")[0], "attempt": attempt})


def other_bucket(held: Documents) -> None:
    samples(held, "gain")[0]["bucket"] = "small"


def twice(held: Documents) -> None:
    held[bundle.RUN]["samples"].append(samples(held, "gain")[0])


def without_samples(held: Documents) -> None:
    held[bundle.RUN]["samples"] = [row for row in held[bundle.RUN]["samples"] if row["step"] != "gain"]


def stranger(held: Documents) -> None:
    held[bundle.RUN]["samples"].append({**samples(held, "gain")[0], "step": "magic"})


def bad_time(value: Any) -> Callable[[Documents], None]:
    def change(held: Documents) -> None:
        samples(held, "result")[0]["new"][0] = value

    return change


def kept_noise(held: Documents) -> None:
    outcome_of(held, "noise", verdict="kept")
    held[bundle.PLAN]["stack"].append("noise")


def baseline(held: Documents) -> None:
    held[bundle.RUN]["baseline"][0]["measurement"]["samples"] = [
        2 * ms for ms in held[bundle.RUN]["baseline"][0]["measurement"]["samples"]
    ]


def no_resolution(held: Documents) -> None:
    held[bundle.RUN]["samples"] = [row for row in held[bundle.RUN]["samples"] if row["step"] != "resolution"]


def large_error(held: Documents) -> None:
    rows = copy.deepcopy(result(held)["numerics"])
    rows[0]["error"] = 1.0
    both(held, numerics=rows)


def failed_row(held: Documents) -> None:
    rows = copy.deepcopy(result(held)["numerics"])
    rows[0]["passed"] = False
    both(held, numerics=rows)


def rules(held: Documents) -> None:
    held[bundle.RUN]["gate"]["rules"].remove("variation")


def gate(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: held[bundle.RUN]["gate"].update(changes)


def in_run(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: held[bundle.RUN].update(changes)


def in_plan(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: held[bundle.PLAN].update(changes)


def in_manifest(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: held[bundle.MANIFEST].update(changes)


def in_result(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: both(held, **changes)


def in_step(**changes: Any) -> Callable[[Documents], None]:
    return lambda held: outcome_of(held, "gain", **changes)


def plan_step(held: Documents) -> None:
    held[bundle.PLAN]["steps"][0]["params"] = {"from": "elsewhere"}


def fingerprint(held: Documents) -> None:
    held[bundle.PLAN]["fingerprint"]["device"] = "Another CPU"


def nothing_in_force(held: Documents) -> None:
    held[bundle.PLAN]["stack"] = []
    none = {"low": 1.0, "high": 1.0}
    both(held, verdict="already optimal", reason="", ratio=1.0, ci=none, speed=[])


DECISION = {"op": "gemm", "backend": "torch", "config": {}, "source": "", "reason": "", "calls": 1}
VARIABLE = {"name": "OMP_WAIT_POLICY", "value": "active", "ratio": 1.5}
# change of the documents -> what the reason names
FORGED: dict[str, tuple[Callable[[Documents], None], str]] = {
    "samples of the result": (faster_samples, "speed-up of the result"),
    "samples of a step": (one_sample, "speed-up of gain"),
    "interval of the result": (in_result(ci={"low": 6.9, "high": 7.1}), "interval of the result"),
    "speed-up of the result": (in_result(ratio=9.0), "speed-up of the result"),
    "reason of the result": (in_result(reason="9.000× faster"), "reason of the result"),
    "verdict of the result": (in_result(verdict="already optimal"), "verdict of the result"),
    "drift": (in_result(drift=0.2), "drift of the original"),
    "unit": (in_result(unit="processes"), "reason of the result"),
    "old unit": (in_result(unit="blocks"), "blocks of one process"),
    "result taken out": (lambda held: [held[n].update(result=None) for n in (bundle.RUN, bundle.PLAN)], "interrupted"),
    "interval of a step": (in_step(ci={"low": 8.0, "high": 9.0}), "interval of gain"),
    "speed-up of a step": (in_step(ratio=9.0), "speed-up of gain"),
    "verdict of a step": (kept_noise, "noise is kept in the record, tie by its samples"),
    "resolution of a step": (in_step(resolution=0.0), "was not measured"),
    "resolution": (in_run(resolution={"default": 0.0}), "resolution of default"),
    "no resolution": (no_resolution, "a model against itself"),
    "baseline": (baseline, "interval of default"),
    "a pair dropped": (drop_pair, "is of 3 pairs"),
    "the first pair dropped": (drop_first_pair, "pairs are numbered [2, 3, 4]"),
    "pairs after the decision": (more_pairs, "4 pairs had decided"),
    "a bucket dropped": (other_bucket, "there are samples of small"),
    "samples twice": (twice, "there twice"),
    "a step without samples": (without_samples, "gain is kept, and has no samples"),
    "samples of nothing": (stranger, "magic, which is no step"),
    "a time of zero": (bad_time(0.0), "above zero"),
    "a time below zero": (bad_time(-1.0), "above zero"),
    "a time that is no number": (bad_time("NaN"), "above zero"),
    "an error beyond its limit": (large_error, "is off by 1.00e+00"),
    "a failed output": (failed_row, "failed the gate"),
    "a rule off": (rules, "the gate ran without variation"),
    "nothing compared": (gate(leaves=0), "the gate compared nothing"),
    "no gate": (in_run(gate=None), "no record of the accuracy gate"),
    "seed of the record": (gate(seed=1), "names seed"),
    "seed of the manifest": (in_manifest(seed=1), "names seed 1"),
    "sources of wavecrest": (in_manifest(source="0" * 12), "names source"),
    "another step in the plan": (plan_step, "other steps"),
    "a variable in the plan": (in_plan(environment=[VARIABLE]), "variables of the plan"),
    "min_gain": (in_plan(min_gain=0.0), "another min_gain"),
    "dispatch": (
        in_plan(dispatch=[{**DECISION, "key": "[]"}]), "other dispatch decisions",
    ),
    "result of the plan": (lambda held: held[bundle.PLAN]["result"].update(ratio=2.0), "another result"),
    "machine of the plan": (fingerprint, "of another machine"),
    "no step in force": (in_plan(stack=[]), "no step is in force"),
    "a gain not in force": (nothing_in_force, "gain is kept, and not in force"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_bundle_is_not_confirmed(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, message = FORGED[name]
    held = documents(honest)
    change(held)
    assert main(["verify", "--bundle", str(pack(tmp_path / "b.zip", held)), "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["outcome"] == "not confirmed"
    assert any(message in row["detail"] for row in record["checks"] if row["passed"] is False), record["checks"]


def test_other_sources_are_named_where_a_figure_disagrees(honest: Path, tmp_path: Path) -> None:
    """Another version may look after other numbers of pairs, or judge otherwise."""
    held = documents(honest)
    held[bundle.MANIFEST]["source"] = held[bundle.RUN]["header"]["source"] = "0" * 12
    record = confirm.run(pack(tmp_path / "b.zip", held))
    assert record.outcome == "confirmed" and "not as here" in record.checks[0].detail
    faster_samples(held)
    record = confirm.run(pack(tmp_path / "b.zip", held))
    assert record.outcome == "not confirmed" and "(source 000000000000) too" in record.reason


def test_the_forger_changes_nothing_by_packing(honest: Path, tmp_path: Path) -> None:
    assert confirm.run(pack(tmp_path / "b.zip", documents(honest))).outcome == "confirmed"


def seeds(held: Documents) -> None:
    held[bundle.RUN]["gate"]["seed"] = held[bundle.MANIFEST]["seed"] = 1


def hashed(name: str) -> Callable[[Documents], None]:
    def change(held: Documents) -> None:
        manifest = held[bundle.MANIFEST]
        if name == "weights":
            manifest["weights"] = "0" * 64
        elif name == "sources":
            manifest["sources"]["planted.py"] = "0" * 64
        elif name == "example":
            manifest["inputs"][0]["example"]["args[0]"] = "0" * 64
        else:
            manifest["inputs"][0]["drawn"][1][1] = "0" * 64

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (seeds, "inputs"),
        (hashed("weights"), "weights"),
        (hashed("sources"), "sources"),
        (hashed("example"), "inputs"),
        (hashed("drawn"), "inputs"),
    ],
    ids=["seeds", "weights", "sources", "example", "drawn"],
)
def test_forged_inputs_are_found_with_the_workload(
    honest: Path, tmp_path: Path, change: Callable[[Documents], None], part: str
) -> None:
    held = documents(honest)
    change(held)
    path = pack(tmp_path / "b.zip", held)
    # nothing else can tell
    assert confirm.run(path).outcome == "confirmed"
    record = confirm.run(path, SLOW)
    assert record.outcome == "not confirmed"
    assert [row.what for row in record.checks if row.passed is False] == [part]
    assert record.checks[-2].detail.startswith("not measured: something else")


def test_wrong_answers_are_found_with_the_workload(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle whose figures agree, of a step that gives other answers than it says."""
    monkeypatch.setattr(TakePauseOut, "apply", FastButWrong.apply)
    record = confirm.run(honest, SLOW)
    assert record.outcome == "not confirmed" and parts(record)["answers"] is False
    assert "output of bucket default: error" in record.reason


@pytest.mark.parametrize(
    ("apply", "message"),
    [(AddPause.apply, "the optimized model is slower"), (Nothing.apply, "less than claimed")],
    ids=["slower", "no gain"],
)
def test_made_up_samples_are_found_by_measuring(
    honest: Path, here: None, monkeypatch: pytest.MonkeyPatch, apply: Any, message: str
) -> None:
    monkeypatch.setattr(TakePauseOut, "apply", apply)
    record = confirm.run(honest, SLOW, seconds=0.1)
    assert record.outcome == "not confirmed" and parts(record)["answers"] is True and message in record.reason


def test_a_large_claim_with_a_wide_interval_is_said_to_be_no_more_than_its_lower_end(honest: Path, here: None) -> None:
    """One sample that is made up makes 7 times of a few percent, and an interval that any gain is in."""
    measured = confirm.run(honest, SLOW, seconds=0.1).verified
    held = bundle.read(honest)
    assert measured is not None and held.record.result is not None
    small = measured.model_copy(update={"ratio": 1.05, "ci": Interval(1.04, 1.06)})
    for claimed, more in ((1.05, ""), (1.07, "; 1.070× is not"), (7.0, "; 7.000× is not")):
        held.record.result.ratio, held.record.result.ci = claimed, Interval(1.03, 40.0)
        passed, detail = confirm._judge(held, small)
        assert passed and detail.endswith(f"faster by at least 2% here too{more}")


def test_one_process_proves_no_claim(honest: Path, here: None) -> None:
    record = confirm.run(honest, SLOW, seconds=0.1, processes=1)
    assert record.outcome == "not confirmed" and "at least two --processes" in record.reason


def elsewhere(held: Documents) -> None:
    """The same run on a machine that is not this one."""
    held[bundle.PLAN]["fingerprint"].update(arch="gfx942", device="AMD Instinct MI300X", compute_units=304)
    held[bundle.RUN]["header"]["device"].update(arch="gfx942", name="AMD Instinct MI300X", compute_units=304)


def test_on_another_machine_the_answers_are_confirmed_and_the_speed_is_not_compared(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = documents(honest)
    elsewhere(held)
    path = pack(tmp_path / "b.zip", held)
    record = confirm.run(path, SLOW)
    assert record.outcome == "other machine" and record.reason.startswith("it was measured on gfx942")
    assert parts(record)["answers"] is True and parts(record)["speed"] is None and record.verified is None
    assert main(["verify", SLOW, "--bundle", str(path)]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "other machine: it was measured on gfx942 (AMD Instinct MI300X, 304 units)" in shown
    assert "not checked: it was measured on gfx942" in shown
    # without the workload it makes no difference where the figures are computed
    assert confirm.run(path).outcome == "confirmed"


def test_wrong_answers_on_another_machine_are_wrong(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = documents(honest)
    elsewhere(held)
    monkeypatch.setattr(TakePauseOut, "apply", FastButWrong.apply)
    assert confirm.run(pack(tmp_path / "b.zip", held), SLOW).outcome == "not confirmed"


def test_another_model_is_refused(honest: Path, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
    )
    with pytest.raises(PlanMismatch, match=r"the bundle is of Slow .* with other modules or shapes"):
        confirm.run(honest, f"{tmp_path / 'work.py'}:make")


def test_nothing_that_a_bundle_names_is_loaded(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('owned').touch()\n")
    held = documents(honest)
    for name in (bundle.RUN, bundle.PLAN):
        held[name]["spec"] = f"{tmp_path / 'evil.py'}:make"
    monkeypatch.setattr(workload, "load", lambda *_a, **_k: pytest.fail("the workload was loaded"))
    assert confirm.run(pack(tmp_path / "b.zip", held)).outcome == "confirmed"
    assert not (tmp_path / "owned").exists()


# ---- damaged files


def members(honest: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(honest) as held:
        return {name: held.read(name) for name in held.namelist()}


def zipped(rows: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as held:
        for name, content in rows:
            held.writestr(name, content)
    return made.getvalue()


def added(*more: tuple[str | zipfile.ZipInfo, bytes]) -> Callable[[Path], bytes]:
    return lambda honest: zipped([*members(honest).items(), *more])


def renamed(old: str, new: str) -> Callable[[Path], bytes]:
    return lambda honest: zipped([(new if name == old else name, held) for name, held in members(honest).items()])


def without(name: str) -> Callable[[Path], bytes]:
    return lambda honest: zipped([row for row in members(honest).items() if row[0] != name])


def exchanged(name: str, content: bytes) -> Callable[[Path], bytes]:
    return lambda honest: zipped([*{**members(honest), name: content}.items()])


def edited(name: str, **changes: Any) -> Callable[[Path], bytes]:
    def change(honest: Path) -> bytes:
        document = {**json.loads(members(honest)[name]), **changes}
        return exchanged(name, json.dumps(document).encode())(honest)

    return change


def symlink() -> zipfile.ZipInfo:
    row = zipfile.ZipInfo(bundle.PLAN)
    row.external_attr = (stat.S_IFLNK | 0o777) << 16
    return row


def linked(honest: Path) -> bytes:
    held = members(honest)
    return zipped([(symlink() if name == bundle.PLAN else name, content) for name, content in held.items()])


def encrypted(honest: Path) -> bytes:
    held = bytearray(honest.read_bytes())
    # the flags of the first member, in its own header and in the directory
    at = held.rindex(b"PK\x05\x06")
    directory = int.from_bytes(held[at + 16 : at + 20], "little")
    held[6] |= 1
    held[directory + 8] |= 1
    return bytes(held)


def lying(honest: Path) -> bytes:
    held = bytearray(honest.read_bytes())
    at = held.rindex(b"PK\x05\x06")
    directory = int.from_bytes(held[at + 16 : at + 20], "little")
    held[directory + 24 : directory + 28] = (7).to_bytes(4, "little")
    return bytes(held)


def flipped(honest: Path) -> bytes:
    held = bytearray(honest.read_bytes())
    held[len(held) // 2] ^= 0xFF
    return bytes(held)


BOMB = b"0" * (archive.MOST_BYTES + 1)
DAMAGED: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "no zip": (lambda _: b"PK nothing", "not a zip file"),
    "empty": (lambda _: b"", "not a zip file"),
    "cut short": (lambda honest: honest.read_bytes()[:-200], "not a zip file"),
    "a bit flipped": (flipped, "is damaged"),
    "no member": (lambda _: zipped([]), "no member bundle.json"),
    "no plan": (without(bundle.PLAN), "no member plan.json"),
    "another member": (added(("run.py", b"import os")), "a member 'run.py'"),
    "a path above": (renamed(bundle.PLAN, "../plan.json"), "a member '../plan.json'"),
    "a nested path": (renamed(bundle.PLAN, "a/plan.json"), "a member 'a/plan.json'"),
    "an absolute path": (renamed(bundle.PLAN, "/etc/plan.json"), "a member '/etc/plan.json'"),
    "a folder": (added(("more/", b"")), "a member 'more/'"),
    "a name that drives terminals": (added(("\x1b[2J", b"")), "a member '\\x1b[2J'"),
    "a member twice": (added((bundle.PLAN, b"{}")), "plan.json twice"),
    "a link": (linked, "plan.json is no regular file"),
    "encrypted": (encrypted, "bundle.json is encrypted"),
    "another compression": (lambda honest: zipped([*members(honest).items()], zipfile.ZIP_LZMA), "compressed in a way"),
    "a bomb": (exchanged(bundle.RUN, BOMB), "more than 67,108,864 bytes"),
    "a length that is not": (lying, "is damaged"),
    "no JSON": (exchanged(bundle.RUN, b"{"), "run.json: not JSON"),
    "JSON nested deep": (exchanged(bundle.PLAN, b"[" * 100_000), "plan.json: nested more than 64 deep"),
    "no UTF-8": (exchanged(bundle.PLAN, b"\xff"), "plan.json: not UTF-8"),
    "another kind": (exchanged(bundle.MANIFEST, b"[]"), "has no format_version"),
    "a newer format": (edited(bundle.MANIFEST, format_version=99), "upgrade wavecrest"),
    "an unknown field": (edited(bundle.MANIFEST, script="rm"), "script: Extra inputs"),
    "a source above": (edited(bundle.MANIFEST, sources={"../../etc/passwd": "0" * 64}), "no path below"),
    "an absolute source": (edited(bundle.MANIFEST, sources={"/etc/passwd": "0" * 64}), "no path below"),
    "no hash": (edited(bundle.MANIFEST, weights="secret"), "weights: String should match"),
    "a record edited": (edited(bundle.RUN, min_gain=0.0), "the content of run.json is not what bundle.json says"),
    "a plan edited": (edited(bundle.PLAN, min_gain=0.0), "the content of plan.json is not what bundle.json says"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_bundle_is_a_named_error(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make, message = DAMAGED[name]
    (tmp_path / "b.zip").write_bytes(make(honest))
    assert main(["verify", "--bundle", str(tmp_path / "b.zip")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and "\x1b" not in line
    with pytest.raises(BundleError):
        bundle.read(tmp_path / "b.zip")


def test_what_is_no_file_is_a_named_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("none", "no proof bundle at"), ("fifo", "no regular file"), (".", "a folder")):
        with pytest.raises(BundleError, match=message):
            bundle.read(tmp_path / name)


def test_a_folder_in_place_of_the_bundle_is_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        api.optimize(torch.nn.Linear(4, 4), torch.randn(2, 4), bundle=tmp_path)


def test_a_run_does_not_end_for_its_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OutputError("cannot write: No space left on device")

    monkeypatch.setattr(api, "write_bundle", full)
    loaded = workload.from_example(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4))
    found = api.run(loaded, api.Options(level=1, budget=0.1), bundle=tmp_path / "b.zip")
    assert found.record.result is not None and "No space left" in found.unwritten


def test_the_same_content_is_the_same_bytes(honest: Path, tmp_path: Path) -> None:
    archive.write(tmp_path / "b.zip", members(honest))
    assert (tmp_path / "b.zip").read_bytes() == honest.read_bytes()


def test_hashes_see_values_shapes_dtypes_and_names() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    others = (x + 1, x.reshape(3, 2), x.double(), x.to(torch.bfloat16), torch.tensor(float("nan")), -torch.zeros(2, 3))
    assert len({bundle.hash_tensor(tensor) for tensor in (x, *others)}) == 1 + len(others)
    assert bundle.hash_tensor(x.t().contiguous().t()) == bundle.hash_tensor(x)
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    b.load_state_dict(a.state_dict())
    assert bundle.hash_weights(a) == bundle.hash_weights(b) != bundle.hash_weights(torch.nn.Sequential(a))


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_hashes_see_the_integers_and_scales_of_quantized_tensors() -> None:
    x, zeros = torch.arange(-4.0, 4.0).reshape(2, 4), torch.zeros(2, dtype=torch.int64)
    one, channels = torch.quantize_per_tensor, torch.quantize_per_channel
    made = [
        one(x, 0.5, 0, torch.qint8), one(x + 0.5, 0.5, 0, torch.qint8), one(x, 0.25, 0, torch.qint8),
        one(x, 0.5, 1, torch.qint8), one(x, 0.5, 128, torch.quint8), one(x, 0.5, 0, torch.qint32),
        channels(x, torch.tensor([0.5, 0.5]), zeros, 0, torch.qint8),
        channels(x, torch.tensor([0.5, 0.25]), zeros, 0, torch.qint8),
        channels(x, torch.tensor([0.5, 0.5]), zeros + 1, 0, torch.qint8),
        # the same integers
        one(2 * x, 1.0, 0, torch.qint8), one(x, 0.5, 0, torch.qint8).int_repr(),
    ]  # fmt: skip
    assert len({bundle.hash_tensor(tensor) for tensor in made}) == len(made)
    assert all(bundle.hash_tensor(tensor.clone()) == bundle.hash_tensor(tensor) for tensor in made)
    for tensor in made:
        assert same_bits(tensor, tensor.clone())
        assert not any(same_bits(tensor, other) for other in made if other is not tensor)
    # packed weights by their parts
    layers = [torch.nn.Linear(64, 8, bias=False) for _ in range(2)]
    for layer, scale in zip(layers, (1.0, 2.0), strict=True):
        layer.weight = torch.nn.Parameter(ops.pack(torch.eye(8, 64) * scale, "int8"), requires_grad=False)
    assert bundle.hash_weights(layers[0]) != bundle.hash_weights(layers[1])
    assert bundle.hash_weights(copy.deepcopy(layers[0])) == bundle.hash_weights(layers[0])


@pytest.mark.gpu
def test_hashes_are_those_of_the_bits_wherever_they_lie() -> None:
    x = torch.randn(7, 300).to(torch.bfloat16)
    assert bundle.hash_tensor(x.cuda()) == bundle.hash_tensor(x)
    assert bundle.hash_tensor(x.cuda().t()) == bundle.hash_tensor(x.t())


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_confirmed(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import torch\n\ndef make(device):\n    torch.manual_seed(0)\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24))).eval().to(device)\n"
        "    return model, torch.randn(8, 64, device=device)\n"
    )
    spec = f"{tmp_path / 'work.py'}:make"
    loaded = workload.load(spec, device="cuda:0")
    options = api.Options(level=5, budget=120, steps=("capture",))
    assert not api.run(loaded, options, bundle=tmp_path / "b.zip").unwritten
    assert confirm.run(tmp_path / "b.zip").outcome == "confirmed"
    record = confirm.run(tmp_path / "b.zip", spec, device="cuda:0", seconds=1.0)
    assert record.outcome == "confirmed" and parts(record)["answers"] is True, record.reason
    # without a GPU the figures hold, and the speed is not compared
    elsewhere = confirm.run(tmp_path / "b.zip", spec, device="cpu")
    assert elsewhere.outcome == "other machine" and parts(elsewhere)["speed"] is None, elsewhere.reason
