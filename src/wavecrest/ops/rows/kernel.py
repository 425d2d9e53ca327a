"""The row kernel: norms, softmax and rounding to 8 bits, alone and combined, with or without a residual.

A program holds its part of a row in registers: the row is read once and written once, however wide. Rows wider than
one program holds are split over several, which exchange what they found (`_lib.publish`, `_lib.collect`).
"""

from __future__ import annotations

from wavecrest.ops.common.device import (
    SECTOR,
    collect,
    column_mask,
    column_offsets,
    exp,
    first_of,
    load_row_vector,
    magnitude,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_l2,
    publish,
    row_mask,
    row_offsets,
    second_of,
    unpack,
    with_part,
)
from wavecrest.ops.common.quantized import rounded, scale_of, whole_numbers
from wavecrest.ops.common.triton import tl, triton

# what is done to a row: nothing, y = x · scale, y = x · rstd, y = (x − mean) · rstd, y = exp(x − max) / sum
IDENTITY, SCALED, RMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LAYER, SOFTMAX = tl.constexpr(3), tl.constexpr(4)
KINDS = {"identity": 0, "scaled": 1, "rms": 2, "layer": 3, "softmax": 4}
# what becomes of the result: its own type; 8 bits with a scale per row, per group of columns or for the whole tensor
# (from PEAK, a launch before that only looks), or with scales that are given
OWN, TOKEN, GROUPED, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
GIVEN_TENSOR, GIVEN_TOKEN, GIVEN_GROUP, PEAK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
ROUNDINGS = {
    ("token", False): 1,
    ("group", False): 2,
    ("tensor", False): 3,
    ("tensor", True): 4,
    ("token", True): 5,
    ("group", True): 6,
}
# words that the largest magnitude of a tensor is gathered in: one would have every program wait for every other
PEAKS = tl.constexpr(64)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND: tl.constexpr, RESIDUAL: tl.constexpr
):
    other = float("-inf") if KIND == SOFTMAX else 0.0
    x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=other)
    if RESIDUAL:
        r = tl.load(r_rows + column_offsets(cols, stride_rn)[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _reduced(  # type: ignore[no-untyped-def]
    x, zero, weight_ptr, cols, stride_wn, mask_n, count,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, PEAKED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """What is kept of the `count` columns at hand, and two numbers a row [BLOCK_M].

    RMS: the largest |x · weight| where that is asked for (PEAKED), and the sum of squares; LAYER: the mean and the sum
    of squared deviations; SOFTMAX: the maximum and the sum of exponentials over it, which are what is kept.
    """
    values = unpack(x, zero, 0)
    if KIND == RMS:
        first = tl.zeros([x.shape[0]], tl.float32)
        second = tl.sum(values * values, axis=1)
        if PEAKED:
            if HAS_WEIGHT:
                values *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
            # a maximum of floats would lose the NaN of a weight
            first = tl.max(magnitude(values), axis=1).to(tl.float32, bitcast=True)
    elif KIND == LAYER:
        first = tl.sum(values, axis=1) / count
        # masked lanes hold 0, which is not centred: keep them out of the variance
        centred = tl.where(mask_n[None, :], unpack(x, zero, 1 if HELD else 0) - first[:, None], 0.0)
        second = tl.sum(centred * centred, axis=1)
    else:
        first = tl.max(values, axis=1)
        x = exp(values - _shift(first)[:, None])
        second = tl.sum(x, axis=1)
    return x, first, second


@triton.jit
def _shift(peak):  # type: ignore[no-untyped-def]
    """What is subtracted before exponentials: not -inf, as other columns of the row may hold more."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _joined(first, second, index, parts, N, BLOCK_N: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two numbers of a row from those of its parts [PARTS], in the same order in every program."""
    if KIND == RMS:
        whole = tl.max(magnitude(tl.where(index < parts, first, 0.0)), axis=0).to(tl.float32, bitcast=True)
        rest = tl.sum(tl.where(index < parts, second, 0.0), axis=0)
    elif KIND == LAYER:
        # Chan, Golub and LeVeque (1983)
        counts = tl.minimum(tl.maximum(N - index * BLOCK_N, 0), BLOCK_N).to(tl.float32)
        means = tl.where(index < parts, first, 0.0)
        whole = tl.sum(means * counts, axis=0) / N
        rest = tl.sum(tl.where(index < parts, second, 0.0) + counts * (means - whole) * (means - whole), axis=0)
    else:
        peaks = tl.where(index < parts, first, float("-inf"))
        whole = tl.max(peaks, axis=0)
        rest = tl.sum(tl.where(index < parts, second, 0.0) * exp(peaks - whole), axis=0)
    return tl.full([1], 0.0, tl.float32) + whole, tl.full([1], 0.0, tl.float32) + rest


@triton.jit
def _mapped(  # type: ignore[no-untyped-def]
    x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The result in float32, from what `_reduced` kept; `own` is the first number of the columns at hand."""
    y = unpack(x, zero, AGAIN)
    if KIND == SOFTMAX:
        # a row of -inf alone is NaN, as in PyTorch: -inf - -inf; a part of it in another row is 0, its factor too
        y *= (exp(own - first) / second)[:, None]
    elif KIND >= RMS:
        rstd = tl.rsqrt(second / N + eps)
        if KIND == LAYER:
            # subtracted first: a fused multiply-add would leave what rounds off of mean · rstd, which is large
            # where a row hardly varies
            y -= first[:, None]
        y *= rstd[:, None]
    if HAS_WEIGHT:
        y *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
    if HAS_BIAS:
        y += load_row_vector(bias_ptr, cols, stride_bn, mask_n)
    return y


@triton.jit
def _peak(y, mask):  # type: ignore[no-untyped-def]
    """The largest magnitude of each row [BLOCK_M], as `magnitude` gives it."""
    return tl.max(tl.where(mask, magnitude(y), 0), axis=1)


@triton.jit(
    do_not_specialize=[
        "M", "columns", "parts", "size1", "size2", "stride_x0", "stride_x1", "stride_x2",
        "stride_r0", "stride_r1", "stride_r2", "zero",
    ]
)  # fmt: skip
def _row_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    scale_ptr,
    slots_ptr,
    M,
    columns,
    parts,
    size1,
    size2,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xn,
    stride_r0,
    stride_r1,
    stride_r2,
    stride_rn,
    stride_wn,
    stride_bn,
    zero,
    eps,
    KIND: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    LEADING: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    FINITE: tl.constexpr,
    PATIENCE: tl.constexpr,
    LOOK: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):
    pdl_launch_dependents(PDL and not EARLY)
    # columns and row strides come in units of ALIGN, which tells the compiler how wide accesses may be
    N = columns * ALIGN
    # Inductor (torch 2.11) passes a Python float as float64, and all that it meets would become that
    eps = tl.cast(eps, tl.float32)
    # kept as 16 bits between its uses; exponentials are kept as they are
    HELD: tl.constexpr = PACKED and KIND != SOFTMAX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    # where split: max |x · rstd · weight| is rstd times what is found with the sum of squares, in one exchange
    PEAKED: tl.constexpr = ROUNDING == TOKEN and KIND == RMS and PARTS > 1
    program = tl.program_id(0)
    part = 0 if PARTS == 1 else program % parts
    block = program if PARTS == 1 else program // parts
    # int64: row · stride passes 2³¹ on large batches
    rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row_mask(rows, M, BLOCK_M)
    x_rows = x_ptr + ALIGN * row_offsets(rows, stride_x0, stride_x1, stride_x2, size1, size2, LEADING)[:, None]
    r_rows = residual_ptr + ALIGN * row_offsets(rows, stride_r0, stride_r1, stride_r2, size1, size2, LEADING)[:, None]
    out_rows = (rows * N)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    cols = part * BLOCK_N + offs_n
    mask_n = column_mask(cols, N, BLOCK_N, EVEN)
    mask = mask_m & mask_n[None, :]
    # a split row has its program's block to itself
    slots = slots_ptr + block.to(tl.int64) * parts * 2
    index = tl.arange(0, PARTS)

    if EARLY:
        if EARLY > 1 and HAS_WEIGHT:
            # as wide as a sector or narrower, whatever the type and if elements lie side by side
            each: tl.constexpr = SECTOR // 4 if SECTOR <= 4 * BLOCK_N else BLOCK_N
            some = part * BLOCK_N + tl.arange(0, BLOCK_N // each) * each
            prefetch_l2(weight_ptr + column_offsets(some, stride_wn), some < N)
        pdl_wait(True)
        # not before: what waits beside programs that wait would crowd where the launch before both runs dry
        pdl_launch_dependents(True)
    x = _load(x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND, RESIDUAL)
    if RESIDUAL and KEEPS_SUM:
        tl.store(h_ptr + out_rows + cols[None, :], x, mask=mask)
    first = tl.zeros([BLOCK_M], tl.float32)
    second = first
    if KIND >= RMS:
        count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
        x, first, second = _reduced(x, zero, weight_ptr, cols, stride_wn, mask_n, count, KIND, HAS_WEIGHT, PEAKED, HELD)
    own = first
    if KIND >= RMS and PARTS > 1:
        publish(slots, part, tl.sum(first, axis=0), tl.sum(second, axis=0))
        words = collect(slots, parts, zero, PARTS, PATIENCE, LOOK)
        if tl.min((words != 0).to(tl.int32), axis=0) == 0:
            # waited too long for parts that may not have started: work out their share, and wait no more
            for other in range(parts):
                other_cols = other * BLOCK_N + offs_n
                other_n = column_mask(other_cols, N, BLOCK_N, EVEN)
                other_m = mask_m & other_n[None, :]
                other_x = _load(x_rows, r_rows, other_cols, stride_xn, stride_rn, other_m, KIND, RESIDUAL)
                count = tl.minimum(N - other * BLOCK_N, BLOCK_N).to(tl.float32)
                _, first, second = _reduced(
                    other_x, zero, weight_ptr, other_cols, stride_wn, other_n, count, KIND, HAS_WEIGHT, PEAKED, HELD
                )
                words = with_part(words, other, tl.sum(first, axis=0), tl.sum(second, axis=0))
            # its own columns again, so that they need no registers in the meantime
            x = _load(x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND, RESIDUAL)
            count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
            x, own, _ = _reduced(x, zero, weight_ptr, cols, stride_wn, mask_n, count, KIND, HAS_WEIGHT, PEAKED, HELD)
        first, second = _joined(first_of(words), second_of(words), index, parts, N, BLOCK_N, KIND)
    y = _mapped(
        x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
        KIND, HAS_WEIGHT, HAS_BIAS, 2 if HELD else 0,
    )  # fmt: skip

    if ROUNDING == OWN:
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
    elif ROUNDING == PEAK:
        # a maximum does not depend on the order of the programs
        tl.atomic_max(slots_ptr + program % PEAKS, tl.max(_peak(y, mask), axis=0), sem="relaxed")
    elif ROUNDING >= WHOLE:
        if ROUNDING == WHOLE:
            scale = scale_of(tl.max(tl.load(slots_ptr + tl.arange(0, PEAKS)), axis=0), LARGEST)
            tl.store(scale_ptr, scale, mask=program == 0)
            scale = tl.full([1, 1], 0.0, tl.float32) + scale
        elif ROUNDING == GIVEN_TENSOR:
            scale = tl.load(scale_ptr + tl.zeros([1, 1], tl.int32))
        elif ROUNDING == GIVEN_TOKEN:
            scale = tl.load(scale_ptr + rows, mask=rows < M, other=1.0)[:, None]
        else:
            scale = tl.load(
                scale_ptr + (rows * tl.cdiv(N, GROUP))[:, None] + (cols // GROUP)[None, :], mask=mask, other=1.0
            )
        if KIND == SCALED:
            y *= scale
        else:
            y = rounded(y, scale, y_ptr.dtype.element_ty, LARGEST, ROUNDING != WHOLE)
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
    elif ROUNDING == GROUPED:
        # what is outside the row must not count: a bias, or what 0 is mapped to, is not 0 there
        grouped = tl.reshape(tl.where(mask, y, 0.0), [BLOCK_M, BLOCK_N // GROUP, GROUP])
        scales = scale_of(tl.max(magnitude(grouped), axis=2), LARGEST)
        grouped = rounded(grouped, scales[:, :, None], y_ptr.dtype.element_ty, LARGEST, False)
        tl.store(y_ptr + out_rows + cols[None, :], tl.reshape(grouped, [BLOCK_M, BLOCK_N]), mask=mask)
        groups = tl.cdiv(N, GROUP)
        offs_g = part * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
        mask_g = mask_m & (offs_g < groups)[None, :]
        tl.store(scale_ptr + (rows * groups)[:, None] + offs_g[None, :], scales, mask=mask_g)
    else:
        if PEAKED:
            peak = magnitude(first * tl.rsqrt(second / N + eps))
        else:
            peak = _peak(y, mask)
        if PARTS > 1 and not PEAKED:
            found = tl.max(peak, axis=0).to(tl.float32, bitcast=True)
            publish(slots + parts, part, found, found)
            words = collect(slots + parts, parts, zero, PARTS, PATIENCE, LOOK)
            if tl.min((words != 0).to(tl.int32), axis=0) == 0:
                for other in range(parts):
                    other_cols = other * BLOCK_N + offs_n
                    other_n = column_mask(other_cols, N, BLOCK_N, EVEN)
                    other_m = mask_m & other_n[None, :]
                    other_x = _load(x_rows, r_rows, other_cols, stride_xn, stride_rn, other_m, KIND, RESIDUAL)
                    other_own = first
                    if KIND == SOFTMAX:
                        other_x, other_own, _ = _reduced(
                            other_x, zero, weight_ptr, other_cols, stride_wn, other_n, 1.0,
                            KIND, HAS_WEIGHT, PEAKED, HELD,
                        )  # fmt: skip
                    other_y = _mapped(
                        other_x, zero, other_own, first, second, N, eps, weight_ptr, bias_ptr, other_cols,
                        stride_wn, stride_bn, other_n, KIND, HAS_WEIGHT, HAS_BIAS, 2 if HELD else 0,
                    )  # fmt: skip
                    found = tl.max(_peak(other_y, other_m), axis=0).to(tl.float32, bitcast=True)
                    words = with_part(words, other, found, found)
            peaks = tl.where(index < parts, magnitude(first_of(words)), 0)
            peak = tl.full([1], 0, tl.int32) + tl.max(peaks, axis=0)
        scale = scale_of(peak, LARGEST)
        if HELD:
            # made again from the packed row, rather than kept
            y = _mapped(
                x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
                KIND, HAS_WEIGHT, HAS_BIAS, 1,
            )  # fmt: skip
        if FINITE and BLOCK_M == 1 and y_ptr.dtype.element_ty == tl.int8:
            # a finite peak is that of a row without NaN and infinities: no look at each value
            if tl.max(scale, axis=0) < float("inf"):
                q = whole_numbers(y, 1.0 / scale[:, None])
            else:
                q = rounded(y, scale[:, None], tl.int8, LARGEST, False)
        else:
            q = rounded(y, scale[:, None], y_ptr.dtype.element_ty, LARGEST, False)
        tl.store(y_ptr + out_rows + cols[None, :], q, mask=mask)
        tl.store(scale_ptr + rows, scale, mask=(rows < M) & (part == 0))
