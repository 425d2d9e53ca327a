"""The calls that tools make: examples, what is compiled, measured and emulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.tuned import Cell
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops.common.quantized import float8_of


class _Sizes(NamedTuple):
    """Batch, query heads, heads of k and v, seqlen_q, seqlen_k, head_dim of q and k, of v."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    d: int
    dv: int


def _tensors(sizes: _Sizes, layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    def made(tokens: int, heads: int, head_dim: int) -> Tensor:
        shape = {
            "bshd": (sizes.batch, tokens, heads, head_dim),
            "bhsd": (sizes.batch, heads, tokens, head_dim),
            "thd": (sizes.batch * tokens, heads, head_dim),
        }[layout]
        return torch.randn(shape, dtype=dtype, device=device)

    return (
        made(sizes.seqlen_q, sizes.heads, sizes.d),
        made(sizes.seqlen_k, sizes.kv_heads, sizes.d),
        made(sizes.seqlen_k, sizes.kv_heads, sizes.dv),
    )


def inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> FlashAttentionCall:
    """S queries and keys of H heads, [B, S, H, D], nothing hidden."""
    return FlashAttentionCall(*_tensors(_Sizes(B, H, H, S, S, D, D), "bshd", dtype, device))


def _call(
    sizes: _Sizes, dtype: torch.dtype, device: str, *, layout: str = "bhsd", **options: Any
) -> FlashAttentionCall:
    """A call on random tensors; packed sequences have the lengths of `sizes` or those of `starts_q`, `starts_k`."""
    q, k, v = _tensors(sizes, layout, dtype, device)
    if layout == "thd":
        for name, tokens in (("q", sizes.seqlen_q), ("k", sizes.seqlen_k)):
            starts = options.pop(f"starts_{name}", [i * tokens for i in range(sizes.batch + 1)])
            options[f"cu_seqlens_{name}"] = torch.tensor(starts, dtype=torch.int32, device=device)
            options[f"max_seqlen_{name}"] = tokens
            options[f"tokens_{name}"] = starts[-1]
        tokens_q, tokens_k = options.pop("tokens_q"), options.pop("tokens_k")
        q, k, v = q[:tokens_q], k[:tokens_k], v[:tokens_k]
    return FlashAttentionCall(q, k, v, layout, **options)


def _every(heads: int = 32) -> dict[str, Any]:
    """Every option at once."""
    slopes = torch.empty(heads, device="meta")
    dense = torch.empty(1, heads, 4096, 4096, dtype=torch.bfloat16, device="meta")
    sinks = torch.empty(heads, dtype=torch.bfloat16, device="meta")
    return {
        "window": (1023, 0), "softcap": 30.0, "alibi_slopes": slopes, "bias": dense, "sinks": sinks, "return_lse": True,
    }  # fmt: skip


# name -> sizes, dtype, options: each width of the tiles with and without causality; heads that share keys, packed;
# every option at once; a head_dim that is no power of two; one query (decoding); float32
def _compiled() -> dict[str, tuple[_Sizes, torch.dtype, dict[str, Any]]]:
    bf16, heads = torch.bfloat16, 32
    square = {d: _Sizes(4, heads, heads, 4096, 4096, d, d) for d in (64, 80, 128, 256)}
    return {
        "D=64": (square[64], torch.float16, {}),
        "D=64 causal": (square[64], bf16, {"causal": True}),
        "D=128": (square[128], bf16, {}),
        "D=128 causal": (square[128], bf16, {"causal": True}),
        "D=256 causal": (square[256], bf16, {"causal": True}),
        "D=80": (square[80], bf16, {}),
        "GQA packed": (_Sizes(8, heads, 8, 2048, 2048, 128, 128), bf16, {"layout": "thd", "causal": True}),
        "window": (square[128], bf16, {"causal": True, "window": (1023, 0)}),
        "every option D=64": (square[64], bf16, _every()),
        "every option D=128": (square[128], bf16, _every()),
        "one query": (_Sizes(16, heads, 8, 1, 8192, 128, 128), bf16, {}),
        "D=192 Dv=128 causal": (_Sizes(4, heads, heads, 4096, 4096, 192, 128), bf16, {"causal": True}),
        "dropout": (square[128], bf16, {"dropout_p": 0.1, "seed": 1}),
        "dropout D=64 causal": (square[64], torch.float16, {"causal": True, "dropout_p": 0.1, "seed": 1}),
        "dropout every option": (square[128], bf16, {**_every(), "dropout_p": 0.1, "seed": 1}),
        "float32": (square[64], torch.float32, {}),
        "float32 D=128 causal": (square[128], torch.float32, {"causal": True}),
    }


def compiled() -> dict[str, FlashAttentionCall]:
    """The calls that must compile for every architecture, of meta tensors."""
    return {name: _call(sizes, dtype, "meta", **options) for name, (sizes, dtype, options) in _compiled().items()}


def compiled_of_8_bits(fp8: torch.dtype) -> dict[str, FlashAttentionCall]:
    """Calls of 8-bit tensors to compile: each kind of GEMM, every option, a head_dim that is no power of two."""
    heads, bf16 = 32, torch.bfloat16
    square = {d: _Sizes(4, heads, heads, 4096, 4096, d, d) for d in (64, 80, 128, 256)}
    found = {}
    for label, sizes, q, kv, options in (
        ("int8", square[128], torch.int8, torch.int8, {}),
        ("int8 D=64 causal", square[64], torch.int8, torch.int8, {"causal": True}),
        ("int8 p", square[128], torch.int8, torch.int8, {"p_descale": 1 / 127}),
        ("int8 p causal", square[128], torch.int8, torch.int8, {"p_descale": 1 / 127, "causal": True}),
        ("int8 p D=64", square[64], torch.int8, torch.int8, {"p_descale": 1 / 127}),
        ("int8 p D=80", square[80], torch.int8, torch.int8, {"p_descale": 1 / 127}),
        ("int8 p D=256 causal", square[256], torch.int8, torch.int8, {"p_descale": 1 / 127, "causal": True}),
        ("fp8 causal", square[128], fp8, fp8, {"causal": True}),
        ("fp8 p", square[128], fp8, fp8, {"p_descale": 1 / 448}),
        ("fp8 p D=64 causal", square[64], fp8, fp8, {"p_descale": 1 / 448, "causal": True}),
        ("kv int8 causal", square[128], bf16, torch.int8, {"causal": True}),
        ("kv fp8", square[128], bf16, fp8, {}),
        ("int8 p dropout", square[128], torch.int8, torch.int8, {"p_descale": 1 / 127, "dropout_p": 0.1, "seed": 1}),
        ("every option int8 p", square[128], torch.int8, torch.int8, {**_every(), "p_descale": 1 / 127}),
    ):
        call = _call(sizes, bf16, "meta", **options)
        found[label] = call._replace(
            q=call.q.to(q), k=call.k.to(kv), v=call.v.to(kv),
            q_descale=None if q == bf16 else torch.empty(heads, device="meta"),
            k_descale=torch.empty(heads, device="meta"), v_descale=torch.empty(heads, device="meta"),
        )  # fmt: skip
    return found


def compiled_of_short() -> dict[str, FlashAttentionCall]:
    """Calls that the kernel for short sequences must compile for: windows of an image, sentences, each kind of bias."""
    half, brain = torch.float16, torch.bfloat16
    windows = torch.empty(1, 3, 49, 49, dtype=half, device="meta")
    padding = torch.empty(64, 1, 1, 128, dtype=brain, device="meta")
    each = torch.empty(64, 12, 128, 128, dtype=half, device="meta")
    sentences = _Sizes(64, 12, 12, 128, 128, 64, 64)
    return {
        name: _call(sizes, dtype, "meta", layout="bshd", **options)
        for name, sizes, dtype, options in (
            ("windows", _Sizes(4096, 3, 3, 49, 49, 32, 32), half, {"bias": windows}),
            ("padding", sentences, brain, {"bias": padding}),
            ("bias of each", sentences, half, {"bias": each}),
            ("D=32", _Sizes(64, 12, 12, 128, 128, 32, 32), half, {}),
            ("D=64", sentences, brain, {}),
            ("D=64 causal", _Sizes(64, 8, 8, 77, 77, 64, 64), half, {"causal": True}),
            ("D=128 shared heads", _Sizes(64, 8, 2, 60, 60, 128, 128), brain, {}),
            ("D=72", _Sizes(64, 16, 16, 64, 64, 72, 72), brain, {}),
        )
    }


def compiled_for_hopper() -> dict[str, FlashAttentionCall]:
    """Calls that sm_90's own kernel must compile for: each width of the tiles, and its options beside causality."""
    sinks = torch.empty(32, dtype=torch.bfloat16, device="meta")
    calls = {
        name: compiled()[name] for name in ("D=64", "D=64 causal", "D=80", "D=128", "D=128 causal", "D=256 causal")
    }
    calls["sinks logarithms"] = calls["D=128 causal"]._replace(sinks=sinks, return_lse=True)
    calls["window softcap"] = calls["D=64"]._replace(window=(511, 0), softcap=50.0)
    calls["slopes"] = calls["D=128 causal"]._replace(alibi_slopes=torch.empty(32, device="meta"))
    return calls


def compiled_for_cdna() -> dict[str, FlashAttentionCall]:
    """Calls that gfx950's own kernel must compile for: each head_dim, and its options beside causality."""
    sinks = torch.empty(32, dtype=torch.bfloat16, device="meta")
    calls = {name: compiled()[name] for name in ("D=64", "D=64 causal", "D=128", "D=128 causal", "GQA packed")}
    calls["sinks logarithms"] = calls["D=128 causal"]._replace(sinks=sinks, return_lse=True)
    return calls


def _label(sizes: _Sizes, causal: bool) -> str:
    b, h, kv, s, _, d, _ = sizes
    return f"b{b}h{h}kv{kv}s{s}d{d}{'c' if causal else ''}"


# batch, heads, heads of k and v, length, head_dim, causal
_SHARED = (
    *((32, 8, 8, s, 64, False) for s in (128, 256, 512, 1024, 2048)),
    (4, 32, 32, 4096, 128, False), (4, 32, 32, 4096, 128, True),
    (1, 32, 32, 16384, 128, False), (1, 32, 32, 16384, 128, True),
    (4, 32, 8, 4096, 128, True), (16, 16, 16, 1024, 64, True), (2, 16, 16, 4096, 256, True),
)  # fmt: skip
_QUICK = ((2, 4, 4, 128, 64, False), (1, 8, 2, 200, 64, True))


def bench(suite: str, device: str) -> dict[str, Callable[[], FlashAttentionCall]]:
    """Prefill of layout "bhsd" by size: 32 sequences of 8 heads with head_dim 64 in float16, the others in bfloat16."""
    found: dict[str, Callable[[], FlashAttentionCall]] = {}
    for b, h, kv, s, d, causal in _QUICK if suite == "quick" else _SHARED:
        sizes = _Sizes(b, h, kv, s, s, d, d)
        dtype = torch.float16 if b == 32 else torch.bfloat16
        found[_label(sizes, causal)] = partial(_call, sizes, dtype, device, causal=causal)
    return found


def _eight_bit(sizes: _Sizes, q: torch.dtype, kv: torch.dtype, **options: Any) -> FlashAttentionCall:
    """A call with 8-bit tensors, or 8-bit k and v alone: values of deviation 1, a descale for each head."""
    call = _call(sizes, torch.float32, "cpu", **options)
    made: dict[str, Any] = {}
    for name, dtype, heads in (("q", q, sizes.heads), ("k", kv, sizes.kv_heads), ("v", kv, sizes.kv_heads)):
        x = getattr(call, name)
        if dtype.itemsize == 1:
            made[f"{name}_descale"] = (1.0 + torch.rand(heads)) / 32
            x = (32 * x).clamp(-127, 127)
        made[name] = x.round().to(dtype) if dtype == torch.int8 else x.to(dtype)
    return call._replace(**made)


def _eight_bit_weights(sizes: _Sizes, dtype: torch.dtype) -> FlashAttentionCall:
    """8-bit weights that are powers of two, which 8 bits hold, so that results are as exact as without rounding."""
    call = _eight_bit(sizes, dtype, dtype, causal=True)
    one = torch.ones(())
    q, k = torch.zeros(call.q.shape), torch.randint(0, 4, call.k.shape)
    # each query picks one element of the keys
    q[..., 3] = 1.0
    return call._replace(
        q=q.to(dtype), k=k.to(dtype), q_descale=one, k_descale=one, softmax_scale=math.log(2.0), p_descale=2.0**-6
    )


def emulated(arch: str) -> dict[str, Callable[[], FlashAttentionCall]]:
    """Several tiles with ragged ends, each mask and addition, packed sequences, and the dtypes, those of 8 bits too."""
    float8 = float8_of(ARCHS.get(arch))
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    generator = torch.Generator().manual_seed(0)
    slopes, sinks = torch.rand(4, generator=generator, device="cpu"), torch.randn(4, generator=generator, device="cpu")
    dense = torch.randn(2, 1, 40, 70, generator=generator, device="cpu").to(brain)
    windows = torch.randn(1, 2, 49, 49, generator=generator, device="cpu").to(half)
    padding = torch.where(torch.rand(3, 1, 1, 90, generator=generator, device="cpu") < 0.3, -math.inf, 0.0).to(brain)
    packed: dict[str, Any] = {"layout": "thd", "starts_q": [0, 20, 20, 90], "starts_k": [0, 70, 90, 210]}
    own: dict[str, Callable[[], FlashAttentionCall]] = {}
    if arch == "gfx950":
        # its own kernel with more than two tiles of queries and of keys, the last ones ragged
        many = _Sizes(2, 4, 2, 290, 333, 128, 128)
        own["many tiles"] = partial(_call, many, brain, "cpu", causal=True, sinks=sinks, return_lse=True)
        # two steps that see all, and then the last tile
        whole = many._replace(seqlen_k=300)
        own["many tiles, nothing hidden"] = partial(_call, whole, half, "cpu", layout="bshd")
    if arch == "sm_90":
        # its own kernels: several tiles of queries and of keys, the last ones ragged, each thing done to scores
        many = _Sizes(2, 4, 2, 150, 333, 64, 64)
        own["many tiles in a window"] = partial(_call, many, half, "cpu", window=(130, 3), softcap=5.0, return_lse=True)
        alike = many._replace(d=96, dv=96)
        own["many tiles, slopes"] = partial(_call, alike, brain, "cpu", causal=True, alibi_slopes=slopes, sinks=sinks)
    return own | {
        "plain": partial(_call, _Sizes(1, 2, 2, 70, 150, 64, 64), half, "cpu"),
        "short windows": partial(_call, _Sizes(6, 2, 2, 49, 49, 32, 32), half, "cpu", layout="bshd", bias=windows),
        "short padding": partial(_call, _Sizes(3, 2, 1, 70, 90, 64, 64), brain, "cpu", bias=padding),
        "short causal": partial(_call, _Sizes(3, 2, 2, 77, 77, 40, 24), half, "cpu", layout="bshd", causal=True),
        "causal shared heads": partial(_call, _Sizes(1, 4, 2, 150, 150, 64, 64), brain, "cpu", causal=True),
        "D=128 causal": partial(_call, _Sizes(1, 1, 1, 70, 130, 128, 128), brain, "cpu", causal=True),
        "window softcap": partial(_call, _Sizes(1, 2, 2, 70, 150, 40, 24), half, "cpu", window=(30, 9), softcap=5.0),
        "bias alibi sinks": partial(
            _call, _Sizes(2, 4, 4, 40, 70, 32, 32), brain, "cpu",
            bias=dense, alibi_slopes=slopes, sinks=sinks, return_lse=True,
        ),
        "packed": partial(_call, _Sizes(3, 4, 1, 70, 120, 64, 64), brain, "cpu", causal=True, **packed),
        "dropout": partial(_call, _Sizes(2, 2, 1, 40, 90, 64, 64), half, "cpu", dropout_p=0.3, seed=(7 << 32) + 5),
        "float32": partial(_call, _Sizes(1, 1, 1, 33, 70, 32, 32), single, "cpu", causal=True),
        "int8": partial(_eight_bit, _Sizes(1, 4, 2, 70, 90, 64, 64), torch.int8, torch.int8, causal=True),
        "int8 weights": partial(_eight_bit_weights, _Sizes(1, 2, 1, 40, 90, 64, 40), torch.int8),
        "fp8": partial(_eight_bit, _Sizes(1, 2, 2, 40, 70, 64, 64), float8, float8),
        "fp8 weights": partial(_eight_bit_weights, _Sizes(1, 2, 1, 40, 70, 64, 64), float8),
        "kv int8": partial(_eight_bit, _Sizes(1, 2, 1, 40, 70, 40, 64), half, torch.int8, layout="bshd", causal=True),
    }  # fmt: skip


def call_of_key(parts: Mapping[str, Cell], device: str) -> FlashAttentionCall | None:
    """A call with this key, if it is not packed and has no bias; see `Study`."""
    dtype = getattr(torch, str(parts["dtype"]), None)
    more = (parts[name] for name in ("packed", "bias"))
    sizes = _Sizes(*(int(parts[name] or 0) for name in ("batch", "heads", "kv_heads", "queries", "keys", "d", "dv")))
    if not isinstance(dtype, torch.dtype) or any(more) or min(sizes) < 1:
        return None
    left, right = (int(parts[name] or 0) for name in ("left", "right"))
    causal = (left, right) == (-1, 0)
    window = (-1, -1) if causal else (left, right)
    options: dict[str, Any] = {"causal": causal, "window": window, "return_lse": bool(parts["lse"])}
    if parts["softcap"]:
        # Gemma 2's
        options["softcap"] = 50.0
    if parts["alibi"]:
        # 2^(−8 i / heads) (Press et al., 2022)
        options["alibi_slopes"] = torch.exp2(-8 * torch.arange(1, sizes.heads + 1, device=device) / sizes.heads)
    if parts["sinks"]:
        options["sinks"] = torch.randn(sizes.heads, device=device)
    return _call(sizes, dtype, device, **options)
