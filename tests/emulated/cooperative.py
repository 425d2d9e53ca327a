"""An sLSTM whose programs wait for each other, beside a launch for each token: JSON of the cases with other bits.

`python -m tests.emulated.cooperative gfx942`. Memory accesses are watched. By case also the workgroups that waited.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.ops.op_harness import same_bits
from tests.ops.slstm_harness import BF16, F16, F32, assert_right, case, run
from wavecrest.dispatch.tuned import Config
from wavecrest.isa.emulate import emulated

SHARED = Config(BLOCK_B=16, BLOCK_N=16, num_warps=1, num_stages=1)
CASES: dict[str, tuple[dict[str, Any], Config | None]] = {
    "several rows": ({"batch": 18, "tokens": 3, "dim": 64, "dtype": BF16, "first": True}, None),
    "resets": ({"dim": 256, "tokens": 5, "dtype": BF16, "first": True, "resets": 0.3, "lens": [4, 5]}, None),
    "two parts": ({"batch": 1, "heads": 1, "dim": 512, "tokens": 3, "dtype": F16}, None),
    "odd columns": ({"batch": 3, "dim": 40, "tokens": 4, "dtype": F32, "lens": [2, 4, 3], "resets": 0.3}, SHARED),
    "float32": ({"batch": 1, "heads": 1, "dim": 128, "tokens": 3, "dtype": F32, "forget_gate": "exp"}, None),
}


def main(arch: str) -> None:
    differ, workgroups = [], {}
    with emulated(arch, check=True) as driver:
        for name, (options, config) in CASES.items():
            call = case(**options)
            before = len(driver.runs)
            got = run("slstm_sequence", call, config, "triton_cooperative")
            assert len(driver.runs) == before + 1, "not all tokens in one launch"
            workgroups[name] = driver.runs[-1].stats.workgroups
            assert_right(call, got)
            want = run("slstm_sequence", call, None, "triton_steps")
            if not all(same_bits(one, other) for one, other in zip(got, want, strict=True)):
                differ.append(name)
    json.dump({"differ": differ, "workgroups": workgroups}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
