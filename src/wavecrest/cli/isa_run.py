"""`wavecrest isa run TARGET`: AMD machine code executed on the CPU, of an op, a script or a test file."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from wavecrest.isa.emulate.record import CaseResult, EmulationRecord, ProgramResult, Work

_OUTCOMES = {
    "ok": "[green]ok[/green]",
    "wrong": "[red]wrong[/red]",
    "failed": "[red]failed[/red]",
    "refused": "[dim]refused[/dim]",
}


def parse_shapes(text: str | None) -> list[tuple[int, int]]:
    """Shapes from "3x1000,37x33".

    Raises:
        InvalidArgument: it has another form.
    """
    shapes = []
    for part in filter(None, (text or "").split(",")):
        match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", part)
        if match is None:
            raise InvalidArgument(f"--shapes takes rows x columns, such as 3x1000,37x33, not {part!r}")
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def run(
    target: str,
    *,
    arch: str = "gfx942",
    shapes: Sequence[tuple[int, int]] = (),
    dtypes: Sequence[str] = (),
    arguments: Sequence[str] = (),
    cuda_is_cpu: bool = False,
    check: bool = False,
    workers: int = 1,
    resident: int = 64,
    output: Path | None = None,
    on_case: Callable[[CaseResult], None] | None = None,
    kernels: bool = False,
) -> EmulationRecord | ProgramResult:
    """Run an op's kernel, a script or a test file as machine code of an AMD GPU, on the CPU.

    Args:
        target: an op's name, "all" for every op, script.py or test_x.py.
        arch: the architecture.
        shapes: (rows, columns) of an op's cases; empty for the standard ones.
        dtypes: names of dtypes.
        arguments: of the script, or for pytest.
        cuda_is_cpu: in scripts and tests, take the device "cuda" for the CPU.
        check: find missing waits and barriers and uninitialised values too.
        workers: threads; `resident`: workgroups of each that are under way at a time.
        output: where an op's record is written.
        on_case: called after each case of an op.
        kernels: run the kernels of users that are registered, in place of the ops' own.

    Raises:
        InvalidArgument: no such op, architecture or dtype, or options that do not go together.
        Unsupported: `check` on an architecture that is not CDNA.
        WorkloadError: no such file.
        OutputError: `output` cannot be written; found before anything runs.
        MissingDependency, EnvironmentProblem: no emulator here; the message says what to install.
    """
    from wavecrest.isa import run as emulation
    from wavecrest.records import files

    if workers < 1 or resident < 1:
        raise InvalidArgument("--workers and --resident take numbers of at least 1")
    options = {"check": check, "workers": workers, "resident": resident}
    if emulation.is_file(target):
        if shapes or dtypes or output is not None:
            raise InvalidArgument(f"--shapes, --dtype and --output are for ops; {target} is a file")
        return emulation.run_file(target, arch, arguments, cuda_is_cpu=cuda_is_cpu, **options)
    if arguments or cuda_is_cpu:
        raise InvalidArgument(f"arguments after -- and --cuda-is-cpu are for scripts and tests; {target} is an op")
    own = _user_kernels() if kernels else ()
    names = emulation.op_names(target, own)
    chosen = emulation.cases(shapes, dtypes) if shapes or dtypes else None
    if output is not None:
        if output.is_dir():
            raise OutputError(f"{output} is a folder; give the name of a file in it")
        files.prepare_folder(output.parent)
    record = emulation.run_ops(names, arch, chosen, on_case=on_case, kernels=own, **options)
    if output is not None:
        files.write_model(output, record)
    return record


def _user_kernels() -> tuple[tuple[str, str], ...]:
    from wavecrest.backends import user

    return tuple(user.KERNELS)


def _error(case: CaseResult) -> str:
    if case.codes is not None:
        return f"{case.codes:.2%} off"
    return "–" if case.worst is None else f"{case.worst:.1e}"


def _show_cases(record: EmulationRecord) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("case", overflow="fold", min_width=12)
    table.add_column("shape", overflow="fold")
    for title in ("dtype", "result"):
        table.add_column(title, no_wrap=True)
    for title in ("error", "groups", "instr.", "s"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = ""
    for case in record.cases:
        if case.op != shown:
            shown = case.op
            table.add_section()
            table.add_row(f"[bold]{escape(shown)}[/bold]")
        work = case.work
        count = f"{work.instructions:,}" if work.instructions < 10**6 else f"{work.instructions / 1e6:.1f} M"
        numbers = (f"{work.workgroups:,}", count, f"{work.seconds:.1f}")
        shape = case.shapes[0] if case.shapes else "–"
        table.add_row(
            escape(case.case), escape(shape), escape(case.dtype), _OUTCOMES[case.outcome], _error(case), *numbers
        )
    _shared.print_table(table)
    for case in record.cases:
        if case.reason:
            mark = _OUTCOMES[case.outcome]
            _shared.out.print(
                f"{mark} {escape(case.op)}, {escape(case.case)}: {escape(case.reason)}", soft_wrap=True, highlight=False
            )
    unguarded = sorted({f"{case.op}: {name}" for case in record.cases for name in case.work.unguarded})
    if unguarded:
        _shared.out.print(f"[dim]too large to be guarded: {escape(', '.join(unguarded))}[/dim]", soft_wrap=True)


def _fidelity(works: Sequence[Work], checked: bool) -> str:
    """How close to the hardware the instructions were, and what was looked for."""
    approximate = sum((Counter(work.approximate) for work in works), Counter())
    reasons = [f"  {count:,} {reason}" for reason, count in approximate.most_common()]
    unsupported = sorted({text for work in works for text in work.unsupported})
    cycles, lost = sum(work.lds_cycles for work in works), sum(work.lds_conflicts for work in works)
    lines = [
        f"fidelity: {sum(work.exact for work in works):,} wave instructions exact, "
        f"{approximate.total():,} approximate, "
        f"{sum(work.no_effect for work in works):,} without effect here (waits, caches), "
        f"{len(unsupported)} in code that was not reached cannot run",
        *reasons,
        *(f"  {text}" for text in unsupported),
        f"checked: waits, barriers, bounds, uninitialised values; LDS busy for {cycles:,} cycles, {lost:,} of them for "
        "conflicts of banks (model)"
        if checked
        else "not checked: missing waits, missing barriers, uninitialised values (--check)",
    ]
    return "\n".join(lines)


def _sum(work: Work) -> str:
    kernels = ", ".join(work.kernels[:4]) + (" …" if len(work.kernels) > 4 else "")
    return (
        f"{work.launches} launches of {kernels or 'no kernel'}: {work.workgroups:,} workgroups, "
        f"{work.instructions:,} wave instructions, {work.matrix_instructions:,} of them matrix, "
        f"{work.seconds:.1f} s ({work.compile_seconds:.1f} s of it compiling opcodes)"
    )


def show(result: EmulationRecord | ProgramResult) -> None:
    """Print a result for people."""
    from wavecrest.isa.emulate.record import EmulationRecord, shown_tinygrad

    out = _shared.out
    triton = result.header.versions.triton
    evidence = escape(f"emulated {result.arch} · triton {triton} · tinygrad {shown_tinygrad(result.tinygrad)}")
    if isinstance(result, EmulationRecord):
        out.print(f"[dim]{evidence}[/dim]")
        _show_cases(result)
        out.print(
            "[dim]error: the largest |difference| / max(1, |oracle|), or the share of 8-bit values one step off; "
            "groups and instr.: workgroups, and instructions of their waves[/dim]"
        )
        text = _fidelity([case.work for case in result.cases], result.checked)
        out.print(escape(text), soft_wrap=True, highlight=False)
        return
    mark = "[green]passed[/green]" if result.passed else "[red]failed[/red]"
    out.print(f"{mark} {escape(result.target)} [dim]{evidence}[/dim]", soft_wrap=True)
    if result.reason:
        out.print(escape(result.reason), soft_wrap=True)
    out.print(escape(_sum(result.work)), soft_wrap=True)
    out.print(escape(_fidelity([result.work], result.checked)), soft_wrap=True, highlight=False)


def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help='An op\'s name, "all" for every op, script.py or test_x.py.')
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="After --: for the script, or for pytest.")
    ] = None,
    arch: Annotated[str, typer.Option(help="gfx90a, gfx942, gfx950, gfx1100 or gfx1201.")] = "gfx942",
    shapes: Annotated[
        str | None,
        typer.Option(metavar="MxN,…", help="Rows and columns of an op's cases, instead of the standard ones."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME,…", help="float32, float16, bfloat16.")] = None,
    cuda_is_cpu: Annotated[
        bool, typer.Option("--cuda-is-cpu", help='For scripts and tests: take the device "cuda" for the CPU.')
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Find missing waits, missing barriers and uninitialised values too (gfx9)."),
    ] = False,
    workers: Annotated[int, typer.Option(help="Threads that run workgroups.")] = 1,
    resident: Annotated[
        int, typer.Option(help="Workgroups under way at a time; kernels may wait for others only among these.")
    ] = 64,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write an op's record here.")
    ] = None,
    kernels: _shared.KernelsOption = None,
    json: _shared.JsonOption = False,
) -> None:
    """Execute AMD machine code on the CPU, without a GPU: an op against its oracle, a script, or a test file.

    What Triton compiles for the architecture is run instruction by instruction. Accesses outside of the arguments,
    traps and unknown opcodes are errors that name the instruction. It proves function, not speed. Needs a C
    compiler and the package tinygrad; exit code 3 says what is missing, 2 that a result is wrong.
    """
    dtypes = [name.strip() for name in (dtype or "").split(",") if name.strip()]

    def on_case(case: CaseResult) -> None:
        _shared.err.print(f"[dim]{escape(case.op)}, {escape(case.case)}: {case.outcome}[/dim]")

    # with --json, a script's output must not mix with the result
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        result = run(
            target,
            arch=arch,
            shapes=parse_shapes(shapes),
            dtypes=dtypes,
            arguments=arguments or (),
            cuda_is_cpu=cuda_is_cpu,
            check=check,
            workers=workers,
            resident=resident,
            output=output,
            on_case=on_case,
            kernels=bool(kernels),
        )
    if json:
        _shared.print_json(result)
    else:
        show(result)
    if output is not None:
        _shared.err.print(f"written to {escape(str(output))}", highlight=False, soft_wrap=True)
    if not result.passed:
        raise typer.Exit(2)
