"""The user's database: what is kept, under many writers, under kills, and what damaged files do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from wavecrest import errors
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config, Database, Entry, Evidence, Overlay, Row, database, overlay, untuned_calls
from wavecrest.dispatch.tuned.row import here
from wavecrest.errors import InvalidArgument, OutputError, TableError

FIELDS = ("rows", "dtype", "bias", "packed")
EVIDENCE = Evidence(
    default_us=20.5, error=1e-7, device="a device", units=80, versions="torch 1; triton 2", date="2026-01-01",
    commit="abc", detail='{"a": 1}',
)  # fmt: skip


def row(*key: Any, us: float = 12.3, **evidence: Any) -> Row:
    made = key or (16, "bfloat16", None, True)
    return Row(made, "triton", Config(BLOCK=64, num_warps=4), us, 15.0, "a.json", replace(EVIDENCE, **evidence))


def entry(*key: Any, arch: str = "sm_00", op: str = "some_op", us: float = 12.3, **evidence: Any) -> Entry:
    return Entry(arch, op, FIELDS, row(*key, us=us, **evidence))


@pytest.fixture
def user(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path / "new" / "tuned.sqlite")


def test_nothing_is_made_by_reading(user: Overlay) -> None:
    assert user.read("sm_00", "some_op", FIELDS) == [] and user.entries() == [] and user.check() == []
    assert not user.path.parent.exists()


def test_what_is_written_is_read_with_its_types(user: Overlay) -> None:
    keys = [
        (0, "a", None, False), (True, 'say "a"', None, 1), (-1, "two\nlines", "1\r\n2", True),
        (2**40, "µ \0", "", None), (16, "12", "None", "true"),
    ]  # fmt: skip
    entries = [entry(*key, us=0.001 + place) for place, key in enumerate(keys)]
    entries[1] = replace(entries[1], row=replace(entries[1].row, config=None, native_us=None, evidence=Evidence()))
    assert user.write(entries) == len(entries)
    found = {one.key: one for one in user.read("sm_00", "some_op", FIELDS)}
    assert found == {one.row.key: one.row for one in entries}
    kinds = {one.row.key: [type(part) for part in one.row.key] for one in entries}
    assert {key: [type(part) for part in key] for key in found} == kinds
    assert sorted(user.entries("sm_00", "some_op"), key=repr) == sorted(entries, key=repr)
    assert user.read("sm_01", "some_op", FIELDS) == user.read("sm_00", "other", FIELDS) == []
    # the op's keys have other parts now
    assert user.read("sm_00", "some_op", FIELDS[:3]) == []
    assert user.check() == []


def test_the_newest_row_stays_whatever_the_order(user: Overlay) -> None:
    old, new = entry(us=1.0, date="2026-01-01T10:00:00+00:00"), entry(us=2.0, date="2026-01-02T09:00:00+00:00")
    assert user.write([new]) == 1 and user.write([old]) == 0
    assert user.read("sm_00", "some_op", FIELDS) == [new.row]
    assert user.write([replace(new, row=replace(new.row, us=3.0))]) == 1
    assert [one.us for one in user.read("sm_00", "some_op", FIELDS)] == [3.0]
    # measurements of another device, other versions or somebody else stand beside it
    others = [entry(device="b"), entry(units=304), entry(versions="torch 9"), entry(origin="aiter (asm)")]
    assert user.write(others) == 4 and len(user.read("sm_00", "some_op", FIELDS)) == 5


@pytest.mark.parametrize(
    "bad",
    [
        entry(16.0, "bfloat16", None, True),
        entry(16, "bfloat16", None),
        entry(us=0.0),
        entry(us=float("nan")),
        entry(error=float("inf")),
        entry(units=0),
        replace(entry(), row=replace(row(), config=Config())),
        replace(entry(), row=replace(row(), backend="")),
        entry(16, "x" * (overlay.MOST_TEXT + 1), None, True),
    ],
)
def test_a_transaction_is_whole_or_not_there(user: Overlay, bad: Entry) -> None:
    user.write([entry(1, "a", None, True)])
    with pytest.raises(InvalidArgument):
        user.write([entry(2, "a", None, True), bad])
    assert [one.key[0] for one in user.read("sm_00", "some_op", FIELDS)] == [1]


def test_an_error_in_a_transaction_undoes_it(user: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write([entry(1, "a", None, True)])
    values = Overlay._values
    # a row that passes the checks, and that SQLite refuses
    monkeypatch.setattr(
        Overlay, "_values", lambda self, one: (None, *values(self, one)[1:]) if one.row.us == 9 else values(self, one)
    )
    with pytest.raises(TableError, match="NOT NULL"):
        user.write([entry(2, "a", None, True), entry(3, "a", None, True, us=9.0)])
    assert [one.key[0] for one in user.read("sm_00", "some_op", FIELDS)] == [1]


WRITER = """
import sys
from pathlib import Path
from wavecrest.dispatch.tuned import Config, Entry, Evidence, Overlay, Row
assert "torch" not in sys.modules, "slow to start"

