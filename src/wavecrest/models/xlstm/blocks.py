"""The block stack of xLSTM (2024): mLSTM and sLSTM blocks in any order, under the parameter names of package xlstm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.generates import Generates
from wavecrest.models.xlstm.layers import make_linear
from wavecrest.models.xlstm.state import State
from wavecrest.ops import causal_conv1d, layer_norm, mlstm_chunkwise, mlstm_step, slstm_sequence, slstm_step

NORM_EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu": F.relu, "relu^2": lambda x: F.relu(x).square(), "sigmoid": torch.sigmoid, "swish": F.silu,
    "selu": F.selu,
}  # fmt: skip
# up-projections are as wide as the next multiple of this
MULTIPLE = 64

# what a block carries from token to token: its last inputs of the convolution, then the cell's states
BlockState = tuple[Tensor, ...]
# of all blocks, by place: a list as calls give them, or a dict as generations do
BlockStates = Sequence[BlockState] | Mapping[int, BlockState]


@dataclass(frozen=True)
class xLSTMBlockStackConfig:
    """Sizes of a block stack; `of` reads the official package's nested form.

    Attributes:
        embedding_dim, num_blocks: the width, and the number of blocks.
        slstm_at: the places of sLSTM blocks; all others are mLSTM blocks.
        vocab_size: of embedding and head, for `xLSTMLMModel`.
        tie_weights: the head's weight is the embedding's.
        bos_token_id, eos_token_id, pad_token_id, force_bos_token_insert: for generating, as in `xLSTMLargeConfig`; the
            official form has none of them.
    """

    embedding_dim: int
    num_blocks: int = 1
    slstm_at: tuple[int, ...] = ()
    add_post_blocks_norm: bool = True
    bias: bool = False
    mlstm_num_heads: int = 4
    mlstm_conv1d_kernel_size: int = 4
    mlstm_qkv_proj_blocksize: int = 4
    mlstm_proj_factor: float = 2.0
    slstm_num_heads: int = 4
    slstm_conv1d_kernel_size: int = 4
    slstm_group_norm_weight: bool = True
    feedforward: bool = True
    ffn_proj_factor: float = 1.3
    ffn_act_fn: str = "gelu"
    ffn_bias: bool = False
    vocab_size: int = 0
    tie_weights: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    force_bos_token_insert: bool = False

    def __post_init__(self) -> None:
        for name, heads in (("mlstm_num_heads", self.mlstm_num_heads), ("slstm_num_heads", self.slstm_num_heads)):
            width = self.inner_dim if name.startswith("mlstm") else self.embedding_dim
            if heads < 1 or width % heads:
                raise InvalidArgument(f"xLSTMBlockStackConfig: {name}={heads} must divide the width {width}")
        if any(not 0 <= place < self.num_blocks for place in self.slstm_at):
            raise InvalidArgument(
                f"xLSTMBlockStackConfig: slstm_at={self.slstm_at} must be places of {self.num_blocks} blocks, from 0"
            )
        if self.ffn_act_fn not in ACTIVATIONS:
            raise InvalidArgument(
                f"xLSTMBlockStackConfig: ffn_act_fn={self.ffn_act_fn!r} must be one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def inner_dim(self) -> int:
        """The width inside of an mLSTM block."""
        return rounded_up(self.mlstm_proj_factor * self.embedding_dim)

    @property
    def ffn_dim(self) -> int:
        """The width inside of the gated MLP."""
        return rounded_up(self.ffn_proj_factor * self.embedding_dim)

    @classmethod
    def of(cls, official: Mapping[str, Any]) -> xLSTMBlockStackConfig:
        """The configuration from the official form: `mlstm_block`, `slstm_block`, `slstm_at`, … as nested mappings.

        Dropout and settings of kernels are ignored: they change no result of inference.

        Raises:
            InvalidArgument: a part that this stack does not have, or a size that does not fit.
        """
        given = dict(official)
        mlstm = dict((given.get("mlstm_block") or {}).get("mlstm") or {})
        block = dict(given.get("slstm_block") or {})
        slstm, ffn = dict(block.get("slstm") or {}), block.get("feedforward", {})
        if slstm.get("function", "slstm") != "slstm":
            raise InvalidArgument(f"xLSTMBlockStackConfig: has no cell function {slstm['function']!r}, only slstm")
        places = given.get("slstm_at", ())
        blocks = int(given.get("num_blocks", 1))
        if given.get("mlstm_block") is None or places == "all":
            places = range(blocks)
        made: dict[str, Any] = {"num_blocks": blocks, "slstm_at": tuple(int(one) for one in places)}
        plain = ("embedding_dim", "add_post_blocks_norm", "bias", "vocab_size", "tie_weights")
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id", "force_bos_token_insert")
        made |= {name: given[name] for name in (*plain, *tokens) if name in given}
        for prefix, part, names in (
            ("mlstm", mlstm, ("num_heads", "conv1d_kernel_size", "qkv_proj_blocksize", "proj_factor")),
            ("slstm", slstm, ("num_heads", "conv1d_kernel_size", "group_norm_weight")),
            ("ffn", dict(ffn or {}), ("proj_factor", "act_fn", "bias")),
        ):
            made |= {f"{prefix}_{name}": part[name] for name in names if name in part}
        if "embedding_dim" not in made:
            raise InvalidArgument("xLSTMBlockStackConfig: embedding_dim is missing")
        return cls(**made, feedforward=ffn is not None)


def rounded_up(width: float) -> int:
    """The next multiple of 64 of a width, as the official package rounds."""
    return math.ceil(width / MULTIPLE) * MULTIPLE


class BlockNorm(nn.Module):
    """LayerNorm without bias whose weight is 1 + `weight`."""

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimension."""
        return layer_norm(x, 1.0 + self.weight, eps=NORM_EPS)


