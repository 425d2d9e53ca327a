"""SGLang's attention backend, over stand-ins of SGLang 0.5.23's interface with its names and signatures."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.paged_oracle import BATCHES, Requests
from wavecrest.errors import Unsupported
from wavecrest.integrations import sglang as integration

# parameters of SGLang's AttentionBackend, without self
SIGNATURES = {
    "init_forward_metadata": ("forward_batch",),
    "init_forward_metadata_out_graph": ("forward_batch", "in_capture"),
    "init_cuda_graph_state": ("max_bs", "max_num_tokens"),
    "get_cuda_graph_seq_len_fill_value": (),
    "forward_decode": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    "forward_extend": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
}


class MHATokenToKVPool:
    """SGLang's cache: a row a token, keys and values apart."""

    def __init__(self, requests: Requests) -> None:
        flat = requests.cache.reshape(-1, requests.kv_heads, 2 * requests.head_dim)
        self.k, self.v = (one.contiguous() for one in flat.split(requests.head_dim, -1))
        self.dtype = requests.dtype

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        self.k[loc_info[0]], self.v[loc_info[0]] = cache_k, cache_v

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.k, self.v


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules that the integration imports; `backends` and `choices` are what was registered."""
    backends: dict[str, Any] = {}
    choices: list[str] = []
    base = type("AttentionBackend", (), {})
    members = {
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": lambda name: lambda made: backends.setdefault(name, made),
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": base},
        "sglang.srt.server_args": {"add_attention_backend_choices": choices.extend},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": lambda loc, swa_loc: (loc, swa_loc)},
    }
    for name, values in members.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(integration, "_backend", cache(integration._backend.__wrapped__))
    yield SimpleNamespace(backends=backends, choices=choices)


def runner_of(requests: Requests, **changed: Any) -> Any:
    # request i has row i + 1 of the pool: places of its tokens, page by page
    width = requests.block_table.shape[1] * requests.page
    places = requests.block_table.repeat_interleave(requests.page, 1) * requests.page
    rows = places + torch.arange(width) % requests.page
    return SimpleNamespace(
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        token_to_kv_pool=MHATokenToKVPool(requests),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.cat([torch.zeros_like(rows[:1]), rows]).int()),
        page_size=requests.page,
        dtype=requests.dtype,
        **changed,
    )


def batch_of(requests: Requests, decode: bool) -> Any:
    return SimpleNamespace(
        batch_size=len(requests.queries),
        req_pool_indices=torch.arange(1, len(requests.queries) + 1),
        seq_lens=requests.seq_lens.long(),
        seq_lens_cpu=requests.seq_lens.long(),
        extend_seq_lens_cpu=None if decode else requests.queries,
        out_cache_loc=requests.slots,
        forward_mode=SimpleNamespace(is_decode=lambda: decode),
        spec_info=None,
    )


def layer_of(requests: Requests, **changed: Any) -> Any:
    given = {
        "tp_q_head_num": requests.heads, "qk_head_dim": requests.head_dim, "v_head_dim": requests.head_dim,
        "scaling": requests.head_dim**-0.5, "layer_id": 0, "sliding_window_size": 4, "logit_cap": 3.0,
        "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
    }  # fmt: skip
    return SimpleNamespace(**(given | changed))


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("kind", ["decode", "prompts", "chunked", "mixed"])
def test_attention_of_a_batch(sglang: Any, kind: str, page: int) -> None:
    requests = Requests(*BATCHES[kind], heads=4, kv_heads=2, head_dim=16, page=page)
    integration.register()
    backend = sglang.backends["wavecrest"](runner_of(requests))
    batch, layer = batch_of(requests, kind == "decode"), layer_of(requests)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if kind == "decode" else backend.forward_extend
    q = requests.q.reshape(-1, 64)
    found = forward(q, requests.k, requests.v, layer, batch, save_kv_cache=True)
    assert found.shape == q.shape
    wanted = requests.attended(4, 3.0).reshape(-1, 64)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_graph_reads_the_same_memory_for_every_batch(sglang: Any) -> None:
    requests = Requests(*BATCHES["decode"], heads=4, kv_heads=2, head_dim=16, page=8)
    backend = integration.create(runner_of(requests))
    backend.init_cuda_graph_state(6, 6)
    batch, layer = batch_of(requests, True), layer_of(requests)
    seen = set()
    for in_capture in (True, False):
        backend.init_forward_metadata_out_graph(batch, in_capture)
        made = backend.forward_metadata
        seen.add((made.seq_lens.data_ptr(), made.block_table.data_ptr()))
        found = backend.forward_decode(requests.q, requests.k, requests.v, layer, batch)
        torch.testing.assert_close(found.double(), requests.attended(4, 3.0).reshape(-1, 64), rtol=1e-5, atol=1e-5)
    assert len(seen) == 1


def test_what_the_backend_does_not_take_is_refused(sglang: Any) -> None:
    requests = Requests(*BATCHES["decode"], heads=4, kv_heads=2, head_dim=16, page=8)
    for change, reason in (
        ({"use_mla_backend": True}, "latent attention"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross-attention"),
        ({"token_to_kv_pool": SimpleNamespace(dtype=torch.float32)}, "not SimpleNamespace"),
        ({"dtype": torch.bfloat16}, "a cache in torch.bfloat16, not torch.float32"),
    ):
        runner = runner_of(requests)
        vars(runner).update(change)
        with pytest.raises(Unsupported, match=reason):
            integration.create(runner)
    backend = integration.create(runner_of(requests))
    batch = batch_of(requests, True)
    backend.init_forward_metadata(batch)
    with pytest.raises(Unsupported, match="takes decoders"):
        backend.forward_decode(requests.q, None, None, layer_of(requests, is_cross_attention=True), batch)
    with pytest.raises(Unsupported, match="k_rope"):
        backend.forward_decode(requests.q, None, None, layer_of(requests), batch, k_rope=requests.k)
    batch.spec_info = object()
    with pytest.raises(Unsupported, match="speculative"):
        backend.init_forward_metadata(batch)


def test_the_interface_is_sglangs(sglang: Any) -> None:
    backend = integration._backend()
    for name, names in SIGNATURES.items():
        found = inspect.signature(getattr(backend, name)).parameters
        assert tuple(one for one in found if one not in ("self", "options")) == names


def test_the_pinned_interface_is_sglangs() -> None:
    pytest.importorskip("sglang", reason="needs the package sglang")
    if importlib.util.find_spec("sglang.srt.layers.attention.base_attn_backend") is None:
        pytest.skip("this sglang has no attention backends")
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    for name, names in SIGNATURES.items():
        found = inspect.signature(getattr(base, name)).parameters
        assert tuple(one for one in found if one not in ("self", "kwargs")) == names


def test_registering_twice_changes_nothing_and_sglang_finds_the_plugin(sglang: Any) -> None:
    integration.register()
    integration.register()
    assert sglang.choices == ["wavecrest"] and sglang.backends == {"wavecrest": integration.create}
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    target = tomllib.loads(text)["project"]["entry-points"]["sglang.srt.plugins"]["wavecrest"]
    assert target == f"{integration.__name__}:{integration.register.__name__}"
