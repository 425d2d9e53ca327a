"""Read a listing, AMD assembly from LLVM or SASS from nvdisasm: find loops and count their instructions.

Each instruction of the listing counts once: the counts show the compiler's choices, not how often they run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple


class Line(NamedTuple):
    """A label (`opcode` empty), or an instruction with the label it may jump to.

    `ends`: control never continues to the next line. `spill`: it saves or restores a spilled register.
    """

    text: str
    opcode: str = ""
    label: str = ""
    target: str = ""
    ends: bool = False
    spill: bool = False


class Access(NamedTuple):
    """A memory access of one lane: its direction, and its bytes (0: an opcode of unknown width)."""

    way: Literal["load", "store"]
    bytes: int


@dataclass(frozen=True, slots=True)
class Syntax:
    """The syntax of one vendor's listing. `waits` is None if waiting is not an instruction.

    `access` reads a global access, `local` one of LDS; `scratch` says whether a line accesses scratch memory.
    """

    parse: Callable[[str], list[Line]]
    access: Callable[[Line], Access | None]
    local: Callable[[Line], Access | None]
    scratch: Callable[[Line], bool]
    matrix: re.Pattern[str]
    barrier: re.Pattern[str]
    waits: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Instruction counts of a stretch of code; branches are not counted.

    `loads` and `stores` count global accesses by width in bytes a lane, `lds_loads` and `lds_stores` those of LDS, and
    `scratch` accesses of scratch memory. `drains` are waits for every outstanding vector load; None, as `waits`, if
    waiting is not an instruction.
    """

    instructions: int
    matrix: dict[str, int]
    loads: dict[int, int]
    stores: dict[int, int]
    lds_loads: dict[int, int]
    lds_stores: dict[int, int]
    scratch: int
    barriers: int
    waits: int | None
    drains: int | None


_AMD_LABEL = re.compile(r"([.\w$]+):")
_AMD_INSTRUCTION = re.compile(r"\s+([a-z]\w+)\b(.*)")
_AMD_BRANCH = re.compile(r"s_c?branch\w*")
_AMD_END = re.compile(r"s_branch|s_endpgm|s_setpc_b64|s_trap")
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
# widths by the words an opcode may end in: gfx9's (dwordx4), then those of gfx11 and later (b128)
_AMD_BYTES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2,
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
    "u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
}  # fmt: skip
# LDS: gfx9's names, then those of gfx11 and later; two addresses are one access of twice the width
_AMD_LDS = re.compile(r"ds_(read|write|load|store)(2|2st64|_2addr|_2addr_stride64)?_[bui](\d+)(?:_\w+)?")
# a wait for all vector loads: "s_waitcnt vmcnt(0)", "s_wait_loadcnt 0x0", and forms that name other counters beside it
_AMD_DRAIN = re.compile(r"vmcnt\(0\)|s_wait_loadcnt(?:_dscnt)? (?:0x0|0)\b|s_waitcnt 0\b")


def _parse_amd(text: str) -> list[Line]:
    lines = []
    for raw in text.splitlines():
        code, _, comment = raw.partition(";")
        code = code.rstrip()
        if found := _AMD_LABEL.fullmatch(code):
            lines.append(Line(code, label=found[1]))
        elif found := _AMD_INSTRUCTION.fullmatch(code):
            jump = found[2].strip() if _AMD_BRANCH.fullmatch(found[1]) else ""
            ends = _AMD_END.fullmatch(found[1]) is not None
            spill = "Folded Spill" in comment or "Folded Reload" in comment
            lines.append(Line(f"{found[1]}{found[2]}".replace("\t", " "), found[1], "", jump, ends, spill))
    return lines


def _access_amd(line: Line) -> Access | None:
    found = _AMD_ACCESS.fullmatch(line.opcode)
    # gfx90a spills through buffer instructions, to scratch memory
    if found is None or line.spill:
        return None
    # modifiers come before the width (lds_dwordx4, d16_hi_u8) or after it (short_d16_hi)
    words = [word for word in found[2].split("_") if word not in ("lds", "d16", "hi")]
    width = _AMD_BYTES.get(words[0], 0) if len(words) == 1 else 0
    return Access("load" if found[1] == "load" else "store", width)


