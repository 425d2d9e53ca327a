"""The product on every backend against an oracle in float64: no element beyond the bound."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.gemm_harness import (
    ACTIVATIONS,
    BACKENDS,
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    FNUZ,
    GATED,
    I8,
    I32,
    KERNELS,
    NAN,
    SPLIT,
    TYPES,
    Watch,
    assert_result,
    assert_right,
    configs,
    machine,
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
from tests.ops.op_harness import name, shape_id
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import Unsupported
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- types


# type -> backends that do not have it, with a word of their reason
DECLINED = {
    "fp64": dict.fromkeys(KERNELS, "not float64"),
    **{key: {"triton_gemv": "no int8 a"} for key in TYPES if key.startswith("int8")},
    **{key: {"torch": "stored in fewer bits"} for key in TYPES if "weight" in key},
    "bf16-fp32": {"torch": "rounds the result"},
}


def _declined(kind: str, backend: str, device: str, odd: bool) -> str | None:
    """A word of the reason why a backend does not take a type; None: it takes it. `odd`: sizes of no whole units."""
    if backend == "torch" and kind.startswith("e"):
        if device == "cpu":
            return "on a GPU"
        return "multiples of 16" if odd else {"e5m2": "float8_e5m2 by float8_e5m2"}.get(kind)
    if backend == "torch" and kind.startswith("int8") and device == "cuda" and odd:
        return "multiples of 8"
    return DECLINED.get(kind, {}).get(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str, backend: str, watch: Watch, device: str) -> None:
    # the second is for PyTorch's products of 8 bits on a GPU
    for n, k in ((37, 75), (48, 80)) if backend == "torch" else ((37, 75),):
        call = TYPES[kind](7 if backend == "triton_gemv" else 19, device, n, k)
        word = _declined(kind, backend, device, n % 16 != 0)
        if word is not None:
            assert word in str(refuses(backend, call))
            with pytest.raises(Unsupported, match="refuses"):
                gemm.run(backend, call)
            continue
        for config in configs(backend):
            assert_right(backend, call, config, watch)


@pytest.mark.parametrize("dtype", FNUZ, ids=name)
def test_types_that_the_interpreter_does_not_have(dtype: torch.dtype, device: str) -> None:
    for call in (
        scaled(product(5, 18, 40, dtype, device=device)),
        product(5, 18, 40, BF16, dtype, device=device),
        product(5, 18, 40, device=device, out_dtype=dtype, out_scale=torch.tensor(0.05, device=device)),
    ):
        for backend in KERNELS:
            assert f"has no {name(dtype)}" in str(refuses(backend, call))
        assert_right("reference", call)


def test_integers_are_exact_where_floats_are_not(watch: Watch, device: str) -> None:
    # sums past 2^24, which float32 rounds, and a last product that it would lose
    a = torch.full((17, 2056), 127, dtype=I8, device=device)
    b = torch.full((24, 2056), 127, dtype=I8, device=device).mT
    a[1, -1], b[-1, 3] = 126, -127
    call = GemmCall(a, b)
    for backend, config in (
        ("triton", tile(k=256)),
        ("triton", tile(k=256, **SPLIT)),
        ("triton_stream_k", stream(k=512)),
    ):
        got = assert_right(backend, call, config, watch)
        assert int(got[1, 0]) == 2056 * 127 * 127 - 127
    assert_right("torch", call)
    assert_right("reference", call)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name)
def test_each_byte_of_a_weight_is_the_number_that_it_is(dtype: torch.dtype, watch: Watch, device: str) -> None:
    """Which kernels on NVIDIA put together from bits: each number at some places, and zeros around it."""
    numbers = torch.arange(-128, 128, device=device)
    for place in (0, 1, 2, 3, 21, 63):
        b = torch.zeros(256, 64, dtype=I8, device=device)
        b[:, place] = numbers.to(I8)
        call = GemmCall(torch.ones(2, 64, dtype=dtype, device=device), b.mT, out_dtype=F32)
        for backend, config in (("triton", tile(k=64)), ("triton_gemv", multiply(k=64))):
            got = assert_right(backend, call, config, watch)
            assert torch.equal(got, numbers.float().expand(2, 256))


def test_sums_of_16_bit_products_are_float32(watch: Watch, device: str) -> None:
    # 1 is less than half a unit of what is there already, in 16 bits
    a = torch.ones(2, 513, dtype=BF16, device=device)
    a[:, 0] = 4096.0
    call = GemmCall(a, torch.ones(16, 513, dtype=BF16, device=device).mT, out_dtype=F32)
    for backend in KERNELS:
        for config in configs(backend):
            got = assert_right(backend, call, config, watch)
            assert set(got.flatten().tolist()) == {4608.0}


# --- sizes


SIZES = (0, 1, 2, 13, 15, 16, 17, 31, 32, 33, 61, 64, 65, 127)


def _some_sizes() -> list[tuple[int, int, int]]:
    """Each size in each place, and pairs of the degenerate ones."""
    count = len(SIZES)
    spread_out = [
        (SIZES[i], SIZES[(5 * i + j) % count], SIZES[(3 * i + 7 * j) % count]) for i in range(count) for j in (1, 4)
    ]
    few = list(itertools.product((0, 1, 17), repeat=3))
    # that PyTorch multiplies int8 of on a GPU: more than 16 rows, whole units of 8
    units = [(17, 16, 32), (65, 32, 64), (127, 64, 16)]
    return list(dict.fromkeys(spread_out + few + units))


@pytest.mark.parametrize("shape", _some_sizes(), ids=shape_id)
def test_sizes(shape: tuple[int, int, int], watch: Watch, device: str) -> None:
    M, N, K = shape
    for call in (
        product(M, N, K, BF16, device=device),
        product(
            M, N, K, F32, device=device, bias=random(N, dtype=F32, device=device), activation="silu",
            residual=random(M, N, dtype=F32, device=device, seed=4),
        ),
    ):  # fmt: skip
        for backend in ("triton", "torch", "reference"):
            assert_right(backend, call, None, watch)
    integers = product(M, N, K, I8, device=device)._replace(
        scale_a=scales(M, device=device), scale_b=scales(1, N, device=device)
    )
    assert_right("reference", integers)
    if takes("torch", integers):
        assert_right("torch", integers)
    if K == 0:
        assert "K is 0" in str(refuses("triton_stream_k", call))
    else:
        assert_right("triton_stream_k", call, stream(64, 64, 32), watch)
    if M <= 8:
        assert_right("triton_gemv", call, multiply(64, 64), watch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_sum_leaves_bias_and_residual(backend: str, device: str) -> None:
    bias, residual = random(6, dtype=F32, device=device), random(3, 6, dtype=F32, device=device)
    call = product(3, 6, 0, F32, device=device, bias=bias, residual=residual, activation="relu")
    if backend == "triton_stream_k":
        assert "K is 0" in str(refuses(backend, call))
        return
    got = gemm.run(backend, call)
    torch.testing.assert_close(got, bias.clamp(min=0) + residual, rtol=0, atol=1e-6)
    gated = call._replace(activation="silu_and_mul", residual=None)
    torch.testing.assert_close(gemm.run(backend, gated), (torch.nn.functional.silu(bias[:3]) * bias[3:]).expand(3, 3))
    for empty in (product(0, 6, 5, device=device), product(3, 0, 5, device=device)):
        assert gemm.run(backend, empty).shape == (empty.a.shape[0], empty.b.shape[1])


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 0, 7), (7, 5)),
        ((0, 3, 7), (7, 5)),
        ((2, 3, 0), (0, 5)),
        ((0,), (0, 5)),
        ((0, 4, 7), (0, 7, 5)),
        ((4, 7), (0, 7, 5)),
        ((3, 0, 7), (3, 7, 5)),
        ((3, 4, 0), (3, 0, 5)),
    ],
    ids=lambda shapes: "-".join(map(shape_id, shapes)),
)
def test_empty_of_other_ranks(shapes: tuple[tuple[int, ...], tuple[int, ...]], backend: str, device: str) -> None:
    call = GemmCall(random(*shapes[0], dtype=F32, device=device), random(*shapes[1], dtype=F32, device=device))
    assert_right(backend, call)
    assert_right(backend, call._replace(bias=random(5, dtype=F32, device=device), activation="gelu"))


# --- bound calls


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned-first", "misaligned-first"])
def test_addresses_of_one_signature_may_differ_in_alignment(first: int, backend: str, device: str) -> None:
    # 16-byte accesses at an address that is not a multiple of 16 are an error on a GPU
    gemm.force(backend)
    rows, weights = random(4 * 64 + 8, device=device), random(8 * 64 + 8, device=device, seed=1)
    for turn, offset in enumerate((first, 1 - first, first, 1 - first, 3)):
        call = GemmCall(rows[offset : offset + 256].view(4, 64), weights[offset : offset + 512].view(8, 64).mT)
        call = call._replace(bias=random(8, device=device, seed=turn))
        assert_result(backend, gemm(call), call)


@pytest.mark.parametrize("kind", ["bf16", "int8", "e4m3"])
def test_a_bound_call_takes_each_of_its_tensors_anew(kind: str, device: str) -> None:
    for backend in ("triton", "triton_stream_k"):
        gemm.force(backend)
        for seed in range(3):
            dtype = {"bf16": BF16, "int8": I8, "e4m3": E4M3}[kind]
            call = GemmCall(
                random(5, 40, dtype=dtype, device=device, seed=seed),
                random(40, 20, dtype=dtype, device=device, seed=seed + 9),
                random(20, dtype=F32, device=device, seed=seed),
                residual=random(5, 20, dtype=F32, device=device, seed=seed),
                out_dtype=F32,
            )
            if kind != "bf16":
                call = call._replace(
                    scale_a=scales(5, device=device, seed=seed, size=wide(0.1, dtype)),
                    scale_b=scales(20, device=device, seed=seed + 5, size=wide(0.1, dtype)),
                )
            assert_result(backend, gemm(call), call)
        assert len(gemm._bound) == 1


# --- any call


@st.composite
def calls(draw: st.DrawFn) -> tuple[GemmCall, str, Config | None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    M, N, K = (draw(st.integers(1, most)) for most in (24, 40, 90))
    activation = draw(st.sampled_from([None, *list(ACTIVATIONS)[1:], *GATED]))
    columns = 2 * N if activation in GATED else N
    dtype = draw(st.sampled_from((BF16, F16, F32, I8, E4M3, E5M2)))
    seed = draw(st.integers(0, 100))

    def laid_out(rows: int, cols: int, more: int) -> Tensor:
        order, down, across = (
            draw(st.booleans()),
            draw(st.sampled_from((0, 1, 1, 2))),
            draw(st.sampled_from((1, 1, 1, 2))),
        )
        start = draw(st.integers(0, 3))
        held = (1 if down == 0 else rows * down + start, cols * across + start)
        x = random(*(held if order else held[::-1]), dtype=dtype, device=device, seed=seed + more)
        x = x if order else x.t()
        x = x[:1, start::across] if down == 0 else x[start::down, start::across]
        return x[:rows, :cols].expand(rows, cols)

    a, b = laid_out(M, K, 0), laid_out(columns, K, 50).mT
    call = GemmCall(a, b, activation=activation, out_dtype=F32)
    if dtype in (I8, E4M3, E5M2):
        kinds = st.sampled_from(["none", "tensor", "vector", "block"])
        call = call._replace(
            scale_a=scale_of_a(draw(kinds), M, K, dtype, device),
            scale_b=scale_of_b(draw(kinds), columns, K, dtype, device),
        )
    if draw(st.booleans()):
        along = "n" if activation in GATED else draw(st.sampled_from("nm"))
        length = columns if along == "n" else M
        call = call._replace(bias=random(length, dtype=F16, device=device, seed=seed), bias_along=along)
    if draw(st.booleans()):
        call = call._replace(
            residual=residual_of(draw(st.sampled_from(["strided", "transposed", "expanded"])), M, N, device)
        )
    call = call._replace(alpha=draw(st.sampled_from((1.0, 1, -0.5))))
    backend = draw(st.sampled_from(KERNELS))
    m, n, k = (draw(st.sampled_from((16, 32, 64))) for _ in range(3))
    group, split = draw(st.integers(1, 4)), draw(st.sampled_from((1, 1, 2, 5)))
    config = tile(m, n, k, GROUP_M=group, SPLIT_K=split, PERSISTENT=draw(st.integers(0, 1)))
    if backend == "triton_stream_k":
        config = stream(m, n, k, group)
    return call, backend, multiply(n, k, split) if backend == "triton_gemv" else config


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls(), st.integers(1, 9))
def test_any_call(made: tuple[GemmCall, str, Config | None], units: int) -> None:
    """Any shape, strides, type, scales, epilogue, algorithm and configuration."""
    call, backend, config = made
    if refuses(backend, call) is not None:
        backend, config = "triton", tile(16, 32, 32)
    with pytest.MonkeyPatch.context() as patch:
        machine(patch, units=units, xcds=1 + units % 3)
        assert_right(backend, call, config)


# --- on a GPU


def _far_rows(device: str, M: int, K: int) -> Tensor:
    """Zeros, but for some rows at both ends."""
    x = torch.zeros(M, K, dtype=BF16, device=device)
    ends = torch.tensor([0, 1, M // 2, M - 2, M - 1], device=device)
    x[ends] = random(5, K, device=device)
    return x


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "triton_stream_k"])
@pytest.mark.parametrize(
    "shape", [(65544, 32776, 16), ((1 << 31) // 4096 + 5, 16, 4096), (16, (1 << 31) // 4096 + 5, 4096)]
)
def test_tensors_past_2_to_the_31_elements(shape: tuple[int, int, int], backend: str) -> None:
    """The result; a; b."""
    M, N, K = shape
    a, weight = _far_rows("cuda", M, K), _far_rows("cuda", N, K)
    got = gemm.run(backend, GemmCall(a, weight.mT))
    rows, columns = (torch.tensor(sorted({0, 1, n // 2, n - 2, n - 1}), device="cuda") for n in (M, N))
    some = GemmCall(a[rows], weight[columns].mT)
    assert_result(backend, got[rows][:, columns].contiguous(), some)
    # the rest is zeros, written
    assert int(got.count_nonzero()) <= rows.numel() * columns.numel()
    assert not bool(got[M // 3].isnan().any())


@pytest.mark.gpu
@pytest.mark.slow
def test_batches_and_parts_past_2_to_the_31_elements() -> None:
    # the second matrix of b begins past 2^31; so do the partial sums of the second part
    b = torch.zeros(2, 32776, 65544, dtype=torch.float8_e5m2, device="cuda")
    b[1, :, -16:] = random(32776, 16, dtype=E5M2, device="cuda")
    a = random(2, 4, 32776, dtype=E5M2, device="cuda")
    got = gemm.run("triton", GemmCall(a, b))
    assert_result("triton", got[1:, :, -16:].contiguous(), GemmCall(a[1:], b[1:, :, -16:]))
    del b
    tall = product(65544, 16392, 64, device="cuda", out_dtype=F32)
    got = gemm.run("triton", tall, config=tile(128, 128, 32, SPLIT_K=2, num_warps=8))
    assert_result("triton", got[-3:].contiguous(), tall._replace(a=tall.a[-3:]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "int8", "e4m3", "bf16-weight-int8"])
@pytest.mark.parametrize("backend", KERNELS)
def test_replays_in_a_cuda_graph(backend: str, kind: str) -> None:
    call = TYPES[kind](7, "cuda")
    if refuses(backend, call) is not None:
        pytest.skip("a type of the others")
    gemm.pin(gemm.key(call), backend, configs(backend)[-1], "exact", "a test")
    gemm(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemm(call)
    for seed in (5, 6):
        for value, other in zip(call[:2], TYPES[kind](7, "cuda")[:2], strict=True):
            value.copy_(random(*other.shape, dtype=value.dtype, device="cuda", seed=seed))
        result.fill_(0)
        graph.replay()
        assert_result(backend, result, call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, I8], ids=name)
@pytest.mark.parametrize("shape", [(256, 512, 1024), (200, 304, 208), (1000, 1040, 4096)], ids=shape_id)
def test_with_tensor_descriptors_and_without(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    call = product(*shape, dtype, device="cuda", out_dtype=I32 if dtype == I8 else F32)
    gated = product(*shape, dtype, device="cuda", out_dtype=F32, activation="silu_and_mul")
    large = tile(128, 128, 64, num_warps=8)
    for backend, made, what in (
        ("triton", large, call), ("triton", large, gated), ("triton_stream_k", stream(128, 128, 64), call)
    ):  # fmt: skip
        for tma in (0, 1):
            config = Config(**(made.kwargs | {"TMA": tma, "num_stages": 3}))
            for _ in range(2):
                assert_right(backend, what, config)


# what the matrix unit adds by itself: whole steps, halves of a step, and a part of K
LONG: tuple[tuple[str, Config | None], ...] = (
    ("torch", None),
    ("triton", tile(128, 128, 128, num_warps=8)),
    ("triton", tile(128, 128, 128, TMA=1, num_warps=8)),
    ("triton", tile(64, 128, 256, TMA=1)),
    ("triton", tile(64, 64, 64, **SPLIT)),
    ("triton_stream_k", stream(64, 64, 128)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [512, 4096, 16384])
@pytest.mark.parametrize("kind", ["vector", "positive", "gated"])
@pytest.mark.parametrize(("backend", "config"), LONG)
def test_long_sums_of_8_bit_floats(backend: str, config: Config | None, kind: str, K: int) -> None:
    """No further off than sums of 128 products are, where the matrix unit keeps 14 bits; further only by name."""
    if kind == "gated" and backend == "triton_stream_k":
        assert "gated" in str(refuses(backend, product(8, 16, 64, E4M3, device="cuda", activation="silu_and_mul")))
        return
    a, b = (random(rows, K, dtype=F32, device="cuda", seed=rows) for rows in (192, 256))
    if kind == "positive":
        a, b = a.abs(), b.abs()
    call = GemmCall(a.to(E4M3), b.to(E4M3).mT, out_dtype=F32)
    if kind == "vector":
        call = call._replace(
            scale_a=scales(192, device="cuda"), scale_b=scales(256, device="cuda", seed=1), out_dtype=BF16
        )
    elif kind == "gated":
        call = call._replace(activation="silu_and_mul")
    assert_right(backend, call, config)
    assert_right(backend, call._replace(precision="fast_accum"), config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("triton", tile(64, 64, 64, SPLIT_K=7)),
        ("triton_stream_k", stream(64, 64, 64)),
        ("triton_gemv", multiply(4, 256, split=5)),
    ],
)
def test_the_same_bits_whatever_memory_held(backend: str, config: Config) -> None:
    """Workspaces from fresh memory, from memory full of NaN, and from the cache: the same bits; none is kept."""
    call = product(8 if backend == "triton_gemv" else 300, 1000, 2056, device="cuda", out_dtype=F32)
    gemm.pin(gemm.key(call), backend, config, "exact", "a test")
    first = gemm(call)
    assert_result(backend, first, call)

    def held() -> int:
        # what was asked for: a block that is given may be up to 1 MiB larger
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    for turn in range(5):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = held()
        if turn % 2:
            torch.full((1 << 26,), NAN, device="cuda")
        again = gemm(call)
        assert torch.equal(again, first)
        assert held() - before == first.untyped_storage().nbytes()
        del again


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 4096, 14336), (300, 1000, 2056)], ids=shape_id)
@pytest.mark.parametrize("kind", ["bf16", "fp32", "tf32", "tf32x3", "int8", "e4m3", "bf16-weight-int8"])
def test_own_configurations_on_layers(kind: str, shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    like = TYPES[kind](4, "cuda")
    call = product(M, N, K, like.a.dtype, like.b.dtype, device="cuda", precision=like.precision)
    call = scaled(call) if like.scale_a is not None else call
    for backend in BACKENDS:
        if refuses(backend, call) is None:
            assert_right(backend, call)
