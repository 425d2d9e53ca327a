from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    PAIRS,
    SHAPES,
    WIDE,
    assert_compiles,
    assert_few_calls,
    assert_grad_falls_back,
    assert_matches,
    assert_never_copies,
    call_of,
    five_dims,
    layout,
    name,
    random,
    reference,
    run,
    second_layout,
    shape_id,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument

OP = "silu_and_mul"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str) -> None:
    assert_matches(OP, backend, random(shape, dtype, device), random(shape, dtype, device, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 2), (37, 128), (5, 2050), (3, 4, 66), (18,)], ids=shape_id)
def test_packed(shape: tuple[int, ...], backend: str, device: str) -> None:
    packed = random(shape, torch.float32, device)
    assert_matches(OP, backend, packed, None)
    gate, up = packed.chunk(2, dim=-1)
    got = run(OP, backend, packed, None)
    assert got.shape == gate.shape
    torch.testing.assert_close(got, reference(OP, gate, up), rtol=1e-5, atol=1e-6)


def test_definition(device: str) -> None:
    # the reference itself, against values worked out from the formula
    gate = torch.tensor([[-2.0, 0.0, 1.0, 3.0]], dtype=torch.float64, device=device)
    up = torch.tensor([[3.0, 5.0, 2.0, -1.0]], dtype=torch.float64, device=device)
    want = torch.tensor([[-0.71521753, 0.0, 1.46211716, -2.85772238]], dtype=torch.float64, device=device)
    torch.testing.assert_close(ops.silu_and_mul(gate, up), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("key", "other"), PAIRS)
def test_strides(key: str, other: str, device: str) -> None:
    gate = layout(key, torch.float32, device)
    up = second_layout(other, gate)
    assert_matches(OP, "triton", gate, up)
    assert_matches(OP, "triton", up, gate)


@pytest.mark.parametrize("key", LAYOUTS)
def test_packed_strides(key: str, device: str) -> None:
    assert_matches(OP, "triton", layout(key, torch.float32, device, n=72), None)


@pytest.mark.parametrize("key", LAYOUTS)
def test_no_copy(key: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = layout(key, torch.float32, device)
    assert_never_copies(OP, monkeypatch, x, x)
    assert_never_copies(OP, monkeypatch, x, None)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_several_column_blocks(packed: bool, device: str) -> None:
    config = Config(BLOCK_M=2, BLOCK_N=16, num_warps=1)
    gate, up = random((5, 72), torch.bfloat16, device), random((5, 72), torch.bfloat16, device, 1)
    args = (torch.cat((gate, up), dim=-1), None) if packed else (gate, up)
    got = run(OP, "triton", *args, config=config)
    torch.testing.assert_close(got, reference(OP, gate, up), rtol=8e-3, atol=1e-3)


def test_wide_rows(device: str) -> None:
    assert_matches(OP, "triton", random((2, 2 * WIDE), torch.bfloat16, device), None)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_special_values(backend: str, device: str) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[-inf, inf, nan, 0.0, -0.0, -200.0, 200.0, -1e30, 1.0, 1.0]], device=device)
    up = torch.tensor([[1.0, 2.0, 1.0, inf, 1.0, 3.0, 0.5, 1.0, nan, -inf]], device=device)
    assert_matches(OP, backend, gate, up)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=shape_id)
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = random(shape, torch.float32, device)
    assert run(OP, backend, x, x).shape == shape
    assert run(OP, backend, x).shape == (*shape[:-1], shape[-1] // 2)


def test_float64_stays_float64(device: str) -> None:
    gate, up = random((5, 40), torch.float64, device), random((5, 40), torch.float64, device, 1)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(ops.silu_and_mul(gate, up), want, rtol=1e-13, atol=1e-13)


def test_more_leading_dims_than_the_kernel_takes(device: str) -> None:
    x = five_dims(torch.float32, device)
    registry.get(OP).force("triton")
    assert "leading dimensions" in registry.get(OP).decide(call_of(OP, x)).refused[0].reason
    torch.testing.assert_close(ops.silu_and_mul(x), reference(OP, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0,), "takes a tensor", id="number"),
        pytest.param((torch.ones(2, 4, dtype=torch.int32),), "floating-point", id="integers"),
        pytest.param((torch.ones(2, 5),), "even last dimension", id="packed-odd"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 3)), "up must be", id="up-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4).half()), "up must be", id="up-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4, device="meta")), "up must be", id="up-elsewhere"),
        pytest.param((torch.ones(2, 4), "up"), "up must be", id="up-text"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.silu_and_mul(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)


def test_gradients(device: str) -> None:
    gate, up = random((3, 40), torch.float32, device), random((3, 40), torch.float32, device, 1)
    assert_grad_falls_back(OP, gate, up)
    assert_grad_falls_back(OP, gate, None)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bound_call_is_short(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = random((3, 40), torch.float32, device)
    assert_few_calls(OP, backend, monkeypatch, gate, gate)
    assert_few_calls(OP, backend, monkeypatch, gate)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 48)
