"""Rotation and cache update of a decode step, held back until attention: `flash_decoding` does both in one launch.

A model's attention rotates q and k, gives k and v to its cache, and calls attention with what that returns. Here each
step of this gives a stand-in to the next (`append_forward`), and nothing is computed before `attend` has all of it.
Whatever else a model does with a stand-in is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wavecrest.errors import Unsupported
from wavecrest.nn.rotary import rotate_qk
from wavecrest.nn.stand_in import StandIn
from wavecrest.ops._flash_decoding.call import FlashDecodingCall

_MISUSED = (
    "rotation and cache update are left to attention here, and the model computes with what they give: leave the step "
    "fuse_append out"
)


class _Held(StandIn):
    misused = _MISUSED


class Angles(_Held):
    """The cosines of a call whose rotation is held back.

    Attributes:
        cos: [B or 1, T, R], each angle twice.
        style: which columns are a pair, as `rope` has it.
    """

    def __init__(self, cos: Tensor, style: str) -> None:
        """Hold them."""
        self.cos, self.style = cos, style


class Unrotated(_Held):
    """Queries or keys that are to be rotated.

    Attributes:
        x: [B, H, T, D].
        cos, sin: [B or 1, T, R], each angle twice.
        style: which columns are a pair.
        rotate: the model's own function of (q, k, cos, sin).
    """

    def __init__(self, x: Tensor, angles: Angles, sin: Tensor, rotate: Callable[..., Any]) -> None:
        """Hold them."""
        self.x, self.cos, self.sin, self.style, self.rotate = x, angles.cos, sin, angles.style, rotate


class Appended(_Held):
    """Keys, or values, of a static cache and of new tokens that are not in it yet.

    Attributes:
        layer: transformers' StaticLayer.
        k: the new keys, to be rotated; v: the new values [B, Hk, T, Dv].
    """

    def __init__(self, layer: Any, k: Unrotated, v: Tensor, update: Callable[..., Any], checks: bool) -> None:
        """Hold them.

        Args:
            layer, k, v: the attributes.
            update: the layer's own update of (k, v).
            checks: end with an error, on the device, where there are more tokens than places.
        """
        self.layer, self.k, self.v, self._update, self._checks = layer, k, v, update, checks

    def call(self, query: Unrotated, ends: Tensor) -> FlashDecodingCall:
        """The call that rotates `query` and the new keys, and appends the new keys and values to the layer's cache.

        The new tokens are added to the layer's length too, as by the layer's own update. `ends`, int32 [B]: number of
        keys that queries see. The mask gives one number for all layers; each layer appends after its own tokens.
        """
        layer, k = self.layer, self.k
        batch, _, count, _ = query.x.shape
        length = layer.cumulative_length
        if self._checks:
            room = layer.max_cache_len - count
            torch._assert_async(length <= room, "more tokens than the key-value cache has room for")
        # inside torch.compile the kernel gets a copy of the number
        advance = not torch.compiler.is_compiling()
        if not advance:
            length.add_(count)
        q, new = query.x, k.x
        cos: Tensor | None = None
        sin: Tensor | None = None
        if count == 1 and k.cos.shape[0] == 1 and k.style == "neox":
            half = k.cos.shape[-1] // 2
            # the token's own angles at every place: it reads one row, that of its place
            cos, sin = (one[0, :, :half].expand(layer.max_cache_len, half) for one in (k.cos, k.sin))
        else:
            # tables have a row a place, for all sequences alike
            q, new = rotate_qk(q, new, k.cos, k.sin, style=k.style)
        return FlashDecodingCall(
            q.transpose(1, 2), layer.keys.transpose(1, 2), layer.values.transpose(1, 2), ends,
            k=new.transpose(1, 2), v=self.v.transpose(1, 2), cos=cos, sin=sin, append_lens=_ends(length, batch),
            advance=advance,
        )  # fmt: skip

    def plain(self, query: Unrotated) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the model and its cache make them."""
        q, k = query.rotate(query.x, self.k.x, self.k.cos, self.k.sin)
        keys, values = self._update(k, self.v)
        return q, keys, values


class Appending(_Held):
    """A static cache as the attention of one layer calls it, for a step whose update is held back."""

    def __init__(self, cache: Any, index: int, checks: bool) -> None:
        """Stand in for `cache` in the layer at `index`; `checks` as for `Appended`."""
        self._cache, self._index, self._checks = cache, index, checks

    def update(self, k: Tensor | Unrotated, v: Tensor, layer_idx: int, *args: Any, **more: Any) -> tuple[Any, Any]:
        """The held-back update; the cache's own where the keys are rotated already.

        Raises:
            Unsupported: it is another layer's.
        """

        def update(k: Tensor, v: Tensor) -> Any:
            return self._cache.update(k, v, layer_idx, *args, **more)

        if not isinstance(k, Unrotated):
            found: tuple[Any, Any] = update(k, v)
            return found
        if layer_idx != self._index:
            raise Unsupported(_MISUSED)
        held = Appended(self._cache.layers[layer_idx], k, v, update, self._checks)
        return held, held


def _ends(length: Tensor, batch: int) -> Tensor:
    """A number of tokens, int64 without dimensions, as int32 [batch]."""
    if torch.compiler.is_compiling():
        # Inductor lays out what it makes as it likes, and no view of another size may follow (torch 2.11)
        return length.to(torch.int32).expand(batch)
    # its lower half, where it lies: no launch
    return length.reshape(1).view(torch.int32)[:1].expand(batch)
