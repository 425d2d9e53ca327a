"""`wavecrest isa diff OP`: what another Triton, option or architecture does to the machine code of the same kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, Regression

if TYPE_CHECKING:
    from wavecrest.isa.compare import IsaDiffRecord, KernelDiff, Verdict
    from wavecrest.isa.facts import IsaRecord
    from wavecrest.isa.survey import OnProgress

_STYLES: dict[Verdict, str] = {
    "regression": "[red]regression[/red]",
    "watch": "[yellow]watch[/yellow]",
    "better": "[green]better[/green]",
    "changed": "[dim]changed[/dim]",
    "same": "[dim]same[/dim]",
}
# architectures of a comparison that names no other: those of the MI300 and MI350 series
ARCHS = ("gfx942", "gfx950")


def parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Variables of the environment from "NAME=VALUE".

    Raises:
        InvalidArgument: not of this form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise InvalidArgument(f"--env takes NAME=VALUE, not {text!r}")
        if name in found:
            raise InvalidArgument(f"--env names {name} twice")
        found[name] = value
    return found


def _switches(names: Sequence[str]) -> list[str]:
    for name in names:
        if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
            raise InvalidArgument(f"--llvm takes a switch, such as amdgpu-use-amdgpu-trackers, not {name!r}")
    return list(names)


def run(
    target: str | None = None,
    *,
    base: str | None = None,
    new: str | None = None,
    archs: Sequence[str] | None = None,
    new_arch: str | None = None,
    case: str | None = None,
    config: str = "shipped",
    variables: Mapping[str, str] | None = None,
    llvm: Sequence[str] = (),
    workers: int | None = None,
    save: Path | None = None,
    on_progress: OnProgress | None = None,
) -> IsaDiffRecord:
    """Compile a target's cases on two sides, and compare their machine code.

    Args:
        target: an op's name, "all", or file.py:function, see `isa.survey.cases_of`; None for that of a saved side.
        base: an interpreter, a folder that holds Triton, or a record of `wavecrest isa show --json`; None for this
            environment.
        new: the other side, named as `base` is.
        archs: names of `hardware.ARCHS`; None for those of a saved side, or `ARCHS`.
        new_arch: the other side's architecture where it differs; `archs` is one then.
        case: only the case of this name.
        config: the other side's change to the configurations, such as "num_warps=8".
        variables: of the environment that the other side is compiled in.
        llvm: switches of LLVM that the other side is compiled with.
        workers: processes; None for one a core.
        save: where the other side's record is written.
        on_progress: called after each kernel.

    Raises:
        InvalidArgument: the options do not go together, or name nothing.
        WorkloadError: the file or function cannot be loaded, or raised.
        RecordError, OutputError: a record cannot be read or written.
        MissingDependency, EnvironmentProblem: no compiler on a side.
    """
    from wavecrest import hardware
    from wavecrest.isa import compare, facts, side, survey
    from wavecrest.records import files, provenance

    override = survey.parse_override(config)
    places = {"base": side.place(base), "new": side.place(new)}
    changed = bool(override or variables or llvm or new_arch)
    if places["new"].kind == "file" and changed:
        raise InvalidArgument("--config, --env, --llvm and --new-arch change how --with is compiled; it is a record")
    if places["base"] == places["new"] and not changed:
        raise InvalidArgument(
            "both sides are the same: give --base or --with (an interpreter, a folder that holds Triton, or a record), "
            "or --config, --env, --llvm or --new-arch"
        )
    if save is not None and places["new"].kind == "file":
        raise InvalidArgument("--save writes what --with compiles; it is a record already")
    saved = [facts.load(one.path) for one in places.values() if one.kind == "file"]
    target = target or next((one.target for one in saved), None)
    if target is None:
        raise InvalidArgument("give an op, all, or file.py:function")
    names = list(archs) if archs is not None else _archs(saved)
    if new_arch is not None and len(names) != 1:
        raise InvalidArgument("--new-arch compares two architectures: give one --arch")
    if save is not None:
        files.prepare_folder(save.parent)
    common = side.Task(target=target, archs=names, case=case, workers=workers)
    changes = {
        "archs": [new_arch] if new_arch is not None else names,
        "config": override,
        "variables": dict(variables or {}),
        "llvm": _switches(llvm),
    }
    old = _limited(side.run(places["base"], common, on_progress=on_progress), names, case)
    later = side.run(places["new"], common.model_copy(update=changes), on_progress=on_progress)
    if save is not None:
        files.write_model(save, later)
    later = _limited(later, [new_arch] if new_arch is not None else names, case)
    kernels, only_base, only_new = compare.kernels(old, later)
    return compare.IsaDiffRecord(
        header=provenance.header(hardware.cpu(), evidence="compiled"),
        target=target,
        base=compare.side(old, places["base"].words),
        new=compare.side(later, places["new"].words),
        kernels=kernels,
        only_base=only_base,
        only_new=only_new,
    )


def _archs(saved: Sequence[IsaRecord]) -> list[str]:
    """The architectures that all saved sides have, or `ARCHS` if there are no saved sides."""
    if not saved:
        return list(ARCHS)
    first, *others = ([row.arch for row in one.rows] for one in saved)
    return [arch for arch in dict.fromkeys(first) if all(arch in other for other in others)]


def _limited(record: IsaRecord, archs: Sequence[str], case: str | None) -> IsaRecord:
    """A saved record with what was asked for alone; one that was compiled has nothing else."""
    rows = [row for row in record.rows if row.arch in archs and case in (None, row.case)]
    return record.model_copy(update={"rows": rows})


def _where(kernel: KernelDiff) -> str:
    arch = kernel.arch if kernel.arch == kernel.new_arch else f"{kernel.arch} → {kernel.new_arch}"
    return f"{kernel.target} {kernel.case} · {kernel.kernel} · {arch}"


def show(record: IsaDiffRecord, *, every: bool = False) -> None:
    """Print a comparison for people; `every`: with the kernels that did not change, too."""
    out = _shared.out
    out.print(f"base: {escape(record.base.words)}", soft_wrap=True, highlight=False)
    out.print(f"new:  {escape(record.new.words)}", soft_wrap=True, highlight=False)
    out.print("[dim]compiled, nothing was run[/dim]\n")
    for kernel in record.kernels:
        if kernel.verdict in ("same", "changed") and not every:
            continue
        first, *others = kernel.words
        out.print(f"[bold]{escape(_where(kernel))}[/bold]", soft_wrap=True, highlight=False)
        out.print(f"  {_STYLES[kernel.verdict]}: {escape(first)}", soft_wrap=True, highlight=False)
        for text in others:
            out.print(f"  {escape(text)}", soft_wrap=True, highlight=False)
        notes = [f"{one.fact} {one.base} → {one.new}" for one in kernel.changes if not one.text]
        if notes:
            out.print(f"  [dim]{escape('; '.join(notes))}[/dim]", soft_wrap=True, highlight=False)
        out.print()
    for names, whose in ((record.only_base, "base"), (record.only_new, "new")):
        if names:
            out.print(f"only the {whose} side has {escape(', '.join(names))}", soft_wrap=True, highlight=False)
    out.print(_summary(record), soft_wrap=True, highlight=False)


def _kernels(number: int) -> str:
    return f"{number} kernel" if number == 1 else f"{number} kernels"


def _summary(record: IsaDiffRecord) -> str:
    return (
        f"{_kernels(len(record.kernels))}: {record.count('regression')} with a regression, {record.count('watch')} to "
        f"watch, {record.count('better')} better, {record.count('changed')} changed where it does not matter, "
        f"{record.count('same')} the same"
    )


def command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="OP",
            help="An op's name, all, or file.py:function returning a dict of case name to wavecrest.isa.Launch. "
            "Default: that of a saved side.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE",
            help="The side to compare with: a Python interpreter, a folder that holds another Triton, or a record of "
            "isa show --json. Default: this environment.",
        ),
    ] = None,
    new: Annotated[
        str | None, typer.Option("--with", metavar="SIDE", help="The new side, as --base. Default: this environment.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Architectures. Default: those of a saved side, or gfx942,gfx950."),
    ] = None,
    new_arch: Annotated[
        str | None, typer.Option("--new-arch", metavar="A", help="The new side's architecture, if it differs.")
    ] = None,
    case: Annotated[str | None, typer.Option(metavar="NAME", help="Only this case.")] = None,
    config: Annotated[
        str, typer.Option(metavar="KEY=VALUE,…", help="Change the new side's configuration, such as waves_per_eu=4.")
    ] = "shipped",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Set a variable for the new side; repeat for more."),
    ] = None,
    llvm: Annotated[
        list[str] | None,
        typer.Option("--llvm", metavar="NAME", help="Turn a switch of LLVM on for the new side; repeat for more."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the new side here, to be a --base later.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the comparison here.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Return 2 for kernels to watch, too.")] = False,
    every: Annotated[bool, typer.Option("--every", help="Show kernels that did not change, too.")] = False,
    json: _shared.JsonOption = False,
) -> None:
    """Compare the machine code of the same kernels on two sides: another Triton, options, variables or architecture.

    Says for each kernel what became worse: spills in a loop, occupancy, narrower accesses, waits. Nothing is run, no
    GPU is needed. Exit code 2: a regression.
    """
    from wavecrest.records import files

    archs = None if arch is None else [name.strip() for name in arch.split(",") if name.strip()]
    if archs is not None and not archs:
        raise InvalidArgument("--arch names no architecture")
    if output is not None:
        files.prepare_folder(output.parent)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("kernels"))
    with Progress(*columns, console=_shared.err, transient=True, disable=not _shared.err.is_terminal) as progress:
        task = progress.add_task("compiling", total=None)

        def on_progress(done: int, planned: int, what: str) -> None:
            progress.update(task, description=escape(what), completed=done, total=planned)

        record = run(
            target,
            base=base,
            new=new,
            archs=archs,
            new_arch=new_arch,
            case=case,
            config=config,
            variables=parse_variables(env or []),
            llvm=llvm or [],
            save=save,
            on_progress=on_progress,
        )
    if output is not None:
        files.write_model(output, record)
    if json:
        _shared.print_json(record)
    else:
        show(record, every=every)
    for path in filter(None, (save, output)):
        _shared.err.print(f"written to {escape(str(path))}", highlight=False, soft_wrap=True)
    failed = record.count("regression") + (record.count("watch") if strict else 0)
    if failed:
        raise Regression(f"the machine code of {failed} of {_kernels(len(record.kernels))} became worse")
