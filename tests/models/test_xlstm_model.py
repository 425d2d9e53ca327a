"""xLSTM Large against its formulas in float64, and against itself: fused and single, whole and in parts, padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.xlstm_harness import DEVICE, VOCABULARY, build, close, config, oracle, tokens
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import (
    StatePool,
    convert_fused_weights_to_single_weights,
    convert_single_weights_to_fused_weights,
    select_rows,
    xLSTMLarge,
)
from wavecrest.models.xlstm.state import clone_state

# a GPU would be waited for
CPU = pytest.mark.skipif(DEVICE == "cuda", reason="values are not looked at")


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k], strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True},
        {"add_out_norm": False, "gate_soft_cap": None, "output_logit_soft_cap": None},
        {"tie_word_embeddings": True, "gate_soft_cap": 2.0, "output_logit_soft_cap": 1.5},
        {"v_dim_factor": 0.5, "qk_dim_factor": 1.0, "norm_eps": 0.01, "eps": 0.1},
    ],
    ids=["default", "biases", "no caps", "tied", "other sizes"],
)
def test_against_the_formulas_in_float64(changes: dict[str, Any]) -> None:
    model = build(**changes)
    prompt = tokens(1, 21)
    close(model(prompt)[0][0], oracle(model, prompt[0]))


def test_float64_of_the_model_agrees_to_its_last_digits() -> None:
    model = build(dtype=torch.float64)
    prompt = tokens(1, 9)
    wanted = oracle(model, prompt[0])
    logits, _ = model(prompt)
    assert logits.dtype == torch.float64
    close(logits[0], wanted, "float64")


@pytest.mark.parametrize("use_bias", [False, True])
def test_fused_is_single(use_bias: bool) -> None:
    prompt = tokens(2, 20)
    a, state_a = build(use_bias=use_bias)(prompt)
    b, state_b = build(use_bias=use_bias, weight_mode="fused")(prompt)
    close(a, b)
    for index in state_a:
        close(state_a[index][0], state_b[index][0])


def test_weights_convert_both_ways() -> None:
    single = build(use_bias=True).state_dict()
    before = dict(single)
    fused = convert_single_weights_to_fused_weights(single)
    assert list(single) == list(before) and all(single[name] is before[name] for name in before)
    qkvo = fused["backbone.blocks.1.mlstm_layer.qkv_opreact.weight"]
    assert torch.equal(qkvo[36:72], single["backbone.blocks.1.mlstm_layer.v.weight"])
    assert torch.equal(qkvo[18:36], single["backbone.blocks.1.mlstm_layer.k.weight"])
    assert list(fused) == list(build(use_bias=True, weight_mode="fused").state_dict())
    again = convert_fused_weights_to_single_weights(fused)
    assert again.keys() == single.keys() and all(torch.equal(again[name], single[name]) for name in single)
    # the order of the argument's keys is not what counts
    turned = convert_single_weights_to_fused_weights(dict(reversed(single.items())))
    assert all(torch.equal(turned[name], fused[name]) for name in fused)


def test_weights_that_do_not_convert_are_named() -> None:
    single = build().state_dict()
    del single["backbone.blocks.1.mlstm_layer.k.weight"]
    with pytest.raises(InvalidArgument, match=r"blocks\.1\.mlstm_layer\.qkv_opreact\.weight needs .*\.k\.weight"):
        convert_single_weights_to_fused_weights(single)
    fused = build(weight_mode="fused").state_dict()
    del fused["backbone.blocks.0.mlstm_layer.multihead_norm.weight"]
    with pytest.raises(InvalidArgument, match="multihead_norm"):
        convert_fused_weights_to_single_weights(fused)
    with pytest.raises(InvalidArgument, match="3 rows"):
        convert_fused_weights_to_single_weights({"backbone.blocks.0.ffn.proj_up_gate_z.weight": torch.ones(3, 2)})


@pytest.mark.parametrize(
    "cuts", [(1,), (16, 17), (3, 20, 36), tuple(range(1, 37))], ids=lambda cuts: f"{len(cuts)} cuts"
)
def test_parts_are_the_whole(cuts: tuple[int, ...]) -> None:
    model = build(weight_mode="fused")
    prompt = tokens(2, 37)
    wanted, last = model(prompt)
    found, state = [], model.empty_state(2)
    for start, stop in zip((0, *cuts), (*cuts, 37), strict=True):
        logits, state = model(prompt[:, start:stop], state)
        found.append(logits)
    close(torch.cat(found, 1), wanted)
    for index in last:
        # states are c·eᵐ: ways to get there may differ in m
        a, b = ((s[index][0] * s[index][2].exp()[..., None]) for s in (state, last))
        close(a, b)


def test_a_state_is_a_value() -> None:
    model = build()
    _, state = model(tokens(3, 12))
    kept = clone_state(state)
    one, _ = model(tokens(3, 1, seed=1), state)
    model(tokens(3, 5, seed=2), state)
    model.generate(tokens(3, 4, seed=3), 6, state=state)
    again, _ = model(tokens(3, 1, seed=1), state)
    assert _same(state, kept) and torch.equal(one, again)


def test_beams_branch_from_one_state() -> None:
    model = build()
    prompt = tokens(2, 9)
    _, state = model(prompt)
    rows = torch.tensor([1, 1, 0], device=DEVICE)
    tails = tokens(3, 4, seed=5)
    found, _ = model(tails, select_rows(state, rows))
    whole, _ = model(torch.cat([prompt[rows], tails], 1))
    close(found, whole[:, 9:])


def test_a_pool_is_stepped_in_place() -> None:
    model = build()
    prompt = tokens(2, 6)
    _, state = model(prompt[:, :5])
    pool = StatePool(state)
    addresses = [part.data_ptr() for parts in pool.state.values() for part in parts]
    logits = model.decode(prompt[:, 5], pool.state)
    wanted, after = model(prompt[:, 5:], state)
    close(logits, wanted[:, 0])
    assert addresses == [part.data_ptr() for parts in pool.state.values() for part in parts]
    for index in after:
        close(pool.state[index][0], after[index][0])
    pool.load(state)
    assert _same(pool.state, state)


def test_a_state_in_float16_is_half_of_it() -> None:
    half = build(inference_state_dtype="float16")
    full = build()
    prompt = tokens(2, 30)
    state: Any = None
    for t in range(30):
        logits, state = half(prompt[:, t : t + 1], state)
    assert state[0][0].dtype == torch.float16 and state[0][1].dtype == state[0][2].dtype == torch.float32
    wanted, _ = full(prompt)
    # each step rounds c once, by 2^-12 of it at most; forgotten by about a tenth a step, so some ten of them add up
    assert float((logits - wanted[:, -1:]).norm() / wanted[:, -1:].norm()) < 10 * 2**-12
    assert not torch.equal(logits, wanted[:, -1:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind a state"])
def test_padding_changes_nothing(side: str, behind: bool) -> None:
    model = build()
    lengths, width = (5, 19, 1), 19
    rows = [tokens(1, length, seed=length) for length in lengths]
    state = model(tokens(3, 4, seed=9))[1] if behind else None
    # a token in the padding that is no zero
    padded, mask = torch.full((3, width), 7, device=DEVICE), torch.zeros(3, width, dtype=torch.int64, device=DEVICE)
    for index, row in enumerate(rows):
        place = slice(width - row.shape[1], None) if side == "left" else slice(0, row.shape[1])
        padded[index, place], mask[index, place] = row[0], 1
    logits, after = model(padded, state, attention_mask=mask)
    last, _ = model(padded, state, attention_mask=mask.bool(), last_only=True)
    assert last.shape == (3, 1, VOCABULARY)
    for index, row in enumerate(rows):
        own = None if state is None else select_rows(state, torch.tensor([index], device=DEVICE))
        wanted, alone = model(row, own)
        close(logits[index][mask[index] == 1], wanted[0])
        close(last[index], wanted[0, -1:])
        for block in alone:
            for found, single in zip(after[block], alone[block], strict=True):
                close(found[index], single[0])


def test_last_only_is_the_last_of_all() -> None:
    model = build()
    prompt = tokens(2, 9)
    close(model(prompt, last_only=True)[0], model(prompt)[0][:, -1:])


@pytest.mark.parametrize("mode", ["single", "fused"])
@pytest.mark.parametrize("length", [9, 40], ids=["sequence", "chunks"])
def test_behind_the_last_mlstm_there_is_one_token_a_row(mode: str, length: int) -> None:
    """The states are what all tokens leave, to the last bit; the last block's other products see what is asked for."""
    model = build(weight_mode=mode)
    prompt = tokens(3, length)
    wanted, full = model(prompt)
    sizes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        def noted(_module: Any, args: tuple[Any, ...]) -> None:
            sizes[name] = tuple(args[0].shape[:2])

        return noted

    handles = [
        part.register_forward_pre_hook(note(f"{index}.{name}"))
        for index, block in enumerate(model.backbone.blocks)
        for name, part in (("out", block.mlstm_layer.out_proj), ("down", block.ffn.proj_down))
    ]
    logits, state = model(prompt, last_only=True)
    for handle in handles:
        handle.remove()
    last = len(model.backbone.blocks) - 1
    assert len(sizes) == 2 * (last + 1)
    assert all(size == ((3, 1) if name.startswith(f"{last}.") else (3, length)) for name, size in sizes.items()), sizes
    close(logits, wanted[:, -1:])
    for block in full:
        assert all(torch.equal(found, one) for found, one in zip(state[block], full[block], strict=True))


