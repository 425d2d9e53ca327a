"""The GEMM for sm_90 of few rows and packed weights: values, refusals, and the kernel's own text run on a CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.gemm_harness import BF16, F16, F32, Watch, assert_right, random, watched
from tests.ops.hopper_harness import activate_on_cpu, gemm_on_sm_90
from tests.ops.op_harness import same_bits, shape_id
from wavecrest.dispatch import lookup
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops import pack
from wavecrest.ops._gemm import backend, kernel_hopper_row, kernel_hopper_words, launch_hopper_words, reference
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall, linear_call
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops._gemm.reference import values_of_b
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common import launcher, target
from wavecrest.ops.common.activation import ACTIVATIONS

SM_90 = ARCHS["sm_90"]
WORDS = launch_hopper_words.NAME
FORMATS = ("int4", "int8")


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.fixture
def hopper() -> AnyOp:
    return gemm_on_sm_90()


def packed(
    M: int, N: int, K: int, format: str, dtype: torch.dtype = BF16, device: str = "cuda", **more: Any
) -> GemmCall:
    """a [M, K] and a packed weight, of 2N rows where the activation is gated: results of about 1."""
    rows = 2 * N if more.get("activation") in GATED else N
    # rows of sizes up to eight times apart, so that a scale of another row or group is far off
    sizes = 2.0 ** (torch.arange(rows, device=device) % 4)[:, None] * 2.0 ** (torch.arange(K, device=device) // 128 % 3)
    weight = random(rows, K, device=device, seed=1) * sizes * max(1, K) ** -0.5 / 8
    options = {"group": 128} if format == "int4" else {}
    return linear_call(random(M, K, dtype=dtype, device=device), pack(weight.to(dtype), format, **options), **more)


def calls(M: int, N: int, K: int, format: str, device: str) -> list[GemmCall]:
    """Each kind of end, and strides that are not those of whole tensors."""
    bias = random(4 * N, dtype=F16, device=device, seed=2)[::2]
    residual = random(2 * M, N + 8, device=device, seed=3).to(BF16)[::2, :N]
    found = [
        packed(M, N, K, format, device=device),
        packed(M, N, K, format, F16, device, bias=bias[:N], activation="gelu"),
        packed(M, N, K, format, device=device, residual=residual),
        packed(M, N, K, format, device=device, out_dtype=F32, activation="leaky_relu", slope=0.25),
        packed(M, N, K, format, device=device, activation="silu_and_mul", bias=bias),
        packed(M, N, K, format, F16, device, activation="gelu_and_mul"),
        packed(M, N, K, format, device=device, norm_weight=random(K, device=device, seed=4), norm_eps=1e-3),
        packed(
            M, N, K, format, F16, device, activation="silu_and_mul", norm_weight=random(K, dtype=F16, device=device)
        ),
    ]
    call = found[0]
    wide = torch.full((M, K + 64), math.nan, dtype=BF16, device=device)
    wide[:, :K] = call.a
    return [*found, call._replace(a=wide[:, :K])]


# one block of K and less than a tile; rows and columns that fill nothing; more blocks than warps, and none for some
SHAPES = ((1, 8, 128), (2, 40, 384), (8, 136, 1024), (7, 1000, 1152), (1, 4104, 4096), (5, 96, 14336))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_values(shape: tuple[int, ...], format: str, hopper: AnyOp) -> None:
    # a program a tile, and programs that stay; one of the two is the default
    both = [configs.hopper_words(), configs.hopper_words(8, 8, 2, registers=128, programs=2)]
    for call in calls(*shape, format, "cuda"):
        for config in [*both, configs.hopper_words(16, 4, 4, 0, programs=1)] if call.M == 1 else [None]:
            assert_right(WORDS, call, config, b=values_of_b(call).double())


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_configurations(format: str, hopper: AnyOp) -> None:
    for shape, activation in product(((1, 272, 4096), (8, 80, 2176)), (None, "silu_and_mul")):
        call = packed(*shape, format, activation=activation)
        b = values_of_b(call).double()
        by_warps: dict[tuple[int, bool], list[Tensor]] = {}
        for one in space.words_space(hopper.key(call), SM_90):
            kind = one["num_warps"], launch_hopper_words.stays(one)
            by_warps.setdefault(kind, []).append(assert_right(WORDS, call, one, b=b))
        # a result's products are added in one order by a kernel with one number of warps
        assert all(same_bits(one, same[0]) for same in by_warps.values() for one in same)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("programs", [0, 2])
def test_the_same_bits_each_time_and_in_a_graph(early: int, programs: int, hopper: AnyOp) -> None:
    for format in FORMATS:
        call = packed(1 if programs else 4, 1032, 4096, format)
        one = configs.hopper_words(early=early, programs=programs)
        run = partial(hopper.run, WORDS, call, config=one)
        first = run()
        assert all(torch.equal(run(), first) for _ in range(5))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # its a is the result of the kernel in front
            result = hopper.run(WORDS, call._replace(a=call.a * 1), config=one)
        for seed in (5, 6):
            call.a.copy_(random(*call.a.shape, dtype=BF16, device="cuda", seed=seed))
            result.fill_(math.nan)
            graph.replay()
            assert torch.equal(result, run())


@pytest.mark.gpu
def test_in_a_compiled_function(hopper: AnyOp) -> None:
    """As one operation, which finds the pinned kernel when it runs."""
    call = packed(3, 256, 512, "int4")
    hopper.pin(hopper.key(call), WORDS, None, "user", "for this test")
    try:
        wanted = 2 * hopper.run(WORDS, call)
        with torch.no_grad():
            layer = torch.compile(lambda a: 2 * hopper(call._replace(a=a)), fullgraph=True)
            assert same_bits(layer(call.a), wanted)
    finally:
        hopper.unpin()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_what_does_not_begin_at_16_bytes_runs_on_the_portable_kernel(format: str, hopper: AnyOp) -> None:
    gain = random(256, device="cuda", seed=4)
    for more in ({}, {"norm_weight": gain}, {"norm_weight": gain, "activation": "silu_and_mul"}):
        call = packed(2, 64, 256, format, **more)
        behind = torch.empty(2 * 256 + 1, dtype=BF16, device="cuda")[1:].view(2, 256)
        behind.copy_(call.a)
        if not more:
            assert_right(WORDS, call._replace(a=behind), b=values_of_b(call).double())
            continue
        # the portable kernel's norm is a launch before, whose result has a's dtype
        rounded = call._replace(a=reference.values_of_a(call).to(BF16), norm_weight=None)
        assert right(gemm.run(WORDS, call._replace(a=behind)), rounded)


def test_the_portable_kernel_of_a_norm_and_4_bits(device: str) -> None:
    """Tiles normalise no rows for them, so that the norm comes before."""
    for activation in (None, "silu_and_mul"):
        call = packed(3, 40, 256, "int4", device=device, norm_weight=random(256, device=device), activation=activation)
        # rows that are not of the size the norm gives them
        call = call._replace(a=call.a * torch.tensor([[4.0], [0.25], [30.0]], dtype=BF16, device=device))
        rounded = call._replace(a=reference.values_of_a(call).to(BF16), norm_weight=None)
        assert right(backend._portable_normed(call)(call), rounded)


def _of_int4(word: Tensor) -> tuple[Tensor, Tensor]:
    bytes_ = [(word >> (8 * i)) & 255 for i in range(4)]
    return _bytes_of([one & 15 for one in bytes_]), _bytes_of([one >> 4 for one in bytes_])


def _bytes_of(values: list[Tensor]) -> Tensor:
    """Words of four bytes, each 16 times a value less 8."""
    word = torch.zeros_like(values[0])
    for i, one in enumerate(values):
        word = word | (((16 * (one - 8)) & 255) << (8 * i))
    return word.int()


def _four_words(at: gluon.Pointer, mask: Tensor) -> tuple[Tensor, ...]:
    return tuple((at + i).load(mask) for i in range(4))


def in_units(x: Tensor, most: Tensor) -> tuple[list[Tensor], Tensor]:
    """Digits of values and the unit they are in, by division in whole numbers of 64 bits."""
    unit = 2.0 ** (most.double().clamp_min(2.0**-97).log2().floor() - 29)
    number = (x.double() / unit).trunc().long()
    digits = []
    for _ in range(4):
        digits.append((number + 128) % 256 - 128)
        number = (number - digits[-1]) // 256
    return digits, unit


def _numbers_of(x: Tensor, _size: Tensor, most: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    digits, unit = in_units(x, most.view(F32))
    word = torch.zeros_like(digits[0])
    for i, one in enumerate(digits):
        word = word | (one & 255) << (8 * i)
    return word.int(), unit.float(), unit.float()


def digits_of(call: GemmCall) -> Tensor:
    """As `_digits_kernel` makes them."""
    x = reference.values_of_a(call)
    digits, unit = in_units(x, x.abs().amax(dim=1, keepdim=True))
    worth = torch.cat([unit * 256.0**i for i in range(4)], dim=1).float().contiguous()
    return torch.cat([torch.stack(digits, dim=1).to(torch.int8).flatten(), worth.flatten().view(torch.int8)])


def stand_in(call: GemmCall, config: Config, arch: Arch = SM_90, **planted: str) -> Tensor:
    """A call with the kernel's own text on a CPU; `planted`: what it says, and what it says instead."""
    y = torch.full(call.shape, math.nan, dtype=call.dtype)
    *_, second = launch_hopper_words.launches(call, digits_of(call), y, config, arch)
    row, words = Path(kernel_hopper_row.__file__), Path(kernel_hopper_words.__file__)
    source = {"path": row, "beside": words} if launch_hopper_words.stays(config) else {"path": words}
    kernels = gluon.Kernels(
        planted=planted, **source,
        activate=activate_on_cpu, mma=lambda a, b, acc: acc + a.int() @ b.int(), INT4_WORD=_of_int4, DIGITS=4,
        load_past_l1=_four_words, pdl_wait=lambda _on: None, pdl_launch_dependents=lambda _on: None,
        magnitude=lambda x: x.view(torch.int32) & 0x7FFFFFFF, numbers_of=_numbers_of, prefetch_l2=lambda *_: None,
        sum_and_largest=lambda sum0, most0, sum1, most1: (sum0 + sum1, torch.maximum(most0, most1)),
    )  # fmt: skip
    of_launch = ("num_stages", "EARLY", "PROGRAMS", "maxnreg")
    constants = {key: value for key, value in config.kwargs.items() if key not in of_launch}
    args = [gluon.Pointer(one) if isinstance(one, Tensor) else torch.as_tensor(one) for one in second.args]
    kernels.run(second.kernel.__name__, second.grid[0], *args, **second.constants, **constants)
    return y


