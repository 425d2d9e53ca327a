"""Cases of causal_conv1d: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from wavecrest.dispatch.keys import name_of
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall
from wavecrest.ops._causal_conv1d.config import default
from wavecrest.ops._causal_conv1d.launch import launch
from wavecrest.ops.common.launcher import Launch

Shape = tuple[int, int, int]


def inputs(B: int, S: int, C: int, dtype: torch.dtype, device: str) -> CausalConv1dCall:
    """B rows of S tokens of C channels, 4 taps, with a bias and SiLU."""
    return example((B, S, C), dtype, device)


def example(
    shape: Shape, dtype: torch.dtype, device: str, *, taps: int = 4, bias: bool = True, first: bool = False,
    lens: bool = False, activation: str | None = "silu",
) -> CausalConv1dCall:  # fmt: skip
    """A call; `first`: with inputs before it, `lens`: of rows of several lengths, from all tokens to none."""
    b, s, c = shape
    x = torch.randn(shape, device=device).to(dtype)
    weight = (torch.randn(c, taps, device=device) * taps**-0.5).to(dtype)
    made: dict[str, Any] = {"bias": torch.randn(c, device=device).to(dtype)} if bias else {}
    if first:
        made["initial"] = torch.randn(b, taps - 1, c, device=device).to(dtype)
    if lens:
        made["seq_lens"] = (s - (torch.arange(b, device=device) * s + b - 1) // max(1, b)).int()
    return CausalConv1dCall(x, weight, activation=activation, **made)


def call_of_key(parts: Mapping[str, Cell], device: str) -> CausalConv1dCall | None:
    """A call with the key of these parts; None where they name no size, or dtypes that differ."""
    dtype = getattr(torch, str(parts["dtype"]), None)
    shape = (int(parts["batch"] or 0), int(parts["tokens"] or 0), int(parts["channels"] or 0))
    same = all(parts[name] in (None, parts["dtype"]) for name in ("weight", "bias"))
    if not isinstance(dtype, torch.dtype) or min(shape) < 1 or not same:
        return None
    activation = parts["activation"]
    return example(
        shape, dtype, device, taps=int(parts["taps"] or 1), bias=parts["bias"] is not None,
        first=bool(parts["initial"]), lens=bool(parts["lens"]), activation=None if activation is None else "silu",
    )  # fmt: skip


# a prompt of xLSTM, a decoding step of it, and channels that are no power of two
_COMPILED: dict[str, tuple[Shape, torch.dtype, dict[str, Any]]] = {
    "prompt": ((4, 2048, 2048), torch.bfloat16, {}),
    "prompt float32 first": ((4, 2048, 2048), torch.float32, {"first": True}),
    "step": ((16, 1, 2048), torch.bfloat16, {"first": True}),
    "384 channels lens": ((4, 196, 384), torch.float16, {"lens": True, "first": True, "activation": None}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        call = example(shape, dtype, "meta", **options)
        made = config or default(shape[1], shape[2], name_of(dtype), arch.wave_size)
        cases[name] = launch(call, torch.empty_like(call.x), made)
    return cases


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], CausalConv1dCall]]:
    """Prompts and decoding steps of 2,048 channels in bfloat16."""
    shapes: dict[str, Shape] = {"prompt 2048": (4, 2048, 2048), "prompt 512": (1, 512, 2048), "step 16": (16, 1, 2048)}
    if suite == "quick":
        shapes = {"b2 s8 c32": (2, 8, 32)}
    return {name: partial(example, shape, torch.bfloat16, device, first=True) for name, shape in shapes.items()}


def emulate_cases(arch: str) -> dict[str, Callable[[], CausalConv1dCall]]:
    """Odd sizes, inputs before the first token, rows of several lengths, one token, one tap."""
    return {
        "odd sizes": partial(example, (3, 37, 45), torch.float32, "cpu"),
        "first and lens": partial(example, (3, 40, 48), torch.bfloat16, "cpu", first=True, lens=True),
        "one token": partial(example, (5, 1, 160), torch.float16, "cpu", first=True),
        "one tap": partial(example, (2, 6, 32), torch.bfloat16, "cpu", taps=1, bias=False, activation=None),
    }
