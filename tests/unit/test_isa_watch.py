"""The watch of emulated waves (machine/watch.h) on instruction lists, without tinygrad; and what feeds it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from wavecrest.errors import EnvironmentProblem, Unsupported
from wavecrest.isa.emulate import effects, fidelity, machine, watch
from wavecrest.isa.emulate.memory import Guard
from wavecrest.isa.emulate.program import check_watched
from wavecrest.isa.emulate.uninitialised import Uninitialised, elements

LDS_BYTES, ENTRIES = 1024, 200
# v0 has the number of the lane times 4, v1 a value; s[8:11] describe a buffer, s[100:101] the end
ADDRESS, VALUE, BUFFER, END = 0, 1, 8, 100


@pytest.fixture(scope="module")
def library() -> Any:
    try:
        return machine.load()
    except EnvironmentProblem as problem:
        pytest.skip(f"the C part cannot be built: {problem}")


@dataclass(frozen=True)
class Instruction:
    action: str = "nop"
    fields: dict[str, int] = field(default_factory=dict)
    facts: dict[str, list[int]] = field(default_factory=dict)


class Machine:
    """Waves of one workgroup that run what they are given; nothing but the C part, its watch included."""

    def __init__(self, library: Any, waves: int = 1, regions: tuple[watch.Region, ...] = (), banks: int = 32) -> None:
        self.library, self.banks = library, banks
        # cycles of LDS, and those of them for conflicts
        self.served = np.zeros(2, np.uint64)
        self.table, self.facts = (machine.Entry * ENTRIES)(), (machine.Facts * ENTRIES)()
        self.launch = watch.LaunchWatch(ENTRIES, regions)
        self.group = watch.GroupWatch(self.launch, (0, 0, 0), LDS_BYTES)
        self.lds = np.zeros(LDS_BYTES, np.uint8)
        self.hits, self.next = np.zeros(ENTRIES, np.uint64), 0
        self.watches = [watch.WaveWatch(self.group, number, 16) for number in range(waves)]
        self.files = [[np.zeros(size, np.uint32) for size in (400, 264 * 64, 264 * 64)] for _ in range(waves)]
        for number, (s, v, _) in enumerate(self.files):
            s[126:128] = s[END : END + 2] = 0xFFFFFFFF
            v[ADDRESS * 64 :][:64] = np.arange(64) * 4
            v[VALUE * 64 :][:64] = np.arange(64) + 1000 * number
            self.watches[number].struct.unknown[VALUE] = 0

    def run(self, wave: int, *instructions: Instruction) -> list[int]:
        """Run a wave; returns the kinds that were found, in order."""
        start, before = self.next, self.launch.struct.found
        for one in (*instructions, Instruction("setpc", {"ssrc": END})):
            entry, facts = self.table[self.next], self.facts[self.next]
            entry.set_action(one.action, one.fields)
            facts.set({name: [default] * count for name, (count, default) in effects.FIELDS.items()} | one.facts)
            entry.size = 4
            self.next += 1
        s, v, acc = self.files[wave]
        s[256], s[257] = 4 * start, 0
        pointers = (ctypes.c_uint64 * 7)(
            s.ctypes.data, v.ctypes.data, self.lds.ctypes.data, 0, acc.ctypes.data, LDS_BYTES,
            self.watches[wave].address,
        )  # fmt: skip
        table, facts_at = ctypes.addressof(self.table), ctypes.addressof(self.facts)
        counts = (self.hits.ctypes.data, 0, facts_at, self.banks, self.served.ctypes.data)
        why = self.library.run(table, 0, ENTRIES, pointers, 1000, *counts)
        assert why == machine.END
        return [finding.kind for finding in self.findings()[before:]]

    def findings(self) -> list[watch.Finding]:
        return self.launch.findings(lambda at: f"#{at}", hex)

    def barrier(self) -> None:
        self.group.passed_barrier(self.watches)


def facts(*, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), **values: list[int]) -> Instruction:
    """An instruction that only has facts: single registers that it reads and writes."""
    pairs = {"reads": [number for one in reads for number in (one, 1)]}
    pairs["writes"] = [number for one in writes for number in (one, 1)]
    return Instruction(facts=values | {name: numbers for name, numbers in pairs.items() if numbers})


def v(number: int) -> int:
    return effects.VGPRS + number


def load(register: int) -> Instruction:
    return facts(writes=(v(register),), counts=[effects.COUNTS_VM])


def scalar_load(register: int) -> Instruction:
    return facts(writes=(register,), counts=[effects.COUNTS_SCALAR])


def use(register: int) -> Instruction:
    return facts(reads=(register,))


def wait(vm: int = -1, lgkm: int = -1) -> Instruction:
    return facts(vm_wait=[vm], lgkm_wait=[lgkm])


_LDS = {"wave": 64, "bytes": 4, "sign": 0, "high": 0, "d16": 0, "vaddr": ADDRESS, "offset1": -1, "data1": 0, "acc": 0}
_COUNTS_LDS = [effects.COUNTS_LDS]


def lds_write(offset: int = 0, register: int = VALUE) -> Instruction:
    fields = _LDS | {"store": 1, "offset0": offset, "data0": register}
    return Instruction("lds", fields, {"reads": [v(ADDRESS), 1, v(register), 1], "counts": _COUNTS_LDS})


def lds_read(register: int = 2, offset: int = 0) -> Instruction:
    fields = _LDS | {"store": 0, "offset0": offset, "data0": register}
    return Instruction("lds", fields, {"reads": [v(ADDRESS), 1], "writes": [v(register), 1], "counts": _COUNTS_LDS})


def lds_add() -> Instruction:
    fields = {"wave": 64, "op": 2, "bytes": 4, "vaddr": ADDRESS, "offset": 0, "data": VALUE, "compare": 0, "vdst": 0}
    return Instruction("lds_atomic", fields | {"returns": 0, "acc": 0}, {"counts": _COUNTS_LDS})


def store(register: int, offset: int = 0, op: int = -2) -> Instruction:
    fields = {"wave": 64, "op": op, "bytes": 4, "sign": 0, "high": 0, "d16": 0, "vdata": register, "vaddr": ADDRESS}
    fields |= {"srsrc": BUFFER, "soffset": 128, "offset": offset, "offen": 1, "idxen": 0, "acc": 0, "lds": 0}
    return Instruction("buffer", fields | {"returns": 0}, {"counts": [effects.COUNTS_VM]})


def to_lds() -> Instruction:
    """A load that goes straight to LDS."""
    one = store(0, op=-1)
    return replace(one, fields=one.fields | {"lds": 1})


def move(target: int, *sources: int, flow: str = "lanes", **more: list[int]) -> Instruction:
    """A vector operation of single registers, as far as it passes on what nothing wrote."""
    spread = [*map(v, sources), -1, -1, -1][:3]
    known: dict[str, list[int]] = {"flow": [effects.FLOW[flow]], "source": spread, "target": [v(target)]}
    return Instruction(facts=known | {"words": [1, 1, 1], "target_words": [1]} | more)


def buffer_of(made: Machine, tensor: torch.Tensor) -> None:
    for s, _, _ in made.files:
        s[BUFFER : BUFFER + 4] = tensor.data_ptr() & 0xFFFFFFFF, tensor.data_ptr() >> 32, 1 << 30, 0


def region_of(tensor: torch.Tensor, state: int) -> tuple[watch.Region, Any]:
    states = np.full(tensor.untyped_storage().nbytes(), state, np.uint8)
    start = tensor.untyped_storage().data_ptr()
    return watch.Region(start, start + states.size, states.ctypes.data), states


def test_structs_are_those_of_c(library: Any) -> None:
    for number, struct in enumerate((*watch.STRUCTS, machine.Facts)):
        assert library.watch_size(number) == ctypes.sizeof(struct), struct.__name__


def test_vector_loads_end_in_order(library: Any) -> None:
    made = Machine(library)
    assert made.run(0, load(5), load(6), wait(vm=1), use(v(5))) == []
    assert made.run(0, use(v(6))) == [watch.READ]
    # said once; then a wait for all
    assert made.run(0, load(7), wait(vm=0), use(v(7))) == []
    assert "v6 is read at #5 before an s_waitcnt covers its load at #1" in made.findings()[0].text


def test_lds_reads_end_in_order_and_scalar_loads_in_any(library: Any) -> None:
    made = Machine(library)
    assert made.run(0, lds_write(), lds_read(5), lds_read(6), wait(lgkm=1), use(v(5))) == []
    assert made.run(0, use(v(6))) == [watch.READ]
    assert made.run(0, wait(lgkm=0), scalar_load(20), scalar_load(21), wait(lgkm=1), use(20)) == [watch.READ]
    assert made.run(0, scalar_load(20), wait(lgkm=0), use(20)) == []
    # a wait for the other counter does not help
    assert made.run(0, load(5), wait(lgkm=0), use(v(5))) == [watch.READ]


def test_what_a_load_will_write_must_not_be_overwritten(library: Any) -> None:
    made = Machine(library)
    assert made.run(0, load(5), facts(writes=(v(5),))) == [watch.OVERWRITTEN]
    # loads of one kind write in order
    assert made.run(0, load(5), load(5)) == []
    assert made.run(0, lds_read(5, offset=512)) == [watch.OVERWRITTEN]
    assert made.run(0, scalar_load(20), scalar_load(20)) == [watch.OVERWRITTEN]


def test_a_full_counter_makes_the_next_load_wait(library: Any) -> None:
    made = Machine(library)
    assert made.run(0, load(5), *[load(6)] * 62, use(v(5))) == [watch.READ]
    assert made.run(0, wait(vm=0), load(5), *[load(6)] * 63, use(v(5))) == []


@pytest.mark.parametrize("reader_first", [False, True])
@pytest.mark.parametrize(
    ("waits", "barrier", "kinds"),
    [(True, True, set()), (True, False, {watch.NO_BARRIER}), (False, True, {watch.NO_WAIT})],
)
def test_lds_of_two_waves(library: Any, reader_first: bool, waits: bool, barrier: bool, kinds: set[int]) -> None:
    made = Machine(library, waves=2)
    steps: list[Callable[[], Any]] = [
        lambda: made.run(0, *((lds_read(),) if reader_first else (lds_write(),)), *([wait(lgkm=0)] * waits)),
        made.barrier if barrier else lambda: None,
        lambda: made.run(1, *((lds_write(),) if reader_first else (lds_read(),))),
    ]
    if reader_first:
        made.run(1, lds_write(), wait(lgkm=0))
        made.barrier()
    for step in steps:
        step()
    assert {finding.kind for finding in made.findings()} == kinds


def test_the_waves_of_a_race_are_named(library: Any) -> None:
    made = Machine(library, waves=2)
    made.run(0, lds_write())
    made.run(1, lds_read(offset=4))
    text = made.findings()[0].text
    assert "byte 4 of LDS is accessed at #2 (lane 0) and by wave 0 at #0" in text and "wave 1]" in text


def test_one_wave_needs_no_barrier_with_itself(library: Any) -> None:
    assert Machine(library).run(0, lds_write(), lds_read(), lds_write(), lds_read()) == []


def test_what_a_wave_wrote_before_the_barrier_does_not_cover_its_read_after_it(library: Any) -> None:
    made = Machine(library, waves=2)
    made.run(0, lds_write(), wait(lgkm=0))
    made.barrier()
    assert made.run(0, lds_read(), wait(lgkm=0)) == [] and made.run(1, lds_write()) == [watch.NO_BARRIER]


def test_two_waves_may_write_the_same_value_but_not_others(library: Any) -> None:
    made = Machine(library, waves=3)
    for _, registers, _ in made.files[:2]:
        registers[VALUE * 64 :][:64] = 7
    made.run(0, lds_write())
    # each of them may read it: it wrote the value too
    assert made.run(1, lds_write(), lds_read()) == [] and made.run(0, lds_read()) == []
    assert made.run(2, lds_read()) == [watch.NO_BARRIER]
    assert made.run(2, lds_write()) == [watch.NO_BARRIER]


def test_atomic_operations_of_two_waves_are_no_race(library: Any) -> None:
    made = Machine(library, waves=2)
    made.run(0, lds_write(), wait(lgkm=0))
    made.barrier()
    assert made.run(0, lds_add()) == [] and made.run(1, lds_add()) == []
    # what they leave is another matter, even for a wave that took part
    assert made.run(0, lds_read()) == [watch.NO_BARRIER]
    assert made.run(1, lds_write(), wait(lgkm=0)) == [watch.NO_BARRIER]
    made.barrier()
    assert made.run(0, lds_read(), wait(lgkm=0)) == []


def test_a_load_straight_to_lds_is_waited_for_with_vmcnt(library: Any) -> None:
    x = torch.arange(256, dtype=torch.float32)
    made = Machine(library, waves=2)
    buffer_of(made, x)
    assert made.run(0, to_lds(), wait(lgkm=0), lds_read()) == [watch.NO_WAIT]
    made = Machine(library, waves=2)
    buffer_of(made, x)
    assert made.run(0, to_lds(), wait(vm=0), lds_read()) == []
    made.run(0, to_lds())
    made.barrier()
    assert made.run(1, lds_read()) == [watch.NO_WAIT]


def test_lds_that_nothing_wrote_may_be_read_but_not_stored(library: Any) -> None:
    x = torch.zeros(64)
    made = Machine(library)
    buffer_of(made, x)
    assert made.run(0, lds_write(), lds_read(2), lds_read(3, offset=256), wait(lgkm=0), store(2)) == []
    found = made.run(0, store(3))
    assert found == [watch.STORED]
    assert "memory that nothing wrote, read at #2" in made.findings()[0].text
    # through LDS: where it comes from is kept
    assert made.run(0, lds_write(512, 3), lds_read(4, offset=512), wait(lgkm=0), store(4)) == [watch.STORED]
    assert "memory that nothing wrote, read at #2" in made.findings()[1].text


def test_registers_that_nothing_wrote(library: Any) -> None:
    x = torch.zeros(64)
    made = Machine(library)
    buffer_of(made, x)
    assert made.run(0, store(9)) == [watch.STORED]
    assert "v9, which nothing wrote" in made.findings()[0].text
    assert made.run(0, move(2, VALUE), store(2), move(2, VALUE, 9), store(2)) == [watch.STORED]
    # an address
    other = store(VALUE)
    assert made.run(0, replace(other, fields=other.fields | {"vaddr": 9})) == [watch.ADDRESS]


def test_a_selection_takes_what_is_chosen(library: Any) -> None:
    x = torch.zeros(64)
    made = Machine(library)
    buffer_of(made, x)
    made.files[0][0][30:32] = 0xFFFFFFFF, 0x7FFFFFFF
    made.watches[0].struct.scalar_unknown[30] = made.watches[0].struct.scalar_unknown[31] = 0
    chosen = move(2, 9, VALUE, flow="select", mask=[30])
    # the last lane takes the register that nothing wrote
    assert made.run(0, chosen, store(2)) == [watch.STORED] and "(lane 63)" in made.findings()[0].text
    made.files[0][0][31] = 0xFFFFFFFF
    assert made.run(0, chosen, store(2)) == []
    made.watches[0].struct.scalar_unknown[30] = 1
    assert made.run(0, chosen, store(2)) == [watch.STORED] and "(lane 0)" in made.findings()[-1].text


def test_halves_of_pairs_are_apart(library: Any) -> None:
    made = Machine(library)
    state = made.watches[0].struct.unknown
    known = {"source": [v(VALUE), v(10), -1], "words": [1, 2, 0], "target": [v(4)], "target_words": [2]}
    carries = Instruction(facts=known | {"flow": [effects.FLOW["pairs"]], "operation": [effects.PAIRS_CARRY]})
    state[10], state[11] = 0, (1 << 64) - 1
    made.run(0, carries)
    assert state[4] == 0 and state[5] != 0
    state[10], state[11] = 1, 0
    made.run(0, carries)
    assert state[4] == 1 and state[5] == 1


def test_a_bit_that_the_other_operand_decides_is_known(library: Any) -> None:
    made = Machine(library)
    s, unknown = made.files[0][0], made.watches[0].struct.scalar_unknown
    s[20], s[21] = 0b0011, 0b0101
    unknown[20], unknown[21] = 0b1100, 0

    def after(operation: str) -> int:
        code = {"code": [20, 21, -1], "source": [20, 21, -1], "words": [1, 1, 0], "target": [22], "target_words": [1]}
        number = [effects.BITS.index(operation)]
        made.run(0, Instruction(facts={"flow": [effects.FLOW["scalar"]], "operation": number, "scc": [2]} | code))
        return int(unknown[22])

    assert after("and") == 0b0100 and after("or") == 0b1000 and after("and_not") == 0b1000
    assert after("xor") == 0b1100 and after("none") == 0xFFFFFFFF
    assert made.run(0, facts(branch=[effects.BRANCH["scc"]])) == [watch.BRANCH]
    s[20] = s[21] = unknown[20] = 0
    assert after("and") == 0 and made.run(0, facts(branch=[effects.BRANCH["scc"]])) == []


def test_a_branch_on_a_mask(library: Any) -> None:
    made = Machine(library)
    s, unknown = made.files[0][0], made.watches[0].struct.scalar_unknown
    branch = facts(branch=[effects.BRANCH["vcc"]])
    # one bit that is known to be set decides
    s[effects.VCC], unknown[effects.VCC], unknown[effects.VCC + 1] = 0b10, 0b01, 0
    assert made.run(0, branch) == []
    s[effects.VCC] = 0b01
    assert made.run(0, branch) == [watch.BRANCH]


def test_rows_of_a_matrix_product_are_apart(library: Any) -> None:
    made = Machine(library)
    state = made.watches[0].struct.unknown
    for number in range(2, 12):
        state[number] = 0
    # row 3 of A: lanes 3, 19, 35 and 51 of a 16 x 16 product
    state[2] = 1 << 3
    fields = {"M": 16, "N": 16, "K": 16, "blocks": 1, "format_a": machine.F16, "format_b": machine.F16, "vdst": 8}
    fields |= dict.fromkeys(("integer", "acc_cd", "acc_a", "acc_b", "scale0", "scale1", "select0", "select1"), 0)
    known = {"source": [v(2), v(4), v(8)], "words": [2, 2, 4], "target": [v(8)], "target_words": [4]}
    made.run(0, Instruction("matrix", fields | {"s0": 2, "s1": 4, "s2": v(8), "scaled": -1}, known))
    # register r of lane l is row 4 (l / 16) + r
    assert [state[number] for number in range(8, 12)] == [0, 0, 0, 0xFFFF]


def test_only_elements_may_be_accessed(library: Any) -> None:
    x = torch.zeros(80)
    region, states = region_of(x, watch.ADDRESSABLE | watch.WRITTEN)
    # the last 16 elements are no argument's
    states[256:] = 0
    made = Machine(library, regions=(region,))
    buffer_of(made, x)
    assert made.run(0, store(VALUE)) == []
    assert made.run(0, store(VALUE, offset=4)) == [watch.BESIDE]
    assert hex(x.data_ptr() + 256) in made.findings()[0].text and "(lane 63)" in made.findings()[0].text


def test_memory_that_nothing_wrote(library: Any) -> None:
    x = torch.zeros(64)
    region, states = region_of(x, watch.ADDRESSABLE)
    made = Machine(library, regions=(region,))
    buffer_of(made, x)
    assert made.run(0, store(3, op=-1), store(3)) == [watch.STORED]
    assert (states & watch.WRITTEN).all()
    states[:] = watch.ADDRESSABLE
    # an addition leaves the value unknown, an exchange does not
    assert made.run(0, store(VALUE, op=2)) == [] and not (states & watch.WRITTEN).any()
    assert made.run(0, store(VALUE, op=0)) == [] and (states & watch.WRITTEN).all()


def test_a_guard_knows_gaps_and_what_has_no_value() -> None:
    with Uninitialised() as known:
        rows = torch.empty(2, 12)[:, :10]
        rows[0] = 1.0
        full = torch.zeros(4)
    guard = Guard([("rows", rows), ("full", full)])
    states = {region.arguments[0][0]: found for region, found in ((guard.watched(known), guard._states)[1])}
    at = guard.pointer(rows) - next(r.first for r, _ in guard._states if r.arguments[0][0] == "rows")
    row = states["rows"][at:][:96].reshape(2, 12, 4)
    assert (row[:, 10:] & watch.ADDRESSABLE == 0).all() and (row[:, :10] & watch.ADDRESSABLE).all()
    assert (row[0, :10] & watch.WRITTEN).all() and not (row[1] & watch.WRITTEN).any()
    assert (states["full"] & watch.WRITTEN).sum() == 16 * watch.WRITTEN
    assert "between the elements of argument rows" in guard.describe(guard.pointer(rows) + 44)
    # the kernel writes the second row
    row[1, :10] |= watch.WRITTEN
    guard.take_states(known)
    marks = known.written(rows)
    assert marks is not None and marks.sum() == 80


def test_pytorch_gives_values() -> None:
    with Uninitialised() as known:
        x = torch.empty(8)
        marks = known.written(x)
        assert marks is not None and not marks.any()
        x.view(2, 4)[:, 1:].copy_(torch.ones(2, 3))
        assert marks.sum() == 24 and known.written(torch.empty(3).fill_(2.0)) is not None
        assert known.written(x + 1) is None and known.written(torch.zeros(5)) is None
        # the same address with other memory
        y = torch.empty(0)
        assert known.written(y) is None
    assert elements(torch.zeros(3, 4)[::2, 1]).nonzero()[0].tolist() == [4, 5, 6, 7, 36, 37, 38, 39]


def _instruction(
    encoding: str, layout: dict[str, tuple[int, int]], values: dict[str, int], kinds: dict[str, Any]
) -> Any:
    """An object like tinygrad's with its operand table, {name: (type, registers)}, and its bytes."""
    fields = [(name, SimpleNamespace(lo=low, hi=high)) for name, (low, high) in layout.items()]
    inst = type(encoding, (), {"_fields": fields, "size": lambda self: 8})()
    inst.operands = {name: (None, None, SimpleNamespace(name=kind)) for name, (kind, _) in kinds.items()}
    inst.op_regs = {name: words for name, (_, words) in kinds.items()}
    for name, value in values.items():
        vector = kinds.get(name, ("",))[0] in ("OPR_VGPR", "OPR_VGPR_OR_ACCVGPR")
        setattr(inst, name, SimpleNamespace(offset=value + 256 * vector))
    word = sum(value << layout[name][0] for name, value in values.items())
    return inst, word.to_bytes(8, "little")


