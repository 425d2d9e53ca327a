"""Cross-compile a kernel launch with Triton for an architecture that need not be here.

Types, constants and alignments come from Triton's own launch path, so that the compiled kernel is the one that a launch
with these arguments would run: 16-byte alignment of every address, and on AMD 32-bit buffer addressing of every tensor
below 2 GiB.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.errors import EnvironmentProblem, InvalidArgument, MissingDependency, Unsupported
from wavecrest.ops.common.launcher import Launch


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel's machine code.

    `listing` is AMD assembly as LLVM prints it, or the SASS of nvdisasm; `usage` is cuobjdump's resource line (empty
    for AMD, whose listing has it). `lds` in bytes a workgroup; `warps` are waves a workgroup.
    """

    arch: str
    kernel: str
    listing: str
    usage: str
    lds: int
    warps: int


def arch_of(name: str) -> hardware.Arch:
    """The record of an architecture.

    Raises:
        InvalidArgument: the name is unknown.
    """
    try:
        return hardware.ARCHS[name]
    except KeyError:
        raise InvalidArgument(f"no architecture {name!r}; there are {', '.join(hardware.ARCHS)}") from None


def require_compiler() -> None:
    """Raise unless kernels defined in this process can be compiled.

    Raises:
        MissingDependency: triton is not installed.
        EnvironmentProblem: the kernels were defined for Triton's interpreter.
    """
    if _triton.unavailable is not None:
        raise MissingDependency("triton", "reading a kernel's machine code", "pip install triton")
    if _triton.interpreted:
        raise EnvironmentProblem(
            "TRITON_INTERPRET=1 is set: kernels defined for Triton's interpreter cannot be compiled; unset it"
        )


def set_llvm_switches(names: Sequence[str]) -> None:
    """Have every later compilation of this process turn switches of LLVM on, as Triton turns its own on.

    Triton's cache does not know of them: the process needs a cache folder of its own. LLVM ends a process that names
    an option it does not have.

    Args:
        names: options of LLVM that are true or false, such as "amdgpu-use-amdgpu-trackers".

    Raises:
        MissingDependency, EnvironmentProblem: no compiler here, see `require_compiler`.
    """
    require_compiler()
    from triton._C import libtriton
    from triton.backends.amd import compiler as amd

    switches = list(names)
    if hasattr(amd, "get_llvm_flags"):
        # triton 3.9, whose AMD code comes from a library of its own
        own = amd.get_llvm_flags
        amd.get_llvm_flags = lambda arch: [*own(arch), *switches]
    translate = libtriton.llvm.translate_to_asm

    def switched(source: str, triple: str, arch: str, features: str, flags: list[str], *others: Any) -> Any:
        return translate(source, triple, arch, features, [*flags, *switches], *others)

    libtriton.llvm.translate_to_asm = switched


def _target(arch: hardware.Arch) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.vendor == "nvidia":
        return GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.wave_size)
    return GPUTarget("hip", arch.name, arch.wave_size)


def _source(launch: Launch, backend: Any) -> tuple[Any, Any]:
    """Triton's source object and options for a launch, made by the functions a launch goes through."""
    import triton
    from triton import knobs
    from triton.compiler import ASTSource

    try:
        from triton.runtime.jit import create_function_from_signature

        pack = launch.kernel._pack_args
    except (ImportError, AttributeError) as error:
        raise EnvironmentProblem(
            f"triton {triton.__version__} keeps its launch path elsewhere ({error}); 3.6 to 3.9 are known to work"
        ) from error
    # the default of a launch, spelled out to avoid Triton's warning that it will change
    keywords = {"enable_fp_fusion": knobs.language.default_fp_fusion, **launch.options(), "debug": False}
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, extra = bind(*launch.args, **keywords)
    options, signature, constants, attributes = pack(backend, keywords, bound, specialization, extra)
    if launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(launch.kernel, signature, constants, attributes), options
    return ASTSource(launch.kernel, signature, constants, attributes), options


