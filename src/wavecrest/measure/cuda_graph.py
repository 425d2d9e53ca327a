"""Recording work on a GPU as a CUDA/HIP graph: its warm-up, and what a failed capture leaves behind.

Warm up on a side stream, then capture with compilation forbidden: a missing warm-up raises instead of tracing inside
the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from wavecrest.errors import StepRefused

WARM_UP_CALLS = 3


def warm_up(work: Callable[[], Any]) -> None:
    """Run work a few times on a stream of its own, which the current stream then waits for."""
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            work()
    torch.cuda.current_stream().wait_stream(side)


def record(work: Callable[[], Any], pool: Any, what: str) -> tuple[Any, Any]:
    """A graph of one call of work, and what the call returned: memory that each replay fills.

    Args:
        work: was warmed up; runs on the current device, and asks the host nothing.
        pool: of `torch.cuda.graph_pool_handle`, where the graph's memory is from.
        what: what to call it in the error.

    Raises:
        StepRefused: it cannot be captured, with torch's reason.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    _clear_workspaces()
    try:
        with torch.compiler.set_stance("fail_on_recompile"), torch.cuda.graph(graph, pool=pool):
            output = work()
    except RuntimeError as error:
        _recover(pool)
        raise StepRefused(f"{what} cannot be captured: {str(error).splitlines()[0]}") from error
    finally:
        _clear_workspaces()
    return graph, output


def _clear_workspaces() -> None:
    """Let go of the workspaces of BLAS libraries, so that a graph has one of its own and nobody else uses that.

    torch keeps one for each stream, and captures share a stream: without this the second graph writes into memory of
    the first one's pool. Once the first is gone and somebody clears the workspaces, as torch's own graph trees do, that
    memory is unmapped and a replay of the second ends in "unspecified launch failure" (a BERT on an H100, 2026-11-26,
    torch 2.11).
    """
    # a build without a GPU has none
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _recover(pool: Any) -> None:
    """Undo what a failed capture leaves behind in torch (seen with 2.11 on an H200, 2026-11-20).

    The allocator still counts a capture under way, and the random generator still believes it is inside one: the next
    torch.randn raises "Offset increment outside graph capture". Ending the pool's use and one empty capture that
    succeeds put both right.
    """
    torch.cuda.synchronize()
    end_pool = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end_pool is not None:
        # torch ended it itself where the work raised and the capture was still valid
        with contextlib.suppress(RuntimeError):
            end_pool(torch.cuda.current_device(), pool)
    scratch = torch.zeros(1, device="cuda")
    empty = torch.cuda.CUDAGraph()
    with torch.cuda.graph(empty):
        scratch.add_(1)
    empty.reset()
