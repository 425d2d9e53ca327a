"""xLSTM Large: the network with generation, loading and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wavecrest.models.xlstm import generation, loader
from wavecrest.models.xlstm.generates import Generates
from wavecrest.models.xlstm.network import xLSTMNetwork


class xLSTMLarge(xLSTMNetwork, Generates):
    """The language model of xLSTM 7B (Beck et al., 2025, arXiv:2503.13427), with the official package's state dict.

    A state is a dict from block number to (c, n, m): c [B, NH, DK, DV], n float32 [B, NH, DK], m float32 [B, NH, 1]. It
    is a value: no call changes one that was passed in, so that several continuations can start from the same.
    """

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
