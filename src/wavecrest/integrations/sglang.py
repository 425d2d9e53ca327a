"""wavecrest's attention inside SGLang: the plugin that SGLang loads, and the backend it registers.

Written against SGLang 0.5.23. The backend runs where the user names it: `--attention-backend wavecrest`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wavecrest.errors import Unsupported
from wavecrest.integrations._paged import Batch, attend

NAME = "wavecrest"
_ATTENTION = "sglang.srt.layers.attention"


def register() -> None:
    """Register the backend; SGLang calls this in each of its processes (entry point `sglang.srt.plugins`)."""
    registry = importlib.import_module(f"{_ATTENTION}.attention_registry")
    if NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(NAME)(create)
        importlib.import_module("sglang.srt.server_args").add_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """The backend of a model runner of SGLang.

    Raises:
        Unsupported: the model or its cache is of a kind that the backend does not take.
    """
    if runner.use_mla_backend:
        raise Unsupported("--attention-backend wavecrest takes no multi-head latent attention")
    if runner.model_config.is_encoder_decoder:
        raise Unsupported("--attention-backend wavecrest takes no cross-attention")
    pool = runner.token_to_kv_pool
    if type(pool).__name__ != "MHATokenToKVPool":
        raise Unsupported(f"--attention-backend wavecrest takes SGLang's MHATokenToKVPool, not {type(pool).__name__}")
    if pool.dtype != runner.dtype:
        raise Unsupported(f"--attention-backend wavecrest takes a cache in {runner.dtype}, not {pool.dtype}")
    return _backend()(runner)


@cache
def _backend() -> type:
    base = importlib.import_module(f"{_ATTENTION}.base_attn_backend").AttentionBackend

    class Attention(base):  # type: ignore[misc, valid-type]
        """Decoder attention over SGLang's pages on `flash_decoding` and `flash_attention`."""

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.pool, self.requests = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
            self.page = runner.page_size
            # pages of the longest request
            self.width = -(-self.requests.shape[1] // self.page)
            self.table: Tensor | None = None
            self.lengths: Tensor | None = None
            self.forward_metadata: Batch | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Before a batch that runs in eager."""
            self.forward_metadata = self._batch(forward_batch, self._pages(forward_batch))

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Memory that captured graphs read: pages and lengths of each request."""
            device = self.requests.device
            self.table = torch.zeros(max_bs, self.width, dtype=torch.int32, device=device)
            self.lengths = torch.ones(max_bs, dtype=torch.int32, device=device)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Before a decoding batch that is captured or replayed: fill what the graph reads."""
            assert self.table is not None and self.lengths is not None
            count = forward_batch.batch_size
            self.table[:count].copy_(self._pages(forward_batch))
            self.lengths[:count].copy_(forward_batch.seq_lens[:count])
            self.forward_metadata = self._batch(forward_batch, self.table[:count], self.lengths[:count])

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            """Keys of a request that stands for none in a padded batch."""
            return 1

        def _pages(self, batch: Any) -> Tensor:
            """int32 [requests, pages]: SGLang keeps the place of each token, and pages lie whole."""
            first = self.requests[batch.req_pool_indices, :: self.page]
            return torch.div(first, self.page, rounding_mode="floor").int()

        def _batch(self, batch: Any, table: Tensor, lengths: Tensor | None = None) -> Batch:
            if batch.spec_info is not None:
                raise Unsupported("--attention-backend wavecrest takes no speculative decoding yet")
            on_host = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            asked = torch.ones(len(on_host)) if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu
            starts = torch.nn.functional.pad(torch.as_tensor(asked).cumsum(0).int(), (1, 0))
            seq_lens = batch.seq_lens.int() if lengths is None else lengths
            return Batch.of(starts, on_host, seq_lens, table, batch.out_cache_loc, self.page)

        def forward_decode(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
            **options: Any,
        ) -> Tensor:  # fmt: skip
            """Attention of one token a request: q [tokens, Hq · D] to [tokens, Hq · Dv]."""
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **options)

        def forward_extend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
            **options: Any,
        ) -> Tensor:  # fmt: skip
            """Attention of chunks of prompts: q [tokens, Hq · D] to [tokens, Hq · Dv]."""
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **options)

        def _attend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool, sinks: Tensor | None = None,
            **others: Any,
        ) -> Tensor:  # fmt: skip
            given = sorted(name for name, value in others.items() if value is not None)
            if (
                layer.is_cross_attention
                or str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder"
                or given
            ):
                raise Unsupported(
                    f"--attention-backend wavecrest takes decoders, not {layer.attn_type} with {given or 'nothing'}"
                )
            assert self.forward_metadata is not None
            if save and k is not None:
                place = importlib.import_module("sglang.srt.mem_cache.memory_pool").KVWriteLoc
                self.pool.set_kv_buffer(layer, place(batch.out_cache_loc, None), k, v)
            k_cache, v_cache = (
                one.view(-1, self.page, *one.shape[1:]) for one in self.pool.get_kv_buffer(layer.layer_id)
            )
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            found = attend(
                self.forward_metadata, heads, None, k_cache, v_cache, softmax_scale=layer.scaling,
                window=layer.sliding_window_size, softcap=layer.logit_cap, sinks=sinks,
            )  # fmt: skip
            return found.view(len(q), layer.tp_q_head_num * layer.v_head_dim)

    return Attention
