"""The machine as the checks see it: collected once, or made up by a test."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from wavecrest import env, hardware
from wavecrest.records import decode

CHILD_TIMEOUT = 120
# distributions that checks ask for
PACKAGES = (
    "amd-aiter", "aiter", "flashinfer", "flashinfer-python", "pytorch-triton-rocm", "transformers", "triton", "vllm",
)  # fmt: skip
# a child prints every setting of Inductor as text
_DUMP = (
    "import json, torch._inductor.config as config\n"
    "print('INDUCTOR', json.dumps({name: repr(value) for name, value in config.to_dict().items()}))"
)


@dataclass(frozen=True, slots=True)
class Dump:
    """The settings of Inductor, as text, read in a child process; or the reason why they could not be read."""

    values: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """The machine as the checks see it.

    Attributes:
        device: the device the workloads will run on.
        environment: all variables of this process.
        read: the text of a file, or None if it cannot be read.
        hip: `torch.version.hip`, None for builds without ROCm.
        rocm: the installed ROCm release such as "7.2.1", None if unknown.
        compiler: the C++ compiler that torch.compile would start, None without one.
        threads: `torch.get_num_threads()`.
        allowed_cpus: logical processors that this process may run on.
        cpus: logical processors of the machine.
        inductor_here: Inductor's settings with this process's environment.
        inductor_clean: the same with a clean environment.
        inductor_variables: for each setting, the variables that its default is computed from.
        packages: versions of the packages that checks ask for, by name; "aiter" whatever its distribution is called.
        aiter_tables: paths of the tuned tables of the installed aiter.
        sdpa: PyTorch's name of the attention backend that it takes, by call ("causal", …); empty on a CPU.
        blas: the library that PyTorch prefers for GEMMs, "Cublaslt"; "" on a CPU.
        gpu_node, cpu_nodes: NUMA nodes of the GPU and of the processors that this process may run on.
    """

    device: hardware.Device
    environment: Mapping[str, str]
    read: Callable[[str], str | None]
    hip: str | None = None
    rocm: str | None = None
    compiler: str | None = None
    threads: int = 1
    allowed_cpus: int = 1
    cpus: int = 1
    inductor_here: Dump = field(default_factory=Dump)
    inductor_clean: Dump = field(default_factory=Dump)
    inductor_variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    aiter_tables: tuple[str, ...] = ()
    sdpa: Mapping[str, str] = field(default_factory=dict)
    blas: str = ""
    gpu_node: int | None = None
    cpu_nodes: tuple[int, ...] = ()


def read_file(path: str) -> str | None:
    """The text of a file, or None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def rocm_release(read: Callable[[str], str | None]) -> str | None:
    """The ROCm release on this machine, from its .info/version file: "7.2.1-43" gives "7.2.1"."""
    text = read("/opt/rocm/.info/version")
    found = re.match(r"\d+(\.\d+)+", text.strip()) if text else None
    return found.group(0) if found else None


def kernel_driver(vendor: str, read: Callable[[str], str | None]) -> str | None:
    """The version of the loaded GPU kernel driver."""
    if vendor == "amd":
        text = read("/sys/module/amdgpu/version")
        return f"amdgpu {text.strip()}" if text else "amdgpu of the Linux kernel"
    if vendor == "nvidia":
        text = read("/sys/module/nvidia/version")
        return f"nvidia {text.strip()}" if text else None
    return None


