"""Progress of a run as lines of text: what runs, each verdict, the time so far and the time to come."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

from wavecrest.optimizer.options import Progress, Silent, minutes

if TYPE_CHECKING:
    from wavecrest.measure.timing import Clock
    from wavecrest.records import StepOutcome


class Lines:
    """A progress display for scripts, logs and notebooks: one line for each piece of work, none is overwritten.

    Args:
        stream: where lines go; None: standard error as it is at each line.
        now: where time comes from.
    """

    def __init__(self, stream: TextIO | None = None, now: Clock = time.perf_counter) -> None:
        self._stream, self._now = stream, now
        self._began = now()
        # the end of the run as expected, by `now`; None before the first estimate
        self._end: float | None = None
        self._last = ""

    def phase(self, text: str) -> None:
        """One line, where it is not another part of the piece before."""
        piece = text.partition(":")[0]
        if piece != self._last:
            self._last = piece
            self._write(piece)

    def update(self, done: int, planned: int) -> None:
        """Nothing: samples come too fast for lines."""

    def remaining(self, seconds: float) -> None:
        """The time to come, shown in the next lines."""
        self._end = self._now() + seconds

    def outcome(self, step: StepOutcome) -> None:
        """One line: the verdict, the step, its speed-up or the reason; none for steps that had nothing to do."""
        if step.verdict == "skipped":
            return
        ratio = f" {step.ratio:.2f}×" if step.ratio is not None else ""
        why = "" if step.verdict == "kept" else f": {step.reason}"
        self._write(f"{step.verdict} {step.title}{ratio}{why}")

    def _write(self, text: str) -> None:
        now = self._now()
        left = "" if self._end is None else f", about {minutes(max(0.0, self._end - now))} left"
        passed = round(now - self._began)
        line = f"[{passed // 60}:{passed % 60:02d}{left}] " + "".join(
            c if c.isprintable() else ascii(c)[1:-1] for c in text
        )
        width = shutil.get_terminal_size((120, 1)).columns - 1
        stream = self._stream or sys.stderr
        stream.write((line if len(line) <= width else f"{line[: width - 1]}…") + "\n")
        stream.flush()


def receiver(progress: Progress | bool | None) -> Progress:
    """The receiver of what `optimize` was given: True shows lines, False nothing, None lines where somebody looks.

    Somebody looks at a terminal and at a notebook.
    """
    if progress is None:
        notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        progress = notebook is not None or sys.stderr.isatty()
    if isinstance(progress, bool):
        return Lines() if progress else Silent()
    return progress
