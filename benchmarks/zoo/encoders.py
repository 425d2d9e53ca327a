"""Encoders of text."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.registry import Site, Size, model
from torch import nn

HALF = "float16"
VOCABULARY = 512
# shapes of a BERT-like model for tests
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128,
}  # fmt: skip


def _bert(site: Site, **shapes: Any) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**site.either(shapes, TINY))
    return BertModel(config), site.text(config.vocab_size)


@model(
    "bert-base", library="transformers", unit="sequences",
    gpu=Size(32, 512, HALF), cpu=Size(1, 128), tiny=Size(2, 16),
)  # fmt: skip
def bert_base(site: Site) -> tuple[nn.Module, Any]:
    """BERT-base."""
    return _bert(site)


@model(
    "bert-large", library="transformers", unit="sequences",
    gpu=Size(16, 512, HALF), cpu=Size(1, 128), tiny=Size(2, 16),
)  # fmt: skip
def bert_large(site: Site) -> tuple[nn.Module, Any]:
    """BERT-large."""
    return _bert(site, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


@model(
    "minilm-l6", library="transformers", unit="sequences",
    gpu=Size(64, 128, HALF), cpu=Size(8, 32), tiny=Size(2, 16),
)  # fmt: skip
def minilm_l6(site: Site) -> tuple[nn.Module, Any]:
    """MiniLM-L6 (sentence embeddings)."""
    return _bert(site, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


@model("roberta-base", library="transformers", unit="sequences", gpu=Size(32, 256, HALF), tiny=Size(2, 16))
def roberta_base(site: Site) -> tuple[nn.Module, Any]:
    """RoBERTa-base."""
    from transformers import RobertaConfig, RobertaModel

    full = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    config = RobertaConfig(**site.either(full, TINY))
    return RobertaModel(config), site.text(config.vocab_size)


@model(
    "distilbert", library="transformers", unit="sequences",
    gpu=Size(64, 128, HALF), cpu=Size(4, 64), tiny=Size(2, 16),
)  # fmt: skip
def distilbert(site: Site) -> tuple[nn.Module, Any]:
    """DistilBERT-base."""
    from transformers import DistilBertConfig, DistilBertModel

    tiny = {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128}
    config = DistilBertConfig(**site.either({}, tiny))
    return DistilBertModel(config), site.text(config.vocab_size)


@model("deberta-v3-base", library="transformers", unit="sequences", gpu=Size(16, 256, HALF), tiny=Size(2, 16))
def deberta_v3_base(site: Site) -> tuple[nn.Module, Any]:
    """DeBERTa-v3-base."""
    from transformers import DebertaV2Config, DebertaV2Model

    base = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    }  # fmt: skip
    config = DebertaV2Config(
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, **site.either(base, TINY),
    )  # fmt: skip
    return DebertaV2Model(config), site.text(config.vocab_size)


@model("t5-encoder", library="transformers", unit="sequences", gpu=Size(16, 512, "bfloat16"), tiny=Size(2, 16))
def t5_encoder(site: Site) -> tuple[nn.Module, Any]:
    """The encoder of T5-base."""
    from benchmarks.zoo.language import t5_config
    from transformers import T5EncoderModel

    config = t5_config(site)
    return T5EncoderModel(config), site.text(config.vocab_size)


@model(
    "torch-encoder", library="torch", unit="sequences",
    gpu=Size(32, 256, HALF), cpu=Size(1, 64), tiny=Size(2, 16),
)  # fmt: skip
def torch_encoder(site: Site) -> tuple[nn.Module, Any]:
    """nn.TransformerEncoder with 12 layers of 768, as the root."""
    width, heads, inner, layers = site.either((768, 12, 3072, 12), (64, 2, 128, 2))
    layer = nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return encoder, site.noise(site.batch, site.length, width)
