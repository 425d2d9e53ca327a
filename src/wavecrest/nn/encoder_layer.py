"""torch.nn.TransformerEncoder and its layers over the ops.

In eval mode PyTorch runs each layer as one operation of its own, in which no backend can be chosen. These run the same
layer by its parts: one GEMM for q, k and v, `wavecrest.attention` with the padding mask, and GEMMs whose epilogues add
the bias, the activation and, where no norm behind it does, the residual.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import StepRefused
from wavecrest.nn.activation import activation_name
from wavecrest.nn.added_norm import norm_and_sum, norm_of_sum
from wavecrest.nn.hooks import plain
from wavecrest.nn.multihead_attention import MultiheadAttention
from wavecrest.nn.precision import in_autocast
from wavecrest.ops import flash_attention, linear

# devices on which bias, activation and a residual without a norm behind it are epilogues of GEMMs
EPILOGUES = ("cuda",)
# the modules of the activations that gemm ends in, so that steps see them where a layer has a function
MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


class Rows(NamedTuple):
    """Sequences without padding, one behind the other: their lengths, and where each begins, int32 [B + 1]."""

    sizes: list[int]
    starts: Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> Rows:
        """Rows of sequences of these lengths."""
        return cls(sizes, torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention within each sequence: q, k and v [T, H, D] to the same; k and v may have fewer heads."""
        if q.device.type in EPILOGUES:
            longest = max(self.sizes)
            made = flash_attention(
                q, k, v, layout="thd", softmax_scale=scale, cu_seqlens_q=self.starts, cu_seqlens_k=self.starts,
                max_seqlen_q=longest, max_seqlen_k=longest,
            )  # fmt: skip
            assert isinstance(made, Tensor)
            return made
        # PyTorch's kernel takes no packed sequences
        ends = itertools.accumulate(self.sizes)
        parts = []
        for size, end in zip(self.sizes, ends, strict=True):
            query, key, value = (one[end - size : end].transpose(0, 1)[None] for one in (q, k, v))
            made = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            parts.append(made[0])
        return torch.cat(parts, 1).transpose(0, 1)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` by its parts: parameters, state_dict and signature are PyTorch's.

    On a GPU bias and activation are epilogues of GEMMs, and residuals are added in the norms behind them; the last one
    of a pre-norm layer, which has no norm behind it, in the GEMM. On a CPU, where they would be passes of PyTorch's,
    the modules of the layer are called, so that `choose_linear` can give them a backend. Training runs PyTorch's
    forward.
    """

    activation_name: str
    # on a GPU too the modules of the layer are called: a step is looking for them
    by_modules = False

    @classmethod
    def adopt(cls, layer: nn.TransformerEncoderLayer) -> None:
        """Turn a layer into this class, in place; `encoder_refusal` says whether it can be."""
        layer.self_attn = MultiheadAttention.from_module(layer.self_attn)
        name = activation_name(layer.activation)
        if name and not isinstance(layer.activation, nn.Module):
            del layer.activation
            layer.activation = MODULES[name]()
        layer.__class__ = cls
        layer.activation_name = name  # type: ignore[assignment]

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As PyTorch's: src [B, S, E] (`batch_first`), [S, B, E], or [S, E] without a batch."""
        if self.training or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

        def attend(x: Tensor) -> Tensor:
            y: Tensor = self.self_attn(
                x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal
            )[0]
            return y

        return self._block(src, attend)

    def of_rows(self, x: Tensor, rows: Rows) -> Tensor:
        """The layer of sequences without padding, one behind the other: x [T, E] to the same."""
        attention = cast(MultiheadAttention, self.self_attn)

        def attend(x: Tensor) -> Tensor:
            packed = attention.linear(x, attention.in_proj_weight, attention.in_proj_bias)
            q, k, v = packed.view(-1, 3, attention.num_heads, attention.head_dim).unbind(1)
            y = rows.attend(q, k, v).reshape(x.shape)
            return attention.linear(y, attention.out_proj.weight, attention.out_proj.bias)

        return self._block(x, attend)

    def _block(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            normed, x = norm_and_sum(self.norm2, x, attend(self.norm1(x)))
            return self._feed_forward(normed, x)
        x = norm_of_sum(self.norm1, x, attend(x))
        return norm_of_sum(self.norm2, x, self._feed_forward(x))

    def _feed_forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """linear2(activation(linear1(x))) + residual, all [..., E]."""
        one, two = self.linear1, self.linear2
        fuses = x.device.type in EPILOGUES and self.activation_name and type(one) is type(two) is nn.Linear
        # in autocast the residual is not of the GEMMs' dtype
        if not fuses or self.by_modules or in_autocast(x):
            y = cast(Tensor, two(self.activation(one(x))))
            return y if residual is None else residual + y
        inner = linear(x, one.weight, one.bias, activation=self.activation_name)
        return linear(inner, two.weight, two.bias, residual=residual)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` over layers of `TransformerEncoderLayer`, without nested tensors.

    PyTorch's turns a padded batch into a nested tensor in eval mode, where the padding is at the right, and so gives
    zeros at padded places. So does this: eager by computing the other rows alone, compiled by computing all of them.
    """

    zeroes_padding: bool

    @classmethod
    def adopt(cls, encoder: nn.TransformerEncoder) -> None:
        """Turn an encoder, whose layers have been adopted, into this class, in place."""
        encoder.__class__ = cls
        encoder.zeroes_padding, encoder.use_nested_tensor = encoder.use_nested_tensor, False  # type: ignore[assignment]

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As PyTorch's: src [B, S, E] (`batch_first`), [S, B, E], or [S, E] without a batch."""
        if src_key_padding_mask is None or mask is not None or not self._zeroes(src):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        padded = src_key_padding_mask.bool()
        at_right = (padded[:, 1:] >= padded[:, :-1]).all()
        if torch.compiler.is_compiling() or _is_capturing(src):
            # the values of the mask are not known: zeros by arithmetic
            x = src
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=src_key_padding_mask)
            x = x.masked_fill((padded & at_right)[..., None], 0.0)
        elif bool(at_right) and all(type(layer) is TransformerEncoderLayer for layer in self.layers):
            x = self._without_padding(src, ~padded)
        else:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        return x if self.norm is None else cast(Tensor, self.norm(x))

    def _without_padding(self, src: Tensor, shown: Tensor) -> Tensor:
        """The layers over the rows that are shown, zeros in the others' places: src [B, S, E], shown [B, S]."""
        batch, length, width = src.shape
        sizes = shown.sum(1).tolist()
        if sum(sizes) == batch * length:
            x = src
            for layer in self.layers:
                x = layer(x)
            return x
        places = shown.flatten().nonzero().squeeze(1)
        x = src.reshape(-1, width)[places]
        rows = Rows.of(sizes, src.device)
        for layer in self.layers:
            x = cast(TransformerEncoderLayer, layer).of_rows(x, rows)
        made = x.new_zeros(batch * length, width)
        return made.index_copy_(0, places, x).view(batch, length, width)

    def _zeroes(self, src: Tensor) -> bool:
        """Whether PyTorch's would give zeros at padded places, if these are at the right."""
        learns = torch.is_grad_enabled() and (src.requires_grad or any(one.requires_grad for one in self.parameters()))
        return (
            self.zeroes_padding
            and not self.training
            and not learns
            and src.dim() == 3
            and not torch.is_autocast_enabled()
            and torch.backends.mha.get_fastpath_enabled()
        )


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def encoder_refusal(module: nn.Module) -> str:
    """Why a TransformerEncoder or a layer of it cannot be adopted; empty if it can."""
    if isinstance(module, nn.TransformerEncoder):
        if not plain(module, nn.TransformerEncoder):
            return "it has hooks or a forward of its own"
        if module.use_nested_tensor and not module.mask_check:
            return "its masks are not checked (mask_check=False)"
        return next(filter(None, map(encoder_refusal, module.layers)), "")
    if not isinstance(module, nn.TransformerEncoderLayer) or not plain(module, nn.TransformerEncoderLayer):
        return f"{type(module).__name__} has hooks or a forward of its own"
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return "a part of the layer has hooks"
    try:
        MultiheadAttention.from_module(module.self_attn)
    except StepRefused as refusal:
        return f"its attention: {refusal}"
    return ""