def pairs(numbers: list[int]) -> set[tuple[int, int]]:
    return {(first, count) for first, count in zip(numbers[::2], numbers[1::2], strict=True) if count}


@pytest.mark.parametrize(
    ("simm", "vm", "lgkm"), [(0xC07F, -1, 0), (0x0F70, 0, -1), (0x0070, 0, 0), (0x4F7F, 31, -1), (0xCF7F, -1, -1)]
)
def test_what_s_waitcnt_waits_for(simm: int, vm: int, lgkm: int) -> None:
    inst, raw = _instruction("SOPP", {"simm16": (0, 15)}, {"simm16": simm}, {"simm16": ("OPR_WAITCNT", 1)})
    found = effects.facts("S_WAITCNT", inst, raw)
    assert (found["vm_wait"], found["lgkm_wait"]) == ([vm], [lgkm])


MUBUF = {
    "offset": (0, 11), "offen": (12, 12), "idxen": (13, 13), "sc0": (14, 14), "lds": (16, 16), "vaddr": (32, 39),
    "vdata": (40, 47), "srsrc": (48, 52), "acc": (55, 55), "soffset": (56, 63),
}  # fmt: skip
MUBUF_KINDS = {
    "vdata": ("OPR_VGPR_OR_ACCVGPR", 4), "vaddr": ("OPR_VGPR", 1), "srsrc": ("OPR_SREG", 4),
    "soffset": ("OPR_SSRC_NOLIT", 1),
}  # fmt: skip


