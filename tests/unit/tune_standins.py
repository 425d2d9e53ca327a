"""An op of tests that children import (`Settings.modules`): y = 2x, with backends that lie, crash, hang or are noisy.

Calls take simulated milliseconds, and the timer of a child that imports this reads the simulated clock. What a
backend does is decided by its name, so that a test takes those that it wants.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from tests.clock import SimulatedClock
from tests.toy import ToyOp
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config
from wavecrest.tune import race

ROWS = (4, 16, 64)
# the variable that names the file which "meet" waits for
MEETING = "PLANTED_MEETING"
CALLS: Counter[str] = Counter()


CLOCK = SimulatedClock()


def _on_the_clock(device: str, _now: object = None, in_a_row: int = 1) -> race.Timer:
    return _timer_of(device, CLOCK, in_a_row)


# a child's timer reads the simulated clock; whoever tunes in this process passes it
_timer_of = race.timer_of
_main = sys.modules["__main__"].__spec__
if _main is not None and _main.name == "wavecrest.tune.child":
    race.timer_of = _on_the_clock


def _twice(x: Tensor, ms: float) -> Tensor:
    CLOCK.advance(ms / 1e3)
    return 2 * x


def _kernel(x: Tensor, *, config: Config) -> Tensor:
    return _twice(x, 3.0 / config["BLOCK"])


def _crash(_x: Tensor) -> None:
    ctypes.string_at(0)


def _exit(_x: Tensor) -> None:
    sys.stderr.write("terminate called after throwing\n")
    sys.stderr.flush()
    os._exit(3)


def _hang(_x: Tensor) -> None:
    while True:
        time.sleep(3600)


def _late(_x: Tensor) -> None:
    # right when it is checked, and the end of the process when it is timed
    CALLS["late"] += 1
    if CALLS["late"] > 5:
        os.kill(os.getpid(), signal.SIGABRT)


def _among(_x: Tensor) -> None:
    # ends the process only when others ran since its last call, some ten times
    CALLS["among"] += CALLS["other"] > 0
    CALLS["other"] = 0
    if CALLS["among"] > 10:
        os.kill(os.getpid(), signal.SIGSEGV)


def _meet(_x: Tensor) -> None:
    # ends when somebody makes the file: until then whoever has a key keeps it
    while not os.path.exists(os.environ[MEETING]):
        time.sleep(0.01)


def _killed(_x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


BEFORE = {
    "crash": _crash, "exit": _exit, "hang": _hang, "late": _late, "among": _among, "meet": _meet,
    "killed": _killed,
}  # fmt: skip


def _planted(name: str, x: Tensor) -> Tensor:
    if name in BEFORE:
        BEFORE[name](x)
    # whoever waits for others wins nothing by it
    out = _twice(x, 9.0 if name == "meet" else 0.2)
    if name == "wrong":
        return 1.25 * out
    if name == "tail":
        # the last row alone, as of a mask that is one short
        out[-1] = 0.0
    if name == "nan":
        out[0, 0] = float("nan")
    return out


def _native(x: Tensor) -> Tensor:
    CALLS["other"] += 1
    return _twice(x, 4.0)


def _noisy(x: Tensor) -> Tensor:
    # as PyTorch in the middle, and now and then much faster or slower
    return _twice(x, random.choice((3.2, 4.1, 4.1, 4.9)))


op = ToyOp(
    "planted",
    reference=lambda x: 2 * x,
    key=lambda x: (x.shape[0], x.shape[1], "float32", x.device.type, False),
    key_fields=("rows", "columns", "dtype", "device", "grad"),
    inputs=lambda M, N, dtype, device: (torch.randn(M, N, dtype=dtype, device=device),),
    cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
    default_config=lambda key: Config(BLOCK=1),
    bench_cases=lambda suite, device: {f"rows {M}": lambda M=M: (torch.randn(M, 8),) for M in ROWS},
)
op.native("torch", _native, priority=10)
op.kernel("kernel", _kernel, priority=5, space=lambda key, arch: [Config(BLOCK=1), Config(BLOCK=3)])
for liar in (*BEFORE, "wrong", "tail", "nan"):
    op.native(liar, partial(_planted, liar), priority=1)
op.native("noisy", _noisy, priority=1)
