"""The kernel of the gated activations: y = act(gate) · up, a tile of rows and columns a program."""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import column_mask, column_offsets, row_mask, row_offsets
from wavecrest.ops.common.triton import tl, triton


@triton.jit(do_not_specialize=["M", "blocks_n", "size1", "size2"])
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    blocks_n,
    size1,
    size2,
    stride_g0,
    stride_g1,
    stride_g2,
    stride_gn,
    stride_u0,
    stride_u1,
    stride_u2,
    stride_un,
    up_offset,
    ACTIVATION: tl.constexpr,
    LEADING: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ACTIVATION: one of `activation.ACTIVATIONS`. up_offset: where the up half of a packed [gate | up] begins."""
    program = tl.program_id(0)
    # int64: row · stride passes 2³¹ on large batches
    rows = (program // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (program % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row_mask(rows, M, BLOCK_M) & column_mask(cols, N, BLOCK_N, EVEN)[None, :]
    g_rows = row_offsets(rows, stride_g0, stride_g1, stride_g2, size1, size2, LEADING)[:, None]
    u_rows = row_offsets(rows, stride_u0, stride_u1, stride_u2, size1, size2, LEADING)[:, None]
    gate = tl.load(gate_ptr + g_rows + column_offsets(cols, stride_gn)[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + up_offset + u_rows + column_offsets(cols, stride_un)[None, :], mask=mask, other=0.0)
    y = activate(gate.to(tl.float32), 0.0, ACTIVATION) * up.to(tl.float32)
    tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y, mask=mask)
