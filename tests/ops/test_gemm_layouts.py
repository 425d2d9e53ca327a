"""Strides of a and b, batches, and elements past 2^31."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from tests.ops.gemm_harness import (
    BF16,
    E5M2,
    F16,
    F32,
    I8,
    I32,
    KERNELS,
    SPLIT,
    UNWALKED,
    Watch,
    assert_result,
    assert_right,
    multiply,
    quicken,
    random,
    refuses,
    scaled,
    stream,
    takes,
    tile,
    watched,
    whole,
)
from tests.ops.op_harness import assert_call_never_copies, shape_id
from wavecrest import ops
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import Unsupported
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- layouts


# id -> dtype, device -> a with K = 40 columns; PyTorch multiplies int8 on a GPU for more than 16 rows
A_LAYOUTS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "rows": lambda t, d: whole(21, 40, dtype=t, device=d),
    "columns": lambda t, d: whole(40, 21, dtype=t, device=d).t(),
    "columns-of-32": lambda t, d: whole(40, 32, dtype=t, device=d).t(),
    "steps": lambda t, d: whole(42, 80, dtype=t, device=d)[::2, ::2],
    "odd-slice": lambda t, d: whole(23, 47, dtype=t, device=d)[1:22, 3:43],
    "odd-slice-of-columns": lambda t, d: whole(43, 25, dtype=t, device=d)[3:, 1:22].t(),
    "expanded-rows": lambda t, d: whole(1, 40, dtype=t, device=d).expand(21, 40),
    "expanded-columns": lambda t, d: whole(21, 1, dtype=t, device=d).expand(21, 40),
    "vector": lambda t, d: whole(40, dtype=t, device=d),
    "vector-step": lambda t, d: whole(120, dtype=t, device=d)[1::3],
    "3d": lambda t, d: whole(2, 5, 40, dtype=t, device=d),
    "3d-permuted": lambda t, d: whole(5, 2, 40, dtype=t, device=d).transpose(0, 1),
    "3d-columns": lambda t, d: whole(40, 2, 5, dtype=t, device=d).permute(1, 2, 0),
    "3d-sliced": lambda t, d: whole(4, 7, 45, dtype=t, device=d)[1:3, 2:, 1:41],
    "3d-expanded": lambda t, d: whole(3, 1, 40, dtype=t, device=d).expand(3, 4, 40),
    "4d-permuted": lambda t, d: whole(2, 3, 4, 40, dtype=t, device=d).permute(2, 1, 0, 3),
    "4d-last": lambda t, d: whole(2, 40, 3, 4, dtype=t, device=d).permute(3, 2, 0, 1),
    "5d-merged": lambda t, d: whole(3, 2, 2, 2, 40, dtype=t, device=d).permute(1, 0, 2, 3, 4),
    "one-row-of-each": lambda t, d: whole(1, 3, 1, 90, dtype=t, device=d)[..., ::2][..., :40],
}


# b with K = 40 rows and N = 24 columns
B_LAYOUTS: dict[str, Callable[[torch.dtype, str], Tensor]] = {
    "rows": lambda t, d: whole(40, 24, dtype=t, device=d, seed=1),
    "weight": lambda t, d: whole(24, 40, dtype=t, device=d, seed=1).mT,
    "steps": lambda t, d: whole(80, 72, dtype=t, device=d, seed=1)[::2, ::3],
    "odd-slice": lambda t, d: whole(43, 31, dtype=t, device=d, seed=1)[2:42, 5:29],
    "odd-slice-of-a-weight": lambda t, d: whole(29, 41, dtype=t, device=d, seed=1)[3:27, 1:].mT,
    "expanded-columns": lambda t, d: whole(40, 1, dtype=t, device=d, seed=1).expand(40, 24),
    "expanded-rows": lambda t, d: whole(1, 24, dtype=t, device=d, seed=1).expand(40, 24),
    "one-element": lambda t, d: whole(1, 1, dtype=t, device=d, seed=1).expand(40, 24),
}


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_layouts(a_layout: str, watch: Watch, device: str) -> None:
    for turn, b_layout in enumerate(B_LAYOUTS):
        dtype = (BF16, F16, F32, I8)[(turn + len(a_layout)) % 4]
        a, b = A_LAYOUTS[a_layout](dtype, device), B_LAYOUTS[b_layout](dtype, device)
        assert a.shape[-1] == 40 and b.shape == (40, 24)
        call = GemmCall(a, b, out_dtype=I32 if dtype == I8 else F32)
        assert_right("triton", call, tile(16, 32, 32), watch)
        if turn % 2 == len(a_layout) % 2 or device == "cuda":
            assert_right("triton_stream_k", call, stream(16, 32, 32), watch)
        assert_right("reference", call)
        # which rounds a product of 16 bits to those
        call = call if dtype in (F32, I8) else call._replace(out_dtype=None)
        if takes("torch", call):
            assert_right("torch", call)


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_layouts_of_few_rows(a_layout: str, watch: Watch, device: str) -> None:
    a = A_LAYOUTS[a_layout](F16, device)
    a = a[:5] if a.ndim == 2 else a[0] if a.ndim == 3 else a[0, 0] if a.ndim > 3 else a
    for b_layout in B_LAYOUTS:
        call = GemmCall(a, B_LAYOUTS[b_layout](F16, device))
        along_k = a.stride(-1) == 1 and call.b.stride(-2) == 1
        reason = refuses("triton_gemv", call)
        assert (reason is None) == along_k, reason
        if along_k:
            assert_right("triton_gemv", call, multiply(32, 32), watch)
        else:
            assert "contiguous" in str(reason)


@pytest.mark.parametrize("a_layout", A_LAYOUTS)
def test_no_copy(a_layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for b_layout in B_LAYOUTS:
        call = GemmCall(A_LAYOUTS[a_layout](F32, device), B_LAYOUTS[b_layout](F32, device))
        assert_call_never_copies(gemm, monkeypatch, call)


def test_more_leading_dimensions_than_the_kernels_take(device: str) -> None:
    a = random(2, 3, 2, 3, 40, device=device).permute(3, 2, 1, 0, 4)
    call = GemmCall(a, random(40, 20, device=device))
    for backend in KERNELS:
        assert "3 dimensions of rows without a common stride, not 4" in str(refuses(backend, call))
    gemm.force("triton")
    decision = gemm.decide(call)
    assert decision.backend == "torch"
    assert "without a common stride" in {one.backend: one.reason for one in decision.refused}["triton"]
    assert_result("torch", ops.gemm(call.a, call.b), call)


# a, b
BATCHES = (
    ((3, 5, 20), (3, 20, 18)),
    ((1, 5, 20), (3, 20, 18)),
    ((5, 20), (3, 20, 18)),
    ((3, 5, 20), (1, 20, 18)),
    ((2, 3, 5, 20), (2, 3, 20, 18)),
    ((2, 3, 5, 20), (1, 1, 20, 18)),
    ((1, 1, 5, 20), (2, 2, 20, 18)),
    ((1, 5, 20), (1, 20, 18)),
    ((1, 20), (2, 20, 18)),
)


def _batch_backends() -> tuple[tuple[str, Config | None], ...]:
    return (
        ("triton", tile(16, 32, 32)),
        ("triton", tile(16, 32, 16, SPLIT_K=2)),
        ("triton_stream_k", stream(16, 16, 16)),
        ("triton_gemv", multiply(32, 16, split=2)),
        ("torch", None),
        ("reference", None),
    )


@pytest.mark.parametrize("shapes", BATCHES, ids=lambda shapes: "-".join(map(shape_id, shapes)))
def test_batches(shapes: tuple[tuple[int, ...], tuple[int, ...]], watch: Watch, device: str) -> None:
    a_shape, b_shape = shapes
    a = random(*a_shape, device=device)
    weight = random(*b_shape[:-2], 18, 20, device=device, seed=1).mT
    for backend, config in _batch_backends():
        assert_right(backend, GemmCall(a, weight, out_dtype=F32 if backend != "torch" else None), config, watch)
    rows = random(*b_shape, device=device, seed=1)
    assert_right("triton", GemmCall(a, rows), tile(16, 32, 32), watch)
    assert "contiguous" in str(refuses("triton_gemv", GemmCall(a, rows)))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_batches_with_all_around(gated: bool, watch: Watch, device: str) -> None:
    a, b = random(2, 5, 20, device=device), random(2, 18, 20, device=device, seed=1).mT
    N = 9 if gated else 18
    call = GemmCall(
        a, b, random(18, dtype=F32, device=device, seed=2), activation="gelu_and_mul" if gated else "gelu", alpha=0.7,
        residual=random(5, 2, N, dtype=F16, device=device, seed=3).transpose(0, 1),
    )  # fmt: skip
    for given_too in (call, call._replace(bias=random(5, dtype=BF16, device=device), bias_along="m")):
        if gated and given_too.bias_along == "m":
            continue
        for backend, config in _batch_backends():
            if not (gated and backend == "triton_stream_k"):
                assert_right(backend, given_too, config, watch)
    integers = GemmCall(random(2, 5, 20, dtype=I8, device=device), random(2, 20, 18, dtype=I8, device=device))
    assert_right("triton", integers, tile(), watch)
    assert_right("triton", scaled(integers), tile(**SPLIT), watch)
    assert_right("reference", scaled(integers))
    assert "batch of int8" in str(refuses("torch", integers))


@pytest.mark.parametrize("case", UNWALKED)
def test_strides_that_do_not_merge_are_declined(case: str, device: str) -> None:
    call = UNWALKED[case](device)
    for backend in KERNELS:
        assert "one stride" in str(refuses(backend, call))
        with pytest.raises(Unsupported, match="one stride"):
            gemm.run(backend, call)
    gemm.force("triton")
    # a call of the same shapes that the kernel takes, and has taken
    walked = mapped(call, Tensor.contiguous)
    walked = walked._replace(
        a=walked.a.expand(2, 3, 5, 20).contiguous() if walked.a.ndim == 4 else walked.a,
        b=walked.b.expand(2, 3, 20, 18).contiguous() if walked.b.ndim == 4 else walked.b,
    )
    assert gemm.decide(walked).backend == "triton"
    assert_result("triton", gemm(walked), walked)
    assert gemm.decide(call).backend == "torch"
    assert_result("torch", gemm(call), call)


def test_more_products_in_a_batch_than_a_grid_has_programs(device: str) -> None:
    one = random(1, 1, 2, dtype=F32, device=device)
    for count in (65535, 65536):
        call = GemmCall(one.expand(count, 1, 2), one.mT)
        reasons = [refuses(backend, call) for backend in KERNELS]
        assert all(("65535 GEMMs" in str(reason)) == (count == 65536) for reason in reasons)
    gemm.force("triton")
    assert gemm.decide(call).backend == "torch"
    assert_result("torch", ops.gemm(call.a, call.b), call)


# --- strides past 2^31


@pytest.mark.parametrize("odd", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("far", ["rows of a", "K of a", "columns of b", "K of b", "batch of a", "batch of b"])
def test_elements_past_two_to_the_31(
    far: str, odd: int, watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch, overflows=True)
    # of the storage only the pages that are used are ever made; in units of 16 an even step fits 32 bits
    step = (1 << 31) + 16 + odd
    storage = torch.empty(step + (1 << 12), dtype=F16, device=device)

    def placed(shape: tuple[int, ...], strides: tuple[int, ...], seed: int) -> Tensor:
        made = storage.as_strided(shape, strides)
        return made.copy_(random(*shape, dtype=F16, device=device, seed=seed))

    a, b = random(2, 32, dtype=F16, device=device), random(16, 32, dtype=F16, device=device, seed=1).mT
    if far == "rows of a":
        a = placed((2, 32), (step, 1), 0)
    elif far == "K of a":
        a = placed((3, 2), (1, step), 0)
        b = b[:2]
    elif far == "columns of b":
        b = placed((32, 2), (1, step), 1)
    elif far == "K of b":
        a, b = a[:, :2], placed((2, 16), (step, 1), 1)
    elif far == "batch of a":
        a = placed((2, 2, 32), (step, 32, 1), 0)
        b = b.expand(2, 32, 16)
    else:
        b = placed((2, 16, 32), (step, 32, 1), 1).mT
    call = GemmCall(a, b, out_dtype=F32)
    for backend, config in (("triton", tile()), ("triton_stream_k", stream(k=16)), ("triton_gemv", multiply())):
        if refuses(backend, call) is None:
            assert_right(backend, call, config, watch)
        else:
            assert backend == "triton_gemv" and far.startswith("K of")


def test_rows_that_are_far_apart_together(watch: Watch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, overflows=True)
    # no stride past 2^31, but eight of them
    step = 1 << 29
    storage = torch.empty(7 * step + 64, dtype=I8, device=device)
    a = storage.as_strided((8, 32), (step, 1)).copy_(random(8, 32, dtype=I8, device=device)).view(E5M2)
    a = a.copy_(random(8, 32, dtype=E5M2, device=device))
    call = GemmCall(a, random(18, 32, dtype=E5M2, device=device, seed=1).mT, out_dtype=F32)
    for backend, config in (("triton", tile()), ("triton_stream_k", stream(k=16)), ("triton_gemv", multiply())):
        assert_right(backend, call, config, watch)
