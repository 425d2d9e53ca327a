"""Recorded answers about compiled kernels: what is known is not worked out, and what is recorded wrong is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compile import known, recorded
from tests.compile.known import Known


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script; the launches of its kernels are their keys."""
    monkeypatch.setattr(recorded, "forget_hashes", lambda: None)
    monkeypatch.setattr(known.compiler, "source_key", lambda launch, _arch: launch)
    monkeypatch.delenv(known.WRITING, raising=False)
    (tmp_path / "asks.py").write_text("# first")
    return tmp_path / "asks.py"


def record(script: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> Path:
    """A file of answers, each the name of its kernel."""
    file, lines = script.with_name("known.json"), script.with_name("known.lines")
    monkeypatch.setenv(known.WRITING, str(lines))
    asked = Known(str(script), file=file)
    for name in names:
        assert asked.answer(name, "gfx942", lambda name=name: [name]) == [name]
    monkeypatch.delenv(known.WRITING)
    answers = dict(json.loads(line).popitem() for line in lines.read_text().splitlines())
    assert len(answers) == len(names)
    file.write_text(json.dumps({"asks.py": answers}))
    return file


def test_what_is_known_is_not_worked_out_but_for_a_share(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"kernel {number}" for number in range(120)]
    file, worked = record(script, monkeypatch, names), list[str]()

    def answers(arch: str = "gfx942", *more: str, options: tuple[str, ...] = ()) -> int:
        """How many of the kernels are asked about anew."""
        worked.clear()
        asked = Known(str(script), *options, file=file)
        for name in names:
            assert asked.answer(name, arch, lambda name=name: worked.append(name) or [name], *more) == [name]
        return len(worked)

    first = answers()
    assert 0 < first < 2 * len(names) // known.SHARE
    # another architecture, other numbers, other options and another script are other questions
    assert answers("gfx950") == answers("gfx942", "number") == answers(options=("16",)) == len(names)
    script.write_text("# second")
    assert answers() == len(names)
    script.write_text("# first")
    # which share it is moves with the record
    before, content = set(names), json.loads(file.read_text())
    for change in range(60):
        content["asks.py"]["another"] = change
        file.write_text(json.dumps(content))
        answers()
        before -= set(worked)
    assert not before


def test_a_record_that_is_wrong_is_an_error(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"kernel {number}" for number in range(40)]
    file = record(script, monkeypatch, names)
    asked = Known(str(script), file=file)
    with pytest.raises(AssertionError, match=r"asks\.py: 0 is not as recorded"):
        for name in names:
            asked.answer(name, "gfx942", lambda: 0)


def test_every_question_is_recorded() -> None:
    content = json.loads(known.FILE.read_text(encoding="utf-8"))
    assert list(content) == list(known.QUESTIONS) and all(content.values())
    for question in known.QUESTIONS:
        assert "Known(__file__" in (known.HERE / question.split()[0]).read_text(encoding="utf-8")
