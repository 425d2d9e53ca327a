"""The records in evidence/: their sizes and names, who rests on them, and which trees they are from."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks import summary

from wavecrest import ops, records
from wavecrest.dispatch import lookup
from wavecrest.dispatch.tuned import Config, Entry, database
from wavecrest.isa import sources
from wavecrest.isa.emulate import record as emulation
from wavecrest.measure import timing
from wavecrest.records import files, provenance
from wavecrest.tune import session

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence"
KNOWN = EVIDENCE / "known.toml"

MOST_BYTES = 500_000
MOST_OF_ALL = 6_000_000
# larger, and why
LARGE = {
    "examples/xlstm_docs/model.safetensors": "weights of the model that the examples and tests load",
}
# records of trees with changes, which are kept until they are measured again: a number that may only fall
MOST_KNOWN = 56
NAME = re.compile(r"[a-z0-9-]+/\d{4}-\d\d-\d\d_[a-z-]+_[a-z0-9_]+\.(jsonl\.gz|log)")


def tracked() -> list[Path]:
    """The files that git knows."""
    said = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if said.returncode:
        pytest.skip(f"no git checkout: {said.stderr.strip()}")
    return [ROOT / name for name in said.stdout.split("\0") if name]


def paths(pattern: str = "*/*.jsonl.gz") -> list[Path]:
    """Records, by their names."""
    return sorted(EVIDENCE.glob(pattern))


@cache
def document(path: Path) -> Any:
    """The content of a record."""
    return files.read_json(path, what="record")


@cache
def known() -> dict[str, Any]:
    """Known faults of records that are kept all the same."""
    return tomllib.loads(KNOWN.read_text(encoding="utf-8"))


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document."""
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from inside(one)
    elif isinstance(value, list):
        for one in value:
            yield from inside(one)


def headers(path: Path) -> list[dict[str, Any]]:
    """The headers in a record."""
    found = [one["header"] for one in inside(document(path)) if isinstance(one.get("header"), dict)]
    return [header for header in found if "created" in header and "device" in header]


# --- size and names


def test_no_file_is_large() -> None:
    large = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in tracked() if path.is_file()}
    large = {name: size for name, size in large.items() if size > MOST_BYTES}
    assert set(large) == set(LARGE), f"larger than {MOST_BYTES:,} bytes, or no longer: {large}"


def test_all_records_together_are_small() -> None:
    total = sum(path.stat().st_size for path in EVIDENCE.rglob("*") if path.is_file())
    assert total <= MOST_OF_ALL, f"{total:,} bytes"


def test_names_say_machine_date_command_and_subject() -> None:
    found = [path.relative_to(EVIDENCE).as_posix() for path in EVIDENCE.rglob("*") if path.is_file() and path != KNOWN]
    assert [name for name in found if not NAME.fullmatch(name)] == []
    assert len(found) > 60


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.name)
def test_the_date_in_a_name_is_that_of_the_last_header(path: Path) -> None:
    dates = [header["created"][:10] for header in headers(path)]
    if not dates:
        dates = [document(path)["created"][:10]]
    assert path.name.startswith(max(dates))


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.name)
def test_a_record_is_written_as_it_would_be_now(path: Path, tmp_path: Path) -> None:
    """The same lines and the same compression, so that writing it again changes nothing."""
    files.write_document(tmp_path / path.name, document(path))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    kinds = {"bench-ops", "tune", "optimize", "verify"}
    if isinstance(document(path), dict) and document(path).get("kind") in kinds:
        records.load(path)


# --- what rests on them


def shipped() -> list[Entry]:
    """The rows that come with the package."""
    found = []
    for path in sorted(database.DATA.glob("*/*.csv")):
        fields = lookup.fields_of(ops.get(path.stem))
        rows = database.read(path, fields).values()
        found += [Entry(path.parent.name, path.stem, fields, row) for row in rows]
    return found


def problem(entry: Entry, evidence: Path, loaded: dict[str, Any]) -> str:
    """The first thing that a row says and its record does not; "" if the row rests on the record."""
    row, (place, _, digest) = entry.row, entry.row.record.partition("@")
    path = evidence / place
    if not digest:
        return f"names no content of {place}"
    if not path.is_file():
        return f"there is no {place}"
    if place not in loaded:
        loaded[place] = (files.content_hash(path), records.load_as(path, records.TuneRecord))
    held, record = loaded[place]
    if held != digest:
        return f"{place} has content {held} now, not {digest}"
    if (record.op, record.header.device["arch"]) != (entry.op, entry.arch):
        return f"{place} is of {record.op} on {record.header.device['arch']}"
    found = [key for key in record.keys if tuple(key.key.get(name) for name in entry.fields) == row.key]
    if len(found) != 1:
        return f"{place} has {len(found)} keys like it"
    (key,) = found
    made = session.row_of(key, entry.fields, row.record, record.header)
    if table_of(made) != table_of(row):
        return f"{place} says {table_of(made)}, the row {table_of(row)}"
    # the key's own figures against those of the candidate that won
    (won,) = [one for one in key.candidates if one.status == "won"]
    config = Config(**won.config) if won.config else None
    if (won.backend, config, round((won.ms or math.nan) * 1e3, 3)) != (row.backend, row.config, row.us):
        return f"{place} has another winner among its candidates"
    return ""


