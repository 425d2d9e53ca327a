"""The network of xLSTM Large: embedding, blocks, norm and logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.base import Network
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.models.xlstm.layers import FGATE_BIAS, IGATE_BIAS, Block, Kept, make_linear, soft_cap
from wavecrest.models.xlstm.padding import Padding, spans
from wavecrest.models.xlstm.state import State, check_state, empty_state
from wavecrest.nn import Linear
from wavecrest.nn.fused_block import FusionChoice, through
from wavecrest.nn.hooks import plain, watched
from wavecrest.nn.norm import ResidualNorm


class BlockStack(nn.Module):
    """The blocks, and the norm after the last one."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, device) for _ in range(config.num_blocks))
        self.out_norm: ResidualNorm | None = None
        if config.add_out_norm:
            self.out_norm = ResidualNorm(config.embedding_dim, config.norm_eps, config.use_bias, device)

    def forward(
        self,
        x: Tensor,
        state: State | None,
        padding: Padding | None,
        last: Tensor | None,
        in_place: bool,
        return_state: bool,
        normed: bool = True,
        arrivals: Tensor | None = None,
        overwrite: bool = False,
        kept: list[Kept] | None = None,
    ) -> tuple[Tensor, State]:
        """x [B, S, embedding_dim] to the same, [B, 1, …] of the places `last` [B] where given; and the states.

        With `last` the last block's output projection and MLP see these places alone.
        `normed`: by the norm after the last block, where there is one. `arrivals`: as of `xLSTMNetwork.decode`.
        `overwrite`: x's memory may become the result. `kept`: as of `MLSTMLayer`, for each block.
        """
        delta: Tensor | None = None
        after: State = {}
        for index, block in enumerate(self.blocks):
            before = None if state is None else state[index]
            counts = None if arrivals is None else arrivals[index]
            asked = last if index == len(self.blocks) - 1 else None
            x, delta, reached = block(x, delta, before, padding, in_place, return_state, counts, overwrite, asked, kept)
            if reached is not None:
                after[index] = reached
        if self.out_norm is not None and normed:
            return self.out_norm(x, delta)[0], after
        return (x if delta is None else x + delta), after


