"""Graph capture: what replays must equal what runs, for inputs that the capture never saw, on a real GPU too."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.graphs.capture import CapturedModule, CaptureWarning
from wavecrest.measure import cuda_graph
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.steps import StepContext, step_by_id


@dataclass
class Cache:
    keys: Tensor
    position: Tensor


class Decode(nn.Module):
    """Writes at the cache's position and moves it on, as a static key-value cache does."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.index_copy_(0, cache.position.view(1), x)
        cache.position.add_(1)
        return cache.keys.cumsum(0)


def test_cpu_has_nothing_to_capture() -> None:
    workload = from_example(nn.Linear(4, 4), torch.randn(2, 4))
    found = step_by_id("capture").find(StepContext(workload, hardware.cpu()))
    assert found.sites == () and "GPU" in found.note


def test_a_plan_made_on_a_gpu_captures_nothing_on_the_cpu() -> None:
    """Beside a GPU it would: an empty graph, and the answer of the first call for all others."""
    with pytest.raises(StepRefused, match="graphs exist on GPUs only, and the model has parameters on the CPU"):
        step_by_id("capture").apply(nn.Linear(4, 4), {"buckets": ["default"], "compile": ""})


class Sums(nn.Module):
    """Takes tensors by place, by name and in a list, and numbers that choose what is computed."""

    def forward(
        self, x: Tensor, *, more: list[Tensor] | None = None, mask: Tensor | None = None, twice: bool = False
    ) -> Any:
        total = x + sum(more or [])
        total = total if mask is None else total * mask
        return {"total": total * 2 if twice else total, "parts": (x * 3, None, "text")}


