"""Triton's interpreter as the tests of kernels use it: what it leaves out by itself, it does here."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests import interpreter
from tests.ops.test_contract import example, refusal, results_of
from wavecrest import ops
from wavecrest.errors import InterpreterWarning
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops.common import interpreted
from wavecrest.ops.common.triton import tl, triton
from wavecrest.tune.contract import bits, copied

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


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget what was detected of the interpreter, before a test and after it."""
    found = (
        interpreted.computes_small_floats, interpreted._warn, interpreted.takes_scalar_masks, interpreted._warn_of_masks
    )  # fmt: skip
    for one in found:
        one.cache_clear()
    yield
    for one in found:
        one.cache_clear()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_users_are_told_that_small_floats_are_wrong(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter as it is: once, and only by kernels that have such values."""
    monkeypatch.undo()
    monkeypatch.setattr(interpreted, "takes_scalar_masks", lambda: True)
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    gemm = ops.get("gemm")
    with warnings.catch_warnings(record=True) as caught:
        # not those of numpy
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", InterpreterWarning)
        gemm.run("triton", GemmCall(a.half(), b.half()))
        gemm.run("triton", GemmCall(a, b))
        assert caught == []
        for _ in range(2):
            gemm.run("triton", GemmCall(a.to(dtype), b.to(dtype)))
    assert [one.category for one in caught] == [InterpreterWarning]
    assert "bfloat16" in str(caught[0].message) and "float32 or float16" in str(caught[0].message)


@pytest.mark.usefixtures("forgetful")
def test_users_are_told_that_masks_of_scalars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As triton 3.9's interpreter refuses them: once, before a kernel runs."""
    # the mends of these tests
    monkeypatch.undo()
    splat = sys.modules["triton.runtime.interpreter"].InterpreterBuilder.create_splat

    def refuse(self: Any, kind: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            raise ValueError("mask has unsupported dtype")
        return splat(self, kind, scalar)

    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_splat", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            interpreted.warn_of([])
    assert [one.category for one in caught] == [InterpreterWarning]
    assert "masks made of comparisons" in str(caught[0].message) and "unsupported dtype" in str(caught[0].message)


@pytest.mark.usefixtures("forgetful")
def test_there_is_no_warning_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 32).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InterpreterWarning)
        ops.get("gemm").run("triton", GemmCall(x, x.mT))
    assert interpreted.computes_small_floats() and interpreted.takes_scalar_masks()
