"""A product split over K, attention split over keys or a step of the mLSTM is two launches; the second starts early.

On sm_90: while the first runs, and it waits before it reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIRST = (
    "triton _tile_kernel", "triton_stream_k _stream_k_kernel", "triton_multiply _multiply_kernel",
    "triton _decoding_kernel", "triton _mla_kernel", "triton _mlstm_step_kernel",
)  # fmt: skip
SECOND = (
    "triton _sum_kernel", "triton_stream_k _join_kernel", "triton_multiply _sum_kernel", "triton _joining_kernel",
    "triton _mla_join_kernel", "triton _mlstm_norm_kernel",
)  # fmt: skip
# of sm_90: programs of the next kernel may start; wait for the kernel before
ALLOWS, WAITS = re.compile(r"\bPREEXIT\b"), re.compile(r"\bACQBULK\b")
LOADS = re.compile(r"\bLDG")


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("dependent.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", FIRST)
def test_the_first_lets_the_second_start(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[f"sm_90 {kernel}"]
    assert ALLOWS.search(found["code"]) and not WAITS.search(found["code"])
    # it waits for what is before it, as any kernel
    assert not found["option"]


@pytest.mark.parametrize("kernel", SECOND)
def test_the_second_reads_nothing_before_it_has_waited(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[f"sm_90 {kernel}"]
    waits, loads = WAITS.search(found["code"]), LOADS.search(found["code"])
    assert found["option"] and waits and loads and waits.start() < loads.start()


@pytest.mark.parametrize("kernel", FIRST + SECOND)
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_others_have_no_such_launches(kernels: dict[str, Any], arch: str, kernel: str) -> None:
    # which their assembler would not take
    found = kernels[f"{arch} {kernel}"]
    assert not found["option"] and not ALLOWS.search(found["code"]) and not WAITS.search(found["code"])
    assert len(found["code"].splitlines()) > 100
