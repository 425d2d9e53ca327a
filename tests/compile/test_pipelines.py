"""Software pipelines on sm_90 overwrite no tile that a product under way may still read.

triton 3.6 gives a buffered tile one buffer more than it has stages where only a product reads it, whose wait comes a
turn later. A tile that something else reads too does not get it, but the product's wait stays late: the copy for a
later turn then writes under it. On one H200 (2026-11-22) results of three stages were wrong by up to 3e-2, where the
last turns' copies, which are masked off, put zeros there at once.
"""

from __future__ import annotations

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("pipelines.py",),)


@pytest.fixture(scope="module")
def pipelines() -> dict[str, tuple[int, list[str]]]:
    return answer("pipelines.py")  # type: ignore[no-any-return]


def test_a_tile_with_two_readers_is_found(pipelines: dict[str, tuple[int, list[str]]]) -> None:
    """A compiler that buffers it as needed would have this fail, and q of a chunk need not be read twice then."""
    late, tiles = pipelines["control"]
    assert late and tiles


def test_no_tile_is_overwritten_early(pipelines: dict[str, tuple[int, list[str]]]) -> None:
    found = {name: one for name, one in pipelines.items() if name != "control"}
    # products that are under way behind their wait are there to be looked at
    assert sum(late > 0 for late, _ in found.values()) >= 2
    assert not any(tiles for _, tiles in found.values()), found
