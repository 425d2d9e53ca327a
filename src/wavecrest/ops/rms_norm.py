"""RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops._rows as _rows
from wavecrest.ops._lib import column_mask, column_offsets, load_row_vector, row_mask, row_offsets
from wavecrest.ops._triton import tl, triton
from wavecrest.registry import Cost, Key, Op, dtype_name, m_bucket, needs_grad
from wavecrest.tuned import Config


def _reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    wide = _rows.widen(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)


def _check(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> None:
    _rows.check_rows("rms_norm", x)
    if weight is not None:
        _rows.check_vector("rms_norm", "weight", weight, x)
    _rows.check_eps("rms_norm", eps)


def _key(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Key:
    return (
        m_bucket(_rows.row_count(x)),
        x.shape[-1],
        dtype_name(x),
        None if weight is None else dtype_name(weight),
        x.device.type,
        _rows.leading(x),
        needs_grad(x, weight),
    )


def _inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(M, N, dtype=dtype, device=device), torch.randn(N, dtype=dtype, device=device)


def _cost(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=2 * x.nbytes + (0 if weight is None else weight.nbytes))


def _default_config(key: Key) -> Config:
    return _rows.row_config(key[1], _rows.wave_size())


@triton.jit(do_not_specialize=["M", "size1", "size2"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    y_ptr,
    M,
    N,
    size1,
    size2,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xn,
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
    y_rows = y_ptr + (rows * N)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask_n = column_mask(offs_n, N, BLOCK_N, EVEN)
        mask = mask_m & mask_n[None, :]
        x = tl.load(x_rows + column_offsets(offs_n, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)[:, None]
        if HAS_WEIGHT:
            y *= load_row_vector(weight_ptr, offs_n, stride_wn, mask_n)
        tl.store(y_rows + offs_n[None, :], y, mask=mask)
    else:
        sum_sq = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & column_mask(cols, N, BLOCK_N, EVEN)[None, :]
            x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
            sum_sq += x * x
        rstd = tl.rsqrt(tl.sum(sum_sq, axis=1) / N + eps)[:, None]
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask_n = column_mask(cols, N, BLOCK_N, EVEN)
            mask = mask_m & mask_n[None, :]
            x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=0.0).to(tl.float32)
            y = x * rstd
            if HAS_WEIGHT:
                y *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
            tl.store(y_rows + cols[None, :], y, mask=mask)


def _launch(x: Tensor, weight: Tensor | None, y: Tensor, eps: float, config: Config) -> _rows.Launch:
    rows, leading, size1, size2, (strides,) = _rows.layout(x)
    columns = x.shape[-1]
    return _rows.Launch(
        _rms_norm_kernel,
        ((rows + config["BLOCK_M"] - 1) // config["BLOCK_M"],),
        (
            x,
            x if weight is None else weight,
            y,
            rows,
            columns,
            size1,
            size2,
            *strides,
            x.stride(-1),
            0 if weight is None else weight.stride(0),
            eps,
        ),
        {"HAS_WEIGHT": weight is not None, "LEADING": leading, **_rows.blocks(columns, config)},
        config,
    )


def _bind(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, config: Config) -> Callable[..., Tensor]:
    launch = _launch(x, weight, x, eps, config)
    start, sizes = _rows.starter(launch, x.device), launch.args[3:-1]

    def call(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        start(x, x if weight is None else weight, y, *sizes, eps)
        return y

    return call if x.numel() > 0 else _rows.empty


def _run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, config: Config) -> Tensor:
    return _bind(x, weight, eps, config=config)(x, weight, eps)


def _supports(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _rows.kernel_refusal(dtype_name(x), x.device.type, _rows.leading(x), needs_grad(x, weight))


def _compile_cases(wave: int) -> list[_rows.Launch]:
    cases = []
    for columns in _rows.COMPILE_COLUMNS:
        x = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
        cases.append(_launch(x, x[0], x, 1e-6, _rows.row_config(columns, wave)))
    return cases


_op = Op(
    "rms_norm",
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


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 and rounded once.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        weight: [N] of any floating dtype, or None.
        eps: added to the mean square, inside the root.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    result: Tensor = _op(x, weight, eps)
    return result
