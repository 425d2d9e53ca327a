"""The calls that tools make: examples, what is compiled, measured and emulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.tuned import Cell
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._flash_decoding.call import FOUR_BITS, FlashDecodingCall
from wavecrest.ops.common.quantized import KERNEL_ARCHS, float8_of


class _Sizes(NamedTuple):
    """Batch, seqlen_q, query heads, heads of the cache, keys, head_dim, that of v, tokens of a page (0: no pages)."""

    batch: int
    seqlen_q: int
    heads: int
    kv_heads: int
    keys: int
    d: int
    dv: int
    page: int = 0


def _call(
    sizes: _Sizes, dtype: torch.dtype, device: str, cache: torch.dtype | None = None, fill: float = 1.0,
    groups: int = 0, padded: int = 0, append: bool = False, advance: bool = False, rotary: str = "",
    table: torch.dtype = torch.float32, **options: Any,
) -> FlashDecodingCall:  # fmt: skip
    """A call whose last sequence fills the share `fill` of its cache, and the first one all of it.

    `groups`: of a cache of 4 bits; of one of 8, 1 for scales of tokens, 0 for one scale. `padded`: hidden keys at the
    left of the last sequence. `append`: with new keys and values, `advance`: by the tokens before them; `rotary`:
    rotated in this style over all of head_dim, by tables of the dtype `table`.
    """
    pages = sizes.batch * (sizes.keys // sizes.page) if sizes.page else sizes.batch
    leading = (pages, sizes.page or sizes.keys, sizes.kv_heads)

    def stored(head_dim: int) -> Tensor:
        shape = (*leading, head_dim)
        if cache == FOUR_BITS:
            return torch.randint(0, 256, (*leading, head_dim // 2), dtype=cache, device=device)
        if cache is None:
            return torch.randn(shape, dtype=dtype, device=device)
        if cache == torch.int8:
            return torch.randint(-127, 128, shape, dtype=cache, device=device)
        return torch.randn(shape, dtype=torch.float16, device=device).to(cache)

    q = torch.randn(sizes.batch, sizes.seqlen_q, sizes.heads, sizes.d, dtype=dtype, device=device)
    lengths = torch.linspace(1.0, fill, sizes.batch).mul(sizes.keys).to(torch.int32).to(device)
    if sizes.page:
        count = sizes.batch * (sizes.keys // sizes.page)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(count, generator=generator, device="cpu").view(sizes.batch, -1)
        options["block_table"] = order.to(torch.int32).to(device)
    if padded > 0:
        options["seq_starts"] = torch.linspace(0.0, padded, sizes.batch).to(torch.int32).to(device)
    if append:
        for name, head_dim in (("k", sizes.d), ("v", sizes.dv)):
            options[name] = torch.randn(
                sizes.batch, sizes.seqlen_q, sizes.kv_heads, head_dim, dtype=dtype, device=device
            )
    if advance:
        options |= {"append_lens": lengths - sizes.seqlen_q, "advance": True}
    if rotary:
        angles = torch.randn(sizes.keys, sizes.d // 2, device=device)
        options |= {"cos": angles.cos().to(table), "sin": angles.sin().to(table), "rotary_style": rotary}
    if groups > 0:
        # about the size of keys and values in 16 bits
        step = 0.3 if cache == FOUR_BITS else 0.01
        for name in ("k", "v"):
            scale = torch.rand((*leading, groups), device=device).add(0.5).mul(step).to(torch.float16)
            options[f"{name}_scale"] = scale
            if cache == FOUR_BITS:
                options[f"{name}_shift"] = scale * -7.0
    elif cache is not None:
        # about the size of keys and values in 16 bits
        scale = torch.full((1,), 0.01 if cache == torch.int8 else 0.75, device=device)
        options |= {"k_scale": scale, "v_scale": 1.5 * scale}
    return FlashDecodingCall(q, stored(sizes.d), stored(sizes.dv), lengths, **options)


def inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> FlashDecodingCall:
    """One query of H heads, over full caches of S keys with a quarter of the heads (all of them where 4 does not)."""
    return _call(_Sizes(B, 1, H, H // 4 if H % 4 == 0 else H, S, D, D), dtype, device)


# name -> sizes, dtype, options: shared heads in one split and in many, pages that tiles fit into and others, 8 bits,
# several queries, every option, other widths
def _compiled(arch: Arch) -> dict[str, tuple[_Sizes, torch.dtype, dict[str, Any]]]:
    bf16, meta = torch.bfloat16, "meta"
    float8 = float8_of(arch)
    llama = _Sizes(16, 1, 32, 8, 8192, 128, 128)
    paged = llama._replace(page=64)
    every = {
        "window": 1023, "softcap": 30.0, "alibi_slopes": torch.empty(32, device=meta),
        "sinks": torch.empty(32, dtype=bf16, device=meta), "return_lse": True,
    }  # fmt: skip
    return {
        "D=128": (llama, bf16, {}),
        "D=64": (llama._replace(d=64, dv=64), torch.float16, {}),
        "D=256": (llama._replace(d=256, dv=256), bf16, {}),
        "D=80": (llama._replace(d=80, dv=80), bf16, {}),
        "one split": (llama._replace(batch=512, keys=128), bf16, {}),
        "pages of 64": (paged, bf16, {}),
        "pages of 1": (llama._replace(page=1), bf16, {}),
        "int8": (paged, bf16, {"cache": torch.int8}),
        "fp8": (paged, bf16, {"cache": float8}),
        "fp8 of another flavour": (paged, bf16, {"cache": torch.float8_e4m3fn}),
        "int8 8 queries": (llama._replace(seqlen_q=8), bf16, {"cache": torch.int8}),
        "int8 by token": (paged, bf16, {"cache": torch.int8, "groups": 1}),
        "int4": (paged, bf16, {"cache": FOUR_BITS, "groups": 1}),
        "int4 float16": (paged, torch.float16, {"cache": FOUR_BITS, "groups": 1}),
        "int4 4 groups": (paged, bf16, {"cache": FOUR_BITS, "groups": 4}),
        "int4 pages of 1": (llama._replace(page=1), bf16, {"cache": FOUR_BITS, "groups": 1}),
        "int4 8 queries": (llama._replace(seqlen_q=8), bf16, {"cache": FOUR_BITS, "groups": 1}),
        "8 queries": (llama._replace(seqlen_q=8), bf16, {}),
        "every option": (paged, bf16, every),
        "float32": (llama, torch.float32, {}),
        "starts": (llama, bf16, {"padded": 100}),
        "starts 8 queries": (llama._replace(seqlen_q=8), bf16, {"padded": 100}),
        "starts every option": (paged, bf16, {**every, "padded": 100}),
        "append": (paged, bf16, {"append": True, "rotary": "neox"}),
        "append int8": (llama, bf16, {"append": True, "cache": torch.int8}),
        "append int8 by token": (paged, bf16, {"append": True, "rotary": "gptj", "cache": torch.int8, "groups": 1}),
        "append int4 4 groups": (paged, bf16, {"append": True, "rotary": "neox", "cache": FOUR_BITS, "groups": 4}),
        **(
            {"append fp8": (paged, bf16, {"append": True, "cache": float8})}
            if arch.name in KERNEL_ARCHS[str(float8).removeprefix("torch.")]
            else {}
        ),
    }


def compiled(arch: Arch) -> dict[str, FlashDecodingCall]:
    """The calls that must compile for every architecture, of meta tensors; 8-bit floats of the flavour it has."""
    return {name: _call(sizes, dtype, "meta", **options) for name, (sizes, dtype, options) in _compiled(arch).items()}


# batch, heads, heads of the cache, keys, head_dim
_SHARED = (
    (1, 32, 8, 8192, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 8192, 128), (64, 32, 8, 1024, 128),
    (1, 64, 8, 131072, 128), (8, 32, 32, 4096, 128),
)  # fmt: skip
_QUICK = ((2, 8, 2, 256, 64),)


def bench(suite: str, device: str) -> dict[str, Callable[[], FlashDecodingCall]]:
    """One query a sequence in bfloat16 over full caches; the longest ones again in pages of 64 and in int8."""
    found: dict[str, Callable[[], FlashDecodingCall]] = {}
    for b, h, kv, t, d in _QUICK if suite == "quick" else _SHARED:
        sizes, name = _Sizes(b, 1, h, kv, t, d, d), f"b{b}h{h}kv{kv}t{t}d{d}"
        found[name] = partial(_call, sizes, torch.bfloat16, device)
        if t >= 8192 or suite == "quick":
            found[f"{name} pages=64"] = partial(_call, sizes._replace(page=64), torch.bfloat16, device)
            found[f"{name} int8"] = partial(_call, sizes, torch.bfloat16, device, cache=torch.int8)
            found[f"{name} int4"] = partial(_call, sizes, torch.bfloat16, device, cache=FOUR_BITS, groups=1)
    return found


def emulated(arch: str) -> dict[str, Callable[[], FlashDecodingCall]]:
    """Ragged lengths in one split and in many, pages that tiles fit into and others, 8 bits, and several queries."""
    half, brain = torch.float16, torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    slopes, sinks = torch.rand(6, generator=generator, device="cpu"), torch.randn(6, generator=generator, device="cpu")
    float8 = float8_of(ARCHS.get(arch))
    return {
        "ragged": partial(_call, _Sizes(2, 1, 4, 2, 300, 64, 64), brain, "cpu", fill=0.1),
        "one split": partial(_call, _Sizes(2, 2, 4, 2, 100, 128, 128), brain, "cpu", fill=0.5, return_lse=True),
        "pages of 16": partial(_call, _Sizes(2, 1, 4, 2, 256, 40, 24, 16), half, "cpu", fill=0.5),
        "pages of 5": partial(_call, _Sizes(1, 1, 4, 1, 150, 32, 32, 5), brain, "cpu"),
        "int8": partial(_call, _Sizes(1, 1, 4, 1, 256, 64, 64, 32), brain, "cpu", cache=torch.int8),
        "fp8": partial(_call, _Sizes(2, 1, 4, 2, 160, 64, 64, 32), half, "cpu", cache=float8, fill=0.3),
        "int8 by token": partial(
            _call, _Sizes(2, 1, 4, 2, 160, 64, 64, 32), half, "cpu", cache=torch.int8, groups=1, fill=0.3
        ),
        "int4": partial(_call, _Sizes(2, 1, 4, 2, 160, 64, 64, 32), brain, "cpu", cache=FOUR_BITS, groups=1, fill=0.5),
        "int4 4 groups": partial(_call, _Sizes(1, 2, 4, 2, 140, 64, 40), half, "cpu", cache=FOUR_BITS, groups=4),
        "e4m3fn": partial(_call, _Sizes(1, 1, 4, 2, 160, 64, 64), brain, "cpu", cache=torch.float8_e4m3fn),
        "window sinks": partial(_call, _Sizes(2, 3, 4, 2, 320, 64, 64, 64), brain, "cpu", window=90, sinks=sinks[:4]),
        "every option": partial(
            _call, _Sizes(1, 3, 6, 3, 200, 32, 32), brain, "cpu",
            window=70, softcap=5.0, alibi_slopes=slopes, sinks=sinks, return_lse=True,
        ),
        "float32": partial(_call, _Sizes(1, 2, 2, 1, 140, 32, 32), torch.float32, "cpu"),
        "starts": partial(_call, _Sizes(2, 1, 4, 2, 300, 64, 64), brain, "cpu", fill=0.5, padded=100),
        "starts window": partial(
            _call, _Sizes(2, 3, 4, 2, 160, 32, 32, 32), half, "cpu", padded=90, window=70, return_lse=True
        ),
        "append": partial(_call, _Sizes(2, 2, 4, 2, 160, 64, 40, 32), brain, "cpu", append=True, rotary="neox"),
        "append int8 by token": partial(
            _call, _Sizes(2, 2, 4, 2, 160, 64, 64), half, "cpu", append=True, advance=True, cache=torch.int8, groups=1
        ),
        "append int4": partial(
            _call, _Sizes(2, 1, 4, 2, 160, 64, 64, 32), brain, "cpu", append=True, rotary="gptj", cache=FOUR_BITS,
            groups=2, fill=0.5,
        ),
    }  # fmt: skip


def call_of_key(parts: Mapping[str, Cell], device: str) -> FlashDecodingCall | None:
    """A call with this key, if it has no option but those of `access`; see `Study`."""
    names = ("batch", "tokens", "heads", "kv_heads", "capacity", "d", "dv", "page")
    sizes = _Sizes(*(int(parts[name] or 0) for name in names))
    dtype, cache = (getattr(torch, str(parts[name]), None) for name in ("dtype", "cache"))
    more = (parts[name] for name in ("window", "alibi", "softcap", "sinks", "invariant"))
    if not isinstance(dtype, torch.dtype) or not isinstance(cache, torch.dtype) or any(more) or min(sizes[:7]) < 1:
        return None
    scales = str(parts["scales"])
    groups = int(scales.split()[0]) if scales.endswith("groups") else int(scales == "tokens")
    stored = None if cache == dtype else cache
    # rows that lie apart have no call here
    words = [word for word in str(parts["access"]).split() if word != "columns"]
    rotary, _, table = next((word for word in words if ":" in word), "").partition(":")
    access: dict[str, Any] = {"padded": sizes.keys // 8} if "starts" in words else {}
    if rotary:
        access |= {"rotary": rotary, "table": getattr(torch, table)}
    return _call(
        sizes, dtype, device, stored, groups=groups, append="append" in words, return_lse=bool(parts["lse"]), **access
    )
