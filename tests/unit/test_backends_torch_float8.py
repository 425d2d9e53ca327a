"""8-bit floats that PyTorch's GEMM takes, and those it is not given: cuBLASLt wants rows at multiples of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.backends import gemm_then_act
from wavecrest.backends.torch import gemm as backend
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall

E4M3 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
