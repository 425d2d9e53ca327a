"""How far a quantized model is from the original, and the limits that a caller sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.measure import numerics
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.quantizer import calibrate

# rows of logits that are compared at a time, in float64
CHUNK = 256
# limits by name: those above which, and the one below which a model is refused
AT_MOST, AT_LEAST = ("kl", "perplexity", "relative", "worst"), ("top1",)


@dataclass(frozen=True, slots=True)
class Quality:
    """A quantized model beside the original, over all given inputs.

    Attributes:
        positions: at which logits were compared; 0 for a model without logits.
        kl: mean Kullback-Leibler divergence of the logits' distributions from the original's, nats; None without.
        top1: share of positions with the same most likely entry; None without logits.
        tokens: predicted, that perplexity is of.
        perplexity: of the given tokens, of the quantized model; None where the model predicts none.
        original_perplexity: of the original.
        relative: ‖out − original‖ / ‖original‖ of the floating-point outputs, the largest of all.
        worst: largest |out − original| over max(1, |original|).
        finite: infinities and NaN are where the original has them.
    """

    positions: int
    kl: float | None
    top1: float | None
    tokens: int
    perplexity: float | None
    original_perplexity: float | None
    relative: float
    worst: float
    finite: bool

    def values(self) -> dict[str, float | None]:
        """The values that limits are set on; `perplexity` is its rise as a share."""
        rise = None
        if self.perplexity is not None and self.original_perplexity is not None:
            rise = self.perplexity / self.original_perplexity - 1
        return {"kl": self.kl, "top1": self.top1, "perplexity": rise, "relative": self.relative, "worst": self.worst}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the values of `Quality`, by name; `share` is one number for what the model has.

    A share is the most that perplexity may rise: on the given tokens, and as expected by the original's own
    distribution, exp(kl) − 1. For a model without logits it is the largest relative error.
    """

    share: float | None = None
    named: Mapping[str, float] | None = None

    def of(self, quality: Quality) -> dict[str, float]:
        """The limits that hold for a model with these values.

        Raises:
            InvalidArgument: a named limit is on a value that the model does not have.
        """
        values = quality.values()
        if self.named is not None:
            missing = [name for name in self.named if values[name] is None]
            if missing:
                raise InvalidArgument(
                    f"quantize: quality limits {', '.join(missing)}, which needs logits (an output of that name), and "
                    "for perplexity token ids as inputs of a causal model; limit relative or worst"
                )
            return dict(self.named)
        assert self.share is not None
        if values["kl"] is None:
            return {"relative": self.share}
        found = {"kl": math.log1p(self.share)}
        if values["perplexity"] is not None:
            found["perplexity"] = self.share
        return found

    def broken(self, quality: Quality) -> list[str]:
        """The limits that a model does not meet, each with its value, as sentences' parts; empty: it meets all."""
        values = quality.values()
        found = [] if quality.finite else ["it gives NaN or infinity where the original does not, or the reverse"]
        for name, limit in self.of(quality).items():
            value = values[name]
            assert value is not None
            # NaN is within no limit
            if not (value >= limit if name in AT_LEAST else value <= limit):
                found.append(f"{name} {value:.4g}, limit {limit:.4g}")
        return found


def limits(quality: str | float | Mapping[str, Any] | None) -> Limits | None:
    """The limits that an argument `quality` sets: "0.5%", 0.005, or a mapping of names.

    Raises:
        InvalidArgument: it is something else.
    """
    if quality is None:
        return None
    if not isinstance(quality, Mapping):
        return Limits(share=_number(quality))
    known = (*AT_MOST, *AT_LEAST)
    for name in quality:
        if name not in known:
            raise InvalidArgument(f"quantize: quality limits {', '.join(known)}, not {name!r}")
    if not quality:
        raise InvalidArgument("quantize: quality sets no limit; leave it out")
    return Limits(named={name: _number(value) for name, value in quality.items()})


def _number(value: Any) -> float:
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise InvalidArgument(f'quantize: a limit is a share such as 0.005 or "0.5%", or a mapping, not {value!r}')
    return number


class Original:
    """The original model's answers, to compare quantized ones with."""

    def __init__(self, workload: Workload) -> None:
        """Run the model.

        Raises:
            InvalidArgument: it returns no floating-point tensor.
        """
        self._workload = workload
        # copies: a model may answer with memory that its next call writes to
        self._answers = [
            {name: tensor.detach().clone() for name, tensor in _floats(answer)}
            for _, answer in calibrate.outputs(workload)
        ]
        for answers in self._answers:
            if not answers:
                raise InvalidArgument(
                    "quantize: the model returns no floating-point tensor, so nothing can be compared"
                )
        self._causal = [
            _causal(workload.model, inputs, answers)
            for inputs, answers in zip(workload.buckets.values(), self._answers, strict=True)
        ]

    @torch.no_grad()
    def compare(self, through: Callable[[Inputs], Any] | None = None) -> Quality:
        """Run the model as it is now, and compare.

        Args:
            through: runs it on an input in another way, as over a quantized cache; None: it is called.

        Raises:
            InvalidArgument: it returns other tensors than before.
        """
        sums, workload = _Sums(), self._workload
        for inputs, before, causal in zip(workload.buckets.values(), self._answers, self._causal, strict=True):
            answer = inputs.clone().call(workload.model) if through is None else through(inputs)
            now = dict(_floats(answer))
            if now.keys() != before.keys() or any(now[name].shape != before[name].shape for name in now):
                raise InvalidArgument("quantize: the model returns tensors of other names or shapes at its second call")
            for name, tensor in now.items():
                sums.outputs(numerics.compare(tensor, before[name]))
            logits = _logits(before, inputs)
            if logits is not None:
                sums.logits(now[logits], before[logits], inputs, causal)
        return sums.quality()


