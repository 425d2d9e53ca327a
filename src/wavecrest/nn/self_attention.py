"""Self-attention with projections of its own, over `wavecrest.attention` and `wavecrest.ops.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn.functional import attention
from wavecrest.nn.hooks import plain
from wavecrest.nn.linear import Linear
from wavecrest.nn.multihead_attention import packed_refusal


class Attention(nn.Module):
    """Self-attention: output(softmax(query(x) · key(x)ᵀ / √D) · value(x)), x [B, S, E] to [B, S, E], D = E / heads.

    The four projections are `wavecrest.nn.Linear`, named query, key, value and output.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Random parameters as those of `torch.nn.Linear`.

        Args:
            embed_dim: E.
            num_heads: heads of the queries, a divisor of E.
            dropout: of the result, while training.
            num_kv_heads: heads of keys and values, a divisor of `num_heads`; None: as many.
            bias: whether the projections have one.
            device, dtype: of the parameters.

        Raises:
            InvalidArgument: the sizes do not divide each other.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(embed_dim, num_heads, kv_heads) < 1 or embed_dim % num_heads or num_heads % kv_heads:
            raise InvalidArgument(
                f"Attention: num_heads ({num_heads}) must divide embed_dim ({embed_dim}), and num_kv_heads "
                f"({kv_heads}) num_heads"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, embed_dim // num_heads
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = Linear(embed_dim, embed_dim, bias, **made)
        self.key = Linear(embed_dim, kv_heads * self.head_dim, bias, **made)
        self.value = Linear(embed_dim, kv_heads * self.head_dim, bias, **made)
        self.output = Linear(embed_dim, embed_dim, bias, **made)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, S, E] to [B, S, E]; `attn_mask` and `is_causal` as for `wavecrest.attention`."""
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.num_heads, self.head_dim)
        k = self.key(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim)
        y = attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, is_causal=is_causal,
            enable_gqa=self.num_kv_heads < self.num_heads,
        )  # fmt: skip
        dropped: Tensor = self.dropout(self.output(y.transpose(1, 2).reshape(batch, length, -1)))
        return dropped

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"

    @classmethod
    def from_module(cls, module: nn.Module) -> Attention:
        """Ours from an `nn.MultiheadAttention` that attends to its own input: views of its parameters.

        Args:
            module: with `batch_first`, one width for all, and without hooks, keys of its own and, in training, dropout.

        Raises:
            StepRefused: it is something else; the message says what.
        """
        if not isinstance(module, nn.MultiheadAttention) or not plain(module, nn.MultiheadAttention):
            raise StepRefused(
                f"{type(module).__name__} is not an nn.MultiheadAttention, or has hooks or a forward of its own"
            )
        reason = packed_refusal(module)
        if not reason and not module.batch_first:
            reason = "it takes [S, B, E], and Attention [B, S, E]"
        if not reason and module.training and module.dropout > 0:
            reason = "it drops weights of the attention"
        if reason:
            raise StepRefused(reason)
        made = cls(module.embed_dim, module.num_heads, bias=module.in_proj_bias is not None, device="meta")
        weights = _thirds(module.in_proj_weight)
        biases = (None, None, None) if module.in_proj_bias is None else _thirds(module.in_proj_bias)
        made.query, made.key, made.value = map(Linear.from_weight, weights, biases)
        made.output = Linear.from_weight(module.out_proj.weight, module.out_proj.bias)
        return made.train(module.training)


def _thirds(packed: Tensor) -> tuple[nn.Parameter, ...]:
    """The parts of q, k and v of a packed parameter, as parameters in its memory."""
    return tuple(nn.Parameter(part, requires_grad=packed.requires_grad) for part in packed.detach().chunk(3))
