"""Compile targets for architectures and print the rows as JSON: `python everything.py gfx942,sm_90 rms_norm softmax`.

With `--known FILE` (see `recorded.py`) kernels whose sources, constants and options are as recorded are not compiled
again, but for a share of those of `recorded.ALWAYS`. A process of its own, since kernels defined for Triton's
interpreter cannot be compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile import recorded
from wavecrest.isa import survey


def main(archs: str, *targets: str) -> None:
    known = None
    if targets[:1] == ("--known",):
        known, targets = Path(targets[1]), targets[2:]
    work = [job for target in targets for job in survey.jobs(target, archs.split(","))]
    keys: list[recorded.Place] = []
    if known is not None:
        keys = recorded.places(work)
        needed = recorded.load(known).needed(keys)
        work = [job for job, one in zip(work, needed, strict=True) if one]

    def note(done: int, planned: int, what: str) -> None:
        sys.stderr.write(f"{done}/{planned} {what}\n")

    recorded.hash_compiler()
    rows = survey.survey(work, code=True, on_progress=note)
    sys.stdout.write(recorded.Compiled(places=keys, rows=rows).model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
