"""Key-value caches in 8 and 4 bits: only the format's rounding lies between a model's answers with them and without."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.dispatch import registry
from wavecrest.errors import CheckpointError, InvalidArgument, QualityNotMet, Unsupported, WorkloadError
from wavecrest.measure.timing import Interval, Paired
from wavecrest.nn import attention as ours
from wavecrest.nn import kv_store
from wavecrest.nn.kv_store import FORMATS, KVStore
from wavecrest.ops.common.quantized import LARGEST
from wavecrest.ops.packed.cache import dequantize, quantize_cache_8bit
from wavecrest.optimizer.steps.replace_attention import use_attention

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

import wavecrest  # noqa: E402
from wavecrest.integrations import generate  # noqa: E402
from wavecrest.integrations.transformers import quantized_cache  # noqa: E402
from wavecrest.quantizer import kv_cache  # noqa: E402
from wavecrest.quantizer.kv_cache import QuantizedStaticCache, argument_of  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, WINDOW, PROMPT, STEPS = 61, 5, 20, 64
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**SMALL, "hidden_size": 256}, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=24, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=20
    ),
}  # fmt: skip


def made(name: str, layers: int = 2) -> Any:
    """A model on wavecrest's attention whose scores differ enough for a wrong key to show."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.num_hidden_layers = layers
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in path:
                parameter.normal_(std=0.15 if name != "qwen2" else 0.06)
    return use_attention(model)


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(DEVICE)


