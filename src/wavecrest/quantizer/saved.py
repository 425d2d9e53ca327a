"""Files of quantized models: one safetensors file, whose header says which layers are quantized and how."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest import __version__
from wavecrest.errors import (
    CheckpointError,
    InvalidArgument,
    MissingDependency,
    OutputError,
    StepRefused,
    Unsupported,
)
from wavecrest.nn import Experts, Linear
from wavecrest.nn.experts import stacks_experts
from wavecrest.nn.kv_store import FORMATS as CACHES
from wavecrest.nn.linear import is_conv1d
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed import from_plain, to_plain
from wavecrest.quantizer.changes import Changes
from wavecrest.quantizer.layers import SCHEMES, Site
from wavecrest.records import decode, files

if TYPE_CHECKING:
    from wavecrest.quantizer.report import QuantizeReport

VERSION = 1
# the entry of the file's header
HEADER = "wavecrest"
# names in a message at most
MOST_NAMES = 8
# entries of a quantized layer that its own precision does not have
EXTRA = ("input_scale",)


class Saved(NamedTuple):
    """A file's content: tensors by name (names that share one have the same object), formats of layers by path, and of
    the key-value cache, or None.
    """

    tensors: dict[str, Tensor]
    formats: dict[str, str]
    kv_cache: str | None = None


def safetensors() -> Any:
    """The package."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingDependency("safetensors", "files of quantized models", "pip install safetensors") from error
    return safetensors


