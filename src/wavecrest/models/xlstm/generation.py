"""Generation: prompts made ready, decoding steps (captured as a graph on a GPU), and where rows end."""

from __future__ import annotations

import contextlib
import operator
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.measure import cuda_graph, numerics
from wavecrest.models.xlstm.base import Network, TokenSettings
from wavecrest.models.xlstm.network import xLSTMNetwork
from wavecrest.models.xlstm.padding import spans
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.models.xlstm.state import State, StatePool, clone_state, lasting
from wavecrest.nn.hooks import watched
from wavecrest.ops import PackedWeight
from wavecrest.ops._gemm.config import GEMV_ROWS
from wavecrest.ops.common import warmup as _ahead

# fewer steps than these are over before a capture is
CAPTURE_FROM = 16


class DecodeFallback(UserWarning):
    """Decoding on a GPU runs without a graph; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Result of `xLSTMLarge.generate`.

    Attributes:
        tokens: int64 [B, T] on the CPU, new tokens alone; T is at most max_new_tokens. Padding follows a row's end.
        lengths: int64 [B]: number of tokens of each row, with the one that ended it.
        decoding: "captured", "speculative: " and how often drafts were right, or "eager: " and the reason.
        state: with `return_state`, after the prompt and all new tokens of each row but its last; else None.
    """

    tokens: Tensor
    lengths: Tensor
    decoding: str
    state: State | None = None

    @property
    def last(self) -> Tensor:
        """int64 [B, 1] on the CPU: the last token of each row, which `state` has not seen; a text goes on with it."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens int64 [B, S] at the left of their rows, and how many there are, int64 [B]; None: S."""

    tokens: Tensor
    lengths: Tensor | None


def prepare(tokens: Tensor, mask: Tensor | None, bos: int | None) -> Prompt:
    """A prompt with its tokens at the left of their rows, and `bos` before those that do not begin with it.

    Raises:
        InvalidArgument: a row has no token, or the mask is outside of what `spans` takes.
    """
    found = None if mask is None else spans(mask, tokens)
    batch, width = tokens.shape
    if found is None:
        starts = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
        lengths = torch.full_like(starts, width)
    else:
        starts, lengths = found
    lead = torch.zeros_like(starts)
    if bos is not None:
        first = tokens.gather(1, starts.clamp(max=max(width - 1, 0))[:, None])[:, 0] if width else lead - 1
        lead = ((lengths == 0) | (first != bos)).long()
    lengths = lengths + lead
    if batch == 0 or bool((lengths == 0).any()):
        raise InvalidArgument("generate: a row of the prompt has no token, or there is no row")
    if found is None and not bool(lead.any()):
        return Prompt(tokens, None)
    places = torch.arange(int(lengths.max()), device=tokens.device)
    source = (places + (starts - lead)[:, None]).clamp(0, max(width - 1, 0))
    if width == 0:
        tokens, source = tokens.new_zeros(batch, 1), torch.zeros_like(source)
    moved = tokens.gather(1, source)
    if bos is not None:
        moved = moved.masked_fill((places == 0) & (lead[:, None] == 1), bos)
    return Prompt(moved, None if bool((lengths == places.shape[0]).all()) else lengths)


def has_graphs(device: torch.device) -> bool:
    """True if work on a device can be captured."""
    return device.type == "cuda"


