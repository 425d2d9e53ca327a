"""Kernels compiled ahead of their first launch: what a pass asks of them, and what it leaves as it was."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.triton as _triton
import wavecrest.ops.common.warmup as _ahead
from wavecrest.dispatch.tuned import Config

active: ContextVar[Mode | None] = ContextVar("active", default=None)


class Mode:
    """Stands for Triton's: what is submitted in it is done by the executor, and leaving it waits for all."""

    def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
        self.executor, self.ignore_errors = executor, ignore_errors
        self.jobs: list[Future[Any]] = []

    def __enter__(self) -> Mode:
        if active.get() is not None:
            raise RuntimeError("Another mode is already active")
        active.set(self)
        return self

    def __exit__(self, *_error: Any) -> None:
        active.set(None)
        for job in self.jobs:
            if job.exception() is not None and not self.ignore_errors:
                job.result()


class Kernel:
    """Stands for a kernel, compiled or not: notes what it is asked for.

    `compiling` is done where it is compiled, `loading` where it is loaded.
    """

    def __init__(self, compiling: Any = lambda: None, loading: Any = lambda: None) -> None:
        self.compiling, self.loading = compiling, loading
        self.params = [SimpleNamespace(name=name) for name in ("x_ptr", "size", "BLOCK", "num_warps")]
        self.warmed: list[Any] = []
        self.launched: list[Any] = []
        self.fast: list[Any] = []
        self.loaded: list[threading.Thread] = []

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.warmed.append((grid, args, options))
        mode = active.get()
        assert mode is not None, "what is warmed up is compiled at once"
        mode.jobs.append(mode.executor.submit(self._compiled))
        return SimpleNamespace(future=mode.jobs[-1])

    def _compiled(self) -> Kernel:
        self.compiling()
        return self

    @property
    def run(self) -> Any:
        self.loaded.append(threading.current_thread())
        return self.loading()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            assert active.get() is None, "a launch in the mode of a pass"
            self.compiling()
            self.launched.append((grid, args, options))
            return {(*grid, 1, 1): lambda *values: self.fast.append(values)}

        return launch


X = torch.zeros(64)
OPTIONS = {"BLOCK": 8, "num_warps": 2}


@pytest.fixture(autouse=True)
def _modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "compiles_beside", lambda: Mode)
    monkeypatch.setattr(_triton, "direct", lambda compiled, grid, _device: compiled[(*grid, 1, 1)])
    # as many threads on a machine of one core too
    monkeypatch.setattr(_ahead.hardware, "cpu", lambda: SimpleNamespace(compute_units=4))


def starter(kernel: Kernel) -> Any:
    launch = _launcher.Launch(kernel, (3,), (X, 64), {"BLOCK": 8}, Config(num_warps=2))
    return _launcher.starter(launch, torch.device("cpu"))


def test_a_pass_compiles_what_would_be_launched_and_launches_nothing() -> None:
    kernel = Kernel()
    start = starter(kernel)
    assert _ahead.rehearse(lambda: start(X)) is None
    ((grid, args, options),) = kernel.warmed
    assert grid == (3,) and args[0] is X and args[1:] == (64,) and options == OPTIONS
    assert not kernel.launched and not kernel.fast
    # and afterwards as ever
    start(X)
    start(X)
    assert kernel.launched == [((3,), (X, 64), OPTIONS)] and kernel.fast == [(X.data_ptr(), 64, 8, 2)]
    # what is compiled is not launched in a later pass either
    assert _ahead.rehearse(lambda: start(X)) is None
    assert len(kernel.launched) == len(kernel.fast) == 1


def test_a_kernel_is_asked_for_once_and_for_each_alignment() -> None:
    kernel = Kernel()
    start = starter(kernel)

    def blocks() -> None:
        for x in (X[1:], X, X, X):
            start(x)

    assert _ahead.rehearse(blocks) is None
    assert [args[0].data_ptr() % 16 for _, args, _ in kernel.warmed] == [4, 0]


