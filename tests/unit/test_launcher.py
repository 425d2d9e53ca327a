"""Tests of a launch without Triton's own look-up, by a compiled kernel that notes how it is called."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import wavecrest
import wavecrest.ops.common.launcher as launcher
import wavecrest.ops.common.triton as _triton
from tests.ops.op_harness import LAUNCH_CALLS, MOST_CALLS
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm.call import GemmCall

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
        self.compiled, self.looked_up, self.described = Compiled(), 0, 0
        self.params = [SimpleNamespace(name=name) for name in ("x", "y", "n", "BLOCK")]

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **_options: Any) -> Compiled:
            self.looked_up += 1
            self.described = sum(hasattr(value, "base") for value in args)
            return self.compiled

        return launch


def profiled(work: Callable[[], Any], folder: Path) -> list[str]:
    """The Python functions of a folder, and those written for signatures, that work calls."""
    calls: list[Any] = []
    sys.setprofile(lambda frame, event, _argument: calls.append(frame.f_code) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [code.co_name for code in calls if code.co_filename.startswith((str(folder), "<signature"))]


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


def test_a_launch_has_the_first_ones_descriptors_of_its_own_tensors(
    hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = Kernel(), torch.zeros(16)
    direct = _triton.direct
    monkeypatch.setattr(_triton, "direct", lambda compiled, grid, _device: direct(compiled, grid, 3))
    first, second = torch.zeros(4, 16), torch.ones(4, 16)
    made = _triton.descriptor(first, [4, 16], [16, 1], [4, 16])
    launch = launcher.Launch(kernel, (4,), (made, x, 16), {"BLOCK": 32}, Config(num_warps=4))
    start = launcher.starter(launch, torch.device("cpu"), num_descriptors=1)
    start(first, x)
    start(second, x)
    ((*_, descriptor, address, sixteen, block),) = kernel.compiled.direct
    assert (address, sixteen, block) == (x.data_ptr(), 16, 32)
    assert type(descriptor) is type(made) and descriptor.base is second and made.base is first
    assert vars(descriptor) | {"base": first} == vars(made)
    # the function is kept for as long as its signature is, and a model's tensors need not be
    kept = weakref.ref(first)
    del first, made, launch
    assert kept() is None


def _bfloat16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


A, B = _bfloat16(64, 128), _bfloat16(128, 128)
Q = _bfloat16(1, 64, 2, 64)
Q_NOPE, Q_ROPE, CACHE = _bfloat16(1, 1, 16, 512), _bfloat16(1, 1, 16, 64), _bfloat16(1, 64, 576)
LENGTHS = torch.tensor([64], dtype=torch.int32)
TILES = Config(
    BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, SPLIT_K=1, PERSISTENT=0, TMA=1, EARLY=0, num_warps=4, num_stages=2
)
# op, backend, its kernel, a call, and the tensors that it describes but for the result
DESCRIBED: dict[str, tuple[str, str, str, Callable[[], Any], tuple[Tensor, ...]]] = {
    "gemm": ("gemm", "triton", "_gemm.launch._tile_kernel", lambda: ops.gemm(A, B), (A, B)),
    "gated gemm": (
        "gemm", "triton_hopper", "_gemm.launch_hopper._hopper_gemm_kernel",
        lambda: ops.gemm(A, B.mT, activation="silu_and_mul"), (A, B),
    ),
    "flash_attention": (
        "flash_attention", "triton_hopper", "_flash_attention.launch_hopper._hopper_attention_kernel",
        lambda: ops.flash_attention(Q, Q, Q), (Q, Q, Q),
    ),
    "flash_attention of one group": (
        "flash_attention", "triton_hopper_group",
        "_flash_attention.launch_hopper_group._hopper_group_attention_kernel",
        lambda: ops.flash_attention(Q, Q, Q), (Q, Q, Q),
    ),
    "mla_decode": (
        "mla_decode", "triton_hopper", "_mla_decode.launch_hopper._hopper_mla_kernel",
        lambda: ops.mla_decode(Q_NOPE, Q_ROPE, CACHE, seq_lens=LENGTHS, softmax_scale=0.1), (CACHE, CACHE),
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches on a CPU, by a compiled kernel that does nothing")
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_bound_call_with_descriptors_is_short(
    name: str, hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a descriptor is worked out again but the address of its tensor."""
    called, backend, place, call, described = DESCRIBED[name]
    op, kernel = registry.get(called), Kernel()
    direct = _triton.direct
    monkeypatch.setattr(_triton, "direct", lambda compiled, grid, _device: direct(compiled, grid, 3))
    monkeypatch.setattr(_triton, "interpreted", False)
    monkeypatch.setattr(_triton, "emulated", "sm_90")
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
    monkeypatch.setattr(f"wavecrest.ops.{place}", kernel)
    kernel.params = []
    if backend == "triton":
        op.pin(op.key(GemmCall(A, B)), backend, TILES, "exact", "a test")
    else:
        op.force(backend)
    with torch.no_grad():
        call()
        ours = profiled(call, Path(wavecrest.__file__).parent)
    assert 0 < len(ours) <= MOST_CALLS, ours
    (args,) = kernel.compiled.direct
    found = [value.base for value in args[9:] if hasattr(value, "base")]
    assert len(found) == kernel.described >= len(described) and kernel.looked_up == 1
    assert [one.data_ptr() for one in found[: len(described)]] == [one.data_ptr() for one in described]


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
    # 8 bytes behind a multiple of 16
    x, y, odd = memory[:16], memory[16:32], memory[34:50]
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
    ours = profiled(lambda: start(y, x), Path(launcher.__file__).parent)
    assert 0 < len(ours) <= LAUNCH_CALLS, ours
    args, again = kernel.compiled.direct
    assert args == again and args[:4] == (4, 1, 1, STREAM) and args[9:] == (y.data_ptr(), x.data_ptr(), 16, 32)
