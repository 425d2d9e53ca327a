"""Programmatic dependent launch (sm_90 and later): kernels that start before the one in front has ended."""

from __future__ import annotations

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument

# NVIDIA's architectures without programmatic dependent launch
BEFORE_OVERLAP = ("sm_80",)
# EARLY of a configuration that does not name it: with 1 everywhere a decode step of xLSTM 7B was 11 % longer, timed one
# after the other (H200, 2026-11-22)
EARLY = 0
# most steps to prefetch: the code grows with each
MOST_AHEAD = 16


def overlaps(arch: hardware.Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended (sm_90 and later)."""
    if arch is None or arch.vendor != "nvidia" or arch.name in BEFORE_OVERLAP or _triton.interpreted:
        return False
    # Inductor (torch 2.11) does not know the option
    return not torch.compiler.is_compiling()


def start_of(config: Config, arch: hardware.Arch | None) -> tuple[int, Config]:
    """(EARLY, the launch's configuration without it).

    EARLY = 0: the launch starts when the one before has ended. 1: it starts while that one runs, and waits inside
    (programmatic dependent launch). 1 + n: it also prefetches its first n steps into the L2 cache before it waits.
    It is 0 where kernels do not overlap.

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
