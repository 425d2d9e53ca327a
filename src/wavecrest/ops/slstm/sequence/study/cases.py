"""Calls of slstm_sequence to compile, measure and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.keys import name_of
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence.config import default, default_cooperative
from wavecrest.ops.slstm.sequence.launch import planned
from wavecrest.ops.slstm.sequence.launch_cooperative import keeps_weights
from wavecrest.ops.slstm.sequence.launch_cooperative import planned as planned_cooperative
from wavecrest.ops.slstm.sequence.launch_steps import planned as planned_steps
from wavecrest.ops.slstm.step.config import default as default_step
from wavecrest.ops.slstm.study.cases import Shape, example

# B, S, NH, D and options: weights in registers and read by each token, padded rows, both forget gates, dtypes
_COMPILED: dict[str, tuple[Shape, torch.dtype, dict[str, Any]]] = {
    "64": ((16, 256, 4, 64), torch.bfloat16, {"return_last_states": True, "first": True}),
    "128": ((16, 256, 4, 128), torch.bfloat16, {"return_last_states": True, "first": True}),
    "256": ((16, 256, 4, 256), torch.bfloat16, {"return_last_states": True, "first": True}),
    "64 float32": ((16, 256, 4, 64), torch.float32, {"return_last_states": True}),
    "128 float32": ((16, 256, 4, 128), torch.float32, {}),
    "48 float16 padded": ((16, 256, 4, 48), torch.float16, {"forget_gate": "exp", "padded": True}),
}
# a launch for each token
_COMPILED_STEPS: dict[str, tuple[Shape, torch.dtype, dict[str, Any]]] = {
    "steps 256": ((16, 256, 4, 256), torch.bfloat16, {"return_last_states": True, "first": True}),
    "steps 512 padded": ((16, 256, 4, 512), torch.bfloat16, {"padded": True, "return_last_states": True}),
}
# programs that share a head
_COMPILED_COOPERATIVE: dict[str, tuple[Shape, torch.dtype, dict[str, Any]]] = {
    "cooperative 256": ((16, 256, 4, 256), torch.bfloat16, {"return_last_states": True, "first": True}),
    "cooperative 512 padded": ((16, 256, 4, 512), torch.float16, {"padded": True, "return_last_states": True}),
    "cooperative 1024": ((16, 256, 1, 1024), torch.bfloat16, {"forget_gate": "exp"}),
    "cooperative 128 float32": ((16, 256, 4, 128), torch.float32, {}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, _launcher.Launch] = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        call = _on_meta(shape, dtype, options)
        cases[name] = planned(call, config or default(shape[3], name_of(dtype), arch), arch)[0]
    # a configuration that is given is one of the kernel above
    for name, (shape, dtype, options) in _COMPILED_STEPS.items() if config is None else ():
        call = _on_meta(shape, dtype, options)
        cases[name] = planned_steps(call, default_step(shape[3], arch), arch)[0]
    for name, (shape, dtype, options) in (
        _COMPILED_COOPERATIVE.items() if config is None and keeps_weights(arch) else ()
    ):
        call = _on_meta(shape, dtype, options)
        default_of_it = default_cooperative(shape[2], shape[3], name_of(dtype), arch, arch.compute_units)
        cases[name] = planned_cooperative(call, default_of_it, arch)[0]
    return cases


def _on_meta(shape: Shape, dtype: torch.dtype, options: dict[str, Any]) -> SlstmCall:
    """A call without memory; `padded`: of padded rows with resets."""
    given = dict(options)
    if given.pop("padded", False):
        given |= {
            "seq_starts": torch.zeros(shape[0], dtype=torch.int32, device="meta"),
            "seq_lens": torch.zeros(shape[0], dtype=torch.int32, device="meta"),
            "resets": torch.zeros(shape[:2], dtype=torch.bool, device="meta"),
        }
    return example(shape, dtype, "meta", **given)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], SlstmCall]]:
    """Rows of 256 tokens in bfloat16 with states, 4 heads.

    Neither rows nor tokens are part of the key: `wavecrest tune` takes the first case of each size of heads.
    """
    shapes = {f"d{d} b{b}": (b, 256, 4, d) for d in (64, 128, 256) for b in (16, 1, 64)}
    if suite == "quick":
        shapes = {"d32 b2": (2, 8, 2, 32)}
    options = {"first": True, "return_last_states": True}
    return {name: partial(example, shape, torch.bfloat16, device, **options) for name, shape in shapes.items()}


def emulate_cases(arch: str) -> dict[str, Callable[[], SlstmCall]]:
    """Odd head_dims, padded rows with resets, both forget gates, weights kept and weights read again.

    States are asked for in float32 alone: in 16 bits they carry the rounding of h as an operand.
    """
    lens = {
        "seq_starts": torch.tensor([2, 0], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 7], dtype=torch.int32),
    }
    resets = torch.zeros(2, 7, dtype=torch.bool)
    resets[0, 3] = resets[1, [0, 5]] = True
    return {
        "odd columns": partial(example, (3, 5, 2, 24), torch.bfloat16, "cpu"),
        "padded resets": partial(
            example, (2, 7, 1, 16), torch.float32, "cpu", resets=resets, first=True, return_last_states=True, **lens
        ),
        "exponential": partial(example, (2, 5, 1, 32), torch.float16, "cpu", forget_gate="exp", plain=True),
        "kept": partial(example, (2, 3, 1, 128), torch.bfloat16, "cpu"),
        "read again": partial(example, (2, 3, 1, 256), torch.bfloat16, "cpu"),
    }
