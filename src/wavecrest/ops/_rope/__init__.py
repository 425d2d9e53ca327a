"""Rotary position embedding: pairs of columns turned by an angle that grows with the position (Su et al., 2021).

Column pairs (a, b) become (a·cos − b·sin, b·cos + a·sin). Which columns are a pair is the style: "neox" pairs column i
with column i + R/2 (GPT-NeoX, Llama), "gptj" column 2i with 2i + 1 (GPT-J, Meta's own Llama code).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Cell, Config, Work
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.common.device import column_mask, column_offsets
from wavecrest.ops.common.triton import tl, triton

STYLES = ("neox", "gptj")
POSITION_DTYPES = (torch.int32, torch.int64)


def _tokens(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[:-2])


def _token_count(x: Tensor) -> int:
    count = 1
    for size in _tokens(x):
        count = count * size
    return count


def _fits(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """True if a shape is that of the tokens [..., S], its last size S and those before it broadcast."""
    if not 1 <= len(shape) <= len(tokens) or shape[-1] != tokens[-1]:
        return False
    pairs = zip(shape[:-1], tokens[len(tokens) - len(shape) : -1], strict=True)
    return all(size in (1, wanted) for size, wanted in pairs)


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> None:
    _checks.check_rows("rope", x)
    if x.ndim < 3:
        raise InvalidArgument(f"rope: x must be [..., tokens, heads, columns], got {list(x.shape)}")
    if style not in STYLES:
        raise InvalidArgument(f"rope: style is neox or gptj, not {style!r}")
    if not isinstance(cos, Tensor) or cos.ndim < 2 or not cos.dtype.is_floating_point:
        found = f"{cos.dtype} {list(cos.shape)}" if isinstance(cos, Tensor) else type(cos).__name__
        raise InvalidArgument(
            f"rope: cos must be a floating-point tensor [positions, R/2] or [..., S, R/2], got {found}"
        )
    _checks.check_same("rope", "sin", sin, cos)
    if cos.device != x.device:
        raise InvalidArgument(f"rope: cos and sin are on {cos.device}, x on {x.device}")
    if not 1 <= cos.shape[-1] <= x.shape[-1] // 2:
        raise InvalidArgument(
            f"rope: {cos.shape[-1]} columns of cos turn {2 * cos.shape[-1]} of x, which has {x.shape[-1]}; tables that "
            "hold every angle twice are passed as cos[..., : R // 2]"
        )
    if positions is not None:
        _check_positions(x, cos, positions)
    elif cos.ndim > 2:
        if not _fits(tuple(cos.shape[:-1]), _tokens(x)):
            raise InvalidArgument(
                f"rope: cos {list(cos.shape)} has a row a token: it must be {[*_tokens(x), 'R/2']} or broadcast to it"
            )
    elif cos.shape[0] < x.shape[-3]:
        raise InvalidArgument(f"rope: x has {x.shape[-3]} tokens a sequence, cos and sin {cos.shape[0]} positions")


def _check_positions(x: Tensor, cos: Tensor, positions: Any) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in POSITION_DTYPES:
        found = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise InvalidArgument(f"rope: positions must be an int32 or int64 tensor, got {found}")
    if cos.ndim != 2 or cos.shape[0] == 0:
        raise InvalidArgument(f"rope: positions choose rows of a table [positions, R/2], cos is {list(cos.shape)}")
    if not _fits(tuple(positions.shape), _tokens(x)):
        raise InvalidArgument(f"rope: positions {list(positions.shape)} must be {list(_tokens(x))} or broadcast to it")
    if positions.device != x.device:
        raise InvalidArgument(f"rope: positions are on {positions.device}, x on {x.device}")


def _rows_of(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of cos and sin each token takes, [..., S, R/2], NaN where a position is not in the table."""
    if positions is None:
        return (cos, sin) if cos.ndim > 2 else (cos[: x.shape[-3]], sin[: x.shape[-3]])
    inside = positions.clamp(0, cos.shape[0] - 1)
    outside = (inside != positions).unsqueeze(-1)
    # a NaN in either of them makes the whole pair NaN
    return cos[inside].masked_fill(outside, float("nan")), sin[inside]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """The rotated columns of x, [..., R], in whatever dtype x and cos [..., 1, R/2] promote to."""
    half = cos.shape[-1]
    if style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def _reference(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, cos.dtype) else torch.float32
    cos, sin = (table.to(wide).unsqueeze(-2) for table in _rows_of(x, cos, sin, positions))
    y = torch.empty_like(x)
    y[..., : 2 * cos.shape[-1]] = _turned(x.to(wide), cos, sin, style).to(x.dtype)
    y[..., 2 * cos.shape[-1] :] = x[..., 2 * cos.shape[-1] :]
    return y


