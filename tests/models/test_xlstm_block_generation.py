"""Generation with a block stack of mLSTM and sLSTM blocks: it is the model over the whole text, however it is asked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import Scheduler, xLSTMBlockStackConfig, xLSTMLMModel
from wavecrest.models.xlstm.blocks import BlockState

WORDS = 7


@pytest.fixture(scope="module")
def model() -> xLSTMLMModel:
    """Blocks of both kinds, in float64: no rounding decides between two tokens."""
    config = xLSTMBlockStackConfig(
        embedding_dim=16, num_blocks=3, slstm_at=(1,), mlstm_num_heads=2, slstm_num_heads=2, vocab_size=WORDS,
        slstm_conv1d_kernel_size=3,
    )  # fmt: skip
    made, generator = xLSTMLMModel(config).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made.to(DEVICE).eval().requires_grad_(False)


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _greedy(model: xLSTMLMModel, text: Tensor, count: int) -> Tensor:
    """The new tokens [B, count] by reading the whole text for each."""
    for _ in range(count):
        text = torch.cat((text, model(text)[0][:, -1].argmax(-1, keepdim=True)), 1)
    return text[:, -count:].cpu()


def _states(found: Any, row: int | None = None) -> list[BlockState]:
    """States by place, of one row if it is named."""
    parts = [found[place] for place in range(len(found))]
    return parts if row is None else [tuple(one[row : row + 1] for one in state) for state in parts]


def _assert_same(one: list[BlockState], other: list[BlockState]) -> None:
    for mine, right in zip(one, other, strict=True):
        for part, wanted in zip(mine, right, strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-9)


def test_greedy_tokens_are_those_of_the_whole_text_and_states_go_on(model: xLSTMLMModel) -> None:
    prompt = _tokens(2, 6)
    want = _greedy(model, prompt, 9)
    found = model.generate(prompt, 5, return_state=True)
    assert torch.equal(found.tokens, want[:, :5])
    more = model.generate(found.last.to(DEVICE), 4, state=found.state)
    assert torch.equal(more.tokens, want[:, 5:])
    # the states of a call are as good, and are not changed
    _, states = model(prompt[:, :4])
    kept = [[part.clone() for part in state] for state in states]
    for _ in range(2):
        assert torch.equal(model.generate(prompt[:, 4:], 9, state=states).tokens, want)  # type: ignore[arg-type]
    _assert_same(states, [tuple(state) for state in kept])
    assert torch.equal(torch.stack(list(model.stream(prompt, 9)), 1), want)


def test_rows_of_several_lengths_are_what_they_are_alone(model: xLSTMLMModel) -> None:
    prompt, lengths = _tokens(4, 7), [7, 1, 3, 2]
    lead = torch.tensor([[7 - length] for length in lengths], device=DEVICE)
    mask = torch.arange(7, device=DEVICE) >= lead
    end = int(_greedy(model, prompt[2:3, 4:], 4)[0, 2])
    found = model.generate(prompt, 6, attention_mask=mask, eos_token_id=end, return_state=True)
    ended = []
    for row, length in enumerate(lengths):
        alone = model.generate(prompt[row : row + 1, 7 - length :], 6, eos_token_id=end, return_state=True)
        count = int(alone.lengths)
        ended.append(count < 6)
        assert int(found.lengths[row]) == count
        assert torch.equal(found.tokens[row, :count], alone.tokens[0, :count])
        _assert_same(_states(found.state, row), _states(alone.state))
    assert any(ended) and not all(ended)


def test_padding_behind_a_row_leaves_its_states(model: xLSTMLMModel) -> None:
    text, lengths = _tokens(4, 6), torch.tensor([6, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    _, before = model(_tokens(4, 3, seed=2))
    for first in (None, before):
        _, after = model(text, first, lengths=lengths)
        for row, length in enumerate(lengths.tolist()):
            own = None if first is None else _states(first, row)
            wanted = own or _states(model.empty_state(1))
            if length:
                wanted = model(text[row : row + 1, :length], own)[1]
            _assert_same(_states(after, row), wanted)


def test_beams_are_the_exhaustive_search(model: xLSTMLMModel) -> None:
    prompt = _tokens(2, 4)
    found = model.beam_search(prompt, 3, beams=WORDS**3, length_penalty=0.0)
    every = torch.tensor(list(itertools.product(range(WORDS), repeat=3)), device=DEVICE)
    for row in range(2):
        whole = torch.cat((prompt[row].expand(len(every), -1), every), 1)
        chances = model(whole)[0].log_softmax(-1)[:, 3:6].gather(2, every[:, :, None])[:, :, 0].sum(1)
        order = chances.argsort(descending=True)
        assert torch.equal(found.tokens[row], every[order].cpu())
        torch.testing.assert_close(found.scores[row], chances[order].cpu(), rtol=1e-9, atol=1e-9)


def test_drafts_right_and_wrong_change_no_token(model: xLSTMLMModel) -> None:
    prompt = _tokens(2, 5)
    want = model.generate(prompt, 10, return_state=True)
    whole = torch.cat((prompt.cpu(), want.tokens), 1)

    def draft(texts: list[Tensor]) -> Tensor:
        rows = []
        for text in texts:
            right = next(row for row in whole if torch.equal(row[: len(text)], text))[len(text) : len(text) + 3]
            rows.append(torch.cat((right, right.new_zeros(3 - len(right)))))
        made = torch.stack(rows)
        # the second row's second token is wrong
        made[-1, 1] = (made[-1, 1] + 1) % WORDS
        return made

    found = model.speculate(prompt, 10, draft, return_state=True)
    assert torch.equal(found.tokens, want.tokens) and "drafted tokens were right" in found.decoding
    _assert_same(_states(found.state), _states(want.state))


def test_rows_join_and_leave_a_batch(model: xLSTMLMModel) -> None:
    asked = [(_tokens(length, seed=length), count) for length, count in ((3, 6), (1, 2), (5, 4), (2, 7), (4, 1))]
    scheduler = Scheduler(model, 2)
    for prompt, count in asked:
        scheduler.add(prompt, count, return_state=True)
    rows = {row.id: row for row in scheduler.run()}
    for index, (prompt, count) in enumerate(asked):
        assert torch.equal(rows[index].tokens, _greedy(model, prompt[None], count)[0])
        alone = model.generate(prompt[None], count, return_state=True)
        _assert_same(_states(rows[index].state), _states(alone.state))
    # from a state, as a call gives it
    text = asked[0][0][None]
    scheduler.add(text[0, 2:], 3, state=model(text[:, :2])[1])  # type: ignore[arg-type]
    (row,) = scheduler.run()
    assert torch.equal(row.tokens, _greedy(model, text, 3)[0])


def test_company_changes_no_bit(model: xLSTMLMModel) -> None:
    made, prompt = xLSTMLMModel(model.config).to(DEVICE).eval().requires_grad_(False), _tokens(4)
    made.load_state_dict(model.state_dict())

    def beside(others: int) -> Any:
        scheduler = Scheduler(made, 3)
        own = scheduler.add(prompt, 8, return_state=True)
        for other in range(others):
            scheduler.add(_tokens(other + 2, seed=other), 3)
        return next(row for row in scheduler.run() if row.id == own)

    alone, busy = beside(0), beside(5)
    assert torch.equal(alone.tokens, busy.tokens)
    for state, other in zip(_states(alone.state), _states(busy.state), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(state, other, strict=True))


def test_tokens_of_a_configuration_and_what_is_refused(model: xLSTMLMModel) -> None:
    fields = {"bos_token_id": 3, "eos_token_id": 5, "force_bos_token_insert": True}
    config = xLSTMBlockStackConfig.of({"embedding_dim": 16, "vocab_size": WORDS, **fields})
    assert (config.bos_token_id, config.eos_token_id, config.force_bos_token_insert) == (3, 5, True)
    prompt = _tokens(1, 4)
    with pytest.raises(InvalidArgument, match="insert_bos needs a bos_token_id"):
        model.generate(prompt, 2, insert_bos=True)
    _, states = model(prompt)
    wrong: tuple[tuple[Any, str], ...] = (
        (states[:2], "a list of the 3 blocks' states"),
        ({0: states[0]}, "or a dict"),
        ("state", "a list of the 3"),
        (_states(model(_tokens(2, 4))[1]), "block 0 has shapes"),
    )
    for state, words in wrong:
        with pytest.raises(InvalidArgument, match=words):
            model.generate(prompt, 2, state=state)
    with pytest.raises(InvalidArgument, match=r"tokens are from 0 to 6, got"):
        model.generate(prompt + WORDS, 2)
