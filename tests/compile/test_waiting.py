"""A program of a split row that waits for the others looks again in every turn of its loop, past its own caches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@pytest.fixture(scope="module")
def loads() -> dict[str, list[list[str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("waiting.py")
    done = subprocess.run([sys.executable, str(script), *ARCHS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_waiting_loop_loads(loads: dict[str, list[list[str]]], arch: str) -> None:
    # a word of 64 bits, with the bits that make the load coherent with other compute units
    words = re.compile(r"_load_(?:dwordx2|b64) .*(?:sc0 sc1|glc|scope:SCOPE_(?:DEV|SYS))")
    assert any(words.search(text) for loop in loads[arch] for text in loop), loads[arch]
