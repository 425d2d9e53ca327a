"""Inductor presets: the ways of compiling that the ladder measures, and a guard against silent fall-backs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


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


def compile_module(module: Any, preset: Preset) -> None:
    """Compile `module` in place: its class, state_dict keys and attributes stay, only the call is compiled.

    Shapes are static: one graph per bucket; another shape compiles again.
    """
    options = dict(preset.options)
    if options:
        module.compile(dynamic=False, options=options)
    else:
        module.compile(dynamic=False, mode=preset.mode)


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
