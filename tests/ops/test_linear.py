"""`linear` with plain weights and every format of packed ones, against values unpacked in float64."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    I8,
    KERNELS,
    SPLIT,
    Watch,
    assert_near,
    assert_result,
    assert_right,
    bound_of,
    machine,
    multiply,
    oracle,
    quicken,
    random,
    refuses,
    scaled_b,
    scales,
    stream,
    tile,
    watched,
    whole,
)
from tests.ops.op_harness import assert_call_never_copies, name, same_bits, shape_id
from wavecrest import ops
from wavecrest.dispatch.tuned import Config, spaces
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.call import linear_call as operands
from wavecrest.ops._gemm.config import gemv
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops._gemm.study import space
from wavecrest.ops.packed import PackedWeight, pack


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- packed weights


def weights(n: int, k: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    """Rows and columns of very different size, so that a scale of the wrong place is far off."""
    w = random(n, k, dtype=torch.float64, seed=3) * torch.logspace(-1, 1, max(n, 1))[:n, None]
    return (w * torch.logspace(0, 1, max(k, 1))[:k]).to(dtype).to(device)


def e2m1(codes: Tensor) -> Tensor:
    """The values of 4-bit floats in float64, from their bits: sign, two of exponent with bias 1, one of mantissa."""
    exponent, mantissa = codes % 8 // 2, codes % 2
    size = torch.where(exponent > 0, torch.exp2(exponent.double() - 1) * (1 + mantissa / 2), mantissa.double() / 2)
    return torch.where(codes >= 8, -size, size)


def values_of(weight: PackedWeight) -> Tensor:
    """[N, K] in float64, element by element from where the formats say it lies."""
    n, k = weight.shape
    stored, group = weight.stored.cpu(), weight.group
    row, column = torch.arange(n)[:, None], torch.arange(k)[None, :]
    if weight.format in ("int4", "mxfp4"):
        byte = stored[row, column // 64 * 32 + column % 32].int()
        code = torch.where(column % 64 < 32, byte % 16, byte // 16).double()
    if weight.format == "mxfp4":
        exponent = weight.scale.cpu().double()[row, column // 32] - 127  # type: ignore[union-attr]
        return e2m1(code) * torch.where(exponent < 128, torch.exp2(exponent), float("nan"))
    if weight.format == "int4":
        zero = 8.0 if weight.zero is None else weight.zero.cpu().double()[row, column // group]
        return (code - zero) * weight.scale.cpu().double()[row, column // group]  # type: ignore[union-attr]
    if weight.format == "shuffled":
        run = 16 // stored.itemsize
        tile_of = row // 16 * (k // 32) + column // 32
        place = ((tile_of * (32 // run) + column % 32 // run) * 16 + row % 16) * run + column % run
        values = stored.flatten().float().double()[place]
    else:
        values = stored.float().double() if stored.itemsize == 1 else stored.double()
    if weight.scale is None:
        return values
    scale = weight.scale.cpu().double()
    if weight.format == "fp8_block":
        return values * scale[row // 128, column // 128]
    return values * (scale if scale.shape[1] <= 1 else scale[row, column // group])


def _packed(format: str, **options: Any) -> Callable[[int, int, torch.dtype, str], PackedWeight]:
    return lambda n, k, dtype, device: pack(weights(n, k, dtype, device), format, **options)


# id -> N, K, dtype, device -> a packed weight
FORMATS: dict[str, Callable[[int, int, torch.dtype, str], PackedWeight]] = {
    "plain": _packed("plain"),
    "shuffled": _packed("shuffled"),
    "shuffled-int8": _packed("shuffled", dtype=I8),
    "shuffled-int8-64": _packed("shuffled", dtype=I8, group=64),
    "shuffled-e4m3": _packed("shuffled", dtype=E4M3),
    "int8": _packed("int8"),
    "int8-32": _packed("int8", group=32),
    "int8-64": _packed("int8", group=64),
    "int8-128": _packed("int8", group=128),
    "int4-32": _packed("int4", group=32),
    "int4-64": _packed("int4", group=64),
    "int4-128": _packed("int4", group=128),
    "int4-32-zeros": _packed("int4", group=32, symmetric=False),
    "int4-64-zeros": _packed("int4", group=64, symmetric=False),
    "int4-128-zeros": _packed("int4", group=128, symmetric=False),
    "mxfp4": _packed("mxfp4"),
    "e4m3": _packed("fp8"),
    "e5m2": _packed("fp8", dtype=E5M2),
    "e4m3-block": _packed("fp8_block"),
}


def stored_codes(codes: Tensor) -> Tensor:
    """Codes [N, K] two a byte: units of 64 columns in 32 bytes, the first 32 of them in the low halves."""
    units = codes.reshape(codes.shape[0], codes.shape[1] // 64, 2, 32).to(torch.uint8)
    return (units[:, :, 0] | (units[:, :, 1] << 4)).reshape(codes.shape[0], codes.shape[1] // 2)


def made(format: str, n: int, k: int, dtype: torch.dtype = BF16, device: str = "cpu") -> PackedWeight:
    """A weight of nearly that size, where the format has whole tiles only."""
    if format.startswith("shuffled"):
        n, k = -(-n // 16) * 16, -(-k // 32) * 32
    return FORMATS[format](n, k, dtype, device)


def runs(format: str) -> list[tuple[str, Config | None]]:
    """The backends and configurations that a format has paths in."""
    k = 32 if format.endswith("-32") or format == "int8-32" else 64
    k = 64 if format.startswith("int4") or format == "mxfp4" else k
    found: list[tuple[str, Config | None]] = [
        ("triton", tile(16, 32, k)),
        ("triton", tile(16, 64, 128 if format.startswith(("int4-128", "e4m3-block")) else k, **SPLIT)),
        ("triton_stream_k", stream(16, 32, k)),
        ("reference", None),
    ]
    if format in ("plain", "int8", "e4m3", "e5m2"):
        found.append(("triton_gemv", multiply(32, 64, split=2)))
    if format in ("int4-64", "int4-128", "mxfp4"):
        # one step and several, of one group and several
        found += [("triton_gemv", multiply(16, size)) for size in (128, 256)]
    return [*found, ("torch", None)] if format == "plain" else found


# K: whole groups and units; a tail of both; less than any of them; a unit of 64 but no group of 128
@pytest.mark.parametrize("k", [256, 200, 31, 192])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str, k: int, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, units=3)
    dtype = (BF16, F16, F32)[(k + list(FORMATS).index(format)) % 3]
    dtype = BF16 if format == "shuffled" and dtype == F32 else dtype
    weight = made(format, 140 if format == "e4m3-block" else 40, k, dtype, device)
    call = operands(random(5, weight.shape[1], dtype=dtype, device=device), weight, out_dtype=F32)
    values = values_of(weight).mT
    for backend, config in runs(format):
        if backend == "torch":
            call = call._replace(out_dtype=None)
        assert_right(backend, call, config, watch, values)


@pytest.mark.parametrize("format", FORMATS)
def test_own_configurations_and_the_public_function(format: str, watch: Watch, device: str) -> None:
    """Dispatch as it comes, and kernels by their own configurations, with all around; x of several dimensions."""
    weight = made(format, 40, 300, BF16, device)
    n, k = weight.shape
    values = values_of(weight).mT
    options = {"activation": "silu_and_mul", "residual": random(2, 3, n // 2, dtype=F32, device=device, seed=4)}
    for backend in (None, *KERNELS, "reference"):
        for x, more in (
            (random(2, 3, k, device=device), {"bias": random(n, dtype=F32, device=device), **options}),
            (random(k, device=device), {}),
        ):
            call = operands(x, weight, **more)
            if backend is not None and refuses(backend, call) is not None:
                continue
            gemm.force(backend)
            assert_result(backend or "torch", ops.linear(x, weight, **more), call, values)
    gemm.force("triton")
    assert gemm.decide(operands(random(6, k, device=device), weight)).backend == "triton"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "shape", [(3, 40, 0), (3, 0, 40), (0, 40, 64), (1, 1, 1), (2, 17, 65), (17, 3, 63)], ids=shape_id
)
def test_degenerate_sizes(shape: tuple[int, int, int], format: str, watch: Watch, device: str) -> None:
    m, n, k = shape
    weight = made(format, n, k, BF16, device)
    call = operands(
        random(m, weight.shape[1], device=device), weight, random(weight.shape[0], dtype=F32, device=device)
    )
    for backend in ("triton", "reference"):
        assert_right(backend, call, None, watch, values_of(weight).mT)
    assert_result("torch", ops.linear(call.a, weight, call.bias), call, values_of(weight).mT)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_each_4_bit_code_with_each_zero_point(group: int, device: str) -> None:
    """Exact: scales are powers of two, and each row of x picks one column of K."""
    k = 256
    codes = torch.arange(16)[:, None, None].expand(16, 16, k)
    # each code in each place, around each zero point
    codes = (codes + torch.arange(k)) % 16
    zero = torch.arange(16, dtype=torch.uint8)[None, :, None].expand(16, 16, k // group)
    stored = stored_codes(codes.reshape(256, k))
    scale = torch.exp2(torch.arange(256 * (k // group)).reshape(256, k // group) % 7 - 3.0)
    parts = {"scale": scale.to(device), "zero": zero.reshape(256, k // group).to(device)}
    weight = PackedWeight.from_parts("int4", stored.to(device), group=group, dtype=BF16, **parts)
    column = torch.arange(k)
    want = (codes.reshape(256, k) - zero.reshape(256, -1)[:, column // group].int()) * scale[:, column // group]
    assert torch.equal(values_of(weight), want.double())
    picks = torch.eye(k, dtype=BF16, device=device)[::3]
    call = operands(picks, weight)
    for backend, config in (("triton", tile(128, 256, 64)), ("triton", None), ("reference", None)):
        if config is None and backend == "triton":
            call = operands(picks[:16], weight)
        got = gemm.run(backend, call, config=config)
        assert torch.equal(got.cpu().double(), want.double().mT[::3][: got.shape[0]])


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name)
def test_each_mxfp4_value_with_each_scale(dtype: torch.dtype, device: str) -> None:
    """Exact, whatever a's type has: each row of x picks one column of K. Above 252 values are beyond float32."""
    k = 256
    codes = (torch.arange(253)[:, None] + torch.arange(k)) % 16
    scale = (torch.arange(253)[:, None] + 31 * torch.arange(k // 32)) % 253
    weight = PackedWeight.from_parts(
        "mxfp4", stored_codes(codes).to(device), scale=scale.to(torch.uint8).to(device), dtype=BF16
    )
    want = e2m1(codes) * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(values_of(weight), want) and float(want.abs().max()) == 1.5 * 2.0**127
    picks = torch.eye(k, dtype=dtype, device=device)[3::37]
    call = operands(picks, weight, out_dtype=F32)
    wide = 64 if dtype == F16 else 256
    tiles = (tile(16, 64, wide), tile(16, 128, 64, **SPLIT))
    for backend, config in (
        *(("triton", one) for one in tiles), ("triton_stream_k", stream(16, 64, 64)), ("reference", None),
        ("triton_gemv", multiply(4, 64)), ("triton_gemv", multiply(16, 256)),
    ):  # fmt: skip
        got = gemm.run(backend, call, config=config)
        assert torch.equal(got.cpu().double(), want.mT[3::37]), (backend, config)
    assert torch.equal(weight.dequantize_float32().cpu().double(), want)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_mxfp4_by_words(rows: int, watch: Watch, device: str) -> None:
    """Columns that are not full, steps with a ragged last one, K of half a unit, a norm in front, a bias behind."""
    dtype = (BF16, F16, F32)[rows % 3]
    for (n, k), config in (((37, 150), multiply(16, 64)), ((5, 320), multiply(2, 128)), ((3, 5), multiply(4, 64))):
        weight = made("mxfp4", n, k, dtype, device)
        x = random(rows, k, dtype=dtype, device=device, seed=8)
        for options in ({}, {"norm_weight": random(k, dtype=dtype, device=device), "bias": random(n, device=device)}):
            call = operands(x, weight, out_dtype=F32, **options)
            assert_right("triton_gemv", call, config, watch, values_of(weight).mT)


@pytest.mark.parametrize("format", [key for key in FORMATS if key.startswith("shuffled")])
def test_shuffled_is_plain_bit_for_bit(format: str, watch: Watch, device: str) -> None:
    weight = made(format, 48, 192, BF16, device)
    unshuffled = operands(random(21, 192, device=device), weight)
    plain = torch.empty_like(weight.stored)
    # by the formula of the layout, with the values as they are stored
    row, column = torch.arange(48)[:, None], torch.arange(192)[None, :]
    run = 16 // plain.itemsize
    place = (((row // 16 * 6 + column // 32) * (32 // run) + column % 32 // run) * 16 + row % 16) * run + column % run
    flat = weight.stored.view(torch.int8 if run == 16 else torch.int16).flatten()
    plain = flat[place.to(device)].view(weight.stored.dtype)
    # an x of 8 bits too, where the weight has one scale a row
    eight = random(21, 192, dtype=weight.stored.dtype, device=device)
    for x in (unshuffled.a, eight) if weight.stored.itemsize == 1 and weight.group == 192 else (unshuffled.a,):
        call = operands(x, weight, out_dtype=F32)
        assert call.form == "shuffled"
        same = call._replace(form="plain", b=plain.mT)
        for backend, config in (
            ("triton", tile(32, 16, 64)),
            ("triton", tile(16, 32, 32, **SPLIT)),
            ("triton_stream_k", stream(16, 32, 64)),
        ):
            got = assert_right(backend, call, config, watch, values_of(weight).mT)
            assert same_bits(got, gemm.run(backend, same, config=config))
        assert same_bits(gemm.run("reference", call), gemm.run("reference", same))
    few = call._replace(a=call.a[:4])
    assert "shuffled" in str(refuses("triton_gemv", few)) and "shuffled" in str(refuses("torch", call))


@pytest.mark.parametrize("format", ["int8", "int4-64-zeros", "mxfp4", "e4m3", "e4m3-block", "shuffled-int8-64"])
def test_a_scale_that_is_not_a_number_stays_in_its_row(format: str, watch: Watch, device: str) -> None:
    weight = made(format, 150, 200, BF16, device)
    parts = {"scale": weight.scale.clone(), "zero": weight.zero}  # type: ignore[union-attr]
    parts["scale"][1, -1] = 255 if format == "mxfp4" else float("nan")  # type: ignore[index]
    poisoned = PackedWeight.from_parts(
        weight.format, weight.stored, group=weight.group, shape=weight.shape, dtype=BF16, **parts
    )
    call = operands(random(3, weight.shape[1], device=device), poisoned)
    rows = slice(128, 150) if format == "e4m3-block" else slice(1, 2)
    for backend, config in runs(format)[:2]:
        got = assert_right(backend, call, config, watch, values_of(poisoned).mT)
        assert bool(got[:, rows].isnan().all())
        assert int(got.isnan().sum()) == got[:, rows].numel()


@pytest.mark.parametrize("format", ["plain", "shuffled", "int8", "int4-128", "mxfp4", "e4m3"])
def test_packed_weights_with_8_bit_results_and_gates(format: str, watch: Watch, device: str) -> None:
    weight = made(format, 64, 96, F16, device)
    n = weight.shape[0]
    x = random(4, weight.shape[1], dtype=F16, device=device)
    values = values_of(weight).mT
    for options in (
        {"out_dtype": E4M3, "out_scale": torch.tensor(0.5, device=device)},
        {"out_dtype": I8, "out_scale": torch.tensor([4.0], device=device), "activation": "relu"},
        {"activation": "gelu_tanh_and_mul", "bias": random(n, dtype=F16, device=device)},
        {"activation": "gelu", "residual": random(4, n, dtype=BF16, device=device)},
    ):
        call = operands(x, weight, **options)
        for backend, config in runs(format):
            if refuses(backend, call) is None:
                assert_right(backend, call, config, watch, values)


def test_a_weight_is_looked_at_in_each_call(device: str) -> None:
    for forced in ("triton", None):
        gemm.force(forced)
        for seed in range(3):
            weight = pack(random(40, 128, device=device, seed=seed), "int4", group=32, symmetric=False)
            call = operands(random(4, 128, device=device, seed=seed + 5), weight)
            assert_result("reference", ops.linear(call.a, weight), call, values_of(weight).mT)
        assert len(gemm._bound) == 1


@pytest.mark.parametrize("format", [key for key in FORMATS if key != "plain"])
def test_no_copy(format: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made(format, 40, 200, BF16, device)
    assert_call_never_copies(gemm, monkeypatch, operands(random(5, weight.shape[1], device=device), weight))


def test_formats_that_are_not_pytorchs_say_so(device: str) -> None:
    for format in FORMATS:
        weight = made(format, 32, 64, BF16, device)
        reason = refuses("torch", operands(random(3, 64, device=device), weight))
        assert (reason is None) == (format == "plain")
        assert reason is None or "unpack it on every call" in reason


@pytest.mark.parametrize("format", FORMATS)
def test_gemm_takes_no_packed_weight(format: str, device: str) -> None:
    weight = made(format, 64, 64, BF16, device)
    for backend in (None, "triton", "reference"):
        gemm.force(backend)
        with pytest.raises(Unsupported, match=r"packed weight|shuffled does not store"):
            ops.gemm(random(3, 64, device=device), weight)


# --- 4-bit codes as words


def few(
    group: int, rows: int, n: int, k: int, dtype: torch.dtype = BF16, device: str = "cpu", **options: Any
) -> tuple[GemmCall, Tensor]:
    """A call with `rows` rows and a 4-bit weight without zero points, and the weight's values [K, N]."""
    weight = made(f"int4-{group}", n, k, dtype, device)
    call = operands(random(rows, k, dtype=dtype, device=device, seed=8), weight, **({"out_dtype": F32} | options))
    return call, values_of(weight).mT


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name)
@pytest.mark.parametrize("group", [64, 128])
def test_each_4_bit_code_in_words(group: int, dtype: torch.dtype, watch: Watch, device: str) -> None:
    """Exact: whole numbers, each code in each place."""
    k = 256
    codes = (torch.arange(16)[:, None] + torch.arange(k)) % 16
    scale = torch.exp2(torch.arange(16 * (k // group)).reshape(16, k // group) % 7 - 3.0)
    weight = PackedWeight.from_parts(
        "int4", stored_codes(codes).to(device), group=group, dtype=BF16, scale=scale.to(device)
    )
    # odd, so that no code counts for nothing, and eight of them tell places apart
    x = whole(8, k, dtype=dtype, device=device) * 2 + 1
    call = operands(x, weight, out_dtype=F32)
    want = x.cpu().double() @ ((codes - 8) * scale.repeat_interleave(group, 1)).double().mT
    for config in (multiply(16, 256), multiply(4, 128), multiply(2, group)):
        got = assert_right("triton_gemv", call, config, watch, values_of(weight).mT)
        assert torch.equal(got.cpu().double(), want)


@pytest.mark.parametrize("rows", range(1, 9))
def test_words_of_each_number_of_rows(rows: int, watch: Watch, device: str) -> None:
    dtype = (BF16, F16, F32)[rows % 3]
    for (group, n, k), config in (
        # columns that are not full, three steps with a ragged last one; the same in one step that is wider than K
        ((64, 37, 150), multiply(16, 64)),
        ((64, 37, 150), multiply(16, 256)),
        # steps of two groups, the last of one; of one group whose second unit is not there
        ((64, 5, 320), multiply(2, 128)),
        ((128, 5, 320), multiply(2, 128)),
        # less than one word, and a last word of one code
        ((64, 3, 5), multiply(4, 64)),
        ((128, 1, 129), multiply(1, 256)),
    ):
        call, values = few(group, rows, n, k, dtype, device)
        assert_right("triton_gemv", call, config, watch, values)


def test_steps_of_words_are_whole_groups(device: str) -> None:
    for group, k in ((128, 64), (64, 32)):
        call, _ = few(group, 3, 16, 256, device=device)
        with pytest.raises(InvalidArgument, match=f"a BLOCK_K of {k} is not a multiple of a group of {group}"):
            gemm.run("triton_gemv", call, config=multiply(16, k))


@pytest.mark.parametrize("k", [1, 63, 65, 130, 1000, 4096])
@pytest.mark.parametrize("group", [64, 128])
def test_own_configurations_of_words(k: int, group: int, watch: Watch, device: str) -> None:
    for rows in (1, 2, 8):
        call, values = few(group, rows, 3, k, device=device)
        assert_right("triton_gemv", call, None, watch, values)


@pytest.mark.parametrize("arch", [None, *ARCHS.values()], ids=lambda arch: "none" if arch is None else arch.name)
def test_configurations_of_words(arch: Arch | None) -> None:
    """The interpreter has no warps: those that a backend starts with, and that are tried, can be launched."""
    for rows, (n, k), group in itertools.product((1, 2, 8), ((24, 40), (4096, 1000), (28672, 16384)), (64, 128)):
        given = GemmCall(
            torch.empty(rows, k, dtype=BF16, device="meta"),
            torch.empty(n, -(-k // 64) * 32, dtype=torch.uint8, device="meta").mT,
            scale_b=torch.empty(-(-k // group), n, device="meta"),
            form="int4",
            group=group,
        )
        key = key_of(given)
        found = [gemv(shape_of(key), arch)]
        if arch is not None:
            found = list(space.space("triton_gemv", gemv, key, arch))
            assert found[0] == gemv(shape_of(key), arch)
        for one in found:
            for size in (one["BLOCK_N"], one["BLOCK_K"], one["num_warps"]):
                assert size >= 1 and size & (size - 1) == 0, one
            assert one["BLOCK_K"] % group == 0 and one["num_warps"] <= 16, one
            # K is not divided: another number would be the same launch again
            assert one["SPLIT_K"] == 1, one
        tried = {(one["BLOCK_N"], one["BLOCK_K"], one["num_warps"]) for one in found[1:]}
        for columns, wide, warps in spaces.rows("gemm")["gemv"]["int4"] if arch is not None else ():
            # up to 8 rows all of them fit; what is left out has lanes without a word
            one_step = max(group, min(wide, 1 << (k - 1).bit_length()))
            fits = columns * one_step // 8 >= warps * arch.wave_size  # type: ignore[union-attr]
            assert ((columns, one_step, warps) in tried) == fits, (rows, n, k, columns, one_step, warps)
            # and none is there for nothing
            assert fits or one_step < wide, (columns, wide, warps)


def test_words_with_all_around(watch: Watch, device: str) -> None:
    n, k = 19, 150
    # whose values are not next to each other
    bias = random(2 * n, dtype=F16, device=device, seed=2)[::2]
    residual = random(7, n, dtype=BF16, device=device, seed=4)
    for options in (
        {"bias": bias},
        {"bias": bias, "activation": "gelu", "residual": residual},
        {"residual": random(n, 7, dtype=F32, device=device, seed=4).t(), "out_dtype": F16},
        {"activation": "relu", "out_dtype": I8, "out_scale": torch.tensor([4.0], device=device)},
        {"bias": bias, "out_dtype": E4M3, "out_scale": torch.tensor(0.5, device=device)},
        {"activation": "silu", "out_dtype": None},
    ):
        call, values = few(64, 7, n, k, F16, device, **options)
        assert_right("triton_gemv", call, multiply(4, 128), watch, values)
    call, values = few(64, 7, n, k, F16, device)
    more = call._replace(bias=random(7, dtype=F32, device=device), bias_along="m", alpha=-0.5)
    assert_right("triton_gemv", more, multiply(8, 64), watch, values)
    more = more._replace(activation="leaky_relu", slope=0.25)
    assert_right("triton_gemv", more, multiply(8, 64), watch, values)
    # scales that are laid out the other way, and with gaps
    assert call.scale_b is not None
    for scale in (call.scale_b.contiguous(), torch.stack([call.scale_b, call.scale_b + 9], -1)[..., 0]):
        assert scale.stride() != call.scale_b.stride()
        assert_right("triton_gemv", call._replace(scale_b=scale), multiply(8, 128), watch, values)


# x of up to 8 rows without a copy, K: 80
X_OF_WORDS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "vector": lambda t, d: random(80, dtype=t, device=d),
    "three-dimensions": lambda t, d: random(2, 3, 80, dtype=t, device=d),
    "of-one-row": lambda t, d: random(1, 1, 1, 80, dtype=t, device=d),
    "sliced": lambda t, d: random(7, 96, dtype=t, device=d)[1:6, :80],
    # no unit but 1 divides where they begin, and the way from row to row
    "odd-slice": lambda t, d: random(7, 91, dtype=t, device=d)[1:6, 3:83],
    "row-step": lambda t, d: random(10, 80, dtype=t, device=d)[::2],
    "half-of-each": lambda t, d: random(2, 3, 160, dtype=t, device=d)[..., 80:],
    "expanded": lambda t, d: random(1, 80, dtype=t, device=d).expand(4, 80),
    "one-row-of-several-strides": lambda t, d: random(1, 3, 1, 80, dtype=t, device=d).transpose(0, 1)[1:2],
}


@pytest.mark.parametrize("layout", X_OF_WORDS)
def test_words_and_layouts_of_x(layout: str, watch: Watch, device: str) -> None:
    weight = made("int4-64", 18, 80, device=device)
    for dtype in (F32, F16):
        x = X_OF_WORDS[layout](dtype, device)
        residual = random(*x.shape[:-1], 18, dtype=F32, device=device, seed=6)
        call = operands(x, weight, residual=residual, out_dtype=F32)
        assert call.a.data_ptr() == x.data_ptr()
        got = assert_right("triton_gemv", call, multiply(16, 128), watch, values_of(weight).mT)
        assert tuple(got.shape) == (*x.shape[:-1], 18)


def test_nothing_is_read_beyond_k(watch: Watch, device: str) -> None:
    """Columns of x beyond K, and codes of a unit that are not there, are no part of a product."""
    weight = made("int4-64", 6, 70, device=device)
    around = torch.full((5, 256), float("nan"), dtype=BF16, device=device)
    around[:, :70] = random(5, 70, device=device)
    call = operands(around[:, :70], weight, out_dtype=F32)
    want = assert_right("triton_gemv", call, multiply(4, 256), watch, values_of(weight).mT)
    # `pack` leaves codes there that are 0
    codes = weight.stored.clone()
    codes[:, 38:] ^= 0x5F
    codes[:, 32:38] ^= 0xF0
    same = call._replace(b=codes.mT)
    assert same_bits(gemm.run("triton_gemv", same, config=multiply(4, 256)), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_words_and_values_that_are_not_finite(value: float, watch: Watch, device: str) -> None:
    call, values = few(64, 5, 9, 150, F16, device)
    usual = gemm.run("triton_gemv", call, config=multiply(4, 128))
    # of x: its row alone
    for column in (0, 37, 149):
        x = call.a.clone()
        x[3, column] = value
        got = assert_right("triton_gemv", call._replace(a=x), multiply(4, 128), watch, values)
        assert not bool(got[3].isfinite().any())
        assert same_bits(got[[0, 1, 2, 4]], usual[[0, 1, 2, 4]])
    # of a group: its column alone
    assert call.scale_b is not None
    for group in range(3):
        scale = call.scale_b.clone()
        scale[group, 6] = value
        got = gemm.run("triton_gemv", call._replace(scale_b=scale), config=multiply(4, 128))
        assert not bool(got[:, 6].isfinite().any())
        others = [0, 1, 2, 3, 4, 5, 7, 8]
        assert same_bits(got[:, others], usual[:, others])


def test_words_of_one_row_are_those_of_many_bit_for_bit(watch: Watch, device: str) -> None:
    call, values = few(128, 8, 21, 300, BF16, device, bias=random(21, device=device))
    together = assert_right("triton_gemv", call, multiply(4, 256), watch, values)
    for row in range(8):
        alone = call._replace(a=call.a[row : row + 1])
        assert same_bits(gemm.run("triton_gemv", alone, config=multiply(4, 256))[0], together[row])
    other = call._replace(a=torch.cat([random(4, 300, device=device, seed=9), call.a[4:]]))
    assert same_bits(gemm.run("triton_gemv", other, config=multiply(4, 256))[4:], together[4:])


@pytest.mark.parametrize("far", ["columns", "rows"])
def test_words_that_are_far_apart(far: str, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, overflows=True)
    call, values = few(64, 8, 17, 80, F16, device)
    # no stride past 2^31, but several of them, in words and in elements; memory that is not touched is not there
    step = 1 << 29
    if far == "columns":
        storage = torch.empty(16 * step + 64, dtype=torch.uint8, device=device)
        call = call._replace(b=storage.as_strided((17, 64), (step, 1)).copy_(call.b.mT).mT)
    else:
        rows = torch.empty(7 * step + 80, dtype=F16, device=device)
        call = call._replace(a=rows.as_strided((8, 80), (step, 1)).copy_(call.a))
    assert_right("triton_gemv", call, multiply(8, 128), watch, values)


# id -> the bytes of a weight's codes [N, 64] elsewhere: of a wider tensor, or one that starts inside a word
CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns-of-a-wider-one": lambda codes: _placed(codes, 112, 0),
    "in-the-middle-of-a-wider-one": lambda codes: _placed(codes, 128, 48),
    "4-bytes-on": lambda codes: _placed(codes, 64, 4),
    "1-byte-on": lambda codes: _placed(codes, 64, 1),
    "2-bytes-on": lambda codes: _placed(codes, 64, 2),
    "3-bytes-on": lambda codes: _placed(codes, 64, 3),
    "1-byte-on-in-a-wider-one": lambda codes: _placed(codes, 128, 1),
}


def _placed(codes: Tensor, stride: int, offset: int) -> Tensor:
    """Codes among other bytes."""
    storage = torch.full((codes.shape[0] * stride + offset,), 0xA5, dtype=torch.uint8, device=codes.device)
    return storage.as_strided(codes.shape, (stride, 1), offset).copy_(codes)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the weights of launches lie."""
    starter, found = sys.modules["wavecrest.ops.common.launcher"].starter, []  # type: ignore[var-annotated]

    def noted(*args: Any, **options: Any) -> Any:
        start = starter(*args, **options)

        def started(*given: Any) -> None:
            found.append(given[1].data_ptr())
            start(*given)

        return started

    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", noted)
    return found


@pytest.mark.parametrize("placed", CODES)
def test_words_of_slices(placed: str, watch: Watch, addresses: list[int], device: str) -> None:
    call, values = few(64, 3, 7, 128, BF16, device)
    codes = CODES[placed](call.b.mT)
    storage = torch.empty(0, dtype=torch.uint8, device=device).set_(codes.untyped_storage())
    before = storage.clone()
    for config in (multiply(4, 128), multiply(16, 64)):
        assert_right("triton_gemv", call._replace(b=codes.mT), config, watch, values)
    assert torch.equal(storage, before)
    # a copy where words cannot be read in place, and nowhere else
    assert len(addresses) == 2 and all(address % 4 == 0 for address in addresses)
    assert all((address == codes.data_ptr()) == (codes.data_ptr() % 4 == 0) for address in addresses)


def test_bytes_are_read_where_they_lie(watch: Watch, addresses: list[int], device: str) -> None:
    weight = random(7, 65, dtype=I8, device=device).flatten()[3 : 3 + 7 * 64].view(7, 64)
    call = operands(random(3, 64, dtype=F16, device=device), weight, out_dtype=F32)
    assert_right("triton_gemv", call, multiply(4, 64), watch)
    assert addresses == [weight.data_ptr()] and weight.data_ptr() % 4 == 3


def test_a_bound_call_looks_where_its_words_start(watch: Watch, device: str) -> None:
    gemm.force("triton_gemv")
    for turn, offset in enumerate((0, 1, 0, 3, 4, 2)):
        call, _ = few(64, 3, 7, 128, BF16, device)
        weight = pack(weights(7, 128, device=device) * (turn - 2.5), "int4", group=64)
        call = operands(call.a, weight, random(7, device=device, seed=turn), out_dtype=F32)
        call = call._replace(b=_placed(weight.stored, 64, offset).mT)
        assert_result("triton_gemv", gemm(call), call, values_of(weight).mT)
    assert len(gemm._bound) == 1 and gemm.decide(call).backend == "triton_gemv"


@pytest.mark.parametrize("dynamic", [False, True])
def test_words_are_traced(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, in which the call is the op as it is: its launch looks at an address."""
    torch._dynamo.reset()
    monkeypatch.setattr("wavecrest.ops.common.checks.kernel_refusal", lambda *_args: None)
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
    launched: list[int] = []

    def starter(_launch: Any, _device: Any, num_descriptors: int = 0) -> Callable[..., None]:
        return lambda *args: launched.append(len(args))

    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", starter)
    weight = made("int4-64", 16, 128)
    gemm.force("triton_gemv")
    compiled = torch.compile(lambda x: ops.linear(x, weight), fullgraph=True, dynamic=dynamic, backend="eager")
    assert tuple(compiled(random(4, 128)).shape) == (4, 16)
    # one while tracing, one when it runs
    assert [decision.backend for decision, _ in gemm.decisions()] == ["triton_gemv"] * 2
    assert len(launched) == 1


def _words_of(weight: PackedWeight, rows: int = 4, **options: Any) -> GemmCall:
    return operands(random(rows, weight.shape[1], device=weight.device.type), weight, **options)


# why a call is not read as words, and such a call, which but for that would be
NOT_WORDS: dict[str, tuple[str, Callable[[str], GemmCall]]] = {
    "9-rows": ("is for up to 8 rows", lambda d: few(64, 9, 16, 128, device=d)[0]),
    "9-rows-of-three-dimensions": (
        "is for up to 8 rows",
        lambda d: operands(random(3, 3, 128, device=d), made("int4-64", 16, 128, device=d)),
    ),
    "zero-points": ("without .* zero points", lambda d: _words_of(made("int4-64-zeros", 16, 128, device=d))),
    "gated": ("without .* gated", lambda d: _words_of(made("int4-64", 16, 128, device=d), activation="silu_and_mul")),
    "batch": ("without batches", lambda d: _batched(few(64, 3, 16, 128, device=d)[0])),
    "no-k": ("K is 0", lambda d: _words_of(made("int4-64", 16, 0, device=d))),
    "groups-of-32": ("groups of 64 or 128", lambda d: _words_of(made("int4-32", 16, 128, device=d))),
    "columns-40-bytes-apart": ("multiples of 16 bytes", lambda d: _strided(few(64, 3, 16, 32, device=d)[0], 40)),
    "columns-72-bytes-apart": ("multiples of 16 bytes", lambda d: _strided(few(64, 3, 16, 32, device=d)[0], 72)),
    "shuffled": ("no shuffled weight", lambda d: _words_of(made("shuffled-int8", 16, 128, device=d))),
    "x-across": (
        "along K, which must be contiguous",
        lambda d: operands(random(128, 4, device=d).t(), made("int4-64", 16, 128, device=d)),
    ),
    "x-steps": (
        "along K, which must be contiguous",
        lambda d: operands(random(4, 256, device=d)[:, ::2], made("int4-64", 16, 128, device=d)),
    ),
    "rows-without-a-stride": (
        "along K, which must be contiguous",
        lambda d: operands(random(2, 3, 128, device=d).transpose(0, 1), made("int4-64", 16, 128, device=d)),
    ),
}


def _batched(call: GemmCall) -> GemmCall:
    return call._replace(a=torch.stack([call.a, call.a]), b=torch.stack([call.b.mT, call.b.mT]).mT)


def _strided(call: GemmCall, stride: int) -> GemmCall:
    return call._replace(b=_placed(call.b.mT, stride, 0).mT)


@pytest.mark.parametrize("case", NOT_WORDS)
def test_what_is_not_read_as_words_says_why(case: str, device: str) -> None:
    reason, call = NOT_WORDS[case][0], NOT_WORDS[case][1](device)
    assert re.search(reason, str(refuses("triton_gemv", call)))
    if case != "batch":
        # a batch with 4-bit codes is no product at all
        with pytest.raises(Unsupported, match=f"triton_gemv refuses: .*{reason}"):
            gemm.run("triton_gemv", call)
        for backend in (None, "triton_gemv"):
            gemm.force(backend)
            assert gemm.decide(call).backend != "triton_gemv"


def test_what_is_read_as_words(device: str) -> None:
    gemm.force("triton_gemv")
    for group, rows, (n, k) in itertools.product((64, 128), (1, 8), ((16, 128), (1, 1), (3, 129))):
        call, _ = few(group, rows, n, k, device=device)
        assert refuses("triton_gemv", call) is None
        assert gemm.decide(call).backend == "triton_gemv"


def test_a_decision_knows_of_zero_points(device: str) -> None:
    """Weights that differ in nothing but zero points, one after the other."""
    for order in (("int4-64", "int4-64-zeros"), ("int4-64-zeros", "int4-64")):
        gemm.force("triton_gemv")
        for format in order:
            weight = made(format, 40, 128, BF16, device)
            call = operands(random(4, 128, device=device), weight, out_dtype=F32)
            assert (gemm.decide(call).backend == "triton_gemv") == (format == "int4-64"), order
            assert_result("reference", gemm(call), call, values_of(weight).mT)


def test_a_decision_knows_how_far_columns_are_apart(device: str) -> None:
    gemm.force("triton_gemv")
    call, values = few(64, 3, 6, 31, device=device)
    for stride in (32, 40, 48):
        one = call._replace(b=_placed(call.b.mT, stride, 0).mT)
        assert (gemm.decide(one).backend == "triton_gemv") == (stride != 40)
        assert_result("reference", gemm(one), one, values)


# --- plain weights

WEIGHTS: dict[str, Callable[[str], Tensor]] = {
    "rows": lambda d: random(18, 40, device=d, seed=1),
    "columns": lambda d: random(40, 18, device=d, seed=1).t(),
    "sliced": lambda d: random(20, 43, device=d, seed=1)[1:19, 2:42],
    "steps": lambda d: random(36, 80, device=d, seed=1)[::2, ::2],
    "expanded": lambda d: random(1, 40, device=d, seed=1).expand(18, 40),
}
X_SHAPES = ((40,), (1, 40), (6, 40), (2, 3, 40), (2, 1, 2, 3, 40), (0, 40), (2, 0, 40))


@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("shape", X_SHAPES, ids=shape_id)
def test_plain(shape: tuple[int, ...], layout: str, watch: Watch, device: str) -> None:
    weight, x = WEIGHTS[layout](device), random(*shape, device=device)
    bias = random(18, device=device, seed=2)
    for options in ({}, {"bias": bias, "activation": "gelu", "residual": random(*shape[:-1], 18, device=device)}):
        call = operands(x, weight, **options)
        assert same_bits(call.b, weight.mT) and call.form == "plain" and call.group == 0
        for backend in ("triton", "reference", "torch"):
            assert_right(backend, call, None, watch)
        got = ops.linear(x, weight, **options)
        assert tuple(got.shape) == (*shape[:-1], 18) and got.is_contiguous()
        want = nn.functional.linear(x.double(), weight.double(), None if not options else bias.double())
        if not options:
            assert_near(got, want.cpu(), oracle(call, **bound_of("torch", call))[1])


# id -> scale_weight for a weight [N, K]
SCALES: dict[str, Callable[[int, int, str], Tensor]] = {
    "tensor": lambda n, k, d: scales(device=d, size=0.1),
    "one": lambda n, k, d: scales(1, device=d, size=0.1),
    "rows": lambda n, k, d: scales(n, device=d, size=0.1),
    "column": lambda n, k, d: scales(n, 1, device=d, size=0.1),
    "block": lambda n, k, d: scales(-(-n // 128), -(-k // 128), device=d, size=0.1),
}


@pytest.mark.parametrize("dtype", [I8, E4M3], ids=name)
@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_a_plain_weight(kind: str, dtype: torch.dtype, watch: Watch, device: str) -> None:
    n, k = 140, 150
    weight = random(n, k, dtype=dtype, device=device, seed=1)
    scale = SCALES[kind](n, k, device)
    # what each element of the weight is multiplied by, laid out as the weight
    spread = scale.cpu().double()
    if kind == "rows":
        spread = spread[:, None]
    elif kind == "block":
        spread = spread[torch.arange(n) // 128][:, torch.arange(k) // 128]
    values = (weight.cpu().float().double() * spread).mT
    for x, scale_x in (
        (random(4, k, dtype=dtype, device=device), scales(4, device=device, size=0.02)),
        (random(4, k, dtype=F16, device=device), None),
    ):
        call = operands(x, weight, scale_x=scale_x, scale_weight=scale, out_dtype=F32)
        assert torch.allclose(scaled_b(call.b.cpu(), call.scale_b.cpu()), values)  # type: ignore[union-attr]
        for backend, config in (("triton", tile(16, 64, 64)), ("reference", None), ("torch", None)):
            if refuses(backend, call) is None:
                assert_right(backend, call, config, watch, values)
        got = ops.linear(x, weight, scale_x=scale_x, scale_weight=scale, out_dtype=F32)
        assert_result("reference", got, call, values)


@pytest.mark.parametrize("shape", [(1, 20), (20, 2), (2, 20), (19,), (20, 1, 1), (0,)], ids=shape_id)
def test_wrong_scales_of_a_plain_weight(shape: tuple[int, ...], device: str) -> None:
    weight = random(20, 300, dtype=I8, device=device)
    with pytest.raises(InvalidArgument, match=r"scale_b .* is not one for the tensor"):
        ops.linear(random(3, 300, device=device), weight, scale_weight=torch.ones(shape, device=device))


_X, _W = torch.ones(3, 64), torch.ones(16, 64)
_INT4 = pack(_W, "int4")
BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "x-number": ("a must be a tensor", (3.0, _W), {}),
    "x-number-packed": ("x float and weight", (3.0, _INT4), {}),
    "x-scalar-packed": (r"x \[\] and weight \[16, 64\] do not fit", (torch.ones(()), _INT4), {}),
    "x-packed": ("do not fit", (torch.ones(3, 32), _INT4), {}),
    "weight-number": (r"weight must be a tensor \[N, K\], got float", (_X, 3.0), {}),
    "weight-vector": (r"weight must be a tensor \[N, K\], got \[64\]", (_X, torch.ones(64)), {}),
    "weight-batch": (r"weight must be a tensor \[N, K\], got \[2, 16, 64\]", (_X, torch.ones(2, 16, 64)), {}),
    "K": ("do not fit: K is 64 and 32", (_X, torch.ones(16, 32)), {}),
    "transposed": ("do not fit: K is 64 and 16", (_X, _W.t()), {}),
    "dtypes": ("cannot multiply torch.float32 by torch.float16", (_X, _W.half()), {}),
    "shuffled-dtypes": ("cannot multiply torch.float32", (_X, pack(_W.bfloat16(), "shuffled")), {}),
    "int8-by-int4": ("cannot multiply torch.int8", (_X.to(I8), _INT4), {}),
    "bias": (r"bias must be floating-point \[16\]", (_X, _W, torch.ones(64)), {}),
    "scale_x": ("scale_a is for an 8-bit a", (_X, _INT4), {"scale_x": torch.ones(3)}),
    "scale_weight-packed": ("a packed weight has its own scales", (_X, _INT4), {"scale_weight": torch.ones(16)}),
    "scale_weight-dtype": ("scale_b must be a float32", (_X, _W.to(I8)), {"scale_weight": torch.ones(16).double()}),
    "activation": ("activation takes", (_X, _W), {"activation": "swish"}),
    "residual": ("residual must be", (_X, _INT4), {"residual": torch.ones(16)}),
    "out_dtype": ("out_dtype takes", (_X, _INT4), {"out_dtype": torch.int16}),
    "groups-of-8-bit-x": (
        "groups are for 8-bit and 4-bit weights", (_X.to(I8), pack(_W, "int8", group=32)), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments(case: str) -> None:
    message, args, options = BAD[case]
    for forced in (None, "triton", "reference"):
        gemm.force(forced)
        with pytest.raises(InvalidArgument, match=message):
            ops.linear(*args, **options)


# --- gradients


def test_gradients_of_a_layer(device: str) -> None:
    """Gradients equal those of nn.Linear, also where a kernel is forced."""
    layer = nn.Linear(40, 18, device=device)
    x = random(2, 3, 40, dtype=F32, device=device).requires_grad_()
    for forced in (None, *KERNELS):
        gemm.force(forced)
        call = operands(x, layer.weight, layer.bias)
        decision = gemm.decide(call)
        assert decision.backend == "torch"
        if forced is not None:
            assert "gradients" in {one.backend: one.reason for one in decision.refused}[forced]
        got = torch.autograd.grad(ops.linear(x, layer.weight, layer.bias).square().sum(), [x, *layer.parameters()])
        want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    gemm.force("triton")
    with torch.no_grad():
        assert gemm.decide(call).backend == "triton"
        torch.testing.assert_close(ops.linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_pass_through_a_packed_weight(format: str, device: str) -> None:
    """x gets its own, from what the weight stands for; no kernel takes the call."""
    weight = made(format, 32, 96, F32 if format != "shuffled" else BF16, device)
    x = random(3, weight.shape[1], dtype=weight.dtype, device=device).requires_grad_()
    upstream = random(3, weight.shape[0], dtype=F32, device=device, seed=7)
    for forced in ("triton", None):
        gemm.force(forced)
        decision = gemm.decide(operands(x, weight))
        assert decision.backend == ("torch" if format == "plain" else "reference")
        assert "gradients" in {one.backend: one.reason for one in decision.refused}["triton"]
        (got,) = torch.autograd.grad(ops.linear(x, weight, activation="relu", out_dtype=F32), x, upstream)
        values = values_of(weight).to(device)
        passed = (x.detach().double() @ values.mT > 0) * upstream.double()
        want = passed @ values
        torch.testing.assert_close(
            got.double(), want, rtol=1e-2 if weight.dtype == BF16 else 1e-4, atol=1e-2 * float(want.abs().max())
        )


# --- compilation


@pytest.mark.parametrize(
    ("format", "dynamic"),
    [
        ("tensor", False),
        *((format, True) for format in ("tensor", "plain", "shuffled", "int8-64", "int4-64-zeros", "e4m3-block")),
    ],
)
def test_compile_fullgraph(format: str, dynamic: bool, device: str) -> None:
    """A layer's weight as a parameter: one graph; with dynamic shapes rows of one bucket do not compile again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weight = random(32, 64, device=device) if format == "tensor" else made(format, 32, 64, BF16, device)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return ops.linear(x, self.weight, activation="silu")

    layer = Layer()
    backend = "eager" if device == "cpu" else "inductor"
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch.no_grad():
        for rows in (20, 31):
            x = random(rows, 64, device=device)
            torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=1e-2)
    # not calls of the backend: Inductor has a graph traced again where it must take Python floats for constants
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (7, 1008, 2016), (16, 4096, 14336), (100, 1008, 2016)], ids=shape_id
)
def test_layers(shape: tuple[int, int, int], format: str) -> None:
    m, n, k = shape
    weight = made(format, n, k, BF16, "cuda")
    call = operands(random(m, weight.shape[1], device="cuda"), weight, out_dtype=F32)
    for backend in (*KERNELS, "reference"):
        if refuses(backend, call) is None:
            assert_right(backend, call, None, None, values_of(weight).mT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=name)
@pytest.mark.parametrize("rows", [64, 200, 1000])
def test_mxfp4_layers_of_many_rows(rows: int, dtype: torch.dtype) -> None:
    weight = made("mxfp4", 1536, 2080, dtype, "cuda")
    x = random(rows, 2080, dtype=dtype, device="cuda")
    # the products of both halves, of about 250 each, are beyond float16
    small = 2.0**-4 * x
    for call in (
        operands(x, weight, out_dtype=F32),
        operands(small, weight, activation="silu_and_mul", bias=random(1536, device="cuda")),
    ):
        for backend in KERNELS:
            if refuses(backend, call) is None:
                assert_right(backend, call, None, None, values_of(weight).mT)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_replays_in_a_cuda_graph(format: str) -> None:
    weight = made(format, 1024, 512, BF16, "cuda")
    x = random(4, 512, device="cuda")
    gemm.force("triton")
    ops.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.linear(x, weight)
    for seed, other in itertools.product((5, 6), (1.0, 2.0)):
        x.copy_(random(4, 512, device="cuda", seed=seed))
        if weight.scale is not None and format == "mxfp4":
            weight.scale.add_(int(other) - 1)
        elif weight.scale is not None:
            weight.scale.mul_(other)
        graph.replay()
        assert_result("triton", result, operands(x, weight), values_of(weight).mT)


@pytest.mark.gpu
@pytest.mark.slow
def test_weights_past_2_to_the_31_elements() -> None:
    # int4 of 2^31 bytes and more: the last row's codes begin beyond
    n, k = 65544, 65536
    stored = torch.full((n, k // 2), 0x88, dtype=torch.uint8, device="cuda")
    stored[-1] = torch.randint(0, 256, (k // 2,), dtype=torch.uint8, device="cuda")
    scale = torch.ones(n, k // 128, device="cuda")
    weight = PackedWeight.from_parts("int4", stored, scale=scale, group=128, dtype=BF16)
    x = random(3, k, device="cuda")
    gemm.force("triton")
    got = ops.linear(x, weight, out_dtype=F32)
    assert not bool(got[:, :-1].any())
    last = PackedWeight.from_parts("int4", stored[-1:], scale=scale[-1:], group=128, dtype=BF16)
    call = operands(x, last, out_dtype=F32)
    assert_result("triton", got[:, -1:].contiguous(), call, values_of(last).mT)