def write(
    path: Path, model: nn.Module, formats: Mapping[str, str], report: QuantizeReport, kv_cache: str | None = None
) -> None:
    """Write a model's state; `Quantized.save` documents the errors."""
    module = safetensors()
    state = model.state_dict(keep_vars=True)
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise Unsupported(f"save: {named(strange)} of the model is no tensor, which safetensors does not hold")
    owners: dict[int, str] = {}
    shared = {}
    for name, value in state.items():
        owner = owners.setdefault(id(value), name)
        if owner != name:
            shared[name] = owner
    plain = to_plain({name: value.detach() for name, value in state.items() if name not in shared})
    about = {
        "version": VERSION,
        "wavecrest": __version__,
        "layers": dict(formats),
        "shared": shared,
        "kv_cache": kv_cache,
        "report": report.to_dict(),
    }
    tensors = {name: _own(value.cpu().contiguous()) for name, value in plain.items()}
    scratch: Path | None = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name[:40]}.", dir=path.parent))
        written = scratch / "model.safetensors"
        module.torch.save_file(tensors, written, metadata={"format": "pt", HEADER: json.dumps(about)})
        written.chmod(path.stat().st_mode & 0o777 if path.exists() else files.NEW_FILE)
        os.replace(written, path)
    except (OSError, module.SafetensorError) as error:
        raise OutputError(f"cannot write {decode.shown(path)}: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _own(tensor: Tensor) -> Tensor:
    """A tensor with memory of its own: safetensors refuses parts of a larger one, as those of a fused projection."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def read(path: Path) -> Saved:
    """Read a file that `write` wrote.

    Raises:
        CheckpointError: there is no such file, or it is damaged, foreign, or newer than this version.
    """
    module = safetensors()
    shown = decode.shown(path)
    try:
        with module.safe_open(path, framework="pt", device="cpu") as file:
            header = (file.metadata() or {}).get(HEADER)
            plain = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a handle, no mapping)
    except (OSError, module.SafetensorError) as error:
        raise CheckpointError(f"{shown} cannot be read: {error}") from error
    if header is None:
        raise CheckpointError(
            f"{shown} is no file of Quantized.save: its header has no entry {HEADER!r}; folders of other "
            "tools are read by load of wavecrest.integrations.compressed_tensors, .quark and .mxfp4"
        )
    try:
        about = decode.json_of(header)
        version, formats, shared = about["version"], dict(about["layers"]), dict(about["shared"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{shown} has a damaged header: {error}") from error
    if version != VERSION:
        raise CheckpointError(f"{shown} has version {version}, this package reads {VERSION}; update it")
    # files of earlier versions have no such entry
    kv_cache = about.get("kv_cache")
    if kv_cache is not None and kv_cache not in CACHES:
        raise CheckpointError(f"{shown} has a key-value cache of unknown format: {named([str(kv_cache)])}")
    unknown = [f"{path} {name}" for path, name in formats.items() if name not in SCHEMES]
    if unknown:
        raise CheckpointError(f"{shown} has layers of unknown formats: {named(unknown)}")
    try:
        tensors = from_plain(plain)
        tensors |= {name: tensors[owner] for name, owner in shared.items()}
    except (InvalidArgument, KeyError) as error:
        raise CheckpointError(f"{shown} is damaged: {error}") from error
    return Saved(tensors, formats, kv_cache)


def place(model: nn.Module, saved: Saved, what: str, device: torch.device | str | None) -> Changes:
    """Put quantized layers, experts and all tensors of a file into a model; on an error the model is as it was.

    Args:
        model: of the same structure, maybe on the meta device.
        saved: the content; weights of quantized layers are packed, those of experts are parameters of `nn.Experts`.
        what: the file or folder, for messages.
        device: where the tensors go; None: where the model's are, the CPU for those on the meta device.

    Raises:
        CheckpointError: names or shapes are not the model's.
        Unsupported: the model's experts compute something else than `nn.Experts`.
    """
    changes = Changes()
    made: dict[tuple[int, str], nn.Module] = {}
    values: dict[tuple[int, str], Tensor] = {}
    try:
        experts = _place_experts(changes, model, saved)
        formats = {path: name for path, name in saved.formats.items() if path not in experts}
        _check(model, saved._replace(formats=formats), what)
        own = model.state_dict(keep_vars=True)
        for path, name in formats.items():
            module = model.get_submodule(path)
            weight = _value(saved.tensors[f"{path}.weight"], own[f"{path}.weight"], device, values)
            assert isinstance(weight, PackedWeight)
            layer = made.get((id(module), name)) or Site((path,), module).make(name, weight)
            made[id(module), name] = layer
            changes.module(model, path, layer)
        for full, value in saved.tensors.items():
            path, _, name = full.rpartition(".")
            module = model.get_submodule(path)
            table = module._buffers if name in module._buffers else module._parameters
            old = own.get(full, own.get(f"{path}.weight"))
            assert old is not None
            changes.put(table, name, _value(value, old, device, values, plain=table is module._buffers))
        left = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta]
        if left:
            raise CheckpointError(
                f"{what} has no values for {named(left)}, which are on the meta device; build the model on the CPU"
            )
    except BaseException:
        changes.undo()
        raise
    return changes


def _place_experts(changes: Changes, model: nn.Module, saved: Saved) -> set[str]:
    """Put experts in MXFP4, without values, where a file has such; their paths."""
    found = set()
    for path, name in saved.formats.items():
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        if name != "mxfp4" or not stacks_experts(module):
            continue
        found.add(path)
        if isinstance(module, Experts) and module.gate_up_proj_scale is not None:
            continue
        try:
            ours = module if isinstance(module, Experts) else Experts.from_module(module)
        except StepRefused as error:
            raise Unsupported(f"{path}: {error}") from error
        changes.module(model, path, ours.empty_mxfp4())
    return found


def _value(
    value: Tensor,
    old: Tensor,
    device: torch.device | str | None,
    values: dict[tuple[int, str], Tensor],
    plain: bool = False,
) -> Tensor:
    """A tensor of a file on its device, as a parameter unless it is `plain`; names that share it get one object."""
    target = torch.device(device if device is not None else "cpu" if old.is_meta else old.device)
    found = values.get((id(value), str(target)))
    if found is None:
        found = value.to(target)
        if not plain:
            found = nn.Parameter(found, requires_grad=False if isinstance(found, PackedWeight) else old.requires_grad)
        values[id(value), str(target)] = found
    return found


def _check(model: nn.Module, saved: Saved, what: str) -> None:
    """Refuse what is not a model's, naming all that differs."""
    own = model.state_dict(keep_vars=True)
    problems, shapes = [], {name: tuple(value.shape) for name, value in own.items() if isinstance(value, Tensor)}
    strange = []
    for path in saved.formats:
        try:
            module: Any = model.get_submodule(path)
        except AttributeError:
            module = None
        if not (isinstance(module, nn.Linear | Linear) or (module is not None and is_conv1d(module))):
            strange.append(path)
            continue
        # a Conv1D's own weight is [K, N]
        shapes[f"{path}.weight"] = tuple(Site((path,), module).weight().shape)
        for name in EXTRA:
            if f"{path}.{name}" in saved.tensors:
                shapes[f"{path}.{name}"] = ()
        if not isinstance(saved.tensors.get(f"{path}.weight"), PackedWeight):
            problems.append(f"the weight of {path} is not packed")
    if strange:
        problems.append(f"no linear layers or experts: {named(strange)}")
    missing = [name for name in shapes if name not in saved.tensors]
    unexpected = [name for name in saved.tensors if name not in shapes]
    if missing:
        problems.append(f"missing: {named(missing)}")
    if unexpected:
        problems.append(f"unexpected: {named(unexpected)}")
    wrong = [
        f"{name} {list(value.shape)} for {list(shapes[name])}"
        for name, value in saved.tensors.items()
        if name in shapes and tuple(value.shape) != shapes[name]
    ]
    # weights of experts in 4 bits
    whole = [name for name, value in own.items() if isinstance(value, Tensor) and value.dtype == torch.uint8]
    kinds = {name: saved.tensors[name].dtype for name in whole if name in saved.tensors}
    wrong += [f"{name} {kind}" for name, kind in kinds.items() if kind != torch.uint8]
    if wrong:
        problems.append(f"of another shape or dtype: {named(wrong)}")
    if problems:
        raise CheckpointError(f"{what} is not of this model; {'; '.join(problems)}")


def named(names: Iterable[str]) -> str:
    """Names for a message."""
    found = list(names)
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return ", ".join(found[:MOST_NAMES]) + more
