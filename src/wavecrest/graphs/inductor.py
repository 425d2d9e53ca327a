"""Inductor presets: the ways of compiling that the ladder measures, and a guard against silent fall-backs."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wavecrest.errors import CompileWarning, StepRefused
from wavecrest.graphs.root import traceable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Preset:
    """One way of compiling. `options` are torch.compile's; `devices` says where it is tried."""

    name: str
    title: str
    why: str
    mode: str | None = None
    options: dict[str, bool | str | int] = field(default_factory=dict)
    devices: tuple[str, ...] = ("amd", "nvidia", "cpu")
    # searches at compile time: minutes instead of seconds
    thorough: bool = False


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("default", "compile default", "fuses elementwise chains and removes Python between kernels"),
        Preset(
            "freezing",
            "compile + freezing",
            "weights become constants: packed for the CPU's GEMM, folded where they can be",
            options={"freezing": True},
            devices=("cpu",),
        ),
        Preset(
            "reduce-overhead",
            "compile reduce-overhead",
            "inductor's own graph capture: no launch gaps",
            mode="reduce-overhead",
            devices=("amd", "nvidia"),
        ),
        Preset(
            "coordinate-descent",
            "compile + coordinate descent",
            "searches tile sizes of generated kernels; small-M products become generated kernels",
            options={"coordinate_descent_tuning": True},
            devices=("amd", "nvidia"),
            thorough=True,
        ),
        Preset(
            "max-autotune",
            "compile max-autotune",
            "times Triton and library GEMMs per shape at compile time",
            mode="max-autotune-no-cudagraphs",
            devices=("amd", "nvidia"),
            thorough=True,
        ),
    )
}


def compile_module(module: nn.Module, preset: Preset) -> None:
    """Compile `module` in place: its class, state_dict keys and attributes stay, only the call is compiled.

    Shapes are static: one graph per bucket; another shape compiles again. A model of which no part compiles is never
    taken for a compiled one: its first call raises `StepRefused` inside `strict_compilation`, and outside it warns
    (`CompileWarning`) and goes on in eager.
    """
    module._compiled_call_impl = _FirstCall(module, preset)


class _FirstCall:
    """The compiled call of `module` until its first call has shown that there is a graph."""

    def __init__(self, module: nn.Module, preset: Preset) -> None:
        import torch

        self._module, self._preset = weakref.ref(module), preset
        options: dict[str, Any] = dict(preset.options)
        self._plain = traceable(module)
        self._compiled = (
            torch.compile(self._plain, dynamic=False, options=options)
            if options
            else torch.compile(self._plain, dynamic=False, mode=preset.mode)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        # an outer torch.compile goes through to the model
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        result = self._compiled(*args, **kwargs)
        if counters["stats"]["unique_graphs"] == before:
            self._no_graph()
        module = self._module()
        # a later step may have put its own call in this place
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled
        return result

    def _no_graph(self) -> None:
        import torch

        name = type(self._module()).__name__
        reason = f"{self._preset.title}: Dynamo made no graph of {name}, every part of it would run in eager"
        if torch._dynamo.config.fail_on_recompile_limit_hit:
            raise StepRefused(reason)
        warnings.warn(CompileWarning(reason), stacklevel=4)


@contextmanager
def strict_compilation(graphs: int) -> Iterator[None]:
    """Allow `graphs` compiled variants of one function, and raise beyond that instead of falling back silently.

    Several candidates of one model live in one process, and each adds entries to the cache of the same code object;
    at Dynamo's default limit of 8 the next would run eagerly without a word.
    """
    import torch

    config = torch._dynamo.config
    limit = max(graphs, 8)
    changes: dict[str, Any] = {"fail_on_recompile_limit_hit": True}
    # named cache_size_limit before torch 2.8
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            changes[name] = limit
            break
    for name in ("accumulated_recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            changes[name] = max(256, 4 * limit)
            break
    with config.patch(**changes), _quiet_search():
        yield


@contextmanager
def _quiet_search() -> Iterator[None]:
    """Suppress max-autotune's tables of tile sizes, and its log lines for sizes that do not fit the chip."""
    import torch
    import torch._inductor.select_algorithm as select

    logger = logging.getLogger(select.__name__)
    level, printed = logger.level, getattr(select, "PRINT_AUTOTUNE", None)
    logger.setLevel(logging.CRITICAL)
    stats = hasattr(torch._inductor.config, "max_autotune_report_choices_stats")
    with torch._inductor.config.patch({"max_autotune_report_choices_stats": False} if stats else {}):
        try:
            if printed is not None:
                select.PRINT_AUTOTUNE = False
            yield
        finally:
            logger.setLevel(level)
            if printed is not None:
                select.PRINT_AUTOTUNE = printed
