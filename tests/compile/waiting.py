"""How programs of one row wait for each other, as JSON by architecture: `python waiting.py gfx942 …`.

"loads": those inside the loops of a split row's kernel. "counted": the machine code of a step of the mLSTM whose
programs are counted. "exchanged": the machine code of an sLSTM whose programs exchange h, 16 and 32 bits.
A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.isa import assembly, compiler

EXCHANGES, CASES = ("gfx90a", "gfx942", "gfx950", "sm_90"), ("cooperative 256", "cooperative 128 float32")
# of memory of the device, and fences of any kind
ACCESS = re.compile(r"(?:buffer|global|flat)_|LDG|STG|ATOM|MEMBAR|CCTL|FENCE|ERRBAR")


def listing(op: str, case: str, arch: str) -> str:
    cases = registry.get(op).study.compile_cases
    assert cases is not None
    launch = cases(hardware.ARCHS[arch], None)[case]
    return compiler.compile_launch(launch, arch).listing


def exchanged(text: str, arch: str) -> dict[str, list[str]]:
    """Accesses of the device's memory: those in the loops within the loop over tokens, and all."""
    syntax = assembly.NVIDIA if arch.startswith("sm_") else assembly.AMD
    lines = syntax.parse(text)
    inner = [line for loop in assembly.loops(lines) for line in loop]
    return {
        name: [line.text for line in some if ACCESS.search(line.text)]
        for name, some in (("waits", inner), ("all", lines))
    }


def main(*archs: str) -> None:
    found = {}
    for arch in archs:
        loads: list[list[str]] = []
        if arch.startswith("gfx"):
            lines = assembly.AMD.parse(listing("rms_norm", "N=262144", arch))
            loads = [[line.text for line in loop if "_load_" in line.text] for loop in assembly.loops(lines)]
        found[arch] = {"loads": loads, "counted": listing("mlstm_step", "7B counted", arch)}
        if arch in EXCHANGES:
            found[arch]["exchanged"] = [exchanged(listing("slstm_sequence", case, arch), arch) for case in CASES]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
