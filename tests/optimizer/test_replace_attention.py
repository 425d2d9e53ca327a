"""Attention of transformers models over to ours: the same answers as written-out attention, whatever hides keys."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument, StepRefused, Unsupported
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.nn import attention as ours
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps import replace_attention as step_module
from wavecrest.optimizer.steps.attention import check_causal

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

OP = "flash_attention"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
WINDOW = 5


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, num_key_value_heads=3, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=20,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=WINDOW),
    "gpt_oss": _gpt_oss,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Everything is made there, where there is one."""
    with torch.device(DEVICE) if DEVICE != "cpu" else contextlib.nullcontext():
        yield


def made(name: str, layers: int | None = None) -> nn.Module:
    """A model on written-out attention whose scores differ enough for a wrong mask to show; all its layers, or some."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    if layers is not None:
        config.num_hidden_layers = layers
    config._attn_implementation = "eager"
    # transformers makes it on the CPU whatever the default is
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(DEVICE)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in path:
                parameter.normal_(std=0.2)
            elif path.endswith("sinks"):
                parameter.normal_(std=2.0)
    return model  # type: ignore[no-any-return]


def switched(model: nn.Module) -> nn.Module:
    return step_module.use_attention(structural_copy(model))


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator, device="cpu").to(DEVICE)


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits  # type: ignore[no-any-return]


def ops_of(calls: list[ours.Call], queries: int) -> list[str]:
    """The ops that calls with `queries` queries ran."""
    return [call.decision.op if call.decision else "PyTorch" for call in calls if call.queries == queries]


def assert_same(got: Tensor, want: Tensor, shown: Tensor | None = None) -> None:
    if shown is not None:
        got, want = got[shown.bool()], want[shown.bool()]
    assert want.std() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that dispatch chooses here, or the kernel in Triton's interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="runs the kernel")
        registry.get(OP).force("triton")
    return str(request.param)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(name: str, backend: str) -> None:
    model = made(name)
    other = switched(model)
    assert other.config._attn_implementation == "wavecrest" and model.config._attn_implementation == "eager"
    tokens = ids(2, 13)
    want = logits(model, input_ids=tokens)
    with ours.watching() as calls:
        got = logits(other, input_ids=tokens)
    assert_same(got, want)
    assert len(calls) == 2
    if backend == "triton":
        assert {one.decision.backend for one in calls if one.decision is not None} == {"triton"}
    # the case is one of its kind: without what it is about answers differ
    if name in ("qwen2", "mistral", "gemma2", "gpt_oss"):
        assert any(one.decision is not None and one.decision.key[9] >= 0 for one in calls), "no window was used"
    if name == "gpt_oss":
        assert all(one.decision is not None and one.decision.key[15] for one in calls), "no sinks were used"
    if name == "gemma2":
        assert all(one.decision is not None and one.decision.key[14] for one in calls), "no softcap was used"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches(name: str, side: str, backend: str) -> None:
    model = made(name)
    other = switched(model)
    tokens, shown = ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, count in ((1, 4), (2, 9)):
        shown[row, slice(None, count) if side == "left" else slice(-count, None)] = 0
    inputs = {"input_ids": tokens, "attention_mask": shown, "position_ids": (shown.cumsum(-1) - 1).clamp(min=0)}
    want = logits(model, **inputs)
    assert_same(logits(other, **inputs), want, shown)
    if side == "left":
        # a mask that nothing reads would go unnoticed; what comes after a token is hidden without one
        with pytest.raises(AssertionError):
            assert_same(logits(other, **{**inputs, "attention_mask": torch.ones_like(shown)}), want, shown)


CACHES = {
    "dynamic": lambda model: transformers.DynamicCache(config=model.config),
    "static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=24),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_single_tokens(name: str, cache: str, backend: str) -> None:
    """Prefill, a second piece of several tokens, then one by one: the logits of the whole sequence at once."""
    model = made(name)
    other, tokens = switched(model), ids(2, 16)
    want = logits(model, input_ids=tokens)
    past, at, got = CACHES[cache](model), 0, []
    for count in (4, 7, 1, 1, 3):
        got.append(logits(other, input_ids=tokens[:, at : at + count], past_key_values=past))
        at += count
    assert_same(torch.cat(got, 1), want)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name: str, cache: str, padded: bool) -> None:
    """Token for token."""
    model = made(name)
    other, tokens = switched(model), ids(2, 7)
    shown = torch.ones_like(tokens)
    if padded:
        tokens[1, :3], shown[1, :3] = 0, 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": shown}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        # compiled by itself on a GPU, and then calls are not seen
        options |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        want = model.generate(tokens, **options)
        with ours.watching() as calls:
            got = other.generate(tokens, **options)
    prefill, steps = [ops_of(calls, queries) for queries in (7, 1)]
    assert prefill == ["flash_attention"] * 2
    if cache == "static":
        assert steps == ["flash_decoding"] * 22
    assert got.sequences.shape == (2, 19) and torch.equal(got.sequences, want.sequences)
    assert len(set(want.sequences[0, 7:].tolist())) > 1
    assert_same(torch.stack(got.logits), torch.stack(want.logits))


def test_generate_with_the_kernel() -> None:
    pytest.importorskip("triton", reason="runs the kernel")
    for name, cache in (("llama", "static"), ("gemma2", "dynamic"), ("gpt_oss", "static")):
        model = made(name)
        other, tokens = switched(model), ids(2, 7)
        shown = torch.ones_like(tokens)
        tokens[1, :3], shown[1, :3] = 0, 0
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "attention_mask": shown}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        with torch.no_grad():
            want = model.generate(tokens, **options)
            for op in (OP, "flash_decoding"):
                registry.get(op).force("triton")
            with ours.watching() as calls:
                assert torch.equal(other.generate(tokens, **options), want)
            for op in (OP, "flash_decoding"):
                registry.get(op).force(None)
        assert {one.decision.backend for one in calls if one.decision is not None} == {"triton"}
        if cache == "static":
            assert ops_of(calls, 1) == ["flash_decoding"] * 4


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_of_a_static_cache(name: str, count: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query or several at every position, without a copy of the cache and without a look at a value."""
    if backend == "triton":
        registry.get("flash_decoding").force("triton")
    model, given = made(name), []

    def watched(call: FlashDecodingCall) -> Any:
        given.append(call)
        return decoding(call)

    decoding = ours._flash_decoding
    watched.decide = decoding.decide  # type: ignore[attr-defined]
    monkeypatch.setattr(ours, "_flash_decoding", watched)
    other, tokens = switched(model), ids(2, 10)
    want = logits(model, input_ids=tokens)
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    got = [logits(other, input_ids=tokens[:, :4], past_key_values=past)]
    for at in range(4, 10, count):
        given.clear()
        with ours.watching() as calls:
            got.append(logits(other, input_ids=tokens[:, at : at + count], past_key_values=past))
        ops = ops_of(calls, count)
        assert ops == ["flash_decoding"] * 2 and len(given) == 2
        for layer, call in zip(past.layers, given, strict=True):
            if layer.is_sliding and count > 1 and at + count > WINDOW:
                # the keys of a full window and the new ones are put together by transformers
                continue
            for cache, ours_ in zip((layer.keys, layer.values), (call.k_cache, call.v_cache), strict=True):
                assert ours_.data_ptr() == cache.data_ptr() and ours_.stride() == cache.transpose(1, 2).stride()
            assert call.seq_lens.tolist() == [min(at + count, call.k_cache.shape[1])] * 2
            assert call.seq_starts is None
    assert_same(torch.cat(got, 1), want)


