"""The reference of the accuracy gate: the original model in higher precision, and calls on other values.

Every call runs on a bucket's own tensors with other values written into them, and they are restored afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavecrest.measure.workload import Inputs, Workload, iter_tensors

if TYPE_CHECKING:
    from torch import nn

# float64 references are taken of models up to this many parameters; larger float32 models are their own reference
MAX_DOUBLE_PARAMETERS = 2_000_000_000

Outputs = dict[str, Tensor]


def call_outputs(function: Callable[..., Any], inputs: Inputs) -> Outputs:
    """Call without gradients; every tensor of the result by path, copied, so that a replay cannot change it."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        result = inputs.call(function)
    held = {tensor.data_ptr() for _, tensor in inputs.tensors()}
    return {
        path.lstrip(".") or "output": tensor.detach().clone()
        for path, tensor in iter_tensors("", result, set())
        # a cache that is handed in and returned is state, not an answer; the answers show what it holds
        if tensor.data_ptr() not in held
    }


@contextmanager
def holding(inputs: Inputs, values: list[Tensor]) -> Iterator[None]:
    """Other values in the inputs' own tensors for the time of the block."""
    before = inputs.snapshot()
    inputs.restore(values)
    try:
        yield
    finally:
        inputs.restore(before)


def variation(inputs: Inputs, number: int) -> list[Tensor]:
    """Values of the same shapes: number 0 is the example itself, others are derived from it, always the same way.

    Floating tensors get noise of their own scale and, in odd numbers, a few values ten times as large; two-dimensional
    integer tensors with more than two distinct values (token ids) are shuffled, which keeps every id valid; masks,
    positions and scalars stay.
    """
    values = inputs.snapshot()
    if number == 0:
        return values
    generator = torch.Generator().manual_seed(1000 + number)
    for value in values:
        if value.numel() < 2:
            continue
        if value.is_floating_point():
            if not bool(torch.isfinite(value).all()) or not bool((value != 0).any()):
                # additive masks carry infinities; an empty cache stays empty
                continue
            noise = torch.randn(value.shape, generator=generator, device="cpu").to(value.device, value.dtype)
            value += noise * value.float().std().to(value.dtype)
            if number % 2:
                flat = value.view(-1) if value.is_contiguous() else value.reshape(-1)
                flat[:: max(1, flat.numel() // 4)] *= 10
        elif value.ndim == 2 and value.dtype in (torch.int64, torch.int32) and int(value.max()) > 1:
            order = torch.randperm(value.numel(), generator=generator, device="cpu").to(value.device)
            value.copy_(value.reshape(-1)[order].reshape(value.shape))
    return values


def reference_model(workload: Workload) -> tuple[nn.Module | None, torch.dtype | None, str]:
    """A copy of the model in higher precision, and that dtype; or None twice, with the reason why it has no copy."""
    dtype = workload.dtype
    if dtype in ("bfloat16", "float16"):
        high = torch.float32
    elif dtype == "float32":
        high = torch.float64
    else:
        return None, None, f"a {dtype} model is its own reference"
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    if high is torch.float64 and count > MAX_DOUBLE_PARAMETERS:
        return None, None, f"{count / 1e9:.1f} billion parameters: no float64 copy, the original is the reference"
    try:
        return copy.deepcopy(workload.model).to(high), high, ""
    except Exception as error:
        return (
            None,
            None,
            f"no {high} copy of the model ({type(error).__name__}: {error}); the original is the reference",
        )


def high_precision(
    reference: nn.Module, high: torch.dtype, inputs: Inputs, values: list[Tensor], original: Outputs
) -> tuple[Outputs, str]:
    """The outputs of the high-precision copy; or `original`, the model's own, with the reason why they stand in.

    Args:
        reference: the copy.
        high: its dtype.
        inputs: of the bucket; a copy of them is called with.
        values: what goes into the tensors of `inputs`.
        original: what the model itself answers to these values.
    """
    raised = inputs.clone()
    raised.restore(values)
    try:
        outputs = call_outputs(reference, _raise_floats(raised, high))
    except Exception as error:
        first = (str(error).strip().splitlines() or ["(no message)"])[0]
        return original, f"the {high} copy raised {type(error).__name__}: {first}; the original is the reference"
    if outputs.keys() != original.keys():
        return original, f"the {high} copy has other outputs; the original is the reference"
    return outputs, ""


def _raise_floats(inputs: Inputs, high: torch.dtype) -> Inputs:
    """The same inputs with every floating tensor in `high`, also inside cache objects (which are changed in place)."""

    def convert(value: Any, seen: set[int]) -> Any:
        if isinstance(value, Tensor):
            return value.to(high) if value.is_floating_point() else value
        if id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, dict):
            for key in list(value):
                value[key] = convert(value[key], seen)
            return value
        if isinstance(value, list):
            value[:] = [convert(item, seen) for item in value]
            return value
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(convert(item, seen) for item in value)
        if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            for key, item in list(vars(value).items()):
                if isinstance(item, torch.dtype) and item.is_floating_point:
                    setattr(value, key, high)
                else:
                    setattr(value, key, convert(item, seen))
        return value

    seen: set[int] = set()
    args = tuple(convert(value, seen) for value in inputs.args)
    return Inputs(args, {key: convert(value, seen) for key, value in inputs.kwargs.items()})
