"""Where a record says it comes from: this checkout's commit and files, and nobody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wavecrest import hardware
from wavecrest.errors import EnvironmentProblem, InvalidArgument
from wavecrest.records import provenance

PYPROJECT = '[project]\nname = "wavecrest"\n'


def git(folder: Path, *words: str) -> str:
    """Run git as somebody; its output."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def tree(folder: Path, name: str = "wavecrest") -> Path:
    """A source tree with the project's layout; its package."""
    package = folder / "src" / "wavecrest"
    (package / provenance.TABLES / "sm_90").mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    (package / provenance.TABLES / "sm_90" / "gemm.csv").write_text("rows\n")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "timed.py").write_text("")
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("wavecrest", name))
    return package


def commit(folder: Path) -> str:
    """A repository of all that is in a folder; its short commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return git(folder, "rev-parse", "--short", "HEAD")


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAVECREST_COMMIT", raising=False)


def test_the_commit_of_a_clean_checkout(tmp_path: Path) -> None:
    package = tree(tmp_path)
    head = commit(tmp_path)
    assert provenance.commit_of(package) == head


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("src/wavecrest/__init__.py", True),
        ("src/wavecrest/new.py", True),
        ("benchmarks/timed.py", True),
        ("src/wavecrest/dispatch/tuned/data/sm_90/gemm.csv", True),
        ("src/wavecrest/dispatch/tuned/data/sm_90/rope.csv", True),
        ("benchmarks/results/h200.jsonl", False),
        ("docs/page.md", False),
    ],
)
def test_changes_of_what_runs_are_said(tmp_path: Path, path: str, changed: bool) -> None:
    package = tree(tmp_path)
    head = commit(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("changed\n")
    assert provenance.commit_of(package) == head + ("+changes" if changed else "")
    # rows are what `wavecrest tune` writes
    written = provenance.TABLES in path
    assert provenance.commit_of(package, rows=False) == head + ("+changes" if changed and not written else "")


@pytest.mark.parametrize("how", ["ignored", "assumed unchanged"])
def test_what_git_passes_over_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    package = tree(tmp_path)
    head = commit(tmp_path)
    if how == "ignored":
        (tmp_path / ".git" / "info" / "exclude").write_text("extra.py\n")
        (package / "extra.py").write_text("two = 2\n")
    else:
        git(tmp_path, "update-index", "--assume-unchanged", "src/wavecrest/__init__.py")
        (package / "__init__.py").write_text("one = 2\n")
    assert git(tmp_path, "status", "--porcelain") == ""
    assert provenance.commit_of(package) == f"{head}+changes"


def test_a_worktree_is_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    tree(tmp_path / "main")
    head = commit(tmp_path / "main")
    git(tmp_path / "main", "worktree", "add", "-q", str(tmp_path / "other"))
    assert provenance.commit_of(tmp_path / "other" / "src" / "wavecrest") == head


@pytest.mark.parametrize("tracked", [False, True])
def test_a_copy_inside_another_repository_has_no_commit(tmp_path: Path, tracked: bool) -> None:
    (tmp_path / "readme").write_text("somebody's\n")
    if not tracked:
        commit(tmp_path)
    package = tree(tmp_path / "vendor" / "wavecrest")
    if tracked:
        commit(tmp_path)
    assert git(package, "rev-parse", "--short", "HEAD")
    assert provenance.commit_of(package) is None


def test_a_repository_with_the_same_layout_is_not_ours(tmp_path: Path) -> None:
    package = tree(tmp_path, name="another")
    commit(tmp_path)
    assert provenance.commit_of(package) is None
    (tmp_path / "pyproject.toml").unlink()
    assert provenance.commit_of(package) is None
    (tmp_path / "pyproject.toml").write_text("[project")
    assert provenance.commit_of(package) is None


def test_a_package_that_git_does_not_track_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("src/\n")
    package = tree(tmp_path)
    commit(tmp_path)
    assert provenance.commit_of(package) is None


def test_an_installed_package_has_no_commit(tmp_path: Path) -> None:
    """As a wheel installs it: site-packages of an environment inside the checkout."""
    made = tree(tmp_path)
    commit(tmp_path)
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "wavecrest"
    shutil.copytree(made, installed)
    assert provenance.commit_of(installed) is None


def test_no_repository_no_commit(tmp_path: Path) -> None:
    assert provenance.commit_of(tree(tmp_path)) is None


def test_what_git_is_told_by_its_hooks_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    commit(other)
    package = tree(tmp_path / "ours")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "ours"))
    assert provenance.commit_of(package) is None


def test_the_hash_is_of_names_and_contents_and_not_of_the_place() -> None:
    files = [("a.py", b"1"), ("ops/b.py", b"2")]
    found = provenance.source_hash(files)
    assert len(found) == 12 and provenance.source_hash(reversed(files)) == found
    for other in ([("a.py", b"1")], [("a.py", b"1"), ("ops/c.py", b"2")], [("a.py", b"1"), ("ops/b.py", b"3")],
                  [("a.py", b"12"), ("ops/b.py", b"")]):  # fmt: skip
        assert provenance.source_hash(other) != found
    left = ("__pycache__/a.pyc", "ops/__pycache__/x", ".hidden", f"{provenance.TABLES}/sm_90/x.csv")
    assert provenance.source_hash([*files, *((name, b"") for name in left)]) == found


def _here(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    """Take another folder for this package's, with nothing remembered."""
    monkeypatch.setattr(provenance, "PACKAGE", package)
    for function in (provenance._commit, provenance.source):
        function.cache_clear()


