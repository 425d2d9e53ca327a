"""The bandwidth kernel's configuration: words of a tile and threads of a program."""

from __future__ import annotations

from wavecrest.dispatch.tuned import Config


def configured(wave_size: int) -> Config:
    """16 KiB a tile and 256 threads: four 16-byte accesses a thread in flight. Reasoned, not swept."""
    return Config(BLOCK=4096, num_warps=256 // wave_size)