class _Sums:
    """Sums over the inputs."""

    def __init__(self) -> None:
        self._kl = self._same = self._now = self._before = 0.0
        self._positions = self._tokens = 0
        self._relative = self._worst = 0.0
        self._finite = True

    def outputs(self, found: numerics.Comparison) -> None:
        # comparisons that keep NaN
        self._relative = found.relative if not found.relative <= self._relative else self._relative
        self._worst = found.worst if not found.worst <= self._worst else self._worst
        self._finite &= found.nonfinite_match

    def logits(self, now: Tensor, before: Tensor, inputs: Inputs, causal: bool) -> None:
        """Compare distributions at the positions that are no padding; predict tokens where the model does that."""
        size = now.shape[-1]
        mask = _mask(inputs, now.shape[:-1])
        flat = torch.ones(now.shape[:-1], dtype=torch.bool, device="cpu") if mask is None else mask
        rows = flat.reshape(-1).nonzero()[:, 0].to(now.device)
        for part in torch.split(rows, CHUNK):
            p = before.reshape(-1, size)[part].double().log_softmax(-1)
            q = now.reshape(-1, size)[part].double().log_softmax(-1)
            # an entry that has no probability adds nothing, also where its logarithm is −∞
            terms = torch.where(p.isneginf(), torch.zeros((), dtype=p.dtype, device=p.device), p.exp() * (p - q))
            self._kl += float(terms.sum())
            self._same += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._positions += len(rows)
        if not causal:
            return
        tokens = _tokens(inputs)
        assert tokens is not None
        counted = flat[:, 1:] & flat[:, :-1]
        for kind, logits in (("_now", now), ("_before", before)):
            total = 0.0
            for row, goal, taken in zip(logits[:, :-1], tokens[:, 1:], counted, strict=True):
                places = taken.nonzero()[:, 0].to(row.device)
                for part in torch.split(places, CHUNK):
                    logp = row[part].double().log_softmax(-1)
                    total -= float(logp.gather(-1, goal[part][:, None].to(logp.device)).sum())
            setattr(self, kind, getattr(self, kind) + total)
        self._tokens += int(counted.sum())

    def quality(self) -> Quality:
        """The means."""
        some, predicted = self._positions, self._tokens
        return Quality(
            positions=some,
            # rounding may give a sum below zero
            kl=_at_least_0(self._kl / some) if some else None,
            top1=self._same / some if some else None,
            tokens=predicted,
            perplexity=_exp(self._now / predicted) if predicted else None,
            original_perplexity=_exp(self._before / predicted) if predicted else None,
            relative=self._relative,
            worst=self._worst,
            finite=self._finite,
        )


def _at_least_0(value: float) -> float:
    return 0.0 if value < 0 else value


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _floats(answer: Any) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of an answer, by their path; states that a cache holds are not compared."""
    found = list(iter_tensors("output", answer, set()))
    kept = [(path, tensor) for path, tensor in found if tensor.is_floating_point() and tensor.numel()]
    named = [(path, tensor) for path, tensor in kept if path.endswith(".logits")]
    return named or [(path, tensor) for path, tensor in kept if "past_key_values" not in path]


def _tokens(inputs: Inputs) -> Tensor | None:
    """The token ids [B, T] of a call, or None."""
    given = dict(inputs.kwargs)
    found = given.get("input_ids", inputs.args[0] if inputs.args else None)
    if not isinstance(found, Tensor) or found.ndim != 2 or found.dtype not in (torch.int64, torch.int32):
        return None
    return found.long()


def _mask(inputs: Inputs, shape: torch.Size) -> Tensor | None:
    """Which positions [B, T] are no padding, or None: all."""
    found = inputs.kwargs.get("attention_mask")
    return found.bool().cpu() if isinstance(found, Tensor) and found.shape == shape else None


def _logits(answers: Mapping[str, Tensor], inputs: Inputs) -> str | None:
    """The output that holds logits: one of that name, or the only one of a call with token ids, [B, T, V]."""
    for name in answers:
        if name.endswith(".logits"):
            return name if answers[name].ndim >= 2 and answers[name].shape[-1] > 1 else None
    tokens = _tokens(inputs)
    if len(answers) == 1 and tokens is not None:
        (name,) = answers
        if answers[name].ndim == 3 and answers[name].shape[:2] == tokens.shape:
            return name
    return None


@torch.no_grad()
def _causal(model: nn.Module, inputs: Inputs, answers: Mapping[str, Tensor]) -> bool:
    """Whether a model predicts the next token: logits are of all tokens, and the last token moves none before it."""
    name, tokens = _logits(answers, inputs), _tokens(inputs)
    if name is None or tokens is None or answers[name].ndim != 3 or answers[name].shape[:2] != tokens.shape:
        return False
    if tokens.shape[1] < 2:
        return False
    changed = inputs.clone()
    last = _given(changed)[:, -1]
    last.copy_(torch.where(last == 0, 1, last - 1))
    now = dict(_floats(changed.call(model)))[name]
    found = numerics.compare(now[:, :-1], answers[name][:, :-1])
    return found.within(numerics.tolerance("model", str(now.dtype).removeprefix("torch.")))


def _given(inputs: Inputs) -> Tensor:
    """The tensor that holds the token ids of a call."""
    found: Tensor = inputs.kwargs["input_ids"] if "input_ids" in inputs.kwargs else inputs.args[0]
    return found
