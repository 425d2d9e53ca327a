"""Inductor presets: the ways of compiling that the ladder measures, and a guard against silent fall-backs."""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wavecrest.errors import CompileWarning, ShapeWarning, StepRefused
from wavecrest.graphs.masks import Padding, without_full_mask
from wavecrest.graphs.root import traceable

if TYPE_CHECKING:
    from torch import nn


# what a process imports before it compiles anything: 4 to 8 s (two cores, and 16 beside an H200, 2026-11-28)
COMPILERS = ("torch._dynamo", "torch._inductor.compile_fx")
# where Dynamo logs that it gives up on a function, and the file of the function that calls a compiled root
LIMIT_LOGGER, ROOT_FILE = "torch._dynamo.convert_frame", "wavecrest/graphs/root.py"
# variants of one graph for all sizes that are compiled
VARIANTS = 64


@dataclass(frozen=True, slots=True)
class Preset:
    """One way of compiling. `options` are torch.compile's; `devices` says where it is tried."""

    name: str
    title: str
    why: str
    mode: str | None = None
    options: dict[str, bool | str | int] = field(default_factory=dict)
    devices: tuple[str, ...] = ("amd", "nvidia", "cpu")
    # convolutions end in ReLU by themselves (`graphs.epilogues`)
    epilogues: bool = False
    # the graph is rewritten (`graphs.fusions`), then compiled by Inductor, or run as it is
    fusions: Literal["", "inductor", "graph"] = ""
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
            "epilogues",
            "compile + convolution epilogues",
            "convolutions add the bias and the residual and end in ReLU in cuDNN's own kernel",
            devices=("nvidia",),
            epilogues=True,
        ),
        Preset(
            "fusions",
            "compile + fused linear layers",
            "linear layers end in their activation in one kernel; what depends on no input is computed once",
            devices=("amd", "nvidia"),
            fusions="inductor",
        ),
        Preset(
            "graph",
            "fused graph of PyTorch's kernels",
            "eager's own kernels in one graph: residual additions inside norms, activations inside linear layers, what "
            "depends on no input computed once",
            devices=("amd", "nvidia"),
            fusions="graph",
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


def compile_module(
    module: nn.Module,
    preset: Preset,
    padding: Padding | None = None,
    choices: Mapping[str, str] | None = None,
    *,
    attentions: Mapping[str, str] | None = None,
) -> None:
    """Compile `module` in place: its class, state_dict keys and attributes stay, only the call is compiled.

    With `padding`, calls whose padding mask hides nothing run without it (`graphs.masks`). `choices` and
    `attentions`: of a preset with fusions, the backends of its linear layers and of attention that is written out
    (`graphs.fusions`).

    Shapes are static: one graph per bucket; another shape compiles again. A model of which no part compiles is never
    taken for a compiled one: its first call raises `StepRefused` inside `strict_compilation`, and outside it warns
    (`CompileWarning`) and goes on in eager.
    """
    logging.getLogger(LIMIT_LOGGER).addFilter(_warn_of_limit)
    call = _FirstCall(module, preset, choices or {}, attentions or {})
    module._compiled_call_impl = call if padding is None else _without_full_mask(call, padding)


def compile_dynamic(module: nn.Module) -> None:
    """Compile `module` for all sizes, in place, with up to VARIANTS variants.

    One graph is not all: sizes of 1, masks and branches on sizes have variants of their own, and beyond Dynamo's own
    limit of 8 every new one would run in eager.
    """
    import torch

    logging.getLogger(LIMIT_LOGGER).addFilter(_warn_of_limit)
    compiler: Any = torch.compile
    if "recompile_limit" in inspect.signature(compiler).parameters:
        made = compiler(traceable(module), dynamic=True, recompile_limit=VARIANTS)
    else:
        # torch before 2.12 has a limit for the process alone
        compiled = compiler(traceable(module), dynamic=True)

        def made(*args: Any, **kwargs: Any) -> Any:
            with torch._dynamo.config.patch(**_limits(VARIANTS)):
                return compiled(*args, **kwargs)

    module._compiled_call_impl = made


def _warn_of_limit(record: logging.LogRecord) -> bool:
    """Warn where Dynamo says in its log alone that a model compiled here runs new shapes in eager from now on."""
    text = record.getMessage()
    if "recompile_limit" in text and ROOT_FILE in text:
        warnings.warn(
            "the model has met more shapes than Dynamo keeps compiled variants of, and new ones run in eager from now "
            "on: declare ranges, wavecrest.Buckets(example=…, batch=(…), length=(…)), or give these shapes as buckets",
            ShapeWarning,
            stacklevel=2,
        )
        return False
    return True


def _without_full_mask(call: Callable[..., Any], padding: Padding) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = without_full_mask(args, kwargs, padding)
        return call(*args, **kwargs)

    return run


def _compile(
    module: nn.Module,
    call: Callable[..., Any],
    preset: Preset,
    choices: Mapping[str, str],
    attentions: Mapping[str, str],
) -> Callable[..., Any]:
    import torch

    if preset.fusions:
        from wavecrest.graphs import fusions

        made = fusions.backend(module, choices, inductor=preset.fusions == "inductor", attentions=attentions)
        return torch.compile(call, dynamic=False, backend=made)

    if preset.epilogues:
        from wavecrest.graphs import epilogues

        return torch.compile(call, dynamic=False, backend=epilogues.backend)
    options: dict[str, Any] = dict(preset.options)
    if options:
        return torch.compile(call, dynamic=False, options=options)
    return torch.compile(call, dynamic=False, mode=preset.mode)


class _FirstCall:
    """The compiled call of `module`, whose first call must show that there is a graph."""

    def __init__(
        self, module: nn.Module, preset: Preset, choices: Mapping[str, str], attentions: Mapping[str, str]
    ) -> None:
        self._module, self._preset, self._checked = weakref.ref(module), preset, False
        self._plain = traceable(module)
        self._compiled = _compile(module, self._plain, preset, choices, attentions)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        # an outer torch.compile goes through to the model
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        if self._checked:
            return self._compiled(*args, **kwargs)
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        result = self._compiled(*args, **kwargs)
        if counters["stats"]["unique_graphs"] == before:
            self._no_graph()
        self._checked = True
        module = self._module()
        # one more Python call less, where no other call stands in this place
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

    changes = _limits(max(graphs, 8))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, **changes), _quiet_search():
        yield