def definition(call: GemmCall) -> Tensor:
    """act(a @ b + bias) [· its second half] + residual in float64; of the norm of a if there is one."""
    y = reference.values_of_a(call).double() @ values_of_b(call).double()
    if call.bias is not None:
        y = y + call.bias.double()
    gate, up = y.chunk(2, -1) if call.activation in GATED else (y, 1.0)
    named = GATED.get(str(call.activation), call.activation)
    y = activate_on_cpu(gate, call.slope, ACTIVATIONS[named] if named else 0) * up
    return y if call.residual is None else y + call.residual.double()


def right(found: Tensor, call: GemmCall) -> bool:
    """Rounded once from sums in float32, to one unit."""
    want = definition(call)
    unit = {BF16: 2.0**-7, F16: 2.0**-10, F32: 2.0**-18}[call.dtype]
    return bool(((found.double() - want).abs() <= unit * want.abs() + 1e-3).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((1, 8, 128), configs.hopper_words()), ((2, 40, 384), configs.hopper_words(32, 4, 1)),
        ((8, 24, 2176), configs.hopper_words(16, 4, 4)), ((7, 40, 4096), configs.hopper_words(16, 16, 1)),
        ((3, 16, 1152), configs.hopper_words(32, 8, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernels_own_text(shape: tuple[int, ...], config: Config, format: str) -> None:
    for call in calls(*shape, format, "cpu"):
        # values of 4 and 8 bits are exact in both types
        assert right(stand_in(call, config), call)


# a step and several of a tile; a tile and several of a program; more programs than tiles, rows and columns that fill
# nothing; long rows, whose digits are made in parts
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "config", "units"),
    [
        ((1, 8, 128), configs.hopper_words(8, 4, 1, programs=1), 132),
        ((1, 40, 1152), configs.hopper_words(8, 4, 2, programs=1), 2),
        ((1, 20, 2176), configs.hopper_words(16, 8, 4, programs=2), 1),
        ((1, 72, 640), configs.hopper_words(32, 4, 2, programs=1), 1),
        ((1, 40, 9216), configs.hopper_words(8, 8, 4, programs=1), 3),
    ],
    ids=str,
)  # fmt: skip
def test_the_own_text_of_programs_that_stay(shape: tuple[int, ...], config: Config, units: int, format: str) -> None:
    few = replace(SM_90, compute_units=units)
    for call in calls(*shape, format, "cpu"):
        assert right(stand_in(call, config, few), call)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("said", "instead"),
    [
        # of two halves of a line: the other one's words, one's worth for both, products across them, another column
        ("unit = warp * SPLIT + part % SPLIT", "unit = warp * SPLIT + 1 - part % SPLIT"),
        ("digit // DIGITS == part_s % SPLIT", "digit // DIGITS == 0"),
        ("digit // DIGITS == part_s % SPLIT", "digit == digit"),
        ("column = part // SPLIT", "column = part % BLOCK_N"),
        # digits of another step, of values that are not there, worth the same, not of the norm
        ("at = it % STEPS", "at = it % STEPS * 0"),
        ("a + k, mask=k < K, other=0.0", "a + k, mask=k < K - 1, other=0.0"),
        ("127 + 8 * (digit % DIGITS)", "127 + 4 * (digit % DIGITS)"),
        ("lowest * factor, others * factor", "lowest, others"),
        ("y *= gl.load(gain_ptr + k,", "y = y + 0 * gl.load(gain_ptr + k,"),
        # sums of the tile before, another tile's words, of a step that is over, the last tile left out
        ("                acc = gl.zeros(", "                acc = acc + 0 * gl.zeros("),
        ("program + it // STEPS * programs).to(gl.int64)", "program + it // STEPS).to(gl.int64)"),
        ("from_k = it % STEPS * ALL", "from_k = (it + 1) % STEPS * ALL"),
        ("mine + AHEAD - 1) // AHEAD", "mine) // (AHEAD + 1)"),
        ("first + n < N)", "first + n < N - 1)"),
    ],
)
def test_planted_errors_of_programs_that_stay_are_seen(format: str, said: str, instead: str) -> None:
    gain = random(2176, dtype=BF16, device="cpu", seed=3)
    call = packed(1, 40, 2176, format, device="cpu")
    call = call._replace(a=4 * call.a, norm_weight=gain)
    config, few = configs.hopper_words(8, 4, 2, programs=1), replace(SM_90, compute_units=2)
    assert right(stand_in(call, config, few), call)
    assert not right(stand_in(call, config, few, **{said: instead}), call)


