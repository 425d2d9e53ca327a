"""The configuration of xLSTM Large, read from and written to the files of the official package and of Hugging Face."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from wavecrest.errors import CheckpointError, InvalidArgument, MissingDependency
from wavecrest.models.xlstm import kernels
from wavecrest.records import decode, files

MODES = ("train", "train_with_padding", "inference")
WEIGHT_MODES = ("single", "fused")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# names of the fields in other files: first revisions of the Hugging Face files, then transformers
SYNONYMS = {
    "forward_backend_name": "chunkwise_kernel",
    "step_backend_name": "step_kernel",
    "hidden_size": "embedding_dim",
    "num_hidden_layers": "num_blocks",
}
# defaults of transformers where a config.json has no value (the 7B model's sizes)
HUGGING_FACE_DEFAULTS = {
    "embedding_dim": 4096,
    "num_heads": 8,
    "num_blocks": 32,
    "vocab_size": 50304,
    "ffn_proj_factor": 2.667,
}
# keys that say something about the file, its training or another runtime, and nothing about the function computed
SILENT = frozenset(
    {
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "_name_or_path",
        "use_cache", "head_dim", "add_forward_backend_padding", "add_post_blocks_norm", "igate_bias_init_range",
        "mlstm_round_up_to_multiple_of", "max_inference_chunksize",
    }
)  # fmt: skip
# switches of the first revisions for parts that this architecture does not have
ABSENT_PARTS = ("add_qk_norm", "add_post_norm", "add_embedding_dropout")
# fields that the official package's dataclass does not have
TOKEN_FIELDS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "force_bos_token_insert")
# kernels that transformers runs without the official package
NATIVE_KERNELS = ("chunkwise--native_autograd", "parallel--native_autograd", "native_sequence__native", "native")
_KERNELS = ("chunkwise_kernel", "sequence_kernel", "step_kernel")
_CAPS = ("gate_soft_cap", "output_logit_soft_cap")
_SWITCHES = (
    "use_bias", "norm_reduction_force_float32", "add_out_norm", "return_last_states", "tie_word_embeddings",
    "force_bos_token_insert",
)  # fmt: skip
_FACTORS = ("norm_eps", "qk_dim_factor", "v_dim_factor", "eps", "ffn_proj_factor")
_SIZES = ("embedding_dim", "num_heads", "num_blocks", "vocab_size", "chunk_size", "ffn_round_up_to_multiple_of")
# far beyond any model: with them no size overflows, and the names of all weights fit in memory
MOST = dict.fromkeys(_SIZES, 1 << 24) | {"num_blocks": 1 << 12}
MOST_FACTOR = 1 << 10


class ConfigWarning(UserWarning):
    """A configuration holds something that is not used; the message names it."""


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of the cell state c for an `inference_state_dtype`; float32 with a warning for bfloat16."""
    if name == "bfloat16":
        warnings.warn(
            "inference_state_dtype bfloat16 is not used, the cell state is float32: in 8 bits of mantissa decay is "
            "lost; float16 has half of the bytes and no loss",
            ConfigWarning,
            stacklevel=3,
        )
        return torch.float32
    return DTYPES[name]


