"""The bandwidth kernel's configurations that `wavecrest tune memcpy` tries."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._memcpy.config import configured

# words of a tile, and threads
_TILES = (
    (512, 128), (1024, 64), (1024, 128), (1024, 256), (2048, 64), (2048, 128), (2048, 256), (4096, 128), (4096, 512),
    (8192, 256), (8192, 512), (16384, 512), (16384, 1024),
)  # fmt: skip


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    yield configured(arch.wave_size)
    for block, threads in _TILES:
        yield Config(BLOCK=block, num_warps=threads // arch.wave_size)
