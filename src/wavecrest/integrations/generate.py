"""Greedy generation by transformers models as a workload: prompt and step are optimized, tokens/s are the result.

Both calls share one static key-value cache, so that a step can be compiled and captured once for every position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wavecrest.errors import MissingDependency, QualityNotMet, WorkloadError
from wavecrest.measure import timing, workload
from wavecrest.measure.workload import Inputs, Quality, Workload, begin_step

if TYPE_CHECKING:
    from wavecrest.quantizer.report import CacheRow

__all__ = ["Generation", "Step", "Throughput", "Unquantized", "load", "of"]

PROMPT, DECODE = "prompt", "decode"
# options of `generate` that have a meaning here: greedy, with a static cache; and those of this workload
OWN_OPTIONS = ("kv_cache", "kv_quality")
OPTIONS = ("max_new_tokens", "do_sample", "eos_token_id", "pad_token_id", "cache_implementation", *OWN_OPTIONS)


class Step(nn.Module):
    """The logits of the last position, after a prompt or one more token, which the cache takes in."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        from wavecrest.quantizer.kv_cache import argument_of

        self.inner = inner
        self.cache = argument_of(inner)

    def forward(self, input_ids: Tensor, cache: Any, begins: bool) -> Tensor:
        """Map token ids [B, S] to logits [B, vocabulary]; `begins`: they are the first ones of the cache."""
        if begins:
            for layer in cache.layers:
                layer.cumulative_length.zero_()
        given = {self.cache: cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = self.inner(input_ids=input_ids, **given).logits
        return logits[:, -1]


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The same generation by the original with transformers' own static cache, beside the optimized one.

    Attributes:
        tokens: tokens a second.
        ratio, low, high: of the optimized model with the quantized cache over it, with the 95 % interval.
        same_ids: share of new token ids that are the same.
    """

    tokens: float
    ratio: float
    low: float
    high: float
    same_ids: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Greedy generation end to end, prompt and new tokens together: tokens a second, new ones alone counted.

    Attributes:
        batch, prompt, new: sequences, tokens of each prompt, new tokens of each.
        original, optimized: the same loop over the original and the optimized step.
        ratio, low, high: optimized over original, with its 95 % interval over blocks of one process.
        library: transformers' own `generate()` of the original with the options as given.
        library_ratio, library_low, library_high: optimized over that.
        same_ids: whether the three give the same token ids.
        kv_cache: format of the cache of all three, or None.
        cache: that format with its quality on the prompts, where a limit was given; or None.
        unquantized: the original without that format; None without a format, or where it cannot be.
        not_compared: why it cannot be, or an empty string.
    """

    batch: int
    prompt: int
    new: int
    original: float
    optimized: float
    ratio: float
    low: float
    high: float
    library: float
    library_ratio: float
    library_low: float
    library_high: float
    same_ids: bool
    kv_cache: str | None = None
    cache: CacheRow | None = None
    unquantized: Unquantized | None = None
    not_compared: str = ""

    def lines(self) -> list[str]:
        """The result as lines of text."""
        what = f"batch {self.batch}, prompt {self.prompt}, {self.new} new tokens"
        ratio = f"{self.ratio:.2f}× [{self.low:.2f}, {self.high:.2f}]"
        own = f"{self.library_ratio:.2f}× [{self.library_low:.2f}, {self.library_high:.2f}]"
        lines = [
            f"generate ({what}, end to end, one process): {self.original:.1f} → {self.optimized:.1f} tokens/s, {ratio}",
            f"transformers' generate(): {self.library:.1f} tokens/s, the optimized model {own} of it",
            f"greedy token ids: {'the same' if self.same_ids else 'NOT the same'}",
        ]
        if self.cache is not None and (judged := self.cache.quality) is not None:
            values = {name: value for name, value in judged.values().items() if value is not None}
            limits = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            lines.append(
                f"key-value cache in {self.kv_cache}, {self.cache.bytes_before:,} → {self.cache.bytes_after:,} bytes, "
                f"on the prompts: {limits}"
            )
        if (one := self.unquantized) is not None:
            lines.append(
                f"with a cache in the model's dtype the original makes {one.tokens:.1f} tokens/s: optimized, with "
                f"{self.kv_cache}, {one.ratio:.2f}× [{one.low:.2f}, {one.high:.2f}] of it, {one.same_ids:.1%} of the "
                "token ids the same"
            )
        if self.not_compared:
            lines.append(f"not compared with a cache in the model's dtype: {self.not_compared}")
        return lines


@dataclass(slots=True)
class Generation(Workload):
    """A workload of two buckets, "prompt" and "decode", and the loop around them; made by `of`.

    Attributes:
        options: of `generate`, as given, and "kv_cache": the format that was taken.
        cache: that format with its quality, where "kv_quality" was given.
        keys: what the prompt leaves in each layer's memory, which the decode bucket starts from.
    """

    options: dict[str, Any] = field(default_factory=dict)
    cache: CacheRow | None = None
    keys: list[list[Tensor]] = field(default_factory=list)

    @property
    def step(self) -> Step:
        """The original, which the buckets call."""
        assert isinstance(self.model, Step)
        return self.model

    @property
    def tokens(self) -> Tensor:
        """The prompts, int64 [B, S]."""
        found: Tensor = self.buckets[PROMPT].kwargs["input_ids"]
        return found

    def generate(self, step: Callable[..., Any] | None = None) -> Tensor:
        """Greedy token ids int64 [B, S + new], as `generate` gives them: padding follows a row's end.

        Args:
            step: the original, or what a plan or a run has made of it; None: the original.
        """
        step = self.model if step is None else step
        cache, tokens = self.buckets[PROMPT].kwargs["cache"], self.tokens
        ends, padding = _ends(self), _padding(self)
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        made = [tokens]
        with torch.no_grad():
            for count in range(self.options["max_new_tokens"]):
                begin_step()
                logits = step(input_ids=made[-1], cache=cache, begins=count == 0)
                token = logits.argmax(-1)
                if ends is not None:
                    token = torch.where(done, padding, token)
                    done = done | torch.isin(token, ends)
                made.append(token[:, None])
                # reading it waits for the device: only where there is an end to wait for
                if ends is not None and bool(done.all()):
                    break
        return torch.cat(made, dim=1)

    def by_library(self) -> Tensor:
        """The token ids of transformers' own `generate()` of the original."""
        inner: Any = self.step.inner
        options = dict(self.options)
        if options.get("kv_cache") is not None:
            # it has no name for such a cache, and takes one that was made
            options.pop("cache_implementation", None)
            options[self.step.cache] = _cache(inner, self.tokens, options)
        for name in OWN_OPTIONS:
            options.pop(name, None)
        with torch.no_grad():
            found: Tensor = inner.generate(self.tokens, attention_mask=torch.ones_like(self.tokens), **options)
        return found

    def throughput(self, optimized: nn.Module, *, seconds: float = 10.0) -> Throughput:
        """Time whole generations by the original, by the optimized model and by transformers, interleaved in pairs.

        Args:
            optimized: what a plan or a run has made of `step`.
            seconds: for each of the two pairs, or three with a quantized cache; slow models take longer.
        """
        want, got, own = self.generate(), self.generate(optimized), self.by_library()
        new = want.shape[1] - self.tokens.shape[1]
        count = self.tokens.shape[0] * new
        works = (self.generate, lambda: self.generate(optimized), self.by_library)
        pair = timing.measure_pair(works[0], works[1], device=self.device, seconds=seconds)
        other = timing.measure_pair(works[2], works[1], device=self.device, seconds=seconds)
        plain = self._unquantized(optimized, got, seconds)
        return Throughput(
            batch=self.tokens.shape[0], prompt=self.tokens.shape[1], new=new, original=count / pair.base_ms * 1e3,
            optimized=count / pair.new_ms * 1e3, ratio=pair.ratio, low=pair.ci.low, high=pair.ci.high,
            library=count / other.base_ms * 1e3, library_ratio=other.ratio, library_low=other.ci.low,
            library_high=other.ci.high, same_ids=torch.equal(want, got) and torch.equal(want, own),
            kv_cache=self.options.get("kv_cache"), cache=self.cache,
            unquantized=None if isinstance(plain, str) else plain,
            not_compared=plain if isinstance(plain, str) else "",
        )  # fmt: skip

    def _unquantized(self, optimized: nn.Module, got: Tensor, seconds: float) -> Unquantized | str:
        """The original with transformers' cache beside the optimized model, which makes `got`; or why it is not there.

        An empty string without a quantized cache.
        """
        if self.options.get("kv_cache") is None:
            return ""
        options = {name: value for name, value in self.options.items() if name not in OWN_OPTIONS}
        try:
            plain = of(self.step.inner, self.tokens, options)
        except WorkloadError as error:
            # such as a window, which transformers' cache counts in Python
            return str(error)
        want, first = plain.generate(), self.tokens.shape[1]
        pair = timing.measure_pair(
            plain.generate, lambda: self.generate(optimized), device=self.device, seconds=seconds
        )
        count = want.shape[0] * (want.shape[1] - first)
        new = [one[:, first:] for one in (want, got)]
        same = float((new[0] == new[1]).float().mean()) if new[0].shape == new[1].shape else 0.0
        return Unquantized(count / pair.base_ms * 1e3, pair.ratio, pair.ci.low, pair.ci.high, same)

    def _rewind(self, bucket: str) -> None:
        """Before a call: the cache empty, or as the prompt left it; zeros in the room behind, so that writes show."""
        length = 0 if bucket == PROMPT else self.tokens.shape[1]
        for layer, keys in zip(self.buckets[DECODE].kwargs["cache"].layers, self.keys, strict=True):
            for room, kept in zip(_rooms(layer), keys, strict=True):
                room[:, :length].copy_(kept[:, :length])
                room[:, length:].zero_()
            layer.cumulative_length.fill_(length)

    def _same_ids(self, original: Callable[..., Any], candidate: Callable[..., Any]) -> list[Quality]:
        want, got = self.generate(original), self.generate(candidate)
        share = float((want == got).float().mean()) if want.shape == got.shape else 0.0
        return [Quality("same greedy token ids", share, 1.0, share == 1.0, f"of {want.numel()} ids")]


def load(spec: str, *, device: str | None = None) -> Generation:
    """The workload of a function that returns (model, inputs, options): see `of`.

    Raises:
        WorkloadError: there is no such function, or it returns something else.
    """
    made = workload.call_factory(spec, device)
    if not isinstance(made, tuple) or len(made) != 3:
        raise WorkloadError(
            f"{spec} returned {type(made).__name__}; for --generate it must return (model, inputs, options), such as "
            '(model, {"input_ids": ids}, {"max_new_tokens": 64})'
        )
    found = of(*made)
    found.name = spec.rpartition(":")[2]
    return found


def of(model: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Generation:
    """Greedy generation by a causal language model of transformers, with a static cache, as a workload.

    Args:
        model: on the device it serves on.
        inputs: token ids int64 [B, S], or a dict of "input_ids" and perhaps an "attention_mask" that hides nothing.
        options: of `generate`: "max_new_tokens", and perhaps "do_sample" (False), "eos_token_id", "pad_token_id",
            "cache_implementation" ("static"), and "kv_cache": "fp8", "int8" or "int4", for the original and all that is
            made of it, whose attention is "wavecrest" then. With "kv_quality" ("0.5%", or limits by name, as
            `wavecrest.quantize` takes them) "kv_cache" may be several formats in order of preference: the first is
            taken with which the model's answers to the prompts are within it.

    Raises:
        MissingDependency: transformers is not installed.
        InvalidArgument: a format or "kv_quality" is unknown.
        QualityNotMet: no cache of "kv_cache" is within "kv_quality".
        Unsupported: "kv_cache" is given, and the model's attention does not read such a cache.
        WorkloadError: the model has no cache that a captured step can use, transformers is older than 5.4, or inputs
            or options are other ones.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependency("transformers", "--generate", "pip install transformers") from error
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise WorkloadError(f"--generate takes a causal language model of transformers, not {type(model).__name__}")
    from wavecrest.quantizer.kv_cache import version_refusal

    if reason := version_refusal("--generate", "5.4", "whose static caches count their tokens on the device"):
        raise WorkloadError(reason)
    _check(options)
    tokens = _tokens(inputs)
    options, row = _within(model, tokens, options)
    cache = _cache(model, tokens, options)
    left = {type(layer).__name__ for layer in cache.layers if not _counts_on_device(layer)}
    if left:
        raise WorkloadError(
            f"{type(model).__name__} keeps {', '.join(sorted(left))}, which counts its tokens in Python, as for a "
            "sliding window: a captured step cannot follow it"
        )
    step = Step(model).eval()
    prompt = {"input_ids": tokens, "cache": cache, "begins": True}
    with torch.no_grad():
        # the cache gets its memory here
        first = step(**prompt).argmax(-1)[:, None]
    buckets = {PROMPT: Inputs((), prompt), DECODE: Inputs((), {**prompt, "input_ids": first, "begins": False})}
    made = Generation(step, buckets, name=type(model).__name__, options={"do_sample": False, **options})
    made.cache = row
    length = tokens.shape[1]
    made.keys = [[room[:, :length].clone() for room in _rooms(layer)] for layer in cache.layers]
    made.reset, made.quality = made._rewind, made._same_ids
    # empty, as no call leaves it: a run tells the original's own writes by what differs from the beginning
    made._rewind(PROMPT)
    return made


def _check(options: Any) -> None:
    if not isinstance(options, Mapping) or not isinstance(options.get("max_new_tokens"), int):
        raise WorkloadError('--generate takes options of generate() with "max_new_tokens", a whole number')
    if options["max_new_tokens"] < 2:
        raise WorkloadError("--generate takes at least 2 new tokens: the first one is the prompt's")
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise WorkloadError(f"--generate takes the options {', '.join(OPTIONS)}, not {', '.join(unknown)}")
    if options.get("kv_quality") is not None and options.get("kv_cache") is None:
        raise WorkloadError('--generate takes "kv_quality" with "kv_cache", such as "fp8": nothing else is quantized')
    formats = options.get("kv_cache")
    several = isinstance(formats, list | tuple) and bool(formats) and all(isinstance(one, str) for one in formats)
    if not several and not isinstance(formats, str | None):
        raise WorkloadError(f'--generate takes one format as "kv_cache", or several in a list, not {formats!r}')
    if several and options.get("kv_quality") is None:
        raise WorkloadError('--generate takes several formats of "kv_cache" with "kv_quality", which tells them apart')
    if options.get("do_sample") or options.get("cache_implementation", "static") != "static":
        raise WorkloadError("--generate is greedy, with a static cache: do_sample=False, cache_implementation='static'")


def _within(model: nn.Module, tokens: Tensor, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], CacheRow | None]:
    """The options with the first format whose cache is within "kv_quality", and that cache.

    It is judged by itself, each token of the prompts read from it as in decoding, in every process that loads the
    workload, so that `verify` holds it to the limit too.

    Raises:
        QualityNotMet: there is no such format.
    """
    if options.get("kv_quality") is None:
        return options, None
    from wavecrest.quantizer.api import quantize

    asked, reasons = options["kv_cache"], []
    formats: Sequence[str] = (asked,) if isinstance(asked, str) else tuple(asked)
    for format in formats:
        try:
            made = quantize(
                model, None, kv_cache=format, calibration={"input_ids": tokens}, quality=options["kv_quality"]
            )
        except QualityNotMet as error:
            reasons.append(f"{format}: {error}")
            continue
        made.restore()
        return {**options, "kv_cache": format}, made.report.kv_cache
    raise QualityNotMet(
        f"--generate: no key-value cache within kv_quality {options['kv_quality']}: {'; '.join(reasons)}"
    )


def _cache(model: Any, tokens: Tensor, options: Mapping[str, Any]) -> Any:
    """An empty static cache for a whole generation."""
    from transformers import StaticCache

    from wavecrest.quantizer.kv_cache import QuantizedStaticCache

    length, format = tokens.shape[1] + options["max_new_tokens"], options.get("kv_cache")
    if format is not None:
        return QuantizedStaticCache(model, length, format)
    return StaticCache(config=model.config, max_cache_len=length)


def _rooms(layer: Any) -> list[Tensor]:
    """A layer's memory, [B, S, …] each: S tokens, or of a window as many as are kept."""
    store = getattr(layer, "store", None)
    if store is not None:
        # as bytes: PyTorch has few operations of 8-bit floats
        return [one.view(torch.uint8) for one in store.tensors()]
    return [layer.keys.transpose(1, 2), layer.values.transpose(1, 2)]


def _tokens(inputs: Any) -> Tensor:
    if isinstance(inputs, Mapping):
        unknown = sorted(set(inputs) - {"input_ids", "attention_mask"})
        if unknown or "input_ids" not in inputs:
            raise WorkloadError(f"--generate takes input_ids and an attention_mask, not {', '.join(map(str, inputs))}")
        mask = inputs.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise WorkloadError("--generate takes prompts of one length, without padding")
        inputs = inputs["input_ids"]
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.dtype != torch.int64 or not inputs.numel():
        raise WorkloadError("--generate takes token ids int64 [B, S]")
    return inputs


def _counts_on_device(layer: Any) -> bool:
    counts = isinstance(getattr(layer, "cumulative_length", None), Tensor)
    return counts and (hasattr(layer, "store") or not getattr(layer, "is_sliding", False))


def _ends(made: Generation) -> Tensor | None:
    """The ids that end a row, of the options or of the model's own, as `generate` takes them."""
    found = made.options.get("eos_token_id", _own(made, "eos_token_id"))
    return None if found is None else torch.tensor(found, device=made.tokens.device).reshape(-1)


def _padding(made: Generation) -> Tensor:
    found = made.options.get("pad_token_id", _own(made, "pad_token_id"))
    ends = _ends(made)
    if found is None:
        found = 0 if ends is None else int(ends[0])
    return torch.tensor(found, device=made.tokens.device)


def _own(made: Generation, name: str) -> Any:
    return getattr(getattr(made.step.inner, "generation_config", None), name, None)


def write(found: Throughput, folder: Path) -> Path:
    """Write the result as JSON into the folder of a run, and return the file.

    Raises:
        OutputError: it cannot be written.
    """
    import json

    from wavecrest.records import files

    path = folder / "generate.json"
    files.write_text(path, json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return path
