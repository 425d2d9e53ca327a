"""The accuracy gate itself: what it lets through and what it stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.measure import numerics
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import ALL_RULES, RULES, Gate, accuracy, behaviour, failures
from wavecrest.optimizer.gate.inputs import KINDS, Variations
from wavecrest.optimizer.gate.leaves import collect
from wavecrest.optimizer.gate.process import ProcessState
from wavecrest.optimizer.gate.untouched import Untouched
from wavecrest.optimizer.steps.applied import AppliedStep, AppliedSteps
from wavecrest.records import BucketError


class Net(nn.Module):
    def __init__(self, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64, dtype=dtype)
        self.factor = factor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.linear(x) * self.factor, "count": torch.tensor([x.shape[0]])}


def test_the_original_passes() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    rows = Gate.prepare(workload).check(workload.model)
    assert {row.output for row in rows} == {"hidden", "count"} and not failures(rows)
    assert all(row.own > 0 for row in rows if row.output == "hidden")


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.0001), ("bfloat16", 1.05)], ids=["fp32", "bf16"])
def test_small_systematic_errors_are_stopped(dtype: str, factor: float) -> None:
    kind = getattr(torch, dtype)
    workload = from_example(Net(dtype=kind), torch.randn(8, 64, dtype=kind))
    assert "hidden" in failures(Gate.prepare(workload).check(Net(factor, kind)))


def test_rounding_of_the_same_size_passes() -> None:
    """Another order of summation is as good as the original's."""
    workload = from_example(Net(), torch.randn(8, 64))

    def reordered(x: Tensor) -> dict[str, Tensor]:
        order = torch.arange(63, -1, -1)
        linear = workload.model.linear
        return {
            "hidden": nn.functional.linear(x[:, order], linear.weight[:, order], linear.bias),
            "count": torch.tensor([x.shape[0]]),
        }

    assert not failures(Gate.prepare(workload).check(reordered))


def test_an_error_that_only_other_inputs_show_is_stopped() -> None:
    """A candidate that returns what it saw first would pass a check on the example alone."""
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    with torch.no_grad():
        remembered = workload.model(workload.buckets["default"].args[0])
    assert failures(gate.check(lambda x: remembered))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda out: {**out, "hidden": out["hidden"][:4]}, "shape"),
        (lambda out: {**out, "hidden": out["hidden"].index_fill(0, torch.tensor([1]), float("nan"))}, "NaN"),
        (lambda out: {**out, "count": out["count"] + 1}, "count"),
    ],
    ids=["shape", "nan", "integer"],
)
def test_structure_of_the_failure_is_named(change: object, word: str) -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    rows = Gate.prepare(workload).check(lambda x: change(workload.model(x)))  # type: ignore[operator]
    assert word in failures(rows)


def test_missing_output_is_refused() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    with pytest.raises(StepRefused, match="its outputs are"):
        gate.check(lambda x: {"hidden": x})
    with pytest.raises(StepRefused, match="raised ZeroDivisionError"):
        gate.check(lambda x: 1 / 0)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flip = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # the two best tokens are a hair apart: a tiny error swaps them
        values = x.clone()
        values[..., 1] = values[..., 0] - 1e-6
        if self.flip:
            values[..., 1] = values[..., 0] + 1e-6
        return {"logits": values}


def test_swapped_tokens_are_stopped_though_the_error_is_tiny() -> None:
    x = torch.rand(16, 8)
    x[..., 0] = 5
    model = Logits()
    gate = Gate.prepare(from_example(model, x))
    other = Logits()
    other.flip = True
    rows = {row.output: row for row in gate.check(other)}
    assert rows["logits"].passed and not rows["logits top-1"].passed


@dataclass
class Cache:
    """State that a call changes in place."""

    keys: Tensor
    position: Tensor


