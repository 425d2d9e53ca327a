"""The sLSTM over sequences of large heads: programs keep parts of a head's weights and exchange h at each token.

A head's columns are divided over programs. Each keeps its part of the recurrent weights, of c, n and m from the first
token to the last, and needs all of h at each of them. An element of h is published as one word, whose upper half is a
tag: the number of the token that it is for, or the lowest 15 bits of it, as the word that it replaces is of two tokens
before. A program looks at the words of its rows and head until all have the tag that it waits for.

Why the order holds:

- Value and tag are one aligned word of 32 or 64 bits, which no access takes apart, a wider one neither: no thread can
  see a tag without its value, and none takes another's word for its own. So nothing else has to be in order, and there
  is no fence and no counter.
- Words are written and read where all programs of the device see them. On sm_90 they are exchanged and loaded at the
  scope of the device (ATOMG.E.EXCH.STRONG.GPU) and of the system (LDG.E.STRONG.SYS), so in L2 and not in L1. On gfx942
  and gfx950, whose XCDs have an L2 cache each, stores and loads have sc0 and sc1, which is how LLVM writes relaxed
  atomics of the system's scope: a store goes through, and a load misses what another XCD may have written. buffer_wbl2
  and buffer_inv, which a counter would need at each token, are not there. On gfx90a, with one L2 cache, it is
  global_atomic_swap, and loads with glc, which miss L1.
- There are two words for each element, for even and for odd tokens. A program publishes for token t + 1 when it has
  worked out token t, so it has read all words for token t, and these were published by programs that had read all words
  for token t − 1: nobody needs the words for token t − 1 any more, and they are those that it writes over.
- The number of missing words is summed over the program, behind its barrier, so that all threads leave the loop in the
  same turn. No thread may have a copy of another's word, which would be loaded at another time: there are at least as
  many words as threads (`_misfit` of launch_cooperative.py).

All programs of a launch have to run at once. The launch is a cooperative one: the driver refuses it where they do not
fit, and starts all of them or none while another kernel runs. Should a program be missing all the same, those that wait
give up after PATIENCE looks, and what they cannot work out is NaN.
"""

from __future__ import annotations

from wavecrest.ops.common.device import ATOMIC, UNCACHED, column_mask, remap_xcd
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import dim_offsets
from wavecrest.ops.slstm.device import gate_input, updated, weights

_SIZES = [
    "zero", "begin", "end", "first_row", "batch", "tokens", "heads", "tiles", "stride_xb", "stride_xs", "stride_xg",
    "stride_xh", "stride_xd", "stride_rg", "stride_rh", "stride_rk", "stride_rn", "stride_bg", "stride_bh", "stride_bd",
    "stride_ps",
]  # fmt: skip


