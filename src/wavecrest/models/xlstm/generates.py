"""The methods that generate: of xLSTM Large, and of language models over a block stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wavecrest.models.xlstm import beams as beam
from wavecrest.models.xlstm import generation, speculation
from wavecrest.models.xlstm.base import Network
from wavecrest.models.xlstm.beams import Beams, Search
from wavecrest.models.xlstm.generation import Generated, Request
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.models.xlstm.speculation import Draft, Verified
from wavecrest.models.xlstm.state import State


class Generates(Network):
    """A network with `generate`, `stream`, `beam_search`, `speculate` and `verify`."""

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        insert_bos: bool | None = None,
        generator: torch.Generator | None = None,
        check_every: int = 8,
        capture: bool = True,
        return_state: bool = False,
    ) -> Generated:
        """New tokens after prompts: the largest logit's, or draws (`Sampling`).

        Args:
            tokens: prompts, int64 or int32 [B, S].
            max_new_tokens: at least 1.
            attention_mask: [B, S], 0 for padding at the left or the right of a prompt.
            state: before the prompts, as `model(tokens, return_last_states=True)` gives it; not changed.
            temperature, top_k, top_p: see `Sampling`; temperature 0 takes the largest.
            eos_token_id: what ends a row, a token or several: whole numbers of any kind; a list, tuple, set, tensor or
                array of them. None: the configuration's, (): nothing.
            insert_bos: put the configuration's bos_token_id before prompts that do not begin with it; None: as
                `force_bos_token_insert` says, and not after a state.
            generator: of draws, on the model's device; None: torch's own.
            check_every: steps after which the host looks whether all rows ended; results do not depend on it.
            capture: on a GPU, replay the step as a graph, from 16 new tokens on; the last call's graph is used again
                for the same batch and sampling.
            return_state: also give the state to go on from, which has seen all tokens but each row's last one:
                `generate(found.last, n, state=found.state)` goes on where this call ended, and more of a text is read
                behind `found.last`. Rows that ended early cost one pass over the new tokens, which makes their states.

        Returns:
            The new tokens, how many there are of each row, and the state if it was asked for.

        Raises:
            InvalidArgument: an argument is outside this.
        """
        request = Request(
            max_new_tokens,
            Sampling(temperature, top_k, top_p),
            eos_token_id,
            insert_bos,
            generator,
            check_every,
            capture,
            return_state,
        )
        return generation.finish(self, generation.begin(self, tokens, attention_mask, state, request), request)

    def beam_search(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        beams: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        insert_bos: bool | None = None,
    ) -> Beams:
        """The `beams` likeliest continuations of each prompt that a search of that width finds.

        After each token the `beams` likeliest texts go on; one that ends is kept, if it is among these. The score is
        the sum of the tokens' log probabilities (after the soft cap, in float64), divided by length ** length_penalty,
        where the length is that of the new tokens. Steps run eagerly: the host sorts between them.

        Args:
            tokens, attention_mask, state, eos_token_id, insert_bos: as for `generate`.
            max_new_tokens: at least 1; texts that reach it count as they are.
            beams: texts that are followed, and results of each prompt. The batch has B · beams rows.
            length_penalty: above 0 it favours long texts, below 0 short ones; 0: the sum alone.
            early_stopping: stop a prompt as soon as `beams` texts have ended. False: when none that goes on can still
                have a better score than the last of them, so that stopping changes no result.

        Returns:
            Tokens, lengths and scores, best first.

        Raises:
            InvalidArgument: an argument is outside this.
        """
        request = Request(max_new_tokens, Sampling(), eos_token_id, insert_bos, None)
        settings = Search(beams, length_penalty, early_stopping)
        return beam.search(self, tokens, attention_mask, state, request, settings)

    def speculate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        draft: Draft,
        *,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        insert_bos: bool | None = None,
        return_state: bool = False,
    ) -> Generated:
        """The tokens of a greedy `generate`, several a call where a draft has them right.

        A call reads the last token and the drafted ones, keeps those that the model would have chosen, and adds its own
        next one. The tokens are those of `generate` as long as rounding does not decide between two logits: several
        tokens go through other kernels than single ones.

        Args:
            tokens, max_new_tokens, attention_mask, state, eos_token_id, insert_bos, return_state: as for `generate`.
            draft: draft(texts) gives int64 [B', K] for the texts of the B' rows that go on, int64 [S] each on the CPU,
                prompt and new tokens; K may be 0. `prompt_lookup(4)` is one that needs no model; 2 to 8 tokens pay.

        Returns:
            As `generate`; `decoding` says how many drafted tokens were right, and how many calls there were.

        Raises:
            InvalidArgument: an argument is outside this, or a draft gives something else.
        """
        request = Request(max_new_tokens, Sampling(), eos_token_id, insert_bos, None, return_state=return_state)
        return speculation.speculate(self, tokens, attention_mask, state, request, draft)

    def verify(self, last: Tensor, draft: Tensor, state: State) -> Verified:
        """One call that reads a token and the drafted ones behind it, and keeps those that the model would choose.

        The state goes back to the accepted tokens of each row from the inputs of the mLSTMs, without a second pass over
        the weights; where a block's mLSTM layer was replaced, or has hooks, with one.

        Args:
            last: [B, 1], a token that was chosen and not read yet.
            draft: [B, K], K at least 1, the tokens that may follow.
            state: before `last`, of B rows; not changed.

        Raises:
            InvalidArgument: a shape or dtype is outside this.
        """
        return speculation.verify(self, last, draft, state)

    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        insert_bos: bool | None = None,
        generator: torch.Generator | None = None,
        check_every: int = 1,
        capture: bool = True,
    ) -> Iterator[Tensor]:
        """The tokens of `generate` as they are made, int64 [B] on the CPU; `check_every` of them come at a time.

        Rows that ended give padding until all have. The arguments are checked, and the prompts read, by this call.
        """
        request = Request(
            max_new_tokens,
            Sampling(temperature, top_k, top_p),
            eos_token_id,
            insert_bos,
            generator,
            check_every,
            capture,
        )
        columns = generation.begin(self, tokens, attention_mask, state, request).columns
        return (column for column, _ in columns)
