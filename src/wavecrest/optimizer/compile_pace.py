"""The seconds of first compilations on this machine over those that `costs` expects: learned by earlier runs.

The number of ops says how much there is to compile, and not how fast the host is. One UNet took 38 s on one host and 57
on another, each beside an H200 (2026-11-28), and its run of 100 s ended after 124.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import platformdirs
import torch

from wavecrest import hardware
from wavecrest.errors import OutputError, RecordError
from wavecrest.hardware import Device
from wavecrest.records import files

# compilations that are remembered of a machine, the latest
KEPT = 8
# a compilation that took a smaller part of what was expected had its code from a cache on disk
FROM_CACHE = 0.5
# the least and the largest pace that is believed: the prior is of fast hosts, and a run may meet a busy moment
LEAST, MOST = 1.0, 3.0


def known(device: Device) -> tuple[float, int]:
    """The pace of compilations over what was expected of them, and of how many; 1 and 0 where none is known.

    The geometric mean of those and of one that took what was expected: a few say more of their models than of the
    machine. After one Swin-T a ConvNeXt-T was expected to take three times as long, and was not compiled (H200,
    2026-11-28).

    On GPUs alone: on a CPU what is compiled, and beside what work, differs too much.
    """
    found = _read().get(_machine(device), []) if device.kind != "cpu" else []
    return min(MOST, max(LEAST, statistics.geometric_mean([1.0, *found]))), len(found)


def learn(device: Device, ratio: float) -> str:
    """Remember what a compilation took over what was expected of it; why that could not be written, or ""."""
    if device.kind == "cpu" or ratio < FROM_CACHE:
        return ""
    rows, name = _read(), _machine(device)
    rows[name] = [*rows.get(name, []), round(ratio, 3)][-KEPT:]
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        files.write_text(_file(), json.dumps(rows, indent=1, sort_keys=True) + "\n")
    except (OSError, OutputError) as error:
        return f"how long compilations take on this machine was not remembered: {error}"
    return ""


def _file() -> Path:
    return Path(platformdirs.user_cache_path("wavecrest")) / "compile_pace.json"


def _machine(device: Device) -> str:
    """Host, GPU and PyTorch: the name under which a pace is kept."""
    host = hardware.cpu()
    return f"{host.name}, {host.compute_units} cores, {device.name}, torch {torch.__version__}"


def _read() -> dict[str, list[float]]:
    """The ratios by machine; none where the file is not there or damaged: it is only a cache."""
    try:
        rows = files.read_json(_file(), what="cache of compile times")
    except RecordError:
        return {}
    if not isinstance(rows, dict):
        return {}
    return {
        name: [float(one) for one in found if isinstance(one, int | float) and one > 0]
        for name, found in rows.items()
        if isinstance(found, list)
    }
