"""Attention of decoding requests and chunks of prompts over pages, against a float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.paged_oracle import BATCHES, Requests
from wavecrest.integrations import _paged

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def batch_of(requests: Requests) -> _paged.Batch:
    return _paged.Batch.of(
        requests.starts, requests.seq_lens, requests.seq_lens, requests.block_table, requests.slots, requests.page
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_the_oracles(kind: str, options: str) -> None:
    given = OPTIONS[options]
    requests = Requests(*BATCHES[kind], heads=4, kv_heads=2, head_dim=16, page=8)
    k_cache, v_cache = requests.cache.split(16, -1)
    found = _paged.attend(
        batch_of(requests), requests.q, (requests.k, requests.v), k_cache, v_cache, softmax_scale=0.25, **given
    )
    names = {"alibi_slopes": "slopes"}
    wanted = requests.attended(**{names.get(name, name): value for name, value in given.items()})
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(requests.written().double(), torch.cat(requests.keys))


@pytest.mark.parametrize("kind", ["mixed", "prompts"])
def test_a_layer_that_shares_a_cache_reads_it(kind: str) -> None:
    requests = Requests(*BATCHES[kind], heads=4, kv_heads=4, head_dim=16, page=8)
    k_cache, v_cache = requests.cache.split(16, -1)
    first = _paged.attend(
        batch_of(requests), requests.q, (requests.k, requests.v), k_cache, v_cache, softmax_scale=0.25
    )
    before = requests.cache.clone()
    again = _paged.attend(batch_of(requests), requests.q, None, k_cache, v_cache, softmax_scale=0.25)
    torch.testing.assert_close(again, first)
    assert torch.equal(requests.cache, before) or bool(requests.cache.isnan().eq(before.isnan()).all())


def test_how_requests_are_divided() -> None:
    def of(queries: list[int]) -> tuple[int, int, bool]:
        requests = Requests([4] * len(queries), queries, heads=2, kv_heads=1, head_dim=8, page=4)
        batch = batch_of(requests)
        return batch.decodes, batch.queries, batch.prompts is not None

    assert of([1, 1, 1]) == (3, 1, False)
    assert of([1, 1, 5]) == (2, 1, True)
    assert of([2, 2, 1]) == (2, 2, True)
    assert of([17, 1]) == (0, 1, True)
    assert of([16]) == (1, 16, False)
    # requests without a query cost nothing
    assert of([1, 0, 0]) == (1, 1, False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_on_a_gpu(kind: str) -> None:
    requests = Requests(*BATCHES[kind], heads=8, kv_heads=2, head_dim=64, page=16, dtype=torch.bfloat16)
    batch, cache, (q, k, v) = on_gpu(requests)
    found = _paged.attend(batch, q, (k, v), *cache.split(64, -1), softmax_scale=0.125)
    torch.testing.assert_close(found.cpu().double(), requests.attended(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_captured_batch_follows_its_lengths() -> None:
    """A graph of decoding requests replays with other lengths, and with requests that padding takes the place of."""
    requests = Requests([5, 20, 31, 16], [1, 1, 1, 1], heads=8, kv_heads=2, head_dim=64, page=16, dtype=torch.bfloat16)
    batch, cache, (q, k, v) = on_gpu(requests)
    caches = cache.split(64, -1)
    _paged.attend(batch, q, (k, v), *caches, softmax_scale=0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _paged.attend(batch, q, (k, v), *caches, softmax_scale=0.125)
    graph.replay()
    torch.testing.assert_close(found.cpu().double(), requests.attended(), rtol=2e-2, atol=2e-2)
    before = found[:3].clone()
    written = cache.clone()
    batch.seq_lens[3] = 0
    k[3] = v[3] = 7.0
    graph.replay()
    assert torch.equal(found[:3], before) and not found[3].any()
    # the request that is not there writes nothing
    torch.testing.assert_close(cache, written, equal_nan=True, rtol=0, atol=0)


def on_gpu(requests: Requests) -> tuple[_paged.Batch, torch.Tensor, list[torch.Tensor]]:
    """The batch, the cache and the new queries, keys and values, on the GPU."""
    table, lengths, slots = (one.cuda() for one in (requests.block_table, requests.seq_lens, requests.slots))
    batch = _paged.Batch.of(requests.starts, requests.seq_lens, lengths, table, slots, requests.page)
    return batch, requests.cache.cuda(), [one.cuda() for one in (requests.q, requests.k, requests.v)]
