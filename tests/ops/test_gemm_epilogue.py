"""The epilogue of a GEMM: scales, bias, activation, residual, rounding; and values that are not finite."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_harness import (
    ACTIVATIONS,
    BACKENDS,
    BF16,
    CLASSES,
    E4M3,
    E5M2,
    F16,
    F32,
    FINISHERS,
    GATED,
    I8,
    INF,
    NAN,
    SPECIAL_RUNS,
    SPLIT,
    Watch,
    assert_right,
    fitted,
    multiply,
    product,
    random,
    refuses,
    residual_of,
    scale_of_a,
    scale_of_b,
    scaled,
    scales,
    stream,
    takes,
    tile,
    watched,
    wide,
)
from tests.ops.op_harness import LARGEST, name, same_bits, shape_id
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- scales


SCALE_KINDS = ("none", "tensor", "vector", "block")


@pytest.mark.parametrize("dtype", [I8, E4M3], ids=name)
@pytest.mark.parametrize("b_kind", SCALE_KINDS)
@pytest.mark.parametrize("a_kind", SCALE_KINDS)
def test_scales(a_kind: str, b_kind: str, dtype: torch.dtype, watch: Watch, device: str) -> None:
    turn = SCALE_KINDS.index(a_kind) + SCALE_KINDS.index(b_kind) + (dtype == I8)
    # shapes that mean the same, by turns
    a_shape = {"tensor": "one", "vector": "column"}.get(a_kind, a_kind) if turn % 2 else a_kind
    b_shape = {"tensor": "one", "vector": "row"}.get(b_kind, b_kind) if turn // 2 % 2 else b_kind

    def made(M: int, N: int, K: int) -> GemmCall:
        return product(
            M, N, K, dtype, device=device, out_dtype=F32, scale_a=scale_of_a(a_shape, M, K, dtype, device),
            scale_b=scale_of_b(b_shape, N, K, dtype, device),
        )  # fmt: skip

    call = made(5, 130, 140)
    runs: list[tuple[str, Config | None]] = [
        ("triton", tile(16, 64, 64)),
        ("triton", tile(16, 128, 32, **SPLIT)),
        ("triton_stream_k", stream(16, 128, 64)),
        ("triton_gemv", multiply(64, 128, split=1 + turn % 2)),
    ]
    for backend, config in runs:
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
    assert_right("reference", call)
    # sizes that PyTorch's products of 8 bits have on a GPU too
    larger = made(24, 144, 144)
    if dtype == I8:
        taken = "block" not in (a_kind, b_kind)
    else:
        taken = device == "cuda" and a_kind == b_kind != "block"
    assert (refuses("torch", larger) is None) == taken
    if taken:
        assert_right("torch", larger)
    if taken and dtype == I8 and takes("torch", call):
        assert_right("torch", call)


def test_scales_have_strides_of_their_own(watch: Watch, device: str) -> None:
    call = product(19, 40, 300, E4M3, device=device, out_dtype=F32)
    every = scales(38, 6, device=device)
    columns = scales(40, 3, device=device, size=0.1)
    for scale_a, scale_b in (
        (every[::2, ::2], columns.new_full((3, 1), 0.3)),
        (every[:19, 1], columns[:, 1]),
        (every[:19, :1].expand(19, 3), columns.t()[1:2]),
        (every[0, 0].expand(19), columns[0, 0].expand(1, 40)),
    ):
        given_too = call._replace(scale_a=scale_a, scale_b=scale_b)
        assert_right("triton", given_too, tile(16, 32, 128), watch)
        assert_right("triton_stream_k", given_too, stream(16, 64, 128), watch)
        assert_right("reference", given_too)


def test_scales_of_the_rows_of_many_dimensions(watch: Watch, device: str) -> None:
    a = random(2, 3, 4, 40, dtype=I8, device=device)
    call = GemmCall(a, random(40, 24, dtype=I8, device=device), scale_a=scales(24, device=device, size=0.01))
    for backend in ("triton", "torch", "reference"):
        assert_right(backend, call, None, watch)
    one = GemmCall(a[0, 0, 0], call.b, scale_b=scales(24, device=device, size=0.01))
    for backend in ("triton", "torch", "reference"):
        if takes(backend, one):
            assert_right(backend, one, None, watch)


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 20)], ids=shape_id)
def test_scales_of_two_dimensions_add_none_to_a_vector(shape: tuple[int, int], backend: str, device: str) -> None:
    a, b = random(40, dtype=I8, device=device), random(40, 20, dtype=I8, device=device)
    call = GemmCall(a, b, scale_b=scales(*shape, device=device, size=0.01))
    if not takes(backend, call):
        pytest.skip(str(refuses(backend, call)))
    assert_right(backend, call)


# --- what is done to the sums


def _epilogues() -> list[tuple[str, str | None, str, str]]:
    residuals = ("none", "strided", "transposed", "expanded")
    made = []
    for turn, (kind, activation, bias) in enumerate(itertools.product(CLASSES, ACTIVATIONS, ("none", "n", "m"))):
        made += [(kind, activation, bias, "none"), (kind, activation, bias, residuals[1 + turn % 3])]
    return made


@pytest.mark.parametrize(("kind", "activation", "bias", "residual"), _epilogues())
def test_epilogues(kind: str, activation: str | None, bias: str, residual: str, watch: Watch, device: str) -> None:
    M, N, K = 6, 18, 40
    turn = _epilogues().index((kind, activation, bias, residual))
    options = dict(CLASSES[kind])
    call = product(M, N, K, options.pop("a"), device=device, **options)
    call = scaled(call) if kind in ("int8", "e4m3") else call
    length, other = (N, F32) if bias == "n" else (M, F16)
    call = call._replace(
        activation=activation,
        bias=None if bias == "none" else random(2 * length, dtype=other, device=device, seed=6)[::2],
        bias_along="m" if bias == "m" else "n",
        residual=residual_of(residual, M, N, device),
        alpha=(1.0, -0.6)[turn % 2],
        slope=(0.01, 0.3)[turn % 2],
    )
    assert_right("triton", call, tile(16, 32, 64), watch)
    for backend, config in FINISHERS if device == "cuda" else (FINISHERS[turn % 5],):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
    for other_backend in ("torch", "reference"):
        if refuses(other_backend, call) is None:
            assert_right(other_backend, call)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (2, 1, 3, 40)], ids=shape_id)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_bias_along_the_rows_of_many_dimensions(kind: str, shape: tuple[int, ...], watch: Watch, device: str) -> None:
    a, b = (
        random(*shape, dtype=CLASSES[kind]["a"], device=device),
        random(20, 40, dtype=CLASSES[kind]["a"], device=device),
    )
    rows = a.numel() // 40
    call = GemmCall(a, b.mT, 100 * random(rows, dtype=F32, device=device), bias_along="m", out_dtype=BF16, alpha=0.5)
    call = call._replace(residual=random(*shape[:-1], 20, dtype=F32, device=device))
    for backend, config in (*SPECIAL_RUNS[:2], *FINISHERS[1:3], ("torch", None), ("reference", None)):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("activation", GATED)
def test_gated(activation: str, kind: str, watch: Watch, device: str) -> None:
    # halves that tiles of columns do not fill, and the second half begins inside what a tile would have read
    options = dict(CLASSES[kind])
    call = product(6, 2 * 21, 70, options.pop("a"), device=device, activation=activation, **options)
    if kind in ("int8", "e4m3"):
        call = call._replace(
            scale_a=scales(6, device=device, size=wide(0.1, call.a.dtype)),
            scale_b=scales(42, device=device, size=wide(0.1, call.b.dtype)),
        )
    bias = random(42, dtype=F32, device=device, seed=6)
    calls = (call, call._replace(bias=bias, alpha=0.5, residual=residual_of("strided", 6, 21, device)))
    assert "gated" in str(refuses("triton_stream_k", call))
    for each in calls:
        runs = [
            ("triton", tile(16, 16, 64)),
            ("triton", tile(16, 32, 32, SPLIT_K=2)),
            ("triton_gemv", multiply(16, 64, split=2)),
        ]
        for backend, config in (*runs, ("torch", None), ("reference", None)):
            if refuses(backend, each) is None:
                assert_right(backend, each, config, watch)


def test_gated_with_scales_of_blocks(watch: Watch, device: str) -> None:
    call = product(3, 2 * 140, 130, E4M3, device=device, activation="silu_and_mul", out_dtype=F32)
    call = call._replace(
        scale_a=scale_of_a("block", 3, 130, E4M3, device), scale_b=scale_of_b("block", 280, 130, E4M3, device)
    )
    for config in (tile(16, 64, 128), tile(16, 128, 64, **SPLIT)):
        assert_right("triton", call, config, watch)
    assert_right("reference", call)


def test_activations_of_numbers_anybody_can_check(device: str) -> None:
    x = torch.tensor([[-2.0, 0.0, 3.0, -1.0, 0.5, 2.0]], device=device)
    one = torch.eye(6, device=device)
    known = {
        "relu": [0.0, 0.0, 3.0, 0.0, 0.5, 2.0],
        "leaky_relu": [-0.5, 0.0, 3.0, -0.25, 0.5, 2.0],
        "silu": [-0.23840584, 0.0, 2.85772238, -0.26894142, 0.31122967, 1.76159416],
        "gelu": [-0.04550026, 0.0, 2.99595031, -0.15865525, 0.34573123, 1.95449974],
        "gelu_tanh": [-0.04540231, 0.0, 2.99636261, -0.15880801, 0.34571401, 1.95459769],
        # silu of the first half, times the second
        "silu_and_mul": [-0.23840584 * -1.0, 0.0, 2.85772238 * 2.0],
    }
    for activation, values in known.items():
        for backend in ("triton", "triton_gemv", "torch", "reference"):
            got = gemm.run(backend, GemmCall(x, one.mT, activation=activation, slope=0.25))
            torch.testing.assert_close(got.flatten().cpu(), torch.tensor(values), rtol=2e-6, atol=2e-7)


def test_the_residual_comes_after_the_activation_and_alpha_before_the_bias(device: str) -> None:
    a = torch.ones(1, 1, device=device)
    for backend in BACKENDS:
        got = gemm.run(
            backend,
            GemmCall(3 * a, 2 * a, -10 * torch.ones(1, device=device), residual=-5 * a, activation="relu", alpha=4.0),
        )
        # relu(4 · 6 − 10) − 5
        assert float(got) == 9.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [I8, E4M3, E5M2], ids=name)
def test_rounding_to_8_bits_saturates(dtype: torch.dtype, backend: str, device: str) -> None:
    largest = LARGEST[dtype]
    values = [largest * 1.5, -largest * 1.5, largest, -largest, 1e30, -1e30, INF, -INF, NAN, 1.0, -1.0, 0.0]
    a = torch.ones(1, 1, device=device)
    b = torch.tensor([values], device=device)
    call = GemmCall(a, b.as_strided((1, 12), (1, 1)), out_dtype=dtype, out_scale=torch.tensor(1.0, device=device))
    got = gemm.run(backend, call).float().flatten().tolist()
    assert got[:8] == [largest, -largest] * 4
    assert got[8] == 0.0 if dtype == I8 else got[8] != got[8]
    assert got[9:] == [1.0, -1.0, 0.0]
    # what is divided is the whole result
    half = call._replace(
        out_scale=torch.tensor([[0.5]], device=device), residual=torch.full((1, 12), 2.0, device=device)
    )
    assert gemm.run(backend, half).float().flatten().tolist()[9:] == [6.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [I8, E4M3, E5M2], ids=name)
def test_8_bit_results_are_the_nearest(dtype: torch.dtype, watch: Watch, device: str) -> None:
    call = product(
        6, 40, 70, F32, device=device, out_dtype=dtype, bias=random(40, dtype=F32, device=device), activation="gelu"
    )
    # most values in range, some beyond it
    call = call._replace(out_scale=torch.tensor([12.0 / LARGEST[dtype]], device=device))
    runs = (
        ("triton", tile()),
        ("triton", tile(**SPLIT)),
        ("triton_stream_k", stream()),
        ("triton_gemv", multiply()),
    )
    for backend, config in (*runs, ("torch", None), ("reference", None)):
        assert_right(backend, call, config, watch)


# --- what is not finite


def gelu_keeps_infinity(device: str) -> bool:
    """Whether PyTorch's own GELU of ∞ is ∞: NaN on some Intel CPUs (torch 2.13, 2026-11-26)."""
    return not bool(torch.nn.functional.gelu(torch.full((64,), INF, device=device)).isnan().any())


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_stay_in_their_row_and_column(
    value: float, activation: str | None, watch: Watch, device: str
) -> None:
    if value == -INF and activation in ("silu", "gelu", "gelu_tanh"):
        pytest.skip("−∞ · 0: the definition has NaN there, PyTorch's activations a value")
    call = product(6, 20, 45, F16, device=device, activation=activation, bias=random(20, dtype=F16, device=device))
    a, b = call.a.clone(), call.b.clone()
    # the last element of K, at the edge of a mask; inf · 0 in a column of zeros; another column with one of its own
    a[4, 44], b[3, 13] = value, value
    b[:, 7] = 0.0
    for backend, config in SPECIAL_RUNS:
        if (
            backend == "torch"
            and value == INF
            and activation in ("gelu", "gelu_tanh")
            and not gelu_keeps_infinity(device)
        ):
            continue
        got = assert_right(backend, call._replace(a=a, b=b), config, watch)
        others = [[i for i in range(size) if i != at] for size, at in zip(got.shape, (4, 13), strict=True)]
        assert bool(got[others[0]][:, others[1]].isfinite().all())
        # relu(−∞) is 0
        if value != -INF or activation is None:
            assert not bool(got[4].isfinite().all()) and not bool(got[:, 13].isfinite().all())
            assert bool(got[4, 7].isnan())


