"""Input sets that timed calls go round: what rotates, what must not, and the caches that gain nothing by it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.clock import SimulatedClock
from wavecrest.graphs.capture import CapturedModule
from wavecrest.measure import timing
from wavecrest.measure.rotation import HELD, HELD_BYTES, SETS, Rotation
from wavecrest.measure.workload import Call, Inputs, Workload, from_example


def rotation(*args: Any, **kwargs: Any) -> Rotation:
    made = Rotation(Inputs(args, kwargs))
    made.start()
    return made


def refresh(made: Rotation, seed: int = 0) -> None:
    made.refresh(np.random.default_rng(seed))


def test_sets_have_other_addresses_and_other_values_of_the_same_shape() -> None:
    x, ids = torch.randn(4, 6), torch.randint(0, 100, (2, 8))
    made = rotation(x, ids=ids)
    assert made.sets == SETS and made.current is made.example
    seen: list[tuple[Tensor, Tensor]] = []
    for block in range(3):
        refresh(made, block)
        for slot in range(3):
            made.use(slot)
            a, b = made.current.args[0], made.current.kwargs["ids"]
            seen.append((a.clone(), b.clone()))
            assert a.shape == x.shape and a.dtype == x.dtype and b.dtype == ids.dtype
            assert a.data_ptr() != x.data_ptr() and b.data_ptr() != ids.data_ptr()
            # noise of the same scale, and the same ids in another order
            assert 0.96 < float(a.norm() / x.norm()) < 1.04 and torch.equal(a.sign(), x.sign())
            assert torch.equal(b.reshape(-1).sort().values, ids.reshape(-1).sort().values)
    assert all(not torch.equal(a[0], b[0]) for i, a in enumerate(seen) for b in seen[:i])
    # the first and the last element too, which a cheap key would be made of
    assert len({float(a[0, 0]) for a, _ in seen}) == len({float(a[-1, -1]) for a, _ in seen}) == len(seen)
    assert sum(not torch.equal(ids, b) for _, b in seen) == len(seen)
    made.release()
    assert made.current is made.example


def test_one_slot_is_one_set_of_inputs() -> None:
    made = rotation(torch.randn(3, 3))
    refresh(made)
    made.use(1)
    first = made.current.args[0].clone()
    made.use(2)
    assert not torch.equal(first, made.current.args[0])
    made.use(1)
    assert torch.equal(first, made.current.args[0])
    where = made.current.args[0].data_ptr()
    refresh(made, 1)
    made.use(1)
    assert made.current.args[0].data_ptr() != where


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 8, dtype=torch.int64),
        torch.arange(9, dtype=torch.int32),
        torch.tensor([[5]]),
        torch.tensor(0.5),
        torch.tensor([0.0, float("-inf"), 0.0]),
        torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        torch.tensor([True, False]),
        torch.randn(4, dtype=torch.complex64),
    ],
    ids=["mask", "offsets", "token", "scalar", "additive mask", "two values", "bool", "complex"],
)
def test_values_that_may_mean_something_stay(value: Tensor) -> None:
    made = rotation(value)
    refresh(made)
    made.use(1)
    assert torch.equal(made.current.args[0], value) and made.current.args[0].data_ptr() != value.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16])
def test_images_and_narrow_types_vary(dtype: torch.dtype) -> None:
    x = (100 * torch.rand(2, 3, 16, 16)).to(dtype)
    made = rotation(x)
    refresh(made)
    made.use(1)
    assert not torch.equal(made.current.args[0], x)


def test_long_integers_are_shifted() -> None:
    x = torch.arange(90_000).reshape(300, 300)
    made = rotation(x)
    refresh(made)
    made.use(1)
    found = made.current.args[0]
    assert not torch.equal(found, x) and torch.equal(found.reshape(-1).sort().values, x.reshape(-1))


def test_containers_are_gone_into_and_objects_are_shared() -> None:
    cache = SimpleNamespace(keys=torch.zeros(2, 3), position=torch.tensor([1]))
    x, y = torch.randn(3), torch.randn(3)
    made = rotation([x, {"y": (y, cache)}], cache, again=x)
    made.use(0)
    (first, inner), same = made.current.args[0], made.current.kwargs["again"]
    assert same is first and first is not x and inner["y"][0] is not y
    assert inner["y"][1] is cache is made.current.args[1]
    assert type(made.current.args[0]) is list and type(inner["y"]) is tuple


def test_strides_stay() -> None:
    x = torch.randn(4, 6).t()
    gaps = torch.randn(4, 12)[:, ::2]
    made = rotation(x, gaps)
    refresh(made)
    made.use(0)
    assert [one.stride() for one in made.current.args] == [x.stride(), gaps.stride()]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(1, 4).expand(3, 4),
        torch.randn(4, requires_grad=True),
        torch.nn.Parameter(torch.randn(4)),
        torch.randn(4).to_sparse(),
    ],
    ids=["overlapping", "with gradients", "parameter", "sparse"],
)
def test_what_a_copy_cannot_stand_in_for_stays(value: Tensor) -> None:
    made = rotation(value, torch.randn(2))
    made.use(0)
    assert made.current.args[0] is value


def test_a_tensor_that_calls_write_to_stays() -> None:
    """A cache that is passed as a plain tensor, and the position that `reset` writes."""
    cache, position, x = torch.zeros(4), torch.zeros(1), torch.randn(4)
    made = Rotation(Inputs((cache, position, x)))
    cache.add_(1)
    position.zero_()
    made.start()
    made.use(0)
    assert made.current.args[0] is cache and made.current.args[1] is position and made.current.args[2] is not x


def test_inputs_that_calls_replace_do_not_rotate() -> None:
    inputs = Inputs(([torch.randn(2)],))
    made = Rotation(inputs)
    inputs.args[0][0] = torch.randn(2)
    made.start()
    assert made.sets == 0
    made.use(0)
    refresh(made)
    assert made.current is inputs


def test_large_inputs_have_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.measure.rotation.MOST_BYTES", 2 * 4096 * 4)
    assert rotation(torch.randn(4096)).sets == 2
    assert rotation(torch.randn(1024)).sets == SETS


class Caching(torch.nn.Module):
    """Takes 10 ms a call, or nothing where `key` was seen before."""

    def __init__(self, clock: SimulatedClock, key: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.clock, self.key, self.seen = clock, key, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.key is None or self.key(x) not in self.seen:
            self.clock.advance(0.010)
        self.clock.advance(0.001)
        if self.key is not None:
            self.seen[self.key(x)] = True
        return x


@pytest.mark.parametrize(
    "key",
    [
        lambda x: x.numpy().tobytes(),
        lambda x: (float(x[0, 0]), float(x[-1, -1])),
        lambda x: (x.data_ptr(), x._version),
    ],
    ids=["by value", "by first and last", "by address and version"],
)
def test_a_cache_gains_nothing(key: Callable[[Tensor], Any]) -> None:
    clock = SimulatedClock()
    workload = from_example(torch.nn.Identity(), torch.randn(4, 8))
    rotating = Rotation(workload.buckets["default"])
    base, new = (
        Call(workload, "default", Caching(clock, one), rotating)  # type: ignore[arg-type]
        for one in (None, key)
    )
    pair = timing.measure_pair(base, new, device="cpu", seconds=1.0, rotation=rotating, seed=0, now=clock)
    assert pair.ratio == pytest.approx(1.0) and rotating.current is workload.buckets["default"]
    alone = timing.measure(new, device="cpu", seconds=1.0, rotation=rotating, now=clock)
    assert alone.median == pytest.approx(11.0)
    # and without rotation it does
    still = timing.measure_pair(
        Call(workload, "default", Caching(clock, None)),
        Call(workload, "default", Caching(clock, key)),
        device="cpu",
        seconds=1.0,
        now=clock,
    )
    assert still.ratio == pytest.approx(11.0)


def test_outputs_are_passed_on_from_blocks_that_do_not_count() -> None:
    """Both sides on the same inputs, right after the call, and the time that the check takes is in no sample."""
    clock = SimulatedClock()
    workload = from_example(torch.nn.Identity(), torch.randn(4, 8))
    rotating = Rotation(workload.buckets["default"])
    seen: list[tuple[str, Tensor, int]] = []

    def keep(side: timing.Side, output: Any, index: int) -> None:
        seen.append((side, output.clone(), index))
        clock.advance(100.0)

    calls = [Call(workload, "default", Caching(clock, None), rotating) for _ in range(2)]  # type: ignore[arg-type]
    pair = timing.measure_pair(
        *calls, device="cpu", seconds=1e6, min_blocks=100, rotation=rotating, seed=0, on_output=keep, now=clock
    )
    assert pair.n >= 100 and max(pair.base + pair.new) == pytest.approx(11.0)
    assert 4 <= len(seen) <= pair.n and len(seen) % 4 == 0
    for start in range(0, len(seen), 4):
        block = {(side, index): output for side, output, index in seen[start : start + 4]}
        for index in (1, 2):
            assert torch.equal(block["base", index], block["new", index])
        assert not torch.equal(block["base", 1], block["base", 2])


@pytest.mark.gpu
def test_a_captured_model_sees_the_values_of_each_set() -> None:
    layer = torch.nn.Linear(8, 8).cuda()
    captured = CapturedModule(layer)
    made = Workload(layer, {"a": Inputs((torch.randn(4, 8, device="cuda"),))})
    rotating = Rotation(made.buckets["a"])
    call = Call(made, "a", captured, rotating)
    call()
    rotating.start()
    for block in range(3):
        refresh(rotating, block)
        for slot in range(SETS):
            rotating.use(slot)
            with torch.no_grad():
                torch.testing.assert_close(call(), layer(*rotating.current.args))
    assert len(captured._graphs) == 1 and not captured.eager_calls


def test_what_calls_allocate_moves_from_block_to_block() -> None:
    """The heap is another one in each block, and as it was at the end."""
    random = np.random.default_rng(0)
    rotation = Rotation(Inputs((torch.randn(4, 4),)))
    rotation.start()
    seen = set()
    for _ in range(20):
        rotation.refresh(random)
        assert len(rotation._held) == HELD
        assert all(HELD_BYTES[0] <= block.nbytes <= HELD_BYTES[1] for block in rotation._held)
        seen.add(tuple(block.data_ptr() for block in rotation._held))
    assert len(seen) == 20
    rotation.release()
    assert not rotation._held
