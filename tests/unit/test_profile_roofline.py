"""Least work from shapes, checked against the definition, torch's own counter and the schemas of the ops."""

from __future__ import annotations

import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from wavecrest import hardware
from wavecrest.errors import InvalidArgument
from wavecrest.profile import roofline
from wavecrest.profile.roofline import Argument, Work, work
from wavecrest.records import Ceilings

T = "float"


def t(*shape: int, dtype: str = T, strides: tuple[int, ...] = ()) -> Argument:
    return Argument(shape, strides, dtype)


def v(value: object = "") -> Argument:
    return Argument(value=str(value))


PRODUCTS = [
    ("mm", "aten::mm", [t(8, 32), t(32, 64)], 2 * 8 * 32 * 64, 4 * (8 * 32 + 32 * 64 + 8 * 64)),
    ("mv", "aten::mv", [t(8, 32), t(32)], 2 * 8 * 32, 4 * (8 * 32 + 32 + 8)),
    ("bmm", "aten::bmm", [t(3, 8, 32), t(3, 32, 64)], 2 * 3 * 8 * 32 * 64, 4 * 3 * (8 * 32 + 32 * 64 + 8 * 64)),
    ("addmm", "aten::addmm", [t(64), t(8, 32), t(32, 64), v(1)], 2 * 8 * 32 * 64, 4 * (64 + 256 + 2048 + 512)),
    ("linear-3d", "aten::linear", [t(2, 4, 32), t(64, 32), v()], 2 * 8 * 32 * 64, 4 * (256 + 2048 + 512)),
    ("mkldnn", "mkldnn::_linear_pointwise", [t(8, 32), t(64, 32), t(64)], 2 * 8 * 32 * 64, 4 * (256 + 2048 + 64 + 512)),
    ("mkl", "mkl::_mkl_linear", [t(8, 32), t(9999, 1), t(64, 32), v(), v(8)], 2 * 8 * 32 * 64, 4 * (256 + 2048 + 512)),
    ("row", "aten::mm", [t(1, 32), t(32, 64)], 2 * 32 * 64, 4 * (32 + 2048 + 64)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "flops", "moved"), [c[1:] for c in PRODUCTS], ids=[c[0] for c in PRODUCTS])
def test_products(op: str, arguments: list[Argument], flops: int, moved: int) -> None:
    assert work(op, arguments) == Work(flops, moved, "float32", matrix=True)


@pytest.mark.parametrize(
    ("causal", "rows", "keys"),
    [(False, 6, 10), (True, 8, 8), (True, 5, 9), (True, 9, 5), (True, 1, 7)],
    ids=["full", "causal-square", "causal-wide", "causal-tall", "causal-one-row"],
)
def test_attention_counts_the_pairs_that_pytorch_computes(causal: bool, rows: int, keys: int) -> None:
    arguments = [t(2, 3, rows, 16), t(2, 3, keys, 16), t(2, 3, keys, 8), v(), v(0.0), v(causal)]
    mask = torch.ones(rows, keys).tril() if causal else torch.ones(rows, keys)
    found = work("aten::scaled_dot_product_attention", arguments)
    assert found is not None
    assert found.flops == 2 * 2 * 3 * int(mask.sum()) * (16 + 8)
    assert found.bytes == 4 * 2 * 3 * (rows * 16 + keys * 16 + keys * 8 + rows * 8)


ATTENTIONS = [name for name in roofline.RULES if "scaled_dot_product" in name]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_is_causal_is_read_where_the_schema_has_it(name: str) -> None:
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    place = [argument.name for argument in schema.arguments].index("is_causal")
    arguments = [t(1, 1, 8, 4)] * 3 + [v()] * (len(schema.arguments) - 3)
    full = work(name, arguments)
    arguments[place] = v(True)
    causal = work(name, arguments)
    assert full is not None and causal is not None
    assert causal.flops / full.flops == 36 / 64


CONVOLUTIONS = [
    ("plain", {}),
    ("padded", {"padding": 1}),
    ("strided", {"stride": 2, "padding": 1}),
    ("dilated", {"dilation": 2}),
    ("grouped", {"groups": 2}),
]


