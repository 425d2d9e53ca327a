"""The forward of a transformers attention module whose decode steps rotate and append inside `flash_decoding`.

It is the model's own, which gets stand-ins for the angles and for the cache (`nn.append`) where a call is a step that
can: one token, transformers' static cache, our attention. Every other call runs as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.nn.append import Angles, Appending, Unrotated
from wavecrest.nn.attention import is_lengths, warn_fallback
from wavecrest.ops._flash_decoding.call import MAX_HEAD_DIM

# what transformers calls the argument: the second before 5.24
CACHES = ("cache", "past_key_values")
ANGLES = "position_embeddings"
# what becomes of a step that is not taken over, in its warning
APART = "rotates and appends in launches of their own"


def rotating(function: Callable[..., Any]) -> Callable[..., Any]:
    """A model's function that rotates q and k, which holds both back where it is given `Angles`."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Any, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if not isinstance(cos, Angles):
            return function(q, k, cos, sin, unsqueeze_dim)
        if unsqueeze_dim != 1:
            return function(q, k, cos.cos, sin, unsqueeze_dim)
        return Unrotated(q, cos, sin, function), Unrotated(k, cos, sin, function)

    return apply_rotary_pos_emb


def appending(
    forward: Callable[..., Any], style: str, checks: bool = False, told: Callable[[str], None] | None = None
) -> Callable[..., Any]:
    """A forward around one that calls what `rotating` made.

    Args:
        forward: of an attention module with the attribute `layer_idx`.
        style: which columns its rotation pairs, "neox" or "gptj".
        checks: end with an error, on the device, where a step has no place left in the cache. All layers of a cache
            are as long, so that one of them does.
        told: called with "" for each step that is taken over, and with the reason for each that is not, in the place of
            a warning.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = next((one for one in CACHES if kwargs.get(one) is not None), "")
        hidden = args[0] if args else kwargs.get("hidden_states")
        # prompts, and calls without a cache, have nothing to append in a step
        if not isinstance(hidden, Tensor) or hidden.shape[1] != 1 or (not name and len(args) < 2):
            return forward(self, *args, **kwargs)
        cache = kwargs.get(name)
        reason = _refusal(self, args, kwargs, cache, StaticCache, StaticLayer)
        if told is not None:
            told(reason)
        elif reason:
            warn_fallback(reason, APART)
        if reason:
            return forward(self, *args, **kwargs)
        cos, sin = kwargs[ANGLES]
        held = {name: Appending(cache, self.layer_idx, checks), ANGLES: (Angles(cos, style), sin)}
        return forward(self, *args, **{**kwargs, **held})

    return run


def _refusal(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any], cache: Any, static: Any, static_layer: Any
) -> str:
    """Why a step runs as before; "" where it is taken over."""
    if len(args) > 1 or given.get(ANGLES) is None:
        return f"a cache or {ANGLES} not passed by name"
    if type(cache) is not static:
        return f"a key-value cache of class {type(cache).__name__}, not StaticCache"
    if cache.offloading:
        return "an offloaded key-value cache"
    layer = cache.layers[module.layer_idx]
    if type(layer) is not static_layer:
        return f"a layer of class {type(layer).__name__} in the cache, not StaticLayer"
    if not layer.is_initialized:
        return "a static cache without memory yet"
    if not isinstance(layer.cumulative_length, Tensor) or layer.cumulative_length.dtype != torch.int64:
        return "a static cache that does not count its tokens in an int64 tensor"
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or not is_lengths(mask):
        return "a mask other than one of lengths, which wavecrest's attention has (step replace_attention)"
    if module.training:
        return "a model in training"
    if torch.is_grad_enabled():
        return "gradients, which do not go into a cache: call the model under torch.no_grad"
    if max(layer.keys.shape[-1], layer.values.shape[-1]) > MAX_HEAD_DIM:
        return f"a head_dim above {MAX_HEAD_DIM}"
    return ""
