"""sm_90's own kernel: values on such a GPU; what it does with tiles and barriers anywhere."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.gemm_harness import BF16, F16, F32, I8, Watch, assert_right, random, refuses, scales, watched
from tests.ops.hopper_harness import (
    SHAPES,
    biases,
    definition,
    gated,
    gemm_on_sm_90,
    interpreted,
    plain,
    pretend_sm_90,
    stand_in,
)
from tests.ops.op_harness import name, same_bits, shape_id
from wavecrest import hardware
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm import backend as gemm_backend
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm import kernel_hopper as hopper_kernel
from wavecrest.ops._gemm import launch_hopper as hopper_launch
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall
from wavecrest.ops._gemm.key import key_of
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common import hopper as _hopper
from wavecrest.ops.common import launcher as _launcher
from wavecrest.ops.common import triton as _triton
from wavecrest.ops.common.activation import ACTIVATIONS

HOPPER = "triton_hopper"


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.fixture
def hopper() -> AnyOp:
    return gemm_on_sm_90()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name)
def test_values(dtype: torch.dtype, shape: tuple[int, ...], hopper: AnyOp) -> None:
    for activation in GATED:
        assert_right(HOPPER, gated(*shape, dtype, activation=activation))
    assert_right(HOPPER, gated(*shape, dtype, bias=biases(2 * shape[1])[0]))
    for activation in (None, *ACTIVATIONS):
        assert_right(HOPPER, plain(*shape, dtype, activation=activation, slope=0.25))
    for bias in biases(shape[1]):
        assert_right(HOPPER, plain(*shape, dtype, activation="gelu", bias=bias, alpha=0.75))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 40, 64), (1000, 328, 520), (2100, 2056, 72)], ids=shape_id)
def test_configurations(shape: tuple[int, ...], hopper: AnyOp) -> None:
    for call in (gated(*shape, alpha=0.75), plain(*shape, bias=biases(shape[1])[0], activation="gelu")):
        tried = space.hopper_space(hopper.key(call), ARCHS["sm_90"])
        results = [assert_right(HOPPER, call, one) for one in tried]
        # a result's products are added in one order, whatever is copied when
        assert all(same_bits(one, results[0]) for one in results)


@pytest.mark.gpu
def test_strides(hopper: AnyOp) -> None:
    """Views in a sea of NaN; leading dimensions; what descriptors do not take, which the portable kernel does."""
    sea = torch.full((260, 160), math.nan, dtype=BF16, device="cuda")
    rows = torch.full((3, 50, 160), math.nan, dtype=BF16, device="cuda")[:, :, 16:112]
    weight = sea[2:258, 8:104]
    rows.copy_(random(3, 50, 96, device="cuda"))
    weight.copy_(random(256, 96, device="cuda", seed=1) / 10)
    call = GemmCall(rows, weight.mT, activation="silu_and_mul")
    assert_right(HOPPER, call)
    # an odd address is not in the key either
    odd = torch.empty(3 * 50 * 96 + 1, dtype=BF16, device="cuda")[1:].view(3, 50, 96)
    odd.copy_(rows)
    expected = gemm.run("triton", call._replace(a=odd))
    _launcher.replaced.cache_clear()
    with pytest.warns(PortableKernel, match="a clone of it does"):
        assert same_bits(assert_right(HOPPER, call._replace(a=odd)), expected)
    for refused in (call._replace(a=rows[:, :1].expand(3, 50, 96)), call._replace(b=weight.mT.contiguous())):
        with pytest.raises(Unsupported, match="along K"):
            hopper.run(HOPPER, refused)


@pytest.mark.gpu
def test_rows_that_are_one_row(hopper: AnyOp) -> None:
    """Their stride of 0 is not in the key, so that a decision for others is theirs too: the portable kernel runs."""
    call = gated(150, 136, 96)
    expanded = call._replace(a=call.a[:1].expand(150, 96))
    assert key_of(expanded) == key_of(call)
    hopper.pin(hopper.key(call), HOPPER, None, "user", "for this test")
    try:
        assert hopper.decide(call).backend == hopper.decide(expanded).backend == HOPPER
        for one, backend in ((call, HOPPER), (expanded, "triton"), (call, HOPPER)):
            assert same_bits(hopper(one), hopper.run(backend, one))
    finally:
        hopper.unpin()


@pytest.mark.gpu
def test_the_same_bits_each_time_and_in_a_graph(hopper: AnyOp) -> None:
    call = gated(1500, 1032, 520)
    hopper.force(HOPPER)
    try:
        first = hopper(call)
        assert all(torch.equal(hopper(call), first) for _ in range(5))
        torch.cuda.synchronize()
        kernels = hopper_kernel._hopper_gemm_kernel.device_caches[torch.cuda.current_device()][0]
        before = len(kernels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = hopper(call)
        for seed in (5, 6):
            call.a.copy_(random(1500, 520, device="cuda", seed=seed))
            result.fill_(math.nan)
            graph.replay()
            assert torch.equal(result, hopper(call))
        for shape in ((1, 8, 8), (333, 512, 1000), (5000, 24, 72)):
            hopper(gated(*shape))
        assert len(kernels) == before, "compiled anew for a size"
    finally:
        hopper.force(None)


@pytest.mark.gpu
def test_in_a_compiled_function(hopper: AnyOp) -> None:
    """As one operation, which finds the pinned kernel when it runs."""
    call = plain(300, 256, 128, F16, bias=biases(256)[0], activation="gelu")

    def layer(x: Tensor) -> Tensor:
        return 2 * hopper(call._replace(a=x))

    hopper.pin(hopper.key(call), HOPPER, configs.hopper(), "user", "for this test")
    try:
        wanted = 2 * hopper.run(HOPPER, call, config=configs.hopper())
        with torch.no_grad():
            assert same_bits(torch.compile(layer, fullgraph=True)(call.a), wanted)
    finally:
        hopper.unpin()


@interpreted
@pytest.mark.parametrize("shape", [(128, 128, 256), (5, 40, 64), (300, 256, 64), (290, 328, 392)], ids=shape_id)
def test_tiles_and_barriers(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With each configuration, and fewer programs than tiles."""
    calls = [
        gated(*shape, dtype, "cpu", activation=activation, alpha=0.75)
        for dtype, activation in zip((BF16, F16, BF16), GATED, strict=True)
    ]
    dense, gapped = biases(shape[1], "cpu")
    calls += [
        gated(*shape, BF16, "cpu", bias=biases(2 * shape[1], "cpu")[1]),
        plain(*shape, F16, "cpu", alpha=0.75),
        plain(*shape, BF16, "cpu", bias=dense, activation="gelu"),
        plain(*shape, BF16, "cpu", bias=gapped, activation="leaky_relu", slope=0.25),
    ]
    for call in calls:
        want = definition(call)
        for config in space.hopper_space(None, ARCHS["sm_90"]):
            found = stand_in(call, config, 2, monkeypatch).double()
            assert ((found - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all()


@interpreted
@pytest.mark.parametrize(
    ("say", "instead"),
    [
        ("acc = hopper.warpgroup_mma_wait(1, deps=[acc])", "pass"),
        ("second = first + (N if GATED else BLOCK_N)", "second = first"),
        ("starts = gl.minimum(BEHIND, steps)", "starts = steps + 1"),
        ("((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)"),
        ("slice(me * ROWS, ROWS)", "slice(0, ROWS)"),
        ("bias_ptr, N + first, 2 * N", "bias_ptr, first, 2 * N"),
    ],
)  # fmt: skip
def test_planted_errors_are_seen(say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = gated(290, 328, 392, device="cpu", bias=biases(656, "cpu")[0])
    _see(call, say, instead, monkeypatch)


@interpreted
@pytest.mark.parametrize(
    ("say", "instead"),
    [
        ("2 * tile_n * BLOCK_N\n        second", "tile_n * BLOCK_N\n        second"),
        ("_store(c_desc, c_tile, y, row, second, SUMS)", "_store(c_desc, c_tile, y, row, first, SUMS)"),
        ("bias_ptr, second, N", "bias_ptr, first, N"),
        ("columns * stride_bias", "columns"),
    ],
)
def test_planted_errors_of_plain_products_are_seen(say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = plain(290, 328, 392, device="cpu", bias=biases(328, "cpu")[1], activation="gelu")
    _see(call, say, instead, monkeypatch)


def _see(call: GemmCall, say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "PATIENCE", 1.0)
    want = definition(call)
    with pytest.raises((AssertionError, TimeoutError)):
        found = stand_in(call, configs.hopper(), 2, monkeypatch, **{say: instead}).double()
        assert ((found - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all()


@pytest.fixture
def as_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_sm_90(monkeypatch)


def test_what_it_does_not_take(as_sm_90: None) -> None:
    call = gated(20, 40, 64, device="cpu")
    assert hopper_launch.refusal(call) is None
    assert hopper_launch.refusal(gated(20, 40, 64, F16, "cpu", alpha=2.0, activation="gelu_tanh_and_mul")) is None
    assert hopper_launch.refusal(plain(20, 40, 64, device="cpu", bias=random(40), activation="relu")) is None
    refusals = {
        "float16 and bfloat16": gated(20, 40, 64, F32, "cpu"),
        "returns the same": call._replace(out_dtype=F32),
        "takes no bias of a row": plain(20, 40, 64, device="cpu", bias=random(20), bias_along="m"),
        "takes no residual": call._replace(residual=random(20, 40)),
        "scales or norm": call._replace(norm_weight=random(64)),
    }
    for reason, refused in refusals.items():
        assert reason in str(hopper_launch.refusal(refused)), reason
    weight = call._replace(b=random(80, 64, dtype=I8).mT, scale_b=scales(80))
    assert "float16 and bfloat16" in str(hopper_launch.refusal(weight))
    strides = "every other stride a multiple of 16 bytes and not 0"
    for refused in (
        gated(20, 36, 64, device="cpu"),
        gated(20, 40, 60, device="cpu"),
        call._replace(b=call.b.contiguous()),
        call._replace(a=random(1, 64).expand(20, 64)),
        call._replace(a=random(64, 20).mT),
        GemmCall(random(2, 20, 64), random(2, 64, 80).contiguous(), activation="silu_and_mul"),
    ):
        assert strides in str(hopper_launch.refusal(refused))


def test_the_portable_kernel_says_why_it_runs(as_sm_90: None) -> None:
    call = gated(20, 40, 64, device="cpu")
    odd = torch.empty(20 * 64 + 1, dtype=BF16)[1:].view(20, 64)
    expanded = random(1, 64).expand(20, 64)
    ran: list[Tensor] = []

    def portable(call: GemmCall) -> Tensor:
        ran.append(call.a)
        return call.a

    for a, reason in ((odd, "where one of the tensors does not begin"), (expanded, "every other stride")):
        _launcher.replaced.cache_clear()
        changed = call._replace(a=a)
        with pytest.warns(PortableKernel, match=f"gemm: its portable kernel .* which copies .*{reason}"):
            hopper_launch.bind(changed, configs.hopper(), portable)(changed)
        assert ran.pop() is a
        # once is enough
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hopper_launch.bind(changed, configs.hopper(), portable)(changed)
        assert ran.pop() is a


def test_in_torch_compile_it_is_one_operation(as_sm_90: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = gated(20, 40, 64, device="cpu")
    asked: list[GemmCall] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(gemm_backend, "_in_graph", asked.append)
    assert hopper_launch.refusal(call) is None and _hopper.refusal() is not None
    gemm_backend._run_hopper(call, configs.hopper())
    assert asked == [call]


def test_it_is_for_sm_90(device: str) -> None:
    if device == "cuda" and hardware.detect().arch == "sm_90":
        pytest.skip("this is one")
    reason = refuses(HOPPER, gated(8, 16, 32, device=device))
    assert reason is not None and ("sm_90" in reason or reason == _triton.no_gluon)


def test_it_runs_where_a_measured_row_names_it(device: str) -> None:
    assert gemm.backends[HOPPER].opt_in(gated(8, 16, 32, device=device)) is not None
    assert gemm.decide(gated(8, 16, 32, device=device)).backend != HOPPER


def test_configurations_fit() -> None:
    tried = list(space.hopper_space(None, ARCHS["sm_90"]))
    assert tried[0] == configs.hopper() and len(tried) == len(set(tried)) > 1
    for one in tried:
        assert one["BEHIND"] < one["STAGES"] and space.hopper_shared_bytes(one) <= 227 << 10
        # the sums of a thread of the 128 that have 64 rows
        assert 64 * 2 * one["BLOCK_N"] // 128 <= 128


def test_a_group_that_would_wait_for_ever_is_refused(as_sm_90: None) -> None:
    call = gated(300, 136, 264, device="meta")
    y = torch.empty(300, 136, dtype=BF16, device="meta")
    config = configs.hopper()
    made = hopper_launch.launch(call, y, config, ARCHS["sm_90"])
    # 3 × 2 tiles, a program each; five steps of 64
    bias, *numbers = made.args[hopper_launch.DESCRIPTORS :]
    assert made.grid == (6,) and bias is call.a and numbers == [136, 3, 2, 5, 0, 1.0, 0.01]
    # 3 × 1 tiles of both halves
    assert hopper_launch.launch(plain(300, 136, 264, device="meta"), y, config, ARCHS["sm_90"]).grid == (3,)
    for behind in (-1, config["STAGES"]):
        with pytest.raises(InvalidArgument, match="BEHIND is below STAGES"):
            hopper_launch.launch(call, y, Config(**(config.kwargs | {"BEHIND": behind})), ARCHS["sm_90"])


@pytest.mark.parametrize("tiles", [(1, 1), (3, 2), (8, 5), (9, 5), (64, 86), (17, 1)], ids=shape_id)
@pytest.mark.parametrize("group", [1, 8, 16])
def test_each_tile_once(tiles: tuple[int, int], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And GROUP_M rows of tiles together, column by column."""
    if _triton.no_gluon is not None:
        pytest.skip(_triton.no_gluon)
    monkeypatch.setattr(hopper_kernel, "gl", SimpleNamespace(minimum=min))
    seen = [hopper_kernel._place.fn(index, *tiles, group) for index in range(math.prod(tiles))]
    assert sorted(seen) == [(m, n) for m in range(tiles[0]) for n in range(tiles[1])]
    assert {m for m, _ in seen[: group * tiles[1]]} == set(range(min(group, tiles[0])))
