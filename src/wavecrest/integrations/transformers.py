"""Workloads from local Hugging Face model folders, and `attn_implementation="wavecrest"` for their models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import hardware
from wavecrest.errors import MissingDependency, WorkloadError
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.models.xlstm.transformers import patch_transformers_xlstm
from wavecrest.optimizer.steps.replace_attention import register_attention, use_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wavecrest.quantizer.kv_cache import QuantizedStaticCache

__all__ = ["enable", "load_folder", "patch_transformers_xlstm", "quantized_cache", "use_attention"]

# sequence lengths and batch sizes tried unless the folder's spec says otherwise
DEFAULT_SHAPES = ((1, 32), (8, 128))
SENTENCES = (
    "The morning train was late, and nobody on the platform seemed to mind.",
    "A recursive function must have a base case, or it never returns.",
    "Salt, water, flour and time are all that bread has ever needed.",
    "The committee approved the budget after a short debate about the bridge.",
    "Gravity bends light, and so a galaxy can act as a lens for another behind it.",
    "She tuned the violin by ear while the hall was still empty.",
    "Heavy rain is expected in the north, with clear skies by the evening.",
    "Please restart the server after the configuration has been changed.",
)


def enable() -> None:
    """Make `attn_implementation="wavecrest"` known to transformers, in this process; a second time does nothing.

    transformers (5.24) has no entry points that it would load by itself. `docs/attention.md` says which calls and masks
    run on which op.

    Raises:
        MissingDependency: transformers is not installed.
    """
    try:
        register_attention()
    except ImportError as error:
        raise MissingDependency(
            "transformers", 'attn_implementation="wavecrest"', "pip install transformers"
        ) from error


def quantized_cache(model: nn.Module, max_cache_len: int, format: str = "fp8") -> QuantizedStaticCache:
    """An empty static key-value cache in 8 or 4 bits, to call a model or its `generate` with (`docs/quantize.md`).

    Args:
        model: of transformers, on our attention (`use_attention`).
        max_cache_len: tokens of a sequence at most, prompt and new ones.
        format: "fp8" (e4m3fnuz on gfx942, else e4m3fn), "int8" or "int4".

    Raises:
        InvalidArgument: the format is unknown, or `max_cache_len` is below 1.
        Unsupported: the model's attention is another one, or a layer keeps something else than keys and values.
        MissingDependency: transformers is not installed.
    """
    from wavecrest.quantizer.place import cache_module

    made: QuantizedStaticCache = cache_module().QuantizedStaticCache(model, max_cache_len, format)
    return made


def load_folder(folder: str, *, device: str | None = None) -> Workload:
    """A workload from a model folder: its own architecture and weights, its tokenizer on real sentences.

    Causal language models get a "prefill" bucket; encoders one bucket per shape. A folder without a tokenizer gets
    random token ids.

    Raises:
        MissingDependency: transformers is not installed.
        WorkloadError: the folder does not hold a model that transformers can load offline.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "--hf", "pip install transformers") from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise WorkloadError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    target = device or hardware.detect().torch_name
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        model: nn.Module = _model_class(transformers, config).from_pretrained(path, local_files_only=True)
    except Exception as error:
        # transformers, safetensors and huggingface_hub each raise their own kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorkloadError(f"transformers cannot load {folder}: {first}") from error
    model = model.eval().to(target)
    buckets = {}
    for batch, length in DEFAULT_SHAPES:
        tensors = _tokens(transformers, path, config, batch, length)
        buckets[f"b{batch}s{length}"] = Inputs((), {name: tensor.to(target) for name, tensor in tensors.items()})
    return Workload(model, buckets, spec=f"hf:{folder}", name=path.name or type(model).__name__)


def _model_class(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _tokens(transformers: Any, path: Path, config: Any, batch: int, length: int) -> dict[str, Tensor]:
    import torch

    has_tokenizer = any((path / name).exists() for name in ("tokenizer.json", "vocab.txt", "tokenizer.model"))
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        texts = [
            " ".join(SENTENCES[(row + i) % len(SENTENCES)] for i in range(length // 8 + 1)) for row in range(batch)
        ]
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return {name: value for name, value in encoded.items() if name in ("input_ids", "attention_mask")}
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise WorkloadError(f"{path} has no tokenizer and no vocabulary; write a workload function instead of --hf")
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(0, vocabulary, (batch, length), generator=generator, device="cpu")}
