"""Generation with xLSTM Large: greedy, drawn, ended, streamed; prompts with padding and a first token."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, VOCABULARY, Graph, build, tokens
from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.models.xlstm import DecodeFallback, Sampling, StatePool, generation, quantize, xLSTMLarge
from wavecrest.models.xlstm.state import clone_state


def _loop(model: xLSTMLarge, prompt: Tensor, count: int) -> Tensor:
    """The largest logit behind the whole text, again and again: no states."""
    text = prompt
    for _ in range(count):
        text = torch.cat([text, model(text)[0][:, -1:].argmax(-1)], 1)
    return text[:, prompt.shape[1] :].cpu()


@pytest.mark.parametrize("check_every", [1, 3, 8, 50])
def test_greedy_is_the_argmax_loop(check_every: int) -> None:
    model = build(weight_mode="fused")
    prompt = tokens(3, 11)
    found = model.generate(prompt, 20, check_every=check_every)
    assert torch.equal(found.tokens, _loop(model, prompt, 20))
    assert found.lengths.tolist() == [20] * 3
    assert found.decoding == ("captured" if DEVICE == "cuda" else "eager: a CPU has no graphs")


def test_one_token() -> None:
    model = build()
    assert torch.equal(model.generate(tokens(2, 1), 1).tokens, _loop(model, tokens(2, 1), 1))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bos", [None, 9])
def test_padded_prompts_are_those_without(side: str, bos: int | None) -> None:
    model = build(bos_token_id=9)
    rows = [tokens(1, length, seed=length) for length in (4, 13, 1)]
    # one that begins with the token already, as only some of a batch may
    rows[0][0, 0] = 9
    padded, mask = torch.full((3, 13), 5, device=DEVICE), torch.zeros(3, 13, dtype=torch.bool, device=DEVICE)
    for index, row in enumerate(rows):
        place = slice(13 - row.shape[1], None) if side == "left" else slice(0, row.shape[1])
        padded[index, place], mask[index, place] = row[0], True
    found = model.generate(padded, 7, attention_mask=mask, insert_bos=bos is not None)
    first = torch.full((1, 1), 9, device=DEVICE)
    for index, row in enumerate(rows):
        alone = row if bos is None or index == 0 else torch.cat([first, row], 1)
        assert torch.equal(found.tokens[index], _loop(model, alone, 7)[0])


def test_a_first_token_as_the_checkpoint_asks() -> None:
    model = build(force_bos_token_insert=True, bos_token_id=9)
    prompt = tokens(1, 6)
    assert int(prompt[0, 0]) != 9
    with_first = torch.cat([torch.full((1, 1), 9, device=DEVICE), prompt], 1)
    wanted = model.generate(with_first, 5, insert_bos=False)
    assert torch.equal(model.generate(prompt, 5).tokens, wanted.tokens)
    assert torch.equal(model.generate(with_first, 5).tokens, wanted.tokens)
    assert not torch.equal(model.generate(prompt, 5, insert_bos=False).tokens, wanted.tokens)
    # nothing but the first token
    empty = torch.zeros(1, 0, dtype=torch.bool, device=DEVICE)
    assert torch.equal(
        model.generate(tokens(1, 0), 3, attention_mask=empty).tokens, model.generate(tokens(1, 0), 3).tokens
    )
    assert torch.equal(model.generate(tokens(1, 0), 3).tokens, _loop(model, with_first[:, :1], 3))
    # a text that goes on has none in its middle
    _, state = model(prompt)
    more = tokens(1, 2, seed=4)
    assert torch.equal(model.generate(more, 3, state=state).tokens, _loop(model, torch.cat([prompt, more], 1), 3))


def test_draws_repeat_with_their_seed() -> None:
    model = build()
    prompt = tokens(2, 5)

    def drawn(seed: int) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return model.generate(prompt, 12, temperature=1.3, top_k=20, top_p=0.9, generator=generator).tokens

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    # the largest of one
    found = model.generate(prompt, 12, temperature=0.7, top_k=1).tokens
    assert torch.equal(found, _loop(model, prompt, 12))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), 6),
        (Sampling(2.0), 6),
        (Sampling(0.5), 6),
        (Sampling(1.0, top_k=3), 3),
        (Sampling(1.0, top_k=50), 6),
        # 0.5 + 0.25 < 0.8 ≤ 0.5 + 0.25 + 0.125
        (Sampling(1.0, top_p=0.8), 3),
        (Sampling(1.0, top_p=1e-6), 1),
        # of the four largest 0.5 is 0.533: two are needed for 0.7
        (Sampling(1.0, top_k=4, top_p=0.7), 2),
    ],
    ids=str,
)
def test_draws_have_the_distribution(sampling: Sampling, kept: int) -> None:
    count = 40_000
    probabilities = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.03125, 0.03125], dtype=torch.float64)
    logits = probabilities.log().float().expand(count, -1).to(DEVICE)
    noise = sampling.noise(logits)
    assert noise is not None
    noise.exponential_(generator=torch.Generator(DEVICE).manual_seed(0))
    found = torch.bincount(sampling.pick(logits, noise).cpu(), minlength=6) / count
    order = [1, 3, 0, 2, 4, 5]
    wanted = torch.zeros(6, dtype=torch.float64)
    wanted[order[:kept]] = probabilities[order[:kept]] ** (1 / sampling.temperature)
    wanted /= wanted.sum()
    # five standard deviations of a share
    assert bool(((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt()).all()), (found, wanted)


def test_noise_of_zero_draws_nothing_that_is_cut() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=DEVICE)
    noise = torch.tensor([[1.0, 1.0, 0.0, 0.0]], device=DEVICE)
    assert Sampling(1.0, top_p=0.5).pick(logits, noise).tolist() == [0]
    assert Sampling(1.0, top_p=0.99).pick(logits, noise).tolist() != [3]


def _ending(check_every: int) -> tuple[Any, Tensor, int]:
    """Texts generated with an end token and without, and the end token: one that a row reaches in the middle."""
    model = build()
    prompt = tokens(4, 5)
    free = model.generate(prompt, 24, temperature=1.0, generator=torch.Generator(DEVICE).manual_seed(3)).tokens
    end = int(free[2, 6])
    found = model.generate(
        prompt, 24, temperature=1.0, eos_token_id=[end], check_every=check_every,
        generator=torch.Generator(DEVICE).manual_seed(3),
    )  # fmt: skip
    return found, free, end


@pytest.mark.parametrize("check_every", [1, 5, 100])
def test_rows_end(check_every: int) -> None:
    found, free, end = _ending(check_every)
    wanted = [row.tolist().index(end) + 1 if end in row.tolist() else 24 for row in free]
    assert found.lengths.tolist() == wanted and min(wanted) < 24
    assert found.tokens.shape[1] == max(wanted)
    for row, length in enumerate(wanted):
        assert torch.equal(found.tokens[row, :length], free[row, :length])
        assert (found.tokens[row, length:] == 1).all()


@pytest.mark.parametrize("check_every", [1, 4])
def test_all_rows_ended_is_the_end(check_every: int) -> None:
    model = build()
    prompt = tokens(1, 5)
    free = _loop(model, prompt, 12)[0].tolist()
    first = free.index(free[5])
    found = model.generate(prompt, 12, eos_token_id=free[5], check_every=check_every)
    assert found.tokens[0].tolist() == free[: first + 1] and found.lengths.tolist() == [first + 1]
    assert model.generate(prompt, 12, eos_token_id=()).tokens.shape == (1, 12)


def test_the_configured_end_counts() -> None:
    prompt = tokens(1, 5)
    free = _loop(build(), prompt, 12)[0].tolist()
    model = build(eos_token_id=[free[4], 60], pad_token_id=None)
    assert model.generate(prompt, 12).lengths.tolist() == [free.index(free[4]) + 1]


@pytest.mark.parametrize(
    "kind",
    [
        np.int64, np.array, torch.tensor, lambda end: [np.int64(end)], lambda end: (torch.tensor(end), 60),
        lambda end: torch.tensor([60, end]), lambda end: np.array([end]), lambda end: {end},
    ],
)  # fmt: skip
def test_an_end_is_a_whole_number_of_any_kind(kind: Any) -> None:
    model = build()
    free = _loop(model, tokens(1, 5), 6)[0].tolist()
    # the one that a test for truth takes for none
    assert model.generate(tokens(1, 5), 6, eos_token_id=kind(0)).lengths.tolist() == [free.index(0) + 1]


@pytest.mark.parametrize("check_every", [1, 3])
def test_a_stream_is_the_batch(check_every: int) -> None:
    model = build()
    prompt = tokens(3, 5)
    end = int(model.generate(prompt, 9).tokens[1, 4])
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "eos_token_id": end}
    batch = model.generate(prompt, 15, generator=torch.Generator(DEVICE).manual_seed(1), **options)
    columns = model.stream(
        prompt, 15, generator=torch.Generator(DEVICE).manual_seed(1), check_every=check_every, **options
    )
    found = []
    for column in columns:
        # the caller's own gradients stay as they are
        assert torch.is_grad_enabled() and column.device.type == "cpu"
        found.append(column)
    assert torch.equal(torch.stack(found, 1), batch.tokens)


def test_a_stream_can_be_left() -> None:
    model = build()
    columns = model.stream(tokens(1, 5), 1000)
    wanted = _loop(model, tokens(1, 5), 3)[0].tolist()
    assert [int(next(columns)) for _ in range(3)] == wanted
    assert [int(next(model.stream(tokens(1, 5), 2))) for _ in range(2)] == [wanted[0]] * 2


def test_two_streams_side_by_side() -> None:
    model = build()
    one, two = model.stream(tokens(1, 5), 6), model.stream(tokens(1, 5, seed=8), 6)
    found = [(int(a), int(b)) for a, b in zip(one, two, strict=True)]
    assert [a for a, _ in found] == _loop(model, tokens(1, 5), 6)[0].tolist()
    assert [b for _, b in found] == _loop(model, tokens(1, 5, seed=8), 6)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True), (False, False)])
def test_calls_within_and_outside_of_a_mode(first: bool, second: bool, mode: Any, options: dict[str, Any]) -> None:
    model = build()
    wanted = _loop(model, tokens(1, 5), 4)
    for within in (first, second):
        with mode() if within else contextlib.nullcontext():
            assert torch.equal(model.generate(tokens(1, 5), 4, **options).tokens, wanted)


@pytest.mark.parametrize("made", [True, False])
def test_a_stream_made_in_another_mode_than_it_is_read(made: bool) -> None:
    model = build()
    wanted = _loop(model, tokens(1, 5), 4)[0].tolist()
    with torch.inference_mode(made):
        columns = model.stream(tokens(1, 5), 4)
    with torch.inference_mode(not made):
        assert [int(column) for column in columns] == wanted


def test_a_pool_made_in_inference_mode_is_stepped_outside() -> None:
    model = build()
    _, state = model(tokens(1, 5))
    with torch.inference_mode():
        pool = StatePool(model(tokens(1, 5))[1])
    pool.load(state)
    assert torch.equal(pool.state[1][0], state[1][0]) and not pool.arrivals.is_inference()


def test_weights_that_change_are_used() -> None:
    model = build()
    prompt = tokens(2, 5)
    model.generate(prompt, 20)
    model.load_state_dict(build(seed=1).state_dict())
    assert torch.equal(model.generate(prompt, 20).tokens, _loop(build(seed=1), prompt, 20))
    other = build(seed=2)
    model.lm_head, model.embedding = other.lm_head, other.embedding
    assert torch.equal(model.generate(prompt, 20).tokens, _loop(model, prompt, 20))
    assert torch.equal(copy.deepcopy(model).generate(prompt, 20).tokens, _loop(model, prompt, 20))


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    model = build()
    model.generate(tokens(1, 5), 3)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 7}], ids=["greedy", "drawn"])
def test_captured_tokens_are_those_of_eager_steps(options: dict[str, Any]) -> None:
    model = build(weight_mode="fused")
    found = [
        model.generate(tokens(2, 5), 30, capture=capture, generator=torch.Generator(DEVICE).manual_seed(1), **options)
        for capture in (False, True, True)
    ]
    assert [one.decoding for one in found] == ["eager: as asked", "captured", "captured"]
    assert all(torch.equal(one.tokens, found[0].tokens) for one in found)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("captured", [True, False])
def test_a_graph_outlives_the_mode_it_was_captured_in(captured: bool) -> None:
    model = build()
    wanted = _loop(model, tokens(1, 5), 20)
    for within in (captured, not captured):
        with torch.inference_mode(within):
            found = model.generate(tokens(1, 5), 20)
        assert found.decoding == "captured" and torch.equal(found.tokens, wanted)


@pytest.mark.usefixtures("graphs")
def test_graphs_are_used_again() -> None:
    model = build()
    assert model.generate(tokens(2, 5), 3).decoding == "eager: fewer than 16 tokens"
    assert model.generate(tokens(2, 5), 20).decoding == "captured"
    decoder = generation._decoders[model][1]
    found = model.generate(tokens(2, 9, seed=4), 3)
    assert found.decoding == "captured" and generation._decoders[model][1] is decoder
    assert torch.equal(found.tokens, _loop(model, tokens(2, 9, seed=4), 3))
    # another batch, other sampling, other weights: another graph
    for prompt, options in ((tokens(3, 5), {}), (tokens(2, 5), {"temperature": 1.0})):
        model.generate(prompt, 20, **options)
        assert generation._decoders[model][1] is not decoder
        decoder = generation._decoders[model][1]
    quantize(model)
    assert model.generate(tokens(2, 5), 20, temperature=1.0).decoding == "captured"
    assert generation._decoders[model][1] is not decoder


@pytest.mark.usefixtures("graphs")
def test_a_replay_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    prompt = tokens(2, 5)

    def nothing(_graph: Any) -> None:
        """Leaves everything as it was."""

    monkeypatch.setattr(torch.cuda.CUDAGraph if DEVICE == "cuda" else Graph, "replay", nothing)
    with pytest.warns(DecodeFallback, match="its first replay differs"):
        found = model.generate(prompt, 20)
    assert found.decoding == "eager: its first replay differs from the step it was made of"
    assert torch.equal(found.tokens, _loop(model, prompt, 20))
    # it is not tried again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate(prompt, 20).decoding == found.decoding


@pytest.mark.usefixtures("graphs")
def test_a_replay_of_the_right_logits_and_a_wrong_state_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    # on a GPU the first steps compile ahead
    model.generate(tokens(2, 5), 2)
    step, calls = model.decode, []

    def spoiled(token: Tensor, state: Any, *more: Any, **options: Any) -> Tensor:
        calls.append(1)
        # warm-up takes three, the step to compare with is the fourth
        return step(token, clone_state(state) if len(calls) > 4 else state, *more, **options)

    monkeypatch.setattr(model, "decode", spoiled)
    with pytest.warns(DecodeFallback, match="its first replay differs"):
        model.generate(tokens(2, 5), 20)


@pytest.mark.usefixtures("graphs")
def test_what_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> Any:
        raise StepRefused("the decoding step cannot be captured: no")

    monkeypatch.setattr("wavecrest.measure.cuda_graph.record", refuse)
    model = build()
    with pytest.warns(DecodeFallback, match="cannot be captured: no"):
        found = model.generate(tokens(2, 5), 20)
    assert found.decoding == "eager: the decoding step cannot be captured: no"
    assert torch.equal(found.tokens, _loop(model, tokens(2, 5), 20))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number above 0, got 0"),
        ({"check_every": 0}, "check_every must be"),
        ({"temperature": -1.0}, "temperature must be a number from 0 on"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be a whole number"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": 5}, "set a temperature above 0"),
        ({"eos_token_id": ["end"]}, "eos_token_id must be a token"),
        ({"eos_token_id": 0.0}, "eos_token_id must be a token or a list of them, got 0.0"),
        ({"eos_token_id": False}, "eos_token_id must be"),
        ({"eos_token_id": ""}, "eos_token_id must be"),
        ({"eos_token_id": [[2]]}, "eos_token_id must be"),
        ({"eos_token_id": torch.tensor(False)}, "eos_token_id must be"),
        ({"eos_token_id": torch.tensor([[2]])}, "eos_token_id must be"),
        ({"eos_token_id": torch.tensor([0.0])}, "eos_token_id must be"),
        ({"eos_token_id": np.array([True])}, "eos_token_id must be"),
        ({"attention_mask": torch.zeros(2, 5)}, "must be bool or integers"),
        ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "a row of the prompt has no token"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    model = build()
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidArgument, match=reason):
            call(tokens(2, 5), **({"max_new_tokens": 4} | options))


def test_prompts_that_are_refused() -> None:
    model = build(bos_token_id=None)
    with pytest.raises(InvalidArgument, match=f"tokens are from 0 to {VOCABULARY - 1}"):
        model.generate(tokens(1, 3) + VOCABULARY, 4)
    with pytest.raises(InvalidArgument, match="needs a bos_token_id"):
        model.generate(tokens(1, 3), 4, insert_bos=True)
    for shape in ((1, 0), (0, 3)):
        with pytest.raises(InvalidArgument, match="has no token"):
            model.generate(tokens(*shape), 4)
    model = build(chunkwise_kernel="parallel--native_autograd", return_last_states=False)
    with pytest.raises(InvalidArgument, match="parallel--native_autograd has no states"):
        model.generate(tokens(1, 3), 4)