@pytest.mark.parametrize(("_id", "kwargs"), CONVOLUTIONS, ids=[case[0] for case in CONVOLUTIONS])
def test_convolution_flops_equal_torchs_counter(_id: str, kwargs: dict[str, int]) -> None:
    x, weight = torch.randn(2, 4, 9, 11), torch.randn(6, 4 // kwargs.get("groups", 1), 3, 3)
    with FlopCounterMode(display=False) as counter:
        out = F.conv2d(x, weight, **kwargs)
    places = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    places.update({key: [value] * 2 for key, value in kwargs.items() if key in places})
    values = [v(places["stride"]), v(places["padding"]), v(places["dilation"])]
    common = [Argument(tuple(x.shape), (), T), Argument(tuple(weight.shape), (), T), v()]
    for name, arguments in (
        ("aten::convolution", [*common, *values, v(False), v([0, 0]), v(1)]),
        ("aten::mkldnn_convolution", [*common, values[1], values[0], values[2], v(1)]),
        ("aten::miopen_convolution", [*common, values[1], values[0], values[2], v(1)]),
        ("aten::cudnn_convolution", [*common[:2], values[1], values[0], values[2], v(1)]),
    ):
        found = work(name, arguments)
        assert found is not None, name
        assert found.flops == counter.get_total_flops(), name
        assert found.bytes == 4 * (x.numel() + weight.numel() + out.numel()), name


CONV_SCHEMAS = {
    "aten::convolution": (3, 4),
    "aten::mkldnn_convolution": (4, 3),
    "aten::miopen_convolution": (4, 3),
    "aten::cudnn_convolution": (3, 2),
}


@pytest.mark.parametrize("name", CONV_SCHEMAS)
def test_convolution_arguments_lie_where_the_schema_has_them(name: str) -> None:
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    names = [argument.name for argument in schema.arguments]
    assert (names.index("stride"), names.index("padding")) == CONV_SCHEMAS[name]


MEMORY = [
    ("add-broadcast", "aten::add", [t(8, 16), t(16), v(1)], 4 * (128 + 16 + 128)),
    ("expanded-input-is-stored-once", "aten::mul", [t(8, 16), t(8, 16, strides=(0, 1))], 4 * (128 + 16 + 128)),
    ("a-number-has-no-say", "aten::mul", [t(8, 16, dtype="c10::Half"), t(dtype="double")], 2 * 256 + 8),
    ("where-takes-the-widest-type", "aten::where", [t(8, dtype="bool"), t(8), t(8)], 8 + 32 + 32 + 32),
    ("copy-casts", "aten::copy_", [t(8, 16), t(8, 16, dtype="c10::BFloat16"), v(False)], 128 * 4 + 128 * 2),
    ("layer-norm", "aten::native_layer_norm", [t(8, 16), v(), t(16), t(16), v()], 4 * (2 * 128 + 32)),
    ("softmax", "aten::_softmax", [t(8, 16), v(-1), v(False)], 4 * 256),
    ("embedding", "aten::embedding", [t(1000, 16), t(8, dtype="long int")], 2 * 8 * 16 * 4 + 64),
]


@pytest.mark.parametrize(("op", "arguments", "moved"), [case[1:] for case in MEMORY], ids=[case[0] for case in MEMORY])
def test_bytes_of_memory_bound_ops(op: str, arguments: list[Argument], moved: int) -> None:
    found = work(op, arguments)
    assert found is not None and not found.matrix
    assert found.bytes == moved


UNKNOWN = [
    ("op", "aten::sort", [t(8)]),
    ("dtype", "aten::mm", [t(8, 8, dtype="c10::complex<float>"), t(8, 8)]),
    ("mismatch", "aten::mm", [t(8, 9), t(8, 9)]),
    ("too-few-arguments", "aten::mm", [t(8, 9)]),
    ("no-tensor", "aten::add", [v(1), v(2)]),
    ("empty", "aten::mul", [t(0, 4), t(0, 4)]),
    ("transposed-conv", "aten::convolution", [t(1, 4, 8), t(4, 4, 3), v(), *[v([1])] * 3, v(True), v([0]), v(1)]),
    ("packed-attention", "aten::scaled_dot_product_attention", [t(8, 16)] * 3 + [v()] * 3),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments"), [case[1:] for case in UNKNOWN], ids=[case[0] for case in UNKNOWN])
def test_unknown_work_is_none_not_a_guess(op: str, arguments: list[Argument]) -> None:
    assert work(op, arguments) is None


CEILINGS = Ceilings(source="test", bandwidth=1000.0, peak={"bfloat16": 100.0}, cache=20_000_000)
PLACED = [
    # 1e9 FLOP at 100 TFLOP/s: 0.01 ms
    ("compute-bound", Work(1e9, 1e6, "bfloat16", True), 0.02, (50.0, "compute")),
    # 1e8 bytes at 1000 GB/s: 0.1 ms
    ("memory-bound-product", Work(1e9, 1e8, "bfloat16", True), 0.2, (50.0, "memory")),
    ("pointwise-ignores-the-matrix-peak", Work(1e12, 1e8, "bfloat16", False), 0.2, (50.0, "memory")),
    # a cache of 20 MB may save 40 of 100 MB
    ("from-cache", Work(0.0, 1e8, "bfloat16", False), 0.08, (125.0, "cache")),
    ("from-nowhere", Work(0.0, 1e8, "bfloat16", False), 0.05, (200.0, "memory")),
    ("peak-unknown", Work(1e9, 1e6, "float32", True), 0.02, None),
    ("no-time", Work(1e9, 1e6, "bfloat16", True), 0.0, None),
]


@pytest.mark.parametrize(("found", "ms", "expected"), [case[1:] for case in PLACED], ids=[case[0] for case in PLACED])
def test_place_on_the_roofline(found: Work, ms: float, expected: tuple[float, str] | None) -> None:
    place = roofline.placed(found, ms, CEILINGS)
    if expected is None:
        assert place is None
    else:
        assert place is not None
        assert place[0] == pytest.approx(expected[0]) and place[1] == expected[1]


def test_datasheet_is_labelled_and_absent_for_the_cpu() -> None:
    assert roofline.datasheet(hardware.cpu()) is None
    device = hardware.Device("cuda", 0, "gfx942", "MI300X", 304, 1 << 37, "hip")
    ceilings = roofline.datasheet(device)
    assert ceilings is not None
    assert "AMD datasheet" in ceilings.source
    assert ceilings.bandwidth == hardware.ARCHS["gfx942"].bandwidth
    assert ceilings.peak["bfloat16"] == hardware.ARCHS["gfx942"].peak_16bit
    assert ceilings.peak["float8_e4m3fnuz"] == hardware.ARCHS["gfx942"].peak_fp8
    assert "float8_e4m3fn" not in ceilings.peak


def test_measured_ceilings_bound_a_plain_product() -> None:
    begin = time.perf_counter()
    ceilings = roofline.measure_ceilings("cpu", "float32", seconds=0.2)
    assert time.perf_counter() - begin < 10
    assert "measured" in ceilings.source and list(ceilings.peak) == ["float32"]
    # no machine that runs these tests copies below 0.1 or above 10,000 GB/s
    assert 0.1 < ceilings.bandwidth < 10_000
    assert 1e-3 < ceilings.peak["float32"] < 100


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "nonsense", "Tensor"])
def test_measure_ceilings_refuses_types_without_a_product(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match=dtype):
        roofline.measure_ceilings("cpu", dtype)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float64, 1)])
