"""Sums across lanes that kernels pass on have the same bits in all lanes: no product is merged into the additions.

a · b + (what another lane sent) in one rounding is another number in each of the two lanes. Where both then write it to
one place, as a layout that holds a number several times does, the bits are those of whoever came last.
"""

from __future__ import annotations

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("shuffles.py",),)


@pytest.fixture(scope="module")
def sums() -> dict[str, tuple[int, int]]:
    return answer("shuffles.py")  # type: ignore[no-any-return]


def test_a_merged_product_is_found(sums: dict[str, tuple[int, int]]) -> None:
    count, merged = sums["control"]
    assert count == 5 and merged == 1


@pytest.mark.parametrize("kernel", ["sequence", "step"])
def test_no_product_is_merged(sums: dict[str, tuple[int, int]], kernel: str) -> None:
    found = {name: one for name, one in sums.items() if name.startswith(kernel)}
    assert len(found) == 3
    for name, (count, merged) in found.items():
        assert count and not merged, name