def table_of(row: Any) -> Any:
    """A row with its figures as a table has them."""
    from wavecrest.dispatch.tuned.table import as_written

    return as_written(row)


def test_every_shipped_row_rests_on_the_record_it_names() -> None:
    entries, loaded = shipped(), {}  # type: ignore[var-annotated]
    assert len(entries) > 250
    wrong = {f"{entry.op} {entry.row.key}": problem(entry, EVIDENCE, loaded) for entry in entries}
    assert {name: what for name, what in wrong.items() if what} == {}


def test_what_a_row_is_held_to(tmp_path: Path) -> None:
    from dataclasses import replace

    entry = next(one for one in shipped() if one.op == "rope")
    place, _, digest = entry.row.record.partition("@")
    path = tmp_path / place
    path.parent.mkdir()

    def said(changed: Entry, suite: str = "shared") -> str:
        text = gzip.decompress((EVIDENCE / place).read_bytes()).decode()
        path.write_bytes(gzip.compress(text.replace('"suite":"shared"', f'"suite":"{suite}"').encode()))
        return problem(changed, tmp_path, {})

    def with_row(**fields: Any) -> Entry:
        return replace(entry, row=replace(entry.row, **fields))

    assert said(entry) == ""
    assert "names no content" in said(with_row(record=place))
    assert "there is no gone" in said(with_row(record=f"gone.jsonl.gz@{digest}"))
    assert "content" in said(with_row(record=f"{place}@000000000000"))
    assert "content" in said(entry, suite="another")
    assert "0 keys like it" in said(with_row(key=(7, *entry.row.key[1:])))
    assert "says" in said(with_row(us=entry.row.us + 0.001))
    assert "says" in said(with_row(backend="torch"))
    assert "says" in said(with_row(config=None))
    assert "says" in said(with_row(native_us=None))
    assert "says" in said(with_row(evidence=replace(entry.row.evidence, commit="another")))
    assert "is of rope on sm_90" in said(replace(entry, op="memcpy"))
    assert "is of rope on sm_90" in said(replace(entry, arch="gfx942"))


@pytest.mark.parametrize("machine", summary.machines())
def test_the_summary_is_of_the_records(machine: str) -> None:
    path = summary.RESULTS / f"{machine}.jsonl"
    assert path.read_text(encoding="utf-8") == summary.text(machine), "run scripts/docs"


def test_every_summary_has_its_machine() -> None:
    assert {path.stem for path in summary.RESULTS.glob("*")} == set(summary.machines())


# --- samples


def series(path: Path) -> Iterator[tuple[float, list[float], Any]]:
    """Times of a record with the samples they are medians of, and their intervals where they have one."""
    for one in inside(document(path)):
        if "samples" in one and isinstance(one["samples"], list) and one.get("ms") is not None and one["samples"]:
            # of records that keep what a candidate took in its last quick round, the interval is the final's; of the
            # guide's tables it is the speed-up's
            yield one["ms"], one["samples"], None if "eager_samples" in one else one.get("ci")
        for name in ("peer", "ours", "own", "wavecrest", "official", "eager"):
            if f"{name}_samples" in one:
                yield one[f"{name}_ms"], one[f"{name}_samples"], None


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.name)
def test_times_can_be_computed_from_samples_unless_the_record_says_so(path: Path) -> None:
    if document(path).get("samples") == "thinned":
        return
    for ms, samples, ci in series(path):
        # records of 2026-11-24 and before have five digits behind the point
        assert statistics.median(samples) == pytest.approx(ms, abs=1e-5, rel=1e-5)
        if ci is not None:
            found = timing.bootstrap_median(samples)
            assert [found.low, found.high] == pytest.approx(list(ci.values()) if isinstance(ci, dict) else ci, abs=1e-6)
    for one in inside(document(path)):
        if "eager_samples" in one and "ratio" in one:
            ratio, interval = timing.bootstrap_speedup([(one["eager_samples"], one["samples"])])
            assert [ratio, interval.low, interval.high] == pytest.approx([one["ratio"], *one["ci"]], rel=1e-4)


# --- trees


def of_changed_trees() -> dict[str, str]:
    """The records that a commit does not have all of, with what their headers say, by name and content."""
    found = {}
    for path in paths():
        commits = [header["commit"] for header in headers(path)]
        said = [commit or "no commit" for commit in commits if commit is None or commit.endswith(provenance.CHANGES)]
        if said:
            found[f"{path.relative_to(EVIDENCE).as_posix()}@{files.content_hash(path)}"] = (
                f"{len(said)} of {len(commits)}"
            )
    return found


