"""One side of a comparison: a child process that compiles with the Triton, the variables and the switches of that side.

Run as `python -m wavecrest.isa.side TASK OUT.json`, with a `Task` as JSON. It prints a line for each kernel, "DONE
PLANNED NAME"; the record, or the problem that it ended with, is in the file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from wavecrest import env, errors
from wavecrest.errors import EnvironmentProblem, InvalidArgument, MissingDependency, WavecrestError
from wavecrest.isa import compiler, survey
from wavecrest.isa.facts import IsaRecord, load
from wavecrest.records import decode, files, provenance

# the endings of a saved side; any other file is an interpreter
_RECORDS = (".json", ".json.gz", files.LINES)


class Task(files.Model):
    """The kernels that a side compiles.

    `config` are values that replace those of each case's own configuration, `llvm` switches of LLVM to turn on, and
    `variables` the variables of the environment that the process was started with for this side.
    """

    target: str
    archs: list[str]
    case: str | None = None
    config: dict[str, int] = Field(default_factory=dict)
    llvm: list[str] = Field(default_factory=list)
    variables: dict[str, str] = Field(default_factory=dict)
    workers: int | None = None


class Answer(files.Model):
    """The end of a side: its record, or the class in `errors` and the text of the error."""

    record: IsaRecord | None = None
    kind: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a side comes from: this environment, another interpreter, a folder that holds Triton, or a saved record."""

    kind: Literal["here", "python", "folder", "file"] = "here"
    path: Path = field(default_factory=Path)

    @property
    def words(self) -> str:
        """The place as records name it: without the folders of the machine."""
        if self.kind == "here":
            return "this environment"
        if not self.path.is_absolute():
            return str(self.path)
        # of an interpreter, the environment that it is of
        return "/".join(["…", *self.path.parts[-3 if self.kind == "python" else -1 :]])


def place(text: str | None) -> Place:
    """The place that an option names; None is this environment.

    Raises:
        InvalidArgument: it is no interpreter, no folder with Triton in it and no file.
    """
    if text is None:
        return Place()
    path = Path(text)
    if path.is_dir():
        if (path / "triton" / "__init__.py").is_file():
            return Place("folder", path)
        if os.access(path / "bin" / "python", os.X_OK):
            return Place("python", path / "bin" / "python")
        raise InvalidArgument(
            f"{text} is a folder without a package triton and without bin/python; make one with "
            f"`pip install --no-deps --target {text} triton==VERSION`"
        )
    if text.endswith(_RECORDS):
        return Place("file", path)
    found = shutil.which(text)
    if found is None:
        raise InvalidArgument(
            f"{text} is no interpreter, no folder that holds Triton and no record (.json, {files.LINES})"
        )
    return Place("python", Path(found))


def run(where: Place, task: Task, *, on_progress: survey.OnProgress | None = None) -> IsaRecord:
    """The record of a side: read from its file, or compiled in a child process there.

    Raises:
        RecordError: the file is damaged, foreign or newer.
        WavecrestError: the error of `errors` that the child ended with.
        EnvironmentProblem: the child died; with its last line.
    """
    if where.kind == "file":
        return load(where.path)
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, str | None] = dict(task.variables)
        if (task.variables or task.llvm) and "TRITON_CACHE_DIR" not in task.variables:
            # a cache of its own: Triton's knows only some of the variables, and no switch of LLVM
            changes["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        python = os.path.abspath(where.path) if where.kind == "python" else sys.executable
        folders = [os.path.abspath(where.path)] if where.kind == "folder" else []
        # an installed wavecrest lies beside this environment's Triton, which would go before that of the side
        source = Path(folder) / "source"
        source.mkdir()
        (source / "wavecrest").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
        target, log = Path(folder) / "side.json", Path(folder) / "log"
        command = [*env.python_command("wavecrest.isa.side", python), task.model_dump_json(), str(target)]
        with (
            log.open("wb") as errors_out,
            subprocess.Popen(
                command,
                env=env.python_child(changes, folders, str(source)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors_out,
                text=True,
                errors="replace",
            ) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                _note(line, on_progress)
        return _answer(target, where, log, child.returncode)


def _note(line: str, on_progress: survey.OnProgress | None) -> None:
    """Pass a line of the child on; what a user's module prints is not one."""
    done, _, rest = line.partition(" ")
    planned, _, name = rest.rstrip("\n").partition(" ")
    if on_progress is not None and done.isdecimal() and planned.isdecimal():
        on_progress(int(done), int(planned), name)


def _answer(target: Path, where: Place, log: Path, code: int) -> IsaRecord:
    if target.is_file():
        answer = Answer.model_validate(decode.json_of(target.read_bytes()))
        if answer.record is not None:
            # the user's command, not that of the child
            header = answer.record.header.model_copy(update={"command": provenance.command_line()})
            return answer.record.model_copy(update={"header": header})
        raise _error(answer, where)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {code}"
    advice = ""
    if where.kind == "python" and ("No module named" in last or MissingDependency.__name__ in last):
        advice = (
            "; it needs torch, triton and the packages that wavecrest needs. Or keep this interpreter and give a "
            "folder that holds another Triton: pip install --no-deps --target FOLDER triton==VERSION"
        )
    raise EnvironmentProblem(f"{where.words} compiles nothing: {last}{advice}")


def _error(answer: Answer, where: Place) -> WavecrestError:
    """The child's error again, with the place in front if it is not this environment."""
    found = getattr(errors, answer.kind, None)
    text = answer.text if where.kind == "here" else f"{where.words}: {answer.text}"
    if isinstance(found, type) and issubclass(found, WavecrestError) and found is not MissingDependency:
        return found(text)
    return EnvironmentProblem(text)


def compile_side(task: Task, *, on_progress: survey.OnProgress | None = None) -> IsaRecord:
    """Compile the kernels of a task in this process and its children.

    Raises:
        InvalidArgument, WorkloadError: the target, an architecture, the case, the configuration or a switch of LLVM is
            not there.
        MissingDependency, EnvironmentProblem: no compiler here.
    """
    if task.llvm:
        compiler.set_llvm_switches(task.llvm)
    record = survey.record(
        task.target, task.archs, [task.config], task.case, workers=task.workers, on_progress=on_progress
    )
    if task.llvm and all(row.reason == survey.CRASHED for row in record.rows):
        raise InvalidArgument(
            f"the compiler of triton {record.header.versions.triton} crashed at every kernel: its LLVM has no switch "
            f"{' or '.join(task.llvm)}, or it is not one that is true or false"
        )
    return record.model_copy(update={"variables": task.variables, "llvm": task.llvm})


def command_task(text: str) -> Task:
    """The task of a command line."""
    return Task.model_validate(decode.json_of(text))


def main(arguments: Sequence[str]) -> int:
    """Do the task of the command line; the exit code."""
    task, target = command_task(arguments[0]), Path(arguments[1])

    def on_progress(done: int, planned: int, name: str) -> None:
        sys.stdout.write(f"{done} {planned} {name}\n")
        sys.stdout.flush()

    try:
        answer = Answer(record=compile_side(task, on_progress=on_progress))
    except WavecrestError as error:
        answer = Answer(kind=type(error).__name__, text=str(error))
    target.write_text(answer.model_dump_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