class HeadwiseLinear(nn.Module):
    """A linear layer of each head's own part of the input; `weight` [heads, outputs of a head, inputs of a head]."""

    bias: nn.Parameter | None

    def __init__(self, size: int, heads: int, bias: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size // heads, size // heads, device=device))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size, device=device)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, size] to the same shape."""
        heads = self.weight.shape[0]
        # [heads, B · S, inputs] @ [heads, inputs, outputs]
        split = x.reshape(-1, heads, x.shape[-1] // heads).transpose(0, 1)
        y = torch.bmm(split, self.weight.mT).transpose(0, 1).reshape(x.shape)
        return y if self.bias is None else y + self.bias


class CausalConv(nn.Module):
    """A convolution of each channel over the tokens so far; `conv.weight` [channels, 1, kernel size]."""

    def __init__(self, size: int, kernel: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv1d(size, size, kernel, groups=size, device=device)

    def forward(self, x: Tensor, before: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(silu(y) [B, S, size], the last inputs), of x and the inputs before it [B, kernel size − 1, size].

        `lengths`: int32 [B], the tokens of each row, behind which there is padding.
        """
        found: tuple[Tensor, Tensor] = causal_conv1d(
            x, self.conv.weight.squeeze(1), self.conv.bias, initial=before, return_last_inputs=True, seq_lens=lengths,
            activation="silu",
        )  # fmt: skip
        return found


class MLSTMCell(nn.Module):
    """Gates, mLSTM and norm by head."""

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        size, heads = config.inner_dim, config.mlstm_num_heads
        self.igate = nn.Linear(3 * size, heads, device=device)
        self.fgate = nn.Linear(3 * size, heads, device=device)
        self.outnorm = BlockNorm(size, device)
        self.heads = heads

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, state: BlockState | None, lengths: Tensor | None = None
    ) -> tuple[Tensor, BlockState]:
        """(h [B, S, size], the last states c, n and m), of q, k and v [B, S, size]."""
        both = torch.cat((q, k, v), -1)
        i, f = self.igate(both).mT, self.fgate(both).mT
        q, k, v = (one.view(*one.shape[:2], self.heads, -1).transpose(1, 2) for one in (q, k, v))
        weight = 1.0 + self.outnorm.weight
        if q.shape[2] == 1 and state is not None and lengths is None:
            h, last = mlstm_step(
                q[:, :, 0], k[:, :, 0], v[:, :, 0], i, f, *state, norm_weight=weight, norm_eps=NORM_EPS
            )
            return h.flatten(1)[:, None], last
        c, n, m = (None, None, None) if state is None else state
        h, last = mlstm_chunkwise(
            q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=True, norm_weight=weight,
            norm_eps=NORM_EPS, seq_lens=lengths,
        )  # fmt: skip
        return h.transpose(1, 2).flatten(2), last


class MLSTMBlockLayer(nn.Module):
    """The mLSTM between an up- and a down-projection, with a convolution before q and k and a gate after it."""

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        size, bias, width = config.inner_dim, config.bias, config.embedding_dim
        heads = size // config.mlstm_qkv_proj_blocksize
        self.proj_up = make_linear(width, 2 * size, bias, device)
        self.q_proj = HeadwiseLinear(size, heads, bias, device)
        self.k_proj = HeadwiseLinear(size, heads, bias, device)
        self.v_proj = HeadwiseLinear(size, heads, bias, device)
        self.conv1d = CausalConv(size, config.mlstm_conv1d_kernel_size, device)
        self.mlstm_cell = MLSTMCell(config, device)
        self.learnable_skip = nn.Parameter(torch.ones(size, device=device))
        self.proj_down = make_linear(size, width, bias, device)

    def forward(self, x: Tensor, state: BlockState | None, lengths: Tensor | None = None) -> tuple[Tensor, BlockState]:
        """(y [B, S, width], the state after it)."""
        inner, z = self.proj_up(x).chunk(2, -1)
        made, last = self.conv1d(inner, None if state is None else state[0], lengths)
        q, k, v = self.q_proj(made), self.k_proj(made), self.v_proj(inner)
        h, cell = self.mlstm_cell(q, k, v, None if state is None else state[1:], lengths)
        return self.proj_down((h + self.learnable_skip * made) * F.silu(z)), (last, *cell)


class SLSTMCell(nn.Module):
    """The recurrent weights [heads, 4 D, D] and the bias [4 · heads · D] of an sLSTM, as the vanilla backend has them.

    State dicts of the CUDA backend, whose weights are [heads, D, 4 D] and whose bias is by head, load too.
    """

    def __init__(self, size: int, heads: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.heads, self.dim = heads, size // heads
        self._recurrent_kernel_ = nn.Parameter(torch.zeros(heads, 4 * self.dim, self.dim, device=device))
        self._bias_ = nn.Parameter(torch.zeros(4 * size, device=device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As `nn.Module` does, after a CUDA backend's parameters were laid out as these."""
        name, bias = f"{prefix}_recurrent_kernel_", f"{prefix}_bias_"
        r, b = state_dict.get(name), state_dict.get(bias)
        heads, dim = self.heads, self.dim
        # a copy: the caller's state dict stays as it is
        if r is not None and dim > 1 and tuple(r.shape) == (heads, dim, 4 * dim):
            state_dict[name] = r.view(heads, dim, 4, dim).permute(0, 2, 3, 1).reshape(heads, 4 * dim, dim)
            if b is not None:
                state_dict[bias] = b.view(heads, 4, dim).transpose(0, 1).reshape(-1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor, state: BlockState | None, lengths: Tensor | None = None) -> tuple[Tensor, BlockState]:
        """(h [B, S, heads, D], the last states h, c, n and m), of x [B, S, 4, heads, D]."""
        r = self._recurrent_kernel_.view(self.heads, 4, self.dim, self.dim).permute(1, 0, 3, 2).to(x.dtype)
        bias = self._bias_.view(4, self.heads, self.dim)
        if x.shape[1] == 1 and state is not None and lengths is None:
            h, c, n, m = state
            y, last = slstm_step(x[:, 0], r, h, c, n, m, bias)
            return y[:, None], last
        first: tuple[Tensor | None, ...] = (None,) * 4 if state is None else state
        found: tuple[Tensor, BlockState] = slstm_sequence(
            x, r, bias, h_initial=first[0], c_initial=first[1], n_initial=first[2], m_initial=first[3],
            return_last_states=True, seq_lens=lengths,
        )  # fmt: skip
        return found


class SLSTMLayer(nn.Module):
    """Gates by head, i and f of a convolution, the sLSTM, and a norm by head."""

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        size, heads = config.embedding_dim, config.slstm_num_heads
        if config.slstm_conv1d_kernel_size > 0:
            self.conv1d = CausalConv(size, config.slstm_conv1d_kernel_size, device)
        # in the official package the gate i is made by what it calls fgate, and f by igate: so checkpoints were trained
        self.fgate = HeadwiseLinear(size, heads, False, device)
        self.igate = HeadwiseLinear(size, heads, False, device)
        self.zgate = HeadwiseLinear(size, heads, False, device)
        self.ogate = HeadwiseLinear(size, heads, False, device)
        self.slstm_cell = SLSTMCell(size, heads, device)
        self.group_norm = BlockNorm(size, device)
        if not config.slstm_group_norm_weight:
            self.group_norm.register_parameter("weight", None)
        self.convolves = config.slstm_conv1d_kernel_size > 0

    def forward(self, x: Tensor, state: BlockState | None, lengths: Tensor | None = None) -> tuple[Tensor, BlockState]:
        """(y [B, S, width], the state after it)."""
        made, last = x, x[:, :0]
        if self.convolves:
            made, last = self.conv1d(x, None if state is None else state[0], lengths)
        gates = torch.stack((self.fgate(made), self.igate(made), self.zgate(x), self.ogate(x)), 2)
        heads = self.slstm_cell.heads
        gates = gates.view(*gates.shape[:3], heads, -1)
        h, cell = self.slstm_cell(gates, None if state is None else state[1:], lengths)
        y = layer_norm(h, eps=NORM_EPS).flatten(2)
        weight: Tensor | None = self.group_norm.weight
        return y if weight is None else y * (1.0 + weight), (last, *cell)


class BlockMLP(nn.Module):
    """proj_down(act(gate) · up), gate and up of one projection."""

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.proj_up = make_linear(config.embedding_dim, 2 * config.ffn_dim, config.ffn_bias, device)
        self.proj_down = make_linear(config.ffn_dim, config.embedding_dim, config.ffn_bias, device)
        self.act = config.ffn_act_fn

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, width] to the same shape."""
        gate, up = self.proj_up(x).chunk(2, -1)
        y: Tensor = self.proj_down(ACTIVATIONS[self.act](gate) * up)
        return y


class xLSTMBlock(nn.Module):
    """x + layer(norm(x)), and for an sLSTM block the same with a gated MLP."""

    def __init__(self, config: xLSTMBlockStackConfig, slstm: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.xlstm_norm = BlockNorm(config.embedding_dim, device)
        self.xlstm = SLSTMLayer(config, device) if slstm else MLSTMBlockLayer(config, device)
        self.ffn: BlockMLP | None = None
        if slstm and config.feedforward:
            self.ffn_norm = BlockNorm(config.embedding_dim, device)
            self.ffn = BlockMLP(config, device)

    def forward(self, x: Tensor, state: BlockState | None, lengths: Tensor | None = None) -> tuple[Tensor, BlockState]:
        """(y [B, S, width], the state after it)."""
        y, last = self.xlstm(self.xlstm_norm(x), state, lengths)
        x = x + y
        return x if self.ffn is None else x + self.ffn(self.ffn_norm(x)), last


class xLSTMBlockStack(nn.Module):
    """mLSTM and sLSTM blocks under the parameter names of package xlstm: its state dicts load as they are.

    Args:
        config: of `xLSTMBlockStackConfig(…)`, or `.of(mapping)` for the official form.
        device: where the parameters are made. They are zeros and ones or not initialised: load weights.
    """

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            [xLSTMBlock(config, place in config.slstm_at, device) for place in range(config.num_blocks)]
        )
        size, normed = config.embedding_dim, config.add_post_blocks_norm
        self.post_blocks_norm = BlockNorm(size, device) if normed else nn.Identity()

    def forward(
        self, x: Tensor, states: BlockStates | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, list[BlockState]]:
        """(y [B, S, width], the states of all blocks after it): of x, from the states of an earlier call on.

        States are values: no call changes them. `lengths`: int32 [B], the tokens of each row from its first place on;
        states pass by what follows, and y means nothing there.
        """
        last = []
        for place, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[place], lengths)
            last.append(state)
        return self.post_blocks_norm(x), last

    def empty_states(self, batch: int) -> list[BlockState]:
        """The states before the first token of `batch` rows: zeros."""
        weight = next(self.parameters())
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        config, found = self.config, []
        for place in range(config.num_blocks):
            heads, inner, kernel = config.mlstm_num_heads, config.inner_dim, config.mlstm_conv1d_kernel_size
            shapes = [(heads, inner // heads, inner // heads), (heads, inner // heads), (heads, 1)]
            if place in config.slstm_at:
                heads, inner, kernel = config.slstm_num_heads, config.embedding_dim, config.slstm_conv1d_kernel_size
                shapes = [(heads, inner // heads)] * 4
            convolved = weight.new_zeros(batch, max(0, kernel - 1), inner)
            cell = [weight.new_zeros((batch, *shape), dtype=wide) for shape in shapes]
            found.append((convolved, *cell))
        return found


class xLSTMLMModel(Generates):
    """Embedding, block stack and head, under the parameter names of package xlstm; it generates as `xLSTMLarge` does.

    The states that `generate`, `beam_search` and `speculate` take are those of a call or of a generation.
    """

    config: xLSTMBlockStackConfig

    def __init__(self, config: xLSTMBlockStackConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise InvalidArgument(f"xLSTMLMModel: vocab_size must be at least 1, got {config.vocab_size}")
        self.config = config
        self.xlstm_block_stack = xLSTMBlockStack(config, device)
        self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim, device=device)
        self.lm_head = make_linear(config.embedding_dim, config.vocab_size, False, device)
        if config.tie_weights:
            weight = self.token_embedding.weight
            assert isinstance(weight, nn.Parameter)
            self.lm_head.weight = weight

    @property
    def embedding(self) -> nn.Embedding:  # type: ignore[override]
        """The embedding, by the name that generation has for it."""
        return self.token_embedding

    def forward(
        self, tokens: Tensor, states: BlockStates | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, list[BlockState]]:
        """(logits [B, S, vocab_size], the states of all blocks after them), of tokens [B, S].

        `lengths`: int32 [B], the tokens of each row from its first place on, behind which there is padding.
        """
        x, last = self.xlstm_block_stack(self.token_embedding(tokens), states, lengths=lengths)
        return self.lm_head(x), last

    def empty_state(self, batch: int) -> State:
        """The state before the first token of `batch` rows."""
        return _numbered(self.xlstm_block_stack.empty_states(batch))

    def own_state(self, state: Any, batch: int) -> State:
        """A state that a caller passed in, checked: a list of all blocks', or a dict by place."""
        wanted = self.empty_shapes(batch)
        places = range(len(wanted))
        if isinstance(state, Mapping):
            found = [state.get(place) for place in places] if set(state) == set(places) else []
        else:
            found = list(state) if isinstance(state, (list, tuple)) else []
        if len(found) != len(wanted):
            raise InvalidArgument(f"xLSTMLMModel: a state is a list of the {len(wanted)} blocks' states, or a dict")
        for place, (parts, shapes) in enumerate(zip(found, wanted, strict=True)):
            own = tuple(tuple(part.shape) for part in parts) if isinstance(parts, tuple) else ()
            if own != shapes:
                raise InvalidArgument(
                    f"xLSTMLMModel: the state of block {place} has shapes {own}, this call needs {shapes}"
                )
        return _numbered(found)

    def empty_shapes(self, batch: int) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of all blocks' states of `batch` rows."""
        return [tuple(tuple(part.shape) for part in parts) for parts in self.xlstm_block_stack.empty_states(batch)]

    def prompt(self, tokens: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """(logits [B, V] after each row's last token, the state after it); of a mask the tokens come first."""
        lengths = None if mask is None else mask.sum(1)
        x, after = self._hidden(tokens, state, lengths)
        last = x[:, -1] if lengths is None else x[torch.arange(x.shape[0], device=x.device), lengths - 1]
        return self._logits(last), after

    def decode(self, token: Tensor, state: State, arrivals: Tensor | None = None, *, capped: bool = True) -> Tensor:
        """Logits [B, V] after one token [B]; the state's own tensors become the state after it. There is no cap."""
        x, after = self._hidden(token[:, None], state, None)
        for place, parts in after.items():
            for own, new in zip(state[place], parts, strict=True):
                assert own is not None and new is not None
                own.copy_(new)
        return self._logits(x[:, 0])

    def look_ahead(self, tokens: Tensor, state: State) -> tuple[Tensor, State, list[Any]]:
        """(logits [B, S, V], state, nothing that is kept) of tokens [B, S ≥ 2] after a state."""
        x, after = self._hidden(tokens, state, None)
        return self._logits(x), after, []

    def rewind(self, tokens: Tensor, state: State, kept: list[Any], lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], each at least 1) of tokens: a second pass over the blocks."""
        return self.advance(tokens, state, lengths)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """The state after the first `lengths` (int64 [B], 0 too) of tokens [B, S ≥ 1]; no logits are made."""
        return self._hidden(tokens, state, lengths.to(tokens.device))[1]

    def _hidden(self, tokens: Tensor, state: Any, lengths: Tensor | None) -> tuple[Tensor, State]:
        given = None if lengths is None else lengths.int()
        x, last = self.xlstm_block_stack(self.token_embedding(tokens), state, lengths=given)
        return x, _numbered(last)

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(x)
        return logits.float() if logits.dtype.itemsize < 4 else logits


def _numbered(states: Sequence[Any]) -> State:
    """States by place, as generation has them."""
    return dict(enumerate(states))
