"""Compare the machine code of the same kernels on two sides, and say in words what became worse.

A side is one compiler with one set of options. Only figures of the listing are compared: a regression here is a change
that makes such kernels slow, not a measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from wavecrest.errors import InvalidArgument
from wavecrest.isa.facts import IsaRecord, KernelFacts, Row, Stretch, load_as
from wavecrest.records import FORMAT_VERSION
from wavecrest.records.files import Model
from wavecrest.records.provenance import Header

# "note": a figure that differs and speaks for nothing by itself
Severity = Literal["regression", "watch", "better", "note"]
Verdict = Literal["regression", "watch", "better", "changed", "same"]
SEVERITIES: tuple[Severity, ...] = ("regression", "watch", "better", "note")
# the share of waves that is a regression if no more are left; of a smaller loss, one wave of seven, little is felt
WAVES_LEFT = 0.75
# growth of the hot loop for the same work, and of the code, that is worth a look
LOOP_GROWTH = 1.25
CODE_GROWTH = 1.5
# code below this leaves most of an instruction cache free, however much it grew
CODE_BYTES = 16 << 10
# the least loss of mean access width that is worth a look where the commonest width is as before
WIDTH_LOSS = 0.75
# the least share of bytes that accesses still move if their widths are compared
BYTES_KEPT = 0.25

Value = int | float | str | None


class Change(Model):
    """A figure that differs: its name, both values, how bad it is, and that in words ("" for a note)."""

    fact: str
    base: Value
    new: Value
    severity: Severity = "note"
    text: str = ""


class KernelDiff(Model):
    """One case on both sides; `arch` is the base's, `new_arch` the other side's.

    Verdicts: "changed" has notes alone; "same" has the same figures, with `same_code` the same instructions too.
    """

    target: str
    case: str
    kernel: str
    arch: str
    new_arch: str
    verdict: Verdict
    same_code: bool
    changes: list[Change] = Field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The changes for the worse or the better, the worst first; "no change" where there are no such changes."""
        judged = sorted(
            (change for change in self.changes if change.text), key=lambda one: SEVERITIES.index(one.severity)
        )
        if judged:
            return [change.text for change in judged]
        return ["no change" if self.verdict == "same" else "no change that matters"]


class Side(Model):
    """One side: where it comes from, its compiler, and what was changed for it."""

    source: str
    triton: str | None
    config: str
    variables: dict[str, str]
    llvm: list[str]
    header: Header

    @property
    def words(self) -> str:
        """The side in one line."""
        changes = [f"{name}={value}" for name, value in self.variables.items()]
        changes += [f"LLVM's {name}" for name in self.llvm]
        changes += [self.config] if self.config != "shipped" else []
        return ", ".join([f"triton {self.triton}", *changes, self.source])


class IsaDiffRecord(Model):
    """`wavecrest isa diff`; `only_base` and `only_new` name the kernels that one side alone has."""

    kind: Literal["isa-diff"] = "isa-diff"
    format_version: int = FORMAT_VERSION
    header: Header
    target: str
    base: Side
    new: Side
    kernels: list[KernelDiff]
    only_base: list[str] = Field(default_factory=list)
    only_new: list[str] = Field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        """The number of kernels with a verdict."""
        return sum(one.verdict == verdict for one in self.kernels)


def load(path: Path) -> IsaDiffRecord:
    """Read a record of `wavecrest isa diff`.

    Raises:
        RecordError: no such file, damaged, foreign or newer.
    """
    return load_as(path, IsaDiffRecord, "isa diff")


def side(record: IsaRecord, source: str) -> Side:
    """The description of a side.

    Args:
        record: its kernels.
        source: where they come from, in words.
    """
    chosen = dict.fromkeys(row.chosen for row in record.rows)
    return Side(
        source=source,
        triton=record.header.versions.triton,
        config=" and ".join(chosen),
        variables=record.variables,
        llvm=record.llvm,
        header=record.header,
    )


