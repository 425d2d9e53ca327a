from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    assert_compiles,
    assert_few_calls,
    assert_grad_falls_back,
    assert_never_copies,
    name,
    random,
    reference,
    run,
    shape_id,
    specialised,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._rope.backend import op as rope_op
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.launch import bind

OP = "rope"
STYLES = ("neox", "gptj")
# x, rotated columns: one pair, a column left over, no power of two, partly rotated, one head, one token, four
# dimensions of tokens and heads, more heads than a program takes
SHAPES = (
    ((1, 1, 2), 2),
    ((4, 3, 7), 4),
    ((5, 3, 8), 8),
    ((7, 2, 40), 24),
    ((3, 5, 2, 80), 80),
    ((2, 3, 1, 96), 32),
    ((2, 1, 33, 64), 64),
    ((2, 1, 4, 2, 6), 2),
    ((2, 70, 64), 64),
)


def tables(rows: int, rotated: int, dtype: torch.dtype, device: str, seed: int = 7) -> tuple[Tensor, Tensor]:
    # no angles: cos² + sin² = 1 could hide that one of the two is used for the other
    return random((rows, rotated // 2), dtype, device, seed), random((rows, rotated // 2), dtype, device, seed + 1)


def same_order(a: Tensor, b: Tensor) -> bool:
    return all(size == 1 or s == t for size, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def assert_rotates(
    backend: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    style: str = "neox",
    config: Config | None = None,
) -> Tensor:
    """The backend against the reference in float64; x's dtype and order of memory; the bound call gives the same."""
    found = registry.get(OP)
    before = [tensor.clone() for tensor in (x, cos, sin)]
    got = run(OP, backend, x, cos, sin, positions, style, config=config)
    want = reference(OP, x.double(), cos.double(), sin.double(), positions, style)
    limits = numerics.tolerance(found.op_class, name(x.dtype))
    compared = numerics.compare(got, want)
    assert compared.within(limits), f"{backend} {style}: {compared} outside {limits}"
    assert got.dtype == x.dtype
    assert same_order(got, torch.empty_like(x))
    assert torch.equal(got[..., 2 * cos.shape[-1] :], x[..., 2 * cos.shape[-1] :])
    for tensor, kept in zip((x, cos, sin), before, strict=True):
        assert torch.equal(tensor, kept), "an argument was written to"
    if backend == "triton" and config is None:
        found.force("triton")
        # from the second call on a GPU skips Triton's look-up
        for _ in range(3 if x.is_cuda else 1):
            again = ops.rope(x, cos, sin, positions, style)
            assert same_order(again, got) and torch.equal(again.nan_to_num(7.0), got.nan_to_num(7.0))
        found.force(None)
    return got


def turned_by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, style: str) -> Tensor:
    """Every pair as one complex number, turned by another: no formula in common with the reference."""
    half = cos.shape[-1]
    y = x.double().clone()
    factors = torch.complex(cos.double(), sin.double())[rows]
    for i in range(half):
        a, b = (i, i + half) if style == "neox" else (2 * i, 2 * i + 1)
        pair = torch.complex(x[..., a].double(), x[..., b].double()) * factors[..., i, None]
        y[..., a], y[..., b] = pair.real, pair.imag
    return y


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(
    ("shape", "rotated"), SHAPES, ids=lambda value: shape_id(value) if type(value) is tuple else ""
)
def test_shapes(
    shape: tuple[int, ...], rotated: int, dtype: torch.dtype, backend: str, style: str, device: str
) -> None:
    x = random(shape, dtype, device)
    cos, sin = tables(shape[-3] + 2, rotated, torch.float32, device)
    assert_rotates(backend, x, cos, sin, None, style)


@pytest.mark.parametrize("style", STYLES)
def test_definition(style: str, device: str) -> None:
    x = random((2, 5, 3, 12), torch.float64, device)
    cos, sin = tables(9, 8, torch.float64, device)
    rows = torch.tensor([[4, 0, 8, 3, 3], [1, 7, 2, 6, 5]], device=device)
    torch.testing.assert_close(
        ops.rope(x, cos, sin, rows, style), turned_by_complex_numbers(x, cos, sin, rows, style), rtol=1e-13, atol=1e-13
    )
    first = torch.arange(5, device=device)
    torch.testing.assert_close(
        ops.rope(x, cos, sin, style=style),
        turned_by_complex_numbers(x, cos, sin, first, style),
        rtol=1e-13,
        atol=1e-13,
    )


def test_quarter_turn(device: str) -> None:
    # numbers anybody can check: a quarter turn takes (a, b) to (−b, a)
    x = torch.arange(1.0, 6.0, device=device).reshape(1, 1, 5)
    cos, sin = torch.zeros(1, 2, device=device), torch.ones(1, 2, device=device)
    for backend in BACKENDS:
        neox = run(OP, backend, x, cos, sin)
        gptj = run(OP, backend, x, cos, sin, None, "gptj")
        assert neox.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 5.0]
        assert gptj.flatten().tolist() == [-2.0, 1.0, -4.0, 3.0, 5.0]


# name -> x [2, 5, 3, 16] of that layout
X_LAYOUTS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "bhsd": lambda dtype, device: random((2, 3, 5, 16), dtype, device).transpose(1, 2),
    "packed-qkv": lambda dtype, device: random((2, 5, 9, 16), dtype, device)[:, :, 3:6],
    "bhsd-sliced": lambda dtype, device: random((2, 4, 7, 20), dtype, device)[:, 1:, 2:, 3:19].transpose(1, 2),
    "column-step": lambda dtype, device: random((2, 5, 3, 32), dtype, device)[..., ::2],
    "columns-first": lambda dtype, device: random((16, 2, 5, 3), dtype, device).permute(1, 2, 3, 0),
    "tokens-last": lambda dtype, device: random((2, 3, 16, 5), dtype, device).permute(0, 3, 1, 2),
    "sequence-first": lambda dtype, device: random((5, 2, 3, 16), dtype, device).transpose(0, 1),
    "expanded-heads": lambda dtype, device: random((2, 5, 1, 16), dtype, device).expand(2, 5, 3, 16),
    "expanded-batch": lambda dtype, device: random((1, 5, 3, 16), dtype, device).expand(2, 5, 3, 16),
    "reversed-dims": lambda dtype, device: random((16, 3, 5, 2), dtype, device).permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_layouts_of_x(layout: str, backend: str, style: str, device: str) -> None:
    x = X_LAYOUTS[layout](torch.float16, device)
    assert x.shape == (2, 5, 3, 16) and not x.is_contiguous()
    for rotated in (16, 10):
        cos, sin = tables(5, rotated, torch.float32, device)
        assert_rotates(backend, x, cos, sin, None, style)
        assert_rotates(backend, x, cos, sin, torch.tensor([[1], [3]], device=device).expand(2, 5), style)


def test_transposed_view_comes_back(device: str) -> None:
    x = random((2, 3, 5, 16), torch.float32, device)
    cos, sin = tables(5, 16, torch.float32, device)
    for backend in BACKENDS:
        y = run(OP, backend, x.transpose(1, 2), cos, sin).transpose(1, 2)
        assert y.is_contiguous() and y.shape == x.shape


# name -> (cos, sin) [6, 4] of that layout
TABLE_LAYOUTS: dict[str, Callable[[str], tuple[Tensor, ...]]] = {
    "halves-of-one-cache": lambda device: random((6, 8), torch.float32, device).chunk(2, dim=-1),
    "real-and-imaginary": lambda device: random((6, 4, 2), torch.float32, device).unbind(-1),
    "transposed": lambda device: tuple(t.t() for t in (random((4, 6), torch.float32, device, s) for s in (3, 4))),
    "every-second-row": lambda device: tuple(random((12, 4), torch.float32, device, s)[::2] for s in (3, 4)),
    "one-row-for-all": lambda device: tuple(random((1, 4), torch.float32, device, s).expand(6, 4) for s in (3, 4)),
    "bfloat16": lambda device: tables(6, 8, torch.bfloat16, device),
    "float16": lambda device: tables(6, 8, torch.float16, device),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("positioned", [False, True], ids=["in-order", "positions"])
@pytest.mark.parametrize("layout", TABLE_LAYOUTS)
def test_layouts_of_tables(layout: str, positioned: bool, style: str, device: str) -> None:
    cos, sin = TABLE_LAYOUTS[layout](device)
    x = random((2, 5, 3, 12), torch.float32, device)
    positions = torch.tensor([5, 0, 2, 2, 4], device=device) if positioned else None
    for backend in ("triton", "reference"):
        assert_rotates(backend, x, cos, sin, positions, style)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [(2, 5), (1, 5)], ids=shape_id)
def test_a_row_a_token(tokens: tuple[int, ...], backend: str, device: str) -> None:
    # transformers' tables: gathered by position, every angle twice, taken as a view
    x = random((2, 3, 5, 16), torch.float32, device).transpose(1, 2)
    both = [random((*tokens, 16), torch.float32, device, seed) for seed in (3, 4)]
    cos, sin = (table[..., :8] for table in both)
    assert cos.data_ptr() == both[0].data_ptr()
    got = assert_rotates(backend, x, cos, sin)
    for b in range(2):
        row = b if tokens[0] == 2 else 0
        want = turned_by_complex_numbers(x[b], cos[row], sin[row], torch.arange(5, device=device), "neox")
        torch.testing.assert_close(got[b].double(), want, rtol=1e-5, atol=1e-6)


def test_a_row_a_token_of_five_dimensions(device: str) -> None:
    x = random((2, 3, 5, 2, 8), torch.float32, device)
    cos, sin = (random((2, 1, 5, 4), torch.float32, device, seed) for seed in (3, 4))
    assert_rotates("triton", x, cos, sin)
    got = run(OP, "triton", x, cos[1], sin[1])
    torch.testing.assert_close(got[1], run(OP, "triton", x[1], cos[1], sin[1]), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5), (2, 1)], ids=shape_id)
