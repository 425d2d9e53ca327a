"""A quick look at whether this machine computes right: one call of every op on each backend, beside its oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from wavecrest import ops
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument
from wavecrest.records import SmokeRow
from wavecrest.tune import contract

OnRow = Callable[[SmokeRow], None]


def run(device: str, *, on_row: OnRow | None = None) -> list[SmokeRow]:
    """Run one small call of every op on the backend that dispatch picks, on PyTorch and on wavecrest's kernels.

    Results are held to the contract's limits (`contract.broken_values`), over memory that was filled with NaN.

    Args:
        device: torch's name of it. On a GPU calls have bfloat16, on the CPU float32.
        on_row: called after each.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows = []
    with torch.no_grad():
        for name in ops.names():
            for row in _rows(ops.get(name), dtype, device):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    return rows


def _rows(op: AnyOp, dtype: torch.dtype, device: str) -> Iterator[SmokeRow]:
    """The backends of an op on its example call, in the order of the registry."""
    row = SmokeRow(op=op.name, backend="", dtype=str(dtype).removeprefix("torch."), outcome="refused")
    try:
        call = contract.example(op, dtype, device)
        picked = op.decide(call).backend
    except InvalidArgument as error:
        yield row.model_copy(update={"reason": str(error)})
        return
    for backend in op.backends:
        if backend in (picked, "torch") or backend.startswith("triton"):
            yield _row(op, backend, call, row.model_copy(update={"backend": backend, "picked": backend == picked}))


def _row(op: AnyOp, backend: str, call: AnyCall, row: SmokeRow) -> SmokeRow:
    refusal = op.backends[backend].refuse(call)
    if refusal is not None:
        return row.model_copy(update={"reason": refusal})
    problem = contract.broken_values(contract.Subject(op, backend), contract.copied(call))
    if problem is None:
        return row.model_copy(update={"outcome": "ok"})
    outcome = "failed" if problem.rule == "raises" else "wrong"
    return row.model_copy(update={"outcome": outcome, "reason": problem.text})
