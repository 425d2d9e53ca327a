"""Every op's kernels keep to their budget on every architecture: spills, scratch, access widths, waves. No GPU."""

from __future__ import annotations

import pytest

from tests.compile import recorded
from tests.compile.conftest import ARCHS, ops_with_kernels
from tests.compile.recorded import ALWAYS, BUDGETS, Compiled
from wavecrest.isa import budget

OPS = ops_with_kernels()


@pytest.mark.parametrize("name", OPS)
def test_has_a_budget(name: str) -> None:
    assert (BUDGETS / f"{name}.toml").is_file(), "write one: python tests/compile/write_budgets.py NAME"


def test_every_budget_belongs_to_an_op() -> None:
    assert {path.stem for path in BUDGETS.glob("*.toml")} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_keeps_to_its_budget(op: str, kernels: dict[str, Compiled]) -> None:
    # machine code that is as recorded is not compiled: its facts are recorded, too
    every = recorded.load().rows(kernels[op])
    for arch in ARCHS:
        assert len({row.case for row in every if row.arch == arch}) >= 3, f"fewer than three cases on {arch}"
    lines = budget.check(budget.load(BUDGETS / f"{op}.toml"), every)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("op", OPS)
def test_occupancy_is_what_llvm_says(op: str, kernels: dict[str, Compiled]) -> None:
    found = [row for row in kernels[op].rows if row.arch.startswith("gfx")]
    assert {row.arch for row in found} >= {ALWAYS}
    for row in found:
        assert row.facts is not None
        # LLVM does not know the LDS that Triton asks for at launch, so that it is about registers alone
        # and says no more waves than the configuration limits it to, where fewer registers would allow them
        limit = row.config.get("waves_per_eu", 0) or row.facts.register_waves
        assert min(row.facts.register_waves, limit) == row.facts.llvm_waves, (row.case, row.arch, row.facts.vgpr)
