"""Cases of topk_routing: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._topk_routing.call import TopkRoutingCall, key_of
from wavecrest.ops._topk_routing.config import configured
from wavecrest.ops._topk_routing.launch import launches
from wavecrest.ops.common.launcher import Launch

# experts, k and options of published models
DEEPSEEK_V3: tuple[int, int, dict[str, Any]] = (
    256, 8, {"scores": "sigmoid", "scale": 2.5, "num_groups": 8, "topk_groups": 4}
)  # fmt: skip
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mixtral": (8, 2, {}),
    "qwen3": (128, 8, {}),
    "deepseek-v3": DEEPSEEK_V3,
}


def example(
    tokens: int, experts: int, k: int, dtype: torch.dtype, device: str, *, biased: bool = False, **options: Any
) -> TopkRoutingCall:
    """A call with random logits; `biased`: with a bias. `options`: fields of the call."""
    if biased:
        options = {"bias": 0.1 * torch.randn(experts, device=device)} | options
    return TopkRoutingCall(torch.randn(tokens, experts, dtype=dtype, device=device), k, **options)


def inputs(M: int, N: int, dtype: torch.dtype, device: str) -> TopkRoutingCall:
    """M tokens, up to 8 of N experts."""
    return example(M, N, max(1, min(8, N)), dtype, device)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], TopkRoutingCall]]:
    """Routers of published models, from one token to a prompt."""
    tokens, dtype = ((4,), torch.float32) if suite == "quick" else ((1, 64, 4096), torch.bfloat16)
    return {
        f"{name} t{count}": partial(example, count, experts, k, dtype, device, biased=name == "deepseek-v3", **options)
        for name, (experts, k, options) in MODELS.items()
        for count in tokens
    }


def emulate_cases(arch: str) -> dict[str, Callable[[], TopkRoutingCall]]:
    """Groups with a bias, and without renormalisation."""
    experts, k, options = DEEPSEEK_V3
    return {
        "groups": partial(example, 5, experts, k, torch.float32, "cpu", biased=True, **options),
        "sigmoid": partial(example, 3, 60, 4, torch.bfloat16, "cpu", scores="sigmoid", renormalize=False),
    }


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    for name, (experts, k, options) in MODELS.items():
        for tokens in (1, 4096):
            call = example(tokens, experts, k, torch.bfloat16, "meta", biased=name == "deepseek-v3", **options)
            made = config or configured(key_of(call)[0], _layout.power_of_two(experts), arch.wave_size)
            cases[f"{name} t={tokens}"] = launches(call, made, arch)[0]
    return cases
