"""Multi-head latent attention as a module: the parameters of DeepSeek-V2 and V3, decompressed and absorbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.nn.norm import RMSNorm
from wavecrest.nn.rotary import STYLES, RotaryEmbedding, Scaling
from wavecrest.ops import flash_attention, mla_decode, mla_prefill
from wavecrest.ops._mla_decode.call import MAX_TOKENS


class MultiHeadLatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made from one latent a token (DeepSeek-V2, 2024, section 2.1).

    The parameters' names and shapes are those of transformers' DeepSeek attention: `q_proj`, or with `q_lora_rank`
    `q_a_proj`, `q_a_layernorm` and `q_b_proj`; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`. Without a
    cache the keys and values of all heads are made (`flash_attention`). With a cache only latents are stored, and
    queries and results are multiplied by the two halves of `kv_b_proj` (`mla_decode`, `mla_prefill`). Both give
    the same output, up to rounding.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_lora_rank: int = 512,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        max_positions: int = 4096,
        rope_base: float = 10000.0,
        rope_style: str = "gptj",
        rope_scaling: Scaling | None = None,
        softmax_scale: float | None = None,
        eps: float = 1e-6,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer with random parameters.

        Args:
            hidden: columns of the input and the output.
            heads: H. `kv_lora_rank`: R, columns of a latent, 1 to 512. `q_lora_rank`: columns of a query's latent;
                None: queries are made by one GEMM.
            qk_nope_head_dim, qk_rope_head_dim, v_head_dim: Dn, Dr (even, up to 128) and Dv of a head; Dn + Dr and Dv
                up to 256.
            max_positions: rows of the tables of the rotary part. `rope_base`, `rope_scaling`: as of `rope_tables`.
            rope_style: which columns are a pair; DeepSeek's checkpoints have "gptj".
            softmax_scale: None: 1 / √(Dn + Dr).
            eps: of both norms. `bias`: of `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`.

        Raises:
            InvalidArgument: a size is not positive, or a style is unknown.
        """
        super().__init__()
        sizes = {
            "hidden": hidden, "heads": heads, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim,
            "q_lora_rank": 1 if q_lora_rank is None else q_lora_rank,
        }  # fmt: skip
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise InvalidArgument(f"MultiHeadLatentAttention: {name} must be a whole number above 0, got {size!r}")
        if rope_style not in STYLES:
            raise InvalidArgument(f"MultiHeadLatentAttention: rope_style is neox or gptj, not {rope_style!r}")
        self.hidden, self.heads, self.latent = hidden, heads, kv_lora_rank
        self.nope, self.rotary, self.values = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale = (self.nope + self.rotary) ** -0.5 if softmax_scale is None else softmax_scale
        made: Any = {"device": device, "dtype": dtype}
        self.q_lora_rank = q_lora_rank
        columns = heads * (self.nope + self.rotary)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, columns, bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(hidden, q_lora_rank, bias=bias, **made)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps, **made)
            self.q_b_proj = nn.Linear(q_lora_rank, columns, bias=False, **made)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rotary, bias=bias, **made)
        self.kv_a_layernorm = RMSNorm(self.latent, eps, **made)
        self.kv_b_proj = nn.Linear(self.latent, heads * (self.nope + self.values), bias=False, **made)
        self.o_proj = nn.Linear(heads * self.values, hidden, bias=bias, **made)
        self.rotary_emb = RotaryEmbedding(self.rotary, max_positions, rope_base, rope_style, rope_scaling, device)

    def forward(
        self,
        x: Tensor,
        latent_cache: Tensor | None = None,
        seq_lens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """The layer over x [B, T, hidden], the result of the same shape and dtype.

        Args:
            x: the tokens; without a cache whole sequences from place 0 on.
            latent_cache: [B, S, R + Dr], or pages [P, page, R + Dr] with `block_table` int32 [B, pages]. The rows of
                the T tokens are written into it, in place; those before them must be there.
            seq_lens: int32 [B], the length of each sequence with the T tokens, which are its last: at least T and at
                most `max_positions` and what the cache has room for. Not checked.

        Raises:
            InvalidArgument: a cache without lengths, or of another shape or dtype.
        """
        if latent_cache is None:
            if seq_lens is not None or block_table is not None:
                raise InvalidArgument("MultiHeadLatentAttention: seq_lens and block_table go with a latent_cache")
            return self._decompressed(x)
        if seq_lens is None:
            raise InvalidArgument("MultiHeadLatentAttention: a latent_cache needs seq_lens")
        return self._absorbed(x, latent_cache, seq_lens, block_table)

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The queries' two parts, [B, T, H, Dn] and [B, T, H, Dr], the second not yet rotated."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(*x.shape[:2], self.heads, self.nope + self.rotary)
        return q[..., : self.nope], q[..., self.nope :]

    def _rows(self, x: Tensor, places: Tensor | None) -> Tensor:
        """The tokens' rows of the cache, [B, T, R + Dr]: normalized latents, and the rotary part, rotated."""
        rows = self.kv_a_proj_with_mqa(x)
        turned = self.rotary_emb(rows[..., None, self.latent :], places)[..., 0, :]
        return torch.cat((self.kv_a_layernorm(rows[..., : self.latent]), turned), -1)

    def _expansion(self) -> tuple[Tensor, Tensor]:
        """The two parts of `kv_b_proj`, [H, Dn, R] and [H, Dv, R]: views."""
        weight = self.kv_b_proj.weight.view(self.heads, self.nope + self.values, self.latent)
        return weight[:, : self.nope], weight[:, self.nope :]

    def _decompressed(self, x: Tensor) -> Tensor:
        q_nope, q_rope = self._queries(x)
        rows = self._rows(x, None)
        made = self.kv_b_proj(rows[..., : self.latent]).view(*x.shape[:2], self.heads, self.nope + self.values)
        shared = rows[..., None, self.latent :].expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, self.rotary_emb(q_rope)), -1)
        k = torch.cat((made[..., : self.nope], shared), -1)
        y = flash_attention(q, k, made[..., self.nope :], causal=True, softmax_scale=self.scale)
        assert isinstance(y, Tensor)
        out: Tensor = self.o_proj(y.flatten(2))
        return out

    def _absorbed(self, x: Tensor, cache: Tensor, seq_lens: Tensor, block_table: Tensor | None) -> Tensor:
        tokens = x.shape[1]
        q_nope, q_rope = self._queries(x)
        places = seq_lens[:, None] - tokens + torch.arange(tokens, device=x.device, dtype=seq_lens.dtype)
        rows = self._rows(x, places)
        if cache.ndim != 3 or cache.shape[-1] != rows.shape[-1] or cache.dtype != rows.dtype:
            raise InvalidArgument(
                f"MultiHeadLatentAttention: latent_cache must be {rows.dtype} [..., tokens, {rows.shape[-1]}], got "
                f"{cache.dtype} {list(cache.shape)}"
            )
        if block_table is None:
            first = torch.arange(x.shape[0], device=x.device)[:, None]
        else:
            first = block_table.gather(1, (places // cache.shape[1]).long())
        cache.index_put_((first.expand_as(places).long(), places.long() % cache.shape[1]), rows)
        w_uk, w_uv = self._expansion()
        attend = mla_decode if tokens <= MAX_TOKENS else mla_prefill
        y = attend(
            q_nope, q_rope, cache, seq_lens=seq_lens, block_table=block_table, w_uk=w_uk, w_uv=w_uv,
            softmax_scale=self.scale, cos=self.rotary_emb.cos, sin=self.rotary_emb.sin,
            rope_style=self.rotary_emb.style,
        )  # fmt: skip
        assert isinstance(y, Tensor)
        out: Tensor = self.o_proj(y.flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"{self.hidden}, heads={self.heads}, nope={self.nope}, rotary={self.rotary}, values={self.values}"
