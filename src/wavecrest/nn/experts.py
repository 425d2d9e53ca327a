"""The experts of a sparse layer over `wavecrest.ops.moe`, and ours from a model's own: proven on a probe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn.activation import activation_name
from wavecrest.nn.hooks import plain, recast
from wavecrest.nn.precision import by_autocast
from wavecrest.ops import moe, pack
from wavecrest.ops.packed import mxfp4_of_pairs
from wavecrest.ops.packed.formats import INT4_UNIT, MX_GROUP

# parameters by the names that transformers gives them; those with "bias" are optional
WEIGHTS, BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# experts, hidden and intermediate size, tokens and experts of a token of a probe
PROBE = (5, 24, 12, 7, 3)
# sizes of a probe's tokens: at 1 a wrong activation shows, at 30 a limit does
PROBE_SCALES = (1.0, 30.0)
# largest error on a float32 probe, over the largest value
PROBE_LIMIT = 1e-5


class Experts(nn.Module):
    """Σ over a token's experts of weight · down_proj(act(gate) · up), [gate | up] = gate_up_proj(x); see `ops.moe`.

    Its parameters have the names and layouts of transformers' experts, so that state dicts fit.

    Args:
        gate_up_proj: [experts, 2 · intermediate, hidden]; [experts, hidden, 2 · intermediate] if `transposed`.
        down_proj: [experts, hidden, intermediate]; [experts, intermediate, hidden] if `transposed`.
        gate_up_proj_bias, down_proj_bias: [experts, 2 · intermediate] and [experts, hidden], or None.
        activation, interleaved, alpha, limit: as of `ops.moe`.
        transposed: the weights have rows for inputs, as gpt-oss stores them.
        gate_up_proj_scale, down_proj_scale: of weights in MXFP4, as of `ops.moe`; `to_mxfp4` and `from_mxfp4` make
            them.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None
    gate_up_proj_scale: nn.Parameter | None
    down_proj_scale: nn.Parameter | None

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        gate_up_proj_bias: nn.Parameter | None = None,
        down_proj_bias: nn.Parameter | None = None,
        activation: str = "silu",
        interleaved: bool = False,
        transposed: bool = False,
        alpha: float = 1.702,
        limit: float = 7.0,
        gate_up_proj_scale: nn.Parameter | None = None,
        down_proj_scale: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.register_parameter("gate_up_proj_bias", gate_up_proj_bias)
        self.register_parameter("down_proj_bias", down_proj_bias)
        self.register_parameter("gate_up_proj_scale", gate_up_proj_scale)
        self.register_parameter("down_proj_scale", down_proj_scale)
        self.activation, self.interleaved, self.transposed = activation, interleaved, transposed
        self.alpha, self.limit = alpha, limit

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], experts and their weights [tokens, k], to [tokens, hidden]."""
        w1: Tensor = self.gate_up_proj
        w2: Tensor = self.down_proj
        if self.transposed:
            w1, w2 = w1.mT, w2.mT
        # 4 bits are bytes
        x, w1, w2, b1, b2 = by_autocast(hidden_states, w1, w2, self.gate_up_proj_bias, self.down_proj_bias)
        return moe(
            x, w1, w2, top_k_weights, top_k_index, b1, b2,
            self.activation, self.interleaved, self.alpha, self.limit, self.gate_up_proj_scale, self.down_proj_scale,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and options."""
        options = [self.activation, *(name for name in ("interleaved", "transposed") if getattr(self, name))]
        options += [] if self.gate_up_proj_scale is None else ["mxfp4"]
        return f"{list(self.gate_up_proj.shape)}, {', '.join(options)}"

    def to_mxfp4(self) -> Experts:
        """The same experts with weights in MXFP4 (see `ops.pack`), for inference; biases are shared.

        Raises:
            InvalidArgument: they are in 4 bits already, or hold NaN or infinity.
        """
        if self.gate_up_proj_scale is not None:
            raise InvalidArgument("Experts.to_mxfp4: the weights are in MXFP4 already")
        parts = []
        for weight in (self.gate_up_proj, self.down_proj):
            rows = [pack(one.mT if self.transposed else one, "mxfp4") for one in weight.detach()]
            parts += [torch.stack([one.stored for one in rows])]
            parts += [torch.stack([one.scale for one in rows if one.scale is not None])]
        made = self._of_bytes(parts, self.gate_up_proj_bias, self.down_proj_bias, self.activation, self.interleaved)
        made.alpha, made.limit = self.alpha, self.limit
        return made.train(self.training)

    @classmethod
    def from_mxfp4(
        cls,
        gate_up_blocks: Tensor,
        gate_up_scales: Tensor,
        down_blocks: Tensor,
        down_scales: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str = "swigluoai",
        interleaved: bool = True,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> Experts:
        """Experts of a checkpoint in the layout of gpt-oss: its `_blocks`, `_scales` and biases, value by value.

        Args:
            gate_up_blocks: uint8 [experts, 2 · intermediate, hidden / 32, 16], neighbouring columns in a byte, the even
                one in the low 4 bits; or [experts, 2 · intermediate, hidden / 2].
            gate_up_scales: uint8 [experts, 2 · intermediate, hidden / 32], e8m0.
            down_blocks, down_scales: the same with rows of hidden and columns of intermediate.
            gate_up_bias, down_bias: [experts, 2 · intermediate] and [experts, hidden].
            activation, interleaved, alpha, limit: as of `ops.moe`; the defaults are gpt-oss's.

        Raises:
            InvalidArgument: a shape or dtype is outside this.
        """
        parts = [*mxfp4_parts(gate_up_blocks, gate_up_scales), *mxfp4_parts(down_blocks, down_scales)]
        module = cls._of_bytes(parts, _parameter(gate_up_bias), _parameter(down_bias), activation, interleaved)
        module.alpha, module.limit = alpha, limit
        return module

    def empty_mxfp4(self) -> Experts:
        """Experts with these sizes, options and biases whose weights are in MXFP4 and have no values yet.

        They take no memory until values are put in their place.
        """
        weights = [one.mT if self.transposed else one for one in (self.gate_up_proj, self.down_proj)]
        parts = []
        for weight in weights:
            experts, rows, columns = weight.shape
            for size in (-(-columns // INT4_UNIT) * INT4_UNIT // 2, -(-columns // MX_GROUP)):
                # of one element
                parts += [torch.empty((), dtype=torch.uint8, device=weight.device).expand(experts, rows, size)]
        made = self._of_bytes(parts, self.gate_up_proj_bias, self.down_proj_bias, self.activation, self.interleaved)
        made.alpha, made.limit = self.alpha, self.limit
        return made.train(self.training)

    @property
    def bytes_(self) -> int:
        """Bytes of the weights and their scales."""
        parts = (self.gate_up_proj, self.down_proj, self.gate_up_proj_scale, self.down_proj_scale)
        return sum(one.numel() * one.element_size() for one in parts if one is not None)

    @property
    def numel(self) -> int:
        """Elements of the weights, without the ones that 4 bits are padded with."""
        if self.gate_up_proj_scale is None:
            return self.gate_up_proj.numel() + self.down_proj.numel()
        experts, hidden = self.down_proj.shape[:2]
        return 3 * experts * hidden * (self.gate_up_proj.shape[1] // 2)

    @classmethod
    def _of_bytes(
        cls, parts: list[Tensor], b1: nn.Parameter | None, b2: nn.Parameter | None, activation: str, interleaved: bool
    ) -> Experts:
        """The module of w1, its scales, w2 and its scales."""
        w1, s1, w2, s2 = (nn.Parameter(part, requires_grad=False) for part in parts)
        return cls(w1, w2, b1, b2, activation, interleaved, gate_up_proj_scale=s1, down_proj_scale=s2)

    @classmethod
    def from_module(cls, module: nn.Module) -> Experts:
        """Ours from the experts of a transformers model; shares their parameters.

        Raises:
            StepRefused: the module computes something else, or has hooks; the message says what.
        """
        name = type(module).__name__
        if not stacks_experts(module):
            raise StepRefused(f"{name} has no stacked weights gate_up_proj and down_proj")
        if not plain(module, type(module)):
            raise StepRefused(f"{name} has hooks or a forward of its own, which a replacement would lose")
        if getattr(module, "_is_expert_parallel", False):
            raise StepRefused(f"{name} is one device's share of experts")
        more = {path for path, _ in module.named_parameters()} - {*WEIGHTS, *BIASES}
        if more:
            raise StepRefused(f"{name} has parameters beside weights and biases: {', '.join(sorted(more))}")
        weights = {one: module.get_parameter(one) for one in WEIGHTS}
        dtypes = {one.dtype for one in weights.values()}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            found = ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
            raise StepRefused(f"{name} has weights of {found}; the op takes one of float32, float16 and bfloat16")
        made = _made(cls, module)
        _prove(module, cls)
        made.train(module.training)
        return made


def mxfp4_parts(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and scales of `ops.moe` for a checkpoint's blocks and scales; see `Experts.from_mxfp4`.

    Raises:
        InvalidArgument: a shape or dtype is outside of that.
    """
    if blocks.ndim not in (3, 4) or scales.ndim != 3 or blocks.shape[:2] != scales.shape[:2]:
        raise InvalidArgument(
            f"Experts.from_mxfp4: blocks are [experts, rows, columns / 32, 16] and scales [experts, rows, "
            f"columns / 32], got {list(blocks.shape)} and {list(scales.shape)}"
        )
    made = mxfp4_of_pairs(blocks.flatten(0, 1), scales.flatten(0, 1))
    assert made.scale is not None
    stored, scale = (part.view(*blocks.shape[:2], part.shape[1]) for part in (made.stored, made.scale))
    return stored, scale


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    return value if value is None or isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def stacks_experts(module: nn.Module) -> bool:
    """True if a module has the weights of all experts in two parameters of three dimensions."""
    found = [module._parameters.get(one) for one in WEIGHTS]
    return all(one is not None and one.ndim == 3 for one in found)


def _made(kind: type[Experts], module: nn.Module) -> Experts:
    """The module over the op with the parameters and the options that a model's experts have."""
    alpha, limit, act_fn = (getattr(module, name, None) for name in ("alpha", "limit", "act_fn"))
    options: dict[str, Any] = {}
    if isinstance(alpha, float | int) and isinstance(limit, float | int):
        options = {"activation": "swigluoai", "alpha": float(alpha), "limit": float(limit)}
    elif act_fn is not None:
        options = {"activation": activation_name(act_fn)}
        if options["activation"] not in ("silu", "gelu", "gelu_tanh"):
            raise StepRefused(f"the activation {type(act_fn).__name__} is not silu, gelu or gelu_tanh")
    else:
        raise StepRefused(f"{type(module).__name__} has neither an act_fn nor the alpha and limit of gpt-oss")
    gate_up, down = (module.get_parameter(one) for one in WEIGHTS)
    gate_up_bias, down_bias = (module._parameters.get(one) for one in BIASES)
    return kind(
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        interleaved=not getattr(module, "is_concatenated", True),
        transposed=bool(getattr(module, "is_transposed", False)),
        **options,
    )


def _prove(module: nn.Module, kind: type[Experts]) -> None:
    """Raise StepRefused unless small experts of a module's class and options compute what ours do.

    With random weights and biases, since fresh ones would hide that they are ignored; in float32 on the CPU.
    """
    name, (experts, hidden, intermediate, tokens, k) = type(module).__name__, PROBE
    small = recast(module, type(module))
    sizes = {
        "num_experts": experts, "hidden_dim": hidden, "hidden_size": hidden, "intermediate_dim": intermediate,
        "intermediate_size": intermediate,
    }  # fmt: skip
    vars(small).update({one: size for one, size in sizes.items() if one in vars(module)})
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    transposed = bool(getattr(module, "is_transposed", False))
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate),
        "gate_up_proj_bias": (experts, 2 * intermediate), "down_proj_bias": (experts, hidden),
    }  # fmt: skip
    for one, shape in shapes.items():
        if module._parameters.get(one) is None:
            continue
        values = random(*shape) * 0.5
        values = values.mT.contiguous() if transposed and one in WEIGHTS else values
        small._parameters[one] = nn.Parameter(values, requires_grad=False)
    ours = _made(kind, small)
    ids = torch.stack([torch.randperm(experts, generator=generator, device="cpu")[:k] for _ in range(tokens)])
    weights = random(tokens, k).softmax(-1)
    with torch.no_grad():
        for scale in PROBE_SCALES:
            x = scale * random(tokens, hidden)
            expected, got = _called(small, (x, ids.clone(), weights.clone()), name), ours(x, ids, weights)
            if not isinstance(expected, Tensor) or expected.shape != got.shape:
                raise StepRefused(f"{name} does not return one tensor of its tokens' shape")
            error = float((expected - got).abs().max() / got.abs().max().clamp_min(1e-30))
            if not error <= PROBE_LIMIT:
                raise StepRefused(
                    f"{name} computes something else than weighted sums of gated MLPs: it differs by {error:.1g} of "
                    "the largest value"
                )


def _called(module: nn.Module, arguments: tuple[Tensor, ...], name: str) -> object:
    try:
        return module(*arguments)
    # another project's module may raise anything
    except Exception as error:
        raise StepRefused(f"{name} raised on a probe: {type(error).__name__}: {error}") from error
