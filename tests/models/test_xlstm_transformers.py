"""transformers' xLSTM: ours computes what it does, and it computes the same on ours."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import xLSTMConfig, xLSTMForCausalLM
from transformers.models.xlstm.modeling_xlstm import xLSTMCache, xLSTMPreTrainedModel

from tests.models.xlstm_harness import DEVICE, close, native, randomize, tokens
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.integrations.transformers import patch_transformers_xlstm
from wavecrest.models.xlstm import convert_single_weights_to_fused_weights, xLSTMLarge, xLSTMLargeConfig
from wavecrest.models.xlstm import transformers as xlstm
from wavecrest.models.xlstm.weights import EMBEDDING, HUGGING_FACE_EMBEDDING

Loss = Callable[[Any, Tensor], Tensor]


def _ours(theirs: Any, weight_mode: str = "fused") -> xLSTMLarge:
    """Ours with transformers' weights."""
    config = xLSTMLargeConfig.from_dict(theirs.config.to_diff_dict())
    weights = {
        EMBEDDING if name == HUGGING_FACE_EMBEDDING else name: value for name, value in theirs.state_dict().items()
    }
    if weight_mode == "fused":
        weights, config.weight_mode = convert_single_weights_to_fused_weights(weights), "fused"
    if theirs.config.use_bias:
        # which transformers' last norm does not have
        weights["backbone.out_norm.bias"] = torch.zeros(config.embedding_dim)
    model = xLSTMLarge(config, device=DEVICE, dtype=theirs.dtype)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "changes", [{}, {"use_bias": True, "norm_eps": 1e-3}, {"gate_soft_cap": 3.0, "num_heads": 4}], ids=str
)
@pytest.mark.parametrize("weight_mode", ["single", "fused"])
def test_logits_and_states_are_those_of_transformers(changes: dict[str, Any], weight_mode: str) -> None:
    theirs = native(**changes)
    ours = _ours(theirs, weight_mode)
    # a chunk of 64 and a rest, which runs as steps there
    prompt = tokens(2, 77)
    wanted = theirs(prompt)
    found, state = ours(prompt)
    close(found, wanted.logits)
    for index, (c, n, m) in wanted.cache_params.rnn_state.items():
        # m is another where the way was another
        close(state[index][0] * state[index][2].exp()[..., None], c * m.exp()[..., None])
        close(state[index][1] * state[index][2].exp(), n * m.exp())


def test_greedy_generation_is_that_of_transformers() -> None:
    theirs = native()
    prompt = tokens(2, 10)
    wanted = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[:, 10:]
    assert torch.equal(_ours(theirs).generate(prompt, 12, insert_bos=False).tokens, wanted.cpu())


@pytest.mark.skipif(
    importlib.util.find_spec("xlstm") is not None,
    reason="transformers runs the package xlstm where it is installed, whose native kernel fails with bfloat16",
)
def test_bfloat16_is_no_further_off_than_transformers() -> None:
    errors = []
    for seed in range(4):
        theirs = native(seed).bfloat16()
        exact = copy.deepcopy(theirs).float()
        prompt = tokens(2, 40, seed=seed)
        wanted = exact(prompt, use_cache=False).logits
        found = (_ours(theirs)(prompt)[0], patch_transformers_xlstm(copy.deepcopy(theirs))(prompt).logits)
        errors.append([float((one - wanted).norm()) for one in (theirs(prompt, use_cache=False).logits, *found)])
    native_error, ours, patched = (sum(column) for column in zip(*errors, strict=True))
    assert 0 < ours <= native_error and 0 < patched <= native_error, (ours, patched, native_error)


def _patched(theirs: Any, **settings: Any) -> Any:
    return patch_transformers_xlstm(copy.deepcopy(theirs), **settings)


