"""A step that may be tried next: its gain on the model as it is, and the seconds of its trial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wavecrest.optimizer.costs import Kind
    from wavecrest.optimizer.steps import Found, Prediction, Step
    from wavecrest.records import Cause

# what is expected of a step that predicts nothing, and of a second attempt as a part of its first prediction
UNKNOWN_RATIO, AGAIN = 1.02, 0.5
# no trial takes less, in seconds: a gain for nothing would make everything else look dear
LEAST_SECONDS = 1.0


@dataclass(slots=True)
class Candidate:
    """A step that may be tried next.

    Attributes:
        step: the step.
        attempt: 1, or 2 where another step has changed the ground since it lost.
        found: its sites on the model as optimized so far; None where looking for them raised `error`.
        error: why there is nothing to try.
        prediction: what it is worth there.
        kind: of trial.
        seconds: of its trial, expected; without those of `unseen`.
        reserve: seconds to leave for the end of the run if it is kept.
        cause: of an earlier loss: this step removes it, or another has removed it since this one lost.
        why: it is tried now.
        unseen: seconds that looking for its sites would take; 0 where it has looked.
        proof: seconds that the end of the run takes longer once it is kept.
        behind: seconds that the trials behind it take longer once it is kept, as each compiles the model again. An 8 B
            Llama that was compiled before its surgery ended 120 s late (H200, 2026-11-26).
        leads_to: the gain and the trial's seconds of the best step that waits for this one.
    """

    step: Step
    attempt: int
    found: Found | None
    error: Exception | None
    prediction: Prediction
    kind: Kind | None
    seconds: float
    reserve: float
    cause: Cause | None = None
    why: str = ""
    unseen: float = 0.0
    proof: float = 0.0
    behind: float = 0.0
    leads_to: tuple[float, float] = (0.0, 0.0)

    @property
    def is_able(self) -> bool:
        """Whether there is something to try."""
        return self.found is not None and bool(self.found.sites)

    @property
    def title(self) -> str:
        """The name in tables."""
        return (self.found.title if self.found is not None else "") or self.step.title

    @property
    def ratio(self) -> float:
        """The speed-up that is expected."""
        ratio = self.prediction.ratio
        if ratio is None or not math.isfinite(ratio):
            return UNKNOWN_RATIO
        return max(1.0, 1 + AGAIN * (ratio - 1) if self.is_again else ratio)

    @property
    def is_again(self) -> bool:
        """Whether it is a second attempt at what lost, and not a capture that is tried in another way."""
        return self.attempt > 1 and not (self.found is not None and self.found.compiles)

    @property
    def gain(self) -> float:
        """The logarithm of the expected speed-up: gains of several steps add up."""
        return math.log(self.ratio)

    @property
    def rate(self) -> float:
        """Gain a second of all that it costs if it is tried now, with the step that waits for it where that is more.

        A prompt of an 8 B Llama was compiled, for 70 s, before "fuse QKV", which gains 1 %, and the rotation that waits
        for it, which gains 8 (H200, 2026-11-28, evidence/nvidia-h200/2026-11-28_zoo_twentyseventh_gpu_0.jsonl.gz).
        """
        gain, more = self.leads_to
        return max(self._alone, (self.gain + gain) / (self.trial_seconds + self.proof + self.behind + more))

    @property
    def _alone(self) -> float:
        return self.gain / (self.trial_seconds + self.proof + self.behind)

    @property
    def trial_seconds(self) -> float:
        """Seconds until its verdict."""
        return self.unseen + self.seconds

    @property
    def is_hopeless(self) -> bool:
        """Whether its sites need not be looked for: nothing is gained at best."""
        return bool(self.unseen) and self.gain <= 0

    @property
    def is_cure(self) -> bool:
        """Whether a cause has it tried first. A first compilation goes by its gain, of which the cause is a part.

        It makes all surgery behind it dearer. A prompt of an 8 B Llama was compiled for the cause of a tie, and had no
        time then for what gains 8 % (H200, evidence/nvidia-h200/2026-11-28_zoo_twentysecond_gpu_1.jsonl.gz and
        _twentythird_gpu_1).
        """
        return self.cause is not None and self.kind != "first"

    @property
    def tier(self) -> int:
        """Other weights, cures, first attempts, second attempts, searches; a lower tier goes first."""
        if self.step.phase == "weights":
            # asked for by name, and all others work on what it makes
            return -1
        if self.is_cure:
            return 0
        # joined ties are before each tie by itself again: of an 8 B Llama four second trials took 35 s of 170, and all
        # tied (H200, 2026-11-28, evidence/nvidia-h200/2026-11-28_zoo_twentieth_gpu_0.jsonl.gz)
        return 3 if self.step.searches else 1 + self.is_again

    def explained(self, able: int) -> str:
        """Why it is tried now; `able`: how many candidates could be."""
        worth = f"{self.ratio:.2f}× predicted for {self.seconds:.0f} s"
        if self.prediction.ratio is None:
            worth = f"nothing predicted, for {self.seconds:.0f} s"
        if self.cause is not None:
            how = "it comes first because of" if self.is_cure else "with"
            return f"{worth}; {how} a cause that was named: {self.cause.text}"
        if self.step.searches:
            return f"{worth}; it searches, on the final shape of the model"
        if self.is_again:
            return f"{worth}; again, as another step was kept since"
        more = " with the step that waits for it" if self.rate > self._alone else ""
        return f"{worth}, the most a second{more} of {able} that could be tried" if able > 1 else worth
