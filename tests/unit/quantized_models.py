"""Small models that are quantized in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, SIZE = 61, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A pre-norm block: two norms that feed linear layers and nothing else, with a residual around."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.RMSNorm(size)
        self.q, self.k = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 2 * size + 3), nn.Linear(2 * size + 3, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + torch.tanh(self.q(normed)) * self.k(normed)
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return out


class Causal(nn.Module):
    """Token ids [B, T] to logits [B, T, V] of the next one: a running mean, so that a token moves none before it."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block(SIZE) for _ in range(2))
        self.norm = nn.LayerNorm(SIZE)
        self.lm_head = nn.Linear(SIZE, WORDS, bias=False)
        self.drop = nn.Dropout(0.5)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        x = x + x.cumsum(1) / counts[:, None]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.norm(x)) / 4
        return logits


def causal(dtype: torch.dtype = torch.float32, *, outlier: bool = False, **options: Any) -> Causal:
    torch.manual_seed(0)
    model = Causal(**options)
    if outlier:
        with torch.no_grad():
            for block in model.blocks:
                for norm in (block.norm1, block.norm2):
                    norm.weight[3] = 60.0
                # so that the answers stay of ordinary size
                for layer in (block.q, block.k, block.up):
                    layer.weight[:, 3] /= 60.0
    return model.to(DEVICE, dtype).eval()


def tokens(rows: int = 2, length: int = 19, seed: int = 1) -> torch.Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every object and bit that a model has: modules, parameters, buffers, modes, hooks."""
    return {
        "modules": [(name, id(one), one.training) for name, one in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)],
        "values": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "hooks": [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()],
    }


def same_state(model: nn.Module, before: dict[str, Any]) -> None:
    now = state_of(model)
    for part in ("modules", "parameters", "hooks"):
        assert now[part] == before[part], part
    assert now["values"].keys() == before["values"].keys()
    for name, value in before["values"].items():
        assert value.dtype == now["values"][name].dtype and torch.equal(value, now["values"][name]), name
