"""Speculative decoding and states to go on from: the tokens of greedy decoding, the states of their texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.xlstm_harness import DEVICE, VOCABULARY, build, close, tokens
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import State, prompt_lookup, select_rows
from wavecrest.models.xlstm.speculation import Draft
from wavecrest.models.xlstm.state import clone_state

SIGMOID = "chunkwise--triton_xl_chunk_siging"


def _one(state: State, row: int) -> State:
    return select_rows(state, torch.tensor([row], device=DEVICE))


def _same(found: State, wanted: State, dtype: str = "float32") -> None:
    """Within the limits of whole models: c and n as they are meant, times e^m."""
    for block, (c, n, m) in wanted.items():
        own_c, own_n, own_m = found[block]
        if m is not None and own_m is not None:
            c, n = c * m.exp()[..., None], n * m.exp()
            own_c, own_n = own_c * own_m.exp()[..., None], own_n * own_m.exp()
        close(own_c, c, dtype)
        close(own_n, n, dtype)


def _unchanged(state: State, before: State) -> None:
    for block, parts in state.items():
        assert all(own is part or torch.equal(own, part) for own, part in zip(parts, before[block], strict=True))


def _drafts(wanted: Tensor, prefix: int, count: int, right: int) -> Draft:
    """Drafts of `count` tokens with the first `right` as `wanted` [B, …] has them behind `prefix` tokens of a text."""

    def draft(texts: list[Tensor]) -> Tensor:
        rows = []
        for row, text in zip(wanted, texts, strict=True):
            some = row[text.shape[0] - prefix :][:count].clone()
            some[right:] = (some[right:] + 1) % VOCABULARY
            rows.append(some)
        return torch.stack(rows)

    return draft


@pytest.mark.parametrize(("count", "right"), [(1, 1), (2, 1), (4, 0), (4, 3), (8, 5), (8, 8)])
def test_a_draft_changes_no_token(count: int, right: int) -> None:
    model = build(weight_mode="fused" if count % 4 else "single", use_bias=count == 4)
    prompt = tokens(2, 7)
    wanted = model.generate(prompt, 40).tokens
    found = model.speculate(prompt, 20, _drafts(wanted, 7, count, right))
    assert torch.equal(found.tokens, wanted[:, :20]) and found.lengths.tolist() == [20, 20]
    # each call makes what was right, and one token of the model's own
    calls = -(-19 // (right + 1))
    rest = "tokens were right, "
    assert found.decoding.endswith(f"{rest}{calls} calls after the prompt")
    assert found.decoding.startswith(f"speculative: {2 * right * calls} of {2 * count * calls} drafted")


@pytest.mark.parametrize("changes", [{}, {"inference_state_dtype": "float16"}, {"chunkwise_kernel": SIGMOID}], ids=str)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.filterwarnings("ignore::wavecrest.models.xlstm.KernelFallback")
def test_the_state_goes_back_to_what_was_right(changes: dict[str, Any], replaced: bool) -> None:
    model = build(**changes)
    if replaced:
        # a layer that something looks at keeps nothing: another way to the same state
        model.backbone.blocks[1].mlstm_layer.register_forward_hook(lambda *_: None)
    prompt, last = tokens(3, 9), tokens(3, 1, seed=5)
    _, state = model(prompt)
    before = clone_state(state)
    chosen = model.generate(last, 6, state=state).tokens.to(DEVICE)
    draft = chosen[:, :5].clone()
    for row, wrong in ((0, 0), (1, 3)):
        draft[row, wrong] = (draft[row, wrong] + 1) % VOCABULARY
    found = model.verify(last, draft, state)
    assert found.accepted.tolist() == [0, 3, 5]
    for row, accepted in enumerate((0, 3, 5)):
        assert torch.equal(found.tokens[row, : accepted + 1], chosen[row, : accepted + 1])
        text = torch.cat([prompt[row], last[row], draft[row, :accepted]])
        # a state that is rounded to float16 here and there shows in the next block's n too
        limits = "float16" if "inference_state_dtype" in changes else "float32"
        _same(_one(found.state, row), model(text[None])[1], limits)
    _unchanged(state, before)
    # all of a draft right: the state is that of the call itself
    whole = model.verify(last, chosen[:, :5], state)
    assert whole.accepted.tolist() == [5, 5, 5]
    _same(_one(whole.state, 2), _one(found.state, 2))


def test_rows_end_and_leave() -> None:
    model = build()
    rows = [tokens(1, length, seed=length) for length in (4, 13, 1)]
    padded, mask = torch.full((3, 13), 5, device=DEVICE), torch.zeros(3, 13, dtype=torch.bool, device=DEVICE)
    for index, row in enumerate(rows):
        padded[index, : row.shape[1]], mask[index, : row.shape[1]] = row[0], True
    free = model.generate(padded, 25, attention_mask=mask).tokens
    # an end that some rows meet in the middle
    end = int(free[0, 6])
    wanted = model.generate(padded, 25, attention_mask=mask, eos_token_id=end, return_state=True)
    assert len(set(wanted.lengths.tolist())) > 1
    asked: list[int] = []

    def draft(texts: list[Tensor]) -> Tensor:
        asked.append(len(texts))
        starts = [row[0].cpu() for row in rows]
        places = [next(n for n in range(3) if torch.equal(starts[n], text[: starts[n].shape[0]])) for text in texts]
        made = [text.shape[0] - rows[place].shape[1] for place, text in zip(places, texts, strict=True)]
        return torch.stack([free[place][start : start + 4] for place, start in zip(places, made, strict=True)])

    found = model.speculate(padded, 18, draft, attention_mask=mask, eos_token_id=end, return_state=True)
    assert asked[0] == 3 and asked[-1] < 3
    wanted = model.generate(padded, 18, attention_mask=mask, eos_token_id=end, return_state=True)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.lengths, wanted.lengths)
    assert found.state is not None and wanted.state is not None
    _same(found.state, wanted.state)


def test_a_text_looked_up() -> None:
    draft = prompt_lookup(3, ngram=2)
    text = torch.tensor([7, 1, 2, 3, 4, 9, 1, 2])
    # behind "1 2"; nothing behind a 5 that is new; the later of two places
    assert draft([text]).tolist() == [[3, 4, 9]]
    assert draft([torch.cat([text, torch.tensor([5])])]).shape == (1, 0)
    assert draft([text, torch.tensor([1, 1, 2, 1])]).tolist() == [[3, 4, 9], [2, 1, 0]]
    assert draft([torch.tensor([3])]).shape == (1, 0)
    model = build()
    prompt = tokens(1, 6).repeat(1, 4)
    assert torch.equal(model.speculate(prompt, 15, draft).tokens, model.generate(prompt, 15).tokens)


def test_drafts_that_are_refused() -> None:
    model = build()
    for found in (torch.zeros(1, 2), torch.zeros(2, 2, dtype=torch.int64), [1]):
        with pytest.raises(InvalidArgument, match=r"draft must give int64 \[1, K\]"):
            model.speculate(tokens(1, 3), 5, lambda _texts, found=found: found)  # type: ignore[misc]
    with pytest.raises(InvalidArgument, match=f"tokens are from 0 to {VOCABULARY - 1}"):
        model.speculate(tokens(1, 3), 5, lambda _texts: torch.full((1, 2), VOCABULARY))
    _, state = model(tokens(2, 3))
    for last, draft in (((2, 1), (2, 0)), ((2, 2), (2, 3)), ((2, 1), (1, 3))):
        with pytest.raises(InvalidArgument, match=r"last is \[B, 1\]"):
            model.verify(tokens(*last), tokens(*draft), state)
    with pytest.raises(InvalidArgument, match="this call needs"):
        model.verify(tokens(1, 1), tokens(1, 2), state)
    with pytest.raises(InvalidArgument, match="tokens must be a whole number above 0"):
        prompt_lookup(0)


@pytest.mark.parametrize("within", [False, True])
def test_generation_goes_on_from_a_returned_state(within: bool) -> None:
    model = build(weight_mode="fused")
    prompt = tokens(3, 5)
    whole = model.generate(prompt, 21, return_state=True)
    with torch.inference_mode(within):
        first = model.generate(prompt, 8, return_state=True)
    assert first.state is not None and first.last.shape == (3, 1)
    before = clone_state(first.state)
    second = model.generate(first.last.to(DEVICE), 13, state=first.state, return_state=True)
    assert torch.equal(torch.cat([first.tokens, second.tokens], 1), whole.tokens)
    _unchanged(first.state, before)
    assert second.state is not None and whole.state is not None
    _same(second.state, whole.state)
    # of the last step's memory nothing is handed out
    model.generate(tokens(3, 4, seed=9), 8)
    _unchanged(first.state, before)
    assert model.generate(prompt, 2).state is None


def test_states_of_rows_that_ended_early() -> None:
    model = build()
    prompt = tokens(3, 6)
    free = model.generate(prompt, 30).tokens
    # one ends at its first token
    ends = [int(free[0, 0]), int(free[1, 9])]
    found = model.generate(prompt, 30, eos_token_id=ends, return_state=True)
    assert found.lengths[0] == 1 and found.state is not None
    for row, length in enumerate(found.lengths.tolist()):
        text = torch.cat([prompt[row], found.tokens[row, : length - 1].to(DEVICE)])[None]
        _same(_one(found.state, row), model(text)[1])
        assert int(found.last[row]) == int(found.tokens[row, length - 1])
    # one that goes on to the last step beside one that does not
    found = model.generate(prompt, 4, eos_token_id=int(free[0, 0]), return_state=True)
    assert found.lengths.tolist() == [1, 4, 4] and found.state is not None
    _same(_one(found.state, 0), model(prompt[:1])[1])
    # all at their first token: the state is that of the prompt
    found = model.generate(prompt, 30, eos_token_id=free[:, 0], return_state=True)
    assert found.lengths.tolist() == [1, 1, 1] and found.state is not None
    _same(found.state, model(prompt)[1])


def test_a_replaced_layer_is_called_as_before() -> None:
    model = build()
    inner = model.backbone.blocks[0].mlstm_layer

    class Other(nn.Module):
        """A layer that takes the documented keywords alone."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, state: Any, **options: Any) -> Any:
            assert set(options) <= {"padding", "in_place", "return_state", "last"}
            return self.inner(x, state, **options)

    wanted = model.generate(tokens(2, 5), 12)
    model.backbone.blocks[0].mlstm_layer = Other()
    assert torch.equal(model.speculate(tokens(2, 5), 12, prompt_lookup(3, 1)).tokens, wanted.tokens)