@pytest.mark.parametrize("changes", [{}, {"use_bias": True}, {"weight_mode": "fused"}], ids=str)
def test_patched_is_unpatched(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "weight_mode" in changes:
        # transformers 5.23 fails to initialise fused weights
        monkeypatch.setattr(xLSTMPreTrainedModel, "_init_weights", lambda *_: None)
    theirs = native(**changes)
    patched = _patched(theirs)
    assert patched.state_dict().keys() == theirs.state_dict().keys()
    prompt = tokens(2, 77)
    wanted, found = theirs(prompt), patched(prompt)
    close(found.logits, wanted.logits)
    close(patched(prompt, use_cache=False).logits, wanted.logits)
    # on from the cache: a token, and several
    for tail in (tokens(2, 1, seed=3), tokens(2, 20, seed=4)):
        wanted = theirs(tail, cache_params=wanted.cache_params)
        found = patched(tail, cache_params=found.cache_params)
        close(found.logits, wanted.logits)
        assert int(found.cache_params.seqlen_offset) == int(wanted.cache_params.seqlen_offset)
    text = theirs.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(patched.generate(prompt, max_new_tokens=6, do_sample=False), text)


def test_parameters_are_shared() -> None:
    theirs = native()
    before = dict(theirs.named_parameters())
    assert patch_transformers_xlstm(theirs) is theirs
    after = dict(theirs.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def test_a_prompt_is_one_call_an_op() -> None:
    patched = _patched(native())
    registry.forget()
    patched(tokens(1, 63))
    calls = {decision.op: count for decision, count in registry.coverage() if decision.op.startswith("mlstm")}
    assert calls == {"mlstm_chunkwise": 2}


@pytest.mark.parametrize("half", [False, True])
def test_the_cache_is_float32_in_a_bfloat16_model(half: bool) -> None:
    patched = _patched(native().bfloat16(), **({"inference_state_dtype": "float16"} if half else {}))
    cache = patched(tokens(2, 9)).cache_params
    made = xLSTMCache(patched.config, 2, dtype=torch.bfloat16, device=DEVICE)
    patched(tokens(2, 9), cache_params=made)
    for one in (cache, made):
        c, n, m = one.rnn_state[1]
        assert c.dtype == (torch.float16 if half else torch.float32) and n.dtype == m.dtype == torch.float32
        assert bool(c.any())


def test_a_used_cache_of_bfloat16_is_taken_over() -> None:
    theirs = native()
    cache = theirs(tokens(2, 9)).cache_params
    cache.rnn_state = {layer: tuple(part.bfloat16() for part in parts) for layer, parts in cache.rnn_state.items()}
    wide = copy.deepcopy(cache)
    wide.rnn_state = {layer: tuple(part.float() for part in parts) for layer, parts in wide.rnn_state.items()}
    wanted = theirs(tokens(2, 1, seed=3), cache_params=wide).logits
    close(_patched(theirs)(tokens(2, 1, seed=3), cache_params=cache).logits, wanted)
    assert cache.rnn_state[0][2].dtype == torch.float32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [16384, 8], ids=["whole", "in parts"])
def test_masks_are_respected(side: str, chunk: int) -> None:
    theirs = native(max_inference_chunksize=chunk)
    patched = _patched(theirs)
    lengths, width = (5, 21, 12), 21
    rows = [tokens(1, length, seed=length) for length in lengths]
    padded, mask = torch.full((3, width), 3, device=DEVICE), torch.zeros(3, width, dtype=torch.int64, device=DEVICE)
    for index, row in enumerate(rows):
        place = slice(width - row.shape[1], None) if side == "left" else slice(0, row.shape[1])
        padded[index, place], mask[index, place] = row[0], 1
    found = patched(padded, attention_mask=mask)
    tail = tokens(3, 1, seed=40)
    longer = torch.cat([mask, mask.new_ones(3, 1)], 1)
    more = patched(tail, attention_mask=longer, cache_params=found.cache_params)
    for index, row in enumerate(rows):
        wanted = theirs(row)
        close(found.logits[index][mask[index] == 1], wanted.logits[0])
        close(more.logits[index], theirs(tail[index : index + 1], cache_params=wanted.cache_params).logits[0])
    if side == "left":
        text = patched.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for index, row in enumerate(rows):
            wanted = theirs.generate(row, max_new_tokens=5, do_sample=False)[0, row.shape[1] :]
            assert torch.equal(text[index, width:], wanted)


def test_a_mask_is_not_kept_for_the_next_call() -> None:
    patched = _patched(native())
    prompt, mask = tokens(1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]], device=DEVICE)
    wanted = patched(prompt).logits
    assert not torch.allclose(patched(prompt, attention_mask=mask).logits[:, -1], wanted[:, -1])
    assert torch.equal(patched(prompt).logits, wanted)
    with pytest.raises(InvalidArgument, match="has a hole"):
        patched(prompt, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1]], device=DEVICE))
    handle = patched.backbone.blocks[1].ffn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patched(prompt, attention_mask=mask)
    handle.remove()
    assert torch.equal(patched(prompt).logits, wanted)