def test_a_ceiling_of_a_cpu_is_of_the_faster_library(
    dtype: torch.dtype, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(8, 8).to(dtype)
    found = [product() for product in roofline._products(a)]
    if not hardware.onednn_multiplies(dtype):
        number = 1
    assert len(found) == number
    for made, expected in zip(found, (a @ a, a @ a.mT), strict=False):
        torch.testing.assert_close(made, expected)
    seconds = iter([2e-6, 1e-6] if number == 2 else [1e-6])
    monkeypatch.setattr(roofline, "_best_seconds", lambda call, finish, spend: next(seconds))
    # one size: the next would take longer than there is time for
    assert roofline._best_product("cpu", dtype, False, lambda: None, 1e-6) == pytest.approx(2 * 256**3 / 1e-6 / 1e12)


@pytest.mark.parametrize(("own", "tf32", "found"), [(50.0, 390.0, 130.0), (50.0, 120.0, 50.0)])
def test_the_ceiling_of_float32_on_nvidia_counts_three_products_of_tf32(
    own: float, tf32: float, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    settings, asked = types.SimpleNamespace(fp32_precision="ieee"), []
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)

    def product(*_: object) -> float:
        asked.append(settings.fp32_precision)
        return {"ieee": own, "tf32": tf32}[asked[-1]]

    monkeypatch.setattr(roofline, "_best_product", product)
    assert roofline._peak("cuda", torch.float32, True, lambda: None, 1.0) == found
    assert asked == ["ieee", "tf32"] and settings.fp32_precision == "ieee"
    assert roofline._peak("cuda", torch.bfloat16, True, lambda: None, 1.0) == own
    # a user who has set it: PyTorch's function for all devices would raise
    settings.fp32_precision = "tf32"
    assert roofline._peak("cuda", torch.float32, True, lambda: None, 1.0) == tf32
    assert settings.fp32_precision == "tf32"
    settings.fp32_precision = "ieee"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert roofline._peak("cuda", torch.float32, True, lambda: None, 1.0) == own and asked[-2:] == ["tf32", "ieee"]
