"""Cases of mla_decode: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode import launch, launch_hopper
from wavecrest.ops._mla_decode.call import MlaDecodeCall
from wavecrest.ops._mla_decode.config import default, default_hopper
from wavecrest.ops._mla_decode.key import key_of, shape_of
from wavecrest.ops.common.launcher import Launch

# DeepSeek-V2 and V3
LATENT_DIM, HEAD_DIM_ROPE, HEAD_DIM_NOPE, HEAD_DIM_V = 512, 64, 128, 128


class Sizes(NamedTuple):
    """The sizes of an example call.

    Attributes:
        batch: sequences.
        seqlen_q, heads: queries of a sequence, and their heads.
        max_seqlen_k: rows of the cache for a sequence.
        latent_dim, head_dim_rope: columns of a latent and of the rotary part.
        page_size: tokens of a page; 0: no pages.
        head_dim_nope, head_dim_v: of a head; 0: queries come absorbed, results are latents.
    """

    batch: int
    seqlen_q: int
    heads: int
    max_seqlen_k: int
    latent_dim: int = LATENT_DIM
    head_dim_rope: int = HEAD_DIM_ROPE
    page_size: int = 0
    head_dim_nope: int = 0
    head_dim_v: int = 0


def example(
    sizes: Sizes, dtype: torch.dtype, device: str, fill: float = 1.0, rotary: str | None = None, **options: Any
) -> MlaDecodeCall:
    """A call whose sequences fill from all of their caches, the first, to this share of them, the last.

    `rotary`: the style in which the queries' rotary part is to be turned, None: it comes turned. `options`: fields of
    the call.
    """

    def made(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=dtype, device=device)

    b, t, h = sizes[:3]
    pages = b * (sizes.max_seqlen_k // sizes.page_size) if sizes.page_size else b
    cache = made(pages, sizes.page_size or sizes.max_seqlen_k, sizes.latent_dim + sizes.head_dim_rope)
    lengths = torch.linspace(1.0, fill, b).mul(sizes.max_seqlen_k).to(torch.int32).to(device)
    options = {"softmax_scale": (HEAD_DIM_NOPE + HEAD_DIM_ROPE) ** -0.5} | options
    if sizes.page_size:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0), device="cpu").view(b, -1)
        options["block_table"] = order.to(torch.int32).to(device)
    if sizes.head_dim_nope:
        options["w_uk"] = made(h, sizes.head_dim_nope, sizes.latent_dim, size=sizes.head_dim_nope**-0.5)
    if sizes.head_dim_v:
        options["w_uv"] = made(h, sizes.head_dim_v, sizes.latent_dim, size=sizes.latent_dim**-0.5)
    if rotary is not None:
        angles = torch.randn(sizes.max_seqlen_k, sizes.head_dim_rope // 2, device=device)
        options |= {"cos": angles.cos(), "sin": angles.sin(), "rope_style": rotary}
    q = made(b, t, h, sizes.head_dim_nope or sizes.latent_dim)
    return MlaDecodeCall(q, made(b, t, h, sizes.head_dim_rope), cache, lengths, **options)


def inputs(B: int, H: int, S: int, dtype: torch.dtype, device: str) -> MlaDecodeCall:
    """One absorbed query of H heads over full caches of S keys, sizes of DeepSeek-V3."""
    return example(Sizes(B, 1, H, S), dtype, device)


# name -> sizes, dtype, options: a device's heads of DeepSeek-V3 on 1, 4 and 8 devices, one split and many, pages that
# tiles fit into and others, several queries, weights, every option, a smaller latent, float32
def _compiled() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    bf16 = torch.bfloat16
    whole = Sizes(64, 1, 128, 8192)
    every = {
        "logit_cap": 30.0, "return_lse": True, "rotary": "gptj", "batch_invariant": True,
        "positions": torch.empty(64, 2, dtype=torch.int64, device="meta"),
    }  # fmt: skip
    return {
        "H=128": (whole, bf16, {}),
        "H=128 split": (whole._replace(batch=1), bf16, {}),
        "H=32": (whole._replace(heads=32), bf16, {}),
        "H=16": (whole._replace(heads=16), bf16, {}),
        "H=16 float16": (whole._replace(heads=16), torch.float16, {}),
        "H=128 pages of 64": (whole._replace(page_size=64), bf16, {}),
        "H=16 pages of 64": (whole._replace(heads=16, page_size=64), bf16, {}),
        "H=16 pages of 1": (whole._replace(heads=16, page_size=1), bf16, {}),
        "H=128 pages of 1": (whole._replace(page_size=1), bf16, {}),
        "weights": (whole._replace(heads=16, head_dim_nope=HEAD_DIM_NOPE, head_dim_v=HEAD_DIM_V), bf16, {}),
        "every option H=128": (whole._replace(seqlen_q=2, page_size=64), bf16, every),
        "every option H=16": (whole._replace(heads=16, seqlen_q=2, page_size=64), bf16, every),
        "R=256": (whole._replace(latent_dim=256), bf16, {}),
        "float32": (whole._replace(heads=16), torch.float32, {}),
    }  # fmt: skip


def _compiled_for_hopper() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    whole, half, brain = Sizes(64, 1, 128, 8192), torch.float16, torch.bfloat16
    return {
        "H=128": (whole, brain, {}),
        "H=128 split float16": (whole._replace(batch=1), half, {}),
        "H=16 pages of 32": (whole._replace(heads=16, page_size=32), brain, {}),
        "logarithms of 2 queries": (whole._replace(seqlen_q=2, page_size=64), brain, {"return_lse": True}),
    }


def compiled() -> dict[str, MlaDecodeCall]:
    """The calls that must compile for every architecture, of meta tensors."""
    return {name: example(sizes, dtype, "meta", **options) for name, (sizes, dtype, options) in _compiled().items()}


def compiled_for_hopper() -> dict[str, MlaDecodeCall]:
    """The calls that sm_90's kernel must compile for, of meta tensors."""
    found = _compiled_for_hopper().items()
    return {name: example(sizes, dtype, "meta", **options) for name, (sizes, dtype, options) in found}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    names = {"_mla_product_kernel": "product", "_mla_join_kernel": "join"}
    cases: dict[str, Launch] = {}
    if arch.name == "sm_90" and config is None:
        for name, call in compiled_for_hopper().items():
            made = default_hopper(shape_of(key_of(call)), arch)
            cases[f"hopper {name}"] = launch_hopper.launches(call, made, arch)[0]
    for name, call in compiled().items():
        made = config or default(shape_of(key_of(call)), arch)
        for one in launch.launches(call, made, arch):
            label = f"{name} {names.get(one.kernel.__name__, '')}".strip()
            cases[f"{label} of results" if label in cases else label] = one
    return cases


