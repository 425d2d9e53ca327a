"""Shared by the tests of MLA: an oracle in float64 that decompresses keys and values, bounds, and calls with NaN
wherever no sequence has a key.

Not a test file: `tests/ops/test_mla_decode.py` and `tests/ops/test_mla_prefill.py` have the cases.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._mla_decode.call import MlaDecodeCall

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# half a unit in the last place
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, torch.float64: 2.0**-53}
NAN = float("nan")
# a page that is nowhere
NOWHERE = 1 << 30


def config(rows: int = 16, keys: int = 16, part: int = 1 << 10, splits: int = 0, share: int = 32) -> Config:
    """SPLITS 0: one for each `share` keys there is room for; a part wider than a latent is one of all its columns."""
    return Config(BLOCK_M=rows, BLOCK_N=keys, PART=part, SPLITS=splits, KEYS=share, num_warps=4, num_stages=1)


CONFIGS = {
    "default": None,
    "splits of 32": config(),
    "three splits": config(splits=3, share=16),
    "one split": config(splits=1, keys=32),
    "queries in parts": config(rows=32, part=16, share=64),
}
SMALL = CONFIGS["splits of 32"]


def case(
    lens: list[int], heads: int = 4, tokens: int = 1, latent: int = 32, rotary: int = 16, nope: int = 0,
    values: int = 0, capacity: int = 96, page: int = 0, dtype: torch.dtype = F32, device: str = "cpu",
    beyond: float = NAN, tables: str | None = None, places: torch.dtype | None = None, seed: int = 0, **options: Any,
) -> MlaDecodeCall:  # fmt: skip
    """A call; `beyond`: what the cache and pages of no sequence hold; `tables`: the rotary part's style."""
    generator = torch.Generator().manual_seed(seed + 7 * len(lens) + heads)

    def made(*shape: int, size: float = 1.0) -> Tensor:
        # an offset, so that a mean that is left out shows
        return ((torch.randn(shape, generator=generator) + 0.25) * size).to(device=device, dtype=dtype)

    batch = len(lens)
    cache = made(batch, capacity, latent + rotary)
    for sequence, length in enumerate(lens):
        cache[sequence, length:] = beyond
    if page:
        assert capacity % page == 0
        pages = capacity // page
        order = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].view(batch, pages)
        paged = torch.full((batch * pages + 3, page, latent + rotary), beyond, dtype=dtype, device=device)
        paged[order.flatten().to(device)] = cache.view(batch * pages, page, -1)
        table = order.to(device=device, dtype=torch.int32)
        for sequence, length in enumerate(lens):
            table[sequence, -(-length // page) :] = NOWHERE
        cache, options["block_table"] = paged, table
    if nope:
        options["w_uk"] = made(heads, nope, latent, size=nope**-0.5)
    if values:
        options["w_uv"] = made(heads, values, latent, size=latent**-0.5)
    if tables is not None:
        angles = torch.randn(capacity + 5, rotary // 2, generator=generator).to(device)
        options |= {"cos": angles.cos(), "sin": angles.sin(), "rope_style": tables}
        if places is not None:
            options["positions"] = torch.randint(0, capacity, (batch, tokens), generator=generator).to(device, places)
    if not nope:
        options.setdefault("softmax_scale", (latent + rotary) ** -0.5)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    q = made(batch, tokens, heads, nope or latent)
    return MlaDecodeCall(q, made(batch, tokens, heads, rotary), cache, lengths, **options)


class Exact(NamedTuple):
    """In float64: the result, its logarithms, and how far a result and a logarithm in the call's dtype may be off."""

    y: Tensor
    lse: Tensor
    bound: Tensor
    lse_bound: Tensor


def _turned(x: Tensor, angles: tuple[Tensor, Tensor], style: str) -> Tensor:
    """One head's rotary part [Dr], pair by pair."""
    cos, sin = angles
    y, half = x.clone(), x.shape[0] // 2
    for i in range(half):
        a, b = (i, i + half) if style == "neox" else (2 * i, 2 * i + 1)
        y[a], y[b] = x[a] * cos[i] - x[b] * sin[i], x[b] * cos[i] + x[a] * sin[i]
    return y


def _row(call: MlaDecodeCall, b: int, length: int) -> Tensor:
    """The cached rows [length, R + Dr] of a sequence, looked up one by one."""
    if call.block_table is None:
        return call.latent_cache[b, :length].cpu().double()
    table = call.block_table[b].tolist()
    found = [call.latent_cache[table[j // call.page_size], j % call.page_size] for j in range(length)]
    return torch.stack(found).cpu().double() if found else call.latent_cache[0, :0].cpu().double()


def exact(call: MlaDecodeCall, rounded: bool = False) -> Exact:
    """Keys and values of each head made from the latents, and one softmax a query and head; nothing of the ops in it.

    The bound counts what the kernels round: the turned part and the absorbed query (scores), weights, the latents of
    the result, the result; and sums in float32. `rounded`: keys and values of the heads too.
    """
    y = torch.zeros(call.shape, dtype=torch.float64)
    bound = torch.zeros_like(y)
    lse = torch.full(call.lse_shape, -math.inf, dtype=torch.float64)
    lse_bound = torch.zeros_like(lse)
    unit, single = ROUNDING[call.q_nope.dtype], ROUNDING[torch.float64 if call.q_nope.dtype == torch.float64 else F32]
    latent, rotary = call.latent_dim, call.head_dim_rope
    # sums of this number of products, each rounded; errors of either sign
    sums = 4 * math.sqrt(latent + rotary + call.head_dim_nope) * single
    uk, uv = (None if one is None else one.cpu().double() for one in (call.w_uk, call.w_uv))
    for b, length in enumerate(call.seq_lens.tolist()):
        row = _row(call, b, length)
        for t in range(call.seqlen_q):
            own = length - call.seqlen_q + t
            if own < 0:
                continue
            c, k_rope = row[: own + 1, :latent], row[: own + 1, latent:]
            for h in range(call.heads):
                q, q_rope = call.q_nope[b, t, h].cpu().double(), call.q_rope[b, t, h].cpu().double()
                if call.cos is not None and call.sin is not None:
                    place = own if call.positions is None else int(call.positions[b, t])
                    tables = call.cos[place].cpu().double(), call.sin[place].cpu().double()
                    q_rope = _turned(q_rope, tables, call.rope_style)
                k = c if uk is None else c @ uk[h].T
                v = c if uv is None else c @ uv[h].T
                s = (k @ q + k_rope @ q_rope) * call.scale
                # what absorbed queries multiply, and what the rotary part does
                by_latent = c.abs() @ (q.abs() if uk is None else q.abs() @ uk[h].abs())
                by_rope = k_rope.abs() @ q_rope.abs()
                # a turned pair is rounded from numbers up to √2 as large
                off = sums * (by_latent + by_rope) + (0 if call.cos is None else 1.5 * (unit + 4 * single)) * by_rope
                if uk is not None:
                    off = off + unit * c.abs() @ (q @ uk[h]).abs()
                if rounded:
                    off = off + 1.01 * unit * k.abs() @ q.abs() + sums * by_latent
                off = off * call.scale
                if call.logit_cap > 0:
                    s = call.logit_cap * torch.tanh(s / call.logit_cap)
                    off = off + 8 * single * call.logit_cap
                top = float(s.max())
                weights = torch.exp(s - top)
                total = float(weights.sum())
                weights = weights / total
                lse[b, h, t] = top + math.log(total)
                worst = float(off.max()) + 4 * single * float(s.abs().max() + 1)
                lse_bound[b, h, t] = 1.01 * worst + 8 * single * (1 + abs(float(lse[b, h, t])))
                y[b, t, h] = weights @ v
                inner = math.expm1(2 * worst) + unit + 4 * math.sqrt(len(s)) * single + 8 * single
                mass = weights @ v.abs() if uv is None else (weights @ c.abs()) @ uv[h].abs().T
                bound[b, t, h] = inner * mass + 1.001 * unit * y[b, t, h].abs() + 1e-30
                if uv is not None:
                    bound[b, t, h] += (unit * (weights @ c).abs() + sums * (weights @ c.abs())) @ uv[h].abs().T
                if rounded:
                    bound[b, t, h] += 1.01 * unit * (weights @ v.abs()) * math.exp(2 * worst)
    # subnormal results of 16 bits
    return Exact(y, lse, bound + (2.0**-25 if call.q_nope.dtype == F16 else 0.0), lse_bound)


def assert_right(call: MlaDecodeCall, got: Any, want: Exact | None = None) -> None:
    """Every element, and logarithm, within its bound."""
    want = want or exact(call)
    result, logarithms = got if call.return_lse else (got, None)
    assert isinstance(result, Tensor) and result.dtype == call.q_nope.dtype
    assert tuple(result.shape) == call.shape and result.is_contiguous()
    off = (result.cpu().double() - want.y).abs()
    assert not bool(off.isnan().any()), "an element was not written, or what is hidden was read"
    assert bool((off <= want.bound).all()), (
        f"{int((off > want.bound).sum())} of {off.numel()} are off, by up to {float((off / want.bound).max()):.3g} "
        "times the bound"
    )
    if logarithms is None:
        return
    assert logarithms.dtype == (torch.float64 if call.q_nope.dtype == torch.float64 else F32)
    assert tuple(logarithms.shape) == call.lse_shape and logarithms.is_contiguous()
    found = logarithms.cpu().double()
    assert torch.equal(found.isneginf(), want.lse.isneginf())
    seen = ~want.lse.isneginf()
    assert bool(((found - want.lse).abs()[seen] <= want.lse_bound[seen]).all())


def run(op: str, call: MlaDecodeCall, config: Config | None = SMALL, backend: str = "triton") -> Any:
    """One backend by name; a configuration with PART wider than the latent takes all of its columns."""
    if backend != "triton":
        config = None
    if config is not None:
        width = max(16, 1 << (call.latent_dim - 1).bit_length())
        config = Config(**(config.kwargs | {"PART": min(config["PART"], width)}))
    return registry.get(op).run(backend, call, config=config)
