"""A product whose rows are normalised on the way (`norm_weight`), against an oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    F16,
    F32,
    F64,
    I8,
    KERNELS,
    Watch,
    assert_right,
    multiply,
    oracle,
    random,
    refuses,
    scales,
    tile,
    watched,
)
from tests.ops.op_harness import name, same_bits
from wavecrest import nn, ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall

INF, NAN = float("inf"), float("nan")
MULTIPLY = "triton_gemv"
BACKENDS = (MULTIPLY, "triton", "torch", "reference")
CONFIGS = {MULTIPLY: multiply(8, 32), "triton": tile()}


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


def gains(K: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    """A norm's weight, of both signs and of sizes that no two columns share."""
    return (random(K, dtype=F64, seed=5) + 0.5).to(dtype).to(device)


def product(
    M: int, N: int, K: int, a: torch.dtype = BF16, b: torch.dtype | None = None, device: str = "cpu", **more: Any
) -> GemmCall:
    """RMSNorm(a [M, K]) times the transpose of a weight [N, K]; rows of different sizes, so that none has another's."""
    rows = random(M, K, dtype=F64) * torch.exp2(torch.arange(M, dtype=F64) - 2)[:, None]
    weight = {"norm_weight": gains(K, F32 if a == F64 else a, device)} | more
    return GemmCall(rows.to(a).to(device), random(N, K, dtype=b or a, device=device, seed=1).mT, **weight)


# --- rows, sizes, types


@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows(rows: int, watch: Watch, device: str) -> None:
    dtype = (F32, F16, BF16)[rows % 3]
    # steps that are not full, full ones, one step, columns that are not full
    for (n, k), config in (((21, 150), multiply(16, 64)), ((16, 128), multiply(8, 64)), ((5, 7), multiply(2, 16))):
        assert_right(MULTIPLY, product(rows, n, k, dtype, device=device, out_dtype=F32), config, watch)
    gated = product(rows, 12, 70, dtype, device=device, activation="silu_and_mul")
    assert_right(MULTIPLY, gated, multiply(8, 32), watch)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])
def test_tiles(rows: int, watch: Watch, device: str) -> None:
    dtype = (F32, BF16)[rows % 2]
    # steps that are not full, full ones, one step; rows and columns that are not full
    for (n, k), config in (((37, 150), tile(16, 32, 64)), ((32, 128), tile(32, 16, 32)), ((5, 7), tile())):
        assert_right("triton", product(rows, n, k, dtype, device=device, out_dtype=F32), config, watch)
    gated = product(rows, 36, 70, dtype, device=device, activation="silu_and_mul")
    assert_right("triton", gated, tile(16, 16, 32), watch)
    tf32 = product(rows, 20, 75, F32, device=device, precision="tf32")
    assert_right("triton", tf32, tile(16, 16, 32), watch)


@pytest.mark.parametrize("kind", ["row", "tensor", "none"])
@pytest.mark.parametrize(("a", "b"), [(BF16, I8), (F16, E4M3), (F32, I8)], ids=name)
def test_weights_of_8_bits(a: torch.dtype, b: torch.dtype, kind: str, watch: Watch, device: str) -> None:
    shape = {"row": (20,), "tensor": (), "none": None}[kind]
    scale = None if shape is None else scales(*shape, device=device, size=0.02)
    assert_right(MULTIPLY, product(3, 20, 75, a, b, device, scale_b=scale), multiply(8, 32), watch)
    if a != F16:
        assert_right("triton", product(19, 20, 75, a, b, device, scale_b=scale), tile(), watch)


def _int4(M: int, N: int, K: int, group: int, device: str, **more: Any) -> tuple[GemmCall, Tensor]:
    """With 4-bit codes, and the values that they stand for."""
    weight = ops.pack(random(N, K, dtype=F32, device=device, seed=1), "int4", group=group)
    assert weight.scale is not None
    call = product(M, N, K, device=device, **more)
    call = call._replace(b=weight.stored.mT, scale_b=weight.scale.mT, form="int4", group=group)
    return call, weight.dequantize_float32().double().mT


