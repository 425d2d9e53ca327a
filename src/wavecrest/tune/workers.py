"""Workers: processes that tune keys, each on one GPU or on the CPU."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from wavecrest import env
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Device
from wavecrest.records import decode

# signals that mean someone else killed the worker: no kernel sends them
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# seconds after which a killed process is gone, unless it hangs in the driver
GONE = 30.0


def importable() -> dict[str, str | None]:
    """The environment in which a child imports this wavecrest, installed or not."""
    source = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join([source, *filter(None, [env.get("PYTHONPATH")])])}


class Worker(Protocol):
    """A process with one device in which keys are tuned, on this machine or another."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a line to the process; does nothing if the process has ended."""

    def next(self, timeout: float) -> dict[str, Any]:
        """The worker's next event.

        Beside the process's own events: "silent", nothing within `timeout` seconds; "ended", with the `reason`, and
        whether that came from `outside`, so that no candidate is to blame.
        """

    def stop(self) -> None:
        """Kill the process at once."""


# starts a worker on its device, also again after one ended
Start = Callable[[], Worker]


class Child:
    """A worker that is a child process on this machine.

    Args:
        changes: of the environment; see `env.child`.
    """

    def __init__(self, changes: dict[str, str | None] | None = None) -> None:
        # open for as long as the child lives
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wavecrest.tune.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # the child does not receive Ctrl-C: this process stops it
            start_new_session=True,
            env=env.child({**(changes or {}), **importable()}),
        )
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def send(self, message: dict[str, Any]) -> None:
        """Write a line; `next` reports if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def next(self, timeout: float) -> dict[str, Any]:
        """The child's next event; see `Worker.next`."""
        try:
            line = self._said.get(timeout=timeout)
        except queue.Empty:
            return {"event": "silent"}
        if line is not None and line.endswith("\n"):
            try:
                message: dict[str, Any] = decode.json_of(line, finite=False)
            except ValueError:
                # an import may print before the child has redirected its output
                return {"event": "ended", "reason": f"gave an invalid answer: {line[:200].strip()}", "outside": False}
            return message
        # the end of its output, or a line cut off in the middle
        return self._end()

    def _end(self) -> dict[str, Any]:
        try:
            code = self._process.wait(GONE)
        except subprocess.TimeoutExpired:
            return {"event": "ended", "reason": "closed its output and did not end", "outside": False}
        if code < 0:
            reason = f"ended its process with {_signal(-code)}"
        else:
            reason = f"ended its process with code {code}"
        said = self._last_words()
        return {"event": "ended", "reason": f"{reason}: {said}" if said else reason, "outside": -code in OUTSIDE}

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = [text.strip() for text in self._errors if text.strip()]
        return said[-1][:300] if said else ""

    def stop(self) -> None:
        """Kill the process, and wait a while until it is gone."""
        self._process.kill()
        try:
            self._process.wait(GONE)
        except subprocess.TimeoutExpired:
            # it hangs in the driver: the system ends it when the driver returns
            return


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def local(device: Device, count: int | None, *, one: bool) -> list[Start]:
    """The functions that start this machine's workers: one for each GPU like `device` that torch sees, one on the CPU.

    Args:
        device: the device that is tuned for.
        count: number of workers; None: one per GPU, or one on the CPU, where calls timed side by side disturb each
        other.
        one: the user asked for `device` alone.

    Raises:
        InvalidArgument: there are fewer GPUs.
    """
    if device.kind == "cpu":
        return [Child] * (count or 1)
    indices = [device.index] if one else like(device)
    if count is not None and count > len(indices):
        raise InvalidArgument(
            f"--children {count}: there are {len(indices)} GPUs to tune on; two children on one would disturb each "
            "other's times"
        )
    return [_on_gpu(visible(index, device.vendor)) for index in indices[:count]]


def like(device: Device) -> list[int]:
    """The GPUs of this process that are of the same kind as `device`."""
    import torch

    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return [index for index, name in enumerate(names) if name == device.name]


def _on_gpu(changes: dict[str, str | None]) -> Start:
    return lambda: Child(changes)


def visible(index: int, vendor: str) -> dict[str, str | None]:
    """The environment in which the GPU that this process sees as `index` is the only one.

    HIP reads CUDA_VISIBLE_DEVICES too, so on AMD one of both is set and the other is not.
    """
    own, other = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    seen = env.get(own)
    if vendor == "amd":
        own, other = other, own
        seen = env.get(own) or seen
    names = [part.strip() for part in seen.split(",") if part.strip()]
    name = names[index] if index < len(names) else str(index)
    return {own: name, other: None}
