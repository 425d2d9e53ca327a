"""Models that write text: prompts (prefill) and steps of decoding with a static key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.zoo.registry import Site, Size, model
from torch import Tensor, nn

from wavecrest.measure.workload import Inputs, Workload

HALF, BRAIN = "float16", "bfloat16"
# room behind the prompt, as a server would have while it generates
ROOM = 128
VOCABULARY = 512
# shapes of a Llama-like model for tests
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN_7B = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
# two of the 32 layers of Mixtral 8x7B
MIXTRAL = {"num_hidden_layers": 2}


def _cache_name(module: nn.Module) -> str:
    """The argument that takes a key-value cache: `cache` of some models in transformers 5.24, `past_key_values`."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class LastLogits(nn.Module):
    """Logits of the last position alone, as a server asks for them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        """Map token ids [batch, length] to logits [batch, 1, vocabulary]."""
        given = {} if cache is None else {_cache_name(self.inner): cache}
        logits: Tensor = self.inner(input_ids=input_ids, use_cache=cache is not None, logits_to_keep=1, **given).logits
        return logits


def _prompt(site: Site, inner: nn.Module) -> tuple[nn.Module, Any]:
    config: Any = inner.config
    return LastLogits(inner), {"input_ids": site.tokens(config.vocab_size)}


def _rewind(cache: Any, length: int) -> Callable[[str], None]:
    """A reset: every call writes its keys and values at the next position and moves it on."""

    def rewind(_bucket: str) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    return rewind


def _step(site: Site, inner: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Workload]]:
    """One token of each sequence, behind a prompt of the site's length."""

    def after_prompt(last: nn.Module) -> Workload:
        from transformers import StaticCache

        config: Any = inner.config
        cache = StaticCache(config=config, max_cache_len=site.length + ROOM)
        with torch.no_grad():
            last(site.tokens(config.vocab_size), cache)
        token = site.tokens(config.vocab_size, site.batch, 1)
        bucket = f"b{site.batch}t{site.length}"
        return Workload(
            last, {bucket: Inputs((), {"input_ids": token, "cache": cache})}, reset=_rewind(cache, site.length)
        )

    return LastLogits(inner), after_prompt


