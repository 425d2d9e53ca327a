"""Architectures without budgets: gfx1151, and gfx1250, which a Triton that does not know it refuses with a reason.

Another Triton: `PYTHONPATH=FOLDER:src:. python tests/compile/newer.py gfx1151 gfx1250`, with FOLDER of `pip install
--no-deps --target FOLDER triton==3.9.0`.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("newer.py", "gfx1151", "gfx1250"),)
# triton that links code for gfx1250; 3.6.0 does not
KNOWS_GFX1250 = (3, 9)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer(*QUESTIONS[0])  # type: ignore[no-any-return]


def test_gfx1151_has_code_without_spills(found: dict[str, Any]) -> None:
    assert found["gfx1151"] == {
        "rms_norm": {"spills": 0, "scratch": 0, "matrix": []},
        "gemm": {"spills": 0, "scratch": 0, "matrix": ["v_wmma_f32_16x16x16_bf16"]},
        "flash_attention": {"spills": 0, "scratch": 0, "matrix": ["v_wmma_f32_16x16x16_bf16"]},
    }


def test_gfx1250_has_code_or_a_reason(found: dict[str, Any]) -> None:
    version = tuple(int(part) for part in metadata.version("triton").split(".")[:2])
    for op, facts in found["gfx1250"].items():
        if version < KNOWS_GFX1250:
            assert "does not compile for gfx1250" in facts["reason"], (op, facts)
        else:
            matrix = [] if op == "rms_norm" else ["v_wmma_f32_16x16x32_bf16"]
            assert facts == {"spills": 0, "scratch": 0, "matrix": matrix}, op
