"""Seconds that trials take, learned in this run: a step that the budget does not hold is not begun.

Before anything is known the seconds are priors: what is measured at most, and a compilation by the number of ops. Then
the longest trial of each kind says what the next one takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wavecrest.optimizer.steps import Step
    from wavecrest.records import BucketProfile

# the kinds of trials: nothing is compiled, the model is compiled for the first time in the run, changed code or another
# preset is compiled, compiled code is captured as it is, a preset searches
Kind = Literal["plain", "first", "later", "captured", "search"]
# seconds of a first compilation: a start, and for each op of a call. Three trials of 114 to 814 ops took 17 to 21 s on
# one H200 with about 6 s of measuring, one of 940 ops 24 s on two cores (evidence, 2026-11-20)
COMPILE_START, COMPILE_OP = 8.0, 0.01
# norms that are kernels of wavecrest make the first compilation this many times as long: 13 trials with them spent 15
# to 53 s in compilers, where the number of ops says 9 to 24; a BERT-large 51 s for 11, a RoBERTa 26 s and without them
# 15 (H200, torch 2.11; evidence/nvidia-h200 of 2026-11-26 and 2026-11-27, the records of zoo). Dynamo traces the launch
# of each: 28 of a Swin-T took 5 s there, and 2 in Inductor (H200, 2026-11-28, no record)
OWN_NORMS_FACTOR = 2.0
# part of a compilation that tracing the model for a step's sites takes (an 8 B Llama on one H100: 12 to 16 s, where a
# trial that compiles takes 21 to 27 s; 2026-11-26. A Swin-T on one H200 21 of 45 s, 2026-11-28; torch 2.11)
TRACE_SHARE = 0.7
# part of the first compilation that a later one takes, as processes and caches are warm (a ResNet-50 on one H200: 24.5
# s, then 9.2 s; 2026-11-25, torch 2.11), and that one of code that did not change takes, as Inductor's cache has it
# (1.3 to 2.4 s after 21 s, H200, 2026-11-20; 3.3 s after 17.5 s of a BERT-base, H100, 2026-11-26), until it is measured
LATER_SHARE, CAPTURED_SHARE = 0.4, 0.2
# part of the first compilation that a fresh process takes, whose caches on disk have the code: it traces anew. 0.03 to
# 1.12 in 41 runs of the zoo, with a median of 0.47 (H200, 2026-11-26 to 2026-11-28, "first calls of a process" there),
# in many of which Inductor's cache had the code under another key; 0.27 of a Swin-T since then
PROCESS_SHARE = 0.5
# a search at compile time against a plain compilation: 2 to 5 times as long for a 16-layer Llama, over 6 times for a
# float32 BERT with two buckets (H200, 2026-11-20)
SEARCH_FACTOR = 6.0
# seconds of the gate and of building a candidate in a trial, by guess
GATE_SECONDS = 2.0
# the end of the run may take this part of a small budget to look again
SMALL_SHARE = 0.6
# where there is time, the final gate compiles the result again, which takes about one later compilation; and for other
# shapes and arguments by name, which takes as many more, later ones or first ones, as no cache has that code (33 to 58
# s after 24 to 31 s, a CLIP and a Swin-T; 107 s with all of it after 43 s, a prompt of an 8 B Llama; H200, 2026-11-28)
FINAL_COMPILATIONS, SHAPES_COMPILATIONS = 1, 2


def op_calls(profile: Iterable[BucketProfile]) -> int:
    """Op calls of one call of a model, over all buckets of its profile."""
    return sum(op.calls for bucket in profile for op in bucket.ops)


def kind_of(step: Step, *, compiled: bool, first: bool, searches: bool = False) -> Kind:
    """The kind of a step's trial.

    Args:
        step: not one that runs in processes of its own.
        compiled: a compile step is in force.
        first: no trial has compiled anything yet.
        searches: a compile step that searches is in force, so that changed code is searched for again.
    """
    if step.searches or (searches and step.phase in ("surgery", "setting")):
        return "search"
    if step.phase == "capture" and (compiled or not first):
        return "captured"
    if step.phase != "compile" and not compiled:
        return "plain"
    return "first" if first else "later"


@dataclass(slots=True)
class Costs:
    """Seconds of trials by kind.

    Attributes:
        sampling: seconds that a trial measures at most.
        ops: op calls of one call of the model as optimized so far, over all buckets; 0 where they are not known.
        least_final, later_looks: seconds of the end of the run: with the fewest processes or phases that decide, and
            what each later look takes beside them.
        phases: seconds of the end where it is measured in this process, which compiles nothing anew.
        loads: times that the final measurement waits for processes to load with fewest pairs: each compiles code that
            caches on disk have.
        imports: seconds in which each of these imports the compilers; 0 where it is forked from one that has them.
        sizes: later compilations that declared ranges of shapes take at the end.
        short: the budget does not hold a compilation and its proof.
        own_norms: norms that are compiled are kernels of wavecrest.
        traced: seconds in which a step that compiles traced the model for its sites.
        pace: what first compilations took on this machine over the prior (`compile_pace`).
    """

    sampling: float = 0.0
    ops: int = 0
    least_final: float = 0.0
    later_looks: tuple[float, ...] = ()
    phases: float = 0.0
    loads: int = 0
    imports: float = 0.0
    sizes: int = 0
    short: bool = False
    own_norms: bool = False
    pace: float = 1.0
    traced: float = 0.0
    _longest: dict[Kind, float] = field(default_factory=dict)
    # of trials by kind: in Dynamo and the compiler behind it; and of these, what no cache on disk saves
    _compiling: dict[Kind, float] = field(default_factory=dict)
    _tracing: float = 0.0

    @property
    def nothing_compiled(self) -> bool:
        """Whether no trial has compiled the model yet."""
        return "first" not in self._longest

    def add(self, kind: Kind, seconds: float, compiling: float = 0.0, tracing: float = 0.0) -> None:
        """Learn from a trial that went to its end.

        Args:
            kind: of the trial.
            seconds: of all of it.
            compiling: of these, in Dynamo and the compiler behind it; 0 where it is not known.
            tracing: of these, what is not Inductor's: a process whose caches have the code takes it again.
        """
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        self._compiling[kind] = max(self._compiling.get(kind, 0.0), compiling)
        self._tracing = max(self._tracing, tracing)

    def expect(self, kind: Kind) -> float:
        """Seconds that the next trial of this kind takes."""
        if kind in self._longest:
            return self._longest[kind]
        plain = self._longest.get("plain", self.sampling + GATE_SECONDS)
        if kind == "plain":
            return plain
        compilation = self.compilation
        if kind == "first":
            return plain + compilation
        share = {"later": LATER_SHARE, "captured": CAPTURED_SHARE, "search": SEARCH_FACTOR}[kind]
        return plain + share * compilation

    @property
    def compilation(self) -> float:
        """Seconds of the first compilation: of the trial, without what measuring takes at least; or the prior, and no
        less than a look that traced the model says.
        """
        if self.nothing_compiled:
            return max(self.prior * self.pace, self.traced / TRACE_SHARE)
        return self._compiling["first"] or max(0.0, self._longest["first"] - self._longest.get("plain", 0.0))

    @property
    def prior(self) -> float:
        """Seconds of a first compilation by the number of ops, on a machine of which nothing is known."""
        return (COMPILE_START + COMPILE_OP * self.ops) * (OWN_NORMS_FACTOR if self.own_norms else 1.0)

    @property
    def _later(self) -> float:
        """Seconds of a later compilation alone."""
        return self._compiling.get("later", 0.0) or max(self.expect("later") - self.expect("plain"), 0.0)

    @property
    def cached(self) -> float:
        """Seconds of a compilation in a fresh process whose code the caches on disk have."""
        return self.imports + (self._tracing or PROCESS_SHARE * self.compilation)

    @property
    def serving(self) -> float:
        """Seconds that the compilations for declared ranges of shapes take."""
        return self.sizes * self._later

    @property
    def recompiling(self) -> float:
        """Seconds that the final gate takes to compile the result for other shapes and arguments by name."""
        return SHAPES_COMPILATIONS * max(self._later, self.compilation)

    def final(self, budget: float, *, compiled: bool, looks: int | None = None, recompiled: bool = True) -> float:
        """Seconds to leave for the end of the run: one look, and as many more as SMALL_SHARE of the budget holds.

        Args:
            budget: seconds of the run.
            compiled: a compile step is in force.
            looks: no time is left for more; None: for all.
            recompiled: time is left to compile the result again, for the examples and for other shapes.
        """
        later = self.loads * self.cached + self.serving if compiled else 0.0
        later += FINAL_COMPILATIONS * self._later + self.recompiling if compiled and recompiled else 0.0
        least = self.least_final + later
        more = self.later_looks if looks is None else self.later_looks[: looks - 1]
        return max(least, min(least + sum(more), SMALL_SHARE * budget))