def _local_amd(line: Line) -> Access | None:
    found = _AMD_LDS.fullmatch(line.opcode)
    if found is None:
        return None
    return Access("load" if found[1] in ("read", "load") else "store", int(found[3]) // 8 * (2 if found[2] else 1))


def _scratch_amd(line: Line) -> bool:
    # gfx90a's spills are buffer instructions; a spill of a scalar register goes into a lane of a vector register
    return line.opcode.startswith("scratch_") or (line.spill and line.opcode.startswith("buffer_"))


_SASS_LABEL = re.compile(r"(\.L_x_\d+):")
_SASS_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*?)\s*;.*")
_SASS_END = re.compile(r"BRA `.*|EXIT|RET\b.*")
_SASS_JUMP = re.compile(r"`\((\.L_x_\d+)\)")


def _parse_sass(text: str) -> list[Line]:
    lines = []
    for raw in text.splitlines():
        if found := _SASS_LABEL.fullmatch(raw.strip()):
            lines.append(Line(raw.strip(), label=found[1]))
        elif (found := _SASS_INSTRUCTION.fullmatch(raw)) and found[1] != "NOP":
            jump = _SASS_JUMP.search(found[2]) if found[1].startswith("BRA") else None
            code = raw.split("*/", 1)[1].strip().removesuffix(";").rstrip()
            ends = _SASS_END.fullmatch(code) is not None
            lines.append(Line(code, found[1], target=jump[1] if jump else "", ends=ends))
    return lines


def _access_sass(line: Line) -> Access | None:
    name, *modifiers = line.opcode.split(".")
    if name not in ("LDG", "LD", "LDGSTS", "STG", "ST"):
        return None
    return Access("store" if name.startswith("ST") else "load", _width_sass(modifiers))


def _width_sass(modifiers: Sequence[str]) -> int:
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[word] for word in modifiers if word in sizes), 4)


def _local_sass(line: Line) -> Access | None:
    name, *modifiers = line.opcode.split(".")
    if name in ("LDSM", "STSM"):
        # 8 x 8 matrices of 16 bits, up to four at a time
        width = 4 * int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 4
        return Access("load" if name == "LDSM" else "store", width)
    if name not in ("LDS", "STS"):
        return None
    return Access("load" if name == "LDS" else "store", _width_sass(modifiers))


def _scratch_sass(line: Line) -> bool:
    return line.opcode.split(".")[0] in ("LDL", "STL")


AMD = Syntax(
    _parse_amd,
    _access_amd,
    _local_amd,
    _scratch_amd,
    matrix=re.compile(r"v_s?(?:mfma|wmma)\w*"),
    barrier=re.compile(r"s_barrier|s_barrier_wait"),
    # waits for the ALU do not count: no memory access is behind them
    waits=re.compile(r"s_wait(?!_alu|cnt_depctr|_idle|_event)\w*"),
)
NVIDIA = Syntax(
    _parse_sass,
    _access_sass,
    _local_sass,
    _scratch_sass,
    matrix=re.compile(r"(?:[HIQDB]|O)G?MMA(?:\..*)?"),
    barrier=re.compile(r"BAR(?:\..*)?"),
    waits=None,
)


def _blocks(lines: Sequence[Line]) -> list[tuple[int, int]]:
    """The basic blocks as (first line, line after the last): they begin at labels and end at branches."""
    starts = {0, len(lines)}
    for index, line in enumerate(lines):
        if line.label:
            starts.add(index)
        if line.target or line.ends:
            starts.add(index + 1)
    return list(pairwise(sorted(starts)))


def _successors(lines: Sequence[Line], blocks: Sequence[tuple[int, int]]) -> list[list[int]]:
    at = {lines[start].label: block for block, (start, _) in enumerate(blocks) if lines[start].label}
    found = []
    for block, (_, end) in enumerate(blocks):
        last = lines[end - 1]
        nexts = [at[last.target]] if last.target in at else []
        if not last.ends and block + 1 < len(blocks):
            nexts.append(block + 1)
        found.append(nexts)
    return found


