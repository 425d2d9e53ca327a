"""Triton's interpreter as the tests of kernels use it: what it leaves out by itself, it does here."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests import interpreter
from tests.ops.test_contract import bits, copied, example, refusal, results_of
from wavecrest import ops
from wavecrest.ops.common.triton import tl, triton

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU here", allow_module_level=True)


@triton.jit
def _product(x, factor):  # type: ignore[no-untyped-def]
    return x * factor


@triton.jit
def _integers_kernel(x_ptr, y_ptr, factor, term, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    # in a function of its own, as most of what kernels do
    tl.store(y_ptr + offs, _product(tl.load(x_ptr + offs), factor) + term - 1)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _convert_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


def _integers(x: torch.Tensor, factor: int, term: int) -> torch.Tensor:
    y = torch.empty_like(x)
    _integers_kernel[(1,)](x, y, factor, term, BLOCK=x.numel())
    return y


@pytest.mark.parametrize(("factor", "term"), [(2**20, 0), (1, 2**31 - 8), (-(2**20), 0), (1, -(2**31))])
def test_integers_that_leave_their_type_are_errors(factor: int, term: int) -> None:
    x = torch.arange(4096, dtype=torch.int32)

    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"int32 overflow in (add|sub|mul)"):
        _integers(x, factor, term)

    # and the next launch is as any other
    assert torch.equal(_integers(x, 3, 2), x * 3 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ops.names())
def test_shortcuts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    op, call = ops.get(name), example(name, dtype, "cpu")
    for backend in [one for one in op.backends if one.startswith("triton") and refusal(name, one, call) is None]:
        found = results_of(op.run(backend, copied(call)))
        with pytest.MonkeyPatch.context() as patch:
            interpreter.take_no_shortcut(patch)
            wanted = results_of(op.run(backend, copied(call)))
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, wanted, strict=True)), backend


def test_integers_of_64_bits_go_beyond_32() -> None:
    x = torch.arange(4096, dtype=torch.int64)

    assert torch.equal(_integers(x, 2**20, 1), x * 2**20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_floats_multiply_as_floats(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16).to(dtype) for _ in range(2))
    c = torch.full((16, 16), torch.nan)

    _dot_kernel[(1,)](a, b, c, BLOCK=16)

    torch.testing.assert_close(c, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_round_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 61), torch.tensor([1 + 2**-8, 2**-9, torch.nan])])
    there = torch.empty(64, dtype=dtype)
    back = torch.empty(64)

    _convert_kernel[(1,)](x, there, BLOCK=64)
    _convert_kernel[(1,)](there, back, BLOCK=64)

    torch.testing.assert_close(back, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_triton_is_itself_again_behind_a_launch() -> None:
    def state() -> dict[str, Callable[..., object]]:
        return {name: getattr(tl, name) for name in ("load", "store", "arange", "dot", "sum", "static_range")}

    before = state()
    _integers(torch.arange(16, dtype=torch.int32), 1, 1)

    assert state() == before