def test_training_reaches_every_weight() -> None:
    # the official package's default configuration crashes here
    torch.manual_seed(0)
    model = xLSTMLarge(config(mode="train", return_last_states=False, weight_mode="fused")).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    prompt = tokens(2, 18)

    def loss() -> Tensor:
        return F.cross_entropy(model(prompt[:, :-1]).flatten(0, 1), prompt[:, 1:].flatten())

    before = loss()
    before.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.02 * parameter.grad)
    assert float(loss().detach()) < float(before.detach())


def test_torch_compile_sees_one_graph() -> None:
    model = build(weight_mode="fused", num_blocks=1)
    prompt = tokens(2, 20)
    _, state = model(prompt)
    # what Dynamo traces; what Inductor makes of the ops is tested with each op
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(prompt[:, :1], state)[0], model(prompt[:, :1], state)[0])


@pytest.mark.parametrize("mode", ["train", "train_with_padding", "inference"])
def test_every_mode_gives_logits(mode: str) -> None:
    model = build(mode=mode, return_last_states=False)
    prompt = tokens(1, 13)
    close(model(prompt), build()(prompt)[0])


def test_initial_weights_are_the_official_ones() -> None:
    torch.manual_seed(0)
    model = xLSTMLarge(config(weight_mode="fused", embedding_dim=192, vocab_size=500))
    block = model.backbone.blocks[1]
    gates = block.mlstm_layer.ifgate_preact
    assert torch.equal(gates.bias, torch.tensor([-10.0, -10, -10, 3, 4.5, 6])) and not bool(gates.weight.any())
    assert float(block.mlstm_layer.qkv_opreact.weight.detach().std()) == pytest.approx((2 / (5 * 192)) ** 0.5, rel=0.05)
    assert float(block.ffn.proj_down.weight.detach().std()) == pytest.approx(2 / 2 / 512**0.5, rel=0.05)
    assert float(model.embedding.weight.detach().std()) == pytest.approx((2 / (5 * 192)) ** 0.5, rel=0.05)


