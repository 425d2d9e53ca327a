"""8-bit floats that PyTorch's GEMM takes, and those it is not given: cuBLASLt wants rows at multiples of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.backends import gemm_then_act
from wavecrest.backends.torch import gemm as backend
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall

E4M3 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_BLOCKS = backend._has_blocks
# whether each call of the GEMM that stands for PyTorch's was allowed to sum in fewer bits
FAST: list[bool] = []


def rows(count: int, size: int, padding: int = 0, offset: int = 0) -> Tensor:
    """[count, size] of small numbers, `padding` elements between rows, `offset` elements behind an aligned address."""
    memory = torch.randint(-3, 4, (offset + count * (size + padding),)).to(torch.float32).to(E4M3).to(DEVICE)
    return memory[offset:].view(count, size + padding)[:, :size]


def product(a: Tensor, b: Tensor, **options: Any) -> GemmCall:
    one = torch.ones((), device=DEVICE)
    return GemmCall(a, b.mT, scale_a=one, scale_b=one, **options)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: what is_cuda says, and a GEMM that is as particular as the GPU's (H200, torch 2.11)."""
    if DEVICE == "cuda":
        return

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        FAST.append(use_fast_accum)
        for one in (a, b.mT):
            assert one.stride(1) == 1 and one.stride(0) % 16 == 0 and one.data_ptr() % 16 == 0
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@pytest.mark.parametrize("activation", [None, "gelu_tanh_and_mul"])
@pytest.mark.parametrize("padding", [0, 16, 1, 8])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_columns_of_b_that_begin_off_16_bytes_are_refused(padding: int, activation: str | None) -> None:
    call = product(rows(32, 64), rows(96, 64, padding), activation=activation, out_dtype=torch.bfloat16)
    refuse = backend.refuse if activation is None else gemm_then_act._refuse
    reason = refuse(call)
    assert (reason is not None) == (padding % 16 != 0)
    if reason is not None:
        assert reason == "multiplies 8-bit floats with columns of b that begin a multiple of 16 bytes apart"
        # decisions are made once for a key
        assert op.key(call) != op.key(call._replace(b=rows(96, 64, 16).mT))


