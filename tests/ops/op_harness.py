"""What the op tests share: layouts, float64 oracles, comparison and the checks that hold for every op.

Not a test file: `tests/ops/test_<op>.py` lists the cases of its op and calls these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor

from wavecrest import numerics, ops, registry

BACKENDS = ("triton", "torch", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# rows, columns: one element, one row, below and above a power of two, several rows a program with a ragged end, and
# leading shapes of other ranks
SHAPES = ((1, 1), (1, 1000), (3, 127), (37, 64), (70, 33), (5, 1025), (7,), (2, 3, 40), (2, 1, 3, 96), (1, 2, 2, 2, 8))
WIDE = 65600


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # an offset, so that a mean that is left out shows
    return (torch.randn(shape, generator=generator) + 0.25).to(device=device, dtype=dtype)


def _transposed(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((n, 9), dtype, device, seed).t()


def _row_sliced(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((12, n + 5), dtype, device, seed)[2:11, 3 : n + 3]


def _column_step(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((9, 2 * n), dtype, device, seed)[:, ::2]


def _row_step(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((18, n), dtype, device, seed)[::2]


def _permuted_3d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, 4, n), dtype, device, seed).permute(1, 0, 2)


def _permuted_3d_last(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, n, 5), dtype, device, seed).permute(0, 2, 1)


def _permuted_4d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((2, 3, 4, n), dtype, device, seed).permute(2, 1, 0, 3)


def _sliced_4d(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((4, 3, 5, n + 8), dtype, device, seed)[1:3, :, 1:5, :n]


def _expanded_rows(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((1, n), dtype, device, seed).expand(9, n)


def _expanded_middle(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((3, 1, n), dtype, device, seed).expand(3, 4, n)


def _expanded_columns(dtype: torch.dtype, device: str, seed: int, n: int) -> Tensor:
    return random((9, 1), dtype, device, seed).expand(9, n)


# id -> (dtype, device, seed, columns) giving a tensor whose last dimension has that many columns
LAYOUTS: dict[str, Callable[[torch.dtype, str, int, int], Tensor]] = {
    "transposed": _transposed,
    "row-sliced": _row_sliced,
    "column-step": _column_step,
    "row-step": _row_step,
    "permuted-3d": _permuted_3d,
    "permuted-3d-last": _permuted_3d_last,
    "permuted-4d": _permuted_4d,
    "sliced-4d": _sliced_4d,
    "expanded-rows": _expanded_rows,
    "expanded-middle": _expanded_middle,
    "expanded-columns": _expanded_columns,
}


def layout(key: str, dtype: torch.dtype, device: str, seed: int = 0, n: int = 72) -> Tensor:
    made = LAYOUTS[key](dtype, device, seed, n)
    assert made.shape[-1] == n
    assert not made.is_contiguous()
    return made


def _same_shape_pairs() -> list[tuple[str, str]]:
    shapes = {key: tuple(layout(key, torch.float32, "cpu").shape) for key in LAYOUTS}
    pairs = [(a, b) for a in LAYOUTS for b in LAYOUTS if shapes[a] == shapes[b]]
    return [(key, "contiguous") for key in LAYOUTS] + pairs


def second_layout(key: str, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` with the layout of a pair's second name."""
    if key == "contiguous":
        return random(tuple(like.shape), like.dtype, like.device.type, 1)
    return layout(key, like.dtype, like.device.type, 1)


def five_dims(dtype: torch.dtype, device: str, n: int = 24) -> Tensor:
    """Four leading dimensions without a common stride: more than the kernels take."""
    return random((2, 3, 2, 3, n), dtype, device).permute(3, 2, 1, 0, 4)


