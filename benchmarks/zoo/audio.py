"""Models of sound."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.registry import Site, Size, model
from torch import nn

HALF = "float16"


@model("whisper-small-encoder", library="transformers", unit="clips", gpu=Size(8, 3000, HALF), tiny=Size(1, 64))
def whisper_small_encoder(site: Site) -> tuple[nn.Module, Any]:
    """The encoder of Whisper-small, on 30 seconds as 3,000 frames of 80 bands."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    full = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    tiny = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    # the first convolutions halve the frames
    config = WhisperConfig(max_source_positions=site.length // 2, **site.either(full, tiny))
    return WhisperEncoder(config), {"input_features": site.noise(site.batch, config.num_mel_bins, site.length)}


@model("wav2vec2-base", library="transformers", unit="clips", gpu=Size(8, 160_000, HALF), tiny=Size(1, 4000))
def wav2vec2_base(site: Site) -> tuple[nn.Module, Any]:
    """wav2vec 2.0 base, on 10 seconds at 16 kHz."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    tiny = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    }  # fmt: skip
    return Wav2Vec2Model(Wav2Vec2Config(**site.either({}, tiny))), {"input_values": site.noise(site.batch, site.length)}
