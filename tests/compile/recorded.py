"""The record of compiled kernels: by case and architecture a key of all inputs, a hash of the machine code, its facts.

A kernel whose key is as recorded has the machine code that was recorded, and its facts are held to today's budget; so a
test run compiles what has changed, and a share of one architecture. Which share moves with every change of the record;
where the code that reads machine code has changed, it is all of that architecture.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from wavecrest import isa
from wavecrest.hardware import occupancy
from wavecrest.isa import compiler
from wavecrest.isa.facts import HotLoop, KernelFacts, Row, Stretch
from wavecrest.isa.survey import Job

FILE = Path(__file__).with_name("recorded.json")
BUDGETS = Path(__file__).parent / "budgets"
# of this architecture one kernel in SHARE of every op, and one at least, is compiled anew in every run: a record that
# is wrong would show
ALWAYS = "gfx942"
SHARE = 8
# modules of isa that compile, read and judge; the others, such as `side` for `isa diff`, take what these have made
READERS = ("__init__", "assembly", "budget", "compiler", "facts", "mca", "survey")


class Place(BaseModel):
    """One kernel: a case of an op on an architecture, with the key of what goes into it."""

    op: str
    case: str
    arch: str
    key: str


class Compiled(BaseModel):
    """Every kernel that there is, and the rows of those that were compiled."""

    places: list[Place]
    rows: list[Row]


class Kernel(NamedTuple):
    """A recorded kernel: the key of its inputs, the hash of its machine code, and the facts that budgets limit.

    `instructions` and `matrix` count those of the hot loop (0 without one), `loads` and `stores` those of the kernel.
    """

    key: str
    code: str
    spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    waves: float
    instructions: int
    matrix: int
    loads: dict[int, int]
    stores: dict[int, int]

    @classmethod
    def of(cls, key: str, facts: KernelFacts) -> Kernel:
        """The record of a compiled kernel."""
        return cls(
            key=key, code=facts.code_hash, spills=facts.spills, sgpr_spills=facts.sgpr_spills or 0,
            scratch=facts.scratch, lds=facts.lds, waves=facts.waves,
            instructions=facts.hot.instructions if facts.hot else 0, matrix=facts.hot.matrix_count if facts.hot else 0,
            loads=facts.kernel.loads, stores=facts.kernel.stores,
        )  # fmt: skip

    def facts(self) -> KernelFacts:
        """As many of the facts as were recorded; any other is an AttributeError."""
        hot = HotLoop.model_construct(instructions=self.instructions, matrix={"": self.matrix})
        return KernelFacts.model_construct(
            code_hash=self.code, spills=self.spills, sgpr_spills=self.sgpr_spills, scratch=self.scratch, lds=self.lds,
            waves=self.waves, limit="", hot=hot if self.instructions else None,
            kernel=Stretch.model_construct(loads=self.loads, stores=self.stores),
        )  # fmt: skip


class Recorded(BaseModel):
    """The record: `ops` holds the kernels by op, case and architecture; `reader` is `reader()`."""

    triton: str
    reader: str = ""
    ops: dict[str, dict[str, dict[str, Kernel]]]

    def of(self, op: str, case: str, arch: str) -> Kernel | None:
        """The kernel as recorded; None for one that was not."""
        return self.ops.get(op, {}).get(case, {}).get(arch)

    def has(self, place: Place) -> bool:
        """True if a kernel is as recorded: same compiler and key."""
        before = self.of(place.op, place.case, place.arch)
        return self.triton == version("triton") and before is not None and before.key == place.key

    def rows(self, found: Compiled) -> list[Row]:
        """A row of every kernel: as compiled, and where it was not, as recorded."""
        made = {(row.target, row.case, row.arch): row for row in found.rows}
        return [made.get((place.op, place.case, place.arch)) or self._row(place) for place in found.places]

    def _row(self, place: Place) -> Row:
        kernel = self.ops[place.op][place.case][place.arch]
        return Row.model_construct(target=place.op, case=place.case, arch=place.arch, facts=kernel.facts(), reason="")

    def needed(self, every: Sequence[Place]) -> list[bool]:
        """Whether each kernel is to be compiled: it is not as recorded, or of those of ALWAYS whose turn it is."""
        turn, whole = hashlib.sha256(self.model_dump_json().encode()).hexdigest(), self.reader != reader()
        again: set[tuple[str, str]] = set()
        for op in dict.fromkeys(place.op for place in every):
            own = [place.case for place in every if (place.op, place.arch) == (op, ALWAYS)]
            own.sort(key=lambda case: hashlib.sha256(f"{turn} {case}".encode()).hexdigest())
            again |= {(op, case) for case in (own if whole else own[: -(-len(own) // SHARE)])}
        return [not self.has(place) or (place.arch == ALWAYS and (place.op, place.case) in again) for place in every]


@cache
def version(package: str) -> str:
    """The version of an installed package: reading it takes a millisecond, and every kernel asks."""
    return metadata.version(package)


def reader() -> str:
    """A hash of the code that reads machine code and holds it to budgets: a change of it shows in any kernel."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in readers())).hexdigest()[:12]


