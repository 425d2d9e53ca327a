"""Calls of mlstm_chunkwise to compile, measure and emulate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.chunkwise.backend import shape_of
from wavecrest.ops.mlstm.chunkwise.config import default
from wavecrest.ops.mlstm.chunkwise.launch import planned
from wavecrest.ops.mlstm.key import key_of
from wavecrest.ops.mlstm.study.cases import emulated, example

_Shape = tuple[int, int, int, int, int]
# B, NH, S, DK, DV and options: both shapes of heads, with states, norm and gate, padded and packed rows, every option
_COMPILED: dict[str, tuple[_Shape, torch.dtype, dict[str, Any]]] = {
    "7B": ((1, 8, 2048, 256, 512), torch.bfloat16, {"return_last_states": True, "epilogue": True}),
    "64x128": ((1, 8, 2048, 64, 128), torch.bfloat16, {"return_last_states": True, "epilogue": True}),
    "7B padded first": ((4, 8, 2048, 256, 512), torch.bfloat16, {"first": True, "return_last_states": True}),
    "7B sigmoid float16": ((1, 8, 2048, 256, 512), torch.float16, {"input_gate": "sigmoid"}),
    "64x128 packed resets": ((1, 8, 2048, 64, 128), torch.float16, {"epilogue": True, "gate_soft_cap": 15.0}),
    "96x192": ((1, 4, 2048, 96, 192), torch.bfloat16, {}),
    "float32": ((1, 8, 2048, 64, 128), torch.float32, {"gate_soft_cap": 15.0}),
    # a larger DK than a program weights at a time
    "512x64": ((1, 4, 2048, 512, 64), torch.bfloat16, {}),
}


def _compiled() -> Iterator[tuple[str, MlstmCall]]:
    for name, (shape, dtype, options) in _COMPILED.items():
        more: dict[str, Any] = {}
        if "padded" in name:
            more = {"seq_starts": torch.empty(shape[0], dtype=torch.int32, device="meta")}
            more["seq_lens"] = more["seq_starts"]
        if "packed" in name:
            more = {"cu_seqlens": torch.empty(9, dtype=torch.int32, device="meta")}
            more["resets"] = torch.empty(1, shape[2], dtype=torch.bool, device="meta")
        yield name, example(shape, dtype, "meta", **options, **more)


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, _launcher.Launch] = {}
    for name, call in _compiled():
        made = config or default(shape_of(key_of(call)), arch)
        launches = planned(call, made, arch)
        names = (f"{name} gates", f"{name} keys", f"{name} states", name, f"{name} norm")
        cases |= dict(zip(names, launches, strict=False))
    return cases


# B, NH, S, DK, DV: xLSTM-7B, and smaller heads
_BENCH = {
    "7B b1s2048": (1, 8, 2048, 256, 512),
    "7B b4s2048": (4, 8, 2048, 256, 512),
    "7B b1s512": (1, 8, 512, 256, 512),
    "7B b1s16384": (1, 8, 16384, 256, 512),
    "nh8 64x128 b4s2048": (4, 8, 2048, 64, 128),
    "nh32 64x128 b1s2048": (1, 32, 2048, 64, 128),
}
# the cell alone: the shapes that peers are compared on
_CELL = {
    "cell b1s2048": (1, 8, 2048, 256, 512),
    "cell b1s4096": (1, 8, 4096, 256, 512),
    "cell b2s2048": (2, 8, 2048, 256, 512),
    "cell b2s4096": (2, 8, 4096, 256, 512),
    "cell b4s2048": (4, 8, 2048, 256, 512),
    "cell b4s4096": (4, 8, 4096, 256, 512),
    "cell nh32 64x128 b4s2048": (4, 32, 2048, 64, 128),
    "cell nh32 64x128 b4s4096": (4, 32, 4096, 64, 128),
    "cell b1s16384": (1, 8, 16384, 256, 512),
}


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MlstmCall]]:
    """Prompts of bfloat16 with last states, norm and output gate as in a model; and the cell alone."""

    def made(shape: _Shape, **options: Any) -> Callable[[], MlstmCall]:
        return partial(example, shape, torch.bfloat16, device, **options)

    model = {"return_last_states": True, "epilogue": True, "gate_soft_cap": 15.0}
    if suite == "quick":
        return {"nh2 32x64 b1s128": made((1, 2, 128, 32, 64), **model)}
    found = {name: made(shape, **model) for name, shape in _BENCH.items()}
    return found | {name: made(shape) for name, shape in _CELL.items()}


def emulate_cases(arch: str) -> dict[str, Callable[[], MlstmCall]]:
    """Odd head_dims, padding, packed sequences, resets, sigmoid gates, norm and gate, states, several chunks."""
    return {
        name: partial(example, shape, dtype, "cpu", chunk_size=32, **options)
        for name, (shape, dtype, options) in emulated().items()
    }
