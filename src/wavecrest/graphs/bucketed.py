"""A model served at free shapes within declared ranges: padded to the sizes that it is compiled for.

Padding must not change an answer: `verify` compares padded calls with the original's own, and a model whose answers
change is refused. Calls beyond the ranges run the original, are counted, and warn.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.errors import ShapeWarning, StepRefused
from wavecrest.graphs.capture import CapturedModule
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure import numerics
from wavecrest.measure.ranges import LENGTH, Kwargs, Ranges, Span, resized, shape_of

# sizes of the calls that show which axes of an answer are rows and tokens; all differ
PROBES: tuple[Span, Span] = ((2, 5), (3, 7))

# an axis of an answer: None for one that no input moves
Axes = tuple[str | None, ...]


class Bucketed(nn.Module):
    """Runs `inner` at the sizes of `ranges`: pads the inputs, and cuts the answers to the call's own size.

    Args:
        inner: takes arguments by name, with a padding mask.
        original: the model whose answers count; it runs calls beyond the ranges.
        ranges: what is served.
        example: arguments of one call.

    `outside` counts the calls that the original ran.

    Raises:
        StepRefused: padding changes an answer, or an axis of an answer that the inputs move cannot be told.
        WorkloadError: the example has no padding mask.
    """

    def __init__(self, inner: nn.Module, original: nn.Module, ranges: Ranges, example: Kwargs) -> None:
        super().__init__()
        self.inner = inner
        self.ranges = ranges
        self.outside = 0
        self._ready: set[tuple[Span, bool]] = set()
        self._count = len(ranges.batches) * len(ranges.lengths)
        for module in inner.modules():
            if isinstance(module, CapturedModule):
                module.max_graphs = max(module.max_graphs, self._count)
        # not a part of this module: its parameters are those of `inner`
        self._original: Callable[..., Any] = original.__call__
        parameters = inspect.signature(original.forward).parameters.values()
        named = itertools.takewhile(lambda row: row.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, parameters)
        self._names = [row.name for row in named]
        with torch.no_grad():
            self._axes = _axes(self._original, example)
            self.verify(example)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of the original at the call's own size."""
        if args:
            args, kwargs = self._named(args, kwargs)
        own = None if args else shape_of(kwargs)
        size = None if own is None else self.ranges.size(*own)
        if own is None or size is None:
            return self._beyond(own, args, kwargs)
        if size != own:
            kwargs = resized(kwargs, *size, padded=True)
        # models that drop a mask which hides nothing compile twice for a size
        variant = size, size != own
        if variant in self._ready:
            return self._cut(self.inner(**kwargs), own)
        # a size's first call compiles; beyond Dynamo's own limit of variants it would fall back to eager
        with strict_compilation(2 * self._count):
            answer = self.inner(**kwargs)
        self._ready.add(variant)
        return self._cut(answer, own)

    def _named(self, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[tuple[Any, ...], Kwargs]:
        """The same call with its arguments by the original's names; as it is where they have none, or do not fit."""
        names = self._names[: len(args)]
        # an argument too many, or given twice, is for the original to refuse
        if len(names) < len(args) or kwargs.keys() & set(names):
            return args, kwargs
        return (), dict(zip(names, args, strict=True)) | kwargs

    def verify(self, example: Kwargs) -> None:
        """Compare padded calls with the original's at sizes that need padding in both directions.

        Raises:
            StepRefused: an answer differs by more than its dtype explains.
        """
        for batch, length in self._samples():
            call = resized(example, batch, length)
            size = self.ranges.size(batch, length)
            assert size is not None
            found = self._cut(self._original(**resized(call, *size, padded=True)), (batch, length))
            for mine, own in zip(pytree.tree_leaves(found), pytree.tree_leaves(self._original(**call)), strict=True):
                if isinstance(own, Tensor):
                    self._compare(mine, own, (batch, length), size)

    def _samples(self) -> list[Span]:
        """Sizes that are padded the most: one more than the size below."""
        batches, lengths = _neighbours(self.ranges.batches), _neighbours(self.ranges.lengths)
        places = dict.fromkeys((place * (len(batches) - 1) // 2, place * (len(lengths) - 1) // 2) for place in range(3))
        pairs = [(batches[row], lengths[token]) for row, token in places]
        return [(min(row[0] + 1, row[1]), min(token[0] + 1, token[1])) for row, token in pairs]

    def _compare(self, found: Tensor, own: Tensor, call: Span, size: Span) -> None:
        limits = numerics.tolerance("model", str(own.dtype).removeprefix("torch."))
        error = numerics.compare(found, own).relative
        if not error <= limits.relative:
            raise StepRefused(
                f"padding changes the answers: a call of {call[0]} × {call[1]} tokens padded to {size[0]} × {size[1]} "
                f"differs by {error:.2g}, limit {limits.relative:g}; the model does not keep its padding mask"
            )

    def _cut(self, answer: Any, own: Span) -> Any:
        leaves, spec = pytree.tree_flatten(answer)
        sizes = dict(zip(("batch", LENGTH), own, strict=True))
        cut = []
        for leaf, axes in zip(leaves, self._axes, strict=True):
            for axis, kind in enumerate(axes):
                if kind is not None:
                    leaf = leaf.narrow(axis, 0, sizes[kind])
            cut.append(leaf)
        return pytree.tree_unflatten(cut, spec)

    def _beyond(self, own: Span | None, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        if not self.outside:
            said = (
                "arguments without a name or without a padding mask" if own is None else f"{own[0]} × {own[1]} tokens"
            )
            span = self.ranges
            warnings.warn(
                f"a call of {said} is beyond the declared ranges batch={span.batch}, length={span.length}: it runs the "
                "original model. Declare wider ranges and optimize again; `outside` counts such calls",
                ShapeWarning,
                stacklevel=3,
            )
        self.outside += 1
        return self._original(*args, **kwargs)


def _neighbours(sizes: Sequence[int]) -> list[Span]:
    return list(itertools.pairwise(sizes)) or [(sizes[0], sizes[0])]


def _axes(model: Callable[..., Any], example: Kwargs) -> list[Axes]:
    """Axes of every leaf of an answer that are rows or tokens: those that move with the inputs."""
    (rows, tokens), (more_rows, more_tokens) = PROBES
    small, large = (pytree.tree_leaves(model(**resized(example, *size))) for size in PROBES)
    kinds = {(rows, more_rows): "batch", (tokens, more_tokens): LENGTH}
    found: list[Axes] = []
    for a, b in zip(small, large, strict=True):
        if not isinstance(a, Tensor):
            found.append(())
            continue
        axes: list[str | None] = []
        for before, after in zip(a.shape, b.shape, strict=True):
            if before != after and (before, after) not in kinds:
                raise StepRefused(
                    f"an axis of an answer goes from {before} to {after} as the inputs go from {rows} × {tokens} to "
                    f"{more_rows} × {more_tokens}: neither rows nor tokens, so padding cannot be cut off"
                )
            axes.append(kinds.get((before, after)))
        found.append(tuple(axes))
    return found
