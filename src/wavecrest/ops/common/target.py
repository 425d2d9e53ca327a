"""The architecture that kernels are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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


def wave_size() -> int:
    """Threads a warp (NVIDIA) or wave (AMD) of `arch`; 32 if that is None."""
    known = arch()
    return known.wave_size if known is not None else 32


def is_assumed() -> bool:
    """True inside `assumed`, where nothing can be launched."""
    return _assumed is not None
