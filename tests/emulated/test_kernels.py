"""The emulator itself: kernels that use what AMD code has, each against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels are compiled by triton")

from tests.emulated.cases import CASES, ONLY
from tests.emulated.conftest import ARCHS

Emulated = Callable[[str, str], Any]
PAIRS = [(arch, name) for name in CASES for arch in ARCHS if ONLY.get(name, (arch,))[0] == arch]


@pytest.mark.every_emulated
@pytest.mark.parametrize(("arch", "name"), PAIRS)
def test_kernel_matches_pytorch(emulated: Emulated, arch: str, name: str) -> None:
    row = emulated("kernels", arch)[name]
    assert not row["problem"], row["problem"]
    assert row["error"] <= row["allowed"], row


@pytest.mark.every_emulated
@pytest.mark.parametrize("arch", ARCHS)
def test_the_matrix_unit_was_used(emulated: Emulated, arch: str) -> None:
    rows = emulated("kernels", arch)
    for name, row in rows.items():
        wanted = name.startswith(("matmul", "attention", "mx"))
        assert (row["matrix"] > 0) == wanted, name
