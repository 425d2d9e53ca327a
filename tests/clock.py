"""A clock that only tests move: what is timed on it says the same on an idle and on a busy machine."""

from __future__ import annotations

from typing import Any


class SimulatedClock:
    """Seconds that pass when a test says so. A copy is the clock itself, so copies of a model share it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedClock:
        return self
