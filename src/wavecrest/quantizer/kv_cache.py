"""A static cache for transformers models whose keys and values are in 8 or 4 bits; this module needs transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import cache_utils

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.measure.workload import Inputs
from wavecrest.nn.kv_store import Cached, KVStore, check_format
from wavecrest.ops._flash_decoding.call import MAX_TOKENS
from wavecrest.quantizer.quality import Quality
from wavecrest.quantizer.report import CacheRow
from wavecrest.records.provenance import LEAST_TRANSFORMERS

# its annotations say int where static layers have tensors
_library: Any = cache_utils
# before transformers 5.15 a number above 0 is the tokens to keep, later an error; below 0 it is those to remove in both
_CROPS_TO_LENGTH = "max_length" in inspect.signature(_library.DynamicLayer.crop).parameters
# the attention implementation that reads these caches
ATTENTION = "wavecrest"


class QuantizedStaticLayer(_library.CacheLayerMixin):  # type: ignore[misc]
    """A layer's part of a `QuantizedStaticCache`.

    Attributes:
        store: the memory, made at the first update as transformers' static layers make theirs; None before.
        cumulative_length: tokens so far, an integer tensor on the device, so that one graph serves every position.
    """

    is_compileable = True

    def __init__(self, format: str, max_cache_len: int, window: int | None, is_sliding: bool, checks: bool) -> None:
        """An empty layer.

        Args:
            format: "fp8", "int8" or "int4".
            max_cache_len: tokens of a sequence at most.
            window: keys that a query sees, if fewer.
            is_sliding: whether the layer's masks are those of a window.
            checks: end with an error, on the device, where there are more tokens; for one layer of a cache.
        """
        super().__init__()
        self.format, self.max_cache_len, self.window = format, max_cache_len, window
        self.is_sliding, self._checks = is_sliding, checks
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)
        self.store: KVStore | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the memory for keys and values [B, Hk, T, D] like these."""
        batch, heads, _, head_dim = key_states.shape
        device = key_states.device
        self.store = KVStore(
            self.format, batch, self.max_cache_len, heads, head_dim, value_states.shape[-1], device, self.window
        )
        self.device, self.dtype, self.batch_size = device, key_states.dtype, batch
        # by transformers' names
        self.keys, self.values = self.store.k, self.store.v
        self.cumulative_length = self.cumulative_length.to(device)
        if not torch.compiler.is_compiling():
            # a graph then writes to them in place
            table = [] if self.store.table is None else [self.store.table]
            for one in (*self.store.tensors(), *table, self.cumulative_length):
                torch._dynamo.mark_static_address(one)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_more: Any) -> tuple[Cached, Cached]:
        """Take in new keys and values [B, Hk, T, D], which attention stores as it reads what is there.

        Raises:
            InvalidArgument: they need gradients, or their batch is not that of the first ones.
        """
        if needs_grad(key_states, value_states):
            raise InvalidArgument(
                "keys and values go into a quantized cache without gradients: call the model under torch.no_grad"
            )
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        if key_states.shape[0] != store.k.shape[0]:
            raise InvalidArgument(
                f"a key-value cache of {store.k.shape[0]} sequences got {key_states.shape[0]}; make another one"
            )
        self.cumulative_length.add_(key_states.shape[2])
        if self._checks:
            torch._assert_async(
                self.cumulative_length <= self.max_cache_len, "more tokens than the key-value cache has room for"
            )
        found = Cached(store, key_states, value_states, self.cumulative_length)
        return found, found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask is of, and the place of the first."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> Tensor:
        """Tokens so far, on the device; also before the first, so that an empty cache is read as a cleared one is."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Tokens at most."""
        return self.max_cache_len

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back: not where older ones than a window were given up for them."""
        return self.window is None or (self.store is not None and not self.store.pages)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; `tokens_to_remove` is their number, negated, as transformers has it.

        In versions of transformers whose own `crop` takes a length, a number above 0 is the tokens to keep.

        Raises:
            InvalidArgument: it is above 0, and the version has no such meaning for it.
            Unsupported: only a window of tokens is kept.
        """
        if tokens_to_remove > 0 and not _CROPS_TO_LENGTH:
            raise InvalidArgument(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if not self.is_croppable:
            raise Unsupported("a layer that keeps a window of tokens cannot take the last ones back: reset the cache")
        if tokens_to_remove > 0:
            self.cumulative_length.clamp_(max=tokens_to_remove)
        else:
            self.cumulative_length.sub_(abs(tokens_to_remove))

    def reset(self) -> None:
        """Empty the layer, in place."""
        if self.store is not None:
            self.store.clear()
        self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sequence the keys and values of the one at `beam_idx`, in place."""
        if self.store is not None:
            self.store.select(beam_idx)

    def offload(self) -> None:
        """Refused."""
        raise Unsupported("a quantized cache is not offloaded")

    prefetch = offload


class QuantizedStaticCache(_library.Cache):  # type: ignore[misc]
    """A key-value cache of fixed size in 8-bit floats, int8 or 4 bits, for a transformers model.

    Each token and head has scales of its own. Decode steps read it as it lies, by `flash_decoding`; a prompt sees its
    own keys and values unrounded. Layers with a sliding window keep that many tokens, in pages of 64.

    >>> use_attention(model)
    >>> model.generate(ids, cache=QuantizedStaticCache(model, 2048, "fp8"), max_new_tokens=64)

    Attributes:
        format: "fp8", "int8" or "int4".
    """

    def __init__(self, model: nn.Module, max_cache_len: int, format: str = "fp8") -> None:
        """An empty cache, whose memory is made at the first call.

        Args:
            model: whose layers it is for; its attention is "wavecrest".
            max_cache_len: tokens of a sequence at most, prompt and new ones.
            format: "fp8" (e4m3fnuz on gfx942, else e4m3fn), "int8" or "int4".

        Raises:
            InvalidArgument: the format is unknown, or `max_cache_len` is below 1.
            Unsupported: the model's attention is another one, a layer keeps something else than keys and values, or
                transformers is older than 5.14.
        """
        # older ones write out the masks of prompts, and do not say which layers keep something else
        why = "whose static caches tell layers apart"
        if reason := version_refusal("a quantized key-value cache", LEAST_TRANSFORMERS, why):
            raise Unsupported(reason)
        self.format = check_format(format)
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise InvalidArgument(f"a key-value cache has room for at least 1 token, not {max_cache_len!r}")
        config = config_of(model)
        self._config = config
        layers: list[Any] = []
        for own in _library.StaticCache(config=config, max_cache_len=max_cache_len).layers:
            kind = type(own)
            # transformers before 5.23 has no such layer
            if kind is getattr(_library, "DummyLayer", None):
                layers.append(own)
                continue
            if kind not in (_library.StaticLayer, _library.StaticSlidingWindowLayer):
                raise Unsupported(f"{type(model).__name__} keeps a {kind.__name__}: only keys and values are quantized")
            slides = kind is _library.StaticSlidingWindowLayer
            # as large as the window, where that is smaller
            window = own.max_cache_len if slides and own.max_cache_len < max_cache_len else None
            first = not any(isinstance(one, QuantizedStaticLayer) for one in layers)
            layers.append(QuantizedStaticLayer(self.format, max_cache_len, window, slides, checks=first))
        self._max_cache_len = max_cache_len
        super().__init__(layers=layers)

    # a property, as transformers before 5.20 has one that cannot be set
    @property
    def max_cache_len(self) -> int:
        """Tokens of a sequence at most."""
        return self._max_cache_len

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors; 0 before the first call."""
        return sum(layer.store.nbytes for layer in self._made())

    @property
    def nbytes_unquantized(self) -> int:
        """Bytes of transformers' static cache of the same size, in the dtype of the keys that came in."""
        plain = _library.StaticCache(config=self._config, max_cache_len=self.max_cache_len)
        total = 0
        for own, layer in zip(plain.layers, self.layers, strict=True):
            if not isinstance(layer, QuantizedStaticLayer) or layer.store is None:
                continue
            k, v = layer.store.shapes
            # without memory
            own.lazy_initialization(*(torch.empty(shape, dtype=layer.dtype, device="meta") for shape in (k, v)))
            total += own.keys.nbytes + own.values.nbytes
        return total

    def _made(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, QuantizedStaticLayer) and layer.store is not None]


