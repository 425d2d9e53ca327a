"""transformers' xLSTM on wavecrest's ops: block parts replaced in place, cache in float32, masks respected."""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.models.xlstm import xLSTMLargeConfig
from wavecrest.models.xlstm.config import TOKEN_FIELDS
from wavecrest.models.xlstm.layers import FeedForward, LayerState, MLSTMLayer
from wavecrest.models.xlstm.padding import Padding, spans
from wavecrest.models.xlstm.state import empty_state
from wavecrest.nn import RMSNorm

# the cache argument of xLSTMModel.forward: `cache` in transformers 5.24, which takes the older name too, and warns when
# it is given both
CACHES = ("cache", "cache_params")


@dataclass
class _Call:
    """A model call in progress: where its tokens are, and how many of them each layer has seen."""

    padding: Padding | None = None
    tokens: int = 0
    seen: dict[int, int] | None = None

    def part(self, layer: int, tokens: int) -> Padding | None:
        """The padding of a layer's next tokens; a layer sees long prompts in parts."""
        if self.padding is None or self.seen is None:
            return None
        begin = self.seen.get(layer, 0)
        self.seen[layer] = begin + tokens
        starts, lengths = self.padding
        first, stop = (starts - begin).clamp(0, tokens), (starts + lengths - begin).clamp(0, tokens)
        return Padding(first, stop - first)


class _Layer(MLSTMLayer):
    """wavecrest's mLSTM layer with the call signature of transformers'."""

    def __init__(self, config: xLSTMLargeConfig, index: int, call: _Call) -> None:
        super().__init__(config, "meta")
        self.index = index
        # set past nn.Module, as all layers share the object
        self.call = call

    def forward(  # type: ignore[override]
        self, x: Tensor, state: LayerState | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Map x [B, S, hidden_size] and the state before it to y and the state after it.

        Without gradients a step overwrites the cache's state in place, so transformers' copy into the cache is free.
        """
        padding = self.call.part(self.index, x.shape[1])
        learns = torch.is_grad_enabled()
        if learns and state is not None:
            # transformers copies the new state into the cache, and autograd keeps the old one
            c, n, m = state
            state = c.clone(), n.clone(), None if m is None else m.clone()
        return super().forward(x, state, padding=padding, in_place=not learns)


def patch_transformers_xlstm(model: nn.Module, **settings: Any) -> nn.Module:
    """Make transformers' xLSTM run on wavecrest's ops, in place: one call, the same parameters and the same answers.

    mLSTM layers, MLPs and norms are replaced by wavecrest's, which share the parameters, so that the state dict stays
    the same. A prompt of any length is one call of an op. The cache keeps n and m in float32 whatever the model's
    dtype, and has the layers' sizes. `attention_mask` is respected: states skip padding at the left and the right, and
    a mask with holes is refused. Answers differ from unpatched ones by rounding alone, except where transformers' are
    wrong: with padding, and with states of 16 bits.

    Args:
        model: an `xLSTMModel` or `xLSTMForCausalLM`.
        settings: fields of `xLSTMLargeConfig` to set: inference_state_dtype="float16" for half the cache, kernels by
            name.

    Returns:
        The model.

    Raises:
        InvalidArgument: the model is another class or is patched already, or a setting is invalid; nothing is
        changed then.
    """
    backbone: Any = next((part for _, part in backbones(model)), None)
    if backbone is None:
        raise InvalidArgument(
            f"patch_transformers_xlstm takes transformers' xLSTMModel or xLSTMForCausalLM, not {type(model).__name__}"
        )
    if is_patched(backbone):
        raise InvalidArgument("patch_transformers_xlstm: the model is patched already")
    config = _config(backbone.config, settings)
    call = _Call()
    made = []
    for index, block in enumerate(backbone.blocks):
        made.append((block, "mlstm_layer", _adopted(_Layer(config, index, call), block.mlstm_layer)))
        made.append((block, "ffn", _adopted(FeedForward(config, "meta"), block.ffn)))
        made += [(block, name, _norm(getattr(block, name), config)) for name in ("norm_mlstm", "norm_ffn")]
    made.append((backbone, "out_norm", _norm(backbone.out_norm, config)))
    for owner, name, part in made:
        setattr(owner, name, part)
    backbone.register_forward_pre_hook(_Before(config, call, _names(backbone)), with_kwargs=True)
    backbone.register_forward_hook(_After(call), always_call=True)
    return model


def backbones(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The `xLSTMModel` modules of a model with their paths."""
    return [(path, part) for path, part in model.named_modules() if _kind(part) is not None]


def is_patched(backbone: Any) -> bool:
    """Whether an `xLSTMModel` runs on wavecrest's ops already."""
    return any(isinstance(block.mlstm_layer, _Layer) for block in backbone.blocks)


def _kind(module: nn.Module) -> type | None:
    """The class xLSTMModel that a module is of, or None."""
    return next(
        (kind for kind in type(module).__mro__ if kind.__name__ == "xLSTMModel" and "xlstm" in kind.__module__), None
    )


def _names(backbone: nn.Module) -> tuple[str, ...]:
    """The parameter names of xLSTMModel.forward; of its class, as others may have replaced the method of a model."""
    kind: Any = _kind(backbone)
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _config(theirs: Any, settings: dict[str, Any]) -> xLSTMLargeConfig:
    """wavecrest's configuration of the same function, with kernels chosen by dispatch."""
    names = {field.name for field in fields(xLSTMLargeConfig)}
    unknown = sorted(set(settings) - names)
    if unknown:
        raise InvalidArgument(f"patch_transformers_xlstm: the configuration has no {', '.join(unknown)}")
    # layers do not use token ids, and transformers takes other ones
    ours = names - {"chunkwise_kernel", "sequence_kernel", "step_kernel", "inference_state_dtype", *TOKEN_FIELDS}
    values = {name: getattr(theirs, name) for name in ours if hasattr(theirs, name)}
    # the settings that blocks are made from in transformers
    values |= {"embedding_dim": theirs.hidden_size, "mode": "inference", "return_last_states": True}
    return xLSTMLargeConfig(**(values | settings))


def _adopted(made: nn.Module, module: nn.Module) -> nn.Module:
    """wavecrest's module with the parameters of transformers'."""
    given = dict(module.named_parameters())
    wanted = {name: parameter.shape for name, parameter in made.named_parameters()}
    if {name: parameter.shape for name, parameter in given.items()} != wanted:
        raise InvalidArgument(
            f"patch_transformers_xlstm: {type(module).__name__} has other parameters than its configuration says: "
            f"{', '.join(sorted(given.keys() ^ wanted.keys())) or 'of other shapes'}"
        )
    for name, parameter in given.items():
        path, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(path), leaf, parameter)
    return made.train(module.training)