def test_a_block_called_by_itself_knows_no_mask() -> None:
    patched = _patched(native())
    x = patched.backbone.embeddings(tokens(1, 6))
    wanted, _ = patched.backbone.blocks[0](x)
    patched(tokens(1, 6), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]], device=DEVICE))
    assert torch.equal(patched.backbone.blocks[0](x)[0], wanted)


def test_either_name_of_the_cache_and_none_of_both() -> None:
    theirs = native()
    patched = _patched(theirs).backbone
    (before,) = [hook for hook in patched._forward_pre_hooks.values() if isinstance(hook, xlstm._Before)]
    wanted = None
    # an older version of transformers takes one of them
    for name in before.caches:
        cache = patched(tokens(2, 9)).cache_params
        given = {"cache": None, "cache_params": None, name: cache}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Both")
            found = patched(tokens(2, 1, seed=3), **given)[0]
        assert int(cache.seqlen_offset) == 10
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted)


def test_a_name_that_an_older_version_passes_over_is_refused() -> None:
    patched = _patched(native()).backbone
    (before,) = [hook for hook in patched._forward_pre_hooks.values() if isinstance(hook, xlstm._Before)]
    older = xlstm._Before(before.config, before.call, ("input_ids", "inputs_embeds", "cache_params", "use_cache"))
    cache = patched(tokens(2, 9)).cache_params
    with pytest.raises(InvalidArgument, match="takes cache_params=, and would pass over cache="):
        older(patched, (tokens(2, 1),), {"cache": cache})
    assert list(older(patched, (tokens(2, 1),), {"cache": None, "use_cache": True})[1])[-1] == "cache_params"


def test_a_replaced_forward_of_a_model() -> None:
    patched = _patched(native())
    wanted = patched(tokens(2, 9)).logits
    run = patched.backbone.forward
    patched.backbone.forward = lambda *a, **k: run(*a, **k)
    assert torch.equal(patched(tokens(2, 9), use_cache=True).logits, wanted)


def test_a_step_with_gradients() -> None:
    theirs = native().requires_grad_(True)
    patched = _patched(theirs)
    prompt = tokens(2, 9)
    with torch.no_grad():
        caches = [model(prompt).cache_params for model in (theirs, patched)]
    found = [
        model(tokens(2, 1, seed=3), cache_params=cache).logits
        for model, cache in zip((theirs, patched), caches, strict=True)
    ]
    close(found[1].detach(), found[0].detach())


