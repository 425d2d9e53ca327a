"""The values and shapes that the accuracy gate tries beyond the example, drawn from a seed that the record names.

Values stay plausible, so that the original can run on them: token ids below the size of the embedding that takes them,
other integers within the range seen, masks only ever hide more, and empty caches stay empty.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.measure.workload import Inputs
from wavecrest.optimizer.gate.snapshot import write

# tensors above this many bytes (key-value caches) keep the example's values: copies of them would not fit
LARGEST_VARIED = 1 << 28
# rows of the "edges" values are multiplied by these in turn
EDGES = (100.0, 1.0, 10.0)
# a float at or below this is the "hidden" of an additive mask
HIDDEN = -1e4
# kinds of values beside the example's own
KINDS = ("noise", "twins", "padding", "edges")


@dataclass(frozen=True, slots=True)
class Varied:
    """A tensor of the inputs and how it may vary.

    Attributes:
        path: of the tensor.
        tensor: the caller's own.
        example: a copy of its values.
        role: "data" (floats), "ids" (integers), "mask", or "fixed".
        high: for ids, the largest value that is safe.
    """

    path: str
    tensor: Tensor
    example: Tensor
    role: str
    high: int = 0


@dataclass(slots=True)
class Variations:
    """Values for one bucket's tensors.

    Attributes:
        inputs: the bucket's example.
        seed: of this run.
        varied: its tensors, in the order of `Inputs.tensors`.
    """

    inputs: Inputs
    seed: int
    varied: list[Varied] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Inputs, seed: int, vocabulary: dict[int, int] | None = None) -> Variations:
        """Look at the example.

        Args:
            inputs: the example.
            seed: of this run.
            vocabulary: tensor address -> rows of the smallest embedding that takes it (`embedding_rows`).
        """
        made = cls(inputs, seed)
        for path, tensor in inputs.tensors():
            example = tensor.detach().clone()
            role, high = _role(path, example, (vocabulary or {}).get(tensor.data_ptr()))
            made.varied.append(Varied(path, tensor, example, role, high))
        if not made.has & {"data", "ids"}:
            # an example of zeros: nothing else could tell one answer from another
            made.varied = [replace(item, role="data") if _is_plain_float(item) else item for item in made.varied]
        return made

    def draw(self, kind: str, number: int = 0) -> list[Tensor]:
        """Values of one of KINDS (or "example"), in the order of `varied`; the same seed gives the same values."""
        return [self._draw(item, kind, number) for item in self.varied]

    def _draw(self, item: Varied, kind: str, number: int) -> Tensor:
        value = item.example.clone()
        if kind == "example" or item.role == "fixed":
            return value
        random = self._generator(item, "noise" if kind == "twins" else kind, number)
        if item.role == "mask":
            return _pad(value, random) if kind == "padding" else value
        if item.role == "ids":
            value = _draw_ids(value, item.high, random, ends=kind == "edges")
        else:
            value = _add_noise(value, random, outliers=kind in ("noise", "twins"))
        if kind == "twins":
            value = _permute_interior(value, self._generator(item, "twins", number))
        elif kind == "edges" and item.role == "data":
            value = _make_edges(value, number)
        return value

    def _generator(self, item: Varied, kind: str, number: int) -> torch.Generator:
        # large values are drawn where they live, small ones on the CPU
        device = item.tensor.device if item.tensor.numel() > 1 << 16 else torch.device("cpu")
        # crc32: the same in every process, which Python's hash of a text is not
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed}:{item.path}:{kind}:{number}".encode()))

    def write(self, values: list[Tensor], *, counted: bool = True) -> None:
        """Write values into the bucket's own tensors.

        Args:
            values: in the order of `varied`.
            counted: let PyTorch's version counter see it.
        """
        for item, value in zip(self.varied, values, strict=True):
            write(item.tensor, value, counted=counted)

    def write_plain(self, values: list[Tensor]) -> None:
        """Write values into the arguments that are tensors themselves, not into those inside of objects."""
        leaves, _ = pytree.tree_flatten((self.inputs.args, dict(self.inputs.kwargs)))
        plain = {id(leaf) for leaf in leaves}
        for item, value in zip(self.varied, values, strict=True):
            if id(item.tensor) in plain:
                write(item.tensor, value)

    @property
    def has(self) -> set[str]:
        """Roles of the tensors."""
        return {item.role for item in self.varied}


def _role(path: str, value: Tensor, vocabulary: int | None) -> tuple[str, int]:
    if value.nbytes > LARGEST_VARIED or value.numel() == 0 or value.layout != torch.strided:
        return "fixed", 0
    named_mask = "mask" in path.lower()
    if value.is_floating_point() or value.is_complex():
        real = torch.view_as_real(value) if value.is_complex() else value
        finite = torch.isfinite(real.float())
        hidden = real.float() <= HIDDEN
        if named_mask or not bool(finite.all()):
            # an additive mask has nothing but zeros and hidden places
            return ("mask", 0) if bool((hidden | (real == 0)).all()) else ("fixed", 0)
        # an empty cache stays empty
        return ("data", 0) if bool((real != 0).any()) else ("fixed", 0)
    if value.dtype == torch.bool:
        return "mask", 0
    low, high = int(value.min()), int(value.max())
    # a mask of one token too: hiding it would leave nothing to answer from
    if low >= 0 and high <= 1 and (named_mask or (value.numel() > 1 and vocabulary is None)):
        return "mask", 0
    if vocabulary is not None:
        return "ids", max(high, vocabulary - 1)
    if value.numel() > 1 and _steps_by_one(value):
        # positions: their order is their meaning
        return "fixed", 0
    return ("ids", high) if low >= 0 else ("fixed", 0)


def _is_plain_float(item: Varied) -> bool:
    """An argument by itself, of zeros, that is not a mask."""
    plain = "." not in item.path and "mask" not in item.path.lower() and item.role == "fixed"
    return (
        plain
        and item.example.is_floating_point()
        and item.example.nbytes <= LARGEST_VARIED
        and not bool(item.example.any())
    )


def _steps_by_one(value: Tensor) -> bool:
    if value.shape[-1] < 2:
        return False
    return bool((value.long().diff(dim=-1) == 1).all())


def _add_noise(value: Tensor, random: torch.Generator, *, outliers: bool) -> Tensor:
    real = torch.view_as_real(value) if value.is_complex() else value
    if real.numel() == 1 and real.dtype.is_floating_point:
        # a temperature, a time step: never beyond the example's own
        share = 0.5 + 0.5 * torch.rand((), generator=random, device=random.device)
        return (value * share.to(value.device)).to(value.dtype)
    wide = real.float()
    scale = wide.std()
    scale = torch.where(scale > 0, scale, wide.abs().mean())
    scale = torch.where(scale > 0, scale, 1.0)
    noise = torch.randn(real.shape, generator=random, device=random.device).to(real.device)
    # a transposed input has no flat view
    made = (wide + noise * scale).contiguous()
    if outliers:
        flat = made.view(-1)
        flat[:: max(1, flat.numel() // 4)] *= 10
    made = made.to(real.dtype)
    together: Tensor = torch.view_as_complex(made) if value.is_complex() else made
    return together


def _draw_ids(value: Tensor, high: int, random: torch.Generator, *, ends: bool) -> Tensor:
    """Integers from zero to `high`; with `ends`, zero and `high` alone."""
    top = 1 if ends else high
    drawn = torch.randint(0, top + 1, value.shape, generator=random, device=random.device).to(value.device)
    made = (drawn * high if ends else drawn).to(value.dtype)
    # one id of few may come out as it was
    if value.numel() == 1 and high > 0 and bool((made == value).all()):
        made = (made + 1) % (high + 1)
    return made


def _permute_interior(value: Tensor, random: torch.Generator) -> Tensor:
    """The same values with the interior in another order: first, last, sum and range stay."""
    flat = value.reshape(-1).clone()
    if flat.numel() < 4:
        return value
    order = torch.randperm(flat.numel() - 2, generator=random, device=random.device).to(flat.device)
    flat[1:-1] = flat[1:-1][order]
    return flat.view(value.shape)


def _pad(value: Tensor, random: torch.Generator) -> Tensor:
    """Hide more at the end of some rows of a mask; each row keeps the first place that it shows."""
    shown = value == 0 if value.is_floating_point() else value != 0
    length = value.shape[-1] if value.ndim else 1
    if length < 2:
        return value
    rows = shown.reshape(-1, length)
    first = rows.int().argmax(-1, keepdim=True)
    ends = torch.randint(1, length, (rows.shape[0], 1), generator=random, device=random.device).to(value.device)
    # every second row stays whole, if there are several
    if rows.shape[0] > 1:
        ends[1::2] = length
    places = torch.arange(length, device=value.device)
    hide = ((places >= ends) & (places > first)).view(shown.shape)
    least = torch.finfo(value.dtype).min if value.is_floating_point() else 0
    if value.is_floating_point() and bool(torch.isinf(value).any()):
        least = float("-inf")
    return value.masked_fill(hide, least)


def _make_edges(value: Tensor, number: int) -> Tensor:
    """The first row zero, the others multiplied by EDGES in turn (divided by ten at each further `number`)."""
    if value.ndim == 0 or value.shape[0] == 0:
        return value
    made = value.clone()
    rows = made if made.ndim == 1 else made.reshape(-1, made.shape[-1])
    factors = torch.tensor(EDGES, device=rows.device, dtype=torch.float32) / 10**number
    factor = factors.clamp_min(1.0)[torch.arange(rows.shape[0], device=rows.device) % len(EDGES)]
    shape = (-1,) if made.ndim == 1 else (-1, 1)
    rows = (rows * factor.view(shape).to(torch.complex64 if rows.is_complex() else rows.dtype)).to(value.dtype)
    if rows.shape[0] > 1:
        rows[0] = 0
    shaped: Tensor = rows.view(value.shape)
    return shaped


@contextmanager
def embedding_rows(model: nn.Module) -> Iterator[dict[int, int]]:
    """While the model runs: tensor address -> rows of the smallest embedding that was called with it."""
    found: dict[int, int] = {}

    def seen(module: nn.Embedding, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            address = args[0].data_ptr()
            found[address] = min(module.num_embeddings, found.get(address, module.num_embeddings))

    hooks = [module.register_forward_pre_hook(seen) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def other_shapes(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Inputs of sizes that the example has not: half the batch, one row more, another length.

    Nothing for inputs that hold objects, such as a key-value cache: their sizes belong together in ways that only the
    model knows.
    """
    leaves, _ = pytree.tree_flatten((inputs.args, dict(inputs.kwargs)))
    if not all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str | torch.dtype) for leaf in leaves):
        return
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    batch = max((tensor.shape[0] for tensor in tensors), default=0)
    if batch >= 2:
        half = max(1, batch // 2)
        yield f"batch {half}", _resized(inputs, lambda t: t[:half] if t.ndim and t.shape[0] == batch else t)
    if batch >= 1:
        more = batch + 1 if batch % 2 == 0 else batch + 2
        yield f"batch {more}", _resized(inputs, lambda t: _longer(t, more) if t.ndim and t.shape[0] == batch else t)
    lengths = [size for tensor in tensors for size in tensor.shape[1:] if size >= 4]
    length = next((size for size in lengths if lengths.count(size) >= 1), 0)
    if length:
        less = length - 1 if length % 2 == 0 else length - 2
        yield f"length {less}", _resized(inputs, lambda t: _shorter(t, length, less))


def _longer(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(rows - tensor.shape[0], *tensor.shape[1:])])


def _shorter(tensor: Tensor, length: int, less: int) -> Tensor:
    for dim in range(1, tensor.ndim):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, less)
    return tensor


def _resized(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    args, kwargs = pytree.tree_map(
        lambda leaf: change(leaf).clone() if isinstance(leaf, Tensor) else leaf, (inputs.args, dict(inputs.kwargs))
    )
    return Inputs(args, kwargs)