@pytest.mark.parametrize(("rows", "k", "group"), [(1, 200, 64), (3, 256, 128), (8, 130, 64)])
def test_weights_of_4_bits(rows: int, k: int, group: int, watch: Watch, device: str) -> None:
    call, values = _int4(rows, 10, k, group, device, out_dtype=F32, bias=random(10, device=device))
    config = Config(BLOCK_N=4, BLOCK_K=128, SPLIT_K=1, num_warps=1, num_stages=1)
    assert_right(MULTIPLY, call, config, watch, b=values)


@pytest.mark.parametrize("activation", [None, "silu", "leaky_relu", "silu_and_mul", "gelu_tanh_and_mul"])
def test_all_that_comes_behind(activation: str | None, watch: Watch, device: str) -> None:
    width = 24 if activation is None or not activation.endswith("mul") else 12
    call = product(
        4, 24, 75, BF16, I8, device, scale_b=scales(24, device=device, size=0.02), activation=activation, alpha=0.75,
        bias=random(24, dtype=F32, device=device), residual=random(4, width, device=device), slope=0.2,
    )  # fmt: skip
    assert_right(MULTIPLY, call, multiply(8, 32), watch)
    assert_right("triton", call, tile(), watch)
    eight = call._replace(out_dtype=I8, out_scale=torch.tensor(0.05, device=device))
    assert_right(MULTIPLY, eight, multiply(8, 32), watch)


@pytest.mark.parametrize("weight", [F32, F64, F16, BF16], ids=name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_another_dtype(backend: str, weight: torch.dtype, watch: Watch, device: str) -> None:
    for a in (BF16, F32):
        call = product(3, 20, 75, a, device=device, norm_weight=gains(75, weight, device))
        assert_right(backend, call, CONFIGS.get(backend), watch)


@pytest.mark.parametrize("backend", [MULTIPLY, "torch", "reference"])
def test_a_wider_weight_is_not_rounded_first(backend: str, device: str) -> None:
    """√2 · (1 + 2^-8 − 2^-20) is 1.4197, nearest to 1.421875 in bfloat16; of a weight rounded to 1 it is 1.4140625."""
    row = torch.tensor([[1.0, 0.0]], dtype=BF16, device=device)
    gain = torch.tensor([1 + 2.0**-8 - 2.0**-20, 1.0], device=device)
    call = GemmCall(row, torch.eye(2, dtype=BF16, device=device).mT, norm_weight=gain, norm_eps=0.0)
    got = gemm.run(backend, call, config=CONFIGS.get(backend))
    assert got.tolist() == [[1.421875, 0.0]]


LAYOUTS: dict[str, Callable[[str], Tensor]] = {
    "rows-apart": lambda d: random(5, 90, device=d)[:, 3:78],
    "every-other-row": lambda d: random(10, 75, device=d)[::2],
    "three-dimensions": lambda d: random(5, 1, 75, device=d),
    "one-row-of-many-dimensions": lambda d: random(1, 3, 1, 75, device=d)[:, 1:2],
    "a-vector": lambda d: random(75, device=d),
    "the-same-row": lambda d: random(75, device=d).expand(5, 75),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, watch: Watch, device: str) -> None:
    a = LAYOUTS[layout](device)
    # a norm's weight inside another tensor, at an odd place
    call = GemmCall(a, random(20, 75, device=device, seed=1).mT, norm_weight=gains(80, BF16, device)[3:78])
    for backend in (MULTIPLY, "triton", "torch"):
        assert_right(backend, call, CONFIGS.get(backend), watch)


@pytest.mark.parametrize("layout", ["across", "three-strides", "steps"])
def test_layouts_that_tiles_alone_take(layout: str, watch: Watch, device: str) -> None:
    a = {
        "across": lambda: random(75, 19, device=device).t(),
        "three-strides": lambda: random(2, 3, 4, 75, device=device).permute(2, 1, 0, 3),
        "steps": lambda: random(19, 150, device=device)[:, ::2],
    }[layout]()
    call = GemmCall(a, random(75, 20, device=device, seed=1), norm_weight=gains(75, BF16, device))
    assert_right("triton", call, tile(), watch)
    assert refuses(MULTIPLY, call) is not None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name)
