"""Beam search: the likeliest continuations of prompts, by the sum of their tokens' log probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.base import Network
from wavecrest.models.xlstm.generation import Request, check_count, reading
from wavecrest.models.xlstm.state import State, StatePool, select_rows


@dataclass(frozen=True, slots=True)
class Beams:
    """Result of `xLSTMLarge.beam_search`: the best continuations of each row, best first.

    Attributes:
        tokens: int64 [B, K, T] on the CPU, new tokens alone. Padding follows an end.
        lengths: int64 [B, K], with the token that ended it; 0 where there are fewer than K continuations.
        scores: float64 [B, K]: the sum of the tokens' log probabilities, divided by length ** length_penalty; −∞ where
            there is no continuation.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True)
class Search:
    """Arguments of `xLSTMLarge.beam_search`, which documents them, beside those of `Request`."""

    beams: int
    length_penalty: float
    early_stopping: bool

    def __post_init__(self) -> None:
        check_count("beams", self.beams)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not math.isfinite(penalty):
            raise InvalidArgument(f"generate: length_penalty must be a finite number, got {penalty!r}")
        if not isinstance(self.early_stopping, bool):
            raise InvalidArgument(f"generate: early_stopping must be True or False, got {self.early_stopping!r}")

    def score(self, total: float, length: int) -> float:
        """The score of a continuation whose log probabilities add up to `total`."""
        return total / math.pow(length, self.length_penalty)

    def bound(self, total: float, length: int, longest: int) -> float:
        """The highest score that a continuation of `length` tokens can reach with more tokens, `longest` in all.

        Log probabilities are at most 0, so that the sum only falls; what can raise the score is the length.
        """
        return self.score(total, longest if self.length_penalty > 0 else length + 1)


@dataclass(slots=True)
class _Row:
    """The continuations of one prompt: those that go on, and the best of those that ended."""

    texts: list[list[int]]
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False

    def end(self, score: float, text: list[int], beams: int) -> None:
        """Take an ended continuation, and keep the best ones."""
        self.ended.append((score, text))
        # stable: of equal ones the first stays first
        self.ended.sort(key=lambda one: -one[0])
        del self.ended[beams:]


@torch.no_grad()
def search(
    model: Network, tokens: Tensor, mask: Tensor | None, state: State | None, request: Request, settings: Search
) -> Beams:
    """Search for `xLSTMLarge.beam_search`, which documents arguments and errors."""
    config, count, longest = model.config, settings.beams, request.max_new_tokens
    ends = set(request.ends(config))
    logits, after = reading(model, tokens, mask, state, request).read()
    batch, vocabulary = logits.shape
    # one row for each beam; at first all of a prompt are the same, and only the first counts
    own = torch.arange(batch).repeat_interleave(count)
    pool = StatePool(select_rows(after, own.to(logits.device)))
    logits = logits[own.to(logits.device)]
    totals = torch.full((batch, count), -math.inf, dtype=torch.float64, device=logits.device)
    totals[:, 0] = 0.0
    rows = [_Row([[] for _ in range(count)]) for _ in range(batch)]
    # as many as leave `count` that go on, whichever of them end
    width = min(count * (1 + len(ends)), count * vocabulary)
    for length in range(1, longest + 1):
        chances = logits.double().log_softmax(-1).view(batch, count, vocabulary)
        values, places = (totals[:, :, None] + chances).flatten(1).topk(width)
        best = zip(rows, values.tolist(), places.tolist(), strict=True)
        going = [_advance(*one, vocabulary, ends, length, longest, settings) for one in best]
        if all(row.done for row in rows):
            break
        totals = torch.tensor([[total for total, _, _ in row] for row in going], dtype=torch.float64).to(totals)
        parents = torch.tensor([[parent for _, parent, _ in row] for row in going])
        pool.reorder((parents + torch.arange(batch)[:, None] * count).flatten())
        chosen = torch.tensor([token for row in going for _, _, token in row], device=logits.device)
        logits = model.decode(chosen, pool.state)
    return _packed(rows, count, request.pad(config))


def _advance(
    row: _Row, values: list[float], places: list[int], vocabulary: int, ends: set[int], length: int, longest: int,
    settings: Search,
) -> list[tuple[float, int, int]]:  # fmt: skip
    """Sort a prompt's best continuations into ended and going ones. Returns (total, beam, token) of each beam.

    An ending counts only if it is among the `beams` best, as in transformers.
    """
    count = settings.beams
    going: list[tuple[float, int, int]] = []
    texts: list[list[int]] = []
    for rank, (total, place) in enumerate(zip(values, places, strict=True)):
        if row.done or total == -math.inf:
            break
        parent, token = divmod(place, vocabulary)
        text = [*row.texts[parent], token]
        if token in ends:
            if rank < count:
                row.end(settings.score(total, length), text, count)
        elif len(going) < count:
            going.append((total, parent, token))
            texts.append(text)
    if length == longest:
        for (total, _, _), text in zip(going, texts, strict=True):
            row.end(settings.score(total, length), text, count)
    full = len(row.ended) == count
    if length == longest or not going or (full and settings.early_stopping):
        row.done = True
    elif full:
        row.done = row.ended[-1][0] >= settings.bound(going[0][0], length, longest)
    # beams without a continuation, and all of a prompt that is done, go on as something that never wins
    spare = count - len(going)
    row.texts = texts + [[]] * spare
    return going + [(-math.inf, 0, 0)] * spare


def _packed(rows: list[_Row], count: int, pad: int) -> Beams:
    """The ended continuations of all rows as tensors."""
    longest = max((len(text) for row in rows for _, text in row.ended), default=0)
    tokens = torch.full((len(rows), count, longest), pad, dtype=torch.int64)
    lengths = torch.zeros(len(rows), count, dtype=torch.int64)
    scores = torch.full((len(rows), count), -math.inf, dtype=torch.float64)
    for index, row in enumerate(rows):
        for place, (score, text) in enumerate(row.ended):
            tokens[index, place, : len(text)] = torch.tensor(text)
            lengths[index, place], scores[index, place] = len(text), score
    return Beams(tokens, lengths, scores)