def _dominators(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block, the blocks on every path to it, itself included; empty if it cannot be reached."""
    every = set(range(len(successors)))
    before: list[list[int]] = [[] for _ in successors]
    for block, nexts in enumerate(successors):
        for other in nexts:
            before[other].append(block)
    found = [{0}, *(set(every) for _ in successors[1:])]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(successors)):
            # debug labels after a jump make unreachable blocks, which must not affect the blocks after them
            ways = [found[other] for other in before[block] if found[other]]
            new = set.intersection(*ways) | {block} if ways else set()
            changed |= new != found[block]
            found[block] = new
    return found


def loops(lines: Sequence[Line]) -> list[list[Line]]:
    """The innermost loops, in the order of the listing, without loops that only wait for a barrier in memory.

    Natural loops of the control flow: the blocks that reach a jump back to a block that dominates them. A compiler may
    place a loop's blocks in any order, so their position in the listing says nothing.
    """
    if not lines:
        return []
    blocks = _blocks(lines)
    successors = _successors(lines, blocks)
    dominators = _dominators(successors)
    bodies: dict[int, set[int]] = {}
    for block, nexts in enumerate(successors):
        for head in nexts:
            if head in dominators[block]:
                bodies.setdefault(head, {head}).update(_reaching(block, head, successors))
    code = {
        head: [line for block in sorted(body) for line in lines[slice(*blocks[block])]] for head, body in bodies.items()
    }
    working = {head for head, loop in code.items() if not _only_waits(loop)}
    return [
        code[head] for head in sorted(working) if not any(other != head and other in bodies[head] for other in working)
    ]


def _only_waits(loop: Sequence[Line]) -> bool:
    """True for a wait on sm_90's barriers in shared memory, and for the jump to itself that ends NVIDIA's listings."""
    return all(line.opcode.startswith("SYNCS.PHASECHK") for line in loop if line.opcode and not line.target)


def _reaching(block: int, head: int, successors: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which `block` is reached without going through `head`."""
    found, waiting = {head, block}, [block]
    while waiting:
        one = waiting.pop()
        if one == head:
            continue
        for other, nexts in enumerate(successors):
            if one in nexts and other not in found:
                found.add(other)
                waiting.append(other)
    return found


def count(lines: Iterable[Line], syntax: Syntax) -> Counts:
    """Count the instructions of a loop or a whole kernel."""
    code = [line for line in lines if line.opcode and not line.target]
    far = [access for line in code if (access := syntax.access(line)) is not None]
    near = [access for line in code if (access := syntax.local(line)) is not None]
    waits = drains = None
    if syntax.waits is not None:
        waiting = [line for line in code if syntax.waits.fullmatch(line.opcode)]
        waits, drains = len(waiting), sum(_AMD_DRAIN.search(line.text) is not None for line in waiting)

    def widths(accesses: Sequence[Access], way: str) -> dict[int, int]:
        return dict(sorted(Counter(access.bytes for access in accesses if access.way == way).items(), reverse=True))

    return Counts(
        instructions=len(code),
        matrix=dict(Counter(line.opcode for line in code if syntax.matrix.fullmatch(line.opcode))),
        loads=widths(far, "load"),
        stores=widths(far, "store"),
        lds_loads=widths(near, "load"),
        lds_stores=widths(near, "store"),
        scratch=sum(map(syntax.scratch, code)),
        barriers=sum(syntax.barrier.fullmatch(line.opcode) is not None for line in code),
        waits=waits,
        drains=drains,
    )


def hot_loop(lines: Sequence[Line], syntax: Syntax) -> list[Line]:
    """The innermost loop with most matrix instructions, then with most instructions; empty without a loop."""

    def weight(loop: list[Line]) -> tuple[int, int]:
        counts = count(loop, syntax)
        return sum(counts.matrix.values()), counts.instructions

    return max(loops(lines), key=weight, default=[])
