"""torch.nn.MultiheadAttention over the ops, and one that stays with PyTorch's and copies no heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import StepRefused
from wavecrest.nn.attention import NO_SEED, as_bias, warn_fallback
from wavecrest.nn.functional import attention, linear
from wavecrest.nn.hooks import plain, recast


def packed_refusal(module: nn.MultiheadAttention) -> str:
    """Why q, k and v of a module are not three parts of one projection; empty if they are."""
    if not module._qkv_same_embed_dim:
        return "its keys or values have a width of their own"
    return keys_refusal(module)


def keys_refusal(module: nn.MultiheadAttention) -> str:
    """Why a module's own forward must run; empty if it need not."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds keys of its own"
    return ""


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` over `wavecrest.attention` and `wavecrest.ops.linear`: q, k and v of one input are
    one GEMM.

    Arguments, parameters, state_dict and signature are PyTorch's, and so is what a call gives. Calls that return
    weights (PyTorch's default: pass `need_weights=False`), drop weights or add keys run PyTorch's forward, with an
    `AttentionFallback` warning.
    """

    # what computes the projections and the attention
    linear: ClassVar[Callable[..., Tensor]] = staticmethod(linear)
    attention: ClassVar[Callable[..., Tensor]] = staticmethod(attention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As PyTorch's: query, key and value [B, S, E] (`batch_first`), [S, B, E], or [S, E] without a batch."""
        reason = self._left_to_pytorch(query, need_weights, attn_mask, is_causal)
        if reason:
            warn_fallback(reason)
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        shared, same, single = query is key, key is value, query.dim() == 2
        if single:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._projected(query, key, value, shared, same)
        # as PyTorch: where nothing is padded the flag stands for the mask
        causal = is_causal and key_padding_mask is None
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        y: Tensor = self.attention(q, k, v, mask, is_causal=causal)
        y = self.linear(y.transpose(1, 2).reshape(*query.shape[:2], -1), self.out_proj.weight, self.out_proj.bias)
        if single:
            return y[0], None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _left_to_pytorch(self, query: Tensor, need_weights: bool, attn_mask: Tensor | None, is_causal: bool) -> str:
        if need_weights:
            return "weights that are to be returned (pass need_weights=False)"
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return "keys that the module adds"
        if self.training and self.dropout > 0:
            return NO_SEED
        if query.is_nested or query.dim() not in (2, 3):
            return "tensors that are not [B, S, E] or [S, E]"
        return "is_causal without a mask" if is_causal and attn_mask is None else ""

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, shared: bool, same: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, H, S, D], of as few GEMMs as there are inputs."""
        width, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            parts = [self.linear(*given) for given in zip((query, key, value), weights, biases, strict=True)]
        elif shared and same:
            parts = [*self.linear(query, self.in_proj_weight, bias).chunk(3, -1)]
        else:
            # the inputs by the columns of the packed weight that read them
            spans = [(query, 0, 1), (key, 1, 3)] if same else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
            parts = []
            for x, first, last in spans:
                rows = slice(first * width, last * width)
                y = self.linear(x, self.in_proj_weight[rows], None if bias is None else bias[rows])
                parts += y.chunk(last - first, -1)
        q, k, v = (one.reshape(*one.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for one in parts)
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """One mask of the two, as `attention` takes it: in PyTorch's module True hides a pair."""
        given = []
        if attn_mask is not None:
            heads = (q.shape[0], self.num_heads)
            given.append(attn_mask.reshape(*heads, *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask)
        if key_padding_mask is not None:
            given.append(key_padding_mask[:, None, None, :])
        if not given:
            return None
        if all(one.dtype == torch.bool for one in given):
            return ~(given[0] if len(given) == 1 else given[0] | given[1])
        added = [as_bias(~one, q.dtype) if one.dtype == torch.bool else one.to(q.dtype) for one in given]
        return added[0] if len(added) == 1 else added[0] + added[1]

    @classmethod
    def from_module(cls, module: nn.Module) -> MultiheadAttention:
        """Ours from an `nn.MultiheadAttention`, whose parameters it shares.

        Args:
            module: an `nn.MultiheadAttention`, not of a class with a forward of its own, without hooks.

        Raises:
            StepRefused: it is something else.
        """
        if not isinstance(module, nn.MultiheadAttention) or not plain(module, nn.MultiheadAttention):
            raise StepRefused(
                f"{type(module).__name__} is not an nn.MultiheadAttention, or has hooks or a forward of its own"
            )
        return recast(module, cls)


class PackedMultiheadAttention(MultiheadAttention):
    """MultiheadAttention by PyTorch's GEMM and scaled_dot_product_attention, q, k and v as views of their projections.

    PyTorch's own forward works on [S, B, E]: traced, that is a copy of q, k and v a layer, and norms over transposed
    activations; and it writes the scores out where a caller asks for the weights, as it does by default.

    With `weights_unread` callers get None for the weights, whether they ask for them or not.
    """

    linear: ClassVar[Callable[..., Tensor]] = staticmethod(F.linear)
    attention: ClassVar[Callable[..., Tensor]] = staticmethod(F.scaled_dot_product_attention)
    weights_unread: bool

    @classmethod
    def adopt(cls, module: nn.MultiheadAttention, *, weights_unread: bool = False) -> None:
        """Turn `module` into this class, in place; the caller has checked it by `keys_refusal`."""
        module.__class__ = cls
        module.weights_unread = weights_unread  # type: ignore[assignment]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As PyTorch's: query, key and value [B, S, E] (`batch_first`), [S, B, E], or [S, E] without a batch."""
        needed = need_weights and not self.weights_unread
        return super().forward(query, key, value, key_padding_mask, needed, attn_mask, average_attn_weights, is_causal)
