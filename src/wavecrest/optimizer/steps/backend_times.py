"""Backends of an op timed on one call alone, before a whole model is built and measured with one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from wavecrest.errors import WavecrestError
from wavecrest.ops.common import warmup

# gain that a backend must show on the call alone
MIN_ALONE = 0.03

# time in ms of one call of a function
Timer = Callable[[Callable[[], Any]], float]


@torch.no_grad()
def compile_together(calls: Iterable[Callable[[], Any]], device: str) -> None:
    """Compile the kernels of calls in threads: one after the other they took 10 to 12 s (H200, 2026-11-27, no record).

    Calls are taken from `calls` one by one, as the numbers of all layers may be more than memory holds.
    """

    def first_calls() -> None:
        for call in calls:
            # told when it is timed
            with contextlib.suppress(WavecrestError):
                call()

    if warmup.possible(torch.device(device)):
        warmup.rehearse(first_calls)


@torch.no_grad()
def times_of(names: Iterable[str], run: Callable[[str], Any], time: Timer) -> tuple[dict[str, float], dict[str, str]]:
    """The ms of a call on each backend, and the first line of what others raised.

    Args:
        names: of backends that take the call.
        run: makes the call on a backend.
        time: how it is timed.
    """
    times: dict[str, float] = {}
    raised: dict[str, str] = {}
    for name in names:
        try:
            times[name] = time(partial(run, name))
        except WavecrestError as error:
            # it cannot be captured, or its configuration does not fit the chip
            raised[name] = str(error).partition("\n")[0]
    return times, raised


def told(left_out: Mapping[str, str]) -> str:
    """Backends that raised, as a clause that goes after others; empty without one."""
    names = "; ".join(f"left out of the race: {name} ({error})" for name, error in left_out.items())
    return f"; {names}" if names else ""
