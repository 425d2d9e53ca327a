from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.compile import recorded
from tests.compile.recorded import Compiled
from wavecrest.dispatch import registry
from wavecrest.isa.facts import Row

pytest.importorskip("triton", reason="cross-compiling needs triton")

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")
KERNELS = Path(__file__).with_name("kernels.py")


def ops_with_kernels() -> list[str]:
    return [name for name in registry.names() if "triton" in registry.get(name).backends]


# a script of this folder and its arguments
Question = tuple[str, ...]
_POOL = ThreadPoolExecutor(os.cpu_count())
_ANSWERS: dict[Question, Future[str]] = {}


def _command(question: Question) -> dict[str, Any]:
    """How a script is started: without the interpreter, as kernels defined for it cannot be compiled."""
    script, *arguments = question
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {
        "args": [sys.executable, str(Path(__file__).with_name(script)), *arguments], "env": environment, "text": True,
    }  # fmt: skip


def _run(question: Question) -> str:
    """The output of a script, in a process of its own."""
    done = subprocess.run(**_command(question), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return str(done.stdout)


def _side_by_side(questions: list[Question]) -> None:
    """Answer all questions in forks of one process, each as it ends."""
    command = _command(("side_by_side.py", json.dumps(questions)))
    try:
        with subprocess.Popen(**command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                question, code, output, errors = json.loads(line)
                if code == 0:
                    _ANSWERS[tuple(question)].set_result(output)
                else:
                    _ANSWERS[tuple(question)].set_exception(AssertionError(errors[-4000:]))
    finally:
        # nobody waits for an answer that does not come
        for question in questions:
            if not _ANSWERS[question].done():
                _ANSWERS[question].set_exception(AssertionError("side_by_side.py ended without this answer"))


def _asked(question: Question) -> Future[str]:
    if question not in _ANSWERS:
        _ANSWERS[question] = _POOL.submit(_run, question)
    return _ANSWERS[question]


def answer(*question: str) -> Any:
    """The JSON that a script prints; it runs once a session. Its own errors fail the test."""
    return json.loads(_asked(question).result())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the scripts of the `QUESTIONS` of all modules: each compiles on one core."""
    if session.config.option.collectonly or "PYTEST_XDIST_WORKER" in os.environ:
        return
    modules = dict.fromkeys(item.module for item in session.items if isinstance(item, pytest.Function))
    asked = list(dict.fromkeys(question for module in modules for question in getattr(module, "QUESTIONS", ())))
    if asked:
        _ANSWERS.update({question: Future() for question in asked})
        threading.Thread(target=_side_by_side, args=(asked,)).start()


def compiled(targets: list[str], archs: tuple[str, ...] = ARCHS, known: Path | None = None) -> Compiled:
    """The kernels of targets, compiled in a process without the interpreter; all, or those not known."""
    options = [] if known is None else ["--known", str(known)]
    return Compiled.model_validate_json(_run(("everything.py", ",".join(archs), *options, *targets)))


def compile_rows(targets: list[str], archs: tuple[str, ...] = ARCHS) -> list[Row]:
    """The rows of targets, all compiled."""
    return compiled(targets, archs).rows


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> dict[str, Compiled]:
    """The kernels of every op that a test of this session asks for: what is not as recorded is compiled, once."""
    asked = {item.callspec.params.get("op") for item in request.session.items if hasattr(item, "callspec")}
    targets = [op for op in ops_with_kernels() if op in asked]
    made = compiled(targets, known=recorded.FILE) if targets else Compiled(places=[], rows=[])
    return {
        op: Compiled(
            places=[place for place in made.places if place.op == op],
            rows=[row for row in made.rows if row.target == op],
        )
        for op in targets
    }


@pytest.fixture(scope="session")
def examples() -> dict[tuple[str, str], Row]:
    """The rows of kernels.py by case and architecture."""
    return {(row.case, row.arch): row for row in compile_rows([f"{KERNELS}:cases"])}