def _made(site: Site, kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """A model in the site's dtype from the start: 8 B parameters in float32 take 32 GB while they are drawn."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(site.dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def _llama(site: Site, shapes: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _made(site, LlamaForCausalLM, LlamaConfig(**site.either(shapes, TINY)))


@model(
    "gpt2-prefill", library="transformers", unit="tokens", each_token=True, gpu=Size(8, 1024, HALF), tiny=Size(2, 16)
)
def gpt2_prefill(site: Site) -> tuple[nn.Module, Any]:
    """GPT-2: prompts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return _prompt(site, GPT2LMHeadModel(GPT2Config(**site.either({}, tiny))))


@model(
    "llama-1b-prefill",
    library="transformers",
    unit="tokens",
    each_token=True,
    gpu=Size(1, 2048, BRAIN),
    tiny=Size(1, 16),
)
def llama_1b_prefill(site: Site) -> tuple[nn.Module, Any]:
    """Llama 3.2 1B: a prompt."""
    return _prompt(site, _llama(site, LLAMA_1B))


@model("llama-1b-decode", library="transformers", unit="tokens", gpu=Size(1, 2048, BRAIN), tiny=Size(2, 16))
def llama_1b_decode(site: Site) -> tuple[nn.Module, Any]:
    """Llama 3.2 1B: a step behind a prompt."""
    return _step(site, _llama(site, LLAMA_1B))


@model(
    "llama-8b-prefill",
    library="transformers",
    unit="tokens",
    each_token=True,
    gpu=Size(1, 2048, BRAIN),
    tiny=Size(1, 16),
)
def llama_8b_prefill(site: Site) -> tuple[nn.Module, Any]:
    """Llama 3.1 8B: a prompt."""
    return _prompt(site, _llama(site, LLAMA_8B))


@model("llama-8b-decode", library="transformers", unit="tokens", gpu=Size(1, 2048, BRAIN), tiny=Size(1, 16))
def llama_8b_decode(site: Site) -> tuple[nn.Module, Any]:
    """Llama 3.1 8B: a step of one sequence."""
    return _step(site, _llama(site, LLAMA_8B))


@model("llama-8b-decode-16", library="transformers", unit="tokens", gpu=Size(16, 2048, BRAIN), tiny=Size(3, 16))
def llama_8b_decode_16(site: Site) -> tuple[nn.Module, Any]:
    """Llama 3.1 8B: a step of 16 sequences."""
    return _step(site, _llama(site, LLAMA_8B))


@model("qwen25-7b-decode", library="transformers", unit="tokens", gpu=Size(8, 1024, BRAIN), tiny=Size(2, 16))
def qwen25_7b_decode(site: Site) -> tuple[nn.Module, Any]:
    """Qwen2.5 7B: a step of 8 sequences."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = {name: value for name, value in TINY.items() if name != "head_dim"}
    return _step(site, _made(site, Qwen2ForCausalLM, Qwen2Config(**site.either(QWEN_7B, tiny))))


@model("mistral-7b-decode", library="transformers", unit="tokens", gpu=Size(4, 2048, BRAIN), tiny=Size(2, 16))
def mistral_7b_decode(site: Site) -> tuple[nn.Module, Any]:
    """Mistral 7B v0.3, which has no sliding window: a step of 4 sequences."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(sliding_window=None, **site.either({"vocab_size": 32_768, "head_dim": 128}, TINY))
    return _step(site, _made(site, MistralForCausalLM, config))


@model(
    "gemma2-2b-prefill",
    library="transformers",
    unit="tokens",
    each_token=True,
    gpu=Size(1, 1024, BRAIN),
    tiny=Size(1, 16),
)
def gemma2_2b_prefill(site: Site) -> tuple[nn.Module, Any]:
    """Gemma 2 2B (soft-capped logits): a prompt."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return _prompt(site, Gemma2ForCausalLM(Gemma2Config(**site.either({}, {**TINY, "query_pre_attn_scalar": 16}))))


@model(
    "mixtral-prefill", library="transformers", unit="tokens", each_token=True, gpu=Size(4, 512, BRAIN), tiny=Size(2, 16)
)
def mixtral_prefill(site: Site) -> tuple[nn.Module, Any]:
    """Two layers of the shapes of Mixtral 8x7B, 8 experts of which a token takes 2: prompts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return _prompt(site, MixtralForCausalLM(MixtralConfig(**site.either(MIXTRAL, {**TINY, "num_local_experts": 4}))))


def t5_config(site: Site) -> Any:
    """The shapes of T5-base (v1.1: gated GELU)."""
    from transformers import T5Config

    full = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
    tiny = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    return T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **site.either(full, tiny))


class DecoderStep(nn.Module):
    """One token of an encoder-decoder model, whose cache holds the keys and values of the encoder."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, token: Tensor, encoded: Tensor, cache: Any) -> Tensor:
        """Map token ids [batch, 1] and encoder states [batch, length, width] to logits [batch, 1, vocabulary]."""
        logits: Tensor = self.inner(
            decoder_input_ids=token, encoder_outputs=(encoded,), use_cache=True, **{_cache_name(self.inner): cache}
        ).logits
        return logits


@model("t5-decode", library="transformers", unit="tokens", gpu=Size(16, 512, BRAIN), tiny=Size(2, 16))
def t5_decode(site: Site) -> tuple[nn.Module, Any]:
    """T5-base: a step of the decoder of 16 sequences."""
    from transformers import T5ForConditionalGeneration

    config = t5_config(site)

    def after_encoder(step: nn.Module) -> Workload:
        from transformers import EncoderDecoderCache, StaticCache

        written = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=ROOM)
        cross = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=site.length)
        cache = EncoderDecoderCache(written, cross)
        encoded = site.noise(site.batch, site.length, config.d_model)
        token = site.tokens(config.vocab_size, site.batch, 1)
        with torch.no_grad():
            step(token, encoded, cache)
        inputs = Inputs((token, encoded, cache))
        return Workload(step, {f"b{site.batch}t1": inputs}, reset=_rewind(written, 1))

    return DecoderStep(T5ForConditionalGeneration(config)), after_encoder
