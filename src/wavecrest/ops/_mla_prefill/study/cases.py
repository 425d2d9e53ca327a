"""The calls that tools make: examples, what is compiled, measured and emulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wavecrest.ops._mla_decode.call import Operands
from wavecrest.ops._mla_decode.study.cases import NOPE, VALUES, Sizes, call


def _call(sizes: Sizes, dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, ...]:
    return call(sizes, dtype, device, **({"softmax_scale": None} | options))


def inputs(B: int, H: int, T: int, S: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """The last T queries of H heads over full caches of S keys (T where that is more), sizes of DeepSeek-V3."""
    return _call(Sizes(B, T, H, max(S, T), nope=NOPE, values=VALUES), dtype, device)


# name -> sizes, dtype, options: chunks of all heads and of a device's share, pages, every option, float32
def _compiled() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    bf16 = torch.bfloat16
    chunk = Sizes(4, 128, 128, 8192, nope=NOPE, values=VALUES)
    every = {"logit_cap": 30.0, "return_lse": True, "tables": "gptj"}
    return {
        "H=128": (chunk, bf16, {}),
        "H=16": (chunk._replace(heads=16), bf16, {}),
        "H=128 pages of 64": (chunk._replace(page=64), bf16, {}),
        "every option": (chunk._replace(heads=16, page=64), bf16, every),
        "float32": (chunk._replace(heads=16), torch.float32, {}),
    }


def compiled() -> dict[str, Operands]:
    """The calls that must compile for every architecture, of meta tensors."""
    return {
        name: Operands(*_call(sizes, dtype, "meta", **options)) for name, (sizes, dtype, options) in _compiled().items()
    }


# batch, queries, heads, keys
_SHARED = ((1, 4096, 128, 4096), (1, 512, 128, 8192), (8, 64, 128, 8192), (8, 64, 16, 8192))
_QUICK = ((1, 32, 4, 64),)


def bench(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Prompts and chunks of them over full caches, in bfloat16."""
    return {
        f"b{b}t{t}h{h}s{s}": partial(_call, Sizes(b, t, h, s, nope=NOPE, values=VALUES), torch.bfloat16, device)
        for b, t, h, s in (_QUICK if suite == "quick" else _SHARED)
    }


def emulated(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Chunks over pages and without, with every option."""
    half, brain = torch.float16, torch.bfloat16
    small = Sizes(2, 20, 5, 96, 32, 16, nope=16, values=24)
    whole = Sizes(2, 9, 10, 200, nope=16, values=24)
    for_hopper = {
        "latents of 512": partial(_call, whole, brain, "cpu", fill=0.4),
        "latents of 512 in pages": partial(_call, whole._replace(keys=192, page=32), half, "cpu", fill=0.7),
    }
    return {
        **(for_hopper if arch == "sm_90" else {}),
        "chunk": partial(_call, small, half, "cpu", fill=0.5),
        "pages of 16": partial(_call, small._replace(page=16), brain, "cpu", tables="neox"),
        "every option": partial(
            _call,
            small._replace(batch=1, tokens=17),
            torch.float32,
            "cpu",
            tables="gptj",
            logit_cap=5.0,
            return_lse=True,
        ),
    }
