"""Declared ranges of shapes: sizes, padding that keeps answers, refusals, calls that nothing is compiled for."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import Buckets
from wavecrest.errors import ShapeWarning, StepRefused, WorkloadError
from wavecrest.graphs.bucketed import Bucketed
from wavecrest.graphs.inductor import PRESETS, compile_dynamic, compile_module
from wavecrest.measure.ranges import Ranges, resized, shape_of
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.ranged import drawn, gated


class Encoder(nn.Module):
    """Attention over what the mask shows, and the mean of it; `leaks` forgets the mask."""

    def __init__(self, *, leaks: bool = False, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.leaks, self.extra = leaks, extra
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        if not torch.compiler.is_compiling():
            self.seen.append(tuple(input_ids.shape))
        x = self.embedding(input_ids)
        hidden = (x @ x.mT).masked_fill(~attention_mask[:, None].bool(), -1e9).softmax(-1) @ x
        shown = torch.ones_like(attention_mask) if self.leaks else attention_mask
        pooled = (self.out(hidden) * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)
        # an axis that grows with both
        grown = {"both": x.flatten(0, 1)} if self.extra else {}
        return {"hidden": hidden, "pooled": pooled, "width": 8, **grown}


def example(batch: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % 60 + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


RANGES = Ranges((1, 4), (1, 48))


def test_sizes_lie_a_third_apart_and_hold_every_call() -> None:
    assert RANGES.batches == [1, 2, 4] and RANGES.lengths == [16, 24, 32, 48]
    assert Ranges((3, 3), (40, 100)).batches == [3] and Ranges((3, 3), (40, 100)).lengths == [48, 64, 96, 100]
    assert Ranges((1, 1), (1, 5)).lengths == [5]
    assert Ranges((1, 64), (1, 4096)).lengths[-1] == 4096
    for batch in range(1, 5):
        for length in range(1, 49):
            size = RANGES.size(batch, length)
            assert size is not None and size[0] >= batch and size[1] >= length
    assert RANGES.size(5, 1) is None and RANGES.size(1, 49) is None and RANGES.size(0, 1) is None


def test_an_empty_range_is_refused() -> None:
    for wrong in ((0, 4), (5, 4)):
        with pytest.raises(WorkloadError, match="is empty"):
            Ranges(wrong, (1, 4))


def test_inputs_are_cut_and_padded() -> None:
    made = resized(example(2, 6), 3, 8, padded=True)
    assert shape_of(made) == (3, 8)
    assert torch.equal(made["attention_mask"][:, 6:], torch.zeros(3, 2, dtype=torch.int64))
    assert torch.equal(made["input_ids"][2, :6], example()["input_ids"][0])
    assert torch.equal(resized(example(2, 6), 1, 4)["input_ids"], example()["input_ids"][:1, :4])
    repeated = resized(example(2, 6), 2, 8)
    assert bool(repeated["attention_mask"].all()) and torch.equal(
        repeated["input_ids"][:, 6:], example()["input_ids"][:, :2]
    )
    with pytest.raises(WorkloadError, match=r"attention_mask \[batch, length\]"):
        resized({"x": torch.ones(2, 6)}, 2, 8)


@pytest.mark.parametrize("size", [(1, 1), (2, 6), (3, 17), (4, 48), (1, 16)])
def test_a_padded_call_gives_the_answer_of_the_call(size: tuple[int, int]) -> None:
    model = Encoder().eval()
    served = Bucketed(model, model, RANGES, example())
    call = resized(example(), *size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        own, found = model(**call), served(**call)
    assert model.seen[-1] == RANGES.size(*size) and found["width"] == 8
    assert found["hidden"].shape == (*size, 8) and found["pooled"].shape == (size[0], 8)
    assert all(torch.allclose(found[name], own[name], atol=1e-6) for name in ("hidden", "pooled"))
    assert served.outside == 0


def test_a_model_that_forgets_its_mask_is_refused() -> None:
    model = Encoder(leaks=True).eval()
    with pytest.raises(StepRefused, match=r"padding changes the answers: a call of 2 × 17 tokens padded to 2 × 24"):
        Bucketed(model, model, RANGES, example())


def test_an_axis_of_neither_rows_nor_tokens_is_refused() -> None:
    model = Encoder(extra=True).eval()
    with pytest.raises(StepRefused, match=r"from 10 to 21 .*neither rows nor tokens"):
        Bucketed(model, model, RANGES, example())


def test_calls_beyond_the_ranges_run_the_original_are_counted_and_warn_once() -> None:
    inner, original = Encoder().eval(), Encoder().eval()
    served = Bucketed(inner, original, RANGES, example())
    with pytest.warns(
        ShapeWarning, match=r"a call of 2 × 49 tokens is beyond .*length=\(1, 48\).*Declare wider ranges"
    ):
        served(**example(2, 49))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(**example(5, 4))
    assert served.outside == 2 and original.seen[-2:] == [(2, 49), (5, 4)] and not inner.seen


def test_arguments_by_position_take_the_originals_names() -> None:
    inner, original = Encoder().eval(), Encoder().eval()
    served = Bucketed(inner, original, RANGES, example())
    ids, mask = resized(example(), 3, 17).values()
    with torch.no_grad():
        own = original(ids, mask)["pooled"]
        assert torch.allclose(served(ids, mask)["pooled"], own, atol=1e-6)
        assert torch.allclose(served(ids, attention_mask=mask)["pooled"], own, atol=1e-6)
    assert served.outside == 0 and inner.seen == [(4, 24), (4, 24)]


def test_arguments_that_do_not_fit_are_the_originals_to_refuse() -> None:
    model = Encoder().eval()
    served = Bucketed(model, model, RANGES, example())
    ids, mask = example().values()
    for args, kwargs in (((ids, mask, 1), {}), ((ids,), {"input_ids": ids, "attention_mask": mask})):
        with pytest.warns(ShapeWarning), pytest.raises(TypeError, match="argument"):
            served(*args, **kwargs)
        served.outside = 0


def test_every_size_is_compiled_beyond_dynamos_own_limit() -> None:
    """More sizes than Dynamo keeps variants of by default: none of them runs in eager."""
    model, inner = Encoder().eval(), Encoder().eval()
    ranges = Ranges((1, 1), (1, 192))
    assert len(ranges.lengths) > torch._dynamo.config.recompile_limit - 1
    counted: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        counted.append(graph)
        return graph.forward

    torch._dynamo.reset()
    inner._compiled_call_impl = torch.compile(inner._call_impl, dynamic=False, backend=backend)
    served = Bucketed(inner, model, ranges, example(1))
    with torch.no_grad():
        for length in ranges.lengths:
            served(**example(1, length))
            served(**example(1, length - 1))
    assert len(counted) == len(ranges.lengths) and served.outside == 0


@pytest.mark.parametrize("takes_limit", [True, False], ids=["limit of its own", "limit of the process"])
def test_a_dynamic_graph_has_more_variants_than_dynamos_own_limit(
    monkeypatch: pytest.MonkeyPatch, takes_limit: bool
) -> None:
    class Steps(nn.Module):
        """Another branch for each range of lengths."""

        def forward(self, x: Tensor) -> Tensor:
            for least in range(4, 48, 4):
                if x.shape[1] < least:
                    return x * least
            return x

    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    own = torch.compile

    def compiling(call: Any, dynamic: bool) -> Any:
        return own(call, dynamic=dynamic, backend=backend)

    limited = partial(own, backend=backend)
    if takes_limit and "recompile_limit" not in inspect.signature(own).parameters:
        pytest.skip("this torch has a limit for the process alone")
    monkeypatch.setattr(torch, "compile", limited if takes_limit else compiling)
    torch._dynamo.reset()
    model = Steps()
    compile_dynamic(model)
    with torch.no_grad():
        for length in range(3, 47, 4):
            assert torch.equal(model(torch.ones(2, length)), torch.full((2, length), length + 1.0))
    assert len(graphs) == 11 > torch._dynamo.config.recompile_limit


def test_dynamos_silent_end_of_compilation_is_a_warning() -> None:
    """The log line alone says it otherwise."""
    model = nn.Linear(2, 2).eval()
    torch._dynamo.reset()
    compile_module(model, PRESETS["default"])
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        model(torch.ones(1, 2))
        model(torch.ones(2, 2))
        with pytest.warns(ShapeWarning, match="run in eager from now on: declare ranges"):
            model(torch.ones(3, 2))
    torch._dynamo.reset()


def test_ranges_are_declared_in_buckets() -> None:
    workload = from_example(Encoder(), Buckets(example=example(), batch=(1, 4), length=(1, 48)))
    assert workload.ranges == RANGES and list(workload.buckets) == ["b1s16", "b2s32", "b4s48"]
    assert shape_of(workload.buckets["b4s48"].kwargs) == (4, 48)
    only = from_example(Encoder(), Buckets(example=example(), length=(1, 48)))
    assert only.ranges == Ranges((2, 2), (1, 48))
    assert from_example(Encoder(), Buckets(a=example())).ranges is None


@pytest.mark.parametrize("given", [{}, {"a": torch.ones(2)}, {"a": example(), "b": example()}])
def test_ranges_need_one_example_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="one example beside them"):
        from_example(Encoder(), Buckets(**given, length=(1, 48)))


@pytest.mark.parametrize("ranges", [RANGES, Ranges((1, 64), (1, 4096)), Ranges((2, 2), (8, 8)), Ranges((1, 2), (6, 6))])
def test_the_gate_looks_at_both_ends_and_at_odd_sizes_between(ranges: Ranges) -> None:
    (fewest, most), (shortest, longest) = ranges.batch, ranges.length
    for seed in range(20):
        sizes = gated(ranges, seed)
        assert sizes[0] == (fewest, shortest) and sizes[-1] == (most, longest) and sizes == gated(ranges, seed)
        assert all(ranges.size(*size) for size in sizes) and len(set(sizes)) == len(sizes) <= 4
        assert all(size[0] % 2 or size[0] in ranges.batch or most < 3 for size in sizes)
        assert all(size[1] % 2 or size[1] in ranges.length for size in sizes)
    if longest > shortest:
        assert len({tuple(gated(ranges, seed)) for seed in range(20)}) > 5


def test_drawn_calls_lie_in_the_ranges_and_are_the_same_again() -> None:
    sizes = [shape_of(call) for call in drawn(RANGES, example(), 200)]
    assert sizes == [shape_of(call) for call in drawn(RANGES, example(), 200)]
    lengths = [size[1] for size in sizes if size is not None]
    assert min(lengths) == 1 and max(lengths) > 40 and sorted(lengths)[100] < 15