@pytest.mark.parametrize(
    ("format", "said", "instead"),
    [
        # columns of K in another order than the weight's; the wrong half; a scale of another block, or row
        ("int4", "(j // 32) * 64 + j % 32 if INT4 else j", "j if INT4 else j"),
        ("int8", "(j // 32) * 64 + j % 32 if INT4 else j", "(j // 16) * 16 + (j + 1) % 16"),
        ("int4", "block_a * BLOCK + 32", "block_a * BLOCK"),
        ("int4", "block_s = warp_s + ((step + 1) * AHEAD + i)", "block_s = warp_s + ((step + 1) * AHEAD)"),
        ("int8", "(first + columns).to(gl.int64) * stride_sn", "columns.to(gl.int64) * stride_sn"),
        ("int4", "gl.join(gl.join(v0, v2), gl.join(v1, v3))", "gl.join(gl.join(v0, v1), gl.join(v2, v3))"),
        # sums that do not begin as float32 has them, not as large as they are, digits worth the same, another row's
        ("int4", "WHOLE_BITS if INT4 else 0", "0"),
        ("int4", "alpha / SHIFTED", "alpha"),
        ("int8", ".to(gl.float32) * worth", ".to(gl.float32)"),
        ("int8", "// DIGITS, DIGITS]), axis=2)", "// DIGITS, DIGITS]).flip(1), axis=2)"),
        ("int4", "worths + digit", "worths + digit % 4"),
        ("int4", "in_b & (block < blocks)", "in_b & (block < blocks - 1)"),
        ("int4", "mask = mask & (out_rows < M)", "mask = mask & (out_rows < M - 1)"),
    ],
)  # fmt: skip
def test_planted_errors_are_seen(format: str, said: str, instead: str) -> None:
    gated = packed(3, 24, 2176, format, device="cpu", activation="silu_and_mul")
    config = configs.hopper_words(16, 4, 2)
    assert right(stand_in(gated, config), gated)
    assert not right(stand_in(gated, config, **{said: instead}), gated)


