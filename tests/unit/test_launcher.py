"""Tests of a launch without Triton's own look-up, by a compiled kernel that notes how it is called."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wavecrest.ops.common.launcher as launcher
import wavecrest.ops.common.triton as _triton
from tests.layout.test_ops import LAUNCH_CALLS
from wavecrest.dispatch.tuned import Config

triton = pytest.importorskip("triton")

STREAM = 77


class Compiled:
    """A compiled kernel as triton 3.6 to 3.9 has it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.direct: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        """Triton's launcher."""
        self.direct.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.hooked.append((grid, *args))


class Kernel:
    """A kernel as `triton.jit` makes it: compiled at its first launch."""

    def __init__(self) -> None:
        self.compiled, self.looked_up = Compiled(), 0
        self.params = [SimpleNamespace(name=name) for name in ("x", "y", "n", "BLOCK")]

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        def launch(*_args: Any, **_options: Any) -> Compiled:
            self.looked_up += 1
            return self.compiled

        return launch


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's hooks of launches, without a function in them; its driver gives STREAM for device 3."""
    made = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    active = SimpleNamespace(get_current_stream={3: STREAM}.__getitem__)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton.knobs, "runtime", made)
    return made


def test_addresses_go_to_the_compiled_kernel(hooks: SimpleNamespace) -> None:
    compiled = Compiled()
    _triton.direct(compiled, (5,), 3)(64, 128, 9)
    assert compiled.direct == [(5, 1, 1, STREAM, "function", "metadata", None, None, None, 64, 128, 9)]
    assert not compiled.hooked


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", [SimpleNamespace(calls=[print]), print])
def test_a_profiler_sees_launches(hooks: SimpleNamespace, name: str, hook: Any) -> None:
    compiled = Compiled()
    start = _triton.direct(compiled, (5, 2), 3)
    setattr(hooks, name, hook)
    start(64, 9)
    assert compiled.hooked == [((5, 2, 1), 64, 9)] and not compiled.direct
    setattr(hooks, name, None)
    start(64, 9)
    assert compiled.direct == [(5, 2, 1, STREAM, "function", "metadata", None, None, None, 64, 9)]


def test_descriptors_go_to_the_compiled_kernel_as_they_are(
    hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x, descriptor = Kernel(), torch.zeros(16), object()
    direct = _triton.direct
    monkeypatch.setattr(_triton, "direct", lambda compiled, grid, _device: direct(compiled, grid, 3))
    launch = launcher.Launch(kernel, (4,), (descriptor, x, 16), {"BLOCK": 32}, Config(num_warps=4))
    start = launcher.starter(launch, torch.device("cpu"), num_descriptors=1)
    start(descriptor, x)
    start(descriptor, x)
    (args,) = kernel.compiled.direct
    assert args[9:] == (descriptor, x.data_ptr(), 16, 32)


@pytest.mark.parametrize(("current", "changed"), [(1, []), (0, ["cuda:1"])])
def test_a_launch_is_on_the_device_of_its_tensors(
    current: int, changed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel, odd = Kernel(), torch.zeros(17)[1:]
    launcher.starter(launcher.Launch(kernel, (4,), (odd, 16), {}, Config()), torch.device("cuda:1"))(odd)
    assert kernel.looked_up == 1 and entered == changed


@pytest.mark.parametrize(
    ("version", "in_turn"), [((3, 11, 7), True), ((3, 11, 8), False), ((3, 12, 1), True), ((3, 12, 2), False)]
)
def test_kernels_are_parsed_in_turn_where_python_needs_it(
    version: tuple[int, ...], in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    class Parsed:
        def parse(self) -> None:
            # two that parse at a time meet; one alone waits in vain
            both.wait(0.2)

    monkeypatch.setattr(triton.runtime.jit, "JITCallable", Parsed, raising=False)
    monkeypatch.setattr(sys, "version_info", version)
    _triton.parse_in_turn.__wrapped__()
    with ThreadPoolExecutor(2) as threads:
        found = [one.exception() for one in [threads.submit(Parsed().parse) for _ in range(2)]]
    assert [isinstance(one, threading.BrokenBarrierError) for one in found] == [in_turn] * 2


def test_the_second_launch_is_direct_and_odd_addresses_are_looked_up(
    hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, memory = Kernel(), torch.zeros(64)
    x, y, odd = memory[:16], memory[16:32], memory[33:49]
    assert memory.data_ptr() % 16 == 0
    launch = launcher.Launch(kernel, (4,), (x, y, 16), {"BLOCK": 32}, Config(num_warps=4))
    direct = _triton.direct
    monkeypatch.setattr(_triton, "direct", lambda compiled, grid, _device: direct(compiled, grid, 3))
    start = launcher.starter(launch, torch.device("cpu"))
    start(x, y)
    assert kernel.looked_up == 1 and not kernel.compiled.direct
    start(y, x)
    start(x, odd)
    assert kernel.looked_up == 2
    calls = []
    sys.setprofile(lambda frame, event, _argument: calls.append(frame.f_code) if event == "call" else None)
    try:
        start(y, x)
    finally:
        sys.setprofile(None)
    ours = [code.co_name for code in calls if code.co_filename.startswith(str(Path(launcher.__file__).parent))]
    assert 0 < len(ours) <= LAUNCH_CALLS, ours
    args, again = kernel.compiled.direct
    assert args == again and args[:4] == (4, 1, 1, STREAM) and args[9:] == (y.data_ptr(), x.data_ptr(), 16, 32)