KEY_FIELDS = (
    "tokens",
    "heads",
    "columns",
    "rotated",
    "dtype",
    "table",
    "positions",
    "style",
    "device",
    "leading",
    "same_strides",
    "grad",
)


def _key(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Key:
    return (
        m_bucket(_token_count(x)),
        x.shape[-2],
        x.shape[-1],
        2 * cos.shape[-1],
        dtype_name(x),
        dtype_name(cos),
        None if positions is None else dtype_name(positions),
        style,
        x.device.type,
        _leading(x, cos, positions),
        _same_strides(cos, sin),
        needs_grad(x, cos, sin),
    )


def _same_strides(cos: Tensor, sin: Tensor) -> bool:
    return all(
        size == 1 or one == other for size, one, other in zip(cos.shape, cos.stride(), sin.stride(), strict=True)
    )


def _result(x: Tensor) -> Tensor:
    """Where the result goes, without memory: its strides are x's wherever x has no gaps and no overlaps."""
    return torch.empty_like(x, device="meta")


def _walked(x: Tensor, y: Tensor, cos: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and what each token has of its own (its position, or its row of cos), as rows over the same tokens."""
    tokens = _tokens(x)
    if positions is not None:
        own = positions.expand(tokens).unsqueeze(-1)
    else:
        rows = cos if cos.ndim > 2 else cos[: tokens[-1]]
        own = rows.expand(*tokens, cos.shape[-1])
    return x[..., 0], y[..., 0], own


def _leading(x: Tensor, cos: Tensor, positions: Tensor | None) -> int:
    return _layout.leading(*_walked(x, _result(x), cos, positions))


def _declines(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> str | None:
    reason = _checks.kernel_refusal(dtype_name(x), x.device.type, _leading(x, cos, positions), needs_grad(x, cos, sin))
    if reason is not None:
        return reason
    if dtype_name(cos) not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(cos)}"
    if not _same_strides(cos, sin):
        return "takes cos and sin with the same strides"
    return None


def _inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """M tokens of max(1, N // 128) heads of min(N, 128) columns (at least 2, and even), and their tables."""
    columns = max(2, min(N, 128) // 2 * 2)
    return _example(M, max(1, N // 128), columns, columns, dtype, device)


def _example(
    tokens: int, heads: int, columns: int, rotated: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, heads, columns, dtype=dtype, device=device)
    angles = torch.randn(tokens, rotated // 2, dtype=torch.float32, device=device)
    return x, angles.cos(), angles.sin()


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Decode (one token a sequence, positions given) and prefill, 32 heads of 128 columns but where a name says so."""

    def decode(batch: int) -> tuple[Any, ...]:
        x, _, _ = _example(batch, 32, 128, 128, torch.bfloat16, device)
        _, cos, sin = _example(4096, 1, 128, 128, torch.float32, device)
        return x.unsqueeze(1), cos, sin, torch.randint(4096, (batch, 1), device=device)

    def prefill(tokens: int, heads: int, columns: int, rotated: int, style: str, dtype: torch.dtype) -> tuple[Any, ...]:
        x, cos, sin = _example(tokens, heads, columns, rotated, dtype, device)
        return x, cos, sin, None, style

    if suite == "quick":
        return {
            "decode 4": partial(decode, 4),
            "prefill 64": partial(prefill, 64, 4, 64, 64, "neox", torch.float32),
            "prefill 64 gptj": partial(prefill, 64, 4, 64, 64, "gptj", torch.float32),
        }
    bf16 = torch.bfloat16
    return {
        **{f"decode {batch}": partial(decode, batch) for batch in (1, 16, 64)},
        "prefill 512": partial(prefill, 512, 32, 128, 128, "neox", bf16),
        "prefill 4096": partial(prefill, 4096, 32, 128, 128, "neox", bf16),
        "prefill 16384": partial(prefill, 16384, 32, 128, 128, "neox", bf16),
        "prefill 16384 gptj": partial(prefill, 16384, 32, 128, 128, "gptj", bf16),
        "prefill 16384 fp32": partial(prefill, 16384, 32, 128, 128, "neox", torch.float32),
        "prefill 16384 heads=8": partial(prefill, 16384, 8, 128, 128, "neox", bf16),
        "prefill 16384 columns=80 rotated=32": partial(prefill, 16384, 32, 80, 32, "neox", bf16),
        "prefill 16384 heads=64 columns=64": partial(prefill, 16384, 64, 64, 64, "neox", bf16),
    }


def _call_of_key(parts: Mapping[str, Cell], device: str) -> tuple[Any, ...] | None:
    """A call with this key, of one dimension of tokens; see `Op`."""
    tokens, heads, columns, rotated = (int(parts[name] or 0) for name in ("tokens", "heads", "columns", "rotated"))
    dtype, table, positions = (getattr(torch, str(parts[name]), None) for name in ("dtype", "table", "positions"))
    if not isinstance(dtype, torch.dtype) or not isinstance(table, torch.dtype) or min(tokens, heads, columns) < 1:
        return None
    x, cos, sin = _example(tokens, heads, columns, rotated, dtype, device)
    cos, sin = cos.to(table), sin.to(table)
    if positions is None:
        return x, cos, sin, None, str(parts["style"])
    return x, cos, sin, torch.zeros(tokens, dtype=positions, device=device), str(parts["style"])


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Interleaved pairs, positions, and columns that are not turned."""
    x, cos, sin = _example(5, 3, 40, 32, torch.bfloat16, "cpu")
    positions = torch.tensor([4, 0, 2, 2, 1])
    return {
        "gptj": lambda: (x, cos, sin, None, "gptj"),
        "positions": lambda: (x, cos, sin, positions),
        "gptj positions": lambda: (x, cos, sin, positions.int(), "gptj"),
    }


def _cost(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Cost:
    tokens, half = _token_count(x), cos.shape[-1]
    if positions is not None:
        # as many rows as there are positions, and no more than there are rows
        rows, read = min(positions.numel(), cos.shape[0]), positions.nbytes
    else:
        rows, read = (cos.numel() // half if cos.ndim > 2 else x.shape[-3]), 0
    tables = 2 * rows * half * cos.element_size() if tokens else 0
    return Cost(flops=6 * tokens * x.shape[-2] * half, bytes=2 * x.nbytes + tables + read)


def _default_config(key: Key) -> Config:
    return _config(key[0], key[1], key[2], key[3], key[4], _target.wave_size())


def _config(tokens: int, heads: int, columns: int, rotated: int, dtype: str, wave: int) -> Config:
    """About 8 KiB of x a program, and 64 bytes a thread: two 16-byte loads of either column of the pairs.

    Reasoned, not swept: a program takes all heads of a token if it can, as they share a row of cos and sin. Few tokens
    (decode) are cut into 4 KiB, so that more programs start at once. `tokens` is 0 where it is not known.
    """
    size = 4 if dtype == "float32" else 2
    row = _layout.power_of_two(columns) * size
    budget = 4096 if 0 < tokens * heads * row <= 1 << 20 else 8192
    rows = max(1, budget // row)
    block_h = min(rows, _layout.power_of_two(heads))
    # where few columns are rotated, no more threads than they have 16-byte pieces of a half
    threads = min(rows * row // 64, rows * _layout.power_of_two(rotated // 2) * size // 16)
    return Config(BLOCK_T=rows // block_h, BLOCK_H=block_h, num_warps=max(1, threads // wave))


# bytes of x a thread that `wavecrest tune rope` tries
_THREAD_BYTES = (16, 32, 64, 128)
# tokens and heads of a program
_TOKENS, _HEADS = (1, 2, 4), (4, 8, 16, 32, 64)


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    first = _config(key[0], key[1], key[2], key[3], key[4], arch.wave_size)
    yield first
    row = _layout.power_of_two(key[2]) * (4 if key[4] == "float32" else 2)
    # the rotated columns, or the others, of two rows a thread at least, and no more than registers hold
    for tokens, heads, each in itertools.product(_TOKENS, _HEADS, _THREAD_BYTES):
        warps = tokens * heads * row // (each * arch.wave_size)
        if heads > _layout.power_of_two(key[1]) or not 1 <= warps <= 16 or not 1024 <= tokens * heads * row <= 32768:
            continue
        made = Config(BLOCK_T=tokens, BLOCK_H=heads, num_warps=warps)
        if made != first:
            yield made


# operations a value that is turned: two products, a sum, two conversions, and its addresses
_TURNED_OPERATIONS = 8.0


def _work_of(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """For the cost model; a row of the tables is read by each program of its token."""
    tokens, heads, columns, rotated, dtype, table, *_ = key
    if 0 in (tokens, heads):
        return ()
    size, table_size = (4 if name == "float32" else 2 for name in (dtype, table))
    block_t, block_h, width = config["BLOCK_T"], config["BLOCK_H"], _layout.power_of_two(columns)
    programs = _layout.ceil_div(tokens, block_t) * _layout.ceil_div(heads, block_h)
    values = min(block_t, tokens) * min(block_h, heads) * columns
    angles = min(block_t, tokens) * rotated * table_size
    return (
        _work.moved(
            config, programs, values * size + angles, values * size,
            registers=2 * block_t * block_h * width / (config["num_warps"] * arch.wave_size),
            operations=block_t * block_h * width * _TURNED_OPERATIONS,
            fresh=tokens * (heads * columns * size + rotated * table_size),
        ),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "inner", "size1", "blocks_t", "blocks_h", "heads", "positions", "half", "rest",
        "stride_x0", "stride_x1", "stride_x2", "stride_xh", "stride_y0", "stride_y1", "stride_y2", "stride_yh",
        "stride_c0", "stride_c1", "stride_c2", "stride_p0", "stride_p1", "stride_p2",
    ]
)  # fmt: skip
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    inner,
    size1,
    blocks_t,
    blocks_h,
    heads,
    positions,
    half,
    rest,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xh,
    stride_xd,
    stride_y0,
    stride_y1,
    stride_y2,
    stride_yh,
    stride_yd,
    stride_c0,
    stride_c1,
    stride_c2,
    stride_cd,
    stride_p0,
    stride_p1,
    stride_p2,
    INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr,
    LEADING: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN_H: tl.constexpr,
    EVEN_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # half, rest and the strides of x, y, cos and sin come in units of ALIGN, which tells how wide accesses may be;
    # half of a full block is known better still
    R2 = BLOCK_R if EVEN_R else half * ALIGN
    program = tl.program_id(0)
    block_h = program % blocks_h
    block = program // blocks_h
    x0 = tl.zeros([1, 1], tl.int64)
    y0, c0, p0 = x0, x0, tl.zeros([1], tl.int64)
    if LEADING != 1:
        # a program's tokens are of one innermost run, so that the divisions are once a program
        outer = (block // blocks_t).to(tl.int64)
        block = block % blocks_t
        x0 += (outer // size1) * stride_x0 + (outer % size1) * stride_x1
        y0 += (outer // size1) * stride_y0 + (outer % size1) * stride_y1
        c0 += (outer // size1) * stride_c0 + (outer % size1) * stride_c1
        p0 += (outer // size1) * stride_p0 + (outer % size1) * stride_p1
    rows = tl.arange(0, BLOCK_T * BLOCK_H)
    # int64: what strides make of them passes 2³¹ on large tensors
    tokens = block.to(tl.int64) * BLOCK_T + rows // BLOCK_H
    head = block_h.to(tl.int64) * BLOCK_H + rows % BLOCK_H
    mask_t = column_mask(tokens, inner, BLOCK_T * BLOCK_H, BLOCK_T == 1)
    mask_m = (mask_t & column_mask(head, heads, BLOCK_T * BLOCK_H, EVEN_H))[:, None]
    x_rows = x_ptr + ALIGN * (x0 + (tokens * stride_x2 + head * stride_xh)[:, None])
    y_rows = y_ptr + ALIGN * (y0 + (tokens * stride_y2 + head * stride_yh)[:, None])

    offs_r = tl.arange(0, BLOCK_R)
    mask_r = mask_m & column_mask(offs_r, R2, BLOCK_R, EVEN_R)[None, :]
    # x before the angles, which positions have to arrive for
    if BLOCK_REST > 0:
        offs_rest = tl.arange(0, BLOCK_REST)
        mask_rest = mask_m & (offs_rest < rest * ALIGN)[None, :]
        passed = tl.load(x_rows + column_offsets(2 * R2 + offs_rest, stride_xd)[None, :], mask=mask_rest)
    if INTERLEAVED:
        offs_x = tl.arange(0, 2 * BLOCK_R)
        mask_x = mask_m & column_mask(offs_x, 2 * R2, 2 * BLOCK_R, EVEN_R)[None, :]
        # a pair is in neighbouring columns: loaded together, as wide as rows allow, and taken apart in registers
        first = tl.load(x_rows + column_offsets(offs_x, stride_xd)[None, :], mask=mask_x, other=0.0)
        second = first
    else:
        first = tl.load(x_rows + column_offsets(offs_r, stride_xd)[None, :], mask=mask_r, other=0.0)
        second = tl.load(x_rows + column_offsets(R2 + offs_r, stride_xd)[None, :], mask=mask_r, other=0.0)

    # every row reads its token's angles: the same lines for all heads, from the nearest cache
    table = c0 + (tokens * stride_c2)[:, None]
    inside = mask_r
    if POSITIONS:
        position = tl.load(positions_ptr + p0 + tokens * stride_p2, mask=mask_t, other=0).to(tl.int64)
        table = (position * stride_c2)[:, None]
        # a position that the table does not have is not read: its token becomes NaN
        inside = mask_r & ((position >= 0) & (position < positions))[:, None]
    table = ALIGN * table + column_offsets(offs_r, stride_cd)[None, :]
    cos = tl.load(cos_ptr + table, mask=inside, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)

    if INTERLEAVED:
        first, second = tl.split(tl.reshape(first.to(tl.float32), [BLOCK_T * BLOCK_H, BLOCK_R, 2]))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, [BLOCK_T * BLOCK_H, 2 * BLOCK_R])
        tl.store(y_rows + column_offsets(offs_x, stride_yd)[None, :], y, mask=mask_x)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        tl.store(y_rows + column_offsets(offs_r, stride_yd)[None, :], first * cos - second * sin, mask=mask_r)
        tl.store(y_rows + column_offsets(R2 + offs_r, stride_yd)[None, :], second * cos + first * sin, mask=mask_r)
    if BLOCK_REST > 0:
        tl.store(y_rows + column_offsets(2 * R2 + offs_rest, stride_yd)[None, :], passed, mask=mask_rest)


def _launch(
    x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, style: str, config: Config
) -> _launcher.Launch:
    walked = _layout.layout(*_walked(x, y, cos, positions))
    # the innermost run of tokens last, also where it is the only one
    x_tokens, y_tokens, own = (
        strides if walked.leading == 3 else (strides[1], strides[2], strides[0]) for strides in walked.strides
    )
    inner = walked.size2 if walked.leading == 3 else walked.rows
    heads, columns, half = x.shape[-2], x.shape[-1], cos.shape[-1]
    rest = columns - 2 * half
    stride_xh, stride_yh = (x.stride(-2), y.stride(-2)) if heads > 1 else (0, 0)
    c_tokens = own if positions is None else (0, 0, cos.stride(0))
    p_tokens = (0, 0, 0) if positions is None else own
    unit = _layout.alignment(half, (rest, stride_xh, stride_yh), x_tokens, y_tokens, c_tokens)
    blocks_t = (inner + config["BLOCK_T"] - 1) // config["BLOCK_T"]
    blocks_h = (heads + config["BLOCK_H"] - 1) // config["BLOCK_H"]
    block_r = _layout.power_of_two(half)
    outer = walked.rows // inner if inner else 0
    return _launcher.Launch(
        _rope_kernel,
        (outer * blocks_t * blocks_h,),
        (
            x,
            y,
            cos,
            sin,
            # not read without positions, but a tensor all the same
            cos if positions is None else positions,
            inner,
            walked.size1,
            blocks_t,
            blocks_h,
            heads,
            cos.shape[0],
            half // unit,
            rest // unit,
            *_units(unit, *x_tokens, stride_xh),
            x.stride(-1),
            *_units(unit, *y_tokens, stride_yh),
            y.stride(-1),
            *_units(unit, *c_tokens),
            cos.stride(-1),
            *p_tokens,
        ),
        {
            "INTERLEAVED": style == "gptj",
            "POSITIONS": positions is not None,
            "LEADING": walked.leading,
            "ALIGN": unit,
            "EVEN_H": heads % config["BLOCK_H"] == 0,
            "EVEN_R": half == block_r,
            "BLOCK_R": block_r,
            "BLOCK_REST": _layout.power_of_two(rest) if rest else 0,
        },
        config,
    )


def _units(unit: int, *strides: int) -> tuple[int, ...]:
    return tuple(stride // unit for stride in strides)


def _launches(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    style: str = "neox",
    *,
    config: Config,
    arch: Arch,
) -> list[_launcher.Launch]:
    return [_launch(x, _result(x), cos, sin, positions, style, config)] if x.numel() > 0 else []


def _bind(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    style: str = "neox",
    *,
    config: Config,
) -> Callable[..., Tensor]:
    made = _launch(x, _result(x), cos, sin, positions, style, config)
    start, sizes = _launcher.starter(made, x.device), made.args[5:]
    tokens = x.numel() > 0

    def call(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
        y = torch.empty_like(x)
        if tokens:
            start(x, y, cos, sin, cos if positions is None else positions, *sizes)
        return y

    return call


# name -> tokens, heads, columns, rotated columns, style, whether with positions: the common prefill and decode; partly
# rotated; 80 columns (no power of two); tokens without a common stride
_COMPILED: dict[str, tuple[tuple[int, ...], int, int, int, str, bool]] = {
    "prefill neox": ((4096,), 32, 128, 128, "neox", False),
    "prefill gptj": ((4096,), 32, 128, 128, "gptj", False),
    "decode neox": ((16,), 32, 128, 128, "neox", True),
    "decode gptj": ((16,), 8, 64, 64, "gptj", True),
    "partial neox": ((4096,), 32, 80, 32, "neox", True),
    "partial gptj": ((4096,), 32, 128, 64, "gptj", True),
    "80 columns": ((4096,), 16, 80, 80, "neox", False),
    "batched": ((4, 1024), 8, 128, 128, "neox", False),
}


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases = {}
    for name, (tokens, heads, columns, rotated, style, positioned) in _COMPILED.items():
        x = torch.empty(*tokens, heads, columns, dtype=torch.bfloat16, device="meta")
        table = torch.empty(4096, rotated // 2, dtype=torch.float32, device="meta")
        positions = torch.empty(tokens, dtype=torch.int64, device="meta") if positioned else None
        made = config or _config(_token_count(x), heads, columns, rotated, "bfloat16", arch.wave_size)
        cases[name] = _launch(x, x, table, table, positions, style, made)
    return cases


_op = LegacyOp(
    "rope",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("tokens", "heads"),
    inputs=_inputs,
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_bench_cases,
    emulate_cases=_emulate_cases,
    call_of_key=_call_of_key,
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches, work=_work_of)
_op.modelled(propose)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    """x with the first R of its columns turned by the angles of each token's position, in float32 and rounded once.

    Args:
        x: [..., S, H, D] (batch, sequence, heads, columns; or tokens, heads, columns), any strides, float32, float16,
            bfloat16 or float64. A tensor [B, H, S, D] is passed as `x.transpose(1, 2)`.
        cos, sin: of one shape and floating dtype, any strides; R/2 columns, R at most D, columns R to D are copied.
            A table [P, R/2] has a row a position; [..., S, R/2] with three dimensions or more has a row a token, its
            sizes before S those of x or 1 or left out.
        positions: int32 or int64 [..., S], with a table: each token's row, sizes before S as above. None: 0 to S − 1.
            A token whose position is negative or not in the table becomes NaN in its first R columns.
        style: which columns are a pair, "neox" (i, i + R/2) or "gptj" (2i, 2i + 1).

    Returns:
        A tensor of x's shape and dtype, and of its strides where x has neither gaps nor overlaps (then a transposed
        view goes in and the same transposed view comes out); otherwise dense, in the order of x's strides.

    Raises:
        InvalidArgument: a shape, dtype, device or style is outside this.
    """
    result: Tensor = _op(x, cos, sin, positions, style)
    return result