class Decoder:
    """One token a call: tokens, states and noise at fixed addresses, the step eager or a captured graph.

    `counted`: programs of `mlstm_step` are counted, and no second launch follows. Not the default: 0.3 to 2 % longer
    where a second launch starts early (H200, `counted` of 2026-11-23_xlstm-chain_times.jsonl.gz); not measured on
    AMD, where none does.
    """

    @lasting()
    def __init__(self, state: State, logits: Tensor, sampling: Sampling) -> None:
        self.pool = StatePool(state)
        self.token = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        self.noise = sampling.noise(logits)
        self.decoding = ""
        self.counted = False
        self._sampling = sampling
        self._graph: Any = None
        # why there is no graph though one was wanted
        self._refused = ""

    def start(self, state: State, logits: Tensor, generator: torch.Generator | None) -> None:
        """Take a prompt's state and choose the first token from its logits [B, V]."""
        self.pool.load(state)
        self._draw(generator)
        self.token.copy_(self._sampling.pick(logits, self.noise))

    @torch.no_grad()
    def step(self, model: Network, generator: torch.Generator | None) -> None:
        """The next token in place of the last one."""
        self._draw(generator)
        if self.decoding == "captured":
            self._graph.replay()
        else:
            self._work(model)

    @lasting()
    def snapshot(self) -> State:
        """A copy of the state, which has seen all tokens but the last one chosen."""
        return clone_state(self.pool.state)

    def choose(self, model: Network, capture: bool, count: int) -> None:
        """Decide how `count` steps run: eagerly, or as a graph, which is captured on first use."""
        if not has_graphs(self.token.device):
            self.decoding = "eager: a CPU has no graphs"
        elif not capture:
            self.decoding = "eager: as asked"
        elif self._graph is None and not self._refused and count < CAPTURE_FROM:
            self.decoding = f"eager: fewer than {CAPTURE_FROM} tokens"
        else:
            if self._graph is None and not self._refused:
                self._capture(model)
            self.decoding = "captured" if self._graph is not None else f"eager: {self._refused}"

    def _draw(self, generator: torch.Generator | None) -> None:
        if self.noise is not None:
            self.noise.exponential_(generator=generator)

    def _work(self, model: Network) -> Tensor:
        """The step that a graph captures. Returns the logits [B, V], for comparison."""
        arrivals = self.pool.arrivals if self.counted else None
        # greedy sampling needs only the largest logit: without the cap it saves four operations on all logits
        logits = model.decode(self.token, self.pool.state, arrivals, capped=not self._sampling.greedy)
        self.token.copy_(self._sampling.pick(logits, self.noise))
        return logits

    def _capture(self, model: Network) -> None:
        """Record the step, and compare its first replay with a step that ran; token and state are left as they were.

        What cannot be captured, or replays something else, stays eager, with a `DecodeFallback` warning.
        """
        token, state = self.token.clone(), clone_state(self.pool.state)

        def work() -> Tensor:
            return self._work(model)

        try:
            cuda_graph.warm_up(work)
            self._restore(token, state)
            expected = work().clone(), self.token.clone(), clone_state(self.pool.state)
            graph, logits = cuda_graph.record(work, torch.cuda.graph_pool_handle(), "the decoding step")
            self._restore(token, state)
            graph.replay()
            self._compare(expected, logits)
            self._graph = graph
        except StepRefused as error:
            self._refused = str(error)
            warnings.warn(f"decoding runs without a graph: {error}", DecodeFallback, stacklevel=5)
        finally:
            self._restore(token, state)

    def _restore(self, token: Tensor, state: State) -> None:
        self.token.copy_(token)
        self.pool.load(state)

    def _compare(self, expected: tuple[Tensor, Tensor, State], logits: Tensor) -> None:
        """Raise StepRefused unless a replay left the logits, states and token of an eager step."""
        before, token, state = expected
        pairs = [(logits, before)]
        for index, parts in state.items():
            for own, part in zip(self.pool.state[index], parts, strict=True):
                if own is not None and part is not None:
                    pairs.append((own, part))
        # a replay runs the same kernels: what is refused wrongly is slow and says so, a wrong state would be silent
        limits = numerics.tolerance("model", "float32")
        if not all(numerics.compare(found, wanted).within(limits) for found, wanted in pairs):
            raise StepRefused("its first replay differs from the step it was made of")
        # where logits differ by rounding there may be a tie
        if torch.equal(logits, before) and not torch.equal(self.token, token):
            raise StepRefused("its first replay chose another token from the same logits")


# for each model, its last free decoder with the decoder's key
_decoders: weakref.WeakKeyDictionary[Any, tuple[Any, Decoder]] = weakref.WeakKeyDictionary()


def fingerprint(model: Network) -> tuple[Any, ...]:
    """The addresses and dtypes of a model's weights, which a captured graph depends on."""
    found = []
    for parameter in model.parameters():
        stored = parameter.stored if isinstance(parameter, PackedWeight) else parameter
        found.append((stored.data_ptr(), stored.dtype))
    return tuple(found)


def _decoder(model: Network, state: State, logits: Tensor, sampling: Sampling) -> tuple[Any, Decoder]:
    """(key, decoder): the model's last decoder where its key fits and it is free, else a new one."""
    key = (tuple(logits.shape), logits.device, state[0][0].dtype, sampling, fingerprint(model))
    # taken out while it is used, so that two streams do not share one, and before a new one takes memory
    kept = _decoders.pop(model, None)
    return kept if kept is not None and kept[0] == key else (key, Decoder(state, logits, sampling))


# kind of a pass: a prompt of one row or of several, as a size of 1 is compiled apart; or steps, by their number of rows
Kind = tuple[str, int]
# for each model, the kinds of passes whose kernels were compiled ahead
_rehearsed: weakref.WeakKeyDictionary[Any, set[Kind]] = weakref.WeakKeyDictionary()


