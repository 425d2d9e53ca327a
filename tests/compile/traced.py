"""Trace wavecrest's kernels as torch.compile does; the tensors they write, as JSON: `python traced.py`.

It works out which tensors a kernel writes from the kernel's intermediate code; where that cannot be made it takes all
of them for written, copies them, and keeps CUDA graphs from being used. Torch up to 2.11 makes it with all sizes,
strides and scales as constants, later ones as they come.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import code_generator, make_backend
from triton.language import core
from triton.runtime import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.known import Known
from tests.interpreter import types_of_sizes
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.isa import compiler

TARGET = GPUTarget("cuda", 90, 32)


class _Driver:
    """A driver in place of a GPU's: its architecture alone."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0


def _quicken() -> None:
    """Leave out what Triton does again and again: parse a kernel, name the type of sizes, set warnings' filters."""
    trees = functools.cache(ast.parse)
    jit.JITCallable.parse = lambda kernel: trees(kernel._src)
    core._type_for_tuple_values = types_of_sizes(core._type_for_tuple_values, core.constexpr)
    code_generator.warnings = SimpleNamespace(
        catch_warnings=contextlib.nullcontext, simplefilter=lambda *_: None,
        warn=warnings.warn, warn_explicit=warnings.warn_explicit,
    )  # fmt: skip


def problem_with_constants(launch: Any) -> str:
    """Why the kernel's code cannot be made with its numbers as constants; empty where it can."""
    backend = make_backend(TARGET)
    source, options = compiler._source(launch, backend)
    for index, (name, value) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
        if isinstance(value, (int, float)):
            source.signature[name] = "constexpr"
            source.constants[(index,)] = value
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except Exception as error:
        deepest: BaseException = error
        while deepest.__cause__ is not None:
            deepest = deepest.__cause__
        return str(deepest)
    return ""


def arguments(launch: Any) -> tuple[Any, ...]:
    """All that is given to a kernel, tensors by their type and alignment alone."""

    def told(value: Any) -> Any:
        return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), repr(value))

    options = sorted(launch.options().items())
    return tuple(map(told, launch.args)), tuple((name, told(value)) for name, value in options)


def written(launch: Any) -> list[str]:
    """The tensors that torch takes for written."""
    named = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.options()}
    named = {
        name: torch.empty(2, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in named.items()
    }
    later = getattr(wrap, "identify_accessed_tensors", None)
    if later is None:
        found = wrap.identify_mutated_tensors(launch.kernel, named, {})
    else:
        found = [one.name for one in later(launch.kernel, named, {}).read_writes.writes]
    return [name for name in found if isinstance(named.get(name), torch.Tensor)]


def main() -> None:
    _quicken()
    triton.runtime.driver.set_active(_Driver())
    # while it compiles, launches do not overlap
    torch.compiler.is_compiling = lambda: True  # type: ignore[assignment]
    found: dict[str, dict[str, Any]] = {}
    known = Known(__file__)

    def traced(launch: Any) -> tuple[list[str], str]:
        return sorted(written(launch)), problem_with_constants(launch)

    for name in registry.names():
        cases = registry.get(name).study.compile_cases
        for case, launch in cases(hardware.ARCHS["sm_90"], None).items() if cases is not None else ():
            described = any(type(value).__name__ == "TensorDescriptor" for value in launch.args)
            # neither runs while torch.compile traces
            if launch.kernel.is_gluon() or described:
                continue
            row = found.setdefault(launch.kernel.__name__, {"written": {}, "problems": {}})
            # cases that differ in their tensors' sizes alone are one to both
            work, given = functools.partial(traced, launch), arguments(launch)
            row["written"][f"{name} {case}"], problem = known.answer(launch, "sm_90", work, *given)
            if problem:
                row["problems"][f"{name} {case}"] = problem
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
