"""Speculative decoding: drafted tokens are read in one call, and the state goes back to the last that was right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.base import Network
from wavecrest.models.xlstm.generation import Generated, Request, check_count, reading
from wavecrest.models.xlstm.state import State, select_rows

# a draft: int64 [B, K] of the tokens that may follow texts, int64 [S] each on the CPU; K may be 0, and differ by call
Draft = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of `xLSTMLarge.verify`.

    Attributes:
        tokens: int64 [B, K + 1], on the model's device: the token that the model would choose in each place. The first
            `accepted` are drafted ones, one more follows them as the model's own; those behind mean nothing.
        accepted: int64 [B]: how many drafted tokens were right, from the first on.
        state: after the last token and the accepted ones; what is chosen behind them is still to be read.
    """

    tokens: Tensor
    accepted: Tensor
    state: State


class _Look(NamedTuple):
    """Tokens [B, 1 + K] that were read after a state, the model's choices behind each, and what `rewind` takes."""

    read: Tensor
    before: State
    chosen: Tensor
    after: State
    kept: list[Any]

    def accepted(self) -> Tensor:
        """How many drafted tokens are those that the model chose, from the first on: int64 [B]."""
        return (self.read[:, 1:] == self.chosen[:, :-1]).long().cumprod(1).sum(1)

    def reached(self, model: Network, lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], at least 1) of the tokens."""
        if bool((lengths == self.read.shape[1]).all()):
            return self.after
        return model.rewind(self.read, self.before, self.kept, lengths)


def _look(model: Network, last: Tensor, draft: Tensor, state: State) -> _Look:
    read = torch.cat((last[:, None], draft), 1)
    if draft.shape[1] == 0:
        # in place: `speculate` alone drafts nothing, and the state is its own
        return _Look(read, state, model.decode(last, state).argmax(-1, keepdim=True), state, [])
    logits, after, kept = model.look_ahead(read, state)
    return _Look(read, state, logits.argmax(-1), after, kept)


@torch.no_grad()
def verify(model: Network, last: Tensor, draft: Tensor, state: State) -> Verified:
    """Verify drafts for `xLSTMLarge.verify`, which documents arguments and errors."""
    model.check_tokens(last)
    model.check_tokens(draft)
    if last.shape[1] != 1 or draft.shape[0] != last.shape[0] or draft.shape[1] == 0:
        raise InvalidArgument(
            f"verify: last is [B, 1] and draft [B, K] with a token in each row, got {list(last.shape)} and "
            f"{list(draft.shape)}"
        )
    look = _look(model, last[:, 0].long(), draft.long(), state)
    accepted = look.accepted()
    return Verified(look.chosen, accepted, look.reached(model, accepted + 1))


@torch.no_grad()
def speculate(
    model: Network, tokens: Tensor, mask: Tensor | None, state: State | None, request: Request, draft: Draft
) -> Generated:
    """Generate for `xLSTMLarge.speculate`, which documents arguments and errors."""
    ends = set(request.ends(model.config))
    prompt, read = reading(model, tokens, mask, state, request)
    logits, state = read()
    device, batch = logits.device, logits.shape[0]
    lengths = [prompt.tokens.shape[1]] * batch if prompt.lengths is None else prompt.lengths.tolist()
    texts = [row[:length] for row, length in zip(prompt.tokens.cpu(), lengths, strict=True)]
    found = [[token] for token in logits.argmax(-1).tolist()]
    # rows that go on, in the order of the state's; those that ended leave it
    going, ended = list(range(batch)), dict[int, State]()
    drafted = right = calls = 0
    while True:
        over = [row for row in going if len(found[row]) == request.max_new_tokens or found[row][-1] in ends]
        if over:
            for row in over:
                ended[row] = select_rows(state, torch.tensor([going.index(row)], device=device))
            stay = [place for place, row in enumerate(going) if row not in over]
            going = [going[place] for place in stay]
            if not going:
                break
            state = select_rows(state, torch.tensor(stay, device=device))
        given = _drafted(model, draft, [torch.cat((texts[row], torch.tensor(found[row]))) for row in going])
        last = torch.tensor([found[row][-1] for row in going], device=device)
        look = _look(model, last, given, state)
        taken = []
        for row, accepted, chosen in zip(going, look.accepted().tolist(), look.chosen.tolist(), strict=True):
            new = _until(chosen[: accepted + 1], ends, request.max_new_tokens - len(found[row]))
            found[row] += new
            taken.append(len(new))
            drafted, right = drafted + given.shape[1], right + accepted
        state = look.reached(model, torch.tensor(taken, device=device))
        calls += 1
    counts = torch.tensor([len(row) for row in found])
    made = torch.full((batch, int(counts.max())), request.pad(model.config), dtype=torch.int64)
    for own, new in zip(made, found, strict=True):
        own[: len(new)] = torch.tensor(new)
    how = f"speculative: {right} of {drafted} drafted tokens were right, {calls} calls after the prompt"
    return Generated(made, counts, how, _joined([ended[row] for row in range(batch)]) if request.return_state else None)


def _until(tokens: list[int], ends: set[int], room: int) -> list[int]:
    """Tokens up to the first that ends a row, and at most `room` of them."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(stop, room)]


def _drafted(model: Network, draft: Draft, texts: list[Tensor]) -> Tensor:
    """The tokens that a draft gives for texts, checked."""
    found = draft(texts)
    if not isinstance(found, Tensor) or found.ndim != 2 or found.shape[0] != len(texts) or found.dtype != torch.int64:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidArgument(f"speculate: draft must give int64 [{len(texts)}, K], got {what}")
    found = found.to(model.embedding.weight.device)
    model.check_tokens(found, wait=True)
    return found


def _joined(states: list[State]) -> State:
    """The states of single rows as that of a batch."""
    found: State = {}
    for index in states[0]:
        parts = zip(*(one[index] for one in states), strict=True)
        batch: Any = tuple(None if part[0] is None else torch.cat(part) for part in parts)
        found[index] = batch
    return found


def prompt_lookup(tokens: int = 4, ngram: int = 3) -> Draft:
    """A draft that needs no model: what followed the last place in the text that ends as the text does now.

    For texts that repeat their prompt: summaries, code, retrieval.

    Args:
        tokens: the most to draft.
        ngram: the longest ending that is looked for; shorter ones down to one token follow.
    """
    check_count("tokens", tokens)
    check_count("ngram", ngram)

    def of(text: list[int]) -> list[int]:
        for size in range(min(ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == text[-size:]:
                    return text[start + size : start + size + tokens]
        return []

    def draft(texts: list[Tensor]) -> Tensor:
        rows = [of(text.tolist()) for text in texts]
        width = max(len(row) for row in rows)
        # a row with less is filled up: a token that is drafted wrong costs nothing but its place
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)

    return draft
