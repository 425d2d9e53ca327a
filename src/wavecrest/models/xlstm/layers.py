"""The parts of a block: norms, the mLSTM layer and the gated MLP, under the official package's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest.dispatch.op import Op
from wavecrest.errors import Unsupported
from wavecrest.models.xlstm import kernels
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.models.xlstm.joined import Joined, plain
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


class Choice:
    """Which products our kernels run with a norm before them, or an addition behind them; kept until that may change.

    For a decoding step, which is short beside the work of deciding: what was found is kept for the arguments that it
    was found for, and looked for anew where the registry's decisions, a layer, its weight or a norm's hooks are others.
    """

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._found: tuple[bool, ...] = ()

    def of(
        self,
        x: Tensor,
        *asked: tuple[tuple[nn.Module, ...], Norm | None],
        judge: Callable[[nn.Module, Tensor, Norm | None], bool] | None = None,
    ) -> tuple[bool, ...]:
        """Of (layers, norm) each: True if all run our kernels with the norm of x [..., D], or without one with x added.

        Not where PyTorch's composition would run, to which a launch for the row operation is nothing more; nor where
        the product alone rests on a measured row and this one does not; nor for what torch.compile traces; nor a norm
        with a bias; nor layers and norms of others, or with hooks, which are called as they are. `judge` asks something
        else of each layer.
        """
        if torch.compiler.is_compiling():
            return (False,) * len(asked)
        key: list[Any] = [Op.epoch, x.shape, x.dtype, x.device, torch.is_grad_enabled()]
        for layers, norm in asked:
            key += [id(layer.weight) if plain(layer, Linear) else None for layer in layers]
            if norm is not None:
                key.append(bare(norm))
        if key != self._key:
            judge = judge or _ours
            self._found = tuple([all(judge(layer, x, norm) for layer in layers) for layers, norm in asked])
            self._key = key
        return self._found


def _ours(layer: nn.Module, x: Tensor, norm: Norm | None) -> bool:
    """As `Choice.of`, of one layer."""
    if not plain(layer, Linear) or not (norm is None or bare(norm)):
        return False
    # without a norm what is multiplied has the rows of x, and is not there yet
    a = x.new_empty(*x.shape[:-1], layer.in_features) if norm is None else x
    try:
        found = layer.decision(a, x) if norm is None else layer.decision(a, None, norm.weight, norm.eps)
        if not found.backend.startswith("triton"):
            return False
        return found.source != "default" or layer.decision(a).source == "default"
    except Unsupported:
        # strict: a call without a measured row is an error, and this one need not be made
        return False


def _adds(layer: nn.Module, x: Tensor, norm: Norm | None = None) -> bool:
    """True if PyTorch multiplies for a layer, of rows like x's, and can add the product to x where that lies."""
    if not plain(layer, Linear) or layer.bias is not None:
        return False
    a = x.new_empty(*x.shape[:-1], layer.in_features)
    try:
        # where another is the faster one for the product alone it stays so
        return layer.decision(a).backend == layer.decision(a, x).backend == "torch"
    except Unsupported:
        return False


