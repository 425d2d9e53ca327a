"""Result files: read back as written, refused with one clear line otherwise."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavecrest import hardware, records
from wavecrest.errors import OutputError, RecordError
from wavecrest.measure import timing
from wavecrest.records import files, lines, provenance
from wavecrest.records.decode import MOST_WHOLE


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
    with pytest.raises(RecordError, match="damaged: it begins with a byte order mark"):
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
    with pytest.raises(RecordError, match="is a result of bench, not of profile"):
        records.load_as(written, records.ProfileRecord)


def test_a_format_that_there_never_was(written: Path) -> None:
    _change(written, format_version=0)
    with pytest.raises(RecordError, match="has format 0, which there never was"):
        records.load(written)


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


# --- compressed JSON lines


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    path = tmp_path / "bench.jsonl.gz"
    records.save(_bench(), path)
    return path


def _edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    """The file with other lines."""
    found = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in change(found)).encode()))


def test_both_forms_hold_the_same(written: Path, compressed: Path) -> None:
    same = records.load(written)
    records.save(same, compressed)
    assert records.load(compressed) == same
    first, *rest = gzip.decompress(compressed.read_bytes()).decode().splitlines()
    assert json.loads(first)["buckets"] == [] and json.loads(first)["workload"] == "m"
    assert [list(json.loads(line)) for line in rest] == [["buckets"]]


def test_the_same_record_gives_the_same_bytes(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, before = records.load(compressed), compressed.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    records.save(record, compressed)
    # of a file in gzip's form the time and the name, which are not written
    assert compressed.read_bytes() == before and before[3:8] == bytes(5)


def test_infinities_are_kept_in_both_forms(tmp_path: Path) -> None:
    record = records.TuneRecord(
        header=provenance.header(hardware.cpu()), op="a", suite="quick", budget_seconds=float("inf"), seconds=1e-300
    )
    for name in ("a.json", "a.jsonl.gz"):
        records.save(record, tmp_path / name)
        assert records.load(tmp_path / name) == record


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99], ids=["empty", "third", "last-bytes"])
def test_a_compressed_file_cut_short(compressed: Path, share: float) -> None:
    compressed.write_bytes(compressed.read_bytes()[: int(compressed.stat().st_size * share)])
    with pytest.raises(RecordError, match=r"the result file .* is damaged"):
        records.load(compressed)


def test_a_compressed_file_with_another_byte(compressed: Path) -> None:
    held = bytearray(compressed.read_bytes())
    held[-8] ^= 1
    compressed.write_bytes(held)
    with pytest.raises(RecordError, match="is damaged: CRC check failed"):
        records.load(compressed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[1:], "not a wavecrest result file"),
        (lambda found: [found[0], "[1]"], "line 2 is not an object"),
        (lambda found: [found[0], "{"], "not JSON at line 2"),
        (lambda found: [*found, '{"others": {}}'], "line 3 belongs to no list"),
        (lambda found: [*found, '{"buckets.deeper": {}}'], "line 3 belongs to no list"),
        (lambda found: [*found, '{"buckets": {}, "more": {}}'], "line 3 belongs to no list"),
        (lambda found: [*found, '{"workload": {}}'], "line 3 belongs to no list"),
        (lambda found: [*found, ""], "not JSON at line 3"),
        (lambda found: [], "not JSON at line 1"),
    ],
)
def test_lines_that_belong_nowhere(compressed: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    _edit(compressed, change)
    with pytest.raises(RecordError, match=message):
        records.load(compressed)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MOST_WHOLE, MOST_WHOLE)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from("ab."), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(document=st.dictionaries(st.text(max_size=3) | st.sampled_from("ab"), _values, max_size=4))
def test_any_document_is_joined_as_it_was_split(document: dict[str, Any]) -> None:
    again = lines.join(lines.split(document))
    assert again == document and json.dumps(again) == json.dumps(document)


def test_a_line_for_each_object_below_its_own(tmp_path: Path) -> None:
    document = {"a": 1, "keys": [{"k": 1, "tries": [{"t": 1}, {"t": 2}]}, {"k": 2, "tries": []}], "plain": [1, 2]}
    assert list(lines.split(document)) == [
        '{"a":1,"keys":[],"plain":[1,2]}',
        '{"keys":{"k":1,"tries":[]}}', '{"keys.tries":{"t":1}}', '{"keys.tries":{"t":2}}',
        '{"keys":{"k":2,"tries":[]}}',
    ]  # fmt: skip


def test_the_hash_is_of_the_content(written: Path, compressed: Path) -> None:
    before = files.content_hash(compressed)
    assert len(before) == files.HASH_DIGITS
    compressed.write_bytes(gzip.compress(gzip.decompress(compressed.read_bytes()), compresslevel=1))
    assert files.content_hash(compressed) == before
    _edit(compressed, lambda found: [found[0].replace('"m"', '"n"'), *found[1:]])
    assert files.content_hash(compressed) != before
    with pytest.raises(OSError):
        files.content_hash(written.with_name("gone.jsonl.gz"))


def test_names_beside_a_file() -> None:
    assert files.beside(Path("x/a.b.json"), "op").name == "a.b_op.json"
    assert files.beside(Path("x/a.jsonl.gz"), "op") == Path("x/a_op.jsonl.gz")
