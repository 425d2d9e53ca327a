"""Keys tuned in real child processes, with planted liars; workers on GPUs; a tuner that dies, its children with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wavecrest import hardware, records
from wavecrest.bench import sizes
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EnvironmentProblem, InvalidArgument
from wavecrest.tune import child, pool, session, trial, workers
from wavecrest.tune.candidates import Candidate, Field

pytestmark = pytest.mark.usefixtures("standins")

# an architecture is known, so that spaces are asked, and everything runs on the CPU
DEVICE = replace(hardware.cpu(), arch="sm_90")
MODULES = ("tests.unit.tune_standins",)
ROOT = Path(__file__).parents[2]
LIARS = ("wrong", "tail", "nan", "crash", "exit", "late", "noisy")


def tune(targets: session.Targets | None = None, *, count: int = 1, **settings: Any) -> records.TuneRecord:
    made = session.Settings(modules=settings.pop("modules", MODULES), seconds=0.01, **settings)
    starts = workers.local(DEVICE, count, one=False)
    return session.tune("planted", DEVICE, made, targets, starts=starts)


@pytest.fixture(scope="module")
def liars(standins: None, tmp_path_factory: pytest.TempPathFactory) -> records.TuneRecord:
    path = tmp_path_factory.mktemp("liars") / "a.json"
    # nothing here is ever silent: a busy machine that stalls for seconds blames nobody
    record = tune(session.Targets(path), backends=("kernel", *LIARS), matching="rows 64", timeout=120.0)
    assert records.load_as(path, records.TuneRecord) == record
    return record


VERDICTS = {
    "wrong": ("wrong", "result 0 has error"),
    "tail": ("wrong", "result 0 has error"),
    "nan": ("wrong", "result 0 has error"),
    "crash": ("failed", "ended its process with SIGSEGV"),
    "exit": ("failed", "ended its process with code 3: terminate called after throwing"),
    "late": ("failed", "ended its process with SIGABRT"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_liar_gets_its_verdict(liars: records.TuneRecord, name: str) -> None:
    (key,) = liars.keys
    (found,) = [one for one in key.candidates if one.backend == name]
    status, reason = VERDICTS[name]
    assert found.status == status and found.reason.startswith(reason)
    assert found.ms is None and not found.samples


def test_the_honest_are_timed_and_the_fastest_wins(liars: records.TuneRecord) -> None:
    (key,) = liars.keys
    assert (key.backend, key.config) == ("kernel", {"BLOCK": 3}) and key.native_us is not None and key.us is not None
    # what the calls take on the simulated clock: 1 and 4 ms
    assert key.us == pytest.approx(1000) and key.native_us == pytest.approx(4000)
    assert key.ci is not None and key.ci.low == pytest.approx(4)
    assert liars.children == 1 and not liars.left and not liars.unfinished
    # crash and exit once, late twice: the second time it is run alone
    assert len(liars.endings) == 4 and all(text.startswith("rows 64: ") for text in liars.endings)


def test_one_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    record = tune(session.Targets(tmp_path / "a.json"), backends=("kernel", "hang"), matching="rows 64", timeout=8.0)
    (key,) = record.keys
    found = {one.backend: (one.status, one.reason) for one in key.candidates}
    assert found["hang"] == ("failed", "did not come to an end within 8 s") and key.backend == "kernel"
    assert record.endings == ["rows 64: did not come to an end within 8 s"] and not record.unfinished


def test_a_noisy_tie_keeps_native() -> None:
    made = session.Settings(backends=("noisy",), matching="rows 64", seconds=0.01)
    clock = sys.modules["tests.unit.tune_standins"].CLOCK
    (key,) = session.tune("planted", DEVICE, made, now=clock).keys
    assert key.backend == "torch" and {one.backend: one.status for one in key.candidates} == {
        "torch": "won", "noisy": "timed",
    }  # fmt: skip


def test_two_children_do_each_key_once_in_the_order_of_the_cases(tmp_path: Path) -> None:
    record = tune(session.Targets(tmp_path / "a.json"), backends=("kernel",), count=2)
    assert [key.case for key in record.keys] == ["rows 4", "rows 16", "rows 64"]
    assert record.children == 2 and all(key.backend == "kernel" for key in record.keys) and not record.endings


def test_resuming_does_not_run_again_what_ended_a_child(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    names = ("kernel", "crash")
    real, seen = records.save, []

    def stop(record: records.TuneRecord, where: Path) -> None:
        real(record, where)
        seen.append(record.unfinished)
        if record.unfinished:
            raise KeyboardInterrupt

    records.save = stop  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            tune(session.Targets(path), backends=names, matching="rows 64")
    finally:
        records.save = real
    record = records.load_as(path, records.TuneRecord)
    assert record.unfinished == {"rows 64": {"crash": "ended its process with SIGSEGV"}} and not record.keys
    made = session.Settings(backends=names, matching="rows 64", seconds=0.01)
    # here, where a crash would be the end of the tests
    clock = sys.modules["tests.unit.tune_standins"].CLOCK
    (key,) = session.tune("planted", DEVICE, made, session.Targets(path), resume=True, now=clock).keys
    found = {one.backend: (one.status, one.reason) for one in key.candidates if one.backend == "crash"}
    assert found == {"crash": ("failed", "ended its process with SIGSEGV")} and key.backend == "kernel"


def test_a_module_that_cannot_be_imported_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a second try would end as the first one does: test_tune_pool.py counts them
    monkeypatch.setattr(pool, "MOST_STARTS", 1)
    message = "no process is left to tune in: a child ended its process with code 1: ModuleNotFoundError: No module"
    with pytest.raises(EnvironmentProblem, match=message):
        tune(session.Targets(tmp_path / "a.json"), modules=("no_such_module",))
    record = records.load_as(tmp_path / "a.json", records.TuneRecord)
    assert "no_such_module" in record.problem and len(record.left) == 3


def test_a_module_that_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # before the child's own first line
    (tmp_path / "sitecustomize.py").write_text("print('welcome', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    worker = workers.Child()
    assert worker.next(60)["reason"] == "gave an invalid answer: welcome"
    worker.stop()


def test_children_end_with_a_tuner_that_is_killed(tmp_path: Path) -> None:
    code = f"""
        import tests.unit.tune_standins
        from wavecrest import hardware
        from wavecrest.tune import session, workers
        made = session.Settings(backends=("kernel", "hang"), modules={MODULES!r}, seconds=0.01, timeout=600.0)
        class Watched(workers.Child):
            def next(self, timeout):
                said = super().next(timeout)
                # PyTorch, the default, then the one that hangs
                if said.get("phase") == "first" and said["who"] == [2]:
                    print(self.pid, flush=True)
                return said
        session.tune("planted", hardware.cpu(), made, starts=[Watched])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )  # fmt: skip
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    # by now it is in the call that does not end, and says nothing that could fail
    time.sleep(0.5)
    assert _runs(pid)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    end = time.perf_counter() + 20
    while _runs(pid) and time.perf_counter() < end:
        time.sleep(0.1)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- what goes to a child


