"""How programs of one row wait for each other, as JSON by architecture: `python waiting.py gfx942 …`.

"loads": those inside the loops of a split row's kernel. "counted": the machine code of a step of the mLSTM whose
programs are counted.
A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.isa import assembly, compiler


def listing(op: str, case: str, arch: str) -> str:
    cases = registry.get(op).study.compile_cases
    assert cases is not None
    launch = cases(hardware.ARCHS[arch], None)[case]
    return compiler.compile_launch(launch, arch).listing


def main(*archs: str) -> None:
    found = {}
    for arch in archs:
        loads: list[list[str]] = []
        if arch.startswith("gfx"):
            lines = assembly.AMD.parse(listing("rms_norm", "N=262144", arch))
            loads = [[line.text for line in loop if "_load_" in line.text] for loop in assembly.loops(lines)]
        found[arch] = {"loads": loads, "counted": listing("mlstm_step", "7B counted", arch)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
