"""Default configurations fit the LDS (shared memory) of each architecture, as compilers count it. No GPU."""

from __future__ import annotations

import pytest

from tests.compile.conftest import answer

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# one process: importing takes longer than compiling for an architecture
QUESTIONS = (("fits.py", *ARCHS),)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_mla_decode_has_room_for_16_queries_of_128_heads(arch: str) -> None:
    every: dict[str, tuple[int, int]] = answer(*QUESTIONS[0])
    found = {case: sizes for case, sizes in every.items() if case.startswith(f"{arch} ")}
    assert len(found) == 4 and all(0 < taken <= room for taken, room in found.values()), found