def watched(model: nn.Module) -> bool:
    """True if a hook may see, and keep, what modules of a model take and give."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


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


def bare(norm: nn.Module) -> bool:
    """True if a norm is no more than its weight and eps, which a product may apply in its place."""
    return plain(norm, Norm) and norm._parameters["bias"] is None


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """x [B, S, …] at one place [B] of each row: [B, 1, …]."""
    return x[torch.arange(x.shape[0], device=x.device), places].unsqueeze(1)


def through(
    layer: nn.Module, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, overwrite: bool = False
) -> Tensor:
    """x [..., D], or its norm, through a layer, plus the residual: those that are there; `overwrite`: in its memory."""
    # a module that stands in a Linear's place need not know what is not there
    out: Tensor
    if overwrite:
        out = layer(x, residual, overwrite_residual=True)
    elif norm is not None:
        out = layer(x, residual, norm.weight, norm.eps)
    else:
        out = layer(x) if residual is None else layer(x, residual)
    return out


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
            self.joined = Joined(self.qkv_opreact, self.ifgate_preact)
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

    def _apply(self, fn: Any, recurse: bool = True) -> MLSTMLayer:
        """As `nn.Module._apply`, which gives parameters memory of their own when they are moved or cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.fused:
            self.joined.lay_out()
        return self

    def inputs(self, x: Tensor, norm: Norm | None) -> tuple[nn.Module, ...]:
        """The layers that x [B, S, embedding_dim], or its norm, goes through first: one where all are joined."""
        if self.fused:
            gates, projections = self.ifgate_preact, self.qkv_opreact
            both = self.joined.of(x, norm) if self.joined.joins(projections, gates) else None
            return (gates, projections) if both is None else (both,)
        return self.igate_preact, self.fgate_preact, self.q, self.k, self.v, self.ogate_preact

    def _projections(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, ...]:
        """q, k, v, o [B, NH, S, D] and i, f [B, NH, S] of x [B, S, embedding_dim]: views, nothing is copied."""
        heads, qk, v = self.config.num_heads, self.config.qk_dim, self.config.v_dim
        # the gates first: their product is too small to fill a GPU, and a large one may start beside it
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
        norm: Norm | None = None,
        residual: Tensor | None = None,
        overwrite: bool = False,
        arrivals: Tensor | None = None,
        last: Tensor | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """One layer over a sequence, or over one token behind a state.

        Args:
            x: [B, S, embedding_dim].
            state: before the first token; not changed, unless `in_place`.
            padding: where the tokens of each row are; None: everywhere.
            in_place: of a single token without padding: the state's own tensors become the new state.
            return_state: False where the state behind the last token is not needed.
            norm: of x, which the projections apply on the way; None: x is normalised.
            residual: [B, S, embedding_dim], added to the result.
            overwrite: the residual's memory may become the result.
            arrivals: of a single token: see `mlstm_step`.
            last: [B], the place of each row's only token that is asked for; None: all of them.

        Returns:
            [B, S, embedding_dim], [B, 1, …] with `last`, and the state behind the last token, or None.
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
        h = h.transpose(1, 2).flatten(2)
        return through(self.out_proj, h if last is None else at_places(h, last), None, residual, overwrite), after


def joins(model: nn.Module) -> Iterator[Joined]:
    """Of a model's layers."""
    for module in model.modules():
        if isinstance(module, MLSTMLayer) and module.fused:
            yield module.joined


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

    def forward(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """x [..., embedding_dim] to the same; `norm`, `residual`, `overwrite`: as of `MLSTMLayer`."""
        made = [through(layer, x, norm) for layer in self.inputs()]
        return through(self.proj_down, made[0] if self.fused else silu_and_mul(*made), None, residual, overwrite)


class Block(nn.Module):
    """x + mLSTM(norm(x)), then that + MLP(norm(that)); the last addition is left to the norm that follows.

    In a decoding step rows are few, and a launch for a norm costs more than the norm. Where our kernels run the
    products around it, the one before adds the residual, and those behind normalise the rows that they read. In a
    prompt additions are bytes: PyTorch's products add to the residual where it lies.
    """

    def __init__(self, config: xLSTMLargeConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm_mlstm = Norm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.mlstm_layer = MLSTMLayer(config, device)
        self.norm_ffn = Norm(config.embedding_dim, config.norm_eps, config.use_bias, device)
        self.ffn = FeedForward(config, device)
        # of a step, of a prompt, and of what is behind a prompt's last mLSTM
        self._choice, self._additions, self._behind = Choice(), Choice(), Choice()

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
    ) -> tuple[Tensor, Tensor | None, LayerState | None]:
        """(x, delta, state): the block's result is x + delta, [B, S, embedding_dim] each; None: x alone.

        `overwrite`: x's memory may become the result. `last`: [B], as of `MLSTMLayer`; the result is [B, 1, …] then.
        """
        layer, ffn = self.mlstm_layer, self.ffn
        options: dict[str, Any] = {"padding": padding, "in_place": in_place, "return_state": return_state}
        if arrivals is not None:
            options["arrivals"] = arrivals
        first = second = mixes = ends = False
        # what others put in their place, and hooks, get and give what a block does by itself
        ours = not torch.compiler.is_compiling() and plain(layer, MLSTMLayer) and plain(ffn, FeedForward)
        if ours and in_place and padding is None and x.shape[1] == 1:
            first, second, mixes, ends = self._choice.of(
                x,
                (layer.inputs(x, self.norm_mlstm if bare(self.norm_mlstm) else None), self.norm_mlstm),
                (ffn.inputs(), self.norm_ffn),
                ((layer.out_proj,), None),
                ((ffn.proj_down,), None),
            )
        elif (
            ours
            and last is None
            and overwrite
            and self._additions.of(x, ((layer.out_proj, ffn.proj_down), None), judge=_adds)[0]
        ):
            normed, x = self.norm_mlstm(x, delta)
            x, after = layer(normed, state, residual=x, overwrite=True, **options)
            normed, x = self.norm_ffn(x)
            return ffn(normed, residual=x, overwrite=True), None, after
        norm: Norm | None = None
        if first and delta is None:
            normed, options["norm"] = x, self.norm_mlstm
        else:
            normed, x = self.norm_mlstm(x, delta)
        if last is not None:
            # the state wants all tokens up to here, what is behind it these alone: as few rows as of a step
            x, options["last"] = at_places(x, last), last
            if ours:
                second, mixes, ends = self._behind.of(
                    x, (ffn.inputs(), self.norm_ffn), ((layer.out_proj,), None), ((ffn.proj_down,), None)
                )
        if second and mixes:
            x, after = layer(normed, state, residual=x, **options)
            normed, norm = x, self.norm_ffn
        else:
            mixed, after = layer(normed, state, **options)
            normed, x = self.norm_ffn(x, mixed)
        # what the next block does with it is not known here; it is made as this one
        if ends and (first or last is not None):
            return ffn(normed, norm, residual=x), None, after
        return x, ffn(normed) if norm is None else ffn(normed, norm), after
