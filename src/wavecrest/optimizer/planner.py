"""The planner: which step is tried next. The one with the most predicted gain per second of its trial.

Predictions are made again after every kept step and every diagnosis. Taken are the steps that gain most a second as
long as they fit, or those that gain most together (a knapsack) where cheap steps would use up the time of a much better
one; the one of them that gains most a second, by itself or with a step that waits for it, is next. Four rules stand
above the gain. A step that cures a cause which a diagnosis named comes first, but for a first compilation; steps named
by `Step.tried_after` come before that step, and first attempts at surgery before the trial that joins its ties; second
attempts come after all first ones; steps that search come last.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wavecrest.errors import Refused, StepRefused
from wavecrest.optimizer.candidate import LEAST_SECONDS, Candidate
from wavecrest.optimizer.costs import TRACE_SHARE, Kind, kind_of
from wavecrest.optimizer.steps import Found, Prediction, build
from wavecrest.optimizer.steps.applied import without_norms
from wavecrest.optimizer.steps.base import TREE, idle_share
from wavecrest.optimizer.steps.environment import seconds_of_pairs
from wavecrest.optimizer.steps.join_ties import can_join
from wavecrest.optimizer.steps.replace_norm import own_norms
from wavecrest.profile.causes import HOST_BOUND

if TYPE_CHECKING:
    from wavecrest.optimizer.state import RunState
    from wavecrest.optimizer.steps import Step
    from wavecrest.optimizer.steps.base import Tie
    from wavecrest.records import Cause, StepOutcome

# the step that compiles what is captured only then
COMPILES = "compile:default"
# on such a gain the first look at the result is counted on, and time for later looks goes to steps. On a CPU processes
# differ by some percent. On a GPU intervals of 4 pairs were ±2 to ±6 % (evidence/nvidia-h100/2026-11-26_zoo_models):
# too wide to be sure of a gain of 5 %, and a result that they leave open is said to be undecided
SURE_RATIO, SURE_RATIO_GPU = 1.2, 1.05
# an original that waits for the host differs more: its processes took 26 to 45 ms (an 8 B decode) and 6.2 to 9.3 ms (a
# RoBERTa; 16 cores beside an H200, 2026-11-26), by 0.2 of their logarithm. So much do 1, 2 and 3 looks resolve then
SURE_RATIOS_HOST = (2.0, 1.45, 1.3)
# a step that promises this much is tried in the time of later looks, whose gain is a narrower interval, and of the
# check of compiled code at other shapes, which `verify` makes up for. With 90 s and 54 of them for three looks, several
# models ended with a graph of the eager model and nothing compiled
PROMISING = 1.05
# a compilation that promises this much is tried where the budget holds its trial and no fresh processes that compile it
# again: the result is then measured in this process. A UNet's compilation of 38 s gained 1.67 times and was put back
# with 110 s, and a Swin-T's was not tried for one second of 90 (H200, 2026-11-28)
MUCH = 1.1
# a set of steps that leaves the best one a second for later must promise this many times the gain
BETTER = 1.25
# steps look at the model again after each kept step where all that do take at most this share of the time left; others
# look when they are chosen, or when nothing else is left. An 8 B Llama's linear layers, timed alone, took 11 s: its
# rotations and cache updates waited for them behind all second attempts (H200, 2026-11-28)
LOOK_SHARE = 0.02
# a step that another one needs is tried together with it where it alone was no slower than this: of 16 sequences of an
# 8 B Llama attention alone was 0.99 times as fast on one H200 and 1.03 on another, and the rotation and cache update,
# which need it, gained 1.06 (2026-11-28)
LITTLE = 0.97
# share of the budget that trials of environment variables may take: each needs fresh processes, which load the model
ENVIRONMENT_SHARE = 0.3
# while nothing is kept, a step whose proof ends this share of the budget late is tried all the same: an earlier trial
# that lost may have taken a few seconds more than expected, and a run without any result is worth less than these
LATE_SHARE = 0.1


@dataclass(slots=True)
class _Look:
    """The sites and the prediction of a step, and the ground and the profile that they rest on."""

    found: Found | None
    error: Exception | None
    prediction: Prediction
    ground: object
    profile: object


def may_recompile(run: RunState) -> bool:
    """Whether the time that is left holds compiling the result again at the end, for the examples and other shapes."""
    applied, budget = run.ledger.applied, run.options.budget
    if not applied.compiled:
        return True
    return run.costs.final(budget, compiled=True, looks=1) <= run.seconds_left + LATE_SHARE * budget


@dataclass(slots=True)
class Planner:
    """Chooses among `steps` until none is left that fits.

    Attributes:
        run: the run; its ledger says what was tried.
        steps: those of the level that were asked for.
    """

    run: RunState
    steps: Sequence[Step]
    _looks: dict[str, _Look] = field(default_factory=dict)
    # seconds of each step's last look, and of the longest look of a step that looks long
    _seconds: dict[str, float] = field(default_factory=dict)
    _longest_look: float = 0.0

    def next(self) -> Candidate | None:
        """The candidate to try; None when nothing is left that can be tried."""
        chosen = self._next(late=False)
        if chosen is None and self._one_only and any(self._is_late(step) for step, _ in self._open()):
            chosen = self._next(late=True)
        return chosen

    def _next(self, *, late: bool) -> Candidate | None:
        """The candidate to try, of the steps that have looked or may look; with `late` of all that a trial fits for."""
        if self._is_uncapturable:
            self._look_again([step for step in self.steps if step.phase == "capture"])
        while True:
            steps = [row for row in self._open() if not self._is_late(row[0]) or (late and self._can_look(row[0]))]
            looked = [step for step, _ in steps if self._has_looked(step)]
            self._look(looked, again=self._affordable(looked))
            candidates = [self._candidate(step, attempt) for step, attempt in steps]
            if not self._has_surgery(candidates) and self._look_again([step for step, _ in steps if step.joins]):
                continue
            chosen = self._choose([one for one in candidates if one.is_able or (one.unseen and not one.is_hopeless)])
            if chosen is not None and chosen.unseen:
                # it is worth a long look now
                self._look_again([chosen.step])
                continue
            # what was found on an earlier ground may be gone, and what was not found may be there now: it comes before
            # a step of which nothing is predicted
            doubtful = [chosen.step] if chosen else []
            if chosen is None or chosen.prediction.ratio is None:
                doubtful += [one.step for one in candidates if not one.is_able]
            hopeless = {one.step.id for one in candidates if one.is_hopeless}
            doubtful = [step for step in doubtful if step.id not in hopeless]
            doubtful = [step for step in doubtful if not self._looks_long(step) or self._holds_look(step)]
            if not self._look_again(doubtful):
                return chosen

    def _has_surgery(self, candidates: Sequence[Candidate]) -> bool:
        """Whether a first attempt at surgery fits in the time left: ties are joined once all of it was tried."""
        return any(
            one.attempt == 1 and can_join(one.step) and one.trial_seconds + one.reserve <= self.run.seconds_left
            for one in candidates
            if one.is_able or (one.unseen and not one.is_hopeless)
        )

    def _affordable(self, steps: Sequence[Step]) -> set[str]:
        """The ids of steps that may look again after each kept step: the quickest, as many as LOOK_SHARE holds."""
        left, found = LOOK_SHARE * self.run.seconds_left, set[str]()
        # joined steps look for all their sites once more, when all surgery was tried
        single = [step for step in steps if not step.joins]
        for step in sorted(single, key=lambda step: self._seconds.get(step.id, 0.0)):
            left -= self._seconds.get(step.id, 0.0)
            if left >= 0:
                found.add(step.id)
        return found

    def rest(self) -> list[Candidate]:
        """First attempts that were not made: refused, nothing to change, or no time."""
        return [self._candidate(step, attempt) for step, attempt in self._open() if attempt == 1]

    @property
    def reserve(self) -> float:
        """Seconds that were left for the end of the run, with the steps in force."""
        return self._reserve(None)

    def seconds_to_come(self) -> float:
        """Seconds of the open trials that fit and of the end of the run, at most what is left of the budget."""
        left = self.run.seconds_left
        candidates = [self._candidate(step, attempt) for step, attempt in self._open() if step.id in self._looks]
        reserve = self.reserve
        trials = sum(one.seconds for one in candidates if one.is_able and one.seconds + one.reserve <= left)
        return max(0.0, min(trials + reserve, left))

    # ---- what is open

    def _open(self) -> list[tuple[Step, int]]:
        done = {(row.id, row.attempt) for row in self.run.ledger.record.steps}
        first = [(step, 1) for step in self.steps if (step.id, 1) not in done]
        lost = [step for step in self.steps if (step.id, 1) in done and (step.id, 2) not in done]
        return first + [(step, 2) for step in lost if self._deserves_retry(step)]

    def _deserves_retry(self, step: Step) -> bool:
        """True for a measured loss or tie after which another step was kept, and a capture that compilation may allow.

        An operation that no graph records may be gone from a compiled model (a constant that a DeBERTa makes). It is
        compiled for the capture, unless it is by then.
        """
        rows = self.run.ledger.record.steps
        index = next(i for i, row in enumerate(rows) if row.id == step.id)
        if step.phase == "capture" and rows[index].verdict == "refused":
            compiling = {other.id for other in self.steps if other.phase == "compile"}
            compiled = any(row.verdict == "kept" and row.id in compiling for row in rows[index + 1 :])
            return compiled or (self._is_uncapturable and self._compiles(step))
        if rows[index].verdict not in ("reverted", "tie") or step.level == 1 or step.phase == "weights":
            return False
        if step.id in self.run.ledger.applied.joined:
            return False
        # a compile mode that lost to the one in force lost to it already
        rivals = any(step.excludes(item.step) for item in self.run.ledger.applied.steps)
        return not rivals and any(row.verdict == "kept" for row in rows[index + 1 :])

    # ---- looks and predictions

    def _looks_long(self, step: Step) -> bool:
        return step.looks_long(self.run.context.device)

    def _has_looked(self, step: Step) -> bool:
        """Whether a step has looked, or may do so at no cost."""
        return not self._looks_long(step) or step.id in self._looks

    def _is_late(self, step: Step) -> bool:
        """Whether a step that looks long has not looked, and its seconds are better spent on other trials."""
        return not self._has_looked(step) and (self._one_only or not self._can_look(step))

    def _can_look(self, step: Step) -> bool:
        """Whether a step has looked, may do so at no cost, or the budget holds it."""
        return self._has_looked(step) or self._holds_look(step)

    def _holds_look(self, step: Step) -> bool:
        """Whether the budget holds a long look, the trial and its proof.

        Where fresh processes for the proof do not fit behind the look, one in this process will do, if the look
        displaces no compilation that fits now.
        """
        hope, left = self._hope(step), self.run.seconds_left
        trial = self._long_look + self.run.costs.expect(self._kind(step))
        if trial + self._reserve(step, hope) <= left:
            return True
        return trial + self._reserve(step, hope, self._long_look) <= left and not self._displaces(self._long_look)

    def _displaces(self, look: float) -> bool:
        """Whether a compilation whose sites are known fits into the budget now, and not behind a look that long."""
        left = self.run.seconds_left
        for step, attempt in self._open():
            if step.id not in self._looks or not self._compiles(step):
                continue
            one = self._candidate(step, attempt)
            behind = look + one.trial_seconds + self._reserve(step, one.prediction, look)
            if one.is_able and one.trial_seconds + one.reserve <= left < behind:
                return True
        return False

    @property
    def _long_look(self) -> float:
        """Seconds of a long look: the most that one took so far, or a part of a compilation."""
        return self._longest_look or TRACE_SHARE * self.run.costs.compilation

    @property
    def _compiled(self) -> bool:
        return self.run.ledger.applied.compiled

    @property
    def _is_uncapturable(self) -> bool:
        """Whether a capture of the model as it is was refused, and compiling it is still to be tried."""
        rows = self.run.ledger.record.steps
        captures = {step.id for step in self.steps if step.phase == "capture"}
        refused = any(row.id in captures and row.verdict == "refused" for row in rows)
        open_ = any(step.id == COMPILES for step in self.steps) and not any(row.id == COMPILES for row in rows)
        return refused and open_ and not self._compiled

    def _compiles(self, step: Step) -> bool:
        """Whether its trial compiles a model that was not compiled."""
        look = self._looks.get(step.id)
        captures = look is not None and look.found is not None and look.found.compiles
        return step.phase == "compile" or captures

    def _ground(self, step: Step) -> object:
        """All that a step's sites depend on: steps in force that change modules, compiled or captured models, ties."""
        uncapturable = step.phase == "capture" and self._is_uncapturable
        applied = self.run.ledger.applied
        captured = step.in_graphs and bool(applied.only("capture").steps)
        return applied.only(*TREE), self._compiled, uncapturable, captured, self._ties if step.joins else ()

    @property
    def _ties(self) -> tuple[Tie, ...]:
        """Steps whose last trial tied by a gain and that fit those in force, the largest gain first.

        Behind them are steps that could not be tried, each with what it needs, which may have lost by a little.
        """
        applied, last = self.run.ledger.applied, {row.id: row for row in self.run.ledger.record.steps}
        # a graph of a compiled model is what stands between compilation and its gain: it is no part of a joined step
        steps = {
            step.id: step for step in self.steps if can_join(step) or (step.phase == "capture" and not self._compiled)
        }
        close = {
            name: row.ratio
            for name, row in last.items()
            if name in steps and name not in applied.joined and row.verdict in ("tie", "reverted")
            if row.ratio is not None and row.ratio > LITTLE
            if not any(steps[name].excludes(item.step) for item in applied.steps)
        }
        found: dict[str, float | None] = {
            name: close[name]
            for name in sorted(close, key=lambda name: -close[name])
            if close[name] > 1 and last[name].verdict == "tie"
        }
        for step in steps.values():
            if step.needs and step.id not in last and all(name in close for name in step.needs):
                found |= {name: close[name] for name in step.needs} | {step.id: None}
        return tuple(found.items())

    def _look_again(self, steps: Sequence[Step]) -> bool:
        """Look and predict where ground or profile changed; False if they are as they were."""
        return self._look(steps, again={step.id for step in steps})

    def _look(self, steps: Sequence[Step], *, again: Container[str]) -> bool:
        """Look and predict where ground or profile changed; False if they are as they were.

        Args:
            steps: to look for.
            again: ids of steps that look again on another ground; others that have looked only predict anew.
        """
        run, context = self.run, self.run.context
        known = {step.id: self._looks.get(step.id) for step in steps}
        moved = {
            step.id
            for step in steps
            if (look := known[step.id]) is None or (step.id in again and look.ground != self._ground(step))
        }
        changed = [step for step in steps if step.id in moved or known[step.id].profile is not context.profile]  # type: ignore[union-attr]
        if not changed:
            return False
        if moved:
            run.progress.phase("which steps apply")
        begin = run.now()
        context.ties = self._ties
        context.compiled, context.captured = self._compiled, bool(run.ledger.applied.only("capture").steps)
        context.compiled_by_capture = self._compiled and not run.ledger.applied.only("compile").steps
        context.uncapturable = self._is_uncapturable
        try:
            context.model = build(run.workload.model, run.ledger.applied.only(*TREE))
            context.own_layer_norms, own = own_norms(context.model)
            own_layers = context.own_layer_norms
            context.without_norms = without_norms(run.workload.model, run.ledger.applied) if own_layers else None
            context.norms_can_go = context.without_norms is not None
            run.costs.own_norms = own and not context.norms_can_go
            for step in changed:
                look = known[step.id]
                if look is None or step.id in moved:
                    started = run.now()
                    found, problem = self._find(step)
                    self._seconds[step.id] = run.now() - started
                    if step.phase == "compile" and self._looks_long(step):
                        run.costs.traced = max(run.costs.traced, self._seconds[step.id])
                    look = _Look(found, problem, Prediction(None, ""), self._ground(step), None)
                look.prediction, look.profile = self._predict(step, look.found), context.profile
                self._looks[step.id] = look
        except Refused as error:
            # the model cannot be copied
            for step in changed:
                self._looks[step.id] = _Look(None, error, Prediction(None, ""), self._ground(step), context.profile)
        finally:
            # the tensors that surgery made are not held while candidates are timed
            context.model = context.without_norms = None
            context.shared.clear()
        if any(self._looks_long(step) for step in steps if step.id in moved):
            self._longest_look = max(self._longest_look, run.now() - begin)
        return bool(moved)

    def _find(self, step: Step) -> tuple[Found | None, Exception | None]:
        """The sites, or why there is nothing to try."""
        try:
            found, problem = step.find(self.run.context), None
        except Exception as error:
            found, problem = None, error
        changed = self.run.untouched.put_back()
        if changed:
            return None, StepRefused(f"it changed {', '.join(changed[:5])} of the user's model; put back (rule: model)")
        return found, problem

    def _predict(self, step: Step, found: Found | None) -> Prediction:
        if found is None or not found.sites:
            return Prediction(None, "")
        try:
            return self._less_what_goes(step, step.predict(found, self.run.context))
        except Exception as error:
            return Prediction(None, f"not predicted ({type(error).__name__}: {error})")

    def _less_what_goes(self, step: Step, predicted: Prediction) -> Prediction:
        """The prediction less the gain of steps in force that clash with this one.

        A group's rivals predict without; norms that Inductor makes take no longer than those that are given up.
        """
        gone = {item.step_id for item in self.run.ledger.applied.steps if step.clashes(item.step)}
        rows = [row for row in self.run.ledger.record.steps if row.verdict == "kept" and row.id in gone and row.ratio]
        if not rows or predicted.ratio is None:
            return predicted
        lost = math.prod(row.ratio for row in rows if row.ratio)
        names = ", ".join(row.title for row in rows)
        return Prediction(predicted.ratio / lost, f"{predicted.basis}; {names}, {lost:.2f}×, is given up for it")

    # ---- cost and choice

    def _candidate(self, step: Step, attempt: int) -> Candidate:
        run, look = self.run, self._looks.get(step.id)
        kind: Kind | None = None
        if step.phase == "environment":
            count = len(look.found.sites) if look is not None and look.found else 0
            seconds = count * seconds_of_pairs(run.context, run.options.processes)
            seconds = min(seconds, ENVIRONMENT_SHARE * run.options.budget)
        else:
            kind = self._kind(step)
            seconds = run.costs.expect(kind)
        seconds, prediction = max(seconds, LEAST_SECONDS), self._hope(step) if look is None else look.prediction
        reserve = self._reserve(step, prediction, self._long_look if look is None else 0.0)
        if look is None:
            return Candidate(step, attempt, None, None, prediction, kind, seconds, reserve, unseen=self._long_look)
        return self._with_cause(
            Candidate(step, attempt, look.found, look.error, look.prediction, kind, seconds, reserve)
        )

    def _hope(self, step: Step) -> Prediction:
        """The prediction of a step that has not looked for its sites."""
        if not self._looks_long(step):
            return Prediction(None, "")
        return self._less_what_goes(step, step.hope(self.run.context))

    def _kind(self, step: Step) -> Kind:
        run = self.run
        searches = any(item.step.searches for item in run.ledger.applied.steps)
        if step.phase == "capture" and self._compiles(step):
            return "first" if run.costs.nothing_compiled else "later"
        return kind_of(step, compiled=self._compiled, first=run.costs.nothing_compiled, searches=searches)

    def _proof(self, step: Step | None, looks: int | None, *, recompiled: bool = True) -> float:
        """Seconds of the end of the run with this step in force too; see `Costs.final`."""
        compiled = self._compiled or (step is not None and self._compiles(step))
        return self.run.costs.final(self.run.options.budget, compiled=compiled, looks=looks, recompiled=recompiled)

    def _reserve(self, step: Step | None, prediction: Prediction | None = None, look: float = 0.0) -> float:
        """Seconds of the end of the run with this step in force too, which a look of `look` seconds comes before."""
        if self._one_only:
            # it was said that the budget will not do: the best single step, rather than none
            return 0.0
        promised = prediction.ratio if prediction is not None else None
        is_promising = promised is not None and promised >= PROMISING
        looks = 1 if is_promising else self._looks_to_take()
        # where the end has no time to compile the result again, none is kept for it: steps may have it
        proof = self._proof(step, looks, recompiled=not is_promising and may_recompile(self.run))
        return min(proof, self.run.costs.phases) if self._is_measured_here(step, promised, look, proof) else proof

    def _is_measured_here(self, step: Step | None, promised: float | None, look: float, proof: float) -> bool:
        """Whether the result with this step in force too is measured in this process, for want of time."""
        left = self.run.seconds_left
        if self._compiled and self._proof(None, 1, recompiled=False) > left + LATE_SHARE * self.run.options.budget:
            # as it will be in any case
            return True
        compiles = step is not None and (self._compiled or self._compiles(step))
        if step is None or not compiles or promised is None or promised < MUCH:
            return False
        return look + self.run.costs.expect(self._kind(step)) + proof > left

    def _looks_to_take(self) -> int | None:
        """The looks at the result that its gain so far is expected to need; None: all of them."""
        run = self.run
        if not run.ledger.applied.steps:
            # no later one is in sight
            return 1
        gain = math.prod(row.ratio or 1.0 for row in run.ledger.record.steps if row.verdict == "kept")
        sure: tuple[float, ...] = (SURE_RATIO if run.context.device.kind == "cpu" else SURE_RATIO_GPU,)
        if idle_share(run.ledger.record.profile_before) >= HOST_BOUND:
            sure = SURE_RATIOS_HOST
        return next((looks for looks, ratio in enumerate(sure, 1) if gain >= ratio), None)

    @property
    def _one_only(self) -> bool:
        """Whether the budget holds one step that is kept, and its proof."""
        return self.run.costs.short and not self.run.ledger.applied.steps

    def _with_cause(self, one: Candidate) -> Candidate:
        """Raise the prediction of a cure to what the step that lost would gain without the cause, and of that step."""
        for row in reversed(self._losses()):
            for cause in row.causes:
                lost = _without(row, cause)
                if lost is None or not self._is_pending(one, row, cause):
                    continue
                own = one.prediction.ratio or 1.0
                basis = f"{row.title} lost by it: {cause.text}; without it {lost:.2f}×"
                one.prediction = Prediction(max(own, lost), f"{one.prediction.basis}; {basis}".removeprefix("; "))
                one.cause = cause
                return one
        return one

    def _losses(self) -> list[StepOutcome]:
        return [row for row in self.run.ledger.record.steps if row.verdict in ("reverted", "tie") and row.causes]

    def _is_pending(self, one: Candidate, row: StepOutcome, cause: Cause) -> bool:
        """Whether `one` removes the cause, or is the step that lost and a step kept since then removes it."""
        run, rows = self.run, self.run.ledger.record.steps
        later = rows[rows.index(row) + 1 :]
        cured = any(
            other.verdict == "kept" and cause.kind in step.cures
            for other in later
            for step in self.steps
            if step.id == other.id
        )
        if one.step.id == row.id:
            return cured and row.attempt == 1 and one.attempt == 2
        if cause.kind == "launch_gaps" and run.ledger.applied.only("capture").steps:
            # a replayed graph has no launches left to save. An 8 B decode was compiled for such a cause ahead of seven
            # steps that take a third of the time each, and ended without them (H200, 2026-11-28)
            return False
        # a rival takes the place of what lost, and cures nothing of it
        rival = any(one.step.excludes(step) for step in self.steps if step.id == row.id)
        cures = cause.kind in one.step.cures and not one.step.searches and not rival
        return not cured and one.attempt == 1 and cures

    def _charge(self, candidates: Sequence[Candidate], fits: Sequence[Candidate]) -> None:
        """Charge the first compilation that is kept with what it makes the others and the proof take longer.

        Others are all that fit, those too that wait for one of the candidates.
        """
        costs = self.run.costs
        others = [other for other in fits if other.kind == "plain" and other.attempt == 1]
        for one in candidates:
            if not self._compiles(one.step) or self._compiled or one.step.searches:
                continue
            one.behind = len(others) * max(0.0, costs.expect("later") - costs.expect("plain"))
            one.proof = max(0.0, one.reserve - self.reserve)

    def _choose(self, able: Sequence[Candidate]) -> Candidate | None:
        """The candidate that gains most a second among those of the lowest tier that are worth their time together."""
        left = self.run.seconds_left
        fits = [one for one in able if one.trial_seconds + one.reserve <= left]
        if not fits and not self.run.ledger.applied.steps:
            left += LATE_SHARE * self.run.options.budget
            fits = [one for one in able if one.trial_seconds + one.reserve <= left]
        waiting = {one.step.id for one in fits if one.attempt == 1}
        ready = [one for one in fits if not waiting.intersection(one.step.tried_after)]
        if self._has_surgery(fits):
            ready = [one for one in ready if not one.step.joins]
        if not ready:
            return None
        tier = min(one.tier for one in ready)
        same = [one for one in ready if one.tier == tier]
        self._charge(same, fits)
        for one in same:
            mine = [row for row in fits if waiting.intersection(row.step.tried_after) == {one.step.id}]
            best = max(mine, key=lambda row: row.gain / row.trial_seconds, default=None)
            one.leads_to = (0.0, 0.0) if best is None else (best.gain, best.trial_seconds)
        reserve = min(one.reserve for one in same)
        # the last of them makes no trial behind it longer
        items = [(one.gain, one.trial_seconds + one.proof) for one in same]
        together, greedy = best_together(items, left - reserve), densest_together(items, left - reserve)
        is_better = sum(items[i][0] for i in together) > BETTER * sum(items[i][0] for i in greedy)
        worth = [same[index] for index in (together if is_better else greedy)] or same
        if self._one_only:
            # each with its own proof: no other step shares it
            proofs = {one.step.id: self._proof(one.step, 1) for one in same}
            chosen = max(same, key=lambda one: one.gain / (one.trial_seconds + proofs[one.step.id]))
        else:
            chosen = max(worth, key=lambda one: one.rate)
        chosen.why = chosen.explained(len(able))
        return chosen


