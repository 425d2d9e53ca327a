"""Answers of the scripts here about compiled kernels, recorded in known.json by a key of all that they follow from.

An answer that is recorded is not worked out again, but for one in SHARE, another one with every change of the record;
one that is not as recorded is an error. A stale record costs time and hides nothing.

`python tests/compile/known.py [QUESTION ...]` works out the answers to all questions, or to some, and writes them.
A script asks in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile import recorded
from wavecrest.isa import compiler

HERE = Path(__file__).parent
FILE = HERE / "known.json"
SHARE = 6
# by script, with its options
QUESTIONS = (
    "dependent.py", "exchanges.py", "gemm_paths.py", "lanes.py", "pipelines.py", "shuffles.py", "traced.py",
    "uniform.py", "uniform.py 16",
)  # fmt: skip
# set where the record is written: the file for answers, a line each
WRITING = "KNOWN_ANSWERS"


class Known:
    """The answers of one script."""

    def __init__(self, script: str, *options: str, file: Path = FILE) -> None:
        self.name = " ".join((Path(script).name, *options))
        sources = [Path(script).read_text(encoding="utf-8"), (HERE / "halfway.py").read_text(encoding="utf-8")]
        self.how = f"{version('torch')} {version('triton')} {recorded.reader()} {sources}"
        self.writing = os.environ.get(WRITING)
        record = {} if self.writing or not file.is_file() else json.loads(file.read_text(encoding="utf-8"))
        self.record: dict[str, Any] = record.get(self.name, {})
        self.turn = hashlib.sha256(json.dumps(self.record).encode()).hexdigest()
        self.made: dict[str, Any] = {}

    def answer(self, launch: Any, arch: str, work: Callable[[], Any], *more: Any) -> Any:
        """The answer of `work` about the machine code of a launch for an architecture, as JSON has it.

        Args:
            launch, arch: as of `compiler.compile_launch`.
            work: returns the answer, which follows from the launch's types, constants and options.
            more: what else the answer follows from.
        """
        recorded.forget_hashes()
        text = f"{self.how} {arch} {compiler.source_key(launch, arch)} {more}"
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        if key not in self.made and key in self.record and not self.again(key):
            self.made[key] = self.record[key]
        if key not in self.made:
            made = json.loads(json.dumps(work()))
            if self.record.get(key, made) != made:
                raise AssertionError(f"{self.name}: {made} is not as recorded, {self.record[key]}: run known.py")
            self.made[key] = made
            if self.writing:
                with open(self.writing, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps({key: made}) + "\n")
        return self.made[key]

    def again(self, key: str) -> bool:
        """Whether it is the turn of a recorded answer to be worked out."""
        return hashlib.sha256(f"{self.turn} {key}".encode()).digest()[0] % SHARE == 0


def main(*asked: str) -> None:
    record = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    answers = FILE.with_suffix(".lines")
    for question in asked or QUESTIONS:
        answers.unlink(missing_ok=True)
        script, *options = question.split()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, str(HERE / script), *options]
        subprocess.run(command, env=environment | {WRITING: str(answers)}, stdout=subprocess.DEVNULL, check=True)
        record[question] = dict(json.loads(line).popitem() for line in answers.read_text(encoding="utf-8").splitlines())
    answers.unlink()
    blocks = []
    for question in QUESTIONS:
        lines = [f"{json.dumps(key)}: {json.dumps(made)}" for key, made in sorted(record.get(question, {}).items())]
        blocks.append(f"{json.dumps(question)}: {{\n" + ",\n".join(lines) + "\n}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