@pytest.mark.parametrize("activation", [None, "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_another_backend_is_the_default_where_pytorch_refuses(offset: int, activation: str | None) -> None:
    """And the decision says why; an address off 16 bytes, which a key does not have, is no reason."""
    options = {"activation": activation, "out_dtype": torch.bfloat16}
    taken = op.decide(product(rows(32, 64), rows(96, 64, 16, offset), **options))
    assert taken.backend in ("torch", "gemm_then_act")
    refused = op.decide(product(rows(32, 64), rows(96, 64, 8, offset), **options))
    reasons = {one.backend: one.reason for one in refused.refused}
    assert refused.backend not in ("torch", "gemm_then_act")
    for name in ("torch",) if activation is None else ("torch", "gemm_then_act"):
        assert "a multiple of 16 bytes apart" in reasons[name]


@pytest.mark.parametrize(
    ("of", "padding", "offset"),
    [(of, *where) for of in "ab" for where in ((0, 0), (16, 0), (0, 1), (0, 8), (16, 8))] + [("a", 1, 0), ("a", 8, 0)],
)
@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_begins_off_16_bytes_is_copied(count: int, of: str, padding: int, offset: int) -> None:
    a = rows(count, 64, padding, offset) if of == "a" else rows(count, 64)
    b = rows(96, 64, padding, offset) if of == "b" else rows(96, 64)
    call = product(a, b, out_dtype=torch.float32)
    assert backend.refuse(call) is None
    torch.testing.assert_close(backend.bind(call)(call), a.float() @ b.float().mT)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_sums_in_fewer_bits_are_asked_for_by_name() -> None:
    if DEVICE == "cuda":
        pytest.skip("what PyTorch is asked for is seen on a CPU")
    call = product(rows(32, 64), rows(96, 64))
    FAST.clear()
    for precision in ("ieee", "fast_accum"):
        backend.bind(call._replace(precision=precision))(call)
    assert FAST == [False, True]


@pytest.mark.parametrize("sides", [(0, 16), (16, 0), (8, 16), (16, 8)])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_other_sides_than_multiples_of_16_are_refused(sides: tuple[int, int]) -> None:
    k, n = sides
    assert "multiples of 16" in str(backend.refuse(product(rows(32, k), rows(n, k))))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("padding", [0, 1, 8, 16, 24])
@pytest.mark.parametrize("count", [1, 16, 17, 512])
def test_every_stride_is_answered_on_a_gpu(count: int, padding: int, activation: str | None) -> None:
    """By the backend that dispatch picks, as the reference has it."""
    for a, b in ((rows(count, 256, padding), rows(96, 256)), (rows(count, 256), rows(96, 256, padding))):
        call = product(a, b, activation=activation, out_dtype=torch.bfloat16)
        got, want = op(call), op.reference(call)
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-4)


def blocked(M: int, N: int = 256, K: int = 512, **options: Any) -> GemmCall:
    """Scales up to eight times apart: for 128 columns of a row of a, and for 128 × 128 of the weight."""
    generator = torch.Generator().manual_seed(M + N + K)
    scale_a, scale_b = (
        (2.0 ** torch.randint(-2, 2, (rows, -(-K // 128)), generator=generator)).to(DEVICE)
        for rows in (M, -(-N // 128))
    )
    options = {"out_dtype": torch.bfloat16} | options
    return GemmCall(rows(M, K), rows(N, K).mT, scale_a=scale_a, scale_b=scale_b.mT, **options)


@pytest.fixture
def as_on_sm_90(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: as on an sm_90 with a PyTorch that has scales of blocks, and is as particular about them."""

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        (M, K), N = a.shape, b.shape[1]
        assert M % 16 == 0 and not use_fast_accum and out_dtype == torch.bfloat16
        assert scale_a.shape == (M, K // 128) and scale_a.stride() == (1, M)
        assert scale_b.shape == (K // 128, -(-N // 128)) and scale_b.stride(0) == 1
        assert scale_b.shape[1] == 1 or scale_b.stride(1) == K // 128
        for one in (a, b.mT):
            assert one.stride(1) == 1 and one.stride(0) % 16 == 0 and one.data_ptr() % 16 == 0
        wide_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :N]
        return ((a.float() * scale_a.repeat_interleave(128, 1)) @ (b.float() * wide_b)).to(out_dtype)

    if DEVICE == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        monkeypatch.setattr(backend, "_has_blocks", lambda: True)
        monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
        monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
        monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
        # tensors are on the CPU for kernels alone
        monkeypatch.setattr("wavecrest.dispatch.op.device_of", lambda _call: "cuda")
        monkeypatch.setattr("wavecrest.ops.common.checks.kernel_refusal", lambda *_: None)
    elif hardware.detect().arch != "sm_90" or not backend._has_blocks():
        pytest.skip("PyTorch has scales of blocks on sm_90, from 2.10 and CUDA 12.9 on")


@pytest.mark.parametrize("count", [1, 16, 100, 512])
@pytest.mark.usefixtures("as_on_sm_90")
def test_scales_of_blocks_are_laid_out_as_the_gpu_takes_them(count: int) -> None:
    """With rows in sixteens, whatever the strides of the call's; products with all ends."""
    bias = torch.linspace(-2, 2, 144).to(torch.bfloat16).to(DEVICE)
    call = blocked(count, 144, 1024)
    assert call.scale_a is not None and call.scale_b is not None
    across = call._replace(scale_a=call.scale_a.mT.contiguous().mT, scale_b=call.scale_b.contiguous())
    apart = call._replace(a=rows(count, 1024, 8))
    for one in (call, across, apart, call._replace(bias=bias, activation="gelu")):
        assert backend.refuse(one) is None
        wanted = op.reference(one).float()
        torch.testing.assert_close(backend.bind(one)(one).float(), wanted, rtol=2**-6, atol=2**-4)


@pytest.mark.usefixtures("as_on_sm_90")
def test_scales_of_blocks_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.refuse(blocked(32)) is None
    assert "multiple of 512" in str(backend.refuse(blocked(32, K=640)))
    for dtype in (torch.float16, torch.float32):
        assert "result of bfloat16" in str(backend.refuse(blocked(32, out_dtype=dtype)))
    one = torch.ones((), device=DEVICE)
    assert "not tensor and block" in str(backend.refuse(blocked(32)._replace(scale_a=one)))
    monkeypatch.setattr(backend, "_has_blocks", HAS_BLOCKS)
    for version in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert "CUDA 12.9 and later" in str(backend.refuse(blocked(32)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert backend.refuse(blocked(32)) is None or not hasattr(torch.nn.functional, "ScalingType")
    for arch in ("gfx942", "sm_100"):
        monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda arch=arch: ARCHS[arch])
        assert "on sm_90" in str(backend.refuse(blocked(32)))


@pytest.mark.parametrize(
    ("call", "chosen"),
    [
        (lambda: blocked(16), "triton"),
        (lambda: blocked(17), "triton_hopper_blocks"),
        (lambda: blocked(512), "triton_hopper_blocks"),
        (lambda: blocked(513), "torch"),
        (lambda: blocked(513, K=640), "triton_hopper_blocks"),
        (lambda: blocked(513, activation="silu_and_mul"), "triton_hopper_blocks"),
        (lambda: blocked(513, activation="relu"), "triton_hopper_blocks"),
        # which triton_hopper_blocks does not take
        (lambda: blocked(17, alpha=2.0, activation="relu"), "torch"),
        (lambda: blocked(17, 128, activation="silu_and_mul"), "torch" if DEVICE == "cpu" else "gemm_then_act"),
        (lambda: blocked(16, alpha=2.0), "triton"),
    ],
)
@pytest.mark.usefixtures("as_on_sm_90")
def test_the_default_with_scales_of_blocks(call: Any, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no row is measured."""
    monkeypatch.setattr("wavecrest.dispatch.op._measured", lambda *_: ("", None, "", ""))
    one = call()
    found = op.decide_as(op.key(one), one)
    assert found.backend == chosen, found.refused


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 24, 1000])
@pytest.mark.usefixtures("as_on_sm_90")
def test_scales_of_blocks_on_a_gpu(count: int) -> None:
    """Within what `wavecrest tune` admits backends by; in a compiled function too."""
    call = blocked(count, 1040, 2048)
    wanted = op.reference(call).double()
    for run in (backend.bind(call), torch.compile(backend.run, fullgraph=True)):
        assert bool(((run(call).double() - wanted).abs() <= op.study.bound(call)).all())