def test_registers_of_buffer_accesses() -> None:
    values = {"vdata": 10, "vaddr": 5, "srsrc": 2, "soffset": 128, "offen": 1}
    inst, raw = _instruction("MUBUF", MUBUF, values, MUBUF_KINDS)
    inst.srsrc.offset = 8
    found = effects.facts("BUFFER_LOAD_DWORDX4", inst, raw)
    assert pairs(found["writes"]) == {(v(10), 4)} and pairs(found["reads"]) == {(v(5), 1), (8, 4)}
    assert found["counts"] == [effects.COUNTS_VM]
    found = effects.facts("BUFFER_STORE_DWORDX4", inst, raw)
    assert pairs(found["reads"]) == {(v(10), 4), (v(5), 1), (8, 4)} and not pairs(found["writes"])
    # a load that goes straight to LDS writes no register; without offen there is no address register
    inst, raw = _instruction("MUBUF", MUBUF, values | {"lds": 1, "offen": 0}, MUBUF_KINDS)
    assert not pairs(effects.facts("BUFFER_LOAD_DWORD", inst, raw)["writes"])
    assert (v(5), 1) not in pairs(effects.facts("BUFFER_LOAD_DWORD", inst, raw)["reads"])
    inst, raw = _instruction("MUBUF", MUBUF, values | {"acc": 1}, MUBUF_KINDS)
    assert pairs(effects.facts("BUFFER_LOAD_DWORDX4", inst, raw)["writes"]) == {(effects.ACCS + 10, 4)}


