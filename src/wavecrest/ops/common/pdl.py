"""Programmatic dependent launch (sm_90 and later): kernels that start before the one in front has ended."""

from __future__ import annotations

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument

# NVIDIA's architectures without programmatic dependent launch
BEFORE_OVERLAP = ("sm_80",)
# EARLY of a configuration that does not name it: of row ops and GEMVs, and of others. With the first a captured step of
# Llama 3.1 8B is 1.8 % shorter in bfloat16, 2.8 in int8, 1.8 in int4, and 0.1 for 16 sequences; with decoding attention
# that starts early that one is 9 % longer (H200, 2026-11-28, no record)
EARLY, NOT_EARLY = 1, 0
# most steps to prefetch: the code grows with each
MOST_AHEAD = 16


def overlaps(arch: hardware.Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended (sm_90 and later)."""
    if arch is None or arch.vendor != "nvidia" or arch.name in BEFORE_OVERLAP or _triton.interpreted:
        return False
    # Inductor (torch 2.11) does not know the option
    return not torch.compiler.is_compiling()


def start_of(config: Config, arch: hardware.Arch | None, unnamed: int = NOT_EARLY) -> tuple[int, Config]:
    """(EARLY, the launch's configuration without it); `unnamed`: EARLY where the configuration does not name it.

    EARLY = 0: the launch starts when the one before has ended. 1: it starts while that one runs, and waits inside
    (programmatic dependent launch). 1 + n: it also prefetches its first n steps into the L2 cache before it waits.
    It is 0 where kernels do not overlap.

    Raises:
        InvalidArgument: EARLY is below 0, or has more steps than `MOST_AHEAD`.
    """
    early = config.kwargs.get("EARLY", unnamed)
    if not 0 <= early <= 1 + MOST_AHEAD:
        raise InvalidArgument(f"EARLY is 0, 1, or 1 and up to {MOST_AHEAD} steps to fetch ahead, not {early}")
    options = {name: value for name, value in config.kwargs.items() if name != "EARLY"}
    if not overlaps(arch):
        early = 0
    return early, Config(**options, **({"launch_pdl": 1} if early else {}))
