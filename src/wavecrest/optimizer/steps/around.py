"""A module's forward inside a setting, as an object that is copied and pickled with its module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class Around:
    """Stands in the place of a module's forward, and runs it; subclasses say in which setting.

    A function that holds the bound forward would not do: a copy of the module would run the original's, and pickle
    takes no such function.
    """

    def __init__(self, module: nn.Module) -> None:
        """Hold the module, and its own forward where it has one beside its class's."""
        self.module = module
        self.inner = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward as it was."""
        if self.inner is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run` in the setting."""
        raise NotImplementedError

    @property
    def __code__(self) -> Any:
        """The forward's own: torch.export reads the place of its source."""
        forward = type(self.module).forward if self.inner is None else self.inner
        return forward.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        """The forward's own: others look for arguments by their names."""
        forward = type(self.module).forward.__get__(self.module) if self.inner is None else self.inner
        return inspect.signature(forward)
