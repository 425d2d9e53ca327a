"""Sums across lanes that kernels pass on have the same bits in all lanes: no product is merged into the additions.

a · b + (what another lane sent) in one rounding is another number in each of the two lanes. Where both then write it to
one place, as a layout that holds a number several times does, the bits are those of whoever came last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def sums() -> dict[str, tuple[int, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("shuffles.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_merged_product_is_found(sums: dict[str, tuple[int, int]]) -> None:
    count, merged = sums["control"]
    assert count == 5 and merged == 1


@pytest.mark.parametrize("kernel", ["sequence", "step"])
def test_no_product_is_merged(sums: dict[str, tuple[int, int]], kernel: str) -> None:
    found = {name: one for name, one in sums.items() if name.startswith(kernel)}
    assert len(found) == 3
    for name, (count, merged) in found.items():
        assert count and not merged, name