@dataclass
class xLSTMLargeConfig:
    """Sizes and settings of `xLSTMLarge`, under the official package's names.

    Attributes:
        embedding_dim: features of a token.
        num_heads: heads of a cell; divides `qk_dim` and `v_dim`.
        num_blocks: blocks, each an mLSTM layer and a gated MLP.
        vocab_size: tokens.
        use_bias: biases in projections and norms; the gates always have some.
        norm_eps: epsilon of all norms.
        norm_reduction_force_float32: kept for the files; reductions are in float32 always.
        add_out_norm: a norm after the last block.
        qk_dim_factor, v_dim_factor: `qk_dim` and `v_dim` over `embedding_dim`.
        chunkwise_kernel, sequence_kernel, step_kernel: "auto" for the dispatcher's choice, or a name of the official
            package (`wavecrest.models.xlstm.kernels`).
        mode: "train", "train_with_padding" or "inference"; any sequence length runs in each.
        chunk_size: kept for the files; kernels choose their own, and results do not depend on it.
        return_last_states: `xLSTMLarge` returns (logits, state) unless a call says otherwise.
        autocast_kernel_dtype: kept for the files; kernels run in their operands' dtype.
        eps: added to the cell's normalizer.
        inference_state_dtype: of the cell state c: "float32" or "float16". With "bfloat16" it is float32, with a
            warning; n and m are float32 always.
        ffn_proj_factor, ffn_round_up_to_multiple_of: see `ffn_dim`.
        gate_soft_cap, output_logit_soft_cap: cap · tanh(x / cap) of the gates and of the logits; 0 or None: no cap.
        weight_mode: "single" or "fused" projections.
        tie_word_embeddings: the logits' weight is the embedding's.
        bos_token_id, eos_token_id, pad_token_id: for `generate`; None: no such token. `bos_token_id` must be in the
            vocabulary, because the model reads it.
        force_bos_token_insert: `generate` puts `bos_token_id` before prompts that do not begin with it.
    """

    embedding_dim: int
    num_heads: int
    num_blocks: int
    vocab_size: int
    use_bias: bool = False
    norm_eps: float = 1e-6
    norm_reduction_force_float32: bool = True
    add_out_norm: bool = True
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    chunkwise_kernel: str = kernels.AUTO
    sequence_kernel: str = kernels.AUTO
    step_kernel: str = kernels.AUTO
    mode: str = "train"
    chunk_size: int = 64
    return_last_states: bool = False
    autocast_kernel_dtype: str = "bfloat16"
    eps: float = 1e-6
    inference_state_dtype: str = "float32"
    ffn_proj_factor: float = 2.6667
    ffn_round_up_to_multiple_of: int = 64
    gate_soft_cap: float | None = 15.0
    output_logit_soft_cap: float | None = 30.0
    weight_mode: str = "single"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 1
    force_bos_token_insert: bool = True

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST[name]:
                raise InvalidArgument(f"xLSTM: {name} must be a whole number from 1 to {MOST[name]:,}, got {value!r}")
        for name in _FACTORS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_FACTOR:
                raise InvalidArgument(f"xLSTM: {name} must be above 0 and at most {MOST_FACTOR}, got {value!r}")
        for name in _CAPS:
            cap = getattr(self, name)
            if cap is not None and (
                isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 <= cap < math.inf
            ):
                raise InvalidArgument(f"xLSTM: {name} must be a number from 0 on or None, got {cap!r}")
        choices = {"mode": MODES, "weight_mode": WEIGHT_MODES}
        choices |= dict.fromkeys(("autocast_kernel_dtype", "inference_state_dtype"), tuple(DTYPES))
        for name, names in choices.items():
            if getattr(self, name) not in names:
                raise InvalidArgument(f"xLSTM: {name} takes {', '.join(names)}, not {getattr(self, name)!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"xLSTM: {name} must be True or False, got {getattr(self, name)!r}")
        for name in ("qk_dim", "v_dim"):
            if getattr(self, name) < 1 or getattr(self, name) % self.num_heads:
                raise InvalidArgument(
                    f"xLSTM: {self.num_heads} heads do not divide {name} {getattr(self, name)}; change num_heads, "
                    f"embedding_dim or {name}_factor"
                )
        self._check_tokens()
        kernels.check("chunkwise", self.chunkwise_kernel)
        kernels.check("sequence", self.sequence_kernel)
        kernels.check("step", self.step_kernel)
        self._check_states()

    def _check_tokens(self) -> None:
        for name in ("bos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None and type(token) is not int:
                raise InvalidArgument(f"xLSTM: {name} must be a whole number or None, got {token!r}")
        # an end is compared and padding is written, so that any number works
        if self.bos_token_id is not None and not 0 <= self.bos_token_id < self.vocab_size:
            raise InvalidArgument(
                f"xLSTM: bos_token_id is {self.bos_token_id}, tokens are from 0 to {self.vocab_size - 1}; None: it "
                "has none"
            )
        ends = self.eos_token_id
        several = ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)
        if any(type(token) is not int for token in several):
            raise InvalidArgument(f"xLSTM: eos_token_id must be a whole number, a list of them or None, got {ends!r}")

    def _check_states(self) -> None:
        """Refuse modes and kernels that cannot return a state, as the official package does."""
        if not self.return_last_states:
            return
        if self.mode == "train_with_padding":
            raise InvalidArgument("xLSTM: mode train_with_padding returns no states; set return_last_states=False")
        if not kernels.has_state(self.chunkwise_kernel):
            raise InvalidArgument(
                f"xLSTM: {self.chunkwise_kernel} has no states; set return_last_states=False or take a chunkwise kernel"
            )

    @property
    def qk_dim(self) -> int:
        """Features of queries and keys, all heads together."""
        return int(self.embedding_dim * self.qk_dim_factor)

    @property
    def v_dim(self) -> int:
        """Features of values and outputs of the cell, all heads together."""
        return int(self.embedding_dim * self.v_dim_factor)

    @property
    def ffn_dim(self) -> int:
        """Width of the MLP: embedding_dim times its factor, rounded as checkpoints were."""
        multiple = self.ffn_round_up_to_multiple_of
        return int((self.embedding_dim * self.ffn_proj_factor + multiple - 1) // multiple * multiple)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the cell state c."""
        return stored_dtype(self.inference_state_dtype)

    def selected_kernels(self) -> kernels.Kernels:
        """The kernels that it names; its chunk size is of other kernels, and changes no result."""
        return kernels.Kernels.named(self.chunkwise_kernel, self.sequence_kernel, self.step_kernel, self.state_dtype)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config") -> xLSTMLargeConfig:
        """From the keys of a file of either vocabulary; keys that are not known are ignored with one warning.

        Args:
            values: of the official package, or of a Hugging Face config.json ("model_type", where there is one, is
                "xlstm"), which also gets the values that transformers takes for absent keys.
            source: what to call it in messages.

        Raises:
            CheckpointError: it describes another architecture, or sizes that contradict each other.
            InvalidArgument: a value is outside of what `xLSTMLargeConfig` takes.
        """
        if values.get("model_type", "xlstm") != "xlstm":
            raise CheckpointError(f"{source} is of a model of type {values['model_type']!r}, not xlstm")
        # transformers writes None where it has a value of its own
        values = {name: value for name, value in values.items() if value is not None or name.endswith(("_cap", "_id"))}
        if "embedding_dim" in values and values.get("hidden_size", values["embedding_dim"]) != values["embedding_dim"]:
            raise CheckpointError(
                f"{source}: embedding_dim is {values['embedding_dim']}, hidden_size {values['hidden_size']}; keep the "
                "one that the weights have"
            )
        for name in ABSENT_PARTS:
            if values.get(name):
                raise CheckpointError(f"{source}: {name} is set; this architecture has no such part")
        known = {field.name for field in fields(cls)}
        found: dict[str, Any] = dict(HUGGING_FACE_DEFAULTS) if "model_type" in values else {}
        ignored = []
        # own names last, so that they win over their synonyms
        for name, value in sorted(values.items(), key=lambda pair: pair[0] in known):
            if name in SYNONYMS or name in known:
                found[SYNONYMS.get(name, name)] = value
            elif name == "cell_norm_eps" and value == values.get("norm_eps", 1e-6):
                continue
            elif name not in SILENT and name not in ABSENT_PARTS:
                ignored.append(name)
        if ignored:
            warnings.warn(f"{source}: not used: {', '.join(sorted(ignored))}", ConfigWarning, stacklevel=2)
        missing = [name for name in HUGGING_FACE_DEFAULTS if name not in found and name != "ffn_proj_factor"]
        if missing:
            raise CheckpointError(f"{source} lacks {', '.join(missing)}")
        config = cls(**found)
        if values.get("head_dim", config.v_dim // config.num_heads) != config.v_dim // config.num_heads:
            raise CheckpointError(
                f"{source}: head_dim is {values['head_dim']}, v_dim {config.v_dim} of {config.num_heads} heads"
            )
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> xLSTMLargeConfig:
        """From a folder's config.json (Hugging Face), or its config.yaml (the official package).

        Raises:
            CheckpointError: there is neither, or it is damaged or of another architecture.
            MissingDependency: PyYAML is not installed, for a config.yaml.
        """
        path = Path(folder)
        if (path / "config.json").is_file():
            path = path / "config.json"
            values = files.read_json(path, what="configuration", error=CheckpointError)
        elif (path / "config.yaml").is_file():
            path = path / "config.yaml"
            values = _read_yaml(path)
        else:
            raise CheckpointError(f"{folder} is no folder of an xLSTM: it has neither config.json nor config.yaml")
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is damaged: it holds {type(values).__name__}, not names and values")
        try:
            return cls.from_dict(values, source=str(path))
        except InvalidArgument as error:
            raise CheckpointError(f"{path}: {error}") from error

    def to_dict(self, form: str = "official") -> dict[str, Any]:
        """The keys of a file: of the official package's config.yaml, or of a Hugging Face config.json.

        A kernel that is "auto" is left out, as neither reader knows that name. A config.json asks for inference with
        states, without which transformers' blocks do not run; what transformers cannot read or computes otherwise is
        there as it is, and named by a `ConfigWarning`.

        Raises:
            InvalidArgument: `form` is neither "official" nor "huggingface".
        """
        if form not in ("official", "huggingface"):
            raise InvalidArgument(f"xLSTM: form takes official, huggingface, not {form!r}")
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if form == "official":
            own = {name: value for name, value in own.items() if name not in TOKEN_FIELDS}
        else:
            own = {
                "architectures": ["xLSTMForCausalLM"],
                "model_type": "xlstm",
                "hidden_size": self.embedding_dim,
                "num_hidden_layers": self.num_blocks,
            } | own
            own |= {"mode": "inference", "return_last_states": kernels.has_state(self.chunkwise_kernel)}
            # whole numbers are refused there
            numbers = {name: getattr(self, name) for name in (*_FACTORS, *_CAPS)}
            own |= {name: float(number) for name, number in numbers.items() if number is not None}
            if problems := self._strange():
                warnings.warn(f"not for transformers (5.23): {'; '.join(problems)}", ConfigWarning, stacklevel=2)
        return {name: value for name, value in own.items() if not (name.endswith("_kernel") and value == kernels.AUTO)}

    def _strange(self) -> list[str]:
        """Settings that transformers cannot read or computes in another way, each with the reason."""
        caps = {name: getattr(self, name) for name in _CAPS}
        found = [f"{name}={cap} (it divides by a number)" for name, cap in caps.items() if not cap]
        if not self.add_out_norm:
            found.append("add_out_norm=False (it always has this norm)")
        elif self.use_bias:
            found.append("use_bias=True (its last norm has no bias)")
        named = [name for name in _KERNELS if getattr(self, name) not in (kernels.AUTO, *NATIVE_KERNELS)]
        return found + [f"{name}={getattr(self, name)} (it needs the package xlstm for it)" for name in named]


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency("pyyaml", str(path), "pip install pyyaml") from error
    text = decode.read_text(path, what="configuration", error=CheckpointError)
    try:
        return decode.yaml_of(text, yaml)
    except decode.Undecodable as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from None


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    """Write names and values as YAML, in their order.

    Raises:
        MissingDependency: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency("pyyaml", str(path), "pip install pyyaml") from error
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