def build(launch: Launch, arch: str) -> Any:
    """Compile `launch` for `arch` into Triton's cache, where a launch on such a GPU finds it.

    Args:
        launch: a kernel with its arguments (tensors of the device "meta" will do) and options.
        arch: a name of `hardware.ARCHS`.

    Raises:
        InvalidArgument: no such architecture.
        Unsupported: the kernel does not compile for it, with the compiler's reason.
        EnvironmentProblem: no compiler here, see `require_compiler`.
    """
    target_arch = arch_of(arch)
    require_compiler()
    import triton
    from triton.compiler import make_backend

    target = _target(target_arch)
    try:
        source, options = _source(launch, make_backend(target))
        return triton.compile(source, target=target, options=options.__dict__)
    except EnvironmentProblem:
        raise
    # a compiler may raise anything; the caller shows the reason
    except Exception as error:
        raise Unsupported(f"{launch.kernel.__name__} does not compile for {arch}: {_reason(error)}") from error


def source_key(launch: Launch, arch: str) -> str:
    """A hash of all that `build` makes machine code from: sources, types, constants, options and the compiler.

    The same wherever Triton is installed: its libraries of device functions count by content.

    Args, Raises: as of `build`.
    """
    require_compiler()
    from triton.compiler import make_backend

    backend = make_backend(_target(arch_of(arch)))
    source, options = _source(launch, backend)
    return hashlib.sha256(f"{source.hash()} {backend.hash()} {_options_key(options)}".encode()).hexdigest()[:12]


def _options_key(options: Any) -> str:
    """A backend's options as text. Triton 3.6's own hash of those for AMD holds the paths of libraries."""
    values = vars(options).items()
    return repr(sorted((name, _by_content(value) if name == "extern_libs" else value) for name, value in values))


def _by_content(libraries: Any) -> list[tuple[str, str]]:
    return sorted((name, _content_hash(path)) for name, path in dict(libraries).items())


@cache
def _content_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """The machine code that `launch` runs on `arch`; arguments and errors are those of `build`."""
    compiled, name = build(launch, arch), launch.kernel.__name__
    lds, warps = compiled.metadata.shared, compiled.metadata.num_warps
    if arch_of(arch).vendor == "amd":
        return Compiled(arch, name, compiled.asm["amdgcn"], "", lds, warps)
    listing, usage = _disassemble(compiled.asm["cubin"])
    return Compiled(arch, name, listing, usage, lds, warps)


def scratch(built: Any, arch: str) -> int:
    """Bytes of scratch memory a lane that a kernel from `build` uses for spilled registers.

    Raises:
        EnvironmentProblem: the compiler's listing, or the tool that reads NVIDIA's code, is unknown.
    """
    if arch_of(arch).vendor == "amd":
        found = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", built.asm["amdgcn"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = re.findall(r"\b(?:STACK|LOCAL):(\d+)", _usage(_written(built.asm["cubin"], folder)))
    if not found:
        raise EnvironmentProblem("the compiler's listing does not give its scratch memory: unknown compiler version")
    return max(map(int, found))


def _reason(error: Exception) -> str:
    """An error of the compiler in one line; Triton's own quote the source first and end with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """A cubin's SASS with labels, and its resource usage, by the tools that ship with Triton."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = _written(cubin, folder)
        return _run(lambda: knobs.nvidia.nvdisasm, "-c", str(file)), _usage(file)


def _written(cubin: bytes, folder: str) -> Path:
    file = Path(folder) / "kernel.cubin"
    file.write_bytes(cubin)
    return file


def _usage(file: Path) -> str:
    from triton import knobs

    return _run(lambda: knobs.nvidia.cuobjdump, "--dump-resource-usage", str(file))


def _run(tool: Callable[[], Any], *arguments: str) -> str:
    try:
        done = subprocess.run([tool().path, *arguments], capture_output=True, text=True, check=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise EnvironmentProblem(f"NVIDIA machine code cannot be read: {error}") from error
    return done.stdout