def test_an_empty_sequence_leaves_the_state() -> None:
    model = build()
    _, state = model(tokens(2, 5))
    logits, after = model(tokens(2, 0), state)
    assert logits.shape == (2, 0, VOCABULARY) and _same(after, state)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda m: m(torch.zeros(2, 3)), r"tokens must be int64 or int32 \[B, S\], got torch.float32"),
        (lambda m: m(tokens(3)), r"tokens must be"),
        pytest.param(lambda m: m(tokens(1, 3) + VOCABULARY), f"from 0 to {VOCABULARY - 1}, got ", marks=CPU),
        pytest.param(lambda m: m(tokens(1, 3) - VOCABULARY), "got -", marks=CPU),
        (lambda m: m(tokens(1, 3).to("meta")), "tokens are on meta, the model on"),
        (lambda m: m(tokens(1, 3), {}), "a dict of the 2 blocks"),
        (lambda m: m(tokens(1, 3), m.empty_state(2)), "the state of block 0 has shapes"),
        (lambda m: m(tokens(1, 3), dict.fromkeys(range(2), 1)), "no tuple"),
        (lambda m: m(tokens(1, 3), attention_mask=torch.tensor([[1, 0, 1]])), "has a hole"),
        (lambda m: m(tokens(1, 3), attention_mask=torch.ones(1, 2)), r"must be bool or integers \[1, 3\]"),
        (lambda m: m(tokens(1, 3), attention_mask=torch.zeros(1, 3).bool(), last_only=True), "hides all"),
        (lambda m: m(tokens(1, 0), last_only=True), "last_only needs a token"),
    ],
)
def test_what_is_refused(call: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        call(build())