def test_positions(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str) -> None:
    tokens = 1 if shape == (2, 1) else 5
    x = random((2, tokens, 3, 8), torch.float32, device)
    cos, sin = tables(11, 8, torch.float32, device)
    positions = (torch.arange(math.prod(shape), device=device).reshape(shape) * 7 % 11).to(dtype)
    got = assert_rotates(backend, x, cos, sin, positions)
    want = turned_by_complex_numbers(x, cos, sin, positions.long().expand(2, tokens), "neox")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # every second element of something longer
    strided = torch.stack((positions, positions + 1), dim=-1)[..., 0]
    assert torch.equal(assert_rotates(backend, x, cos, sin, strided), got)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name)
def test_positions_outside_the_table(dtype: torch.dtype, backend: str, style: str, device: str) -> None:
    # the rows around the table are numbers that would show
    big_cos, big_sin = tables(20, 8, torch.float32, device)
    cos, sin = big_cos[8:12], big_sin[8:12]
    outside = [-1, 4, 5, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    positions = torch.tensor([0, 3, *outside], dtype=dtype, device=device)
    x = random((7, 3, 10), torch.float32, device)
    got = run(OP, backend, x, cos, sin, positions, style)
    assert got[2:, :, :8].isnan().all()
    assert torch.equal(got[..., 8:], x[..., 8:])
    inside = reference(OP, x[:2], cos, sin, positions[:2], style)
    torch.testing.assert_close(got[:2], inside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_special_values(backend: str, style: str, device: str) -> None:
    x = random((4, 2, 8), torch.float32, device)
    x[0, 0, 0], x[1, 1, 2], x[2, 0, 7] = float("nan"), float("inf"), -float("inf")
    cos, sin = tables(4, 8, torch.float32, device)
    got = run(OP, backend, x, cos, sin, None, style)
    want = reference(OP, x.double(), cos.double(), sin.double(), None, style)
    assert numerics.compare(got, want).within(numerics.tolerance("row", "float32"))
    # a NaN stays in its pair
    assert int(got[0].isnan().sum()) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 8), (2, 0, 3, 8), (3, 0, 8), (0, 5, 2, 8)], ids=shape_id)
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = random(shape, torch.float32, device)
    cos, sin = tables(6, 8, torch.float32, device)
    assert run(OP, backend, x, cos, sin).shape == shape
    positions = torch.zeros(shape[:-2], dtype=torch.int64, device=device)
    assert run(OP, backend, x, cos, sin, positions).shape == shape


