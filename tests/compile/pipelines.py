"""Find tiles that sm_90's pipelines overwrite too early, as JSON: `python pipelines.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import wavecrest.ops.common.launcher as _launcher
from tests.compile.halfway import ttgir
from tests.compile.known import Known
from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.chunkwise import config as configs
from wavecrest.ops.mlstm.chunkwise import launch as launches
from wavecrest.ops.mlstm.study.cases import example

ARCH = "sm_90"


@triton.jit
def _shared_tile_kernel(a_ptr, b_ptr, c_ptr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile that a product and a sum both read."""
    offs = tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, K, BLOCK):
        a = tl.load(a_ptr + offs[:, None] * K + part + offs[None, :])
        b = tl.load(b_ptr + (part + offs)[:, None] * BLOCK + offs[None, :])
        c = tl.dot(a, b, c)
        total += tl.sum(a.to(tl.float32), 1)
    tl.store(c_ptr + offs[:, None] * BLOCK + offs[None, :], c + total[:, None])


def early(text: str) -> list[str]:
    """Tiles in shared memory of products that may be under way behind their wait, and that something else loads too."""
    source = dict(re.findall(r"(%\S+) = ttg\.memdesc_trans (%[^\s,{]+)", text))
    pending = set()
    for names in re.findall(r"ttng\.warp_group_dot_wait ([^{]*) \{pendings = [1-9]", text):
        pending |= {source.get(name, name) for name in names.replace(",", " ").split()[1:]}
    return sorted(pending & set(re.findall(r"ttg\.local_load (%[^\s,:]+)", text)))


def main() -> None:
    square = torch.empty((256, 64), dtype=torch.bfloat16, device="meta")
    control = _launcher.Launch(
        _shared_tile_kernel, (1,), (square, square, square), {"K": 256, "BLOCK": 64}, Config(num_warps=4, num_stages=3)
    )
    found = {"control": control}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        given = example((1, 8, 2048, 256, 512), dtype, "meta")
        first = configs.default(configs.Shape(256, 512, name), hardware.ARCHS[ARCH])
        for title, change in (("whole", {}), ("parts", {"BLOCK_K": 128, "BLOCK_T": 64, "num_stages": 3})):
            made = launches.planned(given, Config(**(first.kwargs | change)), hardware.ARCHS[ARCH])
            chosen = made[2:4] if title == "whole" else made[3:4]
            found |= {f"{name} {title} {one.kernel.__name__}": one for one in chosen}
    known = Known(__file__)

    def told(launch: _launcher.Launch) -> tuple[int, list[str]]:
        """How many waits leave a product under way, and what is overwritten under it."""
        text = ttgir(launch, ARCH)
        return len(re.findall(r"pendings = [1-9]", text)), early(text)

    report = {name: known.answer(one, ARCH, functools.partial(told, one)) for name, one in found.items()}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
