"""Commands that every rank of a job starts alike: `torchrun --nproc-per-node N -m wavecrest optimize` and `tune`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from wavecrest import env
from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, Refused

if TYPE_CHECKING:
    from wavecrest.integrations.distributed import ParallelResult


def rank() -> int | None:
    """The rank of this process in a job of several, as torchrun says it; None in a process of its own."""
    ranks, own = env.get("WORLD_SIZE"), env.get("RANK")
    return int(own) if ranks.isdecimal() and int(ranks) > 1 and own.isdecimal() else None


def tunes(op: str) -> bool:
    """Whether this process tunes: rank 0 of a job does, with a child process for each GPU that it sees.

    Raises:
        InvalidArgument: a workload is to be tuned, whose calls belong to all ranks.
    """
    own = rank()
    if own is not None and ":" in op:
        raise InvalidArgument(
            f"{op} cannot be tuned in a job of several processes: record its calls with WAVECREST_MISSES=FILE.jsonl, "
            "then run `wavecrest tune FILE.jsonl`"
        )
    if own:
        _leave(own, "rank 0 tunes, on every GPU that it sees")
    return not own


def _leave(own: int, reason: str) -> None:
    _shared.err.print(f"rank {own}: nothing to do, {escape(reason)}", highlight=False, soft_wrap=True)


def optimize(
    own: int,
    spec: str,
    options: dict[str, Any],
    device: str | None,
    files: dict[str, Path],
    show: Callable[[], AbstractContextManager[Any]],
) -> ParallelResult:
    """Optimize the model of a workload that `parallelize` divided; every rank calls it alike.

    Args:
        own: this process's rank.
        spec: the workload's; its function starts the process group and divides the model.
        options: as for `wavecrest.integrations.distributed.optimize`.
        device: as for `wavecrest.hardware.detect`; None: the GPU with the number of the rank on its host.
        files: `out` and `bundle`, which rank 0 writes.
        show: the display, of rank 0 alone.

    Returns:
        This rank's result, without its model.

    Raises:
        InvalidArgument: the workload's model is not divided.
        Refused: the plan is in force on no rank.
        RankFailed: another rank failed or ended.
    """
    import torch
    import torch.distributed as dist

    from wavecrest.integrations import distributed
    from wavecrest.measure import workload

    local = env.get("LOCAL_RANK", "0")
    if device is None and torch.cuda.is_available():
        device = f"cuda:{local}"
        torch.cuda.set_device(int(local))
    try:
        loaded = workload.load(spec, device=device)
        if not distributed.is_divided(loaded.model):
            raise InvalidArgument(
                f"every rank has the whole model of {spec}: divide it in its function with "
                "wavecrest.integrations.distributed.parallelize, or run `wavecrest optimize` in one process"
            )
        with nullcontext(False) if own else show() as display:
            result = distributed.optimize(
                loaded.model,
                workload.Buckets(loaded.buckets),
                reset=loaded.reset,
                progress=display,
                **options,
                **files,
            )
        # with a graph alive that has collectives, NCCL 2.28.9 does not return (two H200s, 2026-11-26)
        result = replace(result, model=torch.nn.Identity())
        del loaded
        gc.collect()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


def finish(own: int, result: ParallelResult) -> None:
    """Raise where the plan is not in force, and say on other ranks that it is.

    Raises:
        Refused: the plan is in force on no rank.
    """
    if result.refused:
        raise Refused(f"the plan is in force on no rank: {result.refused}")
    if own:
        kept = ", ".join(step.title for step in result.plan.kept()) or "nothing"
        _shared.err.print(f"rank {own}: follows rank 0's plan, {escape(kept)}", highlight=False, soft_wrap=True)