@pytest.mark.parametrize("config", [(1, 1), (1, 4), (4, 1), (4, 2), (8, 8)], ids=shape_id)
@pytest.mark.parametrize("style", STYLES)
def test_configurations(config: tuple[int, int], style: str, device: str) -> None:
    """Blocks that tokens and heads do not fill, several blocks of heads, and the same bits from all of them."""
    x = random((2, 7, 3, 24), torch.bfloat16, device)
    cos, sin = tables(9, 20, torch.float32, device)
    made = Config(BLOCK_T=config[0], BLOCK_H=config[1], num_warps=1)
    for positions in (None, torch.tensor([8, 1, 0, 3, 5, 2, 7], device=device)):
        got = assert_rotates("triton", x, cos, sin, positions, style, made)
        assert torch.equal(got, run(OP, "triton", x, cos, sin, positions, style))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_what_is_tried_by_tune(arch: str, device: str) -> None:
    """The default first, each once; a few of them by what they compute, which is the same bits."""
    known, study = ARCHS[arch], rope_op.study.kernel("triton")
    assert study.space is not None and study.launches is not None
    call = RopeCall(random((2, 7, 20, 24), torch.bfloat16, device), *tables(9, 20, torch.float32, device))
    want = rope_op.run("triton", call)
    configs = list(study.space(rope_op.key(call), known))
    assert len(configs) == len(set(configs)) > 8
    threads = [config["num_warps"] * known.wave_size for config in configs]
    assert max(threads) <= 1024 and len(set(threads)) > 2
    for config in configs[:: max(1, len(configs) // 6)]:
        assert torch.equal(rope_op.run("triton", call, config=config), want)
        (launch,) = study.launches(mapped(call, lambda tensor: tensor.to("meta")), config, known)
        assert launch.options()["BLOCK_H"] == config["BLOCK_H"] and launch.grid[0] >= 1
    assert study.launches(call._replace(x=call.x[:0]), configs[0], known) == []


def test_a_token_does_not_depend_on_the_batch_around_it(device: str) -> None:
    x = random((9, 3, 64), torch.bfloat16, device)
    cos, sin = tables(9, 64, torch.float32, device)
    positions = torch.arange(9, device=device)
    whole = run(OP, "triton", x, cos, sin, positions)
    for i in range(9):
        assert torch.equal(run(OP, "triton", x[i : i + 1], cos, sin, positions[i : i + 1]), whole[i : i + 1])


# with the odd step strides cannot be counted in units of 16
@pytest.mark.parametrize("step", [1 << 30, (1 << 30) + 1], ids=["even", "odd"])
@pytest.mark.parametrize("far", ["tokens", "heads", "columns"])
def test_elements_past_two_to_the_31(far: str, step: int, device: str) -> None:
    # of the storage only the pages that are used are ever made
    storage = torch.empty((1 << 31) + (1 << 12), dtype=torch.float16, device=device)
    strides = {"tokens": (step, 32, 1), "heads": (32, step, 1), "columns": (32, 5, step)}[far]
    shape = (3, 3, 3) if far == "columns" else (3, 3, 16)
    half = shape[-1] // 2
    x = storage.as_strided(shape, strides)
    x.copy_(random(shape, torch.float16, device))
    cos, sin = (storage[start:].as_strided((3, half), (step, 1)) for start in (1024, 2048))
    for table, seed in ((cos, 3), (sin, 4)):
        table.copy_(random((3, half), torch.float16, device, seed))
    for style in STYLES:
        assert_rotates("triton", x, cos, sin, None, style)
        assert_rotates("triton", x, cos, sin, torch.tensor([2, 1, 2], dtype=torch.int32, device=device), style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "half_a_unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "fp16"]
)
def test_rounded_once(dtype: torch.dtype, half_a_unit: float, backend: str, style: str, device: str) -> None:
    """With float32 tables the result alone is rounded to 16 bits: half a unit off, also where a − b is small."""
    x = random((6, 8, 64), dtype, device)
    cos, sin = tables(6, 64, torch.float32, device)
    got = run(OP, backend, x, cos, sin, None, style).double()
    want = reference(OP, x.double(), cos.double(), sin.double(), None, style)
    assert bool(((got - want).abs() <= half_a_unit * 1.001 * want.abs() + 2e-6).all())


def test_float64_stays_float64(device: str) -> None:
    x = random((5, 2, 8), torch.float64, device)
    cos, sin = tables(5, 8, torch.float64, device)
    want = turned_by_complex_numbers(x, cos, sin, torch.arange(5, device=device), "neox")
    torch.testing.assert_close(ops.rope(x, cos, sin), want, rtol=1e-13, atol=1e-13)
    registry.get(OP).force("triton")
    assert "not float64" in rope_op.decide(RopeCall(x, cos, sin)).refused[0].reason
    assert "tables" in rope_op.decide(RopeCall(x.float(), cos, sin)).refused[0].reason


def test_what_the_kernel_refuses(device: str) -> None:
    x = random((2, 3, 2, 3, 2, 8), torch.float32, device).permute(3, 2, 1, 0, 4, 5)
    cos, sin = tables(9, 8, torch.float32, device)
    with pytest.raises(Unsupported, match="leading dimensions"):
        run(OP, "triton", x, cos, sin)
    with pytest.raises(Unsupported, match="same strides"):
        run(OP, "triton", x[0], cos, sin.t().contiguous().t())
    torch.testing.assert_close(
        ops.rope(x[0], cos, sin.t().contiguous().t()), reference(OP, x[0], cos, sin), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_no_copy(layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X_LAYOUTS[layout](torch.float32, device)
    cos, sin = random((5, 16), torch.float32, device).chunk(2, dim=-1)
    positions = torch.zeros((2, 10), dtype=torch.int64, device=device)[:, ::2]
    assert_never_copies(OP, monkeypatch, x, cos, sin, None, "neox")
    assert_never_copies(OP, monkeypatch, x, cos, sin, positions, "gptj")


def _launch(tokens: int, heads: int, sequences: int = 1, columns: int = 64) -> Any:
    x = torch.empty(sequences, tokens, heads, columns, dtype=torch.bfloat16, device="meta")
    table = torch.empty(4096, columns // 2, device="meta")
    config = Config(BLOCK_T=2, BLOCK_H=16, num_warps=1)
    launches: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wavecrest.ops.common.launcher.starter", lambda launch, _device: launches.append(launch))
        bind(RopeCall(x, table, table), config)
    return launches[0]


def test_specialised_arguments() -> None:
    """Triton compiles anew for column strides (1 or not) alone."""
    pytest.importorskip("triton", reason="asks Triton about a kernel's arguments")
    from wavecrest.ops._rope.kernel import _rope_kernel

    pointers = ["x_ptr", "y_ptr", "cos_ptr", "sin_ptr", "positions_ptr"]
    assert specialised(_rope_kernel) == [*pointers, "stride_xd", "stride_yd", "stride_cd"]


def test_sizes_do_not_compile_anew() -> None:
    """Tokens and heads are not among the constants; what is, changes at its bucket border only."""
    base = _launch(64, 16)
    for other in (_launch(1000, 16), _launch(64, 32), _launch(3, 48)):
        assert other.constants == base.constants
    assert _launch(64, 15).constants == base.constants | {"EVEN_H": False}
    assert _launch(64, 16, sequences=2).constants == base.constants | {"LEADING": 3}
    wider = _launch(64, 16, columns=96).constants
    assert wider == base.constants | {"EVEN_R": False, "BLOCK_R": 64}


_TENSOR = torch.ones(2, 5, 3, 8)
_TABLE = torch.ones(6, 4)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, _TABLE, _TABLE), "takes a tensor", id="number"),
        pytest.param((_TENSOR.int(), _TABLE, _TABLE), "floating-point", id="integers"),
        pytest.param((torch.ones(5, 8), _TABLE, _TABLE), r"\[..., tokens, heads, head_dim\]", id="no-heads"),
        pytest.param((_TENSOR, "cos", _TABLE), "cos must be", id="cos-text"),
        pytest.param((_TENSOR, torch.ones(4), torch.ones(4)), "cos must be", id="cos-vector"),
        pytest.param((_TENSOR, _TABLE.int(), _TABLE.int()), "cos must be", id="cos-integers"),
        pytest.param((_TENSOR, _TABLE, _TABLE[:5]), "sin must be", id="sin-shape"),
        pytest.param((_TENSOR, _TABLE, _TABLE.half()), "sin must be", id="sin-dtype"),
        pytest.param((_TENSOR, _TABLE.to("meta"), _TABLE.to("meta")), "cos and sin are on meta", id="tables-elsewhere"),
        pytest.param((_TENSOR, torch.ones(6, 8), torch.ones(6, 8)), "R // 2", id="every-angle-twice"),
        pytest.param((_TENSOR, torch.ones(6, 0), torch.ones(6, 0)), "0 columns of cos", id="no-angles"),
        pytest.param((_TENSOR, _TABLE[:4], _TABLE[:4]), "5 tokens a sequence, cos and sin 4", id="too-few-rows"),
        pytest.param((_TENSOR, torch.ones(3, 5, 4), torch.ones(3, 5, 4)), "a row a token", id="rows-of-others"),
        pytest.param((_TENSOR, torch.ones(2, 1, 4), torch.ones(2, 1, 4)), "a row a token", id="one-row"),
        pytest.param((_TENSOR, torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4)), "a row a token", id="too-many-dims"),
        pytest.param((_TENSOR, _TABLE, _TABLE, [0, 1, 2, 3, 4]), "positions must be an int32", id="positions-list"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.ones(5)), "positions must be an int32", id="positions-float"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.arange(4)), "must be \\[2, 5\\]", id="positions-short"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.zeros(2, 1).long()), "must be \\[2, 5\\]", id="positions-one"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.zeros(3, 5).long()), "must be \\[2, 5\\]", id="positions-batch"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.tensor(1)), "must be \\[2, 5\\]", id="positions-scalar"),
        pytest.param((_TENSOR, _TABLE, _TABLE, torch.arange(5, device="meta")), "positions are on", id="elsewhere"),
        pytest.param(
            (_TENSOR, torch.ones(2, 5, 4), torch.ones(2, 5, 4), torch.arange(5)), "choose rows", id="rows-and-positions"
        ),
        pytest.param((_TENSOR, _TABLE[:0], _TABLE[:0], torch.arange(5)), "choose rows", id="empty-table"),
        pytest.param((_TENSOR, _TABLE, _TABLE, None, "llama"), "neox or gptj", id="style"),
        pytest.param((_TENSOR, _TABLE, _TABLE, None, ["neox"]), "neox or gptj", id="style-list"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.rope(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)


def test_key_has_all_the_choice_depends_on() -> None:
    calls = [
        RopeCall(_TENSOR, _TABLE, _TABLE),
        RopeCall(_TENSOR[:1], _TABLE, _TABLE),
        RopeCall(_TENSOR[:, :, :2], _TABLE, _TABLE),
        RopeCall(_TENSOR[..., :8].half(), _TABLE, _TABLE),
        RopeCall(torch.ones(2, 5, 3, 10), _TABLE, _TABLE),
        RopeCall(_TENSOR, _TABLE[:, :2], _TABLE[:, :2]),
        RopeCall(_TENSOR, _TABLE.half(), _TABLE.half()),
        RopeCall(_TENSOR, _TABLE, _TABLE, torch.arange(5)),
        RopeCall(_TENSOR, _TABLE, _TABLE, torch.arange(5, dtype=torch.int32)),
        RopeCall(_TENSOR, _TABLE, _TABLE, None, "gptj"),
        RopeCall(_TENSOR, _TABLE, _TABLE.t().contiguous().t()),
        RopeCall(_TENSOR, _TABLE, _TABLE.clone().requires_grad_()),
    ]
    keys = [rope_op.key(call) for call in calls]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == len(rope_op.key_fields) for key in keys)


