"""Compile targets for architectures and print the rows as JSON: `python everything.py gfx942,sm_90 rms_norm softmax`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import sys

from pydantic import TypeAdapter

from wavecrest.isa import survey
from wavecrest.isa.facts import Row


def main(archs: str, *targets: str) -> None:
    work = [job for target in targets for job in survey.jobs(target, archs.split(","))]

    def note(done: int, planned: int, what: str) -> None:
        sys.stderr.write(f"{done}/{planned} {what}\n")

    sys.stdout.buffer.write(TypeAdapter(list[Row]).dump_json(survey.survey(work, code=True, on_progress=note)))


if __name__ == "__main__":
    main(*sys.argv[1:])