class xLSTMNetwork(Network):
    """Forward pass of `xLSTMLarge`: logits and states. `xLSTMLarge` adds generating, loading and saving."""

    config: xLSTMLargeConfig

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
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim, device=device)
        self.backbone = BlockStack(config, device)
        if config.tie_word_embeddings:
            self.lm_head = Linear.from_weight(self.embedding.weight)
        else:
            self.lm_head = make_linear(config.embedding_dim, config.vocab_size, False, device)
        self._choice = FusionChoice()
        if not self.embedding.weight.is_meta:
            self.reset_parameters()
        if dtype is not None:
            self.to(dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weights: small init, σ = √(2 / 5d) (Nguyen and Salazar, 2019); out_proj and proj_down with
        σ = 2 / (blocks · √inputs), as GPT-NeoX's "wang init"; gates zero, their biases −10 (input) and 3 to 6 (forget).
        """
        config = self.config
        small = math.sqrt(2 / (5 * config.embedding_dim))
        forget = torch.linspace(*FGATE_BIAS, config.num_heads, device=self.embedding.weight.device)
        for name, parameter in self.named_parameters():
            module, kind = name.split(".")[-2:]
            gates = module in ("igate_preact", "fgate_preact", "ifgate_preact")
            if gates or kind == "bias":
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            elif module in ("out_proj", "proj_down"):
                parameter.normal_(std=2 / config.num_blocks / math.sqrt(parameter.shape[1]))
            else:
                parameter.normal_(std=small)
            if kind == "bias" and module in ("igate_preact", "ifgate_preact"):
                parameter[: config.num_heads] = IGATE_BIAS
            if kind == "bias" and module in ("fgate_preact", "ifgate_preact"):
                parameter[-config.num_heads :] = forget

    def empty_state(self, batch: int) -> State:
        """The state before the first token of `batch` rows."""
        weight = self.embedding.weight
        c_dtype = torch.float64 if weight.dtype == torch.float64 else self.config.state_dtype
        return empty_state(self.config, batch, weight.device, c_dtype)

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        attention_mask: Tensor | None = None,
        last_only: bool = False,
        return_last_states: bool | None = None,
    ) -> Any:
        """Logits of the next token after each token.

        Args:
            tokens: int64 or int32 [B, S], from 0 to vocab_size − 1. Range-checked on a CPU only, not while
                `torch.compile` traces. On a GPU the check would synchronise; an invalid token fails on the device.
            state: before the first token; None: zeros. Not changed.
            attention_mask: bool or integers [B, S], 0 for padding at the left or the right: states pass it by. Logits
                at padding mean nothing.
            last_only: return logits of each row's last token only; all work after the last block's mLSTM is done for
                that token only.
            return_last_states: also give back the state after the last token; None: as the configuration says.

        Returns:
            float32 (float64 for such weights) [B, S, vocab_size], or [B, 1, vocab_size] with `last_only`; with states
            (logits, state).

        Raises:
            InvalidArgument: tokens, mask or state are outside this, or the configured kernel has no states.
        """
        self.check_tokens(tokens)
        if state is not None:
            check_state(state, self.config, tokens.shape[0])
        padding, last = None, None
        if attention_mask is not None:
            found = spans(attention_mask, tokens)
            padding = None if found is None else Padding(found[0].int(), found[1].int())
        if last_only:
            last = self._last(tokens, padding)
        keep = self.config.return_last_states if return_last_states is None else return_last_states
        logits, after = self._run(tokens, state, padding, last, keep)
        return (logits, after) if keep else logits

    def own_state(self, state: Any, batch: int) -> State:
        """A state that a caller passed in, checked."""
        check_state(state, self.config, batch)
        return dict(state)

    def prompt(self, tokens: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """(logits [B, V] after each row's last token, the state after it)."""
        logits, after = self(tokens, state, attention_mask=mask, last_only=True, return_last_states=True)
        return logits[:, 0], after

    def decode(self, token: Tensor, state: State, arrivals: Tensor | None = None, *, capped: bool = True) -> Tensor:
        """Logits [B, vocab_size] after one token [B]; the state's own tensors become the state after it.

        `arrivals`: int32 [num_blocks, B, NH] of zeros, each block's as `mlstm_step` takes them. `capped` False: in the
        GEMM's dtype and without the soft cap, which is monotonic: the largest of a row is the same, up to ties that
        its rounding makes far beyond the cap.
        """
        # by index: nn.Embedding takes 10.9 us for 16 rows of 4096 and 2.1 for one (H200, 2026-11-23, "kernels" of
        # 2026-11-24_xlstm-peers_xlstm_7b.jsonl.gz), as its kernel for up to 16 has them one after the other
        found = self.embedding.weight[token] if plain(self.embedding, nn.Embedding) else self.embedding(token)
        x = found.unsqueeze(1)
        norm = self.backbone.out_norm
        if norm is not None and not self._choice.of(x, ((self.lm_head,), norm))[0]:
            norm = None
        x, _ = self.backbone(x, state, None, None, True, True, norm is None, arrivals)
        return (self._logits(x, norm) if capped else through(self.lm_head, x, norm))[:, 0]

    def look_ahead(self, tokens: Tensor, state: State) -> tuple[Tensor, State, list[Kept]]:
        """(logits, state, what `rewind` takes) of tokens [B, S ≥ 2] after a state; see `speculation`."""
        check_state(state, self.config, tokens.shape[0])
        kept: list[Kept] = []
        logits, after = self._run(tokens, state, None, None, True, kept)
        return logits, after, kept

    def rewind(self, tokens: Tensor, state: State, kept: list[Kept], lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], each at least 1) of the tokens that `look_ahead` has seen.

        From the inputs of the mLSTMs alone, without a GEMM; a second pass where a layer that is not ours kept none.
        """
        if len(kept) == len(self.backbone.blocks):
            short, after = lengths.int().to(tokens.device), {}
            for index, (block, inputs) in enumerate(zip(self.backbone.blocks, kept, strict=True)):
                layer: Any = block.mlstm_layer
                after[index] = layer.rewind(inputs, short)
            return after
        return self.advance(tokens, state, lengths)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], 0 too) of tokens [B, S ≥ 1]; no logits are made."""
        starts = torch.zeros(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        padding = Padding(starts, lengths.int().to(tokens.device))
        # of the last block's MLP nothing is needed: one place is the least it does
        after: State = self.backbone(self.embedding(tokens), state, padding, starts.long(), False, True)[1]
        return after

    def _run(
        self,
        tokens: Tensor,
        state: State | None,
        padding: Padding | None,
        last: Tensor | None,
        keep: bool,
        kept: list[Kept] | None = None,
    ) -> tuple[Tensor, State]:
        # no hook has seen the tensors in between, so no one else holds them and they can be overwritten
        overwrite = not (torch.compiler.is_compiling() or watched(self))
        x, after = self.backbone(
            self.embedding(tokens), state, padding, last, False, keep, overwrite=overwrite, kept=kept
        )
        return self._logits(x), after

    def _logits(self, x: Tensor, norm: ResidualNorm | None = None) -> Tensor:
        logits = through(self.lm_head, x, norm)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return soft_cap(logits, self.config.output_logit_soft_cap)

    def _last(self, tokens: Tensor, padding: Padding | None) -> Tensor:
        if tokens.shape[1] == 0:
            raise InvalidArgument("xLSTM: last_only needs a token")
        if padding is None:
            return torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=tokens.device)
        if bool((padding.lengths == 0).any()):
            raise InvalidArgument("xLSTM: last_only needs a token in each row; the attention_mask of one hides all")
        return (padding.starts + padding.lengths - 1).long()
