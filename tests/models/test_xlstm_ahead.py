"""Generation on a GPU compiles its kernels ahead: what for, how often, and that results do not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wavecrest.ops.common.warmup as _ahead
from tests.models.xlstm_harness import DEVICE, build, tokens
from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import generation, xLSTMLarge


class Passes:
    """Stands for `warmup.rehearse`: notes whether a prompt and a step ran, and does all of the work, twice.

    So what a pass leaves behind is not what there was, and differs from what is made in earnest.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.prompts = self.steps = 0

    def __call__(self, work: Callable[[], Any]) -> None:
        before = self.prompts, self.steps
        for _ in range(2):
            work()
        self.found.append(((self.prompts - before[0]) // 2, (self.steps - before[1]) // 2))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Counts of the passes that a test's models make, as on a GPU."""
    made, run, decode = Passes(), xLSTMLarge._run, xLSTMLarge.decode

    def counted_run(*args: Any, **options: Any) -> Any:
        made.prompts += 1
        return run(*args, **options)

    def counted_decode(*args: Any, **options: Any) -> Tensor:
        made.steps += 1
        return decode(*args, **options)

    monkeypatch.setattr(xLSTMLarge, "_run", counted_run)
    monkeypatch.setattr(xLSTMLarge, "decode", counted_decode)
    monkeypatch.setattr(_ahead, "possible", lambda _device: True)
    monkeypatch.setattr(_ahead, "rehearse", made)
    return made


PROMPT, STEP, BOTH = (1, 0), (0, 1), (1, 1)


def test_each_kind_of_work_is_rehearsed_once(passes: Passes) -> None:
    model = build()
    calls: list[tuple[Tensor, int, list[tuple[int, int]]]] = [
        # who asks for one token waits for nothing that steps need
        (tokens(1, 9), 1, [PROMPT]),
        (tokens(1, 9), 1, []),
        (tokens(1, 9), 5, [STEP]),
        # prompts of other lengths do not pay for it again
        (tokens(1, 21), 5, []),
        # several rows are other kernels than one; steps are made for their number
        (tokens(2, 9), 5, [BOTH]),
        (tokens(3, 9), 1, []),
        (tokens(3, 9), 2, [STEP]),
        (tokens(2, 9), 5, []),
    ]
    for prompt, count, wanted in calls:
        passes.found.clear()
        model.generate(prompt, count)
        assert passes.found == wanted, (prompt.shape, count)
    passes.found.clear()
    list(build(seed=1).stream(tokens(1, 9), 5))
    assert passes.found == [BOTH], "another model, which streams"


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 7}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("first", [1, 12])
def test_results_do_not_depend_on_it(
    options: dict[str, Any], first: int, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither states nor draws of a pass go on; those before a text that goes on are not changed."""
    model = build()
    _, state = model(tokens(2, 7))

    def made() -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(5)
        return [
            model.generate(tokens(2, 9, seed=2), count, state=state, generator=generator, **options).tokens
            for count in (first, 12)
        ]

    found = made()
    assert passes.found
    monkeypatch.setattr(_ahead, "possible", lambda _device: False)
    assert all(torch.equal(one, other) for one, other in zip(found, made(), strict=True))


def test_what_stops_a_pass_stops_nothing_else(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    wanted = build().generate(tokens(1, 9), 6).tokens
    passes.found.clear()

    def stopped(_work: Callable[[], Any]) -> str:
        passes.found.append(BOTH)
        return "RuntimeError: out of memory"

    monkeypatch.setattr(_ahead, "rehearse", stopped)
    assert torch.equal(model.generate(tokens(1, 9), 6).tokens, wanted)
    assert torch.equal(model.generate(tokens(1, 9), 6).tokens, wanted)
    assert passes.found == [BOTH], "it is not tried again"


def test_a_server_rehearses_before_its_first_prompt(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    wanted = build().generate(tokens(2, 9), 6).tokens
    passes.found.clear()
    assert model.compile_ahead(longest=20) is None
    # 1 to 8, 16 and 20 tokens, behind a state and without one
    assert passes.found == [(20, 1)]
    assert model.compile_ahead(2, longest=4) is None
    # with padding too, which one token has none of
    assert passes.found == [(20, 1), (2 + 3 * 4, 1)]
    for rows, count in ((1, 1), (1, 5), (2, 6)):
        found = model.generate(tokens(rows, 9), count).tokens
    assert torch.equal(found, wanted) and len(passes.found) == 2
    # steps of three rows are others
    model.generate(tokens(3, 9), 2)
    assert passes.found[2:] == [STEP]

    monkeypatch.setattr(_ahead, "rehearse", lambda _work: "RuntimeError: out of memory")
    stopped = build(seed=1)
    assert stopped.compile_ahead() == "RuntimeError: out of memory"
    monkeypatch.setattr(_ahead, "rehearse", passes)
    passes.found.clear()
    stopped.generate(tokens(1, 9), 5)
    assert passes.found == [BOTH], "what was stopped is not done"


@pytest.mark.parametrize("options", [{"batch": 0}, {"longest": 0}, {"longest": 2.0}, {"batch": True}])
def test_numbers_of_a_server_are_above_0(options: dict[str, Any], passes: Passes) -> None:
    with pytest.raises(InvalidArgument, match=f"compile_ahead: {next(iter(options))} must be a whole number above 0"):
        build().compile_ahead(**options)
    assert not passes.found


class _Foreign(nn.Module):
    """Somebody's layer, which may do more than compute."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


def test_who_sees_what_a_model_runs_sees_no_pass(passes: Passes) -> None:
    seen: list[int] = []
    model = build()
    hook = model.lm_head.register_forward_hook(lambda *_args: seen.append(1))
    model.generate(tokens(1, 9), 3)
    assert "a hook" in str(model.compile_ahead())
    assert len(seen) == 3 and not passes.found
    hook.remove()
    model.generate(tokens(1, 9), 3)
    assert passes.found == [BOTH]
    passes.found.clear()
    everywhere = nn.modules.module.register_module_forward_pre_hook(lambda *_args: None)
    build().generate(tokens(1, 9), 3)
    everywhere.remove()
    foreign = build()
    foreign.lm_head = _Foreign(foreign.lm_head)
    foreign.generate(tokens(1, 9), 3)
    compiled = build()
    compiled.backbone.blocks[1].compile(backend="eager")
    compiled.generate(tokens(1, 9), 3)
    assert not passes.found


@pytest.mark.skipif(DEVICE == "cuda", reason="of a CPU; on a GPU kernels are compiled ahead")
def test_a_cpu_rehearses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_work: Callable[[], Any]) -> None:
        raise AssertionError("a pass on a CPU")

    monkeypatch.setattr(_ahead, "rehearse", never)
    model = build()
    model.generate(tokens(1, 9), 5)
    assert "cpu" in str(model.compile_ahead())
    assert model not in generation._rehearsed


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of ahead.py, without a compiled kernel on the disk."""
    pytest.importorskip("triton", reason="kernels are compiled by triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("ahead.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_in_earnest_nothing_is_left_to_compile(compiled: dict[str, Any]) -> None:
    """The kernels compiled ahead are those launched: types, alignments and numbers of 1 are those of the launch."""
    for name in ("a token", "tokens behind it", "of two rows", "of another model"):
        assert compiled[name]["ahead"] and not compiled[name]["earnest"], (name, compiled[name])
    for name in ("a token again", "tokens again"):
        assert not compiled[name]["ahead"] and not compiled[name]["earnest"], (name, compiled[name])
    # who asks for one token needs no kernel of a step
    assert not any("step" in kernel for kernel in compiled["a token"]["ahead"])
    assert any("step" in kernel for kernel in compiled["tokens behind it"]["ahead"])
    # the product of the last token's row is made for the number of rows, the prompt's other kernels are not
    assert not any("mlstm" in kernel for kernel in compiled["of three rows"]["earnest"])


def test_a_server_waits_for_no_kernel(compiled: dict[str, Any]) -> None:
    """Lengths of whole chunks and of none, of few rows and more, behind a state, and padded."""
    assert compiled["for a server"]["stopped"] is None and not compiled["for a server"]["launched"]
    served = [name for name in compiled if name.partition(" ")[0].isdecimal()] + ["two rows, padded"]
    assert len(served) > 10
    for name in served:
        assert not compiled[name]["ahead"] and not compiled[name]["earnest"], (name, compiled[name])
        assert not compiled[name]["late"], "loaded beside each other as well"


def test_kernels_are_compiled_beside_each_other(compiled: dict[str, Any]) -> None:
    for name in ("a token", "tokens behind it", "of two rows", "of another model"):
        assert compiled[name]["waited"] == compiled[name]["late"] == 0
        # one kernel is all that small models' steps need where PyTorch's products are the choice
        if hardware.cpu().compute_units > 1 and len(compiled[name]["ahead"]) > 1:
            assert compiled[name]["most"] > 1, compiled[name]


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted by what stands for a GPU")
def test_a_pass_launches_nothing(compiled: dict[str, Any]) -> None:
    for first, again in (("a token", "a token again"), ("tokens behind it", "tokens again")):
        assert compiled[first]["launched"] == compiled[again]["launched"] > 0