@triton.jit
def _look(at, mask, LOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words as they are in the memory of the device, past caches that their writers do not share."""
    if LOOK == ATOMIC:
        words = tl.atomic_or(at, tl.zeros(at.shape, at.dtype.element_ty), mask=mask, sem="relaxed")
    elif LOOK == UNCACHED:
        words = tl.load(at, mask=mask, other=0, cache_modifier=".cv", volatile=True)
    else:
        words = tl.load(at, mask=mask, other=0, volatile=True)
    return words


@triton.jit
def _publish(at, words, mask, LOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write words where others look at them in that way."""
    if LOOK == UNCACHED:
        # past the L2 cache of the XCD; triton 3.6 makes an exchange of a block a buffer instruction that LLVM has not
        tl.store(at, words, mask=mask, cache_modifier=".wt")
    else:
        tl.atomic_xchg(at, words, mask=mask, sem="relaxed")


@triton.jit
def _missing(words, mask, token, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 for each word without the tag of a token, else 0."""
    if WIDE:
        missing = (words >> 32).to(tl.int32) != token
    else:
        missing = (words >> 16) != (token & 0x7FFF)
    return (mask & missing).to(tl.int32)


@triton.jit
def _value(words, lost, fresh, PLACES: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """h of words: NaN where they were `lost`, 0 in rows that begin anew."""
    # a word of ones is NaN in each type
    words = tl.where(lost, -1, words)
    if PLACES:
        words = tl.where(fresh, 0, words)
    if WIDE:
        value = words.to(tl.int32).to(DTYPE, bitcast=True)
    else:
        value = words.to(tl.int16).to(DTYPE, bitcast=True)
    return value


@triton.jit
def _kept(at, first, offs_k, offs_c, stride_k, ALIGN: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of rows first + offs_k of h, in columns that `at` points to, 0 beyond D."""
    rows = first + offs_k
    at = at + (ALIGN * (rows.to(tl.int64) * stride_k))[:, None]
    if EVEN:
        r = tl.load(at)
    else:
        r = tl.load(at, mask=(rows < D)[:, None] & (offs_c < D)[None, :], other=0.0)
    return r


@triton.jit
def _word(h, token, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of h with the tag of a token: 15 bits of its number beside 16 bits of h, else 32 beside 32."""
    if WIDE:
        word = (tl.cast(token, tl.int64) << 32) | (h.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    else:
        word = ((token & 0x7FFF) << 16) | (h.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return word


@triton.jit(do_not_specialize=_SIZES)
def _slstm_cooperative_kernel(  # type: ignore[no-untyped-def]
    x_ptr, r_ptr, bias_ptr, places_ptr, y_ptr, slots_ptr, h_ptr, c_ptr, n_ptr, m_ptr,
    zero, begin, end, first_row, batch, tokens, heads, tiles, stride_xb, stride_xs, stride_xg, stride_xh, stride_xd,
    stride_rg, stride_rh, stride_rk, stride_rn, stride_bg, stride_bh, stride_bd, stride_ps,
    PLACES: tl.constexpr, EXPONENTIAL: tl.constexpr, BIAS: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    XCDS: tl.constexpr, LOOK: tl.constexpr, PATIENCE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_B rows, from first_row on, and BLOCK_N columns of one head; tokens from `begin` to before `end`.

    slots_ptr: words [2, batch, heads, D], for h before odd and before even tokens; those of token `begin` are there.
    h, c, n and m are contiguous and stay where they are. Strides of x and r come in units of ALIGN, but for the last
    dimension's; y is contiguous. PLACES: as of `_slstm_steps_kernel`, a number for each token and row. `zero`: 0,
    unknown to the compiler, which would take a look out of the loop that waits.
    """
    EVEN: tl.constexpr = D == BLOCK_D and D % BLOCK_N == 0
    program = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    tile = program % tiles
    head = ((program // tiles) % heads).to(tl.int64)
    offs_b = first_row + (program // tiles // heads) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_D // PARTS)
    # the four gates of a column lie side by side
    offs_g = tl.arange(0, 4 * BLOCK_N)
    gate = (offs_g % 4).to(tl.int64)
    offs_c = tile * BLOCK_N + offs_g // 4
    mask_b = (offs_b < batch)[:, None]
    mask = mask_b & column_mask(offs_n, D, BLOCK_N, EVEN)[None, :]
    mask_x = mask_b & column_mask(offs_c, D, 4 * BLOCK_N, EVEN)[None, :]
    mask_k = mask_b & column_mask(offs_k, D, BLOCK_D // PARTS, EVEN)[None, :]
    mask_k2 = mask_b & column_mask(offs_k, D - BLOCK_D // 2, BLOCK_D // PARTS, EVEN)[None, :]
    rows = offs_b.to(tl.int64)
    columns = ALIGN * (gate * stride_xg) + dim_offsets(offs_c, stride_xd, CONTIGUOUS)
    x_at = x_ptr + (ALIGN * (rows * stride_xb + head * stride_xh))[:, None] + columns[None, :]
    first = (rows * heads * D + head * D)[:, None]
    at = first + offs_n[None, :]
    y_at = y_ptr + (rows * tokens * heads * D + head * D)[:, None] + offs_n[None, :]
    words_at = slots_ptr + first + offs_k[None, :]
    turn = tl.cast(batch, tl.int64) * heads * D
    h = tl.load(h_ptr + at, mask=mask, other=0.0)
    c = tl.load(c_ptr + at, mask=mask, other=0.0)
    n = tl.load(n_ptr + at, mask=mask, other=0.0)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    columns = ALIGN * (gate * stride_rg) + dim_offsets(offs_c, stride_rn, CONTIGUOUS)
    r_at = r_ptr + ALIGN * (head * stride_rh) + columns[None, :]
    r = _kept(r_at, 0, offs_k, offs_c, stride_rk, ALIGN, D, EVEN)
    if PARTS == 2:
        r2 = _kept(r_at, BLOCK_D // 2, offs_k, offs_c, stride_rk, ALIGN, D, EVEN)
    bias = 0.0
    if BIAS:
        bias_at = bias_ptr + head * stride_bh + gate * stride_bg + offs_c.to(tl.int64) * stride_bd
        bias = tl.load(bias_at[None, :], mask=(offs_c < D)[None, :], other=0.0).to(tl.float32)
    closes = (offs_g % 4 < 2)[None, :]
    # a token's inputs are under way while the one before it is worked out
    x = tl.load(x_at + ALIGN * tl.cast(begin, tl.int64) * stride_xs, mask=mask_x, other=0.0)
    patience = tl.cast(PATIENCE, tl.int32)
    for token in range(begin, end):
        a = tl.where(closes, gate_input(x), x.to(tl.float32)) + bias
        x = tl.load(x_at + ALIGN * tl.cast(token + 1, tl.int64) * stride_xs, mask=mask_x & (token + 1 < end), other=0.0)
        h_old = h
        c_old = c
        n_old = n
        m_old = m
        fresh = mask_b
        inside = mask_b
        if PLACES:
            place_at = places_ptr + tl.cast(token, tl.int64) * stride_ps + offs_b
            place = tl.load(place_at, mask=offs_b < batch, other=0)[:, None]
            fresh = place == 2
            inside = place > 0
            # chosen, not multiplied: what came before may be NaN
            c = tl.where(fresh, 0.0, c)
            n = tl.where(fresh, 0.0, n)
            m = tl.where(fresh, 0.0, m)
        words_now = words_at + ((token + 1) & 1) * turn
        words = _look(words_now, mask_k, LOOK)
        missing = _missing(words, mask_k, token, WIDE)
        if PARTS == 2:
            words2 = _look(words_now + BLOCK_D // 2, mask_k2, LOOK)
            missing += _missing(words2, mask_k2, token, WIDE)
        count = tl.sum(missing)
        looks = patience
        while (count > 0) & (looks > 0):
            # the address changes with every look as far as the compiler knows, see `collect`
            words_now += (looks & zero) * 16
            words = _look(words_now, mask_k, LOOK)
            missing = _missing(words, mask_k, token, WIDE)
            if PARTS == 2:
                words2 = _look(words_now + BLOCK_D // 2, mask_k2, LOOK)
                missing += _missing(words2, mask_k2, token, WIDE)
            count = tl.sum(missing)
            looks -= 1
        # whoever has waited in vain once does not wait again
        lost = count > 0
        patience = tl.where(lost, 0, patience)
        whole = _value(words, lost, fresh, PLACES, WIDE, r.dtype)
        a = tl.dot(whole, r, a, input_precision=PRECISION, out_dtype=tl.float32)
        if PARTS == 2:
            whole = _value(words2, lost, fresh, PLACES, WIDE, r.dtype)
            a = tl.dot(whole, r2, a, input_precision=PRECISION, out_dtype=tl.float32)
        iz, fo = tl.split(tl.reshape(a, [BLOCK_B, BLOCK_N, 2, 2]))
        i, z = tl.split(iz)
        f, o = tl.split(fo)
        forget, take, m = weights(i, f, n, m, EXPONENTIAL)
        h, c, n = updated(forget, take, z, o, c, n)
        y = h
        if PLACES:
            y = tl.where(inside, h, 0.0)
            h = tl.where(inside, h, h_old)
            c = tl.where(inside, c, c_old)
            n = tl.where(inside, n, n_old)
            m = tl.where(inside, m, m_old)
        # before anything else, as others wait for it
        word = _word(h.to(r.dtype), token + 1, WIDE)
        _publish(slots_ptr + at + (token & 1) * turn, word, mask, LOOK)
        tl.store(y_at + tl.cast(token, tl.int64) * (heads * D), y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptr + at, h, mask=mask)
    tl.store(c_ptr + at, c, mask=mask)
    tl.store(n_ptr + at, n, mask=mask)
    tl.store(m_ptr + at, m, mask=mask)