def kernels(base: IsaRecord, new: IsaRecord) -> tuple[list[KernelDiff], list[str], list[str]]:
    """Every kernel that both sides have, and the names of those that only the base and only the new side have.

    Kernels are the same by op, case and architecture; where each side has one architecture (one target), architecture
    (target) may differ.

    Raises:
        InvalidArgument: a side has a case with several configurations, or there is no kernel in common.
    """
    one_target = len({row.target for row in base.rows}) == len({row.target for row in new.rows}) == 1
    one_arch = len({row.arch for row in base.rows}) == len({row.arch for row in new.rows}) == 1

    def keyed(record: IsaRecord, name: str) -> dict[tuple[str, ...], Row]:
        found: dict[tuple[str, ...], Row] = {}
        for row in record.rows:
            key = ("" if one_target else row.target, row.case, "" if one_arch else row.arch)
            if key in found:
                raise InvalidArgument(
                    f"the {name} side has {row.target} {row.case} on {row.arch} with several configurations "
                    f"({found[key].chosen}, {row.chosen}); a side has one"
                )
            found[key] = row
        return found

    old, later = keyed(base, "base"), keyed(new, "new")
    shared = [key for key in old if key in later]
    if not shared:
        raise InvalidArgument("the two sides have no kernel in common: compare the same op, cases and architectures")
    return (
        [compare(old[key], later[key]) for key in shared],
        [_name(row) for key, row in old.items() if key not in later],
        [_name(row) for key, row in later.items() if key not in old],
    )


def _name(row: Row) -> str:
    return f"{row.target} {row.case} on {row.arch}"


def compare(base: Row, new: Row) -> KernelDiff:
    """One kernel on two sides."""
    if base.facts is None or new.facts is None:
        changes = list(_compilation(base, new))
    else:
        changes = [change for judge in _JUDGES for change in judge(base.facts, new.facts)]
    same = base.facts is not None and new.facts is not None and base.facts.code_hash == new.facts.code_hash
    return KernelDiff(
        target=new.target,
        case=new.case,
        kernel=new.kernel,
        arch=base.arch,
        new_arch=new.arch,
        verdict=_verdict(changes),
        same_code=same,
        changes=changes,
    )


def _verdict(changes: Sequence[Change]) -> Verdict:
    for severity in SEVERITIES:
        if any(change.severity == severity for change in changes):
            return "changed" if severity == "note" else severity
    return "same"


def _compilation(base: Row, new: Row) -> Iterator[Change]:
    """The change of a kernel that one side, or none, compiles."""
    before, after = base.reason or "compiles", new.reason or "compiles"
    if base.facts is not None:
        yield Change(
            fact="compiles", base=before, new=after, severity="regression", text=f"does not compile any more: {after}"
        )
    elif new.facts is not None:
        yield Change(fact="compiles", base=before, new=after, severity="better", text="compiles now")
    elif before != after:
        yield Change(fact="compiles", base=before, new=after)


