"""Folders of weights: checked by their headers first, then read straight into the model's memory."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.errors import CheckpointError, InvalidArgument, MissingDependency, OutputError, Unsupported
from wavecrest.models.xlstm import kernels, weights
from wavecrest.models.xlstm.config import write_yaml, xLSTMLargeConfig
from wavecrest.models.xlstm.layers import fused_projections
from wavecrest.models.xlstm.network import xLSTMNetwork
from wavecrest.models.xlstm.quantize import check_format, packed, put, takes
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed import from_plain, to_plain
from wavecrest.records import decode, files

Network = TypeVar("Network", bound=xLSTMNetwork)

# longest list of names in a message
MAX_NAMES = 12
INDEX = "model.safetensors.index.json"
# the configuration of a folder with packed weights; of another name, so that no other reader takes them for plain ones
PACKED = "packed.json"
PACKED_VERSION = 1
# safetensors' names of the dtypes that a weight may be stored in
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
# transformers' names of arguments of `from_pretrained`
_SYNONYMS = {"torch_dtype": "dtype", "device_map": "device"}
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
        raise MissingDependency("safetensors", "weights of xLSTM", "pip install safetensors") from error
    return safetensors


def _named(names: Iterable[str]) -> str:
    """Names for a message."""
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


def weight_files(folder: Path) -> list[Path]:
    """The files of weights, in order.

    Raises:
        CheckpointError: the folder has no such file, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            table = decode.json_of(decode.read_text(index, what="index", error=CheckpointError))["weight_map"]
            names = sorted(set(table.values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        if outside:
            raise CheckpointError(f"{index} names files outside of the folder: {_named(outside)}")
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
        for path in weight_files(folder):
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
    missing, unexpected = wanted.keys() - found.keys() - {weights.OUT_NORM_BIAS}, found.keys() - wanted.keys()
    if missing:
        problems.append(f"missing: {_named(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_named(unexpected)}")
    wrong = [
        f"{name} {list(found[name])} for {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    strange = {f"{name} {stored.dtype}" for name, stored in reader.stored.items() if stored.dtype not in _DTYPES}
    if strange:
        problems.append(f"no floating-point type that weights have: {_named(strange)}")
    if wrong:
        problems.append(f"of another shape: {_named(wrong)}")
    if problems:
        raise CheckpointError(f"{folder}: the weights are not those of its configuration; {'; '.join(problems)}")


def load(
    kind: type[Network],
    folder: str | Path,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    weight_mode: str,
    quantize: str | None,
    changes: Mapping[str, Any],
) -> Network:
    """Load a model for `xLSTMLarge.from_pretrained`, which documents arguments and errors."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; names of the Hugging Face hub are not downloaded: "
            "huggingface_hub.snapshot_download(name) gives the folder of one"
        )
    if (path / PACKED).is_file():
        raise CheckpointError(f"{folder} is of a quantized model, which has a loader of its own: from_quantized")
    if quantize is not None:
        check_format(quantize)
    chosen = _NAMES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and chosen not in _DTYPES.values():
        raise InvalidArgument(f"from_pretrained: dtype takes {', '.join(_NAMES)}, not {dtype}")
    config = _configured(path, weight_mode, changes)
    target = torch.device(device if device is not None else hardware.detect().torch_name)
    with contextlib.ExitStack() as stack:
        reader = _Reader(path, stack)
        stored_mode = weights.weight_mode_of(list(reader.stored))
        _check(reader, config, stored_mode, path)
        chosen = chosen or _DTYPES[reader.stored[weights.EMBEDDING].dtype]
        model = kind(config, device="meta")
        for name, parameter in list(model.named_parameters()):
            value = torch.empty(parameter.shape, dtype=chosen, device=target)
            if name == weights.OUT_NORM_BIAS and name not in reader.stored:
                value.zero_()
            else:
                _fill(value, reader, weights.sources(name, config, stored_mode, parameter.shape[0]))
            put(model, name, packed(name, value, quantize) if quantize is not None and takes(name) else value)
    if config.tie_word_embeddings:
        put(model, weights.LM_HEAD, model.embedding.weight)
    for one in fused_projections(model):
        one.lay_out()
    return model.eval()


def _configured(folder: Path, weight_mode: str, changes: Mapping[str, Any]) -> xLSTMLargeConfig:
    """A folder's configuration for inference, with the caller's changes."""
    for theirs, ours in _SYNONYMS.items():
        if theirs in changes:
            raise InvalidArgument(f"from_pretrained: {theirs}= is called {ours}= here")
    known = {field.name for field in fields(xLSTMLargeConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise InvalidArgument(f"from_pretrained: the configuration has no {', '.join(unknown)}")
    config = xLSTMLargeConfig.from_folder(folder)
    chunkwise = changes.get("chunkwise_kernel", config.chunkwise_kernel)
    settings: dict[str, Any] = {
        "mode": "inference",
        "return_last_states": kernels.has_state(chunkwise),
        "weight_mode": weight_mode,
    }
    return replace(config, **(settings | dict(changes)))


def _fill(value: Tensor, reader: _Reader, parts: list[weights.Rows]) -> None:
    """Read the parts of a parameter into its rows."""
    start = 0
    for rows in parts:
        part = reader.read(rows)
        value[start : start + part.shape[0]].copy_(part)
        start += part.shape[0]


def save(model: xLSTMNetwork, folder: str | Path, form: str, weight_mode: str | None, max_shard_bytes: int) -> None:
    """Save a model for `xLSTMLarge.save_pretrained`, which documents arguments and errors."""
    # transformers 5.23 fails to initialise fused layers, which it does before it loads them
    mode = weight_mode or ("single" if form == "huggingface" else model.config.weight_mode)
    path = Path(folder)
    settings = replace(model.config, weight_mode=mode).to_dict(form)
    own = {name: value.detach() for name, value in model.state_dict().items()}
    some = next((name for name, value in own.items() if isinstance(value, PackedWeight)), None)
    if some is not None:
        raise Unsupported(f"{some} is packed; take save_quantized, or save the model before it is quantized")
    # the official package ties nothing: its files have both
    config = replace(model.config, tie_word_embeddings=model.config.tie_word_embeddings and form == "huggingface")
    _safetensors()
    with _whole(path) as scratch:
        if form == "official":
            write_yaml(scratch / "config.yaml", settings)
        else:
            settings["dtype"] = str(model.embedding.weight.dtype).removeprefix("torch.")
            (scratch / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _write_weights(scratch, own, config, (model.config.weight_mode, mode), form, max_shard_bytes)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `path` once all is written; it is gone after an error.

    Raises:
        OutputError: `path` is there and not empty, or something cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputError(f"{path} is there already and not empty; save to a new folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise OutputError(f"cannot write to {path.parent}: {error}") from error
    try:
        yield scratch
        # as the user's new files are: temporary folders, and files of safetensors, are closed to others
        permissions = next(one for one in scratch.iterdir() if one.suffix != ".safetensors").stat().st_mode & 0o777
        for file in scratch.iterdir():
            file.chmod(permissions)
        scratch.chmod(permissions | (permissions & 0o444) >> 2)
        # an empty folder is replaced, and nothing is seen of a folder before it is whole
        scratch.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_quantized(model: xLSTMNetwork, folder: str | Path, max_shard_bytes: int) -> None:
    """Save a model for `xLSTMLarge.save_quantized`, which documents arguments and errors."""
    from safetensors.torch import save_file

    own: dict[str, Tensor] = {name: value.detach() for name, value in model.state_dict().items()}
    if not any(isinstance(value, PackedWeight) for value in own.values()):
        raise InvalidArgument("save_quantized: no weight is packed; quantize the model, or take save_pretrained")
    if model.lm_head.weight is model.embedding.weight:
        del own[weights.LM_HEAD]
    plain = to_plain(own)
    groups = list(_shards(plain, {name: value.nbytes for name, value in plain.items()}, max_shard_bytes))
    about = {"version": PACKED_VERSION, "model_type": "xlstm", "config": asdict(model.config)}
    with _whole(Path(folder)) as scratch:
        (scratch / PACKED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        table: dict[str, str] = {}
        for number, names in enumerate(groups):
            file = "model.safetensors"
            if len(groups) > 1:
                file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
            tensors = {name: plain[name].cpu().contiguous() for name in names}
            save_file(tensors, scratch / file, metadata={"format": "pt"})
            table |= dict.fromkeys(names, file)
        if len(groups) > 1:
            (scratch / INDEX).write_text(json.dumps({"weight_map": table}, indent=2) + "\n", encoding="utf-8")


def load_quantized(
    kind: type[Network], folder: str | Path, device: torch.device | str | None, changes: Mapping[str, Any]
) -> Network:
    """Load a model for `xLSTMLarge.from_quantized`, which documents arguments and errors."""
    path = Path(folder)
    if not (path / PACKED).is_file():
        raise CheckpointError(f"{folder} has no {PACKED}: it is no folder that save_quantized wrote")
    config = _packed_config(path / PACKED, changes)
    target = torch.device(device if device is not None else hardware.detect().torch_name)
    found = _packed_weights(path)
    model = kind(config, device="meta")
    head = found.pop(weights.LM_HEAD, None)
    wanted = weights.shapes(config, config.weight_mode)
    wanted.pop(weights.LM_HEAD, None)
    problems = [
        f"{what}: {_named(names)}"
        for what, names in (("missing", wanted.keys() - found.keys()), ("unexpected", found.keys() - wanted.keys()))
        if names
    ]
    # a tied head is the embedding, unless it alone was packed
    if head is None and not config.tie_word_embeddings:
        problems.append(f"missing: {weights.LM_HEAD}")
    checked = found if head is None else found | {weights.LM_HEAD: head}
    wanted[weights.LM_HEAD] = (config.vocab_size, config.embedding_dim)
    problems += [
        f"{name} is {list(value.shape)}, not {list(wanted[name])}"
        for name, value in checked.items()
        if name in wanted and tuple(value.shape) != wanted[name]
    ]
    problems += [
        f"{name} is packed, which this weight cannot be"
        for name, value in checked.items()
        if isinstance(value, PackedWeight) and not takes(name, lm_head=True)
    ]
    if problems:
        raise CheckpointError(f"{folder}: the weights are not those of its configuration; {'; '.join(problems)}")
    for name, value in checked.items():
        put(model, name, value.to(target))
    if head is None:
        put(model, weights.LM_HEAD, model.embedding.weight)
    for one in fused_projections(model):
        one.lay_out()
    return model.eval()


def _packed_config(path: Path, changes: Mapping[str, Any]) -> xLSTMLargeConfig:
    """The configuration of a folder with packed weights, with the caller's changes."""
    values = files.read_json(path, what="configuration", error=CheckpointError)
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise CheckpointError(f"{path} is damaged: it has no configuration")
    if values.get("version") != PACKED_VERSION:
        raise CheckpointError(
            f"{path} has version {values.get('version')!r}, this package reads {PACKED_VERSION}; update it"
        )
    known = {field.name for field in fields(xLSTMLargeConfig)}
    unknown = sorted(values["config"].keys() - known)
    if unknown:
        raise CheckpointError(f"{path}: the configuration has no {', '.join(unknown)}")
    fixed = sorted(changes.keys() - known | changes.keys() & {"weight_mode", "tie_word_embeddings"})
    if fixed:
        raise InvalidArgument(f"from_quantized: {', '.join(fixed)} is no setting of a saved model that can change")
    try:
        return xLSTMLargeConfig(**(values["config"] | dict(changes)))
    except (InvalidArgument, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _packed_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, packed ones too, on the CPU."""
    module = _safetensors()
    plain: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with module.safe_open(path, framework="pt", device="cpu") as handle:
                plain |= {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        except (module.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return from_plain(plain)
    except InvalidArgument as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _shards(names: Iterable[str], sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `limit` bytes; one that is larger is alone."""
    group: list[str] = []
    for name in names:
        if group and sum(sizes[one] for one in group) + sizes[name] > limit:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _write_weights(
    folder: Path,
    own: Mapping[str, Tensor],
    config: xLSTMLargeConfig,
    modes: tuple[str, str],
    form: str,
    max_shard_bytes: int,
) -> None:
    """Write weights that are in the first mode in the second, one file at a time."""
    from safetensors.torch import save_file

    shapes = weights.shapes(config, modes[1])
    itemsize = own[weights.EMBEDDING].element_size()
    sizes = {name: itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    groups = list(_shards(shapes, sizes, max_shard_bytes))
    table: dict[str, str] = {}
    for number, names in enumerate(groups):
        if len(groups) == 1:
            file = "model.safetensors"
        elif form == "official":
            file = f"model_{number}.safetensors"
        else:
            file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for name in names:
            parts = weights.sources(name, config, modes[0], shapes[name][0])
            value = torch.cat([own[rows.key][rows.start : rows.stop].cpu() for rows in parts])
            key = weights.HUGGING_FACE_EMBEDDING if (name, form) == (weights.EMBEDDING, "huggingface") else name
            tensors[key] = value
            table[key] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(groups) > 1 and form == "huggingface":
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": table}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