def test_registers_of_vector_operations() -> None:
    layout = {"src0": (0, 8), "vsrc1": (9, 16), "vdst": (17, 24)}
    kinds = {"src0": ("OPR_SRC", 1), "vsrc1": ("OPR_VGPR", 1), "vdst": ("OPR_VGPR", 1)}
    inst, raw = _instruction("VOP2", layout, {"src0": 256 + 3, "vsrc1": 4, "vdst": 5}, kinds)
    found = effects.facts("V_FMAC_F32_E32", inst, raw)
    assert pairs(found["reads"]) == {(v(3), 1), (v(4), 1), (v(5), 1)} and pairs(found["writes"]) == {(v(5), 1)}
    # the addend is a source, not the result
    assert (v(5), 1) not in pairs(effects.facts("V_FMAMK_F32_E32", inst, raw)["reads"])
    found = effects.facts("V_CNDMASK_B32_E32", inst, raw)
    assert (effects.VCC, 2) in pairs(found["reads"]) and found["flow"] == [effects.FLOW["select"]]
    found = effects.facts("V_ADDC_CO_U32_E32", inst, raw)
    assert (effects.VCC, 2) in pairs(found["reads"]) and (effects.VCC, 2) in pairs(found["writes"])
    inst, raw = _instruction(
        "VOPC", layout, {"src0": 256 + 3, "vsrc1": 4}, {name: kinds[name] for name in ("src0", "vsrc1")}
    )
    assert pairs(effects.facts("V_CMP_GT_F32_E32", inst, raw)["writes"]) == {(effects.VCC, 2)}


