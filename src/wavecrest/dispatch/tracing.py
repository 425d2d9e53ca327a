"""Functions whose results `torch.compile` keeps as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """A decorator: Dynamo runs the function while it traces, and the graph holds the result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports Dynamo: 1.3 of the 3.4 seconds that
    `import wavecrest.ops` took (2 cores, torch 2.13, 2026-11-25).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
