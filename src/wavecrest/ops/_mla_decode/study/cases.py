"""The calls that tools make: examples, what is compiled, measured and emulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.ops._mla_decode.call import Operands

# DeepSeek-V2 and V3: columns of a latent, of the rotary part, of a query's and a value's head
LATENT, ROTARY, NOPE, VALUES = 512, 64, 128, 128


class Sizes(NamedTuple):
    """Batch, queries, heads, keys, columns of a latent, rotary ones, tokens of a page (0: no pages), Dn, Dv.

    Dn and Dv 0: queries come absorbed, results are latents.
    """

    batch: int
    tokens: int
    heads: int
    keys: int
    latent: int = LATENT
    rotary: int = ROTARY
    page: int = 0
    nope: int = 0
    values: int = 0


def call(sizes: Sizes, dtype: torch.dtype, device: str, fill: float = 1.0, **options: Any) -> tuple[Any, ...]:
    """The arguments of a call whose sequences fill this share of their caches, the first of them all of it.

    `tables`: a style of the rotary part, which is then turned.
    """

    def made(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=dtype, device=device)

    b, t, h = sizes[:3]
    pages = b * (sizes.keys // sizes.page) if sizes.page else b
    cache = made(pages, sizes.page or sizes.keys, sizes.latent + sizes.rotary)
    lengths = torch.linspace(1.0, fill, b).mul(sizes.keys).to(torch.int32).to(device)
    options = {"softmax_scale": (NOPE + ROTARY) ** -0.5} | options
    if sizes.page:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0), device="cpu").view(b, -1)
        options["block_table"] = order.to(torch.int32).to(device)
    if sizes.nope:
        options["w_uk"] = made(h, sizes.nope, sizes.latent, size=sizes.nope**-0.5)
    if sizes.values:
        options["w_uv"] = made(h, sizes.values, sizes.latent, size=sizes.latent**-0.5)
    style = options.pop("tables", None)
    if style is not None:
        angles = torch.randn(sizes.keys, sizes.rotary // 2, device=device)
        options |= {"cos": angles.cos(), "sin": angles.sin(), "rope_style": style}
    q = made(b, t, h, sizes.nope or sizes.latent)
    return tuple(Operands(q, made(b, t, h, sizes.rotary), cache, lengths, **options))


def inputs(B: int, H: int, S: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """One absorbed query of H heads over full caches of S keys, sizes of DeepSeek-V3."""
    return call(Sizes(B, 1, H, S), dtype, device)


# name -> sizes, dtype, options: a device's heads of DeepSeek-V3 on 1, 4 and 8 devices, one split and many, pages that
# tiles fit into and others, several queries, weights, every option, a smaller latent, float32
def _compiled() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    bf16 = torch.bfloat16
    whole = Sizes(64, 1, 128, 8192)
    every = {
        "logit_cap": 30.0, "return_lse": True, "tables": "gptj", "batch_invariant": True,
        "positions": torch.empty(64, 2, dtype=torch.int64, device="meta"),
    }  # fmt: skip
    return {
        "H=128": (whole, bf16, {}),
        "H=128 split": (whole._replace(batch=1), bf16, {}),
        "H=32": (whole._replace(heads=32), bf16, {}),
        "H=16": (whole._replace(heads=16), bf16, {}),
        "H=16 float16": (whole._replace(heads=16), torch.float16, {}),
        "H=128 pages of 64": (whole._replace(page=64), bf16, {}),
        "H=16 pages of 64": (whole._replace(heads=16, page=64), bf16, {}),
        "H=16 pages of 1": (whole._replace(heads=16, page=1), bf16, {}),
        "H=128 pages of 1": (whole._replace(page=1), bf16, {}),
        "weights": (whole._replace(heads=16, nope=NOPE, values=VALUES), bf16, {}),
        "every option H=128": (whole._replace(tokens=2, page=64), bf16, every),
        "every option H=16": (whole._replace(heads=16, tokens=2, page=64), bf16, every),
        "R=256": (whole._replace(latent=256), bf16, {}),
        "float32": (whole._replace(heads=16), torch.float32, {}),
    }  # fmt: skip


def compiled() -> dict[str, Operands]:
    """The calls that must compile for every architecture, of meta tensors."""
    return {
        name: Operands(*call(sizes, dtype, "meta", **options)) for name, (sizes, dtype, options) in _compiled().items()
    }


def compiled_for_hopper() -> dict[str, Operands]:
    """The calls that sm_90's kernel must compile for, of meta tensors."""
    whole, half, brain = Sizes(64, 1, 128, 8192), torch.float16, torch.bfloat16
    made: dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]] = {
        "H=128": (whole, brain, {}),
        "H=128 split float16": (whole._replace(batch=1), half, {}),
        "H=16 pages of 32": (whole._replace(heads=16, page=32), brain, {}),
        "logarithms of 2 queries": (whole._replace(tokens=2, page=64), brain, {"return_lse": True}),
    }
    return {name: Operands(*call(sizes, dtype, "meta", **options)) for name, (sizes, dtype, options) in made.items()}


# batch, heads, keys
_SHARED = ((64, 128, 4096), (64, 128, 8192), (1, 128, 8192), (64, 16, 8192), (16, 16, 32768), (1, 16, 131072))
_QUICK = ((2, 16, 256),)


def bench(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """One absorbed query a sequence in bfloat16 over full caches; those of 8192 keys again in pages of 64."""
    found: dict[str, Callable[[], tuple[Any, ...]]] = {}
    for b, h, t in _QUICK if suite == "quick" else _SHARED:
        sizes, name = Sizes(b, 1, h, t), f"b{b}h{h}t{t}"
        found[name] = partial(call, sizes, torch.bfloat16, device)
        if t == 8192 or suite == "quick":
            found[f"{name} pages=64"] = partial(call, sizes._replace(page=64), torch.bfloat16, device)
            found[f"{name} weights"] = partial(call, sizes._replace(nope=NOPE, values=VALUES), torch.bfloat16, device)
    return found


def emulated(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Ragged lengths, pages, both styles of the rotary part, weights, and several queries with every option."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    small = Sizes(2, 1, 16, 200, 64, 32)
    positions = torch.tensor([[7, 8, 9]])
    # what the kernel for it takes
    whole = Sizes(2, 1, 70, 200)
    for_hopper = {
        "latents of 512": partial(call, whole, brain, "cpu", fill=0.3),
        "latents of 512 in pages": partial(call, whole._replace(keys=1216, tokens=2, page=32), half, "cpu", fill=0.3),
    }
    return {
        **(for_hopper if arch == "sm_90" else {}),
        "ragged": partial(call, small, brain, "cpu", fill=0.1),
        "many heads": partial(call, Sizes(1, 1, 70, 100, 64, 32), brain, "cpu"),
        "pages of 16": partial(call, Sizes(2, 1, 5, 192, 40, 8, 16), half, "cpu", fill=0.5),
        "pages of 32 neox": partial(call, small._replace(keys=192, page=32), brain, "cpu", fill=0.4, tables="neox"),
        "weights": partial(call, small._replace(nope=24, values=40), half, "cpu"),
        "every option": partial(
            call, Sizes(1, 3, 6, 140, 48, 16, nope=32, values=32), single, "cpu",
            tables="gptj", positions=positions, logit_cap=5.0, return_lse=True, batch_invariant=True,
        ),
        "float32": partial(call, Sizes(1, 2, 4, 150, 32, 16), single, "cpu"),
    }  # fmt: skip
