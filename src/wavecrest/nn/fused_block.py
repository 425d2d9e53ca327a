"""A pre-norm residual block with norms and additions inside its GEMMs, if dispatch picks wavecrest's kernels for them.

A decoding step has few rows, and a launch for a norm costs more than the norm. If wavecrest's kernels run the GEMMs
around a norm, the GEMM before it adds the residual, and those after it normalise the rows that they read. In a prompt
an addition costs a pass over memory: PyTorch's GEMMs add to the residual in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wavecrest.dispatch.op import Op
from wavecrest.errors import Unsupported
from wavecrest.nn.hooks import plain
from wavecrest.nn.linear import Linear
from wavecrest.nn.norm import ResidualNorm


def bare(norm: nn.Module) -> bool:
    """True if a norm is no more than its weight and eps, which a GEMM may apply in its place."""
    return plain(norm, ResidualNorm) and norm._parameters["bias"] is None


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """x [B, S, …] at one place [B] of each row: [B, 1, …]."""
    return x[torch.arange(x.shape[0], device=x.device), places].unsqueeze(1)


def through(
    layer: nn.Module,
    x: Tensor,
    norm: ResidualNorm | None = None,
    residual: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """layer(x) for x [..., D], with `norm` applied first and `residual` added if given; `overwrite`: in its memory."""
    # a module that replaces a Linear need not take arguments that the call does not use
    out: Tensor
    if overwrite:
        out = layer(x, residual, overwrite_residual=True)
    elif norm is not None:
        out = layer(x, residual, norm.weight, norm.eps)
    else:
        out = layer(x) if residual is None else layer(x, residual)
    return out


class FusionChoice:
    """The GEMMs that wavecrest's kernels run with the norm before them or the addition after them; kept between calls.

    A decoding step is short beside the work of deciding. So an answer is kept for the arguments that it was found for,
    and looked for again when the registry's decisions, a layer, its weight or a norm's hooks have changed.
    """

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._found: tuple[bool, ...] = ()

    def of(
        self,
        x: Tensor,
        *asked: tuple[tuple[nn.Module, ...], ResidualNorm | None],
        judge: Callable[[nn.Module, Tensor, ResidualNorm | None], bool] | None = None,
    ) -> tuple[bool, ...]:
        """For each (layers, norm): True if wavecrest's kernels run all layers on the norm of x [..., D].

        Without a norm: True if they add x to the result.

        False where PyTorch's composition would run, since it launches the norm or addition separately anyway; where
        the GEMM alone has a measured row and the fused one does not; inside torch.compile; for a norm with a bias; and
        for layers and norms of other classes, or with hooks, which are called as they are. `judge`: another test of
        each layer.
        """
        if torch.compiler.is_compiling():
            return (False,) * len(asked)
        key: list[Any] = [Op.epoch, x.shape, x.dtype, x.device, torch.is_grad_enabled()]
        for layers, norm in asked:
            key += [id(layer.weight) if plain(layer, Linear) else None for layer in layers]
            if norm is not None:
                key.append(bare(norm))
        if key != self._key:
            judge = judge or _fuses
            self._found = tuple([all(judge(layer, x, norm) for layer in layers) for layers, norm in asked])
            self._key = key
        return self._found


def _fuses(layer: nn.Module, x: Tensor, norm: ResidualNorm | None) -> bool:
    """The test of `FusionChoice.of` for one layer."""
    if not plain(layer, Linear) or not (norm is None or bare(norm)):
        return False
    # without a norm the layer's input is not there yet: it has the rows of x
    a = x.new_empty(*x.shape[:-1], layer.in_features) if norm is None else x
    try:
        found = layer.decision(a, x) if norm is None else layer.decision(a, None, norm.weight, norm.eps)
        if not found.own_kernel:
            return False
        return found.source != "default" or layer.decision(a).source == "default"
    except Unsupported:
        # strict mode: a call without a measured row is an error, and this one need not be made
        return False


def _adds(layer: nn.Module, x: Tensor, norm: ResidualNorm | None = None) -> bool:
    """True if PyTorch runs a layer's GEMM for rows like x's, and can add its result to x in place."""
    if not plain(layer, Linear) or layer.bias is not None:
        return False
    a = x.new_empty(*x.shape[:-1], layer.in_features)
    try:
        # a backend that is faster for the GEMM alone keeps it
        return layer.decision(a).native and layer.decision(a, x).native
    except Unsupported:
        return False


class Mixer(Protocol):
    """The first part of a block, such as an mLSTM layer or attention."""

    def inputs(self, x: Tensor, norm: ResidualNorm | None) -> tuple[nn.Module, ...]:
        """The layers that x, or its norm, goes through first."""

    def output(self) -> nn.Module:
        """The layer that makes the result."""

    def __call__(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """The result for x [B, S, D], and the state after it."""


class MLP(Protocol):
    """The second part of a block."""

    def inputs(self) -> tuple[nn.Module, ...]:
        """The layers that x goes through first."""

    def output(self) -> nn.Module:
        """The layer that makes the result."""

    def __call__(self, x: Tensor, *norm: ResidualNorm | None, **options: Any) -> Tensor:
        """The result for x [B, S, D]."""


class Parts(NamedTuple):
    """The modules of a block as they are now: adapters may have replaced some."""

    norm_mixer: ResidualNorm
    mixer: Mixer
    norm_mlp: ResidualNorm
    mlp: MLP


class Plan(NamedTuple):
    """The norms and additions of a block that run inside a GEMM."""

    # the mixer's first layers apply the norm before it
    norm_in_mixer: bool = False
    # its last layer adds the residual
    mixer_adds: bool = False
    # the MLP's first layers apply the norm before it
    norm_in_mlp: bool = False
    # its last layer adds the residual
    mlp_adds: bool = False
    # additions are made in the residual's memory
    overwrite: bool = False


APART = Plan()


class FusedBlock:
    """Runs x + mixer(norm(x)), then that + mlp(norm(that)), without launches that dispatch makes unnecessary.

    It has no parameters: the modules stay the caller's, and come with each call.
    """

    def __init__(self, mixer: type[nn.Module], mlp: type[nn.Module]) -> None:
        """Fuse modules of these types; others, and those with hooks, are called as they are."""
        self._mixer, self._mlp = mixer, mlp
        # one choice for steps, one for prompts, and one for the work after a prompt's last mixer
        self._step, self._prompt, self._behind = FusionChoice(), FusionChoice(), FusionChoice()

    def run(
        self,
        parts: Parts,
        x: Tensor,
        delta: Tensor | None,
        state: Any,
        options: dict[str, Any],
        *,
        step: bool = False,
        overwrite: bool = False,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """One block.

        Args:
            parts: its modules.
            x, delta: the residual stream is x + delta, [B, S, D] each; None: x alone.
            state: of the mixer, before x.
            options: of the mixer.
            step: x is one token of a decoding step.
            overwrite: x's memory may become the result.
            last: int64 [B], the place of each row's only token that is asked for; None: all of them.

        Returns:
            (x, delta, state): the result is x + delta, [B, S, D] each, [B, 1, D] with `last`; None: x alone. Where the
            addition is left out the norm that follows makes it.
        """
        norm_mixer, mixer, norm_mlp, mlp = parts
        options = dict(options)
        ours = self._ours(parts)
        plan = self._before(parts, x, step, overwrite and last is None) if ours else APART
        if plan.norm_in_mixer and delta is None:
            normed, options["norm"] = x, norm_mixer
        else:
            normed, x = norm_mixer(x, delta)
        if last is not None:
            # the state needs all tokens; the work after the mixer needs these alone, as few rows as in a step
            x, options["last"] = at_places(x, last), last
            plan = self._behind_mixer(parts, x) if ours else APART
        memory = {"overwrite": True} if plan.overwrite else {}
        norm: tuple[ResidualNorm, ...] = ()
        if not plan.mixer_adds:
            mixed, after = mixer(normed, state, **options)
            normed, x = norm_mlp(x, mixed)
        else:
            x, after = mixer(normed, state, residual=x, **memory, **options)
            if plan.norm_in_mlp:
                normed, norm = x, (norm_mlp,)
            else:
                normed, x = norm_mlp(x)
        if plan.mlp_adds:
            return mlp(normed, *norm, residual=x, **memory), None, after
        return x, mlp(normed, *norm), after

    def _ours(self, parts: Parts) -> bool:
        """True if both parts are of the types that this block fuses, and no hook is on them."""
        mixer: Any = parts.mixer
        mlp: Any = parts.mlp
        return not torch.compiler.is_compiling() and plain(mixer, self._mixer) and plain(mlp, self._mlp)

    def _before(self, parts: Parts, x: Tensor, step: bool, overwrite: bool) -> Plan:
        """The plan for x [B, S, D]: of a step, or of a prompt whose memory may be overwritten."""
        norm, mixer, norm_mlp, mlp = parts
        if step:
            first, second, mixes, ends = self._step.of(
                x,
                (mixer.inputs(x, norm if bare(norm) else None), norm),
                (mlp.inputs(), norm_mlp),
                ((mixer.output(),), None),
                ((mlp.output(),), None),
            )
            # the next block's plan is not known here: it is assumed to equal this one's
            return Plan(first, second and mixes, second and mixes, ends and first)
        if overwrite and self._prompt.of(x, ((mixer.output(), mlp.output()), None), judge=_adds)[0]:
            return Plan(mixer_adds=True, mlp_adds=True, overwrite=True)
        return APART

    def _behind_mixer(self, parts: Parts, x: Tensor) -> Plan:
        """The plan for the last token of each row, x [B, 1, D], from the mixer's last layer on."""
        second, mixes, ends = self._behind.of(
            x,
            (parts.mlp.inputs(), parts.norm_mlp),
            ((parts.mixer.output(),), None),
            ((parts.mlp.output(),), None),
        )
        return Plan(False, second and mixes, second and mixes, ends)
