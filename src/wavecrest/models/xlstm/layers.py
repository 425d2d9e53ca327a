"""The parts of a block: norms, the mLSTM layer and the gated MLP, under the official package's parameter names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest.models.xlstm import kernels
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.nn import Linear
from wavecrest.ops import add_rms_norm, rms_norm, silu_and_mul

# (c, n, m) of one layer: c [B, NH, DK, DV], n float32 [B, NH, DK], m float32 [B, NH, 1], None for sigmoid gates
LayerState = tuple[Tensor, Tensor, Tensor | None]
# sequences below this length that do not end in a single step run the sequence kernel, as in the official package
SEQUENCE_BELOW = 16
IGATE_BIAS, FGATE_BIAS = -10.0, (3.0, 6.0)


class Padding(NamedTuple):
    """Where the tokens of each row are: int32 [B] each, the place of the first one, and how many there are."""

    starts: Tensor
    lengths: Tensor


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap); x itself where the cap is 0 or None."""
    return cap * torch.tanh(x / cap) if cap else x


def make_linear(
    inputs: int, outputs: int, bias: bool, device: torch.device | str | None, activation: str | None = None
) -> Linear:
    """A linear layer whose parameters `reset` fills."""
    weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
    return Linear(weight, nn.Parameter(torch.empty(outputs, device=device)) if bias else None, activation)


class Norm(nn.Module):
    """RMSNorm of the last dimension, x [..., D]: x / sqrt(mean(x²) + eps) · weight + bias, where there is a bias."""

    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, bias: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size, device=device)) if bias else None)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + delta, x + delta); both [..., D]."""
        if delta is None:
            normed = rms_norm(x, self.weight, self.eps)
        else:
            normed, x = add_rms_norm(delta, x, self.weight, self.eps)
        return (normed if self.bias is None else normed + self.bias), x


class HeadNorm(nn.Module):
    """The parameters of the LayerNorm of each head's outputs; the mLSTM ops apply the weight."""

    bias: nn.Parameter | None

    def __init__(self, size: int, bias: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size, device=device)) if bias else None)


class MLSTMLayer(nn.Module):
    """y = out_proj(sigmoid(o) · LayerNorm per head(mLSTM(q, k, v, i, f))), projections of x, single or fused."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        d, qk, v, bias = config.embedding_dim, config.qk_dim, config.v_dim, config.use_bias
        self.fused = config.weight_mode == "fused"
        if self.fused:
            self.qkv_opreact = make_linear(d, 2 * qk + 2 * v, bias, device)
            self.ifgate_preact = make_linear(d, 2 * config.num_heads, True, device)
        else:
            self.q = make_linear(d, qk, bias, device)
            self.k = make_linear(d, qk, bias, device)
            self.v = make_linear(d, v, bias, device)
            self.ogate_preact = make_linear(d, v, bias, device)
            self.igate_preact = make_linear(d, config.num_heads, True, device)
            self.fgate_preact = make_linear(d, config.num_heads, True, device)
        self.multihead_norm = HeadNorm(v, bias, device)
        self.out_proj = make_linear(v, d, bias, device)
        self.kernels = kernels.Kernels.of(config)

    def _projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, o [B, NH, S, D] and i, f [B, NH, S] of x [B, S, embedding_dim]: views, nothing is copied."""
        heads, qk, v = self.config.num_heads, self.config.qk_dim, self.config.v_dim
        # the gates first: their product is too small to fill a GPU, and a large one may start beside it
        if self.fused:
            gates = torch.split(self.ifgate_preact(x), [heads, heads], dim=-1)
            parts = torch.split(self.qkv_opreact(x), [qk, qk, v, v], dim=-1)
        else:
            gates = (self.igate_preact(x), self.fgate_preact(x))
            parts = (self.q(x), self.k(x), self.v(x), self.ogate_preact(x))
        split = [part.view(*x.shape[:2], heads, part.shape[2] // heads).transpose(1, 2) for part in parts]
        return (*split, *(gate.transpose(1, 2) for gate in gates))

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        padding: Padding | None = None,
        in_place: bool = False,
        return_state: bool = True,
    ) -> tuple[Tensor, LayerState | None]:
        """One layer over a sequence, or over one token behind a state.

        Args:
            x: [B, S, embedding_dim].
            state: before the first token; not changed, unless `in_place`.
            padding: where the tokens of each row are; None: everywhere.
            in_place: of a single token without padding: the state's own tensors become the new state.
            return_state: False where the state behind the last token is not needed.

        Returns:
            [B, S, embedding_dim], and the state behind the last token, or None.
        """
        q, k, v, o, i, f = self._projections(x)
        config = self.config
        options: dict[str, Any] = {
            "eps": config.eps, "gate_soft_cap": float(config.gate_soft_cap or 0.0),
            "norm_weight": self.multihead_norm.weight, "norm_eps": config.norm_eps,
        }  # fmt: skip
        after: LayerState | None
        if x.shape[1] == 1 and state is not None and padding is None:
            q, k, v = (part.squeeze(2) for part in (q, k, v))
            h, after = self.kernels.step(
                q, k, v, i, f, *state, output_gate=o.squeeze(2), in_place=in_place, **options
            )  # fmt: skip
            h = h.unsqueeze(2)
        else:
            run = self.kernels.sequence if 1 < x.shape[1] < SEQUENCE_BELOW else self.kernels.chunkwise
            c, n, m = (None, None, None) if state is None else state
            if padding is not None:
                options |= {"seq_starts": padding.starts, "seq_lens": padding.lengths}
            h, after = run(
                q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=return_state,
                output_gate=o, **options,
            )  # fmt: skip
        if self.multihead_norm.bias is not None:
            h = h + torch.sigmoid(o) * self.multihead_norm.bias.view(config.num_heads, 1, -1)
        return self.out_proj(h.transpose(1, 2).flatten(2)), after


class FeedForward(nn.Module):
    """y = proj_down(silu(gate) · up), gate and up of x by single or fused projections."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        d, width, bias = config.embedding_dim, config.ffn_dim, config.use_bias
        self.fused = config.weight_mode == "fused"
        if self.fused:
            self.proj_up_gate_z = make_linear(d, 2 * width, bias, device, "silu_and_mul")
        else:
            self.proj_up_gate = make_linear(d, width, bias, device)
            self.proj_up = make_linear(d, width, bias, device)
        self.proj_down = make_linear(width, d, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., embedding_dim] to the same."""
        hidden = self.proj_up_gate_z(x) if self.fused else silu_and_mul(self.proj_up_gate(x), self.proj_up(x))
        out: Tensor = self.proj_down(hidden)
        return out


class Block(nn.Module):
    """x + mLSTM(norm(x)), then that + MLP(norm(that)); the last addition is left to the norm that follows."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm_mlstm = Norm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.mlstm_layer = MLSTMLayer(config, device)
        self.norm_ffn = Norm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.ffn = FeedForward(config, device)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        state: LayerState | None,
        padding: Padding | None,
        in_place: bool,
        return_state: bool,
    ) -> tuple[Tensor, Tensor, LayerState | None]:
        """(x, delta, state): the block's result is x + delta, [B, S, embedding_dim] each."""
        normed, x = self.norm_mlstm(x, delta)
        mixed, after = self.mlstm_layer(normed, state, padding=padding, in_place=in_place, return_state=return_state)
        normed, x = self.norm_ffn(x, mixed)
        return x, self.ffn(normed), after
