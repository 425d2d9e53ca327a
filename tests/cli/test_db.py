"""`wavecrest db` as a user runs it, and what `wavecrest tune` puts into it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toy import ToyOp
from wavecrest import hardware, records
from wavecrest.cli import db, explain, main
from wavecrest.cli import tune as tune_cli
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.keys import dtype_name, m_bucket
from wavecrest.dispatch.tuned import Config, Database, Entry, Evidence, Overlay, Row, aiter_csv, database
from wavecrest.dispatch.tuned import untuned_calls as files
from wavecrest.dispatch.tuned.row import here
from wavecrest.errors import InvalidArgument
from wavecrest.measure import interleaved
from wavecrest.tune import session, untuned_calls

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence" / "nvidia-h200"
SHIPPED = database.DATA / "sm_90"
ROWS = sum(len(path.read_text().splitlines()) - 1 for path in SHIPPED.glob("*.csv"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    path = tmp_path / "user" / "tuned.sqlite"
    monkeypatch.setenv("WAVECREST_DATABASE", str(path))
    monkeypatch.setenv("COLUMNS", "80")
    return Overlay(path)


def gemm_row(rows: int = 16, us: float = 5.0, **given: Any) -> Entry:
    op = registry.get("gemm")
    parts = dict(zip(op.key_fields, op.key(op.study.inputs(rows, 64, 64, torch.bfloat16, "cpu")), strict=True))
    fields = lookup.fields_of(op)
    evidence_ = Evidence(**{"units": 304, "date": "2026-01-01T00:00:00+00:00"} | given)
    return Entry(
        "gfx942", "gemm", fields, Row(tuple(parts[name] for name in fields), "torch", None, us, us, "r", evidence_)
    )


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main.main(["db", *words]) == code
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_rows_with_their_evidence(user: Overlay, capsys: pytest.CaptureFixture[str]) -> None:
    user.write([gemm_row(origin="aiter (asm)")])
    assert main.main(["db", "show", "gemm"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[1:])) <= 80
    shipped = len(Database(arch="sm_90").rows("gemm", lookup.fields_of(registry.get("gemm"))))
    assert shipped > 100 and f"1 rows of the user's, {shipped} of the package's" in text and str(user.path) in text
    for part in ("NVIDIA H200", "2026-11-21", "error", "0272c17", "aiter (asm)", "gfx942", "rows=16"):
        assert part in text, part
    assert "0 rows of the user's, 11 of the package's" in said(capsys, "show", "rope")
    assert "0 rows of the user's, 0 of the package's" in said(capsys, "show", "--arch", "gfx950")
    assert "no op named 'nothing'" in said(capsys, "show", "nothing", code=1)
    assert main.main(["db", "show", "rope", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    row = shown["rows"][0]
    assert row["place"] == "package" and row["key"]["heads"] == 32 and row["default_us"] == 5.408
    assert row["versions"] == "torch 2.11.0+cu130; triton 3.6.0; cuda 13.0" and row["units"] == 132


def test_there_and_back(user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in sorted(SHIPPED.glob("*.csv"))]
    assert f"{ROWS} rows added" in said(capsys, "import", *paths)
    assert f"{2 * ROWS} rows are well" in said(capsys, "check")
    assert f"{ROWS} rows written" in said(capsys, "export", str(tmp_path / "out"))
    for path in SHIPPED.glob("*.csv"):
        assert (tmp_path / "out" / "sm_90" / path.name).read_bytes() == path.read_bytes()
    # the same rows from the record that they come from
    other = tmp_path / "other.sqlite"
    shutil.copy(user.path, other)
    user.path.unlink()
    assert "12 rows added" in said(capsys, "import", str(EVIDENCE / "2026-11-22_tune_mla_decode.jsonl.gz"))
    assert {entry.row for entry in user.entries()} == {
        entry.row for entry in Overlay(other).entries() if entry.op == "mla_decode"
    }
    # a database of another machine, whose rows are as new
    assert f"{ROWS} of {ROWS} rows taken" in said(capsys, "merge", str(other))
    assert len(user.entries()) == ROWS
    assert "no database at" in said(capsys, "merge", str(tmp_path / "gone.sqlite"), code=1)
    assert "1 rows written" in said(capsys, "export", str(tmp_path / "one"), "--op", "rope", "--arch", "sm_90").replace(
        "11 rows", "1 rows"
    )
    # one row a key in a table
    user.write(
        [
            replace(entry, row=replace(entry.row, evidence=replace(entry.row.evidence, device="b", date="2027")))
            for entry in user.entries(op="rope")
        ]
    )
    text = said(capsys, "export", str(tmp_path / "two"), "--op", "rope")
    assert "11 rows written" in text and "11 older rows of the same keys" in text
    assert "NVIDIA H200" not in (tmp_path / "two" / "sm_90" / "rope.csv").read_text()


def test_other_programs_files(user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = ",".join(aiter_csv.COLUMNS)
    good = "gfx942,304,16,6144,4096,False,torch.bfloat16,torch.bfloat16,False,False,asm,7,2,50.5,k,0.01,1.0,1.0"
    path = tmp_path / "bf16_tuned_gemm.csv"
    path.write_text(f"{header}\n{good}\n{good.replace('50.5', '0')}\n")
    text = said(capsys, "import", str(path))
    assert "1 rows added" in text and "left out: has a placeholder for a time: bf16_tuned_gemm.csv, line 3" in text
    before = user.entries()
    # a bad line anywhere, and nothing of any of the files is taken
    bad = tmp_path / "bad.csv"
    bad.write_text(f"{header}\n{good.replace('16,', '32,', 1)}\n{good.replace('50.5', 'fast')}\n")
    other = tmp_path / "other.csv"
    other.write_text(f"{header}\n{good.replace('304,16', '304,64')}\n")
    text = said(capsys, "import", str(other), str(bad), code=1)
    assert "bad.csv, line 3" in text and user.entries() == before
    out = tmp_path / "new" / "mine.csv"
    assert "1 rows written" in said(capsys, "export", str(out), "--format", "aiter-bf16", "--arch", "gfx942")
    (line,) = out.read_text().splitlines()[1:]
    assert line.startswith("gfx942,304,16,6144,4096,False,torch.bfloat16") and ",asm,7,2,50.5,k,0.01," in line
    assert "give --arch" in said(capsys, "export", str(out), "--format", "aiter-bf16", code=1)
    assert "--format takes csv" in said(capsys, "export", str(out), "--format", "xml", "--arch", "gfx942", code=1)
    for words, message in (
        (["import", str(tmp_path / "gone.csv")], "cannot read"),
        (["import", str(tmp_path)], "cannot read"),
        (["import", str(shutil.copy(SHIPPED / "rope.csv", tmp_path / "rope.csv"))], "give --arch"),
        (["import", str(shutil.copy(SHIPPED / "rope.csv", tmp_path / "r.csv")), "--arch", "sm_90"], "no op named 'r'"),
    ):
        assert message in said(capsys, *words, code=1)
    assert user.entries() == before
    assert "11 rows added" in said(capsys, "import", str(tmp_path / "r.csv"), "--arch", "sm_90", "--op", "rope")


def test_a_record_of_a_cpu_gives_no_rows(user: Overlay, tmp_path: Path) -> None:
    record = records.load_as(EVIDENCE / "2026-11-21_tune_rope.jsonl.gz", records.TuneRecord)
    record.header.device["kind"] = "cpu"
    records.save(record, tmp_path / "a.json")
    with pytest.raises(InvalidArgument, match="was measured on a CPU"):
        db.run_import([tmp_path / "a.json"])


def test_check_names_what_dispatch_cannot_use(user: Overlay, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{ROWS} rows are well" in said(capsys, "check")
    good = gemm_row()
    user.write([good, replace(good, op="gone_op"), replace(good, fields=tuple(reversed(good.fields)))])
    text = said(capsys, "check")
    assert f"{ROWS + 3} rows are well" in text and "there is no such op here" in text and "have other parts now" in text
    user.write([replace(good, row=replace(good.row, backend="gone", evidence=replace(good.row.evidence, units=1)))])
    assert "gone, which gemm does not have" in said(capsys, "check", code=1)
    user.path.unlink()
    user.write([replace(good, row=replace(good.row, backend="triton", config=Config(BLOCK_Q=1)))])
    assert "triton, which does not know BLOCK_Q=1" in said(capsys, "check", code=1)
    with sqlite3.connect(user.path) as connection:
        connection.execute("UPDATE rows SET us = '7'")
    connection.close()
    assert "checksum is another" in said(capsys, "check", code=1)
    user.path.write_bytes(b"none" * 5000)
    for words in (["show"], ["check"], ["import", str(SHIPPED / "rope.csv")], ["merge", str(user.path)]):
        assert str(user.path) in said(capsys, *words, code=1)
    other = Overlay(user.path.parent / "other.sqlite")
    assert "no database at" in said(capsys, "check", str(other.path), code=1)
    other.prepare()
    assert "rows are well" in said(capsys, "check", str(other.path))


def test_without_a_users_database(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = said(capsys, "show", "rope")
    assert "user database: off" in text and "11 of the package's" in text
    for words in (
        ["export", str(tmp_path)],
        ["import", str(SHIPPED / "rope.csv")],
        ["merge", str(SHIPPED / "rope.csv")],
    ):
        assert "WAVECREST_DATABASE is off" in said(capsys, *words, code=1)


def test_leave_one_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "leave-one-out", str(EVIDENCE / "2026-11-21_tune_rope.jsonl.gz"))
    assert "rope 11" in text and "geometric mean" in text
    assert "not of tune" in said(capsys, "leave-one-out", str(EVIDENCE / "2026-11-22_bench_rope.jsonl.gz"), code=1)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyOp]:
    """y = 2x with a kernel of two configurations, its second the fastest by made-up times, on a stand-in for a GPU."""
    ran: list[float] = []

    def kernel(x: torch.Tensor, *, config: Config) -> torch.Tensor:
        ran.append(30.0 / config["BLOCK"])
        return 2 * x

    def native(x: torch.Tensor) -> torch.Tensor:
        ran.append(40.0)
        return x + x

    made = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (m_bucket(x.shape[0]), x.shape[1], dtype_name(x), "cuda", False),
        key_fields=("rows", "columns", "dtype", "device", "grad"),
        key_sizes=("rows", "columns"),
        inputs=lambda M, N, dtype, device: (torch.ones(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=1),
    )
    made.native("torch", native, priority=10)
    made.kernel("kernel", kernel, priority=5, space=lambda key, arch: [Config(BLOCK=2)])

    def measured(works: Any, *, min_rounds: int, **_options: Any) -> interleaved.Interleaved:
        for work in works:
            work()
        series = [tuple(us / 1e3 * (1 + place / 1e6) for place in range(min_rounds)) for us in ran[-len(works) :]]
        return interleaved.Interleaved(tuple(series), "made up")

    monkeypatch.setattr(interleaved, "measure", measured)
    # what is looked up once a process is not to be the stand-in's
    here()
    device = replace(hardware.cpu(), arch="sm_90", name="stand-in", compute_units=77)
    monkeypatch.setattr(hardware, "detect", lambda name=None: _Gpu(device))
    yield made
    del registry.STATE.ops["double"]


class _Gpu:
    """A device that says it is a GPU when a command asks where rows go, and then is a CPU."""

    def __init__(self, device: hardware.Device) -> None:
        self._device, self._asked = device, 0

    def __getattr__(self, name: str) -> Any:
        if name == "kind" and self._asked == 0:
            self._asked += 1
            return "cuda"
        return getattr(self._device, name)


def untuned(path: Path, *shapes: tuple[int, int], op: str = "double", arch: str = "sm_90", **more: Any) -> Path:
    lines = [
        {"op": op, "arch": arch, "key": {"rows": rows, "columns": columns, "dtype": "float32"} | more,
         "backend": "torch", "source": "default"}
        for rows, columns in shapes
    ]  # fmt: skip
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_misses_are_tuned_and_no_misses_any_more(
    op: ToyOp, user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "untuned_calls.jsonl"
    with registry.measured_in(Database(tmp_path / "no", "sm_90", user)):
        registry.record_misses(path)
        try:
            for rows in (4, 4, 16):
                op(torch.ones(rows, 8))
        finally:
            registry.record_misses(None)
        assert len(files.read(path)) == 2
        assert main.main(["tune", str(path), "--executor", "here", "--out", str(tmp_path / "a.json")]) == 0
        # at once, without a restart: tune forgets what was read
        registry.strict("error")
        decision = op.decide(op.of(torch.ones(4, 8)))
        assert (decision.backend, decision.config, decision.source) == ("kernel", Config(BLOCK=2), "exact")
        assert decision.reason.startswith("measured 15.0 µs, native 40.0 µs (a.json@")
    rows = user.entries()
    assert [entry.row.key for entry in rows] == [(16, 8, "float32"), (4, 8, "float32")]
    assert [entry.row.evidence.default_us for entry in rows] == [30.001] * 2, "the median of the samples made up"
    kept = rows[0].row.evidence
    assert (kept.device, kept.units, kept.error) == ("stand-in", 77, 0.0) and kept.date and "torch " in kept.versions
    record = records.load_as(tmp_path / "a.json", records.TuneRecord)
    assert record.suite == "misses" and len(record.keys) == 2
    assert "rows=4 columns=8 dtype=float32" in [key.case for key in record.keys]


def test_what_of_misses_cannot_be_tuned_is_said(
    op: ToyOp, user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = untuned(tmp_path / "m.jsonl", (4, 8))
    untuned(path, (4, 16), arch="gfx942")
    untuned(path, (0, 8), (3, 0))
    untuned(path, (32, 8), kind="new")
    (record,) = tune_cli.run_file(path, session.Settings(), executor="here")
    reasons = record.left
    assert [key.case for key in record.keys] == ["rows=4 columns=8 dtype=float32"]
    assert reasons["rows=4 columns=16 dtype=float32"] == "was missed on gfx942, and this is sm_90"
    assert "inside torch.compile, whose rows are not known" in reasons["rows=0 columns=8 dtype=float32"]
    assert "double makes no call from this key" in reasons["rows=3 columns=0 dtype=float32"]
    assert "its key has the parts rows, columns, dtype, kind" in reasons["rows=32 columns=8 dtype=float32 kind=new"]
    assert len(user.entries()) == 1 and user.entries()[0].row.record == session.NO_RECORD
    none = untuned(tmp_path / "none.jsonl", (4, 16), arch="gfx942")
    for words, message in (
        ([str(none)], "has nothing to tune here: was missed on gfx942"),
        ([str(tmp_path / "gone.jsonl")], "no file of misses"),
        ([str(path), "--table", "double.csv"], "a table's rows name the record they come from"),
        ([str(untuned(tmp_path / "op.jsonl", (4, 8), op="gone"))], "no op named 'gone'"),
    ):
        assert main.main(["tune", *words]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_key_that_an_op_makes_otherwise_is_no_case(op: ToyOp) -> None:
    op.restudy(call_of_key=lambda parts, device: (torch.ones(int(parts["rows"]), 9),))
    one = files.UntunedCall("double", "sm_90", {"rows": 4, "columns": 8, "dtype": "float32"}, "torch", "default")
    found, left = untuned_calls.cases(op, [one], "sm_90", "cpu")
    assert not found and list(left.values()) == ["double makes no call from this key: columns would be other"]
    op.restudy(call_of_key=lambda parts, device: (parts["nothing"],))
    assert "has no such key: KeyError" in next(iter(untuned_calls.cases(op, [one], "sm_90", "cpu")[1].values()))


SMALL = {"flash_attention": (2, 4, 9, 16), "flash_decoding": (2, 4, 9, 16), "gemm": (3, 24, 40), "rope": (5, 256)}


@pytest.mark.parametrize("name", [*SMALL, "rms_norm", "silu_and_mul", "quantize_int8"])
def test_calls_are_made_from_keys(name: str) -> None:
    """For every shipped key, and an example: the call made from the key has that key, and the example's call runs."""
    found = registry.get(name)
    fields = lookup.fields_of(found)
    keys = [dict(zip(fields, key, strict=True)) for key in Database(arch="sm_90").rows(name, fields)]
    example = found.study.inputs(*SMALL.get(name, (4, 64)), torch.bfloat16, "cpu")
    made = dict(zip(found.key_fields, found.key(example), strict=True))
    keys.append({field: made[field] for field in fields})
    cases, left = untuned_calls.cases(
        found, [files.UntunedCall(name, "sm_90", key, "", "") for key in keys], "sm_90", "cpu"
    )
    assert not left and len(cases) == len(keys)
    call = cases[-1].make()
    found.check(call)
    assert dict(zip(found.key_fields, found.key(call), strict=True)) == made
    assert found.reference(call) is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemm", {"batch": 4}), ("gemm", {"form": "int4 zeros"}), ("gemm", {"a": "words"}), ("gemm", {"rows": 0}),
        ("flash_attention", {"bias": "float32"}), ("flash_attention", {"dtype": "int8 p"}),
        ("flash_attention", {"packed": True}), ("flash_decoding", {"page": 64}), ("flash_decoding", {"alibi": True}),
        ("flash_decoding", {"access": "any append"}), ("rope", {"tokens": 0}), ("rope", {"leading": 3}),
    ],
)  # fmt: skip
def test_keys_that_no_call_is_made_from_are_said(name: str, change: dict[str, Any]) -> None:
    found = registry.get(name)
    fields = lookup.fields_of(found)
    example = found.study.inputs(*SMALL[name], torch.bfloat16, "cpu")
    made = dict(zip(found.key_fields, found.key(example), strict=True))
    key = {field: made[field] for field in fields} | change
    cases, left = untuned_calls.cases(found, [files.UntunedCall(name, "sm_90", key, "", "")], "sm_90", "cpu")
    assert not cases and next(iter(left.values())).startswith(f"{name} ")


