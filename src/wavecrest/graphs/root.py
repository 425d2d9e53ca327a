"""Wrap a model's call so that Dynamo traces the whole model, whatever class its root is.

Dynamo does not start a graph in PyTorch's own files; it only goes through them from a caller. `module.compile()` of an
`nn.Sequential`, an `nn.TransformerEncoder` or a subclass that keeps their `forward` therefore makes no graph at all,
and says nothing. The function made here is such a caller.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def traceable(module: nn.Module) -> Callable[..., Any]:
    """A function that calls `module`, hooks included, and that Dynamo traces from its first line.

    Every returned function has a code object of its own, because Dynamo counts compiled variants by code object: those
    of another model, or of an earlier candidate of the same model, take nothing of its limit.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return types.FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