class Replay:
    """A graph on a CPU: it runs its work again, and writes where its first answer lies."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.answer, self.replays = work, work(), 0

    def replay(self) -> None:
        self.replays += 1
        both = zip(pytree.tree_leaves(self.answer), pytree.tree_leaves(self.work()), strict=True)
        for old, new in both:
            if isinstance(old, Tensor):
                old.copy_(new)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Graphs that are captured in the test, which needs no GPU."""
    found: list[Replay] = []

    def record(work: Callable[[], Any], pool: object, what: str) -> tuple[Replay, Any]:
        found.append(Replay(work))
        return found[-1], found[-1].answer

    monkeypatch.setattr(cuda_graph, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    return found


@torch.no_grad()
def test_each_kind_of_call_has_its_graph_and_its_answer(replays: list[Replay]) -> None:
    model = Sums()
    captured = CapturedModule(model)

    def calls(rows: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, mask = torch.randn(rows, 2), torch.randn(rows, 2)
        return [
            ((x,), {}),
            ((), {"x": x}),
            ((x,), {"mask": mask}),
            ((x,), {"mask": mask, "twice": True}),
            ((x,), {"mask": mask, "twice": False}),
            ((x,), {"more": [mask, mask]}),
            ((x.double(),), {}),
            ((nn.Parameter(x),), {"mask": None}),
        ]

    for rows in (2, 2, 3, 2):
        for args, kwargs in calls(rows):
            found, expected = captured(*args, **kwargs), model(*args, **kwargs)
            assert torch.equal(found["total"], expected["total"]) and torch.equal(
                found["parts"][0], expected["parts"][0]
            )
            assert found["parts"][1:] == (None, "text") and found["total"].dtype == expected["total"].dtype
    assert len(replays) == 16 and sum(one.replays for one in replays) == 4 * 8 and not captured.eager_calls


@torch.no_grad()
def test_an_answer_that_the_caller_holds_stays(replays: list[Replay]) -> None:
    captured = CapturedModule(nn.Identity())
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    held = captured(first)
    assert captured(second).item() == 2.0 and held.item() == 1.0 and len(replays) == 1


@pytest.mark.gpu
def test_replay_equals_eager_on_other_inputs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda().eval()
    captured = CapturedModule(model)
    with torch.no_grad():
        first = captured(torch.randn(4, 64, device="cuda"))
        kept = first.clone()
        for _ in range(3):
            x = torch.randn(4, 64, device="cuda")
            torch.testing.assert_close(captured(x), model(x), rtol=1e-5, atol=1e-5)
        # an output that the caller holds is not overwritten by later replays
        assert torch.equal(first, kept)
        y = torch.randn(9, 64, device="cuda")
        torch.testing.assert_close(captured(y), model(y), rtol=1e-5, atol=1e-5)
    assert captured.eager_calls == 0
    with pytest.warns(CaptureWarning, match="gradients are enabled"):
        captured(torch.randn(4, 64, device="cuda"))
    assert captured.eager_calls == 1


@pytest.mark.gpu
def test_capture_does_not_advance_the_state() -> None:
    def cache() -> Cache:
        return Cache(torch.zeros(8, 16, device="cuda"), torch.tensor(2, device="cuda"))

    ours, theirs = cache(), cache()
    captured = CapturedModule(Decode())
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 16, device="cuda")
            torch.testing.assert_close(captured(x, ours), Decode()(x, theirs))
    assert int(ours.position) == int(theirs.position) == 5


@pytest.mark.gpu
def test_an_error_inside_a_capture_is_the_reason() -> None:
    """It was hidden by one of putting the allocator right: torch had ended the capture by itself."""

    def work() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("No available kernel")
        return x + 1

    x = torch.zeros(4, device="cuda")
    cuda_graph.warm_up(work)
    with pytest.raises(StepRefused, match="it cannot be captured: No available kernel"):
        cuda_graph.record(work, torch.cuda.graph_pool_handle(), "it")
    torch.randn(4, device="cuda")
    graph, out = cuda_graph.record(lambda: x + 2, torch.cuda.graph_pool_handle(), "it")
    graph.replay()
    assert out.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_a_model_that_writes_into_its_argument_is_refused() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x + 1

    with torch.no_grad(), pytest.raises(StepRefused, match="writes into its tensor argument"):
        CapturedModule(InPlace())(torch.randn(4, device="cuda"))


@pytest.mark.gpu
def test_a_model_that_synchronizes_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x

    with torch.no_grad(), pytest.raises(StepRefused, match="cannot be captured"):
        CapturedModule(Reads())(torch.randn(4, device="cuda"))
    # a failed capture leaves nothing behind: random numbers, allocation and the next capture work
    x = torch.randn(1 << 20, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(CapturedModule(nn.ReLU())(x), x.relu())
    del x
    torch.cuda.empty_cache()
    assert float(torch.randn(1024, device="cuda").std()) > 0.5


# what a process does that tries one capture after another, and torch's own graph trees in between
SHARED = """
import gc
import torch
from torch import nn
from wavecrest.graphs.capture import CapturedModule

# sizes of a BERT, whose products take a workspace
sizes = (768, 768, 3072, 768)
model = nn.Sequential(*(nn.Linear(k, n) for k, n in zip(sizes, sizes[1:]))).cuda().half().eval()
x = torch.randn(16384, 768, device="cuda", dtype=torch.float16)
with torch.no_grad():
    want = model(x)
    first, second = CapturedModule(model), CapturedModule(model)
    first(x), second(x)
    torch.cuda.synchronize()
    del first
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # memory that is mapped again is somebody else's
    other = [torch.zeros(size << 20, device="cuda", dtype=torch.uint8) for size in (32, 64, 128, 256)]
    for _ in range(3):
        torch.testing.assert_close(second(x), want)
    assert not any(one.any() for one in other), "a replay wrote into memory of others"
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_graph_outlives_those_captured_before_it() -> None:
    """In a process of its own: without a workspace of its own the replay takes the whole context down."""
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_graph_is_recorded_between_two_clearings_of_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def graph(*_arguments: object, **_options: object) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    cuda_graph.record(lambda: done.append("work"), None, "it")
    assert done == ["clear", "begin", "work", "end", "clear"]