def readers() -> list[Path]:
    """The files of `READERS`, and of waves."""
    folder = Path(isa.__file__).parent
    return [*(folder / f"{name}.py" for name in READERS), Path(occupancy.__file__)]


def hash_compiler() -> None:
    """Have Triton hash its own files, of hundreds of MB, which every compilation asks for: forks find it done."""
    from triton.runtime import cache as triton_cache

    # where a newer Triton keeps it elsewhere, each process makes its own
    getattr(triton_cache, "triton_key", lambda: None)()


def load(path: Path = FILE) -> Recorded:
    """The record of a file; an empty one if there is no file."""
    if not path.is_file():
        return Recorded(triton="", ops={})
    return Recorded.model_validate_json(path.read_text(encoding="utf-8"))


def places(work: Sequence[Job]) -> list[Place]:
    """The kernels of jobs, with their keys. In a process of its own: it changes Triton's hashes of kernels."""
    made: list[Place] = []
    for op in dict.fromkeys(job.target for job in work):
        forget_hashes()
        made += [
            Place(op=op, case=job.case, arch=job.arch, key=compiler.source_key(job.launch, job.arch))
            for job in work
            if job.target == op
        ]
    return made


def forget_hashes() -> None:
    """Have Triton hash every kernel anew, without the lines of its file at which it stands.

    Lines are of nothing that a kernel compiles to. Triton 3.6 adds a called function's constants to its caller's hash
    only if that function was hashed before, so that the hashes of one op depend on the ops before it.
    """
    for value, is_ours in _kernels(len(sys.modules)):
        value.hash, value.used_global_vals = None, {}
        if is_ours:
            value.starting_line_number = 0


@cache
def _kernels(_modules: int) -> list[tuple[Any, bool]]:
    """Functions for Triton in all modules, and whether each is in one of wavecrest's."""
    return [
        (value, name.startswith("wavecrest."))
        for name, module in list(sys.modules.items())
        for value in (list(vars(module).values()) if name.startswith(("wavecrest.", "triton.")) else ())
        if hasattr(value, "starting_line_number")
    ]


def save(record: Recorded, path: Path = FILE) -> None:
    """Write a record, a case a line, so that a change shows as the cases it touches."""
    blocks = []
    for op, cases in sorted(record.ops.items()):
        lines = [f"{json.dumps(case)}: {json.dumps(archs)}" for case, archs in sorted(cases.items())]
        blocks.append(f"{json.dumps(op)}: {{\n" + ",\n".join(lines) + "\n}")
    head = f'"triton": {json.dumps(record.triton)}, "reader": {json.dumps(record.reader)}'
    path.write_text(f'{{{head}, "ops": {{\n' + ",\n".join(blocks) + "\n}}\n", encoding="utf-8")
