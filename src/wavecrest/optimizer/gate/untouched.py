"""The user's model and example inputs: as they were before the run, whatever a step did."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.errors import EnvironmentProblem
from wavecrest.optimizer.gate.snapshot import Snapshot, bits, in_parts, same_bits, write

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload

# a copy of the weights is kept where it takes at most this share of the free memory; else checksums of them
COPY_SHARE = 0.25
# elements of a row of a checksum
ROW = 4096


@dataclass(slots=True)
class _Held:
    """A tensor of the model: itself, its memory at the start, and a copy of its bits or their checksum."""

    name: str
    tensor: Tensor
    memory: Tensor
    copy: Tensor | None
    checksum: str
    requires_grad: bool


class Untouched:
    """A workload's model and inputs at the start of a run: checked after every step, put back, and said so.

    Parameters, buffers, flags, hooks and attributes of every module, and tensors and containers of the inputs. What
    the model's own calls write (a counter, a key-value cache) is put back as well; no step is blamed for it.

    Args:
        workload: as it is before anything runs.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._own: set[str] = set()
        self._tensors = list(_tensors(workload.model))
        self._modules = [(name, module, _state(module)) for name, module in workload.model.named_modules()]
        self._inputs = {
            bucket: Snapshot([*((f"args[{i}]", v) for i, v in enumerate(inputs.args)), *inputs.kwargs.items()])
            for bucket, inputs in workload.buckets.items()
        }

    def learn(self, writes: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """Put back what has changed so far, and hold it to be the original's own doing.

        Args:
            writes: bucket -> paths of what the original's calls write, as a `Site` names them. A call may write the
                values that stand there already, which no change shows.
        """
        self._own |= set(self._put_back())
        for bucket, paths in writes.items():
            known = self._inputs[bucket].tensors
            self._own |= {f"input {path} of bucket {bucket}" if path in known else path for path in paths}

    def put_back(self) -> list[str]:
        """Put everything back.

        Returns:
            Names of what was changed by anything but the original's own calls: "parameter net.2.bias", "input args[0]
            of bucket b1".

        Raises:
            EnvironmentProblem: a weight was changed, and there was no memory for a copy of it.
        """
        return sorted(set(self._put_back()) - self._own)

    @property
    def own_writes(self) -> list[str]:
        """The names of everything that the model's own calls change."""
        return sorted(self._own)

    def _put_back(self) -> Iterator[str]:
        for name, module, state in self._modules:
            yield from _restore_module(name, module, state)
        for held in self._tensors:
            if _restore_tensor(held):
                yield held.name
        for bucket, snapshot in self._inputs.items():
            changed = snapshot.changed()
            snapshot.restore_containers()
            for path in changed:
                write(*snapshot.tensors[path])
                yield f"input {path} of bucket {bucket}"


def checksums(model: nn.Module) -> dict[str, str]:
    """Checksums of a model's parameters and buffers, by name; of those whose bits can be read as whole numbers."""
    return {name: checksum(tensor) for name, tensor in _named(model).items() if _has_bits(tensor)}


def _has_bits(tensor: Tensor) -> bool:
    # a subclass decides itself what its memory is; PyTorch ends the process where quantized memory is viewed as another
    own = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return own and tensor.layout == torch.strided and not tensor.is_meta


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as messages and a gate's `writes` name them."""
    found: dict[str, Tensor] = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    return in_parts(found | {f"buffer {name}": tensor for name, tensor in model.named_buffers()})


def _tensors(model: nn.Module) -> Iterator[_Held]:
    found = _named(model)
    size = sum(tensor.nbytes for tensor in found.values())
    copies = size <= COPY_SHARE * _free_memory(next(iter(found.values())).device) if found else True
    for name, tensor in found.items():
        memory = tensor.detach()
        # buffers change by themselves in some models, so a copy of them is always needed
        copy = memory.clone() if copies or name.startswith("buffer ") else None
        yield _Held(name, tensor, memory, copy, "" if copy is not None else checksum(memory), tensor.requires_grad)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return hardware.free_host_memory()


def checksum(tensor: Tensor) -> str:
    """A checksum of a tensor's bits that takes little memory: sums over rows and over columns, hashed."""
    flat = bits(tensor)
    whole = flat[: flat.numel() // ROW * ROW].view(-1, ROW)
    digest = hashlib.blake2b(flat[whole.numel() :].cpu().numpy().tobytes())
    for dim in (0, 1):
        digest.update(whole.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def _restore_tensor(held: _Held) -> bool:
    tensor, changed = held.tensor, False
    now = tensor.detach()
    moved = now.dtype != held.memory.dtype or now.shape != held.memory.shape or now.stride() != held.memory.stride()
    if moved or now.data_ptr() != held.memory.data_ptr():
        tensor.data = held.memory
        changed = True
    if tensor.requires_grad != held.requires_grad:
        tensor.requires_grad_(held.requires_grad)
        changed = True
    if held.copy is not None:
        if not same_bits(held.memory, held.copy):
            write(held.memory, held.copy)
            changed = True
    elif checksum(held.memory) != held.checksum:
        raise EnvironmentProblem(
            f"a step changed {held.name} of the model, and there was no memory for a copy of it: load the model again"
        )
    return changed


def _state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; of dicts (parameters, submodules, hooks) and lists their contents."""
    return {name: (value, _contents(value)) for name, value in vars(module).items()}


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else None


def _restore_module(name: str, module: nn.Module, state: dict[str, Any]) -> Iterator[str]:
    own = vars(module)
    prefix = f"{name}." if name else ""
    for extra in own.keys() - state.keys():
        del own[extra]
        yield f"attribute {prefix}{extra}"
    for key, (value, contents) in state.items():
        if key not in own or own[key] is not value:
            own[key] = value
            yield f"attribute {prefix}{key}"
        now = _contents(value)
        if isinstance(now, dict) and not (
            list(now) == list(contents) and all(now[part] is contents[part] for part in now)
        ):
            value.clear()
            value.update(contents)
            yield f"attribute {prefix}{key}"
        elif isinstance(now, list) and not (
            len(now) == len(contents) and all(a is b for a, b in zip(now, contents, strict=True))
        ):
            value[:] = contents
            yield f"attribute {prefix}{key}"
