"""Recurrent networks, and the plain stack of layers."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.registry import Site, Size, model
from torch import Tensor, nn

HALF = "float16"


class Tagger(nn.Module):
    """Embedding, a two-way LSTM, and a label for every token."""

    def __init__(self, vocabulary: int, width: int, layers: int, labels: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, labels)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] token ids to [batch, length, labels]."""
        return self.head(self.lstm(self.embedding(ids))[0])  # type: ignore[no-any-return]


@model(
    "lstm", library="torch", unit="sequences",
    gpu=Size(64, 256, HALF), cpu=Size(8, 64), tiny=Size(2, 8),
)  # fmt: skip
def lstm(site: Site) -> tuple[nn.Module, Any]:
    """A tagger of two bidirectional LSTM layers of 512."""
    vocabulary, width, layers = site.either((30_000, 512, 2), (512, 32, 1))
    return Tagger(vocabulary, width, layers), site.tokens(vocabulary)


@model(
    "mlp", library="torch", unit="rows",
    gpu=Size(256, 1024, HALF), cpu=Size(32, 512), tiny=Size(4, 32),
)  # fmt: skip
def mlp(site: Site) -> tuple[nn.Module, Any]:
    """An nn.Sequential of four layers, four times as wide inside, with LayerNorm and GELU."""
    width = site.length
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers), site.noise(site.batch, width)


@model(
    "xlstm-small", library="transformers", unit="tokens", each_token=True,
    gpu=Size(4, 512, "float32"), cpu=Size(1, 64), tiny=Size(1, 16),
)  # fmt: skip
def xlstm_small(site: Site) -> tuple[nn.Module, Any]:
    """A prompt through an xLSTM of 12 blocks of 1,024 (4 of 256 on a CPU), as transformers runs it."""
    from transformers import xLSTMConfig, xLSTMForCausalLM

    shapes = {"vocab_size": 50_304, "hidden_size": 1024, "num_hidden_layers": 12, "num_heads": 4}
    if site.tiny or site.device == "cpu":
        shapes = {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 4}
    # the kernels of its own code, on a CPU too; of a model in 16 bits they multiply float32 by these, and raise
    config = xLSTMConfig(
        chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native",
        step_kernel="native", autocast_kernel_dtype=site.size.dtype, **shapes,
    )  # fmt: skip
    return xLSTMForCausalLM(config), {"input_ids": site.tokens(config.vocab_size), "use_cache": False}