def _norm(module: nn.Module, config: xLSTMLargeConfig) -> nn.Module:
    """wavecrest's form of a norm; a norm with a bias stays as it is."""
    weight = module.weight
    if not isinstance(weight, nn.Parameter) or getattr(module, "bias", None) is not None:
        return module
    made = RMSNorm(weight.shape[0], config.norm_eps, elementwise_affine=False)
    made.weight = weight
    return made.train(module.training)


class _Before:
    """Hook before a model call: reads its mask, and makes a cache that can hold the states."""

    def __init__(self, config: xLSTMLargeConfig, call: _Call, names: tuple[str, ...]) -> None:
        self.config, self.call, self.names = config, call, names
        # the newer name is followed by the older one, which that version still takes
        self.caches = CACHES[CACHES.index("cache" if "cache" in names else "cache_params") :]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.dtype = config.state_dtype

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        for name in CACHES:
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
            elif name not in self.caches:
                raise InvalidArgument(
                    f"xLSTM: this version of transformers takes {self.caches[0]}=, and would pass over {name}="
                )
        tokens = kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(given, Tensor):
            # transformers' own error names the missing argument
            return (), kwargs
        self.call.tokens, self.call.seen = given.shape[1], {}
        self.call.padding = self._padding(model, given, kwargs.get("attention_mask"))
        use = kwargs.get("use_cache")
        use = model.config.use_cache if use is None else use
        # without a cache the loop over parts of a long prompt makes one in bfloat16
        long = not model.training and given.shape[1] > model.config.max_inference_chunksize
        cache = next((kwargs[name] for name in self.caches if name in kwargs), None)
        if cache is not None:
            self._widen(cache, given)
        elif long or (use and not (model.training and model.gradient_checkpointing)):
            kwargs[self.caches[0]] = self._cache(model, given)
        return (), kwargs

    def _padding(self, model: Any, given: Tensor, mask: Tensor | None) -> Padding | None:
        if mask is None:
            return None
        if mask.ndim != 2 or mask.shape[0] != given.shape[0] or mask.shape[1] < given.shape[1]:
            raise InvalidArgument(
                f"xLSTM: attention_mask must be [B, S] or longer by what the cache has seen, got {list(mask.shape)} "
                f"for {list(given.shape[:2])}"
            )
        kept = mask[:, mask.shape[1] - given.shape[1] :].to(given.device) != 0
        found = spans(kept, given[..., 0] if given.ndim == 3 else given)
        if found is not None and model.training and model.gradient_checkpointing:
            raise Unsupported(
                "xLSTM: gradient checkpointing runs layers again without their mask; leave one of the two"
            )
        return None if found is None else Padding(found[0].int(), found[1].int())

    def _fresh(self, given: Tensor) -> dict[int, LayerState]:
        return empty_state(self.config, given.shape[0], given.device, self.dtype)

    def _cache(self, model: Any, given: Tensor) -> Any:
        kind = _kind(model)
        assert kind is not None
        cache = sys.modules[kind.__module__].xLSTMCache(
            config=model.config, max_batch_size=given.shape[0], dtype=torch.float32, device=given.device
        )
        # the layers' own sizes: the class rounds up to multiples of 64
        cache.rnn_state = self._fresh(given)
        return cache

    def _widen(self, cache: Any, given: Tensor) -> None:
        """Adapt a cache that was made elsewhere: an unused one gets the layers' sizes, others their dtypes."""
        if not bool(torch.as_tensor(cache.seqlen_offset).any()) and not any(
            bool(c.any()) for c, _, _ in cache.rnn_state.values()
        ):
            cache.rnn_state = self._fresh(given)
            return
        if any(c.dtype != self.dtype or n.dtype != torch.float32 for c, n, _ in cache.rnn_state.values()):
            cache.rnn_state = {
                layer: (c.to(self.dtype), n.float(), m.float()) for layer, (c, n, m) in cache.rnn_state.items()
            }


class _After:
    """Hook after a model call, or its error: drops the call's state."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    def __call__(self, _model: Any, _args: Any, _output: Any) -> None:
        self.call.padding, self.call.seen = None, None
