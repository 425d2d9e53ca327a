"""Continuous batching: rows of different lengths join a running batch and leave it, one token a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.base import Network
from wavecrest.models.xlstm.generation import CAPTURE_FROM, Decoder, Request, check_count, fingerprint, reading
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.models.xlstm.state import State, select_rows


@dataclass(frozen=True, slots=True)
class Finished:
    """A row that left the batch.

    Attributes:
        id: as `Scheduler.add` gave it.
        tokens: int64 [T] on the CPU, new tokens alone, with the one that ended it.
        reason: "end", or "length" where max_new_tokens were made.
        state: with `return_state`, of this row, after its prompt and all new tokens but the last; else None.
    """

    id: int
    tokens: Tensor
    reason: str
    state: State | None = None


@dataclass(slots=True)
class _Row:
    """A prompt that waits, or a row of the batch with the tokens that it has made."""

    id: int
    prompt: Tensor
    request: Request
    ends: frozenset[int]
    before: State | None
    made: list[int]


class Scheduler:
    """Generates for rows that come and go, as in a server: `add` takes a prompt at any time, `step` makes a token.

    A batch has a fixed number of slots, each with a state of its own. A step decodes all slots, empty ones too, so that
    on a GPU it is one graph whichever rows are in it. A prompt is read alone, when a slot is free, and its state copied
    there. No row sees another's: in `mlstm_step` and in norms a row has the same bits in any batch. GEMMs choose their
    kernel by the number of rows, which is the number of slots in every step: the bits of a row depend on it, not on who
    else is there, where a GEMM gives equal rows equal bits. Beside `xLSTMLarge.generate` with another batch, logits
    differ by the rounding of its GEMMs.

    Draws are of one generator for all slots: what a row draws depends on its slot and on the steps made before it.
    """

    def __init__(
        self,
        model: Network,
        slots: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        capture: bool = True,
    ) -> None:
        """Make the states of an empty batch.

        Args:
            model: an `xLSTMLarge` or `xLSTMLMModel`; its weights may be replaced while no row runs, and a graph is
                captured again then.
            slots: the most rows at a time.
            temperature, top_k, top_p, generator, capture: of all rows, as for `xLSTMLarge.generate`.

        Raises:
            InvalidArgument: an argument is outside this.
        """
        check_count("slots", slots)
        self._model, self._slots, self._capture, self._generator = model, slots, capture, generator
        self._sampling = Sampling(temperature, top_k, top_p)
        self._rows: list[_Row | None] = [None] * slots
        self._waiting: deque[_Row] = deque()
        self._next = 0
        self._made = self._decoder(model.empty_state(slots))

    @property
    def waiting(self) -> int:
        """Prompts that no slot was free for yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return sum(row is not None for row in self._rows)

    @property
    def decoding(self) -> str:
        """How the last step ran: "captured", or "eager: " and the reason; "" before the first one."""
        return self._made[1].decoding

    def add(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        state: State | None = None,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        insert_bos: bool | None = None,
        return_state: bool = False,
    ) -> int:
        """Queue a prompt, int64 or int32 [S] or [1, S]; it is read by the first `step` that has a slot for it.

        Args:
            prompt: at least one token, or none with `insert_bos`.
            max_new_tokens, state, eos_token_id, insert_bos: as for `xLSTMLarge.generate`, of this row alone.
            return_state: the finished row has its state, to go on from.

        Returns:
            The row's number, by which `step` and `tokens` name it.

        Raises:
            InvalidArgument: an argument is outside this.
        """
        request = Request(
            max_new_tokens, self._sampling, eos_token_id, insert_bos, self._generator, return_state=return_state
        )
        ends = frozenset(request.ends(self._model.config))
        if isinstance(prompt, Tensor) and prompt.ndim == 1:
            prompt = prompt[None]
        if isinstance(prompt, Tensor) and (prompt.ndim != 2 or prompt.shape[0] != 1):
            raise InvalidArgument(
                f"Scheduler: a prompt is [S] or [1, S], got {list(prompt.shape)}; add rows one by one"
            )
        if state is not None:
            state = self._model.own_state(state, 1)
        # what is wrong with a prompt is said here, and not by a step of other rows
        reading(self._model, prompt, None, state, request)
        row = _Row(self._next, prompt, request, ends, state, [])
        self._next += 1
        self._waiting.append(row)
        return row.id

    def cancel(self, id: int) -> list[int]:
        """Take a row out, waiting or running. Returns the tokens that it has made.

        Raises:
            InvalidArgument: there is no such row, or it has finished.
        """
        row = self._found(id)
        if row in self._waiting:
            self._waiting.remove(row)
        else:
            self._rows[self._rows.index(row)] = None
        return row.made

    def tokens(self, id: int) -> list[int]:
        """The tokens that a row has made so far; [] while it waits.

        Raises:
            InvalidArgument: there is no such row, or it has finished.
        """
        return list(self._found(id).made)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Make the next token of every row, and read the prompts that slots are free for, which makes their first one.

        Returns:
            The rows that ended; their slots are free.
        """
        key, decoder = self._made
        if self.running:
            decoder.choose(self._model, self._capture, CAPTURE_FROM)
            decoder.step(self._model, self._generator)
            for row, token in zip(self._rows, decoder.token.tolist(), strict=True):
                if row is not None:
                    row.made.append(token)
        found = self._leave()
        while self._waiting and None in self._rows:
            if fingerprint(self._model) != key:
                self._made = key, decoder = self._decoder(decoder.pool.state, decoder.token)
            self._join(self._rows.index(None), self._waiting.popleft(), decoder)
            # one token may be all that was asked for
            found += self._leave()
        return found

    def run(self) -> list[Finished]:
        """Step until no row is left. Returns all that finished, in the order in which they did."""
        found = []
        while self._waiting or self.running:
            found += self.step()
        return found

    def _decoder(self, state: State, token: Tensor | None = None) -> tuple[tuple[object, ...], Decoder]:
        """(what a captured graph depends on, a decoder for the slots)."""
        weight = self._model.embedding.weight
        shape = torch.empty(self._slots, self._model.config.vocab_size, device=weight.device)
        made = Decoder(state, shape, self._sampling)
        if token is not None:
            made.token.copy_(token)
        return fingerprint(self._model), made

    def _join(self, slot: int, row: _Row, decoder: Decoder) -> None:
        """Read a prompt and put its state and first token into a slot."""
        logits, after = reading(self._model, row.prompt, None, row.before, row.request).read()
        noise = self._sampling.noise(logits)
        if noise is not None:
            noise.exponential_(generator=self._generator)
        token = self._sampling.pick(logits, noise)
        decoder.pool.load_row(slot, after)
        decoder.token[slot] = token[0]
        row.made.append(int(token))
        self._rows[slot], row.before = row, None

    def _leave(self) -> list[Finished]:
        """Take the rows out that ended."""
        found = []
        for slot, row in enumerate(self._rows):
            if row is None or not row.made:
                continue
            reason = "end" if row.made[-1] in row.ends else "length"
            if reason == "end" or len(row.made) == row.request.max_new_tokens:
                state = None
                if row.request.return_state:
                    pool = self._made[1].pool.state
                    state = select_rows(pool, torch.tensor([slot], device=pool[0][0].device))
                found.append(Finished(row.id, torch.tensor(row.made), reason, state))
                self._rows[slot] = None
        return found

    def _found(self, id: int) -> _Row:
        for row in (*self._waiting, *self._rows):
            if row is not None and row.id == id:
                return row
        raise InvalidArgument(f"Scheduler: row {id} is not here; it has finished, was cancelled, or was never added")
