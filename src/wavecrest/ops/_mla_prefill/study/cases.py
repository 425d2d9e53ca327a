"""Cases of mla_prefill: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.config import default
from wavecrest.ops._mla_decode.key import key_of, shape_of
from wavecrest.ops._mla_decode.launch import launches
from wavecrest.ops._mla_decode.study import cases as _decode
from wavecrest.ops._mla_decode.study.cases import HEAD_DIM_NOPE, HEAD_DIM_V, Sizes
from wavecrest.ops._mla_prefill.backend import unsplit
from wavecrest.ops._mla_prefill.call import MlaPrefillCall
from wavecrest.ops.common.launcher import Launch


def example(sizes: Sizes, dtype: torch.dtype, device: str, **options: Any) -> MlaPrefillCall:
    """A call as `mla_decode`'s example of these sizes, with the default scale."""
    return MlaPrefillCall(*_decode.example(sizes, dtype, device, **({"softmax_scale": None} | options)))


def inputs(B: int, H: int, T: int, S: int, dtype: torch.dtype, device: str) -> MlaPrefillCall:
    """The last T queries of H heads over full caches of S keys (T where that is more), sizes of DeepSeek-V3."""
    return example(Sizes(B, T, H, max(S, T), head_dim_nope=HEAD_DIM_NOPE, head_dim_v=HEAD_DIM_V), dtype, device)


# name -> sizes, dtype, options: chunks of all heads and of a device's share, pages, every option, float32
def _compiled() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    bf16 = torch.bfloat16
    chunk = Sizes(4, 128, 128, 8192, head_dim_nope=HEAD_DIM_NOPE, head_dim_v=HEAD_DIM_V)
    every = {"logit_cap": 30.0, "return_lse": True, "rotary": "gptj"}
    return {
        "H=128": (chunk, bf16, {}),
        "H=16": (chunk._replace(heads=16), bf16, {}),
        "H=128 pages of 64": (chunk._replace(page_size=64), bf16, {}),
        "every option": (chunk._replace(heads=16, page_size=64), bf16, every),
        "float32": (chunk._replace(heads=16), torch.float32, {}),
    }


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, Launch] = {}
    for name, (sizes, dtype, options) in _compiled().items():
        call = example(sizes, dtype, "meta", **options)
        made = config or unsplit(default(shape_of(key_of(call)), arch))
        first, second, *rest = launches(call, made, arch)
        cases |= {f"{name} product": first, name: second}
        if len(rest) > 1:
            cases[f"{name} join"] = rest[0]
        cases[f"{name} product of results"] = rest[-1]
    return cases


# batch, queries, heads, keys
_SHARED = ((1, 4096, 128, 4096), (1, 512, 128, 8192), (8, 64, 128, 8192), (8, 64, 16, 8192))
_QUICK = ((1, 32, 4, 64),)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MlaPrefillCall]]:
    """Prompts and chunks of them over full caches, in bfloat16."""
    return {
        f"b{b}t{t}h{h}s{s}": partial(
            example, Sizes(b, t, h, s, head_dim_nope=HEAD_DIM_NOPE, head_dim_v=HEAD_DIM_V), torch.bfloat16, device
        )
        for b, t, h, s in (_QUICK if suite == "quick" else _SHARED)
    }


def emulate_cases(arch: str) -> dict[str, Callable[[], MlaPrefillCall]]:
    """Chunks over pages and without, with every option."""
    half, brain = torch.float16, torch.bfloat16
    small = Sizes(2, 20, 5, 96, 32, 16, head_dim_nope=16, head_dim_v=24)
    whole = Sizes(2, 9, 10, 200, head_dim_nope=16, head_dim_v=24)
    paged = whole._replace(max_seqlen_k=192, page_size=32)
    for_hopper = {
        "latents of 512": partial(example, whole, brain, "cpu", fill=0.4),
        "latents of 512 in pages": partial(example, paged, half, "cpu", fill=0.7),
    }
    return {
        **(for_hopper if arch == "sm_90" else {}),
        "chunk": partial(example, small, half, "cpu", fill=0.5),
        "pages of 16": partial(example, small._replace(page_size=16), brain, "cpu", rotary="neox"),
        "every option": partial(
            example,
            small._replace(batch=1, seqlen_q=17),
            torch.float32,
            "cpu",
            rotary="gptj",
            logit_cap=5.0,
            return_lse=True,
        ),
    }
