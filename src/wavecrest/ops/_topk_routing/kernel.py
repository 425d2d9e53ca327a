"""The router's kernel: a program has all experts of its tokens in registers, and takes the largest k times."""

from __future__ import annotations

from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import tl, triton

# as in the definition
LEAST_SUM = tl.constexpr(1e-20)


@triton.jit
def _first_of_largest(values, taken, places, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place [rows] of the largest of the values [rows, PLACES] that are not taken, of equal ones the first."""
    best = tl.max(tl.where(taken, float("-inf"), values), axis=1)
    found = (values == best[:, None]) & ~taken
    return tl.min(tl.where(found, places, PLACES), axis=1)


@triton.jit(do_not_specialize=["num_tokens", "k", "scale", "stride_lt", "stride_le", "stride_b", "topk_groups"])
def _topk_routing_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_tokens, k, scale, topk_groups, stride_lt, stride_le, stride_b,
    ALIGN: tl.constexpr, CONTIGUOUS: tl.constexpr, BIAS: tl.constexpr, SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights and experts of BLOCK_T tokens; `stride_lt` in units of ALIGN, which tells how wide accesses may be."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    mask_t = tokens < num_tokens
    where = tokens.to(tl.int64)[:, None] * (stride_lt * ALIGN)
    where += offs_e if CONTIGUOUS else offs_e.to(tl.int64) * stride_le
    logits = tl.load(logits_ptr + where, mask=mask_t[:, None] & (offs_e < EXPERTS), other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        # −inf of all experts and NaN become NaN, as in the definition
        scores = exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    else:
        scores = 1.0 / (1.0 + exp(-logits))
    # scores grow with logits, which lose no order to rounding
    choice = scores if BIAS or GROUPS > 1 else logits
    if BIAS:
        choice += tl.load(bias_ptr + offs_e.to(tl.int64) * stride_b, mask=offs_e < EXPERTS, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, float("inf"))
    if GROUPS > 1:
        # EXPERTS is BLOCK_E, and a power of two as GROUPS is
        SIZE: tl.constexpr = BLOCK_E // GROUPS
        groups = tl.reshape(choice, [BLOCK_T * GROUPS, SIZE])
        offs_s = tl.arange(0, SIZE)[None, :]
        of_group = tl.max(groups, axis=1)
        if SIZE > 1:
            none = tl.zeros([BLOCK_T * GROUPS, SIZE], tl.int1)
            first = _first_of_largest(groups, none, offs_s, SIZE)
            of_group += tl.max(tl.where(offs_s == first[:, None], float("-inf"), groups), axis=1)
        # of infinities of both signs
        of_group = tl.reshape(tl.where(of_group == of_group, of_group, float("inf")), [BLOCK_T, GROUPS])
        offs_g = tl.arange(0, GROUPS)[None, :]
        kept = tl.zeros([BLOCK_T, GROUPS], tl.int1)
        for _ in range(topk_groups):
            kept = kept | (offs_g == _first_of_largest(of_group, kept, offs_g, GROUPS)[:, None])
        wide = tl.broadcast_to(tl.reshape(kept, [BLOCK_T, GROUPS, 1]), [BLOCK_T, GROUPS, SIZE])
        choice = tl.where(tl.reshape(wide, [BLOCK_T, BLOCK_E]), choice, float("-inf"))
    taken = tl.broadcast_to(offs_e >= EXPERTS, [BLOCK_T, BLOCK_E])
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for j in range(k):
        expert = _first_of_largest(choice, taken, offs_e, BLOCK_E)[:, None]
        weight = tl.sum(tl.where(offs_e == expert, scores, 0.0), axis=1)[:, None]
        taken = taken | (offs_e == expert)
        weights = tl.where(offs_k == j, weight, weights)
        ids = tl.where(offs_k == j, expert, ids)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1) + LEAST_SUM)[:, None]
    out = tokens.to(tl.int64)[:, None] * k + offs_k
    mask = mask_t[:, None] & (offs_k < k)
    tl.store(weights_ptr + out, weights * tl.cast(scale, tl.float32), mask=mask)
    tl.store(ids_ptr + out, ids, mask=mask)
