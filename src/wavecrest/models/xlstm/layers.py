"""The parts of a block: norms, the mLSTM layer and the gated MLP, under the official package's parameter names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.models.xlstm.padding import Padding
from wavecrest.nn import Linear
from wavecrest.nn.fused_block import FusedBlock, Parts, at_places, through
from wavecrest.nn.fused_projection import FusedProjection
from wavecrest.nn.hooks import plain
from wavecrest.nn.norm import ResidualNorm
from wavecrest.ops import silu_and_mul

# (c, n, m) of one layer: c [B, NH, DK, DV], n float32 [B, NH, DK], m float32 [B, NH, 1], None for sigmoid gates
LayerState = tuple[Tensor, Tensor, Tensor | None]


class Kept(NamedTuple):
    """The inputs of a layer's mLSTM, q, k, v, i and f, and its state before them: enough for the state after fewer."""

    inputs: tuple[Tensor, ...]
    state: LayerState


# sequences below this length that do not end in a single step run the sequence kernel, as in the official package
SEQUENCE_BELOW = 16
IGATE_BIAS, FGATE_BIAS = -10.0, (3.0, 6.0)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap); x itself where the cap is 0 or None."""
    return cap * torch.tanh(x / cap) if cap else x


def make_linear(
    inputs: int, outputs: int, bias: bool, device: torch.device | str | None, activation: str | None = None
) -> Linear:
    """A linear layer whose parameters `reset` fills."""
    weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
    return Linear.from_weight(weight, nn.Parameter(torch.empty(outputs, device=device)) if bias else None, activation)


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
            self.projection = FusedProjection(self.qkv_opreact, self.ifgate_preact)
        else:
            self.q = make_linear(d, qk, bias, device)
            self.k = make_linear(d, qk, bias, device)
            self.v = make_linear(d, v, bias, device)
            self.ogate_preact = make_linear(d, v, bias, device)
            self.igate_preact = make_linear(d, config.num_heads, True, device)
            self.fgate_preact = make_linear(d, config.num_heads, True, device)
        self.multihead_norm = HeadNorm(v, bias, device)
        self.out_proj = make_linear(v, d, bias, device)
        self.kernels = config.selected_kernels()

    def _apply(self, fn: Any, recurse: bool = True) -> MLSTMLayer:
        """As `nn.Module._apply`, which gives parameters memory of their own when they are moved or cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.fused:
            self.projection.lay_out()
        return self

    def inputs(self, x: Tensor, norm: ResidualNorm | None) -> tuple[nn.Module, ...]:
        """The layers that x [B, S, embedding_dim], or its norm, goes through first: one where they are fused."""
        if self.fused:
            gates, projections = self.ifgate_preact, self.qkv_opreact
            both = self.projection.for_rows(x, norm) if self.projection.joins(projections, gates) else None
            return (gates, projections) if both is None else (both,)
        return self.igate_preact, self.fgate_preact, self.q, self.k, self.v, self.ogate_preact

    def output(self) -> nn.Module:
        """The layer that makes the result."""
        return self.out_proj

    def _projections(self, x: Tensor, norm: ResidualNorm | None) -> tuple[Tensor, ...]:
        """q, k, v, o [B, NH, S, D] and i, f [B, NH, S] of x [B, S, embedding_dim]: views, nothing is copied."""
        heads, qk, v = self.config.num_heads, self.config.qk_dim, self.config.v_dim
        # the gates first: their GEMM is too small to fill a GPU, and a large one may start beside it
        made = [through(layer, x, norm) for layer in self.inputs(x, norm)]
        if len(made) == 1:
            made = list(torch.split(made[0], [qk, qk, v, v, heads, heads], dim=-1))
            gates, parts = made[4:], made[:4]
        elif self.fused:
            gates = list(torch.split(made[0], [heads, heads], dim=-1))
            parts = list(torch.split(made[1], [qk, qk, v, v], dim=-1))
        else:
            gates, parts = made[:2], made[2:]
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
        norm: ResidualNorm | None = None,
        residual: Tensor | None = None,
        overwrite: bool = False,
        arrivals: Tensor | None = None,
        last: Tensor | None = None,
        kept: list[Kept] | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """One layer over a sequence, or over one token after a state.

        Args:
            x: [B, S, embedding_dim].
            state: before the first token; not changed, unless `in_place`.
            padding: where the tokens of each row are; None: everywhere.
            in_place: of a single token without padding: the state's own tensors become the new state.
            return_state: False where the state after the last token is not needed.
            norm: of x, which the projections apply on the way; None: x is normalised.
            residual: [B, S, embedding_dim], added to the result.
            overwrite: the residual's memory may become the result.
            arrivals: of a single token: see `mlstm_step`.
            last: [B], the place of each row's only token that is asked for; None: all of them.
            kept: of several tokens after a state: the layer appends what `rewind` takes.

        Returns:
            [B, S, embedding_dim], [B, 1, …] with `last`, and the state after the last token, or None.
        """
        q, k, v, o, i, f = self._projections(x, norm)
        config = self.config
        options: dict[str, Any] = {
            "eps": config.eps, "gate_soft_cap": float(config.gate_soft_cap or 0.0),
            "norm_weight": self.multihead_norm.weight, "norm_eps": config.norm_eps,
        }  # fmt: skip
        after: LayerState | None
        if x.shape[1] == 1 and state is not None and padding is None:
            q, k, v = (part.squeeze(2) for part in (q, k, v))
            h, after = self.kernels.step(
                q, k, v, i, f, *state, output_gate=o.squeeze(2), in_place=in_place, arrivals=arrivals, **options
            )  # fmt: skip
            h = h.unsqueeze(2)
        else:
            run = self._run_for(x.shape[1])
            c, n, m = (None, None, None) if state is None else state
            if kept is not None and state is not None:
                kept.append(Kept((q, k, v, i, f), state))
            if padding is not None:
                options |= {"seq_starts": padding.starts, "seq_lens": padding.lengths}
            h, after = run(
                q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=return_state,
                output_gate=o, **options,
            )  # fmt: skip
        if self.multihead_norm.bias is not None:
            h = h + torch.sigmoid(o) * self.multihead_norm.bias.view(config.num_heads, 1, -1)
        h = h.transpose(1, 2).flatten(2)
        return through(self.out_proj, h if last is None else at_places(h, last), None, residual, overwrite), after

    def _run_for(self, tokens: int) -> Any:
        """The kernel for a number of tokens."""
        return self.kernels.sequence if 1 < tokens < SEQUENCE_BELOW else self.kernels.chunkwise

    def rewind(self, kept: Kept, lengths: Tensor) -> LayerState:
        """The state after the first `lengths` (int32 [B]) tokens of a call that kept its inputs; no GEMM runs."""
        c, n, m = kept.state
        _, after = self._run_for(kept.inputs[0].shape[2])(
            *kept.inputs, c_initial=c, n_initial=n, m_initial=m, return_last_states=True, seq_lens=lengths,
            eps=self.config.eps, gate_soft_cap=float(self.config.gate_soft_cap or 0.0),
        )  # fmt: skip
        found: LayerState = after
        return found


