"""The GEMM kernels for gfx950 and gfx942: what they copy and read when, and what they do not take.

Their machine code: tests/emulated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import gluon_cdna
from tests.ops.gemm_harness import BF16, F16, F32, I8, random, refuses, scales
from tests.ops.op_harness import shape_id
from wavecrest import hardware
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import rank
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm import kernel_cdna as cdna_kernel
from wavecrest.ops._gemm import launch_cdna as cdna_launch
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.key import shape_of
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common import launcher as _launcher
from wavecrest.ops.common import target as _target

CDNA = "triton_cdna"
GFX942, GFX950 = ARCHS["gfx942"], ARCHS["gfx950"]
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def plain(M: int, N: int, K: int, dtype: torch.dtype = BF16, **more: Any) -> GemmCall:
    """a [M, K] and a weight [N, K], parts of longer rows beside NaN; results of about 1, of 8 bits before scales."""
    a, w = (torch.full((rows, K + 32), math.nan).to(dtype)[:, 16 : K + 16] for rows in (M, N))
    a.copy_(random(M, K))
    w.copy_(random(N, K, seed=1) * (1.0 if dtype.itemsize == 1 else K**-0.5))
    return GemmCall(a, w.mT, **more)


def float8(M: int, N: int, K: int, dtype: torch.dtype = FN, **more: Any) -> GemmCall:
    """`plain` of 8-bit floats, with a scale for each row and column."""
    return plain(M, N, K, dtype, **{"scale_a": scales(M), "scale_b": scales(N) * K**-0.5} | more)


def first(call: GemmCall, arch: hardware.Arch) -> Config:
    """The configuration that is tried first."""
    return configs.cdna_default(shape_of(gemm.key(call)), arch)


def _epilogue(
    acc: Tensor, _up: Tensor, c: gluon_cdna.Pointer, factors: Any, after: Any, _batch: int, rows: Tensor, cols: Tensor,
    M: int, N: int, *options: Any,
) -> None:  # fmt: skip
    """The shared epilogue, with a bias along N and silu; a place that is written again gets the same bits."""
    a_kind, b_kind, bias, activation, gated, residual, largest = options
    assert not gated and not residual and largest == 0 and rows.max() < M and cols.max() < N
    for kind, pointer, stride, places in (
        (a_kind, factors[0], factors[3], rows[:, None]), (b_kind, factors[1], factors[5], cols)
    ):  # fmt: skip
        if kind:
            acc = acc * pointer.load(places * stride if kind == 2 else torch.tensor(0))
    y = acc * after[-2] + (after[0].x[cols].float() if bias else 0.0)
    y = (functional.silu(y) if activation else y).to(c.x.dtype)
    before = c.x[rows[:, None], cols[None, :]]
    assert bool(((before == y) | before.isnan()).all()), "other bits than a tile before"
    c.x[rows[:, None], cols[None, :]] = y


def stand_in(call: GemmCall, arch: hardware.Arch, **planted: str) -> Tensor:
    """A call with the kernel's own text on a CPU; `planted`: what it says, and what it says instead."""
    y = torch.full(call.shape, math.nan, dtype=call.dtype)
    config = first(call, arch)
    made = cdna_launch.launch(call, y, config, arch)
    kernels = gluon_cdna.Kernels(
        Path(cdna_kernel.__file__), planted, epilogue=_epilogue, NO_SCALE=0,
        # tiles in any order, each once
        remap_xcd=lambda program, _programs, _xcds: program,
        swizzle_tile=lambda index, _tiles_m, tiles_n, _group: (index // tiles_n, index % tiles_n),
    )  # fmt: skip
    constants = {name: value for name, value in config.kwargs.items() if name in ("GROUP_M", "MATRIX", "BLOCK_K")}
    pointers = [gluon_cdna.Pointer(x) for x in made.args[:6]]
    numbers = [torch.as_tensor(x) if isinstance(x, int) else x for x in made.args[6:]]
    kernel = "_cdna_kernel" if arch is GFX950 else "_cdna3_kernel"
    kernels.run(kernel, made.grid[0], *pointers, *numbers, **made.constants, **constants)
    return y


def _assert_right(call: GemmCall, found: Tensor) -> None:
    want = call.alpha * (call.a.double() @ call.b.double())
    want = want if call.scale_a is None else want * call.scale_a.double().view(-1, 1)
    want = want if call.scale_b is None else want * call.scale_b.double()
    want = functional.silu(want + call.bias.double()) if call.bias is not None else want
    unit = 2.0 ** (-8 if call.dtype == BF16 else -11)
    assert ((found.double() - want).abs() <= unit * want.abs() + 1e-4).all()


# less than two steps, full ones, and a last one that is not full; rows and columns that tiles share
@pytest.mark.parametrize("shape", [(256, 256, 72), (256, 257, 256), (300, 259, 264)], ids=shape_id)
def test_values(shape: tuple[int, ...]) -> None:
    M, N, K = shape
    more = {"dtype": F16, "bias": random(N), "activation": "silu", "alpha": 0.5} if N == 257 else {}
    call = plain(M, N, K, **more)
    _assert_right(call, stand_in(call, GFX950))


# on gfx942 steps are of 64, on gfx950 of 128: the last one full and not full, one pair of steps and several
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        (GFX942, FNUZ, (256, 256, 128)), (GFX942, FNUZ, (256, 259, 512)), (GFX942, FNUZ, (300, 256, 272)),
        (GFX950, FN, (256, 256, 512)), (GFX950, torch.float8_e5m2, (300, 259, 528)),
    ],
)  # fmt: skip
def test_values_of_8_bit_floats(arch: hardware.Arch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    M, N, K = shape
    call = float8(M, N, K, dtype)
    if M == 300:
        call = call._replace(bias=random(N), activation="silu", alpha=0.5, out_dtype=F16)
    if K == 128:
        call = call._replace(scale_a=scales().view(1, 1), scale_b=None, alpha=0.1)
    _assert_right(call, stand_in(call, arch))


@pytest.mark.parametrize(
    ("say", "instead"),
    [
        # a half that is still on its way, in the loop and behind it
        ("            _wait(5, M)", "            _wait(6, M)"),
        ("    _wait(0, M)", "    _wait(1, M)"),
        # copied over before it was read
        ("            _copy(rights.index(i)", "            _copy(rights.index(1 - i)"),
        ("(lines // 2 % ROW)", "(lines % ROW)"),
        ("mask=columns < limit", "mask=columns <= limit"),
        ("gl.minimum(tile_m * (2 * HALF), M - 2 * HALF)", "tile_m * (2 * HALF)"),
        ("            limit -= BLOCK_K", "            pass"),
    ],
)  # fmt: skip
def test_planted_errors_are_seen(say: str, instead: str) -> None:
    call = plain(257, 256, 264)
    with pytest.raises((AssertionError, IndexError)):
        _assert_right(call, stand_in(call, GFX950, **{say: instead}))


@pytest.mark.parametrize(
    ("say", "instead", "K"),
    [
        # stored over before it was read
        ("(left0 if i == 0 else left1).store", "(left1 if i == 0 else left0).store", 272),
        ("            (right0 if i == 0 else right1).store(new_right)", "            pass", 272),
        ("new_top = _fetch(top, a_offs + k", "new_top = _fetch(top, a_offs + k - BLOCK_K", 272),
        # beyond the end of K, where steps are not full and where they are
        ("mask=columns < limit", "mask=columns <= limit", 272),
        ("gl.minimum(k + BLOCK_K, K - BLOCK_K)", "(k + BLOCK_K)", 256),
        ("gl.minimum(2 * BLOCK_K, K - BLOCK_K)", "(2 * BLOCK_K)", 128),
        ("stride_sam, 0, stride_sbn, 0)", "0, 0, stride_sbn, 0)", 128),
    ],
)  # fmt: skip
def test_planted_errors_on_gfx942_are_seen(say: str, instead: str, K: int) -> None:
    call = float8(256, 256, K, FNUZ)
    if "minimum" in say:
        # nothing is behind the last row
        call = call._replace(a=call.a.contiguous(), b=call.b.mT.contiguous().mT)
    with pytest.raises((AssertionError, IndexError)):
        _assert_right(call, stand_in(call, GFX942, **{say: instead}))


@pytest.fixture
def as_gfx950(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The questions about the device answered as on a gfx950."""
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
    with _target.assumed(GFX950):
        yield


def test_what_it_does_not_take(as_gfx950: None) -> None:
    call = plain(300, 264, 72)
    assert cdna_launch.refusal(call) is None
    assert cdna_launch.refusal(plain(256, 257, 8, F16, bias=random(257), activation="gelu_tanh", alpha=2.0)) is None
    refusals = {
        "takes float16 and bfloat16": plain(300, 264, 72, F32),
        "returns the same": call._replace(out_dtype=F32),
        "makes no gated activation": call._replace(activation="silu_and_mul"),
        "takes no residual": call._replace(residual=random(300, 264)),
        "takes no norm": call._replace(norm_weight=random(72)),
        "takes no packed weight": call._replace(b=call.b.mT.contiguous().mT, form="shuffled"),
        "takes no batch": GemmCall(random(2, 300, 72), random(2, 264, 72).mT),
        "makes 256 rows and 256 columns at least": plain(255, 264, 72),
        "and 256 columns": plain(300, 255, 72),
        "16 bytes along K": plain(300, 264, 76),
        "strides of rows and columns": call._replace(b=call.b.contiguous()),
        "which strides": call._replace(a=random(72, 300).mT),
        "rows and columns do not allow": call._replace(a=random(300, 76)[:, :72]),
    }
    for reason, refused in refusals.items():
        assert reason in str(cdna_launch.refusal(refused)), reason
    assert cdna_launch.refusal(float8(300, 264, 80)) is None
    refusals = {
        "no scales of blocks": float8(300, 264, 256, scale_a=scales(300, 2)),
        "8-bit floats of one type": float8(300, 264, 80)._replace(b=plain(300, 264, 80, torch.float8_e5m2).b),
        "returns float16 or bfloat16": float8(300, 264, 80, out_dtype=F32),
        "takes float8_e4m3fn and float8_e5m2": float8(300, 264, 80, FNUZ),
        "16 bytes along K": float8(300, 264, 72),
    }
    for reason, refused in refusals.items():
        assert reason in str(cdna_launch.refusal(refused)), reason
    weight = call._replace(b=random(264, 72, dtype=I8).mT, scale_b=scales(264))
    assert "float16 and bfloat16" in str(cdna_launch.refusal(weight))
    far = torch.empty_strided((300, 72), (1 << 23, 1), dtype=BF16, device="meta")
    assert "32 bits" in str(cdna_launch.refusal(call._replace(a=far)))
    # rows that are one row have a stride that is allowed
    assert cdna_launch.refusal(call._replace(a=random(1, 72).expand(300, 72))) is None


def test_gfx942_takes_8_bit_floats_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
    with _target.assumed(GFX942):
        assert cdna_launch.refusal(float8(300, 264, 80, FNUZ)) is None
        for refused in (float8(300, 264, 80, FN), plain(300, 264, 80)):
            reason = str(cdna_launch.refusal(refused))
            assert "takes float8_e4m3fnuz and float8_e5m2fnuz on gfx942" in reason
        ranked = rank(gemm.study.kernels, gemm.key(float8(512, 512, 512, FNUZ)), GFX942)
        found = {one.config["BLOCK_K"] for one in ranked if one.backend == CDNA}
        assert found == {64}
        wide = rank(gemm.study.kernels, gemm.key(plain(512, 512, 512)), GFX942)
        assert CDNA not in {one.backend for one in wide}


def test_the_portable_kernel_says_why_it_runs(as_gfx950: None) -> None:
    call = plain(256, 256, 64)
    odd = torch.empty(256 * 64 + 1, dtype=BF16)[1:].view(256, 64)
    for changed, reason in ((call._replace(a=odd), "does not begin"), (plain(200, 256, 64), "makes 256 rows")):
        _launcher.replaced.cache_clear()
        with pytest.warns(PortableKernel, match=f"gemm: its portable kernel .* triton_cdna, which .*{reason}"):
            assert cdna_launch.bind(changed, configs.cdna(), lambda call: call.a)(changed) is changed.a
        # once is enough
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cdna_launch.bind(changed, configs.cdna(), lambda call: call.a)(changed) is changed.a


def test_it_is_not_for_torch_compile(as_gfx950: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile does not trace" in str(cdna_launch.refusal(plain(256, 256, 64)))


def test_it_is_for_gfx942_and_gfx950(device: str) -> None:
    if device == "cuda" and hardware.detect().arch in ("gfx942", "gfx950"):
        pytest.skip("this is one")
    reason = refuses(CDNA, GemmCall(random(256, 64, device=device), random(256, 64, device=device).mT))
    assert reason is not None and ("gfx950" in reason or "Gluon" in reason or "triton" in reason)


def test_a_measured_row_must_name_it_and_tune_offers_it(as_gfx950: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a gfx950 the choice names it with the reason; its configurations are ranked beside the portable kernel's."""
    monkeypatch.setattr("wavecrest.ops.common.triton.emulated", "gfx950")
    call, cdna = plain(512, 512, 512), gemm.backends[CDNA]
    assert cdna.refuse(call) is None and cdna.opt_in(call) is not None
    decision = gemm.decide(call)
    assert decision.backend != CDNA and CDNA in {one.backend for one in decision.refused}
    ranked = rank(gemm.study.kernels, gemm.key(call), GFX950)
    assert {"triton", CDNA} <= {one.backend for one in ranked}
    few = rank(gemm.study.kernels, gemm.key(plain(16, 512, 512)), GFX950)
    assert CDNA not in {one.backend for one in few}


def test_configurations() -> None:
    call = GemmCall(*(torch.empty(300, 72, dtype=BF16, device="meta") for _ in range(2)))
    call = call._replace(b=call.b.mT)
    tried = list(space.cdna_space(gemm.key(call), GFX950))
    assert tried[0] == configs.cdna() == first(call, GFX950) and len(tried) == len(set(tried)) > 1
    (made,) = space.cdna_launches(call, tried[0], GFX950)
    # 2 × 2 tiles; N in units of 4, K and strides in units of 8
    assert made.grid == (4,) and made.args[6:] == (300, 75, 9, 2, 2, 9, 9, 0, 0, 0, 1.0, 0.01)
    assert made.constants["EVEN_K"] is False and made.constants["ALIGN_N"] == 4
    assert space.cdna_launches(call._replace(a=call.a[:0]), tried[0], GFX950) == []
    eight = float8(300, 264, 80, FNUZ)
    assert [one["BLOCK_K"] for one in space.cdna_space(gemm.key(eight), GFX942)] == [64] * len(tried)
    (made,) = space.cdna_launches(eight, first(eight, GFX942), GFX942)
    # K and strides in units of 16, rows beside gaps of 32; a scale a row and a column
    assert made.args[8:16] == (5, 2, 2, 7, 7, 0, 1, 1) and made.constants["CHUNK"] == 16
    for wrong in ({"MATRIX": 8}, {"BLOCK_K": 32}, {"num_warps": 4}):
        with pytest.raises(InvalidArgument, match="triton_cdna has a MATRIX of 16 or 32"):
            cdna_launch.launch(call, call.a, Config(**(tried[0].kwargs | wrong)), GFX950)
