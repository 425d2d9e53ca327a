"""Kernels of three families for architectures that have no budgets, as JSON: `python newer.py gfx1151 gfx1250`.

gfx1250 is not on sale: it has no record in `hardware.ARCHS`, and gets RDNA4's configurations here. A compiler that does
not know an architecture is a reason. A process of its own, since kernels defined for Triton's interpreter cannot be
compiled.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.errors import WavecrestError
from wavecrest.isa import compiler

CASES = (("rms_norm", "N=4096"), ("gemm", "rows=16 bf16"), ("flash_attention", "D=64 causal"))


def facts(listing: str) -> dict[str, Any]:
    """Spilled registers, scratch bytes and the kinds of matrix instructions."""
    numbers = {
        name: max(map(int, re.findall(rf"\.{field}:\s+(\d+)", listing)))
        for name, field in (("spills", "vgpr_spill_count"), ("scratch", "private_segment_fixed_size"))
    }
    return {**numbers, "matrix": sorted(set(re.findall(r"v_(?:wmma|mfma)_\w+", listing)))}


def main(*archs: str) -> None:
    hardware.ARCHS.setdefault("gfx1250", replace(hardware.ARCHS["gfx1201"], name="gfx1250", part="not on sale"))
    found: dict[str, dict[str, Any]] = {}
    for arch in archs:
        found[arch] = {}
        for op, case in CASES:
            cases = registry.get(op).study.compile_cases
            assert cases is not None
            launch = cases(hardware.ARCHS[arch], None)[case]
            try:
                found[arch][op] = facts(compiler.compile_launch(launch, arch).listing)
            except WavecrestError as error:
                found[arch][op] = {"reason": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
