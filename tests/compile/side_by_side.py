"""Run scripts of this folder side by side, as many as there are cores: `python side_by_side.py '[["lanes.py"], …]'`.

Each is a fork of this process: importing PyTorch, Triton and all ops takes longer than most scripts do. A script that
ends is a line of JSON: what was asked, the exit code, standard output and error.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile import recorded

HERE = Path(__file__).resolve().parent
Question = tuple[str, ...]


def started(question: Question, output: int, errors: int) -> int:
    """The process of a script with its arguments, which writes to two files."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.argv = [str(HERE / question[0]), *question[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(asked: str) -> None:
    for name in ("wavecrest.ops", "wavecrest.isa.survey"):
        importlib.import_module(name)
    recorded.hash_compiler()
    waiting = [tuple(question) for question in json.loads(asked)]
    running = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            question = waiting.pop(0)
            files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
            running[started(question, files[0].fileno(), files[1].fileno())] = question, files
        child, status = os.wait()
        question, files = running.pop(child)
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        sys.stdout.write(json.dumps([question, os.waitstatus_to_exitcode(status), *texts]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