def entry(*key, us=12.3):
    made = Row(key, "triton", Config(BLOCK=64), us, 15.0, "a.json", Evidence(date="2026-01-01"))
    return Entry("sm_00", "some_op", {fields!r}, made)

user, name, count = Overlay(Path({path!r})), int(sys.argv[1]), int(sys.argv[2])
sys.stdin.readline()
for place in range(count):
    user.write([entry(name, str(place), None, True, us=1.0 + place), entry(name, str(place), None, False)])
    print(place, flush=True)
    # readers see whole transactions while others write
    mine = [one.key for one in user.read("sm_00", "some_op", {fields!r}) if one.key[0] == name]
    assert len(mine) == 2 * (place + 1), mine
"""


def start(user: Overlay, name: int, count: int) -> subprocess.Popen[str]:
    code = WRITER.format(path=str(user.path), fields=FIELDS)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(name), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_sixteen_processes_at_once_lose_nothing(user: Overlay) -> None:
    # the file is not there yet: they make it at once, too
    processes = [start(user, name, 15) for name in range(16)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    found = {one.key for one in user.read("sm_00", "some_op", FIELDS)}
    assert found == {
        (name, str(place), None, flag) for name in range(16) for place in range(15) for flag in (True, False)
    }
    assert user.check() == []


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("asked", range(1, 6))
def test_a_file_that_another_process_makes_meanwhile_is_no_stranger(
    user: Overlay, monkeypatch: pytest.MonkeyPatch, *, asked: int, read: bool
) -> None:
    # as left by a process that was killed between the file's mode and its first transaction
    user.path.parent.mkdir()
    with closing(sqlite3.connect(user.path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connect = sqlite3.connect
    left = asked

    class Interrupted(sqlite3.Connection):
        """Lets another process make the file behind the statement of this number, unless that is in a transaction."""

        def execute(self, *given: Any) -> sqlite3.Cursor:
            nonlocal left
            found = super().execute(*given)
            left -= 1
            if left == 0 and not self.in_transaction:
                monkeypatch.setattr(sqlite3, "connect", connect)
                user.write([entry(1, "a", None, True)])
            return found

    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Interrupted))
    if read:
        assert len(user.entries()) in (0, 1)
    else:
        user.write([entry(2, "a", None, True)])
    assert left < asked and user.check() == []
    if not read:
        assert 2 in {one.row.key[0] for one in user.entries()}


def test_a_kill_at_any_point_leaves_what_was_committed(user: Overlay) -> None:
    pick = random.Random(7)
    written: set[tuple[int, int]] = set()
    for name in range(16):
        process = start(user, name, 10_000)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        # the first transaction of all makes the file: kill some before they are done
        said = [int(process.stdout.readline()) for _ in range(pick.choice((0, 1, 3)))]
        time.sleep(pick.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        more, _ = process.communicate(timeout=60)
        written |= {(name, place) for place in [*said, *map(int, more.split())]}
        found = {(one.key[0], int(str(one.key[1]))): 0 for one in user.read("sm_00", "some_op", FIELDS)}
        keys = [one.key for one in user.read("sm_00", "some_op", FIELDS)]
        assert written <= set(found)
        # no transaction is there by half
        assert all((*key[:3], not key[3]) in keys for key in keys)
        assert user.check() == []
    assert written
    user.write([entry(99, "a", None, True)])
    assert len(user.read("sm_00", "some_op", FIELDS)) % 2 == 1


def test_a_process_killed_while_it_makes_the_file_leaves_an_empty_one(user: Overlay) -> None:
    user.path.parent.mkdir()
    for begun in (lambda: user.path.touch(), lambda: sqlite3.connect(user.path).execute("PRAGMA journal_mode=WAL")):
        user.path.unlink(missing_ok=True)
        begun()
        assert user.entries() == [] and user.check() == []
        assert user.write([entry()]) == 1 and len(user.entries()) == 1


def closed(user: Overlay, *entries: Entry) -> bytes:
    """The bytes of a database whose log is empty."""
    user.write(entries)
    with sqlite3.connect(user.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return user.path.read_bytes()


def test_damaged_files_give_rows_that_were_written_or_a_named_error(user: Overlay) -> None:
    entries = [entry(place, "bfloat16", None, True, us=1.0 + place) for place in range(40)]
    whole, right = closed(user, *entries), {one.row.key: one.row for one in entries}
    pick = random.Random(11)
    raised = 0
    damaged: list[bytes] = [whole[:size] for size in (1, 50, 100, 512, 4096, 5000, len(whole) // 2, len(whole) - 1)]
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(pick.choice((1, 1, 3, 30))):
            data[pick.randrange(len(data))] = pick.randrange(256)
        damaged.append(bytes(data))
    for data in damaged:
        user.path.write_bytes(data)
        for name in ("-wal", "-shm"):
            Path(f"{user.path}{name}").unlink(missing_ok=True)
        try:
            found = user.read("sm_00", "some_op", FIELDS)
            user.check()
        except TableError as error:
            assert str(user.path) in str(error) and "\n" not in str(error)
            raised += 1
            continue
        # a bit that is another may hide a row, and never changes one
        assert all(right.get(one.key) == one for one in found)
    assert raised > 100


def test_damage_ends_no_writer_without_a_name(user: Overlay) -> None:
    whole = closed(user, *[entry(place, "bfloat16", None, True) for place in range(20)])
    pick = random.Random(5)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(40):
            data[pick.randrange(len(data))] = pick.randrange(256)
        user.path.write_bytes(bytes(data))
        for name in ("-wal", "-shm"):
            Path(f"{user.path}{name}").unlink(missing_ok=True)
        try:
            user.write([entry(5, "new", None, True)])
        except (TableError, OutputError) as error:
            assert str(user.path) in str(error)


def test_a_row_that_somebody_changed_is_named(user: Overlay) -> None:
    user.write([entry(), entry(32, "a", None, True)])
    with sqlite3.connect(user.path) as connection:
        connection.execute("UPDATE rows SET us = '1.0' WHERE key LIKE '[16,%'")
    connection.close()
    with pytest.raises(TableError, match=r"the row of sm_00 some_op \[16,.*checksum.*move the file away"):
        user.read("sm_00", "some_op", FIELDS)


def test_foreign_and_newer_files_are_named_and_left_alone(user: Overlay) -> None:
    user.path.parent.mkdir()
    with sqlite3.connect(user.path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = user.path.read_bytes()
    for call in (user.entries, user.check, lambda: user.write([entry()])):
        with pytest.raises(TableError, match="another program's database"):
            call()
    with sqlite3.connect(user.path) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    connection.close()
    assert b"bookmarks" in before
    user.path.unlink()
    user.write([entry()])
    with sqlite3.connect(user.path) as connection:
        connection.execute(f"PRAGMA user_version = {len(overlay.STEPS) + 1}")
    connection.close()
    for call in (user.entries, user.check, lambda: user.write([entry()])):
        with pytest.raises(TableError, match="has schema 2, this wavecrest reads up to 1: upgrade"):
            call()
    user.path.write_text("rows,us\n1,2\n" * 100)
    for call in (user.entries, lambda: user.write([entry()])):
        with pytest.raises(TableError, match="not a database"):
            call()


def test_a_file_of_an_older_schema_is_brought_up_to_date(user: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write([entry()])

    def second(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (text TEXT)")

    monkeypatch.setattr(overlay, "STEPS", (*overlay.STEPS, second))
    # reading changes nothing
    assert len(user.entries()) == 1
    user.write([entry(32, "a", None, True)])
    with sqlite3.connect(user.path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT count(*) FROM notes").fetchone() == (0,)
    connection.close()
    assert len(user.entries()) == 2

    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE rows")
        raise sqlite3.OperationalError("no space left")

    monkeypatch.setattr(overlay, "STEPS", (*overlay.STEPS, fails))
    with pytest.raises(OutputError, match="no space left"):
        user.write([entry(64, "a", None, True)])
    monkeypatch.setattr(overlay, "STEPS", overlay.STEPS[:2])
    assert len(user.entries()) == 2


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        Overlay(tmp_path / "file" / "tuned.sqlite").write([entry()])
    with pytest.raises(OutputError, match="cannot write the user database"):
        Overlay(tmp_path).write([entry()])
    with pytest.raises(TableError, match="cannot read the user database"):
        Overlay(tmp_path).entries()


def test_a_part_that_would_come_back_as_another_type_is_refused(user: Overlay) -> None:
    class Rows(IntEnum):
        FEW = 16

    with pytest.raises(InvalidArgument, match="a cell holds what cannot be kept"):
        user.write([entry(Rows.FEW, "bfloat16", None, True)])


def test_a_writer_that_waits_too_long_is_named(user: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write([entry()])
    monkeypatch.setattr(overlay, "PATIENCE", 0.05)
    other = sqlite3.connect(user.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OutputError, match="database is locked"):
        user.write([entry(32, "a", None, True)])
    # readers do not wait
    assert len(user.entries()) == 1
    other.execute("ROLLBACK")
    other.close()


def test_reading_makes_no_files_in_a_folder_that_may_not_be_written(
    user: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is taken for one that may not be written, as root may write anywhere."""
    closed(user, entry())
    monkeypatch.setattr(overlay, "_writable", lambda _folder: False)
    assert len(user.entries()) == 1 and user.check() == []
    assert os.listdir(user.path.parent) == [user.path.name]


