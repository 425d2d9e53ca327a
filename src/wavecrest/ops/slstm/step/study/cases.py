"""Cases of slstm_step: example calls to compile, benchmark and emulate, and the least work of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.call import SlstmStepCall
from wavecrest.ops.slstm.step.config import default
from wavecrest.ops.slstm.step.launch import planned
from wavecrest.ops.slstm.study.cases import example as sequence_example


def inputs(B: int, H: int, D: int, dtype: torch.dtype, device: str) -> SlstmStepCall:
    """B rows of H heads, with bias."""
    return example((B, H, D), dtype, device)


def cost_of(call: SlstmStepCall) -> Cost:
    """The recurrent product; every operand once, states read and written."""
    read = sum(one.nbytes for one in call if isinstance(one, Tensor))
    states = call.h.numel()
    return Cost(flops=8 * states * call.head_dim, bytes=read + (16 + call.x.element_size()) * states)


def example(shape: tuple[int, int, int], dtype: torch.dtype, device: str, **options: Any) -> SlstmStepCall:
    """A step of B, NH, D; `plain`: without a bias."""
    b, nh, d = shape
    made = sequence_example((b, 1, nh, d), dtype, device, first=True, **options)
    h, c, n, m = made.initial
    assert h is not None and c is not None and n is not None and m is not None
    return SlstmStepCall(made.x[:, 0], made.r, h, c, n, m, made.bias, made.forget_gate)


def call_of_key(parts: Mapping[str, Cell], device: str) -> SlstmStepCall | None:
    """A step of 16 rows with this key, as the key does not say how many; see `Study`."""
    dtype = getattr(torch, str(parts["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        return None
    shape = (16, int(parts["heads"] or 0), int(parts["head_dim"] or 0))
    return example(shape, dtype, device, forget_gate=parts["forget_gate"], plain=not parts["bias"])


# B, NH, D and options
_COMPILED: dict[str, tuple[tuple[int, int, int], torch.dtype, dict[str, Any]]] = {
    "128": ((16, 4, 128), torch.bfloat16, {}),
    "512": ((16, 4, 512), torch.bfloat16, {}),
    "96 float32": ((16, 4, 96), torch.float32, {"forget_gate": "exp", "plain": True}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    return {
        name: planned(example(shape, dtype, "meta", **options), config or default(shape[2], arch), arch)[0]
        for name, (shape, dtype, options) in _COMPILED.items()
    }


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], SlstmStepCall]]:
    """A step of bfloat16, 4 heads; `wavecrest tune` takes the first case of each size of heads."""
    sizes: tuple[int, ...] = (64, 128, 256)
    batches: tuple[int, ...] = (16, 1, 64)
    if suite == "quick":
        sizes, batches = (32,), (2,)
    return {f"d{d} b{b}": partial(example, (b, 4, d), torch.bfloat16, device) for d in sizes for b in batches}


def emulate_cases(arch: str) -> dict[str, Callable[[], SlstmStepCall]]:
    """Odd head_dims, both forget gates, several programs of a head; float32, as states are."""
    single = torch.float32
    return {
        "odd columns": partial(example, (2, 3, 24), single, "cpu"),
        "exponential": partial(example, (3, 2, 16), single, "cpu", forget_gate="exp", plain=True),
        "several programs": partial(example, (2, 1, 160), single, "cpu"),
    }