def test_where_tune_keeps_rows(
    op: ToyOp, user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ["tune", "double", "--executor", "here", "--suite", "quick", "--matching", "7x1000"]
    table = ["--table", str(tmp_path / "sm_90" / "double.csv"), "--out", str(tmp_path / "a.json")]
    for words, rows in (
        (["--no-keep"], 0), (table, 0), ([*table, "--keep"], 1), ([], 1),
    ):  # fmt: skip
        assert main.main([*quick, *words]) == 0
        assert len(user.entries()) == rows, words
        user.path.unlink(missing_ok=True)
    capsys.readouterr()
    monkeypatch.setattr(hardware, "detect", lambda name=None: hardware.cpu())
    assert main.main([*quick, "--keep"]) == 1
    assert "--keep is for a GPU" in capsys.readouterr().err
    assert main.main(quick) == 0 and not user.path.exists()


def test_a_damaged_database_is_found_before_anything_is_measured(
    op: ToyOp, user: Overlay, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user.path.parent.mkdir(parents=True)
    user.path.write_bytes(b"none" * 5000)
    monkeypatch.setattr(session, "_plan", lambda *_a: pytest.fail("measures"))
    assert main.main(["tune", "double", "--suite", "quick"]) == 1
    assert str(user.path) in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("WAVECREST_DATABASE", "off")
    assert main.main(["tune", "double", "--suite", "quick", "--keep"]) == 1
    assert "WAVECREST_DATABASE is off" in capsys.readouterr().err


def test_explain_says_what_rows_run_by_size(op: ToyOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda name=None: replace(hardware.cpu(), arch="sm_90"))
    found = Database(tmp_path, "sm_90")
    fields = lookup.fields_of(op)
    runs = {1: "kernel", 8: "kernel", 64: "kernel", 128: "torch", 4096: "torch"}
    rows = [
        Row((size, 64, "float32"), name, Config(BLOCK=2) if name == "kernel" else None, 1.0, 1.0, "a.json")
        for size, name in runs.items()
    ]
    database.write(found.path("double"), fields, [*rows, replace(rows[0], key=(2, 32, "float32"))])
    with registry.measured_in(found):
        record = explain.run("double", ["M=16", "N=64", "dtype=float32"], "cpu")
        assert record.measured == "rows 1 to 64: kernel; 128 to 4096: torch"
        assert explain.run("double", ["M=16", "N=32", "dtype=float32"], "cpu").measured == ""
        assert explain.run("double", ["M=16", "N=48", "dtype=float32"], "cpu").measured == ""


def test_the_table_of_sources(op: ToyOp, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wavecrest.cli import _shared

    with registry.measured_in(Database(tmp_path, "sm_90")), registry.coverage() as seen:
        for rows in (4, 4, 16):
            op(torch.ones(rows, 8))
    _shared.print_coverage([row for row in seen.by_op() if row.op == "double"])
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if "exact" in line)
    (line,) = [line for line in lines if line.split()[:1] == ["double"]]
    assert head.split() == ["op", "calls", "exact", "near", "model", "default"]
    assert line.split() == ["double", "3", "–", "–", "–", "2"]
    _shared.print_coverage([])
    assert capsys.readouterr().out == ""


# rows to share


def tuned_row(tmp_path: Path, rows: int = 16, **given: Any) -> Entry:
    """A row as `wavecrest tune` keeps it, of a user whose names are everywhere that a name can be."""
    measured = {
        "device": "AMD Instinct MI300X", "versions": "torch 2.9.1+rocm7.1; triton 3.6.0; hip 7.1.2", "error": 1e-3,
        "date": "2026-11-26T23:59:01+00:00", "commit": "0272c17+changes", "default_us": 7.0,
    }  # fmt: skip
    made = gemm_row(rows, **measured | given)
    return replace(made, row=replace(made.row, record=f"{tmp_path}/alice@secret-host/tune.jsonl@0123456789ab"))


def test_shared_rows_hold_nothing_of_the_user(
    user: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, backends = tuned_row(tmp_path), registry.get("gemm").backends
    monkeypatch.setitem(backends, "alices_own", replace(backends["torch"], name="alices_own", user=True))
    private = [
        tuned_row(tmp_path, 32, device="alice's /dev/box"),
        tuned_row(tmp_path, 64, versions="torch 2.9.1; triton /home/alice/triton"),
        tuned_row(tmp_path, 128, origin="alice"),
        replace(good, op="alices_op"),
        replace(good, row=replace(good.row, backend="alices_gone", evidence=replace(good.row.evidence, units=80))),
        replace(good, row=replace(good.row, backend="alices_own", evidence=replace(good.row.evidence, units=81))),
    ]
    fork = tuned_row(tmp_path, 256, commit="alice's fork", detail='{"path": "/home/alice"}')
    user.write([good, fork, *private])
    path = tmp_path / "out" / "rows.json"
    text = said(capsys, "export", "--share", str(path))
    assert "2 of gemm" in text and "AMD Instinct MI300X (2)" in text and "2026-11-26 (2)" in text
    assert "0272c17+changes (1); not known (1)" in text
    for reason in (
        "may be anything (device)", "may be anything (versions)", "imported from alice", "no op of wavecrest",
        "kernel of a user",
    ):  # fmt: skip
        assert reason in text, reason
    written = path.read_text()
    for name in ("alice", "secret", "home", "tmp", "23:59", "detail", str(tmp_path)):
        assert name not in written, name
    # every text that it has, beside names of fields and of the key's parts
    document = json.loads(written)
    assert set(document) == {"kind", "format_version", "rows"} and len(document["rows"]) == 2
    assert document["rows"][0]["record"] == "shared@0123456789ab"


def test_shared_rows_come_back_as_measured_rows(
    user: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = [
        Entry("sm_90", path.stem, fields, row)
        for path in SHIPPED.glob("*.csv")
        for fields in [lookup.fields_of(registry.get(path.stem))]
        for row in database.read(path, fields).values()
    ]
    user.write(shipped)
    path = tmp_path / "rows.json"
    assert "left out" not in said(capsys, "export", "--share", str(path))
    # another machine
    other = Overlay(tmp_path / "other.sqlite")
    monkeypatch.setenv("WAVECREST_DATABASE", str(other.path))
    assert f"{ROWS} rows added" in said(capsys, "import", str(path))
    assert f"{2 * ROWS} rows are well" in said(capsys, "check")

    def without(entry: Entry) -> tuple[Any, ...]:
        evidence = replace(entry.row.evidence, date=entry.row.evidence.date[:10])
        return entry.arch, entry.op, entry.fields, replace(entry.row, record="", evidence=evidence)

    assert sorted(map(without, other.entries()), key=repr) == sorted(map(without, shipped), key=repr)
    # its own rows, which are of a later hour, stay
    monkeypatch.setenv("WAVECREST_DATABASE", str(user.path))
    assert "0 rows added" in said(capsys, "import", str(path))
    assert sorted(user.entries(), key=repr) == sorted(shipped, key=repr)
    assert "`wavecrest db import` takes" in said(capsys, "merge", str(path), code=1)
    assert "leave --format out" in said(capsys, "export", "--share", str(path), "--format", "aiter-bf16", code=1)


def test_a_shared_file_is_taken_whole_or_not_at_all(
    user: Overlay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no row to share" in said(capsys, "export", "--share", str(tmp_path / "a.json"), code=1)
    user.write([tuned_row(tmp_path), tuned_row(tmp_path, 32)])
    path = tmp_path / "rows.json"
    said(capsys, "export", "--share", str(path))
    document = json.loads(path.read_text())
    user.path.unlink()

    def imported(*words: str, code: int = 0, version: int = 1, **changes: Any) -> str:
        changed = {
            **document,
            "format_version": version,
            "rows": [document["rows"][0], {**document["rows"][1], **changes}],
        }
        path.write_text(json.dumps(changed))
        return said(capsys, "import", str(path), *words, code=code)

    for changes, reason in (
        ({"us": 0}, "us: Input should be"), ({"us": float("nan")}, "NaN"), ({"device": "a\u001b[2J"}, "device"),
        ({"record": "/etc/passwd"}, "record"), ({"host": "a"}, "host: Extra"), ({"units": "304"}, "units"),
        ({"config": {"num_warps": 1.5}}, "num_warps"), ({"backend": "a; b"}, "backend"),
        ({"date": "2026-11-26T10:00:00"}, "date"), ({"key": {"rows": 1.5}}, "key"),
    ):  # fmt: skip
        assert reason in imported(code=1, **changes), reason
        assert user.entries() == []
    assert "upgrade wavecrest" in imported(code=1, version=2)
    # rows that nothing here can use
    for changes, reason in (
        ({"arch": "gfx000"}, "gfx000, which is unknown here"), ({"op": "gone"}, "no op gone"),
        ({"backend": "gone"}, "which gemm does not have"), ({"config": {"BLOCK_M": 1}}, "takes no configuration"),
        ({"key": {"rows": 1}}, "other parts"),
    ):  # fmt: skip
        text = imported(**changes)
        assert "1 rows added" in text and reason in text, reason
        user.path.unlink()
    assert "0 rows added" in imported("--arch", "gfx950")
