"""`torch.export` of optimized models: surgery stays, capture and compilation go, PyTorch's operations run the rest.

An exported program runs where wavecrest is not installed, so wavecrest's kernels are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wavecrest import ops
from wavecrest.dispatch.op import STATE
from wavecrest.errors import Unsupported
from wavecrest.graphs.capture import CapturedModule
from wavecrest.measure.workload import from_example

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["export"]


def export(model: nn.Module, example_inputs: Any, **options: Any) -> ExportedProgram:
    """`torch.export.export` of a model that a run or a plan has made, or of any other.

    Every op runs on PyTorch's backend in the program, and on the reference where PyTorch has none. Graph capture and
    compilation are not part of it: `torch.compile(program.module())` or AOTInductor compile anew.

    Args:
        model: it is not changed.
        example_inputs: as for `wavecrest.optimize`, of one shape.
        options: of `torch.export.export`, such as dynamic_shapes and strict. The rows of wavecrest's linear layers
            cannot be free: the choice of their backend depends on them.

    Raises:
        WorkloadError: the inputs cannot be used, or are of several shapes.
        Unsupported: the model cannot be exported, or an operation of wavecrest would be in the program; the message
            says which.
    """
    workload = from_example(model, example_inputs)
    workload.restore_modes()
    if len(workload.buckets) != 1:
        raise Unsupported(
            f"torch.export takes inputs of one shape, not {len(workload.buckets)} buckets: dynamic_shapes"
        )
    (inputs,) = workload.buckets.values()
    plain = model.inner if isinstance(model, CapturedModule) else model
    name = type(plain).__name__
    with _on_pytorch(), torch.no_grad():
        try:
            program = torch.export.export(plain, inputs.args, dict(inputs.kwargs), **options)
        # Dynamo's and the exporter's errors have no class in common
        except Exception as error:
            first = (str(error).strip().splitlines() or ["(no message)"])[0]
            raise Unsupported(f"{name} cannot be exported: {type(error).__name__}: {first}") from error
    left = sorted({str(node.target) for node in program.graph.nodes if _is_ours(node.target)})
    if left:
        raise Unsupported(
            f"{name} would be exported with {', '.join(left)}, which other processes do not have; leave out the step "
            "that names the backend"
        )
    return program


def _is_ours(target: Any) -> bool:
    return "wavecrest" in str(target) or "triton_kernel_wrapper" in str(target)


@contextmanager
def _on_pytorch() -> Iterator[None]:
    """Every op on PyTorch's backend, or the reference; what was forced before is forced again after it."""
    found = {name: ops.get(name) for name in STATE.ops}
    before = {name: op._forced for name, op in found.items()}
    try:
        for op in found.values():
            op.force("torch" if "torch" in op.backends else "reference")
        yield
    finally:
        for name, op in found.items():
            op.force(before[name])