def test_registers_of_scalar_operations() -> None:
    layout = {"ssrc0": (0, 7), "sdst": (16, 22)}
    kinds = {"ssrc0": ("OPR_SSRC", 2), "sdst": ("OPR_SREG", 2)}
    inst, raw = _instruction("SOP1", layout, {"ssrc0": 6, "sdst": 20}, kinds)
    found = effects.facts("S_AND_SAVEEXEC_B64", inst, raw)
    assert pairs(found["reads"]) == {(6, 2)} and pairs(found["writes"]) == {(20, 2)}
    assert found["save"] == [1] and found["operation"] == [effects.BITS.index("and")]
    assert effects.facts("S_MOV_B64", inst, raw)["scc"] == [0]


def test_fidelity_of_a_run() -> None:
    ops = {
        "V_EXP_F32_E32": 3,
        "V_MFMA_F32_32X32X8_F16": 5,
        "V_MFMA_I32_16X16X32_I8": 2,
        "S_WAITCNT": 7,
        "V_FMA_F32": 11,
    }
    found = fidelity.of(ops)
    assert found.approximate == {fidelity.TRANSCENDENTAL: 3, fidelity.SUM_ORDER: 5}
    assert (found.exact, found.no_effect) == (13, 7)
    assert fidelity.reason("GLOBAL_ATOMIC_ADD_F32") == fidelity.ATOMIC_ORDER
    assert fidelity.reason("GLOBAL_ATOMIC_ADD") is None and fidelity.reason("V_EXP_LEGACY") is None