def compiler(environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> str | None:
    """The C++ compiler that torch.compile starts on the CPU: `CXX` if set, else g++."""
    return which(environment.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def inductor_settings(environment: Mapping[str, str]) -> Dump:
    """Inductor's settings as a child process with this environment sees them."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DUMP], env=dict(environment), capture_output=True, text=True, timeout=CHILD_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Dump(failure=str(error))
    line = next((line for line in done.stdout.splitlines() if line.startswith("INDUCTOR ")), None)
    if done.returncode != 0 or line is None:
        return Dump(failure=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return Dump(decode.json_of(line.removeprefix("INDUCTOR "), finite=False))


def inductor_variables(source: str) -> dict[str, tuple[str, ...]]:
    """For each setting, the variables its default reads, from the text of torch/_inductor/config.py.

    Settings of nested classes are named as torch names them ("triton.cudagraphs"); where a default is computed by a
    function of the module, the function's variables count.
    """
    tree = ast.parse(source)
    functions = {node.name: _names(node, {}) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: dict[str, tuple[str, ...]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If):
                visit([*node.body, *node.orelse], prefix)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = _names(node.value, functions)
                for target in targets:
                    if isinstance(target, ast.Name) and names:
                        found[prefix + target.id] = tuple(sorted(names))

    visit(tree.body, "")
    return found


def _names(node: ast.AST, functions: Mapping[str, set[str]]) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Constant)
            and isinstance(child.value, str)
            and re.fullmatch("[A-Z][A-Z0-9_]{3,}", child.value)
        ):
            names.add(child.value)
        elif isinstance(child, ast.Name) and child.id in functions:
            names |= functions[child.id]
    return names


def installed() -> dict[str, str]:
    """The versions of the packages that checks ask for."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["aiter" if name == "amd-aiter" else name] = metadata.version(name)
    return found


def tables_of_aiter() -> tuple[str, ...]:
    """The tuned tables of the installed aiter, which is not imported: that may compile for minutes."""
    spec = importlib.util.find_spec("aiter")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return tuple(str(path) for folder in folders for path in sorted(Path(folder).glob("configs/**/*tuned*.csv")))


def attention_backends(device: hardware.Device) -> dict[str, str]:
    """The backend that PyTorch's attention takes on a GPU, for calls of common shapes."""
    if device.kind == "cpu":
        return {}
    import torch
    from torch.nn.attention import SDPBackend

    def choice(head_dim: int, **options: Any) -> str:
        q = torch.empty(1, 8, 128, head_dim, dtype=torch.bfloat16, device=device.torch_name)
        mask = torch.ones(128, 128, dtype=torch.bool, device=device.torch_name) if options.pop("mask", False) else None
        number = torch._fused_sdp_choice(q, q, q, mask, 0.0, options.get("causal", False))
        return str(SDPBackend(number).name).removesuffix("_ATTENTION")

    return {
        "head_dim 64": choice(64), "head_dim 128": choice(128), "head_dim 256": choice(256),
        "causal": choice(128, causal=True), "with a mask": choice(128, mask=True),
    }  # fmt: skip


def nodes_of(text: str | None) -> set[int]:
    """The numbers in a list of the kernel's: "0-3,8" gives 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def numa_nodes(
    device: hardware.Device, processors: Collection[int], read: Callable[[str], str | None]
) -> tuple[int | None, tuple[int, ...]]:
    """The NUMA node of a GPU, None if it is not known or the machine has one, and those of some processors."""
    nodes = sorted(nodes_of(read("/sys/devices/system/node/online")))
    if device.kind == "cpu" or len(nodes) < 2:
        return None, ()
    import torch

    made = torch.cuda.get_device_properties(device.index)
    place = "{:04x}:{:02x}:{:02x}.0".format(
        *(getattr(made, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    )
    text = read(f"/sys/bus/pci/devices/{place}/numa_node")
    own = int(text) if text is not None and text.strip().isdecimal() else None
    lists = {node: nodes_of(read(f"/sys/devices/system/node/node{node}/cpulist")) for node in nodes}
    return own, tuple(node for node in nodes if lists[node] & set(processors))


def collect(device: hardware.Device) -> Context:
    """Look at this machine; starts two child processes to compare Inductor's settings."""
    # taken first: torch sets variables of its own when parts of it are imported
    environment = env.current()
    import torch

    with ThreadPoolExecutor(2) as pool:
        here, clean = pool.map(inductor_settings, (environment, env.clean_child()))
    source = Path(torch.__file__).parent / "_inductor" / "config.py"
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    gpu_node, cpu_nodes = numa_nodes(device, allowed, read_file)
    library: Any = None if device.kind == "cpu" else torch.backends.cuda.preferred_blas_library()
    return Context(
        device=device,
        environment=environment,
        read=read_file,
        hip=torch.version.hip,
        rocm=rocm_release(read_file) if torch.version.hip else None,
        compiler=compiler(environment),
        threads=torch.get_num_threads(),
        allowed_cpus=hardware.cpu().compute_units,
        cpus=os.cpu_count() or 1,
        inductor_here=here,
        inductor_clean=clean,
        inductor_variables=inductor_variables(source.read_text(encoding="utf-8")),
        packages=installed(),
        aiter_tables=tables_of_aiter() if device.vendor == "amd" else (),
        sdpa=attention_backends(device),
        blas="" if library is None else library.name,
        gpu_node=gpu_node,
        cpu_nodes=cpu_nodes,
    )