def _scratch(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    """Spills: what is saved and restored in a loop costs in every pass, what is spilled once hardly does."""
    old, now = base.loop_scratch, new.loop_scratch
    worse_in_loop = old is not None and now is not None and now > old
    if old is not None and now is not None and now != old:
        appeared = "spills in a loop appeared" if not old else "more spills in a loop"
        yield Change(
            fact="scratch accesses in loops",
            base=old,
            new=now,
            severity="regression" if now > old else "better",
            text=f"{appeared if now > old else 'fewer spills in a loop'}: {old} → {now} accesses of scratch memory",
        )
    if new.scratch != base.scratch:
        words = f"{base.scratch} → {new.scratch} bytes of scratch memory a lane"
        if new.scratch < base.scratch:
            severity: Severity = "better"
            words = f"fewer spills: {words}"
        elif worse_in_loop or base.scratch:
            severity = "watch"
            words = f"more spills: {words}" if base.scratch else f"spills appeared: {words}"
        # a kernel without a loop has no place where spills are cheap; a record may not say where they are
        else:
            outside = new.loops > 0 and now == 0
            severity = "watch" if outside else "regression"
            words = f"spills appeared{' outside of the loops' if outside else ''}: {words}"
        yield Change(fact="scratch", base=base.scratch, new=new.scratch, severity=severity, text=words)


def _waves(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    # architectures differ in the most waves
    old, now = base.waves / base.most_waves, new.waves / new.most_waves
    if (base.waves, base.most_waves) == (new.waves, new.most_waves):
        return
    text = f"occupancy {base.waves:g} → {new.waves:g} waves per SIMD"
    if base.most_waves != new.most_waves:
        text = f"occupancy {base.waves:g} of {base.most_waves} → {new.waves:g} of {new.most_waves} waves per SIMD"
    if now < old:
        text += f", limited by {new.limit}" if new.limit else ""
        text = text if new.waves else f"cannot be launched: {text}"
    severity: Severity = "regression" if now <= WAVES_LEFT * old else "watch" if now < old else "note"
    severity = "better" if now > old else severity
    yield Change(
        fact="waves", base=base.waves, new=new.waves, severity=severity, text="" if severity == "note" else text
    )


def _matrix(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    """Matrix instructions in the hot loop, and in the kernel."""
    for where, old, now in (
        ("the hot loop", base.hot, new.hot),
        ("the kernel", base.kernel, new.kernel),
    ):
        if old is None or now is None or old.matrix == now.matrix:
            continue
        severity: Severity = "note"
        text = ""
        if not now.matrix:
            severity, text = "regression", f"{where} has no matrix instructions any more"
        elif not old.matrix:
            severity, text = "better", f"{where} has matrix instructions now"
        yield Change(
            fact=f"matrix instructions in {where}",
            base=_counted(old.matrix),
            new=_counted(now.matrix),
            severity=severity,
            text=text,
        )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


def _widths(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    """Access widths in the hot loop, or in the whole kernel where a side has no loop."""
    looped = base.hot is not None and new.hot is not None
    old: Stretch = base.hot if looped and base.hot is not None else base.kernel
    now: Stretch = new.hot if looped and new.hot is not None else new.kernel
    place = " in the hot loop" if looped else ""
    pairs: tuple[tuple[str, dict[int, int] | None, dict[int, int] | None, Severity], ...] = (
        ("global loads", old.loads, now.loads, "regression"),
        ("global stores", old.stores, now.stores, "regression"),
        ("LDS loads", old.lds_loads, now.lds_loads, "watch"),
        ("LDS stores", old.lds_stores, now.lds_stores, "watch"),
    )
    for what, before, after, worse in pairs:
        if before is None or after is None or before == after:
            continue
        severity, text = _width(before, after, what + place, worse)
        if what.startswith("LDS") and not looped:
            # a few for a reduction over the waves of a workgroup
            severity, text = "note", ""
        yield Change(fact=what + place, base=_accesses(before), new=_accesses(after), severity=severity, text=text)


def _width(before: Mapping[int, int], after: Mapping[int, int], what: str, worse: Severity) -> tuple[Severity, str]:
    """Whether accesses became narrower: by the width that moves most bytes, then by the mean."""
    # a width of 0 is not known; where most bytes are gone, they go another way, such as from memory into LDS
    if not before or not after or 0 in before or 0 in after or _bytes(after) < BYTES_KEPT * _bytes(before):
        return "note", ""
    old, now = _main_width(before), _main_width(after)
    if now < old:
        return worse, f"{what} narrowed from {8 * old} to {8 * now} bits"
    if now > old:
        return "better", f"{what} widened from {8 * old} to {8 * now} bits"
    if _mean_width(after) < WIDTH_LOSS * _mean_width(before):
        return "watch", f"{what} narrowed on average: {_accesses(before)} → {_accesses(after)} bytes"
    return "note", ""


def _main_width(accesses: Mapping[int, int]) -> int:
    return max(accesses, key=lambda width: (width * accesses[width], width))


def _mean_width(accesses: Mapping[int, int]) -> float:
    return _bytes(accesses) / sum(accesses.values())


def _bytes(accesses: Mapping[int, int]) -> int:
    return sum(width * number for width, number in accesses.items())


def _accesses(accesses: Mapping[int, int]) -> str:
    return " ".join(f"{number}×{width or '?'}" for width, number in sorted(accesses.items(), reverse=True)) or "none"


def _waits(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    """Waits in the hot loop: one for every load under way keeps loads from overlapping with arithmetic."""
    if base.hot is None or new.hot is None:
        return
    old, now = base.hot.drains, new.hot.drains
    if old is not None and now is not None and old != now:
        severity: Severity = "watch" if now > old else "better" if not now else "note"
        text = ""
        if severity == "watch":
            text = f"the hot loop waits for every load under way: {old} → {now} times a pass"
        elif severity == "better":
            text = "the hot loop does not wait for every load under way any more"
        yield Change(fact="full waits in the hot loop", base=old, new=now, severity=severity, text=text)
    if base.hot.waits != new.hot.waits:
        yield Change(fact="waits in the hot loop", base=base.hot.waits, new=new.hot.waits)


def _size(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    if base.hot is not None and new.hot is not None and base.hot.instructions != new.hot.instructions:
        old, now = base.hot.instructions, new.hot.instructions
        ratio = _per_work(new.hot, base.hot)
        severity: Severity = "note"
        text = ""
        if ratio is not None and not 1 / LOOP_GROWTH < ratio < LOOP_GROWTH:
            severity = "watch" if ratio > 1 else "better"
            text = f"the hot loop has {old} → {now} instructions, {ratio:.2g} times as many for the same work"
        yield Change(fact="instructions in the hot loop", base=old, new=now, severity=severity, text=text)
    if base.code_bytes != new.code_bytes:
        grown = new.code_bytes > CODE_BYTES and new.code_bytes >= CODE_GROWTH * base.code_bytes
        yield Change(
            fact="code bytes",
            base=base.code_bytes,
            new=new.code_bytes,
            severity="watch" if grown else "note",
            text=f"{base.code_bytes:,} → {new.code_bytes:,} bytes of code" if grown else "",
        )


def _per_work(new: Stretch, base: Stretch) -> float | None:
    """How many times as many instructions a loop has for the same work; None where the work cannot be told.

    Work is matrix instructions of the same kinds, or bytes loaded and stored: a loop may be unrolled otherwise.
    """
    old, now = _work(base), _work(new)
    if set(base.matrix) != set(new.matrix) or not old or not now:
        return None
    return (new.instructions / now) / (base.instructions / old)


def _work(stretch: Stretch) -> int:
    if stretch.matrix:
        return stretch.matrix_count
    return _bytes(stretch.loads) + _bytes(stretch.stores)


def _notes(base: KernelFacts, new: KernelFacts) -> Iterator[Change]:
    """Figures that speak for nothing by themselves: what they lead to is judged above."""
    figures: tuple[tuple[str, Callable[[KernelFacts], Value]], ...] = (
        ("warps", lambda facts: facts.warps),
        ("VGPR", lambda facts: facts.vgpr),
        ("AGPR", lambda facts: facts.agpr),
        ("SGPR", lambda facts: facts.sgpr),
        ("spilled registers", lambda facts: facts.spills),
        ("spilled scalar registers", lambda facts: facts.sgpr_spills),
        ("LDS bytes", lambda facts: facts.lds),
        ("loops", lambda facts: facts.loops),
        ("barriers in the hot loop", lambda facts: facts.hot.barriers if facts.hot is not None else None),
    )
    for fact, read in figures:
        old, now = read(base), read(new)
        if old != now:
            yield Change(fact=fact, base=old, new=now)


_JUDGES: tuple[Callable[[KernelFacts, KernelFacts], Iterator[Change]], ...] = (
    _scratch,
    _waves,
    _matrix,
    _widths,
    _waits,
    _size,
    _notes,
)
