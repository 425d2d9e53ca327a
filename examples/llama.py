"""A Llama-shaped causal language model (1.24 billion parameters, the shapes of Llama 3.2 1B) with random weights.

    wavecrest optimize examples/llama.py:prefill --device cuda
    wavecrest optimize examples/llama.py:decode --device cuda
    wavecrest optimize examples/llama.py:decode_8b --device cuda

`decode_8b` has the shapes of Llama 3.1 8B and 16 sequences. Random weights cost the same time as trained ones; nothing
is downloaded. `small` versions run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from wavecrest.measure.workload import Inputs, Workload

PROMPT = 2048
# room behind the prompt, as a server would have while it generates
MAX_LENGTH = PROMPT + 128


def config(*, small: bool = False) -> LlamaConfig:
    """Llama 3.2 1B's shapes, or a model of a few million parameters."""
    if small:
        return LlamaConfig(
            hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=1024, max_position_embeddings=512,
        )  # fmt: skip
    return LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


def config_8b() -> LlamaConfig:
    """Llama 3.1 8B's shapes."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip


def build(device: str, shapes: LlamaConfig) -> LlamaForCausalLM:
    """The model with random weights, bfloat16 on a GPU and float32 on the CPU."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = LlamaForCausalLM(shapes)
    return model.to(dtype).eval()


class LastLogits(nn.Module):
    """Logits of the last position only, as a server asks for them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> dict[str, torch.Tensor]:
        """input_ids [batch, length] to {"logits": [batch, 1, vocabulary]}."""
        out = self.model(
            input_ids=input_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
            logits_to_keep=1,
        )
        return {"logits": out.logits}


def _tokens(batch: int, length: int, vocabulary: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (batch, length), generator=generator, device="cpu").to(device)


def prefill(device: str, *, small: bool = False) -> Workload:
    """One prompt of 2,048 tokens, no cache."""
    model = build(device, config(small=small))
    length = 64 if small else PROMPT
    inputs = Inputs((), {"input_ids": _tokens(1, length, model.config.vocab_size, device)})
    return Workload(LastLogits(model), {f"b1s{length}": inputs}, name="llama-1b prefill")


def _decode(model: LlamaForCausalLM, device: str, batch: int, length: int, room: int, name: str) -> Workload:
    cache = StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        model(
            input_ids=_tokens(batch, length, model.config.vocab_size, device), past_key_values=cache, logits_to_keep=1
        )

    def rewind(_bucket: str) -> None:
        # every call writes its key and value at the next position and moves it on
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    inputs = Inputs((), {"input_ids": _tokens(batch, 1, model.config.vocab_size, device), "past_key_values": cache})
    return Workload(LastLogits(model), {f"b{batch}t{length}": inputs}, name=name, reset=rewind)


def decode(device: str, *, small: bool = False) -> Workload:
    """One token after a prompt of 2,048, with a static key-value cache."""
    model = build(device, config(small=small))
    length, room = (64, 80) if small else (PROMPT, MAX_LENGTH)
    return _decode(model, device, 1, length, room, "llama-1b decode")


def decode_8b(device: str) -> Workload:
    """One token of 16 sequences, each after a prompt of 2,048, with a static key-value cache."""
    return _decode(build(device, config_8b()), device, 16, PROMPT, MAX_LENGTH, "llama-8b decode")


def prefill_small(device: str) -> Workload:
    """`prefill` with a few million parameters."""
    return prefill(device, small=True)


def decode_small(device: str) -> Workload:
    """`decode` with a few million parameters."""
    return decode(device, small=True)