def test_what_a_writer_has_not_moved_out_of_its_log_is_read_there_too(
    user: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(user, entry())
    with closing(sqlite3.connect(user.path, isolation_level=None)) as writer:
        # a connection that stays open leaves rows in the log
        assert writer.execute("SELECT count(*) FROM rows").fetchone() == (1,)
        user.write([entry(32, "a", None, True)])
        assert Path(f"{user.path}-wal").stat().st_size > 0
        monkeypatch.setattr(overlay, "_writable", lambda _folder: False)
        assert len(user.entries()) == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_folder_that_nobody_may_write_is_read(user: Overlay) -> None:
    closed(user, entry())
    user.path.chmod(0o444)
    user.path.parent.chmod(0o555)
    try:
        assert len(user.entries()) == 1
        with pytest.raises(OutputError):
            user.write([entry(32, "a", None, True)])
    finally:
        user.path.parent.chmod(0o755)


def test_where_the_users_database_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert os.environ["WAVECREST_DATABASE"] == "off" and Overlay.of_user() is None
    assert registry.STATE.database.overlay is None
    monkeypatch.setenv("WAVECREST_DATABASE", str(tmp_path / "a.sqlite"))
    found = Overlay.of_user()
    assert found is not None and found.path == tmp_path / "a.sqlite"
    monkeypatch.delenv("WAVECREST_DATABASE")
    monkeypatch.setattr(overlay.platformdirs, "user_data_path", lambda name: tmp_path / name)
    found = Overlay.of_user()
    assert found is not None and found.path == tmp_path / "wavecrest" / "tuned.sqlite"


def test_the_users_rows_stand_before_the_packages(user: Overlay, tmp_path: Path) -> None:
    found = Database(tmp_path, "sm_00", user)
    shipped = [row(16, "a", None, True, us=1.0, origin=""), row(32, "a", None, True, us=1.0)]
    database.write(found.path("some_op"), FIELDS, shipped)
    user.write([entry(16, "a", None, True, us=2.0), entry(64, "a", None, True, us=2.0)])
    times = {key[0]: one.us for key, one in found.rows("some_op", FIELDS).items()}
    assert times == {16: 2.0, 32: 1.0, 64: 2.0}
    proposals = [found.look_up("some_op", FIELDS, (rows, "a", None, True)) for rows in (16, 32)]
    assert [", user database" in one.reason for one in proposals if one is not None] == [True, False]
    # what others measured stands behind what wavecrest did, wherever that is
    user.write([entry(32, "a", None, True, us=3.0, origin="aiter (asm)"), entry(128, "a", None, True, origin="aiter")])
    found.forget()
    rows = found.rows("some_op", FIELDS)
    assert rows[(32, "a", None, True)].us == 1.0
    proposal = found.look_up("some_op", FIELDS, (128, "a", None, True))
    assert proposal is not None and "by aiter (a.json, user database)" in proposal.reason


def test_of_a_key_the_row_of_this_device_and_these_versions_is_taken(user: Overlay, tmp_path: Path) -> None:
    now = here()
    same = {"device": now.device, "units": now.units, "versions": now.versions}
    cases = [
        # from the best to the least, the older the better
        {**same, "date": "2026-01-01"},
        {**same, "versions": "torch 0", "date": "2026-01-02"},
        {"device": "other", "units": now.units, "versions": now.versions, "date": "2026-01-03"},
        {"device": "other", "units": now.units + 1, "versions": now.versions, "date": "2026-01-04"},
        {"device": "other", "units": now.units + 1, "versions": "torch 1", "date": "2026-01-06"},
        {"device": "other", "units": now.units + 1, "versions": "torch 0", "date": "2026-01-05"},
    ]
    for first in range(len(cases)):
        kept = Overlay(tmp_path / f"{first}.sqlite")
        kept.write([entry(us=1.0 + place, **case) for place, case in enumerate(cases) if place >= first])
        (best,) = Database(tmp_path, "sm_00", kept).rows("some_op", FIELDS).values()
        assert best.us == 1.0 + first


def test_what_is_other_than_here_is_said(user: Overlay, tmp_path: Path) -> None:
    now = here()
    same = {"device": now.device, "units": now.units, "versions": now.versions}
    user.write(
        [
            entry(1, "a", None, True, **same),
            entry(2, "a", None, True, **same | {"versions": f"torch 0.1; {now.versions.partition('; ')[2]}"}),
            entry(3, "a", None, True, **same | {"device": "Another GPU", "units": now.units + 7}),
        ]
    )
    found = Database(tmp_path, "sm_00", user)
    reasons = []
    for rows in (1, 2, 3):
        proposal = found.look_up("some_op", FIELDS, (rows, "a", None, True))
        assert proposal is not None
        reasons.append(proposal.reason)
    base = "measured 12.3 µs, native 15.0 µs (a.json, user database)"
    other = f"Another GPU, {now.units + 7} compute units, {now.units} here"
    assert reasons == [base, f"{base}, measured with torch 0.1", f"{base}, measured with {other}"]


def test_a_damaged_database_is_named_at_the_decision(user: Overlay, tmp_path: Path) -> None:
    user.path.parent.mkdir()
    user.path.write_bytes(b"no database" * 100)
    with pytest.raises(errors.TableError, match=r"tuned\.sqlite.*WAVECREST_DATABASE"):
        Database(tmp_path, "sm_00", user).look_up("some_op", FIELDS, (1, "a", None, True))


TABLE_WRITER = """
import sys
from pathlib import Path
from wavecrest.dispatch.tuned import Config, Row, database
path = Path({path!r})
print("go", flush=True)
for round_ in range(100_000):
    rows = [Row((place, round_), "triton", Config(BLOCK=64), 1.0, 15.0, "a.json") for place in range(round_ % 50 + 1)]
    database.write(path, ("rows", "round"), rows)
"""


def test_a_kill_while_a_table_is_written_leaves_a_whole_one(tmp_path: Path) -> None:
    pick, path = random.Random(3), tmp_path / "a.csv"
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", TABLE_WRITER.format(path=str(path))], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(0.01 + pick.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        rounds = {key[1] for key in database.read(path, ("rows", "round"))}
        # all rows are of one round, and all of its rows are there
        for round_ in rounds:
            assert len(rounds) == 1 and len(database.read(path, ("rows", "round"))) == int(str(round_)) % 50 + 1


MISSES = """
import sys
from pathlib import Path
from wavecrest.dispatch.tuned.untuned_calls import Recorder, UntunedCall
recorder = Recorder(Path({path!r}))
for place in range(300):
    key = {{"rows": place, "text": "x" * place, "name": sys.argv[1]}}
    recorder.add(UntunedCall("op", "sm_00", key, "torch", "default"))
"""


def test_processes_that_record_misses_at_once_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    code = MISSES.format(path=str(path))
    processes = [subprocess.Popen([sys.executable, "-c", code, str(name)]) for name in range(6)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 6
    found = {(one.key["name"], one.key["rows"]) for one in untuned_calls.read(path)}
    assert found == {(str(name), place) for name in range(6) for place in range(300)}


def test_a_file_that_somebody_was_killed_over_is_read(tmp_path: Path) -> None:
    whole = Overlay(tmp_path / "whole" / "rows.db")
    whole.write([entry()])
    with closing(sqlite3.connect(whole.path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        # few pages fit, so that what is not committed is in the file already
        connection.execute("PRAGMA cache_size = 2")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE other (text)")
        connection.executemany("INSERT INTO other VALUES (?)", [("x" * 2000,)] * 200)
        left = Overlay(tmp_path / "left" / "rows.db")
        shutil.copytree(whole.path.parent, left.path.parent)
        connection.execute("ROLLBACK")
    assert Path(f"{left.path}-journal").exists()
    assert left.check() == [] and left.entries() == whole.entries()
    assert not Path(f"{left.path}-journal").exists()


def test_a_row_of_a_clock_that_was_wrong_is_replaced_by_the_next(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "rows.sqlite")
    assert overlay.write([entry(us=1.0, date="2099-01-01T00:00:00+00:00")]) == 1
    (held,) = overlay.entries()
    assert held.row.evidence.date < "2099"
    # one that an older version wrote
    with closing(sqlite3.connect(overlay.path)) as connection:
        values = overlay._values(entry(us=1.0, date="2099-01-01T00:00:00+00:00"))
        marks = ", ".join("?" * len(values))
        connection.execute(f"INSERT OR REPLACE INTO rows VALUES ({marks})", values)
        connection.commit()
    assert overlay.write([entry(us=2.0, date="2026-01-02T00:00:00+00:00")]) == 1
    assert [one.row.us for one in overlay.entries()] == [2.0]


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    overlay = Overlay(tmp_path / "fifo")
    with pytest.raises(TableError, match="no regular file"):
        overlay.entries()
    with pytest.raises(OutputError, match="no regular file"):
        overlay.write([entry()])


def test_text_with_half_of_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        Overlay(tmp_path / "rows.sqlite").write([entry("k", 1, 2, True, origin="\ud800")])


def test_flipped_bits_never_lose_rows_without_a_word(tmp_path: Path) -> None:
    """A damaged file is named, or gives all rows as they were: never fewer, and never others."""
    overlay = Overlay(tmp_path / "rows.sqlite")
    overlay.write([entry(f"k{number}", 1, 2, True) for number in range(120)])
    with closing(sqlite3.connect(overlay.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole, before = overlay.path.read_bytes(), overlay.entries()
    chance, named = random.Random(7), 0
    for _ in range(150):
        held = bytearray(whole)
        for _ in range(8):
            held[chance.randrange(100, len(held))] ^= 1 << chance.randrange(8)
        overlay.path.write_bytes(held)
        try:
            assert overlay.entries() == before
        except TableError:
            named += 1
    assert named > 75
