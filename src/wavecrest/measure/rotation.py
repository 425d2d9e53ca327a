"""Input sets that timed calls go round: other values at other addresses, so that no answer of before fits again.

A server's next request is another tensor with other values. Timed on one set of inputs, a model that keeps its last
answer looks a thousand times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wavecrest.measure.workload import Inputs

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# input sets of a bucket; a block of the paired timer uses one for calls that are not timed and two for those that are
SETS = 4
# bytes that the sets of a bucket may take; larger inputs have fewer sets, two at least
MOST_BYTES = 1 << 30
# floating values are scaled by up to this share, which changes them in every dtype of 8 bits and more of mantissa
SCALE = 0.03
# blocks of the host's memory that are held at a time, and the range of their bytes: from one page or more to what an
# activation of a small model takes
HELD = 8
HELD_BYTES = (1 << 16, 1 << 22)
# integers up to this count are put in a random order, longer ones are shifted by a random distance
SHUFFLED = 4096


class Rotation:
    """Input sets of one bucket; `current` is the set of the next call.

    Only plain tensors rotate: arguments themselves, or inside of tuples, lists and dicts. What is inside of an object,
    such as a key-value cache, stays one and the same, since captured graphs and caches go by its identity and hold
    state. So does a tensor that `reset` or a call writes to, one that overlaps itself, and a subclass of Tensor.

    Args:
        inputs: the example; its own tensors are never written to.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.example = inputs
        self.current = inputs
        self._sources = _replaceable(inputs)
        self._versions = {key: source._version for key, source in self._sources.items()}
        self._copies: list[dict[int, Tensor]] = []
        self._sets: list[Inputs] = []
        self._moving: set[int] = set()
        self._first = 0
        self._held: list[Tensor] = []

    def start(self) -> None:
        """Make the sets. Call it after calls with the example, which show what they write to."""
        here = {id(tensor) for tensor in _plain_tensors(self.example)}
        if not here.issuperset(self._sources):
            # they replace their own inputs
            self._sources = {}
        self._sources = {key: source for key, source in self._sources.items() if source._version == self._versions[key]}
        size = sum(source.numel() * source.element_size() for source in self._sources.values())
        count = max(2, min(SETS, MOST_BYTES // max(1, size))) if self._sources else 0
        self._copies = [{key: _copy(source) for key, source in self._sources.items()} for _ in range(count)]
        self._sets = [_with(self.example, copies) for copies in self._copies]
        self._moving = {key for key, source in self._sources.items() if _has_variants(source)}

    @property
    def sets(self) -> int:
        """Number of input sets, the example not counted; 0 if nothing can rotate."""
        return len(self._sets)

    def use(self, slot: int) -> None:
        """The set of the calls to come: calls of one block with the same slot have the same inputs."""
        if self._sets:
            self.current = self._sets[(self._first + slot) % len(self._sets)]

    def release(self) -> None:
        """The example again."""
        self.current = self.example
        self._held = []

    def refresh(self, random: np.random.Generator) -> None:
        """Other values for every set, and other addresses for the slots and for what the calls allocate.

        Call it between blocks. Where a process's heap ends, and so how many pages each call asks the system for, is
        luck that stays with the process otherwise: MiniLM's batch of 16 took 64 ms without a page fault and 71 ms with
        5,800 (2 cores, 2026-11-25).
        """
        import torch

        self._first += 1
        self._move_heap(random)
        with torch.no_grad():
            for copies in self._copies:
                for key in self._moving:
                    _vary(self._sources[key], copies[key], random)

    def _move_heap(self, random: np.random.Generator) -> None:
        import torch

        if any(tensor.device.type != "cpu" for _, tensor in self.example.tensors()):
            return
        low, high = HELD_BYTES
        # the order in which they go is another one than that in which they came
        self._held = [self._held[index] for index in random.permutation(len(self._held))[: HELD // 2]]
        while len(self._held) < HELD:
            size = int(low * (high / low) ** random.random())
            self._held.append(torch.empty(size, dtype=torch.uint8))


def _plain_tensors(inputs: Inputs) -> Iterator[Tensor]:
    import torch

    def walk(value: Any) -> Iterator[Tensor]:
        if type(value) is torch.Tensor:
            yield value
        elif type(value) in (tuple, list):
            for item in value:
                yield from walk(item)
        elif type(value) is dict:
            for item in value.values():
                yield from walk(item)

    yield from walk(list(inputs.args))
    yield from walk(dict(inputs.kwargs))


def _replaceable(inputs: Inputs) -> dict[int, Tensor]:
    """By identity, the plain tensors that a copy can stand in for."""
    import torch

    return {
        id(tensor): tensor
        for tensor in _plain_tensors(inputs)
        # a tensor made under inference_mode counts no writes; with stride 0 a write to one element changes others
        if tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_inference()
        and all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    }


def _copy(source: Tensor) -> Tensor:
    """The same values, sizes and strides at another address: compiled code goes by strides too."""
    import torch

    made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
    return made.copy_(source)


def _with(inputs: Inputs, copies: dict[int, Tensor]) -> Inputs:
    """The same arguments with tensors replaced, by identity; objects in them are shared."""

    def replace(value: Any) -> Any:
        if id(value) in copies:
            return copies[id(value)]
        if type(value) in (tuple, list):
            return type(value)(replace(item) for item in value)
        if type(value) is dict:
            return {key: replace(item) for key, item in value.items()}
        return value

    return Inputs(tuple(replace(value) for value in inputs.args), replace(dict(inputs.kwargs)))


def _has_variants(source: Tensor) -> bool:
    """True if other values in the place of these are valid: noise and images are, masks and positions may not be."""
    import torch

    if source.numel() < 2:
        return False
    if source.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        # additive masks carry infinities, other masks two values
        return bool(torch.isfinite(source).all()) and torch.unique(source.reshape(-1)[:SHUFFLED]).numel() > 2
    # token ids and images; one row of integers may be offsets, lengths or positions, which have an order
    whole = source.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return whole and source.ndim >= 2 and int(source.max()) > 1


def _vary(source: Tensor, target: Tensor, random: np.random.Generator) -> None:
    """Fill `target` with values derived from `source`."""
    import torch

    if source.is_floating_point():
        torch.mul(source, 1 + SCALE * (2 * random.random() - 1), out=target)
        return
    flat, count = source.reshape(-1), source.numel()
    if count > SHUFFLED:
        target.copy_(flat.roll(int(random.integers(1, count))).reshape(source.shape))
        return
    order = torch.from_numpy(random.permutation(count)).to(source.device)
    target.copy_(flat[order].reshape(source.shape))
