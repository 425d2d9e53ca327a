"""The architecture that kernels are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch.tracing import constant_in_graphs


@cache
def _detected() -> str:
    known = hardware.detect().known
    return "" if known is None else known.name


# Dynamo would trace the detection and the imports in it; a name it can keep as a constant
@constant_in_graphs
def _name() -> str:
    return _detected()


_assumed: hardware.Arch | None = None


@contextmanager
def assumed(known: hardware.Arch) -> Iterator[None]:
    """Inside, `arch` returns `known`, to describe calls on a device that is not here; nothing can be launched."""
    global _assumed
    before, _assumed = _assumed, known
    try:
        yield
    finally:
        _assumed = before


def arch() -> hardware.Arch | None:
    """The architecture that kernels are made for: the emulated one, or the current GPU's; None without a GPU."""
    if _assumed is not None:
        return _assumed
    if _triton.emulated is not None:
        return hardware.ARCHS[_triton.emulated]
    name = _name()
    return hardware.ARCHS[name] if name else None


# triton 3.6 gives a load no cache bits there, whatever the cache modifier says (read in the machine code)
_LOADS_ARE_CACHED = ("gfx90a", "gfx1100", "gfx1151", "gfx1201")


def look(known: hardware.Arch | None) -> int:
    """The kind of load that sees what other programs write meanwhile: VOLATILE, UNCACHED or ATOMIC of `device`."""
    if known is None or known.vendor == "nvidia":
        return 0
    return 2 if known.name in _LOADS_ARE_CACHED else 1


def products(dtype: torch.dtype, arch: hardware.Arch | None) -> str:
    """How `tl.dot` multiplies float32: in three products of tf32 on NVIDIA, which has no matrix unit for it.

    Elsewhere, and for other types, as they are.
    """
    nvidia = arch is not None and arch.vendor == "nvidia"
    return "tf32x3" if nvidia and dtype == torch.float32 else "ieee"


def wave_size() -> int:
    """Threads a warp (NVIDIA) or wave (AMD) of `arch`; 32 if that is None."""
    known = arch()
    return known.wave_size if known is not None else 32


def is_assumed() -> bool:
    """True inside `assumed`, where nothing can be launched."""
    return _assumed is not None


# programs at a time where they are run one after the other: the interpreter's
_ANY = 1 << 30


@cache
def _detected_units(device: str) -> int:
    return hardware.detect(device).compute_units


@constant_in_graphs
def units(device: str) -> int:
    """The number of programs, one a compute unit, that a device runs at once.

    Args:
        device: its name, such as "cuda:0". The emulator has its own number, and the interpreter, which runs programs
            one after the other, no limit.
    """
    if _assumed is not None:
        return _assumed.compute_units
    if _triton.emulated is not None:
        return _triton.resident
    return _ANY if device == "cpu" else _detected_units(device)