def test_sizes_of_rows_and_eps(dtype: torch.dtype, backend: str, watch: Watch, device: str) -> None:
    """1e4 and 1e-4, where eps decides; rows of zeros; each with its own."""
    if backend == "triton" and dtype == F16:
        assert "beyond its range" in str(refuses(backend, product(5, 20, 75, dtype, device=device)))
        return
    sizes = torch.tensor([1e4, 1.0, 1e-4, 1e-2, 0.0], dtype=F64)
    rows = (random(5, 75, dtype=F64).clamp(-3, 3) * sizes[:, None]).to(dtype).to(device)
    for eps in (1e-6, 1e-3, 1):
        call = product(5, 20, 75, dtype, device=device, norm_eps=eps)._replace(a=rows)
        got = assert_right(backend, call, CONFIGS.get(backend), watch)
        assert not got[4].any(), "a row of zeros is one of zeros"
        # at 1e-4 the mean square is 1e-8: eps makes most of the root
        assert float(got[2].abs().max()) < 30 * float(rows[2].double().square().mean() / eps) ** 0.5


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values_stay_in_their_row(value: float, backend: str, watch: Watch, device: str) -> None:
    call = product(4, 20, 75, device=device)
    call.a[2, 40] = value
    got = assert_right(backend, call, CONFIGS.get(backend), watch)
    assert got[2].isnan().all() and not got[[0, 1, 3]].isnan().any()


def test_a_nan_of_the_weight_is_everywhere(watch: Watch, device: str) -> None:
    call = product(4, 20, 75, device=device)
    call.norm_weight[7] = NAN  # type: ignore[index]
    for backend in (MULTIPLY, "triton"):
        assert assert_right(backend, call, CONFIGS[backend], watch).isnan().all()


def test_a_row_does_not_depend_on_the_rows_beside_it(watch: Watch, device: str) -> None:
    call = product(8, 20, 70, device=device, out_dtype=F32)
    run = gemm.run
    whole = run(MULTIPLY, call, config=multiply(8, 32))
    for some in (slice(0, 1), slice(7, 8), slice(2, 7)):
        alone = run(MULTIPLY, call._replace(a=call.a[some]), config=multiply(8, 32))
        assert same_bits(alone, whole[some])


def test_bound_calls_take_each_tensor_and_eps_anew(watch: Watch, device: str) -> None:
    gemm.force(MULTIPLY)
    try:
        for turn in range(3):
            call = product(2, 20, 75, device=device, norm_eps=(1e-6, 1e-6, 10.0)[turn])
            call = call._replace(norm_weight=gains(75, BF16, device) * (turn + 1))
            got = gemm(call)
            assert gemm.decide(call).backend == MULTIPLY
            want = gemm.run(MULTIPLY, call)
            assert same_bits(got, want)
            assert_right("reference", call)
            assert float((got.double() - gemm.reference(call).double()).abs().max()) < 0.2 * (turn + 1)
    finally:
        gemm.force(None)


# --- PyTorch, the definition, the public functions


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=name)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_without_a_kernel(dtype: torch.dtype, backend: str, device: str) -> None:
    for rows, more in ((19, {}), (3, {"activation": "silu", "bias": random(20, dtype=dtype, device=device)})):
        assert_right(backend, product(rows, 20, 75, dtype, device=device, **more))


def test_public_functions_are_the_op(device: str) -> None:
    call = product(5, 20, 75, F32, device=device, norm_eps=0.5)
    weight = call.b.mT.contiguous()
    want = torch.nn.functional.rms_norm(call.a, (75,), call.norm_weight, 0.5) @ call.b
    options = {"norm_weight": call.norm_weight, "norm_eps": 0.5}
    torch.testing.assert_close(ops.gemm(call.a, call.b, **options), want)
    torch.testing.assert_close(ops.linear(call.a, weight, **options), want)
    torch.testing.assert_close(nn.Linear.from_weight(weight)(call.a, **options), want)
    default = torch.nn.functional.rms_norm(call.a, (75,), call.norm_weight, 1e-6) @ call.b
    torch.testing.assert_close(nn.Linear.from_weight(weight)(call.a, norm_weight=call.norm_weight), default)


