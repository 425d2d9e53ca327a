"""Kernels compiled and loaded before their first launch, several beside each other.

Triton compiles a kernel when it is first launched, with C code that launches it, and what launches it waits: a
computation waits for its kernels one after the other. Here the computation is run once without them, to find out which
it needs, while threads compile and load those.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware

# about a quarter of compiling is Python, which runs in one thread at a time (16 kernels of xLSTM 7B, triton 3.6, sm_90)
MOST_THREADS = 8


class Pass:
    """A run of a computation that compiles wavecrest's kernels and launches none of them."""

    def __init__(self, context: Context, threads: ThreadPoolExecutor) -> None:
        self._context, self._threads = context, threads
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
            here = threading.get_ident()

            def load(compiled: Future[Any]) -> None:
                if threading.get_ident() == here:
                    # it was found on the disk before this was asked for
                    self._threads.submit(_load, device, compiled)
                else:
                    _load(device, compiled)

            future.add_done_callback(load)


def _load(device: int | None, compiled: Future[Any]) -> None:
    """Put a compiled kernel on a GPU, with the code that launches it."""
    # else 0.3 s of the first launch: prompts behind a pass took 2.9 s with 11 kernels to load and 0.36 with one, 0.04
    # and 0.04 without (H200, 2026-11-23, both runs of "lengths-ahead" in 2026-11-24_xlstm-peers_xlstm_7b.jsonl.gz)
    on = contextlib.nullcontext() if device is None else torch.cuda.device(device)
    # a kernel that does not compile or load raises its error at its launch
    with contextlib.suppress(Exception), on:
        compiled.result().run  # noqa: B018


# the pass that this thread is in; it does not concern launches in other threads
under_way: ContextVar[Pass | None] = ContextVar("wavecrest_pass", default=None)


def possible(device: torch.device) -> bool:
    """Whether `rehearse` works for a device."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and _triton.compiles_beside() is not None


def rehearse(work: Callable[[], Any]) -> str | None:
    """Run `work`, but compile wavecrest's kernels in threads instead of launching them, and wait for the threads.

    The memory that these kernels would have written holds arbitrary values, and so do all results. PyTorch's
    operations run: none of them may use values of these kernels as indices or on the host.

    Returns:
        The reason why `work` did not finish, or None. A kernel that fails to compile is not reported here: its error is
        raised at its launch, like any error of `work` itself.
    """
    try:
        _triton.parse_in_turn()
        with ThreadPoolExecutor(min(MOST_THREADS, hardware.cpu().compute_units)) as threads:
            # in a context of its own: other code that launches Triton kernels during the pass is not affected
            context = copy_context()
            mode = _triton.compiles_beside()(threads, ignore_errors=True)
            context.run(mode.__enter__)
            before = under_way.set(Pass(context, threads))
            try:
                work()
            finally:
                under_way.reset(before)
                context.run(mode.__exit__, None, None, None)
    # a compiler or a model may raise any exception
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
