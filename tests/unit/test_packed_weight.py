from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.ops.packed import PackedWeight, from_plain, mxfp4_of_pairs, pack, refuse_other_formats, to_plain
from wavecrest.ops.packed import formats as _packed
from wavecrest.ops.packed.formats import DTYPES, FORMATS, FP8

ROOT = Path(__file__).parents[2]
ONE, BF16 = torch.ones, torch.bfloat16
HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-24}

# one of each kind, in shapes with tails wherever the format takes them
VARIANTS: dict[str, Callable[[], PackedWeight]] = {
    "plain": lambda: pack(weight(5, 7), "plain"),
    "shuffled": lambda: pack(weight(32, 96), "shuffled"),
    "shuffled-int8": lambda: pack(weight(32, 96), "shuffled", dtype=torch.int8, group=64),
    "shuffled-fp8": lambda: pack(weight(32, 96), "shuffled", dtype=torch.float8_e4m3fnuz),
    "int8": lambda: pack(weight(5, 70), "int8"),
    "int8-grouped": lambda: pack(weight(5, 70), "int8", group=32),
    "int4": lambda: pack(weight(5, 70), "int4", group=32),
    "int4-asymmetric": lambda: pack(weight(5, 200), "int4", symmetric=False),
    "mxfp4": lambda: pack(weight(5, 70), "mxfp4"),
    "fp8": lambda: pack(weight(5, 70), "fp8", dtype=torch.float8_e5m2),
    "fp8_block": lambda: pack(weight(130, 200), "fp8_block"),
    "empty": lambda: pack(weight(0, 70), "int4"),
}
variants = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in VARIANTS.items()])


def weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator, dtype=torch.float64)
    # rows and columns of very different size, so that a scale of the wrong place is far off
    return (w * torch.logspace(-3, 1, n).unsqueeze(1) * torch.logspace(0, 1, k)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    # clone: without elements, contiguous() keeps strides that view refuses
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(found: Any, expected: PackedWeight, shares: bool | None = None) -> None:
    assert type(found) is PackedWeight
    for name in ("format", "group", "shape", "dtype", "device"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("stored", "scale", "zero"):
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None, name
            continue
        assert one.dtype == other.dtype and one.shape == other.shape and one.device == other.device, name
        if not other.is_meta:
            assert torch.equal(bits(one), bits(other)), name
        if shares is not None and other.numel():
            assert (one.data_ptr() == other.data_ptr()) is shares, name


# ---------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, *FP8])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (32, 160)])
def test_shuffled_is_the_formula(n: int, k: int, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    kv = 16 // size
    integers = torch.int16 if size == 2 else torch.int8
    # all values of 8 bits, all places of 16
    source = torch.arange(n * k).to(integers).view(dtype).view(n, k)
    if size == 2:
        w = pack(source, "shuffled")
    else:
        shuffled = _packed.shuffled(source)
        w = PackedWeight.from_parts("shuffled", shuffled, scale=torch.ones(n, 1), dtype=torch.bfloat16)
    expected = source.view(integers).tolist()
    flat = w.stored.view(integers).flatten().tolist()
    for row in range(n):
        for column in range(k):
            tile = (row // 16) * (k // 32) + column // 32
            index = ((tile * (32 // kv) + (column % 32) // kv) * 16 + row % 16) * kv + column % kv
            assert flat[index] == expected[row][column], (row, column)
    # the other way of writing it: BN = 16, BK = 2 · 16
    six = source.view(-1, n // 16, 16, k // 32, 32 // kv, kv).permute(0, 1, 3, 4, 2, 5).contiguous().view(n, k)
    assert torch.equal(w.stored.view(integers), six.view(integers))
    assert torch.equal(_packed.unshuffled(w.stored).view(integers), source.view(integers))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_keeps_every_bit(dtype: torch.dtype) -> None:
    source = weight(6, 10, dtype)
    source[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    transposed = source.t()
    for given in (source, transposed, source[::2, 1::3]):
        w = pack(given, "plain")
        assert w.dtype == dtype and w.shape == given.shape and w.stored.is_contiguous()
        assert torch.equal(bits(w.unpack()), bits(given))
    assert pack(source, "plain").stored.data_ptr() == source.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shuffled_keeps_every_bit(dtype: torch.dtype) -> None:
    source = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    for given in (source, source.t(), source[::2, 64:160]):
        assert torch.equal(bits(pack(given, "shuffled").unpack()), bits(given))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("k", "group"), [(64, 64), (1, 32), (63, 32), (65, 32), (97, 32), (128, 128), (200, 64), (200, 128)]
)
def test_int4_element_by_element(k: int, group: int, symmetric: bool) -> None:
    n = 3
    source = weight(n, k)
    w = pack(source, "int4", group=group, symmetric=symmetric)
    padded, groups = -(-k // 64) * 64, -(-k // group)
    assert w.stored.dtype == torch.uint8 and w.stored.shape == (n, padded // 2)
    assert w.scale is not None and w.scale.shape == (n, groups) and w.scale.dtype == torch.float32
    assert (w.zero is None) is symmetric
    unpacked = w.dequantize_float32()
    assert unpacked.shape == (n, k)
    for row in range(n):
        for column in range(padded):
            unit, j = divmod(column, 64)
            byte = int(w.stored[row, unit * 32 + j % 32])
            code = byte & 15 if j < 32 else byte >> 4
            place = min(column // group, groups - 1)
            zero = 8 if w.zero is None else int(w.zero[row, place])
            if column >= k:
                assert code == zero, (row, column)
                continue
            scale = w.scale[row, place]
            assert code == max(0, min(15, round(float(source[row, column].float() / scale)) + zero)), (row, column)
            assert float(unpacked[row, column]) == float((code - zero) * scale), (row, column)


def test_int4_scale_and_zero() -> None:
    source = torch.tensor([[-7.0, 14.0, 0.0, 3.5], [2.0, 30.0, 5.0, 7.0], [-30.0, -2.0, -5.0, -7.0], [0.0] * 4])
    w = pack(source, "int4", group=32)
    assert w.scale is not None and torch.equal(w.scale, torch.tensor([[2.0], [30 / 7], [30 / 7], [1.0]]))
    w = pack(source, "int4", group=32, symmetric=False)
    # the range takes in 0: the second and third row start and end there
    assert w.scale is not None and torch.allclose(w.scale, torch.tensor([[1.4], [2.0], [2.0], [1.0]]))
    assert w.zero is not None and w.zero.tolist() == [[5], [0], [15], [0]]
    assert w.dequantize_float32()[1].tolist() == [2.0, 30.0, 4.0, 8.0]
    # also where a group has no padding that would bring it in
    for source in (torch.linspace(20, 30, 32)[None], torch.linspace(-30, -20, 32)[None]):
        w = pack(source, "int4", group=32, symmetric=False)
        assert w.scale is not None and w.scale.item() == 2.0 and w.zero is not None
        assert w.zero.item() == (0 if source[0, 0] > 0 else 15)


def test_int4_span_beyond_float32() -> None:
    source = torch.tensor([[-3e38, 3e38, 0.0, 1e38]])
    found = pack(source, "int4", group=32, symmetric=False).dequantize_float32()
    assert float((found - source).abs().max()) <= 2e37


# of the specification: sign, two bits of exponent with bias 1, one of mantissa
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("k", [64, 1, 31, 33, 97, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mxfp4_element_by_element(k: int, dtype: torch.dtype) -> None:
    """Scales and codes as section 6.3 of OCP MX 1.0 defines them, one at a time in exact arithmetic."""
    n = 3
    source = weight(n, k, dtype)
    source[1, : k // 2] = 0
    w = pack(source, "mxfp4")
    padded, groups = -(-k // 64) * 64, -(-k // 32)
    assert w.stored.dtype == torch.uint8 and w.stored.shape == (n, padded // 2) and w.zero is None
    assert w.scale is not None and w.scale.shape == (n, groups) and w.scale.dtype == torch.uint8
    unpacked = w.dequantize_float32()
    for row in range(n):
        for column in range(padded):
            unit, j = divmod(column, 64)
            byte = int(w.stored[row, unit * 32 + j % 32])
            code = byte & 15 if j < 32 else byte >> 4
            if column >= k:
                assert code == 0, (row, column)
                continue
            part = [Fraction(x) for x in source[row, column // 32 * 32 : (column // 32 + 1) * 32].tolist()]
            peak = float(max(map(abs, part)))
            exponent = math.floor(math.log2(peak)) - 2 if peak else 0
            assert int(w.scale[row, column // 32]) == exponent + 127, (row, column)
            value = Fraction(source[row, column].item()) / Fraction(2) ** exponent
            # the nearest, of two the one whose last bit is 0; beyond the largest the largest
            best = min(range(8), key=lambda one: (abs(Fraction(E2M1[one]) - abs(value)), one & 1))
            assert code & 7 == best and (code >> 3 == (value < 0) or value == 0), (row, column)
            assert float(unpacked[row, column]) == math.copysign(E2M1[best] * 2.0**exponent, (code >> 3 and -1) or 1)


def test_mxfp4_ties_and_what_is_too_large() -> None:
    # 4 gives a scale of 1; halfway between two neighbours the even code, 2.5 ulps included; 7.99 has no code
    source = torch.tensor([[4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 7.96875, -0.75, -5.0, -7.5, 0.2499]])
    w = pack(source, "mxfp4")
    assert w.scale is not None and w.scale.item() == 127
    want = [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0, -6.0, 0.0]
    assert w.dequantize_float32()[0].tolist() == want


def test_mxfp4_scales_at_their_ends() -> None:
    w = pack(torch.zeros(2, 70), "mxfp4")
    assert w.scale is not None and bool((w.scale == 127).all()) and bool((w.unpack() == 0).all())
    # the smallest scale, 2^-127, is subnormal in float32; what is below a quarter of it is 0
    w = pack(torch.tensor([[2.0**-127, 3 * 2.0**-128, 2.0**-128, 2.0**-130, -(2.0**-140)]]), "mxfp4")
    assert w.scale is not None and w.scale.item() == 0
    assert w.dequantize_float32()[0].tolist() == [2.0**-127, 3 * 2.0**-128, 2.0**-128, 0.0, 0.0]
    largest = torch.finfo(torch.float32).max
    w = pack(torch.tensor([[largest, -(2.0**127), 2.0**124]]), "mxfp4")
    assert w.scale is not None and w.scale.item() == 252
    assert w.dequantize_float32()[0].tolist() == [1.5 * 2.0**127, -(2.0**127), 2.0**124]
    # NaN and the largest scale come from elsewhere alone
    scale = torch.tensor([[255, 254]], dtype=torch.uint8)
    w = PackedWeight.from_parts("mxfp4", torch.full((1, 32), 0x21, dtype=torch.uint8), scale=scale, dtype=BF16)
    values = w.unpack()[0]
    assert bool(values[:32].isnan().all()) and bool((values[32:].float() == 2.0**127).all())


@pytest.mark.parametrize("k", [32, 64, 96])
def test_mxfp4_of_neighbours_in_a_byte(k: int) -> None:
    """As checkpoints have it; in gpt-oss's shape too, where transformers, if it is there, unpacks the same values."""
    pairs = torch.arange(6 * k // 2).mul(7).to(torch.uint8).reshape(6, k // 2)
    scale = torch.arange(6 * k // 32).to(torch.uint8).reshape(6, k // 32) + 115
    w = mxfp4_of_pairs(pairs, scale)
    assert w.format == "mxfp4" and w.shape == (6, k) and w.dtype == BF16
    for row in range(6):
        for column in range(k):
            code = int(pairs[row, column // 2]) >> 4 * (column % 2) & 15
            value = E2M1[code & 7] * 2.0 ** (int(scale[row, column // 32]) - 127) * (-1 if code > 7 else 1)
            assert float(w.dequantize_float32()[row, column]) == value, (row, column)
    assert_same(mxfp4_of_pairs(pairs.view(6, k // 32, 16), scale.view(torch.float8_e8m0fnu)), w)
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    unpacked = theirs(pairs.view(1, 6, k // 32, 16), scale[None], dtype=BF16)
    assert torch.equal(unpacked[0].mT, w.unpack())


@pytest.mark.parametrize(
    ("pairs", "scale", "match"),
    [
        (torch.zeros(4, 16), ONE(4, 1, dtype=torch.uint8), "pairs are uint8"),
        (torch.zeros(16, dtype=torch.uint8), ONE(4, 1, dtype=torch.uint8), "pairs are uint8"),
        (torch.zeros(4, 24, dtype=torch.uint8), ONE(4, 2, dtype=torch.uint8), "K in multiples of 32"),
        (torch.zeros(4, 16, dtype=torch.uint8), ONE(4, 2, dtype=torch.uint8), r"scales \[4, 1\]"),
        (torch.zeros(4, 16, dtype=torch.uint8), ONE(4, 1), "scale must be"),
    ],
)
def test_neighbours_that_are_no_mxfp4(pairs: Tensor, scale: Tensor, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        mxfp4_of_pairs(pairs, scale)


def test_mxfp4_of_float64_is_that_of_its_float32() -> None:
    source = weight(3, 70, torch.float64)
    assert_same(pack(source, "mxfp4").to(torch.float32), pack(source.float(), "mxfp4"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "format", "options"),
    [
        (5, 70, "int8", {}),
        (5, 1, "int8", {}),
        (7, 200, "int8", {"group": 32}),
        (3, 64, "int8", {"group": 64}),
        (2, 130, "int8", {"group": 128}),
        (32, 96, "shuffled", {"dtype": torch.int8}),
        (16, 160, "shuffled", {"dtype": torch.int8, "group": 64}),
        (5, 70, "int4", {"group": 32}),
        (5, 130, "int4", {}),
        (5, 70, "int4", {"group": 32, "symmetric": False}),
        (4, 257, "int4", {"group": 64, "symmetric": False}),
    ],
)
def test_error_of_integers_is_half_a_step(
    n: int, k: int, format: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    source = weight(n, k, dtype)
    w = pack(source, format, **options)
    assert w.dtype == dtype and w.scale is not None
    group = options.get("group", 128 if format == "int4" else k)
    largest = 127 if w.stored.dtype == torch.int8 else 7
    exact = source.double()
    for row in range(n):
        for start in range(0, k, group):
            part = exact[row, start : start + group]
            scale = float(w.scale[row, start // group])
            if w.zero is None:
                assert scale == pytest.approx(float(part.abs().max()) / largest, rel=1e-6)
            else:
                assert scale == pytest.approx(float(part.max().clamp_min(0) - part.min().clamp_max(0)) / 15, rel=1e-6)
            found = w.unpack()[row, start : start + group].double()
            bound = scale / 2 * (1 + 1e-4) + HALF_UNIT[dtype] * 2 * part.abs()
            assert bool(((found - part).abs() <= bound).all()), (row, start)
    # in no more than one rounding of what float32 gives
    assert torch.equal(w.unpack(), w.dequantize_float32().to(dtype))


@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize(("n", "k", "format"), [(5, 70, "fp8"), (130, 257, "fp8_block"), (32, 96, "shuffled")])
def test_error_of_fp8_is_half_a_unit(n: int, k: int, format: str, target: torch.dtype) -> None:
    source = weight(n, k)
    w = pack(source, format, dtype=target)
    assert w.stored.dtype == target and w.scale is not None
    largest = torch.finfo(target).max
    exact = source.double()
    if format == "fp8_block":
        assert w.scale.shape == (2, 3) and w.group == 128
        scale = torch.empty(n, k, dtype=torch.float64)
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                peak = exact[i : i + 128, j : j + 128].abs().max()
                assert float(w.scale[i // 128, j // 128]) == pytest.approx(float(peak) / largest, rel=1e-6)
                scale[i : i + 128, j : j + 128] = w.scale[i // 128, j // 128]
    else:
        assert w.scale.shape == (n, 1) and w.group == k
        assert torch.allclose(w.scale.double(), exact.abs().amax(1, keepdim=True) / largest, rtol=1e-6)
        scale = w.scale.double().expand(n, k)
    relative = 2.0**-4 if "e4m3" in str(target) else 2.0**-3
    bound = exact.abs() * (relative + 2.0**-8) + scale * torch.finfo(target).smallest_normal * relative * 1.01
    assert bool(((w.unpack().double() - exact).abs() <= bound).all())
    # values are those of torch's own conversion
    values = _packed.unshuffled(w.stored) if format == "shuffled" else w.stored
    assert torch.equal(values.float(), (source.float() / scale.float()).clamp(-largest, largest).to(target).float())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_block"])
def test_zeros_have_scale_one(format: str) -> None:
    w = pack(torch.zeros(3, 70), format)
    assert w.scale is not None and bool((w.scale == 1).all())
    assert bool((w.unpack() == 0).all())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_block"])
def test_tiny_weights_stay_finite(format: str) -> None:
    source = torch.full((2, 70), 1e-40)
    w = pack(source, format)
    assert w.scale is not None and bool((w.scale == 2.0**-126).all())
    assert bool(((w.unpack() - source).abs() <= 2.0**-127).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(0, 0), (0, 64), (16, 0), (0, 1), (3, 0)])
def test_empty(format: str, n: int, k: int) -> None:
    source = torch.zeros(n, k, dtype=torch.float16)
    if format == "shuffled" and (n % 16 or k % 32):
        with pytest.raises(InvalidArgument, match="multiples of 16"):
            pack(source, format)
        return
    w = pack(source, format)
    assert w.unpack().shape == (n, k) and w.unpack().dtype == torch.float16
    shapes = {
        "int8": (n, 1),
        "int4": (n, -(-k // 128)),
        "mxfp4": (n, -(-k // 32)),
        "fp8": (n, 1),
        "fp8_block": (-(-n // 128), -(-k // 128)),
    }
    assert (None if w.scale is None else tuple(w.scale.shape)) == shapes.get(format)
    assert_same(pickle.loads(pickle.dumps(w)), w)


def test_bytes() -> None:
    source = weight(16, 256)
    assert pack(source, "plain").bytes_ == 16 * 256 * 2
    assert pack(source, "int8").bytes_ == 16 * 256 + 16 * 4
    assert pack(source, "int4", group=32, symmetric=False).bytes_ == 16 * 128 + 16 * 8 * 5
    assert pack(source, "mxfp4").bytes_ == 16 * 128 + 16 * 8
    assert pack(source, "fp8_block").bytes_ == 16 * 256 + 2 * 4


def test_repr() -> None:
    text = repr(pack(weight(5, 70), "int4", group=32, symmetric=False))
    for part in (
        "int4",
        "shape=[5, 70]",
        "dtype=torch.bfloat16",
        "stored=uint8",
        "group=32",
        "asymmetric",
        "device=cpu",
    ):
        assert part in text
    assert "asymmetric" not in repr(pack(weight(5, 70), "int4"))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4", "fp8", "fp8_block", "shuffled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_where_it_has_no_code(format: str, value: float) -> None:
    source = weight(16, 32)
    source[3, 5] = value
    with pytest.raises(InvalidArgument, match="isfinite"):
        pack(source, format, dtype=torch.int8 if format == "shuffled" else None)


def test_beyond_float32_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="beyond float32"):
        pack(torch.full((2, 2), 1e300, dtype=torch.float64), "int8")


@pytest.mark.parametrize(
    ("source", "format", "options", "match"),
    [
        (torch.zeros(4, 4), "int3", {}, "format is plain"),
        (torch.zeros(4), "plain", {}, r"weight \[N, K\]"),
        (torch.zeros(4, 4, 4), "int8", {}, r"weight \[N, K\]"),
        (torch.zeros(4, 4, dtype=torch.int8), "int8", {}, "int8"),
        ([[1.0]], "int8", {}, "list"),
        (torch.zeros(15, 32, dtype=torch.float16), "shuffled", {}, "multiples of 16"),
        (torch.zeros(16, 48, dtype=torch.float16), "shuffled", {}, "multiples of 32"),
        (torch.zeros(16, 48), "shuffled", {"dtype": torch.int8}, "multiples of 32"),
        (torch.zeros(16, 32), "shuffled", {}, "does not store torch.float32"),
        (torch.zeros(16, 32, dtype=torch.float16), "shuffled", {"dtype": torch.bfloat16}, "does not store"),
        (torch.zeros(4, 4), "plain", {"dtype": torch.float16}, "does not store"),
        (torch.zeros(4, 4), "int8", {"dtype": torch.uint8}, "does not store"),
        (torch.zeros(4, 4), "fp8", {"dtype": torch.int8}, "does not store"),
        (torch.zeros(4, 64), "int8", {"group": 16}, "group of int8"),
        (torch.zeros(4, 64), "int4", {"group": 48}, "group of int4"),
        (torch.zeros(4, 60), "int4", {"group": 60}, "group of int4"),
        (torch.zeros(4, 64), "mxfp4", {"group": 64}, "group of mxfp4"),
        (torch.zeros(4, 64), "mxfp4", {"symmetric": False}, "only int4"),
        (torch.zeros(4, 64), "fp8", {"group": 32}, "group of fp8"),
        (torch.zeros(4, 64), "fp8_block", {"group": 64}, "group of fp8_block"),
        (torch.zeros(4, 64), "plain", {"group": 32}, "group of plain"),
        (torch.zeros(16, 64), "shuffled", {"dtype": torch.float8_e5m2, "group": 32}, "group of shuffled"),
        (torch.zeros(4, 64), "int8", {"symmetric": False}, "only int4"),
    ],
)
def test_pack_refuses(source: Any, format: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        pack(source, format, **options)


def test_pack_refuses_what_is_packed() -> None:
    with pytest.raises(InvalidArgument, match=r"pack weight\.unpack"):
        pack(pack(weight(4, 4), "int8"), "int8")


def test_no_other_way_to_make_one() -> None:
    with pytest.raises(InvalidArgument, match="from_parts"):
        PackedWeight(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("format", "stored", "options", "match"),
    [
        ("int2", torch.zeros(4, 4), {}, "format is"),
        ("plain", torch.zeros(4, 4, dtype=torch.int8), {}, "plain stores"),
        ("plain", torch.zeros(4), {}, "plain stores"),
        ("plain", [[1.0]], {}, "list"),
        ("plain", torch.zeros(4, 4), {"scale": ONE(4, 1)}, "no scale"),
        ("plain", torch.zeros(4, 4), {"zero": ONE(4, 1)}, "no zero"),
        ("plain", torch.zeros(4, 4), {"dtype": BF16}, "stand for that dtype"),
        ("plain", torch.zeros(4, 4), {"shape": (4, 5)}, r"stores \[4, 5\]"),
        ("plain", torch.zeros(4, 4), {"shape": (4, 4, 1)}, "shape is"),
        ("shuffled", torch.zeros(16, 48, dtype=BF16), {}, "multiples of 32"),
        ("shuffled", torch.zeros(16, 32), {}, "shuffled stores"),
        ("shuffled", torch.zeros(16, 32, dtype=torch.int8), {"dtype": BF16}, "scale must be"),
        ("int8", torch.zeros(4, 64, dtype=torch.int8), {"scale": ONE(4, 1)}, "dtype is"),
        ("int8", torch.zeros(4, 64, dtype=torch.int8), {"scale": ONE(4, 1), "dtype": torch.int8}, "dtype is"),
        ("int8", torch.zeros(4, 64, dtype=torch.int8), {"dtype": BF16}, "scale must be"),
        ("int8", torch.zeros(4, 64, dtype=torch.int8), {"scale": ONE(4), "dtype": BF16}, "scale must be"),
        ("int8", torch.zeros(4, 64, dtype=torch.int8), {"scale": ONE(4, 2), "dtype": BF16}, "scale must be"),
        (
            "int8",
            torch.zeros(4, 64, dtype=torch.int8),
            {"scale": ONE(4, 1), "group": 32, "dtype": BF16},
            "scale must be",
        ),
        (
            "int8",
            torch.zeros(4, 64, dtype=torch.int8),
            {"scale": ONE(4, 1, dtype=BF16), "dtype": BF16},
            "scale must be",
        ),
        (
            "int8",
            torch.zeros(4, 64, dtype=torch.int8),
            {"scale": ONE(4, 1, device="meta"), "dtype": BF16},
            "is on meta",
        ),
        (
            "int8",
            torch.zeros(4, 64, dtype=torch.int8),
            {"scale": ONE(4, 1), "zero": torch.zeros(4, 1, dtype=torch.uint8), "dtype": BF16},
            "no zero",
        ),
        ("int8", torch.zeros(4, 64, dtype=torch.uint8), {"scale": ONE(4, 1), "dtype": BF16}, "int8 stores"),
        ("int4", torch.zeros(4, 32, dtype=torch.uint8), {"scale": ONE(4, 1), "dtype": BF16}, "group of int4"),
        ("int4", torch.zeros(4, 32, dtype=torch.int8), {"scale": ONE(4, 2), "group": 32, "dtype": BF16}, "int4 stores"),
        (
            "int4",
            torch.zeros(4, 33, dtype=torch.uint8),
            {"scale": ONE(4, 2), "group": 64, "dtype": BF16},
            r"stores \[4, 64\]",
        ),
        (
            "int4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 3), "group": 32, "dtype": BF16, "shape": (4, 65)},
            r"stores \[4, 64\]",
        ),
        (
            "int4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 2), "zero": torch.zeros(4, 2), "group": 32, "dtype": BF16},
            "zero must be",
        ),
        (
            "int4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 2), "zero": torch.zeros(4, 1, dtype=torch.uint8), "group": 32, "dtype": BF16},
            "zero must be",
        ),
        (
            "mxfp4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 2), "dtype": BF16},
            r"scale must be torch\.uint8 \[4, 2\]",
        ),
        (
            "mxfp4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 1, dtype=torch.uint8), "dtype": BF16},
            "scale must be",
        ),
        (
            "mxfp4",
            torch.zeros(4, 32, dtype=torch.uint8),
            {"scale": ONE(4, 2, dtype=torch.uint8), "zero": ONE(4, 2, dtype=torch.uint8), "dtype": BF16},
            "no zero",
        ),
        ("fp8", torch.zeros(4, 64).to(torch.float8_e5m2), {"scale": ONE(1, 1), "dtype": BF16}, "scale must be"),
        ("fp8_block", torch.zeros(130, 64).to(torch.float8_e5m2), {"scale": ONE(1, 1), "dtype": BF16}, "scale must be"),
        ("fp8", torch.zeros(4, 64, dtype=BF16), {"scale": ONE(4, 1), "dtype": BF16}, "fp8 stores"),
    ],
)
def test_from_parts_refuses(format: str, stored: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        PackedWeight.from_parts(format, stored, **options)


def test_from_parts_refuses_packed_parts() -> None:
    inner = pack(weight(4, 4), "plain")
    with pytest.raises(InvalidArgument, match="plain tensors"):
        PackedWeight.from_parts("plain", inner)


@variants
def test_from_parts_is_the_inverse_of_the_parts(make: Callable[[], PackedWeight]) -> None:
    w = make()
    options = {"scale": w.scale, "zero": w.zero, "group": w.group, "shape": w.shape, "dtype": w.dtype}
    assert_same(PackedWeight.from_parts(w.format, w.stored, **options), w, shares=True)
    # views with gaps are copied
    wide = torch.cat([w.stored, w.stored], dim=1)[:, : w.stored.shape[1]]
    if w.scale is not None:
        options["scale"] = torch.stack([w.scale, w.scale], dim=2)[..., 0]
    if w.zero is not None:
        options["zero"] = w.zero.t().contiguous().t()
    found = PackedWeight.from_parts(w.format, wide, **options)
    assert_same(found, w, shares=False)
    assert all(part.is_contiguous() for part in found._parts().values())


@pytest.fixture(params=["grad", "no_grad", "inference_mode"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with modes[request.param]():
        yield request.param


X = torch.ones(2, 70, dtype=torch.bfloat16)
REFUSED: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: nn.functional.linear(X, w),
    "linear-bias": lambda w: nn.functional.linear(X, w, torch.zeros(5, dtype=torch.bfloat16)),
    "matmul": lambda w: w @ X.t(),
    "mm-out": lambda w: torch.mm(X.t(), X, out=w),
    "einsum": lambda w: torch.einsum("mk,nk->mn", X, w),
    "bmm": lambda w: torch.bmm(X[None], w[None]),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([1]), w),
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "add-in-place": lambda w: w.add_(1),
    "add-to-plain": lambda w: X.clone().add_(w[:2]),
    "eq": lambda w: w == w,
    "equal": lambda w: torch.equal(w, w),
    "sum": lambda w: w.sum(),
    "abs": lambda w: w.abs(),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "index": lambda w: w[0],
    "slice": lambda w: w[:, 2:4],
    "mask": lambda w: w[torch.tensor([True] * 5)],
    "assign": lambda w: w.__setitem__(0, 1.0),
    "iterate": lambda w: list(w),
    "chunk": lambda w: w.chunk(2, dim=0),
    "cat": lambda w: torch.cat([X, w]),
    "stack": lambda w: torch.stack([w, w]),
    "view": lambda w: w.view(70, 5),
    "view-dtype": lambda w: w.view(torch.int16),
    "reshape": lambda w: w.reshape(-1),
    "as_strided": lambda w: w.as_strided((5, 70), (70, 1), 1),
    "as_strided-other": lambda w: w.as_strided((5, 70), (1, 5)),
    "expand": lambda w: w.expand(2, 5, 70),
    "copy-to-plain": lambda w: torch.empty(5, 70).copy_(w),
    "zero_": lambda w: w.zero_(),
    "fill": lambda w: nn.init.zeros_(w),
    "zeros_like": lambda w: torch.zeros_like(w),
    "new_zeros": lambda w: w.new_zeros(3),
    "to_sparse": lambda w: w.to_sparse(),
    "set-data": lambda w: setattr(w, "data", X),
    "requires_grad": lambda w: w.requires_grad_(),
    "requires_grad-set": lambda w: setattr(w, "requires_grad", True),
    "parameter": lambda w: nn.Parameter(w),
    "data_ptr": lambda w: w.data_ptr(),
    "from_dlpack": lambda w: torch.from_dlpack(w),
    "dlpack": lambda w: w.__dlpack__(),
    "storage": lambda w: w.storage(),
}


# formats, and the rows that a scale or a tile of each joins
CUT: list[tuple[str, dict[str, Any], int]] = [
    ("plain", {}, 1), ("int8", {}, 1), ("int8", {"group": 64}, 1), ("int4", {"group": 64}, 1), ("mxfp4", {}, 1),
    ("int4", {"group": 32, "symmetric": False}, 1), ("fp8", {}, 1), ("fp8_block", {}, 128), ("shuffled", {}, 16),
]  # fmt: skip


@pytest.mark.parametrize(("format", "options", "unit"), CUT)
def test_rows_are_cut_and_joined(format: str, options: dict[str, Any], unit: int) -> None:
    parts = [pack(weight(rows * unit, 192), format, **options) for rows in (3, 2, 1)]
    whole = torch.cat(parts)
    assert torch.equal(whole.unpack(), torch.cat([part.unpack() for part in parts]))
    for start, part in zip((0, 3, 5), parts, strict=True):
        cut = whole[start * unit : start * unit + len(part)]
        assert_same(cut, part)
        # a view
        assert cut.stored.untyped_storage().data_ptr() == whole.stored.untyped_storage().data_ptr()
    assert_same(torch.ops.aten.slice.Tensor(whole, 0, 3 * unit), whole[3 * unit :])
    for refused in (
        lambda: whole[:, :64], lambda: whole[::2], lambda: whole[0:0], lambda: torch.cat(parts, 1),
        lambda: torch.cat([parts[0], parts[1].unpack()]), lambda: torch.cat([parts[0].unpack(), parts[1]]),
        lambda: torch.cat([parts[0], pack(weight(unit, 192), "plain" if format != "plain" else "int8")]),
    ):  # fmt: skip
        with pytest.raises(Unsupported, match=r"does not take a packed weight"):
            refused()
    if unit > 1:
        with pytest.raises(Unsupported):
            whole[1:]
        with pytest.raises(Unsupported):
            torch.cat([pack(weight(200, 192), "fp8_block"), parts[0]]) if unit == 128 else whole[: unit + 1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("make", ["plain", "int8", "int4"])
def test_torch_ops_are_refused(make: str, name: str, mode: str) -> None:
    w = pack(weight(5, 70), make)
    before = copy.deepcopy(w)
    with pytest.raises(Unsupported) as caught:
        REFUSED[name](w)
    advice = r"wavecrest\.ops\.linear, or \.unpack\(\)|nn\.Parameter|to_plain"
    assert re.search(advice, str(caught.value)), caught.value
    assert_same(w, before)


@pytest.mark.parametrize("call", [lambda w: w.numpy(), lambda w: w.tolist(), lambda w: bool(w), lambda w: float(w)])
def test_values_are_not_handed_out(call: Callable[[Any], Any]) -> None:
    for shape in ((5, 70), (1, 1)):
        with pytest.raises((RuntimeError, Unsupported, ValueError)):
            call(pack(weight(*shape), "int8"))


def test_the_refusal_names_the_op_and_the_weight() -> None:
    w = pack(weight(5, 70), "int4", group=32)
    with pytest.raises(
        Unsupported, match=r"aten\.t \(a transpose, also F\.linear's\).*int4, shape=\[5, 70\].*group=32"
    ):
        nn.functional.linear(X, w)
    with pytest.raises(Unsupported, match=r"aten\.mm does not take"):
        w @ X.t()


# ---------------------------------------------------------------------------------------------------- survival


@variants
def test_parameter(make: Callable[[], PackedWeight], mode: str) -> None:
    w = make()
    parameter = nn.Parameter(w, requires_grad=False)
    assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
    assert_same(parameter, w, shares=True)
    assert torch.equal(bits(parameter.unpack()), bits(w.unpack()))
    assert not isinstance(parameter.data, nn.Parameter) and not isinstance(parameter.detach(), nn.Parameter)


@variants
def test_detach_data_alias_clone(make: Callable[[], PackedWeight], mode: str) -> None:
    w = make()
    assert_same(w.detach(), w, shares=True)
    assert_same(w.data, w, shares=True)
    assert_same(torch.ops.aten.alias(w), w, shares=True)
    assert_same(w.as_strided(w.size(), w.stride()), w, shares=True)
    assert_same(w.contiguous(), w, shares=True)
    assert_same(w.clone(), w, shares=False)
    assert_same(torch.clone(w, memory_format=torch.contiguous_format), w, shares=False)


@variants
def test_to_device(make: Callable[[], PackedWeight], mode: str) -> None:
    w = make()
    assert w.to("cpu") is w and w.cpu() is w
    assert_same(w.to("cpu", copy=True), w, shares=False)
    moved = w.to("meta")
    assert type(moved) is PackedWeight and moved.device.type == "meta"
    assert all(part.is_meta for part in moved._parts().values()) and moved._parts().keys() == w._parts().keys()
    assert (moved.format, moved.group, moved.shape, moved.dtype) == (w.format, w.group, w.shape, w.dtype)
    assert moved.unpack().shape == w.shape and moved.unpack().is_meta
    # room on another device, to be filled by load_state_dict
    room = torch.empty_like(moved, device="cpu")
    room.copy_(w)
    assert_same(room, w, shares=False)


@pytest.mark.gpu
@variants
def test_cuda(make: Callable[[], PackedWeight]) -> None:
    w = make()
    moved = w.cuda()
    assert moved.device.type == "cuda" and all(part.device.type == "cuda" for part in moved._parts().values())
    assert torch.equal(bits(moved.unpack().cpu()), bits(w.unpack()))
    assert_same(moved.cpu(), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", ["int8", "int4-asymmetric", "fp8", "fp8_block", "shuffled-int8"])
def test_to_dtype_keeps_codes(make: str, dtype: torch.dtype, mode: str) -> None:
    w = VARIANTS[make]()
    for moved in (w.to(dtype), w.type(dtype), w.to(torch.empty(0, dtype=dtype))):
        assert moved.dtype == dtype and moved.unpack().dtype == dtype
        parts = moved._parts()
        assert all(torch.equal(bits(parts[name]), bits(part)) for name, part in w._parts().items())
        assert torch.equal(moved.unpack(), w.dequantize_float32().to(dtype))


def test_to_dtype_converts_values_that_are_not_quantized(mode: str) -> None:
    source = weight(32, 64)
    for dtype in DTYPES:
        moved = pack(source, "plain").to(dtype)
        assert moved.dtype == dtype and torch.equal(moved.unpack(), source.to(dtype))
    moved = pack(source, "shuffled").half()
    assert_same(moved, pack(source.half(), "shuffled"))
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(Unsupported, match="shuffled does not store"):
            pack(source, "shuffled").to(dtype)


@variants
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_to_other_dtypes_is_refused(make: Callable[[], PackedWeight], dtype: torch.dtype, mode: str) -> None:
    with pytest.raises(InvalidArgument, match="stands for bfloat16, float16, float32, float64, not"):
        make().to(dtype)


@variants
def test_deepcopy_and_pickle(make: Callable[[], PackedWeight]) -> None:
    w = make()
    parameter = nn.Parameter(w, requires_grad=False)
    for given in (w, parameter):
        for found in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
            assert_same(found, w, shares=False)
            assert isinstance(found, nn.Parameter) is isinstance(given, nn.Parameter)
    assert_same(copy.copy(w), w, shares=True)
    # what is tied stays tied
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second


@variants
def test_torch_save_and_load(make: Callable[[], PackedWeight]) -> None:
    w = make()
    for given in (w, nn.Parameter(w, requires_grad=False)):
        file = io.BytesIO()
        torch.save({"w": given, "again": given}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same(loaded["w"], w, shares=False)
        assert isinstance(loaded["w"], nn.Parameter) is isinstance(given, nn.Parameter)
        assert loaded["w"] is loaded["again"]
        file.seek(0)
        moved = torch.load(file, weights_only=True, map_location="meta")["w"]
        assert moved.device.type == "meta" and moved.stored.is_meta


def test_torch_load_in_a_fresh_process(tmp_path: Path) -> None:
    w = pack(weight(5, 70), "int4", group=32)
    torch.save({"w": w}, tmp_path / "weights.pt")
    code = (
        "import sys, torch, wavecrest.ops.packed\n"
        "w = torch.load(sys.argv[1], weights_only=True)['w']\n"
        "assert type(w) is wavecrest.ops.packed.PackedWeight and w.unpack().shape == (5, 70), w"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "weights.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_damaged_pickle_is_refused() -> None:
    w = pack(weight(5, 70), "int8")
    rebuild, arguments = w.__reduce_ex__(2)
    damaged = list(arguments)
    damaged[2] = torch.ones(4, 1)
    with pytest.raises(InvalidArgument, match="scale must be"):
        rebuild(*damaged)


def holder(w: PackedWeight) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(w, requires_grad=False)
    module.register_buffer("spare", w.clone())
    module.bias = nn.Parameter(torch.zeros(3))
    module.register_load_state_dict_pre_hook(refuse_other_formats)
    root = nn.Module()
    root.layer = module
    return root


def weights_of(root: nn.Module) -> tuple[PackedWeight, PackedWeight]:
    layer = root.get_submodule("layer")
    found = layer.get_parameter("weight"), layer.get_buffer("spare")
    return found


@variants
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(make: Callable[[], PackedWeight], assign: bool) -> None:
    w = make()
    state = holder(w).state_dict()
    assert list(state) == ["layer.weight", "layer.bias", "layer.spare"]
    assert_same(state["layer.weight"], w, shares=True)
    other = holder(torch.empty_like(w))
    for part in weights_of(other)[0]._parts().values():
        part.view(torch.uint8).fill_(77)
    before = weights_of(other)[0]
    kept = before.stored.data_ptr() if w.numel() else None
    assert other.load_state_dict(state, assign=assign)
    parameter, buffer = weights_of(other)
    assert isinstance(parameter, nn.Parameter) and not isinstance(buffer, nn.Parameter)
    assert_same(parameter, w, shares=assign)
    assert_same(buffer, w)
    if not assign:
        assert parameter is before and (kept is None or parameter.stored.data_ptr() == kept)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda w: pack(w, "int8"), lambda w: pack(w, "int4")),
        (lambda w: pack(w, "shuffled"), lambda w: pack(w, "plain")),
        (lambda w: pack(w, "plain"), lambda w: pack(w, "shuffled")),
        (lambda w: pack(w, "plain"), lambda w: w),
        (lambda w: pack(w, "shuffled"), lambda w: w),
        (lambda w: pack(w, "int8"), lambda w: pack(w, "int8", group=32)),
        (lambda w: pack(w, "int4"), lambda w: pack(w, "int4", group=64)),
        (lambda w: pack(w, "int4"), lambda w: pack(w, "int4", symmetric=False)),
        (lambda w: pack(w, "int4", symmetric=False), lambda w: pack(w, "int4")),
        (lambda w: pack(w, "fp8"), lambda w: pack(w, "fp8", dtype=torch.float8_e4m3fnuz)),
        (lambda w: pack(w, "shuffled"), lambda w: pack(w, "shuffled", dtype=torch.int8)),
        (lambda w: pack(w, "shuffled", dtype=torch.int8), lambda w: pack(w, "shuffled", dtype=torch.float8_e4m3fn)),
    ],
)
def test_state_dict_of_another_format_is_refused(
    make: Callable[[Tensor], PackedWeight], given: Callable[[Tensor], Any], assign: bool
) -> None:
    source = weight(16, 160)
    root = holder(make(source))
    before = copy.deepcopy(weights_of(root)[0])
    names = ("layer.weight", "layer.spare")
    for name, other in (names, names[::-1]):
        state = {name: given(source), other: make(source), "layer.bias": torch.ones(3)}
        with pytest.raises(InvalidArgument if assign else RuntimeError, match=re.escape(name)) as caught:
            root.load_state_dict(state, assign=assign)
        assert re.search("pack both alike|pack it first", str(caught.value)), caught.value
        assert other not in str(caught.value) and "layer.bias" not in str(caught.value)
        assert_same(weights_of(root)[0], before)
        assert_same(weights_of(root)[1], before)
        root = holder(make(source))


def test_packed_into_a_plain_module_is_refused() -> None:
    module = nn.Linear(70, 5, bias=False, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"aten\.copy_ does not take a packed weight"):
        module.load_state_dict({"weight": pack(weight(5, 70), "int8")})


def test_load_converts_dtype_as_plain_tensors_do() -> None:
    source = weight(16, 64)
    root = holder(pack(source.half(), "shuffled"))
    root.load_state_dict(holder(pack(source, "shuffled")).state_dict())
    assert_same(weights_of(root)[0], pack(source.half(), "shuffled"))
    root = holder(pack(source, "int8").to(torch.float16))
    root.load_state_dict(holder(pack(source * 2, "int8")).state_dict())
    assert_same(weights_of(root)[0], pack(source * 2, "int8").to(torch.float16))


@variants
def test_module_moves(make: Callable[[], PackedWeight]) -> None:
    w = make()
    root = holder(w)
    parameter = weights_of(root)[0]
    if w.format != "plain" and w.scale is not None:
        root.float()
        assert weights_of(root)[0].dtype == torch.float32 and torch.equal(
            bits(weights_of(root)[0].stored), bits(w.stored)
        )
        root.to(torch.bfloat16)
    assert_same(weights_of(root)[0], w)
    root.to("meta")
    for found in weights_of(root):
        assert type(found) is PackedWeight and found.stored.is_meta and found.format == w.format
    assert isinstance(weights_of(root)[0], nn.Parameter)
    # the parameter object stays, so that what is tied stays tied
    assert weights_of(root)[0] is parameter
    root.to_empty(device="cpu")
    assert root.load_state_dict(holder(w).state_dict())
    for found in weights_of(root):
        assert_same(found, w)
    clone = copy.deepcopy(root)
    assert_same(weights_of(clone)[0], w, shares=False)
    with pytest.raises(Unsupported, match="no gradient"):
        root.requires_grad_(True)
    root.requires_grad_(False)


def test_pack_on_meta() -> None:
    for format in FORMATS:
        w = pack(torch.empty(32, 96, dtype=torch.bfloat16, device="meta"), format)
        real = pack(weight(32, 96), format)
        assert w.is_meta and w.stored.shape == real.stored.shape and w.unpack().shape == (32, 96)
        assert w.scale is None or (real.scale is not None and w.scale.shape == real.scale.shape)


def test_shared_memory() -> None:
    w = pack(weight(5, 70), "int8")
    assert not w.is_shared()
    assert w.share_memory_() is w and w.is_shared() and w.stored.is_shared()


def test_safetensors_round_trip(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state: dict[str, Any] = {name: make() for name, make in VARIANTS.items()}
    state["layer.0.weight"] = nn.Parameter(pack(weight(5, 70), "int8"), requires_grad=False)
    state["bias"] = torch.arange(5.0)
    plain = to_plain(state)
    assert all(type(value) is Tensor for value in plain.values())
    about = json.loads(bytes(plain["int4-asymmetric.packed_weight"].tolist()))
    assert about == {
        "version": 1,
        "format": "int4",
        "shape": [5, 200],
        "dtype": "bfloat16",
        "group": 128,
        "parts": ["stored", "scale", "zero"],
    }
    assert plain["int4-asymmetric.stored"].data_ptr() == state["int4-asymmetric"].stored.data_ptr()
    safetensors.save_file(plain, tmp_path / "model.safetensors")
    loaded = from_plain(safetensors.load_file(tmp_path / "model.safetensors"))
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded.pop("bias"), state.pop("bias"))
    for name, value in state.items():
        assert_same(loaded[name], value)


def test_safetensors_without_to_plain_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(Unsupported, match="to_plain"):
        safetensors.save_file({"w": pack(weight(5, 70), "int8")}, tmp_path / "model.safetensors")


def test_from_plain_refuses_what_does_not_fit() -> None:
    plain = to_plain({"w": pack(weight(5, 70), "int4", symmetric=False)})

    def metadata(**changes: Any) -> Tensor:
        about = {**json.loads(bytes(plain["w.packed_weight"].tolist())), **changes}
        return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)

    without = {name: value for name, value in plain.items() if name != "w.zero"}
    cases = [
        (without, "saved as stored, scale, zero"),
        ({**plain, "w.packed_weight": metadata(parts=["stored", "scale"])}, "saved as stored, scale;"),
        ({**plain, "w.packed_weight": metadata(version=2)}, "version 2"),
        ({**plain, "w.packed_weight": metadata(format="int5")}, "w: packed weight: format"),
        ({**plain, "w.packed_weight": metadata(format=None)}, "damaged"),
        ({**plain, "w.packed_weight": metadata(shape=[5, 130])}, r"w: .*stores \[5, 96\]"),
        ({**plain, "w.packed_weight": metadata(dtype="int8")}, "w: packed weight: dtype"),
        ({**plain, "w.packed_weight": metadata(group=32)}, "w: packed weight: the scale"),
        ({**plain, "w.packed_weight": plain["w.packed_weight"][:-1]}, "damaged"),
        ({**plain, "w.packed_weight": plain["w.packed_weight"].float() + 0.5}, "damaged"),
        ({**plain, "w.packed_weight": plain["w.packed_weight"].to("meta")}, "damaged"),
        ({**plain, "w.stored": plain["w.stored"].to(torch.int8)}, "int4 stores"),
    ]
    for state, match in cases:
        with pytest.raises(InvalidArgument, match=match):
            from_plain(state)


@pytest.mark.parametrize("taken", ["w.stored", "w.scale", "w.zero", "w.packed_weight"])
def test_to_plain_refuses_names_that_are_taken(taken: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{taken} would be"):
        to_plain({"w": pack(weight(5, 70), "int8"), taken: torch.zeros(1)})


# ---------------------------------------------------------------------------------------------------- torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable[[Any], Any]]:
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def reads_parts(x: Tensor, w: PackedWeight) -> Tensor:
    values = w.stored.float()
    if w.scale is not None and w.format == "int8":
        values = values * w.scale.repeat_interleave(w.group, 1)[:, : w.shape[1]]
    return x.float() @ values.t() + w.group + (1 if w.zero is None else 0)


@pytest.mark.parametrize("make", ["plain", "shuffled", "int8", "int8-grouped", "fp8", "fp8_block"])
def test_compile_reads_parts(make: str, compiled: Callable[[Any], Any]) -> None:
    w = VARIANTS[make]()
    x = torch.randn(3, w.shape[1])
    assert torch.equal(compiled(reads_parts)(x, w), reads_parts(x, w))


@variants
def test_compile_unpacks(make: Callable[[], PackedWeight], compiled: Callable[[Any], Any]) -> None:
    class Layer(nn.Module):
        def __init__(self, w: PackedWeight) -> None:
            super().__init__()
            self.weight = nn.Parameter(w, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.unpack())

    w = make()
    layer = Layer(w)
    x = torch.randn(3, w.shape[1]).to(w.dtype)
    function = compiled(layer)
    assert torch.equal(function(x), layer(x))
    # the values are inputs of the graph, not constants in it
    w.stored.view(torch.uint8).fill_(17)
    assert torch.equal(function(x).nan_to_num(), layer(x).nan_to_num())


def test_compile_tells_formats_apart(compiled: Callable[[Any], Any]) -> None:
    function = compiled(lambda w: w.unpack())
    source = weight(32, 96)
    for format in (*FORMATS, "plain"):
        w = pack(source, format)
        assert torch.equal(function(w), w.unpack()), format
    for n in (16, 48, 80):
        w = pack(weight(n, 96), "int8")
        assert torch.equal(function(w), w.unpack()), n


def test_compile_returns_packed_weights(compiled: Callable[[Any], Any]) -> None:
    w = pack(weight(5, 70), "int4", symmetric=False)
    assert_same(compiled(lambda given: given.clone())(w), w, shares=False)
    assert_same(compiled(lambda given: given.detach())(w), w, shares=True)
    assert_same(compiled(lambda given: given.to(torch.float16))(w), w.to(torch.float16))


def test_compile_refuses_other_ops(compiled: Callable[[Any], Any]) -> None:
    w = pack(weight(5, 70), "int8")
    with pytest.raises(Exception, match="does not take a packed weight"):
        compiled(lambda x, w: nn.functional.linear(x, w))(X, w)


# ---------------------------------------------------------------------------------------------------- the page


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "packed_weights.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "packed_weights.md", "exec"), names)
    for format in FORMATS:
        assert f"`{format}`" in page
