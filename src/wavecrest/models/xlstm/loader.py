"""Folders of weights: checked by their headers first, then read straight into the model's memory."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import CheckpointError, InvalidArgument, MissingDependency, OutputError, Unsupported
from wavecrest.models.xlstm import weights
from wavecrest.models.xlstm.config import ConfigWarning, write_yaml, xLSTMLargeConfig
from wavecrest.models.xlstm.quantize import check_format, quantized, takes
from wavecrest.ops import PackedWeight

if TYPE_CHECKING:
    from wavecrest.models.xlstm.model import xLSTMLarge

# of a message that lists names
MAX_NAMES = 12
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model(_\d+|-\d+-of-\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise MissingDependency("safetensors", "weights of xLSTM", "pip install 'wavecrest[hf]'") from error
    return safetensors


def _named(names: Iterable[str]) -> str:
    """Names for a message."""
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


def _files(folder: Path) -> list[Path]:
    """The files of weights, in order.

    Raises:
        CheckpointError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(table.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {_named(missing)}, which {INDEX} names")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    shards = sorted(path for path in folder.glob("model*.safetensors") if _SHARD.fullmatch(path.name))
    if not shards:
        raise CheckpointError(f"{folder} has no weights: neither model.safetensors nor parts of it")
    return shards


class _Reader:
    """The open files of a folder, and the tensors in them under the official names."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        module = _safetensors()
        self.stored: dict[str, _Stored] = {}
        self._open: dict[Path, Any] = {}
        for path in _files(folder):
            try:
                handle = stack.enter_context(module.safe_open(path, framework="pt", device="cpu"))
                keys = list(handle.keys())
                headers = {key: handle.get_slice(key) for key in keys}
                found = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in headers.items()}
            except (module.SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._open[path] = handle
            for key, (shape, dtype) in found.items():
                name = weights.EMBEDDING if key == weights.HUGGING_FACE_EMBEDDING else key
                if name in self.stored:
                    raise CheckpointError(f"{name} is in {self.stored[name].file.name} and in {path.name}")
                self.stored[name] = _Stored(path, key, shape, dtype)

    def read(self, rows: weights.Rows) -> Tensor:
        """Rows of a tensor, on the CPU in the dtype of the file."""
        stored = self.stored[rows.key]
        part: Tensor = self._open[stored.file].get_slice(stored.key)[rows.start : rows.stop]
        return part


def _check(reader: _Reader, config: xLSTMLargeConfig, weight_mode: str, folder: Path) -> None:
    """Refuse weights that are not those of a configuration, naming all that differ."""
    wanted = weights.shapes(config, weight_mode)
    found = {name: stored.shape for name, stored in reader.stored.items()}
    if config.tie_word_embeddings:
        found.pop(weights.LM_HEAD, None)
    problems = []
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing:
        problems.append(f"missing: {_named(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_named(unexpected)}")
    wrong = [
        f"{name} {list(found[name])} for {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        problems.append(f"of another shape: {_named(wrong)}")
    if problems:
        raise CheckpointError(f"{folder}: the weights are not those of its configuration; {'; '.join(problems)}")


def load(
    kind: type[xLSTMLarge],
    folder: str | Path,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    weight_mode: str,
    quantize: str | None,
    changes: Mapping[str, Any],
) -> xLSTMLarge:
    """What `xLSTMLarge.from_pretrained` does; see there."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    if quantize is not None:
        check_format(quantize)
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgument(f"from_pretrained: dtype must be a floating-point type, not {dtype}")
    known = {field.name for field in fields(xLSTMLargeConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise InvalidArgument(f"from_pretrained: the configuration has no {', '.join(unknown)}")
    config = xLSTMLargeConfig.from_folder(path)
    inference = {"mode": "inference", "return_last_states": weights_keep_states(config, changes)}
    config = replace(config, **(inference | {"weight_mode": weight_mode} | dict(changes)))
    target = torch.device(device or hardware.detect().torch_name)
    with contextlib.ExitStack() as stack:
        reader = _Reader(path, stack)
        stored_mode = weights.weight_mode_of(list(reader.stored))
        _check(reader, config, stored_mode, path)
        with warnings.catch_warnings():
            # said when the configuration was read
            warnings.simplefilter("ignore", ConfigWarning)
            model = kind(config, device="meta")
        for name, parameter in list(model.named_parameters()):
            value = _filled(reader, name, config, stored_mode, parameter.shape, target, dtype)
            _put(model, name, quantized(value, quantize) if quantize is not None and takes(name) else value)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embedding.weight
    return model.eval()
