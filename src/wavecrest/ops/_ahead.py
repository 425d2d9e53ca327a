"""Kernels compiled before their first launch, several beside each other.

Triton compiles a kernel when it is first launched, with C code that launches it, and what launches it waits: a
computation waits for its kernels one after the other. Here the computation is run once without them, to find out which
it needs, while threads compile and load those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

import torch

import wavecrest.ops._triton as _triton
from wavecrest import hardware

# about a quarter of compiling is Python, which runs in one thread at a time (16 kernels of xLSTM 7B, triton 3.6, sm_90)
MOST_THREADS = 8


class Pass:
    """A run of a computation in which kernels are compiled, and none of ours is launched."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen = set[Future[Any]]()

    def compile(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a thread compile and load what `kernel[grid](*args, **options)` would launch; does not wait for it."""
        made = self._context.run(partial(kernel.warmup, *args, grid=grid, **options))
        # None of a kernel that was compiled before
        future = getattr(made, "future", None)
        if future is not None and future not in self._seen:
            self._seen.add(future)
            # a thread has a device of its own
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            future.add_done_callback(partial(_load, device))


def _load(device: int | None, compiled: Future[Any]) -> None:
    """Put a compiled kernel on a GPU, with the code that launches it: else 0.2 to 0.4 s of its first launch."""
    on = contextlib.nullcontext() if device is None else torch.cuda.device(device)
    # what does not compile or load says so where it is launched
    with contextlib.suppress(Exception), on:
        compiled.result().run  # noqa: B018


# the pass that this thread is in; a launch in another thread is none of its business
under_way: ContextVar[Pass | None] = ContextVar("wavecrest_pass", default=None)


def possible(device: torch.device) -> bool:
    """True if kernels for a device can be compiled so: `rehearse` is for these alone."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and _triton.compiles_beside() is not None


def rehearse(work: Callable[[], Any]) -> str | None:
    """Run `work` with launches of our kernels compiled in threads instead, and wait for these.

    What our kernels would have written holds anything, and so do all results. PyTorch's operations run: none of them
    may be asked for values, as indices or by the host, that come from ours.

    Returns:
        Why it did not come to its end, or None. A kernel that does not compile is no such reason: that shows where it
        is launched, as what stopped the pass does where `work` is done in earnest.
    """
    try:
        with ThreadPoolExecutor(min(MOST_THREADS, hardware.cpu().compute_units)) as threads:
            # in a context of its own: whatever else launches a kernel of Triton's in the pass does it as ever
            context = copy_context()
            mode = _triton.compiles_beside()(threads, ignore_errors=True)
            context.run(mode.__enter__)
            before = under_way.set(Pass(context))
            try:
                work()
            finally:
                under_way.reset(before)
                context.run(mode.__exit__, None, None, None)
    # anything may come out of a compiler or a model
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
