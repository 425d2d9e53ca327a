"""Residual addition and RMSNorm in one pass: h = x + residual; y = rms_norm(h) · weight; returns (y, h)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops._rows as _rows
from wavecrest.ops._lib import column_mask, column_offsets, load_row_vector, row_mask, row_offsets
from wavecrest.ops._triton import tl, triton
from wavecrest.registry import Cost, Key, Op, dtype_name, m_bucket, needs_grad
from wavecrest.tuned import Config


def _reference(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    h = (_rows.widen(x) + _rows.widen(residual)).to(x.dtype)
    wide = _rows.widen(h)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype), h


def _check(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> None:
    _rows.check_rows("add_rms_norm", x)
    _rows.check_same("add_rms_norm", "residual", residual, x)
    if weight is not None:
        _rows.check_vector("add_rms_norm", "weight", weight, x)
    _rows.check_eps("add_rms_norm", eps)


def _key(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Key:
    return (
        m_bucket(_rows.row_count(x)),
        x.shape[-1],
        dtype_name(x),
        None if weight is None else dtype_name(weight),
        x.device.type,
        _rows.leading(x, residual),
        needs_grad(x, residual, weight),
    )


def _inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(M, N, dtype=dtype, device=device)
    return x, torch.randn_like(x), torch.randn(N, dtype=dtype, device=device)


def _cost(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=4 * x.nbytes + (0 if weight is None else weight.nbytes))


def _default_config(key: Key) -> Config:
    return _rows.row_config(key[1], _rows.wave_size())


@triton.jit(do_not_specialize=["M", "size1", "size2"])
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    M,
    N,
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
    eps,
    HAS_WEIGHT: tl.constexpr,
    LEADING: tl.constexpr,
    ONE_PASS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # int64: row · stride passes 2³¹ on large batches
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row_mask(rows, M, BLOCK_M)
    x_rows = x_ptr + row_offsets(rows, stride_x0, stride_x1, stride_x2, size1, size2, LEADING)[:, None]
    r_rows = residual_ptr + row_offsets(rows, stride_r0, stride_r1, stride_r2, size1, size2, LEADING)[:, None]
    out_rows = (rows * N)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask_n = column_mask(offs_n, N, BLOCK_N, EVEN)
        mask = mask_m & mask_n[None, :]
        x = tl.load(x_rows + column_offsets(offs_n, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_rows + column_offsets(offs_n, stride_rn)[None, :], mask=mask, other=0.0).to(tl.float32)
        # the norm is that of the rounded sum, as in a model that adds first
        h = (x + r).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + out_rows + offs_n[None, :], h, mask=mask)
        h = h.to(tl.float32)
        y = h * tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)[:, None]
        if HAS_WEIGHT:
            y *= load_row_vector(weight_ptr, offs_n, stride_wn, mask_n)
        tl.store(y_ptr + out_rows + offs_n[None, :], y, mask=mask)
    else:
        sum_sq = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & column_mask(cols, N, BLOCK_N, EVEN)[None, :]
            x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
            r = tl.load(r_rows + column_offsets(cols, stride_rn)[None, :], mask=mask, other=0.0).to(tl.float32)
            h = (x + r).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + out_rows + cols[None, :], h, mask=mask)
            h = h.to(tl.float32)
            sum_sq += h * h
        rstd = tl.rsqrt(tl.sum(sum_sq, axis=1) / N + eps)[:, None]
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask_n = column_mask(cols, N, BLOCK_N, EVEN)
            mask = mask_m & mask_n[None, :]
            # added again, not read back from h: another thread may have stored it
            x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
            r = tl.load(r_rows + column_offsets(cols, stride_rn)[None, :], mask=mask, other=0.0).to(tl.float32)
            y = (x + r).to(h_ptr.dtype.element_ty).to(tl.float32) * rstd
            if HAS_WEIGHT:
                y *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
            tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor | None, y: Tensor, h: Tensor, eps: float, config: Config
) -> _rows.Launch:
    rows, leading, size1, size2, (strides_x, strides_r) = _rows.layout(x, residual)
    columns = x.shape[-1]
    return _rows.Launch(
        _add_rms_norm_kernel,
        ((rows + config["BLOCK_M"] - 1) // config["BLOCK_M"],),
        (
            x,
            residual,
            x if weight is None else weight,
            y,
            h,
            rows,
            columns,
            size1,
            size2,
            *strides_x,
            x.stride(-1),
            *strides_r,
            residual.stride(-1),
            0 if weight is None else weight.stride(0),
            eps,
        ),
        {"HAS_WEIGHT": weight is not None, "LEADING": leading, **_rows.blocks(columns, config)},
        config,
    )


def _bind(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, config: Config
) -> Callable[..., tuple[Tensor, Tensor]]:
    launch = _launch(x, residual, weight, x, x, eps, config)
    start, sizes = _rows.starter(launch, x.device), launch.args[5:-1]
    rows = x.numel() > 0

    def call(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        h = torch.empty_like(x, memory_format=torch.contiguous_format)
        if rows:
            start(x, residual, x if weight is None else weight, y, h, *sizes, eps)
        return y, h

    return call


def _run(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, config: Config
) -> tuple[Tensor, Tensor]:
    return _bind(x, residual, weight, eps, config=config)(x, residual, weight, eps)


def _supports(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    dims = _rows.leading(x, residual)
    return _rows.kernel_refusal(dtype_name(x), x.device.type, dims, needs_grad(x, residual, weight))


def _compile_cases(wave: int) -> list[_rows.Launch]:
    cases = []
    for columns in _rows.COMPILE_COLUMNS:
        x = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
        cases.append(_launch(x, x, x[0], x, x, 1e-6, _rows.row_config(columns, wave)))
    return cases


_op = Op(
    "add_rms_norm",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=("rows", "columns", "dtype", "weight", "device", "leading", "grad"),
    inputs=_inputs,
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
)
_op.attach(
    "triton",
    _run,
    supports=_supports,
    reserved=lambda x, *_args, **_kwargs: _rows.kernel_reserved(x.device.type),
    priority=20,
    takes_config=True,
    bind=_bind,
)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """h = x + residual rounded to x's dtype; y = h / sqrt(mean(h²) + eps) · weight in float32, rounded once.

    The norm is that of the rounded sum, as in transformers, where the sum is a tensor of its own.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        residual: the shape, dtype and device of x, strides of its own.
        weight: [N] of any floating dtype, or None.
        eps: added to the mean square, inside the root.

    Returns:
        (y, h): contiguous tensors of x's shape and dtype; h is the residual of the next layer.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    result: tuple[Tensor, Tensor] = _op(x, residual, weight, eps)
    return result