def test_a_layer_says_what_would_run(device: str) -> None:
    layer, x = (
        nn.Linear.from_weight(random(24, 75, device=device), activation="silu_and_mul"),
        random(2, 75, device=device),
    )
    residual = random(2, 12, device=device)
    gain = gains(75, BF16, device)
    made = layer.decision(x, residual, gain, 0.5)
    call = GemmCall(x, layer.weight.mT, residual=residual, activation="silu_and_mul", norm_weight=gain, norm_eps=0.5)
    assert made.key == gemm.key(call) and made.backend == "torch"
    gemm.force(MULTIPLY)
    try:
        assert layer.decision(x, residual, gain, 0.5).backend == MULTIPLY
    finally:
        gemm.force(None)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "shuffled"])
def test_packed_weights(format: str, watch: Watch, device: str) -> None:
    weight = ops.pack(random(32, 128, device=device), format)
    x, gain = random(2, 128, device=device, seed=2), gains(128, BF16, device)
    gemm.force(MULTIPLY)
    try:
        got = ops.linear(x, weight, norm_weight=gain)
        used = [decision.backend for decision, calls in gemm.decisions() if calls]
    finally:
        gemm.force(None)
    assert (MULTIPLY in used) == (format != "shuffled"), used
    normed = torch.nn.functional.rms_norm(x.float(), (128,), gain.float(), 1e-6)
    want = normed @ weight.dequantize_float32().mT
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.parametrize("own", [False, True], ids=["dispatch", "kernel"])
def test_compile(own: bool, device: str) -> None:
    call = product(3, 16, 64, device=device)
    want = gemm.reference(call)
    gemm.force(MULTIPLY if own and device == "cuda" else None)
    try:
        made = torch.compile(
            lambda x: ops.gemm(x, call.b, norm_weight=call.norm_weight), fullgraph=True,
            backend="aot_eager" if device == "cpu" else "inductor",
        )  # fmt: skip
        torch.testing.assert_close(made(call.a), want, rtol=2e-2, atol=4e-2)
    finally:
        gemm.force(None)


def test_words_inside_compile_are_one_operation(device: str) -> None:
    """Calls that look at addresses: the norm goes through the opaque operation too."""
    call, _ = _int4(2, 16, 128, 64, device)
    opaque = torch.ops.wavecrest.gemm
    gemm.force(MULTIPLY)
    try:
        torch.testing.assert_close(opaque(*call), gemm.reference(call), rtol=2e-2, atol=4e-2)
    finally:
        gemm.force(None)
    torch.library.opcheck(opaque, tuple(call), test_utils=("test_schema", "test_faketensor"))


# --- refusals, key, configurations


def test_refusals_say_why(device: str) -> None:
    run = gemm.run
    call = product(3, 20, 64, device=device)
    with pytest.raises(InvalidArgument, match="all of K in one program: SPLIT_K is 1, not 2"):
        run(MULTIPLY, call, config=multiply(8, 32, split=2))
    words, _ = _int4(1, 16, 128, 64, device)
    with pytest.raises(InvalidArgument, match="SPLIT_K is 1, not 3"):
        run(MULTIPLY, words, config=multiply(4, 128, split=3))
    for more in ({"SPLIT_K": 2}, {"CHAINS": 2}, {"PERSISTENT": 1}):
        (what, value), *_ = more.items()
        with pytest.raises(InvalidArgument, match=f"in one program: {what} is ., not {value}"):
            run("triton", call, config=tile(k=64, **more))
    assert "does not normalise" in str(refuses("triton_stream_k", call))
    groups = product(3, 20, 64, BF16, I8, device, scale_b=scales(2, 20, device=device), group=32)
    shuffled = product(3, 16, 64, device=device, form="shuffled")
    for other in (groups, shuffled, words):
        assert "normalises rows for plain weights" in str(refuses("triton", other))
    for backend in KERNELS:
        empty = product(3, 20, 0, device=device)
        assert "no row without elements" in str(refuses(backend, empty)) or backend == "triton_stream_k"
        # PyTorch and the definition have it: there is nothing to sum
        assert not gemm(empty).any()
        strided = call._replace(norm_weight=gains(128, BF16, device)[::2])
        assert "norm_weight that is contiguous" in str(refuses(backend, strided)) or backend == "triton_stream_k"
        with pytest.raises(Unsupported, match="refuses"):
            run(backend, strided)
        assert_right("torch", strided)


