"""xLSTM Large: embedding, blocks, norm and logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import generation, layers, loader
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.models.xlstm.layers import Block, LayerState, Norm, Padding, make_linear, soft_cap
from wavecrest.models.xlstm.state import State, check_state, empty_state
from wavecrest.nn import Linear


class BlockStack(nn.Module):
    """The blocks, and the norm behind the last one."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, device) for _ in range(config.num_blocks))
        self.out_norm: Norm | None = None
        if config.add_out_norm:
            self.out_norm = Norm(config.embedding_dim, config.norm_eps, config.use_bias, device)

    def forward(
        self, x: Tensor, state: State | None, padding: Padding | None, last: Tensor | None, in_place: bool, keep: bool
    ) -> tuple[Tensor, State]:
        """x [B, S, embedding_dim] to the same, of the positions `last` [B] alone where given; and the states."""
        delta: Tensor | None = None
        after: State = {}
        for index, block in enumerate(self.blocks):
            before: LayerState | None = None if state is None else state[index]
            x, delta, reached = block(x, delta, before, padding, in_place, keep)
            if reached is not None:
                after[index] = reached
        assert delta is not None
        if last is not None:
            rows = torch.arange(x.shape[0], device=x.device)
            x, delta = x[rows, last].unsqueeze(1), delta[rows, last].unsqueeze(1)
        return (x + delta if self.out_norm is None else self.out_norm(x, delta)[0]), after


class xLSTMLarge(nn.Module):
    """The language model of xLSTM 7B (Beck et al. 2025, arXiv:2503.13427), with the official package's state dict.

    A state is a dict from block number to (c, n, m). It is a value: no call changes one that was passed in, so that
    several continuations can start from the same.
    """

    def __init__(
        self,
        config: xLSTMLargeConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Random weights of the official initialization; `from_pretrained` reads trained ones."""
        super().__init__()
        self.config = config
        self.state_dtype = config.state_dtype
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim, device="meta")
        self.embedding.weight = nn.Parameter(
            torch.empty(config.vocab_size, config.embedding_dim, device=device)
        )
        self.backbone = BlockStack(config, device)
        if config.tie_word_embeddings:
            self.lm_head = Linear(self.embedding.weight)
        else:
            self.lm_head = make_linear(config.embedding_dim, config.vocab_size, False, device)
        self._decoder: generation.Decoder | None = None
        if not self.embedding.weight.is_meta:
            self.reset_parameters()
        if dtype is not None:
            self.to(dtype)
