"""xLSTM Large: the network with generation, loading and saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavecrest.models.xlstm import beams as beam
from wavecrest.models.xlstm import generation, loader, speculation
from wavecrest.models.xlstm.beams import Beams, Search
from wavecrest.models.xlstm.generation import Generated, Request
from wavecrest.models.xlstm.network import xLSTMNetwork
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.models.xlstm.speculation import Draft, Verified
from wavecrest.models.xlstm.state import State


class xLSTMLarge(xLSTMNetwork):
    """The language model of xLSTM 7B (Beck et al., 2025, arXiv:2503.13427), with the official package's state dict.

    A state is a dict from block number to (c, n, m): c [B, NH, DK, DV], n float32 [B, NH, DK], m float32 [B, NH, 1]. It
    is a value: no call changes one that was passed in, so that several continuations can start from the same.
    """

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

    def compile_ahead(self, batch: int = 1, longest: int = 2048) -> str | None:
        """Compile now, beside each other, the kernels of prompts of 1 to `longest` tokens and of the steps after them.

        `generate` compiles ahead what its first prompt needs; a prompt of another length may choose other kernels, and
        waits for those. A server calls this before it takes the first. PyTorch's operations run for it, for prompts of
        each number of tokens up to 8, each power of two and `longest`, with and without a state before them, and of
        several rows with and without padding: it needs the memory of the longest.

        Args:
            batch: rows of the prompts; all numbers above 1 share their prompts' kernels, but not those of steps.
            longest: tokens of the longest prompt. A longer one may need other kernels, and waits for them.

        Returns:
            None, or why it was left out or stopped: on a CPU nothing is compiled, and a hook would see what runs.

        Raises:
            InvalidArgument: a number is not above 0.
        """
        return generation.compile_ahead(self, batch, longest)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        weight_mode: str = "fused",
        quantize: str | None = None,
        **changes: Any,
    ) -> xLSTMLarge:
        """The model of a local folder, for inference; each weight is read straight to its place.

        Forms: Hugging Face's (config.json; model.safetensors, or parts with or without an index) and the official
        package's (config.yaml; model.safetensors, or model_0.safetensors, model_1.safetensors, …), with single or fused
        projections, as the files have them.

        Args:
            folder: of the model; names of the Hugging Face hub are not downloaded (`huggingface_hub.snapshot_download`
                gives a folder).
            device: None: the GPU if there is one, else the CPU.
            dtype: of the weights, torch.bfloat16 or "bfloat16"; None: as the embedding is stored.
            weight_mode: of the model: "fused" (fewer, larger GEMMs) or "single".
            quantize: "int8", "fp8" or "int4": see `wavecrest.models.xlstm.quantize`; each weight is packed as it is
                read.
            changes: fields of the configuration to set, such as inference_state_dtype="float16".

        Returns:
            The model, in eval mode.

        Raises:
            CheckpointError: the folder is incomplete, damaged or of another model; the message names what is missing,
                unexpected or of another shape. Nothing is loaded then.
            InvalidArgument: an argument is outside this, or a weight to be quantized holds NaN or infinity.
            MissingDependency: safetensors, or PyYAML for a config.yaml, is not installed.
        """
        return loader.load(cls, folder, device, dtype, weight_mode, quantize, changes)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        form: str = "huggingface",
        weight_mode: str | None = None,
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        """Write a folder that `from_pretrained` reads, and so do transformers or the official package.

        A `ConfigWarning` names what of the configuration transformers cannot read, or computes otherwise.

        Args:
            folder: a new or an empty one; it is there when it is whole.
            form: "huggingface" (config.json), or "official" (config.yaml, which holds no tokens).
            weight_mode: of the files: "single" or "fused", which transformers (5.23) does not load; None: "single" for
                "huggingface", the model's own for "official".
            max_shard_bytes: weights are written in several files beyond that.

        Raises:
            OutputError: the folder is not empty, or cannot be written.
            InvalidArgument: `form` or `weight_mode` is another.
            Unsupported: weights are packed; see `save_quantized`.
            MissingDependency: safetensors, or PyYAML for the official form, is not installed.
        """
        loader.save(self, folder, form, weight_mode, max_shard_bytes)

    def save_quantized(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write a quantized model as it is; `from_quantized` reads it, with the same bits in every weight.

        For wavecrest alone: values, scales and zero points are in the layout of `PackedWeight`, in safetensors files
        beside a packed.json with the configuration.

        Args:
            folder: a new or an empty one; it is there when it is whole.
            max_shard_bytes: weights are written in several files beyond that.

        Raises:
            InvalidArgument: no weight is packed.
            OutputError: the folder is not empty, or cannot be written.
            MissingDependency: safetensors is not installed.
        """
        loader.save_quantized(self, folder, max_shard_bytes)

    @classmethod
    def from_quantized(
        cls, folder: str | Path, *, device: torch.device | str | None = None, **changes: Any
    ) -> xLSTMLarge:
        """The model of a folder that `save_quantized` wrote, for inference: nothing is quantized anew.

        Args:
            folder: of the model.
            device: None: the GPU if there is one, else the CPU. fp8 weights keep the form that they were packed in.
            changes: fields of the configuration to set, such as inference_state_dtype="float16"; not weight_mode or
                tie_word_embeddings, which the weights have.

        Returns:
            The model, in eval mode.

        Raises:
            CheckpointError: the folder is incomplete, damaged, of another model or of a newer version.
            InvalidArgument: a change is not one that can be made.
            MissingDependency: safetensors is not installed.
        """
        return loader.load_quantized(cls, folder, device, changes)
