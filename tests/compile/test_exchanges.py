"""Products of few rows on AMD multiply what each lane has loaded: in their loops lanes hand each other nothing.

Loads go to registers there, and lie over lanes as 16 bytes of their type do. Of 8-bit weights that is otherwise than of
the rows they are multiplied by; triton 3.6 passed all weights through LDS to mend it, those of int8 widened to float32.
"""

from __future__ import annotations

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("exchanges.py",),)


@pytest.fixture(scope="module")
def exchanges() -> dict[str, dict[str, list[str]]]:
    return answer("exchanges.py")  # type: ignore[no-any-return]


def test_an_exchange_is_found(exchanges: dict[str, dict[str, list[str]]]) -> None:
    """A compiler that needs none would have this fail, and `_alike` could go."""
    assert all("s_barrier" in found["control"] for found in exchanges.values())


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_weights_stay_in_their_lanes(exchanges: dict[str, dict[str, list[str]]], arch: str) -> None:
    found = {name: one for name, one in exchanges[arch].items() if name != "control"}
    assert len(found) == (9 if arch == "gfx90a" else 13)
    assert not any(found.values()), found
