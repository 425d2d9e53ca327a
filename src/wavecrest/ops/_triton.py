"""Triton, or a stand-in where it is not installed: the one place that knows the difference.

With the stand-in a kernel can be defined but not launched; `unavailable` is the reason every Triton backend gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, overload

from wavecrest import env
from wavecrest.errors import Unsupported

# why no kernel can be launched, or None
unavailable: str | None = None
# read when the kernels are defined, as Triton itself does
interpreted = env.get("TRITON_INTERPRET") == "1"

if TYPE_CHECKING:
    import triton.language as tl

    class triton:
        """What the ops use of the module triton, with types."""

        @overload
        @staticmethod
        def jit(function: Callable[..., Any], /) -> Any: ...
        @overload
        @staticmethod
        def jit(*, do_not_specialize: list[str]) -> Callable[[Callable[..., Any]], Any]: ...
        @staticmethod
        def jit(*_args: Any, **_options: Any) -> Any:
            """triton.jit"""
else:
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        unavailable = f"triton is not importable ({error})"

        class _Kernel:
            """What `@triton.jit` gives without Triton: it can be named, not launched."""

            def __getitem__(self, _grid: Any) -> NoReturn:
                raise Unsupported(str(unavailable))

        class _Module:
            """Stands for the modules triton and triton.language."""

            constexpr = object

            @staticmethod
            def jit(function: Any = None, **_options: Any) -> Any:
                """The decorator, with and without arguments."""
                return _Kernel() if function is not None else lambda _function: _Kernel()

        triton = tl = _Module()

__all__ = ["interpreted", "tl", "triton", "unavailable"]