def planted_key(rows: int) -> tuple[Any, ...]:
    op = registry.get("planted")
    return op.key(op.call_of((torch.ones(rows, 8),)))


def test_a_job_arrives_as_it_was() -> None:
    field = Field((Candidate("torch", role="native"), Candidate("kernel", Config(BLOCK=3))), (("aiter", "not here"),))
    op = registry.get("planted")
    for source in ({"suite": "shared"}, {"sizes": [64, 8], "dtype": "float32"}):
        assert op.study.bench_cases is not None and "rows 64" in op.study.bench_cases("shared", "cpu")
        one = trial.Trial(
            session.suites.Case("rows 64", tuple), planted_key(64), field, {1: "no"}, {0: "crash"}, True, source
        )
        again = child.trial_of(json.loads(json.dumps(child.job(op, one))), op, "cpu")
        assert (again.key, again.field, again.refused, again.ended, again.alone, again.source) == (
            one.key, field, {1: "no"}, {0: "crash"}, True, source,
        )  # fmt: skip
        assert op.key(again.case.make()) == one.key


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"suite": "shared"}, "suite shared of planted has no case 'rows 5' in this process"),
        ({"sizes": [4, 8], "dtype": "float32"}, "has the key .* in this process, not .*same wavecrest"),
    ],
)
def test_a_case_of_another_version_is_refused(source: dict[str, Any], message: str) -> None:
    op = registry.get("planted")
    one = trial.Trial(
        session.suites.Case("rows 5", tuple), planted_key(5), Field((), ()), source=source
    )  # fmt: skip
    said: list[dict[str, Any]] = []
    reply = child.answer(child.job(op, one), hardware.cpu(), 0.01, said.append)
    assert reply["event"] == "problem" and said == [{"event": "step", "phase": "make", "who": (), "seconds": 0.0}]
    with pytest.raises(InvalidArgument, match=message):
        child.trial_of(child.job(op, one), op, "cpu")


def test_a_case_that_is_made_from_its_key() -> None:
    op = registry.get("gemm")
    call = sizes.call(op, (16, 32, 64), "bfloat16", "cpu")
    one = trial.Trial(session.suites.Case("any", tuple), op.key(call), Field((), ()))
    assert op.key(child.trial_of(child.job(op, one), op, "cpu").case.make()) == one.key


# --- workers on GPUs


@pytest.mark.parametrize(
    ("vendor", "seen", "index", "changes"),
    [
        ("nvidia", {}, 1, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": None}),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "2, 5"}, 1, {"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": None}),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 0,
         {"CUDA_VISIBLE_DEVICES": "GPU-a", "HIP_VISIBLE_DEVICES": None}),
        ("amd", {}, 3, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": None}),
        ("amd", {"HIP_VISIBLE_DEVICES": "4,6"}, 1, {"HIP_VISIBLE_DEVICES": "6", "CUDA_VISIBLE_DEVICES": None}),
        ("amd", {"CUDA_VISIBLE_DEVICES": "4,6"}, 0, {"HIP_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": None}),
        ("amd", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "7"}, 0,
         {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": None}),
    ],
)  # fmt: skip
def test_a_child_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, vendor: str, seen: dict[str, str], index: int, changes: dict[str, str | None]
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    assert workers.visible(index, vendor) == changes


def test_a_worker_for_each_gpu_like_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(workers, "Child", lambda changes=None: made.append(changes))
    monkeypatch.setattr(workers, "like", lambda device: [0, 2])
    gpu = replace(hardware.cpu(), kind="cuda", arch="gfx942", index=2)
    for count, one, names in (
        (None, False, ["0", "2"]),
        (1, False, ["0"]),
        (None, True, ["2"]),
        (2, False, ["0", "2"]),
    ):
        made.clear()
        for start in workers.local(gpu, count, one=one):
            start()
        assert [changes["HIP_VISIBLE_DEVICES"] for changes in made] == names
    with pytest.raises(InvalidArgument, match="--children 3: there are 2 GPUs to tune on"):
        workers.local(gpu, 3, one=False)
    with pytest.raises(InvalidArgument, match="--children 2: there are 1 GPUs"):
        workers.local(gpu, 2, one=True)
    assert (
        len(workers.local(hardware.cpu(), None, one=False)) == 1
        and len(workers.local(hardware.cpu(), 4, one=False)) == 4
    )
