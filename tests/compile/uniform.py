"""Uniform registers of NVIDIA's machine code (SASS) that are read without a value; and kernels as JSON, to look for it.

ptxas 12.8 (triton 3.6) may make an operand's address for sm_90's matrix instructions in place, of a register that it
has set to nothing or to something else: half of the columns of a product are then of other memory.
`python uniform.py [LEAST]` compiles flash_decoding over 8 and 4 bits, where that was found, and prints what is wrong by
case; LEAST: columns of a product from shared memory from which on they come in pairs, in place of the kernel's own.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_REGISTER = re.compile(r"UR(\d+)")
# opcodes that write a uniform register although they do not begin with U
_WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
# the upper half of an operand's address, whose layout is in the highest bits: no offset is as large, so that what it is
# added to must be 0
_UPPER = re.compile(r"UIADD3\.X UR(\d+), UR\1, (-?0x[0-9a-f]+), URZ, U?P\d")


class Instruction(NamedTuple):
    """`reads`, `writes`, `clears`: numbers of uniform registers; `clears`: those it writes 0 to."""

    is_conditional: bool
    opcode: str
    operands: str
    reads: frozenset[int]
    writes: frozenset[int]
    clears: frozenset[int]


class State(NamedTuple):
    """Uniform registers that were written on every way to a place, and those that hold 0 there."""

    written: frozenset[int]
    zero: frozenset[int]

    def after(self, one: Instruction) -> State:
        """The state behind an instruction."""
        zero = (self.zero - one.writes) | (one.clears & self.zero if one.is_conditional else one.clears)
        return State(self.written | one.writes, zero)

    def joined(self, other: State) -> State:
        """The state where two ways meet."""
        return State(self.written & other.written, self.zero & other.zero)


def _instruction(predicate: str | None, opcode: str, operands: str) -> Instruction:
    to_uniform = opcode.split(".")[0] in _WRITERS or (opcode[0] == "U" and opcode[:6] not in ("UISETP", "UPLOP3"))
    reads, writes = set[int](), set[int]()
    for place, operand in enumerate(operands.split(",")):
        for found in _REGISTER.finditer(operand):
            first = int(found[1])
            if place == 0 and to_uniform and operand.strip() == found[0]:
                writes |= {first, first + 1} if ".64" in opcode or ".WIDE" in opcode else {first}
            elif "gdesc[" in operand:
                # of four, the first two are of an operand that may be in registers of lanes instead
                reads |= {first + 2, first + 3} | (set() if place > 1 else {first, first + 1})
            elif "desc[" in operand or (".64" in opcode and opcode[0] == "U"):
                reads |= {first, first + 1}
            else:
                reads.add(first)
    clears = writes if opcode == "UMOV" and operands.endswith(", URZ") else ()
    return Instruction(predicate is not None, opcode, operands, frozenset(reads), frozenset(writes), frozenset(clears))


def unset(listing: str) -> list[str]:
    """Instructions that read a uniform register which some way to them has not written, and addresses made in place."""
    code, labels, wrong = list[Instruction](), dict[str, int](), list[str]()
    for line in listing.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label[1]] = len(code)
        elif found := _CODE.search(line):
            code.append(_instruction(*found.groups()))
    # what each instruction finds written, whichever way it is reached
    known: list[State | None] = [None] * (len(code) + 1)
    known[0], work = State(frozenset(), frozenset()), [0]
    while work:
        at = work.pop()
        if at == len(code):
            continue
        one, before = code[at], known[at]
        assert before is not None
        ways = [at + 1]
        if one.opcode.startswith("EXIT"):
            ways = ways if one.is_conditional else []
        elif one.opcode.startswith("BRA"):
            target = re.search(r"\.L_x_\d+", one.operands)
            ways = (ways if one.is_conditional or one.opcode != "BRA" else []) + (
                [labels[target[0]]] if target and target[0] in labels else []
            )
        for way in ways:
            there, after = known[way], before.after(one)
            after = after if there is None else there.joined(after)
            if after != there:
                known[way] = after
                work.append(way)
    for one, before in zip(code, known[:-1], strict=True):
        text = f"{one.opcode} {one.operands}"
        if before is None:
            continue
        upper = _UPPER.search(text)
        in_place = upper is not None and abs(int(upper[2], 16)) >= 1 << 24 and int(upper[1]) not in before.zero
        if in_place or one.reads - before.written:
            wrong.append(text)
    return wrong


def main() -> None:
    import torch

    from tests.compile.known import Known
    from wavecrest.hardware import ARCHS
    from wavecrest.isa import compiler
    from wavecrest.ops._flash_decoding import launch
    from wavecrest.ops._flash_decoding.backend import default_config, op
    from wavecrest.ops._flash_decoding.call import FlashDecodingCall
    from wavecrest.ops.common import target
    from wavecrest.ops.common.launcher import Launch

    arch = ARCHS["sm_90"]
    e4m3, int4 = torch.float8_e4m3fn, torch.uint8
    wrong, known = {}, Known(__file__, *sys.argv[1:])

    def found(first: Launch) -> list[str]:
        return unset(compiler.compile_launch(first, arch.name).listing)

    # cache, page, head_dim_v, whether each token has a scale, window
    cases = [
        (torch.int8, 1, 64, 0, 20), (torch.float8_e5m2, 1, 64, 0, 20), (e4m3, 1, 48, 0, -1), (e4m3, 0, 64, 1, 20),
        (e4m3, 1, 128, 0, 20), (int4, 1, 64, 1, 20), (int4, 1, 128, 1, 20),
    ]  # fmt: skip
    if len(sys.argv) > 1:
        launch.LEAST_SHARED, cases = int(sys.argv[1]), cases[:4]
    with target.assumed(arch):
        for cache, page, dv, groups, window in cases:
            leading, packed = (96, page, 3) if page else (3, 448, 3), 2 if cache == int4 else 1

            def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.empty(*shape, dtype=dtype, device="meta")

            scale = empty(*leading, 1) if groups else empty(3)
            shift = scale if cache == int4 else None
            call = FlashDecodingCall(
                empty(3, 16, 24, 80, dtype=torch.bfloat16), empty(*leading, 80 // packed, dtype=cache),
                empty(*leading, dv // packed, dtype=cache), empty(3, dtype=torch.int32),
                empty(3, 32, dtype=torch.int32) if page else None, window=window, k_scale=scale, v_scale=scale,
                k_shift=shift, v_shift=shift,
            )  # fmt: skip
            op.check(call)
            first = launch.plan(call, call.q, None, scale, scale, default_config(op.key(call)), arch).first
            name = f"{str(cache).removeprefix('torch.')} page {page} Dv {dv}"
            wrong[name] = known.answer(first, arch.name, functools.partial(found, first))
    sys.stdout.write(json.dumps(wrong))


if __name__ == "__main__":
    main()