def test_cost() -> None:

    def cost(*args: Any) -> Cost:
        return rope_op.study.cost(RopeCall(*args))

    x = torch.empty(2, 5, 3, 8, dtype=torch.bfloat16)
    moved = 2 * x.nbytes
    assert cost(x, _TABLE, _TABLE).bytes == moved + 2 * 5 * 4 * 4
    assert cost(x, torch.ones(2, 5, 4), torch.ones(2, 5, 4)).bytes == moved + 2 * 10 * 4 * 4
    assert cost(x, _TABLE, _TABLE, torch.zeros(2, 5, dtype=torch.int32)).bytes == moved + 2 * 6 * 4 * 4 + 40
    assert cost(x, _TABLE, _TABLE, torch.arange(5)).bytes == moved + 2 * 5 * 4 * 4 + 40
    # four products and two sums a pair
    assert cost(x, _TABLE, _TABLE).flops == 6 * 30 * 4


def test_bench_cases_are_calls(device: str) -> None:
    bench_cases = rope_op.study.bench_cases
    assert bench_cases is not None
    made = bench_cases("quick", device)
    assert len(made) == 3
    for case in made.values():
        call = case()
        assert numerics.compare(rope_op(call), rope_op.reference(call)).within(numerics.tolerance("row", "bfloat16"))
    assert len(bench_cases("shared", device)) >= 8


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bound_call_is_short(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, positions = random((2, 5, 3, 8), torch.float32, device), torch.arange(5, device=device)
    assert_few_calls(OP, backend, monkeypatch, x, *tables(5, 8, torch.float32, device))
    assert_few_calls(OP, backend, monkeypatch, x.transpose(0, 1), *tables(5, 8, torch.float32, device), positions[:2])


def test_gradients(device: str) -> None:
    x = random((3, 2, 12), torch.float32, device)
    cos, sin = tables(3, 8, torch.float32, device)
    assert_grad_falls_back(OP, x, cos, sin, None, "neox")
    assert_grad_falls_back(OP, x, cos, sin, None, "gptj")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 256)