def _unrehearsed(model: Network, device: torch.device, *kinds: Kind) -> set[Kind]:
    """The kinds that are new, whose kernels the caller compiles ahead; none where that cannot or must not be done."""
    if not _ahead.possible(device):
        return set()
    done = _rehearsed.setdefault(model, set())
    new = set(kinds) - done
    if not new or not _unseen(model):
        return set()
    done |= new
    return new


def _unseen(model: Network) -> bool:
    """True if nobody sees what a model runs: its modules are ours or PyTorch's, without hooks, and not compiled."""
    for module in model.modules():
        known = type(module).__module__.startswith(("wavecrest.", "torch.nn."))
        if not known or module._compiled_call_impl is not None:
            return False
    return not watched(model)


@torch.no_grad()
def compile_ahead(model: xLSTMNetwork, batch: int, longest: int) -> str | None:
    """See `xLSTMLarge.compile_ahead`."""
    for name, value in (("batch", batch), ("longest", longest)):
        if type(value) is not int or value < 1:
            raise InvalidArgument(f"compile_ahead: {name} must be a whole number above 0, got {value!r}")
    device = model.embedding.weight.device
    if not _ahead.possible(device):
        return f"kernels for {device.type} are not compiled ahead here"
    if not _unseen(model):
        return "a hook, torch.compile or a module of others would see it"
    # few rows have a variant for each number; else measured rows and defaults choose by ranges of rows, which have a
    # power of two in them each
    lengths = {*range(1, GEMV_ROWS + 1), *(2**power for power in range(longest.bit_length())), longest}

    def work() -> None:
        for length in sorted(length for length in lengths if length <= longest):
            tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
            masks: list[Tensor | None] = [None]
            if batch > 1 and length > 1:
                ends = torch.full((batch, 1), length, device=device)
                ends[0] = 1
                masks.append(torch.arange(length, device=device) < ends)
            for mask in masks:
                logits, after = model(tokens, None, attention_mask=mask, last_only=True, return_last_states=True)
                model(tokens, after, attention_mask=mask, last_only=True, return_last_states=True)
        Decoder(after, logits[:, 0], Sampling())._work(model)

    found = _ahead.rehearse(work)
    if found is None:
        _rehearsed.setdefault(model, set()).update({("prompt", min(batch, 2)), ("step", batch)})
    return found


def check_count(name: str, value: Any) -> None:
    """Raise InvalidArgument unless an argument is a whole number above 0."""
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"generate: {name} must be a whole number above 0, got {value!r}")


def _whole(value: Any) -> int:
    """A whole number of any kind, a tensor without dimensions too; TypeError: it is something else."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)):
        raise TypeError
    return operator.index(value)


@dataclass(frozen=True)
class Request:
    """Arguments of `xLSTMLarge.generate` and `stream`, which document them."""

    max_new_tokens: int
    sampling: Sampling
    eos_token_id: int | Sequence[int] | Tensor | None
    insert_bos: bool | None
    generator: torch.Generator | None
    check_every: int = 1
    capture: bool = True
    return_state: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "check_every"):
            check_count(name, getattr(self, name))

    def bos(self, config: TokenSettings, state: State | None) -> int | None:
        """The token to put before prompts, or None."""
        wanted = config.force_bos_token_insert and state is None if self.insert_bos is None else self.insert_bos
        if wanted and config.bos_token_id is None and self.insert_bos:
            raise InvalidArgument("generate: insert_bos needs a bos_token_id in the configuration")
        return config.bos_token_id if wanted else None

    def ends(self, config: TokenSettings) -> tuple[int, ...]:
        """The tokens that end a row."""
        ids: Any = config.eos_token_id if self.eos_token_id is None else self.eos_token_id
        if ids is None:
            return ()
        several = isinstance(ids, (list, tuple, set)) or getattr(ids, "ndim", 0) == 1
        try:
            return tuple(_whole(token) for token in (ids if several else (ids,)))
        except TypeError:
            raise InvalidArgument(f"generate: eos_token_id must be a token or a list of them, got {ids!r}") from None

    def pad(self, config: TokenSettings) -> int:
        """The token behind the end of a row."""
        ends = self.ends(config)
        return config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)


class Reading(NamedTuple):
    """A prompt, and the function that reads it: (logits [B, V] of the next tokens, the state after it)."""

    prompt: Prompt
    read: Callable[[], tuple[Tensor, State]]


def masked(tokens: Tensor, lengths: Tensor) -> Tensor:
    """bool [B, S]: the first `lengths` [B] places of each row of tokens [B, S]."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths.to(tokens.device)[:, None]