def test_the_key_names_a_norm_and_nothing_else_changes(device: str) -> None:
    call = product(3, 20, 64, BF16, I8, device, scale_b=scales(20, device=device))
    parts = dict(zip(gemm.key_fields, gemm.key(call), strict=True))
    plain = dict(zip(gemm.key_fields, gemm.key(call._replace(norm_weight=None)), strict=True))
    assert parts.pop("scales") == "norm vector" and plain.pop("scales") == "none vector"
    assert parts == plain
    key = gemm.key(call)
    again = gemm.study.call_of_key(dict(zip(gemm.key_fields, key, strict=True)), device)  # type: ignore[misc]
    assert again is not None and gemm.key(again) == key
    assert float(again.norm_weight.float().min()) != 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("weight", [BF16, I8], ids=name)
@pytest.mark.parametrize("kernel", [MULTIPLY, "triton"])
def test_configurations_leave_k_whole(kernel: str, weight: torch.dtype, arch: str) -> None:
    """For K that would be split without a norm, where the test sees that it would be."""
    kernels = gemm.study.kernel(kernel)
    scale = torch.empty(64, device="meta")
    call = GemmCall(
        torch.empty(2, 8192, dtype=BF16, device="meta"), torch.empty(64, 8192, dtype=weight, device="meta").mT,
        scale_b=None if weight == BF16 else scale, norm_weight=torch.empty(8192, dtype=BF16, device="meta"),
    )  # fmt: skip
    assert kernels.space is not None and kernels.launches is not None and kernels.work is not None
    spaces = [list(kernels.space(gemm.key(one), ARCHS[arch])) for one in (call, call._replace(norm_weight=None))]
    assert any(config["SPLIT_K"] > 1 for config in spaces[1])
    assert len(spaces[0]) > 5 and all(config["SPLIT_K"] == 1 for config in spaces[0])
    for config in spaces[0][::3]:
        assert config.get("CHAINS", 1) == 1 and not config.get("PERSISTENT", 0) and not config.get("TMA", 0)
        launch, *second = kernels.launches(call, config, ARCHS[arch])
        assert not second and launch.constants["NORM_EPS"] == call.norm_eps
        assert len(kernels.work(gemm.key(call), config, ARCHS[arch])) == 1


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name)
@pytest.mark.parametrize("weight", [None, I8], ids=["plain", "int8"])
def test_the_bound_of_tuning(weight: torch.dtype | None, dtype: torch.dtype, device: str) -> None:
    """It holds what is right, with a row rounded to a's dtype and not; it does not hold a wrong weight or eps."""
    call = product(5, 32, 300, dtype, weight, device, bias=random(32, dtype=F32, device=device))
    limit, want = gemm.study.bound(call), gemm.reference(call).double()  # type: ignore[misc]
    exact, _ = oracle(call)
    assert bool(((want.cpu() - exact).abs() <= limit.cpu()).all())  # type: ignore[union-attr]
    rounded = torch.nn.functional.rms_norm(call.a, (300,), call.norm_weight, call.norm_eps)
    by_rows = gemm.reference(call._replace(a=rounded, norm_weight=None)).double()
    assert bool(((want - by_rows).abs() <= limit).all())
    wrong = [call._replace(norm_eps=30.0), call._replace(norm_weight=call.norm_weight.roll(1))]  # type: ignore[union-attr]
    for other in (*wrong, call._replace(norm_weight=None)):
        off = (gemm.reference(other).double() - want).abs() > limit
        assert float(off.double().mean()) > 0.5