@pytest.mark.parametrize("style", STYLES)
def test_compile_with_positions_and_a_transposed_view(style: str, device: str) -> None:
    torch._dynamo.reset()
    x = random((2, 3, 5, 16), torch.float32, device)
    cos, sin = tables(9, 16, torch.float32, device)
    positions = torch.tensor([[8, 1, 2, 0, 4]], device=device)

    def call(x: Tensor) -> Tensor:
        return ops.rope(x.transpose(1, 2), cos, sin, positions, style).transpose(1, 2)

    backend = "inductor" if device == "cuda" else "eager"
    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(got, call(x), rtol=1e-5, atol=1e-5)
    assert got.is_contiguous()


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))
    tokens = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    heads, half = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    columns = 2 * half + draw(st.integers(0, 9))
    return {
        "shape": (*tokens, heads, columns),
        "half": half,
        "order": draw(st.permutations(range(dims + 2))),
        "steps": tuple(draw(st.integers(1, 2)) for _ in range(dims + 2)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "table": draw(st.sampled_from(DTYPES)),
        "style": draw(st.sampled_from(STYLES)),
        "rows": draw(st.sampled_from(("table", "positions", "own"))),
        "broadcast": tuple(draw(st.booleans()) for _ in range(dims - 1)),
        "config": (draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_any_call(call: dict[str, Any]) -> None:
    """Any shape, order of dimensions, gaps between elements, dtype, table and configuration."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, half, seed = call["shape"], call["half"], call["seed"]
    # a tensor with its dimensions in another order of memory, and every n-th element of a larger one
    order, steps = call["order"], call["steps"]
    stored = random(tuple(shape[i] * steps[i] for i in order), call["dtype"], device, seed)
    x = stored.permute([order.index(i) for i in range(len(shape))])
    x = x[tuple(slice(None, None, step) for step in steps)]
    assert x.shape == shape
    tokens = shape[:-2]
    # leading sizes of 1 where what is looked up is shared
    own = (*(1 if shared else size for size, shared in zip(tokens[:-1], call["broadcast"], strict=True)), tokens[-1])
    positions = None
    if call["rows"] == "own":
        cos, sin = (random((*own, half), call["table"], device, seed + i) for i in (1, 2))
    else:
        cos, sin = (random((tokens[-1] + 3, half), call["table"], device, seed + i) for i in (1, 2))
    if call["rows"] == "positions":
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, tokens[-1] + 3, own, generator=generator).to(device)
    config = Config(BLOCK_T=call["config"][0], BLOCK_H=call["config"][1], num_warps=1)
    assert_rotates("triton", x, cos, sin, positions, call["style"], config)