# (layout, layout of the second operand) for ops with two tensors of one shape
PAIRS = _same_shape_pairs()


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_matches(op: str, backend: str, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
    """The backend's results against the op's reference in float64, with x's dtype, contiguous."""
    found = registry.get(op)
    first = next(value for value in args if isinstance(value, Tensor))
    limits = numerics.tolerance(found.op_class, name(first.dtype))
    before = [value.clone() if isinstance(value, Tensor) else value for value in args]
    results = _tuple(found.run(backend, *args, **kwargs))
    oracle = _tuple(found.reference(*[_widen(value) for value in args], **kwargs))
    assert len(results) == len(oracle)
    for index, (got, want) in enumerate(zip(results, oracle, strict=True)):
        assert got.dtype == first.dtype
        compared = numerics.compare(got, want)
        assert compared.within(limits), f"{op} by {backend}, result {index}: {compared} outside {limits}"
        if backend == "triton":
            assert got.is_contiguous()
    if backend == "triton" and not kwargs:
        _assert_bound_calls_agree(found, results, args)
    for value, kept in zip(args, before, strict=True):
        if isinstance(value, Tensor):
            assert torch.equal(value.nan_to_num(), kept.nan_to_num()), "an argument was written to"


def _assert_bound_calls_agree(found: registry.Op, results: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
    """The dispatched call, which on a GPU skips Triton's look-up from the second time on, gives the same bits."""
    found.force("triton")
    for _ in range(3 if args[0].is_cuda else 1):
        for again, once in zip(_tuple(found(*args)), results, strict=True):
            assert again.is_contiguous() and torch.equal(again.nan_to_num(7.0), once.nan_to_num(7.0))
    found.force(None)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def assert_never_copies(op: str, monkeypatch: Any, *args: Any) -> None:
    """The kernel path makes no copy of an input, whatever its strides."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the input was copied")

    found = registry.get(op)
    config = found.default_config(found.key(*args))
    with monkeypatch.context() as patch:
        for method in ("contiguous", "reshape", "clone", "copy_", "flatten"):
            patch.setattr(torch.Tensor, method, refuse)
        # what is tested ends at the launch: the interpreter itself moves tensors about
        patch.setattr("wavecrest.ops._rows.starter", lambda *_args: lambda *_args, **_options: None)
        found.backends["triton"].run(*args, config=config)


def assert_grad_falls_back(op: str, *args: Any) -> None:
    """A call that needs gradients gets them, not from the kernel, and the decision says why."""
    found = registry.get(op)
    found.force("triton")
    leaves = [value.clone().requires_grad_() if isinstance(value, Tensor) else value for value in args]
    decision = found.decide(*leaves)
    assert decision.backend == "torch"
    assert "gradients" in {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    assert found.decide(*args).backend == "triton"
    with torch.no_grad():
        assert found.decide(*leaves).backend == "triton"
    results = _tuple(getattr(ops, op)(*leaves))
    sum(result.float().square().sum() for result in results).backward()  # type: ignore[union-attr]
    wide = [value.detach().double().requires_grad_() if isinstance(value, Tensor) else value for value in args]
    sum(result.square().sum() for result in _tuple(found.reference(*wide))).backward()  # type: ignore[union-attr]
    for leaf, want in zip(leaves, wide, strict=True):
        if isinstance(leaf, Tensor):
            assert leaf.grad is not None and want.grad is not None
            torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def assert_compiles(op: str, dynamic: bool, columns: int, extra: tuple[Any, ...] = ()) -> None:
    """One graph without breaks, equal to eager; with dynamic shapes the row count does not compile again."""
    found = registry.get(op)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if device == "cpu" else "inductor")
    public = getattr(ops, op)

    def call(*args: Any) -> Any:
        return public(*args, *extra)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    with torch.no_grad():
        for rows in (4, 5, 17):
            args = found.inputs(rows, columns, torch.float32, device)
            for got, want in zip(_tuple(compiled(*args)), _tuple(call(*args)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == (1 if dynamic else 3)
    # the decision made while tracing is on record
    assert any(decision.key[0] == 0 and calls == 0 for decision, calls in found.decisions())
