"""Calls of mlstm_sequence to compile, measure and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.sequence.config import default
from wavecrest.ops.mlstm.sequence.launch import planned
from wavecrest.ops.mlstm.study.cases import emulated, example

# B, NH, S, DK, DV and options: both shapes of heads, padded rows with every option, sigmoid gates, other dtypes
_COMPILED: dict[str, tuple[tuple[int, int, int, int, int], torch.dtype, dict[str, Any]]] = {
    "7B": ((1, 8, 16, 256, 512), torch.bfloat16, {"return_last_states": True, "first": True, "epilogue": True}),
    "64x128": ((1, 8, 16, 64, 128), torch.bfloat16, {"return_last_states": True, "first": True, "epilogue": True}),
    "sigmoid float16": ((1, 8, 16, 256, 512), torch.float16, {"input_gate": "sigmoid", "return_last_states": True}),
    "float32": ((1, 8, 16, 64, 128), torch.float32, {"gate_soft_cap": 15.0}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, _launcher.Launch] = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        call = example(shape, dtype, "meta", **options)
        launches = planned(call, config or default(*shape[3:], arch), arch)
        cases |= dict(zip((name, f"{name} norm"), launches, strict=False))
    return cases


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MlstmCall]]:
    """A few tokens with states, norm and output gate, in bfloat16, heads of xLSTM-7B."""
    shapes = {"b1s8": (1, 8, 8, 256, 512), "b4s16": (4, 8, 16, 256, 512), "b1s32": (1, 8, 32, 256, 512)}
    if suite == "quick":
        shapes = {"b2s4": (2, 2, 4, 32, 64)}
    options = {"first": True, "epilogue": True, "return_last_states": True, "gate_soft_cap": 15.0}
    return {name: partial(example, shape, torch.bfloat16, device, **options) for name, shape in shapes.items()}


def emulate_cases(arch: str) -> dict[str, Callable[[], MlstmCall]]:
    """Odd head_dims, padding, packed sequences, resets, sigmoid gates, norm and gate in one launch and in two."""
    return {
        name: partial(example, shape, dtype, "cpu", **options) for name, (shape, dtype, options) in emulated().items()
    }
