"""The loads inside the loops of a split row's kernel, as JSON: `python waiting.py gfx942 …`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys

from wavecrest import hardware, registry
from wavecrest.isa import assembly, compiler


def main(*archs: str) -> None:
    found = {}
    for arch in archs:
        launch = registry.get("rms_norm").compile_cases(hardware.ARCHS[arch])["N=262144"]  # type: ignore[misc]
        syntax = assembly.AMD
        lines = syntax.parse(compiler.compile_launch(launch, arch).listing)
        found[arch] = [[line.text for line in loop if "_load_" in line.text] for loop in assembly.loops(lines)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