@pytest.fixture
def _forgotten() -> object:
    yield
    for function in (provenance._commit, provenance.source):
        function.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_a_copy_says_its_commit_by_the_variable_and_proves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main").mkdir()
    package = tree(tmp_path / "main")
    head = commit(tmp_path / "main")
    _here(monkeypatch, package)
    stamp = provenance.stamp()
    assert stamp == f"{head}@{provenance.source()}"
    copied = tmp_path / "copy" / "src" / "wavecrest"
    shutil.copytree(package, copied)
    _here(monkeypatch, copied)
    assert provenance.header(hardware.cpu()).commit is None
    monkeypatch.setenv("WAVECREST_COMMIT", stamp)
    _here(monkeypatch, copied)
    header = provenance.header(hardware.cpu())
    assert (header.commit, header.source) == tuple(stamp.split("@")) and header.reproducible
    # rows that were written meanwhile are data
    (copied / provenance.TABLES / "sm_90" / "gemm.csv").write_text("other rows\n")
    _here(monkeypatch, copied)
    assert provenance.header(hardware.cpu()).reproducible
    (copied / "__init__.py").write_text("one = 2\n")
    _here(monkeypatch, copied)
    header = provenance.header(hardware.cpu())
    assert header.commit == f"{head}+changes" and not header.reproducible and header.source != stamp.split("@")[1]


@pytest.mark.usefixtures("_forgotten")
def test_a_checkout_needs_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tree(tmp_path)
    head = commit(tmp_path)
    monkeypatch.setenv("WAVECREST_COMMIT", "0000000@000000000000")
    _here(monkeypatch, package)
    assert provenance.header(hardware.cpu()).commit == head


@pytest.mark.usefixtures("_forgotten")
def test_a_stamp_is_believed_where_the_history_has_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main").mkdir()
    package = tree(tmp_path / "main")
    head = commit(tmp_path / "main")
    _here(monkeypatch, package)
    stamp = provenance.stamp()
    shutil.copytree(tmp_path / "main", tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    # a repository made for the copy, with a commit of its own
    (tmp_path / "copy" / "note").write_text("copied\n")
    other = commit(tmp_path / "copy")
    monkeypatch.setenv("WAVECREST_COMMIT", stamp)
    _here(monkeypatch, tmp_path / "copy" / "src" / "wavecrest")
    assert other != head == provenance.header(hardware.cpu()).commit


@pytest.mark.parametrize("path", ["src/wavecrest/__init__.py", "benchmarks/timed.py"])
@pytest.mark.usefixtures("_forgotten")
def test_a_stamp_hides_no_change_from_its_own_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    package = tree(tmp_path)
    head = commit(tmp_path)
    (tmp_path / path).write_text("changed = 1\n")
    # as somebody could write it: the commit, and the hash of the changed files
    monkeypatch.setenv("WAVECREST_COMMIT", f"{head}@{provenance.source_in(package)}")
    _here(monkeypatch, package)
    assert provenance.header(hardware.cpu()).commit == f"{head}+changes"


@pytest.mark.parametrize("given", ["main", "abc1234", "abc1234@", "@123456789abc", "abc1234@123456789abc "])
@pytest.mark.usefixtures("_forgotten")
def test_a_commit_without_a_proof_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    _here(monkeypatch, tree(tmp_path))
    monkeypatch.setenv("WAVECREST_COMMIT", given)
    with pytest.raises(InvalidArgument, match=r"WAVECREST_COMMIT takes COMMIT@HASH as scripts/provenance prints it"):
        provenance.header(hardware.cpu())


@pytest.mark.usefixtures("_forgotten")
def test_only_a_clean_checkout_has_a_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tree(tmp_path)
    _here(monkeypatch, package)
    with pytest.raises(EnvironmentProblem, match="no git checkout"):
        provenance.stamp()
    head = commit(tmp_path)
    (package / "__init__.py").write_text("changed\n")
    with pytest.raises(EnvironmentProblem, match=f"not as in commit {head}: commit them"):
        provenance.stamp()


def test_this_package_copied_into_a_repository(tmp_path: Path) -> None:
    """As it was seen: a copy of the tree in somebody's repository took that repository's commit."""
    (tmp_path / "readme").write_text("somebody's\n")
    commit(tmp_path)
    copied = tmp_path / "copy" / "src" / "wavecrest"
    shutil.copytree(provenance.PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).parents[2] / "pyproject.toml", tmp_path / "copy")
    code = "from wavecrest.records import provenance as p; print(p.__file__, p._commit(), p.source())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copied.parent)},
    ).stdout.split()  # fmt: skip
    assert Path(said[0]).is_relative_to(copied) and said[1:] == ["None", provenance.source()]
