"""The base of what a model is given in the place of a tensor: whatever it does with it but hand it on is an error."""

from __future__ import annotations

from typing import Any, ClassVar

from wavecrest.errors import Unsupported


class StandIn:
    """Nothing can be read off one, or computed with it, but what its class says.

    Attributes:
        misused: the error of anything else: what was wrong, and what to do.
    """

    misused: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(self.misused)

    @classmethod
    def __torch_function__(cls, *_args: Any, **_more: Any) -> Any:
        raise Unsupported(cls.misused)