def test_left_padding_is_where_keys_begin() -> None:
    tokens, shown = ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    shown[1, :3], shown[2, :8] = 0, 0
    model = made("llama")
    other = switched(model)
    past, outs = transformers.StaticCache(config=model.config, max_cache_len=24), []
    positions = (shown.cumsum(-1) - 1).clamp(min=0)
    for part in (slice(0, 7), slice(7, 8), slice(8, 9)):
        inputs = {"input_ids": tokens[:, part], "attention_mask": shown[:, : part.stop]}
        with ours.watching() as calls:
            outs.append(logits(other, **inputs, position_ids=positions[:, part], past_key_values=past))
        if part.start:
            assert ops_of(calls, 1) == ["flash_decoding"] * 2
            assert all(one.decision is not None and one.decision.key[16].endswith("starts") for one in calls)
    want = logits(model, input_ids=tokens, attention_mask=shown, position_ids=positions)
    # the logits of padding are nobody's
    seen = torch.cat(outs, 1)
    assert_same(seen, want, shown)


@pytest.mark.parametrize("cache", CACHES)
def test_padding_elsewhere_is_written_out_and_says_so(cache: str, unwarned: None) -> None:
    """A prompt that is padded at the right, and then goes on: keys are hidden between others."""
    tokens, shown = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    shown[1, 5:7] = 0
    model = made("llama")
    other = switched(model)
    past, outs = CACHES[cache](model), []
    positions = (shown.cumsum(-1) - 1).clamp(min=0)
    for part in (slice(0, 8), slice(8, 9)):
        inputs = {"input_ids": tokens[:, part], "attention_mask": shown[:, : part.stop]}
        told = pytest.warns(ours.AttentionFallback, match="written-out mask .* padding that is not at the left")
        with told if part.start else contextlib.nullcontext(), ours.watching() as calls:
            outs.append(logits(other, **inputs, position_ids=positions[:, part], past_key_values=past))
    assert ops_of(calls, 1) == ["flash_attention"] * 2
    want = logits(model, input_ids=tokens, attention_mask=shown, position_ids=positions)
    assert_same(torch.cat(outs, 1), want, shown)