def by_name(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The cache as an argument, under the name that this version of transformers has for it."""
    return {} if cache is None else {argument_of(model): cache}


def logits(model: nn.Module, tokens: Tensor, cache: Any = None, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **by_name(model, cache), **more).logits  # type: ignore[no-any-return]


def pieces(model: nn.Module, tokens: Tensor, cache: Any, sizes: list[int]) -> Tensor:
    return torch.cat([logits(model, part, cache=cache) for part in tokens.split(sizes, 1)], 1)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def held(store: KVStore, count: int) -> list[Tensor]:
    """Keys and values of the first tokens, [B, Hk, count, D], from the stored bits in float64."""
    found, slots = [], [token % store.slots for token in range(count)]
    for values, scale, shift in ((store.k, store.k_scale, store.k_shift), (store.v, store.v_scale, store.v_shift)):
        rows, factors = torch.stack([values[:, at] for at in slots], 2), scale.double()[:, slots].transpose(1, 2)
        if shift is None:
            found.append(rows.double() * factors)
            continue
        parts = rows.unflatten(-1, (factors.shape[-1], -1))
        whole = torch.cat((parts & 15, parts >> 4), -1).double()
        shifts = shift.double()[:, slots].transpose(1, 2)
        found.append((whole * factors[..., None] + shifts[..., None]).flatten(-2))
    return found


class Oracle(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """Gives a model in float64 the keys and values that a quantized layer holds, and remembers its own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.is_sliding, self.own, self.is_initialized = layer, layer.is_sliding, [], True

    def lazy_initialization(self, *_: Any) -> None: ...

    @property
    def count(self) -> int:
        return sum(k.shape[2] for k, _ in self.own)

    def update(self, k: Tensor, v: Tensor, *_: Any, **_more: Any) -> Any:
        # written-out attention gives NaN for a query that sees nothing, at padding
        k, v = k.nan_to_num(), v.nan_to_num()
        self.own.append((k, v))
        # a prompt sees its own, unrounded
        return (k, v) if len(self.own) == 1 else held(self.layer.store, self.count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.count + query_length, 0

    def get_seq_length(self) -> int:
        return self.count

    def get_max_length(self) -> int:
        return -1


def largest_rounding(store: KVStore, x: Tensor) -> Tensor:
    """How far a value [..., D] may be off after it was stored; the definition of each format, written once more."""
    if store.format == "int4":
        groups = store.k_scale.shape[-1]
        parts = x.unflatten(-1, (groups, -1))
        step = (parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / 15
        # scale and shift are rounded to float16 too
        return (0.5 * step + 2**-11 * (parts.abs().amax(-1, keepdim=True) * 2)).expand_as(parts).flatten(-2) * 1.01
    peak = x.abs().amax(-1, keepdim=True)
    scale = peak / LARGEST[store.k.dtype]
    if store.format == "int8":
        return (0.5 * scale + 2**-11 * peak).expand_as(x) * 1.01
    # 3 bits of mantissa; below the smallest normal number 2⁻⁶ steps of 2⁻⁹
    return torch.maximum(x.abs() * 2**-4, scale * 2**-10) + 2**-11 * peak


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of the tests' size are kept in pages, which are used again."""
    monkeypatch.setattr(kv_store, "PAGE", 8)


@pytest.mark.parametrize(
    ("name", "format"), [("llama", "fp8"), ("llama", "int8"), ("llama", "int4"), ("qwen2", "int4"), ("gemma2", "fp8")]
)
def test_steps_read_what_was_stored(name: str, format: str, small_pages: None) -> None:
    model = made(name)
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("eager")
    steps = STEPS if name == "llama" and format != "int8" else STEPS // 2
    tokens = ids(2, PROMPT + steps)
    shown = torch.ones_like(tokens)
    shown[1, :3] = 0
    places = (shown.cumsum(-1) - 1).clamp(min=0)
    cache = QuantizedStaticCache(model, PROMPT + steps, format)
    oracle = cache_utils.Cache(layers=[Oracle(layer) for layer in cache.layers])
    if name != "llama":
        assert sorted(layer.is_sliding for layer in cache.layers) == [False, True]
    plain, stored = logits(model, tokens, attention_mask=shown, position_ids=places), []
    begin = 0
    for size in (PROMPT, *[1] * (steps - 5), 5):
        now = slice(begin, begin + size)
        more = {"attention_mask": shown[:, : begin + size], "position_ids": places[:, now]}
        with ours.watching() as calls:
            got = logits(model, tokens[:, now], cache=cache, **more)
        # over the bits as they lie: nothing is dequantized
        assert {call.decision.op for call in calls if call.decision} == {
            "flash_attention" if size == PROMPT else "flash_decoding"
        }
        want = logits(wide, tokens[:, now], cache=oracle, **more)
        if begin == 0:
            got, want = got[:, 3:], want[:, 3:]
        assert off(got, want) < 2e-5
        stored.append(got)
        begin += size
    for layer, truth in zip(cache.layers, oracle.layers, strict=True):
        assert int(layer.cumulative_length) == begin
        # of a window, the tokens that the last queries saw
        kept = slice(begin - WINDOW - 4 if layer.store.pages else 0, begin)
        assert (layer.store.slots < begin) == layer.is_sliding
        for at, found in enumerate(held(layer.store, begin)):
            x = torch.cat([pair[at] for pair in truth.own], 2)
            limit = largest_rounding(layer.store, x) + 1e-5 * x.abs().amax(-1, keepdim=True)
            # padding's own keys are NaN or 0, and nobody's
            assert ((found - x).abs() <= limit)[:, :, kept][:, :, 3:].all()
    assert 0 < off(torch.cat(stored, 1)[0], plain[0, 3:]) < {"fp8": 0.1, "int8": 0.03, "int4": 0.4}[format]


def test_the_error_is_that_of_the_format() -> None:
    model, tokens = made("llama"), ids(2, PROMPT + STEPS)
    want = logits(model, tokens)
    found = {}
    for format in FORMATS:
        cache = QuantizedStaticCache(model, PROMPT + STEPS, format)
        found[format] = off(pieces(model, tokens, cache, [PROMPT, *[16] * 4])[:, PROMPT:], want[:, PROMPT:])
        assert cache.nbytes == sum(one.nbytes for layer in cache.layers for one in layer.store.tensors())
        plain = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
        logits(model, tokens[:, :2], cache=plain)
        assert cache.nbytes_unquantized == sum(one.keys.nbytes + one.values.nbytes for one in plain.layers)
        # 16 values of 32 bits, and scales of 16
        assert cache.nbytes * 64 == cache.nbytes_unquantized * {"fp8": 18, "int8": 18, "int4": 12}[format]
    assert 1e-4 < found["int8"] < found["fp8"] < found["int4"]


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_the_kernel(format: str) -> None:
    pytest.importorskip("triton", reason="runs the kernel")
    model, tokens = made("llama"), ids(2, 22)
    cache, other = (QuantizedStaticCache(model, 24, format) for _ in range(2))
    want = pieces(model, tokens, cache, [20, 1, 1])
    registry.get("flash_decoding").force("triton")
    got = pieces(model, tokens, other, [20, 1, 1])
    assert off(got, want) < 1e-4
    for one, two in zip(cache.layers, other.layers, strict=True):
        # the kernel's bits are those that a prompt's tokens get, but where a sum fell on the other side of a half
        for x, y in zip(held(one.store, 22), held(two.store, 22), strict=True):
            assert torch.equal(x[:, :, :20], y[:, :, :20]) and off(y, x) < 0.02


@pytest.mark.parametrize("format", FORMATS)
def test_stored_bits_do_not_depend_on_the_way(format: str) -> None:
    """Written by the op a few at a time, or all at once; also beyond a window, and after a reset."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 21, 12, device=DEVICE), torch.randn(2, 2, 21, 8, device=DEVICE)
    k[0, 1, 4], v[1, 0, 7] = 0.0, 1e-9
    one, two = (KVStore(format, 2, 24, 2, 12, 8, DEVICE) for _ in range(2))
    one.write(k.transpose(1, 2), v.transpose(1, 2), torch.tensor(0, device=DEVICE))
    end = 0
    for size in (16, 1, 4):
        new = slice(end, end + size)
        end += size
        ends = torch.full((2,), end, dtype=torch.int32, device=DEVICE)
        q = torch.randn(2, size, 4, 12, device=DEVICE)
        ours._flash_decoding(two.call(q, k[:, :, new].transpose(1, 2), v[:, :, new].transpose(1, 2), ends))
    for x, y in zip(one.tensors(), two.tensors(), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    for (x, y), whole in zip(zip(one.read(21, torch.float64), held(one, 21), strict=True), (k, v), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
        assert ((x - whole).abs() <= largest_rounding(one, whole.double()) + 1e-6).all()
    one.clear()
    assert not any(x.view(torch.uint8).any() for x in one.tensors())


def test_a_window_keeps_what_its_queries_see(small_pages: None) -> None:
    torch.manual_seed(0)
    k = torch.randn(2, 100, 2, 16, device=DEVICE)
    ring = KVStore("int8", 2, 100, 2, 16, 16, DEVICE, window=WINDOW)
    assert (ring.slots, ring.pages) == (32, 4) and ring.table is not None and ring.table.shape == (2, 13)
    assert ring.nbytes < KVStore("int8", 2, 100, 2, 16, 16, DEVICE).nbytes / 2
    begin = 0
    for size in (70, 16, 3, 11):
        ring.write(k[:, begin : begin + size], k[:, begin : begin + size], torch.tensor(begin, device=DEVICE))
        begin += size
        first = max(begin - size - WINDOW + 1, begin - ring.slots, 0)
        keys, values = ring.read(begin, torch.float32)
        assert off(keys[:, :, first:].transpose(1, 2), k[:, first:begin]) < 0.02 and torch.equal(keys, values)
    # no smaller than all tokens
    assert KVStore("int8", 2, 30, 2, 16, 16, DEVICE, window=WINDOW).table is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_long_part_behind_others_is_dequantized_and_says_so(
    name: str, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_warned", set())
    model, tokens = made(name), ids(2, 61)
    cache, want = QuantizedStaticCache(model, 64, "int8"), logits(model, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = [logits(model, tokens[:, :20], cache=cache)]
    text = "a dequantized copy of a quantized cache for 40 queries behind"
    with pytest.warns(ours.AttentionFallback, match=text), ours.watching() as calls:
        got.append(logits(model, tokens[:, 20:60], cache=cache))
    assert all("its cache is dequantized for 40 queries" in call.reason for call in calls)
    got.append(logits(model, tokens[:, 60:], cache=cache))
    assert 0 < off(torch.cat(got, 1)[:, 20:], want[:, 20:]) < 0.03
    # the new ones were not rounded before they were seen
    assert off(got[0], want[:, :20]) < 1e-5


def test_padding_at_the_right_is_dequantized_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_warned", set())
    model, tokens = made("llama"), ids(2, 24)
    shown = torch.ones_like(tokens)
    shown[1, 12:18] = 0
    places = (shown.cumsum(-1) - 1).clamp(min=0)
    want = logits(model, tokens, attention_mask=shown, position_ids=places)
    cache = QuantizedStaticCache(model, 32, "int8")
    got = [logits(model, tokens[:, :18], attention_mask=shown[:, :18], position_ids=places[:, :18], cache=cache)]
    with pytest.warns(ours.AttentionFallback, match="dequantized copy of a quantized cache for a mask that"):
        for at in range(18, 24):
            now, more = slice(at, at + 1), {"attention_mask": shown[:, : at + 1]}
            got.append(logits(model, tokens[:, now], position_ids=places[:, now], cache=cache, **more))
    seen = shown.bool()
    assert 0 < off(torch.cat(got, 1)[seen], want[seen]) < 0.03


def test_rows_are_exchanged_tokens_taken_back_and_everything_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = made("llama"), ids(2, 40)
    cache = QuantizedStaticCache(model, 48, "int4")
    want = pieces(model, tokens, cache, [24, 8, 8])
    memory = [one.data_ptr() for layer in cache.layers for one in layer.store.tensors()]
    # again, after a reset that leaves nothing behind: with larger keys between
    cache.reset()
    pieces(model, tokens.flip(0, 1)[:, :30], cache, [30])
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(pieces(model, tokens, cache, [24, 8, 8]), want)
    # the last eight taken back, others in their place, and these taken back too
    cache.crop(-8)
    assert not torch.equal(logits(model, tokens[:, :8], cache=cache), want[:, 32:])
    cache.crop(-8)
    assert torch.equal(logits(model, tokens[:, 32:], cache=cache), want[:, 32:])
    # each row goes on from the other's tokens
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
    torch.testing.assert_close(logits(model, tokens[:, 32:].flip(0), cache=cache), want[:, 32:].flip(0))
    cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
    for layer in cache.layers:
        assert all(torch.equal(one[0].view(torch.uint8), one[1].view(torch.uint8)) for one in layer.store.tensors())
    assert memory == [one.data_ptr() for layer in cache.layers for one in layer.store.tensors()]
    monkeypatch.setattr(kv_cache, "_CROPS_TO_LENGTH", False)
    with pytest.raises(InvalidArgument, match="minus the number of tokens"):
        cache.crop(3)
    # transformers before 5.15 says how many are kept, which is never more than there are
    monkeypatch.setattr(kv_cache, "_CROPS_TO_LENGTH", True)
    cache.crop(24)
    torch.testing.assert_close(logits(model, tokens[[0, 0], 24:32], cache=cache), want[[0, 0], 24:32])
    cache.crop(40)
    assert int(cache.get_seq_length()) == 32


def test_a_cache_has_its_size_beside_a_property_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.20 transformers' own caches have one of this name, which cannot be set."""
    monkeypatch.setattr(cache_utils.Cache, "max_cache_len", property(lambda self: -1), raising=False)
    cache = QuantizedStaticCache(made("llama"), 24)
    assert cache.max_cache_len == 24 == cache.layers[0].get_max_length()


def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama"]()
    config._attn_implementation = "wavecrest"
    model = transformers.AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(transformers, "__version__", "5.13.1")
    text = r"a quantized key-value cache needs transformers 5\.14 or later, .* this is 5\.13\.1"
    for make in (lambda: QuantizedStaticCache(model, 8), lambda: wavecrest.quantize(model, "int8", kv_cache="fp8")):
        with pytest.raises(Unsupported, match=text):
            make()
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(WorkloadError, match=r"--generate needs transformers 5\.4 or later, .* this is 4\.57\.6"):
        generate.of(model, ids(1, 4), {"max_new_tokens": 2})


def test_generate_is_a_loop_over_steps() -> None:
    model, tokens = made("llama"), ids(3, 20)
    shown = torch.ones_like(tokens)
    shown[1, :7] = 0
    cache = QuantizedStaticCache(model, 32, "int4")
    with torch.no_grad():
        found = model.generate(tokens, attention_mask=shown, max_new_tokens=9, do_sample=False, **by_name(model, cache))
    cache, made_here, place = QuantizedStaticCache(model, 32, "int4"), tokens, (shown.cumsum(-1) - 1).clamp(min=0)
    new = tokens
    for _ in range(9):
        token = logits(model, new, attention_mask=shown, position_ids=place, cache=cache)[:, -1].argmax(-1)
        new, place = token[:, None], place[:, -1:] + 1
        made_here, shown = torch.cat((made_here, new), 1), torch.cat((shown, torch.ones_like(new)), 1)
    assert torch.equal(found, made_here)
    assert len(set(found[0, 20:].tolist())) > 2


def test_beams_keep_their_own_tokens() -> None:
    model, tokens = made("llama"), ids(2, 18)
    options = {"max_new_tokens": 7, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    with torch.no_grad():
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), **by_name(model, QuantizedStaticCache(model, 32, "int8")),
            return_dict_in_generate=True, output_scores=True, length_penalty=0.0, **options,
        )  # fmt: skip
    # each sequence's probability, of a cache whose rows stay where they are
    text, cache = found.sequences, QuantizedStaticCache(model, 32, "int8")
    steps = [18, *[1] * 7]
    logp = pieces(model, text, cache, steps).log_softmax(-1)[:, 17:-1]
    want = logp.gather(-1, text[:, 18:, None]).sum((1, 2))
    torch.testing.assert_close(found.sequences_scores, want, rtol=1e-4, atol=1e-4)
    assert len({tuple(row) for row in text.tolist()}) == 6


@pytest.mark.parametrize(("name", "backend"), [("llama", "aot_eager"), ("gemma2", "eager")])
def test_a_compiled_step_is_one_graph_at_every_position(name: str, backend: str, small_pages: None) -> None:
    # where layers are of one kind one is enough; a window's pages are used again
    model, tokens = made(name, 1 if name == "llama" else 2), ids(2, 44)
    cache, other = (QuantizedStaticCache(model, 64, "int8") for _ in range(2))
    want = pieces(model, tokens, cache, [20, *[1] * 24])
    logits(model, tokens[:, :20], cache=other)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model, fullgraph=True, backend=backend)
    got = torch.cat([logits(step, tokens[:, at : at + 1], cache=other) for at in range(20, 44)], 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # a value that rounds to the other side moves the answers by a part of the format's error
    assert off(got, want[:, 20:]) < 5e-3


def test_what_is_refused() -> None:
    model, tokens = made("llama"), ids(1, 4)
    with pytest.raises(InvalidArgument, match="stored as fp8, int8, int4, not 'int2'"):
        QuantizedStaticCache(model, 8, "int2")
    with pytest.raises(InvalidArgument, match="at least 1 token"):
        QuantizedStaticCache(model, 0)
    with pytest.raises(Unsupported, match="for transformers models, not for Linear"):
        QuantizedStaticCache(nn.Linear(2, 2), 8)
    cache = QuantizedStaticCache(model, 8, "int4")
    # the model's attention is changed after the cache was made
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with pytest.raises(Unsupported, match=r"use_attention\(model\)"):
            logits(model, tokens, cache=cache)
        with pytest.raises(Unsupported, match=rf"has {name} attention.*use_attention"):
            QuantizedStaticCache(model, 8)
    use_attention(model)
    with pytest.raises(InvalidArgument, match="without gradients"):
        model(tokens, **by_name(model, QuantizedStaticCache(model, 8)))
    logits(model, tokens, cache=(cache := QuantizedStaticCache(model, 8)))
    with pytest.raises(InvalidArgument, match="of 1 sequences got 2"):
        logits(model, ids(2, 1), cache=cache)
    with pytest.raises(Unsupported, match="needs an even head_dim"):
        KVStore("int4", 1, 8, 1, 7, 8, DEVICE)
    with pytest.raises(Unsupported, match="at most 256"):
        KVStore("fp8", 1, 8, 1, 300, 8, DEVICE)
    mamba = transformers.Zamba2Config if hasattr(transformers, "Zamba2Config") else None
    if mamba is not None:
        other = nn.Module()
        other.config = mamba(num_hidden_layers=2, layers_block_type=["mamba", "hybrid"])  # type: ignore[assignment]
        other.config._attn_implementation = "wavecrest"  # type: ignore[union-attr]
        with pytest.raises(Unsupported, match="only keys and values are quantized"):
            QuantizedStaticCache(other, 8)


@pytest.mark.skipif(DEVICE == "cuda", reason="the assertion ends the process's use of the device")
def test_more_tokens_than_fit_are_an_error() -> None:
    model, tokens = made("llama"), ids(1, 9)
    cache = QuantizedStaticCache(model, 8, "fp8")
    logits(model, tokens[:, :8], cache=cache)
    with pytest.raises(RuntimeError, match="more tokens than the key-value cache has room for"):
        logits(model, tokens[:, 8:], cache=cache)


def test_rows_in_8_bits() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -0.3], [float("nan"), 1.0]])
    for to in (torch.int8, torch.float8_e4m3fn):
        values, scale = quantize_cache_8bit(x, to, dtype=torch.float32)
        assert values.dtype == to and scale.shape == (3, 1)
        assert torch.equal(values[0].float(), torch.zeros(2)) and float(values[1, 0].float()) == LARGEST[to]
        assert not scale[2].isfinite() and scale[:2].isfinite().all()
    for bad in ({"to": torch.int16}, {"to": torch.int8, "dtype": torch.float64}):
        with pytest.raises(InvalidArgument, match="quantize_cache_8bit: rounds to one of"):
            quantize_cache_8bit(x, **bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="quantize_cache_8bit: x must be"):
        quantize_cache_8bit(x.int(), torch.int8)
    assert (
        dequantize(torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1), torch.ones(1, 1), torch.float32).sum() == 2
    )


