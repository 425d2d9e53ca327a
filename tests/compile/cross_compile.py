"""Compile every op's compile_cases for one architecture and print what the machine code says, as JSON.

Run as a process of its own, without TRITON_INTERPRET: `python cross_compile.py gfx942`. Needs no GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wavecrest import hardware, registry

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack")


def target(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, hardware.ARCHS[arch].wave_size)


def source(launch: Any) -> ASTSource:
    """What a launch with these arguments would compile: types, constants and divisibility by 16 from the values."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    named = {**launch.constants, **{k: v for k, v in launch.config.kwargs.items() if k not in LAUNCH_OPTIONS}}
    for index, param in enumerate(launch.kernel.params):
        if index >= len(launch.args):
            signature[param.name] = "constexpr"
            constants[(index,)] = named[param.name]
            continue
        value = launch.args[index]
        if isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name] = "constexpr"
            constants[(index,)] = 1
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} not in the assembly"
    return int(found.group(1))


def read_amd(asm: dict[str, Any]) -> dict[str, int]:
    text = asm["amdgcn"]
    return {
        "spills": _number(text, r"\.vgpr_spill_count:\s+(\d+)") + _number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        "scratch": _number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        "registers": _number(text, r"\.vgpr_count:\s+(\d+)"),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_(?:dwordx4|b128)\b", text)),
        "wide_stores": len(re.findall(r"(?:global|buffer)_store_(?:dwordx4|b128)\b", text)),
    }


def read_nvidia(asm: dict[str, Any], arch: str) -> dict[str, int]:
    text = asm["ptx"]
    # cuobjdump ships with Triton; which folder differs between versions
    cuobjdump = sorted(Path(triton.__file__).parent.rglob("bin/cuobjdump"))[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(asm["cubin"])
        done = subprocess.run(
            [cuobjdump, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
        )
    # spilled registers live in the stack frame or in local memory
    return {
        "spills": _number(done.stdout, r"LOCAL:(\d+)"),
        "scratch": _number(done.stdout, r"STACK:(\d+)"),
        "registers": _number(done.stdout, r"REG:(\d+)"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", text)),
        "wide_stores": len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", text)),
    }


def main(arch: str) -> None:
    rows = []
    for name in registry.names():
        cases = registry.get(name).compile_cases
        if cases is None:
            continue
        for launch in cases(hardware.ARCHS[arch].wave_size):
            options = {k: v for k, v in launch.config.kwargs.items() if k in LAUNCH_OPTIONS}
            compiled = triton.compile(source(launch), target=target(arch), options=options)
            facts = read_nvidia(compiled.asm, arch) if arch.startswith("sm_") else read_amd(compiled.asm)
            columns = dict(zip((p.name for p in launch.kernel.params), launch.args, strict=False))["N"]
            row = {"op": name, "columns": columns, "config": repr(launch.config), "constants": launch.constants}
            rows.append({**row, **facts, "shared": compiled.metadata.shared})
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
