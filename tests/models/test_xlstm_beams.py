"""Beam search with xLSTM Large, against searches over the logits of a float64 oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, build, oracle
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import Beams, StatePool, xLSTMLarge
from wavecrest.models.xlstm.beams import Search
from wavecrest.models.xlstm.state import clone_state, select_rows

WORDS = 5


class _Chances:
    """Log probabilities of the next token after a prompt and new tokens, in float64 from the formulas."""

    def __init__(self, model: xLSTMLarge, prompt: Tensor) -> None:
        self.model, self.prompt = model, prompt.cpu()
        self._known: dict[tuple[int, ...], list[float]] = {}

    def after(self, text: tuple[int, ...]) -> list[float]:
        if text not in self._known:
            row = torch.cat([self.prompt, torch.tensor(text, dtype=torch.int64)])
            self._known[text] = oracle(self.model, row)[-1].log_softmax(-1).tolist()
        return self._known[text]

    def score(self, text: tuple[int, ...], penalty: float) -> float:
        total = sum(self.after(text[:place])[token] for place, token in enumerate(text))
        return total / len(text) ** penalty


def _prompts(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def _texts(found: Beams, row: int) -> list[tuple[int, ...]]:
    pairs = zip(found.tokens[row].tolist(), found.lengths[row].tolist(), strict=True)
    return [tuple(text[:length]) for text, length in pairs if length]


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
def test_wide_enough_it_is_the_exhaustive_search(penalty: float) -> None:
    model, count, end = build(vocab_size=WORDS, dtype=torch.float64), 3, 2
    prompts = _prompts(2, 4)
    found = model.beam_search(prompts, count, beams=WORDS**count, length_penalty=penalty, eos_token_id=end)
    for row in range(2):
        chances = _Chances(model, prompts[row])
        every = {
            text[: text.index(end) + 1] if end in text else text
            for text in itertools.product(range(WORDS), repeat=count)
        }
        wanted = sorted(every, key=lambda text: -chances.score(text, penalty))
        assert _texts(found, row) == wanted
        scores = torch.tensor([chances.score(text, penalty) for text in wanted], dtype=torch.float64)
        torch.testing.assert_close(found.scores[row, : len(wanted)], scores, rtol=1e-9, atol=1e-9)
        # fewer texts than beams
        assert found.lengths[row, len(wanted) :].eq(0).all() and found.scores[row, len(wanted) :].eq(-math.inf).all()


def _search(
    chances: _Chances, count: int, beams: int, penalty: float, ends: tuple[int, ...], early: bool
) -> list[tuple[int, ...]]:
    """A search by the rule of the docstring, without an end before the last token unless it is asked for."""
    going: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[int, ...]] = []
    for length in range(1, count + 1):
        grown = [
            (total + chance, (*text, token))
            for total, text in going
            for token, chance in enumerate(chances.after(text))
        ]
        grown.sort(key=lambda one: -one[0])
        ended += [text for _, text in grown[:beams] if text[-1] in ends]
        going = [one for one in grown if one[1][-1] not in ends][:beams]
        if length == count:
            ended += [text for _, text in going]
        ended = sorted(ended, key=lambda text: -chances.score(text, penalty))[:beams]
        if early and len(ended) == beams:
            break
    return ended


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.7, 2.0])
def test_narrow_beams_are_those_of_a_plain_search(penalty: float, early: bool) -> None:
    model, ends = build(vocab_size=WORDS, weight_mode="single"), (1, 4)
    prompts = _prompts(3, 6)
    found = model.beam_search(prompts, 6, beams=3, length_penalty=penalty, early_stopping=early, eos_token_id=ends)
    for row in range(3):
        chances = _Chances(model, prompts[row])
        wanted = _search(chances, 6, 3, penalty, ends, early)
        assert _texts(found, row) == wanted
        scores = torch.tensor([chances.score(text, penalty) for text in wanted], dtype=torch.float64)
        torch.testing.assert_close(found.scores[row], scores, rtol=1e-4, atol=1e-4)


def _counted(model: xLSTMLarge, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    decode, calls = model.decode, []

    def counting(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return decode(*args, **options)

    monkeypatch.setattr(model, "decode", counting)
    return calls


def test_it_stops_where_nothing_better_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(vocab_size=WORDS)
    prompt = _prompts(1, 6)
    calls = _counted(model, monkeypatch)
    found = model.beam_search(prompt, 30, beams=2, length_penalty=0.0, eos_token_id=(1, 4))
    assert 0 < len(calls) < 29
    assert _texts(found, 0) == _search(_Chances(model, prompt[0]), 30, 2, 0.0, (1, 4), False)


@pytest.mark.parametrize("penalty", [2.0, 1.0, 0.0, -1.0])
def test_the_bound_is_the_best_score_that_can_follow(penalty: float) -> None:
    settings = Search(2, penalty, False)
    # of a text of 3 tokens: with tokens of probability 1 behind it, up to 9 in all
    best = max(settings.score(-4.0, length) for length in range(4, 10))
    assert settings.bound(-4.0, 3, 9) == best


def test_one_beam_is_greedy() -> None:
    model = build(weight_mode="fused")
    prompt = _prompts(3, 5)
    found = model.beam_search(prompt, 8, beams=1)
    assert torch.equal(found.tokens[:, 0], model.generate(prompt, 8).tokens)


def test_padding_first_tokens_and_states() -> None:
    model = build(vocab_size=WORDS, bos_token_id=0)
    prompt = _prompts(1, 7)
    padded = torch.cat([torch.full((1, 3), 4, device=DEVICE), prompt], 1)
    mask = torch.tensor([[0, 0, 0] + [1] * 7], device=DEVICE)
    first = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    wanted = model.beam_search(torch.cat([first, prompt], 1), 4, beams=3)
    found = model.beam_search(padded, 4, beams=3, attention_mask=mask, insert_bos=True)
    assert torch.equal(found.tokens, wanted.tokens)
    _, state = model(torch.cat([first, prompt[:, :4]], 1))
    before = clone_state(state)
    found = model.beam_search(prompt[:, 4:], 4, beams=3, state=state)
    assert torch.equal(found.tokens, wanted.tokens)
    assert all(torch.equal(state[block][0], before[block][0]) for block in state)


def test_rows_of_a_pool_change_places() -> None:
    state = build()(_prompts(4, 5))[1]
    pool = StatePool(state)
    for rows in ([0, 1, 2, 3], [1, 0, 0, 3], [3, 3, 1, 0]):
        wanted = select_rows(clone_state(pool.state), torch.tensor(rows, device=DEVICE))
        pool.reorder(torch.tensor(rows))
        for block, parts in pool.state.items():
            assert all(torch.equal(own, part) for own, part in zip(parts, wanted[block], strict=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"beams": 0}, "beams must be a whole number above 0"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number"),
        ({"length_penalty": "long"}, "length_penalty must be a finite number"),
        ({"early_stopping": "never"}, "early_stopping must be True or False"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"eos_token_id": 0.5}, "eos_token_id must be"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        build().beam_search(_prompts(1, 3), **({"max_new_tokens": 3} | options))