class Stateful(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        cache.keys.index_copy_(0, cache.position.view(1), x)
        cache.position.add_(1)
        return cache.keys.sum(0), cache


def test_state_in_the_inputs_is_compared_and_put_back() -> None:
    cache = Cache(torch.zeros(4, 8), torch.tensor(1))
    workload = Workload(Stateful(), {"one": Inputs((torch.randn(1, 8), cache))})
    gate = Gate.prepare(workload)
    rows = gate.check(workload.model)
    assert {row.output for row in rows} == {
        "[0]", "args[1].keys after the call", "args[1].position after the call"
    } and not failures(rows)  # fmt: skip
    assert int(cache.position) == 1 and not cache.keys.any()


class Noisy(nn.Module):
    """Sums in any order: each call rounds another way, in low precision alone or as random numbers do."""

    def __init__(self, size: float, low_alone: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.size, self.low_alone, self.calls = size, low_alone, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        is_low = x.dtype == torch.bfloat16
        # in bfloat16 the answer is 5 % off, as that of a deep model may be
        y = self.linear(x) * (1.05 if is_low else 1.0)
        return y if self.low_alone and not is_low else y * (1 + self.size * (self.calls % 2))


@pytest.mark.parametrize(
    ("size", "low_alone", "passes"), [(0.03, True, True), (0.03, False, False), (0.2, True, False)]
)
def test_an_original_that_differs_from_itself_as_its_rounding_does(size: float, low_alone: bool, passes: bool) -> None:
    """Beyond the floor of 1 %: only what the model in higher precision does not show, and less than its own error."""
    workload = from_example(Noisy(size, low_alone), torch.randn(8, 64, dtype=torch.bfloat16))
    if not passes:
        with pytest.raises(StepRefused, match="not verifiable: called twice"):
            Gate.prepare(workload).check(workload.model)
        return
    gate = Gate.prepare(workload)
    assert not failures(gate.check(workload.model))
    (note,) = [note for row in gate.summary.buckets for note in row.notes if "not deterministic" in note]
    assert "differs by 0.0" in note and "in higher precision it does not" in note


class Projected(nn.Module):
    """Writes what a layer makes of its input into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.index_copy_(0, cache.position.view(1), self.linear(x))
        return x + cache.keys.sum(0)


def test_calls_with_gradients_leave_no_history_in_a_cache() -> None:
    """With a history it could not be copied, and PyTorch would pick other attention kernels for it."""
    cache = Cache(torch.zeros(4, 8), torch.tensor(1))
    workload = Workload(Projected(), {"one": Inputs((torch.randn(1, 8), cache))})
    gate = Gate.prepare(workload)
    assert "gradients" not in gate.summary.not_run and not failures(gate.check(workload.model))
    assert cache.keys.is_leaf and not cache.keys.requires_grad and not cache.keys.any()
    # the history of a view stays, so that nothing is called with gradients there
    views = Cache(torch.zeros(2, 4, 8)[0], torch.tensor(1))
    workload = Workload(Projected(), {"one": Inputs((torch.randn(1, 8), views))})
    gate = Gate.prepare(workload)
    assert "views" in gate.summary.not_run["gradients"] and not failures(gate.check(workload.model))
    assert not views.keys.requires_grad


class Rounded(Projected):
    """Rounds otherwise, and may write behind the position."""

    def __init__(self, other: Projected, beyond: int = 0) -> None:
        super().__init__()
        self.linear, self.beyond = other.linear, beyond

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        made = nn.functional.linear(x.double(), self.linear.weight.double(), self.linear.bias.double()).float()
        cache.keys.index_copy_(0, cache.position.view(1), made)
        cache.keys[int(cache.position) + 1 :][: self.beyond] += 1
        return x + cache.keys.sum(0)


def test_a_cache_that_holds_the_token_already_may_be_rounded_otherwise() -> None:
    """Timed before with the same token: the original's call changes nothing that can be seen."""
    torch.manual_seed(0)
    cache, x, model = Cache(torch.zeros(4, 8), torch.tensor(1)), torch.randn(1, 8), Projected()
    with torch.no_grad():
        model(x, cache)
        # the same for every token: no two calls show that it is written
        model.linear.weight[3] = 0
    gate = Gate.prepare(Workload(model, {"one": Inputs((x, cache))}))
    assert sorted(gate.sites[0].cases[0].written["args[1].keys"].places.tolist()) == list(range(8, 16))  # type: ignore[union-attr]
    assert not failures(gate.check(Rounded(model)))
    with pytest.raises(StepRefused, match=r"writes into places of .*keys that the original leaves alone"):
        gate.check(Rounded(model, beyond=1))


def test_nobody_is_blamed_for_a_cache_that_held_the_token_before_the_run() -> None:
    torch.manual_seed(0)
    cache, x, model = Cache(torch.zeros(4, 8), torch.tensor(1)), torch.randn(1, 8), Projected()
    with torch.no_grad():
        model(x, cache)
    workload = Workload(model, {"one": Inputs((x, cache))})
    held, before = Untouched(workload), cache.keys.clone()
    workload.run("one")
    gate = Gate.prepare(workload)
    held.learn(gate.writes)
    assert held.own_writes == ["input args[1].keys of bucket one"]
    with torch.no_grad():
        Rounded(model)(x, cache)
    assert not torch.equal(cache.keys, before) and held.put_back() == [] and torch.equal(cache.keys, before)


class Lossy(nn.Module):
    """A cache of bfloat16 keys that are 5 % off, as those of a deep model may be; `other` rounds otherwise by 4 %."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.other = nn.Linear(8, 4096, dtype=torch.bfloat16), other

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        made = self.linear(x)
        if made.dtype == torch.bfloat16:
            made = made * (1.05 + 0.04 * self.other)
        cache.keys.index_copy_(0, cache.position.view(1), made)
        return cache.keys.mean(0)


def test_places_whose_new_value_is_the_old_one_by_chance() -> None:
    """Two bfloat16 values are the same in one of some hundred places: in each case some of 4,096 show no change, and
    with the example, which was called before, none of them does."""
    torch.manual_seed(0)
    cache, x = Cache(torch.randn(8, 4096).bfloat16(), torch.tensor(7)), torch.randn(1, 8).bfloat16()
    with torch.no_grad():
        Lossy()(x, cache)
    gate = Gate.prepare(Workload(Lossy(), {"one": Inputs((x, cache))}))
    (site,) = gate.sites
    assert all(len(case.written["args[1].keys"].places) == 4096 for case in site.cases)  # type: ignore[arg-type]
    assert not failures(gate.check(Lossy(other=True)))


def test_a_state_that_may_not_hold_any_number() -> None:
    class Bounded(Projected):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            if cache.keys.abs().max() > 1000:
                raise ValueError("keys out of bounds")
            return super().forward(x, cache)

    workload = Workload(Bounded(), {"one": Inputs((torch.randn(1, 8), Cache(torch.zeros(4, 8), torch.tensor(1))))})
    gate = Gate.prepare(workload)
    assert not failures(gate.check(workload.model))
    (row,) = gate.summary.buckets
    assert any(note.endswith("by their changes alone: ValueError: keys out of bounds") for note in row.notes)


def drawn(inputs: Inputs, kind: str, seed: int = 7) -> list[Tensor]:
    return Variations.of(inputs, seed).draw(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_one_token_keeps_showing_it(kind: str) -> None:
    mask = Inputs((), {"attention_mask": torch.ones(1, 1, dtype=torch.int64)})
    for seed in range(8):
        assert bool(Variations.of(mask, seed).draw(kind)[0].all())


def test_variations_keep_what_must_stay() -> None:
    ids = torch.randint(0, 20, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 5:] = 0
    positions = torch.arange(10)
    bias = torch.full((2, 2), float("-inf"))
    inputs = Inputs(
        (torch.randn(4, 4),), {"ids": ids, "mask": mask, "positions": positions, "bias": bias, "cache": torch.zeros(3)}
    )
    example, varied = drawn(inputs, "example"), drawn(inputs, "noise")
    assert torch.equal(example[0], inputs.args[0])
    assert not torch.allclose(varied[0], inputs.args[0])
    assert not torch.equal(varied[1], ids) and int(varied[1].max()) <= int(ids.max()) and int(varied[1].min()) >= 0
    for before, after in zip((mask, positions, bias, torch.zeros(3)), varied[2:], strict=True):
        assert torch.equal(after, before)
    again, other = drawn(inputs, "noise"), drawn(inputs, "noise", seed=8)
    assert all(torch.equal(a, b) for a, b in zip(varied, again, strict=True))
    assert not torch.equal(varied[0], other[0])


@pytest.mark.parametrize(
    "value",
    [torch.tensor([[5]]), torch.arange(32) % 7, torch.randint(0, 255, (1, 3, 4, 4), dtype=torch.uint8),
     torch.tensor([3, 1, 2], dtype=torch.int16), torch.tensor(0.5), torch.zeros(2, 3), torch.ones(5)],
    ids=["one token", "packed ids", "image", "int16", "scalar", "zeros", "ones"],
)  # fmt: skip
def test_every_dtype_and_shape_varies(value: Tensor) -> None:
    variations = Variations.of(Inputs((value,)), 3)
    (varied,) = variations.draw("noise")
    assert not torch.equal(varied, value) and varied.dtype == value.dtype and varied.shape == value.shape
    if not value.is_floating_point():
        assert int(varied.min()) >= 0 and int(varied.max()) <= int(value.max())


def test_twins_differ_in_their_interior_alone() -> None:
    inputs = Inputs((torch.randn(4, 8), torch.randint(0, 99, (2, 8))))
    for one, twin in zip(drawn(inputs, "noise"), drawn(inputs, "twins"), strict=True):
        a, b = one.flatten(), twin.flatten()
        assert a[0] == b[0] and a[-1] == b[-1] and not torch.equal(a, b)
        assert torch.equal(a.sort().values, b.sort().values)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(4, 6, dtype=torch.bool), torch.ones(1, 6, dtype=torch.int64), torch.zeros(2, 1, 6, 6)],
    ids=["bool", "int", "additive"],
)
def test_a_mask_without_padding_gets_some_and_every_row_keeps_its_first_place(mask: Tensor) -> None:
    (padded,) = drawn(Inputs((), {"attention_mask": mask}), "padding")
    shown = padded == 0 if mask.is_floating_point() else padded.bool()
    assert not bool(shown.all()) and bool(shown[..., 0].all()) and not bool((shown.int().diff(dim=-1) > 0).any())


def test_edges_have_large_values_and_a_row_of_zeros() -> None:
    (edges,) = drawn(Inputs((torch.randn(6, 8),)), "edges")
    assert not edges[0].any() and float(edges[3].abs().max()) > 30


def test_token_ids_stay_below_the_rows_of_their_embedding() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(1000, 8), nn.Embedding(4, 8)

        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            return self.tokens(ids) + self.places(places)

    workload = from_example(Model(), (torch.tensor([[5, 0, 3, 1]]), torch.tensor([[0, 2, 1, 0]])))
    gate = Gate.prepare(workload)
    assert not failures(gate.check(workload.model))
    highs = [item.high for item in gate.sites[0].variations.varied]
    assert highs == [999, 3]


def test_inputs_are_put_back_after_an_error() -> None:
    x = torch.ones(3, 4)
    workload = from_example(nn.Linear(4, 4), x)
    gate = Gate.prepare(workload)

    def raises(x: Tensor) -> Tensor:
        x.zero_()
        raise ValueError

    with pytest.raises(StepRefused, match="ValueError"):
        gate.check(raises)
    assert torch.equal(x, torch.ones(3, 4))


class Known(nn.Module):
    """Whatever it is given, it answers `exact`, off by `error` where it computes in float32."""

    def __init__(self, exact: Tensor, error: Tensor, name: str = "hidden") -> None:
        super().__init__()
        self.register_buffer("exact", exact)
        self.register_buffer("error", error)
        self.name = name

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # an answer that never depends on the input is not verified: x goes with it
        if x.dtype == torch.float32:
            return {self.name: (self.exact.double() + self.error.double()).float(), "x": x + 0}
        return {self.name: self.exact.clone(), "x": x + 0}


SIZE = 4096
X = torch.ones(2, 2)


def judged(exact: Tensor, own: Tensor, candidate: Tensor, name: str = "hidden") -> dict[str, bool]:
    """Whether each output passes, for an original that is off by `own` and a candidate off by `candidate`."""
    gate = Gate.prepare(from_example(Known(exact, own, name), X))
    return {row.output: row.passed for row in gate.check(Known(exact, candidate, name)) if row.output != "x"}


# the floors of float32: 2e-5 of the norm, 2e-3 of the largest element
EXACT = torch.full((SIZE,), 0.25)


@pytest.mark.parametrize(("factor", "passes"), [(0.0, True), (1.9, True), (2.1, False), (-2.1, False)])
def test_the_error_may_be_twice_the_original_own(factor: float, passes: bool) -> None:
    own = torch.full((SIZE,), 0.25 * 1e-3)
    assert judged(EXACT, own, factor * own) == {"hidden": passes}


@pytest.mark.parametrize(("error", "passes"), [(1.9e-5, True), (2.1e-5, False)])
def test_below_the_floor_an_original_without_error_sets_no_limit(error: float, passes: bool) -> None:
    assert judged(EXACT, torch.zeros(SIZE), EXACT * error) == {"hidden": passes}


def test_the_floor_does_not_hold_where_the_original_is_worse() -> None:
    own = torch.full((SIZE,), 0.25 * 1e-3)
    gate = Gate.prepare(from_example(Known(EXACT, own), X))
    row, _ = gate.check(Known(EXACT, own))
    assert row.own == pytest.approx(1e-3, rel=1e-3) and row.limit == pytest.approx(2e-3, rel=1e-3)
    assert row.error == pytest.approx(row.own)


@pytest.mark.parametrize(("factor", "passes"), [(1.9, True), (2.1, False)])
def test_the_largest_element_may_be_twice_as_far_off_as_the_originals(factor: float, passes: bool) -> None:
    """A single element: its share of the norm is inside the limit on the whole."""
    own = torch.full((SIZE,), 1e-3)
    own[7] = 1e-2
    one = torch.zeros(SIZE)
    one[7] = factor * 1e-2
    gate = Gate.prepare(from_example(Known(EXACT, own), X))
    row, _ = gate.check(Known(EXACT, one))
    assert row.passed is passes and row.error < row.limit
    assert ("largest element error 2.10e-02, allowed 2.00e-02" in row.note) is not passes


@pytest.mark.parametrize(("error", "passes"), [(1.9e-3, True), (2.1e-3, False)])
def test_the_floor_of_the_largest_element(error: float, passes: bool) -> None:
    one = torch.zeros(SIZE * 64)
    one[7] = error
    assert judged(torch.full((SIZE * 64,), 0.25), torch.zeros(SIZE * 64), one) == {"hidden": passes}


POSITIONS, TOKENS = 1000, 4


def _swaps(count: int) -> Tensor:
    """A tiny error that makes another token the most likely one at `count` of POSITIONS positions."""
    error = torch.zeros(POSITIONS, TOKENS)
    error[:count, 1] = 2e-6
    return error


@pytest.mark.parametrize(
    ("own", "candidate", "passes"), [(0, 9, True), (0, 11, False), (20, 29, True), (20, 31, False), (20, 0, True)]
)
def test_one_percent_of_top_1_may_differ_beyond_the_originals_own(own: int, candidate: int, passes: bool) -> None:
    exact = torch.zeros(POSITIONS, TOKENS)
    exact[:, 0], exact[:, 1] = 1.0, 1.0 - 1e-6
    found = judged(exact, _swaps(own), _swaps(candidate), "logits")
    assert found == {"logits": True, "logits top-1": passes}


@pytest.mark.parametrize("value", [1000, 1], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_are_exact_everywhere(dtype: torch.dtype, value: int) -> None:
    """One element of many off by one: far below every limit on floating numbers."""
    right = torch.full((100_000,), value % 251).to(dtype)
    wrong = right.clone()
    wrong[77] = 0 if dtype == torch.bool else wrong[77] + 1
    gate = Gate.prepare(from_example(Answers(right), X))
    assert not failures(gate.check(Answers(right)))
    row, _ = gate.check(Answers(wrong))
    assert not row.passed and row.limit == 0


def test_whole_numbers_may_be_the_originals_or_the_references() -> None:
    """Where those differ the original decided between two values closer than its rounding."""
    original, right = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    expected = accuracy.Expected.of("y", original, right, edge=False, hold=1 << 30)
    for out, passes in ((original, True), (right, True), (torch.tensor([1, 2, 5]), False), (original[:2], False)):
        (row,) = accuracy.judge("b", "y", out, expected, "float32", "float32", ALL_RULES)
        assert row.passed == passes, out


class Answers(nn.Module):
    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.register_buffer("answer", answer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.answer.clone(), x + 0


def test_one_set_of_values_is_enough_to_fail() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    assert [case.kind for case in gate.sites[0].cases] == ["example", "noise", "twins", "edges"]
    for bad in range(len(KINDS)):
        calls = iter(range(10))

        def candidate(x: Tensor, bad: int = bad, calls: Iterator[int] = calls) -> dict[str, Tensor]:
            out: dict[str, Tensor] = workload.model(x)
            return {**out, "hidden": out["hidden"] * (1.001 if next(calls) == bad else 1)}

        assert "hidden" in failures(gate.check(candidate))


def test_the_worst_failure_is_named_and_the_others_counted() -> None:
    def row(name: str, error: float, passed: bool) -> BucketError:
        return BucketError(bucket="b", output=name, error=error, own=0.1, limit=0.2, passed=passed)

    rows = [row("small", 0.3, False), row("large", 0.9, False), row("fine", 0.1, True)]
    assert failures(rows) == "large of bucket b: error 9.00e-01, allowed 2.00e-01; 2 outputs fail"
    assert failures([row("nan", float("nan"), False), *rows]).startswith("nan of bucket b")
    assert failures([rows[2]]) == ""


def test_noise_holds_a_few_values_ten_times_as_large() -> None:
    (noise,) = drawn(Inputs((3 + 0.01 * torch.randn(1000),)), "noise")
    assert int((noise > 20).sum()) == 4 and float(noise.max()) < 40
    # a transposed input too
    (noise,) = drawn(Inputs((3 + 0.01 * torch.randn(250, 4).t(),)), "noise")
    assert noise.shape == (4, 250) and int((noise > 20).sum()) == 4


def test_rules_that_were_left_out_say_why() -> None:
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    gate.check(workload.model, skip={"keyword": "for a reason"})
    assert gate.summary.not_run == {"padding": "no input is a mask", "keyword": "for a reason"}

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, *args: Tensor) -> Tensor:
            self.calls += 1
            return args[0] * 2

    found = Gate.prepare(from_example(Counting(), torch.randn(3))).summary.not_run
    assert {"owned", "concurrent", "timing", "keyword"} <= found.keys()
    assert found["keyword"] == "its arguments cannot be named" and "calls write state" in found["timing"]


@pytest.mark.parametrize("steps", [("compile:default",), ("capture",), ()])
@pytest.mark.parametrize("final", [True, False])
def test_a_plan_is_checked_later_as_it_was_when_it_was_made(
    steps: tuple[str, ...], final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured model serves one thread at a time: `verify` must not hold it to more than the run did."""
    workload = from_example(Net(), torch.randn(8, 64))
    gate = Gate.prepare(workload)
    asked = {}
    monkeypatch.setattr(Gate, "check", lambda _gate, _model, **options: asked.update(options) or [])
    applied = AppliedSteps(tuple(AppliedStep(step, {}) for step in steps))
    check_applied(gate, workload.model, applied, final=final)
    wanted = {"gradients", "concurrent"} | (set() if final else {"keyword", "shapes"})
    assert asked["skip"].keys() == (wanted if steps else set()) and asked["graphs"] == bool(steps)
    assert asked["thorough"] == final and gate.dtype == "float32"


def test_elements_may_be_far_off_twice_as_often_as_the_originals_own() -> None:
    """Small elements, which no norm shows; the original loses 500 of 50,000, and a candidate may lose 1,000 or so."""
    right = torch.ones(100_000, dtype=torch.float64)
    right[:50_000] = 1e-6

    def lost(count: int) -> Tensor:
        out = right.float()
        out[:count] = 0
        return out

    expected = accuracy.Expected.of("y", lost(500), right, edge=False, hold=1 << 30)
    for count, passes in ((500, True), (1000, True), (1200, False), (5000, False)):
        rows = list(accuracy.judge("b", "y", lost(count), expected, "float32", "float32", ALL_RULES))
        assert rows[0].passed and all(row.passed for row in rows) == passes, count
    assert rows[-1].rule == "elements" and "off by more than 0.5" in rows[-1].note


def test_at_the_edge_a_precision_asked_for_may_lose_half_of_an_answer_at_most() -> None:
    """The original run in bfloat16 loses a tenth there, eight times of which would be nearly all of the answer."""
    right = torch.ones(1000, dtype=torch.float64)
    expected = accuracy.Expected.of("y", right.float(), right, edge=True, hold=1 << 30)
    expected.lowered["bfloat16"] = (numerics.compare(right.float() * 0.9, right), [0, 0, 1000])
    for lost, passes in ((0.49, True), (0.51, False)):
        rows = accuracy.judge("b", "y", right.float() * (1 - lost), expected, "bfloat16", "float32", ALL_RULES)
        assert all(row.passed for row in rows) == passes, lost


def test_freed_memory_that_is_filled_holds_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the sizes of an answer's tensors, which hold NaN in each of their dtypes."""
    filled: list[Tensor] = []
    full = torch.full

    def kept(*args: Any, **options: Any) -> Tensor:
        filled.append(full(*args, **options))
        return filled[-1]

    monkeypatch.setattr(torch, "full", kept)
    tensors = [torch.zeros(6), torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.float64)]
    behaviour.poison(collect(tensors))
    assert [one.numel() for one in filled] == [one.nbytes for one in tensors for _ in range(behaviour.POISONED_BLOCKS)]
    for place, block in enumerate(filled):
        assert block.view(tensors[place // behaviour.POISONED_BLOCKS].dtype).isnan().all()


def test_hooks_on_every_module_that_were_there_before_stay() -> None:
    said: list[str] = []
    register = torch.nn.modules.module.register_module_forward_hook
    before = register(lambda *_: said.append("before"))
    try:
        state = ProcessState()
        register(lambda *_: said.append("candidate's"))
        assert state.put_back() == ["it left a hook on every module"]
        nn.Identity()(torch.zeros(1))
        assert said == ["before"] and state.put_back() == []
    finally:
        before.remove()


def test_the_page_names_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proof.md").read_text(encoding="utf-8")
    table = page[page.index("| rule | holds") :]
    named = {
        name.strip() for row in table.splitlines()[2:] if row.startswith("| ") for name in row.split("|")[1].split(",")
    }
    assert named == set(RULES)


@pytest.fixture
def settings() -> Iterator[Any]:
    """PyTorch's precisions by device, and the older setting for all, as they were."""
    backends: Any = torch.backends
    yield backends
    for one in (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        one.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True


def test_precisions_that_a_user_has_set_by_device_are_read_and_put_back(settings: Any) -> None:
    """The older settings, for all devices, cannot be read then: PyTorch raises."""
    settings.cuda.matmul.fp32_precision, settings.cudnn.conv.fp32_precision = "tf32", "ieee"
    for read in (torch.get_float32_matmul_precision, lambda: settings.cudnn.allow_tf32):
        with pytest.raises(RuntimeError, match="mix"):
            read()
    state = ProcessState()
    assert state.put_back() == []
    settings.cuda.matmul.fp32_precision = "ieee"
    (told,) = state.put_back()
    assert told.startswith("it changed the float32 matmul precision from ('tf32', ")
    assert settings.cuda.matmul.fp32_precision == "tf32"


def test_a_precision_that_a_step_sets_by_device_is_seen(settings: Any) -> None:
    state = ProcessState()
    settings.cuda.matmul.fp32_precision = "tf32"
    (told,) = state.put_back()
    assert told.startswith("it changed the float32 matmul precision from highest to ('tf32', ")
    assert torch.get_float32_matmul_precision() == "highest" and settings.cuda.matmul.fp32_precision != "tf32"


def test_the_step_for_tf32_runs_where_a_user_has_set_a_precision_by_device(settings: Any) -> None:
    from wavecrest.optimizer.steps.precision import _TF32

    settings.cuda.matmul.fp32_precision = "tf32"
    settings.mkldnn.matmul.fp32_precision = "ieee"
    seen = []

    class Model(nn.Module):
        def forward(self) -> None:
            seen.append((settings.cuda.matmul.fp32_precision, settings.mkldnn.matmul.fp32_precision))

    _TF32(Model())()
    assert seen == [("tf32", "tf32")] and settings.mkldnn.matmul.fp32_precision == "ieee"