def fused_projections(model: nn.Module) -> Iterator[FusedProjection]:
    """The fused projections of a model's mLSTM layers."""
    for module in model.modules():
        if isinstance(module, MLSTMLayer) and module.fused:
            yield module.projection


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

    def inputs(self) -> tuple[nn.Module, ...]:
        """The layers that x goes through first."""
        return (self.proj_up_gate_z,) if self.fused else (self.proj_up_gate, self.proj_up)

    def output(self) -> nn.Module:
        """The layer that makes the result."""
        return self.proj_down

    def forward(
        self, x: Tensor, norm: ResidualNorm | None = None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """x [..., embedding_dim] to the same; `norm`, `residual`, `overwrite`: as of `MLSTMLayer`."""
        made = [through(layer, x, norm) for layer in self.inputs()]
        return through(self.proj_down, made[0] if self.fused else silu_and_mul(*made), None, residual, overwrite)


class Block(nn.Module):
    """x + mLSTM(norm(x)), then that + MLP(norm(that)); see `FusedBlock` for what is done inside GEMMs."""

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm_mlstm = ResidualNorm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.mlstm_layer = MLSTMLayer(config, device)
        self.norm_ffn = ResidualNorm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.ffn = FeedForward(config, device)
        self._fused = FusedBlock(MLSTMLayer, FeedForward)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        state: LayerState | None,
        padding: Padding | None,
        in_place: bool,
        return_state: bool,
        arrivals: Tensor | None = None,
        overwrite: bool = False,
        last: Tensor | None = None,
        kept: list[Kept] | None = None,
    ) -> tuple[Tensor, Tensor | None, LayerState | None]:
        """(x, delta, state): the block's result is x + delta, [B, S, embedding_dim] each; None: x alone.

        `overwrite`: x's memory may become the result. `last`, `kept`: as of `MLSTMLayer`; with `last` the result is
        [B, 1, …]. A layer that is not ours as it is keeps nothing.
        """
        options: dict[str, Any] = {"padding": padding, "in_place": in_place, "return_state": return_state}
        if arrivals is not None:
            options["arrivals"] = arrivals
        if kept is not None and plain(self.mlstm_layer, MLSTMLayer):
            options["kept"] = kept
        parts = Parts(self.norm_mlstm, self.mlstm_layer, self.norm_ffn, self.ffn)
        step = in_place and padding is None and x.shape[1] == 1
        return self._fused.run(parts, x, delta, state, options, step=step, overwrite=overwrite, last=last)
