"""The static facts of one compiled kernel, as records."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import Field

from wavecrest.errors import EnvironmentProblem, RecordError
from wavecrest.hardware.occupancy import Limit, occupancy
from wavecrest.isa import assembly, mca
from wavecrest.isa.compiler import Compiled, arch_of
from wavecrest.records import FORMAT_VERSION, decode, files
from wavecrest.records.files import Model
from wavecrest.records.provenance import Header

# bytes a lane of the widest access
WIDE_BYTES = 16


class Stretch(Model):
    """Instruction counts of a loop or a whole kernel; see `assembly.Counts`.

    None where a record is from before 2026-11-26, which did not count it.
    """

    instructions: int
    matrix: dict[str, int]
    loads: dict[int, int]
    stores: dict[int, int]
    lds_loads: dict[int, int] | None = None
    lds_stores: dict[int, int] | None = None
    scratch: int | None = None
    barriers: int
    waits: int | None
    drains: int | None

    @property
    def matrix_count(self) -> int:
        """Matrix instructions of every kind."""
        return sum(self.matrix.values())

    @property
    def matrix_share(self) -> float:
        """Matrix instructions among all."""
        return self.matrix_count / self.instructions if self.instructions else 0.0


class HotLoop(Stretch):
    """The hot loop; with its code if requested."""

    code: list[str] = Field(default_factory=list)


class McaEstimate(Model):
    """llvm-mca's model of one pass through the hot loop, for one wave alone and without memory latency.

    In the tool's cycles: on gfx9 one pass of 4 clocks. A ranking of configurations, not a time.
    """

    evidence: Literal["model"] = "model"
    tool: str
    cycles: float
    matrix_cycles: float


class KernelFacts(Model):
    """Registers a lane (`sgpr`: a wave; None if the hardware has none or the tool is silent), spills, bytes.

    `vgpr` counts architectural registers, `agpr` accumulation registers. `spills` are registers on AMD and spilling
    stores on NVIDIA; `scratch` is bytes a lane, `lds` bytes a workgroup, `code_bytes` the kernel without padding.
    `waves` per SIMD, of `most_waves`, limited by `limit`; `register_waves` is the occupancy that registers alone allow,
    and `llvm_waves` LLVM's figure for it. `loop_scratch` counts the accesses of scratch memory in all innermost loops
    (None as in `Stretch`). `code_hash` names the instructions: equal hashes, equal machine code.
    """

    warps: int
    vgpr: int
    agpr: int | None
    sgpr: int | None
    spills: int
    sgpr_spills: int | None
    scratch: int
    lds: int
    waves: float
    most_waves: int
    limit: Limit
    register_waves: int
    llvm_waves: int | None
    code_bytes: int
    code_hash: str
    kernel: Stretch
    loops: int
    loop_scratch: int | None = None
    hot: HotLoop | None
    body: list[str] = Field(default_factory=list)
    mca: McaEstimate | None = None
    mca_reason: str = ""


class Row(Model):
    """One case on one architecture with one configuration: its facts, or the reason why it has no facts."""

    target: str
    case: str
    arch: str
    config: dict[str, int]
    chosen: str
    kernel: str
    facts: KernelFacts | None = None
    reason: str = ""


class IsaRecord(Model):
    """`wavecrest isa`.

    `variables` and `llvm` are what `wavecrest isa diff` had this side compiled with: variables of the environment, and
    switches of LLVM.
    """

    kind: Literal["isa"] = "isa"
    format_version: int = FORMAT_VERSION
    header: Header
    target: str
    variables: dict[str, str] = Field(default_factory=dict)
    llvm: list[str] = Field(default_factory=list)
    rows: list[Row]


def load(path: Path) -> IsaRecord:
    """Read a record of `wavecrest isa`.

    Raises:
        RecordError: no such file, damaged, foreign or newer.
    """
    return load_as(path, IsaRecord, "isa show --json")


M = TypeVar("M", bound=Model)


def load_as(path: Path, model: type[M], command: str) -> M:
    """Read a record of one kind; `command` is the one of `wavecrest` that writes it.

    Raises:
        RecordError: no such file, damaged, foreign or newer.
    """
    name = decode.shown(path)
    document = files.read_document(path, what="record of wavecrest isa", current=FORMAT_VERSION)
    if document.get("kind") != model.model_fields["kind"].default:
        raise RecordError(f"{name} is no record of `wavecrest {command}`: kind {document.get('kind')!r}")
    try:
        return model.model_validate(document)
    except pydantic.ValidationError as problem:
        raise RecordError(f"the record {name} is damaged: {files.first_problem(problem)}") from None


def wide_share(accesses: dict[int, int]) -> float | None:
    """The share of bytes in accesses of 16 bytes a lane, in the listing; None without accesses."""
    moved = sum(width * number for width, number in accesses.items())
    wide = sum(width * number for width, number in accesses.items() if width >= WIDE_BYTES)
    return wide / moved if moved else None


def _number(text: str, pattern: str, what: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise EnvironmentProblem(f"the compiler's listing does not give its {what}: unknown compiler version")
    return int(found[1])


def _stretch(lines: list[assembly.Line], syntax: assembly.Syntax) -> dict[str, Any]:
    return dataclasses.asdict(assembly.count(lines, syntax))


def _code(lines: list[assembly.Line]) -> list[str]:
    return [line.text if line.label else f"    {line.text}" for line in lines]


def _code_hash(compiled: Compiled, lines: list[assembly.Line]) -> str:
    """SHA-256 of the instructions, LDS and warps, the first 16 digits.

    The kernel's name and labels that only debug information needs are left out: neither is machine code.
    """
    places = {line.target: str(index) for index, line in enumerate(lines) if line.target}
    text = [f"{compiled.lds} {compiled.warps}"]
    for line in lines:
        if line.opcode:
            text.append(line.text.replace(line.target, places[line.target]) if line.target else line.text)
        elif line.label in places:
            text.append(f"{places[line.label]}:")
    joined = "\n".join(text).replace(compiled.kernel, "kernel")
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _amd(compiled: Compiled) -> dict[str, int | None]:
    text = compiled.listing

    def number(pattern: str, what: str) -> int:
        return _number(text, pattern, what)

    unified = compiled.arch.startswith("gfx9")
    return {
        "vgpr": number(r"^; NumVgprs: (\d+)", "registers"),
        "agpr": number(r"^; NumAgprs: (\d+)", "accumulation registers") if unified else None,
        "sgpr": number(r"\.sgpr_count:\s+(\d+)", "scalar registers"),
        "spills": number(r"\.vgpr_spill_count:\s+(\d+)", "spills"),
        "sgpr_spills": number(r"\.sgpr_spill_count:\s+(\d+)", "scalar spills"),
        "scratch": number(r"\.private_segment_fixed_size:\s+(\d+)", "scratch memory"),
        "llvm_waves": number(r"^; Occupancy: (\d+)", "occupancy"),
        "code_bytes": number(r"^; codeLenInByte = (\d+)", "code size"),
    }


def _nvidia(compiled: Compiled, lines: list[assembly.Line]) -> dict[str, int | None]:
    offsets = re.findall(r"/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?(?!NOP)[A-Z]", compiled.listing)
    if not offsets:
        raise EnvironmentProblem("nvdisasm's listing has no instructions: unknown version of nvdisasm")
    return {
        "vgpr": _number(compiled.usage, r"REG:(\d+)", "registers"),
        "agpr": None,
        "sgpr": None,
        "spills": sum(line.opcode.split(".")[0] == "STL" for line in lines),
        "sgpr_spills": None,
        "scratch": max(
            _number(compiled.usage, r"STACK:(\d+)", "stack"), _number(compiled.usage, r"LOCAL:(\d+)", "local memory")
        ),
        "llvm_waves": None,
        "code_bytes": int(offsets[-1], 16) + 16,
    }


def read(compiled: Compiled, *, code: bool = False, mca_tool: mca.Tool | None = None) -> KernelFacts:
    """The facts of a compiled kernel.

    Args:
        compiled: from `compiler.compile_launch`.
        code: whether to keep the hot loop's code, or the kernel's if it has no loop.
        mca_tool: adds a model of the hot loop.

    Raises:
        EnvironmentProblem: the listing comes from an unknown compiler version.
    """
    arch = arch_of(compiled.arch)
    syntax = assembly.AMD if arch.vendor == "amd" else assembly.NVIDIA
    lines = syntax.parse(compiled.listing)
    resources = _amd(compiled) if arch.vendor == "amd" else _nvidia(compiled, lines)
    total = _number(compiled.listing, r"\.vgpr_count:\s+(\d+)", "registers") if arch.vendor == "amd" else None
    waves = occupancy(
        arch,
        vgpr=total if total is not None else resources["vgpr"] or 0,
        sgpr=resources["sgpr"] or 0,
        lds=compiled.lds,
        warps=compiled.warps,
        wgp=re.search(r"\.amdhsa_workgroup_processor_mode 0", compiled.listing) is None,
    )
    hot, loops = assembly.hot_loop(lines, syntax), assembly.loops(lines)
    found: dict[str, Any] = {
        "warps": compiled.warps,
        "lds": compiled.lds,
        "waves": waves.waves,
        "most_waves": waves.most,
        "limit": waves.limit,
        "register_waves": waves.registers,
        "code_hash": _code_hash(compiled, lines),
        "kernel": _stretch(lines, syntax),
        "loops": len(loops),
        "loop_scratch": sum(assembly.count(loop, syntax).scratch for loop in loops),
        "hot": _stretch(hot, syntax) | {"code": _code(hot) if code else []} if hot else None,
        "body": _code(lines) if code and not hot else [],
    }
    facts = KernelFacts.model_validate(resources | found)
    return _with_model(facts, mca_tool, arch.name, hot) if mca_tool is not None else facts


def _with_model(facts: KernelFacts, tool: mca.Tool, arch: str, hot: list[assembly.Line]) -> KernelFacts:
    estimate = mca.estimate(tool, arch, hot)
    if isinstance(estimate, str):
        return facts.model_copy(update={"mca_reason": estimate})
    model = McaEstimate(tool=tool.version, cycles=estimate.cycles, matrix_cycles=estimate.matrix_cycles)
    return facts.model_copy(update={"mca": model})
