"""Attention that is written out becomes one call only where a backend of it is faster than its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wavecrest.errors import Unsupported
from wavecrest.graphs.attention import name_of
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.optimizer.steps import attention_choices as module
from wavecrest.optimizer.steps.attention_choices import attention_choices

WINDOWS = FlashAttentionCall(
    *[torch.empty(4, 6, 49, 32, device="meta")] * 3, "bhsd", softmax_scale=0.5, bias=torch.empty(1, 6, 49, 49)
)


def timer(times: dict[str, float | Exception], asked: list[str]) -> Callable[[Callable[[], Any]], float]:
    """Times by what is called: a backend's name, or "parts"."""

    def time(work: Any) -> float:
        name = "parts" if work.func is module._written else work.args[0]
        asked.append(name)
        found = times[name]
        if isinstance(found, Exception):
            raise found
        return found

    return time


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_names", lambda _call: ["torch", "triton"])


def test_the_name_says_what_a_time_depends_on() -> None:
    assert name_of(WINDOWS) == "4x6x49x49x32x32 float32 bias 1x6x49x49"
    assert name_of(WINDOWS._replace(bias=None)) == "4x6x49x49x32x32 float32"


@pytest.mark.parametrize(
    ("torch_ms", "triton_ms", "chosen"), [(0.3, 0.1, "triton"), (0.2, 0.25, "torch"), (0.32, 0.315, None), (9, 9, None)]
)
def test_the_fastest_backend_must_beat_the_parts(
    two_backends: None, torch_ms: float, triton_ms: float, chosen: str | None
) -> None:
    asked: list[str] = []
    times: dict[str, float | Exception] = {"torch": torch_ms, "triton": triton_ms, "parts": 0.324}
    found = attention_choices([WINDOWS, WINDOWS], "cpu", timer(times, asked))
    name = name_of(WINDOWS)
    # the same call is timed once
    assert sorted(asked) == ["parts", "torch", "triton"]
    if chosen is not None:
        assert found == ({name: chosen}, {}, {}) and found.note == ""
    else:
        assert found.backends == {} and found.note.startswith(f"; attention {name} stays written out: t")
        assert found.note.endswith("its parts 324.0")


def test_a_backend_that_raises_is_no_candidate(two_backends: None) -> None:
    times: dict[str, float | Exception] = {"torch": 0.3, "triton": Unsupported("not here"), "parts": 0.5}
    found = attention_choices([WINDOWS], "cpu", timer(times, []))
    assert found.backends == {name_of(WINDOWS): "torch"} and found.left_out == {"triton": "not here"}
    assert found.note == "; left out of the race: triton (not here)"
    times["torch"] = Unsupported("nor here")
    assert attention_choices([WINDOWS], "cpu", timer(times, [])).left == {name_of(WINDOWS): "no backend runs it"}


def test_scores_that_do_not_fit_into_memory_are_not_written_out(two_backends: None) -> None:
    times: dict[str, float | Exception] = {"torch": 9.0, "triton": 8.0, "parts": torch.OutOfMemoryError("scores")}
    assert attention_choices([WINDOWS], "cpu", timer(times, [])).backends == {name_of(WINDOWS): "triton"}


def test_on_a_cpu_nothing_is_chosen() -> None:
    assert attention_choices([WINDOWS], "cpu") == ({}, {}, {})


def test_what_is_timed_is_the_call_and_its_parts() -> None:
    call = module._with_numbers(WINDOWS, "cpu")
    assert call.bias is not None and call.bias.shape == (1, 6, 49, 49)
    assert "torch" in module._names(call) and "reference" not in module._names(call)
    got = module._run("torch", call).transpose(1, 2)
    torch.testing.assert_close(got, (call.q @ call.k.mT * 0.5 + call.bias).softmax(-1) @ call.v, rtol=1e-4, atol=1e-5)
    plain = call._replace(bias=None, softmax_scale=1.0)
    torch.testing.assert_close(module._written(call), module._run("torch", plain).transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_every_backend_is_timed() -> None:
    module._timed.clear()
    call = WINDOWS._replace(**{name: getattr(WINDOWS, name).half() for name in ("q", "k", "v")})
    found = attention_choices([call], "cuda")
    (timed,) = module._timed.values()
    assert timed.written > 0 and timed.backend in {one.name for one in op.by_priority()}
    assert bool(found.backends) != bool(found.left)