def test_sizes_that_transformers_cannot_cache() -> None:
    """Its cache rounds up to multiples of 64, its layers do not."""
    theirs = xLSTMForCausalLM(
        xLSTMConfig(hidden_size=48, embedding_dim=48, num_hidden_layers=1, num_blocks=1, num_heads=2, vocab_size=61)
    )
    randomize(theirs)
    theirs = theirs.to(DEVICE).eval().requires_grad_(False)
    prompt = tokens(2, 12)
    wanted = theirs(prompt, use_cache=False).logits
    patched = patch_transformers_xlstm(theirs)
    close(patched(prompt).logits, wanted)
    cache = xLSTMCache(patched.config, 2, dtype=torch.float32, device=DEVICE)
    patched(prompt[:, :11], cache_params=cache)
    close(patched(prompt[:, 11:], cache_params=cache).logits[:, 0], wanted[:, -1])


def _in_segments(model: Any, prompt: Tensor) -> Tensor:
    """The loss of two parts, the second behind the first's cache."""
    first = model(prompt[:, :40], labels=prompt[:, :40])
    return first.loss + model(prompt[:, 40:], labels=prompt[:, 40:], cache_params=first.cache_params).loss


def _whole(model: Any, prompt: Tensor) -> Tensor:
    return model(prompt, labels=prompt).loss


def _whole_without_cache(model: Any, prompt: Tensor) -> Tensor:
    return model(prompt, labels=prompt, use_cache=False).loss


# with its cache transformers itself fails from 64 tokens on
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [(_whole_without_cache, _whole_without_cache), (_whole, _whole_without_cache), (_in_segments, _in_segments)],
    ids=["no cache", "default", "segments"],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_training_gives_the_same_gradients(loss: Loss, wanted: Loss, training: bool) -> None:
    theirs = native().requires_grad_(True).train(training)
    patched = _patched(theirs)
    wanted(theirs, tokens(2, 66)).backward()
    loss(patched, tokens(2, 66)).backward()
    for (name, a), (_, b) in zip(theirs.named_parameters(), patched.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        # the backward doubles the rounding of the forward
        assert float((a.grad - b.grad).norm()) <= 1e-4 * float(a.grad.norm()), name


def test_tokens_of_transformers_may_be_outside_of_the_vocabulary() -> None:
    theirs = native(bos_token_id=500, pad_token_id=500)
    close(_patched(theirs)(tokens(1, 9)).logits, theirs(tokens(1, 9)).logits)


def test_gradient_checkpointing_and_padding_are_refused() -> None:
    patched = _patched(native()).train()
    prompt = tokens(2, 9)
    patched.gradient_checkpointing_enable()
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0
    with pytest.raises(Unsupported, match="gradient checkpointing"):
        patched(prompt, attention_mask=mask)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="takes transformers' xLSTMModel or xLSTMForCausalLM, not Linear"):
        patch_transformers_xlstm(nn.Linear(2, 2))
    patched = _patched(native())
    with pytest.raises(InvalidArgument, match="patched already"):
        patch_transformers_xlstm(patched)
    with pytest.raises(InvalidArgument, match="has no colour"):
        _patched(native(), colour="red")
    with pytest.raises(InvalidArgument, match=r"attention_mask must be \[B, S\]"):
        patched(tokens(1, 5), attention_mask=torch.ones(1, 3, device=DEVICE))
    broken = native()
    broken.backbone.blocks[1].ffn.proj_up = nn.Linear(128, 7, bias=False)
    before = [type(part) for part in broken.modules()]
    with pytest.raises(InvalidArgument, match="of other shapes"):
        patch_transformers_xlstm(broken)
    assert [type(part) for part in broken.modules()] == before


def test_the_backbone_alone() -> None:
    theirs = native().backbone
    wanted: Tensor = theirs(tokens(1, 9)).last_hidden_state
    patched = patch_transformers_xlstm(copy.deepcopy(theirs))
    close(patched(tokens(1, 9)).last_hidden_state, wanted)
    embedded = theirs.embeddings(tokens(1, 9))
    close(patched(inputs_embeds=embedded).last_hidden_state, wanted)
    close(patched(None, embedded, None, False).last_hidden_state, wanted)