def densest_together(items: Sequence[tuple[float, float]], seconds: float) -> list[int]:
    """The indices of the items, each (gain, seconds), taken by gain a second as long as they fit."""
    taken = []
    for index in sorted(range(len(items)), key=lambda index: -items[index][0] / items[index][1]):
        if items[index][1] <= seconds:
            seconds -= items[index][1]
            taken.append(index)
    return taken


def best_together(items: Sequence[tuple[float, float]], seconds: float) -> list[int]:
    """The indices of the items, each (gain, seconds), that gain most and take at most `seconds` together.

    Whole seconds, rounded up: the sets that are compared always fit.
    """
    room = int(seconds)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (room + 1)
    for index, (gain, cost) in enumerate(items):
        need = math.ceil(cost)
        for free in range(room, need - 1, -1):
            before = best[free - need]
            if before[0] + gain > best[free][0]:
                best[free] = before[0] + gain, (*before[1], index)
    return list(best[room][1]) if room >= 0 else []


def _without(row: StepOutcome, cause: Cause) -> float | None:
    """The speed-up that a step would have had without one of its causes; None where that is not above 1."""
    if cause.ms is None or not row.speed:
        return None
    base, new = (sum(getattr(speed, name) for speed in row.speed) for name in ("base_ms", "new_ms"))
    rest = new - cause.ms
    return base / rest if 0 < rest < base else None
