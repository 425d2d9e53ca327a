"""Answers of the calls that are timed.

A check before the timing cannot see a candidate that answers wrongly only while it is timed: one that keeps its last
answer, that looks at the call stack, or that fails from some call on. The timer passes on the outputs of both sides in
blocks drawn at random, and the same number of an input set means the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from wavecrest.measure import numerics
from wavecrest.optimizer.gate import accuracy
from wavecrest.optimizer.gate.leaves import Answer, check_structure, collect
from wavecrest.optimizer.gate.rules import RuleBroken
from wavecrest.optimizer.gate.site import LARGE

if TYPE_CHECKING:
    from wavecrest.optimizer.gate.site import Site

# pairs of large answers that are compared at most
MOST_LARGE = 4


class Limits(Protocol):
    """The part of a gate that a watch reads."""

    @property
    def rules(self) -> frozenset[str]:
        """Names of the rules that are on."""

    @property
    def dtype(self) -> str:
        """The precision that answers are held to."""

    @property
    def sites(self) -> Sequence[Site]:
        """One for each bucket."""

    def put_back(self) -> list[str]:
        """Undo what was changed in this process; a phrase a change."""


@dataclass(slots=True)
class OutputWatch:
    """Compares the outputs of base and candidate while the pair is timed; nothing is timed meanwhile.

    Base and candidate are both within the limits of their case, so they may differ by the sum of their limits. Whole
    numbers may differ once: rounding decides between two values that are equally likely. A model whose calls write
    state of their own is not watched, since base and candidate then start from different states.

    Attributes:
        gate: has the limits.
        bucket: that is timed.
        compared: pairs of answers so far.
    """

    gate: Limits
    bucket: str
    compared: int = 0
    _waiting: dict[int, tuple[str, Answer]] = field(default_factory=dict)
    _problem: RuleBroken | None = None
    _flips: int = 0

    def on_output(self, side: Literal["base", "new"], output: Any, number: int) -> None:
        """Take an output of a timed call: compare it with the other side's, or keep a copy until that comes.

        Args:
            side: whose output it is.
            output: what the call returned.
            number: of the input set.
        """
        if self._problem is not None or "timing" not in self.gate.rules or self._site.cases[0].written:
            return
        try:
            answer = collect(output, self._site.snapshot.names)
            other = self._waiting.pop(number, None)
            if other is None or other[0] == side:
                self._waiting[number] = (side, answer.copy())
            elif answer.nbytes <= LARGE or self.compared < MOST_LARGE:
                self.compared += 1
                self._compare(*((other[1], answer) if side == "new" else (answer, other[1])))
        except RuleBroken as error:
            self._problem = RuleBroken("timing", f"while it was timed: {error}")

    def _compare(self, base: Answer, new: Answer) -> None:
        check_structure(new, base, self.gate.rules)
        case, floor = self._site.cases[0], numerics.tolerance("model", self.gate.dtype)
        for path, tensor in new.numeric():
            right = base.leaves[path].value
            own = case.expected[path].own if path in case.expected else None
            limits = numerics.Tolerance(0.0, 0.0)
            if accuracy.is_float(right):
                relative, worst = (own.relative, own.worst) if own is not None else (0.0, 0.0)
                factor = 2 * accuracy.OWN_ERROR_FACTOR
                limits = numerics.Tolerance(
                    max(factor * relative, 2 * floor.relative), max(factor * worst, 2 * floor.worst)
                )
            found = numerics.compare(tensor, right)
            if not found.within(limits) and not accuracy.is_float(right) and found.shape_match:
                self._flips += 1
                if self._flips == 1:
                    continue
            if not found.within(limits):
                raise RuleBroken(
                    "timing",
                    f"{path} differs from the base's by {found.relative:.2e}, allowed {limits.relative:.2e}",
                )

    def check(self) -> int:
        """The number of pairs compared, once all are timed.

        Raises:
            RuleBroken: "process", if functions or settings were changed meanwhile, which the times rest on; "timing",
                if an answer was wrong.
        """
        if changed := self.gate.put_back():
            raise RuleBroken("process", f"while it was timed: {changed[0]}")
        if self._problem is not None:
            raise self._problem
        return self.compared

    @property
    def _site(self) -> Site:
        return next(site for site in self.gate.sites if site.bucket == self.bucket)
