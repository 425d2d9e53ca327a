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
# the architecture whose machine code CPU tensors run as (set and unset by wavecrest.isa.emulate), or None
emulated: str | None = None

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

            @staticmethod
            def constexpr(value: Any) -> Any:
                """A compile-time constant."""
                return value

            @staticmethod
            def jit(function: Any = None, **_options: Any) -> Any:
                """The decorator, with and without arguments."""
                return _Kernel() if function is not None else lambda _function: _Kernel()

        triton = tl = _Module()

if interpreted or unavailable is not None:

    @triton.jit
    def reciprocal(x):  # type: ignore[no-untyped-def]
        """1 / x, in the interpreter, which has no device libraries."""
        return 1.0 / x
else:
    from triton.language.extra import libdevice

    @triton.jit
    def reciprocal(x):  # type: ignore[no-untyped-def]
        """1 / x to about 1 unit in the last place of float32, 0 above 2^126.

        A division takes 5 instructions on sm_90 and 14 on gfx942, this 2 and 1 (triton 3.6).
        """
        return libdevice.fast_dividef(1.0, x)


def described(x: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A tensor descriptor over the memory of x, which kernels load blocks of `block` elements from."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, shape, strides, block)


__all__ = ["described", "emulated", "interpreted", "reciprocal", "tl", "triton", "unavailable"]