@pytest.mark.parametrize("place", ["bias", "residual", "scale_a", "scale_b", "out_scale"])
def test_special_values_of_what_is_around(place: str, watch: Watch, device: str) -> None:
    call = product(6, 20, 40, E5M2, device=device, out_dtype=F32)
    call = call._replace(
        bias=random(20, dtype=F32, device=device), residual=random(6, 20, dtype=F32, device=device, seed=3),
        scale_a=scales(6, device=device), scale_b=scales(20, device=device),
    )  # fmt: skip
    if place == "out_scale":
        call = call._replace(out_dtype=E4M3, out_scale=torch.tensor(NAN, device=device))
    else:
        values = getattr(call, place).clone()
        values[2] = NAN
        call = call._replace(**{place: values})
    for backend, config in SPECIAL_RUNS:
        if refuses(backend, call) is None:
            got = assert_right(backend, call, config, watch)
            assert int(got.float().isnan().sum()) == {"bias": 6, "scale_b": 6, "out_scale": 120}.get(place, 20)


def test_what_lies_beside_the_operands_has_no_part(watch: Watch, device: str) -> None:
    # NaN around a, b, bias, residual and scales: whatever is read past an edge shows
    def framed(values: Tensor) -> Tensor:
        shape = tuple(size + 6 for size in values.shape)
        around = torch.full(shape, NAN, device=device).to(values.dtype)
        if values.dtype == I8:
            around = torch.full(shape, 127, dtype=I8, device=device)
        inside = around[tuple(slice(3, size + 3) for size in values.shape)]
        return inside.copy_(values)

    call = product(6, 18, 70, F16, device=device, bias=random(18, dtype=F32, device=device), activation="relu")
    call = call._replace(residual=random(6, 18, dtype=F32, device=device))
    eight = product(6, 18, 70, I8, device=device, out_dtype=F32)
    eight = eight._replace(scale_a=scales(6, 1, device=device), scale_b=scales(18, device=device))
    for given_too in (call, eight):
        parts = {key: framed(value) for key, value in given_too._asdict().items() if isinstance(value, Tensor)}
        inner = given_too._replace(**(parts | {"b": framed(given_too.b.mT).mT}))
        for backend, config in SPECIAL_RUNS:
            if refuses(backend, inner) is None:
                got = assert_right(backend, inner, config, watch)
                around = gemm.run(backend, given_too, config=fitted(config, given_too))
                assert same_bits(got, around) or backend == "torch"
