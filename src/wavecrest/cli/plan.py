"""`wavecrest plan`: show a plan, compare two, check one against this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.records.files import Model

if TYPE_CHECKING:
    from wavecrest.optimizer.plan import Plan

app = typer.Typer(no_args_is_help=True, help="Show a plan file, compare two, or check one against this machine.")

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]


class PlanDiff(Model):
    """How two plans differ: each entry is a sentence; empty lists mean that nothing differs."""

    machine: list[str]
    model: list[str]
    steps: list[str]
    environment: list[str]


class PlanCheck(Model):
    """Whether a plan applies here: "replay" as it is, "verify" again since versions differ, or "refuse"."""

    action: str
    reasons: list[str]


def run(path: Path) -> Plan:
    """Load a plan."""
    from wavecrest.optimizer.plan import Plan

    return Plan.load(path)


@app.command("show")
def show(
    plan: PlanArgument,
    all_steps: Annotated[bool, typer.Option("--all", help="Also list steps that were skipped.")] = False,
    json: _shared.JsonOption = False,
) -> int:
    """Show the steps of a plan that were tried, its machine, and the variables to set before import."""
    loaded = run(plan)
    if json:
        _shared.print_json(loaded)
        return 0
    machine, out = loaded.fingerprint, _shared.out
    out.print(f"workload  {escape(loaded.workload)}  {escape(loaded.spec or '(a model in memory)')}")
    out.print(
        f"model     {escape(loaded.model.cls)}  {loaded.model.parameters:,} parameters  {escape(loaded.model.dtype)}"
    )
    torch = f"torch {escape(machine.torch)}"
    out.print(f"machine   {escape(machine.arch)}  {escape(machine.device)}  {torch}  {escape(machine.driver)}")
    out.print(f"made      {escape(loaded.created)} by wavecrest {escape(machine.wavecrest)}")
    for bucket in loaded.buckets:
        out.print(f"bucket    {escape(bucket.name)}  {escape(_shared.shapes_line(bucket.shapes))}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "verdict", "speed-up", "why"):
        table.add_column(name, overflow="fold")
    skipped = 0
    for step in loaded.steps:
        if step.verdict == "skipped" and not all_steps:
            skipped += 1
            continue
        speed = f"{step.ratio:.3f}× {step.ci}" if step.ratio is not None else "–"
        in_force = step.id in loaded.stack or step.level == 1
        verdict = step.verdict if step.verdict != "kept" or in_force else "kept, then replaced"
        table.add_row(escape(step.title), verdict, speed, f"[dim]{escape(step.reason)}[/]")
    _shared.print_table(table)
    if skipped:
        out.print(f"[dim]{skipped} step{'' if skipped == 1 else 's'} skipped; --all lists them[/]")
    for setting in loaded.environment:
        # one line each, which a shell may take as it is: name and value are of the table, and quoted all the same
        line = f"export {shlex.quote(setting.name)}={shlex.quote(setting.value)}"
        out.print(f"{escape(line)}  [dim]# {setting.when}; {setting.ratio:.3f}×[/]", soft_wrap=True)
    if loaded.result is not None:
        # a model that is unchanged was not measured again, and phases of one process have no interval
        ci = "" if loaded.result.unit == "phases" else f" {loaded.result.ci}"
        ratio = f"  {loaded.result.ratio:.3f}×{ci}" if loaded.result.speed else ""
        out.print(f"result    {loaded.result.verdict}{ratio}")
    else:
        out.print("result    [yellow]the run was interrupted; resume it with `wavecrest optimize … --resume RUN`[/]")
    return 0


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan.json.")],
    json: _shared.JsonOption = False,
) -> int:
    """Show how two plans differ: machine, model, steps, environment."""
    found = compare(run(a), run(b))
    if json:
        _shared.print_json(found)
        return 0
    rows = [(part, line) for part, lines in found for line in lines]
    for part, line in rows:
        _shared.out.print(f"[bold]{part:<12}[/] {escape(line)}")
    if not rows:
        _shared.out.print("the plans decide the same")
    return 0


def compare(a: Plan, b: Plan) -> PlanDiff:
    """The differences from plan `a` to plan `b`."""
    model = [] if a.model == b.model else [f"{a.model.cls} {a.model.structure} → {b.model.cls} {b.model.structure}"]
    before, after = {step.id: step for step in a.steps}, {step.id: step for step in b.steps}
    steps = []
    for step_id in dict.fromkeys([*before, *after]):
        old, new = before.get(step_id), after.get(step_id)
        if old is None or new is None:
            steps.append(f"{step_id}: only in {'B' if old is None else 'A'}")
        elif old.verdict != new.verdict:
            steps.append(f"{step_id}: {old.verdict} → {new.verdict} ({new.reason})")
        elif old.verdict == "kept" and old.params != new.params:
            steps.append(f"{step_id}: kept with other parameters")
    if a.stack != b.stack:
        steps.append(f"in force: {', '.join(a.stack) or 'nothing'} → {', '.join(b.stack) or 'nothing'}")
    old_env = {row.name: row.value for row in a.environment}
    new_env = {row.name: row.value for row in b.environment}
    environment = [
        f"{name}: {old_env.get(name, 'unset')} → {new_env.get(name, 'unset')}"
        for name in dict.fromkeys([*old_env, *new_env])
        if old_env.get(name) != new_env.get(name)
    ]
    return PlanDiff(machine=a.fingerprint.differences(b.fingerprint), model=model, steps=steps, environment=environment)


@app.command("check")
def check(plan: PlanArgument, device: _shared.DeviceOption = None, json: _shared.JsonOption = False) -> int:
    """Say whether a plan applies on this machine: replay, verify again, or refuse (exit code 2)."""
    found = check_machine(run(plan), device)
    if json:
        _shared.print_json(found)
    else:
        style = {"replay": "green", "verify": "yellow", "refuse": "red"}[found.action]
        _shared.out.print(f"[{style}]{found.action}[/] {escape('; '.join(found.reasons))}")
    return 2 if found.action == "refuse" else 0


def check_machine(plan: Plan, device: str | None = None) -> PlanCheck:
    """Compare a plan's fingerprint with this machine's.

    Raises:
        PlanError: a step in force is unknown, or does not take its parameters; a dispatch row is damaged.
    """
    from wavecrest import hardware
    from wavecrest.optimizer.plan import Fingerprint
    from wavecrest.optimizer.replay import check_plan

    check_plan(plan.kept(), plan.dispatch)
    differences = plan.fingerprint.differences(Fingerprint.of(hardware.detect(device)))
    if not differences:
        return PlanCheck(action="replay", reasons=["the fingerprint is exactly this machine's"])
    action = "refuse" if any(line.startswith("arch ") for line in differences) else "verify"
    return PlanCheck(action=action, reasons=differences)