def digits(call: GemmCall, device: str) -> Tensor:
    """As the kernel makes them, in memory that holds something else."""
    found = torch.full((launch_hopper_words.size_of_digits(call),), 77, dtype=torch.int8, device=device)
    first = launch_hopper_words.first_launch(call, found, target.arch())
    gain = call.a if call.norm_weight is None else call.norm_weight
    launcher.starter(first, torch.device(device))(call.a, gain, found)
    return found.cpu()


def numbers(found: Tensor, M: int, K: int) -> Tensor:
    """The rows that digits stand for, in float64."""
    worth = found[4 * M * K :].view(F32).view(M, 4, 1).double()
    return (found[: 4 * M * K].view(M, 4, K).double() * worth).sum(1)


def spread(M: int, K: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of sizes far apart, with values far below a row's largest, zeros, and of several rows one of nothing else.

    In float16 they are large, where it keeps its 11 bits far below the largest too.
    """
    x = random(M, K, device=device, seed=7) * 2.0 ** (-5 * (torch.arange(M, device=device) % 4))[:, None]
    x[:, ::3] *= 2.0**-9
    x[:, ::7] = 0
    if M > 1:
        x[M - 1] = 0
    return (x * 2.0**12 if dtype == F16 else x).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("M", "K"), [(1, 128), (3, 1152), (8, 4096)])
def test_digits(M: int, K: int, dtype: torch.dtype, device: str) -> None:
    x = spread(M, K, dtype, device)
    found = digits(GemmCall(x, x.mT), device)
    assert torch.equal(found, digits_of(GemmCall(x.cpu(), x.cpu().mT)))
    # with 8 bits all above 2^-22 of the largest is exact, with 11 all above 2^-19; else it is off by less than 2^-29
    exact = 2.0 ** (-22 if dtype == BF16 else -19)
    x = x.cpu().double()
    most = x.abs().amax(dim=1, keepdim=True)
    error = (numbers(found, M, K) - x).abs()
    assert bool((error[x.abs() > exact * most] == 0).all()) and bool((error <= 2.0**-29 * most).all())


def test_digits_of_rows_apart_and_of_their_norm(device: str) -> None:
    wide = torch.full((5, 1024 + 64), math.nan, dtype=BF16, device=device)
    wide[:, :1024] = spread(5, 1024, BF16, device)
    gain = random(1024, device=device, seed=3)
    call = GemmCall(wide[:, :1024], wide[:, :1024].mT, norm_weight=gain, norm_eps=1e-3)
    found = numbers(digits(call, device), 5, 1024)
    want = wide[:, :1024].cpu().double()
    want = want * torch.rsqrt(want.square().mean(1, keepdim=True) + 1e-3) * gain.cpu().double()
    # the sum of squares has √K roundings, of which the root leaves half
    unit = (2 * 1024**0.5 + 8) * 2.0**-24
    assert bool(((found - want).abs() <= unit * want.abs() + 2.0**-28 * want.abs().amax(1, keepdim=True)).all())


def test_digits_of_what_is_no_number(device: str) -> None:
    x = random(4, 256, dtype=BF16, device=device, seed=1)
    x[0, 3], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    found = numbers(digits(GemmCall(x, x.mT), device), 4, 256)
    assert bool(found[0].isnan().all())
    # 0 times infinity elsewhere in the row: a product with weights has one value of the row left, or NaN of a weight 0
    assert found[1, 5] == math.inf and found[2, 7] == -math.inf and torch.equal(found[3], x[3].cpu().double())
    for row, place in ((1, 5), (2, 7)):
        rest = found[row][torch.arange(256) != place]
        assert bool(rest.isnan().all())


def test_the_smallest_numbers(device: str) -> None:
    """The smallest normal number is the unit of a row below 2^-97."""
    x = torch.zeros(2, 128, dtype=BF16, device=device)
    x[0, :3] = torch.tensor([2.0**-120, -(2.0**-126), 2.0**-130])
    x[1, 0] = torch.finfo(BF16).max
    found = numbers(digits(GemmCall(x, x.mT), device), 2, 128)
    assert found[0, :3].tolist() == [2.0**-120, -(2.0**-126), 0.0]
    assert found[1, 0] == torch.finfo(BF16).max and not found[1, 1:].any()


def shaped(M: int = 1, N: int = 256, K: int = 512, format: str = "int4", **more: Any) -> GemmCall:
    """As `packed`, without memory."""
    options = {"group": more.pop("group", 128)} if format == "int4" else {}
    weight = pack(torch.zeros(N, K, dtype=BF16), format, **options, **more.pop("how", {}))
    return linear_call(torch.zeros(M, K, dtype=more.pop("dtype", BF16)), weight, **more)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: shaped(9), "is for up to 8 rows"),
        (lambda: shaped(group=64), "multiplies 16-bit floats by int4 in groups of 128"),
        (lambda: shaped(how={"symmetric": False}), "multiplies 16-bit floats by int4 in groups of 128"),
        (lambda: shaped(format="mxfp4"), "multiplies 16-bit floats by int4 in groups of 128"),
        (lambda: shaped(format="fp8"), "multiplies 16-bit floats by int4 in groups of 128"),
        (lambda: shaped(dtype=F32), "multiplies 16-bit floats by int4 in groups of 128"),
        (lambda: shaped(K=576), "takes a K in multiples of 128, up to 65536"),
        (lambda: shaped(N=16, K=65536 + 128), "takes a K in multiples of 128, up to 65536"),
        (lambda: shaped(2)._replace(a=torch.zeros(2, 516, dtype=BF16)[:, :512]), "reads a, b and scales along K"),
    ],
)  # fmt: skip
def test_refusals(call: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.ops.common.hopper.refusal", lambda **_: None)
    found = launch_hopper_words.refusal(call())
    assert found is not None and reason in found, found
    assert launch_hopper_words.refusal(shaped()) is None and launch_hopper_words.refusal(shaped(format="int8")) is None


def test_it_is_the_default_of_up_to_two_rows_of_int4() -> None:
    for few in (shaped(), shaped(2), shaped(norm_weight=torch.ones(512, dtype=BF16))):
        assert backend._opt_in_words(few) is None
    for other in (shaped(3), shaped(8), shaped(format="int8")):
        assert backend._opt_in_words(other) == "runs where a measured row names it"


def test_elsewhere_it_refuses_by_the_device() -> None:
    with pytest.raises(Unsupported, match="triton_hopper_words refuses"):
        gemm.run(WORDS, shaped())


@pytest.mark.parametrize("wrong", [{"BLOCK_N": 64}, {"num_warps": 2}, {"AHEAD": 3}])
def test_tiles_that_do_not_exist(wrong: dict[str, int]) -> None:
    known = configs.hopper_words()
    options = {**known.kwargs, "num_warps": known["num_warps"], "num_stages": 1} | wrong
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        digits = torch.empty(launch_hopper_words.size_of_digits(shaped()), dtype=torch.int8)
        launch_hopper_words.launches(shaped(), digits, torch.empty(1, 256, dtype=BF16), Config(**options), SM_90)


@pytest.mark.parametrize("call", [shaped(2), shaped(K=65_536)], ids=["two rows", "too long"])
def test_programs_that_stay_are_for_one_row(call: GemmCall) -> None:
    with pytest.raises(InvalidArgument, match="PROGRAMS is for one row of up to 32,768 columns"):
        launch_hopper_words.launches(call, call.a, call.a, configs.hopper_words(programs=1), SM_90)
    assert not any(launch_hopper_words.stays(one) for one in space.words_space(key_of(call), SM_90))
    assert any(launch_hopper_words.stays(one) for one in space.words_space(key_of(shaped()), SM_90))


@pytest.mark.parametrize("call", [shaped(), shaped(K=14_336), shaped(2), shaped(format="int8")])
def test_all_that_is_tried_may_be_a_measured_row(call: GemmCall) -> None:
    key = key_of(call)
    assert {lookup.misfit(gemm, key, WORDS, one) for one in space.words_space(key, SM_90)} == {""}


@pytest.mark.parametrize(
    ("call", "stays"),
    [(shaped(), True), (shaped(K=8192), True), (shaped(K=8320), False), (shaped(2), False)],
    ids=["one row", "the longest", "longer", "two rows"],
)
def test_one_row_that_is_not_long_has_programs_that_stay_by_default(call: GemmCall, stays: bool) -> None:
    assert launch_hopper_words.stays(configs.hopper_words_of(shape_of(key_of(call)), SM_90)) == stays


def test_the_space_begins_with_the_default() -> None:
    for call in (shaped(), shaped(8, 28672, 128, activation="silu_and_mul"), shaped(format="int8")):
        key = key_of(call)
        tried = list(space.words_space(key, SM_90))
        assert tried[0] == configs.hopper_words_of(shape_of(key), SM_90) and len(tried) == len(set(tried)) > 1