def test_the_report_has_the_error_of_the_cache() -> None:
    model, tokens = made("llama"), ids(2, 35)
    padded = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    # at the right, as tokenizers pad, and nothing is dequantized for it
    padded["attention_mask"][1, 30:] = 0
    want, kl, rows = logits(model, tokens).double().log_softmax(-1), {}, {}
    for format in FORMATS:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ours.AttentionFallback)
            found = wavecrest.quantize(model, None, kv_cache=format, calibration=padded)
        row = rows[format] = found.report.kv_cache
        assert row is not None and row.quality == found.report.quality and row.quality is not None
        kl[format] = row.quality.kl
        # fewer tokens at a time give the same answers
        cache = found.cache(35)
        got = pieces(model, tokens, cache, [1] * 35 if format == "int4" else [5] * 7).double().log_softmax(-1)
        terms = (want.exp() * (want - got)).sum(-1)[padded["attention_mask"].bool()]
        assert kl[format] == pytest.approx(float(terms.mean()), rel=0.05)
        assert (row.sequences, row.tokens, row.bytes_after) == (2, 35, cache.nbytes)
        assert row.bytes_before == cache.nbytes_unquantized
        assert found.formats == {} and not found.report.layers and f"cache in {format}, 2 × 35" in str(found.report)
        assert format in repr(found)
    assert 0 < kl["int8"] < kl["fp8"] < kl["int4"]
    with pytest.raises(QualityNotMet, match=r"the key-value cache alone is not within the limits.*kl"):
        wavecrest.quantize(model, None, kv_cache="int4", calibration=padded, quality={"kl": kl["int4"] / 2})
    # with layers too: the cache by itself, and everything together, which the limit is on
    before = logits(model, tokens)
    found = wavecrest.quantize(model, "int8", kv_cache="int4", calibration=padded, quality={"kl": kl["int4"] * 3})
    report = found.report
    assert report.kv_cache == rows["int4"] and report.quality is not None and report.quality != rows["int4"].quality
    assert "by itself" in str(report) and found.formats
    found.restore()
    assert torch.equal(logits(model, tokens), before)


