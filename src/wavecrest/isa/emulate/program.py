"""A kernel's machine code with its table of decoded instructions, and its launch over a grid of workgroups.

The waves of a workgroup run one after the other, each until a barrier or its end. Instructions are decoded when a wave
first meets them; the opcodes of the whole code are compiled together before the first one. The run loop is C
(`machine/`), outside the GIL, so that several workers help.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wavecrest.errors import EmulationError, OutOfBounds, Unsupported, UnsupportedInstruction
from wavecrest.isa.emulate import actions, decode, effects, machine, opcodes, watch
from wavecrest.isa.emulate.code_object import CodeObject
from wavecrest.isa.emulate.grammar import NotUnderstood

WorkgroupId = tuple[int, int, int]

# the layout of machine/wave.h: SGPRs, inline constants from 128 on, the state, hardware registers from 264 on
_TTMP, _INLINE_INTEGERS, _INLINE_NEGATIVE, _INLINE_FLOATS = 108, 128, 193, 240
_PC, _SCRATCH_BYTES, _HWREG, _SCALARS = 256, 259, 264, 340
_MODE, _HW_ID = _HWREG + 1, _HWREG + 4
_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)
# registers, and a few more for accesses of several registers from the last one on
_VGPRS = 264
# workgroups of a worker that run at a time, as on a GPU, since kernels may wait for one another; and instructions of a
# wave before the next one has its turn
RESIDENT, QUANTUM = 64, 2000
# most instructions of one worker in a launch; more counts as an endless loop
LIMIT = 200_000_000
# banks of LDS; 32 elsewhere
BANKS = {"gfx950": 64}
_ENDS_BLOCK = ("S_BRANCH", "S_CBRANCH", "S_ENDPGM", "S_SETPC", "S_SWAPPC", "S_TRAP")


@dataclass
class Stats:
    """Statistics of a launch: wave instructions, the same by opcode, and the arguments that were used in place.

    `unsupported`: opcodes in the code, not reached, that cannot run. `findings`: those of the watch, None if the launch
    was not watched. `lds_cycles`, `lds_conflicts`: cycles that a watched launch keeps LDS busy, and those of them that
    lanes wait for each other's banks (machine/banks.h).
    """

    seconds: float = 0.0
    compile_seconds: float = 0.0
    workgroups: int = 0
    instructions: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    unguarded: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    findings: list[watch.Finding] | None = None
    lds_cycles: int = 0
    lds_conflicts: int = 0

    def matrix_instructions(self) -> int:
        """The number of MFMA and WMMA instructions."""
        return sum(count for name, count in self.ops.items() if "MFMA" in name or "WMMA" in name)


def check_watched(arch: str) -> None:
    """Check that launches for an architecture can be watched.

    Raises:
        Unsupported: it is not CDNA.
    """
    if decode.family(arch) != "cdna":
        raise Unsupported(
            f"waits, barriers and uninitialised values are checked on gfx90a, gfx942 and gfx950, not on {arch}, which "
            "has other wait counters"
        )


class _Wave:
    """Registers of one wave, set up as the hardware does at its start."""

    def __init__(self, program: Program, group: _Group, first: int, threads: int) -> None:
        code, wave = program.code, program.code.wave
        lanes = min(wave, threads - first)
        self.s = s = program.registers.copy()
        self.v = np.zeros((_VGPRS, wave), np.uint32)
        # accumulation registers exist on architectures with waves of 64 lanes
        self.acc = np.zeros((_VGPRS, wave), np.uint32) if wave == 64 else self.v
        self.scratch = np.zeros(max(code.scratch * wave, 8), np.uint8)
        s[: len(group.user_sgprs)] = group.user_sgprs
        if code.has_scratch_buffer:
            s[:4] = code.scratch_buffer(self.scratch.ctypes.data)
        x, y, z = group.id
        if program.family == "rdna4":
            s[_TTMP + 9], s[_TTMP + 7] = x, y | z << 16
        else:
            at = code.rsrc2 >> 1 & 31
            for axis, position in enumerate(group.id):
                if code.rsrc2 >> (7 + axis) & 1:
                    s[at] = position
                    at += 1
        mask, exec_at = (1 << lanes) - 1, opcodes.EXEC
        s[exec_at] = mask & 0xFFFFFFFF
        if wave == 64:
            s[exec_at + 1] = mask >> 32
        # work item ids: workgroups of Triton have one dimension
        self.v[0, :lanes] = np.arange(first, first + lanes)
        s[_SCRATCH_BYTES] = code.scratch
        s[_MODE] = code.rsrc1 >> 12 & 0xFF
        s[_HW_ID] = (first // wave & 15) | (first // wave & 3) << 4
        s[_PC], s[_PC + 1] = code.entry & 0xFFFFFFFF, code.entry >> 32
        addresses = [part.ctypes.data for part in (s, self.v, group.lds, self.scratch, self.acc)]
        self.watch: watch.WaveWatch | None = None
        if group.watch is not None:
            # the SGPRs that are set above: user's, then up to three numbers of the workgroup
            self.watch = watch.WaveWatch(group.watch, first // wave, (code.rsrc2 >> 1 & 31) + 3)
        watched = 0 if self.watch is None else self.watch.address
        self.pointers = (ctypes.c_uint64 * 7)(*addresses, group.lds_bytes, watched)
        # why it stopped: BARRIER or END; 0 while it can run
        self.state = 0

    @property
    def pc(self) -> int:
        return int(self.s[_PC]) | int(self.s[_PC + 1]) << 32


class _Group:
    """A workgroup: its LDS and its waves."""

    def __init__(self, program: Program, launch: _Launch, position: WorkgroupId) -> None:
        self.id = position
        self.user_sgprs = launch.user_sgprs
        # LDS starts undefined on a GPU; NaN here, so that a kernel that relies on it is found
        self.lds_bytes = launch.lds_bytes
        self.lds = np.full((launch.lds_bytes + 3) // 4, 0x7FC0DEAD, np.uint32)
        self.watch: watch.GroupWatch | None = None
        if launch.watch is not None:
            self.watch = watch.GroupWatch(launch.watch, position, launch.lds_bytes)
        wave, threads = program.code.wave, launch.threads
        self.waves = [_Wave(program, self, first, threads) for first in range(0, threads, wave)]

    def ended(self) -> bool:
        return all(wave.state == machine.END for wave in self.waves)

    def release(self) -> None:
        """Let the waves pass the barrier that all those still running have reached."""
        if all(wave.state for wave in self.waves):
            if self.watch is not None:
                self.watch.passed_barrier([wave.watch for wave in self.waves if wave.watch is not None])
            for wave in self.waves:
                wave.state = 0 if wave.state == machine.BARRIER else machine.END


# what tinygrad's decoder and this emulator raise for bytes that they have no instruction for
_UNDECODED = (NotUnderstood, NotImplementedError, ValueError, KeyError, AttributeError, StopIteration, RuntimeError)


class _Step(NamedTuple):
    """An instruction: an action of the C machine, the function of its opcode, or for DPP both."""

    name: str
    inst: Any
    size: int
    action: actions.Action | None
    function: opcodes.Opcode | None
    operands: Mapping[str, int | Sequence[int]]


class Program:
    """A code object with its table of decoded instructions; it can be launched many times.

    Args:
        elf: `compiled.asm["hsaco"]` of a kernel compiled for an AMD target.
        name: the kernel in it; None takes the first.

    Raises:
        MissingDependency, EnvironmentProblem: the emulator cannot run here; the message says what to do.
    """

    def __init__(self, elf: bytes, name: str | None = None) -> None:
        self.library = machine.load()
        self.library.install()
        self.code = CodeObject(elf, name)
        self.family = decode.family(self.code.arch)
        self.entries = self.code.code_size // 4 + 64
        self.table = (machine.Entry * self.entries)()
        # filled from the first watched launch on
        self.facts: Any = None
        self._decoded: dict[int, tuple[Any, bytes]] = {}
        self.names: dict[int, tuple[str, Any]] = {}
        self.unsupported: dict[int, str] = {}
        self.compile_seconds = 0.0
        self._lock = threading.Lock()
        self._compiled = False
        registers = np.zeros(_SCALARS, np.uint32)
        registers[_INLINE_INTEGERS:_INLINE_NEGATIVE] = np.arange(65)
        negative = (-np.arange(1, 17)).astype(np.int64) & 0xFFFFFFFF
        registers[_INLINE_NEGATIVE : _INLINE_NEGATIVE + 16] = negative
        registers[_INLINE_FLOATS : _INLINE_FLOATS + len(_FLOATS)] = np.array(_FLOATS, np.float32).view(np.uint32)
        self.registers = registers

    def where(self, pc: int) -> str:
        """Function, offset and, if decoded, the instruction of a program counter."""
        known = self.names.get((pc - self.code.code) >> 2)
        return self.code.where(pc) + (f": {known[1]!r}" if known is not None else "")

    def prepare(self, pc: int) -> None:
        """Decode the instruction at a program counter, and what follows it up to a branch.

        Raises:
            UnsupportedInstruction: this instruction cannot run; a later one is an error only when it is reached.
        """
        self._compile()
        self._prepare_one(pc)
        while not self.names[index := (pc - self.code.code) >> 2][0].startswith(_ENDS_BLOCK):
            pc += self.table[index].size
            if (pc - self.code.code) >> 2 >= self.entries or self.table[(pc - self.code.code) >> 2].size:
                return
            try:
                self._prepare_one(pc)
            except UnsupportedInstruction as error:
                # an error only where it is reached
                self.unsupported[(pc - self.code.code) >> 2] = str(error)
                return

    def _compile(self) -> None:
        """Compile the opcodes of the whole code, in one call of the compiler."""
        with self._lock:
            if self._compiled:
                return
            self._compiled, begin = True, time.perf_counter()
            found, at = [], self.code.code
            while at < self.code.code + self.code.code_size:
                raw = ctypes.string_at(at, 16)
                try:
                    step = self._step(raw)
                    found += [] if step.function is None else [step.function]
                    at += step.size
                except _UNDECODED:
                    # data between functions, or an instruction that is an error where it is reached
                    at += 4
            opcodes.compile_all(found)
            self.compile_seconds += time.perf_counter() - begin

    def _prepare_one(self, pc: int) -> None:
        index = (pc - self.code.code) >> 2
        with self._lock:
            if self.table[index].size:
                return
            begin = time.perf_counter()
            raw, inst = ctypes.string_at(pc, 16), None
            try:
                inst = decode.decode(raw, self.code.arch)
                self._decoded[index] = inst, raw
                if self.facts is not None:
                    self._set_facts(index)
                self.names[index] = self._fill(self.table[index], raw)
            except Exception as error:
                what = repr(inst)[:200] if inst is not None else f"bytes {raw[:8].hex()}"
                raise UnsupportedInstruction(
                    f"the emulator cannot run an instruction of {self.code.arch}, at {self.code.where(pc)}: {what} "
                    f"({type(error).__name__}: {str(error)[:200]})"
                ) from error
            self.compile_seconds += time.perf_counter() - begin

    def _set_facts(self, index: int) -> None:
        inst, raw = self._decoded[index]
        self.facts[index].set(effects.facts(decode.name(inst, raw, self.code.arch), inst, raw))

    def prepare_watch(self) -> None:
        """Have what the watch needs to know of each instruction.

        Raises:
            Unsupported: the architecture is not CDNA.
        """
        check_watched(self.code.arch)
        with self._lock:
            if self.facts is None:
                self.facts = (machine.Facts * self.entries)()
                for index in self._decoded:
                    self._set_facts(index)

    def _step(self, raw: bytes) -> _Step:
        """Decode an instruction and find the action or the function that runs it."""
        arch, inst = self.code.arch, decode.decode(raw, self.code.arch)
        name, size, code = decode.name(inst, raw, arch), inst.size(), raw
        action = None
        if (taken_apart := decode.dpp(inst, raw, arch)) is not None:
            code, size = taken_apart.plain + bytes(16), taken_apart.size
            inst = opcodes.decode(code, self.family)
            name = opcodes.name(inst) + "_DPP"
        else:
            action = actions.action(name, inst, raw, arch)
        if action is not None:
            return _Step(name, inst, size, action, None, {})
        function = opcodes.opcode(inst, self.family)
        if taken_apart is not None:
            sign = 0x8000 if function.sources and function.sources[0].bits == 16 else 0x80000000
            action = "dpp", taken_apart.fields | {"wave": self.code.wave, "sign": sign}
        return _Step(name, inst, size, action, function, opcodes.operands(inst, code, function, arch))

    def _fill(self, entry: machine.Entry, raw: bytes) -> tuple[str, Any]:
        """Make an instruction runnable; its opcode's name and tinygrad's object for it."""
        step = self._step(raw)
        if step.function is not None:
            entry.opcode, entry.jumps = opcodes.address(step.function), step.function.jumps
            entry.operands.set(step.operands)
        if step.action is not None:
            entry.set_action(*step.action)
        if step.name in ("S_BARRIER", "S_BARRIER_WAIT"):
            entry.stops = machine.BARRIER
        elif step.name == "S_TRAP":
            entry.stops = machine.TRAP
        # the size is set last: other threads read entries without the lock, and a size marks a ready one
        entry.size = step.size
        return step.name, step.inst

    def launch(
        self,
        grid: Sequence[int],
        args: Sequence[Any],
        *,
        num_warps: int,
        shared: int = 0,
        workers: int = 1,
        resident: int = RESIDENT,
        quantum: int = QUANTUM,
        limit: int = LIMIT,
        only: Iterable[WorkgroupId] | None = None,
        describe: Callable[[int], str] = hex,
        regions: Sequence[watch.Region] | None = None,
    ) -> Stats:
        """Run the kernel.

        Args:
            grid: workgroups along x, y and z; missing ones are 1.
            args: addresses and numbers, without the constexprs.
            num_warps: waves of a workgroup; `shared`: bytes of dynamic LDS.
            workers: threads that run workgroups.
            resident: workgroups of a worker that advance in turns of `quantum` instructions a wave. A kernel that waits
                for other workgroups needs all of those among them.
            limit: the most instructions of a worker.
            only: run just these workgroups.
            describe: names the memory at an address, for the message of a fault.
            regions: memory that the kernel may access; given, the waves are watched and the result has the findings.

        Raises:
            Unsupported: regions are given and the architecture is not CDNA.
            OutOfBounds: an access outside the kernel's memory.
            UnsupportedInstruction: an opcode without a meaning here.
            EmulationError: a trap, a jump out of the code, or more instructions than `limit`.
        """
        if regions is not None:
            self.prepare_watch()
        launch = _Launch(self, grid, args, num_warps, shared, resident, quantum, limit, describe, regions)
        return launch.run(only, workers)


class _Launch:
    """One launch of a program: what its workers share."""

    def __init__(
        self,
        program: Program,
        grid: Sequence[int],
        args: Sequence[Any],
        num_warps: int,
        shared: int,
        resident: int,
        quantum: int,
        limit: int,
        describe: Callable[[int], str],
        regions: Sequence[watch.Region] | None,
    ) -> None:
        code = program.code
        self.watch = None if regions is None else watch.LaunchWatch(program.entries, regions)
        self.program, self.resident, self.limit, self.describe = program, resident, limit, describe
        self.budget = min(quantum, limit) if resident > 1 else limit
        self.grid = (*grid, 1, 1)[:3]
        self.threads = num_warps * code.wave
        segment = code.kernarg(args, self.grid, (self.threads, 1, 1))
        # code at the entry may read beyond the declared arguments
        self._kernarg = (ctypes.c_char * (len(segment) + 64)).from_buffer_copy(bytes(segment) + bytes(64))
        self.user_sgprs = code.user_sgprs(ctypes.addressof(self._kernarg))
        self.lds_bytes = max(code.lds, shared, 4)
        # FP_DENORM for float32
        self.flush = int(code.rsrc1 >> 16 & 3 == 0)
        self.todo: list[WorkgroupId] = []
        self.errors: list[BaseException] = []
        self.mutex = threading.Lock()

    def run(self, only: Iterable[WorkgroupId] | None, workers: int) -> Stats:
        program, (gx, gy, gz) = self.program, self.grid
        everything = ((x, y, z) for z in range(gz) for y in range(gy) for x in range(gx))
        self.todo = list(only if only is not None else everything)[::-1]
        stats, compiled_before = Stats(workgroups=len(self.todo)), program.compile_seconds
        # of each worker: how often instructions ran, and cycles of LDS
        hits = np.zeros((workers, program.entries), np.uint64)
        served = np.zeros((workers, 2), np.uint64)
        begin = time.perf_counter()
        if workers == 1:
            self._work(hits[0], served[0])
        else:
            threads = [threading.Thread(target=self._work, args=rows) for rows in zip(hits, served, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        stats.seconds = time.perf_counter() - begin
        stats.compile_seconds = program.compile_seconds - compiled_before
        if self.errors:
            raise self.errors[0]
        if self.watch is not None:
            stats.findings = self.watch.findings(lambda at: program.where(program.code.code + 4 * at), self.describe)
        stats.unsupported = list(program.unsupported.values())
        stats.lds_cycles, stats.lds_conflicts = (int(count) for count in served.sum(0))
        total = hits.sum(0)
        stats.instructions = int(total.sum())
        for index in np.flatnonzero(total):
            stats.ops[program.names[int(index)][0]] += int(total[index])
        return stats

    def _next(self) -> WorkgroupId | None:
        with self.mutex:
            return self.todo.pop() if self.todo else None

    def _work(self, hits: Any, served: Any) -> None:
        """Run workgroups until all are done; the first error of any worker ends all workers."""
        active: list[_Group] = []
        try:
            while not self.errors:
                while len(active) < self.resident and (position := self._next()) is not None:
                    active.append(_Group(self.program, self, position))
                if not active:
                    return
                for group in list(active):
                    for wave in group.waves:
                        self._advance(group, wave, hits, served)
                    # a loop may end each wave's turn at a barrier
                    self._check_limit(group, hits)
                    if group.ended():
                        active.remove(group)
                    else:
                        group.release()
        except BaseException as error:
            # raised again by run, in the thread of the caller
            self.errors.append(error)

    def _advance(self, group: _Group, wave: _Wave, hits: Any, served: Any) -> None:
        """Run a wave until it stops or its turn ends."""
        program, library = self.program, self.program.library
        table, pointers = ctypes.addressof(program.table), ctypes.addressof(wave.pointers)
        facts = None if self.watch is None else ctypes.addressof(program.facts)
        while wave.state == 0:
            why = library.run(
                table, program.code.code, program.entries, pointers, self.budget, hits.ctypes.data, self.flush, facts,
                BANKS.get(program.code.arch, 32), served.ctypes.data,
            )  # fmt: skip
            if why == machine.COMPILE:
                program.prepare(wave.pc)
            elif why in (machine.BARRIER, machine.END):
                wave.state = why
            elif why == machine.BUDGET:
                return
            else:
                raise self._fault(why, group, wave)

    def _check_limit(self, group: _Group, hits: Any) -> None:
        done, running = int(hits.sum()), [wave for wave in group.waves if wave.state != machine.END]
        if done >= self.limit and running:
            raise EmulationError(
                f"{self._who(group)} has run {done:,} wave instructions and is at "
                f"{self.program.where(running[0].pc)}: an endless loop? A kernel that waits for other workgroups needs "
                "them resident"
            )

    def _who(self, group: _Group) -> str:
        code = self.program.code
        return f"{code.kernel['.name']} on {code.arch}, workgroup {group.id}"

    def _fault(self, why: int, group: _Group, wave: _Wave) -> EmulationError:
        where, who = self.program.where(wave.pc), self._who(group)
        if why == machine.FAULT:
            # the processor reports no address if it is not canonical
            address = self.program.library.fault_address()
            at = self.describe(address) if address else "an address no memory can have"
            return OutOfBounds(f"{who}: out-of-bounds access at {where}: {at}")
        if why == machine.OUTSIDE_LDS:
            at = self.program.library.fault_address()
            return OutOfBounds(
                f"{who}: out-of-bounds access at {where}: byte {at:,} of LDS, of which it has {self.lds_bytes:,}"
            )
        if why == machine.TRAP:
            return EmulationError(f"{who}: trap (device_assert failed, or an unreachable place) at {where}")
        return EmulationError(f"{who}: the program counter left the code, to {where}")