def version_refusal(what: str, least: str, why: str) -> str:
    """Why `what` does not run with this version of transformers, if it is older than `least`; or ""."""
    if Version(transformers.__version__).release >= Version(least).release:
        return ""
    return f"{what} needs transformers {least} or later, {why}; this is {transformers.__version__}"


def config_of(model: Any) -> Any:
    """The configuration of a model's decoder.

    Raises:
        Unsupported: it is no transformers model, or its attention is not wavecrest's.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise Unsupported(f"a quantized key-value cache is for transformers models, not for {type(model).__name__}")
    found = config.get_text_config(decoder=True)
    used = found._attn_implementation
    if used != ATTENTION:
        raise Unsupported(
            f"{type(model).__name__} has {used} attention, which does not read a quantized key-value cache: call "
            "wavecrest.integrations.transformers.use_attention(model) first"
        )
    return found


def argument_of(model: Any) -> str:
    """The name that a model's forward has for its cache: "cache" since transformers 5.24, "past_key_values" before."""
    # a compiled module's own forward takes anything
    names = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache"


class ThroughCache:
    """A causal model's logits where every token is read from a quantized cache, as in decoding.

    Tokens go through it up to 16 at a time, as many as `flash_decoding` takes: each sees what was stored of those up to
    its own, the same as one at a time.
    """

    def __init__(self, model: nn.Module, format: str) -> None:
        """See `QuantizedStaticCache`, also for what it raises."""
        QuantizedStaticCache(model, 1, format)
        self._model, self._format, self._name = model, format, argument_of(model)
        # of the input with the largest cache: sequences, tokens, bytes before and after
        self._largest = (0, 0, 0, 0)

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """The logits [B, T, V] of an input, under the name that the model gives them.

        Raises:
            InvalidArgument: the input is something else than token ids, maybe with an attention_mask; or the model
                gives no logits.
        """
        given = dict(inputs.kwargs)
        if inputs.args and "input_ids" not in given:
            given["input_ids"] = inputs.args[0]
        ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
        left = [name for name, value in given.items() if value is not None and not isinstance(value, bool)]
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(inputs.args) > 1 or left:
            raise InvalidArgument(
                "quantize: kv_cache is judged on token ids (input_ids [B, T], maybe with an attention_mask) alone; "
                f"got {', '.join(left) or 'other inputs'}"
            )
        # padding at the right alone comes after all tokens that count, which do not see it
        if mask is not None and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            mask = None
        length = ids.shape[1]
        cache, found = QuantizedStaticCache(self._model, length, self._format), []
        for begin in range(0, length, MAX_TOKENS):
            end = min(begin + MAX_TOKENS, length)
            more = {} if mask is None else {"attention_mask": mask[:, :end]}
            answer = self._model(input_ids=ids[:, begin:end], **{self._name: cache}, use_cache=True, **more)
            if not isinstance(getattr(answer, "logits", None), Tensor):
                raise InvalidArgument(
                    f"quantize: kv_cache is judged by logits, which {type(self._model).__name__} does not return"
                )
            found.append(answer.logits)
        if cache.nbytes > self._largest[3]:
            self._largest = (ids.shape[0], length, cache.nbytes_unquantized, cache.nbytes)
        return {"logits": torch.cat(found, 1)}

    def row(self, quality: Quality | None) -> CacheRow:
        """The cache for a report, with the quality of the model in its own precision."""
        return CacheRow(self._format, *self._largest, quality)