def test_what_flash_decoding_does_not_take(unwarned: None) -> None:
    """Under a mask of lengths, which is then written out."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    ends, starts = (torch.tensor(one, dtype=torch.int32) for one in ([7, 4], [0, 2]))
    for window in (-1, 2):
        mask = ours.lengths_mask(ends, starts, window)
        with ours.watching() as calls:
            want, _ = ours.attend(nn.Module(), query, key, value, mask)
            added, _ = ours.attend(nn.Module(), query, key, value, mask, position_bias=torch.zeros(1, 4, 2, 9))
        assert ops_of(calls, 2) == ["flash_decoding", "flash_attention"]
        assert "written out for a bias of positions" in calls[1].reason
        torch.testing.assert_close(added, want, rtol=1e-5, atol=1e-5)
        bias = torch.randn(1, 4, 2, 9)
        biased, _ = ours.attend(nn.Module(), query, key, value, mask, position_bias=bias)
        scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5 + bias
        for b, (end, start) in enumerate(((7, 0), (4, 2))):
            for t in range(2):
                own = end - 2 + t
                seen = [j for j in range(9) if start <= j <= own and (window < 0 or j >= own - window)]
                share = scores[b, :, t, seen].softmax(-1)
                rows = torch.einsum("hj,hjd->hd", share, value[b].repeat_interleave(2, 0)[:, seen])
                torch.testing.assert_close(biased[b, t], rows, rtol=1e-5, atol=1e-5)
    with pytest.warns(ours.AttentionFallback, match="runs in PyTorch for dropout"):
        dropped, _ = ours.attend(nn.Module(), query, key, value, mask, dropout=1e-9)
    torch.testing.assert_close(dropped, want, rtol=1e-5, atol=1e-5)
    wide = [torch.randn(2, heads, 9, 300)[:, :, :size] for heads, size in ((4, 2), (2, 9), (2, 9))]
    with pytest.warns(ours.AttentionFallback, match="head_dim of 300"):
        ours.attend(nn.Module(), *wide, mask)
    for bad in ({"ends": ends.long()}, {"ends": ends[:1], "starts": starts}, {"ends": ends, "window": -2}):
        with pytest.raises(InvalidArgument, match="lengths_mask"):
            ours.lengths_mask(**bad)


def test_encoders(backend: str) -> None:
    """Nothing is hidden but padding."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.BertConfig(**size, num_attention_heads=4, max_position_embeddings=64)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager").eval().to(DEVICE)
    tokens, shown = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    assert_same(logits(switched(model), input_ids=tokens), logits(model, input_ids=tokens))
    shown[1, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": shown}
    assert_same(logits(switched(model), **inputs), logits(model, **inputs), shown)


def t5(**options: Any) -> nn.Module:
    """An encoder and a decoder with a bias of positions."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        **options,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval().to(DEVICE)
    try:
        switched(model)
    except StepRefused as error:
        # 5.17 does not switch it, 5.23 does
        if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    return model  # type: ignore[no-any-return]


def test_an_encoder_with_a_bias_of_positions(backend: str) -> None:
    """And a decoder that looks at it."""
    model = t5()
    tokens, shown = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    shown[1, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": shown, "decoder_input_ids": ids(2, 6, 1)}
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "relative_attention_bias" in path:
                parameter.normal_()
    assert_same(logits(switched(model), **inputs), logits(model, **inputs))


def test_a_decoder_with_a_bias_of_positions_generates() -> None:
    """Over a static cache: its masks of lengths are written out, and the calls say for what."""
    model = t5(eos_token_id=None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    tokens, shown = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    shown[1, 6:] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    options["disable_compile"] = True
    with torch.no_grad():
        want = model.generate(tokens, attention_mask=shown, **options)
        with ours.watching() as calls:
            got = switched(model).generate(tokens, attention_mask=shown, **options)  # type: ignore[operator]
    assert torch.equal(got, want) and len(set(want[0].tolist())) > 1
    assert sum("written out for a bias of positions" in call.reason for call in calls) == 12


def visible_pairs(given: dict[str, Any]) -> Tensor:
    """transformers' own dense mask, [B, Sq, kv_length]."""
    mask = masking.sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask[:, 0]


# queries, keys in the cache, position of the first query, of the first key, window
SHAPES = [
    (6, 6, 0, 0, None), (1, 6, 5, 0, None), (4, 9, 5, 0, None), (6, 11, 0, 0, None), (4, 11, 3, 0, None),
    (1, 11, 3, 0, None), (6, 6, 0, 0, 3), (6, 6, 0, 0, 6), (6, 6, 0, 0, 9), (1, 3, 7, 5, 3), (1, 6, 5, 0, 3),
    (4, 6, 7, 5, 3), (6, 8, 0, 0, 3), (4, 9, 5, 0, 1), (2, 5, 1, 0, 4),
]  # fmt: skip


@pytest.mark.parametrize("allowed", [True, False], ids=["skip", "no-skip"])
@pytest.mark.parametrize("offset", ["int", "tensor"])
@pytest.mark.parametrize("padding", ["none", "all", "left", "right", "longer", "shorter"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mask(shape: tuple[Any, ...], padding: str, offset: str, allowed: bool) -> None:
    """Whatever form a mask has, attention under it is attention under transformers' dense one."""
    queries, kv_length, first, kv_first, window = shape
    end = first + queries
    shown = None if padding == "none" else torch.ones(2, end + {"longer": 3, "shorter": -1}.get(padding, 0))
    if shown is not None and padding in ("left", "longer"):
        shown[1, : end - 2] = 0
    if shown is not None and padding == "right":
        shown[1, end - 1 :] = 0
    given: dict[str, Any] = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": kv_length,
        "q_offset": torch.tensor(first) if offset == "tensor" else first,
        "kv_offset": kv_first,
        "mask_function": masking.causal_mask_function,
        "attention_mask": None if shown is None else shown.bool(),
        "allow_is_causal_skip": allowed,
        "dtype": torch.float32,
        "config": CONFIGS["llama"](),
        "use_vmap": False,
        "device": DEVICE,
    }
    if window is not None:
        given |= {"local_size": window, "mask_function": masking.sliding_window_causal_mask_function(window)}
        given["config"].sliding_window = window
    mask = step_module.attention_mask(**given)
    if allowed and queries > 1:
        # written out it would be a number for each pair
        assert mask is None or mask.dtype in (ours.KEYS, ours.WINDOW)
        assert mask is None or mask.untyped_storage().nbytes() <= 2 * 2 * kv_length
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 2, kv_length, 8), torch.randn(2, 2, kv_length, 8)
    visible = visible_pairs(given)
    assert allowed or mask is not None
    if mask is not None and mask.dtype == torch.float32:
        assert torch.equal((mask == 0).expand(2, 1, queries, kv_length)[:, 0], visible)
    used = min(kv_length, first + queries - kv_first)
    # what is behind the last query must not be read: a static cache may hold anything there
    key[:, :, used:], value[:, :, used:] = 1e4, 1e4
    got, weights = ours.attend(nn.Module(), query, key, value, mask, scaling=0.5)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.5
    shares = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    want = (shares @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert weights is None and got.is_contiguous()
    sees = visible.any(-1)
    torch.testing.assert_close(got[sees], want[sees], rtol=1e-5, atol=1e-5)


def test_values_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """While compiling or capturing: padding may be anything, and a position in a tensor is not known."""

    class Unread(Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("a value was looked at")

        __int__ = __bool__  # type: ignore[assignment]

    given: dict[str, Any] = {"batch_size": 2, "q_length": 4, "kv_length": 11, "dtype": torch.float32, "device": DEVICE}
    given |= {"attention_mask": torch.ones(2, 7, dtype=torch.bool).as_subclass(Unread), "q_offset": 3}
    monkeypatch.setattr(step_module, "_is_tracing", lambda _tensor: True)
    mask = step_module.attention_mask(**given)
    assert mask is not None and mask.dtype == ours.KEYS and mask.shape == (2, 1, 7, 7)
    written = step_module.attention_mask(**given | {"q_offset": torch.tensor(3).as_subclass(Unread)})
    assert written is not None and torch.equal(written[:, 0] == 0, visible_pairs(given))
    row = given | {"mask_function": masking.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    encoder = step_module.attention_mask(**row | {"kv_length": 7})
    assert encoder is not None and encoder.shape == (2, 1, 1, 7)


def test_other_masks_are_written_out() -> None:
    """Chunks, packed sequences and overlays are no window: what looks like one is not taken for one."""
    config = CONFIGS["llama"]()
    config.attention_chunk_size = config.sliding_window = 3
    given: dict[str, Any] = {
        "batch_size": 1, "q_length": 8, "kv_length": 8, "config": config, "local_size": 3, "dtype": torch.float32,
        "device": DEVICE, "mask_function": masking.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long)),
    }  # fmt: skip
    chunked = step_module.attention_mask(**given)
    assert chunked is not None and torch.equal(chunked[:, 0] == 0, visible_pairs(given))
    model = made("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    inputs = {"input_ids": ids(1, 10), "position_ids": positions, "use_cache": False}
    got = logits(switched(model), **inputs)
    assert_same(got, logits(model, **inputs))
    # each sequence by itself
    assert_same(got[:, 4:], logits(model, input_ids=inputs["input_ids"][:, 4:]))


def test_masks_by_positions_are_written_out_and_say_so(monkeypatch: pytest.MonkeyPatch, unwarned: None) -> None:
    """As transformers before 5.4 asks for them; its own function may say that none is needed."""
    visible = torch.tensor([[[[True, False], [True, True]]]])
    given = {"cache_position": torch.arange(2), "kv_length": 2, "dtype": torch.float64, "allow_is_causal_skip": True}
    answers: list[Tensor | None] = [None, visible]

    def older(**asked: Any) -> Tensor | None:
        assert asked == given
        return answers.pop(0)

    monkeypatch.setattr(masking, "sdpa_mask", older)
    assert step_module.attention_mask(**given) is None
    with pytest.warns(ours.AttentionFallback, match=r"masks of transformers .*, in a short form from 5\.4 on"):
        mask = step_module.attention_mask(**given)
    assert mask is not None and mask.dtype == torch.float64 and torch.equal(mask == 0, visible)


@pytest.mark.parametrize("window", [None, 4])
def test_overlays_of_a_step_are_written_out(window: int | None) -> None:
    """A static cache may not skip its mask either: that alone does not say that keys are hidden by nothing else."""
    config = CONFIGS["llama"]()
    config._attn_implementation, config.sliding_window = "wavecrest", window
    step_module.register_attention()
    past = transformers.StaticCache(config=config, max_cache_len=9)
    for layer in past.layers:
        layer.lazy_initialization(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8))
        if window is not None:
            layer.cumulative_length_int = 3
        layer.cumulative_length.fill_(3)
    make = masking.create_causal_mask if window is None else masking.create_sliding_window_causal_mask
    given: dict[str, Any] = {"inputs_embeds": torch.empty(2, 1, 0), "attention_mask": None, "past_key_values": past}
    assert ours.is_lengths(make(config, **given))
    blocks = torch.full((2, 9), -1)
    for extra in (
        {"and_mask_function": lambda b, h, q, k: k != 1},
        {"or_mask_function": lambda b, h, q, k: k == q + 1},
        {"block_sequence_ids": blocks},
    ):
        mask = make(config, **given, **extra)
        assert mask.dtype == torch.float32
        config._attn_implementation = "eager"
        want = make(config, **given, **extra) == 0
        config._attn_implementation = "wavecrest"
        assert torch.equal(mask == 0, want)


def test_a_users_own_mask_is_taken_as_it_is() -> None:
    """Also one row for all queries, which is no compact mask: it is not causal."""
    model = made("llama")
    other, tokens = switched(model), ids(2, 6)
    whole = torch.tril(torch.ones(6, 6, dtype=torch.bool)).expand(2, 1, 6, 6).clone()
    whole[1, :, :, 0] = False
    whole[1, :, 0, 0] = True
    added = torch.zeros(2, 1, 6, 6).masked_fill(~whole, torch.finfo(torch.float32).min)
    want = logits(model, input_ids=tokens, attention_mask=added)
    assert_same(logits(other, input_ids=tokens, attention_mask=added), want)
    assert_same(logits(other, input_ids=tokens, attention_mask=whole), want)
    row = added[:, :, -1:]
    assert_same(
        logits(other, input_ids=tokens, attention_mask=row), logits(model, input_ids=tokens, attention_mask=row)
    )


def test_a_model_that_works_on_its_mask_gets_an_error() -> None:
    """A compact mask is not an additive one, and must not pass for one."""
    flags = torch.ones(2, 6, dtype=torch.bool)
    lengths = ours.lengths_mask(torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for mask in (ours.compact_mask(flags, 3, 6, DEVICE), ours.compact_mask(None, 3, 6, DEVICE), lengths):
        for work in (
            lambda m: m + torch.zeros(2, 1, 3, 6),
            lambda m: 1.0 - m,
            lambda m: m < 0,
            lambda m: torch.where(m, 0.0, -1.0),
            lambda m: nn.functional.scaled_dot_product_attention(*[torch.zeros(2, 1, 6, 4)] * 3, attn_mask=m),
        ):
            with pytest.raises((RuntimeError, NotImplementedError)):
                work(mask)
    for hidden, window, keys in ((None, 0, 6), (None, 7, 6), (torch.ones(2, 5, dtype=torch.bool), 3, 6)):
        with pytest.raises(InvalidArgument, match="compact_mask"):
            ours.compact_mask(hidden, window, keys, DEVICE)


# gradients, dropout, and what is declined


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradients(name: str) -> None:
    model = made(name)
    other, tokens = switched(model), ids(2, 9)
    grads = []
    for one in (model, other):
        one.zero_grad()
        with ours.watching() as calls:
            one(input_ids=tokens).logits.square().sum().backward()
        # parameters are shared
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert calls
    # PyTorch where it has the call, else the definition, and the kernel says why not
    for call in calls:
        assert call.decision is not None and call.decision.backend in ("torch", "reference")
        assert "no backward" in {two.backend: two.reason for two in call.decision.refused}["triton"]
    for got, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-4 * float(want.abs().max()) + 1e-7)


def _call(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are told once in a process."""
    monkeypatch.setattr(ours, "_warned", set())


def test_dropout_runs_in_pytorch_and_says_so(unwarned: None) -> None:
    query, key, value = _call()
    module = nn.Module()
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, :2] = True
    for mask in (None, ours.compact_mask(None, 3, 6, DEVICE), ours.compact_mask(hidden, 6, 6, DEVICE)):
        ours._warned.clear()
        with pytest.warns(ours.AttentionFallback, match="dropout without the seed that flash_attention needs"):
            # of nothing: 1e-9 of the weights, so that values can be compared
            got, _ = ours.attend(module, query, key, value, mask, dropout=1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours.attend(module, query, key, value, mask, dropout=1e-9)
            want, _ = ours.attend(module, query, key, value, mask)
        sees = torch.ones(2, 6, dtype=torch.bool)
        sees[1, :2] = mask is None or mask.dtype != ours.KEYS
        torch.testing.assert_close(got[sees], want[sees], rtol=1e-5, atol=1e-5)
    ours._warned.add(ours.NO_SEED)
    halved, _ = ours.attend(module, query, key, value, None, dropout=0.5)
    assert not torch.allclose(halved, ours.attend(module, query, key, value)[0])


def test_what_the_op_does_not_take(unwarned: None) -> None:
    query, key, value = torch.randn(1, 2, 5, 300), torch.randn(1, 2, 5, 300), torch.randn(1, 2, 5, 8)
    with pytest.warns(ours.AttentionFallback, match="head_dim of 300"), ours.watching() as calls:
        got, _ = ours.attend(nn.Module(), query, key, value)
    assert calls[0].decision is None and "head_dim of 300" in calls[0].reason
    want = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(got, want)
    with pytest.raises(Unsupported, match="softcap or sinks and a head_dim of 300"):
        ours.attend(nn.Module(), query, key, value, softcap=3.0)
    with pytest.raises(Unsupported, match="dropout"):
        ours.attend(nn.Module(), *_call(), s_aux=torch.zeros(4), dropout=0.1)
    with pytest.raises(Unsupported, match="continuous batching"):
        ours.attend(nn.Module(), *_call(), cache=object())
    # upper left, as PyTorch has it: more queries than keys
    query, key, value = _call()
    with pytest.warns(ours.AttentionFallback, match="upper left"):
        got, _ = ours.attend(nn.Module(), query, key[:, :, :4], value[:, :, :4])
    parts = query, key[:, :, :4], value[:, :, :4]
    want = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2))


def test_the_module_and_the_call_say_whether_it_is_causal() -> None:
    query, key, value = _call()
    module = nn.Module()
    causal, _ = ours.attend(module, query, key, value)
    free, _ = ours.attend(module, query, key, value, is_causal=False)
    assert not torch.allclose(causal, free)
    module.is_causal = False  # type: ignore[assignment]
    torch.testing.assert_close(ours.attend(module, query, key, value)[0], free)
    torch.testing.assert_close(ours.attend(module, query, key, value, is_causal=True)[0], causal)


# torch.compile


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compile_fullgraph(name: str) -> None:
    torch._dynamo.reset()
    # gemma2's layers are of two kinds, which take turns
    model = made(name, 2 if name == "gemma2" else 1)
    other = switched(model)
    tokens, shown = ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    shown[1, :4] = 0
    inputs = {"input_ids": tokens, "attention_mask": shown, "position_ids": (shown.cumsum(-1) - 1).clamp(min=0)}
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    assert_same(logits(compiled, **inputs, use_cache=False), logits(model, **inputs), shown)
    # one token on a static cache, as generate() compiles it
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    whole = logits(model, input_ids=tokens)
    logits(other, input_ids=tokens[:, :10], past_key_values=past)
    assert_same(logits(compiled, input_ids=tokens[:, 10:], past_key_values=past), whole[:, 10:])
    # and several, whose position no graph can know
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    pieces = [logits(compiled, input_ids=tokens[:, part], past_key_values=past) for part in (slice(6), slice(6, None))]
    assert_same(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize(("name", "backend"), [("llama", "inductor"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_a_compiled_step_is_one_graph_at_every_position(name: str, backend: str) -> None:
    """The mask made inside, from the position that the cache has on the device."""
    # where layers are of one kind one is enough
    tokens, graphs, model = ids(2, 12), {"stock": 1}, made(name, 1 if name == "llama" else 2)
    want = logits(model, input_ids=tokens)
    # sliding layers count positions in Python, and have other code before and after they are full
    kinds = {"ours": switched(model)} if name == "llama" else {"stock": model, "ours": switched(model)}
    for kind, one in kinds.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        past = transformers.StaticCache(config=model.config, max_cache_len=24)
        logits(one, input_ids=tokens[:, :3], past_key_values=past)
        step, got = torch.compile(one, fullgraph=True, backend=backend if kind == "ours" else "eager"), []
        for at in range(3, 12):
            got.append(logits(step, input_ids=tokens[:, at : at + 1], past_key_values=past))
        graphs[kind] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        traced = {decision.op for decision, calls in registry.coverage() if calls == 0}
        assert_same(torch.cat(got, 1), want[:, 3:])
    assert "flash_decoding" in traced
    assert graphs["ours"] == graphs["stock"]


@pytest.mark.parametrize(("name", "backend"), [("llama", "aot_eager"), ("gpt_oss", "eager")])
def test_a_compiled_step_of_a_padded_batch(name: str, backend: str) -> None:
    """The mask made before the compiled call, as generate() does it."""
    model = made(name, 1 if name == "llama" else 2)
    other, tokens = switched(model), ids(2, 14)
    shown = torch.ones_like(tokens)
    shown[1, :3] = 0
    positions = (shown.cumsum(-1) - 1).clamp(min=0)
    want = logits(model, input_ids=tokens, attention_mask=shown, position_ids=positions)
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    # a window is full, and what padding it had has left it
    got = [logits(other, input_ids=tokens[:, :9], attention_mask=shown[:, :9], position_ids=positions[:, :9],
                  past_key_values=past)]  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(other, fullgraph=True, backend=backend)
    for at in range(9, 14):
        mask = masking.create_masks_for_generate(
            config=other.config, inputs_embeds=torch.empty(2, 1, 0, device=DEVICE), attention_mask=shown[:, : at + 1],
            past_key_values=past,
        )  # fmt: skip
        masks = mask if isinstance(mask, dict) else {"": mask}
        assert all(ours.is_lengths(one) for one in masks.values())
        now = slice(at, at + 1)
        got.append(logits(step, input_ids=tokens[:, now], attention_mask=mask, position_ids=positions[:, now],
                          past_key_values=past))  # fmt: skip
    assert_same(torch.cat(got, 1), want, shown)
    if name == "llama":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lengths_of_any_size_are_in_a_mask_that_is_made_while_compiling() -> None:
    """All four bytes of them, which a graph cannot view as one number."""
    torch._dynamo.reset()
    ends, starts = (
        torch.tensor(one, dtype=torch.int32) for one in ([3, 300, 70_000, (1 << 24) + 5], [0, 256, 1, 65_536])
    )

    def there_and_back(ends: Tensor, starts: Tensor) -> Any:
        return ours._lengths(ours.lengths_mask(ends, starts, 7))

    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(ends, starts)
    assert got[0].tolist() == ends.tolist() and got[1].tolist() == starts.tolist() and got[2] == 7


def test_a_padded_batch_whose_mask_is_made_while_compiling(unwarned: None) -> None:
    """Its padding cannot be looked at, and may be anywhere."""
    torch._dynamo.reset()
    model = made("llama")
    other, tokens = switched(model), ids(2, 10)
    shown = torch.ones_like(tokens)
    shown[1, 2:4] = 0
    positions = (shown.cumsum(-1) - 1).clamp(min=0)
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    step, got = torch.compile(other, fullgraph=True, backend="eager"), []
    for part in (slice(0, 8), slice(8, 9), slice(9, 10)):
        one = step if part.start else other
        told = pytest.warns(ours.AttentionFallback, match="not known while compiling") if part.start == 8 else None
        with told or contextlib.nullcontext():
            got.append(logits(one, input_ids=tokens[:, part], attention_mask=shown[:, : part.stop],
                              position_ids=positions[:, part], past_key_values=past))  # fmt: skip
    want = logits(model, input_ids=tokens, attention_mask=shown, position_ids=positions)
    assert_same(torch.cat(got, 1), want, shown)


def test_a_compact_mask_compiles() -> None:
    """By Inductor: what marks a mask is a type that it has to write code for."""
    torch._dynamo.reset()
    query, key, value = _call()
    hidden = torch.rand(2, 6) < 0.4
    hidden[:, 0] = False

    def call(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        return ours.attend(nn.Module(), query, key, value, ours.compact_mask(hidden, 3, 6, DEVICE))[0]

    with torch.no_grad():
        want = call(query, key, value, hidden)
        got = torch.compile(call, fullgraph=True)(query, key, value, hidden)
    sees = (~hidden).unfold(1, 3, 1).any(-1)
    torch.testing.assert_close(got[:, 2:][sees], want[:, 2:][sees], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(want[:, 2:], call(query, key, value, torch.zeros_like(hidden))[:, 2:])


# the step


def context(workload: Workload) -> StepContext:
    return StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))


def test_the_step_where_pytorch_is_the_choice() -> None:
    found = step_by_id("replace_attention").find(context(from_example(made("llama"), {"input_ids": ids(2, 9)})))
    assert not found.sites and found.note.startswith("dispatch chooses no other kernel than PyTorch's: 2 × ")
    assert "9 queries, 9 keys flash_attention torch" in found.note


def test_the_step_replaces_what_dispatch_gives_to_a_kernel() -> None:
    pytest.importorskip("triton", reason="runs the kernel")
    shown = torch.ones(2, 9, dtype=torch.long)
    shown[1, :3] = 0
    workload = from_example(made("mistral"), {"input_ids": ids(2, 9)})
    registry.get(OP).force("triton")
    step = step_by_id("replace_attention")
    found = step.find(context(workload))
    assert found.sites == ("",) and found.params["owners"] == [""]
    assert [row["backend"] for row in found.params["routes"]] == ["triton"] * 2 and "9 queries" in found.note
    assert found.params["routes"][0]["config"]["BLOCK_M"] >= 16
    made_by_it = build(workload.model, AppliedSteps().plus(step, found.params))
    gate = Gate.prepare(workload)
    assert not failures(gate.check(made_by_it)) and "one at a time" in gate.summary.not_run["concurrent"]
    check_causal(workload.model, made_by_it, list(workload.buckets.values()))
    # the original is as it was, and so is a model that is taken back
    assert workload.model.config._attn_implementation == "eager"
    made_by_it.set_attn_implementation("eager")  # type: ignore[operator]
    inputs = workload.buckets[next(iter(workload.buckets))].kwargs
    assert torch.equal(logits(made_by_it, **inputs), logits(workload.model, **inputs))


def test_the_step_takes_decoding_to_a_kernel() -> None:
    pytest.importorskip("triton", reason="runs the kernel")
    model, tokens = made("llama"), ids(2, 9)
    past = transformers.StaticCache(config=model.config, max_cache_len=24)
    logits(model, input_ids=tokens[:, :8], past_key_values=past)

    def rewind(_bucket: str) -> None:
        for layer in past.layers:
            layer.cumulative_length.fill_(8)

    inputs = Inputs((), {"input_ids": tokens[:, 8:], "past_key_values": past})
    workload = Workload(model, {"step": inputs}, name="step", reset=rewind)
    step = step_by_id("replace_attention")
    if DEVICE == "cpu":
        # the kernel is the choice where there is a GPU
        found = step.find(context(workload))
        assert not found.sites and "1 queries, 24 keys flash_decoding torch" in found.note
    registry.get("flash_decoding").force("triton")
    found = step.find(context(workload))
    assert found.sites == ("",)
    assert [(row["op"], row["backend"]) for row in found.params["routes"]] == [("flash_decoding", "triton")] * 2
    rewind("step")
    gate = Gate.prepare(workload)
    made_by_it = build(workload.model, AppliedSteps().plus(step, found.params))
    assert not failures(gate.check(made_by_it))


def test_the_gate_sees_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = from_example(made("mistral"), {"input_ids": ids(2, 9)})
    params = {"owners": [""]}
    # before the gate is prepared, which holds all of the optimizer to what it was then
    monkeypatch.setattr(step_module, "_compact", lambda _given: None)
    gate = Gate.prepare(workload)
    wrong = build(workload.model, AppliedSteps().plus(step_by_id("replace_attention"), params))
    assert failures(gate.check(wrong))


def test_the_step_takes_the_place_of_the_others() -> None:
    step = step_by_id("replace_attention")
    applied = AppliedSteps().plus(step_by_id("attention:sdpa"), {"owners": [""], "implementation": "sdpa"})
    assert [one.step_id for one in applied.plus(step, {"owners": [""]}).steps] == ["replace_attention"]


def test_what_it_refuses() -> None:
    step = step_by_id("replace_attention")
    found = step.find(context(from_example(nn.Linear(2, 2).to(DEVICE), torch.ones(1, 2))))
    assert not found.sites and "no attention interface" in found.note
    with pytest.raises(StepRefused, match="no attention interface"):
        step_module.use_attention(nn.Linear(2, 2))
    model = made("llama")
    type(model)._can_set_attn_implementation_cached_value = False
    try:
        with pytest.raises(StepRefused, match="LlamaForCausalLM does not call attention"):
            step.find(context(from_example(model, {"input_ids": ids(2, 9)})))
    finally:
        del type(model)._can_set_attn_implementation_cached_value


def test_every_combination_is_one_of_its_kind() -> None:
    """The shapes that masks are tested with: plain, windows, chunks, static caches, single queries."""
    assert {(q == k, q == 1, w is None, a + q - b < k) for q, k, a, b, w in SHAPES} >= set(
        itertools.chain([(True, False, True, False), (False, True, True, True), (False, False, False, True)])
    )