def _limits(variants: int) -> dict[str, Any]:
    """Dynamo's settings that allow `variants` of one function."""
    import torch

    config = torch._dynamo.config
    # named cache_size_limit before torch 2.8
    now = hasattr(config, "recompile_limit")
    one, all_of_them = ("recompile_limit", "accumulated_recompile_limit") if now else (
        "cache_size_limit", "accumulated_cache_size_limit"
    )  # fmt: skip
    return {one: variants, all_of_them: max(256, 4 * variants)}


@contextmanager
def _quiet_search() -> Iterator[None]:
    """Suppress max-autotune's tables of tile sizes, and its log lines for sizes that do not fit the chip.

    Not by a setting of Inductor: all of them are in the key of its cache on disk, and a fresh process without that
    setting would compile everything again (Swin-T on one H200, 2026-11-28: 33 s in place of 10).
    """
    import torch._inductor.select_algorithm as select

    logger = logging.getLogger(select.__name__)
    level, printed = logger.level, getattr(select, "PRINT_AUTOTUNE", None)
    logger.setLevel(logging.CRITICAL)
    try:
        if printed is not None:
            select.PRINT_AUTOTUNE = False
        yield
    finally:
        logger.setLevel(level)
        if printed is not None:
            select.PRINT_AUTOTUNE = printed
