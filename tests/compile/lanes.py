"""Which lanes load a state that mlstm_step writes over, as JSON: `python lanes.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.halfway import ttgir
from tests.compile.known import Known
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.common.launcher import Launch
from wavecrest.ops.mlstm.step.config import default
from wavecrest.ops.mlstm.step.launch import planned

# DK, DV, and rows, columns and warps of a program: as shipped, narrow, wide, of fewer elements than lanes
CASES = {
    "default": (256, 512, None),
    "narrow": (256, 512, (64, 16, 2)),
    "wide": (256, 512, (16, 512, 8)),
    "odd": (96, 192, (32, 64, 4)),
    "few": (16, 24, (16, 8, 8)),
}
LOAD = re.compile(r"(?:tt\.load|buffer_load) .*tensor<(\d+)x(\d+)x(?:!tt\.ptr<)?f(?:32|16)>?, (#\w+)>")
ONE = r"(\[[\d, ]+\])"
LAYOUT = re.compile(
    rf"^(#\w+) = #ttg\.blocked<\{{sizePerThread = {ONE}, threadsPerWarp = {ONE}, warpsPerCTA = {ONE}", re.MULTILINE
)


def loads(code: str) -> list[dict[str, Any]]:
    """The shape of each loaded matrix, and how much of it a lane, the lanes of a warp and the warps have."""
    layouts = {name: [json.loads(part) for part in parts] for name, *parts in LAYOUT.findall(code)}
    return [
        {"shape": [int(rows), int(columns)], "layout": layouts.get(name)} for rows, columns, name in LOAD.findall(code)
    ]


def _loaded(launch: Launch, arch: str) -> list[dict[str, Any]]:
    return loads(ttgir(launch, arch))


def main() -> None:
    op, found, answers = registry.get("mlstm_step"), {}, Known(__file__)
    for arch in ("sm_90", "gfx942", "gfx1100"):
        known = hardware.ARCHS[arch]
        for name, (dk, dv, chosen) in CASES.items():
            config = default(dk, dv, known)
            if chosen is not None:
                config = Config(**dict(zip(("BLOCK_K", "BLOCK_V", "num_warps"), chosen, strict=True)))
            for dtype in (torch.float32, torch.float16):
                given = op.study.inputs(2, 4, dk, torch.bfloat16, "meta")
                given = given._replace(
                    v=given.v[..., :dv], c=given.c[..., :dv].to(dtype).contiguous(), state_dtype=dtype, in_place=True
                )
                launch = planned(given, config, known)[0]
                loaded = functools.partial(_loaded, launch, arch)
                found[f"{arch} {name} {dtype}"] = {
                    "barrier": launch.constants["BARRIER"], "loads": answers.answer(launch, arch, loaded),
                    "parts": -(-dk // config["BLOCK_K"]),
                }  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