def test_other_architectures_are_refused() -> None:
    for arch in ("gfx90a", "gfx942", "gfx950"):
        check_watched(arch)
    with pytest.raises(Unsupported, match="gfx1100, which has other wait counters"):
        check_watched("gfx1100")


# address of a lane, bytes, whether it writes -> (cycles, conflicts) of 32 and of 64 banks
BANKS: dict[str, tuple[Callable[[int], int], int, int, tuple[int, int], tuple[int, int]]] = {
    "words side by side": (lambda lane: 4 * lane, 4, 0, (2, 0), (1, 0)),
    "words written side by side": (lambda lane: 4 * lane, 4, 1, (2, 0), (2, 0)),
    "pairs of words": (lambda lane: 8 * lane, 8, 0, (4, 0), (2, 0)),
    "four words": (lambda lane: 16 * lane, 16, 0, (8, 0), (4, 0)),
    "four words written": (lambda lane: 16 * lane, 16, 1, (8, 0), (8, 0)),
    "one word for all": (lambda lane: 64, 4, 0, (2, 0), (1, 0)),
    "bytes of a word": (lambda lane: lane % 4, 1, 0, (2, 0), (1, 0)),
    # the lanes of a phase are in eight rows
    "rows of 128 bytes": (lambda lane: 128 * (lane % 8), 16, 0, (64, 56), (16, 12)),
    # a phase of 32 banks has lanes 0 to 3 and 20 to 23: in four places
    "rows of every fourth lane": (lambda lane: 128 * (lane % 4) + 64 * (lane // 4 % 2), 16, 0, (32, 24), (8, 4)),
    "every second word": (lambda lane: 8 * lane, 4, 0, (4, 2), (2, 1)),
}


@pytest.mark.parametrize("banks", [32, 64])
@pytest.mark.parametrize("name", BANKS)
def test_lanes_that_wait_for_each_others_banks_are_counted(library: Any, name: str, banks: int) -> None:
    address, size, store, of_32, of_64 = BANKS[name]
    run = Machine(library, banks=banks)
    run.files[0][1][ADDRESS * 64 :][:64] = [address(lane) for lane in range(64)]
    fields = _LDS | {"store": store, "offset0": 0, "data0": 4, "bytes": size}
    run.run(0, Instruction("lds", fields))
    assert tuple(map(int, run.served)) == (of_32 if banks == 32 else of_64)


def test_two_addresses_and_lanes_that_are_off(library: Any) -> None:
    run = Machine(library)
    run.run(0, Instruction("lds", _LDS | {"store": 0, "offset0": 0, "offset1": 256, "data0": 4, "data1": 5}))
    assert tuple(map(int, run.served)) == (4, 0)
    # lanes 32 to 63 read nothing, and take no time
    run.files[0][0][127] = 0
    run.run(0, lds_read())
    assert tuple(map(int, run.served)) == (5, 0)
