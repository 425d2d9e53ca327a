"""Records of emulated runs: one file per architecture, with every case."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from wavecrest.errors import RecordError
from wavecrest.records import files, provenance

FORMAT_VERSION = 1


class Work(files.Model):
    """The emulator's work: launches, workgroups, wave instructions, and seconds.

    `exact`, `approximate` (by reason) and `no_effect` say how close to the hardware its instructions were
    (`emulate.fidelity`); all are 0 in records from before 2026-11-26. `unsupported`: instructions that cannot run, in
    code that was not reached.
    """

    launches: int = 0
    workgroups: int = 0
    instructions: int = 0
    # MFMA and WMMA among the instructions
    matrix_instructions: int = 0
    exact: int = 0
    approximate: dict[str, int] = Field(default_factory=dict)
    no_effect: int = 0
    # with --check: cycles that accesses keep LDS busy, and those of them for conflicts of banks
    lds_cycles: int = 0
    lds_conflicts: int = 0
    unsupported: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    # seconds of them spent on compiling opcodes, each at its first use
    compile_seconds: float = 0.0
    kernels: list[str] = Field(default_factory=list)
    # arguments too large to be guarded against accesses beside them
    unguarded: list[str] = Field(default_factory=list)


class CaseResult(files.Model):
    """One call of an op as machine code, against the op's oracle.

    `relative` and `worst` are the largest over all results (`numerics.Comparison`), `codes` the share of 8-bit results
    that are one step off. "refused": the kernel does not take the call on this architecture; `reason` says why, and
    names the fault of outcomes other than "ok".
    """

    op: str
    case: str
    shapes: list[str]
    dtype: str
    outcome: Literal["ok", "wrong", "failed", "refused"]
    reason: str = ""
    relative: float | None = None
    worst: float | None = None
    codes: float | None = None
    work: Work = Field(default_factory=Work)


class EmulationRecord(files.Model):
    """`wavecrest isa run OP`.

    `sources` has the hashes (`isa.sources`) of the kernels that ran, by name; none in records from before 2026-11-24.
    `checked`: with --check, so that a case with a missing wait or barrier or an uninitialised value is "failed".
    """

    kind: Literal["emulation"] = "emulation"
    format_version: int = FORMAT_VERSION
    header: provenance.Header
    arch: str
    # version of the package with AMD's pseudocode; in earlier records the commit of a checkout with an emulator
    tinygrad: str
    sources: dict[str, list[str]] = Field(default_factory=dict)
    checked: bool = False
    cases: list[CaseResult]

    @property
    def passed(self) -> bool:
        """True if at least one case ran and no result was wrong."""
        outcomes = [case.outcome for case in self.cases]
        return "ok" in outcomes and not {"wrong", "failed"} & set(outcomes)

    def stale(self, now: dict[str, list[str]]) -> dict[str, list[str]]:
        """The kernels that no longer exist as they ran, by op.

        Args:
            now: the hashes of today's kernels (`isa.sources.kernels`). A kernel may have another name since.
        """
        there = {one for hashes in now.values() for one in hashes}
        found: dict[str, set[str]] = {}
        for case in self.cases:
            gone = {name for name in case.work.kernels if not there.issuperset(self.sources.get(name, [""]))}
            found.setdefault(case.op, set()).update(gone)
        return {op: sorted(names) for op, names in found.items() if names}


class ProgramResult(files.Model):
    """`wavecrest isa run FILE`: a script or a test file whose kernels ran in the emulator."""

    kind: Literal["emulated-program"] = "emulated-program"
    format_version: int = FORMAT_VERSION
    header: provenance.Header
    arch: str
    tinygrad: str
    target: str
    checked: bool = False
    passed: bool
    reason: str = ""
    work: Work


def shown_tinygrad(version: str) -> str:
    """A version as it is, a commit by its first seven digits."""
    return version[:7] if re.fullmatch(r"[0-9a-f]{40}", version) else version


def load(path: Path) -> EmulationRecord:
    """Read a record of `wavecrest isa run OP`.

    Raises:
        RecordError: no such file, damaged, foreign or newer.
    """
    document = files.read_document(path, what="emulation record", current=FORMAT_VERSION)
    try:
        return EmulationRecord.model_validate(document)
    except pydantic.ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"the emulation record {path} is damaged: {where}: {first['msg']}") from None
