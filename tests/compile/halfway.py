"""A kernel compiled as far as Triton's own code for GPUs (ttgir): LLVM, which takes most of the time, is left out."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.compiler import make_backend

from wavecrest.isa import compiler
from wavecrest.ops.common.launcher import Launch


def ttgir(launch: Launch, arch: str) -> str:
    """The text that `compiler.build(launch, arch).asm["ttgir"]` has."""
    target = compiler._target(compiler.arch_of(arch))
    backend: Any = make_backend(target)
    source, options = compiler._source(launch, backend)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata = {"target": target, **options.__dict__}
    for name in ("ttir", "ttgir"):
        module = stages[name](module, metadata)
    return str(module)