def test_new_records_are_of_a_commit() -> None:
    listed = known()["changed_trees"]["records"]
    now = of_changed_trees()
    assert sorted(set(now) - set(listed)) == [], "measured in a tree with changes: commit first, then measure"
    assert sorted(set(listed) - set(now)) == [], "no longer there, or another: take them off the list"
    assert len(listed) == len(set(listed)) <= MOST_KNOWN, "the list does not grow"


def test_records_say_where_they_come_from() -> None:
    without = {path.name for path in paths() if not headers(path)}
    plans = {path.name for path in paths("*/*_plan_*")}
    # facts that others published were measured on no machine of this project: they name repository and commit
    published = {path.name for path in paths("published/*") if document(path)["source"]["commit"]}
    assert not without - plans - published


def test_a_record_of_a_changed_tree_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check itself, on records made here."""
    folder = tmp_path / "machine"
    folder.mkdir()
    for name, commit in (("clean", "abc1234"), ("dirty", "abc1234+changes"), ("unknown", None)):
        header = {"created": "2026-12-01", "device": {}, "commit": commit}
        files.write_document(folder / f"2026-12-01_tune_{name}.jsonl.gz", {"runs": [{"header": header}] * 2})
    monkeypatch.setattr(sys.modules[__name__], "EVIDENCE", tmp_path)
    document.cache_clear()
    found = of_changed_trees()
    document.cache_clear()
    assert [name.partition("@")[0] for name in found] == [
        "machine/2026-12-01_tune_dirty.jsonl.gz", "machine/2026-12-01_tune_unknown.jsonl.gz",
    ]  # fmt: skip
    assert set(found.values()) == {"2 of 2"}


def of_other_files(package: Path) -> list[str]:
    """Records whose commit is not in the history of a package's checkout, or has other files than ran."""
    found = []
    for path in paths():
        for header in headers(path):
            source, commit = header.get("source"), header["commit"]
            if source is not None and commit is not None and not commit.endswith(provenance.CHANGES):
                held = provenance.source_of(package, commit)
                if held != source:
                    found.append(f"{path.name}: {commit} " + ("has other files" if held else "is not in the history"))
    return found


def test_a_commit_has_the_source_that_a_record_names() -> None:
    """Holds for records from 2026-11-24 on: an invented stamp of WAVECREST_COMMIT is found here."""
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("needs the whole history")
    assert of_other_files(provenance.PACKAGE) == []


def test_an_invented_commit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = provenance.commit_of(provenance.PACKAGE)
    if commit is None:
        pytest.skip("needs a checkout")
    real, folder = commit.removesuffix(provenance.CHANGES), tmp_path / "machine"
    held = provenance.source_of(provenance.PACKAGE, real)
    folder.mkdir()
    for name, said, source in (("right", real, held), ("invented", "deadbee", held), ("other", real, "0" * 12)):
        header = {"created": "2026-12-01", "device": {}, "commit": said, "source": source}
        files.write_document(folder / f"2026-12-01_tune_{name}.jsonl.gz", {"header": header})
    monkeypatch.setattr(sys.modules[__name__], "EVIDENCE", tmp_path)
    document.cache_clear()
    found = of_other_files(provenance.PACKAGE)
    document.cache_clear()
    assert sorted(found) == [
        "2026-12-01_tune_invented.jsonl.gz: deadbee is not in the history",
        f"2026-12-01_tune_other.jsonl.gz: {real} has other files",
    ]


def test_the_source_of_a_commit_is_that_of_its_checkout() -> None:
    commit = provenance.commit_of(provenance.PACKAGE)
    if commit is None or commit.endswith(provenance.CHANGES):
        pytest.skip(f"needs a checkout without changes: {commit}")
    assert provenance.source_of(provenance.PACKAGE, commit) == provenance.source()


# --- emulation


@cache
def kernels() -> dict[str, list[str]]:
    """The hashes of today's kernels, as they are compiled: in Triton's interpreter some are others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import json; from wavecrest.isa import sources; print(json.dumps(sources.kernels()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, list[str]] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("path", paths("emulated/*"), ids=lambda path: path.name)
def test_emulated_kernels_are_those_of_today(path: Path) -> None:
    stale = emulation.load(path).stale(kernels())
    assert stale == {}, "kernels have changed since they were emulated: run scripts/emulate"


def test_the_records_name_a_hash_of_every_kernel_that_ran() -> None:
    for path in paths("emulated/*"):
        found = emulation.load(path)
        ran = {kernel for case in found.cases for kernel in case.work.kernels}
        assert set(found.sources) == ran and len(ran) > 20
        assert all(len(one) == sources.DIGITS for hashes in found.sources.values() for one in hashes)