def test_kernels_are_compiled_beside_each_other() -> None:
    both = threading.Barrier(2)
    kernels = [Kernel(lambda: both.wait(30)) for _ in range(2)]
    starts = [starter(kernel) for kernel in kernels]

    def work() -> None:
        for start in starts:
            start(X)

    assert _ahead.rehearse(work) is None
    assert not both.broken


def test_a_pass_waits_for_the_compilers() -> None:
    done: list[int] = []
    gate = threading.Event()

    def compiling() -> None:
        gate.wait(30)
        done.append(1)

    start = starter(Kernel(compiling))

    def work() -> None:
        start(X)
        threading.Timer(0.05, gate.set).start()

    assert _ahead.rehearse(work) is None
    assert done == [1]


def test_kernels_are_loaded_by_the_threads_and_a_pass_waits_for_it() -> None:
    gate = threading.Event()
    done: list[int] = []

    def loading() -> None:
        gate.wait(30)
        done.append(1)

    kernel = Kernel(loading=loading)
    start = starter(kernel)

    def work() -> None:
        start(X)
        threading.Timer(0.05, gate.set).start()

    assert _ahead.rehearse(work) is None
    assert done == [1] and threading.main_thread() not in kernel.loaded


def test_a_kernel_that_does_not_load_says_so_when_it_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ValueError("out of resources")

    kernel = Kernel(loading=refuse)
    start = starter(kernel)
    assert _ahead.rehearse(lambda: start(X)) is None
    assert len(kernel.loaded) == 1 and not caplog.records


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched() -> None:
    def refuse() -> None:
        raise ValueError("too much shared memory")

    kernel = Kernel(refuse)
    start = starter(kernel)
    assert _ahead.rehearse(lambda: start(X)) is None
    assert len(kernel.warmed) == 1 and not kernel.loaded
    with pytest.raises(ValueError, match="too much shared memory"):
        start(X)


def test_what_stops_the_work_ends_the_pass() -> None:
    kernel = Kernel()
    start = starter(kernel)

    def work() -> None:
        start(X)
        raise RuntimeError("out of memory")

    assert _ahead.rehearse(work) == "RuntimeError: out of memory"
    assert _ahead.under_way.get() is None and active.get() is None
    start(X)
    assert len(kernel.launched) == 1


def test_who_interrupts_is_heard() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _ahead.rehearse(work)
    assert _ahead.under_way.get() is None


def test_others_launch_as_ever() -> None:
    """Another thread's launches, and in the pass those that are not of our ops, which Triton compiles at once."""
    kernel, other = Kernel(), Kernel()
    start = starter(kernel)

    def work() -> None:
        thread = threading.Thread(target=start, args=(X,))
        thread.start()
        thread.join()
        other[(1,)](X, 64)

    assert _ahead.rehearse(work) is None
    assert len(kernel.launched) == len(other.launched) == 1 and not kernel.warmed


def test_a_mode_of_the_callers_own_is_left_alone() -> None:
    kernel = Kernel()
    start = starter(kernel)
    token = active.set(Mode(SimpleNamespace(), ignore_errors=False))  # type: ignore[arg-type]
    reason = _ahead.rehearse(lambda: start(X))
    active.reset(token)
    assert reason == "RuntimeError: Another mode is already active" and not kernel.warmed


def test_where_it_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert _ahead.possible(gpu) and not _ahead.possible(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not _ahead.possible(gpu)
    monkeypatch.setattr(_triton, "compiles_beside", lambda: None)
    assert not _ahead.possible(gpu)


def test_where_triton_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    triton = pytest.importorskip("triton")
    for interpreted, wanted in ((True, None), (False, getattr(triton, "AsyncCompileMode", None))):
        monkeypatch.setattr(_triton, "interpreted", interpreted)
        assert _triton.compiles_beside() is wanted
    # a Triton without it, as the stand-in for one that is not there
    monkeypatch.setattr(_triton, "triton", SimpleNamespace())
    assert _triton.compiles_beside() is None
