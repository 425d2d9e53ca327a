"""Where tests run: on the GPU if there is one, else on the CPU with the kernels in Triton's interpreter."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import interpreter, sampling

# Triton reads this when the kernels are defined, so it must be set before wavecrest.ops is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# tests that share the cores (pytest -n) take one each, and so do their children, whose threads would wait for others
# at full speed. Inductor starts as many processes as there are cores in every process that compiles: six seconds of a
# core, for kernels of a second
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    for _name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(_name, "1")

# before a test replaces a function of torch: Dynamo lists them when it is imported, and traces no other; it imports
# Triton, which reads the line above
importlib.import_module("torch._dynamo")

# pytest (9) gives its handlers to every logger that passes nothing on, six times a test, and torch has fifty of these:
# they pass their records on to the one that has handlers anyway. One of them writes out every graph, guard and stack of
# a compilation as soon as it has a handler of its own, and nobody reads them here
for _logger in list(logging.root.manager.loggerDict.values()):
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True

# nor may rows that somebody measured on this machine decide what tests run
os.environ["WAVECREST_DATABASE"] = "off"

# child processes of tests import the package from the source tree, installed or not
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# and what the first of them compiles of the package is there for the next ones
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# tests ask the registry for ops, which register when this is imported
importlib.import_module("wavecrest.ops")
interpreted = importlib.import_module("wavecrest.ops.common.interpreted")

# a command measures for two seconds what a CPU can do at most, which no test reads: other tests have the CPU, too
importlib.import_module("wavecrest.profile.roofline").CPU_SECONDS = 0.05  # type: ignore[attr-defined]
# nor do most read how fast it copies 64 MiB, whose random numbers take longer than the op that they stand beside
_copy_bytes: dict[str, int] = importlib.import_module("wavecrest.bench.ops").COPY_BYTES
_USERS_COPY = _copy_bytes["cpu"]
_copy_bytes["cpu"] = 1 << 20

# a busy machine draws examples as slowly as it runs them
settings.register_profile("wavecrest", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wavecrest")


# what is imported and collected stays, and is of a million objects: nobody looks through them for garbage
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests marked slow")
    parser.addoption("--share", type=int, default=1, metavar="N", help="one in N cases of large tests")
    parser.addoption("--turn", default="", help="any text, which chooses the cases of --share")
    parser.addoption("--every-emulated", action="store_true", help="tests/emulated in full (scripts/emulate)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if text := sampling.note(config):
        terminalreporter.write_line(text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampling.leave_out(config, items)
    for item in items:
        if config.getoption("--quick") and item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow, and --quick was asked for"))
        if not config.getoption("--every-emulated") and item.get_closest_marker("every_emulated") is not None:
            item.add_marker(pytest.mark.skip(reason="takes minutes: scripts/emulate, or --every-emulated"))
        if not torch.cuda.is_available() and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an AMD or NVIDIA GPU; torch sees none"))


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.mend(monkeypatch)
        # they run kernels once a process: not where a test counts launches, or replaces what kernels call
        interpreted.takes_scalar_masks()
        interpreted.computes_small_floats()


@pytest.fixture(scope="module")
def standins() -> Iterator[None]:
    """The op "planted" of tests/unit/tune_standins.py, here and for child processes, and no longer than needed."""
    name, before = "tests.unit.tune_standins", os.environ["PYTHONPATH"]
    importlib.import_module(name)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), before])
    yield
    os.environ["PYTHONPATH"] = before
    del sys.modules["wavecrest.dispatch.registry"].STATE.ops["planted"], sys.modules[name]


@pytest.fixture
def unchosen() -> Iterator[list[tuple[int, ...]]]:
    """Calls that "planted" ran, a backend of gemm that nothing chooses."""
    from tests.toy import counting
    from wavecrest.dispatch import registry

    with counting(registry.get("gemm"), priority=-1) as made:
        yield made


@pytest.fixture
def users_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of as many bytes as a user's bench makes stands beside an op."""
    monkeypatch.setitem(_copy_bytes, "cpu", _USERS_COPY)


@pytest.fixture
def sums_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter sum each row in one order, wherever in its block it lies.

    numpy's own does not on some CPUs, whose BLAS takes the last rows of a block in another way.
    """

    def product(a: Any, b: Any, dtype: Any = None) -> Any:
        return (a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]).sum(-2)

    monkeypatch.setattr("numpy.matmul", product)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _poisoned(allocate: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces through this: the check comes first, so that nothing below is part of a graph
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        out = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("wavecrest") and out.is_floating_point():
            out.fill_(float("nan"))
        elif caller.startswith("wavecrest") and out.dtype == torch.int8:
            # the one value that rounding to ±127 never makes
            out.fill_(-128)
        return out

    return wrapper


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output element that a kernel forgets to write is NaN, not by luck the right value of an earlier run."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _dispatch_as_found() -> Iterator[None]:
    """No test leaves a forced backend, a pin or strict mode behind."""
    yield
    registry = sys.modules.get("wavecrest.dispatch.registry")
    if registry is not None:
        registry.strict("off")
        for op in list(registry.STATE.ops.values()):
            op.force(None)
            op.unpin()
