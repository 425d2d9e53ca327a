"""A network that tokens can be generated with: what generation, beams, speculation and batching ask of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.state import State


class TokenSettings(Protocol):
    """The fields of a configuration that generation reads."""

    @property
    def vocab_size(self) -> int:
        """Tokens are from 0 to one below."""

    @property
    def bos_token_id(self) -> int | None:
        """The token that a prompt may begin with."""

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """The token, or tokens, that end a row."""

    @property
    def pad_token_id(self) -> int | None:
        """The token behind the end of a row."""

    @property
    def force_bos_token_insert(self) -> bool:
        """Whether prompts begin with `bos_token_id`."""


class Network(nn.Module):
    """Base of xLSTM networks: `config` and `embedding`, states as values, and steps that update one in place."""

    config: TokenSettings
    embedding: nn.Embedding

    def empty_state(self, batch: int) -> State:
        """The state before the first token of `batch` rows."""
        raise NotImplementedError

    def own_state(self, state: Any, batch: int) -> State:
        """A state that a caller passed in, in the form that generation uses.

        Raises:
            InvalidArgument: it is not one of this network and batch.
        """
        raise NotImplementedError

    def prompt(self, tokens: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """(logits [B, V] after each row's last token, the state after it), of tokens [B, S] and a mask of the same."""
        raise NotImplementedError

    def decode(self, token: Tensor, state: State, arrivals: Tensor | None = None, *, capped: bool = True) -> Tensor:
        """Logits [B, V] after one token [B]; the state's own tensors become the state after it."""
        raise NotImplementedError

    def look_ahead(self, tokens: Tensor, state: State) -> tuple[Tensor, State, list[Any]]:
        """(logits [B, S, V], state, what `rewind` takes) of tokens [B, S ≥ 2] after a state."""
        raise NotImplementedError

    def rewind(self, tokens: Tensor, state: State, kept: list[Any], lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], each at least 1) of the tokens that `look_ahead` has seen."""
        raise NotImplementedError

    def advance(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], 0 too) of tokens [B, S ≥ 1]; no logits are made."""
        raise NotImplementedError

    def check_tokens(self, tokens: Tensor, *, wait: bool = False) -> None:
        """Raise InvalidArgument unless tokens are int64 or int32 [B, S] on the model's device, and of its vocabulary.

        `wait`: check the values on a GPU too.
        """
        fits = isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.dtype in (torch.int64, torch.int32)
        if not fits:
            found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidArgument(f"xLSTM: tokens must be int64 or int32 [B, S], got {found}")
        device = self.embedding.weight.device
        if tokens.device != device:
            raise InvalidArgument(f"xLSTM: tokens are on {tokens.device}, the model on {device}; move one of them")
        looked = wait or (device.type == "cpu" and not torch.compiler.is_compiling())
        last = self.config.vocab_size - 1
        if looked and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= last:
            raise InvalidArgument(f"xLSTM: tokens are from 0 to {last}, got {int(tokens.min())} to {int(tokens.max())}")
