"""torch.compile sees which tensors flash_decoding's kernels write: caches where there are new keys, nothing else read.

A kernel that it cannot read counts as one that writes all it is given: then caches would be copied on every call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="reads what Triton makes of a kernel")


@pytest.fixture(scope="module")
def written() -> dict[str, dict[str, list[str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("written.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_attention_writes_its_results_alone(written: dict[str, dict[str, list[str]]]) -> None:
    assert len(written) > 20
    for case, kernels in written.items():
        results = {"o_ptr", "lse_ptr", "part_ptr", "meta_ptr"}
        assert set(kernels["_decoding_kernel"]) <= results, case
        assert set(kernels.get("_joining_kernel", [])) <= results, case


def test_new_keys_and_values_are_written_to_caches(written: dict[str, dict[str, list[str]]]) -> None:
    caches, scales, shifts = ([f"{which}_{kind}_ptr" for which in ("k", "v")] for kind in ("cache", "scale", "shift"))
    wanted = {
        "append": [*caches, "turned_ptr"],
        "append int8": caches,
        "append fp8": caches,
        "append int8 by token": [*caches, *scales, "turned_ptr"],
        "append int4 4 groups": [*caches, *scales, *shifts, "turned_ptr"],
    }
    found = {case: kernels["_append_kernel"] for case, kernels in written.items() if "_append_kernel" in kernels}
    assert found == {case: sorted(names) for case, names in wanted.items()}