def test_without_inputs_a_cache_is_made_all_the_same() -> None:
    model = made("llama")
    found = wavecrest.quantize(model, None, kv_cache="int8")
    assert found.report.quality is None and "key-value cache in int8" in str(found.report)
    assert found.cache(9).format == "int8" == quantized_cache(model, 9, "int8").format
    found.restore()
    for options, text in (
        ({"format": None}, "format=None quantizes no layer"),
        ({"format": None, "kv_cache": "fp8", "keep": ["a"]}, "format=None quantizes no layer"),
        ({"kv_cache": "nf4"}, "stored as fp8, int8, int4, not 'nf4'"),
        ({"kv_cache": "fp8", "calibration": {"input_ids": ids(1, 4), "position_ids": ids(1, 4)}}, "got position_ids"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            wavecrest.quantize(model, **options)
    with pytest.raises(InvalidArgument, match="without kv_cache"):
        wavecrest.quantize(model, "int8").cache(9)
    other = made("llama")
    other.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match=r"sdpa attention.*use_attention"):
        wavecrest.quantize(other, "int8", kv_cache="fp8")


def test_files_keep_the_format(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, tokens = made("llama"), ids(1, 20)
    for format in ("int8", None):
        found = wavecrest.quantize(model, format, kv_cache="int4")
        found.save(tmp_path / "model.safetensors")
        want = logits(model, tokens, cache=found.cache(20))
        other = wavecrest.load_quantized(made("llama"), tmp_path / "model.safetensors")
        assert other.kv_cache == "int4" and other.report.kv_cache is not None
        assert torch.equal(logits(other.model, tokens, cache=other.cache(20)), want)
        found.restore()
    wavecrest.quantize(model, "int8").save(tmp_path / "model.safetensors")
    assert wavecrest.load_quantized(made("llama"), tmp_path / "model.safetensors").kv_cache is None
    held_now = safetensors.load_file(tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["wavecrest"])
    for kind, entry in (("newer", {"kv_cache": "nf4"}), ("older", {})):
        about.pop("kv_cache", None)
        safetensors.save_file(held_now, tmp_path / kind, metadata={"wavecrest": json.dumps(about | entry)})
    with pytest.raises(CheckpointError, match="cache of unknown format: nf4"):
        wavecrest.load_quantized(made("llama"), tmp_path / "newer")
    assert wavecrest.load_quantized(made("llama"), tmp_path / "older").kv_cache is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_as_a_workload(name: str, small_pages: None) -> None:
    model, tokens = made(name), ids(2, 37)
    workload = generate.of(model, tokens, {"max_new_tokens": 8, "kv_cache": "int4"})
    found = workload.generate()
    assert torch.equal(found, workload.by_library()) and len(set(found[0, 37:].tolist())) > 2
    cache, new, made_here = QuantizedStaticCache(model, 45, "int4"), tokens, tokens
    for _ in range(8):
        new = logits(model, new, cache=cache)[:, -1:].argmax(-1)
        made_here = torch.cat((made_here, new), 1)
    assert torch.equal(found, made_here)
    want = {bucket: workload.run(bucket) for bucket in ("decode", "prompt")}
    for bucket in ("prompt", "decode", "decode", "prompt"):
        assert torch.equal(workload.run(bucket), want[bucket])
    # nothing without being asked
    if name == "llama":
        plain = generate.of(model, tokens, {"max_new_tokens": 8})
        assert type(plain.buckets["decode"].kwargs["cache"]).__name__ == "StaticCache"
    model.set_attn_implementation("eager")
    with pytest.raises(Unsupported, match="use_attention"):
        generate.of(model, tokens, {"max_new_tokens": 8, "kv_cache": "int4"})


def test_a_generations_cache_is_the_first_within_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, tokens = made("llama", 1), ids(2, 20)
    options = {"max_new_tokens": 4, "kv_cache": ["int4", "fp8", "int8"]}
    taken = {}
    for limit in ("20%", "0.5%", {"kl": 2e-4}):
        workload = generate.of(model, tokens, options | {"kv_quality": limit})
        assert workload.cache is not None and workload.cache.format == workload.options["kv_cache"]
        assert workload.cache.quality is not None and workload.cache.quality.kl > 0
        taken[str(limit)] = workload.buckets["decode"].kwargs["cache"].format
    assert list(taken.values()) == ["int4", "fp8", "int8"]
    with pytest.raises(QualityNotMet, match=r"no key-value cache within kv_quality 1e-09: int4: .* fp8: .* int8: "):
        generate.of(model, tokens, options | {"kv_quality": 1e-9})
    # times that are known, and ids beside those of transformers' own cache
    monkeypatch.setattr(
        generate.timing, "measure_pair",
        lambda base, new, **_: (base(), new(), Paired((30.0,), (10.0,), 3.0, Interval(2.5, 3.5), "host wall"))[-1],
    )  # fmt: skip
    found = workload.throughput(workload.model)
    one, plain = found.unquantized, generate.of(model, tokens, {"max_new_tokens": 4})
    assert one is not None and (found.kv_cache, one.ratio, one.low) == ("int8", 3.0, 2.5)
    assert one.same_ids == float((plain.generate()[:, 20:] == workload.generate()[:, 20:]).float().mean())
    text = "\n".join(found.lines())
    assert "key-value cache in int8, 10,240 → 2,880 bytes, on the prompts: kl " in text
    assert "optimized, with int8, 3.00× [2.50, 3.50] of it" in text
    assert json.loads(generate.write(found, tmp_path).read_text())["cache"]["format"] == "int8"
    alone = plain.throughput(plain.model)
    assert alone.unquantized is None and alone.not_compared == ""

    def windowed(*_: Any) -> Any:
        raise WorkloadError("a sliding window")

    # the reason is told where there is nothing to compare with
    monkeypatch.setattr(generate, "of", windowed)
    found = workload.throughput(workload.model)
    assert found.unquantized is None
    assert found.lines()[-1] == "not compared with a cache in the model's dtype: a sliding window"


def test_the_gate_compares_the_bits_of_a_cache() -> None:
    from wavecrest.optimizer.gate import Gate, failures

    workload = generate.of(made("llama", 1), ids(1, 18), {"max_new_tokens": 3, "kv_cache": "fp8"})
    gate = Gate.prepare(workload, seed=0)
    assert not failures(gate.check(copy.deepcopy(workload.model)))
    wrong = copy.deepcopy(workload.model)
    with torch.no_grad():
        wrong.inner.model.layers[0].self_attn.v_proj.weight.neg_()  # type: ignore[union-attr,operator]
    assert "values after the call" in failures(gate.check(wrong))
