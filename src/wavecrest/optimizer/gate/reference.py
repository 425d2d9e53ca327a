"""The reference of the accuracy gate: the original model in higher precision, on inputs in higher precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavecrest.measure.tree import attributes, children
from wavecrest.measure.workload import Inputs, Workload, begin_step
from wavecrest.optimizer.gate.leaves import Answer, collect
from wavecrest.optimizer.gate.snapshot import Snapshot
from wavecrest.optimizer.gate.streamed import streamed

if TYPE_CHECKING:
    from torch import nn

# float64 references are taken of models up to this many parameters; larger float32 models are their own reference
MAX_DOUBLE_PARAMETERS = 2_000_000_000


def call(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call without gradients; outputs of inductor's earlier replays may be overwritten."""
    begin_step()
    with torch.no_grad():
        return inputs.call(function)


class Reference:
    """A copy of the model in higher precision.

    Attributes:
        note: the reason if it cannot be made or does not answer; the original is the reference then.
        how: how it was made, where not as a whole copy.
    """

    def __init__(self, workload: Workload) -> None:
        self._model: nn.Module | None = None
        self._high: torch.dtype = torch.float64
        self._buffers: Snapshot | None = None
        self.how = ""
        self.note = self._prepare(workload)

    def _prepare(self, workload: Workload) -> str:
        dtype = workload.dtype
        if dtype in ("bfloat16", "float16"):
            self._high = torch.float32
        elif dtype != "float32":
            return f"a {dtype} model is its own reference"
        count = sum(parameter.numel() for parameter in workload.model.parameters())
        if self._high is torch.float64 and count > MAX_DOUBLE_PARAMETERS:
            return f"{count / 1e9:.1f} billion parameters: no float64 copy, the original is the reference"
        try:
            self._model = self._copy(workload.model)
        except Exception as error:
            return f"no {self._high} copy of the model ({type(error).__name__}: {error}); the original is the reference"
        self._buffers = Snapshot(self._model.named_buffers())
        return ""

    def _copy(self, model: nn.Module) -> nn.Module:
        """The model in higher precision: all of it at once where memory holds that, else a module at a time."""
        try:
            return copy.deepcopy(model).to(self._high)
        except torch.OutOfMemoryError:
            # outside of this block, as the error keeps what was made so far
            pass
        torch.cuda.empty_cache()
        self.how = f"memory holds no whole {self._high} copy of the model: each module's weights are raised as it runs"
        return streamed(model, self._high)

    def answer(self, inputs: Inputs) -> tuple[Answer, dict[str, Tensor]] | None:
        """The copy's answer, and the tensors of its inputs and buffers after the call, by path.

        Args:
            inputs: hold the values; a copy of them is called with.

        Returns:
            None where it does not answer; `note` has the reason.
        """
        if self._model is None or self._buffers is None:
            return None
        self._buffers.restore()
        raised = _raise_floats(inputs.clone(), self._high)
        buffers = [(f"buffer {name}", tensor) for name, tensor in self._model.named_buffers()]
        roots = Snapshot([*_input_roots(raised), *buffers])
        try:
            found = collect(call(self._model, raised), roots.names)
        except Exception as error:
            first = (str(error).strip().splitlines() or ["(no message)"])[0]
            self.note = f"the {self._high} copy raised {type(error).__name__}: {first}; the original is the reference"
            return None
        return found, roots.current()


def _input_roots(inputs: Inputs) -> list[tuple[str, Any]]:
    return [*((f"args[{index}]", value) for index, value in enumerate(inputs.args)), *inputs.kwargs.items()]


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
        if children(value) is not None and not callable(value) and not isinstance(value, tuple):
            for key, item in attributes(value):
                lowered = isinstance(item, torch.dtype) and item.is_floating_point
                # frozen dataclasses too
                object.__setattr__(value, key, high if lowered else convert(item, seen))
        return value

    seen: set[int] = set()
    args = tuple(convert(value, seen) for value in inputs.args)
    return Inputs(args, {key: convert(value, seen) for key, value in inputs.kwargs.items()})
