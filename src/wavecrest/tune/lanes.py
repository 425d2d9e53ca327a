"""Where keys are tuned: a lane is one device, or one place on the CPU, with a child process that tunes keys there."""

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

# a process that one of these ends was ended by somebody else: no kernel sends them
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# a process that was killed is gone after so many seconds, or stays in the driver
GONE = 30.0


def importable() -> dict[str, str | None]:
    """The environment in which a child imports this wavecrest, installed or not."""
    source = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join([source, *filter(None, [env.get("PYTHONPATH")])])}


class Lane(Protocol):
    """A child process, on this machine or another."""

    def send(self, message: dict[str, Any]) -> None:
        """Give it a line; to one that has ended, nothing happens."""

    def next(self, timeout: float) -> dict[str, Any]:
        """What it says next.

        Beside the child's own events: "silent", nothing within `timeout` seconds; "ended", with the `reason`, and
        whether that came from `outside`, so that no candidate is to blame.
        """

    def stop(self) -> None:
        """End it, at once."""


# makes the child of a lane, again after it ended
Start = Callable[[], Lane]


class Child:
    """A lane of this machine.

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
            # it does not hear of Ctrl-C by itself: it is stopped
            start_new_session=True,
            env=env.child({**(changes or {}), **importable()}),
        )
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def send(self, message: dict[str, Any]) -> None:
        """Write a line; an end of the process is heard of by `next`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def next(self, timeout: float) -> dict[str, Any]:
        """What the child says next; see `Lane.next`."""
        try:
            line = self._said.get(timeout=timeout)
        except queue.Empty:
            return {"event": "silent"}
        if line is not None and line.endswith("\n"):
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:
                # what an import prints comes before the child can turn it away
                return {"event": "ended", "reason": f"said what is no answer: {line[:200].strip()}", "outside": False}
            return message
        # its end, or the middle of a line that it was at
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
            # in the driver: the system ends it when it comes back
            return


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def local(device: Device, count: int | None, *, one: bool) -> list[Start]:
    """The lanes of this machine: one for each GPU like `device` that torch sees, one on the CPU.

    Args:
        device: what is tuned for.
        count: so many lanes; None: all GPUs, or one on the CPU, where calls that are timed side by side disturb each
            other.
        one: `device` alone was asked for.

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
