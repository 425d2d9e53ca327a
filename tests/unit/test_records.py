"""Result files: read back as written, refused with one clear line otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from wavecrest import hardware, records
from wavecrest.errors import OutputError, RecordError
from wavecrest.measure import timing
from wavecrest.records import files, provenance


def _bench() -> records.BenchRecord:
    samples = tuple(10.0 + index / 100 for index in range(30))
    measured = timing.Measurement(samples, samples, 50.0, "host wall", timing.bootstrap_median(samples))
    bucket = records.BucketBench(
        bucket="b1", measurement=measured, shapes={"args[0]": "1x8 float32"}, peak_memory_bytes=None
    )
    return records.BenchRecord(
        header=provenance.header(hardware.cpu()), workload="m", dtype="float32", parameters=8, buckets=[bucket]
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    records.save(_bench(), path)
    return path


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_read_back_as_written(written: Path) -> None:
    record = records.load_as(written, records.BenchRecord)
    assert record.buckets == _bench().buckets
    assert record.buckets[0].measurement.median == pytest.approx(10.145)
    assert record.header.versions.torch is not None and record.header.evidence == "measured"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no result file at .*gone\.json"):
        records.load(tmp_path / "gone.json")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99], ids=["empty", "third", "last-byte"])
def test_cut_short(written: Path, share: float) -> None:
    text = written.read_text().rstrip()
    written.write_text(text[: int(len(text) * share)])
    with pytest.raises(RecordError, match="damaged: not JSON"):
        records.load(written)


def test_not_text(written: Path) -> None:
    written.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(RecordError, match="cannot read"):
        records.load(written)


@pytest.mark.parametrize(
    "document", ["[]", "3", '{"kind": "bench"}', '{"format_version": "one"}'], ids=["list", "number", "none", "text"]
)
def test_foreign_json(written: Path, document: str) -> None:
    written.write_text(document)
    with pytest.raises(RecordError, match="not a wavecrest result file"):
        records.load(written)


def test_foreign_kind(written: Path) -> None:
    _change(written, kind="asv")
    with pytest.raises(RecordError, match="not a wavecrest result file: kind 'asv'"):
        records.load(written)


def test_newer_format(written: Path) -> None:
    _change(written, format_version=records.FORMAT_VERSION + 1)
    with pytest.raises(RecordError, match="upgrade wavecrest"):
        records.load(written)


def test_unknown_field_is_not_half_read(written: Path) -> None:
    _change(written, surprise=1)
    with pytest.raises(RecordError, match=r"damaged: .*surprise"):
        records.load(written)


def test_missing_field_is_named(written: Path) -> None:
    document = json.loads(written.read_text())
    del document["buckets"][0]["shapes"]
    written.write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"damaged: .*buckets\.0\.shapes"):
        records.load(written)


def test_wrong_kind(written: Path) -> None:
    with pytest.raises(RecordError, match="is a bench result, not profile"):
        records.load_as(written, records.ProfileRecord)


def test_older_formats_migrate_step_by_step(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def upgrade(document: dict[str, Any]) -> dict[str, Any]:
        document["workload"] = document.pop("model_name")
        return {**document, "format_version": document["format_version"] + 1}

    document = json.loads(written.read_text())
    document["model_name"] = document.pop("workload")
    document["format_version"] = 0
    written.write_text(json.dumps(document))
    monkeypatch.setitem(records.MIGRATIONS, 0, upgrade)
    assert records.load(written).workload == "m"


def test_a_failed_write_leaves_the_old_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_text()

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        records.save(_bench(), written)
    assert written.read_text() == before
    assert [entry.name for entry in written.parent.iterdir()] == [written.name]


def test_a_write_replaces_and_leaves_nothing_behind(written: Path) -> None:
    files.write_text(written, "new")
    assert written.read_text() == "new"
    assert [entry.name for entry in written.parent.iterdir()] == [written.name]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot write to the output folder"):
        files.prepare_folder(tmp_path / "file" / "runs")
    with pytest.raises(OutputError, match="cannot write"):
        files.write_text(tmp_path / "nowhere" / "x.json", "{}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        files.prepare_folder(tmp_path)


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    made = files.prepare_folder(tmp_path / "a" / "b")
    assert made.is_dir() and not list(made.iterdir())
