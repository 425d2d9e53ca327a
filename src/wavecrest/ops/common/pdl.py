"""Programmatic dependent launch (sm_90 and later): kernels that start before the one in front has ended."""

from __future__ import annotations

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument

# NVIDIA's architectures without programmatic dependent launch
BEFORE_OVERLAP = ("sm_80",)
# how early kernels start whose configuration does not say: a decode step of xLSTM 7B was 11 % longer with it, timed one
# after the other (H200, 2026-11-22)
EARLY = 0
# steps fetched ahead at most: the code grows with each
MOST_AHEAD = 16


def overlaps(arch: hardware.Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended (sm_90 and later)."""
    if arch is None or arch.vendor != "nvidia" or arch.name in BEFORE_OVERLAP or _triton.interpreted:
        return False
    # Inductor (torch 2.11) does not know the option
    return not torch.compiler.is_compiling()


def start_of(config: Config, arch: hardware.Arch | None) -> tuple[int, Config]:
    """How early a launch starts, and what it is launched with: `config` without EARLY.

    EARLY of a configuration: 0: behind the end of the launch before; 1: while that runs (programmatic dependent
    launch), and waits inside; 1 + n: and before it waits, has its first n steps brought to the L2 cache. It is 0 where
    kernels do not overlap.

    Raises:
        InvalidArgument: EARLY is below 0, or has more steps than `MOST_AHEAD`.
    """
    early = config.kwargs.get("EARLY", EARLY)
    if not 0 <= early <= 1 + MOST_AHEAD:
        raise InvalidArgument(f"EARLY is 0, 1, or 1 and up to {MOST_AHEAD} steps to fetch ahead, not {early}")
    options = {name: value for name, value in config.kwargs.items() if name != "EARLY"}
    if not overlaps(arch):
        early = 0
    return early, Config(**options, **({"launch_pdl": 1} if early else {}))