def reading(model: Network, tokens: Tensor, mask: Tensor | None, state: State | None, request: Request) -> Reading:
    """Check prompts and make them ready.

    Raises:
        InvalidArgument: tokens or mask are outside of what a model reads, or a row has no token.
    """
    model.check_tokens(tokens, wait=True)
    prompt = prepare(tokens.long(), mask, request.bos(model.config, state))
    before = None if state is None else model.own_state(state, prompt.tokens.shape[0])
    kept = None if prompt.lengths is None else masked(prompt.tokens, prompt.lengths)

    def read() -> tuple[Tensor, State]:
        return model.prompt(prompt.tokens, before, kept)

    return Reading(prompt, read)


@dataclass(slots=True)
class Run:
    """A generation that has begun: its columns are still to be read, from `columns`.

    Attributes:
        decoder: the steps.
        after: the state after the prompts; only with `return_state`, as it is as large as that of the steps.
        columns: (tokens, whether a row went on to here), int64 and bool [B] a time.
        reached: the state after all tokens but the last, once `max_new_tokens` were made; only with `return_state`.
    """

    decoder: Decoder
    after: State | None
    columns: Iterator[tuple[Tensor, Tensor]]
    reached: list[State] = field(default_factory=list)


@torch.no_grad()
def finish(model: Network, run: Run, request: Request) -> Generated:
    """Read all columns of a generation.

    Rows that ended before the last step have states of their own lengths, which one pass over the new tokens makes:
    the steps went past them.
    """
    found = list(run.columns)
    tokens, lengths = torch.stack([column for column, _ in found], 1), torch.stack([going for _, going in found]).sum(0)
    state = None
    if run.after is not None:
        whole = bool(run.reached) and bool((lengths == request.max_new_tokens).all())
        device = model.embedding.weight.device
        state = run.reached[0] if whole else model.advance(tokens.to(device), run.after, lengths - 1)
    return Generated(tokens, lengths, run.decoder.decoding, state)


@torch.no_grad()
def begin(model: Network, tokens: Tensor, mask: Tensor | None, state: State | None, request: Request) -> Run:
    """Read the prompts and choose their first tokens."""
    ends = request.ends(model.config)
    prompt, read = reading(model, tokens, mask, state, request)

    def read_and_step() -> None:
        last, after = read()
        Decoder(after, last, request.sampling)._work(model)

    batch = prompt.tokens.shape[0]
    prompts, steps = ("prompt", min(batch, 2)), ("step", batch)
    new = _unrehearsed(model, tokens.device, prompts, *([steps] if request.max_new_tokens > 1 else []))
    if prompts in new:
        _ahead.rehearse(read_and_step if steps in new else read)
    last, after = read()
    key, decoder = _decoder(model, after, last, request.sampling)
    if steps in new and prompts not in new:
        # with a state to spare: what the pass leaves in the decoder, its start overwrites
        _ahead.rehearse(partial(decoder._work, model))
    decoder.start(after, last, request.generator)
    decoder.choose(model, request.capture, request.max_new_tokens - 1)
    reached: list[State] = []
    blocks = _blocks(model, key, decoder, request, reached)
    return Run(
        decoder, after if request.return_state else None, _ended(blocks, ends, request.pad(model.config)), reached
    )


def _blocks(
    model: Network, key: Any, decoder: Decoder, request: Request, reached: list[State]
) -> Generator[Tensor, None, None]:
    """The tokens of each row, int64 [B, at most check_every] on the CPU at a time; the first was chosen already."""
    made = 0
    try:
        while made < request.max_new_tokens:
            some = []
            for _ in range(min(request.check_every, request.max_new_tokens - made)):
                if made:
                    decoder.step(model, request.generator)
                some.append(decoder.token.clone())
                made += 1
            if request.return_state and made == request.max_new_tokens:
                # here, as the next generation may take the decoder as soon as this one ends
                reached.append(decoder.snapshot())
            yield torch.stack(some, 1).cpu()
    finally:
        _decoders[model] = key, decoder


def _ended(parts: Generator[Tensor, None, None], ends: tuple[int, ...], pad: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, whether a row went on to here), int64 and bool [B], one position at a time until all rows ended."""
    stops = torch.tensor(ends, dtype=torch.int64)
    going: Tensor | None = None
    with contextlib.closing(parts):
        for part in parts:
            for column in part.unbind(1):
                going = torch.ones(part.shape[0], dtype=torch.bool) if going is None else going
                yield column.masked_fill(~going, pad), going
                going = going & ~torch.isin(column, stops)
                if not bool(going.any()):
                    return
