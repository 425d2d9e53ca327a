"""Continuous batching with xLSTM Large: rows join and leave, and are what they are alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, VOCABULARY, build, tokens
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import Finished, Scheduler
from wavecrest.models.xlstm.state import clone_state

Asked = tuple[Tensor, int]


def _asked(count: int) -> list[Asked]:
    chance = random.Random(4)
    return [(tokens(chance.randint(1, 12), seed=100 + n), chance.randint(1, 15)) for n in range(count)]


def _drive(scheduler: Scheduler, asked: list[Asked], **options: Any) -> dict[int, Finished]:
    """Rows that come by ones and twos while others run."""
    chance, found, waiting = random.Random(1), dict[int, Finished](), list(asked)
    while waiting or scheduler.running or scheduler.waiting:
        for _ in range(chance.choice((0, 1, 2))):
            if waiting:
                prompt, count = waiting.pop(0)
                scheduler.add(prompt, count, **options)
        found |= {row.id: row for row in scheduler.step()}
        assert scheduler.running <= 3
    return found


@pytest.mark.parametrize("weight_mode", ["single", "fused"])
def test_rows_are_what_they_are_alone(weight_mode: str) -> None:
    model, asked = build(weight_mode=weight_mode), _asked(12)
    end = int(model.generate(asked[3][0][None], 15).tokens[0, 2])
    found = _drive(Scheduler(model, 3), asked, eos_token_id=end, return_state=True)
    assert sorted(found) == list(range(12))
    for index, (prompt, count) in enumerate(asked):
        alone = model.generate(prompt[None], count, eos_token_id=end, return_state=True)
        row = found[index]
        assert torch.equal(row.tokens, alone.tokens[0, : int(alone.lengths)])
        assert row.reason == ("end" if int(row.tokens[-1]) == end else "length")
        assert row.state is not None and alone.state is not None
        for block, parts in alone.state.items():
            for own, part in zip(row.state[block], parts, strict=True):
                assert own is not None and part is not None
                # GEMMs of three rows, not of one
                torch.testing.assert_close(own, part, rtol=1e-4, atol=1e-4)
    assert {row.reason for row in found.values()} == {"end", "length"}


def test_company_changes_no_bit() -> None:
    model = build(weight_mode="fused")
    prompt = tokens(7, seed=3)

    def beside(others: list[Asked]) -> Finished:
        scheduler = Scheduler(model, 3)
        own = scheduler.add(prompt, 14, return_state=True)
        found = []
        for other in (*others, None):
            found += scheduler.step()
            if other is not None:
                scheduler.add(*other)
        found += scheduler.run()
        return next(row for row in found if row.id == own)

    alone, busy = beside([]), beside(_asked(9))
    assert torch.equal(alone.tokens, busy.tokens)
    assert alone.state is not None and busy.state is not None
    for block, parts in alone.state.items():
        assert all(torch.equal(own, part) for own, part in zip(parts, busy.state[block], strict=True))  # type: ignore[arg-type]


def test_a_row_goes_on_from_a_state() -> None:
    model = build(force_bos_token_insert=True, bos_token_id=9)
    prompt = tokens(5)
    whole = model.generate(prompt[None], 9).tokens[0]
    scheduler = Scheduler(model, 2)
    scheduler.add(prompt, 4, return_state=True)
    (first,) = scheduler.run()
    assert first.state is not None
    before = clone_state(first.state)
    scheduler.add(first.tokens[-1:].to(DEVICE), 5, state=first.state)
    (second,) = scheduler.run()
    assert torch.equal(torch.cat([first.tokens, second.tokens]), whole)
    assert torch.equal(first.state[0][0], before[0][0])


def test_rows_can_be_watched_and_taken_out() -> None:
    model = build()
    scheduler = Scheduler(model, 2)
    ids = [scheduler.add(tokens(4, seed=n), 10) for n in range(3)]
    assert (scheduler.waiting, scheduler.running) == (3, 0)
    scheduler.step()
    scheduler.step()
    assert (scheduler.waiting, scheduler.running) == (1, 2)
    assert scheduler.tokens(ids[0]) == model.generate(tokens(1, 4), 2).tokens[0].tolist()
    assert scheduler.tokens(ids[2]) == [] and scheduler.cancel(ids[2]) == []
    assert len(scheduler.cancel(ids[1])) == 2 and (scheduler.waiting, scheduler.running) == (0, 1)
    (last,) = scheduler.run()
    assert last.id == ids[0] and torch.equal(last.tokens, model.generate(tokens(1, 4), 10).tokens[0])
    for gone in ids:
        with pytest.raises(InvalidArgument, match=f"row {gone} is not here"):
            scheduler.tokens(gone)
    assert scheduler.step() == []


def test_draws_repeat_with_their_seed() -> None:
    model = build()

    def drawn(seed: int) -> list[list[int]]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        scheduler = Scheduler(model, 2, temperature=1.2, top_k=20, generator=generator)
        for prompt, count in _asked(4):
            scheduler.add(prompt, count + 4)
        return [row.tokens.tolist() for row in scheduler.run()]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.usefixtures("graphs")
def test_a_captured_step_follows_the_weights() -> None:
    model = build()
    scheduler, decoders = Scheduler(model, 2), []
    for seed in (0, 0, 3):
        # the graph holds the weights that it was captured with
        if seed:
            other = build(seed=seed)
            model.lm_head, model.embedding = other.lm_head, other.embedding
        ids = [scheduler.add(tokens(4, seed=n), 6 + n) for n in range(3)]
        found = {row.id: row.tokens for row in scheduler.run()}
        for n, id in enumerate(ids):
            assert torch.equal(found[id], model.generate(tokens(1, 4, seed=n), 6 + n, capture=False).tokens[0])
        assert scheduler.decoding == "captured"
        decoders.append(scheduler._made[1])
    assert decoders[0] is decoders[1] and decoders[1] is not decoders[2]


def test_what_is_refused() -> None:
    model = build()
    with pytest.raises(InvalidArgument, match="slots must be a whole number above 0"):
        Scheduler(model, 0)
    with pytest.raises(InvalidArgument, match="temperature must be a number from 0 on"):
        Scheduler(model, temperature=-1.0)
    scheduler = Scheduler(model, 2)
    for prompt, reason in (
        (tokens(2, 3), r"a prompt is \[S\] or \[1, S\]"),
        (tokens(3) + VOCABULARY, "tokens are from 0 to"),
        (tokens(0), "has no token"),
        ([1, 2], "tokens must be int64 or int32"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            scheduler.add(prompt, 4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="this call needs"):
        scheduler.add(tokens(3), 4, state=model(tokens(2, 3))[1])
    with pytest.raises(InvalidArgument, match="max_new_tokens must be"):
        scheduler.add(tokens(3), 0)
    assert scheduler.waiting == 0
