from __future__ import annotations

import pytest
import torch

from wavecrest.measure import numerics
from wavecrest.measure.numerics import Tolerance, compare, tolerance

INF, NAN = float("inf"), float("nan")


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_equal_is_zero() -> None:
    found = compare(t(1, -2, 3), t(1, -2, 3))
    assert (found.relative, found.worst) == (0, 0)
    assert found.within(Tolerance(0, 0))


def test_relative_is_over_norms() -> None:
    # ‖(0, 0, 0.5)‖ / ‖(3, 4, 0)‖
    assert compare(t(3, 4, 0.5), t(3, 4, 0)).relative == pytest.approx(0.1)


def test_worst_is_relative_above_one_and_absolute_below() -> None:
    assert compare(t(110), t(100)).worst == pytest.approx(0.1)
    assert compare(t(0.11), t(0.01)).worst == pytest.approx(0.1)


def test_one_bad_element_among_many_fails_by_worst() -> None:
    ref = torch.ones(100_000)
    out = ref.clone()
    out[77] = 1.05
    found = compare(out, ref)
    assert found.relative < 4e-3
    assert not found.within(tolerance("row", "bfloat16"))


def test_a_scaled_result_fails_by_relative() -> None:
    ref = torch.full((1000,), 0.5)
    found = compare(ref * 1.01, ref)
    assert found.worst < 3e-2
    assert not found.within(tolerance("row", "bfloat16"))


@pytest.mark.parametrize(
    ("out", "ref", "same"),
    [
        ((NAN, 1.0), (NAN, 1.0), True),
        ((INF, 1.0), (INF, 1.0), True),
        ((NAN, 1.0), (0.0, 1.0), False),
        ((0.0, 1.0), (NAN, 1.0), False),
        ((INF, 1.0), (1e30, 1.0), False),
        ((-INF, 1.0), (INF, 1.0), False),
        ((NAN, 1.0), (INF, 1.0), False),
        ((INF, 1.0), (NAN, 1.0), False),
        ((NAN, INF), (INF, NAN), False),
    ],
)
def test_nonfinite_elements_must_be_the_same(out: tuple[float, ...], ref: tuple[float, ...], same: bool) -> None:
    assert compare(t(*out), t(*ref)).within(Tolerance(1.0, 1.0)) is same


def test_all_nan_passes_only_as_all_nan() -> None:
    assert compare(t(NAN, NAN), t(NAN, NAN)).within(Tolerance(0, 0))
    assert not compare(t(NAN, 0), t(NAN, NAN)).within(Tolerance(1, 1))


def test_shapes_must_match_exactly() -> None:
    assert not compare(torch.ones(1, 3), torch.ones(3)).within(Tolerance(1, 1))


def test_empty_is_equal() -> None:
    assert compare(torch.ones(0, 3), torch.ones(0, 3)).within(Tolerance(0, 0))


def test_zero_reference() -> None:
    assert compare(torch.zeros(3), torch.zeros(3)).within(Tolerance(0, 0))
    assert not compare(torch.full((3,), 1e-3), torch.zeros(3)).within(Tolerance(1e6, 1))


def test_integers_compare_exactly() -> None:
    big = 2**53 - 1
    assert compare(torch.tensor([big]), torch.tensor([big])).within(Tolerance(0, 0))
    assert not compare(torch.tensor([big]), torch.tensor([big - 1])).within(Tolerance(0, 0))
    assert not compare(torch.tensor([True]), torch.tensor([False])).within(Tolerance(0, 0))


def test_gradients_do_not_matter() -> None:
    x = torch.ones(3, requires_grad=True)
    assert compare(x * 1, x).within(Tolerance(0, 0))


@pytest.mark.parametrize("op_class", sorted(numerics.TOLERANCES))
@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_a_limit_allows_one_rounding_and_not_ten(op_class: str, dtype: str, unit: float) -> None:
    # half a unit in the last place is the largest relative error of one rounding
    limits = tolerance(op_class, dtype)
    assert unit / 2 < limits.relative < 10 * unit
    assert unit <= limits.worst


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_the_oracle_once_passes(dtype: str) -> None:
    ref = torch.randn(4096, dtype=torch.float64)
    assert compare(ref.to(getattr(torch, dtype)), ref).within(tolerance("row", dtype))


def test_unknown_dtypes_are_held_to_float32() -> None:
    assert tolerance("row", "int8") == tolerance("row", "float32")
    with pytest.raises(KeyError):
        tolerance("cell", "float32")


def test_a_sum_whose_digits_are_cut_off_is_within_the_bound() -> None:
    """Partial sums of 16 products each, cut to 24 bits: where terms cancel, what is cut off is no share of the sum."""
    steps, generator = 1792, torch.Generator().manual_seed(0)
    terms = torch.randn(steps, 5000, generator=generator, dtype=torch.float64)
    found = torch.zeros(5000)
    for term in terms:
        exact = found.double() + term
        near = exact.float()
        found = torch.where(near.double().abs() > exact.abs(), torch.nextafter(near, torch.zeros(())), near)
    off = (found.double() - terms.sum(0)).abs()
    ones = torch.ones(1, steps, dtype=torch.float64)
    shrink, cut = numerics.matrix_unit_shrink(16 * steps, 16)
    assert shrink == cut == steps * 2.0**-24 and numerics.matrix_unit_shrink(64, 32, "ieee") == (0.0, 0.0)
    assert numerics.matrix_unit_shrink(64, 32, "tf32") == (8 * 2.0**-24 + 2.0**-9, 8 * 2.0**-24)
    within = off / numerics.product_bound(ones, terms, shrink=shrink, cut=cut)[0]
    assert 0.3 < float(within.max()) <= 1
    assert not bool((off <= numerics.product_bound(ones, terms, shrink=shrink)[0]).all())