# batch, heads, keys
_SHARED = ((64, 128, 4096), (64, 128, 8192), (1, 128, 8192), (64, 16, 8192), (16, 16, 32768), (1, 16, 131072))
_QUICK = ((2, 16, 256),)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MlaDecodeCall]]:
    """One absorbed query a sequence in bfloat16 over full caches; those of 8192 keys again in pages of 64."""
    found: dict[str, Callable[[], MlaDecodeCall]] = {}
    for b, h, t in _QUICK if suite == "quick" else _SHARED:
        sizes, name = Sizes(b, 1, h, t), f"b{b}h{h}t{t}"
        found[name] = partial(example, sizes, torch.bfloat16, device)
        if t == 8192 or suite == "quick":
            found[f"{name} pages=64"] = partial(example, sizes._replace(page_size=64), torch.bfloat16, device)
            found[f"{name} weights"] = partial(
                example, sizes._replace(head_dim_nope=HEAD_DIM_NOPE, head_dim_v=HEAD_DIM_V), torch.bfloat16, device
            )
    return found


def emulate_cases(arch: str) -> dict[str, Callable[[], MlaDecodeCall]]:
    """Ragged lengths, pages, both styles of the rotary part, weights, and several queries with every option."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    small = Sizes(2, 1, 16, 200, 64, 32)
    positions = torch.tensor([[7, 8, 9]])
    # what the kernel for it takes
    whole = Sizes(2, 1, 70, 200)
    paged = whole._replace(max_seqlen_k=1216, seqlen_q=2, page_size=32)
    small_paged = small._replace(max_seqlen_k=192, page_size=32)
    for_hopper = {
        "latents of 512": partial(example, whole, brain, "cpu", fill=0.3),
        "latents of 512 in pages": partial(example, paged, half, "cpu", fill=0.3),
    }
    return {
        **(for_hopper if arch == "sm_90" else {}),
        "ragged": partial(example, small, brain, "cpu", fill=0.1),
        "many heads": partial(example, Sizes(1, 1, 70, 100, 64, 32), brain, "cpu"),
        "pages of 16": partial(example, Sizes(2, 1, 5, 192, 40, 8, 16), half, "cpu", fill=0.5),
        "pages of 32 neox": partial(example, small_paged, brain, "cpu", fill=0.4, rotary="neox"),
        "weights": partial(example, small._replace(head_dim_nope=24, head_dim_v=40), half, "cpu"),
        "every option": partial(
            example, Sizes(1, 3, 6, 140, 48, 16, head_dim_nope=32, head_dim_v=32), single, "cpu",
            rotary="gptj", positions=positions, logit_cap=5.0, return_lse=True, batch_invariant=True,
        ),
        "float32": partial(example, Sizes(1, 2, 4, 150, 32, 16), single, "cpu"),
    }  # fmt: skip
