"""The interpreter has no types that must agree: each combination of options of a product is compiled. No GPU."""

from __future__ import annotations

from tests.compile.conftest import answer

QUESTIONS = (("gemm_paths.py",),)


def test_all_paths_pass_the_compiler() -> None:
    assert len(answer("gemm_paths.py")) >= 35
