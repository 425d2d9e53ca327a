"""Choices for the calls of some keys that hold inside a `with` alone, as those that were found for one model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp, Decisions, Op, Pins
from wavecrest.dispatch.tuned import Config

# pins are of the process: one thread at a time has others
_LOCK = threading.RLock()


class Choices:
    """Backends and configurations of one op by key, in force inside `with`, over pins and measured rows.

    Decisions that are made inside are kept for the next time, and those for other keys hold outside too.
    """

    def __init__(self, op: AnyOp, chosen: Mapping[Key, tuple[str, Config | None]], reason: str) -> None:
        """Hold them; `reason` is that of their decisions."""
        self._op = op
        self._pins: Pins = {key: (backend, config, "exact", reason) for key, (backend, config) in chosen.items()}
        self._made: Decisions | None = None
        self._epoch = -1
        self._outside: list[tuple[Decisions, Pins]] = []

    def __enter__(self) -> None:
        _LOCK.acquire()
        op = self._op
        # what was decided inside holds until anything is decided anew
        made = self._made if self._epoch == Op.epoch else None
        pins, epoch = op.swap_pins(self._pins), Op.epoch
        op.swap_pins({**pins, **self._pins})
        self._outside.append((op.swap(made), pins))
        if made is not None:
            # nothing is new to who keeps an answer of dispatch
            Op.epoch = epoch
        self._epoch = Op.epoch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        op, (outside, pins) = self._op, self._outside.pop()
        kept, epoch = self._epoch == Op.epoch, Op.epoch
        self._made = op.swap(outside)
        op.swap_pins(pins)
        if kept:
            Op.epoch = epoch
        cache, inside = outside[0], self._made[0]
        for key, entry in inside.items():
            if key not in self._pins:
                cache.setdefault(key, entry)
        _LOCK.release()
